"""Outer optimizers: the hub's step from the mean of the nodes' deltas.

Rule 1: a *gradient* is a mean delta, so a step is added, not taken away.  Rule 2: state is float32 arrays as long as
the parameters, changed in place; part of a vector may be stepped with views of its state, in any order of the parts.
Rule 3: a *turn* is when the contributions of one whole federation have come; only delayed rules look at it.
Source: DiLoCo, Douillard et al. 2023; Nesterov momentum as in Sutskever et al. 2013; Delayed Nesterov, Liu et al. 2024;
FedAdam, Reddi et al. 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.specs import Family, Range, format_spec

Vector = NDArray[np.float32]
State = Mapping[str, Vector]

_PIECE_VALUES = 65_536  # gradient, state and step stay in a core's cache between the passes

_LARGEST_VALUE = np.finfo(np.float32).max


class OuterOptimizer(NamedTuple):
    """How the hub steps.

    name: the canonical spec; `outer_from_spec(name)` gives this very optimizer.
    init(n): the state for n parameters before the first step, float32[n] arrays by name.
    update(gradient, state, turn): gradient float32[n], state as from init(n), or views of a part of it -> the step,
      float32[n], a new array to be added to the parameters. The state is changed in place, the gradient is not.
      turn: True when, with this one, the contributions of a whole federation have come since the last turn (the sum of
      contributions / live nodes over the releases has reached 1); every part of one gradient is given the same.
    rate, momentum: of an optimizer that steps as `Step` of codecs/codec.py says: with a momentum, m is its state
      `momentum`; where momentum is None it has no state. An optimizer that does anything else has no rate (None).
    """

    name: str
    init: Callable[[int], State]
    update: Callable[[Vector, State, bool], Vector]
    rate: float | None = None
    momentum: float | None = None


def sgd(rate: float = 1.0) -> OuterOptimizer:
    """Step by rate * gradient. With rate 1 this is plain averaging, the safe fallback."""

    def update(gradient: Vector, state: State, turn: bool) -> Vector:
        return gradient * np.float32(rate)

    return OuterOptimizer(format_spec("sgd", {"rate": rate}), lambda count: {}, update, rate)


def nesterov(rate: float = 0.8, momentum: float = 0.5) -> OuterOptimizer:
    """m = momentum * m + gradient; step by rate * (gradient + momentum * m).

    The defaults won over 24-32 rounds; DiLoCo's own (0.7, 0.9) lost to plain averaging there and diverges with delay.
    """

    def update(gradient: Vector, state: State, turn: bool) -> Vector:
        step, eta, mu = np.empty_like(gradient), np.float32(rate), np.float32(momentum)
        for part in _pieces(gradient.size):
            g, m, q = gradient[part], state["momentum"][part], step[part]
            np.multiply(m, mu, out=m)
            np.add(m, g, out=m)
            np.multiply(m, mu, out=q)
            np.add(q, g, out=q)
            np.multiply(q, eta, out=q)
        return step

    def init(count: int) -> dict[str, Vector]:
        return {"momentum": np.zeros(count, np.float32)}

    return OuterOptimizer(format_spec("nesterov", {"rate": rate, "momentum": momentum}), init, update, rate, momentum)


def delayed_nesterov(rate: float = 0.8, momentum: float = 0.5, share: float = 0.0) -> OuterOptimizer:
    """Step plainly by each gradient as it comes; move the momentum once per turn, by all that came since the last one.

    With g = (contributions / live) * their mean, mu the momentum, B the sum of the g since the last turn (B += g), and
    share 0:

        no turn:  step by rate * g
        turn:     m = mu * m + B;  step by rate * (g + mu * m);  B = 0

    So the steps from one turn to the next add up to rate * (B + mu * m): exactly one Nesterov step on B, which is the
    mean of the federation's contributions (of N equal ones u, each comes as g = u / N), in whatever groups they came.
    Momentum that moved at each arrival would decay N times as fast and point along the last contribution.

    share, in [0, 1], gives part of the momentum's step before the turn: with A what has been given ahead, an arrival
    that is no turn steps by rate * (g + a), a = share * (mu * (mu * m + B) - A), A += a; a turn steps by
    rate * (g + mu * m - A), A = 0. The sum over a turn is the same Nesterov step for every share; a larger one has it
    earlier. The paper gives c * mu * m ahead, c in [0, 1 / N], and takes (N - 1) * c * mu * m (of the next m) back; the
    form here needs no N, which changes as nodes come and go. With share 0 the two are one.

    The state is mu * m + B in one array, `gathered`, and with a share also A, `ahead`.
    Source: Liu et al. 2024, Asynchronous Local-SGD Training for Language Modeling, Algorithm 3.
    """

    def update(gradient: Vector, state: State, turn: bool) -> Vector:
        step, eta, mu, c = np.empty_like(gradient), np.float32(rate), np.float32(momentum), np.float32(share)
        for part in _pieces(gradient.size):
            g, gathered, q = gradient[part], state["gathered"][part], step[part]
            ahead = state["ahead"][part] if share else None
            np.add(gathered, g, out=gathered)
            if turn:
                np.multiply(gathered, mu, out=gathered)
                if ahead is None:
                    np.add(gathered, g, out=q)
                else:
                    np.subtract(gathered, ahead, out=q)
                    np.add(q, g, out=q)
                    ahead.fill(0)
                np.multiply(q, eta, out=q)
            elif ahead is None:
                np.multiply(g, eta, out=q)
            else:
                np.multiply(gathered, mu, out=q)
                np.subtract(q, ahead, out=q)
                np.multiply(q, c, out=q)
                np.add(ahead, q, out=ahead)
                np.add(q, g, out=q)
                np.multiply(q, eta, out=q)
        return step

    def init(count: int) -> dict[str, Vector]:
        return {name: np.zeros(count, np.float32) for name in (("gathered", "ahead") if share else ("gathered",))}

    return OuterOptimizer(
        format_spec("delayed_nesterov", {"rate": rate, "momentum": momentum, "share": share}), init, update
    )


def adam(rate: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, epsilon: float = 0.001) -> OuterOptimizer:
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; step by rate * m / (sqrt(v) + epsilon).

    v begins at epsilon^2, m at 0, and neither is corrected for it. epsilon is in the units of a delta: where deltas are
    much smaller, the step is rate / epsilon * m. A gradient with a square beyond float32 leaves v at the largest one:
    damped for a long time, never infinite.
    Source: FedAdam, Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2 (their tau is epsilon).
    """

    def update(gradient: Vector, state: State, turn: bool) -> Vector:
        step, eta, tau = np.empty_like(gradient), np.float32(rate), np.float32(epsilon)
        decay, new = (np.float32(beta1), np.float32(beta2)), (np.float32(1 - beta1), np.float32(1 - beta2))
        for part in _pieces(gradient.size):
            g, m, v, q = gradient[part], state["mean"][part], state["square"][part], step[part]
            np.multiply(g, new[0], out=q)
            np.multiply(m, decay[0], out=m)
            np.add(m, q, out=m)
            with np.errstate(over="ignore", under="ignore"):
                np.square(g, out=q)
                np.multiply(q, new[1], out=q)
                np.multiply(v, decay[1], out=v)
                np.add(v, q, out=v)
            np.minimum(v, _LARGEST_VALUE, out=v)
            np.sqrt(v, out=q)
            np.add(q, tau, out=q)
            np.divide(m, q, out=q)
            np.multiply(q, eta, out=q)
        return step

    def init(count: int) -> dict[str, Vector]:
        return {"mean": np.zeros(count, np.float32), "square": np.full(count, epsilon**2, np.float32)}

    return OuterOptimizer(
        format_spec("adam", {"rate": rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}), init, update
    )


OUTER_OPTIMIZERS = Family(
    {"sgd": sgd, "nesterov": nesterov, "delayed_nesterov": delayed_nesterov, "adam": adam},
    {
        "rate": Range(0, 1000, above=True),
        "share": Range(0, 1),
        "epsilon": Range(1e-12, 1),  # its square is still a normal float32
        **dict.fromkeys(("momentum", "beta1", "beta2"), Range(0, 1, below=True)),
    },
)
outer_from_spec = OUTER_OPTIMIZERS.from_spec
"""Returns the optimizer of a spec such as "nesterov:rate=0.8,momentum=0.5" (see `Family`)."""


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, _PIECE_VALUES):
        yield slice(start, start + _PIECE_VALUES)
