"""Run the processes of a bench on the hosts of a star: told one line, each answers with one line of JSON.

Rule 1: a child is the bench's own file, run again with other arguments; it ends when nobody is left to tell it.
Rule 2: what a process has used is read from the kernel, thread by thread, so that codecs, sockets and training are told
apart.  Rule 3: figures are running totals; a window is the difference of two.
Source: Linux proc(5), /proc/PID/task/TID/schedstat and comm.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from star import Host, Star

__all__ = ["Child", "ask_all", "commands", "difference", "median_sleep", "resident_bytes", "say", "thread_seconds"]

ANSWER_SECONDS = 300.0
SOCKETS = "ZMQbg"
"""How libzmq names the threads that move its bytes."""


class Child:
    """A process of ours on a host of the star: `script` run with `arguments`, the first of which says what it is."""

    def __init__(self, star: Star, host: Host, script: str, *arguments: str) -> None:
        self.name = f"{arguments[0]} on {host}"
        argv = [sys.executable, str(Path(script).resolve()), *arguments]
        package = str(Path(__file__).resolve().parents[1])  # of this checkout, installed or not
        environment = {**os.environ, "PYTHONPATH": package, "JAX_PLATFORMS": "cpu"}  # its device is these cores
        self._process: subprocess.Popen[Any] = star.popen(
            host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._heard = b""
        """What it has said and nobody has asked for yet."""

    def close(self) -> None:
        """Close the pipes; whoever reads ours then ends."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        self._process.kill()

    def tell(self, command: str, *facts: Any) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *facts]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Wait for one line; raise RuntimeError if the process ends, or says nothing."""
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            if not select.select([self._process.stdout], [], [], seconds)[0]:
                raise RuntimeError(f"the {self.name} has said nothing for {seconds:g} s")
            if not (piece := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise RuntimeError(f"the {self.name} ended with {self._process.wait()}")
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        result: dict[str, Any] = json.loads(line)
        return result

    def wait(self) -> None:
        """Wait until it has ended: what it held, such as a port, is free then. Raises RuntimeError if it does not."""
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the {self.name} does not end") from error


def ask_all(children: Sequence[Child], command: str, *facts: Any) -> list[dict[str, Any]]:
    """Tell all children the same line, and return their answers in order."""
    for child in children:
        child.tell(command, *facts)
    return [child.answer() for child in children]


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what was added between two mappings of running figures; what holds mappings is taken apart."""
    return {
        key: difference(before.get(key, {}), value) if isinstance(value, dict) else value - before.get(key, 0)
        for key, value in after.items()
    }


def say(answer: dict[str, Any]) -> None:
    """Answer, in a child."""
    print(json.dumps(answer), flush=True)


def commands() -> queue.SimpleQueue[list[Any]]:
    """Return a queue of what this child is told, read by a thread; when nobody is left to tell, the process ends."""
    told: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            told.put(json.loads(line))
        os._exit(1)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return told


def median_sleep(seconds: float, times: int) -> float:
    """Sleep so many times; return how long a sleep took, the median: one in which it was held up changes nothing."""
    marks = [time.perf_counter()]
    for _ in range(times):
        time.sleep(seconds)
        marks.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(marks))


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process's threads: the package's by name, the caller's ("main"), those of the
    sockets, and all others'."""
    names = {
        thread.native_id: thread.name.removeprefix("zmqtrain-")
        for thread in threading.enumerate()
        if thread.name.startswith("zmqtrain-")
    }
    names[threading.main_thread().native_id] = "main"
    seconds = {"main": 0.0, "sockets": 0.0, "other": 0.0}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            used = int((task / "schedstat").read_text().split()[0]) / 1e9
            kernel_name = (task / "comm").read_text()
            name = names.get(int(task.name), "sockets" if kernel_name.startswith(SOCKETS) else "other")
            seconds[name] = seconds.get(name, 0.0) + used
    return seconds


def resident_bytes() -> int:
    """Return how much memory this process holds (its resident set)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
