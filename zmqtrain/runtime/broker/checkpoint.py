"""Keep the broker's state where a crash cannot reach it: checkpoints, and a journal of what was published since.

Rule 1: a checkpoint is one safetensors file, written beside its place, fsynced and renamed; a torn one is skipped with
a warning.  Rule 2: a release is in the journal before any node hears of it, so that a restarted broker never knows less
than a node.  Rule 3: arrays are safetensors, state is JSON, the journal is msgpack; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zmqtrain.errors import CheckpointError
from zmqtrain.runtime.equation.aggregator import Released

__all__ = [
    "JournalRecord",
    "CheckpointFolder",
    "export_model",
    "model_arrays",
    "write_arrays",
    "read_arrays",
    "describe_difference",
]

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")
_NAME = re.compile(r"checkpoint-(\d{12})\.safetensors")
JournalRecord = tuple[Released, tuple[tuple[str, int], ...], int]
"""A release, the publishes that landed in it as (peer, sequence), and the samples they stand for."""


def export_model(path: Path, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """Write the shared parameters as one safetensors file with the leaf paths as names, atomically."""
    write_arrays(path, model_arrays(arrays), {})


def model_arrays(arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Return the shared parameters among a checkpoint's arrays, by leaf path."""
    prefix = "parameters/"
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically: beside its place, synced, and renamed. Raises CheckpointError."""
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
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}; is the disk full, or the folder not yours?") from error


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the state and the arrays of a file that `write_arrays` wrote with both.

    Raises OSError, ValueError, KeyError or SafetensorError for one that is torn, or another.
    """
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        state = metadata["state"]
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _checksum(state, arrays) != int(metadata["crc"]):
        raise ValueError("its checksum differs")
    return json.loads(state), arrays


def _checksum(state: str, arrays: Mapping[str, NDArray[Any]]) -> int:
    crc = zlib.crc32(state.encode())
    for name in sorted(arrays):
        crc = zlib.crc32(np.ascontiguousarray(arrays[name]).reshape(-1).data, zlib.crc32(name.encode(), crc))
    return crc


class CheckpointFolder:
    """The checkpoints and the journal of one run. keep: how many checkpoints stay."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep
        self._journal: BinaryIO | None = None

    # ------------------------------------------------------------------ writing

    def save(self, version: int, state: dict[str, Any], arrays: Mapping[str, NDArray[np.float32]]) -> Path:
        """Write one checkpoint and drop what it makes superfluous. Raises CheckpointError."""
        path = self.folder / f"checkpoint-{version:012d}.safetensors"
        write_arrays(path, arrays, {"state": json.dumps(state, sort_keys=True)})
        self._set_aside(version)
        checkpoints = self._checkpoints()
        for old in checkpoints[: -self.keep]:
            old.unlink(missing_ok=True)
        oldest = self._version(checkpoints[-self.keep :][0])
        for base, journal in self._journals():
            if base < oldest:  # the oldest checkpoint that stays knows all that is in it
                journal.unlink(missing_ok=True)
        return path

    def _set_aside(self, version: int) -> None:
        """Take what is newer than `version` out of the way: it could not be read, and this run will pass it by."""
        for path in self._checkpoints():
            if self._version(path) > version:
                logger.warning("setting the checkpoint %s aside: the run goes on from version %d", path, version)
                path.replace(path.with_name(path.name + ".unreadable"))
        for base, journal in self._journals():
            if base > version:
                journal.unlink(missing_ok=True)

    def begin_journal(self, version: int) -> None:
        """Start the journal of what is released after `version`."""
        self.close()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._journal = open(self.folder / f"journal-{version:012d}.log", "wb")  # noqa: SIM115 - stays open
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error}") from error

    def append(self, record: JournalRecord) -> None:
        """Write one release; it survives the death of this process from then on. Raises CheckpointError."""
        if self._journal is None:
            return
        released, landed, samples = record
        body = msgpack.packb(
            [
                released.version,
                released.codec,
                released.fragments,
                [[bytes(frame) for frame in frames] for frames in released.frames],
                landed,
                samples,
            ]
        )
        try:
            self._journal.write(_HEAD.pack(len(body), zlib.crc32(body)) + body)
            self._journal.flush()
        except OSError as error:
            raise CheckpointError(f"cannot write the journal in {self.folder}: {error}") from error

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # ------------------------------------------------------------------ reading

    def _checkpoints(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("checkpoint-*.safetensors") if _NAME.fullmatch(path.name))

    @staticmethod
    def _version(path: Path) -> int:
        return int(path.stem.removeprefix("checkpoint-"))

    def _journals(self) -> list[tuple[int, Path]]:
        found = (
            (re.fullmatch(r"journal-(\d{12})\.log", path.name), path) for path in self.folder.glob("journal-*.log")
        )
        return sorted((int(match[1]), path) for match, path in found if match)

    def load(self) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]] | None:
        """Return the state and the arrays of the newest good checkpoint, None when there is none at all.

        Raises CheckpointError when there are checkpoints and none can be read.
        """
        paths = self._checkpoints()
        for path in reversed(paths):
            try:
                return read_arrays(path)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                logger.warning("skipping the checkpoint %s: %s", path, error)
        if paths:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be read; name another folder"
            )
        return None

    def replay(self, version: int) -> Iterator[JournalRecord]:
        """Give the releases after `version` in order, up to the first that is torn or missing."""
        for _, path in self._journals():
            for record in self._read_journal(path):
                if record[0].version == version + 1:
                    version += 1
                    yield record

    def _read_journal(self, path: Path) -> Iterator[JournalRecord]:
        data = memoryview(path.read_bytes())
        while len(data) >= _HEAD.size:
            length, crc = _HEAD.unpack(data[: _HEAD.size])
            body = data[_HEAD.size : _HEAD.size + length]
            if len(body) < length or zlib.crc32(body) != crc:
                logger.warning("the journal %s ends in a torn record; what is before it counts", path)
                return
            version, codec, fragments, frames, landed, samples = msgpack.unpackb(body, use_list=False)
            yield Released(version, codec, fragments, frames), landed, samples
            data = data[_HEAD.size + length :]


def describe_difference(saved: Mapping[str, Any], wanted: Mapping[str, Any], free: Sequence[str]) -> str:
    """Name the settings in which a checkpoint differs from what the broker was told, besides the `free` ones."""
    names = [name for name in wanted if name not in free and saved.get(name) != wanted[name]]
    return ", ".join(f"{name} ({saved.get(name)!r} there, {wanted[name]!r} here)" for name in names)
