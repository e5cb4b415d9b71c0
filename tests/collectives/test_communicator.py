"""A communicator on ports in memory: each collective equals numpy's answer; what differs is an error, never a hang."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import zmqtrain as zt
from tests.grids import nightly
from zmqtrain.core.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    LocalProtocolError,
    NonFiniteDelta,
    OperationError,
    PeerLost,
)

SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
ALGORITHMS = ("auto", "naive", "ring", "tree", "halving", "parallel", "sequential")

Make = Callable[..., Any]


def own(rank: int, values: int, dtype: str = "float32") -> np.ndarray:
    """A rank's array, of whole numbers so that every order of adding gives the same."""
    return np.random.default_rng([rank, values]).integers(-9, 9, values).astype(dtype)


def good(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("size", SIZES)
def test_every_allreduce_is_numpys_sum_and_the_same_on_all_ranks(ranks: Make, size: int) -> None:
    group = ranks(size)
    for algorithm in ALGORITHMS:
        for values in (0, 1, size + 1, 40_001):
            expected = sum(own(rank, values) for rank in range(size))
            results = group.play(
                lambda comm, values=values, algorithm=algorithm: comm.allreduce(
                    own(comm.rank, values), algorithm=algorithm
                )
            )
            for result in good(results):
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", SIZES)
def test_every_other_collective_is_numpys_answer(ranks: Make, size: int) -> None:
    group, values, root = ranks(size), 30_007, size // 2
    arrays = [own(rank, values) for rank in range(size)]

    def part(comm: Any) -> dict[str, Any]:
        x, one_each = arrays[comm.rank], [arrays[comm.rank][to : to + 999] for to in range(size)]
        comm.barrier()
        return {
            "reduce": comm.reduce(x, "max", root),
            "reduce_scatter": comm.reduce_scatter(x),
            "allgather": comm.allgather(x),
            "broadcast": comm.broadcast(x if comm.rank == root else None, root),
            "scatter": comm.scatter(arrays if comm.rank == root else None, root),
            "gather": comm.gather(x, root),
            "all_to_all": comm.all_to_all(one_each),
        }

    total = sum(arrays)
    for rank, result in enumerate(good(group.play(part))):
        if rank == root:
            np.testing.assert_array_equal(result["reduce"], np.max(arrays, axis=0))
            np.testing.assert_array_equal(result["gather"], arrays)
        else:
            assert result["reduce"] is None and result["gather"] is None
        share = slice(values * rank // size, values * (rank + 1) // size)
        np.testing.assert_array_equal(result["reduce_scatter"], total[share])
        np.testing.assert_array_equal(result["allgather"], arrays)
        np.testing.assert_array_equal(result["broadcast"], arrays[root])
        np.testing.assert_array_equal(result["scatter"], arrays[rank])
        np.testing.assert_array_equal(result["all_to_all"], [array[rank : rank + 999] for array in arrays])


def test_arrays_of_many_megabytes_pass_windows_and_parts(ranks: Make) -> None:
    group, values = ranks(3), 5_000_000
    arrays = [own(rank, values) for rank in range(3)]

    def part(comm: Any) -> tuple[Any, ...]:
        mine = arrays[comm.rank].copy()
        return (
            comm.allreduce(mine, into=mine) is mine,
            mine,
            comm.broadcast(arrays[1], 1),
            comm.gather(mine[: 1 << 20], 2),
        )

    results = good(group.play(part))
    for in_place, total, spread, _ in results:
        assert in_place
        np.testing.assert_array_equal(total, sum(arrays))
        np.testing.assert_array_equal(spread, arrays[1])
    assert [len(results[2][3]), results[0][3]] == [3, None]


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "float64", "complex64", "bfloat16", "bool"])
def test_dtypes_keep_their_kind(ranks: Make, dtype: str) -> None:
    arrays = [
        np.asarray(jnp.asarray(own(rank, 1000) > 0, dtype))
        if dtype == "bfloat16"
        else (own(rank, 1000) > 0).astype(dtype)
        for rank in range(3)
    ]
    op = "max" if dtype == "bool" else "sum"
    expected = np.any(arrays, axis=0) if dtype == "bool" else arrays[0] + arrays[1] + arrays[2]
    for result in good(ranks(3).play(lambda comm: comm.allreduce(arrays[comm.rank], op))):
        assert result.dtype == arrays[0].dtype
        np.testing.assert_array_equal(result, expected)


