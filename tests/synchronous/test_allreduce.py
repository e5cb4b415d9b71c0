"""The exchange by allreduce, over communicators in memory: what is agreed, summed and aligned, and who is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from zmqtrain.collectives.communicator import Communicator
from zmqtrain.core.errors import PeerLost
from zmqtrain.core.types import Turn
from zmqtrain.synchronous import exchanges
from zmqtrain.synchronous.exchanges import AllreduceExchange
from zmqtrain.transport.memory_ports import memory_ports

STATE = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7, np.int32), np.zeros((0, 2), np.float32)]


class Together:
    """An exchange for each rank, and a thread for each."""

    def __init__(self, size, algorithm="ring"):
        self.ports = memory_ports(size)
        self.exchanges = [AllreduceExchange(Communicator(port, timeout_seconds=20.0), algorithm) for port in self.ports]
        self.pool = ThreadPoolExecutor(size)

    def do(self, what, ranks=None):
        ranks = range(len(self.exchanges)) if ranks is None else ranks
        return [f.result(30.0) for f in [self.pool.submit(what, self.exchanges[r], r) for r in ranks]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for exchange in self.exchanges:
            exchange.close()
        self.pool.shutdown()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_agree_on_the_samples_of_all_and_it_is_over_when_all_say_so(size):
    with Together(size) as group:
        assert (
            group.do(lambda exchange, rank: exchange.agree(10 * rank, rank > 0))
            == [Turn(sum(10 * rank for rank in range(size)), False)] * size
        )
        assert group.do(lambda exchange, rank: exchange.agree(0, True)) == [Turn(0, True)] * size


@pytest.mark.parametrize("algorithm", ["ring", "tree", "auto"])
def test_buckets_come_back_as_sums_in_their_order_and_nothing_that_was_given_is_changed(algorithm):
    given = [[np.full(n, rank + n, np.float32) for n in (5, 1000, 1)] for rank in range(3)]
    for arrays in given:
        for array in arrays:
            array.flags.writeable = False  # as what jax lends the host

    def step(exchange, rank):
        for number, array in enumerate(given[rank]):
            exchange.begin((number,), array)
        return exchange.finish()

    with Together(3, algorithm) as group:
        for sums in group.do(step):
            for n, total in zip((5, 1000, 1), sums, strict=True):
                np.testing.assert_array_equal(total, np.full(n, 3 + 3 * n, np.float32))
        sent, received = group.exchanges[0].traffic()
        assert sent > 0 and received > 0


def state_of(rank):
    return [(array + rank).astype(array.dtype) for array in STATE]


@pytest.mark.parametrize("packed_bytes", [1, 20, 1 << 20])
def test_at_the_beginning_all_take_the_first_ones_state(packed_bytes, monkeypatch):
    monkeypatch.setattr(exchanges, "PACKED_BYTES", packed_bytes)
    with Together(3) as group:
        (step, own), *others = group.do(lambda exchange, rank: exchange.align(-1, lambda: state_of(rank)))
        assert (step, own) == (-1, None)
        for step, arrays in others:
            assert step == -1
            for array, first in zip(arrays, STATE, strict=True):
                np.testing.assert_array_equal(array, first)
                assert array.dtype == first.dtype


def test_who_has_completed_one_step_less_takes_the_state_of_who_has_not():
    steps = [4, 5, 5]
    with Together(3) as group:
        (step, arrays), *others = group.do(lambda exchange, rank: exchange.align(steps[rank], lambda: state_of(rank)))
        assert step == 5 and others == [(5, None), (5, None)]
        for array, theirs in zip(arrays, state_of(1), strict=True):
            np.testing.assert_array_equal(array, theirs)


def test_where_all_have_made_as_many_steps_nothing_is_sent():
    with Together(2) as group:
        assert group.do(lambda exchange, rank: exchange.align(3, lambda: pytest.fail("not needed"))) == [(3, None)] * 2


def test_states_of_bfloat16_and_counts_travel_to_the_bit():
    state = [np.asarray(jnp.array([1.5, -2.25, 3e-3], jnp.bfloat16)), np.array([1 << 40], np.int64)]
    with Together(2) as group:
        _, (_, arrays) = group.do(
            lambda exchange, rank: exchange.align(-1, lambda: [(1 - rank) * array for array in state])
        )
        for array, first in zip(arrays, state, strict=True):
            assert array.dtype == first.dtype and array.tobytes() == first.tobytes()


def test_numbers_are_gathered_by_rank():
    with Together(3) as group:
        table = group.do(lambda exchange, rank: exchange.gather([rank, 0xFFFF_FFFF - rank]))
        assert table == [[(0, 0xFFFF_FFFF), (1, 0xFFFF_FFFE), (2, 0xFFFF_FFFD)]] * 3


def test_a_lost_process_is_named_to_all_and_those_who_are_left_go_on():
    def wait_for_the_lost(exchange, rank):
        exchange.begin((0,), np.ones(1000, np.float32))
        with pytest.raises(PeerLost, match="lost") as raised:
            exchange.finish()
        exchange.recover(raised.value)
        return raised.value.rank, exchange.names, exchange.rank, exchange.agree(1, False)

    with Together(3) as group:
        group.do(lambda exchange, rank: exchange.agree(0, False))
        group.ports.kill(1)
        found = group.do(wait_for_the_lost, (0, 2))
        names = (group.ports[0].names[0], group.ports[0].names[2])
        assert found == [(1, names, 0, Turn(2, False)), (1, names, 1, Turn(2, False))]


def test_those_who_are_left_of_a_group_for_which_the_hub_reduced_go_on_without_it():
    def go_on(exchange, rank):
        with pytest.raises(PeerLost) as raised:
            exchange.agree(1, False)
        exchange.recover(raised.value)
        exchange.begin((0,), np.ones(1000, np.float32))
        return exchange.finish()[0].sum()

    with Together(3, "hub") as group:
        group.ports.kill(1)
        assert group.do(go_on, (0, 2)) == [2000.0, 2000.0]
