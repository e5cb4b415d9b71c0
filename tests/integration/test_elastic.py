"""A pipeline that loses a PC, over real sockets: the others go on with the same batches; who cannot says why."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zmqtrain as zt
from tests.grids import nightly
from zmqtrain.core.errors import ConfigError, NonFiniteDelta, StageLost
from zmqtrain.pipeline import placement
from zmqtrain.pipeline.elastic import ElasticPipeline
from zmqtrain.pipeline.local import LocalPipeline
from zmqtrain.programs.text import TextProgram

MICRO_BATCHES, STEPS, EVERY = 4, 9, 2
PROGRAM = TextProgram(width=16, layers=2, heads=2, context=16, batch=8, tied=False, clip=0.0)
SGD = optax.sgd(0.3)


class Leaves(Exception):
    """Ends a PC of a test."""


@pytest.fixture(autouse=True)
def compile_little(monkeypatch: pytest.MonkeyPatch, compile_quickly: None) -> None:
    monkeypatch.setattr(placement, "SEGMENTS_PER_PC", 2)


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    return list(PROGRAM.batches(0))[:STEPS]


def on_all(hub: str, group: str, size: int, work: Callable[[ElasticPipeline], Any], **options: Any) -> list[Any]:
    """Make an elastic pipeline on each of so many ranks, and do something with it; return what came of it."""

    def one(rank: int) -> Any:
        try:
            with (
                zt.Communicator.create(hub, size, rank, group=group, name=f"pc-{rank}", timeout_seconds=60.0) as comm,
                ElasticPipeline.create(
                    comm,
                    PROGRAM.loss,
                    PROGRAM.init,
                    options.get("optimizer", SGD),
                    next(iter(PROGRAM.batches(0))),
                    micro_batches=MICRO_BATCHES,
                    key=0,
                    copy_every=EVERY,
                    copy_codec="int8:block=64",
                ) as pipeline,
            ):
                return work(pipeline)
        except (zt.ZmqTrainError, Leaves) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def undisturbed(placed: Any, batches: list[Any]) -> list[float]:
    local = LocalPipeline(placed.stages, PROGRAM.init(0), SGD, codec="bf16")
    return [float(loss) for loss in local.steps(batches)]


@pytest.mark.parametrize("stage", [2, *nightly(0, 1)])
def test_whichever_stage_is_lost_the_others_train_on_the_same_batches(
    hub: str, batches: list[Any], tmp_path: Path, stage: int
) -> None:
    def train(pipeline: ElasticPipeline) -> Any:
        before, losses = pipeline.placement, []
        for step, batch in enumerate(batches):
            if step == 5 and pipeline.comm.size == 3 and pipeline.stage.number == stage:
                raise Leaves
            losses.append(pipeline.step(batch))
        pipeline.save(tmp_path / "model.safetensors")
        return losses, pipeline.gather(), before, pipeline.recoveries, pipeline.comm.size

    found = [one for one in on_all(hub, f"elastic-{stage}", 3, train) if not isinstance(one, Leaves)]
    assert len(found) == 2, found
    (losses, whole, before, recoveries, size), (others, nothing, *_) = found
    assert losses == others and size == 2 and nothing is None
    lost = before.plan.stages[stage].pc
    assert [one.lost for one in recoveries] == [(lost,)] and 0 <= recoveries[0].again <= 2 * EVERY
    expected = undisturbed(before, batches)
    assert losses[:3] == expected[:3]  # to the bit, before anything happened
    np.testing.assert_allclose(losses, expected, atol=0.02)  # after it, but for the code of the copies
    assert min(expected[0] - expected[-1], losses[0] - losses[-1]) > 0.05
    saved = zt.load_model(tmp_path / "model.safetensors", like=PROGRAM.init(0))
    for one, other in zip(jax.tree.leaves(saved), jax.tree.leaves(whole), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.nightly
def test_losses_one_after_the_other_leave_one_pc_that_has_all(hub: str, batches: list[Any]) -> None:
    def train(pipeline: ElasticPipeline) -> Any:
        losses = []
        for step, batch in enumerate(batches):
            if (step, pipeline.comm.size) in ((3, 3), (6, 2)) and pipeline.comm.rank == pipeline.comm.size - 1:
                raise Leaves
            losses.append(pipeline.step(batch))
        return losses, [one.lost for one in pipeline.recoveries], pipeline.stage, pipeline.placement

    (found,) = [one for one in on_all(hub, "elastic-alone", 3, train) if not isinstance(one, Leaves)]
    losses, lost, stage, placed = found
    assert len(lost) == 2 and stage.stages == 1 and len(placed.plan.stages) == 1
    np.testing.assert_allclose(losses, undisturbed(placed, batches), atol=0.02)


@pytest.mark.nightly
def test_counts_of_the_optimizer_go_on(hub: str, batches: list[Any]) -> None:
    optimizer = optax.adamw(optax.linear_schedule(1e-3, 0.0, 100))

    def train(pipeline: ElasticPipeline) -> Any:
        for step, batch in enumerate(batches):
            if step == 5 and pipeline.comm.size == 2 and pipeline.comm.rank == 1:
                raise Leaves
            pipeline.step(batch)
        assert pipeline._pipeline is not None
        assert pipeline._pipeline.run.optimizer is not None
        return list(pipeline._pipeline.run.optimizer.states)

    (state,) = [
        one for one in on_all(hub, "elastic-counts", 2, train, optimizer=optimizer) if not isinstance(one, Leaves)
    ]
    counts = [int(leaf) for leaf in jax.tree.leaves(state) if np.ndim(leaf) == 0]
    assert max(counts) == STEPS > min(counts)  # of the rate, and of the moments


@pytest.mark.nightly
def test_a_stage_that_is_lost_with_its_copy_is_said_to_be(hub: str, batches: list[Any]) -> None:
    def train(pipeline: ElasticPipeline) -> Any:
        for step, batch in enumerate(batches):
            if step == 5 and pipeline.stage.number in (0, 1) and pipeline.comm.size == 3:
                raise Leaves
            pipeline.step(batch)
        return pipeline.recoveries

    (found,) = [one for one in on_all(hub, "elastic-two", 3, train) if not isinstance(one, Leaves)]
    if isinstance(found, list):  # the second was seen to be lost after the first was made good
        assert sum(len(one.lost) for one in found) == 2
    else:
        assert isinstance(found, StageLost) and "stage 0" in str(found)


@pytest.mark.nightly
def test_a_loss_that_is_not_finite_is_nobodys_loss(hub: str, batches: list[Any]) -> None:
    def train(pipeline: ElasticPipeline) -> Any:
        for _ in pipeline.steps(batches):
            pass

    found = on_all(hub, "elastic-nan", 2, train, optimizer=optax.sgd(1e30))
    assert any(isinstance(one, NonFiniteDelta) for one in found)
    assert all(isinstance(one, NonFiniteDelta | zt.PeerLost) for one in found), found


def test_what_cannot_be_elastic_is_refused(hub: str) -> None:
    with zt.Communicator.create(hub, 1, 0, group="elastic-refused") as comm:
        for options in ({"schedule": "2bw"}, {"copy_every": 0}):
            with pytest.raises(ConfigError):
                ElasticPipeline.create(comm, PROGRAM.loss, PROGRAM.init, SGD, {}, micro_batches=4, **options)
