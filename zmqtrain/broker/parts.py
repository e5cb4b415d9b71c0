"""Write what one of several masters has of a model to a file of its own, and make one model of all the files.

Rule 1: a part is a safetensors file: per leaf of which the shard has something, those values, flat unless they are all;
its metadata say of which run and shard it is, and which values of which shapes.
Rule 2: parts are put together only if they are all there, of one run, and say the same of the model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from zmqtrain.broker.checkpoint import model_arrays
from zmqtrain.checkpoint.files import write_arrays
from zmqtrain.checkpoint.model_files import ModelFacts, facts_from_metadata, facts_to_metadata, write_model
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.types import ModelSpec, Version

logger = logging.getLogger(__name__)

MODEL_FILE = "model.safetensors"
"""The name of the file that has the shared parameters alone."""
BEST_FILE, LAST_FILE = "model-best.safetensors", "model-last.safetensors"
"""Of the best that were evaluated and the last ones, those that are not in `MODEL_FILE`."""
MOST_MASTERS = 9999
"""As `--shard I/M` takes."""
_FORMAT = "zmqtrain part 1"


def part_file(shard: int | str, masters: int | str) -> str:
    """Return the name of the file that has one shard's share of the parameters; with "*" a pattern of such names."""
    return f"model-{shard}-of-{masters}.safetensors"


def export_part(folder: Path, arrays: Mapping[str, NDArray[np.float32]], layout: Layout, facts: ModelFacts) -> Path:
    """Write the shared parameters to the folder, whole or a shard's; return the file's path. Raises CheckpointError.

    arrays: as `Aggregator.arrays` returns them.
    """
    shard, masters = layout.shard
    if masters == 1:
        write_model(folder / MODEL_FILE, model_arrays(arrays), facts)
        return folder / MODEL_FILE
    path = folder / part_file(shard, masters)
    leaves = [
        [leaf.path, list(leaf.shape), layout.part(index).start, layout.part(index).stop]
        for index, leaf in enumerate(layout.spec)
    ]
    part = {"run": facts.run, "version": facts.version, "shard": shard, "masters": masters, "leaves": leaves}
    write_arrays(path, model_arrays(arrays), facts_to_metadata(facts) | {"format": _FORMAT, "part": json.dumps(part)})
    return path


@dataclass(frozen=True)
class _Part:
    path: Path
    run: str
    shard: int
    masters: int
    version: Version
    leaves: list[tuple[str, tuple[int, ...], int, int]]
    arrays: dict[str, NDArray[np.float32]]
    facts: ModelFacts

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(path, shape) for path, shape, _, _ in self.leaves]


def _read(path: Path) -> _Part:
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(
                    f"{path} is no part of a model: zmqtrain merge takes the files model-I-of-M.safetensors"
                )
            facts: dict[str, Any] = json.loads(metadata["part"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        leaves = [
            (str(name), tuple(int(size) for size in shape), int(start), int(stop))
            for name, shape, start, stop in facts["leaves"]
        ]
        shard, masters, version = (int(facts[name]) for name in ("shard", "masters", "version"))
        if not 0 <= shard < masters <= MOST_MASTERS or version < 0:
            raise ValueError(f"it says shard {shard} of {masters} masters, version {version}")
        for name, shape, start, stop in leaves:
            array = arrays.get(name, np.zeros(0, np.float32))
            if min(shape, default=0) < 0 or not 0 <= start <= stop <= prod(shape):
                raise ValueError(
                    f"it says that it holds the values {start} to {stop} of {name}, which is {list(shape)}"
                )
            if array.size != stop - start or array.dtype != np.float32:
                raise ValueError(f"it does not hold the values {start} to {stop} of {name} in float32")
        return _Part(path, str(facts["run"]), shard, masters, version, leaves, arrays, facts_from_metadata(metadata))
    except CheckpointError:
        raise
    except Exception as error:  # whatever its bytes make of the reader, it is no part
        raise CheckpointError(f"{path} cannot be read: {str(error)[:500] or type(error).__name__}") from error


def _find(place: Path) -> Path:
    """Return the part's file: `place` itself, or the one in that folder."""
    if place.is_file():
        return place
    found = sorted(place.glob("model-*-of-*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"there are several parts in {place} ({names}): name the files, not the folder")
    raise CheckpointError(
        f"there is no part of a model in {place}: a master writes it to its --checkpoint folder when it ends (with the "
        "run, or at Ctrl-C); start that master again on the folder, and end it"
    )


def merge_parts(places: Sequence[Path], out: Path) -> int:
    """Write the model that these parts are together to `out`; return how many values it has.

    places: per master its file, or the folder that this is in, in any order; or the folder of `zmqtrain local`, which
    has theirs.  Says of which version each part is: masters release on their own, but one that stood still is old.
    Raises CheckpointError if one is missing, there twice, of another run or model, or cannot be read.
    """
    parts = [_read(_find(inside)) for place in places for inside in sorted(place.glob("shard-*")) or [place]]
    if not parts:
        raise CheckpointError("no parts are given: name the --checkpoint folder of every master")
    first = parts[0]
    seen: dict[int, Path] = {}
    for part in parts:
        for what, ours, theirs in (
            ("run", first.run, part.run),
            ("number of masters", first.masters, part.masters),
            ("model", first.shapes, part.shapes),
        ):
            if ours != theirs:
                values = "" if what == "model" else f": {ours} and {theirs}"
                raise CheckpointError(f"{first.path} and {part.path} are not of the same {what}{values}")
        if part.shard in seen:
            raise CheckpointError(f"{seen[part.shard]} and {part.path} are both of shard {part.shard}")
        seen[part.shard] = part.path
    if missing := [str(shard) for shard in range(first.masters) if shard not in seen]:
        shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        raise CheckpointError(
            f"of the {first.masters} shards of {first.run} these are missing: {shown}; name the "
            "--checkpoint folders of their masters too"
        )
    parts.sort(key=lambda part: part.shard)
    versions = ", ".join(f"{part.version} (shard {part.shard})" for part in parts)
    logger.info("the parts are of the versions %s", versions)
    model = _join(parts)
    write_model(out, model, replace(first.facts, version=min(part.version for part in parts)))
    return sum(array.size for array in model.values())


def join_parts(model: ModelSpec, parts: Sequence[Mapping[str, NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
    """Return the whole leaves of a model of which each of several masters has a part: by shard, flat or whole."""
    joined = {}
    for leaf in model:
        values = np.concatenate([part[leaf.path].reshape(-1) for part in parts])
        if values.size != leaf.values:
            raise CheckpointError(f"of the leaf {leaf} the masters have {values.size} values")
        joined[leaf.path] = values.reshape(leaf.shape)
    return joined


def _join(parts: Sequence[_Part]) -> dict[str, NDArray[np.float32]]:
    model = {}
    for index, (name, shape) in enumerate(parts[0].shapes):
        held, filled = [], 0
        for part in parts:
            _, _, start, stop = part.leaves[index]
            if stop > start:
                if start != filled:
                    raise CheckpointError(f"the values of {name} from {filled} on are not what {part.path} holds next")
                held.append(part.arrays[name].reshape(-1))
                filled = stop
        if filled != prod(shape):  # before room is made for them
            raise CheckpointError(f"the values of {name} from {filled} on are in none of the parts")
        model[name] = np.concatenate([*held, np.zeros(0, np.float32)]).reshape(shape)
    return model
