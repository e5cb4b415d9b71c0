"""Pipelines at the hub: a turn counts whole or not at all, in one version, and each at most once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import PartLayout, layout_of
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec, PeerId, Piece, fault_of_pieces, leaves_of_parts, piece_of
from zmqtrain.protocol.effects import Accumulate, Dismiss, Found, Reduce, SendTo
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import Fetch, Hello, Publish, Quarantine, Refused, Snapshot, Welcome, model_to_wire
from zmqtrain.protocol.pipelines import Share, Turns, is_covered
from zmqtrain.protocol.rounds import release_rule_from_spec

PARTS = 4
MODEL = tuple(
    LeafSpec(Piece(part, leaf, name, rows).name, shape, "float32")
    for part, leaf, name, rows, shape in (
        (0, 1, "embedding", None, (5, 2)),
        (1, 2, "layers", (0, 2), (2, 3)),
        (2, 2, "layers", (2, 3), (1, 3)),
        (2, 3, "norm", None, (3,)),
        (3, 0, "output", None, (2, 4)),
    )
)
RULES = ["all", "quorum", "quorum:count=1,share=0", "immediately", "count:contributions=2", "time:seconds=0.5"]
OUTLIER = 1e4


class World:
    """A hub, its aggregator and pipelines. In each turn all parameters change by the same number: so in every version
    all are the same number."""

    def __init__(self, rule: str, gate: str = "none") -> None:
        self.settings = RunSettings(
            release=rule, codec="float32", broadcast_codec="float32", initial="founder", norm_gate=gate, fragments=1
        )
        self.hub = Hub(self.settings, release_rule_from_spec(rule), "run-1")
        self.aggregator = Aggregator(self.settings)
        self.now, self.transfer = 0.0, 0
        self.sequences = Counter[PeerId]()
        self.turns: dict[str, int] = {}
        self.held: dict[tuple[PeerId, int], list[bytes]] = {}
        self.shares: dict[PeerId, Share] = {}
        self.publishes: dict[tuple[PeerId, int], Publish] = {}
        self.refused: set[tuple[PeerId, int]] = set()
        self.landed: set[tuple[PeerId, int]] = set()
        self.left_out: set[tuple[PeerId, int]] = set()
        self.seen = Counter[str]()

    # -- members

    def join(self, pipeline: str, bounds: Sequence[int]) -> list[PeerId]:
        peers = []
        for first, end in pairwise(bounds):
            peer = PeerId(f"{pipeline}-{first}#1")
            self.hello(peer, Share(pipeline, first, end, PARTS))
            peers.append(peer)
        for peer in peers:
            self.fetch(peer)
        return peers

    def hello(self, peer: PeerId, share: Share) -> list[object]:
        hello = Hello(peer, pipeline=share.pipeline, holds=(share.first, share.end, share.parts))
        self.shares[peer] = share
        if peer not in self.hub.members:  # a silent one was lost: the welcome says what of its work has landed
            self.publishes = {key: one for key, one in self.publishes.items() if key[0] != peer}
        return self.do(self.hub.receive(peer, hello, self.now))

    def fetch(self, peer: PeerId) -> None:
        share = self.shares[peer]
        wire = model_to_wire(leaves_of_parts(MODEL, share.first, share.end))
        self.do(self.hub.receive(peer, Fetch(model=wire), self.now))

    def found(self, peer: PeerId) -> None:
        """Send this PC's initial parameters: ones."""
        share = self.shares[peer]
        layout = layout_of(leaves_of_parts(MODEL, share.first, share.end), self.settings)
        frames = encode_snapshot(layout, [np.ones(sum(layout.counts(f)), np.float32) for f in range(layout.fragments)])
        self.transfer += 1
        snapshot = Snapshot(self.transfer, 0, tuple(map(len, frames)))
        self.do(self.hub.receive(peer, snapshot, self.now))
        self.aggregator.plan(self.hub.model)
        self.aggregator.check_sizes(snapshot, share)
        self.aggregator.check_snapshot(snapshot, frames, share)
        self.held[peer, -1] = frames
        self.do(self.hub.received(peer, snapshot.transfer, self.now))

    def lose(self, peer: PeerId) -> None:
        self.do(self.hub.gone(peer, "silent", self.now))

    # -- deltas

    def announce(self, peer: PeerId, turn: int, part: int, value: float) -> Publish | None:
        """Announce a part of a turn; None where it is refused at once."""
        share, sequence = self.shares[peer], self.sequences[peer]
        self.sequences[peer] += 1
        self.transfer += 1
        layout = layout_of(leaves_of_parts(MODEL, share.first, share.end), self.settings)
        codecs = coding_from_spec("float32").of_fragment(layout, part - share.first)
        frames = encode_payload(codecs, [np.full(n, value, np.float32) for n in layout.counts(part - share.first)])
        publish = Publish(
            self.transfer, sequence, self.hub.version, part - share.first, "float32", tuple(map(len, frames)), 8, 1,
            0.5, turn=turn,
        )  # fmt: skip
        self.held[peer, sequence] = list(frames)
        self.do(self.hub.receive(peer, publish, self.now))
        member = self.hub.members.get(peer)
        return publish if member is not None and publish.transfer in member.open else None

    def whole(self, peer: PeerId, publish: Publish) -> None:
        """All of a publish is here, and is judged."""
        member = self.hub.members.get(peer)
        announced = None if member is None else member.open.get(publish.transfer)
        if not isinstance(announced, Publish):
            return
        frames = self.held[peer, publish.sequence]
        self.aggregator.check(announced, frames)
        judgement = self.aggregator.judge(peer, announced, frames)
        self.aggregator.count(announced, judgement)
        self.publishes[peer, publish.sequence] = announced
        if judgement.why:
            self.do(self.hub.broken(peer, publish.transfer, "norm", judgement.why, self.now))
        else:
            self.do(self.hub.received(peer, publish.transfer, self.now))

    def turn(self, pipeline: str, peers: Iterable[PeerId], value: float) -> None:
        number = self.turns[pipeline] = self.turns.get(pipeline, 0) + 1
        for peer in peers:
            share = self.shares[peer]
            for part in range(share.first, share.end):
                if (publish := self.announce(peer, number, part, value)) is not None:
                    self.whole(peer, publish)

    # -- what the hub does

    def do(self, effects: Sequence[object]) -> list[object]:
        for effect in effects:
            match effect:
                case Found(peer, _, model, others):
                    frames = [frame for one in (peer, *(other for other, _ in others)) for frame in self.held[one, -1]]
                    self.aggregator.plan(model)
                    self.aggregator.found(frames)
                    self.seen["founded"] += 1
                case SendTo(peer, Refused(_, _, sequence)) if sequence >= 0:
                    assert (peer, sequence) not in self.landed
                    self.refused.add((peer, sequence))
                    self.seen["refused"] += 1
                case Dismiss(peer, publish):
                    assert (peer, publish.sequence) not in self.landed
                    self.held.pop((peer, publish.sequence), None)
                case Accumulate(peer, publish):
                    assert (peer, publish.sequence) not in self.refused
                    self.aggregator.accumulate(peer, publish, self.held.pop((peer, publish.sequence)))
                case Reduce():
                    self.reduce(effect)
        return list(effects)

    def reduce(self, reduce: Reduce) -> None:
        turns: dict[tuple[PeerId, int], list[int]] = {}
        for one in reduce.contributions:
            key = one.peer, one.sequence
            assert key not in self.landed | self.refused, "landed twice, or though it was refused"
            self.landed.add(key)
            turns.setdefault((one.node, one.turn), []).append(one.fragment)
        assert all(sorted(parts) == list(range(PARTS)) for parts in turns.values()), "a part of a turn"
        assert reduce.samples == 8 * len(turns)
        released = self.aggregator.release(reduce)
        self.left_out |= {(one.peer, one.sequence) for one, _ in released.left_out}
        values = np.unique(np.concatenate(self.aggregator.published))
        assert values.size == 1, f"version {reduce.version} mixes turns: {values}"
        self.seen["released"] += 1
        self.seen["turns"] += len(turns)


