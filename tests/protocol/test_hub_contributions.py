"""What is published at the hub: what is taken, what lands in which release, and who is waited for."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import attend, contribute, contribution, in_state, live_hub, of, publish, sent
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.protocol.effects import Accumulate, Expect, Reduce, SendTo
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import Goodbye, Hello, Refused, WorkRequest, replace_fields


def test_a_publish_is_expected_accumulated_and_released():
    hub = live_hub("a", "b")
    first = publish(0)
    assert hub.receive("a", first, 0.0) == [Expect("a", first)]
    reduce = Reduce(version=1, fragments=(0,), contributions=(contribution("a", 0),), live=2, dense=False)
    assert hub.received("a", 100, 0.0) == [Accumulate("a", first), reduce]
    assert (reduce.landed, reduce.samples) == ((("a", 0),), 8)
    assert (hub.version, hub.samples, hub.contributions) == (1, 8, 1)
    assert hub.received("a", 100, 0.0) == []


@pytest.mark.parametrize(
    ("changes", "reason", "told"),
    [
        ({"sequence": 1}, "duplicate", "sequence 1 was heard before"),
        ({"fragment": 2}, "fragment", "fragment 2 of a run with 2"),
        ({"fragment": -1}, "fragment", "fragment -1 of a run with 2"),
        ({"codec": "int8:block=256"}, "codec", "coded as 'int8:block=256'; this run takes 'ternary:block=128'"),
        ({"base_version": 5}, "version", "based on version 5; the run is at 1"),
        ({"samples": -1}, "samples", "stands for -1 samples in 8 steps"),
        ({"steps": -1}, "samples", "stands for 8 samples in -1 steps"),
        ({"samples": 1 << 63}, "samples", "stands for 9223372036854775808 samples in 8 steps"),
    ],
)
def test_a_publish_that_does_not_fit_is_refused_and_counted(changes, reason, told):
    hub = live_hub("a", fragments=2)
    contribute(hub, "a", 0)
    hub.receive("a", publish(1, 40), 0.0), hub.broken("a", 40, "size", "too large", 0.0)
    hub.members["a"].refused = hub.refused = 0
    message = publish(changes.pop("sequence", 2), 50, **changes)
    assert hub.receive("a", message, 0.0) == [SendTo("a", Refused(reason, told, message.sequence))]
    assert hub.refused == hub.members["a"].refused == 1 and hub.rounds.pending == ()


# ---------------------------------------------------------------------- what is too stale


def at_version(version, **settings):
    """A hub of a and b that has come so far: by what a has contributed."""
    hub = live_hub("a", "b", **settings)
    for sequence in range(version):
        contribute(hub, "a", sequence, base_version=sequence)
    assert hub.version == version
    return hub


def test_a_publish_may_be_as_stale_as_the_run_allows_and_one_more_is_refused_and_stays_with_its_node():
    hub = at_version(3, max_staleness=2)
    text = "based on version 0, 3 behind; this run takes what is at most 2 behind"
    assert hub.receive("b", publish(7, base_version=0), 0.0) == [SendTo("b", Refused("stale", text, 7))]
    assert (hub.version, hub.refused, hub.members["b"].refused) == (3, 1, 1)
    assert hub.rounds.pending == () and not hub.members["b"].open
    (reduce,) = of(Reduce, contribute(hub, "b", 7, base_version=1))  # it was not heard: it may come with a newer base
    assert reduce.contributions == (replace_fields(contribution("b", 7, staleness=2), base_version=1),)


def test_what_was_not_too_stale_when_it_was_said_lands_however_long_it_waits():
    hub = live_hub("a", "b", max_staleness=1)
    hub.receive("b", publish(0), 0.0)
    for sequence in range(3):
        contribute(hub, "a", sequence, base_version=sequence)
    (reduce,) = of(Reduce, hub.received("b", 100, 0.0))
    assert reduce.contributions == (contribution("b", 0, staleness=3),)


@pytest.mark.parametrize(("behind", "too_stale"), [(2, False), (3, True)])
def test_a_run_that_drops_what_is_too_stale_takes_it_and_says_that_it_counts_nothing(behind, too_stale):
    hub = at_version(3, max_staleness=2, stale="drop")
    (reduce,) = of(Reduce, contribute(hub, "b", 0, base_version=3 - behind))
    assert [(one.staleness, one.too_stale) for one in reduce.contributions] == [(behind, too_stale)]
    assert (reduce.landed, hub.refused) == ((("b", 0),), 0)


@pytest.mark.parametrize("stale", ["return", "drop"])
def test_what_a_node_drains_at_its_end_is_never_too_stale(stale):
    hub = at_version(3, max_staleness=1, stale=stale)
    (reduce,) = of(Reduce, contribute(hub, "b", 0, codec="float32", dense=True))
    assert [(one.staleness, one.too_stale) for one in reduce.contributions] == [(3, False)]


def test_where_no_limit_is_set_nothing_is_too_stale():
    hub = at_version(5, max_staleness=0)
    assert of(Reduce, contribute(hub, "b", 0))[0].contributions == (contribution("b", 0, staleness=5),)


# ---------------------------------------------------------------------- what is refused, and what lands


def test_two_publishes_of_one_transfer_are_refused():
    hub = live_hub("a")
    hub.receive("a", publish(0, 7), 0.0)
    ((_, refused),) = sent(hub.receive("a", publish(1, 7), 0.0), Refused)
    assert refused.reason == "duplicate"


def test_a_refused_publish_may_be_followed_by_a_good_one_and_a_broken_one_is_not_used():
    hub = live_hub("a")
    hub.receive("a", publish(0), 0.0)
    assert hub.broken("a", 100, "corrupt", "bytes were changed", 0.0) == [
        SendTo("a", Refused("corrupt", "bytes were changed", 0))
    ]
    assert hub.broken("a", 100, "corrupt", "again", 0.0) == [] and hub.refused == 1
    assert of(Reduce, contribute(hub, "a", 1))[0].landed == (("a", 1),)


@pytest.mark.parametrize("state", [state for state in MemberState if state is not MemberState.LIVE])
def test_only_a_live_node_may_publish(state):
    with pytest.raises(RemoteProtocolError, match=f"Publish from x while it is {state.value}"):
        in_state(state).receive("x", publish(0), 0.0)


def test_a_dense_publish_makes_the_release_dense():
    hub = live_hub("a", "b", release="quorum:count=2")
    contribute(hub, "a", 0)
    assert of(Reduce, contribute(hub, "b", 0, codec="float32", dense=True))[0].dense


def test_the_release_carries_the_union_of_the_accepted_fragments():
    hub = live_hub("a", "b", "c", release="all", fragments=3)
    contribute(hub, "a", 0, fragment=2), contribute(hub, "b", 0, fragment=0)
    assert of(Reduce, contribute(hub, "c", 0, fragment=2))[0].fragments == (0, 2)


def test_under_a_quorum_each_fragment_has_a_round_of_its_own():
    hub = live_hub("a", "b", "c", release="quorum:count=2,share=0", fragments=2)
    contribute(hub, "a", 0, fragment=0), contribute(hub, "b", 0, fragment=1)
    late = of(Reduce, contribute(hub, "c", 0, fragment=1))
    assert [reduce.fragments for reduce in late] == [(1,)] and len(hub.rounds.pending) == 1
    assert of(Reduce, contribute(hub, "c", 1, fragment=0))[0].landed == (("a", 0), ("c", 1))


def test_the_mean_is_over_the_live_nodes_and_those_that_have_contributed():
    hub = live_hub("a", "b", "c", release="quorum:count=3,share=0.5,patience=5")
    contribute(hub, "a", 0)
    hub.gone("a", "", 0.0)
    assert of(Reduce, contribute(hub, "b", 0)) == []
    (reduce,) = of(Reduce, hub.tick(0.5))
    assert (reduce.live, reduce.landed) == (3, (("a", 0), ("b", 0)))


def test_in_a_round_of_all_each_node_has_one_and_the_order_is_stated():
    hub = live_hub("b", "a", release="all")
    assert contribute(hub, "b", 0) == [] and contribute(hub, "b", 1) == []
    assert contribute(hub, "a", 0) == [
        Accumulate("a", publish(0)),
        Accumulate("b", publish(0)),
        Reduce(1, (0,), (contribution("a", 0), contribution("b", 0)), 2, False),
    ]
    assert [r.landed for r in of(Reduce, contribute(hub, "a", 1))] == [(("a", 1), ("b", 1))]


@pytest.mark.parametrize("end", ["gone", "goodbye", "silent", "again", "idle"])
def test_a_round_does_not_wait_for_a_node_that_is_gone_or_has_no_data(end):
    hub = live_hub("a", "b", release="all", units=1)
    contribute(hub, "a", 0)
    if end == "gone":
        effects = hub.gone("b", "", 0.0)
    elif end == "goodbye":
        effects = hub.receive("b", Goodbye(), 0.0)
    elif end == "silent":
        hub.saw("a", 5.0)
        effects = attend(hub, 5.0)
    elif end == "again":
        effects = hub.receive("b", Hello("b"), 0.0)
    else:
        hub.receive("a", WorkRequest((), 1, False), 0.0)
        effects = hub.receive("b", WorkRequest((), 1, True), 0.0)
    assert [reduce.landed for reduce in of(Reduce, effects)] == [(("a", 0),)]


def test_time_alone_closes_a_round_below_its_quorum():
    hub = live_hub("a", "b", "c", release="quorum:count=2,share=0.5,patience=1")
    contribute(hub, "a", 0, now=1.0)
    assert of(Reduce, hub.tick(1.9)) == []
    assert of(Reduce, hub.tick(2.0))[0].live == 3
