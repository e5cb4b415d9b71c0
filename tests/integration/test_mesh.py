"""Ports over real sockets: what they carry, among themselves and through the hub, encrypted, and what it reduces."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from runs import BrokerProcess

from zmqtrain.collectives.mesh import LEFT, open_port
from zmqtrain.core.errors import HubUnreachable, LocalProtocolError, ZmqTrainError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import HUB, HubChunk, Lane, PeerId
from zmqtrain.protocol import failure_detector
from zmqtrain.transport.zmq_channels import DealerChannel
from zmqtrain.transport.zmq_keys import CurveKeys

from meshes import NOWHERE, WAIT_SECONDS, Remembering, broker, open_all, ports, send


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
    first.close(WAIT_SECONDS)
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


# ---------------------------------------------------------------------- through the hub, encrypted, and strangers


def test_who_cannot_be_reached_is_sent_to_through_the_hub_and_it_is_said(hub, caplog, monkeypatch):
    monkeypatch.setattr(
        failure_detector, "UNREACHABLE_SECONDS", WAIT_SECONDS
    )  # the hub says that one has left, however late
    sizes = [0, 3, 70_000, 4 << 20, 1 << 20, 5]
    with (
        caplog.at_level("INFO"),
        ports(hub, 3, group="relay", addresses={2: NOWHERE}, direct_seconds=6.0) as (opened, listeners),
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
        opened[0].close(3.0)  # all of it, for what nobody takes is still to be sent to pc-2
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
            open_port(hub, 1, timeout_seconds=6)


def test_a_group_lets_in_nobody_whose_key_the_hub_has_not_told_it():
    keys = CurveKeys.generate()

    async def intrude(address, token, key):
        for pair in (None, CurveKeys.generate()):
            stranger = DealerChannel(address, peer=PeerId("0@" + token), server_key=key, keys=pair)
            await stranger.send(Lane.BULK, [b"junk"])
            while stranger.refused != "key":
                await stranger.changed()
            await stranger.close()

    with broker(keys) as hub, ports(hub, 2, server_key=keys.public) as (opened, listeners):
        _, _, key, token = opened[1]._group.members[1]
        asyncio.run(intrude(opened[1]._socket._router.address, token, key.encode()))
        send(opened[0], 1, [b"sound"])
        listeners[1].wait(lambda one: one.messages)
        assert listeners[1].messages == [(0, [b"sound"])] and opened[1].statistics().strangers == 0


def test_strangers_are_counted_and_ignored(hub):
    async def disturb(address, token):
        for peer in ("0@wrong", "7@" + token, "pc-0#1"):
            stranger = DealerChannel(address, peer=PeerId(peer))
            for lane in Lane:
                await stranger.send(lane, [b"junk"])
            await stranger.close(WAIT_SECONDS)

    with ports(hub, 2, group="strangers") as (opened, listeners):
        token = opened[1]._group.members[1][3]
        asyncio.run(disturb(opened[1]._socket._router.address, token))
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
            (HubChunk(1, "sum", "datetime64[s]"), [bytes(8)]),
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
