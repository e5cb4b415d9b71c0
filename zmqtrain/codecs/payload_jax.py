"""Payloads encoded and decoded on the device that holds the values: only compressed bytes cross to the host.

Rule 1: the frames are the very ones of `encode_payload`, and the values those of `decode_payload`, bit for bit.
Rule 2: slabs of one codec and one size are the rows of one array, a *group*, whatever segments they are cut from: each
group is one vmapped encode, so that a model of 150 leaves has some ten to compile, most of which its fragments share.
Rule 3: the bytes cross in one array, group after group and section after section (*packed*); the host, which has to
copy them into frames anyway, puts each section in its place: on the device that would be to join a thousand pieces.
Rule 4: what a codec has decoded is added or subtracted by another compiled function than the one that decoded it: XLA
would fuse a product and a sum, and round once where numpy rounds twice.  (On a processor XLA takes denormals for zeros:
a difference under 2^-126 is zero there, which only a codec that sends floats as they are could tell from numpy's.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.codecs.codec import INFINITY_BITS, MAGNITUDE, Codec, Numpy, State
from zmqtrain.codecs.payload import PayloadPlan, check_payload, plan_payload, seal_frame
from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.core.types import Array, Buffer

Coded = tuple[Sequence[Codec], Sequence[Buffer]]
"""A payload's codecs, one for each segment, and its frames."""

Rows = list[jax.Array]
"""Per group float32[slabs, values]."""

_FIRST_SLAB = slice(8, 12)
"""Where a frame's header holds the number of its first slab."""


@dataclass(frozen=True, slots=True)
class _Section:
    """One buffer of all slabs of a group: `rows` x `count` values of `dtype`, from byte `start` of the packed on."""

    dtype: np.dtype[Any]
    count: int
    rows: int
    start: int

    @property
    def width(self) -> int:
        """Bytes of one slab."""
        return self.count * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """Where the next section begins."""
        return self.start + self.rows * self.width


@dataclass(frozen=True, slots=True)
class _Run:
    """Slabs in a row: values start..end of a segment are `rows` rows of a group, from `row` on."""

    segment: int
    start: int
    end: int
    row: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Group:
    codec: Codec
    values: int
    numbers: tuple[int, ...]
    runs: tuple[_Run, ...]
    sections: tuple[_Section, ...]


