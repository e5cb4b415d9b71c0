"""A rank that is lost in the middle: the others are told who, wherever they wait, and go on without it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import zmqtrain as zt
from zmqtrain.core.errors import CollectiveTimeout, LocalProtocolError, PeerLost

Make = Callable[..., Any]
LOST = 1

LARGE = 300_000

WAITS: dict[str, Callable[[Any], Any]] = {
    "allreduce naive": lambda comm: comm.allreduce(np.ones(LARGE), algorithm="naive"),
    "allreduce ring": lambda comm: comm.allreduce(np.ones(LARGE), algorithm="ring"),
    "allreduce tree": lambda comm: comm.allreduce(np.ones(LARGE), algorithm="tree"),
    "allreduce halving": lambda comm: comm.allreduce(np.ones(LARGE), algorithm="halving"),
    "allreduce parallel": lambda comm: comm.allreduce(np.ones(LARGE), algorithm="parallel"),
    "allreduce with a codec": lambda comm: comm.allreduce(np.ones(LARGE, np.float32), codec="int8"),
    "reduce": lambda comm: comm.reduce(np.ones(LARGE), root=LOST),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.ones(LARGE)),
    "allgather": lambda comm: comm.allgather(np.ones(LARGE)),
    "broadcast": lambda comm: comm.broadcast(None, root=LOST),
    "scatter": lambda comm: comm.scatter(None, root=LOST),
    "gather": lambda comm: comm.gather(np.ones(LARGE), root=LOST),
    "all_to_all": lambda comm: comm.all_to_all([np.ones(LARGE)] * comm.size),
    "barrier": lambda comm: comm.barrier(),
    "send": lambda comm: comm.send(np.ones(LARGE), dest=LOST),
    "recv": lambda comm: comm.recv(source=LOST),
    "recv of any": lambda comm: comm.recv(),
    "probe": lambda comm: comm.probe(source=LOST),
    "mprobe": lambda comm: comm.mprobe(),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_is_lost_in_the_middle_is_named_by_all_who_go_on_without_it(ranks: Make, what: str) -> None:
    group = ranks(4)
    survivors = [comm for comm in group.communicators if comm.rank != LOST]
    waiting = threading.Barrier(len(survivors) + 1)

    def part(comm: Any) -> Any:
        threading.Thread(target=waiting.wait).start()  # this rank begins to wait
        with pytest.raises(PeerLost) as caught:
            WAITS[what](comm)
            comm.barrier()  # who only had to send, and not to the lost one, may have done its part
        with pytest.raises(PeerLost) as later:
            comm.barrier()
        assert (caught.value.rank, caught.value.peer) == (later.value.rank, later.value.peer) == (LOST, "pc-1")
        smaller = comm.shrink()
        assert smaller.names == ("pc-0", "pc-2", "pc-3") and smaller.size == 3
        return smaller.rank, smaller.allreduce(np.arange(LARGE) + smaller.rank)[0]

    def kill() -> None:
        waiting.wait(20)
        if "recv" not in what and "probe" not in what:  # it has begun its part of it
            group.communicators[LOST]._endpoint.port.call(lambda: group.ports.kill(LOST))
        else:
            group.ports.kill(LOST)

    killer = threading.Thread(target=kill)
    killer.start()
    results = group.play(part, survivors)
    killer.join()
    assert results == [(0, 3), (1, 3), (2, 3)], results


PARTS = {name: WAITS[name] for name in WAITS if "recv" not in name and "probe" not in name and name != "send"} | {
    "broadcast": lambda comm: comm.broadcast(np.ones(LARGE), root=LOST),
    "scatter": lambda comm: comm.scatter([np.ones(LARGE)] * comm.size, root=LOST),
    "messages": lambda comm: [comm.isend(np.ones(LARGE), to) for to in range(4)] and [comm.recv() for _ in range(4)],
}


@pytest.mark.parametrize("messages", [1, 2, 3, 5])
@pytest.mark.parametrize("what", PARTS)
def test_a_rank_that_dies_while_it_sends_is_named_by_all(ranks: Make, what: str, messages: int) -> None:
    group = ranks(4)
    group.ports.kill_after(LOST, messages)

    survivors = [comm for comm in group.communicators if comm.rank != LOST]

    def repeat(comm: Any) -> Any:
        with pytest.raises((PeerLost, LocalProtocolError)) as caught:  # the one that dies is closed by the test
            while True:  # what it had sent all of ends well
                PARTS[what](comm)
        return caught.value

    def part(comm: Any) -> Any:
        assert repeat(comm).rank == LOST
        return comm.shrink().allreduce(comm.rank)

    dying = threading.Thread(target=repeat, args=(group.communicators[LOST],))
    dying.start()
    assert group.play(part, survivors) == [5, 5, 5]
    group.communicators[LOST].close(timeout_seconds=0.0)
    dying.join()


def test_the_others_go_on_without_a_rank_that_has_closed_its_communicator(ranks: Make) -> None:
    group = ranks(4)
    group.communicators[LOST].close()
    survivors = [comm for comm in group.communicators if comm.rank != LOST]

    def part(comm: Any) -> Any:
        with pytest.raises(PeerLost) as caught:
            comm.recv(LOST if comm.rank == 0 else 0)  # only the first waits for the one that has left
        assert caught.value.rank == LOST
        return comm.shrink().allreduce(comm.rank)

    assert group.play(part, survivors) == [5, 5, 5]


def test_a_rank_that_is_cut_off_learns_that_it_is_the_one_and_the_others_go_on(ranks: Make) -> None:
    group = ranks(3)

    def part(comm: Any) -> Any:
        with pytest.raises(PeerLost) as caught:
            comm.barrier()  # rank 0 is through: the others may be in it still
            if comm.rank == 0:
                group.ports.cut_off(LOST)
            while True:
                comm.barrier()
        assert caught.value.rank == LOST
        if comm.rank == LOST:
            with pytest.raises(PeerLost, match="go on without it"):
                comm.shrink()
            return None
        return comm.shrink().names

    assert group.play(part) == [("pc-0", "pc-2"), None, ("pc-0", "pc-2")]


def test_two_lost_ranks_leave_two_who_go_on(ranks: Make) -> None:
    group = ranks(4)
    group.ports.kill(0)
    group.ports.kill(3)

    def part(comm: Any) -> Any:
        with pytest.raises(PeerLost):
            comm.barrier()
        return comm.shrink().allgather(comm.rank)

    assert group.play(part, group.communicators[1:3]) == [[1, 2], [1, 2]]


def test_one_more_may_be_lost_after_each_shrinking(ranks: Make) -> None:
    group = ranks(4)
    counted = {size: threading.Barrier(size) for size in (1, 2, 3)}

    def part(comm: Any) -> Any:
        sizes = []
        while comm.size > 1:
            if comm.rank == comm.size - 1:
                group.ports.kill(group.communicators.index(original[comm.names[comm.rank]]))
                return sizes
            with pytest.raises(PeerLost):
                comm.allreduce(np.ones(LARGE))
            comm = comm.shrink()
            sizes.append(comm.allreduce(1))
            counted[comm.size].wait(20)  # who is lost next is not before all have the sum
        return sizes

    original = {comm.names[comm.rank]: comm for comm in group.communicators}
    assert group.play(part) == [[3, 2, 1], [3, 2], [3], []]


def test_shrinking_waits_for_all_who_live_and_says_for_whom(ranks: Make) -> None:
    group = ranks(3)
    group.ports.kill(0)
    for comm in group.communicators[1:]:  # who knows of no loss cannot shrink
        with pytest.raises(PeerLost):
            comm.barrier()
    with pytest.raises(CollectiveTimeout, match="pc-1") as caught:
        comm.shrink(timeout_seconds=0.1)
    assert caught.value.waiting_for == (1,)
    assert group.play(lambda comm: comm.shrink().allreduce(1), group.communicators[1:]) == [2, 2]


def test_who_has_agreed_when_its_time_is_up_goes_on_with_the_others(ranks: Make) -> None:
    group, others = ranks(3), list[Any]()
    group.ports.kill(0)
    for comm in group.communicators[1:]:
        with pytest.raises(PeerLost):
            comm.barrier()
    call = comm._endpoint.port.call

    def late(what: Callable[[], object]) -> None:
        if calls.pop():  # the time is up: now the other one comes
            others.append(group.communicators[1].shrink())
        call(what)

    calls = [True, False]
    comm._endpoint.port.call = late
    smaller = comm.shrink(timeout_seconds=0.1)
    comm._endpoint.port.call = call
    requests = [each.iallreduce(1) for each in (*others, smaller)]
    with pytest.raises(LocalProtocolError, match="was shrunk before"):  # nor does it take the place of that
        comm.shrink()
    assert [request.wait() for request in requests] == [2, 2]


def test_a_probe_whose_time_is_up_when_its_rank_is_lost_says_so(ranks: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    group = ranks(2)
    comm = group.communicators[0]
    cancel = zt.Request.cancel

    def late(request: zt.Request[Any]) -> bool:
        lost = comm.irecv(source=LOST)
        group.ports.kill(LOST)
        with pytest.raises(PeerLost):
            lost.wait()
        return cancel(request)

    monkeypatch.setattr(zt.Request, "cancel", late)
    with pytest.raises(PeerLost):
        comm.probe(source=LOST, timeout_seconds=0.05)


def test_who_leaves_is_missed_only_by_those_who_need_it(ranks: Make) -> None:
    group, heard = ranks(3), threading.Barrier(2)

    def part(comm: Any) -> Any:
        if comm.rank == 0:
            comm.send(np.arange(3), dest=1)
            comm.close()
            return None
        others = comm.recv(source=3 - comm.rank) if comm.rank == 1 else comm.send(np.ones(LARGE), dest=1)
        if comm.rank == 1:
            np.testing.assert_array_equal(comm.recv(source=0), np.arange(3))
            with pytest.raises(PeerLost, match="has closed"):
                comm.recv(source=0)
        comm.send(others is None, dest=3 - comm.rank)
        assert comm.recv(source=3 - comm.rank) == (comm.rank == 1)
        heard.wait(20)  # the first to need it ends what the other has not taken
        with pytest.raises(PeerLost) as caught:
            comm.barrier()
        assert caught.value.rank == 0
        return comm.shrink().size

    assert group.play(part) == [None, 2, 2]


def test_what_was_left_of_a_communicator_is_closed_with_it(ranks: Make) -> None:
    group = ranks(3)
    group.ports.kill(0)

    def part(comm: Any) -> Any:
        with comm:
            with pytest.raises(PeerLost):
                comm.barrier()
            smaller = comm.shrink()
            smaller.barrier()
        with pytest.raises(LocalProtocolError, match="is closed"):
            smaller.barrier()
        return not comm._endpoint.port._thread.is_alive()

    assert group.play(part, group.communicators[1:]) == [True, True]


def test_what_waits_on_a_closed_communicator_ends(ranks: Make) -> None:
    group = ranks(2)
    comm = group.communicators[0]
    receive, collective = comm.irecv(source=1), comm.ibarrier()
    comm.close(timeout_seconds=0.0)
    for request in (receive, collective):
        with pytest.raises(PeerLost, match="closed"):
            request.wait()
    with pytest.raises(LocalProtocolError, match="is closed"):
        comm.shrink()


def test_a_call_of_another_thread_while_a_communicator_is_closed_is_refused(
    ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, refused = ranks(1).communicators[0], list[Exception]()
    begun, looks, over = threading.Event(), threading.Event(), threading.Event()
    getpid = os.getpid

    class Looked(WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            for request in super().__iter__():
                looks.set()
                assert over.wait(20)
                yield request

    def slow() -> int:
        if threading.current_thread() is late:
            begun.set()
            assert looks.wait(20)
        return getpid()

    def call() -> None:
        try:
            comm.irecv()
        except LocalProtocolError as error:
            refused.append(error)
        finally:
            over.set()

    comm._requests = Looked()
    late = threading.Thread(target=call)
    pending = comm.irecv()
    monkeypatch.setattr(os, "getpid", slow)
    late.start()
    assert begun.wait(20)
    comm.close()
    late.join()
    assert "is closed" in str(refused[0])
    with pytest.raises(PeerLost, match="closed"):
        pending.wait()
