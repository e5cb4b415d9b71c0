"""A node of several brokers, whose lines are the test: numbers, order, and the laws of the equation over all shards."""

from __future__ import annotations

import math
import threading
from collections import deque
from itertools import count
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clocks import VirtualClock
from tests.fixed import fixed_run
from tests.grids import examples
from tests.stated import Stated
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import AggregateTimeout, JoinRefused
from zmqtrain.core.types import ExchangeStatistics, LeafSpec, Part, Update
from zmqtrain.node.offers import Offers, Restarts
from zmqtrain.node.shards import ShardedNode
from zmqtrain.node.units import UnitQueue
from zmqtrain.train.sync import DelayedSync

SHAPES = {"a": (3, 4096), "b": (5,), "c": (4, 4100)}


class Hub:
    """One broker as the lines see it: the plain mean, uncompressed. published: the anchors by version."""

    def __init__(self, settings, shard):
        self.settings, self.shard, self.lines = settings, shard, []
        self.published, self.waiting = [], []

    def begin(self, layout, leaves):
        self.layout = layout
        self.published = [layout.split(leaves)]

    def release(self):
        if not self.waiting:
            return
        taken, self.waiting = self.waiting, []
        if self.settings.release == "all":  # one of each
            taken, self.waiting = taken[: len(self.lines)], taken[len(self.lines) :]
        anchor, aggregate = [flat.copy() for flat in self.published[-1]], {}
        for fragment in sorted({offer.fragment for _, offer in taken}):
            total = sum(np.concatenate(offer.segments) for _, offer in taken if offer.fragment == fragment)
            step = (total / np.float32(len(self.lines))).astype(np.float32)
            anchor[fragment] += step
            aggregate[fragment] = self.cut(fragment, step)
        self.published.append(anchor)
        for line in self.lines:
            mine = [offer for owner, offer in taken if owner is line]
            counts = [o for o in mine if o.sequence >= line.fresh]  # before that all is dropped
            own = {f: [o for o in counts if o.fragment == f] for f in {o.fragment for o in counts}}
            sums = {f: self.cut(f, sum(np.concatenate(o.segments) for o in offers)) for f, offers in own.items()}
            landed = tuple(offer.sequence for offer in mine)
            line.inbox.append(Update(len(self.published) - 1, aggregate, sums, landed))

    def cut(self, fragment, flat):
        return np.split(flat, np.cumsum(self.layout.counts(fragment))[:-1])

    def snapshot(self):
        parts = enumerate(self.layout.join(self.published[-1]))
        anchor = [Part(leaf, self.layout.part(leaf).start, values) for leaf, values in parts if values.size]
        return Update(len(self.published) - 1, {}, {}, anchor=anchor)


def sharded(first, open_line):
    """A node whose connections to the other brokers are the test's; open_line: a function of their address."""
    node = ShardedNode(first, None, 1.0)
    node.open_line = open_line
    return node