def begun(rule: str = "immediately", gate: str = "none") -> tuple[World, list[PeerId]]:
    """Return a run that one pipeline of two has founded."""
    world = World(rule, gate)
    peers = world.join("one", (0, 2, PARTS))
    for peer in peers:
        world.found(peer)
    assert world.hub.version == 0 and world.seen["founded"] == 1
    return world, peers


# ---------------------------------------------------------------------- pieces and layouts


def test_a_piece_has_its_place_in_its_name():
    for piece in (Piece(3, 12, "a/b[1]", (0, 2)), Piece(0, 0, "w", None)):
        assert piece_of(piece.name) == piece
    assert piece_of("part3/w") is None and piece_of("layers/w") is None


def test_each_part_is_a_fragment_with_whole_leaves():
    layout = layout_of(MODEL, RunSettings())
    assert isinstance(layout, PartLayout) and layout.fragments == PARTS
    assert [layout.leaves(part) for part in range(PARTS)] == [(0,), (1,), (2, 3), (4,)]
    leaves = [np.arange(leaf.values, dtype=np.float32).reshape(leaf.shape) for leaf in MODEL]
    flats = layout.split(leaves)
    assert all(np.array_equal(a, b) for a, b in zip(layout.join(flats), leaves, strict=True))
    own = layout_of(leaves_of_parts(MODEL, 1, 3), RunSettings())
    assert [own.counts(part) for part in range(2)] == [layout.counts(1), layout.counts(2)]


