"""Which deltas are too large to be one of training's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import ConfigError
from zmqtrain.strategies import norms
from zmqtrain.strategies.norms import FEWEST, PATIENCE, NormGate, is_suspicious, norm_gate_from_text

STEPS = 8


def say(gate, peer, fragment, norm, steps, dense=False, **named):
    """Judge a delta and have it counted; return why it may not pass."""
    judgement = gate.judge(peer, fragment, norm, steps, rest=named.pop("rest", 1.0 if dense else 0.0), **named)
    gate.count(judgement)
    return judgement.why


def gate_of(*peers, rounds=FEWEST, norm=1.0, fragment=0, **named):
    """A gate that has let pass so many deltas of each of these nodes."""
    gate = NormGate(10.0)
    for _ in range(rounds):
        for peer in peers:
            assert say(gate, peer, fragment, norm, STEPS, **named) == ""
    return gate


@pytest.mark.parametrize("times", [100, 1e6, 1e12, 1e38])
def test_a_delta_that_is_far_too_large_is_refused(times):
    gate = gate_of("a", "b", "c")
    assert "times that of what came before it" in say(gate, "a", 0, times, STEPS) or times > 1e15
    assert say(gate, "a", 0, times, STEPS)
    assert say(gate, "b", 0, 1.0, STEPS) == ""


@pytest.mark.parametrize("norm", [float("inf"), float("nan"), 1e16])
def test_no_delta_is_too_early_to_be_absurd(norm):
    assert "no training makes such a delta" in say(NormGate(10.0), "a", 0, norm, STEPS)


def test_a_few_times_the_usual_is_let_through_and_so_is_nothing_at_all():
    gate = gate_of("a", "b")
    assert say(gate, "a", 0, 9.0, STEPS) == ""
    assert say(gate, "a", 0, 0.0, STEPS) == ""
    assert say(gate, "a", 0, 1e-30, STEPS) == ""


@given(st.lists(st.floats(0.3, 3.0), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30))
def test_norms_that_wander_are_followed_wherever_they_go(factors, seed):
    random, gate, level = np.random.default_rng(seed), NormGate(10.0), 1.0
    for factor in factors:
        level = min(max(level * factor, 1e-12), 1e12)
        for peer in ("a", "b", "c"):
            # nodes follow one another: whoever comes first is judged by what came before, and is less than ten times it
            apart = float(np.exp(0.3 * np.clip(random.normal(), -2, 2)))
            assert say(gate, peer, 0, level * apart, STEPS) == ""


def test_a_node_that_was_away_may_be_as_many_times_as_large_as_it_made_steps():
    gate = gate_of("a", "b")
    assert say(gate, "a", 0, 900.0, STEPS)
    assert say(gate, "a", 0, 900.0, 100 * STEPS) == ""


def test_every_fragment_of_a_node_that_was_away_stands_for_all_its_steps():
    gate = NormGate(10.0)
    for _ in range(FEWEST):
        for fragment in (0, 1):
            for peer in ("a", "b"):
                assert say(gate, peer, fragment, 1.0, STEPS) == ""
    assert say(gate, "b", 0, 400.0, STEPS)
    assert say(gate, "a", 0, 400.0, 100 * STEPS) == ""  # its first offer says the steps
    assert say(gate, "a", 1, 400.0, STEPS) == ""  # the next one holds what they have moved there


def test_however_many_steps_it_says_a_delta_may_not_be_absurd():
    gate = gate_of("a", "b")
    assert say(gate, "a", 0, 1e6, 1 << 40)


def test_a_nodes_first_delta_is_judged_as_any_other():
    gate = gate_of("a", "b")
    assert say(gate, "new", 0, 9.0, STEPS) == ""
    assert say(gate, "newer", 0, 90.0, STEPS)


def test_the_rest_that_a_sparse_codec_left_behind_is_no_measure_for_others():
    gate = gate_of("a", "b")
    for fragment_end in range(FEWEST):
        assert say(gate, "a", 0, 90.0, 0, rest=10.0) == "", fragment_end
    assert say(gate, "a", 0, 90.0, STEPS)
    assert say(gate, "b", 0, 900.0, 0, rest=10.0)


def test_the_rest_of_a_codec_that_leaves_little_is_judged_as_any_delta():
    gate = gate_of("a", "b")
    assert say(gate, "a", 0, 9.0, 0, dense=True) == ""
    assert say(gate, "b", 0, 90.0, 0, dense=True)


def test_where_all_nodes_have_changed_it_is_the_run_that_did():
    gate = gate_of("a", "b", "c")
    assert say(gate, "a", 0, 100.0, STEPS)
    assert say(gate, "b", 0, 100.0, STEPS)
    assert say(gate, "c", 0, 100.0, STEPS) == ""
    assert say(gate, "a", 0, 100.0, STEPS) == ""


def test_of_two_nodes_one_that_is_wrong_is_not_the_others_measure():
    gate = gate_of("a", "b")
    for _ in range(PATIENCE - 1):
        assert say(gate, "a", 0, 1e4, STEPS)
        assert say(gate, "b", 0, 1.0, STEPS) == ""


def test_who_trains_alone_is_not_locked_out_for_ever():
    gate = gate_of("a")
    refused = 0
    while say(gate, "a", 0, 1e3, STEPS):
        refused += 1
    assert refused == PATIENCE
    assert say(gate, "a", 0, 1e3, STEPS) == ""


def converged(fell_to=0.0009, rounds=200):
    """The gate of two nodes' run of Adam: it began with norms of 1.2, and hardly moves any more."""
    gate = NormGate(10.0)
    for norm in np.geomspace(1.2, fell_to, rounds):
        for peer in ("a", "b"):
            assert say(gate, peer, 0, float(norm), STEPS) == ""
    for _ in range(norms.WINDOW):
        assert say(gate, "b", 0, fell_to, STEPS) == ""
    return gate


