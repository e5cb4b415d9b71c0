"""Model files: the shared parameters of a run as one safetensors file, with metadata that say where they come from.

Rule 1: a leaf's name in the file is its path in the tree that was trained (`NAMES`); its values are float32, whatever
the leaf's own dtype is, which the metadata say.  Rule 2: the metadata hold all that a broker needs to begin a run from
the file: the leaves in the order of the tree, their shapes and dtypes.
Rule 3: no jax here: the broker reads and writes these files. `load_model` puts the leaves back into a tree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.checkpoint.files import open_arrays, write_arrays, write_in_parts
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.core.installed import package_version
from zmqtrain.core.types import LeafSpec, ModelSpec, Version, parts_of, piece_of, spec_from_plain, spec_to_plain

logger = logging.getLogger(__name__)

FORMAT = "zmqtrain model 1"
NAMES = (
    "a name is the leaf's path in the tree of parameters, as jax.tree_util.keystr(path, simple=True, separator='/') "
    "writes it; zmqtrain.load_model(file, like=params) puts the leaves back into a tree"
)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the metadata of a model file say.

    run: its id, "" for parameters that no run has made.  version: how many aggregates they are made of.  samples: that
    were trained on.  program, program_arguments: as the broker was given them.  evaluation: the scores on held-out data
    at evaluation_version, which may be a little older ({}: nobody has evaluated).  leaves: the leaves in the order of
    the tree, with their own dtypes.  newest: the run's last version when the file was written.
    zmqtrain: the version of this package that wrote the file.
    """

    run: str = ""
    version: Version = -1
    newest: Version = -1
    samples: int = 0
    program: str = ""
    program_arguments: str = ""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluation_version: Version = -1
    leaves: ModelSpec = ()
    zmqtrain: str = field(default_factory=package_version)

    @property
    def description(self) -> str:
        """What the file holds, in words for people."""
        what = f"version {self.version} of {self.run}" if self.run else "parameters of no run"
        scores = ", ".join(f"{name} {value:.6g}" for name, value in self.evaluation.items())
        if scores:
            what += f", held-out {scores}"
            what += f" (at version {self.evaluation_version})" if self.evaluation_version != self.version else ""
        return what


