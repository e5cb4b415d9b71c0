"""The hub's side of the one equation: mean over live, outer step, publish what the parameters are ahead."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import decode_payload, encode_payload
from zmqtrain.errors import CheckpointError, CodecError, ConfigError, ModelMismatch
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Publish, Snapshot
from zmqtrain.runtime.equation.aggregator import Aggregator
from zmqtrain.runtime.equation.delta import cut, decode_snapshot, encode_snapshot
from zmqtrain.settings import RunSettings
from zmqtrain.types import LeafSpec

MODEL = (LeafSpec("layer/w", (3, 4096), "float32"), LeafSpec("layer/b", (10,), "bfloat16"))


def random_flats(seed, fragments=2, scale=1.0):
    layout, random = Layout(MODEL, fragments), np.random.default_rng(seed)
    sizes = [sum(layout.counts(f)) for f in range(fragments)]
    return [random.standard_normal(size).astype(np.float32) * np.float32(scale) for size in sizes]


def announced(frames):
    return Snapshot(1, 0, tuple(len(frame) for frame in frames))


def founded(codec="float32", broadcast="float32", outer="sgd:rate=1", fragments=2, **settings):
    settings = {"broadcast_codec": broadcast, "outer": outer, "fragments": fragments} | settings
    aggregator = Aggregator(RunSettings(codec=codec, **settings))
    aggregator.plan(MODEL)
    frames = encode_snapshot(aggregator.layout, random_flats(0, fragments))
    aggregator.check_snapshot(announced(frames), frames)
    aggregator.found(frames)
    return aggregator


def codecs_of(aggregator, codec, fragment):
    return coding_from_spec(codec).of_fragment(aggregator.layout, fragment)


def come(aggregator):
    return vars(aggregator).setdefault("come", [])


def add(aggregator, fragment, seed, codec="float32", *, scale=0.1, score=0.5, samples=8, base=0, too_stale=False):
    u = random_flats(seed, aggregator.settings.fragments, scale)[fragment]
    frames = encode_payload(codecs_of(aggregator, codec, fragment), cut(u, aggregator.layout.counts(fragment)))
    sequence = len(come(aggregator))
    publish = Publish(1, sequence, base, fragment, codec, tuple(len(f) for f in frames), samples, 8, score)
    assert sum(publish.sizes) <= aggregator.publish_bound(publish)
    aggregator.check(publish, frames)
    aggregator.accumulate("a", publish, frames)
    staleness = aggregator.version - base
    come(aggregator).append(Contribution("a", sequence, fragment, samples, score, base, staleness, too_stale))
    return decode_payload(codecs_of(aggregator, codec, fragment), frames, aggregator.layout.counts(fragment))


def release(aggregator, fragments, live, dense=False, plain=False):
    contributions = tuple(come(aggregator))
    come(aggregator).clear()
    return aggregator.release(Reduce(aggregator.version + 1, fragments, contributions, live, dense, plain))


def step_of(aggregator, released, fragment):
    frames = released.frames[released.fragments.index(fragment)]
    return decode_payload(codecs_of(aggregator, released.codec, fragment), frames, aggregator.layout.counts(fragment))


def equal(ours, theirs):
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


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


def test_a_snapshot_is_what_was_published_and_is_made_once_a_version():
    aggregator = founded(broadcast="ternary:block=128")
    add(aggregator, 0, 1)
    release(aggregator, (0,), live=1)
    version, frames = aggregator.snapshot()
    assert version == 1 and aggregator.snapshot()[1] is frames
    assert equal(decode_snapshot(aggregator.layout, frames), aggregator.published)
    assert sum(len(frame) for frame in frames) <= aggregator.snapshot_bound()
    release(aggregator, (0,), live=1)
    assert aggregator.snapshot()[0] == 2


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
        Aggregator(RunSettings()).plan((LeafSpec("count", (3,), "int32"),))
    with pytest.raises(ConfigError, match="fragments"):
        Aggregator(RunSettings(fragments=9)).plan((LeafSpec("w", (3,), "float32"),))


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
        Aggregator(RunSettings()).plan((LeafSpec("w", (1 << 20, 1 << 20), "float32"),))


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


# ---------------------------------------------------------------------- rules that look at a whole round


def moved(aggregator, live, fragments=(0,)):
    before = [flat.copy() for flat in aggregator.parameters]
    release(aggregator, fragments, live)
    return [after - flat for after, flat in zip(aggregator.parameters, before, strict=True)]


def test_a_round_that_is_held_and_weighs_all_alike_makes_the_same_step_as_one_that_is_added_at_once():
    streamed, held = founded(), founded(staleness="polynomial:power=0.5")
    assert held.holds and not streamed.holds
    for seed in (1, 2, 3):
        add(streamed, 0, seed), add(held, 0, seed)
    for mine, theirs in zip(moved(held, 4), moved(streamed, 4), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_who_is_not_selected_counts_nothing_and_the_rest_count_for_it():
    aggregator = founded(selection="healthy:factor=1.1")
    good = [add(aggregator, 0, seed, score=1.0) for seed in (1, 2, 3)]
    add(aggregator, 0, 4, score=5.0, scale=10.0)
    np.testing.assert_allclose(moved(aggregator, 4)[0], np.mean(good, axis=0), rtol=0, atol=1e-6)


def test_weighted_weighs_by_samples():
    aggregator = founded(aggregate="weighted")
    few, many = add(aggregator, 0, 1, samples=1), add(aggregator, 0, 2, samples=3)
    np.testing.assert_allclose(moved(aggregator, 2)[0], (few + 3 * many) / 4, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["median", "trimmed:share=0.34", "clipped:factor=2"])
def test_one_hostile_delta_moves_a_robust_aggregate_no_further_than_the_others_do(rule):
    aggregator = founded(aggregate=rule)
    good = [add(aggregator, 0, seed) for seed in (1, 2)]
    add(aggregator, 0, 3, scale=1e20)
    step = moved(aggregator, 3)[0]
    assert np.linalg.norm(step) <= 2 * max(np.linalg.norm(u) for u in good)


def test_a_late_delta_is_damped_by_its_own_staleness_alone():
    aggregator = founded(staleness="polynomial:power=1")
    for _ in range(3):
        add(aggregator, 0, 9), release(aggregator, (0,), 1)
    fresh, late = add(aggregator, 0, 1, base=3), add(aggregator, 0, 2, base=0)
    np.testing.assert_allclose(moved(aggregator, 2)[0], (fresh + late / 4) / 2, rtol=0, atol=1e-6)


def test_what_is_too_stale_lands_and_counts_nothing_where_the_run_drops_it():
    aggregator = founded(max_staleness=1, stale="drop")
    fresh = add(aggregator, 0, 1)
    add(aggregator, 0, 2, too_stale=True)
    np.testing.assert_allclose(moved(aggregator, 2)[0], fresh / 2, rtol=0, atol=1e-6)
    add(aggregator, 0, 3, too_stale=True)
    assert not moved(aggregator, 2)[0].any()


def test_a_compensated_delta_is_corrected_by_what_was_published_since_its_base():
    aggregator = founded(staleness="compensation:strength=0.5,versions=4")
    first = add(aggregator, 0, 1)
    release(aggregator, (0,), 1)
    again = add(aggregator, 0, 1, base=0)  # the very way the shared parameters have gone meanwhile
    step = moved(aggregator, 1)[0]
    assert 0 < np.vdot(step, again) < np.vdot(again, again) and np.vdot(first, first) > 0
    fresh = add(aggregator, 0, 1, base=2)
    np.testing.assert_allclose(moved(aggregator, 1)[0], fresh, rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("rule", ["weighted", "mean"])
def test_of_a_weighted_mean_one_delta_is_decoded_at_a_time(rule, monkeypatch):
    aggregator = founded(aggregate=rule, staleness="polynomial:power=1", fragments=1)
    for seed in range(6):
        add(aggregator, 0, seed)
    living, most, decode = weakref.WeakValueDictionary(), [0], aggregator._decode

    def counting(publish, frames, out=None):
        u = decode(publish, frames, out)
        living[publish.sequence] = u
        most[0] = max(most[0], len(living))
        return u

    monkeypatch.setattr(aggregator, "_decode", counting)
    release(aggregator, (0,), 6)
    assert most[0] <= 2


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
