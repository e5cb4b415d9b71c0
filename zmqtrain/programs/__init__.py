"""The programs by name: those that ship with zmqtrain, and those that installed packages add.

Rule 1: a program is made by a factory that takes keyword arguments; built-in and installed programs are treated alike.
Rule 2: nothing is imported before it is asked for, so that the names can be listed where jax is not installed.
A package adds programs by the entry points of the group "zmqtrain.programs": name = "package.module:factory".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from zmqtrain.core.errors import ConfigError
from zmqtrain.programs.arguments import (
    FactorySource,
    check_arguments,
    check_image,
    check_text,
    describe_arguments,
    parse_arguments,
    read_source,
)
from zmqtrain.train.program import Program, missing_members

__all__ = [
    "ENTRY_POINT_GROUP",
    "check_program_arguments",
    "load_program",
    "parse_arguments",
    "program_arguments",
    "program_names",
    "program_source",
]

ENTRY_POINT_GROUP = "zmqtrain.programs"

BUILT_IN = {"text": "zmqtrain.programs.text:TextProgram", "image": "zmqtrain.programs.image:ImageProgram"}
CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {"text": check_text, "image": check_image}


def program_names() -> tuple[str, ...]:
    """Return the names that `load_program` knows: the built-in programs first, then the installed ones, sorted."""
    return (*BUILT_IN, *sorted(set(_installed()) - set(BUILT_IN)))


def program_arguments(name: str) -> dict[str, Any]:
    """Return argument -> default of a program, in its own order, for help texts; `...` stands for "no default".

    Raise ConfigError if there is no program of that name or it cannot be imported.
    """
    return describe_arguments(inspect.signature(_factory(name)))


def program_source(name: str) -> FactorySource | None:
    """Return what the source of an installed program says of it, without importing it; None if that is not known."""
    installed = {} if name in BUILT_IN else _installed()
    place = BUILT_IN.get(name) or (installed[name].value if name in installed else "")
    return read_source(place)


def check_program_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a program as far as that goes without importing it and without its data.

    Raises ConfigError, with the place and the choices, as `load_program`.
    """
    if (source := program_source(name)) is None:
        return
    ready = check_arguments(name, source.signature, arguments)
    if (check := CHECKS.get(name)) is not None:
        defaults = {key: one.default for key, one in source.signature.parameters.items()}
        check(defaults | ready)


def load_program(name: str, arguments: Mapping[str, Any] | None = None) -> Program:
    """Make the program of that name with these arguments (int, float, bool, str, or texts that read as them).

    Raise ConfigError, with the place and the choices, for an unknown name, for an unknown, ill-typed or impossible
    argument, and for an installed factory that gives no `Program`; DataError if the program's data cannot be read.
    """
    factory = _factory(name)
    program = factory(**check_arguments(name, inspect.signature(factory), arguments or {}))
    if missing := missing_members(program):
        raise ConfigError(
            f"program = {name!r}: {_described(factory)} gave a {type(program).__name__}, which is no program: it has "
            f"no {', '.join(missing)} (see zmqtrain.train.program.Program)"
        )
    return program  # type: ignore[no-any-return]


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _factory(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
    installed = _installed()
    if name not in installed:
        raise ConfigError(
            f"program = {name!r}: there is no such program; the choices are {', '.join(program_names())} (an installed "
            f"package adds its own by an entry point in the group {ENTRY_POINT_GROUP})"
        )
    point = installed[name]
    try:
        factory = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"program = {name!r}: {point.value} of an installed package does not load: {error}"
        ) from error
    if not callable(factory):
        raise ConfigError(f"program = {name!r}: {point.value} is a {type(factory).__name__}, not a factory")
    return factory  # type: ignore[no-any-return]


def _described(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}:{getattr(factory, '__qualname__', repr(factory))}"
