"""Whose parameters a run begins with: who is asked, who takes the place of whom, and what everybody is then sent."""

from __future__ import annotations

import re
from math import inf, nan
from pathlib import Path

import pytest

from tests.protocol.hubs import live_hub
from zmqtrain.core.errors import LocalProtocolError, RemoteProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol import hub as hub_module
from zmqtrain.protocol.effects import Average, Disconnect, Expect, Found, Lend, SendTo, Serve
from zmqtrain.protocol.hub import FOUNDER_SECONDS, Hub
from zmqtrain.protocol.members import MEMBER_TRANSITIONS, MemberState
from zmqtrain.protocol.messages import Fetch, Goodbye, Heartbeat, Hello, Refused, Snapshot, model_to_wire
from zmqtrain.protocol.rounds import release_rule_from_spec

MODEL = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (4,), "float32"))
OTHER = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (5,), "float32"))
WIRE = model_to_wire(MODEL)
PARAMETERS = Snapshot(1, 0, (64, 32), (), 1)


def hub_of(**settings):
    return Hub(RunSettings(**settings), release_rule_from_spec("immediately"), "run-1")


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects, kind):
    return [(e.peer, e.message) for e in effects if isinstance(e, SendTo) and isinstance(e.message, kind)]


class AtOnce:
    """Whoever is not the best lags, as soon as it says so."""

    def __init__(self):
        self.scores, self.forgotten = {}, []

    def report(self, peer, score):
        self.scores[peer] = score
        known = [(score, peer) for peer, score in self.scores.items() if score == score]
        best = min(known)[1] if known else peer
        return None if best == peer else best

    def forget(self, peer):
        self.scores.pop(peer, None)
        self.forgotten.append(peer)


def population(*scores, start_nodes=None, **settings):
    """A hub of nodes "a", "b", ... that train apart, with these scores, and take over optimizer states."""
    settings = RunSettings(initial="own", start_nodes=start_nodes or len(scores), fresh_moments=False, **settings)
    hub = Hub(settings, release_rule_from_spec("immediately"), "run-1", preemption=AtOnce())
    effects = [effect for peer, score in zip("abcdef", scores, strict=False) for effect in join(hub, peer, score)]
    return hub, effects


def join(hub, peer, score=nan, model=WIRE):
    hub.receive(peer, Hello(peer), 0.0)
    return hub.receive(peer, Fetch(-1, model, score), 0.0)


def tell(hub, peer, score):
    return hub.receive(peer, Fetch(-1, (), score), 0.0)


def asked(effects):
    return [peer for peer, _ in sent(effects, Fetch)]


def give(hub, peer, snapshot=PARAMETERS):
    assert hub.receive(peer, snapshot, 0.0) == [Expect(peer, snapshot)]
    return hub.received(peer, snapshot.transfer, 0.0)


def states(hub):
    return {peer: member.state.name for peer, member in hub.members.items()}


# ---------------------------------------------------------------------- best


def test_the_best_scored_of_those_who_wait_founds_the_run_and_all_get_its_moments():
    hub = hub_of(initial="best", start_nodes=3, fresh_moments=False)
    assert join(hub, "a", 0.5) == [] and join(hub, "b", 0.25) == []
    assert asked(join(hub, "c", nan)) == ["b"]
    assert give(hub, "b") == [
        Found("b", PARAMETERS, MODEL),
        Serve("a", -1, moments=True),
        Serve("b", 0, moments=True),
        Serve("c", -1, moments=True),
    ]
    assert hub.version == 0


@pytest.mark.parametrize(
    ("scores", "best"), [((nan, nan), "a"), ((0.5, 0.5), "a"), ((nan, inf), "b"), ((inf, 9.0), "b")]
)
def test_unknown_scores_come_last_and_equal_ones_by_name(scores, best):
    hub = hub_of(initial="best", start_nodes=2)
    join(hub, "b", scores[1])
    assert asked(join(hub, "a", scores[0])) == [best]


def test_the_next_best_founds_where_the_best_has_left():
    hub = hub_of(initial="best", start_nodes=3)
    for peer, score in [("a", 3.0), ("b", 1.0), ("c", 2.0)]:
        effects = join(hub, peer, score)
    assert asked(effects) == ["b"]
    assert asked(hub.gone("b", "crashed", 0.0)) == ["c"]
    effects = give(hub, "c")
    assert of(Found, effects) == [Found("c", PARAMETERS, MODEL)]
    assert of(Serve, effects) == []  # three nodes are to begin it
    assert [serve.peer for serve in of(Serve, join(hub, "d", 0.1))] == ["a", "c", "d"]


