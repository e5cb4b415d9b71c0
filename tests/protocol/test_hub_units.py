"""Data units at the hub: who is dealt which, and what becomes of them when somebody is lost or all is done."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import WIRE, contribute, hub_of, live_hub, of, sent
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.protocol.effects import Reduce, SendTo
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Report, WorkRequest, WorkUnit, replace_fields


def test_units_are_dealt_to_who_asks():
    hub = live_hub("a", "b", units=3)
    assert hub.receive("a", WorkRequest((), 2, False), 0.0) == [SendTo("a", WorkUnit((0, 1)))]
    assert hub.receive("b", WorkRequest((), 2, True), 0.0) == [SendTo("b", WorkUnit((2,)))]


def test_a_dead_nodes_unit_is_dealt_again_to_an_idle_one_and_the_end_is_told_to_all():
    hub = live_hub("a", "b", "c", units=3)
    hub.receive("a", WorkRequest((), 1, False), 0.0)
    hub.receive("b", WorkRequest((), 2, False), 0.0)
    assert hub.receive("c", WorkRequest((), 1, True), 0.0) == []
    assert hub.live == {"a", "b"}
    assert hub.gone("a", "", 0.0)[1:] == [SendTo("c", WorkUnit((0,)))]
    assert hub.live == {"b", "c"}
    assert hub.receive("b", WorkRequest((1, 2), 1, True), 0.0) == []
    effects = hub.receive("c", WorkRequest((0,), 1, True), 0.0)
    assert effects == [SendTo("b", WorkUnit((), finished=True)), SendTo("c", WorkUnit((), finished=True))]
    assert hub.units.ledger.finished


def test_a_unit_that_was_lost_on_its_way_is_dealt_again():
    hub = live_hub("a", "b", units=2)
    hub.receive("a", WorkRequest((), 1, True), 0.0)  # the answer is lost with the connection
    hub.receive("b", WorkRequest((), 1, True), 0.0)
    hub.receive("b", WorkRequest((1,), 1, True), 0.0)
    effects = hub.receive("a", Hello("a"), 0.0)
    assert SendTo("b", WorkUnit((0,))) in effects


def test_who_drains_last_does_not_weigh_more_because_the_others_have_left():
    hub = live_hub("a", "b", units=1)
    hub.receive("a", WorkRequest((), 1, False), 0.0)
    hub.receive("a", WorkRequest((0,), 1, False), 0.0)
    hub.receive("b", Goodbye("done"), 0.0)
    assert of(Reduce, contribute(hub, "a", 0, codec="float32", dense=True))[0].live == 2


def test_who_finishes_last_does_not_weigh_more_because_the_others_have_no_data_left():
    hub = live_hub("a", "b", "c", units=1)
    hub.receive("a", WorkRequest((), 1, False), 0.0)
    for done in ("b", "c"):
        hub.receive(done, WorkRequest((), 1, True), 0.0)
    assert of(Reduce, contribute(hub, "a", 0))[0].live == 3


def test_a_greedy_request_is_bounded():
    hub = live_hub("a")
    ((_, unit),) = sent(hub.receive("a", WorkRequest((), 1 << 40, False), 0.0), WorkUnit)
    assert len(unit.numbers) == 64
    assert hub.receive("a", WorkRequest((), -3, False), 0.0) == []


def strict_hub():
    hub = live_hub("b", "a", release="all", mode="strict", units=6, start_nodes=2)
    assert {m.state for m in hub.members.values()} == {MemberState.LIVE}
    return hub


def test_in_strict_mode_each_node_has_a_lane_of_its_own_whoever_asks_first():
    hub = strict_hub()
    assert hub.receive("b", WorkRequest((), 2, False), 0.0) == [SendTo("b", WorkUnit((1, 3)))]
    assert hub.receive("a", WorkRequest((), 2, False), 0.0) == [SendTo("a", WorkUnit((0, 2)))]


def test_in_strict_mode_a_node_that_is_quarantined_beside_those_that_began_has_no_lane_and_asks_without_harm():
    hub = live_hub("b", "a", "c", release="all", mode="strict", units=6, start_nodes=2)
    hub.members["c"].quarantined = True
    ((_, dealt),) = sent(hub.receive("c", WorkRequest((), 1, True), 0.0), WorkUnit)
    assert len(dealt.numbers) == 1


def test_in_strict_mode_a_node_at_the_end_of_its_share_is_still_waited_for():
    hub = strict_hub()
    hub.receive("a", WorkRequest((), 3, False), 0.0)
    assert hub.receive("a", WorkRequest((0, 2, 4), 1, True), 0.0) == []
    assert not hub.members["a"].idle
    assert contribute(hub, "b", 0) == []
    assert of(Reduce, contribute(hub, "a", 0))[0].live == 2


def test_in_strict_mode_units_come_back_to_their_own_lane():
    hub = strict_hub()
    hub.receive("a", WorkRequest((), 3, False), 0.0)
    hub.receive("b", WorkRequest((), 3, False), 0.0)
    for peer in ("a", "b"):
        hub.receive(peer, Hello(peer), 0.0), hub.receive(peer, Fetch(0, WIRE), 0.0)
    assert sent(hub.receive("b", WorkRequest((), 3, False), 0.0), WorkUnit) == [("b", WorkUnit((1, 3, 5)))]
    assert sent(hub.receive("a", WorkRequest((), 3, False), 0.0), WorkUnit) == [("a", WorkUnit((0, 2, 4)))]


def test_units_that_the_deltas_of_a_node_do_not_stand_for_are_dealt_again_and_the_node_trains_on():
    hub = live_hub("honest", "ahead", units=10**6)
    said, room = (), 64 * 2 * 12  # every 8, delay 4
    for _ in range(100):
        ((_, dealt),) = sent(hub.receive("ahead", WorkRequest(said, 64, False), 0.0), WorkUnit)
        said = dealt.numbers
    assert hub.units.ledger.done_count == room and "ahead" in hub.members
    contribute(hub, "ahead", 0, steps=8)
    hub.receive("ahead", WorkRequest(said, 0, False), 0.0)
    assert hub.units.ledger.done_count == room + 64
    ((_, dealt),) = sent(hub.receive("honest", WorkRequest((), 2, False), 0.0), WorkUnit)
    assert dealt.numbers == (room + 64, room + 65)
    hub.gone("ahead", "it is off", 0.0)
    assert hub.units.ledger.done_count == room + 64


def test_a_node_that_only_says_that_its_units_are_done_ends_no_run():
    hub = live_hub("honest", "liar", units=10**6)
    said = ()
    for _ in range(100):
        ((_, dealt),) = sent(hub.receive("liar", WorkRequest(said, 64, False), 0.0), WorkUnit)
        said = dealt.numbers
    hub.gone("liar", "it lied", 0.0)
    assert hub.units.ledger.done_count == 0
    ((_, dealt),) = sent(hub.receive("honest", WorkRequest((), 2, False), 0.0), WorkUnit)
    assert dealt.numbers == (0, 1)


def test_a_node_that_trains_has_as_many_units_done_as_it_likes():
    hub = live_hub("a", units=10**6, every=1, delay=0)
    said = ()
    for sequence in range(500):
        ((_, dealt),) = sent(hub.receive("a", WorkRequest(said, 8, False), 0.0), WorkUnit)
        said = dealt.numbers
        contribute(hub, "a", sequence, steps=1)
    assert hub.units.ledger.done_count == 8 * 499


def test_what_a_quarantined_node_works_on_is_not_done():
    hub = live_hub("a", "b", units=4)
    hub.receive("a", WorkRequest((), 2, False), 0.0)
    hub.members["a"].quarantined = True
    hub.receive("a", WorkRequest((0, 1), 0, False), 0.0)
    assert hub.units.ledger.done_count == 0
    assert sent(hub.receive("b", WorkRequest((), 2, False), 0.0), WorkUnit) == [("b", WorkUnit((0, 1)))]


def test_only_what_the_evaluator_says_of_the_model_is_believed():
    hub = live_hub("evaluator", "other")
    report = Report(1, 8, 1.0, 0.5, 0.0, 0, 0, 0, scores={"loss": 0.1}, score_version=0)
    hub.receive("other", report, 0.0)
    assert hub.scores == {} and not hub.believes("other", report)
    hub.receive("evaluator", replace_fields(report, scores={"loss": 0.4}), 0.0)
    assert hub.scores == {"loss": 0.4} and hub.believes("evaluator", report)


def test_the_run_is_evaluated_on_the_held_out_data_of_its_first_evaluation_whoever_leaves():
    hub = live_hub("first", "shuffled", "silent", "same")
    report = Report(1, 8, 1.0, 0.5, 0.0, 0, 0, 0, data="aa/11")
    for peer, data in (("first", "aa/11"), ("shuffled", "ab/12"), ("silent", ""), ("same", "ac/11")):
        hub.receive(peer, replace_fields(report, data=data), 0.0)
    assert hub.data == "aa/11" and hub.evaluator == "first"
    hub.receive("first", replace_fields(report, scores={"accuracy": 92.0}, score_version=0), 0.0)
    hub.gone("first", "", 0.0)
    assert hub.evaluator == "same"
    hub.receive("shuffled", replace_fields(report, data="ab/12", scores={"accuracy": 8.8}, score_version=0), 0.0)
    assert hub.scores == {"accuracy": 92.0}
    again = hub_of()
    again.restore(hub.state())
    assert (again.data, again.evaluated_on) == ("aa/11", "11")
    hub.gone("same", "", 0.0)
    assert hub.evaluator is None


@pytest.mark.parametrize("data", ["a" * 1000, "a\nb"])
def test_digests_that_are_none_cost_their_node_its_place(data):
    hub = live_hub("a")
    with pytest.raises(RemoteProtocolError):
        hub.receive("a", Report(1, 8, 1.0, 0.5, 0.0, 0, 0, 0, data=data), 0.0)
