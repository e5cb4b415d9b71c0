"""docs/pipeline.md: its plan, its scenario and its program about stages do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.grids import nightly
from zmqtrain.cli import main
from zmqtrain.pipeline.pipeline import Pipeline
from zmqtrain.sim.reading import read_scenario

PAGE = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
PLAN = PAGE.partition("## How the plan cuts a model\n")[2].partition("\n## ")[0]
STAGES, _, ON_PCS = PAGE.partition("\n## Cut a loss into stages\n")[2].partition("\n## A stage on each PC\n")
PROGRAM = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def block(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PLAN, re.DOTALL | re.MULTILINE)
    return text


def test_the_plan_prints_what_the_page_shows(capsys):
    command, shown = block("console").split("\n", 1)
    assert main(command.removeprefix("$ bin/zmqtrain ").split()) == 0
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


IN_EVERY_RUN, WHOLE = STAGES.partition("\n### Check it in one process\n")[0], STAGES


@pytest.mark.parametrize("part", [IN_EVERY_RUN, *nightly(WHOLE)], ids=["cut", "cut and run"])
def test_the_part_about_stages_is_a_program_that_prints_what_it_says(part, capsys):
    names: dict[str, Any] = {}
    blocks = PROGRAM.findall(part)
    assert len(blocks) > 6
    for source, said in blocks:
        exec(source, names)
        beside = [f"{comment}\n" for comment in re.findall(r"print\(.*\)  # ([\w\[\], ]+)$", source, re.MULTILINE)]
        assert capsys.readouterr().out == (said or "".join(beside)), source
    assert part.count("```text") == sum(bool(said) for _, said in blocks)


def test_the_loops_of_the_page_are_python_and_use_what_there_is():
    sources = [source for source, _ in PROGRAM.findall(ON_PCS)]
    assert len(sources) == 3
    for source in sources:
        compile(source, "pipeline.md", "exec")
    for name in re.findall(r"pipeline\.(\w+)", ON_PCS.replace("pipeline.md", "").replace("pipeline.py", "")):
        assert hasattr(Pipeline, name) or name in ("statistics", "recoveries", "safetensors"), name
