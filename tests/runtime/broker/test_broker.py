"""A broker alive on a channel that the test holds: what a peer says cannot end it, and how it ends loses nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from math import nan

import msgpack
import numpy as np
import pytest

from tests.runtime.stories import lived_through
from zmqtrain.errors import CheckpointError
from zmqtrain.protocol import rates
from zmqtrain.protocol.framing import decode_message, encode_message, split
from zmqtrain.protocol.group_messages import Fold, Folded, Group, GroupLost, JoinGroup, Relay
from zmqtrain.protocol.groups import RELAY_MESSAGES
from zmqtrain.protocol.messages import (
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Publish,
    Quarantine,
    Refused,
    Roster,
    Snapshot,
    Welcome,
    WorkRequest,
    model_to_wire,
)
from zmqtrain.runtime.broker.broker import Broker
from zmqtrain.runtime.broker.checkpoint import RunFolder
from zmqtrain.runtime.equation.delta import DENSE, DeltaCoder, encode_snapshot
from zmqtrain.runtime.equation.moments import encode_moments
from zmqtrain.settings import RunSettings
from zmqtrain.transport.gate import Gate
from zmqtrain.transport.limits import check_message
from zmqtrain.types import Lane, LeafSpec, Offer

MODEL = (LeafSpec("w", (10,), "float32"),)
LEAVES = [np.arange(10, dtype=np.float32)]


class Wire:
    """A HubChannel: what the broker sends stays here, what it hears the test says."""

    address = "tcp://127.0.0.1:1"

    def __init__(self):
        self.heard, self.sent, self.bulk, self.closed = asyncio.Queue(), [], [], False
        self.news = Gate()

    def send(self, peer, lane, frames):
        check_message(frames)
        (self.sent if lane is Lane.CONTROL else self.bulk).append((peer, decode_message(frames[0])))
        self.news.open()

    def asked(self, peer):
        """How often the broker has asked this peer for its parameters."""
        return sum(who == peer and isinstance(message, Fetch) for who, message in self.sent)

    async def receive(self):
        self.news.open()  # all that follows from what came before has been done
        return await self.heard.get()

    async def close(self, linger_seconds=1.0):
        self.closed = True

    def say(self, peer, message, *frames):
        lane = Lane.BULK if frames else Lane.CONTROL
        self.heard.put_nowait((peer, lane, [encode_message(message), *frames]))


class Peers:
    """The nodes of a run, as the broker hears them."""

    def __init__(self, broker):
        self.broker, self.wire = broker, broker.channel
        self.layout = DeltaCoder(MODEL, broker.settings).layout

    async def meet(self, *peers):
        for peer in peers:
            self.wire.say(peer, Hello(peer, "process"))
            self.wire.say(peer, JoinGroup(peers[0], len(peers), address="tcp://10.0.0.1:1", token="0a"))
        await self.until(lambda: self.told(peers[-1], Group))

    def told(self, peer, kind):
        return [message for who, message in self.wire.sent if who == peer and isinstance(message, kind)]

    async def until(self, condition):
        while not condition():
            await self.wire.news.wait()

    async def join(self, *peers):
        for peer in peers:
            self.wire.say(peer, Hello(peer))
            self.wire.say(peer, Fetch(-1, model_to_wire(MODEL)))
        await self.until(lambda: self.wire.asked(peers[0]))
        self.transfer(peers[0], lambda sizes: Snapshot(1, 0, sizes), encode_snapshot(self.layout, LEAVES))
        await self.until(lambda: len(self.broker.hub.live) == len(peers))

    def transfer(self, peer, announce, frames):
        announcement = announce(tuple(len(frame) for frame in frames))
        self.wire.say(peer, announcement)
        for chunk, frame in split(announcement.transfer, frames):
            self.wire.heard.put_nowait((peer, Lane.BULK, [chunk, frame]))

    def publish(self, peer, sequence, transfer, value=1.0, samples=8, dense=True):
        offer = Offer(sequence, 0, [np.full(10, value, np.float32)], samples, 1, None, (), True)
        frames = DeltaCoder(MODEL, self.broker.settings).encode(offer).frames
        self.transfer(peer, lambda s: Publish(transfer, sequence, 0, 0, DENSE, s, samples, 1, nan, dense), frames)


def lived(story, folder=None, **settings):
    """Run a broker while `story(peers)` happens; return the broker when it has ended."""
    settings = {"release": "immediately", "outer": "sgd:rate=1", **settings}
    return lived_through(lambda: Broker(Wire(), RunSettings(**settings), folder), lambda broker: story(Peers(broker)))


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
        peers.broker._jobs.do(go_on.wait)
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
        close = peers.broker._jobs._worker.close

        def close_and_let_go(seconds):
            threading.Thread(target=go_on.set).start()
            peers.broker._jobs._worker._jobs.close()
            close(seconds)

        peers.broker._jobs._worker.close = close_and_let_go
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
            assert not peers.broker.hub.live or not peers.broker.traffic.follows("a#1")
            return save(folder, *facts)

        monkeypatch.setattr(RunFolder, "save", slow)
        await peers.join("a#1")
        await peers.until(lambda: peers.broker.traffic.follows("a#1"))
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
        patch.setattr("zmqtrain.runtime.broker.capacity.os.sysconf", lambda name: 1 << 12)
        lived(story)


# ---------------------------------------------------------------------- whose parameters


def wants(peers, peer, score):
    peers.wire.say(peer, Hello(peer))
    peers.wire.say(peer, Fetch(-1, model_to_wire(MODEL), score))


def give(peers, peer, leaves=LEAVES, moments=(), transfer=1):
    frames = [*encode_snapshot(peers.layout, leaves), *moments]
    peers.transfer(peer, lambda sizes: Snapshot(transfer, 0, sizes, (), len(moments)), frames)


def snapshots(peers):
    return {peer: message for peer, message in peers.wire.bulk if isinstance(message, Snapshot)}


def test_the_founders_optimizer_state_goes_to_the_nodes_of_the_founding_and_to_none_later():
    async def story(peers):
        wants(peers, "a#1", 2.0)
        wants(peers, "b#1", 1.0)
        await peers.until(lambda: peers.wire.asked("b#1"))
        give(peers, "b#1", moments=encode_moments([np.ones(20, np.float32)]))
        await peers.until(lambda: len(snapshots(peers)) == 2)
        assert (snapshots(peers)["a#1"].moments, snapshots(peers)["b#1"].sizes) == (1, ())
        assert len(peers.broker.versions.moments) == 1
        peers.publish("a#1", 0, transfer=7)
        await peers.until(lambda: peers.broker.aggregator.version == 1)
        wants(peers, "c#1", 0.0)
        await peers.until(lambda: "c#1" in snapshots(peers))
        assert snapshots(peers)["c#1"].moments == 0 and len(peers.broker.versions.moments) == 0

    lived(story, initial="best", start_nodes=2)


@pytest.mark.parametrize("wrong", ["many", "all", "unasked", "infinite"])
def test_an_optimizer_state_that_cannot_be_right_costs_its_node_its_place_and_the_next_best_founds(wrong):
    state = {
        "many": encode_moments([np.ones(100_000, np.float32)]),
        "infinite": [bytes(encode_moments([np.ones(4, np.float32)])[0][:-4]) + b"\x00\x00\x80\x7f"],
    }.get(wrong, encode_moments([np.ones(4, np.float32)]))

    async def story(peers):
        wants(peers, "a#1", 1.0)
        wants(peers, "b#1", 2.0)
        await peers.until(lambda: peers.wire.asked("a#1"))
        if wrong == "all":
            peers.transfer("a#1", lambda sizes: Snapshot(1, 0, sizes, (), len(sizes)), state)
        else:
            give(peers, "a#1", moments=state)
        await peers.until(lambda: peers.wire.asked("b#1"))
        assert any(peer == "a#1" and isinstance(message, Refused) for peer, message in peers.wire.sent)
        give(peers, "b#1")
        await peers.until(lambda: peers.broker.aggregator.version == 0)

    lived(story, initial="best", start_nodes=2, fresh_moments=wrong == "unasked")


def test_one_of_a_population_is_lent_what_another_gave():
    async def story(peers):
        wants(peers, "a#1", 1.0)
        wants(peers, "b#1", 2.0)
        await peers.until(lambda: peers.wire.asked("a#1"))
        give(peers, "a#1", moments=encode_moments([np.ones(20, np.float32)]))
        await peers.until(lambda: "b#1" in snapshots(peers))
        lent = snapshots(peers)["b#1"]
        assert (lent.version, lent.moments, lent.reset) == (-1, 1, True)
        await peers.until(lambda: peers.wire.asked("a#1") == 2)
        give(peers, "a#1", transfer=2)
        await peers.until(lambda: snapshots(peers)["b#1"].version == 0)
        assert not snapshots(peers)["b#1"].reset and not peers.broker._arrivals.whole

    lived(story, initial="own", start_nodes=2, preemption="score:patience=1,margin=0")


def test_the_mean_of_related_parameters_founds_and_who_left_is_not_in_it():
    async def story(peers):
        for peer in ("a#1", "b#1", "c#1"):
            wants(peers, peer, nan)
        await peers.until(lambda: peers.wire.asked("c#1"))
        give(peers, "a#1", [3 * LEAVES[0]])
        give(peers, "c#1", [LEAVES[0] * 100])
        await peers.until(lambda: len(peers.broker._arrivals.whole) == 2)
        peers.wire.say("c#1", Goodbye())
        give(peers, "b#1", [LEAVES[0]])
        await peers.until(lambda: peers.broker.aggregator.version == 0)
        np.testing.assert_array_equal(peers.broker.aggregator.parameters[0], 2 * LEAVES[0])
        assert not peers.broker._arrivals.whole

    lived(story, initial="mean", start_nodes=3)


# ---------------------------------------------------------------------- groups of processes


def test_a_message_is_relayed_and_chunks_are_reduced_with_what_came_behind_them():
    async def story(peers):
        await peers.meet("p", "q")
        peers.wire.say("p", Relay(1, 5), b"12", b"345")
        for peer in "pq":
            peers.wire.say(peer, Fold(1, "sum", "int32", 4), np.ones(1, np.int32).tobytes())
        await peers.until(lambda: len(peers.wire.bulk) == 3)

    broker = lived(story)
    assert broker.channel.bulk == [("q", Relay(0, 5)), ("p", Folded(1, 4)), ("q", Folded(1, 4))]


@pytest.mark.parametrize(
    "junk",
    [
        [(Relay(1, 6), b"12", b"345")],
        [(Relay(1, 1), b"x")] * (RELAY_MESSAGES + 1),
        [(Relay(2, 1), b"x")],
        [(Fold(1, "sum", "int32", 4), b"123")],
        [(Fold(1, "xor", "int32", 4), b"1234")],
        [(Fold(1, "sum", "int32", 3), b"123")],
        [(GroupLost(7, "nobody"),)],
    ],
)
def test_a_process_that_says_what_cannot_be_loses_its_place_and_the_others_go_on(junk):
    async def story(peers):
        await peers.meet("p", "q")
        await peers.meet("r", "s")
        for message, *behind in junk:
            peers.wire.say("p", message, *behind)
        await peers.until(lambda: peers.told("p", Refused) and peers.told("q", GroupLost))
        peers.wire.say("r", Relay(1, 1), b"x")
        await peers.until(lambda: ("s", Relay(0, 1)) in peers.wire.bulk)

    broker = lived(story)
    assert set(broker.hub.members) == {"q", "r", "s"}
    (lost,) = [message for who, message in broker.channel.sent if who == "q" and isinstance(message, GroupLost)]
    assert lost.rank == 0 and "sent away" in lost.why
    assert not [one for one in broker.channel.sent if one[0] in "rs" and isinstance(one[1], GroupLost | Refused)]


# ---------------------------------------------------------------------- who says too much


def test_a_flood_is_sent_away_once_and_costs_nobody_else(monkeypatch, caplog):
    monkeypatch.setattr(rates, "MESSAGES_AT_ONCE", 200.0)
    monkeypatch.setattr(rates, "MESSAGES_PER_SECOND", 1e6)  # it is heard again soon

    async def story(peers):
        await peers.join("a#1", "b#1")
        monkeypatch.setattr(rates, "MESSAGES_PER_SECOND", 1.0)
        for number in range(1000):
            peers.wire.say("b#1", Heartbeat(float(number)))
        await peers.until(lambda: "b#1" not in peers.broker.hub.members)
        await peers.until(peers.wire.heard.empty)
        peers.publish("a#1", 0, transfer=7)
        await peers.until(lambda: peers.broker.aggregator.version == 1)
        assert peers.broker.receiver.rates.not_heard > 700

    lived(story)
    assert caplog.text.count("sending b away: it says more than") == 1


def test_with_the_keys_of_a_node_nobody_is_the_standby_or_the_master_of_a_shard():
    async def story(peers):
        peers.broker.receiver._has_our_keys = lambda peer: peer == "s#1"
        address = "tcp://10.0.0.9:1"
        peers.wire.say("x#1", Hello("x", "standby", address=address))
        peers.wire.say("y#1", Hello("y", "master", shard=1, address=address))
        peers.wire.say("s#1", Hello("s", "standby", address=address))
        await peers.until(lambda: peers.told("s#1", Welcome))
        assert [refused.reason for who in ("x#1", "y#1") for refused in peers.told(who, Refused)] == ["keys", "keys"]
        assert list(peers.broker.hub.members) == ["s#1"]

    lived(story)


async def looked_to_while_asking(peers, times, *asked):
    """Have b#1, which follows, say this so many times while the codec thread is busy; return who is looked to then."""
    await peers.join("a#1", "b#1")
    await peers.until(lambda: peers.broker.traffic.follows("b#1"))
    looked, go_on = [], threading.Event()
    peers.broker._jobs.do(go_on.wait)
    look = peers.broker.serving._look
    peers.broker.serving._look = lambda *facts: looked.append(facts[1]) or look(*facts)
    for _ in range(times):
        for message in asked:
            peers.wire.say("b#1", message)
    await peers.until(peers.wire.heard.empty)
    go_on.set()
    return looked


