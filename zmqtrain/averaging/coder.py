"""A node's side of the equation: what is offered, what of it is in flight, what has been applied.

    params = anchor + pending;  a publish sends u = C(pending - unacked)

Rule 1: no clock, no socket; one thread calls it, and `SlabThreads` share its work, with the same bits.
Rule 2: a u is kept compressed, just as it was sent.
Rule 3: where the parameters live on an accelerator, a node gives its device's coder: what is compressed is encoded and
decoded there, to the same bits; what is sent as it is (DENSE) goes by the host, which it would have to cross anyway.
Rule 4: where they live on a processor and `stays_encoded` is set, an aggregate is handed on as it came, once it has
been checked: the thread that applies it decodes it piece by piece within a core's cache (`EncodedSegments`), and
nothing as large as the model is written and read for it.
Rule 5: `Vectors` reuses the memory of what is decoded whole, because the kernel zeroes fresh memory page by page, which
costs a codec as much as its own work, and because JAX on a CPU takes an array without a copy if it begins at a multiple
of 64 bytes. Memory is reused only when nothing refers to it: each time it is handed out as an array of its own, which
every view of it holds, and so does a JAX array until the last computation that reads it is done; a weak reference says
whether that array is gone. (Reference counts do not: where references are borrowed they are too low.) Any thread may
take, and let go. What was lent last is lent first, and what was not needed for a while is freed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.averaging.gate import DeltaGate
from zmqtrain.averaging.held_rounds import MOST_THREADS, SlabThreads, own_cores
from zmqtrain.averaging.snapshot import decode_optimizer_state, split_snapshot
from zmqtrain.codecs import fast
from zmqtrain.codecs.base import Codec, codec_from_spec, coding_from_spec
from zmqtrain.codecs.codec import State, fill_states, pack_states
from zmqtrain.codecs.fragment import Layout, PartLayout, layout_of
from zmqtrain.codecs.payload import (
    Each,
    Run,
    SlabReader,
    check_payload,
    decode_payload,
    decode_segments,
    encode_payload,
    encode_pinned,
    encodes_in_a_pass,
    initial_states,
    payload_size,
    plan_payload,
)
from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.core.interfaces import CodedSegments, PinnedSegments
from zmqtrain.core.settings import AUTO, RunSettings
from zmqtrain.core.types import (
    ALIGNMENT_BYTES,
    Array,
    Buffer,
    JoinedSegments,
    ModelSpec,
    Offer,
    Part,
    PeerId,
    Update,
    joined_places,
    number_of,
)
from zmqtrain.protocol.messages import Aggregate, Snapshot

if TYPE_CHECKING:
    from zmqtrain.codecs.payload_jax import DeviceCoder

SMALLEST_KEPT_BYTES = 1 << 20
"""Smaller vectors come from the heap, which holds on to its pages by itself."""

IDLE_TAKES = 8
"""Memory that was not lent for so many takes is not kept any longer."""

_ALIGNMENT_VALUES = ALIGNMENT_BYTES // 4


@dataclass(eq=False, slots=True)
class _Kept:
    """Memory. lent_at: the take at which it was lent last; lent: the array that was, while somebody has it."""

    memory: NDArray[np.float32]
    lent_at: int = 0
    lent: weakref.ref[NDArray[np.float32]] | None = None

    @property
    def is_free(self) -> bool:
        return self.lent is None or self.lent() is None

    def lend(self, take: int) -> NDArray[np.float32]:
        """Return an array of all the memory, which its views hold: of a memoryview they do not look behind it."""
        array = np.frombuffer(self.memory.data, np.float32)
        self.lent, self.lent_at = weakref.ref(array), take
        return array


class Vectors:
    """Memory for vectors, which keeps what was lent last.  most: so many are kept."""

    def __init__(self, most: int = 4) -> None:
        self._most, self._takes = most, 0
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []  # what was lent last is last

    def take(self, count: int) -> NDArray[np.float32]:
        """Return float32[count] of undefined content at an address of a multiple of 64 bytes."""
        needed = count + _ALIGNMENT_VALUES
        if 4 * count < SMALLEST_KEPT_BYTES:
            return _aligned(np.empty(needed, np.float32), count)
        with self._lock:
            return _aligned(self._lend(needed), count)

    def _lend(self, needed: int) -> NDArray[np.float32]:
        self._takes += 1
        latest = None
        for kept in reversed(self._kept):
            if needed <= kept.memory.size <= needed + needed // 4 and kept.is_free:
                latest = kept
                self._kept.remove(kept)
                break
        oldest = self._takes - IDLE_TAKES
        self._kept = [kept for kept in self._kept if kept.lent_at > oldest or not kept.is_free]
        if latest is None:  # a little more than is needed: fragments differ by a block or two
            latest = _Kept(np.empty(needed + needed // 16, np.float32))
        self._kept.append(latest)
        del self._kept[: -self._most]
        return latest.lend(self._takes)

    def take_segments(self, counts: Sequence[int]) -> JoinedSegments:
        """Return float32[count] for each count, as `take` does: all of one memory, each at a multiple of 64 bytes."""
        return JoinedSegments(self.take(joined_places(counts)[1]), counts)


def _aligned(memory: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    first = -memory.ctypes.data % ALIGNMENT_BYTES // 4
    return memory[first : first + count]


DENSE = "float32"
"""The codec of snapshots, and of the exchanges that drain what is pending."""

Vector = NDArray[np.float32]
logger = logging.getLogger(__name__)

_OWN = PeerId("this node")


def cut(flat: Vector, counts: Sequence[int]) -> list[Vector]:
    """Return the segments of a flat fragment as views."""
    ends = np.cumsum(counts)
    return [flat[end - count : end] for end, count in zip(ends.tolist(), counts, strict=True)]


def codecs_and_counts(layout: Layout, codec: str, fragment: int) -> tuple[tuple[Codec, ...], tuple[int, ...]]:
    """Return the codec and the number of values of each segment of a fragment. codec: its coding, as a spec."""
    return coding_from_spec(codec).of_fragment(layout, fragment), layout.counts(fragment)


def snapshot_counts(layout: Layout) -> list[int]:
    """Return the values of each segment of a whole model, fragment by fragment: how a snapshot is laid."""
    return [count for fragment in range(layout.fragments) for count in layout.counts(fragment)]


def snapshot_codecs(layout: Layout) -> tuple[Codec, ...]:
    return (codec_from_spec(DENSE),) * len(snapshot_counts(layout))


def snapshot_frames(layout: Layout, fragment: int) -> int:
    """Return how many frames of a snapshot are before those of a fragment, in a model that is cut for pipelines."""
    return sum(len(plan_payload(*codecs_and_counts(layout, DENSE, one)).frames) for one in range(fragment))


def snapshot_size(layout: Layout) -> int:
    """Return the bytes of a snapshot, frames and all."""
    if isinstance(layout, PartLayout):
        return sum(payload_size(*codecs_and_counts(layout, DENSE, one)) for one in range(layout.fragments))
    return payload_size(snapshot_codecs(layout), snapshot_counts(layout))


def encode_snapshot(layout: Layout, flats: Sequence[Vector]) -> tuple[Buffer, ...]:
    """Encode a whole model (one flat float32 vector per fragment) exactly. Of a model that is cut for pipelines each
    part has frames of its own."""
    if isinstance(layout, PartLayout):
        payloads = (
            encode_payload(codecs_and_counts(layout, DENSE, f)[0], cut(flat, layout.counts(f)))
            for f, flat in enumerate(flats)
        )
        return tuple(frame for payload in payloads for frame in payload)
    segments = [piece for f, flat in enumerate(flats) for piece in cut(flat, layout.counts(f))]
    return encode_payload(snapshot_codecs(layout), segments)


def decode_snapshot(layout: Layout, frames: Sequence[Buffer]) -> list[Vector]:
    """Read what `encode_snapshot` wrote. Raises CodecError."""
    if isinstance(layout, PartLayout):
        return [
            decode_payload(*_with_frames(layout, fragment, payload))
            for fragment, payload in enumerate(_payloads(layout, frames))
        ]
    flat = decode_payload(snapshot_codecs(layout), frames, snapshot_counts(layout))
    return cut(flat, [sum(layout.counts(fragment)) for fragment in range(layout.fragments)])


def check_snapshot_frames(layout: Layout, frames: Sequence[Buffer]) -> None:
    """Raise CodecError unless `decode_snapshot` can read these frames."""
    if isinstance(layout, PartLayout):
        for fragment, payload in enumerate(_payloads(layout, frames)):
            codecs, payload, counts = _with_frames(layout, fragment, payload)
            check_payload(codecs, payload, counts)
    else:
        check_payload(snapshot_codecs(layout), frames, snapshot_counts(layout))


def _payloads(layout: Layout, frames: Sequence[Buffer]) -> list[Sequence[Buffer]]:
    bounds = [snapshot_frames(layout, fragment) for fragment in range(layout.fragments + 1)]
    if len(frames) != bounds[-1]:
        raise CodecError(f"a snapshot of {len(frames)} frames: it has {bounds[-1]}")
    return [frames[start:end] for start, end in pairwise(bounds)]


def _with_frames(
    layout: Layout, fragment: int, payload: Sequence[Buffer]
) -> tuple[tuple[Codec, ...], Sequence[Buffer], tuple[int, ...]]:
    codecs, counts = codecs_and_counts(layout, DENSE, fragment)
    return codecs, payload, counts


def mean_score(offer: Offer) -> float:
    """Return the mean of an offer's scores, NaN if it has none; waits for those that a device is still computing.

    Scores whose buffers the training loop has donated are left out.
    """
    scores = [number_of(score) for score in offer.scores if not _is_deleted(score)]
    return fmean(scores) if scores else nan


def _is_deleted(score: Any) -> bool:
    return bool(getattr(score, "is_deleted", bool)())


@dataclass(frozen=True, slots=True)
class Encoded:
    """One u, compressed: the name of its coding and the frames, as they are sent."""

    fragment: int
    codec: str
    frames: tuple[Buffer, ...]


class EncodedSegments(CodedSegments):
    """See CodedSegments: a payload of one fragment, which has passed `check_payload`.

    decode: returns its segments, in memory of the coder's.  each: does the work of the runs.
    """

    def __init__(
        self,
        codecs: tuple[Codec, ...],
        frames: Sequence[Buffer],
        counts: tuple[int, ...],
        decode: Callable[[], JoinedSegments],
        each: Each,
    ) -> None:
        self.codecs, self._counts, self._decode, self._each = codecs, counts, decode, each
        self._reader = SlabReader(codecs, frames, counts)
        self._segments: JoinedSegments | None = None

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def held_bytes(self) -> int:
        return self._reader.bytes

    def decoded(self) -> JoinedSegments:
        if self._segments is None:
            self._segments = self._decode()
        return self._segments

    def rebases_with(self, own: Sequence[Array] | None) -> bool:
        return own is None or (isinstance(own, EncodedSegments) and own.codecs == self.codecs)

    def rebase(self, own: CodedSegments | None, places: Array, params: Array, anchor: Array) -> None:
        assert own is None or isinstance(own, EncodedSegments), "both are of one coder"
        mine = None if own is None else own._reader

        def rebase_run(run: Run) -> None:
            self._reader.rebase_run(run, mine, places, params, anchor)

        self._each(rebase_run, list(self._reader.runs()), sum(self._counts))


class DeltaCoder:
    """Encodes offers and decodes aggregates and snapshots, for one model under one run's settings.

    device: the coder of the device that holds the parameters; None: this processor. It is set before the first offer,
    and stays: so do the states of the codecs.  shard: which of several brokers' parts of the model is exchanged here.
    threads: that encode and decode; None: this one, and one for each idle core, or for each core while training waits.
    """

    def __init__(
        self,
        model: ModelSpec,
        settings: RunSettings,
        device: DeviceCoder | None = None,
        shard: int = 0,
        threads: SlabThreads | None = None,
    ) -> None:
        self.model = model
        self.layout = layout_of(model, settings, shard)
        self.settings = settings
        self.coding = coding_from_spec(settings.at_first.codec)
        self.broadcast_coding = coding_from_spec(settings.at_first.broadcast_codec)
        self.device = device
        self.stays_encoded = False
        """Whether who applies an aggregate can decode it onto the model: set by what is offered."""
        self.unacked: dict[int, Encoded] = {}
        self.restarts = 0
        """How often all that was pending has been dropped."""
        self._states: dict[int, list[State]] = {}
        self._kept_states: dict[int, list[NDArray[Any]]] = {}
        self._kept_on_device = False
        self._vectors, self._threads = Vectors(), threads or SlabThreads()
        self._waited = threads or SlabThreads(min(MOST_THREADS, own_cores()))  # of work for which training waits
        self._gate = DeltaGate(settings)

    def kept(self, sequences: Sequence[int]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what a checkpoint must hold: the u of these offers, as they were sent, and the codecs' states."""
        arrays: dict[str, NDArray[Any]] = {}
        unacked = [(s, self.unacked[s]) for s in sequences if s in self.unacked]
        for sequence, u in unacked:
            for number, frame in enumerate(u.frames):
                arrays[f"unacked/{sequence}/{number}"] = np.frombuffer(frame, np.uint8)
        states = self._kept_states | {fragment: pack_states(states) for fragment, states in self._states.items()}
        for fragment, packed in states.items():
            arrays |= {f"codec/{fragment}/{number}": array for number, array in enumerate(packed)}
        facts = {
            "unacked": [[sequence, u.fragment, u.codec, len(u.frames)] for sequence, u in unacked],
            "states": [[fragment, len(packed)] for fragment, packed in states.items()],
            "codecs": [self.coding.name, self.broadcast_coding.name],
            "on_device": self.device is not None,
        }
        return facts, arrays

    def restore(self, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `kept` gave. States of a codec on another kind of device begin fresh."""
        self.unacked = {
            int(sequence): Encoded(
                int(fragment), str(codec), tuple(arrays[f"unacked/{sequence}/{n}"].tobytes() for n in range(count))
            )
            for sequence, fragment, codec, count in facts["unacked"]
        }
        self._states.clear()
        if self.settings.is_planned and "codecs" in facts:
            self.adopt(*facts["codecs"])
        self._kept_on_device = bool(facts["on_device"])
        self._kept_states = {
            int(fragment): [arrays[f"codec/{fragment}/{n}"] for n in range(count)]
            for fragment, count in facts["states"]
        }

    def adopt(self, codec: str, broadcast_codec: str) -> None:
        """Code what is offered from now on by this codec, and expect aggregates by the other.

        What is in flight stays as it was coded. What the codec before has kept is forgotten.
        """
        if codec != self.coding.name:
            self.coding = coding_from_spec(codec)
            self._states.clear()
            self._kept_states.clear()
        if broadcast_codec != self.broadcast_coding.name:
            self.broadcast_coding = coding_from_spec(broadcast_codec)

    def _begin_states(self, fragment: int, fresh: list[State]) -> list[State]:
        """Return the states with which a fragment is coded first: those of a checkpoint, if there is one."""
        kept = self._kept_states.pop(fragment, None)
        if kept is None:
            return fresh
        try:
            if self._kept_on_device == (self.device is not None):
                return fill_states(fresh, kept)
        except CodecError:
            pass
        logger.warning("the checkpoint's codec states are of another device or codec: they begin fresh")
        return fresh

    def warm_up(self, fragment: int) -> None:
        """Compile all that the exchanges of one fragment need, on a device."""
        if self.device is not None:
            counts = self.layout.counts(fragment)
            for coding in dict.fromkeys((self.coding, self.broadcast_coding)):
                if coding.name != DENSE:
                    codecs = coding.of_fragment(self.layout, fragment)
                    self.device.warm_up(codecs, counts, encodes=coding == self.coding)

    def encode(self, offer: Offer) -> Encoded:
        """Return u = C(pending - unacked) for one offer and keep it. Raises NonFiniteDelta naming the leaf."""
        for sequence in offer.applied:
            self.unacked.pop(sequence, None)
        coding = coding_from_spec(DENSE) if offer.dense else self.coding
        in_flight = [u for u in self.unacked.values() if u.fragment == offer.fragment]
        try:
            frames = self._encode(coding.name, offer, in_flight)
        except NonFiniteDelta:
            for index, segment in zip(self.layout.leaves(offer.fragment), offer.segments, strict=True):
                values = np.asarray(segment)
                if bad := int(values.size - np.isfinite(values).sum()):
                    path = self.model[index].path
                    text = f"the delta of {path} holds {bad} values that are not finite (of {values.size})"
                    raise NonFiniteDelta(text, path) from None
            raise
        encoded = Encoded(offer.fragment, coding.name, frames)
        self.unacked[offer.sequence] = encoded
        return encoded

    def _goes_here(self, codec: str) -> bool:
        return self.device is None or codec == DENSE

    def _encode(self, codec: str, offer: Offer, in_flight: Sequence[Encoded]) -> tuple[Buffer, ...]:
        codecs, counts = codecs_and_counts(self.layout, codec, offer.fragment)
        device = None if self._goes_here(codec) else self.device
        states = None
        if not offer.dense:
            if offer.fragment not in self._states:
                fresh = initial_states(codecs, counts) if device is None else device.initial_states(codecs, counts)
                self._states[offer.fragment] = self._begin_states(offer.fragment, fresh)
            states = self._states[offer.fragment]
        if device is not None:
            return device.encode(codecs, offer.segments, [(self._codecs(u), u.frames) for u in in_flight], states)
        less, alike = [u.frames for u in in_flight], all(u.codec == codec for u in in_flight)
        if isinstance(offer.segments, PinnedSegments) and alike and encodes_in_a_pass(codecs, counts):

            def encode(*pinned: Any) -> tuple[Buffer, ...]:
                return encode_pinned(codecs, counts, pinned, states, less, self._waited.each)

            if (frames := offer.segments.read(encode)) is not None:
                return frames
        segments = [np.asarray(segment) for segment in offer.segments]
        if alike:
            return encode_payload(codecs, segments, states, less, self._threads.each)
        sent = self._sum(in_flight)
        rest = [np.subtract(values, known, out=known) for values, known in zip(segments, sent, strict=True)]
        return encode_payload(codecs, rest, states, each=self._threads.each)

    def judge(self, offer: Offer, encoded: Encoded) -> str:
        """Return why a hub would refuse this u for its size, going by those of this node alone; "" if it would not."""
        judgement = self._gate.judge(_OWN, self.layout, offer, encoded.codec, encoded.frames)
        self._gate.norms.count(judgement)
        return judgement.why

    def restart(self) -> None:
        """Drop all that is pending: deltas in flight may still be applied, and then count as other nodes'."""
        self.restarts += 1
        self.unacked.clear()
        self._states.clear()
        self._kept_states.clear()
        self._gate.forget(_OWN)

    def withdraw(self, sequence: int) -> None:
        """Forget a u that was rejected: its progress is still in `pending` and is offered again."""
        self.unacked.pop(sequence, None)

    def decode_aggregate(self, aggregate: Aggregate, landed: Sequence[int], frames: Sequence[Buffer]) -> Update:
        """Decode an aggregate, and this node's part in it. Raises CodecError, also for one that is not of this run."""
        # where codecs are fitted, an aggregate may arrive before the schedule that announces its codec
        if aggregate.codec not in (DENSE, self.broadcast_coding.name) and self.settings.broadcast_codec != AUTO:
            text = f"an aggregate is coded as {aggregate.codec!r}; this run's are {self.broadcast_coding.name!r}"
            raise CodecError(text)
        if not set(aggregate.fragments) <= set(range(self.layout.fragments)):
            raise CodecError(f"an aggregate of the fragments {aggregate.fragments}: there are {self.layout.fragments}")
        if len(set(aggregate.fragments)) < len(aggregate.fragments):
            raise CodecError(f"an aggregate of the fragments {aggregate.fragments}: one of them comes twice")
        parts: dict[int, Sequence[Array]] = {}
        first = 0
        for fragment, count in zip(aggregate.fragments, aggregate.frames, strict=True):
            parts[fragment] = self._decode(aggregate.codec, fragment, frames[first : first + count])
            first += count
        own = dict(self._own(landed))
        for fragment in {*parts, *own}:
            shared, mine = parts.get(fragment), own.get(fragment)
            if isinstance(shared, CodedSegments) and shared.rebases_with(mine):
                continue
            for segments in (parts, own):  # here, not in the thread that applies them
                if isinstance(coded := segments.get(fragment), CodedSegments):
                    segments[fragment] = coded.decoded()
        return Update(aggregate.version, parts, own, tuple(landed))

    def decode_snapshot(
        self, snapshot: Snapshot, landed: Sequence[int], frames: Sequence[Buffer], reset: bool, keep: bool = False
    ) -> Update:
        """Decode a snapshot: the anchor, and an optimizer's state if it came too. Raises CodecError."""
        parameters, state = split_snapshot(snapshot, frames)
        flats = decode_snapshot(self.layout, parameters)
        parts = enumerate(self.layout.join(flats))
        anchor = [Part(leaf, self.layout.part(leaf).start, values) for leaf, values in parts if values.size]
        optimizer_state = [decode_optimizer_state(state)] if state else None
        own = {} if reset else self._own(landed)
        if reset:
            self.restart()
        return Update(snapshot.version, {}, own, tuple(landed), anchor, reset, keep, optimizer_state)

    def _own(self, landed: Sequence[int]) -> Mapping[int, Sequence[Array]]:
        own: dict[int, list[Encoded]] = {}
        for sequence in landed:
            if sequence in self.unacked:
                own.setdefault(self.unacked[sequence].fragment, []).append(self.unacked[sequence])
        return {fragment: self._segments(us, self.layout.counts(fragment)) for fragment, us in own.items()}

    def _segments(self, encoded: Sequence[Encoded], counts: Sequence[int]) -> Sequence[Array]:
        if len(encoded) == 1 and self._stays(counts):
            return self._encoded(self._codecs(encoded[0]), encoded[0].frames, counts)
        if self.device is None or any(self._goes_here(u.codec) for u in encoded):
            return self._sum(encoded)
        return self.device.decode_sum([(self._codecs(u), u.frames) for u in encoded], counts)

    def _codecs(self, encoded: Encoded) -> tuple[Codec, ...]:
        return codecs_and_counts(self.layout, encoded.codec, encoded.fragment)[0]

    def _stays(self, counts: Sequence[int]) -> bool:
        return self.stays_encoded and self.device is None and fast.kernels(sum(counts)) is not None

    def _encoded(self, codecs: tuple[Codec, ...], frames: Sequence[Buffer], counts: Sequence[int]) -> EncodedSegments:
        def decode() -> JoinedSegments:
            return self._decode_here(codecs, frames, counts)

        return EncodedSegments(codecs, frames, tuple(counts), decode, self._waited.each)

    def _sum(self, encoded: Sequence[Encoded]) -> JoinedSegments:
        total = self._vectors.take_segments(self.layout.counts(encoded[0].fragment))
        for number, u in enumerate(encoded):
            decode_segments(self._codecs(u), u.frames, total, add=number > 0, each=self._threads.each)
        return total

    def _decode_here(
        self, codecs: tuple[Codec, ...], frames: Sequence[Buffer], counts: Sequence[int]
    ) -> JoinedSegments:
        segments = self._vectors.take_segments(counts)
        decode_segments(codecs, frames, segments, each=self._threads.each)
        return segments

    def _decode(self, codec: str, fragment: int, frames: Sequence[Buffer]) -> Sequence[Array]:
        codecs, counts = codecs_and_counts(self.layout, codec, fragment)
        if self.device is not None and not self._goes_here(codec):
            return self.device.decode(codecs, frames, counts)
        check_payload(codecs, frames, counts)
        take = self._encoded if self._stays(counts) else self._decode_here
        return take(codecs, frames, counts)
