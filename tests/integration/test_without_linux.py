"""What a Mac lacks is used nowhere at import, nor by a run; in Windows itself the package says where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]


@pytest.mark.timeout(300)
def test_every_module_is_imported_and_a_run_trained_without_what_only_linux_has() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT}:{HERE}"}
    program = [sys.executable, str(HERE / "without_linux.py")]
    done = subprocess.run(program, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) == len(list((PROJECT / "zmqtrain").rglob("*.py"))) - 2, "all but two"


def test_windows_itself_is_told_of_wsl() -> None:
    code = "import sys; sys.platform = 'win32'; import zmqtrain"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: " in done.stderr and "wsl --install" in done.stderr
