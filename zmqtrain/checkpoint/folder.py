"""The newest checkpoints of one broker or one node, in a folder of its own, and how often one is due.

Rule 1: a file is named by its version, and whole or absent (`files`); the newest good one counts, and a torn one is
skipped with a warning.  Rule 2: one process has a folder at a time: a lock says so, which dies with the process.
Rule 3: other files in the folder belong to somebody else, and are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from zmqtrain.checkpoint.files import read_arrays, sync_folder, write_arrays
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.core.specs import parse_duration

LEAST_SECONDS = 0.1
STRICT_VERSIONS = 64
"""Of the default in strict mode, whose nodes and broker save at the same versions."""
USUAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Every:
    """How often to save: every so many seconds, or, if that is not 0, every so many versions.

    together: at the versions that are a multiple of that, as all others of the run do (strict mode).
    """

    seconds: float = USUAL_SECONDS
    versions: int = 0
    together: bool = False

    def is_due(self, version: int, saved_version: int, since_seconds: float) -> bool:
        """Return whether a checkpoint is due at `version`.

        saved_version: of the last one; since_seconds: since that was begun.
        """
        if self.together:
            return version != saved_version and version % self.versions == 0
        if self.versions:
            return version - saved_version >= self.versions
        return since_seconds >= self.seconds


def every_from_text(text: str, strict: bool = False) -> Every:
    """Return what was typed: "60s" or "5min", or "64" for a count of versions; "" is 60 s, in strict mode 64 versions.

    Raises ConfigError, also for a time in strict mode, and for less than 0.1 s.
    """
    if not text:
        return Every(versions=STRICT_VERSIONS, together=True) if strict else Every()
    if text.isdecimal():
        if int(text) < 1:
            raise ConfigError(f"checkpoint_every must be at least 1 version, or 0.1s, got {text!r}")
        return Every(versions=int(text), together=strict)
    seconds = parse_duration(text, "checkpoint_every, where it is no count of versions such as 64,")
    if seconds < LEAST_SECONDS:
        raise ConfigError(f"checkpoint_every must be at least {LEAST_SECONDS:g}s, or 1 version, got {text!r}")
    if strict:
        raise ConfigError(
            f"checkpoint_every = {text!r}: in strict mode the broker and all nodes save at the same versions, and a "
            f"time falls on others everywhere: give their number, the same for all, as {STRICT_VERSIONS}"
        )
    return Every(seconds=seconds)


logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d{12})\.safetensors")
_JOURNAL = re.compile(r"journal-(\d{12})\.log")
_STALE = re.compile(r"(checkpoint-\d{12}|model[-\w]*|keys)\.safetensors\.part")
LOCK = "lock"


def is_locked(folder: Path) -> bool:
    """Return whether a process has this folder now; a folder that cannot be looked into counts as one."""
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


class CheckpointFolder:
    """The checkpoints of one run. keep: how many stay. Journals of a broker beside them are dropped with them.

    Reading and writing need no `lock`; who lives in the folder takes it first.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep
        self.skipped = -1
        """The version of the newest checkpoint that `load` could not read, -1 if it read them all."""
        self._lock: int | None = None

    # ------------------------------------------------------------------ whose it is

    def lock(self) -> None:
        """Lock the folder for this process, and delete files that a crash left half written.

        Raises CheckpointError, which names the process that has it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self.folder / LOCK, flags, 0o644)
        except OSError as error:
            if (self.folder / LOCK).is_symlink():
                raise CheckpointError(
                    f"{self.folder / LOCK} is a symbolic link, and a folder's lock is a file of its own: remove it"
                ) from error
            raise CheckpointError(f"cannot write to {self.folder}: {error}") from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise CheckpointError(f"{self.folder / LOCK} is no file, and a folder's lock is one: remove it")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = isinstance(error, BlockingIOError)
            owner = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            if not held:
                raise CheckpointError(f"cannot lock {self.folder}: {error}") from error
            raise CheckpointError(
                f"{self.folder} is in use by the process {owner}: two must not save to one folder. End that one, or "
                "name another folder"
            ) from error
        self._lock = file
        with contextlib.suppress(OSError):  # a full disk: who has the lock is then not known by its number
            said = str(os.getpid()).encode()
            os.pwrite(file, said, 0)
            os.ftruncate(file, len(said))
        for path in self.folder.iterdir():
            if _STALE.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------------ writing

    def save(self, version: int, state: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Path:
        """Write one checkpoint and drop what it makes superfluous. Raises CheckpointError."""
        path = self.folder / f"checkpoint-{version:012d}.safetensors"
        write_arrays(path, arrays, {"state": json.dumps(state, sort_keys=True)})
        try:
            self._set_aside(version)
            self._drop_old()
        except OSError as error:
            logger.warning("%s is written, and older files in its folder cannot be dropped: %s", path, error)
        return path

    def _set_aside(self, version: int) -> None:
        """Rename checkpoints newer than `version`: they could not be read, and this run will pass those versions."""
        for newer, path in self._checkpoints():
            if newer > version:
                logger.warning("setting the checkpoint %s aside: the run goes on from version %d", path, version)
                path.replace(path.with_name(path.name + ".unreadable"))
        for base, journal in self._journals():
            if base > version:
                journal.unlink(missing_ok=True)

    def _drop_old(self) -> None:
        checkpoints = self._checkpoints()
        for _, old in checkpoints[: -self.keep]:
            old.unlink(missing_ok=True)
        oldest = checkpoints[-self.keep :][0][0]
        for base, journal in self._journals():
            if base < oldest:  # the oldest checkpoint that stays knows all that is in it
                journal.unlink(missing_ok=True)

    def forget_after(self, version: int) -> None:
        """Drop all that is newer than a version: the run begins again there. Raises CheckpointError."""
        try:
            for base, journal in self._journals():
                if base >= version:
                    journal.unlink(missing_ok=True)
            for newer, path in reversed(self._checkpoints()):
                if newer > version:
                    path.unlink(missing_ok=True)
            if self.folder.is_dir():
                sync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(f"cannot drop what {self.folder} has after version {version}: {error}") from error

    def set_all_aside(self) -> None:
        """Rename all checkpoints: another run begins in the folder. Raises CheckpointError."""
        try:
            for _, path in self._checkpoints():
                path.replace(path.with_name(path.name + ".former"))
            for _, journal in self._journals():
                journal.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot set the checkpoints in {self.folder} aside: {error}") from error

    # ------------------------------------------------------------------ reading

    def _checkpoints(self) -> list[tuple[int, Path]]:
        return self._numbered(_NAME)

    def _journals(self) -> list[tuple[int, Path]]:
        return self._numbered(_JOURNAL)

    def _numbered(self, name: re.Pattern[str]) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        found = ((name.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match)

    def load(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
        """Return the state and the arrays of the newest good checkpoint, None when there is none at all.

        Raises CheckpointError when there are checkpoints and none can be read.
        """
        checkpoints, self.skipped = self._checkpoints(), -1
        for version, path in reversed(checkpoints):
            try:
                loaded = read_arrays(path)
            except CheckpointError as error:
                self.skipped = max(self.skipped, version)
                logger.warning("skipping the checkpoint %s: %s", path.name, error)
                continue
            if self.skipped >= 0:
                lost = "only a journal can tell" if self._journals() else "nothing is left here"
                text = "%s goes back to version %d: of what came after it up to version %d, %s"
                logger.warning(text, self.folder, version, self.skipped, lost)
            return loaded
        if checkpoints:
            raise CheckpointError(
                f"none of the {len(checkpoints)} checkpoints in {self.folder} can be read; name another folder"
            )
        return None

    def load_version(self, version: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return read_arrays(self.folder / f"checkpoint-{version:012d}.safetensors")

    def good_versions(self) -> tuple[int, ...]:
        """Return the versions of all checkpoints that can be read, rising; each is read whole."""
        good = []
        for version, path in self._checkpoints():
            try:
                read_arrays(path)
            except CheckpointError as error:
                logger.warning("skipping the checkpoint %s: %s", path.name, error)
            else:
                good.append(version)
        return tuple(good)
