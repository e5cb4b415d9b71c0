"""The parts of a model that pipelines exchange: each value in one part, wherever the stages are cut."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import zmqtrain as zt
from tests.pipeline.test_local import MICRO_BATCHES, PARAMS, batch, loss_fn
from zmqtrain.core.errors import ConfigError
from zmqtrain.pipeline.pieces import borrowed, layout_of_stage, parts_of_segments, span_of, spec_of
from zmqtrain.pipeline.placement import cut_into_segments
from zmqtrain.pipeline.split import MicroBatches, Split, positions_of
from zmqtrain.programs.text import TextProgram

SCANNED = TextProgram(width=16, layers=4, heads=2, context=16, batch=8, tied=True, clip=0.0)


def cut(cuts: Any) -> Split:
    return zt.split(loss_fn, PARAMS, batch(0), cuts, micro_batches=MICRO_BATCHES)


@pytest.fixture(scope="module")
def segments() -> Split:
    return cut(3)


def shares_of(segments: Split, bounds: tuple[int, ...]) -> tuple[Split, list[Any]]:
    """Return the stages of these segments, and what each exchanges."""
    parts = parts_of_segments(segments)
    stages = cut([segments.cuts[bound - 1].position for bound in bounds[1:-1]])
    return stages, [parts.share("p", first, end) for first, end in itertools.pairwise(bounds)]


def test_each_value_of_the_model_is_in_one_part(segments: Split) -> None:
    parts = parts_of_segments(segments)
    sizes: dict[int, int] = {}
    for piece in itertools.chain(*parts.pieces):
        stage = segments[parts.segments[piece.part]]
        span = span_of(stage, piece.number, piece.rows)
        assert span is not None
        sizes[piece.number] = sizes.get(piece.number, 0) + span.end - span.start
    assert [sizes[number] for number in sorted(sizes)] == [leaf.size for leaf in jax.tree.leaves(PARAMS)]
    names = [piece.name for part in parts.pieces for piece in part]
    assert names == sorted(names) and len(set(names)) == len(names)


@pytest.mark.parametrize("bounds", [(0, 4), (0, 1, 4), (0, 2, 4), (0, 1, 2, 4)])
def test_stages_exchange_the_same_parts_however_they_are_cut(segments: Split, bounds: tuple[int, ...]) -> None:
    parts = parts_of_segments(segments)
    stages, shares = shares_of(segments, bounds)
    described = []
    for stage, share, own in zip(stages, shares, stages.own(PARAMS), strict=True):
        pieces = parts.pieces[share.first : share.end]
        layout, leaves = layout_of_stage(stage, pieces), [np.array(leaf) for leaf in jax.tree.leaves(own)]
        spec = spec_of(stage, [piece for part in pieces for piece in part])
        described += spec
        assert layout.fragments == share.end - share.first
        taken = [layout.take(leaves[i], i, part) for part in range(layout.fragments) for i in layout.leaves(part)]
        assert [one.size for one in taken] == [leaf.values for leaf in spec]
        for part in range(layout.fragments):
            for place in layout.leaves(part):
                ((start, end),) = layout.spans(place, part)
                before = np.array(leaves[place])
                step = np.arange(1, end - start + 1, dtype=np.float32)
                added = np.asarray(layout.add(jax.numpy.asarray(before), place, part, step))
                layout.add(leaves[place], place, part, step)  # numpy's, in place
                np.testing.assert_array_equal(added, leaves[place])
                moved = (leaves[place] - before).reshape(-1)
                assert not moved[:start].any() and not moved[end:].any()
    whole = parts_of_segments(segments)
    (everything,) = cut(0)
    assert described == list(spec_of(everything, [piece for part in whole.pieces for piece in part]))


def test_tied_rows_are_lent_by_the_stage_that_exchanges_them(segments: Split) -> None:
    stages, shares = shares_of(segments, (0, 2, 4))
    (one,) = borrowed(parts_of_segments(segments), stages, shares)
    assert (one.lender, one.borrower) == (0, 1)
    own = stages.own(PARAMS)
    lent = np.asarray(jax.tree.leaves(own[0])[one.source.place]).reshape(-1)[one.source.start : one.source.end]
    taken = np.asarray(jax.tree.leaves(own[1])[one.target.place]).reshape(-1)[one.target.start : one.target.end]
    np.testing.assert_array_equal(lent, taken)
    np.testing.assert_array_equal(lent, np.asarray(PARAMS["embedding"]).reshape(-1))
    stages, shares = shares_of(segments, (0, 4))
    assert not [*borrowed(parts_of_segments(segments), stages, shares)]


def test_rows_of_a_scanned_leaf_are_pieces_of_their_own() -> None:
    params, example = jax.eval_shape(SCANNED.init, 0), next(iter(SCANNED.batches(0)))
    parts = parts_of_segments(zt.split(SCANNED.loss, params, example, 3, micro_batches=2))
    rows = {piece.path: [] for part in parts.pieces for piece in part}
    for piece in itertools.chain(*parts.pieces):
        rows[piece.path].append(piece.rows)
    assert all(len(found) == len(set(found)) for found in rows.values())


def test_a_stage_that_exchanges_nothing_is_refused(segments: Split) -> None:
    with pytest.raises(ConfigError, match="the segments 3 to 3 hold no parameters of their own"):
        shares_of(segments, (0, 1, 2, 3, 4))  # the last has the tied embedding alone


def test_each_segment_of_a_pipeline_that_exchanges_parts_has_some_of_its_own() -> None:
    """So a plan may give a PC any of them: the tied head alone, or the loss, would have nothing to exchange."""
    narrow = TextProgram(width=8, layers=2, heads=1, context=8, batch=2)
    shapes, most = jax.eval_shape(narrow.init, 0), 32
    batches = MicroBatches(jax.eval_shape(lambda: next(iter(narrow.batches(0)))), 2, frozenset())
    free = positions_of(narrow.loss, shapes, batches.form()).candidates(3, most - 1)
    freely = zt.split(narrow.loss, shapes, batches.batch, free, micro_batches=2)
    assert len(parts_of_segments(freely).segments) < len(freely)
    found = cut_into_segments(narrow.loss, shapes, batches, 2, most)
    assert parts_of_segments(found).segments == tuple(range(len(found)))
