"""What holds on a PC with four devices; `test_devices.py` runs this file in a process that has as many."""

from __future__ import annotations

import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.grids import nightly
from tests.train.processes import Process, Regression, batches_of, finish, group_of
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import ModelMismatch
from zmqtrain.train.anchor import DeviceMoves, HostMoves, Segment, SpreadLeaves, SpreadMoves, moves_of
from zmqtrain.train.step import describe_model

DEVICES = jax.devices()
GRID = Mesh(np.array(DEVICES).reshape(2, 2), ("data", "model"))
BACKWARDS = Mesh(np.array(DEVICES[::-1]), ("rows",))

SHAPES = {"wide": (8, 4096), "tall": (3000, 20), "cube": (6, 40, 52), "bias": (4100,), "scale": ()}

REPLICATED = dict.fromkeys(SHAPES, NamedSharding(GRID, P()))
FSDP = {
    "wide": NamedSharding(GRID, P(("data", "model"))),
    "tall": NamedSharding(GRID, P("data", "model")),
    "cube": NamedSharding(GRID, P(None, ("data", "model"))),
    "bias": NamedSharding(GRID, P("data")),
    "scale": NamedSharding(GRID, P()),
}
MIXED = {
    "wide": NamedSharding(GRID, P(None, "model")),  # each half on two devices
    "tall": NamedSharding(BACKWARDS, P("rows")),  # another mesh, in another order
    "cube": DEVICES[2],  # on one device
    "bias": NamedSharding(GRID, P()),
    "scale": None,  # tied to none
}
PLACINGS = {"replicated": REPLICATED, "fsdp": FSDP, "mixed": MIXED}


ALL = list(product(PLACINGS, ("device", "host"), (1, 3)))
OFTEN = [("replicated", "device", 1), ("fsdp", "host", 1), ("fsdp", "device", 3), ("mixed", "device", 3)]
in_all_ways = pytest.mark.parametrize(
    ("homes", "anchor", "fragments"),
    [*OFTEN, *nightly(*(way for way in ALL if way not in OFTEN))],
    indirect=["homes"],
)


@pytest.fixture
def homes(request):
    return PLACINGS[request.param]


def values(seed, names=SHAPES):
    random = np.random.default_rng(seed)
    return {name: np.array(random.standard_normal(SHAPES[name]), np.float32) for name in names}


def spread(tree, homes, dtype=jnp.float32):
    arrays = {name: np.asarray(value, dtype) for name, value in tree.items()}
    return {n: jnp.array(a) if homes[n] is None else jax.device_put(np.array(a), homes[n]) for n, a in arrays.items()}


def segments(layout, fragments, seed):
    random = np.random.default_rng(seed)
    return {f: [(0.1 * random.standard_normal(n)).astype(np.float32) for n in layout.counts(f)] for f in fragments}


def same_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def where(leaves):
    return [(leaf.sharding, leaf.committed, leaf.dtype) for leaf in leaves]


class Played:
    """One way of holding parameters and anchor, through every move, beside the way of one device."""

    def __init__(self, fragments, donate, homes, anchor="device", elastic=1.0, dtype=jnp.float32):
        tree = spread(values(0, homes), homes, dtype)
        self.model = describe_model(tree)
        self.layout = Layout(self.model, fragments)
        self.moves = moves_of(
            self.layout, self.model, jax.tree.leaves(tree), donate=donate, elastic=elastic, anchor=anchor
        )
        self.params = jax.tree.leaves(tree)
        self.names, self.anchor = homes, self.moves.place(jax.tree.leaves(values(1, homes)))
        self.moves.warm_up(self.params, self.anchor)
        self.heard = []

    def play(self):
        fragments = self.layout.fragments
        for round, (shared, own) in enumerate([([0], []), ([0], [0]), ([], [fragments - 1]), (range(fragments), [0])]):
            for fragment in range(fragments):
                for whole in (False, True):
                    pending = self.moves.pending(self.params, self.anchor, fragment, whole=whole)
                    self.heard += [np.array(segment) for segment in pending]
            aggregate, landed = segments(self.layout, shared, round), segments(self.layout, own, 10 + round)
            self.params, self.anchor = self.moves.apply(self.params, self.anchor, aggregate, landed)
        return self

    def adopt(self):
        new, own = jax.tree.leaves(values(5, self.names)), segments(self.layout, range(self.layout.fragments), 20)
        self.params, self.anchor = self.moves.adopt(self.params, self.anchor, new, own)
        return self


