"""Lives, connections and numbers: what is not of now is dropped, counted, and believed by nobody.

Rule: the network below may cut, repeat and bring back whatever it has ever carried; processes of one id may end, begin
again from what they had saved, and live side by side.
"""

from __future__ import annotations

from collections import deque
from math import nan

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fixed import FIXED_RUN
from tests.grids import examples
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Deliver, Expect, Found, Reduce, Send, SendTo, Serve, Withdraw
from zmqtrain.protocol.fencing import (
    LIFE,
    MAX_INCARNATION,
    Connection,
    Fence,
    Stamp,
    Verdict,
    begin_incarnation,
    latest_incarnation,
)
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import (
    Aggregate,
    Goodbye,
    Heartbeat,
    Hello,
    Publish,
    Refused,
    Snapshot,
    Welcome,
    replace_fields,
)
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec

MODEL = (LeafSpec("w", (8,), "float32"),)
SETTINGS = RunSettings(**FIXED_RUN | {"every": 2, "delay": 1, "release": "immediately", "initial": "founder"})


def hub():
    return Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")


def greeted(incarnation=7):
    one = hub()
    one.receive("a", Hello("a", incarnation=incarnation), 0.0)
    return one


def refusals(effects):
    return [(effect.message.reason, effect.stamp) for effect in effects if isinstance(effect, SendTo)]


# ---------------------------------------------------------------------- numbers


def test_what_one_side_says_the_other_hears_once_and_in_order():
    node, at_hub = Connection(7), Connection(7, heard=1)
    assert node.stamp() == Stamp(7, 1)
    stamps = [node.stamp() for _ in range(3)]
    assert [at_hub.judge(stamp) for stamp in stamps] == [Verdict.NOW] * 3
    assert [at_hub.judge(stamp) for stamp in stamps] == [Verdict.DUPLICATE] * 3
    node.stamp()
    assert at_hub.judge(node.stamp()) is Verdict.GAP
    assert at_hub.judge(Stamp(6, 5)) is Verdict.FORMER
    assert at_hub.judge(node.stamp(counted=False), counted=False) is Verdict.NOW


def test_a_new_life_begins_above_the_one_before_whatever_the_clock_says():
    assert begin_incarnation(0, 10**18) == 10**18
    assert begin_incarnation(2 * 10**18, 10**18) == 2 * 10**18 + LIFE
    assert begin_incarnation(2 * 10**18, 10**18, 5) == 2 * 10**18 + LIFE + 5


def test_incarnation_0_is_not_fenced():
    one = hub()
    for _ in range(2):
        assert any(isinstance(effect.message, Welcome) for effect in one.receive("a", Hello("a"), 0.0)[-1:])
    assert one.judge("a", Stamp(), Heartbeat(), 0.0) is None and one.stamp("a") == Stamp()
    assert one.judge("nobody", Stamp(), Heartbeat(), 0.0) is None


def test_the_fence_forgets_who_is_gone():
    fence = Fence()
    fence.open("a", 7), fence.open("b", 8)
    fence.keep({"b"})
    assert fence.stamp("a") is None and fence.judge("a", Stamp(7, 2)) is None and fence.stamp("b") == Stamp(8, 1)


# ---------------------------------------------------------------------- at the hub


def test_a_message_of_a_former_life_is_dropped_and_counted_and_costs_nobody_his_place():
    one = greeted()
    assert one.judge("a", Stamp(6, 4), Publish(1, 0, 0, 0, "x", (1,), 1, 1, nan), 0.0) == []
    assert one.fence.dropped == {"former": 1} and one.members["a"].dropped == 1
    assert one.roster(0.0).hub["former"] == 1 and one.roster(0.0).members[0]["dropped"] == 1


def test_the_older_of_two_processes_of_one_id_is_told_so_and_the_younger_is_not():
    one = greeted()
    assert refusals(one.judge("a", Stamp(6, 9), Heartbeat(), 0.0)) == [("superseded", Stamp(6))]
    assert refusals(one.receive("a", Hello("a", incarnation=6), 0.0)) == [("superseded", Stamp(6))]
    assert one.judge("a", Stamp(), Heartbeat(), 0.0) == []  # who does not say who he is gets no answer
    peer = Peer("a", "a", incarnation=6)
    peer.start(0.0)
    assert peer.judge(Stamp(6), Refused("superseded", ""), 0.0) == []  # of its Hello before this one
    assert peer.judge(Stamp(7), Refused("superseded", ""), 0.0) is None
    peer.receive(Refused("superseded", "ends"), 0.0)
    assert peer.state is PeerState.CLOSED


