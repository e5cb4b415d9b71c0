"""The forward computation of a loss as one flat list of equations, and what each value depends on.

Rule 1: functions that are only called (jit) are opened, so that a cut may lie inside them. Those with a derivative or a
memory of their own (custom_vjp, checkpoint) stay whole, as do loops; a checkpoint that holds a mark is opened.
Rule 2: a value depends on nothing (a constant), on parameters only, on data only, or on both: then it is an activation.
Only activations are computed once and travel from stage to stage. All else is computed again by each stage that needs
it, from the parameters that it holds and from its own copy of the batch: a cast, a transposed embedding, a mask,
positions, a dropout key. A value of data only that takes a matrix product is an activation, too: it is no small work.
Rule 3: what the loss does not need is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, gensym, jaxprs_in_params
from jax.extend.core import primitives as jax_primitives
from jax.extend.source_info_util import summarize

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import LeafSpec
from zmqtrain.pipeline.marks import called_function, has_mark, inner_equations, stage_end_p
from zmqtrain.train.leaves import describe_tree

Atom = Var | Literal
Loss = Callable[[Any, Any], Any]
"""loss_fn(params, batch) -> a scalar, as for jax.grad."""

OPENED = {
    jax_primitives.jit_p: "jaxpr",
    jax_primitives.closed_call_p: "call_jaxpr",
    jax_primitives.call_p: "call_jaxpr",
}
"""A primitive that only calls a function: the name of its parameter that holds the function."""
PRODUCTS = (jax_primitives.dot_general_p, jax_primitives.conv_general_dilated_p)

new_var: Callable[[Any], Var] = gensym()  # type: ignore[no-untyped-call]


class Dependence(Enum):
    """What a value depends on."""

    CONSTANT = "constant"
    PARAMETERS = "parameters"
    DATA = "data"
    ACTIVATION = "activation"


@dataclass(frozen=True, eq=False)
class TracedLoss:
    """A loss, traced for parameters and batches of one form.

    params, batch: their trees, of `jax.ShapeDtypeStruct`.  equations: in the order of the trace.  parameters, data: one
    variable for each leaf.  constants: the value of each variable that is one.  marks: of each, how many equations are
    before it.  dependence: of each variable.  on_parameters: those through which a gradient flows to parameters.
    """

    params: Any
    batch: Any
    equations: tuple[JaxprEqn, ...]
    parameters: tuple[Var, ...]
    data: tuple[Var, ...]
    constants: Mapping[Var, Any]
    loss: Var
    marks: tuple[int, ...]
    dependence: Mapping[Var, Dependence]
    on_parameters: frozenset[Var]
    debug_info: DebugInfo

    @cached_property
    def producers(self) -> Mapping[Var, int]:
        """Variable: the number of the equation that computes it."""
        return {value: number for number, equation in enumerate(self.equations) for value in equation.outvars}

    @cached_property
    def parameter_specs(self) -> tuple[LeafSpec, ...]:
        """Path, shape and dtype of each leaf of the parameters."""
        return describe_tree(self.params)

    @cached_property
    def data_specs(self) -> tuple[LeafSpec, ...]:
        """Path, shape and dtype of each leaf of a batch."""
        return describe_tree(self.batch)

    def is_activation(self, atom: Atom) -> bool:
        """Whether a value is computed once, and travels."""
        return isinstance(atom, Var) and self.dependence[atom] is Dependence.ACTIVATION

    def is_computed(self, equation: JaxprEqn) -> bool:
        """Whether an equation gives an activation; every other one is computed by each stage that needs it."""
        return any(self.is_activation(value) for value in equation.outvars)


def trace_loss(loss_fn: Loss, params: Any, batch: Any) -> TracedLoss:
    """Trace `loss_fn(params, batch)`; nothing is computed, and nothing of the size of a leaf is made.

    params, batch: pytrees of arrays, or of their shapes (`jax.eval_shape`).  Raises ConfigError if the loss is no
    floating scalar, if a parameter is no floating array, if the loss has side effects, if it does not depend on both,
    or if a mark lies where no cut can be.
    """
    params, batch = (jax.eval_shape(lambda tree: tree, tree) for tree in (params, batch))
    for spec, leaf in zip(describe_tree(params), jax.tree.leaves(params), strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ConfigError(f"the parameter {spec.path} is {spec.form}, which has no gradient: pass it in the batch")
    closed, result = jax.make_jaxpr(loss_fn, return_shape=True)(params, batch)
    outputs = jax.tree.leaves(result)
    if len(outputs) != 1 or outputs[0].shape or not jnp.issubdtype(outputs[0].dtype, jnp.floating):
        raise ConfigError(f"loss_fn(params, batch) must return one floating scalar, and returns {result}")
    if closed.effects:
        raise ConfigError(
            f"the loss has side effects ({', '.join(sorted(map(str, closed.effects)))}): a stage computes its part "
            "twice, so they would happen twice. Take jax.debug.print, callbacks and the like out of loss_fn"
        )
    flat = _Flattener()
    arguments = [new_var(aval) for aval in closed.in_avals]
    (loss,) = flat.open(closed.jaxpr, closed.consts, arguments)
    held = len(jax.tree.leaves(params))
    parameters, data = tuple(arguments[:held]), tuple(arguments[held:])
    equations, marks = _needed(flat.equations, flat.marks, loss)
    dependence = _dependence(equations, parameters, data, flat.constants)
    if not isinstance(loss, Var) or dependence.get(loss) is not Dependence.ACTIVATION:
        raise ConfigError("the loss does not depend on both the parameters and the batch: there is nothing to cut")
    return TracedLoss(
        params=params,
        batch=batch,
        equations=tuple(equations),
        parameters=parameters,
        data=data,
        constants=flat.constants,
        loss=loss,
        marks=tuple(marks),
        dependence=dependence,
        on_parameters=_on_parameters(equations, parameters),
        debug_info=closed.jaxpr.debug_info,
    )


class _Flattener:
    """Opens called functions into one list of equations, each with variables of its own."""

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self.marks: list[int] = []
        self.constants: dict[Var, Any] = {}
        self._known: dict[int, Var] = {}  # one variable for each constant, however many functions hold it

    def open(self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Atom]) -> list[Atom]:
        known: dict[Var, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            known[variable] = self._constant(variable, value)

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            outputs = self._take(equation, inputs)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _take(self, equation: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        primitive, marked = equation.primitive, has_mark(equation)
        if primitive is stage_end_p:
            self.marks.append(len(self.equations))
            return inputs
        if primitive in OPENED or (marked and primitive is jax_primitives.remat_p):
            return self.open(*called_function(equation, OPENED.get(primitive, "jaxpr")), inputs)
        if marked and primitive is not jax_primitives.scan_p:
            raise ConfigError(
                f"zt.stage_end stands inside {primitive} at {place_of(equation)}, which cannot be cut: mark before or "
                "after it (a mark may stand in jit, in checkpoint, and in the body of lax.scan)"
            )
        outputs = [new_var(variable.aval) for variable in equation.outvars]
        self.equations.append(equation.replace(invars=inputs, outvars=outputs))
        return outputs

    def _constant(self, variable: Var, value: Any) -> Var:
        if id(value) not in self._known:
            self._known[id(value)] = new_var(variable.aval)
            self.constants[self._known[id(value)]] = value
        return self._known[id(value)]


def variables(atoms: Iterable[Atom]) -> Iterable[Var]:
    """Return those that are variables and no literals."""
    return (atom for atom in atoms if isinstance(atom, Var))


def form_of(atom: Atom) -> Any:
    """Return what has the `shape` and `dtype` of a value, and `update` to change them: its `jax.core.ShapedArray`."""
    return atom.aval


def size_of(atom: Atom) -> int:
    """Return how many bytes a value has."""
    return int(prod(form_of(atom).shape)) * int(form_of(atom).dtype.itemsize)


def place_of(equation: JaxprEqn) -> str:
    """Return the line of the program from which an equation comes: "text.py:98 (attention)"."""
    path, _, function = summarize(equation.source_info).partition(" ")
    file, _, line = path.rpartition("/")[2].partition(":")
    return f"{file}:{line.partition(':')[0]} {function}".strip()


def product_flops(equation: JaxprEqn) -> float:
    """Return the floating-point operations of the matrix products and convolutions in an equation, loops included."""
    if equation.primitive is jax_primitives.dot_general_p:
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = form_of(equation.invars[0]).shape
        return float(2 * prod(form_of(equation.outvars[0]).shape) * prod(left[axis] for axis in contracted))
    if equation.primitive is jax_primitives.conv_general_dilated_p:
        kernel, features = form_of(equation.invars[1]).shape, equation.params["dimension_numbers"].rhs_spec[0]
        return float(2 * prod(form_of(equation.outvars[0]).shape) * prod(kernel) / max(1, kernel[features]))
    times = equation.params["length"] if equation.primitive is jax_primitives.scan_p else 1
    inside = sum(product_flops(inner) for jaxpr in jaxprs_in_params(equation.params) for inner in jaxpr.eqns)
    return float(times * inside)


def make_jaxpr(
    traced: TracedLoss,
    inputs: Mapping[Var, str],
    outputs: Sequence[Atom],
    equations: Sequence[JaxprEqn],
    constants: Sequence[Var],
) -> ClosedJaxpr:
    """Return a function of `inputs`, each with its name, that computes these equations."""
    info = traced.debug_info._replace(arg_names=tuple(inputs.values()), result_paths=("",) * len(outputs))
    jaxpr = Jaxpr(list(constants), list(inputs), list(outputs), list(equations), debug_info=info)
    return ClosedJaxpr(jaxpr, [traced.constants[variable] for variable in constants])


def _needed(equations: Sequence[JaxprEqn], marks: Sequence[int], loss: Atom) -> tuple[list[JaxprEqn], list[int]]:
    """Return the equations that the loss needs, and the marks among them."""
    wanted, kept = set(variables([loss])), [False] * len(equations)
    for index in reversed(range(len(equations))):
        if wanted.intersection(equations[index].outvars):
            kept[index] = True
            wanted.update(variables(equations[index].invars))
    return (
        [equation for equation, keep in zip(equations, kept, strict=True) if keep],
        [sum(kept[:mark]) for mark in marks],
    )


def _dependence(
    equations: Sequence[JaxprEqn], parameters: Sequence[Var], data: Sequence[Var], constants: Iterable[Var]
) -> dict[Var, Dependence]:
    found: dict[Var, Dependence] = {
        **dict.fromkeys(constants, Dependence.CONSTANT),
        **dict.fromkeys(parameters, Dependence.PARAMETERS),
        **dict.fromkeys(data, Dependence.DATA),
    }
    for equation in equations:
        inputs = {found[variable] for variable in variables(equation.invars)} - {Dependence.CONSTANT}
        if len(inputs) > 1 or (inputs == {Dependence.DATA} and _has_product(equation)):
            inputs = {Dependence.ACTIVATION}
        found.update(dict.fromkeys(equation.outvars, inputs.pop() if inputs else Dependence.CONSTANT))
    return found


def _has_product(equation: JaxprEqn) -> bool:
    return any(one.primitive in PRODUCTS for one in (equation, *inner_equations(equation)))


def _on_parameters(equations: Sequence[JaxprEqn], parameters: Sequence[Var]) -> frozenset[Var]:
    found = set(parameters)
    for equation in equations:
        if found.intersection(variables(equation.invars)):
            found.update(
                variable for variable in equation.outvars if jnp.issubdtype(form_of(variable).dtype, jnp.inexact)
            )
    return frozenset(found)
