"""What attackers say is what it is meant to be, and the rows of single attacks are judged by their pace."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from zmqtrain.protocol.framing import MAX_HEAD_BYTES, open_head
from zmqtrain.protocol.messages import MESSAGES

from attacks import ATTACKS, ATTACKS_OF_MEMBERS, largest_heads
from hostile import (
    AFTER_SECONDS,
    LEARNING_SECONDS,
    MET,
    MISSED,
    OPEN_TO_ALL,
    RATES,
    SECONDS,
    STAR_SECONDS,
    block_seconds_for,
    row_of,
)


def block(steps=60, aggregates=30, landed=30):
    """What is done within a second."""
    return {"seconds": 1.0, "steps": steps, "aggregates": aggregates, "landed": landed, "cpu_seconds": 0.1}


def test_the_largest_heads_are_of_every_kind_and_as_large_as_any_that_is_opened():
    heads = [(open_head(head).kind, len(head)) for head in largest_heads(Random(1), size=20_000)]
    assert {kind for kind, _ in heads} == {*MESSAGES}
    assert all(15_000 < size < 45_000 for _, size in heads)
    assert all(len(head) <= MAX_HEAD_BYTES for head in islice(largest_heads(Random(2)), 40))


def test_each_attack_is_done_by_strangers_and_those_of_members_with_the_key_of_a_node_too():
    assert {*ATTACKS} == {*OPEN_TO_ALL, "steal"} and {*ATTACKS_OF_MEMBERS} < {*ATTACKS}
    assert {*SECONDS, *RATES} < {*ATTACKS}


def test_a_row_says_what_honest_nodes_keep_during_an_attack_and_after_it_of_what_they_did_without():
    row = row_of(block(), block(steps=57, landed=29, aggregates=29), block(steps=58))
    assert row["during"] == pytest.approx(2 * 57 / (60 + 58)) and row["after"] == pytest.approx(58 / 60)
    assert row["bar"] == MET and row["steps_s"] == "60.0 57.0 58.0"
    assert row_of(block(), block(steps=56), block())["bar"] == MISSED
    assert row_of(block(), block(aggregates=3), block())["during"] == pytest.approx(0.1)
    after = row_of(block(), block(), block(landed=15))
    assert after["after"] == pytest.approx(0.5) and after["bar"] == MISSED


def test_a_round_that_is_cut_in_two_is_no_gain_and_makes_no_other_block_worse():
    assert row_of(block(aggregates=60), block(), block())["during"] == pytest.approx(1.0)
    assert row_of(block(), block(aggregates=60, landed=15), block())["during"] == pytest.approx(0.5)


@pytest.mark.parametrize("figure", ["steps", "landed", "aggregates"])
def test_nothing_that_is_measured_is_no_bar_met(figure):
    assert row_of(block(**{figure: 0}), block(**{figure: 0}), block(**{figure: 0}))["bar"] == MISSED


def test_the_rows_take_the_minutes_that_they_are_given():
    seconds = block_seconds_for(20.0, [("drip", "replay", "confirm_late"), ("send_largest_heads",)], learning=True)
    taken = LEARNING_SECONDS + 2 * (STAR_SECONDS + AFTER_SECONDS) + 4 * AFTER_SECONDS + SECONDS["confirm_late"]
    assert taken + (2 + 3 * 2 + 1) * seconds == pytest.approx(1200.0)
    assert block_seconds_for(20.0, [OPEN_TO_ALL, ATTACKS_OF_MEMBERS], learning=True) >= 10.0
    with pytest.raises(ValueError, match="minutes at least"):
        block_seconds_for(1.0, [OPEN_TO_ALL], learning=False)
