"""Which PC of a communicator computes which stage: each PC measures the segments of the loss, and all make one plan.

Rule 1: the segments lie between places where few bytes travel, or between the marks. Each PC computes each of them
forward and backward, compiled as in the run, with values of its own making; segments that are alike are measured once.
Rule 2: the plan is `partition`'s, of one pipeline of all PCs: the slow PC gets fewer segments, the small one those that
it can hold. All PCs plan with the same figures, so all have the same plan, and nobody has to be told of it.
Rule 3: what a stage holds is counted. What its backward pass needs besides is what the compiler says of each segment,
times what it says of whole stages over the sum of their segments: these use memory one after the other.
Source: Zheng et al. 2022 (Alpa), sec. 5 and 6.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.collectives.communicator import Communicator
from zmqtrain.core.errors import ConfigError, DoesNotFit
from zmqtrain.core.installed import free_memory
from zmqtrain.pipeline.boundary import Boundary
from zmqtrain.pipeline.costs import PC, SegmentCost, TiedLeaf
from zmqtrain.pipeline.partition import PlannedPipeline, partition
from zmqtrain.pipeline.pieces import parts_of_segments
from zmqtrain.pipeline.schedule import Schedule, check_micro_batches
from zmqtrain.pipeline.split import MicroBatches, Split, positions_of, split
from zmqtrain.pipeline.stage import Stage
from zmqtrain.pipeline.stage_optimizer import OptimizerOn, computed, counts, moving_bytes, place_of
from zmqtrain.pipeline.trace import Loss
from zmqtrain.train.step import card_bytes

SEGMENTS_PER_PC, MOST_SEGMENTS = 16, 64
"""So many segments are measured at most where there are no marks: stages that fill their PCs need fine ones, and a plan
of 64 takes a second."""
USUAL_PCS = 4
"""Pipelines that exchange parts of a model have the same parts, though they are of fewer PCs."""
PASSES = 3
"""A segment's passes are timed so often; the median counts."""
MEMORY_SHARE = 0.9
"""Of a card's memory, or of a PC's free memory, what a stage may use."""
BOUNDLESS = 1 << 60
"""The memory of a PC in the trial. Its stages are compiled, to see how much memory they need."""
TERMS_BYTES = 512
FILLING = 0.01
"""Parameters and activations have this value while a segment is measured."""


