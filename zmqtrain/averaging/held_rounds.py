"""Rounds that hold their deltas, compressed, until they close, for rules that need all of a round.

`HeldRound` holds any deltas; `SparseRound` adds and releases sparse ones part by part, on `SlabThreads`; `DeltaMeter`
samples what is added, for the noise scale of the run.
Rule 1: a delta is not decoded once more for its sample: that is read from the sum, before and after.
Rule 2: each item of shared work reads and writes its own part of the arrays alone, so that the results do not depend on
the number of threads. The thread that asks works along; a small fragment is left to it alone, because to wake others
would take longer. Threads are used as far as cores are idle: on busy cores they would wait for each other, and take the
time of those who train there.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import SLAB_VALUES, Codec, State
from zmqtrain.codecs.payload import Part, SlabEncoder, SlabReader, payload_norm, plan_parts
from zmqtrain.codecs.sparsify import put_at
from zmqtrain.core.errors import CodecError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, PeerId, Version
from zmqtrain.protocol.effects import Contribution
from zmqtrain.protocol.messages import Publish
from zmqtrain.strategies.aggregate import aggregation_from_spec
from zmqtrain.strategies.measures import NoiseScale
from zmqtrain.strategies.weights import compensate, selection_from_spec, staleness_from_spec

Item = TypeVar("Item")

MOST_THREADS = 4
"""More threads wait for the same memory, and for the parts of the work that hold the interpreter's lock."""

LEAST_VALUES = 1 << 20
"""A fragment of fewer values is worked on by one thread: it takes a millisecond or two."""


def idle_cores() -> int:
    """Return how many of the cores that this process may use were idle in the last minute, as the machine's load says;
    all of them where it does not say."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        busy = os.getloadavg()[0]
    except (AttributeError, OSError):  # a system that has no such figure, or does not give it
        busy = 0.0
    return max(0, round(cores - busy))


@lru_cache(maxsize=1)
def _helpers(process: int) -> ThreadPoolExecutor:
    """Return the threads that all slabs of a process share; threads do not survive a fork."""
    return ThreadPoolExecutor(MOST_THREADS - 1, "zmqtrain-slabs")


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

        helping = [_helpers(os.getpid()).submit(some) for _ in range(threads - 1)]
        some()
        wait(helping)
        if failed:
            raise failed[min(failed)]


Values = NDArray[np.float32]

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

    def read(self, fragment: int, total: Values) -> Values:
        sample: Values = total[self.places(fragment, total.size)]
        return sample

    def places(self, fragment: int, size: int) -> NDArray[np.int64]:
        """Return the sampled places of a fragment of so many values, ascending."""
        if (places := self._places.get(fragment)) is None:
            places = self._places[fragment] = _spread(size, fragment)
        return places

    def add(self, peer: PeerId, fragment: int, before: Values, after: Values, size: int) -> None:
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

Vector = NDArray[np.float32]
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

NORM_MARGIN = 2.0
"""A publish's norm, as it goes by scales, bounds its largest value but for rounding."""


class _Scratch(threading.local):
    """Memory of this thread for the sum of a part, and for what is not published of it."""

    def __init__(self) -> None:
        self._arrays = np.empty((2, 0), np.float32)

    def take(self, count: int) -> tuple[Vector, Vector]:
        if self._arrays.shape[1] < count:
            self._arrays = np.empty((2, max(count, PART_VALUES)), np.float32)
        total, rest = self._arrays
        return total[:count], rest[:count]


_scratch = _Scratch()


@dataclass(frozen=True, slots=True)
class _Sparse:
    peer: PeerId
    publish: Publish
    codecs: tuple[Codec, ...]
    frames: Sequence[Buffer]


@dataclass
class _Fragment:
    """The sparse publishes of one fragment's round. bound: of their sum's magnitudes; in_memory: the sum of this round
    lies in memory, and nothing more is held."""

    held: list[_Sparse] = field(default_factory=list)
    bound: float = 0.0
    bytes: int = 0
    counts: Sequence[int] = ()
    in_memory: bool = False