@pytest.mark.parametrize("sizes", [[0.0287, 0.0287, 0.0287, 0.02, 0.01], [1.24, 1.1, 0.9, 0.9, 0.5, 0.2]])
def test_in_a_run_that_has_converged_a_restarted_node_and_a_new_one_are_heard(sizes):
    gate = converged()
    gate.forget("a")
    for size in sizes:
        assert say(gate, "a", 0, size, STEPS) == ""
        assert say(gate, "b", 0, 0.0009, STEPS) == ""


@pytest.mark.parametrize("times", [100, -100, 1e6, 1e38])
def test_in_a_run_that_has_converged_what_is_far_over_its_beginning_is_refused(times):
    gate = converged()
    say(gate, "new", 0, 1.0, STEPS)
    assert say(gate, "new", 0, abs(times) * 1.2, STEPS)
    assert say(gate, "b", 0, 0.0009, STEPS) == ""


@pytest.mark.parametrize(("times", "enormous"), [(100, False), (1e5, True), (1e38, True)])
def test_it_says_how_far_over_what_is_let_through_a_delta_is(times, enormous):
    judgement = gate_of("a", "b").judge("a", 0, times, STEPS)
    assert judgement.why and judgement.is_enormous is enormous


def test_a_gate_that_is_wrong_lets_what_it_turned_away_be_larger_by_one_factor_at_a_time():
    gate = gate_of("a", "b")
    assert say(gate, "a", 0, 300.0, STEPS)
    gate.forget("a")
    gate.rebase(["a"])
    assert say(gate, "a", 0, 90.0, STEPS) == ""
    assert say(gate, "a", 0, 300.0, STEPS), "three hundred times as large at once"
    gate.rebase(["a"])
    for _ in range(3):
        assert say(gate, "a", 0, 300.0, STEPS) == ""
    assert say(gate, "a", 0, 1e5, STEPS)


def test_what_was_enormous_is_never_taken_for_usual():
    gate = gate_of("a", "b")
    assert say(gate, "a", 0, 1e6, STEPS)
    gate.rebase(["a"])
    assert say(gate, "a", 0, 1e6, STEPS)


def test_a_gate_that_is_made_anew_remembers_how_large_deltas_once_were():
    gate = NormGate(10.0)
    gate.remember(converged().memory())
    for _ in range(FEWEST):
        assert say(gate, "b", 0, 0.0009, STEPS) == ""
    assert say(gate, "new", 0, 1.24, STEPS) == ""
    assert say(gate, "new", 0, 120.0, STEPS)


