"""The hub's side of the one equation: mean over live, outer step, publish what the parameters are ahead."""

from __future__ import annotations

import numpy as np
import pytest

from tests.averaging.aggregators import (
    MODEL,
    add,
    announced,
    codecs_of,
    come,
    equal,
    founded,
    moved,
    random_flats,
    release,
    step_of,
)
from tests.fixed import fixed_run
from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import cut, decode_snapshot, encode_snapshot
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.core.errors import CheckpointError, CodecError, ConfigError, ModelMismatch
from zmqtrain.core.settings import FIRST, RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Publish


def test_the_founders_parameters_are_version_0():
    aggregator = founded()
    assert aggregator.version == 0 and equal(aggregator.parameters, random_flats(0))
    assert equal(aggregator.published, aggregator.parameters)


def test_a_release_steps_by_the_mean_over_the_live_nodes():
    aggregator = founded()
    u = add(aggregator, 0, 1) + add(aggregator, 0, 2)
    released = release(aggregator, (0,), live=4)
    assert (released.version, released.codec, released.fragments) == (1, "float32", (0,))
    np.testing.assert_allclose(aggregator.parameters[0], random_flats(0)[0] + u / 4, rtol=0, atol=1e-6)
    np.testing.assert_allclose(step_of(aggregator, released, 0), u / 4, rtol=0, atol=1e-6)
    assert np.array_equal(aggregator.parameters[1], random_flats(0)[1])
    again = release(aggregator, (0,), live=4)
    np.testing.assert_allclose(step_of(aggregator, again, 0), 0, rtol=0, atol=1e-6)  # the sum was used up


def test_each_fragment_has_momentum_of_its_own():
    aggregator = founded(outer="nesterov:rate=0.8,momentum=0.5")
    m, expected = np.zeros_like(aggregator.parameters[1]), random_flats(0)[1].copy()
    for seed in (1, 2, 3):
        g = add(aggregator, 1, seed) / 2
        add(aggregator, 0, seed + 9)
        release(aggregator, (0, 1) if seed == 2 else (1,), live=2)
        m = 0.5 * m + g
        expected += 0.8 * (g + 0.5 * m)
    np.testing.assert_allclose(aggregator.parameters[1], expected, rtol=0, atol=1e-5)


def test_a_plain_round_moves_the_parameters_by_its_mean_and_leaves_the_momentum():
    aggregator = founded(outer="nesterov:rate=0.8,momentum=0.5")
    add(aggregator, 0, 1)
    release(aggregator, (0,), live=1)
    before = aggregator.parameters[0].copy()
    momentum = aggregator.arrays()["outer.momentum/layer/b"].copy()
    u = add(aggregator, 0, 2)
    add(aggregator, 0, 2)
    release(aggregator, (0,), live=2, dense=True, plain=True)
    assert np.array_equal(aggregator.parameters[0], before + u)
    np.testing.assert_allclose(aggregator.published[0], aggregator.parameters[0], rtol=0, atol=1e-6)
    assert np.array_equal(aggregator.arrays()["outer.momentum/layer/b"], momentum)


@pytest.mark.parametrize("broadcast", ["bf16", "int8:block=256", "ternary:block=128"])
def test_what_the_broadcast_leaves_out_is_in_the_next(broadcast):
    aggregator = founded(broadcast=broadcast)
    seen = random_flats(0)[0].copy()
    for seed in range(3):
        add(aggregator, 0, seed + 1)
        seen += step_of(aggregator, release(aggregator, (0,), live=1), 0)
        assert np.array_equal(seen, aggregator.published[0])  # bit for bit what every node has
    assert not np.array_equal(aggregator.published[0], aggregator.parameters[0])
    release(aggregator, (0,), live=1, dense=True)
    np.testing.assert_allclose(aggregator.published[0], aggregator.parameters[0], rtol=0, atol=1e-6)


def test_a_snapshot_is_what_was_published():
    aggregator = founded(broadcast="ternary:block=128")
    add(aggregator, 0, 1)
    release(aggregator, (0,), live=1)
    frames = encode_snapshot(aggregator.layout, aggregator.published)
    assert equal(decode_snapshot(aggregator.layout, frames), aggregator.published)
    aggregator.check_sizes(announced(frames))


