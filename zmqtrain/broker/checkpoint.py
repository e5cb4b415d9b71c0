"""A broker's folder: checkpoints, journal, model files, run folders and the history read from them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan, prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from zmqtrain.averaging.aggregator import Aggregator, Released, TakeLeaves
from zmqtrain.checkpoint.background_writer import BackgroundWriter
from zmqtrain.checkpoint.files import describe_difference, open_arrays, sync_folder, write_arrays
from zmqtrain.checkpoint.folder import CheckpointFolder, Every, is_locked
from zmqtrain.checkpoint.model_files import (
    ModelFacts,
    facts_from_metadata,
    facts_from_state,
    facts_to_metadata,
    read_model,
    write_model,
)
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.checksum import crc32
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings, with_present_names
from zmqtrain.core.types import Buffer, LeafSpec, ModelSpec, Version
from zmqtrain.protocol.effects import Reduce
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import model_from_wire
from zmqtrain.session.environment import clock

logger = logging.getLogger(__name__)


JournalRecord = tuple[Released, tuple[tuple[str, int], ...], int]
"""A release, the publishes in it as (peer, sequence), and the number of their samples."""


_HEAD = struct.Struct("<II")


class _Release(msgspec.Struct, array_like=True, frozen=True):
    version: int
    codec: str
    fragments: tuple[int, ...]
    frames: tuple[tuple[bytes, ...], ...]
    landed: tuple[tuple[str, int], ...]
    samples: int
    ledger: dict[str, Any] = {}


def model_arrays(arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Return the shared parameters among a checkpoint's arrays, by leaf path."""
    prefix = "parameters/"
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


class Journal:
    """A new journal in place of what may be there: a file of records, each whole or absent. Raises CheckpointError.

    What was appended survives the death of this process, not a loss of power: to wait for the disk at every record
    would cost an aggregate as long as the disk takes. Its name in the folder survives that too. A record that did not
    fit is taken back, so that the next try goes on behind the last good one.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._good = path, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
            try:
                sync_folder(path.parent)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise CheckpointError(f"cannot write to {path.parent}: {error}") from error

    def append(self, body: bytes) -> None:
        """Write one record. Raises CheckpointError; nothing of it is there then, and it may be tried again."""
        assert self._file is not None, "a journal that is closed takes nothing"
        left = memoryview(_HEAD.pack(len(body), crc32(body)) + body)
        whole = self._good + len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._good)
            os.lseek(self._file, self._good, os.SEEK_SET)
            raise CheckpointError(f"cannot write the journal {self.path}: {error}") from error
        self._good = whole

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_journal(path: Path) -> Iterator[bytes]:
    """Yield the records of a journal in order, up to the first that is torn. Raises OSError."""
    data = memoryview(path.read_bytes())
    while data:
        length, crc = _HEAD.unpack(data[: _HEAD.size]) if len(data) >= _HEAD.size else (0, -1)
        body = data[_HEAD.size : _HEAD.size + length]
        if len(body) < length or crc32(body) != crc:
            logger.warning("the journal %s ends in a torn record; what is before it counts", path)
            return
        yield bytes(body)
        data = data[_HEAD.size + length :]


class RunFolder(CheckpointFolder):
    """The folder of one broker's run: its checkpoints, and the releases after the newest.

    journal: of the releases after a checkpoint; None: none has begun, or it has ended.  ledger: of the data units, as
    it was at the last release that `replay` has given; {}: that is not known.
    """

    journal: Journal | None = None
    ledger: Mapping[str, Any] = {}

    def close(self) -> None:
        """Close the journal, and give the folder back."""
        self.end_journal()
        super().close()

    def begin_journal(self, version: int) -> None:
        """Start the journal of the releases after `version`. Raises CheckpointError; the one before then goes on."""
        journal = Journal(self.folder / f"journal-{version:012d}.log")
        self.end_journal()
        self.journal = journal

    def end_journal(self) -> None:
        if self.journal is not None:
            self.journal.close()
            self.journal = None

    def release(self, record: JournalRecord, ledger: dict[str, Any]) -> None:
        """Write one release to the journal, if there is one. Raises CheckpointError; it may be tried again.

        ledger: the state of the data units' ledger by then.
        """
        released, landed, samples = record
        frames = tuple(tuple(bytes(frame) for frame in frames) for frames in released.frames)
        one = _Release(released.version, released.codec, released.fragments, frames, landed, samples, ledger)
        if self.journal is not None:
            self.journal.append(msgspec.msgpack.encode(one))

    def replay(self, version: int) -> Iterator[JournalRecord]:
        """Give the releases after `version` in order, up to the first that is torn or missing.

        Raises CheckpointError for a whole record that is no release.
        """
        for body in (body for _, path in self._journals() for body in read_journal(path)):
            try:
                one = msgspec.msgpack.decode(body, type=_Release)
                if len(one.fragments) != len(one.frames):
                    raise ValueError("frames of other fragments")
            except ValueError as error:
                raise CheckpointError(
                    f"a journal in {self.folder} holds what is no release, after version {version}: remove it to go on "
                    "from the checkpoint"
                ) from error
            if one.version == version + 1:
                version += 1
                self.ledger = one.ledger
                yield Released(one.version, one.codec, one.fragments, one.frames), one.landed, one.samples

    def resume(self, state: dict[str, Any], arrays: dict[str, Any], hub: Hub, aggregator: Aggregator) -> None:
        """Bring hub and aggregator to a checkpoint, and on by the journal. Raises CheckpointError."""
        hub.restore(state)
        aggregator.plan(hub.model)
        aggregator.restore(hub.version, arrays)
        for released, landed, samples in self.replay(hub.version):
            aggregator.replay(released)
            hub.replay(released.version, landed, samples)
        if self.ledger:
            hub.units.restore(dict(self.ledger))


MODEL_FILE = "model.safetensors"
"""The name of the file that has the shared parameters alone."""
BEST_FILE, LAST_FILE = "model-best.safetensors", "model-last.safetensors"
"""The best evaluated parameters, and the last ones: those that are not in `MODEL_FILE`."""
MOST_ASKED = 60
"""So often, each second, other brokers are asked for their parts of the best version."""
NOT_WHOLE = "version %d (loss %.6g) is the best that was evaluated; not all brokers gave their parts of it"
MOST_SHARDS = 9999
"""As `--shard I/M` takes."""
_FORMAT = "zmqtrain part 1"


def part_file(shard: int | str, shards: int | str) -> str:
    """Return the name of the file that has one shard's share of the parameters; with "*" a pattern of such names."""
    return f"model-{shard}-of-{shards}.safetensors"


