"""A pipeline over real sockets: the bits of one process, errors that name who is waited for, a model file by leaves."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zmqtrain as zt
from tests.grids import nightly
from zmqtrain.core.errors import CollectiveTimeout, ConfigError, DoesNotFit, ModelMismatch, NonFiniteDelta, PeerLost
from zmqtrain.pipeline import placement
from zmqtrain.pipeline.local import LocalPipeline
from zmqtrain.pipeline.schedule import Schedule
from zmqtrain.pipeline.split import Split
from zmqtrain.programs.text import TextProgram

STAGES, MICRO_BATCHES, STEPS = 3, 4, 4
PROGRAM = TextProgram(width=16, layers=3, heads=2, context=16, batch=8, clip=0.0, warmup=1)
LOWER = replace(PROGRAM, layers=1)
"""For pipelines of which only what they hold matters."""
OPTIMIZER = PROGRAM.optimizer()


@pytest.fixture
def few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each PC measures every segment, and compiles it for that: two a PC can be shared out unevenly."""
    monkeypatch.setattr(placement, "SEGMENTS_PER_PC", 2)


@pytest.fixture(scope="module")
def params() -> Any:
    return PROGRAM.init(0)


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    return list(PROGRAM.batches(0))[:STEPS]


@pytest.fixture(scope="module")
def stages(params: Any, batches: list[Any]) -> Split:
    return zt.split(PROGRAM.loss, params, batches[0], STAGES - 1, micro_batches=MICRO_BATCHES)


def on_all(hub: str, group: str, work: Callable[[zt.Communicator], Any], timeout_seconds: float = 60.0) -> list[Any]:
    """Do something on each of three ranks at the same time; return what each returned, or raised."""

    def one(rank: int) -> Any:
        with zt.Communicator.create(
            hub, STAGES, rank, group=group, name=f"pc-{rank}", timeout_seconds=timeout_seconds
        ) as comm:
            try:
                return work(comm)
            except zt.ZmqTrainError as error:
                return error

    with ThreadPoolExecutor(STAGES) as pool:
        return list(pool.map(one, range(STAGES)))


def assert_equal_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    ("schedule", "codec", "clip"),
    [
        ("1f1b", "bf16", 0.1),
        ("2bw", "int4:block=32", 0.0),
        *nightly(("1f1b", "int8:block=64", 0.0), ("gpipe", "float32", 0.0)),
    ],
)
def test_losses_and_parameters_are_those_of_one_process_bit_for_bit(
    hub: str, stages: Split, params: Any, batches: list[Any], schedule: Any, codec: str, clip: float, tmp_path: Path
) -> None:
    if schedule == "2bw":  # so that some micro-batches of a step are late, and some are not
        stages = zt.split(PROGRAM.loss, params, batches[0], STAGES - 1, micro_batches=2 * MICRO_BATCHES)
    local = LocalPipeline(stages, params, OPTIMIZER, Schedule(schedule), codec, clip_norm=clip)
    expected = [float(loss) for loss in local.steps(batches)]
    file = tmp_path / "model.safetensors"

    def train(comm: zt.Communicator) -> Any:
        own = stages[comm.rank].own(params)
        with zt.Pipeline(comm, stages, own, OPTIMIZER, schedule=schedule, codec=codec, clip_norm=clip) as pipeline:
            losses = list(pipeline.steps(batches))
            pipeline.save(file)
            return losses, pipeline.gather(), pipeline.statistics

    found = on_all(hub, f"bits-{schedule}-{codec}", train)
    assert [losses for losses, _, _ in found] == [expected] * STAGES
    assert_equal_bits(found[0][1], local.params())
    assert found[1][1] is None and found[2][1] is None
    assert_equal_bits(zt.load_model(file, like=params), local.params())
    assert all(statistics.steps == STEPS for _, _, statistics in found)
    assert sum(s.bytes_sent for _, _, s in found) == sum(s.bytes_received for _, _, s in found) > 0


