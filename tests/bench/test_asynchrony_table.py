"""The tables about asynchrony, of invented lines: pairs by seed, runs that failed, times to a target, and bars."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples

from asynchrony_figures import Bar, Figure, first_time, pair, percent_over, smooth
from asynchrony_table import draw, markdown, show, summarise

LOSSES = (2.0, 2.5, 3.0)
"""Of the reference, by seed: far apart, so that a mean that is not paired shows."""


def run(experiment: str, method: str, seed: int, loss: float | None, **more: Any) -> dict[str, Any]:
    """Return a line of results as it is read from a file."""
    case = {
        "experiment": experiment, "task": "mnist", "method": method, "settings": {}, "group": "", "start": "scratch",
        "nodes": 4, "steps": 0, "max_seconds": 0.0, "seed": seed, "seconds": 1.0,
    }  # fmt: skip
    outcome = {"failed": "SimError: it stood still"} if loss is None else {"accuracy": None, "curve": []}
    return json.loads(json.dumps({**case, "loss": loss, **outcome, **more}))


def grid(
    method: str = "default", k: int = 8, d: int = 0, percent: float | None = 0.0, **more: Any
) -> list[dict[str, Any]]:
    """Return the runs of one cell of the delay's grid, so many percent over `LOSSES`; None: all failed."""
    losses = [None if percent is None else loss * (1 + percent / 100) for loss in LOSSES]
    where = {"settings": {"every": k, "delay": d}, "group": f"k={k}", **more}
    return [run("delay", method, seed, loss, **where) for seed, loss in enumerate(losses)]


def falling(seconds_to_one: float, points: int = 41) -> list[list[float]]:
    """Return a curve over 100 s that falls evenly from 2, reaches 1 after so long and goes on."""
    times = [100 * i / (points - 1) for i in range(points)]
    return [[t, 2 - t / seconds_to_one] for t in times]


def timed_runs(experiment: str, method: str, seconds: list[float | None], **more: Any) -> list[dict[str, Any]]:
    """Return a run for each seed whose curve reaches 1 after so many seconds; None: it failed."""
    return [
        run(experiment, method, seed, None if one is None else 1.0, curve=falling(one) if one else [], **more)
        for seed, one in enumerate(seconds)
    ]


# ---------------------------------------------------------------------- figures


def test_a_figure_is_paired_by_seed_before_it_is_averaged():
    values = {seed: 1.1 * loss for seed, loss in enumerate(LOSSES)}
    figure = pair(values, dict(enumerate(LOSSES)), percent_over)
    assert figure.mean == pytest.approx(10)
    assert figure.deviation == pytest.approx(0)
    assert figure.text("+.1f") == "+10.0 ± 0.0"


def test_a_seed_that_the_reference_was_not_run_with_is_no_pair():
    assert pair({0: 2.0, 7: 9.0}, {0: 1.0}, percent_over) == Figure((100.0,))
    assert pair({7: 9.0}, {}, percent_over).text("+.1f") == ""


def test_failed_runs_and_failed_references_are_counted_and_said():
    figure = pair({0: 1.0, 1: None, 2: 1.0, 3: None}, {0: 1.0, 1: 1.0, 2: None, 3: None}, percent_over)
    assert (len(figure.values), figure.failed, figure.unpaired, figure.seeds) == (1, 2, 1, 4)
    assert figure.text("+.1f") == "+0.0, 2 of 4 diverged, reference has none in 1 of 4"
    assert figure.cost == math.inf
    assert Figure((), failed=3).text(".1f") == "diverged"
    assert Figure((), unpaired=3).text(".1f") == "reference has none"
    assert Figure((), unpaired=3).cost == -math.inf
    assert Figure().cost is None


def test_a_figure_of_fewer_seeds_than_others_says_so():
    assert Figure((1.0, 2.0)).text(".1f", seeds=3) == "1.5 ± 0.7, seeds: 2"


def test_a_bar_says_whether_it_is_met_even_without_a_number():
    assert Bar("cost", 1.0, 1.0).text == "cost: +1.00 % (at most 1 %): met"
    assert Bar("cost", 1.01, 1.0).text == "cost: +1.01 % (at most 1 %): NOT met"
    assert Bar("cost", math.inf, 1.0).text == "cost: a run has none (at most 1 %): NOT met"
    assert Bar("cost", -math.inf, 1.0).text == "cost: only the reference has none (at most 1 %): met"
    assert Bar("cost", None, 1.0).text == "cost: no run (at most 1 %): not measured"


# ---------------------------------------------------------------------- curves


def test_a_running_mean_is_of_the_seconds_too_and_ends_with_the_last_points():
    curve = [[10.0 * i, 9.0 - i, 50.0] for i in range(7)]  # seconds, loss, accuracy
    assert smooth(curve) == [(20.0, 7.0), (30.0, 6.0), (40.0, 5.0)]


