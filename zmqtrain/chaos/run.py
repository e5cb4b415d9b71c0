"""A run under fault injection: a broker and nodes as services, from their start to the audit of their records.

Rule 1: the processes are the commands that people type, each restarted with its own line; none knows of faults.
Rule 2: a run has a folder: output (NAME.log), records (NAME.jsonl) and the broker's checkpoints (hub).
Rule 3: a fault that cannot be injected is recorded, and the others are played; every fault that began is ended.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zmqtrain.broker.checkpoint import History, read_history
from zmqtrain.chaos.schedule import BROKER, Fault, FaultKind
from zmqtrain.chaos.services import Service
from zmqtrain.core.types import PeerId
from zmqtrain.monitor.ledger import Audit, Release, audit, lives_of
from zmqtrain.monitor.records import Record, read_records

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
class FaultEvent:
    """A fault that was played. began_at: by the monotonic clock; trouble: why it could not be injected, or ""."""

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
        self.events: list[FaultEvent] = []

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

    def do(self, fault: Fault) -> FaultEvent:
        """Do one fault now; who asked for it ends it with `undo`."""
        return self._begin(fault, fault.at)

    def undo(self, fault: Fault) -> None:
        """End a fault that `do` began."""
        self._end(fault)

    def _begin(self, fault: Fault, at: float) -> FaultEvent:
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
        event = FaultEvent(fault, now, trouble)
        self.events.append(event)
        self.say(f"{at:8.1f} s  {fault}" + (f": could not be done: {trouble}" if trouble else ""))
        return event

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


KEEP_ALL = ("--checkpoint-keep", "1000000")
"""Said to the broker: its book begins where its oldest checkpoint does."""
READY = "training"
"""What a broker says once it listens."""
READY_SECONDS, END_SECONDS, LEAVE_SECONDS = 300.0, 120.0, 10.0
ASK_SECONDS = 0.25


def hub_folder(folder: Path) -> Path:
    """Return where the broker of a run keeps its checkpoints."""
    return folder / "hub"


def record_of(folder: Path, name: str) -> Path:
    """Return where one of a run's processes writes its record."""
    return folder / f"{name}.jsonl"


