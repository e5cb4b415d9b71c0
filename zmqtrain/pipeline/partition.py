"""Which PC holds which segments of a model, and how many pipelines the PCs make (pure).

A step of a pipeline takes (M - 1) T + fill. T is the period: the longest that a micro-batch occupies a stage, its port,
or a hop there and back, for then micro-batches in flight hide the wire. The fill is the compute of one
micro-batch at all stages, the hops between them, and the sums of tied leaves. Without flush (2bw) a step takes M T.
With gpipe this is exact where one stage is the slowest both forward and backward. Messages queue where a port is busy
for more than three quarters of the time, or for more than half of it where one pass is many times as long as the other:
what that costs (a tenth, at 90 %), only a simulation says. Where the stages differ, a step with flush is up to a
twentieth shorter: the stages after the slowest are filled while that one goes forward.

Rule 1: the plan is the one with the most micro-batches a second over all pipelines. Data parallel has no bubble, so it
has as few PCs a pipeline as hold the model, unless a PC fits nowhere else.
Rule 2: the search is exact. First, for every set of PCs, the least T and the least fill of any order and any cuts; they
bound the step from below. Then the best sets by these bounds are searched for their true least step, until the bounds
of the best are true.
Rule 3: PCs of one kind are interchangeable. Ten PCs that all differ, or twenty of four kinds, are searched as they are.
With more kinds, PCs that differ least count as one kind, with the longest times and the least memory of them: such a
plan holds on all of them, and may miss a fifth of what they could do.
Source: Zheng et al. 2022 (Alpa), Narayanan et al. 2019 and 2021 (PipeDream).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import inf, prod

import numpy as np
import numpy.typing as npt

from zmqtrain.core.errors import ConfigError, DoesNotFit
from zmqtrain.pipeline.costs import PC, SHARDINGS, TENSOR_SUMS, ModelCosts, SegmentCost, Sharding, Table
from zmqtrain.pipeline.schedule import Schedule, ScheduleName, as_schedule, check_micro_batches
from zmqtrain.transport.memory import LinkModel

MOST_STATES = 1300
"""Sets of PCs, up to their kinds, that are searched, within about a second: 1,024 are those of ten different PCs, 1,296
those of twenty PCs, five of each of four kinds."""
ALIKE = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2, 1.6, 2.4, inf)
"""By which share the times and the memory of PCs of one kind may differ: the first that leaves few enough sets."""
TRIED_AT_ONCE = 24
CLOSE = 1e-9
"""Steps that differ by this share are equal."""
SHORTEST = 1e-12
"""A step takes at least so many seconds, where all costs are 0."""
MORE_PCS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""So many PCs more are tried for a model that does not fit."""

