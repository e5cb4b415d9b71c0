"""Who is taken for lost, and what follows for the others."""

import pytest

from tests.protocol.hubs import MODEL, OTHER, attend, contribute, hub_of, in_state, join, live_hub, of, sent
from zmqtrain.protocol.effects import Broadcast, Disconnect, Reduce
from zmqtrain.protocol.groups import SILENCE_SECONDS
from zmqtrain.protocol.hub import LAST_WORDS_SECONDS, OVERDUE_SECONDS
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import Goodbye, Heartbeat, Hello, Roster

CODES = {
    MemberState.OBSERVER: "observer",
    MemberState.SHARD: "broker",
    MemberState.PROCESS: "process",
    MemberState.STANDBY: "standby",
}


@pytest.mark.parametrize("state", MemberState)
def test_whoever_goes_is_no_member_any_more_and_the_code_says_what_it_was(state):
    hub = in_state(state)
    effects = hub.lose(hub.members["x"], "its connection is gone", 1.0)
    assert effects[0] == Disconnect("x", CODES.get(state, "lost"), "its connection is gone")
    assert "x" not in hub.members and hub.news
    told = [effect for effect in of(Broadcast, effects) if isinstance(effect.message, Roster)]
    assert bool(told) is (state in (MemberState.SHARD, MemberState.STANDBY)), "nodes must know where these are"


def test_a_round_that_only_this_one_held_up_is_released():
    hub = live_hub("a", "b", release="all")
    assert of(Reduce, contribute(hub, "a", 0)) == []
    assert [reduce.version for reduce in of(Reduce, hub.lose(hub.members["b"], "", 1.0))] == [1]


def test_who_is_overdue_is_asked_once_and_not_again_until_it_would_be_overdue_again():
    hub = live_hub("a")
    late = hub.settings.heartbeat_seconds + OVERDUE_SECONDS + 0.01
    assert hub.look_over(0.0, late - 0.02) == []
    assert [peer for peer, _ in sent(hub.look_over(0.0, late), Roster)] == ["a"]
    assert hub.look_over(0.0, late + 0.1) == []
    hub.receive("a", Heartbeat(late), late + 0.2)
    assert hub.look_over(0.0, late + 0.3) == []


def test_a_process_is_given_the_time_for_which_nobody_listened():
    hub = hub_of()
    for peer in ("x", "y"):
        hub.receive(peer, Hello(peer, "process"), 0.0)
    hub.members["y"].last_seen = -1.0
    silent = [effect.peer for effect in of(Disconnect, hub.look_over(5.0, SILENCE_SECONDS + 4.5))]
    assert silent == ["y"], "x was silent for less than that, besides the 5 s"


@pytest.mark.parametrize("state", MemberState)
def test_who_cannot_be_reached_is_lost_a_moment_later_and_may_have_said_goodbye(state):
    silent, polite, again = in_state(state), in_state(state), in_state(state)
    for hub in (silent, polite, again):
        hub.unreachable("x", 0.1)
        hub.unreachable("x", 0.1 + LAST_WORDS_SECONDS / 2)
        assert of(Disconnect, hub.look_over(0.0, 0.09 + LAST_WORDS_SECONDS)) == []
    polite.receive("x", Goodbye("done"), 0.15)
    again.receive("x", Hello("x", "process"), 0.15)
    lost = of(Disconnect, silent.look_over(0.0, 0.11 + LAST_WORDS_SECONDS))
    assert lost[0] == Disconnect("x", CODES.get(state, "lost"), "its connection is gone")
    assert of(Disconnect, again.look_over(0.0, 1.0)) == [] and "x" in again.members
    assert "x" not in polite.members
    for hub in (silent, polite):
        hub.unreachable("x", 1.0)


def test_who_cannot_be_reached_is_given_the_time_for_which_nobody_listened():
    hub = live_hub("a")
    hub.unreachable("a", 0.0)
    assert of(Disconnect, hub.look_over(5.0, 5.0)) == []
    assert of(Disconnect, hub.look_over(0.0, 5.01 + LAST_WORDS_SECONDS)) != []


def test_of_many_that_fall_silent_at_once_one_that_the_loss_of_another_sends_away_is_not_lost_again():
    hub = hub_of(initial="mean", start_nodes=2)
    for peer, model in (("a", MODEL), ("b", MODEL), ("c", MODEL), ("d", OTHER)):
        join(hub, peer, model)
    effects = attend(hub, 10.0)
    assert [effect.peer for effect in of(Disconnect, effects)] == ["a", "b", "d", "c"]
    assert not hub.members and not of(Disconnect, hub.tick(2000.0))
    for peer in ("e", "f"):
        join(hub, peer, now=2000.0)
    assert [hub.members[peer].state for peer in ("e", "f")] == [MemberState.FOUNDING] * 2
