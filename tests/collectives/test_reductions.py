"""What becomes of two arrays: numpy's own result, in place, and a sentence for what has none."""

from __future__ import annotations

import math
import operator
import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from zmqtrain.collectives.reductions import OPERATIONS, Values, describe_function, find_reduction
from zmqtrain.core.errors import ConfigError, OperationError

DTYPES = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", "bfloat16"]
UFUNCS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply} | {
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_for(op: str, name: str) -> bool:
    kind = {"?": "bool", "i": "int", "u": "int", "f": "float", "b": "float", "c": "complex"}[name[0]]
    return kind in OPERATIONS[op].kinds


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_two_arrays_become_numpys_result_in_either_of_them(op: str, name: str) -> None:
    if not is_for(op, name):
        with pytest.raises(ConfigError, match=f"op='{op}' is not for arrays of {dtype_of(name)}"):
            find_reduction(op, dtype_of(name))
        return
    random = np.random.default_rng(1)
    first, second = (random.integers(0, 3, 1000).astype(dtype_of(name)) for _ in range(2))
    wanted = UFUNCS[op](first, second)
    for place in range(3):
        arrays = [first.copy(), second.copy(), np.empty_like(first)]
        find_reduction(op, dtype_of(name)).combine(arrays[0], arrays[1], arrays[place])
        assert arrays[place].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", [name for name in DTYPES if name[0] in "fcb"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_pieces_of_two_arrays_give_the_bits_of_the_whole(op: str, name: str) -> None:
    if not is_for(op, name):
        return
    reduction, random = find_reduction(op, dtype_of(name)), np.random.default_rng(2)
    for values in [*range(1, 40), *[37] * 200]:
        scale = 10.0 ** random.integers(-4, 5, (2, values))
        parts = scale * random.standard_normal((2, 2, values))
        first, second = (parts[0] + 1j * parts[1] if name[0] == "c" else parts[0]).astype(dtype_of(name))
        whole, pieces, cut = first.copy(), first.copy(), int(random.integers(values + 1))
        reduction.combine(whole, second, whole)
        for piece in (slice(0, cut), slice(cut, None)):
            reduction.combine(pieces[piece], second[piece], pieces[piece])
        for array in (whole, pieces[:cut], pieces[cut:]):
            reduction.finish(array, 3)
        assert pieces.tobytes() == whole.tobytes()


@given(
    npst.arrays(np.float32, 8, elements=st.floats(width=32)),
    npst.arrays(np.float32, 8, elements=st.floats(width=32)),
    st.sampled_from([op for op, operation in OPERATIONS.items() if "float" in operation.kinds]),
)
def test_overflow_and_nan_are_numpys_without_a_warning(first: Values, second: Values, op: str) -> None:
    with np.errstate(all="ignore"):
        wanted = UFUNCS[op](first, second)
    find_reduction(op, first.dtype).combine(first, second, first)
    np.testing.assert_array_equal(first, wanted)


def test_integers_wrap_round() -> None:
    values = np.array([127, -128], np.int8)
    find_reduction("sum", values.dtype).combine(values, np.array([1, -1], np.int8), values)
    assert values.tolist() == [-128, 127]


@pytest.mark.parametrize("name", ["SUM", "Max", "BAND", "bOr"])
def test_the_name_of_an_operation_is_read_in_any_case(name: str) -> None:
    reduction = find_reduction(name, np.dtype(np.int32))
    assert reduction.name == name.lower() and reduction.name in OPERATIONS


@pytest.mark.parametrize("name", ["f2", "f4", "f8", "c8", "bfloat16"])
def test_a_mean_divides_once_by_the_size_and_other_operations_do_not(name: str) -> None:
    values = np.array([1, 2, 6], dtype_of(name))
    find_reduction("sum", values.dtype).finish(values, 3)
    assert values.tolist() == [1, 2, 6]
    find_reduction("mean", values.dtype).finish(values, 3)
    assert values.tobytes() == (np.array([1, 2, 6], dtype_of(name)) / dtype_of(name).type(3)).tobytes()


def test_a_function_of_two_arrays_is_an_operation_with_a_name() -> None:
    reduction = find_reduction(np.hypot, np.dtype(np.float64))
    values = np.array([3.0, 0.0])
    reduction.combine(values, np.array([4.0, 1.0]), values)
    reduction.finish(values, 7)
    assert values.tolist() == [5, 1]
    assert find_reduction(reduction, values.dtype) is reduction

    def longer(first: Values, second: Values) -> Values:
        return np.maximum(first, second)

    assert find_reduction(longer, values.dtype).name.partition("#")[0].endswith("with_a_name.<locals>.longer")


@pytest.mark.parametrize("function", [np.less, lambda first, second: first.sum(), lambda first, second: None])
def test_a_function_that_returns_another_kind_of_array_is_refused_by_name(function: object) -> None:
    values = np.ones(2, np.float32)
    with pytest.raises(ConfigError, match=r"op=.*(less|lambda).* made .* of two arrays of float32\[4\]"):
        find_reduction(function, values.dtype).combine(values, values.copy(), values)  # type: ignore[arg-type]


def test_what_cannot_be_reduced_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match=r"op='average': choose one of sum, mean, max, min, prod, band, .* or give"):
        find_reduction("average", np.dtype(np.float32))
    with pytest.raises(ConfigError, match='is for float, complex; take op="sum" and divide, or cast to float32 first'):
        find_reduction("mean", np.dtype(np.int32))
    with pytest.raises(ConfigError, match='op="max" says whether any are true'):
        find_reduction("sum", np.dtype(bool))
    for dtype in ("O", "S3", "M8[s]", "V4", "i4,f4"):
        with pytest.raises(ConfigError, match="is not for arrays of"):
            find_reduction("max", np.dtype(dtype))


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("sum", (sum, math.fsum, operator.add, np.sum, np.add, jnp.sum, jnp.add)),
        ("band", (operator.and_, np.bitwise_and, jnp.bitwise_and)),
        ("bor", (operator.or_, np.bitwise_or, jnp.bitwise_or)),
        ("bxor", (operator.xor, np.bitwise_xor, jnp.bitwise_xor)),
        ("mean", (np.mean, jnp.mean)),
        ("max", (max, np.max, np.amax, np.maximum, jnp.max, jnp.maximum)),
        ("min", (min, np.min, np.amin, np.minimum, jnp.min, jnp.minimum)),
        ("prod", (math.prod, operator.mul, np.prod, np.multiply, jnp.prod, jnp.multiply)),
    ],
)
def test_the_usual_functions_are_the_named_operations(name: str, functions: tuple[object, ...]) -> None:
    for function in functions:
        dtype = np.dtype("f4" if "float" in OPERATIONS[name].kinds else "i4")
        reduction, values = find_reduction(function, dtype), np.array([1, 2, 3], dtype)  # type: ignore[arg-type]
        assert reduction.name == name
        reduction.combine(values, np.array([1, 0, 1], dtype), values)
        assert values.tolist() == UFUNCS[name](np.array([1, 2, 3]), [1, 0, 1]).tolist()