def test_a_curve_ends_where_it_is_no_longer_finite_and_a_short_one_is_none():
    curve = [[i, 1.0] for i in range(6)]
    assert len(smooth([*curve, [6, math.nan], [7, 1.0]])) == 2
    assert len(smooth([*curve, [6, None], [7, 1.0]])) == 2
    assert smooth(curve[:4]) == []


@settings(max_examples=examples(30))
@given(st.floats(0.01, 0.99), st.floats(1, 100), st.integers(2, 20))
def test_the_first_time_is_interpolated(share, seconds, points):
    line = [(seconds * i / (points - 1), 1 - i / (points - 1)) for i in range(points)]
    assert first_time(line, 1 - share) == pytest.approx(share * seconds)


def test_the_first_time_is_the_first_of_several_and_none_if_never_reached():
    assert first_time([(0, 3), (1, 1), (2, 3), (3, 0)], 2) == 0.5
    assert first_time([(5, 1), (6, 2)], 1) == 5
    assert first_time([(0, 3), (1, 2.5)], 2) is None
    assert first_time([], 2) is None


# ---------------------------------------------------------------------- 1: the delay


def test_the_grid_is_over_d_0_of_the_same_k_and_its_bars_are_of_the_worst_k():
    lines = [
        *grid(k=8), *grid(k=8, d=2, percent=0.2), *grid(k=8, d=4, percent=0.5), *grid(k=8, d=8, percent=6),
        *grid(k=2, percent=10), *grid(k=2, d=1, percent=10 * 1.009 + 0.9), *grid(k=2, d=2, percent=10),
    ]  # fmt: skip
    (table,) = summarise("delay", lines)
    assert [column.name for column in table.columns] == [
        "loss at d = 0", "d = k/4, %", "d = k/2, %", "d = k, %"
    ]  # fmt: skip
    assert list(table.rows) == ["2", "8"]
    assert table.rows["2"]["loss at d = 0"].mean == pytest.approx(1.1 * 2.5)
    assert table.rows["2"]["d = k/4, %"].seeds == 0
    assert table.rows["2"]["d = k/2, %"].mean == pytest.approx(0.9)
    assert table.rows["8"]["d = k/2, %"].mean == pytest.approx(0.5)
    half, whole = table.bars
    assert (half.value, half.most, half.verdict) == (pytest.approx(0.9), 1, "met")
    assert (whole.value, whole.most, whole.verdict) == (pytest.approx(6), 4, "NOT met")


def test_the_bars_of_a_task_are_its_own_and_a_diverged_run_misses_them():
    text = {"task": "shakespeare"}
    lines = [*grid(**text), *grid(d=4, percent=2.9, **text), *grid(d=8, percent=None, **text)]
    half, whole = summarise("delay", lines)[0].bars
    assert (half.most, half.verdict) == (3, "met")
    assert (whole.most, whole.verdict) == (5, "NOT met")


def test_other_methods_stand_in_a_table_of_their_k_over_the_default_at_d_0():
    lines = [*grid(), *grid(d=4, percent=1), *grid("overwriting", percent=5), *grid("overwriting", d=4, percent=50)]
    _, table = summarise("delay", lines)
    assert "k = 8" in table.title
    assert list(table.rows) == ["default", "overwriting"]
    assert table.rows["default"]["d = 0, %"].mean == 0
    assert table.rows["overwriting"]["d = 0, %"].mean == pytest.approx(5)
    assert table.rows["overwriting"]["d = k/2, %"].mean == pytest.approx(50)


def test_runs_of_other_length_start_and_number_of_nodes_are_not_compared():
    lines = [*grid(), *grid(nodes=8), *grid(start="warm"), *grid(steps=64), *grid(d=4, percent=1, nodes=8)]
    lines += [*grid(k=32), *grid(k=32, steps=2048, percent=10), *grid(k=32, d=16, steps=2048, percent=10)]
    tables = {table.title: table for table in summarise("delay", lines)}
    assert len(tables) == 3
    (eight,) = (table for title, table in tables.items() if "N = 8" in title)
    assert eight.rows["8"]["d = k/2, %"].mean == pytest.approx(1)
    (four,) = (table for title, table in tables.items() if "N = 4" in title and "scratch" in title)
    assert list(four.rows) == ["8", "8, 64 steps", "32", "32, 2,048 steps"]
    assert four.rows["32, 2,048 steps"]["d = k/2, %"].mean == pytest.approx(0)


def test_a_later_line_of_the_same_run_counts_and_other_settings_are_said(capsys):
    lines = [
        *grid(),
        *grid(d=4, percent=70, rate=2.0),
        *grid(d=4, percent=1, rate=1.0),
        *grid(d=4, percent=1, rate=1.0),
    ]
    (table,) = summarise("delay", lines)
    assert table.rows["8"]["d = k/2, %"].mean == pytest.approx(1)
    show(lines)
    assert "delay: 3 runs are passed over" in capsys.readouterr().out


