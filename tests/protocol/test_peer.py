"""A node's machine: how it joins, what it believes, and that it comes back by itself."""

from __future__ import annotations

import zlib
from dataclasses import replace
from math import nan

import pytest

from tests.protocol.said import ONE_EACH
from zmqtrain.errors import ConfigError, LocalProtocolError
from zmqtrain.protocol.backoff import ANSWER_SECONDS, FIRST_SECONDS, MOST_SECONDS, Backoff
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Expect, Send, Serve, Withdraw
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.messages import (
    MESSAGES,
    Aggregate,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Preempt,
    Publish,
    Quarantine,
    Refused,
    Roster,
    Schedule,
    Snapshot,
    Welcome,
    model_to_wire,
)
from zmqtrain.protocol.peer import HUB, PEER_TRANSITIONS, Peer, PeerState
from zmqtrain.settings import RunSettings
from zmqtrain.types import LeafSpec

MODEL = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (4,), "float32"))
OTHER = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (4,), "bfloat16"))
WIRE = model_to_wire(MODEL)
SETTINGS = RunSettings(every=3, delay=2)
POPULATION = RunSettings(every=3, delay=2, initial="own", start_nodes=2)
ROSTER = Roster(0, (), "", 0, 0, 0, 0, 0.0, {}, -1)


def welcome(version=0, run="run-1", model=WIRE, landed=(), accepted=(), settings=SETTINGS):
    return Welcome(run, version, settings.to_dict(), model, landed, accepted)


def aggregate(version, landed=(), transfer=None):
    transfer = version if transfer is None else transfer
    return Aggregate(transfer, version, "float32", (0,), (1,), (64,), landed, 2)


def snapshot(version, landed=(), transfer=1000, sizes=(64,)):
    return Snapshot(transfer, version, sizes, landed)


def publish(sequence):
    return Publish(100 + sequence, sequence, 0, 0, "ternary:block=128", (64,), 8, 8, nan)


def welcomed():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(), 0.0)
    return peer


def syncing():
    peer = welcomed()
    assert peer.join(MODEL, 0.0) == [Send(Fetch(-1, WIRE))]
    return peer


def live(version=0, in_flight=()):
    """A node that holds a version whole and has publishes on their way."""
    peer = syncing()
    peer.receive(snapshot(version), 0.0)
    assert [type(e) for e in peer.received(1000)] == [Deliver] and peer.version == version
    for sequence in in_flight:
        peer.publish(publish(sequence))
    return peer


def founding():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(-1, model=()), 0.0)
    peer.join(MODEL, 0.0)
    assert peer.receive(Fetch(), 0.0) == [Serve(HUB, -1)]
    return peer


def apart(score=0.5):
    """One of a population whose run is not founded."""
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(-1, model=(), settings=POPULATION), 0.0)
    assert peer.join(MODEL, 0.0, score) == [Send(Fetch(-1, WIRE, score))]
    return peer


def closed():
    peer = live()
    peer.leave("")
    return peer


IN_STATE = {
    PeerState.CONNECTING: lambda: Peer("a#1", "a"),
    PeerState.WELCOMED: welcomed,
    PeerState.SYNCING: syncing,
    PeerState.FOUNDING: founding,
    PeerState.APART: apart,
    PeerState.LIVE: live,
    PeerState.CLOSED: closed,
}
SAMPLES = ONE_EACH | {
    Welcome: welcome(),
    Refused: Refused("no", "go away"),
    Roster: ROSTER,
    Schedule: Schedule(8, 4, 1),
    Fetch: Fetch(),
    Snapshot: snapshot(0),
    Aggregate: aggregate(1),
}


# ---------------------------------------------------------------------- the table


@pytest.mark.parametrize("state", PeerState)
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_moves_the_state_as_the_table_says_and_else_it_is_ignored(state, kind):
    peer = IN_STATE[state]()
    assert peer.state is state
    effects = peer.receive(SAMPLES[kind], 1.0)
    expected = PEER_TRANSITIONS.get((state, kind), state)
    if state is not PeerState.CLOSED:
        if kind is Refused:
            expected = PeerState.CLOSED
        elif kind is Goodbye:
            expected = PeerState.CONNECTING
    assert peer.state is expected
    if (state, kind) not in PEER_TRANSITIONS and kind not in (Refused, Goodbye):
        assert effects == []


