"""Say how long to wait before the next attempt, so that those who all lost one hub do not all come at once (pure).

Rule: an attempt is given the time of an answer, and a random time besides, of which the bound doubles each time.
Source: "full jitter", Brooker 2015, Exponential Backoff and Jitter (AWS Architecture Blog).
"""

from __future__ import annotations

from random import Random

ANSWER_SECONDS = 0.5
"""So long an answer may take before anything else is tried."""
FIRST_SECONDS, MOST_SECONDS = 0.25, 1.5
"""The bounds of the random time: at first, and in the end. With the time of an answer the longest attempt is 2 s: a hub
that is back must be heard of soon."""


class Backoff:
    """The attempts of one node. seed: another for each node, or they would wait for the same times."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._bound = FIRST_SECONDS

    def next(self) -> float:
        """Return how many seconds the attempt that begins now is given."""
        bound, self._bound = self._bound, min(2 * self._bound, MOST_SECONDS)
        return ANSWER_SECONDS + self._random.uniform(0, bound)

    def reset(self) -> None:
        """Take note that somebody has answered."""
        self._bound = FIRST_SECONDS
