"""The moves of the one equation, and where the anchor of a model lives.

    params = anchor + pending          pending(f) leaves for the hub, apply brings back what has been applied

    DeviceMoves    parameters on one device, and the anchor with them
    SpreadMoves    parameters over several devices, the anchor likewise
    HostMoves      the anchor on the host, parameters anywhere

Rule 1: chosen once, when a node joins. No value differs: the anchor is the same, bit for bit, wherever it lives. It is
float32 whatever the parameters are, and is only ever added to, in version order: so it is the same on all nodes.
Rule 2: an anchor on the host costs the devices two leaves' parts of a fragment at a time; what is offered is then on
the host too.
Rule 3: on a processor a fragment of a leaf moves block by block, because XLA gathers and scatters row after row, whose
length is what divides the leaf (often 64 values), and puts the sum that it scatters aside first; a loop over the blocks
reads each place once and writes it once, within a cache. On an accelerator a loop would be a launch for every block:
there `Layout` gathers and scatters. The values are the same, bit for bit; which way is decided when a function is
lowered, for the platform that it is lowered for. A leaf that is donated is written in its own memory: it is never cut.
A *shard* is the part of a leaf that one device holds: a range along each axis. The fragment's blocks and the shard's
runs of values cross in pieces; all of them begin and end at multiples of `grain` values, so that both the shard and the
segment can be seen as rows of `grain` values, and each device moves rows.
Rule 4: nothing is gathered: the compiled functions run on each device's shard alone (`shard_map`, no collective).
Any sharding is supported, and a mixture; the result has the sharding of the argument, with `donate` its memory too.
Rule 5: a stack is a leaf's own memory: on each device the shard that is there, in the order of the devices' ids.
Whatever its mesh and its axes, a leaf over the same devices has the same kind of stack: one compiled function takes
leaves of all meshes.  A segment that lies in pieces becomes whole on the host only.
Rule 6: where the devices belong to several processes (`train.processes`), each process moves the shards of its own
devices, and nothing is sent but what `pending`, `parameters` and `adopt` need on the host: a leaf's part of a fragment,
or a leaf, at a time. All processes make the same moves in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.interfaces import CodedSegments, Layout, PinnedSegments
from zmqtrain.core.types import Array, JoinedSegments, ModelSpec, joined_places
from zmqtrain.train import in_place
from zmqtrain.train.pinned import Pinned
from zmqtrain.train.processes import check_placed, each_has_all, gathered_stack, own_devices, put, whole_leaf

AnchorOn = Literal["device", "host"]
"""Where a node keeps the anchor: with its parameters, or in the memory of its processor."""

Leaves = list[jax.Array]
Segments = Mapping[int, Sequence[Array]]
"""By fragment, the segments of the leaves that it touches."""

Anchor = Any
"""What `place` gave or a move returned: a sequence of leaves, in order. A move uses up the one before."""

Vector = NDArray[np.float32]
Numbers = NDArray[np.int64]


class Moves(Protocol):
    """The moves of the one equation, for the model of one node."""

    def place(self, leaves: Sequence[Array]) -> Anchor:
        """Return an anchor of these values: a float32 copy of every leaf."""

    def parameters(self, anchor: Anchor) -> Leaves:
        """Return parameters of the anchor's values: in the dtypes, and on the devices, with which the node joined."""

    def settle(self, params: Leaves, anchor: Anchor) -> Anchor:
        """Return the anchor where these parameters are, should a step have moved them. Raises ModelMismatch."""

    def warm_up(self, params: Leaves, anchor: Anchor) -> None:
        """Compile all that an exchange needs, so that no exchange delays training. Nothing is moved."""

    def pending(self, params: Leaves, anchor: Anchor, fragment: int, *, whole: bool = False) -> list[Array]:
        """Return the elastic share of params - anchor of one fragment, or the `whole` of it: a flat float32 segment per
        leaf."""

    def offered(
        self, params: Leaves, anchor: Anchor, fragment: int, *, whole: bool = False
    ) -> Sequence[Array] | PinnedSegments:
        """Return what is to be offered: as `pending`, or the leaves, to be pinned."""

    def apply(self, params: Leaves, anchor: Anchor, aggregate: Segments, own: Segments) -> tuple[Leaves, Anchor]:
        """Return params + D(U) - D(u) and anchor + D(U). The anchor is used up."""

    def adopt(self, params: Leaves, anchor: Anchor, new: Sequence[Array], own: Segments) -> tuple[Leaves, Anchor]:
        """Return new + (params - anchor - D(u)) and a copy of the new anchor: what is pending stays pending."""


def moves_of(
    layout: Layout, model: ModelSpec, leaves: Sequence[Any], *, donate: bool, elastic: float, anchor: AnchorOn
) -> Moves:
    """Return the moves for parameters that live where these leaves do.

    donate: the caller's parameters may be used up.  elastic: the share of what is pending that is offered; under 1 each
    node's parameters stay its own, and are pulled toward the others' (Zhang et al. 2015, Deep learning with elastic
    averaging SGD, with both pulls in the one equation).
    Raises ConfigError for another place than "device" or "host", ModelMismatch for a leaf that lies on devices of
    several processes but not of all.
    """
    if anchor not in get_args(AnchorOn):
        raise ConfigError(f"anchor must be one of {', '.join(map(repr, get_args(AnchorOn)))}, got {anchor!r}")
    if anchor == "host":
        return HostMoves(layout, model, leaves, donate, elastic)
    if is_spread(leaves):
        return SpreadMoves(layout, model, leaves, donate, elastic)
    return _device_moves(layout, model, donate, elastic)


def is_spread(leaves: Sequence[Any]) -> bool:
    """Return whether these arrays live on more than one device, taken together."""
    each = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
    different = {id(sharding): sharding for sharding in each}.values()  # few objects, each of which takes long to hash
    return len({device for sharding in different for device in sharding.device_set}) > 1


