"""Two hubs and their nodes, in virtual time: whoever dies or is cut off, there is one truth, and nothing is lost of it.

Rule 1: a hub here is the machines of a living one, with a `StandbyService`.  Rule 2: the wires between any two
may be cut and mended, any hub or node may be killed; nodes come, leave and are started again as the ones that they
were, processes come and go, and strangers tell the standby to take over.  Rule 3: what a node has been told of is
written down, and is never taken back: of each version there is one course of the run that leads to it.
"""

from __future__ import annotations

import json
from collections import Counter
from math import nan
from types import SimpleNamespace
from typing import ClassVar

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.grids import examples
from tests.protocol.standbys import FIRST, MODEL, SECOND, SETTINGS
from zmqtrain.broker.standby import StandbyService
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
from zmqtrain.protocol.fencing import LIFE, Stamp
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import Aggregate, Goodbye, Hello, Promote, Publish, Refused, Replica, Snapshot
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.standby import Follower, PrimaryLease, TakeoverPolicy

TAKEOVER_SECONDS = 1.0
NAMES = "abcdef"
IDS = [f"{name}#1" for name in NAMES]


class Broker:
    """A living hub: the machine, its standby's `StandbyService`, and what it has released and told."""

    def __init__(self, world, address, state=None, course=None):
        self.world, self.address, self.alive = world, address, True
        self.hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1", world.now)
        if state is not None:
            self.hub.restore(state)
        self.following, self.transfer = set(), 0
        self.course = {} if course is None else course
        self.access = SimpleNamespace(connects=False)
        self.replicas = StandbyService(self)

    def reconnect(self, peer, text):
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
                case Found(peer):
                    self.course = {0: (peer,)}
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
            copy = json.loads(json.dumps(self.hub.state())), dict(self.course)
            self.world.copies[self.transfer, self.address] = copy
            self.following.add(standby.peer)
            self.say(standby.peer, Replica(self.transfer, self.hub.version, (8,), 1), counted=False)

    def serve(self, peer, version, landed):
        if peer in self.hub.members:
            self.transfer += 1
            self.following.add(peer)
            self.world.courses[self.address, self.transfer] = self.course[version]
            self.say(peer, Snapshot(self.transfer, version, (8,), landed), counted=False)

    def release(self, reduce):
        self.transfer += 1
        message = Aggregate(self.transfer, reduce.version, "x", (0,), (1,), (8,), reduce.landed, 1, reduce.samples)
        self.course[reduce.version] = hash((self.course[reduce.version - 1], reduce.landed))
        self.world.courses[self.address, self.transfer] = self.course[reduce.version]
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
        lost = self.hub.lease.standby and self.hub.standby is None
        if lost and other.alive and isinstance(other, Broker) and frozenset((FIRST, SECOND)) not in self.world.cut:
            self.alive = other.hub.term <= self.hub.term  # it asks there, and steps down


class Waiting:
    """A standby that follows, at its port."""

    def __init__(self, world):
        self.world, self.address, self.alive = world, SECOND, True
        self.follower = Follower("s#1", "s", SECOND, incarnation=1)
        self.succession = TakeoverPolicy(self.follower, TAKEOVER_SECONDS)
        self.hub, self.course = None, {}
        self.do(self.follower.start(world.now))

    def hear(self, peer, stamp, message):
        answer = self.succession.receive(peer, stamp, message, False, self.world.now)
        if answer is not None:
            self.world.carry(self.address, peer, answer[1], answer[0], True)

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
                    state, self.course = self.world.copies[replica.transfer, FIRST]
                    self.hub.restore(state)
                case Deliver(Aggregate() as release):
                    self.course[release.version] = hash((self.course[release.version - 1], release.landed))
                    self.hub.replay(release.version, release.landed, release.samples)

    def tick(self):
        self.do(self.follower.tick(self.world.now))
        if self.hub is not None and self.succession.is_due(self.world.now):
            self.world.seen["taken over"] += 1
            state = {**self.hub.state(), "term": self.follower.term + 1, "tenure": PrimaryLease().state()}
            self.world.brokers[SECOND] = Broker(self.world, SECOND, state, self.course)


