"""One of a population: it trains apart, lends and is lent parameters, and keeps its own where it should."""

from __future__ import annotations

from dataclasses import replace

from tests.protocol.peers import (
    MODEL,
    POPULATION,
    ROSTER,
    WIRE,
    aggregate,
    apart,
    live,
    snapshot,
    syncing,
    welcome,
    welcomed,
)
from zmqtrain.protocol.effects import Deliver, Expect, Send, Serve
from zmqtrain.protocol.messages import Fetch, Snapshot, replace_fields
from zmqtrain.protocol.peer import HUB, Peer, PeerState


def test_a_node_says_how_it_scores_when_it_joins():
    assert welcomed().join(MODEL, 0.0, 0.25) == [Send(Fetch(-1, WIRE, 0.25))]


def test_one_of_a_population_trains_apart_and_says_its_score_without_its_model():
    peer = apart()
    assert peer.state is PeerState.APART and not peer.founded
    assert peer.compare(0.25) == [Send(Fetch(-1, (), 0.25))]
    assert live().compare(0.25) == [] and syncing().compare(0.25) == []
    assert peer.compare(0.25, declined=True) == [Send(Fetch(-1, WIRE, 0.25))]


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
    peer.receive(replace_fields(ROSTER, version=2), 0.0)
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


# ---------------------------------------------------------------------- the mean of all

MEAN = Snapshot(1000, -1, (64,), (), 0, True)


def gave(score=0.5):
    """A node that was asked for its parameters in a run that may begin with the mean of all."""
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(-1, model=(), settings=replace(POPULATION, initial="mean")), 0.0)
    peer.join(MODEL, 0.0, score)
    peer.receive(Fetch(), 0.0)
    return peer


def lent_the_mean():
    peer = gave()
    assert peer.receive(MEAN, 0.0) == [Expect(HUB, MEAN)]
    assert peer.received(1000) == [Deliver(MEAN, (), reset=True)]
    return peer


def test_a_node_says_once_how_the_mean_scores_that_it_was_lent_and_is_no_further_yet():
    peer = lent_the_mean()
    assert peer.state is PeerState.FOUNDING and not peer.founded and peer.version == -1
    assert peer.vote(0.75) == [Send(Fetch(-1, (), 0.75))] and peer.vote(0.75) == []
    peer.receive(snapshot(0), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(0), (), reset=False)]
    assert peer.state is PeerState.LIVE and peer.version == 0


def test_nothing_is_said_of_a_mean_that_is_not_here_or_is_not_the_question_any_more():
    assert gave().vote(0.75) == []
    peer = lent_the_mean()
    peer.receive(snapshot(0), 0.0)
    assert peer.vote(0.75) == []
    peer = lent_the_mean()
    peer.gone(0.0)
    assert peer.vote(0.75) == []


def test_who_is_asked_anew_by_another_hub_says_its_own_score_and_has_not_seen_that_mean():
    peer = lent_the_mean()
    peer.gone(0.0)
    peer.tick(60.0)
    effects = peer.receive(welcome(-1, model=(), settings=replace(POPULATION, initial="mean")), 60.0)
    assert effects == [Send(Fetch(-1, WIRE, 0.5))]
    peer.receive(Fetch(), 60.0)
    assert peer.state is PeerState.FOUNDING and peer.vote(0.75) == []
