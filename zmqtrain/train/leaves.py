"""Trees of arrays on the host and back, leaves in their flattening order; for checkpoints, model files and other nodes.

The same bits come back, on the devices of a tree of the same form. A leaf's name is its path in the tree:
`describe_model` says it of a model, and a model file has it. `pack_tree` copies at once, because the loop may donate
its buffers in the next step; there a dtype unknown to numpy is bytes, and a Python number an array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ModelMismatch
from zmqtrain.core.types import LeafSpec, ModelSpec, Part, describe_mismatch, spec_from_plain, spec_to_plain

NUMPY_KINDS = "biuf"
"""The kinds of dtype that are saved as they are."""

SHOWN = 3
"""So many leaves an error names at most."""


def whole_leaves(model: ModelSpec, parts: Sequence[Part], anchor: Sequence[Any] = ()) -> list[Any]:
    """Return the leaves, float32 on the host and in their shapes, with these parts in their places.

    anchor: what the leaves are elsewhere; not needed if the parts are all of them.
    """
    known = [0] * len(model)
    for part in parts:
        known[part.leaf] += part.values.size
    leaves = []
    for index, leaf in enumerate(model):
        whole = known[index] == leaf.values or not anchor
        leaves.append(np.zeros(leaf.shape, np.float32) if whole else np.array(anchor[index], np.float32, order="C"))
    for part in parts:
        leaves[part.leaf].reshape(-1)[part.start :][: part.values.size] = part.values.reshape(-1)
    return leaves


def host_leaves(params: Any) -> list[NDArray[Any]]:
    """Return the leaves of a tree as numpy arrays, each in its own shape and dtype; typed random keys as the numbers
    that they are made of."""
    return [np.asarray(_data(leaf)) for leaf in jax.tree.leaves(params)]


def placed_like(state: Any, arrays: Sequence[Any]) -> Any:
    """Return a tree like `state` of what `host_leaves` made of another, in the shapes, dtypes and places of its own."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [_placed(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)])


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _placed(like: Any, values: NDArray[Any]) -> Any:
    """Return these values as what `like` is, where it is: a number, a key, or an array of numpy's or jax's."""
    if isinstance(like, bool | int | float):
        return type(like)(values.item())
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(values), impl=jax.random.key_impl(like))
    own = np.array(values, like.dtype).reshape(np.shape(like))  # jax may keep this very memory
    if isinstance(like, np.ndarray | np.generic):
        return own
    sharding = getattr(like, "sharding", None)
    tied = sharding is not None and getattr(like, "committed", True)
    return jax.device_put(own, sharding) if tied else jnp.asarray(own)


# ---------------------------------------------------------------------- in checkpoints


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
    each = zip(jax.tree.leaves(like), arrays, strict=True)
    return placed_like(like, [_unpacked(leaf, array) for leaf, array in each])


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


def _packed(leaf: Any, spec: LeafSpec) -> NDArray[Any]:
    array = np.array(leaf)
    if array.dtype.kind in NUMPY_KINDS:
        return array
    if array.dtype.kind in "OSU":
        raise ModelMismatch(f"the leaf {spec} is no array and no number, and cannot be saved", spec.path)
    return np.frombuffer(array.tobytes(), np.uint8).copy()


def _unpacked(like: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Return the array, of its own dtype where it was saved as bytes."""
    if _is_key(like) or isinstance(like, bool | int | float) or array.dtype == like.dtype:
        return array
    return np.frombuffer(array.tobytes(), like.dtype).reshape(np.shape(like))


# ---------------------------------------------------------------------- by name


def is_float(dtype: Any) -> bool:
    """Return whether a dtype, or its name, is of floats: what is trained; bfloat16 is one."""
    return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))


def fill_tree(like: Any, arrays: Mapping[str, NDArray[Any]], said: ModelSpec, where: str) -> Any:
    """Return a tree of the form of `like` with these arrays in the places of their names.

    like: any pytree of arrays, or of their shapes (`jax.eval_shape`): dicts, flax variables, an nnx state or module, an
    equinox module. A leaf that is no float array and not among `arrays` stays as it is: a function, a counter, a key.
    said: which dtypes the leaves had that the arrays come from; () where that is not known.  where: the arrays come
    from there, for people.
    Raises ModelMismatch, which names the leaf, for one that is missing, one too many, another shape or another dtype.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ModelMismatch(f"two leaves of the tree have the name {name!r}: rename one", name)
    missing = [name for name, (_, leaf) in zip(names, leaves, strict=True) if name not in arrays and _is_float(leaf)]
    extra = [name for name in arrays if name not in names]
    if missing or extra:
        raise ModelMismatch(_explain(missing, extra, arrays, names, where), (missing or extra)[0])
    dtypes = {leaf.path: leaf.dtype for leaf in said}
    filled = []
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if name not in arrays:
            filled.append(leaf)
            continue
        filled.append(_in_place_of(leaf, arrays[name], name, dtypes.get(name, ""), where))
    return jax.tree.unflatten(tree, filled)


def _explain(
    missing: Sequence[str], extra: Sequence[str], arrays: Mapping[str, Any], names: Sequence[str], where: str
) -> str:
    """Return which leaves tree and file do not share, and which `like` to give, if that is clear."""
    parts = []
    if missing:
        parts.append(f"the tree has {_named(missing)}, which {where} does not hold")
    if extra:
        parts.append(f"{where} holds {_named(extra)}, which the tree has not")
    text = "; ".join(parts)
    heads = {name.partition("/")[0] for name in arrays}
    if len(heads) == 1 and {name.partition("/")[2] for name in arrays} == set(names):
        head = heads.pop()
        return f"{text}. The tree that was trained had them under {head!r}: say like={{{head!r}: ...}}"
    if len(heads := {name.partition("/")[0] for name in names}) == 1 and set(arrays) == {
        name.partition("/")[2] for name in names
    }:
        head = heads.pop()
        return f"{text}. The tree that was trained had them without {head!r}: say like=params[{head!r}]"
    return f"{text}. Give the tree that was trained, or one of the same form (like=...)"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:SHOWN]))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"the {'leaf' if len(names) == 1 else 'leaves'} {shown}{more}"


def _is_float(leaf: Any) -> bool:
    """Whether a leaf is one that is trained; a number of Python is."""
    dtype = getattr(leaf, "dtype", None)
    return isinstance(leaf, float) if dtype is None else bool(jnp.issubdtype(dtype, jnp.floating))  # or a key's


def _in_place_of(leaf: Any, values: NDArray[Any], name: str, said: str, where: str) -> Any:
    if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float)):
        raise ModelMismatch(f"the leaf {name!r} of the tree is no array: {type(leaf).__name__}", name)
    shape = tuple(np.shape(leaf))
    if values.shape != shape:
        text = f"the leaf {name!r} is {list(values.shape)} in {where} and {list(shape)} in the tree"
        raise ModelMismatch(f"{text}: was the program started with other sizes?", name)
    of_file, of_tree = said or values.dtype.name, jnp.result_type(leaf).name
    if of_file != of_tree:
        text = f"the leaf {name!r} is {of_file} in {where} and {of_tree} in the tree"
        raise ModelMismatch(f"{text}: convert the one that is not meant (jax.tree.map, astype)", name)
    return _placed(leaf, values)
