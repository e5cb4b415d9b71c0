"""Laws of what is kept between encodes: nothing is lost, and every machine keeps the same."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples, nightly
from zmqtrain.codecs.codec import Codec, read_buffers
from zmqtrain.codecs.levels import ternary
from zmqtrain.codecs.plain import bf16, float32
from zmqtrain.codecs.quantize import int8
from zmqtrain.codecs.wrappers import error_feedback, fragment, momentum_correction
from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta

LARGEST = np.finfo(np.float32).max


def tenths() -> Codec:
    """Return a codec whose decoder ends with an inexact product: a compiler would fuse it with the next sum."""

    def decode(buffers, count):
        (codes,) = read_buffers(buffers, [(np.int32, count)], "tenths")
        xp = codes.__array_namespace__()
        return codes.astype(xp.float32) * xp.float32(0.1)

    def encode(x, state):
        xp = x.__array_namespace__()
        return (xp.rint(xp.clip(x, -1e6, 1e6) * xp.float32(7)).astype(xp.int32),), state

    return int8()._replace(name="tenths", layout=lambda n: ((np.int32, n),), encode=encode, decode=decode)


KEEPERS = {
    "feedback int8": lambda: error_feedback(int8(block=64)),
    "feedback 0.9 ternary": lambda: error_feedback(ternary(block=32), 0.9),
    "feedback 0.999 bf16": lambda: error_feedback(bf16(), 0.999),
    "feedback float32": lambda: error_feedback(float32()),
    "feedback 0.7 tenths": lambda: error_feedback(tenths(), 0.7),
    "feedback fragment": lambda: error_feedback(fragment(int8(block=7), 3), 0.5),
    "momentum ternary": lambda: momentum_correction(ternary(block=32), 0.9),
    "momentum fragment": lambda: momentum_correction(fragment(int8(), 4), 0.875),
    "momentum tenths": lambda: momentum_correction(tenths(), 0.95),
    "momentum in feedback": lambda: error_feedback(momentum_correction(fragment(bf16(), 2), 0.3), 0.9),
}
FRAGMENTS = ["feedback fragment", "momentum fragment", "momentum in feedback"]
JITTED = ["feedback int8", "feedback 0.9 ternary", "feedback 0.7 tenths", *FRAGMENTS]
every_keeper = pytest.mark.parametrize("keeper", KEEPERS)


@cache
def built(keeper):
    return KEEPERS[keeper]()


@cache
def jitted_rows(keeper):
    return jax.jit(jax.vmap(built(keeper).encode))


def raw(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@st.composite
def rounds(draw, size):
    """A few slabs of one size, one after the other: all scales, denormals, giants, anything finite in float32."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slabs = []
    for _ in range(4):
        kind = draw(st.sampled_from(["normal", "bits", "denormal", "edges", "giant"]))
        if kind == "bits":
            x = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
            x = np.where(np.isfinite(x), x, np.float32(-0.0))
        elif kind == "denormal":
            x = rng.integers(0, 2**23, size, dtype=np.uint32).view(np.float32) * np.float32(rng.choice([-1, 1]))
        elif kind == "edges":
            x = rng.choice(np.array([2.0**-100, 1.001 * 2.0**-100, 2.0**-101, -1e-45, -0.0], np.float32), size)
        elif kind == "giant":
            x = rng.choice(np.array([LARGEST, -LARGEST, 1.0, 0.0], np.float32), size)
        else:
            x = rng.standard_normal(size).astype(np.float32) * np.float32(2.0 ** draw(st.integers(-95, 95)))
        slabs.append(x)
    return slabs


@pytest.mark.parametrize(
    ("keeper", "size"),
    [
        *((keeper, 301) for keeper in JITTED),
        *nightly(*((keeper, 301) for keeper in KEEPERS if keeper not in JITTED)),
        *nightly((FRAGMENTS[-1], 7)),
    ],
)
@settings(max_examples=examples(12))
@given(data=st.data())
def test_numpy_and_jitted_rows_of_jax_send_and_keep_the_same_bytes(keeper, size, data):
    codec, slabs = built(keeper), data.draw(rounds(size))
    states = [codec.init(size), codec.init(size)]
    their_states = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    for x in slabs:
        rows = np.stack([x, -x[::-1]])
        theirs = _, their_states = jitted_rows(keeper)(rows, their_states)
        for row, wanted in enumerate(rows):
            ours = codec.encode(wanted, states[row])
            states[row] = ours[1]
            assert raw(ours) == raw(jax.tree.map(lambda leaf, row=row: leaf[row], theirs))
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[row]))


@pytest.mark.parametrize("keeper", ["feedback 0.7 tenths", "momentum tenths", "momentum in feedback"])
def test_eager_jax_sends_and_keeps_the_same_bytes(keeper):
    codec, rng = built(keeper), np.random.default_rng(0)
    ours, theirs = codec.init(70), codec.init(70)
    for _ in range(3):
        x = rng.standard_normal(70).astype(np.float32)
        our_buffers, ours = codec.encode(x, ours)
        their_buffers, theirs = codec.encode(jax.numpy.asarray(x), theirs)
        assert raw([our_buffers, ours]) == raw([their_buffers, theirs])


@pytest.mark.parametrize("codec", [int8(), bf16(), ternary(), fragment(int8(), 4), fragment(ternary(block=50), 7)])
def test_sent_and_residual_sum_to_what_came_in_over_a_thousand_rounds(codec):
    codec, rng, size = error_feedback(codec), np.random.default_rng(1), 515
    came, sent, state = np.zeros(size), np.zeros(size), codec.init(size)
    for _ in range(1000):
        x = rng.standard_normal(size).astype(np.float32)
        buffers, state = codec.encode(x, state)
        codec.check(raw(buffers), size)
        came += x
        sent += codec.decode(buffers, size)
    np.testing.assert_allclose(sent + state[0], came, atol=1000 * 16 * 2.0**-24)
    assert np.abs(state[0]).max() < 40


