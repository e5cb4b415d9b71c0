"""Measure how noisy the nodes' deltas are, and from it how much sooner n nodes reach a loss than one.

With deltas g_i = g + noise_i, of c_i deltas by node i in a window, G_i their sums:

    |g|^2 = (|sum G_i|^2 - sum |G_i|^2) / ((sum c_i)^2 - sum c_i^2)
    s^2 = (sum |G_i|^2 - |g|^2 sum c_i^2) / sum c_i

are unbiased, and B = s^2 / |g|^2 is the noise scale in units of one node's delta: with B nodes, half of
the mean's energy is noise.
With one delta a node this is (n |mean|^2 - mean |g_i|^2) / (n - 1) and n / (n - 1) (mean |g_i|^2 - |mean|^2).

Rule 1: a window holds several deltas of each node, because one delta shows too little: momentum spreads the noise of a
step over later deltas, and a codec with error feedback sends later what it leaves out now. A window's sums hold both.
Rule 2: pure: no clock, no socket, no thread; bounded in nodes and in values.
Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, secs. 2.2 and appendix A.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

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
        """Take it that a round of a fragment is over: if its window is full, the estimate is made from it."""
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
