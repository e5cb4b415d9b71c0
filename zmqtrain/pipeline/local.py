"""All stages of a pipeline in one process, task by task: the reference for a run on several PCs.

Each stage has its own machine of the schedule and its own parameters, and gets from the others only what would travel.
One thread takes one task of each stage in turn. The order of the tasks changes nothing: each stage does its passes in
the order of the micro-batches, so `gpipe` and `1f1b` give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import optax

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.pipeline.boundary import Boundary
from zmqtrain.pipeline.coupling import check_clip_norm, check_separable
from zmqtrain.pipeline.schedule import Schedule, StageMachine, Task, steps_in_flight
from zmqtrain.pipeline.split import Split
from zmqtrain.pipeline.stage import Arrays
from zmqtrain.pipeline.stage_run import StageRun


class LocalPipeline:
    """A pipeline with all of its stages in one process.

    stages: the loss, cut.  params: the whole tree.  optimizer: of each stage, for its own parameters; None: the
    parameters stay.  schedule: of all stages, "1f1b" if none is given.  codec: of what would travel, as of `Pipeline`;
    "float32" changes nothing.  clip_norm: as of `Pipeline`.
    Raises ConfigError if a step has fewer micro-batches than there are stages, or if the optimizer looks at several
    leaves at once, for each stage has only its own.
    """

    def __init__(
        self,
        stages: Split,
        params: Any,
        optimizer: optax.GradientTransformation | None = None,
        schedule: Schedule | None = None,
        codec: str = "float32",
        clip_norm: float = 0.0,
    ) -> None:
        if optimizer is not None:
            check_separable(optimizer, stages.traced.params)
        self.stages, self.schedule = stages, schedule or Schedule()
        numbers = range(len(stages))
        self._machines = [StageMachine(self.schedule, n, len(stages), stages.micro_batches) for n in numbers]
        own = stages.own(params)
        predicts = self.schedule.predicts and not self.schedule.flushes
        self._runs = [StageRun(stages[n], own[n], stages.micro_batches, optimizer, predicts=predicts) for n in numbers]
        self._clip_norm = check_clip_norm(clip_norm)
        self._groups = [frozenset(numbers)] if self._clip_norm else _tied_groups(stages)
        self._boundary = Boundary(codec)
        self._mail: dict[tuple[str, int, int, int], Arrays] = {}  # kind, receiver, step, micro-batch
        self._due: dict[int, tuple[Task, Any]] = {}  # updates that wait for tied gradients, with the stage's own
        self._steps, self._unfinished = 0, dict[int, int]()
        self._losses: dict[int, jax.Array] = {}
        self.gradients: list[Any] = [None for _ in numbers]
        """Of each stage, the gradients of the last step, where there is no optimizer that consumes them."""
        self.tasks: list[tuple[int, Task]] = []
        """What was done in the last call of `steps`: the stage and the task, in the order of this process."""

    def step(self, batch: Any) -> jax.Array:
        """Train on one batch and return its loss. Under `2bw` the late micro-batches of the next step lack the update
        that it gives."""
        (loss,) = self.steps([batch])
        return loss

    def steps(self, batches: Iterable[Any]) -> Iterator[jax.Array]:
        """Train on batches, and yield the loss of each. Under `2bw` a step begins while the one before is in flight."""
        self.tasks = []
        return steps_in_flight(self.schedule, batches, self._begin, self._finish)

    def params(self) -> Any:
        """Return the whole tree of the newest parameters."""
        return self.stages.gather([run.own for run in self._runs])

    # ------------------------------------------------------------------ the loop

    def _begin(self, batch: Any) -> int:
        parts, step = self.stages.parts(batch), self._steps
        self._steps += 1
        self._unfinished[step] = len(self.stages)
        for machine, run in zip(self._machines, self._runs, strict=True):
            run.take_batch(step, parts)
            machine.batch_arrived(step)
        return step

    def _finish(self, step: int) -> jax.Array:
        while step in self._unfinished:
            moved = [self._do_next(number) for number in range(len(self.stages))]
            if not any(moved):
                waiting = "; ".join(str(one) for machine in self._machines for one in machine.awaited())
                raise LocalProtocolError(f"no stage can go on: {waiting}")
        return self._losses.pop(step)

    def _do_next(self, number: int) -> bool:
        """Do the next task of a stage; return whether there was one."""
        if number in self._due or (task := self._machines[number].next_task()) is None:
            return False
        self.tasks.append((number, task))
        run = self._runs[number]
        if task.kind == "update":
            self._due[number] = task, run.take_gradients(task.step)
            if run.stage.is_last:
                self._losses[task.step] = run.take_loss(task.step)
            self._update(next(group for group in self._groups if number in group))
            return True
        place = task.step, task.micro_batch
        arrived = self._mail.pop(("carry" if task.kind == "forward" else "cotangent", number, *place), ())
        is_forward = task.kind == "forward"
        result = run.forward(task, arrived) if is_forward else run.backward(task, arrived)
        self._machines[number].done(task)
        receiver, what = self._machines[number].receiver(task), str(task)
        if receiver is not None and is_forward:
            carry = self._boundary.across(result, run.stage.carry_out, "forward", what)
            self._mail["carry", receiver, *place] = carry
            self._machines[receiver].carry_arrived(*place)
        elif receiver is not None:
            cotangents = self._boundary.across(result, run.stage.cotangents_out, "backward", what)
            self._mail["cotangent", receiver, *place] = cotangents
            self._machines[receiver].cotangent_arrived(*place)
        return True

    def _update(self, group: frozenset[int]) -> None:
        """Update stages that hold the same leaves, once all of them have their gradients."""
        if not group <= self._due.keys():
            return
        due = {number: self._due.pop(number) for number in sorted(group)}
        gradients = self.stages.add_tied({number: own for number, (_, own) in due.items()})
        if self._clip_norm:
            squares = [self._runs[n].squares(own, self.stages.counted_rows(n)) for n, own in gradients.items()]
            gradients = {n: self._runs[n].clipped(own, squares, self._clip_norm) for n, own in gradients.items()}
        for number, (task, _) in due.items():
            if self._runs[number].optimizer is None:
                self.gradients[number] = gradients[number]
            self._runs[number].update(task.version, gradients[number])
            self._machines[number].done(task)
            self._runs[number].drop_versions(self._machines[number].versions)
            self._unfinished[task.step] -= 1
            if not self._unfinished[task.step]:
                del self._unfinished[task.step]


def value_and_grad(stages: Split, params: Any, batch: Any, schedule: Schedule | None = None) -> tuple[jax.Array, Any]:
    """Return the loss of a batch and its gradients, a whole tree, as `jax.value_and_grad(loss_fn)(params, batch)` does.

    Both are means over the micro-batches.  Raises ConfigError if these are fewer than the stages, ModelMismatch if the
    parameters or the batch have another form than those that the loss was cut for.
    """
    pipeline = LocalPipeline(stages, params, schedule=schedule)
    loss = pipeline.step(batch)
    return loss, stages.gather(pipeline.gradients)


def _tied_groups(stages: Split) -> list[frozenset[int]]:
    """Return the stages in groups: those that hold a leaf together are in one."""
    groups = [frozenset([stage.number]) for stage in stages]
    for tied in stages.tied:
        joined = [group for group in groups if group.intersection(tied.stages)]
        groups = [group for group in groups if group not in joined] + [frozenset().union(*joined)]
    return groups
