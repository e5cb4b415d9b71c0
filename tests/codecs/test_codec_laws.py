"""Laws that every codec of the family keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zmqtrain.codecs.base import FAMILIES, codec_from_spec
from zmqtrain.errors import CodecError, ConfigError, NonFiniteDelta

MEMBERS = ["float32", "bf16", "int8:block=256", "ternary:block=128"]
SPECS = [*MEMBERS, "int8:block=7", "ternary:block=5", "ternary:block=300"]
SIZES = [1, 5, 7, 128, 129, 257, 600]
LARGEST = np.finfo(np.float32).max

every_codec = pytest.mark.parametrize("spec", SPECS)


@cache
def jitted_encode(spec):
    return jax.jit(lambda x: codec_from_spec(spec).encode(x, ())[0])


@cache
def jitted_decode(spec, count):
    return jax.jit(lambda buffers: codec_from_spec(spec).decode(buffers, count))


def error_bound(spec, x):
    """The largest error that the docstrings allow, value by value."""
    name = spec.partition(":")[0]
    if name == "float32":
        return np.zeros(x.size)
    if name == "bf16":
        return np.abs(x.astype(np.float64)) * 2.0**-8 + 2.0**-134
    block = int(spec.partition("=")[2])
    largest = np.array([np.abs(x[i : i + block].astype(np.float64)).max() for i in range(0, x.size, block)])
    part = {"int8": 1 / 246, "ternary": 1.01}[name]
    return np.repeat(np.where(largest < 2.0**-100, 1.0, part) * largest, block)[: x.size]


def raw(buffers):
    return [np.asarray(buffer).tobytes() for buffer in buffers]


@st.composite
def slabs(draw):
    """Slabs of every nature: normal values, lone giants, denormals, signed zeros, anything finite in float32."""
    size = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "bits", "sparse", "levels", "denormal", "edges"]))
    if kind == "bits":
        x = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
        x = np.where(np.isfinite(x), x, np.float32(-0.0))
    elif kind == "levels":
        x = rng.integers(-3, 4, size).astype(np.float32)
    elif kind == "denormal":
        x = rng.integers(0, 2**23, size, dtype=np.uint32).view(np.float32) * np.float32(rng.choice([-1, 1]))
    elif kind == "edges":
        x = rng.choice(np.array([2.0**-100, 2.0**-101, 1.99 * 2.0**-101, 1e-45, -0.0, 2.0**-126], np.float32), size)
    else:
        x = rng.standard_normal(size).astype(np.float32)
        x[rng.random(size) < 0.5 * (kind == "sparse")] = 0
        x[rng.integers(size)] *= np.float32(2.0 ** draw(st.integers(-20, 20)))
        x *= np.float32(2.0 ** draw(st.integers(-95, 95)))
    return x


@every_codec
@settings(max_examples=60, deadline=None)
@given(x=slabs())
@example(x=np.full(257, LARGEST, np.float32))
@example(x=np.array([2.0**-100] + 128 * [1e-40], np.float32))
def test_numpy_and_jitted_jax_give_the_same_bytes_and_values(spec, x):
    codec = codec_from_spec(spec)
    ours, state = codec.encode(x, codec.init(x.size))
    theirs = jitted_encode(spec)(x)
    assert state == ()
    assert raw(ours) == raw(theirs)
    assert [buffer.dtype for buffer in ours] == [buffer.dtype for buffer in theirs]
    assert raw([codec.decode(ours, x.size)]) == raw([jitted_decode(spec, x.size)(theirs)])


@every_codec
@settings(max_examples=60, deadline=None)
@given(x=slabs())
@example(x=np.full(300, -LARGEST, np.float32))
@example(x=np.array([1e38, -1e38, 1.0, 0.0, 1e-38], np.float32))
@example(x=np.full(129, 1e-42, np.float32))
def test_the_error_stays_within_the_stated_bound_and_the_buffers_within_theirs(spec, x):
    codec = codec_from_spec(spec)
    buffers, _ = codec.encode(x, ())
    codec.check(raw(buffers), x.size)
    decoded = codec.decode(raw(buffers), x.size)
    assert decoded.dtype == np.float32 and np.isfinite(decoded).all()
    assert (np.abs(decoded.astype(np.float64) - x) <= error_bound(spec, x)).all()
    assert sum(map(len, raw(buffers))) <= codec.size_bound(x.size)


@every_codec
@given(x=slabs(), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_decode_into_adds_or_replaces_just_what_decode_returns(spec, x, seed):
    codec = codec_from_spec(spec)
    buffers, _ = codec.encode(x, ())
    decoded = codec.decode(buffers, x.size)
    before = np.random.default_rng(seed).standard_normal(x.size).astype(np.float32)
    replaced, added = before.copy(), before.copy()
    codec.decode_into(raw(buffers), replaced, False)
    codec.decode_into(raw(buffers), added, True)
    assert raw([replaced]) == raw([decoded])
    assert raw([added]) == raw([before + decoded])


@every_codec
def test_zeros_are_sent_as_zeros(spec):
    codec = codec_from_spec(spec)
    for size in SIZES:
        buffers, _ = codec.encode(np.zeros(size, np.float32), ())
        codec.check(buffers, size)
        assert not codec.decode(buffers, size).any()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if ":" in spec])
def test_a_block_under_the_smallest_magnitude_becomes_zero(spec):
    codec = codec_from_spec(spec)
    for value in (1e-45, 2.0**-126, 1.999 * 2.0**-101):
        buffers, _ = codec.encode(np.full(33, value, np.float32), ())
        assert not codec.decode(buffers, 33).any()
    buffers, _ = codec.encode(np.full(33, 2.0**-100, np.float32), ())
    assert codec.decode(buffers, 33).all()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_delta_that_is_not_finite_is_refused_wherever_it_is(spec, bad):
    for position in (0, 299, 300, 601):
        x = np.ones(602, np.float32)
        x[position] = bad
        with pytest.raises(NonFiniteDelta, match="602 values"):
            codec_from_spec(spec).encode(x, ())


@every_codec
@pytest.mark.parametrize(
    "wrong", [np.ones(5, np.int32), np.ones(5, np.float64), np.ones((2, 3), np.float32), np.ones(0, np.float32), [1.0]]
)
def test_only_flat_float32_is_encoded(spec, wrong):
    with pytest.raises(CodecError, match=r"float32\[n\]"):
        codec_from_spec(spec).encode(wrong, ())


@every_codec
def test_a_strided_view_is_encoded_like_its_copy(spec):
    x = np.random.default_rng(0).standard_normal(1400).astype(np.float32)[::2]
    codec = codec_from_spec(spec)
    assert raw(codec.encode(x, ())[0]) == raw(codec.encode(x.copy(), ())[0])


@every_codec
def test_a_slab_longer_than_a_piece_is_encoded_like_its_blocks(spec):
    codec = codec_from_spec(spec)
    x = np.random.default_rng(1).standard_normal(150_001).astype(np.float32)
    buffers, _ = codec.encode(x, ())
    assert raw(buffers) == raw(jitted_encode(spec)(x))
    codec.check(buffers, x.size)
    decoded, total = codec.decode(buffers, x.size), np.zeros_like(x)
    assert raw([decoded]) == raw([jitted_decode(spec, x.size)(buffers)])
    codec.decode_into(buffers, total, True)
    np.testing.assert_array_equal(total, decoded)


@every_codec
def test_buffers_of_wrong_number_or_length_are_refused_and_nothing_is_written(spec):
    codec = codec_from_spec(spec)
    good = raw(codec.encode(np.ones(300, np.float32), ())[0])
    lies = [good[:-1], [*good, b""], []]
    for position, buffer in enumerate(good):
        for other in (buffer[:-1], buffer + b"\0", b""):
            lies.append([*good[:position], other, *good[position + 1 :]])
    for lie in lies:
        out = np.full(300, 7, np.float32)
        with pytest.raises(CodecError):
            codec.check(lie, 300)
        with pytest.raises(CodecError):
            codec.decode(lie, 300)
        with pytest.raises(CodecError):
            codec.decode_into(lie, out, True)
        assert (out == 7).all()


@every_codec
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_check_lets_through_decodes_to_finite_values(spec, data):
    codec = codec_from_spec(spec)
    size = data.draw(st.sampled_from([1, 5, 12]))
    good = raw(codec.encode(np.full(size, LARGEST, np.float32), ())[0])
    lie = [data.draw(st.binary(min_size=len(buffer), max_size=len(buffer)) | st.just(buffer)) for buffer in good]
    try:
        codec.check(lie, size)
    except CodecError:
        return
    assert np.isfinite(codec.decode(lie, size)).all()


@pytest.mark.parametrize(
    ("spec", "position", "content"),
    [
        ("float32", 0, np.array([np.nan], "<f4")),
        ("bf16", 0, np.array([0x7F80], "<u2")),
        ("bf16", 0, np.array([0xFFC0], "<u2")),
        ("int8", 0, np.array([-128], "i1")),
        ("int8", 1, np.array([0x7F7F], "<u2")),
        ("int8", 1, np.array([0xBF80], "<u2")),
        ("int8", 1, np.array([1], "<u2")),
        ("ternary", 0, np.array([243], "u1")),
        ("ternary", 1, np.array([0x7F80], "<u2")),
        ("ternary", 1, np.array([0x8000], "<u2")),
        ("ternary", 1, np.array([1], "<u2")),
    ],
)
def test_a_code_or_scale_that_no_encoder_makes_is_refused(spec, position, content):
    codec = codec_from_spec(spec)
    buffers = raw(codec.encode(np.ones(1, np.float32), ())[0])
    codec.check(buffers, 1)
    buffers[position] = content.tobytes()
    with pytest.raises(CodecError, match=spec):
        codec.check(buffers, 1)


@every_codec
def test_sent_and_residual_sum_to_what_was_computed(spec):
    """Error feedback over 200 rounds: nothing is lost, and for codecs that shrink the residual stays bounded."""
    codec, rng = codec_from_spec(spec), np.random.default_rng(3)
    size = 515
    computed, sent, residual = np.zeros(size), np.zeros(size), np.zeros(size, np.float32)
    for _ in range(200):
        x = rng.standard_normal(size).astype(np.float32)
        wanted = x + residual
        buffers, _ = codec.encode(wanted, ())
        decoded = codec.decode(buffers, size)
        residual = wanted - decoded
        computed += x
        sent += decoded
    np.testing.assert_allclose(sent + residual, computed, atol=200 * 8 * 2.0**-23)
    assert np.abs(residual).max() < 20


@pytest.mark.parametrize("spec", ["ternary:block=128", "ternary:block=5", "int8:block=256"])
@settings(max_examples=60, deadline=None)
@given(x=slabs())
def test_a_codec_takes_something_away_from_every_block_that_is_not_zero(spec, x):
    codec = codec_from_spec(spec)
    x = x.astype(np.float64)
    error = x - codec.decode(codec.encode(x.astype(np.float32), ())[0], x.size)
    block = int(spec.partition("=")[2])
    for start in range(0, x.size, block):
        part = slice(start, start + block)
        if np.abs(x[part]).max() >= 2.0**-100:
            scale = np.abs(x[part]).max()
            assert np.linalg.norm(error[part] / scale) < np.linalg.norm(x[part] / scale)


def test_ternary_of_gaussian_values_is_near_the_optimum():
    x = np.random.default_rng(5).standard_normal(128 * 512).astype(np.float32)
    codec = codec_from_spec("ternary")
    error = x - codec.decode(codec.encode(x, ())[0], x.size)
    assert np.linalg.norm(error) < 0.44 * np.linalg.norm(x)


def test_many_threads_encode_and_decode_at_once_without_disturbing_each_other():
    slab = np.random.default_rng(6).standard_normal((16, 65_536)).astype(np.float32)

    def both(spec, row):
        codec = codec_from_spec(spec)
        buffers, _ = codec.encode(slab[row], ())
        total = np.zeros(65_536, np.float32)
        codec.decode_into(buffers, total, True)
        return raw([*buffers, total])

    work = [(spec, row) for spec in ("bf16", "int8", "ternary") for row in range(16)]
    alone = [both(*item) for item in work]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda item: both(*item), work)) == alone


def test_names_are_canonical_and_name_the_same_codec():
    assert codec_from_spec("ternary").name == "ternary:block=128"
    assert codec_from_spec("int8").name == "int8:block=256"
    for spec in [*SPECS, *FAMILIES]:
        codec = codec_from_spec(spec)
        assert codec_from_spec(codec.name) == codec


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("float64", "ternary:block=128"),
        ("", "float32, bf16"),
        ("ternary:", "ternary takes block=128"),
        ("ternary:blok=128", "'blok=128'"),
        ("ternary:block=0", "block=0 is not in 1..4096"),
        ("int8:block=5000", r"1\.\.4096"),
        ("int8:block=" + 400 * "9", "is not in 1..4096"),
        ("int8:block=1.5", "'1.5' in 'block=1.5' is not a whole number"),
        ("int8:block=64,block=64", "block is given twice"),
        ("float32:block=2", "float32 takes no arguments"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_place_and_the_choices(spec, place):
    with pytest.raises(ConfigError, match=place):
        codec_from_spec(spec)
