"""What an allreduce is said to cost is what it costs when it is played."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.collectives.algorithms import (
    ALLREDUCE,
    HUB,
    Receive,
    Send,
    Steps,
    Traffic,
    reduce_at_the_hub,
    run_locally,
)
from zmqtrain.collectives.costs import (
    COSTS,
    bytes_sent,
    least_bytes,
    messages_sent,
    port_bytes,
    seconds_expected,
    steps_taken,
)
from zmqtrain.collectives.reductions import find_reduction
from zmqtrain.core.errors import ConfigError

SIZES = [1, 2, 3, 4, 5, 7, 8, 16]

algorithms = pytest.mark.parametrize("algorithm", ALLREDUCE)


def play(algorithm: str, size: int, values: int, chunk_values: int) -> list[Traffic]:
    op = find_reduction("sum", np.dtype(np.float32))
    arrays = [np.ones(values, np.float32) for _ in range(size)]
    hub = reduce_at_the_hub(size, values, arrays[0].dtype, op, chunk_values) if algorithm == "hub" else None
    ranks = [ALLREDUCE[algorithm](rank, size, arrays[rank], op, chunk_values) for rank in range(size)]
    return run_locally(ranks, hub=hub)


@algorithms
@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=examples(8))
@given(values=st.integers(0, 200), chunk_values=st.integers(1, 50))
def test_each_rank_sends_what_the_formula_says(algorithm: str, size: int, values: int, chunk_values: int) -> None:
    traffic = play(algorithm, size, values, chunk_values)
    said = [bytes_sent(algorithm, size, 4 * values, rank, itemsize=4) for rank in range(size)]
    assert [each.bytes_sent for each in traffic[:size]] == said
    if algorithm == "hub":
        assert traffic[HUB].bytes_sent == bytes_sent(algorithm, size, 4 * values, HUB, itemsize=4)


@algorithms
@pytest.mark.parametrize("size", SIZES[1:])
def test_no_port_carries_more_than_is_said(algorithm: str, size: int) -> None:
    values = 1680  # divided by all sizes and their halves
    traffic = play(algorithm, size, values, 7)
    busiest = max(max(each.bytes_sent, each.bytes_received) for each in traffic)
    said = port_bytes(algorithm, size, 4 * values)
    if algorithm == "halving" and size & (size - 1):
        assert busiest <= said  # of its phases not all keep the same port busy
    else:
        assert busiest == said
    assert said >= least_bytes(size, 4 * values) - 1e-9


@algorithms
@pytest.mark.parametrize("size", SIZES)
def test_the_steps_are_the_longest_way_of_messages(algorithm: str, size: int) -> None:
    op, values = find_reduction("sum", np.dtype(np.float32)), 16
    hub = reduce_at_the_hub(size, values, np.dtype(np.float32), op, values) if algorithm == "hub" else None
    arrays = [np.ones(values, np.float32) for _ in range(size)]
    sent: dict[tuple[int, int], list[int]] = {}
    longest = [0]

    def count(rank: int, steps: Steps) -> Steps:
        """Play the steps, and keep the number of messages, one after another, that have led to each one."""
        way, answer = 0, None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            if isinstance(step, Send):
                sent.setdefault((rank, step.to), []).append(way + 1)
            answer = yield step
            if isinstance(step, Receive):
                way = max(way, sent[step.source, rank].pop(0))
                longest.append(way)

    ranks = [count(rank, ALLREDUCE[algorithm](rank, size, arrays[rank], op, values)) for rank in range(size)]
    run_locally(ranks, hub=count(HUB, hub) if hub is not None else None)
    assert max(longest) == steps_taken(algorithm, size)


@algorithms
@pytest.mark.parametrize("size", SIZES)
def test_all_send_as_many_messages_as_is_said(algorithm: str, size: int) -> None:
    traffic = play(algorithm, size, 5 * size, 5 * size)
    assert sum(each.messages_sent for each in traffic) == messages_sent(algorithm, size)


def test_another_name_of_an_algorithm_costs_the_same() -> None:
    assert bytes_sent("recursive_halving", 4, 100, 1) == bytes_sent("halving", 4, 100, 1)
    assert messages_sent("recursive_halving", 8) == 2 * 8 * 3


def test_the_ring_needs_no_more_than_any_allreduce_must() -> None:
    assert port_bytes("ring", 4, 100) == least_bytes(4, 100) == 150
    assert seconds_expected("ring", 4, 100, latency_seconds=1, bytes_per_second=10) == 6 + 15
    assert seconds_expected("naive", 1, 100, latency_seconds=1, bytes_per_second=10) == 0


def test_every_allreduce_has_its_formula_and_others_have_none() -> None:
    assert set(COSTS) == set(ALLREDUCE)
    with pytest.raises(
        ConfigError, match="algorithm='star': choose one of naive, ring, parallel, tree, halving, sequential, hub"
    ):
        bytes_sent("star", 2, 4, 0)
