"""Read the arguments of a program: what a factory takes, and what a user typed, brought together or refused by name.

Rule 1: a factory's own signature is the only list of its arguments; defaults say the type where annotations do not.
Rule 2: an argument that is not understood is an error that names its place, what came and what can be typed instead.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from math import isfinite
from typing import Any

from zmqtrain.core.errors import ConfigError

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


def describe_arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return name -> default of every keyword argument of a factory, in its own order; `...` if it has no default."""
    return {
        name: ... if parameter.default is parameter.empty else parameter.default
        for name, parameter in _keyword_parameters(inspect.signature(factory)).items()
    }


def read_arguments(program: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments ready for `factory(**arguments)`: names checked, texts read as the type that is wanted.

    bool, int, float and str are checked (an int will do for a float, a text for any of them if it reads as one); an
    argument of another type is passed on as it came.  Raise ConfigError for an unknown name, a value of the wrong type
    and an argument that has no default and was not given.
    """
    return check_arguments(program, inspect.signature(factory), arguments)


def check_arguments(program: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `read_arguments` does, and raise what it raises, for a factory of this signature."""
    parameters = _keyword_parameters(signature)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    ready: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in parameters:
            ready[name] = _read_value(f"{PLACE}.{name}", value, _kind_of(parameters[name]))
        elif takes_any:
            ready[name] = value
        else:
            close = difflib.get_close_matches(name, parameters, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
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
