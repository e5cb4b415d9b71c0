"""What a node does when the hub takes none of its deltas for a while."""

from __future__ import annotations

import pytest

from tests.protocol.peers import MODEL, WIRE, live, snapshot, welcome
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol.effects import Deliver, Send
from zmqtrain.protocol.limits import OVER
from zmqtrain.protocol.messages import Fetch, Preempt, Quarantine
from zmqtrain.protocol.peer import Peer, PeerState


def test_who_is_quarantined_drops_what_is_its_own_and_takes_the_shared_parameters():
    peer = live(version=3)
    assert peer.receive(Quarantine("norm", "too large", 10.0), 5.0) == [Send(Fetch(-1, WIRE))]
    assert peer.quarantined_until == 15.0
    peer.receive(snapshot(4, transfer=7), 5.5)
    assert peer.received(7) == [Deliver(snapshot(4, transfer=7), (), reset=True, warm=True)]


@pytest.mark.parametrize("reason", ["enormous", "non-finite", "corrupt"])
def test_whose_deltas_are_a_faults_begins_its_optimizer_anew(reason):
    peer = live(version=3)
    peer.receive(Quarantine(reason, "too large", 10.0), 5.0)
    peer.receive(Quarantine("norm", "too large", 10.0), 5.0)
    peer.receive(snapshot(4, transfer=7), 5.5)
    assert peer.received(7) == [Deliver(snapshot(4, transfer=7), (), reset=True)]


def test_who_is_let_out_goes_on_as_it_is():
    peer = live(version=3)
    assert peer.receive(Quarantine("over", "the gate was wrong", 0.0), 5.0) == []
    assert peer.state is PeerState.LIVE and peer.quarantined_until == 5.0


def test_a_quarantine_that_meets_a_node_on_its_way_to_a_snapshot_resets_it_all_the_same():
    peer = live(version=3)
    peer.resync()
    peer.receive(Quarantine("norm", "too large", 10.0), 5.0)
    peer.receive(snapshot(4, transfer=7), 5.5)
    assert peer.received(7) == [Deliver(snapshot(4, transfer=7), (), reset=True, warm=True)]


def test_a_node_of_several_shards_goes_on_from_a_snapshot_of_the_one_that_quarantines_it():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(settings=RunSettings(shards=2, initial="founder", every=3, delay=2)), 0.0)
    peer.join(MODEL, 0.0)
    peer.receive(snapshot(3), 0.0)
    peer.received(1000)
    assert peer.receive(Quarantine("norm", "too large", 10.0), 5.0) == [Send(Fetch(-1, WIRE))]
    peer.receive(snapshot(4, transfer=7), 5.5)
    assert peer.received(7) == [Deliver(snapshot(4, transfer=7), (), reset=True, warm=True)]
    assert peer.state is PeerState.LIVE and peer.quarantined_until == 15.0


@pytest.mark.parametrize(("reason", "warm"), [(OVER, True), ("the run goes back", False)])
@pytest.mark.parametrize("syncing", [False, True])
def test_who_is_preempted_drops_what_is_pending_and_keeps_its_optimizer_after_a_quarantine(reason, warm, syncing):
    peer = live(version=3)
    if syncing:
        peer.resync()
    assert peer.receive(Preempt(reason), 5.0) == [Send(Fetch(-1, WIRE))]
    peer.receive(snapshot(4, transfer=7), 5.5)
    assert peer.received(7) == [Deliver(snapshot(4, transfer=7), (), reset=True, warm=warm)]