# ---------------------------------------------------------------------- joining


def test_a_node_says_hello_until_it_is_heard():
    peer = Peer("a#1", "a")
    assert peer.start(0.0) == [Send(Hello("a"))]
    assert peer.tick(0.49) == []
    assert peer.tick(0.75) == [Connect(), Send(Hello("a"))] and peer.tick(1.24) == [] and peer.tick(1.75) != []


def test_the_attempts_of_a_node_are_spread_and_become_rarer_and_are_never_further_apart_than_two_seconds():
    waits = {name: [Backoff(zlib.crc32(name.encode())).next() for _ in range(1)] for name in "abcdefgh"}
    assert len({wait for (wait,) in waits.values()}) == len(waits)
    backoff = Backoff(1)
    first = [backoff.next() for _ in range(8)]
    assert all(ANSWER_SECONDS <= wait <= ANSWER_SECONDS + MOST_SECONDS for wait in first)
    assert first[0] <= ANSWER_SECONDS + FIRST_SECONDS < max(first)
    backoff.reset()
    assert backoff.next() <= ANSWER_SECONDS + FIRST_SECONDS


def test_who_loses_its_connection_says_hello_at_once_over_a_new_one():
    peer = live(5, in_flight=(0,))
    (disconnect,) = peer.gone(2.0)
    assert (disconnect.reason, peer.state) == ("gone", PeerState.CONNECTING) and peer.gone(2.0) == []
    assert peer.tick(2.0) == [Send(Hello("a", "node", "run-1", 5))]
    assert peer.tick(2.75) == [Connect(), Send(Hello("a", "node", "run-1", 5))]


def test_an_observer_says_so():
    assert Peer("a#1", "a", observer=True).start(0.0) == [Send(Hello("a", "observer"))]


def test_the_runs_settings_are_adopted():
    peer = welcomed()
    assert (peer.settings, peer.run, peer.run_model) == (SETTINGS, "run-1", MODEL)
    peer.receive(Goodbye(), 1.0)
    peer.receive(welcome(settings=RunSettings(every=3, delay=2, units=50)), 2.0)
    assert peer.settings.units == 50


def test_settings_of_another_version_of_the_program_are_refused():
    peer = Peer("a#1", "a")
    with pytest.raises(ConfigError, match="another version"):
        peer.receive(Welcome("run-1", 0, {"colour": "blue"}), 0.0)


def test_a_node_may_describe_its_model_before_or_after_it_is_welcome():
    before = Peer("a#1", "a")
    assert before.join(MODEL, 0.0) == []
    assert before.receive(welcome(), 0.0) == [Send(Fetch(-1, WIRE))]
    assert welcomed().join(MODEL, 0.0) == [Send(Fetch(-1, WIRE))]


def test_a_newcomer_waits_for_the_whole_snapshot():
    peer = syncing()
    message = snapshot(7)
    assert peer.receive(message, 0.0) == [Expect(HUB, message)]
    assert (peer.state, peer.version) == (PeerState.LIVE, -1)
    assert peer.received(1000) == [Deliver(message, (), False)]
    assert peer.version == 7 and peer.received(1000) == []


def test_aggregates_that_follow_the_snapshot_fit_to_it():
    peer = syncing()
    assert peer.receive(aggregate(7), 0.0) == []  # on its way before the hub knew this node: it is in the snapshot
    peer.receive(snapshot(7), 0.0)
    assert peer.receive(aggregate(8), 0.0) == [Expect(HUB, aggregate(8))]
    peer.received(1000)
    assert peer.received(8) == [Deliver(aggregate(8), (), False)] and peer.version == 8


def test_the_founder_sends_its_parameters_and_is_confirmed():
    peer = founding()
    assert not peer.confirmed
    assert peer.receive(snapshot(0, sizes=()), 0.0) == []
    assert (peer.state, peer.version, peer.confirmed) == (PeerState.LIVE, 0, True)


