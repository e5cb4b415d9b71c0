"""Read which arguments a program's factory takes from its source, without importing it: importing would load jax.

Rule: what cannot be read so (a factory made at run time, a package without sources) is not known; nobody guesses.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FactorySource:
    """A factory as its source describes it. signature: of the call, annotations as texts."""

    signature: inspect.Signature
    documentation: str


def read_source(place: str) -> FactorySource | None:
    """Return what the source says of the factory at "package.module:name"; None if that cannot be read.

    Imports nothing. A dataclass is called with its fields, another class with the arguments of its `__init__`.
    """
    module, _, name = place.partition(":")
    try:
        tree = ast.parse(_file_of(module).read_text("utf-8"))
        constants = _constants(tree)
        found = next(
            node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        )
        if isinstance(found, ast.FunctionDef):
            parameters = [] if found.decorator_list else _of_function(found, constants)
            known = not found.decorator_list
        else:
            parameters, known = _of_class(found, constants)
        return FactorySource(inspect.Signature(parameters), ast.get_docstring(found) or "") if known else None
    except (OSError, ImportError, AttributeError, StopIteration, SyntaxError, ValueError):
        return None


def _file_of(module: str) -> Path:
    """Return the source file of a module; only the folder of its outermost package is asked of the import system."""
    outermost, *inner = module.split(".")
    spec = find_spec(outermost)
    if spec is None or (not inner and not spec.origin):
        raise ImportError(module)
    if not inner:
        return Path(str(spec.origin))
    for folder in spec.submodule_search_locations or ():
        place = Path(folder).joinpath(*inner)
        for file in (place.with_name(place.name + ".py"), place / "__init__.py"):
            if file.is_file():
                return file
    raise ImportError(module)


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that the module gives to literals."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def _of_function(function: ast.FunctionDef, constants: dict[str, Any], skip: int = 0) -> list[inspect.Parameter]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    pairs = [(one, arguments.defaults[at - without] if at >= without else None) for at, one in enumerate(positional)]
    pairs = pairs[skip:] + list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    parameters = [_parameter(one.arg, one.annotation, default, constants) for one, default in pairs]
    if arguments.kwarg is not None:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return parameters


def _of_class(found: ast.ClassDef, constants: dict[str, Any]) -> tuple[list[inspect.Parameter], bool]:
    """Return the parameters, and whether these are all: a class that inherits may have more."""
    made = next((one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if made is not None:
        return _of_function(made, constants, skip=1), True
    names = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in found.decorator_list}
    if found.bases or not names & {"dataclass", "dataclasses.dataclass"}:
        return [], False
    parameters = []
    for one in found.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        default, call = one.value, one.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("field", "dataclasses.field"):
            said = {keyword.arg: keyword.value for keyword in call.keywords}
            if "init" in said and ast.unparse(said["init"]) == "False":
                continue
            default = said.get("default", said.get("default_factory"))
        parameters.append(_parameter(one.target.id, one.annotation, default, constants))
    return parameters, True


def _parameter(
    name: str, annotation: ast.expr | None, default: ast.expr | None, constants: dict[str, Any]
) -> inspect.Parameter:
    kind: Any = inspect.Parameter.empty if annotation is None else ast.unparse(annotation)
    value: Any = inspect.Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = constants.get(ast.unparse(default), ast.unparse(default))
            kind = "?" if annotation is None else kind  # what its type is, only the program knows
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kind)