def test_a_publish_whose_bytes_were_changed_is_refused_before_any_of_it_counts():
    aggregator = founded()
    frames = encode_payload(codecs_of(aggregator, "float32", 0), cut(random_flats(1)[0], aggregator.layout.counts(0)))
    frames[-1][-1] ^= 1
    with pytest.raises(CodecError):
        aggregator.check(Publish(1, 1, 0, 0, "float32", (), 8, 8, 0.5), frames)
    with pytest.raises(CodecError):
        aggregator.check_snapshot(announced(frames), frames)


@pytest.mark.parametrize("contributions", [2, 1], ids=["the sum overflows", "its outer step would"])
def test_a_sum_that_overflows_is_not_used(contributions):
    aggregator = founded()
    for _ in range(contributions):
        huge = [np.full(count, 3e38, np.float32) for count in aggregator.layout.counts(0)]
        frames = encode_payload(codecs_of(aggregator, "float32", 0), huge)
        aggregator.accumulate("a", Publish(1, 1, 0, 0, "float32", (), 8, 8, 0.5), frames)
    u = add(aggregator, 1, 1)
    assert release(aggregator, (0, 1), live=1).overflowed == (0,)
    assert np.array_equal(aggregator.parameters[0], random_flats(0)[0])
    np.testing.assert_allclose(aggregator.parameters[1], random_flats(0)[1] + u, rtol=0, atol=1e-6)


def test_a_model_that_cannot_be_exchanged_is_refused():
    with pytest.raises(ModelMismatch, match="count"):
        Aggregator(fixed_run()).plan((LeafSpec("count", (3,), "int32"),))
    with pytest.raises(ConfigError, match="fragments"):
        Aggregator(fixed_run(fragments=9)).plan((LeafSpec("w", (3,), "float32"),))


# ---------------------------------------------------------------------- life after a restart


def restored(aggregator):
    again = Aggregator(aggregator.settings)
    again.plan(MODEL)
    again.restore(aggregator.version, aggregator.arrays())
    return again


def test_a_restored_hub_goes_on_with_the_same_bits():
    aggregator = founded(broadcast="ternary:block=128", outer="nesterov:rate=0.8,momentum=0.5")
    add(aggregator, 0, 1), add(aggregator, 1, 1)
    release(aggregator, (0, 1), live=2)
    again = restored(aggregator)
    for one in (aggregator, again):
        add(one, 0, 2)
    first, second = release(aggregator, (0,), live=2), release(again, (0,), live=2)
    assert list(map(bytes, first.frames[0])) == list(map(bytes, second.frames[0]))
    assert equal(again.parameters, aggregator.parameters) and equal(again.published, aggregator.published)


def test_what_was_published_at_a_moment_is_given_and_nothing_else_if_that_is_not_known():
    aggregator = founded(fragments=1)
    published = {}

    def step(one, now):
        add(one, 0, int(now))
        released = release(one, (0,), live=1)
        one.came(now)
        published[now] = one.published[0].copy()
        return released

    def given(one, moment):
        parts = []
        one.give_leaves(lambda shard, shards, leaves: parts.append((shard, shards, leaves)), moment)
        return [
            (shard, shards, np.concatenate([leaf.ravel() for leaf in leaves.values()]))
            for shard, shards, leaves in parts
        ]

    aggregator.came(1.0)
    for now in (2.0, 3.0):
        step(aggregator, now)
    for moment, at in ((2.0, 2.0), (2.9, 2.0), (3.0, 3.0), (9.0, 3.0)):
        ((shard, shards, values),) = given(aggregator, moment)
        assert (shard, shards) == (0, 1) and np.allclose(values, published[at], atol=1e-6)
    assert np.allclose(given(aggregator, 1.5)[0][2], random_flats(0, 1)[0], atol=1e-6), "since it was founded"
    assert not given(aggregator, 0.5)
    again = restored(aggregator)
    again.came(4.0)
    assert not given(again, 3.5), "what it was restored with may be of a later moment"
    assert np.array_equal(given(again, 4.0)[0][2], published[3.0])


@pytest.mark.parametrize("crash", ["restored", "replayed"])
def test_after_a_restart_a_late_delta_is_corrected_as_if_the_hub_had_gone_on(crash):
    aggregator = founded(staleness="compensation:strength=0.5,versions=4", broadcast="ternary:block=128")
    add(aggregator, 0, 1)
    release(aggregator, (0,), 1)
    again = restored(aggregator)
    if crash == "replayed":
        add(aggregator, 0, 2)
        released = release(aggregator, (0,), 1)
        again.replay(released)
    base = aggregator.version
    for one in (aggregator, again):  # both go on from the same parameters: only what is remembered could differ
        one.parameters = [flat.copy() for flat in one.published]
        add(one, 0, 3, base=base), release(one, (0,), 1)
        add(one, 0, 4, base=base), release(one, (0,), 1)
    assert equal(again.parameters, aggregator.parameters)


