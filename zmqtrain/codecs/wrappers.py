"""Codecs around codecs, for loops that send gradients and have no model in which the unsent rest could stay.

`error_feedback` and `momentum_correction` keep what the codec leaves out and send it later; `fragment` sends one part
of a slab at a time, in turn.
Rule 1: what is kept is the codec's state: it goes in and comes out with every encode; a receiver needs none of it.
Rule 2: the bytes are the same from numpy and from jitted JAX for every decay.  A product and the sum it goes into are
parted by `_tidy`, which reads the product as an integer: no compiler can round the two as one.  Neither does a denormal
ever meet arithmetic: `_tidy` drops what is under 2^-100, and a float32 above it is a multiple of 2^-123.
Rule 3: a number that would overflow stays at the largest float32.
Rule 4: every part of a slab has the same number of values, filled up with zeros: sizes follow from the count alone.
A run's settings cut whole models instead, the same way on all nodes: `fragment.Layout`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zmqtrain.codecs.codec import (
    INFINITY_BITS,
    MAGNITUDE,
    SMALLEST_MAGNITUDE_BITS,
    Buffers,
    Codec,
    Numpy,
    RunLoops,
    Scratch,
    Sections,
    State,
    Transform,
    block_count,
    chain,
    needs_between,
    needs_finite,
    needs_slab,
    put,
    read_buffers,
)
from zmqtrain.core.errors import CodecError
from zmqtrain.core.specs import format_spec
from zmqtrain.core.types import Array

MOST_FRAGMENTS = 4096
"""The most parts of a slab; at a slab's usual size each has 16 values then."""

_LARGEST_CUT = 4096
_LARGEST_SLAB = 1 << 30


def fragment(codec: Codec, fragments: int = 8) -> Codec:
    """Return the codec that sends one of `fragments` parts of a slab, each in its turn, coded by `codec`.

    Its error is all of the other parts and the codec's on this one: it is meant to stand under `error_feedback`.
    Name: the codec's, with one more argument: "ternary:block=128,fragments=8", "bf16:fragments=8".
    State: ((the part to send next: uint32[1]), the codec's own). Bytes: 4 a slab, and the codec's of one part.
    Raises ConfigError unless fragments is in 1..4096.
    """
    joined = chain(fragment_transform(fragments), codec)
    has_arguments = ":" in codec.name.rpartition("+")[2]
    return joined._replace(name=f"{codec.name}{',' if has_arguments else ':'}fragments={fragments}")


def fragment_transform(fragments: int = 8) -> Transform:
    """Return the transform that passes on every `fragments`-th block of a slab, from another block on at every turn.

    A block has the largest power of two up to 4096 values with which there are enough blocks for all parts and the
    parts' padding is at most an eighth of the slab; else one value. A slab of fewer values than `fragments` has as many
    parts as values.
    State: the part to send next, uint32[1], starting from 0; nodes that are to send different parts start from others.
    Own buffer: the part, (uint32, 1). Raises ConfigError unless fragments is in 1..4096.
    """
    name = format_spec("fragment", {"fragments": fragments})
    needs_between(name, "fragments", fragments, 1, MOST_FRAGMENTS)

    def layout(count: int) -> Sections:
        return ((np.uint32, 1),)

    def read(buffers: Buffers, count: int) -> Array:
        (part,) = read_buffers(buffers, layout(count), name)
        return part

    def forward(x: Array, state: State) -> tuple[tuple[Array, ...], Array, State]:
        xp = x.__array_namespace__()
        cut = _cut(x.shape[0], fragments)
        part = xp.minimum(state, xp.uint32(cut.parts - 1))  # the state may come from a cut in more parts
        following = xp.where(part == cut.parts - 1, xp.uint32(0), part + xp.uint32(1))
        if isinstance(x, np.ndarray):
            needs_finite(int((x.view(np.int32) & MAGNITUDE).max()), x.size)
            return (part,), _take_numpy(x, cut, int(part[0])), following
        padded = xp.concatenate([x, xp.zeros(cut.whole - x.shape[0], dtype=xp.float32)])
        return (part,), padded.reshape(cut.rows, cut.parts, cut.block)[:, part[0]].reshape(-1), following

    def backward(buffers: Buffers, values: Array, count: int) -> Array:
        part, cut = read(buffers, count), _cut(count, fragments)
        if isinstance(values, np.ndarray):
            out = np.empty(count, np.float32)
            backward_into(buffers, values, out, False)
            return out
        xp = values.__array_namespace__()
        mine = (xp.arange(cut.parts, dtype=xp.uint32) == part)[None, :, None]
        spread = xp.where(mine, values.reshape(cut.rows, 1, cut.block), xp.float32(0))
        return spread.reshape(-1)[:count]

    def backward_into(buffers: Buffers, values: Numpy, out: Numpy, add: bool) -> None:
        part, cut = int(read(buffers, out.size)[0]), _cut(out.size, fragments)
        if part >= cut.parts:
            raise CodecError(f"{name}: part {part} of a slab with {cut.parts} parts")
        if not add:
            out.fill(0)
        blocks, rest = _places(out, cut, part)
        head = blocks.size
        for target, source in ((blocks, values[:head].reshape(blocks.shape)), (rest, values[head : head + rest.size])):
            put(source, target, add)

    def check(buffers: Buffers, count: int) -> None:
        part, parts = read(buffers, count), _cut(count, fragments).parts
        if part[0] >= parts:
            raise CodecError(f"{name}: part {part[0]} of a slab with {parts} parts")

    return Transform(
        name=name,
        init=lambda count: np.zeros(1, np.uint32),
        passes=lambda count: _cut(count, fragments).passes,
        layout=layout,
        forward=forward,
        backward=backward,
        check=check,
        backward_into=backward_into,
        slab=_LARGEST_SLAB,
    )


