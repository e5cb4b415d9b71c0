"""What is said beforehand of hosts that share one machine's cores: bounds, limits and directions of the formula."""

from __future__ import annotations

import pytest

from zmqtrain.planning.plans import Wish
from zmqtrain.planning.schedule import CODEC_WEIGHT, Schedule, busiest_allowed, fit

import shared_cores
from shared_cores import Shared, Work, fit_on, load_on, predict_on, slowdown, work_of

WISH = Wish(parameters=25_000_000, nodes=4, step_seconds=0.05, codec="ternary", fragments=1)


def _efficiency(wish: Wish, every: int, cores: int, step_cpu_seconds: float = 0.001) -> float:
    work = work_of(wish, "ternary", 1)
    load = load_on(wish, "ternary", 1, cores, work)
    return predict_on(load, work, Schedule(every, every), cores, step_cpu_seconds).prediction.efficiency


@pytest.mark.parametrize("busy", [0.0, 0.3, 0.75, 0.99])
def test_one_core_and_two_are_slower_by_what_the_textbook_says(busy: float) -> None:
    assert slowdown(busy, 1) == pytest.approx(1 / (1 - busy))
    assert slowdown(busy, 2) == pytest.approx(1 / (1 - busy**2))
    assert slowdown(busy, 64) <= slowdown(busy, 2)


def test_rare_exchanges_cost_little_and_work_that_fills_the_cores_costs_much_without_end() -> None:
    assert _efficiency(WISH, every=400, cores=2, step_cpu_seconds=0.0) > 0.99
    few, many = _efficiency(WISH, every=8, cores=2), _efficiency(WISH, every=8, cores=64)
    assert few < many < 1
    assert 0 < _efficiency(WISH, every=1, cores=1) < few


def test_no_period_is_shorter_than_the_work_of_all_hosts_takes() -> None:
    work = work_of(WISH, "ternary", 1)
    load = load_on(WISH, "ternary", 1, 2, work)
    shared = predict_on(load, work, Schedule(1, 1), 2, 0.0)
    assert shared.prediction.period_steps * WISH.step_seconds >= work.of_all(4) / 2
    assert shared.busy <= 1
    alone = load_on(WISH, "ternary", 1, 64, work)
    assert alone.node_seconds == work.codec + work.sockets
    assert load.node_seconds + load.hub_seconds == pytest.approx(work.of_all(4) / 2)


def test_a_schedule_leaves_the_cores_a_fifth_of_their_time() -> None:
    work = work_of(WISH, "ternary", 1)
    few, many = (fit_on(load_on(WISH, "ternary", 1, cores, work), work, cores) for cores in (1, 64))
    assert few.every > many.every == fit(load_on(WISH, "ternary", 1, 64, work)).every
    assert (few.every - 1) * WISH.step_seconds < work.of_all(4) / busiest_allowed(4) <= few.every * WISH.step_seconds


def test_what_was_measured_takes_the_place_of_the_table_and_the_bytes_stay() -> None:
    table = work_of(WISH, "ternary", 1)
    twice = Work(*(2 * seconds for seconds in table))
    assert twice.of_all(4) == pytest.approx(2 * table.of_all(4))
    once, more = (load_on(WISH, "ternary", 1, 2, work) for work in (table, twice))
    assert more.hub_seconds == pytest.approx(2 * once.hub_seconds)
    assert (more.bytes_up, more.bytes_down) == (once.bytes_up, once.bytes_down)
    schedule = Schedule(32, 32)  # which both can keep
    slower, faster = (predict_on(*case, schedule, 2, 0.001) for case in ((more, twice), (once, table)))
    assert slower.busy > faster.busy
    assert slower.prediction.efficiency < faster.prediction.efficiency


def test_the_table_is_shared_out_among_codecs_sockets_and_rebase() -> None:
    table = work_of(WISH, "ternary", 1)
    assert all(seconds > 0 for seconds in table[:-1])
    assert table.of_all(4, shards=2) == pytest.approx(table.of_all(4) + table.hub + table.hub_sockets)
    codecs = 4 * table.codec + table.hub
    assert table.of_all(4, weight=0.5) == pytest.approx(table.of_all(4) - codecs / 2)
    later = work_of(WISH, "ternary", 1, in_flight=2)
    assert later.codec > table.codec
    assert later[1:] == pytest.approx(table[1:])


def test_aggregates_of_fewer_deltas_come_more_often_and_cost_more() -> None:
    all_of_them = work_of(WISH, "ternary", 1)
    half = all_of_them._replace(deltas=2.0)
    load = load_on(WISH, "ternary", 1, 2, all_of_them)
    together, apart = (predict_on(load, work, Schedule(40, 40), 2, 0.0) for work in (all_of_them, half))
    assert apart.prediction.period_steps == together.prediction.period_steps / 2
    assert apart.prediction.efficiency < together.prediction.efficiency


def _late(shared: Shared) -> float:
    return 40 * WISH.step_seconds * (1 / shared.prediction.efficiency - 1)


def test_an_efficiency_is_over_a_step_that_only_sleeps() -> None:
    nothing = Work(0.0, 0.0, 0.0, 0.0, 0.0)
    load = load_on(WISH, "ternary", 1, 64, nothing)
    shared = predict_on(load, nothing, Schedule(40, 40), 64, 0.005)
    assert _late(shared) == pytest.approx(40 * 0.005 + load.held_seconds)


def test_what_a_thread_does_beside_its_own_rebase_takes_longer() -> None:
    nothing = Work(0.0, 0.0, 0.0, 0.0, 0.0)
    load = load_on(WISH, "ternary", 1, 2, nothing)
    short, long = (
        predict_on(load, nothing._replace(rebase=rebase), Schedule(40, 40), 64, 0.0) for rebase in (0.064, 6.4)
    )
    assert _late(short) == pytest.approx(load.held_seconds + 0.001 / 64)
    assert _late(long) == pytest.approx(load.held_seconds * (1 + 1 / 64))


def test_each_step_waits_for_half_a_turn_of_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(0.0, 0.3, 0.0, 0.0, 0.0)  # none of it of nicer threads
    load = load_on(WISH, "ternary", 1, 2, work)
    waiting = predict_on(load, work, Schedule(40, 40), 2, 0.0)
    more = slowdown(waiting.busy, 2) - 1
    assert _late(waiting) == pytest.approx(load.held_seconds * (1 + more) + 40 * 0.002 * more)
    monkeypatch.setattr(shared_cores, "TURN_SECONDS", 0.0)
    assert _late(predict_on(load, work, Schedule(40, 40), 2, 0.0)) < _late(waiting)


def test_the_codecs_of_nicer_threads_hold_training_up_by_their_weight() -> None:
    mine, nicer = Work(0.0, 0.3, 0.0, 0.0, 0.0), Work(0.3, 0.0, 0.0, 0.0, 0.0)
    loads = [load_on(WISH, "ternary", 1, 2, work) for work in (mine, nicer)]
    alike, ahead = (
        predict_on(load, work, Schedule(40, 40), 2, 0.0) for load, work in zip(loads, (mine, nicer), strict=True)
    )
    assert ahead.prediction.efficiency > alike.prediction.efficiency
    assert pytest.approx(1 / 3, abs=0.01) == CODEC_WEIGHT
