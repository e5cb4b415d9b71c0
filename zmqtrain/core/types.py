"""The types that all folders share: peers, versions, models, offers, updates, and trees of containers.

Rule 1: a function here only reads its arguments.
Rule 2: arrays are named by their role: a *leaf* is one array of the model, a *segment* the part of one leaf that one
fragment carries (flat float32), a *frame* at most `MAX_FRAME_BYTES` of encoded segments.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from math import isfinite, nan, prod
from typing import Any, NamedTuple, NewType, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

PeerId = NewType("PeerId", str)
"""A node, unique per process: its name, "#", and a random part. It sorts by name."""

Version = int
"""How many aggregates the hub has published; -1 is "none known"."""

Score = float
"""Lower is better: a loss, an error rate."""

BARRIER_SHARE = 0.1
"""A mean of parameters that is worse than what it is made of by more than this share of its score is not to begin with.

Measured on the midpoint of two nodes (loss barrier, Frankle et al. 2020): from one beginning, at most 128 steps apart,
-1 to +4 %; 1,024 apart, +5 % (text) and +49 % (image); from own beginnings, +30 to +760 %.
"""

Buffer = bytes | bytearray | memoryview
Array = Any
"""A numpy or a jax array: rooms that take both say so."""

MAX_FRAME_BYTES = 4 << 20
"""No payload frame is larger; a chunk on the wire is a small head and one such frame."""


LOCAL_UNITS = 1 << 40
"""Data units that no hub dealt, but a node draws for itself, are numbered from here, each node in its own range."""


def is_barrier(own: Score, mean: Score) -> bool:
    """Return whether a mean is worse by BARRIER_SHARE than parameters of this score; NaN: nothing to compare by."""
    return isfinite(own) and mean > own + BARRIER_SHARE * abs(own)


def number_of(value: Any) -> float:
    """Return a number that may be a device scalar as a float; NaN for one that cannot be read any more.

    A training loop may donate the buffer of a loss that it has reported: then it is deleted, here or meanwhile.
    """
    try:
        return float(value)
    except RuntimeError:
        return nan


def first_local_unit(name: str) -> int:
    """Return where the range of local units begins that belongs to this name (or peer id)."""
    return LOCAL_UNITS + (zlib.crc32(name.encode()) << 24)


class Recent(dict[Key, Value]):
    """A dict of at most `most` entries: one that is set becomes the newest, and the oldest is dropped."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]


