"""The codec family's contract: Codec, Transform, `chain` of them, and the helpers that members share.

Rule 1: the bytes are the same from numpy and from jitted JAX.  So: no float sum (its order differs) unless every
partial sum is exact, no a*b+c in floats (XLA fuses it) unless a*b is exact, no division by a float (a GPU approximates
it), no arithmetic that could meet a denormal (XLA flushes them): reductions are of integers, scales are built from
bits.  Every codec has one function written against the array's own namespace; numpy has a faster twin beside it, and a
law in the tests holds the two equal.
Rule 2: the sizes of all buffers follow from the number of values alone: a receiver knows them in advance.
Rule 3: every array is little-endian; a buffer is checked before it is decoded; decoding writes only to `out`.
Rule 4: scratch memory belongs to a thread; nothing that a codec returns lies in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta
from zmqtrain.core.types import Array, Buffer

SLAB_VALUES = 65_536
"""The most values that most codecs take at once: 256 KB of float32, a cache's worth; an index in it has 16 bits."""

LARGEST_BLOCK = 4096
"""The most values that share a scale: sums over a block stay in 31 bits."""

PIECE_VALUES = 65_536
"""How many values the numpy twins treat at a time: 256 KB of float32 and its scratch stay in a core's own cache."""

MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 but for its sign."""

INFINITY_BITS = 0x7F800000
"""The bits of infinity; those of a NaN's magnitude are more."""

SMALLEST_MAGNITUDE_BITS = (127 - 100) << 23
"""The bits of 2^-100: a block whose largest magnitude is smaller is sent as zeros, so that no denormal ever matters."""

SMALLEST_SCALE_BITS = (127 - 108) << 7
"""The bfloat16 bits of 2^-108: no encoder makes a smaller scale, zero aside."""

_ONE = np.uint16(1)
"""Subtracted from a scale of zero, it leaves the largest uint16, so that zero is not a small scale."""

Numpy = np.ndarray[Any, Any]
Buffers = Sequence[Buffer | Array]
"""The buffers of one slab, raw or as arrays."""
Stateless = tuple[()]
State = Any
Sections = tuple[tuple[Any, int], ...]
"""The dtype and the number of values of each buffer."""
Encode = Callable[[Array, State], tuple[tuple[Array, ...], State]]


