"""Rounds that hold their deltas, compressed, until they close.

`HeldRound` holds any deltas, for rules that need all of a round; `EncodedRound` holds those that take less memory
encoded, because to add them part by part, in a core's cache, costs less than to add each to a sum in memory, and
releases every fragment, on `SlabThreads`; `DeltaMeter` samples what is added, for the noise scale of the run.
Rule 1: a delta is not decoded once more for its sample: that is read from the sum, before and after.
Rule 2: each item of shared work reads and writes its own part of the arrays alone, so that the results do not depend on
the number of threads. The thread that asks works along; a small fragment is left to it alone, because to wake others
would take longer. Threads are used as far as cores are idle: on busy cores they would wait for each other, and take the
time of those who train there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import SLAB_VALUES, Codec, State, Step
from zmqtrain.codecs.payload import (
    Item,
    Part,
    PayloadMemory,
    Run,
    SlabEncoder,
    SlabReader,
    is_plain,
    payload_norm,
    plan_parts,
)
from zmqtrain.core.errors import CodecError
from zmqtrain.core.priority import follow
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, PeerId, Version
from zmqtrain.protocol.effects import Contribution
from zmqtrain.protocol.messages import Publish
from zmqtrain.strategies.aggregate import aggregation_from_spec, mean_over_live
from zmqtrain.strategies.measures import NoiseScale
from zmqtrain.strategies.outer import OuterOptimizer
from zmqtrain.strategies.weights import compensate, selection_from_spec, staleness_from_spec

MOST_THREADS = 4
"""More threads wait for the same memory, and for the parts of the work that hold the interpreter's lock."""

LEAST_VALUES = 1 << 20
"""A fragment of fewer values is worked on by one thread: it takes a millisecond or two."""


def own_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def idle_cores() -> int:
    """Return how many of the cores that this process may use were idle in the last minute, as the machine's load says;
    all of them where it does not say."""
    try:
        busy = os.getloadavg()[0]
    except (AttributeError, OSError):  # a system that has no such figure, or does not give it
        busy = 0.0
    return max(0, round(own_cores() - busy))


@lru_cache(maxsize=1)
def _helpers(process: int) -> ThreadPoolExecutor:
    """Return the threads that all slabs of a process share; threads do not survive a fork."""
    return ThreadPoolExecutor(MOST_THREADS - 1, "zmqtrain-slabs", initializer=follow)


class SlabThreads:
    """Do independent pieces of work in `threads` threads; None: in the caller's and one for each idle core, at most 4.

    least_values: work on fewer values is done in the caller's thread.
    """

    def __init__(self, threads: int | None = None, least_values: int = LEAST_VALUES) -> None:
        self._threads, self._least_values = threads, least_values

    def count(self, values: int) -> int:
        if values < self._least_values:
            return 1
        return min(MOST_THREADS, 1 + idle_cores()) if self._threads is None else self._threads

    def each(self, work: Callable[[Item], object], items: Sequence[Item], values: int) -> None:
        """Do `work` for every item and wait for all of it. values: that all items have together.

        Raises what `work` raised for the earliest item; later ones may then not have been begun.
        """
        threads = min(self.count(values), len(items))
        if threads <= 1:
            for item in items:
                work(item)
            return
        coming, failed = iter(range(len(items))), dict[int, BaseException]()

        def some() -> None:
            while not failed:
                number = next(coming, None)  # one call into C: no two threads are given the same
                if number is None:
                    return
                try:
                    work(items[number])
                except BaseException as error:
                    failed[number] = error

        helping = []
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and begins no thread: this one does it all
            for _ in range(threads - 1):
                helping.append(_helpers(os.getpid()).submit(some))
        some()
        wait([one for one in helping if not one.cancel()])  # what still waits for a thread has nothing left to do
        if failed:
            raise failed[min(failed)]


Vector = NDArray[np.float32]

SAMPLED = 4096
"""So many values of a fragment are looked at, spread over it; of a smaller one all."""


