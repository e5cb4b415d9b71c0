"""Programs around a program: its batches shared among a PC's devices, or corrupted on purpose.

Rule 1: `DataParallel` is an ordinary `jax.sharding` program: XLA adds up the gradients inside the PC, the broker knows
one node. The program that it wraps learns nothing of it.
Rule 2: a corrupted program differs from the clean one in its batches and in its own score, in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zmqtrain.core.errors import ConfigError
from zmqtrain.train.program import Batch, Params, Program

AXIS = "device"


class DataParallel:
    """A program with batches cut among devices, along the first axis of each array; each has all single values.

    devices: None for all of this process.  Raises ConfigError, at the first batch, if one cannot be cut in equal parts.
    """

    def __init__(self, program: Program, devices: Sequence[jax.Device] | None = None) -> None:
        self.program, self.devices = program, tuple(jax.local_devices() if devices is None else devices)
        self.name, self.sample_word = program.name, program.sample_word
        self.samples_per_batch, self.units_per_epoch = program.samples_per_batch, program.units_per_epoch
        self.evaluate = program.evaluate
        if (score := getattr(program, "score", None)) is not None:
            self.score = score
        mesh = Mesh(np.array(self.devices), (AXIS,))
        self.everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self._cut = NamedSharding(mesh, PartitionSpec(AXIS))  # type: ignore[no-untyped-call]

    def init(self, seed: int) -> Params:
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
        return (jax.device_put(batch, self._homes(batch)) for batch in self.program.batches(unit))

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


CORRUPTIONS: Mapping[str, str] = {"labels": "label", "bytes": "text"}
"""Each kind of corruption, and the array of a batch that it shuffles."""

SCORE_UNIT = 1 << 40
"""The data units from this one on are a corrupted program's own for its score: no run deals that many."""

SCORE_BATCHES, SCORE_SAMPLES = 4, 256
"""The score is taken over at least so many batches, and at least so many samples."""


def corrupted(program: Program, kind: str, seed: int = 0) -> CorruptedProgram:
    """Return the program as a node with bad data has it: its batches are corrupted, and so is what it scores by.

    kind "labels": the labels of a data unit are dealt to its samples at random (batches with "label").
    kind "bytes": the bytes of each window are shuffled, so that none follows from those before (batches with "text").
    A unit of the same number is corrupted in the same way each time.  `evaluate` is the clean program's: the run's
    parameters are judged by clean data.  Raises ConfigError: an unknown kind, or batches that have no such array.
    """
    if kind not in CORRUPTIONS:
        raise ConfigError(f"there is no corruption {kind!r}; the choices are {', '.join(CORRUPTIONS)}")
    batch = next(program.batches(0))
    if not isinstance(batch, Mapping) or CORRUPTIONS[kind] not in batch:
        fitting = [name for name, key in CORRUPTIONS.items() if isinstance(batch, Mapping) and key in batch]
        raise ConfigError(
            f"the corruption {kind!r} shuffles the array {CORRUPTIONS[kind]!r} of a batch, but the batches of the "
            f"program {program.name!r} have none; {' and '.join(fitting) or 'none of the corruptions'} would fit"
        )
    return CorruptedProgram(program, kind, seed)


class CorruptedProgram:
    """A program whose training data is corrupted; made by `corrupted`. All members are those of `Program`."""

    def __init__(self, program: Program, kind: str, seed: int) -> None:
        self.program, self.kind, self.seed = program, kind, seed
        self.name, self.sample_word = program.name, program.sample_word
        self.samples_per_batch, self.units_per_epoch = program.samples_per_batch, program.units_per_epoch
        self.init, self.loss, self.optimizer, self.evaluate = (
            program.init, program.loss, program.optimizer, program.evaluate,
        )  # fmt: skip
        training, _, held_out = str(getattr(program, "data_digests", "")).partition("/")
        self.data_digests = f"{training} {kind}/{held_out}" if training else ""
        self._mean_loss: Callable[[Params], jax.Array] | None = None

    def batches(self, unit: int) -> Iterator[Batch]:
        """Return the corrupted batches of a data unit; as many, and of the same shapes, as the clean ones."""
        clean, key = list(self.program.batches(unit)), CORRUPTIONS[self.kind]
        generator = np.random.default_rng((self.seed, unit))
        whole = np.stack([batch[key] for batch in clean])
        if self.kind == "labels":
            shuffled = generator.permutation(whole.reshape(-1)).reshape(whole.shape)
        else:
            shuffled = generator.permuted(whole, axis=-1)
        return (dict(batch) | {key: array} for batch, array in zip(clean, shuffled, strict=True))

    def score(self, params: Params) -> jax.Array:
        """Return the mean loss over a few corrupted batches of units that no run deals."""
        if self._mean_loss is None:
            self._mean_loss = self._compiled_score()
        return self._mean_loss(params)

    def _compiled_score(self) -> Callable[[Params], jax.Array]:
        wanted, unit = max(SCORE_BATCHES, ceil(SCORE_SAMPLES / self.samples_per_batch)), SCORE_UNIT
        found: list[Batch] = []
        while len(found) < wanted:
            found.extend(self.batches(unit))
            unit += 1
        batches = jax.tree.map(lambda *leaves: np.stack(leaves), *found[:wanted])
        mean = jax.jit(lambda params, chosen: jnp.mean(jax.lax.map(lambda b: self.program.loss(params, b), chosen)))
        return lambda params: mean(params, batches)
