"""Failure detector of a process in a group: which ranks are gone, or whether this process is cut off (pure).

Rule 1: timeouts count only time in which the observer was running: a process that was stopped or busy accuses nobody.
Rule 2: the hub decides, so that all hear the same. If it does not answer in time, the process declares the loss itself.
Rule 3: a process that hears nobody, of several that it heard before, concludes that it is disconnected itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.protocol.groups import LATE_SECONDS, SILENCE_SECONDS

BEAT_SECONDS = 0.2  # between two signs of life that a process sends to the others and to the hub
UNREACHABLE_SECONDS = 0.3
"""A connection gone for this long does not return: libzmq restores a broken one within 0.1 s."""
VERDICT_SECONDS = 0.4
"""A hub that does not answer an accusation for this long is gone."""
CUT_OFF_SECONDS = 1.0
"""A contact heard within this time can still be heard."""


@dataclass(frozen=True, slots=True)
class Accuse:
    """Tell the hub that this rank is gone."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Declare:
    """This rank is gone, and no hub says so: tell the others."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class CutOff:
    """This process reaches nobody any more."""

    why: str


Finding = Accuse | Declare | CutOff


class FailureDetector:
    """The failure detector of one process. attended: seconds since the beginning in which this process was running.

    hub: whether there is one, as far as this process knows.
    """

    def __init__(self, now: float) -> None:
        self.attended, self._looked = 0.0, now
        self.hub = True
        self._hub_heard = 0.0
        self._heard: dict[int, float] = {}
        self._unreachable: dict[int, float] = {}
        self._accused: dict[int, tuple[float, str]] = {}
        self._declared: set[int] = set()
        self._cut_off = False

    def watch(self, rank: int) -> None:
        """Expect signs of life from this rank from now on."""
        self._heard[rank] = self.attended

    def forget(self, rank: int) -> None:
        """Expect nothing of this rank: it is lost, or the hub watches it."""
        for known in (self._heard, self._unreachable, self._accused):
            known.pop(rank, None)
        self._declared.discard(rank)

    def heard(self, rank: int) -> None:
        if rank in self._heard:
            self._heard[rank] = self.attended

    def heard_hub(self) -> None:
        self._hub_heard = self.attended

    def reached(self, rank: int, is_there: bool) -> None:
        """Record whether the connection to a rank, once made, is there."""
        if is_there:
            self._unreachable.pop(rank, None)
        elif rank in self._heard:
            self._unreachable.setdefault(rank, self.attended)

    def tick(self, now: float) -> list[Finding]:
        """Let time pass; return the findings, each once."""
        self.attended += min(now - self._looked, LATE_SECONDS)
        self._looked = now
        findings: list[Finding] = []
        for rank, heard in self._heard.items():
            silent, gone = self.attended - heard, self.attended - self._unreachable.get(rank, self.attended)
            if rank not in self._accused and (silent > SILENCE_SECONDS or gone > UNREACHABLE_SECONDS):
                why = f"silent for {silent:.1f} s" if silent > SILENCE_SECONDS else "its connection is gone"
                self._accused[rank] = (self.attended, why)
                findings += [Accuse(rank, why)] if self.hub else []
        seconds = VERDICT_SECONDS if self.hub else 0.0
        due = {
            rank: why
            for rank, (since, why) in self._accused.items()
            if rank not in self._declared and self.attended - since >= seconds
        }
        if due and self._hears_nobody():
            if self._cut_off:
                return []
            self._cut_off = True
            contacts = len(self._heard) + self.hub
            return [CutOff(f"this process hears nobody any more, of {contacts} that it heard: is its cable in?")]
        self._cut_off = False
        self._declared.update(due)
        return findings + [Declare(rank, why) for rank, why in due.items()]

    def _hears_nobody(self) -> bool:
        signs = [*self._heard.values(), *([self._hub_heard] if self.hub else [])]
        return len(signs) > 1 and self.attended - max(signs) > CUT_OFF_SECONDS
