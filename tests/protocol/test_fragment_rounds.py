"""A round for each fragment, where the rule has it so."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zmqtrain.protocol.fragment_rounds import FragmentRounds
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.types import PeerId

A, B = PeerId("a"), PeerId("b")
LIVE = {A, B}


@dataclass(frozen=True)
class Part:
    fragment: int
    number: int = 0


def rounds(rule, fragments=3):
    return FragmentRounds[Part](release_rule_from_spec(rule), fragments)


def test_a_quorum_awaits_every_fragment_alone():
    waiting = rounds("quorum:count=2")
    waiting.add(A, Part(0), 0.0)
    waiting.add(B, Part(1), 1.0)
    assert waiting.due_at(LIVE) == 5.0 and waiting.take(LIVE, 4.0) == []
    waiting.add(A, Part(1), 2.0)
    assert waiting.due_at(LIVE) == 2.0
    assert waiting.take(LIVE, 2.0) == [(B, Part(1)), (A, Part(1))]
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
