"""Say what is learned, and by which codecs and exchange settings, in a comparison of what these cost: tasks and rows.

A row is written `name=592x|codec=ternary|every=32|delay=16|outer=nesterov:rate=0.8,momentum=0.5|rate=1`: what is left
out takes its default; broadcast_codec is the codec's if left out; every=1@0,4@0.25,16@0.5 says k from each fraction of
the run on; rate is a factor to the task's.  `kind=gradients|codec=feedback+topk:density=0.02+sign` exchanges gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from zmqtrain.codecs.base import codec_from_spec, coding_from_spec
from zmqtrain.strategies.outer import outer_from_spec

from federation import ExchangeSettings

__all__ = ["CodecTask", "Method", "METHODS", "TASKS", "parse_row"]


@dataclass(frozen=True, kw_only=True)
class CodecTask:
    """What is learned. rates: the base rate by inner optimizer; warm_steps: of the checkpoint that `warm` starts at.

    on_device: how `LocalSteps` loops.  steps: of one node.
    """

    name: str
    program: str
    arguments: Mapping[str, int]
    rates: Mapping[str, float]
    steps: int
    warm_steps: int
    on_device: bool


TASKS = (
    CodecTask(
        name="lm",
        program="text",
        arguments={"layers": 2, "width": 64, "context": 64, "batch": 2, "batches_per_unit": 8},
        rates={"adamw": 2e-3, "muon": 8e-3},
        steps=4096,
        warm_steps=4096,
        on_device=True,
    ),
    CodecTask(
        name="lm4",
        program="text",
        arguments={"layers": 4, "width": 128, "context": 64, "batch": 8, "batches_per_unit": 8},
        rates={"adamw": 2e-3, "muon": 6e-3},
        steps=4096,
        warm_steps=4096,
        on_device=True,
    ),
    CodecTask(
        name="mnist",
        program="image",
        arguments={"width": 16, "batch": 16, "batches_per_unit": 4},
        rates={"adamw": 4e-3},
        steps=560,
        warm_steps=280,
        on_device=False,
    ),
)


Kind = Literal["federation", "gradients", "synchronous", "one node"]
EXCHANGING = ("federation", "gradients")
"""The kinds whose exchange settings matter; `gradients` is `CodedGradients`, of which the codecs alone do."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How it is learned. rate: a factor to the task's base rate."""

    name: str
    kind: Kind = "federation"
    rate: float = 1.0
    exchange: ExchangeSettings = field(default_factory=ExchangeSettings)

    @property
    def settings(self) -> dict[str, Any]:
        """All that makes a difference to the run: what a line of results is told by."""
        exchange = {one.name: getattr(self.exchange, one.name) for one in fields(self.exchange)}
        if self.kind not in EXCHANGING:
            exchange = dict.fromkeys(exchange)
        elif isinstance(self.exchange.every, tuple):
            exchange["every"] = [list(period) for period in self.exchange.every]
        return {"kind": self.kind, "rate_factor": self.rate, **exchange}


def parse_row(text: str) -> Method:
    """Read a row such as "name=592x|codec=ternary|every=32". Raises ValueError or ConfigError."""
    given: dict[str, str] = {}
    for piece in text.split("|"):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals or key in given:
            raise ValueError(f"{text!r}: cannot read {piece!r}; a row is written key=value|key=value, each key once")
        given[key] = value
    name, kind = given.pop("name", text), given.pop("kind", "federation")
    rate = float(given.pop("rate", "1"))
    if kind not in get_args(Kind):
        raise ValueError(f"{text!r}: kind must be one of {', '.join(get_args(Kind))}")
    read_codec = codec_from_spec if kind == "gradients" else coding_from_spec
    readers: dict[str, Callable[[str], Any]] = {
        "codec": lambda value: read_codec(value).name,
        "broadcast_codec": lambda value: read_codec(value).name,
        "every": _read_every,
        "delay": int,
        "fragments": int,
        "outer": lambda value: outer_from_spec(value).name,
        "average_second_moments": int,
    }
    if unknown := given.keys() - readers.keys():
        raise ValueError(f"{text!r}: unknown {', '.join(unknown)}; a row takes name, kind, rate, {', '.join(readers)}")
    given.setdefault("codec", "ternary")
    given.setdefault("broadcast_codec", given["codec"])
    given.setdefault("outer", "sgd:rate=1")
    exchange = ExchangeSettings(**{key: readers[key](value) for key, value in given.items()})
    return Method(name=name, kind=kind, rate=rate, exchange=exchange)  # type: ignore[arg-type]