@dataclass(frozen=True)
class Outcome:
    """What one run came to. ended: it came to its end by itself, within its time; seconds: that it took.

    loss: of the final parameters, held out; NaN if no node lived to the end.  restarts: by the harness, of processes
    that were killed or ended.
    """

    audit: Audit
    history: History
    loss: float
    ended: bool
    seconds: float
    restarts: int
    events: tuple[FaultEvent, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """What the ledger and the sum of what was released say is wrong."""
        return self.audit.faults + self.history.faults


class Run:
    """One run, from `with` to the end of the block.

    services: by name, the broker and the nodes.  wires: of those that have one.  say: is told what is done.
    """

    def __init__(
        self,
        folder: Path,
        services: Mapping[str, Service],
        wires: Mapping[str, Wire],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder, self.services, self.say = folder, dict(services), say
        self.nodes = tuple(name for name in services if name != BROKER)
        self.player = Player(services, wires, say)

    def __enter__(self) -> Run:
        try:
            broker = self.services[BROKER]
            broker.begin()
            if not broker.wait_ready(READY_SECONDS):
                raise RuntimeError(f"the broker does not begin: {'; '.join(broker.last_lines[-3:])}")
            for name in self.nodes:
                self.services[name].begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ waiting

    def wait_training(self, seconds: float = READY_SECONDS) -> None:
        """Wait until all nodes train together. Raises RuntimeError if they do not, with what they say."""
        if not self.player.wait(seconds, _now_and_then(lambda: self._all_joined() and self._released())):
            words = "; ".join(f"{name}: {' '.join(one.last_lines[-1:])}" for name, one in self.services.items())
            raise RuntimeError(f"the run has not begun within {seconds:g} s: {words}")

    def wait_back(self, name: str, since: float, seconds: float) -> bool:
        """Wait until a node has joined again since a moment of the wall clock; False if it takes longer."""

        def back() -> bool:
            said = self._said_by_broker()
            began = next((record["began"] for record in said if "began" in record), 0.0)
            joined = [
                r["seconds"] for r in said if r["kind"] == "membership" and (r["what"], r["node"]) == ("joined", name)
            ]
            return any(began + at > since for at in joined)

        return self.player.wait(seconds, _now_and_then(back))

    def wait_restarted(self, name: str, lives: int, seconds: float) -> float:
        """Wait until one of them is at work in another life than its first so many; return since when, monotonic.

        Raises RuntimeError if that takes longer.
        """
        service = self.services[name]
        if not self.player.wait(seconds, lambda: len(service.lives) > lives and service.lives[-1].ready_at > 0):
            raise RuntimeError(f"the {name} is not back within {seconds:g} s: {' '.join(service.last_lines[-1:])}")
        return service.lives[-1].ready_at

    def wait_over(self, seconds: float = END_SECONDS) -> bool:
        """Keep everybody alive until the broker has ended by itself and its nodes too; False if that takes longer."""
        over = self.player.wait(seconds, lambda: self.services[BROKER].over)
        for name in self.nodes:  # a node that was started again too late finds nobody any more
            self.services[name].wanted = False
        self.player.wait(LEAVE_SECONDS, lambda: not any(self.services[name].alive for name in self.nodes))
        return over

    def end(self, seconds: float = END_SECONDS) -> bool:
        """Tell the nodes to send what they have and to end, then the broker; False if that takes longer."""
        until = time.monotonic() + seconds
        for name in self.nodes:
            self.services[name].interrupt()
        well = self.player.wait(seconds, lambda: not any(self.services[name].alive for name in self.nodes))
        self.services[BROKER].interrupt()
        rest = max(LEAVE_SECONDS, until - time.monotonic())
        return self.player.wait(rest, lambda: not self.services[BROKER].alive) and well

    # ------------------------------------------------------------------ what it came to

    def outcome(self, ended: bool, seconds: float) -> Outcome:
        """Read the books of a run whose processes have ended. ended, seconds: as in `Outcome`.

        Raises CheckpointError, and ConfigError for a record that cannot be read.
        """
        lives = [life for name in self.nodes for life in lives_of(record_of(self.folder, name))]
        history = read_history(hub_folder(self.folder))
        releases = [
            Release(version, tuple((PeerId(peer), sequence) for peer, sequence in landed), samples)
            for version, (landed, samples) in history.landed.items()
        ]
        restarts = sum(max(0, len(service.lives) - 1) for service in self.services.values())
        events = tuple(self.player.events)
        return Outcome(audit(releases, lives), history, _held_out_loss(lives), ended, seconds, restarts, events)

    def close(self) -> None:
        """End every process; twice is once."""
        for service in self.services.values():
            service.close()

    def _said_by_broker(self) -> list[Record]:
        path = record_of(self.folder, BROKER)
        return read_records(path) if path.exists() else []

    def _all_joined(self) -> bool:
        joined = {one["node"] for one in self._said_by_broker() if one["kind"] == "membership"}
        return joined >= set(self.nodes)

    def _released(self) -> bool:
        return any(one["kind"] == "release" for one in self._said_by_broker())


def _held_out_loss(lives: Sequence[Sequence[Record]]) -> float:
    """Return the held-out loss of the final parameters, as the nodes scored them that lived to the end; else NaN.

    They are the same on all nodes but for rounding; the median is told.
    """
    ends = [record.get("loss") for life in lives for record in life if record["kind"] == "node_end"]
    scored = [loss for loss in ends if loss is not None]
    return float(statistics.median(scored)) if scored else math.nan


def _now_and_then(done: Callable[[], bool]) -> Callable[[], bool]:
    """Ask this at most every `ASK_SECONDS`: who is asked reads a whole file."""
    asked_at = 0.0

    def ask() -> bool:
        nonlocal asked_at
        if (now := time.monotonic()) - asked_at < ASK_SECONDS:
            return False
        asked_at = now
        return done()

    return ask