def export_part(folder: Path, arrays: Mapping[str, NDArray[np.float32]], layout: Layout, facts: ModelFacts) -> Path:
    """Write the shared parameters to the folder, whole or a shard's; return the file's path. Raises CheckpointError.

    arrays: as `Aggregator.arrays` returns them.
    """
    shard, shards = layout.shard
    if shards == 1:
        write_model(folder / MODEL_FILE, model_arrays(arrays), facts)
        return folder / MODEL_FILE
    path = folder / part_file(shard, shards)
    leaves = [
        [leaf.path, list(leaf.shape), layout.part(index).start, layout.part(index).stop]
        for index, leaf in enumerate(layout.spec)
    ]
    part = {"run": facts.run, "version": facts.version, "shard": shard, "shards": shards, "leaves": leaves}
    write_arrays(path, model_arrays(arrays), facts_to_metadata(facts) | {"format": _FORMAT, "part": json.dumps(part)})
    return path


class _Part(msgspec.Struct):
    """The "part" of a file's metadata. leaves: path, shape, first and last value; arrays, facts: of the file."""

    run: str
    version: Annotated[int, msgspec.Meta(ge=0)]
    shard: Annotated[int, msgspec.Meta(ge=0)]
    shards: Annotated[int, msgspec.Meta(le=MOST_SHARDS)]
    leaves: list[tuple[str, tuple[Annotated[int, msgspec.Meta(ge=0)], ...], int, int]]
    path: Path = Path()
    arrays: dict[str, Any] = {}
    facts: Any = None

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(path, shape) for path, shape, _, _ in self.leaves]


def _read(path: Path) -> _Part:
    try:
        metadata, arrays = open_arrays(path)
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} is no part of a model: zmqtrain merge takes the files model-I-of-M.safetensors"
            )
        said = msgspec.json.decode(metadata["part"], type=dict[str, Any])
        part = msgspec.convert(with_present_names(said), _Part)
        part.path, part.arrays, part.facts = path, arrays, facts_from_metadata(metadata)
        if part.shard >= part.shards:
            raise ValueError(f"it says shard {part.shard} of {part.shards} brokers")
        for name, shape, start, stop in part.leaves:
            array = part.arrays.get(name, np.zeros(0, np.float32))
            if not 0 <= start <= stop <= prod(shape):
                raise ValueError(
                    f"it says that it holds the values {start} to {stop} of {name}, which is {list(shape)}"
                )
            if array.size != stop - start or array.dtype != np.float32:
                raise ValueError(f"it does not hold the values {start} to {stop} of {name} in float32")
        return part
    except CheckpointError:
        raise
    except Exception as error:  # any error of the readers: the file is no part
        raise CheckpointError(f"{path} cannot be read: {str(error)[:500] or type(error).__name__}") from error


