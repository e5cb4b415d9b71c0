"""Move fragments in and out of leaves that are spread over several devices, each device its own piece.

Rule 1: nothing is gathered: what is compiled here runs on each device's shard alone (`shard_map`, no collective); a
segment becomes whole on the host only.  Rule 2: any sharding will do, and a mixture: a leaf is seen as the stack of its
shards, without a copy, so that one compiled function moves leaves of all meshes over the same devices.
Rule 3: what comes out has the sharding that went in, and with `donate` its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from zmqtrain.errors import ModelMismatch
from zmqtrain.train.cut import Cut, Shard, cut_shards
from zmqtrain.types import Array, Layout, ModelSpec

__all__ = ["Home", "Segment", "Shards", "is_spread"]

Vector = NDArray[np.float32]
Leaves = list[jax.Array]
Segments = Mapping[int, Array]

AXIS = "device"
COMPILED_KEPT = 4096
"""So many jitted functions are kept, of all models of a process: a handful per fragment, or per leaf."""
_EACH_ITS_OWN: PartitionSpec = PartitionSpec(AXIS)  # type: ignore[no-untyped-call]
_ALL_ALIKE: PartitionSpec = PartitionSpec()  # type: ignore[no-untyped-call]


class Home(NamedTuple):
    """Where a leaf lives. committed: tied to its devices, as jax has it; what is not follows what it meets."""

    sharding: Sharding
    committed: bool


class _Group(NamedTuple):
    """Leaves that one compiled function moves: those over the same devices, in the order of their ids."""

    devices: tuple[Any, ...]
    committed: bool

    def stack(self, shards: Mapping[Any, jax.Array]) -> jax.Array:
        """Return the shards, one per device, as one array: on each device the memory is the shard's own."""
        arrays = [shards[device] for device in self.devices]
        if len(arrays) == 1:
            return arrays[0]
        shape = arrays[0].shape
        if shape:
            shape = (len(arrays) * shape[0], *shape[1:])
        sharding = NamedSharding(_mesh(self.devices), _EACH_ITS_OWN if shape else _ALL_ALIKE)
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def send(self, pieces: Sequence[Array]) -> Array:
        """Return the stack of what each device is sent, from the host or another device; as it is for but one."""
        if len(self.devices) == 1:
            return pieces[0]
        return self.stack(dict(zip(self.devices, jax.device_put(list(pieces), list(self.devices)), strict=True)))


class _Piece(NamedTuple):
    """What one device holds of a segment. where, shape: its place in the segment, seen as `Segment` sees it."""

    values: jax.Array
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
        """Return the devices that hold a piece of it."""
        return {device for piece in self._pieces for device in piece.values.devices()}

    def block_until_ready(self) -> Segment:
        """Wait until the devices have computed it."""
        for piece in self._pieces:
            piece.values.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Vector:
        joined = np.empty(self._seen_as, np.float32)
        for values, where, shape in self._pieces:
            joined[where] = np.asarray(values)[: prod(shape)].reshape(shape)
        return joined.reshape(-1).astype(dtype or np.float32, copy=False)


