"""A pipeline in virtual time: its stages' machines, modelled compute times, and ports with a rate each way (pure).

Rule 1: each stage is the machine that a PC runs (`zmqtrain.pipeline.schedule`); here a task takes its modelled time.
Rule 2: a message occupies its sender's port out and its receiver's port in, one after the other, each at the link's
rate, as `zmqtrain.transport.memory` has it. Computing goes on meanwhile.
Rule 3: a task's time is drawn from the seed, stage by stage: normally distributed, with the mean that is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any, NamedTuple

from zmqtrain.core.errors import ConfigError
from zmqtrain.pipeline.schedule import Depth, Schedule, ScheduleName, StageMachine, Task, check_micro_batches
from zmqtrain.transport.memory import LinkModel

FASTEST = 0.05
"""No task takes less than this share of its mean, however it is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimPipeline:
    """One simulated pipeline. Raises ConfigError for what cannot be.

    schedule, depth: as of `Schedule`.  steps: from empty to empty.  forward_seconds, backward_seconds: of one
    micro-batch at one stage; update_seconds: at the end of a step.  carry_bytes: of a carry on the wire, and of a
    cotangent.  jitter: standard deviation of a task's time, as a share of its mean.  slowness: of each stage, in
    order: its times are multiplied by it; none: 1 for all.
    """

    name: str = ""
    schedule: ScheduleName = "1f1b"
    depth: Depth = "roomy"
    stages: int = 4
    micro_batches: int = 32
    steps: int = 1
    forward_seconds: float = 0.05
    backward_seconds: float = 0.15
    update_seconds: float = 0.0
    carry_bytes: int = 0
    jitter: float = 0.0
    slowness: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        Schedule(self.schedule, self.depth)  # says what is none
        check_micro_batches(self.micro_batches, self.stages)
        for name in ("forward_seconds", "backward_seconds", "update_seconds", "carry_bytes", "jitter"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.steps < 1 or not self.forward_seconds + self.backward_seconds > 0:
            raise ConfigError("a pipeline makes at least one step, and its tasks take time")
        if self.slowness and (len(self.slowness) != self.stages or not all(0 < one < inf for one in self.slowness)):
            raise ConfigError(
                f"slowness has a number above 0 for each of the {self.stages} stages, got {list(self.slowness)}"
            )

    @property
    def rule(self) -> Schedule:
        return Schedule(self.schedule, self.depth)

    def run(self, link: LinkModel, seed: int) -> PipelineRun:
        """Return what it does on these links. seed: of the jitter."""
        models = [
            StageModel(
                slow * self.forward_seconds,
                slow * self.backward_seconds,
                slow * self.update_seconds,
                self.carry_bytes,
                self.carry_bytes,
            )
            for slow in self.slowness or (1.0,) * self.stages
        ]
        return simulate_pipeline(
            self.rule, models, self.micro_batches, steps=self.steps, link=link, jitter=self.jitter, seed=seed
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineScenario:
    """Pipelines that are simulated one after the other, each by itself. link: every PC's port. seed: of the jitter."""

    pipelines: tuple[SimPipeline, ...]
    link: LinkModel = field(default_factory=LinkModel)
    seed: int = 0


class StageModel(NamedTuple):
    """What a stage's tasks take, in seconds, and what its results have, in bytes, each of one micro-batch."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    carry_bytes: int = 0
    cotangent_bytes: int = 0


class TaskSpan(NamedTuple):
    """When a stage did a task, in seconds."""

    stage: int
    task: Task
    begin: float
    end: float


class MessageSpan(NamedTuple):
    """When a result of a task left its sender, and when all of it was there, in seconds."""

    sender: int
    receiver: int
    task: Task
    begin: float
    end: float


@dataclass(frozen=True)
class PipelineRun:
    """What a simulated pipeline did. ports: per stage, the seconds in which its port sent, and received."""

    stages: int
    tasks: tuple[TaskSpan, ...]
    messages: tuple[MessageSpan, ...]
    ports: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """From the first task to the end of the last."""
        return max(span.end for span in self.tasks)

    def busy(self, stage: int) -> float:
        """Return the share of the time in which a stage computes passes, not updates."""
        passes = (one for one in self.tasks if one.stage == stage and one.task.kind != "update")
        return sum(one.end - one.begin for one in passes) / self.seconds

    @property
    def efficiency(self) -> float:
        """The share of the time in which PCs compute, the mean of the stages; what is missing is the bubble."""
        return sum(self.busy(stage) for stage in range(self.stages)) / self.stages

    def port_use(self, stage: int) -> tuple[float, float]:
        """Return the share of the time in which a stage's port sends, and receives."""
        sent, received = self.ports[stage]
        return sent / self.seconds, received / self.seconds


def simulate_pipeline(
    schedule: Schedule,
    stages: Sequence[StageModel],
    micro_batches: int,
    *,
    steps: int = 1,
    link: LinkModel | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> PipelineRun:
    """Return what a pipeline does in so many steps, from empty to empty.

    link: of every port.  jitter: standard deviation of a task's time, as a share of its mean.
    Raises ConfigError: fewer micro-batches than stages, no step, a jitter that is negative.
    """
    check_micro_batches(micro_batches, len(stages))
    if steps < 1 or jitter < 0:
        raise ConfigError(f"steps must be at least 1 and jitter at least 0, got {steps} and {jitter:g}")
    return _Simulation(schedule, stages, micro_batches, steps, link or LinkModel(), jitter, seed).run()


class _Simulation:
    """The event queue of one run."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageModel],
        micro_batches: int,
        steps: int,
        link: LinkModel,
        jitter: float,
        seed: int,
    ) -> None:
        count = len(stages)
        self._stages, self._link, self._jitter = stages, link, jitter
        self._machines = [StageMachine(schedule, stage, count, micro_batches) for stage in range(count)]
        for machine in self._machines:
            for step in range(steps):
                machine.batch_arrived(step)
        self._randoms = [Random(f"{seed}/{stage}") for stage in range(count)]
        self._computing = [False] * count
        self._free_out, self._free_in = [0.0] * count, [0.0] * count
        self._used_out, self._used_in = [0.0] * count, [0.0] * count
        self._events: list[tuple[float, int, Any]] = []
        self._tasks: list[TaskSpan] = []
        self._messages: list[MessageSpan] = []

    def run(self) -> PipelineRun:
        for stage in range(len(self._stages)):
            self._begin(stage, 0.0)
        while self._events:
            now, _, span = heappop(self._events)
            if isinstance(span, TaskSpan):
                self._done(span, now)
            else:
                machine = self._machines[span.receiver]
                arrived = machine.carry_arrived if span.task.kind == "forward" else machine.cotangent_arrived
                arrived(span.task.step, span.task.micro_batch)
                self._begin(span.receiver, now)
        ports = tuple(zip(self._used_out, self._used_in, strict=True))
        return PipelineRun(len(self._stages), tuple(self._tasks), tuple(self._messages), ports)

    def _begin(self, stage: int, now: float) -> None:
        """Let a stage begin its next task, if it has one and does none."""
        if self._computing[stage] or (task := self._machines[stage].next_task()) is None:
            return
        self._computing[stage] = True
        model = self._stages[stage]
        mean = {"forward": model.forward_seconds, "backward": model.backward_seconds, "update": model.update_seconds}
        drawn = self._randoms[stage].gauss(1.0, self._jitter) if self._jitter else 1.0
        span = TaskSpan(stage, task, now, now + mean[task.kind] * max(FASTEST, drawn))
        self._tasks.append(span)
        self._at(span.end, span)

    def _done(self, span: TaskSpan, now: float) -> None:
        machine, model = self._machines[span.stage], self._stages[span.stage]
        machine.done(span.task)
        self._computing[span.stage] = False
        if (receiver := machine.receiver(span.task)) is not None:
            size = model.carry_bytes if span.task.kind == "forward" else model.cotangent_bytes
            self._send(span, receiver, self._link.seconds(size), now)
        self._begin(span.stage, now)

    def _send(self, span: TaskSpan, receiver: int, seconds: float, now: float) -> None:
        begin = max(now, self._free_out[span.stage])
        arrives = max(begin, self._free_in[receiver]) + seconds
        self._free_out[span.stage], self._free_in[receiver] = begin + seconds, arrives
        self._used_out[span.stage] += seconds
        self._used_in[receiver] += seconds
        message = MessageSpan(span.stage, receiver, span.task, begin, arrives + self._link.latency_seconds)
        self._messages.append(message)
        self._at(message.end, message)

    def _at(self, when: float, span: TaskSpan | MessageSpan) -> None:
        heappush(self._events, (when, len(self._tasks) + len(self._messages), span))
