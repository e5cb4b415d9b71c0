"""The book of one node's offers: which fragment is next, what is on its way, what has landed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixed import fixed_run
from tests.grids import examples
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Counts, Update
from zmqtrain.node.offers import Offers


def run_of(fragments=1, offers_in_flight=8):
    return fixed_run(fragments=fragments, every=1, delay=offers_in_flight)


def next_one(offers, run, live):
    """The fragment that is next in turn, None if none is."""
    fragments = offers.next_fragments(run, run.fragments, live)
    assert len(fragments) <= 1
    return fragments[0] if fragments else None


def took(offers, version, *landed):
    offers.took(Update(version, {}, {}, landed))


def offered(offers, fragment, fragments):
    offer = offers.draft(fragment, [], Counts(1, 1))
    offers.made(offer, fragments)
    return offer


@pytest.fixture
def offers():
    """Those of a node that has version 0."""
    made = Offers()
    took(made, 0)
    return made


def test_nothing_is_offered_before_the_runs_parameters_are_here_nor_while_nobody_is_there():
    offers = Offers()
    assert next_one(offers, run_of(), True) is None
    took(offers, 0)
    assert next_one(offers, run_of(), True) == 0
    assert next_one(offers, run_of(), False) is None


def test_nodes_that_are_up_to_date_offer_the_same_fragment_and_one_more_for_each_offer_on_its_way(offers):
    run = run_of(fragments=4)
    assert next_one(offers, run, True) == 0
    took(offers, 6)
    assert next_one(offers, run, True) == 2
    offered(offers, 2, 4)
    assert next_one(offers, run, True) == 3
    took(offers, 7, 0)
    assert next_one(offers, run, True) == 3


def test_who_is_late_with_a_fragment_goes_on_with_the_one_that_the_others_offer(offers):
    run = run_of(fragments=4)
    late = [offered(offers, next_one(offers, run, True), 4) for _ in range(3)]
    took(offers, 1)  # the others' fragment 0; this node's is still on its way
    assert next_one(offers, run, True) == 3
    took(offers, 2, late[1].sequence)
    assert next_one(offers, run, True) == 3
    offered(offers, 3, 4)
    assert next_one(offers, run, True) == 1


def test_so_many_are_on_their_way_and_no_more_until_one_lands_or_is_withdrawn(offers):
    run = run_of(offers_in_flight=2)
    offered(offers, 0, 1)
    offered(offers, 0, 1)
    assert next_one(offers, run, True) is None and offers.in_flight() == (0, 1)
    offers.withdrawn([0])
    assert next_one(offers, run, True) == 0 and offers.in_flight() == (1,)
    offered(offers, 0, 1)
    took(offers, 1, 1, 2)
    assert offers.in_flight() == ()


def test_what_is_withdrawn_twice_or_has_landed_changes_nothing(offers):
    offered(offers, 0, 1)
    took(offers, 1, 0)
    offers.withdrawn([0])
    offers.withdrawn([7])
    assert offers.in_flight() == ()


def test_an_offer_says_what_was_applied_since_the_last_one_that_was_taken(offers):
    assert offered(offers, 0, 1).applied == ()
    took(offers, 1, 0)
    took(offers, 2)
    assert offers.draft(0, [], Counts(1, 1)).applied == (0,)  # nobody took it
    second = offered(offers, 0, 1)
    assert (second.sequence, second.applied) == (1, (0,))
    assert offers.draft(0, [], Counts(1, 1)).applied == ()


def test_a_draft_holds_what_it_was_given_and_counts_only_once_it_is_made(offers):
    segments = [object()]
    draft = offers.draft(0, segments, Counts(24, 3, (0.5,)), dense=True)
    assert draft.segments is segments
    assert (draft.samples, draft.steps, draft.scores, draft.dense) == (24, 3, (0.5,), True)
    assert offers.in_flight() == () and offers.draft(0, [], Counts(1, 1)).sequence == 0


def test_a_fragment_that_waited_for_twice_as_many_offers_as_there_are_fragments_goes_first(offers):
    run = run_of(fragments=2)
    for version in range(0, 8, 2):  # two nodes in turn: this one only ever sees even versions
        took(offers, version)
        assert next_one(offers, run, True) == 0
        took(offers, version, offered(offers, 0, 2).sequence)
    took(offers, 8)
    assert next_one(offers, run, True) == 1
    offered(offers, 1, 2)
    offers.withdrawn([4])
    assert next_one(offers, run, True) == 0


@settings(max_examples=examples(30))
@given(st.integers(2, 5), st.lists(st.integers(1, 6), min_size=40, max_size=40))
def test_no_rhythm_of_versions_starves_a_fragment(fragments, leaps):
    offers, run, version, said = Offers(), run_of(fragments), 0, []
    for leap in leaps:
        took(offers, version)
        fragment = next_one(offers, run, True)
        took(offers, version, offered(offers, fragment, fragments).sequence)
        said.append(fragment)
        version += leap
    for start in range(len(said) - 3 * fragments):
        assert set(said[start : start + 3 * fragments + 1]) == set(range(fragments))


# ---------------------------------------------------------------------- where an exchange carries all fragments


def all_of(every, delay):
    return RunSettings(every=every, delay=delay)


def test_where_an_exchange_carries_all_fragments_they_are_offered_in_their_order_once_the_node_takes_part():
    offers = Offers()
    assert offers.next_fragments(all_of(1, 1), 4, True) == ()
    took(offers, 0)
    assert offers.next_fragments(all_of(1, 1), 4, False) == ()
    assert offers.next_fragments(all_of(1, 1), 4, True) == (0, 1, 2, 3)


@pytest.mark.parametrize(("every", "delay", "most"), [(1, 1, 2), (2, 2, 2), (8, 0, 2), (2, 3, 3), (1, 4, 5)])
def test_of_each_fragment_one_more_may_be_in_flight_than_the_delay_asks_for(offers, every, delay, most):
    run = all_of(every, delay)
    for _ in range(most):
        for fragment in offers.next_fragments(run, 3, True):
            offered(offers, fragment, 3)
    assert len(offers.in_flight()) == 3 * most and offers.next_fragments(run, 3, True) == ()
    took(offers, 1, 1)  # fragment 1 of the first exchange has landed, the others have not yet
    assert offers.next_fragments(run, 3, True) == (1,)
    offers.withdrawn([0])
    assert offers.next_fragments(run, 3, True) == (0, 1)


@settings(max_examples=examples(30))
@given(st.integers(1, 5), st.integers(1, 3), st.lists(st.sets(st.integers(0, 30)), max_size=30))
def test_whatever_lands_in_whatever_order_no_fragment_is_offered_more_often_than_may_be(fragments, delay, landings):
    offers, run, of = Offers(), all_of(1, delay), {}
    took(offers, 0)
    for version, landed in enumerate(landings, 1):
        while following := offers.next_fragments(run, fragments, True):
            assert list(following) == sorted(set(following))
            for fragment in following:
                of[offered(offers, fragment, fragments).sequence] = fragment
        in_flight = [of[sequence] for sequence in offers.in_flight()]
        assert all(in_flight.count(fragment) == run.offers_in_flight for fragment in range(fragments))
        took(offers, version, *landed & set(offers.in_flight()))


def test_offers_in_a_checkpoint_of_version_0_1_are_read_and_written_in_the_same_words():
    plain = {"version": 29, "sequence": 31, "applied": [29], "on_their_way": [[30, 1]], "since": [[0, 1], [1, 0]]}
    offers = Offers()
    offers.restore(plain)
    assert offers.to_plain() == plain and offers.in_flight() == (30,)
