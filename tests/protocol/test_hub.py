"""The table of the hub's machine: which message is welcome in which state."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import SAMPLES, hub_of, in_state, sent
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.protocol.effects import Hear
from zmqtrain.protocol.members import ALLOWED, MemberState
from zmqtrain.protocol.messages import MESSAGES, Goodbye, Hello, Holding, Refused

ONLY_OF_HUBS = {
    *("Welcome", "Refused", "Roster", "Schedule", "Aggregate", "Preempt", "Quarantine", "WorkUnit", "Probed"),
    *(
        "Forming",
        "Group",
        "Leave",
        "ReducedChunk",
        "Enrolled",
        "Placed",
        "Values",
        "Done",
        "Awaited",
        "Replica",
        "Books",
    ),
    *("Chunk", "Credit"),
}
"""What only a hub says, and what goes by the machine."""


@pytest.mark.parametrize("state", MemberState)
@pytest.mark.parametrize("kind", MESSAGES)
def test_the_table_says_which_message_is_welcome_in_which_state(state, kind):
    hub = in_state(state)
    if state in ALLOWED.get(kind, ()):
        hub.receive("x", SAMPLES[kind], 1.0)
    else:
        with pytest.raises(RemoteProtocolError) as caught:
            hub.receive("x", SAMPLES[kind], 1.0)
        assert (caught.value.peer, caught.value.state, caught.value.message) == ("x", state.value, kind.__name__)
        assert "x" in hub.members


def test_the_table_knows_every_message_that_a_node_may_say():
    assert {kind.__name__ for kind in MESSAGES} - {kind.__name__ for kind in ALLOWED} == ONLY_OF_HUBS
    assert set(ALLOWED) <= set(MESSAGES)


@pytest.mark.parametrize("kind", [kind for kind in ALLOWED if kind not in (Hello, Goodbye)])
def test_whoever_is_not_known_is_told_to_say_hello(kind):
    ((peer, refused),) = sent(hub_of().receive("x", SAMPLES[kind], 0.0), Refused)
    assert (peer, refused.reason, refused.sequence) == ("x", "unknown", -1)
    assert "Hello" in refused.text


def test_a_goodbye_of_somebody_unknown_is_no_news():
    assert hub_of().receive("x", Goodbye(), 0.0) == []


def test_the_nodes_may_hear_of_the_version_that_a_standby_holds():
    assert in_state(MemberState.STANDBY).receive("x", Holding(3), 1.0) == [Hear(3)]