NOT_PINNED = np.zeros((0, 4), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
"""What `encode` of `RunLoops` is given where the values lie in memory."""
NOTHING_SENT = np.zeros((0, 1), np.uint8)
"""What `encode` of `RunLoops` is given where nothing is subtracted."""


Pinned = tuple[Numpy, Numpy, Numpy]


class Step(NamedTuple):
    """How a hub steps by a sum of payloads, each operation one of float32, in this order:

        g = sum / live;  m = momentum * m + g;  parameters += rate * (momentum * m + g)

    m: float32, as long as the parameters, changed in place; without values, parameters += g * rate.
    """

    live: float
    rate: float
    momentum: float
    m: Numpy


class RunLoops(NamedTuple):
    """What a codec does with all slabs of a run in one call of machine code, to the same bytes as one after the other.

    A run lies in one frame. Its slabs of one length and one segment are a row of its table, int64[rows, 4 and more]:
    the place of the row's first value in the payload, how many slabs it has, the values of each, and the bytes from a
    slab to the next; for each buffer, the byte of the frame where the first slab's begins; and columns(n), for slabs of
    n values. frame: uint8, all of it.  addresses: int64[rows], of each row's first value in memory: float32, contiguous
    and aligned.

    encode(addresses, table, frame, sent, pinned): writes the buffers of all slabs into the frame. sent: uint8[k, bytes
      of the frame]: other frames of the very same form, whose decoded sum, in order, is subtracted first.  pinned:
      places, params and anchor of `PinnedSegments`, whose differences the values are (params, anchor: int64[leaves],
      addresses); or NOT_PINNED. Returns the first row that holds NaN or infinity, -1 if none does. None: of a codec
      that keeps a state.
    decode_into(frame, table, addresses, add): as of a Codec.
    check(frame, table): returns the first row with a slab that the codec's `check` refuses, -1 if there is none.
    energy(frame, table): as of a Codec, of all slabs together.
    rebase(frame, own, table, places, params, anchor): decodes both frames, the second of the same form or without
      bytes, and adds them as `rebase` of CodedSegments says; params, anchor: int64[leaves], addresses. None: of a codec
      that is decoded first.
    release(frames, table, frame, step, parameters, published, places, samples): what a hub does with a run of the
      payloads that it adds. frames: int64[k], where their frames begin in memory, of the very form of `frame`.  Their
      sum, in order, makes the step, and `parameters - published` is encoded into the frame. Both are flat float32, all
      values of the payload.  places: int64[m], ascending: of those in this run, samples float32[2, k, m] are given what
      the sum has there before and after each payload.  Returns as `encode`. None: of a codec that does these one by
      one.
    available(): whether there is machine code for it, which the first call makes. Only then, and where `fast.kernels`
      has some, it is used.
    """

    encode: Callable[[Numpy, Numpy, Numpy, Numpy, Pinned], int] | None
    decode_into: Callable[[Numpy, Numpy, Numpy, bool], None]
    check: Callable[[Numpy, Numpy], int]
    energy: Callable[[Numpy, Numpy], float]
    available: Callable[[], bool]
    columns: Callable[[int], tuple[int, ...]] = lambda count: ()
    rebase: Callable[[Numpy, Numpy, Numpy, Numpy, Numpy, Numpy], None] | None = None
    release: Callable[[Numpy, Numpy, Numpy, Step, Numpy, Numpy, Numpy, Numpy], int] | None = None


class Codec(NamedTuple):
    """How a slab of n float32 values becomes a few buffers, and back.

    name: the canonical spec; `codec_from_spec(name)` gives this very codec.
    init(n): the state for a slab of n values, a pytree of numpy arrays; () where nothing is kept from one encode to the
      next.
    layout(n): the dtype and the number of values of each buffer that a slab of n values becomes.
    encode(x, state): x is float32[n], n >= 1, numpy or jax (also under jit) -> (buffers, state). The buffers are arrays
      of x's kind, and may be x itself. Raises CodecError for another dtype or shape and, from numpy only,
      NonFiniteDelta for NaN or infinity.
    decode(buffers, n): raw buffers or numpy arrays -> numpy float32[n]; jax arrays -> a jax array. Raises CodecError
      for wrong lengths.
    check(buffers, n): raises CodecError unless these are buffers that `encode` could have made of n finite values, as
      far as safety goes: their number, lengths and dtypes, the range of codes, indices and scales, values that are
      finite.
    decode_into(buffers, out, add): decode into out, numpy float32[n]; with `add`, onto its values. The fastest way;
      the sum may overflow to infinity where both sides are huge, and a -0.0 where nothing was sent may keep its sign.
      The buffers have passed `check`.
    slab: the most values of one slab.
    energy(buffers, n): what stands for the sum of squares of the n values, as it goes by scales alone: a few times as
      much at most, and growing with the square of what was encoded; the buffers have passed `check`. None: the
      energy is known only after decoding.
    sparse(buffers, n): the places, int32, ascending, and the values there, float32, of buffers that have passed
      `check`: all other values are zero. None for a codec that sends every value.
    loops: do many slabs at once; None: they are done one by one.
    Codecs of one name are equal.
    Source of the shape: optax's GradientTransformation.
    """

    name: str
    init: Callable[[int], State]
    layout: Callable[[int], Sections]
    encode: Encode
    decode: Callable[[Buffers, int], Array]
    check: Callable[[Buffers, int], None]
    decode_into: Callable[[Buffers, Numpy, bool], None]
    slab: int = SLAB_VALUES
    energy: Callable[[Buffers, int], float] | None = None
    sparse: Callable[[Buffers, int], tuple[Numpy, Numpy]] | None = None
    loops: RunLoops | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and other.name == self.name

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.name)


def plain_codec(
    name: str,
    layout: Callable[[int], Sections],
    encode: Callable[[Array], tuple[Array, ...]],
    decode: Callable[[tuple[Array, ...], int], Array],
    write: Callable[[tuple[Array, ...], Numpy, bool], None],
    check: Callable[[tuple[Array, ...], int], None],
    energy: Callable[[Buffers, int], float] | tuple[int, int, int] | None = None,
) -> Codec:
    """Return a codec without a state. What it is given has been read as `layout` says; x is float32[n].

    decode(arrays, n): jax arrays -> a jax array; numpy arrays are decoded by write(arrays, out, add).
    energy: as of a Codec, or (which buffer holds the scales of blocks, the largest code, the block).
    """

    def encode_slab(x: Array, state: Stateless) -> tuple[tuple[Array, ...], Stateless]:
        needs_slab(x, name)
        return encode(x), state

    def decode_slab(buffers: Buffers, count: int) -> Array:
        arrays = read_buffers(buffers, layout(count), name)
        if not isinstance(arrays[0], np.ndarray):
            return decode(arrays, count)
        out = np.empty(count, np.float32)
        write(arrays, out, False)
        return out

    def decode_into(buffers: Buffers, out: Numpy, add: bool) -> None:
        write(read_buffers(buffers, layout(out.size), name), out, add)

    def check_slab(buffers: Buffers, count: int) -> None:
        check(read_buffers(buffers, layout(count), name), count)

    def energy_of_blocks(buffers: Buffers, count: int) -> float:
        assert isinstance(energy, tuple)
        scales, most, block = energy
        return energy_of_scales(buffers[scales], most, block, count)

    measure = energy_of_blocks if isinstance(energy, tuple) else energy
    return Codec(name, lambda count: (), layout, encode_slab, decode_slab, check_slab, decode_into, energy=measure)


