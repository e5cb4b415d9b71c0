"""Encoded slabs in frames that can be checked and decoded one by one.

Rule 1: a payload is a list of segments, each with its codec; a segment is cut in slabs of `codec.slab` values, numbered
through the payload; every slab is encoded on its own, and whole slabs in a row fill a frame of at most MAX_FRAME_BYTES.
Rule 2: the codecs and the counts say where every byte of every frame lies: sender and receiver know them beforehand,
and a frame may only agree. Everything is checked before anything is written, and nothing is allocated from what a
frame declares.

    frame   = version reserved crc first slabs *( section padding )
    version = %x02; reserved = %x00 %x00 %x00; crc, first, slabs: 4 bytes each, little-endian
    section : one buffer of one slab, in order, at the next multiple of 4; padding: zeros
    crc     : crc32 of the codecs' names, the first 4 bytes, and all that follows the crc
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.codec import Codec, Scratch, State
from zmqtrain.codecs.sparsify import put_at
from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.core.types import MAX_FRAME_BYTES, Array, Buffer

_VERSION = 2
_HEADER = struct.Struct("<B3xIII")
_ALIGNMENT = 4

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab: values start..end of the flat vector of all segments; the place of each buffer in its frame."""

    codec: Codec
    segment: int
    start: int
    end: int
    sections: tuple[slice, ...]

    @property
    def values(self) -> int:
        """The number of values."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class FramePlan:
    """One frame: the numbers of its slabs and its bytes, header included."""

    slabs: range
    size: int


@dataclass(frozen=True, slots=True)
class PayloadPlan:
    """Where every byte of a payload lies."""

    slabs: tuple[Slab, ...]
    frames: tuple[FramePlan, ...]
    seed: int
    """Where the checksum begins: the crc32 of the codecs' names."""
    of_first: dict[int, FramePlan]
    """The frame by the number of its first slab."""


@lru_cache(maxsize=2048)
def plan_payload(codecs: tuple[Codec, ...], counts: tuple[int, ...]) -> PayloadPlan:
    """Return where every byte of a payload lies. codecs, counts: of each segment; a segment may be empty."""
    slabs: list[Slab] = []
    frames: list[FramePlan] = []
    first, size, start = 0, _HEADER.size, 0
    for segment, (codec, count) in enumerate(zip(codecs, counts, strict=True)):
        for begin in range(start, start + count, codec.slab):
            end = min(begin + codec.slab, start + count)
            lengths = [np.dtype(dtype).itemsize * values for dtype, values in codec.layout(end - begin)]
            if slabs[first:] and size + sum(map(_align, lengths)) > MAX_FRAME_BYTES:
                frames.append(FramePlan(range(first, len(slabs)), size))
                first, size = len(slabs), _HEADER.size
            sections = []
            for length in lengths:
                sections.append(slice(size, size + length))
                size += _align(length)
            slabs.append(Slab(codec, segment, begin, end, tuple(sections)))
        start += count
    if slabs:
        frames.append(FramePlan(range(first, len(slabs)), size))
    seed = zlib.crc32(";".join(codec.name for codec in codecs).encode())
    return PayloadPlan(tuple(slabs), tuple(frames), seed, {frame.slabs.start: frame for frame in frames})


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def payload_size(codecs: Sequence[Codec], counts: Sequence[int]) -> int:
    """Return how many bytes a payload has, over all its frames: not one more or less."""
    return sum(frame.size for frame in plan_payload(tuple(codecs), tuple(counts)).frames)


def initial_states(codecs: Sequence[Codec], counts: Sequence[int]) -> list[State]:
    """Return the state of every slab, as `encode_payload` keeps it."""
    return [slab.codec.init(slab.values) for slab in plan_payload(tuple(codecs), tuple(counts)).slabs]


