"""Snapshots for nodes that fetch: a cache, the order of the fetches, and the service that sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zmqtrain.averaging.aggregator import Released, Vector
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.averaging.snapshot import digest_of
from zmqtrain.broker.core import BrokerCore, EffectHandlers, LoadMeter, MessageHandlers
from zmqtrain.broker.standby import StandbyService
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.types import Buffer, PeerId, Version
from zmqtrain.protocol.effects import Reduce, Serve
from zmqtrain.session.environment import CodecExecutor, spawn

MOST_KEPT = 2
KEPT_SECONDS = 60.0
"""A snapshot is kept for so long after a peer began, or resumed, to fetch it."""
LARGEST_LAG = 0.25
"""A newcomer is sent a cached snapshot if the aggregates since have at most so many times its bytes."""


@dataclass(eq=False)
class CachedSnapshot:
    """One version. frames: () while they are being made; moments: frames of the founder's optimizer, behind them.

    digests: of the frames, and of frames and moments.  since: the releases after it.
    """

    version: Version
    used_at: float
    frames: Sequence[Buffer] = ()
    moments: Sequence[Buffer] = ()
    digests: tuple[str, str] = ("", "")
    since: list[tuple[Released, Reduce]] = field(default_factory=list)
    size: int = 0
    since_size: int = 0

    def make(self, frames: Sequence[Buffer], moments: Sequence[Buffer], digests: tuple[str, str]) -> None:
        self.frames, self.moments, self.digests = frames, moments, digests
        self.size = sum(len(frame) for frame in frames)

    def leads_on_from(self, version: Version) -> bool:
        """Return whether a node with this version needs nothing but aggregates that are kept here."""
        return self.version <= version <= (self.since[-1][0].version if self.since else self.version)

    def parts_for(self, serve: Serve, held: slice | None = None) -> tuple[Sequence[Buffer], Sequence[Buffer], str, int]:
        """Return the frames and moments to send to this node, their digest, and how many of the first it has.

        held: the frames of what one PC of a pipeline holds; it is sent them from the first on.
        """
        if self.leads_on_from(serve.known_version):
            return (), (), "", 0
        if held is not None:
            return self.frames[held], (), "", 0
        moments = self.moments if serve.moments else ()
        digest = self.digests[bool(moments)]
        resumes = serve.digest == digest and 0 < serve.held < len(self.frames) + len(moments)
        return self.frames, moments, digest, serve.held if resumes else 0


class SnapshotCache:
    """At most `MOST_KEPT` snapshots, oldest first, each with the aggregates since, of at most its own bytes.

    Pure: `now` is an argument; buffers are referred to, never copied.
    """

    def __init__(self) -> None:
        self._kept: list[CachedSnapshot] = []

    @property
    def bytes(self) -> int:
        return sum(kept.size + kept.since_size for kept in self._kept)

    def of(self, serve: Serve) -> CachedSnapshot | None:
        """Return the snapshot for this node: one whose aggregates continue its version, the one that it has a part of,
        or one that is new enough; None: a new one must be made."""
        for kept in self._kept:
            if kept.leads_on_from(serve.known_version) or (serve.digest and serve.digest in kept.digests):
                return kept
        newest = self._kept[-1] if self._kept else None
        if newest is None or (newest.frames and newest.since_size > LARGEST_LAG * newest.size):
            return None
        return newest

    def begin(self, version: Version, now: float) -> CachedSnapshot:
        while len(self._kept) >= MOST_KEPT:
            del self._kept[0]
        self._kept.append(CachedSnapshot(version, now))
        return self._kept[-1]

    def released(self, released: Released, reduce: Reduce) -> None:
        size = sum(len(frame) for frames in released.frames for frame in frames)
        for kept in list(self._kept):
            kept.since.append((released, reduce))
            kept.since_size += size
            if kept.frames and kept.since_size > kept.size:  # a new snapshot has fewer bytes
                self._kept.remove(kept)

    def forget_old(self, now: float) -> None:
        """Drop the snapshots that no peer has begun to fetch for `KEPT_SECONDS`."""
        self._kept = [kept for kept in self._kept if not kept.frames or now - kept.used_at < KEPT_SECONDS]


AT_ONCE, AT_ONCE_BYTES = 2, 8 << 20
SHARE, AGAIN_SHARE = 0.5, 0.125
AGAIN_SECONDS = 60.0
FREE, FREE_BYTES = 4, 32 << 20
"""So many snapshots, or bytes if they are more, are sent before `SHARE` holds."""
AGAIN_FREE, AGAIN_FREE_BYTES = 2, 4 << 20
"""The same for `AGAIN_SHARE`."""
PATIENCE_SECONDS, PATIENCE_TIMES = 2.0, 4.0
"""A place is kept for so many seconds, plus so many times the seconds that the parameters take at the port's rate."""
PEERS_KEPT = 1024


