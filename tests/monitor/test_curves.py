"""Loss curves: when they reached a loss, and short lines of long ones."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.monitor.curves import SMOOTHED, first_at, smooth, thin


@given(st.integers(0, 300), st.integers(2, 60), st.integers(0, 1 << 30))
def test_a_thinned_line_keeps_its_ends_and_its_mean(count: int, most: int, seed: int) -> None:
    x, y = np.arange(count, dtype=np.float64), np.random.default_rng(seed).normal(size=count)
    thin_x, thin_y = thin(x, y, most)
    assert len(thin_x) == len(thin_y) <= max(3, most)
    assert (np.diff(thin_x) > 0).all()
    if count:
        assert (thin_x[0], thin_x[-1]) == (0, count - 1) and (thin_y[0], thin_y[-1]) == (y[0], y[-1])
        assert thin_y.min() >= y.min() and thin_y.max() <= y.max()


def test_what_is_not_finite_is_in_no_line() -> None:
    x, y = thin(np.array([0.0, 1.0, 2.0]), np.array([math.nan, 3.0, math.inf]), 10)
    assert (x.tolist(), y.tolist()) == ([1.0], [3.0])


def test_a_loss_is_reached_between_two_points() -> None:
    assert first_at([0, 10, 20], [4.0, 3.0, 1.0], 2.0) == 15.0
    assert first_at([0, 10], [4.0, 3.0], 4.0) == 0.0
    assert math.isnan(first_at([0, 10], [4.0, 3.0], 2.0)) and math.isnan(first_at([], [], 2.0))


def test_smoothing_takes_noise_away_and_leaves_the_steep_beginning() -> None:
    seconds = np.linspace(1, 80, 80)
    true = 3 - 0.3 * np.log(seconds)
    noisy = true + 0.05 * np.where(np.arange(80) % 2, 1, -1)
    smoothed = smooth(seconds, noisy)
    assert np.abs(smoothed - true)[10:].max() < 0.02
    assert smoothed[:9].tolist() == noisy[:9].tolist()
    assert smooth([1.0] * (SMOOTHED - 1), noisy[: SMOOTHED - 1]).tolist() == noisy[: SMOOTHED - 1].tolist()
    assert smooth([], []).size == 0
