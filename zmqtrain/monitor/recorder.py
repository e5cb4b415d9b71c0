"""The recorders of a broker and a node: a line of JSON an event, on disk before the next event.

Rule 1: a record must never end a run: while a disk is full, what happens is held in memory, `HELD_BYTES` of it; only
more than that costs the rest of the record, and a line in the log.
Rule 2: an event of a training thread is written at the end of its step, with the step's number; events after the last
step are marked as draining.  Rule 3: a record never replaces another: an older file of its name gets a number first, so
that a process that is started again with the same line has a record for each of its lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from math import nan
from pathlib import Path
from typing import Any

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.installed import package_version, package_versions
from zmqtrain.core.interfaces import Clock
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, PeerId, Update, Version
from zmqtrain.monitor.records import Record, crc_of_leaves, format_record, name_of, record, release_facts, set_aside
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Roster, Schedule, fields_of

logger = logging.getLogger(__name__)

HELD_BYTES = 16 << 20
"""So much of a record waits in memory for a disk that takes no more."""
STATUS_SECONDS, STATUS_SHARE = 0.9, 0.002
"""A broker's record has a status as often as the hub reports it, then when the record has become longer by this share:
some 2,700 in ten hours."""


def process_facts() -> dict[str, Any]:
    """Return what the first record of a process says of it: versions, and the time of day at which it began."""
    return {"zmqtrain": package_version(), "began": time.time(), "versions": package_versions()}


class Recorder:
    """A file of records; any thread may write.

    path: None to write no file.  facts: what else its first record holds, as {"zmqtrain": "0.2.0"}.  clock: the run's
    own. Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any] | None = None, clock: Clock = time) -> None:
        self.path, self.facts, self._clock = path, dict(facts or {}), clock
        self._began = clock.monotonic()
        self._lock = threading.RLock()
        self._held = bytearray()  # written, and not yet in the file
        self._file: FileIO | None = None
        if path is None:
            return
        try:
            if path.exists() and path.stat().st_size:
                last = max((number for number, _ in set_aside(path)), default=0)
                path.rename(path.with_name(f"{path.name}.{last + 1}"))
            self._file = FileIO(path, "w")
        except OSError as error:
            raise ConfigError(f"cannot write {path} (--record): {error.strerror}") from error

    def record(self, kind: str, /, **facts: Any) -> Record:
        """Return a record of now."""
        return record(kind, self._clock.monotonic() - self._began, **facts)

    def write(self, record: Record) -> None:
        """Write one record; after `close`, nothing happens."""
        with self._lock:
            if self._file is None:
                return
            full = bool(self._held)
            self._held += format_record(record).encode()
            if (error := self._flush()) is not None and not full:
                logger.warning("the record in %s waits in memory: %s", self.path, error.strerror)
            if len(self._held) > HELD_BYTES:
                logger.error("the record in %s ends here: the disk takes no more", self.path)
                self._shut()

    def _flush(self) -> OSError | None:
        """Write what is held, as far as that goes; return why it goes no further."""
        assert self._file is not None
        try:
            while self._held:
                del self._held[: self._file.write(self._held)]
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with self._lock:
            if self._file is not None and (error := self._flush()) is not None:
                logger.error("the record in %s is not complete: %s", self.path, error.strerror)
            self._shut()

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # a disk on the network may say only now that it is full
                logger.error("the record in %s is not complete: %s", self.path, error.strerror)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class BrokerRecorder(Recorder):
    """The record of a broker; releases come in the order of their versions, from the codec thread.

    began: version: at which the run was resumed, -1 for a new one.  member: what: "joined", "left", "again" (it
    connected again), "lost", "quarantined", "acquitted" (the norm gate was wrong) or "taken back" (its contributions,
    because it diverges); text: why.  averaged: the run will begin with the mean of these nodes' parameters, in this
    order, unless they find it worse than their own; another mean, if any, is another event.  scheduled: text: why.
    released: nodes: live ones; frames: of its fragments, as sent to every node; left_out: the contributions that the
    norm gate left out of the sum.  evaluated: samples: of all nodes, in the model.  stands: of most reports nothing is
    written; of the last one always.  ended: leaves: of the published shared model, [] if no node founded the run.
    """

    _averaged: Sequence[PeerId] = ()
    _status_due = 0.0
    _unwritten: Record | None = None  # the last report, if it is not written

    def began(self, run: str, settings: RunSettings, version: Version) -> None:
        facts = {"run": run, "version": version, "settings": settings.to_dict()}
        self.write(self.record("run", **{**facts, **self.facts}))

    def member(self, peer: PeerId, what: str, text: str) -> None:
        self.write(self.record("membership", node=name_of(peer), what=what, peer=peer, text=text))

    def averaged(self, peers: Sequence[PeerId]) -> None:
        self._averaged = peers

    def founded(self, peer: PeerId) -> None:
        peers = list(self._averaged or (peer,))
        self.write(self.record("founding", nodes=[name_of(one) for one in peers], peers=peers))

    def scheduled(self, schedule: Schedule, text: str) -> None:
        facts = ("every", "delay", "from_version", "codec", "broadcast_codec", "outer")
        self.write(self.record("plan", **{name: getattr(schedule, name) for name in facts}, text=text))

    def released(
        self,
        reduce: Reduce,
        nodes: int,
        codec: str,
        frames: Sequence[Sequence[Buffer]],
        left_out: Sequence[Contribution] = (),
    ) -> None:
        self.write(self.record("release", **release_facts(reduce, nodes, codec, frames, left_out)))

    def evaluated(self, version: Version, samples: int, scores: Mapping[str, float]) -> None:
        self.write(self.record("evaluation", **{"version": version, "samples": samples, **scores}))

    def stands(self, roster: Roster) -> None:
        if self._file is None:
            return
        facts = fields_of(roster)
        self._unwritten = one = self.record("status", run_seconds=facts.pop("seconds"), **facts)
        now = one["seconds"]
        if now >= self._status_due:
            self._status_due = now + max(STATUS_SECONDS, STATUS_SHARE * now)
            self._write_status()

    def _write_status(self) -> None:
        if self._unwritten is not None:
            self.write(self._unwritten)
            self._unwritten = None

    def ended(self, figures: Mapping[str, Any], leaves: Sequence[Array]) -> None:
        self._write_status()
        self.write(self.record("run_end", **{**figures, "crc": crc_of_leaves(leaves) if leaves else None}))


