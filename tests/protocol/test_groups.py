"""Groups at the hub: who meets whom, who is refused and why, who is lost, what may be on its way."""

from __future__ import annotations

import pytest

from tests.protocol.gatherings import ASKED, REDUCE_CHUNK, join, process
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.protocol.effects import Combine, Discard, Forward, SendTo
from zmqtrain.protocol.groups import (
    MAX_DESCRIPTION,
    MAX_GROUP_NAME,
    MAX_GROUPS,
    MAX_PROCESSES,
    RELAY_BYTES,
    RELAY_MESSAGES,
    Groups,
    Window,
    list_names,
)
from zmqtrain.protocol.messages import Forming, Group, GroupLost, Refused, Relay, Relayed, replace_fields


def met(*peers, **changes):
    groups = Groups()
    for peer in peers:
        effects = join(groups, peer, size=len(peers), **changes)
    return groups, effects


def told(effects, kind):
    sent = [effect for effect in effects if isinstance(effect, SendTo)]
    return {effect.peer: effect.message for effect in sent if isinstance(effect.message, kind)}


def refusal(effects):
    ((_, refused),) = told(effects, Refused).items()
    return refused.text


# ---------------------------------------------------------------------- meeting


def test_who_comes_last_completes_the_group_and_ranks_are_by_arrival():
    groups = Groups()
    assert join(groups, "a") == [SendTo("a", Forming("default", ("a",), 2))]
    assert join(groups, "b") == [SendTo("b", Forming("default", ("a", "b"), 1))]
    groups_told = told(join(groups, "c"), Group)
    assert [groups_told[peer].rank for peer in "abc"] == [0, 1, 2]
    assert len({one.members for one in groups_told.values()}) == 1
    assert groups_told["a"].members[1] == ("b", "tcp://b:5000", "", "0a")


def test_who_asks_for_a_rank_has_it_and_the_others_fill_the_rest():
    groups = Groups()
    join(groups, "a"), join(groups, "b", rank=0)
    groups_told = told(join(groups, "c"), Group)
    assert {peer: one.rank for peer, one in groups_told.items()} == {"a": 1, "b": 0, "c": 2}


def test_a_group_of_one_is_complete_at_once():
    _, effects = met("a")
    assert told(effects, Group)["a"].rank == 0


def test_who_waits_is_told_now_and_then_who_has_come_and_gone():
    groups = Groups()
    join(groups, "a")
    assert groups.tick(0.0) == []
    join(groups, "b")
    both = Forming("default", ("a", "b"), 1)
    assert groups.tick(0.1) == [SendTo("a", both), SendTo("b", both)]
    groups.gone("a", "crashed")
    assert groups.tick(0.2) == []
    assert groups.tick(0.7) == [SendTo("b", Forming("default", ("b",), 2))]
    groups.gone("b", "crashed")
    assert groups.tick(9.9) == []


def test_a_group_of_which_all_have_gone_before_it_met_can_be_another():
    groups = Groups()
    join(groups, "a")
    groups.gone("a", "crashed")
    assert told(join(groups, "b", size=1, description="other"), Group)


def test_groups_of_one_name_meet_one_after_the_other_if_they_are_repeated():
    groups = Groups()
    for first, second in ("ab", "cd", "ef"):
        assert join(groups, first, size=2, repeated=True) == [SendTo(first, Forming("default", (first,), 1))]
        assert groups.forming == {"group default": 1}
        met = told(join(groups, second, size=2, repeated=True), Group)
        assert sorted(met) == [first, second] and not groups.forming
    assert "is complete" in refusal(join(groups, "g", size=2))  # who does not say so waits for no further one


def test_groups_of_other_names_do_not_meet():
    groups = Groups()
    join(groups, "a", size=2), join(groups, "b", size=2, group="other")
    assert told(join(groups, "c", size=2), Group).keys() == {"a", "c"}


# ---------------------------------------------------------------------- refusals


def test_another_size_is_refused_naming_both():
    groups = Groups()
    join(groups, "pc-1#1")
    text = refusal(join(groups, "pc-2#1", size=4))
    assert "pc-1 forms the group 'default' for 3 processes, pc-2 wants one of 4" in text and "same size" in text


def test_another_description_is_refused_naming_both():
    groups = Groups()
    join(groups, "pc-1#1", description="ring")
    text = refusal(join(groups, "pc-2#1", description="tree"))
    assert "pc-1 is for 'ring', pc-2 for 'tree'" in text and "same program" in text


def test_a_rank_that_is_taken_is_refused_naming_who_has_it():
    groups = Groups()
    join(groups, "pc-1#1", rank=2)
    assert "taken, by pc-1: give pc-2 another one of 0 to 2, or none" in refusal(join(groups, "pc-2#1", rank=2))


