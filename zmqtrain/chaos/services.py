"""Keep a run's processes alive as a service manager would, and do to them what befalls processes.

Rule 1: a process that ends by anything but its own end (exit code 0) is started again with the same line, a breath
later, for as long as it is wanted.  Rule 2: what it says is read here, so that a full disk of its own keeps nothing of
it.  Rule 3: whatever is done to a process is undone by `close`: none stays stopped, limited or alive.
Sources: Linux signal(7), prlimit(2); systemd.service(5), Restart=on-failure.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOSE_SECONDS = 5.0
DUTY_SECONDS = 0.1
"""A slowed process stands still for a share of each such time."""
LAST_LINES = 20


@dataclass
class Life:
    """One process of a service. began_at, ready_at, ended_at: by the monotonic clock, 0: not yet; code: its exit
    code, negative for a signal; killed: it was ended from here."""

    process: subprocess.Popen[bytes]
    began_at: float
    ready_at: float = 0.0
    ended_at: float = 0.0
    code: int | None = None
    killed: bool = False


class Service:
    """A program that is wanted to run.

    start: starts it once more, with its standard output a pipe.  log: where everything that it says is kept.
    ready: a text; the first line that holds it says that the process is at work.  restart_seconds: the breath before it
    is started again.  clock_file: where a jump of its wall clock is written (see `zmqtrain.chaos.wall_clock`).
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], subprocess.Popen[bytes]],
        log: Path,
        *,
        ready: str = "",
        restart_seconds: float = 0.5,
        clock_file: Path | None = None,
    ) -> None:
        self.name, self.log, self.ready, self.restart_seconds = name, log, ready, restart_seconds
        self.clock_file = clock_file
        self.lives: list[Life] = []
        self.last_lines: list[str] = []
        self.wanted = self.over = False
        self._start_process = start
        self._readers: list[threading.Thread] = []
        self._slowed = 0.0
        self._stopped = self._disk_full = False

    # ------------------------------------------------------------------ living

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The newest process."""
        return self.lives[-1].process

    @property
    def alive(self) -> bool:
        """Whether the newest process has not ended, as far as `look` has seen."""
        return bool(self.lives) and self.lives[-1].code is None

    def begin(self) -> None:
        """Start it, and from now on keep it alive."""
        self.wanted, self.over = True, False
        process, now = self._start_process(), time.monotonic()
        life = Life(process, now, 0.0 if self.ready else now)
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

    def _read(self, life: Life) -> None:
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
        """Let it stand still until `go_on`."""
        self._stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again, at its full speed."""
        self._stopped, self._slowed = False, 0.0
        self._signal(signal.SIGCONT)

    def slow(self, share: float) -> None:
        """Let it stand still for this share of the time, in short turns, until `go_on`."""
        self._slowed = share

    def fill_disk(self) -> None:
        """Let nothing that it writes to a file be taken (EFBIG, where a full disk says ENOSPC), until `free_disk`."""
        self._disk_full = True
        self._limit_files(0)

    def free_disk(self) -> None:
        """Let it write again."""
        self._disk_full = False
        self._limit_files(resource.RLIM_INFINITY)

    def jump_clock(self, days: float) -> None:
        """Let its wall clock jump by so many days; nothing happens to one that was not started for it."""
        if self.clock_file is not None:
            self.clock_file.write_text(f"{days:g}")
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
            if life.process.stdin is not None:
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

    def __exit__(self, *_: Any) -> None:
        self.close()
