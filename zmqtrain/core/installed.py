"""How zmqtrain is installed here, in which version, and what this PC has: an NVIDIA driver, free memory.

Rule: what is said to type works as it is printed, in any folder; the project is in no package index.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = Path(__file__).parents[1]
PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "numpy", "optax", "pyzmq", "msgpack", "msgspec", "numba", "safetensors",
    "flax",
)  # fmt: skip
"""The packages whose versions a record names, where they are installed."""
DESCRIBED = re.compile(r"v(\d\S*)-(\d+)-(g[0-9a-f]+)")
"""What `git describe --tags --long` prints: the newest tag, how many commits came after it, and the newest of them."""
GIT_SECONDS = 5.0
DRIVER_FILES = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")


@cache
def package_version() -> str:
    """Return the version of this package, as 0.2.0, or 0.2.0.post3+g1a2b3c4 three commits after the tag v0.2.0.

    Of a clone, that of its files: `git pull` does not change the version with which pip has recorded the clone.
    Without a tag, they are counted from the version that pyproject.toml falls back to.  Of an installed copy, the
    version that it was built with.
    """
    folder = PACKAGE.parent
    if not _is_clone(folder):
        try:
            return version("zmqtrain")
        except PackageNotFoundError:
            return "unknown"
    if not (folder / ".git").exists():
        return _unpacked_version(folder) or _fallback_version(folder)
    if found := DESCRIBED.fullmatch(_ask_git(folder, "describe", "--tags", "--long", "--match", "v[0-9]*")):
        tagged, commits, commit = found.groups()
        return tagged if commits == "0" else f"{tagged}.post{commits}+{commit}"
    commits, commit = _ask_git(folder, "rev-list", "--count", "HEAD"), _ask_git(folder, "rev-parse", "--short", "HEAD")
    return _fallback_version(folder) + (f".post{commits}+g{commit}" if commits and commit else "")


def _ask_git(folder: Path, *question: str) -> str:
    """Return what git prints; nothing where it is missing, or refuses."""
    asking = ["git", "-C", str(folder), *question]
    try:
        return subprocess.run(asking, capture_output=True, text=True, check=True, timeout=GIT_SECONDS).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _unpacked_version(folder: Path) -> str:
    """Return the version of an unpacked sdist; nothing for another folder."""
    try:
        found = re.search(r"^Version: (\S+)$", (folder / "PKG-INFO").read_text("utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _fallback_version(folder: Path) -> str:
    read = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    return str(read["tool"]["hatch"]["version"]["raw-options"]["fallback_version"])


def has_nvidia_driver() -> bool:
    """Return whether this PC has the driver of an NVIDIA card."""
    return any(Path(file).exists() for file in DRIVER_FILES) or shutil.which("nvidia-smi") is not None


def package_versions() -> dict[str, str]:
    """Return the versions of Python, of the system and of PACKAGES, as far as they are installed; none is imported."""
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


@cache
def software() -> str:
    """Return the versions that nodes of one run should share, as "zmqtrain 0.2.0, Python 3.11.2, jax 0.7.0"."""
    try:
        jax = f", jax {version('jax')}"
    except PackageNotFoundError:
        jax = ""
    return f"zmqtrain {package_version()}, Python {platform.python_version()}{jax}"


def sharing_card(command: Sequence[str]) -> list[str]:
    """Return the command of one of several processes of this PC, so that each takes of a card what it needs: the first
    would take three quarters of its memory else."""
    env = shutil.which("env") if has_nvidia_driver() else None
    return list(command) if env is None else [env, "XLA_PYTHON_CLIENT_PREALLOCATE=false", *command]


def clone_folder() -> Path | None:
    """Return the folder of the clone that this package is from; None if that is not known or not there any more."""
    found = [PACKAGE.parent]
    try:
        origin = json.loads(distribution("zmqtrain").read_text("direct_url.json") or "{}")
        found.append(Path(unquote(urlsplit(str(origin.get("url", ""))).path)))
    except (PackageNotFoundError, ValueError, OSError, AttributeError):
        pass
    return next((folder for folder in found if _is_clone(folder)), None)


def _is_clone(folder: Path) -> bool:
    try:
        return 'name = "zmqtrain"' in (folder / "pyproject.toml").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def command_word(name: str) -> str:
    """Return what stands for the command `name` where zmqtrain is installed as it is here: itself if it is on the path,
    else that of the clone, to be typed in the clone's folder."""
    if shutil.which(name) is None and (folder := clone_folder()) is not None and (folder / "bin" / name).is_file():
        return f"bin/{name}"
    return name


def how_to_upgrade() -> str:
    """Return the line that brings zmqtrain here to its newest version; where there is no clone, that of a wheel."""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    folder = clone_folder()
    if folder is None:
        return f"{pip} --upgrade zmqtrain-VERSION-py3-none-any.whl"
    return f"cd {shlex.quote(str(folder))} && git pull && {pip} -e ."


def how_to_install(extra: str = "") -> str:
    """Return the line that installs zmqtrain, with this extra of pyproject.toml, into the Python that runs here."""
    pip = f"{shlex.quote(sys.executable)} -m pip install -e " + (f"'.[{extra}]'" if extra else ".")
    folder = clone_folder()
    if folder is None:
        return f"in the folder of your clone of zmqtrain: {pip}"
    return f"cd {shlex.quote(str(folder))} && {pip}"


def free_memory() -> int | None:
    """Return how many bytes of this PC's memory a new process could have; None where the kernel does not say it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