def test_the_best_whose_parameters_cannot_be_used_is_sent_away_and_the_next_best_founds():
    hub = hub_of(initial="best", start_nodes=2)
    join(hub, "a", 2.0)
    join(hub, "b", 1.0)
    hub.receive("b", PARAMETERS, 0.0)
    effects = hub.broken("b", 1, "corrupt", "not finite", 0.0)
    assert sent(effects, Refused) == [("b", Refused("corrupt", "not finite"))] and asked(effects) == ["a"]


def test_the_best_that_connects_again_is_not_awaited():
    hub = hub_of(initial="best", start_nodes=2)
    join(hub, "a", 2.0)
    assert asked(join(hub, "b", 1.0)) == ["b"]
    assert asked(hub.receive("b", Hello("b"), 0.0)) == ["a"]


def test_who_joins_later_gets_no_moments():
    hub = hub_of(initial="best", start_nodes=1, fresh_moments=False)
    join(hub, "a", 1.0)
    give(hub, "a")
    assert of(Serve, join(hub, "b", 0.1)) == [Serve("b", -1)]


def test_no_moments_are_sent_where_nobody_adopts_them():
    hub = hub_of(initial="best", start_nodes=2)
    join(hub, "a", 1.0)
    join(hub, "b", 2.0)
    assert not any(serve.moments for serve in of(Serve, give(hub, "a")))


def test_who_is_asked_may_not_give_its_parameters_twice():
    hub = hub_of(initial="best")
    join(hub, "a", 1.0)
    hub.receive("a", PARAMETERS, 0.0)
    with pytest.raises(RemoteProtocolError, match="a second Snapshot"):
        hub.receive("a", Snapshot(2, 0, (64,)), 0.0)


# ---------------------------------------------------------------------- mean


def gathering(*peers):
    hub = hub_of(initial="mean", start_nodes=len(peers))
    effects = [effect for peer in peers for effect in join(hub, peer)]
    assert asked(effects) == list(peers)
    return hub


def test_all_who_wait_are_averaged_once_all_their_parameters_are_here():
    hub = gathering("a", "b")
    assert give(hub, "b") == []
    assert give(hub, "a") == [Average((("a", PARAMETERS), ("b", PARAMETERS)), MODEL)]
    assert join(hub, "c") == [] and hub.version == -1
    assert hub.averaged() == [Found("a", PARAMETERS, MODEL), Serve("a", -1), Serve("b", -1), Serve("c", -1)]
    assert hub.version == 0


def test_parameters_that_cannot_be_averaged_are_refused_with_the_reason_and_others_may_try():
    hub = gathering("a", "b")
    give(hub, "a")
    give(hub, "b")
    effects = hub.unrelated("they began apart")
    assert sent(effects, Refused) == [(peer, Refused("initial", "they began apart")) for peer in "ab"]
    assert [effect.peer for effect in of(Disconnect, effects)] == ["a", "b"] and not hub.members
    assert join(hub, "c") == [] and asked(join(hub, "d")) == ["c", "d"]


def test_who_leaves_while_parameters_are_gathered_is_left_out_of_the_mean():
    hub = gathering("a", "b", "c")
    give(hub, "a")
    give(hub, "c")
    hub.receive("a", Goodbye(), 0.0)
    assert of(Average, hub.gone("b", "", 0.0)) == [Average((("c", PARAMETERS),), MODEL)]


def test_who_is_sent_away_after_giving_its_parameters_is_left_out_of_the_mean():
    hub = gathering("a", "b")
    give(hub, "a")
    assert sent(hub.receive("a", Fetch(-1, (), 0.5), 0.0), Refused)[0][1].reason == "model"
    assert of(Average, give(hub, "b")) == [Average((("b", PARAMETERS),), MODEL)]


def test_when_all_who_were_asked_have_left_others_are_gathered_anew():
    hub = gathering("a", "b")
    hub.gone("a", "", 0.0)
    hub.gone("b", "", 0.0)
    assert join(hub, "c") == [] and asked(join(hub, "d")) == ["c", "d"]


def test_nodes_of_different_models_are_not_averaged():
    hub = hub_of(initial="mean", start_nodes=2)
    join(hub, "a")
    effects = join(hub, "b", model=model_to_wire(OTHER))
    assert sent(effects, Refused)[0][0] == "b" and asked(effects) == ["a"]


# ---------------------------------------------------------------------- own


def test_a_single_node_founds_at_once():
    hub, effects = population(0.5)
    assert asked(effects) == ["a"] and states(hub) == {"a": "LENDING"}
    assert give(hub, "a") == [Found("a", PARAMETERS, MODEL), Serve("a", -1)]