def encode_payload(
    codecs: Sequence[Codec],
    segments: Sequence[Array],
    states: list[State] | None = None,
    less: Sequence[Sequence[Buffer]] = (),
) -> tuple[bytearray, ...]:
    """Encode 1-D float32 segments (numpy, or what numpy can view), each with its codec, into frames.

    No values, no frames.  states: as from `initial_states`, changed in place once all is encoded; without them every
    slab begins afresh.  less: payloads of these very codecs and counts, which have passed `check_payload`: their sum,
    in order, is taken from the segments, slab by slab, so that nothing as large as a payload's values is allocated.
    Raises NonFiniteDelta naming the segment's index, CodecError for another dtype or shape.
    """
    arrays = [np.asarray(segment) for segment in segments]
    for index, values in enumerate(arrays):
        if values.ndim != 1:
            raise CodecError(f"segment {index} has the shape {values.shape}; a segment is flat")
    counts = tuple(values.size for values in arrays)
    plan = plan_payload(tuple(codecs), counts)
    starts = np.cumsum((0, *counts)).tolist()
    known = [SlabReader(codecs, frames, counts) for frames in less]
    spare = np.empty(max((slab.values for slab in plan.slabs), default=0) if less else 0, np.float32)

    def rest(number: int, slab: Slab) -> Array:
        offset = starts[slab.segment]
        piece = arrays[slab.segment][slab.start - offset : slab.end - offset]
        if not known or piece.dtype != np.float32:
            return piece
        sent = spare[: slab.values]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by its codec
            if slab.codec.sparse is not None and len(known) == 1:
                places, values = slab.codec.sparse(known[0].sections(number), slab.values)
                np.copyto(sent, piece)
                put_at(places, np.negative(values, out=values), sent, True)
                return sent
            for add, reader in enumerate(known):
                slab.codec.decode_into(reader.sections(number), sent, add > 0)
            return np.subtract(piece, sent, out=sent)

    return encode_slabs(codecs, counts, rest, states)


def encode_slabs(
    codecs: Sequence[Codec],
    counts: Sequence[int],
    values: Callable[[int, Slab], Array],
    states: list[State] | None = None,
) -> tuple[bytearray, ...]:
    """Encode what is made slab by slab while it is encoded, into frames: see `encode_payload`.

    values(number, slab): gives the slab's values, float32[slab.values], numpy; asked once of each, in order. It may
    give the same memory each time.
    """
    encoder = SlabEncoder(codecs, counts, states)
    for number, slab in enumerate(encoder.plan.slabs):
        encoder.encode(number, values(number, slab))
    return encoder.finish()


class SlabEncoder:
    """Encode the slabs of one payload, each once, in any order and from any thread, and then close the frames.

    codecs, counts: of each segment.  states: as of `encode_payload`, changed in place by `finish`.
    """

    def __init__(self, codecs: Sequence[Codec], counts: Sequence[int], states: list[State] | None = None) -> None:
        self.plan = plan_payload(tuple(codecs), tuple(counts))
        self._segments, self._states = len(counts), states
        self._before = initial_states(codecs, counts) if states is None else states
        self._after: list[State] = [None] * len(self.plan.slabs)
        self._frames = tuple(bytearray(frame_plan.size) for frame_plan in self.plan.frames)
        pairs = zip(self._frames, self.plan.frames, strict=True)
        self._views = [view for frame, known in pairs for view in [memoryview(frame)] * len(known.slabs)]

    def encode(self, number: int, values: Array) -> None:
        """Encode one slab, float32[n], into its place. Raises NonFiniteDelta or CodecError naming the segment."""
        slab = self.plan.slabs[number]
        try:
            buffers, self._after[number] = slab.codec.encode(values, self._before[number])
        except NonFiniteDelta as error:
            raise NonFiniteDelta(f"segment {slab.segment} of {self._segments}: {error}") from None
        except CodecError as error:
            raise CodecError(f"segment {slab.segment} of {self._segments}: {error}") from None
        for section, buffer in zip(slab.sections, buffers, strict=True):
            self._views[number][section] = np.ascontiguousarray(buffer).view(np.uint8).data

    def sections(self, number: int) -> list[memoryview]:
        """Return the buffers of a slab that is encoded."""
        return _sections(self._views[number], self.plan.slabs[number])

    def finish(self) -> tuple[bytearray, ...]:
        """Return the frames, once all slabs are encoded."""
        for frame_plan, frame in zip(self.plan.frames, self._frames, strict=True):
            seal_frame(self.plan, frame_plan, frame)
        if self._states is not None:
            self._states[:] = self._after
        return self._frames


