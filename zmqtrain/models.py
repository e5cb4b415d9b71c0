"""Model files and trees of jax arrays: `zmqtrain.load_model`, `save_model`. `model_files` does the rest without jax.

Rule: leaves are found by their names, which are their paths in the tree; nothing is guessed from an order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain.checkpoint.model_files import ModelFacts, read_model, write_model
from zmqtrain.core.errors import CheckpointError, ModelMismatch
from zmqtrain.train.leaves import fill_tree, host_leaves, is_float
from zmqtrain.train.step import describe_model


def load_model(path: str | Path, like: Any = None) -> Any:
    """Return the parameters of a model file, as a broker and `zmqtrain export` write it, in a tree of the form of
    `like`.

        params = zmqtrain.load_model("model.safetensors", like=params)

    like: the tree that was trained, or one of the same form; its values are not used. Any pytree will do: nested dicts,
    the variables of flax.linen, a state of flax.nnx (`nnx.state(model, nnx.Param)`, then `nnx.update(model, ...)`), an
    equinox module with its functions, or only the shapes (`jax.eval_shape`). Leaves that are no float arrays and not
    in the file stay as they are. None: a dict of numpy arrays by name.
    Raises ModelMismatch, which names the leaf, for one that is missing, one too many, another shape or another dtype;
    CheckpointError for a file that cannot be read.
    """
    arrays, facts = read_model(Path(path))
    return arrays if like is None else fill_tree(like, arrays, facts.leaves, str(path))


def save_model(path: str | Path, params: Any) -> None:
    """Write any pytree of float arrays as a model file, from which a broker can begin a run (`--from FILE`).

    The file is whole or not there. Raises ModelMismatch for a leaf that is no float array, CheckpointError.
    """
    spec = describe_model(params)
    for leaf in spec:
        if not is_float(leaf.dtype):
            raise ModelMismatch(f"the leaf {leaf} is not a float array: keep it out of the tree", leaf.path)
    if len({leaf.path for leaf in spec}) < len(spec):
        raise CheckpointError("two leaves of the tree have the same name: rename one")
    values = [np.array(leaf, np.float32) for leaf in host_leaves(params)]
    write_model(Path(path), {leaf.path: one for leaf, one in zip(spec, values, strict=True)}, ModelFacts(leaves=spec))