def test_nobody_is_compared_before_enough_nodes_are_there():
    hub, effects = population(0.5, 0.25, start_nodes=3)
    assert effects == [] and hub.initialization._preemption.scores == {}
    assert set(states(hub).values()) == {"APART"}


def test_who_lags_is_lent_the_parameters_of_the_best():
    hub, effects = population(0.5, 0.25, 0.4)
    assert asked(effects) == ["b"]
    assert give(hub, "b") == [Lend("b", PARAMETERS, ("c",))]
    assert hub.members["c"].lineage == "b" and states(hub)["b"] == "APART"
    assert asked(tell(hub, "a", 0.5)) == ["b"]
    effects = give(hub, "b")
    assert of(Lend, effects) == [Lend("b", PARAMETERS, ("a",))]
    assert asked(effects) == ["b"]  # all descend from it now: the run begins with its parameters
    assert give(hub, "b") == [Found("b", PARAMETERS, MODEL), Serve("a", -1), Serve("b", -1), Serve("c", -1)]
    assert hub.version == 0 and set(states(hub).values()) == {"LIVE"}


def test_who_comes_while_the_anchor_is_on_its_way_begins_with_it():
    hub, _ = population(0.5)
    assert join(hub, "b", 0.1) == []
    assert of(Serve, give(hub, "a")) == [Serve("a", -1), Serve("b", -1, moments=True, reset=True)]


def test_who_comes_to_a_founded_population_begins_with_the_shared_parameters():
    hub, _ = population(0.5)
    give(hub, "a")
    assert of(Serve, join(hub, "b", 0.1)) == [Serve("b", -1, reset=True)]


def test_a_node_of_the_run_that_comes_back_keeps_what_it_has_pending():
    hub, _ = population(0.5)
    give(hub, "a")
    hub.receive("a", Hello("a", "node", "run-1", 0), 0.0)
    assert of(Serve, hub.receive("a", Fetch(-1, WIRE), 0.0)) == [Serve("a", -1)]


def test_a_lender_that_leaves_is_replaced_by_the_best_that_remains():
    hub, effects = population(0.5, 0.1, 0.4, 0.2)
    assert asked(effects) == ["b"]  # c lags behind b
    assert asked(hub.gone("b", "", 0.0)) == ["d"]
    assert of(Lend, give(hub, "d")) == [Lend("d", PARAMETERS, ("c",))]


def test_a_borrower_that_has_left_is_lent_nothing():
    hub, effects = population(0.5, 0.25, 0.4)
    assert asked(effects) == ["b"]
    hub.gone("c", "", 0.0)
    assert give(hub, "b") == [Lend("b", PARAMETERS, ())]


def test_who_is_left_alone_founds_the_run():
    hub, _ = population(0.25, 0.5, start_nodes=2)
    assert asked(hub.gone("b", "", 0.0)) == []  # a is lending already
    assert asked(give(hub, "a")) == ["a"]
    assert of(Found, give(hub, "a")) == [Found("a", PARAMETERS, MODEL)]


def test_where_nobody_knows_a_score_the_first_founds_and_the_others_take_its_parameters():
    hub, effects = population(nan, nan)
    assert asked(effects) == ["a"]
    assert of(Serve, give(hub, "a")) == [Serve("a", -1), Serve("b", -1, moments=True, reset=True)]


def test_who_was_lent_parameters_has_no_score_until_it_tells_the_new_one():
    hub, _ = population(0.25, 0.5, 0.3)
    give(hub, "a")
    assert hub.members["b"].score != hub.members["b"].score and "b" in hub.initialization._preemption.forgotten


def declines(hub, peer, score):
    """It was lent parameters that are worse than its own by its own data: it keeps these, and says so."""
    return hub.receive(peer, Fetch(-1, WIRE, score), 0.0)


def test_who_declines_what_it_was_lent_keeps_its_lineage_and_most_that_do_have_the_lender_disbelieved():
    hub, effects = population(0.5, 0.1, 0.4)
    assert asked(effects) == ["b"]
    assert give(hub, "b") == [Lend("b", PARAMETERS, ("c",))]
    declines(hub, "c", 0.4)
    assert hub.members["c"].lineage == "c" and hub.initialization._disbelieved == {"b"}
    effects = tell(hub, "a", 0.5)  # which lags behind c now, the best that is believed
    assert asked(effects) == ["c"]
    effects = give(hub, "c")
    assert of(Lend, effects) == [Lend("c", PARAMETERS, ("a",))]
    assert asked(effects) == ["c"], "all that are believed descend from it: the run begins with its parameters"
    served = {one.peer: one.reset for one in of(Serve, give(hub, "c"))}
    assert served == {"a": False, "b": True, "c": False}


