"""The bench of seconds to a loss: where a curve crosses, which runs are made, what a table says of them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain import RunSettings
from zmqtrain.core.errors import ConfigError

import time_to_loss
from time_to_loss import Bench, Row, Table, best_rates, default_rows, hand_row, power_bytes, sweep_rows
from time_to_loss_rows import Job, Place, crossing, parse_settings, place_as, ring_link, run_here, run_settings

PROGRAM = "width=16,layers=1,heads=2,context=16,batch=2"
RATES = {("alone", 1): 3e-3, ("ideal", 2): 3e-3, ("auto", 2): 3e-3, ("diloco", 2): 3e-3}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text("to be, or not to be, that is the question\n" * 200)
    return str(path)


# ---------------------------------------------------------------------- the curve


def test_a_falling_line_crosses_where_it_does() -> None:
    curve = [(float(second), 3.0 - 0.1 * second) for second in range(20)]
    assert crossing(curve, 2.05, 3.0) == pytest.approx(9.5, abs=0.1)
    assert crossing(curve, 1.0, 3.0) == inf
    assert crossing(curve[:9], 2.05, 3.0) == inf


def test_one_low_score_is_no_crossing() -> None:
    curve = [(float(second), 2.2) for second in range(20)]
    curve[10] = (10.0, 2.0)
    assert crossing(curve, 2.05, 3.0) == inf


def test_scores_at_uneven_times_count_by_the_time_between_them() -> None:
    even = [(0.5 * number, 3.0 - 0.05 * number) for number in range(40)]
    uneven = [point for number, point in enumerate(even) if number % 5 in (0, 1)]
    assert crossing(uneven, 2.0, 3.0) == pytest.approx(crossing(even, 2.0, 3.0), abs=0.05)


def test_a_curve_of_one_score_crosses_nowhere() -> None:
    assert crossing([], 2.0, 3.0) == crossing([(0.0, 1.0)], 2.0, 3.0) == inf


# ---------------------------------------------------------------------- rows and places


def test_a_row_by_hand_takes_any_setting_of_a_run() -> None:
    name, rate, settings = parse_settings("name=dense|rate=2e-3|codec=int8|every=4|delay=auto|fresh_moments=false")
    assert (name, rate) == ("dense", 2e-3)
    assert settings == {"codec": "int8", "broadcast_codec": "int8", "every": 4, "delay": -1, "fresh_moments": False}
    row = hand_row("name=dense|every=4", Job(kind="simulated", rate=3e-3))
    assert (row.name, row.job.rate, json.loads(row.job.settings)) == ("dense", 3e-3, {"every": 4})


@pytest.mark.parametrize("text", ["codec", "codec=int8|codec=int4", "colour=red", "every=-3", "codec=none"])
def test_a_row_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_settings(text)


def test_auto_is_told_nothing_of_how_to_exchange(text_file: str) -> None:
    rows = default_rows(4, Place(), PROGRAM, text_file, "simulated", RATES)
    (auto,) = (row.job for row in rows if row.name == "auto")
    settings, plain = run_settings(auto), RunSettings()
    told = {field.name for field in fields(plain) if getattr(settings, field.name) != getattr(plain, field.name)}
    assert told <= {"program", "program_arguments", "seed", "start_nodes", "initial", "evaluate_seconds"}


def test_power_sgd_sends_two_factors_of_each_matrix_that_they_are_smaller_than() -> None:
    assert power_bytes([(100, 50), (7,), (4, 4)], rank=4) == (4 * 4 * 100, 4 * (4 * 50 + 7 + 16))


def test_a_port_is_as_slow_as_a_ring_s_ratio_says() -> None:
    link = ring_link(24, 4, 1000, 0.1)
    assert 2 * 3 / 4 * 4 * 1000 / (link / 8) == pytest.approx(24 * 0.1)


def test_a_larger_model_moves_as_many_bytes_for_its_port_in_a_step() -> None:
    place = place_as("25M", 250_000, hub_cores=8)
    assert (place.scale, place.hub_cores, place.step_milliseconds) == (100, 8, 50)
    assert 250_000 / place.link == pytest.approx(25e6 / 1e9)
    assert place.held_milliseconds > 0
    assert place_as("25M", 250_000, held_milliseconds=0.0).held_milliseconds == 0


def test_a_sweep_has_at_least_24_settings_and_no_two_alike() -> None:
    for full in (False, True):
        rows = sweep_rows(Job(kind="simulated"), full)
        assert len({row.job for row in rows}) == len({row.name for row in rows}) == len(rows) > 24


# ---------------------------------------------------------------------- runs


@pytest.fixture
def arguments(text_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a bench at toy size whose runs are in a file."""
    monkeypatch.setattr(time_to_loss, "keep_compiled", lambda folder: None)
    monkeypatch.setattr(time_to_loss, "BEST_RATE", RATES)
    sizes = ["--simulated", "--nodes", "2", "--seeds", "1", "--targets", "5.0", "4.5", "--max-steps", "160"]
    return [*sizes, "--program", PROGRAM, "--text", text_file, "--json", str(tmp_path / "runs.jsonl")]