def fails(first: Values, second: Values) -> Values:
    raise ZeroDivisionError("in the user's code")


def in_place(first: Values, second: Values) -> Values:
    first += second
    return first


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda first, second: first - second, "is not commutative"),
        (lambda first, second: first, "is not commutative"),
        (lambda first, second: (first + second) / 2, "is not associative"),
        (lambda first, second: first + second - np.minimum(first, second).min(), "value by value"),
        (lambda first: first, "failed on two arrays of float32"),
        (fails, "fails#[0-9a-f]+ failed on two arrays .* ZeroDivisionError: in the user's code"),
        (in_place, "write into neither"),
        (any, "failed on two arrays"),
        (np.array_equal, "made bool"),
    ],
)
def test_a_function_that_cannot_reduce_is_refused_before_anything_is_sent(function: Any, why: str) -> None:
    with pytest.raises(OperationError, match=why):
        find_reduction(function, np.dtype("f4"))


@pytest.mark.parametrize("name", DTYPES)
def test_sound_functions_pass_the_trial_with_every_dtype(name: str) -> None:
    sound = [lambda first, second: first + second, lambda first, second: first * second]
    if dtype_of(name).kind not in "?c":
        sound += [
            lambda first, second: np.maximum(first, second),
            lambda first, second: np.where(first > second, first, second),
        ]
    if name[0] == "f":
        sound += [
            np.hypot,
            np.logaddexp,
            lambda first, second: np.sqrt(first * first + second * second).astype(first.dtype),
        ]
    if dtype_of(name).kind in "?iu":
        sound += [lambda first, second: first ^ second, np.gcd if dtype_of(name).kind != "?" else np.logical_or]
    for function in sound:
        find_reduction(function, dtype_of(name))


def made(scale: int, default: int = 1) -> Any:
    return lambda first, second, more=default: first + second + 0 * scale * more


SCALE = 3


def test_functions_have_one_name_only_if_they_compute_the_same() -> None:
    def name(function: Any) -> str:
        return describe_function(function)

    assert name(made(1)) == name(made(1))
    different = [
        name(made(1)), name(made(2)), name(made(1, 2)),
        name(lambda first, second: first + second), name(lambda first, second: first * second),
        name(lambda first, second: first + second + 0), name(lambda first, second: first + second + 1),
        name(partial(np.add, 1)), name(partial(np.add, 2)), name(lambda first, second: first + SCALE),
        name(lambda first, second: np.where(first > 1, first, second)),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    before = name(reads_a_global)
    globals()["SCALE"] = 4
    try:
        assert name(reads_a_global) != before
    finally:
        globals()["SCALE"] = 3
    assert name(reads_a_global) == before
    assert name(jax.jit(made(1))) != name(jax.jit(made(2)))


def reads_a_global(first: Values, second: Values) -> Values:
    return first + SCALE * second


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = "f = lambda a, b, m={'x', 'y', 'z'}: a + b if 1 in {1, 2, 3} else b\n"
    code += "from zmqtrain.collectives.reductions import describe_function; print(describe_function(f))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and "__main__.<lambda>#" in said.pop()