class _Cut(NamedTuple):
    """How a slab is cut: `rows` rows of `parts` blocks of `block` values, the padding counted in."""

    block: int
    parts: int
    rows: int

    @property
    def passes(self) -> int:
        return self.rows * self.block

    @property
    def whole(self) -> int:
        return self.passes * self.parts


@lru_cache(maxsize=256)
def _cut(count: int, fragments: int) -> _Cut:
    """Return the cut with the largest block that pads at most an eighth, and passes on no more than came in."""
    block = _LARGEST_CUT
    while block > 1:
        cut = _Cut(block, fragments, block_count(block_count(count, block), fragments))
        enough, padding = block_count(count, block) >= fragments, cut.whole - count
        if enough and padding <= count // 8 and cut.passes <= count:
            return cut
        block //= 2
    parts = min(fragments, count)
    return _Cut(1, parts, block_count(count, parts))


def _places(x: Numpy, cut: _Cut, part: int) -> tuple[Numpy, Numpy]:
    """Return views of what belongs to the part: its whole blocks, one a row, and what it has of a shorter last one."""
    whole = x.size // cut.block
    blocks = x[: whole * cut.block].reshape(whole, cut.block)[part :: cut.parts]
    return blocks, x[whole * cut.block :] if whole % cut.parts == part else x[x.size :]


def _take_numpy(x: Numpy, cut: _Cut, part: int) -> Numpy:
    blocks, rest = _places(x, cut, part)
    values = np.zeros(cut.passes, np.float32)
    values[: blocks.size].reshape(blocks.shape)[:] = blocks
    values[blocks.size : blocks.size + rest.size] = rest
    return values


_scratch = Scratch()
_LEAST_FACTOR, _MOST_MOMENTUM = 0.001, 0.999


def error_feedback(codec: Codec, decay: float = 1.0) -> Codec:
    """Add what the codec has left out so far to what it is given next.

    wanted = x + decay * residual; codec(wanted) is sent; residual = wanted - what the receiver decodes. With decay 1
    nothing is lost: the sum of all x is the sum of all that was sent, and the residual. A smaller decay, in 0.001..1
    and used as float32, forgets: a share of 1 - decay of the residual a round. What is under 2^-100 is dropped, and
    wanted stays within the float32s.
    State: (residual float32[n], the codec's own). Buffers, layout and decoding are the codec's.
    DeMo's extraction is this with a decay of 0.999 over a chain of a transform, a top-k and a codec.
    Raises ConfigError for another decay.
    Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent; Karimireddy et al. 2019, Error Feedback Fixes SignSGD,
    alg. 2; decay: Peng et al. 2024, DeMo, alg. 1.
    """
    decay = float(decay)
    name = f"{format_spec('feedback', {'decay': decay})}+{codec.name}"
    needs_between(name, "decay", decay, _LEAST_FACTOR, 1)

    def init(count: int) -> State:
        return np.zeros(count, np.float32), codec.init(count)

    def encode(x: Array, state: State) -> tuple[tuple[Array, ...], State]:
        needs_slab(x, name)
        residual, inner = state
        wanted = _add(_finite(x), _multiply(residual, decay))
        buffers, inner = codec.encode(wanted, inner)
        residual = _subtract(wanted, _tidy(codec.decode(buffers, x.shape[0])))
        return buffers, (residual, inner)

    return codec._replace(name=name, init=init, encode=encode, loops=_that_decode(codec.loops))


