"""Transforms that keep few of many values (`topk`, `blocktopk`, `randomk`), and how their places are written.

Rule 1: how many values are kept follows from the slab's length alone, and which ones from its values (or a counter)
alone.  Rule 2: magnitudes are compared by their key, the 15 bits of exponent and upper mantissa, as integers; of equal
keys the first in the slab is kept.  Rule 3: no slab is ever sorted.  On a device the cut of `topk` is found bit by bit,
by fifteen counts; numpy guesses a little under it, by the slab before or by a sample, and picks among the few that
reach the guess. A wrong guess costs time, no more.
Rule 4: the form of an index and its size follow from n and k, the smallest of three: 16 bits a place, where they are
enough; a bitmap of n bits; Elias-Fano, which splits a place into its low bits, packed, and its high part, in unary: at
most 2 + log2(n/k) bits a place, about half a bit more than the entropy of a random pick.  Bits fill a byte from its
least significant one; the rest of the last byte is zero.  `check_places` accepts only what `pack_places` makes: one set
of places has one set of bytes.
Source: Elias, Efficient storage and retrieval by content and address of static files, JACM 1974; Fano, MIT Project MAC
memorandum 61, 1971; the choice of the low bits: Vigna, Quasi-succinct indices, WSDM 2013, sec. 3.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import (
    SLAB_VALUES,
    Buffers,
    Codec,
    Numpy,
    Pinned,
    RunLoops,
    Scratch,
    Sections,
    State,
    Stateless,
    Transform,
    block_count,
    needs_between,
    needs_finite,
    needs_slab,
    read_buffers,
)
from zmqtrain.codecs.levels import LARGEST_MEAN_BITS, SMALLEST_MEAN_BITS
from zmqtrain.core.errors import CodecError
from zmqtrain.core.specs import format_spec
from zmqtrain.core.types import Array

MOST_PLACES = 1 << 18
"""The most values among which some are picked: every number here stays far under 31 bits."""

_LOCAL_PLACES = 1 << 16


class Form(NamedTuple):
    """How k places out of n are written.

    kind: "local" (uint16 each), "bitmap" or "elias-fano".  low: how many low bits of a place are packed (Elias-Fano).
    bits: how many bits carry something.  size: bytes in all.
    """

    kind: str
    low: int
    bits: int
    size: int


@lru_cache(maxsize=1024)
def index_form(count: int, kept: int) -> Form:
    """Return the form in which `kept` places out of `count` are written.

    Raises CodecError unless 1 <= kept <= count <= 262,144.
    """
    if not 1 <= kept <= count <= MOST_PLACES:
        raise CodecError(f"cannot index {kept} places out of {count}: 1 <= places <= values <= {MOST_PLACES}")
    low = (count // kept).bit_length() - 1
    split = kept * low + kept + ((count - 1) >> low)
    forms = [Form("bitmap", 0, count, (count + 7) // 8), Form("elias-fano", low, split, (split + 7) // 8)]
    if count <= _LOCAL_PLACES:
        forms.insert(0, Form("local", 0, 16 * kept, 2 * kept))
    return min(forms, key=lambda form: form.size)


def pack_places(places: Array, count: int) -> Array:
    """Return the places, int[k], strictly ascending, under `count`, as uint8[index_form(count, k).size].

    numpy, or jax: also under jit and vmap. The places are not checked.
    """
    kept = places.shape[0]
    form = index_form(count, kept)
    xp = places.__array_namespace__()
    if form.kind == "local":
        return places.astype(xp.uint16).view(xp.uint8)
    if isinstance(places, np.ndarray) and (kernels := fast.kernels(count)):
        buffer = np.zeros(form.size, np.uint8)
        kernels.pack(np.require(places, np.int32, ["C", "A"]), form.low, _first_high(form, kept), buffer)
        return buffer
    if form.kind == "bitmap":
        return xp.packbits(_ones(xp, places, count), bitorder="little")
    if isinstance(places, np.ndarray):
        bits = np.zeros(form.bits, np.uint8)
        lows = bits[: kept * form.low].reshape(kept, form.low)
        if form.low <= 8:
            np.take(_bits_of_bytes(form.low), places & ((1 << form.low) - 1), axis=0, out=lows, mode="clip")
        else:
            parts = places.astype("<u4").view(np.uint8).reshape(kept, 4)
            lows[...] = np.unpackbits(parts, axis=1, count=form.low, bitorder="little")
        bits[(places >> form.low) + _ranks(kept, kept * form.low)] = 1
        return np.packbits(bits, bitorder="little")
    high = (places >> form.low) + xp.arange(kept, dtype=places.dtype)
    lows = ((places[:, None] >> xp.arange(form.low, dtype=places.dtype)) & 1).reshape(-1).astype(xp.uint8)
    return xp.packbits(xp.concatenate([lows, _ones(xp, high, form.bits - lows.shape[0])]), bitorder="little")


def unpack_places(buffer: Array, count: int, kept: int) -> Array:
    """Return the places, int32[kept], of what `pack_places` wrote.

    numpy: raises CodecError if there are not `kept` of them; only `check_places` looks at more.
    """
    form = index_form(count, kept)
    xp = buffer.__array_namespace__()
    if form.kind == "local":
        return buffer.view(xp.uint16).astype(xp.int32)
    if isinstance(buffer, np.ndarray) and (kernels := fast.kernels(count)):
        found = np.empty(kept, np.int32)
        ones = kernels.unpack(np.ascontiguousarray(buffer), form.low, _first_high(form, kept), form.bits, found)
        _needs_places(ones, kept)
        return found
    bits = xp.unpackbits(buffer, count=form.bits, bitorder="little")
    high = _places_of_ones(bits[kept * form.low :], kept)
    if form.kind == "bitmap":
        return high
    high = (high - xp.arange(kept, dtype=xp.int32)) << form.low
    lows = bits[: kept * form.low].reshape(kept, form.low)
    if isinstance(buffer, np.ndarray):
        weights = np.exp2(np.arange(form.low, dtype=np.float32))  # a float product is the fastest, and exact: 18 bits
        return high | (lows.astype(np.float32) @ weights).astype(np.int32)
    return high + xp.sum(lows.astype(xp.int32) << xp.arange(form.low, dtype=xp.int32), axis=1, dtype=xp.int32)


def check_places(buffer: Numpy, count: int, kept: int, codec: str) -> None:
    """Raise CodecError unless this is what `pack_places` makes of `kept` ascending places under `count`."""
    form = index_form(count, kept)
    spare = 8 * form.size - form.bits
    if spare and buffer[-1] >> (8 - spare):
        raise CodecError(f"{codec}: the index has bits beyond its end")
    try:
        places = unpack_places(buffer, count, kept)
    except CodecError as error:
        raise CodecError(f"{codec}: {error}") from None
    if int(places[-1]) >= count or (places[1:] <= places[:-1]).any():
        raise CodecError(f"{codec}: the places are not ascending or not under {count}")


def rank_search(ranks: Array, kept: int) -> Array:
    """Return the first place at which each of the ranks 1..kept is reached, int32[kept].

    ranks: int[n], never falling; ranks[i] = how many of the places 0..i are picked. For jax: a search costs k log n
    gathers, and no scatter of n values.
    """
    xp = ranks.__array_namespace__()
    wanted = xp.arange(1, kept + 1, dtype=ranks.dtype)
    return xp.searchsorted(ranks, wanted, method="scan_unrolled").astype(xp.int32)


def _first_high(form: Form, kept: int) -> int:
    """Return the first bit of the high parts, -1 for a bitmap."""
    return kept * form.low if form.kind == "elias-fano" else -1


def _needs_places(found: int, kept: int) -> None:
    if found != kept:
        raise CodecError(f"the index has {found} places, not {kept}")


@lru_cache(maxsize=8)
def _ranks(kept: int, start: int) -> Numpy:
    return np.arange(start, start + kept)


@lru_cache(maxsize=16)
def _bits_of_bytes(low: int) -> Numpy:
    """Return the `low` bits of each number that has no more, uint8[2^low, low]: to look them up is the fastest."""
    return (np.arange(1 << low)[:, None] >> np.arange(low) & 1).astype(np.uint8)


def _ones(xp: Any, places: Array, count: int) -> Array:
    bits = xp.zeros(count, dtype=xp.uint8)
    if hasattr(bits, "at"):
        return bits.at[places].set(1, mode="drop")
    bits[places] = 1
    return bits


def _places_of_ones(bits: Array, kept: int) -> Array:
    if not isinstance(bits, np.ndarray):
        xp = bits.__array_namespace__()
        return rank_search(xp.cumsum(bits, dtype=xp.int32), kept)
    places = np.flatnonzero(bits)
    _needs_places(places.size, kept)
    return places.astype(np.int32)


KEY_BITS = 15
"""Exponent and upper mantissa of a float32: with the sign a bfloat16."""
LARGEST_KEY = (1 << KEY_BITS) - 1
_SMALLEST_DENSITY = 1e-5
_BLOCK = 256
_BACKWARDS = _BLOCK - 1 - np.arange(_BLOCK, dtype=np.int32)
_scratch = Scratch()


def randomk(density: float = 0.01) -> Transform:
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

    def read(buffers: Buffers, count: int) -> Array:
        (counter,) = read_buffers(buffers, layout(count), name)
        return _drawn(counter, count, kept(count))

    def check(buffers: Buffers, count: int) -> None:
        _needs_count(count, name, SLAB_VALUES)
        read_buffers(buffers, layout(count), name)

    return picking_transform(name, kept, layout, forward, read, check)._replace(
        init=lambda count: np.zeros(1, np.uint32)
    )


def blocktopk(keep: int = 2) -> Transform:
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

    def read(buffers: Buffers, count: int) -> Array:
        (places,) = read_buffers(buffers, layout(count), name)
        return places.astype(np.int32) + _block_starts(keep, kept(count))

    def check(buffers: Buffers, count: int) -> None:
        places = np.asarray(read(buffers, count))
        if int(places[-1]) >= count or (places[1:] <= places[:-1]).any():
            raise CodecError(f"{name}: the places of a block are not ascending or not under {min(count, _BLOCK)}")

    return picking_transform(name, kept, layout, forward, read, check)


def picking_transform(
    name: str,
    kept: Callable[[int], int],
    layout: Callable[[int], Sections],
    forward: Callable[[Array, State], tuple[tuple[Array, ...], Array, State]],
    read: Callable[[Buffers, int], Array],
    check: Callable[[Buffers, int], None],
) -> Transform:
    """Return the transform that keeps kept(n) of n values; read(buffers, n): their places, ascending and distinct."""

    def backward(buffers: Buffers, values: Array, count: int) -> Array:
        places = read(buffers, count)
        xp = values.__array_namespace__()
        out = xp.zeros(count, dtype=xp.float32)
        if hasattr(out, "at"):
            return out.at[places].set(values, mode="drop", unique_indices=True, indices_are_sorted=True)
        out[places] = values
        return out

    def backward_into(buffers: Buffers, values: Numpy, out: Numpy, add: bool) -> None:
        places = read(buffers, out.size)
        if not add:
            out[...] = 0
        put_at(places, values, out, add)

    return Transform(name, lambda count: (), kept, layout, forward, backward, check, backward_into, places=read)


def put_at(places: Numpy, values: Numpy, out: Numpy, add: bool) -> None:
    """Write float32 values to `out` at their places, int32, which are distinct; `add`: onto the values there."""
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
def _stretches(count: int, kept: int) -> tuple[Numpy, Numpy, Numpy]:
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
def _block_starts(keep: int, kept: int) -> Numpy:
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


def _largest_of_blocks_numpy(x: Numpy, keep: int, kept: int) -> Numpy:
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


_KINDS = ("local", "bitmap", "elias-fano")
"""The forms of an index, as machine code knows them."""
_INFINITE_KEY = 0x7F80
_EIGHT_TRUE = np.uint64(0x0101010101010101)
_SCANNED = 1 << 17
"""How many values are compared with both ends of the range at a time: they are in the cache for the second."""
_SAMPLE = 4096
_RUNS = 512
"""In how many runs of neighbours the sample lies: each costs a miss of the cache, as a lone value does."""
_GUESS_KEYS = 6
"""How far under the last slab's cut the next one is searched, in keys: 2 to 5 % of the magnitude."""
_STEADY_KEYS = 3
"""How far the cut may move from slab to slab if the last one is to be a guess at the next."""