class Node:
    """A node: its machine, where it looks, what it has been told of. alive: it has not left, nor been killed."""

    def __init__(self, world, name):
        self.world, self.id = world, f"{name}#1"
        self.sequence, self.withdrawn, self.landed = 0, set(), set()
        self.live(Peer(self.id, name, incarnation=1, addresses=[FIRST]))

    def live(self, peer):
        self.peer, self.at, self.alive = peer, FIRST, True
        self.do(peer.start(self.world.now) + peer.join(MODEL, self.world.now))

    def again(self):
        """Start anew as the node that it was, from a checkpoint of the moment at which it ended."""
        before, self.at = self.peer, FIRST
        peer = Peer(self.id, before.name, incarnation=before.incarnation + LIFE + 1, addresses=before.search.addresses)
        if before.version >= 0:
            peer.resume(before.run, before.version, SETTINGS, MODEL, sorted(before.in_flight))
            peer.term = before.term
        self.live(peer)

    def leave(self):
        self.do(self.peer.leave("done"))
        self.alive = False

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

    def tick(self):
        if round(10 * self.world.now) % 3 == 0:
            self.publish()
        self.do(self.peer.tick(self.world.now))

    def publish(self):
        if self.peer.state is PeerState.LIVE and len(self.peer.in_flight) < 2:
            self.sequence = max(self.sequence, self.peer.heard + 1)
            transfer, sequence = self.sequence + 1, self.sequence
            self.sequence += 1
            base = max(0, self.peer.version)
            self.do(self.peer.publish(Publish(transfer, sequence, base, 0, SETTINGS.codec, (8,), 8, 8, nan)))