def momentum_correction(codec: Codec, factor: float = 0.9) -> Codec:
    """Add up momentum, not gradients, while they wait to be sent: for codecs that send few values at a time.

    velocity = factor * velocity + x; waiting = waiting + velocity; codec(waiting) is sent; waiting loses what the
    receiver decodes, and velocity is cleared where that is not zero (momentum factor masking: a value that waited long
    must not go on in its old direction). factor: in 0.001..0.999, used as float32; gradients are clipped before, by the
    caller.
    Every value of x is worth 1 / (1 - factor) in the end, the masking aside:
        sum of x = (1 - factor) * (sum of what was sent + waiting) + factor * (velocity + sum of what was cleared)
    A codec that sends every value clears every velocity: over it this is error feedback.
    State: (velocity float32[n], waiting float32[n], the codec's own). Buffers, layout and decoding are the codec's.
    Raises ConfigError for another factor.
    Source: Lin et al. 2018, Deep Gradient Compression, sec. 3.2 and alg. 4.
    """
    factor = float(factor)
    name = f"{format_spec('momentum', {'factor': factor})}+{codec.name}"
    needs_between(name, "factor", factor, _LEAST_FACTOR, _MOST_MOMENTUM)

    def init(count: int) -> State:
        return np.zeros(count, np.float32), np.zeros(count, np.float32), codec.init(count)

    def encode(x: Array, state: State) -> tuple[tuple[Array, ...], State]:
        needs_slab(x, name)
        velocity, waiting, inner = state
        velocity = _add(_multiply(velocity, factor), _finite(x))
        waiting = _add(waiting, velocity)
        buffers, inner = codec.encode(waiting, inner)
        sent = _tidy(codec.decode(buffers, x.shape[0]))
        xp = sent.__array_namespace__()
        velocity = xp.where(sent == 0, velocity, xp.float32(0))
        return buffers, (velocity, _subtract(waiting, sent), inner)

    return codec._replace(name=name, init=init, encode=encode, loops=_that_decode(codec.loops))


def _that_decode(loops: RunLoops | None) -> RunLoops | None:
    """Return a codec's loops for a wrapper that keeps a state: all but the one that encodes."""
    return None if loops is None else loops._replace(encode=None)


def _tidy(x: Array) -> Array:
    """Return float32 x with all under 2^-100 made +0, and infinity the largest float32; a NaN stays.

    It works on the bits: to a compiler the result is an integer's, which it cannot fuse into float arithmetic.
    """
    if isinstance(x, np.ndarray) and _is_ordinary(x):
        return x + np.float32(0)
    xp = x.__array_namespace__()
    bits = x.view(xp.int32)
    magnitudes = bits & MAGNITUDE
    return xp.where(magnitudes < SMALLEST_MAGNITUDE_BITS, 0, bits - (magnitudes == INFINITY_BITS)).view(xp.float32)


def _is_ordinary(x: Numpy) -> bool:
    """Return whether there is nothing to tidy in numpy's x but the sign of a zero, which the sum with +0 takes away."""
    magnitudes = np.bitwise_and(x.view(np.uint32), MAGNITUDE, out=_scratch.take("magnitudes", x.size, np.uint32))
    if np.maximum.reduce(magnitudes) >= INFINITY_BITS:
        return False
    np.subtract(magnitudes, 1, out=magnitudes)  # a zero wraps around to the largest
    return bool(np.minimum.reduce(magnitudes) >= SMALLEST_MAGNITUDE_BITS - 1)


def _finite(x: Array) -> Array:
    """Return x, tidy. Raises NonFiniteDelta from numpy, if there is NaN or infinity."""
    if isinstance(x, np.ndarray):
        needs_finite(int((x.view(np.int32) & MAGNITUDE).max()), x.size)
    return _tidy(x)


def _add(one: Array, other: Array) -> Array:
    with np.errstate(over="ignore"):
        return _tidy(one + other)


def _subtract(one: Array, other: Array) -> Array:
    with np.errstate(over="ignore"):
        return _tidy(one - other)


def _multiply(x: Array, factor: float) -> Array:
    return x if factor == 1 else _tidy(x * np.float32(factor))
