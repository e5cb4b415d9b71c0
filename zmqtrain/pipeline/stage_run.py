"""What a PC does for its stage, task by task: parameters, carries kept, gradients of the step, optimizer.

The same class runs all stages in one process (`local`) and one stage on each PC: it knows no schedule and no wire, so
both give the same bits. Micro-batches go forward, and backward, in their order; the gradient of a step is their mean.
Each task ends when its result is computed: tasks that were only begun would each hold their memory at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zmqtrain.pipeline.schedule import Task
from zmqtrain.pipeline.stage import Arrays, Stage
from zmqtrain.pipeline.stage_optimizer import OptimizerOn, StageOptimizer, computed


class StageRun:
    """A stage that trains.

    stage, own: the stage, and its own parameters.  micro_batches: of each step.  optimizer: of the own parameters;
    None: they stay.  in_place: an update makes the next version in the memory of the last, which nobody else may use
    then; so it may not be where late micro-batches compute with the last version itself.  predicts: see `Schedule`.
    optimizer_on: where its state lies, see `StageOptimizer`.
    """

    def __init__(
        self,
        stage: Stage,
        own: Any,
        micro_batches: int,
        optimizer: optax.GradientTransformation | None = None,
        in_place: bool = False,
        predicts: bool = False,
        optimizer_on: OptimizerOn = "device",
    ) -> None:
        self.stage, self.micro_batches, self.predicts = stage, micro_batches, predicts
        self.optimizer: StageOptimizer | None = None
        if optimizer is not None:
            self.optimizer = StageOptimizer(optimizer, own, on=optimizer_on, in_place=in_place, predicts=predicts)
        self.own = own
        """The newest version of its own parameters."""
        self._versions = {0: own}
        """What passes compute with, by version."""
        self._expected = {0: jax.tree.map(jnp.array, own) if predicts and in_place else own} if predicts else {}
        """Where this predicts: what late passes compute with, by version."""
        self._data: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._kept: dict[tuple[int, int], Arrays] = {}
        self._gradients: dict[int, Any] = {}
        self._losses: dict[int, jax.Array] = {}

    def go_on_from(self, own: Any) -> None:
        """Take these values for the newest version, between steps."""
        self.own = self._versions[max(self._versions)] = own

    def take_batch(self, step: int, parts: Sequence[Any]) -> None:
        """Keep what the stage reads of the micro-batches of a step."""
        for number, part in enumerate(parts):
            self._data[step, number] = self.stage.data_of(part)

    def forward(self, task: Task, carry: Arrays) -> Arrays:
        """Return the carry for the next stage. The last stage computes nothing yet: its forward pass is part of the
        backward pass, which follows at once."""
        self._kept[task.step, task.micro_batch] = carry
        if self.stage.is_last:
            return ()
        return computed(self.stage.forward(self._parameters_for(task), self._data[task.step, task.micro_batch], carry))

    def backward(self, task: Task, cotangents: Arrays) -> Arrays:
        """Add the gradients of a micro-batch to those of its step; return the cotangents for the stage before."""
        place = task.step, task.micro_batch
        so_far = self._gradients.pop(task.step, None)
        result = computed(
            self.stage.backward(
                self._parameters_for(task),
                self._data.pop(place),
                self._kept.pop(place),
                self.stage.zero_gradients() if so_far is None else so_far,
                cotangents,
            )
        )
        self._gradients[task.step] = result.gradients
        if result.loss is not None:
            before = self._losses.get(task.step)
            self._losses[task.step] = result.loss if before is None else before + result.loss
        return result.cotangents

    def compile(self) -> None:
        """Compile the passes and the update now, and not in the first step."""
        if not self.stage.is_last:
            self.stage.compiled_forward()
        self.stage.compiled_backward()
        shapes = self.stage.own_shapes
        self._mean.lower(shapes).compile()
        if self.optimizer is not None:
            self.optimizer.compile(shapes)

    def take_gradients(self, step: int) -> Any:
        """Return the gradient of a step whose backward passes are done: the mean of its micro-batches."""
        return self._mean(self._gradients.pop(step))

    def squares(self, gradients: Any, counted: Sequence[tuple[int, int] | None]) -> float:
        """Return the sum of the squares of gradients. counted: of each leaf, the rows that count; None: all."""
        return float(self._squares(gradients, tuple(counted)))

    def clipped(self, gradients: Any, squares: Sequence[float], clip_norm: float) -> Any:
        """Return the gradients, scaled so that those of all stages have at most this norm together. squares: of each
        stage. Source: Pascanu et al. 2013."""
        norm = math.sqrt(math.fsum(squares))
        return gradients if norm < clip_norm else self._scaled(gradients, jnp.float32(clip_norm / norm))

    def take_loss(self, step: int) -> jax.Array:
        """Return the loss of such a step, at the last stage."""
        loss: jax.Array = self._losses.pop(step) / self.micro_batches
        return loss

    def update(self, version: int, gradients: Any) -> None:
        """Apply the gradient of a step: version `version` + 1 of the parameters is made of the newest, `version`.
        Without an optimizer they are the same; with one, the memory of the old parameters becomes theirs, or else that
        of the gradient."""
        expected = self.own
        if self.optimizer is not None:
            self.own, expected = self.optimizer.update(self.own, gradients)
        self._versions[version + 1] = self.own
        if self.predicts:
            self._expected[version + 1] = expected
            del self._versions[version]  # all passes that are left are late ones

    def close(self) -> None:
        """Let go of the optimizer's state. The parameters stay."""
        if self.optimizer is not None:
            self.optimizer.close()

    def drop_versions(self, used: Sequence[int]) -> None:
        """Forget the versions of the parameters that no micro-batch needs any more."""
        self._versions = {version: own for version, own in self._versions.items() if version in used}
        self._expected = {version: own for version, own in self._expected.items() if version in used}

    def _parameters_for(self, task: Task) -> Any:
        return (self._expected if self.predicts and task.is_late else self._versions)[task.version]

    @cached_property
    def _mean(self) -> Any:
        return jax.jit(lambda sums: jax.tree.map(lambda leaf: leaf / self.micro_batches, sums), donate_argnums=0)

    @cached_property
    def _squares(self) -> Any:
        def squares(gradients: Any, counted: tuple[tuple[int, int] | None, ...]) -> jax.Array:
            leaves = jax.tree.leaves(gradients)
            parts = [leaf if rows is None else leaf[slice(*rows)] for leaf, rows in zip(leaves, counted, strict=True)]
            return sum((jnp.sum(jnp.square(part.astype(jnp.float32))) for part in parts), jnp.float32(0))

        return jax.jit(squares, static_argnums=1)

    @cached_property
    def _scaled(self) -> Any:
        return jax.jit(
            lambda gradients, scale: jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), gradients),
            donate_argnums=0,
        )