def topk(density: float = 0.01) -> Transform:
    """Keep the k = ceil(density * n) values that are largest by their key, and at least one; one index buffer.

    What is dropped is no larger, key by key, than what is kept: |dropped| < |kept| (1 + 2^-7), or both under 2^-126.
    So ||dropped|| < ||x|| if any value is 2^-126 or more. NaN and infinity have the largest keys: they are always met.
    density: 1e-5..1, of a slab of at most 262,144 values. The index takes 8.6 bits a kept value at 0.01, 12 at 0.001.
    Source: Lin et al. 2018, Deep Gradient Compression, sec. 3 (its threshold from a sample; the pick is exact here).
    """
    name, kept = needs_density("topk", density)
    guess = _Guess()

    def layout(count: int) -> Sections:
        return ((np.uint8, index_form(count, kept(count)).size),)

    def forward(x: Array, state: Stateless) -> tuple[tuple[Array, ...], Array, Stateless]:
        needs_short_slab(x, name, MOST_PLACES)
        if isinstance(x, np.ndarray):
            places, values = _largest_numpy(np.ascontiguousarray(x), kept(x.size), guess)
        else:
            places = _largest(x, kept(x.shape[0]))
            values = x[places]
        return (pack_places(places, x.shape[0]),), values, state

    def read(buffers: Buffers, count: int) -> Array:
        (index,) = read_buffers(buffers, layout(count), name)
        return unpack_places(index, count, kept(count))

    def check(buffers: Buffers, count: int) -> None:
        (index,) = read_buffers(buffers, layout(count), name)
        check_places(np.asarray(index), count, kept(count), name)

    def loops(codec: Codec) -> RunLoops | None:
        plain = re.fullmatch(r"sign:block=(\d+)", codec.name)
        return None if plain is None else _loops_with_signs(kept, guess, int(plain[1]))

    return picking_transform(name, kept, layout, forward, read, check)._replace(slab=MOST_PLACES, loops=loops)


