"""A node's offers: which fragment is next and what is in flight, and when a diverged node begins again.

They belong to the training thread; a real, a simulated and a replayed node keep the same books.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Counts, Offer, Update, Version

MOST_RESTARTS, HEALTHY_OFFERS = 3, 8


class Offers:
    """The offers of one node, and the version that is applied there."""

    def __init__(self) -> None:
        self.version: Version = -1
        """The last version that was applied; -1 until the node has the run's parameters."""
        self.next_sequence = 0
        """The number of the next offer."""
        self._applied: list[int] = []  # since the last offer
        self._in_flight: dict[int, int] = {}  # by sequence: the fragment
        self._offers_since: dict[int, int] = {}  # by fragment: the offers since its last one

    def next_fragments(
        self, settings: RunSettings, fragments: int, live: bool, together: bool = False
    ) -> tuple[int, ...]:
        """Return the fragments that the next exchange carries, none if there should be no exchange now.

        settings: as they hold now.  fragments: of the model.  live: whether the node takes part in the run now.
        Where an exchange carries all fragments, these are those of which fewer are in flight than may be; all nodes
        offer them in the same order.  together: an exchange carries all whatever the settings are.
        """
        if not live or self.version < 0:  # a run that has just begun: its parameters are in flight
            return ()
        if not (settings.carries_all or together):
            fragment = self._next_in_turn(settings)
            return () if fragment is None else (fragment,)
        in_flight = Counter(self._in_flight.values())
        return tuple(number for number in range(fragments) if in_flight[number] < settings.offers_in_flight)

    def _next_in_turn(self, settings: RunSettings) -> int | None:
        """Return the fragment whose turn it is; None if as many are in flight as may be.

        All nodes that are up to date offer the same fragment, that of their version and those after it that are not
        in flight, so that it is aggregated once. A fragment that has waited for 2n own offers goes first: no pattern
        of versions can starve it.
        """
        if len(self._in_flight) >= settings.offers_in_flight:
            return None
        starved = [f for f, since in self._offers_since.items() if since >= 2 * settings.fragments]
        if starved:
            return max(starved, key=lambda fragment: self._offers_since[fragment])
        following = [(self.version + further) % settings.fragments for further in range(settings.fragments)]
        under_way = set(self._in_flight.values())
        free = next((fragment for fragment in following if fragment not in under_way), None)
        return (self.version + len(self._in_flight)) % settings.fragments if free is None else free

    def draft(self, fragment: int, segments: Sequence[Array], counts: Counts, *, dense: bool = False) -> Offer:
        """Return the next offer; the arguments are those of `Exchange.offer`. It counts once it is `made`."""
        return Offer(self.next_sequence, fragment, segments, *counts, tuple(self._applied), dense)

    def made(self, offer: Offer, fragments: int) -> None:
        """Record that an offer was taken. fragments: of the model."""
        self.next_sequence = offer.sequence + 1
        self._applied.clear()
        self._in_flight[offer.sequence] = offer.fragment
        for other in range(fragments):
            self._offers_since[other] = 0 if other == offer.fragment else self._offers_since.get(other, 0) + 1

    def took(self, update: Update) -> None:
        """Record that an update is applied: the offers that landed in it are no longer in flight."""
        self.version = update.version
        self._applied += update.landed
        self.withdrawn(update.landed)

    def withdrawn(self, sequences: Iterable[int]) -> None:
        """Record that these offers are not in flight; one that is unknown changes nothing."""
        for sequence in sequences:
            self._in_flight.pop(sequence, None)

    def skip_to(self, sequence: int) -> None:
        """Use no number below this one any more: the hub has heard those before, perhaps of a former process."""
        self.next_sequence = max(self.next_sequence, sequence)

    def in_flight(self) -> tuple[int, ...]:
        """Return the sequences of the offers that have neither landed nor been withdrawn, rising."""
        return tuple(sorted(self._in_flight))

    def to_plain(self) -> dict[str, Any]:
        """Return the book as JSON can hold it."""
        return {
            "version": self.version,
            "sequence": self.next_sequence,
            "applied": list(self._applied),
            "on_their_way": [list(one) for one in self._in_flight.items()],
            "since": [list(one) for one in self._offers_since.items()],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` wrote."""
        self.version, self.next_sequence = int(plain["version"]), int(plain["sequence"])
        self._applied = [int(sequence) for sequence in plain["applied"]]
        self._in_flight = {int(sequence): int(fragment) for sequence, fragment in plain["on_their_way"]}
        self._offers_since = {int(fragment): int(since) for fragment, since in plain["since"]}


# ---------------------------------------------------------------------- divergence


class Restarts:
    """Decides whether a node with diverged training restarts from the shared parameters, or ends.

    A node that diverges `MOST_RESTARTS` times with fewer than `HEALTHY_OFFERS` applied in between ends with an error.
    It never begins again in strict mode, whose bits must not depend on a failure: there a person starts it again. Of
    several brokers each line has its own; all of them begin again together (`ShardedNode`).

    begun: from the divergence until the training thread has begun again.  resets: how often it has.
    """

    def __init__(self) -> None:
        self.begun = False
        self.resets = 0
        self._count = self._landed = self._fresh = 0

    def is_known(self, sequence: int) -> bool:
        """Return whether an offer that is not finite was made before the node began, or begins, again."""
        return self.begun or sequence < self._fresh

    def begin(self, settings: RunSettings) -> bool:
        """Record that training has diverged; return whether the node begins again (else it ends)."""
        if settings.mode == "strict":
            return False
        self._count, self._landed = self._count + 1, 0
        self.begun = self._count < MOST_RESTARTS
        return self.begun

    def done(self, sequence: int) -> None:
        """Record that the training thread goes on from the shared parameters. sequence: of its next offer."""
        self.begun, self._fresh = False, sequence
        self.resets += 1

    def landed(self, offers: int) -> None:
        """Record that the hub has applied so many offers of this node."""
        self._landed += offers
        if self._landed >= HEALTHY_OFFERS:
            self._count = 0