@pytest.mark.parametrize("changes", [{"size": 4}, {"description": "tree"}, {"rank": 2}])
def test_all_who_wait_are_told_what_differs_once_those_who_ask_for_something_else_are_known_to_live(changes):
    groups, first, second, other = Groups(), process("pc-1#1"), process("pc-2#1"), process("pc-3#1")
    groups.join(first, replace_fields(ASKED, rank=2), 0.0)
    groups.join(second, ASKED, 0.0)
    asked = replace_fields(ASKED, **changes)
    for now in (1.0, 1.3):  # nothing was heard of pc-1 since: it may be dead
        assert told(groups.join(other, asked, now), Refused)["pc-3#1"].reason == "occupied"
    first.last_seen = 1.4
    refused = told(groups.join(other, asked, 1.6), Refused)
    assert refused.keys() == {"pc-1#1", "pc-2#1", "pc-3#1"}
    assert all("pc-1" in one.text and "pc-3" in one.text and one.reason == "group" for one in refused.values())
    assert told(groups.join(second, replace_fields(ASKED, size=1), 2.0), Group)  # the name is free


def test_who_has_asked_for_something_else_may_come_in_after_the_others_are_gone():
    groups, first, other = Groups(), process("pc-1#1"), process("pc-2#1")
    groups.join(first, ASKED, 0.0)
    groups.join(other, replace_fields(ASKED, size=1), 1.0)
    groups.gone("pc-1#1", "silent")
    assert told(groups.join(other, replace_fields(ASKED, size=1), 3.0), Group)


def test_nobody_else_comes_into_a_complete_group():
    groups, _ = met("pc-1#1", "pc-2#1")
    text = refusal(join(groups, "pc-3#1", size=2))
    assert "complete: pc-1, pc-2 are in it" in text and "another name" in text


def test_a_complete_group_is_formed_anew_by_those_who_are_in_it():
    groups, effects = met("pc-1#1", "pc-2#1")
    first = told(effects, Group)["pc-1#1"].generation
    join(groups, "pc-1#2", size=2)
    again = told(join(groups, "pc-2#2", size=2), Group)
    assert again.keys() == {"pc-1#2", "pc-2#2"} and again["pc-1#2"].generation > first


