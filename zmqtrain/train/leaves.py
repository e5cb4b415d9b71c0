"""Trees of arrays on the host and back, leaves in their flattening order.

A leaf's name is its path in the tree: `describe_model` says it of a model, and a model file has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ModelMismatch
from zmqtrain.core.types import ModelSpec, Part


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


SHOWN = 3
"""So many leaves an error names at most."""


def host_leaves(params: Any) -> list[NDArray[Any]]:
    """Return the leaves of a tree as numpy arrays, each in its own shape and dtype."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def host_state(state: Any) -> list[NDArray[Any]]:
    """Return the leaves of any state as numpy arrays; typed random keys as the numbers that they are made of."""
    return [np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in jax.tree.leaves(state)]


def placed_like(state: Any, arrays: Sequence[Any]) -> Any:
    """Return a tree like `state` of what `host_state` made of another, in the shapes, dtypes and places of its own."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [_like(leaf, new) for leaf, new in zip(leaves, arrays, strict=True)])


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(leaf: Any, values: Any) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(values), impl=jax.random.key_impl(leaf))
    like = np.asarray(leaf)
    values = np.array(values, like.dtype).reshape(like.shape)
    tied = isinstance(leaf, jax.Array) and leaf.committed
    return jax.device_put(values, leaf.sharding) if tied else jnp.asarray(values)


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
    if isinstance(leaf, bool | int | float):
        return type(leaf)(values.item())
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(values, leaf.dtype)
    own = np.array(values, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    tied = sharding is not None and getattr(leaf, "committed", True)
    return jax.device_put(own, sharding) if tied else jnp.asarray(own)
