"""`stage_end`, the mark at which a loss may be cut: an identity that stays visible in the traced computation.

A mark changes no value. It passes through grad, vmap, jit and scan, so that a marked model trains on one PC as before.
Inside the body of `lax.scan` it marks the end of each iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

Tree = TypeVar("Tree")

stage_end_p: Any = Primitive("stage_end")  # its methods have no types
stage_end_p.multiple_results = True


def stage_end(values: Tree) -> Tree:
    """Return `values` (a pytree of arrays, of any shapes) unchanged, and mark that a stage may end here.

    `zt.split` cuts at marks: what the loss computed before the mark is one stage, what follows is the next. Put it
    after a layer: `h = zt.stage_end(layer(h))`.
    """
    leaves, tree = jax.tree.flatten(values)
    marked: Tree = jax.tree.unflatten(tree, stage_end_p.bind(*leaves))
    return marked


def has_mark(equation: JaxprEqn) -> bool:
    """Whether an equation is a mark, or a function that it calls has one."""
    return equation.primitive is stage_end_p or any(
        has_mark(inner) for jaxpr in jaxprs_in_params(equation.params) for inner in jaxpr.eqns
    )


def inner_equations(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield the equations of the functions that an equation calls, at any depth."""
    for jaxpr in jaxprs_in_params(equation.params):
        for inner in jaxpr.eqns:
            yield inner
            yield from inner_equations(inner)


def called_function(equation: JaxprEqn, parameter: str) -> tuple[Jaxpr, Sequence[Any]]:
    """Return the function that an equation calls, and its constants."""
    called = equation.params[parameter]
    return (called.jaxpr, called.consts) if isinstance(called, ClosedJaxpr) else (called, ())


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return stage_end_p.bind(*primals), list(tangents)


def _transpose(cotangents: Sequence[Any], *_: Any) -> list[Any]:
    return list(cotangents)


def _batch(arguments: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    return stage_end_p.bind(*arguments), axes


def _identity(*values: Any) -> list[Any]:
    return list(values)


def _lower(_: Any, *values: Any) -> list[Any]:
    return list(values)


stage_end_p.def_impl(_identity)
stage_end_p.def_abstract_eval(_identity)
ad.primitive_jvps[stage_end_p] = _jvp
ad.primitive_transposes[stage_end_p] = _transpose
batching.primitive_batchers[stage_end_p] = _batch
mlir.register_lowering(stage_end_p, _lower)