@dataclass
class _Place:
    """The place of a peer in its turn. used: it was sent its snapshot, at `since`."""

    since: float
    used: bool = False


@dataclass
class _Owed:
    """Bytes that were sent ahead of a rate, at time `at`."""

    bytes: float = 0.0
    at: float = 0.0

    def allows(self, size: int, most: float, rate: float, now: float) -> bool:
        """Let time pass at this rate; return whether with `size` more at most `most` bytes are ahead of it."""
        self.bytes, self.at = max(0.0, self.bytes - rate * max(0.0, now - self.at)), max(now, self.at)
        return self.bytes + size <= most


class Turns:
    """The order in which peers are sent snapshots, so that these take a bounded share of the hub's port.

    Rule 1: at most `AT_ONCE` peers are sent snapshots at a time, or as many as together are sent `AT_ONCE_BYTES`; the
    others wait.  Rule 2: peers that were sent none in the last `AGAIN_SECONDS` are first, then the one that was served
    longest ago.  Rule 3: in the long run all have `SHARE` of the port's rate, and those that fetch again `AGAIN_SHARE`;
    a number of snapshots is free, so that a peer that fetches alone never waits.  Rule 4: a peer that does not take its
    snapshot loses its place, not the snapshot.  Pure: `now` is an argument.
    """

    def __init__(self) -> None:
        self._waiting: dict[PeerId, None] = {}  # in the order in which they came
        self._places: dict[PeerId, _Place] = {}
        self._served: dict[PeerId, float] = {}  # when its last turn came, the oldest first
        self._all, self._again = _Owed(), _Owed()

    @property
    def places(self) -> list[PeerId]:
        """The peers whose turn it is, whether or not they were sent anything yet."""
        return list(self._places)

    def wait(self, peer: PeerId) -> bool:
        """Let a peer wait for its turn; False if it waits already, or its turn has come and was not used yet."""
        if peer in self._waiting or self.is_due(peer):
            return False
        self._waiting[peer] = None
        return True

    def next(self, size: int, rate: float, now: float) -> PeerId | None:
        """Give the next peer its turn and return it, None if no peer may have one now.

        size: of the parameters, in bytes.  rate: of the port, in bytes per second.
        """
        if len(self._places) >= max(AT_ONCE, AT_ONCE_BYTES // max(1, size)):
            return None
        waiting = [peer for peer in self._waiting if peer not in self._places]
        peer = min(waiting, key=lambda peer: self._last(peer, now), default=None)
        if peer is None or not self._all.allows(size, max(FREE * size, FREE_BYTES), SHARE * rate, now):
            return None
        most = max(AGAIN_FREE * size, AGAIN_FREE_BYTES)
        if self._last(peer, now) and not self._again.allows(size, most, AGAIN_SHARE * rate, now):
            return None
        del self._waiting[peer]
        self._places[peer] = _Place(now)
        return peer

    def is_due(self, peer: PeerId) -> bool:
        return peer in self._places and not self._places[peer].used

    def used(self, peer: PeerId, size: int, now: float) -> None:
        """Record that a peer whose turn it is was sent so many bytes."""
        if (place := self._places.get(peer)) is not None:
            place.used, place.since = True, now
        self._all.bytes += size
        if self._last(peer, now):
            self._again.bytes += size
        self._served.pop(peer, None)
        self._served[peer] = now
        while len(self._served) > PEERS_KEPT:
            del self._served[next(iter(self._served))]

    def took(self, peer: PeerId) -> None:
        """Free the place of a peer that has received its snapshot."""
        if peer in self._places and self._places[peer].used:
            del self._places[peer]

    def look(self, size: int, rate: float, now: float) -> None:
        """Free the places of peers that do not take their snapshots."""
        patience = PATIENCE_SECONDS + PATIENCE_TIMES * size / rate
        for peer, place in list(self._places.items()):
            if place.used and now - place.since > patience:
                del self._places[peer]

    def withdraw(self, peer: PeerId) -> None:
        """Remove a peer that needs no snapshot; one that is being sent to it keeps its place."""
        self._waiting.pop(peer, None)
        if self.is_due(peer):
            del self._places[peer]

    def forget(self, peer: PeerId) -> None:
        """Remove a peer that has left, but remember when it was served."""
        self._waiting.pop(peer, None)
        self._places.pop(peer, None)

    def _last(self, peer: PeerId, now: float) -> float:
        """Return when the peer was last served; 0 for never, or long ago."""
        at = self._served.get(peer, 0.0)
        return at if at and now - at < AGAIN_SECONDS else 0.0


Frames = Sequence[Buffer]


class SnapshotService:
    """The snapshots of one broker.

    Rule 1: the codec thread only copies the published parameters, into memory that another thread has touched; that
    thread makes frames and their digest of the copy.
    Rule 2: all peers that fetch share the cached snapshots. Each is sent one (or nothing, if the aggregates since are
    all that it lacks), then these aggregates, and from then on every aggregate, in the order of the versions.
    Rule 3: peers are served in turns (`Turns`), so that snapshots have a bounded share of the port and of this process.
    A peer that needs nothing is answered at once.

    copies: the thread that makes frames.  standby: says from when on nodes may hear of a version.
    moments: the founder's optimizer state, until training has begun.  served: snapshots sent, whole or in part.
    """

    def __init__(self, core: BrokerCore, copies: CodecExecutor, loads: LoadMeter, standby: StandbyService) -> None:
        self._core, self._codec, self._copies = core, core.codec, copies
        self._aggregator, self._downlink = core.aggregator, core.downlink
        self._loads, self._standby = loads, standby
        self.messages: MessageHandlers = {}
        self.effects: EffectHandlers = {Serve: self.serve}
        self.cache = SnapshotCache()
        self.moments: Frames = ()
        self.served = 0
        self._turns = Turns()
        self._asked: dict[PeerId, tuple[Serve, Frames]] = {}  # with the moments of that time, until they are sent it
        self._scheduled: set[PeerId] = set()  # that the codec thread has been asked for, also if they have left since
        self._making = False  # a copy of what is published, and a snapshot of that

    def serve(self, serve: Serve) -> None:
        """Send a peer, in its turn, the parameters as they are then, after all earlier jobs of the codec thread.

        A peer that asks again before its turn is served once, on its newest connection.
        """
        self._asked[serve.peer] = serve, self.moments
        if self._turns.wait(serve.peer):
            self._schedule(serve.peer)
            self._serve_next()

    def tick(self, now: float) -> None:
        """Free the places of peers that have taken their snapshot, and drop snapshots that nobody fetches."""
        for peer in self._turns.places:
            if not self._downlink.holds_snapshot(peer):
                self._turns.took(peer)
        self._turns.look(self._core.model_bytes(), self._loads.port_rate(), now)
        self._serve_next()
        self.cache.forget_old(now)

    def lend(self, peers: Sequence[PeerId], frames: Frames, moments: Frames) -> None:
        """Send these peers another's parameters: they start again from them."""
        spawn(self._lend(peers, frames, moments))

    def restart(self, moments: Frames) -> None:
        """Drop all snapshots because the run is founded, or goes back: none of them is a version of it.

        moments: of the founder's optimizer.
        """
        self.moments = moments
        self._asked = {peer: (serve, moments) for peer, (serve, _) in self._asked.items()}
        self.cache = SnapshotCache()

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that has left."""
        self._asked.pop(peer, None)
        self._turns.forget(peer)

    # ------------------------------------------------------------------ one fetch

    def _serve_next(self) -> None:
        while peer := self._turns.next(self._core.model_bytes(), self._loads.port_rate(), self._core.now()):
            self._schedule(peer)

    def _schedule(self, peer: PeerId) -> None:
        if peer not in self._scheduled:
            self._scheduled.add(peer)
            spawn(self._bring(peer))

    async def _bring(self, peer: PeerId) -> None:
        """Bring a peer to the version that the codec thread is at, once all followers have been sent that."""
        version = await self._codec(lambda: self._aggregator.version)
        await self._standby.announced(version)
        self._scheduled.discard(peer)
        if (asked := self._asked.get(peer)) is None or peer not in self._core.hub.members:
            return
        serve, moments = asked
        if serve.known_version == version:
            del self._asked[peer]
            self._turns.withdraw(peer)
            self._send(serve, version, (), (), "", 0)
            return
        if self._turns.is_due(peer):
            self._serve_due(peer, moments)

    def _serve_due(self, peer: PeerId, moments: Frames) -> None:
        """Send a peer whose turn it is a snapshot; if there is none for it, have one made."""
        kept = self.cache.of(self._asked[peer][0])
        if kept is not None and kept.frames:
            self._send_cached(kept, self._asked.pop(peer)[0])
        elif not self._making:
            spawn(self._make(moments))

    async def _make(self, moments: Frames) -> None:
        """Copy the published parameters, make a snapshot of them, and serve the peers that wait for one."""
        self._making = True
        room = await self._copies(self._aggregator.make_room)
        cache = self.cache
        version, layout, flats = await self._codec(self._aggregator.copy, room)
        await self._standby.announced(version)
        kept = None
        if cache is self.cache and self._due():  # the run was not founded again meanwhile, and somebody waits
            kept = cache.begin(version, self._core.now())
            frames, digests = await self._copies(_encode, layout, flats, moments)
            kept.make(frames, moments, digests)
        self._making = False
        for serve, moments in self._due():
            if serve.peer not in self._asked:  # lost by what was sent to others
                continue
            if kept is None or cache is not self.cache:
                self._serve_due(serve.peer, moments)
            else:  # however much was released since
                self._send_cached(cache.of(serve) or kept, self._asked.pop(serve.peer)[0])

    def _due(self) -> list[tuple[Serve, Frames]]:
        return [asked for peer, asked in self._asked.items() if self._turns.is_due(peer)]

    def _send_cached(self, kept: CachedSnapshot, serve: Serve) -> None:
        kept.used_at = self._core.now()
        begins_at = serve.known_version if kept.leads_on_from(serve.known_version) else kept.version
        share = self._core.share_of(serve.peer)
        held = None if share is None else self._aggregator.frames_of(share)
        frames, moments, digest, first = kept.parts_for(serve, held)
        here = serve.peer in self._core.hub.members
        if here and self._send(serve, begins_at, frames, moments, digest, first):
            since = [one for one in kept.since if one[0].version > begins_at]
            sent = [*[*frames, *moments][first:], *(frame for one, _ in since for part in one.frames for frame in part)]
            self._turns.used(serve.peer, sum(len(frame) for frame in sent), kept.used_at)
            for released, reduce in since:
                self._downlink.send_aggregate(released, reduce, lambda peer: peer == serve.peer)

    def _send(self, serve: Serve, version: Version, frames: Frames, moments: Frames, digest: str, first: int) -> bool:
        """Send a snapshot, the frames from `first` on; return whether the peer follows from there."""
        peer = serve.peer
        if not self._downlink.follows(peer):
            self._core.log.joined(peer, version)
        landed = tuple((sequence, at) for sequence, at in self._core.hub.records.landed(peer) if at <= version)
        self._downlink.drop_aggregates(peer)
        following = self._downlink.send_snapshot(
            peer, version, frames, moments, landed, serve.reset, serve.rewound, digest, first
        )
        self._downlink.follow(peer, following)
        self.served += following and bool(frames)
        if not following:
            self._core.reconnect(peer)
        return following

    async def _lend(self, peers: Sequence[PeerId], frames: Frames, moments: Frames) -> None:
        digest = await self._copies(digest_of, [*frames, *moments])
        for peer in peers:
            if peer not in self._core.hub.members:
                continue
            if not self._downlink.send_snapshot(peer, -1, frames, moments, (), True, digest=digest):
                self._core.reconnect(peer)


def _encode(layout: Layout, flats: list[Vector], moments: Frames) -> tuple[Frames, tuple[str, str]]:
    frames = encode_snapshot(layout, flats)
    alone = digest_of(frames)
    return frames, (alone, digest_of([*frames, *moments]) if moments else alone)
