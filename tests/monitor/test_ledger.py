"""The ledger: books that agree are exactly once, and each planted fault is found and named."""

from __future__ import annotations

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.ledger import Release, audit, computed_samples, releases_of
from zmqtrain.monitor.records import record, release_facts
from zmqtrain.protocol.effects import Contribution, Reduce

A, B = "pc-a#1", "pc-b#2"


def joins(peer, run="run-1"):
    return record("node", 0.0, node=peer[:4], peer=peer, run=run)


def offers(*sequences):
    return [record("offer", 0.0, node="x", sequence=sequence) for sequence in sequences]


def applies(version, *landed, reset=False):
    return record("application", 0.0, node="x", version=version, landed=landed, reset=reset)


def steps(*samples):
    return [record("step", 0.0, node="x", step=number, samples=count) for number, count in enumerate(samples, 1)]


@pytest.fixture
def book():
    return [Release(1, ((A, 0), (B, 0)), 20), Release(2, ((A, 1),), 10), Release(3, ((B, 1), (A, 2)), 20)]


@pytest.fixture
def lives():
    end = record("node_end", 0.0, node="x")
    return [
        [joins(A), *offers(0, 1, 2), applies(1, 0), applies(2, 1), applies(3, 2), *steps(8, 16, 24, 30), end],
        [joins(B), *offers(0, 1), applies(1, 0), applies(2), *steps(10, 20)],  # killed before it heard of its second
    ]


def test_books_that_agree_are_exactly_once(book, lives):
    found = audit(book, lives)
    assert found.faults == ()
    assert (found.releases, found.contributions, found.acknowledged, found.unheard) == (3, 5, 4, 1)
    assert (found.samples, found.computed, found.lives) == (50, 30 + 30, 2)
    assert found.goodput == pytest.approx(50 / 60)
    assert found.verdict == "exactly once: 4 acknowledged contributions in 3 releases"


def test_what_a_later_life_of_the_hub_says_again_is_no_fault(book, lives):
    assert audit([*book, *book[1:]], lives) == audit(book, lives)


def test_a_version_with_a_part_of_a_pipelines_turn_is_a_fault(lives):
    def turn(number, *parts):
        return tuple(("pc-a", number, part) for part in parts)

    whole = [Release(1, ((A, 0), (B, 0)), turns=turn(1, 0, 1)), Release(2, ((A, 1), (B, 1)), turns=turn(2, 0, 1))]
    assert not audit(whole, []).faults
    torn = [whole[0], Release(2, ((A, 1),), turns=turn(2, 0)), Release(3, ((B, 1),), turns=turn(2, 1))]
    faults = audit(torn, []).faults
    assert len(faults) == 2 and "version 2 holds 1 of the 2 parts of turn 2 of the pipeline of pc-a" in faults[0]


PLANTED = {
    "landed twice: in versions 1 and 4": lambda book, lives: book.append(Release(4, ((A, 0),))),
    "version 2 holds a contribution twice": lambda book, lives: book.__setitem__(1, Release(2, ((A, 1), (A, 1)))),
    "version 2 was released twice: of pc-a's 1, and of pc-b's 1": lambda book, lives: book.append(
        Release(2, ((B, 1),))
    ),
    "version 2 is in no book": lambda book, lives: book.pop(1),
    "told with version 1 that its offer 0 landed: it is in none": lambda book, lives: book.__setitem__(
        0, Release(1, ((B, 0),))
    ),
    "told with version 1 of its offer 1, which is in 2": lambda book, lives: lives[0].__setitem__(4, applies(1, 0, 1)),
    "told twice of its offer 0: with versions 1, 2": lambda book, lives: lives[0].__setitem__(5, applies(2, 1, 0)),
    "of its offer 7, which it never made": lambda book, lives: lives[0].insert(4, applies(1, 7)),
    "took back its offer 1 (lost), and it is in version 2: it counts twice": lambda book, lives: lives[0].insert(
        4, record("withdrawal", 0.0, node="x", sequence=1, encoded=1, reason="lost")
    ),
    "was never told that its offer 1 is in 2": lambda book, lives: lives[0].__setitem__(5, applies(2)),
    "version 2 holds offer 1 of pc-a, which never made it": lambda book, lives: lives[0].__setitem__(
        slice(1, 6), [*offers(0, 2), applies(1, 0), applies(2)]
    ),
}


@pytest.mark.parametrize("sentence", PLANTED)
def test_a_planted_fault_is_found_and_named(book, lives, sentence):
    PLANTED[sentence](book, lives)
    found = audit(book, lives)
    assert any(sentence in fault for fault in found.faults), found.faults
    assert found.verdict.startswith(f"{len(found.faults)} faults; the first: ")


def test_an_offer_whose_record_a_kill_cut_off_is_no_fault_and_a_later_life_may_hear_of_it(book, lives):
    lives[1] = [joins(B), *offers(0), applies(1, 0)]
    assert audit(book, lives).faults == ()
    lives.append([joins(B), *offers(2), applies(3)])
    assert audit(book, lives).faults == ()


def test_a_number_that_was_taken_back_may_be_used_again_by_a_life_that_goes_on_from_before(book, lives):
    lost = [
        *lives[1],
        record("withdrawal", 0.0, node="x", sequence=2, encoded=2, reason="lost"),
    ]  # the hub never heard of it
    assert any("took back its offer 2" in fault for fault in audit([*book, Release(4, ((B, 2),))], [lost]).faults)
    assert audit([*book, Release(4, ((B, 2),))], [lives[0], lost, [joins(B), *offers(2), applies(4, 2)]]).faults == ()


def test_who_was_told_to_begin_again_holds_nothing_that_landed(book, lives):
    lives[0][5] = applies(2, reset=True)
    assert audit(book, lives).faults == ()


def test_the_samples_of_a_life_begin_where_it_was_resumed_and_one_that_was_cut_off_made_one_step_more():
    assert computed_samples([*steps(110, 120, 130)]) == 40
    assert computed_samples([*steps(110, 120, 130), record("node_end", 0.0, node="x")]) == 30
    assert computed_samples([]) == 0


def test_the_releases_of_a_brokers_record_are_a_book():
    reduce = Reduce(7, (0,), (Contribution(A, 3, 0, 64, 0.1, 6, 1),), 2, False)
    assert releases_of([record("release", 1.0, **release_facts(reduce, 2)), record("run_end", 2.0)]) == [
        Release(7, ((A, 3),), 64)
    ]


def test_a_life_that_does_not_say_whose_it_is_is_refused(book):
    with pytest.raises(ConfigError, match="does not say whose it is"):
        audit(book, [offers(0)])