def test_shares_cover_the_model_each_part_once():
    def share(first: int, end: int) -> Share:
        return Share("p", first, end, PARTS)

    assert is_covered([share(2, 4), share(0, 2)]) and is_covered([share(0, 4)])
    assert not is_covered([share(0, 2)]) and not is_covered([share(0, 2), share(3, 4)]) and not is_covered([])
    assert not is_covered([share(0, 3), share(2, 4)])


def test_a_turn_that_lacks_a_part_for_good_is_refused():
    turns, share = Turns(), Share("p", 0, 2, 2)

    def publish(sequence: int, fragment: int, turn: int) -> Publish:
        return Publish(sequence, sequence, 0, fragment, "float32", (8,), 1, 1, 0.0, turn=turn)

    def told(found: tuple[Sequence[Any], Sequence[Any]]) -> tuple[list[int], list[int]]:
        whole, refused = found
        return [one.turn for _, one in whole], [one.turn for _, one in refused]

    assert told(turns.add(share, PeerId("a"), publish(0, 0, 1))) == ([], [])
    assert told(turns.add(share, PeerId("b"), publish(0, 1, 2))) == ([], [1])  # its part 1 will not come any more
    assert told(turns.add(share, PeerId("b"), publish(1, 1, 3))) == ([], [])
    assert told(turns.add(share, PeerId("a"), publish(1, 0, 3))) == ([3, 3], [2])
    assert told(turns.add(share, PeerId("a"), publish(2, 0, 3))) == ([], [3])  # it does not rise
    assert told(turns.add(share, PeerId("a"), publish(3, 0, 4))) == ([], [])
    assert [one.turn for _, one in turns.refuse(share, publish(2, 1, 4))] == [4]
    assert told(turns.add(share, PeerId("a"), publish(4, 0, 4))) == ([], [4])
    assert not turns.forget("p")


# ---------------------------------------------------------------------- joining


