"""Bring nodes to the run's parameters without holding up its aggregates.

Rule 1: of a snapshot the codec thread only copies what is published, into memory that a thread of its own has touched;
that one makes frames of it and their digest.
Rule 2: all who fetch share what is kept (`Shelf`); each is sent it (or nothing, if the aggregates since are all it
lacks), then these, and from then on every aggregate, in the order of the versions.
Rule 3: each is looked to in its turn (`Turns`), so that the parameters have a bounded share of the port and of this
process's time; one that needs nothing is told so at once.
Rule 4: the rest is used by the broker's loop alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from zmqtrain.averaging.aggregator import Aggregator, Released, Vector
from zmqtrain.averaging.delta import encode_snapshot
from zmqtrain.averaging.digest import digest_of
from zmqtrain.broker.jobs import Jobs
from zmqtrain.broker.shelf import Kept, Shelf
from zmqtrain.broker.turns import Turns
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import Buffer, PeerId, Version
from zmqtrain.protocol.effects import Reduce, Serve
from zmqtrain.session.traffic import Traffic

Frames = Sequence[Buffer]


class Serving:
    """The snapshots of one broker.

    jobs, copies: the codec thread, and the one that makes frames.  here: whether a peer is a member now.  joined: told
    who is brought to which version for the first time.  announce: does what lets nodes hear of a version as soon as
    they may, in the order in which it is asked.  deaf: told of a peer for which too much waits.  landed: which of a
    peer's publishes are in the parameters, and since which version.  size: of the parameters, in bytes; rate: what the
    hub's port carries, in bytes per second.
    served: snapshots sent, whole or in part.
    """

    def __init__(
        self,
        traffic: Traffic,
        jobs: Jobs,
        copies: Jobs,
        aggregator: Aggregator,
        here: Callable[[PeerId], bool],
        joined: Callable[[PeerId, Version], None],
        deaf: Callable[[PeerId], None],
        announce: Callable[[Version, Callable[[], None]], None],
        landed: Callable[[PeerId], tuple[tuple[int, Version], ...]],
        size: Callable[[], int],
        rate: Callable[[], float],
    ) -> None:
        self._traffic, self._jobs, self._copies, self._aggregator = traffic, jobs, copies, aggregator
        self._here, self._joined, self._deaf, self._announce = here, joined, deaf, announce
        self._landed, self._size, self._rate = landed, size, rate
        self.shelf = Shelf()
        self.served = 0
        self._turns = Turns()
        self._asked: dict[
            PeerId, tuple[Serve, Frames]
        ] = {}  # until its turn, and until the codec thread has come so far
        self._looked_to: set[PeerId] = set()  # for whom it has been asked, also if they have gone meanwhile
        self._waiting: list[Serve] = []  # until the codec thread has copied what is published
        self._copying = False
        self._foundings = 0

    def serve(self, serve: Serve, moments: Frames) -> None:
        """Bring a peer, in its turn, to the parameters as they are then, after all that the codec thread was given.

        Who asks again before it was looked to is looked to once, on whatever connection.
        """
        self._asked[serve.peer] = serve, moments
        if self._turns.wait(serve.peer):
            self._look_to(serve.peer)
            self._go_on()

    def tick(self, now: float) -> None:
        """Let time pass: places are free again, and versions that nobody fetches are let go."""
        for peer in self._turns.places:
            if not self._traffic.holds_snapshot(peer):
                self._turns.took(peer)
        self._turns.look(self._size(), self._rate(), now)
        self._go_on()
        self.shelf.forget_old(now)

    def lend(self, peers: Sequence[PeerId], frames: Frames, moments: Frames) -> None:
        """Send these peers another's parameters: they start again from them."""
        whole = [*frames, *moments]
        self._copies.do(lambda: digest_of(whole), self._lend, peers, frames, moments)

    def released(self, released: Released, reduce: Reduce, to: Callable[[PeerId], bool]) -> None:
        """Send an aggregate to all who follow, as far as they are meant, and keep it for those who will."""
        self.shelf.released(released, reduce)
        self._traffic.send_aggregate(released, reduce, to)

    def begin_anew(self, moments: Frames) -> None:
        """Take note that the run is founded, maybe again: no version that is kept is one of it.

        moments: of the founder's optimizer, for those for whom a version was being made.
        """
        self._foundings += 1
        waiting = [serve for kept in self.shelf.being_made for serve in kept.waiting]
        self.shelf.clear()
        for serve in waiting:
            _wait(self._waiting, serve)
        if self._waiting and not self._copying:
            self._copy(moments)

    def forget(self, peer: PeerId) -> None:
        """Take note that a peer has gone: it waits for nothing."""
        self._asked.pop(peer, None)
        self._turns.forget(peer)
        for waiting in (self._waiting, *(kept.waiting for kept in self.shelf.being_made)):
            waiting[:] = [serve for serve in waiting if serve.peer != peer]

    # ------------------------------------------------------------------ the way of one

    def _go_on(self) -> None:
        """Look to those whose turn it is now."""
        while (peer := self._turns.next(self._size(), self._rate(), time.monotonic())) is not None:
            self._look_to(peer)

    def _look_to(self, peer: PeerId) -> None:
        if peer not in self._looked_to:
            self._looked_to.add(peer)
            self._jobs.do(lambda: self._aggregator.version, self._look, peer)

    def _look(self, version: Version | CodecError, peer: PeerId) -> None:
        assert isinstance(version, int)
        self._announce(version, partial(self._bring, version, peer))

    def _bring(self, version: Version, peer: PeerId) -> None:
        """Bring a peer to this version, which all that follow have been sent."""
        self._looked_to.discard(peer)
        if (asked := self._asked.get(peer)) is None or not self._here(peer):
            return
        serve, moments = asked
        if serve.known_version == version:
            del self._asked[peer]
            self._turns.withdraw(peer)
            self._send(serve, version, (), (), "", 0)
            return
        if not self._turns.is_due(peer):
            return
        del self._asked[peer]
        kept = self.shelf.of(serve)
        if kept is None:
            _wait(self._waiting, serve)
            if not self._copying:
                self._copy(moments)
        elif not kept.frames:
            _wait(kept.waiting, serve)
        else:
            self._send_kept(kept, serve)

    def _copy(self, moments: Frames) -> None:
        self._copying = True
        self._copies.do(self._aggregator.make_room, self._have_room, moments)

    def _have_room(self, room: list[Vector] | CodecError, moments: Frames) -> None:
        assert isinstance(room, list)
        self._jobs.do(partial(self._aggregator.copy, room), self._copied, moments, self._foundings)

    def _copied(self, copy: tuple[Version, Layout, list[Vector]] | CodecError, moments: Frames, founding: int) -> None:
        assert isinstance(copy, tuple)
        self._announce(copy[0], partial(self._keep, *copy, moments, founding))

    def _keep(self, version: Version, layout: Layout, flats: list[Vector], moments: Frames, founding: int) -> None:
        """Keep a copy of this version, which all that follow have been sent, and have frames made of it."""
        self._copying = False
        if founding != self._foundings or not self._waiting:
            if self._waiting:
                self._copy(moments)
            return
        kept = self.shelf.begin(version, time.monotonic())
        kept.waiting, self._waiting = self._waiting, []
        self._copies.do(partial(_make, layout, flats, moments), self._made, kept, moments)

    def _made(self, made: tuple[Frames, tuple[str, str]] | CodecError, kept: Kept, moments: Frames) -> None:
        if isinstance(made, CodecError):
            raise made
        kept.make(made[0], moments, made[1])
        waiting, kept.waiting = kept.waiting, []
        for serve in waiting:
            self._send_kept(kept, serve)

    def _send_kept(self, kept: Kept, serve: Serve) -> None:
        kept.used_at = time.monotonic()
        begins_at = serve.known_version if kept.leads_on_from(serve.known_version) else kept.version
        frames, moments, digest, first = kept.parts_for(serve)
        if self._here(serve.peer) and self._send(serve, begins_at, frames, moments, digest, first):
            since = [one for one in kept.since if one[0].version > begins_at]
            sent = [*[*frames, *moments][first:], *(frame for one, _ in since for part in one.frames for frame in part)]
            self._turns.used(serve.peer, sum(len(frame) for frame in sent), kept.used_at)
            for released, reduce in since:
                self._traffic.send_aggregate(released, reduce, lambda peer: peer == serve.peer)

    def _send(self, serve: Serve, version: Version, frames: Frames, moments: Frames, digest: str, first: int) -> bool:
        """Send a snapshot, the frames from `first` on; return whether the peer follows from there."""
        peer = serve.peer
        if not self._traffic.follows(peer):
            self._joined(peer, version)
        landed = tuple((sequence, at) for sequence, at in self._landed(peer) if at <= version)
        self._traffic.drop_aggregates(peer)
        following = self._traffic.send_snapshot(
            peer, version, frames, moments, landed, serve.reset, serve.rewound, digest, first
        )
        self._traffic.follow(peer, following)
        self.served += following and bool(frames)
        if not following:
            self._deaf(peer)
        return following

    def _lend(self, digest: str | CodecError, peers: Sequence[PeerId], frames: Frames, moments: Frames) -> None:
        assert isinstance(digest, str)
        for peer in peers:
            if self._here(peer) and not self._traffic.send_snapshot(peer, -1, frames, moments, (), True, digest=digest):
                self._deaf(peer)


def _wait(waiting: list[Serve], serve: Serve) -> None:
    """Have a peer wait, once, with what it asked for last."""
    waiting[:] = [*(other for other in waiting if other.peer != serve.peer), serve]


def _make(layout: Layout, flats: list[Vector], moments: Frames) -> tuple[Frames, tuple[str, str]]:
    frames = encode_snapshot(layout, flats)
    alone = digest_of(frames)
    return frames, (alone, digest_of([*frames, *moments]) if moments else alone)