def test_a_node_with_another_model_leaves_and_names_the_leaf():
    peer = welcomed()
    goodbye, disconnect = peer.join(OTHER, 0.0)
    assert goodbye == Send(Goodbye("another model"))
    assert (disconnect.reason, peer.state) == ("model", PeerState.CLOSED)
    assert disconnect.text == (
        "the leaf b is b float32[4] in the run and b bfloat16[4] on this node. "
        "Start this node with the run's model, or another broker for this one."
    )


def test_who_is_refused_is_told_why_and_tries_no_more():
    peer = syncing()
    assert peer.receive(Refused("model", "the leaf b differs"), 0.0) == [Disconnect(HUB, "model", "the leaf b differs")]
    assert peer.state is PeerState.CLOSED
    assert peer.tick(100.0) == [] and peer.receive(welcome(), 100.0) == []


# ---------------------------------------------------------------------- signs of life


def test_heartbeats_go_out_and_give_the_round_trip():
    peer = live()
    assert peer.tick(0.1) == [Send(Heartbeat(0.1))] and peer.tick(0.5) == []
    assert peer.tick(0.6) == [Send(Heartbeat(0.6))]
    peer.receive(Heartbeat(0.6), 0.75)
    assert peer.round_trip_seconds == pytest.approx(0.15)


def attend(peer, until, since=0.0):
    """Let time pass at a peer that attends to it."""
    for tick in range(1, round((until - since) / LATE_SECONDS) + 1):
        peer.tick(since + tick * LATE_SECONDS)


def test_a_node_that_was_held_up_takes_its_hub_for_lost_only_when_it_could_have_been_heard():
    peer = live(5)
    attend(peer, 2.0)
    peer.tick(60.0)
    peer.saw(60.1)
    attend(peer, 62.5, 60.0)
    assert peer.state is PeerState.LIVE
    peer.tick(62.7)
    assert peer.state is PeerState.CONNECTING


def test_a_silent_hub_is_taken_for_lost_and_hello_is_said_again_at_once():
    peer = live(5, in_flight=(0,))
    peer.saw(2.0)
    attend(peer, 4.5)
    assert peer.state is PeerState.LIVE
    (disconnect,) = peer.tick(4.6)
    assert (disconnect.reason, disconnect.text) == ("lost", "the broker has been silent for 2.6 s")
    assert peer.state is PeerState.CONNECTING and peer.in_flight == {0}
    assert peer.tick(4.6) == [Send(Hello("a", "node", "run-1", 5))]


def test_when_the_hub_says_goodbye_the_node_comes_back_by_itself():
    peer = live(5)
    (disconnect,) = peer.receive(Goodbye("the broker was stopped"), 1.0)
    assert disconnect.text == "the broker said goodbye: the broker was stopped"
    assert peer.tick(1.5) == [] and peer.tick(2.0) == [Send(Hello("a", "node", "run-1", 5))]
    (disconnect,) = live().receive(Goodbye(), 1.0)
    assert disconnect.text == "the broker said goodbye"


def test_what_cannot_be_read_costs_the_connection():
    peer = live(5)
    (disconnect,) = peer.distrust("no msgpack", 1.0)
    assert disconnect.reason == "garbage" and "no msgpack" in disconnect.text
    assert peer.state is PeerState.CONNECTING


def test_leaving_says_goodbye_only_where_somebody_listens():
    assert live().leave("done") == [Send(Goodbye("done"))]
    assert Peer("a#1", "a").leave("done") == [] and closed().leave("done") == []


def test_the_roster_is_kept():
    peer = live()
    peer.receive(ROSTER, 0.0)
    assert peer.roster is ROSTER


# ---------------------------------------------------------------------- publishes and aggregates


@pytest.mark.parametrize("state", [state for state in PeerState if state is not PeerState.LIVE])
def test_only_a_live_node_publishes(state):
    with pytest.raises(LocalProtocolError, match=f"a cannot publish while it is {state.value}"):
        IN_STATE[state]().publish(publish(0))


def test_an_aggregate_says_which_of_this_nodes_publishes_are_in_it():
    peer = live(0, in_flight=(0, 1))
    message = aggregate(1, (("b#1", 1), ("a#1", 0), ("a#1", 77)))
    peer.receive(message, 0.0)
    assert peer.received(1) == [Deliver(message, (0,), False)]
    assert peer.in_flight == {1}


