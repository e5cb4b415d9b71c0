"""How zmqtrain is installed here, and whether this PC has an NVIDIA driver: for commands that messages suggest.

Rule: what is said to type works as it is printed, in any folder; the project is in no package index.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from zmqtrain.core.types import VERSION

PACKAGE = Path(__file__).parents[1]
PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "numpy", "optax", "pyzmq", "msgpack", "msgspec", "numba", "safetensors",
    "flax",
)  # fmt: skip
"""The packages whose versions a record names, where they are installed."""
DRIVER_FILES = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")


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
    return f"zmqtrain {VERSION}, Python {platform.python_version()}{jax}"


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


def how_to_install(extra: str = "") -> str:
    """Return the line that installs zmqtrain, with this extra of pyproject.toml, into the Python that runs here."""
    pip = f"{shlex.quote(sys.executable)} -m pip install -e " + (f"'.[{extra}]'" if extra else ".")
    folder = clone_folder()
    if folder is None:
        return f"in the folder of your clone of zmqtrain: {pip}"
    return f"cd {shlex.quote(str(folder))} && {pip}"