def test_arrays_are_named_by_leaf_in_its_shape_and_are_copies():
    aggregator = founded(outer="nesterov:rate=0.8,momentum=0.5")
    arrays = aggregator.arrays()
    kinds = ("parameters", "published", "outer.momentum")
    assert {name: array.shape for name, array in arrays.items() if "/" in name} == {
        f"{kind}/{leaf.path}": leaf.shape for kind in kinds for leaf in MODEL
    }
    arrays["parameters/layer/w"][:] = 0
    assert equal(aggregator.parameters, random_flats(0))


@pytest.mark.parametrize("broadcast", ["float32", "ternary:block=128"])
def test_after_a_replay_the_anchor_is_the_same_and_nothing_is_published_twice(broadcast):
    aggregator = founded(broadcast=broadcast)
    add(aggregator, 0, 1)
    release(aggregator, (0,), live=1)
    again = restored(aggregator)
    add(aggregator, 0, 2)
    again.replay(release(aggregator, (0,), live=1))
    assert again.version == 2 and equal(again.published, aggregator.published)
    step = step_of(again, release(again, (0,), live=1, dense=True), 0)
    assert not step.any()


def test_a_journal_that_cannot_be_read_is_a_checkpoint_error_and_nothing_of_it_is_taken():
    aggregator = founded()
    again = restored(aggregator)
    add(aggregator, 0, 1)
    add(aggregator, 1, 2)
    released = release(aggregator, (0, 1), live=1)
    released.frames[1][0][0] = 1  # a payload of an older version
    before = [flat.copy() for flat in again.published]
    with pytest.raises(CheckpointError, match="remove the journal"):
        again.replay(released)
    assert again.version == 0 and equal(again.published, before)


def test_a_model_larger_than_any_hub_can_hold_is_refused_before_it_is_planned():
    with pytest.raises(ModelMismatch, match="at most"):
        Aggregator(fixed_run()).plan((LeafSpec("w", (1 << 20, 1 << 20), "float32"),))


def test_a_journal_with_a_gap_is_a_checkpoint_error():
    aggregator = founded()
    again = restored(aggregator)
    release(aggregator, (0,), live=1)
    with pytest.raises(CheckpointError, match="from version 0 to 2"):
        again.replay(release(aggregator, (0,), live=1))


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_a_checkpoint_that_lacks_an_array_is_told_which(damage):
    aggregator = founded(outer="nesterov:rate=0.8,momentum=0.5")
    arrays = aggregator.arrays()
    array = arrays.pop("outer.momentum/layer/b")
    if damage != "missing":
        arrays["outer.momentum/layer/b"] = array[:5] if damage == "shape" else array.astype(np.float64)
    with pytest.raises(CheckpointError, match=r"no outer\.momentum of layer/b bfloat16\[10\]"):
        aggregator.restore(0, arrays)


# ---------------------------------------------------------------------- what the outer optimizer sees


OUTERS = [
    "sgd:rate=1",
    "nesterov:rate=0.8,momentum=0.5",
    "delayed_nesterov:rate=0.8,momentum=0.5",
    "delayed_nesterov:rate=0.8,momentum=0.5,share=0.5",
    "adam:rate=0.01",
]


def outer_of(aggregator):
    """Return what a step follows from and leads to, besides what comes."""
    arrays = aggregator.arrays()
    return {name: array for name, array in arrays.items() if name.startswith(("parameters", "outer.", "shares"))}


def equal_outer(ours, theirs):
    return ours.keys() == theirs.keys() and equal(ours.values(), [theirs[name] for name in ours])


@pytest.mark.parametrize("outer", OUTERS)
def test_a_round_of_deltas_that_are_all_dropped_changes_nothing(outer):
    aggregator = founded(outer=outer, max_staleness=1, stale="drop")
    add(aggregator, 0, 1), add(aggregator, 1, 1)
    release(aggregator, (0, 1), live=2)
    before = outer_of(aggregator)
    for seed in (2, 3, 4):
        add(aggregator, 0, seed, too_stale=True)
        assert not moved(aggregator, live=2)[0].any()
    assert equal_outer(outer_of(aggregator), before)


