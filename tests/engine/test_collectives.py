"""The communicator's calls, pushed to an engine: computing goes on beside them, in order, and a loss is carried."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import zmqtrain as zt
from zmqtrain.collectives.communicator import Communicator
from zmqtrain.core.errors import PeerLost
from zmqtrain.engine.graph import Variable
from zmqtrain.transport.memory_ports import MemoryPorts, memory_ports

SECONDS = 30.0
SIZE, BUCKETS, VALUES = 3, 4, 1000


class Rank:
    """One process's engine, communicator and buckets."""

    def __init__(self, communicator: Communicator) -> None:
        self.comm, self.engine = communicator, zt.Engine(2, name=f"rank {communicator.rank}")
        self.wire = self.engine.variable(name="wire")
        self.computed = [self.engine.variable(name=f"computed {bucket}") for bucket in range(BUCKETS)]
        self.reduced = [self.engine.variable(name=f"reduced {bucket}") for bucket in range(BUCKETS)]

    def push(self, bucket: int) -> None:
        """Push the computation of a bucket and its allreduce; ranks finish computing in different orders."""
        computed, reduced = self.computed[bucket], self.reduced[bucket]
        priority = float((bucket + 1) * (self.comm.rank + 1) % SIZE)
        self.engine.push(lambda: np.full(VALUES, 10.0 * bucket + self.comm.rank), mutate=[computed], priority=priority)
        self.engine.push_request(
            lambda: self.comm.iallreduce(computed.value), read=[computed], mutate=[reduced, self.wire]
        )

    def wait(self, variable: Variable) -> np.ndarray:
        result: np.ndarray = self.engine.wait(variable, SECONDS)
        return result

    def close(self) -> None:
        self.engine.close(drop=True)
        self.comm.close(timeout_seconds=0.0)


@pytest.fixture
def ports() -> Iterator[MemoryPorts]:
    made = memory_ports(SIZE)
    yield made
    made.close()


@pytest.fixture
def ranks(ports: MemoryPorts) -> Iterator[list[Rank]]:
    made = [Rank(Communicator(port, timeout_seconds=SECONDS)) for port in ports]
    yield made
    for rank in made:
        rank.close()


def total(bucket: int, size: int = SIZE) -> float:
    return 10.0 * bucket * size + sum(range(size))


def test_what_can_be_computed_is_while_a_bucket_is_on_its_way(ports: MemoryPorts, ranks: list[Rank]) -> None:
    ports.hold(0, 1)
    for rank in ranks:
        for bucket in range(BUCKETS):
            rank.push(bucket)
    for rank in ranks:
        for bucket in range(BUCKETS):
            assert rank.wait(rank.computed[bucket])[0] == 10.0 * bucket + rank.comm.rank
    assert all(variable.writer is not None for variable in ranks[1].reduced)
    ports.release(0, 1)
    for rank in ranks:
        for bucket in range(BUCKETS):
            assert set(rank.wait(rank.reduced[bucket])) == {total(bucket)}


def test_a_lost_rank_is_raised_to_who_waits_for_a_bucket_and_what_was_computed_stays(
    ports: MemoryPorts, ranks: list[Rank]
) -> None:
    for rank in ranks:
        rank.push(0)
    for rank in ranks:
        rank.wait(rank.reduced[0])
    ports.hold(2, 0)
    for rank in ranks[:2]:
        for bucket in range(1, BUCKETS):
            rank.push(bucket)
    ports.kill(2)
    for rank in ranks[:2]:
        for bucket in range(1, BUCKETS):
            with pytest.raises(PeerLost) as lost:
                rank.wait(rank.reduced[bucket])
            assert lost.value.rank == 2
            rank.wait(rank.computed[bucket])
        assert set(rank.wait(rank.reduced[0])) == {total(0)}
        assert rank.reduced[BUCKETS - 1].version == 0
