"""The walls of the house: who may import whom, and which outside words are spoken in which rooms (read with `ast`).

An import counts wherever it stands: in a function, under TYPE_CHECKING, or as `import_module("a.name")`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "zmqtrain"

FLOORS = {
    "core": ("core", 1),
    **{name: (name, 2) for name in ("protocol", "codecs", "strategies", "transport", "train", "engine", "checkpoint")},
    **{name: (name, 3) for name in ("averaging", "programs", "monitor")},
    **{name: (name, 4) for name in ("session", "records")},
    **{name: (name, 5) for name in ("planning", "collectives", "parameter_server")},
    **{name: (name, 6) for name in ("node", "broker")},
    **{name: (name, 7) for name in ("synchronous", "models", "chaos", "pipeline")},
    "sim": ("sim", 8),
    **dict.fromkeys(["cli", "page", "report", "__init__", "__main__"], ("door", 9)),
}
"""First part of a file's path: (room, floor). A file imports from lower floors and from its own room."""

PIPELINE = (
    "marks",
    "trace",
    "local_values",
    "cuts",
    "split",
    "stage",
    "stage_optimizer",
    "stage_run",
    "local",
    "coupling",
    "pipeline",
    "placement",
    "elastic",
    "pieces",
    "pipeline_node",
    "of_program",
)
"""Files of pipeline/ that trace, cut or compute a loss; its schedules and its partition are pure."""
JAX_ROOMS = (
    *("train/*", "programs/*", "codecs/*_jax.py", "sim/program.py", "synchronous/tensor.py"),
    *(f"pipeline/{name}.py" for name in PIPELINE),
)
LIVE = (
    *(f"collectives/{name}.py" for name in ("group_connection", "mesh")),
    *(f"parameter_server/{name}.py" for name in ("parameter_client", "server_connections")),
)
"""Files that have a thread, a socket or a loop, in rooms whose other files have none."""
SPOKEN_ONLY_IN = {
    "zmq": ("transport/zmq_*.py",),
    "msgpack": ("protocol/framing.py",),
    "msgspec": (
        *(f"protocol/{name}.py" for name in ("framing", "messages", "effects")),
        "broker/checkpoint.py",
        "monitor/record_files.py",
    ),
    **dict.fromkeys(["jax", "jaxlib", "optax", "flax"], JAX_ROOMS),
    "asyncio": (
        *("transport/*", "session/*", "broker/*", "monitor/*", "planning/probe.py", "chaos/services.py"),
        *("page/server.py", *LIVE),
    ),
    "numba": ("codecs/fast.py",),
    **dict.fromkeys(["pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"], ()),
}
"""Outside word: the files that may import it."""

CLOCKS = ("time", "datetime")
LIVE_CLOCKS = ("parameter_server/parameters.py", *LIVE)
PURE_ROOMS = (
    *(f"{room}/*" for room in ("protocol", "codecs", "strategies", "parameter_server")),
    "engine/graph.py",
    *(f"pipeline/{name}.py" for name in ("schedule", "costs", "partition")),
    "sim/pipeline.py",
)
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv")
ENVIRONMENT_READERS = {
    "core/launcher.py": "a service manager says there where it listens, and a launcher of jobs which rank a process has"
}
"""File that may read the environment: the reason. No setting comes from there: it comes from a flag or a file."""

BROKER = ("zmqtrain.cli.broker", "zmqtrain.broker.broker")


@dataclass(frozen=True)
class Import:
    """One import. target: the module, as far as it is known to be one.  executed: it happens when the file is imported.
    typing_only: it stands under TYPE_CHECKING."""

    file: str
    line: int
    target: str
    executed: bool
    typing_only: bool

    def breaks(self, rule: str) -> str:
        return f"{self.file}:{self.line}: imports {self.target}: {rule}"


