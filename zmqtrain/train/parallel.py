"""Have all devices of one PC share each batch of a program: its parameters on every one, the batch cut among them.

Rule 1: an ordinary `jax.sharding` program: XLA adds up the gradients inside the PC, the broker knows one node.
Rule 2: a program like any other; what it wraps learns nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zmqtrain.core.errors import ConfigError
from zmqtrain.train.program import Batch, Params, Program

AXIS = "device"


class DataParallel:
    """A program whose batches are cut among devices, along the first axis of each array; single values go to all.

    devices: None for all of this process.  Raises ConfigError, at the first batch, if one cannot be cut in equal parts.
    """

    def __init__(self, program: Program, devices: Sequence[jax.Device] | None = None) -> None:
        self.program, self.devices = program, tuple(jax.local_devices() if devices is None else devices)
        self.name, self.sample_word = program.name, program.sample_word
        self.samples_per_batch, self.units_per_epoch = program.samples_per_batch, program.units_per_epoch
        if (score := getattr(program, "score", None)) is not None:
            self.score = score
        mesh = Mesh(np.array(self.devices), (AXIS,))
        self.everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self._cut = NamedSharding(mesh, PartitionSpec(AXIS))  # type: ignore[no-untyped-call]

    def init(self, seed: int) -> Params:
        """Return the program's fresh parameters, on every device."""
        return jax.device_put(self.program.init(seed), self.everywhere)

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Return the program's mean loss over a batch of which each device takes its part."""
        return self.program.loss(params, _held(batch, self._homes(batch)))

    def optimizer(self) -> optax.GradientTransformation:
        """Return the program's optimizer, with its state and its updates on every device."""
        inner = self.program.optimizer()

        def init(params: Params) -> Any:
            return jax.device_put(inner.init(params), self.everywhere)

        def update(gradient: Any, state: Any, params: Params = None) -> Any:
            return _held(inner.update(gradient, state, params), self.everywhere)

        return optax.GradientTransformation(init, update)

    def batches(self, unit: int) -> Iterator[Batch]:
        """Return the program's batches of that unit, each device with its part of them."""
        return (jax.device_put(batch, self._homes(batch)) for batch in self.program.batches(unit))

    def evaluate(self, params: Params) -> dict[str, float]:
        """Return the program's scores."""
        return self.program.evaluate(params)

    def _homes(self, batch: Batch) -> Any:
        leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
        homes = []
        for path, leaf in leaves:
            shape = np.shape(leaf)
            if shape and shape[0] % len(self.devices):
                raise ConfigError(
                    f"a batch's {jax.tree_util.keystr(path, simple=True, separator='/') or 'array'} has the shape "
                    f"[{','.join(map(str, shape))}], whose first axis cannot be cut into {len(self.devices)} equal "
                    "parts, one for each device: change the program's batch (or the minibatch's partitions), or train "
                    "on one device (--devices one)"
                )
            homes.append(self._cut if shape else self.everywhere)
        return jax.tree.unflatten(tree, homes)


def on_all_devices(program: Program) -> Program:
    """Return the program with its batches cut among all devices of this process; as it is, where there is but one."""
    return DataParallel(program) if jax.local_device_count() > 1 else program


def _held(tree: Any, homes: Any) -> Any:
    return jax.lax.with_sharding_constraint(tree, homes)  # type: ignore[no-untyped-call]
