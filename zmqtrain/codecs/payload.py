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
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import sqrt
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import NOT_PINNED, NOTHING_SENT, Codec, Pinned, RunLoops, Scratch, State, Step, address_of
from zmqtrain.codecs.sparsify import put_at
from zmqtrain.core.checksum import crc32
from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.core.types import MAX_FRAME_BYTES, Array, Buffer

Item = TypeVar("Item")

Vector = NDArray[np.float32]
Numbers = NDArray[np.int64]

_VERSION = 2
_HEADER = struct.Struct("<B3xIII")
_ALIGNMENT = 4


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


RUN_VALUES = 1 << 19
"""A run has no more values, but for a single slab: enough that its call does not count, and several threads share."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Slabs in a row that one call of a codec can do: of one frame and of one codec.

    values: that all have together.  frame: its number.  table: its rows, as `RunLoops` takes them.  segments: of which
    each row is.  starts: of each row, the bytes of all values before it.
    """

    slabs: range
    values: int
    frame: int
    table: Numbers
    segments: Numbers
    starts: Numbers


class PayloadMemory:
    """The float32 values of a payload in memory, or of slabs in a row of it: where they are read or written.

    Either one vector for all, whose first value is that at `start` of the payload's; or one for each segment.
    """

    def __init__(self, vectors: Sequence[Array], starts: Sequence[int]) -> None:
        self._vectors, self._starts = vectors, starts
        self.is_plain = all(is_plain(vector) for vector in vectors)
        """Whether machine code may read here."""
        self.is_writable = self.is_plain and all(vector.flags.writeable for vector in vectors)
        """Whether it may write here."""
        self._bases: Numbers | int | None = None

    @classmethod
    def flat(cls, vector: Vector, start: int = 0) -> PayloadMemory:
        return cls([vector], [start])

    @classmethod
    def of_segments(cls, segments: Sequence[Array]) -> PayloadMemory:
        return cls(segments, [0, *accumulate(segment.size for segment in segments)][: len(segments)])

    def part(self, slab: Slab) -> Array:
        """Return the values of one slab, a view."""
        number = slab.segment if len(self._vectors) > 1 else 0
        start = self._starts[number]
        return self._vectors[number][slab.start - start : slab.end - start]

    def addresses(self, run: Run) -> Numbers:
        """Return where each row of a run has its first value."""
        if self._bases is None:  # of value 0 of the payload, if it lay in the same vector
            pairs = zip(self._vectors, self._starts, strict=True)
            bases = [address_of(vector) - 4 * start for vector, start in pairs]
            self._bases = bases[0] if len(bases) == 1 else np.array(bases, np.int64)
        bases_of_rows = self._bases if isinstance(self._bases, int) else self._bases[run.segments]
        places: Numbers = run.starts + bases_of_rows
        return places


def is_plain(vector: Array) -> bool:
    """Return whether machine code may read a vector."""
    return bool(vector.dtype == np.float32 and vector.flags.c_contiguous and vector.flags.aligned)


@dataclass(frozen=True, slots=True)
class PayloadPlan:
    """Where every byte of a payload lies."""

    slabs: tuple[Slab, ...]
    frames: tuple[FramePlan, ...]
    seed: int
    """Where the checksum begins: the crc32 of the codecs' names."""
    of_first: dict[int, FramePlan]
    """The frame by the number of its first slab."""
    runs_known: dict[tuple[int, int], tuple[Run, ...]] = field(default_factory=dict)

    def loops(self, run: Run) -> RunLoops | None:
        """Return what does all slabs of a run at once; None: they are done one by one."""
        loops = self.slabs[run.slabs.start].codec.loops
        if loops is None or not fast.kernels(run.values) or not loops.available():
            return None
        return loops

    @property
    def runs(self) -> Sequence[Run]:
        """The runs of all slabs."""
        return self.runs_of(range(len(self.slabs)))

    def runs_of(self, numbers: range) -> Sequence[Run]:
        """Return the runs of these slabs: a frame's, or those of a part that is always the same."""
        key = numbers.start, numbers.stop
        if key not in self.runs_known:
            place = bisect_right(self.frames, numbers.start, key=lambda frame: frame.slabs.start) - 1
            runs: list[Run] = []
            for number, frame in enumerate(self.frames[place:], place):
                inside = range(max(numbers.start, frame.slabs.start), min(numbers.stop, frame.slabs.stop))
                runs += _runs(self.slabs, number, inside)
            self.runs_known[key] = tuple(runs)
        return self.runs_known[key]


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
    seed = crc32(";".join(codec.name for codec in codecs).encode())
    return PayloadPlan(tuple(slabs), tuple(frames), seed, {frame.slabs.start: frame for frame in frames})


