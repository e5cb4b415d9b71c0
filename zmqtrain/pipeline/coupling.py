"""Whether an optimizer can be cut as a model is: its update of a leaf must not look at other leaves.

A stage holds its own leaves only, so that an optimizer that looks at all of them (a clip by the global norm) would see
a part, and do something else than on one PC, without an error. The traced update says which leaves it looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core import primitives as jax_primitives

from zmqtrain.core.errors import ConfigError
from zmqtrain.pipeline.marks import called_function
from zmqtrain.pipeline.trace import OPENED
from zmqtrain.train.leaves import describe_tree

Leaves = frozenset[int]
NONE: Leaves = frozenset()


def check_separable(optimizer: optax.GradientTransformation, params: Any) -> None:
    """Raise ConfigError if the update of one leaf depends on the gradient or the value of another.

    params: the whole tree, or its form (`jax.eval_shape`).  What the optimizer's state has taken from gradients counts.
    """
    params = jax.eval_shape(lambda tree: tree, params)
    paths = [spec.path for spec in describe_tree(params)]
    state = jax.eval_shape(optimizer.init, params)
    closed = jax.make_jaxpr(optimizer.update)(params, state, params)
    own = [frozenset([number]) for number in range(len(paths))]
    of_state = [NONE] * len(jax.tree.leaves(state))
    while True:
        found = _looks_at(closed.jaxpr, [*own, *of_state, *own])
        after = [before | new for before, new in zip(of_state, found[len(own) :], strict=True)]
        if after == of_state:
            break
        of_state = after
    for number, (path, leaves) in enumerate(zip(paths, found, strict=False)):
        if others := sorted(leaves - {number}):
            raise ConfigError(
                f"the optimizer's update of {path} looks at {paths[others[0]]}"
                + (f" and {len(others) - 1} other leaves" if len(others) > 1 else "")
                + ", and a stage of a pipeline holds only its own leaves. optax.clip_by_global_norm is such a "
                "transformation: leave it out, and have the stages clip by the norm of all gradients (clip_norm=1.0)"
            )


def check_clip_norm(clip_norm: float) -> float:
    """Return the norm to which all gradients together are clipped, 0 for none. Raises ConfigError for no such norm."""
    if not (isinstance(clip_norm, int | float) and 0 <= clip_norm < float("inf")):
        raise ConfigError(f"clip_norm is the largest norm of all gradients together, or 0: got {clip_norm!r}")
    return float(clip_norm)


def _looks_at(jaxpr: Jaxpr, inputs: Sequence[Leaves]) -> list[Leaves]:
    """Return, for each output of a function, the leaves that it depends on, given those of its inputs."""
    known: dict[Var, Leaves] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> Leaves:
        return NONE if isinstance(atom, Literal) else known.get(atom, NONE)

    for equation in jaxpr.eqns:
        outputs = _of_equation(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _of_equation(equation: JaxprEqn, inputs: list[Leaves]) -> list[Leaves]:
    if equation.primitive in OPENED:
        return _looks_at(called_function(equation, OPENED[equation.primitive])[0], inputs)
    if equation.primitive is jax_primitives.cond_p:
        chosen_by, *operands = inputs
        branches = [_looks_at(branch.jaxpr, operands) for branch in equation.params["branches"]]
        return [chosen_by.union(*each) for each in zip(*branches, strict=True)]
    return [NONE.union(*inputs)] * len(equation.outvars)
