"""A broker alive on a channel that the test holds: what a peer says cannot end it, and how it ends loses nothing."""

from __future__ import annotations

import logging
import threading

import msgpack
import numpy as np
import pytest

from tests.broker.wires import LEAVES, MODEL, lived
from zmqtrain.broker.checkpoint import RunFolder
from zmqtrain.checkpoint.model_files import read_model
from zmqtrain.core.errors import ChannelFull, CheckpointError, PeerLost
from zmqtrain.core.types import Lane
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.members import RUN_OVER
from zmqtrain.protocol.messages import (
    Chunk,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Snapshot,
    Stop,
    WorkRequest,
    model_to_wire,
)


def test_a_transfers_number_used_twice_confuses_nothing():
    async def story(peers):
        await peers.join("a#1", "b#1")
        peers.publish("a#1", 0, transfer=7, value=1.0)
        await peers.until(lambda: len(peers.broker.hub.rounds.pending) == 1)
        peers.publish("a#1", 1, transfer=7, value=3.0)
        await peers.until(lambda: len(peers.broker.hub.rounds.pending) == 2)
        peers.publish("b#1", 0, transfer=7, value=0.0)
        await peers.until(lambda: peers.broker.aggregator.version == 1)
        peers.publish("b#1", 1, transfer=7, value=0.0)
        await peers.until(lambda: peers.broker.aggregator.version == 2)

    broker = lived(story, release="all")
    np.testing.assert_array_equal(broker.aggregator.published[0], LEAVES[0] + 0.5 + 1.5)


def test_what_was_sent_on_a_former_connection_is_not_taken_for_what_has_its_number_on_this_one():
    async def story(peers):
        await peers.join("a#1", "b#1")
        go_on = threading.Event()
        peers.broker.codec.do(go_on.wait)
        peers.publish("a#1", 0, transfer=7, value=1.0)  # whole, and checked once the codec thread goes on
        peers.wire.say("a#1", Hello("a#1"))
        peers.wire.say("a#1", Fetch(0, model_to_wire(MODEL)))
        peers.publish("a#1", 1, transfer=7, value=3.0)
        await peers.until(peers.wire.heard.empty)
        go_on.set()
        await peers.until(lambda: peers.broker.aggregator.version == 1)

    broker = lived(story)
    np.testing.assert_array_equal(broker.aggregator.published[0], LEAVES[0] + 1.5)


def test_what_is_checked_while_the_broker_ends_is_neither_counted_nor_an_error(tmp_path):
    async def story(peers):
        checking, go_on = threading.Event(), threading.Event()
        check = peers.broker.aggregator.check

        def slow(publish, frames):
            checking.set()
            go_on.wait(30.0)
            check(publish, frames)

        await peers.join("a#1")
        peers.broker.aggregator.check = slow
        close = peers.broker.codec._worker.close

        def close_and_let_go(seconds):
            peers.broker.codec._worker._closed = True
            threading.Thread(target=go_on.set).start()
            return close(seconds)

        peers.broker.codec._worker.close = close_and_let_go
        peers.publish("a#1", 0, transfer=7)
        await peers.until(checking.is_set)

    broker = lived(story, tmp_path)
    assert broker.channel.closed and broker.hub.version == broker.aggregator.version == 0
    state, _ = RunFolder(tmp_path).load()
    assert (state["version"], state["contributions"]) == (0, 0)


def test_a_broker_that_cannot_save_still_closes_its_channel(tmp_path, monkeypatch):
    def full(*_):
        raise CheckpointError("the disk is full")

    made = []

    async def story(peers):
        made.append(peers.broker)
        await peers.join("a#1")
        await peers.until(lambda: peers.broker.downlink.follows("a#1"))  # what it begins with is saved
        monkeypatch.setattr(RunFolder, "save", full)

    with pytest.raises(CheckpointError, match="the disk is full"):
        lived(story, tmp_path)
    assert made[0].channel.closed


def test_after_a_job_that_failed_no_other_is_done_and_the_hub_that_is_ahead_is_not_saved(tmp_path, caplog):
    async def story(peers):
        await peers.join("a#1")

        def broken(reduce):
            raise ValueError("a bug")

        peers.broker.aggregator.release = broken
        peers.publish("a#1", 0, transfer=7)
        peers.publish("a#1", 1, transfer=8)
        await peers.until(lambda: False)

    with pytest.raises(ValueError, match="a bug"):
        lived(story, tmp_path)
    assert "no last checkpoint: version" in caplog.text
    state, _ = RunFolder(tmp_path).load()
    assert state["version"] == 0


def test_nobody_hears_of_a_run_before_it_is_on_the_disk(tmp_path, monkeypatch):
    async def story(peers):
        save = RunFolder.save

        def slow(folder, *facts):
            assert not peers.broker.hub.live or not peers.broker.downlink.follows("a#1")
            return save(folder, *facts)

        monkeypatch.setattr(RunFolder, "save", slow)
        await peers.join("a#1")
        await peers.until(lambda: peers.broker.downlink.follows("a#1"))
        monkeypatch.setattr(RunFolder, "save", save)
        assert RunFolder(tmp_path).load() is not None

    lived(story, tmp_path)


def test_figures_that_no_head_can_hold_are_refused_and_the_broker_goes_on():
    async def story(peers):
        await peers.join("a#1")
        for sequence in range(3):
            peers.publish("a#1", sequence, transfer=10 + sequence, samples=(1 << 63) - 1)
        peers.wire.say("a#1", WorkRequest((), 0, False))
        await peers.until(lambda: peers.broker.hub.refused == 3)

    broker = lived(story)
    assert broker.hub.samples == 0


