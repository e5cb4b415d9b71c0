"""The hub's side of the one equation: mean over live, outer step, publish what the parameters are ahead."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import decode_payload, encode_payload
from zmqtrain.errors import CheckpointError, CodecError, ConfigError, ModelMismatch
from zmqtrain.protocol.messages import Publish, Reduce
from zmqtrain.runtime.aggregator import Aggregator
from zmqtrain.runtime.delta import cut, decode_snapshot, encode_snapshot
from zmqtrain.settings import RunSettings
from zmqtrain.types import LeafSpec

MODEL = (LeafSpec("layer/w", (3, 4096), "float32"), LeafSpec("layer/b", (10,), "bfloat16"))


def random_flats(seed, fragments=2, scale=1.0):
    layout, random = Layout(MODEL, fragments), np.random.default_rng(seed)
    sizes = [sum(layout.counts(f)) for f in range(fragments)]
    return [random.standard_normal(size).astype(np.float32) * np.float32(scale) for size in sizes]


def founded(codec="float32", broadcast="float32", outer="sgd:rate=1", fragments=2):
    aggregator = Aggregator(RunSettings(codec=codec, broadcast_codec=broadcast, outer=outer, fragments=fragments))
    aggregator.plan(MODEL)
    frames = encode_snapshot(aggregator.layout, random_flats(0, fragments))
    aggregator.check_snapshot(frames)
    aggregator.found(frames)
    return aggregator


def codecs_of(aggregator, codec, fragment):
    return coding_from_spec(codec).of_fragment(aggregator.layout, fragment)


def add(aggregator, fragment, seed, codec="float32"):
    u = random_flats(seed, aggregator.settings.fragments, 0.1)[fragment]
    frames = encode_payload(codecs_of(aggregator, codec, fragment), cut(u, aggregator.layout.counts(fragment)))
    publish = Publish(1, 1, 0, fragment, codec, tuple(len(f) for f in frames), 8, 8, 0.5)
    assert sum(publish.sizes) <= aggregator.publish_bound(publish)
    aggregator.check(publish, frames)
    aggregator.accumulate(publish, frames)
    return decode_payload(codecs_of(aggregator, codec, fragment), frames, aggregator.layout.counts(fragment))


def release(aggregator, fragments, live, dense=False):
    return aggregator.release(Reduce(aggregator.version + 1, fragments, (), live, 8, dense))


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
        aggregator.check_snapshot(frames)


def test_a_sum_that_overflows_is_not_used():
    aggregator = founded()
    for _ in range(2):
        huge = [np.full(count, 3e38, np.float32) for count in aggregator.layout.counts(0)]
        frames = encode_payload(codecs_of(aggregator, "float32", 0), huge)
        aggregator.accumulate(Publish(1, 1, 0, 0, "float32", (), 8, 8, 0.5), frames)
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


def test_arrays_are_named_by_leaf_in_its_shape_and_are_copies():
    aggregator = founded(outer="nesterov:rate=0.8,momentum=0.5")
    arrays = aggregator.arrays()
    kinds = ("parameters", "published", "outer.momentum")
    assert {name: array.shape for name, array in arrays.items()} == {
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
