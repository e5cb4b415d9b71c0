"""A node that lost its hub comes back by itself: what goes on, what is withdrawn, and which hub it does not believe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.protocol.peers import (
    IN_STATE,
    POPULATION,
    SETTINGS,
    WIRE,
    aggregate,
    attend,
    founding,
    live,
    publish,
    snapshot,
    welcome,
)
from zmqtrain.protocol.effects import Deliver, Disconnect, Expect, Send, Withdraw
from zmqtrain.protocol.messages import Fetch, Goodbye, Heartbeat, Hello, Refused
from zmqtrain.protocol.peer import HUB, PeerState


def test_a_hub_that_does_not_know_this_node_is_told_hello_again():
    peer = live(5, in_flight=(0,))
    (disconnect,) = peer.receive(Refused("unknown", "say Hello first"), 2.0)
    assert (disconnect.reason, peer.state) == ("unknown", PeerState.CONNECTING)
    assert peer.receive(Refused("unknown", "say Hello first"), 2.0) == []
    assert peer.tick(2.0) == [Send(Hello("a", "node", "run-1", 5))]


def test_on_its_return_a_node_withdraws_what_the_hub_does_not_have():
    peer = live(5, in_flight=(0, 1, 2, 3))
    peer.receive(Goodbye(), 0.0)
    effects = peer.receive(welcome(6, landed=((0, 6),), accepted=(2,)), 1.0)
    lost = [Withdraw(s, "lost", "the connection was lost in flight") for s in (1, 3)]
    assert effects == [*lost, Send(Fetch(5, WIRE))]
    assert peer.in_flight == {0, 2}
    message = snapshot(6, ((0, 6),))
    peer.receive(message, 1.0)
    assert peer.received(1000) == [Deliver(message, (0,), False)]
    landing = aggregate(7, (("a#1", 2),))
    peer.receive(landing, 1.0)
    assert peer.received(7) == [Deliver(landing, (2,), False)] and peer.in_flight == set()


def test_a_node_that_missed_nothing_goes_on_from_what_it_holds():
    peer = live(5)
    peer.receive(Goodbye(), 0.0)
    peer.receive(welcome(5), 1.0)
    assert peer.receive(snapshot(5, sizes=()), 1.0) == []
    assert (peer.state, peer.version) == (PeerState.LIVE, 5)
    assert peer.receive(aggregate(6), 1.0) == [Expect(HUB, aggregate(6))]


def test_a_transfer_of_the_old_connection_does_not_count():
    peer = live(5)
    peer.receive(aggregate(6), 0.0)
    peer.receive(Goodbye(), 0.0)
    assert peer.received(6) == [] and peer.version == 5


@pytest.mark.parametrize("state", [PeerState.WELCOMED, PeerState.SYNCING, PeerState.FOUNDING, PeerState.APART])
def test_who_has_nothing_of_its_run_yet_follows_its_hub_into_a_new_one_of_the_same_settings(state):
    peer = IN_STATE[state]()
    settings = POPULATION if state is PeerState.APART else SETTINGS
    attend(peer, 99.0)
    assert peer.state is PeerState.CONNECTING
    peer.receive(welcome(-1, run="run-2", model=(), settings=settings), 99.0)
    assert peer.run == "run-2" and peer.state is not PeerState.CONNECTING
    attend(peer, 199.0, 99.0)
    other = replace(settings, every=5)
    (disconnect,) = peer.receive(welcome(-1, run="run-3", model=(), settings=other), 199.0)
    assert disconnect.reason == "run" and peer.run == "run-2"


def test_a_hub_of_another_run_is_not_believed():
    peer = live(5, in_flight=(0,))
    peer.receive(Goodbye(), 0.0)
    (disconnect,) = peer.receive(welcome(9, run="run-2"), 10.0)
    assert disconnect == Disconnect(
        HUB,
        "run",
        "the broker now runs run-2, this node belongs to run-1. Restart the broker with the checkpoint of the old run, "
        "or stop this node and start it again to join the new run (with --new-run where it has a checkpoint)",
    )
    assert (peer.state, peer.run, peer.version, peer.in_flight) == (PeerState.CONNECTING, "run-1", 5, {0})
    assert peer.tick(14.9) == [] and peer.tick(15.0) == [Send(Hello("a", "node", "run-1", 5))]
    assert peer.receive(welcome(5), 15.1)[-1] == Send(Fetch(5, WIRE))


def test_a_hub_that_knows_less_than_this_node_has_seen_is_not_believed():
    peer = live(5)
    peer.receive(Goodbye(), 0.0)
    (disconnect,) = peer.receive(welcome(4), 10.0)
    assert disconnect == Disconnect(
        HUB,
        "version",
        "the broker is at version 4 of run-1, this node has seen 5: it was restarted from an older state. Restart it "
        "with the newest checkpoint folder, or stop this node and start it again",
    )
    assert peer.state is PeerState.CONNECTING and peer.tick(14.9) == []


def test_a_founder_that_was_cut_off_joins_what_it_may_have_founded():
    peer = founding()
    peer.receive(Goodbye(), 0.0)
    assert peer.receive(welcome(0), 1.0) == [Send(Fetch(-1, WIRE))]
    assert peer.receive(snapshot(0), 1.0) == [Expect(HUB, snapshot(0))]


def test_a_publish_that_went_before_a_heartbeat_and_was_not_heard_is_withdrawn():
    peer = live()
    peer.publish(publish(3))
    (beat,) = [effect.message for effect in peer.tick(0.2) if isinstance(effect, Send)]
    peer.publish(publish(4))
    assert peer.receive(Heartbeat(beat.sent, 2), 0.3) == [Withdraw(3, "lost", "it never reached the broker")]
    assert peer.in_flight == {4}
    assert peer.receive(Heartbeat(beat.sent, 2), 0.4) == []
