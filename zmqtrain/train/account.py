"""Keep account of what a node's offers stand for: samples, steps and their scores, until they have landed.

Rule 1: what is computed stands in one offer that is on its way, or in none yet; what is withdrawn stands in none again.
Rule 2: by master, as each has its own offers.  Rule 3: pure: steps are the clock, and sequences name the offers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zmqtrain.core.types import Tally, number_of

AGES_KEPT = 1024
SCORES_KEPT, MOST_SCORES = 256, 4096
"""Of the steps that no offer stands for so many scores are kept when one is refused, and at most so many ever: a node
may be alone for days."""


class _Offered(NamedTuple):
    """An offer on its way: the step at which it was made, the master that it went to, and what it stands for."""

    step: int
    master: int
    samples: int
    steps: int


class _Unsaid:
    """The samples, the steps and their scores that no offer to one master, on its way or landed, stands for."""

    def __init__(self) -> None:
        self.samples = self.steps = 0
        self.scores: list[Any] = []
        self.said: tuple[Any, ...] = ()

    def to_plain(self) -> list[Any]:
        """Return it as JSON can hold it; waits for scores that a device still computes."""
        return [
            self.samples,
            self.steps,
            [number_of(one) for one in self.scores],
            [number_of(one) for one in self.said],
        ]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> _Unsaid:
        """Read what `to_plain` wrote."""
        unsaid = cls()
        unsaid.samples, unsaid.steps, unsaid.scores, said = plain
        unsaid.said = tuple(said)
        return unsaid


class Account:
    """The books of one node's loop. masters: how many there are.

    step: boundaries so far.  samples: so far.  offers, refused: of several masters each counts.  applied: updates.
    ages: in steps, from offer to application, of the newest that landed.
    """

    def __init__(self, masters: int) -> None:
        self.step = self.samples = 0
        self.offers = self.refused = self.applied = 0
        self.ages: list[int] = []
        self._unsaid = [_Unsaid() for _ in range(masters)]
        self._offered: dict[int, _Offered] = {}

    @property
    def masters(self) -> int:
        """How many masters there are."""
        return len(self._unsaid)

    def note(self, steps: int, samples: int) -> None:
        """Take note of steps that were made: what they have moved is pending at each master."""
        self.step += steps
        self.samples += samples
        for unsaid in self._unsaid:
            unsaid.samples, unsaid.steps = unsaid.samples + samples, unsaid.steps + steps

    def scored(self, score: Any) -> None:
        """Take note of the loss of a step; it may be a device's, which is not waited for."""
        for unsaid in self._unsaid:
            unsaid.scores.append(score)
            if len(unsaid.scores) > MOST_SCORES:
                del unsaid.scores[:-SCORES_KEPT]

    def forget_unsaid(self) -> None:
        """What was computed and not offered is dropped, and stands for nothing."""
        self._unsaid = [_Unsaid() for _ in self._unsaid]

    def forget_pending(self) -> None:
        """All that is pending is dropped: an offer that is withdrawn later leaves nothing pending either."""
        self.forget_unsaid()
        for sequence, offered in self._offered.items():
            self._offered[sequence] = offered._replace(samples=0, steps=0)

    def unsaid(self, master: int) -> Tally:
        """Return what the next offer to a master stands for."""
        unsaid = self._unsaid[master]
        unsaid.said = tuple(unsaid.scores) or unsaid.said  # who drains has made no step since, and is as good as before
        return Tally(unsaid.samples, unsaid.steps, unsaid.said)

    def offered(self, sequence: int | None, master: int) -> None:
        """Take note that what is unsaid to a master went as this offer; None: it was refused, and stays unsaid."""
        unsaid = self._unsaid[master]
        if sequence is not None:
            self.offers += 1
            self._offered[sequence] = _Offered(self.step, master, unsaid.samples, unsaid.steps)
            unsaid.samples = unsaid.steps = 0
            unsaid.scores.clear()
        del unsaid.scores[:-SCORES_KEPT]

    def take_back(self, in_flight: Iterable[int]) -> None:
        """What a withdrawn offer stood for is pending: the next one stands for it too. in_flight: all that are not."""
        for sequence in self._offered.keys() - set(in_flight):
            withdrawn = self._offered.pop(sequence)
            unsaid = self._unsaid[withdrawn.master]
            unsaid.samples, unsaid.steps = unsaid.samples + withdrawn.samples, unsaid.steps + withdrawn.steps

    def landed(self, sequences: Iterable[int]) -> None:
        """Take note of an update that is applied, and of the offers that landed in it."""
        self.applied += 1
        for sequence in sequences:
            if sequence in self._offered:
                self.ages.append(self.step - self._offered.pop(sequence).step)
        del self.ages[:-AGES_KEPT]

    def is_old(self, sequence: int, delay: int) -> bool:
        """Whether an offer on its way was made `delay` steps ago, or earlier; one that is not known here was not."""
        return sequence in self._offered and self.step >= self._offered[sequence].step + delay

    def is_due(self, landed: Iterable[int], delay: int) -> bool:
        """Whether an update may be applied in which these offers have landed, `delay` steps after each."""
        return all(self.is_old(sequence, delay) for sequence in landed if sequence in self._offered)

    def master_of(self, sequence: int) -> int | None:
        """Return the master to which an offer went; None for one that is not known here."""
        offered = self._offered.get(sequence)
        return None if offered is None else offered.master

    def to_plain(self) -> dict[str, Any]:
        """Return the books as JSON can hold them; waits for scores that a device still computes."""
        return {
            "step": self.step,
            "samples": self.samples,
            "counts": [self.offers, self.refused, self.applied],
            "ages": list(self.ages),
            "unsaid": [one.to_plain() for one in self._unsaid],
            "offered": [[sequence, *one] for sequence, one in self._offered.items()],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Account:
        """Read what `to_plain` wrote."""
        account = cls(0)
        account.step, account.samples = int(plain["step"]), int(plain["samples"])
        account.offers, account.refused, account.applied = plain["counts"]
        account.ages = list(plain["ages"])
        account._unsaid = [_Unsaid.from_plain(one) for one in plain["unsaid"]]
        account._offered = {sequence: _Offered(*one) for sequence, *one in plain["offered"]}
        return account
