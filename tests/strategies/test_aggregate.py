"""What a round's contributions weigh, and what becomes of them together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import ConfigError, LocalProtocolError
from zmqtrain.strategies.aggregate import aggregation_from_spec, clipped, mean_over_live

SPECS = ("mean", "weighted", "trimmed:share=0.25", "trimmed:share=0", "median", "majority", "clipped:factor=2")
ROBUST = ("trimmed:share=0.25", "median", "clipped:factor=2")

WIDTH = 5
whole_weights = st.sampled_from([0.0, 1.0, 2.0, 5.0])


def vectors(least: int = 1, most: int = 7):
    """Contributions of few different values, so that many tie."""

    def draw(seed: int, count: int):
        return list((np.random.default_rng(seed).integers(-6, 7, (count, WIDTH)) / 4).astype(np.float32))

    return st.builds(draw, st.integers(0, 10_000), st.integers(least, most))


@st.composite
def rounds(draw):
    """Contributions and a weight for each, not all 0."""
    contributions = draw(vectors())
    weights = draw(st.lists(whole_weights, min_size=len(contributions), max_size=len(contributions)))
    return contributions, weights if any(weights) else [1.0] * len(weights)


def combined(spec: str, contributions, weights):
    """Aggregate whole vectors as the hub does: scaled by their norms first, those without weight left out."""
    rule = aggregation_from_spec(spec)
    present = [i for i, weight in enumerate(weights) if weight > 0]
    factors = rule.scales([float(np.linalg.norm(contributions[i].astype(np.float64))) for i in present])
    scaled = [one.copy() for one in contributions]
    for i, factor in zip(present, factors, strict=True):
        assert 0 <= factor <= 1
        scaled[i] *= np.float32(factor)
    return rule.combine(scaled, weights)


def test_any_grouping_of_the_same_deltas_into_rounds_moves_the_parameters_alike():
    deltas = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    at_once = mean_over_live(deltas.sum(axis=0), live=4)
    in_two = mean_over_live(deltas[:1].sum(axis=0), live=4) + mean_over_live(deltas[1:].sum(axis=0), live=4)
    np.testing.assert_allclose(at_once, in_two, rtol=1e-5, atol=1e-6)


def test_the_mean_may_be_made_in_place():
    total = np.arange(6, dtype=np.float32)
    assert mean_over_live(total, 2, out=total) is total
    assert total.dtype == np.float32
    np.testing.assert_array_equal(total, np.arange(6) / 2)


@pytest.mark.parametrize("live", [0, -1])
def test_a_mean_over_nobody_is_refused(live):
    with pytest.raises(LocalProtocolError, match="live nodes"):
        mean_over_live(np.ones(3, np.float32), live)


@pytest.mark.parametrize("spec", SPECS)
@given(rounds(), st.randoms(use_true_random=False))
@settings(max_examples=examples(25))
def test_the_order_of_contributions_does_not_matter(spec, of_round, random):
    contributions, weights = of_round
    order = random.sample(range(len(weights)), len(weights))
    shuffled = combined(spec, [contributions[i] for i in order], [weights[i] for i in order])
    np.testing.assert_allclose(combined(spec, contributions, weights), shuffled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
@given(rounds())
@settings(max_examples=examples(25))
def test_a_contribution_without_weight_counts_nothing_and_nobody_is_changed(spec, of_round):
    contributions, weights = of_round
    before = [one.copy() for one in contributions]
    result = combined(spec, contributions, weights)
    assert result.dtype == np.float32 and result.shape == (WIDTH,)
    assert not any(np.shares_memory(result, one) for one in contributions)
    np.testing.assert_array_equal(contributions, before)
    kept = [i for i, weight in enumerate(weights) if weight]
    alone = combined(spec, [contributions[i] for i in kept], [weights[i] for i in kept])
    np.testing.assert_array_equal(result, alone)


@pytest.mark.parametrize("spec", SPECS)
@given(vectors(least=1, most=1), st.integers(1, 6))
@settings(max_examples=examples(20))
def test_equal_contributions_aggregate_to_themselves(spec, one, count):
    np.testing.assert_allclose(combined(spec, one * count, [1.0] * count), one[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS)
@given(rounds())
@settings(max_examples=examples(15))
def test_aggregating_slab_by_slab_gives_the_same_bits(spec, of_round):
    rule, (contributions, weights) = aggregation_from_spec(spec), of_round
    parts = [rule.combine([one[part] for one in contributions], weights) for part in (slice(0, 2), slice(2, None))]
    np.testing.assert_array_equal(np.concatenate(parts), rule.combine(contributions, weights))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if aggregation_from_spec(spec).streams])
@given(rounds())
@settings(max_examples=examples(15))
def test_what_streams_is_the_weighted_sum_over_the_sum_of_weights(spec, of_round):
    contributions, weights = of_round
    total = sum(weight * one.astype(np.float64) for one, weight in zip(contributions, weights, strict=True))
    np.testing.assert_allclose(combined(spec, contributions, weights), total / sum(weights), rtol=1e-5, atol=1e-5)


def test_only_the_mean_and_the_mean_by_samples_stream():
    assert [spec for spec in SPECS if aggregation_from_spec(spec).streams] == ["mean", "weighted"]


@pytest.mark.parametrize("spec", ROBUST)
@given(vectors(least=4), st.integers(0, 6), st.sampled_from([1e30, -1e30]))
@settings(max_examples=examples(25))
def test_one_hostile_contribution_is_bounded_by_the_honest_ones(spec, honest, place, size):
    norms = [np.linalg.norm(one) for one in honest]
    contributions = [*honest[:place], np.full(WIDTH, size, np.float32), *honest[place:]]
    result = combined(spec, contributions, [1.0] * len(contributions))
    if spec.startswith("clipped"):
        if any(norms):
            assert np.linalg.norm(result) <= 2 * max(norms) * 1.001
    else:
        assert (np.min(honest, axis=0) - 1e-5 <= result).all() and (result <= np.max(honest, axis=0) + 1e-5).all()


@given(vectors(least=3), st.sampled_from([1.0, 3.5, 1e30]))
@settings(max_examples=examples(25))
def test_one_sign_flipped_contribution_cannot_turn_a_sign_on_which_the_others_agree(honest, size):
    agreed = [np.abs(one) + np.float32(0.5) for one in honest]
    contributions = [*agreed, -np.float32(size) * agreed[0]]
    for spec in ("trimmed:share=0.34", "median", "majority"):
        assert (combined(spec, contributions, [1.0] * len(contributions)) > 0).all()


def test_the_mean_is_what_one_hostile_contribution_carries_away():
    honest = [np.ones(WIDTH, np.float32)] * 9
    assert combined("mean", [*honest, np.full(WIDTH, 1e30, np.float32)], [1.0] * 10)[0] > 1e28


def test_the_mean_of_huge_values_is_a_float():
    huge = [np.full(WIDTH, 3e38, np.float32)] * 4
    for spec in SPECS:
        assert np.isfinite(combined(spec, huge, [1e6, 3.0, 1.0, 1.0])).all()


@pytest.mark.parametrize(("share", "expected"), [(0, 22.0), (0.2, 3.0), (0.39, 3.0), (0.4, 3.0), (0.49, 3.0)])
def test_trimming_cuts_the_floor_of_the_share_at_each_end(share, expected):
    contributions = [np.full(1, value, np.float32) for value in (100, 2, 3, 4, 1)]
    np.testing.assert_allclose(combined(f"trimmed:share={share}", contributions, [1.0] * 5), expected)


def test_trimming_nearly_a_half_of_two_leaves_both():
    contributions = [np.full(1, value, np.float32) for value in (1, 3)]
    np.testing.assert_array_equal(combined("trimmed:share=0.4999999999", contributions, [1, 1]), [2])


def test_what_trimming_leaves_is_averaged_by_weight():
    contributions = [np.full(1, value, np.float32) for value in (-9, 1, 2, 50)]
    np.testing.assert_allclose(combined("trimmed:share=0.25", contributions, [4, 3, 1, 4]), [1.25])


def test_the_median_is_where_half_of_the_weight_lies_below():
    contributions = [np.full(1, value, np.float32) for value in (1, 2, 3, 10)]
    for weights, expected in (
        ([1] * 4, 2.5),
        ([1, 1, 1, 0], 2),
        ([1, 1, 1, 4], 10),
        ([1, 1, 1, 3], 6.5),
        ([3, 1, 1, 1], 1.5),
    ):
        np.testing.assert_allclose(combined("median", contributions, weights), expected)


@pytest.mark.parametrize("count", range(1, 20))
def test_any_number_of_contributions_is_sorted_for_each_parameter(count):
    contributions = list(np.random.default_rng(count).integers(-3, 4, (count, 200)).astype(np.float32))
    cut = count // 4
    trimmed, median = (combined(spec, contributions, [1.0] * count) for spec in ("trimmed:share=0.25", "median"))
    np.testing.assert_allclose(trimmed, np.sort(contributions, axis=0)[cut : count - cut].mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(median, np.median(contributions, axis=0))


@pytest.mark.parametrize("count", range(1, 20))
def test_with_unequal_weights_trimming_cuts_the_lightest_of_equal_values_first(count):
    draw = np.random.default_rng(count)
    contributions, weights = draw.integers(-3, 4, (count, 50)).astype(np.float32), draw.integers(1, 4, count)
    expected = []
    for column in contributions.T:
        kept = np.lexsort((weights, column))[count // 4 : count - count // 4]
        expected.append(np.average(column[kept], weights=weights[kept]))
    result = combined("trimmed:share=0.25", list(contributions), list(weights))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", range(1, 20))
def test_a_whole_weight_is_as_many_contributions_to_the_median(count):
    draw = np.random.default_rng(count)
    contributions = list(draw.integers(-3, 4, (count, 200)).astype(np.float32))
    weights = draw.integers(1, 4, count)
    repeated = [one for one, weight in zip(contributions, weights, strict=True) for _ in range(weight)]
    np.testing.assert_array_equal(combined("median", contributions, list(weights)), np.median(repeated, axis=0))


def test_a_majority_takes_the_mean_magnitude_a_zero_abstains_and_a_tie_stays():
    contributions = [np.array(values, np.float32) for values in ([1, 1, 2, 3], [2, -1, 0, 3], [-3, 0, 0, -6])]
    np.testing.assert_allclose(combined("majority", contributions, [1, 1, 1]), [2, 0, 2 / 3, 4], rtol=1e-6)
    np.testing.assert_allclose(combined("majority", contributions, [1, 1, 2]), [0, 0, 0.5, 0])


def test_clipping_measures_by_the_lower_median_of_the_norms_above_zero():
    scales = clipped(2).scales
    assert scales([1, 1, 8, 4]) == [1, 1, 0.25, 0.5]
    assert scales([1, 1e30]) == [1, 2 / 1e30]
    assert scales([0, 0, 0, 3]) == [1, 1, 1, 1]
    assert scales([0, 0]) == [1, 1]
    assert scales([1, float("inf"), float("nan"), 1]) == [1, 0, 0, 1]
    assert scales([float("inf")]) == [0]
    for spec in SPECS[:-1]:
        assert aggregation_from_spec(spec).scales([1, 1e30]) == [1, 1]


def test_samples_weigh_only_in_the_mean_by_samples_where_progress_without_any_weighs_as_one():
    assert aggregation_from_spec("weighted").weigh([64, 0, 1]) == [64, 1, 1]
    for spec in SPECS:
        if spec != "weighted":
            assert aggregation_from_spec(spec).weigh([64, 0, 1]) == [1, 1, 1]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("count", "weights", "place"),
    [(0, [], "without any weight"), (2, [0, 0], "without any weight"), (2, [1], "1 weights")],
)
def test_an_average_of_nothing_is_refused(spec, count, weights, place):
    with pytest.raises(LocalProtocolError, match=place):
        aggregation_from_spec(spec).combine([np.ones(3, np.float32)] * count, weights)


def test_names_are_canonical_and_name_the_same_rule():
    for spec in SPECS:
        assert aggregation_from_spec(spec).name == spec
        assert aggregation_from_spec(spec) is aggregation_from_spec(spec)
    assert aggregation_from_spec("trimmed").name == "trimmed:share=0.25"
    assert aggregation_from_spec("clipped").name == "clipped:factor=2"


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("average", "mean, weighted, trimmed:share=0.25, median, majority, clipped:factor=2"),
        ("trimmed:share=0.5", "share=0.5 is not in 0 <= share < 0.5"),
        ("trimmed:share=-0.1", "share=-0.1 is not in"),
        ("clipped:factor=0.5", "factor=0.5 is not at least 1"),
        ("median:share=0.1", "median takes no arguments"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_place_and_the_choices(spec, place):
    with pytest.raises(ConfigError, match=place):
        aggregation_from_spec(spec)