def test_a_refused_publish_is_withdrawn_once():
    peer = live(0, in_flight=(0, 1))
    assert peer.receive(Refused("corrupt", "bytes were changed", 0), 0.0) == [
        Withdraw(0, "corrupt", "bytes were changed")
    ]
    assert peer.receive(Refused("corrupt", "bytes were changed", 0), 0.0) == []
    assert peer.in_flight == {1} and peer.state is PeerState.LIVE


def test_a_probe_that_is_refused_is_no_reason_to_leave():
    peer = live()
    assert peer.receive(Refused("probe", "too many"), 0.0) == [] and peer.state is PeerState.LIVE


def test_a_gap_is_filled_by_a_snapshot():
    peer = live(5, in_flight=(0, 1))
    peer.receive(aggregate(6, (("a#1", 0),)), 0.0)
    assert peer.receive(aggregate(8), 0.0) == [Send(Fetch(5, WIRE))]  # 6 has not come whole
    assert peer.state is PeerState.SYNCING
    assert peer.received(6) == [] and peer.receive(aggregate(9), 0.0) == []
    peer.receive(snapshot(9, ((0, 6), (1, 8))), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(9, ((0, 6), (1, 8))), (0, 1), False)]
    assert (peer.version, peer.in_flight) == (9, set())


def test_an_aggregate_that_is_here_already_is_ignored():
    peer = live(5)
    assert peer.receive(aggregate(5), 0.0) == [] and peer.receive(aggregate(4), 0.0) == []
    assert peer.state is PeerState.LIVE


def test_who_dropped_an_aggregate_asks_for_a_whole_snapshot_of_that_very_version():
    peer = live(5)
    peer.receive(aggregate(6), 0.0)
    peer.received(6)
    assert peer.resync() == [Send(Fetch(-1, WIRE))]
    assert peer.resync() == []
    peer.receive(Goodbye(), 0.0)  # and also when the connection is lost before it has come
    assert peer.receive(welcome(6), 1.0) == [Send(Fetch(-1, WIRE))]
    peer.receive(snapshot(6), 1.0)
    assert peer.received(1000) == [Deliver(snapshot(6), (), False)]
    peer.receive(Goodbye(), 2.0)
    assert peer.receive(welcome(6), 3.0) == [Send(Fetch(6, WIRE))]


def test_what_the_hub_dropped_is_fetched_where_no_later_aggregate_shows_the_gap():
    peer = live(5)
    peer.receive(replace(ROSTER, version=6), 0.0)
    fetches = []
    for tenth in range(1, 80):
        peer.saw(tenth / 10)
        fetches += [(tenth, e.message) for e in peer.tick(tenth / 10) if e.message == Fetch(5, WIRE)]
    ((tenth, _),) = fetches
    assert 30 < tenth < 45 and peer.state is PeerState.SYNCING


