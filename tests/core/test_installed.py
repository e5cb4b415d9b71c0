"""What messages say to type about the installation works as printed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zmqtrain.core import installed
from zmqtrain.core.installed import clone_folder, has_nvidia_driver, how_to_install, how_to_upgrade, package_version

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


@pytest.mark.parametrize("extra", ["cuda12", "datasets", "page", "plot", "tensorboard"])
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


# The version.

ASKED = package_version.__wrapped__  # not the answer that is kept


def git(folder, *arguments):
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *author, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text((PROJECT / "pyproject.toml").read_text())
    monkeypatch.setattr(installed, "PACKAGE", tmp_path / "zmqtrain")
    return tmp_path


def test_the_version_of_a_clone_is_that_of_its_tag_and_its_commits(clone):
    fallback = installed._fallback_version(clone)
    assert ASKED() == fallback, "it is no clone yet"
    git(clone, "init", "-q")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "one")
    assert ASKED() == f"{fallback}.post1+g{git(clone, 'rev-parse', '--short', 'HEAD')}"
    git(clone, "tag", "v0.7.0")
    git(clone, "tag", "a-name-of-mine")
    assert ASKED() == "0.7.0"
    git(clone, "commit", "-qm", "two", "--allow-empty")
    assert ASKED() == f"0.7.0.post1+g{git(clone, 'rev-parse', '--short', 'HEAD')}"


def test_the_version_of_an_unpacked_sdist_is_the_one_that_it_was_built_with(clone):
    (clone / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: zmqtrain\nVersion: 0.7.1\n")
    assert ASKED() == "0.7.1"


def test_the_version_of_an_installed_copy_is_in_its_metadata(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "PACKAGE", tmp_path / "site-packages" / "zmqtrain")
    monkeypatch.setattr(installed, "version", {"zmqtrain": "0.8.0"}.get)
    assert ASKED() == "0.8.0"


def test_a_clone_is_upgraded_by_git_and_an_installed_copy_by_a_wheel(tmp_path, monkeypatch):
    changes, pulls, pip = how_to_upgrade().split(" && ")
    assert (shlex.split(changes), pulls) == (["cd", str(PROJECT)], "git pull")
    assert shlex.split(pip) == [sys.executable, "-m", "pip", "install", "-e", "."]
    monkeypatch.setattr(installed, "clone_folder", lambda: None)
    assert shlex.split(how_to_upgrade())[:5] == [sys.executable, "-m", "pip", "install", "--upgrade"]
