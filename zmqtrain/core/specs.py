"""Texts that people type: specs (`ternary:block=128`) and quantities ("100M" parameters, "6GB", "1gbit", "5min").

Rule 1: a spec is `name` or `name:argument=number,...`; an argument that is left out takes its default; `format_spec`
writes every argument, in the family's order: the canonical text, which parses to itself.
Rule 2: prefixes of quantities are powers of 1000, as links and cards are sold; memory needs a unit, because to most
people a 6 is a card's gigabytes.
Rule 3: a text that cannot be read is a ConfigError that quotes the place and shows how it is written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from math import inf, isfinite
from typing import Generic, TypeVar

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
        wrong = f"there is no {name!r}{did_you_mean(name, families)}" if name else "no name stands there"
        raise ConfigError(f"{text!r}: {wrong}; choose one of {_choices(families)}")
    arguments = dict(families[name])
    if not colon:
        return name, arguments
    seen: set[str] = set()
    for piece in rest.split(","):
        argument, equals, value = piece.partition("=")
        if argument not in arguments or not equals:
            known = ", ".join(f"{key}={_write(default)}" for key, default in families[name].items()) or "no arguments"
            meant = did_you_mean(argument, arguments) if argument not in arguments else ""
            wrong = f"cannot read {piece!r}{meant}" if piece else "nothing stands where an argument should"
            raise ConfigError(f"{text!r}: {wrong}; {name} takes {known}")
        if argument in seen:
            raise ConfigError(f"{text!r}: {argument} is given twice; leave one out")
        seen.add(argument)
        arguments[argument] = _read(text, piece, value, arguments[argument])
    return name, arguments


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with the closest of the known names, "" if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def format_spec(name: str, arguments: Mapping[str, Number]) -> str:
    """Return the canonical text: `parse_spec` gives back the same name and arguments."""
    written = ",".join(f"{argument}={_write(value)}" for argument, value in arguments.items())
    return f"{name}:{written}" if written else name


def defaults_of(factory: Callable[..., object]) -> dict[str, Number]:
    """Return the arguments of a factory that have a default: those that a spec may give."""
    parameters = signature(factory).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


@dataclass(frozen=True, slots=True)
class Range:
    """What an argument may be: least <= value <= most; without the ends where `above` and `below` say so."""

    least: float
    most: float = inf
    above: bool = False
    below: bool = False

    def check(self, text: str, argument: str, value: Number) -> None:
        """Raise ConfigError, quoting the spec, for a value outside."""
        high = value < self.most if self.below else value <= self.most
        if high and (value > self.least if self.above else value >= self.least):
            return
        if self.most == inf:
            kind = "more than" if self.above else "at least"
            raise ConfigError(f"{text!r}: {argument}={value:g} is not {kind} {self.least:g}")
        low = f"{self.least:g} {'<' if self.above else '<='}"
        raise ConfigError(
            f"{text!r}: {argument}={value:g} is not in {low} {argument} {'<' if self.below else '<='} {self.most:g}"
        )


Made = TypeVar("Made")


@dataclass(frozen=True)
class Family(Generic[Made]):
    """Rules of one kind. factories: by name; their signatures say the arguments and defaults.  limits: by argument."""

    factories: Mapping[str, Callable[..., Made]]
    limits: Mapping[str, Range] = field(default_factory=dict)
    _made: dict[str, Made] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def defaults(self) -> Families:
        """The arguments of each rule with their defaults."""
        return {name: defaults_of(factory) for name, factory in self.factories.items()}

    def from_spec(self, text: str) -> Made:
        """Return the rule of a spec; an argument that is left out takes its default. Equal specs give the same object.

        Raises ConfigError: an unknown name or argument, or an argument outside its limits.
        """
        name, arguments = parse_spec(text, self.defaults)
        for argument, value in arguments.items():
            if argument in self.limits:
                self.limits[argument].check(text, argument, value)
        canonical = format_spec(name, arguments)
        if canonical not in self._made:
            self._made.setdefault(canonical, self.factories[name](**arguments))
        return self._made[canonical]


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


_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*"


def require_kind(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    """Raise ConfigError, naming what it is and how it is written, unless a caller's value is of one of these kinds."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(f"{name} is written like {example}, not {value!r} (of type {type(value).__name__})")


def parse_count(text: str, name: str = "a count") -> int:
    """Return how many "100M", "1.3B" or "25e6" is. Raises ConfigError, naming what it is, unless it is 1 or more."""
    return _quantity(text, rf"{_NUMBER}([kmgbt]?)", f"{name} is written like 100M, 1.3B or 25000000, not {text!r}")


def parse_bytes(text: str, name: str = "an amount of memory") -> int:
    """Return the bytes of "6GB", "512 MB" or "2e9". Raises ConfigError, naming what it is, unless it is 1 or more, and
    for a number under a million that has no unit."""
    wrong = f"{name} is written like 6GB, 512MB or 2e9, not {text!r}"
    value = _quantity(text, rf"{_NUMBER}([kmgt]?)b?", wrong)
    if value < 10**6 and not re.search("[kmgtb]", text.lower()):
        raise ConfigError(f"{wrong}: that would be {text.strip()} bytes; {text.strip()}GB?")
    return value


def parse_rate(text: str, name: str = "a link's rate") -> int:
    """Return the bits per second of "1gbit", "2.5 Gbit/s", "100mbit", "1e9", or, in bytes, of "12.5MB/s".

    Raises ConfigError, naming what it is, unless it is 1 or more.
    """
    wrong = f"{name} is written like 1gbit, 100mbit or 12.5MB/s, not {text!r}"
    if re.fullmatch(rf"{_NUMBER}[kKmMgG]?B(?:/s|ps)?\s*", text):  # a large B is bytes, as everywhere
        return 8 * _quantity(text, rf"{_NUMBER}([kmg]?)b(?:/s|ps)?\s*", wrong)
    return _quantity(text, rf"{_NUMBER}([kmg]?)(?:bit|b)?(?:/s|ps)?\s*", wrong)


def parse_duration(text: str, name: str = "a time") -> float:
    """Return the seconds of "60s", "5min", "1.5h" or "250ms". Raises ConfigError, naming what it is, for others."""
    match = re.fullmatch(rf"{_NUMBER}(ms|s|min|h)\s*", text.lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{name} is written like 60s, 5min or 1h, not {text!r}")
    return seconds


def _quantity(text: str, pattern: str, wrong: str) -> int:
    match = re.fullmatch(pattern, text.lower())
    value = float(match[1]) * _PREFIXES[match[2]] if match else 0.0
    if not (isfinite(value) and value >= 1):
        raise ConfigError(wrong)
    return round(value)
