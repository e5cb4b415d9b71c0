"""Every data unit is done once, whoever dies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.core.errors import CheckpointError
from zmqtrain.protocol.units import CLAIMED_AHEAD, MOST_IN_HAND, WorkLedger


def test_units_are_dealt_in_order_and_once():
    ledger = WorkLedger(5)
    assert ledger.deal("a", 2) == (0, 1)
    assert ledger.deal("b", 2) == (2, 3)
    assert ledger.deal("a", 2) == (4,)
    assert ledger.deal("b", 2) == ()


def test_a_unit_of_a_lost_node_is_dealt_again_and_first():
    ledger = WorkLedger(10)
    ledger.deal("a", 3)
    ledger.done("a", [1])
    assert ledger.lost("a") == (0, 2)
    assert ledger.deal("b", 3) == (0, 2, 3)


def test_only_the_node_that_has_a_unit_can_finish_it():
    ledger = WorkLedger(2)
    ledger.deal("a", 2)
    assert ledger.done("b", [0, 1]) == 0
    assert ledger.done("a", [0, 0, 7]) == 1
    assert not ledger.finished


def test_lanes_give_the_same_units_whoever_asks_first():
    first, second = WorkLedger(6, lanes=2), WorkLedger(6, lanes=2)
    assert first.deal("a", 2, 0) == (0, 2) and first.deal("b", 2, 1) == (1, 3)
    assert second.deal("b", 2, 1) == (1, 3) and second.deal("a", 2, 0) == (0, 2)
    assert first.deal("a", 5, 0) == (4,)


def test_a_run_without_an_end_is_never_finished():
    ledger = WorkLedger(0)
    for _ in range(10):
        ledger.done("a", ledger.deal("a", 100))
    assert ledger.done_count == 1000 and not ledger.finished


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["deal", "done", "lost", "restart"])), max_size=60))
def test_whatever_happens_every_unit_is_done_exactly_once(events):
    ledger, held, done = WorkLedger(20), {peer: [] for peer in "abc"}, []

    def finish(peer):
        if held[peer]:
            done.extend(held[peer][:1] * ledger.done(peer, held[peer][:1]))
            held[peer].pop(0)

    for peer, event in events:
        if event == "deal":
            held[peer] += ledger.deal(peer, 2)
        elif event == "done":
            finish(peer)
        elif event == "lost":
            ledger.lost(peer)
            held[peer].clear()
        else:
            ledger = WorkLedger.from_state(ledger.state())
            held = {one: [] for one in held}
    while not ledger.finished:
        ledger.lost("b"), ledger.lost("c")
        held["a"] += ledger.deal("a", 1)
        finish("a")
    assert sorted(done) == list(range(20))


def test_a_state_that_is_none_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="ledger"):
        WorkLedger.from_state({"total": 3})


def test_nobody_takes_all_the_data_of_a_run_and_what_comes_back_goes_out_in_order():
    ledger = WorkLedger()
    taken = [number for _ in range(10) for number in ledger.deal("a", 64)]
    assert taken == list(range(MOST_IN_HAND)) and ledger.deal("b", 2) == (MOST_IN_HAND, MOST_IN_HAND + 1)
    ledger.done("a", taken[10:12])
    assert ledger.deal("a", 64) == (MOST_IN_HAND + 2, MOST_IN_HAND + 3)
    ledger.lost("a")
    assert ledger.deal("b", 12) == (*range(10), 12, 13)


def test_who_comes_back_has_again_what_it_had_in_hand_and_nobody_else_has():
    ledger = WorkLedger(20)
    assert ledger.deal("a", 3) == (0, 1, 2) and ledger.deal("b", 1) == (3,)
    ledger.lost("a")
    assert ledger.deal("b", 1) == (0,)
    assert ledger.claim("a", (0, 1, 2, 3)) == (1, 2)
    assert ledger.claim("a", (1, 2)) == (1, 2), "asked again, it is answered again"
    assert ledger.done("a", (1, 2)) == 2 and ledger.claim("a", (1,)) == ()


def test_who_claims_ever_more_gets_no_more_than_is_dealt_and_fills_no_memory():
    ledger = WorkLedger.from_state(WorkLedger().state())
    for number in range(0, 4095 * 50, 4095):
        ledger.claim("a", (number,))
    assert len(ledger._returned) <= CLAIMED_AHEAD
    ledger.claim("a", range(1000))
    assert len(ledger._in_hand["a"]) == MOST_IN_HAND
    assert ledger.deal("a", 1) == () and len(ledger.deal("b", 1)) == 1
    assert ledger.done("a", list(ledger._in_hand["a"])) == MOST_IN_HAND
    assert len(ledger.deal("a", 2 * MOST_IN_HAND)) == MOST_IN_HAND


def test_a_hub_that_knows_less_than_its_nodes_deals_nothing_twice_that_one_claims():
    ledger = WorkLedger.from_state(WorkLedger(20).state())
    assert ledger.claim("a", (5, 6)) == (5, 6)
    assert ledger.deal("b", 9) == (0, 1, 2, 3, 4, 7, 8, 9, 10)
    assert ledger.claim("c", (10**9, 19, 20)) == (19,), "no node claims what there cannot be"


def test_in_a_run_that_has_gone_back_a_lane_stands_where_its_node_stood():
    ledger = WorkLedger(12, lanes=2)
    assert ledger.deal("a", 2, lane=0) == (0, 2) and ledger.deal("b", 1, lane=1) == (1,)
    again = WorkLedger.from_state(ledger.state())
    again.reach(0, 4)
    assert again.claim("a", (4, 6)) == (4, 6) and again.done_count == 2
    assert again.deal("a", 2, lane=0) == (8, 10) and again.deal("b", 2, lane=1) == (1, 3)
    again = WorkLedger.from_state(ledger.state())
    again.reach(1, 100)
    assert again.done_count == 6 and again.deal("b", 1, lane=1) == ()


def test_a_ledger_that_has_dealt_all_its_units_believes_nobody_about_others():
    ledger = WorkLedger(10**6, lanes=2)
    assert ledger.deal("a", 1, lane=0) == (0,)
    assert ledger.claim("b", (2, 100, 999_998)) == () and ledger.done("b", (2, 100, 999_998)) == 0
    ledger.reach(0, 10**6), ledger.reach(1, 10**6)
    assert ledger.done_count == 0 and ledger.deal("b", 1, lane=1) == (1,)


def test_after_a_restart_all_claims_together_reach_no_further_than_one_does():
    ledger = WorkLedger.from_state(WorkLedger(10**6).state())
    done = 0
    for first in range(0, 10**5, 64):
        done += ledger.done("liar", ledger.claim("liar", range(first, first + 64)))
    assert done == ledger.done_count == CLAIMED_AHEAD
    ledger = WorkLedger.from_state(WorkLedger(10**6).state())
    ledger.reach(0, 10**6), ledger.reach(0, 2 * 10**6)
    assert ledger.done_count == CLAIMED_AHEAD, "a node says once where it stands"


def test_what_a_node_has_done_of_which_nothing_has_come_is_dealt_again_when_it_is_lost():
    ledger = WorkLedger(10)
    ledger.done("a", ledger.deal("a", 2), backed=False)
    ledger.deal("a", 1)
    assert ledger.done_count == 2 and ledger.lost("a", unbacked=True) == (2, 0, 1)
    assert ledger.done_count == 0 and ledger.deal("b", 3) == (0, 1, 2)
    ledger.done("b", (0,), backed=False), ledger.done("b", (1,))
    assert ledger.lost("b", unbacked=True) == (2,), "a delta of it has come meanwhile"
    ledger.done("c", ledger.deal("c", 1), backed=False)
    ledger.back("c")
    assert ledger.lost("c") == ledger.lost("c", unbacked=True) == ()
