"""A hub and its nodes without sockets, under a virtual clock, with a ledger beside them of all that they did.

The nodes are those of numpy_node.py; what happens to them is the test's to say.
"""

from __future__ import annotations

import json
from collections import deque

import numpy as np

from tests.numpy_node import BULK, CONTROL, TOLERANCE, NumpyNode, crc
from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.payload import decode_payload
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Accumulate, Broadcast, Disconnect, Expect, Found, Reduce, SendTo, Serve, TakeBack
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import Aggregate, Publish, Snapshot
from zmqtrain.protocol.rounds import release_rule_from_spec

__all__ = ["MODEL", "World", "live_world"]

MODEL = (LeafSpec("w", (5000,), "float32"), LeafSpec("b", (7,), "float32"))
"""Three blocks: up to three fragments."""


HISTORY = 128
"""Of so many versions it is known what was published: of more than can be taken back."""


def doubles(flats):
    return [flat.astype(np.float64) for flat in flats]


class World:
    """The hub, its codec thread, its checkpoints, and a ledger of all that it did, in float64.

    history: what was published at the last versions.  taken_back: the versions that are gone, by each that took back.
    """

    def __init__(self, settings, folder=None, model=MODEL, shard=0, planner=None):
        self.settings, self.folder, self.now = settings, folder, 0.0
        self.fragments, self.planner = settings.fragments_of(model), planner
        self.model, self.shard = model, shard
        self.rule = release_rule_from_spec(settings.release)
        self.hub, self.aggregator = self.make_hub("run-1"), Aggregator(settings, shard)
        self.nodes, self.dead, self.made = {}, {}, 0
        self.following, self.whole, self.transfer = set(), {}, 0
        self.saved, self.journal = None, []
        self.crcs, self.landed_at, self.ledger = {}, {}, {}
        self.history, self.taken_back = {}, []
        self.crashed = False

    def make_hub(self, run):
        return Hub(self.settings, self.rule, run, self.now, planner=self.planner, shard=self.shard)

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
                if node.too_large:
                    node.too_large -= 1
                    self.carry_out(self.hub.broken(node.id, transfer, "norm", "too large", self.now))
                    if self.hub.quarantines.rest(node.id, self.now):
                        node.too_large = 0
                    return
            self.whole[node.id, transfer] = frames
            self.carry_out(self.hub.received(node.id, transfer, self.now))
        except CodecError as error:
            self.carry_out(self.hub.broken(node.id, transfer, "corrupt", str(error), self.now))

    def send(self, peer, message, lane=CONTROL):
        if peer in self.nodes:
            self.nodes[peer].line.down[lane].append(message)

    def carry_out(self, effects):
        diverged = []
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
                case TakeBack(peer):
                    diverged.append(peer)
                case Reduce() if effect.back_to >= 0:
                    self.take_back(effect)
                case Reduce():
                    self.release(effect)
                case Serve(peer, known, landed):
                    version = self.aggregator.version
                    frames = encode_snapshot(self.aggregator.layout, self.aggregator.published)
                    assert version == self.hub.version
                    self.following.add(peer)
                    self.push(peer, Snapshot, () if known == version else frames, version=version, landed=landed)
                case Disconnect(peer):
                    self.following.discard(peer)
                    if peer in self.nodes:
                        self.nodes[peer].line.down[BULK].clear()
        for peer in diverged:  # the codec thread is asked first, and what is due is released meanwhile
            self.carry_out(self.hub.take_back(peer, self.version_before(peer)))

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
        self.outer = self.aggregator.outer.name
        self.sums = [np.zeros(flat.size) for flat in self.expected]
        self.published()
        self.save()

    def accumulate(self, peer, publish, frames):
        assert not any(publish.base_version in versions for versions in self.taken_back), "computed on what is gone"
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
        counted = self.hub.awaited | {peer for peer, _ in reduce.landed}
        assert reduce.live >= len(counted), "a mean over the live nodes that have published"
        outer = self.aggregator.outer.name
        if outer != self.outer:
            self.outer, self.momentum = outer, [np.zeros(flat.size) for flat in self.expected]
        for f in reduce.fragments:
            g = self.sums[f] / reduce.live
            self.sums[f] = np.zeros(g.size)
            if outer.startswith("sgd"):
                self.expected[f] += g
            else:
                self.momentum[f] = 0.5 * self.momentum[f] + g
                self.expected[f] += 0.8 * (g + 0.5 * self.momentum[f])
        self.announce(released, reduce)

    def version_before(self, peer):
        """The version before the first, of those that can be taken back, in which a delta of this node has landed."""
        versions = sorted(version for (one, _), version in self.landed_at.items() if one == peer)
        known = [version for version in versions if self.aggregator.published_at(version - 1) is not None]
        return known[0] - 1 if known else -1

    def take_back(self, reduce):
        """What was published at an earlier version is what is published: nothing that has landed since counts."""
        assert not reduce.landed and reduce.version == self.aggregator.version + 1
        released = self.aggregator.release(reduce)
        self.whole.clear()
        self.expected = [flat.copy() for flat in self.history[reduce.back_to]]
        self.momentum = [np.zeros(flat.size) for flat in self.expected]
        self.sums = [np.zeros(flat.size) for flat in self.expected]
        for published, before in zip(self.aggregator.published, self.expected, strict=True):
            np.testing.assert_allclose(published, before, rtol=0, atol=TOLERANCE)
        self.taken_back.append(range(reduce.back_to + 1, reduce.version))
        self.announce(released, reduce)

    def published(self):
        self.crcs[self.aggregator.version] = crc(self.aggregator.published)
        self.history[self.aggregator.version] = doubles(self.aggregator.published)
        while len(self.history) > HISTORY:
            del self.history[min(self.history)]

    def announce(self, released, reduce):
        """Check a version, write it down, and tell it to the nodes."""
        self.check_parameters()
        self.published()
        record = (released, reduce.landed, reduce.samples)
        self.journal.append(record)
        if self.folder is not None:
            self.folder.release(record, {})
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
        arrays, self.outer = self.aggregator.arrays(), self.aggregator.outer.name
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
        self.hub.news |= self.planner is not None  # as of a report
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
        for node in nodes:
            node.corrupt_next, node.too_large = False, 0
        while any(self.hub.quarantines.rest(node.id, self.now) for node in nodes):
            self.pass_time(0.5)
            self.settle()
        rule = self.settings.release.partition(":")[0]
        todo = {node.id: deque(range(self.fragments)) for node in nodes}
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
                if peer == node.id and (peer, sequence) in self.landed_at and node.is_own(sequence):
                    landed[fragment] += u
            for mine, there in zip(node.computed, landed, strict=True):
                np.testing.assert_allclose(mine, there, rtol=0, atol=TOLERANCE)  # computed == landed: each exactly once
        if self.settings.codec != "float32":
            for parameters, published in zip(self.aggregator.parameters, self.aggregator.published, strict=True):
                np.testing.assert_allclose(parameters, published, rtol=0, atol=TOLERANCE)


def live_world(run, nodes, folder=None, **facts):
    world = World(run, folder, **facts)
    for _ in range(nodes):
        world.add_node()
    world.settle()
    for node in world.nodes.values():
        node.poll()
    return world