class Pair(NamedTuple):
    weight: Any
    bias: Any


def test_trees_numbers_and_jax_arrays_come_back_as_what_they_were(ranks: Make) -> None:
    trees = [  # made before: a rank would compile for longer than the other one waits
        {
            "layers": [Pair(jnp.full((2, 3), rank, jnp.float32), np.full(3, rank)), Pair(None, 1.5)],
            "half": jnp.ones(5, jnp.bfloat16),
            "count": rank,
        }
        for rank in range(2)
    ]

    def part(comm: Any) -> Any:
        tree = trees[comm.rank]
        return comm.allreduce(tree), comm.broadcast(tree, 1), comm.allreduce(np.float32(comm.rank))

    for total, spread, scalar in good(ranks(2).play(part)):
        assert isinstance(total["layers"][0], Pair) and isinstance(total["layers"][0].weight, type(jnp.zeros(1)))
        np.testing.assert_array_equal(total["layers"][0].weight, np.ones((2, 3)))
        assert total["layers"][1] == Pair(None, 3.0) and total["count"] == 1 and isinstance(total["count"], int)
        assert total["half"].dtype == jnp.bfloat16 and total["half"][0] == 2
        assert spread["count"] == 1 and isinstance(spread["layers"][0].weight, type(jnp.zeros(1)))
        assert scalar == 1 and scalar.dtype == np.float32


def test_several_collectives_are_on_their_way_and_may_be_waited_for_in_any_order(ranks: Make) -> None:
    group, values = ranks(3), 3_000_000

    def part(comm: Any) -> list[float]:
        requests = [comm.iallreduce(np.full(values, index + comm.rank, np.float32)) for index in range(4)]
        order = [3, 1, 0, 2] if comm.rank else [0, 1, 2, 3]
        means = {index: float(requests[index].wait()[-1]) for index in order}
        assert zt.wait_any(requests) == 0 and all(request.test() for request in requests)
        return [means[index] for index in range(4)]

    assert good(group.play(part)) == [[3.0, 6.0, 9.0, 12.0]] * 3


def test_own_functions_reduce_too(ranks: Make) -> None:
    results = ranks(4).play(lambda comm: comm.allreduce(np.array([comm.rank + 1, 5]), np.gcd))
    for result in good(results):
        np.testing.assert_array_equal(result, [1, 5])


@pytest.mark.parametrize(("op", "wanted"), [("BAND", [0, 5]), ("bor", [3, 5]), (np.bitwise_xor, [0, 0])])
def test_bits_are_reduced_and_the_case_of_a_name_does_not_tell_ranks_apart(ranks: Make, op: Any, wanted: Any) -> None:
    ops = [op, op.lower() if isinstance(op, str) else "BXOR"]
    results = ranks(4).play(lambda comm: comm.allreduce(np.array([comm.rank, 5]), ops[comm.rank % 2]))
    for result in good(results):
        np.testing.assert_array_equal(result, wanted)


def test_the_names_of_one_algorithm_do_not_tell_ranks_apart(ranks: Make) -> None:
    names = ["halving", "recursive_halving", "halving"]
    results = ranks(3).play(lambda comm: comm.allreduce(np.arange(5), algorithm=names[comm.rank]))
    assert [result.tolist() for result in good(results)] == [[0, 3, 6, 9, 12]] * 3


@pytest.mark.parametrize("codec", ["float32", "bf16", "int8", "ternary"])
@pytest.mark.parametrize("size", [1, 3, *nightly(2, 5)])
def test_an_encoded_allreduce_is_the_same_on_all_ranks_and_near_the_sum(ranks: Make, codec: str, size: int) -> None:
    values = 5 * 65_536 + 77
    arrays = [np.random.default_rng(rank).standard_normal(values).astype(np.float32) for rank in range(size)]
    results = good(ranks(size).play(lambda comm: comm.allreduce(arrays[comm.rank], "mean", codec=codec)))
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    error = np.linalg.norm(results[0] - np.mean(arrays, axis=0)) / np.linalg.norm(np.mean(arrays, axis=0))
    assert error < {"float32": 1e-6, "bf16": 0.01, "int8": 0.05, "ternary": 1.0}[codec]