def _runs(slabs: Sequence[Slab], frame: int, numbers: range) -> Iterator[Run]:
    """Give the runs of these slabs, all in one frame."""
    first = numbers.start
    for number in numbers:
        after = slabs[number + 1] if number + 1 < numbers.stop else None
        is_last = after is None or after.codec is not slabs[first].codec
        if is_last or slabs[number + 1].end - slabs[first].start > RUN_VALUES:
            yield _run(slabs, frame, range(first, number + 1))
            first = number + 1


def _run(slabs: Sequence[Slab], frame: int, numbers: range) -> Run:
    table: list[list[int]] = []
    segments: list[int] = []
    for slab in (slabs[number] for number in numbers):
        if table and (segments[-1], table[-1][2]) == (slab.segment, slab.values):
            table[-1][1] += 1
            continue
        stride = sum(_align(section.stop - section.start) for section in slab.sections)
        columns = () if slab.codec.loops is None else slab.codec.loops.columns(slab.values)
        table.append([slab.start, 1, slab.values, stride, *(section.start for section in slab.sections), *columns])
        segments.append(slab.segment)
    values, rows = slabs[numbers[-1]].end - slabs[numbers[0]].start, np.array(table, np.int64)
    return Run(numbers, values, frame, rows, np.array(segments, np.int64), 4 * rows[:, 0])


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def payload_size(codecs: Sequence[Codec], counts: Sequence[int]) -> int:
    """Return how many bytes a payload has, over all its frames: not one more or less."""
    return sum(frame.size for frame in plan_payload(tuple(codecs), tuple(counts)).frames)


def initial_states(codecs: Sequence[Codec], counts: Sequence[int]) -> list[State]:
    """Return the state of every slab, as `encode_payload` keeps it."""
    return [slab.codec.init(slab.values) for slab in plan_payload(tuple(codecs), tuple(counts)).slabs]


def compile_loops(codecs: Sequence[Codec], counts: Sequence[int]) -> None:
    """Have the machine code for such a payload made now, where there is some, and not while its run waits."""
    plan = plan_payload(tuple(codecs), tuple(counts))
    fast.kernels(sum(counts))
    for run in plan.runs:
        plan.loops(run)


class Each(Protocol):
    """Does a piece of work for each of several items that are independent, in one thread or in several."""

    def __call__(self, work: Callable[[Item], object], items: Sequence[Item], values: int, /) -> None:
        """Return when all is done. values: that all items have together. Raises what `work` raised for the earliest."""


def one_by_one(work: Callable[[Item], object], items: Sequence[Item], values: int, /) -> None:
    """See Each: in this thread."""
    for item in items:
        work(item)


