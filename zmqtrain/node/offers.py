"""Keep the book of one node's offers: which fragment is next, under which number, what is on its way, what has landed.

Rule 1: no thread, no socket, no clock; the training thread alone calls it.  Rule 2: a node, a simulated node and one
that lives its record again keep the same book; the last of them is told what to offer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Offer, Tally, Update, Version


class Offers:
    """The offers of one node, and what has been applied there."""

    def __init__(self) -> None:
        self.version: Version = -1
        """The last version that was applied; -1 until the node has the run's parameters."""
        self._sequence = 0
        self._applied: list[int] = []  # since the last offer
        self._on_their_way: dict[int, int] = {}  # by sequence: the fragment
        self._offers_since: dict[int, int] = {}  # by fragment: the offers since its last one

    def next_fragments(self, settings: RunSettings, fragments: int, live: bool) -> tuple[int, ...]:
        """Return the fragments that the next exchange should carry, none if it should not be made now.

        settings: that hold now.  fragments: of the model.  live: whether the node takes part in the run now.
        Where an exchange carries all fragments, these are those of which fewer are in flight than may be; all nodes
        offer them in the same order.
        """
        if not live or self.version < 0:  # the run has just been founded, and its parameters are in flight
            return ()
        if not settings.carries_all:
            fragment = self._next_in_turn(settings)
            return () if fragment is None else (fragment,)
        in_flight = Counter(self._on_their_way.values())
        return tuple(number for number in range(fragments) if in_flight[number] < settings.offers_in_flight)

    def _next_in_turn(self, settings: RunSettings) -> int | None:
        """Return the fragment whose turn it is; None if as many are in flight as may be.

        All nodes that are up to date offer the same fragment, that of their version and those after it that are not on
        their way, so that it is aggregated once; a fragment that has waited for 2n own offers goes first, so that no
        rhythm of versions can starve it.
        """
        if len(self._on_their_way) >= settings.offers_in_flight:
            return None
        starved = [f for f, since in self._offers_since.items() if since >= 2 * settings.fragments]
        if starved:
            return max(starved, key=lambda fragment: self._offers_since[fragment])
        following = [(self.version + further) % settings.fragments for further in range(settings.fragments)]
        under_way = set(self._on_their_way.values())
        free = next((fragment for fragment in following if fragment not in under_way), None)
        return (self.version + len(self._on_their_way)) % settings.fragments if free is None else free

    @property
    def next_sequence(self) -> int:
        """The number of the next offer."""
        return self._sequence

    def draft(self, fragment: int, segments: Sequence[Array], tally: Tally, *, dense: bool = False) -> Offer:
        """Return the next offer; the arguments are those of `Exchange.offer`. It counts once it is `made`."""
        return Offer(self._sequence, fragment, segments, *tally, tuple(self._applied), dense)

    def made(self, offer: Offer, fragments: int) -> None:
        """Take note that an offer was taken. fragments: of the model."""
        self._sequence = offer.sequence + 1
        self._applied.clear()
        self._on_their_way[offer.sequence] = offer.fragment
        for other in range(fragments):
            self._offers_since[other] = 0 if other == offer.fragment else self._offers_since.get(other, 0) + 1

    def took(self, update: Update) -> None:
        """Take note that an update is applied: what landed in it is no longer on its way."""
        self.version = update.version
        self._applied += update.landed
        for sequence in update.landed:
            self._on_their_way.pop(sequence, None)

    def withdrawn(self, sequence: int) -> None:
        """Take note that an offer will not land; one that has, or is not known, changes nothing."""
        self._on_their_way.pop(sequence, None)

    def hear(self, withdrawn: Iterable[int]) -> None:
        """Take note that these will not land."""
        for sequence in withdrawn:
            self.withdrawn(sequence)

    def skip_to(self, sequence: int) -> None:
        """Give no number below this one any more: the hub has heard of those before, perhaps of a former life."""
        self._sequence = max(self._sequence, sequence)

    def to_plain(self) -> dict[str, Any]:
        """Return the book as JSON can hold it."""
        return {
            "version": self.version,
            "sequence": self._sequence,
            "applied": list(self._applied),
            "on_their_way": [list(one) for one in self._on_their_way.items()],
            "since": [list(one) for one in self._offers_since.items()],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` wrote."""
        self.version, self._sequence = int(plain["version"]), int(plain["sequence"])
        self._applied = [int(sequence) for sequence in plain["applied"]]
        self._on_their_way = {int(sequence): int(fragment) for sequence, fragment in plain["on_their_way"]}
        self._offers_since = {int(fragment): int(since) for fragment, since in plain["since"]}

    def in_flight(self) -> tuple[int, ...]:
        """Return the sequences of the offers that have neither landed nor been withdrawn, in their order."""
        return tuple(sorted(self._on_their_way))
