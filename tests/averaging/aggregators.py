"""A hub's arrays to try, and publishes of random values for them: what the tests of the equation at the hub share."""

from __future__ import annotations

import numpy as np

from tests.fixed import fixed_run
from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import cut, encode_snapshot
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import decode_payload, encode_payload
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Publish, Snapshot

MODEL = (LeafSpec("layer/w", (3, 4096), "float32"), LeafSpec("layer/b", (10,), "bfloat16"))


def random_flats(seed, fragments=2, scale=1.0):
    layout, random = Layout(MODEL, fragments), np.random.default_rng(seed)
    sizes = [sum(layout.counts(f)) for f in range(fragments)]
    return [random.standard_normal(size).astype(np.float32) * np.float32(scale) for size in sizes]


def announced(frames):
    return Snapshot(1, 0, tuple(len(frame) for frame in frames))


def founded(codec="float32", broadcast="float32", outer="sgd:rate=1", fragments=2, **settings):
    settings = {"broadcast_codec": broadcast, "outer": outer, "fragments": fragments} | settings
    aggregator = Aggregator(fixed_run(codec=codec, **settings))
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
    aggregator.check_sizes(publish)
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


def moved(aggregator, live, fragments=(0,)):
    before = [flat.copy() for flat in aggregator.parameters]
    release(aggregator, fragments, live)
    return [after - flat for after, flat in zip(aggregator.parameters, before, strict=True)]
