"""The noise scale is what was put in, and says how much sooner n nodes reach a loss than one."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from zmqtrain.strategies.measures import MOST_NODES, WINDOW, NoiseScale, correlation, gains, speed_up

VALUES = 4000


def measured(noise, nodes, *, rounds=8 * WINDOW, momentum=0.0, every=lambda node: 1, fragments=1, seed=0):
    """The estimate of deltas with a common direction of length 1 and independent noise of mean square `noise`.

    every: of each node, in every how many rounds it comes.
    """
    random, scale = np.random.default_rng(seed), NoiseScale()
    direction = random.standard_normal((fragments, VALUES)) / np.sqrt(VALUES * fragments)
    kept = np.zeros((nodes, fragments, VALUES))
    for number in range(rounds):
        kept *= momentum
        deviation = np.sqrt(noise / VALUES / fragments)
        kept += (1 - momentum) * deviation * random.standard_normal(kept.shape)
        for fragment in range(fragments):
            for node in range(nodes):
                if number % every(node) == 0:
                    scale.add(f"n{node}", fragment, direction[fragment] + kept[node, fragment])
            scale.close(fragment)
    return scale.noise


@pytest.mark.parametrize("nodes", [2, 4, 9])
@pytest.mark.parametrize("noise", [0.5, 8.0, 100.0])
def test_the_estimate_is_the_noise_that_was_put_in(nodes, noise):
    assert measured(noise, nodes) == pytest.approx(noise, rel=0.15)


def test_the_estimate_of_fragments_is_that_of_the_whole_model():
    assert measured(8.0, 3, fragments=3) == pytest.approx(8.0, rel=0.15)


def test_a_node_that_comes_less_often_biases_nothing():
    assert measured(8.0, 4, every=lambda node: 1 + (node == 3)) == pytest.approx(8.0, rel=0.15)


def test_momentum_hides_noise_from_one_delta_and_little_of_it_from_a_window():
    shown = (1 - 0.9) / (1 + 0.9) * 50.0  # what one delta shows of it
    assert measured(50.0, 4, momentum=0.9, rounds=200) > 4 * shown


def test_nothing_is_known_before_a_window_of_two_nodes_is_full():
    assert measured(8.0, 3, rounds=WINDOW - 1) is None
    assert measured(8.0, 1, rounds=10 * WINDOW) is None
    assert measured(8.0, 2, rounds=WINDOW) is not None


def test_pure_noise_is_an_infinite_scale_and_equal_deltas_none():
    opposed = NoiseScale()
    for sign in (1.0, -1.0):
        for _ in range(WINDOW):
            opposed.add(f"n{sign}", 0, np.full(3, sign))
    opposed.close(0)
    assert opposed.noise == inf
    assert measured(0.0, 2) == pytest.approx(0.0, abs=1e-9)


def test_what_is_kept_is_bounded_in_nodes():
    scale = NoiseScale()
    for node in range(10 * MOST_NODES):
        scale.add(f"n{node}", 0, np.ones(3))
    assert len(scale._fragments[0].sums) == MOST_NODES


@pytest.mark.parametrize(
    ("nodes", "noise", "speed"), [(1, 7.0, 1.0), (4, 7.0, 32 / 11), (4, 0.0, 1.0), (4, inf, 4.0), (3, 9.0, 2.5)]
)
def test_the_speed_up_is_that_of_the_noise_scale(nodes, noise, speed):
    assert speed_up(nodes, noise) == pytest.approx(speed)


def test_the_gain_of_a_node_is_its_part_of_the_speed():
    more, last = gains(4, 7.0)
    assert more == pytest.approx((5 * 8 / 12) / (4 * 8 / 11) - 1)
    assert last == pytest.approx((4 * 8 / 11) / (3 * 8 / 10) - 1)
    assert gains(1, 7.0)[1] == inf


@pytest.mark.parametrize("nodes", [2, 8])
@pytest.mark.parametrize("noise", [0.5, 8.0])
def test_the_correlation_is_that_of_the_energies_of_a_mean_and_of_its_deltas(nodes, noise):
    random, values = np.random.default_rng(1), 20_000
    common = random.standard_normal(values) / np.sqrt(values)
    deltas = common + np.sqrt(noise / values) * random.standard_normal((nodes, values))
    energy = np.square(deltas.mean(axis=0)).sum() / np.square(deltas).sum(axis=1).mean()
    rho = correlation(noise)
    assert energy == pytest.approx(1 / nodes + (1 - 1 / nodes) * rho, rel=0.03)
    assert (correlation(0.0), correlation(inf)) == (1.0, 0.0)
