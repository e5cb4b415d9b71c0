"""Nodes that exchange gradients past the hub: all in the same way, and what they publish lands once."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import FOUNDING, WIRE, contribute, hub_of, of, publish, sent
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.protocol.effects import Accumulate, Reduce
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Refused, Welcome, WorkRequest

RING, TREE = "allreduce:algorithm=ring", "allreduce:algorithm=tree"


def join(hub, peer, exchange):
    effects = hub.receive(peer, Hello(peer, exchange=exchange), 0.0)
    hub.receive(peer, Fetch(-1, WIRE), 0.0)
    return effects


def in_lockstep(*peers, **settings):
    hub = hub_of(**settings)
    for peer in peers:
        join(hub, peer, RING)
        if peer == peers[0]:
            hub.receive(peer, FOUNDING, 0.0)
            hub.received(peer, FOUNDING.transfer, 0.0)
    assert hub.live == {*peers}
    return hub


@pytest.mark.parametrize("exchange", ["", TREE])
def test_another_exchange_than_the_first_nodes_is_refused_with_both_named(exchange):
    hub = in_lockstep("a", "b")
    ((_, refused),) = sent(hub.receive("c", Hello("c", exchange=exchange), 0.0), Refused)
    assert refused.reason == "exchange" and refused.sequence == -1
    named = f"--exchange {exchange}" if exchange else "no --exchange"
    assert f"c would train with {named}, and a," in refused.text and f"--exchange {RING}" in refused.text
    assert "c" not in hub.members and hub.exchange == RING
    assert sent(hub.receive("d", Hello("d", exchange=RING), 0.0), Welcome)


def test_who_only_watches_has_no_exchange():
    hub = in_lockstep("a")
    assert sent(hub.receive("w", Hello("w", "observer"), 0.0), Welcome)


def test_once_all_have_left_others_may_exchange_in_another_way():
    hub = in_lockstep("a")
    hub.receive("a", Goodbye(), 0.0)
    assert sent(join(hub, "b", ""), Welcome) and hub.exchange == ""
    contribute(hub, "b", 0)
    assert hub.version == 1  # by the settings' own rule: immediately


def test_who_says_hello_again_may_change_how_it_exchanges_if_it_is_alone():
    hub = in_lockstep("a")
    assert sent(hub.receive("a", Hello("a", exchange=TREE), 1.0), Welcome) and hub.exchange == TREE


def test_what_has_not_landed_of_the_other_kind_is_waited_for():
    hub = hub_of("all")
    join(hub, "a", "")
    hub.receive("a", FOUNDING, 0.0)
    hub.received("a", FOUNDING.transfer, 0.0)
    join(hub, "b", "")
    contribute(hub, "a", 0)
    del hub.members["a"], hub.members["b"]  # both are gone, and no tick has come yet
    ((_, refused),) = sent(hub.receive("c", Hello("c", exchange=RING), 0.0), Refused)
    assert "have not landed yet" in refused.text
    hub.tick(0.0)
    assert sent(hub.receive("c", Hello("c", exchange=RING), 0.0), Welcome)


def test_what_all_publish_at_the_end_lands_in_one_round_as_its_mean():
    hub = in_lockstep("a", "b", "c")
    assert not of(Reduce, contribute(hub, "b", 0, dense=True, codec="float32"))
    assert not of(Reduce, contribute(hub, "a", 0, dense=True, codec="float32"))
    effects = contribute(hub, "c", 0, dense=True, codec="float32")
    (reduce,) = of(Reduce, effects)
    assert [one.peer for one in of(Accumulate, effects)] == ["a", "b", "c"]
    assert (reduce.live, reduce.plain, reduce.dense) == (3, True, True)


def test_who_was_lost_before_the_end_neither_holds_the_round_up_nor_weighs_in_it():
    hub = in_lockstep("a", "b", "c")
    contribute(hub, "a", 0, dense=True, codec="float32")
    contribute(hub, "b", 0, dense=True, codec="float32")
    (reduce,) = of(Reduce, hub.gone("c", "killed", 1.0))
    assert (reduce.live, reduce.plain) == (2, True)


def test_who_waits_for_data_is_awaited_at_the_end_as_well():
    hub = in_lockstep("a", "b", units=1)
    hub.receive("a", WorkRequest((), 1, True), 0.0)
    hub.receive("b", WorkRequest((), 1, True), 0.0)
    assert hub.members["b"].idle  # a has the one unit that there is
    assert not of(Reduce, contribute(hub, "a", 0, dense=True, codec="float32"))
    (reduce,) = of(Reduce, contribute(hub, "b", 0, dense=True, codec="float32"))
    assert reduce.live == 2


def test_what_a_node_published_that_left_before_the_others_ended_does_not_land():
    hub = in_lockstep("a", "b", "c")
    contribute(hub, "c", 0, dense=True, codec="float32")
    hub.receive("c", Goodbye(), 0.0)
    contribute(hub, "a", 0, dense=True, codec="float32")
    (reduce,) = of(Reduce, contribute(hub, "b", 0, dense=True, codec="float32"))
    assert [one.peer for one in reduce.contributions] == ["a", "b"] and reduce.live == 2


def test_an_exchange_of_many_words_is_no_exchange():
    with pytest.raises(RemoteProtocolError, match="of that length"):
        hub_of().receive("a", Hello("a", exchange="x" * 201), 0.0)


def test_rounds_of_nodes_that_publish_to_the_hub_keep_the_outer_optimizer():
    hub = hub_of()
    join(hub, "a", "")
    hub.receive("a", FOUNDING, 0.0)
    hub.received("a", FOUNDING.transfer, 0.0)
    message = publish(0)
    hub.receive("a", message, 0.0)
    (reduce,) = of(Reduce, hub.received("a", message.transfer, 0.0))
    assert not reduce.plain
