"""Moving a fragment block by block is moving it at once: the same bits, in the leaf's own memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zmqtrain.codecs.fragment import BLOCK_VALUES, Layout, WholeLayout
from zmqtrain.core.types import LeafSpec
from zmqtrain.train import anchor as module
from zmqtrain.train.anchor import ahead, moved

B = BLOCK_VALUES
SIZES = [(1,), (B,), (3, B - 1), (9 * B + 17,), (23, 1000)]


def spec_of(shapes, dtype="float32"):
    return tuple(LeafSpec(f"leaf{i}", shape, dtype) for i, shape in enumerate(shapes))


def random_of(shape, seed, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def bits(array):
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("with_own", [True, False])
@pytest.mark.parametrize(
    ("layout", "fragment"),
    [
        (Layout(spec_of(SIZES), 1), 0),
        (Layout(spec_of(SIZES), 2), 1),
        (Layout(spec_of(SIZES, "bfloat16"), 3), 0),
        (Layout(spec_of(SIZES, "float16"), 2), 0),
        (WholeLayout(spec_of(SIZES), 2, 2), 1),
        (WholeLayout(spec_of(SIZES, "bfloat16"), 2, 3), 5),
    ],
)
def test_what_is_moved_by_blocks_is_what_is_moved_at_once(layout, fragment, with_own):
    """One float32 operation makes each value, or two that are rounded apart: no order can differ, nor numpy's."""
    touched = layout.leaves(fragment)
    params, anchor = (
        [random_of(layout.spec[leaf].shape, seed, dtype) for leaf in touched]
        for seed, dtype in ((0, layout.spec[0].dtype), (1, np.float32))
    )
    counts = [int(np.diff(layout.spans(leaf, fragment)).sum()) for leaf in touched]
    shared, own = ([random_of(count, seed) for count in counts] for seed in (2, 3))
    own = own if with_own else [None] * len(touched)
    each = list(zip(params, anchor, shared, own, touched, strict=True))

    @jax.jit
    def by_blocks(params, anchor, shared, own):
        each = list(zip(params, anchor, shared, own, touched, strict=True))
        return [ahead(layout, p, a, i, fragment) for p, a, _, _, i in each], [
            moved(layout, p, a, u, v, i, fragment) for p, a, u, v, i in each
        ]

    for (p, a, u, v, i), pending, pair in zip(each, *by_blocks(params, anchor, shared, own), strict=True):
        ours, theirs = (layout.take(values, i, fragment) for values in (p, a))
        assert bits(pending) == bits(ours - theirs)
        step = u if v is None else u - v
        at_once = layout.add(p.copy(), i, fragment, step), layout.add(a.copy(), i, fragment, u)
        for one, other in zip(pair, at_once, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


@pytest.mark.parametrize("fragments", [2, 5])
def test_a_processor_sets_nothing_as_large_as_a_fragment_aside(fragments):
    spec = spec_of([(500, 1000)] * 3)
    layout = Layout(spec, fragments)
    leaves = [jnp.zeros(leaf.shape) for leaf in spec]
    segments = [jnp.zeros(count) for count in layout.counts(1)]

    def pending(params, anchor):
        return [ahead(layout, p, a, i, 1) for i, (p, a) in enumerate(zip(params, anchor, strict=True))]

    def move(params, anchor, shared, own):
        each = zip(params, anchor, shared, own, strict=True)
        pairs = [moved(layout, p, a, u, v, i, 1) for i, (p, a, u, v) in enumerate(each)]
        return [p for p, _ in pairs], [a for _, a in pairs]

    for compiled in (
        jax.jit(pending).lower(leaves, leaves).compile(),
        jax.jit(move, donate_argnums=(0, 1)).lower(leaves, leaves, segments, segments).compile(),
    ):
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * B


@pytest.mark.parametrize(("platform", "loops"), [("cpu", True), ("cuda", False), ("rocm", False)])
def test_a_processor_loops_over_blocks_and_an_accelerator_does_not(platform, loops):
    layout = Layout(spec_of([(500, 1000)]), 3)
    shape, segment = (jax.ShapeDtypeStruct(size, jnp.float32) for size in ((500, 1000), layout.counts(0)[:1]))
    for function, shapes in (
        (lambda p, a: ahead(layout, p, a, 0, 0), (shape, shape)),
        (lambda p, a, u, v: moved(layout, p, a, u, v, 0, 0), (shape, shape, segment, segment)),
    ):
        text = jax.export.export(jax.jit(function), platforms=[platform])(*shapes).mlir_module()
        assert ("stablehlo.while" in text) is loops


def test_a_leaf_that_an_index_cannot_count_is_moved_at_once(monkeypatch):
    monkeypatch.setattr(module, "LARGEST_LOOPED", 10 * B)
    layout = Layout(spec_of([(10 * B,)]), 2)
    leaf = jax.ShapeDtypeStruct((10 * B,), jnp.float32)
    text = jax.jit(lambda p, a: ahead(layout, p, a, 0, 0)).lower(leaf, leaf).as_text()
    assert "while" not in text
