"""Pipelines that train data parallel with a hub, over real sockets: two of two PCs, one that loses a PC, data units."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zmqtrain as zt
from tests.grids import nightly
from zmqtrain.core.errors import ConfigError, JoinRefused
from zmqtrain.pipeline import pipeline_node
from zmqtrain.programs.text import TextProgram

MICRO_BATCHES = 4
PROGRAM = TextProgram(width=16, layers=1, heads=2, context=16, batch=8, tied=True, clip=0.0)
SGD = optax.sgd(0.1)
EXACT = zt.RunSettings(
    every=1, delay=0, codec="float32", broadcast_codec="float32", release="bounded:staleness=0", initial="founder"
)
"""Each step waits for the others' and is the mean of all."""


class Leaves(Exception):
    """Ends a PC of a test."""


@pytest.fixture(autouse=True)
def compile_little(monkeypatch: pytest.MonkeyPatch, compile_quickly: None) -> None:
    monkeypatch.setattr(pipeline_node, "MOST_PARTS", 4)


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    return [batch for unit in range(4) for batch in PROGRAM.batches(unit)]


def on_all(hub: str, sizes: list[int], work: Callable[[zt.PipelineNode, int], Any], **options: Any) -> list[list[Any]]:
    """Join a run with pipelines of these sizes, and do something on each PC; return what came of it, by pipeline."""

    def one(place: tuple[int, int]) -> Any:
        number, rank = place
        try:
            with zt.PipelineNode.join(
                hub, sizes[number], PROGRAM.loss, PROGRAM.init, SGD, next(iter(PROGRAM.batches(0))),
                micro_batches=MICRO_BATCHES, key=0, group=f"p{number}", name=f"pc{number}{rank}",
                codec=options.get("codec", "float32"),
            ) as node:  # fmt: skip
                return work(node, number)
        except (zt.ZmqTrainError, Leaves) as error:
            return error

    places = [(number, rank) for number, size in enumerate(sizes) for rank in range(size)]
    with ThreadPoolExecutor(len(places)) as pool:
        found = dict(zip(places, pool.map(one, places), strict=True))
    return [[found[number, rank] for rank in range(size)] for number, size in enumerate(sizes)]


def trained(node: zt.PipelineNode, batches: list[Any]) -> Any:
    """Train, finish, and return the losses and the whole tree, on the PC that has it."""
    losses = [node.step(batch) for batch in batches]
    node.finish()
    return losses, node.gather(), node.version


class Changes:
    """Changes in other threads, which can be waited for."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def say(self, *_: object) -> None:
        """Something has changed."""
        with self._condition:
            self._condition.notify_all()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so; fails after a minute and says what was waited for."""
        with self._condition:
            assert self._condition.wait_for(condition, 60.0), f"after a minute: not {what}"


def leaves_of(found: list[Any]) -> list[Any]:
    whole = next(one[1] for one in found if isinstance(one, tuple) and one[1] is not None)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(whole)]


