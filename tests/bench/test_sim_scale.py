"""Predictions for many nodes: the simulator and the formula say nearly the same, and the rows hold both."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.planning.plans import Wish, make_plan

from sim_scale import main, predict_cases, simulate_plan

WISH = Wish(parameters=25_000_000, nodes=4, step_seconds=0.1, codec="ternary", fragments=2)


def test_a_simulated_run_does_what_its_plan_predicts():
    plan = make_plan(WISH)
    run, predicted = simulate_plan(plan), plan.prediction
    assert run.efficiency == pytest.approx(predicted.efficiency, abs=0.01)
    assert run.model_period_steps == pytest.approx(predicted.model_period_steps, rel=0.1)
    assert run.age_steps == pytest.approx(predicted.age_steps, abs=1)
    assert run.port == pytest.approx(predicted.port_up, rel=0.1)


def test_offers_that_do_not_fit_are_put_off_and_no_more_than_the_formula_says_for_the_last_node():
    plan = make_plan(replace(WISH, every=1, delay=1))  # one at a time, and each takes several steps
    run = simulate_plan(plan)
    assert 2 < run.period_steps <= plan.prediction.period_steps
    assert run.efficiency == pytest.approx(plan.prediction.efficiency, abs=0.03)


def test_a_plan_with_several_shards_is_not_simulated():
    with pytest.raises(ConfigError, match="knows one hub"):
        simulate_plan(make_plan(replace(WISH, shards=2)))


def test_every_row_has_the_formula_and_those_of_one_hub_the_simulator_beside_it():
    rows = list(predict_cases(WISH, (2, 3), (1e9, 2.5e9), (1, 2), simulated=2))
    assert [(row["hub"], row["shards"], row["nodes"], "sim_age" in row) for row in rows] == [
        (1.0, 1, 2, True), (1.0, 1, 3, False), (1.0, 2, 2, False), (1.0, 2, 3, False),
        (2.5, 1, 2, True), (2.5, 1, 3, False), (2.5, 2, 2, False), (2.5, 2, 3, False),
    ]  # fmt: skip


def test_the_command_prints_draws_and_writes(tmp_path, capsys):
    arguments = ["--params", "1M", "--nodes", "2", "--hub-link", "1gbit", "--shards", "1", "--step-ms", "20"]
    main([*arguments, "--figure", str(tmp_path / "scale.png"), "--json", str(tmp_path / "scale.json")])
    assert "sim_efficiency" in capsys.readouterr().out
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    (row,) = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert row["nodes"] == 2 and row["sim_age"] > 0


def test_a_wrong_question_is_one_sentence(capsys):
    with pytest.raises(SystemExit, match="sim_scale: --params is written like 100M"):
        main(["--params", "many"])