def test_who_says_its_score_again_declines_nothing():
    hub, _ = population(0.5, 0.1, 0.4)
    give(hub, "b")
    tell(hub, "c", 0.1)
    assert hub.members["c"].lineage == "b" and hub.initialization._disbelieved == set()


def test_who_was_not_asked_may_not_give_its_parameters():
    hub, _ = population(0.5, 0.25, start_nodes=3)
    with pytest.raises(RemoteProtocolError, match="while it is training apart"):
        hub.receive("a", PARAMETERS, 0.0)


def test_who_connects_again_descends_from_itself():
    hub, _ = population(0.25, 0.5, 0.3)
    give(hub, "a")
    hub.receive("b", Hello("b"), 0.0)
    hub.receive("b", Fetch(-1, WIRE, 0.5), 0.0)
    assert hub.members["b"].lineage == "b"


def test_a_population_has_one_model():
    hub, _ = population(0.5, 0.25, start_nodes=3)
    assert sent(join(hub, "c", 0.1, model_to_wire(OTHER)), Refused)[0][0] == "c"


def test_elastic_nodes_are_no_population_the_first_founds():
    hub = hub_of(initial="own", elastic=0.5, start_nodes=2)
    assert asked(join(hub, "a", nan)) == ["a"]
    give(hub, "a", Snapshot(1, 0, (64,)))
    assert of(Serve, join(hub, "b")) == [Serve("a", 0), Serve("b", -1)]


def pass_time(hub, seconds):
    """Let time pass in which all peers send heartbeats; return what came of it."""
    effects = []
    for _ in range(round(seconds / 0.25)):
        hub.now = getattr(hub, "now", 0.0) + 0.25
        for peer in list(hub.members):
            hub.receive(peer, Heartbeat(), hub.now)
        effects += hub.tick(hub.now)
    return effects


@pytest.mark.parametrize("announced", [False, True])
def test_a_founder_that_says_nothing_but_heartbeats_gives_way_to_the_next(announced):
    hub = hub_of(initial="founder")
    assert asked(join(hub, "silent")) == ["silent"]
    if announced:
        hub.receive("silent", PARAMETERS, 0.0)
    assert asked(join(hub, "honest")) == []
    assert asked(pass_time(hub, FOUNDER_SECONDS - 1.0)) == []
    effects = pass_time(hub, 2.0)
    assert asked(effects) == ["honest"] and "silent" not in hub.members
    assert [(peer, refused.reason) for peer, refused in sent(effects, Refused)] == [("silent", "unknown")]
    assert asked(join(hub, "silent")) == []
    assert of(Found, give(hub, "honest"))


@pytest.mark.parametrize(("initial", "state"), [("best", "FOUNDING"), ("mean", "FOUNDING"), ("own", "LENDING")])
def test_however_a_run_begins_a_silent_node_does_not_keep_it_from_being_founded(initial, state):
    hub = hub_of(initial=initial, start_nodes=2)
    join(hub, "silent", 0.1), join(hub, "honest", 0.2)
    if initial == "own":
        hub.members["honest"].lineage = "silent"
        tell(hub, "honest", 0.2)
    assert hub.members["silent"].state.name == state
    if hub.members["honest"].state.name == "FOUNDING":
        give(hub, "honest")
    effects = pass_time(hub, FOUNDER_SECONDS + 1.0)
    assert "silent" not in hub.members
    assert asked(effects) == ["honest"] or of(Average, effects)


def test_a_founder_has_all_the_time_it_needs_while_nobody_waits_for_it_or_it_sends_much():
    hub = hub_of(initial="founder")
    join(hub, "slow")
    assert not of(Disconnect, pass_time(hub, 10 * FOUNDER_SECONDS))
    hub = hub_of(initial="founder")
    join(hub, "slow"), join(hub, "other")
    hub.receive("slow", Snapshot(1, 0, (1 << 22,) * 12), 0.0)
    assert not of(Disconnect, pass_time(hub, 3 * FOUNDER_SECONDS))
    assert of(Found, hub.received("slow", 1, hub.now))


def test_no_move_is_made_that_the_table_of_member_states_has_not():
    hub = live_hub("a")
    with pytest.raises(LocalProtocolError, match="it is live"):
        hub.members["a"].move(MemberState.WAITING)
    moves = {(state, to) for state, targets in MEMBER_TRANSITIONS.items() for to in targets}
    assert all(state in MEMBER_TRANSITIONS or state is MemberState.LIVE for _, state in moves)
    for source in Path(hub_module.__file__).parent.glob("*.py"):
        assigned = re.findall(r"^\s*(\w+)\.state(?:,.*)? = ", source.read_text(), re.MULTILINE)
        assert assigned == (["self"] if source.stem == "members" else []), f"{source.stem} moves a member by itself"
