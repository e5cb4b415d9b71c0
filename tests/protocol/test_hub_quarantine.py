"""Who sends the hub what is refused again and again, and what follows for all the others."""

from __future__ import annotations

import json

from tests.protocol.hubs import WIRE, contribute, contribution, live_hub, of, publish, sent
from zmqtrain.protocol.effects import Expect, Rebase, Reduce
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.limits import OVER
from zmqtrain.protocol.messages import Fetch, Heartbeat, Hello, Preempt, Quarantine, Refused


def offend(hub, peer, sequence, now=0.0, reason="norm"):
    """Send a delta that is refused for what is in it; return what the hub has to say."""
    message = publish(sequence, base_version=hub.version)
    assert hub.receive(peer, message, now) == [Expect(peer, message)]
    return hub.broken(peer, message.transfer, reason, "too large", now)


def test_who_sends_refused_deltas_again_and_again_is_told_for_how_long_none_is_taken():
    hub = live_hub("a", "b")
    assert sent(offend(hub, "b", 0) + offend(hub, "b", 1), Quarantine) == []
    assert sent(offend(hub, "b", 2), Quarantine) == [("b", Quarantine("norm", "too large", 10.0))]
    assert hub.roster(0.0).members[1]["state"] == "quarantined"
    assert [message.reason for _, message in sent(hub.receive("b", publish(3), 1.0), Refused)] == ["quarantine"]
    hub.receive("a", Heartbeat(9.0), 9.0)
    hub.receive("b", Heartbeat(9.0), 9.0)
    assert sent(hub.tick(9.9), Preempt) == []
    assert sent(hub.tick(10.0), Preempt) == [("b", Preempt(OVER))]  # what it has made of them meanwhile is dropped
    assert sent(hub.tick(10.1), Preempt) == []
    assert hub.roster(10.0).members[1]["state"] == "live"
    assert [message.reason for _, message in sent(hub.receive("b", publish(3), 10.1), Refused)] == ["restart"]
    hub.receive("b", Fetch(-1, WIRE), 10.1)
    assert hub.receive("b", publish(3), 10.1) == [Expect("b", publish(3))]


def test_who_is_quarantined_is_not_waited_for_and_no_part_of_the_mean():
    hub = live_hub("a", "b", release="all")
    contribute(hub, "a", 0)
    offend(hub, "b", 0)
    offend(hub, "b", 1)
    (reduce,) = of(Reduce, offend(hub, "b", 2))
    assert reduce.contributions == (contribution("a", 0),) and reduce.live == 1


def test_what_it_had_sent_before_still_lands():
    hub = live_hub("a", "b", release="all")
    contribute(hub, "b", 0)
    for sequence in (1, 2, 3):
        offend(hub, "b", sequence)
    (reduce,) = of(Reduce, contribute(hub, "a", 0))
    assert {one.peer for one in reduce.contributions} == {"a", "b"} and reduce.live == 2


def test_where_most_nodes_are_turned_away_for_their_norm_the_gate_is_wrong_and_all_are_let_out():
    hub = live_hub("a", "b")
    for sequence in range(3):
        offend(hub, "b", sequence)
    for sequence in range(2):
        offend(hub, "a", sequence)
    effects = offend(hub, "a", 2, now=1.0)
    assert of(Rebase, effects) == [Rebase(("a", "b"))]
    assert [(peer, message.reason, message.seconds) for peer, message in sent(effects, Quarantine)] == [
        ("b", "over", 0)
    ]
    assert hub.live == {"a", "b"}
    assert hub.receive("b", publish(3), 1.0) == [Expect("b", publish(3))]


def test_who_trains_alone_is_not_quarantined_for_its_norm():
    hub = live_hub("a")
    offend(hub, "a", 0)
    offend(hub, "a", 1)
    effects = offend(hub, "a", 2)
    assert of(Rebase, effects) == [Rebase(("a",))] and not sent(effects, Quarantine)
    assert hub.live == {"a"}


def test_who_connects_again_is_still_quarantined_and_is_told_so():
    hub = live_hub("a", "b")
    for sequence in range(3):
        offend(hub, "b", sequence, now=1.0)
    assert sent(hub.receive("b", Hello("b"), 4.0), Quarantine)[0][1].seconds == 7.0
    hub.receive("b", Fetch(-1, WIRE), 4.0)
    assert "b" not in hub.live


