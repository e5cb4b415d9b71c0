"""A round that is held until it closes: which of its deltas count, and how much."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from tests.averaging.aggregators import add, founded, moved, release
from zmqtrain.averaging.held_rounds import HeldRound


def test_a_round_that_is_held_and_weighs_all_alike_makes_the_same_step_as_one_that_is_added_at_once():
    streamed, held = founded(), founded(staleness="polynomial:power=0.5")
    assert HeldRound(held.settings).needed and not HeldRound(streamed.settings).needed
    for seed in (1, 2, 3):
        add(streamed, 0, seed), add(held, 0, seed)
    for mine, theirs in zip(moved(held, 4), moved(streamed, 4), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_who_is_not_selected_counts_nothing_and_the_rest_count_for_it():
    aggregator = founded(selection="healthy:factor=1.1")
    good = [add(aggregator, 0, seed, score=1.0) for seed in (1, 2, 3)]
    add(aggregator, 0, 4, score=5.0, scale=10.0)
    np.testing.assert_allclose(moved(aggregator, 4)[0], np.mean(good, axis=0), rtol=0, atol=1e-6)


def test_weighted_weighs_by_samples():
    aggregator = founded(aggregate="weighted")
    few, many = add(aggregator, 0, 1, samples=1), add(aggregator, 0, 2, samples=3)
    np.testing.assert_allclose(moved(aggregator, 2)[0], (few + 3 * many) / 4, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["median", "trimmed:share=0.34", "clipped:factor=2"])
def test_one_hostile_delta_moves_a_robust_aggregate_no_further_than_the_others_do(rule):
    aggregator = founded(aggregate=rule)
    good = [add(aggregator, 0, seed) for seed in (1, 2)]
    add(aggregator, 0, 3, scale=1e20)
    step = moved(aggregator, 3)[0]
    assert np.linalg.norm(step) <= 2 * max(np.linalg.norm(u) for u in good)


def test_a_late_delta_is_damped_by_its_own_staleness_alone():
    aggregator = founded(staleness="polynomial:power=1")
    for _ in range(3):
        add(aggregator, 0, 9), release(aggregator, (0,), 1)
    fresh, late = add(aggregator, 0, 1, base=3), add(aggregator, 0, 2, base=0)
    np.testing.assert_allclose(moved(aggregator, 2)[0], (fresh + late / 4) / 2, rtol=0, atol=1e-6)


def test_what_is_too_stale_lands_and_counts_nothing_where_the_run_drops_it():
    aggregator = founded(max_staleness=1, stale="drop")
    fresh = add(aggregator, 0, 1)
    add(aggregator, 0, 2, too_stale=True)
    np.testing.assert_allclose(moved(aggregator, 2)[0], fresh / 2, rtol=0, atol=1e-6)
    add(aggregator, 0, 3, too_stale=True)
    assert not moved(aggregator, 2)[0].any()


def test_a_compensated_delta_is_corrected_by_what_was_published_since_its_base():
    aggregator = founded(staleness="compensation:strength=0.5,versions=4")
    first = add(aggregator, 0, 1)
    release(aggregator, (0,), 1)
    again = add(aggregator, 0, 1, base=0)  # the very way the shared parameters have gone meanwhile
    step = moved(aggregator, 1)[0]
    assert 0 < np.vdot(step, again) < np.vdot(again, again) and np.vdot(first, first) > 0
    fresh = add(aggregator, 0, 1, base=2)
    np.testing.assert_allclose(moved(aggregator, 1)[0], fresh, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["weighted", "mean"])
def test_of_a_weighted_mean_one_delta_is_decoded_at_a_time(rule, monkeypatch):
    aggregator = founded(aggregate=rule, staleness="polynomial:power=1", fragments=1)
    for seed in range(6):
        add(aggregator, 0, seed)
    living, most, decode = weakref.WeakValueDictionary(), [0], aggregator._decode

    def counting(peer, publish, frames):
        u = decode(peer, publish, frames)
        living[publish.sequence] = u
        most[0] = max(most[0], len(living))
        return u

    monkeypatch.setattr(aggregator, "_decode", counting)
    release(aggregator, (0,), 6)
    assert most[0] <= 2


# ---------------------------------------------------------------------- several fragments in one round


@pytest.mark.parametrize("rule", ["best:count=1", "better", "healthy:factor=1.1", "score:temperature=0.01"])
def test_the_only_delta_of_a_fragment_counts_however_well_others_score_with_theirs(rule):
    aggregator = founded(selection=rule)
    us = [add(aggregator, fragment, 1, score=score) for fragment, score in ((0, 1.0), (1, 9.0))]
    for step, u in zip(moved(aggregator, 1, (0, 1)), us, strict=True):
        np.testing.assert_allclose(step, u, rtol=0, atol=1e-6)


def test_scores_are_compared_among_the_deltas_of_one_fragment():
    aggregator = founded(selection="best:count=1")
    scores = ((0, 3.0), (1, 1.0), (0, 4.0), (1, 2.0))
    (first, second, _, _) = (add(aggregator, f, seed, score=score) for seed, (f, score) in enumerate(scores))
    for step, u in zip(moved(aggregator, 2, (0, 1)), (first, second), strict=True):
        np.testing.assert_allclose(step, u, rtol=0, atol=1e-6)  # the best stands for both


def test_better_is_who_scores_lower_than_the_model_that_all_fragments_are_of():
    aggregator = founded(selection="better")
    add(aggregator, 0, 0, score=1.0), add(aggregator, 1, 0, score=3.0)
    release(aggregator, (0, 1), live=2)
    scores = ((0, 1.9), (0, 2.1), (1, 9.0), (1, 8.0))  # the model's own is 2, as the round begins
    us = [add(aggregator, f, seed, score=score) for seed, (f, score) in enumerate(scores)]
    steps = moved(aggregator, 2, (0, 1))
    np.testing.assert_allclose(steps[0], us[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(steps[1], us[3], rtol=0, atol=1e-6, err_msg="none is better: the best counts")


def test_the_models_own_score_is_the_median_of_the_latest_of_all_fragments_in_their_order():
    aggregator = founded(selection="better", max_staleness=1, stale="drop")
    for fragment, score in ((1, 5.0), (0, float("nan")), (0, 4.0), (1, 3.0)):
        add(aggregator, fragment, 1, score=score)
    add(aggregator, 0, 1, score=2.0, too_stale=True)
    release(aggregator, (0, 1), live=2)
    assert aggregator.arrays()["scores"].tolist() == [5.0, 4.0, 3.0]
    for number in range(16):
        add(aggregator, number % 2, 1, score=number)
    release(aggregator, (0, 1), live=2)
    assert aggregator.arrays()["scores"].tolist() == [*map(float, range(16))]