def test_a_hello_that_comes_twice_changes_nothing():
    one = greeted()
    assert one.receive("a", Hello("a", incarnation=7), 0.0) == [] and one.fence.dropped == {"double": 1}


def test_a_gap_begins_the_connection_anew():
    one = greeted()
    effects = one.judge("a", Stamp(7, 3), Heartbeat(), 0.0)
    assert refusals(effects) == [("unknown", Stamp(7))] and "a" not in one.members
    assert refusals(one.judge("a", Stamp(7, 4), Heartbeat(), 0.0)) == [("unknown", Stamp(7))]
    assert one.judge("a", Stamp(7, 4), Goodbye(), 0.0) == []


def test_a_restarted_hub_knows_the_lives_that_it_has_heard_of():
    again = hub()
    again.restore(greeted().state() | {"version": -1})
    assert refusals(again.receive("a", Hello("a", incarnation=6), 0.0)) == [("superseded", Stamp(6))]


def test_a_node_that_misses_a_message_says_hello_again():
    peer = Peer("a", "a", incarnation=6)
    peer.start(0.0)
    welcome = Welcome("run-1", -1, SETTINGS.to_dict())
    assert peer.judge(Stamp(7, 1), welcome, 0.0) is None
    peer.receive(welcome, 0.0)
    assert peer.judge(Stamp(7, 1), welcome, 0.0) == [] and peer.dropped == {"double": 1}
    assert peer.judge(Stamp(7, 3), Heartbeat(), 0.0) != [] and peer.state is PeerState.CONNECTING


# ---------------------------------------------------------------------- whatever the network does


class Process:
    """One process of a node: its machine, and what it has computed, offered and been told has landed."""

    def __init__(self, saved, clock, number):
        self.peer = Peer("a", "a", incarnation=begin_incarnation(saved[0], clock, 1000 * number))
        self.sequence, self.landed, self.withdrawn = saved[1], set(), set()


