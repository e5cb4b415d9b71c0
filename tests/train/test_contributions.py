"""What offers stand for is counted once, whatever becomes of them, and a drain ends when all has landed."""

from __future__ import annotations

import json

from tests.train.scripted_exchange import ScriptedExchange
from zmqtrain.train.contributions import MOST_SCORES, ContributionTracker, Drain, SyncSchedule
from zmqtrain.train.sync import pack_loop


def test_what_is_withdrawn_stands_in_the_next_offer_and_what_has_landed_in_none():
    tracker = ContributionTracker(1)
    tracker.made_steps(2, 20)
    tracker.scored(0.5)
    assert tracker.unsent(0) == (20, 2, (0.5,))
    tracker.offered(7, 0)
    tracker.made_steps(1, 10)
    tracker.offered(None, 0)  # refused: it stays unsaid
    assert tracker.unsent(0) == (10, 1, (0.5,))  # no score since: as good as before
    tracker.take_back([])
    assert tracker.unsent(0)[:2] == (30, 3)
    tracker.offered(8, 0)
    tracker.made_steps(1, 10)
    tracker.landed([7, 8])
    tracker.take_back([])
    assert tracker.unsent(0)[:2] == (10, 1)
    assert (tracker.ages, tracker.offers, tracker.applied) == ([1], 2, 1)


def test_an_offer_is_withdrawn_from_its_own_shard_alone():
    tracker = ContributionTracker(2)
    tracker.made_steps(1, 4)
    tracker.offered(2, 0)
    tracker.offered(3, 1)
    tracker.take_back([2])
    assert tracker.unsent(0)[:2] == (0, 0) and tracker.unsent(1)[:2] == (4, 1)
    assert (tracker.shard_of(2), tracker.shard_of(3)) == (0, None)


def test_what_is_dropped_stands_for_nothing_even_if_its_offer_is_withdrawn_later():
    tracker = ContributionTracker(1)
    tracker.made_steps(1, 4)
    tracker.offered(0, 0)
    tracker.made_steps(1, 4)
    tracker.forget_pending()
    tracker.take_back([])
    assert tracker.unsent(0)[:2] == (0, 0) and tracker.samples == 8


def test_an_update_is_due_when_all_of_this_nodes_offers_in_it_are_old_enough():
    tracker = ContributionTracker(1)
    tracker.made_steps(1, 1)
    tracker.offered(0, 0)
    tracker.made_steps(1, 1)
    tracker.offered(1, 0)
    tracker.made_steps(1, 1)
    assert tracker.is_due([0, 99], 2) and not tracker.is_due([0, 1], 2) and tracker.is_due([], 2)
    assert tracker.is_old(0, 2) and not tracker.is_old(99, 0)


def test_the_books_come_back_as_they_were():
    tracker = ContributionTracker(2)
    tracker.made_steps(3, 30)
    tracker.scored(1.5)
    tracker.offered(4, 1)
    tracker.made_steps(1, 10)
    tracker.landed([4])
    plain = json.loads(json.dumps(tracker.to_plain()))
    assert ContributionTracker.from_plain(plain).to_plain() == tracker.to_plain()


def test_a_drain_offers_a_fragment_until_it_has_landed():
    drain = Drain([5, 6], now=0.0)
    assert drain.next_fragments(set()) == [5]
    drain.offered(5, None, 1.0)  # refused
    assert drain.next_fragments(set()) == [5] and drain.gives_up(1.0, 1.0)
    drain.offered(5, 3, 1.0)
    assert not drain.gives_up(1.5, 1.0)
    assert drain.next_fragments({2}) == [5]  # withdrawn
    drain.offered(5, 4, 2.0)
    assert drain.next_fragments({4}) == [6]
    drain.offered(6, 5, 2.0)
    drain.reached(3.0)
    assert not drain.gives_up(3.5, 1.0) and drain.left
    assert drain.next_fragments({4, 5}) == [] and not drain.left


def test_fragments_that_count_together_are_drained_at_once():
    drain = Drain([5, 6], now=0.0, at_once=True)
    assert drain.next_fragments(set()) == [5, 6]
    drain.offered(5, 1, 0.0)
    drain.offered(6, None, 0.0)  # refused here: the hub takes neither
    assert drain.next_fragments(set()) == [5, 6]
    drain.offered(5, 2, 0.0)
    drain.offered(6, 3, 0.0)
    assert drain.next_fragments({2, 3}) == [] and not drain.left


def test_who_makes_no_offer_for_days_keeps_a_bounded_number_of_scores_the_newest():
    tracker = ContributionTracker(2)
    for step in range(3 * MOST_SCORES):
        tracker.made_steps(1, 8)
        tracker.scored(step)
        assert len(tracker.unsent(0).scores) <= MOST_SCORES
    counts = tracker.unsent(1)
    assert (counts.samples, counts.steps) == (8 * 3 * MOST_SCORES, 3 * MOST_SCORES)
    assert counts.scores[-1] == 3 * MOST_SCORES - 1 and len(counts.scores) >= 256


def test_a_loop_in_a_checkpoint_of_version_0_1_is_read_and_written_in_the_same_words():
    account = {
        "step": 60, "samples": 1920, "counts": [30, 1, 28], "ages": [1, 2],
        "unsaid": [[32, 1, [0.5], [0.25]]], "offered": [[29, 58, 0, 64, 2]],
    }  # fmt: skip
    rhythm = {"plan": [58, 60, 2, 1], "schedule": [2, 1]}
    schedule = SyncSchedule(ScriptedExchange())
    schedule.restore(rhythm)
    facts, _ = pack_loop({}, {}, (), ContributionTracker.from_plain(account), schedule, False)
    assert facts == {"trees": facts["trees"], "account": account, "rhythm": rhythm, "adopted": False}
