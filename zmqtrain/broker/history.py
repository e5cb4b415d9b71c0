"""Read a broker's folder as a book of its run: what landed where, and whether the sum of it is what was saved.

Rule 1: the book begins at the oldest checkpoint that is kept; who wants all of a run keeps all checkpoints.
Rule 2: the shared parameters are the first ones and every aggregate that was released since, added in order: each
checkpoint on the way must hold that sum, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.broker.checkpoint import RunFolder
from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol.messages import model_from_wire


@dataclass(frozen=True)
class History:
    """A broker's book. run: its id.  first, last: the versions between which it tells everything.

    landed: by version, in their order, (peer, sequence) of what landed and the samples that it stands for.
    compared: the versions of the checkpoints that were compared with the sum.  faults: what is wrong, a sentence each.
    """

    run: str
    first: int
    last: int
    landed: dict[int, tuple[tuple[tuple[str, int], ...], int]]
    compared: tuple[int, ...]
    faults: tuple[str, ...]


def read_history(folder: Path) -> History:
    """Read the book of the broker whose --checkpoint folder this is. Raises CheckpointError if there is none."""
    kept = RunFolder(folder)
    versions = kept.good_versions()
    if not versions:
        raise CheckpointError(f"there is no checkpoint in {folder}: nothing tells what landed")
    state, arrays = kept.load_version(versions[0])
    settings = RunSettings.from_dict(state["settings"])
    aggregator = Aggregator(settings, int(state.get("shard", 0)))
    aggregator.plan(model_from_wire(tuple((path, tuple(shape), dtype) for path, shape, dtype in state["model"])))
    aggregator.restore(versions[0], arrays)
    landed: dict[int, tuple[tuple[tuple[str, int], ...], int]] = {}
    compared, faults = [versions[0]], []
    for released, of_release, samples in kept.replay(versions[0]):
        aggregator.replay(released)
        landed[released.version] = (tuple((peer, sequence) for peer, sequence in of_release), samples)
        if released.version in versions[1:]:
            compared.append(released.version)
            faults += _difference(kept.load_version(released.version)[1], aggregator, released.version)
    last = max(landed, default=versions[0])
    faults += [
        f"the checkpoint of version {version} is not reached: the journal ends at version {last}"
        for version in versions
        if version > last
    ]
    return History(str(state["run"]), versions[0], last, landed, tuple(compared), tuple(faults))


def _difference(arrays: dict[str, NDArray[Any]], aggregator: Aggregator, version: int) -> list[str]:
    """Return the leaves in which a checkpoint does not hold the sum of what was released."""
    sums = {name: array for name, array in aggregator.arrays().items() if name.startswith("published/")}
    return [
        f"version {version}: {name} is not the sum of what was released, bit for bit"
        for name, array in sums.items()
        if name not in arrays or np.asarray(arrays[name]).tobytes() != array.tobytes()
    ]
