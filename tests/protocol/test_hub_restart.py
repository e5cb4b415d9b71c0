"""The hub after a restart: the same run, from its state and its journal."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import MODEL, SAMPLES, WIRE, contribute, live_hub, publish, sent
from zmqtrain.core.errors import CheckpointError
from zmqtrain.protocol.effects import Serve
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import Fetch, Hello, Report, Welcome, replace_fields


def restarted(hub):
    again = Hub(hub.settings, hub.rounds.rule, "run-of-another-name")
    again.restore(hub.state())
    return again


def test_a_restarted_hub_is_the_same_run():
    hub = live_hub("a", "b", units=5)
    contribute(hub, "a", 0)
    hub.receive("a", replace_fields(SAMPLES[Report], scores={"loss": 0.5}, score_version=1), 0.0)
    again = restarted(hub)
    assert again.state() == hub.state()
    assert (again.run, again.version, again.model, again.members) == ("run-1", 1, MODEL, {})
    ((_, welcome),) = sent(again.receive("a", Hello("a"), 0.0), Welcome)
    assert welcome.landed == ((0, 1),)
    assert again.receive("a", Fetch(1, WIRE), 0.0) == [Serve("a", 1, ((0, 1),))]
    assert again.receive("a", publish(0), 0.0) == [] and again.fence.dropped == {"double": 1}


def test_the_time_that_a_run_was_served_goes_on_where_it_was():
    hub = live_hub("a")
    hub.tick(100.0)
    again = Hub(hub.settings, hub.rounds.rule, "", 5000.0)
    again.restore(hub.state())
    before = hub.roster(100.0).seconds
    assert before > 0 and again.roster(5000.0).seconds == before and again.roster(5007.0).seconds == before + 7
    again.tick(5010.0)
    once_more = Hub(hub.settings, hub.rounds.rule, "", 0.0)
    once_more.restore(again.state() | {"seconds": float("nan")})
    assert again.state()["seconds"] == before + 10 and once_more.roster(1.0).seconds == 1.0


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
        {"records": {"a": [0, "-1,1", 0, []]}},
        {"scores": None},
        {"ledger": {}},
    ],
)
def test_a_state_that_cannot_be_read_is_a_checkpoint_error(damage):
    hub = live_hub("a")
    with pytest.raises(CheckpointError):
        Hub(hub.settings, hub.rounds.rule, "").restore(hub.state() | damage)
