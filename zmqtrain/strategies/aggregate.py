"""How a round's contributions become one: their weights, and their combination.

Rule 1: a contribution is progress that some node made; what is left out here is left out for its weight or its values,
never for coming late.  Rule 2: a weight of 0 means left out: nothing of it counts, and the others count for it.
Rule 3: the order of the contributions does not matter beyond rounding.
Source: FedAvg, McMahan et al. 2017; trimmed mean and median, Yin et al. 2018; sign majority, Bernstein et al. 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import floor, isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.specs import Family, Range, format_spec

Vector = NDArray[np.float32]

Combine = Callable[[Sequence[Vector], Sequence[float]], Vector]

_PIECE_VALUES = 8192
_ROUNDING = 1e-9  # what a share of a count, or a half of a sum of weights, may be off by


def mean_over_live(total: Vector, live: int, out: Vector | None = None) -> Vector:
    """Return total / live, float32[n]: the sum of a round's deltas over the number of live nodes; in `out` if given.

    Live nodes, not messages in the round: a round that closes with 2 of 4 deltas carries half of the federation's
    progress, and the other half comes in the next. Divided by 2 each, the two rounds would move the parameters twice as
    far as one round of 4: the step would grow with every straggler. Over the live nodes, any grouping of the same
    deltas into rounds moves the parameters by the same sum.  Raises LocalProtocolError if live < 1.
    """
    if live < 1:
        raise LocalProtocolError(f"a mean over {live} live nodes was asked for")
    return np.divide(total, np.float32(live), out=out)


class Aggregation(NamedTuple):
    """How a round's contributions become one.

    name: the canonical spec; `aggregation_from_spec(name)` gives this very rule.
    streams: a running weighted sum is enough (combine = sum of weight * contribution / sum of weights): nobody needs to
      hold the contributions apart.
    weigh(samples of each) -> their weights, > 0.
    scales(L2 norms of the whole contributions that count) -> factors in [0, 1], by which the contributions are
      multiplied before they are combined.
    combine(contributions, weights) -> their average, a new float32[m]. contributions: the same part of each, finite
      float32[m], which is not changed; weights >= 0. Raises LocalProtocolError if no weight is above 0, or the lengths
      differ.
    """

    name: str
    streams: bool
    weigh: Callable[[Sequence[int]], list[float]]
    scales: Callable[[Sequence[float]], list[float]]
    combine: Combine


def mean() -> Aggregation:
    """Weigh every contribution alike: sum of weight * x / sum of weights, with weights of 1 unless a selection says."""
    return Aggregation("mean", True, _ones, _ones, _weighted_mean)


def weighted() -> Aggregation:
    """Weigh a contribution by the samples behind it.

    One without samples (a node that drains what it still has pending) weighs as one sample: it is progress too.
    Source: McMahan et al. 2017, Algorithm 1.
    """

    def weigh(samples: Sequence[int]) -> list[float]:
        return [float(max(count, 1)) for count in samples]

    return Aggregation("weighted", True, weigh, _ones, _weighted_mean)


def trimmed(share: float = 0.25) -> Aggregation:
    """Average, for each parameter, what is left of n values without the floor(share * n) lowest and as many highest.

    So many hostile contributions as are cut at one end cannot pull a value out of the range of the others. With unequal
    weights, what is left is averaged by weight; of equal values the lighter counts as the lower.
    Source: Yin et al. 2018, Byzantine-robust distributed learning, Definition 2.
    """

    def combine(contributions: Sequence[Vector], weights: Sequence[float]) -> Vector:
        values, heavy = _sorted(contributions, weights)
        cut = min(floor(share * len(values) + _ROUNDING), (len(values) - 1) // 2)
        kept = slice(cut, len(values) - cut)
        if heavy is None:
            return _weighted_mean(values[kept], [1.0] * len(values[kept]))
        total = np.sum(heavy[kept], axis=0)
        result = np.zeros(total.size)
        for value, weight in zip(values[kept], heavy[kept], strict=True):
            result += value * (weight / total)
        return result.astype(np.float32)

    return Aggregation(format_spec("trimmed", {"share": share}), False, _ones, _ones, _in_pieces(combine))


def median() -> Aggregation:
    """Take the median of each parameter: with unequal weights the value that has half of the weight below it.

    Where the halves meet between two values (an even number of equal weights), it is the middle of the two. Hostile
    contributions of less than half of the weight cannot pull a value out of the range of the others.
    Source: Yin et al. 2018, Definition 1.
    """

    def combine(contributions: Sequence[Vector], weights: Sequence[float]) -> Vector:
        values, heavy = _sorted(contributions, weights)
        if heavy is None:
            low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        else:
            half = np.sum(heavy, axis=0) / 2
            low, high, below = values[0].copy(), values[0].copy(), np.zeros(half.size)
            for value, weight in zip(values, heavy, strict=True):
                _take_over(low, value, below < half * (1 - _ROUNDING))
                _take_over(high, value, below <= half * (1 + _ROUNDING))
                below += weight
        middle: Vector = low * np.float32(0.5) + high * np.float32(0.5)  # their sum may be no float32
        return middle

    return Aggregation("median", False, _ones, _ones, _in_pieces(combine))


def majority() -> Aggregation:
    """Vote on each parameter's sign, by weight; step that way by the weighted mean magnitude (0 abstains; a tie is 0).

    Where all agree, it is the mean. A hostile minority cannot turn a sign, but it can lengthen a step.
    Source: Bernstein et al. 2018, signSGD with majority vote (whose steps have one magnitude for all parameters).
    """

    def combine(contributions: Sequence[Vector], weights: Sequence[float]) -> Vector:
        present, kept = _present(contributions, weights)
        magnitude = _weighted_mean([np.abs(one) for one in present], kept)
        vote = np.zeros(magnitude.size)
        for one, weight in sorted(zip(present, kept, strict=True), key=lambda pair: pair[1]):
            vote += np.sign(one) * np.float64(weight)
        vote[np.abs(vote) <= _ROUNDING * sum(kept)] = 0.0
        return np.multiply(magnitude, np.sign(vote), out=magnitude, casting="same_kind")

    return Aggregation("majority", False, _ones, _ones, _in_pieces(combine))


def clipped(factor: float = 2.0) -> Aggregation:
    """Shorten each contribution to at most `factor` times the median norm, then average by weight.

    The median is over the norms above 0 (a node with nothing to say sets no measure), the lower of two middle ones: of
    two contributions the shorter sets it. A norm that is not finite is scaled to 0.
    """

    def scales(norms: Sequence[float]) -> list[float]:
        known = sorted(norm for norm in norms if isfinite(norm) and norm > 0)
        if not known:
            return [1.0 if norm == 0 else 0.0 for norm in norms]
        longest = factor * known[(len(known) - 1) // 2]
        return [1.0 if norm <= longest else longest / norm if isfinite(norm) else 0.0 for norm in norms]

    return Aggregation(format_spec("clipped", {"factor": factor}), False, _ones, scales, _weighted_mean)


aggregation_from_spec = Family(
    {
        "mean": mean,
        "weighted": weighted,
        "trimmed": trimmed,
        "median": median,
        "majority": majority,
        "clipped": clipped,
    },
    {"share": Range(0, 0.5, below=True), "factor": Range(1)},
).from_spec
"""Returns the rule of a spec such as "mean" or "trimmed:share=0.25" (see `Family`)."""


def _ones(of_each: Sequence[float]) -> list[float]:
    return [1.0] * len(of_each)


def _present(contributions: Sequence[Vector], weights: Sequence[float]) -> tuple[list[Vector], list[float]]:
    if len(contributions) != len(weights):
        raise LocalProtocolError(f"{len(contributions)} contributions were given {len(weights)} weights")
    pairs = [(one, float(weight)) for one, weight in zip(contributions, weights, strict=True) if weight > 0]
    if not pairs:
        raise LocalProtocolError(f"an average of {len(contributions)} contributions without any weight was asked for")
    return [one for one, _ in pairs], [weight for _, weight in pairs]


def _take_over(out: Vector, values: Vector, where: NDArray[np.bool_]) -> None:
    bits = out.view(np.int32)
    bits ^= (bits ^ values.view(np.int32)) * where


def _in_pieces(combine: Combine) -> Combine:
    """Return a `combine` that takes as much at a time as stays in a core's cache between the passes."""

    def in_pieces(contributions: Sequence[Vector], weights: Sequence[float]) -> Vector:
        present, kept = _present(contributions, weights)
        result = np.empty_like(present[0])
        for start in range(0, result.size, _PIECE_VALUES):
            part = slice(start, start + _PIECE_VALUES)
            result[part] = combine([one[part] for one in present], kept)
        return result

    return in_pieces


