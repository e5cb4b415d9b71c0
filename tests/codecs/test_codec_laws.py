"""Laws that every codec of the family keeps, alone or in a chain; what a member promises besides is in its own tests.

What compiles, or takes many rounds, is here only for the members and the chains that have no such law of their own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.codecs.base import CODECS, TRANSFORMS, WRAPPERS, codec_from_spec
from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta

from slabs import SIZES, raw, slabs

ALONE = ["float32", "bf16", "ternary", "ternary:block=5", "ternary:block=300"]
DENSE = [*ALONE, "int8", "int8:block=7", "int8s", "int4", "int4:block=9", "int4s", "int2", "int2:block=5"]
DENSE += ["sign", "sign:block=33"]
SPARSE = ["topk:density=0.05+float32", "topk:density=0.01+int8", "topk:density=0.1+int4", "topk:density=0.4+int2"]
SPARSE += ["topk:density=0.05+sign", "blocktopk:keep=2+bf16", "blocktopk:keep=7+int4", "randomk:density=0.1+int8"]
TURNED = ["dct+int8", "dct:block=16+ternary", "dct+topk:density=0.1+int8", "lowrank:rank=2", "lowrank:rank=4,width=16"]
WITH_STATE = [
    "feedback+ternary",
    "feedback:decay=0.875+dct+topk:density=0.1+int4",
    "momentum:factor=0.5+blocktopk:keep=4+int8",
]
WITH_STATE += ["ternary:block=128,fragments=4", "feedback+int8:fragments=3"]
SPECS = [*DENSE, *SPARSE, *TURNED, *WITH_STATE]
COMPILED = [*ALONE, "blocktopk:keep=7+int4", "dct:block=16+ternary", *WITH_STATE]
COMPILED_WHOLE = ["bf16", "ternary:block=300", "dct+blocktopk+int4"]
MANY_ROUNDS = [*ALONE, *SPARSE, *TURNED[:3], "ternary:block=128,fragments=4"]
LARGEST = np.finfo(np.float32).max
LEAST_BF16 = 2.0**-133

every_codec = pytest.mark.parametrize("spec", SPECS)


@cache
def in_jax(spec):
    """Encode each row of a stack, and decode it: one function to compile."""
    codec = codec_from_spec(spec)

    def both(x, state):
        buffers, state = codec.encode(x, state)
        return buffers, state, codec.decode(buffers, x.shape[0])

    return jax.jit(jax.vmap(both))


def encode(spec, x):
    codec = codec_from_spec(spec)
    return codec, codec.encode(x, codec.init(x.size))[0]


def row_of(tree, row):
    return raw(leaf[row] for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("spec", "size"), [*((spec, 601) for spec in COMPILED), ("ternary:block=5", 7), ("ternary", 1)]
)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_numpy_and_jitted_jax_give_each_of_stacked_slabs_the_same_bytes_states_and_values(spec, size, data):
    huge, edge = np.full(size, LARGEST, np.float32), np.array([2.0**-100] + (size - 1) * [1e-40], np.float32)
    codec, x = codec_from_spec(spec), data.draw(slabs([size]) | st.sampled_from([huge, edge]))
    rows, states = np.stack([x, -x[::-1]]), [codec.init(size), codec.init(size)]
    their_states = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    for _ in range(2):
        theirs, their_states, values = in_jax(spec)(rows, their_states)
        for row, wanted in enumerate(rows):
            ours, states[row] = codec.encode(wanted, states[row])
            assert [buffer.dtype for buffer in ours] == [buffer.dtype for buffer in theirs]
            assert raw(ours) == row_of(theirs, row)
            assert raw(jax.tree.leaves(states[row])) == row_of(their_states, row)
            assert raw([codec.decode(ours, size)]) == raw([values[row]])
        rows = rows[::-1]


@pytest.mark.parametrize("spec", COMPILED_WHOLE)
def test_a_whole_slab_is_encoded_alike_too(spec):
    codec, x = codec_from_spec(spec), np.random.default_rng(1).standard_normal(65_536).astype(np.float32)
    state = jax.tree.map(lambda leaf: leaf[None], codec.init(x.size))
    theirs, _, values = in_jax(spec)(x[None], state)
    ours, _ = codec.encode(x, codec.init(x.size))
    assert raw(ours) == row_of(theirs, 0)
    assert raw([codec.decode(ours, x.size)]) == raw([values[0]])


@every_codec
@settings(max_examples=examples(20))
@given(x=slabs())
@example(x=np.full(300, -LARGEST, np.float32))
@example(x=np.array([1e38, -1e38, 1.0, 0.0, 1e-38], np.float32))
@example(x=np.full(129, 1e-42, np.float32))
def test_buffers_are_as_laid_out_pass_the_check_and_decode_to_finite_values(spec, x):
    codec, buffers = encode(spec, x)
    assert [(buffer.dtype, buffer.size) for buffer in buffers] == [(np.dtype(d), n) for d, n in codec.layout(x.size)]
    codec.check(raw(buffers), x.size)
    decoded = codec.decode(raw(buffers), x.size)
    assert decoded.dtype == np.float32 and decoded.shape == x.shape and np.isfinite(decoded).all()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "dct" not in spec and "lowrank" not in spec])
@settings(max_examples=examples(20))
@given(x=slabs())
@example(x=np.full(300, -LARGEST, np.float32))
@example(x=np.full(129, 1e-42, np.float32))
def test_no_value_comes_out_larger_than_the_largest_that_went_in(spec, x):
    """But for the rounding of a scale; where a slab is turned, a sum of values comes out."""
    codec, buffers = encode(spec, x)
    largest = np.abs(codec.decode(buffers, x.size).astype(np.float64)).max()
    assert largest <= 1.01 * np.abs(x.astype(np.float64)).max() + LEAST_BF16


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in ("int8s", "int4s")])
@settings(max_examples=examples(20))
@given(x=slabs())
@example(x=np.full(300, -LARGEST, np.float32))
@example(x=np.full(129, 1e-42, np.float32))
def test_a_codec_never_takes_away_more_than_there_is(spec, x):
    """The error is no larger than the values: what error feedback, and a residual in the model, live by.

    What is rounded at random keeps this on average only. The cosines' own error, under 0.9 %, comes on top of what is
    left out: it goes down with what is left, round by round.
    """
    codec, buffers = encode(spec, x)
    scale = np.float64(np.abs(x).max() or 1)
    x, decoded = x.astype(np.float64) / scale, codec.decode(buffers, x.size).astype(np.float64) / scale
    assert np.linalg.norm(x - decoded) <= (1.02 if "dct" in spec else 1.000001) * np.linalg.norm(x)


@every_codec
@given(x=slabs(), seed=st.integers(0, 99))
@settings(max_examples=examples(15))
@example(x=np.random.default_rng(1).standard_normal(65_536).astype(np.float32), seed=0)
def test_decode_into_adds_or_replaces_just_what_decode_returns(spec, x, seed):
    codec, buffers = encode(spec, x)
    codec.check(buffers, x.size)
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


@pytest.mark.parametrize("spec", [spec for spec in DENSE if spec not in ("float32", "bf16")])
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
@settings(max_examples=examples(50))
@given(size=st.sampled_from([1, 5, 12, 300]), seed=st.integers(0, 2**32), honest=st.lists(st.booleans(), min_size=5))
def test_what_check_lets_through_decodes_to_finite_values_and_writes_nowhere_else(spec, size, seed, honest):
    codec, buffers = encode(spec, np.full(size, LARGEST, np.float32))
    rng = np.random.default_rng(seed)
    lie = [good if keep else rng.bytes(len(good)) for good, keep in zip(raw(buffers), honest, strict=False)]
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


@pytest.mark.parametrize("spec", MANY_ROUNDS)
def test_sent_and_residual_sum_to_what_was_computed_over_a_thousand_rounds(spec):
    """The equation of a node that publishes and keeps the rest: nothing is lost, and the residual stays bounded."""
    codec, rng, size = codec_from_spec(spec), np.random.default_rng(3), 259
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
        largest = max(largest, float(np.abs(wanted).max()))
    np.testing.assert_allclose(sent + residual, computed, atol=1000 * max(8.0, largest) * 2.0**-24)
    assert largest < 60


@pytest.mark.parametrize("spec", [spec for spec in ALONE if spec.startswith("ternary")])
@settings(max_examples=examples(60))
@given(x=slabs())
@example(x=np.full(600, -LARGEST, np.float32))
@example(x=np.array([1.0] + 299 * [2.0**-9], np.float32))
def test_ternary_takes_something_away_from_every_block_and_is_off_by_no_more_than_it_states(spec, x):
    codec, buffers = encode(spec, x)
    block = int(codec.name.partition("=")[2])
    error = x.astype(np.float64) - codec.decode(buffers, x.size)
    for start in range(0, x.size, block):
        before, after = x[start : start + block].astype(np.float64), error[start : start + block]
        largest = np.abs(before).max()
        assert np.abs(after).max() <= 1.01 * largest
        assert largest < 2.0**-100 or np.linalg.norm(after / largest) < np.linalg.norm(before / largest)


def test_ternary_of_gaussian_values_is_near_the_optimum():
    x = np.random.default_rng(5).standard_normal(128 * 512).astype(np.float32)
    codec, buffers = encode("ternary", x)
    error = x - codec.decode(buffers, x.size)
    assert np.linalg.norm(error) < 0.44 * np.linalg.norm(x)


def test_many_threads_encode_and_decode_at_once_without_disturbing_each_other():
    slab = np.random.default_rng(6).standard_normal((4, 65_536)).astype(np.float32)

    def both(spec, row):
        codec = codec_from_spec(spec)
        buffers, _ = codec.encode(slab[row], codec.init(65_536))
        total = np.zeros(65_536, np.float32)
        codec.decode_into(buffers, total, True)
        return raw([*buffers, total])

    specs = ("bf16", "int8", "int4", "int2", "ternary", "sign", "topk:density=0.01+int8", "dct+blocktopk+int4")
    work = [(spec, row) for spec in specs for row in range(4)]
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
    assert names == {*CODECS, *TRANSFORMS, *WRAPPERS}


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("float64", "a codec is one of float32"),
        ("", "float32, bf16"),
        ("topk:density=0.01", r"stands before a codec: say for instance 'topk:density=0.01\+int8'"),
        ("int8+ternary", "'int8' is a codec, and stands last"),
        ("topq+int8", r"no .topq. \(did you mean topk\?\); a codec is one of"),
        ("topk:density=2+int8", "density=2"),
        ("dct+feedback+int8", "stands before transforms"),
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


def test_digits_after_the_last_value_of_a_ternary_slab_must_be_zero():
    codec, (packed, scales) = encode("ternary", np.ones(3, np.float32))
    lie = bytes([packed[0] + 3**4])
    with pytest.raises(CodecError, match="after the last value"):
        codec.check([lie, scales.tobytes()], 3)
