"""What one stage computes for itself: values of parameters only, of data only, and constants.

A value that a stage needs is followed back to the leaves of the parameters, which the stage then holds, and to those of
the batch. Where only some rows of a value are needed (the layers of a stacked parameter that a part of `lax.scan` runs
through), they are followed back as rows as far as that is possible: through arithmetic value by value, through casts,
through transposes of the other axes and through a stack of layers. So a stage holds its own layers of a stacked
parameter, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core import primitives as jax_primitives

from zmqtrain.pipeline.trace import Atom, TracedLoss, form_of, new_var, size_of, variables

VALUE_BY_VALUE = frozenset(
    getattr(jax_primitives, f"{name}_p")
    for name in (
        *("abs", "add", "add_any", "and", "convert_element_type", "copy", "cos", "div", "eq", "exp", "ge", "gt"),
        *("integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not"),
        *("or", "pow", "reduce_precision", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square"),
        *("stop_gradient", "sub", "tan", "tanh"),
    )
    if hasattr(jax_primitives, f"{name}_p")
)
"""Each value of the result is one of the values at the same place; a row of the result needs that row only."""


class Rows(NamedTuple):
    """Rows `start` to `stop` of a leaf's first axis; of a leaf without axes, 0 to 1."""

    start: int
    stop: int

    def hull(self, other: Rows) -> Rows:
        """The shortest range that holds both."""
        return Rows(min(self.start, other.start), max(self.stop, other.stop))

    @property
    def size(self) -> int:
        """How many rows these are."""
        return self.stop - self.start

    def overlap(self, other: Rows) -> int:
        """How many rows are in both."""
        return max(0, min(self.stop, other.stop) - max(self.start, other.start))


OVERLAP = "the leaf {} is used at places that overlap in its middle: untie it, so that each place has rows of its own"


def free_rows(rows: Rows, taken: Iterable[Rows]) -> list[Rows]:
    """Return the rows that are in none of the others, as ranges."""
    free = [rows]
    for other in taken:
        free = [
            Rows(*part)
            for low, high in free
            for part in ((low, min(high, other.start)), (max(low, other.stop), high))
            if part[0] < part[1]
        ]
    return free


def all_rows(leaf: Var) -> Rows:
    """Return the rows of a whole value."""
    return Rows(0, form_of(leaf).shape[0] if form_of(leaf).shape else 1)


def row_bytes(leaf: Var) -> int:
    """Return how many bytes a row of a leaf has."""
    return size_of(leaf) // max(1, all_rows(leaf).size)