def test_fragments_are_judged_each_by_its_own():
    gate = gate_of("a", "b")
    assert say(gate, "a", 1, 1e3, STEPS) == ""


def test_a_node_that_begins_again_is_new():
    gate = gate_of("a", "b")
    assert say(gate, "a", 0, 400.0, 100 * STEPS) == ""
    gate.forget("a")
    assert say(gate, "a", 0, 400.0, 100 * STEPS) == ""  # of its own steps, none of a former life


def test_nodes_that_come_and_go_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(norms, "NODES_KEPT", 3)
    gate = NormGate(10.0)
    for number in range(10):
        say(gate, f"pc-{number}", 0, 1.0, STEPS)
    assert len(gate._nodes) == 3
    assert len(gate._fragments[0].latest) == 3
    for number in range(10):
        say(gate, "pc", 0, 1.0, STEPS)
        say(gate, f"pc-{number}", 0, 500.0, STEPS)
    assert len(gate._fragments[0].turned_away) <= 3


@pytest.mark.parametrize(("text", "read"), [("auto", "auto"), ("none", "none"), ("10", 10.0), ("2.5", 2.5)])
def test_the_setting_is_a_word_or_a_number(text, read):
    assert norm_gate_from_text(text) == read


@pytest.mark.parametrize("text", ["", "1", "-3", "inf", "nan", "ten"])
def test_a_setting_that_is_neither_says_what_to_type(text):
    with pytest.raises(ConfigError, match='say "auto", "none", or a number over 1'):
        norm_gate_from_text(text)


