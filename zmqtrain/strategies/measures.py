"""Two measures: how noisy the nodes' deltas are, and whether parameters descend from one beginning.

With deltas g_i = g + noise_i, of c_i deltas by node i in a window, G_i their sums:

    |g|^2 = (|sum G_i|^2 - sum |G_i|^2) / ((sum c_i)^2 - sum c_i^2)
    s^2 = (sum |G_i|^2 - |g|^2 sum c_i^2) / sum c_i

are unbiased, and B = s^2 / |g|^2 is the noise scale in units of one node's delta: with B nodes, half of
the mean's energy is noise.  rho = 1 / (1 + B) is the correlation of two nodes' deltas: |mean|^2 / mean |g_i|^2 is
1 / n + (1 - 1 / n) rho in expectation.
With one delta a node this is (n |mean|^2 - mean |g_i|^2) / (n - 1) and n / (n - 1) (mean |g_i|^2 - |mean|^2).

Rule 1: a window holds several deltas of each node, because one delta shows too little: momentum spreads the noise of a
step over later deltas, and a codec with error feedback sends later what it leaves out now. A window's sums hold both.
Rule 2: only related parameters are averaged. Two networks that learn the same from different initial parameters hold it
in different units: their mean is neither.
Rule 3: pure: no clock, no socket, no thread; bounded in nodes and in values; nothing here trains or scores.
Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, secs. 2.2 and appendix A.1; permutation
symmetry, Entezari et al. 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.types import PeerId

WINDOW = 16
"""A window is closed when it has so many deltas of a fragment for each node in it."""
MOST_WINDOWS = 8
"""An estimate is the mean over so many windows; of more, an exponential one."""
MOST_NODES = 64
"""Of more nodes than this in a window, the others are not looked at."""


def speed_up(nodes: int, noise: float) -> float:
    """Return how many times as fast as one node `nodes` learn, per second: n (1 + B) / (n + B).

    noise: B, from 0 to inf.
    """
    return float(nodes) if noise == inf else nodes * (1 + noise) / (nodes + noise)


def correlation(noise: float) -> float:
    """Return the correlation rho of two nodes' deltas, from 0 to 1. noise: B, from 0 to inf."""
    return 1 / (1 + noise)


def gains(nodes: int, noise: float) -> tuple[float, float]:
    """Return by which part one more node would raise the speed of `nodes`, and by which part the last one raises it.

    nodes: at least 1, whose last one raises it by inf.
    """
    now, more = speed_up(nodes, noise), speed_up(nodes + 1, noise)
    return more / now - 1, now / speed_up(nodes - 1, noise) - 1 if nodes > 1 else inf


@dataclass
class _Fragment:
    """sums, counts: by node, of the window that is open.  signal, noise: the means of |g|^2 and s^2 over `windows`."""

    sums: dict[PeerId, NDArray[np.float64]] = field(default_factory=dict)
    counts: dict[PeerId, int] = field(default_factory=dict)
    signal: float = 0.0
    noise: float = 0.0
    windows: int = 0


class NoiseScale:
    """The estimate of one run, over all fragments of its model."""

    def __init__(self) -> None:
        self._fragments: dict[int, _Fragment] = {}
        self.noise: float | None = None
        """B; inf: no direction is common to the nodes.  None: not known yet."""

    def add(self, peer: PeerId, fragment: int, values: NDArray[np.float64]) -> None:
        """Take a node's delta, or the same sample of each delta, scaled to stand for all of the fragment.

        values: this object's from now on.
        """
        known = self._fragments.setdefault(fragment, _Fragment())
        if peer in known.sums:
            known.sums[peer] += values
        elif len(known.sums) < MOST_NODES:
            known.sums[peer] = values
        else:
            return
        known.counts[peer] = known.counts.get(peer, 0) + 1

    def close(self, fragment: int) -> None:
        """Close a round of a fragment; a full window updates the estimate."""
        known = self._fragments.get(fragment)
        if known is None or not known.counts or sum(known.counts.values()) < WINDOW * len(known.counts):
            return
        counts, sums = np.array([*known.counts.values()], np.float64), np.stack([*known.sums.values()])
        known.sums, known.counts = {}, {}
        if len(counts) < 2:
            return
        of_all, of_each = float(np.square(sums.sum(axis=0)).sum()), float(np.square(sums).sum())
        whole, squares = float(counts.sum()), float(np.square(counts).sum())
        signal = (of_all - of_each) / (whole * whole - squares)
        noise = (of_each - signal * squares) / whole
        known.windows = min(known.windows + 1, MOST_WINDOWS)
        known.signal += (signal - known.signal) / known.windows
        known.noise += (noise - known.noise) / known.windows
        self._estimate()

    def _estimate(self) -> None:
        signal = sum(one.signal for one in self._fragments.values())
        noise = sum(one.noise for one in self._fragments.values())
        if noise > 0:
            self.noise = noise / signal if signal > 0 else inf
        elif signal > 0:
            self.noise = 0.0


Leaf = NDArray[Any]