def _loops_with_signs(kept: Callable[[int], int], guess: _Guess, block: int) -> RunLoops:
    """Return what does all slabs of a run where `sign` takes what `topk` keeps, kept(n) of n values."""

    def columns(count: int) -> tuple[int, ...]:
        form = index_form(count, kept(count))
        return kept(count), _KINDS.index(form.kind), form.low, form.bits, form.size

    def encode(addresses: Numpy, table: Numpy, frame: Numpy, sent: Numpy, pinned: Pinned) -> int:
        state, memory = np.array([guess.cut, guess.steady], np.int64), _candidates
        row = _loops().encode(
            *(addresses, table, block, sent, frame, *pinned, state, memory.places, memory.keys, memory.histogram),
            *(memory.picked, memory.values, memory.rest, memory.sum),
        )
        guess.cut, guess.steady = int(state[0]), bool(state[1])
        return row

    def write(frame: Numpy, table: Numpy, addresses: Numpy, add: bool) -> None:
        _loops().write(frame, table, addresses, block, add, _candidates.picked, _candidates.values)

    def check(frame: Numpy, table: Numpy) -> int:
        return _loops().check(frame, table, block, LARGEST_MEAN_BITS, SMALLEST_MEAN_BITS, _candidates.picked)

    def energy(frame: Numpy, table: Numpy) -> float:
        return fast.energy_of_run(frame, table, block, fast.MEANS, fast.KEPT)

    def rebase(frame: Numpy, own: Numpy, table: Numpy, places: Numpy, params: Numpy, anchor: Numpy) -> None:
        found, longest = (_candidates.picked, _candidates.values), int(table[:, fast.SLAB].max())
        shared, mine = (_scratch.take(name, longest, np.float32) for name in ("shared", "own"))
        _loops().rebase(frame, own, table, block, places, params, anchor, *found, shared, mine)

    return RunLoops(encode, write, check, energy, lambda: fast.topk_signs_loops() is not None, columns, rebase)