@pytest.mark.parametrize("outer", OUTERS)
def test_a_run_is_the_same_with_dropped_deltas_as_without_them(outer):
    dropping, without = (founded(outer=outer, max_staleness=1, stale="drop") for _ in range(2))
    for seed in range(7):  # of 3 live nodes: a turn is no whole number of rounds
        for aggregator in (dropping, without):
            add(aggregator, 0, seed)
            if seed % 2:
                add(aggregator, 1, seed)
        add(dropping, seed % 2, 50 + seed, too_stale=True)
        fresh = (0, 1) if seed % 2 else (0,)
        for aggregator in (dropping, without):
            release(aggregator, fresh, live=3)
        add(dropping, 0, 60 + seed, too_stale=True)
        add(dropping, 1, 70 + seed, too_stale=True)
        release(dropping, (0, 1), live=3)
        assert equal_outer(outer_of(dropping), outer_of(without))


@pytest.mark.parametrize("outer", OUTERS)
def test_of_two_fragments_in_a_round_the_one_whose_deltas_are_dropped_makes_no_step(outer):
    aggregator = founded(outer=outer, max_staleness=1, stale="drop")
    for late in (False, True):
        add(aggregator, 0, 1), add(aggregator, 1, 2, too_stale=late)
        stepped, kept = moved(aggregator, live=1, fragments=(0, 1))
        assert stepped.any() and kept.any() != late


@pytest.mark.parametrize("outer", OUTERS)
def test_a_sum_that_overflows_leaves_the_outer_optimizer_as_it_was(outer):
    aggregator = founded(outer=outer)
    add(aggregator, 0, 1)
    release(aggregator, (0,), live=2)
    before = outer_of(aggregator)
    add(aggregator, 0, 2, scale=1e35)
    assert release(aggregator, (0,), live=2).overflowed == (0,)
    assert equal_outer(outer_of(aggregator), before)


def test_where_nothing_counts_what_was_not_published_yet_is_published():
    aggregator = founded(broadcast="ternary:block=128", outer=OUTERS[1], max_staleness=1, stale="drop")
    add(aggregator, 0, 1)
    release(aggregator, (0,), live=1)
    apart = [np.linalg.norm(aggregator.parameters[0] - aggregator.published[0])]
    for seed in range(2, 8):
        add(aggregator, 0, seed, too_stale=True)
        assert step_of(aggregator, release(aggregator, (0,), live=1), 0).any()
        apart.append(np.linalg.norm(aggregator.parameters[0] - aggregator.published[0]))
    assert apart[-1] < 0.2 * apart[0]


def test_momentum_that_is_delayed_moves_when_contributions_of_the_whole_federation_have_come():
    delayed, at_once = (
        founded(outer=outer) for outer in ("delayed_nesterov:rate=1,momentum=0.5", "nesterov:rate=1,momentum=0.5")
    )
    start = [flat.copy() for flat in delayed.parameters]
    for turn in range(3):
        for node in range(4):
            add(delayed, 0, 10 * turn + node)
            release(delayed, (0,), 4)
            add(at_once, 0, 10 * turn + node)
        release(at_once, (0,), 4)
        np.testing.assert_allclose(delayed.parameters[0], at_once.parameters[0], rtol=0, atol=1e-5)
    assert not np.allclose(delayed.parameters[0], start[0])


def test_a_turn_that_rounding_has_hidden_is_not_taken_a_second_time():
    aggregator = founded(outer="delayed_nesterov", fragments=1)
    aggregator._shares[0] = 2 / 3 - 1e-9  # sums of shares are off by a little
    whole = tuple(Contribution("a", n, 0, 8, 0.5, 0, 0) for n in range(4))
    assert aggregator._takes_turn(0, Reduce(1, (0,), whole, 3, False))
    assert not aggregator._takes_turn(0, Reduce(2, (0,), whole[:1], 3, False))


def test_the_mean_of_huge_parameters_is_their_mean():
    aggregator = founded(fragments=1)
    huge = [np.abs(flat) * np.float32(5e37) for flat in random_flats(1, 1)]
    frames = encode_snapshot(aggregator.layout, huge)
    mean, why = aggregator.average({"a#1": frames, "b#2": frames, "c#3": frames, "d#4": frames})
    assert why == ""
    np.testing.assert_allclose(decode_snapshot(aggregator.layout, mean)[0], huge[0], rtol=1e-6)


