"""The processes of a run and the connections between them, into which faults are injected.

Rule 1: a service is a process that is restarted with the same command line after any exit code but 0, as long as it is
wanted.  Rule 2: its output is read here, so that a full disk of its own loses none of it.
Rule 3: `close` undoes every fault: no process stays stopped, limited or alive.
Rule 4: a proxy passes bytes on without knowing their meaning. Unplugged, it passes nothing and closes nothing: both
sides write until their buffers are full. Torn, it passes half of the next bytes and resets both sides.

As a program, this module runs another one whose wall clock jumps at SIGUSR1 by the days that FILE holds; the monotonic
clock and the machine do not change:

    python -m zmqtrain.chaos.services FILE MODULE ARGUMENTS...

Sources: Linux signal(7), prlimit(2); systemd.service(5), Restart=on-failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.chaos.schedule import FaultKind
from zmqtrain.transport.address import parse_address

CLOSE_SECONDS = 5.0
DAY_SECONDS = 86_400
DUTY_SECONDS = 0.1
"""A slowed process stands still for a share of each such time."""
LAST_LINES = 20


@dataclass
class ProcessRun:
    """One process of a service. began_at, ready_at, ended_at: by the monotonic clock, 0: not yet; code: its exit
    code, negative for a signal; killed: it was ended from here."""

    process: subprocess.Popen[bytes]
    began_at: float
    ready_at: float = 0.0
    ended_at: float = 0.0
    code: int | None = None
    killed: bool = False


class Service:
    """A Python module that is wanted to run, with a wall clock that can jump.

    folder: of its output (NAME.log), and of the jumps of its clock (NAME.clock).  line: the module's arguments.
    prefix: a command that runs the rest of its own line, as `ip netns exec HOST`.  environment: its variables; None:
    those of this process.  ready: the first line of output with this text says that the process is at work.
    restart_seconds: from its end to the next start.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        module: str,
        line: Sequence[str] = (),
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        ready: str = "",
        restart_seconds: float = 0.5,
    ) -> None:
        self.name, self.log, self._clock = name, folder / f"{name}.log", folder / f"{name}.clock"
        self.ready, self.restart_seconds, self._environment = ready, restart_seconds, environment
        self._command = [*prefix, sys.executable, "-m", "zmqtrain.chaos.services", str(self._clock), module, *line]
        self.lives: list[ProcessRun] = []
        self.last_lines: list[str] = []
        self.wanted = self.over = False
        self._readers: list[threading.Thread] = []
        self._slowed = 0.0
        self._stopped = self._disk_full = False

    # ------------------------------------------------------------------ living

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.lives[-1].process

    @property
    def alive(self) -> bool:
        """Whether the newest process has not ended, as far as `look` has seen."""
        return bool(self.lives) and self.lives[-1].code is None

    def begin(self) -> None:
        """Start it, and from now on keep it alive."""
        self.wanted, self.over = True, False
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # Ctrl-C in the terminal is for this process
        )
        now = time.monotonic()
        life = ProcessRun(process, now, 0.0 if self.ready else now)
        self.lives.append(life)
        if self._disk_full:  # it is no less full for who is started again
            self._limit_files(0)
        reader = threading.Thread(target=self._read, args=(life,), name=f"read {self.name}", daemon=True)
        reader.start()
        self._readers.append(reader)

    def look(self) -> None:
        """See whether it still runs; start it again if it should. Call it often."""
        if not self.lives:
            return
        life, now = self.lives[-1], time.monotonic()
        if life.code is None:
            if (code := life.process.poll()) is None:
                self._take_turns(now)
                return
            life.code, life.ended_at, self._stopped = code, now, False
            self.over = code == 0
        if self.wanted and not self.over and now >= life.ended_at + self.restart_seconds:
            self.begin()

    def wait_ready(self, seconds: float) -> bool:
        """Wait until the newest process is at work; False if it ends before, or the time does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.lives[-1].process.poll() is None:
            if self.lives[-1].ready_at:
                return True
            time.sleep(0.01)
        return bool(self.lives[-1].ready_at)

    def _read(self, life: ProcessRun) -> None:
        assert life.process.stdout is not None
        with self.log.open("ab") as log, life.process.stdout as said:
            for line in said:
                if not life.ready_at and self.ready and self.ready.encode() in line:
                    life.ready_at = time.monotonic()
                log.write(line)
                log.flush()
                self.last_lines = [*self.last_lines[1 - LAST_LINES :], line.decode(errors="replace").rstrip()]

    # ------------------------------------------------------------------ what befalls it

    def kill(self) -> float:
        """End it at once; return when, by the monotonic clock."""
        self.lives[-1].killed = True
        self.process.kill()
        return time.monotonic()

    def stop(self) -> None:
        """Suspend it until `go_on`."""
        self._stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._stopped, self._slowed = False, 0.0
        self._signal(signal.SIGCONT)

    def slow(self, share: float) -> None:
        """Suspend it for this share of the time, in short turns, until `go_on`."""
        self._slowed = share

    def fill_disk(self) -> None:
        """Let nothing that it writes to a file be taken (EFBIG, where a full disk says ENOSPC), until `free_disk`."""
        self._disk_full = True
        self._limit_files(0)

    def free_disk(self) -> None:
        self._disk_full = False
        self._limit_files(resource.RLIM_INFINITY)

    def jump_clock(self, days: float) -> None:
        self._clock.write_text(f"{days:g}")
        self._signal(signal.SIGUSR1)

    def interrupt(self) -> None:
        """Ask it to end by itself, and do not want it any more."""
        self.wanted = False
        self.go_on()
        self._signal(signal.SIGINT)

    def close(self) -> None:
        """End it if it has not ended; twice is once."""
        self.wanted = False
        for life in self.lives:
            if life.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    life.process.send_signal(signal.SIGCONT)
                life.process.kill()
            life.process.wait()
            assert life.process.stdin is not None
            life.process.stdin.close()
            if life.code is None:
                life.code, life.ended_at = life.process.returncode, time.monotonic()
        for reader in self._readers:
            reader.join(CLOSE_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        if self.lives and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def _limit_files(self, most: int) -> None:
        if self.lives and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def _take_turns(self, now: float) -> None:
        if not self._slowed:
            return
        stands = now % DUTY_SECONDS < self._slowed * DUTY_SECONDS
        if stands != self._stopped:
            self._stopped = stands
            self._signal(signal.SIGSTOP if stands else signal.SIGCONT)

    def __enter__(self) -> Service:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


READ_BYTES = 64 << 10
FULL_BYTES_PER_SECOND = 12.5e6
"""What a slowed wire passes a share of: 100 Mb/s."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER so that closing a connection resets it."""


