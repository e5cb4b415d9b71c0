"""The command `zmqtrain sim`: what it prints, what it writes, and what it says to a wrong file."""

from __future__ import annotations

import json

import pytest

from zmqtrain.cli import main

SCENARIO = """
evaluate_seconds = 0.5
[run]
program = "text"
program_arguments = { layers = 1, width = 16, heads = 2, context = 16, batch = 2, batches_per_unit = 4 }
every = 4
delay = 2
units = 6
start_nodes = 2
[[node]]
[[node]]
name = "slow"
slowness = 2
"""


@pytest.fixture
def scenario(tmp_path, monkeypatch, program):
    """A file; what it trains is the small program of these tests, for it is compiled in no time."""
    monkeypatch.setattr("zmqtrain.sim.run.load_scenario_program", lambda settings: program)
    file = tmp_path / "small.toml"
    file.write_text(SCENARIO)
    return file


def test_the_command_simulates_prints_and_writes(scenario, tmp_path, capsys):
    records = tmp_path / "records.jsonl"
    assert main(["sim", str(scenario), "--json", str(records), "--seed", "5"]) == 0
    out, err = capsys.readouterr()
    assert err == "", "the log of its broker and nodes is for --verbose"
    assert "node-0 joined" in out and "slow left" in out and "held-out" in out and "contributions" in out
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert lines[-1]["kind"] == "run_end" and lines[-1]["steps"] == 24
    assert {"step", "release", "evaluation", "membership", "node_end"} <= {line["kind"] for line in lines}


def test_a_wrong_scenario_is_one_sentence_and_the_exit_code_2(scenario, capsys):
    scenario.write_text(SCENARIO.replace("slowness", "slowmess"))
    assert main(["sim", str(scenario)]) == 2
    _, err = capsys.readouterr()
    assert "did you mean slowness" in err and "Traceback" not in err


def test_records_that_cannot_be_written_are_refused_before_the_run(scenario, tmp_path, capsys):
    assert main(["sim", str(scenario), "--json", str(tmp_path / "no" / "where.jsonl")]) == 2
    out, err = capsys.readouterr()
    assert "cannot write" in err and "joined" not in out