class Tree:
    """The source files of a package, parsed; `folder` is the package, and its name the package's name."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.files = {
            path.relative_to(folder).as_posix(): ast.parse(path.read_text(), str(path))
            for path in sorted(folder.rglob("*.py"))
        }
        self.modules = {self.module_of(file): file for file in self.files}
        self.imports = {file: list(self._imports_of(file)) for file in self.files}

    def module_of(self, file: str) -> str:
        parts = file.removesuffix(".py").split("/")
        return ".".join([self.name, *(parts[:-1] if parts[-1] == "__init__" else parts)])

    def module_named(self, target: str) -> str | None:
        """Return the module of this package that `target` is, or is a name of; None if it is an outsider's."""
        while target:
            if target in self.modules:
                return target
            target = target.rpartition(".")[0]
        return None

    def all_imports(self) -> Iterator[Import]:
        for imports in self.imports.values():
            yield from imports

    def _imports_of(self, file: str) -> Iterator[Import]:
        def visit(node: ast.AST, executed: bool, typing_only: bool) -> Iterator[Import]:
            for target in self._targets(file, node):
                yield Import(file, getattr(node, "lineno", 0), target, executed and not typing_only, typing_only)
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
            for child in ast.iter_child_nodes(node):
                yield from visit(child, executed and not inside, typing_only or child in guarded)

        yield from visit(self.files[file], True, False)

    def _targets(self, file: str, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = [self.name, *file.split("/")[:-1]]
                base = ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in self.modules else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "import_module",
            "__import__",
        ):
            yield from (name.value for name in node.args[:1] if isinstance(name, ast.Constant))


def matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def place_of(file: str) -> tuple[str, int]:
    return FLOORS[file.partition("/")[0].removesuffix(".py")]


def homeless(tree: Tree) -> list[str]:
    return [
        f"{file}:1: has no floor: give it a place in FLOORS"
        for file in tree.files
        if file.partition("/")[0].removesuffix(".py") not in FLOORS
    ]


def wall_breaks(tree: Tree) -> list[str]:
    found = []
    for entry in tree.all_imports():
        if (target := tree.module_named(entry.target)) is None:
            continue
        (room, floor), (other, other_floor) = place_of(entry.file), place_of(tree.modules[target])
        if room != other and other_floor >= floor:
            rule = f"{room} (floor {floor}) may import lower floors and itself, not {other} (floor {other_floor})"
            found.append(entry.breaks(rule))
    return found


def circles(tree: Tree) -> list[str]:
    """Return one sentence per import that closes a circle; depth-first search, each module entered once."""
    found, done = [], set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        for entry in tree.imports[tree.modules[module]]:
            target = tree.module_named(entry.target)
            if target in path:
                found.append(entry.breaks("closes the circle " + " > ".join([*path[path.index(target) :], target])))
            elif target is not None and target not in done:
                visit(target, (*path, target))
        done.add(module)

    for module in tree.modules:
        if module not in done:
            visit(module, (module,))
    return found


def foreign_words(tree: Tree, word: str) -> list[str]:
    places = SPOKEN_ONLY_IN[word]
    rule = f"{word} is imported only in {', '.join(places)}" if places else f"{word} is imported nowhere"
    return [
        entry.breaks(rule)
        for entry in tree.all_imports()
        if entry.target.partition(".")[0] == word and not matches(entry.file, places)
    ]


def clocks_in_pure_rooms(tree: Tree) -> list[str]:
    rule = f"no clock in {', '.join(PURE_ROOMS)}: `now` is an argument"
    return [
        entry.breaks(rule)
        for entry in tree.all_imports()
        if entry.target.partition(".")[0] in CLOCKS
        and matches(entry.file, PURE_ROOMS)
        and entry.file not in LIVE_CLOCKS
    ]


def allowed_pickles(tree: Tree) -> list[str]:
    return [
        f"{file}:{node.value.lineno}: allow_pickle may only be False"
        for file, syntax in tree.files.items()
        for node in ast.walk(syntax)
        if isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]


def environment_reads(tree: Tree) -> list[str]:
    found = []
    for file, syntax in tree.files.items():
        for node in ast.walk(syntax):
            attribute = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
            imported = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in ENVIRONMENT for alias in node.names)
            )
            if (attribute or imported) and file not in ENVIRONMENT_READERS:
                found.append(f"{file}:{node.lineno}: reads the environment: a setting comes from a flag or a file")
    return found


