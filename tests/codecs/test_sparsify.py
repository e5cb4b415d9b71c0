"""What is kept is exactly what is said, the same everywhere; what is dropped is smaller, and never lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples, nightly
from zmqtrain.codecs.codec import chain
from zmqtrain.codecs.dct import dct
from zmqtrain.codecs.plain import bf16, float32
from zmqtrain.codecs.quantize import int8
from zmqtrain.codecs.sparsify import blocktopk, magnitude_keys, pack_places, randomk, topk
from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta

from slabs import slabs

SIZES = [1, 5, 7, 128, 257, 600]
LARGEST = np.finfo(np.float32).max
TRANSFORMS = {
    transform.name: transform
    for transform in (
        topk(0.01),
        topk(0.2),
        topk(0.6),
        topk(1),
        randomk(0.01),
        randomk(0.3),
        blocktopk(2),
        blocktopk(32),
    )
}
LARGEST_FIRST = [name for name in TRANSFORMS if not name.startswith("randomk")]
CHAINS = {
    codec.name: codec
    for codec in (
        chain(topk(0.01), int8()),
        chain(topk(0.05), float32()),
        chain(randomk(0.1), int8(16)),
        chain(blocktopk(2), bf16()),
    )
}

every_transform = pytest.mark.parametrize("name", TRANSFORMS)
every_chain = pytest.mark.parametrize("name", CHAINS)


COMPILED = [(one.name, 600) for one in (topk(0.01), topk(0.6), randomk(0.01), blocktopk(2))]
MORE = [(name, 600) for name in TRANSFORMS if (name, 600) not in COMPILED]
COMPILED += [(topk(0.2).name, 1), *nightly(*MORE, (randomk(0.3).name, 7))]


@cache
def jitted_rows(name, count):
    """Forward and backward of each row of a stack, one function to compile: (buffers, values, state), decoded."""
    transform = TRANSFORMS[name]

    def both(x, state):
        buffers, values, state = transform.forward(x, state)
        return (buffers, values, state), transform.backward(buffers, values, count)

    return jax.jit(jax.vmap(both, in_axes=(0, None)))


@cache
def jitted_forward():
    return jax.jit(topk(0.01).forward)


def raw(*arrays):
    return [np.asarray(array).tobytes() for array in arrays]


def places_of(transform, buffers, count):
    """Where a transform writes: its backward of ones."""
    return np.flatnonzero(transform.backward(buffers, np.ones(transform.passes(count), np.float32), count))


@pytest.mark.parametrize(("name", "size"), COMPILED)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_numpy_and_jitted_jax_keep_the_same_places_and_values_of_each_of_stacked_slabs(name, size, data):
    alike = [np.full(size, value, np.float32) for value in (-LARGEST, 0, 1e-45)]
    transform, x = TRANSFORMS[name], data.draw(slabs([size]) | st.sampled_from(alike))
    rows = np.stack([x, -x[::-1]])
    (buffers, all_values, states), decoded = jitted_rows(name, size)(rows, transform.init(size))
    for row, wanted in enumerate(rows):
        ours, values, state = transform.forward(wanted, transform.init(size))
        assert raw(*ours, values) == raw(*(buffer[row] for buffer in buffers), all_values[row])
        assert raw(*jax.tree.leaves(state)) == raw(*(leaf[row] for leaf in jax.tree.leaves(states)))
        assert tuple((buffer.dtype, buffer.size) for buffer in ours) == transform.layout(size)
        assert values.dtype == np.float32 and values.size == transform.passes(size)
        transform.check(raw(*ours), size)
        back = transform.backward(raw(*ours), values, size)
        assert raw(back) == raw(decoded[row])
        places = places_of(transform, ours, size)
        assert places.size == values.size and raw(back[places], values) == raw(wanted[places], wanted[places])


@pytest.mark.parametrize("name", LARGEST_FIRST)
@settings(max_examples=examples(40))
@given(x=slabs(SIZES))
def test_the_largest_are_kept_and_of_equal_keys_the_first(name, x):
    transform = TRANSFORMS[name]
    block = 256 if name.startswith("blocktopk") else x.size
    expected = []
    for start in range(0, x.size, block):
        keys = magnitude_keys(x[start : start + block])
        keep = min(32 if "32" in name else 2, keys.size) if block == 256 else transform.passes(x.size)
        expected += sorted(start + np.argsort(-keys, kind="stable")[:keep])
    buffers, _, _ = transform.forward(x, ())
    np.testing.assert_array_equal(places_of(transform, buffers, x.size), expected)


@pytest.mark.parametrize("name", LARGEST_FIRST)
@settings(max_examples=examples(40))
@given(x=slabs(SIZES))
def test_what_is_dropped_is_within_the_stated_bound_and_always_less_than_all(name, x):
    transform = TRANSFORMS[name]
    block = 256 if name.startswith("blocktopk") else x.size
    buffers, _, _ = transform.forward(x, ())
    kept = np.zeros(x.size, bool)
    kept[places_of(transform, buffers, x.size)] = True
    for start in range(0, x.size, block):
        magnitudes, here = np.abs(x[start : start + block].astype(np.float64)), kept[start : start + block]
        smallest, dropped = magnitudes[here].min(), magnitudes[~here]
        assert (dropped <= max(smallest * (1 + 2.0**-7), 2.0**-126)).all()
        if (largest := magnitudes.max()) >= 2.0**-126:
            assert np.linalg.norm(dropped / largest) < np.linalg.norm(magnitudes / largest)


@pytest.mark.parametrize("maker", [topk, randomk])
@pytest.mark.parametrize(
    ("density", "count", "kept"),
    [(0.01, 65_536, 656), (0.07, 100, 7), (0.01, 100, 1), (0.01, 1, 1), (1e-5, 65_536, 1), (1, 300, 300), (0.1, 30, 3)],
)
def test_how_many_are_kept_is_exact_in_the_decimals_of_the_density(maker, density, count, kept):
    assert maker(density).passes(count) == kept


def test_any_guess_left_by_other_slabs_finds_the_same_values():
    """One transform, one thread: slabs of unlike scale, sparsity and length, each like alone and like jax."""
    transform, forward = topk(0.01), jitted_forward()
    rng = np.random.default_rng(4)
    normal = rng.standard_normal(transform.slab).astype(np.float32)
    few = np.where(rng.random(transform.slab) < 0.002, normal, np.float32(0))
    ramp = np.arange(transform.slab) % 511  # the sample meets the large ones only
    striped = np.where(ramp < 8, normal * 100, normal)
    unmet = np.where(ramp == 300, normal * 100, normal)  # and here none of them
    for x in (
        normal,
        normal * 1e-30,
        normal * 1e30,
        few,
        striped,
        unmet,
        np.zeros_like(normal),
        normal,
        normal * 1.01,
        normal * 1.1,
        -normal,
        normal,
        normal[::3],
        np.round(normal * 40) / 8,
    ):
        buffers, values, _ = transform.forward(x, ())
        theirs, their_values, _ = (forward if x.size == transform.slab else topk(0.01).forward)(x, ())
        assert raw(*buffers, values) == raw(*theirs, their_values)


@pytest.mark.parametrize("maker", [topk, *nightly(randomk)])
def test_a_whole_slab_of_any_density_is_the_same_from_numpy_and_from_jax(maker):
    for density in (0.05, 1.0):
        transform = maker(density)
        x = np.random.default_rng(5).laplace(size=transform.slab).astype(np.float32)
        ours, theirs = (encode(x, transform.init(x.size)) for encode in (transform.forward, jax.jit(transform.forward)))
        assert raw(*ours[0], ours[1]) == raw(*theirs[0], theirs[1])
        places = places_of(transform, ours[0], x.size)
        np.testing.assert_array_equal(x[places], ours[1])


def test_of_a_whole_slab_of_equals_the_first_are_kept():
    tied = np.full(262_144, 2, np.float32)
    for encode in (topk(0.01).forward, jitted_forward()):
        (index,), values, _ = encode(tied, ())
        assert raw(index) == raw(pack_places(np.arange(2622), 262_144)) and values.shape == (2622,)


def test_what_a_stage_passes_on_fits_in_the_slab_of_the_codec_and_what_is_sent_in_a_frame():
    assert chain(topk(0.01), int8()).slab == 262_144
    assert chain(topk(0.25), int8()).slab == 262_144
    assert chain(topk(0.3), int8()).slab == 131_072
    assert chain(topk(1), int8()).slab == 65_536
    assert chain(dct(64), topk(0.01), int8()).slab == chain(randomk(0.01), int8()).slab == 65_536
    wide = float32()._replace(slab=1 << 20)
    assert chain(topk(1), wide).slab == 131_072
    for transform in (topk(1), topk(0.3), topk(0.01), dct(64)):
        for codec in (float32(), wide, int8()):
            joined = chain(transform, codec)
            assert transform.passes(joined.slab) <= codec.slab
            assert sum(np.dtype(dtype).itemsize * count for dtype, count in joined.layout(joined.slab)) <= 900_000
    odd = int8()._replace(slab=1)  # a codec that takes one value at a time
    assert chain(topk(0.5), odd).slab == 2


def test_randomk_draws_one_place_of_each_stretch_and_anew_each_time():
    transform, count = randomk(0.1), 1003
    kept, state, hits = transform.passes(count), transform.init(count), np.zeros(count)
    x = np.arange(1, count + 1, dtype=np.float32)
    for expected in range(2000):
        (counter,), values, state = transform.forward(x, state)
        assert counter.tolist() == [expected] and state.tolist() == [expected + 1]
        places = (values - 1).astype(int)
        hits[places] += 1
        assert ((places >= np.arange(kept) * count // kept) & (places < np.arange(1, kept + 1) * count // kept)).all()
    lengths = np.diff(np.arange(kept + 1) * count // kept)
    share = hits / 2000 * np.repeat(lengths, lengths)
    assert share.min() > 0.7 and share.max() < 1.3 and abs(share.mean() - 1) < 0.01
    last = transform.forward(x, np.array([2**32 - 1], np.uint32))
    assert last[0][0].tolist() == [2**32 - 1] and last[2].tolist() == [0]


@every_transform
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_a_delta_that_is_not_finite_is_refused_wherever_it_is(name, bits):
    for position in (0, 299, 300, 601):
        x = np.ones(602, np.float32)
        x.view(np.uint32)[position] = bits
        with pytest.raises(NonFiniteDelta, match="602 values"):
            TRANSFORMS[name].forward(x, TRANSFORMS[name].init(602))


@every_transform
@pytest.mark.parametrize(
    "wrong", [np.ones(5, np.int32), np.ones(5, np.float64), np.ones((2, 3), np.float32), np.ones(0, np.float32), [1.0]]
)
def test_only_flat_float32_is_taken(name, wrong):
    with pytest.raises(CodecError, match=r"float32\[n\]"):
        TRANSFORMS[name].forward(wrong, ())


@every_transform
def test_more_than_a_slab_is_refused(name):
    transform = TRANSFORMS[name]
    with pytest.raises(CodecError, match=f"takes 1 to {transform.slab} values"):
        transform.forward(np.ones(transform.slab + 1, np.float32), transform.init(1))
    assert transform.slab == (262_144 if name.startswith("topk") else 65_536)


@every_transform
def test_a_strided_view_is_treated_like_its_copy(name):
    transform, x = TRANSFORMS[name], np.random.default_rng(0).standard_normal(1400).astype(np.float32)[::2]
    ours, copied = (transform.forward(slab, transform.init(700)) for slab in (x, x.copy()))
    assert raw(*ours[0], ours[1]) == raw(*copied[0], copied[1])


@every_chain
def test_zeros_and_denormals_are_sent_as_zeros(name):
    codec = CHAINS[name]
    for size in SIZES:
        for value in (0.0, -0.0, 1e-45) if "int8" in name else (0.0,):
            buffers, _ = codec.encode(np.full(size, value, np.float32), codec.init(size))
            codec.check(buffers, size)
            assert not codec.decode(buffers, size).any()


@every_chain
def test_buffers_of_wrong_number_or_length_are_refused_and_nothing_is_written(name):
    codec = CHAINS[name]
    good = raw(*codec.encode(np.ones(300, np.float32), codec.init(300))[0])
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


@every_transform
@settings(max_examples=examples(60))
@given(data=st.data())
def test_what_check_lets_through_writes_each_place_once_and_in_range(name, data):
    transform, size = TRANSFORMS[name], data.draw(st.sampled_from([1, 5, 12, 259]))
    good = raw(*transform.forward(np.ones(size, np.float32), transform.init(size))[0])
    lie = [data.draw(st.binary(min_size=len(buffer), max_size=len(buffer)) | st.just(buffer)) for buffer in good]
    try:
        transform.check(lie, size)
    except CodecError:
        return
    total = np.zeros(size, np.float32)
    transform.backward_into(lie, np.ones(transform.passes(size), np.float32), total, True)
    assert set(total.tolist()) <= {0.0, 1.0} and total.sum() == transform.passes(size)


@pytest.mark.parametrize(
    "places", [[3, 3, 0, 1], [5, 3, 0, 1], [3, 5, 1, 0], [3, 5, 2, 2], [3, 5, 0, 4], [3, 5, 1, 255]]
)
def test_places_of_a_block_that_no_encoder_makes_are_refused(places):
    transform = blocktopk(2)
    transform.check([bytes([3, 5, 0, 3])], 260)
    with pytest.raises(CodecError, match="blocktopk:keep=2"):
        transform.check([bytes(places)], 260)


def test_an_index_that_no_encoder_makes_is_refused_by_the_name_of_the_stage():
    transform = topk(0.01)
    assert transform.layout(100) == ((np.uint8, 1),)
    transform.check([bytes([35 | 1 << 7])], 100)
    with pytest.raises(CodecError, match=r"topk:density=0\.01: the places"):
        transform.check([bytes([36 | 1 << 7])], 100)


@every_chain
def test_sent_and_residual_sum_to_what_was_computed(name):
    """Error feedback over 1,000 rounds: nothing is lost, and the residual stays within what the density allows."""
    codec, rng, size = CHAINS[name], np.random.default_rng(3), 515
    state, computed, sent, residual = codec.init(size), np.zeros(size), np.zeros(size), np.zeros(size, np.float32)
    for _ in range(1000):
        x = rng.standard_normal(size).astype(np.float32)
        wanted = x + residual
        buffers, state = codec.encode(wanted, state)
        decoded = codec.decode(buffers, size)
        residual = wanted - decoded
        computed += x
        sent += decoded
    np.testing.assert_allclose(sent + residual, computed, atol=1000 * 64 * 2.0**-23)
    assert np.abs(residual).max() < 60


def test_many_threads_keep_the_same_at_once():
    slab = np.random.default_rng(6).standard_normal((12, 65_536)).astype(np.float32)
    slab *= np.float32(10) ** np.arange(12, dtype=np.float32)[:, None]
    work = [(name, row) for name in CHAINS for row in range(12)]

    def encode(item):
        codec = CHAINS[item[0]]
        buffers, _ = codec.encode(slab[item[1]], codec.init(65_536))
        total = np.zeros(65_536, np.float32)
        codec.decode_into(buffers, total, True)
        return raw(*buffers, total)

    alone = [encode(item) for item in work]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, work)) == alone


def test_names_are_canonical():
    assert [topk().name, randomk(1e-5).name, topk(1).name] == [
        "topk:density=0.01",
        "randomk:density=1e-05",
        "topk:density=1",
    ]
    assert blocktopk().name == "blocktopk:keep=2"
    assert chain(topk(), int8()).name == "topk:density=0.01+int8:block=256"


@pytest.mark.parametrize(
    ("maker", "argument", "place"),
    [
        (topk, 0.0, "topk: density=0.0 is not in"),
        (topk, 1.01, "density=1.01"),
        (topk, float("nan"), "density=nan"),
        (randomk, -0.1, "randomk: density=-0.1"),
        (blocktopk, 0, r"blocktopk: keep=0 is not in 1\.\.32"),
        (blocktopk, 33, "keep=33"),
    ],
)
def test_an_argument_out_of_range_is_refused_with_its_name(maker, argument, place):
    with pytest.raises(ConfigError, match=place):
        maker(argument)


@every_chain
@settings(max_examples=examples(30))
@given(x=slabs(SIZES))
def test_the_places_and_values_of_a_codec_that_picks_are_what_it_decodes_to(name, x):
    codec = CHAINS[name]
    buffers = raw(*codec.encode(x, codec.init(x.size))[0])
    places, values = codec.sparse(buffers, x.size)
    assert (places.dtype, values.dtype) == (np.int32, np.float32) and (np.diff(places) > 0).all()
    dense = np.zeros(x.size, np.float32)
    dense[places] = values
    assert raw(dense) == raw(codec.decode(buffers, x.size))


def test_a_codec_that_does_not_only_pick_first_sends_every_value():
    assert all(codec.sparse is None for codec in (int8(), chain(dct(), topk(0.1), int8())))
    assert chain(topk(0.1), dct(), int8()).sparse is not None
