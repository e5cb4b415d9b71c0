"""Say what is still to be sent to one master at the end, and until when it is worth trying (pure: `now` is given).

Rule: one fragment at a time, until it has landed: what is refused or lost is sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable


class Drain:
    """What is pending of one master's fragments at the end, to be sent uncompressed.  fragments: that are to land."""

    def __init__(self, fragments: Iterable[int], now: float) -> None:
        self._fragments = deque(fragments)
        self._sequence: int | None = None  # of the offer that holds the first of them
        self._tried_at = now  # when that was taken, or its master last within reach

    @property
    def left(self) -> bool:
        """Whether anything has not landed."""
        return bool(self._fragments)

    def next_fragment(self, landed: Collection[int]) -> int | None:
        """Return what to offer now that nothing is on its way, None for nothing. landed: offers that have."""
        if self._sequence in landed:
            self._fragments.popleft()
        self._sequence = None
        return self._fragments[0] if self._fragments else None

    def offered(self, sequence: int | None, now: float) -> None:
        """Take note of the offer of `next_fragment`; None: it was not taken."""
        self._sequence = sequence
        if sequence is not None:
            self._tried_at = now

    def reached(self, now: float) -> None:
        """Take note that its master, to which something is on its way, is within reach."""
        self._tried_at = now

    def gives_up(self, now: float, lost_seconds: float) -> bool:
        """Whether nothing could be tried for so long."""
        return now - self._tried_at >= lost_seconds