@pytest.mark.nightly
def test_runs_are_made_once_and_the_table_has_all_rows(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("0/2", "1/2", "0/1"):
        time_to_loss.main([*arguments, "--part", part])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert len({line["identity"] for line in lines}) == len(lines) == 5  # one, ideal, auto, slow, DiLoCo
    time_to_loss.main([*arguments, "--table", "--rows", str(tmp_path / "rows.json")])
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert len(rows) == 9
    reached = "s to 5.00"
    assert rows["slow, ideal barrier"][reached] == pytest.approx(2 * rows["ideal"][reached])
    assert rows["DDP fp32"][reached] > rows["DDP fp16"][reached] > rows["ideal"][reached]
    assert rows["auto"]["speed-up 5.00"] == pytest.approx(rows["one"][reached] / rows["auto"][reached])
    assert rows["ideal"]["share 5.00"] == 1 and "limit of a ring" in rows["DDP fp16"]["exchange"]
    assert rows["auto"]["k"] > 0 and rows["auto"]["chosen"] and rows["auto"]["MB up"] > 0
    capsys.readouterr()
    time_to_loss.main([*arguments, "--table", "--markdown"])
    assert "| DDP fp16 | 2 | 1 | ideal |" in capsys.readouterr().out
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 5


def test_a_run_that_ended_at_an_easier_loss_is_made_again(tmp_path: Path) -> None:
    job = Job(kind="ideal", nodes=2, until=2.05)
    line = {"identity": job.identity(), "until": 2.1, "ended": "target", "max_steps": 100, "kind": "ideal"}
    for until, ended, steps, is_there in (
        (2.1, "target", 100, False),
        (2.05, "target", 100, True),
        (2.1, "max_steps", 100, False),
        (2.1, "max_steps", 2500, True),
    ):
        file = tmp_path / "lines"
        file.write_text(json.dumps({**line, "until": until, "ended": ended, "max_steps": steps}) + "\n")
        assert (Bench([file]).line(job) is not None) == is_there


def test_larger_codecs_and_a_held_thread_cost_time(text_file: str) -> None:
    settings = json.dumps({"every": 1, "delay": 1, "codec": "int8", "broadcast_codec": "int8", "fragments": 1})
    place = Place(link=1e9)
    job = Job(
        kind="simulated", nodes=2, rate=3e-3, program=PROGRAM, data=text_file, settings=settings, place=place, until=0.0
    )
    free = run_here(replace(job, max_steps=40))
    held = run_here(replace(job, max_steps=40, place=replace(place, held_milliseconds=50.0)))
    slow = run_here(replace(job, max_steps=40, place=replace(place, scale=1e5)))
    assert free["ended"] == "max_steps" and free["period_steps"] == pytest.approx(1, abs=0.1)
    assert held["steps"] == pytest.approx(free["steps"] / 1.5, abs=2)
    assert slow["age_steps"] > free["age_steps"] or slow["offers_refused"] > free["offers_refused"]
    assert free["curve"][-1][1] < free["curve"][0][1]


# ---------------------------------------------------------------------- the table


def line_of(job: Job, seconds_to: float, **rest: Any) -> dict[str, Any]:
    """A line whose curve falls from 4 through 2 at a point of its axis."""
    axis = np.linspace(0, 2 * seconds_to, 200)
    curve = [(float(x), float(4 - 2 * x / seconds_to)) for x in axis]
    facts = {"kind": job.kind, "until": 2.0, "ended": "target", "max_steps": 1, "steps": 10, "curve": curve}
    return {"identity": job.identity(), **facts, **rest}


def test_ratios_are_of_runs_with_the_same_seed(tmp_path: Path) -> None:
    one, ours = Job(kind="alone", until=2.0), Job(kind="simulated", nodes=4, until=2.0)
    chosen = {"every": 1, "delay": 2, "codec": "int8", "broadcast_codec": "int4", "fragments": 1, "outer": "sgd"}
    lines = []
    for seed, (steps, seconds) in enumerate([(1000, 50.0), (1200, 40.0)]):
        lines.append(line_of(replace(one, seed=seed), steps))
        lines.append(line_of(replace(ours, seed=seed), seconds, chosen=chosen))
    file = tmp_path / "lines"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = Table(Bench([file]), [Row(name="one", job=one), Row(name="auto", job=ours)], range(3), Place(), [2.0])
    assert table.ratios("one", "auto", 2.0) == pytest.approx([2.0, 3.0], rel=0.01)
    row = table.as_rows()[1]
    assert row["seeds"] == 2 and row["speed-up 2.00"] == pytest.approx(2.5, rel=0.01)
    assert row["speed-up 2.00 sd"] == pytest.approx(0.707, rel=0.03)
    assert row["chosen"] == "k=1 d=2 f=1 int8 up, int4 down sgd"
    (bar,) = table.judge()
    assert bar[""] == "missed" and bar["measured"] == pytest.approx(2.5, rel=0.01)


def test_a_row_with_a_run_that_did_not_reach_the_loss_has_no_mean(tmp_path: Path) -> None:
    one = Job(kind="alone", until=2.0)
    short = line_of(replace(one, seed=1), 1000)
    short["curve"] = short["curve"][:50]
    file = tmp_path / "lines"
    file.write_text(json.dumps(line_of(one, 1000)) + "\n" + json.dumps(short) + "\n")
    (row,) = Table(Bench([file]), [Row(name="one", job=one)], range(2), Place(), [2.0]).as_rows()
    assert row["seeds"] == 2 and row.get("s to 2.00") is None


def test_the_best_rate_is_the_one_that_reached_the_last_loss_first_or_came_nearest() -> None:
    table = [
        {"row": "ideal", "N": 4, "rate": rate, "last loss": loss, "s to 2.00": seconds}
        for rate, loss, seconds in ((1e-3, 2.1, inf), (2e-3, 2.0, 40.0), (3e-3, 2.0, 35.0))
    ] + [
        {"row": "auto", "N": 4, "rate": rate, "last loss": loss, "s to 2.00": inf}
        for rate, loss in ((1e-3, 2.1), (2e-3, 2.05))
    ]
    assert best_rates(table, [2.1, 2.0]) == {("ideal", 4): 3e-3, ("auto", 4): 2e-3}


@pytest.mark.nightly
def test_a_sweeps_settings_by_hand_end_soon_after_auto(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_to_loss, "SWEEP_CODECS", ("ternary",))
    monkeypatch.setattr(time_to_loss, "SWEEP_SHAPES", ((1, 1, 1), (4, 4, 1)))
    monkeypatch.setattr(time_to_loss, "SWEEP_LEAST", 2)
    time_to_loss.main([*arguments, "--sweep", "--sweep-target", "5.0", "--only", "auto", "ternary"])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    auto, *by_hand = lines
    assert auto["settings"] == "{}" and len(by_hand) == 2
    assert {line["max_steps"] for line in by_hand} == {min(160, ceil(1.25 * auto["steps"]))}
    assert "of 2 settings by hand" in " ".join(capsys.readouterr().out.split())
