"""Collectives of arrays of different lengths, and of Python values, which have no shape at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import CollectiveMismatch, ConfigError, FramingError
from zmqtrain.protocol.framing import pack_value, unpack_value

Make = Callable[..., Any]
SIZES = (1, 2, 3, 5)


def good(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def rows(count: int, first: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    """An array of so many rows, whose values begin with `first`."""
    return (first + np.arange(count * int(np.prod(shape)))).reshape(count, *shape).astype(dtype)


# Arrays of different lengths.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_uneven_parts_come_whole_and_in_the_order_of_the_ranks(ranks: Make, size: int, shape: tuple[int, ...]) -> None:
    root = size // 2

    def length(source: int, to: int = 0) -> int:
        return (3 * source + 2 * to) % 7 * (source != 1)  # rank 1 has nothing for anybody

    def part(comm: Any) -> Any:
        one_each = [rows(length(comm.rank, to), 100 * comm.rank + to, *shape) for to in range(size)]
        spread = [rows(length(to), to, *shape) for to in range(size)] if comm.rank == root else None
        return comm.gatherv(one_each[0], root), comm.scatterv(spread, root), comm.all_to_allv(one_each)

    for rank, (gathered, scattered, exchanged) in enumerate(good(ranks(size).play(part))):
        wanted = [rows(length(source), 100 * source, *shape) for source in range(size)]
        if rank == root:
            assert [(one.shape, one.tolist()) for one in gathered] == [(one.shape, one.tolist()) for one in wanted]
        else:
            assert gathered is None
        np.testing.assert_array_equal(scattered, rows(length(rank), rank, *shape))
        came = [rows(length(source, rank), 100 * source + rank, *shape) for source in range(size)]
        assert [(one.shape, one.tolist()) for one in exchanged] == [(one.shape, one.tolist()) for one in came]


def test_uneven_parts_of_megabytes_pass_windows_and_parts(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        own = rows(1_000_000 * comm.rank + 5, comm.rank, dtype="int32")
        return comm.gatherv(own), comm.all_to_allv([own[: own.size - to] for to in range(3)])

    results = good(ranks(3).play(part))
    assert [one.size for one in results[0][0]] == [5, 1_000_005, 2_000_005]
    for rank, (_, came) in enumerate(results):
        for source, one in enumerate(came):
            np.testing.assert_array_equal(one, rows(1_000_000 * source + 5 - rank, source, dtype="int32"))


def test_what_is_gathered_unevenly_can_be_broadcast(ranks: Make) -> None:
    for all_of_them in good(ranks(3).play(lambda comm: comm.broadcast(comm.gatherv(rows(comm.rank, 0, 2))))):
        assert [one.tolist() for one in all_of_them] == [[], [[0, 1]], [[0, 1], [2, 3]]]


def test_uneven_parts_come_back_in_the_callers_kind(ranks: Make) -> None:
    xs = [jnp.arange(rank + 1.0) for rank in range(2)]

    def part(comm: Any) -> Any:
        return comm.gatherv(xs[comm.rank], 0), comm.all_to_allv([xs[comm.rank]] * 2)

    gathered, exchanged = good(ranks(2).play(part))[0]
    assert all(isinstance(one, type(xs[0])) for one in [*gathered, *exchanged])
    assert [one.tolist() for one in gathered] == [[0.0], [0.0, 1.0]]


UNLIKE: dict[str, Callable[[Any, Any], Any]] = {
    "gatherv": lambda comm, x: comm.gatherv(x),
    "all_to_allv": lambda comm, x: comm.all_to_allv([x] * comm.size),
}


@pytest.mark.parametrize("other", [rows(3, 0, 2, dtype="float64"), rows(3, 0, 3)])
@pytest.mark.parametrize("call", UNLIKE)
def test_another_dtype_or_another_second_axis_is_named_on_all_ranks(ranks: Make, call: str, other: Any) -> None:
    group = ranks(3)
    results = group.play(lambda comm: UNLIKE[call](comm, other if comm.rank == 1 else rows(3, 0, 2)))
    results += group.play(lambda comm: comm.barrier())  # who has only sent may hear of it here
    for result in results:
        assert isinstance(result, CollectiveMismatch), result
        assert call in str(result) and "float32[*,2]" in str(result), result
        assert "differ along the first axis only" in str(result)


@pytest.mark.parametrize("call", UNLIKE)
def test_arrays_of_different_lengths_where_they_must_be_equal_are_told_of_the_call_that_takes_them(
    ranks: Make, call: str
) -> None:
    even = call.removesuffix("v")
    results = ranks(2).play(
        lambda comm: getattr(comm, even)([np.ones(3 + comm.rank)] * 2 if "all" in even else np.ones(3 + comm.rank))
    )
    assert any(f"({call} takes arrays of different lengths)" in str(result) for result in results), results


def test_what_has_no_first_axis_or_differs_in_the_others_is_said_before_anything_is_sent(ranks: Make) -> None:
    comm = ranks(2).communicators[0]
    with pytest.raises(ConfigError, match="gatherv takes an array with at least one axis, got float64"):
        comm.gatherv(np.float64(3))
    with pytest.raises(ConfigError, match="at least one axis"):
        comm.gatherv([np.ones(3)])
    with pytest.raises(ConfigError, match="all_to_allv takes one array for each of 2 ranks, got 1"):
        comm.all_to_allv([np.ones(3)])
    with pytest.raises(ConfigError, match="scatterv takes one array for each of 2 ranks, got none"):
        comm.scatterv(None)
    with pytest.raises(ConfigError, match=r"rank 0 is float64\[\*,2\], that for rank 1 float64\[\*,3\]"):
        comm.scatterv([np.ones((3, 2)), np.ones((3, 3))])


def test_a_number_of_rows_that_cannot_be_ends_the_call_on_all_ranks(ranks: Make, monkeypatch: Any) -> None:
    group = ranks(2)
    monkeypatch.setattr("zmqtrain.collectives.communicator._Rows.count", property(lambda rows: 1 << 60))
    for result in group.play(lambda comm: comm.gatherv(np.ones(3))):
        assert isinstance(result, CollectiveMismatch) and "has no memory" in str(result)


# Python values.

VALUE = {
    "name": "MNIST",
    "layers": [784, 30, 10],
    "rate": 0.5,
    "shape": (28, 28),
    "raw": b"\x00\xff",
    "none": None,
    "flags": [True, False],
    3: {"nested": ("a", ("b",), [])},
}


def same(first: Any, second: Any) -> bool:
    """Equal, of the same types."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.parametrize("value", [None, True, 5, -(1 << 63), 2.5, "text", b"bytes", [], {}, (), VALUE, "x" * 200_000])