def facts_from_state(state: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a hub's parameters. state: of the hub, as its checkpoint holds it, at their version."""
    settings = state["settings"]
    return ModelFacts(
        run=str(state["run"]),
        version=int(state["version"]),
        newest=int(state["version"]),
        samples=int(state["samples"]),
        program=str(settings.get("program", "")),
        program_arguments=str(settings.get("program_arguments", "")),
        evaluation=dict(state["scores"]),
        evaluation_version=int(state["score_version"]),
        leaves=spec_from_plain(state["model"]),
    )


def facts_to_metadata(facts: ModelFacts) -> dict[str, str]:
    """Return the facts as the metadata of a safetensors file, which are texts."""
    scores = {name: float(value) for name, value in facts.evaluation.items() if isfinite(value)}
    leaves = json.dumps(spec_to_plain(facts.leaves), separators=(",", ":"))
    of_files = {"format": FORMAT, "evaluation": json.dumps(scores), "leaves": leaves, "names": NAMES}
    return {name: str(value) for name, value in vars(facts).items()} | of_files


def facts_from_metadata(metadata: Mapping[str, str]) -> ModelFacts:
    """Read what `facts_to_metadata` wrote; {} gives the facts of which nothing is known. Raises ValueError."""
    try:
        return ModelFacts(
            run=metadata.get("run", ""),
            version=int(metadata.get("version", -1)),
            newest=int(metadata.get("newest", metadata.get("version", -1))),
            samples=int(metadata.get("samples", 0)),
            program=metadata.get("program", ""),
            program_arguments=metadata.get("program_arguments", ""),
            evaluation={str(k): float(v) for k, v in json.loads(metadata.get("evaluation", "{}")).items()},
            evaluation_version=int(metadata.get("evaluation_version", -1)),
            leaves=spec_from_plain(json.loads(metadata.get("leaves", "[]"))),
            zmqtrain=metadata.get("zmqtrain", ""),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"its metadata are not those of a model file: {error}") from error


def write_model(path: Path, arrays: Mapping[str, NDArray[Any]], facts: ModelFacts) -> None:
    """Write parameters by leaf path to one safetensors file, atomically: whole leaves, also of a model that is cut for
    pipelines. Raises CheckpointError."""
    if parts_of(facts.leaves):
        leaves, arrays = joined_pieces(facts.leaves, arrays)
        facts = replace(facts, leaves=leaves)
    write_arrays(path, arrays, facts_to_metadata(facts))


def joined_pieces(pieces: ModelSpec, arrays: Mapping[str, NDArray[Any]]) -> tuple[ModelSpec, dict[str, NDArray[Any]]]:
    """Return the leaves of a model that is cut for pipelines, whole and in the order of the tree, and their values.

    arrays: of the pieces, by path.
    """
    of_leaf: dict[int, list[tuple[tuple[int, int], LeafSpec, str]]] = {}
    for leaf in pieces:
        piece = piece_of(leaf.path)
        assert piece is not None
        of_leaf.setdefault(piece.number, []).append((piece.rows or (0, 0), leaf, piece.path))
    whole, joined = [], {}
    for _, found in sorted(of_leaf.items()):
        found.sort(key=lambda one: one[0])
        first, path = found[0][1], found[0][2]
        values = [np.asarray(arrays[leaf.path]) for _, leaf, _ in found]
        joined[path] = values[0] if len(values) == 1 else np.concatenate(values)
        whole.append(LeafSpec(path, joined[path].shape, first.dtype))
    return tuple(whole), joined


def write_model_in_parts(
    path: Path, leaves: ModelSpec
) -> AbstractContextManager[Callable[[str, int, NDArray[np.float32]], None]]:
    """Write parameters to one model file, of which only a part is in memory at a time; see `write_in_parts`."""
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    return write_in_parts(path, shapes, facts_to_metadata(ModelFacts(leaves=leaves)))


def read_model(path: Path) -> tuple[dict[str, NDArray[Any]], ModelFacts]:
    """Return the parameters of a safetensors file by name, and its facts.

    A file that another program wrote has no facts.
    Raises CheckpointError for a file that cannot be read, for a part of a model, and for a checkpoint.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: name the file in it, as {path / 'model.safetensors'}")
    try:
        metadata, arrays = open_arrays(path)
        if "part" in metadata:
            raise CheckpointError(
                f"{path} is one broker's part of a model: make the whole of all parts with `zmqtrain merge`"
            )
        if "state" in metadata:
            raise CheckpointError(
                f"{path} is a checkpoint, not a model: `zmqtrain export {path.parent}` takes the model out of it"
            )
        facts = facts_from_metadata(metadata if metadata.get("format") == FORMAT else {})
        _check_leaves(arrays, facts.leaves)
        return arrays, facts
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except Exception as error:  # whatever its bytes make of the reader, it is no model
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {str(error)[:500]}") from error


@dataclass(frozen=True)
class Beginning:
    """The parameters that a run begins with, read from a file: described in the order of the tree, and their values."""

    path: Path
    model: ModelSpec
    leaves: Sequence[NDArray[np.float32]]
    facts: ModelFacts


def read_beginning(path: Path, program: str = "", program_arguments: str = "") -> Beginning:
    """Return what a run of this program begins with, from the model file at `path`.

    Whether the shapes fit what the program's arguments make is for the nodes to say, which have the program.
    Raises CheckpointError for a file that cannot be read, ConfigError for one of another program, of which the order of
    the leaves is not known, or which holds values that are not finite.
    """
    arrays, facts = read_model(path)
    if not facts.leaves:
        raise ConfigError(
            f"{path} does not say in which order its leaves stand in their tree, as model files of zmqtrain do: load "
            "it in Python, and write the tree of parameters with zmqtrain.save_model(file, params)"
        )
    if facts.program and program and facts.program != program:
        raise ConfigError(
            f"{path} holds parameters of the program {facts.program!r}, and the run trains {program!r}: say --program "
            f"{facts.program}, or name another file"
        )
    leaves = []
    for leaf in facts.leaves:
        values = np.asarray(arrays[leaf.path], np.float32)
        if not np.isfinite(values).all():
            raise ConfigError(f"{path}: the leaf {leaf.path!r} holds values that are not finite: no run can begin so")
        leaves.append(values)
    if facts.program and facts.program_arguments != program_arguments:
        logger.warning(
            "%s was trained with the program arguments %r, this run has %r: the nodes refuse it if the shapes differ",
            *(path, facts.program_arguments, program_arguments),
        )
    return Beginning(path, facts.leaves, leaves, facts)


def _check_leaves(arrays: Mapping[str, NDArray[Any]], leaves: ModelSpec) -> None:
    if not leaves:
        return
    there = {name: array.shape for name, array in arrays.items()}
    said = {leaf.path: leaf.shape for leaf in leaves}
    if there != said:
        name = next(name for name in {**said, **there} if there.get(name) != said.get(name))
        raise ValueError(f"its metadata say that the leaf {name!r} is {said.get(name)}, and it is {there.get(name)}")