def test_a_pipeline_founds_the_run_with_what_each_of_its_pcs_holds():
    world = World("immediately")
    first = PeerId("one-0#1")
    world.hello(first, Share("one", 0, 2, PARTS))
    world.fetch(first)
    assert world.hub.members[first].state is MemberState.WAITING  # the other half is not here
    second = PeerId("one-2#1")
    world.hello(second, Share("one", 2, PARTS, PARTS))
    world.fetch(second)
    assert {one.state for one in world.hub.members.values()} == {MemberState.FOUNDING}
    world.found(second)
    assert world.hub.version == -1
    world.found(first)
    assert world.hub.version == 0 and world.hub.model == MODEL
    assert world.hub.members.training == {first}


def test_a_founder_that_comes_again_is_asked_again():
    world = World("immediately")
    first, second = world.join("one", (0, 2, PARTS))
    world.found(first)
    world.lose(second)
    world.hello(second, world.shares[second])
    effects = world.hub.receive(second, Fetch(model=model_to_wire(leaves_of_parts(MODEL, 2, PARTS))), world.now)
    assert SendTo(second, Fetch()) in effects
    world.found(second)
    assert world.hub.version == 0


def test_another_pipeline_is_welcomed_with_its_own_leaves():
    world, _ = begun()
    effects = world.hello(PeerId("two-0#1"), Share("two", 0, 3, PARTS))
    welcome = next(one.message for one in effects if isinstance(one, SendTo) and isinstance(one.message, Welcome))
    assert welcome.model == model_to_wire(leaves_of_parts(MODEL, 0, 3))
    world.fetch(PeerId("two-0#1"))
    assert world.hub.members[PeerId("two-0#1")].state is MemberState.LIVE
    assert world.hub.members.training == {"one-0#1"}  # the new one is not whole


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (Hello("w"), "start it as a pipeline"),
        (Hello("w", pipeline="two", holds=(0, 2, 5)), "has 4 parts"),
        (Hello("w", pipeline="one", holds=(1, 3, PARTS)), "has some of the parts"),
    ],
)
def test_who_does_not_fit_is_refused_and_told_why(hello, says):
    world, _ = begun()
    effects = world.hub.receive(PeerId("w#1"), hello, 0.0)
    assert says in next(one.message.text for one in effects if isinstance(one, SendTo))
    assert "w#1" not in world.hub.members


def test_a_pipeline_is_refused_in_a_run_of_whole_models():
    hub = Hub(RunSettings(), release_rule_from_spec("immediately"), "run-1")
    hub.receive(PeerId("a#1"), Hello("a"), 0.0)
    (refused,) = hub.receive(PeerId("b#1"), Hello("b", pipeline="p", holds=(0, 1, 2)), 0.0)
    assert "have the whole model" in refused.message.text


@pytest.mark.parametrize("holds", [(), (0, 1), (2, 1, 4), (0, 5, 4), (-1, 2, 4), (0, 1 << 11, 1 << 11)])
def test_an_impossible_share_disconnects_its_sender(holds):
    hub = Hub(RunSettings(), release_rule_from_spec("immediately"), "run-1")
    with pytest.raises(RemoteProtocolError):
        hub.receive(PeerId("b#1"), Hello("b", pipeline="p", holds=holds), 0.0)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"mode": "strict", "start_nodes": 2, "release": "all"}, "default mode"),
        ({"elastic": 0.5}, "default mode"),
        ({"initial": "mean", "start_nodes": 2}, "--initial founder"),
        ({"shards": 2, "initial": "founder"}, "several brokers"),
    ],
)
def test_runs_that_pipelines_cannot_take_part_in_say_so(changed, says):
    hub = Hub(RunSettings(**changed), release_rule_from_spec("immediately"), "run-1")
    (refused,) = hub.receive(PeerId("b#1"), Hello("b", pipeline="p", holds=(0, 1, 2)), 0.0)
    assert isinstance(refused.message, Refused) and says in refused.message.text


# ---------------------------------------------------------------------- turns


