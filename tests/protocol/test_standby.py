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

from zmqtrain.protocol.effects import (
    Broadcast,
    Connect,
    Deliver,
    Disconnect,
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
from zmqtrain.protocol.messages import (
    Aggregate,
    Fetch,
    Goodbye,
    Hello,
    Publish,
    Refused,
    Snapshot,
    Welcome,
    model_to_wire,
)
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.search import MOST_LEARNT
from zmqtrain.protocol.standby import STANDBY, TAKES_OVER, Follower, Succession, Tenure
from zmqtrain.protocol.standby_messages import Books, Replica
from zmqtrain.runtime.broker.replicas import Replicas
from zmqtrain.settings import RunSettings
from zmqtrain.types import LeafSpec

MODEL = (LeafSpec("w", (8,), "float32"),)
SETTINGS = RunSettings(every=2, delay=1, release="immediately", initial="founder", lost_seconds=1.0)
FIRST, SECOND = "tcp://first:1", "tcp://second:1"
TAKEOVER_SECONDS = 1.0


def follower(books=None, holds=5):
    """A standby in step at a version, with two nodes."""
    one = Follower("s#1", "s", SECOND)
    one.start(0.0)
    one.receive(Welcome("run-1", holds, SETTINGS.to_dict()), 0.0)
    one.receive(Replica(1, holds, (8,), 1), 0.0)
    assert [type(effect) for effect in one.received(1)] == [Deliver, Send]
    one.receive(Books(json.dumps(books or {"nodes": ["a", "b"], "in_step": True})), 0.0)
    return one


def turned(succession, *peers, version=5, now=2.0):
    for peer in peers:
        succession.turned_to(peer, Hello(peer, run="run-1", version=version), now)


# ---------------------------------------------------------------------- the decision


def test_a_standby_takes_over_when_the_first_is_gone_and_half_of_the_nodes_say_so():
    one = follower()
    succession = Succession(one, 1.0)
    turned(succession, "a", "b")
    assert not succession.is_due(9.0)  # the first is there
    one.gone(1.0)
    assert not succession.is_due(2.5)  # and nobody has said so since
    turned(succession, "a")
    assert not succession.is_due(1.9) and succession.is_due(2.5)
    assert not succession.is_due(9.0)  # the word of a node grows old


def test_a_standby_that_was_not_in_step_or_knows_less_than_a_node_says_so_and_does_not_take_over():
    behind = follower({"nodes": ["a"], "in_step": False})
    behind.gone(1.0)
    succession = Succession(behind, 1.0)
    turned(succession, "a")
    assert not succession.is_due(3.0) and "not in step" in succession.obstacle(3.0)
    ignorant = follower()
    ignorant.gone(1.0)
    succession = Succession(ignorant, 1.0)
    turned(succession, "a", version=6), turned(succession, "b")
    assert not succession.is_due(3.0) and "a node has seen version 6" in succession.obstacle(3.0)
    assert "never heard" in Succession(Follower("s#1", "s", SECOND), 1.0).obstacle(3.0)


def test_a_standby_that_is_welcomed_again_is_in_step_only_once_the_first_says_so():
    one = follower()
    one.gone(1.0)
    assert one.lost_at == 1.0 and one.in_step
    one.tick(1.0)
    one.receive(Welcome("run-1", 9, SETTINGS.to_dict()), 1.5)
    assert one.lost_at is None and not one.in_step
    effects = one.receive(Aggregate(2, 9, "x", (0,), (1,), (8,), (), 1), 1.6)
    assert one.state is PeerState.CONNECTING and effects[0].reason == "gap"


def test_a_standby_ends_with_the_run_and_reads_no_nonsense():
    one = follower()
    one.receive(Books("no JSON"), 1.0)
    assert one.state is PeerState.CONNECTING and not one.in_step
    one.receive(Goodbye("the run is over"), 1.0)
    assert one.over


def test_a_first_goes_on_without_its_standby_only_with_more_than_half_of_its_nodes():
    tenure = Tenure()
    assert tenure.holds(0)  # it never had one
    tenure.joined(SECOND)
    tenure.lost(["a", "b", "c", "d"])
    assert [tenure.holds(nodes) for nodes in (2, 3)] == [False, True]
    tenure.said_goodbye()
    assert tenure.holds(2)
    again = Tenure()
    again.restore(tenure.state(9))
    assert (again.standby, again.holds(1), again.holds(2)) == (SECOND, False, True)
    tenure.dismissed("")
    assert tenure.holds(0) and tenure.standby == ""
    again.dismissed(TAKES_OVER)
    assert again.ended and not again.holds(9)


def test_a_hub_takes_one_standby_and_says_why_not_another():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    assert Replicate("s#1") in hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    (refused,) = hub.receive("t#1", Hello("t", "standby", address="tcp://third:1"), 0.0)
    assert refused.message.reason == "occupied" and SECOND in refused.message.text
    (refused,) = hub.receive("u#1", Hello("u", "standby", address="nowhere"), 0.0)
    assert refused.message.reason == "occupied"
    several = Hub(RunSettings(masters=2, initial="founder"), release_rule_from_spec("immediately"), "run-1")
    (refused,) = several.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    assert "several masters" in refused.message.text


def test_who_was_not_there_when_the_first_was_lost_has_no_vote_for_the_standby():
    one = follower({"nodes": ["a", "b", "c"], "in_step": True})
    one.gone(1.0)
    succession = Succession(one, 1.0)
    turned(succession, "a", *(f"stranger {number}" for number in range(3000)))
    assert not succession.is_due(3.0) and len(succession._votes) == 1024
    turned(succession, "a", "b")
    assert succession.is_due(3.0)


def test_a_standby_that_comes_again_or_another_in_its_place_holds_up_nobody_until_it_is_in_step_again():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    hub.in_step()
    assert hub.tenure.follows
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 1.0)
    assert not hub.tenure.follows and hub.may_announce
    hub.in_step()
    effects = hub.receive("t#1", Hello("t", "standby", address=SECOND), 2.0)
    assert any(isinstance(effect, Disconnect) and effect.peer == "s#1" for effect in effects)
    assert hub.standby.peer == "t#1" and list(hub.members) == ["t#1"] and not hub.tenure.follows


