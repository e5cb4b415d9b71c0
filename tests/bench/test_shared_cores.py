"""What is said beforehand of hosts that share one machine's cores: bounds, limits and directions of the formula."""

from __future__ import annotations

import pytest

from zmqtrain.runtime.planning.planning import Wish
from zmqtrain.runtime.planning.schedule import Schedule

from shared_cores import load_on, predict_on, slowdown

WISH = Wish(parameters=25_000_000, nodes=4, step_seconds=0.05, codec="ternary", fragments=1)


def _efficiency(wish: Wish, every: int, cores: int, step_cpu_seconds: float = 0.001) -> float:
    load, work = load_on(wish, "ternary", 1, cores)
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
    load, work = load_on(WISH, "ternary", 1, 2)
    shared = predict_on(load, work, Schedule(1, 1), 2, 0.0)
    assert shared.prediction.period_steps * WISH.step_seconds >= work / 2
    assert shared.busy < 1
    alone = load_on(WISH, "ternary", 1, 64)[0]
    assert alone.node_seconds < load.node_seconds == pytest.approx(work / 2)