class FakeLine(Stated):
    """A `Node` at one such broker, with a real node's book of offers."""

    clock, name, is_evaluator, message_delay, waiting_for = VirtualClock(), "pc", False, None, ""
    closings = count()
    batches = batches_as_they_come = report_scores = None  # nobody trains by units or scores here

    def __init__(self, hub, first, at):
        self.hub, self.settings, self.shard, self.at = hub, hub.settings, hub.shard, at
        self.address, self.peer_id, self.run = f"tcp://hub:{hub.shard}", f"pc#{hub.shard}", "run-1"
        self.inbox, self.offers, self.closed = deque(), Offers(), False
        self.peer = SimpleNamespace(founding=int(first))
        self.link = SimpleNamespace(endpoint=self.address)
        self.restarts, self.fresh = Restarts(), 0
        self.answers_later = self.wanted = False
        self.reached, self.founder, self.log = True, False, []
        self.units = UnitQueue(self.peer_id, self, threading.Condition())

    @property
    def stopped(self):
        return self.units.stopped and not self.units.used

    @property
    def live(self):
        return self.reached

    @property
    def shards(self):
        return ("", *(f"tcp://hub:{hub}" for hub in range(1, self.settings.shards)))

    def wait_welcome(self, seconds):
        return self.settings

    def begin_join(self, model, leaves, *, score=math.nan, optimizer_state=()):
        self.layout = Layout(model, self.settings.fragments, (self.shard, self.settings.shards))
        self.leaves, self.joined = leaves, True
        if not self.hub.published:
            self.founder = True
            if self.answers_later:
                self.wanted, self.joined = True, False
            else:
                assert self.peer.founding == 1 and leaves, "only who is asked by the first founds"
                self.hub.begin(self.layout, leaves)

    def lend(self, leaves, optimizer_state=()):
        assert all(hub.published for hub in self.at[1:]), "the first is founded last"
        self.wanted, self.joined = False, True
        self.hub.begin(self.layout, leaves)

    def has_joined(self):
        return self.joined

    def end_join(self):
        self.hub.lines.append(self)
        self.offers.version = len(self.hub.published) - 1
        return None if self.founder else self.hub.snapshot()

    def next_fragments(self):
        if self.restarts.begun:
            return ()
        return self.offers.next_fragments(self.settings, self.settings.fragments, self.reached)

    def offer(self, fragment, segments, counts, **facts):
        if not self.next_fragments():
            return None
        offer = self.offers.draft(fragment, [np.array(segment) for segment in segments], counts, **facts)
        self.offers.made(offer, self.settings.fragments)
        self.hub.waiting.append((self, offer))
        self.log.append(("offer", fragment, counts.samples))
        return offer.sequence

    def withdraw(self):
        mine = [(line, offer) for line, offer in self.hub.waiting if line is self]
        if mine:
            self.hub.waiting.remove(mine[0])
            self.offers.withdrawn([mine[0][1].sequence])

    @property
    def unreachable(self):
        return () if self.reached else (0,)

    def in_flight(self):
        return self.offers.in_flight()

    def peek(self):
        return self.inbox[0] if self.inbox else None

    def poll(self):
        if not self.inbox:
            return None
        self.offers.took(self.inbox[0])
        if self.inbox[0].reset:
            self.restarts.done(self.offers.next_sequence)
        return self.inbox.popleft()

    def await_update(self, seconds):
        while not self.inbox:
            if not self.hub.waiting:
                raise AggregateTimeout("nothing comes")
            self.hub.release()

    def wait_update(self, seconds, sequence):
        assert sequence in self.in_flight()
        self.await_update(seconds)
        return self.poll()

    def begin_again(self, diverged, **facts):
        self.log.append(("again", diverged))
        self.restarts.begun, self.fresh = True, self.offers.next_sequence
        self.inbox.append(Update(len(self.hub.published) - 1, {}, {}, reset=True, **facts))

    def everyone_drained(self, broker):
        self.log.append(("drained", self.units.finished))
        return True

    def say_idle(self):
        self.log.append(("idle",))

    def describe(self, **described):
        self.described = described

    def report(self, **figures):
        self.log.append(("report", figures["step"]))

    def close(self, reason=""):
        self.closed = True
        self.log.append(("close", next(self.closings)))

    @property
    def founded(self):
        return bool(self.hub.published)

    def statistics(self):
        return ExchangeStatistics(self.offers.version, len(self.hub.lines), 1, 2, 0.5, 0.25, 3, 4, None)


def tree(value=0.0):
    return {name: jnp.full(shape, value, jnp.float32) for name, shape in SHAPES.items()}


class Federation:
    """Nodes of several brokers, and the brokers."""

    def __init__(self, shards, fragments, nodes, **facts):
        facts = {"every": 1, "delay": 1, "lost_seconds": 0.1, "heartbeat_seconds": 0.05} | facts
        self.settings = fixed_run(shards=shards, fragments=fragments, initial="founder", **facts)
        self.hubs = [Hub(self.settings, shard) for shard in range(shards)]
        self.nodes, self.syncs, self.params, self.computed = [], [], [], []
        for _ in range(nodes):
            self.add()

    def add(self):
        first = FakeLine(self.hubs[0], True, self.hubs)
        lines = {hub.shard: FakeLine(hub, False, self.hubs) for hub in self.hubs[1:]}
        node = sharded(first, lambda address: lines[int(address.rpartition(":")[2])])
        self.nodes.append(node)
        self.syncs.append(DelayedSync(node, tree(float(len(self.nodes)))))
        self.syncs[-1].take_adoption()
        self.params.append(self.syncs[-1].params)
        self.computed.append({name: np.zeros(shape) for name, shape in SHAPES.items()})

    def step(self, number, amount):
        random = np.random.default_rng(amount)
        for name, shape in SHAPES.items():
            step = random.standard_normal(shape).astype(np.float32)
            before = np.array(self.params[number][name], np.float64)
            self.params[number][name] = self.params[number][name] + step
            self.computed[number][name] += np.asarray(self.params[number][name], np.float64) - before
        self.params[number] = self.syncs[number].step(self.params[number], samples=amount + 1)

    def check(self):
        for node, sync in zip(self.nodes, self.syncs, strict=True):
            leaves = [np.asarray(leaf) for leaf in sync.params.values()]
            for hub, line in zip(self.hubs, node._lines, strict=True):
                mine, published = hub.layout.split(leaves), hub.published[line.offers.version]
                assert [a.tobytes() for a in mine] == [b.tobytes() for b in published], "anchors, bit for bit"


