"""The example of a wave: an LSTM's layers on four processes end with the weights of one, and run at the same time."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "docs" / "examples" / "wave_lstm.py"
SIZE, TIMES, STEPS = 4, 16, 6


@pytest.mark.timeout(200)
def test_four_processes_train_as_one_and_their_cells_run_as_a_wave(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--steps", str(STEPS), "--trace", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    first, last = map(float, re.search(r"loss ([0-9.]+), in the end ([0-9.]+)", run.stdout).groups())
    assert last < 0.9 * first
    assert len(re.findall(r"^layer \d: weights \w{8}$", run.stdout, re.MULTILINE)) == SIZE
    assert len(re.findall(r"^layer +\d \|", run.stdout, re.MULTILINE)) == SIZE
    steps: list[dict[str, tuple[float, float]]] = [{} for _ in range(STEPS)]
    events = json.loads((tmp_path / "wave.json").read_text())["traceEvents"]
    for event in sorted((one for one in events if one["ph"] == "X"), key=lambda one: one["ts"]):
        if event["name"].startswith(("forward", "backward")):
            step = next(cells for cells in steps if event["name"] not in cells)
            step[event["name"]] = (event["ts"], event["ts"] + event["dur"])
    assert all(len(cells) == 2 * SIZE * TIMES for cells in steps)
    waves = (
        set()
    )  # pairs of layers that were seen at work at the same time; a busy machine may stop one of them in a step
    for cells, layer in itertools.product(steps, range(SIZE - 1)):
        for time in range(TIMES):  # what a cell needs is there before it begins
            assert cells[f"forward {layer},{time}"][1] <= cells[f"forward {layer + 1},{time}"][0]
            assert cells[f"backward {layer + 1},{time}"][1] <= cells[f"backward {layer},{time}"][0]
        # each layer begins long before the one that it hears of has ended
        if cells[f"forward {layer + 1},0"][0] < cells[f"forward {layer},{TIMES - 1}"][1]:
            waves.add(("forward", layer))
        if cells[f"backward {layer},{TIMES - 1}"][0] < cells[f"backward {layer + 1},0"][1]:
            waves.add(("backward", layer))
    assert len(waves) == 2 * (SIZE - 1)
