"""The watch over a group: who is silent, who only seems so, and who is cut off himself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.protocol.failure_detector import (
    BEAT_SECONDS,
    VERDICT_SECONDS,
    Accuse,
    CutOff,
    Declare,
    FailureDetector,
)
from zmqtrain.protocol.groups import SILENCE_SECONDS

TICK = 0.05


class Watch:
    """A vigil whose time passes in ticks; `alive` are heard with every one."""

    def __init__(self, *ranks, alive=(), hub=True):
        self.vigil, self.now, self.found = FailureDetector(0.0), 0.0, []
        self.vigil.hub = hub
        self.alive, self.hub_alive, self.forgets = set(alive), hub, True
        for rank in ranks:
            self.vigil.watch(rank)

    def pass_time(self, seconds):
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            for rank in self.alive:
                self.vigil.heard(rank)
            if self.hub_alive:
                self.vigil.heard_hub()
            for finding in self.vigil.tick(self.now):
                self.found.append((self.now, finding))
                if isinstance(finding, Declare) and self.forgets:
                    self.vigil.forget(finding.rank)

    @property
    def findings(self):
        return [finding for _, finding in self.found]


def test_a_silent_rank_is_accused_once_and_the_hub_judges():
    watch = Watch(1, 2, alive=[2])
    watch.pass_time(SILENCE_SECONDS + 0.2)
    ((when, accusation),) = watch.found
    assert isinstance(accusation, Accuse) and accusation.rank == 1 and "silent" in accusation.why
    assert SILENCE_SECONDS < when < SILENCE_SECONDS + 0.2
    watch.vigil.forget(1)
    watch.pass_time(5.0)
    assert len(watch.found) == 1


@pytest.mark.parametrize("hub", [True, False])
def test_a_rank_that_stands_still_for_two_seconds_just_before_its_next_sign_of_life_is_not_accused(hub):
    watch = Watch(1, 2, alive=[1, 2], hub=hub)
    watch.pass_time(1.0)
    watch.alive = {2}
    watch.pass_time(BEAT_SECONDS + 2.0)
    watch.alive = {1, 2}
    watch.pass_time(1.0)
    assert watch.findings == []


def test_what_the_hub_does_not_answer_is_declared_in_less_than_three_seconds():
    watch = Watch(1, 2, alive=[2])
    watch.hub_alive = False
    watch.pass_time(4.0)
    assert [type(finding) for finding in watch.findings] == [Accuse, Declare]
    assert watch.found[1][0] < SILENCE_SECONDS + VERDICT_SECONDS + 3 * TICK < 3.0


def test_without_a_hub_a_silent_rank_is_declared_at_once():
    watch = Watch(1, 2, alive=[2], hub=False)
    watch.pass_time(SILENCE_SECONDS + 0.2)
    assert watch.findings == [Declare(1, f"silent for {SILENCE_SECONDS} s")]


def test_a_connection_that_is_gone_is_noticed_at_once_and_one_that_comes_back_is_not():
    watch = Watch(1, 2, alive=[1, 2])
    watch.vigil.reached(1, False)
    watch.vigil.reached(2, False)
    watch.pass_time(0.2)
    watch.vigil.reached(2, True)
    watch.pass_time(0.4)
    assert watch.findings == [Accuse(1, "its connection is gone")]


def test_who_was_stopped_himself_accuses_nobody_at_once():
    watch = Watch(1, 2, alive=[1, 2])
    watch.pass_time(1.0)
    watch.now += 60.0
    watch.vigil.tick(watch.now)
    watch.pass_time(3.0)
    assert watch.findings == []


def test_who_hears_nobody_is_the_one_that_is_cut_off():
    watch = Watch(1, 2, 3, alive=[1, 2, 3])
    watch.pass_time(1.0)
    watch.alive, watch.hub_alive = set(), False
    watch.pass_time(3.0)
    ended = [finding for finding in watch.findings if not isinstance(finding, Accuse)]
    assert ended and all(isinstance(finding, CutOff) for finding in ended)
    assert next(when for when, finding in watch.found if isinstance(finding, CutOff)) < 1.0 + 3.0


def test_of_two_without_a_hub_it_is_the_other_that_is_lost():
    watch = Watch(1, hub=False)
    watch.pass_time(3.0)
    assert watch.findings == [Declare(1, f"silent for {SILENCE_SECONDS} s")]


def test_who_is_not_watched_may_be_silent():
    watch = Watch()
    watch.vigil.heard(1)
    watch.vigil.reached(1, False)
    watch.pass_time(5.0)
    assert watch.findings == []


@given(st.lists(st.tuples(st.floats(0.0, 1.9), st.floats(0.0, 30.0)), max_size=20))
def test_whoever_is_heard_often_enough_is_never_accused_however_late_the_watch_is(steps):
    vigil, now = FailureDetector(0.0), 0.0
    vigil.watch(1)
    for attended, late in steps:
        for _ in range(round(attended / TICK)):
            now += TICK
            assert vigil.tick(now) == []
        now += late
        vigil.heard(1)
        assert vigil.tick(now) == []
        vigil.heard(1)


@pytest.mark.parametrize("silent", range(1, 4))
def test_all_that_are_silent_are_found(silent):
    watch = Watch(1, 2, 3, 4, alive=range(silent + 1, 5))
    watch.pass_time(SILENCE_SECONDS + 0.2)
    assert sorted(finding.rank for finding in watch.findings) == list(range(1, silent + 1))


@pytest.mark.parametrize("hub", [True, False])
def test_a_rank_that_nobody_forgets_is_declared_once_and_so_is_a_process_that_is_cut_off(hub):
    watch = Watch(1, 2, alive=[2], hub=hub)
    watch.forgets = watch.hub_alive = False
    watch.pass_time(SILENCE_SECONDS + 3.0)
    assert [finding.rank for finding in watch.findings if isinstance(finding, Declare)] == [1]
    watch.alive = set()
    watch.pass_time(SILENCE_SECONDS + 3.0)
    assert [type(finding) for finding in watch.findings].count(CutOff) == 1