def test_a_turn_lands_whole_when_its_last_part_is_here():
    world, (first, second) = begun()
    parts = [(first, 0), (second, 3), (first, 1)]
    for peer, part in parts:
        publish = world.announce(peer, 1, part, 1.0)
        assert publish is not None
        world.whole(peer, publish)
        assert world.hub.version == 0 and not world.landed
    world.whole(second, world.announce(second, 1, 2, 1.0))
    assert world.hub.version == 1 and len(world.landed) == PARTS
    assert float(world.aggregator.published[0][0]) == 2.0


def test_the_others_parts_are_refused_with_a_part_that_is():
    world, (first, second) = begun()
    one = world.announce(first, 1, 0, 1.0)
    world.whole(first, one)
    other = world.announce(second, 1, 2, 1.0)
    world.do(world.hub.broken(second, other.transfer, "codec", "it cannot be read", 0.0))
    assert {(first, one.sequence), (second, other.sequence)} <= world.refused
    assert (first, one.sequence) not in world.held  # the hub keeps nothing of it
    late = world.announce(first, 1, 1, 1.0)  # and takes no part of it that comes later
    world.whole(first, late)
    assert (first, late.sequence) in world.refused and not world.hub.waiting
    world.turns["one"] = 1
    world.turn("one", [first, second], 2.0)  # the next one counts
    assert world.hub.version == 1


def test_a_part_that_comes_twice_in_a_turn_counts_once_and_is_kept_once():
    world, (first, second) = begun()
    one, again = (world.announce(first, 1, 0, 1.0) for _ in range(2))
    world.whole(first, one)
    world.whole(first, again)
    assert world.refused == {(first, again.sequence)} and (first, again.sequence) not in world.held
    for peer, part in ((first, 1), (second, 2), (second, 3)):
        world.whole(peer, world.announce(peer, 1, part, 1.0))
    assert world.hub.version == 1 and (first, one.sequence) in world.landed


def test_pcs_whose_turns_have_come_apart_find_each_other_again():
    world, (first, second) = begun()
    for part in (2, 3):
        world.whole(second, world.announce(second, 50, part, 1.0))
    for turn in (20, 35):  # refused at once: the first one tries the next
        for part in (0, 1):
            publish = world.announce(first, turn, part, 1.0)
            world.whole(first, publish)
            assert (first, publish.sequence) in world.refused
    for part in (0, 1):
        world.whole(first, world.announce(first, 50, part, 1.0))
    assert world.hub.version == 1


@pytest.mark.parametrize("holds", [None, (2, 3)])
def test_a_pc_that_connects_again_ends_the_turns_of_which_a_part_was_in_flight(holds):
    world, (first, second) = begun()
    here = world.announce(first, 1, 0, 1.0)
    world.whole(first, here)
    world.announce(second, 1, 2, 1.0)  # in flight
    share = world.shares[second] if holds is None else Share("another", *holds, PARTS)
    world.hello(second, share)
    assert (first, here.sequence) in world.refused and not world.hub.waiting
    if holds is None:
        world.fetch(second)
        world.turns["one"] = 1
        world.turn("one", [first, second], 1.0)
        assert world.hub.version == 1


def test_a_turn_is_of_pipelines_and_of_each_of_their_deltas():
    world, (first, _) = begun()
    assert world.announce(first, -1, 0, 1.0) is None and world.seen["refused"] == 1
    hub = Hub(RunSettings(codec="float32", initial="founder"), release_rule_from_spec("immediately"), "run-1")
    hub.begin_with((LeafSpec("w", (4,), "float32"),))
    hub.receive(PeerId("a#1"), Hello("a"), 0.0)
    hub.receive(PeerId("a#1"), Fetch(model=(("w", (4,), "float32"),)), 0.0)
    publish = Publish(1, 0, 0, 0, "float32", (32,), 1, 1, 0.0, turn=3)
    (refused,) = hub.receive(PeerId("a#1"), publish, 0.0)
    assert refused.message.reason == "turn"


