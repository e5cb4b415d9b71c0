"""The arguments of a program: what its factory takes, what a user typed, and which values the built-in ones allow.

Rule 1: a factory's own signature is the only list of its arguments; defaults say the type where annotations do not.
Rule 2: an argument that is not understood is an error that names its place, what came and what can be typed instead.
Rule 3: nothing here reaches jax: the broker, where these arguments are typed, checks them too. It reads a factory's
signature from its source, because importing it would load jax; what cannot be read so (a factory made at run time, a
package without sources) is not known, and nobody guesses.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import did_you_mean

PLACE = "program_arguments"
"""The table of the settings, and the flag of the command line, under which a user finds these arguments."""

MOST = 10**6
"""The most that an argument can be which says nothing else."""
MOST_SEED = (1 << 63) - 1
MOST_VALUES = 1 << 33
"""As the hub takes them."""

KINDS: dict[object, type] = {kind: kind for kind in (bool, int, float, str)} | {
    kind.__name__: kind for kind in (bool, int, float, str)
}
KIND_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}


def parse_arguments(text: str) -> dict[str, str]:
    """Return the arguments of the command line's form "width=128,layers=2", as texts; "" gives none.

    Raise ConfigError for a part without "=" or without a name, and for a name that comes twice.
    """
    arguments: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not name or not equals:
            raise ConfigError(f"{PLACE}: {part!r} is no argument; write name=value, as in width=128,layers=2")
        if name in arguments:
            raise ConfigError(f"{PLACE}.{name} is given twice, as {arguments[name]!r} and as {value!r}")
        arguments[name] = value
    return arguments


def describe_arguments(signature: inspect.Signature) -> dict[str, Any]:
    """Return name -> default of every keyword argument of a factory, in its own order; `...` if it has no default."""
    return {
        name: ... if parameter.default is parameter.empty else parameter.default
        for name, parameter in _keyword_parameters(signature).items()
    }


def check_arguments(program: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments ready for `factory(**arguments)`: names checked, texts read as the type that is wanted.

    bool, int, float and str are checked (an int will do for a float, a text for any of them if it reads as one); an
    argument of another type is passed on as it came.  Raise ConfigError for an unknown name, a value of the wrong type
    and an argument that has no default and was not given.
    """
    parameters = _keyword_parameters(signature)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    ready: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in parameters:
            ready[name] = _read_value(f"{PLACE}.{name}", value, _kind_of(parameters[name]))
        elif takes_any:
            ready[name] = value
        else:
            hint = did_you_mean(name, parameters)
            raise ConfigError(
                f"{PLACE}.{name}: the program {program!r} has no such argument{hint}; it takes {_list(parameters)}"
            )
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in ready:
            raise ConfigError(
                f"{PLACE}.{name}: the program {program!r} needs this argument; it takes {_list(parameters)}"
            )
    return ready


def require_at_least(name: str, value: float, minimum: float, maximum: int = MOST) -> None:
    """Raise ConfigError, naming the argument's place, unless minimum <= value <= maximum."""
    if not value >= minimum:
        raise ConfigError(f"{PLACE}.{name} must be at least {minimum:g}, got {value}")
    if value > maximum:
        raise ConfigError(f"{PLACE}.{name} must be at most {maximum:,}, got {value}")


def require_trainable(values: int, names: str) -> None:
    """Raise ConfigError, naming the arguments that say so, for a model of so many values that nobody can train it."""
    if values > MOST_VALUES:
        raise ConfigError(f"{PLACE}: {names} make a model of {values:,} values; at most {MOST_VALUES:,} can be trained")


def require_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ConfigError, naming the argument's place, unless value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{PLACE}.{name} must be one of {', '.join(choices)}, got {value!r}")


def _keyword_parameters(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: found for name, found in signature.parameters.items() if found.kind in kinds}


