"""What is known of a message before and after it is received, and receives into arrays that are larger than it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zmqtrain as zt
from zmqtrain.core.errors import CollectiveMismatch, LocalProtocolError, PeerLost

Make = Callable[..., Any]
LARGE = 100_000


def good(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_what_a_user_of_mpi_names_is_public() -> None:
    assert {"Request", "Message", "Status"} <= set(zt.__all__)
    assert all(getattr(zt, name).__name__ == name for name in ("Request", "Message", "Status"))


@pytest.mark.parametrize("values", [5, LARGE])
def test_a_finished_receive_says_who_sent_it_with_which_tag_and_how_many_values(ranks: Make, values: int) -> None:
    def part(comm: Any) -> Any:
        if comm.rank == 1:
            assert comm.recv() == "posted"
            return comm.send(np.ones((values, 2), np.float32), dest=0, tag=7)
        request = comm.irecv()
        assert request.status is None and request.get_status() is None and not request.test()
        comm.send("posted", dest=1)
        x = request.wait()
        assert isinstance(request, zt.Request) and x.shape == (values, 2)
        return request.status, request.get_status()

    wanted = zt.Status(1, 7, (values, 2), "float32", 8 * values, 2 * values)
    assert good(ranks(2).play(part))[0] == (wanted, wanted)


def test_the_status_of_a_tree_counts_the_values_of_all_arrays(ranks: Make) -> None:
    comm = ranks(1).communicators[0]
    comm.isend({"w": np.ones((2, 3)), "b": np.ones(3)}, dest=0)
    assert comm.probe() == zt.Status(0, 0, (), "tree", 72, 9)


def test_get_status_of_a_send_and_of_a_collective_is_the_empty_one_once_they_are_over(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        if comm.rank == 1:
            message = comm.mprobe()
            comm.barrier()
            return comm.imrecv(message).wait().size
        sending = comm.isend(np.ones(LARGE), dest=1)
        assert sending.get_status() is None
        barrier = comm.ibarrier()
        barrier.wait()
        sending.wait()
        assert sending.status is None and barrier.status is None
        return [sending.get_status(), barrier.get_status()]

    empty = zt.Status(zt.ANY_SOURCE, zt.ANY_TAG, (), "", 0, 0)
    assert good(ranks(2).play(part)) == [[empty, empty], LARGE]


def test_get_status_of_what_failed_or_was_cancelled_raises_what_wait_raises(ranks: Make) -> None:
    first, second = ranks(2).communicators
    cancelled, lost = first.irecv(source=1, tag=1), first.irecv(source=1, tag=2)
    assert cancelled.cancel()
    with pytest.raises(LocalProtocolError, match="cancelled"):
        cancelled.get_status()
    second.close()
    with pytest.raises(PeerLost):
        lost.wait()
    with pytest.raises(PeerLost):
        lost.get_status()
    assert cancelled.status is None and lost.status is None


@pytest.mark.parametrize("values", [0, 3, LARGE])
def test_a_larger_array_is_filled_as_far_as_the_message_goes(ranks: Make, values: int) -> None:
    def part(comm: Any) -> Any:
        if comm.rank == 1:
            return comm.send(np.arange(values, dtype=np.int32), dest=0)
        into = np.full((2, values + 5), -1, np.int32)
        request = comm.irecv(into=into)
        assert request.wait() is into
        return into.reshape(-1), request.status.count

    into, count = good(ranks(2).play(part))[0]
    assert count == values
    assert into.tolist() == [*range(values), *[-1] * (values + 10)]


@pytest.mark.parametrize("values", [3, LARGE])
@pytest.mark.parametrize(("dtype", "room"), [("float32", 0), ("float64", -1)])
def test_an_array_of_another_dtype_or_too_small_is_an_error_that_says_what_it_must_be(
    ranks: Make, values: int, dtype: str, room: int
) -> None:
    def part(comm: Any) -> Any:
        if comm.rank == 1:
            request = comm.isend(np.ones(values), dest=0)
            if values == LARGE:  # a small one is over before anybody receives it
                with pytest.raises(CollectiveMismatch, match="at least as large"):
                    request.wait()
        else:
            with pytest.raises(CollectiveMismatch, match=r"rank 1 \(pc-1\) sent float64.*at least as large"):
                comm.recv(into=np.empty(values + room, dtype))
        comm.barrier()

    good(ranks(2).play(part))