def test_a_pipeline_that_loses_a_pc_while_it_founds_the_run_holds_up_nobody():
    world = World("immediately")
    first, second = world.join("one", (0, 2, PARTS))
    world.found(first)
    world.lose(second)
    others = world.join("two", (0, 1, PARTS))
    assert {world.hub.members[peer].state for peer in others} == {MemberState.FOUNDING}
    for peer in others:
        world.found(peer)
    assert world.hub.version == 0 and world.seen["founded"] == 1
    assert world.hub.members[first].state is MemberState.LIVE  # it is sent what the others have begun with


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (Piece(2, 2, "layers", (3, 4)), "are not all of its rows"),
        (Piece(2, 2, "layers", (1, 2)), "are not all of its rows"),
        (Piece(2, 2, "other", (2, 3)), "are of several leaves"),
    ],
)
def test_pieces_that_make_no_leaf_found_no_run_and_their_pipeline_is_told(changed, says):
    assert not fault_of_pieces(MODEL)
    model = tuple(LeafSpec(changed.name, leaf.shape, leaf.dtype) if leaf is MODEL[2] else leaf for leaf in MODEL)
    assert says in fault_of_pieces(model)


def test_parts_of_other_numbers_than_the_pc_holds_send_it_away():
    world = World("immediately")
    peer = PeerId("one-0#1")
    world.hello(peer, Share("one", 0, 2, PARTS))
    wire = model_to_wire(leaves_of_parts(MODEL, 2, 4))
    effects = world.hub.receive(peer, Fetch(model=wire), 0.0)
    assert any(isinstance(one, SendTo) and isinstance(one.message, Refused) for one in effects)
    assert peer not in world.hub.members


def test_a_lost_pc_takes_the_turns_that_are_not_whole_with_it():
    world, (first, second) = begun()
    one = world.announce(first, 1, 0, 1.0)
    world.whole(first, one)
    world.lose(second)
    assert (first, one.sequence) in world.refused and not world.hub.waiting
    assert world.announce(first, 2, 0, 1.0) is None  # and no part of another is taken
    assert not world.hub.members.training


def test_no_pc_of_a_pipeline_is_asked_to_score_the_model():
    world, _ = begun()
    assert world.hub.roster(world.now).evaluator == ""
    assert {len(member["pipeline"]) for member in world.hub.roster(world.now).members} == {len("one")}


def test_a_round_waits_for_pipelines_and_not_for_their_pcs():
    world, one = begun("all")
    two = world.join("two", (0, 1, 2, 3, PARTS))
    assert world.hub.members.training == {"one-0#1", "two-0#1"}
    world.turn("one", one, 1.0)
    assert world.hub.version == 0
    world.turn("two", two, 3.0)
    assert world.hub.version == 1 and float(world.aggregator.published[0][0]) == 3.0  # 1 + (1 + 3) / 2


def test_a_quarantined_pc_makes_its_pipeline_begin_again():
    world, (first, second) = begun("quorum", gate="10")
    effects: list[object] = []
    for turn in range(1, 12):
        one = world.announce(first, turn, 0, 1.0)
        other = world.announce(second, turn, 2, 1.0)
        if one is None or other is None:
            break
        world.whole(first, one)
        effects += world.do(world.hub.broken(second, other.transfer, "non-finite", "NaN", 0.0))
    quarantined = [one for one in effects if isinstance(one, SendTo) and isinstance(one.message, Quarantine)]
    assert [one.peer for one in quarantined] == [second] and world.hub.members[first].restarts
    assert not world.hub.members.training


