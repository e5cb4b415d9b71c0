"""Say what is in a broker's checkpoints and in its journal of what was released since.

Rule 1: a release is in the journal before any node hears of it, so that a restarted broker never knows less than a
node.  Rule 2: a journal's records are msgpack; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgpack
import numpy as np
from numpy.typing import NDArray

from zmqtrain.runtime.checkpoints.files import write_arrays
from zmqtrain.runtime.checkpoints.folder import CheckpointFolder
from zmqtrain.runtime.equation.aggregator import Released

__all__ = ["JournalRecord", "RunFolder", "export_model", "model_arrays"]

JournalRecord = tuple[Released, tuple[tuple[str, int], ...], int]
"""A release, the publishes that landed in it as (peer, sequence), and the samples they stand for."""


def export_model(path: Path, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """Write the shared parameters as one safetensors file with the leaf paths as names, atomically."""
    write_arrays(path, model_arrays(arrays), {})


def model_arrays(arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Return the shared parameters among a checkpoint's arrays, by leaf path."""
    prefix = "parameters/"
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


class RunFolder(CheckpointFolder):
    """The folder of one broker's run: its checkpoints, and the releases after the newest."""

    def release(self, record: JournalRecord) -> None:
        """Write one release to the journal, if there is one. Raises CheckpointError; it may be tried again."""
        released, landed, samples = record
        frames = [[bytes(frame) for frame in frames] for frames in released.frames]
        self.append(msgpack.packb([released.version, released.codec, released.fragments, frames, landed, samples]))

    def replay(self, version: int) -> Iterator[JournalRecord]:
        """Give the releases after `version` in order, up to the first that is torn or missing."""
        for body in self.records():
            number, codec, fragments, frames, landed, samples = msgpack.unpackb(body, use_list=False)
            if number == version + 1:
                version += 1
                yield Released(number, codec, fragments, frames), landed, samples
