"""Decide whether a node whose training has diverged begins again from the shared parameters, or gives up.

Rule 1: it begins again by itself, from what it holds of the shared parameters: nobody need be asked.  Rule 2: not for
ever: one that diverges `MOST_RESTARTS` times with fewer than `HEALTHY_OFFERS` landed between ends with an error.
Rule 3: never in strict mode, whose bits must not follow from what went wrong, nor where several masters have a part of
the parameters each: there a person starts the node again.
"""

from __future__ import annotations

from zmqtrain.core.settings import RunSettings

MOST_RESTARTS, HEALTHY_OFFERS = 3, 8


class Restarts:
    """The book of one node. begun: since the node was seen to diverge, until its training thread has begun again.

    resets: as often the training thread has gone on from the shared parameters.
    """

    def __init__(self) -> None:
        self.begun = False
        self.resets = 0
        self._count = self._landed = self._fresh = 0

    def is_known(self, sequence: int) -> bool:
        """Return whether an offer that is not finite was made before the node began, or begins, again."""
        return self.begun or sequence < self._fresh

    def begin(self, settings: RunSettings) -> bool:
        """Take note that training has diverged; return whether the node begins again (else it ends)."""
        if settings.mode == "strict" or settings.masters > 1:
            return False
        self._count, self._landed = self._count + 1, 0
        self.begun = self._count < MOST_RESTARTS
        return self.begun

    def done(self, sequence: int) -> None:
        """Take note that the training thread goes on from the shared parameters. sequence: of its next offer."""
        self.begun, self._fresh = False, sequence
        self.resets += 1

    def landed(self, offers: int) -> None:
        """Take note that so many offers of this node have landed."""
        self._landed += offers
        if self._landed >= HEALTHY_OFFERS:
            self._count = 0