def test_who_asks_for_parameters_again_and_again_is_looked_to_once():
    async def story(peers):
        looked = await looked_to_while_asking(peers, 500, Fetch(-1, model_to_wire(MODEL)))
        await peers.until(lambda: looked)
        peers.publish("a#1", 0, transfer=7)
        await peers.until(lambda: peers.broker.aggregator.version == 1)
        assert len(looked) <= 2

    lived(story)


def test_who_connects_and_asks_for_parameters_again_and_again_is_looked_to_once_too():
    async def story(peers):
        looked = await looked_to_while_asking(peers, 100, Hello("b#1"), Fetch(-1, model_to_wire(MODEL)))
        await peers.until(lambda: peers.broker.traffic.follows("b#1"))
        assert looked == ["b#1"]

    lived(story)


def test_a_publish_in_more_frames_than_it_can_have_is_refused_before_anything_is_held():
    async def story(peers):
        await peers.join("a#1")
        sizes = (1,) * 50
        peers.wire.say("a#1", Publish(7, 0, 0, 0, DENSE, sizes, 8, 1, nan, True))
        await peers.until(lambda: peers.told("a#1", Refused))
        (refused,) = peers.told("a#1", Refused)
        assert refused.reason == "size" and "50 bytes in 50 frames" in refused.text

    lived(story)


