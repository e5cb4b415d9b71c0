"""A PC with several devices: `on_four_devices.py`, in a process for which jax makes four of the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAG = "--xla_force_host_platform_device_count=4"


@pytest.mark.timeout(300)
def test_all_that_holds_on_four_devices_holds():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "on_four_devices.py")]
    environment = {**os.environ, "XLA_FLAGS": FLAG, "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1])))}
    run = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