class Wire(RuleBasedStateMachine):
    """A hub, processes of ONE id, and a network that forgets nothing: what went up or down once may come again."""

    @initialize()
    def begin(self):
        self.hub, self.clock, self.now, self.transfer = hub(), 1 << 40, 0.0, 0
        self.up, self.down, self.carried_up, self.carried_down = deque(), deque(), [], []
        self.processes, self.saved = [], (0, 0)
        self.landed, self.accepted, self.owners, self.version, self.open = [], {}, {}, -1, {}
        self.start()

    @rule()
    def start(self):
        """A process begins, from what the one before it has saved; the one before may go on."""
        if len(self.processes) < 4:
            self.clock += 1000
            process = Process(self.saved, self.clock, len(self.processes))
            self.processes.append(process)
            self.carry_out(process, process.peer.start(self.now) + process.peer.join(MODEL, self.now))

    @rule()
    def save(self):
        self.saved = (self.newest.peer.incarnation, self.newest.sequence)

    @property
    def newest(self):
        return self.processes[-1]

    def carry_out(self, process, effects):
        for effect in effects:
            match effect:
                case Send(message):
                    one = (process.peer.stamp(), message)
                    self.up.append(one), self.carried_up.append(one)
                case Serve():
                    self.transfer += 1
                    one = (process.peer.stamp(), Snapshot(self.transfer, 0, (64,)))
                    self.up.append(one), self.carried_up.append(one)
                case Deliver(_, landed):
                    assert not process.landed & set(landed), "told twice"
                    process.landed |= set(landed)
                case Withdraw(sequence):
                    process.withdrawn.add(sequence)

    def hear(self, stamp, message):
        instead = self.hub.judge("a", stamp, message, self.now)
        self.hub_does(self.hub.receive("a", message, self.now) if instead is None else instead)

    def hub_does(self, effects):
        for effect in effects:
            match effect:
                case SendTo(peer, message, stamp):
                    self.say(message, self.hub.stamp(peer) if stamp is None else stamp)
                case Expect(peer, announcement):
                    self.open[announcement.transfer] = announcement
                case Found():
                    self.version = 0
                case Serve(_, known, landed):
                    self.transfer += 1
                    sizes = () if known == self.version else (64,)
                    self.say(Snapshot(self.transfer, self.version, sizes, landed), self.hub.stamp("a", False), False)
                case Reduce():
                    self.landed += effect.landed
                    self.version = effect.version
                    self.transfer += 1
                    message = Aggregate(self.transfer, effect.version, "x", (0,), (1,), (64,), effect.landed, 1)
                    self.say(message, self.hub.stamp("a", False), False)

    def say(self, message, stamp, counted=True):
        self.down.append((stamp, message, counted)), self.carried_down.append((stamp, message, counted))

    @precondition(lambda self: self.up)
    @rule()
    def deliver_up(self):
        self.hear(*self.up.popleft())

    @precondition(lambda self: self.carried_up)
    @rule(data=st.data())
    def replay_up(self, data):
        self.hear(*data.draw(st.sampled_from(self.carried_up)))

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def deliver_down(self, data):
        self.tell(*self.down.popleft(), data.draw(st.integers(0, len(self.processes) - 1)))

    @precondition(lambda self: self.carried_down)
    @rule(data=st.data())
    def replay_down(self, data):
        one = data.draw(st.sampled_from(self.carried_down))
        self.tell(*one, data.draw(st.integers(0, len(self.processes) - 1)))

    def tell(self, stamp, message, counted, number):
        process = self.processes[number]
        instead = process.peer.judge(stamp, message, self.now, counted)
        self.carry_out(process, process.peer.receive(message, self.now) if instead is None else instead)
        if instead is None and isinstance(message, Snapshot | Aggregate) and message.sizes:
            self.carry_out(process, process.peer.received(message.transfer))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def chunks_come(self, data):
        transfer = data.draw(st.sampled_from(sorted(self.open)))
        one = self.open.pop(transfer)
        member = self.hub.members.get("a")
        if member is not None and member.open.get(transfer) == one and isinstance(one, Publish):
            assert one.sequence not in self.accepted, "accepted twice"
            self.accepted[one.sequence] = self.owners[transfer]
        self.hub_does(self.hub.received("a", transfer, self.now))

    @rule(number=st.integers(0, 3))
    def publish(self, number):
        process = self.processes[number % len(self.processes)]
        if process.peer.state is PeerState.LIVE:
            process.sequence = max(process.sequence, process.peer.heard + 1)
            self.transfer += 1
            publish = Publish(self.transfer, process.sequence, 0, 0, SETTINGS.codec, (64,), 8, 8, nan)
            process.sequence += 1
            self.owners[self.transfer] = process
            self.carry_out(process, process.peer.publish(publish))

    @rule()
    def cut(self):
        """The connections are lost, which the processes see, and all that is on its way (but it may be repeated)."""
        self.up.clear(), self.down.clear()
        for process in self.processes:
            self.carry_out(process, process.peer.distrust("cut", self.now))

    @rule(seconds=st.sampled_from([0.3, 1.1, 4.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.hub_does(self.hub.tick(self.now))
        for process in self.processes:
            self.carry_out(process, process.peer.tick(self.now))

    @invariant()
    def nothing_lands_twice_and_what_has_landed_was_not_withdrawn(self):
        if not hasattr(self, "hub"):
            return
        assert len(set(self.landed)) == len(self.landed)
        landed = {sequence for _, sequence in self.landed}
        assert landed <= self.accepted.keys()
        again = [sequence for sequence in landed if sequence in self.accepted[sequence].withdrawn]
        assert not again, "landed, and will be offered again"
        kept = landed | {one.sequence for _, one in self.hub.rounds.pending}
        assert kept == self.accepted.keys(), "accepted, and lost"

    def teardown(self):
        """The newest process comes back to a hub that answers, and is alone there."""
        if not hasattr(self, "hub"):
            return
        self.cut()
        for _ in range(60):
            self.time_passes(1.1)
            while self.up or self.down or self.open:
                while self.open:
                    transfer, _ = self.open.popitem()
                    self.hub_does(self.hub.received("a", transfer, self.now))
                if self.up:
                    self.deliver_up()
                elif self.down:
                    one = self.down.popleft()
                    for number in range(len(self.processes)):
                        self.tell(*one, number)
        alive = [process for process in self.processes if process.peer.state is not PeerState.CLOSED]
        assert alive == [self.newest] and self.newest.peer.state is PeerState.LIVE


TestWire = Wire.TestCase
TestWire.settings = hypothesis_settings(max_examples=examples(50), stateful_step_count=40)


def test_a_hub_takes_no_incarnation_of_a_clock_that_is_a_day_ahead_of_its_own():
    now = 1_800_000_000 * 10**9
    one = hub()
    one.latest_incarnation = latest_incarnation(now)
    ahead = Hello("a", incarnation=now + 86_401 * 10**9)
    (refused,) = one.receive("a#1", ahead, 0.0)
    assert refused.message.reason == "clock" and one.records.incarnation("a#1") == 0
    one.receive("a#1", replace_fields(ahead, incarnation=now + 86_399 * 10**9), 0.0)
    assert "a#1" in one.members
    assert latest_incarnation(0) == MAX_INCARNATION - 1 == latest_incarnation(MAX_INCARNATION)
