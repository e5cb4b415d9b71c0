"""Runs of a PC with four devices and one with one; `test_devices.py` runs this file in a process that has four."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from runs import broker

from tests.grids import nightly
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect
from zmqtrain.programs import load_program
from zmqtrain.train.loop import TrainingLoop
from zmqtrain.train.minibatch import FixedMinibatch
from zmqtrain.train.program_wrappers import DataParallel, on_all_devices
from zmqtrain.train.step import MinibatchStep, measure_footprint
from zmqtrain.train.sync import DelayedSync

SHAPES = {"w": (16, 4096), "b": (40,)}
GRID = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
ALONE = dict.fromkeys(SHAPES)
REPLICATED = dict.fromkeys(SHAPES, NamedSharding(GRID, P()))
FSDP = {"w": NamedSharding(GRID, P("data", "model")), "b": NamedSharding(GRID, P(("data", "model")))}


def parameters(homes):
    random = np.random.default_rng(0)
    leaves = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {name: jax.numpy.array(leaf) if homes[name] is None else jax.device_put(leaf, homes[name])
            for name, leaf in leaves.items()}  # fmt: skip


def batches(unit: int) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(unit)
    for _ in range(4):
        yield {name: (0.01 * random.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


@jax.jit
def walk(params, batch):
    """A step of which every device computes the very bits that one alone would: no sum goes over devices."""
    return jax.tree.map(jax.numpy.add, params, batch)


class Walker(threading.Thread):
    """A node that takes steps of a random walk, with its parameters and its anchor where the test wants them."""

    def __init__(self, address, name, homes=ALONE, anchor="device", codec_on="auto"):
        super().__init__(daemon=True)
        self.address, self.named, self.homes, self.anchor, self.codec_on = address, name, homes, anchor, codec_on
        self.failure = None
        self.start()

    def run(self):
        try:
            with connect(self.address, self.named, codec_on=self.codec_on) as node:
                sync = DelayedSync(node, parameters(self.homes), anchor=self.anchor)
                params = sync.start
                for batch in node.batches(batches):
                    params = sync.step(walk(params, batch))
                params = sync.finish(params)
                self.coder = node.device_coder
            self.homes_after = {name: leaf.sharding for name, leaf in params.items()}
            self.ended = {name: np.asarray(leaf) for name, leaf in params.items()}
            self.shared = {name: np.asarray(leaf) for name, leaf in sync.params.items()}
        except BaseException as error:
            self.failure = error

    def joined(self):
        self.join(60)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure
        return self


def strict_run(fragments, **placed):
    """Two nodes of a strict run, the second with its things placed; both, ended."""
    settings = RunSettings(
        mode="strict", release="all", every=2, delay=2, start_nodes=2, units=8, fragments=fragments, lost_seconds=60.0
    )
    with broker(settings) as hub:
        walkers = [Walker(hub.address, "pc-1"), Walker(hub.address, "pc-2", **placed)]
        return [walker.joined() for walker in walkers]


@pytest.fixture(scope="module")
def alike():
    """What two ordinary nodes end with, by the number of fragments."""
    return {fragments: strict_run(fragments) for fragments in (1, 3)}


@pytest.mark.parametrize(
    ("fragments", "homes", "anchor"),
    [
        (1, FSDP, "host"),
        (3, FSDP, "device"),
        *nightly((1, FSDP, "device"), (3, FSDP, "host"), (1, ALONE, "host"), (3, ALONE, "host")),
        *nightly((1, REPLICATED, "device"), (3, REPLICATED, "device")),
    ],
)
def test_a_run_ends_with_the_same_bits_wherever_one_node_has_its_parameters_and_its_anchor(
    alike, fragments, homes, anchor
):
    for ours, theirs in zip(strict_run(fragments, homes=homes, anchor=anchor), alike[fragments], strict=True):
        for name in SHAPES:
            assert ours.shared[name].tobytes() == theirs.shared[name].tobytes()
            assert ours.ended[name].tobytes() == theirs.ended[name].tobytes()


def test_parameters_end_where_they_began():
    _, spread = strict_run(3, homes=FSDP)
    assert spread.homes_after == FSDP


def test_replicated_parameters_are_compressed_on_one_of_their_devices_and_spread_ones_on_the_processor(alike, caplog):
    _, replicated = strict_run(3, homes=REPLICATED, codec_on="device")
    assert replicated.coder is not None and replicated.coder.bytes_fetched > 0
    _, spread = strict_run(3, homes=FSDP, codec_on="device")
    assert spread.coder is None and "its parameters lie on several" in caplog.text
    for one in (replicated, spread):
        assert all(one.ended[name].tobytes() == alike[3][1].ended[name].tobytes() for name in SHAPES)


# ---------------------------------------------------------------------- --devices all


def test_a_program_whose_batches_four_devices_share_learns_as_on_one(compile_this_quickly):
    program = load_program("image", {"width": 8})
    shared = on_all_devices(program)
    assert isinstance(shared, DataParallel) and shared.devices == tuple(jax.devices())
    ends = []
    for one in (program, shared):
        step, coming = MinibatchStep(one, FixedMinibatch(2), time), one.batches(0)
        state = step.init(0)
        while (made := step.step(state, coming)) is not None:
            state, loss, _ = made
        ends.append((state, loss))
    (alone, _), (four, loss) = ends
    assert {leaf.sharding for leaf in jax.tree.leaves((four, loss))} == {shared.everywhere}
    for ours, theirs in zip(jax.tree.leaves(four.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-3)
    assert abs(shared.evaluate(four.params)["loss"] - program.evaluate(alone.params)["loss"]) < 1e-3


def test_each_device_computes_its_part_of_a_batch_and_the_step_is_compiled_once(compile_this_quickly, caplog):
    program = DataParallel(load_program("image", {"width": 8}))
    batch = next(program.batches(0))
    assert {shard.data.shape[0] for shard in batch["image"].addressable_shards} == {32 // 4}
    alone = measure_footprint(program.program, FixedMinibatch())
    assert measure_footprint(program, FixedMinibatch(), 0, program.everywhere).activation_bytes < alone.activation_bytes
    settings = RunSettings(program="image", every=4, units=2, evaluate_seconds=0)
    with broker(settings) as hub, connect(hub.address, "pc-1") as node, jax.log_compiles():
        caplog.clear()
        TrainingLoop(program, node).run(node.batches(program))
    steps = [record for record in caplog.records if "XLA compilation of jit(_one)" in record.getMessage()]
    assert len(steps) <= 1


def test_a_batch_that_cannot_be_shared_is_refused_by_name():
    program = DataParallel(load_program("image", {"batch": 30}))
    with pytest.raises(
        ConfigError, match=r"a batch's image has the shape \[30,8,8\], .* into 4 equal parts.*--devices one"
    ):
        next(program.batches(0))
