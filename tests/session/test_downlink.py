"""The hub's bytes keep to the share of its port and of each node's, both ways, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import accumulate
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.averaging.aggregator import Released
from zmqtrain.core.errors import ChannelFull, PeerLost
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer, Lane, PeerId
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.fencing import UNSTAMPED, Stamp
from zmqtrain.protocol.framing import decode_message, split
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.messages import Aggregate, Chunk, Credit, Heartbeat, Message, Publish, Snapshot
from zmqtrain.session import downlink as downlink_module
from zmqtrain.session.downlink import Downlink
from zmqtrain.session.virtual import VirtualClockLoop
from zmqtrain.transport.pacing import BURST_BYTES

A, B, C = PeerId("a#1"), PeerId("b#2"), PeerId("c#3")
FRAME = bytes(MAX_FRAME_BYTES)
RATE = 6e7
"""Half of a gigabit, nearly."""


class Peers:
    """A HubChannel to nodes that take, and send, all they may, `seconds` after they may.

    full, gone: those whose lane of payloads has no room, or is not there any more.
    """

    address = "tcp://127.0.0.1:1"

    def __init__(self, seconds: float) -> None:
        self.seconds, self.downlink = seconds, Downlink(self, self)
        self.sent: list[tuple[float, PeerId, Message, int]] = []
        self.came: list[tuple[float, PeerId, int]] = []
        self.waiting: dict[tuple[PeerId, int], list[tuple[bytes, Buffer]]] = {}
        self.full: set[PeerId] = set()
        self.gone: set[PeerId] = set()
        self.turned_away: list[PeerId] = []
        self.missed: list[PeerId] = []
        self._moved = asyncio.Event()

    def share_of(self, peer: PeerId) -> None:
        pass

    def queue_bytes(self) -> int:
        return 0

    def stamp(self, peer: PeerId, counted: bool) -> Stamp:
        return UNSTAMPED

    def lost(self, peer: PeerId, why: str) -> None:
        raise AssertionError(f"{peer}: {why}")

    def unreachable(self, peer: PeerId) -> None:
        assert peer in self.gone
        self.missed.append(peer)

    def send(self, peer: PeerId, lane: Lane, frames: Any) -> None:
        if lane is Lane.BULK and peer in self.full:
            self.turned_away.append(peer)
            self._moved.set()
            raise ChannelFull(f"the lane to {peer} is not there yet")
        if lane is Lane.BULK and peer in self.gone:
            raise PeerLost(peer)
        loop, message = asyncio.get_running_loop(), decode_message(frames[0])
        self.sent.append((loop.time(), peer, message, sum(len(frame) for frame in frames)))
        self._moved.set()
        if lane is Lane.BULK:
            transfer = message.transfer  # type: ignore[union-attr]
            loop.call_later(self.seconds, self.downlink.acknowledged, peer, Credit(transfer, 1))
        elif isinstance(message, Credit):
            for _ in range(message.chunks):
                head, frame = self.waiting[peer, message.transfer].pop(0)
                loop.call_later(self.seconds, self.take, peer, head, frame)

    def take(self, peer: PeerId, head: bytes, frame: Buffer) -> None:
        chunk = decode_message(head)
        assert isinstance(chunk, Chunk)
        self.came.append((asyncio.get_running_loop().time(), peer, len(frame)))
        self.downlink.uploads.take_chunk(peer, chunk, frame)
        self._moved.set()

    async def until(self, condition: Callable[[], bool]) -> float:
        """Wait for something that is sent or comes to make this so; return the time. The loop fails where none can."""
        while not condition():
            self._moved.clear()
            await self._moved.wait()
        return asyncio.get_running_loop().time()

    async def receive(self) -> tuple[PeerId, Lane, list[Buffer]]:
        raise NotImplementedError

    async def close(self, linger_seconds: float = 1.0) -> None:
        raise NotImplementedError

    def snapshot(self, peer: PeerId, frames: int) -> None:
        assert self.downlink.send_snapshot(peer, 0, [FRAME] * frames)

    def publish(self, peer: PeerId, frames: int) -> None:
        publish = Publish(1, 0, 0, 0, "float32", (len(FRAME),) * frames, 1, 1, nan)
        self.waiting[peer, 1] = list(split(1, [FRAME] * frames))
        self.downlink.uploads.expect(peer, publish)

    def sent_to(self, peer: PeerId | None = None) -> int:
        return sum(size for _, who, _, size in self.sent if peer in (None, who))

    def arrived(self, peer: PeerId | None = None) -> int:
        return sum(size for _, who, size in self.came if peer in (None, who))

    def chunks_to(self, since: int = 0) -> list[PeerId]:
        return [who for _, who, message, _ in self.sent[since:] if isinstance(message, Chunk)]


def keeps_to(moves: list[tuple[float, int]], rate: float) -> bool:
    """Whether at no time more had moved than a burst and what the rate allows until then."""
    moved = accumulate(size for _, size in moves)
    return all(size <= BURST_BYTES + rate * now for (now, _), size in zip(moves, moved, strict=True))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, None]], None]:
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(downlink_module, "clock", clock)

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            runner.run(coroutine)

    return run


Run = Callable[[Coroutine[Any, Any, None]], None]


def test_what_the_hub_sends_keeps_to_its_share_and_nearly_fills_it(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.01)
        peers.downlink.limit(RATE)
        for peer in (A, B):
            peers.snapshot(peer, 14)
        now = await peers.until(lambda: len(peers.chunks_to()) == 28)
        assert keeps_to([(at, size) for at, _, _, size in peers.sent], RATE)
        assert peers.sent_to() >= 0.9 * RATE * now
        for count in range(29):
            first = peers.chunks_to()[:count]
            assert abs(first.count(A) - first.count(B)) <= 2

    run(main())


def test_a_node_is_sent_and_granted_no_more_than_its_own_share_and_the_others_lose_nothing(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.01)
        peers.downlink.limit_peer(A, RATE / 10)
        for peer in (A, B):
            peers.snapshot(peer, 14)
            peers.publish(peer, 14)
        whole = 14 * len(FRAME)
        assert await peers.until(lambda: peers.arrived(B) == whole <= peers.sent_to(B)) <= 1.0
        await peers.until(lambda: min(peers.arrived(A), peers.sent_to(A)) >= 3 * len(FRAME))
        assert keeps_to([(at, size) for at, who, _, size in peers.sent if who == A], RATE / 10)
        assert keeps_to([(at, size) for at, who, size in peers.came if who == A], RATE / 10)

    run(main())


def test_what_is_granted_keeps_to_the_hubs_share(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.01)
        peers.downlink.limit(RATE)
        for peer in (A, B):
            peers.publish(peer, 14)
        now = await peers.until(lambda: peers.arrived() == 28 * len(FRAME))
        assert keeps_to([(at, size) for at, _, size in peers.came], RATE)
        assert peers.arrived() >= 0.9 * RATE * now

    run(main())


def test_control_is_sent_at_once_and_an_aggregate_goes_before_a_snapshot(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.001)
        peers.downlink.limit(RATE)
        peers.snapshot(A, 1)
        peers.downlink.follow(A, True)
        peers.snapshot(B, 10)
        await peers.until(lambda: B in peers.chunks_to())  # the burst is used up
        before = len(peers.sent)
        released = Released(1, "float32", (0,), ((bytes(100_000),),))
        peers.downlink.send_aggregate(released, Reduce(1, (0,), (), 1, False), lambda peer: True)
        peers.downlink.send(C, Heartbeat())
        at_once = [(who, type(message)) for _, who, message, _ in peers.sent[before:]]
        assert (C, Heartbeat) in at_once and (A, Chunk) not in at_once
        await peers.until(lambda: len(peers.chunks_to(before)) == 2)
        assert peers.chunks_to(before) == [A, B]

    run(main())


def test_without_a_limit_all_that_the_windows_let_through_goes_at_once_and_the_link_is_measured(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.01)
        assert peers.downlink.measured(A) == 0.0
        peers.snapshot(A, 5)
        peers.publish(B, 5)
        assert isinstance(peers.sent[0][2], Snapshot)
        whole = 5 * len(FRAME)
        await peers.until(lambda: peers.arrived(B) == whole <= peers.sent_to(A))
        fastest = len(FRAME) / 0.01
        assert peers.downlink.measured(A) == pytest.approx(fastest, rel=0.01)
        assert peers.downlink.measured(B) == pytest.approx(fastest, rel=0.01)

    run(main())


def test_who_was_granted_chunks_and_sends_none_is_named_but_not_for_the_time_in_which_nobody_listened(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(downlink_module, "clock", SimpleNamespace(monotonic=lambda: now))

    async def main() -> None:
        nonlocal now
        peers, patience = Peers(seconds=1000.0), 2.0 + len(FRAME) / 1e6
        peers.publish(A, 1)
        assert not list(peers.downlink.uploads.idle_holders())
        now += 60.0  # this hub was stopped: what came meanwhile is not heard yet
        waited = LATE_SECONDS
        while not (named := list(peers.downlink.uploads.idle_holders())):
            now += 0.05
            waited += 0.05
        assert named == [A] and waited == pytest.approx(patience, abs=0.1)

    run(main())


def test_who_was_sent_away_so_has_longer_each_time_and_others_do_not_wait_for_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(downlink_module, "clock", SimpleNamespace(monotonic=lambda: now))

    def waits(peers: Peers) -> float:
        nonlocal now
        began = now
        while not list(peers.downlink.uploads.idle_holders()):
            now += 0.05
        peers.downlink.uploads.forget(A)
        return now - began

    async def main() -> None:
        nonlocal now
        peers = Peers(seconds=1000.0)
        list(peers.downlink.uploads.idle_holders())
        uploads, credits = peers.downlink.uploads, peers.downlink.uploads._credits
        chunk = len(FRAME) / 1e6
        for patience in (1, 2, 4, 8, 16, 32, 64, 64):
            peers.publish(A, 1)
            assert waits(peers) == pytest.approx(2 + patience * chunk, abs=0.1)
            assert credits.in_flight_bytes == 0
        peers.publish(A, 7)
        assert (credits.holders[A], credits.in_flight_bytes) == (len(FRAME), 0), "one chunk, in no window"
        for times in range(6):
            assert uploads._patience[A] == 64 / 2**times
            now += 2.0
            uploads.take_chunk(A, Chunk(1, times), FRAME)
        assert A not in uploads._patience and not credits._aside, "it sends as fast as others again"

    run(main())


def test_what_a_lane_has_no_room_for_goes_whole_and_in_order_once_it_has_and_holds_up_nobody_else(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.01)
        peers.full = {A}
        peers.snapshot(A, 2)
        peers.snapshot(B, 1)
        await peers.until(lambda: peers.chunks_to() == [B])
        peers.downlink.look_again()
        assert peers.turned_away == [A, A]
        peers.full.clear()
        peers.downlink.look_again()
        peers.full = {A}  # in the midst of a transfer, too
        assert [type(message) for _, who, message, _ in peers.sent if who == A] == [Snapshot]
        await peers.until(lambda: peers.turned_away == [A, A, A])
        peers.full.clear()
        peers.downlink.look_again()
        await peers.until(lambda: peers.chunks_to() == [B, A, A])
        chunks = [message for _, who, message, _ in peers.sent if who == A][1:]
        assert [chunk.index for chunk in chunks if isinstance(chunk, Chunk)] == [0, 1]

    run(main())


def test_nothing_goes_to_who_was_forgotten_while_its_lane_had_no_room(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.01)
        peers.full = {A}
        peers.snapshot(A, 1)
        peers.downlink.forget(A)
        peers.full.clear()
        peers.downlink.look_again()
        assert peers.sent == []

    run(main())


def test_who_waits_for_a_lane_that_never_comes_is_missed(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.01)
        peers.full = {A}
        peers.snapshot(A, 1)
        assert not peers.missed
        peers.full, peers.gone = set(), {A}
        peers.downlink.look_again()
        assert peers.missed == [A]

    run(main())


def test_what_is_passed_on_waits_for_room_and_who_is_not_there_for_it_is_missed(run: Run) -> None:
    async def main() -> None:
        peers, frames = Peers(seconds=0.01), next(iter(split(1, [b"x"])))
        peers.full, peers.gone = {A}, {B}
        assert not peers.downlink.forward(A, frames) and not peers.missed
        assert peers.downlink.forward(B, frames) and peers.missed == [B]
        peers.full.clear()
        assert peers.downlink.forward(A, frames) and peers.chunks_to() == [A]

    run(main())


def test_a_node_is_told_of_its_own_publishes_in_a_release_and_only_the_standby_of_all(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.001)
        contributions = tuple(Contribution(peer, 7, 0, 1, 0.0, 0, 0) for peer in (A, B))
        reduce, released = Reduce(1, (0,), contributions, 2, False), Released(1, "float32", (0,), ((b"1234",),))
        for peer in (A, B, C):
            peers.snapshot(peer, 1)
            peers.downlink.follow(peer, True)
        peers.downlink.send_aggregate(released, reduce, lambda peer: peer == C, whole=True)
        peers.downlink.send_aggregate(released, reduce, lambda peer: peer != C)
        await peers.until(lambda: len([one for one in peers.sent if isinstance(one[2], Aggregate)]) == 3)
        told = {who: message.landed for _, who, message, _ in peers.sent if isinstance(message, Aggregate)}
        assert told == {A: ((A, 7),), B: ((B, 7),), C: ((A, 7), (B, 7))}

    run(main())


def test_a_release_that_does_not_fit_behind_what_waits_is_counted_as_dropped(run: Run) -> None:
    async def main() -> None:
        peers = Peers(seconds=0.001)
        peers.snapshot(A, 1)
        peers.downlink.follow(A, True)
        peers.downlink._line(A).outbox.limit_bytes = 1
        released = Released(1, "float32", (0,), ((b"1234",),))
        peers.downlink.send_aggregate(released, Reduce(1, (0,), (), 1, False), lambda peer: True)
        assert peers.downlink.dropped == 1
        await peers.until(lambda: bool(peers.chunks_to()))

    run(main())
