"""Channels over 127.0.0.1 for tests: two peers, a loop of bounded time, a first word, and sockets not of ours."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import zmq

from zmqtrain.core.types import Lane, PeerId
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel

A, B = PeerId("pc-1#é1"), PeerId("pc-2#22")
HERE = "tcp://127.0.0.1:0"


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test of at most 20 s; whatever reaches the loop's last resort (a future never retrieved) fails it."""
    problems: list[dict[str, Any]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with asyncio.timeout(60):
            await main()
        gc.collect()

    asyncio.run(bounded())
    assert problems == []


@contextlib.contextmanager
def kept_address() -> Iterator[str]:
    """Give an address at which one can listen again and again: in the meantime nobody else is given its port.

    A socket that is bound there and does not listen keeps it; libzmq binds beside it (both say SO_REUSEADDR).
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{keeper.getsockname()[1]}"


async def meet(hub: RouterChannel, node: DealerChannel) -> None:
    """Have the hub hear both lanes of a node, so that it can answer."""
    for lane in Lane:
        await node.send(lane, [b"hello"])
    heard: set[Lane] = set()
    while len(heard) < 2:
        peer, lane, frames = await hub.receive()
        assert (peer, frames) == (node.peer, [b"hello"])
        heard.add(lane)


class StrangeSockets:
    """Plain zmq sockets that are none of ours, closed when the test ends."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        self._sockets: list[zmq.SyncSocket] = []

    def open(self, kind: int) -> zmq.SyncSocket:
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def dealer(self, address: str, routing_id: bytes | None = None) -> zmq.SyncSocket:
        one = self.open(zmq.DEALER)
        if routing_id is not None:
            one.routing_id = routing_id
        one.connect(address)
        return one

    def close(self) -> None:
        for one in self._sockets:
            one.close(linger=0)
        self._context.term()
