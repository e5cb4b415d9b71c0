"""The real channel over 127.0.0.1: what it carries, what it refuses, and that strangers disturb nobody."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from channels import StrangeSockets, meet, run

from zmqtrain.errors import AddressInUse, ChannelClosed, ChannelFull, ConfigError, LocalProtocolError, PeerLost
from zmqtrain.transport.address import is_loopback
from zmqtrain.transport.gate import Gate
from zmqtrain.transport.routing import first_life, next_life, routing_id_of
from zmqtrain.transport.zmq_dealer import DealerChannel
from zmqtrain.transport.zmq_keys import CurveKeys, load_public_key
from zmqtrain.transport.zmq_port import Port, open_socket
from zmqtrain.transport.zmq_router import RouterChannel
from zmqtrain.types import MAX_FRAME_BYTES, Lane, PeerId

A, B = PeerId("pc-1#é1"), PeerId("pc-2#22")
HERE = "tcp://127.0.0.1:0"
PROJECT = Path(__file__).parents[2]


@pytest.fixture
def strangers() -> Iterator[StrangeSockets]:
    sockets = StrangeSockets()
    yield sockets
    sockets.close()


def test_messages_pass_both_ways_on_both_lanes() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
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
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
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
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
        payload = os.urandom(MAX_FRAME_BYTES)
        await node.send(Lane.BULK, [b"head", payload])
        _, _, frames = await hub.receive()
        await node.close()
        await hub.close()
        assert frames[1] == payload

    run(main)


def test_a_node_receives_control_before_bulk_that_came_earlier() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
        await meet(hub, node)
        for lane in (Lane.BULK, Lane.BULK, Lane.CONTROL):
            hub.send(A, lane, [b"x"])
        while not all(port.readable for port in node._ports.values()):  # until both lanes have something
            await node._incoming.wait()
        assert [(await node.receive())[0] for _ in range(3)] == [Lane.CONTROL, Lane.BULK, Lane.BULK]
        await node.close()
        await hub.close()

    run(main)


def test_the_hub_is_told_who_is_lost_and_who_was_never_there() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
        await meet(hub, node)
        with pytest.raises(PeerLost):
            hub.send(B, Lane.CONTROL, [b"?"])
        await node.close(linger_seconds=0)
        while hub.connections:
            await hub.changed()
        with pytest.raises(PeerLost) as caught:
            while True:
                hub.send(A, Lane.CONTROL, [b"?"])
                await asyncio.sleep(0)  # libzmq says that a connection is gone just before it takes it out
        assert caught.value.peer == A
        await hub.close(linger_seconds=0)

    run(main)


def test_a_lane_that_nobody_reads_is_full_for_the_hub_and_makes_the_node_wait() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
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
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
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
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
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


def test_a_node_that_reconnects_takes_its_name_over_and_loses_only_what_was_queued() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
        await meet(hub, node)
        receiving = asyncio.create_task(node.receive())
        for _ in range(3):
            await asyncio.sleep(0)
            await node.reconnect()
            await meet(hub, node)
        hub.send(A, Lane.BULK, [b"welcome back"])
        assert await receiving == (Lane.BULK, [b"welcome back"])
        await node.close()
        await hub.close()

    run(main)


def test_what_a_channel_said_before_it_was_opened_anew_ends_no_connection_of_now(strangers: StrangeSockets) -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        life = first_life()

        async def connect() -> list[zmq.SyncSocket]:
            sockets = [strangers.dealer(hub.address, routing_id_of(lane, A, life)) for lane in Lane]
            while hub.connections < 2:
                await hub.changed()
            return sockets

        async def close(sockets: list[zmq.SyncSocket]) -> None:
            for one in sockets:
                one.close(linger=10_000)
            while hub.connections:  # what they have said waits at the hub
                await hub.changed()

        while not hub.refusals["life"]:  # the order in which a hub hears its connections is libzmq's own
            former = await connect()
            for _ in range(5):
                for one in former:
                    one.send(b"of before")
            await close(former)
            life = next_life(life)
            now = await connect()
            for one in now:
                one.send(b"of now")
            heard = 0
            while heard < 2:
                _, _, frames = await hub.receive()
                heard += frames == [b"of now"]
            assert hub.connections == 2
            await close(now)
            life = next_life(life)
        await hub.close()

    run(main)


def test_a_send_that_waits_is_lost_when_its_channel_reconnects() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        silent = hub.address
        await hub.close()  # nobody listens: what is sent queues up
        node = DealerChannel.connect(silent, peer=A)
        while node.try_send(Lane.BULK, [b"old"]):
            pass
        waiting = asyncio.create_task(node.send(Lane.BULK, [b"old"]))
        await asyncio.sleep(0)
        await node.reconnect()
        await waiting
        hub = RouterChannel.bind(silent)
        await node.send(Lane.BULK, [b"new"])
        assert await hub.receive() == (A, Lane.BULK, [b"new"])
        await node.close()
        await hub.close()

    run(main)


def test_a_node_finds_a_hub_that_was_started_again() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
        await meet(hub, node)
        await hub.close()
        again = RouterChannel.bind(hub.address)
        await node.send(Lane.CONTROL, [b"are you back"])
        assert await again.receive() == (A, Lane.CONTROL, [b"are you back"])
        await node.close()
        await again.close()

    run(main)


def test_a_node_is_told_of_each_connection_that_is_gone_and_of_no_attempt_that_fails() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node, gone = DealerChannel.connect(hub.address, peer=A), asyncio.Queue[str]()
        node.watch(lambda: gone.put_nowait("gone"))
        await meet(hub, node)
        assert gone.empty()
        await hub.close()
        await gone.get()
        again = RouterChannel.bind(hub.address)
        await node.reconnect()
        await meet(again, node)
        await again.close()
        await gone.get()
        await node.close()

    run(main)


def test_who_asks_now_and_then_gets_what_has_come_and_who_waits_afterwards_is_woken() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
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


def test_closing_wakes_every_waiter() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
        await meet(hub, node)
        waiters: list[asyncio.Task[Any]] = [
            asyncio.create_task(c) for c in (hub.receive(), node.receive(), node.changed())
        ]
        await asyncio.sleep(0)
        for channel in (node, hub):
            await channel.close()
            await channel.close()
        assert all(isinstance(e, ChannelClosed) for e in await asyncio.gather(*waiters, return_exceptions=True))
        calls: list[Coroutine[Any, Any, Any]] = [
            hub.receive(),
            hub.changed(),
            node.receive(),
            node.changed(),
            node.send(Lane.BULK, [b"x"]),
            node.reconnect(),
        ]
        for call in calls:
            with pytest.raises(ChannelClosed):
                await call
        with pytest.raises(ChannelClosed):
            hub.send(A, Lane.BULK, [b"x"])

    run(main)


def test_closing_sends_what_is_queued() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
        for _ in range(4):
            await node.send(Lane.BULK, [b"head", bytes(MAX_FRAME_BYTES)])
        await node.close(linger_seconds=10.0)
        for _ in range(4):
            assert (await hub.receive())[:2] == (A, Lane.BULK)
        await hub.close()

    run(main)


def test_closing_while_nobody_answers_does_not_hang() -> None:
    async def main() -> None:
        node = DealerChannel.connect("tcp://127.0.0.1:1", peer=A)
        await node.send(Lane.CONTROL, [b"nobody is there"])
        await node.close(linger_seconds=0.05)

    run(main)


def test_who_waits_for_room_is_woken_while_another_waits_for_messages() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
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


def test_what_no_channel_carries_is_refused_before_it_costs_the_connection() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        node = DealerChannel.connect(hub.address, peer=A)
        await meet(hub, node)
        for frames in ([], [b"x"] * 7, [b"head", bytes(MAX_FRAME_BYTES + (64 << 10) + 1)]):
            with pytest.raises(LocalProtocolError):
                await node.send(Lane.BULK, frames)
            with pytest.raises(LocalProtocolError):
                hub.send(A, Lane.BULK, frames)
        await meet(hub, node)
        await node.close()
        await hub.close()

    run(main)


def test_strangers_disturb_nobody(strangers: StrangeSockets) -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        nodes = [DealerChannel.connect(hub.address, peer=peer) for peer in (A, B)]
        for node in nodes:
            await meet(hub, node)
        parts = urlsplit(hub.address)
        assert parts.hostname is not None and parts.port is not None
        raw = [socket.create_connection((parts.hostname, parts.port)) for _ in range(5)]
        raw[0].sendall(random.Random(1).randbytes(10_000))
        raw[1].sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")  # half a ZMTP greeting, and it stays open
        raw[2].sendall(b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
        # a whole greeting (ZMTP 3.0, NULL), then a command that claims to be 2^62 bytes long
        raw[3].sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x06" + (1 << 62).to_bytes(8, "big"))
        raw[4].close()

        unnamed = strangers.dealer(hub.address)
        unnamed.send_multipart([b"junk", b"more junk"])
        named = [b"X", b"C", b"C\xff\xfe", b"B\n", b"C" + b"x" * 201, b"hello"]
        for routing_id in named:
            strangers.dealer(hub.address, routing_id).send(b"junk")
        many = strangers.dealer(hub.address, b"Cstranger#1")
        many.send_multipart([b"x"] * 5000)
        many.send_multipart([b"x"] * 8)
        many.send(b"now in order")
        oversize = strangers.dealer(hub.address, b"Bstranger#2")
        oversize.send(bytes(MAX_FRAME_BYTES + (64 << 10) + 1))

        strangers_heard = False
        rounds = 0
        while not (strangers_heard and hub.strangers >= 1 + len(named) + 2) or rounds < 50:
            for node in nodes:
                for lane in Lane:
                    await node.send(lane, [b"%d" % rounds, bytes(100_000)])
            answered = 0
            while answered < 4:
                peer, lane, frames = await hub.receive()
                if peer == "stranger#1":
                    assert frames == [b"now in order"]
                    strangers_heard = True
                    continue
                assert peer in (A, B) and frames[0] == b"%d" % rounds
                hub.send(peer, lane, frames[:1])
                answered += 1
            for node in nodes:
                assert sorted([(await node.receive())[0] for _ in Lane]) == [Lane.CONTROL, Lane.BULK]
            rounds += 1
        for one in raw:
            one.close()
        for node in nodes:
            await node.close()
        await hub.close()

    run(main)


def test_a_hub_that_sends_too_many_frames_is_ignored(strangers: StrangeSockets) -> None:
    async def main() -> None:
        router = strangers.open(zmq.ROUTER)
        router.bind(HERE)
        node = DealerChannel.connect(router.getsockopt_string(zmq.LAST_ENDPOINT), peer=A)
        await node.send(Lane.CONTROL, [b"hello"])
        routing_id, _ = await asyncio.to_thread(router.recv_multipart)
        router.send_multipart([routing_id] + [b"x"] * 300)
        router.send_multipart([routing_id, b"in order"])
        assert await node.receive() == (Lane.CONTROL, [b"in order"])
        await node.close()

    run(main)


def test_a_port_that_is_taken_is_named_with_what_to_type() -> None:
    async def main() -> None:
        hub = RouterChannel.bind(HERE)
        with pytest.raises(AddressInUse, match=r"--bind tcp://127\.0\.0\.1:") as caught:
            RouterChannel.bind(hub.address)
        assert caught.value.address == hub.address
        await hub.close()

    run(main)


@pytest.mark.parametrize(
    "address",
    ["", "hub", "hub:5555", "tcp://hub", "tcp://*:99999", "tcp://a b:1", "udp://*:1", "tcp://300.1.1.1:1", "tcp://:1"],
)
def test_an_address_that_cannot_be_bound_is_refused(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError):
            RouterChannel.bind(address)

    run(main)


@pytest.mark.parametrize("address", ["", "hub:5555", "tcp://hub", "tcp://hub:99999", "tcp://*:5555", "tcp://hub:0"])
def test_an_address_that_cannot_be_connected_to_is_refused_with_an_example(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"tcp://192\.168\.1\.10:5555"):
            DealerChannel.connect(address, peer=A)

    run(main)


@pytest.mark.parametrize("name", ["", "a\nb", "é" * 101])
def test_a_name_that_the_hub_would_ignore_is_refused(name: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError):
            DealerChannel.connect("tcp://127.0.0.1:1", peer=PeerId(name))

    run(main)


def test_the_wildcard_is_shown_as_an_address_that_this_machine_can_connect_to() -> None:
    async def main() -> None:
        hub = RouterChannel.bind("tcp://*:0")
        assert hub.address.startswith("tcp://127.0.0.1:")
        node = DealerChannel.connect(hub.address, peer=A)
        await meet(hub, node)
        await node.close()
        await hub.close()

    run(main)


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.3.2.1:*", True),
        ("tcp://localhost:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://*:5555", False),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://192.168.1.10:5555", False),
        ("tcp://hub:5555", False),
    ],
)
def test_a_loopback_address_is_known_as_one(address: str, answer: bool) -> None:
    assert is_loopback(address) is answer


# ---- CURVE


def test_with_curve_only_who_knows_the_servers_key_is_heard() -> None:
    async def main() -> None:
        keys = CurveKeys.generate()
        hub = RouterChannel.bind(HERE, keys=keys)
        plain = DealerChannel.connect(hub.address, peer=PeerId("plain"))
        wrong = DealerChannel.connect(hub.address, peer=PeerId("wrong"), server_key=CurveKeys.generate().public)
        named = DealerChannel.connect(hub.address, peer=A, keys=CurveKeys.generate(), server_key=keys.public)
        fresh = DealerChannel.connect(hub.address, peer=B, server_key=keys.public)
        for intruder in (plain, wrong):
            await intruder.send(Lane.CONTROL, [b"let me in"])
        await meet(hub, named)
        await meet(hub, fresh)
        for peer, node in ((A, named), (B, fresh)):
            for _ in range(20):
                await node.send(Lane.BULK, [b"head", bytes(MAX_FRAME_BYTES)])
                assert (await hub.receive())[:2] == (peer, Lane.BULK)
        assert hub.strangers == 0
        for channel in (plain, wrong, named, fresh, hub):
            await channel.close(linger_seconds=0)

    run(main)


def test_keys_are_saved_and_loaded_and_the_secret_is_private(tmp_path: Path) -> None:
    keys = CurveKeys.generate()
    public, secret = keys.save(tmp_path / "new", "hub")
    assert CurveKeys.load(secret) == keys
    assert load_public_key(public) == load_public_key(secret) == keys.public
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert keys.secret not in public.read_bytes()
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(ConfigError, match="exists"):
        keys.save(tmp_path / "new", "hub")
    with pytest.raises(ConfigError):
        CurveKeys.load(public)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.key").write_text('public-key = "short"\n')
    (tmp_path / "empty.key").write_text("")
    for name in ("broken.key", "empty.key", "absent.key"):
        with pytest.raises(ConfigError):
            load_public_key(tmp_path / name)

    async def main() -> None:
        with pytest.raises(ConfigError):
            DealerChannel.connect("tcp://127.0.0.1:1", peer=A, server_key=b"short")
        with pytest.raises(ConfigError):
            DealerChannel.connect("tcp://127.0.0.1:1", peer=A, keys=CurveKeys.generate())

    run(main)


def test_what_is_sent_without_a_copy_outlives_who_closes_at_the_end_of_a_process() -> None:
    program = (
        "import atexit, sys, zmqtrain.transport.zmq_router\n"
        "atexit.register(lambda: print(sys.modules['zmq.utils.garbage'].gc._stay_down))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n", "libzmq would read memory that is no more, and end the process"


def test_who_is_sent_to_another_hub_does_not_try_a_refusal_of_the_former_one_again() -> None:
    async def main() -> None:
        node = DealerChannel.connect("tcp://127.0.0.1:1", peer=A)
        node._handshake_ended("key")
        assert node._retry is not None and "does not authorise" in node.obstacle
        await node.reconnect("tcp://127.0.0.1:2")
        assert node._retry is None and node.obstacle == ""
        await node.close()

    run(main)
