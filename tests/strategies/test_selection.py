"""Whose progress counts, and who adopts whose parameters."""

from __future__ import annotations

from math import exp, inf, nan
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import ConfigError
from zmqtrain.strategies.weights import Laggards, Preemption, preemption_from_spec, selection_from_spec

SPECS = ("all", "best:count=2", "better", "healthy:factor=1.1", "score:temperature=1")

any_scores = st.lists(st.floats() | st.sampled_from([1.0, 2.0, nan, inf]), min_size=1, max_size=8)
finite_scores = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


def weigh(spec, scores, own=nan):
    return selection_from_spec(spec).weights(scores, own)


@pytest.mark.parametrize("spec", SPECS)
@given(any_scores, st.floats())
@settings(max_examples=examples(60))
def test_whatever_the_scores_somebody_counts_and_no_weight_leaves_zero_to_one(spec, scores, own):
    weights = weigh(spec, scores, own)
    assert len(weights) == len(scores) and max(weights) == 1
    assert all(0 <= weight <= 1 for weight in weights)


@pytest.mark.parametrize("spec", SPECS)
@given(any_scores, st.floats(), st.randoms(use_true_random=False))
@settings(max_examples=examples(40))
def test_the_order_of_the_scores_does_not_matter(spec, scores, own, random):
    order = random.sample(range(len(scores)), len(scores))
    weights = weigh(spec, scores, own)
    assert weigh(spec, [scores[i] for i in order], own) == pytest.approx([weights[i] for i in order])


@pytest.mark.parametrize("spec", SPECS)
@given(finite_scores, st.floats(-1e6, 1e6))
@settings(max_examples=examples(40))
def test_a_lower_score_never_weighs_less(spec, scores, own):
    ranked = [
        weight for _, weight in sorted(zip(scores, weigh(spec, scores, own), strict=True), key=lambda pair: pair[0])
    ]
    assert ranked == sorted(ranked, reverse=True)


@pytest.mark.parametrize("spec", SPECS)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=7))
@settings(max_examples=examples(30))
def test_an_unknown_score_weighs_as_the_median_would(spec, scores):
    middle = median(scores)
    for own in (nan, 5.0):
        assert weigh(spec, [*scores, nan], own) == weigh(spec, [*scores, middle], own)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("scores", [[nan] * 3, [2.0] * 3, [inf] * 3])
def test_equal_scores_all_count(spec, scores):
    assert weigh(spec, scores) == [1, 1, 1]


@pytest.mark.parametrize("spec", SPECS[1:])
def test_a_diverged_node_does_not_count(spec):
    assert weigh(spec, [1.0, 1.0, inf], own=1.5) == [1, 1, 0]


def test_all_counts_everybody():
    assert weigh("all", [1.0, nan, inf, 1e9], own=0) == [1] * 4


def test_best_counts_so_many_and_who_ties_with_them():
    assert weigh("best:count=2", [3.0, 1.0, 2.0, 4.0]) == [0, 1, 1, 0]
    assert weigh("best:count=2", [3.0, 1.0, 3.0, 4.0]) == [1, 1, 1, 0]
    assert weigh("best:count=9", [3.0, 1.0]) == [1, 1]


def test_better_counts_those_below_the_shared_models_score_or_else_the_best():
    assert weigh("better", [3.0, 1.0, 2.0], own=2.5) == [0, 1, 1]
    assert weigh("better", [3.0, 1.0, 2.0], own=1.0) == [0, 1, 0]
    assert weigh("better", [3.0, 1.0, 2.0], own=nan) == [1, 1, 1]


@pytest.mark.parametrize(
    ("scores", "weights"),
    [
        ([1.0, 1.05, 0.95, 1.3], [1, 1, 1, 0]),
        ([-1.0, -1.05, -0.95, -0.7], [1, 1, 1, 0]),
        ([0.0, 0.0, 0.0, 0.1], [1, 1, 1, 0]),
        ([1.0, 9.0, 9.0, 9.0], [1, 1, 1, 1]),
    ],
)
def test_healthy_drops_what_is_a_tenth_above_the_median_whatever_its_sign(scores, weights):
    assert weigh("healthy:factor=1.1", scores) == weights


def test_scores_weigh_by_their_distance_from_the_best_in_median_deviations():
    assert weigh("score:temperature=2", [1.0, 2.0, 3.0]) == pytest.approx([1, exp(-0.5), exp(-1)])
    assert weigh("score", [10.0, 20.0, 30.0]) == pytest.approx(weigh("score", [1.0, 2.0, 3.0]))
    assert weigh("score", [1.0, 1.0, 1.0, 5.0]) == pytest.approx([1, 1, 1, exp(-4)])


def test_nobodys_score_is_nobodys_weight():
    assert [weigh(spec, []) for spec in SPECS] == [[]] * len(SPECS)