class Shards:
    """The leaves of one model on their devices, whose homes may differ from leaf to leaf.

    Raises ModelMismatch, naming the leaf, for one of which another process holds a part.
    """

    def __init__(self, layout: Layout, model: ModelSpec) -> None:
        self.layout, self.model = layout, model
        self._cuts: dict[tuple[int, int, tuple[Shard, ...]], Cut] = {}

    def homes(self, leaves: Leaves) -> list[Home]:
        """Return where each leaf lives."""
        for leaf, spec in zip(leaves, self.model, strict=True):
            if not leaf.is_fully_addressable:
                raise ModelMismatch(
                    f"the leaf {spec} is spread over several processes; a node is one process with all devices of its "
                    "PC, so do not call jax.distributed.initialize",
                    spec.path,
                )
        return [Home(leaf.sharding, leaf.committed) for leaf in leaves]

    def put(self, values: Sequence[Array], homes: Sequence[Home], dtypes: Sequence[Any]) -> Leaves:
        """Return leaves of these values (numpy), of these dtypes, each device with its own part."""
        placed: Leaves = []
        for value, home, dtype in zip(values, homes, dtypes, strict=True):
            own = np.array(value, dtype)  # jax may keep this very memory, so that it is nobody else's
            placed.append(jax.device_put(own, home.sharding) if home.committed else jnp.asarray(own))
        return placed

    def fetch(self, leaf: jax.Array) -> NDArray[np.float32]:
        """Return a whole leaf on the host, in float32, joined there from what each device holds; nobody else's."""
        whole = np.empty(leaf.shape, np.float32)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                whole[shard.index] = np.asarray(shard.data)
        return whole

    def take(self, leaf: jax.Array, index: int, fragment: int) -> Any:
        """Return the float32 segment that one leaf has in a fragment, as it is now."""
        return self._segments(_taken, [leaf], [], [index], fragment)[0]

    def pending(self, params: Leaves, anchor: Leaves, fragment: int, share: float = 1.0) -> list[Any]:
        """Return `share` times params - anchor of one fragment: a float32 segment per leaf that it touches.

        A segment is a jax array where one device holds all of it (that one's own, where leaves are replicated), else a
        `Segment`. The anchor lives where the parameters do.
        """
        touched = self.layout.leaves(fragment)
        others = [_stacked(anchor[i], _group_of(anchor[i])) for i in touched]
        return self._segments(_Ahead(share), [params[i] for i in touched], [others], touched, fragment)

    def add(self, leaves: Sequence[jax.Array], step: Segments, fragment: int, *, donate: bool) -> Leaves:
        """Return the leaves with segments of one fragment added (numpy or jax): `step`, by the leaf's number.

        The sum is made in the wider of the two dtypes and rounded to the leaf's.  donate: the touched leaves' memory.
        """
        moving, pieces, cuts = self._meet(leaves, step, fragment)
        moved = dict(zip(step, self._run(_added, moving, [pieces], cuts, donate=donate), strict=True))
        return [moved.get(i, leaf) for i, leaf in enumerate(leaves)]

    def compile_add(self, leaves: Sequence[jax.Array], touched: Sequence[int], fragment: int, *, donate: bool) -> None:
        """Have compiled what `add` needs to move these leaves together; nothing is moved."""
        still = {}
        for i in touched:
            spans = self.layout.spans(i, fragment)
            still[i] = np.zeros(int(np.sum(spans[:, 1] - spans[:, 0])), np.float32)
        moving, pieces, cuts = self._meet(leaves, still, fragment)
        for compiled, arguments, _ in self._calls(_added, moving, [pieces], cuts, donate=donate):
            compiled.lower(*arguments).compile()

    # ------------------------------------------------------------------ what each device does

    def _cut(self, leaf: jax.Array, index: int, fragment: int) -> Cut | None:
        """Return where the fragment lies in the shards of a leaf; None where it is the whole leaf."""
        if self.layout.fragments == 1:
            return None
        shards = _shards_of(leaf.sharding, leaf.shape)
        if (cut := self._cuts.get((index, fragment, shards))) is None:
            cut = cut_shards(leaf.shape, shards, self.layout.spans(index, fragment))
            self._cuts[index, fragment, shards] = cut
        return cut

    def _segments(
        self,
        kernel: _Kernel,
        leaves: Sequence[jax.Array],
        others: Sequence[Sequence[Array]],
        touched: Sequence[int],
        fragment: int,
    ) -> list[Any]:
        cuts = [self._cut(leaf, i, fragment) for leaf, i in zip(leaves, touched, strict=True)]
        stacks = self._run(kernel, leaves, others, cuts, flat=True)
        return [_segment(stack, leaf, cut) for stack, leaf, cut in zip(stacks, leaves, cuts, strict=True)]

    def _meet(
        self, leaves: Sequence[jax.Array], step: Segments, fragment: int
    ) -> tuple[Leaves, list[Array], list[Cut | None]]:
        """Return the touched leaves, the stacks of what each device is sent for them, and their cuts."""
        moving, pieces, cuts = [], [], []
        for i, segment in step.items():
            moving.append(leaves[i])
            cuts.append(self._cut(leaves[i], i, fragment))
            pieces.append(_group_of(leaves[i]).send(_pieces_of(segment, leaves[i], cuts[-1])))
        return moving, pieces, cuts

    def _run(
        self,
        kernel: _Kernel,
        leaves: Sequence[jax.Array],
        others: Sequence[Sequence[Array]],
        cuts: Sequence[Cut | None],
        *,
        flat: bool = False,
        donate: bool = False,
    ) -> list[jax.Array]:
        """Return what the kernel makes of each leaf and, behind it, the stacks of `others`, one of each per leaf.

        flat: that is a stack of flat segments; else a leaf like the one that went in, in its memory with `donate`.
        """
        made: dict[int, jax.Array] = {}
        for compiled, arguments, members in self._calls(kernel, leaves, others, cuts, flat=flat, donate=donate):
            made.update(zip(members, compiled(*arguments), strict=True))
        return [made[i] if flat else _unstacked(made[i], leaf) for i, leaf in enumerate(leaves)]

    def _calls(
        self,
        kernel: _Kernel,
        leaves: Sequence[jax.Array],
        others: Sequence[Sequence[Array]],
        cuts: Sequence[Cut | None],
        *,
        flat: bool = False,
        donate: bool = False,
    ) -> Iterator[tuple[Any, tuple[Any, ...], list[int]]]:
        """Give, for the leaves of each group of devices, the jitted function, its arguments, and which they are."""
        groups: dict[_Group, list[int]] = {}
        for position, leaf in enumerate(leaves):
            groups.setdefault(_group_of(leaf), []).append(position)
        for group, members in groups.items():
            stacks = [_stacked(leaves[position], group) for position in members]
            behind = [[other[position] for position in members] for other in others]
            chosen = [cuts[position] for position in members]
            rows = [None if cut is None else group.send(cut.rows) for cut in chosen]
            grains = tuple(None if cut is None else cut.grain for cut in chosen)
            scalars = tuple(tuple(stack.ndim == 0 for stack in operand) for operand in [stacks, *behind])
            jitted = _jitted(kernel, group, grains, scalars, flat, donate)
            yield jitted, (stacks, behind, rows), members