@pytest.mark.parametrize(
    "head",
    [
        msgpack.packb([[127] * 1_000_000, "Hello", {}]),
        msgpack.packb([list(range(100)), "Hello", {}]),
        b"\x93\x02" + b"\x91" * 900 + b"\x01" + b"\x80",
        encode_message(Hello("a" * 1_000_000, exchange="\x00" * 1000)),
        encode_message(Goodbye("\x00" * 1_000_000)),
    ],
    ids=["a version of a megabyte", "a version of numbers", "a name that is a well", "a name without end", "a reason"],
)
def test_what_a_stranger_writes_without_measure_costs_it_its_place_and_is_answered_in_measure(head, caplog):
    async def story(peers):
        await peers.join("a#1")
        peers.wire.say("b#1", Hello("b"))
        peers.wire.heard.put_nowait(("b#1", Lane.CONTROL, [head]))
        peers.publish("a#1", 0, transfer=7)
        await peers.until(lambda: peers.broker.aggregator.version == 1)
        assert all(len(refused.text) <= 1000 for refused in peers.told("b#1", Refused))

    caplog.set_level(logging.DEBUG, "zmqtrain")
    lived(story)
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    assert "could not be taken" not in caplog.text


def test_a_founder_that_claims_what_no_memory_holds_is_refused_before_anything_is_laid_out():
    async def story(peers):
        peers.wire.say("b#1", Hello("b"))
        peers.wire.say("b#1", Fetch(-1, (("w", (1 << 33,), "float32"),)))
        await peers.until(lambda: peers.wire.asked("b#1"))
        peers.wire.say("b#1", Snapshot(1, 0, (1 << 22,) * 100))
        await peers.until(lambda: [refused.reason for refused in peers.told("b#1", Refused)] == ["model"])
        await peers.join("a#1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zmqtrain.broker.deltas.os.sysconf", lambda name: 1 << 12)
        lived(story)


def test_what_a_peer_said_before_its_connection_was_gone_is_heard_though_it_cannot_be_answered(caplog):
    async def story(peers):
        await peers.join("a#1", "b#1")
        send = peers.wire.send

        def send_to_the_living(peer, lane, frames):
            if peer != "b#1":
                return send(peer, lane, frames)
            raise PeerLost(peer)

        peers.wire.send = send_to_the_living
        peers.wire.say("b#1", Heartbeat(1.0))  # its answer finds nobody
        peers.wire.say("b#1", Goodbye("that was all"))
        await peers.until(lambda: "b#1" not in peers.broker.hub.members)

    caplog.set_level("INFO", "zmqtrain")
    lived(story)
    assert "that was all" in caplog.text and "its connection is gone" not in caplog.text


def test_whose_connection_is_gone_is_lost_if_it_has_said_nothing(caplog):
    async def story(peers):
        await peers.join("a#1", "b#1")
        peers.broker.core.unreachable("b#1")
        await peers.until(lambda: "b#1" not in peers.broker.hub.members)

    caplog.set_level("INFO", "zmqtrain")
    lived(story)
    assert "b left: its connection is gone" in caplog.text


def test_a_newcomer_whose_lane_of_payloads_is_not_there_yet_is_sent_all_of_its_snapshot_when_it_is():
    async def story(peers):
        await peers.join("a#1")
        send, early = peers.wire.send, []

        def send_where_there_is_a_lane(peer, lane, frames):
            if lane is Lane.BULK:
                early.append(peer)
                peers.wire.news.open()
                raise ChannelFull("it is on its way")
            send(peer, lane, frames)

        peers.wire.send = send_where_there_is_a_lane
        peers.wire.say("b#1", Hello("b#1"))
        peers.wire.say("b#1", Fetch(-1, model_to_wire(MODEL)))
        await peers.until(lambda: early)
        peers.wire.send = send
        await peers.until(lambda: peers.wire.bulk and peers.wire.bulk[-1][0] == "b#1")
        assert [type(message) for who, message in peers.wire.bulk if who == "b#1"] == [Snapshot, Chunk]
        assert "b#1" in peers.broker.hub.members

    lived(story)


@pytest.mark.parametrize("operator", [True, False])
def test_a_run_is_ended_by_an_operator_alone_and_a_stranger_costs_it_nothing(tmp_path, operator, caplog):
    async def story(peers):
        await peers.join("a#1")
        peers.wire.say("op#1", Hello("op", "observer"))
        peers.wire.say("op#1", Stop())
        if not operator:
            await peers.until(lambda: peers.told("op#1", Refused))
            assert "only an operator" in peers.told("op#1", Refused)[0].text
            assert not peers.told("a#1", Stop) and peers.broker.hub.stopped_at is None
            assert "op#1" not in peers.broker.hub.members and peers.broker.hub.live == {"a#1"}
            return
        await peers.until(lambda: peers.told("a#1", Stop))
        peers.publish("a#1", 0, 2)
        await peers.until(lambda: peers.broker.hub.version == 1)
        peers.wire.say("a#1", WorkRequest((), 0, True))
        peers.wire.say("a#1", Goodbye())
        await peers.until(lambda: peers.told("op#1", Goodbye))
        assert peers.told("op#1", Goodbye) == [Goodbye(RUN_OVER)], "a standby, and other brokers, end by this too"

    with caplog.at_level("INFO"):
        lived(story, tmp_path, operator=operator)
    said = "an operator, op, ends the run: one node sends what it has computed, and ends" in caplog.text
    assert said == operator
    assert read_model(tmp_path / "model.safetensors")[1].version == int(operator)
