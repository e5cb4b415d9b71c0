"""A hub, a broker and its nodes as they act, and as nodes act that should know better; beside them a ledger.

Rule 1: the ledger knows, from what was said alone, what the hub must answer to each publish and what a round may hold.
Rule 2: all that the hub does is held against the ledger; `check` compares what they hold.
Rule 3: what happens is counted, in `seen`: so a test can tell that it has seen anything.
"""

from __future__ import annotations

from collections import Counter
from math import inf, isnan, nan

from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.types import LeafSpec, is_barrier
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
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import (
    Fetch,
    Goodbye,
    Hello,
    Publish,
    Quarantine,
    Refused,
    Snapshot,
    WorkRequest,
    WorkUnit,
    model_to_wire,
)
from zmqtrain.protocol.rounds import release_rule_from_spec

__all__ = ["PEERS", "HubWorld"]

WIRE = model_to_wire((LeafSpec("w", (8,), "float32"),))
PEERS = [f"{name}#1" for name in "abcde"]
NO_NODES = (MemberState.WELCOMED, MemberState.OBSERVER, MemberState.PROCESS)
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


class HubWorld:
    """A hub, its peers and a ledger.

    transfers: (peer, number) -> announcement, of those that the hub expects.  heard: of each peer, the highest sequence
    that the hub has let come.  accepted: (peer, sequence) -> publish, of those that have come; added: which of them are
    in a sum.  voters: who is to say how the mean scores; own: how each of them does itself.
    hands, held: the data units that each has, and had when it was lost.  unbacked: those done before a delta came.
    """

    def __init__(self, settings, nodes=0, seen=None):
        self.settings, self.seen = settings, Counter() if seen is None else seen
        self.hub = Hub(settings, release_rule_from_spec(settings.release), "run-1", preemption=Patience())
        self.now, self.transfer, self.version = 0.0, 0, -1
        self.transfers, self.asked, self.averaging = {}, set(), None
        self.voters, self.own, self.votes = set(), {}, {}
        self.sequences, self.heard, self.said = dict.fromkeys(PEERS, 0), dict.fromkeys(PEERS, -1), {}
        self.accepted, self.added, self.landed, self.refused = {}, set(), set(), 0
        self.until, self.quarantined = {}, set()
        self.hands, self.held, self.done = {peer: set() for peer in PEERS}, {peer: set() for peer in PEERS}, set()
        self.unbacked, self.units = {}, set(range(settings.units)) or {None}
        self.founders, self.served = [], set()
        for peer in PEERS[:nodes]:
            self.join(peer, 0.5)
        self.settle()

    def states(self):
        return {peer: member.state for peer, member in self.hub.members.items()}

    # -- what the hub does

    def tell(self, peer, message):
        """Say something to the hub, and let it cost the sender its place, as the broker does."""
        before = self.states()
        if isinstance(message, Fetch):
            self.votes[peer] = nan if message.model else message.score
        try:
            effects = self.hub.receive(peer, message, self.now)
        except RemoteProtocolError:
            effects = self.hub.gone(peer, "protocol", self.now)
        self.carry_out(effects, before, peer)
        return effects

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
                    self.told(peer, message)
                case Expect(peer, announcement):
                    assert peer in self.hub.members
                    self.transfers[peer, announcement.transfer] = announcement
                case Disconnect(peer, reason):
                    assert peer in known
                    if reason != "again" or self.states()[peer] in NO_NODES[1:]:  # nothing of its work has come
                        self.done -= self.unbacked.pop(peer, set()) if self.done != self.units else set()
                    for here in (self.asked, self.served, self.quarantined, self.voters):
                        here.discard(peer)
                    self.transfers = {key: one for key, one in self.transfers.items() if key[0] != peer}
                    self.held[peer] |= self.hands[peer]
                    self.hands[peer] = set()
                case Found(peer):
                    assert not self.founders and self.hub.version == 0
                    told = [one for one in self.voters if not isnan(self.votes.get(one, nan))]
                    worse = [one for one in told if is_barrier(self.own[one], self.votes[one])]
                    assert 2 * len(worse) <= len(told), "its founders find it worse"
                    self.voters.clear()
                    self.founders.append(peer)
                    self.version = 0
                case Average(snapshots):
                    assert self.averaging is None and snapshots
                    self.averaging = snapshots
                case Propose(peers):
                    assert self.hub.version == -1 and set(peers) <= set(self.hub.members)
                    self.voters, self.votes = set(peers), {}
                    self.own = {one: self.hub.members[one].score for one in peers}
                    assert all(abs(score) < inf for score in self.own.values())
                    self.seen["proposed"] += bool(peers)
                case Lend(lender, _, peers):
                    assert self.hub.version == -1 and lender not in peers and set(peers) <= set(self.hub.members)
                    assert len({self.hub.members[peer].lineage for peer in (lender, *peers)}) == 1
                case Serve(peer) if self.hub.members[peer].state is MemberState.OBSERVER:
                    assert self.founders, "who looks on takes a copy of a run that has begun"
                case Serve(peer):
                    assert self.founders and self.hub.members[peer].state is MemberState.LIVE
                    self.served.add(peer)
                case Accumulate(peer, publish):
                    assert self.accepted[peer, publish.sequence] == publish
                    assert (peer, publish.sequence) not in self.added | self.landed, "added twice"
                    self.added.add((peer, publish.sequence))
                case Reduce():
                    self.reduce(effect)
                case Broadcast():
                    pass

    def told(self, peer, message):
        """What the hub says to a node."""
        match message:
            case Refused(_, _, sequence):
                self.refused += sequence >= 0
            case Quarantine("again", _, seconds):
                assert seconds == self.until[peer] - self.now
                self.quarantined.add(peer)
            case Quarantine(_, _, seconds):
                self.until[peer] = self.now + seconds
                self.quarantined.add(peer)
            case WorkUnit(numbers):
                others = set().union(*(self.hands[other] for other in PEERS if other != peer))
                assert not set(numbers) & (others | self.done), "dealt twice, or though it was done"
                self.hands[peer] |= set(numbers)

    def reduce(self, reduce):
        """The hub makes a version."""
        assert reduce.version == self.version + 1 and self.founders and reduce.contributions
        assert len(set(reduce.landed)) == len(reduce.landed), "landed twice"
        assert set(reduce.landed) <= self.added, "landed twice, or before it was in the sum"
        publishes = [self.accepted[one] for one in reduce.landed]
        for one, publish in zip(reduce.contributions, publishes, strict=True):
            assert (one.fragment, one.samples) == (publish.fragment, publish.samples)
            assert one.staleness == self.version - publish.base_version == self.version - one.base_version
            assert one.too_stale == (self.settings.stale == "drop" and self.is_too_stale(publish))
            self.seen["late"] += one.staleness > 0
            self.seen["dropped"] += one.too_stale
        assert set(reduce.fragments) == {publish.fragment for publish in publishes}
        assert reduce.dense == any(publish.dense for publish in publishes)
        assert reduce.live >= len({one.peer for one in reduce.contributions})
        self.added -= set(reduce.landed)
        self.landed |= set(reduce.landed)
        self.version = reduce.version
        self.seen["released"] += 1

    # -- what nodes do

    def join(self, peer, score):
        self.tell(peer, Hello(peer))
        self.tell(peer, Fetch(-1, WIRE, score))

    def give(self, peer):
        """Offer the hub parameters, asked for or not."""
        self.asked.discard(peer)
        self.transfer += 1
        self.tell(peer, Snapshot(self.transfer, 0, (64,)))

    def offer(self, peer, sequence, late=0, dense=False, comes=True):
        """Say a publish to the hub, whose base is so many versions old; if it comes, all of it does."""
        self.transfer += 1
        self.sequences[peer] = max(self.sequences[peer], sequence + 1)
        codec = "float32" if dense else self.hub.timetable.at(self.version).codec
        base, fragment = self.version - late, sequence % self.hub.fragments
        # the samples are another number each time: their sum tells what was counted
        self.publish(peer, Publish(self.transfer, sequence, base, fragment, codec, (64,), self.transfer, 8, nan, dense))
        if comes and (peer, self.transfer) in self.transfers:
            self.finish((peer, self.transfer))

    def publish(self, peer, publish):
        """Say this to the hub, and see to it that it answers what it must."""
        answer = self.answer_to(peer, publish)
        self.seen[answer] += 1
        effects = self.tell(peer, publish)
        if answer == "out of place":
            assert peer not in self.hub.members
        elif answer == "double":
            assert effects == []
        elif answer == "expected":
            assert effects == [Expect(peer, publish)]
            self.heard[peer], self.said[peer] = publish.sequence, publish
        else:
            about = publish.sequence if answer != "unknown" else -1
            told = [one for one in effects if isinstance(one, SendTo) and isinstance(one.message, Refused)]
            assert [(one.peer, one.message.reason, one.message.sequence) for one in told] == [(peer, answer, about)]
            assert len(effects) == 1, "no more follows from it"

    def answer_to(self, peer, publish):
        """Return what the hub must answer: the code of its refusal, or else in words what it does."""
        on_their_way = {(key[0], one.sequence) for key, one in self.transfers.items() if isinstance(one, Publish)}
        if peer not in self.hub.members:
            return "unknown"
        if peer not in self.served:
            return "out of place"
        if (peer, publish.sequence) in on_their_way | self.accepted.keys():
            return "double"
        if publish.sequence <= self.heard[peer]:
            return "duplicate"
        if peer in self.quarantined:
            return "quarantine"
        if publish.base_version > self.version:
            return "version"
        return "stale" if self.settings.stale == "return" and self.is_too_stale(publish) else "expected"

    def is_too_stale(self, publish):
        return not publish.dense and 0 < self.settings.max_staleness < self.version - publish.base_version

    def finish(self, key, sound=True):
        """All of a transfer has come."""
        announcement = self.transfers.pop(key)
        is_publish, before = isinstance(announcement, Publish), self.states()
        if sound and is_publish:
            self.unbacked.pop(key[0], None)
            self.accepted[key[0], announcement.sequence] = announcement
        if sound:
            self.carry_out(self.hub.received(*key, self.now), before)
        else:
            self.seen["corrupt"] += is_publish
            self.carry_out(self.hub.broken(*key, "corrupt", "noise", self.now), before)
        assert self.hub.received(*key, self.now) == [], "it came once"

    def ask_for_units(self, peer, want, done=True):
        """Ask for data, with what was in hand when the connection was lost; done: all in hand now is."""
        finished, held = tuple(self.hands[peer]) if done else (), tuple(self.held[peer])
        self.hands[peer] -= set(finished)
        self.held[peer] = set()
        member = self.hub.members[peer]
        if not member.quarantined:
            self.done |= set(finished)
            if not member.contributions:
                self.unbacked.setdefault(peer, set()).update(finished)
        self.tell(peer, WorkRequest(finished, want, not self.hands[peer], held))

    # -- what befalls them

    def average(self, related=True):
        self.averaging, before = None, self.states()
        self.carry_out(self.hub.averaged() if related else self.hub.unrelated("apart"), before)

    def crash(self, peer):
        before = self.states()
        self.carry_out(self.hub.gone(peer, "crashed", self.now), before)

    def pass_time(self, seconds, alive=True):
        self.now += seconds
        for peer in list(self.hub.members):
            if alive is True or (alive and peer in alive):
                self.hub.saw(peer, self.now)
        self.quarantined = {peer for peer in self.quarantined if self.until[peer] > self.now}
        before = self.states()
        self.carry_out(self.hub.tick(self.now), before)

    def settle(self):
        """All do what they are asked, for as long as there is anything to do."""
        for _ in range(40):
            apart = [peer for peer, state in self.states().items() if state is MemberState.APART]
            if not (self.asked or self.transfers or self.averaging or self.voters or apart):
                return
            for peer in sorted(self.asked):
                self.give(peer)
            for key in sorted(self.transfers):
                if key in self.transfers:
                    self.finish(key)
            if self.averaging:
                self.average()
            for peer in sorted(self.voters):
                self.tell(peer, Fetch(-1, (), 0.0))
            self.pass_time(0.1)
            for peer in apart:
                self.tell(peer, Fetch(-1, WIRE, 0.5 + PEERS.index(peer)))
            self.check()

    # -- what is true

    def check(self):
        """The hub holds what the ledger holds, what is due is released, each data unit is done or will be dealt."""
        hub = self.hub
        assert hub.version == self.version and len(self.founders) == (self.version >= 0)
        waiting = [(peer, publish.sequence) for peer, publish in hub.rounds.pending]
        assert len(waiting) == len(set(waiting)) and set(waiting) == self.accepted.keys() - self.landed
        counted = sum(self.accepted[one].samples for one in self.landed)
        assert (hub.contributions, hub.samples, hub.refused) == (len(self.landed), counted, self.refused)
        for peer, member in hub.members.items():
            assert (member.state is MemberState.LIVE) == (peer in self.served)
            assert self.version < 0 or member.state not in (MemberState.APART, MemberState.LENDING)
        due = hub.rounds.due_at(hub.awaited) if hub.complete and self.version >= 0 else None
        assert due is None or due > self.now, "a round is due and was not released"
        units = hub.units.ledger.state()
        assert sorted([*self.done, *units["returned"]]) == list(range(*units["next"]))
        assert hub.units.ledger.done_count == len(self.done)

    def check_the_end(self):
        """Once there are enough nodes, and all do what they are asked, whoever waits is served and all data are done;
        when they have left, all that has come has landed."""
        for peer in PEERS[: self.settings.start_nodes]:
            if self.states().get(peer) in (None, *NO_NODES):
                self.join(peer, 0.5 + PEERS.index(peer))
        self.settle()
        states = self.states()
        nodes = [s for s in states.values() if s not in NO_NODES]
        if len(nodes) < self.settings.start_nodes:  # one was sent away
            return
        assert set(nodes) == {MemberState.LIVE}, states
        self.pass_time(1000.0)  # no quarantine is so long
        for _ in range(self.settings.units):
            for peer in sorted(self.served):
                self.ask_for_units(peer, 2)
        assert self.done == set(range(self.settings.units))
        for peer in list(self.hub.members):
            self.tell(peer, Goodbye())
        self.pass_time(1000.0)
        self.check()
        assert self.landed == self.accepted.keys()
