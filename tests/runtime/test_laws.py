"""The laws of the one equation, whatever the network does: equal anchors bit for bit, nothing lost or landed twice.

Several nodes and a hub without sockets, under a virtual clock, and a schedule of deliveries, delays, cut connections,
deaths, newcomers, corrupt bytes, dropped aggregates and restarts of the hub. A node here is the reference of what
`DelayedSync` keeps on the device, in numpy.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.payload import decode_payload
from zmqtrain.errors import CodecError
from zmqtrain.protocol.effects import (
    Accumulate,
    Broadcast,
    Deliver,
    Disconnect,
    Expect,
    Found,
    Reduce,
    Send,
    SendTo,
    Serve,
    Withdraw,
)
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import Aggregate, Publish, Snapshot
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.runtime.broker.checkpoint import RunFolder
from zmqtrain.runtime.equation.aggregator import Aggregator
from zmqtrain.runtime.equation.delta import DeltaCoder, cut, encode_snapshot
from zmqtrain.runtime.node.inbox import Inbox
from zmqtrain.settings import RunSettings
from zmqtrain.types import LeafSpec, Offer

MODEL = (LeafSpec("w", (5000,), "float32"), LeafSpec("b", (7,), "float32"))
"""Three blocks: up to three fragments."""

WIDE = (LeafSpec("w", (9, 4096), "float32"), LeafSpec("b", (7,), "float32"), LeafSpec("v", (5000,), "float32"))
"""Twelve blocks: up to three fragments of each of four masters."""

TOLERANCE = 2e-4
"""Of sums of a few hundred float32 values of the size of 1."""


def crc(flats):
    return zlib.crc32(b"".join(flat.tobytes() for flat in flats))


def doubles(flats):
    return [flat.astype(np.float64) for flat in flats]


class Line:
    """Two lanes each way between one node and the hub: order is kept within a lane."""

    def __init__(self):
        self.up, self.down = (deque(), deque()), (deque(), deque())

    def clear(self):
        for lane in (*self.up, *self.down):
            lane.clear()


CONTROL, BULK = 0, 1


class NumpyNode:
    """Peer, DeltaCoder and Inbox, and in numpy what `DelayedSync` keeps: params, anchor, rebase (design, section 3)."""

    def __init__(self, world, number):
        self.world, self.id = world, f"node-{number}"
        self.random = np.random.default_rng(1000 + number)
        self.line = Line()
        self.peer = Peer(self.id, self.id)
        self.peer.founding = 1  # said to another master than the first: whoever comes first founds
        self.coder = DeltaCoder(world.model, world.settings, shard=world.shard)
        self.inbox = Inbox(lambda: None, pytest.fail)
        self.layout = self.coder.layout
        self.jobs = deque()  # of the codec thread
        leaves = [self.random.standard_normal(leaf.shape).astype(np.float32) for leaf in world.model]
        self.params = self.layout.split(leaves)
        self.anchor = None
        self.version, self.sequence, self.transfer = -1, 0, 0
        self.applied, self.offered, self.outgoing = [], set(), {}
        self.corrupt_next = False
        self.zero()
        self.carry_out(self.peer.join(world.model, world.now) + self.peer.start(world.now))

    def zero(self):
        self.computed = [np.zeros(flat.size) for flat in self.params]
        self.own_landed = [np.zeros(flat.size) for flat in self.params]

    # -- the training thread

    def train(self):
        if self.begin():
            for flat, computed in zip(self.params, self.computed, strict=True):
                before = flat.astype(np.float64)
                flat += self.random.standard_normal(flat.size).astype(np.float32) * np.float32(0.05)
                computed += flat - before

    def begin(self):
        if self.anchor is None and self.peer.confirmed:
            self.anchor, self.version = [flat.copy() for flat in self.params], 0
        return self.anchor is not None

    def offer(self, fragment, dense=False):
        live = self.peer.state is PeerState.LIVE
        if self.begin() and live and len(self.offered) < self.world.settings.offers_in_flight:
            segments = cut(self.params[fragment] - self.anchor[fragment], self.layout.counts(fragment))
            offer = Offer(self.sequence, fragment, segments, 8, 2, (), tuple(self.applied), dense)
            self.sequence += 1
            self.applied.clear()
            self.offered.add(offer.sequence)
            self.jobs.append(lambda version=self.version: self.publish(offer, version))
            return offer.sequence
        return None

    def poll(self):
        self.begin()
        update = self.inbox.take()
        if update is None:
            return
        self.jobs.append(lambda: self.inbox.decode(self.coder))
        own = {f: np.concatenate(parts) for f, parts in update.own.items()}
        if self.anchor is None:
            assert update.anchor is not None and not own
            self.anchor = self.layout.split(self.leaves_of(update))
            self.params = [flat.copy() for flat in self.anchor]
        elif update.anchor is not None:
            new = self.layout.split(self.leaves_of(update))
            pending = [p - a for p, a in zip(self.params, self.anchor, strict=True)]
            for f, u in own.items():
                pending[f] -= u
            self.params, self.anchor = [n + p for n, p in zip(new, pending, strict=True)], new
        else:
            for f, parts in update.aggregate.items():
                step = np.concatenate(parts)
                self.anchor[f] += step
                self.params[f] += step - own[f] if f in own else step
            for f in own.keys() - update.aggregate.keys():
                self.params[f] -= own[f]
        for f, u in own.items():
            self.own_landed[f] += u
        self.version = update.version
        self.applied += update.landed
        assert set(update.landed) <= self.offered, "an own publish landed twice, or after it was withdrawn"
        self.offered.difference_update(update.landed)
        assert crc(self.anchor) == self.world.crcs[update.version], (
            f"the anchor of {self.id} at version {update.version}"
        )
        for sequence in update.landed:
            assert self.world.landed_at[self.id, sequence] <= update.version, "told to have landed before it has"
        self.check_pending()

    def leaves_of(self, update):
        leaves = [np.zeros(0, np.float32) for _ in self.world.model]
        for part in update.anchor:
            leaves[part.leaf] = part.values
        return leaves

    def check_pending(self):
        if self.anchor is not None:
            for p, a, c, o in zip(self.params, self.anchor, self.computed, self.own_landed, strict=True):
                np.testing.assert_allclose(p - a.astype(np.float64), c - o, rtol=0, atol=TOLERANCE)

    # -- the codec thread and the network thread

    def publish(self, offer, base):
        encoded = self.coder.encode(offer)
        if encoded.codec == "float32":
            self.check_on_the_way(offer)
        if self.peer.state is not PeerState.LIVE:
            return self.withdraw(offer.sequence)
        self.transfer += 1
        frames = [bytearray(frame) for frame in encoded.frames]
        if self.corrupt_next:
            frames[0][-1] ^= 1
            self.corrupt_next = False
        self.outgoing[self.transfer] = frames
        sizes = tuple(len(frame) for frame in frames)
        self.carry_out(
            self.peer.publish(
                Publish(
                    self.transfer, offer.sequence, base, offer.fragment, encoded.codec, sizes, 8, 2, 0.5, offer.dense
                )
            )
        )

    def check_on_the_way(self, offer):
        """What is on its way is no more than what was pending when the offer was made."""
        counts = self.layout.counts(offer.fragment)
        us = [u for u in self.coder.unacked.values() if u.fragment == offer.fragment]
        codecs = [coding_from_spec(u.codec).of_fragment(self.layout, offer.fragment) for u in us]
        decoded = [decode_payload(of, u.frames, counts) for of, u in zip(codecs, us, strict=True)]
        total = sum(one.astype(np.float64) for one in decoded)
        np.testing.assert_allclose(total, np.concatenate(offer.segments), rtol=0, atol=TOLERANCE)

    def found(self):
        frames = encode_snapshot(self.layout, self.params)
        self.transfer += 1
        self.outgoing[self.transfer] = frames
        self.send(Snapshot(self.transfer, 0, tuple(len(frame) for frame in frames)))

    def withdraw(self, sequence):
        self.jobs.append(lambda: self.coder.withdraw(sequence))
        self.offered.discard(sequence)

    def run_jobs(self, count):
        while self.jobs and count:
            self.jobs.popleft()()
            count -= 1

    def send(self, message):
        self.line.up[CONTROL].append(message)

    def receive(self, lane):
        if not self.line.down[lane]:
            return
        message = self.line.down[lane].popleft()
        now = self.world.now
        if isinstance(message, tuple) and message[0] == "frames":
            self.peer.saw(now)
            self.carry_out(self.peer.received(message[1]), message[2])
        elif isinstance(message, tuple):
            if message[1] in self.outgoing:
                self.line.up[BULK].append((message[1], self.outgoing.pop(message[1])))
        else:
            self.carry_out(self.peer.receive(message, now))

    def carry_out(self, effects, frames=()):
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Serve():
                    self.jobs.append(self.found)
                case Deliver() if self.slow and isinstance(effect.announcement, Aggregate):
                    self.slow = False
                    self.jobs.append(lambda effect=effect: self.inbox.skip(effect))
                    self.carry_out(self.peer.resync())
                case Deliver():
                    self.jobs.append(lambda effect=effect, frames=frames: self.inbox.arrive(self.coder, effect, frames))
                case Withdraw(sequence):
                    self.withdraw(sequence)
                case Disconnect():
                    assert self.peer.state is not PeerState.CLOSED, effect.text
                    self.line.clear()
                    self.outgoing.clear()

    slow = False


class World:
    """The hub, its codec thread, its checkpoints, and a ledger of all that it did, in float64."""

    def __init__(self, settings, folder=None, model=MODEL, shard=0):
        self.settings, self.folder, self.now = settings, folder, 0.0
        self.model, self.shard = model, shard
        self.rule = release_rule_from_spec(settings.release)
        self.hub, self.aggregator = self.make_hub("run-1"), Aggregator(settings, shard)
        self.nodes, self.dead, self.made = {}, {}, 0
        self.following, self.whole, self.transfer = set(), {}, 0
        self.saved, self.journal = None, []
        self.crcs, self.landed_at, self.ledger = {}, {}, {}
        self.crashed = False

    def make_hub(self, run):
        return Hub(self.settings, self.rule, run, self.now, shard=self.shard)

    def add_node(self):
        node = NumpyNode(self, self.made)
        self.made += 1
        self.nodes[node.id] = node

    # -- messages

    def receive(self, node, lane):
        if not node.line.up[lane]:
            return
        message = node.line.up[lane].popleft()
        if lane == CONTROL:
            self.carry_out(self.hub.receive(node.id, message, self.now))
            return
        transfer, frames = message
        member = self.hub.members.get(node.id)
        announcement = member.open.get(transfer) if member else None
        if announcement is None:
            return
        try:
            if isinstance(announcement, Publish):
                self.aggregator.check(announcement, frames)
            self.whole[node.id, transfer] = frames
            self.carry_out(self.hub.received(node.id, transfer, self.now))
        except CodecError as error:
            self.carry_out(self.hub.broken(node.id, transfer, "corrupt", str(error), self.now))

    def send(self, peer, message, lane=CONTROL):
        if peer in self.nodes:
            self.nodes[peer].line.down[lane].append(message)

    def carry_out(self, effects):
        for effect in effects:
            match effect:
                case SendTo(peer, message):
                    self.send(peer, message)
                case Broadcast(message):
                    for peer in self.hub.members:
                        self.send(peer, message)
                case Expect(peer, announcement):
                    if isinstance(announcement, Snapshot):
                        self.aggregator.plan(self.hub.model)
                    self.send(peer, ("grant", announcement.transfer))
                case Found(peer, announcement):
                    self.found(self.whole.pop((peer, announcement.transfer)))
                case Accumulate(peer, publish):
                    self.accumulate(peer, publish, self.whole.pop((peer, publish.transfer)))
                case Reduce():
                    self.release(effect)
                case Serve(peer, known, landed):
                    version, frames = self.aggregator.snapshot()
                    assert version == self.hub.version
                    self.following.add(peer)
                    self.push(peer, Snapshot, () if known == version else frames, version=version, landed=landed)
                case Disconnect(peer):
                    self.following.discard(peer)
                    if peer in self.nodes:
                        self.nodes[peer].line.down[BULK].clear()

    def push(self, peer, kind, payload, **fields):
        self.transfer += 1
        self.send(peer, kind(transfer=self.transfer, sizes=tuple(len(f) for f in payload), **fields), BULK)
        if payload:
            self.send(peer, ("frames", self.transfer, payload), BULK)

    # -- the arrays, and the ledger beside them

    def found(self, frames):
        self.aggregator.found(frames)
        self.expected = doubles(self.aggregator.parameters)
        self.momentum = [np.zeros(flat.size) for flat in self.expected]
        self.sums = [np.zeros(flat.size) for flat in self.expected]
        self.crcs[0] = crc(self.aggregator.published)
        self.save()

    def accumulate(self, peer, publish, frames):
        self.aggregator.accumulate(peer, publish, frames)
        layout = self.aggregator.layout
        codecs = coding_from_spec(publish.codec).of_fragment(layout, publish.fragment)
        u = decode_payload(codecs, frames, layout.counts(publish.fragment)).astype(np.float64)
        assert (peer, publish.sequence) not in self.ledger, "accumulated twice"
        self.ledger[peer, publish.sequence] = (publish.fragment, u)
        self.sums[publish.fragment] += u

    def release(self, reduce):
        assert reduce.version == self.aggregator.version + 1, "versions count the releases"
        released = self.aggregator.release(reduce)
        for one in reduce.landed:
            assert one not in self.landed_at, "landed twice"
            fragment = self.ledger[one][0]
            before = [s for (p, s) in self.landed_at if p == one[0] and self.ledger[p, s][0] == fragment]
            assert all(s < one[1] for s in before), "landed out of order"
            self.landed_at[one] = reduce.version
        # a tick that loses two nodes releases between the two
        assert reduce.live >= len(self.hub.live | {peer for peer, _ in reduce.landed}), "a mean over the live nodes"
        outer = self.aggregator.outer.name
        for f in reduce.fragments:
            g = self.sums[f] / reduce.live
            self.sums[f] = np.zeros(g.size)
            if outer.startswith("sgd"):
                self.expected[f] += g
            else:
                self.momentum[f] = 0.5 * self.momentum[f] + g
                self.expected[f] += 0.8 * (g + 0.5 * self.momentum[f])
        self.check_parameters()
        self.crcs[reduce.version] = crc(self.aggregator.published)
        record = (released, reduce.landed, reduce.samples)
        self.journal.append(record)
        if self.folder is not None:
            self.folder.release(record)
        flat = [frame for frames in released.frames for frame in frames]
        for peer in sorted(self.following):
            self.push(
                peer, Aggregate, flat, version=released.version, codec=released.codec, fragments=released.fragments,
                frames=tuple(len(frames) for frames in released.frames), landed=reduce.landed, live=reduce.live,
            )  # fmt: skip

    def check_parameters(self):
        for parameters, expected in zip(self.aggregator.parameters, self.expected, strict=True):
            np.testing.assert_allclose(parameters, expected, rtol=0, atol=TOLERANCE)

    # -- what happens to the hub

    def save(self):
        if self.aggregator.version >= 0:
            self.saved, self.journal = (json.dumps(self.hub.state()), self.aggregator.arrays()), []
            if self.folder is not None:
                self.folder.save(self.hub.version, self.hub.state(), self.aggregator.arrays())
                self.folder.begin_journal(self.hub.version)

    def crash(self):
        if self.saved is None:
            return
        before, version = self.aggregator.parameters, self.hub.version
        if self.folder is not None:
            self.folder.close()
            state, arrays = self.folder.load()
            journal = list(self.folder.replay(state["version"]))
        else:
            state, arrays, journal = json.loads(self.saved[0]), self.saved[1], self.journal
        self.hub, self.aggregator = self.make_hub(""), Aggregator(self.settings, self.shard)
        self.hub.restore(state)
        self.aggregator.plan(self.hub.model)
        self.aggregator.restore(self.hub.version, arrays)
        for released, landed, samples in journal:
            self.aggregator.replay(released)
            self.hub.replay(released.version, landed, samples)
        assert self.hub.version == version and self.hub.run == "run-1"
        assert crc(self.aggregator.published) == self.crcs[version], "what was published is not what it was"
        if self.settings.broadcast_codec == "float32":
            for now, then in zip(self.aggregator.parameters, before, strict=True):
                np.testing.assert_allclose(now, then, rtol=0, atol=TOLERANCE)
        for f in {f for released, _, _ in journal for f in released.fragments}:
            assert np.array_equal(self.aggregator.parameters[f], self.aggregator.published[f])
        self.expected = doubles(self.aggregator.parameters)
        self.sums = [np.zeros(flat.size) for flat in self.expected]
        arrays = self.aggregator.arrays()
        if any(name.startswith("outer.momentum/") for name in arrays):
            leaves = [arrays.get(f"outer.momentum/{leaf.path}", np.zeros(0, np.float32)) for leaf in self.model]
            self.momentum = doubles(self.aggregator.layout.split(leaves))
        self.following.clear(), self.whole.clear()
        for node in self.nodes.values():
            node.line.clear()
        self.crashed = True
        self.save()

    def pass_time(self, seconds):
        self.now += seconds
        self.carry_out(self.hub.tick(self.now))
        for node in self.nodes.values():
            node.carry_out(node.peer.tick(self.now))

    def settle(self):
        """Deliver and do whatever can be, until nothing moves."""
        while any(node.jobs or any((*node.line.up, *node.line.down)) for node in self.nodes.values()):
            for node in list(self.nodes.values()):
                for lane in (CONTROL, BULK):
                    self.receive(node, lane)
                    node.receive(lane)
                node.run_jobs(2)

    # -- the end

    def drain(self):
        """What `DelayedSync.finish` does, on all nodes: every fragment is exchanged uncompressed.

        Where a round waits for all, who is done goes on contributing until all are (a real node leaves instead); where
        it waits for a count, who is done says so.
        """
        nodes = list(self.nodes.values())
        rule = self.settings.release.partition(":")[0]
        todo = {node.id: deque(range(self.settings.fragments)) for node in nodes}
        dense = {}
        for _ in range(400):
            self.pass_time(0.25)
            self.settle()
            for node in nodes:
                while len(node.inbox):
                    node.poll()
                    node.run_jobs(9)
                sequence, fragment = dense.get(node.id, (None, None))
                if sequence is not None and sequence not in node.offered:
                    if (node.id, sequence) in self.landed_at and fragment in todo[node.id]:
                        todo[node.id].popleft()
                    del dense[node.id]
            unfinished = any(todo.values()) or any(node.offered for node in nodes)
            for node in nodes:
                wanted = todo[node.id] or (rule in ("all", "bounded") and unfinished)
                if rule == "count" and not (wanted or node.offered) and node.id in self.hub.members:
                    self.hub.members[node.id].drained = True
                if not node.offered and wanted and node.id not in dense:
                    fragment = todo[node.id][0] if todo[node.id] else 0
                    sequence = node.offer(fragment, dense=True)
                    if sequence is not None:
                        dense[node.id] = (sequence, fragment)
            if not any(todo.values()) and all(node.version == self.hub.version and not node.offered for node in nodes):
                break
        else:
            raise AssertionError(f"not drained: {todo}, {[(n.id, n.peer.state, n.version, n.offered) for n in nodes]}")
        assert self.hub.rounds.pending == (), "a contribution waits for ever"

    def check_the_end(self):
        reference = next(iter(self.nodes.values()))
        for node in self.nodes.values():
            node.check_pending()
            assert crc(node.anchor) == self.crcs[self.hub.version]
            for f, (params, anchor) in enumerate(zip(node.params, node.anchor, strict=True)):
                np.testing.assert_allclose(params, anchor, rtol=0, atol=TOLERANCE)
                np.testing.assert_allclose(params, reference.params[f], rtol=0, atol=TOLERANCE)
            landed = [np.zeros(flat.size) for flat in node.params]
            for (peer, sequence), (fragment, u) in self.ledger.items():
                if peer == node.id and (peer, sequence) in self.landed_at:
                    landed[fragment] += u
            for mine, there in zip(node.computed, landed, strict=True):
                np.testing.assert_allclose(mine, there, rtol=0, atol=TOLERANCE)  # computed == landed: each exactly once
        if self.settings.codec != "float32":
            for parameters, published in zip(self.aggregator.parameters, self.aggregator.published, strict=True):
                np.testing.assert_allclose(parameters, published, rtol=0, atol=TOLERANCE)


def happen(world, event, number):
    names = list(world.nodes)
    node = world.nodes[names[number % len(names)]]
    lane = number % 2
    if event == "train":
        node.train()
        node.offer(number % world.settings.fragments)
    elif event == "poll":
        for _ in range(1 + number % 3):
            node.poll()
    elif event == "work":
        node.run_jobs(1 + number % 3)
    elif event == "up":
        for _ in range(1 + number % 3):
            world.receive(node, lane)
    elif event == "down":
        for _ in range(1 + number % 3):
            node.receive(lane)
    elif event == "settle":
        world.settle()
    elif event == "pass":
        world.pass_time(0.1 * (1 + number))
    elif event == "silence":
        world.pass_time(4.0)
    elif event == "cut":
        node.line.clear()
        if number % 2:
            world.carry_out(world.hub.gone(node.id, "its connection is gone", world.now))
        node.carry_out(node.peer.distrust("cut", world.now))
    elif event == "kill" and len(names) > 1:
        world.dead[node.id] = world.nodes.pop(node.id)
        if number % 2:
            world.carry_out(world.hub.gone(node.id, "its connection is gone", world.now))
    elif event == "join" and len(names) < 5:
        world.add_node()
    elif event == "corrupt":
        node.corrupt_next = True
    elif event == "slow":
        node.slow = True
    elif event == "drop":
        queue = node.line.down[BULK]
        whole = {m.transfer for m in queue if isinstance(m, Aggregate)}
        kept = [m for m in queue if (m[1] if isinstance(m, tuple) else m.transfer) not in whole]
        queue.clear()
        queue.extend(kept)
    elif event == "save":
        world.save()
    elif event == "crash":
        world.crash()
    for one in world.nodes.values():
        one.check_pending()


USUAL = ["train"] * 6 + ["settle"] * 4 + ["poll"] * 5 + ["work"] * 3 + ["up"] * 2 + ["down"] * 2 + ["pass"] * 4
FAULTS = ["cut", "kill", "join", "corrupt", "slow", "drop", "silence", "save", "crash"]
RELEASES = (
    "all",
    "quorum:count=0,share=0.5,patience=2",
    "immediately",
    "count:contributions=2",
    "time:seconds=0.3",
    "bounded:staleness=1",
)

SETTINGS = st.builds(
    RunSettings,
    codec=st.sampled_from(["float32", "bf16", "int8:block=256", "ternary:block=128"]),
    broadcast_codec=st.sampled_from(["float32", "int8:block=256", "ternary:block=128"]),
    fragments=st.integers(1, 3),
    release=st.sampled_from(RELEASES),
    outer=st.sampled_from(["sgd:rate=1", "nesterov:rate=0.8,momentum=0.5"]),
    every=st.just(2),
    delay=st.sampled_from([1, 4]),
)


def live_world(run, nodes, folder=None, **facts):
    world = World(run, folder, **facts)
    for _ in range(nodes):
        world.add_node()
    world.settle()
    for node in world.nodes.values():
        node.poll()
    return world


@settings(max_examples=150, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink))
@given(
    run=SETTINGS,
    nodes=st.integers(1, 4),
    events=st.lists(st.tuples(st.sampled_from(USUAL + FAULTS), st.integers(0, 11)), min_size=20, max_size=120),
)
def test_whatever_the_network_does_the_laws_hold(run, nodes, events):
    world = live_world(run, nodes)
    for event, number in events:
        happen(world, event, number)
    world.drain()
    world.check_the_end()


@pytest.mark.parametrize("masters", [2, 4])
@settings(max_examples=12, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink))
@given(
    run=SETTINGS,
    nodes=st.integers(1, 3),
    events=st.lists(st.tuples(st.sampled_from(USUAL + FAULTS), st.integers(0, 11)), min_size=20, max_size=60),
)
def test_the_laws_hold_at_each_of_several_masters_whatever_befalls_the_others(masters, run, nodes, events):
    run = replace(run, masters=masters, initial="founder")
    worlds = [live_world(run, nodes, model=WIDE, shard=shard) for shard in range(masters)]
    for turn, (event, number) in enumerate(events):
        for shard, world in enumerate(worlds):
            fails = event in FAULTS and turn % masters != shard
            happen(world, "settle" if fails else event, number)
    for world in worlds:
        world.drain()
        world.check_the_end()
    parts = [world.aggregator.arrays() for world in worlds]
    for leaf in WIDE:
        assert sum(part.get(f"published/{leaf.path}", np.zeros(0)).size for part in parts) == leaf.values


CODECS = ("float32", "bf16", "int8:block=256", "ternary:block=128")


LONG = [(release, codec) for i, release in enumerate(RELEASES) for j, codec in enumerate(CODECS) if (i + j) % 2 == 0]
"""Every rule with two codecs, every codec with three rules."""


@pytest.mark.parametrize(("release", "codec"), LONG)
def test_the_laws_hold_over_a_long_run_with_faults(release, codec):
    random = Random(f"{release} {codec}")
    outer = random.choice(("sgd:rate=1", "nesterov:rate=0.8,momentum=0.5"))
    run = RunSettings(
        release=release, codec=codec, broadcast_codec=random.choice((codec, "float32")), outer=outer, every=2,
        fragments=random.randint(1, 3), delay=random.choice((1, 4)),
    )  # fmt: skip
    world = live_world(run, random.randint(2, 4))
    for _ in range(1200):
        happen(world, random.choice(FAULTS if random.random() < 0.04 else USUAL), random.randrange(12))
    assert world.hub.version >= 12, "too little happened for a test"
    world.drain()
    world.check_the_end()


def test_the_laws_hold_when_the_hub_comes_back_from_its_folder(tmp_path):
    random = Random("folder")
    run = RunSettings(release="immediately", every=2, delay=4, fragments=2, codec="ternary:block=128")
    world = live_world(run, 3, RunFolder(tmp_path))
    for turn in range(8):
        for _ in range(60):
            happen(world, random.choice(USUAL), random.randrange(12))
        happen(world, random.choice(("save", "crash", "cut")) if turn else "crash", turn)
    world.drain()
    world.check_the_end()
    world.folder.close()
