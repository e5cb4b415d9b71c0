"""The table of a node's machine: where each message moves it."""

from __future__ import annotations

import pytest

from tests.protocol.peers import IN_STATE, ROSTER, aggregate, snapshot, welcome
from tests.protocol.said import ONE_EACH
from zmqtrain.protocol.messages import MESSAGES, Aggregate, Fetch, Goodbye, Refused, Roster, Schedule, Snapshot, Welcome
from zmqtrain.protocol.peer import PEER_TRANSITIONS, PeerState

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