def encode_payload(
    codecs: Sequence[Codec],
    segments: Sequence[Array],
    states: list[State] | None = None,
    less: Sequence[Sequence[Buffer]] = (),
    each: Each = one_by_one,
) -> tuple[bytearray, ...]:
    """Encode 1-D float32 segments (numpy, or what numpy can view), each with its codec, into frames.

    No values, no frames.  states: as from `initial_states`, changed in place once all is encoded; without them every
    slab begins afresh.  less: payloads of these very codecs and counts, which have passed `check_payload`: their sum,
    in order, is taken from the segments, slab by slab, so that nothing as large as a payload's values is allocated.
    each: encodes the runs; any number of threads makes the same frames.
    Raises NonFiniteDelta naming the segment's index, CodecError for another dtype or shape.
    """
    arrays = [np.asarray(segment) for segment in segments]
    for index, values in enumerate(arrays):
        if values.ndim != 1:
            raise CodecError(f"segment {index} has the shape {values.shape}; a segment is flat")
    counts = tuple(values.size for values in arrays)
    encoder, sent = SlabEncoder(codecs, counts, states), Sent(codecs, counts, less)
    source = PayloadMemory.of_segments(arrays)
    each(lambda run: encoder.encode_run(run, source, sent), encoder.plan.runs, sum(counts))
    return encoder.finish()


def encodes_in_a_pass(codecs: Sequence[Codec], counts: Sequence[int]) -> bool:
    """Return whether all runs of such a payload are encoded by machine code, each in one call: then it is quick."""
    plan = plan_payload(tuple(codecs), tuple(counts))
    return all((loops := plan.loops(run)) and loops.encode for run in plan.runs)


