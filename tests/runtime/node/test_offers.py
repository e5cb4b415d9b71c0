"""The book of one node's offers: which fragment is next, what is on its way, what has landed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.runtime.node.offers import Offers
from zmqtrain.settings import RunSettings
from zmqtrain.types import Tally, Update


def run_of(fragments=1, offers_in_flight=8):
    return RunSettings(fragments=fragments, every=1, delay=offers_in_flight)


def took(offers, version, *landed):
    offers.took(Update(version, {}, {}, landed))


def offered(offers, fragment, fragments):
    offer = offers.draft(fragment, [], Tally(1, 1))
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
    assert offers.next_fragment(run_of(), True) is None
    took(offers, 0)
    assert offers.next_fragment(run_of(), True) == 0
    assert offers.next_fragment(run_of(), False) is None


def test_nodes_that_are_up_to_date_offer_the_same_fragment_and_one_more_for_each_offer_on_its_way(offers):
    run = run_of(fragments=4)
    assert offers.next_fragment(run, True) == 0
    took(offers, 6)
    assert offers.next_fragment(run, True) == 2
    offered(offers, 2, 4)
    assert offers.next_fragment(run, True) == 3
    took(offers, 7, 0)
    assert offers.next_fragment(run, True) == 3


def test_who_is_late_with_a_fragment_goes_on_with_the_one_that_the_others_offer(offers):
    run = run_of(fragments=4)
    late = [offered(offers, offers.next_fragment(run, True), 4) for _ in range(3)]
    took(offers, 1)  # the others' fragment 0; this node's is still on its way
    assert offers.next_fragment(run, True) == 3
    took(offers, 2, late[1].sequence)
    assert offers.next_fragment(run, True) == 3
    offered(offers, 3, 4)
    assert offers.next_fragment(run, True) == 1


def test_so_many_are_on_their_way_and_no_more_until_one_lands_or_is_withdrawn(offers):
    run = run_of(offers_in_flight=2)
    offered(offers, 0, 1)
    offered(offers, 0, 1)
    assert offers.next_fragment(run, True) is None and offers.in_flight() == (0, 1)
    offers.withdrawn(0)
    assert offers.next_fragment(run, True) == 0 and offers.in_flight() == (1,)
    offered(offers, 0, 1)
    took(offers, 1, 1, 2)
    assert offers.in_flight() == ()


def test_what_is_withdrawn_twice_or_has_landed_changes_nothing(offers):
    offered(offers, 0, 1)
    took(offers, 1, 0)
    offers.withdrawn(0)
    offers.withdrawn(7)
    assert offers.in_flight() == ()


def test_an_offer_says_what_was_applied_since_the_last_one_that_was_taken(offers):
    assert offered(offers, 0, 1).applied == ()
    took(offers, 1, 0)
    took(offers, 2)
    assert offers.draft(0, [], Tally(1, 1)).applied == (0,)  # nobody took it
    second = offered(offers, 0, 1)
    assert (second.sequence, second.applied) == (1, (0,))
    assert offers.draft(0, [], Tally(1, 1)).applied == ()


def test_a_draft_holds_what_it_was_given_and_counts_only_once_it_is_made(offers):
    segments = [object()]
    draft = offers.draft(0, segments, Tally(24, 3, (0.5,)), dense=True)
    assert draft.segments is segments
    assert (draft.samples, draft.steps, draft.scores, draft.dense) == (24, 3, (0.5,), True)
    assert offers.in_flight() == () and offers.draft(0, [], Tally(1, 1)).sequence == 0


def test_a_fragment_that_waited_for_twice_as_many_offers_as_there_are_fragments_goes_first(offers):
    run = run_of(fragments=2)
    for version in range(0, 8, 2):  # two nodes in turn: this one only ever sees even versions
        took(offers, version)
        assert offers.next_fragment(run, True) == 0
        took(offers, version, offered(offers, 0, 2).sequence)
    took(offers, 8)
    assert offers.next_fragment(run, True) == 1
    offered(offers, 1, 2)
    offers.withdrawn(4)
    assert offers.next_fragment(run, True) == 0


@settings(max_examples=30)
@given(st.integers(2, 5), st.lists(st.integers(1, 6), min_size=40, max_size=40))
def test_no_rhythm_of_versions_starves_a_fragment(fragments, leaps):
    offers, run, version, said = Offers(), run_of(fragments), 0, []
    for leap in leaps:
        took(offers, version)
        fragment = offers.next_fragment(run, True)
        took(offers, version, offered(offers, fragment, fragments).sequence)
        said.append(fragment)
        version += leap
    for start in range(len(said) - 3 * fragments):
        assert set(said[start : start + 3 * fragments + 1]) == set(range(fragments))
