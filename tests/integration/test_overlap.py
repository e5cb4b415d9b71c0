"""The example of the engine and the communicator, over real processes: its traces show that sending is hidden."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from zmqtrain.broker.serve import BrokerThread
from zmqtrain.core.settings import RunSettings

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "docs" / "examples" / "overlap.py"
HERE = "tcp://127.0.0.1:0"
SECONDS = 100.0
BUCKETS = 6

Interval = tuple[float, float]


def run_all(hub: str, size: int, *arguments: str) -> list[str]:
    """Run so many processes of the example to their end; return what each printed."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(EXAMPLE), hub, "--size", str(size), *arguments]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            started = subprocess.Popen(
                [*command, "--rank", str(rank)], stdout=pipe, stderr=pipe, text=True, env=environment
            )
            processes.append(stack.enter_context(started))
            stack.callback(started.kill)
        printed = [process.communicate(timeout=SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0] * size, printed
    return [output for output, _ in printed]


def intervals(trace: Path) -> dict[str, list[Interval]]:
    """Return (begin, end) of each time that an operation ran, by its name, in order."""
    found: dict[str, list[Interval]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return {name: sorted(times) for name, times in found.items()}


def overlaps(first: Interval, second: Interval) -> bool:
    return max(first[0], second[0]) < min(first[1], second[1])


def test_a_bucket_is_reduced_while_the_next_is_computed(tmp_path: Path) -> None:
    steps = 10
    with BrokerThread(HERE, RunSettings(program="")) as broker:
        printed = run_all(broker.address, 2, "--steps", str(steps), "--trace", str(tmp_path))
    results = [re.search(r"loss ([0-9.]+), in the end ([0-9.]+); weights (\w+)", output) for output in printed]
    assert all(results)
    assert all(float(result[2]) < 0.9 * float(result[1]) for result in results)
    assert len({result[3] for result in results}) == 1
    for rank in range(2):
        ran = intervals(tmp_path / f"overlap-{rank}.json")
        hidden = [
            bucket
            for bucket in range(BUCKETS - 1)
            for reduced, computed in zip(
                ran[f"allreduce bucket {bucket}"], ran[f"compute bucket {bucket + 1}"], strict=True
            )
            if overlaps(reduced, computed)
        ]
        assert len(hidden) >= steps // 2, f"{len(hidden)} of {steps * (BUCKETS - 1)} ran beside the next bucket"
        for bucket in range(1, BUCKETS):
            before, after = ran[f"allreduce bucket {bucket - 1}"], ran[f"allreduce bucket {bucket}"]
            assert all(first[1] <= second[0] + 1e-2 for first, second in zip(before, after, strict=True))
