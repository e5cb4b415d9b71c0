"""Laws that every codec of the family keeps, alone or in a chain; what a member promises besides is in its own tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zmqtrain.codecs.base import CODECS, STAGES, WRAPPERS, codec_from_spec
from zmqtrain.errors import CodecError, ConfigError, NonFiniteDelta

DENSE = ["float32", "bf16", "int8", "int8:block=7", "int8s", "int4", "int4:block=9", "int4s", "int2", "int2:block=5"]
DENSE += ["ternary", "ternary:block=5", "ternary:block=300", "sign", "sign:block=33"]
SPARSE = ["topk:density=0.05+float32", "topk:density=0.01+int8", "topk:density=0.1+int4", "topk:density=0.4+int2"]
SPARSE += ["topk:density=0.05+sign", "blocktopk:keep=2+bf16", "blocktopk:keep=7+int4", "randomk:density=0.1+int8"]
TURNED = ["dct+int8", "dct:block=16+ternary", "dct+topk:density=0.1+int8", "lowrank:rank=2", "lowrank:rank=4,width=16"]
WITH_STATE = [
    "feedback+ternary",
    "feedback:decay=0.875+dct+topk:density=0.1+int4",
    "momentum:factor=0.5+topk:density=0.1+int8",
]
WITH_STATE += ["ternary:block=128,fragments=4", "feedback+int8:fragments=3"]
SPECS = [*DENSE, *SPARSE, *TURNED, *WITH_STATE]
SIZES = [1, 5, 7, 128, 129, 257, 600]
LARGEST = np.finfo(np.float32).max

every_codec = pytest.mark.parametrize("spec", SPECS)


@cache
def jitted_encode(spec):
    return jax.jit(codec_from_spec(spec).encode)


@cache
def jitted_decode(spec, count):
    return jax.jit(lambda buffers: codec_from_spec(spec).decode(buffers, count))


def encode(spec, x):
    codec = codec_from_spec(spec)
    return codec, codec.encode(x, codec.init(x.size))[0]


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
@settings(max_examples=25, deadline=None)
@given(x=slabs())
@example(x=np.full(257, LARGEST, np.float32))
@example(x=np.array([2.0**-100] + 128 * [1e-40], np.float32))
def test_numpy_and_jitted_jax_give_the_same_bytes_states_and_values(spec, x):
    codec = codec_from_spec(spec)
    state = codec.init(x.size)
    for _ in range(2):
        ours, after = codec.encode(x, state)
        theirs, their_state = jitted_encode(spec)(x, state)
        assert raw(ours) == raw(theirs)
        assert [buffer.dtype for buffer in ours] == [buffer.dtype for buffer in theirs]
        assert raw(jax.tree.leaves(after)) == raw(jax.tree.leaves(their_state))
        assert raw([codec.decode(ours, x.size)]) == raw([jitted_decode(spec, x.size)(theirs)])
        state = after


@every_codec
def test_slabs_stacked_under_vmap_are_encoded_as_each_alone(spec):
    codec = codec_from_spec(spec)
    rows = np.random.default_rng(2).standard_normal((3, 600)).astype(np.float32)
    states = jax.tree.map(lambda leaf: np.stack([leaf] * 3), codec.init(600))
    buffers, _ = jax.jit(jax.vmap(codec.encode))(rows, states)
    values = jax.jit(jax.vmap(lambda buffers: codec.decode(buffers, 600)))(buffers)
    for row, x in enumerate(rows):
        _, alone = encode(spec, x)
        assert raw(alone) == raw([buffer[row] for buffer in buffers])
        assert raw([codec.decode(alone, 600)]) == raw([values[row]])


@every_codec
@settings(max_examples=30, deadline=None)
@given(x=slabs())
@example(x=np.full(300, -LARGEST, np.float32))
@example(x=np.array([1e38, -1e38, 1.0, 0.0, 1e-38], np.float32))
@example(x=np.full(129, 1e-42, np.float32))
def test_buffers_are_as_laid_out_pass_the_check_and_decode_to_finite_values_no_larger_than_sent(spec, x):
    codec, buffers = encode(spec, x)
    assert [(buffer.dtype, buffer.size) for buffer in buffers] == [(np.dtype(d), n) for d, n in codec.layout(x.size)]
    codec.check(raw(buffers), x.size)
    decoded = codec.decode(raw(buffers), x.size)
    assert decoded.dtype == np.float32 and decoded.shape == x.shape and np.isfinite(decoded).all()
    scale = np.abs(x).max() if np.abs(x).max() else np.float32(1)
    assert np.abs(decoded.astype(np.float64) / scale).max() <= 8.2 if "dct" in spec or "lowrank" in spec else 1.01


@every_codec
@settings(max_examples=30, deadline=None)
@given(x=slabs())
def test_a_codec_never_takes_away_more_than_there_is(spec, x):
    """The error is no larger than the values: what error feedback, and a residual in the model, live by."""
    codec, buffers = encode(spec, x)
    scale = np.abs(x).max() if np.abs(x).max() else np.float32(1)
    x, decoded = x.astype(np.float64) / scale, codec.decode(buffers, x.size).astype(np.float64) / scale
    most = 1.0001 if "int4s" in spec or "int8s" in spec or "dct" in spec else 1.000001
    assert np.linalg.norm(x - decoded) <= most * np.linalg.norm(x)


@every_codec
@given(x=slabs(), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_decode_into_adds_or_replaces_just_what_decode_returns(spec, x, seed):
    codec, buffers = encode(spec, x)
    decoded = codec.decode(buffers, x.size)
    before = np.random.default_rng(seed).standard_normal(x.size).astype(np.float32)
    replaced, added = before.copy(), before.copy()
    codec.decode_into(raw(buffers), replaced, False)
    codec.decode_into(raw(buffers), added, True)
    assert raw([replaced]) == raw([decoded])
    assert raw([added]) == raw([before + decoded])


@every_codec
def test_zeros_are_sent_as_zeros(spec):
    for size in SIZES:
        codec, buffers = encode(spec, np.zeros(size, np.float32))
        codec.check(buffers, size)
        assert not codec.decode(buffers, size).any()


@pytest.mark.parametrize("spec", DENSE[2:])
def test_a_block_under_the_smallest_magnitude_becomes_zero(spec):
    for value in (1e-45, 2.0**-126, 1.999 * 2.0**-101):
        codec, buffers = encode(spec, np.full(33, value, np.float32))
        assert not codec.decode(buffers, 33).any()
    codec, buffers = encode(spec, np.full(33, 2.0**-100, np.float32))
    assert codec.decode(buffers, 33).all()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_delta_that_is_not_finite_is_refused_wherever_it_is(spec, bad):
    for position in (0, 299, 300, 601):
        x = np.ones(602, np.float32)
        x[position] = bad
        with pytest.raises(NonFiniteDelta):
            encode(spec, x)


@every_codec
@pytest.mark.parametrize(
    "wrong", [np.ones(5, np.int32), np.ones(5, np.float64), np.ones((2, 3), np.float32), np.ones(0, np.float32), [1.0]]
)
def test_only_flat_float32_is_encoded(spec, wrong):
    with pytest.raises(CodecError, match=r"float32\[n\]"):
        codec_from_spec(spec).encode(wrong, codec_from_spec(spec).init(5))


@every_codec
def test_a_strided_view_is_encoded_like_its_copy(spec):
    x = np.random.default_rng(0).standard_normal(1400).astype(np.float32)[::2]
    assert raw(encode(spec, x)[1]) == raw(encode(spec, x.copy())[1])


@every_codec
def test_a_whole_slab_is_encoded_alike_too(spec):
    codec = codec_from_spec(spec)
    x = np.random.default_rng(1).standard_normal(65_536).astype(np.float32)
    buffers, _ = codec.encode(x, codec.init(x.size))
    assert raw(buffers) == raw(jitted_encode(spec)(x, codec.init(x.size))[0])
    codec.check(buffers, x.size)
    decoded, total = codec.decode(buffers, x.size), np.zeros_like(x)
    assert raw([decoded]) == raw([jitted_decode(spec, x.size)(buffers)])
    codec.decode_into(buffers, total, True)
    np.testing.assert_array_equal(total, decoded)


@every_codec
def test_buffers_of_wrong_number_or_length_are_refused_and_nothing_is_written(spec):
    codec, buffers = encode(spec, np.ones(300, np.float32))
    good = raw(buffers)
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
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_check_lets_through_decodes_to_finite_values(spec, data):
    size = data.draw(st.sampled_from([1, 5, 12, 300]))
    codec, buffers = encode(spec, np.full(size, LARGEST, np.float32))
    good = raw(buffers)
    lie = [data.draw(st.binary(min_size=len(buffer), max_size=len(buffer)) | st.just(buffer)) for buffer in good]
    try:
        codec.check(lie, size)
    except CodecError:
        return
    out = np.zeros(size + 2, np.float32)
    codec.decode_into(lie, out[1:-1], False)
    assert np.isfinite(out).all() and out[0] == out[-1] == 0


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
    codec, buffers = encode(spec, np.ones(1, np.float32))
    buffers = raw(buffers)
    codec.check(buffers, 1)
    buffers[position] = content.tobytes()
    with pytest.raises(CodecError, match=spec):
        codec.check(buffers, 1)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith(tuple(WRAPPERS))])
def test_sent_and_residual_sum_to_what_was_computed_over_1000_rounds(spec):
    """The equation of a node that publishes and keeps the rest: nothing is lost, and the residual stays bounded."""
    codec, rng, size = codec_from_spec(spec), np.random.default_rng(3), 515
    computed, sent, residual, state = np.zeros(size), np.zeros(size), np.zeros(size, np.float32), codec.init(size)
    largest = 0.0
    for _ in range(1000):
        x = rng.standard_normal(size).astype(np.float32)
        wanted = x + residual
        buffers, state = codec.encode(wanted, state)
        decoded = codec.decode(buffers, size)
        residual = wanted - decoded
        computed += x
        sent += decoded
        largest = max(largest, float(np.abs(residual).max()))
    np.testing.assert_allclose(sent + residual, computed, atol=1000 * max(8.0, largest) * 2.0**-23)
    assert np.linalg.norm(residual) < 60 * np.sqrt(size)


def test_ternary_of_gaussian_values_is_near_the_optimum():
    x = np.random.default_rng(5).standard_normal(128 * 512).astype(np.float32)
    codec, buffers = encode("ternary", x)
    error = x - codec.decode(buffers, x.size)
    assert np.linalg.norm(error) < 0.44 * np.linalg.norm(x)


def test_many_threads_encode_and_decode_at_once_without_disturbing_each_other():
    slab = np.random.default_rng(6).standard_normal((8, 65_536)).astype(np.float32)

    def both(spec, row):
        codec = codec_from_spec(spec)
        buffers, _ = codec.encode(slab[row], codec.init(65_536))
        total = np.zeros(65_536, np.float32)
        codec.decode_into(buffers, total, True)
        return raw([*buffers, total])

    specs = ("bf16", "int8", "int4", "int2", "ternary", "sign", "topk:density=0.01+int8", "dct+blocktopk+int4")
    work = [(spec, row) for spec in specs for row in range(8)]
    alone = [both(*item) for item in work]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda item: both(*item), work)) == alone


def test_names_are_canonical_and_name_the_same_codec():
    assert codec_from_spec("ternary").name == "ternary:block=128"
    assert codec_from_spec("int8").name == "int8:block=256"
    assert codec_from_spec("ternary:fragments=8").name == "ternary:block=128,fragments=8"
    for spec in [*SPECS, *CODECS]:
        codec = codec_from_spec(spec)
        assert codec_from_spec(codec.name) is codec


def test_every_member_of_the_family_is_held_to_these_laws():
    names = {member.partition(":")[0] for spec in SPECS for member in spec.split("+")}
    assert names == {*CODECS, *STAGES, *WRAPPERS}


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("float64", "ternary:block=128"),
        ("", "float32, bf16"),
        ("topk:density=0.01", r"stands before a codec: say for instance 'topk:density=0.01\+int8'"),
        ("int8+ternary", "'int8' is a codec, and stands last"),
        ("topq+int8", "no 'topq'; choose one of topk"),
        ("topk:density=2+int8", "density=2"),
        ("dct+feedback+int8", "stands before stages"),
        ("+".join(["dct"] * 9 + ["int8"]), "at most 8"),
        ("ternary:fragments=0", "fragments=0"),
        ("ternary:", "ternary takes block=128"),
        ("ternary:blok=128", "'blok=128'"),
        ("ternary:block=0", "block=0 is not in 1..4096"),
        ("int8:block=5000", r"1\.\.4096"),
        ("int8:block=" + 400 * "9", "is not in 1..4096"),
        ("int8:block=1.5", "'1.5' in 'block=1.5' is not a whole number"),
        ("int8:block=64,block=64", "block is given twice"),
        ("float32:block=2", "float32 takes fragments=1"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_place_and_the_choices(spec, place):
    with pytest.raises(ConfigError, match=place):
        codec_from_spec(spec)
