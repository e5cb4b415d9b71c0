"""Schedules of faults, drawn from a seed as plain values. Pure: no clock, no sockets.

Rule 1: the same arguments give the same schedule on every machine.  Rule 2: a fault has one target, and a target one
fault at a time; at most a third of the nodes are away at once, so that there are always survivors to be judged.
Rule 3: a schedule begins and ends without faults: all nodes join before the first, and are back after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from zmqtrain.core.errors import ConfigError

BROKER = "broker"
"""The target that is the hub; every other is a node's name."""

FaultKind = Literal["kill", "stop", "unplug", "slow", "drop", "corrupt", "duplicate", "reorder", "disk", "clock"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
"""The faults of a process or its connection:

    kill       it is killed (SIGKILL), and started again with the same line
    stop       it stands still for a while (SIGSTOP ... SIGCONT)
    unplug     its cable is out for a while: nothing gets through, no connection ends
    slow       for a while it, or its wire, is slower, by `severity`
    drop       its connections break in the middle of a message
    corrupt, duplicate, reorder    for a while a share `severity` of what it sends and gets is changed, comes twice, or
               is overtaken
    disk       for a while its disk is full: nothing can be written
    clock      its wall clock jumps, by `severity` days
"""


@dataclass(frozen=True, slots=True)
class FaultKindRange:
    """Ranges of a kind of fault. seconds: how long it lasts; severity: as its kind says."""

    seconds: tuple[float, float] = (0.0, 0.0)
    severity: tuple[float, float] = (0.0, 0.0)


RANGES: dict[FaultKind, FaultKindRange] = {
    "kill": FaultKindRange(),
    "stop": FaultKindRange((5.0, 30.0)),
    "unplug": FaultKindRange((1.0, 20.0)),
    "slow": FaultKindRange((5.0, 30.0), (0.3, 0.8)),
    "drop": FaultKindRange(),
    "corrupt": FaultKindRange((2.0, 10.0), (0.01, 0.05)),
    "duplicate": FaultKindRange((2.0, 10.0), (0.01, 0.1)),
    "reorder": FaultKindRange((2.0, 10.0), (0.01, 0.1)),
    "disk": FaultKindRange((2.0, 10.0)),
    "clock": FaultKindRange((0.0, 0.0), (-400.0, 400.0)),
}
"""By kind what is drawn, evenly: seconds, and how severe it is. Slow takes that share of the speed away."""

PEACE = 0.1
"""The share of a schedule at either end without faults, at most `PEACE_SECONDS`."""
PEACE_SECONDS = 15.0
BREATH_SECONDS = 3.0
"""Between two faults of one target, so that the second finds it at work."""
TRIES = 50
LEAST_SECONDS = 0.1


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One fault: when it begins (seconds since the schedule does), what, to whom, and how long and severe it is."""

    at: float
    kind: FaultKind
    target: str
    seconds: float = 0.0
    severity: float = 0.0

    @property
    def ends_at(self) -> float:
        """When it is over; a kill, a drop and a jump are over at once."""
        return self.at + self.seconds

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        unit = " days" if self.kind == "clock" else ""
        severe = f", {self.severity:.2g}{unit}" if self.severity else ""
        return f"{self.kind} {self.target}{lasting}{severe}"


def check_kinds(names: Sequence[str]) -> tuple[FaultKind, ...]:
    """Return the kinds of these names. Raises ConfigError for a name that is none, and for none at all."""
    if unknown := [name for name in names if name not in KINDS]:
        raise ConfigError(f"there is no fault {unknown[0]!r}; the faults are {', '.join(KINDS)}")
    if not names:
        raise ConfigError(f"no fault is named; the faults are {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in names)


def draw_schedule(
    seed: int,
    seconds: float,
    nodes: Sequence[str],
    kinds: Sequence[FaultKind],
    *,
    mean_seconds: float = 10.0,
    broker_kinds: Sequence[FaultKind] = ("kill",),
    broker_faults: int = 0,
) -> tuple[Fault, ...]:
    """Return the faults of one run, in the order of their times.

    seconds: that the run takes.  nodes: the targets beside the broker.  kinds: of faults of nodes; the first faults are
    one of each, and from then on the kind is drawn.  mean_seconds: between two faults of nodes.  broker_faults: of
    `broker_kinds`, spread over the run, one in each of as many equal parts.
    Raises ConfigError if there is no time for a fault, or no target.
    """
    if not seconds > 0 or not mean_seconds > 0:
        raise ConfigError(f"a schedule takes some time: got {seconds:g} s, a fault each {mean_seconds:g} s")
    if not nodes or len(set(nodes)) < len(nodes) or BROKER in nodes:
        raise ConfigError(f"a schedule has nodes of different names, none of them {BROKER!r}; got {', '.join(nodes)}")
    random, peace = Random(seed), min(PEACE * seconds, PEACE_SECONDS)
    begin, end = peace, seconds - peace
    faults: list[Fault] = []
    for part in range(broker_faults):
        kind = broker_kinds[part % len(broker_kinds)]
        share = (end - begin) / broker_faults
        at = begin + share * (part + random.uniform(0.25, 0.75))
        faults.append(_fault(random, at, kind, BROKER, end))
    at, number = begin, 0
    while kinds and (at := at + random.expovariate(1.0 / mean_seconds)) < end:
        kind = kinds[number] if number < len(kinds) else random.choice(kinds)
        number += 1
        for _ in range(TRIES):
            fault = _fault(random, at, kind, random.choice(nodes), end)
            if _is_fair(fault, faults, len(nodes)):
                faults.append(fault)
                break
    return tuple(sorted(faults))


def _fault(random: Random, at: float, kind: FaultKind, target: str, end: float) -> Fault:
    drawn = RANGES[kind]
    seconds = min(random.uniform(*drawn.seconds), max(LEAST_SECONDS, end - at)) if drawn.seconds[1] else 0.0
    return Fault(round(at, 3), kind, target, round(seconds, 3), round(random.uniform(*drawn.severity), 4))


def _is_fair(fault: Fault, others: Sequence[Fault], nodes: int) -> bool:
    """Whether this fault leaves its target one at a time, and enough nodes in peace."""
    beside = [
        other
        for other in others
        if other.target != BROKER
        and other.at - BREATH_SECONDS < fault.ends_at
        and fault.at < other.ends_at + BREATH_SECONDS
    ]
    return all(other.target != fault.target for other in beside) and len(beside) < max(1, nodes // 3)
