"""A PC with several devices: files of tests that run in a process for which jax makes four of the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grids import nightly

PROJECT = Path(__file__).parents[2]
FLAG = "--xla_force_host_platform_device_count=4"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", ["train", "integration"])
@pytest.mark.parametrize("which", ["every run", *nightly("at night")])
def test_all_that_holds_on_four_devices_holds(folder, which):
    selected = ["--nightly", "-m", "nightly"] if which == "at night" else []
    file = f"tests/{folder}/on_four_devices.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected, file]
    environment = {**os.environ, "XLA_FLAGS": FLAG, "PYTHONPATH": str(PROJECT)}
    run = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