def test_with_a_decay_the_residual_is_forgotten_at_that_rate():
    codec = error_feedback(fragment(float32(), 2), 0.5)
    buffers, state = codec.encode(np.array([3, 8], np.float32), codec.init(2))
    assert codec.decode(buffers, 2).tolist() == [3, 0]
    buffers, state = codec.encode(np.array([1, 0], np.float32), state)
    assert codec.decode(buffers, 2).tolist() == [0, 4]
    assert state[0].tolist() == [1, 0]


@pytest.mark.parametrize("factor", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("inner", [int8(), fragment(int8(), 4), fragment(bf16(), 16), ternary()])
def test_momentum_accounts_for_everything_that_came_in(factor, inner):
    codec, rng, size = momentum_correction(inner, factor), np.random.default_rng(2), 300
    came, sent, cleared = np.zeros(size), np.zeros(size), np.zeros(size)
    state, used = codec.init(size), float(np.float32(factor))
    for _ in range(1000):
        x = rng.standard_normal(size).astype(np.float32)
        velocity = used * state[0].astype(np.float64) + x
        buffers, state = codec.encode(x, state)
        decoded = codec.decode(buffers, size)
        came += x
        sent += decoded
        cleared += np.where(decoded != 0, velocity, 0)
        assert not state[0][decoded != 0].any()
    velocity, waiting, _ = state
    accounted = (1 - used) * (sent + waiting) + used * (velocity + cleared)
    np.testing.assert_allclose(accounted, came, atol=1000 * 2.0**-18)


def test_a_value_that_waits_gathers_momentum_and_loses_it_when_it_is_sent():
    codec = momentum_correction(fragment(float32(), 2), 0.5)
    state = codec.init(2)
    _, state = codec.encode(np.array([4, 4], np.float32), state)
    assert (state[0].tolist(), state[1].tolist()) == ([0, 4], [0, 4])
    buffers, state = codec.encode(np.array([0, 0], np.float32), state)
    assert codec.decode(buffers, 2).tolist() == [0, 6]
    assert (state[0].tolist(), state[1].tolist()) == ([0, 0], [0, 0])


def test_momentum_over_a_codec_that_sends_everything_is_the_codec():
    codec, rng = momentum_correction(float32(), 0.9), np.random.default_rng(3)
    state = codec.init(40)
    for _ in range(5):
        x = rng.standard_normal(40).astype(np.float32)
        buffers, state = codec.encode(x, state)
        assert raw(buffers) == raw([x])


@every_keeper
def test_the_state_that_goes_in_is_left_as_it_was(keeper):
    codec, x = built(keeper), np.linspace(-1, 1, 50, dtype=np.float32)
    _, state = codec.encode(x, codec.init(50))
    before, given_x = raw(state), x.copy()
    first, second = codec.encode(x, state), codec.encode(x, state)
    assert raw(state) == before and raw([x]) == raw([given_x])
    assert raw(first) == raw(second)


@every_keeper
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_before_it_is_kept(keeper, bad):
    codec, x = built(keeper), np.ones(9, np.float32)
    x[8] = bad
    with pytest.raises(NonFiniteDelta, match="9 values"):
        codec.encode(x, codec.init(9))


@every_keeper
@pytest.mark.parametrize("wrong", [np.ones(5, np.float64), np.ones((2, 3), np.float32), np.ones(0, np.float32), [1.0]])
def test_only_flat_float32_is_encoded(keeper, wrong):
    with pytest.raises(CodecError, match=r"float32\[n\]"):
        built(keeper).encode(wrong, built(keeper).init(5))


@every_keeper
def test_a_strided_view_is_encoded_like_its_copy(keeper):
    codec, x = built(keeper), np.random.default_rng(4).standard_normal(140).astype(np.float32)[::2]
    assert raw(codec.encode(x, codec.init(70))) == raw(codec.encode(x.copy(), codec.init(70)))


def test_huge_values_stay_finite_however_long_they_come():
    for codec in (error_feedback(int8()), error_feedback(fragment(bf16(), 3)), momentum_correction(ternary())):
        state = codec.init(20)
        for sign in [1] * 20 + [-1] * 20:
            buffers, state = codec.encode(np.full(20, sign * LARGEST, np.float32), state)
            codec.check(raw(buffers), 20)
            assert np.isfinite(codec.decode(buffers, 20)).all()


def test_names_say_what_is_kept_and_by_what():
    assert error_feedback(int8()).name == "feedback:decay=1+int8:block=256"
    assert error_feedback(ternary(), 0.9).name == "feedback:decay=0.9+ternary:block=128"
    assert momentum_correction(bf16(), 0.875).name == "momentum:factor=0.875+bf16"
    assert error_feedback(int8()).layout(300) == int8().layout(300)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: error_feedback(int8(), 0), r"decay=0.0 is not in 0.001..1"),
        (lambda: error_feedback(int8(), 1.5), r"decay=1.5 is not in 0.001..1"),
        (lambda: error_feedback(int8(), float("nan")), r"decay=nan"),
        (lambda: momentum_correction(int8(), 1), r"factor=1.0 is not in 0.001..0.999"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_range(make, place):
    with pytest.raises(ConfigError, match=place):
        make()
