"""Say what a contribution weighs that comes late, and what it should have been.

Rule 1: staleness is counted in versions: how many aggregates were published after the one that a contribution is based
on.  Rule 2: a node's own progress keeps its sign; no rule here turns a step round.
Source: FedAsync, Xie et al. 2019; DC-ASGD, Zheng et al. 2017.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.specs import Family, Range, format_spec

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
    """Let late progress count whole: damping lost in every comparison where each node's own progress is kept."""
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
    power=Range(0, 10, above=True),
    strength=Range(0, 1, above=True),
    versions=Range(1, 1024),
).from_spec
"""Returns the rule of a spec such as "constant" or "polynomial:power=0.5" (see `Family`)."""


def _polynomial(staleness: int, power: float) -> float:
    if staleness < 0:
        raise LocalProtocolError(f"a contribution that is {staleness} versions late: its base is yet to be published")
    return float((1 + staleness) ** -power)
