"""Channels over 127.0.0.1 that lose each other: who is told, what is lost, and how they meet again."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import zmq
from channels import HERE, A, B, StrangeSockets, kept_address, meet, run

from zmqtrain.core.errors import ChannelFull, PeerLost
from zmqtrain.core.types import Lane
from zmqtrain.transport.admission import first_life, next_life, routing_id_of
from zmqtrain.transport.pacing import ConnectionLimits
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel


async def send_on(hub: RouterChannel, lane: Lane) -> None:
    """Send to a peer whose connection is gone, until that is found: libzmq says so just before it takes it out."""
    reading = asyncio.create_task(hub.receive())  # one with no room left is taken out by who reads
    try:
        while True:
            with contextlib.suppress(ChannelFull):  # what was said to it meanwhile
                hub.send(A, lane, [b"?"])
            await asyncio.sleep(0)
    finally:
        reading.cancel()


def test_the_hub_is_told_who_is_lost_and_who_was_never_there() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        with pytest.raises(PeerLost):
            hub.send(B, Lane.CONTROL, [b"?"])
        await node.close(linger_seconds=0)
        while hub.connections:
            await hub.changed()
        with pytest.raises(PeerLost) as caught:
            await send_on(hub, Lane.CONTROL)
        assert caught.value.peer == A
        await hub.close(linger_seconds=0)

    run(main)


def test_a_lane_that_is_not_there_yet_is_full_for_a_while_and_one_that_is_gone_is_a_lost_peer(
    strangers: StrangeSockets,
) -> None:
    async def main() -> None:
        now, life = 1000.0, first_life()
        hub = RouterChannel(HERE, limits=ConnectionLimits(handshake_seconds=5.0))
        hub._guard.clock = SimpleNamespace(monotonic=lambda: now)
        for _ in range(2):  # a later life of the channel begins without a lane
            control = strangers.dealer(hub.address, routing_id_of(Lane.CONTROL, A, life))
            control.send(b"hello")
            assert await hub.receive() == (A, Lane.CONTROL, [b"hello"])
            for after, error in ((5.0, ChannelFull), (0.1, PeerLost)):
                now += after
                with pytest.raises(error):
                    hub.send(A, Lane.BULK, [b"too early"])
            now -= 0.1
            bulk = strangers.dealer(hub.address, routing_id_of(Lane.BULK, A, life))
            bulk.send(b"hello")
            assert await hub.receive() == (A, Lane.BULK, [b"hello"])
            hub.send(A, Lane.BULK, [b"now"])
            bulk.close(linger=0)
            while hub.connections > 1:
                await hub.changed()
            with pytest.raises(PeerLost):
                await send_on(hub, Lane.BULK)
            control.close(linger=0)
            while hub.connections:
                await hub.changed()
            life = next_life(life)
        strangers.dealer(hub.address, routing_id_of(Lane.BULK, B, life)).send(b"hello")
        assert await hub.receive() == (B, Lane.BULK, [b"hello"])
        with pytest.raises(PeerLost):  # nobody says anything on BULK alone
            hub.send(B, Lane.CONTROL, [b"?"])
        await hub.close(linger_seconds=0)

    run(main)


def test_a_node_that_reconnects_takes_its_name_over_and_loses_only_what_was_queued() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
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
        hub = RouterChannel(HERE)
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

        async def next_message() -> list[zmq.Frame]:
            while (frames := hub._port.receive(limit=2)) is None:
                if not hub._port.readable:
                    await hub._incoming.wait()
            return frames

        for turn in range(6):
            refused = hub.refusals["life"]
            former = await connect()
            for _ in range(5):
                for one in former:
                    one.send(b"of before")
            await close(former)
            life = next_life(life)
            now = await connect()
            for one in now:
                one.send(b"of now")
            # libzmq has an order of its own in which a hub hears its connections: here those of now are first and last
            said = sorted([await next_message() for _ in range(12)], key=lambda frames: frames[1].bytes != b"of now")
            first, last = said[turn % 2], said[1 - turn % 2]
            heard = [hub._read(frames) is not None for frames in (first, *said[2:], last)]
            assert heard == [True, *[False] * 10, True]
            assert hub.refusals["life"] == refused + 10 and hub.connections == 2
            await close(now)
            life = next_life(life)
        await hub.close()

    run(main)


def test_a_send_that_waits_is_lost_when_its_channel_reconnects() -> None:
    async def main(silent: str) -> None:
        node = DealerChannel(silent, peer=A)  # nobody listens: what is sent queues up
        while node.try_send(Lane.BULK, [b"old"]):
            pass
        waiting = asyncio.create_task(node.send(Lane.BULK, [b"old"]))
        await asyncio.sleep(0)
        await node.reconnect()
        await waiting
        hub = RouterChannel(silent)
        await node.send(Lane.BULK, [b"new"])
        assert await hub.receive() == (A, Lane.BULK, [b"new"])
        await node.close()
        await hub.close()

    with kept_address() as address:
        run(lambda: main(address))


def test_a_node_finds_a_hub_that_was_started_again() -> None:
    async def main(address: str) -> None:
        hub = RouterChannel(address)
        node, gone = DealerChannel(hub.address, peer=A), asyncio.Queue[str]()
        node.watch(lambda: gone.put_nowait("gone"))
        await meet(hub, node)
        await hub.close()
        for _ in Lane:  # what is sent over a connection that has gone, before that is seen, is lost with it
            await gone.get()
        again = RouterChannel(address)
        await node.send(Lane.CONTROL, [b"are you back"])
        assert await again.receive() == (A, Lane.CONTROL, [b"are you back"])
        await node.close()
        await again.close()

    with kept_address() as address:
        run(lambda: main(address))


def test_a_node_is_told_of_each_connection_that_is_gone_and_of_no_attempt_that_fails() -> None:
    async def main(address: str) -> None:
        hub = RouterChannel(address)
        node, gone = DealerChannel(hub.address, peer=A), asyncio.Queue[str]()
        node.watch(lambda: gone.put_nowait("gone"))
        await meet(hub, node)
        assert gone.empty()
        await hub.close()
        for _ in Lane:
            await gone.get()
        again = RouterChannel(address)
        await node.reconnect()
        await meet(again, node)
        assert gone.empty()
        await again.close()
        await gone.get()
        await node.close()

    with kept_address() as address:
        run(lambda: main(address))


def test_who_is_sent_to_another_hub_does_not_try_a_refusal_of_the_former_one_again() -> None:
    async def main() -> None:
        node = DealerChannel("tcp://127.0.0.1:1", peer=A)
        node.on_handshake("key")
        assert node._retry is not None and "does not authorise" in node.obstacle
        await node.reconnect("tcp://127.0.0.1:2")
        assert node._retry is None and node.obstacle == ""
        await node.close()

    run(main)


def test_what_came_before_a_connection_went_is_received_before_that_is_told() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node, gone, heard = DealerChannel(hub.address, peer=A), asyncio.Event(), list[str]()

        def told() -> None:
            heard.append("gone")
            gone.set()

        async def receive_forever() -> None:
            while True:
                heard.append(bytes((await node.receive())[1][0]).decode())

        await meet(hub, node)
        node.watch(told)
        for word in ("one", "two", "goodbye"):
            hub.send(A, Lane.CONTROL, [word.encode()])
        await hub.close()  # nobody has received meanwhile
        receiving = asyncio.create_task(receive_forever())
        await gone.wait()
        assert heard[:4] == ["one", "two", "goodbye", "gone"]
        receiving.cancel()
        await node.close()

    run(main)