def test_two_pipelines_make_the_steps_of_two_whole_models(batches: list[Any]) -> None:
    steps = 5
    with zt.BrokerThread("tcp://127.0.0.1:0", replace(EXACT, start_nodes=2)) as broker:
        ours = [batches[:steps], batches[steps : 2 * steps]]
        first, second = on_all(broker.address, [2, 2], lambda node, number: trained(node, ours[number]))
    assert all(isinstance(one, tuple) for one in (*first, *second)), (first, second)
    # all have the same parameters at the end, however their stages are cut
    for one, other in zip(leaves_of(first), leaves_of(second), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)  # what is added to them is rounded here and there
    assert first[0][0] == first[1][0] and second[0][0] == second[1][0]  # the losses, on all PCs
    # and they are those of two whole models that take the mean of their steps
    params, gradient = PROGRAM.init(0), jax.jit(jax.grad(PROGRAM.loss))
    for step in range(steps):
        gradients = [gradient(params, own[step]) for own in ours]
        params = jax.tree.map(lambda one, *both: one - 0.1 * (both[0] + both[1]) / 2, params, *gradients)
    for one, expected in zip(leaves_of(first), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


@pytest.mark.parametrize("codec", ["ternary", *nightly("topk:density=0.05", "int8")])
def test_with_the_defaults_codecs_and_delay_all_end_with_the_same_parameters(
    batches: list[Any], tmp_path: Path, codec: str
) -> None:
    settings = zt.RunSettings(every=2, delay=1, codec=codec, broadcast_codec=codec, initial="founder")
    with zt.BrokerThread("tcp://127.0.0.1:0", settings, checkpoint=tmp_path) as broker:
        first, second = on_all(
            broker.address, [2, 1], lambda node, number: trained(node, batches[number::2][:12]), codec="bf16"
        )
    assert all(isinstance(one, tuple) for one in (*first, *second)), (first, second)
    assert first[0][0][-1] < first[0][0][0] - 0.5
    # the hub's file has whole leaves under the names of the tree, though it has them in pieces
    saved = zt.load_model(tmp_path / "model.safetensors", like=PROGRAM.init(0))
    newest = max((first, second), key=lambda found: found[0][2])  # who left first lacks what the other drained
    for one, other in zip(leaves_of(newest), jax.tree.leaves(saved), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_pipeline_that_loses_a_pc_goes_on_from_the_shared_parameters(batches: list[Any]) -> None:
    settings = zt.RunSettings(every=2, delay=1, codec="int8", broadcast_codec="int8", initial="founder")
    with zt.BrokerThread("tcp://127.0.0.1:0", settings) as broker:

        def work(node: zt.PipelineNode, number: int) -> Any:
            losses = []
            for step, batch in enumerate(batches[number::2][:12]):
                if number == 0 and step == 6 and node.comm.size == 3 and node.placement.ranks[0] == node.comm.rank:
                    raise Leaves  # the leader, in the middle of a run
                losses.append(node.step(batch))
            node.finish()
            return losses, node.gather(), node.version, node.recoveries

        first, second = on_all(broker.address, [3, 1], work)
    left = [one for one in first if not isinstance(one, Leaves)]
    assert len(left) == 2 and all(isinstance(one, tuple) for one in (*left, *second)), (first, second)
    losses, others = left[0][0], left[1][0]
    np.testing.assert_array_equal(losses, others)
    assert [len(lost) for lost in left[0][3]] == [1]
    assert len(losses) == 12 and losses[-1] < losses[0] and np.isnan(losses).sum() <= 1


def test_data_units_are_dealt_to_a_pipeline_as_to_a_node(tmp_path: Path) -> None:
    settings = zt.RunSettings(
        every=2, delay=1, codec="int8", broadcast_codec="int8", initial="founder", units=6,
    )  # fmt: skip
    with zt.BrokerThread("tcp://127.0.0.1:0", settings, checkpoint=tmp_path) as broker:

        def work(node: zt.PipelineNode, number: int) -> Any:
            losses = [node.step(batch) for batch in node.batches(lambda unit: list(PROGRAM.batches(unit))[:3])]
            node.finish()
            return losses, node.gather(), node.version

        first, second = on_all(broker.address, [2, 1], work)
        broker._thread.join(60.0)
        assert not broker.running, "the run has not ended, with its units done and all drained"
    assert all(isinstance(one, tuple) for one in (*first, *second)), (first, second)
    assert first[0][0] == first[1][0] and len(first[0][0]) + len(second[0][0]) == 18
    for one, other in zip(leaves_of(first), leaves_of(second), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)  # who drains early takes the last version, too


def test_a_pc_that_leaves_has_all_send_what_is_pending_and_one_that_waits_takes_its_place(batches: list[Any]) -> None:
    settings = zt.RunSettings(every=4, delay=1, codec="float32", broadcast_codec="float32", initial="founder")
    with zt.BrokerThread("tcp://127.0.0.1:0", settings) as broker:
        waiting = threading.Event()
        found: dict[str, Any] = {}

        def one(name: str) -> None:
            if name == "third":
                waiting.wait()
            with zt.PipelineNode.join(
                broker.address, 2, PROGRAM.loss, PROGRAM.init, SGD, batches[0], micro_batches=MICRO_BATCHES, key=0,
                name=name, codec="float32", patient=True,
            ) as node:  # fmt: skip
                losses, sizes = [], []
                while not node.ended and not (sizes[-3:] == [2] * 3 and (name == "third" or 1 in sizes)):
                    if name == "first" and len(losses) == 2:
                        node.leave()
                    sizes.append(node.comm.size)
                    if sizes[-1] == 1:
                        waiting.set()
                    losses.append(node.step(batches[len(losses) % len(batches)]))
                found[name] = losses, sizes, node.ended, node.recoveries, broker.broker.hub.samples

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(one, ("first", "second", "third")))
    first, second, third = found["first"], found["second"], found["third"]
    assert first[2] and len(first[0]) == 3  # it has left, after the step in which it was told to
    assert first[4] == 3 * 8  # and nothing was lost: three steps of eight samples are in the shared parameters
    assert second[3] == [("first",)] and third[1] == [2] * 3


def test_a_node_with_the_whole_model_is_told_what_the_run_is(batches: list[Any]) -> None:
    with zt.BrokerThread("tcp://127.0.0.1:0", EXACT) as broker:

        def work(node: zt.PipelineNode, number: int) -> Any:
            node.step(batches[0])
            with pytest.raises(JoinRefused, match="start it as a pipeline"), zt.connect(broker.address, "whole") as one:
                zt.DelayedSync(one, PROGRAM.init(0))
            return True

        assert on_all(broker.address, [1], work) == [[True]]


def test_a_pc_that_cannot_join_leaves_nobody_waiting(batches: list[Any]) -> None:
    changes = Changes()
    with zt.BrokerThread("tcp://127.0.0.1:0", EXACT, watch=changes.say) as broker:

        def one(rank: int) -> BaseException:
            def options() -> dict[str, Any]:
                return {"codec_on": "nowhere"} if rank else {}

            with pytest.raises(ConfigError) as found:
                zt.PipelineNode.join(
                    f"tcp://127.0.0.1:1,{broker.address}", 2, PROGRAM.loss, PROGRAM.init, SGD, batches[0],
                    micro_batches=MICRO_BATCHES, key=0, name=f"pc{rank}", node_options=options,
                )  # fmt: skip
            return found.value

        with ThreadPoolExecutor(2) as pool:
            said = [str(error) for error in pool.map(one, range(2))]
        assert "this pipeline cannot join the run, as pc1 cannot" in said[0] and "codec_on" in said[1]
        changes.wait_until(lambda: broker.roster is not None and not broker.roster.members, "a run without members")


def test_a_schedule_that_does_not_end_its_steps_is_refused_before_anybody_is_met() -> None:
    batch = next(iter(PROGRAM.batches(0)))
    with pytest.raises(ConfigError, match="take 1f1b"):
        zt.PipelineNode.join(
            "tcp://127.0.0.1:1", 2, PROGRAM.loss, PROGRAM.init, SGD, batch, micro_batches=4, schedule="2bw"
        )
