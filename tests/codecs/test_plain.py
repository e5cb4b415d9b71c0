"""What float32 and bf16 promise: every bit, and the nearest of the numbers that there are."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings

from tests.grids import examples
from zmqtrain.codecs import plain
from zmqtrain.codecs.plain import bf16, float32

from slabs import raw, slabs

LARGEST = np.finfo(np.float32).max
LARGEST_BF16 = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def through(codec, x):
    return codec.decode(raw(codec.encode(x, ())[0]), x.size)


@settings(max_examples=examples(60))
@given(x=slabs())
def test_float32_comes_back_bit_for_bit(x):
    assert raw([through(float32(), x)]) == raw([x])


@settings(max_examples=examples(120))
@given(x=slabs())
@example(x=np.array([LARGEST, -LARGEST], np.float32))
@example(x=np.array([1e-45, -(2.0**-134), 1.5 * 2.0**-133, 2.0**-126 - 2.0**-149], np.float32))
def test_bf16_is_off_by_no_more_than_it_states(x):
    """Numbers of 8 significant bits lie 2^-7 of their power of two apart, so half of that is the most to be off."""
    exact = x.astype(np.float64)
    error = np.abs(through(bf16(), x) - exact)
    assert (error <= np.where(np.abs(exact) >= 2.0**-126, 2.0**-8 * np.abs(exact), 2.0**-134)).all()


@settings(max_examples=examples(60))
@given(x=slabs())
@example(x=np.array([LARGEST, -LARGEST, LARGEST_BF16], np.float32))
def test_bf16_rounds_to_the_nearest_as_others_do_and_never_to_infinity(x):
    nearest = np.clip(x, -LARGEST_BF16, LARGEST_BF16).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert raw([through(bf16(), x)]) == raw([nearest])


@pytest.mark.parametrize("sign", [1, -1])
def test_bf16_sends_what_lies_halfway_to_the_even_one(sign):
    step = 2.0**-7
    halfway = sign * np.array([1 + step / 2, 1 + 3 * step / 2, 2 - step / 2, 2.0**-134, 3 * 2.0**-134], np.float32)
    even = sign * np.array([1, 1 + 2 * step, 2, 0, 2 * 2.0**-133], np.float32)
    assert raw([through(bf16(), halfway)]) == raw([even])
    theirs = jax.jit(bf16().encode)(halfway, ())[0]
    assert raw([bf16().decode(raw(theirs), halfway.size)]) == raw([even])


def test_bf16_has_the_same_bits_with_the_package_of_jax_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint64).astype(np.uint32)
    bits = np.concatenate(
        [bits, np.arange(0x7FFF0, 0x80010, dtype=np.uint32) << 12, [0, 1, 0x80000000, 0x8000, 0x18000]]
    )
    values = bits.astype(np.uint32).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3e38)]
    assert plain.bfloat16 is not None
    found = []
    for package in (plain.bfloat16, None):
        monkeypatch.setattr(plain, "bfloat16", package)
        ((coded,), *_) = bf16().encode(values, ())
        out, added, buffers = np.empty_like(values), np.ones_like(values), raw([coded])
        bf16().decode_into(buffers, out, False)
        bf16().decode_into(buffers, added, True)
        found.append((coded, bf16().decode(buffers, values.size), out, added))
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes()