class Lane(IntEnum):
    """The two connections between a node and its hub: a ping on CONTROL never waits behind BULK."""

    CONTROL = 0
    BULK = 1


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array of a model: where it is in the tree, its shape and its dtype's name."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def values(self) -> int:
        """The number of values in this leaf."""
        return prod(self.shape)

    @property
    def form(self) -> str:
        """Its dtype and shape, as float32[2,3]."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return f"{self.path} {self.form}"


ModelSpec = tuple[LeafSpec, ...]


ALIGNMENT_BYTES = 64
"""JAX on a CPU takes an array without a copy if it begins at a multiple of this."""


class JoinedSegments(list[Array]):
    """Segments that lie in one memory, as `joined_places` says. joined: all of that, float32, flat."""

    def __init__(self, joined: Array, counts: Sequence[int]) -> None:
        places, _ = joined_places(counts)
        super().__init__(joined[place : place + count] for place, count in zip(places, counts, strict=True))
        self.joined = joined


def joined_places(counts: Sequence[int]) -> tuple[list[int], int]:
    """Return where each segment of so many float32 values begins in a memory that holds all of them, each at a multiple
    of `ALIGNMENT_BYTES`; and how many values that memory has."""
    aligned = ALIGNMENT_BYTES // 4
    ends = [0, *accumulate(-(-count // aligned) * aligned for count in counts)]
    return ends[:-1], ends[-1]


def count_values(spec: ModelSpec) -> int:
    return sum(leaf.values for leaf in spec)


def describe_mismatch(run: ModelSpec, node: ModelSpec) -> tuple[str, str] | None:
    """Compare the run's model with a node's; return (leaf path, sentence) for the first difference, None if equal."""
    ours, theirs = {leaf.path: leaf for leaf in run}, {leaf.path: leaf for leaf in node}
    for path, leaf in ours.items():
        if path not in theirs:
            return path, f"the run's model has the leaf {leaf}, this node's has none of that name"
        if theirs[path] != leaf:
            return path, f"the leaf {path} is {leaf.form} in the run and {theirs[path].form} on this node"
    for path, leaf in theirs.items():
        if path not in ours:
            return path, f"this node's model has the leaf {leaf}, the run's has none of that name"
    if run != node:
        return run[0].path, "the two models have the same leaves in different orders"
    return None


_PIECE = re.compile(r"part(\d{4})/(\d{5})/(.+)\[(?:(\d+):(\d+)|:)\]", re.ASCII | re.DOTALL)
MOST_PARTS = 1 << 10


class Piece(NamedTuple):
    """A leaf, or some rows of it, of a model that is cut into parts for pipelines. A part is a fragment of its own.

    part: from 0, in the order of the computation.  number: of the leaf in the whole tree.  path: its path there.
    rows: of its first axis, from, to; None: all.
    """

    part: int
    number: int
    path: str
    rows: tuple[int, int] | None

    @property
    def name(self) -> str:
        """The path of the piece in the model that is exchanged: it sorts by part, then by leaf and rows."""
        rows = ":" if self.rows is None else f"{self.rows[0]}:{self.rows[1]}"
        return f"part{self.part:04d}/{self.number:05d}/{self.path}[{rows}]"


def piece_of(path: str) -> Piece | None:
    """Return the piece that a path names; None for an ordinary leaf."""
    if (match := _PIECE.fullmatch(path)) is None:
        return None
    part, number, whole, start, end = match.groups()
    return Piece(int(part), int(number), whole, None if start is None else (int(start), int(end)))


@lru_cache(maxsize=64)
def parts_of(model: ModelSpec) -> tuple[int, ...]:
    """Return the part of each leaf of a model that is cut for pipelines; () for any other model."""
    pieces = [piece_of(leaf.path) for leaf in model]
    return tuple(piece.part for piece in pieces if piece is not None) if model and None not in pieces else ()


def leaves_of_parts(model: ModelSpec, first: int, end: int) -> ModelSpec:
    """Return the leaves of the parts `first` to `end` of a model that is cut for pipelines."""
    return tuple(leaf for leaf, part in zip(model, parts_of(model), strict=True) if first <= part < end)


def fault_of_pieces(model: ModelSpec) -> str:
    """Return why the pieces of a model make no whole leaves, for people; "" if they do."""
    found: dict[int, list[tuple[Piece, LeafSpec]]] = {}
    for leaf in model:
        if (piece := piece_of(leaf.path)) is None:
            return f"{leaf} is no piece of a leaf"
        found.setdefault(piece.number, []).append((piece, leaf))
    for number, own in found.items():
        paths = {piece.path for piece, _ in own}
        forms = {(leaf.shape[1:], leaf.dtype) for _, leaf in own}
        if len(paths) > 1 or len(forms) > 1:
            return f"the pieces of leaf {number} are of several leaves: {', '.join(str(leaf) for _, leaf in own[:2])}"
        rows = sorted(piece.rows for piece, _ in own if piece.rows is not None)
        sizes = {piece.rows: leaf.shape[:1] for piece, leaf in own}
        whole = len(own) == 1 and not rows
        ends = [0, *(end for _, end in rows)]
        if not whole and (
            len(rows) < len(own)
            or [start for start, _ in rows] != ends[:-1]
            or any(sizes[one] != (one[1] - one[0],) for one in rows)
        ):
            return f"the pieces of the leaf {own[0][0].path} are not all of its rows, each once"
    return ""


def spec_to_plain(spec: ModelSpec) -> list[list[Any]]:
    """Return a model's description as JSON can hold it."""
    return [[leaf.path, list(leaf.shape), leaf.dtype] for leaf in spec]


def spec_from_plain(plain: Sequence[Sequence[Any]]) -> ModelSpec:
    """Read what `spec_to_plain` wrote. Raises TypeError or ValueError for anything else."""
    spec = tuple(LeafSpec(str(path), tuple(int(n) for n in shape), str(dtype)) for path, shape, dtype in plain)
    if any(size < 0 for leaf in spec for size in leaf.shape):
        raise ValueError("a shape has no negative sizes")
    return spec


