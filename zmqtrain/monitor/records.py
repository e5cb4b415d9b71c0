"""The records of a run, one flat dict per event: for tables, plots and replays.

    of the run    run  membership  founding  plan  release  evaluation  run_end         (a broker's, or the simulator's)
    of a node     node  unit  step  schedule  pace  offer  withdrawal  application  node_end

Rule 1: times are seconds since the record began, of the run's own clock.  Rule 2: a record holds plain values only, so
that a line of JSON is a record.  Rule 3: the simulator writes the same kinds and keys as a real run.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import Array, Buffer, PeerId, Version
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Schedule

Record = dict[str, Any]
"""One record; its "kind" is the name of the function below that makes it."""


def name_of(peer: PeerId) -> str:
    """Return what people call a peer: its id without the random part."""
    return peer.rpartition("#")[0] or peer


def crc_of_leaves(leaves: Iterable[Array]) -> int:
    """Return the crc32 of a model: of the bytes of its leaves, in their order, each in C order and its own dtype."""
    crc = 0
    for leaf in leaves:
        crc = zlib.crc32(np.ascontiguousarray(np.asarray(leaf)).tobytes(), crc)
    return crc


def crc_of_frames(frames: Sequence[Sequence[Buffer]]) -> int:
    """Return the crc32 of a release: of the payload frames of its fragments, in their order."""
    crc = 0
    for fragment in frames:
        for frame in fragment:
            crc = zlib.crc32(frame, crc)
    return crc


# ---------------------------------------------------------------------- of the run


def run(seconds: float, name: str, settings: Mapping[str, Any], version: Version, facts: Mapping[str, Any]) -> Record:
    """A broker has begun. version: that the run was resumed at, -1 for a new one; facts: what else is known."""
    return {
        "kind": "run", "seconds": seconds, "run": name, "version": version, "settings": dict(settings), **facts
    }  # fmt: skip


def membership(seconds: float, name: str, what: str, peer: PeerId | None = None, text: str = "") -> Record:
    """Something happened to a node. what: "joined", "left", "lost", "killed", "cut", "mended", or what went wrong.

    peer, text: of a real run: its id, and why.
    """
    record = {"kind": "membership", "seconds": seconds, "node": name, "what": what}
    return record if peer is None else {**record, "peer": peer, "text": text}


def founding(seconds: float, peers: Sequence[PeerId]) -> Record:
    """The run has its first parameters: those of one node, or the mean of several, in this order."""
    return {"kind": "founding", "seconds": seconds, "nodes": [name_of(peer) for peer in peers], "peers": list(peers)}


def plan(seconds: float, schedule: Schedule, text: str) -> Record:
    """Another k, d, codec or outer optimizer is announced, from a version on. text: what they follow from."""
    return {
        "kind": "plan", "seconds": seconds, "every": schedule.every, "delay": schedule.delay,
        "from_version": schedule.from_version, "codec": schedule.codec, "broadcast_codec": schedule.broadcast_codec,
        "outer": schedule.outer, "text": text,
    }  # fmt: skip


def release(
    seconds: float,
    reduce: Reduce,
    live_nodes: int,
    codec: str = "",
    frames: Sequence[Sequence[Buffer]] = (),
    left_out: Sequence[Contribution] = (),
) -> Record:
    """An aggregate was released. live: nodes that the mean is over; nodes: nodes that were live.

    contributions: in the order in which they were accumulated.  codec, frames: how the aggregate was coded, if that is
    to be told: "crc" is of the frames, per fragment.  left_out: contributions that the norm gate left out of the sum.
    """
    out = {(one.peer, one.sequence) for one in left_out}
    record: Record = {
        "kind": "release",
        "seconds": seconds,
        "version": reduce.version,
        "live": reduce.live,
        "nodes": live_nodes,
        "samples": reduce.samples,
        "fragments": list(reduce.fragments),
        "dense": reduce.dense,
        "broadcast_codec": reduce.codec,
        "outer": reduce.outer,
        "contributions": [
            {
                "node": name_of(one.peer),
                "peer": one.peer,
                "sequence": one.sequence,
                "fragment": one.fragment,
                "base_version": one.base_version,
                "samples": one.samples,
                "score": one.score,
                "staleness": one.staleness,
                "too_stale": one.too_stale,
                "left_out": (one.peer, one.sequence) in out,
            }
            for one in reduce.contributions
        ],
    }
    return {**record, "codec": codec, "crc": crc_of_frames(frames)} if codec else record


def evaluation(seconds: float, version: Version, samples: int, scores: Mapping[str, float]) -> Record:
    """The shared model of `version` was scored on held-out data; samples: that are in the shared model by then."""
    return {"kind": "evaluation", "seconds": seconds, "version": version, "samples": samples, **scores}


def run_end(seconds: float, figures: Mapping[str, Any]) -> Record:
    """The run is over. figures: version, samples, contributions, refused, and, as far as they are known, steps,
    dropped, bytes_up, bytes_down, the shared model's scores, and its crc."""
    return {"kind": "run_end", "seconds": seconds, **figures}


