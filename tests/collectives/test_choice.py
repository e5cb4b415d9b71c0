"""How an allreduce is done follows from sizes alone, and no message is too small to be worth its costs."""

from __future__ import annotations

import itertools

import pytest

from zmqtrain.collectives.algorithms import ALLREDUCE, chunks, share_bounds
from zmqtrain.collectives.costs import TABLE, choose_algorithm, choose_chunk_bytes
from zmqtrain.core.types import MAX_FRAME_BYTES


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 1000])
@pytest.mark.parametrize("nbytes", [0, 8, 10_000, 1_000_000, 10**11])
def test_there_is_an_algorithm_for_every_size(size: int, nbytes: int) -> None:
    assert choose_algorithm(size, nbytes) in ALLREDUCE


def test_large_arrays_go_round_the_ring_and_small_ones_take_few_steps() -> None:
    for size in (2, 4, 8, 100):
        assert choose_algorithm(size, 10**8) == "ring" != choose_algorithm(size, 8)


def test_the_table_rises() -> None:
    for rows in (TABLE, *(rows for _, rows in TABLE)):
        assert [most for most, _ in rows] == sorted({most for most, _ in rows})


def test_large_arrays_go_in_whole_frames_and_small_ones_in_one_message() -> None:
    assert choose_chunk_bytes("ring", 4, 10**8) == MAX_FRAME_BYTES
    assert choose_chunk_bytes("ring", 4, 10_000) >= 10_000


@pytest.mark.parametrize("values", [2_500_000, 2_500_001, 2_500_003])
def test_a_share_goes_in_two_chunks_and_leaves_no_rest_of_a_few_values(values: int) -> None:
    bounds = share_bounds(values, 4)
    chunk_values = choose_chunk_bytes("ring", 4, 4 * values) // 4
    for start, stop in itertools.pairwise(bounds):
        assert [chunk.stop - chunk.start > 300_000 for chunk in chunks(start, stop, chunk_values)] == [True, True]


def test_what_goes_from_rank_to_rank_as_a_whole_goes_in_more_chunks_than_shares_do() -> None:
    for nbytes in (10**7, 10**8, 10**9):
        assert choose_chunk_bytes("chain", 4, nbytes) <= choose_chunk_bytes("parallel", 4, nbytes) / 4
        assert 2 * choose_chunk_bytes("chain", 4, nbytes) <= 0.04 * nbytes  # so much longer its last rank has to wait
