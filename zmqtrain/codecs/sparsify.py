"""Keep few of many values: the largest of each block, or places that all nodes draw alike; `topk` builds on the same.

Rule 1: how many values are kept follows from the slab's length alone, and which ones from its values (or a counter)
alone.  Rule 2: magnitudes are compared by their key, the 15 bits of exponent and upper mantissa, as integers; of equal
keys the first in the slab is kept.  Rule 3: no slab is ever sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import (
    SLAB_VALUES,
    Scratch,
    Sections,
    Stage,
    State,
    Stateless,
    block_count,
    needs_between,
    needs_finite,
    needs_slab,
    read_buffers,
)
from zmqtrain.core.errors import CodecError
from zmqtrain.core.specs import format_spec
from zmqtrain.core.types import Array, Buffer

KEY_BITS = 15
"""Exponent and upper mantissa of a float32: with the sign a bfloat16."""
LARGEST_KEY = (1 << KEY_BITS) - 1
_SMALLEST_DENSITY = 1e-5
_BLOCK = 256
_BACKWARDS = _BLOCK - 1 - np.arange(_BLOCK, dtype=np.int32)
_scratch = Scratch()


def randomk(density: float = 0.01) -> Stage:
    """Keep one value, drawn by a hash, of each of k = ceil(density * n) stretches of equal length: no index is sent.

    The buffer is a counter, uint32[1]; it is also the state, and grows by one with each encode: nodes that have encoded
    equally often keep the same places. What is dropped may be anything finite: ||dropped|| <= ||x|| is all that holds.
    density: 1e-5..1. A slab has at most 65,536 values.
    Source: Konečný et al. 2016, Strategies for improving communication efficiency, sec. 2 (random mask); Stich et al.
    2018, Sparsified SGD with memory (rand-k with error feedback); the hash: MurmurHash3's finalizer, Appleby 2011.
    """
    name, kept = needs_density("randomk", density)

    def layout(count: int) -> Sections:
        return ((np.uint32, 1),)

    def forward(x: Array, state: State) -> tuple[tuple[Array, ...], Array, State]:
        needs_short_slab(x, name)
        counter = x.__array_namespace__().asarray(state)
        if isinstance(x, np.ndarray):
            bits = np.ascontiguousarray(x).view(np.int32)
            # the largest as int32 is of the positive values, as uint32 of the negative ones: no pass to clear the sign
            negative = int(np.maximum.reduce(bits.view(np.uint32))) - (1 << 31)
            needs_finite(max(int(np.maximum.reduce(bits)), negative), x.size)
        return (counter,), x[_drawn(counter, x.shape[0], kept(x.shape[0]))], counter + np.uint32(1)

    def read(buffers: Sequence[Buffer | Array], count: int) -> Array:
        (counter,) = read_buffers(buffers, layout(count), name)
        return _drawn(counter, count, kept(count))

    def check(buffers: Sequence[Buffer | Array], count: int) -> None:
        _needs_count(count, name, SLAB_VALUES)
        read_buffers(buffers, layout(count), name)

    return picking_stage(name, kept, layout, forward, read, check)._replace(init=lambda count: np.zeros(1, np.uint32))


def blocktopk(keep: int = 2) -> Stage:
    """Keep the `keep` values of each block of 256 that are largest by their key; one byte a kept value tells where.

    A last block that is shorter than `keep` is kept whole. ||dropped|| < ||x|| for every block with a value of 2^-126
    or more; within a block |dropped| < |kept| (1 + 2^-7), or both are under 2^-126. NaN and infinity have the largest
    keys: they are always met. All shapes are fixed and all reductions short: made for a GPU.
    keep: 1..32. A slab has at most 65,536 values.
    Source: Wang et al. 2023, CocktailSGD, and Peng et al. 2024, DeMo, take the largest of chunks, not of the whole.
    """
    needs_between("blocktopk", "keep", keep, 1, 32)
    name = format_spec("blocktopk", {"keep": keep})

    def kept(count: int) -> int:
        whole, rest = divmod(count, _BLOCK)
        return whole * keep + min(keep, rest)

    def layout(count: int) -> Sections:
        return ((np.uint8, kept(count)),)

    def forward(x: Array, state: Stateless) -> tuple[tuple[Array, ...], Array, Stateless]:
        needs_short_slab(x, name)
        largest = _largest_of_blocks_numpy if isinstance(x, np.ndarray) else _largest_of_blocks
        places = largest(x, keep, kept(x.shape[0]))
        return (places.astype(np.uint8),), x[places + _block_starts(keep, places.shape[0])], state

    def read(buffers: Sequence[Buffer | Array], count: int) -> Array:
        (places,) = read_buffers(buffers, layout(count), name)
        return places.astype(np.int32) + _block_starts(keep, kept(count))

    def check(buffers: Sequence[Buffer | Array], count: int) -> None:
        places = np.asarray(read(buffers, count))
        if int(places[-1]) >= count or (places[1:] <= places[:-1]).any():
            raise CodecError(f"{name}: the places of a block are not ascending or not under {min(count, _BLOCK)}")

    return picking_stage(name, kept, layout, forward, read, check)


def picking_stage(
    name: str,
    kept: Callable[[int], int],
    layout: Callable[[int], Sections],
    forward: Callable[[Array, State], tuple[tuple[Array, ...], Array, State]],
    read: Callable[[Sequence[Buffer | Array], int], Array],
    check: Callable[[Sequence[Buffer | Array], int], None],
) -> Stage:
    """Return the stage that keeps kept(n) of n values; read(buffers, n) gives their places, ascending and distinct."""

    def backward(buffers: Sequence[Buffer | Array], values: Array, count: int) -> Array:
        places = read(buffers, count)
        xp = values.__array_namespace__()
        out = xp.zeros(count, dtype=xp.float32)
        if hasattr(out, "at"):
            return out.at[places].set(values, mode="drop", unique_indices=True, indices_are_sorted=True)
        out[places] = values
        return out

    def backward_into(
        buffers: Sequence[Buffer | Array], values: np.ndarray[Any, Any], out: np.ndarray[Any, Any], add: bool
    ) -> None:
        places = read(buffers, out.size)
        if not add:
            out[...] = 0
        put_at(places, values, out, add)

    return Stage(name, lambda count: (), kept, layout, forward, backward, check, backward_into, places=read)


def put_at(places: np.ndarray[Any, Any], values: np.ndarray[Any, Any], out: np.ndarray[Any, Any], add: bool) -> None:
    """Write float32 values to `out` at their places, int32, each of which comes once; `add`: onto what is there."""
    if out.flags.c_contiguous and out.flags.aligned and (kernels := fast.kernels(out.size)):
        kernels.scatter(places, values, out, add)
    elif add:
        out[places] += values
    else:
        out[places] = values


def needs_density(member: str, density: float) -> tuple[str, Callable[[int], int]]:
    """Return the canonical name and how many of n values are kept: ceil(density * n), exact in decimal digits.

    Raises ConfigError unless the density is in 1e-5..1.
    """
    needs_between(member, "density", density, _SMALLEST_DENSITY, 1)
    exact = Fraction(repr(float(density)))
    numerator, denominator = exact.numerator, exact.denominator
    return format_spec(member, {"density": float(density)}), lambda count: -(-numerator * count // denominator)


def needs_short_slab(x: Array, name: str, most: int = SLAB_VALUES) -> None:
    """Raise CodecError unless x is float32[n] with 1 <= n <= most."""
    needs_slab(x, name)
    _needs_count(x.shape[0], name, most)


def _needs_count(count: int, name: str, most: int) -> None:
    if not 1 <= count <= most:
        raise CodecError(f"{name} takes 1 to {most} values at once, not {count}")


def magnitude_keys(x: Array) -> Array:
    """Return the keys, int32[n] in 0..LARGEST_KEY, of float32[n]: of two magnitudes the larger has no smaller key."""
    return (x.view(np.int32) >> 16) & LARGEST_KEY


@lru_cache(maxsize=64)
def _stretches(count: int, kept: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the first place and the length of each stretch, and its own start of the hash; uint32[kept]."""
    bounds = np.arange(kept + 1, dtype=np.int64) * count // kept
    seeds = (np.arange(kept, dtype=np.uint64) * 0x9E3779B9).astype(np.uint32)
    return bounds[:-1].astype(np.uint32), np.diff(bounds).astype(np.uint32), seeds


