"""What is said beforehand of hosts that share one machine's cores: bounds, limits and directions of the formula."""

from __future__ import annotations

import pytest

from zmqtrain.runtime.planning.planning import Wish
from zmqtrain.runtime.planning.schedule import Schedule

import shared_cores
from shared_cores import load_on, measure_pace, predict_on, slowdown

WISH = Wish(parameters=25_000_000, nodes=4, step_seconds=0.05, codec="ternary", fragments=1)


def _efficiency(wish: Wish, every: int, cores: int, step_cpu_seconds: float = 0.001) -> float:
    load, work = load_on(wish, "ternary", 1, cores, pace=1.0)
    return predict_on(load, work, Schedule(every, every), cores, step_cpu_seconds).prediction.efficiency


@pytest.mark.parametrize("busy", [0.0, 0.3, 0.75, 0.99])
def test_one_core_and_two_are_slower_by_what_the_textbook_says(busy: float) -> None:
    assert slowdown(busy, 1) == pytest.approx(1 / (1 - busy))
    assert slowdown(busy, 2) == pytest.approx(1 / (1 - busy**2))
    assert slowdown(busy, 64) <= slowdown(busy, 2)


def test_rare_exchanges_cost_little_and_work_that_fills_the_cores_costs_much_without_end() -> None:
    assert _efficiency(WISH, every=400, cores=2) > 0.99
    few, many = _efficiency(WISH, every=8, cores=2), _efficiency(WISH, every=8, cores=64)
    assert few < many < 1
    assert 0 < _efficiency(WISH, every=1, cores=1) < few


def test_no_period_is_shorter_than_the_work_of_all_hosts_takes() -> None:
    load, work = load_on(WISH, "ternary", 1, 2, pace=1.0)
    shared = predict_on(load, work, Schedule(1, 1), 2, 0.0)
    assert shared.prediction.period_steps * WISH.step_seconds >= work / 2
    assert shared.busy < 1
    alone = load_on(WISH, "ternary", 1, 64, pace=1.0)[0]
    assert alone.node_seconds < load.node_seconds == pytest.approx(work / 2)


def test_a_machine_at_half_the_pace_has_twice_the_work_and_the_same_bytes() -> None:
    (once, work), (twice, more) = (load_on(WISH, "ternary", 1, 2, pace) for pace in (1.0, 2.0))
    assert more == pytest.approx(2 * work)
    assert twice.held_seconds == pytest.approx(2 * once.held_seconds)
    assert twice.hub_seconds == pytest.approx(2 * once.hub_seconds)
    assert (twice.bytes_up, twice.bytes_down) == (once.bytes_up, once.bytes_down)


def test_the_pace_of_this_machine_is_measured_on_every_core_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cores, "PACE_VALUES", 100_000)
    assert measure_pace("ternary", 2) > 0