class DeltaMeter:
    """The noise scale of the deltas that one hub adds."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all samples: the run begins, or is restored."""
        self._scale = NoiseScale()
        self._places: dict[int, NDArray[np.int64]] = {}

    @property
    def noise(self) -> float | None:
        """The noise scale in units of one node's delta (`NoiseScale.noise`)."""
        return self._scale.noise

    def read(self, fragment: int, total: Vector) -> Vector:
        sample: Vector = total[self.places(fragment, total.size)]
        return sample

    def places(self, fragment: int, size: int) -> NDArray[np.int64]:
        """Return the sampled places of a fragment of so many values, ascending."""
        if (places := self._places.get(fragment)) is None:
            places = self._places[fragment] = _spread(size, fragment)
        return places

    def add(self, peer: PeerId, fragment: int, before: Vector, after: Vector, size: int) -> None:
        """Take a node's delta of so many values from what the sum has at the sampled places before and after it.

        before: a zero if the sum is nothing but this delta.
        """
        added = after.astype(np.float64)
        added -= before
        if added.size and np.isfinite(added).all():  # a sum that overflows is left out of the parameters too
            added *= np.sqrt(size / added.size)
            self._scale.add(peer, fragment, added)

    def close(self, fragments: tuple[int, ...]) -> None:
        for fragment in fragments:
            self._scale.close(fragment)


def _spread(size: int, fragment: int) -> NDArray[np.int64]:
    """Return ascending places: one at random of each of SAMPLED equal stretches of a vector."""
    count = min(size, SAMPLED)
    bounds = np.arange(count + 1) * size // max(1, count)
    return np.random.default_rng(fragment).integers(bounds[:-1], bounds[1:])


SCORES_KEPT = 16
"""The shared model's score is the median of so many of its nodes' latest ones."""

Frames = Sequence[Buffer]
Held = tuple[Publish, Frames]
Decode = Callable[[PeerId, Publish, Frames], Vector]


class HeldRound:
    """The rules that look at all of a round, and what they keep from round to round.

    needed: whether this run has such a rule; if not, a publish can be added when it comes.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._aggregation = aggregation_from_spec(settings.aggregate)
        self._selection = selection_from_spec(settings.selection)
        self._staleness = staleness_from_spec(settings.staleness)
        self.needed = not (
            self._aggregation.name == "mean"
            and self._selection.name == "all"
            and self._staleness.name == "constant"
            and (settings.max_staleness == 0 or settings.stale == "return")
        )
        self._scores: deque[float] = deque(maxlen=SCORES_KEPT)
        self._history: list[deque[tuple[Version, Vector]]] = []  # per fragment: what was published, for compensation

    def begin(self, fragments: int) -> None:
        """Forget what was published; the model has so many fragments."""
        kept = self._staleness.versions + 1 if self._staleness.versions else 0
        self._history = [deque(maxlen=kept) for _ in range(fragments)]

    def remember(self, version: Version, published: Sequence[Vector], fragments: Iterable[int]) -> None:
        """Keep a copy of these published fragments, if the staleness rule compensates."""
        if self._staleness.versions:
            for fragment in fragments:
                self._history[fragment].append((version, published[fragment].copy()))

    # ------------------------------------------------------------------ closing a round

    def sum_up(
        self,
        held: Sequence[tuple[Contribution, Publish, Frames]],
        decode: Decode,
        published: Sequence[Vector],
        sums: Sequence[Vector],
    ) -> None:
        """Make the sums of a round, per fragment in `sums` (zeros before): n times what its publishes combine to.

        held: all of the round.  decode: gives D(u).  published: per fragment, what nodes have now.  Scores are compared
        within a fragment.
        """
        held = [(one, publish, frames) for one, publish, frames in held if not one.too_stale]
        own = self._score
        self._scores.extend(one.score for one, _, _ in held if np.isfinite(one.score))
        for fragment in sorted({one.fragment for one, _, _ in held}):
            of_fragment = [(one, publish, frames) for one, publish, frames in held if one.fragment == fragment]
            by_score = self._selection.weights([one.score for one, _, _ in of_fragment], own)
            by_samples = self._aggregation.weigh([one.samples for one, _, _ in of_fragment])
            decoded = [partial(decode, one.peer, publish, frames) for one, publish, frames in of_fragment]
            counted = [
                (partial(self._damped, one, u, published[fragment]), score * samples)
                for (one, _, _), u, score, samples in zip(of_fragment, decoded, by_score, by_samples, strict=True)
                if score * samples > 0
            ]
            if self._aggregation.streams:
                self._add_up(counted, len(of_fragment), sums[fragment])
            else:
                self._combine(
                    [u() for u, _ in counted], [weight for _, weight in counted], len(of_fragment), sums[fragment]
                )

    @property
    def _score(self) -> float:
        """The shared model's score; NaN: none was reported."""
        return median(self._scores) if self._scores else float("nan")

    def _damped(self, one: Contribution, decode: Callable[[], Vector], published: Vector) -> Vector:
        """Return s D(u): damped by its staleness, or corrected for what has been published since its base."""
        u = decode()
        damping = self._staleness.damping(one.staleness)
        if damping != 1.0:
            u *= np.float32(damping)
        if self._staleness.versions and one.staleness > 0:
            history = self._history[one.fragment]
            base = next((array for version, array in reversed(history) if version <= one.base_version), history[0][1])
            u = compensate(u, published - base, self._staleness.strength)
        return u

    def _add_up(self, counted: Sequence[tuple[Callable[[], Vector], float]], count: int, total: Vector) -> None:
        """Make the sum of a rule that is a weighted mean: one contribution is decoded at a time."""
        whole = sum(weight for _, weight in counted)
        for decode, weight in counted:
            u = decode()
            u *= np.float32(weight / whole)
            total += u
        total *= np.float32(count)

    def _combine(self, us: Sequence[Vector], weights: Sequence[float], count: int, total: Vector) -> None:
        scales = self._aggregation.scales([_norm(u) for u in us])
        for u, scale in zip(us, scales, strict=True):
            if scale != 1.0:
                u *= np.float32(scale)
        for start in range(0, total.size, SLAB_VALUES):
            part = slice(start, start + SLAB_VALUES)
            np.multiply(self._aggregation.combine([u[part] for u in us], weights), np.float32(count), out=total[part])

    # ------------------------------------------------------------------ what outlives a restart

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return by name: "history/<fragment>/<version>" what was published then, flat, and "scores" (float64)."""
        history = {
            f"history/{fragment}/{version}": flat.copy()
            for fragment, history in enumerate(self._history)
            for version, flat in history
        }
        return history | {"scores": np.array(self._scores, np.float64)}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `arrays` returned, besides what is remembered since `begin`. Raises KeyError."""
        self._scores = deque((float(score) for score in arrays["scores"]), maxlen=SCORES_KEPT)
        for name in arrays:
            kind, _, place = name.partition("/")
            if kind == "history":
                fragment, version = (int(part) for part in place.split("/"))
                self._history[fragment].append((version, arrays[name].copy()))
        for fragment, history in enumerate(self._history):
            latest = dict(history)  # what has been remembered since is the newest
            self._history[fragment] = deque(sorted(latest.items()), maxlen=history.maxlen)


