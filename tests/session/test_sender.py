"""What a node sends keeps to its share, in virtual time; control does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

import pytest

from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer, Lane, PeerId
from zmqtrain.session.hub_session import Sender
from zmqtrain.session.virtual import VirtualClockLoop
from zmqtrain.transport.memory import LinkModel, MemoryHub
from zmqtrain.transport.pacing import BURST_BYTES, Use

A = PeerId("a#1")
LINK = LinkModel(bits_per_second=1e9)
CHUNK = (b"head", bytes(MAX_FRAME_BYTES))
SIZE = len(CHUNK[0]) + len(CHUNK[1])


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(coroutine)


class Node:
    """A node's sender on a link of 1 Gb/s, and when what it has sent arrives: (seconds, lane, bytes)."""

    def __init__(self, rate: float | None) -> None:
        self.hub = MemoryHub(LINK)
        self.sender = Sender(rate)
        self.arrived: list[tuple[float, Lane, int]] = []

    async def live(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(self.sender.run(self.hub.connect(A)))

        async def receive() -> None:
            while True:
                _, lane, frames = await self.hub.receive()
                self.arrived.append((loop.time(), lane, sum(len(frame) for frame in frames)))

        receiving = asyncio.create_task(receive())
        await asyncio.sleep(seconds)
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)

    @property
    def bulk(self) -> int:
        return sum(size for _, lane, size in self.arrived if lane is Lane.BULK)


def test_with_half_the_share_no_more_than_half_the_link_is_used_and_nearly_all_of_that() -> None:
    async def main() -> None:
        node = Node(0.5 * 1e9 / 8)
        for _ in range(50):
            node.sender.give(Use.DELTA, CHUNK)
        await node.live(seconds=2.0)
        assert 0.95 * 0.5 * 2.5e8 <= node.bulk <= 0.5 * 2.5e8 + 2 * BURST_BYTES

    run(main())


def test_without_a_limit_the_whole_link_is_used() -> None:
    async def main() -> None:
        node = Node(None)
        for _ in range(80):
            node.sender.give(Use.DELTA, CHUNK)
        await node.live(seconds=1.0)
        assert node.bulk >= 0.97 * 1.25e8

    run(main())


def test_control_goes_at_once_while_chunks_wait_for_the_share() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        node = Node(SIZE)  # a chunk a second
        for _ in range(5):
            node.sender.give(Use.DELTA, CHUNK)
        said: list[float] = []

        def say() -> None:
            said.append(loop.time())
            node.sender.say(b"ping")

        for at in (0.5, 1.7, 2.2):
            loop.call_later(at, say)
        await node.live(seconds=3.0)
        heard = [at for at, lane, _ in node.arrived if lane is Lane.CONTROL]
        assert heard == pytest.approx(said, abs=SIZE * 8 / 1e9 + 1e-6)  # at most behind one chunk on the wire
        assert node.bulk <= BURST_BYTES + 3 * SIZE

    run(main())


def test_who_waits_until_all_is_said_waits_for_what_waits_for_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        hub = MemoryHub(queue_messages=1)
        sender, channel, last = Sender(), hub.connect(A), asyncio.Event()
        send = channel.send

        async def noted(lane: Lane, frames: Sequence[Buffer]) -> None:
            if frames == [b"goodbye"]:
                last.set()
            await send(lane, frames)

        monkeypatch.setattr(channel, "send", noted)
        sending = asyncio.create_task(sender.run(channel))
        for head in (b"1", b"2", b"goodbye"):
            sender.say(head)
        said = asyncio.create_task(sender.sent_control())
        assert (await hub.receive())[2] == [b"1"]
        await last.wait()  # it waits for room now
        assert not said.done()
        assert (await hub.receive())[2] == [b"2"]
        await said
        sending.cancel()
        assert (await hub.receive())[2] == [b"goodbye"]

    run(main())


def test_a_delta_goes_before_a_snapshot_that_was_granted_earlier() -> None:
    async def main() -> None:
        node = Node(10 * SIZE)
        for _ in range(3):
            node.sender.give(Use.SNAPSHOT, (b"snapshot", bytes(MAX_FRAME_BYTES)))
        asyncio.get_running_loop().call_later(0.05, lambda: node.sender.give(Use.DELTA, (b"d", bytes(1000))))
        await node.live(seconds=1.0)
        sizes = [size for _, _, size in node.arrived]
        assert sizes.index(1001) == 1

    run(main())


def test_while_the_channel_connects_anew_nothing_is_sent_and_a_limit_told_later_holds() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        node = Node(None)
        node.sender.pause()
        node.sender.say(b"old")
        node.sender.give(Use.DELTA, CHUNK)

        def again() -> None:
            assert node.arrived == [] and node.sender.waiting_control == (b"old",)
            node.sender.clear(control=True)
            node.sender.limit(SIZE)
            for _ in range(4):
                node.sender.give(Use.DELTA, CHUNK)
            node.sender.resume()

        loop.call_later(1.0, again)
        await node.live(seconds=2.5)
        assert [lane for _, lane, _ in node.arrived] == [Lane.BULK] * 2
        assert node.sender.bytes_sent == 2 * SIZE

    run(main())


def test_a_heartbeat_goes_while_a_chunk_waits_for_room_on_its_lane() -> None:
    blocked = asyncio.Event()

    class Full:
        """A channel whose lane of payloads has no room."""

        sent: ClassVar[list[Sequence[Buffer]]] = []

        async def send(self, lane: Lane, frames: Sequence[Buffer]) -> None:
            if lane is Lane.BULK:
                blocked.set()
                await asyncio.Event().wait()
            self.sent.append(frames)

    async def main() -> None:
        sender = Sender()
        sending = asyncio.create_task(sender.run(Full()))  # type: ignore[arg-type]
        sender.give(Use.DELTA, CHUNK)
        await asyncio.wait_for(blocked.wait(), 60.0)
        sender.say(b"heartbeat")
        await asyncio.wait_for(sender.sent_control(), 1.0)
        assert Full.sent == [[b"heartbeat"]]
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    run(main())