# ---------------------------------------------------------------------- 2 and 3: times to a loss


def test_the_times_to_the_target_are_over_those_of_bsp_and_of_the_best():
    lines = [
        *timed_runs("stragglers", "immediately", [30.0, 40.0, 50.0]),
        *timed_runs("stragglers", "default (quorum, dynamic k)", [36.0, 48.0, 60.0]),
        *timed_runs("stragglers", "SSP, s=1", [400.0, 20.0, None]),
        *timed_runs("stragglers", "BSP", [90.0, 90.0, 90.0]),
    ]
    (table,) = summarise("stragglers", lines)
    assert list(table.rows) == [
        "BSP",
        "default (quorum, dynamic k)",
        "immediately",
        "SSP, s=1",
    ]  # the order of the cases
    assert table.rows["BSP"]["seconds to target"].mean == pytest.approx(95)  # the mean time of the last five points
    ours = table.rows["default (quorum, dynamic k)"]
    assert ours["of the best"].mean == pytest.approx(1.2)
    assert ours["of BSP's"].mean == pytest.approx(48 / 90)
    late = table.rows["SSP, s=1"]["seconds to target"]
    assert (len(late.values), late.failed) == (1, 2)
    assert "2 of 3 not reached" in late.text(".1f")
    assert [bar.verdict for bar in table.bars] == ["met", "NOT met"]
    assert table.notes[0].endswith("the first to reach it: immediately")


def test_without_bsp_there_is_no_target_and_no_verdict():
    (table,) = summarise("stragglers", timed_runs("stragglers", "default (quorum, dynamic k)", [50.0]))
    assert table.rows["default (quorum, dynamic k)"]["seconds to target"].seeds == 0
    assert [bar.verdict for bar in table.bars] == ["not measured", "not measured"]


def test_timed_and_fixed_minibatches_are_compared_at_losses_that_both_reach():
    late = [
        *timed_runs("timed", "Async-FMB", [120.0, 110.0], group="late", contributions=30, version=10),
        *timed_runs("timed", "Async-Timed", [60.0, 55.0], group="late", contributions=27, version=15),
    ]
    calm = timed_runs("timed", "Async-FMB", [80.0, None], group="calm")
    with_calm = summarise("timed", [*late, *calm])
    (table,) = (table for table in with_calm if "late" in table.title)
    assert table.notes[1] == "messages in an update: Async-FMB 3.00 ± 0.00; Async-Timed 1.80 ± 0.00"
    assert len(table.rows) == 3
    assert all(1.2 < float(level) < 2 for level in table.rows)
    for row in table.rows.values():
        assert row["Async-FMB / Async-Timed"].mean == pytest.approx(2)
        assert row["Async-FMB, s"].failed == 0
    (alone,) = (table for table in with_calm if "calm" in table.title)
    assert all(row["Async-FMB, s"].failed == 1 for row in alone.rows.values())
    assert all(row["Async-Timed, s"].seeds == 0 for row in alone.rows.values())


# ---------------------------------------------------------------------- 4, 5, 6