HAPPENS = ["step"] * 4 + ["release"] * 3 + ["withdraw", "join", "lost"]
EVENTS = st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 11)), max_size=40)


@pytest.mark.parametrize("shards", [2, 4])
@settings(max_examples=examples(12), derandomize=True)
@given(events=EVENTS, delay=st.sampled_from([0, 1, 3]))
def test_anchors_are_equal_bit_for_bit_and_nothing_is_lost_whatever_each_shard_does(shards, events, delay):
    world = Federation(shards, 2 if shards == 2 else 1, 2, delay=delay)
    for event, number in events:
        node, hub = number % len(world.nodes), world.hubs[number % shards]
        line = world.nodes[node]._lines[hub.shard]
        if event == "step":
            world.step(node, number)
        elif event == "release":
            hub.release()
        elif event == "withdraw":
            line.withdraw()
        elif event == "lost":
            line.reached = not line.reached
        elif len(world.nodes) < 4:
            world.add()
        world.check()
    for _ in range(3):  # all that is on its way lands, and is applied
        for node in range(len(world.nodes)):
            for line in world.nodes[node]._lines:
                line.reached = True
            world.step(node, 1)
        for hub in world.hubs:
            hub.release()
    end(world)
    for name in SHAPES:
        if len(world.nodes) == 2:  # from the first step: all that was computed has landed exactly once
            mean = sum(computed[name] for computed in world.computed) / 2
            np.testing.assert_allclose(world.params[0][name], 1.0 + mean, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shards", [1, 3])
@settings(max_examples=examples(12), derandomize=True)
@given(events=st.lists(st.tuples(st.sampled_from([*HAPPENS, "again", "again"]), st.integers(0, 11)), max_size=40))
def test_whichever_shard_begins_again_the_node_goes_on_from_the_shared_parameters_of_all(shards, events):
    world = Federation(shards, 2, 2, delay=1)
    for event, number in events:
        node, hub = number % len(world.nodes), world.hubs[number % shards]
        line = world.nodes[node]._lines[hub.shard]
        if event == "step":
            world.step(node, number)
            sync = world.syncs[node]
            if sync.take_adoption() is not None:
                for name, leaf in sync.params.items():
                    np.testing.assert_allclose(leaf, world.params[node][name], rtol=0, atol=1e-5)
        elif event == "release":
            hub.release()
        elif event == "again" and not line.restarts.begun:
            line.begin_again(True)
        world.check()
    for node in range(len(world.nodes)):
        world.step(node, 1)
        world.step(node, 1)
    end(world)


def test_what_one_shard_says_of_beginning_again_waits_for_the_others_and_is_one_update():
    world = Federation(3, 1, 1, delay=8)
    node = world.nodes[0]
    world.step(0, 1)
    world.hubs[2].release()
    node._lines[1].inbox.append(Update(0, {}, {}, reset=True, warm=True))  # as its broker says
    assert node.next_fragments() == (), "nothing is offered meanwhile"
    before = node.poll()
    assert before is not None and before.landed == (2,), "what had come before counts"
    assert [("again", False) in line.log for line in node._lines] == [True, False, True]
    again = node.peek()
    assert again is not None and again.reset and again.warm and again.anchor is None
    assert node.poll() is again and node.poll() is None and node.next_fragments() == (0, 1, 2)


def end(world):
    """All that is in flight lands, and all nodes end with the same parameters."""
    for hub in world.hubs:
        hub.release()
    drain(world)
    world.check()
    for name in SHAPES:
        for params in world.params:
            np.testing.assert_allclose(params[name], world.syncs[0].params[name], rtol=0, atol=1e-4)


def drain(world):
    """What `DelayedSync.finish` does, on all nodes in turn: nobody is waited for here."""
    for _ in range(2):
        for fragment in range(world.nodes[0].layout.fragments):
            for node, sync in enumerate(world.syncs):
                leaves = sync._apply_due([world.params[node][name] for name in SHAPES])
                sync._offer_fragment(leaves, fragment, dense=True)
                world.params[node] = dict(zip(SHAPES, leaves, strict=True))
            for hub in world.hubs:
                hub.release()
            for node, sync in enumerate(world.syncs):
                leaves = [world.params[node][name] for name in SHAPES]
                while (update := world.nodes[node].poll()) is not None:
                    leaves = sync._apply(leaves, update)
                world.params[node] = dict(zip(SHAPES, leaves, strict=True))


def test_every_exchange_goes_to_each_shard_and_a_lost_one_costs_only_its_own():
    world = Federation(2, 2, 1)
    node = world.nodes[0]
    assert node.next_fragments() == (0, 2) and node.layout.fragments == 4 and node.state().unreachable == ()
    node._lines[1].reached = False
    assert node.next_fragments() == (0,) and node.state().unreachable == (1,)
    world.step(0, 3)
    assert world.syncs[0].statistics().offers == 1
    assert not world.syncs[0].statistics().offers_refused, "of a broker that is lost nothing waits for what is to land"
    world.hubs[0].release()
    world.step(0, 5)
    node._lines[1].reached = True
    world.hubs[0].release()
    world.step(0, 7)
    (late,) = [entry for entry in node._lines[1].log if entry[0] == "offer"]
    assert late == ("offer", 0, 4 + 6 + 8), "the first offer that a broker takes stands for all the samples"
    assert [entry[2] for entry in node._lines[0].log if entry[0] == "offer"] == [4, 6, 8]


def test_sequences_of_all_shards_differ_and_come_back_as_they_went():
    world = Federation(3, 1, 1, delay=8)
    node = world.nodes[0]
    world.step(0, 1)
    world.step(0, 2)
    assert sorted(node.state().in_flight) == [0, 1, 2, 3, 4, 5]
    world.hubs[2].release()
    assert node.peek().landed == (2, 5) and node.peek() is node.peek()
    assert set(node.peek().aggregate) == set(node.peek().own) == {2}
    world.hubs[1].release()
    before = node.peek()
    assert node.poll() is before and len(node.state().in_flight) == 4
    assert node.poll().aggregate and node.poll() is None


def test_an_update_that_is_not_yet_due_holds_up_no_other_shards():
    world = Federation(2, 1, 2, every=1, delay=4)
    world.step(0, 1)
    world.hubs[0].release()  # lands what the first node offered now
    world.step(1, 1)
    world.hubs[1].waiting = [one for one in world.hubs[1].waiting if one[0] is world.nodes[1]._lines[1]]
    world.hubs[1].release()  # the second node's alone
    assert world.nodes[0].peek().landed == () and set(world.nodes[0].peek().aggregate) == {1}


def test_strict_waiting_takes_the_awaited_shards_update_and_no_other():
    world = Federation(2, 1, 1, delay=2, every=1, mode="strict", release="all")
    for amount in range(6):
        world.step(0, amount)
        world.check()
    ages = world.syncs[0]._tracker.ages
    assert len(ages) >= 6 and set(ages) == {2}


def test_what_ends_or_idles_at_the_first_is_told_to_the_others():
    world = Federation(2, 1, 1)
    node = world.nodes[0]
    first, second = node._lines
    first.idle()
    assert second.log[-1] == ("idle",)
    assert node.everyone_drained(1) and second.log[-2:] == [("idle",), ("drained", False)], "it leaves early"
    first.units.finished = True
    assert node.everyone_drained(1) and second.log[-1] == ("drained", True)
    node.close()
    assert second.log[-1][1] < first.log[-1][1], "the first is left last"


def test_figures_are_sums_but_for_those_of_the_first():
    figures = Federation(3, 1, 1).nodes[0].statistics()
    assert (figures.version, figures.peers, figures.bytes_sent, figures.encode_seconds) == (0, 1, 3, 1.5)
    assert (figures.publishes, figures.publishes_refused) == (9, 12)


def test_a_founder_whose_successor_was_faster_waits_for_the_firsts_word():
    run = fixed_run(shards=2, initial="founder")
    hubs = [Hub(run, 0), Hub(run, 1)]
    first, second = FakeLine(hubs[0], True, hubs), FakeLine(hubs[1], False, hubs)
    looks = iter([True] * 3)

    def refused(*_, **__):
        raise JoinRefused("another node founds the run", "founding")

    def look():  # the first's loss is seen after three looks more
        first.wanted = not second.closed or next(looks, False)

    second.begin_join = second.peek = refused
    first.peek, first.wanted = look, True
    node = sharded(first, lambda address: second)
    assert not node.found_others((LeafSpec("a", (3, 4096), "float32"),), [])
    assert second.closed and next(looks, None) is None and node._lines == [first]


def test_a_broker_of_another_run_at_a_shards_address_is_not_taken_for_it():
    run = fixed_run(shards=2)
    hubs = [Hub(run, 0), Hub(run, 1)]
    stranger = FakeLine(hubs[1], False, hubs)
    stranger.run = "run-2"
    node = sharded(FakeLine(hubs[0], True, hubs), lambda address: stranger)
    with pytest.raises(JoinRefused, match="has shard 1 of run-2"):
        DelayedSync(node, tree())
