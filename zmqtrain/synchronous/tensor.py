"""Layers of which each process has a part: tensor parallelism over a `Communicator`, for a layer that fits on no PC.

    column   each process has some columns of the weights, and gets these columns of the outputs
    row      each process has some rows of the weights and those columns of the inputs; the outputs are summed over all

    y = W2 f(W1 x):   hidden = f(parts.column(x, own_columns_of_W1));   y = parts.row(hidden, own_rows_of_W2)

Rule 1: inputs of `column` and outputs of `row` are whole, and the same on all processes; between the two each process
has its own part, on which any function that goes value by value may act. So are gradients: `jax.grad` gives each
process the gradient of its own weights, equal to that part of the whole layer's.
Rule 2: one sum over all processes in the forward pass (in `row`), one in the backward pass (in `column`); each is an
allreduce of the size of the activations, whatever the size of the weights.
Rule 3: these functions speak with other PCs, so they run outside of `jax.jit`, in the order in which Python calls them;
that is the same on all processes. Jit what lies between.
Source: Shoeybi et al. 2019, Megatron-LM, sec. 3 (its f is `enter`, its g is `leave`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.collectives.communicator import Communicator
from zmqtrain.core.errors import ConfigError


class TensorParallel:
    """The layers of one group of processes. comm: the processes, which all make the same calls in the same order.

    A lost process raises PeerLost, a call that differs CollectiveMismatch, as every call of a communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._enter, self._leave = jax.custom_vjp(_same), jax.custom_vjp(self._sum)
        self._enter.defvjp(lambda x: (x, None), lambda _, error: (self._sum(error),))
        self._leave.defvjp(lambda x: (self._sum(x), None), lambda _, error: (error,))

    def share(self, whole: Any, axis: int) -> Any:
        """Return this process's part of an array, cut along one axis: the first rank's is the first part.

        Raises ConfigError where the axis does not divide into as many equal parts as there are processes.
        """
        length, size = whole.shape[axis], self.comm.size
        if length % size:
            raise ConfigError(
                f"an axis of {length} does not divide into {size} equal parts: give the layer a width that is a "
                f"multiple of {size}, or take another number of processes"
            )
        own = slice(length // size * self.comm.rank, length // size * (self.comm.rank + 1))
        return whole[(slice(None),) * (axis % whole.ndim) + (own,)]

    def enter(self, x: jax.Array) -> jax.Array:
        """Return x, which is the same on all processes; in the backward pass its gradient is summed over them."""
        result: jax.Array = self._enter(x)
        return result

    def leave(self, x: jax.Array) -> jax.Array:
        """Return the sum of the x of all processes; in the backward pass each has the gradient as it is."""
        result: jax.Array = self._leave(x)
        return result

    def column(self, x: jax.Array, weights: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Return this process's columns of a dense layer's outputs.

        x: [..., inputs], the same on all processes.  weights: [inputs, outputs / size], this process's columns.  bias:
        [outputs / size], of the same columns.  Returns [..., outputs / size].
        """
        _check("column", x, weights)
        made = self.enter(x) @ weights
        return made if bias is None else made + bias

    def row(self, x: jax.Array, weights: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Return all outputs of a dense layer, the same on all processes.

        x: [..., inputs / size], this process's columns of the inputs, as `column` gives them.  weights:
        [inputs / size, outputs], this process's rows.  bias: [outputs], the whole one on each process: it is added
        once.  Returns [..., outputs].
        """
        _check("row", x, weights)
        made = self.leave(x @ weights)
        return made if bias is None else made + bias

    def _sum(self, x: Any) -> jax.Array:
        if isinstance(x, jax.core.Tracer):
            raise ConfigError(
                "a layer over several PCs cannot run inside jax.jit, jax.lax.scan, jax.vmap or jax.checkpoint: call "
                "it, and jax.grad of it, outside, and jit the parts of the model that lie between"
            )
        return jnp.asarray(self.comm.allreduce(np.asarray(x)))


def _same(x: Any) -> Any:
    return x


def _check(call: str, x: Any, weights: Any) -> None:
    if x.shape[-1] != weights.shape[0]:
        raise ConfigError(
            f"{call}: x has {x.shape[-1]} columns and the weights have {weights.shape[0]} rows, and x @ weights needs "
            "as many. Has this process its own part of the weights (`share`)?"
        )