class LocalValues:
    """Gathers what a stage must compute for itself; `equations` are in an order in which they can run.

    held: the rows of each parameter that the stage needs.  data, constants: those that it uses, in order of first use.
    """

    def __init__(self, traced: TracedLoss) -> None:
        self._traced = traced
        self._producers = traced.producers
        self._parameters, self._data = set(traced.parameters), set(traced.data)
        self._wanted: set[int] = set()  # numbers of equations that are computed whole
        self._of_rows: dict[tuple[Var, Rows], Atom] = {}
        self._row_equations: list[JaxprEqn] = []
        self._pieces: dict[tuple[Var, Rows], Var] = {}
        self.data: dict[Var, None] = {}
        self.constants: dict[Var, None] = {}

    def need(self, values: Iterable[Atom]) -> None:
        """The stage uses these values, whole."""
        waiting, seen = list(variables(values)), set[Var]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self._parameters:
                self._pieces[value, all_rows(value)] = value
            elif value in self._data:
                self.data[value] = None
            elif value in self._traced.constants:
                self.constants[value] = None
            elif (number := self._producers[value]) not in self._wanted:
                self._wanted.add(number)
                waiting.extend(variables(self._traced.equations[number].invars))

    def need_rows(self, value: Atom, rows: Rows) -> Atom:
        """The stage uses some rows of a value; return what stands for them."""
        if isinstance(value, Literal) or rows == all_rows(value):
            self.need([value])
            return value
        if (value, rows) not in self._of_rows:
            self._of_rows[value, rows] = self._made_of_rows(value, rows)
        return self._of_rows[value, rows]

    def _made_of_rows(self, value: Var, rows: Rows) -> Atom:
        if value in self._parameters:
            return self._pieces.setdefault((value, rows), _var_of_rows(value, rows))
        equation = self._traced.equations[self._producers[value]] if value in self._producers else None
        if equation is not None and equation.primitive in VALUE_BY_VALUE:
            inputs = [self._row_of_operand(atom, value, rows) for atom in equation.invars]
        elif equation is not None and _keeps_rows(equation):
            inputs = [self.need_rows(equation.invars[0], rows)]
        elif equation is not None and _joins_rows(equation):
            return self._joined(equation.invars, rows)
        elif equation is not None and _stacks(equation):
            inputs = equation.invars[rows.start : rows.stop]
            self.need(inputs)
        else:
            self.need([value])
            return self._traced_rows([value], lambda whole: lax.slice_in_dim(whole, *rows))
        made = _var_of_rows(value, rows)
        self._row_equations.append(equation.replace(invars=inputs, outvars=[made]))
        return made

    def _row_of_operand(self, atom: Atom, result: Var, rows: Rows) -> Atom:
        if form_of(atom).shape == form_of(result).shape:
            return self.need_rows(atom, rows)
        self.need([atom])  # a scalar
        return atom

    def _joined(self, parts: Sequence[Atom], rows: Rows) -> Atom:
        """Rows of parts that follow one another along the first axis."""
        found, start = [], 0
        for part in parts:
            size = form_of(part).shape[0]
            own = Rows(max(0, rows.start - start), min(size, rows.stop - start))
            if own.start < own.stop:
                found.append(self.need_rows(part, own))
            start += size
        if len(found) == 1:
            return found[0]
        return self._traced_rows(found, lambda *each: lax.concatenate(each, 0))

    def _traced_rows(self, atoms: Sequence[Atom], function: Callable[..., jax.Array]) -> Atom:
        equations, (result,) = equations_of(function, atoms)
        self._row_equations += equations
        return result

    @property
    def held(self) -> dict[Var, Rows]:
        """Parameter: the rows of it that the stage must hold; in the order of the leaves."""
        found: dict[Var, Rows] = {}
        for leaf, rows in self._pieces:
            found[leaf] = found[leaf].hull(rows) if leaf in found else rows
        return {leaf: found[leaf] for leaf in self._traced.parameters if leaf in found}

    def build(self) -> tuple[list[Var], list[JaxprEqn]]:
        """Return a variable for each of `held`, and the equations that compute what was needed."""
        inputs, equations = [], []
        for leaf, held in self.held.items():
            whole = self._pieces.get((leaf, held)) or _var_of_rows(leaf, held)
            inputs.append(whole)
            for (other, rows), piece in self._pieces.items():
                if other is leaf and rows != held:
                    taken = Rows(rows.start - held.start, rows.stop - held.start)
                    equations += _slice_into(whole, taken, piece)
        equations += [self._traced.equations[number] for number in sorted(self._wanted)]
        return inputs, equations + self._row_equations


def equations_of(function: Callable[..., jax.Array], atoms: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """Return the equations of `function(*atoms)`, with variables of their own, and its results."""
    closed = jax.make_jaxpr(function)(*(_form(atom) for atom in atoms))
    known: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, atoms, strict=True))

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else known[atom]

    made = []
    for equation in closed.jaxpr.eqns:
        inputs, outputs = [read(atom) for atom in equation.invars], [new_var(out.aval) for out in equation.outvars]
        known.update(zip(equation.outvars, outputs, strict=True))
        made.append(equation.replace(invars=inputs, outvars=outputs))
    return made, [read(atom) for atom in closed.jaxpr.outvars]


def _form(atom: Atom) -> Any:
    form = form_of(atom)
    return jax.ShapeDtypeStruct(form.shape, form.dtype)  # type: ignore[no-untyped-call]


def _slice_into(whole: Var, rows: Rows, piece: Var) -> list[JaxprEqn]:
    """The equation that gives rows of `whole` to the variable `piece`."""
    (equation,), _ = equations_of(lambda value: lax.slice_in_dim(value, *rows), [whole])
    return [equation.replace(outvars=[piece])]


def _var_of_rows(value: Var, rows: Rows) -> Var:
    return new_var(form_of(value).update(shape=(rows.size, *form_of(value).shape[1:])))


def _keeps_rows(equation: JaxprEqn) -> bool:
    """Whether it only changes the order of the other axes."""
    return equation.primitive is jax_primitives.transpose_p and equation.params["permutation"][0] == 0


def _joins_rows(equation: JaxprEqn) -> bool:
    return equation.primitive is jax_primitives.concatenate_p and equation.params["dimension"] == 0


def _stacks(equation: JaxprEqn) -> bool:
    """Whether each operand is a row: `jnp.stack`, an operation of its own in newer versions of jax."""
    return equation.primitive.name == "stack" and equation.params["axis"] == 0
