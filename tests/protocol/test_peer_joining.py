"""How a node says hello, joins a run, founds one, or is told why it cannot."""

from __future__ import annotations

import zlib

import pytest

from tests.protocol.peers import MODEL, SETTINGS, WIRE, aggregate, founding, live, snapshot, syncing, welcome, welcomed
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Expect, Send
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Refused, Welcome, replace_fields
from zmqtrain.protocol.peer import (
    ANSWER_SECONDS,
    FIRST_BACKOFF_SECONDS,
    HUB,
    LONGEST_BACKOFF_SECONDS,
    Backoff,
    Peer,
    PeerState,
)

OTHER = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (4,), "bfloat16"))


def test_a_node_says_hello_until_it_is_heard():
    peer = Peer("a#1", "a")
    assert peer.start(0.0) == [Send(Hello("a"))]
    assert peer.tick(0.49) == []
    assert peer.tick(0.75) == [Connect(), Send(Hello("a"))] and peer.tick(1.24) == [] and peer.tick(1.75) != []


def test_the_attempts_of_a_node_are_spread_and_become_rarer_and_are_never_further_apart_than_two_seconds():
    waits = {name: [Backoff(zlib.crc32(name.encode())).next() for _ in range(1)] for name in "abcdefgh"}
    assert len({wait for (wait,) in waits.values()}) == len(waits)
    backoff = Backoff(1)
    first = [backoff.next() for _ in range(8)]
    assert all(ANSWER_SECONDS <= wait <= ANSWER_SECONDS + LONGEST_BACKOFF_SECONDS for wait in first)
    assert first[0] <= ANSWER_SECONDS + FIRST_BACKOFF_SECONDS < max(first)
    backoff.reset()
    assert backoff.next() <= ANSWER_SECONDS + FIRST_BACKOFF_SECONDS


def test_who_loses_its_connection_says_hello_at_once_over_a_new_one():
    peer = live(5, in_flight=(0,))
    (disconnect,) = peer.gone(2.0)
    assert (disconnect.reason, peer.state) == ("gone", PeerState.CONNECTING) and peer.gone(2.0) == []
    assert peer.tick(2.0) == [Send(Hello("a", "node", "run-1", 5))]
    assert peer.tick(2.75) == [Connect(), Send(Hello("a", "node", "run-1", 5))]


def test_an_observer_says_so():
    assert Peer("a#1", "a", role="observer").start(0.0) == [Send(Hello("a", "observer"))]


def test_the_runs_settings_are_adopted():
    peer = welcomed()
    assert (peer.settings, peer.run, peer.run_model) == (SETTINGS, "run-1", MODEL)
    peer.receive(Goodbye(), 1.0)
    peer.receive(welcome(settings=RunSettings(every=3, delay=2, units=50)), 2.0)
    assert peer.settings.units == 50


def test_who_waits_for_the_settings_then_sees_all_that_the_broker_said_with_them():
    """Another thread looks at them: a training thread that connects."""

    class Watched(Peer):
        seen = ()

        def __setattr__(self, name, value):
            if name == "settings" and value is not None:
                self.seen = (self.shard, self.shards, self.run, self.run_model, self.run_version, self.timetable)
            super().__setattr__(name, value)

    peer = Watched("a#1", "a")
    peer.receive(replace_fields(welcome(7), shard=1, shards=("tcp://a:1", "tcp://b:1")), 0.0)
    assert peer.seen[:-1] == (1, ("tcp://a:1", "tcp://b:1"), "run-1", MODEL, 7)
    assert peer.seen[-1] is not None


def test_settings_of_another_version_of_the_program_are_refused():
    peer = Peer("a#1", "a")
    with pytest.raises(ConfigError, match="another version"):
        peer.receive(Welcome("run-1", 0, {"colour": "blue"}), 0.0)


def test_a_node_may_describe_its_model_before_or_after_it_is_welcome():
    before = Peer("a#1", "a")
    assert before.join(MODEL, 0.0) == []
    assert before.receive(welcome(), 0.0) == [Send(Fetch(-1, WIRE))]
    assert welcomed().join(MODEL, 0.0) == [Send(Fetch(-1, WIRE))]


def test_a_newcomer_waits_for_the_whole_snapshot():
    peer = syncing()
    message = snapshot(7)
    assert peer.receive(message, 0.0) == [Expect(HUB, message)]
    assert (peer.state, peer.version) == (PeerState.LIVE, -1)
    assert peer.received(1000) == [Deliver(message, (), False)]
    assert peer.version == 7 and peer.received(1000) == []


def test_aggregates_that_follow_the_snapshot_fit_to_it():
    peer = syncing()
    assert peer.receive(aggregate(7), 0.0) == []  # on its way before the hub knew this node: it is in the snapshot
    peer.receive(snapshot(7), 0.0)
    assert peer.receive(aggregate(8), 0.0) == [Expect(HUB, aggregate(8))]
    peer.received(1000)
    assert peer.received(8) == [Deliver(aggregate(8), (), False)] and peer.version == 8


def test_the_founder_sends_its_parameters_and_is_confirmed():
    peer = founding()
    assert not peer.following.confirmed
    assert peer.receive(snapshot(0, sizes=()), 0.0) == []
    assert (peer.state, peer.version, peer.following.confirmed) == (PeerState.LIVE, 0, True)


def test_a_node_with_another_model_leaves_and_names_the_leaf():
    peer = welcomed()
    goodbye, disconnect = peer.join(OTHER, 0.0)
    assert goodbye == Send(Goodbye("another model"))
    assert (disconnect.reason, peer.state) == ("model", PeerState.CLOSED)
    assert disconnect.text == (
        "the leaf b is float32[4] in the run and bfloat16[4] on this node. "
        "Start this node with the run's model, or another broker for this one"
    )


def test_who_is_refused_is_told_why_and_tries_no_more():
    peer = syncing()
    assert peer.receive(Refused("model", "the leaf b differs"), 0.0) == [Disconnect(HUB, "model", "the leaf b differs")]
    assert peer.state is PeerState.CLOSED
    assert peer.tick(100.0) == [] and peer.receive(welcome(), 100.0) == []
