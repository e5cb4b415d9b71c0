"""Nodes that join and never publish: a round neither waits for them nor divides by them."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import contribute, join, live_hub, of
from zmqtrain.protocol.effects import Reduce
from zmqtrain.protocol.hub import GRACE_SECONDS
from zmqtrain.protocol.messages import Hello, WorkRequest

HONEST = ("a", "b", "c")
LONG = max(5.0, GRACE_SECONDS)  # the patience of a quorum


def beside(silent, release="quorum", **settings):
    """A hub of three honest nodes, which has released once, and of so many that never publish."""
    hub = live_hub(*HONEST, *(f"silent {n}" for n in range(silent)), release=release, **settings)
    for peer in HONEST:
        contribute(hub, peer, 0, 1.0)
    hub.tick(1.0 + LONG), hub.tick(1.0 + 2 * LONG)
    assert hub.version >= 1
    return hub


@pytest.mark.parametrize("silent", [0, 1, 4, 60])
def test_silent_nodes_cost_a_round_nothing_once_the_first_is_over(silent):
    hub = beside(silent)
    for sequence in range(1, 5):
        released = [one for peer in HONEST for one in of(Reduce, contribute(hub, peer, sequence, 20.0 + sequence))]
        assert [one.live for one in released] == [3], "at once, when all that publish have"
    assert hub.awaited == {*HONEST} and len(hub.live) == 3 + silent


@pytest.mark.parametrize("silent", [0, 4, 60])
def test_a_round_of_some_is_due_when_half_of_those_that_publish_have_come(silent):
    hub = beside(silent)
    contribute(hub, "a", 1, 20.0), contribute(hub, "b", 1, 20.0)
    assert hub.version == 1 and hub.rounds.due_at(hub.awaited) <= 20.0 + 0.5


def test_nodes_that_came_before_the_first_release_are_awaited_for_a_while_after_it():
    hub = live_hub("a", "b", "silent", release="quorum")
    assert not of(Reduce, contribute(hub, "a", 0, 1.0))
    assert [one.live for one in of(Reduce, [*contribute(hub, "b", 0, 1.0), *hub.tick(1.6)])] == [3]
    contribute(hub, "a", 1, 2.0)
    assert hub.awaited == {"a", "b", "silent"}
    effects = [*contribute(hub, "b", 1, 1.6 + GRACE_SECONDS)]
    assert [one.live for one in of(Reduce, effects)] == [2] and hub.awaited == {"a", "b"}


def test_in_the_beginning_each_first_delta_weighs_the_same_whoever_is_first():
    hub = live_hub(*HONEST, release="immediately")
    assert [one.live for peer in HONEST for one in of(Reduce, contribute(hub, peer, 0, 1.0))] == [3, 3, 3]


def test_a_newcomer_counts_from_its_first_delta_on():
    hub = beside(0)
    join(hub, "new", now=20.0)
    for peer in HONEST[:2]:
        contribute(hub, peer, 1, 20.0)
    effects = [*contribute(hub, "new", 0, 20.0), *contribute(hub, "c", 1, 20.0)]
    assert [one.live for one in of(Reduce, effects)] == [4]
    assert hub.awaited == {*HONEST, "new"}
    for peer in HONEST:
        assert not of(Reduce, contribute(hub, peer, 2, 30.0)), "it is awaited now"


def test_a_node_that_comes_again_on_a_new_connection_stays_counted():
    hub = beside(0)
    hub.receive("a", Hello("a"), 20.0)
    join(hub, "a", now=20.0)
    assert hub.awaited == {*HONEST}
    hub.gone("a", "lost", 21.0)
    join(hub, "a", now=22.0)
    assert hub.awaited == {"b", "c"}


@pytest.mark.parametrize("release", ["all", "bounded:staleness=0"])
def test_where_a_round_takes_one_delta_of_each_a_node_is_awaited_before_it_has_published(release):
    hub = live_hub(*HONEST, release=release)
    for peer in HONEST:
        contribute(hub, peer, 0, 1.0)
    assert hub.version == 1
    join(hub, "new", now=2.0)
    for peer in HONEST:
        contribute(hub, peer, 1, 3.0)
    assert hub.version == 1 and "new" in hub.awaited
    assert [one.live for one in of(Reduce, contribute(hub, "new", 0, 4.0))] == [4]


@pytest.mark.parametrize("release", ["immediately", "count:contributions=3", "time:seconds=0.2"])
def test_under_every_other_rule_silent_nodes_are_not_one_of_n(release):
    hub = beside(4, release)
    released = []
    for sequence in range(1, 4):
        for peer in HONEST:
            released += of(Reduce, contribute(hub, peer, sequence, 20.0 + sequence))
        released += of(Reduce, hub.tick(20.5 + sequence))
    assert released and {one.live for one in released} == {3}


def test_silent_nodes_are_no_part_of_how_many_trained_when_the_data_ended():
    hub = beside(4, units=2)
    hub.receive("a", WorkRequest((), 2, False), 20.0)
    hub.receive("a", WorkRequest((0, 1), 1, True), 21.0)
    assert hub.units.ledger.finished and hub.units.nodes_at_the_end == 3