class Counts(NamedTuple):
    """What an offer stands for: the work since the last accepted one. scores: the losses of its steps, floats or device
    scalars."""

    samples: int
    steps: int
    scores: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """What the training thread hands over every k steps.

    segments: the pending progress of one fragment, one flat float32 array per leaf that the fragment touches (numpy or
    jax); nobody writes into them again.  samples, steps, scores: as in `Counts`.  applied: the sequences whose landing
    has been applied since the last offer.  dense: send uncompressed, to drain what is pending.  turn: as in `Publish`.
    """

    sequence: int
    fragment: int
    segments: Sequence[Array]
    samples: int
    steps: int
    scores: tuple[Any, ...] = ()
    applied: tuple[int, ...] = ()
    dense: bool = False
    turn: int = -1


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one leaf. values: float32, `start` and what follows of the flat leaf; a whole leaf is in its shape."""

    leaf: int
    start: int
    values: Array


@dataclass(frozen=True, slots=True)
class Update:
    """An aggregate, or an anchor (a snapshot). Of several brokers each sends its own part of both.

    aggregate: per fragment the segments of D(U), to be added to the anchor and to the parameters.
    own: per fragment the segments of the sum of this node's D(u) that landed, to be taken from pending.
    anchor: None, or what the anchor is from now on (a snapshot replaces it; then `aggregate` is empty): all of it, or
    the part that the broker has which sent it.
    landed: the sequences of this node's offers that `own` holds.
    reset: drop what is pending there, and go on from the anchor: a new one, or the one that is there (anchor None).
    warm: of a reset: the optimizer goes on as it is, it does not begin fresh.
    keep: go on from the own parameters, whatever the anchor is: all that they differ from it is pending.
    optimizer_state: it came with the anchor, as float32 values laid end to end, in one array or several.
    """

    version: Version
    aggregate: Mapping[int, Sequence[Array]]
    own: Mapping[int, Sequence[Array]]
    landed: tuple[int, ...] = ()
    anchor: Sequence[Part] | None = None
    reset: bool = False
    keep: bool = False
    optimizer_state: Sequence[Array] | None = None
    warm: bool = False


@dataclass(frozen=True)
class ExchangeStatistics:
    """Running figures of an exchange. encode_seconds, decode_seconds: CPU time, not of the training thread; decoding
    onto the model counts as training.

    link_rate: of this machine's port, in bytes of payload per second, one way, as told or measured; 0: not known.
    run_samples: of all nodes, those that the deltas in the shared parameters stand for, as the hub last said.
    """

    version: Version
    peers: int
    bytes_sent: int
    bytes_received: int
    encode_seconds: float
    decode_seconds: float
    publishes: int
    publishes_refused: int
    round_trip_seconds: float | None
    link_rate: float = 0.0
    run_samples: int = 0


class ExchangeState(NamedTuple):
    """How a node's exchange stands now.

    in_flight: the sequences of the offers that have neither landed in a polled update nor been withdrawn.
    unreachable: the brokers that cannot be exchanged with; where there is one, it is number 0.  founded: whether the
    run has shared parameters, as far as is known here.  wanted: whether others of a population wait for this node's
    parameters.  is_evaluator: whether this node is to score the shared model.  stopped: whether an operator has ended
    the run of a loop that takes no data units, which would end it.
    """

    in_flight: tuple[int, ...] = ()
    unreachable: tuple[int, ...] = ()
    founded: bool = True
    wanted: bool = False
    is_evaluator: bool = False
    stopped: bool = False


class StepSchedule(NamedTuple):
    """The run's k and d at the version that is applied here.

    pace, paces: the samples per second of this node (NaN: not known) and of all live ones, as last reported; where
    they were asked for.
    """

    every: int
    delay: int
    pace: float = nan
    paces: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """What those who take part in a synchronous step have agreed on.

    samples: by what the samples of each are divided to weigh its mean gradient; 0: nobody has any, and no step is made.
    over: nobody will have any more.
    """

    samples: int
    over: bool


HUB = -1
"""The rank of the hub, as one that reduces."""


@dataclass(frozen=True, slots=True)
class HubChunk:
    """What the hub is to do with a chunk of values.

    key: 0 to 2^63 - 1, the same on all ranks for the chunks of one reduction, and for no other that is under way.
    op: sum, mean, max, min or prod.  dtype: of the values, by its numpy name.
    """

    key: int
    op: str
    dtype: str


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the (name, child) of each child, in the container's own order; None for what is no container.

    name: the key in a dict, the field of a NamedTuple, the place in a list or a tuple.
    """
    if isinstance(node, dict):
        return list(node.items())
    if not isinstance(node, list | tuple):
        return None
    return list(zip(getattr(node, "_fields", range(len(node))), node, strict=True))


def like(node: Any, inside: Sequence[Any]) -> Any:
    """Return a container of the kind of `node` with these in the places of its children, in the same order."""
    if isinstance(node, dict):
        return dict(zip(node, inside, strict=True))
    if isinstance(node, list):
        return list(inside)
    return type(node)(*inside) if hasattr(node, "_fields") else tuple(inside)
