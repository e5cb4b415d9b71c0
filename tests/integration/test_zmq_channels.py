"""The real channel over 127.0.0.1: what it carries, on which lane, and who waits for room or for messages."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import zmq
from channels import HERE, A, meet, run

from zmqtrain.core.errors import ChannelClosed, ChannelFull
from zmqtrain.core.types import MAX_FRAME_BYTES, Lane, PeerId
from zmqtrain.transport.pacing import Gate
from zmqtrain.transport.zmq_channels import DealerChannel, Port, RouterChannel, open_socket


def test_messages_pass_both_ways_on_both_lanes() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        payload = os.urandom(MAX_FRAME_BYTES)
        for _ in range(3):
            await node.send(Lane.BULK, [b"head", payload])
            peer, lane, frames = await hub.receive()
            assert (peer, lane, frames) == (A, Lane.BULK, [b"head", payload])
            assert isinstance(frames[0], bytes)
            assert isinstance(frames[1], memoryview) and frames[1].readonly
            hub.send(peer, lane, frames)
            assert await node.receive() == (Lane.BULK, [b"head", payload])
        hub.send(A, Lane.CONTROL, [b""])
        assert await node.receive() == (Lane.CONTROL, [b""])
        await node.close()
        await hub.close()

    run(main)


def test_who_listens_is_told_each_message_in_order_those_that_were_here_before_too() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        told: list[int] = []
        last = asyncio.Event()

        def tell(peer: PeerId, lane: Lane, frames: list[Any]) -> None:
            assert (peer, lane) == (A, Lane.BULK)
            told.append(int(frames[0]))
            hub.send(A, Lane.CONTROL, [b"heard"])  # a call on the socket while others may wait there
            if told[-1] in (20, 50):
                last.set()
                raise RuntimeError("it fails, and the next one is told all the same")

        failures: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))
        for number in range(5):
            await node.send(Lane.BULK, [b"%d" % number])
        hub.listen(tell)
        for number in range(5, 51):
            await node.send(Lane.BULK, [b"%d" % number])
            if number == 20:
                await last.wait()
                last.clear()
                hub.send(A, Lane.CONTROL, [b"go on"])
        await last.wait()
        assert told == list(range(51)) and len(failures) == 2
        await node.close()
        await hub.close()

    run(main)


def test_who_listens_at_a_port_and_answers_each_message_leaves_the_loops_other_tasks_their_turn() -> None:
    messages, at_once = 500, 8

    async def main() -> None:
        context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        here, there = (open_socket(context, zmq.PAIR, 0, 0) for _ in range(2))
        here.bind("inproc://port")
        there.connect("inproc://port")
        port = Port(here, Gate(), Gate())
        for number in range(messages):
            there.send(b"%d" % number)
        told: list[int] = []

        def take() -> bool:
            for _ in range(at_once):
                if (frames := port.receive(limit=1)) is None:
                    return False
                told.append(int(frames[0].bytes))
                port.send([b"heard"])  # looks whether somebody waits for messages
            return True

        port.listen(take)
        most = 0
        while len(told) < messages:
            before = len(told)
            await asyncio.sleep(0)
            most = max(most, len(told) - before)
        assert told == list(range(messages))
        assert most <= 2 * at_once  # once as the socket rings, once as there was more
        port.close(0.0)
        there.close()
        context.term()

    run(main)


def test_a_received_view_outlives_its_channel() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        payload = os.urandom(MAX_FRAME_BYTES)
        await node.send(Lane.BULK, [b"head", payload])
        _, _, frames = await hub.receive()
        await node.close()
        await hub.close()
        assert frames[1] == payload

    run(main)


def test_a_node_receives_control_before_bulk_that_came_earlier() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        for lane in (Lane.BULK, Lane.BULK, Lane.CONTROL):
            hub.send(A, lane, [b"x"])
        while not all(port.readable for port in node._ports.values()):  # until both lanes have something
            await node._incoming.wait()
        assert [(await node.receive())[0] for _ in range(3)] == [Lane.CONTROL, Lane.BULK, Lane.BULK]
        await node.close()
        await hub.close()

    run(main)


def test_a_lane_that_nobody_reads_is_full_for_the_hub_and_makes_the_node_wait() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        payload = bytes(MAX_FRAME_BYTES)
        with pytest.raises(ChannelFull):
            for _ in range(1000):
                hub.send(A, Lane.BULK, [b"head", payload])
        hub.send(A, Lane.CONTROL, [b"the other lane has room"])

        sent = 0
        while node.try_send(Lane.BULK, [b"head", payload]):
            sent += 1
        assert sent < 100

        async def flood() -> None:
            for _ in range(sent, 100):
                await node.send(Lane.BULK, [b"head", payload])

        flooding = asyncio.create_task(flood())
        for _ in range(100):  # as the hub reads, the node goes on
            assert (await hub.receive())[1] is Lane.BULK
        await flooding
        await node.close(linger_seconds=0)
        await hub.close(linger_seconds=0)

    run(main)


def test_a_waiting_send_and_a_waiting_receive_do_not_swallow_each_others_wake_up() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        count = 300
        payload, window = bytes(200_000), asyncio.Semaphore(8)

        async def echo() -> None:
            for _ in range(count):
                peer, lane, frames = await hub.receive()
                await window.acquire()
                hub.send(peer, lane, frames)

        async def send() -> None:
            for index in range(count):
                await node.send(Lane.BULK, [b"%d" % index, payload])

        async def receive() -> list[int]:
            numbers = []
            while len(numbers) < count:
                numbers.append(int((await node.receive())[1][0]))
                window.release()
            return numbers

        _, _, numbers = await asyncio.gather(echo(), send(), receive())
        assert numbers == list(range(count))
        await node.close()
        await hub.close()

    run(main)


def test_a_cancelled_receive_loses_no_message() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        window = asyncio.Semaphore(32)

        async def send() -> None:
            for index in range(200):
                await node.send(Lane.CONTROL, [b"%d" % index])
                await window.acquire()
                hub.send(A, Lane.CONTROL, [b"%d" % index])
                await asyncio.sleep(0)

        async def impatient(receive: Callable[[], Coroutine[Any, Any, tuple[Any, ...]]]) -> list[int]:
            numbers: list[int] = []
            rng = random.Random(1)
            while len(numbers) < 200:
                task = asyncio.create_task(receive())
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    numbers.append(int(task.result()[-1][0]))
                    if receive == node.receive:
                        window.release()
            return numbers

        _, up, down = await asyncio.gather(send(), impatient(hub.receive), impatient(node.receive))
        assert up == down == list(range(200))
        await node.close()
        await hub.close()

    run(main)


def test_who_asks_now_and_then_gets_what_has_come_and_who_waits_afterwards_is_woken() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        assert node.try_receive(Lane.CONTROL) is None
        for number in range(3):
            hub.send(A, Lane.CONTROL, [b"%d" % number])
            hub.send(A, Lane.BULK, [b"bulk"])
            while not node._ports[Lane.CONTROL].readable:
                await node._incoming.wait()
            assert node.try_receive(Lane.CONTROL) == [b"%d" % number]
            assert node.try_receive(Lane.CONTROL) is None
            assert await node.receive() == (Lane.BULK, [b"bulk"])
        waiter = asyncio.create_task(node.receive())
        await asyncio.sleep(0)
        hub.send(A, Lane.CONTROL, [b"last"])
        assert await waiter == (Lane.CONTROL, [b"last"])
        await node.close()
        with pytest.raises(ChannelClosed):
            node.try_receive(Lane.CONTROL)
        await hub.close()

    run(main)


def test_who_waits_for_room_is_woken_while_another_waits_for_messages() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        waiting = asyncio.create_task(node.receive())

        async def take(count: int) -> None:
            for _ in range(count):
                await hub.receive()

        taking = asyncio.create_task(take(5000))
        for number in range(5000):
            await node.send(Lane.BULK, [b"%d" % number])
        await taking
        waiting.cancel()
        await node.close()
        await hub.close()

    run(main)
