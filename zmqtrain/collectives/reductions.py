"""Operations that reduce two arrays to one: named ones, and functions of the caller (tried and fingerprinted)."""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError, OperationError

Values = NDArray[Any]
"""Flat and contiguous, of any dtype."""

_NUMBERS, _ORDERED, _BITS = ("int", "float", "complex"), ("bool", "int", "float"), ("bool", "int")


class Operation(NamedTuple):
    """A named operation. kinds: of dtypes that it is for.  ufunc: how numpy does it.  same: functions that mean it."""

    kinds: tuple[str, ...]
    ufunc: np.ufunc
    same: tuple[Callable[..., Any], ...]


OPERATIONS = {
    "sum": Operation(_NUMBERS, np.add, (builtins.sum, math.fsum, operator.add, operator.iadd, np.sum, np.add)),
    "mean": Operation(("float", "complex"), np.add, (np.mean,)),
    "max": Operation(_ORDERED, np.maximum, (builtins.max, np.max, np.amax, np.maximum)),
    "min": Operation(_ORDERED, np.minimum, (builtins.min, np.min, np.amin, np.minimum)),
    "prod": Operation(_NUMBERS, np.multiply, (math.prod, operator.mul, operator.imul, np.prod, np.multiply)),
    "band": Operation(_BITS, np.bitwise_and, (operator.and_, operator.iand, np.bitwise_and)),
    "bor": Operation(_BITS, np.bitwise_or, (operator.or_, operator.ior, np.bitwise_or)),
    "bxor": Operation(_BITS, np.bitwise_xor, (operator.xor, operator.ixor, np.bitwise_xor)),
}
"""By name. Of bools sum and prod would be `max` and `min`; the mean of integers is no integer; complex numbers have no
order. A name may be in any case: "SUM" is "sum"."""

_NAMES = {id(function): name for name, operation in OPERATIONS.items() for function in operation.same}
_OF_JAX = {
    function.__name__: name
    for name, operation in OPERATIONS.items()
    for function in operation.same
    if function.__name__ in vars(np)
}
"""By the name of JAX's function, which is that of numpy's."""

_SMALL = ((1, 2, 3, 5), (2, 7, 1, 3), (4, 1, 2, 2))
"""What a function is tried on: every number that sums and products of them make is exact in every dtype."""
_DEEPEST = 20


def named_operation(function: Callable[..., Any]) -> str | None:
    """Return the named operation that a function means, None if it is one of the caller's own."""
    if (name := _NAMES.get(id(function))) is not None:
        return name
    module = getattr(function, "__module__", None) or ""
    if module.partition(".")[0] == "jax":
        return _OF_JAX.get(getattr(function, "__name__", ""))
    return None


def describe_function(function: Callable[..., Any]) -> str:
    """Return module, name and fingerprint of a function: "__main__.<lambda>#1f00c3d2a9b84e57".

    The fingerprint is over Python's byte code, so it is the same in processes that run the same version of Python.
    """
    named: Any = function
    while isinstance(named, partial):  # what its object is called differs from process to process
        named = named.func
    named = named if hasattr(named, "__name__") else type(named)
    name = f"{named.__module__}.{getattr(named, '__qualname__', named.__name__)}"
    found = blake2b(digest_size=8)
    for word in _Fingerprint(getattr(named, "__module__", "")).words(function, 0):
        found.update(len(word).to_bytes(8, "little") + word)
    return f"{name}#{found.hexdigest()}"


class _Fingerprint:
    """What a function computes with, as words. module: only its functions are looked into; others count by name."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._seen: dict[int, int] = {}

    def words(self, value: Any, depth: int) -> Iterator[bytes]:
        """Give the words of one value: equal for what computes alike, in whatever process."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes) or value is Ellipsis:
            yield f"{type(value).__name__} {value!r}".encode()
            return
        if id(value) in self._seen or depth > _DEEPEST:
            yield f"again {self._seen.get(id(value), -1)}".encode()
            return
        self._seen[id(value)] = len(self._seen)
        yield type(value).__name__.encode()
        if isinstance(value, CodeType):
            yield from self._of_code(value, depth)
        elif isinstance(value, FunctionType):
            yield from self._of_function(value, depth)
        elif isinstance(value, MethodType):
            yield from self._all((value.__func__, value.__self__), depth)
        elif isinstance(value, partial):
            yield from self._all((value.func, value.args, value.keywords), depth)
        elif isinstance(value, ModuleType | type):
            yield f"{getattr(value, '__module__', '')} {value.__name__}".encode()
        elif isinstance(value, tuple | list):
            yield str(len(value)).encode()
            yield from self._all(value, depth)
        elif isinstance(value, set | frozenset):  # their order differs from process to process
            yield from sorted(b"".join(_Fingerprint(self._module).words(one, depth + 1)) for one in value)
        elif isinstance(value, dict):
            for name in sorted(value, key=repr):
                yield from self._all((name, value[name]), depth)
        elif isinstance(value, np.ndarray | np.generic):
            yield f"{value.dtype} {value.shape}".encode()
            if not value.dtype.hasobject:
                yield np.ascontiguousarray(value).tobytes()
        elif callable(getattr(value, "__wrapped__", None)):  # jitted, cached
            yield from self.words(value.__wrapped__, depth + 1)
        elif hasattr(value, "__array__") and not callable(value):  # of jax
            yield from self.words(np.asarray(value), depth + 1)
        else:
            yield from self._of_object(value, depth)

    def _all(self, values: Any, depth: int) -> Iterator[bytes]:
        for one in values:
            yield from self.words(one, depth + 1)

    def _of_function(self, function: FunctionType, depth: int) -> Iterator[bytes]:
        yield f"{function.__module__} {function.__qualname__}".encode()
        if depth and function.__module__ != self._module:
            return
        yield from self.words(function.__code__, depth + 1)
        yield from self._all((function.__defaults__, function.__kwdefaults__), depth)
        for cell in function.__closure__ or ():
            try:
                yield from self.words(cell.cell_contents, depth + 1)
            except ValueError:  # it is not filled yet
                yield b"empty"
        for name in sorted(_names_in(function.__code__)):
            if name in function.__globals__:
                yield name.encode()
                yield from self.words(function.__globals__[name], depth + 1)

    def _of_code(self, code: CodeType, depth: int) -> Iterator[bytes]:
        yield f"{sys.version_info[:2]} {code.co_argcount} {code.co_flags}".encode()
        yield code.co_code
        yield getattr(code, "co_exceptiontable", b"")
        yield " ".join((*code.co_names, *code.co_freevars)).encode()
        yield from self._all(code.co_consts, depth)

    def _of_object(self, value: Any, depth: int) -> Iterator[bytes]:
        kind = type(value)
        yield f"{kind.__module__} {kind.__qualname__} {getattr(value, '__name__', '')}".encode()
        call = next((each.__dict__["__call__"] for each in kind.__mro__ if "__call__" in each.__dict__), None)
        if isinstance(call, FunctionType) and kind.__module__ == self._module:
            yield from self.words(call, depth + 1)
            yield from self.words(dict(getattr(value, "__dict__", {})), depth + 1)


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


