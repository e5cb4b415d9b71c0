"""The optimizer of a stage: wherever its state lies, its updates are those of the whole tree."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.grids import nightly
from tests.pipeline.losses import normal
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.pipeline import stage_optimizer
from zmqtrain.pipeline.stage_optimizer import StageOptimizer, counts, groups_of, moving_bytes

OWN = {
    "a": [normal(0, 4, 6), normal(1, 6)],
    "b": {"w": normal(2, 6, 8), "scale": normal(3, 8)[0]},
    "c": normal(4, 3, 5),
}
OPTIMIZERS = {
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 20)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "muon": optax.contrib.muon(0.1),
    "short moments": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "by name": optax.multi_transform(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.01)},
        lambda tree: jax.tree.map_with_path(lambda path, _: "fast" if path[0].key == "a" else "slow", tree),
    ),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch, compile_quickly: None) -> None:
    monkeypatch.setattr(stage_optimizer, "GROUP_BYTES", 100)


def slopes(step: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.cos(step + 3 * leaf), OWN)


def copy_of(tree: Any) -> Any:
    return jax.tree.map(jnp.array, tree)


GRID = [(name, place) for name in OPTIMIZERS for place in ("device", "host", "file")]
OFTEN = [("adamw", "host"), ("by name", "file")]


@pytest.mark.parametrize(("name", "place"), [*OFTEN, *nightly(*(one for one in GRID if one not in OFTEN))])
def test_updates_are_those_of_the_whole_tree(name: str, place: str, tmp_path: Path) -> None:
    transformation = OPTIMIZERS[name]
    state, params, whole = transformation.init(OWN), OWN, jax.jit(transformation.update)
    own, on = copy_of(OWN), tmp_path / "new" if place == "file" else place
    optimizer = StageOptimizer(transformation, own, on=on, in_place=True, predicts=True)
    for step in range(3):
        before = params
        updates, state = whole(slopes(step), state, params)
        params = optax.apply_updates(params, updates)
        own, expected = optimizer.update(own, slopes(step))
        for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        predicted = jax.tree.map(lambda new, old: 2 * new - old, params, before)
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(predicted), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    optimizer.close()


def test_what_is_in_a_file_is_not_in_memory_and_the_file_has_no_name(tmp_path: Path) -> None:
    optimizer = StageOptimizer(optax.adam(0.1), OWN, on=tmp_path)
    kind = stage_optimizer._InFile
    kept = jax.tree.leaves(optimizer._states, is_leaf=lambda leaf: isinstance(leaf, kind))
    in_file = [int(np.prod(leaf.shape)) for leaf in kept if isinstance(leaf, kind)]
    assert sum(in_file) == 2 * (sum(leaf.size for leaf in jax.tree.leaves(OWN)) - 1)
    assert all(leaf.ndim == 0 for leaf in kept if not isinstance(leaf, kind))
    assert not os.listdir(tmp_path)
    optimizer.close()


@pytest.mark.parametrize("in_file", [False, True])
def test_a_fresh_start_forgets_moments_and_keeps_the_counts_of_schedules(in_file: bool, tmp_path: Path) -> None:
    optimizer = StageOptimizer(OPTIMIZERS["adamw"], OWN, on=tmp_path if in_file else "host")
    first, _ = optimizer.update(OWN, slopes(0))
    optimizer.restart(OWN, 5)
    state = optimizer.states
    counts = [int(leaf) for one in state for leaf in jax.tree.leaves(one) if np.ndim(leaf) == 0]
    assert set(counts) == {0, 5}  # of moments, and of the rate
    again, _ = optimizer.update(OWN, slopes(0))
    for start, one, other in zip(*map(jax.tree.leaves, (OWN, first, again)), strict=True):
        np.testing.assert_allclose((other - start) / (one - start), 0.75, rtol=0.02)  # 15 of 20 steps are left
    optimizer.close()


def test_not_in_place_the_parameters_stay_and_in_place_they_are_used_up() -> None:
    for in_place in (False, True):
        own = copy_of(OWN)
        StageOptimizer(optax.sgd(0.1), own, on="host", in_place=in_place).update(own, slopes(0))
        assert {leaf.is_deleted() for leaf in jax.tree.leaves(own)} == {in_place}


def test_groups_have_all_leaves_once_and_a_large_one_is_alone() -> None:
    leaves = [np.zeros(size, np.float32) for size in (10, 10, 10, 500, 1, 1)]
    assert list(groups_of(leaves)) == [range(0, 3), range(3, 4), range(4, 6)]
    assert list(groups_of([])) == []
    assert moving_bytes(optax.adam(0.1), leaves) == pytest.approx(5 * (100 + 2000), rel=0.01)


def test_layers_that_are_alike_share_what_is_compiled_and_arrays_inside_a_part_are_seen() -> None:
    own = {"a": jnp.ones(30), "b": jnp.ones(30)}
    alike = StageOptimizer(optax.adam(0.1), own, on="host")
    alike.update(own, jax.tree.map(jnp.ones_like, own))
    assert len(alike._updates) == 2 and len(alike._compiled) == 1

    def update(slope: Any, state: Any, params: Any = None) -> Any:
        masks = jax.tree.map_with_path(
            lambda path, leaf: np.arange(30) < 7 + len(path[0].key) * (path[0].key == "b"), slope
        )
        return jax.tree.map(lambda one, mask: -one * mask, slope, masks), state

    masked = optax.GradientTransformation(lambda params: optax.EmptyState(), jax.jit(update))
    updated, _ = StageOptimizer(masked, own, on="host").update(own, jax.tree.map(jnp.ones_like, own))
    assert [int(updated[name].sum()) for name in ("a", "b")] == [30 - 7, 30 - 8]


def test_nothing_is_compiled_after_the_first_step() -> None:
    own = copy_of(OWN)
    optimizer, compiled = StageOptimizer(optax.adam(0.1), own, on="host", in_place=True), []
    for step in range(3):
        own, _ = optimizer.update(own, slopes(step))
        compiled.append(sum(one._cache_size() for one in optimizer._compiled.values()))
    assert compiled[0] == compiled[1] == compiled[2] == len(optimizer._compiled)


@pytest.mark.parametrize("word", ["hots", "file", "Device", ""])
def test_a_word_that_is_no_place_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="/var/tmp"):
        StageOptimizer(optax.adam(0.1), OWN, on=word)


def test_a_state_counts_where_it_lies_in_the_memory_that_is_planned() -> None:
    found = {
        (on, has_card): counts(on, has_card) for on in ("device", "host", "/var/tmp") for has_card in (True, False)
    }
    assert [where for where, is_counted in found.items() if is_counted] == [
        ("device", True), ("device", False), ("host", False),
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        StageOptimizer(optax.adam(0.1), OWN, on=tmp_path / "file")


def test_a_full_disk_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = StageOptimizer(optax.adam(0.1), OWN, on=tmp_path)

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stage_optimizer._StateFile, "_write", fails)
    with pytest.raises(CheckpointError, match=r"No space left.*name another folder"):
        optimizer.update(OWN, slopes(0))
    optimizer.close()
