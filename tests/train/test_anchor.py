"""Where the anchor lives makes no difference to any bit; here on one device, in `on_four_devices.py` on several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.grids import nightly
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import LeafSpec
from zmqtrain.train.anchor import DeviceMoves, HostMoves, moves_of

SHAPES = [(3, 4096), (100, 50), (7,), ()]


def leaves_of(seed, dtype="float32"):
    random = np.random.default_rng(seed)
    return [jnp.array(random.standard_normal(shape), dtype) for shape in SHAPES]


def segments_of(layout, fragments, seed):
    random = np.random.default_rng(seed)
    return {f: [(0.1 * random.standard_normal(n)).astype(np.float32) for n in layout.counts(f)] for f in fragments}


def moves(anchor, fragments=2, donate=True, dtype="float32", elastic=1.0):
    model = tuple(LeafSpec(f"leaf{i}", shape, dtype) for i, shape in enumerate(SHAPES))
    layout = Layout(model, fragments)
    return moves_of(layout, model, leaves_of(0, dtype), donate=donate, elastic=elastic, anchor=anchor)


def same_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    ("fragments", "dtype", "donate"),
    [
        (1, "float32", False),
        (3, "bfloat16", True),
        *nightly((1, "bfloat16", False), (3, "float32", False), (1, "float32", True)),
    ],
)
def test_an_anchor_on_the_host_gives_the_bits_of_one_on_the_device(fragments, dtype, donate):
    held, layout = {}, moves("host", fragments).layout
    for place in ("device", "host"):
        made = moves(place, fragments, donate, dtype, elastic=0.7)
        assert isinstance(made, HostMoves if place == "host" else DeviceMoves)
        params, anchor = leaves_of(0, dtype), made.place(leaves_of(1))
        made.warm_up(params, anchor)
        said = []
        for round, own in enumerate([[], [0], range(fragments)]):
            for fragment in range(fragments):
                for whole in (False, True):
                    pending = made.pending(params, made.settle(params, anchor), fragment, whole=whole)
                    said += [np.array(segment) for segment in pending]
            aggregate = segments_of(layout, range(0, fragments, 2), round)
            params, anchor = made.apply(params, anchor, aggregate, segments_of(layout, own, 10 + round))
        held[place] = (said, params, anchor, made.parameters(anchor))
    for ours, theirs in zip(held["host"], held["device"], strict=True):
        same_bits(ours, theirs)


def test_an_anchor_on_the_host_and_what_is_offered_of_it_are_no_device_arrays():
    made = moves("host")
    params, anchor = leaves_of(0), made.place(leaves_of(1))
    assert {type(leaf) for leaf in anchor} == {np.ndarray}
    assert {type(segment) for segment in made.pending(params, anchor, 1)} == {np.ndarray}


def test_parameters_that_were_not_given_away_are_still_there_and_the_others_are_not():
    for donate in (True, False):
        made = moves("host", donate=donate)
        for move in (
            lambda made, params, anchor: made.apply(params, anchor, segments_of(made.layout, [0, 1], 0), {}),
            lambda made, params, anchor: made.adopt(params, anchor, leaves_of(2), {}),
        ):
            params, anchor = leaves_of(0), made.place(leaves_of(1))
            move(made, params, anchor)
            assert all(leaf.is_deleted() is donate for leaf in params)


def test_parameters_in_the_order_of_fortran_are_taken_in_that_of_c():
    made = moves("host")
    given = [np.asfortranarray(np.array(leaf)) for leaf in leaves_of(1)]
    anchor = made.place(given)
    assert all(leaf.flags.c_contiguous for leaf in anchor)
    aggregate = segments_of(made.layout, [0, 1], 0)
    _, anchor = made.apply(leaves_of(0), anchor, aggregate, {})
    _, wanted = made.apply(leaves_of(0), made.place(leaves_of(1)), aggregate, {})
    same_bits(anchor, wanted)


def test_what_the_caller_gave_for_an_anchor_stays_its_own():
    made, given = moves("host"), [np.array(leaf) for leaf in leaves_of(1)]
    before = [leaf.copy() for leaf in given]
    anchor = made.place(given)
    copied = made.parameters(anchor)
    made.apply(leaves_of(0), anchor, segments_of(made.layout, [0, 1], 0), {})
    same_bits(given, before)
    same_bits(copied, before)


def test_warming_up_leaves_parameters_and_anchor_as_they_are_and_the_next_exchange_nothing_to_compile(caplog):
    made = moves("host")
    params, anchor = leaves_of(0), made.place(leaves_of(1))
    aggregate = segments_of(made.layout, [0, 1], 0)
    made.warm_up(params, anchor)
    same_bits(params, leaves_of(0))
    same_bits(anchor, leaves_of(1))
    with jax.log_compiles():
        for fragment in range(2):
            made.pending(params, anchor, fragment)
        made.apply(params, anchor, aggregate, {})
    assert not [record for record in caplog.records if "XLA compilation" in record.getMessage()]


def test_another_place_is_refused():
    with pytest.raises(ConfigError, match="anchor must be one of 'device', 'host', got 'disk'"):
        moves("disk")