class SparseRound:
    """What is held of each fragment.  meter: is given samples of what is added.  enabled: False holds nothing."""

    def __init__(self, meter: DeltaMeter, threads: SlabThreads | None = None, enabled: bool = True) -> None:
        self._meter, self._threads, self._enabled = meter, threads or SlabThreads(), enabled
        self.begin(0)

    def begin(self, fragments: int) -> None:
        """Forget all held publishes; the model has so many fragments."""
        self._fragments = [_Fragment() for _ in range(fragments)]
        # by slab: what was published at the places that the last release changed; kept, because fresh memory costs more
        self._kept: list[dict[int, Vector]] = [{} for _ in range(fragments)]

    def hold(
        self, peer: PeerId, publish: Publish, codecs: tuple[Codec, ...], frames: Sequence[Buffer], counts: Sequence[int]
    ) -> bool:
        """Hold a checked publish; False if it has to be added to the sum in memory, after what is held before it."""
        known = self._fragments[publish.fragment]
        size = known.bytes + sum(memoryview(frame).nbytes for frame in frames)
        fits = self._enabled and not known.in_memory and size <= 4 * sum(counts)
        if not fits or not _is_sparse(codecs, counts):
            return False
        known.held.append(_Sparse(peer, publish, codecs, frames))
        known.bound += NORM_MARGIN * payload_norm(codecs, frames, counts)
        known.bytes, known.counts = size, counts
        return True

    def holds(self, fragment: int) -> bool:
        return bool(self._fragments[fragment].held)

    def give_up(self, fragment: int) -> list[tuple[PeerId, Publish, Sequence[Buffer]]]:
        """Return what is held, in order, to be added to the sum in memory; the rest of the round is not held."""
        held = [(one.peer, one.publish, one.frames) for one in self._fragments[fragment].held]
        self._fragments[fragment] = _Fragment(in_memory=True)
        return held

    def close(self, fragment: int) -> None:
        self._fragments[fragment] = _Fragment()

    def can_release(self, fragment: int, codecs: tuple[Codec, ...], largest: float) -> bool:
        """Return whether something is held that can be released without a sum in memory.

        codecs: of the aggregate.  largest: no magnitude in the sum may reach this.
        """
        known = self._fragments[fragment]
        if not known.held or not known.bound < largest:
            return False
        return max(part.values for part in _parts(known, codecs)) <= MOST_PART_VALUES

    def release(
        self,
        fragment: int,
        live: int | None,
        rate: float,
        codecs: tuple[Codec, ...],
        states: list[State] | None,
        parameters: Vector,
        published: Vector,
    ) -> tuple[Buffer, ...]:
        """Step the parameters by the mean of what is held, and return the frames of what is published of them.

        live: nodes; None: nothing that is held counts.  rate: of the step, in means.  codecs, states: of the aggregate.
        Raises CodecError: then nothing is published. Nothing is held afterwards.
        """
        known = self._fragments[fragment]
        counts, held, size, parts = known.counts, known.held, parameters.size, _parts(known, codecs)
        encoder = SlabEncoder(codecs, counts, states)
        sources = [SlabReader(one.codecs, one.frames, counts) for one in held]
        sampled = self._meter.places(fragment, size)
        samples = np.empty((2, len(held), sampled.size), np.float32)  # of the sum, before and after each
        kept, added = self._kept[fragment], list[int]()
        self.close(fragment)

        def step(part: Part) -> None:
            total, rest = _scratch.take(part.values)
            ours, theirs = parameters[part.start : part.end], published[part.start : part.end]
            first, last = np.searchsorted(sampled, (part.start, part.end)).tolist()
            looked_at = sampled[first:last] - part.start
            total.fill(0)
            for order, (source, numbers) in enumerate(zip(sources, part.slabs[1:], strict=True)):
                samples[0, order, first:last] = total[looked_at]
                for number in numbers:
                    source.add(number, total, part.start)
                samples[1, order, first:last] = total[looked_at]
            if live is None:
                np.subtract(ours, theirs, out=rest)
            else:
                _step(total, np.float32(live), np.float32(rate), ours, theirs, rest)
            for number in part.slabs[0]:
                slab = encoder.plan.slabs[number]
                inside = slice(slab.start - part.start, slab.end - part.start)
                encoder.encode(number, rest[inside])
                if slab.codec.sparse is None:
                    continue
                places, values = slab.codec.sparse(encoder.sections(number), slab.values)
                before = kept.get(number)
                if before is None or before.size != places.size:
                    before = kept[number] = np.empty(places.size, np.float32)
                theirs[inside].take(places, out=before, mode="clip")
                put_at(places, values, theirs[inside], True)
                added.append(number)

        def publish(number: int) -> None:
            slab = encoder.plan.slabs[number]
            slab.codec.decode_into(encoder.sections(number), published[slab.start : slab.end], True)

        try:
            self._threads.each(step, parts, size)
        except CodecError:  # nothing of it is sent
            for number in added:
                slab = encoder.plan.slabs[number]
                assert slab.codec.sparse is not None
                places, _ = slab.codec.sparse(encoder.sections(number), slab.values)
                published[slab.start : slab.end][places] = kept[number]
            raise
        dense = [number for number, slab in enumerate(encoder.plan.slabs) if slab.codec.sparse is None]
        self._threads.each(publish, dense, size)
        for order, one in enumerate(held):
            if not one.publish.dense:
                self._meter.add(one.peer, fragment, samples[0, order], samples[1, order], size)
        return encoder.finish()


def _parts(known: _Fragment, codecs: tuple[Codec, ...]) -> tuple[Part, ...]:
    return plan_parts((codecs, *(one.codecs for one in known.held)), tuple(known.counts), PART_VALUES)


def _is_sparse(codecs: Sequence[Codec], counts: Sequence[int]) -> bool:
    """Return whether more than half of the values are of codecs that pick."""
    picked = sum(count for codec, count in zip(codecs, counts, strict=True) if codec.sparse is not None)
    return 2 * picked > sum(counts)


def _step(
    total: Vector, live: np.float32, rate: np.float32, parameters: Vector, published: Vector, rest: Vector
) -> None:
    """Step a part, parameters += total / live * rate, and write what is not published of it to `rest`; spoils `total`.

    The same bits as `mean_over_live` and `sgd` have.
    """
    plain = parameters.flags.aligned and published.flags.aligned
    if plain and (kernels := fast.kernels(total.size)):
        kernels.step(total, live, rate, parameters, published, rest)
        return
    np.divide(total, live, out=total)
    np.multiply(total, rate, out=total)
    np.add(parameters, total, out=parameters)
    np.subtract(parameters, published, out=rest)
