"""README, followed with a wheel and with an sdist that pip has installed, with what they need, into a new environment.

One environment for each Python of this machine that zmqtrain is for. pip fetches what is needed from its index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_pages import follow

PROJECT = Path(__file__).parents[2]
RELEASES = ("3.11", "3.12", "3.13")
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


def release_of(python: str) -> str:
    """Return a Python's release, as "3.12"; "" where it does not run, or cannot make environments."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def pythons() -> dict[str, str]:
    """Return the Pythons of this machine, by release: this one, and those of RELEASES that run."""
    named = {release: shutil.which(f"python{release}") for release in RELEASES}
    there = {release: path for release, path in named.items() if path is not None and release_of(path) == release}
    return there | {THIS: sys.executable}


PYTHONS = pythons()


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program to its end, with exit code 0 and without the tree of the project; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist, as `python -m build` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, PROJECT, cwd=folder)
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", PYTHONS)
@pytest.mark.parametrize("suffix", [".whl", ".tar.gz"])
def test_the_readme_can_be_followed_in_a_new_environment(release: str, suffix: str, dist: Path, tmp_path: Path) -> None:
    (file,) = dist.glob(f"*{suffix}")
    run(PYTHONS[release], "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    python = tmp_path / "environment" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", file, cwd=tmp_path)
    assert release_of(str(python)) == release
    home = run(python, "-c", "import zmqtrain; print(zmqtrain.__file__)", cwd=tmp_path).strip()
    assert Path(home).is_relative_to(tmp_path / "environment")
    version = run(tmp_path / "environment" / "bin" / "zmqtrain", "--version", cwd=tmp_path)
    assert re.match(rf"zmqtrain {re.escape(file.name.removesuffix(suffix).split('-')[1])}, protocol", version)
    (tmp_path / "lab").mkdir()
    follow("README.md", tmp_path / "lab", python)
    shutil.rmtree(tmp_path / "environment")


def test_this_python_is_among_those_of_this_machine() -> None:
    assert PYTHONS[THIS] == sys.executable
