"""Files of arrays that survive a crash: with a state, whole or absent.

Rule 1: arrays are written beside their place, synced, renamed; then the folder is synced: a file that was reported as
written is found after a loss of power too.  Rule 2: arrays are safetensors, state is JSON; nothing is ever unpickled.
Rule 3: a checksum covers the state and every array's name, dtype, shape and bytes; a file whose checksum differs is not
read.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from zmqtrain.core.errors import CheckpointError, ZmqTrainError


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically; with a "state" in the metadata it gets a checksum.

    arrays: of numpy's own dtypes, by name; they are not changed.  Raises CheckpointError.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    if "state" in metadata:
        metadata = metadata | {"crc": str(_checksum(metadata["state"], arrays))}
    with _atomically(path) as beside:
        save_file(arrays, beside, metadata)


@contextlib.contextmanager
def write_in_parts(
    path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: dict[str, str]
) -> Iterator[Callable[[str, int, NDArray[np.float32]], None]]:
    """Write a safetensors file of float32 arrays, of which only a part is in memory at a time; atomically.

    shapes: of all arrays, by name.  Gives write(name, row, values): values are those of the array from this row of its
    first axis on. Raises CheckpointError, also where not every row was written.
    Source: the format, at github.com/huggingface/safetensors: length of the header, header, bytes.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start, missing = 0, dict[str, int]()
    for name, shape in sorted(shapes.items()):
        missing[name] = 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, start + missing[name]]}
        start += missing[name]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with _atomically(path) as beside, open(beside, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)

        def write(name: str, row: int, values: NDArray[np.float32]) -> None:
            array = np.ascontiguousarray(values, "<f4")
            file.seek(8 + len(encoded) + header[name]["data_offsets"][0] + row * 4 * prod(shapes[name][1:]))
            file.write(array.data.cast("B") if array.size else b"")
            missing[name] -= array.nbytes

        yield write
        if torn := [name for name, left in missing.items() if left]:
            raise CheckpointError(f"rows of {torn[0]} were not written, or written twice")


@contextlib.contextmanager
def _atomically(path: Path) -> Iterator[Path]:
    """Give a place beside a file; what was written there takes the file's place at the end, synced. Raises
    CheckpointError, and then the file is as it was."""
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except BaseException as error:  # safetensors has errors of its own, which tell of the same
        with contextlib.suppress(OSError):  # half a file would take the room that others need
            beside.unlink(missing_ok=True)
        if not isinstance(error, Exception) or isinstance(error, ZmqTrainError):
            raise
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
