"""Scenarios from TOML: what can be said, and what is answered to what cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.monitor.records import write_records
from zmqtrain.sim.pipeline import PipelineScenario
from zmqtrain.sim.reading import read_scenario
from zmqtrain.sim.scenario import Scenario, SimNode
from zmqtrain.transport.memory import LinkModel

SCENARIOS = sorted((Path(__file__).parents[2] / "bench" / "scenarios").glob("*.toml"))

WHOLE = """
max_seconds = 60
evaluate_seconds = 2.5

[run]
program = "text"
program_arguments = { width = 32, tied = true }
every = 4
seed = 3

[link]
bits_per_second = 1e8
latency_seconds = 0.001

[[node]]
count = 2
step_seconds = 0.1

[[node]]
name = "slow"
count = 2
slowness = 4
straggler = [[0, 0.1, 1], [2, 0.5, 0.25]]

[[node]]
name = "other"
cut = [[1, 2.5]]
straggler = "cedar,message=0.05"
"""


@pytest.fixture
def read(tmp_path):
    def read(text, **named):
        file = tmp_path / "scenario.toml"
        file.write_text(text)
        return read_scenario(file, **named)

    return read


def test_a_whole_scenario(read):
    slow = {"slowness": 4.0, "straggler": ((0.0, 0.1, 1.0), (2.0, 0.5, 0.25))}
    assert read(WHOLE) == Scenario(
        settings=RunSettings(program="text", program_arguments="width=32,tied=true", every=4, seed=3),
        nodes=(
            SimNode(name="node-0", step_seconds=0.1),
            SimNode(name="node-1", step_seconds=0.1),
            SimNode(name="slow-0", **slow),
            SimNode(name="slow-1", **slow),
            SimNode(name="other", cut=((1.0, 2.5),), straggler="cedar,message=0.05"),
        ),
        link=LinkModel(1e8, 0.001),
        evaluate_seconds=2.5,
        max_seconds=60.0,
    )


def test_the_hubs_port_may_be_another(read):
    scenario = read("max_seconds = 1\n[hub_link]\nbits_per_second = 2.5e9\n[[node]]")
    assert (scenario.link, scenario.hub_link) == (LinkModel(), LinkModel(2.5e9))


def test_the_seed_of_the_command_counts_more(read):
    assert read(WHOLE, seed=7).settings.seed == 7


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("max_second = 1\n[[node]]", "did you mean max_seconds"),
        ("[run]\nevry = 4\n[[node]]", r"\[run\].*no 'evry'; did you mean every"),
        ("[run]\nevery = 'x'\n[[node]]", r"\[run\].*every must be a whole number, got 'x'"),
        ("[run]\nevery = -1\n[[node]]", r"\[run\].*every must be .auto. or at least 1, got -1"),
        ("[link]\nrate = 4\n[[node]]", "there are bits_per_second, latency_seconds"),
        ("[link]\nbits_per_second = -1\n[[node]]", r"\[link\].*rate above 0"),
        ("max_seconds = 1", r"at least one \[\[node\]\]"),
        ("max_seconds = 1\n[node]", r"at least one \[\[node\]\]"),
        ("max_seconds = 1\n[[node]]\nslownes = 2", "node.*1.*did you mean slowness"),
        ("max_seconds = 1\n[[node]]\n[[node]]\nslowness = 0", "node.*2.*slowness"),
        ("max_seconds = 1\n[[node]]\ncount = 0", "count must be a whole number"),
        ("max_seconds = 1\n[[node]]\nsteps = 1.5", "steps must be a whole number"),
        ("max_seconds = 1\n[[node]]\ncut = [1, 2]", "cut must be a list of lists of numbers"),
        ("max_seconds = 1\n[[node]]\nname = 'a'\n[[node]]\nname = 'a'", "the same name: a"),
        ("[[node]]", "would never end"),
        ("max_seconds = 1\n[[node]]\nstraggler = 'beech'", "node.*1.*beech"),
        ("max_seconds = 1\n[[node]]\nstraggler = 3", "straggler must be a list of lists of numbers"),
        ("run = 1\n[[node]]", r"run is a table: \[run\]"),
        ("this is none", "is no TOML"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_place(read, text, about):
    with pytest.raises(ConfigError, match=f"scenario.toml.*{about}"):
        read(text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_scenario(tmp_path / "nothing.toml")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_scenarios_of_the_project_can_be_read(path):
    scenario = read_scenario(path)
    assert scenario.pipelines if isinstance(scenario, PipelineScenario) else scenario.nodes


def test_records_are_lines_of_json_in_which_what_is_not_finite_is_null(tmp_path):
    file = tmp_path / "records.jsonl"
    write_records(file, [{"kind": "step", "loss": float("nan"), "of": [1, float("inf")]}, {"kind": "run_end"}])
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"kind": "step", "loss": None, "of": [1, None]},
        {"kind": "run_end"},
    ]
    with pytest.raises(ConfigError, match="cannot write"):
        write_records(tmp_path, [])
