"""Keep what a codec leaves out and send it later: for loops that send gradients and have no model to keep it in.

Rule 1: what is kept is the codec's state: it goes in and comes out with every encode; a receiver needs none of it.
Rule 2: the bytes are the same from numpy and from jitted JAX for every decay.  A product and the sum it goes into are
parted by `_tidy`, which reads the product as an integer: no compiler can round the two as one.  Neither does a denormal
ever meet arithmetic: `_tidy` drops what is under 2^-100, and a float32 above it is a multiple of 2^-123.
Rule 3: a number that would overflow stays at the largest float32.
A run keeps the residual in the model instead, where it trains on: that is better, where there is a model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqtrain.codecs.codec import (
    SMALLEST_MAGNITUDE_BITS,
    Codec,
    Scratch,
    State,
    needs_between,
    needs_finite,
    needs_slab,
)
from zmqtrain.core.specs import format_spec
from zmqtrain.core.types import Array

"""The densities of Deep Gradient Compression, sec. 3.3: four epochs of warm-up, and what is kept after them."""

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
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

    return codec._replace(name=name, init=init, encode=encode)


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

    return codec._replace(name=name, init=init, encode=encode)


def _tidy(x: Array) -> Array:
    """Return float32 x with all under 2^-100 made +0, and infinity the largest float32; a NaN stays.

    It works on the bits: to a compiler the result is an integer's, which it cannot fuse into float arithmetic.
    """
    if isinstance(x, np.ndarray) and _is_ordinary(x):
        return x + np.float32(0)
    xp = x.__array_namespace__()
    bits = x.view(xp.int32)
    magnitudes = bits & _MAGNITUDE
    return xp.where(magnitudes < SMALLEST_MAGNITUDE_BITS, 0, bits - (magnitudes == _INFINITY)).view(xp.float32)


def _is_ordinary(x: np.ndarray[Any, Any]) -> bool:
    """Return whether there is nothing to tidy in numpy's x but the sign of a zero, which the sum with +0 takes away."""
    magnitudes = np.bitwise_and(x.view(np.uint32), _MAGNITUDE, out=_scratch.take("magnitudes", x.size, np.uint32))
    if np.maximum.reduce(magnitudes) >= _INFINITY:
        return False
    np.subtract(magnitudes, 1, out=magnitudes)  # a zero wraps around to the largest
    return bool(np.minimum.reduce(magnitudes) >= SMALLEST_MAGNITUDE_BITS - 1)


def _finite(x: Array) -> Array:
    """Return x, tidy. Raises NonFiniteDelta from numpy, if there is NaN or infinity."""
    if isinstance(x, np.ndarray):
        needs_finite(int((x.view(np.int32) & _MAGNITUDE).max()), x.size)
    return _tidy(x)


def _add(one: Array, other: Array) -> Array:
    """Return one + other, tidy, of two that are tidy."""
    with np.errstate(over="ignore"):
        return _tidy(one + other)


def _subtract(one: Array, other: Array) -> Array:
    """Return one - other, tidy, of two that are tidy."""
    with np.errstate(over="ignore"):
        return _tidy(one - other)


def _multiply(x: Array, factor: float) -> Array:
    """Return factor * x, rounded once to float32, tidy."""
    return x if factor == 1 else _tidy(x * np.float32(factor))