def encode_pinned(
    codecs: Sequence[Codec],
    counts: Sequence[int],
    pinned: Pinned,
    states: list[State] | None = None,
    less: Sequence[Sequence[Buffer]] = (),
    each: Each = one_by_one,
) -> tuple[bytearray, ...]:
    """As `encode_payload`, of the segments of `PinnedSegments`, which are computed run by run, within a core's cache.

    pinned: places, parameters and anchor, as `PinnedSegments.read` gives them. Only where `encodes_in_a_pass`.
    """
    encoder, sent = SlabEncoder(codecs, counts, states), Sent(codecs, counts, less)
    each(lambda run: encoder.encode_pinned(run, pinned, sent), encoder.plan.runs, sum(counts))
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
        self._bytes = [np.frombuffer(frame, np.uint8) for frame in self._frames]
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

    def encode_run(self, run: Run, values: PayloadMemory, sent: Sent | None = None) -> None:
        """Encode the slabs of a run, less what has been sent of them; raises as `encode` does."""
        loops = self.plan.loops(run) if values.is_plain else None
        if loops is not None and loops.encode is not None:
            known = NOTHING_SENT if sent is None else sent.frames(run.frame)
            self._encoded(
                run, loops.encode(values.addresses(run), run.table, self._bytes[run.frame], known, NOT_PINNED)
            )
            return
        for number in run.slabs:
            slab = self.plan.slabs[number]
            part = values.part(slab)
            self.encode(number, part if sent is None else sent.subtract(part, number, slab, run.frame))

    def encode_pinned(self, run: Run, pinned: Pinned, sent: Sent) -> None:
        """Encode the slabs of a run of pinned leaves, as `encode` of RunLoops has them; raises as `encode_run` does."""
        loops = self.plan.loops(run)
        assert loops is not None and loops.encode is not None, "`encodes_in_a_pass` has said so"
        row = loops.encode(run.starts, run.table, self._bytes[run.frame], sent.frames(run.frame), pinned)
        self._encoded(run, row)

    def _encoded(self, run: Run, spoiled: int) -> None:
        """Take it that machine code has encoded a run of a codec that keeps no state. spoiled: as it has returned."""
        if spoiled >= 0:
            text = f"segment {run.segments[spoiled]} of {self._segments}: NaN or infinity in a slab"
            raise NonFiniteDelta(f"{text} of {run.table[spoiled, 2]} values")
        self._after[run.slabs.start : run.slabs.stop] = self._before[run.slabs.start : run.slabs.stop]

    def releases(self, sources: Sequence[SlabReader]) -> bool:
        """Return whether `release_run` can do all runs of payloads: of the very form of this one."""
        same = all(source.plan is self.plan for source in sources)
        return same and all((loops := self.plan.loops(run)) and loops.release for run in self.plan.runs)

    def release_run(
        self,
        run: Run,
        sources: Sequence[SlabReader],
        step: Step,
        memory: tuple[Vector, Vector],
        sampled: tuple[Numbers, Vector],
    ) -> None:
        """See `release` of RunLoops. memory: parameters and published.  sampled: places and samples."""
        loops = self.plan.loops(run)
        assert loops is not None and loops.release is not None, "`releases` has said so"
        frames = np.array([address_of(source.frame(run.frame)) for source in sources], np.int64)
        row = loops.release(frames, run.table, self._bytes[run.frame], step, *memory, *sampled)
        self._encoded(run, row)

    def add(self, run: Run, out: PayloadMemory) -> None:
        """Decode the slabs of a run that is encoded, onto their values in `out`."""
        with np.errstate(over="ignore"):
            _decode_run(self.plan, run, self._bytes[run.frame], out, True)

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
        self._views = {held.slabs.start: view for view, held in opened}
        self.held = [held.slabs for _, held in opened]
        """The slabs of each frame that is here, in order."""
        self.bytes = sum(view.nbytes for view, _ in opened)

    def runs(self) -> Iterator[Run]:
        """Give the runs of all slabs that are here."""
        for slabs in self.held:
            yield from self.plan.runs_of(slabs)

    def frame(self, number: int) -> NDArray[np.uint8]:
        """Return the bytes of one frame."""
        return np.frombuffer(self._views[self.plan.frames[number].slabs.start], np.uint8)

    def sections(self, number: int, frame: int) -> list[memoryview]:
        """Return the buffers of one slab, which is in this frame."""
        return _sections(self._views[self.plan.frames[frame].slabs.start], self.plan.slabs[number])

    def add(self, numbers: range, out: PayloadMemory, add: bool = True) -> None:
        """Add slabs in a row to their places in `out`. Without `add` write them there."""
        for run in self.plan.runs_of(numbers):
            self.add_run(run, out, add)

    def add_run(self, run: Run, out: PayloadMemory, add: bool = True) -> None:
        """Add the slabs of a run to their places in `out`. Without `add` write them there."""
        with np.errstate(over="ignore"):  # of huge values the sum may be infinite
            _decode_run(self.plan, run, self.frame(run.frame), out, add)

    def rebase_run(self, run: Run, own: SlabReader | None, places: Numbers, params: Numbers, anchor: Numbers) -> None:
        """See `rebase` of CodedSegments: for the slabs of a run, decoded within a core's cache.

        own: a payload of the same form.  params, anchor: int64[leaves], where their values begin in memory.
        """
        frame, known = self.frame(run.frame), _NO_BYTES if own is None else own.frame(run.frame)
        loops = self.plan.loops(run)
        if loops is not None and loops.rebase is not None:
            loops.rebase(frame, known, run.table, places, params, anchor)
            return
        first = self.plan.slabs[run.slabs.start].start
        shared, mine = (_scratch.take(name, run.values, np.float32) for name in ("shared", "own"))
        self.add_run(run, PayloadMemory.flat(shared, first), add=False)
        if own is None:
            mine = mine[:0]
        else:
            own.add_run(run, PayloadMemory.flat(mine, first), add=False)
        fast.rebase(shared, mine, first, places, params, anchor)


_NO_BYTES = np.zeros(0, np.uint8)


def _decode_run(plan: PayloadPlan, run: Run, frame: NDArray[np.uint8], out: PayloadMemory, add: bool) -> None:
    if out.is_writable and (loops := plan.loops(run)) is not None:
        loops.decode_into(frame, run.table, out.addresses(run), add)
        return
    view = frame.data
    for number in run.slabs:
        slab = plan.slabs[number]
        slab.codec.decode_into(_sections(view, slab), out.part(slab), add)


