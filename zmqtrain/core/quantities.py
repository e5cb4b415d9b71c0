"""Read the quantities that people type: "100M" parameters, "6GB" of memory, a link of "1gbit", a time of "5min".

Rule 1: prefixes are powers of 1000, as links and cards are sold; memory has a unit, for a 6 is a card's gigabytes
to who types it.  Rule 2: a text that cannot be read is a ConfigError
that shows how it is written.
"""

from __future__ import annotations

import re
from math import isfinite

from zmqtrain.core.errors import ConfigError

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*"


def require_kind(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    """Raise ConfigError, naming what it is and how it is written, unless a caller's value is of one of these kinds."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(f"{name} is written like {example}, not {value!r} (of type {type(value).__name__})")


def parse_count(text: str, name: str = "a count") -> int:
    """Return how many "100M", "1.3B" or "25e6" is. Raises ConfigError, naming what it is, unless it is 1 or more."""
    return _read(text, rf"{_NUMBER}([kmgbt]?)", f"{name} is written like 100M, 1.3B or 25000000, not {text!r}")


def parse_bytes(text: str, name: str = "an amount of memory") -> int:
    """Return the bytes of "6GB", "512 MB" or "2e9". Raises ConfigError, naming what it is, unless it is 1 or more, and
    for a number under a million that has no unit."""
    wrong = f"{name} is written like 6GB, 512MB or 2e9, not {text!r}"
    value = _read(text, rf"{_NUMBER}([kmgt]?)b?", wrong)
    if value < 10**6 and not re.search("[kmgtb]", text.lower()):
        raise ConfigError(f"{wrong}: that would be {text.strip()} bytes; {text.strip()}GB?")
    return value


def parse_rate(text: str, name: str = "a link's rate") -> int:
    """Return the bits per second of "1gbit", "2.5 Gbit/s", "100mbit", "1e9", or, in bytes, of "12.5MB/s".

    Raises ConfigError, naming what it is, unless it is 1 or more.
    """
    wrong = f"{name} is written like 1gbit, 100mbit or 12.5MB/s, not {text!r}"
    if re.fullmatch(rf"{_NUMBER}[kKmMgG]?B(?:/s|ps)?\s*", text):  # a large B is bytes, as everywhere
        return 8 * _read(text, rf"{_NUMBER}([kmg]?)b(?:/s|ps)?\s*", wrong)
    return _read(text, rf"{_NUMBER}([kmg]?)(?:bit|b)?(?:/s|ps)?\s*", wrong)


def parse_duration(text: str, name: str = "a time") -> float:
    """Return the seconds of "60s", "5min", "1.5h" or "250ms". Raises ConfigError, naming what it is, for others."""
    match = re.fullmatch(rf"{_NUMBER}(ms|s|min|h)\s*", text.lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{name} is written like 60s, 5min or 1h, not {text!r}")
    return seconds


def _read(text: str, pattern: str, wrong: str) -> int:
    match = re.fullmatch(pattern, text.lower())
    value = float(match[1]) * _PREFIXES[match[2]] if match else 0.0
    if not (isfinite(value) and value >= 1):
        raise ConfigError(wrong)
    return round(value)
