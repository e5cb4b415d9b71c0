"""bin/_setup on a PC with an NVIDIA card and without one: what is installed, and what is said where that fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "bin" / "_setup"
CUDA = "lib/python3.11/site-packages/jax_cuda12_plugin-0.9.dist-info"


@pytest.fixture
def clone(tmp_path):
    """A clone whose .venv holds zmqtrain, with a Python that only writes down what it is asked to run."""
    project = tmp_path / "a clone"
    (project / "bin").mkdir(parents=True)
    shutil.copy(SETUP, project / "bin" / "_setup")
    (project / "pyproject.toml").write_text('[project]\nname = "zmqtrain"\n')
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "stamp-plain").touch()
    return project


def python(clone, code=0, makes=""):
    """Have the Python of .venv end with this code; makes: what it installs."""
    file = clone / ".venv" / "bin" / "python"
    made = f'mkdir -p "{clone}/.venv/{makes}"\n' if makes else ""
    file.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>"{clone}/ran"\n{made}exit {code}\n')
    file.chmod(0o755)


def run(clone, *arguments, card):
    """Source the setup, as a program of bin/ does, and prepare for the card; return what was run and what was said."""
    smi = clone / "path" / "nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    smi.write_text(f"#!/bin/sh\nexit {0 if card else 9}\n")
    smi.chmod(0o755)
    script = f'PATH="{smi.parent}:$PATH"; source "{clone}/bin/_setup"; DRIVER_FILES=(); prepare_card "$@"; echo went on'
    done = subprocess.run(["bash", "-c", script, "zmqtrain-node", *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "went on\n", done.stderr
    ran = clone / "ran"
    return ran.read_text().splitlines() if ran.exists() else [], done.stderr


def test_without_a_card_nothing_is_installed_and_nothing_said(clone):
    python(clone)
    assert run(clone, "tcp://hub:5555", card=False) == ([], "")


def test_with_a_card_jax_with_cuda_is_installed_once(clone):
    python(clone, makes=CUDA)
    ran, said = run(clone, "tcp://hub:5555", card=True)
    (pip,) = ran
    assert pip.startswith("-m pip install") and pip.endswith(f"--editable {clone}[cuda12]")
    assert "this PC has an NVIDIA card" in said and "Type:" not in said
    assert run(clone, "tcp://hub:5555", card=True) == (ran, "")


def test_where_it_cannot_be_installed_the_node_goes_on_and_the_line_to_type_is_said_each_time(clone):
    python(clone, code=1)
    ran, said = run(clone, card=True)
    line = f"cd {str(clone).replace(' ', chr(92) + ' ')} && .venv/bin/python -m pip install -e '.[cuda12]'"
    assert len(ran) == 1 and line in said
    ran, said = run(clone, card=True)
    assert len(ran) == 1, "it is not tried again"
    assert line in said


def test_once_the_line_was_typed_nothing_more_is_said(clone):
    python(clone, code=1)
    run(clone, card=True)
    (clone / ".venv" / CUDA).mkdir(parents=True)
    assert run(clone, card=True)[1] == ""


@pytest.mark.parametrize("argument", ["--help", "-h", "--version"])
def test_for_help_nothing_is_installed(clone, argument):
    python(clone)
    assert run(clone, argument, card=True) == ([], "")


def test_a_driver_is_found_by_its_file_too(clone):
    python(clone, makes=CUDA)
    (clone / "version").touch()
    script = f'source "{clone}/bin/_setup"; DRIVER_FILES=("{clone}/nothing" "{clone}/version"); has_card && echo found'
    done = subprocess.run(["bash", "-c", script, "x"], capture_output=True, text=True)
    assert done.stdout == "found\n"


def test_the_extra_is_in_pyproject():
    assert '\ncuda12 = ["jax[cuda12]"]\n' in (SETUP.parents[1] / "pyproject.toml").read_text()
