"""What messages say to type about the installation works as printed."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from zmqtrain.core import installed
from zmqtrain.core.installed import clone_folder, has_nvidia_driver, how_to_install

PROJECT = Path(__file__).parents[2]


def test_in_a_clone_the_line_names_its_folder_and_the_python_that_runs():
    assert clone_folder() == PROJECT
    changes, _, line = how_to_install("cuda12").partition(" && ")
    assert shlex.split(changes) == ["cd", str(PROJECT)]
    assert shlex.split(line) == [sys.executable, "-m", "pip", "install", "-e", ".[cuda12]"]


def test_an_installed_copy_names_the_folder_that_it_was_installed_from(tmp_path, monkeypatch):
    clone = tmp_path / "a clone"
    clone.mkdir()

    class Distribution:
        def read_text(self, name):
            return json.dumps({"url": clone.as_uri(), "dir_info": {}})

    monkeypatch.setattr(installed, "PACKAGE", tmp_path / "site-packages" / "zmqtrain")
    monkeypatch.setattr(installed, "distribution", lambda name: Distribution())
    assert how_to_install("fast").startswith("in the folder of your clone of zmqtrain: "), "it is gone"
    (clone / "pyproject.toml").write_text('[project]\nname = "zmqtrain"\n')
    assert how_to_install("fast").startswith(f"cd '{clone}' && ")


@pytest.mark.parametrize("extra", ["cuda12", "datasets", "fast", "plot"])
def test_every_extra_that_messages_name_is_in_pyproject(extra):
    assert f"\n{extra} = [" in (PROJECT / "pyproject.toml").read_text()


def test_no_message_says_to_install_the_project_from_an_index_that_has_none():
    said = [
        f"{path}:{number}"
        for path in [*PROJECT.glob("zmqtrain/**/*.py"), *PROJECT.glob("docs/**/*.md"), PROJECT / "README.md"]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "pip install zmqtrain" in line or "pip install 'zmqtrain" in line or 'pip install "zmqtrain' in line
    ]
    assert said == []


def test_a_driver_is_found_by_its_files_or_its_program(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "DRIVER_FILES", (str(tmp_path / "version"),))
    monkeypatch.setattr(installed.shutil, "which", lambda name: None)
    assert not has_nvidia_driver()
    (tmp_path / "version").touch()
    assert has_nvidia_driver()
    (tmp_path / "version").unlink()
    monkeypatch.setattr(installed.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert has_nvidia_driver()
