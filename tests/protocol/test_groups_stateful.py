"""Groups at the hub under whatever their processes do, beside a ledger of what each was told."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.grids import examples
from tests.protocol.gatherings import REDUCE_CHUNK, join, process
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.protocol.effects import Combine, Discard, Forward, SendTo
from zmqtrain.protocol.groups import RELAY_BYTES, RELAY_MESSAGES, Groups
from zmqtrain.protocol.messages import Forming, Group, GroupLost, Refused, Relay, Relayed

PEERS = [f"{name}#{number}" for name in "abcd" for number in "12"]
NAMES = st.sampled_from(["red", "blue"])


class GroupsMachine(RuleBasedStateMachine):
    """A hub's groups, its processes, and a ledger of what each was told."""

    def __init__(self):
        super().__init__()
        self.groups, self.now = Groups(), 0.0
        self.waiting = {}  # peer -> group
        self.within = {}  # peer -> (generation, rank), of those who are in a complete group
        self.members = {}  # generation -> {rank: peer}, of those who were told
        self.lost = {}  # peer -> ranks that it was told are lost, in order
        self.on_their_way = {}  # sender -> [(receiver, size)]
        self.discarded = set()  # generations that somebody of is lost

    def carry_out(self, effects):
        for effect in effects:
            if isinstance(effect, Discard):
                assert effect.generation not in self.discarded
                self.discarded.add(effect.generation)
            if not isinstance(effect, SendTo):
                continue
            peer, message = effect.peer, effect.message
            match message:
                case Group():
                    self.waiting.pop(peer)
                    self.within[peer] = (message.generation, message.rank)
                    self.lost[peer] = []
                    others = self.members.setdefault(message.generation, {})
                    assert message.rank not in others and len(others) < len(message.members)
                    others[message.rank] = peer
                case GroupLost():
                    assert peer in self.within and message.rank not in self.lost[peer]
                    self.lost[peer].append(message.rank)
                case Forming():
                    assert peer in self.waiting and message.missing > 0
                    assert len(message.here) == sum(one == message.group for one in self.waiting.values())
                case Refused():
                    assert peer in self.waiting and message.text
                    del self.waiting[peer]
                case Relayed():
                    assert peer in self.within

    def out(self, peer):
        generation, rank = self.within.pop(peer)
        self.on_their_way.pop(peer, None)
        self.on_their_way = {
            sender: [one for one in sent if one[0] != peer] for sender, sent in self.on_their_way.items()
        }
        for other in self.others(generation):
            assert rank in self.lost[other]

    def others(self, generation):
        return [peer for peer, (one, _) in self.within.items() if one == generation]

    @rule(peer=st.sampled_from(PEERS), group=NAMES, size=st.integers(1, 4), rank=st.integers(-1, 3))
    def join(self, peer, group, size, rank):
        if peer in self.waiting or peer in self.within:
            return
        self.waiting[peer] = group
        self.carry_out(join(self.groups, peer, self.now, group=group, size=size, rank=rank))

    @rule(peer=st.sampled_from(PEERS), left=st.booleans())
    def go(self, peer, left):
        was = self.within.get(peer)
        self.waiting.pop(peer, None)
        self.carry_out(self.groups.gone(peer, "gone", left))
        if was:
            self.out(peer)

    @precondition(lambda self: self.within)
    @rule(data=st.data(), rank=st.integers(0, 3))
    def accuse(self, data, rank):
        peer = data.draw(st.sampled_from(sorted(self.within)))
        generation, _ = self.within[peer]
        if rank not in self.members[generation]:
            return
        accused = self.members[generation][rank]
        effects = self.groups.accused(process(peer), GroupLost(rank, "silent"), self.now)
        assert bool(effects) == (accused in self.others(generation))
        self.carry_out(effects)
        if effects:
            self.out(accused)

    @precondition(lambda self: self.within)
    @rule(data=st.data(), size=st.sampled_from([0, 1 << 10, 1 << 20, RELAY_BYTES, 4 * RELAY_BYTES]))
    def relay(self, data, size):
        peer = data.draw(st.sampled_from(sorted(self.within)))
        others = [other for other in self.others(self.within[peer][0]) if other != peer]
        if not others:
            return
        other = data.draw(st.sampled_from(others))
        sent = self.on_their_way.setdefault(peer, [])
        fits = len(sent) < RELAY_MESSAGES and (not sent or sum(size for _, size in sent) + size <= RELAY_BYTES)
        try:
            (effect,) = self.groups.relay(process(peer), Relay(self.within[other][1], size), self.now)
        except RemoteProtocolError:
            assert not fits
        else:
            assert fits and effect == Forward(other, Relay(self.within[peer][1], size))
            sent.append((other, size))

    @precondition(lambda self: any(self.on_their_way.values()))
    @rule(data=st.data())
    def take(self, data):
        sender = data.draw(st.sampled_from(sorted(peer for peer, sent in self.on_their_way.items() if sent)))
        receiver, _ = self.on_their_way[sender].pop(0)
        relayed = Relayed(self.within[sender][1], 1)
        assert self.groups.relayed(process(receiver), relayed, self.now) == [
            SendTo(sender, Relayed(self.within[receiver][1], 1))
        ]

    @precondition(lambda self: self.within)
    @rule(data=st.data())
    def fold(self, data):
        peer = data.draw(st.sampled_from(sorted(self.within)))
        generation, rank = self.within[peer]
        effects = self.groups.reduce(process(peer), REDUCE_CHUNK, self.now)
        if generation in self.discarded:
            assert effects == []
        else:
            by_rank = tuple(self.members[generation][one] for one in sorted(self.members[generation]))
            assert effects == [Combine(generation, rank, by_rank, REDUCE_CHUNK)]

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.carry_out(self.groups.tick(self.now))

    @invariant()
    def those_of_one_group_were_told_the_same(self):
        for generation in self.members:
            told = [self.lost[peer] for peer in self.others(generation)]
            assert all(one == told[0] for one in told)
            here = {self.within[peer][1] for peer in self.others(generation)}
            assert not told or here | set(told[0]) == set(self.members[generation])

    def teardown(self):
        for peer in PEERS:
            self.go(peer, True)
        assert not self.groups._forming and not self.groups._complete and not self.groups._in


TestGroups = GroupsMachine.TestCase
TestGroups.settings = hypothesis_settings(max_examples=examples(60), stateful_step_count=40)
