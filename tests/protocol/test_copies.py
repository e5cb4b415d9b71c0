"""Who looks on takes a copy of a run's parameters: it is sent them as a node is, and nobody waits for it."""

from __future__ import annotations

from tests.protocol.hubs import WIRE, contribute, hub_of, live_hub, of, sent
from zmqtrain.protocol.effects import Reduce, Serve
from zmqtrain.protocol.messages import Fetch, Hello, Refused


def test_who_looks_on_is_served_and_is_awaited_in_no_round():
    hub = live_hub("a", release="all")
    hub.receive("eye", Hello("eye", "observer"), 0.0)
    (serve,) = hub.receive("eye", Fetch(-1, WIRE, digest="d", held=3), 0.0)
    assert serve == Serve("eye", -1, (), digest="d", held=3)
    assert hub.live == {"a"} and hub.nodes == 1
    assert of(Reduce, contribute(hub, "a", 0))[0].live == 1


def test_a_run_without_parameters_has_none_to_copy():
    hub = hub_of()
    hub.receive("eye", Hello("eye", "observer"), 0.0)
    ((_, refused),) = sent(hub.receive("eye", Fetch(-1, WIRE), 0.0), Refused)
    assert refused.reason == "unfounded" and "eye" in hub.members
