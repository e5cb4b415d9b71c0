"""In strict mode a restarted hub waits for all nodes, and goes back with them to a version that all have kept."""

from __future__ import annotations

import pytest

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Rewind, SendTo, Serve
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import MemberState, Records
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Publish, Refused, WorkRequest, WorkUnit, model_to_wire
from zmqtrain.protocol.rounds import release_rule_from_spec

MODEL = (LeafSpec("w", (3, 4), "float32"),)
SETTINGS = RunSettings(mode="strict", release="all", start_nodes=2, units=40, codec="float32")


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def state_of(version, **more):
    """What a hub's checkpoint of a version holds: 30 publishes of each node had landed at version 30, 31 were heard."""
    hub = Hub(SETTINGS, release_rule_from_spec("all"), "run-1")
    state = hub.state() | {"version": version, "model": [["w", [3, 4], "float32"]]}
    records = Records()
    for peer in ("a#1", "b#1"):
        for sequence in range(max(0, version - 8), version):
            records.land(peer, sequence, sequence + 1)
        records.hear(peer, version)
    return state | {"records": records.state(), "samples": 8 * version, **more}


@pytest.fixture
def hub():
    made = Hub(SETTINGS, release_rule_from_spec("all"), "run-1")
    made.restore(state_of(40))
    made.await_all((20, 30, 36))
    return made


def come(hub, peer, *kept):
    hub.receive(peer, Hello(peer, run="run-1", version=max(kept, default=-1), checkpoints=kept), 0.0)
    return hub.receive(peer, Fetch(max(kept, default=-1), model_to_wire(MODEL)), 0.0)


def test_all_go_back_to_the_newest_version_that_all_have_kept(hub):
    assert not of(Serve, come(hub, "a#1", 20, 30, 36)), "it waits for all"
    effects = come(hub, "b#1", 10, 20, 30)
    assert of(Rewind, effects) == [Rewind(30)] and not of(Serve, effects)
    served = of(Serve, hub.rewound(state_of(30)))
    assert [(serve.peer, serve.known_version, serve.rewound) for serve in served] == [
        ("a#1", 30, True),
        ("b#1", 30, True),
    ]
    assert (hub.version, hub.samples, len(hub.live)) == (30, 240, 2)
    again = Publish(1, 30, 30, 0, "float32", (64,), 8, 1, 0.5)
    assert not [one for one in of(SendTo, hub.receive("a#1", again, 0.0)) if isinstance(one.message, Refused)]


def test_their_shares_of_the_data_stand_where_they_stood(hub):
    come(hub, "a#1", 30), come(hub, "b#1", 30)
    hub.rewound(state_of(30))
    (answer,) = of(SendTo, hub.receive("b#1", WorkRequest((), 1, False, (7, 9), 7), 0.0))
    assert answer.message == WorkUnit((7, 9, 11))
    (answer,) = of(SendTo, hub.receive("a#1", WorkRequest((), 1, False, (4,), 4), 0.0))
    assert answer.message == WorkUnit((4, 6))
    assert hub.units.ledger.done_count == 3 + 2


def test_who_leaves_while_the_hub_goes_back_is_waited_for(hub):
    come(hub, "a#1", 30), come(hub, "b#1", 30)
    hub.receive("b#1", Goodbye(), 0.0)
    assert not of(Serve, hub.rewound(state_of(30)))
    assert hub.members["a#1"].state is MemberState.WAITING
    effects = come(hub, "b#1", 20, 30)
    assert [serve.rewound for serve in of(Serve, effects)] == [True, True] and not of(Rewind, effects)


def test_without_a_version_that_all_have_kept_the_run_goes_on_from_where_it_is_and_that_is_said(hub):
    come(hub, "a#1", 36)
    effects = come(hub, "b#1")
    assert of(Rewind, effects) == [Rewind(-1)]
    assert [(serve.known_version, serve.rewound) for serve in of(Serve, effects)] == [(36, False), (-1, False)]
    assert hub.version == 40


def test_who_comes_later_is_served_as_ever(hub):
    come(hub, "a#1", 30), come(hub, "b#1", 30)
    hub.rewound(state_of(30))
    effects = come(hub, "c#1", 20)
    assert [(serve.known_version, serve.rewound) for serve in of(Serve, effects)] == [(20, False)]