def _loops() -> fast.TopkSignsLoops:
    loops = fast.topk_signs_loops()
    assert loops is not None, "used only where there are some"
    return loops


class _Guess(threading.local):
    """Where this thread searches next: it decides how long the search takes, never what is found.

    cut: the last slab's.  steady: whether it was near the cut before it.
    """

    cut = 0
    steady = False


class _Candidates(threading.local):
    """Memory of this thread for `pick`: the candidates' places and keys, and how many have each key (left at zero);
    and for a slab: what is picked, the values there, the slab less what is sent of it, and that itself."""

    def __init__(self) -> None:
        self.places, self.keys = np.empty(MOST_PLACES, np.int32), np.empty(MOST_PLACES, np.int32)
        self.histogram = np.zeros(LARGEST_KEY + 1, np.int32)
        self.picked, self.values = np.empty(MOST_PLACES + 1, np.int32), np.empty(MOST_PLACES, np.float32)
        self.rest, self.sum = np.empty(MOST_PLACES, np.float32), np.empty(MOST_PLACES, np.float32)


_candidates = _Candidates()


def _largest(x: Array, kept: int) -> Array:
    """Return the places, int32[kept], of the largest keys (jax): the cut bit by bit, each bit by one count."""
    xp = x.__array_namespace__()
    keys, cut = magnitude_keys(x), xp.int32(0)
    for bit in reversed(range(KEY_BITS)):
        higher = cut | (1 << bit)
        cut = xp.where(xp.sum(keys >= higher, dtype=xp.int32) >= kept, higher, cut)
    above, at_cut = keys > cut, keys == cut
    missing = kept - xp.sum(above, dtype=xp.int32)
    ranks = xp.cumsum(above, dtype=xp.int32) + xp.minimum(xp.cumsum(at_cut, dtype=xp.int32), missing)
    return rank_search(ranks, kept)


