"""What a stage of a pipeline does next, given what has arrived (pure: no jax, no clock, no socket).

Rule 1: an update that is due comes first. Then backward and forward passes take turns: after a backward pass a forward
pass is preferred, else a backward pass; where the preferred one cannot be made, the other one is. A forward pass needs
fewer than K_s micro-batches in flight at this stage. There is no table of tasks: the order follows from the rule and
from the arrivals. (With backward passes always preferred, a stage that is late with them lets those after it starve.)
Rule 2: each stage makes its forward passes, and its backward passes, in the order of the micro-batches. Gradients are
therefore summed in one order, and `gpipe` and `1f1b` have the same bits.
Rule 3: both passes of a micro-batch use the same version of the parameters, at every stage.

K_s, with S stages, s from 0 (the last stage has one):  textbook S-s;  eager 2(S-s)-1, which hides the wire as long as
a carry and its cotangent need less time on it than a stage computes;  roomy 2(S-s)+1, with two to spare for tasks and
messages that take longer than others.
Source: Huang et al. 2019 (GPipe), Narayanan et al. 2019 and 2021 (PipeDream: 1F1B, 2BW).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from zmqtrain.core.errors import ConfigError, LocalProtocolError, RemoteProtocolError

ScheduleName = Literal["gpipe", "1f1b", "2bw"]
Depth = Literal["roomy", "eager", "textbook"]
TaskKind = Literal["forward", "backward", "update"]
AwaitedKind = Literal["batch", "carry", "cotangent"]

LossValue = TypeVar("LossValue")

NO_MICRO_BATCH = -1
"""The micro-batch of an update and of an awaited batch, which belong to a whole step."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One of the schedules. Raises ConfigError for a name that is none.

    gpipe: all forward passes of a step, then all its backward passes.  1f1b: backward and forward passes take turns.
    2bw: as 1f1b, but a stage begins step n + 1 while step n is in flight. The first micro-batches of step n + 1 are
    *late*: they compute without the update of step n, at every stage. The others have it. A stage holds two versions of
    its parameters.
    depth: how many micro-batches may be in flight at a stage; gpipe always has all of a step.
    predicts: the late micro-batches of 2bw compute with what the parameters will be after the update that they lack:
    what the last update has changed is added once more (weight prediction: Chen et al. 2018, SpecTrain). It costs a
    third copy of the parameters.
    """

    name: ScheduleName = "1f1b"
    depth: Depth = "roomy"
    predicts: bool = True

    def __post_init__(self) -> None:
        for field, value, kinds in (("schedule", self.name, ScheduleName), ("depth", self.depth, Depth)):
            if value not in get_args(kinds):
                raise ConfigError(f"{field} must be one of {', '.join(get_args(kinds))}, got {value!r}")

    @property
    def flushes(self) -> bool:
        """Whether a stage ends a step before it begins the next."""
        return self.name != "2bw"

    @property
    def versions_held(self) -> int:
        """How many versions of its parameters a stage computes with at most."""
        return 1 if self.flushes else 2

    @property
    def copies_held(self) -> int:
        """How many copies of its parameters a stage holds at most."""
        return self.versions_held + (self.predicts and not self.flushes)

    def most_in_flight(self, stage: int, stages: int, micro_batches: int) -> int:
        """Return K_s: how many micro-batches have had their forward and not their backward pass at a stage, at most."""
        if self.name == "gpipe":
            return micro_batches
        after = stages - stage
        most = {"roomy": 2 * after + 1, "eager": 2 * after - 1, "textbook": after}[self.depth] if after > 1 else 1
        return min(most, self.versions_held * micro_batches)

    def late(self, stages: int, micro_batches: int) -> int:
        """Return how many micro-batches of a step lack the update of the step before: as many as the first stage has in
        flight at the eager depth, or at the textbook's. With more room it makes that update before it begins others."""
        in_flight = stages if self.depth == "textbook" else 2 * stages - 1
        return 0 if self.flushes else min(in_flight, micro_batches)


class Task(NamedTuple):
    """What a stage does next. version: of the parameters that it uses: so many updates are in them."""

    kind: TaskKind
    step: int
    micro_batch: int
    version: int

    @property
    def is_late(self) -> bool:
        """Whether the update of the step before is not in the parameters that it uses."""
        return self.version < self.step


class Awaited(NamedTuple):
    """What a stage needs before it can go on, and which stage sends it (a batch is each stage's own)."""

    kind: AwaitedKind
    step: int
    micro_batch: int
    stage: int
    sender: int

    def __str__(self) -> str:
        if self.kind == "batch":
            return f"stage {self.stage} waits for the batch of step {self.step}"
        return (
            f"stage {self.stage} waits for the {self.kind} of micro-batch {self.micro_batch} of step {self.step} from "
            f"stage {self.sender}"
        )