Counts = tuple[int, ...]
"""How many PCs of each kind: a set of PCs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """One stage. segments: from begin to end - 1. seconds: of one micro-batch. memory_bytes: of each card, with
    `most_in_flight` carries. port_seconds: a micro-batch occupies its port so long, each way. tied_seconds: at the end
    of a step, to sum the gradients of tied leaves with the next stage that has them; without flush nobody waits."""

    pc: str
    begin: int
    end: int
    forward_seconds: float
    backward_seconds: float
    memory_bytes: int
    most_in_flight: int
    sharding: Sharding
    port_seconds: float
    tied_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPipeline:
    """PCs that hold one model together, and what is predicted of them."""

    stages: tuple[PlannedStage, ...]
    micro_batches: int
    period_seconds: float
    step_seconds: float

    @property
    def tied_seconds(self) -> float:
        """How long a step takes longer, for the sums of tied leaves."""
        return sum(one.tied_seconds for one in self.stages)

    @property
    def efficiency(self) -> float:
        """The share of the time in which the PCs compute."""
        return self.micro_batches * sum(one.seconds for one in self.stages) / (len(self.stages) * self.step_seconds)

    @property
    def bubble(self) -> float:
        """The share of the time in which the PCs wait."""
        return 1 - self.efficiency

    @property
    def port_use(self) -> tuple[float, ...]:
        """The share of the time in which each stage's port is used, each way."""
        return tuple(self.micro_batches * one.port_seconds / self.step_seconds for one in self.stages)

    @property
    def wire_bound(self) -> bool:
        """Whether the wire, and not the compute, sets the period."""
        return self.period_seconds > max(one.seconds for one in self.stages) * (1 + CLOSE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The pipelines, and the PCs that none of them uses."""

    pipelines: tuple[PlannedPipeline, ...]
    unused: tuple[str, ...]

    @property
    def micro_batches_per_second(self) -> float:
        return sum(one.micro_batches / one.step_seconds for one in self.pipelines)


def partition(
    costs: Sequence[SegmentCost],
    pcs: Sequence[PC],
    micro_batches: int = 32,
    *,
    schedule: ScheduleName | Schedule = "1f1b",
    link: LinkModel | None = None,
    pcs_per_pipeline: int = 0,
) -> Partition:
    """Return the pipelines with the most micro-batches a second.

    costs: of the model's segments, in their order.  micro_batches: M, of a step.  schedule: a name is one at the roomy
    depth.  link: the payload that every PC's port carries; 1 Gb/s if not given.  pcs_per_pipeline: 0: as is best.
    Raises DoesNotFit if the PCs cannot hold the model, with the segment that fits none of them if there is one;
    ConfigError for what cannot be, as fewer micro-batches than PCs of a pipeline, or two PCs of one name.
    """
    names = [pc.name for pc in pcs]
    if not pcs or len(set(names)) < len(names):
        raise ConfigError(f"a plan needs PCs of different names, got {', '.join(names) or 'none'}")
    if not 0 <= pcs_per_pipeline <= len(pcs):
        raise ConfigError(f"a pipeline of {pcs_per_pipeline} PCs: there are {len(pcs)} (0: as is best)")
    check_micro_batches(micro_batches, max(1, pcs_per_pipeline))
    model = ModelCosts(costs, as_schedule(schedule), micro_batches, link or LinkModel())
    return _Search(model, pcs, pcs_per_pipeline).best()


class _Kind:
    """PCs that count as one another. period, fill: what each range of segments adds to those of a pipeline, if the
    stage is the last, the last but one, and so on; infinite where it does not fit."""

    def __init__(self, pcs: Sequence[PC], model: ModelCosts, most_stages: int) -> None:
        self.pcs, self.period, self.fill = tuple(pcs), list[Table](), list[Table]()
        for stages in range(1, most_stages + 1):
            tables = [model.on(pc, model.schedule.most_in_flight(0, stages, model.micro_batches)) for pc in pcs]
            forward, backward = (np.max([table[which] for table in tables], axis=0) for which in (0, 1))
            self.period.append(model.period_seconds(forward, backward))
            self.fill.append(forward + backward + model.step_seconds)


class _Search:
    """The search over the sets of PCs. Tables of a set: float64[n + 1], entry [i] is of the segments from i on."""

    def __init__(self, model: ModelCosts, pcs: Sequence[PC], pcs_per_pipeline: int) -> None:
        self._model, self._pcs, self._size = model, tuple(pcs), pcs_per_pipeline
        self._most = min(pcs_per_pipeline or len(pcs), model.count, model.micro_batches)
        self._kinds = [_Kind(alike, model, self._most) for alike in _kinds(model, pcs)]
        self._all = tuple(len(kind.pcs) for kind in self._kinds)
        self._steps: dict[Counts, float] = {}
        self._periods: dict[Counts, float] = {}

    def best(self) -> Partition:
        """Return the best pipelines. Raises DoesNotFit."""
        self.bound()
        if not self.fits:
            raise does_not_fit(self._model, self._pcs, self._size)
        known: set[Counts] = set()
        while True:
            sets = self._pipelines()
            unknown = set(sets) - known if self._model.schedule.flushes else set()
            if not unknown:
                return self._plan(sets)
            for one in unknown:
                self._refine(one)
            known |= unknown

    @property
    def fits(self) -> bool:
        """Whether there is a pipeline at all, after `bound`."""
        return bool(self._steps)

    # ------------------------------------------------------------------ one pipeline

    def bound(self) -> None:
        """Find for each set of PCs the least period and the least fill, each by itself: no step is shorter."""
        start = np.full(self._model.count + 1, inf)
        start[-1] = 0.0
        nothing = (0,) * len(self._all)
        periods, fills = {nothing: start}, {nothing: start}
        rounds = self._model.micro_batches
        for have in self._sets(self._all):
            periods[have], fills[have] = np.full_like(start, inf), np.full_like(start, inf)
            for kind, rest in self._with_first(have):
                period, fill = self._tables(kind, have)
                np.minimum(periods[have], np.maximum(period, periods[rest]).min(1), out=periods[have])
                np.minimum(fills[have], (fill + fills[rest]).min(1), out=fills[have])
            least, shortest = float(periods[have][0]), float(fills[have][0])
            if np.isfinite(least) and (not self._size or sum(have) == self._size):
                self._periods[have] = least
                self._steps[have] = (rounds - 1) * least + shortest if self._model.schedule.flushes else rounds * least

    def _refine(self, have: Counts) -> None:
        """Find the true least step of a set of PCs, and the period at which it has that.

        A trial period T is one of the finitely many times of a stage, and fill(T) falls as T grows. So between two
        trial periods a < b no step is shorter than (M - 1) a + fill(b): most trials need not be made.
        """
        rounds = self._model.micro_batches - 1
        times = np.unique(np.concatenate([table.ravel() for kind in self._kinds for table in kind.period]))
        times = times[np.isfinite(times) & (times >= self._periods[have])]
        fills = np.full(len(times), -inf)
        best, at = inf, 0
        waiting = np.array([0, len(times) - 1])
        while len(waiting):
            fills[waiting] = self._fills(have, times[waiting])
            steps = rounds * times + np.where(np.isfinite(fills), fills, inf)
            at = int(steps.argmin())
            best = float(steps[at])
            tried = np.flatnonzero(np.isfinite(fills))
            open_ones = [
                np.arange(low + 1, high)
                for low, high in pairwise(tried)
                if high > low + 1 and rounds * times[low + 1] + fills[high] < best * (1 - CLOSE)
            ]
            places = np.concatenate(open_ones) if open_ones else np.array([], int)
            stride = max(1, -(-len(places) // TRIED_AT_ONCE))
            waiting = places[stride // 2 :: stride]
        self._steps[have], self._periods[have] = best, float(times[at])

    def _fills(self, have: Counts, periods: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the least fill of a set of PCs at each of these trial periods."""
        start = np.full((self._model.count + 1, len(periods)), inf)
        start[-1] = 0.0
        fills = {(0,) * len(have): start}
        within: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        for part in self._sets(have):
            fills[part] = np.full_like(start, inf)
            for kind, rest in self._with_first(part):
                if (kind, sum(part)) not in within:
                    period, fill = self._tables(kind, part)
                    within[kind, sum(part)] = np.where(period[:, :, None] <= periods, fill[:, :, None], inf)
                np.minimum(fills[part], (within[kind, sum(part)] + fills[rest]).min(1), out=fills[part])
        return np.asarray(fills[have][0])

    def _stages(self, have: Counts) -> list[tuple[int, int, int]]:
        """Return (kind, begin, end) of each stage of a set's best pipeline, in their order."""
        limit, count = self._periods[have] * (1 + CLOSE), self._model.count
        nothing = (0,) * len(have)
        fills = {(nothing, count): 0.0}
        chosen: dict[tuple[Counts, int], tuple[int, Counts, int]] = {}
        for part in self._sets(have):
            for kind, rest in self._with_first(part):
                period, fill = self._tables(kind, part)
                for begin, end in zip(*np.nonzero(period <= limit), strict=True):
                    total = fill[begin, end] + fills.get((rest, int(end)), inf)
                    if total < fills.get((part, int(begin)), inf):
                        fills[part, int(begin)] = total
                        chosen[part, int(begin)] = kind, rest, int(end)
        stages, part, begin = [], have, 0
        while begin < count:
            kind, part, end = chosen[part, begin]
            stages.append((kind, begin, end))
            begin = end
        return stages

    def _tables(self, kind: int, have: Counts) -> tuple[Table, Table]:
        """Return the periods and the fills of the first stage of a set, on a PC of this kind."""
        return self._kinds[kind].period[sum(have) - 1], self._kinds[kind].fill[sum(have) - 1]

    def _sets(self, have: Counts) -> Iterator[Counts]:
        """Give every set within this one that is no larger than a pipeline, the smaller before the larger."""
        every = (one for one in product(*(range(count + 1) for count in have)) if 0 < sum(one) <= self._most)
        return iter(sorted(every, key=sum))

    @staticmethod
    def _with_first(have: Counts) -> Iterator[tuple[int, Counts]]:
        """Give each kind of PC that a set has, as its first stage, and the set of the stages behind it."""
        for kind, count in enumerate(have):
            if count:
                yield kind, (*have[:kind], count - 1, *have[kind + 1 :])

    # ------------------------------------------------------------------ several pipelines

    def _pipelines(self) -> list[Counts]:
        """Return the sets of PCs that make the most micro-batches a second, by the steps that are known."""
        nothing = (0,) * len(self._all)
        rates: dict[Counts, float] = {nothing: 0.0}
        chosen: dict[Counts, tuple[Counts, bool]] = {}
        for have in product(*(range(count + 1) for count in self._all)):
            if have == nothing:
                continue
            first, one_less = next(self._with_first(have))
            one = tuple(int(kind == first) for kind in range(len(have)))
            rates[have], chosen[have] = rates[one_less], (one, False)  # a PC of the first kind is not used
            for part in product(*(range(int(kind == first), count + 1) for kind, count in enumerate(have))):
                if part in self._steps:
                    rate = rates[_without(have, part)] + self._model.micro_batches / max(self._steps[part], SHORTEST)
                    if rate > rates[have]:
                        rates[have], chosen[have] = rate, (part, True)
        sets, have = [], self._all
        while have != nothing:
            part, used = chosen[have]
            sets += [part] * used
            have = _without(have, part)
        return sets

    def _plan(self, sets: Sequence[Counts]) -> Partition:
        left = [list(kind.pcs) for kind in self._kinds]
        pipelines = []
        for have in sets:
            stages = [(left[kind].pop(0), begin, end) for kind, begin, end in self._stages(have)]
            pipelines.append(predict(self._model, stages))
        unused = {pc.name for pcs in left for pc in pcs}
        return Partition(pipelines=tuple(pipelines), unused=tuple(pc.name for pc in self._pcs if pc.name in unused))


def _without(have: Counts, part: Counts) -> Counts:
    return tuple(count - taken for count, taken in zip(have, part, strict=True))


def _kinds(model: ModelCosts, pcs: Sequence[PC]) -> list[list[PC]]:
    """Return the PCs by kind, so that there are at most MOST_STATES sets of them."""
    times = {pc.name: np.array([sum(one.seconds_on(pc)) for one in model.segments]) for pc in pcs}
    in_order = sorted(pcs, key=lambda pc: (pc.cards, pc.card_bytes_per_second, times[pc.name].sum(), pc.memory_bytes))
    for share in ALIKE:
        kinds: list[list[PC]] = []
        for pc in in_order:
            for kind in kinds:
                if _alike(kind[0], pc, times, share):
                    kind.append(pc)
                    break
            else:
                kinds.append([pc])
        if prod(len(kind) + 1 for kind in kinds) <= MOST_STATES:
            break
    return kinds


def _alike(one: PC, other: PC, times: dict[str, npt.NDArray[np.float64]], share: float) -> bool:
    """Whether two PCs differ by no more than a share; infinite: whatever they are."""
    if share == inf:
        return True
    if (one.cards, one.card_bytes_per_second) != (other.cards, other.card_bytes_per_second):
        return False
    mine, others = times[one.name], times[other.name]
    near = np.all(np.abs(mine - others) <= share * np.minimum(mine, others))
    return bool(near) and abs(one.memory_bytes - other.memory_bytes) <= share * min(
        one.memory_bytes, other.memory_bytes
    )


def predict(model: ModelCosts, stages: Sequence[tuple[PC, int, int]]) -> PlannedPipeline:
    """Return what a pipeline does. stages: (PC, first segment, end) of each, in their order. One that does not fit has
    infinite seconds."""
    planned, fill, period = [], 0.0, 0.0
    for place, (pc, begin, end) in enumerate(stages):
        depth = model.schedule.most_in_flight(place, len(stages), model.micro_batches)
        costs = model.on(pc, depth)
        planned.append(
            PlannedStage(
                pc=pc.name,
                begin=begin,
                end=end,
                forward_seconds=float(costs.forward[begin, end]),
                backward_seconds=float(costs.backward[begin, end]),
                memory_bytes=int(costs.memory[begin, end]),
                most_in_flight=depth,
                sharding=SHARDINGS[costs.sharding[begin, end]],
                port_seconds=float(model.port_seconds[begin, end]),
                tied_seconds=float(model.tied_later[begin, end]) if model.schedule.flushes else 0.0,
            )
        )
        period = max(period, float(model.period_seconds(costs.forward, costs.backward)[begin, end]))
        fill += planned[-1].seconds + float(model.step_seconds[begin, end])
    count = model.micro_batches
    return PlannedPipeline(
        stages=tuple(planned),
        micro_batches=count,
        period_seconds=period,
        step_seconds=max(SHORTEST, (count - 1) * period + fill if model.schedule.flushes else count * period),
    )


# ---------------------------------------------------------------------- what does not fit


def does_not_fit(model: ModelCosts, pcs: Sequence[PC], pcs_per_pipeline: int) -> DoesNotFit:
    """Return what is wrong with a model that these PCs cannot hold, and what would help."""
    tables = [model.on(pc, model.schedule.most_in_flight(0, 1, model.micro_batches)) for pc in pcs]
    for number, segment in enumerate(model.segments):
        if all(not np.isfinite(table.forward[number, number + 1]) for table in tables):
            needed = min(int(table.memory[number, number + 1]) for table in tables)
            return _segment_does_not_fit(model, segment, needed, max(pcs, key=lambda one: one.memory_bytes))
    needed = int(min(table.memory[0, model.count] for table in tables))
    available = sum(pc.cards * pc.memory_bytes for pc in pcs)
    if model.micro_batches < len(pcs):
        enough = ModelCosts(model.segments, model.schedule, len(pcs), model.link)
        if _holds(enough, pcs, pcs_per_pipeline):
            count = f"{model.micro_batches} micro-batch{'es' * (model.micro_batches > 1)}"
            message = (
                f"the model does not fit with {count} a step, as a pipeline has at most as many stages as "
                f"micro-batches: with {len(pcs)} micro-batches it fits (four for each PC is a good number)"
            )
            return DoesNotFit(message, "", needed, available)
    within = f"pipelines of {pcs_per_pipeline} of " if pcs_per_pipeline else ""
    message = (
        f"the model does not fit {within}{_these(len(pcs))}: undivided it needs {_amount(needed)}, they have "
        f"{_amount(available)} in all, and a stage keeps a carry for each micro-batch in flight. "
    )
    return DoesNotFit(message + _help(model, pcs, pcs_per_pipeline), "", needed, available)


def _segment_does_not_fit(model: ModelCosts, segment: SegmentCost, needed: int, largest: PC) -> DoesNotFit:
    stays = segment.held_bytes + sum(leaf.held_bytes for leaf in segment.tied)
    columns = TENSOR_SUMS * model.link.seconds(segment.carry_bytes)
    number = model.segments.index(segment)
    alone = ModelCosts([_halved(segment)], model.schedule, model.micro_batches, model.link)
    if np.isfinite(alone.on(largest, 1).forward[0, 1]):
        helps = "With micro-batches of half the size it fits."
    else:
        helps = (
            "An optimizer with less state, more memory, or cutting the segment in two would help. Splitting it over "
            f"two PCs (tensor parallel) would cost {columns:.2g} s a micro-batch on this link."
        )
    message = (
        f"the segment {segment.name!r} ({number} of {model.count}) fits no PC: it needs {_amount(needed)}, of which "
        f"{_amount(stays)} are parameters, gradient and optimizer state, and {largest.name} has "
        f"{_amount(largest.memory_bytes)} a card. {helps}"
    )
    return DoesNotFit(message, segment.name, needed, largest.memory_bytes)


def _help(model: ModelCosts, pcs: Sequence[PC], size: int) -> str:
    """Return what would make a model fit, by the same search."""
    for larger in range(size + 1, len(pcs) + 1) if size else ():
        if _holds(model, pcs, larger):
            return f"Pipelines of {larger} PCs hold it."
    halved = ModelCosts([_halved(one) for one in model.segments], model.schedule, model.micro_batches, model.link)
    helps = ["With micro-batches of half the size it fits."] if _holds(halved, pcs, size) else []
    largest = max(pcs, key=lambda pc: pc.cards * pc.memory_bytes)
    for more in MORE_PCS if not size else ():
        if _holds(model, [*pcs, *[largest] * more], 0):
            helps.append(f"With {more} more PC{'s' * (more > 1)} like {largest.name} it fits.")
            break
    return " ".join([*helps, "An optimizer with less state needs less of each PC."])


def _holds(model: ModelCosts, pcs: Sequence[PC], size: int) -> bool:
    search = _Search(model, pcs, size)
    search.bound()
    return search.fits


def _halved(segment: SegmentCost) -> SegmentCost:
    """Return what a segment costs with half the tokens a micro-batch, as far as memory goes."""
    return replace(segment, carry_bytes=segment.carry_bytes // 2, activation_bytes=segment.activation_bytes // 2)


def _these(pcs: int) -> str:
    return f"these {pcs} PCs" if pcs > 1 else "this PC"


def _amount(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
