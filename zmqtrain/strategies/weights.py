"""What each contribution weighs: by its node's score (selection), and by how late it comes (staleness).

Rule 1: a score is a loss: lower is better. An unknown score (NaN) is taken for the median of the known ones: never
against its node, never for it. One that is infinite is known, and worse than all others.
Rule 2: no rule depends on the order of the scores: equal scores get equal weights.
Rule 3: staleness is counted in versions: how many aggregates were published after the one that a contribution is based
on. A node's own progress keeps its sign; no rule here turns a step round.
Source: FedAsync, Xie et al. 2019; DC-ASGD, Zheng et al. 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, isnan
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError, LocalProtocolError
from zmqtrain.core.specs import Family, Range, format_spec
from zmqtrain.core.types import PeerId, Score

Vector = NDArray[np.float32]

_PIECE_VALUES = 65_536  # so many at a time are made float64
_LARGEST_VALUE = float(np.finfo(np.float32).max)


class StalenessRule(NamedTuple):
    """What becomes of a late contribution.

    name: the canonical spec; `staleness_from_spec(name)` gives this very rule.
    damping(staleness): versions, >= 0 -> the factor that the contribution is multiplied by, in (0, 1]; 1 if not late.
      Raises LocalProtocolError below 0.
    strength: of `compensate`, 0: no compensation.
    versions: how many old versions of what was published the hub keeps for it, 0: none. What is older than all of them
      is compensated from the oldest.
    """

    name: str
    damping: Callable[[int], float]
    strength: float
    versions: int


def constant() -> StalenessRule:
    """Count late progress in full: damping lost every comparison in which nodes keep their own progress."""
    return StalenessRule("constant", lambda staleness: _polynomial(staleness, 0.0), 0.0, 0)


def polynomial(power: float = 0.5) -> StalenessRule:
    """Damp by (1 + staleness) ** -power.

    Source: Xie et al. 2019, Asynchronous federated optimization (their a is power); FedBuff takes power 0.5 too.
    """
    return StalenessRule(
        format_spec("polynomial", {"power": power}), lambda staleness: _polynomial(staleness, power), 0.0, 0
    )


def compensation(strength: float = 0.1, versions: int = 8) -> StalenessRule:
    """Count late progress whole, as `compensate` corrects it for what was published since its base."""
    name = format_spec("compensation", {"strength": strength, "versions": versions})
    return StalenessRule(name, lambda staleness: _polynomial(staleness, 0.0), strength, versions)


def compensate(u: Vector, moved: Vector, strength: float) -> Vector:
    """Return what the progress u would about have been, had its node begun at what is published now: a new float32[m].

    u: float32[m], finite, the progress of some local steps; moved: float32[m], published now - published at u's base.

    A gradient taken at w + moved is about g + h * moved, where h is the curvature; DC-ASGD puts lambda * g * g for its
    diagonal. Progress is u = -rate * g, so u' = u - rate * lambda * g * g * moved, and g * g is u * u up to a factor.
    Here that factor is such that `strength` is free of rates and units: with q the mean of u * u,

        u' = u - strength * (u * u / q) * moved  =  u * (1 - strength * u * moved / q)

    At a parameter of usual progress (u * u = q) the local steps undo the share `strength` of any displacement, as a
    positive curvature has it: where the shared parameters have already moved the way of u, u' is shorter; where they
    moved against it, longer. The factor of u is held in [0, 2]: no value changes its sign or more than doubles.
    One u * u is a noisy measure of curvature: if u is normal noise, the error is least with the strength at a third of
    the share that is really undone (and then 0.82 of what it is without any); at two thirds nothing is gained.
    q is taken over the part that is given: of a vector in slabs each has its own.
    Source: Zheng et al. 2017, Asynchronous stochastic gradient descent with delay compensation (DC-ASGD): the Taylor
    term and its diagonal; that a mean square sets the scale is from their adaptive form.
    """
    parts = [slice(start, start + _PIECE_VALUES) for start in range(0, u.size, _PIECE_VALUES)]
    square = sum(float(np.square(u[part], dtype=np.float64).sum()) for part in parts) / max(u.size, 1)
    result = u.copy()
    if square == 0 or strength == 0:
        return result
    for part in parts:
        wide = u[part].astype(np.float64)
        factor = moved[part] * wide
        factor *= -strength / square
        factor += 1
        np.clip(factor, 0, 2, out=factor)
        factor *= wide
        result[part] = np.clip(factor, -_LARGEST_VALUE, _LARGEST_VALUE, out=factor)
    return result


staleness_from_spec = Family(
    {"constant": constant, "polynomial": polynomial, "compensation": compensation},
    {"power": Range(0, 10, above=True), "strength": Range(0, 1, above=True), "versions": Range(1, 1024)},
).from_spec
"""Returns the rule of a spec such as "constant" or "polynomial:power=0.5" (see `Family`)."""


def _polynomial(staleness: int, power: float) -> float:
    if staleness < 0:
        raise LocalProtocolError(f"a contribution that is {staleness} versions late: its base is yet to be published")
    return float((1 + staleness) ** -power)


_WORST = 1e100  # a loss beyond is as good as infinite; sums and differences of what is below stay finite


class Selection(NamedTuple):
    """Which contributions count, and how much.

    name: the canonical spec; `selection_from_spec(name)` gives this very rule.
    weights(scores, own) -> one weight for each score, in [0, 1], never all 0: where none qualifies, the best counts
      (all, if several are equally good). scores: of a round's contributions of one fragment; own: the shared model's;
      NaN is unknown.
    """

    name: str
    weights: Callable[[Sequence[Score], Score], list[float]]


def everything() -> Selection:
    """Count all contributions alike, whatever their scores: the best rule while all nodes are healthy."""
    return Selection("all", lambda scores, own: [1.0] * len(scores))


def best(count: int = 2) -> Selection:
    """Count the `count` lowest scores alike; ties with the last of them count too."""

    def weights(scores: Sequence[Score], own: Score) -> list[float]:
        known = _known(scores)
        limit = sorted(known)[min(count, len(known)) - 1] if known else inf
        return [float(score <= limit) for score in known]

    return Selection(f"best:count={count}", weights)


def better() -> Selection:
    """Count contributions with a lower score than the shared model's; all, while that is unknown.

    The scores of both must be of the same data, or nearly: a loss in training is no measure for one that is held out.
    """

    def weights(scores: Sequence[Score], own: Score) -> list[float]:
        return _qualified(_known(scores), lambda score: isnan(own) or score < own)

    return Selection("better", weights)


def healthy(factor: float = 1.1) -> Selection:
    """Leave out scores above `factor` times the median: median + (factor - 1) * |median|, for scores of any sign.

    With one of four nodes training on shuffled labels this came closest to the healthy nodes alone; it costs little
    while all are healthy.
    """

    def weights(scores: Sequence[Score], own: Score) -> list[float]:
        known = _known(scores)
        middle = _median([score for score in known if isfinite(score)])
        return _qualified(known, lambda score: score <= middle + (factor - 1) * abs(middle))

    return Selection(format_spec("healthy", {"factor": factor}), weights)


def by_score(temperature: float = 1.0) -> Selection:
    """Weigh by exp(-(score - best) / (temperature * spread)): a softmax, scaled so that the best weighs 1.

    spread: the median absolute deviation of the finite scores from their median; where that is 0 (most are equal), the
    mean one. All equal weigh 1; an infinite score weighs 0.
    """

    def weights(scores: Sequence[Score], own: Score) -> list[float]:
        known = _known(scores)
        finite = [score for score in known if isfinite(score)]
        if not finite:
            return [1.0] * len(known)
        lowest, middle = min(finite), _median(finite)
        off = [abs(score - middle) for score in finite]
        spread = temperature * (median(off) or fmean(off))
        if spread == 0:
            return [float(isfinite(score)) for score in known]
        return [exp(-min((score - lowest) / spread, _WORST)) for score in known]

    return Selection(format_spec("score", {"temperature": temperature}), weights)


selection_from_spec = Family(
    {"all": everything, "best": best, "better": better, "healthy": healthy, "score": by_score},
    {"count": Range(1), "factor": Range(1), "temperature": Range(0, 1e6, above=True)},
).from_spec
"""Returns the rule of a spec such as "all" or "healthy:factor=1.1" (see `Family`)."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """When a node that keeps its own parameters gives them up for the best one's.

    patience: after so many reports in a row in which it lags, at least 1.
    margin: a score lags if it is worse than the best by more than this share of it, at least 0.
    Raises ConfigError.
    """

    patience: int = 2
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"patience={self.patience} is not at least 1")
        if not self.margin >= 0:
            raise ConfigError(f"margin={self.margin:g} is not at least 0")

    @property
    def name(self) -> str:
        """The canonical spec; `preemption_from_spec(name)` is equal to this."""
        return format_spec("score", {"patience": self.patience, "margin": float(self.margin)})

    def lagging(self, score: Score, best: Score) -> bool:
        """Return whether `score` lags behind `best`: above best + margin * |best|, or no number while best is one."""
        if not -_WORST < best < _WORST:
            return False
        return not -_WORST < score < _WORST or score > best + self.margin * abs(best)


class Laggards:
    """Who is to adopt whose parameters: the count of each peer's reports in a row in which it lagged.

    Pure bookkeeping: reports come one by one, and each is answered at once.
    """

    def __init__(self, rule: Preemption) -> None:
        self.rule = rule
        self._latest: dict[PeerId, Score] = {}
        self._lagged: dict[PeerId, int] = {}

    @property
    def best(self) -> PeerId | None:
        """The peer whose latest score is the lowest finite one, the first by id of equals; None while there is none."""
        finite = [(score, peer) for peer, score in self._latest.items() if -_WORST < score < _WORST]
        return min(finite)[1] if finite else None

    def report(self, peer: PeerId, score: Score) -> PeerId | None:
        """Take a peer's score; return the peer whose parameters it is to adopt now, or None.

        After an adoption its count begins again at 0, and its score is unknown until its next report, because its
        score was that of other parameters. A score that is no number lags behind any that is.
        """
        self._latest[peer] = score
        best = self.best
        if best is None or not self.rule.lagging(score, self._latest[best]):
            self._lagged.pop(peer, None)
            return None
        self._lagged[peer] = self._lagged.get(peer, 0) + 1
        if self._lagged[peer] < self.rule.patience:
            return None
        self.forget(peer)
        return best

    def forget(self, peer: PeerId) -> None:
        """Drop what is known of a peer that has left; others are measured against those that remain."""
        self._latest.pop(peer, None)
        self._lagged.pop(peer, None)


_PREEMPTIONS = Family[Preemption | None]({"score": Preemption, "none": lambda: None})


def preemption_from_spec(text: str) -> Preemption | None:
    """Return the rule of a spec such as "score:patience=2,margin=0.05"; None for "none".

    Raises ConfigError: an unknown name or argument, a patience below 1, a margin below 0.
    """
    try:
        return _PREEMPTIONS.from_spec(text)
    except ConfigError as error:
        raise ConfigError(str(error) if repr(text) in str(error) else f"{text!r}: {error}") from None


def _known(scores: Sequence[Score]) -> list[Score]:
    """Return the scores, the unknown ones (and what no loss can be) at the median of the finite known ones."""
    cut = [inf if score >= _WORST else score for score in scores]
    finite = [score for score in cut if -_WORST < score < _WORST]
    middle = _median(finite)
    return [score if score > -_WORST else middle for score in cut]


def _median(scores: Sequence[Score]) -> Score:
    return median(scores) if scores else 0.0


def _qualified(scores: Sequence[Score], qualifies: Callable[[Score], bool]) -> list[float]:
    weights = [float(qualifies(score)) for score in scores]
    if any(weights):
        return weights
    return [float(score == min(scores)) for score in scores]
