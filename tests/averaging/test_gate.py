"""The norm gate at the hub's arrays: which of the first deltas count, and when the gate moves."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tests.averaging.aggregators import codecs_of, equal, founded, random_flats
from tests.fixed import fixed_run
from zmqtrain.averaging import aggregator as aggregator_module
from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import cut, encode_snapshot
from zmqtrain.averaging.gate import error_of, reason_of
from zmqtrain.codecs.payload import decode_payload, encode_payload
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Publish

RULES = ["mean", "median"]  # one that adds what comes, one that holds it


class Round:
    """Sends random deltas of fragment 0 to an aggregator as an arrival does, and closes rounds of them."""

    def __init__(self, **settings):
        self.aggregator = founded(fragments=1, **settings)
        self.come, self.sequence = [], 0

    def send(self, peer, scale=0.1, seed=1, dense=False, steps=8, score=0.5, codec="float32"):
        aggregator, self.sequence = self.aggregator, self.sequence + 1
        u = random_flats(seed, 1, scale)[0]
        frames = encode_payload(codecs_of(aggregator, codec, 0), cut(u, aggregator.layout.counts(0)))
        sizes = tuple(len(frame) for frame in frames)
        publish = Publish(1, self.sequence, aggregator.version, 0, codec, sizes, 8, steps, score, dense)
        aggregator.check(publish, frames)
        judgement = aggregator.judge(peer, publish, frames)
        aggregator.count(publish, judgement)
        if (error := error_of(judgement)) is not None:
            return reason_of(error)
        aggregator.accumulate(peer, publish, frames)
        self.come.append(Contribution(peer, self.sequence, 0, 8, score, aggregator.version, 0))
        return u

    def close(self, live):
        reduce = Reduce(self.aggregator.version + 1, (0,), tuple(self.come), live, dense=False)
        self.come = []
        return self.aggregator.release(reduce)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("first", [True, False])
def test_a_first_delta_that_is_far_larger_than_the_others_of_its_round_is_none_of_the_sum(rule, first):
    here, without = Round(aggregate=rule), Round(aggregate=rule)
    if first:
        here.send("bad", scale=30.0)
    for at in (here, without):
        at.send("a"), at.send("b", seed=2)
    if not first:
        here.send("bad", scale=30.0)
    released = here.close(live=3)
    without.close(live=2)
    ((left_out, judgement),) = released.left_out
    assert left_out.peer == "bad" and "times that of the other nodes' in this round" in judgement.why
    assert equal(here.aggregator.parameters, without.aggregator.parameters), "as if it were not one of the mean"


@pytest.mark.parametrize("rule", RULES)
def test_a_round_of_which_nobody_is_left_out_is_what_it_is_without_a_gate(rule):
    gated, open_ = Round(aggregate=rule), Round(aggregate=rule, norm_gate="none")
    for at in (gated, open_):
        for seed, peer in enumerate(("a", "b", "c"), 1):
            at.send(peer, seed=seed)
        assert at.close(live=3).left_out == ()
    assert equal(gated.aggregator.parameters, open_.aggregator.parameters)


def test_once_enough_have_been_seen_what_is_too_large_is_refused_when_it_comes():
    here = Round()
    for _ in range(4):
        here.send("a"), here.send("b")
        here.close(live=2)
    assert here.send("bad", scale=3.0) == "norm" and here.send("bad", scale=1e6) == "enormous"
    assert not here.aggregator._judged and not here.aggregator._waiting


def test_what_was_left_out_of_the_first_rounds_is_not_the_measure_of_those_that_follow():
    here = Round()
    for _ in range(7):
        here.send("a"), here.send("bad", scale=30.0)
        assert [one.peer for one, _ in here.close(live=2).left_out] == ["bad"]
    here.send("a")
    assert here.send("bad", scale=30.0) == "norm"


@pytest.mark.parametrize(
    ("codec", "passes"), [("ternary", False), ("float32", False), ("topk:density=0.01+int4", True)]
)
def test_what_a_node_has_left_is_judged_as_any_delta_unless_its_codec_leaves_much(codec, passes):
    here = Round()
    for _ in range(4):
        here.send("a", codec=codec), here.send("b", codec=codec)
        here.close(live=2)
    outcome = here.send("a", scale=3.0, dense=True, steps=0)
    assert isinstance(outcome, np.ndarray) if passes else outcome == "norm"
    assert here.send("a", scale=30.0, dense=True, steps=0) == "norm"


def test_what_is_judged_and_never_counts_moves_nothing():
    here = Round()
    for _ in range(4):
        here.send("a"), here.send("b")
        here.close(live=2)
    before = here.aggregator.gate.memory().tolist()
    u = random_flats(9, 1, 0.5)[0]
    frames = encode_payload(codecs_of(here.aggregator, "float32", 0), cut(u, here.aggregator.layout.counts(0)))
    publish = Publish(1, 99, 0, 0, "float32", tuple(len(frame) for frame in frames), 8, 8, 0.5)
    for _ in range(100):
        assert here.aggregator.judge("c", publish, frames).why == ""
    assert here.send("d", scale=3.0) == "norm", "what was not heard of to the end has raised the usual size"
    assert here.aggregator.gate.memory().tolist() == before and not here.aggregator._judged


def nodes_anchor(aggregator, releases, start):
    """What a node has that has applied these, to the bit."""
    anchor = [flat.copy() for flat in start]
    for released in releases:
        codecs, counts = codecs_of(aggregator, released.codec, 0), aggregator.layout.counts(0)
        anchor[0] += decode_payload(codecs, released.frames[0], counts)
    return anchor


@pytest.mark.parametrize("broadcast", ["int8", "ternary"])
@pytest.mark.parametrize("outer", ["sgd:rate=1", "nesterov:rate=0.8,momentum=0.5", "adam:rate=0.01"])
def test_what_was_published_since_a_node_diverged_is_taken_back_and_all_anchors_stay_equal(broadcast, outer):
    here = Round(broadcast=broadcast, outer=outer)
    aggregator = here.aggregator
    start, releases = [flat.copy() for flat in aggregator.published], []
    for _ in range(2):
        here.send("a"), here.send("b"), here.send("bad")
        releases.append(here.close(live=3))
    before = [flat.copy() for flat in aggregator.published]
    for peer, scale in (("bad", 0.9), ("a", 0.1), ("b", 0.1), ("bad", 0.9)):
        here.send(peer, scale)
        releases.append(here.close(live=3))
    assert aggregator.version_before("bad") == 2 and aggregator.version_before("a") == -1
    here.send("a")  # in the sum, and of no version
    here.come.clear()
    releases.append(aggregator.release(Reduce(7, (0,), (), 3, dense=True, back_to=2)))
    np.testing.assert_allclose(aggregator.published[0], before[0], rtol=0, atol=1e-5)
    assert equal(aggregator.published, aggregator.parameters) and aggregator.version == 7
    fresh = aggregator.outer.init(before[0].size)
    assert all(np.array_equal(array, fresh[key]) for key, array in aggregator._outer_state[0].items())
    assert equal(nodes_anchor(aggregator, releases, start), aggregator.published)
    assert aggregator.version_before("bad") == -1, "once is enough"
    releases.append(here.close(live=3))
    assert equal(nodes_anchor(aggregator, releases, start), aggregator.published)
    np.testing.assert_allclose(aggregator.published[0], before[0], rtol=0, atol=1e-5)


def test_versions_are_taken_back_in_little_more_memory_than_what_is_sent_for_that():
    values = 1 << 18
    aggregator = Aggregator(fixed_run(fragments=4, outer="nesterov:rate=0.8,momentum=0.5"))
    aggregator.plan((LeafSpec("w", (values,), "float32"),))
    tracemalloc.start()
    try:
        aggregator.found(encode_snapshot(aggregator.layout, aggregator.layout.split([np.ones(values, np.float32)])))
        aggregator.release(Reduce(1, (0, 1, 2, 3), (), 1, dense=True))
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        aggregator.release(Reduce(2, (0, 1, 2, 3), (), 1, dense=True, back_to=0))
        assert tracemalloc.get_traced_memory()[1] - before < 2.75 * 4 * values
    finally:
        tracemalloc.stop()


def test_deltas_that_were_large_when_all_were_are_taken_back_from_nobody():
    here = Round(broadcast="int8")
    for scale in (0.9, 0.8, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1):  # a run that converges
        here.send("a", scale), here.send("b", scale), here.send("bad", 1.5 * scale)
        here.close(live=3)
    assert here.aggregator.version_before("bad") == -1


def test_a_broker_started_again_on_its_journal_has_what_was_taken_back():
    here, again = Round(), founded(fragments=1)
    releases = []
    for scale in (0.1, 0.1, 0.9):
        here.send("a"), here.send("bad", scale)
        releases.append(here.close(live=2))
    releases.append(here.aggregator.release(Reduce(4, (0,), (), 2, dense=True, back_to=2)))
    for released in releases:
        again.replay(released)
    assert equal(again.published, here.aggregator.published) and again.version == 4


def test_the_record_of_what_was_published_is_bounded(monkeypatch):
    monkeypatch.setattr(aggregator_module, "RECORD_EXCHANGES", 3)
    here = Round(broadcast="ternary")
    for _ in range(9):
        here.send("a")
        here.close(live=1)
    assert [released.version for released, _ in here.aggregator._record] == [7, 8, 9]
    monkeypatch.setattr(aggregator_module, "RECORD_EXCHANGES", 32)
    monkeypatch.setattr(aggregator_module, "RECORD_BYTES", 0)
    dense = Round(broadcast="float32")
    for _ in range(9):
        dense.send("a")
        dense.close(live=1)
    assert len(dense.aggregator._record) == 2
