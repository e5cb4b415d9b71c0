"""The cosine transform is exact in its sums, so the same everywhere, and turns back to within its cosines' bits."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings

from tests.grids import examples, nightly
from zmqtrain.codecs import dct as module
from zmqtrain.codecs.codec import chain
from zmqtrain.codecs.dct import BLOCKS, dct
from zmqtrain.codecs.plain import float32
from zmqtrain.codecs.quantize import int8
from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta

from slabs import slabs

SIZES = [1, 7, 64, 129, 600]
LARGEST = np.finfo(np.float32).max

every_block = pytest.mark.parametrize("block", BLOCKS)


@cache
def in_jax(block):
    """Turn each row of a stack, and turn it back: one function to compile."""
    transform = dct(block)

    def both(x):
        _, values, _ = transform.forward(x, ())
        return values, transform.backward((), values, x.shape[0])

    return jax.jit(jax.vmap(both))


def raw(*arrays):
    return [np.asarray(array).tobytes() for array in arrays]


def matrix(block):
    place = np.arange(block)
    whole = np.sqrt(2 / block) * np.cos(np.pi * (2 * place + 1) * place[:, None] / (2 * block))
    whole[0] = np.sqrt(1 / block)
    return whole


def norms(x, block):
    padded = np.zeros(-(-x.size // block) * block)
    padded[: x.size] = x
    return np.linalg.norm(padded.reshape(-1, block), axis=1)


@cache
def jitted_chain():
    codec = chain(dct(16), int8(16))

    def both(x, state):
        buffers, _ = codec.encode(x, state)
        return buffers, codec.decode(buffers, x.shape[0])

    return jax.jit(both)


@pytest.mark.parametrize("block", [8, 64, 128, *nightly(16, 32)])
@settings(max_examples=examples(20))
@given(x=slabs([7, 601]))
@example(x=np.full(601, LARGEST, np.float32))
@example(x=np.array([2.0**-100] + 600 * [1e-40], np.float32))
def test_numpy_and_jitted_jax_give_each_of_stacked_slabs_the_same_bits_both_ways(block, x):
    transform, rows = dct(block), np.stack([x, -x[::-1]])
    theirs, back = in_jax(block)(rows)
    for row, wanted in enumerate(rows):
        own, ours, state = transform.forward(wanted, transform.init(x.size))
        assert (own, state) == ((), ()) and ours.shape == (transform.passes(x.size),)
        assert ours.dtype == theirs.dtype == np.float32
        assert raw(ours) == raw(theirs[row])
        assert raw(transform.backward((), ours, x.size)) == raw(back[row])


def test_eager_jax_gives_the_same_bits():
    transform, x = dct(64), np.random.default_rng(0).standard_normal(150).astype(np.float32)
    ours, theirs = transform.forward(x, ())[1], transform.forward(jnp.asarray(x), ())[1]
    assert raw(ours) == raw(theirs)
    assert raw(transform.backward((), ours, 150)) == raw(transform.backward((), theirs, 150))


@every_block
@settings(max_examples=examples(30))
@given(x=slabs(SIZES))
def test_a_block_comes_back_to_within_its_stated_error(block, x):
    x = np.where(np.abs(x) < 2.0**124, x, 0).astype(np.float32)
    transform = dct(block)
    back = transform.backward((), transform.forward(x, ())[1], x.size)
    before, error = norms(x.astype(np.float64), block), norms(x - back.astype(np.float64), block)
    largest = np.array([np.abs(x[i : i + block]).max() for i in range(0, x.size, block)])
    assert (error <= np.where(largest < 2.0**-100 * block**0.5, 1.0, 0.009) * before).all()


@every_block
def test_the_matrix_is_as_near_to_orthonormal_as_the_error_bound_needs(block):
    whole = module._cosines(block).astype(np.float64)
    small = whole / 2 ** BLOCKS[block]
    assert np.linalg.norm(small.T @ small - np.eye(block), 2) <= 0.0075
    rounding = 0.5 * block**0.5 / 2**14 * 2.01
    assert 0.0075 + rounding <= 0.009
    exact = matrix(block) * 2 ** BLOCKS[block]
    assert np.abs(np.abs(exact - np.floor(exact)) - 0.5).min() > 1e-4  # no machine's cosine rounds to another


@every_block
def test_every_factor_is_exact_in_bfloat16_and_every_partial_sum_in_float32(block):
    whole = module._cosines(block)
    assert (whole.astype(ml_dtypes.bfloat16).astype(np.float32) == whole).all()
    halves = np.arange(-128, 129, dtype=np.float32)
    assert (halves.astype(ml_dtypes.bfloat16).astype(np.float32) == halves).all()
    assert 128 * max(np.abs(whole).sum(axis).max() for axis in (0, 1)) < 2**24


@every_block
def test_it_is_the_cosine_transform(block):
    x = np.random.default_rng(1).standard_normal(block * 9).astype(np.float32)
    exact = x.reshape(9, block) @ matrix(block).T
    values = dct(block).forward(x, ())[1].reshape(9, block)
    assert np.linalg.norm(values - exact) < 0.005 * np.linalg.norm(exact)


def test_a_smooth_block_has_its_length_in_a_few_coefficients():
    values = dct(64).forward(np.linspace(1, 2, 64, dtype=np.float32), ())[1]
    assert np.linalg.norm(np.sort(np.abs(values))[:-2]) < 0.03 * np.linalg.norm(values)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_over_the_largest_float_becomes_it_both_ways(sign):
    transform = dct(64)
    huge = np.full(64, sign * LARGEST, np.float32)
    values = transform.forward(huge, ())[1]
    assert values[0] == sign * LARGEST
    for given_values in (values, huge):
        assert np.isfinite(transform.backward((), given_values, 64)).all()
    assert np.isfinite(transform.forward(LARGEST * (sign / 181 * module._cosines(64)[5]), ())[1]).all()


def test_zeros_and_blocks_under_the_smallest_magnitude_become_zeros():
    transform = dct(8)
    for value in (0.0, -0.0, 1e-45, 1.999 * 2.0**-101):
        assert not transform.forward(np.full(33, value, np.float32), ())[1].any()
        assert not transform.backward((), np.full(40, value, np.float32), 33).any()
    assert transform.forward(np.full(33, 2.0**-100, np.float32), ())[1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_delta_that_is_not_finite_is_refused_wherever_it_is(bad):
    for position in (0, 63, 64, 601):
        x = np.ones(602, np.float32)
        x[position] = bad
        with pytest.raises(NonFiniteDelta, match="602 values"):
            dct().forward(x, ())


@pytest.mark.parametrize(
    "wrong", [np.ones(5, np.int32), np.ones(5, np.float64), np.ones((2, 3), np.float32), np.ones(0, np.float32), [1.0]]
)
def test_only_flat_float32_is_transformed(wrong):
    with pytest.raises(CodecError, match=r"float32\[n\]"):
        dct().forward(wrong, ())


def test_a_strided_view_is_transformed_like_its_copy_and_a_long_slab_like_its_pieces():
    transform = dct(128)
    x = np.random.default_rng(0).standard_normal(300_002).astype(np.float32)[::2]
    values = transform.forward(x, ())[1]
    assert raw(values) == raw(transform.forward(x.copy(), ())[1]) == raw(in_jax(128)(x[None])[0])
    assert raw(transform.forward(x[: 128 * 600], ())[1]) == raw(values[: 128 * 600])


def test_buffers_or_values_that_are_not_the_stage_s_are_refused_and_nothing_is_written():
    transform, out = dct(64), np.full(65, 7, np.float32)
    with pytest.raises(CodecError, match="dct:block=64 has 0 buffers"):
        transform.check([b""], 65)
    for buffers, values in (
        ([b""], np.ones(128, np.float32)),
        ([], np.ones(65, np.float32)),
        ([], np.ones(128, np.float64)),
    ):
        with pytest.raises(CodecError):
            transform.backward(buffers, values, 65)
        with pytest.raises(CodecError):
            transform.backward_into(buffers, values, out, True)
    assert (out == 7).all()
    transform.check([], 65)


@settings(max_examples=examples(30))
@given(x=slabs([7, 601]))
def test_a_chain_with_a_codec_keeps_the_laws_of_a_codec(x):
    codec = chain(dct(16), int8(16))
    buffers, _ = codec.encode(x, codec.init(x.size))
    codec.check(raw(*buffers), x.size)
    decoded = codec.decode(raw(*buffers), x.size)
    theirs, values = jitted_chain()(x, codec.init(x.size))
    assert raw(*buffers) == raw(*theirs)
    assert raw(decoded) == raw(values)
    assert np.isfinite(decoded).all()
    before = np.random.default_rng(0).standard_normal(x.size).astype(np.float32)
    replaced, added = before.copy(), before.copy()
    codec.decode_into(buffers, replaced, False)
    codec.decode_into(buffers, added, True)
    assert raw(replaced, added) == raw(decoded, before + decoded)


def test_sent_and_residual_sum_to_what_was_computed_over_a_thousand_rounds():
    codec, rng = chain(dct(64), float32()), np.random.default_rng(3)
    computed, sent, residual = np.zeros(515), np.zeros(515), np.zeros(515, np.float32)
    for _ in range(1000):
        x = rng.standard_normal(515).astype(np.float32)
        wanted = x + residual
        decoded = codec.decode(codec.encode(wanted, codec.init(515))[0], 515)
        residual = wanted - decoded
        computed += x
        sent += decoded
    np.testing.assert_allclose(sent + residual, computed, atol=1000 * 8 * 2.0**-23)
    assert np.linalg.norm(residual) < 0.01 * 515**0.5 * 2


@pytest.mark.parametrize("block", [0, 1, 4, 63, 65, 256, -8])
def test_another_block_is_refused_with_the_choices(block):
    with pytest.raises(ConfigError, match=f"block={block} is not one of 8, 16, 32, 64, 128"):
        dct(block)


def test_the_name_is_canonical():
    assert dct().name == "dct:block=64" and dct(8).name == "dct:block=8"
