"""Messages from rank to rank: who gets which, when a request is over, what is taken back, whatever the size."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zmqtrain as zt
from zmqtrain.collectives.matching import EAGER_WINDOW_BYTES, Status
from zmqtrain.core.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, LocalProtocolError, PeerLost

Make = Callable[..., Any]
LARGE = 700_000


def good(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("values", [0, 1, 10_000, 3_000_000])
def test_arrays_go_round_a_ring(ranks: Make, values: int) -> None:
    def part(comm: Any) -> Any:
        x = np.arange(values, dtype=np.int32) + comm.rank
        request = comm.isend(x, dest=(comm.rank + 1) % comm.size, tag=7)
        came = comm.recv(source=(comm.rank - 1) % comm.size, tag=7)
        request.wait()
        return came

    for rank, came in enumerate(good(ranks(3).play(part))):
        np.testing.assert_array_equal(came, np.arange(values, dtype=np.int32) + (rank - 1) % 3)


def test_messages_of_one_source_and_tag_come_in_order_small_and_large_mixed(ranks: Make) -> None:
    sizes = [1, LARGE, 2, 3, LARGE + 1, 4, 20_000, 5]

    def part(comm: Any) -> Any:
        if comm.rank:
            requests = [comm.isend(np.zeros(size, np.int8), dest=0, tag=1) for size in sizes]
            comm.send("ignored" and 1.0, dest=0, tag=2)
            return zt.wait_all(requests)
        assert comm.recv(tag=2) == 1.0
        return [comm.recv(source=1, tag=zt.ANY_TAG).size for _ in sizes]

    assert good(ranks(2).play(part))[0] == sizes


def test_a_large_array_goes_straight_into_the_receivers_own(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        if comm.rank:
            return comm.send(np.arange(LARGE).reshape(7, -1), dest=0)
        into = np.empty(LARGE, np.int64)
        assert comm.recv(into=into) is into
        return into

    np.testing.assert_array_equal(good(ranks(2).play(part))[0], np.arange(LARGE))


def test_what_does_not_fit_is_said_on_both_sides(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        for values in (3, LARGE):
            with pytest.raises(
                CollectiveMismatch, match=r"rank 1 \(pc-1\) sent float64\[.*rank 0 \(pc-0\) receives into"
            ):
                if comm.rank == 0:
                    comm.recv(into=np.empty(values - 1))
                else:
                    comm.send(np.ones(values), dest=0)
                    if values == 3:  # it was sent at once
                        raise CollectiveMismatch("rank 1 (pc-1) sent float64[3]: rank 0 (pc-0) receives into")
        comm.barrier()

    good(ranks(2).play(part))


def test_probes_find_what_a_receive_would_get_and_matched_ones_keep_it(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        if comm.rank:
            comm.send(np.ones((2, 3), np.float32), dest=0, tag=4)
            comm.send({"a": 1}, dest=0, tag=5)
            return comm.barrier()
        status = comm.probe(tag=4)
        assert status == Status(1, 4, (2, 3), "float32", 24, 6) == comm.iprobe(source=1)
        message = comm.improbe(source=1, tag=4)
        assert message.status == status and comm.improbe(tag=4) is None and comm.iprobe(tag=4) is None
        other = comm.mprobe()
        assert other.status == Status(1, 5, (), "value", 4, 4)
        assert comm.imrecv(other).wait() == {"a": 1}
        np.testing.assert_array_equal(comm.imrecv(message).wait(), np.ones((2, 3)))
        return comm.barrier()

    good(ranks(2).play(part))


def test_what_nobody_receives_takes_bounded_memory(ranks: Make) -> None:
    group, count = ranks(2), 200

    def part(comm: Any) -> Any:
        if comm.rank:
            requests = [comm.isend(np.full(30_000, index, np.uint8), dest=0) for index in range(count)]
            comm.barrier()
            return zt.wait_all(requests)
        comm.barrier()
        held = queue.Queue[int]()
        comm._endpoint.port.call(lambda: held.put(comm._group.matching.unexpected_bytes))
        assert 0 < held.get(timeout=20) <= EAGER_WINDOW_BYTES
        return [int(comm.recv()[0]) for _ in range(count)]

    assert good(group.play(part))[0] == list(range(count))


def test_what_is_not_matched_can_be_taken_back(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        if comm.rank == 0:
            receive = comm.irecv(source=1, tag=9)
            assert receive.cancel() and receive.test() and not receive.cancel()
            with pytest.raises(LocalProtocolError, match="cancelled"):
                receive.wait()
            comm.barrier()
            assert comm.probe(source=1).nbytes == 8 * LARGE
            comm.barrier()
            comm.barrier()
            return comm.iprobe()
        comm.barrier()
        large, small = comm.isend(np.ones(LARGE), dest=0, tag=1), comm.isend(1, dest=1)
        comm.barrier()
        assert large.cancel() and not small.cancel()
        with pytest.raises(LocalProtocolError, match="cancelled"):
            large.wait()
        comm.barrier()
        return None

    assert good(ranks(2).play(part)) == [None, None]


def test_a_send_that_a_probe_has_matched_cannot_be_taken_back(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        if comm.rank == 0:
            message = comm.mprobe()
            comm.barrier()
            comm.barrier()
            return comm.imrecv(message).wait().size
        large = comm.isend(np.ones(LARGE), dest=0)
        comm.barrier()
        assert not large.cancel()
        comm.barrier()
        return large.wait()

    assert good(ranks(2).play(part)) == [LARGE, None]


def test_a_receive_that_ran_out_of_time_takes_nothing_later(ranks: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqtrain.collectives.group.EXPLAIN_SECONDS", 60.0)
    monkeypatch.setattr("zmqtrain.collectives.group.GRACE_SECONDS", 60.0)

    def part(comm: Any) -> Any:
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"recv\(source=1, tag=3\) on rank 0") as caught:
                comm.recv(source=1, tag=3, timeout_seconds=0.05)
            assert caught.value.waiting_for == (1,) and "rank 1 (pc-1), the last it did:" in str(caught.value)
            with pytest.raises(CollectiveTimeout):
                comm.probe(source=1, timeout_seconds=0.05)
        comm.barrier()
        if comm.rank == 1:
            comm.send(5, dest=0, tag=3)
        else:
            assert comm.recv(tag=3) == 5
        return comm.barrier()

    good(ranks(2).play(part))


def test_callbacks_run_in_the_ports_thread_once_and_must_not_wait(ranks: Make) -> None:
    group = ranks(2)
    told: queue.Queue[tuple[str, Any]] = queue.Queue()

    def wait(request: Any) -> None:
        try:
            group.communicators[0].recv(timeout_seconds=1)
        except LocalProtocolError as error:
            told.put((threading.current_thread().name, error))

    request = group.communicators[0].irecv()
    request.add_done_callback(wait)
    group.communicators[1].send(1, dest=0)
    name, error = told.get(timeout=20)
    assert name == "memory-port-0" and "must not wait" in str(error)
    request.add_done_callback(lambda request: told.put(("at once", request)))
    assert told.get(timeout=20) == ("at once", request) and told.empty()
    assert request.wait() == request.wait() == 1


def test_a_callback_that_fails_harms_nobody(ranks: Make, caplog: pytest.LogCaptureFixture) -> None:
    group = ranks(2)

    def fail(request: Any) -> None:
        raise ValueError("on purpose")

    request = group.communicators[0].irecv()
    request.add_done_callback(fail)
    group.communicators[1].send(1, dest=0)
    assert request.wait() == 1
    assert good(group.play(lambda comm: comm.allreduce(1))) == [2, 2]
    assert "on purpose" in caplog.text


def test_the_first_of_several_is_told(ranks: Make) -> None:
    def part(comm: Any) -> Any:
        if comm.rank == 0:
            requests = [comm.irecv(tag=tag) for tag in range(3)]
            first = zt.wait_any(requests)
            comm.send(0, dest=1)
            return first, zt.wait_all(requests)
        comm.send(10, dest=0, tag=2)
        comm.recv()
        comm.send(20, dest=0, tag=0)
        return comm.send(30, dest=0, tag=1)

    assert good(ranks(2).play(part))[0] == (2, [20, 30, 10])


def test_a_wait_for_several_is_bounded_too(ranks: Make) -> None:
    comm = ranks(2).communicators[0]
    requests = [comm.irecv(tag=1), comm.irecv(tag=2)]
    for wait in (zt.wait_all, zt.wait_any):
        with pytest.raises(CollectiveTimeout, match="tag=1"):
            wait(requests, timeout_seconds=0.05)
    assert zt.wait_all([]) == []
    with pytest.raises(ValueError, match="at least one"):
        zt.wait_any([])


def test_a_rank_sends_to_itself(ranks: Make) -> None:
    comm = ranks(1).communicators[0]
    x = np.arange(LARGE)
    request = comm.isend(x, dest=0, tag=3)
    assert comm.probe().source == 0
    np.testing.assert_array_equal(comm.recv(), x)
    request.wait()
    comm.isend(5, dest=0)
    assert comm.recv() == 5


def test_bad_arguments_are_said_at_once(ranks: Make) -> None:
    comm = ranks(2).communicators[0]
    for call in (lambda: comm.isend(1, dest=2), lambda: comm.irecv(source=2), lambda: comm.isend(1, dest=0, tag=-2)):
        with pytest.raises(ConfigError, match="0 to"):
            call()
    with pytest.raises(ConfigError, match="into is a numpy array"):
        comm.irecv(into=np.ones((4, 4))[:, 0])
    with pytest.raises(ConfigError, match="do not travel"):
        comm.isend(np.array(["text"]), dest=1)
    comm.close()
    with pytest.raises((LocalProtocolError, PeerLost)):
        comm.isend(1, dest=1)