@in_all_ways
def test_every_move_gives_the_bits_of_one_device_and_leaves_parameters_where_they_were(fragments, homes, anchor):
    alone = Played(fragments, True, dict.fromkeys(SHAPES)).play()
    ours = Played(fragments, True, homes, anchor)
    before = where(ours.params)
    ours.play()
    assert isinstance(alone.moves, DeviceMoves) and isinstance(
        ours.moves, HostMoves if anchor == "host" else SpreadMoves
    )
    same_bits(ours.heard, alone.heard)
    same_bits(ours.anchor, alone.anchor)
    same_bits(ours.params, alone.params)
    assert where(ours.params) == before == where(ours.moves.parameters(ours.anchor))
    same_bits(ours.moves.parameters(ours.anchor), alone.moves.parameters(alone.anchor))
    if anchor == "device":
        assert [(one, tied) for one, tied, _ in where(ours.anchor)] == [(one, tied) for one, tied, _ in before]


@in_all_ways
def test_a_snapshot_replaces_the_anchor_and_keeps_what_is_pending(fragments, homes, anchor):
    alone = Played(fragments, True, dict.fromkeys(SHAPES)).adopt()
    ours = Played(fragments, True, homes, anchor)
    before = where(ours.params)
    ours.adopt()
    same_bits(ours.anchor, alone.anchor)
    for one, other in zip(ours.params, alone.params, strict=True):  # XLA may add in another order
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=1e-6)
    assert where(ours.params) == before


@pytest.mark.parametrize(
    ("homes", "anchor"),
    [("fsdp", "device"), *nightly(*(way[:2] for way in ALL if way[2] == 1 and way[:2] != ("fsdp", "device")))],
    indirect=["homes"],
)
def test_half_precision_and_elastic_shares_give_the_bits_of_one_device(homes, anchor):
    alone = Played(2, True, dict.fromkeys(SHAPES), elastic=0.3, dtype=jnp.bfloat16).play()
    ours = Played(2, True, homes, anchor, elastic=0.3, dtype=jnp.bfloat16).play()
    same_bits(ours.heard, alone.heard)
    same_bits(ours.anchor, alone.anchor)
    same_bits(ours.params, alone.params)


def test_the_memory_of_donated_parameters_is_used_again_and_that_of_others_is_not(donate):
    ours = Played(3, donate, FSDP).play()  # from here all memory is the devices' own, none numpy's
    pointers = {s.data.unsafe_buffer_pointer() for leaf in ours.params for s in leaf.addressable_shards}
    before = ours.params
    ours.params, ours.anchor = ours.moves.apply(ours.params, ours.anchor, segments(ours.layout, [0, 1, 2], 0), {})
    after = {s.data.unsafe_buffer_pointer() for leaf in ours.params for s in leaf.addressable_shards}
    assert (after == pointers) is donate and all(leaf.is_deleted() is donate for leaf in before)


def largest_share(arrays):
    """The largest part of a leaf, of those that are spread, that any one device holds in one of these arrays."""
    return max((shard.data.size for array in arrays for shard in array.addressable_shards), default=0)


@pytest.mark.parametrize(("fragments", "anchor"), [(2, "device"), (1, "host"), *nightly((1, "device"), (2, "host"))])
def test_no_device_ever_holds_a_whole_leaf(monkeypatch, fragments, anchor):
    homes = {"wide": FSDP["wide"], "tall": FSDP["tall"]}
    held = jax.live_arrays()  # held, so that no other array comes to have the id of one of them
    known = {id(array) for array in held}
    seen = []
    run = SpreadLeaves._run

    def watched(self, *arguments, **more):
        made = run(self, *arguments, **more)
        seen.append(largest_share(array for array in jax.live_arrays() if id(array) not in known))
        return made

    monkeypatch.setattr(SpreadLeaves, "_run", watched)
    ours = Played(fragments, True, homes, anchor).play().adopt()
    assert len(seen) > 3 and max(seen) == 60_000 / 4
    assert largest_share(ours.params) == 60_000 / 4


@pytest.mark.parametrize(
    ("homes", "fragments"),
    [("fsdp", 3), *nightly(*(way for way in product(PLACINGS, (1, 3)) if way != ("fsdp", 3)))],
    indirect=["homes"],
)
def test_what_is_compiled_speaks_to_no_other_device(monkeypatch, homes, fragments):
    compiled = []
    calls = SpreadLeaves._calls

    def watched(self, *arguments, **more):
        for function, given, members in calls(self, *arguments, **more):
            compiled.append(function.lower(*given).compile().as_text())
            yield function, given, members

    monkeypatch.setattr(SpreadLeaves, "_calls", watched)
    Played(fragments, True, homes)
    assert len(compiled) > 2
    spoken = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
    assert not [text for text in compiled if spoken.search(text)]