def _norm(u: Vector) -> float:
    """Return the L2 norm of a finite vector, also where its square is no float32."""
    largest = float(np.abs(u).max(initial=0.0))
    return largest * float(np.linalg.norm(u / np.float32(largest))) if largest > 0 else 0.0


PART_VALUES = 1 << 18
"""The values of a part, if the slabs allow it: a megabyte, as much as the longest slab of a codec that picks."""

MOST_PART_VALUES = 1 << 20
"""Where slabs of different codecs make parts longer than this, the sum is made in memory."""

MOST_DENSE = 4
"""So many publishes that send every value are held; when one more comes, these are added to the sum in memory, in one
pass. With more of them the release, for which all nodes wait, would take longer than it does now."""

DENSE_BYTES = 2
"""A publish that sends every value is held if it has fewer bytes a value: at most half of what the sum has."""

_NOTHING = np.empty(0, np.float32)

NORM_MARGIN = 2.0
"""A publish's norm, as it goes by scales, bounds its largest value but for rounding."""


class _Scratch(threading.local):
    """Memory of this thread for the sum of a part."""

    def __init__(self) -> None:
        self._values = np.empty(0, np.float32)

    def take(self, count: int) -> Vector:
        if self._values.size < count:
            self._values = np.empty(max(count, PART_VALUES), np.float32)
        return self._values[:count]


_scratch = _Scratch()


@dataclass(frozen=True, slots=True)
class OuterStep:
    """How a release steps the parameters of a fragment.

    live: by how many nodes the sum is divided; None: nothing counts, and the parameters stay.  plain: by the mean
    itself, without the outer optimizer.  state, turn: as `OuterOptimizer.update` takes them.
    """

    live: int | None
    plain: bool
    outer: OuterOptimizer
    state: Mapping[str, Vector]
    turn: bool

    def in_a_pass(self, part: slice) -> Step | None:
        """Return the step of a part as the codecs' loops take it; None: the outer optimizer does more than that."""
        rate, momentum = (1.0, None) if self.plain else (self.outer.rate, self.outer.momentum)
        if self.live is None or rate is None:
            return None
        if momentum is None:
            return Step(self.live, rate, 0.0, _NOTHING)
        return Step(self.live, rate, momentum, self.state["momentum"][part])

    def take(self, part: slice, total: Vector, parameters: Vector, published: Vector) -> None:
        """Step one part, and write what is not published of it to `total`, the part's sum.

        parameters, published: of the part. Parts may be stepped in any order, from any thread, to the same bits.
        """
        step, kernels = self.in_a_pass(part), fast.kernels(total.size)
        if step is not None and kernels and is_plain(parameters) and is_plain(published):
            kernels.step(total, *fast.arguments_of(step), parameters, published)
            return
        if self.live is not None:
            mean = mean_over_live(total, self.live, out=total)
            state = {name: array[part] for name, array in self.state.items()}
            np.add(parameters, mean if self.plain else self.outer.update(mean, state, self.turn), out=parameters)
        np.subtract(parameters, published, out=total)


