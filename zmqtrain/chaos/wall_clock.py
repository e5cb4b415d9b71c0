"""Run a command of this package whose wall clock jumps when it is told to: `python -m zmqtrain.chaos.wall_clock`.

    python -m zmqtrain.chaos.wall_clock FILE MODULE ARGUMENTS...

Rule 1: at SIGUSR1 the process takes the days that FILE holds, and from then on `time.time` and `time.time_ns` are off
by them, whoever in the process asks.  Rule 2: nothing of the machine is changed; the monotonic clock goes on as it is.
"""

from __future__ import annotations

import runpy
import signal
import sys
import time
from pathlib import Path

DAY_SECONDS = 86_400


def main(arguments: list[str]) -> None:
    """Be the command that the arguments name. arguments: FILE, MODULE, and the module's own."""
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