def test_a_turn_with_a_part_that_is_far_too_large_is_left_out_whole():
    world, one = begun("all", gate="10")
    pipelines = {"one": one, "two": world.join("two", (0, 3, PARTS)), "three": world.join("three", (0, PARTS))}
    for name, peers in pipelines.items():
        for peer in peers:
            share = world.shares[peer]
            for part in range(share.first, share.end):
                large = name == "two" and part == 2
                world.whole(peer, world.announce(peer, 1, part, OUTLIER if large else 1.0))
    assert world.hub.version == 1 and len(world.left_out) == 1
    assert float(world.aggregator.published[0][0]) == 2.0  # 1 + (1 + 1) / 2: the others' mean, in all parts


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_in_every_version_all_parameters_have_the_same_turns(data):
    world, first = begun(data.draw(st.sampled_from(RULES)), data.draw(st.sampled_from(["none", "10"])))
    cuts = [(0, PARTS), (0, 1, PARTS), (0, 2, PARTS), (0, 1, 2, PARTS), tuple(range(PARTS + 1))]
    pipelines = {"one": first}
    flying: dict[str, list[tuple[PeerId, Publish]]] = {}
    for number in range(data.draw(st.integers(5, 40))):
        world.now += data.draw(st.sampled_from([0.0, 0.01, 0.6]))
        names = sorted(pipelines)
        choices = ["offer", "offer", "arrive", "arrive", "arrive", "break", "lose", "join", "again"]
        choice = data.draw(st.sampled_from(choices))
        if choice == "join" or not names:
            name = f"p{number}"
            pipelines[name] = world.join(name, data.draw(st.sampled_from(cuts)))
            continue
        name = data.draw(st.sampled_from(names))
        peers = pipelines[name]
        if choice == "offer":
            turn = world.turns[name] = world.turns.get(name, 0) + 1
            value = float(data.draw(st.sampled_from([1, 2, 4, OUTLIER])))
            for peer in data.draw(st.permutations(peers)):
                share = world.shares[peer]
                for part in range(share.first, share.end):
                    if data.draw(st.integers(0, 9)) and peer in world.hub.members:
                        publish = world.announce(peer, turn, part, value)
                        flying.setdefault(name, []).extend([] if publish is None else [(peer, publish)])
        elif choice == "again":  # one connects again, and what it had in flight is lost
            peer = data.draw(st.sampled_from(peers))
            flying[name] = [one for one in flying.get(name, []) if one[0] != peer]
            world.hello(peer, world.shares[peer])
            world.fetch(peer)
        elif choice == "lose":
            world.lose(data.draw(st.sampled_from(peers)))
            for peer in peers:  # the others notice, and leave
                world.lose(peer)
            del pipelines[name]
            flying.pop(name, None)
        elif flying.get(name):
            one = flying[name].pop(data.draw(st.integers(0, len(flying[name]) - 1)))
            if choice == "break":
                world.do(world.hub.broken(one[0], one[1].transfer, "codec", "unreadable", world.now))
            else:
                world.whole(*one)
        world.do(world.hub.tick(world.now))
        assert world.hub.members.training <= {peers[0] for peers in pipelines.values()}
    for name in sorted(flying):
        for peer, publish in flying[name]:
            world.whole(peer, publish)
    world.now += 60.0
    for name, peers in pipelines.items():
        for peer in peers:
            world.hub.saw(peer, world.now)
        world.turn(name, peers, 1.0)
    world.do(world.hub.tick(world.now))
    assert not world.landed & world.refused
    # whoever has a whole turn here has it landed, or waits for a round
    waiting = {(peer, one.sequence) for peer, one in world.hub.waiting}
    for key in world.publishes:
        assert key in world.landed | world.refused | waiting or key[0] not in world.hub.members


def test_a_plan_counts_pipelines_and_the_bytes_of_one_port(monkeypatch):
    world, _ = begun()
    world.join("two", (0, 1, PARTS))
    seen = []
    monkeypatch.setattr(world.hub.replanning, "look", lambda *told: seen.append(told))
    world.hub.news = True
    world.hub.tick(0.1)
    ((_, model, nodes, _),) = seen
    assert [one.peer for one in nodes] == ["one-0#1", "two-0#1"]
    assert model == leaves_of_parts(MODEL, 1, PARTS)  # the largest share, of those that one port carries