def _sorted(
    contributions: Sequence[Vector], weights: Sequence[float]
) -> tuple[list[Vector], list[NDArray[np.float64]] | None]:
    """Return those with weight, sorted for each parameter: n float32[m], and their weights (None: all are equal)."""
    present, kept = _present(contributions, weights)
    if min(kept) == max(kept):
        values, spare = [one.copy() for one in present], np.empty_like(present[0])
        for i, j in _comparisons(len(values)):
            np.minimum(values[i], values[j], out=spare)
            np.maximum(values[i], values[j], out=values[j])
            values[i], spare = spare, values[i]
        return values, None
    values, whose = list(present), [np.full(present[0].size, i, np.uint16) for i in np.argsort(np.argsort(kept))]
    for i, j in _comparisons(len(values)):
        x, y, u, v = values[i], values[j], whose[i], whose[j]
        swapped = (u ^ v) * ((x > y) | ((x == y) & (u > v)))  # bits, not np.where: four times as fast
        values[i], values[j] = np.minimum(x, y), np.maximum(x, y)
        whose[i], whose[j] = u ^ swapped, v ^ swapped
    heavy = np.sort(kept)
    return values, [heavy[ranks] for ranks in whose]


@cache
def _comparisons(count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs (i, j), i < j, to put in order one after the other, so that `count` items are sorted.

    On whole vectors it is 5 to 20 times as fast as sorting down the columns.  Source: Knuth, 5.2.2, Algorithm M.
    """
    pairs: list[tuple[int, int]] = []
    top = p = 1 << (count - 1).bit_length() >> 1
    while p:
        q, r, distance = top, 0, p
        while True:
            pairs += [(i, i + distance) for i in range(count - distance) if i & p == r]
            if q == p:
                break
            distance, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(pairs)


def _weighted_mean(contributions: Sequence[Vector], weights: Sequence[float]) -> Vector:
    present, kept = _present(contributions, weights)
    total = sum(kept)  # each is divided first: a sum of huge values may be no float32, their mean is one
    result = present[0] * np.float32(kept[0] / total)
    product = np.empty_like(result)
    for one, weight in zip(present[1:], kept[1:], strict=True):
        np.multiply(one, np.float32(weight / total), out=product)
        np.add(result, product, out=result)
    return result
