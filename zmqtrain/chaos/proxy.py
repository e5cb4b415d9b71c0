"""Stand between a node and its broker on one PC, as a wire that can be unplugged, slowed and torn.

Rule 1: a thread with a loop of its own passes bytes on as they come; it knows nothing of what they mean.
Rule 2: unplugged, it passes nothing and tells nobody: both sides write until their buffers are full, as with a cable
that is out.  Rule 3: to tear is to pass half of what comes next, and to reset both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from types import TracebackType

from zmqtrain.chaos.schedule import FaultKind
from zmqtrain.transport.address import parse_address

READ_BYTES = 64 << 10
FULL_BYTES_PER_SECOND = 12.5e6
"""What a slowed wire passes a share of: 100 Mb/s."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER so that closing a connection resets it."""


class Proxy:
    """A wire to the program that listens at `target` ("tcp://127.0.0.1:5555"): see `zmqtrain.chaos.player.Wire`.

    address: where it listens itself, from the beginning of its block on.
    """

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="zmqtrain-proxy", daemon=True)
        self._ready = threading.Event()
        self._torn: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.Task[None]] = set()
        self._share = 0.0

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Reset all connections and end; twice is once."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._listener.close()

    # ------------------------------------------------------------------ any thread: what befalls it

    def unplug(self) -> None:
        """See Wire."""
        self._loop.call_soon_threadsafe(self._plugged.clear)

    def plug(self) -> None:
        """See Wire."""
        self._loop.call_soon_threadsafe(self._plugged.set)

    def drop(self) -> None:
        """See Wire: each open connection is torn in the middle of what it carries next."""
        self._loop.call_soon_threadsafe(lambda: self._torn.update(self._open))

    def disturb(self, kind: FaultKind, share: float) -> None:
        """See Wire; only "slow": what changes bytes of a stream is no fault that TCP lets through.

        Raises RuntimeError for another kind.
        """
        if kind != "slow":
            raise RuntimeError(
                f"{kind} befalls frames of a network: it is played on a star of namespaces, or simulated"
            )
        self._share = share

    # ------------------------------------------------------------------ the loop

    async def _serve(self) -> None:
        self._loop, self._stop, self._plugged = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._plugged.set()
        server = await asyncio.start_server(self._connect, sock=self._listener)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be one connection, from its first byte to its end."""
        own = asyncio.current_task()
        assert own is not None
        self._open.add(own)
        writers = [writer]
        try:
            await self._plugged.wait()
            there, back = await asyncio.open_connection(*self._target)
            writers.append(back)
            ways = [asyncio.ensure_future(self._pass(own, *way)) for way in ((reader, back), (there, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):  # nobody listens there, or this ends
            pass
        finally:
            self._open.discard(own)
            self._torn.discard(own)
            for one in writers:
                _reset(one)

    async def _pass(
        self, connection: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(READ_BYTES):
            await self._plugged.wait()
            if torn := connection in self._torn:
                data = data[: max(1, len(data) // 2)]
            writer.write(data)
            await writer.drain()
            if torn:
                return
            if self._share:
                await asyncio.sleep(len(data) / (FULL_BYTES_PER_SECOND * (1.0 - self._share)))


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    if own is not None and own.fileno() >= 0:
        with contextlib.suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
