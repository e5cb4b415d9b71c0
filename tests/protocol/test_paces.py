"""How nodes keep pace, in virtual time."""

from zmqtrain.protocol.rounds import INTERVALS_KEPT, LATENESS_KEPT, LATENESS_OF_A_ROUND, Paces

LIVE = frozenset({"a", "b", "c"})


def paces_of(*arrivals, live=LIVE):
    paces = Paces()
    paces.look(live, frozenset())
    for peer, now in arrivals:
        paces.came(peer, now)
    return paces


def lateness_of(rounds, quorum=2):
    """Return what is observed of rounds, each a dict of when the nodes came."""
    paces = paces_of()
    for first in rounds:
        paces.look(LIVE, first.keys())
        paces.observe(first, quorum)
    return list(paces.lateness)


def test_a_newcomers_clock_begins_where_the_slowest_live_node_stands():
    paces = paces_of(("a", 0.0), ("a", 1.0), ("b", 1.0), live=frozenset({"a", "b"}))
    for peer in ("a", "a", "b"):
        paces.landed[peer] += 1
    paces.look(frozenset({"a", "b", "new"}), frozenset())
    assert paces.clocks == {"a": 2, "b": 1, "new": 1} and paces.landed == {"a": 2, "b": 1, "new": 1}


def test_who_sends_before_it_is_live_begins_where_the_others_have_landed():
    paces = paces_of(("a", 0.0), ("new", 0.5), live=frozenset({"a"}))
    assert paces.clocks == {"a": 1, "new": 1} and paces.landed == {"a": 0, "new": 0}


def test_who_has_left_counts_as_long_as_something_of_it_waits_and_is_then_forgotten():
    paces = paces_of(("a", 0.0), ("b", 0.0), ("c", 0.0))
    paces.look(frozenset({"a"}), frozenset({"a", "b"}))
    assert paces.clocks.keys() == paces.landed.keys() == {"a", "b"}
    paces.came("b", 5.0), paces.look(frozenset({"a"}), frozenset())
    paces.came("b", 6.0), paces.observe({"b": 6.0}, 1)
    assert paces.intervals.seconds is None, "nothing of what it sent before it left is known"


def test_the_interval_is_the_median_over_nodes_of_the_median_over_their_newest():
    paces = paces_of(*[("a", float(now)) for now in range(3)], ("b", 0.0), ("b", 7.0), ("c", 0.0))
    paces.observe({}, 2)
    assert paces.intervals.seconds == (1.0 + 7.0) / 2, "c has no interval yet"
    paces = paces_of(*[("a", 100.0 * number) for number in range(20)])
    for number in range(1, INTERVALS_KEPT + 1):
        paces.came("a", 1900.0 + number)
    paces.observe({}, 2)
    assert paces.intervals.seconds == 1.0, "what is long past no longer counts"


def test_late_is_who_comes_after_the_quorum_of_its_round_even_in_the_next():
    assert lateness_of([{"a": 1.0, "b": 2.0, "c": 2.5}]) == [0.5]
    assert lateness_of([{"a": 1.0, "b": 2.0}, {"c": 2.25, "a": 4.0, "b": 5.0}]) == [0.25, 1.0]
    assert lateness_of([{"a": 1.0, "b": 2.0}, {"a": 4.0}, {"c": 4.5, "b": 5.0}]) == [2.5], "through a round without one"


def test_who_missed_a_round_and_comes_after_the_next_quorum_is_late_for_that_one():
    assert lateness_of([{"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 5.0, "c": 5.5}]) == [0.5]


def test_one_round_of_many_nodes_gives_few_observations_and_the_newest_are_kept():
    paces = Paces()
    paces.observe({f"pc-{number}": float(number) for number in range(100)}, 1)
    assert len(paces.lateness) <= LATENESS_OF_A_ROUND
    for number in range(100):
        paces.observe({"a": 0.0, "b": 1.0 + number}, 1)
    assert list(paces.lateness) == [1.0 + number for number in range(100 - LATENESS_KEPT, 100)]
