"""The wheel and the sdist: what they hold, their version, and that the wheel runs on its own; the page of both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from zmqtrain.core.installed import package_version
from zmqtrain.protocol.framing import PROTOCOL_VERSION

PROJECT = Path(__file__).parents[1]
PAGE = (PROJECT / "docs" / "install.md").read_text()
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
SMALL = "width=8,layers=1,heads=1,context=8,batch=2,batches_per_unit=1"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a program to its end, with exit code 0; return what it printed."""
    whole = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the wheel, the sdist): the wheel is built from the unpacked sdist, with the build backend that is installed."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, PROJECT, cwd=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(dist: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment that has the wheel, and sees the packages of this one."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    (site,) = place.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(others())
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        dist[0],
        cwd=place,
    )
    return place / "bin"


def others() -> str:
    """Folders of packages that this Python sees, but for the tree of the project."""
    seen = [sysconfig.get_path("purelib"), *(folder for folder in sys.path if folder.endswith("-packages"))]
    return "".join(f"{folder}\n" for folder in dict.fromkeys(seen))


def test_the_wheel_holds_the_package_and_nothing_else(dist: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(dist[0]) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        facts = wheel.read(metadata).decode()
    modules = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "zmqtrain").rglob("*.py")}
    assert {name for name in names if not name.startswith("zmqtrain-")} >= modules
    assert {name.partition("/")[0] for name in names} == {"zmqtrain", metadata.partition("/")[0]}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "# zmqtrain" in facts.partition("\n\n")[2], "README is what an index would show"
    assert f"Version: {dist[0].name.split('-')[1]}\n" in facts


def test_the_sdist_holds_what_its_tests_and_its_pages_need(dist: tuple[Path, Path]) -> None:
    with tarfile.open(dist[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"pyproject.toml", "PKG-INFO", "README.md", "LICENSE", "bin/_setup", "tests/conftest.py", "bench/hub.py"}
    assert needed | {"docs/tutorial/1-first-run.md", "docs/site/mkdocs.yml", ".ci/run"} <= names


def test_the_version_is_that_of_the_clone(dist: tuple[Path, Path]) -> None:
    built = {dist[0].name.split("-")[1], dist[1].name.removeprefix("zmqtrain-").removesuffix(".tar.gz")}
    assert len(built) == 1
    (version,) = built
    assert version.partition("+")[0] == package_version().partition("+")[0]


@pytest.mark.timeout(300)
def test_an_installed_wheel_says_its_version_and_trains(
    installed: Path, dist: tuple[Path, Path], tmp_path: Path
) -> None:
    version = dist[0].name.split("-")[1]
    said = run(installed / "zmqtrain", "--version", cwd=tmp_path)
    assert said == f"zmqtrain {version}, protocol version {PROTOCOL_VERSION}\n"
    home = run(installed / "python", "-c", "import zmqtrain; print(zmqtrain.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(installed.parent)
    local = ("local", "--nodes", "1", "--program", "text", "--program-arguments", SMALL, "--units", "4")
    shown = run(installed / "zmqtrain", *local, cwd=tmp_path, HOME=str(tmp_path))
    assert re.search(r"held-out loss \d", shown)
    assert len(list(tmp_path.glob("zmqtrain-runs/*/broker/model.safetensors"))) == 1


def test_the_table_of_extras_is_that_of_pyproject() -> None:
    table = PAGE.partition("\n## Extras\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(
        PYPROJECT["project"]["optional-dependencies"]
    )


def test_the_page_shows_the_version_that_a_clone_falls_back_to() -> None:
    fallback = PYPROJECT["tool"]["hatch"]["version"]["raw-options"]["fallback_version"]
    assert f"\nzmqtrain {fallback}…, protocol version {PROTOCOL_VERSION}\n" in PAGE
    assert set(re.findall(r"zmqtrain-(\d[\d.]*)-py3", PAGE)) == {fallback}
    assert f"\n## {fallback}" in (PROJECT / "docs" / "changelog.md").read_text()
