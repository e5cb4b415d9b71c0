"""Sparse publishes of a round, held compressed until their fragment is released, and the release of such a fragment.

A sparse publish comes from a codec that picks values (`Codec.sparse`). It is added where it has values, in a core's
cache: a part of a fragment at a time goes through sum, mean, outer step, subtraction and encoding, and the sum of the
fragment is never in memory.

Rule 1: the bits are those of the sum that is kept in memory: publishes are added in the order in which they came.
Rule 2: one publish that is not sparse, an outer optimizer with a state, or more frames than the sum's own bytes: what
is held is added to the sum in memory, and so is the rest of the round.
Rule 3: parts are released by several threads; no part looks at another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zmqtrain.averaging.meter import DeltaMeter
from zmqtrain.averaging.slab_threads import SlabThreads
from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import Codec, State
from zmqtrain.codecs.norm import payload_norm
from zmqtrain.codecs.payload import Part, SlabEncoder, SlabReader, plan_parts
from zmqtrain.codecs.sparsify import put_at
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.protocol.messages import Publish

PART_VALUES = 1 << 18
"""The values of a part, if the slabs allow it: a megabyte, as much as the longest slab of a codec that picks."""

MOST_PART_VALUES = 1 << 20
"""Where slabs of different codecs make parts longer than this, the sum is made in memory."""

NORM_MARGIN = 2.0
"""A publish's norm, as it goes by scales, bounds its largest value but for rounding."""

Vector = NDArray[np.float32]


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
class _Held:
    """A publish that is held, and how it is coded."""

    peer: PeerId
    publish: Publish
    codecs: tuple[Codec, ...]
    frames: Sequence[Buffer]


class SparseRound:
    """What is held of each fragment.  meter: is given samples of what is added.  enabled: False holds nothing."""

    def __init__(self, meter: DeltaMeter, threads: SlabThreads | None = None, enabled: bool = True) -> None:
        self._meter, self._threads, self._enabled = meter, threads or SlabThreads(), enabled
        self.begin(0)

    def begin(self, fragments: int) -> None:
        """Hold nothing, of a model of so many fragments."""
        self._held: list[list[_Held]] = [[] for _ in range(fragments)]
        self._bounds = [0.0] * fragments
        self._bytes = [0] * fragments
        self._counts: list[Sequence[int]] = [()] * fragments
        self._in_memory = [False] * fragments  # the sum of this round lies in memory
        # by slab: what was published at the places that the last release changed; kept, because fresh memory costs more
        self._known: list[dict[int, Vector]] = [{} for _ in range(fragments)]

    def hold(
        self,
        peer: PeerId,
        publish: Publish,
        codecs: tuple[Codec, ...],
        frames: Sequence[Buffer],
        counts: Sequence[int],
    ) -> bool:
        """Hold a checked publish; False if it has to be added to the sum in memory, after what is held before it."""
        fragment = publish.fragment
        size = self._bytes[fragment] + sum(memoryview(frame).nbytes for frame in frames)
        fits = self._enabled and not self._in_memory[fragment] and size <= 4 * sum(counts)
        if not fits or not _is_sparse(codecs, counts):
            return False
        self._held[fragment].append(_Held(peer, publish, codecs, frames))
        self._bounds[fragment] += NORM_MARGIN * payload_norm(codecs, frames, counts)
        self._bytes[fragment], self._counts[fragment] = size, counts
        return True

    def holds(self, fragment: int) -> bool:
        """Return whether publishes of a fragment are held."""
        return bool(self._held[fragment])

    def give_up(self, fragment: int) -> list[tuple[PeerId, Publish, Sequence[Buffer]]]:
        """Return what is held, in order, to be added to the sum in memory; the rest of the round is not held."""
        held = [(one.peer, one.publish, one.frames) for one in self._held[fragment]]
        self.close(fragment)
        self._in_memory[fragment] = True
        return held

    def close(self, fragment: int) -> None:
        """Hold nothing of a fragment any more: its round is over."""
        self._held[fragment], self._bounds[fragment], self._bytes[fragment] = [], 0.0, 0
        self._in_memory[fragment] = False

    def can_release(self, fragment: int, codecs: tuple[Codec, ...], largest: float) -> bool:
        """Return whether something is held that can be released without a sum in memory.

        codecs: of the aggregate.  largest: no magnitude in the sum may reach this.
        """
        if not self._held[fragment] or not self._bounds[fragment] < largest:
            return False
        return max(part.values for part in self._parts(fragment, codecs)) <= MOST_PART_VALUES

    def _parts(self, fragment: int, codecs: tuple[Codec, ...]) -> tuple[Part, ...]:
        codings = (codecs, *(one.codecs for one in self._held[fragment]))
        return plan_parts(codings, tuple(self._counts[fragment]), PART_VALUES)

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
        counts, held, size = self._counts[fragment], self._held[fragment], parameters.size
        parts = self._parts(fragment, codecs)
        encoder = SlabEncoder(codecs, counts, states)
        sources = [SlabReader(one.codecs, one.frames, counts) for one in held]
        sampled = self._meter.places(fragment, size)
        samples = np.empty((2, len(held), sampled.size), np.float32)  # of the sum, before and after each
        known, added = self._known[fragment], list[int]()
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
                before = known.get(number)
                if before is None or before.size != places.size:
                    before = known[number] = np.empty(places.size, np.float32)
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
                published[slab.start : slab.end][places] = known[number]
            raise
        dense = [number for number, slab in enumerate(encoder.plan.slabs) if slab.codec.sparse is None]
        self._threads.each(publish, dense, size)
        for order, one in enumerate(held):
            if not one.publish.dense:
                self._meter.add_sample(one.peer, fragment, samples[0, order], samples[1, order], size)
        return encoder.finish()


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