def test_the_roster_says_what_the_broker_has_refused_and_whether_its_disk_has_room():
    async def story(peers):
        await peers.join("a#1")
        peers.wire.say("a#1", Publish(7, 0, 0, 0, DENSE, (1,) * 50, 8, 1, nan, True))
        await peers.until(lambda: peers.told("a#1", Refused))
        peers.broker._refusals = lambda: {"key": 2, "full": 3}
        peers.broker.keeper.waits_for_room = True
        peers.wire.say("o#1", Hello("o", "observer"))
        await peers.until(lambda: peers.told("o#1", Roster))
        said = peers.told("o#1", Roster)[0].hub
        assert (said["refused"], said["turned_away"], said["waits_for_room"]) == (1, 5, True)

    lived(story)


def test_a_delta_that_is_far_too_large_is_refused_and_its_node_quarantined_while_the_others_go_on(caplog):
    async def story(peers):
        await peers.join("a#1", "b#1")
        version = 0
        for sequence in range(10):
            for peer in ("a#1", "b#1"):
                peers.publish(peer, sequence, transfer=100 + sequence, dense=False)
                version += 1
                await peers.until(lambda at=version: peers.broker.aggregator.version == at)
        for sequence in range(10, 13):
            peers.publish("b#1", sequence, transfer=100 + sequence, value=-1e7, dense=False)
        await peers.until(lambda: peers.told("b#1", Quarantine))
        assert [one.reason for one in peers.told("b#1", Refused)] == ["enormous"] * 3
        peers.publish("a#1", 10, transfer=110)
        await peers.until(lambda: peers.broker.aggregator.version == version + 1)
        assert np.abs(peers.broker.aggregator.published[0]).max() < 100

    lived(story, norm_gate="10", codec=DENSE)
    assert "b is quarantined for 10 s: enormous: its norm is" in caplog.text
