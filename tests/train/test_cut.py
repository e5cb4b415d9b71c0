"""Where a fragment lies in the shards of a leaf, against the layout's own cut."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.types import LeafSpec
from zmqtrain.train.anchor import cut_shards


def grid(shape, parts):
    """The shards of a leaf whose axes are cut in so many equal parts."""
    ranges = [[(k * (n // p), (k + 1) * (n // p)) for k in range(p)] for n, p in zip(shape, parts, strict=True)]
    return tuple(product(*ranges))


def check(shape, parts, fragments, ahead=0):
    """Gather and scatter by the rows are the layout's take and add, for a leaf behind one of `ahead` blocks."""
    spec = (LeafSpec("before", (ahead * 4096,), "float32"), LeafSpec("leaf", shape, "float32"))
    layout = Layout(spec, fragments)
    leaf = np.arange(1, spec[1].values + 1, dtype=np.float32).reshape(shape)
    shards = grid(shape, parts)
    for fragment in range(fragments):
        segment = layout.take(leaf, 1, fragment)
        if not segment.size:
            continue
        cut = cut_shards(shape, shards, layout.spans(1, fragment))
        joined = np.zeros((segment.size // cut.grain, cut.grain), np.float32)
        for shard, rows, places in zip(shards, cut.rows, cut.places, strict=True):
            held = leaf[tuple(slice(*axis) for axis in shard)].reshape(-1, cut.grain)
            assert rows.size == cut.width and (np.diff(rows) > 0).all() and (rows[places.size :] >= len(held)).all()
            joined[places] = held[rows[: places.size]]
        np.testing.assert_array_equal(joined.reshape(-1), segment)
        assert sum(places.size for places in cut.places) * cut.grain == segment.size


@pytest.mark.parametrize("fragments", [1, 2, 5])
@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((6, 4096), (2, 1)),  # whole blocks a shard
        ((6, 4096), (1, 4)),  # a block crosses all shards
        ((30, 40, 50), (2, 4, 1)),
        ((30, 40, 50), (1, 1, 2)),
        ((20_004,), (4,)),  # shards end within blocks
        ((9, 1200), (3, 1)),
        ((12_345,), (1,)),
        ((), ()),
    ],
)
def test_the_rows_of_all_shards_together_are_the_segment(shape, parts, fragments):
    check(shape, parts, min(fragments, -(-int(np.prod(shape)) // 4096)))


@settings(max_examples=examples(30))
@given(st.data())
def test_whatever_the_shape_and_the_mesh_the_rows_are_the_segment(data):
    parts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shape = tuple(p * data.draw(st.integers(1, 24)) for p in parts)
    ahead = data.draw(st.integers(0, 3))
    blocks = ahead + -(-int(np.prod(shape)) // 4096)
    check(shape, parts, data.draw(st.integers(1, blocks)), ahead)


def test_equal_shards_share_their_numbers():
    layout = Layout((LeafSpec("leaf", (4, 4096), "float32"),), 2)
    half, other = ((0, 2), (0, 4096)), ((2, 4), (0, 4096))
    cut = cut_shards((4, 4096), (half, half, other), layout.spans(0, 0))
    assert cut.rows[0] is cut.rows[1] and cut.places[0] is cut.places[1]
    assert cut.grain == 4096 and [places.tolist() for places in cut.places] == [[0], [0], [1]]
