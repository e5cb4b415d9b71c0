"""The records of a run, one flat dict per event: for tables, plots and replays.

Besides "kind" and "seconds" a record has these keys; those of a node also have "node", its name:

    run          run, version (that it was resumed at, -1: new), settings, and what else is known of the broker:
                 began (the time of day, in seconds), versions (of packages)
    membership   node, what ("joined", "left", "lost", "killed", "cut", "mended", or what went wrong); of a real run
                 also peer, text (why)
    founding     nodes, peers: whose parameters the run begins with, or whose mean, in this order
    plan         another k, d, codec or outer optimizer from a version on: as in Schedule, and text (what they follow
                 from)
    release      see `release_facts`
    evaluation   version, samples (in the shared model by then), and its scores on held-out data
    status       a Roster, every second at first and less often later (`recorder.STATUS_SHARE`); `zmqtrain status
                 --watch --json` writes such lines too, without "kind"
    run_end      version, samples, contributions, refused, and, as far as they are known, steps, dropped, bytes_up,
                 bytes_down, the shared model's scores, and its crc

    node         peer, run, version (of its checkpoint, -1: none), program, program_arguments, founded (the run has
                 parameters, as far as the node knows), and what else is known, as of a broker
    unit         unit: it begins to train on this data unit
    step         step, loss (of the step's batch, before it), samples (in all its steps, if known); a real node writes
                 it a step late, because nobody waits for a loss
    schedule     every, delay, codec, broadcast_codec: it has come to the run's k, d and codecs of now
    pace         own, rates: samples per second, its own and those of all live nodes, by which it planned an exchange
    offer        sequence, fragment, base_version (what it had applied by then), dense
    withdrawal   sequence, encoded (the last offer that was encoded as if this one might land), reason
    application  version, landed (its own offers in it), snapshot, reset, keep, moments: as in Update
    node_end     steps, samples, offers, ..., the crc of its parameters, its own scores

    task         pipeline, stage, end (seconds), what, step, micro_batch, version (of the parameters that it uses)
    message      pipeline, sender, receiver, end (all of it is there), and of which task it is the result
    pipeline_end pipeline, efficiency, busy (of each stage)

Rule 1: times are seconds since the record began, of the run's own clock.  Rule 2: a record holds plain values only, so
that a line of JSON is a record.  Rule 3: the simulator writes the same kinds and keys as a real run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain.core.checksum import crc32
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import Array, Buffer, PeerId
from zmqtrain.protocol.effects import Contribution, Reduce

Record = dict[str, Any]


def record(kind: str, seconds: float, /, **facts: Any) -> Record:
    """Return one record; its keys are in the order of the facts."""
    return {"kind": kind, "seconds": seconds, **facts}


def name_of(peer: PeerId) -> str:
    """Return what people call a peer: its id without the random part."""
    return peer.rpartition("#")[0] or peer


def crc_of_leaves(leaves: Iterable[Array]) -> int:
    """Return the crc32 of a model: of the bytes of its leaves, in their order, each in C order and its own dtype."""
    crc = 0
    for leaf in leaves:
        crc = crc32(np.ascontiguousarray(np.asarray(leaf)).tobytes(), crc)
    return crc


def crc_of_frames(frames: Sequence[Sequence[Buffer]]) -> int:
    """Return the crc32 of a release: of the payload frames of its fragments, in their order."""
    crc = 0
    for fragment in frames:
        for frame in fragment:
            crc = crc32(frame, crc)
    return crc


def release_facts(
    reduce: Reduce,
    live_nodes: int,
    codec: str = "",
    frames: Sequence[Sequence[Buffer]] = (),
    left_out: Sequence[Contribution] = (),
) -> dict[str, Any]:
    """Return what the record of a release says. live: nodes that the mean is over; nodes: nodes that were live.

    contributions: in the order in which they were accumulated.  codec, frames: how the aggregate was coded, if that is
    to be told: "crc" is of the frames, per fragment.  left_out: contributions that the norm gate left out of the sum.
    """
    turns = {(one.node, one.turn) for one in left_out if one.node}  # of a pipeline's delta all parts are left out
    out = {(one.peer, one.sequence) for one in left_out}
    out |= {(one.peer, one.sequence) for one in reduce.contributions if (one.node, one.turn) in turns}
    facts = {
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
                "late": one.late,
                "too_stale": one.too_stale,
                "left_out": (one.peer, one.sequence) in out,
                **({"pipeline": name_of(one.node), "turn": one.turn} if one.node else {}),
            }
            for one in reduce.contributions
        ],
    }
    return {**facts, "codec": codec, "crc": crc_of_frames(frames)} if codec else facts


# ---------------------------------------------------------------------- files


def set_aside(path: Path) -> list[tuple[int, Path]]:
    """Return the earlier records of this name, the oldest first: a recorder never overwrites a file, but gives it the
    next number behind its name."""
    endings = ((file.name.removeprefix(path.name + "."), file) for file in path.parent.glob(path.name + ".*"))
    return sorted((int(number), file) for number, file in endings if number.isdecimal())


def format_record(record: Record) -> str:
    """Return a record as a line of JSON; what is not finite is null, and every other float keeps its bits."""
    return json.dumps(_plain(record), allow_nan=False) + "\n"


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write one line of JSON a record; what is not finite is null. Raises ConfigError if that cannot be."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(map(format_record, records))
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
            one = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and (number > 1 or not text.endswith("\n")):  # its writer was killed
                break
            one = None
        if not isinstance(one, dict) or "kind" not in one:
            raise ConfigError(f"{path}, line {number}: this is no record of a run")
        records.append(one)
    return records


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