@pytest.mark.parametrize("patience", [1, 3])
def test_who_lags_so_many_times_in_a_row_adopts_the_best_and_begins_to_count_anew(patience):
    laggards = Laggards(Preemption(patience, 0.05))
    laggards.report("good", 1.0)
    for _ in range(3):
        assert [laggards.report("bad", 1.1) for _ in range(patience)] == [None] * (patience - 1) + ["good"]


def test_one_report_that_does_not_lag_ends_the_count():
    laggards = Laggards(Preemption(2, 0.05))
    laggards.report("good", 1.0)
    assert [laggards.report("bad", score) for score in (1.1, 1.04, 1.1, 1.1)] == [None, None, None, "good"]


def test_only_a_peers_own_reports_count_against_it():
    laggards = Laggards(Preemption(2, 0.05))
    assert [laggards.report(peer, score) for peer, score in [("bad", 2.0)] + [("good", 1.0)] * 5] == [None] * 6
    assert [laggards.report("bad", 2.0) for _ in range(2)] == [None, "good"]


def test_the_best_is_measured_by_its_latest_score():
    laggards = Laggards(Preemption(1, 0.05))
    for score in (0.5, 3.0):
        laggards.report("a", score)
    assert laggards.report("b", 2.0) is None and laggards.best == "b"
    assert laggards.report("a", 3.0) == "b"


def test_a_peer_that_left_is_forgotten_with_its_score():
    laggards = Laggards(Preemption(2, 0.05))
    laggards.report("good", 1.0)
    laggards.report("bad", 2.0)
    laggards.forget("good")
    laggards.forget("nobody")
    assert laggards.best == "bad" and laggards.report("bad", 2.0) is None
    laggards.report("good", 1.0)
    laggards.forget("bad")
    assert [laggards.report("bad", 2.0) for _ in range(2)] == [None, "good"]


def test_nobody_adopts_parameters_for_a_score_that_others_had():
    laggards = Laggards(Preemption(1, 0.0))
    for peer, score in (("a", 1.0), ("b", 5.0)):
        laggards.report(peer, score)
    laggards.forget("a")
    assert laggards.best is None
    assert laggards.report("c", 2.0) is None and laggards.best == "c"


@pytest.mark.parametrize("score", [nan, inf])
def test_a_score_that_is_no_number_lags_once_somebody_has_one(score):
    laggards = Laggards(Preemption(1, 0.05))
    assert laggards.report("bad", score) is None and laggards.best is None
    laggards.report("good", 1e9)
    assert laggards.report("bad", score) == "good"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats() | st.sampled_from([1.0, 2.0, nan])), max_size=40))
@settings(max_examples=examples(60))
def test_adoptions_need_patience_and_never_come_from_oneself_or_from_who_has_no_score(reports):
    rule, latest, own = Preemption(2, 0.05), {}, {}
    laggards = Laggards(rule)
    for peer, score in reports:
        adopted = laggards.report(peer, score)
        latest[peer], own[peer] = score, own.get(peer, 0) + 1
        if adopted is not None:
            assert adopted != peer
            assert latest[adopted] == min(score for score in latest.values() if -1e100 < score < 1e100)  # no absurd one
            assert own[peer] >= rule.patience
            del latest[peer], own[peer]


def test_the_margin_is_a_share_of_the_best_whatever_its_sign():
    rule = Preemption(4, 0.1)
    for best, limit in ((1.0, 1.1), (-1.0, -0.9), (0.0, 0.0)):
        assert not rule.lagging(limit, best) and rule.lagging(limit + 1e-9, best)
    assert not rule.lagging(nan, nan) and not rule.lagging(5.0, inf)


def test_names_are_canonical_and_name_the_same_rule():
    for spec in SPECS:
        assert selection_from_spec(spec).name == spec
        assert selection_from_spec(spec) is selection_from_spec(spec.partition(":")[0])
    rule = preemption_from_spec("score")
    assert rule == Preemption() and rule.name == "score:patience=2,margin=0"
    assert preemption_from_spec(rule.name) == rule
    assert preemption_from_spec("none") is None


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("worst", "all, best:count=2, better, healthy:factor=1.1, score:temperature=1"),
        ("best:count=0", "count=0 is not at least 1"),
        ("healthy:factor=0.9", "factor=0.9 is not at least 1"),
        ("score:temperature=0", "temperature=0 is not in 0 < temperature"),
    ],
)
def test_a_wrong_selection_is_refused_with_the_place_and_the_choices(spec, place):
    with pytest.raises(ConfigError, match=place):
        selection_from_spec(spec)


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("always", "score:patience=2,margin=0, none"),
        ("score:patience=0", "'score:patience=0'.*patience=0 is not at least 1"),
        ("score:margin=-0.1", "margin=-0.1 is not at least 0"),
        ("none:patience=1", "none takes no arguments"),
    ],
)
def test_a_wrong_preemption_is_refused_with_the_place_and_the_choices(spec, place):
    with pytest.raises(ConfigError, match=place):
        preemption_from_spec(spec)
