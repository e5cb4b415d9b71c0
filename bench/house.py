"""Count the package: lines, files, long functions, wide constructors, bare callables, import circles, riddles.

    python bench/house.py [FOLDER]          # FOLDER: a checkout, by default this one

Rule 1: a line is a line of a `.py` file in zmqtrain/, blank lines and docstrings included.
Rule 2: a constructor is an `__init__`; its arguments are counted without self. The fields of a frozen value (settings,
options, a message) are not: they are read by name.
Rule 3: a bare callable is an argument of an `__init__` whose annotation says Callable, or names an alias of one.
Rule 4: riddles are the patterns at which house rules ask to look; a hit is a place to look.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

from report import print_table

RIDDLES = (
    r"on (its|their) way",
    r"take note|taken note",
    r"[Ww]hoever",
    r"[Ww]ho(se)? [a-z]+ (is|has|are) ",
    r" anew",
    r"what is told",
    r"is not (told|said)",
    r"[Ww]hat (comes|has come|is had|was had|is there)",
)
LONGEST_FUNCTION, MOST_ARGUMENTS = 80, 8


def callable_aliases(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names that stand for a Callable type, as in `Announce = Callable[[str], None]`."""
    return {
        target.id
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def main(arguments: list[str]) -> None:
    """Print the counts of a checkout."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    files = sorted((root / "zmqtrain").rglob("*.py"))
    trees = {file: ast.parse(file.read_text()) for file in files}
    long_functions, wide, callables = [], [], []
    is_callable = re.compile("|".join([r"\bCallable\b", *(rf"\b{name}\b" for name in callable_aliases(trees))]))
    for file, tree in trees.items():
        place = file.relative_to(root)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long_functions.append(f"{place}:{node.lineno} {node.name} ({lines} lines)")
                if node.name == "__init__":
                    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs][1:]
                    if len(given) > MOST_ARGUMENTS:
                        wide.append(f"{place}:{node.lineno} ({len(given)} arguments)")
                    callables += [
                        f"{place}:{node.lineno} {one.arg}"
                        for one in given
                        if one.annotation is not None and is_callable.search(ast.unparse(one.annotation))
                    ]
    texts = [*files, root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    riddles = [
        f"{file.relative_to(root)}:{number}"
        for file in texts
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for pattern in RIDDLES
        if re.search(pattern, line)
    ]
    folders = Counter(file.relative_to(root).parts[1] for file in files)
    lines_of = Counter[str]()
    for file in files:
        lines_of[file.relative_to(root).parts[1]] += len(file.read_text().splitlines())
    print_table([{"folder": name, "files": folders[name], "lines": lines_of[name]} for name in sorted(folders)])
    figures = {
        "lines": lines_of.total(),
        "files": len(files),
        f"functions over {LONGEST_FUNCTION} lines": len(long_functions),
        f"constructors over {MOST_ARGUMENTS} arguments": len(wide),
        "bare callables in constructors": len(callables),
        "riddles in zmqtrain/, docs/ and README": len(riddles),
    }
    print_table([{"count": name, "value": value} for name, value in figures.items()])
    for title, found in (("long functions", long_functions), ("wide constructors", wide), ("callables", callables)):
        print(f"{title}:", *found, sep="\n  ")
    print("riddles:", *riddles, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
