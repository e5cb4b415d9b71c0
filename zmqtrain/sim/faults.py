"""Turn a schedule of faults into what it is in virtual time: pauses, cuts, restarts, and frames that fare badly.

    kill     the node dies and restarts, as another peer, `RESTART_SECONDS` later
    stop     it computes nothing, and nothing gets to it or from it         unplug   only the latter
    slow     it stands still for that share of every `DUTY_SECONDS`
    drop     its connection breaks at the next frame, and it is told        corrupt  so it does at a head; a payload on
    duplicate, reorder   frames come twice, or after later ones                      its way up comes with a bit flipped

Rule 1: the words are those of `zmqtrain.chaos.schedule`, and so are their meanings.  Rule 2: what a frame suffers is
drawn from the seed, frame by frame, in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from zmqtrain.chaos.schedule import BROKER, Fault, FaultKind
from zmqtrain.core.errors import ConfigError

RESTART_SECONDS = 5.0
"""How long a killed node's process takes to begin again."""
DUTY_SECONDS = 1.0
NOISE_KINDS: tuple[FaultKind, ...] = ("corrupt", "duplicate", "reorder")
SIM_KINDS: tuple[FaultKind, ...] = ("kill", "stop", "unplug", "slow", "drop", *NOISE_KINDS)
"""What can befall a simulated node; it has no disk, and nothing in virtual time looks at a wall clock."""
LATE_SECONDS = 0.05
"""A frame that others overtake, and one that comes twice, come at most so much later."""


def check_faults(faults: Sequence[Fault], names: Sequence[str]) -> None:
    """Raise ConfigError for a fault that cannot be simulated, or befalls nobody here."""
    for fault in faults:
        if fault.target == BROKER or fault.kind not in SIM_KINDS:
            raise ConfigError(
                f"{fault} is not simulated: it is played for real by zmqtrain chaos. Here there are "
                f"{', '.join(SIM_KINDS)}, of nodes"
            )
        if fault.target not in names:
            raise ConfigError(f"{fault} befalls nobody: the nodes are {', '.join(names[:10])}, ...")


def pauses_and_cuts(fault: Fault) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
    """Return in which windows (from, to) a fault keeps its node from computing, and in which its wire is cut."""
    window = ((fault.at, fault.ends_at),)
    if fault.kind == "slow":
        turns = (fault.at + DUTY_SECONDS * turn for turn in range(int(fault.seconds / DUTY_SECONDS)))
        return tuple((begin, begin + fault.severity * DUTY_SECONDS) for begin in turns), ()
    return window if fault.kind == "stop" else (), window if fault.kind in ("stop", "unplug") else ()


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one frame. delays: how much later each copy of it comes; breaks: it ends its connection instead;
    flipped: a bit of it is another."""

    delays: tuple[float, ...] = (0.0,)
    breaks: bool = False
    flipped: bool = False


class FrameNoise:
    """Decides what becomes of the frames of one wire. seed: of what is drawn."""

    def __init__(self, seed: str) -> None:
        self._random, self._shares = Random(seed), dict.fromkeys(NOISE_KINDS, 0.0)
        self._broken = False
        self.done: dict[str, int] = {kind: 0 for kind in ("drop", *NOISE_KINDS)}
        """How many frames of each fate there were."""

    def set(self, kind: FaultKind, share: float) -> None:
        """Do this to a share of the frames from now on; 0: to none."""
        self._shares[kind] = share

    def drop(self) -> None:
        """Break the connection at the next frame."""
        self._broken = True

    def fate(self, payload_up: bool) -> Fate:
        """Return what becomes of the next frame. payload_up: it is of a payload in flight to the hub."""
        if self._broken:
            self._broken = False
            return self._done("drop", Fate(breaks=True))
        draw = self._random.random()
        for kind in NOISE_KINDS:
            if draw < self._shares[kind]:
                later = self._random.uniform(0.0, LATE_SECONDS)
                fates: Mapping[str, Fate] = {
                    "corrupt": Fate(flipped=True) if payload_up else Fate(breaks=True),
                    "duplicate": Fate((0.0, later)),
                    "reorder": Fate((later,)),
                }
                return self._done(kind, fates[kind])
            draw -= self._shares[kind]
        return Fate()

    def _done(self, kind: str, fate: Fate) -> Fate:
        self.done[kind] += 1
        return fate