class Sent:
    """Payloads of one form, which have passed `check_payload`: their sum is subtracted from what is encoded.

    codecs, counts: of each segment.  Several threads may use it, each for slabs of its own.
    """

    def __init__(
        self, codecs: Sequence[Codec], counts: Sequence[int], payloads: Sequence[Sequence[Buffer]] = ()
    ) -> None:
        self._readers = [SlabReader(codecs, frames, counts) for frames in payloads]
        self._stacks: dict[int, NDArray[np.uint8]] = {}
        self._local = threading.local()

    def frames(self, number: int) -> NDArray[np.uint8]:
        """Return one frame of each payload: uint8[payloads, bytes]."""
        if not self._readers:
            return NOTHING_SENT
        if number not in self._stacks:
            frames = [reader.frame(number) for reader in self._readers]
            self._stacks[number] = frames[0][None] if len(frames) == 1 else np.stack(frames)
        return self._stacks[number]

    def subtract(self, values: Array, number: int, slab: Slab, frame: int) -> Array:
        """Return a slab's values less the sum of what the payloads have of it; valid until this thread's next call."""
        if not self._readers or values.dtype != np.float32:
            return values
        kept: Vector | None = getattr(self._local, "rest", None)
        if kept is None or kept.size < slab.values:
            kept = self._local.rest = np.empty(slab.values, np.float32)
        rest = kept[: slab.values]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by its codec
            if slab.codec.sparse is not None and len(self._readers) == 1:
                places, sent = slab.codec.sparse(self._readers[0].sections(number, frame), slab.values)
                np.copyto(rest, values)
                put_at(places, np.negative(sent, out=sent), rest, True)
                return rest
            for add, reader in enumerate(self._readers):
                slab.codec.decode_into(reader.sections(number, frame), rest, add > 0)
            return np.subtract(values, rest, out=rest)


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
    return crc32(frame[8:], crc32(frame[:4], plan.seed))


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
    data = np.frombuffer(view, np.uint8)
    for run in plan.runs_of(known.slabs):
        loops = plan.loops(run)
        if loops is not None and loops.check(data, run.table) < 0:
            continue
        for number in run.slabs:  # says which it is
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
    reader, values = SlabReader(codecs, frames, counts), PayloadMemory.flat(out)
    for slabs in reader.held:
        reader.add(slabs, values, add)
    return out


def decode_segments(
    codecs: Sequence[Codec],
    frames: Sequence[Buffer],
    segments: Sequence[Vector],
    *,
    add: bool = False,
    each: Each = one_by_one,
) -> None:
    """Decode a payload that `check_payload` has passed into its segments, each a contiguous float32 vector of its own.

    With `add` onto the values there. each: does the work of the runs.
    Raises CodecError for other frames than the segments' sizes say.
    """
    counts = tuple(segment.size for segment in segments)
    reader, values = SlabReader(codecs, frames, counts), PayloadMemory.of_segments(segments)
    each(lambda run: reader.add_run(run, values, add), list(reader.runs()), sum(counts))


_scratch = Scratch()


def payload_norm(codecs: Sequence[Codec], frames: Sequence[Buffer], counts: Sequence[int]) -> float:
    """Return what stands for the L2 norm of a payload that `check_payload` has passed; inf where float32 has no square.

    codecs, counts: of each segment.  Cost: of scales alone a twentieth of a decode; else that of a decode.
    """
    reader = SlabReader(codecs, frames, counts)
    with np.errstate(over="ignore"):
        return sqrt(sum(_energy(reader.plan, run, reader.frame(run.frame)) for run in reader.runs()))


def _energy(plan: PayloadPlan, run: Run, frame: NDArray[np.uint8]) -> float:
    if (loops := plan.loops(run)) is not None:
        return loops.energy(frame, run.table)
    codec, view, total = plan.slabs[run.slabs.start].codec, frame.data, 0.0
    for number in run.slabs:
        slab = plan.slabs[number]
        if codec.energy is not None:
            total += codec.energy(_sections(view, slab), slab.values)
        else:
            values = _scratch.take("values", slab.values, np.float32)
            codec.decode_into(_sections(view, slab), values, False)
            total += float(np.dot(values, values))
    return total
