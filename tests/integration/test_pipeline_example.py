"""The example of a pipeline: three processes, each with a third of the model, which no process ever holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zmqtrain as zt

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "docs" / "examples" / "pipeline_text.py"
SMALL = ("--width", "32", "--layers", "3", "--batch", "8", "--micro-batches", "4", "--steps", "5")


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_three_processes_train_a_model_that_none_of_them_holds(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), *SMALL, "--folder", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([0-9.]+)$", run.stdout, re.MULTILINE)]
    held = [float(mb) for mb in re.findall(r"^stage \d holds ([0-9.]+) MB", run.stdout, re.MULTILINE)]
    model = zt.load_model(tmp_path / "model.safetensors")
    whole = sum(leaf.nbytes for leaf in model.values()) / 1e6
    assert losses[-1] < losses[0] and len(held) == 3
    assert sum(held) == pytest.approx(whole, abs=0.02) and max(held) < 0.6 * whole
    for stage in range(3):
        tasks = [json.loads(line) for line in (tmp_path / f"pipeline-{stage}.jsonl").read_text().splitlines()]
        assert {task["stage"] for task in tasks} == {stage} and len(tasks) == 5 * (4 + 4 + 1)
