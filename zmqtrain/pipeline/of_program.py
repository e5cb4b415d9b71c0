"""What a pipeline of the command line follows from its program: optimizer of a stage, micro-batches, how many PCs."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from zmqtrain.core.errors import ConfigError
from zmqtrain.train.program import Program

MOST_AUTO = 64
"""Of more PCs than this no pipeline is made by itself."""
MARGIN = 1.25
"""A stage needs more than its share of parameters, gradients and optimizer state: carries, and what passes compute."""
MICRO_BATCHES_PER_PC = 4


def optimizer_of(program: Program) -> tuple[optax.GradientTransformation, float]:
    """Return a program's optimizer for stages, and the norm to which all gradients together are clipped (0: none)."""
    of_stage: Any = getattr(program, "stage_optimizer", None)
    return (program.optimizer(), 0.0) if of_stage is None else of_stage()


def fewest_pcs(program: Program, optimizer: optax.GradientTransformation | None, memory_bytes: int) -> int:
    """Return of how few PCs like this one a pipeline can hold a program's model. optimizer: if its state is in that
    memory. Raises ConfigError if it takes more than MOST_AUTO."""
    params = jax.eval_shape(program.init, 0)
    state = () if optimizer is None else jax.eval_shape(optimizer.init, params)
    held = sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, params, state)))
    fewest: int = max(1, math.ceil(MARGIN * held / memory_bytes))
    if fewest > MOST_AUTO:
        what = "parameters and gradients" if optimizer is None else "parameters, gradients and optimizer state"
        raise ConfigError(
            f"{what} take {held / 1e9:.1f} GB, and a stage may use "
            f"{memory_bytes / 1e9:.2f} GB here: that is a pipeline of {fewest} PCs, and `auto` makes none of more than "
            f"{MOST_AUTO}"
        )
    return fewest


def micro_batches_of(batch: Any, pcs: int) -> int:
    """Return into how many micro-batches a batch is cut: the fewest that are four for each PC, or as many as can be."""
    rows = next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if leaf.shape), 1)
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    return next((count for count in divisors if count >= MICRO_BATCHES_PER_PC * pcs), rows)
