"""Make the step that the server makes of a gradient: SGD, momentum, Adam.

Rule 1: a *gradient* points uphill: a step is taken away.  Rule 2: values and state are changed in place, and any part
of them may be stepped by itself with the views of its state: no value looks at another.  Rule 3: the arithmetic, in the
dtype of the values and in this order, is that of optax.sgd and optax.adam.
Source: momentum as in Sutskever et al. 2013; Adam: Kingma and Ba 2015, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import Number, format_spec, parse_spec

Vector = NDArray[Any]
State = Mapping[str, Vector]

FAMILIES: dict[str, dict[str, Number]] = {
    "sgd": {"rate": 0.01},
    "momentum": {"rate": 0.01, "momentum": 0.9, "nesterov": 0},
    "adam": {"rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
}
"""Each member of the family and the defaults of its arguments."""

_LARGEST_RATE = 1000.0


class ServerOptimizer(NamedTuple):
    """How a key's values follow from gradients.

    name: the canonical spec; `optimizer_from_spec(name)` gives this very optimizer.
    slots: the names of its state, each an array like the values, zeros at first.
    update(values, gradient, state, step): step number `step`, from 1 on. All are flat arrays of one dtype, or views of
      the same part of them; values and state are changed in place, and the gradient is used up.
    """

    name: str
    slots: tuple[str, ...]
    update: Callable[[Vector, Vector, State, int], None]


def sgd(rate: float = 0.01) -> ServerOptimizer:
    """w = w - rate * g."""

    def update(values: Vector, gradient: Vector, state: State, step: int) -> None:
        np.multiply(gradient, values.dtype.type(-rate), out=gradient)
        np.add(values, gradient, out=values)

    return ServerOptimizer(format_spec("sgd", {"rate": float(rate)}), (), update)


def momentum(rate: float = 0.01, momentum: float = 0.9, nesterov: int = 0) -> ServerOptimizer:
    """m = g + momentum * m; w = w - rate * m, or with nesterov 1, w - rate * (g + momentum * m)."""

    def update(values: Vector, gradient: Vector, state: State, step: int) -> None:
        number, trace = values.dtype.type, state["trace"]
        np.multiply(trace, number(momentum), out=trace)
        np.add(gradient, trace, out=trace)
        if nesterov:
            np.add(gradient, number(momentum) * trace, out=gradient)
            np.multiply(gradient, number(-rate), out=gradient)
        else:
            np.multiply(trace, number(-rate), out=gradient)
        np.add(values, gradient, out=values)

    arguments = {"rate": float(rate), "momentum": float(momentum), "nesterov": int(nesterov)}
    return ServerOptimizer(format_spec("momentum", arguments), ("trace",), update)


def adam(rate: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> ServerOptimizer:
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w = w - rate * m' / (sqrt(v') + epsilon).

    m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t) at step t.
    """

    def update(values: Vector, gradient: Vector, state: State, step: int) -> None:
        number, mean, square = values.dtype.type, state["mean"], state["square"]
        with np.errstate(under="ignore"):
            np.multiply(mean, number(beta1), out=mean)
            np.add(number(1 - beta1) * gradient, mean, out=mean)
            np.square(gradient, out=gradient)
            np.multiply(gradient, number(1 - beta2), out=gradient)
            np.multiply(square, number(beta2), out=square)
            np.add(gradient, square, out=square)
            np.divide(square, number(1 - beta2**step), out=gradient)
            np.sqrt(gradient, out=gradient)
            np.add(gradient, number(epsilon), out=gradient)
            np.divide(mean / number(1 - beta1**step), gradient, out=gradient)
            np.multiply(gradient, number(-rate), out=gradient)
        np.add(values, gradient, out=values)

    arguments = {"rate": rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    name = format_spec("adam", {argument: float(value) for argument, value in arguments.items()})
    return ServerOptimizer(name, ("mean", "square"), update)


_MEMBERS: dict[str, Callable[..., ServerOptimizer]] = {"sgd": sgd, "momentum": momentum, "adam": adam}


def optimizer_from_spec(text: str) -> ServerOptimizer:
    """Return the optimizer of a spec such as "momentum:rate=0.1,momentum=0.9"; what is left out takes its default.

    Raises ConfigError: an unknown name or argument; a rate outside (0, 1000]; a momentum, beta1 or beta2 outside
    [0, 1); an epsilon outside [1e-30, 1]; a nesterov that is neither 0 nor 1.
    """
    name, arguments = parse_spec(text, FAMILIES)
    for argument, value in arguments.items():
        if argument == "rate":
            fits, wanted = 0 < value <= _LARGEST_RATE, f"0 < rate <= {_LARGEST_RATE:g}"
        elif argument == "epsilon":
            fits, wanted = 1e-30 <= value <= 1, "1e-30 <= epsilon <= 1"
        elif argument == "nesterov":
            fits, wanted = value in (0, 1), "nesterov=0 or nesterov=1"
        else:
            fits, wanted = 0 <= value < 1, f"0 <= {argument} < 1"
        if not fits:
            raise ConfigError(f"{text!r}: {argument}={value:g} is not in {wanted}")
    return _MEMBERS[name](**arguments)
