"""Files that survive a crash: arrays with a state, whole or absent, and a journal of records, each whole or absent.

Rule 1: arrays are written beside their place, synced, renamed; then the folder is synced: a file that was reported as
written is found after a loss of power too.  Rule 2: arrays are safetensors, state is JSON; nothing is ever unpickled.
Rule 3: a checksum covers the state and every array's name, dtype, shape and bytes; a file whose checksum differs is not
read.
Rule 4: what was appended to a journal survives the death of this process, not a loss of power: to wait for the disk at
every record would cost an aggregate as long as the disk takes. Its name in the folder survives that too. A record that
did not fit is taken back, so that the next try goes on behind the last good one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from zmqtrain.core.errors import CheckpointError


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically; with a "state" in the metadata it gets a checksum.

    arrays: of numpy's own dtypes, by name; they are not changed.  Raises CheckpointError.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    if "state" in metadata:
        metadata = metadata | {"crc": str(_checksum(metadata["state"], arrays))}
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, beside, metadata)
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except Exception as error:  # safetensors has errors of its own, which tell of the same
        with contextlib.suppress(OSError):  # half a file would take the room that others need
            beside.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error}; is the disk full, or the folder not yours?") from error


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the state and the arrays of a file that `write_arrays` wrote with both.

    Raises CheckpointError for one that is torn, or another.
    """
    try:
        metadata, arrays = open_arrays(path)
        state = metadata["state"]
        if _checksum(state, arrays) != int(metadata["crc"]):
            raise ValueError("its checksum differs")
        return dict(json.loads(state)), arrays
    except Exception as error:  # whatever its bytes make of the reader, it is no checkpoint
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def open_arrays(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return the metadata and the arrays of a safetensors file. Raises whatever its bytes make of the reader."""
    with safe_open(path, framework="np") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that its names survive a loss of power. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def describe_difference(saved: Mapping[str, Any], wanted: Mapping[str, Any], free: Sequence[str]) -> str:
    """Name the settings in which a checkpoint differs from what is wanted, besides the `free` ones; "" for none."""
    names = [name for name in wanted if name not in free and saved.get(name) != wanted[name]]
    return ", ".join(f"{name} ({saved.get(name)!r} there, {wanted[name]!r} here)" for name in names)


def _checksum(state: str, arrays: Mapping[str, NDArray[Any]]) -> int:
    crc = zlib.crc32(state.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        crc = zlib.crc32(f"{name} {array.dtype.str} {arrays[name].shape}".encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return crc


logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")


class Journal:
    """A new journal in place of what may be there. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path, self._good = path, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
            try:
                sync_folder(path.parent)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise CheckpointError(f"cannot write to {path.parent}: {error}") from error

    def append(self, body: bytes) -> None:
        """Write one record. Raises CheckpointError; nothing of it is there then, and it may be tried again."""
        assert self._file is not None, "a journal that is closed takes nothing"
        left = memoryview(_HEAD.pack(len(body), zlib.crc32(body)) + body)
        whole = self._good + len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._good)
            os.lseek(self._file, self._good, os.SEEK_SET)
            raise CheckpointError(f"cannot write the journal {self.path}: {error}") from error
        self._good = whole

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_journal(path: Path) -> Iterator[bytes]:
    """Yield the records of a journal in order, up to the first that is torn. Raises OSError."""
    data = memoryview(path.read_bytes())
    while data:
        length, crc = _HEAD.unpack(data[: _HEAD.size]) if len(data) >= _HEAD.size else (0, -1)
        body = data[_HEAD.size : _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != crc:
            logger.warning("the journal %s ends in a torn record; what is before it counts", path)
            return
        yield bytes(body)
        data = data[_HEAD.size + length :]