# ---------------------------------------------------------------------- of a node


def node(
    seconds: float,
    peer: PeerId,
    run: str,
    settings: Mapping[str, Any],
    founded: bool,
    facts: Mapping[str, Any],
    version: Version = -1,
) -> Record:
    """A node joins a run: it trains the settings' program. founded: whether the run has parameters, as far as the node
    knows; facts: what else is known; version: of the checkpoint that it goes on from, -1 for none."""
    return {
        "kind": "node", "seconds": seconds, "node": name_of(peer), "peer": peer, "run": run, "version": version,
        "program": settings["program"], "program_arguments": settings["program_arguments"], "founded": founded, **facts,
    }  # fmt: skip


def unit(seconds: float, name: str, number: int) -> Record:
    """A node begins to train on a data unit."""
    return {"kind": "unit", "seconds": seconds, "node": name, "unit": number}


def step(seconds: float, name: str, number: int, loss: float, samples: int = -1) -> Record:
    """A node has made its `number`-th step. loss: of the step's batch, before it; samples: in all its steps, if known.

    A real node writes it a step late: nobody waits for a loss.
    """
    record = {"kind": "step", "seconds": seconds, "node": name, "step": number, "loss": loss}
    return {**record, "samples": samples} if samples >= 0 else record


def schedule(seconds: float, name: str, every: int, delay: int, codec: str, broadcast_codec: str) -> Record:
    """A node has come to the run's k, d and codecs of now (where something is auto)."""
    return {
        "kind": "schedule", "seconds": seconds, "node": name, "every": every, "delay": delay, "codec": codec,
        "broadcast_codec": broadcast_codec,
    }  # fmt: skip


def pace(seconds: float, name: str, own: float, rates: Sequence[float]) -> Record:
    """A node has planned its next exchange by how fast it and all live nodes are, in samples per second."""
    return {"kind": "pace", "seconds": seconds, "node": name, "own": own, "rates": list(rates)}


def offer(seconds: float, name: str, sequence: int, fragment: int, base_version: Version, dense: bool) -> Record:
    """A node has offered what it has pending of a fragment; base_version: what it had applied by then."""
    return {
        "kind": "offer", "seconds": seconds, "node": name, "sequence": sequence, "fragment": fragment,
        "base_version": base_version, "dense": dense,
    }  # fmt: skip


def withdrawal(seconds: float, name: str, sequence: int, encoded: int, reason: str) -> Record:
    """An offer will not land. encoded: the last offer that was encoded as if it might."""
    return {
        "kind": "withdrawal", "seconds": seconds, "node": name, "sequence": sequence, "encoded": encoded,
        "reason": reason,
    }  # fmt: skip


def application(
    seconds: float,
    name: str,
    version: Version,
    landed: Sequence[int],
    *,
    snapshot: bool = False,
    reset: bool = False,
    keep: bool = False,
    moments: bool = False,
) -> Record:
    """A node has applied an aggregate, or a snapshot. landed: its own offers in it; the rest as in `Update`."""
    return {
        "kind": "application", "seconds": seconds, "node": name, "version": version, "landed": list(landed),
        "snapshot": snapshot, "reset": reset, "keep": keep, "moments": moments,
    }  # fmt: skip


def node_end(seconds: float, name: str, figures: Mapping[str, Any]) -> Record:
    """A node has ended by itself. figures: steps, samples, offers, ..., the crc of its parameters, its own scores."""
    return {"kind": "node_end", "seconds": seconds, "node": name, **figures}


# ---------------------------------------------------------------------- files


def format_record(record: Record) -> str:
    """Return a record as a line of JSON; what is not finite is null, and every other float keeps its bits."""
    return json.dumps(_plain(record), allow_nan=False) + "\n"


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write one line of JSON a record; what is not finite is null. Raises ConfigError if that cannot be."""
    try:
        with path.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(format_record(record))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def read_records(path: Path) -> list[Record]:
    """Read what `write_records` or a recorder wrote; a last line that was cut off in the middle is left out.

    Raises ConfigError: a file that cannot be read, or holds no records.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    records: list[Record] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and (number > 1 or not text.endswith("\n")):  # its writer was killed
                break
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            raise ConfigError(f"{path}, line {number}: this is no record of a run")
        records.append(record)
    return records


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