def test_who_is_quarantined_still_is_where_its_hub_is_taken_over():
    hub = live_hub("a", "b")
    for sequence in range(3):
        offend(hub, "b", sequence, now=1.0)
    hub.tick(4.0)
    again = Hub(hub.settings, hub.rounds.rule, "", now=100.0)
    again.restore(hub.state() | {"quarantines": json.loads(hub.books(4.0))["quarantines"]})
    assert sent(again.receive("b", Hello("b", run="run-1"), 101.0), Quarantine)[0][1].seconds == 6.0


def test_deltas_that_are_late_or_come_twice_quarantine_nobody():
    hub = live_hub("a", "b", max_staleness=1)
    contribute(hub, "a", 0)
    for version, sequence in enumerate((0, 2), 1):
        contribute(hub, "b", sequence, base_version=version)
    for sequence in range(3, 23):
        late = hub.receive("b", publish(sequence), 0.0)  # a new one each time, based on version 0 of 3
        double = hub.receive("b", publish(0), 0.0) + hub.receive("b", publish(1), 0.0)  # 0 has landed, 1 is before 2
        assert [one.reason for _, one in sent(late + double, Refused)] == ["stale", "duplicate"]
        assert not sent(late + double + hub.tick(0.0), Quarantine)
    assert hub.refused == 40 and hub.live == {"a", "b"}
    assert of(Reduce, contribute(hub, "b", 23, base_version=3))


def test_who_is_left_out_of_versions_again_and_again_is_quarantined():
    hub = live_hub("a", "b")
    for sequence in range(3):
        contribute(hub, "b", sequence)
        effects = hub.left_out("b", "norm", "too large", 1.0)
    assert sent(effects, Quarantine) == [("b", Quarantine("norm", "too large", 10.0))]
    assert hub.members["b"].refused == hub.refused == 3
    assert hub.left_out("gone", "norm", "too large", 1.0) == []


def out(hub, *peers, sequence=0, now=1.0):
    """Have deltas of these nodes refused for their norm until the hub does something about it; return what."""
    effects = []
    for number in range(3):
        for peer in peers:
            if not hub.members[peer].quarantined:
                effects += offend(hub, peer, sequence + number, now)
    return effects


def test_three_of_five_names_of_one_key_do_not_widen_the_gate():
    hub = live_hub("x1", "x2", "x3", "a", "b")
    for name in ("x1", "x2", "x3"):
        hub.members[name].voter = "key lab"
    effects = out(hub, "x1", "x2", "x3")
    assert of(Rebase, effects) == [] and len(sent(effects, Quarantine)) == 3 and hub.live == {"a", "b"}


def evaluated(hub, version, loss):
    hub.version = version
    hub.scores, hub.score_version = {"loss": loss}, version


def test_the_gate_widens_once_and_again_only_while_evaluations_do_not_get_worse():
    hub = live_hub("a", "b", "c")
    evaluated(hub, 10, 0.5)
    assert of(Rebase, out(hub, "a", "b")) == [Rebase(("a", "b"))]
    (told,) = of(Rebase, out(hub, "a", "b", sequence=10))
    assert "at version 10, and no later one is evaluated yet" in told.why and hub.live == {"c"}
    hub.quarantines.acquit("a"), hub.quarantines.acquit("b"), hub.tick(1.1)
    evaluated(hub, 20, 0.54)
    for peer in ("a", "b"):
        hub.receive(peer, Fetch(-1, WIRE), 1.1)
    assert of(Rebase, out(hub, "a", "b", sequence=20)) == [Rebase(("a", "b"))]
    evaluated(hub, 30, 0.7)
    (told,) = of(Rebase, out(hub, "a", "b", sequence=30))
    assert "the loss has gone from 0.54 to 0.7" in told.why and hub.live == {"c"}


def test_where_nobody_says_how_the_parameters_score_the_gate_widens_once():
    hub = live_hub("a", "b")
    assert of(Rebase, out(hub, "a", "b")) == [Rebase(("a", "b"))]
    (told,) = of(Rebase, out(hub, "a", "b", sequence=10))
    assert "nobody says how the shared parameters score" in told.why