_tried: dict[tuple[str, str], None] = {}


def try_function(function: Callable[[Values, Values], Any], name: str, dtype: np.dtype[Any]) -> None:
    """Raise OperationError unless a function reduces small arrays of this dtype as an operation has to.

    It must return arrays like those that it is given, write into none, be associative and commutative, and go value by
    value. Once it has passed it is not tried again for this dtype.
    """
    if (name, dtype.name) in _tried:
        return
    try:
        one, two, three = (np.array(values).astype(dtype) for values in _SMALL)
    except (TypeError, ValueError):  # a dtype without numbers
        return
    if dtype.kind == "b":
        one, two, three = (values % 2 > 0 for values in (np.array(one_of) for one_of in _SMALL))
    for values in (one, two, three):
        values.flags.writeable = False

    def apply(first: Values, second: Values) -> Values:
        return call_function(function, name, first, second)

    made = apply(one, two)
    if not _close(made, apply(two, one)):
        raise OperationError(
            f"op={name} is not commutative: of {one} and {two} it makes {made}, and {apply(two, one)} the other way "
            "round; ranks are combined in the algorithm's order, so the result would depend on it"
        )
    left, right = apply(apply(one, two), three), apply(one, apply(two, three))
    if not _close(left, right):
        raise OperationError(
            f"op={name} is not associative: of {one}, {two} and {three} it makes {left} or {right}, by which two come "
            'first; reduce with a named operation (a mean is op="mean") and compute the rest from the result'
        )
    if not _close(np.concatenate([apply(one[i : i + 1], two[i : i + 1]) for i in range(one.size)]), made):
        raise OperationError(
            f"op={name} does not go value by value: of pieces of two arrays it makes other values than of the whole"
        )
    while len(_tried) >= 256:
        _tried.pop(next(iter(_tried)))
    _tried[name, dtype.name] = None


def call_function(function: Callable[[Values, Values], Any], name: str, first: Values, second: Values) -> Values:
    """Return what a function makes of two arrays. Raise OperationError if it fails, or makes no array like them."""
    try:
        with np.errstate(all="ignore"):
            result = np.asarray(function(first, second))
    except Exception as error:
        raise OperationError(
            f"op={name} failed on two arrays of {first.dtype}{list(first.shape)}: {type(error).__name__}: {error}; it "
            "must return an array like them, value by value, and write into neither"
        ) from error
    if result.shape != first.shape or result.dtype != first.dtype:
        raise OperationError(
            f"op={name} made {result.dtype}{list(result.shape)} of two arrays of {first.dtype}{list(first.shape)}: "
            "it must return an array like them, value by value"
        )
    return result


def _close(first: Values, second: Values) -> bool:
    """Whether two arrays are equal but for what rounding may do."""
    if first.dtype.kind in "biu":
        return bool(np.array_equal(first, second))
    wide = np.complex128 if first.dtype.kind == "c" else np.float64
    size = first.dtype.itemsize // (2 if first.dtype.kind == "c" else 1)
    relative = {1: 0.3, 2: 0.06, 4: 1e-5}.get(size, 1e-12)
    with np.errstate(all="ignore"):
        return bool(np.allclose(first.astype(wide), second.astype(wide), rtol=relative, atol=0.0, equal_nan=True))


Function = Callable[[Values, Values], Any]
"""A caller's own: two flat arrays of one length and dtype -> a third, value by value. Associative and commutative."""


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
    operation = OPERATIONS[op]
    if (kind := _kind(dtype)) not in operation.kinds:
        raise ConfigError(
            f"op={op!r} is not for arrays of {dtype}: it is for {', '.join(operation.kinds)}{_advice(op, kind)}"
        )
    function = _multiply_complex if op == "prod" and kind == "complex" else operation.ufunc

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