# ---------------------------------------------------------------------- codec and outer optimizer that are fitted


def fitted(**settings):
    aggregator = Aggregator(RunSettings(fragments=2, **settings))
    aggregator.plan(MODEL)
    aggregator.found(encode_snapshot(aggregator.layout, random_flats(0)))
    return aggregator


def release_by(aggregator, codec, outer, live=1):
    contributions = tuple(come(aggregator))
    come(aggregator).clear()
    reduce = Reduce(aggregator.version + 1, (0, 1), contributions, live, False, codec=codec, outer=outer)
    return aggregator.release(reduce)


def test_an_aggregate_is_coded_as_its_release_says_and_what_the_codec_before_left_out_is_published_later():
    aggregator = fitted()
    for seed, codec in enumerate(("ternary:block=128", "topk:density=0.05+sign:block=512", "", "float32")):
        landed = [add(aggregator, fragment, seed, codec or "int8:block=256") for fragment in (0, 1)]
        before = [flat.copy() for flat in aggregator.parameters]
        published = [flat.copy() for flat in aggregator.published]
        released = release_by(aggregator, codec, "sgd:rate=1")
        assert released.codec == (codec or "topk:density=0.05+sign:block=512")
        for fragment, u in enumerate(landed):
            np.testing.assert_allclose(aggregator.parameters[fragment] - before[fragment], u, atol=1e-5)
            assert equal(
                [aggregator.published[fragment] - published[fragment]],
                [(published[fragment] + step_of(aggregator, released, fragment)) - published[fragment]],
            )
    for parameters, published in zip(aggregator.parameters, aggregator.published, strict=True):
        np.testing.assert_allclose(parameters, published, atol=1e-5, err_msg="the last one was exact")


def test_a_momentum_begins_anew_where_the_outer_optimizer_changes_and_lasts_where_it_does_not():
    aggregator, nesterov = fitted(), "nesterov:rate=0.8,momentum=0.5"
    for seed, outer in enumerate((nesterov, "", nesterov)):
        add(aggregator, 0, seed), add(aggregator, 1, seed)
        release_by(aggregator, "float32", outer)
    lasting = aggregator.arrays()["outer.momentum/layer/b"].copy()
    assert np.any(lasting)
    release_by(aggregator, "float32", "sgd:rate=1")
    assert not any(name.startswith("outer.momentum") for name in aggregator.arrays())
    release_by(aggregator, "float32", nesterov)
    assert not np.any(aggregator.arrays()["outer.momentum/layer/b"])


@pytest.mark.parametrize("codec", ["topk:density=0.05+sign:block=512", "int8:block=256", "lowrank:rank=2"])
def test_a_hub_whose_codec_has_changed_is_restored_with_it_and_goes_on_with_the_same_bits(codec):
    def go_on(aggregator):
        for seed in range(3, 6):
            add(aggregator, 0, seed), add(aggregator, 1, seed)
            yield release_by(aggregator, "", "").frames

    aggregator = fitted()
    add(aggregator, 0, 1), add(aggregator, 1, 2)
    release_by(aggregator, codec, "nesterov:rate=0.8,momentum=0.5")
    again = Aggregator(aggregator.settings)
    again.plan(MODEL)
    again.restore(aggregator.version, aggregator.arrays())
    assert (again.broadcast_coding.name, again.outer.name) == (aggregator.broadcast_coding.name, aggregator.outer.name)
    for ours, theirs in zip(go_on(aggregator), go_on(again), strict=True):
        assert [[bytes(frame) for frame in frames] for frames in ours] == [
            [bytes(frame) for frame in frames] for frames in theirs
        ]
    assert equal(aggregator.parameters, again.parameters)


@pytest.mark.parametrize("specs", [b"tern\nsgd:rate=1", b"ternary", b"\xff\n", b"ternary\nsgd:rate=1\nmore"])
def test_codecs_of_a_checkpoint_that_cannot_be_read_are_refused_and_those_of_version_0_1_are_the_settings(specs):
    aggregator = fitted()
    arrays = aggregator.arrays()
    with pytest.raises(CheckpointError, match="codec and outer optimizer"):
        aggregator.restore(0, arrays | {"specs": np.frombuffer(specs, np.uint8)})
    del arrays["specs"]
    aggregator.restore(0, arrays)
    assert (aggregator.broadcast_coding.name, aggregator.outer.name) == (FIRST["broadcast_codec"], FIRST["outer"])