@pytest.mark.parametrize("left", [True, False])
def test_a_group_is_formed_anew_by_anybody_once_somebody_of_it_is_gone(left):
    groups, _ = met("pc-1#1", "pc-2#1")
    groups.gone("pc-1#1", "gone", left)
    join(groups, "pc-3#1", size=2)
    assert told(join(groups, "pc-4#1", size=2), Group).keys() == {"pc-3#1", "pc-4#1"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group": ""}, "1 to 64 printable"),
        ({"group": "a" * (MAX_GROUP_NAME + 1)}, "1 to 64 printable"),
        ({"group": "a\n"}, "1 to 64 printable"),
        ({"size": 0}, "1 to 256 processes, not 0"),
        ({"size": MAX_PROCESSES + 1}, "1 to 256 processes, not 257"),
        ({"rank": 3}, "ranks are 0 to 2"),
        ({"rank": -2}, "ranks are 0 to 2"),
        ({"description": "a" * (MAX_DESCRIPTION + 1)}, "at most 1024"),
        ({"address": "udp://x:1"}, "tcp://HOST:PORT"),
        ({"address": "tcp://x:0"}, "tcp://HOST:PORT"),
        ({"address": f"tcp://{'x' * 300}:1"}, "tcp://HOST:PORT"),
        ({"key": "short"}, "40 characters"),
        ({"token": ""}, "letters and digits"),
        ({"token": "a@b"}, "letters and digits"),
        ({"token": "a" * 65}, "letters and digits"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(changes, words):
    groups = Groups()
    assert words in refusal(groups.join(process("a"), replace_fields(ASKED, **changes), 0.0))
    assert groups.tick(9.0) == [] and groups.gone("a", "crashed") == []


def test_a_hub_has_so_many_groups_and_no_more():
    groups = Groups()
    for number in range(MAX_GROUPS):
        join(groups, f"a{number}", group=f"g{number}", size=1 + number % 2)
    assert f"{MAX_GROUPS} groups already" in refusal(join(groups, "b", group="one more"))
    groups.gone("a0", "done")
    assert told(join(groups, "b", group="one more"), Forming)


@pytest.mark.parametrize("complete", [True, False])
def test_nobody_asks_twice(complete):
    groups = Groups()
    join(groups, "a", size=1 if complete else 2)
    with pytest.raises(RemoteProtocolError, match="second JoinGroup"):
        join(groups, "a", group="other")


def test_many_names_are_not_all_said():
    assert list_names("abc") == "a, b, c"
    assert list_names(str(number) for number in range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


# ---------------------------------------------------------------------- parting


def test_all_are_told_of_the_same_rank_and_who_has_left_knows():
    groups, _ = met(*"abc")
    assert told(groups.gone("b", "silent for 2.0 s"), GroupLost) == dict.fromkeys(
        "abc", GroupLost(1, "silent for 2.0 s")
    )
    assert groups.gone("b", "again") == []
    assert told(groups.gone("a", "it has left", left=True), GroupLost) == {"c": GroupLost(0, "it has left", True)}
    assert groups.gone("c", "last", left=True) == []


def test_an_accusation_is_told_to_all_the_accused_too_and_the_first_counts():
    groups, _ = met(*"abc")
    effects = groups.accused(process("a"), GroupLost(1, "silent"), 0.0)
    assert told(effects, GroupLost) == dict.fromkeys("abc", GroupLost(1, "silent (noticed by a)"))
    assert groups.accused(process("c"), GroupLost(1, "silent"), 0.0) == []
    assert groups.accused(process("b"), GroupLost(0, "silent"), 0.0) == [], "who is lost is not listened to"


def test_an_accusation_of_nobody_costs_who_says_it():
    groups, _ = met(*"ab")
    with pytest.raises(RemoteProtocolError, match="GroupLost of rank 2"):
        groups.accused(process("a"), GroupLost(2, "silent"), 0.0)


# ---------------------------------------------------------------------- through the hub


def test_a_message_is_passed_on_with_the_senders_rank_and_its_arrival_is_told():
    groups, _ = met(*"ab")
    assert groups.relay(process("a"), Relay(1, 100), 0.0) == [Forward("b", Relay(0, 100))]
    assert groups.relayed(process("b"), Relayed(0, 1), 0.0) == [SendTo("a", Relayed(1, 1))]


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_message_to_a_rank_that_is_not_another_costs_its_sender(rank):
    groups, _ = met(*"ab")
    with pytest.raises(RemoteProtocolError, match="Relay"):
        groups.relay(process("a"), Relay(rank, 1), 0.0)


def test_what_is_on_its_way_of_one_process_is_bounded_over_all_it_sends_to():
    groups, _ = met(*"abc")
    groups.relay(process("a"), Relay(1, RELAY_BYTES - 10), 0.0)
    groups.relay(process("a"), Relay(2, 10), 0.0)
    groups.relay(process("b"), Relay(2, 4 * RELAY_BYTES), 0.0)  # alone, and of another
    with pytest.raises(RemoteProtocolError, match="window"):
        groups.relay(process("a"), Relay(1, 1), 0.0)
    groups.relayed(process("c"), Relayed(0, 1), 0.0)
    for _ in range(RELAY_MESSAGES - 1):
        groups.relay(process("a"), Relay(1, 0), 0.0)
    with pytest.raises(RemoteProtocolError, match="window"):
        groups.relay(process("a"), Relay(1, 0), 0.0)


@pytest.mark.parametrize("messages", [0, 2, -1])
def test_nobody_says_that_more_has_come_than_was_sent(messages):
    groups, _ = met(*"ab")
    groups.relay(process("a"), Relay(1, 100), 0.0)
    with pytest.raises(RemoteProtocolError, match="not in flight"):
        groups.relayed(process("b"), Relayed(0, messages), 0.0)


def test_what_was_on_its_way_to_who_is_lost_takes_no_room_any_more():
    groups, _ = met(*"abc")
    groups.relay(process("a"), Relay(1, RELAY_BYTES), 0.0)
    groups.gone("b", "killed")
    assert groups.relay(process("a"), Relay(1, 100), 0.0) == []
    assert groups.relay(process("a"), Relay(2, RELAY_BYTES), 0.0) == [Forward("c", Relay(0, RELAY_BYTES))]
    assert groups.relay(process("b"), Relay(2, 1), 0.0) == [], "it does not know yet that it is lost"


def test_chunks_are_reduced_as_long_as_nobody_of_the_group_is_lost():
    groups, _ = met(*"ab")
    assert groups.reduce(process("b"), REDUCE_CHUNK, 0.0) == [Combine(1, 1, ("a", "b"), REDUCE_CHUNK)]
    assert Discard(1) in groups.gone("a", "killed")
    assert groups.reduce(process("b"), REDUCE_CHUNK, 0.0) == groups.reduce(process("a"), REDUCE_CHUNK, 0.0) == []


def test_a_window_has_room_for_one_message_of_any_size_and_for_so_many_small_ones():
    window = Window(3, 10)
    assert window.has_room(99) and window.count() == 0
    for key, size in ((1, 4), (2, 4)):
        assert window.has_room(size)
        window.add(key, size)
    assert window.has_room(2) and not window.has_room(3)
    window.add(1, 1)
    assert not window.has_room(0), "three are in flight"
    window.remove(1)  # the oldest of its key, which had 4 bytes
    assert window.count(1) == 1 and window.has_room(5) and not window.has_room(6)
    window.remove(1, 9)
    window.forget(2)
    window.forget(7)
    assert window.count() == window.count(2) == 0 and window.has_room(99)
