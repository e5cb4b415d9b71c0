"""The cut of a model in fragments: a partition, the same for numpy and jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.codecs.fragment import BLOCK_VALUES, Layout, WholeLayout, check_model
from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.types import LeafSpec, count_values

B = BLOCK_VALUES
SHAPES = [(), (1,), (0,), (B,), (B - 1,), (B + 1,), (3, B), (7, 1000), (2, 3, 5), (10 * B + 17,)]


def spec_of(shapes, dtype="float32"):
    return tuple(LeafSpec(f"layer{i}/w", shape, dtype) for i, shape in enumerate(shapes))


def blocks_of(spec):
    return sum(-(-leaf.values // B) for leaf in spec)


@st.composite
def layouts(draw):
    shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5)
    spec = spec_of(draw(shapes.filter(lambda drawn: set(drawn) != {(0,)})))
    shards = draw(st.integers(1, min(blocks_of(spec), 4)))
    shard = (draw(st.integers(0, shards - 1)), shards)
    return Layout(spec, draw(st.integers(1, min(blocks_of(spec) // shards, 9))), shard)


def leaves_of(spec, start=0):
    """Leaves whose values are all different, whole numbers."""
    leaves = []
    for leaf in spec:
        leaves.append(np.arange(start, start + leaf.values, dtype=np.float32).reshape(leaf.shape))
        start += leaf.values
    return leaves


def reference(layout, leaves, fragment):
    """Rule 1 of the module, block by block."""
    segments, number = {}, 0
    for index, leaf in enumerate(leaves):
        part = layout.part(index)
        for start in range(part.start, part.stop, B):
            if number % layout.fragments == fragment:
                segments.setdefault(index, []).append(leaf.reshape(-1)[start : min(start + B, part.stop)])
            number += 1
    return {index: np.concatenate(blocks) for index, blocks in segments.items()}


@settings(max_examples=examples(60))
@given(layout=layouts())
def test_a_fragment_holds_every_nth_block_of_the_model(layout):
    leaves = leaves_of(layout.spec)
    for fragment in range(layout.fragments):
        expected = reference(layout, leaves, fragment)
        assert layout.leaves(fragment) == tuple(expected)
        assert layout.counts(fragment) == tuple(segment.size for segment in expected.values())
        for index, segment in expected.items():
            taken = layout.take(leaves[index], index, fragment)
            assert taken.dtype == np.float32
            np.testing.assert_array_equal(taken, segment)


@settings(max_examples=examples(40))
@given(layout=layouts())
def test_all_fragments_of_all_shards_together_are_the_model_once(layout):
    leaves, flats = leaves_of(layout.spec), []
    for shard in range(layout.shard[1]):
        of_shard = Layout(layout.spec, layout.fragments, (shard, layout.shard[1]))
        flats += of_shard.split(leaves)
        assert [flat.size for flat in flats[-layout.fragments :]] == [
            sum(of_shard.counts(fragment)) for fragment in range(layout.fragments)
        ]
    together = np.sort(np.concatenate(flats))
    np.testing.assert_array_equal(together, np.arange(count_values(layout.spec), dtype=np.float32))


@pytest.mark.parametrize("shards", [2, 3, 4, 7])
@pytest.mark.parametrize("shapes", [[(100 * B + 5,)], [(30, B), (5,), (7,), (40, 1000), (9,)], [(B - 1,)] * 64])
def test_the_shards_are_ranges_of_as_many_values_but_for_a_block(shards, shapes):
    spec = spec_of(shapes)
    share, ends = count_values(spec) / shards, [0] * len(spec)
    for shard in range(shards):
        layout = Layout(spec, 2, (shard, shards))
        parts = [layout.part(leaf) for leaf in range(len(spec))]
        assert abs(sum(part.stop - part.start for part in parts) - share) <= B
        for leaf, part in enumerate(parts):
            if part.stop > part.start:
                assert part.start == ends[leaf] and part.start % B == 0, "from where the last one ended, at a block"
                ends[leaf] = part.stop
    assert ends == [leaf.values for leaf in spec]


def test_every_shard_has_a_block_for_each_fragment_even_of_uneven_leaves():
    spec = spec_of([(1,)] * 5 + [(20, B)])
    for shard in range(4):
        layout = Layout(spec, 4, (shard, 4))
        assert all(layout.counts(fragment) for fragment in range(4))


def test_a_node_of_several_shards_sees_their_fragments_in_a_row():
    spec = spec_of([(5, B), (7,), (2, 5000)])
    whole = WholeLayout(spec, 2, 3)
    leaves = leaves_of(spec)
    assert whole.fragments == 6 and hash(whole) == hash(WholeLayout(spec, 2, 3)) and whole == WholeLayout(spec, 2, 3)
    for fragment in range(6):
        layout, inside = Layout(spec, 2, (fragment // 2, 3)), fragment % 2
        assert whole.leaves(fragment) == layout.leaves(inside)
        for index in whole.leaves(fragment):
            taken = whole.take(leaves[index], index, fragment)
            np.testing.assert_array_equal(taken, layout.take(leaves[index], index, inside))
            ours, theirs = (
                one.add(leaves[index].copy(), index, f, taken) for one, f in ((whole, fragment), (layout, inside))
            )
            np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=examples(40))
@given(layout=layouts())
def test_joining_what_was_split_gives_the_leaves_back(layout):
    leaves = leaves_of(layout.spec)
    flats = layout.split(leaves)
    joined = layout.join(flats)
    for index, (leaf, ours) in enumerate(zip(leaves, joined, strict=True)):
        wanted = leaf.reshape(-1)[layout.part(index)]
        assert ours.shape == (leaf.shape if wanted.size == leaf.size else wanted.shape) and ours.dtype == np.float32
        np.testing.assert_array_equal(ours.reshape(-1), wanted)
    for ours, flat in zip(layout.split(joined), flats, strict=True):  # the parts are enough
        np.testing.assert_array_equal(ours, flat)


@settings(max_examples=examples(40))
@given(layout=layouts(), data=st.data())
def test_adding_is_placing_the_sum_and_touches_nothing_else(layout, data):
    fragment = data.draw(st.integers(0, layout.fragments - 1))
    for index, leaf in enumerate(leaves_of(layout.spec)):
        taken = layout.take(leaf, index, fragment).copy()
        step = np.linspace(-1, 1, taken.size, dtype=np.float32)
        added, placed = leaf.copy(), leaf.copy()
        assert layout.add(added, index, fragment, step) is added
        assert layout.place(placed, index, fragment, taken + step) is placed
        np.testing.assert_array_equal(added, placed)
        for other in set(range(layout.fragments)) - {fragment}:
            np.testing.assert_array_equal(layout.take(added, index, other), layout.take(leaf, index, other))


@settings(max_examples=examples(25))
@given(layout=layouts(), data=st.data())
def test_jitted_jax_and_numpy_agree(layout, data):
    fragment = data.draw(st.integers(0, layout.fragments - 1))
    index = data.draw(st.integers(0, len(layout.spec) - 1))
    leaf = leaves_of(layout.spec)[index]
    segment = layout.take(leaf, index, fragment).copy()
    step = np.linspace(-1, 1, segment.size, dtype=np.float32)

    @jax.jit
    def all_three(leaf, step):
        return (
            layout.take(leaf, index, fragment),
            layout.add(leaf, index, fragment, step),
            layout.place(leaf, index, fragment, step),
        )

    taken, added, placed = all_three(leaf, step)
    np.testing.assert_array_equal(taken, segment)
    np.testing.assert_array_equal(added, layout.add(leaf.copy(), index, fragment, step))
    np.testing.assert_array_equal(placed, layout.place(leaf.copy(), index, fragment, step))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_leaves_of_other_dtypes_travel_as_float32_and_keep_their_dtype(dtype, fragments):
    layout = Layout(spec_of([(2 * B + 3,)], dtype), fragments)
    leaf = np.linspace(-2, 2, 2 * B + 3).astype(jnp.dtype(dtype))
    for fragment in range(fragments):
        segment = layout.take(leaf, 0, fragment)
        step = np.full(segment.size, 0.25, np.float32)
        added = layout.add(leaf.copy(), 0, fragment, step)
        assert segment.dtype == np.float32 and added.dtype == leaf.dtype
        expected = (segment + step).astype(leaf.dtype).astype(np.float32)
        np.testing.assert_allclose(layout.take(added, 0, fragment), expected, rtol=1e-6, atol=1e-7)
        if dtype != "float64":
            theirs = jax.jit(layout.add, static_argnums=(1, 2))(leaf, 0, fragment, step)
            assert theirs.dtype == leaf.dtype
            np.testing.assert_array_equal(np.asarray(theirs), added)


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8", "complex64"])
def test_a_leaf_that_cannot_be_trained_is_named(dtype):
    spec = (LeafSpec("w", (3,), "float32"), LeafSpec("head/steps", (2,), dtype))
    with pytest.raises(ModelMismatch, match=f"head/steps {dtype}") as raised:
        check_model(spec)
    assert raised.value.leaf == "head/steps"
    with pytest.raises(ModelMismatch, match="head/steps"):
        Layout(spec, 1)


@pytest.mark.parametrize("fragments", [0, -1, 5])
def test_fragments_that_would_be_empty_are_refused_with_the_largest_useful_number(fragments):
    with pytest.raises(ConfigError, match="fragments must be 1 to 4"):
        Layout(spec_of([(3 * B,), ()]), fragments)


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_is_none_is_refused(shard):
    with pytest.raises(ConfigError, match=r"shard .* the first is 0"):
        Layout(spec_of([(3 * B,)]), 1, shard)


def test_more_shards_than_blocks_are_refused_with_how_many_there_can_be():
    with pytest.raises(ConfigError, match=r"each of 3 shards has so many.* 1 to 1, and shards at most 4"):
        Layout(spec_of([(4 * B,)]), 2, (0, 3))


def test_a_model_without_values_is_refused():
    with pytest.raises(ConfigError, match="no values"):
        Layout(spec_of([(0,)]), 1)


def test_a_leaf_that_is_not_contiguous_is_not_written_by_mistake():
    layout = Layout(spec_of([(4, 5)]), 1)
    with pytest.raises(ConfigError, match="not contiguous"):
        layout.add(np.zeros((5, 4), np.float32).T, 0, 0, np.ones(20, np.float32))


def test_equal_layouts_are_one_static_argument():
    assert hash(Layout(spec_of([(5,)]), 1)) == hash(Layout(spec_of([(5,)]), 1))
    assert Layout(spec_of([(5,)]), 1) == Layout(spec_of([(5,)]), 1)
