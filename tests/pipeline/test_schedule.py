"""What a stage does next: the order of tasks, how many are in flight, which version of the parameters they use."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from zmqtrain.pipeline.schedule import Awaited, Depth, Schedule, StageMachine, Task

SCHEDULES = [Schedule("gpipe"), *(Schedule(name, depth) for name in ("1f1b", "2bw") for depth in get_args(Depth))]
SEEDS = st.integers(0, 2**32)


class Wires:
    """Stages and the messages between them; who goes next is a choice of the caller."""

    def __init__(self, schedule, stages, micro_batches, steps, first_step=0):
        self.machines = [StageMachine(schedule, s, stages, micro_batches, first_step) for s in range(stages)]
        self.done = [[] for _ in range(stages)]
        self.messages = []
        for machine in self.machines:
            for step in range(first_step, first_step + steps):
                machine.batch_arrived(step)

    def work(self, stage):
        """Let a stage do one task; return whether it had one."""
        machine = self.machines[stage]
        if (task := machine.next_task()) is None:
            return False
        machine.done(task)
        self.done[stage].append(task)
        if (to := machine.receiver(task)) is not None:
            self.messages.append((task.kind, to, task.step, task.micro_batch))
        return True

    def deliver(self, number):
        kind, to, step, micro_batch = self.messages.pop(number)
        machine = self.machines[to]
        (machine.carry_arrived if kind == "forward" else machine.cotangent_arrived)(step, micro_batch)

    def run(self, choose=lambda choices: 0):
        """Run to the end. choose: given how many moves there are, which one comes next."""
        while True:
            ready = list(range(len(self.machines)))
            while ready:
                move = choose(len(ready) + len(self.messages))
                if move >= len(ready):
                    self.deliver(move - len(ready))
                    ready = list(range(len(self.machines)))
                elif self.work(ready[move]):
                    ready = list(range(len(self.machines)))
                else:
                    ready.pop(move)
            if not self.messages:
                return self
            self.deliver(choose(len(self.messages)))


def words(tasks):
    return " ".join(f"{task.kind[0]}{task.micro_batch if task.micro_batch >= 0 else ''}" for task in tasks)


def test_the_textbook_order_of_one_forward_one_backward():
    done = Wires(Schedule("1f1b", "textbook"), 2, 4, 1).run().done
    assert words(done[0]) == "f0 f1 b0 f2 b1 f3 b2 b3 u"
    assert words(done[1]) == "f0 b0 f1 b1 f2 b2 f3 b3 u"


def test_gpipe_goes_backward_when_all_have_gone_forward():
    for tasks in Wires(Schedule("gpipe"), 3, 4, 1).run().done:
        assert words(tasks) == "f0 f1 f2 f3 b0 b1 b2 b3 u"


def test_a_stage_goes_forward_until_its_depth_is_full_and_backward_as_soon_as_it_can():
    stage = StageMachine(Schedule("1f1b", "eager"), 1, 3, 8)
    assert stage.most_in_flight == 3
    stage.batch_arrived(0)
    for micro_batch in range(5):
        stage.carry_arrived(0, micro_batch)
    order = []
    for cotangent in (None, None, None, 0, None, 1, 2):
        if cotangent is not None:
            stage.cotangent_arrived(0, cotangent)
        while (task := stage.next_task()) is not None:
            stage.done(task)
            order.append(task)
    assert words(order) == "f0 f1 f2 b0 f3 b1 f4 b2"


@pytest.mark.parametrize(
    ("schedule", "depths"),
    [
        (Schedule("1f1b"), [9, 7, 5, 1]),
        (Schedule("1f1b", "eager"), [7, 5, 3, 1]),
        (Schedule("1f1b", "textbook"), [4, 3, 2, 1]),
        (Schedule("2bw"), [9, 7, 5, 1]),
        (Schedule("gpipe"), [32] * 4),
    ],
)
def test_depths(schedule, depths):
    assert [schedule.most_in_flight(stage, 4, 32) for stage in range(4)] == depths


def test_no_more_are_in_flight_than_a_step_has():
    assert Schedule("1f1b").most_in_flight(0, 4, 4) == 4
    assert Schedule("2bw").most_in_flight(0, 4, 4) == 8


def test_without_flush_the_first_micro_batches_of_a_step_lack_the_update_before_it():
    schedule = Schedule("2bw", "eager")
    assert [schedule.late(2, micro_batches) for micro_batches in (2, 3, 4)] == [2, 3, 3]
    assert schedule.late(4, 32) == 7 and Schedule("2bw").late(4, 32) == 7 and Schedule("1f1b").late(4, 32) == 0
    done = Wires(schedule, 2, 4, 3).run().done
    for tasks in done:
        used = {(task.step, task.version): set() for task in tasks}
        for task in tasks:
            used[task.step, task.version] |= {task.micro_batch}
        assert used == {
            (0, 0): {0, 1, 2, 3, -1}, (1, 0): {0, 1, 2}, (1, 1): {3, -1}, (2, 1): {0, 1, 2}, (2, 2): {3, -1},
        }  # fmt: skip
    first = words(done[0])
    assert first.index("f0", 3) < first.index("u"), "the second step begins before the first is updated"


def test_with_flush_the_update_of_a_step_is_used_in_the_next():
    for tasks in Wires(Schedule("1f1b"), 2, 4, 3).run().done:
        assert {(task.step, task.version) for task in tasks} == {(0, 0), (1, 1), (2, 2)}


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(0, 4), st.integers(1, 4), st.integers(0, 3), SEEDS)
def test_whatever_the_order_of_arrivals_all_is_done_once_in_order_within_the_bounds(
    schedule, stages, more, steps, first_step, seed
):
    micro_batches = stages + more
    wires = Wires(schedule, stages, micro_batches, steps, first_step)
    random = Random(seed)
    work, held = wires.work, []

    def watched(stage):
        worked = work(stage)
        machine = wires.machines[stage]
        assert machine.in_flight <= machine.most_in_flight
        held.append(len(machine.versions))
        return worked

    wires.work = watched
    wires.run(lambda choices: random.randrange(choices))
    assert max(held) <= schedule.versions_held
    every = [(step, one) for step in range(first_step, first_step + steps) for one in range(micro_batches)]
    for machine, tasks in zip(wires.machines, wires.done, strict=True):
        assert machine.idle
        for kind in ("forward", "backward"):
            assert [(task.step, task.micro_batch) for task in tasks if task.kind == kind] == every
        assert [task.step for task in tasks if task.kind == "update"] == list(range(first_step, first_step + steps))
    used = [
        {(task.kind, task.step, task.micro_batch): task.version for task in tasks if task.kind != "update"}
        for tasks in wires.done
    ]
    assert all(one == used[0] for one in used), "all stages use the same version for the same micro-batch"
    for step, one in every:
        assert used[0]["forward", step, one] == used[0]["backward", step, one]


@settings(max_examples=examples(20))
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), SEEDS)
def test_the_order_in_which_gradients_are_summed_is_that_of_every_schedule(stages, more, steps, seed):
    random, orders = Random(seed), set()
    for schedule in SCHEDULES:
        done = Wires(schedule, stages, stages + more, steps).run(lambda choices: random.randrange(choices)).done
        orders.add(words(task for task in done[0] if task.kind == "backward"))
    assert len(orders) == 1


def test_a_stage_that_waits_names_the_micro_batch_and_who_sends_it():
    stage = StageMachine(Schedule("1f1b", "textbook"), 1, 3, 4)
    assert stage.next_task() is None
    assert stage.awaited() == (Awaited("batch", 0, -1, 1, 1),)
    stage.batch_arrived(0)
    assert stage.awaited() == (Awaited("carry", 0, 0, 1, 0),)
    for micro_batch in (0, 1):
        stage.carry_arrived(0, micro_batch)
        task = stage.next_task()
        assert task == Task("forward", 0, micro_batch, 0)
        stage.done(task)
    assert stage.next_task() is None
    (waits,) = stage.awaited()
    assert waits == Awaited("cotangent", 0, 0, 1, 2)
    assert str(waits) == "stage 1 waits for the cotangent of micro-batch 0 of step 0 from stage 2"


def test_a_first_stage_that_has_sent_all_of_a_step_waits_for_cotangents_alone():
    stage = StageMachine(Schedule("gpipe"), 0, 2, 2)
    stage.batch_arrived(0)
    for _ in range(2):
        stage.done(stage.next_task())
    assert stage.awaited() == (Awaited("cotangent", 0, 0, 0, 1),)


def test_what_cannot_arrive_is_refused_and_changes_nothing():
    stage = StageMachine(Schedule("1f1b"), 1, 3, 4)
    stage.batch_arrived(0)
    stage.carry_arrived(0, 0)
    for arrive, step, micro_batch in (
        (stage.carry_arrived, 0, 0),  # a duplicate
        (stage.carry_arrived, 0, 4),  # there is none
        (stage.carry_arrived, 0, -1),
        (stage.carry_arrived, 2, 0),  # of a step that cannot have begun
        (stage.cotangent_arrived, 0, 0),  # of one that has not gone forward here
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            arrive(step, micro_batch)
        assert caught.value.peer in ("stage 0", "stage 2")
    task = stage.next_task()
    assert task == Task("forward", 0, 0, 0)
    with pytest.raises(RemoteProtocolError):
        stage.carry_arrived(0, 0)
    stage.done(task)
    assert stage.next_task() is None


def test_a_caller_that_breaks_the_rules_is_told():
    with pytest.raises(LocalProtocolError):
        StageMachine(Schedule(), 0, 2, 2).batch_arrived(1)
    with pytest.raises(LocalProtocolError):
        StageMachine(Schedule(), 0, 2, 2).carry_arrived(0, 0)
    stage = StageMachine(Schedule(), 0, 2, 2)
    stage.batch_arrived(0)
    task = stage.next_task()
    with pytest.raises(LocalProtocolError):
        stage.next_task()
    with pytest.raises(LocalProtocolError):
        stage.done(task._replace(micro_batch=1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule("zero-bubble"),
        lambda: Schedule(depth="deep"),
        lambda: StageMachine(Schedule(), 0, 4, 3),
        lambda: StageMachine(Schedule(), 4, 4, 8),
        lambda: StageMachine(Schedule(), 0, 0, 8),
    ],
)
def test_what_is_no_pipeline_is_a_config_error(make):
    with pytest.raises(ConfigError):
        make()
