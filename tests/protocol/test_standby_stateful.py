"""Two hubs and their nodes, in virtual time: whoever dies or is cut off, there is one truth, and nothing is lost of it.

Rule: a hub here is the machines of a living one, with `Replicas` for what waits; the wires between any two may be cut
and mended, and any hub may be killed. What a node has been told of is written down, and is never taken back.
"""

from __future__ import annotations

import json
from math import nan

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.standbys import FIRST, MODEL, SECOND, SETTINGS
from zmqtrain.protocol.effects import (
    Broadcast,
    Connect,
    Deliver,
    Expect,
    Found,
    Hear,
    Reduce,
    Replicate,
    Send,
    SendTo,
    Serve,
    Withdraw,
)
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import Aggregate, Hello, Publish, Refused, Snapshot
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.standby import STANDBY, Follower, Succession
from zmqtrain.protocol.standby_messages import Replica
from zmqtrain.runtime.broker.replicas import Replicas

TAKEOVER_SECONDS = 1.0


class Broker:
    """A living hub: the machine, its standby's `Replicas`, and what it has released and told."""

    def __init__(self, world, address, state=None):
        self.world, self.address, self.alive = world, address, True
        self.hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1", world.now)
        if state is not None:
            self.hub.restore(state)
        self.following, self.transfer = set(), 0
        self.replicas = Replicas(self.hub, self.send_away, self.carry_out)

    def send_away(self, peer, text):
        self.say(peer, Refused("unknown", text))
        self.carry_out(self.hub.gone(peer, text, self.world.now))

    def say(self, peer, message, stamp=None, counted=True):
        stamp = self.hub.stamp(peer, counted) if stamp is None else stamp
        self.world.carry(self.address, peer, stamp, message, counted)

    def hear(self, peer, stamp, message):
        instead = self.hub.judge(peer, stamp, message, self.world.now)
        self.carry_out(self.hub.receive(peer, message, self.world.now) if instead is None else instead)

    def carry_out(self, effects):
        for effect in effects:
            match effect:
                case SendTo(peer, message, stamp):
                    self.say(peer, message, stamp)
                case Broadcast(message):
                    for peer in list(self.hub.members):
                        self.say(peer, message)
                case Expect(peer, announcement):
                    self.carry_out(self.hub.received(peer, announcement.transfer, self.world.now))
                case Found():
                    self.copy(self.hub.standby)
                case Replicate():
                    self.copy(self.hub.standby)
                case Hear(version):
                    self.replicas.holds(version, self.world.now)
                case Serve(peer, _, landed):
                    version = self.hub.version
                    self.replicas.announce(
                        version, lambda p=peer, v=version, at=landed: self.serve(p, v, at), self.world.now
                    )
                case Reduce():
                    self.release(effect)

    def copy(self, standby):
        if standby is not None:
            self.transfer += 1
            self.replicas.copied()
            self.world.copies[self.transfer, self.address] = json.loads(json.dumps(self.hub.state()))
            self.following.add(standby.peer)
            self.say(standby.peer, Replica(self.transfer, self.hub.version, (8,), 1), counted=False)

    def serve(self, peer, version, landed):
        if peer in self.hub.members:
            self.transfer += 1
            self.following.add(peer)
            self.say(peer, Snapshot(self.transfer, version, (8,), landed), counted=False)

    def release(self, reduce):
        self.transfer += 1
        message = Aggregate(self.transfer, reduce.version, "x", (0,), (1,), (8,), reduce.landed, 1, reduce.samples)
        standby = self.hub.standby
        first = standby.peer if standby is not None else None
        self.following &= set(self.hub.members)
        if first in self.following:
            self.say(first, message, counted=False)

        def to_nodes():
            for peer in sorted(self.following & set(self.hub.members) - {first}):
                self.say(peer, message, counted=False)

        self.replicas.announce(reduce.version, to_nodes, self.world.now)

    def tick(self):
        self.carry_out(self.hub.tick(self.world.now))
        self.replicas.tick(self.world.now)
        other = self.world.brokers[SECOND]
        lost = self.hub.tenure.standby and self.hub.standby is None
        if lost and other.alive and isinstance(other, Broker) and frozenset((FIRST, SECOND)) not in self.world.cut:
            self.alive = other.hub.term <= self.hub.term  # it asks there, and steps down


