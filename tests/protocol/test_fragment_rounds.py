"""A round for each fragment, where the rule has it so."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from zmqtrain.core.types import PeerId
from zmqtrain.protocol.rounds import FIRST_GRACE_SECONDS, FragmentRounds, Rounds, release_rule_from_spec

A, B, C, SILENT = PeerId("a"), PeerId("b"), PeerId("c"), PeerId("silent")
LIVE = {A, B}
FOUR = {A, B, C, SILENT}


@dataclass(frozen=True)
class Part:
    fragment: int
    number: int = 0


def rounds(rule, together=False):
    return FragmentRounds(release_rule_from_spec(rule), together)


def test_a_quorum_awaits_every_fragment_alone():
    waiting = rounds("quorum:count=2")
    waiting.add(A, Part(0), 0.0)
    waiting.add(B, Part(1), 1.0)
    assert waiting.due_at(LIVE) == 5.0 and waiting.take(LIVE, 4.0) == []
    waiting.add(A, Part(1), 2.0)
    assert waiting.due_at(LIVE) == 2.0
    assert waiting.take(LIVE, 2.0) == [(B, Part(1)), (A, Part(1))] and waiting.came == (1.0, 2.0)
    assert waiting.pending == ((A, Part(0)),)


def test_the_round_that_was_due_first_is_taken_first():
    waiting = rounds("quorum:count=2")
    for fragment, now in ((2, 1.0), (0, 2.0)):
        waiting.add(A, Part(fragment), now)
        waiting.add(B, Part(fragment), now)
    assert [part.fragment for _, part in waiting.take(LIVE, 3.0)] == [2, 2]
    assert [part.fragment for _, part in waiting.take(LIVE, 3.0)] == [0, 0]
    assert waiting.take(LIVE, 3.0) == [] and waiting.due_at(LIVE) is None


@pytest.mark.parametrize("rule", ["all", "immediately", "count:contributions=2", "bounded:staleness=0"])
def test_the_other_rules_have_one_round_of_whatever_comes(rule):
    waiting = rounds(rule)
    waiting.add(A, Part(0), 0.0)
    waiting.add(B, Part(1), 0.0)
    assert {part.fragment for _, part in waiting.take(LIVE, 0.0)} == {0, 1}


# ---------------------------------------------------------------------- the grace of a quorum


@pytest.mark.parametrize("fragments", [1, 2, 8])
def test_the_grace_is_at_most_a_share_of_the_steps_between_two_offers_however_many_fragments_there_are(fragments):
    waiting, graces = rounds("quorum:count=2,share=0.5"), []
    for number in range(4 * fragments):
        now = 0.5 * number
        waiting.add(A, Part(number % fragments), now), waiting.add(B, Part(number % fragments), now)
        graces.append(waiting.due_at(FOUR) - now)
        assert len(waiting.take(FOUR, now + FIRST_GRACE_SECONDS)) == 2
    assert graces == [FIRST_GRACE_SECONDS] * 2 + [0.25] * (4 * fragments - 2)


def test_how_often_nodes_send_is_known_once_they_have_sent_twice_whichever_fragments():
    waiting = rounds("quorum:count=2,share=0.5")
    for fragment, now, due in ((0, 0.0, 0.5), (1, 0.25, 0.5)):
        waiting.add(A, Part(fragment), now), waiting.add(B, Part(fragment), now)
        assert waiting.due_at(FOUR) == due, "the constant of the first round"
    assert [part.fragment for _, part in waiting.take(FOUR, 0.5)] == [0, 0]
    assert waiting.due_at(FOUR) == 0.25 + 0.125
    waiting.take(FOUR, 0.5)
    waiting.add(A, Part(5), 0.75), waiting.add(B, Part(5), 0.75)
    assert waiting.due_at(FOUR) == 0.75 + 0.125


def test_where_an_exchange_carries_all_fragments_each_has_the_grace_that_it_would_have_alone():
    alone, waiting = rounds("quorum:count=2,share=0.5"), rounds("quorum:count=2,share=0.5", together=True)
    for number in range(6):
        now = float(number)
        alone.add(A, Part(0), now), alone.add(B, Part(0), now)
        for fragment in range(4):  # one after the other, in quick succession
            at = now + 0.01 * fragment
            waiting.add(A, Part(fragment), at), waiting.add(B, Part(fragment), at)
        graces = [waiting.due_at(FOUR) - now]
        for _ in range(4):
            due = waiting.due_at(FOUR)
            graces.append(due - now)
            assert len(waiting.take(FOUR, due)) == 2
        assert graces[0] == alone.due_at(FOUR) - now
        assert graces[1:] == pytest.approx([graces[0] + 0.01 * fragment for fragment in range(4)])
        alone.take(FOUR, now + FIRST_GRACE_SECONDS)


def test_how_late_nodes_have_been_with_one_fragment_is_not_said_of_another():
    waiting = rounds("quorum:count=2")
    for number in range(12):
        fragment, late = number % 2, (0.25, 0.0)[number % 2]
        for peer, now in ((A, number), (B, number), (C, number + late)):
            waiting.add(peer, Part(fragment), now)
        assert len(waiting.take(FOUR, number + 0.5)) == 3
    for fragment, now in ((0, 100.0), (1, 200.0)):
        waiting.add(A, Part(fragment), now), waiting.add(B, Part(fragment), now)
        grace = waiting.due_at(FOUR) - now
        assert grace == pytest.approx((0.25 * 1.03, 0.0)[fragment])
        waiting.take(FOUR, now + 5.0)


@pytest.mark.parametrize("seed", range(5))
def test_one_fragment_has_the_very_rounds_that_there_would_be_without_fragments(seed):
    random, rule = Random(seed), release_rule_from_spec("quorum:count=2,patience=3")
    ours, plain, now = FragmentRounds(rule), Rounds(rule), 0.0
    for number in range(400):
        now += random.expovariate(4.0)
        live = FOUR - {SILENT} if 100 < number < 300 else FOUR
        assert ours.due_at(live) == plain.due_at(live)
        assert ours.take(live, now) == plain.take(live, now)
        peer = random.choice([A, A, B, C])
        ours.add(peer, Part(0, number), now), plain.add(peer, Part(0, number), now)
