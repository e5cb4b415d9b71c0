"""Give every simulated node its own view of one program.

Rule: a node trains the program itself, so that all nodes share what is compiled; its own are how it begins and what
its data are; what all nodes share is scored once, by the simulation.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zmqtrain.sim.scenario import SimNode
from zmqtrain.train.program import Program
from zmqtrain.train.program_wrappers import corrupted


class NodeProgram:
    """One node's view of `program`: a `Program`.

    start: parameters to begin with instead of the program's own.  scores: whether this node's final parameters are
    scored (they are by the simulation, in a run that shares its parameters).
    """

    def __init__(
        self,
        program: Program,
        node: SimNode,
        start: Any = None,
        scores: bool = False,
    ) -> None:
        self.program, self._node, self._start, self._scores = program, node, start, scores
        self.name, self.sample_word = program.name, program.sample_word
        self.samples_per_batch, self.units_per_epoch = program.samples_per_batch, program.units_per_epoch
        self.loss, self.optimizer = program.loss, program.optimizer
        of_node = corrupted(program, node.corrupt) if node.corrupt else program
        self.batches = of_node.batches
        if (score := getattr(of_node, "score", None)) is not None:
            self.score = score

    def init(self, seed: int) -> Any:
        """See Program: the program's parameters, or those to begin with, spoilt as the scenario says."""
        params = self.program.init(seed) if self._start is None else self._start
        random = np.random.default_rng((seed, zlib.crc32(self._node.name.encode())))

        def begin(leaf: Any) -> Any:
            values = np.asarray(leaf, np.float32) * np.float32(self._node.initial_scale)
            if self._node.initial == "diverged":
                deviation = 10 * max(float(np.std(values)), 0.1)
                values = values + random.normal(0.0, deviation, values.shape).astype(np.float32)
            return jax.numpy.array(values, dtype=leaf.dtype)  # a copy: the step uses its buffers up

        return jax.tree.map(begin, params)

    def evaluate(self, params: Any) -> dict[str, float]:
        """See Program; {} unless this node's own parameters are to be scored."""
        return self.program.evaluate(params) if self._scores else {}


class SharedModel:
    """The shared parameters in the program's own tree, to be scored by it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        leaves, self._tree = jax.tree.flatten(program.init(0))
        self._dtypes = [leaf.dtype for leaf in leaves]

    def params(self, leaves: Sequence[Any]) -> Any:
        """Return the tree of parameters that these leaves (numpy, float32) are."""
        arrays = [jax.numpy.array(leaf, dtype) for leaf, dtype in zip(leaves, self._dtypes, strict=True)]
        return jax.tree.unflatten(self._tree, arrays)

    def scores(self, leaves: Sequence[Any]) -> dict[str, float]:
        """Return the program's held-out scores of these leaves."""
        return {name: float(score) for name, score in self.program.evaluate(self.params(leaves)).items()}
