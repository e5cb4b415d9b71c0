"""The double in memory: what it delivers, what it loses, and when (in virtual time: nothing here waits)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from zmqtrain.core.errors import ChannelClosed, ChannelFull, ConfigError, LocalProtocolError, PeerLost
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer, Lane, PeerId
from zmqtrain.session.virtual import VirtualClockLoop
from zmqtrain.transport.memory import LinkModel, Machine, MemoryHub

T = TypeVar("T")
A, B = PeerId("a#1"), PeerId("b#2")
LINK = LinkModel(bits_per_second=8e6, latency_seconds=0.25)  # 1 MB takes 1 s


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(coroutine)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_messages_pass_both_ways_in_order_and_say_who_and_which_lane() -> None:
    async def main() -> None:
        hub = MemoryHub()
        node = hub.connect(A)
        for index in range(3):
            await node.send(Lane.BULK, [b"%d" % index, b"payload"])
        assert [await hub.receive() for _ in range(3)] == [(A, Lane.BULK, [b"%d" % i, b"payload"]) for i in range(3)]
        hub.send(A, Lane.CONTROL, [b"hello"])
        assert await node.receive() == (Lane.CONTROL, [b"hello"])

    run(main())


def test_a_node_receives_control_before_bulk_that_came_earlier() -> None:
    async def main() -> None:
        hub = MemoryHub()
        node = hub.connect(A)
        hub.send(A, Lane.BULK, [b"bulk"])
        hub.send(A, Lane.CONTROL, [b"control"])
        assert [(await node.receive())[0] for _ in range(2)] == [Lane.CONTROL, Lane.BULK]

    run(main())


def test_small_frames_arrive_as_copies_and_large_ones_as_read_only_views() -> None:
    async def main() -> None:
        hub = MemoryHub()
        node = hub.connect(A)
        small, large = bytearray(b"small"), bytearray(1 << 20)
        await node.send(Lane.BULK, [small, large])
        small[:] = b"other"
        _, _, (head, payload) = await hub.receive()
        assert head == b"small" and isinstance(head, bytes)
        assert isinstance(payload, memoryview) and payload.readonly and payload.obj is large

    run(main())


def test_a_full_lane_makes_the_node_wait_and_tells_the_hub() -> None:
    async def main() -> None:
        hub = MemoryHub(queue_messages=2)
        node = hub.connect(A)
        for _ in range(2):
            await node.send(Lane.BULK, [b"x"])
            hub.send(A, Lane.BULK, [b"x"])
        third = asyncio.create_task(node.send(Lane.BULK, [b"third"]))
        done, _ = await asyncio.wait([third], timeout=1)
        assert not done
        await node.send(Lane.CONTROL, [b"the other lane has room"])
        with pytest.raises(ChannelFull):
            hub.send(A, Lane.BULK, [b"x"])
        await hub.receive()
        await third
        await node.receive()
        hub.send(A, Lane.BULK, [b"x"])

    run(main())


def test_a_message_takes_its_bytes_at_the_ports_rate_and_the_latency() -> None:
    async def main() -> None:
        hub = MemoryHub(LINK)
        node = hub.connect(A)
        for _ in range(2):
            await node.send(Lane.BULK, [bytes(500_000)])
        await hub.receive()
        assert now() == pytest.approx(0.75)
        await hub.receive()
        assert now() == pytest.approx(1.25)
        hub.send(A, Lane.BULK, [bytes(1_000_000)])
        await node.receive()
        assert now() == pytest.approx(2.5)

    run(main())


def test_two_nodes_share_the_hubs_port_and_control_waits_for_no_bulk() -> None:
    async def main() -> None:
        hub = MemoryHub(LINK)
        nodes = [hub.connect(peer) for peer in (A, B)]
        for node in nodes:
            await node.send(Lane.BULK, [bytes(1_000_000)])
        await nodes[0].send(Lane.CONTROL, [bytes(10)])
        arrivals = []
        for _ in range(3):
            peer, lane, _ = await hub.receive()
            arrivals.append((peer, lane, now()))
        assert [arrival[:2] for arrival in arrivals] == [(A, Lane.CONTROL), (A, Lane.BULK), (B, Lane.BULK)]
        assert [time for _, _, time in arrivals] == pytest.approx([0.25 + 1e-5, 1.25, 2.25])

    run(main())


def test_all_that_is_on_one_machine_shares_its_port_and_talks_to_each_other_at_once() -> None:
    async def main() -> None:
        machine = Machine()
        here, there = MemoryHub(LINK, machine=machine, address="tcp://here:1"), MemoryHub(LINK)
        assert here.address == "tcp://here:1"
        own, far = here.connect(A, machine), here.connect(B)
        elsewhere = there.connect(A, machine)
        await own.send(Lane.BULK, [bytes(1_000_000)])
        assert (await here.receive())[0] == A and now() == 0.0
        here.send(B, Lane.BULK, [bytes(1_000_000)])  # the hub's and the node's port is the same one
        await elsewhere.send(Lane.BULK, [bytes(1_000_000)])
        await far.receive()
        assert now() == pytest.approx(1.25)
        await there.receive()
        assert now() == pytest.approx(2.25)

    run(main())


def test_a_cut_loses_what_is_queued_and_the_hub_is_told() -> None:
    async def main() -> None:
        hub = MemoryHub(LINK)
        node, other = hub.connect(A), hub.connect(B)
        await node.send(Lane.BULK, [bytes(500_000)])
        hub.send(A, Lane.CONTROL, [b"lost"])
        hub.cut(A)
        with pytest.raises(PeerLost) as caught:
            hub.send(A, Lane.CONTROL, [b"?"])
        assert caught.value.peer == A
        await other.send(Lane.CONTROL, [b"not cut"])
        assert await hub.receive() == (B, Lane.CONTROL, [b"not cut"])
        await node.reconnect()
        with pytest.raises(PeerLost):
            hub.send(A, Lane.CONTROL, [b"?"])
        await node.send(Lane.CONTROL, [b"queued while cut"])
        hub.restore(A)
        assert await hub.receive() == (A, Lane.CONTROL, [b"queued while cut"])
        hub.send(A, Lane.CONTROL, [b"welcome back"])
        assert await node.receive() == (Lane.CONTROL, [b"welcome back"])

    run(main())


def test_reconnecting_loses_what_is_queued_both_ways_and_a_send_that_waits() -> None:
    async def main() -> None:
        hub = MemoryHub(queue_messages=1)
        node = hub.connect(A)
        await node.send(Lane.BULK, [b"lost"])
        hub.send(A, Lane.BULK, [b"lost"])
        waiting = asyncio.create_task(node.send(Lane.BULK, [b"lost too"]))
        await asyncio.sleep(0)
        await node.reconnect()
        await waiting
        await node.send(Lane.BULK, [b"new"])
        hub.send(A, Lane.BULK, [b"new"])
        assert (await hub.receive())[2] == (await node.receive())[1] == [b"new"]

    run(main())


def test_a_second_node_of_the_same_name_takes_the_connection_over() -> None:
    async def main() -> None:
        hub = MemoryHub()
        first, second = hub.connect(A), hub.connect(A)
        await first.send(Lane.CONTROL, [b"nobody hears this"])
        await second.send(Lane.CONTROL, [b"second"])
        hub.send(A, Lane.CONTROL, [b"for the second"])
        assert await hub.receive() == (A, Lane.CONTROL, [b"second"])
        assert await second.receive() == (Lane.CONTROL, [b"for the second"])
        await first.close()
        hub.send(A, Lane.CONTROL, [b"still there"])

    run(main())


def test_a_cancelled_receive_loses_no_message() -> None:
    async def main() -> None:
        hub = MemoryHub()
        node = hub.connect(A)
        for receive in (hub.receive, node.receive):
            task: asyncio.Task[Any] = asyncio.create_task(receive())
            await asyncio.sleep(0)
            await node.send(Lane.CONTROL, [b"up"])
            hub.send(A, Lane.CONTROL, [b"down"])
            task.cancel()  # after the message has come, before the task has run
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await hub.receive())[2] == [b"up"]
            assert (await node.receive())[1] == [b"down"]

    run(main())


def test_closing_wakes_every_waiter_and_the_hub_is_told_that_the_node_went() -> None:
    async def main() -> None:
        hub = MemoryHub(queue_messages=1)
        node = hub.connect(A)
        await node.send(Lane.BULK, [b"x"])
        calls = node.receive(), node.changed(), node.send(Lane.BULK, [b"y"])
        waiters: list[asyncio.Task[Any]] = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        await node.close()
        await node.close()
        assert all(isinstance(e, ChannelClosed) for e in await asyncio.gather(*waiters, return_exceptions=True))
        for call in (node.receive(), node.changed(), node.send(Lane.BULK, [b"y"]), node.reconnect()):
            with pytest.raises(ChannelClosed):
                await call
        with pytest.raises(PeerLost):
            hub.send(A, Lane.CONTROL, [b"?"])
        assert (await hub.receive())[2] == [b"x"]
        waiter = asyncio.create_task(hub.receive())
        await asyncio.sleep(0)
        await hub.close()
        for receiving in (waiter, hub.receive()):
            with pytest.raises(ChannelClosed):
                await receiving
        with pytest.raises(ChannelClosed):
            hub.send(A, Lane.BULK, [b"z"])
        with pytest.raises(ChannelClosed):
            hub.connect(A)

    run(main())


def test_closing_lingers_for_what_is_on_its_way_and_no_longer_than_it_may() -> None:
    async def main() -> None:
        hub = MemoryHub(LINK)
        patient, hurried = hub.connect(A), hub.connect(B)
        await patient.send(Lane.BULK, [bytes(500_000)])
        await patient.close(linger_seconds=5.0)
        assert now() == pytest.approx(0.75)
        assert (await hub.receive())[0] == A
        await hurried.send(Lane.BULK, [bytes(500_000)])
        await hurried.close(linger_seconds=0.5)
        assert now() == pytest.approx(1.25)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hub.receive(), 60)
        node = hub.connect(B)
        hub.send(B, Lane.BULK, [bytes(500_000)])
        await hub.close(linger_seconds=5.0)
        assert now() == pytest.approx(61.25 + 0.75)
        await node.receive()
        with pytest.raises(TimeoutError):  # a node is not told that its hub has closed
            await asyncio.wait_for(node.receive(), 1)

    run(main())


@pytest.mark.parametrize(
    "frames", [[], [b"1"] * 7, [bytes(MAX_FRAME_BYTES + (64 << 10) + 1)], [memoryview(b"12345678")[::2]]]
)
def test_what_no_channel_carries_is_refused_at_the_sender(frames: list[Buffer]) -> None:
    async def main() -> None:
        hub = MemoryHub()
        node = hub.connect(A)
        with pytest.raises(LocalProtocolError):
            await node.send(Lane.BULK, frames)
        with pytest.raises(LocalProtocolError):
            hub.send(A, Lane.BULK, frames)

    run(main())


@pytest.mark.parametrize("name", ["", "a\nb", "é" * 101, "x" * 201])
def test_a_name_that_the_real_hub_would_ignore_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        MemoryHub().connect(PeerId(name))


def test_a_link_or_a_queue_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        LinkModel(0)
    with pytest.raises(ConfigError):
        LinkModel(1, -1)
    with pytest.raises(ConfigError):
        MemoryHub(queue_messages=0)


def test_a_flood_leaves_the_other_tasks_their_turn() -> None:
    async def main() -> None:
        hub = MemoryHub(queue_messages=200)
        node = hub.connect(A)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(100):
            await node.send(Lane.BULK, [b"x"])
        for _ in range(100):
            await hub.receive()
        assert turns >= 20
        task.cancel()

    run(main())


def test_a_virtual_loop_says_that_it_would_hang() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3600)
        assert now() == pytest.approx(3600)
        await MemoryHub().receive()

    with pytest.raises(RuntimeError, match="hang"):
        loop = VirtualClockLoop()
        try:
            loop.run_until_complete(main())
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    loop.run_until_complete(task)
            loop.close()


def test_of_a_peer_that_is_dismissed_nothing_is_received_that_had_come_and_it_may_speak_again() -> None:
    async def main() -> None:
        hub = MemoryHub(queue_messages=2)
        bad, good = hub.connect(A), hub.connect(B)
        for _ in range(2):
            await bad.send(Lane.CONTROL, [b"flood"])
        await good.send(Lane.CONTROL, [b"honest"])
        hub.dismiss(A)
        await bad.send(Lane.CONTROL, [b"again"])
        assert [await hub.receive() for _ in range(2)] == [
            (B, Lane.CONTROL, [b"honest"]),
            (A, Lane.CONTROL, [b"again"]),
        ]

    run(main())


def test_heads_that_are_free_take_the_latency_and_payloads_the_slower_of_both_ports() -> None:
    async def main() -> None:
        hub = MemoryHub(LINK, hub_link=LinkModel(bits_per_second=16e6), free_heads=True)
        node = hub.connect(A)
        hub.send(A, Lane.CONTROL, [bytes(500_000)])
        hub.send(A, Lane.BULK, [bytes(1000), bytes(1_000_000)])
        assert (await node.receive())[0] is Lane.CONTROL and now() == 0.25
        assert (await node.receive())[0] is Lane.BULK and now() == 1.25
        await node.send(Lane.BULK, [b"head", bytes(1_000_000)])
        await hub.receive()
        assert now() == 2.5

    run(main())


def test_what_is_sent_while_a_peer_is_paused_arrives_in_order_when_it_is_resumed() -> None:
    async def main() -> None:
        hub = MemoryHub(LINK)
        node = hub.connect(A)
        loop, paused = asyncio.get_running_loop(), asyncio.Event()

        def pause() -> None:
            hub.pause(A)
            paused.set()

        hub.send(A, Lane.BULK, [b"in flight"])
        loop.call_later(0.1, pause)
        loop.call_later(10.1, hub.resume, A)
        await paused.wait()
        hub.send(A, Lane.BULK, [b"later"])
        await node.send(Lane.CONTROL, [b"up"])
        assert [(await node.receive())[1] for _ in range(2)] == [[b"in flight"], [b"later"]]
        assert await hub.receive() == (A, Lane.CONTROL, [b"up"]) and now() > 10.0

    run(main())


class Fates:
    """Noise with these fates, in their order."""

    def __init__(self, *fates: SimpleNamespace) -> None:
        self.fates = list(fates)

    def fate(self, payload_up: bool) -> SimpleNamespace:
        return self.fates.pop(0)


def fate(*delays: float, breaks: bool = False, flipped: bool = False) -> SimpleNamespace:
    return SimpleNamespace(delays=delays, breaks=breaks, flipped=flipped)


def test_noise_delays_doubles_flips_and_breaks() -> None:
    async def main() -> None:
        hub = MemoryHub()
        node = hub.connect(A)
        told: list[float] = []
        node.watch(lambda: told.append(now()))
        node.noise = Fates(fate(0.5), fate(0.0, 1.0), fate(0.0, flipped=True), fate(breaks=True))
        await node.send(Lane.CONTROL, [b"late"])
        await node.send(Lane.CONTROL, [b"twice"])
        await node.send(Lane.BULK, [b"head", b"\0\0"])
        assert [(await hub.receive())[2] for _ in range(4)] == [
            [b"twice"],
            [b"head", b"\0\4"],
            [b"late"],
            [b"twice"],
        ]
        await node.send(Lane.CONTROL, [b"lost"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await hub.receive()
        assert told == [1.0] and node.noise.fates == []

    run(main())
