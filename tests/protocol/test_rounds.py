"""When a round is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import ConfigError
from zmqtrain.protocol.rounds import AfterAll, AfterQuorum, Immediately, Rounds, release_rule_from_spec

LIVE = frozenset({"a", "b", "c", "d"})


def filled(rule, *arrivals):
    rounds = Rounds(rule)
    for peer, now in arrivals:
        rounds.add(peer, f"{peer}{now}", now)
    return rounds


def test_after_all_waits_for_the_last_live_node():
    rounds = filled(AfterAll(), ("a", 1.0), ("b", 2.0), ("c", 3.0))
    assert rounds.take(LIVE, 100.0) == []
    rounds.add("d", "d4", 4.0)
    assert [peer for peer, _ in rounds.take(LIVE, 4.0)] == ["a", "b", "c", "d"]
    assert rounds.pending == ()


def test_after_all_does_not_wait_for_a_node_that_is_gone():
    assert len(filled(AfterAll(), ("a", 1.0), ("b", 2.0)).take(frozenset({"a", "b"}), 2.0)) == 2


def test_after_all_takes_one_contribution_of_each_node_and_keeps_the_next():
    rounds = filled(AfterAll(), ("a", 1.0), ("a", 2.0), ("b", 3.0))
    assert rounds.take(frozenset({"a", "b"}), 3.0) == [("a", "a1.0"), ("b", "b3.0")]
    assert rounds.pending == (("a", "a2.0"),)


def test_immediately_waits_for_nobody():
    assert filled(Immediately(), ("a", 1.0)).take(LIVE, 1.0) == [("a", "a1.0")]


def test_a_quorum_waits_its_grace_for_the_others():
    rounds = filled(AfterQuorum(2, grace_seconds=0.5), ("a", 1.0), ("b", 2.0))
    assert rounds.due_at(LIVE) == 2.5
    assert rounds.take(LIVE, 2.4) == []
    assert len(rounds.take(LIVE, 2.5)) == 2


def test_a_quorum_is_due_at_once_when_all_have_contributed():
    rounds = filled(AfterQuorum(2), ("a", 1.0), ("b", 1.1), ("c", 1.2), ("d", 1.3))
    assert rounds.due_at(LIVE) == 1.3


def test_a_quorum_of_zero_is_half_of_the_live_nodes():
    assert filled(AfterQuorum(0, 0.5), ("a", 1.0)).due_at(LIVE) == 6.0  # not there yet: its patience
    assert filled(AfterQuorum(0, 0.5), ("a", 1.0), ("b", 1.0)).due_at(LIVE) == 1.5
    assert filled(AfterQuorum(0, 0.5), ("a", 1.0)).due_at(frozenset({"a"})) == 1.0


def test_a_quorum_that_cannot_be_reached_is_due_when_its_patience_ends():
    rounds = filled(AfterQuorum(3, grace_seconds=0.5, patience_seconds=5.0), ("a", 1.0))
    assert rounds.due_at(LIVE) == 6.0


def test_the_same_node_twice_is_no_quorum():
    assert filled(AfterQuorum(2, 0.5), ("a", 1.0), ("a", 1.1)).due_at(LIVE) == 6.0


@given(st.permutations(["a", "b", "c", "d"]))
def test_the_order_of_equal_arrivals_does_not_matter(order):
    for rule in (AfterAll(), AfterQuorum(2, 0.5)):
        rounds = filled(rule, *((peer, 1.0) for peer in order))
        assert {peer for peer, _ in rounds.take(LIVE, 1.0)} == LIVE


def test_a_rule_is_named_by_a_string():
    assert release_rule_from_spec("all") == AfterAll()
    assert release_rule_from_spec("immediately") == Immediately()
    assert release_rule_from_spec("quorum:count=3,grace=0.25") == AfterQuorum(3, 0.25)
    with pytest.raises(ConfigError, match="quorum"):
        release_rule_from_spec("most")
    with pytest.raises(ConfigError, match="at least 0"):
        release_rule_from_spec("quorum:count=-1")
