"""The hub under whatever peers do: joins, leaves, scores, late, double and early publishes, transfers in any order.

Rule: the machine below acts as the living broker and its nodes would, and as nodes that should know better; after every
step the hub's word is compared with a ledger of its own.
"""

from __future__ import annotations

from math import inf, isnan, nan

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zmqtrain.errors import RemoteProtocolError
from zmqtrain.protocol.effects import (
    Accumulate,
    Average,
    Broadcast,
    Disconnect,
    Expect,
    Found,
    Lend,
    Propose,
    Reduce,
    SendTo,
    Serve,
)
from zmqtrain.protocol.hub import Hub, MemberState
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Publish, Refused, Snapshot, model_to_wire
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.settings import RunSettings
from zmqtrain.types import LeafSpec, is_barrier

WIRE = model_to_wire((LeafSpec("w", (8,), "float32"),))
PEERS = [f"{name}#1" for name in "abcde"]
SCORES = st.sampled_from([0.25, 0.5, 0.75, 1.0, inf, nan])
ASKABLE = {MemberState.WELCOMED, MemberState.WAITING, MemberState.APART, MemberState.LENDING}
"""Who can be asked for its parameters: a welcomed one by the Fetch that makes it wait, a lender once it has lent."""


class Patience:
    """Who is twice in a row worse than the best lags."""

    def __init__(self):
        self.scores, self.lagged = {}, {}

    def report(self, peer, score):
        self.scores[peer] = score
        best = (
            min((s, p) for p, s in self.scores.items() if s == s) if any(s == s for s in self.scores.values()) else None
        )
        worse = best is not None and not score <= best[0]
        self.lagged[peer] = self.lagged.get(peer, 0) + 1 if worse else 0
        return best[1] if self.lagged[peer] >= 2 else None

    def forget(self, peer):
        self.scores.pop(peer, None)
        self.lagged.pop(peer, None)