def test_what_an_encoded_allreduce_cannot_do_is_refused(ranks: Make) -> None:
    comm = ranks(1).communicators[0]
    x = np.ones(3, np.float32)
    with pytest.raises(ConfigError, match="only sum and mean"):
        comm.allreduce(x, "max", codec="int8")
    with pytest.raises(ConfigError, match="float32"):
        comm.allreduce(np.ones(3), codec="int8")
    with pytest.raises(ConfigError, match="keeps state"):
        comm.allreduce(x, codec="feedback+int8")
    with pytest.raises(ConfigError, match="no codec"):
        comm.allreduce(x, codec=7)


def test_values_that_are_not_finite_are_said_by_all_ranks(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        return comm.allreduce(np.full(10, np.nan if comm.rank == 1 else 1, np.float32), codec="int8")

    results = ranks(3).play(part)
    assert isinstance(results[1], NonFiniteDelta)
    assert all(isinstance(result, CollectiveMismatch) for result in (results[0], results[2]))


# What differs between ranks.

DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "order": lambda comm: comm.barrier() if comm.rank else comm.allreduce(np.ones(3)),
    "shape": lambda comm: comm.allreduce(np.ones(3 + comm.rank)),
    "dtype": lambda comm: comm.allreduce(np.ones(3, "f4" if comm.rank else "f8")),
    "op": lambda comm: comm.allreduce(np.ones(3), "max" if comm.rank else "sum"),
    "algorithm": lambda comm: comm.allreduce(np.ones(3), algorithm="ring" if comm.rank else "naive"),
    "root": lambda comm: comm.broadcast(np.ones(3), root=comm.rank),
    "both wait": lambda comm: comm.broadcast(None, root=1 - comm.rank) if comm.rank < 2 else comm.barrier(),
    "reduce and broadcast": lambda comm: comm.reduce(np.ones(3), root=0) if comm.rank else comm.broadcast(np.ones(3)),
    "gather and scatter": lambda comm: (
        comm.gather(np.ones(3), root=0) if comm.rank else comm.scatter(np.ones(comm.size))
    ),
    "what is broadcast": lambda comm: comm.broadcast(np.ones(3 + comm.rank)),
    "codec": lambda comm: comm.allreduce(np.ones(3, "f4"), codec="int8" if comm.rank else None),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", DIFFERENT)
def test_calls_that_differ_are_named_on_all_ranks_with_both_calls_and_both_ranks(
    ranks: Make, what: str, size: int
) -> None:
    group = ranks(size)
    results = group.play(DIFFERENT[what])
    later = group.play(lambda comm: comm.barrier())
    for result in [*results, *later]:
        assert isinstance(result, CollectiveMismatch), result
        assert str(result).count("(pc-") == 2


def test_after_calls_differed_all_go_on_in_a_new_communicator(ranks: Make) -> None:
    group = ranks(3)

    def part(comm: Any) -> Any:
        with pytest.raises(CollectiveMismatch):
            comm.allreduce(np.ones(3 + (comm.rank == 1)))
        return comm.shrink().allreduce(np.ones(3))

    for result in good(group.play(part)):
        np.testing.assert_array_equal(result, np.full(3, 3.0))


def test_a_callback_that_fails_costs_no_other_request_anything(ranks: Make, caplog: Any) -> None:
    group = ranks(2)

    def fail(request: Any) -> None:
        raise ValueError("a mistake")

    first, second = group.communicators
    requests = [first.irecv(source=1, tag=tag) for tag in range(3)]
    told = threading.Semaphore(0)
    for request in requests:
        request.add_done_callback(fail)
        request.add_done_callback(lambda _: told.release())
    second.close()  # all of them end at once
    for request in requests:
        with pytest.raises(PeerLost):
            request.wait()
        assert told.acquire(timeout=20)
    assert caplog.text.count("ValueError: a mistake") == 3


def test_a_tree_that_cannot_be_described_in_a_message_is_refused_to_who_gives_it(ranks: Make) -> None:
    comm = ranks(1).communicators[0]
    for call in (comm.iallreduce, lambda tree: comm.isend(tree, 0)):
        with pytest.raises(ConfigError, match=r"50000 arrays.*join some"):
            call([np.ones(1)] * 50_000)


def test_functions_without_a_name_of_their_own_are_the_same_on_all_ranks(ranks: Make) -> None:
    def add(first: Any, second: Any, times: int) -> Any:
        return first + second * times

    class Adding:
        def __call__(self, first: Any, second: Any) -> Any:
            return first + second

    def part(comm: Any) -> Any:
        here = functools.partial(lambda a, b, times: add(a, b, times), times=1)
        return comm.allreduce(np.ones(3), here) + comm.allreduce(np.ones(3), Adding())

    for result in good(ranks(2).play(part)):
        np.testing.assert_array_equal(result, np.full(3, 4.0))


def test_a_child_that_was_forked_is_told_that_the_communicator_is_its_parents(ranks: Make, monkeypatch: Any) -> None:
    comm = ranks(1).communicators[0]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(LocalProtocolError, match="after the fork"):
        comm.barrier()


def test_a_function_that_fails_fails_the_call_on_all_ranks(ranks: Make) -> None:
    def divide(first: Any, second: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    results = ranks(2).play(lambda comm: comm.allreduce(np.ones(3), divide, algorithm="naive"))
    assert all(isinstance(result, OperationError) and "on purpose" in str(result) for result in results)


def test_a_rank_that_does_not_make_the_call_is_named_with_what_it_did_last(
    ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqtrain.collectives.group.EXPLAIN_SECONDS", 60.0)
    monkeypatch.setattr("zmqtrain.collectives.group.GRACE_SECONDS", 60.0)
    group, begun, told = ranks(3), threading.Barrier(2), threading.Barrier(3)

    def part(comm: Any) -> Any:
        comm.barrier()
        if comm.rank == 1:
            told.wait(20)
            return comm.allreduce(np.ones(3))
        request = comm.iallreduce(np.ones(3), algorithm="ring")
        try:
            begun.wait(20)  # who has not made the call is rank 1 alone
            with pytest.raises(CollectiveTimeout) as caught:
                request.wait(0.1)
        finally:
            told.wait(20)
        assert caught.value.waiting_for == (1,)
        assert "rank 1 (pc-1), which has not made this call; the last it did: barrier() (call number 1)" in str(
            caught.value
        )
        return request.wait()  # who waited in vain can wait again

    for result in group.play(part):
        assert isinstance(result, CollectiveMismatch), result  # naive and ring: it is that, and no hang


def test_an_answer_to_an_earlier_question_says_nothing_of_what_a_rank_does_now(
    ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqtrain.collectives.group.EXPLAIN_SECONDS", 60.0)
    group, told = ranks(3), queue.SimpleQueue[CollectiveTimeout]()
    good(group.play(lambda comm: comm.barrier()))
    group.ports.hold(2, 0)
    request = group.communicators[0].iallreduce(np.ones(3), algorithm="ring")
    mine = group.communicators[0]._group

    def do(rank: int, what: Callable[[], object]) -> None:
        """Have a rank do something after all that has come to it, and wait for that."""
        done = threading.Event()
        for each in (what, done.set):
            group.communicators[rank]._endpoint.port.call(each)
        assert done.wait(20)

    do(0, lambda: (mine.calls.ask(None), mine.settle()))
    do(2, lambda: None)  # it has said that it did a barrier last
    group.communicators[2].iallreduce(np.ones(3), algorithm="ring")
    do(0, lambda: mine.explain(request, 0.1, told))
    for rank in (1, 2, 0):
        do(rank, lambda: None)
    group.ports.release(2, 0)
    assert told.get(timeout=20).waiting_for == (1,)


def test_bad_arguments_are_said_before_anything_is_sent(ranks: Make) -> None:
    comm = ranks(2).communicators[0]
    with pytest.raises(ConfigError, match="choose one of auto"):
        comm.allreduce(np.ones(3), algorithm="quick")
    with pytest.raises(ConfigError, match="root must be 0 to 1"):
        comm.broadcast(None, root=2)
    with pytest.raises(ConfigError, match="one array for each of 2 ranks"):
        comm.all_to_all([np.ones(3)])
    with pytest.raises(ConfigError, match="one shape and dtype"):
        comm.all_to_all([np.ones(3), np.ones(4)])
    with pytest.raises(ConfigError, match="str is no array"):
        comm.allreduce("text")
    with pytest.raises(ConfigError, match="a mask does not travel"):
        comm.allreduce([np.ma.array([1.0, 2.0], mask=[True, False])])
    with pytest.raises(ConfigError, match="into is a contiguous numpy array like x"):
        comm.allreduce(np.ones(3), into=np.ones(4))
    with pytest.raises(ConfigError, match="takes one array"):
        comm.reduce_scatter([np.ones(3)])
    with pytest.raises(LocalProtocolError, match="lost nobody"):
        comm.shrink()
    comm.close()
    with pytest.raises(LocalProtocolError, match="is closed"):
        comm.barrier()


def test_figures_count_what_moves(ranks: Make) -> None:
    group, values = ranks(4), 100_000

    def part(comm: Any) -> Any:
        comm.allreduce(np.ones(values, np.float32), algorithm="ring")
        return comm.statistics()

    results = good(group.play(part))
    assert sum(result.values_sent for result in results) == 2 * 3 * 4 * values
    assert all(result.bytes_sent > result.values_sent and result.relayed == () for result in results)


@pytest.mark.parametrize("op", [sum, np.sum, "sum"])
def test_the_example_of_the_lecture_is_a_sum(ranks: Make, op: Any) -> None:
    arrays = [np.array([1, 2, 3]), np.array([1, 0, 1])]
    for result in good(ranks(2).play(lambda comm: comm.allreduce(arrays[comm.rank], op=op))):
        assert result.tolist() == [2, 2, 4]


def test_two_lambdas_that_differ_are_told_apart_on_all_ranks(ranks: Make) -> None:
    operations = [lambda first, second: first + second, lambda first, second: first * second]
    for result in ranks(3).play(lambda comm: comm.allreduce(np.arange(3), op=operations[comm.rank // 2])):
        assert isinstance(result, CollectiveMismatch) and "<lambda>#" in str(result)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_operation_that_fails_is_an_error_that_names_it_and_the_communicator_goes_on(
    ranks: Make, algorithm: str
) -> None:
    def careful(first: Any, second: Any) -> Any:
        if (first > 100).any() or (second > 100).any():
            raise ArithmeticError("a value over 100")
        return first + second

    def part(comm: Any) -> Any:
        large = comm.iallreduce(np.full(1000, 90 + 20 * (comm.rank == 1)), op=careful, algorithm=algorithm)
        small = comm.iallreduce(np.full(1000, comm.rank), op=careful, algorithm=algorithm)
        with pytest.raises(OperationError, match=r"careful#.* failed .* ArithmeticError: a value over 100"):
            large.wait()
        return [small.wait(), comm.allreduce(np.arange(5), op=careful, algorithm=algorithm)]

    for first, second in good(ranks(4).play(part)):
        assert first.tolist() == [6] * 1000 and second.tolist() == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("call", ["allreduce", "reduce_scatter", "allgather", "gather", "reduce", "all_to_all"])
@pytest.mark.parametrize("values", [0, 1])
def test_no_rank_has_a_result_of_values_of_all_while_another_makes_a_call_that_differs(
    ranks: Make, call: str, values: int
) -> None:
    group = ranks(3)
    made = threading.Event()

    def part(comm: Any) -> Any:
        if comm.rank == 2:
            assert made.wait(30)  # the others' calls are all that can be, before this one
            return comm.allgather(np.zeros(7))
        x = np.zeros(values, np.float32)
        request = getattr(comm, f"i{call}")([x] * 3 if call == "all_to_all" else x)
        if comm.rank == 0:
            made.set()
        return request.wait()

    results = group.play(part)
    assert isinstance(results[0], CollectiveMismatch), results
    if values or call not in ("gather", "reduce"):
        assert all(isinstance(result, CollectiveMismatch) for result in results[1:] if result is not None), results


@pytest.mark.parametrize("call", ["broadcast", "scatter"])
def test_a_root_that_differs_is_an_error_there_and_at_the_next_call_of_those_who_have_their_values(
    ranks: Make, call: str
) -> None:
    first = ranks(3)

    def part(comm: Any) -> Any:
        root = int(comm.rank == 1)
        xs = [np.full(3, comm.rank) for _ in range(3)]
        try:
            result = getattr(comm, call)(xs if call == "scatter" else xs[0], root)
        except CollectiveMismatch as error:
            return error
        assert comm.rank == 2 and result.tolist() == [0, 0, 0]  # as its own call and the root's say
        with pytest.raises(CollectiveMismatch):
            comm.barrier()
        return None

    results = good([None if isinstance(one, CollectiveMismatch) else one for one in first.play(part)])
    assert results == [None, None, None]
