"""Give a node bad data on purpose: a program with its labels, or its text, shuffled.

Rule: a corrupted program differs from the clean one in its batches and in its own score, in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.core.errors import ConfigError
from zmqtrain.train.program import Batch, Params, Program

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
        training, _, held_out = str(getattr(program, "data_digests", "")).partition("/")
        self.data_digests = f"{training} {kind}/{held_out}" if training else ""
        self._mean_loss: Callable[[Params], jax.Array] | None = None

    def init(self, seed: int) -> Params:
        """Return the clean program's fresh parameters."""
        return self.program.init(seed)

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Return the clean program's loss."""
        return self.program.loss(params, batch)

    def optimizer(self) -> optax.GradientTransformation:
        """Return the clean program's optimizer."""
        return self.program.optimizer()

    def evaluate(self, params: Params) -> dict[str, float]:
        """Return the clean program's scores on clean held-out data."""
        return self.program.evaluate(params)

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
