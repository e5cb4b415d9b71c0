"""Coming and going at the hub: what a sign of life is, who is lost, and what is kept of who comes back."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import SAMPLES, WIRE, attend, contribute, live_hub, of, publish, sent
from zmqtrain.protocol.effects import Disconnect, Reduce, SendTo, Serve
from zmqtrain.protocol.messages import Fetch, Goodbye, Heartbeat, Hello, Report, Welcome


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
