"""Write which k of n places were picked, in the fewest bytes that (n, k) alone can promise.

Rule 1: the form and its size follow from n and k, the smallest of three: 16 bits a place, where they are enough; a
bitmap of n bits; Elias-Fano, which splits a place into its low bits, packed, and its high part, in unary: at most
2 + log2(n/k) bits a place, about half a bit more than the entropy of a random pick.  Rule 2: bits fill a byte from its
least significant one; what is left of the last byte is zero.  Rule 3: `check_places` lets through only what
`pack_places` makes: one set of places has one set of bytes.
Source: Elias, Efficient storage and retrieval by content and address of static files, JACM 1974; Fano, MIT Project MAC
memorandum 61, 1971; the choice of the low bits: Vigna, Quasi-succinct indices, WSDM 2013, sec. 3.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.codecs import fast
from zmqtrain.core.errors import CodecError
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

    numpy, or jax: also under jit and vmap. What the places are is not looked at: that is the caller's promise.
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


def check_places(buffer: np.ndarray[Any, Any], count: int, kept: int, codec: str) -> None:
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
    """Return the first bit of the high parts, -1 for a bitmap: as the loops in machine code want it."""
    return kept * form.low if form.kind == "elias-fano" else -1


def _needs_places(found: int, kept: int) -> None:
    if found != kept:
        raise CodecError(f"the index has {found} places, not {kept}")


@lru_cache(maxsize=8)
def _ranks(kept: int, start: int) -> np.ndarray[Any, Any]:
    return np.arange(start, start + kept)


@lru_cache(maxsize=16)
def _bits_of_bytes(low: int) -> np.ndarray[Any, Any]:
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
