"""The hub's machine: who may say what, who is waited for, what lands."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan

import pytest

from tests.protocol.said import ONE_EACH
from zmqtrain.errors import CheckpointError, RemoteProtocolError
from zmqtrain.protocol import publishing
from zmqtrain.protocol.effects import (
    Accumulate,
    Broadcast,
    Consult,
    Contribution,
    Disconnect,
    Expect,
    Found,
    Rebase,
    Reduce,
    SendTo,
    Serve,
)
from zmqtrain.protocol.framing import MAX_HEAD_BYTES, encode_message
from zmqtrain.protocol.group_messages import Group, GroupLost, JoinGroup
from zmqtrain.protocol.groups import LATE_SECONDS, SILENCE_SECONDS
from zmqtrain.protocol.hub import ALLOWED, Hub, MemberState
from zmqtrain.protocol.joining import MOST_MEMBERS
from zmqtrain.protocol.members import MOST_WAITING
from zmqtrain.protocol.messages import (
    KEY_REQUESTS,
    MESSAGES,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Publish,
    Quarantine,
    Refused,
    Report,
    Roster,
    Snapshot,
    Welcome,
    WorkRequest,
    WorkUnit,
    model_to_wire,
)
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.settings import RunSettings
from zmqtrain.types import LeafSpec

MODEL = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (4,), "float32"))
OTHER = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (5,), "float32"))
WIRE = model_to_wire(MODEL)
FOUNDING = Snapshot(1, 0, (64,))
SAMPLES = ONE_EACH | {
    Fetch: Fetch(-1, WIRE),
    Snapshot: FOUNDING,
    JoinGroup: JoinGroup("default", 2, address="tcp://a:1", token="0a"),
}
ONLY_OF_HUBS = {
    *("Welcome", "Refused", "Roster", "Schedule", "Aggregate", "Preempt", "Quarantine", "WorkUnit", "Probed"),
    *("Forming", "Group", "Leave", "Folded", "Enrolled", "Placed", "Values", "Done", "Awaited", "Replica", "Books"),
    *("Chunk", "Credit"),
}
"""What only a hub says, and what goes by the machine."""


def hub_of(release="immediately", **settings):
    settings = RunSettings(**{"release": release, "codec": "ternary:block=128", "initial": "founder"} | settings)
    return Hub(settings, release_rule_from_spec(release), "run-1")


def publish(sequence, transfer=None, **changes):
    transfer = 100 + sequence if transfer is None else transfer
    return replace(Publish(transfer, sequence, 0, 0, "ternary:block=128", (64,), 8, 8, nan), **changes)


def contribution(peer, sequence, staleness=0):
    return Contribution(peer, sequence, 0, 8, nan, 0, staleness)


def join(hub, peer, model=MODEL, now=0.0):
    hub.receive(peer, Hello(peer), now)
    return hub.receive(peer, Fetch(-1, model_to_wire(model)), now)


def found(hub, peer="a", now=0.0):
    join(hub, peer, now=now)
    hub.receive(peer, FOUNDING, now)
    return hub.received(peer, FOUNDING.transfer, now)


def contribute(hub, peer, sequence, now=0.0, **changes):
    message = publish(sequence, **changes)
    assert hub.receive(peer, message, now) == [Expect(peer, message)]
    return hub.received(peer, message.transfer, now)


def live_hub(*peers, release="immediately", **settings):
    hub = hub_of(release, **settings)
    found(hub, peers[0])
    for peer in peers[1:]:
        join(hub, peer)
    return hub


def attend(hub, until, since=0.0):
    """Let time pass at a hub that attends to it; return what came of it."""
    ticks = round((until - since) / LATE_SECONDS)
    return [effect for tick in range(1, ticks + 1) for effect in hub.tick(since + tick * LATE_SECONDS)]


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects, kind):
    return [(e.peer, e.message) for e in effects if isinstance(e, SendTo) and isinstance(e.message, kind)]


def in_state(state):
    """A hub at which "x" is in that state (and "b" is live, where that can be)."""
    if state is MemberState.FOUNDING:
        hub = hub_of()
        join(hub, "x")
    elif state is MemberState.WAITING:
        hub = hub_of(start_nodes=3)
        found(hub, "b")
        join(hub, "x")
    elif state is MemberState.LIVE:
        hub = live_hub("b", "x")
    elif state in (MemberState.APART, MemberState.LENDING):
        hub = hub_of(initial="own", start_nodes=2 if state is MemberState.APART else 1)
        join(hub, "x")
    elif state is MemberState.MASTER:
        hub = live_hub("b", masters=2)
        hub.receive("x", Hello("x", "master", shard=1, address="tcp://x:1"), 0.0)
    else:
        hub = live_hub("b")
        roles = {MemberState.OBSERVER: "observer", MemberState.PROCESS: "process", MemberState.STANDBY: "standby"}
        hub.receive("x", Hello("x", roles.get(state, "node"), address="tcp://x:1"), 0.0)
    assert hub.members["x"].state is state
    return hub


# ---------------------------------------------------------------------- the table


@pytest.mark.parametrize("state", MemberState)
@pytest.mark.parametrize("kind", MESSAGES)
def test_the_table_says_which_message_is_welcome_in_which_state(state, kind):
    hub = in_state(state)
    if state in ALLOWED.get(kind, ()):
        hub.receive("x", SAMPLES[kind], 1.0)
    else:
        with pytest.raises(RemoteProtocolError) as caught:
            hub.receive("x", SAMPLES[kind], 1.0)
        assert (caught.value.peer, caught.value.state, caught.value.message) == ("x", state.value, kind.__name__)
        assert "x" in hub.members


def test_the_table_knows_every_message_that_a_node_may_say():
    assert {kind.__name__ for kind in MESSAGES} - {kind.__name__ for kind in ALLOWED} == ONLY_OF_HUBS
    assert set(ALLOWED) <= set(MESSAGES)


@pytest.mark.parametrize("kind", [kind for kind in ALLOWED if kind not in (Hello, Goodbye)])
def test_whoever_is_not_known_is_told_to_say_hello(kind):
    ((peer, refused),) = sent(hub_of().receive("x", SAMPLES[kind], 0.0), Refused)
    assert (peer, refused.reason, refused.sequence) == ("x", "unknown", -1)
    assert "Hello" in refused.text


def test_a_goodbye_of_somebody_unknown_is_no_news():
    assert hub_of().receive("x", Goodbye(), 0.0) == []


# ---------------------------------------------------------------------- founding


def test_the_first_node_founds_the_run():
    hub = hub_of()
    ((_, welcome),) = sent(hub.receive("a", Hello("a"), 0.0), Welcome)
    assert (welcome.run, welcome.version, welcome.model) == ("run-1", -1, ())
    assert RunSettings.from_dict(welcome.settings) == hub.settings
    assert hub.receive("a", Fetch(-1, WIRE), 0.0) == [SendTo("a", Fetch())]
    assert hub.receive("a", FOUNDING, 0.0) == [Expect("a", FOUNDING)]
    assert hub.received("a", 1, 0.0) == [Found("a", FOUNDING, MODEL), Serve("a", 0)]
    assert hub.version == 0 and hub.members["a"].state is MemberState.LIVE
    ((_, welcome),) = sent(hub.receive("b", Hello("b"), 0.0), Welcome)
    assert (welcome.version, welcome.model) == (0, WIRE)


def test_who_comes_while_the_run_is_founded_waits_and_is_served_after():
    hub = hub_of()
    join(hub, "a")
    assert join(hub, "b") == []
    assert hub.members["b"].state is MemberState.WAITING
    hub.receive("a", FOUNDING, 0.0)
    assert of(Serve, hub.received("a", 1, 0.0)) == [Serve("a", 0), Serve("b", -1)]


@pytest.mark.parametrize("end", ["gone", "goodbye", "silent", "again"])
def test_when_the_founder_is_lost_the_next_that_waits_founds_the_run(end):
    hub = hub_of()
    join(hub, "a")
    join(hub, "b", OTHER)
    if end == "gone":
        effects = hub.gone("a", "its connection is gone", 1.0)
    elif end == "goodbye":
        effects = hub.receive("a", Goodbye(), 1.0)
    elif end == "again":
        effects = hub.receive("a", Hello("a"), 1.0)
    else:
        hub.saw("b", 9.0)
        effects = attend(hub, 9.0)
    assert SendTo("b", Fetch()) in effects
    assert hub.members["b"].state is MemberState.FOUNDING and hub.model == OTHER
    if end != "again":
        assert "a" not in hub.members


def test_founding_parameters_that_cannot_be_used_cost_the_founder_alone():
    hub = hub_of()
    join(hub, "a")
    join(hub, "b")
    hub.receive("a", FOUNDING, 0.0)
    effects = hub.broken("a", 1, "non-finite", "w holds NaN", 0.0)
    assert sent(effects, Refused) == [("a", Refused("non-finite", "w holds NaN"))]
    assert SendTo("b", Fetch()) in effects and "a" not in hub.members and hub.version == -1


def test_a_founder_founds_once():
    hub = hub_of()
    join(hub, "a")
    hub.receive("a", FOUNDING, 0.0)
    with pytest.raises(RemoteProtocolError, match="second Snapshot"):
        hub.receive("a", Snapshot(2, 0, (64,)), 0.0)
    hub.received("a", 1, 0.0)
    assert hub.received("a", 2, 0.0) == [] and hub.version == 0


@pytest.mark.parametrize("early", [True, False])
def test_a_node_with_another_model_is_refused_with_the_leaf_that_differs(early):
    hub = hub_of()
    join(hub, "a")
    if early:
        join(hub, "b", OTHER)
    hub.receive("a", FOUNDING, 0.0)
    effects = hub.received("a", 1, 0.0)
    if not early:
        effects = join(hub, "b", OTHER)
    ((peer, refused),) = sent(effects, Refused)
    assert (peer, refused.reason) == ("b", "model")
    assert "the leaf b is b float32[4] in the run and b float32[5] on this node" in refused.text
    assert of(Disconnect, effects) == [Disconnect("b", "model", refused.text)]
    assert set(hub.members) == {"a"}


def test_a_node_that_describes_no_model_is_refused():
    hub = hub_of()
    ((_, refused),) = sent(join(hub, "a", ()), Refused)
    assert refused.reason == "model" and hub.members == {}


def test_training_begins_when_enough_nodes_are_there():
    hub = hub_of(start_nodes=3)
    assert of(Serve, found(hub, "a")) == []
    assert join(hub, "b") == []
    assert join(hub, "c") == [Serve("a", 0), Serve("b", -1), Serve("c", -1)]
    hub.gone("a", "", 0.0), hub.gone("b", "", 0.0)
    assert join(hub, "d") == [Serve("d", -1)]  # others may come and go at any time after


def test_a_node_of_another_model_does_not_count_for_the_start():
    hub = hub_of(start_nodes=2)
    found(hub, "a")
    assert of(Serve, join(hub, "b", OTHER)) == []
    assert of(Serve, join(hub, "c")) == [Serve("a", 0), Serve("c", -1)]


# ---------------------------------------------------------------------- coming and going


def test_a_node_whose_heartbeat_is_late_is_sent_something_so_that_a_connection_that_is_gone_is_noticed():
    hub = live_hub("a", "b")
    hub.receive("b", Heartbeat(0.4), 0.4)
    asked = {now: [effect.peer for effect in of(SendTo, hub.tick(now))] for now in (0.5, 0.7, 0.9, 1.05, 1.35)}
    assert asked == {0.5: [], 0.7: ["a"], 0.9: [], 1.05: ["b"], 1.35: ["a"]}


def test_a_silent_node_is_lost():
    hub = live_hub("a", "b")
    hub.saw("b", 2.0)
    effects = attend(hub, 4.0)
    assert of(Disconnect, effects) == [Disconnect("a", "lost", "silent for 3.0 s")]
    assert hub.live == {"b"}


def test_a_hub_that_was_held_up_loses_nobody_before_what_they_said_meanwhile_can_be_heard():
    hub = live_hub("a", "b")
    assert of(Disconnect, attend(hub, 2.0)) == []
    assert of(Disconnect, hub.tick(60.0)) == []
    hub.receive("b", Heartbeat(59.0), 60.1)
    lost = of(Disconnect, attend(hub, 62.0, 60.0))
    assert [effect.peer for effect in lost] == ["a"] and hub.live == {"b"}


@pytest.mark.parametrize("sign", [Heartbeat(1.0), SAMPLES[Report], "chunk"])
def test_whatever_a_node_says_is_a_sign_of_life(sign):
    hub = live_hub("a")
    if sign == "chunk":
        hub.saw("a", 3.0)
    else:
        hub.receive("a", sign, 3.0)
    hub.saw("nobody", 3.0)
    assert of(Disconnect, attend(hub, 5.5)) == []
    assert of(Disconnect, hub.tick(5.6)) != []


def test_a_heartbeat_comes_back_as_it_was_sent():
    assert live_hub("a").receive("a", Heartbeat(12.5), 3.0) == [SendTo("a", Heartbeat(12.5, -1))]


def test_a_goodbye_is_the_end_of_a_member():
    hub = live_hub("a", "b")
    (effect,) = hub.receive("a", Goodbye("done"), 0.0)
    assert effect == Disconnect("a", "goodbye", "said goodbye: done")
    assert hub.gone("a", "", 0.0) == [] and hub.evaluator == "b"


def test_the_roster_goes_out_once_a_second():
    hub = live_hub("a")
    hub.receive("w", Hello("w", "observer"), 0.0)
    assert of(Broadcast, hub.tick(0.9)) == []
    ((roster,),) = [[e.message for e in of(Broadcast, hub.tick(now))] for now in [1.0]]
    assert of(Broadcast, hub.tick(1.9)) == [] and of(Broadcast, hub.tick(2.0)) != []
    assert isinstance(roster, Roster) and [m["peer"] for m in roster.members] == ["a"] and roster.evaluator == "a"


def test_an_observer_sees_the_roster_at_once_and_counts_for_nothing():
    hub = live_hub("a", release="all")
    effects = hub.receive("w", Hello("w", "observer"), 0.0)
    assert [type(m) for _, m in sent(effects, object)] == [Welcome, Roster]
    assert hub.nodes == 1 and hub.live == {"a"}
    assert of(Reduce, contribute(hub, "a", 0)) != []


def test_the_roster_tells_what_each_node_last_reported():
    hub = live_hub("a", "b")
    report = Report(40, 320, 99.0, 0.25, 4.0, 1, 10, 20, "data units")
    hub.receive("a", report, 0.0)
    contribute(hub, "a", 0)
    first, second = hub.roster(7.0).members
    told = {"step": 40, "samples": 320, "loss": 0.25, "waiting": "data units", "contributions": 1, "state": "live"}
    assert told.items() <= first.items() and "step" not in second
    assert hub.roster(7.0).seconds == 7.0 and hub.roster(7.0).samples == 8


@pytest.mark.parametrize(
    "told", [{"waiting": "x" * 201}, {"scores": {str(n): 0.0 for n in range(33)}}, {"scores": {"x" * 65: 0.0}}]
)
def test_a_report_that_would_not_fit_a_roster_is_refused(told):
    with pytest.raises(RemoteProtocolError, match="a Report of that length"):
        live_hub("a").receive("a", replace(SAMPLES[Report], **told), 0.0)


@pytest.mark.parametrize(
    "told",
    [
        {"link": 1.7e308},
        {"link": -1.0},
        {"link": float("nan")},
        {"share": 0.0},
        {"share": 1e-9},
        {"link": 1.0, "share": 0.1},
    ],
)
def test_a_hello_of_an_impossible_link_is_refused(told):
    hub = live_hub("a")
    with pytest.raises(RemoteProtocolError, match="a Hello with a link"):
        hub.receive("b", replace(Hello("b"), **told), 0.0)
    assert set(hub.members) == {"a"}


def test_the_score_of_an_older_version_does_not_replace_a_newer_one():
    hub = live_hub("a")
    hub.version = 4
    for version, loss in ((3, 0.5), (2, 0.9), (4, 0.25), (1 << 63, 0.0)):  # the last one is of no version of this run
        hub.receive("a", replace(SAMPLES[Report], scores={"loss": loss}, score_version=version), 0.0)
    assert (hub.scores, hub.score_version) == ({"loss": 0.25}, 4)


def test_the_evaluator_is_the_oldest_live_node():
    hub = live_hub("a", "b")
    assert hub.evaluator == "a"
    hub.receive("a", Hello("a"), 0.0)
    assert hub.evaluator == "b"
    hub.receive("a", Fetch(0, WIRE), 0.0)
    assert hub.evaluator == "b"
    hub.gone("b", "", 0.0)
    assert hub.evaluator == "a"
    assert hub_of().evaluator is None


def test_a_node_that_connects_again_keeps_its_figures_and_loses_what_was_on_its_way():
    hub = live_hub("a", "b", release="all")
    contribute(hub, "a", 0)
    hub.receive("a", publish(1), 0.0)
    effects = hub.receive("a", Hello("a", version=0), 0.0)
    assert of(Disconnect, effects) == [Disconnect("a", "again", "a connected again")]
    ((_, welcome),) = sent(effects, Welcome)
    assert welcome.accepted == (0,) and welcome.landed == ()
    assert hub.members["a"].contributions == 1
    assert hub.received("a", 101, 0.0) == []  # its last chunk was still being looked at
    assert of(Reduce, contribute(hub, "b", 0))[0].landed == (("a", 0), ("b", 0))
    ((_, welcome),) = sent(hub.receive("a", Hello("a"), 0.0), Welcome)
    assert welcome.accepted == () and welcome.landed == ((0, 1),)
    assert hub.receive("a", Fetch(0, WIRE), 0.0) == [Serve("a", 0, ((0, 1),))]


def test_what_has_landed_is_remembered_of_a_node_that_was_lost():
    hub = live_hub("a", "b")
    contribute(hub, "a", 0)
    hub.gone("a", "", 0.0)
    ((_, welcome),) = sent(hub.receive("a", Hello("a"), 0.0), Welcome)
    assert welcome.landed == ((0, 1),)


def test_a_live_node_that_asks_again_is_served_again():
    hub = live_hub("a")
    contribute(hub, "a", 0)
    assert hub.receive("a", Fetch(-1, WIRE), 0.0) == [Serve("a", -1, ((0, 1),))]


def test_a_process_is_no_node_of_the_run():
    hub = live_hub("a")
    effects = hub.receive("p", Hello("p", "process"), 0.0)
    assert sent(effects, Welcome) and hub.members["p"].state is MemberState.PROCESS
    assert hub.nodes == 1 and hub.live == {"a"} and [one["peer"] for one in hub.roster(0.0).members] == ["a"]
    assert hub.receive("p", Goodbye(), 0.0) == [Disconnect("p", "process", "said goodbye")]


@pytest.mark.parametrize("kind", KEY_REQUESTS)
def test_what_a_process_asks_the_key_server_goes_there(kind):
    hub = hub_of()
    hub.receive("p", Hello("p", "process"), 0.0)
    assert hub.receive("p", SAMPLES[kind], 0.0) == [Consult("p", SAMPLES[kind])]


def test_a_silent_process_is_lost_soon_and_its_group_is_told():
    hub = hub_of()
    for peer in "pq":
        hub.receive(peer, Hello(peer, "process"), 0.0)
        effects = hub.receive(peer, SAMPLES[JoinGroup], 0.0)
    assert [message.rank for _, message in sent(effects, Group)] == [0, 1]
    for tenths in range(1, round(10 * SILENCE_SECONDS)):
        hub.saw("q", tenths / 10)
        assert sent(hub.tick(tenths / 10), GroupLost) == []
    hub.saw("q", SILENCE_SECONDS + 0.05)
    told = dict(sent(hub.tick(SILENCE_SECONDS + 0.05), GroupLost))
    assert told.keys() == {"p", "q"} and told["p"] == told["q"]
    assert (told["q"].rank, told["q"].left) == (0, False) and "silent" in told["q"].why


def test_a_hub_that_was_stopped_itself_takes_no_process_for_lost():
    hub = hub_of()
    hub.receive("p", Hello("p", "process"), 0.0)
    hub.tick(0.1)
    assert of(Disconnect, hub.tick(9.0)) == []


@pytest.mark.parametrize("end", ["goodbye", "gone", "again"])
def test_who_leaves_the_hub_leaves_its_group(end):
    hub = hub_of()
    for peer in "pq":
        hub.receive(peer, Hello(peer, "process"), 0.0)
        hub.receive(peer, SAMPLES[JoinGroup], 0.0)
    if end == "goodbye":
        effects = hub.receive("p", Goodbye(), 0.0)
    elif end == "gone":
        effects = hub.gone("p", "its connection is gone", 0.0)
    else:
        effects = hub.receive("p", Hello("p", "process"), 0.0)
    lost = dict(sent(effects, GroupLost))["q"]
    assert (lost.rank, lost.left) == (0, end == "goodbye")


# ---------------------------------------------------------------------- contributions


def test_a_publish_is_expected_accumulated_and_released():
    hub = live_hub("a", "b")
    first = publish(0)
    assert hub.receive("a", first, 0.0) == [Expect("a", first)]
    reduce = Reduce(version=1, fragments=(0,), contributions=(contribution("a", 0),), live=2, dense=False)
    assert hub.received("a", 100, 0.0) == [Accumulate("a", first), reduce]
    assert (reduce.landed, reduce.samples) == ((("a", 0),), 8)
    assert (hub.version, hub.samples, hub.contributions) == (1, 8, 1)
    assert hub.received("a", 100, 0.0) == []


@pytest.mark.parametrize(
    ("changes", "reason", "told"),
    [
        ({"sequence": 1}, "duplicate", "sequence 1 was heard before"),
        ({"fragment": 2}, "fragment", "fragment 2 of a run with 2"),
        ({"fragment": -1}, "fragment", "fragment -1 of a run with 2"),
        ({"codec": "int8:block=256"}, "codec", "coded as 'int8:block=256'; this run takes 'ternary:block=128'"),
        ({"base_version": 5}, "version", "based on version 5; the run is at 1"),
        ({"samples": -1}, "samples", "stands for -1 samples in 8 steps"),
        ({"steps": -1}, "samples", "stands for 8 samples in -1 steps"),
        ({"samples": 1 << 63}, "samples", "stands for 9223372036854775808 samples in 8 steps"),
    ],
)
def test_a_publish_that_does_not_fit_is_refused_and_counted(changes, reason, told):
    hub = live_hub("a", fragments=2)
    contribute(hub, "a", 0)
    hub.receive("a", publish(1, 40), 0.0), hub.broken("a", 40, "size", "too large", 0.0)
    hub.members["a"].refused = hub.refused = 0
    message = publish(changes.pop("sequence", 2), 50, **changes)
    assert hub.receive("a", message, 0.0) == [SendTo("a", Refused(reason, told, message.sequence))]
    assert hub.refused == hub.members["a"].refused == 1 and hub.rounds.pending == ()


def test_two_publishes_of_one_transfer_are_refused():
    hub = live_hub("a")
    hub.receive("a", publish(0, 7), 0.0)
    ((_, refused),) = sent(hub.receive("a", publish(1, 7), 0.0), Refused)
    assert refused.reason == "duplicate"


def test_a_refused_publish_may_be_followed_by_a_good_one_and_a_broken_one_is_not_used():
    hub = live_hub("a")
    hub.receive("a", publish(0), 0.0)
    assert hub.broken("a", 100, "corrupt", "bytes were changed", 0.0) == [
        SendTo("a", Refused("corrupt", "bytes were changed", 0))
    ]
    assert hub.broken("a", 100, "corrupt", "again", 0.0) == [] and hub.refused == 1
    assert of(Reduce, contribute(hub, "a", 1))[0].landed == (("a", 1),)


@pytest.mark.parametrize("state", [state for state in MemberState if state is not MemberState.LIVE])
def test_only_a_live_node_may_publish(state):
    with pytest.raises(RemoteProtocolError, match=f"Publish from x while it is {state.value}"):
        in_state(state).receive("x", publish(0), 0.0)


def test_a_dense_publish_makes_the_release_dense():
    hub = live_hub("a", "b", release="quorum:count=2")
    contribute(hub, "a", 0)
    assert of(Reduce, contribute(hub, "b", 0, codec="float32", dense=True))[0].dense


def test_the_release_carries_the_union_of_the_accepted_fragments():
    hub = live_hub("a", "b", "c", release="all", fragments=3)
    contribute(hub, "a", 0, fragment=2), contribute(hub, "b", 0, fragment=0)
    assert of(Reduce, contribute(hub, "c", 0, fragment=2))[0].fragments == (0, 2)


def test_under_a_quorum_each_fragment_has_a_round_of_its_own():
    hub = live_hub("a", "b", "c", release="quorum:count=2,share=0", fragments=2)
    contribute(hub, "a", 0, fragment=0), contribute(hub, "b", 0, fragment=1)
    late = of(Reduce, contribute(hub, "c", 0, fragment=1))
    assert [reduce.fragments for reduce in late] == [(1,)] and len(hub.rounds.pending) == 1
    assert of(Reduce, contribute(hub, "c", 1, fragment=0))[0].landed == (("a", 0), ("c", 1))


def test_the_mean_is_over_the_live_nodes_and_those_that_have_contributed():
    hub = live_hub("a", "b", "c", release="quorum:count=3,share=0.5,patience=5")
    contribute(hub, "a", 0)
    hub.gone("a", "", 0.0)
    assert of(Reduce, contribute(hub, "b", 0)) == []
    (reduce,) = of(Reduce, hub.tick(0.5))
    assert (reduce.live, reduce.landed) == (3, (("a", 0), ("b", 0)))


def test_in_a_round_of_all_each_node_has_one_and_the_order_is_stated():
    hub = live_hub("b", "a", release="all")
    assert contribute(hub, "b", 0) == [] and contribute(hub, "b", 1) == []
    assert contribute(hub, "a", 0) == [
        Accumulate("a", publish(0)),
        Accumulate("b", publish(0)),
        Reduce(1, (0,), (contribution("a", 0), contribution("b", 0)), 2, False),
    ]
    assert [r.landed for r in of(Reduce, contribute(hub, "a", 1))] == [(("a", 1), ("b", 1))]


@pytest.mark.parametrize("end", ["gone", "goodbye", "silent", "again", "idle"])
def test_a_round_does_not_wait_for_a_node_that_is_gone_or_has_no_data(end):
    hub = live_hub("a", "b", release="all", units=1)
    contribute(hub, "a", 0)
    if end == "gone":
        effects = hub.gone("b", "", 0.0)
    elif end == "goodbye":
        effects = hub.receive("b", Goodbye(), 0.0)
    elif end == "silent":
        hub.saw("a", 5.0)
        effects = attend(hub, 5.0)
    elif end == "again":
        effects = hub.receive("b", Hello("b"), 0.0)
    else:
        hub.receive("a", WorkRequest((), 1, False), 0.0)
        effects = hub.receive("b", WorkRequest((), 1, True), 0.0)
    assert [reduce.landed for reduce in of(Reduce, effects)] == [(("a", 0),)]


def test_time_alone_closes_a_round_below_its_quorum():
    hub = live_hub("a", "b", "c", release="quorum:count=2,share=0.5,patience=1")
    contribute(hub, "a", 0, now=1.0)
    assert of(Reduce, hub.tick(1.9)) == []
    assert of(Reduce, hub.tick(2.0))[0].live == 3


# ---------------------------------------------------------------------- data units


def test_units_are_dealt_to_who_asks():
    hub = live_hub("a", "b", units=3)
    assert hub.receive("a", WorkRequest((), 2, False), 0.0) == [SendTo("a", WorkUnit((0, 1)))]
    assert hub.receive("b", WorkRequest((), 2, True), 0.0) == [SendTo("b", WorkUnit((2,)))]


def test_a_dead_nodes_unit_is_dealt_again_to_an_idle_one_and_the_end_is_told_to_all():
    hub = live_hub("a", "b", "c", units=3)
    hub.receive("a", WorkRequest((), 1, False), 0.0)
    hub.receive("b", WorkRequest((), 2, False), 0.0)
    assert hub.receive("c", WorkRequest((), 1, True), 0.0) == []
    assert hub.live == {"a", "b"}
    assert hub.gone("a", "", 0.0)[1:] == [SendTo("c", WorkUnit((0,)))]
    assert hub.live == {"b", "c"}
    assert hub.receive("b", WorkRequest((1, 2), 1, True), 0.0) == []
    effects = hub.receive("c", WorkRequest((0,), 1, True), 0.0)
    assert effects == [SendTo("b", WorkUnit((), finished=True)), SendTo("c", WorkUnit((), finished=True))]
    assert hub.ledger.finished


def test_a_unit_that_was_lost_on_its_way_is_dealt_again():
    hub = live_hub("a", "b", units=2)
    hub.receive("a", WorkRequest((), 1, True), 0.0)  # the answer is lost with the connection
    hub.receive("b", WorkRequest((), 1, True), 0.0)
    hub.receive("b", WorkRequest((1,), 1, True), 0.0)
    effects = hub.receive("a", Hello("a"), 0.0)
    assert SendTo("b", WorkUnit((0,))) in effects


def test_who_drains_last_does_not_weigh_more_because_the_others_have_left():
    hub = live_hub("a", "b", units=1)
    hub.receive("a", WorkRequest((), 1, False), 0.0)
    hub.receive("a", WorkRequest((0,), 1, False), 0.0)
    hub.receive("b", Goodbye("done"), 0.0)
    assert of(Reduce, contribute(hub, "a", 0, codec="float32", dense=True))[0].live == 2


def test_who_finishes_last_does_not_weigh_more_because_the_others_have_no_data_left():
    hub = live_hub("a", "b", "c", units=1)
    hub.receive("a", WorkRequest((), 1, False), 0.0)
    for done in ("b", "c"):
        hub.receive(done, WorkRequest((), 1, True), 0.0)
    assert of(Reduce, contribute(hub, "a", 0))[0].live == 3


def test_a_greedy_request_is_bounded():
    hub = live_hub("a")
    ((_, unit),) = sent(hub.receive("a", WorkRequest((), 1 << 40, False), 0.0), WorkUnit)
    assert len(unit.numbers) == 64
    assert hub.receive("a", WorkRequest((), -3, False), 0.0) == []


def strict_hub():
    hub = live_hub("b", "a", release="all", mode="strict", units=6, start_nodes=2)
    assert {m.state for m in hub.members.values()} == {MemberState.LIVE}
    return hub


def test_in_strict_mode_each_node_has_a_lane_of_its_own_whoever_asks_first():
    hub = strict_hub()
    assert hub.receive("b", WorkRequest((), 2, False), 0.0) == [SendTo("b", WorkUnit((1, 3)))]
    assert hub.receive("a", WorkRequest((), 2, False), 0.0) == [SendTo("a", WorkUnit((0, 2)))]


def test_in_strict_mode_a_node_that_is_quarantined_beside_those_that_began_has_no_lane_and_asks_without_harm():
    hub = live_hub("b", "a", "c", release="all", mode="strict", units=6, start_nodes=2)
    hub.members["c"].quarantined = True
    ((_, dealt),) = sent(hub.receive("c", WorkRequest((), 1, True), 0.0), WorkUnit)
    assert len(dealt.numbers) == 1


def test_in_strict_mode_a_node_at_the_end_of_its_share_is_still_waited_for():
    hub = strict_hub()
    hub.receive("a", WorkRequest((), 3, False), 0.0)
    assert hub.receive("a", WorkRequest((0, 2, 4), 1, True), 0.0) == []
    assert not hub.members["a"].idle
    assert contribute(hub, "b", 0) == []
    assert of(Reduce, contribute(hub, "a", 0))[0].live == 2


def test_in_strict_mode_units_come_back_to_their_own_lane():
    hub = strict_hub()
    hub.receive("a", WorkRequest((), 3, False), 0.0)
    hub.receive("b", WorkRequest((), 3, False), 0.0)
    for peer in ("a", "b"):
        hub.receive(peer, Hello(peer), 0.0), hub.receive(peer, Fetch(0, WIRE), 0.0)
    assert sent(hub.receive("b", WorkRequest((), 3, False), 0.0), WorkUnit) == [("b", WorkUnit((1, 3, 5)))]
    assert sent(hub.receive("a", WorkRequest((), 3, False), 0.0), WorkUnit) == [("a", WorkUnit((0, 2, 4)))]


# ---------------------------------------------------------------------- life after a restart


def restarted(hub):
    again = Hub(hub.settings, hub.rounds.rule, "run-of-another-name")
    again.restore(hub.state())
    return again


def test_a_restarted_hub_is_the_same_run():
    hub = live_hub("a", "b", units=5)
    contribute(hub, "a", 0)
    hub.receive("a", replace(SAMPLES[Report], scores={"loss": 0.5}, score_version=1), 0.0)
    again = restarted(hub)
    assert again.state() == hub.state()
    assert (again.run, again.version, again.model, again.members) == ("run-1", 1, MODEL, {})
    ((_, welcome),) = sent(again.receive("a", Hello("a"), 0.0), Welcome)
    assert welcome.landed == ((0, 1),)
    assert again.receive("a", Fetch(1, WIRE), 0.0) == [Serve("a", 1, ((0, 1),))]
    assert again.receive("a", publish(0), 0.0) == [] and again.fence.dropped == {"double": 1}


def test_the_journal_is_replayed_onto_the_state():
    hub = live_hub("a", "b")
    saved = hub.state()
    contribute(hub, "a", 0), contribute(hub, "b", 3)
    again = Hub(hub.settings, hub.rounds.rule, "")
    again.restore(saved)
    again.replay(1, (("a", 0),), 8), again.replay(2, (("b", 3),), 8)
    assert again.state() == hub.state()


def test_what_was_accepted_and_not_released_is_forgotten_by_a_restart():
    hub = live_hub("a", "b", release="all")
    contribute(hub, "a", 0)
    ((_, welcome),) = sent(restarted(hub).receive("a", Hello("a"), 0.0), Welcome)
    assert (welcome.accepted, welcome.landed) == ((), ())


@pytest.mark.parametrize(
    "damage",
    [
        {"version": "x"},
        {"model": 3},
        {"records": []},
        {"records": {"a": [0, [[-1, 1]], 0, []]}},
        {"scores": None},
        {"ledger": {}},
    ],
)
def test_a_state_that_cannot_be_read_is_a_checkpoint_error(damage):
    hub = live_hub("a")
    with pytest.raises(CheckpointError):
        Hub(hub.settings, hub.rounds.rule, "").restore(hub.state() | damage)


def test_records_of_peers_that_are_long_gone_are_bounded():
    hub = live_hub("a")
    for number in range(1100):
        hub.replay(number + 1, ((f"peer-{number}", 0),), 0)
    assert len(hub.state()["records"]) == 1024


def test_a_report_that_would_swell_the_roster_costs_its_sender():
    hub = live_hub("a", "b")
    for words in ({"waiting": "x" * 1000}, {"scores": {f"score-{i}": 1.0 for i in range(1000)}}):
        with pytest.raises(RemoteProtocolError, match="Report of that length"):
            hub.receive("a", replace(SAMPLES[Report], **words), 0.0)


@pytest.mark.parametrize("release", ["all", "time:seconds=1000"])
def test_who_floods_a_round_that_stays_open_is_refused_and_is_not_held_without_end(release):
    hub = live_hub("a", "b", release=release)
    for sequence in range(MOST_WAITING):
        contribute(hub, "a", sequence)
    ((_, answer),) = sent(hub.receive("a", publish(MOST_WAITING), 0.0), Refused)
    assert (answer.reason, answer.sequence) == ("waiting", MOST_WAITING)
    assert len(hub.rounds.pending) == MOST_WAITING
    contribute(hub, "b", 0)


def test_a_hub_that_is_full_asks_to_try_again_and_its_roster_is_still_one_head():
    hub = Hub(RunSettings(lost_seconds=3.0), release_rule_from_spec("quorum"), "run-1")
    report = Report(1, 8, 1.0, 0.5, 4.0, 0, 0, 0, waiting="\U0001f600" * 200)
    for number in range(MOST_MEMBERS):
        peer = f"{number:03}" + "p" * 197
        hub.receive(peer, Hello("\U0001f600" * 100, link=1.0), 0.0)
        hub.receive(peer, report, 0.0)
    assert len(encode_message(hub.roster(0.0))) < MAX_HEAD_BYTES
    refused = hub.receive("late", Hello("late"), 0.0)[0].message
    assert refused.reason == "unknown" and "try again" in refused.text
    assert any(isinstance(effect, SendTo) for effect in hub.receive(peer, Hello("again"), 0.0))
    attend(hub, 10.0)
    assert hub.receive("late", Hello("late"), 10.0) and "late" in hub.members


def test_what_a_peer_calls_itself_stays_on_one_line():
    hub = Hub(RunSettings(), release_rule_from_spec("quorum"), "run-1")
    hub.receive("a", Hello("a\n2026 ERROR \x1b[2J"), 0.0)
    assert hub.members["a"].name == "a?2026 ERROR ?[2J"
    (effect,) = [one for one in hub.receive("a", Goodbye("x\ny" * 1000), 0.0) if isinstance(one, Disconnect)]
    assert "\n" not in effect.text and len(effect.text) < 300


def test_a_node_has_no_more_bytes_waiting_than_its_model_and_the_settings_ask_for(monkeypatch):
    monkeypatch.setattr(publishing, "MOST_WAITING_BYTES", 1000)
    hub = live_hub("a", "b", release="all")
    for sequence in range(10):
        contribute(hub, "a", sequence, sizes=(100,))
    refused = hub.receive("a", publish(10, sizes=(1,)), 0.0)[0].message
    assert refused.reason == "waiting" and "such large ones" in refused.text
    assert hub.receive("b", publish(0), 0.0) == [Expect("b", publish(0))]


# ---------------------------------------------------------------------- quarantine


def offend(hub, peer, sequence, now=0.0, reason="norm"):
    """Send a delta that is refused for what is in it; return what the hub has to say."""
    message = publish(sequence)
    assert hub.receive(peer, message, now) == [Expect(peer, message)]
    return hub.broken(peer, message.transfer, reason, "too large", now)


def test_who_sends_refused_deltas_again_and_again_is_told_for_how_long_none_is_taken():
    hub = live_hub("a", "b")
    assert sent(offend(hub, "b", 0) + offend(hub, "b", 1), Quarantine) == []
    assert sent(offend(hub, "b", 2), Quarantine) == [("b", Quarantine("norm", "too large", 10.0))]
    assert hub.roster(0.0).members[1]["state"] == "quarantined"
    assert [message.reason for _, message in sent(hub.receive("b", publish(3), 1.0), Refused)] == ["quarantine"]
    hub.receive("a", Heartbeat(9.0), 9.0)
    hub.receive("b", Heartbeat(9.0), 9.0)
    hub.tick(10.0)
    assert hub.roster(10.0).members[1]["state"] == "live"
    assert hub.receive("b", publish(3), 10.0) == [Expect("b", publish(3))]


def test_who_is_quarantined_is_not_waited_for_and_no_part_of_the_mean():
    hub = live_hub("a", "b", release="all")
    contribute(hub, "a", 0)
    offend(hub, "b", 0)
    offend(hub, "b", 1)
    (reduce,) = of(Reduce, offend(hub, "b", 2))
    assert reduce.contributions == (contribution("a", 0),) and reduce.live == 1


def test_what_it_had_sent_before_still_lands():
    hub = live_hub("a", "b", release="all")
    contribute(hub, "b", 0)
    for sequence in (1, 2, 3):
        offend(hub, "b", sequence)
    (reduce,) = of(Reduce, contribute(hub, "a", 0))
    assert {one.peer for one in reduce.contributions} == {"a", "b"} and reduce.live == 2


def test_where_half_of_the_nodes_are_turned_away_for_their_norm_the_gate_is_wrong_and_all_are_let_out():
    hub = live_hub("a", "b")
    for sequence in range(3):
        offend(hub, "b", sequence)
    for sequence in range(2):
        offend(hub, "a", sequence)
    effects = offend(hub, "a", 2, now=1.0)
    assert of(Rebase, effects) == [Rebase(("a", "b"))]
    assert [(peer, message.reason, message.seconds) for peer, message in sent(effects, Quarantine)] == [
        ("b", "over", 0)
    ]
    assert hub.live == {"a", "b"}
    assert hub.receive("b", publish(3), 1.0) == [Expect("b", publish(3))]


def test_who_trains_alone_is_not_quarantined_for_its_norm():
    hub = live_hub("a")
    offend(hub, "a", 0)
    offend(hub, "a", 1)
    effects = offend(hub, "a", 2)
    assert of(Rebase, effects) == [Rebase(("a",))] and not sent(effects, Quarantine)
    assert hub.live == {"a"}


def test_who_connects_again_is_still_quarantined_and_is_told_so():
    hub = live_hub("a", "b")
    for sequence in range(3):
        offend(hub, "b", sequence, now=1.0)
    assert sent(hub.receive("b", Hello("b"), 4.0), Quarantine)[0][1].seconds == 7.0
    hub.receive("b", Fetch(-1, WIRE), 4.0)
    assert "b" not in hub.live


def test_who_is_quarantined_still_is_where_its_hub_is_taken_over():
    hub = live_hub("a", "b")
    for sequence in range(3):
        offend(hub, "b", sequence, now=1.0)
    hub.tick(4.0)
    again = Hub(hub.settings, hub.rounds.rule, "", now=100.0)
    again.restore(hub.state() | json.loads(hub.books()))
    assert sent(again.receive("b", Hello("b", run="run-1"), 101.0), Quarantine)[0][1].seconds == 6.0


def test_deltas_that_are_late_or_come_twice_quarantine_nobody():
    hub = live_hub("a", "b", max_staleness=1)
    contribute(hub, "b", 0)
    for _ in range(20):
        assert not sent(hub.receive("b", publish(0), 0.0), Quarantine)