def test_the_slow_pc_computes_least_and_the_bits_are_those_of_one_process(
    hub: str, few_segments: None, params: Any, batches: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pc, measured = threading.local(), placement.measure

    def measure(segments: Split) -> list[placement.SegmentFigures]:
        seconds = 3.0 if pc.rank == 0 else 1.0
        return [one._replace(forward_seconds=seconds, backward_seconds=3 * seconds) for one in measured(segments)]

    def train(comm: zt.Communicator) -> Any:
        pc.rank = comm.rank
        with zt.Pipeline.create(
            comm, PROGRAM.loss, PROGRAM.init, OPTIMIZER, batches[0], micro_batches=MICRO_BATCHES, key=0
        ) as pipeline:
            losses = list(pipeline.steps(batches))
            pipeline.save(tmp_path / "model.safetensors")
            return losses, pipeline.gather(), pipeline.placement

    monkeypatch.setattr(placement, "measure", measure)
    found = on_all(hub, "create", train)
    plans = [placed for _, _, placed in found]
    assert all(one.ranks == plans[0].ranks and one.plan == plans[0].plan for one in plans)
    segments = {rank: stage.end - stage.begin for rank, stage in zip(plans[0].ranks, plans[0].plan.stages, strict=True)}
    assert segments[0] < min(segments[1], segments[2]) and sorted(segments) == [0, 1, 2]
    assert "pc-0" in str(plans[0]) and "efficiency" in str(plans[0])
    local = LocalPipeline(plans[0].stages, params, OPTIMIZER, codec="bf16")
    expected = [float(loss) for loss in local.steps(batches)]
    assert [losses for losses, _, _ in found] == [expected] * STAGES
    assert_equal_bits(found[0][1], local.params())
    assert_equal_bits(zt.load_model(tmp_path / "model.safetensors", like=params), local.params())


def test_the_state_of_the_optimizer_in_a_file_takes_no_memory_and_gives_the_same_steps(
    hub: str, few_segments: None, batches: list[Any], tmp_path: Path
) -> None:
    def train(comm: zt.Communicator) -> Any:
        found = []
        for place in ("device", tmp_path / f"{comm.rank}"):
            with zt.Pipeline.create(
                comm, LOWER.loss, LOWER.init, OPTIMIZER, batches[0], micro_batches=MICRO_BATCHES, key=0,
                codec="float32", optimizer_on=place,
            ) as pipeline:  # fmt: skip
                assert pipeline.placement is not None
                costs = pipeline.placement.measured.costs
                found.append((list(pipeline.steps(batches)), [cost.held_bytes for cost in costs]))
        return found

    for (losses, held), (others, without) in on_all(hub, "optimizer", train):
        np.testing.assert_allclose(losses, others, rtol=1e-4)
        assert sum(without) == pytest.approx(sum(held) / 2, rel=0.01)  # two moments, beside parameters and gradients


def test_a_model_that_these_pcs_cannot_hold_is_refused_on_all(hub: str, few_segments: None, batches: list[Any]) -> None:
    def make(comm: zt.Communicator) -> Any:
        return zt.Pipeline.create(
            comm, LOWER.loss, LOWER.init, OPTIMIZER, batches[0], micro_batches=4, key=0, memory_bytes=10_000
        )

    for error in on_all(hub, "too small", make):
        assert isinstance(error, DoesNotFit) and error.available_bytes == 10_000


def test_a_pipeline_whose_stages_have_other_settings_is_refused_on_all(hub: str, stages: Split, params: Any) -> None:
    def make(comm: zt.Communicator) -> Any:
        codec = "int8" if comm.rank == 1 else "bf16"
        return zt.Pipeline(comm, stages, stages[comm.rank].own(params), codec=codec)

    for error in on_all(hub, "terms", make):
        assert isinstance(error, ConfigError) and "pc-1 has schedule 1f1b, depth roomy, codec int8" in str(error)


def test_the_parameters_of_another_stage_are_refused_in_words(
    hub: str, stages: Split, params: Any, batches: list[Any]
) -> None:
    def make(comm: zt.Communicator) -> Any:
        with zt.Pipeline(comm, stages.at_ranks([0, 2, 1]), stages[comm.rank].own(params)) as pipeline:
            return pipeline.step(batches[0])

    first, second, third = on_all(hub, "another", make)
    assert isinstance(first, PeerLost), first  # it has its own, and waits for nobody
    assert isinstance(second, ModelMismatch) and isinstance(third, ModelMismatch), (second, third)
    assert "rank 1 computes stage 2, and got other parameters" in str(second)


def test_a_stage_that_waits_says_for_which_micro_batch_and_for_whom(
    hub: str, stages: Split, params: Any, batches: list[Any]
) -> None:
    def train(comm: zt.Communicator) -> Any:
        with zt.Pipeline(comm, stages, stages[comm.rank].own(params)) as pipeline:
            comm.timeout_seconds = 20.0 if comm.rank != 1 else 1.0
            return pipeline.step(batches[0]) if comm.rank else comm.barrier()

    _, second, _ = on_all(hub, "waits", train, timeout_seconds=20.0)
    assert isinstance(second, CollectiveTimeout) and second.waiting_for == (0,)
    assert "stage 1 waits for the carry of micro-batch 0 of step 0 from stage 0 (pc-0)" in str(second)


def test_a_stage_that_is_lost_is_named_by_the_others(hub: str, stages: Split, params: Any, batches: list[Any]) -> None:
    def train(comm: zt.Communicator) -> Any:
        pipeline = zt.Pipeline(comm, stages, stages[comm.rank].own(params))
        pipeline.step(batches[0])
        return None if comm.rank == 2 else pipeline.step(batches[1])

    first, second, _ = on_all(hub, "lost", train)
    assert isinstance(first, PeerLost) and isinstance(second, PeerLost)
    assert any("pc-2" in str(error) for error in (first, second))  # the other may have heard of one that left for it
    assert first.__notes__[0].startswith("stage 0 waits") and second.__notes__[0].startswith("stage 1 waits")


def test_activations_that_are_not_finite_are_an_error_of_the_stage_that_made_them(
    hub: str, stages: Split, params: Any, batches: list[Any]
) -> None:
    def train(comm: zt.Communicator) -> Any:
        own = stages[comm.rank].own(params)
        if comm.rank == 0:
            own = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), own)
        return zt.Pipeline(comm, stages, own).step(batches[0])

    first, *others = on_all(hub, "nan", train)
    assert isinstance(first, NonFiniteDelta) and "the carry of micro-batch 0 of step 0 from pc-0" in str(first)
    assert all(isinstance(error, PeerLost) for error in others)


