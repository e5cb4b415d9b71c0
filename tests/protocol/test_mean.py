"""Whether the run begins with the mean of what its nodes have: they say how it scores, and nobody is waited for."""

from __future__ import annotations

from math import inf, nan

import pytest

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Average, Expect, Found, Propose, SendTo, Serve
from zmqtrain.protocol.hub import LATE_SECONDS, Hub
from zmqtrain.protocol.initialization import VOTE_SECONDS, Vote
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Refused, Snapshot, model_to_wire
from zmqtrain.protocol.rounds import release_rule_from_spec

MODEL = (LeafSpec("w", (3, 4), "float32"),)
WIRE = model_to_wire(MODEL)
PARAMETERS = Snapshot(1, 0, (48,))


def sent(effects, kind):
    return [(e.peer, e.message) for e in effects if isinstance(e, SendTo) and isinstance(e.message, kind)]


def found(effects):
    return [effect for effect in effects if isinstance(effect, Found)]


def join(hub, peer, score=nan):
    hub.receive(peer, Hello(peer), 0.0)
    return hub.receive(peer, Fetch(-1, WIRE, score), 0.0)


def say(hub, peer, score):
    assert hub.receive(peer, Fetch(-1, (), score), 0.0) == []


def tick(hub, now=0.1):
    """Let time pass until then, while all are heard, and the hub listens; return what comes of it."""
    effects, moment = [], -1.0
    while moment < now:
        moment = min(now, hub._ticked + LATE_SECONDS)
        for peer in hub.members:
            hub.saw(peer, moment)
        effects += hub.tick(moment)
    return effects


def averaging(*scores):
    """A hub of nodes "a", "b", ... whose parameters score so, and are being averaged."""
    hub = Hub(RunSettings(initial="mean", start_nodes=len(scores)), release_rule_from_spec("immediately"), "run-1")
    peers = "abcde"[: len(scores)]
    for peer, score in zip(peers, scores, strict=True):
        join(hub, peer, score)
    for peer in peers:
        assert hub.receive(peer, PARAMETERS, 0.0) == [Expect(peer, PARAMETERS)]
        effects = hub.received(peer, 1, 0.0)
    assert effects == [Average(tuple((peer, PARAMETERS) for peer in peers), MODEL)]
    return hub


def voting(*scores):
    hub = averaging(*scores)
    assert hub.averaged() == [Propose(tuple("abcde"[: len(scores)]))]
    return hub


def test_a_mean_that_its_nodes_find_as_good_as_their_own_is_version_0_when_all_have_said_so():
    hub = voting(0.5, 0.5)
    say(hub, "a", 0.54)
    assert not found(tick(hub)) and hub.version == -1
    say(hub, "b", 0.4)
    effects = tick(hub)
    assert effects == [Found("a", PARAMETERS, MODEL), Serve("a", -1), Serve("b", -1)] and hub.version == 0


def test_a_mean_that_most_find_worse_is_refused_with_the_reason_and_others_may_try():
    hub = voting(0.5, 0.4, 0.5)
    for peer, score in [("a", 0.56), ("b", 0.56), ("c", 0.5)]:
        say(hub, peer, score)
    effects = tick(hub)
    assert effects[0] == Propose(()) and not found(effects) and hub.version == -1 and not hub.members
    refused = sent(effects, Refused)
    assert [peer for peer, _ in refused] == ["a", "b", "c"]
    (text,) = {refusal.text for _, refusal in refused if refusal.reason == "initial"}
    assert "2 of the 3 nodes" in text and "more than 10%" in text and "at b it scores 0.56, and its own 0.4" in text
    assert "--initial best" in text
    asked = [effects for peer in "def" if (effects := sent(join(hub, peer, 0.5), Fetch))]
    assert [peer for peer, _ in asked[0]] == ["d", "e", "f"]


@pytest.mark.parametrize(
    ("own", "said", "begins"),
    [
        ((0.5, 0.5), (0.9, 0.5), True),  # half is not more than half
        ((0.5, 0.5, 0.5), (0.9, 0.9, 0.5), False),
        ((0.5, 0.5), (0.9, nan), False),  # who cannot say is not counted
        ((0.5, 0.5), (nan, nan), True),
        ((0.5, 0.5), (inf, inf), False),
        ((-2.0, -2.0), (-1.9, -1.9), True),  # a tenth of what is negative, too
        ((-2.0, -2.0), (-1.7, -1.7), False),
        ((0.0, 0.0), (1e-9, 1e-9), False),
    ],
)
def test_more_than_half_of_those_who_can_say_must_find_it_worse_by_a_tenth(own, said, begins):
    hub = voting(*own)
    for peer, score in zip("abc", said, strict=False):
        say(hub, peer, score)
    assert bool(found(tick(hub))) == begins


