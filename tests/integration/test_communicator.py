"""Communicators over real sockets: in threads and in processes of their own, which are also killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import zmqtrain as zt
from zmqtrain.collectives.group_connection import GroupConnection
from zmqtrain.core.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, PeerLost
from zmqtrain.protocol.messages import Forming, Message
from zmqtrain.transport.zmq_keys import CurveKeys

from meshes import broker

WAIT_SECONDS = 60.0
ALGORITHMS = ("naive", "ring", "tree", "halving", "parallel", "hub")


def create(hub: str, size: int, group: str, **options: Any) -> list[zt.Communicator]:
    """Make all ranks' communicators in this process."""

    def one(rank: int) -> zt.Communicator:
        return zt.Communicator.create(
            hub, size, rank, group=group, name=f"pc-{rank}", timeout_seconds=WAIT_SECONDS, **options
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_arrays_of_any_size_are_reduced_by_each_algorithm(hub: str) -> None:
    comms = create(hub, 4, "threads")
    with ThreadPoolExecutor(4) as pool:
        for algorithm in ALGORITHMS:
            for values in (0, 1, 5, 70_001, 400_003):
                arrays = [np.random.default_rng([rank, values]).integers(-9, 9, values) for rank in range(4)]
                requests = [
                    comm.iallreduce(array, algorithm=algorithm) for comm, array in zip(comms, arrays, strict=True)
                ]
                for result in zt.wait_all(requests):
                    np.testing.assert_array_equal(result, sum(arrays))
        list(pool.map(lambda comm: comm.barrier(), comms))
        figures = [comm.statistics() for comm in comms]
        list(pool.map(lambda comm: comm.close(), comms))
    assert sum(figure.values_sent for figure in figures) == sum(figure.values_received for figure in figures)
    assert all(figure.relayed == () for figure in figures)


def test_calls_of_as_many_bytes_that_differ_do_not_meet_at_the_hub(hub: str) -> None:
    comms = create(hub, 2, "shapes")
    shapes = ((2, 3), (3, 2))
    requests = [comm.iallreduce(np.ones(shapes[comm.rank]), algorithm="hub") for comm in comms]
    for request in requests:
        with pytest.raises(CollectiveMismatch, match=r"float64\[2,3\].* and .*float64\[3,2\]"):
            request.wait()
    for comm in comms:
        comm.close()


def test_large_messages_of_many_sources_are_found_and_received(hub: str) -> None:
    comms = create(hub, 3, "messages")
    x = [np.arange(1_500_000) + rank for rank in range(3)]
    sent = [comm.isend(x[comm.rank], dest=to, tag=to) for comm in comms for to in range(3) if to != comm.rank]
    for comm in comms:
        for _ in range(2):
            message = comm.mprobe(tag=comm.rank)
            into = np.empty(message.status.shape, message.status.dtype)
            comm.imrecv(message, into=into).wait()
            np.testing.assert_array_equal(into, x[message.status.source])
    zt.wait_all(sent)
    for comm in comms:
        comm.close()


def test_a_group_with_keys_is_encrypted_and_works_the_same() -> None:
    keys = CurveKeys.generate()
    with broker(keys) as hub:
        comms = create(hub, 2, "keys", server_key=keys.public)
        requests = [comm.iallreduce(np.full(300_000, comm.rank + 1.0), codec=None) for comm in comms]
        assert [result[-1] for result in zt.wait_all(requests)] == [3.0, 3.0]
        for comm in comms:
            comm.close()


def test_the_hub_reduces_for_all_and_says_what_it_cannot(hub: str) -> None:
    comms = create(hub, 3, "by the hub")
    tree = {"a": np.arange(1_000_000, dtype=np.float32), "b": [np.ones(5), np.arange(4)]}
    for result in zt.wait_all([comm.iallreduce(tree, algorithm="hub") for comm in comms]):
        np.testing.assert_array_equal(result["a"], 3 * tree["a"])
        np.testing.assert_array_equal(result["b"][1], [0, 3, 6, 9])
    half = [np.asarray([0.1, comm.rank, 3e38], ml_dtypes.bfloat16) for comm in comms]
    with np.errstate(over="ignore"):
        wanted = half[0] + half[1] + half[2]
    requests = [comm.iallreduce(x, algorithm="hub") for comm, x in zip(comms, half, strict=True)]
    assert [(result.dtype, result.tobytes()) for result in zt.wait_all(requests)] == [
        (wanted.dtype, wanted.tobytes())
    ] * 3
    with pytest.raises(ConfigError, match="the hub reduces sum"):
        comms[0].iallreduce(np.ones(3), np.hypot, algorithm="hub")
    different = [comm.iallreduce(np.ones(3 + (comm.rank == 2)), algorithm="hub") for comm in comms]
    for request in different:
        with pytest.raises(CollectiveMismatch, match=r"float64\[3\].*float64\[4\]"):
            request.wait()
    for comm in comms:
        comm.close()


def test_who_waits_for_each_call_and_who_begins_several_have_the_hub_reduce_all(hub: str) -> None:
    first, second = create(hub, 2, "by the hub in turn")
    x = [np.full(1 << 19, float(index), np.float32) for index in range(3)]
    begun = [second.iallreduce(one, algorithm="hub") for one in x]
    for one, request in zip(x, begun, strict=True):
        np.testing.assert_array_equal(first.allreduce(one, algorithm="hub"), 2 * one)
        np.testing.assert_array_equal(request.wait(), 2 * one)
    first.close()
    second.close()


def test_what_shrink_gives_is_refused_a_hub_that_still_holds_parts_of_calls_that_differed(hub: str) -> None:
    comms = create(hub, 2, "after a difference")
    for request in [comm.iallreduce(np.ones(3), "sum" if comm.rank else "max", algorithm="hub") for comm in comms]:
        with pytest.raises(CollectiveMismatch):
            request.wait()
    with ThreadPoolExecutor(2) as pool:
        again = list(pool.map(lambda comm: comm.shrink(), comms))
    with pytest.raises(ConfigError, match="shrink gave"):
        again[0].iallreduce(np.ones(3), algorithm="hub")
    assert zt.wait_all([comm.iallreduce(1) for comm in again]) == [2, 2]
    for comm in again:
        comm.close()


def test_who_waits_for_a_hub_that_is_gone_is_told() -> None:
    with broker() as hub:
        comms = create(hub, 2, "hub gone")
        late = comms[0].iallreduce(np.ones(100_000), algorithm="hub")
    with pytest.raises(PeerLost, match="the hub"):
        late.wait()
    with pytest.raises(PeerLost, match="the hub"):
        comms[1].barrier()
    with ThreadPoolExecutor(2) as pool:
        again = list(pool.map(lambda comm: comm.shrink(), comms))
    assert zt.wait_all([comm.iallreduce(1) for comm in again]) == [2, 2]
    for comm in again:
        comm.close()


def test_who_is_missing_is_said(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hear = GroupConnection.on_message

    def hear_until_told(connection: GroupConnection, message: Message, frames: Sequence[Any]) -> bool:
        taken = hear(connection, message, frames)
        if isinstance(message, Forming):  # now the time is up, however long that took
            connection._met.set_exception(TimeoutError())
        return taken

    monkeypatch.setattr(GroupConnection, "on_message", hear_until_told)
    with pytest.raises(CollectiveTimeout, match="alone is here, 1 missing"):
        zt.Communicator.create(hub, 2, group="missing", name="alone", timeout_seconds=WAIT_SECONDS)


RANK = """
import json, sys
import numpy as np
import zmqtrain as zt

hub, size, rank, group = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def say(**what):
    print(json.dumps(what), flush=True)


with zt.Communicator.create(hub, size, rank, group=group, name=f"pc-{rank}", timeout_seconds=60) as comm:
    sums = {}
    for algorithm in ("naive", "ring", "tree", "halving", "parallel", "hub"):
        x = (np.arange(40_003) % 1000 + rank).astype(np.float32)
        total = comm.allreduce(x, algorithm=algorithm)
        sums[algorithm] = [float(total[0]), float(total.sum(dtype=np.float64))]
    coded = comm.allreduce(x, "mean", codec="bf16")
    say(rank=comm.rank, names=comm.names, sums=sums, coded=int(coded.view(np.uint32).sum(dtype=np.uint64)))
    if group.startswith("killed"):
        try:
            comm.barrier()
            say(going=True)
            while True:
                comm.allreduce(np.ones(2_000_000), algorithm=group.split()[1])
        except zt.ZmqTrainError as error:
            say(lost=getattr(error, "rank", repr(error)))
            comm = comm.shrink()
            say(after=int(comm.allreduce(1)), names=comm.names)
            comm.barrier()
            comm.close()
"""


def start(hub: str, size: int, group: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, hub, str(size), str(rank), group], stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.communicate(timeout=WAIT_SECONDS)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_processes_reduce_alike_by_each_algorithm(hub: str, size: int) -> None:
    processes = start(hub, size, f"size {size}")
    told = [said(process) for process in processes]
    end(processes)
    x = (np.arange(40_003) % 1000).astype(np.float64)
    total = [float(sum(range(size))), float(size * x.sum() + x.size * sum(range(size)))]
    assert [one["rank"] for one in told] == list(range(size))
    assert all(one["sums"] == dict.fromkeys(ALGORITHMS, total) for one in told)
    assert len({one["coded"] for one in told}) == 1
    assert [process.returncode for process in processes] == [0] * size


@pytest.mark.parametrize("algorithm", ["ring", "halving"])
def test_a_killed_process_is_named_by_the_others_who_go_on(hub: str, algorithm: str) -> None:
    processes = start(hub, 3, f"killed {algorithm}")
    for process in processes:
        said(process)
    assert [said(process) for process in processes] == [{"going": True}] * 3
    processes[1].send_signal(signal.SIGKILL)
    survivors = [processes[0], processes[2]]
    assert [said(process) for process in survivors] == [{"lost": 1}] * 2
    assert [said(process) for process in survivors] == [{"after": 2, "names": ["pc-0", "pc-2"]}] * 2
    end(processes)
    assert [process.returncode for process in survivors] == [0, 0]


def test_a_communicator_that_lost_a_rank_says_so_to_threads_that_wait(hub: str) -> None:
    comms = create(hub, 2, "leaves")
    receive = comms[0].irecv(source=1)
    comms[1].close()
    with pytest.raises(PeerLost) as caught:
        receive.wait()
    assert caught.value.rank == 1
    comms[0].close()
