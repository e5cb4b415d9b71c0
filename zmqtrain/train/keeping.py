"""Copies of a loop's parameters and state for checkpoints, leaf by leaf under its path, and back.

The copy is made at once, because the loop may donate its buffers in the next step. The same bits come back, on the
devices of a tree of the same form. A dtype unknown to numpy is saved as bytes, a typed random key as its data, a Python
number as an array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ModelMismatch
from zmqtrain.core.types import LeafSpec, ModelSpec, describe_mismatch, spec_from_plain, spec_to_plain
from zmqtrain.train.contributions import ContributionTracker, SyncSchedule

NUMPY_KINDS = "biuf"
"""The kinds of dtype that are written as they are."""


def describe_tree(tree: Any) -> ModelSpec:
    """Return path, shape and dtype of every leaf, of any kind; a path that comes twice is numbered."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    specs: list[LeafSpec] = []
    seen: dict[str, int] = {}
    for keys, leaf in leaves:
        path = jax.tree_util.keystr(keys, simple=True, separator="/") or "value"
        seen[path] = seen.get(path, 0) + 1
        if seen[path] > 1:
            path = f"{path}#{seen[path]}"
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        specs.append(LeafSpec(path, tuple(np.shape(leaf)), str(dtype)))
    return tuple(specs)


def pack_tree(tree: Any) -> list[NDArray[Any]]:
    """Return a copy of every leaf on the host, of a dtype that numpy has. Raises ModelMismatch for a leaf that is no
    array."""
    leaves = [_data(leaf) for leaf in jax.tree.leaves(tree)]
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return [_packed(leaf, spec) for leaf, spec in zip(leaves, describe_tree(tree), strict=True)]


def unpack_tree(like: Any, saved: ModelSpec, arrays: Sequence[NDArray[Any]], what: str) -> Any:
    """Return a tree of the form of `like`, and where that lies, with the values that `pack_tree` gave.

    saved: their `describe_tree`.  what: they are, for people.  Raises ModelMismatch, naming the leaf.
    """
    if (difference := describe_mismatch(saved, describe_tree(like))) is not None:
        raise ModelMismatch(f"the checkpoint's {what} are not this program's: {difference[1]}", difference[0])
    leaves, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(tree, [_placed(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)])


def pack_trees(trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return what each tree is made of, as JSON can hold it, and a copy of all their leaves by name, as `pack_tree`."""
    trees = dict(sorted(trees.items()))  # the order in which jax has them
    specs = {name: describe_tree(tree) for name, tree in trees.items()}
    names = [f"{name}/{leaf.path}" for name, spec in specs.items() for leaf in spec]
    arrays = pack_tree(trees)
    return {name: spec_to_plain(spec) for name, spec in specs.items()}, dict(zip(names, arrays, strict=True))


def kept_leaves(
    name: str, trees: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> tuple[ModelSpec, list[NDArray[Any]]]:
    """Return what the tree of this name was made of, and its leaves, of what `pack_trees` gave."""
    spec = spec_from_plain(trees[name])
    return spec, [arrays[f"{name}/{leaf.path}"] for leaf in spec]


@dataclass(frozen=True)
class KeptLoop:
    """The state of a training loop in a checkpoint.

    own: its parameters, and anchor: the shared ones, leaf by leaf; state: what else of it was given; tracker, schedule:
    as their `to_plain` wrote them; adopted: whether `state` is of before parameters that were adopted.
    """

    own: Sequence[Any]
    anchor: Sequence[NDArray[Any]]
    state: Any
    tracker: dict[str, Any]
    schedule: dict[str, Any]
    adopted: bool


def pack_loop(
    params: Any, anchor: Any, state: Any, tracker: ContributionTracker, schedule: SyncSchedule, adopted: bool
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return what a checkpoint is to hold of a loop, as `Keeping.save` takes it: copies of all, on the host.

    params, anchor: in the caller's tree.  Raises ModelMismatch for what is no array.
    """
    trees, arrays = pack_trees({"params": params, "anchor": anchor, "state": state})
    return {
        "trees": trees, "account": tracker.to_plain(), "rhythm": schedule.to_plain(), "adopted": adopted,
    }, arrays  # fmt: skip


def unpack_loop(params: Any, state: Any, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> KeptLoop:
    """Return what `pack_loop` gave. params, state: of the form of those. Raises ModelMismatch, naming the leaf."""
    trees = facts["trees"]
    own = unpack_tree(params, *kept_leaves("params", trees, arrays), "parameters")
    state = unpack_tree(state, *kept_leaves("state", trees, arrays), "loop's state (its optimizer's, for one)")
    anchor = kept_leaves("anchor", trees, arrays)[1]
    return KeptLoop(jax.tree.leaves(own), anchor, state, facts["account"], facts["rhythm"], facts["adopted"])


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _packed(leaf: Any, spec: LeafSpec) -> NDArray[Any]:
    array = np.array(leaf)
    if array.dtype.kind in NUMPY_KINDS:
        return array
    if array.dtype.kind in "OSU":
        raise ModelMismatch(f"the leaf {spec} is no array and no number, and cannot be saved", spec.path)
    return np.frombuffer(array.tobytes(), np.uint8).copy()


def _placed(like: Any, array: NDArray[Any]) -> Any:
    if isinstance(like, bool | int | float):
        return type(like)(array.item())
    if _is_key(like):
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=jax.random.key_impl(like))
    dtype = np.dtype(like.dtype)
    if array.dtype != dtype:
        array = np.frombuffer(array.tobytes(), dtype).reshape(np.shape(like))
    own = np.array(array)  # jax may keep this very memory
    if not isinstance(like, jax.Array):
        return own
    return jax.device_put(own, like.sharding) if like.committed else jax.numpy.asarray(own)