class _Arrangement:
    """Where every slab of a payload lies on the device, and the functions that move them there, compiled once."""

    def __init__(self, codecs: tuple[Codec, ...], counts: tuple[int, ...]) -> None:
        self.plan: PayloadPlan = plan_payload(codecs, counts)
        self.counts = counts
        self.groups = _group_slabs(self.plan, counts)
        self.packed_bytes = max((group.sections[-1].stop for group in self.groups), default=0)
        self.stack = jax.jit(self._stack)
        self.unstack = jax.jit(self._unstack)
        self._split = jax.jit(self._cut)

    @cached_property
    def places(self) -> list[list[slice]]:
        """Where in the packed bytes each section of each slab lies."""
        places: list[list[slice]] = [[] for _ in self.plan.slabs]
        for group in self.groups:
            for row, number in enumerate(group.numbers):
                starts = [section.start + row * section.width for section in group.sections]
                places[number] = [
                    slice(start, start + section.width) for start, section in zip(starts, group.sections, strict=True)
                ]
        return places

    def _stack(self, segments: list[jax.Array]) -> Rows:
        return [
            jnp.concatenate([segments[run.segment][run.start : run.end] for run in group.runs]).reshape(
                -1, group.values
            )
            for group in self.groups
        ]

    def _unstack(self, rows: Rows) -> list[jax.Array]:
        pieces: list[list[tuple[int, jax.Array]]] = [[] for _ in self.counts]
        for group, values in zip(self.groups, rows, strict=True):
            for run in group.runs:
                pieces[run.segment].append((run.start, values[run.row : run.row + run.rows].reshape(-1)))
        return [
            jnp.concatenate([piece for _, piece in sorted(one, key=lambda placed: placed[0])])
            if one
            else jnp.zeros(0, jnp.float32)
            for one in pieces
        ]

    def encode(self, rows: Rows, states: list[State]) -> tuple[jax.Array, list[State]]:
        """Return (the packed bytes and, after them, the bits of each slab's largest magnitude; the states)."""
        parts: list[tuple[jax.Array, ...]] = []
        largest, after = [], []
        for group, values, state in zip(self.groups, rows, states, strict=True):
            buffers, bits, new_state = _encoder(group.codec)(values, state)
            parts.append(buffers)
            largest.append(bits)
            after.append(new_state)
        return _join([parts, largest]), after

    def decode(self, packed: jax.Array) -> Rows:
        """Return the rows of all groups from the packed bytes."""
        return [
            _decoder(group.codec, group.values)(buffers)
            for group, buffers in zip(self.groups, self._split(packed), strict=True)
        ]

    def _cut(self, packed: jax.Array) -> list[tuple[jax.Array, ...]]:
        """Return per group its sections, each uint8[slabs, bytes]."""
        return [
            tuple(
                packed[section.start : section.stop].reshape(section.rows, section.width) for section in group.sections
            )
            for group in self.groups
        ]

    def pack(self, frames: Sequence[Buffer]) -> Numpy:
        """Return the packed bytes of frames that `check_payload` has passed."""
        packed = np.empty(self.packed_bytes, np.uint8)
        view = packed.data
        for frame in frames:
            content = memoryview(frame).cast("B")
            first = int.from_bytes(content[_FIRST_SLAB], "little")
            for number in self.plan.of_first[first].slabs:
                for place, section in zip(self.places[number], self.plan.slabs[number].sections, strict=True):
                    view[place] = content[section]
        return packed

    def unpack(self, packed: Numpy) -> tuple[bytearray, ...]:
        """Return the frames, sealed, from the packed bytes."""
        view = packed.data
        frames = []
        for frame_plan in self.plan.frames:
            frame = bytearray(frame_plan.size)
            for number in frame_plan.slabs:
                for section, place in zip(self.plan.slabs[number].sections, self.places[number], strict=True):
                    frame[section] = view[place]
            seal_frame(self.plan, frame_plan, frame)
            frames.append(frame)
        return tuple(frames)


