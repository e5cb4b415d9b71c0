"""The moves of the one equation on the device, against numpy."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.types import LeafSpec
from zmqtrain.train.anchor import DeviceMoves
from zmqtrain.train.step import describe_model

SHAPES = [(3, 4096), (100, 50), (7,)]
FRAGMENTS = [1, 2, 3]


def model_of(dtype="float32"):
    return tuple(LeafSpec(f"leaf{i}", shape, dtype) for i, shape in enumerate(SHAPES))


def leaves_of(seed, scale=1.0):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(np.float32) * np.float32(scale) for shape in SHAPES]


def segments_of(layout, fragments, seed):
    random = np.random.default_rng(seed)
    return {
        f: [random.standard_normal(n).astype(np.float32) * np.float32(0.1) for n in layout.counts(f)] for f in fragments
    }


def on_device(arrays, dtype=jnp.float32):
    return [jnp.array(array, dtype) for array in arrays]


def shift(layout, leaves, segments, sign=1.0):
    moved = [leaf.copy() for leaf in leaves]
    for f, parts in segments.items():
        for index, part in zip(layout.leaves(f), parts, strict=True):
            layout.add(moved[index], index, f, np.float32(sign) * part)
    return moved


def same(ours, theirs, tolerance=1e-6):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_pending_is_what_the_parameters_are_ahead_of_the_anchor(fragments):
    layout = Layout(model_of(), fragments)
    params, anchor = leaves_of(0), leaves_of(1)
    for f in range(fragments):
        got = DeviceMoves(layout, model_of(), False).pending(on_device(params), on_device(anchor), f)
        want = [layout.take(params[i], i, f) - layout.take(anchor[i], i, f) for i in layout.leaves(f)]
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_an_aggregate_moves_the_anchor_by_it_and_the_parameters_by_what_is_others(fragments, donate):
    layout = Layout(model_of(), fragments)
    params, anchor = leaves_of(0), leaves_of(1)
    aggregate = segments_of(layout, range(0, fragments, 2), 2)
    for own_fragments in ([], [0], [fragments - 1], range(fragments)):  # also one that the aggregate does not hold
        own = segments_of(layout, own_fragments, 3)
        moved, shared = DeviceMoves(layout, model_of(), donate).apply(
            on_device(params), on_device(anchor), aggregate, own
        )
        for one, other in zip(shared, shift(layout, anchor, aggregate), strict=True):
            np.testing.assert_array_equal(one, other)  # bit for bit, as on every other node
        same(moved, shift(layout, shift(layout, params, aggregate), own, -1.0))


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_a_snapshot_replaces_the_anchor_and_keeps_what_is_pending(fragments, donate):
    layout = Layout(model_of(), fragments)
    params, anchor, new = leaves_of(0), leaves_of(1), leaves_of(4)
    own = segments_of(layout, [0], 3)
    moved, shared = DeviceMoves(layout, model_of(), donate).adopt(on_device(params), on_device(anchor), new, own)
    for one, other in zip(shared, new, strict=True):
        np.testing.assert_array_equal(one, other)
    pending = shift(layout, [p - a for p, a in zip(params, anchor, strict=True)], own, -1.0)
    same(moved, [n + p for n, p in zip(new, pending, strict=True)])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_of_half_precision_have_an_anchor_of_float32(dtype):
    layout = Layout(model_of(jnp.dtype(dtype).name), 2)
    params, anchor = on_device(leaves_of(0), dtype), leaves_of(1)
    aggregate, own = segments_of(layout, [0, 1], 2), segments_of(layout, [1], 3)
    moves = DeviceMoves(layout, model_of(), False)
    assert {segment.dtype for segment in moves.pending(params, on_device(anchor), 0)} == {jnp.dtype(jnp.float32)}
    moved, shared = moves.apply(params, on_device(anchor), aggregate, own)
    assert {leaf.dtype for leaf in moved} == {jnp.dtype(dtype)} and {leaf.dtype.name for leaf in shared} == {"float32"}
    start = [np.asarray(leaf, np.float32) for leaf in params]
    same(moved, shift(layout, shift(layout, start, aggregate), own, -1.0), 0.05)
    moved, shared = moves.adopt(moved, shared, anchor, {})
    assert {leaf.dtype for leaf in moved} == {jnp.dtype(dtype)} and {leaf.dtype.name for leaf in shared} == {"float32"}


def test_buffers_are_used_up_only_where_the_caller_gives_them_away():
    layout = Layout(model_of(), 1)
    for donate in (True, False):
        params, anchor = on_device(leaves_of(0)), on_device(leaves_of(1))
        DeviceMoves(layout, model_of(), donate).apply(params, anchor, segments_of(layout, [0], 2), {})
        assert all(leaf.is_deleted() for leaf in anchor)
        assert all(leaf.is_deleted() is donate for leaf in params)


def test_a_model_is_described_by_path_shape_and_dtype_in_flattening_order():
    tree = {"layers": [{"w": jnp.ones((2, 3)), "b": np.zeros(3, np.float32)}], "head": jnp.ones(4, jnp.bfloat16)}
    assert describe_model(tree) == (
        LeafSpec("head", (4,), "bfloat16"),
        LeafSpec("layers/0/b", (3,), "float32"),
        LeafSpec("layers/0/w", (2, 3), "float32"),
    )
    assert len(describe_model(tree)) == len(jax.tree.leaves(tree))


@pytest.mark.parametrize("elastic", [1.0, 0.5])
def test_after_the_warm_up_no_mixture_of_fragments_and_own_parts_is_compiled(caplog, elastic):
    layout = Layout(model_of(), 3)
    moves = DeviceMoves(layout, model_of(), True, elastic)
    params, anchor = on_device(leaves_of(0)), on_device(leaves_of(1))
    moves.warm_up(params, anchor)
    with caplog.at_level(logging.DEBUG, "jax"), jax.log_compiles():
        for fragment in range(3):
            for whole in (True, False):
                moves.pending(params, anchor, fragment, whole=whole)
        for shared, mine in (([0], []), ([], [1]), ([2], [2]), ([0, 2], [1, 2])):
            aggregate, own = segments_of(layout, shared, 2), segments_of(layout, mine, 3)
            params, anchor = moves.apply(params, anchor, aggregate, own)
    here = [record.getMessage() for record in caplog.records if record.thread == threading.get_ident()]
    assert not [message for message in here if "ompiling" in message]  # of this thread: another test may have left one
