"""Random delays that make a node slow and its deltas late on purpose, for experiments (pure: no jax).

Rule 1: what is drawn depends on the seed, the node's name and what it is for, and on nothing else.
Rule 2: seconds are drawn here and slept elsewhere, on the clock of the run, which may be a virtual one.
Source: the mixtures `niagara` and `cedar`, and the delay |N(0, sigma)| of messages, are those of the code of Anytime
Minibatch and of Al-Lawati et al., JSAIT 2021 (thadikari/anytime on GitHub, src/run_perf_amb.py and src/nodes.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

from zmqtrain.core.errors import ConfigError

Mixture = tuple[tuple[float, float, float], ...]

MIXTURES: dict[str, Mixture] = {
    "niagara": ((0.0, 0.0, 0.4), (0.0, 0.4, 0.3), (2.0, 0.3, 0.2), (5.0, 0.3, 0.1)),
    "cedar": ((0.0, 0.0, 0.4), (0.05, 0.04, 0.3), (0.15, 0.03, 0.2), (0.25, 0.03, 0.1)),
}
"""Mixtures by name: of each component the mean and the standard deviation, in seconds, and the weight.

Named after clusters of Compute Canada, as there; niagara's delays are of seconds, cedar's of tenths of a second.
"""

CHOICES = (
    f"{', '.join(MIXTURES)}, mixture=0.1:0.02:0.8/0.3:0.05:0.2 (of each component mean:deviation:weight, in seconds), "
    "scale=0.1 (times the mixture) and message=0.05 (deviation of a delta's delay, in seconds), as in "
    "cedar,message=0.05"
)


@dataclass(frozen=True, slots=True)
class Induced:
    """Delays that make stragglers: one per step from a Gaussian mixture, one per delta of |N(0, sigma)|, in seconds.

    compute: (mean, standard deviation, weight) of each component; weights count relative to their sum; () for none.
    A draw below zero counts by its absolute value, as in the code that the named mixtures come from.
    Raises ConfigError: a deviation below 0, a weight that is not above.
    """

    compute: Mixture = ()
    message_sigma: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for component in self.compute:
            mean, deviation, weight = component
            if not (all(map(isfinite, component)) and deviation >= 0 and weight > 0):
                raise ConfigError(
                    f"a component of a mixture of delays is mean:deviation:weight with deviation >= 0 and weight > 0, "
                    f"got {mean:g}:{deviation:g}:{weight:g}"
                )
        if not (isfinite(self.message_sigma) and self.message_sigma >= 0):
            raise ConfigError(f"the deviation of a delta's delay must be at least 0 s, got {self.message_sigma:g}")
        if self.seed < 0:
            raise ConfigError(f"the seed of induced delays must be at least 0, got {self.seed}")

    def compute_seconds(self, generator: np.random.Generator) -> float:
        if not self.compute:
            return 0.0
        weights = np.array([weight for _, _, weight in self.compute])
        mean, deviation, _ = self.compute[generator.choice(len(weights), p=weights / weights.sum())]
        return abs(float(generator.normal(mean, deviation)))

    def message_seconds(self, generator: np.random.Generator) -> float:
        return abs(float(generator.normal(0.0, self.message_sigma))) if self.message_sigma else 0.0

    def compute_delays(self, node: str) -> Callable[[], float]:
        """Return a function that draws one compute delay of this node after the other, always the same ones."""
        generator = self._generator(node, "compute")
        return lambda: self.compute_seconds(generator)

    def message_delays(self, node: str) -> Callable[[], float]:
        """Return a function that draws one message delay of this node after the other, always the same ones.

        From a generator of its own: another thread may call it, and its draws do not change the compute delays.
        """
        generator = self._generator(node, "message")
        return lambda: self.message_seconds(generator)

    def _generator(self, node: str, purpose: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *f"{purpose} {node}".encode()])


def induced_from_spec(text: str, seed: int = 0) -> Induced:
    """Return the delays of "cedar", "niagara,scale=0.1", "mixture=0.1:0.02:0.8/0.3:0.05:0.2,message=0.05" and the like.

    Pieces are separated by commas, each given at most once, in any order. scale multiplies the means and deviations of
    the mixture, not the message's.  Raises ConfigError, with the choices, for what cannot be read.
    """
    read: dict[str, Any] = {}
    for piece in text.split(","):
        name, _, value = piece.strip().partition("=")
        kind = "mixture" if name in MIXTURES else name
        if kind in read:
            wrong = f"{piece!r} is a second mixture" if kind == "mixture" else f"{kind} is given twice"
            raise ConfigError(f"{text!r}: {wrong}; leave one out")
        if name in MIXTURES and not value:
            read[kind] = MIXTURES[name]
        elif name == "mixture":
            read[kind] = tuple(_component(text, part) for part in value.split("/"))
        elif name in ("message", "scale"):
            read[kind] = _number(text, piece, value)
        else:
            wrong = f"cannot read {piece!r}" if piece.strip() else "nothing stands where a piece should"
            raise ConfigError(f"{text!r}: {wrong}; the choices are {CHOICES}")
    if "scale" in read and "mixture" not in read:
        raise ConfigError(f"{text!r}: scale is that of a mixture, and none is named; as in 'cedar,{text}'")
    scale = read.get("scale", 1.0)
    if not 0 <= scale < inf:
        raise ConfigError(f"{text!r}: scale must be a finite number of at least 0, got {scale:g}")
    try:
        mixture = tuple((scale * mean, scale * deviation, w) for mean, deviation, w in read.get("mixture", ()))
        return Induced(mixture, read.get("message", 0.0), seed)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from None


def _component(text: str, part: str) -> tuple[float, float, float]:
    numbers = part.split(":")
    if len(numbers) != 3:
        raise ConfigError(f"{text!r}: cannot read {part!r}; a component is mean:deviation:weight, as in 0.1:0.02:0.8")
    mean, deviation, weight = (_number(text, part, number) for number in numbers)
    return mean, deviation, weight


def _number(text: str, piece: str, value: str) -> float:
    try:
        if not re.fullmatch(r"[0-9.eE+-]+", value):
            raise ValueError(value)
        return float(value)
    except ValueError:
        raise ConfigError(f"{text!r}: {value!r} in {piece!r} is not a finite number, as 0.5") from None