class DeviceCoder:
    """Encode and decode on one device; the values never leave it, nor the states of the codecs.

    bytes_fetched, bytes_put: how many have crossed from the device to the host, and the other way, so far.
    """

    def __init__(self) -> None:
        self.bytes_fetched = 0
        self.bytes_put = 0
        self._device: jax.Device | None = None

    def initial_states(self, codecs: Sequence[Codec], counts: Sequence[int]) -> list[State]:
        """Return the states of all slabs as `encode` keeps them: one pytree for each group, stacked."""
        return [
            jax.tree.map(partial(self._put_repeated, len(group.numbers)), group.codec.init(group.values))
            for group in _arrange(tuple(codecs), tuple(counts)).groups
        ]

    def encode(
        self,
        codecs: Sequence[Codec],
        segments: Sequence[Array],
        in_flight: Sequence[Coded] = (),
        states: list[State] | None = None,
    ) -> tuple[bytearray, ...]:
        """Encode 1-D float32 segments, each with its codec, less what of them is in flight, into frames.

        segments: jax arrays of one device, or numpy arrays.  in_flight: payloads that `check_payload` has passed; they
        are decoded on the device and summed in order.  states: as from `initial_states`, changed in place once all is
        encoded; without them every slab begins afresh.
        Raises NonFiniteDelta naming the segment's index (`states` is as it was then), CodecError for another dtype or
        shape.
        """
        for index, segment in enumerate(segments):
            if segment.ndim != 1 or segment.dtype != np.float32:
                shape = ",".join(map(str, segment.shape))
                raise CodecError(f"segment {index} is {segment.dtype}[{shape}]; a segment is flat and of float32")
        counts = tuple(segment.shape[0] for segment in segments)
        arrangement = _arrange(tuple(codecs), counts)
        if not arrangement.groups:
            return ()
        self._settle(segments)
        before = self.initial_states(codecs, counts) if states is None else states
        rows = arrangement.stack(list(segments))
        if in_flight:
            rows = _less(rows, _stack_as(arrangement, self._sum(in_flight, counts)))
        coded, after = arrangement.encode(rows, before)
        fetched = np.asarray(coded)
        self.bytes_fetched += fetched.nbytes
        packed, largest = np.split(fetched, [arrangement.packed_bytes])
        numbers = [number for group in arrangement.groups for number in group.numbers]
        for number, bits in zip(numbers, largest.view(np.int32).tolist(), strict=True):
            if bits >= INFINITY_BITS:
                slab = arrangement.plan.slabs[number]
                where = f"segment {slab.segment} of {len(counts)}"
                raise NonFiniteDelta(f"{where}: NaN or infinity in a slab of {slab.values} values")
        if states is not None:
            states[:] = after
        return arrangement.unpack(packed)

    def decode(
        self, codecs: Sequence[Codec], frames: Sequence[Buffer], counts: Sequence[int], *, checked: bool = False
    ) -> list[jax.Array]:
        """Return all segments decoded, on the device: float32[count] each.

        checked: `check_payload` has passed these very frames. Raises CodecError, before anything is put.
        """
        if not checked:
            check_payload(codecs, frames, counts)
        return self.decode_sum([(codecs, frames)], counts)

    def decode_sum(self, payloads: Sequence[Coded], counts: Sequence[int]) -> list[jax.Array]:
        """Return the sum of payloads that `check_payload` has passed, in order, as segments on the device."""
        arrangement, rows = self._sum(payloads, tuple(counts))
        segments: list[jax.Array] = arrangement.unstack(rows)
        return segments

    def warm_up(self, codecs: Sequence[Codec], counts: Sequence[int], *, encodes: bool = True) -> None:
        """Compile all that segments of these counts need; nothing crosses to the host.

        encodes: what is so coded is also made here, not only read.
        """
        arrangement = _arrange(tuple(codecs), tuple(counts))
        if not arrangement.groups:
            return
        compiled = arrangement.unstack(arrangement.decode(jnp.zeros(arrangement.packed_bytes, jnp.uint8)))
        if encodes:
            rows = arrangement.stack([jnp.zeros(count, jnp.float32) for count in counts])
            rows = _less(rows, [jnp.zeros_like(values) for values in rows])
            compiled.append(arrangement.encode(rows, self.initial_states(codecs, counts))[0])
        for array in compiled:
            array.block_until_ready()

    def _sum(self, payloads: Sequence[Coded], counts: tuple[int, ...]) -> tuple[_Arrangement, Rows]:
        """Return the sum as rows, and how they lie: as the first payload's."""
        first = _arrange(tuple(payloads[0][0]), counts)
        decoded = []
        for codecs, frames in payloads:
            arrangement = _arrange(tuple(codecs), counts)
            rows = arrangement.decode(self._put(arrangement.pack(frames)))
            decoded.append(_stack_as(first, (arrangement, rows)))
        return first, reduce(_plus, decoded)

    def _settle(self, segments: Sequence[Array]) -> None:
        """Record the device that the segments are committed to, if any: arrays are put there, committed too."""
        first = segments[0]
        if isinstance(first, jax.Array) and first.committed and len(first.devices()) == 1:
            (self._device,) = first.devices()

    def _put_repeated(self, rows: int, leaf: Numpy) -> jax.Array:
        return self._put(np.repeat(np.asarray(leaf)[None], rows, axis=0))

    def _put(self, values: Numpy) -> jax.Array:
        """Put an array of ours; nobody writes into it again: on a CPU the device's array may be this memory."""
        self.bytes_put += values.nbytes
        placed: jax.Array = jax.device_put(values, self._device)
        return placed