RELATED_COSINE = 0.2
"""Parameters whose `relatedness` is below are unrelated.

Independent beginnings have a cosine of about 0 +- 1/sqrt(values), and keep it. Measured after so many steps apart, each
node on its own data: the text program (width 64, Shakespeare), the image program (width 16, digits), and that at five
times its rate.

    steps              0     32     128    512    1024
    one beginning      1     .999   .983   .897   .823   text      own beginnings: at most .021 in magnitude,
                       1     .994   .971   .948   .938   image     all three, at all times
                       1      -     .783    -     .630   image, 5 x the rate
"""

_PIECE_VALUES = 65_536  # so many at a time are made float64
_RESOLUTION = 1e-7  # a leaf that varies by less of its mean is a constant, in float32


def relatedness(a: Sequence[Leaf], b: Sequence[Leaf]) -> float:
    """Return the cosine between two sets of parameters, in [-1, 1]: about 0 if they began independently.

    a, b: the leaves of one model in one order, float arrays of any shape (numpy or jax). Of each leaf its mean is
    taken away, and only leaves of two dimensions or more count (all, if there is none): scales that begin at 1 and
    biases that begin at 0 are the same in all models. 1.0 if nothing varies on a side (it began at constants: that is
    no sign of different beginnings). NaN if a value is not finite. Sums are float64, a piece of a leaf at a time.
    Raises LocalProtocolError if the shapes differ.
    """
    shapes = [leaf.shape for leaf in a], [leaf.shape for leaf in b]
    if shapes[0] != shapes[1]:
        raise LocalProtocolError(f"parameters of different models were compared: {shapes[0]} and {shapes[1]}")
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.ndim >= 2 and x.size]
    product = square_a = square_b = 0.0
    for x, y in pairs or [(x, y) for x, y in zip(a, b, strict=True) if x.size]:
        xy, xx, yy = _centred_products(np.asarray(x).reshape(-1), np.asarray(y).reshape(-1))
        product, square_a, square_b = product + xy, square_a + xx, square_b + yy
    if isnan(product + square_a + square_b):
        return nan
    if not (square_a and square_b):
        return 1.0
    return max(-1.0, min(1.0, product / (sqrt(square_a) * sqrt(square_b))))


def are_related(cosine: float) -> bool:
    """Return whether parameters of this `relatedness` may be averaged: at least RELATED_COSINE; NaN may not."""
    return cosine >= RELATED_COSINE


def explain_unrelated(names: Sequence[str], cosines: Sequence[float]) -> str:
    """Return, for people, why the parameters of these nodes are not averaged with the run's, and what to do.

    cosines: the `relatedness` of each node's parameters to the run's.
    Raises LocalProtocolError if there is no name, or not one cosine for each.
    """
    if not names or len(names) != len(cosines):
        raise LocalProtocolError(f"{len(names)} unrelated nodes were given {len(cosines)} cosines")
    who = " and ".join(
        ", ".join(part) for part in (_each(names[:-1], cosines[:-1]), _each(names[-1:], cosines[-1:])) if part
    )
    return (
        f"the parameters of {who} are unrelated to the run's (related ones have a cosine of at least "
        f"{RELATED_COSINE:g}): they began from other random values, and learn the same things in other units. "
        "Averaging unrelated networks destroys both (+2 to +14 % loss measured; the cause is permutation symmetry, "
        "Entezari et al. 2022). Begin with --initial best or --initial founder, or give all nodes the same checkpoint"
    )


def _centred_products(x: Leaf, y: Leaf) -> tuple[float, float, float]:
    """Return the sums of (x - mean) (y - mean), (x - mean)^2 and (y - mean)^2; of a constant leaf they are 0."""
    with np.errstate(invalid="ignore"):  # infinities of both signs: the mean is NaN
        mean_x, mean_y = (sum(float(piece.sum()) for piece in _pieces(flat)) / flat.size for flat in (x, y))
    if not (isfinite(mean_x) and isfinite(mean_y)):
        return nan, nan, nan
    xy = xx = yy = 0.0
    for piece_x, piece_y in zip(_pieces(x), _pieces(y), strict=True):
        piece_x -= mean_x
        piece_y -= mean_y
        xy += float((piece_x * piece_y).sum())
        xx += float(np.square(piece_x, out=piece_x).sum())
        yy += float(np.square(piece_y, out=piece_y).sum())
    if xx <= x.size * (_RESOLUTION * mean_x) ** 2:
        xx = xy = 0.0
    if yy <= y.size * (_RESOLUTION * mean_y) ** 2:
        yy = xy = 0.0
    return xy, xx, yy


def _pieces(flat: Leaf) -> Iterator[NDArray[np.float64]]:
    for start in range(0, flat.size, _PIECE_VALUES):
        yield flat[start : start + _PIECE_VALUES].astype(np.float64)


def _each(names: Sequence[str], cosines: Sequence[float]) -> list[str]:
    return [f"{name} (cosine {cosine:.2f})" for name, cosine in zip(names, cosines, strict=True)]
