"""Laws of sending a slab part by part."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.codecs.codec import chain
from zmqtrain.codecs.levels import ternary
from zmqtrain.codecs.plain import bf16, float32
from zmqtrain.codecs.quantize import int8
from zmqtrain.codecs.wrappers import error_feedback, fragment, fragment_transform
from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta

LARGEST = np.finfo(np.float32).max
SIZES = [1, 7, 9, 600, 5000]
CODECS = {
    "float32 1/8": lambda: fragment(float32(), 8),
    "float32 1/1": lambda: fragment(float32(), 1),
    "bf16 1/3": lambda: fragment(bf16(), 3),
    "int8 1/8": lambda: fragment(int8(block=64)),
    "ternary 1/5": lambda: fragment(ternary(block=16), 5),
}
every_codec = pytest.mark.parametrize("key", CODECS)


@cache
def built(key):
    return CODECS[key]()


@cache
def in_jax(key):
    """Encode each row of a stack, and decode it: one function to compile."""
    codec = built(key)

    def both(x, state):
        buffers, state = codec.encode(x, state)
        return buffers, state, codec.decode(buffers, x.shape[0])

    return jax.jit(jax.vmap(both))


def raw(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def normal(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def at(part):
    return np.array([part], np.uint32)


@st.composite
def slabs(draw, sizes):
    size = draw(st.sampled_from(sizes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    return draw(st.sampled_from([np.where(np.isfinite(x), x, np.float32(-0.0)), normal(size), normal(size) * 1e-40]))


@every_codec
@settings(max_examples=examples(15))
@given(x=slabs([7, 601]), turns=st.lists(st.integers(0, 7), min_size=2, max_size=2))
def test_numpy_and_jitted_jax_give_rows_at_different_turns_the_same_bytes_states_and_values(key, x, turns):
    codec, rows, states = built(key), np.stack([x, -x[::-1]]), []
    for turn in turns:
        states.append(codec.init(x.size))
        for _ in range(turn):
            _, states[-1] = codec.encode(x, states[-1])
    buffers, after, decoded = in_jax(key)(rows, jax.tree.map(lambda *leaves: np.stack(leaves), *states))
    for row in range(2):
        ours = codec.encode(rows[row], states[row])
        theirs = jax.tree.map(lambda leaf, row=row: leaf[row], (buffers, after))
        assert raw(ours) == raw(theirs)
        assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [leaf.dtype for leaf in jax.tree.leaves(theirs)]
        assert [(buffer.dtype, buffer.size) for buffer in ours[0]] == list(codec.layout(x.size))
        codec.check(raw(ours[0]), x.size)
        assert raw(codec.decode(raw(ours[0]), x.size)) == raw(decoded[row])


@pytest.mark.parametrize("fragments", [1, 2, 3, 8, 40, 4096])
@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 100, 4096, 4097, 33_000, 65_535, 65_536])
def test_every_value_has_its_turn_once_and_sizes_do_not_depend_on_the_turn(size, fragments):
    codec, x = fragment(float32(), fragments), np.arange(1, size + 1, dtype=np.float32)
    total, state, turns = np.zeros_like(x), codec.init(size), min(size, fragments)
    for turn in range(turns):
        buffers, state = codec.encode(x, state)
        codec.check(buffers, size)
        assert int(buffers[0][0]) == turn
        codec.decode_into(raw(buffers), total, True)
    assert raw(total) == raw(x)
    assert int(state[0][0]) == 0
    passes = codec.layout(size)[1][1]
    assert passes <= size
    assert turns * passes - size <= max(size // 8, turns - 1)


def test_a_part_is_every_nth_block_of_whole_blocks():
    transform, x = fragment_transform(8), np.arange(65_536, dtype=np.float32)
    (part,), values, following = transform.forward(x, at(3))
    assert (int(part[0]), int(following[0]), transform.passes(x.size)) == (3, 4, 8192)
    assert raw(values) == raw([x.reshape(16, 4096)[[3, 11]]])


def test_a_turn_of_a_cut_in_more_parts_is_taken_as_the_last_one():
    codec, x = fragment(float32(), 3), normal(600)
    ours, theirs = codec.encode(x, (at(5), ())), jax.jit(codec.encode)(x, (at(5), ()))
    assert raw(ours) == raw(theirs)
    assert (ours[0][0].tolist(), ours[1][0].tolist()) == ([2], [0])


@every_codec
def test_decode_into_adds_or_replaces_just_what_decode_returns(key):
    codec = built(key)
    for size in SIZES:
        x, before, state = normal(size), normal(size, 1), codec.init(size)
        for _ in range(3):
            buffers, state = codec.encode(x, state)
            decoded, replaced, added = codec.decode(buffers, size), before.copy(), before.copy()
            codec.decode_into(raw(buffers), replaced, False)
            codec.decode_into(raw(buffers), added, True)
            assert raw(replaced) == raw(decoded)
            assert raw(added) == raw(before + decoded)


@every_codec
def test_zeros_huge_values_and_strided_views_come_through(key):
    codec = built(key)
    for size in SIZES:
        assert not codec.decode(codec.encode(np.zeros(size, np.float32), codec.init(size))[0], size).any()
        assert np.isfinite(codec.decode(codec.encode(np.full(size, LARGEST), codec.init(size))[0], size)).all()
        strided = normal(2 * size)[::2]
        assert raw(codec.encode(strided, codec.init(size))) == raw(codec.encode(strided.copy(), codec.init(size)))


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_whichever_part_it_is_in(key, bad):
    codec = built(key)
    for position in (0, 299, 599):
        x = np.ones(600, np.float32)
        x[position] = bad
        with pytest.raises(NonFiniteDelta, match="values"):
            codec.encode(x, codec.init(600))


@every_codec
@pytest.mark.parametrize("wrong", [np.ones(5, np.float64), np.ones((2, 3), np.float32), np.ones(0, np.float32), [1.0]])
def test_only_flat_float32_is_encoded(key, wrong):
    with pytest.raises(CodecError, match=r"float32\[n\]"):
        built(key).encode(wrong, built(key).init(5))


@every_codec
def test_buffers_of_wrong_number_or_length_are_refused_and_nothing_is_written(key):
    codec = built(key)
    good = raw(codec.encode(np.ones(300, np.float32), codec.init(300))[0])
    lies = [good[:-1], [*good, b""], []]
    for position, buffer in enumerate(good):
        for other in (buffer[:-1], buffer + b"\0", b""):
            lies.append([*good[:position], other, *good[position + 1 :]])
    for lie in lies:
        out = np.full(300, 7, np.float32)
        for attempt in (
            lambda lie=lie: codec.check(lie, 300),
            lambda lie=lie: codec.decode(lie, 300),
            lambda lie=lie, out=out: codec.decode_into(lie, out, True),
        ):
            with pytest.raises(CodecError):
                attempt()
        assert (out == 7).all()


@pytest.mark.parametrize(("size", "part"), [(600, 8), (600, 2**32 - 1), (3, 3), (1, 1)])
def test_a_part_that_there_is_not_is_refused(size, part):
    codec, out = fragment(bf16(), 8), np.full(size, 7, np.float32)
    buffers = raw(codec.encode(np.ones(size, np.float32), codec.init(size))[0])
    codec.check(buffers, size)
    buffers[0] = at(part).tobytes()
    with pytest.raises(CodecError, match=f"fragments=8: part {part}"):
        codec.check(buffers, size)
    with pytest.raises(CodecError, match=f"fragments=8: part {part}"):
        codec.decode_into(buffers, out, False)
    assert (out == 7).all()


@every_codec
@settings(max_examples=examples(60))
@given(data=st.data())
def test_what_check_lets_through_decodes_to_finite_values(key, data):
    codec, size = built(key), data.draw(st.sampled_from([1, 5, 12]))
    good = raw(codec.encode(np.full(size, LARGEST, np.float32), codec.init(size))[0])
    lie = [data.draw(st.binary(min_size=len(buffer), max_size=len(buffer)) | st.just(buffer)) for buffer in good]
    try:
        codec.check(lie, size)
    except CodecError:
        return
    assert np.isfinite(codec.decode(lie, size)).all()


def test_under_error_feedback_each_part_brings_what_the_others_turns_left():
    codec, rng, size = error_feedback(fragment(int8(), 8)), np.random.default_rng(3), 1000
    came, sent, state = np.zeros(size), np.zeros(size), codec.init(size)
    for _ in range(1000):
        x = rng.standard_normal(size).astype(np.float32)
        buffers, state = codec.encode(x, state)
        came += x
        sent += codec.decode(buffers, size)
    np.testing.assert_allclose(sent + state[0], came, atol=1000 * 8 * 2.0**-24)
    assert np.abs(state[0]).max() < 20


def test_names_are_the_codecs_with_one_more_argument():
    assert fragment(ternary(), 8).name == "ternary:block=128,fragments=8"
    assert fragment(bf16(), 8).name == "bf16:fragments=8"
    assert fragment(chain(fragment_transform(2), bf16()), 8).name == "fragment:fragments=2+bf16:fragments=8"
    assert fragment_transform(3).name == "fragment:fragments=3"


@pytest.mark.parametrize("fragments", [0, -1, 4097])
def test_a_wrong_number_of_parts_is_refused_with_the_range(fragments):
    with pytest.raises(ConfigError, match=rf"fragments={fragments} is not in 1..4096"):
        fragment(int8(), fragments)
