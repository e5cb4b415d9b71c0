"""Make one array of two, value by value: sum, mean, max, min, prod, band, bor, bxor, or a function of the caller's.

Rule 1: a reduction writes where it is told and keeps nothing: no array is made but what a caller's function returns,
and the parts of complex products.
Rule 2: it is done in the arrays' own dtype, as numpy does it, at every single step: integers wrap round, floats
overflow to infinity (without a warning), max and min pass NaN on, and float16 and bfloat16 round after each pair. Who
needs the digits casts to float32 before, for what travels is the dtype that is reduced.  What becomes of a value does
not depend on its place in an array: arrays are cut into pieces, which together give the bits of the whole.
Rule 3: which two arrays meet, and in which order, is the algorithm's to say; each says it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqtrain.collectives.functions import call_function, describe_function, named_operation, try_function
from zmqtrain.collectives.steps import Values
from zmqtrain.core.errors import ConfigError

Function = Callable[[Values, Values], Any]
"""A caller's own: two flat arrays of one length and dtype -> a third, value by value. Associative and commutative."""

_NUMBERS = ("int", "float", "complex")

OPERATIONS: dict[str, tuple[str, ...]] = {
    "sum": _NUMBERS,
    "mean": ("float", "complex"),
    "max": ("bool", "int", "float"),
    "min": ("bool", "int", "float"),
    "prod": _NUMBERS,
    "band": ("bool", "int"),
    "bor": ("bool", "int"),
    "bxor": ("bool", "int"),
}
"""By name the kinds of dtypes that each is for: of bools sum and prod would be `max` and `min`; the mean of integers is
no integer; complex numbers have no order. A name may be in any case: "SUM" is "sum"."""

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """How arrays of one dtype become one.

    name: as it was asked for, or the function's module, name and fingerprint: ranks whose reductions have different
      names differ.
    combine(first, second, out): write the reduction of both to `out`, which may be one of them. All three are of one
      length. Raises OperationError if the caller's function fails, or gives another shape or dtype.
    finish(values, size): what is left to do, in place, once the arrays of all `size` ranks are combined.
    """

    name: str
    combine: Callable[[Values, Values, Values], None]
    finish: Callable[[Values, int], None]


def find_reduction(op: str | Function | Reduction, dtype: np.dtype[Any]) -> Reduction:
    """Return the reduction for arrays of this dtype: of a name in OPERATIONS, in any case, or of a caller's function.

    Python's and numpy's own functions for these (`sum`, `max`, `math.prod`, `np.sum`) are the named operations.
    A function is given pieces of the arrays, flat: it must neither look at the place of a value, nor write into a piece
    or keep it. It is tried on small arrays here. Raises ConfigError: no such name, or an operation that is not for this
    dtype; OperationError for a function that fails the trial.
    """
    if isinstance(op, Reduction):
        return op
    if callable(op):
        named = named_operation(op)
        if named is None:
            return _of_function(op, dtype)
        op = named
    op, given = op.lower(), op
    if op not in OPERATIONS:
        choices = ", ".join(OPERATIONS)
        raise ConfigError(f"op={given!r}: choose one of {choices}, or give a function of two arrays")
    if (kind := _kind(dtype)) not in OPERATIONS[op]:
        raise ConfigError(
            f"op={op!r} is not for arrays of {dtype}: it is for {', '.join(OPERATIONS[op])}{_advice(op, kind)}"
        )
    function = _multiply_complex if op == "prod" and kind == "complex" else _UFUNCS[op]

    def combine(first: Values, second: Values, out: Values) -> None:
        with np.errstate(all="ignore"):
            function(first, second, out=out)

    return Reduction(op, combine, _divide if op == "mean" else _leave)


def _of_function(function: Function, dtype: np.dtype[Any]) -> Reduction:
    name = describe_function(function)
    try_function(function, name, dtype)

    def combine(first: Values, second: Values, out: Values) -> None:
        out[:] = call_function(function, name, first, second)

    return Reduction(name, combine, _leave)


def _multiply_complex(first: Values, second: Values, *, out: Values) -> None:
    """Write the products, of products that are rounded each.

    numpy's own multiply fuses some, by where a value lies in the array: its last bits differ from piece to piece.
    """
    real, imaginary = first.real * second.real, first.real * second.imag
    real -= first.imag * second.imag
    imaginary += first.imag * second.real
    out.real, out.imag = real, imaginary


def _divide(values: Values, size: int) -> None:
    with np.errstate(all="ignore"):
        np.divide(values, values.dtype.type(size), out=values)


def _leave(values: Values, size: int) -> None:
    pass


def _kind(dtype: np.dtype[Any]) -> str:
    """Return "bool", "int", "float", "complex", or what else the dtype calls itself."""
    if dtype.name == "bfloat16":  # its own kind is that of raw bytes
        return "float"
    return {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}.get(dtype.kind, dtype.name)


def _advice(op: str, kind: str) -> str:
    if kind == "bool" and op in ("sum", "prod"):
        return (
            f'; of bools op="{"max" if op == "sum" else "min"}" says whether {"any" if op == "sum" else "all"} are true'
        )
    if kind == "int" and op == "mean":
        return '; take op="sum" and divide, or cast to float32 first'
    return ""
