"""docs/pipeline.md, "How the plan cuts a model": its commands, its Python and its scenario do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from zmqtrain.cli import main
from zmqtrain.sim.reading import read_scenario

PAGE = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
SECTION = PAGE.partition("## How the plan cuts a model\n")[2].partition("\n## ")[0]


def block(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
    return text


def test_the_plan_prints_what_the_page_shows(capsys):
    command, shown = block("console").split("\n", 1)
    assert main(command.removeprefix("$ zmqtrain ").split()) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        line.split() for line in shown.splitlines()
    ]


def test_the_cut_in_python_gives_the_slow_pc_half_the_layers(capsys):
    exec(block("python"), {})
    *stages, last = capsys.readouterr().out.splitlines()
    layers = {pc: int(end) - int(begin) for pc, begin, end, _ in map(str.split, stages)}
    assert layers == {"pc-1": 4, "pc-2": 4, "old-pc": 2} and len(last.split()) == 2


def test_the_scenario_of_the_page_can_be_read(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(block("toml"))
    (pipeline,) = read_scenario(file).pipelines
    assert (pipeline.stages, pipeline.slowness, pipeline.jitter) == (4, (1.0, 1.0, 2.0, 1.0), 0.2)
