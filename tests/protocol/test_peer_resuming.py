"""A node's life that goes on from a checkpoint: what was pending there, and what it has offered since."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.protocol.peers import MODEL, POPULATION, SETTINGS, WIRE, snapshot, welcome
from zmqtrain.protocol.effects import Send
from zmqtrain.protocol.messages import Fetch
from zmqtrain.protocol.peer import Peer

STRICT = replace(SETTINGS, mode="strict", release="all")


def resumed(settings=SETTINGS):
    """A node whose checkpoint had offer 4 on its way, and 5 as the number of the next."""
    peer = Peer("a#1", "a", incarnation=7)
    peer.resume("run-1", 3, settings, MODEL, (4,), next_sequence=5)
    peer.start(0.0)
    peer.join(MODEL, 0.0)
    return peer


@pytest.mark.parametrize("since", [{"landed": ((4, 4), (5, 6))}, {"landed": ((4, 4),), "accepted": (6,)}])
def test_who_has_offered_since_its_checkpoint_drops_what_was_pending_there(since):
    peer = resumed()
    assert Send(Fetch(-1, WIRE)) in peer.receive(welcome(6, **since), 1.0)
    assert peer.overtaken
    peer.receive(snapshot(6, ((4, 4),)), 1.0)
    (deliver,) = peer.received(1000)
    assert deliver.reset and deliver.warm


@pytest.mark.parametrize(
    ("known", "settings"),
    [
        ({"landed": ((3, 3), (4, 4))}, SETTINGS),
        ({"landed": ((4, 4), (5, 6))}, STRICT),
        ({"landed": ((4, 4), (5, 6))}, POPULATION),
    ],
)
def test_who_has_offered_nothing_since_keeps_what_was_pending(known, settings):
    peer = resumed(settings)
    peer.receive(welcome(6, settings=settings, **known), 1.0)
    assert not peer.overtaken


def test_what_this_life_has_offered_itself_drops_nothing_when_it_is_welcomed_again():
    peer = resumed()
    peer.receive(welcome(6, landed=((4, 4),)), 1.0)
    peer.distrust("noise", 2.0)
    peer.receive(welcome(7, landed=((4, 4), (5, 7))), 3.0)
    assert not peer.overtaken