class HubMachine(RuleBasedStateMachine):
    """A hub, its peers and a ledger. Transfers: (peer, number) -> announcement, of those that the hub expects."""

    @initialize(
        initial=st.sampled_from(["founder", "best", "mean", "own"]),
        start_nodes=st.integers(1, 3),
        release=st.sampled_from(["all", "quorum", "immediately"]),
        elastic=st.sampled_from([1.0, 1.0, 0.5]),
    )
    def begin(self, initial, start_nodes, release, elastic):
        self.settings = RunSettings(initial=initial, start_nodes=start_nodes, release=release, elastic=elastic)
        self.hub = Hub(self.settings, release_rule_from_spec(release), "run-1", preemption=Patience())
        self.now, self.transfer, self.version = 0.0, 0, -1
        self.transfers, self.asked, self.averaging = {}, set(), None
        self.voters, self.own, self.said = set(), {}, {}
        self.sequences, self.accepted, self.landed = dict.fromkeys(PEERS, 0), set(), set()
        self.founders, self.served = [], set()

    # -- what the broker does

    def tell(self, peer, message):
        """Say something to the hub, and let it cost the sender its place, as the broker does."""
        before = {p: member.state for p, member in self.hub.members.items()}
        try:
            effects = self.hub.receive(peer, message, self.now)
        except RemoteProtocolError:
            effects = self.hub.gone(peer, "protocol", self.now)
        self.carry_out(effects, before, peer)

    def carry_out(self, effects, before, sender=None):
        known = set(before) | set(self.hub.members) | {sender}
        leaving = {effect.peer for effect in effects if isinstance(effect, Disconnect)}
        for effect in effects:
            match effect:
                case SendTo(peer, Fetch()):
                    assert before.get(peer) in ASKABLE, f"{peer} was asked while {before.get(peer)}"
                    assert self.hub.version == -1 and peer not in self.asked
                    assert peer in self.hub.members or peer in leaving  # several are lost in one tick
                    assert not any(key[0] == peer for key in self.transfers), "asked before it has given"
                    self.asked.add(peer)
                case SendTo(peer, message):
                    gone = isinstance(message, Refused)
                    assert peer in known and (gone or peer in self.hub.members or peer == sender)
                case Expect(peer, announcement):
                    assert peer in self.hub.members
                    self.transfers[peer, announcement.transfer] = announcement
                case Disconnect(peer):
                    assert peer in known
                    self.asked.discard(peer)
                    self.served.discard(peer)
                    self.voters.discard(peer)
                    self.transfers = {key: one for key, one in self.transfers.items() if key[0] != peer}
                case Found(peer):
                    assert not self.founders and self.hub.version == 0
                    told = [peer for peer in self.voters if not isnan(self.said.get(peer, nan))]
                    worse = [peer for peer in told if is_barrier(self.own[peer], self.said[peer])]
                    assert 2 * len(worse) <= len(told), "its founders find it worse"
                    self.voters.clear()
                    self.founders.append(peer)
                case Average(snapshots):
                    assert self.averaging is None and snapshots
                    self.averaging = snapshots
                case Propose(peers):
                    assert self.hub.version == -1 and set(peers) <= set(self.hub.members)
                    self.voters, self.said = set(peers), {}
                    self.own = {one: self.hub.members[one].score for one in peers}
                    assert all(abs(score) < inf for score in self.own.values())
                case Lend(lender, _, peers):
                    assert self.hub.version == -1 and lender not in peers and set(peers) <= set(self.hub.members)
                    assert len({self.hub.members[peer].lineage for peer in (lender, *peers)}) == 1
                case Serve(peer):
                    assert self.founders and self.hub.members[peer].state is MemberState.LIVE
                    self.served.add(peer)
                case Accumulate(peer, publish):
                    assert (peer, publish.sequence) in self.accepted - self.landed
                case Reduce():
                    assert effect.version == self.version + 1 and self.founders
                    assert len(set(effect.landed)) == len(effect.landed)
                    assert set(effect.landed) <= self.accepted - self.landed, "landed twice, or before it was here"
                    assert effect.live >= len({one.peer for one in effect.contributions})
                    self.landed |= set(effect.landed)
                    self.version = effect.version
                    continue
                case Broadcast():
                    pass
            if isinstance(effect, Found):
                self.version = 0

    # -- what peers do

    @rule(peer=st.sampled_from(PEERS), role=st.sampled_from(["node"] * 5 + ["observer"]))
    def hello(self, peer, role):
        self.tell(peer, Hello(peer, role, "run-1", self.version if peer in self.served else -1))

    @rule(peer=st.sampled_from(PEERS), score=SCORES)
    def fetch(self, peer, score):
        self.said[peer] = nan  # of the mean
        self.tell(peer, Fetch(-1, WIRE, score))

    @rule(peer=st.sampled_from(PEERS), score=SCORES)
    def join(self, peer, score):
        self.tell(peer, Hello(peer))
        self.tell(peer, Fetch(-1, WIRE, score))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def give(self, data):
        peer = data.draw(st.sampled_from(sorted(self.asked)))
        self.asked.discard(peer)
        self.announce(peer)

    @rule(peer=st.sampled_from(PEERS))
    def give_unasked(self, peer):
        if peer in self.hub.members and peer not in self.asked:
            self.announce(peer)

    def announce(self, peer):
        self.transfer += 1
        self.tell(peer, Snapshot(self.transfer, 0, (64,)))

    @rule(peer=st.sampled_from(PEERS), late=st.integers(-1, 2), again=st.booleans())
    def publish(self, peer, late, again):
        sequence = self.sequences[peer] - (1 if again and self.sequences[peer] else 0)
        self.sequences[peer] = max(self.sequences[peer], sequence + 1)
        self.transfer += 1
        base = self.version - late
        self.tell(peer, Publish(self.transfer, sequence, base, 0, self.settings.codec, (64,), 8, 8, nan))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), sound=st.sampled_from([True] * 5 + [False]))
    def finish_transfer(self, data, sound):
        self.finish(data.draw(st.sampled_from(sorted(self.transfers))), sound)

    def finish(self, key, sound=True):
        announcement = self.transfers.pop(key)
        before = {p: member.state for p, member in self.hub.members.items()}
        if sound:
            if isinstance(announcement, Publish):
                assert (key[0], announcement.sequence) not in self.accepted
                self.accepted.add((key[0], announcement.sequence))
            self.carry_out(self.hub.received(*key, self.now), before)
        else:
            self.carry_out(self.hub.broken(*key, "corrupt", "noise", self.now), before)

    @precondition(lambda self: self.averaging)
    @rule(related=st.sampled_from([True, True, False]))
    def average(self, related):
        self.averaging = None
        before = {p: member.state for p, member in self.hub.members.items()}
        self.carry_out(self.hub.averaged() if related else self.hub.unrelated("apart"), before)

    @precondition(lambda self: self.voters)
    @rule(data=st.data(), score=SCORES)
    def vote(self, data, score):
        self.say(data.draw(st.sampled_from(sorted(self.voters))), score)

    def say(self, peer, score):
        self.said[peer] = score
        self.tell(peer, Fetch(-1, (), score))

    @rule(peer=st.sampled_from(PEERS), polite=st.booleans())
    def leave(self, peer, polite):
        if polite:
            self.tell(peer, Goodbye())
        else:
            before = {p: member.state for p, member in self.hub.members.items()}
            self.carry_out(self.hub.gone(peer, "crashed", self.now), before)

    @rule(seconds=st.sampled_from([0.1, 0.6, 4.0]), alive=st.booleans())
    def time_passes(self, seconds, alive):
        self.now += seconds
        if alive:
            for peer in list(self.hub.members):
                self.hub.saw(peer, self.now)
        before = {p: member.state for p, member in self.hub.members.items()}
        self.carry_out(self.hub.tick(self.now), before)

    # -- what is true at any time

    @invariant()
    def the_hub_agrees_with_the_ledger(self):
        if not hasattr(self, "hub"):
            return
        assert self.hub.version == self.version
        assert len(self.founders) == (self.version >= 0)
        waiting = {(peer, publish.sequence) for peer, publish in self.hub.rounds.pending}
        assert waiting == self.accepted - self.landed
        for peer, member in self.hub.members.items():
            assert (member.state is MemberState.LIVE) == (peer in self.served)
            assert self.version < 0 or member.state not in (MemberState.APART, MemberState.LENDING)

    def teardown(self):
        """Whoever waits is served in the end, once there are enough nodes and all do what they are asked."""
        if not hasattr(self, "hub"):
            return
        for peer in PEERS[: self.settings.start_nodes]:
            if peer not in self.hub.members or self.hub.members[peer].state in (
                MemberState.WELCOMED,
                MemberState.OBSERVER,
            ):
                self.join(peer, 0.5 + PEERS.index(peer))
        for _ in range(40):
            for peer in sorted(self.asked):
                self.asked.discard(peer)
                self.announce(peer)
            for key in sorted(self.transfers):
                if key in self.transfers:
                    self.finish(key)
            if self.averaging:
                self.average(True)
            for peer in sorted(self.voters):
                self.say(peer, 0.0)
            self.time_passes(0.1, True)
            for peer, member in list(self.hub.members.items()):
                if member.state is MemberState.APART:
                    self.tell(peer, Fetch(-1, (), 0.5 + PEERS.index(peer)))
            self.the_hub_agrees_with_the_ledger()
        states = {peer: member.state for peer, member in self.hub.members.items()}
        nodes = [s for s in states.values() if s not in (MemberState.OBSERVER, MemberState.WELCOMED)]
        assert len(nodes) < self.settings.start_nodes or set(nodes) == {MemberState.LIVE}, states


TestHub = HubMachine.TestCase
TestHub.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)