@dataclass(frozen=True, slots=True)
class _Encoded:
    peer: PeerId
    publish: Publish
    codecs: tuple[Codec, ...]
    frames: Sequence[Buffer]


@dataclass
class _Fragment:
    """One fragment's round. bound: of its sum's magnitudes.  dense: how many of those held send every value.
    in_memory: part of the sum, which comes before all that is held, lies in memory."""

    held: list[_Encoded] = field(default_factory=list)
    bound: float = 0.0
    bytes: int = 0
    dense: int = 0
    counts: tuple[int, ...] = ()
    in_memory: bool = False


class _Adding:
    """The publishes that are added to one fragment's sum, in order, part by part, and the samples of that sum.

    places: that are sampled, ascending.
    """

    def __init__(self, known: _Fragment, places: NDArray[np.int64]) -> None:
        self._held, self._places = list(known.held), places
        self.sources = [SlabReader(one.codecs, one.frames, known.counts) for one in self._held]
        self._samples = np.empty((2, len(self._held), places.size), np.float32)  # before and after each

    @property
    def sampled(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The places, and what the sum has there before and after each: float32[2, publishes, places]."""
        return self._places, self._samples

    def add(self, part: Part, slabs: Sequence[range], total: Vector) -> None:
        """Add one part of each to `total`, the part's sum. slabs: of the part, in each publish."""
        first, last = np.searchsorted(self._places, (part.start, part.end)).tolist()
        looked_at, samples = self._places[first:last] - part.start, self._samples
        values = PayloadMemory.flat(total, part.start)
        for order, (source, numbers) in enumerate(zip(self.sources, slabs, strict=True)):
            samples[0, order, first:last] = total[looked_at]
            source.add(numbers, values)
            samples[1, order, first:last] = total[looked_at]

    def sample(self, meter: DeltaMeter, fragment: int, size: int) -> None:
        """Give the meter what each has added."""
        for order, one in enumerate(self._held):
            if not one.publish.dense:  # what a node ends its share with is not of the usual size
                meter.add(one.peer, fragment, self._samples[0, order], self._samples[1, order], size)


class EncodedRound:
    """What is held of each fragment.  meter: is given samples of what is added.  enabled: False holds nothing."""

    def __init__(self, meter: DeltaMeter, threads: SlabThreads | None = None, enabled: bool = True) -> None:
        self._meter, self._threads, self._enabled = meter, threads or SlabThreads(), enabled
        self.begin(0)

    def begin(self, fragments: int) -> None:
        """Forget all held publishes; the model has so many fragments."""
        self._fragments = [_Fragment() for _ in range(fragments)]

    def hold(
        self,
        peer: PeerId,
        publish: Publish,
        codecs: tuple[Codec, ...],
        frames: Sequence[Buffer],
        counts: tuple[int, ...],
        total: Vector,
    ) -> bool:
        """Hold a checked publish; False if it has to be added to the sum in memory.

        total: the fragment's sum in memory, to which what is held is added first if it is too much, or this publish
        cannot be held.
        """
        known, values = self._fragments[publish.fragment], sum(counts)
        size = sum(memoryview(frame).nbytes for frame in frames)
        is_sparse = _is_sparse(codecs, counts)
        has_norm = all(codec.energy is not None for codec in codecs)  # else that takes as long as to add it
        holds = self._enabled and (is_sparse or (has_norm and size < DENSE_BYTES * values)) and size <= 4 * values
        if not holds or known.bytes + size > 4 * values or (known.dense == MOST_DENSE and not is_sparse):
            self.add_up(publish.fragment, total)
        if not holds:
            self.lies_in_memory(publish.fragment)
            return False
        known = self._fragments[publish.fragment]
        known.held.append(_Encoded(peer, publish, codecs, frames))
        known.bound += NORM_MARGIN * payload_norm(codecs, frames, counts)
        known.bytes, known.dense, known.counts = known.bytes + size, known.dense + (not is_sparse), counts
        return True

    def holds(self, fragment: int) -> bool:
        return bool(self._fragments[fragment].held)

    def lies_in_memory(self, fragment: int) -> None:
        """Record that something was added to a fragment's sum in memory."""
        self._fragments[fragment].bound, self._fragments[fragment].in_memory = inf, True

    def add_up(self, fragment: int, total: Vector) -> None:
        """Add what is held, in order, to the fragment's sum in memory, in one pass."""
        known = self._fragments[fragment]
        if not known.held:
            return
        adding = _Adding(known, self._meter.places(fragment, total.size))

        def add(part: Part) -> None:
            adding.add(part, part.slabs, total[part.start : part.end])

        parts = plan_parts(tuple(one.codecs for one in known.held), known.counts, PART_VALUES)
        self._threads.each(add, parts, total.size)
        adding.sample(self._meter, fragment, total.size)
        self._fragments[fragment] = _Fragment(bound=known.bound, in_memory=True)

    def close(self, fragment: int, total: Vector) -> None:
        """Drop all of a fragment's round. total: its sum in memory."""
        if self._fragments[fragment].in_memory:
            total.fill(0)
        self._fragments[fragment] = _Fragment()

    def may_overflow(self, fragment: int, codecs: tuple[Codec, ...], largest: float, total: Vector) -> bool:
        """Return whether the sum may have a magnitude of `largest` or more; then all of it lies in memory, in `total`.

        codecs: of the aggregate; where a part would be too long with them, the sum is made in memory too.
        """
        known = self._fragments[fragment]
        fits = not known.held or max(part.values for part in _parts(known, codecs)) <= MOST_PART_VALUES
        if known.bound < largest and fits:
            return False
        self.add_up(fragment, total)
        return not self._fragments[fragment].bound < largest

    def release(
        self,
        fragment: int,
        step: OuterStep,
        codecs: tuple[Codec, ...],
        counts: tuple[int, ...],
        states: list[State] | None,
        arrays: tuple[Vector, Vector, Vector],
    ) -> tuple[Buffer, ...]:
        """Step the parameters by a fragment's sum, and return the frames of what is published of them.

        codecs, counts, states: of the aggregate.  arrays: the sum in memory, the parameters, what is published.
        Raises CodecError: then nothing is published. Nothing is held afterwards, and the sum in memory is zeros.
        """
        known, (in_memory, parameters, published) = self._fragments[fragment], arrays
        size, parts = parameters.size, _parts(known, codecs, counts)
        encoder, everything = SlabEncoder(codecs, counts, states), PayloadMemory.flat(published)
        adding = _Adding(known, self._meter.places(fragment, size))
        is_in_a_pass = not known.in_memory and all(map(is_plain, (parameters, published)))
        whole = step.in_a_pass(slice(None)) if is_in_a_pass and encoder.releases(adding.sources) else None

        def step_run(run: Run, whole: Step) -> None:
            encoder.release_run(run, adding.sources, whole, (parameters, published), adding.sampled)

        def step_part(part: Part) -> None:
            inside = slice(part.start, part.end)
            if known.in_memory:
                total = in_memory[inside]
            else:
                total = _scratch.take(part.values)
                total.fill(0)
            adding.add(part, part.slabs[1:], total)
            step.take(inside, total, parameters[inside], published[inside])
            unpublished = PayloadMemory.flat(total, part.start)
            for run in encoder.plan.runs_of(part.slabs[0]):
                encoder.encode_run(run, unpublished)
            if known.in_memory:
                total.fill(0)

        try:
            if whole is not None:
                self._threads.each(partial(step_run, whole=whole), encoder.plan.runs, size)
            else:
                self._threads.each(step_part, parts, size)
        except CodecError:  # nothing of it is sent
            self.close(fragment, in_memory)
            raise
        self._fragments[fragment] = _Fragment()
        self._threads.each(lambda run: encoder.add(run, everything), encoder.plan.runs, size)
        adding.sample(self._meter, fragment, size)
        return encoder.finish()


def _parts(known: _Fragment, codecs: tuple[Codec, ...], counts: tuple[int, ...] = ()) -> tuple[Part, ...]:
    return plan_parts((codecs, *(one.codecs for one in known.held)), known.counts or counts, PART_VALUES)


def _is_sparse(codecs: Sequence[Codec], counts: Sequence[int]) -> bool:
    """Return whether more than half of the values are of codecs that pick."""
    picked = sum(count for codec, count in zip(codecs, counts, strict=True) if codec.sparse is not None)
    return 2 * picked > sum(counts)