class Transform(NamedTuple):
    """What is done to n values before a codec takes them: some are picked, or all are turned.

    name: the canonical spec.  init(n): as of a Codec.
    passes(n): how many values m it hands on, m >= 1.
    layout(n): the buffers it adds of its own: where the values were, or what they were drawn by; may be none.
    forward(x, state): float32[n] -> (own buffers, values float32[m], state); numpy or jax, also under jit. Raises
      NonFiniteDelta from numpy only, if it sees NaN or infinity; all values that it drops must be finite then.
    backward(buffers, values, n): own buffers and float32[m] -> float32[n], zero where nothing was sent.
    check(buffers, n): raises CodecError unless the own buffers are such that `backward` writes each place in range, and
      none twice.
    backward_into(buffers, values, out, add): numpy; as `decode_into` of a Codec.
    slab: the most values it takes at once.
    places(buffers, n): of own buffers that have passed `check`, where the values were, int32[m], ascending. None: of a
      transform that does more than pick.
    loops(codec): what does all slabs of a run at once where this codec takes what is handed on, if anything does.
    """

    name: str
    init: Callable[[int], State]
    passes: Callable[[int], int]
    layout: Callable[[int], Sections]
    forward: Callable[[Array, State], tuple[tuple[Array, ...], Array, State]]
    backward: Callable[[Buffers, Array, int], Array]
    check: Callable[[Buffers, int], None]
    backward_into: Callable[[Buffers, Numpy, Numpy, bool], None]
    slab: int = SLAB_VALUES
    places: Callable[[Buffers, int], Array] | None = None
    loops: Callable[[Codec], RunLoops | None] = lambda codec: None


class Scratch(threading.local):
    """Named arrays of this thread, made once and used again: allocation costs more than the arithmetic."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, np.dtype[Any]], Numpy] = {}

    def take(self, name: str, count: int, dtype: Any) -> Numpy:
        """Return `count` values of that name: undefined content, valid until the next take of the same name.

        More than a piece (and the padding of a packed one) is not kept.
        """
        size = PIECE_VALUES + 8
        if count > size:
            return np.empty(count, dtype)
        key = (name, np.dtype(dtype))
        if (array := self._arrays.get(key)) is None:
            array = self._arrays[key] = np.empty(size, dtype)
        return array[:count]


def block_count(count: int, block: int) -> int:
    """Return how many blocks hold `count` values; the last may be shorter."""
    return -(-count // block)


def needs_between(codec: str, argument: str, value: float, least: float, most: float) -> None:
    """Raise ConfigError, naming the codec and its argument, unless least <= value <= most."""
    if not least <= value <= most:
        raise ConfigError(f"{codec}: {argument}={value} is not in {least}..{most}")


def block_codec_name(family: str, block: int) -> str:
    """Return the canonical spec of a codec whose blocks share a scale. Raises ConfigError for an impossible block."""
    name = f"{family}:block={block}"
    needs_between(name, "block", block, 1, LARGEST_BLOCK)
    return name


def needs_slab(x: Array, codec: str) -> None:
    """Raise CodecError unless x is float32[n] with n >= 1 (a tracer of jax will do)."""
    if getattr(x, "dtype", None) != np.float32 or len(x.shape) != 1 or x.shape[0] < 1:
        kind = f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "dtype") else type(x).__name__
        raise CodecError(f"{codec} encodes float32[n] with n >= 1, not {kind}")


def plain(x: Numpy) -> Numpy:
    """Return x itself if it is contiguous and aligned, as almost always, and a copy that is if not."""
    return x if x.flags.c_contiguous and x.flags.aligned else np.require(x, requirements=["C", "A"])


def address_of(x: Numpy) -> int:
    """Return where the values of an array begin in memory."""
    return int(x.__array_interface__["data"][0])


def in_blocks(x: Array, block: int) -> Array:
    """Return x[n] as rows of `block` values, the last one filled up with zeros."""
    xp = x.__array_namespace__()
    return xp.concatenate([x, xp.zeros(-x.shape[0] % block, dtype=x.dtype)]).reshape(-1, block)


def put(values: Numpy, out: Numpy, add: bool) -> None:
    """Write values to `out`; `add`: onto the values there."""
    if add:
        np.add(out, values, out=out)
    else:
        np.copyto(out, values)


def to_bfloat16(bits: Array) -> Array:
    """Return float32 bits, int32 and not negative, rounded to the nearest bfloat16, ties to even: its bits, int32."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def needs_finite(largest_bits: int, count: int) -> None:
    """Raise NonFiniteDelta if `largest_bits`, the largest magnitude's bits as an integer, is infinity's or a NaN's."""
    if largest_bits >= INFINITY_BITS:
        raise NonFiniteDelta(f"NaN or infinity in a slab of {count} values")