class World(RuleBasedStateMachine):
    """Two addresses, some nodes, and the wires between any two of them.

    truth: of each version that a node was told of, the course of the run that led to it.  courses: of what each hub has
    sent.  seen: what has happened, to show that it does.
    """

    seen: ClassVar = Counter()

    @initialize(nodes=st.integers(2, 4))
    def begin(self, nodes=3):
        self.now, self.cut, self.copies, self.courses, self.truth, self.landed = 0.0, set(), {}, {}, {}, {}
        self.wires, self.processes, self.strangers = [], 0, 0
        self.brokers = {FIRST: Broker(self, FIRST)}
        self.brokers[SECOND] = Waiting(self)
        self.nodes = {}
        for name in NAMES[:nodes]:
            self.come(name)
        self.run(3.0)
        assert self.brokers[FIRST].hub.lease.follows

    def come(self, name):
        node = self.nodes[f"{name}#1"] = Node(self, name)
        return node

    def carry(self, sender, receiver, stamp, message, counted):
        if frozenset((self.place(sender), self.place(receiver))) not in self.cut:
            self.wires.append((sender, receiver, stamp, message, counted))

    def place(self, name):
        return SECOND if name == "s#1" else name

    def deliver(self):
        while self.wires:
            sender, receiver, stamp, message, counted = self.wires.pop(0)
            if receiver in self.nodes:
                node = self.nodes[receiver]
                node.hear(stamp, message, counted) if node.alive and node.at == sender else None
            elif receiver == "s#1":
                if isinstance(self.brokers[SECOND], Waiting) and self.brokers[SECOND].alive:
                    self.brokers[SECOND].told(stamp, message, counted)
            elif receiver in self.brokers and self.brokers[receiver].alive:
                self.brokers[receiver].hear(sender, stamp, message)

    def heard_of(self, node, announcement):
        """A node has applied this: whoever else hears of that version hears the same."""
        course = self.courses.get((node.at, announcement.transfer))
        if course is not None and announcement.version >= 0:
            told = self.truth.setdefault(announcement.version, course)
            assert told == course, f"two truths of version {announcement.version}"
        if isinstance(announcement, Aggregate):
            self.landed[announcement.version] = announcement.landed

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            for node in self.nodes.values():
                if node.alive:
                    node.tick()
            for broker in list(self.brokers.values()):
                if broker.alive:
                    broker.tick()
            self.deliver()

    # -- what happens

    @rule(seconds=st.sampled_from([0.3, 1.5, 4.0, 9.0]))
    def time_passes(self, seconds):
        self.run(seconds)

    @rule(one=st.sampled_from([FIRST, SECOND, *IDS]), other=st.sampled_from([FIRST, SECOND]))
    def cut_a_wire(self, one, other):
        if one != other:
            self.cut.add(frozenset((one, other)))

    @rule(with_first=st.sets(st.sampled_from(IDS)), seconds=st.sampled_from([0.3, 4.0, 9.0]))
    def partition(self, with_first, seconds):
        """The two hubs do not hear each other, and each node hears one of them."""
        self.cut = {frozenset((FIRST, SECOND))}
        self.cut |= {frozenset((one, SECOND if one in with_first else FIRST)) for one in IDS}
        self.run(seconds)

    @rule()
    def mend_all(self):
        self.cut.clear()

    @rule(which=st.sampled_from([FIRST, FIRST, SECOND]))
    def kill(self, which):
        if all(broker.alive for broker in self.brokers.values()):
            self.brokers[which].alive = False

    @rule(which=st.sampled_from(IDS), seconds=st.sampled_from([0.0, 1.5]))
    def a_node_comes(self, which, seconds):
        if which not in self.nodes:
            self.come(which[0])
        self.run(seconds)

    @precondition(lambda self: any(not node.alive for node in self.nodes.values()))
    @rule(seconds=st.sampled_from([0.0, 1.5, 4.0]))
    def nodes_are_started_again(self, seconds):
        """All that have left or were killed, from their checkpoints."""
        for node in self.nodes.values():
            if not node.alive:
                node.again()
                self.seen["again"] += 1
        self.run(seconds)

    @rule(which=st.sampled_from(IDS), polite=st.booleans())
    def a_node_goes(self, which, polite):
        node = self.nodes.get(which)
        if node is not None and node.alive:
            if polite:
                node.leave()
            node.alive = False
            self.deliver()

    @rule(count=st.integers(1, 3))
    def processes_come_and_go(self, count):
        for _ in range(count):
            self.processes += 1
            peer = f"process#{self.processes}"
            self.carry(peer, FIRST, Stamp(), Hello(peer, "process"), True)
            self.carry(peer, FIRST, Stamp(), Goodbye(), True)
        self.deliver()

    @rule(incarnation=st.integers(0, 1))
    def a_stranger_tells_the_standby_to_take_over(self, incarnation):
        self.strangers += 1
        peer = f"stranger#{self.strangers}"
        self.carry(peer, SECOND, Stamp(incarnation, 1), Hello(peer, "observer", incarnation=incarnation), True)
        self.carry(peer, SECOND, Stamp(incarnation, 2 * incarnation), Promote(), True)
        was_waiting = isinstance(self.brokers[SECOND], Waiting)
        self.deliver()
        assert not (was_waiting and self.brokers[SECOND].succession.promoted)

    # -- what is true

    @invariant()
    def what_has_landed_was_not_withdrawn_and_landed_once(self):
        if not hasattr(self, "nodes"):
            return
        landed = [one for version in sorted(self.landed) for one in self.landed[version]]
        assert len(set(landed)) == len(landed), "landed twice"
        for peer, sequence in landed:
            assert sequence not in self.nodes[peer].withdrawn, "landed, and offered again"

    def teardown(self):
        """With all wires mended, all nodes that are left come back to one truth and go on: unless the hub that is left
        may not go on by itself, as too few of its crew are left."""
        if not hasattr(self, "nodes"):
            return
        self.cut.clear()
        before = {address: getattr(broker.hub, "version", -1) for address, broker in self.brokers.items()}
        until = self.now + 37.0
        while self.now < until and not self.has_settled(before):
            self.run(1.0)
        newest, waiting = self.newest(), self.brokers[SECOND] if isinstance(self.brokers[SECOND], Waiting) else None
        if self.has_settled(before):
            self.seen["went on"] += 1
        elif newest is None:  # a standby is left that says why it does not take over, or has too few of its crew
            assert waiting is not None
            assert not waiting.alive or waiting.succession.obstacle(self.now) or not self.is_enough_for(waiting)
            self.seen["stood still"] += 1
        else:  # the other is dead, whether it had taken over or not, and too few of the crew are here
            assert newest.address == FIRST and not self.brokers[SECOND].alive and not newest.hub.lease.holds
            self.seen["waited for its crew"] += 1

    def newest(self):
        hubs = [broker for broker in self.brokers.values() if isinstance(broker, Broker) and broker.alive]
        return max(hubs, key=lambda broker: broker.hub.term, default=None)

    def has_settled(self, before):
        """All nodes that can know of the newest hub are live there, and have had a new version of it."""
        if (newest := self.newest()) is None:
            return False
        here = [node for node in self.nodes.values() if node.alive and newest.address in node.peer.search.addresses]
        known = before[newest.address]
        return all(
            node.peer.state is PeerState.CLOSED
            or (node.peer.state is PeerState.LIVE and node.at == newest.address and node.peer.version > known)
            for node in here
        )

    def is_enough_for(self, waiting):
        """Whether half of the crew can turn to this standby, and has not let the first go on."""
        follower = waiting.follower
        turned = [
            peer
            for peer, incarnation in follower.electorate.items()
            if (node := self.nodes[peer]).alive and node.peer.incarnation - incarnation < LIFE
            if node.peer.without < follower.lease
        ]
        return bool(turned) and 2 * len(turned) >= len(follower.electorate)


