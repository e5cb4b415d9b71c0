"""The two ways of synchronous training, as specs: an allreduce of gradients, or a parameter server (pure: no jax).

A choice is a frozen record, read from a text; `GradientLoop` and its `GradientExchange` carry it out. All nodes of a
run make the same choice: the hub compares their canonical texts.
A text is `name:argument=value,...`; the first value may stand without its name ("allreduce:ring"), and the last
argument, itself a spec, takes all that follows ("allreduce:ring,codec=topk:density=0.01+int8").
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from functools import reduce
from typing import Any, Literal, get_args

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import parse_bytes

BUCKET_BYTES = 8 << 20
"""At 1 Gb/s a bucket is about 0.1 s on the wire, its latencies a few ms, and its way from the device less."""

Overlap = Literal["none", "next"]
"""What the exchange of a step's gradients runs beside: nothing, or the gradient of its last micro-batch."""


@dataclass(frozen=True, slots=True)
class Allreduce:
    """Every node has the mean of all gradients, and steps by itself.

    algorithm: of the allreduce; "auto" chooses by size.  size: how many nodes; 0: the run's start_nodes.
    overlap, bucket_bytes, check_steps: as in `GradientLoop`.  timeout_seconds: how long a node may keep the others
    waiting.  codec: how gradients are coded on the wire; "": as they are.  Raises ConfigError.
    """

    algorithm: str = "auto"
    size: int = 0
    overlap: Overlap = "none"
    bucket_bytes: int = BUCKET_BYTES
    check_steps: int = 0
    timeout_seconds: float = 600.0
    codec: str = ""

    def __post_init__(self) -> None:
        _check(self.bucket_bytes, self.timeout_seconds, size=self.size, check=self.check_steps)
        if self.overlap not in get_args(Overlap):
            raise ConfigError(f"overlap is one of {', '.join(get_args(Overlap))}, got {self.overlap!r}")

    @property
    def name(self) -> str:
        """The canonical text."""
        return _write("allreduce", self)


@dataclass(frozen=True, slots=True)
class Server:
    """Every layer has a broker, which steps it by the gradients that come, and answers with new weights.

    consistency: "bsp" (by the mean of all nodes' gradients), "async" (by each as it comes), "bounded:s=3".
    brokers: of how many the run must be; 0: of as many as it is.  workers: with how many nodes it begins; 0: the run's
    start_nodes.  bucket_bytes: as in `GradientLoop`.  timeout_seconds: how long an answer may take.  optimizer: the
    brokers'.  Raises ConfigError.
    """

    consistency: str = "bsp"
    shards: int = 0
    workers: int = 0
    bucket_bytes: int = BUCKET_BYTES
    timeout_seconds: float = 600.0
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        _check(self.bucket_bytes, self.timeout_seconds, shards=self.shards, workers=self.workers)

    @property
    def name(self) -> str:
        """The canonical text."""
        return _write("server", self)


Synchronous = Allreduce | Server
_KINDS: dict[str, type[Allreduce] | type[Server]] = {"allreduce": Allreduce, "server": Server}

_UNITS = ("_bytes", "_steps", "_seconds")
"""Ends of fields' names that their arguments do not have."""


def synchronous_from_spec(text: str) -> Synchronous | None:
    """Return the choice that a text names, None for "hub": nodes publish to the broker, and none waits for another.

    "allreduce:algorithm=auto,size=0,overlap=none,bucket=8388608B,check=0,timeout=600,codec=", or
    "server:consistency=bsp,shards=0,workers=0,bucket=8388608B,timeout=600,optimizer=adam"; what is left out takes the
    value shown.  Raises ConfigError: an unknown name or argument (with the choices), a value that cannot be.
    """
    name, colon, rest = text.partition(":")
    if text == "hub":
        return None
    if (kind := _KINDS.get(name)) is not None:
        return kind(**_read(rest, _arguments(kind)) if colon else {})
    raise ConfigError(
        f"there is no {name!r}; choose one of hub, allreduce:ring (or another algorithm) and server:bsp (or async, "
        f"bounded:s=3); written out: {Allreduce().name} or {Server().name}"
    )


def _arguments(kind: type[Allreduce] | type[Server]) -> dict[str, Field[Any]]:
    """Return the fields of a choice by the arguments as which they are typed, in their order."""
    return {reduce(str.removesuffix, _UNITS, field.name): field for field in fields(kind)}


def _read(rest: str, arguments: dict[str, Field[Any]]) -> dict[str, Any]:
    """Return the values of a text's arguments; the first may go without its name, the last takes the rest."""
    first, last = next(iter(arguments)), next(reversed(arguments))
    values: dict[str, Any] = {}
    while rest:
        argument, equals, value = rest.partition("=")
        if not values and (not equals or "," in argument or ":" in argument):  # the first, without its name
            argument, value = first, rest
        if argument != last:
            value, _, rest = value.partition(",")
        else:
            rest = ""
        if argument not in arguments:
            raise ConfigError(f"there is no argument {argument!r}; choose of {', '.join(arguments)}")
        field = arguments[argument]
        if field.name in values:
            raise ConfigError(f"{argument} is given twice")
        values[field.name] = _value(argument, field, value)
    return values


def _value(argument: str, field: Field[Any], text: str) -> Any:
    if field.name.endswith("_bytes"):
        return parse_bytes(text, argument)
    if isinstance(field.default, float):
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{argument} is a number of seconds, got {text!r}") from None
    if isinstance(field.default, int):
        if not text.isascii() or not text.isdecimal():
            raise ConfigError(f"{argument} is a whole number, got {text!r}")
        return int(text)
    return text


def _write(name: str, choice: Synchronous) -> str:
    written = []
    for argument, field in _arguments(type(choice)).items():
        value = getattr(choice, field.name)
        text = f"{value:g}" if isinstance(value, float) else str(value)
        written.append(f"{argument}={text}{'B' * field.name.endswith('_bytes')}")
    return f"{name}:{','.join(written)}"


def _check(bucket_bytes: int, timeout_seconds: float, **counts: int) -> None:
    if bucket_bytes < 1 or not timeout_seconds > 0:
        raise ConfigError("bucket and timeout must be more than 0")
    for argument, count in counts.items():
        if count < 0:
            raise ConfigError(f"{argument} must be at least 0, got {count}")
