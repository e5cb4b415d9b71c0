"""The table of a node's machine: where each message moves it."""

from __future__ import annotations

import pytest

from tests.protocol.peers import IN_STATE, ROSTER, aggregate, snapshot, welcome
from tests.protocol.said import ONE_EACH
from zmqtrain.protocol.effects import Send
from zmqtrain.protocol.messages import (
    MESSAGES,
    Aggregate,
    Fetch,
    Goodbye,
    Hello,
    Promote,
    Refused,
    Roster,
    Schedule,
    Snapshot,
    Stop,
    Welcome,
)
from zmqtrain.protocol.peer import PEER_TRANSITIONS, Peer, PeerState

SAMPLES = ONE_EACH | {
    Welcome: welcome(),
    Refused: Refused("no", "go away"),
    Roster: ROSTER,
    Schedule: Schedule(8, 4, 1),
    Fetch: Fetch(),
    Snapshot: snapshot(0),
    Aggregate: aggregate(1),
}


@pytest.mark.parametrize("state", PeerState)
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_moves_the_state_as_the_table_says_and_else_it_is_ignored(state, kind):
    peer = IN_STATE[state]()
    assert peer.state is state
    effects = peer.receive(SAMPLES[kind], 1.0)
    expected = PEER_TRANSITIONS.get((state, kind), state)
    if state is not PeerState.CLOSED:
        if kind is Refused:
            expected = PeerState.CLOSED
        elif kind is Goodbye:
            expected = PeerState.CONNECTING
    assert peer.state is expected
    if (state, kind) not in PEER_TRANSITIONS and kind not in (Refused, Goodbye):
        assert effects == []


@pytest.mark.parametrize("order", [None, Promote(), Stop()])
def test_an_operator_says_the_order_with_each_hello(order):
    peer = Peer("a#1", "a", role=order)
    said = [type(effect.message) for effect in peer.start(0.0)]
    assert said == ([Hello] if order is None else [Hello, type(order)])
    peer.receive(Refused("standby", "not the hub"), 0.1)
    again = [effect for now in range(1, 20) for effect in peer.tick(float(now)) if isinstance(effect, Send)]
    assert len(again) > len(said) and [type(effect.message) for effect in again[: len(said)]] == said
