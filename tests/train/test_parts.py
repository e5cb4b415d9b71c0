"""The parts of a snapshot, whole leaves and pieces of them, in their places."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from zmqtrain.codecs.fragment import Layout, WholeLayout
from zmqtrain.core.types import LeafSpec, Part
from zmqtrain.train.anchor import moves_of
from zmqtrain.train.leaves import whole_leaves

MODEL = (LeafSpec("a", (3, 4096), "float32"), LeafSpec("b", (7,), "float32"), LeafSpec("c", (0, 2), "float32"))


def leaves_of(seed):
    random = np.random.default_rng(seed)
    return [random.standard_normal(leaf.shape).astype(np.float32) for leaf in MODEL]


def parts_of(leaves, shard, shards):
    layout = Layout(MODEL, 1, (shard, shards))
    values = enumerate(layout.join(layout.split(leaves)))
    return [Part(leaf, layout.part(leaf).start, array) for leaf, array in values if array.size]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_parts_of_all_shards_are_the_leaves(shards):
    leaves = leaves_of(0)
    parts = [part for shard in range(shards) for part in parts_of(leaves, shard, shards)]
    for ours, leaf in zip(whole_leaves(MODEL, parts[::-1]), leaves, strict=True):
        assert ours.shape == leaf.shape
        np.testing.assert_array_equal(ours, leaf)


def test_what_a_shard_has_not_stays_as_it_was():
    old, new, layout = leaves_of(0), leaves_of(1), Layout(MODEL, 1, (1, 2))
    for index, leaf in enumerate(whole_leaves(MODEL, parts_of(new, 1, 2), [jnp.array(leaf) for leaf in old])):
        wanted = old[index].reshape(-1).copy()
        wanted[layout.part(index)] = new[index].reshape(-1)[layout.part(index)]
        assert leaf.shape == MODEL[index].shape
        np.testing.assert_array_equal(leaf.reshape(-1), wanted)


def test_a_part_is_put_whole_into_leaves_in_the_order_of_fortran():
    old, new = [np.asfortranarray(leaf) for leaf in leaves_of(0)], leaves_of(1)
    ours = whole_leaves(MODEL, parts_of(new, 1, 2), old)
    for one, wanted in zip(ours, whole_leaves(MODEL, parts_of(new, 1, 2), leaves_of(0)), strict=True):
        np.testing.assert_array_equal(one, wanted)


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_shards_snapshot_keeps_what_is_pending_and_no_other_shard_moves(where):
    params, anchor, new = leaves_of(0), leaves_of(1), leaves_of(2)
    whole, layout = WholeLayout(MODEL, 1, 2), Layout(MODEL, 1, (0, 2))
    own = {0: [np.full(n, 0.5, np.float32) for n in layout.counts(0)]}
    on_device = [jnp.array(leaf) for leaf in params]
    moves = moves_of(whole, MODEL, on_device, donate=False, elastic=1.0, anchor=where)
    known = moves.place(anchor)
    moved, shared = moves.adopt(on_device, known, whole_leaves(MODEL, parts_of(new, 0, 2), known), own)
    for index, (p, a, n) in enumerate(zip(params, anchor, new, strict=True)):
        inside = np.zeros(p.size, bool)
        inside[layout.part(index)] = True
        p, a, n = p.reshape(-1), a.reshape(-1), n.reshape(-1)
        np.testing.assert_array_equal(np.asarray(shared[index]).reshape(-1), np.where(inside, n, a))
        wanted = np.where(inside, n + (p - a - 0.5), p)
        np.testing.assert_allclose(np.asarray(moved[index]).reshape(-1), wanted, atol=1e-6)