def test_an_aggregate_that_is_still_on_its_way_is_no_gap():
    peer = live(5)
    for tenth in range(1, 80):
        peer.receive(replace(ROSTER, version=5 + (tenth + 9) // 10), tenth / 10)
        assert [e for e in peer.tick(tenth / 10) if isinstance(e.message, Fetch)] == []
        if tenth % 10 == 0:
            peer.receive(aggregate(5 + tenth // 10), tenth / 10)
            peer.received(5 + tenth // 10)
    assert peer.version == 12


def test_a_preempted_node_takes_the_anchor_and_drops_what_is_pending():
    peer = live(5)
    assert peer.receive(Preempt("a better one was found"), 0.0) == [Send(Fetch(-1, WIRE))]
    peer.receive(snapshot(5), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(5), (), True)]
    peer.receive(aggregate(7), 0.0)
    peer.receive(snapshot(7), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(7), (), False)]


# ---------------------------------------------------------------------- coming back


def test_a_hub_that_does_not_know_this_node_is_told_hello_again():
    peer = live(5, in_flight=(0,))
    (disconnect,) = peer.receive(Refused("unknown", "say Hello first"), 2.0)
    assert (disconnect.reason, peer.state) == ("unknown", PeerState.CONNECTING)
    assert peer.receive(Refused("unknown", "say Hello first"), 2.0) == []
    assert peer.tick(2.0) == [Send(Hello("a", "node", "run-1", 5))]


def test_on_its_return_a_node_withdraws_what_the_hub_does_not_have():
    peer = live(5, in_flight=(0, 1, 2, 3))
    peer.receive(Goodbye(), 0.0)
    effects = peer.receive(welcome(6, landed=((0, 6),), accepted=(2,)), 1.0)
    lost = [Withdraw(s, "lost", "the connection was lost on its way") for s in (1, 3)]
    assert effects == [*lost, Send(Fetch(5, WIRE))]
    assert peer.in_flight == {0, 2}
    message = snapshot(6, ((0, 6),))
    peer.receive(message, 1.0)
    assert peer.received(1000) == [Deliver(message, (0,), False)]
    landing = aggregate(7, (("a#1", 2),))
    peer.receive(landing, 1.0)
    assert peer.received(7) == [Deliver(landing, (2,), False)] and peer.in_flight == set()


def test_a_node_that_missed_nothing_goes_on_from_what_it_holds():
    peer = live(5)
    peer.receive(Goodbye(), 0.0)
    peer.receive(welcome(5), 1.0)
    assert peer.receive(snapshot(5, sizes=()), 1.0) == []
    assert (peer.state, peer.version) == (PeerState.LIVE, 5)
    assert peer.receive(aggregate(6), 1.0) == [Expect(HUB, aggregate(6))]


def test_a_transfer_of_the_old_connection_does_not_count():
    peer = live(5)
    peer.receive(aggregate(6), 0.0)
    peer.receive(Goodbye(), 0.0)
    assert peer.received(6) == [] and peer.version == 5


@pytest.mark.parametrize("state", [PeerState.WELCOMED, PeerState.SYNCING, PeerState.FOUNDING, PeerState.APART])
def test_who_has_nothing_of_its_run_yet_follows_its_hub_into_a_new_one_of_the_same_settings(state):
    peer = IN_STATE[state]()
    settings = POPULATION if state is PeerState.APART else SETTINGS
    attend(peer, 99.0)
    assert peer.state is PeerState.CONNECTING
    peer.receive(welcome(-1, run="run-2", model=(), settings=settings), 99.0)
    assert peer.run == "run-2" and peer.state is not PeerState.CONNECTING
    attend(peer, 199.0, 99.0)
    other = replace(settings, every=5)
    (disconnect,) = peer.receive(welcome(-1, run="run-3", model=(), settings=other), 199.0)
    assert disconnect.reason == "run" and peer.run == "run-2"


def test_a_hub_of_another_run_is_not_believed():
    peer = live(5, in_flight=(0,))
    peer.receive(Goodbye(), 0.0)
    (disconnect,) = peer.receive(welcome(9, run="run-2"), 10.0)
    assert disconnect == Disconnect(
        HUB,
        "run",
        "the broker now runs run-2, this node belongs to run-1. Restart the broker with the checkpoint of the old run, "
        "or stop this node and start it again to join the new run (with --new-run where it has a checkpoint).",
    )
    assert (peer.state, peer.run, peer.version, peer.in_flight) == (PeerState.CONNECTING, "run-1", 5, {0})
    assert peer.tick(14.9) == [] and peer.tick(15.0) == [Send(Hello("a", "node", "run-1", 5))]
    assert peer.receive(welcome(5), 15.1)[-1] == Send(Fetch(5, WIRE))


def test_a_hub_that_knows_less_than_this_node_has_seen_is_not_believed():
    peer = live(5)
    peer.receive(Goodbye(), 0.0)
    (disconnect,) = peer.receive(welcome(4), 10.0)
    assert disconnect == Disconnect(
        HUB,
        "version",
        "the broker is at version 4 of run-1, this node has seen 5: it was restarted from an older state. Restart it "
        "with the newest checkpoint folder, or stop this node and start it again.",
    )
    assert peer.state is PeerState.CONNECTING and peer.tick(14.9) == []


def test_a_founder_that_was_cut_off_joins_what_it_may_have_founded():
    peer = founding()
    peer.receive(Goodbye(), 0.0)
    assert peer.receive(welcome(0), 1.0) == [Send(Fetch(-1, WIRE))]
    assert peer.receive(snapshot(0), 1.0) == [Expect(HUB, snapshot(0))]


def test_a_publish_that_went_before_a_heartbeat_and_was_not_heard_is_withdrawn():
    peer = live()
    peer.publish(publish(3))
    (beat,) = [effect.message for effect in peer.tick(0.2) if isinstance(effect, Send)]
    peer.publish(publish(4))
    assert peer.receive(Heartbeat(beat.sent, 2), 0.3) == [Withdraw(3, "lost", "it never reached the broker")]
    assert peer.in_flight == {4}
    assert peer.receive(Heartbeat(beat.sent, 2), 0.4) == []


# ---------------------------------------------------------------------- apart, in a population


def test_a_node_says_how_it_scores_when_it_joins():
    assert welcomed().join(MODEL, 0.0, 0.25) == [Send(Fetch(-1, WIRE, 0.25))]


def test_one_of_a_population_trains_apart_and_says_its_score_without_its_model():
    peer = apart()
    assert peer.state is PeerState.APART and not peer.founded
    assert peer.compare(0.25) == [Send(Fetch(-1, (), 0.25))]
    assert live().compare(0.25) == [] and syncing().compare(0.25) == []


def test_who_trains_apart_gives_its_parameters_when_asked_and_stays_apart():
    peer = apart()
    assert peer.receive(Fetch(), 0.0) == [Serve(HUB, -1)]
    assert peer.state is PeerState.APART


def test_what_is_lent_by_another_takes_the_place_of_the_own_parameters():
    peer = apart()
    lent = Snapshot(1000, -1, (64, 32), (), 1, True)
    assert peer.receive(lent, 0.0) == [Expect(HUB, lent)]
    assert peer.received(1000) == [Deliver(lent, (), reset=True)]
    assert peer.state is PeerState.APART and peer.version == -1


def test_a_population_that_agrees_keeps_its_own_parameters_and_takes_the_anchor():
    peer = apart()
    peer.receive(snapshot(0), 0.0)
    assert peer.state is PeerState.LIVE and peer.founded
    assert peer.received(1000) == [Deliver(snapshot(0), (), reset=False, keep=True)]


def test_who_comes_to_a_population_that_is_founded_begins_with_the_shared_parameters():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(5, settings=POPULATION), 0.0)
    peer.join(MODEL, 0.0)
    assert peer.state is PeerState.SYNCING and peer.founded
    shared = Snapshot(1000, 5, (64,), (), 0, True)
    peer.receive(shared, 0.0)
    assert peer.received(1000) == [Deliver(shared, (), reset=True)]


def test_what_is_lent_is_for_those_who_train_apart_alone():
    peer = live(3)
    assert peer.receive(Snapshot(7, -1, (64,), (), 0, True), 0.0) == []
    assert peer.state is PeerState.LIVE and peer.version == 3


def test_who_finds_while_it_waits_for_a_snapshot_that_an_aggregate_was_lost_asks_again_if_that_brings_nothing():
    peer = live(5)
    peer.receive(aggregate(6), 0.0)
    peer.received(6)
    assert peer.receive(aggregate(8), 0.0) == [Send(Fetch(6, WIRE))]
    assert peer.resync() == []  # 6 was spoiled, which was seen late
    assert peer.receive(replace(snapshot(6), sizes=()), 0.0) == [Send(Fetch(-1, WIRE))]
    peer.receive(snapshot(8), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(8), (), False)]


def test_elastic_nodes_keep_their_own_parameters_when_they_join_but_not_what_they_fetch_later():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(5, settings=replace(POPULATION, elastic=0.5)), 0.0)
    peer.join(MODEL, 0.0)
    peer.receive(snapshot(5), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(5), (), reset=False, keep=True)]
    peer.resync()
    peer.receive(snapshot(7), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(7), (), reset=False, keep=False)]


