"""What a node's offers stand for, when it makes the next one, and what it still sends at the end.

Pure: steps are the clock of `ContributionTracker` and `SyncSchedule`; `Drain` is given `now`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zmqtrain.core.interfaces import Exchange
from zmqtrain.core.types import Counts, number_of
from zmqtrain.train.minibatch import dynamic_every

AGES_KEPT = 1024
SCORES_KEPT, MOST_SCORES = 256, 4096
"""How many scores of unsent steps are kept when an offer is refused, and at most: a node may be alone for days."""


class _Offered(NamedTuple):
    """An offer in flight: the step at which it was made, its broker, and the work that it stands for."""

    step: int
    broker: int
    samples: int
    steps: int


@dataclass
class _Unsent:
    """The samples, the steps and their scores that no offer to one broker, in flight or landed, stands for."""

    samples: int = 0
    steps: int = 0
    scores: list[Any] = field(default_factory=list)
    last_scores: Sequence[Any] = ()

    def to_plain(self) -> list[Any]:
        return [self.samples, self.steps, [*map(number_of, self.scores)], [*map(number_of, self.last_scores)]]


class ContributionTracker:
    """The samples, steps and scores of one node's loop, until the offers that stand for them have landed.

    Each piece of work stands in one offer in flight, or is unsent; that of a withdrawn offer is unsent again. Each
    broker has its own offers.
    step: boundaries so far.  samples: so far.  offers, put_off: of several brokers each counts.  applied: updates.
    ages: in steps, from offer to application, of the newest that landed.
    """

    def __init__(self, shards: int) -> None:
        self.step = self.samples = 0
        self.offers = self.put_off = self.applied = 0
        self.ages: list[int] = []
        self._unsent = [_Unsent() for _ in range(shards)]
        self._offered: dict[int, _Offered] = {}

    def made_steps(self, steps: int, samples: int) -> None:
        """Record steps; the change that they made is pending at each broker."""
        self.step += steps
        self.samples += samples
        for unsent in self._unsent:
            unsent.samples, unsent.steps = unsent.samples + samples, unsent.steps + steps

    def scored(self, score: Any) -> None:
        """Record the loss of a step; it may be a device scalar, which is not waited for."""
        for unsent in self._unsent:
            unsent.scores.append(score)
            if len(unsent.scores) > MOST_SCORES:
                del unsent.scores[:-SCORES_KEPT]

    def forget_unsent(self) -> None:
        self._unsent = [_Unsent() for _ in self._unsent]

    def forget_pending(self) -> None:
        """Drop all pending work: an offer that is withdrawn later leaves nothing pending either."""
        self.forget_unsent()
        for sequence, offered in self._offered.items():
            self._offered[sequence] = offered._replace(samples=0, steps=0)

    def unsent(self, broker: int) -> Counts:
        """Return the work that the next offer to a broker stands for."""
        unsent = self._unsent[broker]
        unsent.last_scores = tuple(unsent.scores) or unsent.last_scores  # a draining node makes no steps
        return Counts(unsent.samples, unsent.steps, tuple(unsent.last_scores))

    def offered(self, sequence: int | None, broker: int) -> None:
        """Record that the work unsent to a broker went as this offer; None: it was refused, and stays unsent."""
        unsent = self._unsent[broker]
        if sequence is not None:
            self.offers += 1
            self._offered[sequence] = _Offered(self.step, broker, unsent.samples, unsent.steps)
            unsent.samples = unsent.steps = 0
            unsent.scores.clear()
        del unsent.scores[:-SCORES_KEPT]

    def waiting(self, unreachable: Collection[int]) -> set[int]:
        """Return the brokers at which offers have not landed, of those that can be reached."""
        return {one.broker for one in self._offered.values()} - set(unreachable)

    def take_back(self, in_flight: Iterable[int]) -> None:
        """Make the work of withdrawn offers unsent again. in_flight: the offers that are not withdrawn."""
        for sequence in self._offered.keys() - set(in_flight):
            withdrawn = self._offered.pop(sequence)
            unsent = self._unsent[withdrawn.broker]
            unsent.samples, unsent.steps = unsent.samples + withdrawn.samples, unsent.steps + withdrawn.steps

    def landed(self, sequences: Iterable[int]) -> None:
        """Record that an update is applied, and the offers that landed in it."""
        self.applied += 1
        for sequence in sequences:
            if sequence in self._offered:
                self.ages.append(self.step - self._offered.pop(sequence).step)
        del self.ages[:-AGES_KEPT]

    def is_old(self, sequence: int, delay: int) -> bool:
        """Return whether an offer in flight was made `delay` steps ago, or earlier; False for an unknown one."""
        return sequence in self._offered and self.step >= self._offered[sequence].step + delay

    def is_due(self, landed: Iterable[int], delay: int) -> bool:
        """Return whether an update in which these offers landed may be applied: `delay` steps after each."""
        return all(self.is_old(sequence, delay) for sequence in landed if sequence in self._offered)

    def shard_of(self, sequence: int) -> int | None:
        offered = self._offered.get(sequence)
        return None if offered is None else offered.broker

    def to_plain(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it; waits for scores that a device still computes."""
        return {
            "step": self.step,
            "samples": self.samples,
            "counts": [self.offers, self.put_off, self.applied],
            "ages": list(self.ages),
            "unsaid": [one.to_plain() for one in self._unsent],
            "offered": [[sequence, *one] for sequence, one in self._offered.items()],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ContributionTracker:
        tracker = cls(0)
        tracker.step, tracker.samples = int(plain["step"]), int(plain["samples"])
        tracker.offers, tracker.put_off, tracker.applied = plain["counts"]
        tracker.ages = list(plain["ages"])
        tracker._unsent = [_Unsent(*one) for one in plain["unsaid"]]
        tracker._offered = {sequence: _Offered(*one) for sequence, *one in plain["offered"]}
        return tracker


class SyncSchedule:
    """When a node offers next, and after how many steps it applies the result: the run's k and d, or less at a slow
    node. The exchange knows at which version k and d change; here they are counted in steps.

    delay: of what is offered now, in steps.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._settings = exchange, exchange.settings
        self._schedule = self._every, self.delay = self._read()
        self._planned_at, self._offer_at = 0, self._every

    def is_due(self, step: int) -> bool:
        return step >= self._offer_at

    def follow(self) -> None:
        """Adopt another k and d, if others are announced at the version that is applied here."""
        if self._settings.is_planned and self._read() != self._schedule:
            self.offered(self._planned_at)

    def offered(self, step: int) -> None:
        """Count k from this step, at which an offer was due."""
        self._schedule = self._every, self.delay = every, delay = self._read()
        if self._settings.follows_speed:
            self._every = dynamic_every(every, *self._exchange.schedule(paced=True)[2:])
            self.delay = round(delay * self._every / every)
        self._planned_at, self._offer_at = step, step + self._every

    def _read(self) -> tuple[int, int]:
        settings = self._settings
        return self._exchange.schedule()[:2] if settings.is_planned else (settings.every, settings.delay)

    def to_plain(self) -> dict[str, Any]:
        now = [self._planned_at, self._offer_at, self._every, self.delay]
        return {"plan": now, "schedule": list(self._schedule)}

    def restore(self, plain: Mapping[str, Any]) -> None:
        self._planned_at, self._offer_at, self._every, self.delay = plain["plan"]
        self._schedule = (plain["schedule"][0], plain["schedule"][1])


class Drain:
    """What is pending of one broker's fragments at the end: one after the other is sent uncompressed until it has
    landed; one that is refused or lost is sent again.

    fragments: that are to land.  at_once: all of them are sent at a time.
    """

    def __init__(self, fragments: Iterable[int], now: float, at_once: bool = False) -> None:
        self._fragments, self._at_once = list(fragments), at_once
        self._sent: dict[int, int] = {}  # by fragment, the offer that holds it
        self._tried_at = now  # when that was taken, or its broker last reachable

    @property
    def left(self) -> bool:
        return bool(self._fragments)

    def next_fragments(self, landed: Collection[int]) -> list[int]:
        """Return what to offer now that nothing is in flight. landed: offers that have."""
        self._fragments = [one for one in self._fragments if self._sent.get(one, -1) not in landed]
        self._sent.clear()
        return list(self._fragments if self._at_once else self._fragments[:1])

    def offered(self, fragment: int, sequence: int | None, now: float) -> None:
        """Record the offer of one of `next_fragments`; None: it was not taken."""
        if sequence is not None:
            self._sent[fragment] = sequence
            self._tried_at = now

    def reached(self, now: float) -> None:
        self._tried_at = now

    def gives_up(self, now: float, lost_seconds: float) -> bool:
        return now - self._tried_at >= lost_seconds