def _read_every(text: str) -> int | tuple[tuple[float, int], ...]:
    if "@" not in text:
        return int(text)
    periods = (piece.partition("@") for piece in text.split(","))
    return tuple((float(fraction), int(k)) for k, _, fraction in periods)


_AT_8 = "every=8|delay=2|outer=nesterov:rate=1,momentum=0.5"

REFERENCES = (
    "name=synchronous|kind=synchronous",
    "name=synchronous, twice the rate|kind=synchronous|rate=2",
    "name=synchronous, half the rate|kind=synchronous|rate=0.5",
    "name=one node|kind=one node",
)
CODECS = (
    "float32",
    "bf16",
    "int8",
    "int8s",
    "int4",
    "int4s",
    "int2",
    "ternary",
    "sign",
    "topk:density=0.05+sign",
    "topk:density=0.05+int4",
    "topk:density=0.01+int8",
    "blocktopk:keep=12+int4",
    "randomk:density=0.05+int4",
    "dct+topk:density=0.05+int4",
    "lowrank:rank=4",
)
"""One of each kind, all at k = 8, d = 2: what the codec costs, nothing else moved."""

GROWING = "1@0,2@0.05,4@0.2,8@0.5,16@0.8"

LADDER = (
    "name=ternary k=2|codec=ternary|every=2|delay=1|rate=3",
    "name=ternary k=2, averaging|codec=ternary|every=2|delay=1",
    "name=ternary k=2, averaging, twice the rate|codec=ternary|every=2|delay=1|rate=2",
    "name=ternary k=2, no delay|codec=ternary|every=2|delay=0|rate=2|outer=nesterov:rate=1,momentum=0.3",
    "name=1/2 ternary k=1|codec=ternary|every=1|fragments=2|delay=0|rate=2|outer=nesterov:rate=1,momentum=0.3",
    "name=ternary k=2, nesterov|codec=ternary|every=2|delay=1|outer=nesterov:rate=1,momentum=0.3",
    "name=ternary k=4|codec=ternary|every=4|delay=1|outer=nesterov:rate=1,momentum=0.5",
    "name=ternary k=32|codec=ternary|every=32|delay=2|outer=nesterov:rate=1,momentum=0.5",
    "name=ternary k 16..64|codec=ternary|every=16@0,32@0.35,64@0.6|delay=2|outer=nesterov:rate=1,momentum=0.5",
    "name=1/8 ternary k=4|codec=ternary|every=4|fragments=8|delay=1|outer=nesterov:rate=1,momentum=0.5",
    "name=1/8 ternary k=8|codec=ternary|every=8|fragments=8|delay=1|outer=nesterov:rate=1,momentum=0.5",
    f"name=1/8 ternary k 1..16|codec=ternary|every={GROWING}|fragments=8|delay=1|outer=nesterov:rate=1,momentum=0.5",
    "name=top-10 % sign k=1|codec=topk:density=0.1+sign|every=1|delay=0|rate=3",
    "name=top-2 % sign k=1|codec=topk:density=0.02+sign|every=1|delay=0|rate=2|outer=nesterov:rate=1,momentum=0.3",
    "name=top-1 % sign k=2|codec=topk:density=0.01+sign|every=2|delay=1|rate=2|outer=nesterov:rate=1,momentum=0.3",
    "name=top-5 % sign k=1|codec=topk:density=0.05+sign|every=1|delay=0|rate=2|outer=nesterov:rate=1,momentum=0.3",
    "name=sign k=2|codec=sign|every=2|delay=1|rate=3",
    "name=sign k=6|codec=sign|every=6|delay=1|outer=nesterov:rate=1,momentum=0.5",
    "name=sign k=20|codec=sign|every=20|delay=2|outer=nesterov:rate=1,momentum=0.5",
    "name=ternary k=8, averaging|codec=ternary|every=8|delay=2|rate=2",
    "name=ternary k=8, twice the rate|codec=ternary|rate=2|" + _AT_8,
    "name=ternary k=8, moments|codec=ternary|average_second_moments=8|" + _AT_8,
    "name=gradients, top-2 % int8|kind=gradients|codec=feedback+topk:density=0.02+int8",
    "name=gradients, top-2 % int8, momentum|kind=gradients|codec=momentum+topk:density=0.02+int8"
    "|broadcast_codec=feedback+topk:density=0.02+int8",
)
"""Every setting at the best of the rates and outer steps that were tried on one seed, and beside some of them another.
Not tried: those of "ternary k=4", "sign k=2", "top-5 % sign k=1" and "1/8 ternary k 1..16": their neighbours'."""

METHODS = tuple(
    parse_row(row) for row in (*REFERENCES, *(f"name={codec}|codec={codec}|{_AT_8}" for codec in CODECS), *LADDER)
)
