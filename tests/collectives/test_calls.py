"""Collectives played without a network: any interleaving of ranks and messages ends in numpy's answer or an error."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.collectives.algorithms import ALLREDUCE, BROADCAST, barrier
from zmqtrain.collectives.calls import Call, Calls
from zmqtrain.collectives.reductions import find_reduction
from zmqtrain.collectives.wire import COPIED_BELOW_BYTES, Head, Kind
from zmqtrain.core.errors import CollectiveMismatch, FramingError

from orders import Names

INT = np.dtype(np.int64)


pytestmark = pytest.mark.usefixtures("small_windows")


class Net:
    """The machines of all ranks, and the ordered queues between them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.machines = [Calls(rank, size, Names()) for rank in range(size)]
        self.queues: dict[tuple[int, int], deque[Any]] = {}
        self.errors: dict[int, Exception] = {}

    def collect(self) -> None:
        for rank, machine in enumerate(self.machines):
            for to, head, values in machine.outgoing:
                values = bytes(values) if len(values) < 32 else values
                self.queues.setdefault((rank, to), deque()).append((head, values))
            machine.outgoing.clear()

    def ready(self) -> list[tuple[int, int]]:
        self.collect()
        return [pair for pair, queue in self.queues.items() if queue]

    def deliver(self, source: int, to: int) -> None:
        head, values = self.queues[source, to].popleft()
        try:
            self.machines[to].hear(source, head, memoryview(bytes(values)))
        except CollectiveMismatch as error:
            self.errors[to] = error

    def unreceived(self, number: int) -> int:
        return max(
            sum(len(bytes(values or b"")) for head, values in queue if head.number == number)
            for queue in self.queues.values()
        )


kinds = st.tuples(st.sampled_from([*ALLREDUCE, "broadcast", "barrier"]), st.integers(0, 100), st.integers(1, 20))


@settings(max_examples=examples(120))
@given(st.integers(1, 5), st.lists(kinds, min_size=1, max_size=4), st.integers(0, 2**32))
def test_any_interleaving_ends_in_numpys_answer(size: int, program: list[tuple[str, int, int]], seed: int) -> None:
    program = [step for step in program if step[0] != "hub"]
    net, draw = Net(size), random.Random(seed)
    total = find_reduction("sum", INT)
    buffers = [[np.arange(values) * (rank + 1) for rank in range(size)] for _, values, _ in program]
    begun: list[list[Call]] = [[] for _ in range(size)]

    def begin(rank: int) -> None:
        index = len(begun[rank])
        kind, _, chunk = program[index]
        buffer, root = buffers[index][rank], index % size
        if kind == "broadcast":
            steps = BROADCAST["chain"](rank, size, buffer, root, chunk)
        elif kind == "barrier":
            steps = barrier(rank, size)
        else:
            steps = ALLREDUCE[kind](rank, size, buffer, total, chunk)
        call = net.machines[rank].begin(f"{program[index]}", iter([(steps, INT)]), confirm=kind == "broadcast")
        begun[rank].append(call)

    while True:
        can_begin = [rank for rank in range(size) if len(begun[rank]) < len(program)]
        choices = [*can_begin, *net.ready()]
        if not choices:
            break
        choice = draw.choice(choices)
        if isinstance(choice, int):
            begin(choice)
        else:
            net.deliver(*choice)
            assert all(net.unreceived(number) <= 256 + 64 for number in range(1, len(program) + 1))
    assert all(call.ended and call.error is None for ranks in begun for call in ranks)
    assert not any(machine.pending for machine in net.machines)
    for (kind, values, _), ranks, index in zip(program, buffers, range(len(program)), strict=True):
        if kind in ALLREDUCE:
            expected = np.arange(values) * sum(range(1, size + 1))
        elif kind == "broadcast":
            expected = np.arange(values) * (index % size + 1)
        else:
            continue
        for buffer in ranks:
            np.testing.assert_array_equal(buffer, expected)


def test_what_waits_for_room_keeps_its_dtype_while_its_call_goes_on_to_another() -> None:
    """A rank that only sends has played all its part, of several dtypes, while the first still waits for room."""
    net = Net(2)
    sent = [np.arange(200), np.arange(10, dtype=np.float32)]
    into = [np.zeros_like(values) for values in sent]

    def phases(rank: int, arrays: list[np.ndarray[Any, Any]]) -> Any:
        return iter([(BROADCAST["chain"](rank, 2, values, 0, values.size), values.dtype) for values in arrays])

    begun = [net.machines[rank].begin("both", phases(rank, arrays)) for rank, arrays in enumerate((sent, into))]
    while ready := net.ready():
        net.deliver(*ready[0])
    assert not net.errors and all(call.ended and call.error is None for call in begun)
    for values, received in zip(sent, into, strict=True):
        np.testing.assert_array_equal(values, received)


@settings(max_examples=examples(60))
@given(st.integers(2, 4), st.integers(0, 2**32), st.data())
def test_one_rank_that_calls_something_else_is_found_out(size: int, seed: int, data: Any) -> None:
    net, draw = Net(size), random.Random(seed)
    odd = data.draw(st.integers(0, size - 1))
    usual, other = data.draw(st.permutations(["ring", "naive", "broadcast 0", "broadcast 1", "barrier"]))[:2]
    total = find_reduction("sum", INT)
    waiting = set(range(size))
    now = 0.0
    for _ in range(10_000):
        choices = [*waiting, *net.ready()]
        if net.errors:
            break
        if not choices:
            now += 1.0
            for machine in net.machines:
                machine.tick(now)
            continue
        choice = draw.choice(choices)
        if not isinstance(choice, int):
            net.deliver(*choice)
            continue
        waiting.discard(choice)
        kind = other if choice == odd else usual
        buffer = np.arange(50)
        if kind.startswith("broadcast"):
            steps = BROADCAST["tree"](choice, size, buffer, int(kind[-1]), 8)
        elif kind == "barrier":
            steps = barrier(choice, size)
        else:
            steps = ALLREDUCE[kind](choice, size, buffer, total, 8)
        try:
            net.machines[choice].begin(kind, iter([(steps, INT)]), confirm=kind.startswith("broadcast"))
        except CollectiveMismatch as error:
            net.errors[choice] = error
    error = str(next(iter(net.errors.values())))
    assert f"rank {odd}" in error and usual in error and other in error


def test_what_no_rank_of_ours_says_is_refused() -> None:
    machine = Calls(0, 2, Names())
    with pytest.raises(FramingError, match="at call"):
        machine.hear(1, Head(Kind.PART, number=1 << 40))
    with pytest.raises(FramingError, match="bytes of"):
        machine.hear(1, Head(Kind.PART, number=1, size=3), memoryview(bytes(4)))
    with pytest.raises(FramingError, match="a part of 0 bytes of 3"):
        machine.hear(1, Head(Kind.PART, number=1, size=3))


def test_small_and_large_are_told_apart_where_ports_do() -> None:
    from zmqtrain.transport import pacing

    assert COPIED_BELOW_BYTES == pacing.COPY_BELOW_BYTES
