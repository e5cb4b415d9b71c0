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
from typing import Protocol, TextIO

from zmqtrain.broker.checkpoint import History, read_history
from zmqtrain.chaos.schedule import BROKER, Fault, FaultKind
from zmqtrain.chaos.services import Service
from zmqtrain.core.types import PeerId
from zmqtrain.monitor.ledger import Audit, Release, audit, lives_of
from zmqtrain.monitor.records import Record, read_records

LOOK_SECONDS = 0.02


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

    services: by the target's name.  wires: of those that have one.  out: gets a line for each thing that is done.
    """

    def __init__(self, services: Mapping[str, Service], wires: Mapping[str, Wire], out: TextIO | None = None) -> None:
        self.services, self.wires, self.out = services, wires, out
        self.events: list[FaultEvent] = []

    def wait(self, seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Keep the services alive for so long, or until `done`; return whether that was so."""
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() >= until:
                return False
            for service in self.services.values():
                service.look()
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
                        self.undo(fault)
                elif not self.do(fault, time.monotonic() - began).trouble and fault.seconds:
                    open_faults[fault] = None
            self.wait(max(0.0, began + seconds - time.monotonic()), done)
        finally:
            for fault in open_faults:
                self.undo(fault)

    def do(self, fault: Fault, at: float = 0.0) -> FaultEvent:
        """Begin one fault now, `at` seconds after the schedule; `undo` ends it."""
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
        self._say(f"{at:8.1f} s  {fault}" + (f": could not be done: {trouble}" if trouble else ""))
        return event

    def undo(self, fault: Fault) -> None:
        """End a fault that `do` began."""
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
            self._say(f"            {fault} could not be ended: {error}")

    def _say(self, line: str) -> None:
        if self.out is not None:
            print(line, file=self.out, flush=True)


KEEP_ALL = ("--checkpoint-keep", "1000000")
"""Said to the broker: its book begins where its oldest checkpoint does."""
READY = "training"
"""What a broker says once it listens."""
READY_SECONDS, END_SECONDS, LEAVE_SECONDS = 300.0, 120.0, 10.0
ASK_SECONDS = 0.25


def hub_folder(folder: Path) -> Path:
    return folder / "hub"


def record_of(folder: Path, name: str) -> Path:
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
        return self.audit.faults + self.history.faults


class Run:
    """One run, from `with` to the end of the block.

    services: by name, the broker and the nodes.  wires, out: as for `Player`.
    """

    def __init__(
        self, folder: Path, services: Mapping[str, Service], wires: Mapping[str, Wire], out: TextIO | None = None
    ) -> None:
        self.folder, self.services = folder, services
        self.nodes = tuple(name for name in services if name != BROKER)
        self.player = Player(services, wires, out)

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

    def wait_training(self, seconds: float = READY_SECONDS) -> None:
        """Wait until all nodes train together. Raises RuntimeError if they do not, with what they say."""
        if not self.player.wait(seconds, now_and_then(self._all_train)):
            words = "; ".join(f"{name}: {' '.join(one.last_lines[-1:])}" for name, one in self.services.items())
            raise RuntimeError(f"the run has not begun within {seconds:g} s: {words}")

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

    def _all_train(self) -> bool:
        said = self._said_by_broker()
        joined = {one["node"] for one in said if one["kind"] == "membership"}
        return joined >= set(self.nodes) and any(one["kind"] == "release" for one in said)


def _held_out_loss(lives: Sequence[Sequence[Record]]) -> float:
    """Return the held-out loss of the final parameters, as the nodes scored them that lived to the end; else NaN.

    They are the same on all nodes but for rounding; the median is told.
    """
    ends = [record.get("loss") for life in lives for record in life if record["kind"] == "node_end"]
    scored = [loss for loss in ends if loss is not None]
    return float(statistics.median(scored)) if scored else math.nan


def now_and_then(done: Callable[[], bool]) -> Callable[[], bool]:
    """Ask this at most every `ASK_SECONDS`: who is asked reads a whole file."""
    asked_at = 0.0

    def ask() -> bool:
        nonlocal asked_at
        if (now := time.monotonic()) - asked_at < ASK_SECONDS:
            return False
        asked_at = now
        return done()

    return ask
