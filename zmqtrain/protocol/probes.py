"""Measure a link from outside of a run: what is said, and how much padding a hub gives to it (pure, `now` is given).

Rule: whoever asks, and however many they are, all probes together take no more than a few percent of a port; who asks
for more is refused, and nobody else notices.
"""

from __future__ import annotations

from dataclasses import dataclass

PROBE_FRAME_BYTES = 1 << 18
"""The most padding that one message may have: on a link of 1 Gb/s it holds up what comes behind it for 2 ms."""

PROBE_BYTES, PROBE_SECONDS = 32 << 20, 10.0
"""So many bytes of padding, both ways and of all peers, are given in so many seconds: under 3 % of 1 Gb/s."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Peer to hub, on either lane: answer me, with `answer` bytes of padding. size: of the padding that came with this.

    Measures a link from outside of a run: on BULK the padding is a frame of its own, on CONTROL there is none.
    """

    number: int
    size: int = 0
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Probed:
    """Hub to peer: the answer to a Probe, with the padding asked for. seconds: the hub's clock, since 1970; software:
    what the hub runs, for people."""

    number: int
    seconds: float
    software: str


def is_sound(probe: Probe) -> bool:
    """Return whether a probe asks for something that may be given."""
    return 0 <= probe.size <= PROBE_FRAME_BYTES and 0 <= probe.answer <= PROBE_FRAME_BYTES


class ProbeBudget:
    """What is left of PROBE_BYTES, until PROBE_SECONDS have passed since the first probe that took of it."""

    def __init__(self) -> None:
        self._began, self._taken = float("-inf"), 0

    def take(self, probe: Probe, now: float) -> bool:
        """Pay for a sound probe and its answer; False, and nothing is paid, if there is too little left."""
        if now - self._began >= PROBE_SECONDS:
            self._began, self._taken = now, 0
        wanted = self._taken + probe.size + probe.answer
        if wanted > PROBE_BYTES:
            return False
        self._taken = wanted
        return True