class Proxy:
    """A wire to the program that listens at `target` ("tcp://127.0.0.1:5555"): see `zmqtrain.chaos.run.Wire`.

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

    def __exit__(self, *_: object) -> None:
        """Reset all connections and end."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._listener.close()

    # ------------------------------------------------------------------ any thread: faults

    def unplug(self) -> None:
        self._loop.call_soon_threadsafe(self._plugged.clear)

    def plug(self) -> None:
        self._loop.call_soon_threadsafe(self._plugged.set)

    def drop(self) -> None:
        """Tear each open connection in the middle of what it carries next."""
        self._loop.call_soon_threadsafe(lambda: self._torn.update(self._open))

    def disturb(self, kind: FaultKind, share: float) -> None:
        """Slow the wire down. Raises RuntimeError for another kind: TCP lets no changed byte of a stream through."""
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


def main(arguments: list[str]) -> None:
    """Run MODULE in this process with a wall clock that jumps. arguments: FILE, MODULE, and the module's own."""
    file, module, *own = arguments
    jumped_seconds, now, now_ns = 0, time.time, time.time_ns

    def jump(number: int, frame: object) -> None:
        nonlocal jumped_seconds
        jumped_seconds += round(float(Path(file).read_text()) * DAY_SECONDS)

    time.time = lambda: now() + jumped_seconds
    time.time_ns = lambda: now_ns() + 1_000_000_000 * jumped_seconds
    signal.signal(signal.SIGUSR1, jump)
    sys.argv = [module, *own]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
