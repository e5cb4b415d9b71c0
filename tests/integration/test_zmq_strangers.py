"""What a channel over 127.0.0.1 refuses, and that strangers disturb nobody."""

from __future__ import annotations

import asyncio
import random
import socket
from urllib.parse import urlsplit

import pytest
import zmq
from channels import HERE, A, B, StrangeSockets, meet, run

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.types import MAX_FRAME_BYTES, Lane
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel


def test_what_no_channel_carries_is_refused_before_it_costs_the_connection() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
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
        hub = RouterChannel(HERE)
        nodes = [DealerChannel(hub.address, peer=peer) for peer in (A, B)]
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
        node = DealerChannel(router.getsockopt_string(zmq.LAST_ENDPOINT), peer=A)
        await node.send(Lane.CONTROL, [b"hello"])
        routing_id, said = b"", b""
        while said != b"hello":  # both lanes begin with an empty message, in whatever order
            routing_id, said = await asyncio.to_thread(router.recv_multipart)
        router.send_multipart([routing_id] + [b"x"] * 300)
        router.send_multipart([routing_id, b"in order"])
        assert await node.receive() == (Lane.CONTROL, [b"in order"])
        await node.close()

    run(main)