def test_the_roster_tells_who_trains_apart_that_the_run_is_founded():
    peer = apart()
    peer.receive(replace(ROSTER, version=2), 0.0)
    assert peer.founded


def test_a_gap_before_the_shared_parameters_are_whole_does_not_make_a_node_keep_its_own():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(-1, model=(), settings=POPULATION), 0.0)
    peer.join(MODEL, 0.0)
    peer.receive(Snapshot(1000, 0, (64,), (), 0, True), 0.0)
    assert peer.receive(aggregate(4), 0.0) == [Send(Fetch(-1, WIRE))] and peer.state is PeerState.SYNCING
    peer.receive(snapshot(4), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(4), (), reset=True)]


# ---------------------------------------------------------------------- quarantine


def test_who_is_quarantined_drops_what_is_its_own_and_takes_the_shared_parameters():
    peer = live(version=3)
    assert peer.receive(Quarantine("norm", "too large", 10.0), 5.0) == [Send(Fetch(-1, WIRE))]
    assert peer.quarantined_until == 15.0
    peer.receive(snapshot(4, transfer=7), 5.5)
    assert peer.received(7) == [Deliver(snapshot(4, transfer=7), (), reset=True, warm=True)]


@pytest.mark.parametrize("reason", ["enormous", "non-finite", "corrupt"])
def test_whose_deltas_are_a_faults_begins_its_optimizer_anew(reason):
    peer = live(version=3)
    peer.receive(Quarantine(reason, "too large", 10.0), 5.0)
    peer.receive(Quarantine("norm", "too large", 10.0), 5.0)
    peer.receive(snapshot(4, transfer=7), 5.5)
    assert peer.received(7) == [Deliver(snapshot(4, transfer=7), (), reset=True)]