@pytest.mark.parametrize("scores", [(nan, nan), (nan, inf)])
def test_nobody_is_asked_who_has_no_score_to_compare_with(scores):
    assert found(averaging(*scores).averaged())
    hub = averaging(*scores, 0.5)
    assert hub.averaged() == [Propose(("c",))]
    say(hub, "a", inf)  # unasked
    say(hub, "c", 0.5)
    assert found(tick(hub))


def test_a_node_alone_is_not_asked_whether_it_is_as_good_as_itself():
    assert found(averaging(0.5).averaged())


def test_who_leaves_is_not_awaited_and_what_it_has_said_does_not_count():
    hub = voting(0.5, 0.5, 0.5)
    for peer in "ab":
        say(hub, peer, 0.9)
        hub.receive(peer, Goodbye(), 0.0)
    assert not found(tick(hub))
    say(hub, "c", 0.5)
    assert found(tick(hub)) == [Found("a", PARAMETERS, MODEL)]
    assert hub.version == 0


def test_who_connects_again_has_no_say_and_is_not_awaited():
    hub = voting(0.5, 0.5)
    say(hub, "a", 0.5)
    join(hub, "b", 0.5)
    say(hub, "b", 0.9)
    assert [effect.peer for effect in tick(hub) if isinstance(effect, Serve)] == ["a", "b"]


def test_the_mean_of_nodes_that_have_all_left_is_nobodys_and_others_are_gathered():
    hub = voting(0.5, 0.5)
    join(hub, "c")
    hub.gone("a", "", 0.0)
    join(hub, "d")
    hub.gone("b", "", 0.0)
    effects = tick(hub)
    assert effects[0] == Propose(()) and [peer for peer, _ in sent(effects, Fetch)] == ["c", "d"]
    hub = averaging(0.5, 0.5)
    hub.gone("a", "", 0.0)
    hub.gone("b", "", 0.0)
    assert not found(hub.averaged()) and not found(tick(hub))


def test_who_never_says_is_not_waited_for_without_end():
    hub = voting(0.5, 0.5)
    say(hub, "a", 0.5)
    assert not found(tick(hub, 1.0))
    assert not found(tick(hub, VOTE_SECONDS))
    assert found(tick(hub, 2.0 + VOTE_SECONDS))


def test_the_vote_on_a_large_model_waits_until_it_can_have_come_to_all():
    large = (LeafSpec("w", (1_000_000_000,), "float32"),)
    vote = Vote({"a": 0.5, "b": 0.5, "c": nan}, large)
    assert not vote.is_over(0.0) and not vote.is_over(850.0) and vote.is_over(870.0)


def test_who_comes_during_the_vote_waits_for_its_end_and_has_no_say():
    hub = voting(0.5, 0.5)
    assert join(hub, "c", 0.1) == []
    for peer, score in [("a", 0.5), ("b", 0.5), ("c", 0.9)]:
        say(hub, peer, score)
    assert [effect.peer for effect in tick(hub) if isinstance(effect, Serve)] == ["a", "b", "c"]


@pytest.mark.parametrize("said", [0.5, 0.9])
def test_who_fetches_anew_because_the_mean_came_spoiled_is_neither_awaited_nor_counted(said):
    hub = voting(0.5, 0.5)
    say(hub, "a", said)
    assert hub.receive("b", Fetch(-1, WIRE, 0.5), 0.0) == []
    assert [effect.peer for effect in tick(hub) if isinstance(effect, Serve)] == (["a", "b"] if said == 0.5 else [])


def test_what_is_said_too_late_costs_nobody_its_place():
    hub = voting(0.5, 0.5, 0.5)
    hub.gone("c", "", 0.0)
    tick(hub, 0.1)
    assert found(tick(hub, 1.0 + VOTE_SECONDS))  # and its nodes wait for a third
    say(hub, "b", 0.9)
    assert [effect.peer for effect in join(hub, "d") if isinstance(effect, Serve)] == ["a", "b", "d"]


def test_a_vote_that_comes_when_its_node_is_served_asks_for_nothing():
    hub = voting(0.5, 0.5)
    say(hub, "a", 0.5)
    tick(hub)
    assert found(tick(hub, 0.1 + VOTE_SECONDS + 1)) and hub.members["b"].state is MemberState.LIVE
    say(hub, "b", 0.9)


def test_for_as_long_as_the_hub_did_not_listen_it_waits_for_what_is_said():
    hub = voting(0.5, 0.5)
    say(hub, "a", 0.5)
    tick(hub)
    assert not found(hub.tick(500.0)), "it stood still, and what was said meanwhile is heard after this"
    say(hub, "b", 0.9)
    assert found(tick(hub, 500.1)), "one of two finds it worse"
