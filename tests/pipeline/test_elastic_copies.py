"""Copies of stages: which versions they can make, and what two stages have in common."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.losses import NAMES, case
from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.pipeline.elastic import _Copy, common, flat, tree_of, values_of
from zmqtrain.pipeline.split import Split, split
from zmqtrain.pipeline.stage_optimizer import counted

FLOAT32 = codec_from_spec("float32")


def change(value: float) -> list[np.ndarray]:
    return [np.frombuffer(frame, np.uint8) for frame in encode_payload((FLOAT32,), (np.full(3, value, np.float32),))]


def test_a_copy_can_go_back_two_versions_and_no_further() -> None:
    copy = _Copy(np.zeros(3, np.float32), 4)
    for value in (1.0, 2.0, 4.0):
        copy.add(change(value), FLOAT32)
    assert (copy.version, copy.newest) == (5, 7)
    assert copy.at(6, FLOAT32).tolist() == [3.0] * 3
    assert (copy.version, copy.newest) == (6, 6)
    copy.add(change(8.0), FLOAT32)
    assert copy.at(7, FLOAT32).tolist() == [11.0] * 3


def test_the_count_of_a_schedule_goes_on_and_that_of_moments_starts_again() -> None:
    state = optax.adamw(optax.linear_schedule(1e-3, 0.0, 9)).init({"w": jnp.ones(3)})
    moments, *_, rate = counted(state, 7)
    assert int(moments.count) == 0, "the moments are of no gradient"
    assert int(rate.count) == 7


def cut(name: str, count: int) -> Split:
    one = case(name)
    return split(one.loss, one.params, one.batch, min(count, max(0, one.positions.units - 1)))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "marked"])
def test_a_flat_stage_is_its_tree_again(name: str) -> None:
    for stage in cut(name, 2):
        own = stage.own(case(name).params)
        values = flat(own)
        assert values.size == values_of(stage)
        again = tree_of(stage, values)
        assert jax.tree.structure(again) == jax.tree.structure(own)
        for leaf, other in zip(jax.tree.leaves(again), jax.tree.leaves(own), strict=True):
            assert jnp.array_equal(leaf, other)


@given(
    name=st.sampled_from([name for name in NAMES if name != "marked"]),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
)
def test_what_old_stages_have_in_common_with_a_new_one_is_all_of_it(name: str, before: int, after: int) -> None:
    old, new = cut(name, before), cut(name, after)
    held = [flat(stage.own(case(name).params)) for stage in old]
    for stage in new:
        values = np.full(values_of(stage), np.nan, np.float32)
        for source, have in zip(old, held, strict=True):
            for taken, put in common(source, stage):
                values[put] = have[taken]
        assert values.tobytes() == flat(stage.own(case(name).params)).tobytes()