@lru_cache(maxsize=1024)
def _arrange(codecs: tuple[Codec, ...], counts: tuple[int, ...]) -> _Arrangement:
    return _Arrangement(codecs, counts)


def _group_slabs(plan: PayloadPlan, counts: tuple[int, ...]) -> tuple[_Group, ...]:
    numbers_of: dict[tuple[Codec, int], list[int]] = {}
    for number, slab in enumerate(plan.slabs):
        numbers_of.setdefault((slab.codec, slab.values), []).append(number)
    starts = np.cumsum((0, *counts)).tolist()
    groups, start = [], 0
    for (codec, values), numbers in numbers_of.items():
        sections = []
        for dtype, count in codec.layout(values):
            sections.append(_Section(np.dtype(dtype), count, len(numbers), start))
            start = sections[-1].stop
        runs: list[_Run] = []
        for row, number in enumerate(numbers):
            slab = plan.slabs[number]
            first = slab.start - starts[slab.segment]
            if runs and (runs[-1].segment, runs[-1].end) == (slab.segment, first):
                last = runs.pop()
                runs.append(_Run(slab.segment, last.start, first + values, last.row, last.rows + 1))
            else:
                runs.append(_Run(slab.segment, first, first + values, row, 1))
        groups.append(_Group(codec, values, tuple(numbers), tuple(runs), tuple(sections)))
    return tuple(groups)


def _stack_as(wanted: _Arrangement, held: tuple[_Arrangement, Rows]) -> Rows:
    """Return rows as another arrangement has them; codecs may differ in their slabs."""
    arrangement, rows = held
    cuts = [[(group.values, group.numbers) for group in one.groups] for one in (wanted, arrangement)]
    if cuts[0] == cuts[1]:
        return rows
    stacked: Rows = wanted.stack(arrangement.unstack(rows))
    return stacked


@lru_cache(maxsize=256)
def _encoder(codec: Codec) -> Callable[[jax.Array, State], tuple[tuple[jax.Array, ...], jax.Array, State]]:
    """Return (rows of slabs, their states) -> (buffers and largest magnitudes' bits, as bytes; states).

    Compiled once for each number and size of slabs, which fragments of one model share.
    """

    def encode(values: jax.Array, state: State) -> tuple[tuple[jax.Array, ...], jax.Array, State]:
        buffers, after = jax.vmap(codec.encode)(values, state)
        largest = jnp.max(values.view(jnp.int32) & MAGNITUDE, axis=1)
        return tuple(map(_bytes_of, buffers)), _bytes_of(largest), after

    return jax.jit(encode)


@lru_cache(maxsize=1024)
def _decoder(codec: Codec, values: int) -> Callable[[tuple[jax.Array, ...]], jax.Array]:
    """Return the sections of a group, each uint8[slabs, bytes] -> float32[slabs, values]."""
    dtypes = [np.dtype(dtype) for dtype, _ in codec.layout(values)]

    def decode(sections: tuple[jax.Array, ...]) -> jax.Array:
        buffers = tuple(section.view(dtype) for section, dtype in zip(sections, dtypes, strict=True))
        rows: jax.Array = jax.vmap(lambda slab: codec.decode(slab, values))(buffers)
        return rows

    return jax.jit(decode)


@jax.jit
def _join(parts: Any) -> jax.Array:
    return jnp.concatenate(jax.tree.leaves(parts))


def _bytes_of(buffer: jax.Array) -> jax.Array:
    return buffer.view(jnp.uint8).reshape(-1)


@partial(jax.jit, donate_argnums=0)
def _less(rows: Rows, others: Rows) -> Rows:
    return [jnp.subtract(ours, theirs) for ours, theirs in zip(rows, others, strict=True)]


@partial(jax.jit, donate_argnums=0)
def _plus(rows: Rows, others: Rows) -> Rows:
    return [jnp.add(ours, theirs) for ours, theirs in zip(rows, others, strict=True)]