def test_the_accuracy_is_compared_with_that_of_one_node_of_the_same_method():
    lost = {1: 0.0, 4: 0.5, 16: 0.9}
    lines = [
        run("nodes", method, seed, 0.1, nodes=count, steps=16384 // count, accuracy=97 + seed - factor * points)
        for method, factor in (("ours, default", 1), ("naive", 10))
        for count, points in lost.items()
        for seed in range(3)
    ]
    lines += [run("nodes", "ours, immediately", 0, loss, nodes=n, accuracy=10) for n, loss in ((1, 0.1), (4, math.nan))]
    accuracy, points = summarise("nodes", lines)
    assert list(accuracy.rows) == ["1", "4", "16"]
    assert list(points.rows) == ["4", "16"]
    assert accuracy.rows["16"]["ours, default"].mean == pytest.approx(97.1)
    assert points.rows["16"]["naive"].mean == pytest.approx(-9)
    assert points.rows["16"]["naive"].deviation == pytest.approx(0)
    verdicts = {bar.name.partition(":")[0]: (bar.value, bar.verdict) for bar in points.bars}
    assert verdicts == {
        "ours, immediately": (math.inf, "NOT met"),
        "ours, default": (pytest.approx(0.9), "met"),
    }


def test_initial_parameters_are_compared_with_the_founders_in_the_same_group():
    groups = {"equal quality": (0.0, 0.8), "one bad": (30.0, -2.0), "one diverged": (None, 0.0)}
    lines = [
        run("initial", method, seed, None if percent is None else loss * (1 + percent / 100), group=group)
        for group, (founder, best) in groups.items()
        for seed, loss in enumerate(LOSSES)
        for method, percent in (("founder", founder), ("best", best))
    ]
    (table,) = summarise("initial", lines)
    best = table.rows["best"]
    assert best["equal quality: % over founder"].mean == pytest.approx(0.8)
    assert best["one bad: % over founder"].mean == pytest.approx(100 * (0.98 / 1.3 - 1))
    assert best["one diverged: % over founder"].text("+.1f") == "reference has none"
    assert table.rows["founder"]["one diverged: loss"].text(".2f") == "diverged"
    assert [bar.verdict for bar in table.bars] == ["met", "met", "met"]


def test_selections_are_compared_with_all_or_with_the_healthy_alone():
    percents = {
        "all healthy": {"all": 0.0, "sign majority": 0.5, "median": 2.0},
        "one corrupted": {"all": 40.0, "sign majority": 3.5, "median": 2.0, "the healthy alone": 0.0},
    }
    lines = [
        run("selection", method, seed, loss * (1 + percent / 100), group=group, nodes=3 + ("alone" not in method))
        for group, of_group in percents.items()
        for method, percent in of_group.items()
        for seed, loss in enumerate(LOSSES)
    ]
    (table,) = summarise("selection", lines)
    assert table.rows["median"]["all healthy: % over all"].mean == pytest.approx(2)
    assert table.rows["all"]["one corrupted: % over the healthy alone"].mean == pytest.approx(40)
    assert table.rows["the healthy alone"]["all healthy: loss"].seeds == 0
    assert [(bar.most, bar.verdict) for bar in table.bars] == [(1, "met"), (3, "NOT met")]
    assert table.notes == ("within both limits: none",)


# ---------------------------------------------------------------------- pages and pictures


@pytest.fixture
def all_lines():
    """A few lines of each experiment, some of them of failed runs."""
    return [
        *grid(), *grid(d=4, percent=3), *grid("overwriting", d=4, percent=400), *grid("averaging", d=4, percent=None),
        *timed_runs("stragglers", "BSP", [90.0, 80.0]), *timed_runs("stragglers", "SSP, s=1", [None, 70.0]),
        *timed_runs("stragglers", "SSP, s=4", [None]),
        *timed_runs("timed", "Async-FMB", [90.0]), *timed_runs("timed", "Async-Timed", [60.0]),
        *(run("nodes", "naive", 0, loss, nodes=n, accuracy=90) for n, loss in ((1, 0.1), (4, 0.2), (16, None))),
        *(run("initial", method, 0, 0.1, group="one bad") for method in ("founder", "best")),
        *(run("selection", "all", seed, 0.1, group="all healthy") for seed in range(2)),
        run("selection", "median", 0, 99.0, group="all healthy"), run("selection", "best 2", 0, None),
    ]  # fmt: skip


def test_all_tables_are_printed_and_written_as_markdown(all_lines, capsys):
    show(all_lines)
    printed, page = capsys.readouterr().out, markdown(all_lines)
    for text in ("overwriting", "diverged", "NOT met", "not reached", "points over N = 1", "% over the healthy alone"):
        assert text in printed
        assert text in page
    assert "| overwriting |  |  | +400.00 ± 0.00 |" in page
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert len(tables) == 8
    assert all(len({line.replace("\\|", "").count("|") for line in table}) == 1 for table in tables)


def test_each_experiment_that_has_lines_has_a_picture(all_lines, tmp_path):
    draw(all_lines, tmp_path / "pictures")
    names = sorted(file.name for file in (tmp_path / "pictures").iterdir())
    assert names == sorted(f"{one}.png" for one in ("delay", "stragglers", "timed", "nodes", "initial", "selection"))


def test_a_sweep_that_has_just_begun_has_its_tables_and_pictures(tmp_path, capsys):
    lines = [
        run("nodes", "naive", 0, 0.1, nodes=1, accuracy=90),
        run("timed", "Async-FMB", 0, 0.1, curve=[[0, 2.0], [1, 1.0]]),
        run("stragglers", "BSP", 0, None),
        run("delay", "default", 0, None, settings={"every": 8, "delay": 0}),
        run("selection", "best 2", 0, 0.1, group="all healthy"),
    ]
    show(lines)
    printed = capsys.readouterr().out
    assert "target: BSP's loss at its end, diverged; the first to reach it: none" in printed
    assert printed.count("not measured") == 2 + 2 + 2
    assert markdown(lines).count("not measured") == 2 + 2 + 2
    draw(lines, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_without_lines_there_is_nothing_to_show(tmp_path, capsys):
    show([])
    draw([], tmp_path)
    assert (capsys.readouterr().out, markdown([]), list(tmp_path.iterdir())) == ("", "", [])