def _replaced(leaves: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    return [new.get(i, leaf) for i, leaf in enumerate(leaves)]


# ---------------------------------------------------------------------- on one device

_FLOAT32 = np.dtype(np.float32)

LARGEST_LOOPED = 2**31
"""A leaf with more values than an index of 32 bits can count is gathered and scattered everywhere."""

LEAST_PINNED = 1 << 18
"""Fewer values of a fragment are not pinned: what is pending is computed."""

FEWEST_LOOPED = 3
"""So few pieces of equal length are moved one by one, without a loop."""

MODELS_KEPT, KERNELS_KEPT = 16, 4096
"""So many models' moves are kept in one process, each compiled once, and so many jitted functions of spread leaves: a
handful per fragment, or per leaf."""


class DeviceMoves:
    """The moves where one device holds everything: without state, so that all equal models share what is compiled."""

    def __init__(self, layout: Layout, model: ModelSpec, donate: bool, elastic: float = 1.0) -> None:
        self.layout, self.donate, self.elastic = layout, donate, elastic
        self._dtypes = [jnp.dtype(spec.dtype) for spec in model]
        self._places: dict[int, Numbers] = {}
        used_up = (0, 1) if donate else (1,)
        self._pending = jax.jit(self._take, static_argnums=(2, 3))
        self._move = jax.jit(self._both, static_argnums=4, donate_argnums=used_up)
        self._replace = jax.jit(self._adopt, donate_argnums=used_up)

    def place(self, leaves: Sequence[Array]) -> Sequence[Any]:
        return self._kept([jnp.array(leaf, jnp.float32) for leaf in leaves])

    def parameters(self, anchor: Anchor) -> Leaves:
        return [jnp.array(leaf, dtype) for leaf, dtype in zip(anchor, self._dtypes, strict=True)]

    def settle(self, params: Leaves, anchor: Anchor) -> Anchor:
        if is_spread(params):
            raise ModelMismatch(
                "the parameters joined the run on one device and now lie on several: spread them (jax.device_put with "
                "a sharding) before they are given to DelayedSync"
            )
        return anchor

    def warm_up(self, params: Leaves, anchor: Anchor) -> None:
        for fragment in range(self.layout.fragments):
            ours, shared = self._touched(params, fragment), self._touched(anchor, fragment)
            for share in {1.0, self.elastic}:
                pending = self._pending.lower(ours, shared, fragment, share)
                pending.compile()
            segments: Any = [
                jax.ShapeDtypeStruct(segment.shape, segment.dtype, sharding=_tied_to(leaf))  # type: ignore[no-untyped-call]
                for segment, leaf in zip(pending.out_info, ours, strict=True)
            ]
            if (size := self._joined_size(ours, fragment)) is not None:
                segments = jax.ShapeDtypeStruct((size,), jnp.float32)  # type: ignore[no-untyped-call]
            for own in (segments, None):
                self._move.lower(ours, shared, segments, own, fragment).compile()
        if isinstance(anchor, in_place.Kept):
            numbers = {self.layout.leaves(fragment) for fragment in range(self.layout.fragments)}
            numbers.add(tuple(range(len(params))))  # of several fragments together
            each = [[params[leaf] for leaf in some] for some in sorted(numbers)]
            anchor.compile_for([leaves for leaves in each if self._rebases(leaves)], donate=self.donate)

    def pending(self, params: Leaves, anchor: Anchor, fragment: int, *, whole: bool = False) -> list[jax.Array]:
        share = 1.0 if whole else self.elastic
        result: Leaves = self._pending(
            self._touched(params, fragment), self._touched(anchor, fragment), fragment, share
        )
        return result

    def offered(
        self, params: Leaves, anchor: Anchor, fragment: int, *, whole: bool = False
    ) -> Sequence[Array] | PinnedSegments:
        """See Moves. Of few values `pending` costs less than two threads that meet."""
        ours, counts = self._touched(params, fragment), self.layout.counts(fragment)
        if not (isinstance(anchor, in_place.Kept) and self._rebases(ours)):
            return self.pending(params, anchor, fragment, whole=whole)

        def compute() -> Sequence[Array]:
            return self.pending(params, anchor, fragment, whole=whole)

        return Pinned(ours, anchor, self.layout.leaves(fragment), self._places_of(fragment), counts, compute)

    def apply(self, params: Leaves, anchor: Anchor, aggregate: Segments, own: Segments) -> tuple[Leaves, Anchor]:
        """See Moves. What is encoded is decoded onto a kept anchor; where parameters are donated, several fragments in
        one program, of all leaves.

        Anything else goes fragment by fragment, and each by one compiled function, with an own part or without:
        whatever mixture of fragments and own parts an update holds, nothing is compiled that was compiled before (a
        fragment of 109 leaves takes about a second). An own part that comes without an aggregate, as none does by
        itself, meets zeros there. Segments that lie in one memory are given to a processor as one array: as 218 they
        took longer than the sums of a small model.
        """
        fragments = sorted({*aggregate, *own})
        if isinstance(anchor, in_place.Kept):
            coded = [f for f in fragments if _are_coded(aggregate.get(f), own.get(f))]
            coded = [f for f in coded if self._rebases(self._touched(params, f))]
            if len(coded) > 1 and self.donate and self._rebases(params):
                params = self._rebase(params, anchor, aggregate, own, coded, range(len(params)))
            else:
                for fragment in coded:
                    params = self._rebase(params, anchor, aggregate, own, [fragment], self.layout.leaves(fragment))
            fragments = [f for f in fragments if f not in coded]
        moved = list(anchor) if fragments else []
        for fragment in fragments:
            touched = self.layout.leaves(fragment)
            ours, behind = self._touched(params, fragment), self._touched(moved, fragment)
            given = self._given(ours, aggregate.get(fragment), own.get(fragment), fragment)
            forward, behind = self._move(ours, behind, *given, fragment)
            params = _replaced(params, dict(zip(touched, forward, strict=True)))
            moved = _replaced(moved, dict(zip(touched, behind, strict=True)))
        return list(params), self._kept(moved) if fragments else anchor

    def _kept(self, anchor: Leaves) -> Sequence[Any]:
        """Return the anchor as what it is kept in: where a processor has it, and all fragments are large enough to be
        pinned, its memory stays where it is."""
        fragments = range(self.layout.fragments)
        is_large = self.elastic == 1 and all(sum(self.layout.counts(f)) >= LEAST_PINNED for f in fragments)
        return in_place.Kept(anchor) if is_large and self._rebases(anchor) else anchor

    def _rebases(self, leaves: Sequence[Any]) -> bool:
        """Return whether what is encoded can be decoded onto these leaves."""
        plain = all(isinstance(leaf, jax.Array) and leaf.dtype == _FLOAT32 for leaf in leaves)
        return bool(leaves) and plain and _on_processor(leaves) and in_place.is_possible()

    def _rebase(
        self,
        params: Leaves,
        anchor: in_place.Kept,
        aggregate: Segments,
        own: Segments,
        fragments: Sequence[int],
        handed: Sequence[int],
    ) -> Leaves:
        """Decode fragments that are encoded onto their leaves, one after the other. handed: the numbers of leaves that
        hold all of these, rising: each set of leaves is a program of its own."""

        def rebase(ours: Numbers, behind: Numbers) -> None:
            for fragment in fragments:
                leaves, (shared, mine) = list(self.layout.leaves(fragment)), (aggregate[fragment], own.get(fragment))
                assert isinstance(shared, CodedSegments), "or it could not be taken"
                assert mine is None or isinstance(mine, CodedSegments), "or it could not be taken"
                forward = ours[np.searchsorted(handed, leaves)]
                shared.rebase(mine, self._places_of(fragment), forward, behind[leaves])

        forward = anchor.work_on([params[leaf] for leaf in handed], rebase, donate=self.donate)
        return _replaced(params, dict(zip(handed, forward, strict=True)))

    def _joined_size(self, ours: Leaves, fragment: int) -> int | None:
        """Return how many values the one memory has in which a processor is given a fragment's segments; None: they are
        given one by one."""
        _, size = joined_places(self.layout.counts(fragment))
        return size if _on_processor(ours) and size < LARGEST_LOOPED else None

    def _places_of(self, fragment: int) -> Numbers:
        if fragment not in self._places:
            self._places[fragment] = places_in_leaves(self.layout, fragment)
        return self._places[fragment]

    def _given(
        self, ours: Leaves, shared: Sequence[Array] | None, own: Sequence[Array] | None, fragment: int
    ) -> tuple[_Given, _Given | None]:
        """Return what `_move` takes for an aggregate, or zeros, and an own part."""
        counts = self.layout.counts(fragment)
        given = _one_by_one if self._joined_size(ours, fragment) is None else _in_one_memory
        shared, own = (one.decoded() if isinstance(one, CodedSegments) else one for one in (shared, own))
        if shared is None:
            shared = [np.zeros(count, np.float32) for count in counts]
        return given(shared, counts), None if own is None else given(own, counts)

    def adopt(self, params: Leaves, anchor: Anchor, new: Sequence[Any], own: Segments) -> tuple[Leaves, Anchor]:
        adopted, behind = self._replace(
            params, list(anchor), list(new), {fragment: list(parts) for fragment, parts in own.items()}
        )
        return adopted, self._kept(behind)

    def _touched(self, leaves: Sequence[Any], fragment: int) -> Leaves:
        return [leaves[i] for i in self.layout.leaves(fragment)]

    def _take(self, params: Leaves, anchor: Leaves, fragment: int, share: float) -> list[jax.Array]:
        each = zip(params, anchor, self.layout.leaves(fragment), strict=True)
        pending = [ahead(self.layout, p, a, i, fragment) for p, a, i in each]
        return pending if share == 1 else [share * segment for segment in pending]

    def _both(
        self, params: Leaves, anchor: Leaves, shared: _Given, own: _Given | None, fragment: int
    ) -> tuple[Leaves, Leaves]:
        touched, counts = self.layout.leaves(fragment), self.layout.counts(fragment)
        sums: Sequence[Any] = shared if isinstance(shared, Sequence) else [shared] * len(touched)
        owns: Sequence[Any] = own if isinstance(own, Sequence) else [own] * len(touched)
        places = [0] * len(touched) if isinstance(shared, Sequence) else joined_places(counts)[0]
        each = zip(params, anchor, sums, owns, touched, places, strict=True)
        both = [moved(self.layout, p, a, u, mine, i, fragment, place) for p, a, u, mine, i, place in each]
        return [p for p, _ in both], [a for _, a in both]

    def _adopt(self, params: Leaves, anchor: Leaves, new: Leaves, own: Segments) -> tuple[Leaves, Leaves]:
        pending = [p.astype(jnp.float32) - a for p, a in zip(params, anchor, strict=True)]
        for fragment, parts in own.items():
            for i, part in zip(self.layout.leaves(fragment), parts, strict=True):
                pending[i] = self.layout.add(pending[i], i, fragment, -part)
        adopted = [(n + rest).astype(p.dtype) for n, rest, p in zip(new, pending, params, strict=True)]
        return adopted, [jnp.copy(n) for n in new]


_Given = Sequence[jax.Array] | jax.Array
"""The segments of a fragment, or the memory that holds all of them."""


def _are_coded(shared: Sequence[Array] | None, own: Sequence[Array] | None) -> bool:
    """Return whether an aggregate and an own part can be decoded onto a model as they are."""
    return isinstance(shared, CodedSegments) and shared.rebases_with(own)


def _on_processor(leaves: Sequence[Any]) -> bool:
    first = leaves[0] if leaves else None
    return isinstance(first, jax.Array) and all(device.platform == "cpu" for device in first.devices())


def _one_by_one(segments: Sequence[Array], counts: Sequence[int]) -> Any:
    return list(segments)  # jax takes no other kind of list


def _in_one_memory(segments: Sequence[Array], counts: Sequence[int]) -> Any:
    if isinstance(segments, JoinedSegments):
        return segments.joined
    joined = JoinedSegments(np.zeros(joined_places(counts)[1], np.float32), counts)
    for place, segment in zip(joined, segments, strict=True):
        np.copyto(place, segment)
    return joined.joined


_device_moves = lru_cache(maxsize=MODELS_KEPT)(DeviceMoves)


def places_in_leaves(layout: Layout, fragment: int) -> Numbers:
    """Return where the values of a fragment lie in the leaves that it touches: the table that `CodedSegments` takes."""
    rows: list[tuple[int, int, int, int]] = []
    at = 0
    for number, leaf in enumerate(layout.leaves(fragment)):
        for start, end in layout.spans(leaf, fragment).tolist():
            if rows and rows[-1][2] == number and rows[-1][3] + rows[-1][1] == start:
                rows[-1] = (*rows[-1][:1], rows[-1][1] + end - start, *rows[-1][2:])
            else:
                rows.append((at, end - start, number, start))
            at += end - start
    return np.array(rows, np.int64).reshape(-1, 4)


def _tied_to(leaf: Any) -> Any:
    """Return the sharding of a leaf that its caller has tied to its device; None for any other."""
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


def ahead(layout: Layout, params: jax.Array, anchor: jax.Array, leaf: int, fragment: int) -> jax.Array:
    """Return params - anchor of the fragment's part of one leaf: float32, flat."""

    def at_once(params: jax.Array, anchor: jax.Array) -> Any:
        return layout.take(params, leaf, fragment).astype(jnp.float32) - layout.take(anchor, leaf, fragment)

    def by_blocks(params: jax.Array, anchor: jax.Array) -> Any:
        flat = params.reshape(-1), anchor.reshape(-1)

        def move(segment: jax.Array, length: int, start: Any, at: Any) -> jax.Array:
            ours, shared = (lax.dynamic_slice(values, (start,), (length,)).astype(jnp.float32) for values in flat)
            return lax.dynamic_update_slice(segment, ours - shared, (at,))

        runs, count = _equal_runs(layout.spans(leaf, fragment))
        segment = jnp.full(count, leaf, jnp.float32)  # each its own, or XLA makes one of a size, and copies of it
        return _over(runs, segment, move)

    result: jax.Array = _by_platform(layout, at_once, by_blocks, params, anchor)
    return result


def moved(
    layout: Layout,
    params: jax.Array,
    anchor: jax.Array,
    shared: jax.Array,
    own: jax.Array | None,
    leaf: int,
    fragment: int,
    place: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Return params + (shared - own) and anchor + shared, of one leaf. shared, own: flat float32, which hold its
    segments from `place` on.

    own: None is nothing. Sums are made in the wider of the two dtypes and rounded to the leaf's.
    """
    runs, count = _equal_runs(layout.spans(leaf, fragment))

    def at_once(params: jax.Array, anchor: jax.Array, shared: jax.Array, own: jax.Array | None) -> Any:
        shared = lax.slice(shared, (place,), (place + count,))
        step = shared if own is None else shared - lax.slice(own, (place,), (place + count,))
        return layout.add(params, leaf, fragment, step), layout.add(anchor, leaf, fragment, shared)

    def by_blocks(params: jax.Array, anchor: jax.Array, shared: jax.Array, own: jax.Array | None) -> Any:
        def move(both: tuple[jax.Array, jax.Array], length: int, start: Any, at: Any) -> tuple[jax.Array, ...]:
            of_all = lax.dynamic_slice(shared, (place + at,), (length,))
            of_others = of_all if own is None else of_all - lax.dynamic_slice(own, (place + at,), (length,))
            new = []
            for values, step in zip(both, (of_others, of_all), strict=True):
                old = lax.dynamic_slice(values, (start,), (length,))
                new.append(lax.dynamic_update_slice(values, (old + step).astype(values.dtype), (start,)))
            return tuple(new)

        both = _over(runs, (params.reshape(-1), anchor.reshape(-1)), move)
        return both[0].reshape(params.shape), both[1].reshape(anchor.shape)

    result: tuple[jax.Array, jax.Array] = _by_platform(layout, at_once, by_blocks, params, anchor, shared, own)
    return result


def _by_platform(layout: Layout, at_once: Any, by_blocks: Any, params: jax.Array, *others: Any) -> Any:
    if layout.fragments == 1 or params.size >= LARGEST_LOOPED:
        return at_once(params, *others)
    return lax.platform_dependent(params, *others, cpu=by_blocks, default=at_once)


class _Run(NamedTuple):
    """Pieces of equal length, `apart` values from each other: where the first lies in the leaf, and in the segment."""

    start: int
    at: int
    length: int
    apart: int
    pieces: int


def _equal_runs(spans: Numbers) -> tuple[list[_Run], int]:
    """Return the ranges of a flat leaf, (start, end) each, rising, as runs of equal ones; and all their values.

    The loop before the short piece at the end: the other way round takes XLA twice the time, measured.
    """
    runs: list[_Run] = []
    at = 0
    for start, end in spans.tolist():
        length = end - start
        if runs and runs[-1].length == length:
            last = runs[-1]
            apart = start - last.start if last.pieces == 1 else last.apart
            if start == last.start + last.pieces * apart:
                runs[-1] = last._replace(apart=apart, pieces=last.pieces + 1)
                at += length
                continue
        runs.append(_Run(start, at, length, 0, 1))
        at += length
    return runs, at


def _over(runs: Sequence[_Run], state: Any, move: Any) -> Any:
    """Return the state after move(state, length, start in the leaf, start in the segment) of every piece."""
    for run in runs:

        def one(number: Any, state: Any, run: _Run = run) -> Any:
            return move(state, run.length, run.start + number * run.apart, run.at + number * run.length)

        if run.pieces < FEWEST_LOOPED:
            for number in range(run.pieces):
                state = one(number, state)
        else:
            state = lax.fori_loop(0, run.pieces, one, state)
    return state


# ---------------------------------------------------------------------- over several devices

Shard = tuple[tuple[int, int], ...]
"""Per axis of a leaf, the range (start, end) that one device holds."""


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """One fragment in the shards of one leaf.

    rows: per shard int32[width]: which rows of the flat shard are the fragment's, in the segment's order; those past
    the shard's own number of them lie outside the shard, so that every device moves as many.
    places: per shard, which rows of the segment those are (as many as are real).
    """

    grain: int
    width: int
    rows: tuple[NDArray[np.int32], ...]
    places: tuple[Numbers, ...]


def cut_shards(shape: tuple[int, ...], shards: tuple[Shard, ...], spans: Numbers) -> Cut:
    """Return where a fragment lies in shards of one size.

    shape: of the leaf.  shards: one per device; equal ones share their numbers.  spans: int64[pieces, 2], the ranges of
    the flat leaf that make up the fragment's segment, rising and apart.
    """
    runs = {shard: _runs(shape, shard) for shard in dict.fromkeys(shards)}
    grain = gcd(*spans.reshape(-1).tolist())
    for starts, length in runs.values():
        grain = gcd(grain, length, int(np.gcd.reduce(starts)))
    found = {shard: _cross(starts, length, spans, grain) for shard, (starts, length) in runs.items()}
    width = max(places.size for _, places in found.values())
    beyond = np.arange(width) + prod(end - start for start, end in shards[0]) // grain
    padded = {
        shard: np.concatenate([rows, beyond[: width - rows.size]]).astype(np.int32)
        for shard, (rows, _) in found.items()
    }
    return Cut(grain, width, tuple(padded[s] for s in shards), tuple(found[s][1] for s in shards))


def _runs(shape: tuple[int, ...], shard: Shard) -> tuple[Numbers, int]:
    """Return where in the flat leaf the shard's runs of values begin, in the shard's order, and how long each is."""
    inner = len(shape)
    while inner and shard[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    starts, stride = np.zeros(1, np.int64), prod(shape[inner:])
    if not inner:
        return starts, stride
    first, last = shard[inner - 1]
    length, starts = (last - first) * stride, starts + first * stride
    for axis in reversed(range(inner - 1)):
        stride *= shape[axis + 1]
        starts = (np.arange(*shard[axis], dtype=np.int64)[:, None] * stride + starts).reshape(-1)
    return starts, length


def _cross(starts: Numbers, length: int, spans: Numbers, grain: int) -> tuple[Numbers, Numbers]:
    """Return (rows of the shard, rows of the segment) that are the same values, in the segment's order."""
    ours = ((starts // grain)[:, None] + np.arange(length // grain)).reshape(-1)  # rows of the flat leaf
    firsts, ends = spans[:, 0] // grain, spans[:, 1] // grain
    before = np.cumsum(ends - firsts) - (ends - firsts)
    span = np.searchsorted(firsts, ours, side="right") - 1
    (rows,) = np.nonzero((span >= 0) & (ours < ends[span]))
    return rows, before[span[rows]] + ours[rows] - firsts[span[rows]]


AXIS = "device"
EACH_ITS_OWN: PartitionSpec = PartitionSpec(AXIS)  # type: ignore[no-untyped-call]
ALL_ALIKE: PartitionSpec = PartitionSpec()  # type: ignore[no-untyped-call]
"""How a stack lies: each device has its own part, but for leaves of a single value."""


class Group(NamedTuple):
    """Leaves that one compiled function moves: those over the same devices, in the order of their ids."""

    devices: tuple[Any, ...]
    committed: bool

    def stack(self, shards: Mapping[Any, jax.Array]) -> jax.Array:
        """Return the shards, one for each device of this process, as one array: on each device the memory is the
        shard's own."""
        arrays = [shards[device] for device in own_devices(self.devices)]
        if len(self.devices) == 1:
            return arrays[0]
        shape = arrays[0].shape
        if shape:
            shape = (len(self.devices) * shape[0], *shape[1:])
        sharding = NamedSharding(mesh_of(self.devices), EACH_ITS_OWN if shape else ALL_ALIKE)
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def send(self, pieces: Sequence[Array]) -> Array:
        """Return the stack of what each device is sent, from the host or another device; as it is for but one.

        pieces: for each device of this process.
        """
        if len(self.devices) == 1:
            return pieces[0]
        here = own_devices(self.devices)
        return self.stack(dict(zip(here, jax.device_put(list(pieces), here), strict=True)))


class _Piece(NamedTuple):
    """What one device holds of a segment. where, shape: its place in the segment, seen as `Segment` sees it."""

    values: Any
    where: Any
    shape: tuple[int, ...]


class Segment:
    """A segment whose pieces lie on several devices: brought to the host, and joined there, whenever numpy asks.

    float32[count], for `np.asarray`.  shape: as what its pieces are placed in it.
    """

    ndim = 1
    dtype = np.dtype(np.float32)

    def __init__(self, shape: tuple[int, ...], pieces: Sequence[_Piece]) -> None:
        self.shape, self._seen_as, self._pieces = (prod(shape),), shape, tuple(pieces)
        for piece in pieces:
            piece.values.copy_to_host_async()

    def devices(self) -> set[jax.Device]:
        return {device for piece in self._pieces for device in piece.values.devices()}

    def block_until_ready(self) -> Segment:
        for piece in self._pieces:
            piece.values.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        return _joined(self._seen_as, self._pieces).astype(dtype or np.float32, copy=False)


def _joined(seen_as: tuple[int, ...], pieces: Sequence[_Piece]) -> Vector:
    joined = np.empty(seen_as, np.float32)
    for values, where, shape in pieces:
        joined[where] = np.asarray(values)[: prod(shape)].reshape(shape)
    return joined.reshape(-1)


@lru_cache(maxsize=64)
def mesh_of(devices: tuple[jax.Device, ...]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def group_of(leaf: jax.Array) -> Group:
    return Group(_devices_of(leaf.sharding), leaf.committed)


@lru_cache(maxsize=1024)
def _devices_of(sharding: Sharding) -> tuple[jax.Device, ...]:
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


@lru_cache(maxsize=1024)
def own_numbers(sharding: Sharding) -> tuple[int, ...]:
    """Return which of the devices, in the order of their ids, belong to this process."""
    devices = _devices_of(sharding)
    return tuple(devices.index(device) for device in own_devices(devices))


@lru_cache(maxsize=4096)
def shards_of(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Shard, ...]:
    """Return which part of a leaf each device holds, the devices in the order of their ids."""
    indices = sharding.devices_indices_map(shape)
    return tuple(
        tuple(part.indices(size)[:2] for part, size in zip(indices[device], shape, strict=True))
        for device in _devices_of(sharding)
    )


def stacked(leaf: jax.Array, group: Group) -> jax.Array:
    """Return the stack of a leaf's shards; the leaf itself where there is but one device."""
    if len(group.devices) == 1:
        return leaf
    return group.stack({shard.device: shard.data for shard in leaf.addressable_shards})


def unstacked(stack: jax.Array, like: jax.Array) -> jax.Array:
    """Return the leaf, lying as `like` does, of which this is the stack."""
    if not like.committed:
        return stack
    shards = [shard.data for shard in stack.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _place(shard: Shard, number: int, cut: Cut | None) -> tuple[Any, tuple[int, ...]]:
    """Return where a shard's part of a segment lies in it, and its shape there. cut: None for a whole leaf."""
    if cut is None:
        return tuple(slice(*ends) for ends in shard), tuple(end - start for start, end in shard)
    return cut.places[number], (cut.places[number].size, cut.grain)


def segment_of(stack: jax.Array, leaf: jax.Array, cut: Cut | None) -> Any:
    """Return the segment that lies in pieces on the devices of a leaf, one piece of each distinct shard.

    Where no process has all of them, all processes gather them: it is a numpy array then.
    """
    devices, shards = _devices_of(leaf.sharding), shards_of(leaf.sharding, leaf.shape)
    if len(devices) == 1:
        return stack
    is_here = leaf.is_fully_addressable or each_has_all(leaf.sharding, leaf.shape)
    if is_here:
        pieces: dict[Any, Any] = {shard.device: shard.data for shard in stack.addressable_shards}
    else:
        pieces = dict(zip(devices, gathered_stack(stack).reshape(len(devices), -1), strict=True))
    distinct = {shard: number for number, shard in reversed([*enumerate(shards)]) if devices[number] in pieces}
    if len(distinct) == 1:
        (number,) = distinct.values()
        return pieces[devices[number]]
    places = [_Piece(pieces[devices[number]], *_place(shard, number, cut)) for shard, number in distinct.items()]
    seen_as = leaf.shape if cut is None else (sum(one.shape[0] for one in places), cut.grain)
    return Segment(seen_as, places) if is_here else _joined(seen_as, places)


def pieces_of(segment: Array, leaf: jax.Array, cut: Cut | None) -> list[Array]:
    """Return what each device of this process is to be sent of a segment of a leaf: equal shards the same, in the same
    memory."""
    shards = shards_of(leaf.sharding, leaf.shape)
    here = own_numbers(leaf.sharding)
    seen_as = leaf.shape if cut is None else (-1, cut.grain)
    if len(set(shards)) == 1:
        return [segment.reshape(seen_as)] * len(here)
    values, pieces = np.asarray(segment).reshape(seen_as), dict[Shard, Array]()
    for number, shard in ((number, shards[number]) for number in here):
        if shard not in pieces:
            where, shape = _place(shard, number, cut)
            if cut is None:
                pieces[shard] = values[where]
            else:
                pieces[shard] = np.zeros((cut.width, cut.grain), np.float32)
                pieces[shard][: shape[0]] = values[where]
    return [pieces[shards[number]] for number in here]


class Kernel(NamedTuple):
    """What each device does with its shard of a leaf.

    function: (grain, rows or None for all, the shard of the leaf, those of the other operands) -> a shard.  flat: what
    it gives is a part of a segment; else a shard like the one that went in, in its memory with `donate`.
    """

    function: Callable[..., Any]
    flat: bool = False
    donate: bool = False


Operands = Sequence[Sequence[Array]]


class Home(NamedTuple):
    """Where a leaf lives. committed: tied to its devices, as jax has it; what is not follows what it meets."""

    sharding: Sharding
    committed: bool


class SpreadLeaves:
    """Leaves whose homes may differ from leaf to leaf, and what each device does with its own shards of them.

    leaves: those with which the node joined.  Raises ModelMismatch, naming the leaf, for one that lies on devices of
    several processes but not of all.
    """

    def __init__(self, layout: Layout, model: ModelSpec, leaves: Sequence[Any], donate: bool, elastic: float) -> None:
        self.layout, self.model, self.donate, self.elastic = layout, model, donate, elastic
        self._dtypes = [jnp.dtype(spec.dtype) for spec in model]
        self._cuts: dict[tuple[int, int, tuple[Shard, ...]], Cut] = {}
        self._homes = self._homes_of([jnp.asarray(leaf) for leaf in leaves])

    def parameters(self, anchor: Anchor) -> Leaves:
        return self._put([self._on_host(leaf) for leaf in anchor], self._homes, self._dtypes)

    def _homes_of(self, leaves: Leaves) -> list[Home]:
        for leaf, spec in zip(leaves, self.model, strict=True):
            check_placed(leaf, spec)
        return [Home(leaf.sharding, leaf.committed) for leaf in leaves]

    def _put(self, values: Sequence[Array], homes: Sequence[Home], dtypes: Sequence[Any]) -> Leaves:
        """Return leaves of these values (numpy), of these dtypes, each device with its own part."""
        placed: Leaves = []
        for value, home, dtype in zip(values, homes, dtypes, strict=True):
            own = np.array(value, dtype)  # jax may keep this very memory, so that it is nobody else's
            placed.append(put(own, home.sharding) if home.committed else jnp.asarray(own))
        return placed

    def _on_host(self, leaf: Array) -> Vector:
        """Return a leaf on the host in float32: a copy of a jax array, for a view would defeat its donation."""
        return whole_leaf(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf, np.float32)

    def _add(self, leaves: Leaves, step: Mapping[int, Array], fragment: int, donate: bool) -> Leaves:
        """Return the leaves with segments of one fragment added (numpy or jax): `step`, by the leaf's number.

        The sum is made in the wider of the two dtypes and rounded to the leaf's.  donate: the touched leaves' memory.
        """
        moving, pieces, cuts = self._meet(leaves, step, fragment)
        return _replaced(leaves, dict(zip(step, self._run(ADD[donate], moving, [pieces], cuts), strict=True)))

    def _compile_add(self, leaves: Leaves, touched: Sequence[int], fragment: int, donate: bool) -> None:
        """Compile what `_add` needs to move these leaves together; nothing is moved."""
        spans = {i: self.layout.spans(i, fragment) for i in touched}
        still = {i: np.zeros(int(np.sum(span[:, 1] - span[:, 0])), np.float32) for i, span in spans.items()}
        moving, pieces, cuts = self._meet(leaves, still, fragment)
        for compiled, arguments, _ in self._calls(ADD[donate], moving, [pieces], cuts):
            compiled.lower(*arguments).compile()

    def _adopted(self, params: Leaves, anchor: Anchor, new: Sequence[Array], own: Segments) -> Leaves:
        """Return new + (params - anchor - D(u)): leaf by leaf, and by the host, where `new` is."""
        adopted: Leaves = []
        for i, (leaf, known, fresh) in enumerate(zip(params, anchor, new, strict=True)):
            rest = whole_leaf(jnp.asarray(leaf))
            np.subtract(rest, self._on_host(known), out=rest)
            for fragment, segments in own.items():
                parts = dict(zip(self.layout.leaves(fragment), segments, strict=True))
                if i in parts:
                    self.layout.add(rest, i, fragment, -np.asarray(parts[i]))
            np.add(rest, np.asarray(fresh, np.float32), out=rest)
            if self.donate and isinstance(leaf, jax.Array):
                leaf.delete()
            adopted += self._put([rest], [self._homes[i]], [self._dtypes[i]])
        return adopted

    # ------------------------------------------------------------------ what each device does

    def _cut(self, leaf: jax.Array, index: int, fragment: int) -> Cut | None:
        """Return where the fragment lies in the shards of a leaf; None where it is the whole leaf."""
        if self.layout.fragments == 1:
            return None
        shards = shards_of(leaf.sharding, leaf.shape)
        if (cut := self._cuts.get((index, fragment, shards))) is None:
            cut = cut_shards(leaf.shape, shards, self.layout.spans(index, fragment))
            self._cuts[index, fragment, shards] = cut
        return cut

    def _segments(
        self, kernel: Kernel, leaves: Leaves, others: Operands, touched: Sequence[int], fragment: int
    ) -> list[Any]:
        """Return what the kernel makes of a fragment's part of each leaf: a jax array where one device holds all of it
        (that one's own, where leaves are replicated), else a `Segment`."""
        cuts = [self._cut(leaf, i, fragment) for leaf, i in zip(leaves, touched, strict=True)]
        stacks = self._run(kernel, leaves, others, cuts)
        return [segment_of(stack, leaf, cut) for stack, leaf, cut in zip(stacks, leaves, cuts, strict=True)]

    def _meet(
        self, leaves: Leaves, step: Mapping[int, Array], fragment: int
    ) -> tuple[Leaves, list[Array], list[Cut | None]]:
        """Return the touched leaves, the stacks of what each device is sent for them, and their cuts."""
        moving = [leaves[i] for i in step]
        cuts = [self._cut(leaves[i], i, fragment) for i in step]
        each = zip(moving, step.values(), cuts, strict=True)
        return moving, [group_of(leaf).send(pieces_of(segment, leaf, cut)) for leaf, segment, cut in each], cuts

    def _run(self, kernel: Kernel, leaves: Leaves, others: Operands, cuts: Sequence[Cut | None]) -> Leaves:
        """Return what the kernel makes of each leaf and, behind it, the stacks of `others`, one of each per leaf."""
        made: dict[int, jax.Array] = {}
        for compiled, arguments, members in self._calls(kernel, leaves, others, cuts):
            made.update(zip(members, compiled(*arguments), strict=True))
        return [made[i] if kernel.flat else unstacked(made[i], leaf) for i, leaf in enumerate(leaves)]

    def _calls(
        self, kernel: Kernel, leaves: Leaves, others: Operands, cuts: Sequence[Cut | None]
    ) -> Iterator[tuple[Any, tuple[Any, ...], list[int]]]:
        """Give, for the leaves of each group of devices, the jitted function, its arguments, and which they are."""
        groups: dict[Group, list[int]] = {}
        for position, leaf in enumerate(leaves):
            groups.setdefault(group_of(leaf), []).append(position)
        for group, members in groups.items():
            stacks = [stacked(leaves[position], group) for position in members]
            behind = [[other[position] for position in members] for other in others]
            chosen = [cuts[position] for position in members]
            placed = [leaves[position].sharding for position in members]
            rows = [
                None if cut is None else group.send([cut.rows[number] for number in own_numbers(sharding)])
                for sharding, cut in zip(placed, chosen, strict=True)
            ]
            grains = tuple(None if cut is None else cut.grain for cut in chosen)
            scalars = tuple(tuple(stack.ndim == 0 for stack in operand) for operand in [stacks, *behind])
            yield _jitted(kernel, group, grains, scalars), (stacks, behind, rows), members


class SpreadMoves(SpreadLeaves):
    """The moves where parameters lie on several devices, each device with its own part of the anchor."""

    def place(self, leaves: Sequence[Array]) -> list[Any]:
        return self._put([self._on_host(leaf) for leaf in leaves], self._homes, [jnp.float32] * len(leaves))

    def settle(self, params: Leaves, anchor: Anchor) -> Anchor:
        homes, before = self._homes_of(params), self._homes
        self._homes = homes
        for i, (now, then) in enumerate(zip(homes, before, strict=True)):
            if now != then:
                anchor[i : i + 1] = self._put([whole_leaf(anchor[i])], [now], [jnp.float32])
        return anchor

    def warm_up(self, params: Leaves, anchor: Anchor) -> None:
        for fragment in range(self.layout.fragments):
            touched = self.layout.leaves(fragment)
            for whole in {True, self.elastic == 1}:
                self.pending(params, anchor, fragment, whole=whole)
            self._compile_add(anchor, touched, fragment, True)
            self._compile_add(params, touched, fragment, self.donate)

    def pending(self, params: Leaves, anchor: Anchor, fragment: int, *, whole: bool = False) -> list[Array]:
        touched = self.layout.leaves(fragment)
        others = [stacked(anchor[i], group_of(anchor[i])) for i in touched]
        kernel = Kernel(_Ahead(1.0 if whole else self.elastic), flat=True)
        return self._segments(kernel, [params[i] for i in touched], [others], touched, fragment)

    def offered(self, params: Leaves, anchor: Anchor, fragment: int, *, whole: bool = False) -> Sequence[Array]:
        return self.pending(params, anchor, fragment, whole=whole)

    def apply(self, params: Leaves, anchor: Anchor, aggregate: Segments, own: Segments) -> tuple[Leaves, Anchor]:
        for fragment in sorted({*aggregate, *own}):
            touched = self.layout.leaves(fragment)
            if fragment in aggregate:
                anchor = self._add(anchor, dict(zip(touched, aggregate[fragment], strict=True)), fragment, True)
            step = dict(zip(touched, _step(aggregate, own, fragment), strict=True))
            params = self._add(params, step, fragment, self.donate)
        return params, anchor

    def adopt(self, params: Leaves, anchor: Anchor, new: Sequence[Array], own: Segments) -> tuple[Leaves, Anchor]:
        adopted = self._adopted(params, anchor, new, own)
        del anchor[:]
        return adopted, self.place(new)


class HostMoves(SpreadLeaves):
    """The moves where the anchor is on the host, in numpy arrays that are written in place."""

    def place(self, leaves: Sequence[Array]) -> list[Any]:
        return [np.array(self._on_host(leaf), np.float32, order="C") for leaf in leaves]

    def settle(self, params: Leaves, anchor: Anchor) -> Anchor:
        self._homes = self._homes_of([jnp.asarray(leaf) for leaf in params])
        return anchor

    def warm_up(self, params: Leaves, anchor: Anchor) -> None:
        params = [jnp.asarray(leaf) for leaf in params]
        for fragment in range(self.layout.fragments):
            self.pending(params, anchor, fragment)
            for i in self.layout.leaves(fragment):
                self._compile_add(params, [i], fragment, self.donate)

    def pending(self, params: Leaves, anchor: Anchor, fragment: int, *, whole: bool = False) -> list[Array]:
        """See Moves. The segments are numpy arrays; waits until they are here."""
        segments: list[Array] = []
        touched = self.layout.leaves(fragment)
        coming = [self._take(params[i], i, fragment) for i in touched[:1]]
        for number, i in enumerate(touched):
            coming += [self._take(params[j], j, fragment) for j in touched[number + 1 : number + 2]]  # one ahead
            segment = np.subtract(np.asarray(coming.pop(0)), self.layout.take(anchor[i], i, fragment))
            segments.append(segment if whole or self.elastic == 1 else np.float32(self.elastic) * segment)
        return segments

    def offered(self, params: Leaves, anchor: Anchor, fragment: int, *, whole: bool = False) -> Sequence[Array]:
        return self.pending(params, anchor, fragment, whole=whole)

    def apply(self, params: Leaves, anchor: Anchor, aggregate: Segments, own: Segments) -> tuple[Leaves, Anchor]:
        for fragment in sorted({*aggregate, *own}):
            touched = self.layout.leaves(fragment)
            for i, shared in zip(touched, aggregate.get(fragment, ()), strict=fragment in aggregate):
                self.layout.add(anchor[i], i, fragment, np.asarray(shared))
            params = [jnp.asarray(leaf) for leaf in params]
            for i, segment in zip(touched, _step(aggregate, own, fragment), strict=True):
                params = self._add(params, {i: segment}, fragment, self.donate)
                params[i].block_until_ready()  # or all that is sent would be on the device at once
        return params, anchor

    def adopt(self, params: Leaves, anchor: Anchor, new: Sequence[Array], own: Segments) -> tuple[Leaves, Anchor]:
        return self._adopted(params, anchor, new, own), self.place(new)

    def _take(self, leaf: Array, index: int, fragment: int) -> Array:
        leaf = jnp.asarray(leaf)
        if self.layout.fragments == 1:
            return whole_leaf(leaf).reshape(-1)
        return self._segments(TAKE, [leaf], [], [index], fragment)[0]


def _step(aggregate: Segments, own: Segments, fragment: int) -> Sequence[Array]:
    if fragment not in own:
        return aggregate[fragment]
    if fragment not in aggregate:
        return [-segment for segment in own[fragment]]
    return [shared - mine for shared, mine in zip(aggregate[fragment], own[fragment], strict=True)]


# ---------------------------------------------------------------------- kernels: one shard of one leaf, on its device


def _rows_of(shard: jax.Array, grain: int, rows: jax.Array | None) -> jax.Array:
    values = shard.reshape(-1, grain)
    return (
        values
        if rows is None
        else values.at[rows].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)
    )


def _taken(grain: int, rows: jax.Array | None, leaf: jax.Array) -> jax.Array:
    return _rows_of(leaf, grain, rows).astype(jnp.float32).reshape(-1)


@dataclass(frozen=True)
class _Ahead:
    share: float

    def __call__(self, grain: int, rows: jax.Array | None, leaf: jax.Array, anchor: jax.Array) -> jax.Array:
        ahead = _taken(grain, rows, leaf) - _taken(grain, rows, anchor)
        return ahead if self.share == 1 else self.share * ahead


def _added(grain: int, rows: jax.Array | None, leaf: jax.Array, piece: jax.Array) -> jax.Array:
    if rows is None:
        return (leaf + piece.reshape(leaf.shape)).astype(leaf.dtype)
    values, piece = leaf.reshape(-1, grain), piece.reshape(-1, grain)
    if leaf.dtype == piece.dtype:
        return values.at[rows].add(piece, mode="drop", unique_indices=True, indices_are_sorted=True).reshape(leaf.shape)
    wanted = (_rows_of(leaf, grain, rows) + piece).astype(leaf.dtype)
    return values.at[rows].set(wanted, mode="drop", unique_indices=True, indices_are_sorted=True).reshape(leaf.shape)


TAKE, ADD = Kernel(_taken, flat=True), (Kernel(_added), Kernel(_added, donate=True))
"""ADD: by whether the leaf's memory may be used up."""


@lru_cache(maxsize=KERNELS_KEPT)
def _jitted(kernel: Kernel, group: Group, grains: tuple[int | None, ...], scalars: tuple[tuple[bool, ...], ...]) -> Any:
    """Return the kernel of several leaves, jitted for one group of devices, and compiled once.

    grains: per leaf, None where all of it is meant.  scalars: per operand and leaf, whether it is a single value.
    """

    def on_device(leaves: Leaves, others: list[Leaves], rows: list[jax.Array | None]) -> list[jax.Array]:
        each = zip(grains, rows, leaves, *others, strict=True)
        return [kernel.function(grain or 1, chosen, *shards) for grain, chosen, *shards in each]

    function: Callable[..., Any] = on_device
    if len(group.devices) > 1:
        first, *others = [[ALL_ALIKE if scalar else EACH_ITS_OWN for scalar in operand] for operand in scalars]
        rows = [None if grain is None else EACH_ITS_OWN for grain in grains]
        made = [EACH_ITS_OWN] * len(first) if kernel.flat else first
        function = jax.shard_map(
            on_device, mesh=mesh_of(group.devices), in_specs=(first, others, rows), out_specs=made, check_vma=False
        )
    return jax.jit(function, donate_argnums=0 if kernel.donate else ())
