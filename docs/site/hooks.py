"""What mkdocs does to the pages, which are written as GitHub shows them.

README.md is the site's first page, though it lies outside of docs/. A list may follow a paragraph's line directly, and
what belongs to an item is indented by two columns; Python's Markdown wants an empty line and four.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

FIRST_PAGE = "index.md"
WORKER = "assets/javascripts/iframe-worker.js"
REFERENCE = "reference/python.md"
README = Path(__file__).parents[2] / "README.md"
PACKAGE = README.with_name("zmqtrain")
INTO_DOCS = re.compile(r"\]\(docs/")
TO_README = re.compile(r"\]\((?:\.\./)+README\.md(?=[)#])")
ITEM = re.compile(r" *(?:[-*+]|\d+\.) ")
FENCE = "```"


def on_config(config: Any, **kwargs: Any) -> Any:
    """Put the pages that the navigation does not name under More, so that no page is lost."""
    named = re.findall(r"[\w/.-]+\.md", repr(config.nav))
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    if more := [page for page in pages if page not in named]:
        config.nav.append({"More": more})
    return config


def on_files(files: Any, config: Any, **kwargs: Any) -> Any:
    """Add README.md as the first page, with its links as from docs/; and the script of a search from a disk."""
    files.append(File.generated(config, FIRST_PAGE, content=INTO_DOCS.sub("](", README.read_text("utf-8"))))
    files.append(File.generated(config, WORKER, abs_src_path=str(Path(__file__).with_name("frame_worker.js"))))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Have links to README.md lead to the first page, lists be those of GitHub, and the reference be whole."""
    if page.file.src_uri == REFERENCE and (others := [name for name in public_names() if name not in markdown]):
        markdown += "\n## Others\n\n" + "".join(f"::: {name}\n" for name in others)
    first = posixpath.relpath(FIRST_PAGE, posixpath.dirname(page.file.src_uri) or ".")
    return "\n".join(with_wide_lists(TO_README.sub(f"]({first}", markdown).splitlines()))


def public_names() -> list[str]:
    """Return the public names of the package, read and not imported."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [f"zmqtrain.{name}" for name in ast.literal_eval(node.value) if not name.startswith("__")]
    raise ValueError("zmqtrain has no __all__")


def with_wide_lists(lines: list[str]) -> list[str]:
    """Return the lines of a page with an empty line before each list, and the indentation in it doubled."""
    wide: list[str] = []
    in_list = in_code = is_apart = False  # is_apart: a paragraph of an item, after an empty line
    shift = 0  # of the lines of a block of code
    for line in lines:
        if in_code:
            wide.append(" " * shift + line)
            in_code = not line.strip().startswith(FENCE)
            continue
        before = wide[-1] if wide else ""
        is_item = ITEM.match(line) is not None and (in_list or not line.startswith(" "))
        if is_item and before.strip() and (not in_list or is_apart):
            wide.append("")
        elif line.strip() and not line.startswith(" ") and not before.strip() and not is_item:
            in_list = False
        in_list = in_list or is_item
        is_apart = not is_item and (is_apart or not before.strip())
        indentation = len(line) - len(line.lstrip())
        shift = indentation // 2 * 4 - indentation if in_list else 0
        wide.append(" " * (indentation + shift) + line.lstrip() if indentation else line)
        in_code = line.strip().startswith(FENCE)
    return wide