def _find(place: Path) -> Path:
    """Return the part's file: `place` itself, or the one in that folder."""
    if place.is_file():
        return place
    found = sorted(place.glob("model-*-of-*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"there are several parts in {place} ({names}): name the files, not the folder")
    raise CheckpointError(
        f"there is no part of a model in {place}: a broker writes it to its --checkpoint folder when it ends (with the "
        "run, or at Ctrl-C); start that broker again on the folder, and end it"
    )


def merge_parts(places: Sequence[Path], out: Path) -> int:
    """Join parts to one model, written to `out`; return its number of values.

    places: per broker its file or the folder of this, in any order; or the folder of `zmqtrain local`, which has all.
    Logs the version of each part, because brokers release independently, and one that stood still is old.
    Raises CheckpointError if a part is missing, is there twice, is of another run or model, or cannot be read.
    """
    parts = [_read(_find(inside)) for place in places for inside in sorted(place.glob("shard-*")) or [place]]
    if not parts:
        raise CheckpointError("no parts are given: name the --checkpoint folder of every broker")
    first = parts[0]
    seen: dict[int, Path] = {}
    for part in parts:
        for what, ours, theirs in (
            ("run", first.run, part.run),
            ("number of brokers", first.shards, part.shards),
            ("model", first.shapes, part.shapes),
        ):
            if ours != theirs:
                values = "" if what == "model" else f": {ours} and {theirs}"
                raise CheckpointError(f"{first.path} and {part.path} are not of the same {what}{values}")
        if part.shard in seen:
            raise CheckpointError(f"{seen[part.shard]} and {part.path} are both of shard {part.shard}")
        seen[part.shard] = part.path
    if missing := [str(shard) for shard in range(first.shards) if shard not in seen]:
        shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        raise CheckpointError(
            f"of the {first.shards} shards of {first.run} these are missing: {shown}; name the "
            "--checkpoint folders of their brokers too"
        )
    parts.sort(key=lambda part: part.shard)
    versions = ", ".join(f"{part.version} (shard {part.shard})" for part in parts)
    logger.info("the parts are of the versions %s", versions)
    for index, (name, shape) in enumerate(first.shapes):
        filled = 0
        for part in parts:
            _, _, start, stop = part.leaves[index]
            if start < stop and start != filled:
                raise CheckpointError(f"the values of {name} from {filled} on are not what {part.path} holds next")
            filled = stop if start < stop else filled
        if filled != prod(shape):  # before memory is allocated for them
            raise CheckpointError(f"the values of {name} from {filled} on are in none of the parts")
    spec = tuple(LeafSpec(name, shape, "float32") for name, shape in first.shapes)
    model = join_parts(spec, [part.arrays for part in parts])
    write_model(out, model, replace(first.facts, version=min(part.version for part in parts)))
    return sum(array.size for array in model.values())


def join_parts(model: ModelSpec, parts: Sequence[Mapping[str, NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
    """Return the whole leaves of a model. parts: those of each broker, by shard, flat or whole."""
    joined = {}
    for leaf in model:
        held = [part[leaf.path].reshape(-1) for part in parts if leaf.path in part]
        values = held[0] if len(held) == 1 else np.concatenate(held) if held else np.zeros(0, np.float32)
        if values.size != leaf.values:
            raise CheckpointError(f"of the leaf {leaf} the brokers have {values.size} values")
        joined[leaf.path] = values.reshape(leaf.shape)
    return joined


FREE_SETTINGS = ("units", "evaluate_seconds", "heartbeat_seconds", "lost_seconds", "start_nodes")
"""Settings that may change when a run is resumed."""
AGAIN_SECONDS = 1.0
"""Seconds after which a journal without room is tried again, and a checkpoint while another is being written."""


@dataclass(frozen=True)
class _Best:
    """The version that scored best on held-out data. moment: when it was published.  parts: what was published then, by
    shard and leaf path.  asked: how often other brokers were asked for their parts."""

    version: Version
    scores: Mapping[str, float]
    samples: int
    moment: float
    shards: int
    parts: dict[int, Mapping[str, NDArray[Any]]]
    asked: int = 0

    @property
    def loss(self) -> float:
        """Lower is better."""
        return self.scores["loss"]


@dataclass(frozen=True)
class _Last:
    """The version at which a broker has ended, of this model. facts: of its file."""

    version: Version
    model: ModelSpec
    facts: ModelFacts


class Keeper:
    """The checkpoints and the journal of a broker's run.

    Rule 1: called by the codec thread, which owns the arrays; only the writing of a checkpoint has a thread of its own,
    on copies, so that a slow disk delays no aggregate.  Rule 2: without a folder every method does nothing.
    Rule 3: a full disk costs checkpoints, which are tried again. A release waits until the journal has room, because a
    node that had heard of it would know more than a restarted broker. A broker started on a full disk still resumes.

    every: how often to save.  keep: how many checkpoints stay.  made_late: a missing folder is made at the first save.
    waits_for_room: a release waits for room in the journal.
    """

    def __init__(self, folder: Path | None, every: Every | None = None, keep: int = 3, made_late: bool = False) -> None:
        self._folder = RunFolder(folder, keep) if folder is not None else None
        self._untaken = made_late and folder is not None and not folder.exists()
        self._every = every or Every()
        self.writer = BackgroundWriter("checkpoints", "the run", clock)
        self._ending = threading.Event()
        self.saved_version: Version = -1
        """The version of the newest checkpoint that is written; -1: there is none."""
        self._begun_version, self._begun_at = -1, clock.monotonic()
        self._kept_version = -1
        self._no_journal_since: Version | None = None  # there was no room to begin it at this version
        self._moments: tuple[Buffer, ...] = ()
        """The founder's optimizer state: it is in every checkpoint of version 0."""
        self.waits_for_room = False
        self._best: _Best | None = None
        self._coming: _Best | None = None  # better, but not all of it is here yet
        self._least_loss = inf  # of the best, also while it is still to be kept
        self._of_best = threading.Lock()
        self._last: _Last | None = None
        self._best_written: Version = -1
        self._last_loss: tuple[Version, float] = (-1, nan)  # of the newest version that was evaluated

    def resume(self, hub: Hub, aggregator: Aggregator) -> tuple[Buffer, ...]:
        """Lock the folder, and bring a new hub and aggregator to the state of the run in it, if there is one.

        Returns the founder's optimizer state, if no node has trained on its parameters yet. In strict mode the hub then
        waits for all nodes, to go back with them to a version that all have saved.
        Raises ConfigError if the run had other settings, CheckpointError if nothing in the folder can be read, or
        another process has it.
        """
        if self._folder is None or self._untaken:
            return ()
        self._folder.lock()
        try:
            return self._resume(self._folder, hub, aggregator)
        except BaseException:
            self._folder.close()
            raise

    def inherit(self, hub: Hub, aggregator: Aggregator) -> None:
        """Lock the folder for a run that was taken over, in place of the run in it.

        The checkpoint is written in the background, the journal at once. Raises CheckpointError.
        """
        if self._folder is None:
            return
        self._folder.lock()
        self._untaken = False
        try:
            self._folder.forget_after(-1)
        except BaseException:
            self._folder.close()
            raise
        if aggregator.version >= 0:
            self.save(hub.state(), aggregator)

    def release_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _resume(self, folder: RunFolder, hub: Hub, aggregator: Aggregator) -> tuple[Buffer, ...]:
        if (loaded := folder.load()) is None:
            return ()
        state, arrays = loaded
        if not isinstance(state.get("settings"), dict) or "run" not in state or type(state.get("version")) is not int:
            whose = "a node's" if str(state.get("format", "")).startswith("zmqtrain node") else "no broker's"
            raise CheckpointError(
                f"{folder.folder} holds {whose} checkpoints: the broker and each node have a --checkpoint folder of "
                "their own; name another one for this broker"
            )
        if state.get("shard", 0) != hub.shard:
            raise ConfigError(
                f"the checkpoint in {folder.folder} is of shard {state.get('shard', 0)}, this broker has shard "
                f"{hub.shard}: every broker needs a --checkpoint folder of its own"
            )
        if hub.shard and state["run"] != hub.run:
            if state["version"] <= 0 and not any(folder.replay(0)):
                logger.warning("%s was founded, and never begun: its checkpoint is of no use any more", state["run"])
                return ()
            raise ConfigError(
                f"the checkpoint in {folder.folder} is of {state['run']}, the first broker runs {hub.run}: start "
                "that with its own checkpoint of this run, or give another --checkpoint folder"
            )
        if hub.settings.shards == AUTO_SHARDS:
            before = with_present_names(state["settings"]).get("shards")
            hub.divided(before if isinstance(before, int) and 1 <= before <= MOST_SHARDS else 1)
            aggregator.settings = hub.settings
        # in strict mode the data lie in as many lanes as nodes began the run
        free = [name for name in FREE_SETTINGS if not (hub.settings.mode == "strict" and name == "start_nodes")]
        difference = describe_difference(with_present_names(state["settings"]), hub.settings.to_dict(), free)
        if difference:
            raise ConfigError(
                f"the checkpoint in {folder.folder} was written under other settings: {difference}. "
                "Give the same settings to resume that run, or another --checkpoint folder to begin a new one"
            )
        folder.resume(state, arrays, hub, aggregator)
        self._resume_best(folder.folder, hub)
        saved = state["version"]
        if folder.skipped > hub.version:
            text = "%s has lost what was released after version %d: the checkpoint of version %d is torn, and the "
            logger.warning(text + "journal before it ends there", hub.run, hub.version, folder.skipped)
        self._moments = _moments(arrays) if hub.version == 0 else ()
        self.saved_version = saved
        self._begun_version = self._kept_version = hub.version
        if self._every.together:  # a replayed version is not exact, so no node goes back to it
            hub.await_all(folder.good_versions())
        else:
            try:
                folder.save(hub.version, hub.state(), self._arrays(aggregator))
                self.saved_version = hub.version
            except CheckpointError as error:
                self.writer.put_off(str(error))
        self._begin_journal(folder, hub.version)
        text = "resuming %s at version %d (%d of them from the journal), %d samples"
        logger.info(text, hub.run, hub.version, hub.version - saved, hub.samples)
        return self._moments

    def rewind(self, version: Version, aggregator: Aggregator) -> tuple[dict[str, Any], tuple[Buffer, ...]]:
        """Go back to a checkpoint and delete all later ones; return the hub's state there, and what `resume` returns.

        Raises CheckpointError.
        """
        assert self._folder is not None, "without a folder there is nowhere to go back to"
        state, arrays = self._folder.load_version(version)
        self._folder.forget_after(version)
        aggregator.restore(version, arrays)
        self._begin_journal(self._folder, version)
        self.saved_version = self._begun_version = self._kept_version = version
        self._moments = _moments(arrays) if version == 0 else ()
        return state, self._moments

    def released(self, released: Released, reduce: Reduce, ledger: dict[str, Any]) -> None:
        """Write a release to the journal, before any node hears of it. ledger: of the data units by then.

        Waits while there is no room for it. Raises CheckpointError if `end` is called meanwhile.
        """
        if self._folder is None:
            return
        while True:
            try:
                if self._no_journal_since is not None:
                    self._folder.begin_journal(self._no_journal_since)
                    self._no_journal_since = None
                self._folder.release((released, reduce.landed, reduce.samples), ledger)
                break
            except CheckpointError as error:
                if not self.waits_for_room:
                    text = "%s. Nothing is released until there is room for it; the nodes train on alone meanwhile"
                    logger.error(text, error)
                self.waits_for_room = True
                if self._ending.wait(AGAIN_SECONDS):
                    raise
        self._kept_version, self._moments = released.version, ()
        if self.waits_for_room:
            self.waits_for_room = False
            logger.warning("the journal has room again: releases go on, from version %d", released.version)

    def end(self) -> None:
        """Stop waiting for room, because the broker ends. From any thread."""
        self._ending.set()

    def is_due(self, version: int, together: bool = False) -> bool:
        """Return whether to save this version now, and record that the save has begun; in the broker's loop.

        together: asked at its release, when it is saved if all save at the same versions.
        """
        now = clock.monotonic()
        if self._folder is None or version <= self.saved_version or together != self._every.together:
            return False
        again = now >= self.writer.retry_at
        newer = version > self._begun_version
        if not (again or (newer and self._every.is_due(version, self._begun_version, now - self._begun_at))):
            return False
        self._begun_version, self._begun_at, self.writer.retry_at = version, now, inf
        return True

    def save(
        self, state: dict[str, Any], aggregator: Aggregator, wait: bool = False, moments: Sequence[Buffer] | None = None
    ) -> None:
        """Copy the run as it stands, begin a new journal, and write the copy in the background.

        state: of the hub, at the aggregator's version.  moments: the founder's optimizer state, saved with its
        parameters from now on.  wait: until it is written; raises CheckpointError if it cannot be.  Otherwise a save is
        put off while the last one is being written (if all save at the same versions, it waits for that), and a failed
        write is a warning and is tried again.
        """
        if self._folder is None:
            return
        if self._untaken:
            self._folder.lock()
            self._untaken = False
        if self.writer.busy and not self._every.together:
            self.writer.retry_at = clock.monotonic() + AGAIN_SECONDS
            return
        self.writer.wait()
        if moments is not None:
            self._moments = tuple(moments)
        folder, version, arrays = self._folder, aggregator.version, self._arrays(aggregator)

        def write() -> None:
            folder.save(version, state, arrays)
            self.saved_version, self._begun_version = version, max(version, self._begun_version)

        if wait:
            folder.begin_journal(version)
            write()
            return self.writer.written(version)
        try:
            folder.begin_journal(version)
            self._no_journal_since = None
        except CheckpointError as error:
            if folder.journal is None:
                self._no_journal_since = version
            return self.writer.put_off(str(error))
        self.writer.begin()
        self.writer.start(version, write)

    def _begin_journal(self, folder: RunFolder, version: Version) -> None:
        """Begin a new journal after this version; without room, at the next release."""
        folder.end_journal()
        self._no_journal_since = None
        try:
            folder.begin_journal(version)
        except CheckpointError as error:
            self._no_journal_since, self.waits_for_room = version, True
            logger.warning("%s. Nothing is released until there is room for the journal", error)

    def close(self, state: dict[str, Any], aggregator: Aggregator | None) -> None:
        """Write the last checkpoint and the model alone, once the write in progress has ended. Raises CheckpointError.

        Not if the hub is ahead of its arrays because the codec thread failed: the journal holds all releases. Nor if
        the codec thread still works on the arrays (aggregator is None).
        """
        if self._folder is None:
            return
        self.writer.wait()  # for as long as it takes: it drops newer files, which may be the next broker's by then
        try:
            if aggregator is None or aggregator.version != state["version"]:
                text = "no last checkpoint: version %d failed; started again, the broker goes on from version %d"
                logger.warning(text, state["version"], self._kept_version)
            elif aggregator.version >= 0:
                arrays = self._arrays(aggregator)
                path = self._folder.save(aggregator.version, state, arrays)
                layout, facts = aggregator.layout, facts_from_state(state)
                self._last = _Last(aggregator.version, layout.spec, facts)
                if layout.shard[1] == 1:
                    with contextlib.suppress(OSError, CheckpointError):  # said by `choose`; the last one is written
                        self._write_best(self._folder.folder)
                model = export_part(self._folder.folder, arrays, layout, facts)
                logger.info("saved %s, and the model alone as %s", path, model)
                if layout.shard[1] == 1:
                    self.choose(model)
        finally:
            self._folder.close()

    # ------------------------------------------------------------------ the best of the versions that were evaluated

    def _resume_best(self, folder: Path, hub: Hub) -> None:
        """Go on from the best version that was evaluated before this broker was started, if its model file is here."""
        if hub.shard or hub.settings.mode == "strict":
            return
        self._last_loss = (hub.score_version, hub.scores.get("loss", nan))
        for file in (folder / name for name in (MODEL_FILE, BEST_FILE, LAST_FILE)):
            try:
                arrays, facts = read_model(file)
            except (CheckpointError, OSError):  # there is none, or it is of no use
                continue
            known = facts.run == hub.run and facts.evaluation_version == facts.version <= hub.version
            if known and facts.evaluation.get("loss", nan) < self._least_loss:
                self._best = _Best(facts.version, facts.evaluation, facts.samples, -inf, 1, {0: arrays})
                self._least_loss = self._best.loss

    def is_best(self, version: Version, loss: float) -> bool:
        """Return whether a version with this loss is the best so far, and must be kept; in the broker's loop."""
        self._last_loss = (version, loss)
        if self._folder is None or loss >= self._least_loss:
            return False
        self._least_loss = loss
        return True

    def keep_best(self, version: Version, scores: Mapping[str, float], samples: int, aggregator: Aggregator) -> bool:
        """Keep the parameters published at this version in memory until the broker ends; return whether they are known.

        scores: of the version, with a "loss".  samples: of the run by then.  Of several brokers this is the first, and
        the parts of the others come by `keep_part`. A version that is no better than the one that is kept is not kept.
        """
        if (flats := aggregator.published_at(version)) is None:
            logger.warning("version %d is the best that was evaluated, and too old to be kept", version)
            self._least_loss = self._loss_kept
            return False
        shard, shards = aggregator.layout.shard
        with self._of_best:
            if scores["loss"] >= self._loss_kept:  # a better one, which was still to be kept, has been kept meanwhile
                return False
            self._coming = _Best(version, dict(scores), samples, aggregator.moment_of(version), shards, {})
        self.keep_part(version, shard, shards, aggregator.leaves(flats))
        return True

    @property
    def _loss_kept(self) -> float:
        """The least loss of the versions that are kept, be it in part; infinity: none is."""
        return min((one.loss for one in (self._best, self._coming) if one is not None), default=inf)

    @property
    def lacks_parts(self) -> bool:
        """Whether parts of other brokers are missing of the best version."""
        return self._coming is not None

    def ask_for_parts(self, give_leaves: Callable[[TakeLeaves, Iterable[int], float], None]) -> None:
        """Ask for the parts that are missing of the best version: each broker counts versions of its own, and is asked
        for what it had published when that one was. After `MOST_ASKED` times nobody knows it any more: it is let go."""
        with self._of_best:
            if (coming := self._coming) is None:
                return
            coming = self._coming = replace(coming, asked=coming.asked + 1)
            if coming.asked > MOST_ASKED:
                self._coming = None
                self._least_loss = self._loss_kept
                return logger.warning(NOT_WHOLE, coming.version, coming.loss)
            missing = [shard for shard in range(coming.shards) if shard not in coming.parts]
        give_leaves(partial(self.keep_part, coming.version), missing, coming.moment)

    def keep_part(self, version: Version, shard: int, shards: int, leaves: Mapping[str, NDArray[Any]]) -> None:
        """Keep the part of one of so many brokers of the best version, as the first counts it; in any thread. What was
        the best before is let go once all parts are here."""
        with self._of_best:
            if (coming := self._coming) is not None and coming.version == version and shards == coming.shards:
                coming.parts[shard] = leaves
                if len(coming.parts) == shards:
                    self._best, self._coming = coming, None

    def forget_best(self) -> None:
        """Forget the best version, because the run is founded again."""
        with self._of_best:
            self._best = self._coming = None
        self._least_loss, self._last_loss = inf, (-1, nan)

    def choose(self, model: Path, whole: bool = True) -> None:
        """Have the model's file, which holds the last version, hold the better of that and the best one, another file
        the other; after `close`. whole: whether that file holds it; if not, only the best is written, if it is here.
        Raises CheckpointError."""
        try:
            written = self._write_best(model.parent)
            if whole:  # that file has the last version, and the others are of an earlier one
                model.with_name(LAST_FILE).unlink(missing_ok=True)
                if not written:
                    model.with_name(BEST_FILE).unlink(missing_ok=True)
            if (coming := self._coming) is not None:
                logger.warning(NOT_WHOLE, coming.version, coming.loss)
            if written:
                self._put_first(model, whole)
        except OSError as error:
            raise CheckpointError(f"cannot write beside {model}: {error}") from None

    def _write_best(self, folder: Path) -> bool:
        """Write the best version to its own file, once; the model's file may hold it until now, and is overwritten
        after. Return whether it is there: not where it is the last one. Raises OSError, CheckpointError."""
        best, last = self._best, self._last
        if best is None or last is None or best.version == last.version:
            return False
        if self._best_written != best.version:
            arrays = join_parts(last.model, [best.parts[shard] for shard in sorted(best.parts)])
            facts = replace(
                last.facts, version=best.version, evaluation_version=best.version, samples=best.samples,
                evaluation=best.scores,
            )  # fmt: skip
            write_model(folder / BEST_FILE, arrays, facts)
            self._best_written = best.version
        return True

    def _put_first(self, model: Path, whole: bool) -> None:
        """Give the model's file to the better of the best version and the last one, where both are written."""
        best, last, (evaluated, loss) = self._best, self._last, self._last_loss
        assert best is not None and last is not None, "they are written"
        if not whole:
            text = "%s holds version %d (loss %.6g), the best that was evaluated"
            logger.warning(text, BEST_FILE, best.version, best.loss)
            return
        if evaluated == last.version and best.loss < loss:
            model.replace(model.with_name(LAST_FILE))
            model.with_name(BEST_FILE).replace(model)
            text = (
                "%s holds version %d (loss %.6g), the best that was evaluated; the last one, %d (loss %.6g), is in %s"
            )
            logger.warning(text, model.name, best.version, best.loss, last.version, loss, LAST_FILE)
            return
        how = f"loss {loss:.6g}" if evaluated == last.version else "not evaluated"
        text = "%s holds the last version, %d (%s); the best one before it, %d (loss %.6g), is in %s"
        logger.info(text, model.name, last.version, how, best.version, best.loss, BEST_FILE)

    def _arrays(self, aggregator: Aggregator) -> dict[str, NDArray[Any]]:
        arrays = aggregator.arrays()
        if aggregator.version == 0:  # a node that joins after a restart in strict mode begins with them
            frames = enumerate(self._moments)
            arrays |= {f"moments/{number}": np.frombuffer(frame, np.uint8) for number, frame in frames}
        return arrays


def _moments(arrays: Mapping[str, NDArray[Any]]) -> tuple[Buffer, ...]:
    count = sum(name.startswith("moments/") for name in arrays)
    return tuple(arrays[f"moments/{number}"].tobytes() for number in range(count))


@dataclass(frozen=True)
class History:
    """The history of a broker's run, from the oldest checkpoint in its folder. first, last: its versions.

    landed: by version, (peer, sequence) of the publishes in it, in their order, and the number of their samples.
    compared: the versions of the checkpoints that were compared with the sum of all aggregates before them, which they
    must equal bit for bit.  faults: each in a sentence.
    """

    run: str
    first: int
    last: int
    landed: dict[int, tuple[tuple[tuple[str, int], ...], int]]
    compared: tuple[int, ...]
    faults: tuple[str, ...]


def read_history(folder: Path) -> History:
    """Read the history in a broker's --checkpoint folder. Raises CheckpointError if there is none."""
    kept = RunFolder(folder)
    versions = kept.good_versions()
    if not versions:
        raise CheckpointError(f"there is no checkpoint in {folder}: nothing tells what landed")
    state, arrays = kept.load_version(versions[0])
    settings = RunSettings.from_dict(state["settings"])
    aggregator = Aggregator(settings, int(state.get("shard", 0)))
    aggregator.plan(model_from_wire(tuple((path, tuple(shape), dtype) for path, shape, dtype in state["model"])))
    aggregator.restore(versions[0], arrays)
    landed: dict[int, tuple[tuple[tuple[str, int], ...], int]] = {}
    compared, faults = [versions[0]], []
    for released, of_release, samples in kept.replay(versions[0]):
        aggregator.replay(released)
        landed[released.version] = of_release, samples
        if released.version in versions[1:]:
            compared.append(released.version)
            faults += _difference(kept.load_version(released.version)[1], aggregator, released.version)
    last = max(landed, default=versions[0])
    faults += [
        f"the checkpoint of version {version} is not reached: the journal ends at version {last}"
        for version in versions
        if version > last
    ]
    return History(str(state["run"]), versions[0], last, landed, tuple(compared), tuple(faults))


def _difference(arrays: dict[str, NDArray[Any]], aggregator: Aggregator, version: int) -> list[str]:
    """Return a sentence for each leaf of a checkpoint that is not the sum of the releases."""
    sums = {name: array for name, array in aggregator.arrays().items() if name.startswith("published/")}
    return [
        f"version {version}: {name} is not the sum of what was released, bit for bit"
        for name, array in sums.items()
        if name not in arrays or np.asarray(arrays[name]).tobytes() != array.tobytes()
    ]


RUNS = Path("zmqtrain-runs")
"""Relative to the folder in which the broker was started."""


def new_run() -> str:
    return f"run-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class RunFolders:
    """Default folders of runs: one for each run id in `root`, made at the first save, so that no run continues another
    by surprise."""

    root: Path = RUNS

    def cut_short(self) -> Path | None:
        """Return the newest folder of a run whose broker was killed and that no broker has now, or None."""
        found = []
        for folder in self.root.glob("run-*") if self.root.is_dir() else ():
            # a broker that ends in order writes the model after its last checkpoint
            checkpoints = sorted(folder.glob("checkpoint-*.safetensors"))
            if checkpoints and not (folder / MODEL_FILE).exists() and not is_locked(folder):
                found.append((checkpoints[-1].stat().st_mtime, folder))
        return max(found)[1] if found else None

    def folder(self, run: str, shard: int = 0, shards: int = 1, term: int = 0) -> Path:
        """Return the folder of a run, of one broker's shard of it, or (term > 0) of a standby that took over."""
        path = self.root / (f"{run}-term-{term}" if term else run)
        return path if shards == 1 else path / f"shard-{shard}"