def test_another_number_of_processes_than_stages_is_refused_in_words(hub: str, stages: Split, params: Any) -> None:
    two = zt.split(PROGRAM.loss, params, next(iter(PROGRAM.batches(0))), 1, micro_batches=MICRO_BATCHES)
    for error in on_all(hub, "number", lambda comm: zt.Pipeline(comm, two, two[0].own(params))):
        assert isinstance(error, ConfigError) and "cut the loss 2 times" in str(error)


def test_a_discarded_pipeline_lets_go_of_its_arrays_while_somebody_holds_it(
    hub: str, params: Any, batches: list[Any]
) -> None:
    whole = zt.split(PROGRAM.loss, params, batches[0], 0, micro_batches=MICRO_BATCHES)
    with zt.Communicator.create(hub, 1, group="discarded") as comm:
        pipeline = zt.Pipeline(comm, whole, params, OPTIMIZER)
        pipeline.step(batches[0])
        own = [weakref.ref(leaf) for leaf in jax.tree.leaves(pipeline.own)]
        assert all(one() is not None for one in own)
        pipeline.discard()
        gc.collect()
        assert all(one() is None for one in own)


def test_late_gradients_are_warned_of_once_with_what_they_cost(
    hub: str, params: Any, batches: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    whole = zt.split(PROGRAM.loss, params, batches[0], 0, micro_batches=MICRO_BATCHES)
    with zt.Communicator.create(hub, 1, group="late") as comm:
        for schedule in ("1f1b", "2bw"):
            zt.Pipeline(comm, whole, params, OPTIMIZER, schedule=schedule).close()
    (said,) = [record.getMessage() for record in caplog.records if "2bw" in record.getMessage()]
    assert "with AdamW" in said and "with Muon" in said and "{" not in said
