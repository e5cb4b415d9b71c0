"""A node of the command line that is one PC of a pipeline: how many PCs, how many micro-batches, which flags."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from zmqtrain.cli.node import NodeConfig
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_PIPELINE, RunSettings
from zmqtrain.pipeline.of_program import fewest_pcs, micro_batches_of, optimizer_of
from zmqtrain.programs.image import ImageProgram
from zmqtrain.programs.text import TextProgram

TEXT = TextProgram(width=16, layers=2, heads=2, context=16, batch=8, clip=0.5)


@pytest.mark.parametrize(("rows", "pcs", "count"), [(64, 2, 8), (32, 4, 16), (12, 2, 12), (6, 2, 6), (1, 4, 1)])
def test_a_batch_is_cut_into_four_micro_batches_for_each_pc_or_as_many_as_can_be(rows, pcs, count):
    assert micro_batches_of({"x": np.zeros((rows, 3)), "key": np.float32(0)}, pcs) == count


def test_auto_takes_as_few_pcs_as_hold_the_model():
    optimizer, _ = optimizer_of(TEXT)
    values = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(TEXT.init, 0)))
    held = 16 * values  # parameters, gradients and two moments
    assert fewest_pcs(TEXT, optimizer, 2 * held) == 1
    assert fewest_pcs(TEXT, optimizer, held) == 2
    assert fewest_pcs(TEXT, optimizer, held // 3) == 4
    assert fewest_pcs(TEXT, None, held) == 1  # its state lies elsewhere
    with pytest.raises(ConfigError, match="a pipeline of"):
        fewest_pcs(TEXT, optimizer, held // 100)


def test_a_program_says_its_optimizer_for_stages_and_how_gradients_are_clipped():
    _, clip = optimizer_of(TEXT)
    assert clip == 0.5
    _, clip = optimizer_of(ImageProgram())
    assert clip == 0.0
    assert isinstance(optimizer_of(TEXT)[0], optax.GradientTransformation)


@pytest.mark.parametrize(
    "flags", [{"exchange": "allreduce:ring"}, {"devices": "all"}, {"anchor": "host"}, {"induce": "cedar"}]
)
def test_flags_that_a_pc_of_a_pipeline_cannot_follow_are_named(flags):
    assert not NodeConfig(hub="tcp://127.0.0.1:5555").not_in_pipelines
    (named,) = NodeConfig(hub="tcp://127.0.0.1:5555", **flags).not_in_pipelines
    assert named.startswith(f"--{next(iter(flags))}")


def test_how_many_pcs_a_pipeline_has_is_a_setting_of_the_run():
    assert RunSettings().pipeline == 0 and RunSettings(pipeline="auto").pipeline == AUTO_PIPELINE
    for changes in ({"shards": 2}, {"elastic": 0.5}, {"initial": "mean"}, {"start_nodes": 2}):
        with pytest.raises(ConfigError, match="pipelines train with one broker"):
            RunSettings(**{"pipeline": 2, "initial": "best", **changes})
    with pytest.raises(ConfigError, match="pipeline must be"):
        RunSettings(pipeline=-2)
