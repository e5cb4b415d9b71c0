"""Sample the deltas that the hub adds, for the noise scale of a run: a few thousand values of each fragment.

Rule 1: a delta is not decoded once more: what it adds at the sampled places is read from the sum, before and after.
Rule 2: pure: no clock, no socket; one thread calls it, and any may read `noise`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.types import PeerId
from zmqtrain.strategies.noise import NoiseScale

Values = NDArray[np.float32]

SAMPLED = 4096
"""So many values of a fragment are looked at, spread over it; of a smaller one all."""


class DeltaMeter:
    """The noise scale of the deltas that one hub adds."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Know nothing: the run begins, or is restored."""
        self._scale = NoiseScale()
        self._places: dict[int, NDArray[np.int64]] = {}

    @property
    def noise(self) -> float | None:
        """The noise scale in units of one node's delta (`NoiseScale.noise`)."""
        return self._scale.noise

    def read(self, fragment: int, total: Values) -> Values:
        """Return the sampled values of a fragment's sum."""
        sample: Values = total[self.places(fragment, total.size)]
        return sample

    def places(self, fragment: int, size: int) -> NDArray[np.int64]:
        """Return the sampled places of a fragment of so many values, ascending."""
        if (places := self._places.get(fragment)) is None:
            places = self._places[fragment] = _spread(size, fragment)
        return places

    def add(self, peer: PeerId, fragment: int, before: Values, total: Values) -> None:
        """Take a node's delta, which has been added to this sum.

        before: what `read` returned of the sum without it, or a zero if the sum is nothing but this delta.
        """
        self.add_sample(peer, fragment, before, self.read(fragment, total), total.size)

    def add_sample(self, peer: PeerId, fragment: int, before: Values, after: Values, size: int) -> None:
        """Take a node's delta of so many values from what the sum has at the sampled places before and after it."""
        added = after.astype(np.float64)
        added -= before
        if added.size and np.isfinite(added).all():  # a sum that overflows is left out of the parameters too
            added *= np.sqrt(size / added.size)
            self._scale.add(peer, fragment, added)

    def close(self, fragments: tuple[int, ...]) -> None:
        """Take it that a round of these fragments is over."""
        for fragment in fragments:
            self._scale.close(fragment)


def _spread(size: int, fragment: int) -> NDArray[np.int64]:
    """Return ascending places: one at random of each of SAMPLED equal stretches of a vector."""
    count = min(size, SAMPLED)
    bounds = np.arange(count + 1) * size // max(1, count)
    return np.random.default_rng(fragment).integers(bounds[:-1], bounds[1:])