def _kind_of(parameter: inspect.Parameter) -> type | None:
    """The annotation says the type (as a type or as its name), or else the default does; None if neither is simple."""
    if isinstance(parameter.annotation, str | type) and parameter.annotation in KINDS:
        return KINDS[parameter.annotation]
    if parameter.annotation is parameter.empty:
        return KINDS.get(type(parameter.default))
    return None


def _list(parameters: Mapping[str, inspect.Parameter]) -> str:
    if not parameters:
        return "none"
    return ", ".join(name if one.default is one.empty else f"{name}={one.default}" for name, one in parameters.items())


def _read_value(place: str, value: Any, kind: type | None) -> Any:
    if kind is None:
        return value
    if kind is bool and isinstance(value, str):
        wanted: Any = {"true": True, "false": False}.get(value.strip().lower())
    elif kind in (int, float) and isinstance(value, str):
        try:
            wanted = kind(value)
        except ValueError:
            wanted = None
    elif isinstance(value, bool) and kind is not bool:
        wanted = None
    elif kind is float and isinstance(value, int | float):
        wanted = float(value)
    else:
        wanted = value if isinstance(value, kind) else None
    if wanted is None or (kind is float and not isfinite(wanted)):
        raise ConfigError(f"{place} must be {KIND_WORDS[kind]}, got {value!r}")
    return wanted


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
        if isinstance(found, ast.ClassDef):
            parameters = _of_class(found, constants)
        elif found.decorator_list:  # which may give it other arguments
            return None
        else:
            parameters = _of_function(found, constants)
        return FactorySource(inspect.Signature(parameters), ast.get_docstring(found) or "")
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


def _of_class(found: ast.ClassDef, constants: dict[str, Any]) -> list[inspect.Parameter]:
    """Return the parameters. Raises ValueError if these are not all: a class that inherits may have more."""
    made = next((one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if made is not None:
        return _of_function(made, constants, skip=1)
    names = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in found.decorator_list}
    if found.bases or not names & {"dataclass", "dataclasses.dataclass"}:
        raise ValueError(found.name)
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
    return parameters


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


BYTES = 256
OPTIMIZERS = ("adamw", "muon")
MOST_RATE = 10**9


SIZE, RATE, SEED = (1, MOST), (0, MOST_RATE), (0, MOST_SEED)
TEXT_LIMITS: dict[str, tuple[float, int]] = {
    **dict.fromkeys(("width", "layers", "heads", "context", "batch", "batches_per_unit"), SIZE),
    **dict.fromkeys(("rate", "warmup", "weight_decay"), RATE),
    "seed": SEED,
    "clip": (0.0, MOST),
}
IMAGE_LIMITS: dict[str, tuple[float, int]] = {
    **dict.fromkeys(("width", "batch", "batches_per_unit"), SIZE),
    **dict.fromkeys(("rate", "weight_decay"), RATE),
    "seed": SEED,
}
"""By argument the least and the most."""


def check_text(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming its place, for an argument of the text program that cannot be."""
    _check_limits(arguments, TEXT_LIMITS)
    width, layers, heads = (arguments[name] for name in ("width", "layers", "heads"))
    require_at_least("layers", layers, 1, 9999)
    values = layers * (12 * width + 2) * width + (2 - arguments["tied"]) * BYTES * width + width
    require_trainable(values, f"width={width} and layers={layers}")
    require_choice("inner_optimizer", arguments["inner_optimizer"], OPTIMIZERS)
    if width % (2 * heads):
        raise ConfigError(
            f"{PLACE}.width must be a multiple of twice the heads (2 x {heads}, for the rotary positions), got {width}"
        )


def check_image(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming its place, for an argument of the image program that cannot be."""
    _check_limits(arguments, IMAGE_LIMITS)


def _check_limits(arguments: Mapping[str, Any], limits: Mapping[str, tuple[float, int]]) -> None:
    for name, (least, most) in limits.items():
        require_at_least(name, arguments[name], least, most)
