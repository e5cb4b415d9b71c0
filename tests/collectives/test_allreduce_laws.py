"""The laws of every allreduce: numpy's reduction in the stated order, the same bits on all, however it is played."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.collectives.algorithms import (
    ALLREDUCE,
    CHUNKS_AHEAD,
    LAST_CHUNK_BYTES,
    Steps,
    Traffic,
    Values,
    dwindling,
    reduce_at_the_hub,
    run_locally,
)
from zmqtrain.collectives.reductions import OPERATIONS, Function, find_reduction

from orders import reduced

SIZES = [1, 2, 3, 4, 5, 7, 8, 16]
DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "bfloat16"]
KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}

algorithms = pytest.mark.parametrize("algorithm", ALLREDUCE)


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def random_arrays(size: int, values: int, name: str, seed: int) -> list[Values]:
    random = np.random.default_rng(seed)
    if name == "bool":
        return [random.random(values) < 0.5 for _ in range(size)]
    if name in ("int8", "uint16", "int64"):
        limits = np.iinfo(name)
        return [random.integers(limits.min, limits.max, values, name) for _ in range(size)]
    scale = 10.0 ** random.integers(-3, 4, values)
    with np.errstate(over="ignore"):
        return [(scale * random.standard_normal(values)).astype(dtype_of(name)) for _ in range(size)]


def play(
    algorithm: str, arrays: Sequence[Values], op: str | Function, chunk_values: int, seed: int | None = None
) -> list[Traffic]:
    size, reduction = len(arrays), find_reduction(op, arrays[0].dtype)
    at_the_hub: Steps | None = None
    if algorithm == "hub":
        at_the_hub = reduce_at_the_hub(size, arrays[0].size, arrays[0].dtype, reduction, chunk_values)
    ranks = [ALLREDUCE[algorithm](rank, size, own, reduction, chunk_values) for rank, own in enumerate(arrays)]
    return run_locally(ranks, hub=at_the_hub, seed=seed)


@algorithms
@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=examples(12))
@given(data=st.data())
def test_an_allreduce_is_numpys_reduction_in_the_stated_order_bit_by_bit_on_all_ranks(
    algorithm: str, size: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(DTYPES))
    kind = "float" if name == "bfloat16" else KINDS[name[0]]
    op = data.draw(st.sampled_from([op for op, operation in OPERATIONS.items() if kind in operation.kinds]))
    values = data.draw(st.integers(0, 70))
    arrays = random_arrays(size, values, name, data.draw(st.integers(0, 1000)))
    wanted = reduced(algorithm, arrays, find_reduction(op, arrays[0].dtype))
    chunk_values = data.draw(st.integers(1, 80))
    play(algorithm, arrays, op, chunk_values, data.draw(st.none() | st.integers(0, 1000)))
    assert [own.tobytes() for own in arrays] == [wanted.tobytes()] * size


@algorithms
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("values", [0, 1, 100])
def test_a_sum_is_numpys_sum(algorithm: str, size: int, values: int) -> None:
    arrays = random_arrays(size, values, "int64", 1)
    wanted = np.sum(arrays, axis=0)
    play(algorithm, arrays, "sum", 7)
    assert all((own == wanted).all() for own in arrays)
    arrays = random_arrays(size, values, "float64", 2)
    wanted, largest = np.mean(arrays, axis=0), np.max(np.abs(arrays), axis=0)
    play(algorithm, arrays, "mean", 7)
    assert all((abs(own - wanted) <= 1e-13 * largest).all() for own in arrays)


@algorithms
@pytest.mark.parametrize("size", [3, 4])
def test_a_function_of_two_arrays_reduces_as_well(algorithm: str, size: int) -> None:
    def longest(first: Values, second: Values) -> Values:
        return np.where(np.abs(first) >= np.abs(second), first, second)

    arrays = random_arrays(size, 33, "float32", 3)
    wanted = np.array(arrays)[np.argmax(np.abs(arrays), axis=0), np.arange(33)]
    play(algorithm, arrays, longest, 5)
    assert all((own == wanted).all() for own in arrays)


@algorithms
def test_nan_and_infinity_reach_all_ranks(algorithm: str) -> None:
    arrays = [np.array([rank, rank, 1e38], np.float32) for rank in range(4)]
    arrays[2][0], arrays[3][1] = np.nan, np.inf
    play(algorithm, arrays, "sum", 1)
    assert all(np.isnan(own[0]) and own[1] == np.inf and own[2] == np.inf for own in arrays)


def test_chunks_go_round_the_ring_without_waiting_for_the_rest_of_their_share() -> None:
    size, chunks_of_share = 4, 10
    arrays = [np.ones(size * chunks_of_share, np.float32) for _ in range(size)]
    steps = ALLREDUCE["ring"](0, size, arrays[0], find_reduction("sum", arrays[0].dtype), 1)
    kinds, lent = [], np.ones(1, np.float32)
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            break
        kinds.append("send" if hasattr(step, "to") else "receive")
        answer = lent if kinds[-1] == "receive" and step.into is None else None  # type: ignore[union-attr]
    passes = 2 * (size - 1)
    assert kinds == ["send"] * chunks_of_share + ["receive", "send"] * chunks_of_share * (passes - 1) + (
        ["receive"] * chunks_of_share
    )


@pytest.mark.parametrize(("size", "seed"), [(2, None), (3, 1)])
def test_what_comes_last_round_a_ring_comes_in_ever_smaller_pieces(size: int, seed: int | None) -> None:
    share, least = 600_000, LAST_CHUNK_BYTES // 8
    arrays = random_arrays(size, size * share, "int64", 3)
    wanted = np.sum(arrays, axis=0)
    traffic = play("ring", arrays, "sum", share // 2, seed)
    assert all(np.array_equal(own, wanted) for own in arrays)
    *large, smallest, last = [piece.stop - piece.start for piece in dwindling(slice(share // 2, share), least)]
    assert large and 2 * least > last >= smallest >= least
    assert all(each.messages_sent == 2 * (2 * size - 3) + 1 + len(large) + 2 for each in traffic)


@given(st.integers(0, 50), st.integers(0, 200), st.integers(0, 9))
def test_the_pieces_of_a_chunk_are_all_of_it(start: int, length: int, least: int) -> None:
    pieces = list(dwindling(slice(start, start + length), least))
    assert [value for piece in pieces for value in range(piece.start, piece.stop)] == list(range(start, start + length))
    assert len(pieces) == 1 or all(piece.stop - piece.start >= max(1, least) for piece in pieces)


def test_the_hub_is_never_ahead_of_a_rank_by_more_than_its_chunks() -> None:
    steps = ALLREDUCE["hub"](0, 2, np.ones(100, np.float32), find_reduction("sum", np.dtype(np.float32)), 1)
    ahead = most = 0
    for step in steps:
        ahead += 1 if hasattr(step, "to") else -1
        most = max(most, ahead)
    assert (most, ahead) == (CHUNKS_AHEAD + 1, 0)
