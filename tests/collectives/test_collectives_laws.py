"""The laws of the other collectives: what belongs where is there, bit by bit, at any root, in any order of play."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.collectives.algorithms import (
    ALLGATHER,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    Steps,
    Values,
    all_to_all,
    barrier,
    children,
    gather,
    parent,
    run_locally,
    scatter,
    share_bounds,
)
from zmqtrain.collectives.reductions import find_reduction

from orders import fold, reduced_to

SIZES = [1, 2, 3, 4, 5, 7, 8, 16]

sizes = pytest.mark.parametrize("size", SIZES)
seeds = st.none() | st.integers(0, 1000)
chunk_sizes = st.integers(1, 40)
few = settings(max_examples=examples(12))


def arrays_of(size: int, values: int, seed: int) -> list[Values]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(values).astype(np.float32) for _ in range(size)]


def parts_of(lengths: list[int], seed: int) -> list[Values]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 1 << 40, length) for length in lengths]


@pytest.mark.parametrize("algorithm", REDUCE_SCATTER)
@sizes
@few
@given(data=st.data())
def test_reduce_scatter_leaves_each_share_reduced_with_its_owner(
    algorithm: str, size: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    bounds = data.draw(st.sampled_from([None, [0, *accumulate(lengths)]]))
    arrays = arrays_of(size, sum(lengths), data.draw(st.integers(0, 1000)))
    first, op = {"ring": 1, "parallel": 0}[algorithm], find_reduction("mean", np.dtype(np.float32))
    wanted = []
    for rank in range(size):
        total = fold([arrays[(rank + first + step) % size] for step in range(size)], op)
        op.finish(total, size)
        wanted.append(total)
    chunk_values, reduce_scatter = data.draw(chunk_sizes), REDUCE_SCATTER[algorithm]
    run_locally(
        [reduce_scatter(rank, size, own, op, chunk_values, bounds) for rank, own in enumerate(arrays)],
        seed=data.draw(seeds),
    )
    cuts = bounds or share_bounds(sum(lengths), size)
    for rank, (own, total) in enumerate(zip(arrays, wanted, strict=True)):
        share = slice(cuts[rank], cuts[rank + 1])
        assert own[share].tobytes() == total[share].tobytes()


@pytest.mark.parametrize("algorithm", ALLGATHER)
@sizes
@few
@given(data=st.data())
def test_allgather_brings_every_share_to_all(algorithm: str, size: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    bounds = data.draw(st.sampled_from([None, [0, *accumulate(lengths)]]))
    (wanted,) = arrays_of(1, sum(lengths), data.draw(st.integers(0, 1000)))
    cuts = bounds or share_bounds(wanted.size, size)
    arrays = [np.zeros_like(wanted) for _ in range(size)]
    for rank, own in enumerate(arrays):
        own[cuts[rank] : cuts[rank + 1]] = wanted[cuts[rank] : cuts[rank + 1]]
    chunk_values, allgather = data.draw(chunk_sizes), ALLGATHER[algorithm]
    run_locally(
        [allgather(rank, size, own, chunk_values, bounds) for rank, own in enumerate(arrays)], seed=data.draw(seeds)
    )
    assert all((own == wanted).all() for own in arrays)


@pytest.mark.parametrize("algorithm", BROADCAST)
@sizes
@few
@given(data=st.data())
def test_broadcast_gives_all_what_the_root_has(algorithm: str, size: int, data: st.DataObject) -> None:
    root, values = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 70))
    arrays = arrays_of(size, values, data.draw(st.integers(0, 1000)))
    wanted, chunk_values, broadcast = arrays[root].copy(), data.draw(chunk_sizes), BROADCAST[algorithm]
    run_locally(
        [broadcast(rank, size, own, root, chunk_values) for rank, own in enumerate(arrays)], seed=data.draw(seeds)
    )
    assert all((own == wanted).all() for own in arrays)


@pytest.mark.parametrize("algorithm", REDUCE)
@sizes
@few
@given(data=st.data())
def test_reduce_leaves_the_reduction_in_the_stated_order_at_the_root(
    algorithm: str, size: int, data: st.DataObject
) -> None:
    root, values = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 70))
    op = find_reduction(data.draw(st.sampled_from(["sum", "mean", "max"])), np.dtype(np.float32))
    arrays = arrays_of(size, values, data.draw(st.integers(0, 1000)))
    wanted, chunk_values, reduce = reduced_to(algorithm, arrays, op, root), data.draw(chunk_sizes), REDUCE[algorithm]
    run_locally(
        [reduce(rank, size, own, op, root, chunk_values) for rank, own in enumerate(arrays)], seed=data.draw(seeds)
    )
    assert arrays[root].tobytes() == wanted.tobytes()


@sizes
@few
@given(data=st.data())
def test_scatter_gives_each_its_part_and_gather_brings_them_back(size: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    root, chunk_values, seed = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 9)), data.draw(seeds)
    parts = parts_of(lengths, 1)
    into = [np.zeros_like(part) for part in parts]
    run_locally(
        [
            scatter(rank, size, parts if rank == root else [], None if rank == root else into[rank], root, chunk_values)
            for rank in range(size)
        ],
        seed=seed,
    )
    assert all(rank == root or (got == part).all() for rank, (got, part) in enumerate(zip(into, parts, strict=True)))
    back = [np.zeros_like(part) for part in parts]
    run_locally(
        [
            gather(rank, size, None if rank == root else into[rank], back if rank == root else [], root, chunk_values)
            for rank in range(size)
        ],
        seed=seed,
    )
    assert all(rank == root or (got == part).all() for rank, (got, part) in enumerate(zip(back, parts, strict=True)))


@sizes
@few
@given(data=st.data())
def test_all_to_all_turns_the_table_of_parts(size: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=size * size, max_size=size * size))
    table = [parts_of(lengths[rank * size : (rank + 1) * size], rank) for rank in range(size)]
    into = [[np.zeros_like(table[source][rank]) for source in range(size)] for rank in range(size)]
    chunk_values = data.draw(st.integers(1, 6))
    run_locally(
        [all_to_all(rank, size, table[rank], into[rank], chunk_values) for rank in range(size)], seed=data.draw(seeds)
    )
    for rank in range(size):
        assert all((into[rank][source] == table[source][rank]).all() for source in range(size) if source != rank)


@sizes
@pytest.mark.parametrize("seed", range(5))
def test_no_rank_leaves_a_barrier_before_all_have_come(size: int, seed: int) -> None:
    come: set[int] = set()

    def pass_it(rank: int) -> Steps:
        come.add(rank)
        yield from barrier(rank, size)
        assert len(come) == size

    traffic = run_locally([pass_it(rank) for rank in range(size)], seed=seed)
    assert all((each.bytes_sent, each.messages_sent) == (0, (size - 1).bit_length()) for each in traffic)


@sizes
def test_in_a_binomial_tree_each_has_one_parent_and_the_root_no_more_than_log2_children(size: int) -> None:
    found = [(child, place) for place in range(size) for child in children(place, size)]
    assert sorted(child for child, _ in found) == list(range(1, size))
    assert all(parent(child) == place for child, place in found)
    assert len(children(0, size)) == (size - 1).bit_length()
