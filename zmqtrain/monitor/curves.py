"""Loss curves: smoothed, thinned, and when they reached a loss. Pure.

Rule: single scores are too noisy to say when a loss was reached. A smoothed loss is that of the line through SMOOTHED
scores, the nearest in time, over the logarithm of the seconds; in the first part of a curve, where it is steep, scores
stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SMOOTHED, STEEP = 9, 1 / 8


def smooth(seconds: Sequence[float] | Floats, losses: Sequence[float] | Floats) -> Floats:
    """Return the losses smoothed: see the rule. seconds: rising, positive from the first eighth on; as many as losses.

    Fewer than SMOOTHED scores stay as they are.
    """
    times, smoothed = np.asarray(seconds, np.float64), np.array(losses, np.float64)
    steep = int((times <= STEEP * times[-1]).sum()) if times.size else 0
    if times.size - steep >= SMOOTHED:
        smoothed[steep:] = _lines(np.log(times[steep:]), smoothed[steep:])
    return smoothed


def _lines(x: Floats, y: Floats) -> list[float]:
    """Return at each place the value of the line that fits the SMOOTHED nearest places best."""
    values = []
    for index, place in enumerate(x):
        first = min(max(0, index - SMOOTHED // 2), len(x) - SMOOTHED)
        near = slice(first, first + SMOOTHED)
        _, height = np.polyfit(x[near] - place, y[near], 1)
        values.append(float(height))
    return values


def first_at(places: Sequence[float] | Floats, losses: Sequence[float] | Floats, loss: float) -> float:
    """Return the place (in seconds, samples or bytes) at which a curve first was at or below a loss, linear between two
    points; NaN if it never was. A curve that begins there was there at its first place."""
    points = [*zip(places, losses, strict=True)]
    if points and points[0][1] <= loss:
        return float(points[0][0])
    for (begin, before), (end, after) in pairwise(points):
        if after <= loss < before:
            return float(begin + (before - loss) / (before - after) * (end - begin))
    return math.nan


def thin(x: Floats, y: Floats, most: int) -> tuple[Floats, Floats]:
    """Return a line of at most `most` points, of three at least: the first and the last one as they are, between them
    means of neighbours.

    Points that are not finite are left out.
    """
    known = np.isfinite(y) & np.isfinite(x)
    x, y = x[known], y[known]
    most = max(3, most)
    if x.size <= most:
        return x, y
    bounds = np.unique(np.linspace(1, x.size - 1, most - 1).astype(np.int64))
    counts = np.diff(bounds)
    inner_x, inner_y = (np.add.reduceat(values[: bounds[-1]], bounds[:-1]) / counts for values in (x, y))
    return np.concatenate((x[:1], inner_x, x[-1:])), np.concatenate((y[:1], inner_y, y[-1:]))
