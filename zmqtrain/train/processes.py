"""Several processes of one `jax.distributed` program: leaves that lie on all of them, and messages of the first one.

Rule 1: each function and method here that says "all processes" is a collective of JAX: all processes call it, in one
order. A process that does not call it holds up the others.
Rule 2: values travel as 32-bit integers, so that no sum, no negative zero and no denormal changes a bit.
Rule 3: there are few sizes of broadcast, powers of two, because JAX compiles one function for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from numpy.typing import NDArray

from zmqtrain.core.errors import ModelMismatch
from zmqtrain.core.types import Array, LeafSpec

Vector = NDArray[np.float32]
Words = NDArray[np.int32]

HEAD_WORDS = 256
"""The size of a message's first broadcast: its length in bytes, then as many of its bytes as there is room for."""
FEWEST_WORDS, MOST_WORDS = 256, 1 << 20
"""The sizes of the broadcasts that follow a head, 1 KiB to 4 MiB: what a device must have free for one."""


# ---------------------------------------------------------------------- leaves


def spans_processes(leaf: Any) -> bool:
    """Return whether other processes than this one hold parts, or copies, of a leaf."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def check_placed(leaf: jax.Array, spec: LeafSpec) -> None:
    """Raise ModelMismatch for a leaf on devices of several processes, but not of all."""
    if leaf.is_fully_addressable:
        return
    devices: set[Any] = leaf.sharding.device_set
    holders = len({device.process_index for device in devices})
    if holders < jax.process_count():
        raise ModelMismatch(
            f"the leaf {spec} lies on {holders} of the {jax.process_count()} processes of this node. Give it a "
            "sharding over a mesh of jax.devices(), or have a copy of it in each process",
            spec.path,
        )


def own_devices(devices: Sequence[Any]) -> list[Any]:
    """Return those of the devices that belong to this process."""
    here = jax.process_index()
    return [device for device in devices if device.process_index == here]


@lru_cache(maxsize=4096)
def each_has_all(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether the devices of each process hold all of a leaf together, so that nothing needs to be gathered.

    All processes have the same answer, because it is of the sharding alone.
    """
    held: dict[int, set[str]] = {}
    placed: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in placed.items():
        held.setdefault(device.process_index, set()).add(repr(index))
    everything = set[str]().union(*held.values())
    return all(shards == everything for shards in held.values())


def whole_leaf(leaf: jax.Array) -> Vector:
    """Return a whole leaf on the host, float32 and nobody else's, joined from what the devices hold.

    Called by all processes for a leaf that spans them; each then has it.
    """
    if leaf.is_fully_addressable or each_has_all(leaf.sharding, leaf.shape):
        whole = np.empty(leaf.shape, np.float32)
        seen = set[str]()
        for shard in leaf.addressable_shards:
            if (place := repr(shard.index)) not in seen:
                seen.add(place)
                whole[shard.index] = np.asarray(shard.data)
        return whole
    return np.array(multihost_utils.process_allgather(leaf, tiled=True), np.float32)


def gathered_stack(stack: jax.Array) -> NDArray[Any]:
    """Return a stack of what each device holds, on the host; called by all processes, and each then has it."""
    return np.asarray(multihost_utils.process_allgather(stack, tiled=True))


def put(values: NDArray[Any], sharding: Sharding) -> jax.Array:
    """Return an array of these values, each device of this process with its own part. The values are the same in all
    processes of the sharding."""
    if sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(values, sharding)
        return placed
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


# ---------------------------------------------------------------------- messages of the first process


class Processes:
    """The processes of this `jax.distributed` program, as one of them sees them. With one process nobody is told."""

    @property
    def count(self) -> int:
        return int(jax.process_count())

    @property
    def index(self) -> int:
        return int(jax.process_index())

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def tell(self, message: Mapping[str, Any] | None = None, arrays: Sequence[Array] = ()) -> tuple[Any, list[Vector]]:
        """Return what the first process tells, and its arrays, flat float32. Called by all processes.

        message: what JSON can hold, and with the arrays the first process's; the others give nothing.
        """
        if self.count == 1:
            return message, []
        flat = [np.ascontiguousarray(array, np.float32).reshape(-1) for array in arrays]
        text = json.dumps([message, [one.size for one in flat]]).encode() if self.is_first else b""
        told, sizes = json.loads(self._tell_text(text))
        if not self.is_first:
            flat = [np.empty(size, np.float32) for size in sizes]
        self._send([one.view(np.int32) for one in flat])
        return told, flat

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all processes (as many of each, 0 to 2^31 - 1), in their order. Called by all
        processes."""
        if self.count == 1 or not numbers:
            return [list(numbers)] * self.count
        rows: list[list[int]] = multihost_utils.process_allgather(np.array(numbers, np.int32)).tolist()
        return rows

    def _tell_text(self, text: bytes) -> bytes:
        """Return the text of the first process: by one broadcast if it is short."""
        room = 4 * (HEAD_WORDS - 1)
        head = np.zeros(HEAD_WORDS, np.int32)
        head[0] = len(text)
        head[1:].view(np.uint8)[: min(room, len(text))] = np.frombuffer(text[:room], np.uint8)
        head = self._broadcast(head)
        length = int(head[0])
        begin, rest = head[1:].tobytes()[: min(room, length)], max(0, length - room)
        words = np.zeros(-(-rest // 4), np.int32)
        if self.is_first:
            words.view(np.uint8)[:rest] = np.frombuffer(text[room:], np.uint8)
        self._send([words])
        return begin + words.tobytes()[:rest]

    def _send(self, arrays: Sequence[Words]) -> None:
        """Write into the arrays what the first process has in its own, of the same sizes."""
        for window in windows([array.size for array in arrays]):
            count = sum(end - start for _, start, end in window)
            block = np.zeros(max(FEWEST_WORDS, 1 << (count - 1).bit_length()), np.int32)
            if self.is_first:
                np.concatenate([arrays[i][start:end] for i, start, end in window], out=block[:count])
            block = self._broadcast(block)
            at = 0
            for i, start, end in window:
                if not self.is_first:
                    arrays[i][start:end] = block[at : at + end - start]
                at += end - start

    def _broadcast(self, words: Words) -> Words:
        return np.asarray(multihost_utils.broadcast_one_to_all(words), np.int32)


def windows(sizes: Sequence[int], most: int = MOST_WORDS) -> Iterator[list[tuple[int, int, int]]]:
    """Cut arrays of these sizes, laid end to end, into pieces of `most` values, the last shorter: for each the
    (array, from, to) that it is made of."""
    window: list[tuple[int, int, int]] = []
    room = most
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + room)
            window.append((i, start, end))
            room, start = room - (end - start), end
            if not room:
                yield window
                window, room = [], most
    if window:
        yield window
