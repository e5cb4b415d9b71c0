"""What one step is made of: so many batches, or as many parts of batches as there is time for (pure: no jax).

Rule 1: a minibatch is a frozen record, read from the run's settings; `MinibatchStep` (train/step.py) carries it out.
Rule 2: nothing here computes; the broker reads the same records without jax.
Source: Anytime Minibatch, Ferdinand et al. 2019; Async-Timed, Al-Lawati et al., JSAIT 2021.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import Family, format_spec

REFERENCE_PERCENTILE = 90.0
IMPROBABLE = 100.0


@dataclass(frozen=True, slots=True)
class FixedMinibatch:
    """A step takes the gradients of `batches` batches, however long that takes. Raises ConfigError: fewer than 1."""

    batches: int = 1

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise ConfigError(f"{self.name!r}: a step is made of at least one batch, got {self.batches}")

    @property
    def name(self) -> str:
        """The canonical spec."""
        return format_spec("fixed", {"batches": self.batches})


@dataclass(frozen=True, slots=True)
class TimedMinibatch:
    """A step takes the gradients of as many parts of batches as can be begun within `seconds`, and of at least one.

    partitions: into how many parts of one size each batch is cut: the more, the closer to the time, and the less each
    keeps the device busy.  Raises ConfigError: no time, no parts.
    Source: Ferdinand et al. 2019, sec. 3 (the compute phase); Al-Lawati et al. 2021, whose runs use 0.29 s in 2 parts
    and 0.32 s in 8.
    """

    seconds: float = 0.3
    partitions: int = 8

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and isfinite(self.seconds)):
            raise ConfigError(f"{self.name!r}: the time of a step must be more than 0 seconds, got {self.seconds:g}")
        if self.partitions < 1:
            raise ConfigError(f"{self.name!r}: a batch is cut into at least one part, got {self.partitions}")

    @property
    def name(self) -> str:
        """The canonical spec."""
        return format_spec("timed", {"seconds": self.seconds, "partitions": self.partitions})


Minibatch = FixedMinibatch | TimedMinibatch

minibatch_from_spec = Family[Minibatch]({"fixed": FixedMinibatch, "timed": TimedMinibatch}).from_spec
"""Returns the minibatch of a spec such as "timed:seconds=0.3,partitions=8" (see `Family`)."""


def dynamic_every(every: int, own: float, rates: Sequence[float]) -> int:
    """Return this node's k, so that all nodes offer at about the same time: max(1, round(every * own / p90(rates))).

    own, rates: steps (or samples) per second, of this node and of all live ones. The reference is their 90th
    percentile, not the fastest: among 11 nodes or more, one exceptional node does not shrink the k of all others (it
    makes more steps itself); among fewer the percentile lies between the fastest two, and it does.
    A rate that is NaN, infinite or not positive is not known yet, and does not count, nor does an improbable one, of
    more than 100 times the median; where the own one is not known, or none is, k stays `every`.  Raises ConfigError if
    every < 1.
    Source: dynamic local updates, Liu et al. 2024, Asynchronous Local-SGD Training for Language Modeling, sec. 5 (there
    relative to the fastest).
    """
    if every < 1:
        raise ConfigError(f"every must be at least 1, got {every}")
    known = [rate for rate in rates if isfinite(rate) and rate > 0]
    if not known or not (isfinite(own) and own > 0):
        return every
    most = IMPROBABLE * statistics.median_low(known)
    known = sorted(rate for rate in known if rate <= most)
    place = REFERENCE_PERCENTILE / 100 * (len(known) - 1)
    below, above = known[floor(place)], known[ceil(place)]
    return max(1, round(every * own / (below + (place - floor(place)) * (above - below))))
