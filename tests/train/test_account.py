"""What offers stand for is counted once, whatever becomes of them, and a drain ends when all has landed."""

from __future__ import annotations

import json

from zmqtrain.train.account import MOST_SCORES, Account
from zmqtrain.train.drain import Drain


def test_what_is_withdrawn_stands_in_the_next_offer_and_what_has_landed_in_none():
    account = Account(1)
    account.note(2, 20)
    account.scored(0.5)
    assert account.unsaid(0) == (20, 2, (0.5,))
    account.offered(7, 0)
    account.note(1, 10)
    account.offered(None, 0)  # refused: it stays unsaid
    assert account.unsaid(0) == (10, 1, (0.5,))  # no score since: as good as before
    account.take_back([])
    assert account.unsaid(0)[:2] == (30, 3)
    account.offered(8, 0)
    account.note(1, 10)
    account.landed([7, 8])
    account.take_back([])
    assert account.unsaid(0)[:2] == (10, 1)
    assert (account.ages, account.offers, account.applied) == ([1], 2, 1)


def test_an_offer_is_withdrawn_from_its_own_master_alone():
    account = Account(2)
    account.note(1, 4)
    account.offered(2, 0)
    account.offered(3, 1)
    account.take_back([2])
    assert account.unsaid(0)[:2] == (0, 0) and account.unsaid(1)[:2] == (4, 1)
    assert (account.master_of(2), account.master_of(3)) == (0, None)


def test_what_is_dropped_stands_for_nothing_even_if_its_offer_is_withdrawn_later():
    account = Account(1)
    account.note(1, 4)
    account.offered(0, 0)
    account.note(1, 4)
    account.forget_pending()
    account.take_back([])
    assert account.unsaid(0)[:2] == (0, 0) and account.samples == 8


def test_an_update_is_due_when_all_of_this_nodes_offers_in_it_are_old_enough():
    account = Account(1)
    account.note(1, 1)
    account.offered(0, 0)
    account.note(1, 1)
    account.offered(1, 0)
    account.note(1, 1)
    assert account.is_due([0, 99], 2) and not account.is_due([0, 1], 2) and account.is_due([], 2)
    assert account.is_old(0, 2) and not account.is_old(99, 0)


def test_the_books_come_back_as_they_were():
    account = Account(2)
    account.note(3, 30)
    account.scored(1.5)
    account.offered(4, 1)
    account.note(1, 10)
    account.landed([4])
    plain = json.loads(json.dumps(account.to_plain()))
    assert Account.from_plain(plain).to_plain() == account.to_plain()


def test_a_drain_offers_a_fragment_until_it_has_landed():
    drain = Drain([5, 6], now=0.0)
    assert drain.next_fragment(set()) == 5
    drain.offered(None, 1.0)  # refused
    assert drain.next_fragment(set()) == 5 and drain.gives_up(1.0, 1.0)
    drain.offered(3, 1.0)
    assert not drain.gives_up(1.5, 1.0)
    assert drain.next_fragment({2}) == 5  # withdrawn
    drain.offered(4, 2.0)
    assert drain.next_fragment({4}) == 6
    drain.offered(5, 2.0)
    drain.reached(3.0)
    assert not drain.gives_up(3.5, 1.0) and drain.left
    assert drain.next_fragment({4, 5}) is None and not drain.left


def test_who_makes_no_offer_for_days_keeps_a_bounded_number_of_scores_the_newest():
    account = Account(2)
    for step in range(3 * MOST_SCORES):
        account.note(1, 8)
        account.scored(step)
        assert len(account.unsaid(0).scores) <= MOST_SCORES
    tally = account.unsaid(1)
    assert (tally.samples, tally.steps) == (8 * 3 * MOST_SCORES, 3 * MOST_SCORES)
    assert tally.scores[-1] == 3 * MOST_SCORES - 1 and len(tally.scores) >= 256
