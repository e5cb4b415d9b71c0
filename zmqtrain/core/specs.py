"""Read and write the short texts that name a thing and its numbers: `ternary:block=128`, `sgd:rate=0.8`.

Rule 1: a text is `name` or `name:argument=number,...`; an argument that is left out takes its default.
Rule 2: `format_spec` writes every argument, in the family's order: the canonical text, which parses to itself.
Rule 3: a text that cannot be read is a ConfigError that quotes the place and lists the choices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite

from zmqtrain.core.errors import ConfigError

Number = int | float

Families = Mapping[str, Mapping[str, Number]]
"""Per name its arguments with their defaults; the default's type (int or float) is the argument's type."""


def parse_spec(text: str, families: Families) -> tuple[str, dict[str, Number]]:
    """Return (name, all its arguments in the family's order, the defaults filled in).

    An int argument takes whole numbers only; a float argument takes any finite number.
    Raises ConfigError: an unknown name or argument, one given twice, a value that is no such number, stray text.
    """
    name, colon, rest = text.partition(":")
    if name not in families:
        wrong = f"there is no {name!r}" if name else "no name stands there"
        raise ConfigError(f"{text!r}: {wrong}; choose one of {_choices(families)}")
    arguments = dict(families[name])
    if not colon:
        return name, arguments
    seen: set[str] = set()
    for piece in rest.split(","):
        argument, equals, value = piece.partition("=")
        if argument not in arguments or not equals:
            known = ", ".join(f"{key}={_write(default)}" for key, default in families[name].items()) or "no arguments"
            wrong = f"cannot read {piece!r}" if piece else "nothing stands where an argument should"
            raise ConfigError(f"{text!r}: {wrong}; {name} takes {known}")
        if argument in seen:
            raise ConfigError(f"{text!r}: {argument} is given twice; leave one out")
        seen.add(argument)
        arguments[argument] = _read(text, piece, value, arguments[argument])
    return name, arguments


def format_spec(name: str, arguments: Mapping[str, Number]) -> str:
    """Return the canonical text: `parse_spec` gives back the same name and arguments."""
    written = ",".join(f"{argument}={_write(value)}" for argument, value in arguments.items())
    return f"{name}:{written}" if written else name


def split_argument(text: str, argument: str) -> tuple[str, int | None]:
    """Take one whole-number argument out of a text: return (the text without it, its value or None if it is not there).

    It is looked for in the last member of the first chain ("a+b;c": in b), where an argument for all of it stands:
    "ternary:block=128,fragments=8" and "fragments" give ("ternary:block=128", 8). Raises ConfigError: no whole number.
    """
    chain, semicolon, rest = text.partition(";")
    start = max((mark.end() for mark in re.finditer(r"\+(?=[a-z])", chain)), default=0)
    found = re.compile(rf"[:,]{argument}=([^,]*)").search(chain, start)
    if found is None:
        return text, None
    value = int(_read(text, found[0][1:], found[1], 1))
    before, after = chain[: found.start()], chain[found.end() :]
    if found[0].startswith(":") and after.startswith(","):
        after = ":" + after[1:]
    return before + after + semicolon + rest, value


def _read(text: str, piece: str, value: str, default: Number) -> Number:
    kind = "a whole number, as 2" if isinstance(default, int) else "a finite number, as 0.5"
    try:
        if not re.fullmatch(r"[0-9.eE+-]+", value):
            raise ValueError(value)
        number: Number = int(value) if isinstance(default, int) else float(value)
    except ValueError:
        raise ConfigError(f"{text!r}: {value!r} in {piece!r} is not {kind}") from None
    if isinstance(number, float) and not isfinite(number):
        raise ConfigError(f"{text!r}: {value!r} in {piece!r} is not {kind}")
    return number


def _write(number: Number) -> str:
    written = repr(number)
    return written.removesuffix(".0")


def _choices(families: Families) -> str:
    return ", ".join(format_spec(name, arguments) for name, arguments in families.items())
