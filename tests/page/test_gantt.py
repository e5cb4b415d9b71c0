"""The chart of a pipeline's last step: from records of its tasks, simulated ones too, bounded, and text only."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from zmqtrain.cli.sim import pipeline_records
from zmqtrain.page.gantt import MOST_PIPELINES, MOST_STEP_TASKS, PipelineTasks
from zmqtrain.page.picture import Picture
from zmqtrain.page.record_feed import RecordFeed
from zmqtrain.sim.pipeline import SimPipeline
from zmqtrain.transport.memory import LinkModel


def task(stage: int, what: str, begin: float, step: int = 0, pipeline: int = 0, micro_batch: int = 0) -> dict[str, Any]:
    facts = {"seconds": begin, "end": begin + 0.5, "what": what, "step": step, "micro_batch": micro_batch}
    return {"kind": "task", "pipeline": pipeline, "stage": stage, **facts}


def test_the_last_step_of_a_simulated_pipeline_is_shown_and_sent_once() -> None:
    pipeline = SimPipeline(
        schedule="1f1b", stages=3, micro_batches=4, steps=2, forward_seconds=0.1, backward_seconds=0.2
    )
    picture = Picture()
    feed = RecordFeed(picture)
    for one in pipeline_records(0, pipeline.run(LinkModel(), 0)):
        feed.take("sim", one)
    feed.show(None, 0)
    (chart,) = json.loads(picture.take_change())["pipelines"]
    assert (chart["name"], chart["stages"]) == ("pipeline 1, step 2", 3)
    kinds = [bar[1] for bar in chart["bars"]]
    assert (kinds.count("forward"), kinds.count("backward"), kinds.count("update")) == (12, 12, 3)
    assert chart["bars"][0][4].startswith("stage 1: forward of micro-batch 1, 100 ms, begun at ")
    for stage in range(3):
        spans = sorted((begin, end) for number, _, begin, end, _ in chart["bars"] if number == stage)
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(spans))
    feed.show(None, 0)
    assert "pipelines" not in json.loads(picture.take_change())
    sent = json.loads(picture.whole())
    assert sent["pipelines"] == [chart]
    assert (sent["heading"]["title"], [tile["name"] for tile in sent["tiles"]]) == ("pipelines", ["recorded"])
    assert sent["events"][-1]["what"] == "pipeline ended" and "of the time" in sent["events"][-1]["text"]
    picture.clear()
    assert json.loads(picture.whole())["pipelines"] == []


def test_a_step_that_goes_on_is_not_shown_before_all_its_stages_have_updated() -> None:
    tasks = PipelineTasks()
    for step in range(2):
        for stage in range(2):
            tasks.take(task(stage, "forward", step, step))
        tasks.take(task(0, "update", step + 0.5, step))
        if not step:
            assert [chart["name"] for chart in tasks.charts()] == ["pipeline 1, step 1"]
            tasks.take(task(1, "update", step + 0.5, step))
    assert tasks.charts()[0]["name"] == "pipeline 1, step 1"
    tasks.take(task(1, "update", 2.5, 1))
    assert tasks.charts()[0]["name"] == "pipeline 1, step 2"


def test_what_is_kept_of_pipelines_is_bounded() -> None:
    tasks = PipelineTasks()
    for pipeline in range(3 * MOST_PIPELINES):
        for step in range(5):
            tasks.take(task(0, "forward", float(step), step, pipeline))
    for number in range(2 * MOST_STEP_TASKS):
        tasks.take(task(1, "backward", float(number), 9, 3 * MOST_PIPELINES, number))
    charts = tasks.charts()
    assert len(charts) == MOST_PIPELINES
    assert len(charts[-1]["bars"]) == MOST_STEP_TASKS


@pytest.mark.parametrize(
    "wrong",
    [
        {"what": "<script>"}, {"stage": -1}, {"stage": 1 << 40}, {"end": float("nan")}, {"end": -1.0},
        {"end": float("inf")}, {"seconds": float("-inf")}, {"step": "two"}, {"what": None},
    ],
)  # fmt: skip
def test_a_record_that_is_no_task_is_counted_and_left_out(wrong: dict[str, Any]) -> None:
    picture = Picture()
    feed = RecordFeed(picture)
    feed.take("sim", {**task(0, "forward", 1.0), **wrong})
    feed.show(None, 0)
    assert feed.odd == 1
    assert json.loads(picture.whole())["pipelines"] == []
