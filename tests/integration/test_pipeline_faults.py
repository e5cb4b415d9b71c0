"""Pipelines whose broker is lost, with a standby and without, and PCs that are lost while others wait for something."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import BrokerProcess
from test_pipeline_node import MICRO_BATCHES, PROGRAM, SGD, Changes, Leaves

import zmqtrain as zt
from zmqtrain.broker.standby import StandbyPlace
from zmqtrain.pipeline import pipeline_node
from zmqtrain.transport.key_folder import find_access

pytestmark = pytest.mark.nightly

SETTINGS = zt.RunSettings(
    every=2, delay=1, codec="int8", broadcast_codec="int8", initial="founder", heartbeat_seconds=0.1, lost_seconds=10.0
)
BATCHES = [batch for unit in range(4) for batch in PROGRAM.batches(unit)]


@pytest.fixture(autouse=True)
def compile_little(monkeypatch: pytest.MonkeyPatch, compile_quickly: None) -> None:
    monkeypatch.setattr(pipeline_node, "MOST_PARTS", 4)


class PCs:
    """PCs of pipelines, each a thread that trains until it is told to end, or to be lost."""

    def __init__(self, hub: str) -> None:
        self.hub = hub
        self.ends, self.lost = threading.Event(), set[str]()
        self.nodes: dict[str, zt.PipelineNode] = {}
        self.losses: dict[str, list[float]] = {}
        self.changes = Changes()
        self._pool = ThreadPoolExecutor(8)
        self.found: dict[str, Future[Any]] = {}

    def start(self, name: str, size: int, group: str = "pipeline") -> None:
        self.losses[name] = []
        self.found[name] = self._pool.submit(self._train, name, size, group)
        self.found[name].add_done_callback(self.changes.say)

    def _train(self, name: str, size: int, group: str) -> Any:
        with zt.PipelineNode.join(
            self.hub, size, PROGRAM.loss, PROGRAM.init, SGD, BATCHES[0], micro_batches=MICRO_BATCHES, key=0,
            name=name, group=group, codec="float32", patient=True,
        ) as node:  # fmt: skip
            self.nodes[name] = node
            for batch in itertools.cycle(BATCHES):
                if name in self.lost:
                    raise Leaves
                if self.ends.is_set():
                    node.leave()
                self.losses[name].append(node.step(batch))
                self.changes.say()
                if node.ended:
                    return node.recoveries

    def steps(self, *names: str) -> int:
        """The fewest steps that any of them has made."""
        return min(len(self.losses[name]) for name in names)

    def train_on(self, *names: str) -> None:
        """Wait for some steps more of each, and for aggregates in them."""
        self.changes.wait_until(lambda: self.nodes.keys() >= set(names), f"a pipeline with {', '.join(names)}")
        steps = {name: len(self.losses[name]) for name in names}
        versions = {name: self.nodes[name].version for name in names}

        def have() -> bool:
            for name in names:
                if (found := self.found[name]).done():
                    raise AssertionError(f"{name} has ended: {found.exception()!r}")
            return all(
                len(self.losses[name]) > steps[name] + 6 and self.nodes[name].version > versions[name] for name in names
            )

        self.changes.wait_until(have, f"more steps and aggregates of {', '.join(names)}")

    def end(self) -> dict[str, Any]:
        """End all, and return what they have recovered from, or their errors."""
        self.ends.set()
        found = {name: one.exception(60) or one.result() for name, one in self.found.items()}
        self._pool.shutdown()
        return found


@pytest.fixture
def started() -> Iterator[list[PCs]]:
    pcs: list[PCs] = []
    yield pcs
    for one in pcs:
        one.ends.set()


def test_pipelines_go_on_with_the_standby_when_the_first_broker_is_killed(started: list[PCs]) -> None:
    with BrokerProcess(SETTINGS, None) as first:
        place = StandbyPlace(first=first.address, takeover_seconds=0.5)
        with BrokerProcess(None, None, standby=place) as standby:
            pcs = PCs(f"{first.address},{standby.address}")
            started.append(pcs)
            names = ("a0", "a1", "b0", "b1")
            for name in names:
                pcs.start(name, 2, group=name[0])
            pcs.changes.wait_until(lambda: pcs.steps(*names) > 4, "some steps of all")
            pcs.changes.wait_until(
                lambda: all((roster := pcs.nodes[name].roster) and roster.hub["standby"] for name in names),
                "a standby in step",
            )
            pcs.train_on(*names)
            first.kill()
            pcs.train_on(*names)
            found = pcs.end()
            assert not any(isinstance(one, BaseException) for one in found.values()), found
            assert all(losses[-1] < losses[0] for losses in pcs.losses.values())


def test_a_pc_that_is_lost_while_the_broker_is_away_costs_no_other(started: list[PCs], tmp_path: Path) -> None:
    with BrokerProcess(SETTINGS, tmp_path) as first:
        pcs = PCs(first.address)
        started.append(pcs)
        names = ("a0", "a1", "a2", "b0")
        for name in names:
            pcs.start(name, 3 if name[0] == "a" else 1, group=name[0])
        pcs.changes.wait_until(lambda: pcs.steps(*names) > 4, "some steps of all")
        pcs.train_on(*names)
        first.kill()
        pcs.lost.add("a1")
        pcs.changes.wait_until(pcs.found["a1"].done, "the end of a1")
        pcs.changes.wait_until(lambda: bool(pcs.nodes["a0"].recoveries), "another plan")
        with BrokerProcess(SETTINGS, tmp_path, port=first.port):
            pcs.train_on("a0", "a2", "b0")
            found = pcs.end()
    assert isinstance(found.pop("a1"), Leaves)
    assert [found[name] for name in ("a0", "a2")] == [[("a1",)]] * 2 and found["b0"] == []
    assert np.isfinite(pcs.losses["b0"]).all()


def test_pcs_that_are_left_over_meet_though_they_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_node, "MEET_SECONDS", 1.0)
    met: list[int] = []

    class Left:
        size = 3

        def close(self) -> None:
            """It was."""

    with zt.BrokerThread("tcp://127.0.0.1:0", SETTINGS) as broker:

        def one(late: float) -> None:
            node = object.__new__(zt.PipelineNode)
            node._comm, node._pipeline_id = Left(), "0123"
            node._meeting = pipeline_node.Meeting(broker.address, find_access(broker.address), None, "g", 4, 30.0, True)
            node._begin_with = lambda comm: (met.append(comm.size), comm.close())
            threading.Event().wait(late)
            node._meet_again()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, (0.0, 0.3)))
    assert met == [2, 2]


def test_a_pc_that_is_lost_while_pcs_meet_again_leaves_nobody_waiting_for_good(
    started: list[PCs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_node, "MEET_SECONDS", 1.0)
    meet = zt.PipelineNode._meet_again

    def meet_or_be_lost(node: zt.PipelineNode) -> None:
        if node._meeting.name == "a0":
            raise Leaves
        meet(node)

    monkeypatch.setattr(zt.PipelineNode, "_meet_again", meet_or_be_lost)
    with zt.BrokerThread("tcp://127.0.0.1:0", SETTINGS) as broker:
        pcs = PCs(broker.address)
        started.append(pcs)
        for name in ("a0", "a1", "a2"):
            pcs.start(name, 3)
        pcs.changes.wait_until(lambda: pcs.steps("a0", "a1", "a2") > 4, "some steps of all")
        pcs.lost.add("a2")
        pcs.train_on("a0", "a1")
        pcs.start("late", 3)  # so that they end, to meet it; and a0 is lost then
        pcs.changes.wait_until(pcs.found["a0"].done, "the end of a0")
        pcs.train_on("a1")
        assert pcs.nodes["a1"].comm.size == 1
        pcs.start("later", 3)  # and now there are three again
        pcs.changes.wait_until(lambda: pcs.nodes["a1"].comm.size == 3, "a pipeline of three")
        pcs.train_on("a1", "late", "later")
        found = pcs.end()
    assert all(isinstance(found.pop(name), Leaves) for name in ("a0", "a2"))
    assert not any(isinstance(one, BaseException) for one in found.values()), found
