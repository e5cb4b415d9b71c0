"""Say what is in a broker's checkpoints and in its journal of what was released since.

Rule 1: a release is in the journal before any node hears of it, so that a restarted broker never knows less than a
node.  Rule 2: a journal's records are msgpack; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgpack
import numpy as np
from numpy.typing import NDArray

from zmqtrain.averaging.aggregator import Released
from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.core.errors import CheckpointError

JournalRecord = tuple[Released, tuple[tuple[str, int], ...], int]
"""A release, the publishes that landed in it as (peer, sequence), and the samples they stand for."""


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
        """Give the releases after `version` in order, up to the first that is torn or missing.

        Raises CheckpointError for a record that is whole, and no release.
        """
        for body in self.records():
            record = _read_release(body)
            if record is None:
                raise CheckpointError(
                    f"a journal in {self.folder} holds what is no release, after version {version}: remove it to go on "
                    "from the checkpoint"
                )
            if record[0].version == version + 1:
                version += 1
                yield record


def _read_release(body: bytes) -> JournalRecord | None:
    """Return what `release` wrote, None if it did not write this."""
    try:
        number, codec, fragments, frames, landed, samples = msgpack.unpackb(body, use_list=False)
        sound = (
            all(type(one) is int for one in (number, samples, *fragments))
            and type(codec) is str
            and len(fragments) == len(frames)
            and all(type(frame) is bytes for of_fragment in frames for frame in of_fragment)
            and all(type(peer) is str and type(sequence) is int for peer, sequence in landed)
        )
    except Exception:  # msgpack raises several kinds, ValueError and its own among them
        return None
    return (Released(number, codec, fragments, frames), landed, samples) if sound else None
