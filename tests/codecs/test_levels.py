"""Laws of the codecs that send signs and means: sign and int2."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.codecs.levels import int2, sign
from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta

from slabs import raw, slabs

CODECS = {codec.name: codec for codec in [sign(), sign(7), int2(), int2(5)]}
SIZES = [1, 7, 257, 600]
LARGEST = np.finfo(np.float32).max

every_codec = pytest.mark.parametrize("codec", [pytest.param(codec, id=name) for name, codec in CODECS.items()])
every_sign = pytest.mark.parametrize("codec", [sign(), sign(7), sign(4096)])


@cache
def in_jax(name):
    """Encode each row of a stack, and decode it: one function to compile."""

    def both(x):
        buffers, _ = CODECS[name].encode(x, ())
        return buffers, CODECS[name].decode(buffers, x.shape[0])

    return jax.jit(jax.vmap(both))


def blocks_of(codec, x):
    block = int(codec.name.partition("=")[2])
    return [x[start : start + block] for start in range(0, x.size, block)]


@every_codec
@settings(max_examples=examples(30))
@given(x=slabs([7, 601]))
@example(x=np.full(601, LARGEST, np.float32))
@example(x=np.array([2.0**-100] + 600 * [1e-40], np.float32))
def test_numpy_and_jitted_jax_give_each_of_stacked_slabs_the_same_bytes_and_values(codec, x):
    rows = np.stack([x, -x[::-1]])
    theirs, values = in_jax(codec.name)(rows)
    for row, wanted in enumerate(rows):
        ours, _ = codec.encode(wanted, ())
        assert raw(ours) == raw(buffer[row] for buffer in theirs)
        assert [(buffer.dtype, buffer.size) for buffer in ours] == list(codec.layout(x.size))
        assert [buffer.dtype for buffer in theirs] == [buffer.dtype for buffer in ours]
        assert raw([codec.decode(raw(ours), x.size)]) == raw([values[row]])


@every_codec
@settings(max_examples=examples(60))
@given(x=slabs(SIZES))
@example(x=np.array([1.0] + 599 * [2.0**-12], np.float32))
@example(x=np.array([1.0] + 599 * [0.501 * 2.0**-11], np.float32))
@example(x=np.array(4 * [2.0**-100] + 596 * [0.0], np.float32))
def test_something_is_taken_away_from_every_block_that_is_not_zero(codec, x):
    buffers, _ = codec.encode(x, ())
    codec.check(raw(buffers), x.size)
    decoded = codec.decode(raw(buffers), x.size)
    assert np.isfinite(decoded).all()
    error = x.astype(np.float64) - decoded
    for before, after in zip(blocks_of(codec, x.astype(np.float64)), blocks_of(codec, error), strict=True):
        if (scale := np.abs(before).max()) >= 2.0**-100:
            assert np.linalg.norm(after / scale) < np.linalg.norm(before / scale)
        else:
            assert (after == before).all()


@every_sign
@settings(max_examples=examples(60))
@given(x=slabs(SIZES))
@example(x=np.array([1.0] + 4095 * [0.501 * 2.0**-11], np.float32))
@example(x=np.array([1.0] + 4095 * [0.499 * 2.0**-11], np.float32))
def test_sign_takes_away_the_square_of_the_mean_magnitude(codec, x):
    decoded = codec.decode(codec.encode(x, ())[0], x.size)
    error = x.astype(np.float64) - decoded
    for before, after in zip(blocks_of(codec, x.astype(np.float64)), blocks_of(codec, error), strict=True):
        if (scale := np.abs(before).max()) >= 2.0**-100:
            before, after = before / scale, after / scale
            gain = 0.7 * before.size * np.abs(before).mean() ** 2
            assert (after**2).sum() <= (before**2).sum() - gain + 1e-12 * before.size


@pytest.mark.parametrize(
    ("codec", "least", "most"), [(sign(), 0.60, 0.605), (int2(), 0.33, 0.34), (int2(4096), 0.34, 0.345)]
)
def test_the_error_of_gaussian_values_is_that_of_the_best_levels(codec, least, most):
    x = np.random.default_rng(5).standard_normal(65_536).astype(np.float32)
    error = x - codec.decode(codec.encode(x, ())[0], x.size)
    assert least * np.linalg.norm(x) < np.linalg.norm(error) < most * np.linalg.norm(x)


def test_sign_sends_the_mean_magnitude_and_int2_those_of_the_near_and_the_far():
    x = np.array([3, -1, 1, -1, 1, -5], np.float32)
    packed, scales = sign().encode(x, ())[0]
    assert packed.tolist() == [0b101010] and scales.tolist() == [0x4000]
    packed, near, far = int2().encode(x, ())[0]
    assert packed.tolist() == [2 | 0 << 2 | 0 << 4, 1 | 1 << 2 | 3 << 4]
    assert near.tolist() == [0x3F80] and far.tolist() == [0x4080]
    np.testing.assert_array_equal(int2().decode((packed, near, far), 6), [4, -1, 1, -1, 1, -4])


def test_a_block_without_far_values_has_one_mean():
    buffers, _ = int2().encode(np.array([2, -2, 2], np.float32), ())
    assert buffers[1].tolist() == buffers[2].tolist() == [0x4000]


@every_codec
def test_zeros_are_sent_as_zeros(codec):
    for size in SIZES:
        buffers, _ = codec.encode(np.zeros(size, np.float32), ())
        codec.check(buffers, size)
        assert not codec.decode(buffers, size).any()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_slab_that_is_not_finite_is_refused_wherever_it_is(codec, bad):
    for position in (0, 300, 601):
        x = np.ones(602, np.float32)
        x[position] = bad
        with pytest.raises(NonFiniteDelta, match="602 values"):
            codec.encode(x, ())


@every_codec
@pytest.mark.parametrize("wrong", [np.ones(5, np.float64), np.ones((2, 3), np.float32), np.ones(0, np.float32), [1.0]])
def test_only_flat_float32_is_encoded(codec, wrong):
    with pytest.raises(CodecError, match=r"float32\[n\]"):
        codec.encode(wrong, ())


@every_codec
def test_strided_and_unaligned_values_are_encoded_like_their_copies_and_decoded_into_strides(codec):
    x = np.random.default_rng(0).standard_normal(1400).astype(np.float32)
    buffers = codec.encode(x[::2], ())[0]
    assert raw(buffers) == raw(codec.encode(x[::2].copy(), ())[0])
    odd = np.frombuffer(b"-" + x.tobytes(), np.float32, offset=1)
    assert raw(codec.encode(odd, ())[0]) == raw(codec.encode(x, ())[0])
    out = np.ones(1400, np.float32)
    codec.decode_into(raw(buffers), out[::2], False)
    codec.decode_into(raw(buffers), out[1::2], True)
    decoded = codec.decode(buffers, 700)
    assert raw([out[::2], out[1::2]]) == raw([decoded, 1 + decoded])


@every_codec
def test_a_slab_longer_than_a_piece_is_encoded_like_its_blocks(codec):
    x = np.random.default_rng(1).standard_normal(150_001).astype(np.float32)
    buffers, _ = codec.encode(x, ())
    theirs, values = in_jax(codec.name)(x[None])
    assert raw(buffers) == raw(buffer[0] for buffer in theirs)
    total = x.copy()
    codec.decode_into(buffers, total, True)
    assert raw([total]) == raw([x + np.asarray(values[0])])


@every_codec
def test_buffers_of_wrong_number_or_length_are_refused_and_nothing_is_written(codec):
    good = raw(codec.encode(np.ones(301, np.float32), ())[0])
    lies = [good[:-1], [*good, b""], []]
    lies += [[*good[:i], other, *good[i + 1 :]] for i in range(len(good)) for other in (good[i][:-1], good[i] + b"\0")]
    for lie in lies:
        out = np.full(301, 7, np.float32)
        for use in (codec.check, codec.decode, lambda lie, _, out=out: codec.decode_into(lie, out, True)):
            with pytest.raises(CodecError):
                use(lie, 301)
        assert (out == 7).all()


@every_codec
@settings(max_examples=examples(60))
@given(data=st.data())
def test_what_check_lets_through_decodes_to_finite_values(codec, data):
    size = data.draw(st.sampled_from([1, 5, 12]))
    good = raw(codec.encode(np.full(size, LARGEST, np.float32), ())[0])
    lie = [data.draw(st.binary(min_size=len(buffer), max_size=len(buffer)) | st.just(buffer)) for buffer in good]
    try:
        codec.check(lie, size)
    except CodecError:
        return
    assert np.isfinite(codec.decode(lie, size)).all()


@pytest.mark.parametrize(
    ("codec", "position", "content"),
    [
        (sign(), 0, b"\x02"),
        (sign(), 1, b"\x80\x7f"),
        (sign(), 1, b"\x80\xbf"),
        (sign(), 1, b"\x7f\x01"),
        (int2(), 0, b"\x04"),
        (int2(), 0, b"\x40"),
        (int2(), 1, b"\x80\x7f"),
        (int2(), 2, b"\x80\x7f"),
        (int2(), 1, b"\x01\x80"),
        (int2(), 2, b"\x01\x00"),
        (int2(), 1, b"\x81\x3f"),
    ],
)
def test_a_code_or_scale_that_no_encoder_makes_is_refused(codec, position, content):
    buffers = raw(codec.encode(np.ones(1, np.float32), ())[0])
    codec.check(buffers, 1)
    buffers[position] = content
    with pytest.raises(CodecError, match=codec.name):
        codec.check(buffers, 1)


@every_codec
def test_sent_and_residual_sum_to_what_was_computed_over_a_thousand_rounds(codec):
    rng, size = np.random.default_rng(3), 259
    computed, sent, residual = np.zeros(size), np.zeros(size), np.zeros(size, np.float32)
    for _ in range(1000):
        x = rng.standard_normal(size).astype(np.float32)
        wanted = x + residual
        decoded = codec.decode(codec.encode(wanted, ())[0], size)
        residual = wanted - decoded
        computed += x
        sent += decoded
    np.testing.assert_allclose(sent + residual, computed, atol=1000 * 8 * 2.0**-23)
    assert np.abs(residual).max() < 30


def test_names_are_canonical_and_wrong_arguments_are_refused():
    assert list(CODECS)[::2] == ["sign:block=512", "int2:block=64"]
    for factory, name in [(sign, "sign"), (int2, "int2")]:
        for block in (0, 4097):
            with pytest.raises(ConfigError, match=rf"{name}:block={block}: block={block} is not in 1\.\.4096"):
                factory(block)
