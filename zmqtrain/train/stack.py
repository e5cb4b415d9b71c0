"""See leaves over several devices as stacks of their shards, and their segments as pieces, without moving a value.

Rule 1: a stack is a leaf's own memory: on each device the shard that is there, in the order of the devices' ids.
Rule 2: whatever its mesh and its axes, a leaf over the same devices has the same kind of stack: one compiled function
takes leaves of all meshes.  Rule 3: a segment that lies in pieces becomes whole on the host only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from zmqtrain.core.types import Array
from zmqtrain.train.cut import Cut, Shard

AXIS = "device"
EACH_ITS_OWN: PartitionSpec = PartitionSpec(AXIS)  # type: ignore[no-untyped-call]
ALL_ALIKE: PartitionSpec = PartitionSpec()  # type: ignore[no-untyped-call]
"""How a stack lies: each device has its own part, but for leaves of a single value."""


class Group(NamedTuple):
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
        sharding = NamedSharding(mesh_of(self.devices), EACH_ITS_OWN if shape else ALL_ALIKE)
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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        joined = np.empty(self._seen_as, np.float32)
        for values, where, shape in self._pieces:
            joined[where] = np.asarray(values)[: prod(shape)].reshape(shape)
        return joined.reshape(-1).astype(dtype or np.float32, copy=False)


@lru_cache(maxsize=64)
def mesh_of(devices: tuple[jax.Device, ...]) -> Mesh:
    """Return all these devices in a row, as the mesh of their stacks."""
    return Mesh(np.array(devices), (AXIS,))


def group_of(leaf: jax.Array) -> Group:
    """Return over which devices a leaf lies."""
    return Group(_devices_of(leaf.sharding), leaf.committed)


@lru_cache(maxsize=1024)
def _devices_of(sharding: Sharding) -> tuple[jax.Device, ...]:
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


@lru_cache(maxsize=4096)
def shards_of(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Shard, ...]:
    """Return which part of a leaf each device holds, the devices in the order of their ids."""
    indices = sharding.devices_indices_map(shape)
    return tuple(
        tuple(part.indices(size)[:2] for part, size in zip(indices[device], shape, strict=True))
        for device in _devices_of(sharding)
    )


def _slices(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in shard)


def stacked(leaf: jax.Array, group: Group) -> jax.Array:
    """Return the stack of a leaf\'s shards; the leaf itself where there is but one device."""
    if len(group.devices) == 1:
        return leaf
    return group.stack({shard.device: shard.data for shard in leaf.addressable_shards})


def unstacked(stack: jax.Array, like: jax.Array) -> jax.Array:
    """Return the leaf, lying as `like` does, of which this is the stack."""
    if not like.committed:
        return stack
    shards = [shard.data for shard in stack.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def segment_of(stack: jax.Array, leaf: jax.Array, cut: Cut | None) -> Any:
    """Return the segment that lies in pieces on the devices of a leaf, one piece of each distinct shard."""
    devices, shards = _devices_of(leaf.sharding), shards_of(leaf.sharding, leaf.shape)
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


def pieces_of(segment: Array, leaf: jax.Array, cut: Cut | None) -> list[Array]:
    """Return what each device of a leaf is to be sent of a segment: equal shards the same, in the same memory."""
    shards = shards_of(leaf.sharding, leaf.shape)
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
