"""The experiments on asynchrony run, each case differs from every other, and no run is made twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest

from tests.grids import nightly

import asynchrony
from asynchrony_cases import EXPERIMENTS
from perceptron import Perceptron

DATA = {"mnist": "digits", "shakespeare": "stdlib"}


@pytest.mark.parametrize("experiment", list(EXPERIMENTS))
def test_no_two_cases_of_an_experiment_are_one(experiment):
    counted = Counter(asynchrony.identity({**asdict(case), "seed": 0}) for case in EXPERIMENTS[experiment]())
    assert max(counted.values()) == 1


@pytest.mark.parametrize(
    ("experiment", "method", "nodes"),
    [
        ("delay", "overwriting", 4),
        ("stragglers", "default (quorum, dynamic k)", 4),
        *nightly(
            ("timed", "Async-Timed", 3),
            ("nodes", "naive", 2),
            ("initial", "naive mean", 4),
            ("selection", "median", 4),
        ),
    ],
)
def test_a_case_of_each_experiment_trains(experiment, method, nodes):
    cases = [case for case in EXPERIMENTS[experiment]() if (case.task, case.method) == ("mnist", method)]
    case = next(case for case in cases if case.nodes == nodes)
    seconds = min(case.max_seconds, 3.0)
    line = asynchrony.run_case(replace(case, steps=32, max_seconds=seconds), 0, DATA)
    assert line["loss"] < 2.5 and line["samples"] > 0
    assert all(len(point) == 2 for point in line["curve"])


def test_a_run_whose_line_is_there_is_not_made_again(tmp_path, capsys):
    file = tmp_path / "lines.jsonl"
    arguments = ["--experiment", "selection", "--task", "mnist", "--method", "all", "--group", "all healthy"]
    arguments += ["--seeds", "1", "--steps", "8", "--images", "digits", "--results", str(file)]
    asynchrony.main(arguments)
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["method"] == "all" and "all healthy" in capsys.readouterr().out
    asynchrony.main(arguments)
    assert len(file.read_text().splitlines()) == 1


def test_a_warm_run_goes_on_from_a_checkpoint_with_the_data_that_follows():
    case = next(case for case in EXPERIMENTS["delay"]() if (case.task, case.start) == ("mnist", "warm"))
    short = replace(asynchrony.TASKS["mnist"], warm_steps=16)
    before = asynchrony.TASKS["mnist"]
    asynchrony.TASKS["mnist"] = short
    try:
        line = asynchrony.run_case(replace(case, steps=8), 7, DATA)
    finally:
        asynchrony.TASKS["mnist"] = before
    assert line["loss"] < 2.2


def test_the_perceptron_sets_aside_what_nodes_are_scored_by():
    program = Perceptron(batch=8)
    params = program.init(0)
    units = [batch["image"] for unit in range(program.units_per_epoch) for batch in program.batches(unit)]
    trained = {image.tobytes() for images in units for image in images}
    scored = {image.tobytes() for image in program._scored[0]}
    assert not trained & scored and program.score(params) > 0
