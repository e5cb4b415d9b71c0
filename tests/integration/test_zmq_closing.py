"""The end of a channel over 127.0.0.1: who is woken, what is still sent, and that nobody hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from channels import HERE, A, meet, run

from zmqtrain.core.errors import ChannelClosed
from zmqtrain.core.types import MAX_FRAME_BYTES, Lane
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel

PROJECT = Path(__file__).parents[2]


def test_closing_wakes_every_waiter() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
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
        hub = RouterChannel(HERE)
        node = DealerChannel(hub.address, peer=A)
        for _ in range(4):
            await node.send(Lane.BULK, [b"head", bytes(MAX_FRAME_BYTES)])
        await node.close(linger_seconds=10.0)
        for _ in range(4):
            assert (await hub.receive())[:2] == (A, Lane.BULK)
        await hub.close()

    run(main)


def test_closing_while_nobody_answers_does_not_hang() -> None:
    async def main() -> None:
        node = DealerChannel("tcp://127.0.0.1:1", peer=A)
        await node.send(Lane.CONTROL, [b"nobody is there"])
        await node.close(linger_seconds=0.05)

    run(main)


def test_what_is_sent_without_a_copy_outlives_who_closes_at_the_end_of_a_process() -> None:
    program = (
        "import atexit, sys, zmqtrain.transport.zmq_channels\n"
        "atexit.register(lambda: print(sys.modules['zmq.utils.garbage'].gc._stay_down))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n", "libzmq would read memory that is no more, and end the process"
