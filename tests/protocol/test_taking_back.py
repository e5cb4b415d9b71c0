"""What a hub does where a node is found to diverge that was a part of the last versions."""

from __future__ import annotations

from tests.protocol.hubs import WIRE, contribute, contribution, live_hub, of, publish, sent
from zmqtrain.protocol.effects import Accumulate, Expect, Reduce, Serve, TakeBack
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import Fetch, Hello, Preempt, Refused

SEEN = range(3)


def diverged(hub, peer="b", reason="norm"):
    """Have a node's deltas refused until it is quarantined; return what the hub has to say."""
    effects = []
    for sequence in SEEN:
        message = publish(100 + sequence)
        hub.receive(peer, message, 0.0)
        effects = hub.broken(peer, message.transfer, reason, "too large", 0.0)
    return effects


def trained(*peers, versions=6, **settings):
    hub = live_hub(*peers, **settings)
    for version in range(versions):
        contribute(hub, peers[version % len(peers)], version, base_version=hub.version)
    assert hub.version == versions
    return hub


def test_who_is_quarantined_as_it_diverges_is_looked_up_in_the_last_versions():
    for reason in ("norm", "enormous", "non-finite"):
        assert of(TakeBack, diverged(trained("a", "b"), reason=reason)) == [TakeBack("b")]


def test_what_a_fault_of_memory_or_wire_has_spoiled_is_taken_back_from_nobody_nor_anything_in_strict_mode():
    assert of(TakeBack, diverged(trained("a", "b"), reason="corrupt")) == []
    assert of(TakeBack, diverged(live_hub("a", "b", release="all", mode="strict", start_nodes=2, units=2))) == []


def test_the_run_goes_back_by_a_further_version_and_all_begin_again_from_that():
    hub = trained("a", "b", "c")
    effects = hub.take_back("b", 2)
    (reduce,) = of(Reduce, effects)
    assert (reduce.version, reduce.back_to, reduce.landed, reduce.dense) == (7, 2, (), True)
    assert {peer for peer, _ in sent(effects, Preempt)} == {"a", "b", "c"} and hub.version == 7
    assert "back to version 2: b had diverged" in sent(effects, Preempt)[0][1].reason


def test_what_was_computed_on_parameters_that_are_taken_back_is_refused_until_its_node_has_fetched():
    hub = trained("a", "b")
    late = publish(50, base_version=6)
    assert hub.receive("a", late, 0.0) == [Expect("a", late)]
    hub.take_back("b", 2)
    assert [m.reason for _, m in sent(hub.received("a", late.transfer, 0.0), Refused)] == ["restart"]
    assert [m.reason for _, m in sent(hub.receive("a", publish(51, base_version=7), 0.0), Refused)] == ["restart"]
    assert of(Serve, hub.receive("a", Fetch(-1, WIRE), 0.0))
    assert of(Accumulate, contribute(hub, "a", 52, base_version=7))
    assert hub.quarantines.rest("a", 0.0) == 0.0


def test_what_waits_for_a_round_is_refused_too_and_no_round_holds_it():
    hub = live_hub("a", "b", release="all")
    contribute(hub, "a", 0), contribute(hub, "b", 0)
    contribute(hub, "a", 1, base_version=1)
    refused = sent(hub.take_back("b", 0), Refused)
    assert [(peer, m.reason, m.sequence) for peer, m in refused] == [("a", "restart", 1)]
    for peer in ("a", "b"):
        hub.receive(peer, Fetch(-1, WIRE), 0.0)
    contribute(hub, "b", 2, base_version=2)
    (reduce,) = of(Reduce, contribute(hub, "a", 2, base_version=2))
    assert reduce.contributions == (contribution("a", 2), contribution("b", 2)) or len(reduce.contributions) == 2


def test_nothing_is_taken_back_of_a_version_that_is_not_known_or_again_before_as_much_has_come():
    hub = trained("a", "b")
    assert hub.take_back("b", -1) == [] and hub.take_back("b", 6) == [] and hub.version == 6
    assert hub.take_back("b", 2) and hub.version == 7
    for peer in ("a", "b"):
        hub.receive(peer, Fetch(-1, WIRE), 0.0)
    for sequence in range(10, 14):
        assert hub.take_back("b", 4) == []
        contribute(hub, "a", sequence, base_version=hub.version)
    assert hub.take_back("b", 10)


def test_a_hub_that_is_started_again_goes_on_from_the_version_that_took_back():
    hub = trained("a", "b")
    hub.take_back("b", 2)
    again = Hub(hub.settings, hub.rounds.rule, "")
    again.restore(hub.state())
    assert again.version == 7


def test_a_node_that_has_asked_for_the_snapshot_publishes_nothing_of_what_it_computed_before_that_came():
    hub = trained("a", "b")
    late = publish(50, base_version=6)
    assert hub.receive("a", late, 0.0) == [Expect("a", late)]
    hub.take_back("b", 2)
    assert of(Serve, hub.receive("a", Fetch(5, WIRE), 0.0)) == [] and hub.members["a"].restarts
    assert of(Serve, hub.receive("a", Fetch(-1, WIRE), 0.0))
    assert [m.reason for _, m in sent(hub.received("a", late.transfer, 0.0), Refused)] == ["restart"]
    for base_version in (2, 3, 6):
        (refused,) = sent(hub.receive("a", publish(51 + base_version, base_version=base_version), 0.0), Refused)
        assert refused[1].reason == "restart"
    assert of(Accumulate, contribute(hub, "a", 60, base_version=7))


def test_who_was_away_begins_again_if_what_it_has_is_gone_and_goes_on_if_it_has_an_earlier_version():
    for version, begins_again in ((2, False), (3, True), (6, True), (7, False)):
        hub = trained("a", "b")
        hub.gone("a", "crashed", 0.0)
        hub.take_back("b", 2)
        hub.receive("a", Hello("a", run="run-1", version=version), 0.0)
        effects = hub.receive("a", Fetch(version, WIRE), 0.0)
        assert bool(sent(effects, Preempt)) == begins_again != bool(of(Serve, effects))
        if begins_again:
            assert of(Serve, hub.receive("a", Fetch(-1, WIRE), 0.0))
        else:
            assert of(Accumulate, contribute(hub, "a", 50, base_version=version))