def world_of(nodes):
    world = World()
    world.begin(nodes)
    return world


def two_sides(world, *with_first):
    """Cut the hubs off from each other; these nodes hear the first, the others the standby."""
    world.partition(set(with_first), 12.0)
    first, second = world.brokers[FIRST], world.brokers[SECOND]
    return first.alive and first.hub.lease.holds, isinstance(second, Broker)


def test_a_first_that_is_cut_off_with_a_few_of_its_nodes_tells_them_nothing_new_and_steps_down():
    world = world_of(3)
    first = world.brokers[FIRST]
    assert two_sides(world, "a#1") == (False, True)
    assert world.brokers[SECOND].hub.term == 1 and first.alive
    seen = world.nodes["a#1"].peer.version
    world.run(3.0)
    assert world.nodes["a#1"].peer.version == seen < world.nodes["b#1"].peer.version
    world.mend_all()
    world.run(8.0)
    assert not first.alive and {node.peer.term for node in world.nodes.values()} == {1}
    world.what_has_landed_was_not_withdrawn_and_landed_once()


def test_a_newcomer_does_not_make_a_majority_of_the_crew_that_is_cut_in_two():
    world = world_of(4)
    world.partition({"a#1", "b#1", "e#1", "f#1"}, 0.3)
    for name in "ef":
        world.come(name)
    assert two_sides(world, "a#1", "b#1", "e#1", "f#1") == (False, True)


def test_processes_that_leave_make_no_crew_smaller():
    world = world_of(4)
    world.partition({"a#1", "b#1"}, 9.0)
    world.processes_come_and_go(2)
    assert two_sides(world, "a#1", "b#1") == (False, True)


def test_a_node_that_left_the_first_and_is_started_again_has_no_vote_for_the_standby():
    world = world_of(4)
    world.partition({"a#1", "b#1", "d#1"}, 4.0)
    world.a_node_goes("d#1", polite=True)
    assert two_sides(world, "a#1", "b#1") == (True, False)
    world.nodes_are_started_again(0.0)
    assert two_sides(world, "a#1", "b#1") == (True, False)


def out_of_step_and_back():
    """A standby that nodes have waited for too long, as it was cut off; one of two nodes was, too, and came again."""
    world = world_of(2)
    for seconds in (0.3, 0.3, 1.5, 0.3):
        world.run(seconds)
    world.partition({"a#1"}, 0.3)
    world.mend_all()
    return world


def test_a_run_whose_standby_was_out_of_step_and_is_back_waits_for_no_node_that_came_again_meanwhile():
    world = out_of_step_and_back()
    version = world.brokers[FIRST].hub.version
    world.run(6.0)
    assert all(node.peer.version > version for node in world.nodes.values())
    assert world.brokers[FIRST].hub.standby is not None


def test_a_standby_that_is_back_in_time_is_in_step_again_once_it_may_be_though_nothing_is_released():
    world = out_of_step_and_back()
    for node in world.nodes.values():
        node.publish = lambda: None
    world.run(70.0)
    assert world.brokers[FIRST].hub.lease.follows


TestWorld = World.TestCase
TestWorld.settings = hypothesis_settings(max_examples=examples(40), stateful_step_count=12)