def _largest_numpy(x: Numpy, kept: int, guess: _Guess) -> tuple[Numpy, Numpy]:
    """As `_largest`, by a guess at the cut: two compares of the slab, then the exact pick among few candidates.

    Returns the places and the values there. Raises NonFiniteDelta.
    """
    first = max(guess.cut - _GUESS_KEYS if guess.steady else _sampled_key(x, kept, 2), 1)  # zeros are seldom kept
    if kernels := fast.kernels(x.size):
        cut, places, found = _pick(kernels, x, kept, first)
    else:
        candidates = _places_from(x, first)
        if candidates.size < kept:
            candidates = _places_from(x, _sampled_key(x, kept, 5))
        if candidates.size < kept:
            candidates = np.arange(x.size)
        values = x.take(candidates)
        keys = magnitude_keys(values)
        needs_finite(int(np.maximum.reduce(keys)) << 16, x.size)
        surplus = keys.size - kept
        cut = int(np.partition(keys, surplus)[surplus])
        picks = (keys >= cut).nonzero()[0]
        if (surplus := picks.size - kept) > 0:
            picks = np.delete(picks, (keys.take(picks) == cut).nonzero()[0][-surplus:])
        places, found = candidates.take(picks), values.take(picks)
    guess.cut, guess.steady = cut, abs(cut - guess.cut) <= _STEADY_KEYS
    return places, found


