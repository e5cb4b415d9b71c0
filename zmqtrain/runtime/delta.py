"""Keep a node's side of the one equation: what is offered, what of it is on its way, what has landed.

    params = anchor + pending;  a publish sends u = C(pending - unacked)

Rule 1: pure: no clock, no socket, no thread; one thread calls it.  Rule 2: a u is kept compressed, just as it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.base import Codec, codec_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import check_payload, decode_payload, encode_payload
from zmqtrain.errors import NonFiniteDelta
from zmqtrain.protocol.messages import Aggregate, Snapshot
from zmqtrain.settings import RunSettings
from zmqtrain.types import Buffer, ModelSpec, Offer, Update

__all__ = ["DENSE", "Encoded", "DeltaCoder", "cut", "encode_snapshot", "decode_snapshot", "snapshot_counts"]

DENSE = "float32"
"""The codec of snapshots, and of the exchanges that drain what is pending."""

Vector = NDArray[np.float32]


def cut(flat: Vector, counts: Sequence[int]) -> list[Vector]:
    """Return the segments of a flat fragment as views."""
    ends = np.cumsum(counts)
    return [flat[end - count : end] for end, count in zip(ends.tolist(), counts, strict=True)]


def snapshot_counts(layout: Layout) -> list[int]:
    """Return the values of each segment of a whole model, fragment by fragment: how a snapshot is laid."""
    return [count for fragment in range(layout.fragments) for count in layout.counts(fragment)]


def encode_snapshot(layout: Layout, flats: Sequence[Vector]) -> tuple[Buffer, ...]:
    """Encode a whole model (one flat float32 vector per fragment) exactly."""
    segments = [piece for f, flat in enumerate(flats) for piece in cut(flat, layout.counts(f))]
    return tuple(encode_payload(codec_from_spec(DENSE), segments))


def decode_snapshot(layout: Layout, frames: Sequence[Buffer]) -> list[Vector]:
    """Read what `encode_snapshot` wrote. Raises CodecError."""
    flat = decode_payload(codec_from_spec(DENSE), frames, snapshot_counts(layout))
    return cut(flat, [sum(layout.counts(fragment)) for fragment in range(layout.fragments)])


@dataclass(frozen=True, slots=True)
class Encoded:
    """One u, compressed: the codec's name and the frames, as they are sent."""

    fragment: int
    codec: str
    frames: tuple[Buffer, ...]


class DeltaCoder:
    """Encode offers and decode what comes back, for one model under one run's settings."""

    def __init__(self, model: ModelSpec, settings: RunSettings) -> None:
        self.model = model
        self.layout = Layout(model, settings.fragments)
        self.codec = codec_from_spec(settings.codec)
        self.unacked: dict[int, Encoded] = {}

    def encode(self, offer: Offer) -> Encoded:
        """Return u = C(pending - unacked) for one offer and keep it. Raises NonFiniteDelta naming the leaf."""
        for sequence in offer.applied:
            self.unacked.pop(sequence, None)
        codec = codec_from_spec(DENSE) if offer.dense else self.codec
        counts = self.layout.counts(offer.fragment)
        segments = [np.asarray(segment) for segment in offer.segments]
        on_the_way = [u for u in self.unacked.values() if u.fragment == offer.fragment]
        if on_the_way:
            sent = cut(self._sum(on_the_way), counts)
            segments = [np.subtract(values, known, out=known) for values, known in zip(segments, sent, strict=True)]
        try:
            frames = tuple(encode_payload(codec, segments))
        except NonFiniteDelta:
            for index, segment in zip(self.layout.leaves(offer.fragment), segments, strict=True):
                bad = int(segment.size - np.isfinite(segment).sum())
                if bad:
                    path = self.model[index].path
                    text = f"the delta of {path} holds {bad} values that are not finite (of {segment.size})"
                    raise NonFiniteDelta(text, path) from None
            raise
        encoded = Encoded(offer.fragment, codec.name, frames)
        self.unacked[offer.sequence] = encoded
        return encoded

    def withdraw(self, sequence: int) -> None:
        """Take note that a u will not land: what it carried is in `pending` and is offered again."""
        self.unacked.pop(sequence, None)

    def decode_aggregate(self, aggregate: Aggregate, landed: Sequence[int], frames: Sequence[Buffer]) -> Update:
        """Decode an aggregate, and this node's part in it. Raises CodecError."""
        codec = codec_from_spec(aggregate.codec)
        parts: dict[int, Sequence[Vector]] = {}
        first = 0
        for fragment, count in zip(aggregate.fragments, aggregate.frames, strict=True):
            parts[fragment] = self._decode(codec, fragment, frames[first : first + count])
            first += count
        return Update(aggregate.version, parts, self._own(landed), tuple(landed))

    def decode_snapshot(
        self, snapshot: Snapshot, landed: Sequence[int], frames: Sequence[Buffer], reset: bool
    ) -> Update:
        """Decode a snapshot: the whole anchor. Raises CodecError."""
        flats = decode_snapshot(self.layout, frames)
        own = {} if reset else self._own(landed)
        if reset:
            self.unacked.clear()
        return Update(snapshot.version, {}, own, tuple(landed), self.layout.join(flats), reset)

    def _own(self, landed: Sequence[int]) -> Mapping[int, Sequence[Vector]]:
        own: dict[int, list[Encoded]] = {}
        for sequence in landed:
            if sequence in self.unacked:
                own.setdefault(self.unacked[sequence].fragment, []).append(self.unacked[sequence])
        return {fragment: cut(self._sum(us), self.layout.counts(fragment)) for fragment, us in own.items()}

    def _sum(self, encoded: Sequence[Encoded]) -> Vector:
        counts = self.layout.counts(encoded[0].fragment)
        total: Vector | None = None
        for u in encoded:
            add = total is not None
            total = decode_payload(codec_from_spec(u.codec), u.frames, counts, out=total, add=add, checked=True)
        assert total is not None
        return total

    def _decode(self, codec: Codec, fragment: int, frames: Sequence[Buffer]) -> Sequence[Vector]:
        counts = self.layout.counts(fragment)
        check_payload(codec, frames, counts)
        return cut(decode_payload(codec, frames, counts, checked=True), counts)
