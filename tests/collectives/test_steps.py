"""Playing the ranks of a collective in one thread: what goes where, and what is said when it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.collectives.algorithms import HUB, Receive, Send, Steps, Traffic, run_locally
from zmqtrain.collectives.reductions import Values
from zmqtrain.core.errors import CollectiveMismatch, LocalProtocolError


def numbers(*values: float) -> Values:
    return np.array(values, np.float32)


def send(to: int, *arrays: Values) -> Steps:
    for values in arrays:
        yield Send(to, values)


def receive(source: int, *arrays: Values) -> Steps:
    for into in arrays:
        yield Receive(source, into.size, into)


def test_what_is_sent_arrives_in_order_and_is_counted() -> None:
    first, second = np.empty(2, np.float32), np.empty(0, np.float32)
    traffic = run_locally([send(1, numbers(1, 2), numbers()), receive(0, first, second)])
    assert first.tolist() == [1, 2]
    assert traffic == [
        Traffic(bytes_sent=8, messages_sent=2),
        Traffic(bytes_received=8, messages_received=2),
    ]


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_any_number_of_ranks_pass_a_value_round_in_any_order_of_play(seed: int | None) -> None:
    def relay(rank: int, values: Values) -> Steps:
        if rank > 0:
            lent = yield Receive(rank - 1, 1)
            assert lent is not None
            values += lent
        yield Send((rank + 1) % 5, values)
        if rank == 0:
            yield Receive(4, 1, values)

    arrays = [numbers(10**rank) for rank in range(5)]
    run_locally([relay(rank, values) for rank, values in enumerate(arrays)], seed=seed)
    assert [int(values[0]) for values in arrays] == [11111, 11, 111, 1111, 11111]


def test_the_hub_is_one_more_and_stands_last() -> None:
    def double(values: Values) -> Steps:
        lent = yield Receive(0, 1)
        np.multiply(lent, 2, out=values)
        yield Send(0, values)

    def ask(values: Values) -> Steps:
        yield Send(HUB, values.copy())
        yield Receive(HUB, 1, values)

    mine = numbers(21)
    traffic = run_locally([ask(mine)], hub=double(numbers(0)))
    assert mine[0] == 42
    assert traffic[HUB] == Traffic(4, 4, 1, 1) and len(traffic) == 2


def test_a_deadlock_is_an_error_that_says_who_waits_for_whom() -> None:
    mine = numbers(0)
    with pytest.raises(
        CollectiveMismatch, match=r"rank 0 waits for 1 values of rank 1; rank 1 waits .* of rank 2, which has"
    ):
        run_locally([receive(1, mine), receive(2, mine), send(1)])


def test_a_message_of_another_length_or_dtype_is_an_error() -> None:
    with pytest.raises(CollectiveMismatch, match="what rank 0 sent to rank 1 is 2 values long, and not 1 as awaited"):
        run_locally([send(1, numbers(1, 2)), receive(0, numbers(0))])
    with pytest.raises(CollectiveMismatch, match="is float32, and not int8 as awaited"):
        run_locally([send(1, numbers(1)), receive(0, np.zeros(1, np.int8))])


def test_a_message_that_nobody_receives_is_an_error() -> None:
    with pytest.raises(
        CollectiveMismatch, match="rank 1 ended without 2 messages of rank 0, the first of them 3 values"
    ):
        run_locally([send(1, numbers(1, 2, 3), numbers(1)), receive(0)])


def test_writing_over_what_is_on_its_way_is_an_error() -> None:
    def hasty(values: Values) -> Steps:
        yield Send(1, values)
        values += 1
        yield Receive(1, 1, values)

    def slow(values: Values) -> Steps:
        yield Send(0, values)
        yield Receive(0, 1, values)

    with pytest.raises(LocalProtocolError, match="what rank 0 sent to rank 1 was written over before it was received"):
        run_locally([hasty(numbers(1)), slow(numbers(1))])


def test_what_is_lent_is_read_only_and_spoilt_at_the_next_yield() -> None:
    kept: list[Values] = []

    def keep() -> Steps:
        lent = yield Receive(0, 1)
        assert lent is not None and not lent.flags.writeable
        kept.append(lent)
        yield Receive(0, 1, numbers(0))
        assert kept[0][0] != 1

    run_locally([send(1, numbers(1), numbers(2)), keep()])


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (send(0, numbers(1)), "rank 0 names rank 0, which is no other one"),
        (send(HUB, numbers(1)), "rank 0 names the hub, which is no other one"),
        (send(1, np.zeros((2, 2))), "not flat and contiguous"),
        (send(1, np.zeros(4)[::2]), "not flat and contiguous"),
    ],
)
def test_a_step_against_the_rules_is_an_error(steps: Steps, why: str) -> None:
    with pytest.raises(LocalProtocolError, match=why):
        run_locally([steps, receive(0)])


def test_receiving_into_an_array_of_another_length_is_an_error() -> None:
    def wrong() -> Steps:
        yield Receive(1, 2, numbers(0))

    with pytest.raises(LocalProtocolError, match="rank 0 receives 2 values into 1"):
        run_locally([wrong(), send(0)])
