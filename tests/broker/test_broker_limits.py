"""Who says too much to a living broker, or what is for others to say: it costs nobody else."""

from __future__ import annotations

import threading
import time
from math import nan

import msgpack
import numpy as np

from tests.broker.wires import MODEL, lived
from tests.protocol.said import EXAMPLES
from zmqtrain.averaging.coder import DENSE
from zmqtrain.broker import deltas as receiver
from zmqtrain.core.types import Lane
from zmqtrain.protocol import limits
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.limits import LONG_HEAD_BYTES
from zmqtrain.protocol.messages import (
    KEY_REQUESTS,
    Fetch,
    Heartbeat,
    Hello,
    Publish,
    Quarantine,
    Refused,
    Roster,
    Welcome,
    model_to_wire,
)
from zmqtrain.strategies.measures import gains


def test_a_flood_is_sent_away_once_and_costs_nobody_else(monkeypatch, caplog):
    monkeypatch.setattr(limits, "MESSAGES_AT_ONCE", 200.0)
    monkeypatch.setattr(limits, "MESSAGES_PER_SECOND", 1e6)  # it is heard again soon

    async def story(peers):
        await peers.join("a#1", "b#1")
        monkeypatch.setattr(limits, "MESSAGES_PER_SECOND", 1.0)
        of_all = peers.broker.receiver.rates
        take, now = of_all.take, time.monotonic()
        monkeypatch.setattr(of_all, "take", lambda peer, _: take(peer, now))  # all of it is heard in one moment
        for number in range(1000):
            peers.wire.say("b#1", Heartbeat(float(number)))
        await peers.until(lambda: "b#1" not in peers.broker.hub.members)
        await peers.until(peers.wire.heard.empty)
        peers.publish("a#1", 0, transfer=7)
        await peers.until(lambda: peers.broker.aggregator.version == 1)
        assert peers.broker.receiver.rates.not_heard > 700

    lived(story)
    assert caplog.text.count("sending b away: it says more than") == 1


def inflated(message, size=1 << 20):
    """Return a head of this message with one field more, so that it has `size` bytes."""
    *beginning, fields = msgpack.unpackb(encode_message(message))
    fields["more"] = "x" * (size - 100 - len(encode_message(message)))
    return msgpack.packb([*beginning, fields])


def test_heads_of_a_megabyte_of_every_kind_are_not_read_and_cost_nobody_else(monkeypatch):
    read, whole = [], receiver.read_fields
    monkeypatch.setattr(receiver, "read_fields", lambda head: read.append(len(head.fields)) or whole(head))
    monkeypatch.setattr(limits, "LOOP_SECONDS", 1e9)

    async def story(peers):
        await peers.join("a#1")
        for message in EXAMPLES:
            for peer in ("stranger#1", "b#1"):
                if peer == "b#1":
                    peers.wire.say(peer, Hello("b", "process" if type(message) in KEY_REQUESTS else "node"))
                peers.wire.heard.put_nowait((peer, Lane.CONTROL, [inflated(message)]))
        await peers.until(peers.wire.heard.empty)
        assert "a#1" in peers.broker.hub.members and not peers.told("a#1", Refused)
        peers.publish("a#1", 0, transfer=7)
        await peers.until(lambda: peers.broker.aggregator.version == 1)

    lived(story)
    assert max(read) <= LONG_HEAD_BYTES


def test_a_peer_whose_messages_take_the_loops_time_is_shown_out_and_nothing_more_of_it_is_read(monkeypatch, caplog):
    seconds = iter(range(10**9))
    monkeypatch.setattr(type(receiver.clock), "thread_time", lambda clock: 0.02 * next(seconds))

    async def story(peers):
        await peers.join("b#1")
        receive, heard = peers.broker.hub.receive, []
        peers.broker.hub.receive = lambda *said: heard.append(said) or receive(*said)
        for number in range(100):
            peers.wire.say("b#1", Heartbeat(float(number)))
        await peers.until(lambda: peers.wire.dismissed)
        await peers.until(peers.wire.heard.empty)
        assert {*peers.wire.dismissed} == {"b#1"} and len(heard) < 40
        assert [refused.reason for refused in peers.told("b#1", Refused)] == ["unknown"]
        assert "b#1" not in peers.broker.hub.members

    lived(story)
    assert caplog.text.count("sending b away: its messages take more than 2%") == 1


def test_with_the_keys_of_a_node_nobody_is_the_standby_or_the_shard_of_a_shard():
    async def story(peers):
        peers.broker.core.access.has_hub_keys = lambda peer: peer == "s#1"
        address = "tcp://10.0.0.9:1"
        peers.wire.say("x#1", Hello("x", "standby", address=address))
        peers.wire.say("y#1", Hello("y", "broker", shard=1, address=address))
        peers.wire.say("s#1", Hello("s", "standby", address=address))
        await peers.until(lambda: peers.told("s#1", Welcome))
        assert [refused.reason for who in ("x#1", "y#1") for refused in peers.told(who, Refused)] == ["keys", "keys"]
        assert list(peers.broker.hub.members) == ["s#1"]

    lived(story)


async def looked_to_while_asking(peers, times, *asked):
    """Have b#1, which follows, say this so many times while the codec thread is busy; return who is looked to then."""
    await peers.join("a#1", "b#1")
    await peers.until(lambda: peers.broker.downlink.follows("b#1"))
    looked, go_on = [], threading.Event()
    peers.broker.codec.do(go_on.wait)
    bring = peers.broker.snapshots._bring
    peers.broker.snapshots._bring = lambda peer: looked.append(peer) or bring(peer)
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
        await peers.until(lambda: peers.broker.downlink.follows("b#1"))
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
        peers.broker.core.access.turned_away = 5
        peers.broker.keeper.waits_for_room = True
        peers.wire.say("o#1", Hello("o", "observer"))
        await peers.until(lambda: peers.told("o#1", Roster))
        said = peers.told("o#1", Roster)[0].hub
        assert (said["refused"], said["turned_away"], said["waits_for_room"]) == (1, 5, True)
        assert "noise" not in said

    lived(story)


def test_the_roster_says_what_another_node_would_add_once_that_is_known():
    async def story(peers):
        await peers.join("a#1")
        peers.broker.aggregator.meter._scale.noise = 7.0
        peers.wire.say("o#1", Hello("o", "observer"))
        await peers.until(lambda: peers.told("o#1", Roster))
        said = peers.told("o#1", Roster)[0].hub
        assert (said["noise"], said["gain_next"], said["gain_last"]) == (7.0, *gains(1, 7.0))
        assert said["rho"] == 1 / 8

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
