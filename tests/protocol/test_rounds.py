"""When a round is due, in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.core.errors import ConfigError
from zmqtrain.protocol.rounds import (
    FIRST_GRACE_SECONDS,
    AfterAll,
    AfterCount,
    AfterQuorum,
    AfterTime,
    BoundedStaleness,
    Immediately,
    Rounds,
    RoundView,
    release_rule_from_spec,
)

LIVE = frozenset({"a", "b", "c", "d"})
PAIR = frozenset({"a", "b"})
SPECS = ["all", "quorum", "quorum:share=0", "immediately", "count:contributions=2", "time", "bounded:staleness=1"]


def canonical(spec):
    return release_rule_from_spec(spec).name


def filled(rule, *arrivals):
    rounds = Rounds(rule)
    for peer, now in arrivals:
        rounds.add(peer, f"{peer}{now}", now)
    return rounds


def peers(taken):
    return [peer for peer, _ in taken]


def drive(rounds, arrivals, live=LIVE):
    """Let contributions come as at a hub that never sleeps: return (when, peers) of each round, in order."""
    released = []

    def release(until):
        while (due := rounds.due_at(live)) is not None and due <= until:
            released.append((due, peers(rounds.take(live, due))))

    for now, peer in sorted(arrivals, key=lambda one: one[0]):
        release(now)
        rounds.add(peer, now, now)
    release(float("inf"))
    return released


# ---------------------------------------------------------------------- all


def test_after_all_waits_for_the_last_live_node():
    rounds = filled(AfterAll(), ("a", 1.0), ("b", 2.0), ("c", 3.0))
    assert rounds.take(LIVE, 100.0) == []
    rounds.add("d", "d4", 4.0)
    assert peers(rounds.take(LIVE, 4.0)) == ["a", "b", "c", "d"]
    assert rounds.pending == ()


def test_after_all_does_not_wait_for_a_node_that_is_gone():
    assert len(filled(AfterAll(), ("a", 1.0), ("b", 2.0)).take(PAIR, 2.0)) == 2


def test_after_all_takes_one_contribution_of_each_node_and_keeps_the_next():
    rounds = filled(AfterAll(), ("a", 1.0), ("a", 2.0), ("b", 3.0))
    assert rounds.take(PAIR, 3.0) == [("a", "a1.0"), ("b", "b3.0")]
    assert rounds.pending == (("a", "a2.0"),)


# ---------------------------------------------------------------------- immediately, count, time


def test_immediately_waits_for_nobody():
    assert filled(Immediately(), ("a", 1.0)).take(LIVE, 1.0) == [("a", "a1.0")]


def test_a_count_is_reached_whoever_sent_the_contributions():
    rounds = filled(AfterCount(3), ("a", 1.0), ("a", 1.5))
    assert rounds.due_at(LIVE) is None
    rounds.add("b", "b2.0", 2.0)
    assert rounds.due_at(LIVE) == 2.0
    assert peers(rounds.take(LIVE, 2.0)) == ["a", "a", "b"]


def test_a_count_beyond_the_live_nodes_is_their_number():
    assert filled(AfterCount(3), ("a", 1.0), ("b", 2.0)).due_at(PAIR) == 2.0
    assert filled(AfterCount(3), ("a", 1.0)).due_at(frozenset()) == 1.0


def test_a_timed_round_follows_the_one_before_at_a_fixed_period():
    arrivals = [(0.25 * i, "ab"[i % 2]) for i in range(1, 21)]
    assert [when for when, _ in drive(Rounds(AfterTime(1.0)), arrivals)] == [1.25, 2.25, 3.25, 4.25, 5.25]


def test_who_looks_late_does_not_put_the_next_timed_round_off():
    rounds = filled(AfterTime(1.0), ("a", 0.0))
    assert rounds.take(LIVE, 0.99) == [] and rounds.take(LIVE, 1.04) != []
    rounds.add("a", "again", 1.5)
    assert rounds.due_at(LIVE) == 2.0


def test_a_timed_round_without_anything_is_due_when_the_first_contribution_comes():
    rounds = filled(AfterTime(1.0), ("a", 0.0))
    assert rounds.take(LIVE, 1.0) != [] and rounds.due_at(LIVE) is None and rounds.take(LIVE, 3.0) == []
    rounds.add("b", "b", 3.5)
    assert rounds.due_at(LIVE) == 3.5 and rounds.take(LIVE, 3.5) == [("b", "b")]
    rounds.add("b", "c", 3.6)
    assert rounds.due_at(LIVE) == 4.5


# ---------------------------------------------------------------------- quorum


def test_a_quorum_without_a_history_waits_a_constant_for_the_others():
    rounds = filled(AfterQuorum(2), ("a", 1.0), ("b", 2.0))
    assert rounds.due_at(LIVE) == 2.0 + FIRST_GRACE_SECONDS
    assert rounds.take(LIVE, 2.4) == []
    assert len(rounds.take(LIVE, 2.5)) == 2


def test_a_quorum_is_due_at_once_when_all_have_contributed():
    rounds = filled(AfterQuorum(2), ("a", 1.0), ("b", 1.1), ("c", 1.2), ("d", 1.3))
    assert rounds.due_at(LIVE) == 1.3


def test_a_quorum_of_zero_is_half_of_the_live_nodes():
    assert filled(AfterQuorum(0), ("a", 1.0)).due_at(LIVE) == 6.0  # not there yet: its patience
    assert filled(AfterQuorum(0), ("a", 1.0), ("b", 1.0)).due_at(LIVE) == 1.5
    assert filled(AfterQuorum(0), ("a", 1.0)).due_at(frozenset({"a"})) == 1.0


def test_a_quorum_that_cannot_be_reached_is_due_when_its_patience_ends():
    assert filled(AfterQuorum(3), ("a", 1.0)).due_at(LIVE) == 6.0
    assert filled(AfterQuorum(3, patience=0.25), ("a", 1.0)).due_at(LIVE) == 1.25


def test_the_same_node_twice_is_no_quorum():
    assert filled(AfterQuorum(2), ("a", 1.0), ("a", 1.1)).due_at(LIVE) == 6.0


def test_when_all_live_nodes_go_silent_the_quorum_releases_by_its_patience():
    rounds = filled(AfterQuorum(3), ("a", 1.0), ("b", 1.5))
    assert rounds.take(LIVE, 5.9) == [] and peers(rounds.take(LIVE, 6.0)) == ["a", "b"]
    assert rounds.due_at(LIVE) is None


def beats(offsets, period, rounds):
    """Every node contributes once a period, each at its own offset."""
    return [(k * period + offset, peer) for k in range(rounds) for peer, offset in offsets.items()]


def test_the_grace_follows_from_how_late_the_others_have_come():
    rounds = Rounds(AfterQuorum(2))
    drive(rounds, beats({"a": 0.0, "b": 0.0, "c": 0.1, "d": 0.1}, 8.0, 6))
    rounds.add("a", "", 100.0), rounds.add("b", "", 100.0)
    assert rounds.due_at(LIVE) == pytest.approx(100.103)  # median 0.1, MAD 0: counted as a hundredth
    view = RoundView((), {}, LIVE, lateness=(0.1, 0.2, 0.3, 0.4, 9.0), interval_seconds=8.0)
    assert AfterQuorum().grace_seconds(view) == pytest.approx(0.3 + 3 * 0.1)  # one straggler moves it little


def test_who_missed_a_round_is_counted_as_late_so_that_the_grace_can_grow():
    rounds = Rounds(AfterQuorum(2))
    drive(rounds, beats({"a": 0.0, "b": 0.0, "c": 0.1, "d": 0.1}, 8.0, 6))
    later = [(100.0 + now, peer) for now, peer in beats({"a": 0.0, "b": 0.0, "c": 0.3, "d": 0.3}, 8.0, 40)]
    released = drive(rounds, later)
    assert [len(taken) for _, taken in released][:2] == [2, 2], "the grace of before was too short"
    assert [len(taken) for _, taken in released][-8:] == [4] * 8


def test_the_grace_is_at_most_a_share_of_a_nodes_interval():
    for share, waited in ((0.5, 0.5), (0.25, 0.25), (0.0, 0.0)):
        view = RoundView((), {}, LIVE, lateness=(0.9,) * 8, interval_seconds=1.0)
        assert AfterQuorum(2, share).grace_seconds(view) == waited
        assert AfterQuorum(2, share).grace_seconds(RoundView((), {}, LIVE)) == (FIRST_GRACE_SECONDS if share else 0)
    rounds = Rounds(AfterQuorum(2))
    drive(rounds, beats({"a": 0.0, "b": 0.0, "c": 0.01, "d": 0.01}, 0.02, 8))
    rounds.add("a", "", 100.0), rounds.add("b", "", 100.0)
    assert rounds.due_at(LIVE) == pytest.approx(100.01), "the constant, too, is no longer than the share"


def test_the_history_is_bounded_and_who_has_left_is_forgotten():
    rounds = Rounds(AfterQuorum(2))
    for number in range(300):
        live = frozenset({"a", "b", f"new-{number}"})
        drive(rounds, [(number + 0.0, "a"), (number + 0.0, "b"), (number + 0.1, f"new-{number}")], live)
    assert len(rounds.paces.lateness) == 64 and len(rounds.paces.clocks) == len(rounds.paces.landed) == 3


# ---------------------------------------------------------------------- bounded staleness


def test_the_fastest_node_lands_so_many_exchanges_ahead_and_no_more():
    rounds = filled(BoundedStaleness(2), ("a", 1.0), ("a", 2.0), ("a", 3.0))
    assert [rounds.take(PAIR, 3.0) for _ in range(3)] == [[("a", "a1.0")], [("a", "a2.0")], []]
    assert rounds.due_at(PAIR) is None
    rounds.add("b", "b4.0", 4.0)
    assert rounds.due_at(PAIR) == 4.0
    assert rounds.take(PAIR, 4.0) == [("a", "a3.0"), ("b", "b4.0")]


def test_a_newcomer_begins_where_the_slowest_stands():
    rounds = Rounds(BoundedStaleness(1))
    drive(rounds, [(float(i), peer) for i in range(10) for peer in "ab"], PAIR)
    trio = PAIR | {"c"}
    assert drive(rounds, [(20.0, "a")], trio) == [(20.0, ["a"])]
    assert drive(rounds, [(21.0, "a"), (22.0, "b"), (23.0, "c")], trio) == [(22.0, ["b"]), (23.0, ["a", "c"])]


@pytest.mark.parametrize("returns", [False, True])
def test_a_node_that_left_stops_counting_and_comes_back_as_a_newcomer(returns):
    rounds = Rounds(BoundedStaleness(1))
    drive(rounds, [(0.0, "a"), (0.0, "b"), (1.0, "a"), (2.0, "a")], PAIR)
    assert rounds.pending == (("a", 2.0),)
    assert rounds.take(frozenset({"a"}), 3.0) == [("a", 2.0)]
    drive(rounds, [(4.0 + i, "a") for i in range(20)], frozenset({"a"}))
    if returns:
        assert len(drive(rounds, [(30.0, "a"), (30.0, "a")], PAIR)) == 1
        assert len(drive(rounds, [(31.0, "b")], PAIR)) == 1 and rounds.pending == ()


def test_what_a_departed_node_left_behind_lands_when_the_others_are_there():
    rounds = filled(BoundedStaleness(1), ("a", 0.0), ("a", 1.0))
    assert len(rounds.take(PAIR, 1.0)) == 1 and rounds.take(frozenset({"b"}), 1.0) == []
    rounds.add("b", "b", 2.0)
    assert rounds.take(frozenset({"b"}), 2.0) == [("a", "a1.0"), ("b", "b")]
    rounds = filled(BoundedStaleness(0), ("a", 0.0), ("b", 1.0))
    assert peers(rounds.take(frozenset(), 1.0)) == ["a", "b"], "nobody is left to wait for"


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abcd")),
        st.tuples(st.sampled_from(["join", "leave"]), st.sampled_from("abcd")),
    ),
    max_size=60,
)


def as_a_hub(rounds, events, look=lambda taken, live, now: None):
    """Nodes join, contribute while they are live, and leave; each event but a joining is followed by a release."""
    live, now, released = set(), 0.0, []
    for event, peer in events:
        now += 1.0
        if event == "add" and peer in live:
            rounds.add(peer, f"{peer}{now}", now)
        elif event == "join":
            live.add(peer)
            continue
        elif event == "leave":
            live.discard(peer)
        while taken := rounds.take(frozenset(live), now):
            released.append((now, sorted(taken)))
            look(taken, live, now)
        due = rounds.due_at(frozenset(live))
        assert due is None or due > now, "whatever was due was taken"
    return released


@given(EVENTS)
def test_a_bound_of_zero_takes_the_rounds_of_all(events):
    assert as_a_hub(Rounds(BoundedStaleness(0)), events) == as_a_hub(Rounds(AfterAll()), events)


@given(EVENTS)
def test_a_huge_bound_is_asynchronous(events):
    assert as_a_hub(Rounds(BoundedStaleness(10**9)), events) == as_a_hub(Rounds(Immediately()), events)


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.integers(0, 4))
def test_nothing_lands_further_ahead_of_the_slowest_than_the_bound(order, bound):
    rounds, came, landed = Rounds(BoundedStaleness(bound)), dict.fromkeys(LIVE, 0), dict.fromkeys(LIVE, 0)
    for peer in order:
        rounds.add(peer, peer, 0.0)
        came[peer] += 1
        while taken := rounds.take(LIVE, 0.0):
            for other, _ in taken:
                landed[other] += 1
                assert landed[other] <= min(came.values()) + bound
        slowest = min(came, key=came.get)
        assert landed[slowest] == came[slowest], "the slowest never waits"


# ---------------------------------------------------------------------- every rule


@given(EVENTS, st.sampled_from(SPECS))
def test_every_contribution_is_taken_exactly_once(events, spec):
    rounds, added, landed = Rounds(release_rule_from_spec(spec)), [], []
    add = rounds.add
    rounds.add = lambda peer, contribution, now: (added.append((peer, contribution)), add(peer, contribution, now))
    as_a_hub(rounds, events, lambda taken, live, now: landed.extend(taken))
    while taken := rounds.take(frozenset(), 1e9):
        landed += taken
    assert sorted(landed) == sorted(added) and rounds.pending == ()


@given(st.permutations(sorted(LIVE)), st.sampled_from(SPECS))
def test_the_order_of_equal_arrivals_does_not_matter(order, spec):
    def rounds_of(order):
        rounds = Rounds(release_rule_from_spec(spec))
        found = []
        for exchange in range(3):
            for peer in order:
                rounds.add(peer, exchange, float(exchange))
            while (due := rounds.due_at(LIVE)) is not None:
                found.append((due, frozenset(rounds.take(LIVE, due))))
        return found

    assert rounds_of(order) == rounds_of(sorted(LIVE))


@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from("abcd")), max_size=40), st.sampled_from(SPECS))
def test_releases_follow_one_another_in_time(arrivals, spec):
    rounds = Rounds(release_rule_from_spec(spec))
    times = [when for when, _ in drive(rounds, arrivals)]
    assert times == sorted(times)


@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from("abcd")), max_size=40), st.sampled_from(SPECS))
def test_while_nothing_happens_a_due_time_stands(arrivals, spec):
    rounds = Rounds(release_rule_from_spec(spec))
    for now, peer in sorted(arrivals):
        rounds.add(peer, now, now)
        rounds.take(LIVE, now)
        due = rounds.due_at(LIVE)
        if due is not None and due > now:
            assert rounds.take(LIVE, now + (due - now) * 0.5) == [] or now + (due - now) * 0.5 == due
            assert rounds.due_at(LIVE) in (due, None)


# ---------------------------------------------------------------------- specs


def test_a_rule_is_named_by_a_string():
    assert release_rule_from_spec("all") == AfterAll()
    assert release_rule_from_spec("immediately") == Immediately()
    assert release_rule_from_spec("quorum:count=3,share=0.25") == AfterQuorum(3, 0.25)
    assert release_rule_from_spec("count:contributions=2") == AfterCount(2)
    assert release_rule_from_spec("time:seconds=0.3") == AfterTime(0.3)
    assert release_rule_from_spec("bounded:staleness=0") == BoundedStaleness(0)
    with pytest.raises(ConfigError, match="quorum"):
        release_rule_from_spec("most")
    with pytest.raises(ConfigError, match=r"quorum takes count=0, share=0\.5, patience=5"):
        release_rule_from_spec("quorum:grace=1")


@pytest.mark.parametrize("spec", SPECS)
def test_the_canonical_text_names_an_equal_rule(spec):
    assert canonical(canonical(spec)) == canonical(spec)
    assert release_rule_from_spec(canonical(spec)) == release_rule_from_spec(spec)


def test_a_quorum_is_written_with_all_its_numbers():
    assert canonical("quorum") == "quorum:count=0,share=0.5,patience=5"


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ("quorum:count=-1", "at least 0"),
        ("quorum:share=1.5", "0 <= share <= 1"),
        ("quorum:patience=-1", "at least 0"),
        ("count:contributions=0", "at least 1"),
        ("time:seconds=0", "more than 0"),
        ("bounded:staleness=-1", "at least 0"),
    ],
)
def test_a_number_out_of_range_is_refused_with_what_is_allowed(spec, allowed):
    with pytest.raises(ConfigError, match=allowed):
        release_rule_from_spec(spec)
