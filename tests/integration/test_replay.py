"""A run over real sockets is recorded, and computed again in one process: the same bits, at the hub and the nodes."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from runs import broker

from zmqtrain.core.settings import RunSettings
from zmqtrain.monitor.recorder import BrokerRecorder, NodeRecorder
from zmqtrain.monitor.records import Record, read_records
from zmqtrain.node.connect import connect
from zmqtrain.node.node import Node
from zmqtrain.programs import load_program
from zmqtrain.sim.replay import replay
from zmqtrain.train.leaves import host_leaves
from zmqtrain.train.loop import TrainingLoop
from zmqtrain.train.step import LoopHooks

TOY = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 2, "batches_per_unit": 8}
PROGRAM_ARGUMENTS = ",".join(f"{name}={value}" for name, value in TOY.items())
NODES = ("pc-1", "pc-2", "pc-3")


class RecordedNode:
    """A node that trains the toy program in a thread of its own, and records it.

    after: waits before it joins.  on_step: told the node and the number of each step; it may hold still.
    """

    def __init__(self, address, folder, name, program, after=lambda: None, on_step=lambda node, number: None):
        self.on_step = on_step
        self.address, self.path, self.name, self.program, self.after = (
            address,
            folder / f"{name}.jsonl",
            name,
            program,
            after,
        )
        self.node: Node | None = None
        self.failure: BaseException | None = None
        self.steps = 0
        self.stepped = threading.Condition()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.after()
            recorder = NodeRecorder(self.path)
            with recorder, connect(self.address, self.name, events=recorder) as self.node:
                result = TrainingLoop(self.program, self.node, LoopHooks(watch=self._count)).run(
                    self.node.batches(self.program)
                )
                recorder.ended({"steps": result.statistics.steps}, host_leaves(result.params))
        except BaseException as error:
            self.failure = error
        with self.stepped:
            self.stepped.notify_all()

    def _count(self, number, loss):
        with self.stepped:
            self.steps = number
            self.stepped.notify_all()
        self.on_step(self, number)

    def wait_update(self):
        """Wait, in the node's own thread, until something is there that its next steps apply."""
        assert self.node.wait(lambda: self.node.peek() is not None, 60)

    def wait_steps(self, steps):
        with self.stepped:
            assert self.stepped.wait_for(lambda: self.steps >= steps or self.failure is not None, 60)

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive(), f"{self.name} does not end"
        if self.failure is not None:
            raise self.failure


class EndedRecorder(BrokerRecorder):
    """Tells when the broker has ended: who is told to stop hears nobody say goodbye any more."""

    def __init__(self, path):
        super().__init__(path)
        self.over = threading.Event()

    def ended(self, figures, leaves):
        super().ended(figures, leaves)
        self.over.set()


def recorded_run(folder: Path, program, **settings) -> tuple[list[Record], list[list[Record]]]:
    """Two nodes begin a run, a third joins it later; return what the broker and the nodes have recorded."""
    given = {"program": "text", "program_arguments": PROGRAM_ARGUMENTS, "start_nodes": 2, "initial": "founder"}
    run = RunSettings(**given | {"local_updates": "fixed", "lost_seconds": 10.0} | settings)
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(EndedRecorder(folder / "broker.jsonl"))
        hub = stack.enter_context(broker(run, events=recorder))
        trains = threading.Event()  # the third: until then there are units left for it

        def hold(node, number):
            if number in (8, 12, 16, 20):
                node.wait_update()  # however fast training is, it is not over before the first versions
            if number == 20:
                trains.wait(60)

        def both():
            for node in (first, second):
                node.wait_steps(20)

        first, second = (RecordedNode(hub.address, folder, name, program, on_step=hold) for name in NODES[:2])
        third = RecordedNode(hub.address, folder, NODES[2], program, after=both, on_step=lambda *_: trains.set())
        for node in (first, second, third):
            node.join()
        assert recorder.over.wait(60), "the run is over when all have left"
    return read_records(folder / "broker.jsonl"), [read_records(folder / f"{name}.jsonl") for name in NODES]


@pytest.fixture(scope="module")
def program():
    """One object for all runs: it is compiled once."""
    return load_program("text", dict(TOY))


@pytest.mark.parametrize(
    "settings",
    [
        {"release": "immediately", "every": 4, "delay": 2},
        {"release": "quorum", "every": 2, "delay": 4, "fragments": 2, "max_staleness": 2},
    ],
    ids=["immediately", "quorum with fragments, two in flight"],
)
def test_a_run_over_real_sockets_is_replayed_to_the_same_bits(tmp_path, program, settings):
    broker_records, node_records = recorded_run(tmp_path, program, units=24, **settings)
    result = replay(broker_records, node_records, program)
    assert result.difference == ""
    assert result.version > 5 and result.crc == result.recorded_crc
    assert list(result.nodes) == list(NODES)
    assert all(node.crc == node.recorded_crc is not None for node in result.nodes.values())
    moves = [one for one in broker_records if one["kind"] == "membership"]
    assert {one["node"] for one in moves if one["what"] == "joined"} == set(NODES)
    assert {one["node"] for one in moves if one["what"] in ("left", "lost")} == set(NODES)

    applied = [one for one in node_records[0] if one["kind"] == "application" and not one["draining"]]
    applied[len(applied) // 2]["step"] += 1  # a record of what did not happen
    assert not replay(broker_records, node_records, program).equal
