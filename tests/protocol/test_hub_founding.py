"""Who founds a run at the hub, who waits for it, and with which model one may join."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import FOUNDING, MODEL, OTHER, WIRE, attend, found, hub_of, join, of, sent
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol.effects import Disconnect, Expect, Found, SendTo, Serve
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Refused, Snapshot, Welcome


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
    assert "the leaf b is float32[4] in the run and float32[5] on this node" in refused.text
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