def test_to_judge_moves_nothing():
    gate = gate_of("a", "b", rounds=FEWEST // 2 - 1)
    for _ in range(3 * norms.WINDOW):
        assert gate.judge("c", 0, 1e6, STEPS).why == "" and gate.judge("c", 1, 1.0, STEPS).why == ""
    assert gate.memory() == {} and [*gate._fragments] == [0] and [*gate._nodes] == ["a", "b"]
    gate = gate_of("a", "b")
    before = gate.memory()
    for _ in range(3 * PATIENCE):
        assert gate.judge("a", 0, 1e4, STEPS).why
    assert say(gate, "a", 0, 9.0, STEPS) == "" and gate.memory() == before


def of_round(**levels):
    """Judge the first delta of each node once all of its round are here; return who is out."""
    gate = NormGate(10.0)
    judged = [gate.judge(peer, 0, norm, STEPS, score=score) for peer, (norm, score) in levels.items()]
    for judgement in judged:
        assert judgement.why == "" and judgement.young
        gate.count(judgement)
    again = [gate.judge_again(judgement) for judgement in judged]
    for judgement, second in zip(judged, again, strict=True):
        if second.why:
            gate.leave_out(judgement)
    out = [one.peer for one in again if one.why]
    assert {one.peer for one in gate._fragments[0].accepted} == levels.keys() - out
    return out


NAN = float("nan")


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("times", [30.0, 3e3, 1e6])
def test_a_first_delta_is_judged_with_those_of_its_round(order, times):
    sound = {"a": (1.0, 2.2), "b": (1.3, 2.2)}
    bad = {"bad": (times, NAN)}
    assert of_round(**(bad | sound if order == "first" else sound | bad)) == ["bad"]
    assert of_round(**(bad | {"worse": (9 * times, NAN)} | sound | {"c": (0.9, NAN)})) == ["bad", "worse"]


def test_first_deltas_that_differ_by_less_than_the_factor_all_count():
    assert of_round(a=(1.0, NAN), b=(4.0, NAN), c=(9.0, NAN)) == []
    assert of_round(a=(5.0, NAN)) == []


def test_of_two_first_deltas_the_larger_is_out_unless_its_own_loss_is_the_better():
    assert of_round(a=(1.0, NAN), b=(40.0, NAN)) == ["b"]
    assert of_round(a=(1.0, 2.2), b=(40.0, 6.0)) == ["b"]
    assert of_round(a=(1.0, 2.2), b=(40.0, 1.1)) == []


def test_the_names_of_one_key_are_one_voter():
    gate = NormGate(10.0)
    voters = {"x1": "x", "x2": "x", "x3": "x", "a": "a", "b": "b"}
    judged = [gate.judge(p, 0, 2600.0 if v == "x" else 1.0, STEPS, voter=v) for p, v in voters.items()]
    for judgement in judged:
        gate.count(judgement)
    assert [one.peer for one in map(gate.judge_again, judged) if one.why] == ["x1", "x2", "x3"]
    gate = gate_of("a", "b")
    for _ in range(3):
        for name in ("x1", "x2", "x3", "x4"):
            assert say(gate, name, 0, 90.0, STEPS, voter="x")


def test_however_many_have_changed_one_jump_is_of_one_factor_at_most():
    gate = gate_of("a", "b", "c")
    for _ in range(PATIENCE // 3):
        for peer in ("a", "b", "c"):
            assert say(gate, peer, 0, 2600.0, STEPS)


def test_a_node_on_probation_is_not_believed_that_its_steps_make_its_deltas_large():
    gate = gate_of("a", "b")
    gate.forget("a", probation=True)
    assert say(gate, "a", 0, 400.0, 100 * STEPS)
    gate.forget("a")  # it has connected again
    assert say(gate, "a", 0, 400.0, 100 * STEPS)
    for _ in range(norms.PROBATION):
        assert say(gate, "a", 0, 1.0, STEPS) == ""
    assert say(gate, "a", 0, 400.0, 100 * STEPS) == ""


def test_nor_is_one_whose_own_loss_is_far_behind_the_others():
    gate = gate_of("a", "b", score=0.2)
    assert say(gate, "c", 0, 400.0, 100 * STEPS, score=0.5)
    assert say(gate, "c", 0, 400.0, 100 * STEPS, score=0.3) == ""


def test_of_a_node_that_is_found_to_diverge_what_was_too_large_is_known():
    gate = NormGate(10.0)
    others = [gate.judge(peer, 0, 1.0, STEPS) for peer in ("a", "b", "c")]
    ordinary, large = gate.judge("bad", 0, 2.0, STEPS), gate.judge("bad", 0, 8.0, STEPS)
    assert not is_suspicious(ordinary, others) and is_suspicious(large, others) and not is_suspicious(large, [])


def test_a_rate_that_warms_up_while_nodes_cannot_exchange_is_no_divergence():
    gate = NormGate(10.0)
    for step in range(1, 4):  # the rate rises by a 50th each step, and a slow link takes no delta after the third
        for peer in "abcdefgh":
            assert say(gate, peer, 0, step / 50, 1) == ""
    assert say(gate, "b", 0, 0.05, 55) == ""
    assert say(gate, "b", 0, 30.0, 5) == "", "750 times the usual, of five steps at the whole rate"
    assert say(gate, "c", 0, 1e6, 60), "but not anything"


def test_a_founder_that_has_trained_alone_while_others_fetched_is_no_divergence():
    """Its rate has warmed up: each of its 60 steps is far larger than the others' first ones."""
    gate = NormGate(10.0)
    first = gate.judge("founder", 0, 60.0, 60)
    others = [gate.judge(peer, 0, 0.02, 1) for peer in "bcd"]
    for one in (first, *others):
        assert one.young and not one.why
        gate.count(one)
    assert not gate.judge_again(first).why
    diverging = gate.judge("e", 0, 20.0, 1)
    gate.count(diverging)
    assert gate.judge_again(diverging).why, "of one step it is a thousand times too large"


def test_a_newcomer_is_not_measured_by_the_steps_of_those_that_hardly_move_any_more():
    """Their last deltas stand for 60 steps, after which all had learned what there was to learn; its own for four."""
    gate = NormGate(10.0)
    for steps in (4, 25, 60):
        for peer in "ab":
            assert say(gate, peer, 0, 0.2, steps) == ""
    newcomer, wrong = gate.judge("c", 0, 0.17, 4), gate.judge("d", 0, 3.0, 4)
    for one in (newcomer, wrong):
        assert one.young
        gate.count(one)
    assert gate.judge_again(newcomer).why == ""
    assert gate.judge_again(wrong).why, "15 times as large as what is usual, of fewer steps"
