"""What a process holds, and whether it grows."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from vitals import slope, vitals_of, watch_unraisable

BENCH = Path(__file__).parents[2] / "bench"


def test_a_slope_is_not_moved_by_a_few_bursts():
    points = [(float(x), 2.0 * x + (1e6 if x % 10 == 3 else 0.0)) for x in range(100)]
    assert abs(slope(points) - 2.0) < 0.05
    assert slope([(0.0, 1.0)]) == slope([]) == 0.0


PROGRAM = """
import asyncio, os, threading
from vitals import count_left

before = count_left()
stop, ready, opened = threading.Event(), threading.Event(), os.open(os.devnull, os.O_RDONLY)

async def live():
    waits = asyncio.create_task(asyncio.to_thread(stop.wait), name="waits")
    ready.set()
    await waits

thread = threading.Thread(target=asyncio.run, args=(live(),), name="left behind")
thread.start()
ready.wait()
print(*count_left(before, seconds=0.0).beyond(before), sep="\\n")
stop.set()
thread.join()
os.close(opened)
print("at last:", count_left(before).beyond(before))
"""


def test_what_is_left_is_named():
    """In a process of its own: what other tests have left in this one comes and goes meanwhile."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=BENCH, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *left, last = run.stdout.splitlines()
    assert any(text == "thread left behind" for text in left) and any(text.startswith("task ") for text in left)
    assert any("file descriptors, of " in text and "/dev/null" in text for text in left)
    assert last == "at last: []"


def test_this_process_holds_something():
    vitals = vitals_of()
    assert vitals.rss_bytes > 1 << 20 and vitals.descriptors >= 3 and vitals.threads >= 1


def test_what_nobody_can_catch_is_noted(monkeypatch):
    monkeypatch.setattr("sys.unraisablehook", lambda what: None)
    monkeypatch.setattr("threading.excepthook", lambda what: None)
    noted = watch_unraisable()

    class Bad:
        def __del__(self):
            raise ResourceWarning("unclosed")

    Bad()
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert noted() == ["ResourceWarning: unclosed", "in a thread, ZeroDivisionError: division by zero"]
