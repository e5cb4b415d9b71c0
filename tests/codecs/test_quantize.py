"""Laws of int8 and int4, rounded to the nearest or at random."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.codecs import quantize
from zmqtrain.codecs.quantize import int4, int4_stochastic, int8, int8_stochastic
from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta

from slabs import raw, slabs

NEAREST = [int8(), int8(7), int4(), int4(5)]
AT_RANDOM = [int8_stochastic(), int8_stochastic(7), int4_stochastic(), int4_stochastic(5)]
CODECS = {codec.name: codec for codec in [*NEAREST, *AT_RANDOM]}
MOST = {"int8": 127, "int8s": 127, "int4": 7, "int4s": 7}
SIZES = [1, 5, 600]
LARGEST = np.finfo(np.float32).max

every_codec = pytest.mark.parametrize("codec", [pytest.param(codec, id=name) for name, codec in CODECS.items()])
every_nearest = pytest.mark.parametrize("codec", [pytest.param(codec, id=codec.name) for codec in NEAREST])
every_random = pytest.mark.parametrize("codec", [pytest.param(codec, id=codec.name) for codec in AT_RANDOM])


@cache
def in_jax(name):
    """Encode each row of a stack, and decode it: one function to compile."""

    def both(x):
        buffers, _ = CODECS[name].encode(x, ())
        return buffers, CODECS[name].decode(buffers, x.shape[0])

    return jax.jit(jax.vmap(both))


def parts(codec):
    family, _, block = codec.name.partition(":block=")
    return MOST[family], int(block)


def scales_of(codec, buffers, count):
    """The scale of each value, as float64."""
    scales = (np.asarray(buffers[1]).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.repeat(scales, parts(codec)[1])[:count]


def blocks_of(codec, x):
    block = parts(codec)[1]
    return [x[start : start + block] for start in range(0, x.size, block)]


@every_codec
@pytest.mark.parametrize("size", [601])
@settings(max_examples=examples(30))
@given(data=st.data())
def test_numpy_and_jitted_jax_give_each_of_stacked_slabs_the_same_bytes_and_values(codec, size, data):
    huge, edge = np.full(size, LARGEST, np.float32), np.array([2.0**-100] + (size - 1) * [1e-40], np.float32)
    x = data.draw(slabs([size]) | st.sampled_from([huge, edge]))
    rows = np.stack([x, -x[::-1]])
    theirs, values = in_jax(codec.name)(rows)
    for row, wanted in enumerate(rows):
        ours = codec.encode(wanted, ())[0]
        assert raw(ours) == raw(buffer[row] for buffer in theirs)
        assert [(buffer.dtype, buffer.size) for buffer in ours] == list(codec.layout(x.size))
        assert raw([codec.decode(raw(ours), x.size)]) == raw([values[row]])


@every_codec
@settings(max_examples=examples(40))
@given(x=slabs(SIZES))
@example(x=np.full(300, -LARGEST, np.float32))
@example(x=np.array([1e38, -1e38, 1.0, 0.0, 1e-38], np.float32))
@example(x=np.full(129, 1e-42, np.float32))
def test_the_error_is_a_part_of_the_scale_and_the_scale_a_part_of_the_largest_value(codec, x):
    buffers, _ = codec.encode(x, ())
    codec.check(raw(buffers), x.size)
    scales, (most, block) = scales_of(codec, buffers, x.size), parts(codec)
    decoded = codec.decode(raw(buffers), x.size).astype(np.float64)
    part = 1.01 if codec in AT_RANDOM else 0.51
    largest = np.repeat([np.abs(part).max() for part in blocks_of(codec, x.astype(np.float64))], block)[: x.size]
    alive = largest >= 2.0**-100
    assert (scales[alive] <= largest[alive] / most * (1 + 1 / 127)).all() and not scales[~alive].any()
    assert (np.abs(decoded - x)[alive] < part * scales[alive]).all() and not decoded[~alive].any()
    assert (np.abs(decoded) <= LARGEST).all()
    if codec in NEAREST:
        assert (np.abs(decoded - x)[alive] <= largest[alive] / {127: 246, 7: 13.5}[most]).all()


@every_nearest
@settings(max_examples=examples(40))
@given(x=slabs(SIZES))
def test_something_is_taken_away_from_every_block_that_is_not_zero(codec, x):
    error = x.astype(np.float64) - codec.decode(codec.encode(x, ())[0], x.size)
    for before, after in zip(blocks_of(codec, x.astype(np.float64)), blocks_of(codec, error), strict=True):
        if (scale := np.abs(before).max()) >= 2.0**-100:
            assert np.linalg.norm(after / scale) < np.linalg.norm(before / scale)


@every_nearest
@settings(max_examples=examples(40))
@given(x=slabs(SIZES))
def test_few_values_are_coded_in_fewer_calls_to_the_same_bytes(codec, x):
    few = raw(codec.encode(x, ())[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "_FEW_VALUES", 0)
        assert raw(codec.encode(x, ())[0]) == few


@every_random
def test_rounding_at_random_is_right_on_average(codec):
    """The mean error of n values is that of n draws: within five of its standard deviations, for every fraction."""
    rng = np.random.default_rng(7)
    block = parts(codec)[1]
    count = 65_536 // block * block
    for fraction in (0.0, 0.02, 0.3, 0.5, 0.9):
        x = (rng.integers(-2, 2, count) + np.float32(fraction)).astype(np.float32)
        x[::block] = parts(codec)[0]
        buffers, _ = codec.encode(x, ())
        assert (scales_of(codec, buffers, count) == 1).all()
        error = np.delete(codec.decode(buffers, count) - x, np.s_[::block]).astype(np.float64)
        deviation = np.sqrt(fraction * (1 - fraction) / error.size)
        assert abs(error.mean()) <= 5 * deviation
        assert set(np.unique(np.round(error, 3))) <= {round(1 - fraction, 3), round(-fraction, 3), 0.0}
    x = rng.standard_normal(count).astype(np.float32)
    buffers, _ = codec.encode(x, ())
    relative = (codec.decode(buffers, count) - x) / scales_of(codec, buffers, count)
    assert abs(relative.mean()) < 5 * 0.5 / np.sqrt(count)
    assert abs(np.corrcoef(relative[:-1], relative[1:])[0, 1]) < 5 / np.sqrt(count)


@every_random
@pytest.mark.parametrize("fraction", [0.02, 0.25, 0.5])
def test_rounding_at_random_takes_away_more_than_it_adds_even_where_it_adds_most(codec, fraction):
    """A quarter of a step gains the most, and its block has but one value that is sure to lose some."""
    most, block = parts(codec)
    x = np.full(65_536 // block * block, fraction, np.float32)
    x[::block] = most
    error = codec.decode(codec.encode(x, ())[0], x.size).astype(np.float64) - x
    assert (np.abs(error) < 1.01).all()
    assert (error**2).sum() < (x.astype(np.float64) ** 2).sum()


@every_random
def test_what_is_equal_at_two_places_is_rounded_by_two_draws_and_the_same_draw_every_time(codec):
    x = np.full(600, 0.5, np.float32)
    x[:: parts(codec)[1]] = parts(codec)[0]
    decoded = codec.decode(codec.encode(x, ())[0], 600)
    assert {0.0, 1.0} <= set(decoded.tolist())
    assert raw(codec.encode(x, ())[0]) == raw(codec.encode(x.copy(), ())[0])


def test_int4_stores_the_code_of_value_i_and_of_value_i_plus_half_in_one_byte():
    packed, scales = int4().encode(np.array([7, -7, 3, 0, -1], np.float32), ())[0]
    assert packed.tolist() == [15 | 8 << 4, 1 | 7 << 4, 11 | 8 << 4]
    assert scales.tolist() == [0x3F80]


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
    lies += [[*good[:i], other, *good[i + 1 :]] for i in (0, 1) for other in (good[i][:-1], good[i] + b"\0", b"")]
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
        (int8(), 0, b"\x80"),
        (int8(), 1, b"\x7f\x7f"),
        (int8(), 1, b"\x80\xbf"),
        (int8(), 1, b"\x01\x00"),
        (int4(), 0, b"\x80"),
        (int4(), 0, b"\x08"),
        (int4(), 0, b"\x98"),
        (int4(), 1, b"\x93\x7e"),
        (int4(), 1, b"\x01\x80"),
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
    assert np.abs(residual).max() < 2


def test_names_are_canonical_and_wrong_arguments_are_refused():
    assert list(CODECS)[::2] == ["int8:block=256", "int4:block=128", "int8s:block=256", "int4s:block=128"]
    for factory, name in [(int8, "int8"), (int8_stochastic, "int8s"), (int4, "int4"), (int4_stochastic, "int4s")]:
        for block in (0, 4097):
            with pytest.raises(ConfigError, match=rf"{name}:block={block}: block={block} is not in 1\.\.4096"):
                factory(block)
