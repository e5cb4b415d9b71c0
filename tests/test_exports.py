"""Every module says what it is for and what it offers; nothing public is hidden, nothing offered is missing."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "zmqtrain"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# A __main__ is a program: it is run, not imported, and offers nothing.
MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__main__.py"}

each_module = pytest.mark.parametrize("name", MODULES)


def public_definitions(name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Return the functions and classes defined at the top of a module whose name has no leading underscore."""
    syntax = ast.parse(MODULES[name].read_text())
    return [node for node in syntax.body if isinstance(node, DEFINITIONS) and not node.name.startswith("_")]


@each_module
def test_a_module_says_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[name].read_text())), f"{MODULES[name]}:1: has no docstring"


@each_module
def test_all_names_what_exists_once(name: str) -> None:
    module = importlib.import_module(name)
    assert hasattr(module, "__all__"), f"{MODULES[name]}:1: has no __all__"
    assert len(set(module.__all__)) == len(module.__all__), f"{MODULES[name]}: __all__ names something twice"
    missing = [offered for offered in module.__all__ if not hasattr(module, offered)]
    assert not missing, f"{MODULES[name]}: __all__ names what is not there: {missing}"


@each_module
def test_what_is_public_is_offered(name: str) -> None:
    offered = getattr(importlib.import_module(name), "__all__", [])
    hidden = [
        f"{MODULES[name]}:{node.lineno}: {node.name}" for node in public_definitions(name) if node.name not in offered
    ]
    assert not hidden, "neither in __all__ nor with a leading underscore:\n" + "\n".join(hidden)


@each_module
def test_what_is_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    silent = []
    for node in public_definitions(name):
        if not ast.get_docstring(node):
            silent.append(f"{MODULES[name]}:{node.lineno}: {node.name}")
        if isinstance(node, ast.ClassDef):
            built = getattr(module, node.name)
            silent += [
                f"{MODULES[name]}:{method.lineno}: {node.name}.{method.name}"
                for method in node.body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                and not method.name.startswith("_")
                and not inspect.getdoc(inspect.getattr_static(built, method.name))
            ]
    assert not silent, "no docstring:\n" + "\n".join(silent)


def test_importing_the_package_loads_no_jax() -> None:
    program = "import sys, zmqtrain; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    argv = [sys.executable, "-c", program]
    loaded = subprocess.run(argv, cwd=PACKAGE.parent, capture_output=True, text=True, check=True).stdout.split()
    assert "zmqtrain" in loaded
    assert not {"jax", "jaxlib", "optax", "flax"} & set(loaded)