class Waiting:
    """A standby that follows, at its port."""

    def __init__(self, world):
        self.world, self.address, self.alive = world, SECOND, True
        self.follower = Follower("s#1", "s", SECOND, incarnation=1)
        self.succession = Succession(self.follower, TAKEOVER_SECONDS)
        self.hub = None
        self.do(self.follower.start(world.now))

    def hear(self, peer, stamp, message):
        if isinstance(message, Hello):
            self.succession.turned_to(peer, message, self.world.now)
            self.world.carry(self.address, peer, Stamp(message.incarnation), Refused("standby", STANDBY), True)

    def told(self, stamp, message, counted):
        instead = self.follower.judge(stamp, message, self.world.now, counted)
        self.do(self.follower.receive(message, self.world.now) if instead is None else instead)

    def do(self, effects):
        for effect in effects:
            match effect:
                case Send(message):
                    self.world.carry("s#1", FIRST, self.follower.stamp(), message, True)
                case Expect(_, announcement):
                    self.do(self.follower.received(announcement.transfer))
                case Deliver(Replica() as replica):
                    self.hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
                    self.hub.restore(self.world.copies[replica.transfer, FIRST])
                case Deliver(Aggregate() as release):
                    self.hub.replay(release.version, release.landed, release.samples)

    def tick(self):
        self.do(self.follower.tick(self.world.now))
        if self.hub is not None and self.succession.is_due(self.world.now):
            state = {**self.hub.state(), "term": self.follower.term + 1, "tenure": {"standby": "", "crew": 0}}
            self.world.brokers[SECOND] = Broker(self.world, SECOND, state)


class Node:
    """A node: its machine, where it looks, what it has been told of."""

    def __init__(self, world, name):
        self.world, self.id, self.at = world, f"{name}#1", FIRST
        self.peer = Peer(self.id, name, incarnation=1, addresses=[FIRST])
        self.sequence, self.told, self.withdrawn, self.landed = 0, {}, set(), set()
        self.do(self.peer.start(world.now) + self.peer.join(MODEL, world.now))

    def do(self, effects):
        for effect in effects:
            match effect:
                case Connect(address):
                    self.at = address or self.at
                case Send(message):
                    self.world.carry(self.id, self.at, self.peer.stamp(), message, True)
                case Serve():
                    self.world.carry(self.id, self.at, self.peer.stamp(), Snapshot(10**6, 0, (8,)), True)
                case Expect(_, announcement):
                    self.do(self.peer.received(announcement.transfer))
                case Deliver(announcement, landed):
                    self.landed |= set(landed)
                    self.world.heard_of(self, announcement)
                case Withdraw(sequence):
                    self.withdrawn.add(sequence)

    def hear(self, stamp, message, counted):
        instead = self.peer.judge(stamp, message, self.world.now, counted)
        self.do(self.peer.receive(message, self.world.now) if instead is None else instead)

    def publish(self):
        if self.peer.state is PeerState.LIVE and len(self.peer.in_flight) < 2:
            transfer, sequence = self.sequence + 1, self.sequence
            self.sequence += 1
            base = max(0, self.peer.version)
            self.do(self.peer.publish(Publish(transfer, sequence, base, 0, SETTINGS.codec, (8,), 8, 8, nan)))