def _pick(kernels: fast.Kernels, x: Numpy, kept: int, first: int) -> tuple[int, Numpy, Numpy]:
    """Return the cut's key, the places and the values there, in machine code; first: the key that is guessed to be a
    little under the cut's. Raises NonFiniteDelta."""
    x = np.require(x, requirements="A")
    scratch = (_candidates.places, _candidates.keys, _candidates.histogram)
    places, values = np.empty(kept + 1, np.int32), np.empty(kept, np.float32)
    found = kernels.pick(x, min(first, _INFINITE_KEY), kept, *scratch, places, values)
    if found < 0:
        least = min(_sampled_key(x, kept, 5), first)
        found = kernels.pick(x, least, kept, *scratch, places, values)
    if found < 0:
        found = kernels.pick(x, 0, kept, *scratch, places, values)
    needs_finite(found >> 16 << 16, x.size)
    return found & LARGEST_KEY, places[:kept], values


def _places_from(x: Numpy, key: int) -> Numpy:
    """Return where the magnitude's key is `key` or more, NaN included, ascending; all places if key <= 0."""
    if key <= 0:
        return np.arange(x.size)
    threshold = np.array(min(key, _INFINITE_KEY) << 16, np.int32).view(np.float32)
    words = _scratch.take("inside", block_count(x.size, 8), np.uint64)
    inside, above = words.view(np.bool_), _scratch.take("above", _SCANNED // 8, np.uint64).view(np.bool_)
    for start in range(0, x.size, _SCANNED):
        piece = x[start : start + _SCANNED]
        target, other = inside[start : start + piece.size], above[: piece.size]
        np.less(piece, threshold, out=target)
        np.greater(piece, -threshold, out=other)
        np.logical_and(target, other, out=target)
    inside[x.size :] = True
    return _places_of_zeros(words)


def _places_of_zeros(words: Numpy) -> Numpy:
    """Return flatnonzero(~mask) of a bool mask seen as words of eight, uint64[n / 8]: first which words, then where.

    numpy's nonzero jumps from one to the next where under a tenth are set, and each jump is a branch predicted wrong;
    the words therefore have a tail of ones. Measured on 65,536: 25 us in place of 64 at 6 %, 15 in place of 19 at 1 %.
    """
    tail = words.size // 8 + 1
    mixed = _scratch.take("mixed", words.size + tail, np.bool_)
    np.not_equal(words, _EIGHT_TRUE, out=mixed[: words.size])
    mixed[words.size :] = True
    hot = mixed.nonzero()[0][:-tail]
    places = np.bitwise_xor(words.take(hot), _EIGHT_TRUE).view(np.bool_).nonzero()[0]
    np.left_shift(hot, 3, out=hot)
    found: Numpy = hot.take(places >> 3)
    np.bitwise_and(places, 7, out=places)
    np.bitwise_or(found, places, out=found)
    return found


def _sampled_key(x: Numpy, kept: int, spreads: int) -> int:
    """Return a key that probably is a little under the cut's: a count in the sample has a spread of its square root."""
    sample = x
    if x.size > 2 * _SAMPLE:
        step = x.size // _RUNS - 1 | 1  # odd: to go down the columns of a matrix would be no sample of it
        sample = x[: _RUNS * step].reshape(_RUNS, step)[:, : _SAMPLE // _RUNS].reshape(-1)
    keys = magnitude_keys(sample)
    expected = kept * keys.size / x.size
    rank = min(keys.size, int(expected + spreads * (expected**0.5 + 1)))
    return int(np.partition(keys, keys.size - rank)[keys.size - rank])
