"""Lay encoded slabs in frames that can be checked and decoded one by one.

Rule 1: a payload is a list of segments; each is cut in slabs of SLAB_VALUES, numbered through the payload; every slab
is encoded on its own, and whole slabs in a row fill a frame of at most MAX_FRAME_BYTES.
Rule 2: the receiver knows the codec and the counts; a frame may only agree. Everything is checked before anything is
written, and nothing is allocated from a size that a frame declares.

    frame   = version buffers reserved crc first slabs lengths *( padding section )
    version = %x01; buffers: per slab, 1..4; reserved = %x00 %x00; crc, first, slabs: 4 bytes each, little-endian
    lengths = slabs * buffers * 4 bytes: of each section; a section begins at the next multiple of 64
    crc     : crc32 of the codec's name, the first 4 bytes, and all that follows the crc
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.codec import MAX_BUFFERS, Codec
from zmqtrain.errors import CodecError, NonFiniteDelta
from zmqtrain.types import MAX_FRAME_BYTES, Array, Buffer

__all__ = [
    "SLAB_VALUES",
    "encode_payload",
    "check_frame",
    "check_payload",
    "decode_frame",
    "decode_payload",
    "payload_bound",
    "frames_bound",
]

SLAB_VALUES = 65_536
"""The values of a slab, the last of a segment aside: 256 KB of float32, a cache's worth."""

_VERSION = 1
_HEADER = struct.Struct("<BBHIII")
_ALIGNMENT = 64
_SLAB_OVERHEAD = MAX_BUFFERS * (4 + _ALIGNMENT - 1)
_FRAME_OVERHEAD = _HEADER.size + _ALIGNMENT - 1

Vector = NDArray[np.float32]


def encode_payload(codec: Codec, segments: Sequence[Array]) -> tuple[bytearray, ...]:
    """Encode 1-D float32 segments (numpy, or what numpy can view) into frames; no values, no frames.

    Raises NonFiniteDelta naming the segment's index, CodecError for another dtype or shape.
    """
    frames: list[bytearray] = []
    held: list[tuple[memoryview, ...]] = []
    held_bytes, slab = 0, 0
    for index, segment in enumerate(segments):
        values = np.asarray(segment)
        if values.ndim != 1:
            raise CodecError(f"segment {index} has the shape {values.shape}; a segment is flat")
        for start in range(0, values.size, SLAB_VALUES):
            piece = values[start : start + SLAB_VALUES]
            try:
                buffers, _ = codec.encode(piece, codec.init(piece.size))
            except NonFiniteDelta as error:
                raise NonFiniteDelta(f"segment {index} of {len(segments)}: {error}") from None
            except CodecError as error:
                raise CodecError(f"segment {index} of {len(segments)}: {error}") from None
            sections = tuple(np.ascontiguousarray(buffer).view(np.uint8).data for buffer in buffers)
            size = sum(_align(section.nbytes) for section in sections)
            table = _HEADER.size + 4 * (len(held) + 1) * len(sections)
            if held and _align(table) + held_bytes + size > MAX_FRAME_BYTES:
                frames.append(_build(codec, slab - len(held), held))
                held, held_bytes = [], 0
            held.append(sections)
            held_bytes += size
            slab += 1
    if held:
        frames.append(_build(codec, slab - len(held), held))
    return tuple(frames)