class SegmentFigures(NamedTuple):
    """What one PC measured of one segment. activation_bytes: what its backward pass needs for itself."""

    forward_seconds: float
    backward_seconds: float
    activation_bytes: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A loss cut into segments, and what each of them costs on PCs. pcs: in the order of the ranks that measured.
    batches: the form of a batch, and how it is cut."""

    loss_fn: Loss
    params: Any
    batches: MicroBatches
    segments: Split
    costs: tuple[SegmentCost, ...]
    pcs: tuple[PC, ...]
    schedule: Schedule
    moving_of: Callable[[Stage], int]
    moving_bytes: int = 0

    def placed(self, pcs: Sequence[PC]) -> Placement:
        """Return the plan for these PCs, in the order of the ranks that are to train. Where they cannot hold what the
        schedule takes, it is one of the eager depth, and then one without prediction (2bw). Raises DoesNotFit."""
        room = [replace(pc, memory_bytes=max(0, pc.memory_bytes - self.moving_bytes)) for pc in pcs]
        try:
            of_all = partition(self.costs, room, self.batches.count, schedule=self.schedule, pcs_per_pipeline=len(pcs))
        except DoesNotFit:
            if self.schedule.depth == "roomy" and self.schedule.name != "gpipe":
                smaller = replace(self.schedule, depth="eager")
            elif self.schedule.copies_held > self.schedule.versions_held:
                smaller = replace(self.schedule, predicts=False)
            else:
                raise
            return replace(self, schedule=smaller).placed(pcs)
        plan, batches = of_all.pipelines[0], self.batches
        positions = [self.segments.cuts[stage.begin - 1].position for stage in plan.stages[1:]]
        stages = split(
            self.loss_fn, self.params, batches.batch, positions, micro_batches=batches.count, uncut=batches.uncut
        )
        moving = max((self.moving_of(stage) for stage in stages), default=0)
        if moving > self.moving_bytes:  # leaves of these stages are larger than was known
            return replace(self, moving_bytes=moving).placed(pcs)
        names = [pc.name for pc in pcs]
        ranks = tuple(names.index(stage.pc) for stage in plan.stages)
        return Placement(stages=stages.at_ranks(ranks), ranks=ranks, measured=self, plan=plan)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Stages, and who computes them. ranks: of each stage, that of its PC.  measured: what the plan follows from.
    plan: what is predicted; its stages count segments."""

    stages: Split
    ranks: tuple[int, ...]
    measured: Measured
    plan: PlannedPipeline

    def memory_bytes(self, stage: int) -> int:
        """Return what a stage takes of its PC's memory by the plan, an update of its optimizer included."""
        return self.plan.stages[stage].memory_bytes + self.measured.moving_bytes

    def __str__(self) -> str:
        plan = self.plan
        lines = [f"a step of {plan.micro_batches} micro-batches takes {plan.step_seconds:.3g} s, efficiency "
                 f"{plan.efficiency:.2f}"]  # fmt: skip
        for number, stage in enumerate(plan.stages):
            leaves = [leaf.name for leaf in self.stages[number].held]
            held = ", ".join(leaves[:3] + ["..."] * (len(leaves) > 3)) or "no parameters"
            lines.append(
                f"stage {number} at {stage.pc}: {stage.end - stage.begin} of {len(self.measured.costs)} segments, "
                f"{1e3 * stage.seconds:.3g} ms a micro-batch, {self.memory_bytes(number) / 1e6:.4g} MB ({held})"
            )
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the PCs of a pipeline are to train; all of them give the same, but `memory_bytes`.

    loss_fn(params, batch) -> a scalar.  init_fn(key) -> the parameters; it is compiled for the own leaves only.  batch:
    a whole one, or shapes.  micro_batches, uncut: as of `split`.  key: `jax.random.key(0)` if None.  memory_bytes: what
    a stage may use on this PC; None: nine tenths of what its card has, or of what is free.  codec: of what travels.
    optimizer_on: see `Pipeline`.
    """

    loss_fn: Loss
    init_fn: Callable[[Any], Any]
    optimizer: optax.GradientTransformation | None
    batch: Any
    micro_batches: int
    key: Any = None
    uncut: Collection[str] = ()
    memory_bytes: int | None = None
    schedule: Schedule
    codec: str
    optimizer_on: OptimizerOn = "device"

    def init(self, stage: Stage) -> Any:
        """Return the first parameters of a stage."""
        return stage.init(self.init_fn, self._key)

    @property
    def _key(self) -> Any:
        return jax.random.key(0) if self.key is None else self.key

    def place(self, comm: Communicator, copies: int = 0, most_segments: int = 0) -> Placement:
        """Measure the segments of the loss on all PCs of a communicator, and return the plan. All ranks call it.

        copies: of its parameters that a stage keeps on the host; they count where a PC has no card.  most_segments: so
        many are measured at most; 0: as many as suit so many PCs.
        Raises ConfigError for a loss with fewer segments than PCs, and on all ranks if they have different settings;
        DoesNotFit on all ranks if the PCs cannot hold the model.
        """
        check_micro_batches(self.micro_batches, comm.size)
        boundary, rule, params = Boundary(self.codec), self.schedule, jax.eval_shape(self.init_fn, self._key)
        form = jax.eval_shape(lambda tree: tree, self.batch)
        batches = MicroBatches(form, self.micro_batches, frozenset(self.uncut))
        segments = cut_into_segments(self.loss_fn, params, batches, comm.size, most_segments)
        place = where if isinstance(where := place_of(self.optimizer_on), str) else "in a file"
        terms = f"schedule {rule.name}, depth {rule.depth}, codec {boundary.codec}, optimizer {place}"
        check_terms(comm, f"{terms}, {terms_of(segments)}")
        memory, has_no_card = float(self.memory_bytes or usable_memory()), float(card_bytes() is None)
        found = [figure for one in measure(segments) for figure in one]
        told = comm.allgather(np.array([*found, has_no_card, memory]))
        names = [f"{name} ({rank})" if comm.names.count(name) > 1 else name for rank, name in enumerate(comm.names)]
        figures = {
            name: [SegmentFigures(*row) for row in one[:-2].reshape(-1, 3)]
            for name, one in zip(names, told, strict=True)
        }
        on_host_counts = any(one[-2] for one in told)
        copies, optimizer = copies * on_host_counts, self.optimizer
        if not counts(self.optimizer_on, not on_host_counts):
            optimizer = None
        measured = Measured(
            loss_fn=self.loss_fn,
            params=params,
            batches=batches,
            segments=segments,
            costs=tuple(costs_of(segments, figures, optimizer, boundary, copies)),
            pcs=tuple(PC(name=name, memory_bytes=int(one[-1])) for name, one in zip(names, told, strict=True)),
            schedule=rule,
            moving_of=partial(_moving_of, self.optimizer if optimizer is None else None, bool(on_host_counts)),
        )
        trial = measured.placed([replace(pc, memory_bytes=BOUNDLESS) for pc in measured.pcs])
        own_stage = trial.stages[trial.ranks.index(comm.rank)]
        working = comm.allgather(np.array([working_bytes(own_stage.compiled_backward())]))
        shares = [
            float(working[rank][0])
            / max(1, sum(cost.activation_bytes for cost in measured.costs[stage.begin : stage.end]))
            for stage, rank in zip(trial.plan.stages, trial.ranks, strict=True)
        ]
        share = min(1.0, max(shares))
        costs = tuple(replace(cost, activation_bytes=int(share * cost.activation_bytes)) for cost in measured.costs)
        return replace(measured, costs=costs).placed(measured.pcs)


def _moving_of(optimizer: optax.GradientTransformation | None, on_host_counts: bool, stage: Stage) -> int:
    """Return what an update of a stage takes at most besides what it holds. optimizer: whose state does not count.
    on_host_counts: whether it is fetched into the memory that counts; else only new parameters come there."""
    if optimizer is None:
        return 0
    return moving_bytes(optimizer if on_host_counts else optax.identity(), stage.own_shapes)


def cut_into_segments(loss_fn: Loss, params: Any, batches: MicroBatches, pcs: int, most: int = 0) -> Split:
    """Cut a loss at its marks, or at places that are as cheap as those for whole stages. Raises ConfigError if it has
    fewer segments than there are PCs.

    most: at most so many, and the same ones for every number of PCs up to USUAL_PCS; each has parameters that no
    segment before it has, so that each stage has parts of the model to exchange.  0: as many as suit these PCs.
    """
    positions = positions_of(loss_fn, params, batches.form())
    wanted = pcs
    if parts := most > 0:
        wanted = max(pcs, min(USUAL_PCS, len(positions.marks) + 1 if positions.marks else positions.units))
    else:
        most = MOST_SEGMENTS if positions.marks else min(MOST_SEGMENTS, SEGMENTS_PER_PC * pcs)
    cut = partial(split, loss_fn, params, batches.batch, micro_batches=batches.count, uncut=batches.uncut)
    segments = cut(positions.candidates(wanted - 1, max(wanted, most) - 1))
    if not parts:
        return segments
    owners = parts_of_segments(segments).segments
    kept = [one.position for number, one in enumerate(segments.cuts, 1) if number in owners and min(owners) < number]
    return cut(kept) if pcs - 1 <= len(kept) < len(segments.cuts) else segments


def costs_of(
    segments: Split,
    figures: dict[str, list[SegmentFigures]],
    optimizer: optax.GradientTransformation | None,
    boundary: Boundary,
    copies: int = 0,
) -> list[SegmentCost]:
    """Return the costs of segments. figures: by PC, what it measured of each.  optimizer: whose state counts, if any.
    copies: of the parameters, besides."""
    costs = []
    for number, segment in enumerate(segments):
        shared = [one for one in segments.tied if number in one.stages]
        parameters, held = segment.parameter_bytes, held_bytes(segment, optimizer)
        held += copies * parameters
        more = held / parameters if parameters else 0.0
        tied = sum(one.nbytes for one in shared)
        costs.append(
            SegmentCost(
                name=", ".join(leaf.name for leaf in segment.held) or f"segment {number}",
                forward_seconds={pc: found[number].forward_seconds for pc, found in figures.items()},
                backward_seconds={pc: found[number].backward_seconds for pc, found in figures.items()},
                parameter_bytes=parameters - tied,
                held_bytes=int(held - more * tied),
                carry_bytes=sum(value.nbytes for value in segment.carry_out if not segment.is_last),
                wire_bytes=0 if segment.is_last else boundary.wire_bytes(segment.carry_out),
                activation_bytes=int(max(found[number].activation_bytes for found in figures.values())),
                tied=tuple(
                    TiedLeaf(
                        name=f"{one.path}[{one.rows.start}:{one.rows.stop}]",
                        parameter_bytes=one.nbytes,
                        held_bytes=int(more * one.nbytes),
                    )
                    for one in shared
                ),
            )
        )
    return costs


def held_bytes(stage: Stage, optimizer: optax.GradientTransformation | None) -> int:
    """Return the bytes of a stage's parameters, their gradients and its optimizer's state."""
    state = () if optimizer is None else jax.eval_shape(optimizer.init, stage.own_shapes)
    return 2 * stage.parameter_bytes + _bytes_of(state)


def terms_of(stages: Split) -> str:
    """Return in words what must be the same on all PCs: micro-batches, and a digest of the cut and of the batch."""
    cut = hashlib.sha256(str(stages).encode() + str(stages.batches.batch).encode()).hexdigest()[:12]
    return f"{stages.micro_batches} micro-batches, {len(stages)} parts, cut {cut}"


def check_terms(comm: Communicator, own: str) -> None:
    """Compare the settings of all PCs, in words. Raises ConfigError on all of them if they differ."""
    padded = np.zeros(TERMS_BYTES, np.uint8)
    encoded = own.encode()[:TERMS_BYTES]
    padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    terms = [bytes(one).rstrip(b"\0").decode(errors="replace") for one in comm.allgather(padded)]
    for name, other in zip(comm.names, terms, strict=True):
        if other != terms[0]:
            raise ConfigError(
                f"the stages of a pipeline have different settings: {comm.names[0]} has {terms[0]}, and {name} has "
                f"{other}. Give all the same; another cut is another loss, model or batch"
            )


def usable_memory() -> int:
    """Return what a stage may use of this PC: of its card's memory, or of what is free. Raises ConfigError if neither
    is known."""
    if (known := card_bytes() or free_memory()) is None:
        raise ConfigError("this PC does not say how much memory it has: say it (memory_bytes=6_000_000_000)")
    return int(MEMORY_SHARE * known)


# ---------------------------------------------------------------------- what is measured


def measure(segments: Sequence[Stage]) -> list[SegmentFigures]:
    """Compute each segment here, forward and backward, and return what that took. Segments that are alike, as the
    layers of a transformer are, are computed once."""
    known: dict[str, SegmentFigures] = {}
    found = []
    for segment in segments:
        kind = f"{segment.is_last} {segment.jaxpr.jaxpr}"
        if kind not in known:
            known[kind] = _measure(segment)
        found.append(known[kind])
    return found


def _measure(segment: Stage) -> SegmentFigures:
    forward, backward = segment.compiled_forward(), segment.compiled_backward()
    inputs = segment.jaxpr.in_avals[len(segment.held) :][: len(segment.data)]
    own = jax.tree.map(_filled, segment.own_shapes)
    data, carry, cotangents = (
        tuple(map(_filled, forms)) for forms in (inputs, segment.carry_in, segment.cotangents_in)
    )
    seconds = []
    gradients = segment.zero_gradients()
    for _ in range(1 + PASSES):
        begun = time.perf_counter()
        computed(forward(own, data, carry))
        between = time.perf_counter()
        result = computed(backward(own, data, carry, gradients, cotangents))
        gradients = result[1]
        seconds.append((between - begun, time.perf_counter() - between))
    forward_seconds, backward_seconds = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
    return SegmentFigures(forward_seconds, backward_seconds, working_bytes(backward))


def working_bytes(backward: jax.stages.Compiled) -> float:
    """Return the bytes that a backward pass needs besides what it is given and gives; 0 where no compiler says it."""
    said = backward.memory_analysis()
    return float(0 if said is None else said.temp_size_in_bytes)


def _filled(form: Any) -> jax.Array:
    """Return an array, or random keys, of a form; all values are alike."""
    is_real = jnp.issubdtype(form.dtype, jnp.inexact)
    return jnp.full(form.shape, FILLING, form.dtype) if is_real else jnp.zeros(form.shape, form.dtype)


def _bytes_of(tree: Any) -> int:
    return sum(int(leaf.size) * int(jnp.dtype(leaf.dtype).itemsize) for leaf in jax.tree.leaves(tree))
