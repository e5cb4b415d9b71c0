"""Ports over real sockets: between threads and between processes, with losses, strangers, and through the hub."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from runs import BrokerProcess

from zmqtrain.errors import (
    CollectiveTimeout,
    ConfigError,
    HubUnreachable,
    JoinRefused,
    LocalProtocolError,
    ZmqTrainError,
)
from zmqtrain.protocol.group_messages import GroupLost
from zmqtrain.runtime.groups import hub_line
from zmqtrain.runtime.groups.presence import LEFT
from zmqtrain.runtime.groups.rendezvous import open_port
from zmqtrain.settings import RunSettings
from zmqtrain.transport.zmq_dealer import DealerChannel
from zmqtrain.transport.zmq_keys import CurveKeys
from zmqtrain.types import HUB, HubChunk, Lane, PeerId

from meshes import NOWHERE, Remembering, broker, echoing, open_all, ports, send


@pytest.fixture(scope="module")
def hub():
    with broker() as address:
        yield address


def test_messages_of_any_size_come_whole_and_in_order_to_all(hub):
    sizes = [0, 1, 100, 70_000, 4 << 20, 3, 65_536, 12]
    with ports(hub, 3, group="sizes") as (opened, listeners):
        assert [port.rank for port in opened] == [0, 1, 2]
        assert opened[1].names == ("pc-0", "pc-1", "pc-2")
        for port in opened:
            others = [rank for rank in range(3) if rank != port.rank]
            for rank in others:
                send(port, rank, *([b"%d" % index, bytes([port.rank]) * size] for index, size in enumerate(sizes)))
        for rank, listener in enumerate(listeners):
            listener.wait(lambda one: len(one.messages) == 2 * len(sizes))
            for source in {0, 1, 2} - {rank}:
                came = [frames for sender, frames in listener.messages if sender == source]
                assert came == [[b"%d" % index, bytes([source]) * size] for index, size in enumerate(sizes)]
        figures = opened[0].statistics()
        assert figures.relayed == () and figures.strangers == 0
        assert figures.messages_sent == figures.messages_received == 2 * len(sizes)
        assert figures.bytes_sent == figures.bytes_received == 2 * (sum(sizes) + len(sizes))


def test_what_came_before_the_listener_is_told_first_and_calls_keep_their_order(hub):
    first, second = open_all(hub, 2, group="before")
    send(first, 1, *([b"%d" % number] for number in range(50)))
    done = []
    second.call(lambda: done.append(len(done)))
    listener = Remembering()
    second.start(listener)
    listener.wait(lambda one: len(one.messages) == 50 and one.ticks)
    assert [frames for _, frames in listener.messages] == [[b"%d" % number] for number in range(50)] and done == [0]
    first.close()
    listener.wait(lambda one: one.lost == {0: LEFT})
    second.close()
    second.close()
    second.call(lambda: done.append("never"))
    assert done == [0]


def test_what_a_port_cannot_send_is_refused_in_its_own_thread(hub):
    with ports(hub, 2, group="wrong") as (opened, listeners):
        errors = []

        def attempt(rank, frames):
            try:
                opened[0].send(rank, frames)
            except LocalProtocolError as error:
                errors.append(str(error))

        for rank, frames in ((0, [b"x"]), (2, [b"x"]), (1, []), (1, [bytes(5 << 20)])):
            opened[0].call(lambda rank=rank, frames=frames: attempt(rank, frames))
        send(opened[0], 1, [b"sound"])
        listeners[1].wait(lambda one: one.messages)
        assert len(errors) == 4 and listeners[1].messages == [(0, [b"sound"])]
        with pytest.raises(LocalProtocolError, match="use call"):
            opened[0].send(1, [b"x"])


def test_a_listener_that_fails_is_said_and_told_further(hub, caplog):
    class Failing(Remembering):
        def on_message(self, rank, frames):
            super().on_message(rank, frames)
            raise ValueError("a mistake")

    first, second = open_all(hub, 2, group="failing")
    listener = Failing()
    second.start(listener)
    send(first, 1, [b"1"], [b"2"])
    listener.wait(lambda one: len(one.messages) == 2)
    first.close()
    second.close()
    assert "a mistake" in caplog.text


# ---------------------------------------------------------------------- meeting


def test_a_group_that_is_not_complete_in_time_says_who_is_here(hub):
    with pytest.raises(CollectiveTimeout, match=r"'few' of 3 processes alone is here, 2 missing"):
        open_port(hub, 3, group="few", name="alone", timeout_seconds=0.3)


class Said(logging.Handler):
    """Tells when something has been said."""

    def __init__(self, what):
        super().__init__()
        self.what, self.said = what, threading.Event()

    def emit(self, record):
        if self.what in record.getMessage():
            self.said.set()


def test_who_waits_for_others_for_long_says_for_whom(hub, monkeypatch):
    monkeypatch.setattr(hub_line, "PATIENCE_SECONDS", 0.1)
    waits = Said(" of at most 20): of the group 'slow' of 2 processes early is here, 1 missing")
    hub_line.logger.addHandler(waits)
    try:
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(open_port, hub, 2, group="slow", name="early", timeout_seconds=20)
            assert waits.said.wait(20)
            opened = [open_port(hub, 2, group="slow", timeout_seconds=20), early.result()]
    finally:
        hub_line.logger.removeHandler(waits)
    for port in opened:
        port.close()


def test_no_broker_is_said_with_what_to_do():
    with pytest.raises(HubUnreachable, match="zmqtrain-broker"):
        open_port("tcp://127.0.0.1:9", 2, timeout_seconds=0.2)


def test_who_comes_to_a_complete_group_is_refused_once_it_is_sure_that_it_lives(hub, monkeypatch):
    monkeypatch.setattr(hub_line, "OCCUPIED_SECONDS", 0.5)
    with ports(hub, 1, group="alone"), pytest.raises(JoinRefused, match="complete: pc-0"):
        open_port(hub, 1, group="alone", name="late", timeout_seconds=20)


def wait_until_it_waits(hub, name, **arguments):
    """Wait until a process of that name waits for a group of three."""
    error = ""
    while f"{name} " not in error.partition("within")[2].replace(",", " "):
        with pytest.raises(CollectiveTimeout) as raised:
            open_port(hub, 3, name="looks", timeout_seconds=0.2, **arguments)
        error = str(raised.value)


def test_who_asks_for_something_else_than_those_who_wait_is_refused_once_it_is_sure_that_they_live(hub, monkeypatch):
    monkeypatch.setattr(hub_line, "OCCUPIED_SECONDS", 0.5)
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(open_port, hub, 3, 0, group="few", name="first", timeout_seconds=20)
        wait_until_it_waits(hub, "first", group="few")
        with pytest.raises(JoinRefused, match=r"rank 0 .* is taken, by first"):
            open_port(hub, 3, 0, group="few", name="other", timeout_seconds=0.2)
        with pytest.raises(JoinRefused, match="first forms the group 'few' for 3 processes, other wants one of 2"):
            open_port(hub, 2, group="few", name="other", timeout_seconds=20)
        others = [pool.submit(open_port, hub, 3, group="few", timeout_seconds=20) for _ in range(2)]
        for port in (waiting, *others):
            port.result().close()


def test_the_place_of_a_process_that_was_killed_while_it_waited_is_taken_by_who_comes_instead(hub):
    with echoing(hub, 3, range(1)) as processes:
        wait_until_it_waits(hub, "pc-0")
        processes[0].kill()
        with ports(hub, 2) as (opened, _):  # of another size besides
            assert opened[0].names == ("pc-0", "pc-1")


def test_a_group_whose_processes_were_just_killed_meets_again_at_once(hub):
    with echoing(hub, 2, range(2)) as processes:
        for process in processes.values():
            assert process.stdout.readline() == "ready\n"
        for process in processes.values():
            process.kill()
        with ports(hub, 2, name="anew") as (opened, _):
            assert opened[0].names == ("anew", "anew")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": 0}, "size must be 1 to 256"),
        ({"size": 2, "rank": 2}, "rank must be 0 to 1"),
        ({"size": 2, "name": "a#b"}, "name"),
        ({"size": 2, "timeout_seconds": 0}, "above 0 s"),
        ({"size": 2, "hub": "hub:5555"}, "tcp://HOST:PORT"),
        ({"size": 2, "listen": "tcp://192.0.2.1:0"}, "no address of this machine"),
    ],
)
def test_wrong_arguments_are_refused_before_anybody_is_asked(arguments, words):
    with pytest.raises(ConfigError, match=words):
        open_port(**{"hub": "tcp://127.0.0.1:9", **arguments})


def test_after_a_loss_the_survivors_meet_again_under_the_same_name(hub):
    with ports(hub, 3, group="again") as (opened, listeners):
        opened[2].close()
        for listener in listeners[:2]:
            listener.wait(lambda one: one.lost == {2: LEFT})
        with ports(hub, 2, group="again") as (anew, told):
            send(anew[0], 1, [b"hello"])
            told[1].wait(lambda one: one.messages == [(0, [b"hello"])])


# ---------------------------------------------------------------------- losses


def test_who_leaves_is_lost_to_all_after_all_it_has_sent(hub):
    with ports(hub, 3, group="leaver") as (opened, listeners):
        for rank in (1, 2):
            send(opened[0], rank, *([bytes(1 << 20)] for _ in range(8)))
        opened[0].close(5.0)
        for listener in listeners[1:]:
            listener.wait(lambda one: one.lost)
            assert listener.lost == {0: LEFT} and len(listener.messages) == 8
        send(opened[1], 0, [b"too late"])
        send(opened[1], 2, [b"still here"])
        listeners[2].wait(lambda one: (1, [b"still here"]) in one.messages)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_lost_to_all_soon(hub, number):
    with echoing(hub, 4, range(2, 4)) as processes, ports(hub, 4, here=2) as (opened, listeners):
        for rank in processes:
            send(opened[0], rank, [b"are you there"])
        listeners[0].wait(lambda one: len(one.messages) == 2)
        os.kill(processes[3].pid, number)
        for listener in listeners:
            listener.wait(lambda one: 3 in one.lost)
            assert set(listener.lost) == {3}
        assert processes[2].stdout.readline() == "ready\n"
        assert processes[2].stdout.readline().startswith("lost 3 ")
        if number == signal.SIGSTOP:
            os.kill(processes[3].pid, signal.SIGCONT)
            assert processes[3].stdout.readline() == "ready\n"
            assert processes[3].stdout.readline().startswith("lost 3 "), "it is told that it is the one that is lost"


def test_a_process_that_lets_none_of_its_threads_run_for_two_seconds_is_not_lost(hub):
    with echoing(hub, 3, range(2, 3)) as processes, ports(hub, 3, here=2) as (opened, listeners):
        assert processes[2].stdout.readline() == "ready\n"
        processes[2].stdin.write("hold\n")
        processes[2].stdin.flush()
        assert processes[2].stdout.readline() == "held\n"
        for port, listener in zip(opened, listeners, strict=True):
            send(port, 2, [b"are you there"])
            listener.wait(lambda one: one.messages)
            assert listener.lost == {}


def test_a_group_lives_on_without_its_hub_and_all_are_told_of_the_same_loss():
    with (
        BrokerProcess(RunSettings(), None) as hub,
        echoing(hub.address, 4, range(2, 4)) as processes,
        ports(hub.address, 4, here=2) as (opened, listeners),
    ):
        hub.kill()
        send(opened[0], 2, [b"still there"])
        listeners[0].wait(lambda one: one.messages)
        processes[3].kill()
        for listener in listeners:
            listener.wait(lambda one: 3 in one.lost)
            assert set(listener.lost) == {3}
        assert processes[2].stdout.readline() == "ready\n"
        assert processes[2].stdout.readline().startswith("lost 3 ")


def test_who_hears_nobody_any_more_is_told_that_it_is_cut_off():
    with (
        BrokerProcess(RunSettings(), None) as hub,
        echoing(hub.address, 3, range(1, 3)) as processes,
        ports(hub.address, 3, here=1) as (opened, (listener,)),
    ):
        for process in (hub.process, *processes.values()):
            os.kill(process.pid, signal.SIGSTOP)
        listener.wait(lambda one: one.lost)
        assert set(listener.lost) == {0} and "hears nobody" in listener.lost[0]
        send(opened[0], 1, [b"nobody is told that this is dropped"])


def test_who_is_sent_away_by_the_hub_is_told_as_the_others_are(hub):
    with ports(hub, 2, group="away") as (opened, listeners):
        opened[0].call(lambda: opened[0]._line.say(GroupLost(99, "nobody")))
        for listener in listeners:
            listener.wait(lambda one: one.lost)
            assert set(listener.lost) == {0} and "sent" in listener.lost[0]


# ---------------------------------------------------------------------- through the hub, encrypted, and strangers


def test_who_cannot_be_reached_is_sent_to_through_the_hub_and_it_is_said(hub, caplog):
    sizes = [0, 3, 70_000, 4 << 20, 1 << 20, 5]
    with (
        caplog.at_level("INFO"),
        ports(hub, 3, group="relay", addresses={2: NOWHERE}, direct_seconds=0.3) as (opened, listeners),
    ):
        assert [port.statistics().relayed for port in opened] == [(2,), (2,), ()]
        assert f"does not reach pc-2 (rank 2) at {NOWHERE}" in caplog.text
        for rank in (0, 1):
            send(opened[rank], 2, *([b"%d" % index, bytes(size)] for index, size in enumerate(sizes)))
            send(opened[2], rank, [b"direct"])
            listeners[rank].wait(lambda one: one.messages == [(2, [b"direct"])])
        listeners[2].wait(lambda one: len(one.messages) == 2 * len(sizes))
        for rank in (0, 1):
            came = [frames for source, frames in listeners[2].messages if source == rank]
            assert came == [[b"%d" % index, bytes(size)] for index, size in enumerate(sizes)]
        opened[0].close()
        for listener in listeners[1:]:
            listener.wait(lambda one: one.lost)
            assert listener.lost == {0: LEFT}


def test_more_than_the_window_goes_through_the_hub_both_ways(hub):
    with ports(hub, 2, group="window", addresses={0: NOWHERE, 1: NOWHERE}, direct_seconds=0.3) as (opened, listeners):
        for rank in (0, 1):
            send(opened[rank], 1 - rank, *([b"%d" % number, bytes(300_000)] for number in range(40)))
        for listener in listeners:
            listener.wait(lambda one: len(one.messages) == 40)
            assert [frames[0] for _, frames in listener.messages] == [b"%d" % number for number in range(40)]


def test_who_is_reached_through_the_hub_is_lost_with_it():
    with (
        BrokerProcess(RunSettings(), None) as hub,
        ports(hub.address, 2, addresses={1: NOWHERE}, direct_seconds=0.3) as (_, listeners),
    ):
        hub.interrupt()
        listeners[0].wait(lambda one: one.lost)
        assert "through the hub only" in listeners[0].lost[1]


def test_with_keys_all_is_encrypted_and_who_lacks_them_reaches_nobody():
    keys = CurveKeys.generate()
    with broker(keys) as hub:
        with ports(hub, 2, server_key=keys.public) as (opened, listeners):
            send(opened[0], 1, [b"secret", bytes(1 << 20)])
            listeners[1].wait(lambda one: one.messages == [(0, [b"secret", bytes(1 << 20)])])
            assert opened[0].statistics().relayed == ()
        with pytest.raises(HubUnreachable, match=r"wants? keys"):
            open_port(hub, 1, timeout_seconds=0.5)


def test_a_group_lets_in_nobody_whose_key_the_hub_has_not_told_it():
    keys = CurveKeys.generate()

    async def intrude(address, token, key):
        for pair in (None, CurveKeys.generate()):
            stranger = DealerChannel.connect(address, peer=PeerId("0@" + token), server_key=key, keys=pair)
            await stranger.send(Lane.BULK, [b"junk"])
            while stranger.refused != "key":
                await stranger.changed()
            await stranger.close()

    with broker(keys) as hub, ports(hub, 2, server_key=keys.public) as (opened, listeners):
        _, _, key, token = opened[1]._group.members[1]
        asyncio.run(intrude(opened[1]._door._router.address, token, key.encode()))
        send(opened[0], 1, [b"sound"])
        listeners[1].wait(lambda one: one.messages)
        assert listeners[1].messages == [(0, [b"sound"])] and opened[1].statistics().strangers == 0


def test_strangers_are_counted_and_ignored(hub):
    async def disturb(address, token):
        for peer in ("0@wrong", "7@" + token, "pc-0#1"):
            stranger = DealerChannel.connect(address, peer=PeerId(peer))
            for lane in Lane:
                await stranger.send(lane, [b"junk"])
            await stranger.close()

    with ports(hub, 2, group="strangers") as (opened, listeners):
        token = opened[1]._group.members[1][3]
        asyncio.run(disturb(opened[1]._door._router.address, token))
        send(opened[0], 1, [b"sound"])
        listeners[1].wait(lambda one: opened[1].statistics().strangers == 6 and one.messages)
        assert listeners[1].messages == [(0, [b"sound"])] and not listeners[1].lost


# ---------------------------------------------------------------------- the hub reduces


def reduce(port, chunk, *messages):
    port.call(lambda: [port.reduce(chunk, message) for message in messages])


def test_the_hub_reduces_chunks_of_all_ranks_more_than_fit_its_window(hub):
    count, values = 40, np.arange(100_000, dtype=np.float32)
    with ports(hub, 3, group="reduce") as (opened, listeners):
        for rank, port in enumerate(opened):
            chunks = [[b"%d of %d" % (index, rank), (values * (rank + index)).data] for index in range(count)]
            reduce(port, HubChunk(5, "sum", "float32"), *chunks)
        for rank, listener in enumerate(listeners):
            listener.wait(lambda one: len(one.messages) == count)
            for index, (source, (own, result)) in enumerate(listener.messages):
                assert (source, own) == (HUB, b"%d of %d" % (index, rank))
                expected = values * index + values * (1 + index) + values * (2 + index)
                np.testing.assert_array_equal(np.frombuffer(result, np.float32), expected)


def test_what_the_hub_does_not_reduce_is_refused_at_once(hub):
    with ports(hub, 1, group="refused") as ((port,), (listener,)):
        errors = []

        def attempt(chunk, frames):
            try:
                port.reduce(chunk, frames)
            except ZmqTrainError as error:
                errors.append(str(error))

        wrong = [
            (HubChunk(1, "xor", "int32"), [bytes(4)]),
            (HubChunk(1, "sum", "bfloat16"), [bytes(4)]),
            (HubChunk(1, "sum", "int32"), [bytes(5)]),
            (HubChunk(-1, "sum", "int32"), [bytes(4)]),
            (HubChunk(1, "sum", "int32"), [bytes(5000), bytes(4)]),
        ]
        for chunk, frames in wrong:
            port.call(lambda chunk=chunk, frames=frames: attempt(chunk, frames))
        reduce(port, HubChunk(1, "prod", "int32"), [b"\x03\0\0\0"])
        listener.wait(lambda one: one.messages)
        assert listener.messages == [(HUB, [b"\x03\0\0\0"])] and len(errors) == len(wrong)


def test_when_the_hub_that_reduces_is_gone_its_rank_is_lost():
    with BrokerProcess(RunSettings(), None) as hub, ports(hub.address, 2) as (opened, listeners):
        reduce(opened[0], HubChunk(1, "sum", "int32"), [bytes(4)])
        hub.interrupt()
        listeners[0].wait(lambda one: HUB in one.lost)
        reduce(opened[1], HubChunk(1, "sum", "int32"), [bytes(4)])
        listeners[1].wait(lambda one: HUB in one.lost)
        assert set(listeners[0].lost) == set(listeners[1].lost) == {HUB}