class StageMachine:
    """One stage's part of a schedule: told what has arrived, it says what to do.

    schedule: the same at all stages.  stage: from 0 to stages - 1.  micro_batches: M, of each step.  first_step: with
    which it begins (a resumed run); its parameters then hold so many updates.
    Raises ConfigError if a step has fewer micro-batches than there are stages: some stage would always wait.

    A caller loops over `next_task`: it does the task, sends its result to `receiver(task)`, and says `done`. A result
    that may take time to compute (jax dispatches and returns) is done when it is dispatched, because the device keeps
    the order. `None` means that the stage waits: `awaited` says for what.
    """

    def __init__(self, schedule: Schedule, stage: int, stages: int, micro_batches: int, first_step: int = 0) -> None:
        check_micro_batches(micro_batches, stages)
        if not 0 <= stage < stages:
            raise ConfigError(f"of {stages} stages, a stage has a number from 0 to {stages - 1}, not {stage}")
        self.schedule, self.stage, self.stages, self.micro_batches = schedule, stage, stages, micro_batches
        self.first_step = first_step
        self.most_in_flight = schedule.most_in_flight(stage, stages, micro_batches)
        self._late = schedule.late(stages, micro_batches)
        self._updates = self._batches = first_step  # steps updated; steps of which the batch is there
        self._forward = self._backward = first_step * micro_batches  # the next one of each, counted through all steps
        self._carries: set[int] = set()
        self._cotangents: set[int] = set()
        self._running: Task | None = None
        self._prefers_forward = False

    # ------------------------------------------------------------------ what arrives

    def batch_arrived(self, step: int) -> None:
        """The batch of a step is here: each stage needs it, for its own data leaves. Steps come in their order."""
        if step != self._batches:
            raise LocalProtocolError(f"the batch of step {step} comes, but that of step {self._batches} is the next")
        self._batches += 1

    def carry_arrived(self, step: int, micro_batch: int) -> None:
        """The result of the stage before is here, in any order. Raises RemoteProtocolError if it cannot be: a
        duplicate, or one that is not of a step in flight."""
        self._arrived("carry", self._carries, self._forward, self.stage - 1, step, micro_batch)

    def cotangent_arrived(self, step: int, micro_batch: int) -> None:
        """The gradient of this stage's result is here. Raises RemoteProtocolError as `carry_arrived`, and for a
        micro-batch that has not gone forward here."""
        if self._number(step, micro_batch) >= self._forward:
            raise self._refusal("cotangent", self.stage + 1, step, micro_batch, "it has not gone forward here")
        self._arrived("cotangent", self._cotangents, self._backward, self.stage + 1, step, micro_batch)

    def _arrived(
        self, kind: AwaitedKind, there: set[int], following: int, sender: int, step: int, micro_batch: int
    ) -> None:
        if not 0 <= sender < self.stages:
            raise LocalProtocolError(f"stage {self.stage} of {self.stages} takes no {kind} from another stage")
        number = self._number(step, micro_batch)
        last_begun = self._updates + self.schedule.versions_held
        if not (0 <= micro_batch < self.micro_batches and step <= last_begun):
            raise self._refusal(kind, sender, step, micro_batch, f"steps {self._updates} to {last_begun} are in flight")
        if number < following or number in there:
            raise self._refusal(kind, sender, step, micro_batch, "it has come before")
        there.add(number)

    def _refusal(self, kind: AwaitedKind, sender: int, step: int, micro_batch: int, why: str) -> RemoteProtocolError:
        message = f"the {kind} of micro-batch {micro_batch} of step {step} ({why})"
        return RemoteProtocolError(f"stage {sender}", f"before stage {self.stage}", message)

    # ------------------------------------------------------------------ what to do

    def next_task(self) -> Task | None:
        """Begin the next task and return it; None: this stage waits. Raises LocalProtocolError if one is running."""
        if self._running is not None:
            raise LocalProtocolError(f"stage {self.stage} does one task at a time, and {self._running} is running")
        passes = (
            (self._due_forward, self._due_backward)
            if self._prefers_forward
            else (self._due_backward, self._due_forward)
        )
        self._running = self._due_update() or passes[0]() or passes[1]()
        return self._running

    def done(self, task: Task) -> None:
        """The running task is done. Raises LocalProtocolError for another."""
        if task != self._running:
            raise LocalProtocolError(f"stage {self.stage} runs {self._running}, not {task}")
        self._running = None
        self._prefers_forward = task.kind == "backward"
        if task.kind == "update":
            self._updates += 1
        elif task.kind == "backward":
            self._cotangents.discard(self._backward)
            self._backward += 1
        else:
            self._carries.discard(self._forward)
            self._forward += 1

    def receiver(self, task: Task) -> int | None:
        """Return to which stage a task's result goes; None: to nobody."""
        to = {"forward": self.stage + 1, "backward": self.stage - 1, "update": -1}[task.kind]
        return to if 0 <= to < self.stages else None

    @property
    def in_flight(self) -> int:
        """How many micro-batches have gone forward here and not backward: so many carries are kept."""
        return self._forward - self._backward

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the parameters that are still used, or made last; others may be dropped."""
        oldest = min(self._version_of(self._backward), self._updates)
        return tuple(range(oldest, self._updates + 1))

    @property
    def idle(self) -> bool:
        """Whether everything that has begun is done: each step of which there was a batch is updated."""
        return self._updates == self._batches and self._running is None

    def awaited(self) -> tuple[Awaited, ...]:
        """Return what would let a waiting stage go on; any of it may do."""
        found = []
        if self._may_backward and self._backward not in self._cotangents and not self._is_last:
            found.append(self._await("cotangent", self._backward, self.stage + 1))
        if self._may_forward:
            if self._forward // self.micro_batches >= self._batches:
                step = self._forward // self.micro_batches
                found.append(Awaited("batch", step, NO_MICRO_BATCH, self.stage, self.stage))
            elif self.stage and self._forward not in self._carries:
                found.append(self._await("carry", self._forward, self.stage - 1))
        return tuple(found)

    # ------------------------------------------------------------------ the rule

    def _due_update(self) -> Task | None:
        if self._backward < self._number(self._updates + 1, 0):
            return None
        return Task("update", self._updates, NO_MICRO_BATCH, self._updates)

    def _due_backward(self) -> Task | None:
        """The last stage has no cotangent to wait for: the loss is its own."""
        step, micro_batch = divmod(self._backward, self.micro_batches)
        here = self._is_last or self._backward in self._cotangents
        version = self._version_of(self._backward)
        return Task("backward", step, micro_batch, version) if here and self._may_backward else None

    def _due_forward(self) -> Task | None:
        step, micro_batch = divmod(self._forward, self.micro_batches)
        here = step < self._batches and (self.stage == 0 or self._forward in self._carries)
        version = self._version_of(self._forward)
        return Task("forward", step, micro_batch, version) if here and self._may_forward else None

    @property
    def _may_backward(self) -> bool:
        """Whether one is in flight; under gpipe, whether all of its step are."""
        end_of_step = self._number(self._backward // self.micro_batches + 1, 0)
        return self._forward >= (end_of_step if self.schedule.name == "gpipe" else self._backward + 1)

    @property
    def _may_forward(self) -> bool:
        """Whether there is room for one more in flight, and the parameters that it needs are made."""
        return self.in_flight < self.most_in_flight and self._version_of(self._forward) <= self._updates

    def _version_of(self, number: int) -> int:
        """Which version of the parameters a micro-batch uses, counted through all steps."""
        step, micro_batch = divmod(number, self.micro_batches)
        return max(self.first_step, step - 1) if micro_batch < self._late else step

    @property
    def _is_last(self) -> bool:
        return self.stage == self.stages - 1

    def _number(self, step: int, micro_batch: int) -> int:
        return step * self.micro_batches + micro_batch

    def _await(self, kind: AwaitedKind, number: int, sender: int) -> Awaited:
        return Awaited(kind, *divmod(number, self.micro_batches), self.stage, sender)


def as_schedule(schedule: ScheduleName | Schedule) -> Schedule:
    """Return a schedule, given it or its name. Raises ConfigError for a name that is none."""
    return schedule if isinstance(schedule, Schedule) else Schedule(schedule)


def steps_in_flight(
    schedule: Schedule, batches: Iterable[Any], begin: Callable[[Any], int], finish: Callable[[int], LossValue]
) -> Iterator[LossValue]:
    """Begin a step for each batch, as many at once as the schedule holds versions; yield what `finish` gives of each,
    in their order."""
    begun = deque[int]()
    for batch in batches:
        begun.append(begin(batch))
        if len(begun) == schedule.versions_held:
            yield finish(begun.popleft())
    while begun:
        yield finish(begun.popleft())


def check_micro_batches(micro_batches: int, stages: int) -> None:
    """Raise ConfigError if a step of so many micro-batches cannot fill so many stages."""
    if stages < 1:
        raise ConfigError(f"a pipeline has at least one stage, not {stages}")
    if micro_batches < stages:
        raise ConfigError(
            f"{micro_batches} micro-batches a step are fewer than the {stages} stages of the pipeline: some PC would "
            f"always wait. Cut a batch into at least {stages} micro-batches (four times as many is good), or use fewer "
            "PCs a pipeline"
        )