@pytest.mark.parametrize("homes", ["fsdp", *nightly("replicated", "mixed")], indirect=True)
def test_after_the_node_has_joined_nothing_is_compiled(caplog, homes):
    ours = Played(3, True, homes)
    nothing = segments(ours.layout, range(3), 0)
    with jax.log_compiles():
        for fragment in range(3):
            ours.moves.pending(ours.params, ours.anchor, fragment)
        ours.params, ours.anchor = ours.moves.apply(ours.params, ours.anchor, nothing, {})
        ours.moves.apply(ours.params, ours.anchor, nothing, nothing)
    assert not [record for record in caplog.records if "Finished XLA compilation" in record.getMessage()]


def test_a_segment_of_replicated_leaves_is_an_array_of_one_device_and_one_of_spread_leaves_comes_to_the_host():
    whole = Played(2, True, REPLICATED)
    assert {len(s.devices()) for s in whole.moves.pending(whole.params, whole.anchor, 0)} == {1}
    cut = Played(2, True, FSDP)
    wide = cut.moves.pending(cut.params, cut.anchor, 0)[-1]
    assert isinstance(wide, Segment) and wide.devices() == set(DEVICES)
    assert (wide.ndim, wide.dtype, wide.shape) == (1, np.float32, np.asarray(wide).shape)
    np.asarray(wide)[:] = 0  # the caller's own
    assert np.asarray(wide).any()


def test_an_aggregate_that_one_device_has_decoded_goes_on_to_the_others():
    ours, alone = Played(2, True, REPLICATED), Played(2, True, dict.fromkeys(SHAPES))
    aggregate, own = segments(ours.layout, [0, 1], 1), segments(ours.layout, [1], 2)

    def there(parts):
        return {f: [jax.device_put(segment, DEVICES[0]) for segment in one] for f, one in parts.items()}

    same_bits(
        jax.tree.leaves(ours.moves.apply(ours.params, ours.anchor, there(aggregate), there(own))),
        jax.tree.leaves(alone.moves.apply(alone.params, alone.anchor, aggregate, own)),
    )


def test_the_anchor_follows_parameters_that_a_step_has_moved():
    ours = Played(2, True, REPLICATED)
    moved = jax.tree.leaves(spread(values(0), FSDP))
    expected = ours.moves.pending(ours.params, ours.anchor, 0)
    expected = [np.array(segment) for segment in expected]
    ours.anchor = ours.moves.settle(moved, ours.anchor)
    assert [leaf.sharding for leaf in ours.anchor] == [leaf.sharding for leaf in moved]
    same_bits(ours.moves.pending(moved, ours.anchor, 0), expected)


def test_parameters_that_are_spread_after_joining_are_refused():
    ours = Played(2, True, dict.fromkeys(SHAPES))
    with pytest.raises(ModelMismatch, match="before they are given to DelayedSync"):
        ours.moves.settle(jax.tree.leaves(spread(values(0), FSDP)), ours.anchor)


# ---------------------------------------------------------------------- in lockstep


class Spread(Regression):
    """The regression with its parameters in pieces on two devices, or as they are."""

    def __init__(self, sharding):
        self.sharding = sharding

    def init(self, seed):
        params = super().init(seed)
        params["a"]["w"] = jax.device_put(params["a"]["w"], self.sharding)
        return params | {"b": jax.device_put(params["b"], NamedSharding(GRID, P()))}


def test_nodes_whose_parameters_are_spread_train_in_lockstep_to_the_same_bits(compile_this_quickly):
    ends = []
    for spec in (P(), P("data"), P(("data", "model"))):
        program, groups = Spread(NamedSharding(GRID, spec)), group_of(2)
        processes = finish(
            [
                Process(f"pc-{rank + 1}", group, batches_of(range(rank, 4, 2)), program=program, bucket_bytes=100)
                for rank, group in enumerate(groups)
            ]
        )
        first, second = (process.params() for process in processes)
        assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
        assert processes[0].result.params["a"]["w"].sharding.spec == spec
        ends.append(first)
    for end in ends[1:]:
        for one, other in zip(ends[0], end, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
