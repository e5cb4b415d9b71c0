"""What segments of a model cost on PCs: seconds, memory and bytes on the wire, for every range of them (pure).

Rule 1: a stage is a range of segments on one PC. Its backward pass computes its forward pass again from its input, so
it keeps one carry for each micro-batch in flight, and the activations of one micro-batch at a time.
Rule 2: a PC with several cards shards a stage in the way that is fastest of those that fit: by batch (each card holds
the stage), by FSDP (each card holds a part, and gathers a segment when it needs it), or by tensor (each card computes a
part of every layer). The cards exchange over the PC's own bus, at its `card_bytes_per_second`.
Source: Zheng et al. 2022 (Alpa), sec. 4 and 5; Rajbhandari et al. 2020 (ZeRO); Shoeybi et al. 2019 (Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from zmqtrain.core.errors import ConfigError
from zmqtrain.pipeline.schedule import Schedule
from zmqtrain.transport.memory import LinkModel

Sharding = Literal["none", "batch", "fsdp", "tensor"]
SHARDINGS: tuple[Sharding, ...] = ("none", "batch", "fsdp", "tensor")

Table = npt.NDArray[np.float64]
"""float64[n + 1, n + 1], of n segments: entry [i, j] is of the segments i to j - 1. Those with j <= i mean nothing."""

TENSOR_SUMS = 6
"""How often a layer that is split over several cards or PCs sums a carry: twice forward, twice when the backward pass
computes that again, twice backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedLeaf:
    """A leaf that several segments use, as an embedding that is the head too. Each stage of them holds it, and their
    gradients are summed once a step. parameter_bytes, held_bytes: as of `SegmentCost`."""

    name: str
    parameter_bytes: int
    held_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentCost:
    """What one segment costs, for one micro-batch. Raises ConfigError for a number that is negative.

    forward_seconds, backward_seconds: as measured on each PC, by its name; or a number, on a PC of speed 1. The
    backward pass includes computing the forward pass again.  parameter_bytes: of its parameters as they are computed
    with, and of their gradient.  held_bytes: all that stays: parameters, gradient, optimizer state.  carry_bytes: of
    its result in memory.  wire_bytes: of its result on the wire, by the codec of the boundary, and of the cotangent
    that comes back; None: carry_bytes.  activation_bytes: what the backward pass keeps for itself.  tied: leaves that
    other segments use too; they are not in this segment's own bytes.
    """

    name: str
    forward_seconds: float | Mapping[str, float]
    backward_seconds: float | Mapping[str, float]
    parameter_bytes: int
    held_bytes: int
    carry_bytes: int = 0
    wire_bytes: int | None = None
    activation_bytes: int = 0
    tied: tuple[TiedLeaf, ...] = ()

    def __post_init__(self) -> None:
        for field in ("parameter_bytes", "held_bytes", "carry_bytes", "wire_bytes", "activation_bytes"):
            if (getattr(self, field) or 0) < 0:
                raise ConfigError(f"{field} of the segment {self.name!r} is negative: {getattr(self, field)}")
        for field in ("forward_seconds", "backward_seconds"):
            times = getattr(self, field)
            for seconds in times.values() if isinstance(times, Mapping) else (times,):
                if not 0 <= seconds < np.inf:
                    raise ConfigError(f"{field} of the segment {self.name!r} is no time: {seconds}")

    def seconds_on(self, pc: PC) -> tuple[float, float]:
        """Return the seconds of its forward and of its backward pass on one card of a PC. Raises ConfigError if they
        were measured on other PCs alone."""
        passes = []
        for field in ("forward_seconds", "backward_seconds"):
            times = getattr(self, field)
            if isinstance(times, Mapping) and pc.name not in times:
                known = ", ".join(times) or "no PC"
                raise ConfigError(f"{field} of the segment {self.name!r} is of {known}, not of {pc.name}: measure it")
            passes.append(times[pc.name] if isinstance(times, Mapping) else times / pc.speed)
        return passes[0], passes[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PC:
    """A PC that can hold a stage. Raises ConfigError for what cannot be.

    memory_bytes: what a stage may use of each card.  speed: divides seconds that are not measured on this PC.
    cards: how many there are.  card_bytes_per_second: at which a card sends to the others (PCIe 3.0 x16: 12e9).
    """

    name: str
    memory_bytes: int
    speed: float = 1.0
    cards: int = 1
    card_bytes_per_second: float = 12e9

    def __post_init__(self) -> None:
        if not (self.memory_bytes >= 0 and self.speed > 0 and self.cards >= 1 and self.card_bytes_per_second > 0):
            raise ConfigError(f"a PC has memory, a speed above 0, a card and a rate between its cards, got {self}")


class RangeCosts(NamedTuple):
    """What each range of segments costs a PC at one depth. Where no sharding fits, seconds are infinite, and memory is
    that of the sharding that needs least. sharding: int[n + 1, n + 1], places in SHARDINGS."""

    forward: Table
    backward: Table
    memory: Table
    sharding: npt.NDArray[np.int64]


class ModelCosts:
    """The costs of ranges of segments that do not depend on the PC.

    costs: of the segments, in their order.  micro_batches: of a step.  link: of every PC's port.
    """

    def __init__(self, costs: Sequence[SegmentCost], schedule: Schedule, micro_batches: int, link: LinkModel) -> None:
        if not costs:
            raise ConfigError("a model has at least one segment")
        self.segments, self.schedule, self.micro_batches, self.link = tuple(costs), schedule, micro_batches, link
        self.count = len(costs)
        self.parameters, self.held = self._ranges("parameter_bytes"), self._ranges("held_bytes")
        self.activations, self.carries = self._ranges("activation_bytes"), self._ranges("carry_bytes")
        self.largest = _largest([one.parameter_bytes + sum(leaf.parameter_bytes for leaf in one.tied) for one in costs])
        self.carry_in = np.array([0.0, *(one.carry_bytes for one in costs)])[:, None]
        self.carry_out = np.array([0.0, *(one.carry_bytes for one in costs[:-1]), 0.0])[None, :]
        self.carry_in[self.count] = 0.0
        on_wire = [one.carry_bytes if one.wire_bytes is None else one.wire_bytes for one in costs[:-1]]
        self.cut_seconds = np.array([0.0, *map(link.seconds, on_wire), 0.0])
        """float64[n + 1]: how long a carry, or a cotangent, occupies a port where the model is cut there."""
        self.hop_seconds = 2 * (self.cut_seconds + link.latency_seconds)
        self.hop_seconds[[0, -1]] = 0.0
        self.tied_later, self.tied_all = np.zeros_like(self.held), np.zeros_like(self.held)
        self._add_tied()
        self.inside = np.triu(np.ones((self.count + 1, self.count + 1), bool), 1)

    @property
    def port_seconds(self) -> Table:
        """How long a micro-batch occupies a stage's port, each way."""
        tied = np.zeros_like(self.tied_all) if self.schedule.flushes else self.tied_all / self.micro_batches
        return np.asarray(self.cut_seconds[:, None] + self.cut_seconds[None, :] + tied)

    def period_seconds(self, forward: Table, backward: Table) -> Table:
        """Return how long a micro-batch occupies a stage with these passes: its compute, its port, or the hop to the
        next stage and back, which micro-batches in flight hide if it is no longer than the period.

        Under gpipe each way has the port for itself, and cannot hide behind the compute of the other.
        """
        if self.schedule.name == "gpipe":
            one_way = np.maximum(self.cut_seconds[:, None], self.cut_seconds[None, :])
            return np.asarray(np.maximum(forward, one_way) + np.maximum(backward, one_way))
        wire = np.maximum(self.port_seconds, self.hop_seconds[None, :])
        return np.asarray(np.maximum(forward + backward, wire))

    @property
    def step_seconds(self) -> Table:
        """What a stage adds to a step besides its compute: the hops of its result and of the cotangent that comes back,
        and the sums of tied leaves, which end a step with a flush."""
        tied = self.tied_later if self.schedule.flushes else np.zeros_like(self.tied_later)
        return self.hop_seconds[None, :] + tied

    def on(self, pc: PC, most_in_flight: int) -> RangeCosts:
        """Return what each range costs a PC, if so many micro-batches are in flight. Raises ConfigError if the PC's
        times are not known."""
        times = [one.seconds_on(pc) for one in self.segments]
        forward, backward = (_sums([passes[which] for passes in times]) for which in (0, 1))
        stays = self.held + (self.schedule.copies_held - 1) * self.parameters
        carries = (most_in_flight + 1) * self.carry_in + self.carry_out
        cards, rate = pc.cards, pc.card_bytes_per_second
        if cards == 1:
            options = {"none": (forward, backward, stays + self.activations + carries)}
        else:
            part = (cards - 1) / cards / rate
            batch = (self.activations + carries) / cards
            own = stays / cards + self.activations / cards
            moved, summed = part * self.parameters, TENSOR_SUMS * 2 * part * self.carries
            f, b = forward / cards, backward / cards
            options = {
                "batch": (f, b + 2 * moved, stays + batch),
                "fsdp": (f + moved, b + 2 * moved, stays / cards + self.largest + batch),
                "tensor": (f + summed / 3, b + summed * 2 / 3, own + carries),
            }
        return self._fastest(options, pc.memory_bytes)

    def _fastest(self, options: Mapping[str, tuple[Table, Table, Table]], limit: int) -> RangeCosts:
        """Take, for each range, the fastest way that fits."""
        names = [SHARDINGS.index(name) for name in SHARDINGS if name in options]
        forward, backward, memory = (
            np.stack([np.broadcast_to(options[SHARDINGS[name]][part], self.held.shape) for name in names])
            for part in range(3)
        )
        fits = (memory <= limit) & self.inside
        seconds = np.where(fits, forward + backward, np.inf)
        least = np.where(fits.any(0), seconds.argmin(0), memory.argmin(0))
        pick = (least[None], *np.indices(least.shape))
        never = ~fits.any(0)
        return RangeCosts(
            np.where(never, np.inf, forward[pick][0]),
            np.where(never, np.inf, backward[pick][0]),
            memory[pick][0],
            np.array(names)[least],
        )

    def _ranges(self, field: str) -> Table:
        return _sums([getattr(one, field) for one in self.segments])

    def _add_tied(self) -> None:
        """Each stage that uses a tied leaf holds it. A stage sums its gradient with that of the next stage that uses it
        (`tied_later`); its port carries that, and the sum with the stage before (`tied_all`)."""
        leaves = {leaf.name: leaf for one in self.segments for leaf in one.tied}
        for name, leaf in leaves.items():
            users = [any(name == one.name for one in segment.tied) for segment in self.segments]
            until = np.concatenate([[0], np.cumsum(users)])
            here = (until[None, :] - until[:, None]) > 0
            self.parameters += here * leaf.parameter_bytes
            self.held += here * leaf.held_bytes
            seconds = self.link.seconds(leaf.parameter_bytes)
            later = here * (until[-1] > until)[None, :]
            self.tied_later += later * seconds
            self.tied_all += (later + here * (until > 0)[:, None]) * seconds


def _sums(values: Sequence[float]) -> Table:
    """Return the sum of each range of values."""
    until = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])
    return np.asarray(until[None, :] - until[:, None])


def _largest(values: Sequence[float]) -> Table:
    """Return the largest value of each range."""
    largest = np.zeros((len(values) + 1, len(values) + 1))
    for begin in range(len(values)):
        largest[begin, begin + 1 :] = np.maximum.accumulate(np.asarray(values[begin:], float))
    return largest
