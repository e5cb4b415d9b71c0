"""The bench of what a run learns, at toy size: the whole table comes out, with its processes, and it adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_table_compares_a_run_with_synchronous_training_and_with_one_node(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be, or not to be, that is the question\n" * 100)
    output = tmp_path / "learning.json"
    command = [sys.executable, str(PROJECT / "bench" / "learning.py"), "--quick", "--nodes", "2", "--seeds", "1"]
    command += ["--task", "text", "--text", str(tmp_path / "text"), "--mode", "strict", "--json", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}  # where zmqtrain is not installed
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text())
    rows = {row["method"]: row for row in document["rows"]}
    assert document["machine"]["cores"] >= 1
    assert list(rows) == ["one node", "synchronous", "k=2 ternary", "k=8 ternary"]
    assert all(0 < row["loss"] < 6 for row in rows.values())
    assert rows["synchronous"]["over_sync_%"] == 0
    assert rows["synchronous"]["compression"] == 1
    assert rows["one node"]["sent_mb"] == 0
    for k in (2, 8):
        row = rows[f"k={k} ternary"]
        assert (row["k"], row["steps"]) == (k, rows["one node"]["steps"])
        assert row["steps_per_offer"] <= k
        assert 0 < row["sent_mb"] < rows["synchronous"]["sent_mb"]
    assert rows["k=2 ternary"]["sent_mb"] > rows["k=8 ternary"]["sent_mb"]
    for row in rows.values():
        assert str(row["method"]).split()[0] in done.stdout