class SlabReader:
    """Read the slabs of a payload that `check_payload` has passed, in any order and from any thread.

    codecs, counts: of each segment. Raises CodecError for frames that are none of this payload.
    """

    def __init__(self, codecs: Sequence[Codec], frames: Sequence[Buffer], counts: Sequence[int]) -> None:
        self.plan = plan_payload(tuple(codecs), tuple(counts))
        opened = sorted((_open(self.plan, frame) for frame in frames), key=lambda pair: pair[1].slabs.start)
        self._views = [view for view, held in opened for _ in held.slabs]

    def sections(self, number: int) -> list[memoryview]:
        """Return the buffers of one slab."""
        return _sections(self._views[number], self.plan.slabs[number])

    def add(self, number: int, out: Vector, start: int = 0) -> None:
        """Add one slab to its place in `out`, whose first value is that at `start` of the payload's."""
        slab = self.plan.slabs[number]
        with np.errstate(over="ignore"):
            slab.codec.decode_into(self.sections(number), out[slab.start - start : slab.end - start], True)


@dataclass(frozen=True, slots=True)
class Part:
    """The values start..end of a payload, whole slabs of several codings of it; slabs: their numbers in each."""

    start: int
    end: int
    slabs: tuple[range, ...]

    @property
    def values(self) -> int:
        """The number of values."""
        return self.end - self.start


@lru_cache(maxsize=256)
def plan_parts(codings: tuple[tuple[Codec, ...], ...], counts: tuple[int, ...], values: int) -> tuple[Part, ...]:
    """Cut a payload where slabs of all codings end, in parts of at most `values` where the slabs allow it.

    codings: the codec of each segment, of each way in which the same segments are coded.
    """
    starts = [[slab.start for slab in plan_payload(codecs, counts).slabs] for codecs in codings]
    total = sum(counts)
    common = sorted(set.intersection(*map(set, starts)))
    ends = [*common[1:], total]
    parts: list[Part] = []
    first = 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is not None and following - first <= values:
            continue
        slabs = tuple(range(bisect_left(of_one, first), bisect_left(of_one, end)) for of_one in starts)
        parts.append(Part(first, end, slabs))
        first = end
    return tuple(parts)


def seal_frame(plan: PayloadPlan, frame_plan: FramePlan, frame: bytearray) -> None:
    """Write the header of a frame with its sections in place."""
    _HEADER.pack_into(frame, 0, _VERSION, 0, frame_plan.slabs.start, len(frame_plan.slabs))
    struct.pack_into("<I", frame, 4, _checksum(plan, memoryview(frame)))


def _checksum(plan: PayloadPlan, frame: memoryview) -> int:
    return zlib.crc32(frame[8:], zlib.crc32(frame[:4], plan.seed))


def _open(plan: PayloadPlan, frame: Buffer) -> tuple[memoryview, FramePlan]:
    """Return (all bytes, what they are); raise CodecError unless the payload has a frame of this place and size."""
    try:
        view = memoryview(frame).cast("B")
    except (TypeError, ValueError) as error:
        raise CodecError(f"a frame cannot be read: {error}") from None
    if view.nbytes < _HEADER.size:
        raise CodecError(f"a frame has {view.nbytes} bytes, fewer than its header's {_HEADER.size}")
    version, _, first, slabs = _HEADER.unpack_from(view)
    if version != _VERSION or any(view[1:4]):
        raise CodecError(f"a frame is of version {version}, this program reads version {_VERSION}")
    known = plan.of_first.get(first)
    if known is None or len(known.slabs) != slabs:
        raise CodecError(f"a frame declares {slabs} slabs from {first}: the payload of {len(plan.slabs)} has no such")
    if view.nbytes != known.size:
        raise CodecError(f"a frame has {view.nbytes} bytes, not {known.size}")
    return view, known


def check_frame(codecs: Sequence[Codec], frame: Buffer, counts: Sequence[int]) -> range:
    """Return which slabs one frame holds; raise CodecError unless all of them can be decoded into `counts` values."""
    plan = plan_payload(tuple(codecs), tuple(counts))
    view, known = _open(plan, frame)
    if _HEADER.unpack_from(view)[1] != _checksum(plan, view):
        last = known.slabs.stop - 1
        raise CodecError(f"the checksum of the slabs {known.slabs.start}..{last} is wrong: bytes or codecs differ")
    for number in known.slabs:
        slab = plan.slabs[number]
        try:
            slab.codec.check(_sections(view, slab), slab.values)
        except CodecError as error:
            raise CodecError(f"slab {number} of {len(plan.slabs)}: {error}") from None
    return known.slabs


