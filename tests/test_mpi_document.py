"""docs/mpi.md is held to the code: every name of ours exists, with these arguments; the programs run and are right."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain as zt
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.collectives.algorithms import ALIASES, ALLREDUCE, run_locally
from zmqtrain.collectives.costs import COSTS, messages_sent, port_bytes, steps_taken
from zmqtrain.collectives.reductions import OPERATIONS, find_reduction
from zmqtrain.core.settings import RunSettings
from zmqtrain.transport.memory_ports import memory_ports

from orders import evaluated

SECONDS = 60.0
PAGE = (Path(__file__).parents[1] / "docs" / "mpi.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
OURS = [row[2] for row in ROWS if len(row) == 3]
OWNERS = {
    "comm": zt.Communicator,
    "request": zt.Request,
    "message": zt.Message,
    "status": zt.Status,
    "ps": zt.ParameterClient,
    "zt": zt,
}
SAID = " ".join([*OURS, *BLOCKS, PAGE[PAGE.index("## What is different") :]])


def test_every_name_of_ours_exists() -> None:
    names = set(re.findall(r"\b(comm|request|message|status|ps|zt)\.(\w+)", SAID))
    assert len(names) > 40
    known = {"rank", "size"}
    assert [name for name in names if name[1] not in known and not hasattr(OWNERS[name[0]], name[1])] == []


def test_every_call_takes_the_arguments_that_are_written() -> None:
    calls = re.findall(r"`(?:\w+ = )?(comm|request|zt|ps)\.(\w+)\(([^`()]*)\)", " ".join(OURS))
    assert len(calls) > 25
    for owner, name, written in calls:
        known = list(signature(getattr(OWNERS[owner], name)).parameters)
        keywords = [argument.partition("=")[0].strip() for argument in written.split(",") if "=" in argument]
        assert set(keywords) <= set(known), (name, keywords)
        plain = [argument for argument in written.split(",") if argument.strip() and "=" not in argument]
        assert len(plain) <= len(known), (name, plain)


def test_every_blocking_call_of_a_communicator_is_in_the_tables() -> None:
    calls = {name[1:] for name in dir(zt.Communicator) if name.startswith("i") and hasattr(zt.Communicator, name[1:])}
    assert len(calls) > 15
    assert [name for name in calls if f"comm.{name}(" not in " ".join(OURS)] == []


def test_every_operation_is_in_the_table() -> None:
    assert [name for name in OPERATIONS if f'"{name}"' not in " ".join(OURS)] == []


# The algorithms, and their counts.

ALGORITHMS = {re.findall(r"`(\w+)`", row[1])[0]: row for row in ROWS if len(row) == 6 and "`" in row[1]}


def played(name: str, size: int) -> tuple[int, int]:
    """Return how many messages, and how many bytes, all ranks send in an allreduce of `size` float32 a rank."""
    op = find_reduction("sum", np.dtype(np.float32))
    arrays = [np.full(4 * size, rank, np.float32) for rank in range(size)]
    algorithm = ALLREDUCE[ALIASES.get(name, name)]
    traffic = run_locally([algorithm(rank, size, arrays[rank], op, 4 * size) for rank in range(size)])
    assert all((array == sum(range(size))).all() for array in arrays)
    return sum(each.messages_sent for each in traffic), sum(each.bytes_sent for each in traffic)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("lecture", "name", "messages", "steps"),
    [
        ("sequential", "sequential", lambda n: 2 * (n - 1), lambda n: 2),
        ("parallel: O(N^2) messages in one step", "naive", lambda n: n * (n - 1), lambda n: 1),
        ("ring", "ring", lambda n: 2 * n * (n - 1), lambda n: 2 * (n - 1)),
        (
            "recursive halving, N a power of two",
            "recursive_halving",
            lambda n: 2 * n * (n.bit_length() - 1),
            lambda n: 2 * (n.bit_length() - 1),
        ),
    ],
)
def test_the_lectures_algorithms_send_as_many_messages_as_it_says(
    lecture: str, name: str, messages: Callable[[int], int], steps: Callable[[int], int], size: int
) -> None:
    assert ALGORITHMS[name][0] == lecture
    assert played(name, size)[0] == messages_sent(name, size) == messages(size)
    assert steps_taken(name, size) == steps(size)


def test_the_table_of_algorithms_has_the_formulas_of_the_code() -> None:
    for name, (_, _, messages, steps, each, port) in ALGORITHMS.items():
        cost = COSTS[ALIASES.get(name, name)]
        if name == "recursive_halving":  # the table's are for a power of two
            cost = COSTS["ring"]
            assert port_bytes(name, 8, 800) == port_bytes("ring", 8, 800)
        for size in (2, 4, 8):
            assert evaluated(messages, size) == messages_sent(name, size)
            assert evaluated(steps.partition(",")[0], size) == steps_taken(name, size)
        assert each == cost.each
        assert {"(N-1) S": 700, "2 (N-1)/N S": 175, "ceil(log2 N) S": 300}[port] == port_bytes(name, 8, 100)


# The programs.


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    space: dict[str, Any] = {}
    for block in BLOCKS:
        if "print(" not in block:
            exec(block, space)
    return space


def test_the_costs_on_the_page_are_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in BLOCKS if "print(" in block)
    exec(block, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)", block, re.MULTILINE)


@pytest.fixture
def play() -> Iterator[Callable[[int, Callable[[Any], Any]], list[Any]]]:
    """Have each rank of a group in memory do its part, in a thread of its own: play(size, part)."""
    made: list[Any] = []

    def play(size: int, part: Callable[[Any], Any]) -> list[Any]:
        comms = [zt.Communicator(port, timeout_seconds=SECONDS) for port in memory_ports(size)]
        made.extend(comms)
        results: list[Any] = [None] * size

        def do(comm: Any) -> None:
            try:
                results[comm.rank] = part(comm)
            except Exception as error:
                results[comm.rank] = error

        threads = [threading.Thread(target=do, args=(comm,), daemon=True) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        return results

    yield play
    for comm in made:
        comm.close(timeout_seconds=0.0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("values", [10, 200_000])
def test_the_ring_by_isend_test_improbe_and_imrecv(programs: Any, play: Any, size: int, values: int) -> None:
    wanted = np.arange(values, dtype=np.int32)
    for came in play(size, lambda comm: programs["ring"](comm, wanted if comm.rank == 0 else None)):
        np.testing.assert_array_equal(came, wanted)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("values", [5, 100_000])
def test_the_all_to_all_by_request_get_status(programs: Any, play: Any, size: int, values: int) -> None:
    def part(comm: Any) -> Any:
        return programs["all_to_all"](comm, [np.full(values, 10.0 * comm.rank + to) for to in range(size)])

    for rank, (came, sources) in enumerate(play(size, part)):
        assert sources == list(range(size))
        assert [(one == 10.0 * source + rank).all() for source, one in enumerate(came)] == [True] * size


def test_the_running_example_with_op_sum(programs: Any, play: Any) -> None:
    assert play(2, programs["running_example"]) == [[[2, 2, 4]] * 4] * 2


def test_push_and_pull_by_index(programs: Any) -> None:
    with BrokerThread("tcp://127.0.0.1:0", RunSettings()) as broker:
        options = {"optimizer": "sgd:rate=0.5", "timeout_seconds": SECONDS}
        with zt.ParameterClient.connect(broker.address, name="worker", **options) as ps:
            weights = [np.full((2, 3), 1.0, np.float32), np.full(3, 2.0, np.float32)]
            first, second = programs["push_and_pull"](ps, weights, [np.ones_like(one) for one in weights])
    assert first.tolist() == [[0.5] * 3] * 2 and second.tolist() == [1.5] * 3
