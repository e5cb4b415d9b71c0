"""What the hub tells of those who are there: the roster, what they report, the scores and who evaluates."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import MODEL, SAMPLES, WIRE, contribute, hub_of, live_hub, of, sent
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.protocol.effects import Broadcast, Reduce
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Fetch, Hello, Report, Roster, Snapshot, Welcome, model_to_wire, replace_fields
from zmqtrain.protocol.peer import Peer


def test_the_roster_goes_out_once_a_second():
    hub = live_hub("a")
    hub.receive("w", Hello("w", "observer"), 0.0)
    assert of(Broadcast, hub.tick(0.9)) == []
    ((roster,),) = [[e.message for e in of(Broadcast, hub.tick(now))] for now in [1.0]]
    assert of(Broadcast, hub.tick(1.9)) == [] and of(Broadcast, hub.tick(2.0)) != []
    assert isinstance(roster, Roster) and [m["peer"] for m in roster.members] == ["a#1"] and roster.evaluator == "a#1"


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
        live_hub("a").receive("a", replace_fields(SAMPLES[Report], **told), 0.0)


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
        hub.receive("b", replace_fields(Hello("b"), **told), 0.0)
    assert set(hub.members) == {"a"}


def test_the_score_of_an_older_version_does_not_replace_a_newer_one():
    hub = live_hub("a")
    hub.version = 4
    for version, loss in ((3, 0.5), (2, 0.9), (4, 0.25), (1 << 63, 0.0)):  # the last one is of no version of this run
        hub.receive("a", replace_fields(SAMPLES[Report], scores={"loss": loss}, score_version=version), 0.0)
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


def test_a_roster_calls_nodes_by_names_and_not_by_ids_and_a_node_knows_its_own():
    hub = hub_of()
    welcomes = {}
    for peer, name in (("pc#aa11", "pc"), ("pc#bb22", "pc"), ("pc#aa11", "pc")):
        welcomes[peer] = sent(hub.receive(peer, Hello(name), 0.0), Welcome)[0][1]
    hub.receive("pc#bb22", Fetch(-1, model_to_wire(MODEL)), 0.0)
    hub.receive("pc#bb22", Snapshot(1, 0, (64,)), 0.0)
    hub.received("pc#bb22", 1, 0.0)
    assert {peer: welcome.called for peer, welcome in welcomes.items()} == {"pc#aa11": "pc#1", "pc#bb22": "pc#2"}
    head = encode_message(hub.roster(0.0))
    assert b"aa11" not in head and b"bb22" not in head and hub.evaluator == "pc#bb22"
    for peer, is_evaluator in (("pc#aa11", False), ("pc#bb22", True)):
        node = Peer(peer, "pc")
        node.receive(welcomes[peer], 0.0)
        assert not node.is_evaluator
        node.receive(hub.roster(0.0), 0.0)
        assert node.is_evaluator is is_evaluator