def _sections(view: memoryview, slab: Slab) -> list[memoryview]:
    return [view[section] for section in slab.sections]


def check_payload(codecs: Sequence[Codec], frames: Sequence[Buffer], counts: Sequence[int]) -> None:
    """Raise CodecError unless the frames, in any order, hold every slab of `counts` exactly once, fit to decode.

    codecs, counts: of each segment. Cost: one crc32 and a look at each code, without a copy.
    """
    plan = plan_payload(tuple(codecs), tuple(counts))
    if len(frames) > len(plan.frames):
        raise CodecError(f"{len(frames)} frames for a payload of {len(plan.frames)}")
    held = sorted((check_frame(codecs, frame, counts) for frame in frames), key=lambda part: part.start)
    slabs = len(plan.slabs)
    for before, after in pairwise([range(0), *held, range(slabs, slabs)]):
        if before.stop != after.start:
            fault = "missing" if before.stop < after.start else "given twice"
            raise CodecError(f"slab {min(before.stop, after.start)} of {slabs} is {fault}")


def decode_payload(
    codecs: Sequence[Codec],
    frames: Sequence[Buffer],
    counts: Sequence[int],
    out: Vector | None = None,
    add: bool = False,
    checked: bool = False,
) -> Vector:
    """Return all segments decoded, one after the other: float32[sum(counts)], in `out` if given (with `add`, onto it).

    Checks everything first, unless `checked` says that `check_payload` has passed these very frames.
    Raises CodecError, and then `out` is as it was.
    """
    total = sum(counts)
    if out is None:
        out = np.zeros(total, np.float32) if add else np.empty(total, np.float32)
    if out.dtype != np.float32 or out.shape != (total,) or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(f"out must be a writeable, contiguous float32[{total}], not {out.dtype}{list(out.shape)}")
    if not checked:
        check_payload(codecs, frames, counts)
    with np.errstate(over="ignore"):  # of huge values the sum may be infinite
        for slab, sections in open_slabs(codecs, frames, counts):
            slab.codec.decode_into(sections, out[slab.start : slab.end], add)
    return out


def decode_segments(
    codecs: Sequence[Codec], frames: Sequence[Buffer], segments: Sequence[Vector], *, add: bool = False
) -> None:
    """Decode a payload that `check_payload` has passed into its segments, each a contiguous float32 vector of its own.

    With `add` onto the values there. Raises CodecError for other frames than the segments' sizes say.
    """
    counts = tuple(segment.size for segment in segments)
    starts = np.cumsum((0, *counts)).tolist()
    with np.errstate(over="ignore"):
        for slab, sections in open_slabs(codecs, frames, counts):
            start = slab.start - starts[slab.segment]
            slab.codec.decode_into(sections, segments[slab.segment][start : start + slab.values], add)


def open_slabs(
    codecs: Sequence[Codec], frames: Sequence[Buffer], counts: Sequence[int]
) -> Iterator[tuple[Slab, list[memoryview]]]:
    """Give each slab of a payload that `check_payload` has passed, and its sections. Raises CodecError."""
    plan = plan_payload(tuple(codecs), tuple(counts))
    for frame in frames:
        view, known = _open(plan, frame)
        for number in known.slabs:
            yield plan.slabs[number], _sections(view, plan.slabs[number])


_scratch = Scratch()


def payload_norm(codecs: Sequence[Codec], frames: Sequence[Buffer], counts: Sequence[int]) -> float:
    """Return what stands for the L2 norm of a payload that `check_payload` has passed; inf where float32 has no square.

    codecs, counts: of each segment.  Cost: of scales alone a twentieth of a decode; else that of a decode.
    """
    with np.errstate(over="ignore"):
        return sqrt(sum(_energy(slab, sections) for slab, sections in open_slabs(codecs, frames, counts)))


def _energy(slab: Slab, sections: Sequence[Buffer]) -> float:
    if slab.codec.energy is not None:
        return slab.codec.energy(sections, slab.values)
    values = _scratch.take("values", slab.values, np.float32)
    slab.codec.decode_into(sections, values, False)
    return float(np.dot(values, values))