def is_spread(leaves: Sequence[Any]) -> bool:
    """Return whether these arrays live on more than one device, taken together."""
    return len({device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.sharding.device_set}) > 1


# ---------------------------------------------------------------------- kernels: one shard of one leaf, on its device


_Kernel = Callable[..., Any]
"""(grain, rows or None for all, the shard of the leaf, those of the other operands) -> a shard."""


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


@lru_cache(maxsize=COMPILED_KEPT)
def _jitted(
    kernel: _Kernel,
    group: _Group,
    grains: tuple[int | None, ...],
    scalars: tuple[tuple[bool, ...], ...],
    flat: bool,
    donate: bool,
) -> Any:
    """Return the kernel of several leaves, jitted for one group of devices; whoever asks, it is compiled once.

    grains: per leaf, None where all of it is meant.  scalars: per operand and leaf, whether it is a single value.
    """

    def on_device(leaves: Leaves, others: list[Leaves], rows: list[jax.Array | None]) -> list[jax.Array]:
        each = zip(grains, rows, leaves, *others, strict=True)
        return [kernel(grain or 1, chosen, *shards) for grain, chosen, *shards in each]

    function: Callable[..., Any] = on_device
    if len(group.devices) > 1:
        first, *others = [[_ALL_ALIKE if scalar else _EACH_ITS_OWN for scalar in operand] for operand in scalars]
        rows = [None if grain is None else _EACH_ITS_OWN for grain in grains]
        made = [_EACH_ITS_OWN] * len(first) if flat else first
        function = jax.shard_map(
            on_device, mesh=_mesh(group.devices), in_specs=(first, others, rows), out_specs=made, check_vma=False
        )
    return jax.jit(function, donate_argnums=0 if donate else ())


# ---------------------------------------------------------------------- shards, stacks and segments


@lru_cache(maxsize=64)
def _mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def _group_of(leaf: jax.Array) -> _Group:
    return _Group(_devices_of(leaf.sharding), leaf.committed)


@lru_cache(maxsize=1024)
def _devices_of(sharding: Sharding) -> tuple[jax.Device, ...]:
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


@lru_cache(maxsize=4096)
def _shards_of(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Shard, ...]:
    """Return which part of a leaf each device holds, the devices in the order of their ids."""
    indices = sharding.devices_indices_map(shape)
    return tuple(
        tuple(part.indices(size)[:2] for part, size in zip(indices[device], shape, strict=True))
        for device in _devices_of(sharding)
    )


def _slices(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in shard)


def _stacked(leaf: jax.Array, group: _Group) -> jax.Array:
    if len(group.devices) == 1:
        return leaf
    return group.stack({shard.device: shard.data for shard in leaf.addressable_shards})


def _unstacked(stack: jax.Array, like: jax.Array) -> jax.Array:
    if not like.committed:
        return stack
    shards = [shard.data for shard in stack.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _segment(stack: jax.Array, leaf: jax.Array, cut: Cut | None) -> Any:
    """Return the segment that lies in pieces on the devices of a leaf, one piece of each distinct shard."""
    devices, shards = _devices_of(leaf.sharding), _shards_of(leaf.sharding, leaf.shape)
    if len(devices) == 1:
        return stack
    pieces = {shard.device: shard.data for shard in stack.addressable_shards}
    distinct = {shard: number for number, shard in reversed([*enumerate(shards)])}
    if len(distinct) == 1:
        return pieces[devices[0]]
    if cut is None:
        shapes = {shard: tuple(end - start for start, end in shard) for shard in distinct}
        whole = [_Piece(pieces[devices[number]], _slices(s), shapes[s]) for s, number in distinct.items()]
        return Segment(leaf.shape, whole)
    rows = sum(cut.places[number].size for number in distinct.values())
    return Segment(
        (rows, cut.grain),
        [
            _Piece(pieces[devices[number]], cut.places[number], (cut.places[number].size, cut.grain))
            for number in distinct.values()
        ],
    )


def _pieces_of(segment: Array, leaf: jax.Array, cut: Cut | None) -> list[Array]:
    """Return what each device of a leaf is to be sent of a segment: equal shards the same, in the same memory."""
    shards = _shards_of(leaf.sharding, leaf.shape)
    if len(set(shards)) == 1:
        alike = segment.reshape(leaf.shape) if cut is None else segment.reshape(-1, cut.grain)
        return [alike] * len(shards)
    values, pieces = np.asarray(segment), {}
    for number, shard in enumerate(shards):
        if shard in pieces:
            continue
        if cut is None:
            pieces[shard] = values.reshape(leaf.shape)[_slices(shard)]
        else:
            pieces[shard] = np.zeros((cut.width, cut.grain), np.float32)
            pieces[shard][: cut.places[number].size] = values.reshape(-1, cut.grain)[cut.places[number]]
    return [pieces[shard] for shard in shards]
