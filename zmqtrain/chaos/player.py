"""Play a schedule of faults against a run that lives: each at its time, and each taken back at the end of its own.

Rule 1: what cannot be done is written down and the rest is played; whatever was begun is ended, on every way out.
Rule 2: the player knows services and wires, and not what they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.chaos.schedule import Fault, FaultKind
from zmqtrain.chaos.services import Service

LOOK_SECONDS = 0.02
PROCESS_KINDS: tuple[FaultKind, ...] = ("kill", "stop", "slow", "disk", "clock")
"""What is done to a process; every other fault is its wire's."""


class Wire(Protocol):
    """The connection of one process with the rest of the run."""

    def unplug(self) -> None:
        """Let nothing through, and tell nobody."""

    def plug(self) -> None:
        """Be whole again."""

    def drop(self) -> None:
        """Break every connection that is open, in the middle of a message."""

    def disturb(self, kind: FaultKind, share: float) -> None:
        """Do "corrupt", "duplicate", "reorder" or "slow" to this share of what passes; 0: leave it alone again."""


@dataclass(frozen=True)
class Deed:
    """A fault that was played. began_at: by the monotonic clock; trouble: why it could not be done, "" if it was."""

    fault: Fault
    began_at: float
    trouble: str = ""


class Player:
    """Plays schedules against these services.

    services: by the target's name.  wires: of those that have one.  say: is told a line of each thing that is done.
    """

    def __init__(
        self, services: Mapping[str, Service], wires: Mapping[str, Wire], say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.services, self.wires, self.say = services, wires, say
        self.deeds: list[Deed] = []

    def look(self) -> None:
        """See to all services."""
        for service in self.services.values():
            service.look()

    def wait(self, seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Keep the services alive for so long, or until `done`; return whether that was so."""
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() >= until:
                return False
            self.look()
            time.sleep(LOOK_SECONDS)
        return True

    def play(self, schedule: Sequence[Fault], seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        """Play a schedule that takes so many seconds, or until `done`."""
        began = time.monotonic()
        moments = [(fault.at, True, fault) for fault in schedule]
        moments += [(fault.ends_at, False, fault) for fault in schedule if fault.seconds]
        open_faults: dict[Fault, None] = {}
        try:
            for at, begins, fault in sorted(moments, key=lambda moment: moment[0]):
                if self.wait(max(0.0, began + at - time.monotonic()), done):
                    return
                if not begins:
                    if fault in open_faults:
                        del open_faults[fault]
                        self._end(fault)
                elif not self._begin(fault, time.monotonic() - began).trouble and fault.seconds:
                    open_faults[fault] = None
            self.wait(max(0.0, began + seconds - time.monotonic()), done)
        finally:
            for fault in open_faults:
                self._end(fault)

    def do(self, fault: Fault) -> Deed:
        """Do one fault now; who asked for it ends it with `undo`."""
        return self._begin(fault, fault.at)

    def undo(self, fault: Fault) -> None:
        """End a fault that `do` began."""
        self._end(fault)

    def _begin(self, fault: Fault, at: float) -> Deed:
        service, trouble = self.services[fault.target], ""
        now = time.monotonic()
        try:
            match fault.kind:
                case "kill":
                    now = service.kill()
                case "stop":
                    service.stop()
                case "disk":
                    service.fill_disk()
                case "clock":
                    service.jump_clock(fault.severity)
                case "unplug":
                    self.wires[fault.target].unplug()
                case "drop":
                    self.wires[fault.target].drop()
                case kind:
                    if kind == "slow":
                        service.slow(fault.severity)
                    if fault.target in self.wires:
                        self.wires[fault.target].disturb(kind, fault.severity)
                    elif kind != "slow":
                        trouble = f"{fault.target} has no wire of ours"
        except (OSError, RuntimeError, KeyError) as error:
            trouble = f"{type(error).__name__}: {error}"
        deed = Deed(fault, now, trouble)
        self.deeds.append(deed)
        self.say(f"{at:8.1f} s  {fault}" + (f": could not be done: {trouble}" if trouble else ""))
        return deed

    def _end(self, fault: Fault) -> None:
        service = self.services[fault.target]
        try:
            match fault.kind:
                case "stop":
                    service.go_on()
                case "disk":
                    service.free_disk()
                case "unplug":
                    self.wires[fault.target].plug()
                case "slow" | "corrupt" | "duplicate" | "reorder" as kind:
                    if kind == "slow":
                        service.go_on()
                    if fault.target in self.wires:
                        self.wires[fault.target].disturb(kind, 0.0)
        except (OSError, RuntimeError) as error:
            self.say(f"            {fault} could not be ended: {error}")