class World(RuleBasedStateMachine):
    """Two addresses, three nodes, and the wires between any two of them."""

    @initialize()
    def begin(self):
        self.now, self.cut, self.copies, self.truth = 0.0, set(), {}, {}
        self.wires = []
        self.brokers = {FIRST: Broker(self, FIRST)}
        self.brokers[SECOND] = Waiting(self)
        self.nodes = {node.id: node for node in (Node(self, name) for name in "abc")}
        self.run(3.0)
        assert self.brokers[FIRST].hub.tenure.follows

    def carry(self, sender, receiver, stamp, message, counted):
        if frozenset((self.place(sender), self.place(receiver))) not in self.cut:
            self.wires.append((sender, receiver, stamp, message, counted))

    def place(self, name):
        return SECOND if name == "s#1" else name

    def deliver(self):
        while self.wires:
            sender, receiver, stamp, message, counted = self.wires.pop(0)
            if receiver in self.nodes:
                self.nodes[receiver].hear(stamp, message, counted) if self.nodes[receiver].at == sender else None
            elif receiver == "s#1":
                if isinstance(self.brokers[SECOND], Waiting):
                    self.brokers[SECOND].told(stamp, message, counted)
            elif self.brokers[receiver].alive:
                self.brokers[receiver].hear(sender, stamp, message)

    def heard_of(self, node, announcement):
        """A node has applied this: whoever else hears of that version hears the same."""
        if isinstance(announcement, Aggregate):
            told = self.truth.setdefault(announcement.version, announcement.landed)
            assert told == announcement.landed, "two truths of one version"

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            for node in self.nodes.values():
                node.publish()
                node.do(node.peer.tick(self.now))
            for broker in list(self.brokers.values()):
                if broker.alive:
                    broker.tick()
            self.deliver()

    @rule(seconds=st.sampled_from([0.3, 1.5, 4.0, 9.0]))
    def time_passes(self, seconds):
        self.run(seconds)

    @rule(one=st.sampled_from([FIRST, SECOND, "a#1", "b#1", "c#1"]), other=st.sampled_from([FIRST, SECOND]))
    def cut_a_wire(self, one, other):
        if one != other:
            self.cut.add(frozenset((one, other)))

    @rule()
    def mend_all(self):
        self.cut.clear()

    @rule(which=st.sampled_from([FIRST, FIRST, SECOND]))
    def kill(self, which):
        if all(broker.alive for broker in self.brokers.values()):
            self.brokers[which].alive = False

    @invariant()
    def what_has_landed_was_not_withdrawn_and_landed_once(self):
        if not hasattr(self, "nodes"):
            return
        landed = [one for version in sorted(self.truth) for one in self.truth[version]]
        assert len(set(landed)) == len(landed), "landed twice"
        for peer, sequence in landed:
            assert sequence not in self.nodes[peer].withdrawn, "landed, and offered again"

    def teardown(self):
        """With all wires mended and one hub alive, all nodes come back to one truth and go on."""
        if not hasattr(self, "nodes"):
            return
        self.cut.clear()
        self.run(25.0)
        hubs = [broker for broker in self.brokers.values() if isinstance(broker, Broker) and broker.alive]
        newest = max(hubs, key=lambda broker: broker.hub.term, default=None)
        if newest is None:  # only a standby that was not in step is left: it says so
            assert self.brokers[SECOND].succession.obstacle(self.now) or self.brokers[SECOND].alive is False
            return
        before = newest.hub.version
        self.run(12.0)
        assert newest.hub.version > before
        assert {node.at for node in self.nodes.values() if node.peer.state is PeerState.LIVE} == {newest.address}


def test_a_first_that_is_cut_off_with_a_few_of_its_nodes_tells_them_nothing_new_and_steps_down():
    world = World()
    world.begin()
    first = world.brokers[FIRST]
    for one in (SECOND, "b#1", "c#1"):
        world.cut_a_wire(FIRST, one)
    world.cut_a_wire(SECOND, "a#1")
    world.run(12.0)
    assert world.brokers[SECOND].hub.term == 1 and first.alive and not first.hub.may_announce
    seen = world.nodes["a#1"].peer.version
    world.run(3.0)
    assert world.nodes["a#1"].peer.version == seen < world.nodes["b#1"].peer.version
    world.mend_all()
    world.run(8.0)
    assert not first.alive and {node.peer.term for node in world.nodes.values()} == {1}
    world.what_has_landed_was_not_withdrawn_and_landed_once()


TestWorld = World.TestCase
TestWorld.settings = hypothesis_settings(max_examples=12, stateful_step_count=10)
