"""Places are written in the fewest bytes, read back as they were, and never read out of range."""

from __future__ import annotations

from functools import cache
from math import ceil, comb, log2

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples, nightly
from zmqtrain.codecs.sparsify import check_places, index_form, pack_places, unpack_places
from zmqtrain.core.errors import CodecError

SHAPES = [
    (1, 1),
    (2, 1),
    (7, 7),
    (9, 4),
    (100, 1),
    (100, 3),
    (100, 40),
    (257, 16),
    (600, 6),
    (1023, 100),
    (4097, 1),
    (65_536, 1),
    (65_536, 2),
    (65_536, 66),
    (65_537, 1),
    (262_144, 1),
    (262_144, 2622),
]
EACH_FORM = [(1, 1), (100, 40), (600, 6), (65_536, 1), (65_536, 66), (65_537, 1), (262_144, 2622)]
every_shape = pytest.mark.parametrize(("count", "kept"), SHAPES)


@cache
def jitted_rows(count, kept):
    """Write each row of a stack, and read it: one function to compile."""

    def both(places):
        buffer = pack_places(places, count)
        return buffer, unpack_places(buffer, count, kept)

    return jax.jit(jax.vmap(both))


def picks(count, kept, seed):
    return np.sort(np.random.default_rng(seed).choice(count, kept, replace=False)).astype(np.int32)


def packed_bits(count, kept, lows, high):
    """Elias-Fano written by hand, one bit after another: the lows, then the high parts in unary."""
    form = index_form(count, kept)
    bits = [low >> bit & 1 for low in lows for bit in range(form.low)] + high
    bits += [0] * (8 * form.size - len(bits))
    return bytes(sum(bit << place for place, bit in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8))


@pytest.mark.parametrize(
    ("count", "kept"), [*EACH_FORM, *nightly(*(shape for shape in SHAPES if shape not in EACH_FORM))]
)
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32))
def test_places_come_back_and_numpy_and_jitted_rows_of_jax_write_the_same_bytes(count, kept, seed):
    rows = np.stack([picks(count, kept, seed), picks(count, kept, seed + 1)])
    theirs, back = jitted_rows(count, kept)(rows)
    assert back.dtype == jnp.int32
    np.testing.assert_array_equal(back, rows)
    for places, written in zip(rows, theirs, strict=True):
        buffer = pack_places(places, count)
        assert (buffer.dtype, buffer.shape) == (np.uint8, (index_form(count, kept).size,))
        check_places(buffer, count, kept, "topk")
        assert unpack_places(buffer, count, kept).dtype == np.int32
        np.testing.assert_array_equal(unpack_places(buffer, count, kept), places)
        assert np.asarray(written).tobytes() == buffer.tobytes()


@every_shape
def test_the_first_and_the_last_places_fit(count, kept):
    for places in (np.arange(kept), np.arange(count - kept, count)):
        buffer = pack_places(places.astype(np.int32), count)
        check_places(buffer, count, kept, "topk")
        np.testing.assert_array_equal(unpack_places(buffer, count, kept), places)


def test_the_smallest_form_is_chosen():
    assert index_form(65_536, 1)[::3] == ("local", 2)
    assert index_form(100, 40)[::3] == ("bitmap", 13)
    assert index_form(65_536, 656).kind == "elias-fano"
    assert index_form(262_144, 1)[::3] == ("elias-fano", 3)  # where sixteen bits are not enough
    for count in (1, 5, 100, 5000, 65_536):
        for kept in {1, 2, count // 100, count // 7, count // 2, count} - {0}:
            if kept <= count:
                assert index_form(count, kept).size <= min(2 * kept, (count + 7) // 8)


@pytest.mark.parametrize("slab", [65_536, 262_144])
@pytest.mark.parametrize(("share", "most"), [(0.01, 8.6), (0.001, 12.0), (0.05, 6.35)])
def test_an_index_takes_little_more_than_the_entropy_of_a_random_pick(slab, share, most):
    kept = ceil(share * slab)
    bits = 8 * index_form(slab, kept).size / kept
    assert bits <= most
    assert bits <= log2(comb(slab, kept)) / kept + 0.7


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (5, 0), (5, 6), (262_145, 1), (5, -1)])
def test_more_places_than_values_or_among_more_values_than_a_slab_has_are_refused(count, kept):
    with pytest.raises(CodecError, match="cannot index"):
        index_form(count, kept)


@pytest.mark.parametrize(
    ("lows", "high", "what"),
    [
        ([3, 3, 1], [1, 1, 0, 1, 0], "not ascending"),
        ([3, 2, 1], [1, 1, 0, 1, 0], "not ascending"),
        ([3, 4, 31], [1, 0, 1, 0, 0, 1], "not under 100"),
        ([3, 4, 1], [1, 1, 0, 0], "2 places, not 3"),
        ([3, 4, 1], [1, 1, 1, 1], "4 places, not 3"),
        ([3, 4, 1], [1, 1, 0, 1, 0, 0, 1], "beyond its end"),
    ],
)
def test_an_elias_fano_index_that_no_encoder_makes_is_refused(lows, high, what):
    count, kept = 100, 3
    form = index_form(count, kept)
    assert (form.kind, form.low, form.bits) == ("elias-fano", 5, 3 * 5 + 3 + 3)
    good = packed_bits(count, kept, [3, 4, 1], [1, 1, 0, 1])
    assert good == pack_places(np.array([3, 4, 33], np.int32), count).tobytes()
    check_places(np.frombuffer(good, np.uint8), count, kept, "topk")
    with pytest.raises(CodecError, match=f"topk: .*{what}"):
        check_places(np.frombuffer(packed_bits(count, kept, lows, high), np.uint8), count, kept, "topk")


@pytest.mark.parametrize(
    ("count", "kept", "content", "what"),
    [
        (60_000, 1, [0x60, 0xEA], "not under 60000"),
        (9, 4, [0b1111, 0b10], "beyond its end"),
        (9, 4, [0b0111, 0], "3 places, not 4"),
    ],
)
def test_a_local_index_or_a_bitmap_that_no_encoder_makes_is_refused(count, kept, content, what):
    with pytest.raises(CodecError, match=what):
        check_places(np.array(content, np.uint8), count, kept, "topk")


@settings(max_examples=examples(300))
@given(data=st.data(), shape=st.sampled_from([(1, 1), (9, 4), (40, 2), (100, 3), (300, 9), (60_000, 1)]))
def test_what_check_lets_through_is_ascending_in_range_and_written_in_one_way_only(data, shape):
    count, kept = shape
    size = index_form(count, kept).size
    good = pack_places(picks(count, kept, data.draw(st.integers(0, 9))), count).copy()
    flips = st.lists(st.integers(0, 8 * size - 1), max_size=4)
    if data.draw(st.booleans()):
        lie = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    else:
        lie = good
        for bit in data.draw(flips):
            lie[bit // 8] ^= 1 << bit % 8
    try:
        check_places(lie, count, kept, "topk")
    except CodecError:
        return
    places = unpack_places(lie, count, kept)
    assert places.size == kept and places[0] >= 0 and places[-1] < count and (np.diff(places) > 0).all()
    assert pack_places(places, count).tobytes() == lie.tobytes()
