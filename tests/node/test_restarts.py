"""When a node that has diverged begins again by itself, and when it gives up."""

from __future__ import annotations

from tests.fixed import fixed_run
from zmqtrain.node.offers import HEALTHY_OFFERS, MOST_RESTARTS, Restarts

SETTINGS = fixed_run()


def test_a_node_begins_again_until_it_has_done_so_too_often():
    restarts = Restarts()
    for number in range(MOST_RESTARTS - 1):
        assert restarts.begin(SETTINGS)
        restarts.done(10 * number)
    assert not restarts.begin(SETTINGS)


def test_who_has_been_sound_in_between_may_begin_again_for_ever():
    restarts = Restarts()
    for number in range(10):
        assert restarts.begin(SETTINGS)
        restarts.done(number)
        restarts.landed(HEALTHY_OFFERS)


def test_offers_that_were_on_their_way_are_the_same_divergence():
    restarts = Restarts()
    assert not restarts.is_known(3)
    restarts.begin(SETTINGS)
    assert restarts.is_known(4)
    restarts.done(6)
    assert restarts.is_known(5) and not restarts.is_known(6)


def test_in_strict_mode_a_person_starts_it_again():
    assert not Restarts().begin(fixed_run(mode="strict", release="all"))