def test_a_standby_is_copied_after_the_releases_that_its_own_hello_brings_about():
    hub = Hub(SETTINGS, release_rule_from_spec("time:seconds=1"), "run-1")
    hub.receive("a#1", Hello("a"), 0.0)
    hub.receive("a#1", Fetch(-1, model_to_wire(MODEL)), 0.0)
    hub.receive("a#1", Snapshot(1, 0, (32,)), 0.0)
    hub.received("a#1", 1, 0.0)
    hub.receive("a#1", Publish(2, 0, 0, 0, SETTINGS.codec, (8,), 1, 1, nan), 0.0)
    hub.received("a#1", 2, 0.0)
    effects = hub.receive("s#1", Hello("s", "standby", address=SECOND), 5.0)
    kinds = [type(effect) for effect in effects]
    assert kinds[-1] is Replicate and Reduce in kinds


def test_a_run_that_goes_back_waits_for_its_standby_to_hold_the_new_course_of_it():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    replicas, told = Replicas(hub, lambda peer, text: None, lambda effects: None), []
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    replicas.holds(9, 0.0)
    assert hub.tenure.follows
    replicas.go_back(4)
    replicas.announce(5, lambda: told.append(5), 1.0)
    assert not told
    replicas.holds(5, 1.1)
    assert told == [5]


def test_a_first_that_waits_for_its_nodes_takes_its_standby_back():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    sent_away, told = [], []
    replicas = Replicas(hub, lambda peer, text: sent_away.append(peer), lambda effects: None)
    hub.tenure.joined(SECOND)
    hub.tenure.lost(["a", "b"])
    replicas.announce(1, lambda: told.append(1), 0.0)
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 10.0)
    replicas.tick(15.0)  # it is being copied, which takes its time
    assert not sent_away and not told
    replicas.copied()
    replicas.holds(1, 20.0)
    replicas.tick(20.1)
    assert told == [1] and not sent_away
    replicas.announce(2, lambda: told.append(2), 20.5)
    replicas.tick(22.0)
    assert not sent_away
    replicas.tick(23.0)
    assert sent_away == ["s#1"] and told == [1]


def test_a_node_believes_no_hub_of_a_lower_term_and_such_a_hub_says_so_itself():
    peer = Peer("a#1", "a", addresses=[FIRST])
    peer.start(0.0)
    peer.receive(Welcome("run-1", 3, SETTINGS.to_dict(), term=2), 0.0)
    peer.gone(1.0)
    (disconnect,) = peer.receive(Welcome("run-1", 9, SETTINGS.to_dict(), term=1), 1.0)
    assert disconnect.reason == "term" and peer.term == 2
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    (refused,) = hub.receive("a#1", Hello("a", run="run-1", version=3, term=2), 0.0)
    assert refused.message.reason == "term"


def test_a_node_looks_for_its_hub_and_for_the_standby_in_turn():
    peer = Peer("a#1", "a", addresses=[FIRST])
    peer.start(0.0)
    peer.receive(Welcome("run-1", -1, SETTINGS.to_dict(), standby=SECOND), 0.0)
    peer.gone(1.0)
    assert [type(effect) for effect in peer.tick(1.0)] == [Send]
    assert peer.tick(2.0)[0] == Connect(SECOND)
    assert peer.receive(Refused("standby", STANDBY), 2.1) == [] and peer.state is PeerState.CONNECTING
    assert peer.obstacle == STANDBY
    assert peer.tick(4.0)[0] == Connect(FIRST)


def test_a_node_that_is_given_several_addresses_tries_them_and_the_newest_standbys_in_turn():
    peer = Peer("a#1", "a", addresses=[FIRST, SECOND])
    for number in range(MOST_LEARNT + 1):
        peer.know(f"tcp://pc{number}:1")
    peer.know(SECOND)
    assert peer.addresses == (FIRST, SECOND, *(f"tcp://pc{number}:1" for number in range(1, MOST_LEARNT + 1)))
    peer.start(0.0)
    tried = [peer.tick(3.0 * number)[0].address for number in range(1, len(peer.addresses) + 1)]
    assert tried == [*peer.addresses[1:], FIRST]


# ---------------------------------------------------------------------- whoever dies or is cut off


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
TestWorld.settings = hypothesis_settings(max_examples=12, stateful_step_count=10, deadline=None)
