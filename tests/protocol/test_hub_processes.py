"""Processes at the hub that are no nodes of its run: what they ask, and how they and their groups end."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import SAMPLES, hub_of, live_hub, of, sent
from zmqtrain.protocol.effects import Consult, Disconnect
from zmqtrain.protocol.groups import SILENCE_SECONDS
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import KEY_REQUESTS, Goodbye, Group, GroupLost, Hello, JoinGroup, Welcome


def test_a_process_is_no_node_of_the_run():
    hub = live_hub("a")
    effects = hub.receive("p", Hello("p", "process"), 0.0)
    assert sent(effects, Welcome) and hub.members["p"].state is MemberState.PROCESS
    assert hub.nodes == 1 and hub.live == {"a"} and [one["peer"] for one in hub.roster(0.0).members] == ["a#1"]
    assert hub.receive("p", Goodbye(), 0.0) == [Disconnect("p", "process", "said goodbye")]


@pytest.mark.parametrize("kind", KEY_REQUESTS)
def test_what_a_process_asks_the_key_server_goes_there(kind):
    hub = hub_of()
    hub.receive("p", Hello("p", "process"), 0.0)
    assert hub.receive("p", SAMPLES[kind], 0.0) == [Consult("p", SAMPLES[kind])]


def test_a_silent_process_is_lost_soon_and_its_group_is_told():
    hub = hub_of()
    for peer in "pq":
        hub.receive(peer, Hello(peer, "process"), 0.0)
        effects = hub.receive(peer, SAMPLES[JoinGroup], 0.0)
    assert [message.rank for _, message in sent(effects, Group)] == [0, 1]
    for tenths in range(1, round(10 * SILENCE_SECONDS)):
        hub.saw("q", tenths / 10)
        assert sent(hub.tick(tenths / 10), GroupLost) == []
    hub.saw("q", SILENCE_SECONDS + 0.05)
    told = dict(sent(hub.tick(SILENCE_SECONDS + 0.05), GroupLost))
    assert told.keys() == {"p", "q"} and told["p"] == told["q"]
    assert (told["q"].rank, told["q"].left) == (0, False) and "silent" in told["q"].why


def test_a_hub_that_was_stopped_itself_takes_no_process_for_lost():
    hub = hub_of()
    hub.receive("p", Hello("p", "process"), 0.0)
    hub.tick(0.1)
    assert of(Disconnect, hub.tick(9.0)) == []


@pytest.mark.parametrize("end", ["goodbye", "gone", "again"])
def test_who_leaves_the_hub_leaves_its_group(end):
    hub = hub_of()
    for peer in "pq":
        hub.receive(peer, Hello(peer, "process"), 0.0)
        hub.receive(peer, SAMPLES[JoinGroup], 0.0)
    if end == "goodbye":
        effects = hub.receive("p", Goodbye(), 0.0)
    elif end == "gone":
        effects = hub.gone("p", "its connection is gone", 0.0)
    else:
        effects = hub.receive("p", Hello("p", "process"), 0.0)
    lost = dict(sent(effects, GroupLost))["q"]
    assert (lost.rank, lost.left) == (0, end == "goodbye")