def jax_within_reach(tree: Tree, start: str) -> list[str]:
    """Return the ways on which importing or running `start` reaches jax.

    What stands in functions counts too, but for two doors that only nodes open: the lazy names of an `__init__`, and
    the jax twin of a codec (called only with a jax array).
    """
    found, seen, waiting = [], set(), [(start, start)]
    while waiting:
        module, way = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if parent := module.rpartition(".")[0]:
            waiting.append((parent, f"{way} > (its package) {parent}"))
        file = tree.modules[module]
        for entry in tree.imports[file]:
            if entry.typing_only or (file.endswith("__init__.py") and not entry.executed):
                continue
            if entry.target.partition(".")[0] in ("jax", "jaxlib", "optax", "flax"):
                found.append(entry.breaks(f"the broker starts without jax; the way here: {way}"))
            target = tree.module_named(entry.target)
            is_twin = target is not None and matches(tree.modules[target], ("codecs/*_jax.py",)) and not entry.executed
            if target is not None and not is_twin:
                waiting.append((target, f"{way} > {target}"))
    return found


@pytest.fixture(scope="module")
def house() -> Tree:
    return Tree(PACKAGE)


def report(found: list[str]) -> str:
    return "\n" + "\n".join(found)


def test_every_file_has_its_floor(house: Tree) -> None:
    assert not (found := homeless(house)), report(found)


def test_a_file_imports_lower_floors_and_its_own_room_only(house: Tree) -> None:
    assert not (found := wall_breaks(house)), report(found)


def test_no_imports_go_in_circles(house: Tree) -> None:
    assert not (found := circles(house)), report(found)


@pytest.mark.parametrize("word", SPOKEN_ONLY_IN)
def test_an_outside_word_is_spoken_only_in_its_rooms(house: Tree, word: str) -> None:
    assert not (found := foreign_words(house, word)), report(found)


def test_the_pure_rooms_have_no_clock(house: Tree) -> None:
    assert not (found := clocks_in_pure_rooms(house)), report(found)


def test_no_array_is_loaded_by_pickle(house: Tree) -> None:
    assert not (found := allowed_pickles(house)), report(found)


def test_no_setting_comes_from_the_environment(house: Tree) -> None:
    assert not (found := environment_reads(house)), report(found)


def test_where_there_is_a_node_command_there_is_a_broker_command(house: Tree) -> None:
    assert "zmqtrain.cli.node" not in house.modules or set(BROKER) <= set(house.modules)


def test_the_broker_reaches_no_jax(house: Tree) -> None:
    found = [way for module in BROKER if module in house.modules for way in jax_within_reach(house, module)]
    assert not found, report(found)


