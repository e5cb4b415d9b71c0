"""Charts of the last step of pipelines: which stage did which task when, from records of their tasks.

Rule 1: a pipeline's newest step is shown once each of its stages has done an update of it, before that the step before.
Rule 2: what is kept is bounded: the newest pipelines, two steps of each, and so many tasks of a step.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from zmqtrain.monitor.records import Record
from zmqtrain.protocol.messages import printable

MOST_PIPELINES, MOST_STEP_TASKS, MOST_STAGES = 8, 2048, 64
KINDS = ("forward", "backward", "update")
Task = tuple[int, str, int, float, float]
"""Stage, kind, micro-batch, begin and end in seconds."""


class PipelineTasks:
    """The tasks of the newest steps of pipelines. changed: since `charts` was called."""

    def __init__(self) -> None:
        self._pipelines: dict[int, dict[int, list[Task]]] = {}  # by number and step
        self.changed = False

    @property
    def is_known(self) -> bool:
        """Whether there is any task."""
        return bool(self._pipelines)

    def take(self, one: Record) -> None:
        """Take a record of a task. Raises ValueError for what is none."""
        pipeline, step, stage = (int(one[name]) for name in ("pipeline", "step", "stage"))
        begin, end, kind = float(one["seconds"]), float(one["end"]), one["what"]
        if kind not in KINDS or not 0 <= stage < MOST_STAGES or not (isfinite(begin) and begin <= end < float("inf")):
            raise ValueError(f"this is no task of a stage: {printable(str(one))}")
        steps = self._pipelines.setdefault(pipeline, {})
        tasks = steps.setdefault(step, [])
        if len(tasks) < MOST_STEP_TASKS:
            tasks.append((stage, kind, int(one["micro_batch"]), begin, end))
        while len(steps) > 2:
            del steps[min(steps)]
        while len(self._pipelines) > MOST_PIPELINES:
            del self._pipelines[min(self._pipelines)]
        self.changed = True

    def charts(self) -> list[dict[str, Any]]:
        """Return a chart of each pipeline: its name, its stages and the bars of its last step."""
        self.changed = False
        return [_chart(number, steps) for number, steps in sorted(self._pipelines.items()) if steps]


def _chart(number: int, steps: dict[int, list[Task]]) -> dict[str, Any]:
    stages = 1 + max(task[0] for tasks in steps.values() for task in tasks)
    whole = [step for step, tasks in steps.items() if len({task[0] for task in tasks if task[1] == "update"}) == stages]
    step = max(whole or steps)
    return {
        "name": f"pipeline {number + 1}, step {step + 1}",
        "stages": stages,
        "bars": [
            [stage, kind, round(begin, 6), round(end, 6), _say(stage, kind, micro_batch, begin, end)]
            for stage, kind, micro_batch, begin, end in steps[step]
        ],
    }


def _say(stage: int, kind: str, micro_batch: int, begin: float, end: float) -> str:
    of = "" if kind == "update" else f" of micro-batch {micro_batch + 1}"
    return f"stage {stage + 1}: {kind}{of}, {1000 * (end - begin):.4g} ms, begun at {begin:.4g} s"