class NodeRecorder(Recorder):
    """The record of a node, in the order of its training thread; `encoded` and `withdrawn` come from its codec thread,
    in that one's order. Its training loop says with `ended` what it came to.

    joining: founded: whether the node knows that the run has parameters; version: of the checkpoint that it resumes
    from, -1 for none.  withdrawn: an offer was rejected: from here on it does not count as in flight.  scheduled: the
    node has applied the version from which these hold.  paced: the node has planned its local steps by these paces, in
    samples per second.  stepped: samples: of all steps; loss: of this one, perhaps a device scalar that is not ready.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any] | None = None, clock: Clock = time) -> None:
        super().__init__(path, facts, clock)
        self._name = ""
        self._encoded = -1
        self._of_step: list[Record] = []  # of the step that goes on
        self._step = self._samples = 0
        self._draining = False
        self._unsaid: Record | None = None  # the step whose loss may not be ready

    def record(self, kind: str, /, **facts: Any) -> Record:
        """Return a record of now, with the node's name."""
        return super().record(kind, **{"node": self._name, **facts})

    def joining(self, peer: PeerId, run: str, settings: RunSettings, founded: bool, version: Version) -> None:
        self._name, self._draining = name_of(peer), False
        program = {"program": settings.program, "program_arguments": settings.program_arguments}
        facts = {"peer": peer, "run": run, "version": version, **program, "founded": founded}
        self.write(self.record("node", **{**facts, **self.facts}))

    def began(self, unit: int) -> None:
        self.write(self.record("unit", unit=unit))

    def offered(self, sequence: int, fragment: int, base_version: Version, dense: bool) -> None:
        if dense:  # only who drains offers so
            self._say_step()
            self._write_held(True)
        self._hold("offer", sequence=sequence, fragment=fragment, base_version=base_version, dense=dense)

    def encoded(self, sequence: int) -> None:
        self._encoded = sequence

    def withdrawn(self, sequence: int, reason: str) -> None:
        self.write(self.record("withdrawal", sequence=sequence, encoded=self._encoded, reason=reason))

    def applied(self, update: Update) -> None:
        self._hold(
            "application",
            version=update.version,
            landed=list(update.landed),
            snapshot=update.anchor is not None,
            reset=update.reset,
            keep=update.keep,
            moments=update.optimizer_state is not None,
        )

    def scheduled(self, every: int, delay: int, codec: str, broadcast_codec: str) -> None:
        self._hold("schedule", every=every, delay=delay, codec=codec, broadcast_codec=broadcast_codec)

    def paced(self, own: float, rates: Sequence[float]) -> None:
        self._hold("pace", own=own, rates=list(rates))

    def stepped(self, step: int, samples: int, loss: Any) -> None:
        self._say_step()
        self._step, self._samples = step, samples
        self._write_held(False)
        self._unsaid = self.record("step", step=step, loss=loss, samples=samples)

    def ended(self, figures: Mapping[str, Any], leaves: Sequence[Array]) -> None:
        """Write how the training has ended. figures: steps, samples, ...; leaves: of the final parameters."""
        self.closed()
        self.write(self.record("node_end", **{**figures, "crc": crc_of_leaves(leaves)}))

    def closed(self) -> None:
        self._say_step()
        self._write_held(True)

    def _hold(self, kind: str, /, **facts: Any) -> None:
        self._of_step.append(self.record(kind, **facts))
        if self._draining:
            self._write_held(True)

    def _write_held(self, draining: bool) -> None:
        self._draining = draining
        for one in self._of_step:
            self.write({**one, "step": self._step, "samples": self._samples, "draining": draining})
        self._of_step.clear()

    def _say_step(self) -> None:
        if (step := self._unsaid) is not None:
            self._unsaid, loss = None, step["loss"]
            unknown = loss is None or getattr(loss, "is_deleted", lambda: False)()  # a loop may donate its buffers
            self.write({**step, "loss": nan if unknown else float(loss)})
