"""Kill a process at every system call boundary of what it writes, and see that what is left resumes.

A program of its own, so that it forks without threads: `python killed_writer.py SCENARIO FOLDER` prints how many
boundaries there were. A child asks to be traced (ptrace), and does the scenario; its parent lets it run from boundary
to boundary (the entry and the exit of each call) and kills it at the n-th, for every n until it comes to its end. What
the child had been told to be safe it has said through a pipe before.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from zmqtrain.averaging.aggregator import Released
from zmqtrain.broker.checkpoint import RunFolder
from zmqtrain.checkpoint.folder import CheckpointFolder

TRACEME, SYSCALL, SETOPTIONS = 0, 24, 0x4200
EXITKILL, SYSGOOD = 0x100000, 1
"""Of Linux, the same on all its processors."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def ptrace(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, ctypes.c_void_p(data)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def arrays_of(version: int) -> dict[str, np.ndarray]:
    return {"parameters/w": np.full(3000, version, np.float32), "states": np.full(7, version % 256, np.uint8)}


def save(folder: CheckpointFolder, version: int) -> None:
    folder.save(version, {"version": version}, arrays_of(version))


def release(folder: RunFolder, version: int) -> None:
    folder.release((Released(version, "float32", (0,), ((b"x" * version,),)), (("a#1", version),), 8), {})


def prepare_run(path: Path) -> None:
    folder = RunFolder(path, keep=2)
    for version in (4, 8):
        save(folder, version)
        folder.begin_journal(version)
        for further in range(version + 1, version + 5):
            release(folder, further)
    folder.close()


def live_run(path: Path, say: Callable[[int], None]) -> None:
    """A broker is started again, saves, releases, saves over its history, and drops what is old."""
    folder = RunFolder(path, keep=2)
    folder.lock()
    version = resumed_run(path)
    say(version)
    save(folder, version)
    folder.begin_journal(version)
    for _ in range(2):
        version += 1
        release(folder, version)
        say(version)
    folder.begin_journal(version)
    save(folder, version)
    folder.close()


def resumed_run(path: Path) -> int:
    folder = RunFolder(path, keep=2)
    loaded = folder.load()
    assert loaded is not None, "nothing is left"
    version = check(*loaded)
    for released, landed, samples in folder.replay(version):
        assert released.frames == ((b"x" * released.version,),)
        assert landed == (("a#1", released.version),) and samples == 8
        version = released.version
    return version


def prepare_node(path: Path) -> None:
    folder = CheckpointFolder(path, keep=2)
    for version in (4, 8, 9):
        save(folder, version)
    folder.close()


def live_node(path: Path, say: Callable[[int], None]) -> None:
    """A node is started again, and saves: over its newest (it was alone), and then newer ones."""
    folder = CheckpointFolder(path, keep=2)
    folder.lock()
    for version in (9, 12):
        save(folder, version)
        say(version)
    folder.close()


def resumed_node(path: Path) -> int:
    loaded = CheckpointFolder(path, keep=2).load()
    assert loaded is not None, "nothing is left"
    return check(*loaded)


def check(state: dict, arrays: dict[str, np.ndarray]) -> int:
    version = int(state["version"])
    for name, array in arrays_of(version).items():
        np.testing.assert_array_equal(arrays[name], array)
    return version


def run_until(boundary: int, live: Callable[[Path, Callable[[int], None]], None], path: Path) -> tuple[bool, int]:
    """Run a child up to this boundary, and kill it there; return whether it came to its end, and what it said last."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ptrace(TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            live(path, lambda version: os.write(writing, bytes([version])) and None)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    os.waitpid(child, 0)
    ptrace(SETOPTIONS, child, EXITKILL | SYSGOOD)
    ended = None
    for _ in range(boundary):
        ptrace(SYSCALL, child)
        _, ended = os.waitpid(child, 0)
        if os.WIFEXITED(ended) or os.WIFSIGNALED(ended):
            break
        assert os.WSTOPSIG(ended) == signal.SIGTRAP | 0x80, f"stopped by {os.WSTOPSIG(ended)}"
        ended = None
    if ended is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        assert os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == 0, f"the scenario failed: {ended}"
    said = os.read(reading, 1000)
    os.close(reading)
    return ended is not None, max(said, default=-1)


SCENARIOS = {
    "broker": (prepare_run, live_run, resumed_run),
    "node": (prepare_node, live_node, resumed_node),
}


def main(scenario: str, folder: Path) -> int:
    prepare, live, resumed = SCENARIOS[scenario]
    template = folder / "template"
    prepare(template)
    first = resumed(template)
    boundary, ended = 0, False
    while not ended:
        boundary += 1
        path = folder / "run"
        shutil.copytree(template, path)
        ended, said = run_until(boundary, live, path)
        found = resumed(path)
        assert found >= max(first, said), f"killed at {boundary}: {found} is left, {said} was acknowledged"
        if boundary % 16 == 0:
            live(path, lambda version: None)  # and whoever starts there comes to the end
            assert resumed(path) >= found
        shutil.rmtree(path)
    return boundary - 1


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2])))