def test_who_is_let_out_goes_on_as_it_is():
    peer = live(version=3)
    assert peer.receive(Quarantine("over", "the gate was wrong", 0.0), 5.0) == []
    assert peer.state is PeerState.LIVE and peer.quarantined_until == 5.0


def test_a_quarantine_that_meets_a_node_on_its_way_to_a_snapshot_resets_it_all_the_same():
    peer = live(version=3)
    peer.resync()
    peer.receive(Quarantine("norm", "too large", 10.0), 5.0)
    peer.receive(snapshot(4, transfer=7), 5.5)
    assert peer.received(7) == [Deliver(snapshot(4, transfer=7), (), reset=True, warm=True)]


def test_a_node_of_several_masters_drops_nothing_for_one_of_them():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(settings=RunSettings(masters=2, initial="founder", every=3, delay=2)), 0.0)
    peer.join(MODEL, 0.0)
    peer.receive(snapshot(3), 0.0)
    peer.received(1000)
    assert peer.receive(Quarantine("norm", "too large", 10.0), 5.0) == []
    assert peer.state is PeerState.LIVE and peer.quarantined_until == 15.0


# ---------------------------------------------------------------------- a life that goes on from a checkpoint


STRICT = replace(SETTINGS, mode="strict", release="all")


def resumed(settings=SETTINGS):
    """A node whose checkpoint had offer 4 on its way, and 5 as the number of the next."""
    peer = Peer("a#1", "a", incarnation=7)
    peer.resume("run-1", 3, settings, MODEL, (4,), next_sequence=5)
    peer.start(0.0)
    peer.join(MODEL, 0.0)
    return peer


@pytest.mark.parametrize("since", [{"landed": ((4, 4), (5, 6))}, {"landed": ((4, 4),), "accepted": (6,)}])
def test_who_has_offered_since_its_checkpoint_drops_what_was_pending_there(since):
    peer = resumed()
    assert Send(Fetch(-1, WIRE)) in peer.receive(welcome(6, **since), 1.0)
    assert peer.overtaken
    peer.receive(snapshot(6, ((4, 4),)), 1.0)
    (deliver,) = peer.received(1000)
    assert deliver.reset and deliver.warm


@pytest.mark.parametrize(
    ("known", "settings"),
    [
        ({"landed": ((3, 3), (4, 4))}, SETTINGS),
        ({"landed": ((4, 4), (5, 6))}, STRICT),
        ({"landed": ((4, 4), (5, 6))}, POPULATION),
    ],
)
def test_who_has_offered_nothing_since_keeps_what_was_pending(known, settings):
    peer = resumed(settings)
    peer.receive(welcome(6, settings=settings, **known), 1.0)
    assert not peer.overtaken


def test_what_this_life_has_offered_itself_drops_nothing_when_it_is_welcomed_again():
    peer = resumed()
    peer.receive(welcome(6, landed=((4, 4),)), 1.0)
    peer.distrust("noise", 2.0)
    peer.receive(welcome(7, landed=((4, 4), (5, 7))), 3.0)
    assert not peer.overtaken