def read_buffers(buffers: Buffers, layout: Sequence[tuple[Any, int]], codec: str) -> tuple[Array, ...]:
    """View the buffers as arrays of the (dtype, count) in `layout`, without a copy; jax arrays stay what they are.

    Raises CodecError if there are more or fewer buffers, or one has another length or dtype.
    """
    if len(buffers) != len(layout):
        raise CodecError(f"{codec} has {len(layout)} buffers a slab, not {len(buffers)}")
    return tuple(
        _read(buffer, dtype, count, f"buffer {position} of {codec}")
        for position, (buffer, (dtype, count)) in enumerate(zip(buffers, layout, strict=True))
    )


def _read(buffer: Buffer | Array, dtype: Any, count: int, name: str) -> Array:
    if isinstance(buffer, bytes | bytearray | memoryview):
        size = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        if size != count * np.dtype(dtype).itemsize:
            raise CodecError(f"{name} has {size} bytes, not {count * np.dtype(dtype).itemsize}")
        try:
            return np.frombuffer(buffer, dtype)
        except (ValueError, BufferError) as error:
            raise CodecError(f"{name} cannot be read: {error}") from None
    if getattr(buffer, "dtype", None) != dtype or tuple(buffer.shape) != (count,):
        raise CodecError(f"{name} is not {np.dtype(dtype)}[{count}]")
    return buffer


def check_scales(scales: Numpy, largest_bits: int, codec: str, smallest_bits: int = SMALLEST_SCALE_BITS) -> None:
    """Raise CodecError unless every scale (bfloat16 as uint16) is zero or a normal number an encoder may have made."""
    if np.maximum.reduce(scales) > largest_bits or np.minimum.reduce(scales - _ONE) < smallest_bits - 1:
        odd = (scales > largest_bits) | ((scales < smallest_bits) & (scales != 0))
        raise CodecError(f"{codec}: scale {int(odd.argmax())} is negative, not finite or out of range")


def energy_of_scales(scales: Buffer | Array, most: int, block: int, count: int) -> float:
    """Return the sum of squares of `count` values that are all `most` times the scale of their block; inf if that is no
    float32, 0 where the squares are smaller than any float32.

    scales: bfloat16 as uint16, one for each block of `block` values; the last block may be shorter.
    """
    bits = scales if isinstance(scales, np.ndarray) else np.frombuffer(scales, np.uint16)
    steps = np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    missing, squares = block * steps.size - count, np.add.accumulate(steps * steps, dtype=np.float64)  # in this order
    return most * most * max(0.0, block * float(squares[-1]) - missing * float(steps[-1]) ** 2)


_LONGEST_SLAB = 1 << 18
"""The most values of a chain's slab, unless the codec's own is longer: a megabyte of float32."""

_MOST_BYTES = 900_000
"""The most bytes of an encoded slab: it fits in a frame, with room for the header and the sections' padding."""


