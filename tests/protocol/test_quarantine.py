"""Whose deltas are not taken for a while, in virtual time."""

from __future__ import annotations

import json

import pytest

from zmqtrain.protocol import limits
from zmqtrain.protocol.limits import (
    GATE_VOTE_SECONDS,
    LONGEST_QUARANTINE_SECONDS,
    OF_LAST,
    OFFENCES,
    QUARANTINE_SECONDS,
    Quarantines,
)


def refused(quarantines, now, times=3, peer="pc-1", reason="norm"):
    return [quarantines.refused(peer, reason, now) for _ in range(times)]


def each(*peers):
    """Live nodes that are a voter each."""
    return {peer: peer for peer in peers}


@pytest.mark.parametrize("reason", sorted(OFFENCES))
def test_the_third_refusal_quarantines(reason):
    assert refused(Quarantines(), 0.0, reason=reason) == [0.0, 0.0, QUARANTINE_SECONDS]


@pytest.mark.parametrize("reason", ["duplicate", "stale", "version", "waiting", "quarantine"])
def test_what_may_happen_to_any_node_is_no_offence(reason):
    assert refused(Quarantines(), 0.0, times=20, reason=reason) == [0.0] * 20


def test_more_than_half_of_the_nodes_are_not_out_for_their_norm_unless_the_gate_is_wrong():
    quarantines, live = Quarantines(), each("a", "b", "c", "d")
    refused(quarantines, 0.0, peer="a")
    assert quarantines.wrongly(live) == ()
    refused(quarantines, 0.0, peer="b", reason="enormous")
    assert quarantines.wrongly(live) == ()
    refused(quarantines, 0.0, peer="c")
    assert quarantines.wrongly(live) == (), "of two halves either may be right"
    refused(quarantines, 0.0, peer="d")
    assert quarantines.wrongly(live) == ("a", "c", "d")
    quarantines.accepted("a")
    assert quarantines.wrongly(live) == ()
    quarantines.acquit("c")
    assert quarantines.rest("c", 0.0) == 0.0 and refused(quarantines, 0.0, times=2, peer="c") == [0.0, 0.0]


def test_of_two_nodes_either_may_be_right_and_who_is_alone_is():
    quarantines = Quarantines()
    refused(quarantines, 0.0, peer="a")
    assert quarantines.wrongly(each("a", "b")) == ()
    assert quarantines.wrongly(each("a")) == ("a",)


def test_the_names_of_one_key_are_one_voter():
    quarantines = Quarantines()
    live = {"x1": "x", "x2": "x", "x3": "x", "a": "a", "b": "b"}
    for name in ("x1", "x2", "x3"):
        refused(quarantines, 0.0, peer=name)
    assert quarantines.wrongly(live) == ()
    refused(quarantines, 0.0, peer="a")
    assert quarantines.wrongly(live) == ("x1", "x2", "x3", "a")


def test_who_was_accepted_of_late_votes_when_it_has_left_until_that_is_long_ago():
    quarantines = Quarantines()
    quarantines.accepted("a", now=100.0)
    quarantines.accepted("b", now=100.0)
    refused(quarantines, 101.0, peer="bad")
    assert quarantines.wrongly(each("bad"), 101.0) == (), "the last that is left is not the only one that has trained"
    assert quarantines.wrongly(each("bad"), 101.0 + GATE_VOTE_SECONDS) == ("bad",)


def test_refusals_that_are_rare_quarantine_nobody():
    quarantines = Quarantines()
    for number in range(50):
        assert quarantines.refused("pc-1", "corrupt", float(number)) == 0.0
        for _ in range(OF_LAST // 2):
            quarantines.accepted("pc-1")
        # two of nine: the first of them is forgotten by then


def test_the_offences_of_one_are_not_anothers():
    quarantines = Quarantines()
    refused(quarantines, 0.0, times=2)
    assert quarantines.refused("pc-2", "norm", 0.0) == 0.0
    assert quarantines.rest("pc-2", 0.0) == 0.0


def test_it_ends_and_what_was_on_its_way_meanwhile_does_not_count():
    quarantines = Quarantines()
    refused(quarantines, 100.0)
    assert refused(quarantines, 104.0, times=10) == [0.0] * 10
    assert quarantines.rest("pc-1", 104.0) == QUARANTINE_SECONDS - 4
    assert quarantines.rest("pc-1", 100.0 + QUARANTINE_SECONDS) == 0.0


def test_on_probation_one_refusal_is_enough_and_the_time_doubles_up_to_an_end():
    quarantines, now, seconds = Quarantines(), 0.0, QUARANTINE_SECONDS
    assert refused(quarantines, now)[-1] == seconds
    for _ in range(10):
        now, seconds = now + seconds, min(2 * seconds, LONGEST_QUARANTINE_SECONDS)
        quarantines.accepted("pc-1")
        assert refused(quarantines, now, times=1) == [seconds]


def test_who_stands_its_probation_begins_anew():
    quarantines = Quarantines()
    refused(quarantines, 0.0)
    for _ in range(OF_LAST):
        quarantines.accepted("pc-1")
    assert refused(quarantines, QUARANTINE_SECONDS, times=3) == [0.0, 0.0, QUARANTINE_SECONDS]


def test_a_hub_that_takes_over_has_the_quarantines_and_probations_that_there_were():
    quarantines, again = Quarantines(), Quarantines()
    refused(quarantines, 0.0, peer="on probation")
    refused(quarantines, 20.0, peer="out")
    quarantines.accepted("on probation")
    refused(quarantines, 20.0, peer="once", times=1)
    assert quarantines.rest("out", 24.0) == 6.0
    again.restore(json.loads(json.dumps(quarantines.state())), 1000.0)
    assert again.state() == quarantines.state() and again.rest("out", 1002.0) == 4.0
    assert again.rest("on probation", 1000.0) == 0.0
    assert refused(again, 1000.0, times=1, peer="on probation") == [2 * QUARANTINE_SECONDS]
    assert refused(again, 1000.0, times=2, peer="once") == [0.0, 0.0]
    assert again.wrongly(each("out", "another", "a third")) == ()


def test_a_hub_that_goes_back_keeps_its_quarantines_as_long_as_they_were():
    quarantines = Quarantines()
    refused(quarantines, 500.0)
    quarantines.restore({}, 0.0)  # as of the hub's beginning
    assert quarantines.state()["pc-1"][0] == QUARANTINE_SECONDS


def test_nodes_that_come_and_go_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(limits, "NODES_KEPT", 4)
    quarantines = Quarantines()
    for number in range(20):
        quarantines.refused(f"pc-{number}", "norm", 0.0)
    assert len(quarantines._records) == 4
