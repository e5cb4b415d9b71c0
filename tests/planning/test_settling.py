"""That plans settle: the planner of a broker before nodes whose exchanges take longer than their parts say.

The nodes are a queue: an exchange occupies the slowest stage for `stage` seconds, takes `whole` seconds from an offer
to its application where nothing waits, and as many are in flight as k and d allow (Little's law). An offer that must
wait is put off by a whole k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from tests.planning.test_auto import GIGABIT, MODEL, TERNARY, Meter, auto, crew
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import count_values
from zmqtrain.planning.plans import LoadPlanner
from zmqtrain.planning.schedule import Schedule
from zmqtrain.protocol.messages import replace_fields
from zmqtrain.protocol.rounds import AfterQuorum
from zmqtrain.protocol.schedules import MOST_PUT_OFF, Replanning, Timetable
from zmqtrain.transport.pacing import LinkShare

STEP_SECONDS, LOOK_SECONDS = 0.05, 0.5
assert count_values(MODEL) == 25_000_000


@dataclass
class Run:
    """A run's schedules, one after the other, and what its nodes do under them. noise: of each look, as a share."""

    stage: float
    whole: float
    settings: RunSettings
    noise: float = 0.03
    random: Random = field(default_factory=lambda: Random(7))

    def __post_init__(self) -> None:
        self.timetable = Timetable(self.settings)
        planner = LoadPlanner(self.settings, LinkShare(GIGABIT), Meter(0.02))
        self.machine = Replanning(self.timetable, planner, AfterQuorum())
        self.members = crew(4, exchange_seconds=0.08)
        self.now = self.exchanges = self.refused = 0.0
        self.said: list[Schedule] = []
        self.put_off = self.age = 0.0

    def live(self, seconds: float) -> Run:
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.look()
        return self

    def look(self) -> None:
        version = 1 + int(self.exchanges)
        held = self.timetable.at(version)
        noisy = 1 + self.noise * self.random.uniform(-1, 1)
        period = max(held.every * STEP_SECONDS, self.stage * noisy, self.whole * noisy / held.offers_in_flight)
        waits = period > held.every * STEP_SECONDS * (1 + 1e-9)
        self.age = held.offers_in_flight * period if waits else max(held.delay * STEP_SECONDS, self.whole * noisy)
        self.put_off = 1 - held.every * STEP_SECONDS / period
        self.now += LOOK_SECONDS
        self.exchanges += LOOK_SECONDS / period
        self.refused += LOOK_SECONDS / period * self.put_off / (1 - self.put_off)
        for member in self.members:
            assert member.report is not None
            member.contributions = int(self.exchanges)
            member.report = replace_fields(
                member.report, age_steps=self.age / STEP_SECONDS, offers_refused=int(self.refused)
            )
        if (schedule := self.machine.look(version, MODEL, self.members, self.now)) is not None:
            self.said.append(Schedule(schedule.every, schedule.delay))


@pytest.mark.parametrize("stage", [0.1, 0.265, 0.4, 0.8])
@pytest.mark.parametrize("whole", [0.3, 0.7, 1.5])
def test_k_and_d_settle_within_half_a_minute_where_no_offer_is_put_off_and_stay(stage: float, whole: float) -> None:
    run = Run(stage, max(stage, whole), auto(fragments=1, **TERNARY)).live(60.0)
    settled = list(run.said)
    assert run.put_off <= MOST_PUT_OFF and 1 <= len(settled) <= 3
    assert settled[-1].every * STEP_SECONDS < 1.5 * max(stage, whole / 3) + 0.2, "of few in flight both may be too slow"
    run.live(400.0)
    assert run.said == settled


def test_what_was_learnt_is_tried_again_after_a_while_and_ever_more_rarely() -> None:
    run = Run(0.4, 0.7, auto(fragments=1, **TERNARY)).live(60.0)
    begun = len(run.said)
    run.live(3600.0)
    assert begun < len(run.said) <= begun + 2 * 3 and run.said[-1] in run.said[:begun]


@pytest.mark.parametrize("stage", [0.35, 0.45])
def test_where_a_configured_k_is_too_small_no_longer_d_is_planned_for_it(stage: float) -> None:
    run = Run(stage, 0.5, auto(fragments=1, every=4, **TERNARY)).live(20.0)
    begun, age = list(run.said), run.age
    run.live(600.0)
    assert run.said == begun and run.age == pytest.approx(age, rel=0.1)
    assert run.machine.offers.put_off > MOST_PUT_OFF and run.machine.fits[0] > 4


def test_load_that_comes_later_is_found_and_load_that_has_gone_is_forgotten() -> None:
    run = Run(0.1, 0.3, auto(fragments=1, **TERNARY)).live(60.0)
    alone = run.said[-1]
    run.stage, run.whole = 0.4, 0.9
    assert run.live(60.0).put_off <= MOST_PUT_OFF and run.said[-1].every > alone.every
    run.stage, run.whole = 0.1, 0.3
    assert run.live(900.0).said[-1] == alone