def _drawn(counter: Array, count: int, kept: int) -> Array:
    starts, lengths, seeds = _stretches(count, kept)
    drawn = _mix(_mix(counter) + seeds) >> 16
    return (starts + (drawn * lengths >> 16)).astype(np.int32)


def _mix(bits: Array) -> Array:
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


@lru_cache(maxsize=64)
def _block_starts(keep: int, kept: int) -> np.ndarray[Any, Any]:
    return np.arange(kept, dtype=np.int32) // keep * _BLOCK


def _largest_of_blocks(x: Array, keep: int, kept: int) -> Array:
    """Return the places within their blocks, int32[kept], ascending in each (jax).

    A value's key and its place, counted from the block's end, make one integer: no two are equal, the first is larger.
    """
    xp = x.__array_namespace__()
    count, blocks = x.shape[0], block_count(x.shape[0], _BLOCK)
    padding = xp.full(blocks * _BLOCK - count, -1, dtype=xp.int32)
    keys = xp.concatenate([magnitude_keys(x), padding]).reshape(blocks, _BLOCK)
    ranked = (keys << 8) | _BACKWARDS
    tops = []
    for _ in range(keep):
        tops.append(xp.max(ranked, axis=1))
        ranked = xp.where(ranked == tops[-1][:, None], -(1 << 30), ranked)
    places = xp.sort(_BLOCK - 1 - (xp.stack(tops, axis=1) & 255), axis=1)
    return places.reshape(-1)[:kept]


def _largest_of_blocks_numpy(x: np.ndarray[Any, Any], keep: int, kept: int) -> np.ndarray[Any, Any]:
    """As `_largest_of_blocks`, by a partition of each block. Raises NonFiniteDelta."""
    blocks = block_count(x.size, _BLOCK)
    ranked = _scratch.take("ranked", blocks * _BLOCK, np.int32)
    np.right_shift(np.ascontiguousarray(x).view(np.int32), 8, out=ranked[: x.size])
    np.bitwise_and(ranked[: x.size], LARGEST_KEY << 8, out=ranked[: x.size])
    ranked[x.size :] = -1 << 8
    rows = ranked.reshape(blocks, _BLOCK)
    np.bitwise_or(rows, _BACKWARDS, out=rows)
    rows.partition(_BLOCK - keep, axis=1)
    tops = rows[:, _BLOCK - keep :]
    needs_finite(int(tops.max()) >> 8 << 16, x.size)
    places = _BLOCK - 1 - (tops & 255)
    places.sort(axis=1)
    return places.reshape(-1)[:kept]