def test_python_values_are_sent_broadcast_and_gathered_as_they_are(ranks: Make, value: Any) -> None:
    def part(comm: Any) -> Any:
        if comm.rank == 0:
            comm.send(value, dest=1)
        came = comm.recv() if comm.rank == 1 else value
        spread = comm.broadcast(value if comm.rank == 2 else None, root=2)
        gathered = comm.gather([comm.rank, value], root=1)
        return came, spread, gathered

    for rank, (came, spread, gathered) in enumerate(good(ranks(3).play(part))):
        assert same(came, value) and same(spread, value)
        assert gathered is None if rank != 1 else same(gathered, [[source, value] for source in range(3)])


def test_the_values_that_are_gathered_may_differ_as_they_like(ranks: Make) -> None:
    values = ["text", 5, {"a": None}]
    assert good(ranks(3).play(lambda comm: comm.broadcast(comm.gather(values[comm.rank])))) == [values] * 3


def test_a_value_given_elsewhere_than_on_the_root_is_not_looked_at(ranks: Make) -> None:
    assert good(ranks(3).play(lambda comm: comm.broadcast(f"of {comm.rank}", root=1))) == ["of 1"] * 3


def test_the_status_of_a_value_says_so(ranks: Make) -> None:
    comm = ranks(1).communicators[0]
    comm.isend("abc", dest=0, tag=2)
    status = comm.probe()
    assert (status.source, status.tag, status.shape, status.dtype, status.count) == (0, 2, (), "value", 4)


def test_a_value_does_not_go_into_an_array(ranks: Make) -> None:
    comm = ranks(1).communicators[0]
    comm.isend("abc", dest=0)
    with pytest.raises(CollectiveMismatch, match=r"sent value\[4\].*receives into uint8"):
        comm.recv(into=np.empty(10, np.uint8))


@pytest.mark.parametrize("call", ["gather", "broadcast"])
def test_a_value_and_an_array_are_calls_that_differ(ranks: Make, call: str) -> None:
    group = ranks(3)

    def part(comm: Any) -> Any:
        x: Any = "text" if comm.rank == 1 else np.ones(3)
        return getattr(comm, call)(x)

    assert any(isinstance(result, CollectiveMismatch) for result in group.play(part))
    for result in group.play(lambda comm: comm.barrier()):
        assert isinstance(result, CollectiveMismatch) and "value" in str(result)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1 << 64, "more than 64 bits"),
        ({"a": {1, 2}}, "set is no array"),
        ({"a": "text", "b": np.ones(3)}, "with no array beside it"),
        ("\ud800", "does not travel"),
        (object(), "object is no array"),
    ],
)
def test_what_does_not_travel_is_said_where_it_is_given(ranks: Make, value: Any, said: str) -> None:
    comm = ranks(2).communicators[0]
    for call in (lambda: comm.send(value, dest=1), lambda: comm.gather(value), lambda: comm.broadcast(value)):
        with pytest.raises(ConfigError, match=said):
            call()


def test_a_value_that_contains_itself_is_said_to_be_too_deep(ranks: Make) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="deep"):
        ranks(1).communicators[0].send(value, dest=0)


def test_subclasses_travel_as_what_they_are_made_of() -> None:
    class Name(str):
        pass

    assert same(unpack_value(pack_value([Name("a"), {"b": Name("c")}])), ["a", {"b": "c"}])


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inside: (
        st.lists(inside) | st.lists(inside).map(tuple) | st.dictionaries(st.text() | st.integers(0, 9), inside)
    ),
    max_leaves=20,
)


@settings(max_examples=examples(50))
@given(plain)
def test_any_python_value_comes_back_as_it_was(value: Any) -> None:
    assert same(unpack_value(pack_value(value)), value)


@settings(max_examples=examples(50))
@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_a_framing_error(packed: bytes) -> None:
    with contextlib.suppress(FramingError):
        unpack_value(packed)


def test_a_value_that_was_packed_to_overflow_the_stack_is_a_framing_error() -> None:
    packed = b"\x90"
    for _ in range(3000):
        packed = b"\xc9" + len(packed).to_bytes(4, "big") + b"\x01" + packed
    with pytest.raises(FramingError):
        unpack_value(packed)
    value: Any = ()
    for _ in range(3000):
        value = (value,)
    with pytest.raises(ConfigError, match="tuples lie in each other"):
        pack_value(value)


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", b"\x93\x01", b"\xc7\x01\x05x", b"\xc7\x01\x01\x01", b"\x81\x90\x01", b"\x01\x02"]
)
def test_what_is_no_packed_value_is_a_framing_error(packed: bytes) -> None:
    with pytest.raises(FramingError):
        unpack_value(packed)