def test_the_broker_is_imported_where_there_is_no_jax(house: Tree) -> None:
    program = (
        "import importlib, sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('jax', 'jaxlib', 'optax', 'flax'):\n"
        "            raise ModuleNotFoundError(f'{name} is not installed here', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
    )
    present = [module for module in BROKER if module in house.modules]
    argv = [sys.executable, "-c", program, "zmqtrain", *present]
    result = subprocess.run(argv, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# The checker can fail: each rule on a small house that breaks it.


def build(folder: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = folder / "zmqtrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in {path.parent for path in (folder / "zmqtrain").rglob("*.py")} | {folder / "zmqtrain"}:
        (package / "__init__.py").touch()
    return Tree(folder / "zmqtrain")


@pytest.mark.parametrize(
    "text",
    [
        "from zmqtrain.protocol.hub import Hub",
        "from zmqtrain import protocol",
        "from ..protocol import hub",
        "from ..protocol.hub import Hub",
        "import zmqtrain.protocol.hub",
        "def late():\n    import zmqtrain.protocol.hub",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zmqtrain.protocol.hub import Hub",
        "from importlib import import_module\nimport_module('zmqtrain.protocol.hub')",
    ],
)
def test_a_pillar_that_imports_a_pillar_is_found_however_it_is_written(tmp_path: Path, text: str) -> None:
    tree = build(tmp_path, {"codecs/base.py": text, "protocol/hub.py": ""})
    (found,) = wall_breaks(tree)
    assert found.startswith(f"codecs/base.py:{len(text.splitlines())}: ")
    assert "codecs (floor 2)" in found and "protocol (floor 2)" in found


def test_lower_floors_and_the_own_room_are_allowed_and_higher_ones_are_not(tmp_path: Path) -> None:
    good = {
        "core/types.py": "from zmqtrain.core.errors import E",
        "core/errors.py": "",
        "node/node.py": "import zmqtrain.codecs.base",
        "codecs/base.py": "from zmqtrain.codecs.more import m\nfrom zmqtrain.core.types import A",
        "codecs/more.py": "",
    }
    assert wall_breaks(build(tmp_path / "good", good)) == []
    bad = build(
        tmp_path / "bad",
        good | {"core/errors.py": "import zmqtrain.codecs.base", "planning/plan.py": "import zmqtrain.node"},
    )
    assert [line.partition(" ")[0] for line in wall_breaks(bad)] == ["core/errors.py:1:", "planning/plan.py:1:"]


def test_a_file_without_a_floor_is_found(tmp_path: Path) -> None:
    assert homeless(build(tmp_path, {"utils.py": ""})) == ["utils.py:1: has no floor: give it a place in FLOORS"]


def test_a_circle_is_found_with_its_way(tmp_path: Path) -> None:
    tree = build(
        tmp_path, {"codecs/a.py": "from . import b", "codecs/b.py": "def f():\n    from zmqtrain.codecs.a import x"}
    )
    (found,) = circles(tree)
    assert found.startswith("codecs/b.py:2: ")
    assert "zmqtrain.codecs.a > zmqtrain.codecs.b > zmqtrain.codecs.a" in found


@pytest.mark.parametrize("word", SPOKEN_ONLY_IN)
def test_a_word_in_the_wrong_room_is_found_and_in_its_own_is_not(tmp_path: Path, word: str) -> None:
    homes = [place.replace("*", "some") for place in SPOKEN_ONLY_IN[word]]
    homes = [home if home.endswith(".py") else f"{home}.py" for home in homes]
    files = {name: f"import {word}.part as p" for name in ["strategies/outer.py", *homes]}
    (found,) = foreign_words(build(tmp_path, files), word)
    assert found.startswith(f"strategies/outer.py:1: imports {word}.part: ")


def test_a_clock_in_a_pure_room_is_found_and_in_the_broker_is_not(tmp_path: Path) -> None:
    text = "x = 1\nfrom time import monotonic"
    (found,) = clocks_in_pure_rooms(build(tmp_path, {"protocol/hub.py": text, "node.py": text}))
    assert found.startswith("protocol/hub.py:2: ")


def test_a_pickled_array_and_a_read_of_the_environment_are_found(tmp_path: Path) -> None:
    tree = build(
        tmp_path,
        {
            "plan.py": "load(f, allow_pickle=True)\nload(f, allow_pickle=False)\nimport os\nos.environ['A']",
            "sim.py": "from os import getenv",
        },
    )
    assert [line.rpartition(": ")[0] for line in allowed_pickles(tree)] == ["plan.py:1"]
    assert [line.partition(" ")[0] for line in environment_reads(tree)] == ["plan.py:4:", "sim.py:1:"]


def test_jax_within_the_brokers_reach_is_found_with_its_way(tmp_path: Path) -> None:
    quiet = {
        "__init__.py": "def __getattr__(name):\n    import zmqtrain.train.loop",
        "cli/broker.py": "from zmqtrain.broker import Broker",
        "broker.py": "from zmqtrain.codecs.base import Codec",
        "codecs/base.py": "def twin():\n    import zmqtrain.codecs.sign_jax",
        "codecs/sign_jax.py": "import jax",
        "train/loop.py": "import jax",
    }
    assert jax_within_reach(build(tmp_path / "quiet", quiet), "zmqtrain.cli.broker") == []
    loud = quiet | {"broker.py": "def late():\n    import zmqtrain.train.loop"}
    (found,) = jax_within_reach(build(tmp_path / "loud", loud), "zmqtrain.cli.broker")
    assert found.startswith("train/loop.py:1: imports jax")
    assert "zmqtrain.cli.broker > zmqtrain.broker > zmqtrain.train.loop" in found