def _build(codec: Codec, first: int, slabs: Sequence[Sequence[memoryview]]) -> bytearray:
    sections = [section for slab in slabs for section in slab]
    lengths = [section.nbytes for section in sections]
    offsets, total = _offsets(lengths)
    frame = bytearray(total)
    struct.pack_into(f"<{len(lengths)}I", frame, _HEADER.size, *lengths)
    view = memoryview(frame)
    for offset, section in zip(offsets, sections, strict=True):
        view[offset : offset + section.nbytes] = section
    _HEADER.pack_into(frame, 0, _VERSION, len(slabs[0]), 0, 0, first, len(slabs))
    struct.pack_into("<I", frame, 4, _checksum(codec, view))
    return frame


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _offsets(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return where each section begins, and where the last one ends."""
    offsets, end = [], _HEADER.size + 4 * len(lengths)
    for length in lengths:
        offsets.append(_align(end))
        end = offsets[-1] + length
    return offsets, end


def _checksum(codec: Codec, frame: memoryview) -> int:
    return zlib.crc32(frame[8:], zlib.crc32(frame[:4], zlib.crc32(codec.name.encode())))


@lru_cache(maxsize=64)
def _slabs(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (start, end) of every slab in the flat vector of all segments."""
    slabs, start = [], 0
    for count in counts:
        end = start + count
        slabs += [(begin, min(begin + SLAB_VALUES, end)) for begin in range(start, end, SLAB_VALUES)]
        start = end
    return tuple(slabs)


def _open(frame: Buffer) -> tuple[memoryview, int, int, list[memoryview]]:
    """Return (all bytes, first slab, buffers a slab, sections); raise CodecError unless the frame holds together."""
    try:
        view = memoryview(frame).cast("B")
    except (TypeError, ValueError) as error:
        raise CodecError(f"a frame cannot be read: {error}") from None
    if not _HEADER.size <= view.nbytes <= MAX_FRAME_BYTES:
        raise CodecError(f"a frame has {view.nbytes} bytes, not {_HEADER.size} to {MAX_FRAME_BYTES}")
    version, buffers, reserved, _, first, slabs = _HEADER.unpack_from(view)
    if version != _VERSION or reserved:
        raise CodecError(f"a frame is of version {version}, this program reads version {_VERSION}")
    if not 1 <= buffers <= MAX_BUFFERS or slabs < 1:
        raise CodecError(f"a frame declares {slabs} slabs of {buffers} buffers")
    if _HEADER.size + 4 * slabs * buffers > view.nbytes:
        raise CodecError(f"a frame of {view.nbytes} bytes cannot hold {slabs} slabs of {buffers} buffers")
    lengths = struct.unpack_from(f"<{slabs * buffers}I", view, _HEADER.size)
    offsets, end = _offsets(lengths)
    if end != view.nbytes:
        raise CodecError(f"a frame of {view.nbytes} bytes declares sections up to byte {end}")
    sections = [view[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
    return view, first, buffers, sections


def check_frame(codec: Codec, frame: Buffer, counts: Sequence[int]) -> range:
    """Return which slabs one frame holds; raise CodecError unless all of them can be decoded into `counts` values."""
    plan = _slabs(tuple(counts))
    view, first, buffers, sections = _open(frame)
    last = first + len(sections) // buffers
    if last > len(plan):
        raise CodecError(f"a frame holds the slabs {first}..{last - 1}, the payload has {len(plan)}")
    if _HEADER.unpack_from(view)[3] != _checksum(codec, view):
        raise CodecError(f"the checksum of the slabs {first}..{last - 1} is wrong for {codec.name}: bytes were changed")
    for slab in range(first, last):
        start, end = plan[slab]
        position = (slab - first) * buffers
        try:
            codec.check(sections[position : position + buffers], end - start)
        except CodecError as error:
            raise CodecError(f"slab {slab} of {len(plan)}: {error}") from None
    return range(first, last)


def check_payload(codec: Codec, frames: Sequence[Buffer], counts: Sequence[int]) -> None:
    """Raise CodecError unless the frames, in any order, hold every slab of `counts` exactly once, fit to decode.

    counts: the values of each segment. Cost: one crc32 and a look at each code, without a copy.
    """
    slabs = len(_slabs(tuple(counts)))
    if len(frames) > slabs:
        raise CodecError(f"{len(frames)} frames for a payload of {slabs} slabs")
    held = sorted((check_frame(codec, frame, counts) for frame in frames), key=lambda part: part.start)
    for before, after in pairwise([range(0), *held, range(slabs, slabs)]):
        if before.stop != after.start:
            fault = "missing" if before.stop < after.start else "given twice"
            raise CodecError(f"slab {min(before.stop, after.start)} of {slabs} is {fault}")


def decode_frame(codec: Codec, frame: Buffer, out: Vector, counts: Sequence[int], *, add: bool = False) -> range:
    """Decode a frame that `check_frame` has passed into its place in `out`, float32[sum(counts)]; return its slabs.

    With `add` onto what is there: the sum of huge values may overflow to infinity. Raises CodecError.
    """
    plan = _slabs(tuple(counts))
    _, first, buffers, sections = _open(frame)
    held = range(first, first + len(sections) // buffers)
    with np.errstate(over="ignore"):
        for position, (start, end) in enumerate(plan[held.start : held.stop]):
            codec.decode_into(sections[position * buffers : (position + 1) * buffers], out[start:end], add)
    return held


def decode_payload(
    codec: Codec,
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
        check_payload(codec, frames, counts)
    for frame in frames:
        decode_frame(codec, frame, out, counts, add=add)
    return out


def payload_bound(codec: Codec, counts: Sequence[int]) -> int:
    """Return the most bytes that `encode_payload` makes of these counts: a larger declared size is refused unread."""
    return _content_bound(codec, counts) + frames_bound(codec, counts) * _FRAME_OVERHEAD


def frames_bound(codec: Codec, counts: Sequence[int]) -> int:
    """Return the most frames that `encode_payload` makes of these counts."""
    if not _slabs(tuple(counts)):
        return 0
    largest = codec.size_bound(min(max(counts), SLAB_VALUES)) + _SLAB_OVERHEAD
    return _content_bound(codec, counts) // (MAX_FRAME_BYTES - _FRAME_OVERHEAD - largest) + 1


def _content_bound(codec: Codec, counts: Sequence[int]) -> int:
    return sum(codec.size_bound(end - start) + _SLAB_OVERHEAD for start, end in _slabs(tuple(counts)))