def chain(*parts: Transform | Codec) -> Codec:
    """Return the codec that puts a slab through each transform and then through the codec, which stands last.

    Its error is what the transforms drop, plus the codec's error on what they pass on. Its buffers are those of the
    transforms in order, then those of the codec. Its slab is the longest transform.slab / 2^i of which no more is
    passed on than the codec's slab, that has at most 2^18 values (or as many as the codec's), and that is at most
    900,000 bytes when encoded. Raises TypeError unless all parts but the last are transforms, and the last is a codec.
    Source of the shape: optax.chain.
    """
    *transforms, codec = parts
    if not isinstance(codec, Codec) or not all(isinstance(transform, Transform) for transform in transforms):
        raise TypeError("a chain is transforms first, and one codec last")
    for transform in reversed(transforms):
        assert isinstance(transform, Transform)
        codec = _join(transform, codec)
    return codec


def _join(transform: Transform, codec: Codec) -> Codec:
    name = f"{transform.name}+{codec.name}"

    def init(count: int) -> State:
        return transform.init(count), codec.init(transform.passes(count))

    def layout(count: int) -> Sections:
        return (*transform.layout(count), *codec.layout(transform.passes(count)))

    def cut(buffers: Buffers, count: int) -> tuple[Buffers, Buffers]:
        own = len(transform.layout(count))
        return buffers[:own], buffers[own:]

    def encode(x: Array, state: State) -> tuple[tuple[Array, ...], State]:
        needs_slab(x, name)
        own, values, transform_state = transform.forward(x, state[0])
        coded, codec_state = codec.encode(values, state[1])
        return (*own, *coded), (transform_state, codec_state)

    def decode(buffers: Buffers, count: int) -> Array:
        own, coded = cut(buffers, count)
        return transform.backward(own, codec.decode(coded, transform.passes(count)), count)

    def check(buffers: Buffers, count: int) -> None:
        own, coded = cut(buffers, count)
        transform.check(own, count)
        codec.check(coded, transform.passes(count))

    def decode_into(buffers: Buffers, out: Numpy, add: bool) -> None:
        own, coded = cut(buffers, out.size)
        values = np.empty(transform.passes(out.size), np.float32)
        codec.decode_into(coded, values, False)
        transform.backward_into(own, values, out, add)

    inner = codec.energy

    def energy(buffers: Buffers, count: int) -> float:
        assert inner is not None
        return inner(cut(buffers, count)[1], transform.passes(count))

    def sparse(buffers: Buffers, count: int) -> tuple[Numpy, Numpy]:
        assert transform.places is not None
        own, coded = cut(buffers, count)
        values = np.empty(transform.passes(count), np.float32)
        codec.decode_into(coded, values, False)
        return np.asarray(transform.places(own, count)), values

    return Codec(
        *(name, init, layout, encode, decode, check, decode_into, _slab(transform, codec)),
        energy=energy if inner else None,
        sparse=sparse if transform.places else None,
        loops=transform.loops(codec),
    )


def _slab(transform: Transform, codec: Codec) -> int:
    slab = transform.slab
    while slab > 1 and not _fits(slab, transform, codec):
        slab //= 2
    return slab


def _fits(slab: int, transform: Transform, codec: Codec) -> bool:
    if slab > max(_LONGEST_SLAB, codec.slab) or (passed := transform.passes(slab)) > codec.slab:
        return False
    sections = (*transform.layout(slab), *codec.layout(passed))
    return sum(np.dtype(dtype).itemsize * count for dtype, count in sections) <= _MOST_BYTES


def pack_states(states: Sequence[State]) -> list[NDArray[Any]]:
    """Return a copy of every array in the states of a payload's slabs, on the host, in a fixed order."""
    return [np.array(array) for state in states for array in _arrays(state)]


def fill_states(like: Sequence[State], arrays: Sequence[NDArray[Any]]) -> list[State]:
    """Return states of the form of `like` with the arrays that `pack_states` gave. Raises CodecError if they differ."""
    coming = iter(arrays)
    filled = [_filled(state, coming) for state in like]
    if next(coming, None) is not None:
        raise CodecError("the state of a codec has more arrays than this one keeps")
    return filled


def _arrays(state: State) -> Iterator[Any]:
    if isinstance(state, tuple | list):
        for part in state:
            yield from _arrays(part)
    else:
        yield state


def _filled(like: State, coming: Iterator[NDArray[Any]]) -> State:
    if isinstance(like, tuple | list):
        parts = [_filled(part, coming) for part in like]
        return type(like)(parts)
    array = next(coming, None)
    dtype = getattr(like, "dtype", None) or np.asarray(like).dtype
    if array is None or array.shape != np.shape(like) or array.dtype != dtype:
        raise CodecError(f"the state of a codec is not one of {np.shape(like)} {dtype}")
    return array.copy()
