"""The wires: a payload arrives when it must, and a cut holds what is on its way."""

from __future__ import annotations

import pytest

from zmqtrain.sim.clock import Scheduler
from zmqtrain.sim.star import HubPorts, Wire
from zmqtrain.transport.memory import LinkModel

LINK = LinkModel(8e6, 0.25)
"""One byte takes a microsecond."""


@pytest.fixture
def star():
    scheduler, ports, arrived = Scheduler(), HubPorts(), []
    wires = [Wire(scheduler, LINK, ports) for _ in range(3)]
    return scheduler, wires, arrived, lambda name: lambda: arrived.append((round(scheduler.now, 9), name))


def test_a_payload_takes_its_bytes_over_the_rate_and_the_latency_and_a_head_the_latency(star):
    scheduler, (wire, *_), arrived, note = star
    wire.payload(True, 1_000_000, note("payload"))
    wire.head(True, 100, note("head"))
    scheduler.run()
    assert arrived == [(0.25, "head"), (1.25, "payload")]
    assert (wire.up, wire.down) == (1_000_100, 0)


def test_the_hubs_port_carries_one_payload_after_the_other_both_ways(star):
    scheduler, wires, arrived, note = star
    for number, wire in enumerate(wires):
        wire.payload(True, 1_000_000, note(f"up {number}"))
        wire.payload(False, 2_000_000, note(f"down {number}"))
    scheduler.run()
    assert arrived == [
        (1.25, "up 0"), (2.25, "down 0"), (2.25, "up 1"), (3.25, "up 2"), (4.25, "down 1"), (6.25, "down 2"),
    ]  # fmt: skip


def test_one_nodes_payloads_keep_their_order(star):
    scheduler, (wire, *_), arrived, note = star
    wire.payload(True, 1_000_000, note("large"))
    wire.payload(True, 1, note("small"))
    scheduler.run()
    assert [name for _, name in arrived] == ["large", "small"]


def test_what_is_sent_over_a_cut_wire_arrives_when_it_is_mended(star):
    scheduler, (wire, *_), arrived, note = star
    wire.head(True, 1, note("on its way"))
    scheduler.call_at(0.1, wire.cut)
    scheduler.call_at(1.0, lambda: wire.head(False, 1, note("held")))
    scheduler.call_at(5.0, wire.mend)
    scheduler.run()
    assert arrived == [(5.25, "on its way"), (5.25, "held")]


def test_what_was_sent_on_a_connection_that_was_given_up_is_lost(star):
    scheduler, (wire, *_), arrived, note = star
    wire.head(True, 1, note("lost"))
    wire.payload(False, 1000, note("lost, too"))
    scheduler.call_at(0.1, wire.reconnect)
    scheduler.call_at(0.2, lambda: wire.head(True, 1, note("new")))
    scheduler.run()
    assert arrived == [(0.45, "new")]


def test_a_hub_with_a_faster_port_is_waited_for_no_longer_than_the_nodes_own_port_takes():
    scheduler, arrived = Scheduler(), []
    ports = HubPorts(LinkModel(32e6))
    wires = [Wire(scheduler, LINK, ports) for _ in range(6)]
    for number, wire in enumerate(wires):
        wire.payload(True, 1_000_000, lambda name=f"up {number}": arrived.append((round(scheduler.now, 9), name)))
    wires[0].payload(False, 1_000_000, lambda: arrived.append((round(scheduler.now, 9), "down")))
    scheduler.run()
    assert sorted(arrived) == [
        (1.25, "down"), (1.25, "up 0"), (1.25, "up 1"), (1.25, "up 2"), (1.25, "up 3"), (1.5, "up 4"), (1.75, "up 5"),
    ]  # fmt: skip
