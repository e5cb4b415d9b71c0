"""The low-rank codec: whole-number sums, so the same bytes everywhere, and never a step away from the slab."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.codecs import lowrank as module
from zmqtrain.codecs.lowrank import lowrank
from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta

from slabs import raw, slabs

MEMBERS = [(4, 0), (1, 0), (3, 100)]
SIZES = [1, 129, 600]
LARGEST = np.finfo(np.float32).max

every_codec = pytest.mark.parametrize(("rank", "width"), MEMBERS)


@cache
def in_jax(rank, width):
    """Encode each row of a stack, and decode it: one function to compile."""
    codec = lowrank(rank, width)

    def both(x, state):
        buffers, state = codec.encode(x, state)
        return buffers, state, codec.decode(buffers, x.shape[0])

    return jax.jit(jax.vmap(both))


@cache
def jitted_decode(rank, width, count):
    return jax.jit(lambda buffers: lowrank(rank, width).decode(buffers, count))


def norm(x):
    """The Euclidean norm, of values whose squares may be over or under what a float64 holds."""
    largest = np.abs(x).max()
    return largest and largest * np.linalg.norm(x / largest)


def matrix_of(spectrum, rows, width, seed=0):
    """A matrix of these singular values; einsum, because BLAS would use threads, which wait for a core."""
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.standard_normal((rows, len(spectrum))))
    right, _ = np.linalg.qr(rng.standard_normal((width, len(spectrum))))
    return np.einsum("ik,jk->ij", left * spectrum, right).astype(np.float32)


@pytest.mark.parametrize(("rank", "width", "size"), [(4, 0, 601), (3, 100, 601), (4, 0, 1)])
@settings(max_examples=examples(30))
@given(data=st.data())
def test_numpy_and_jitted_jax_give_each_of_stacked_slabs_the_same_bytes_encode_after_encode(rank, width, size, data):
    huge, edge = np.full(size, LARGEST, np.float32), np.array([2.0**-100] + (size - 1) * [1e-40], np.float32)
    x = data.draw(slabs([size]) | st.sampled_from([huge, edge]))
    codec, states = lowrank(rank, width), [lowrank(rank, width).init(x.size)] * 2
    rows, their_states = np.stack([x, -x[::-1]]), np.stack(states)
    for given_rows in (rows, rows, rows[::-1]):
        theirs, their_states, values = in_jax(rank, width)(given_rows, their_states)
        assert [(buffer.dtype, buffer.shape[1]) for buffer in theirs] == list(codec.layout(x.size))
        for row, wanted in enumerate(given_rows):
            ours, states[row] = codec.encode(wanted, states[row])
            assert [(buffer.dtype, buffer.size) for buffer in ours] == list(codec.layout(x.size))
            assert raw(ours) == raw(buffer[row] for buffer in theirs)
            assert raw([states[row]]) == raw([their_states[row]])
            assert raw([codec.decode(ours, x.size)]) == raw([values[row]])


def test_eager_jax_gives_the_same_bytes():
    codec, x = lowrank(1, 16), np.random.default_rng(0).standard_normal(256).astype(np.float32)
    ours, theirs = codec.encode(x, codec.init(256)), codec.encode(jnp.asarray(x), codec.init(256))
    assert raw(jax.tree.leaves(ours)) == raw(jax.tree.leaves(theirs))


@pytest.mark.parametrize(("rank", "width", "size"), [(2, 0, 300_001), (2, 64, 64 * 4096), (2, 4096, 300_001)])
def test_large_slabs_keep_their_sums_in_range(rank, width, size):
    """All values alike in size: the sums are then as large as they get."""
    codec = lowrank(rank, width)
    rows, across = -(-size // (width or 512)), width or 512
    start = codec.init(size)
    signs = np.resize(np.where(start[:across] < 0, -1, 1), rows * across)[:size].astype(np.float32)
    x = signs * np.float32(1.999)
    ours, _ = codec.encode(x, start)
    theirs, _ = jax.jit(codec.encode)(x, start)
    assert raw(ours) == raw(theirs)
    assert np.linalg.norm(x - codec.decode(ours, size)) < 0.02 * np.linalg.norm(x)


@every_codec
@settings(max_examples=examples(50))
@given(x=slabs(SIZES))
@example(x=np.full(600, -LARGEST, np.float32))
@example(x=np.array([1e38, -1e38, 1.0, 0.0, 1e-38], np.float32))
@example(x=np.full(129, 1e-42, np.float32))
def test_encoding_never_makes_a_slab_larger(rank, width, x):
    codec, state = lowrank(rank, width), lowrank(rank, width).init(x.size)
    rest = x
    for _ in range(5):
        buffers, state = codec.encode(rest, state)
        codec.check(raw(buffers), x.size)
        decoded = codec.decode(raw(buffers), x.size)
        assert decoded.dtype == np.float32 and np.isfinite(decoded).all()
        assert norm(rest.astype(np.float64) - decoded) <= norm(rest.astype(np.float64)) * (1 + 2.0**-20)
        rest = rest - decoded


def test_a_column_takes_away_what_its_least_squares_fit_would_to_within_a_hundredth():
    x = matrix_of(0.7 ** np.arange(40), 64, 64)
    codec = lowrank(1, 64)
    buffers, _ = codec.encode(x.reshape(-1), codec.init(x.size))
    p = buffers[0].astype(np.float64)
    fitted = np.outer(p, p @ x / (p @ p))
    error = np.linalg.norm(x - codec.decode(buffers, x.size).reshape(64, 64))
    assert error < 1.01 * np.linalg.norm(x - fitted)


@pytest.mark.parametrize(
    ("spectrum", "rows", "width", "rank"),
    [
        (0.7 ** np.arange(64), 128, 128, 4),
        (0.9 ** np.arange(128), 128, 256, 4),
        (1 / (1 + np.arange(128)), 256, 128, 8),
        (np.array(6 * [1.0] + 40 * [0.2]), 64, 300, 6),
        (0.8 ** np.arange(16), 16, 4096, 2),
    ],
)
def test_of_a_matrix_that_stays_the_error_falls_to_that_of_its_singular_value_decomposition(
    spectrum, rows, width, rank
):
    matrix = matrix_of(spectrum, rows, width)
    best = np.linalg.norm(spectrum[rank:])
    codec = lowrank(rank, width)
    state, errors = codec.init(matrix.size), []
    for _ in range(10):
        buffers, state = codec.encode(matrix.reshape(-1), state)
        errors.append(np.linalg.norm(matrix.reshape(-1) - codec.decode(buffers, matrix.size)))
    assert errors[-1] < 1.03 * best
    assert errors[-1] < errors[0]


def test_a_matrix_of_low_rank_comes_back_to_within_its_codes_and_the_rest_of_it_later():
    x = matrix_of(np.array([1.0, 0.5, 0.2, 0.1]), 200, 128).reshape(-1)
    codec = lowrank(4, 128)
    state, rest, lengths = codec.init(x.size), x, []
    for _ in range(4):
        buffers, state = codec.encode(rest, state)
        rest = rest - codec.decode(buffers, x.size)
        lengths.append(np.linalg.norm(rest) / np.linalg.norm(x))
    assert lengths[0] < 0.03
    assert lengths[1] < 0.002 and lengths[3] < 0.0002


def test_a_start_that_finds_nothing_is_replaced_by_a_row_of_the_slab():
    x = np.array([3, -3, 0, 0] * 64, np.float32)
    codec = lowrank(1, 16)
    blind = np.full(16, 5, np.int8)
    buffers, state = codec.encode(x, blind)
    assert not codec.decode(buffers, x.size).any()
    buffers, _ = codec.encode(x, state)
    assert np.linalg.norm(x - codec.decode(buffers, x.size)) < 0.02 * np.linalg.norm(x)


def test_a_start_reaches_columns_in_which_the_slab_before_had_only_zeros():
    codec, whole = lowrank(1, 16), matrix_of([1.0], 16, 16)
    left, right = whole.copy(), whole.copy()
    left[:, 8:], right[:, :8] = 0, 0
    _, state = codec.encode(left.reshape(-1), codec.init(256))
    buffers, _ = codec.encode(right.reshape(-1), state)
    assert np.linalg.norm(right.reshape(-1) - codec.decode(buffers, 256)) < 0.02 * np.linalg.norm(right)


def test_a_column_whose_products_would_be_denormal_is_not_sent():
    """The start sees only a part that is 1/10,000 of the rest, itself hardly over the smallest magnitude."""
    x = np.zeros((16, 16))
    x[0, :2], x[1, 2:] = (1.5, -1.5), 1.5e-4
    x = (x.reshape(-1) * 2.0**-100).astype(np.float32)
    codec, blind = lowrank(1, 16), np.full(16, 5, np.int8)
    buffers, state = codec.encode(x, blind)
    codec.check(buffers, x.size)
    assert not any(buffers[0]) and not any(buffers[1])
    louder, _ = codec.encode(x * np.float32(2.0**20), blind)
    assert any(louder[0]) and any(louder[1])
    theirs, theirs_state = jax.jit(codec.encode)(x, blind)
    assert raw([*buffers, state]) == raw([*theirs, theirs_state])
    assert codec.decode(codec.encode(x, state)[0], x.size).any()


def test_slabs_of_zeros_and_under_the_smallest_magnitude_become_zeros_and_leave_the_start():
    codec = lowrank(2)
    for value in (0.0, -0.0, 1e-45, 2.0**-126, 1.999 * 2.0**-101):
        for size in SIZES:
            buffers, state = codec.encode(np.full(size, value, np.float32), codec.init(size))
            codec.check(buffers, size)
            assert not codec.decode(buffers, size).any()
            assert raw([state]) == raw([codec.init(size)])
    buffers, _ = codec.encode(np.full(33, 2.0**-100, np.float32), codec.init(33))
    assert codec.decode(buffers, 33).all()


@pytest.mark.parametrize("power", [100, 101, 110, 127])
def test_a_huge_slab_is_sent_smaller_by_the_stated_power_of_two(power):
    x = np.random.default_rng(1).uniform(1, 1.9, 200).astype(np.float32)
    x[7] = 1.99
    codec = lowrank(2)
    sent = codec.decode(codec.encode(x * np.float32(2.0**power), codec.init(200))[0], 200)
    plain = codec.decode(codec.encode(x, codec.init(200))[0], 200)
    assert raw([sent]) == raw([plain * np.float32(2.0 ** min(power, 100))])


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_delta_that_is_not_finite_is_refused_wherever_it_is(rank, width, bad):
    codec = lowrank(rank, width)
    for position in (0, 300, 601):
        x = np.ones(602, np.float32)
        x[position] = bad
        with pytest.raises(NonFiniteDelta, match="602 values"):
            codec.encode(x, codec.init(602))


@pytest.mark.parametrize(
    "wrong", [np.ones(5, np.int32), np.ones(5, np.float64), np.ones((2, 3), np.float32), np.ones(0, np.float32), [1.0]]
)
def test_only_flat_float32_is_encoded(wrong):
    with pytest.raises(CodecError, match=r"float32\[n\]"):
        lowrank().encode(wrong, ())


def test_a_strided_view_is_encoded_like_its_copy_and_neither_is_written():
    x = np.random.default_rng(0).standard_normal(1400).astype(np.float32)[::2]
    x.setflags(write=False)
    codec = lowrank()
    assert raw(codec.encode(x, codec.init(700))[0]) == raw(codec.encode(x.copy(), codec.init(700))[0])


@every_codec
def test_decode_into_adds_or_replaces_just_what_decode_returns(rank, width):
    codec, rng = lowrank(rank, width), np.random.default_rng(2)
    for size in (*SIZES, 140_001):
        buffers, _ = codec.encode(rng.standard_normal(size).astype(np.float32), codec.init(size))
        decoded = codec.decode(raw(buffers), size)
        before = rng.standard_normal(size).astype(np.float32)
        replaced, added = before.copy(), before.copy()
        codec.decode_into(raw(buffers), replaced, False)
        codec.decode_into(raw(buffers), added, True)
        assert raw([replaced, added]) == raw([decoded, before + decoded])


@every_codec
def test_buffers_of_wrong_number_or_length_are_refused_and_nothing_is_written(rank, width):
    codec = lowrank(rank, width)
    good = raw(codec.encode(np.ones(300, np.float32), codec.init(300))[0])
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


@settings(max_examples=examples(150))
@given(data=st.data())
def test_what_check_lets_through_decodes_to_the_same_finite_values_everywhere(data):
    codec = lowrank(4)
    good = raw(codec.encode(np.full(20, LARGEST, np.float32), codec.init(20))[0])
    lie = [data.draw(st.binary(min_size=len(buffer), max_size=len(buffer)) | st.just(buffer)) for buffer in good]
    try:
        codec.check(lie, 20)
    except CodecError:
        return
    decoded = codec.decode(lie, 20)
    assert np.isfinite(decoded).all()
    dtypes = [dtype for dtype, _ in codec.layout(20)]
    arrays = [jnp.asarray(np.frombuffer(buffer, dtype)) for buffer, dtype in zip(lie, dtypes, strict=True)]
    assert raw([decoded]) == raw([jitted_decode(4, 0, 20)(arrays)])


@pytest.mark.parametrize("power", [-126, 104])
def test_the_largest_and_smallest_that_check_lets_through_are_finite_and_normal(power):
    codec, size = lowrank(32, 32), 1024
    p, q = np.full(1024, 127, np.int8), np.full(1024, 2047, np.int16)
    q[:32] = np.where(np.arange(32) % 2, 1, -1) if power < 0 else 2047
    buffers = (p, q, np.full(32, power, np.int8))
    codec.check(raw(buffers), size)
    decoded = codec.decode(buffers, size)
    assert np.isfinite(decoded).all() and np.abs(decoded).min() >= 2.0**-126
    assert raw([decoded]) == raw([jitted_decode(32, 32, size)(buffers)])


@pytest.mark.parametrize(
    ("position", "content"),
    [
        (0, np.array([-128], "i1")),
        (1, np.array([2048], "<i2")),
        (1, np.array([-2048], "<i2")),
        (1, np.array([-32768], "<i2")),
        (2, np.array([-127], "i1")),
        (2, np.array([105], "i1")),
    ],
)
def test_a_code_or_power_that_no_encoder_makes_is_refused(position, content):
    codec = lowrank()
    buffers = raw(codec.encode(np.ones(1, np.float32), codec.init(1))[0])
    codec.check(buffers, 1)
    buffers[position] = content.tobytes()
    with pytest.raises(CodecError, match="lowrank:rank=4,width=0"):
        codec.check(buffers, 1)


@every_codec
def test_sent_and_residual_sum_to_what_was_computed_and_the_residual_stays_bounded(rank, width):
    """Error feedback over 1,000 rounds of white noise, which has no low rank at all."""
    codec, rng, size = lowrank(rank, width), np.random.default_rng(3), 515
    state = codec.init(size)
    computed, sent, residual, lengths = np.zeros(size), np.zeros(size), np.zeros(size, np.float32), []
    for _ in range(1000):
        x = rng.standard_normal(size).astype(np.float32)
        wanted = x + residual
        buffers, state = codec.encode(wanted, state)
        decoded = codec.decode(buffers, size)
        residual = wanted - decoded
        computed += x
        sent += decoded
        lengths.append(np.linalg.norm(residual))
    np.testing.assert_allclose(sent + residual, computed, atol=1000 * 64 * 2.0**-24)
    assert max(lengths[500:]) < 1.3 * max(lengths[:500])
    assert max(lengths) < 12 * size**0.5


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**32), top=st.integers(0, 30), size=st.integers(1, 300))
def test_the_quantised_fit_is_the_rounded_quotient_where_it_is_kept(seed, top, size):
    rng = np.random.default_rng(seed)
    sums = rng.integers(-(2**top) + 1, 2**top, 50).astype(np.int32)
    p = np.rint(rng.integers(-127, 128, size)).astype(np.int32)
    q, power = module._fit(np, sums, p)
    square, weight = max(int((p.astype(np.int64) ** 2).sum()), 1), int(np.abs(p).sum())
    exact = sums.astype(np.float64) / square
    kept = q != 0
    assert np.abs(q).max() <= 2047
    assert (np.abs(q * 2.0**power - exact)[kept] <= 2.0**power * 1.0001).all()
    least = np.maximum(np.abs(exact) - 0.5 * weight / square, 0)  # of the true quotient
    assert (np.abs(q) * 2.0**power <= 2 * least).all()
    largest = int(np.abs(sums).max())
    if largest > weight * 1.1 + 3:
        assert np.abs(q).max() >= 1024


def test_a_slab_may_be_as_long_as_its_rows_allow_and_no_longer():
    assert lowrank().slab == 2**20 and lowrank(2, 4096).slab == 2**20
    assert lowrank(2, 16).slab == 4096 * 16
    codec = lowrank(1, 16)
    long = np.ones(codec.slab + 1, np.float32)
    for use in (codec.init, codec.layout):
        with pytest.raises(CodecError, match="at most 65536 values, not 65537"):
            use(long.size)
    with pytest.raises(CodecError, match="at most 65536"):
        codec.encode(long, ())


@pytest.mark.parametrize(("rank", "width"), [(32, 16), (32, 4096), (32, 0), (4, 0)])
def test_the_bytes_of_a_whole_slab_stay_under_a_frame(rank, width):
    codec = lowrank(rank, width)
    assert sum(np.dtype(dtype).itemsize * count for dtype, count in codec.layout(codec.slab)) <= 900_000


@pytest.mark.parametrize(
    ("rank", "width", "place"),
    [
        (0, 0, r"rank=0 is not in 1\.\.32"),
        (33, 0, r"rank=33 is not in 1\.\.32"),
        (4, 15, r"width=15 is not in 16\.\.4096"),
        (4, 4097, r"width=4097 is not in 16\.\.4096"),
        (4, -1, r"width=-1 is not in 16\.\.4096"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_range(rank, width, place):
    with pytest.raises(ConfigError, match=place):
        lowrank(rank, width)


def test_the_name_is_canonical_and_columns_that_no_matrix_needs_are_not_sent():
    assert lowrank().name == "lowrank:rank=4,width=0"
    assert lowrank(2, 64).name == "lowrank:rank=2,width=64"
    assert [count for _, count in lowrank(4).layout(1)] == [1, 1, 1]
    assert [count for _, count in lowrank(4).layout(65_536)] == [4 * 256, 4 * 256, 4]
    assert [count for _, count in lowrank(4, 100).layout(150)] == [2 * 2, 2 * 100, 2]
