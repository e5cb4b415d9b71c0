"""A process that is killed at any system call of its writing leaves what resumes to all that it had acknowledged."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_writer.py")


@pytest.mark.parametrize("scenario", ["broker", "node"])
def test_a_kill_at_every_system_call_boundary_of_a_checkpoint_leaves_a_resumable_state(scenario, tmp_path):
    memory = Path("/dev/shm")  # where there is one: the calls are the same, and no disk is waited for
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        argv = [sys.executable, str(PROGRAM), scenario, folder]
        result = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout) > 100, "so many boundaries there are at least: was the writer traced at all?"
