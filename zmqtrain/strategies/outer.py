"""Turn the mean of the nodes' deltas into the step that the hub makes.

Rule 1: a *gradient* is a mean delta, so a step is added, not taken away.  Rule 2: state is float32 arrays as long as
the parameters, changed in place; part of a vector may be stepped with views of its state, in any order of the parts.
Source: DiLoCo, Douillard et al. 2023; Nesterov momentum as in Sutskever et al. 2013.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.specs import Number, format_spec, parse_spec

__all__ = ["FAMILIES", "OuterOptimizer", "nesterov", "outer_from_spec", "sgd"]

Vector = NDArray[np.float32]
State = Mapping[str, Vector]

_PIECE_VALUES = 65_536  # gradient, momentum and step stay in a core's cache between the passes

_LARGEST_RATE = 1000.0

FAMILIES: dict[str, dict[str, Number]] = {
    "sgd": {"rate": 1.0},
    "nesterov": {"rate": 0.8, "momentum": 0.5},
}
"""Each member of the family and the defaults of its arguments."""


class OuterOptimizer(NamedTuple):
    """How the hub steps.

    name: the canonical spec; `outer_from_spec(name)` gives this very optimizer.
    init(n): the state for n parameters, float32[n] arrays by name, zeros.
    update(gradient, state): gradient float32[n], state as from init(n), or views of a part of it -> the step,
      float32[n], a new array to be added to the parameters. The state is changed in place, the gradient is not.
    """

    name: str
    init: Callable[[int], State]
    update: Callable[[Vector, State], Vector]


def sgd(rate: float = 1.0) -> OuterOptimizer:
    """Step by rate * gradient. With rate 1 this is plain averaging, the safe fallback."""

    def update(gradient: Vector, state: State) -> Vector:
        return gradient * np.float32(rate)

    return OuterOptimizer(_name("sgd", rate=rate), lambda count: {}, update)


def nesterov(rate: float = 0.8, momentum: float = 0.5) -> OuterOptimizer:
    """m = momentum * m + gradient; step by rate * (gradient + momentum * m).

    The defaults won over 24-32 rounds; DiLoCo's own (0.7, 0.9) lost to plain averaging there and diverges with delay.
    """

    def update(gradient: Vector, state: State) -> Vector:
        step, eta, mu = np.empty_like(gradient), np.float32(rate), np.float32(momentum)
        for start in range(0, gradient.size, _PIECE_VALUES):
            part = slice(start, start + _PIECE_VALUES)
            g, m, q = gradient[part], state["momentum"][part], step[part]
            np.multiply(m, mu, out=m)
            np.add(m, g, out=m)
            np.multiply(m, mu, out=q)
            np.add(q, g, out=q)
            np.multiply(q, eta, out=q)
        return step

    def init(count: int) -> dict[str, Vector]:
        return {"momentum": np.zeros(count, np.float32)}

    return OuterOptimizer(_name("nesterov", rate=rate, momentum=momentum), init, update)


_MEMBERS: dict[str, Callable[..., OuterOptimizer]] = {"sgd": sgd, "nesterov": nesterov}
_made: dict[str, OuterOptimizer] = {}


def outer_from_spec(text: str) -> OuterOptimizer:
    """Return the optimizer of a spec such as "nesterov:rate=0.8,momentum=0.5"; what is left out takes its default.

    Raises ConfigError: an unknown name or argument, a rate outside (0, 1000], a momentum outside [0, 1).
    """
    name, arguments = parse_spec(text, FAMILIES)
    if not 0 < arguments["rate"] <= _LARGEST_RATE:
        raise ConfigError(f"{text!r}: rate={arguments['rate']:g} is not in 0 < rate <= {_LARGEST_RATE:g}")
    if not 0 <= arguments.get("momentum", 0) < 1:
        raise ConfigError(f"{text!r}: momentum={arguments['momentum']:g} is not in 0 <= momentum < 1")
    canonical = format_spec(name, arguments)
    if canonical not in _made:
        _made.setdefault(canonical, _MEMBERS[name](**arguments))
    return _made[canonical]


def _name(name: str, **arguments: Any) -> str:
    return format_spec(name, {key: float(value) for key, value in arguments.items()})
