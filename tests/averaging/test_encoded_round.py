"""The law of encoded rounds: what is held and released part by part has the bits of the one equation, of the sum in
memory, and of any number of threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.averaging import held_rounds
from zmqtrain.averaging.aggregator import LARGEST_SUM, Aggregator
from zmqtrain.averaging.coder import cut, encode_snapshot
from zmqtrain.averaging.held_rounds import LEAST_VALUES, MOST_DENSE, EncodedRound, SlabThreads
from zmqtrain.codecs import fast
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.payload import decode_payload, encode_payload, initial_states
from zmqtrain.core.errors import NonFiniteDelta
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Publish
from zmqtrain.strategies.outer import outer_from_spec

MODEL = tuple(LeafSpec(f"leaf{n}", (size,), "float32") for n, size in enumerate((900, 10, 3000, 64, 1, 700, 257)))
UP = ["topk:density=0.1+sign", "topk:density=0.05+int8;<20=float32", "randomk:density=0.2+bf16"]
UP += ["blocktopk:keep=3+float32", "int8", "float32", "ternary", "ternary:block=7"]
OUTER = ["sgd:rate=1", "sgd:rate=0.7", "nesterov", "nesterov:rate=0.7,momentum=0"]
DOWN = ["topk:density=0.1+sign", "topk:density=0.3+int8;<20=float32", "randomk:density=0.2+int8", "ternary", "float32"]


@pytest.fixture(autouse=True)
def back_to_the_start():
    yield
    fast.use(None)


class Equation:
    """The one equation at the hub, in whole vectors and in numpy: what every way of computing it must equal."""

    def __init__(self, layout, down, outer, first):
        self.layout, self.coding, self.outer = layout, coding_from_spec(down), outer_from_spec(outer)
        self.parameters, self.published = [flat.copy() for flat in first], [flat.copy() for flat in first]
        self.sums = [np.zeros_like(flat) for flat in first]
        self.states = [initial_states(*self.coded(self.coding, fragment)) for fragment in range(len(first))]
        self.outer_state = [self.outer.init(flat.size) for flat in first]
        self.counted = set()

    def coded(self, coding, fragment):
        return coding.of_fragment(self.layout, fragment), self.layout.counts(fragment)

    def add(self, codec, fragment, frames, too_stale):
        codecs, counts = self.coded(coding_from_spec(codec), fragment)
        decode_payload(codecs, frames, counts, out=self.sums[fragment], add=True)
        if not too_stale:
            self.counted.add(fragment)

    def release(self, live, dense, plain):
        frames = []
        for fragment, total in enumerate(self.sums):
            codecs, counts = self.coded(coding_from_spec("float32") if dense else self.coding, fragment)
            if fragment in self.counted and np.abs(total).max() < LARGEST_SUM:
                mean = total / np.float32(live)
                step = mean if plain else self.outer.update(mean, self.outer_state[fragment], True)
                self.parameters[fragment] += step
            total[:] = 0
            rest = cut(self.parameters[fragment] - self.published[fragment], counts)
            frames.append(encode_payload(codecs, rest, None if dense else self.states[fragment]))
            decode_payload(codecs, frames[-1], counts, out=self.published[fragment], add=True)
        self.counted.clear()
        return tuple(frames)


class Pair:
    """Two hubs that are given the same: one holds what is encoded, the other never does."""

    def __init__(self, down="topk:density=0.1+sign", outer="sgd:rate=1", threads=1, fragments=1):
        settings = RunSettings(broadcast_codec=down, outer=outer, fragments=fragments)
        self.sparse, self.dense = Aggregator(settings), Aggregator(settings)
        self.sparse.encoded = EncodedRound(self.sparse.meter, SlabThreads(threads, least_values=0))
        self.dense.encoded = EncodedRound(self.dense.meter, enabled=False)
        self.random = np.random.default_rng(1)
        for aggregator in (self.sparse, self.dense):
            aggregator.plan(MODEL)
        self.layout = self.sparse.layout
        first = [self.values(fragment) for fragment in range(fragments)]
        for aggregator in (self.sparse, self.dense):
            aggregator.found(encode_snapshot(self.layout, first))
        self.equation = Equation(self.layout, down, outer, first)
        self.come = []

    def values(self, fragment, scale=1.0):
        return self.random.standard_normal(sum(self.layout.counts(fragment)), np.float32) * np.float32(scale)

    def add(self, codec, *, fragment=0, scale=0.1, too_stale=False):
        codecs = coding_from_spec(codec).of_fragment(self.layout, fragment)
        frames = encode_payload(codecs, cut(self.values(fragment, scale), self.layout.counts(fragment)))
        sequence = len(self.come)
        publish = Publish(1, sequence, 0, fragment, codec, tuple(map(len, frames)), 8, 8, 0.5)
        for aggregator in (self.sparse, self.dense):
            aggregator.check(publish, frames)
            aggregator.accumulate("a", publish, frames[::-1])
        self.equation.add(codec, fragment, frames, too_stale)
        self.come.append(Contribution("a", sequence, fragment, 8, 0.5, 0, 0, too_stale))

    def release(self, live=3, *, dense=False, plain=False, codec="", outer=""):
        contributions, self.come = tuple(self.come), []
        fragments = tuple(range(self.layout.fragments))
        reduce = Reduce(self.sparse.version + 1, fragments, contributions, live, dense, plain, codec=codec, outer=outer)
        ours, theirs = (aggregator.release(reduce) for aggregator in (self.sparse, self.dense))
        assert ours == theirs
        self.compare()
        return ours

    def compare(self):
        ours, theirs = self.sparse.arrays(), self.dense.arrays()
        assert {name: array.tobytes() for name, array in ours.items()} == {
            name: array.tobytes() for name, array in theirs.items()
        }
        assert self.sparse.meter.noise == self.dense.meter.noise
        for total in (*self.sparse._sums, *self.dense._sums):
            assert not total.any()


adding = st.tuples(
    st.sampled_from(UP),
    st.integers(0, 1),
    st.sampled_from([0.1, 1e-30, 1e18, 3e29]),
    st.sampled_from([False] * 5 + [True]),
)
rounds = st.lists(
    st.tuples(
        st.lists(adding, max_size=5),
        st.integers(1, 7),
        st.sampled_from([(False, False)] * 3 + [(True, False), (True, True)]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("machine_code", [True, False], ids=["numba", "numpy"])
@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=examples(40), deadline=None)
@given(
    rounds=rounds,
    down=st.sampled_from(DOWN),
    outer=st.sampled_from(OUTER),
)
def test_any_rounds_have_the_bits_of_the_sum_in_memory(machine_code, threads, rounds, down, outer):
    fast.use(machine_code)
    kept, held_rounds.PART_VALUES = held_rounds.PART_VALUES, 500
    try:
        pair = Pair(down, outer, threads, fragments=2)
        for contributions, live, (dense, plain) in rounds:
            for codec, fragment, scale, too_stale in contributions:
                pair.add(codec, fragment=fragment, scale=scale, too_stale=too_stale)
            ours = pair.release(live, dense=dense, plain=plain)
            fast.use(False)
            assert ours.frames == pair.equation.release(live, dense, plain)
            fast.use(machine_code)
            for known, wanted in (("parameters", pair.equation.parameters), ("published", pair.equation.published)):
                for one, other in zip(getattr(pair.sparse, known), wanted, strict=True):
                    assert one.tobytes() == other.tobytes()
            for known, wanted in zip(pair.sparse._outer_state, pair.equation.outer_state, strict=True):
                assert {name: array.tobytes() for name, array in known.items()} == {
                    name: array.tobytes() for name, array in wanted.items()
                }
    finally:
        held_rounds.PART_VALUES = kept


def test_sparse_publishes_are_held_and_no_sum_is_made_in_memory():
    pair = Pair()
    pair.add("topk:density=0.1+sign")
    pair.add("topk:density=0.1+sign")
    assert pair.sparse.encoded.holds(0) and not pair.sparse._sums[0].any()
    assert pair.dense._sums[0].any()
    pair.release()
    assert not pair.sparse.encoded.holds(0)


def test_a_drain_among_sparse_publishes_is_added_in_the_order_in_which_they_came():
    pair = Pair()
    for codec in ("topk:density=0.1+sign", "float32"):
        pair.add(codec, scale=1000.0)
    assert not pair.sparse.encoded.holds(0) and pair.sparse._sums[0].any()
    pair.add("topk:density=0.1+sign", scale=1000.0)
    assert pair.sparse.encoded.holds(0)  # onto what lies in memory
    pair.release()


@pytest.mark.parametrize("threads", [1, 3])
def test_of_publishes_that_send_every_value_a_few_are_held_and_then_added_in_one_pass(threads):
    pair = Pair("ternary", threads=threads)
    for number in range(2 * MOST_DENSE + 1):
        pair.add("ternary")
        assert pair.sparse.encoded.holds(0)
        assert pair.sparse._sums[0].any() == (number >= MOST_DENSE)
    pair.release()


def test_a_sum_that_may_overflow_is_made_in_memory_and_not_used_if_it_does():
    pair = Pair()
    for _ in range(3):
        pair.add("topk:density=0.1+sign", scale=1e28)
    assert pair.release().overflowed == ()  # twice the mean of the largest: a bound of the sum is not the sum
    for _ in range(2):
        pair.add("topk:density=0.1+sign", scale=5e37)
    assert pair.release().overflowed == (0,)


def test_what_is_held_never_has_more_bytes_than_the_sum():
    pair = Pair()
    for _ in range(70):
        pair.add("topk:density=0.1+sign")
        held = sum(len(frame) for one in pair.sparse.encoded._fragments[0].held for frame in one.frames)
        assert held <= pair.sparse._sums[0].nbytes
    assert pair.sparse._sums[0].any()
    pair.release()


def test_an_outer_optimizer_with_a_state_steps_part_by_part_too():
    pair = Pair(outer="nesterov")
    pair.add("topk:density=0.1+sign")
    assert pair.sparse.encoded.holds(0)
    pair.release()


def test_codec_and_outer_optimizer_may_change_while_publishes_are_held():
    pair = Pair()
    for codec, outer in (("int8", ""), ("", "sgd:rate=0.5"), ("topk:density=0.1+sign", "nesterov"), ("", "sgd:rate=1")):
        pair.add("topk:density=0.1+sign")
        pair.add("randomk:density=0.2+bf16")
        pair.release(codec=codec, outer=outer)


def test_what_is_held_is_dropped_when_versions_are_taken_back():
    pair = Pair()
    pair.add("topk:density=0.1+sign")
    pair.release()
    pair.add("topk:density=0.1+sign")
    reduce = Reduce(2, (0,), (), 1, True, back_to=0)
    assert pair.sparse.release(reduce) == pair.dense.release(reduce)
    assert not pair.sparse.encoded.holds(0)
    pair.compare()


def test_a_checkpoint_of_a_sparse_run_is_gone_on_from():
    pair = Pair("randomk:density=0.2+int8")
    for _ in range(2):
        pair.add("topk:density=0.1+sign")
        pair.release()
    again = Aggregator(pair.sparse.settings)
    again.plan(MODEL)
    again.restore(pair.sparse.version, pair.sparse.arrays())
    pair.sparse = again
    pair.add("topk:density=0.1+sign")
    assert again.encoded.holds(0)
    pair.release()


@pytest.mark.parametrize("threads", [1, 3])
def test_all_items_are_done_once_and_the_earliest_error_is_raised(threads):
    workers, done, lock = SlabThreads(threads, least_values=0), [], threading.Lock()

    def work(item):
        with lock:
            done.append(item)
        if item in (7, 9):
            raise ValueError(str(item))

    workers.each(work, [n for n in range(7)], 1)
    assert sorted(done) == [*range(7)]
    with pytest.raises(ValueError, match="7"):
        workers.each(work, [*range(20)], 1)


def test_a_large_fragment_is_shared_with_idle_cores_and_a_small_one_with_none(monkeypatch):
    monkeypatch.setattr(held_rounds.os, "sched_getaffinity", lambda _: range(8), raising=False)
    for load, threads in [(0.3, 4), (1.2, 4), (6.0, 3), (7.4, 2), (8.0, 1), (30.0, 1)]:
        monkeypatch.setattr(held_rounds.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert [SlabThreads().count(values) for values in (LEAST_VALUES - 1, LEAST_VALUES)] == [1, threads]


@pytest.mark.parametrize("threads", [1, 3])
def test_of_a_release_that_cannot_be_coded_nothing_is_published(monkeypatch, threads):
    monkeypatch.setattr(held_rounds, "PART_VALUES", 1)
    pair = Pair("topk:density=0.1+sign;leaf5=int8", threads=threads)
    pair.add("topk:density=0.1+sign")
    before = pair.sparse.published[0].copy()
    for aggregator in (pair.sparse, pair.dense):
        aggregator.parameters[0][-1] = np.inf  # what no delta can do
        with pytest.raises(NonFiniteDelta, match="segment 6 of 7"):
            aggregator.release(Reduce(1, (0,), tuple(pair.come), 1, False))
    assert np.array_equal(pair.sparse.published[0], before)
    assert np.array_equal(pair.dense.published[0], before)
    assert np.array_equal(pair.sparse.parameters[0], pair.dense.parameters[0])
    assert not pair.sparse.encoded.holds(0)
