"""Train N replicas in lockstep by coded gradients, in one process: the other way to send less, to compare a run with.

    u_n = C_up(gradient_n);  U = C_down(1/N sum D(u_n));  each replica steps its optimizer by D(U)

Rule 1: what the codecs leave out is kept in their states, the nodes' and the hub's.  Replicas are equal at all times,
so one is trained, and the end needs no exchange.
Rule 2: the codecs, the layout and the slabs are those of a run of one fragment.
Source: Lin et al. 2018, Deep Gradient Compression; both ways: Tang et al. 2019, DoubleSqueeze.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from zmqtrain.codecs.base import WRAPPERS, codec_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import payload_size
from zmqtrain.core.errors import ConfigError
from zmqtrain.train.step import TrainState, describe_model

from federation import Batches, ExchangeSettings, LocalSteps, Watch
from fragment_moves import gather, groups, initial_state, spread, through_all

__all__ = ["CodedGradients"]

WATCHED_STEPS = 64


class CodedGradients:
    """N replicas and their hub. `run` goes on from where the last one ended.

    Of the settings the codecs count alone; every step is an exchange. Raises ConfigError for one
    that is not wrapped in `feedback` or `momentum`: what it leaves out would be lost.
    bytes_up, bytes_down: of one node so far.
    """

    def __init__(self, local: LocalSteps, settings: ExchangeSettings, params: Any, nodes: int) -> None:
        for spec in (settings.codec, settings.broadcast_codec):
            if not spec.startswith(tuple(WRAPPERS)):
                raise ConfigError(f"{spec!r}: of gradients, what is not sent must be kept; say feedback+{spec}")
        self._step = _compiled(local, settings.codec, settings.broadcast_codec, Layout(describe_model(params), 1))
        self._replica, self._states = local.init(params), self._step.initial_states(nodes)
        self.bytes_up = self.bytes_down = 0

    def run(
        self, batches: Sequence[Batches], scales: NDArray[np.float32], watch: Watch = lambda step, loss: None
    ) -> Any:
        """Take as many steps as there are scales; return the parameters, which the next call uses up.

        batches: of each node, as `draw_batches` made them.  watch: called now and then with the step and a loss.
        """
        for number, scale in enumerate(scales):
            of_step = [jax.tree.map(lambda leaf, at=number: leaf[at], of_node) for of_node in batches]
            self._replica, self._states, loss = self._step.take(self._replica, self._states, of_step, scale)
            self.bytes_up += self._step.bytes_up
            self.bytes_down += self._step.bytes_down
            if number % WATCHED_STEPS == 0:
                watch(number, loss)
        return self._replica.params

    @property
    def waiting(self) -> tuple[jax.Array, jax.Array]:
        """What `feedback` keeps for later: float32[nodes, values] of the nodes, float32[values] of the hub."""
        up, down = self._states
        return spread([residual for residual, _ in up], self._step.up), spread([r for r, _ in down], self._step.down)[0]


class _Step:
    """The step of a program with these codecs, jitted in pieces: a codec is compiled once for all that use it."""

    def __init__(self, local: LocalSteps, codec: str, broadcast_codec: str, layout: Layout) -> None:
        self.local, counts = local, layout.counts(0)
        up, down = ([codec_from_spec(spec)] * len(counts) for spec in (codec, broadcast_codec))
        self.up, self.down = groups(up, counts), groups(down, counts)
        self.bytes_up, self.bytes_down = payload_size(up, counts), payload_size(down, counts)
        self._offer, self._average = jax.jit(self._gradients), jax.jit(self._mean)
        self._land = jax.jit(self._advance, donate_argnums=0)

    def initial_states(self, nodes: int) -> Any:
        """Return the states of C_up, for every node, and of C_down."""
        return [initial_state(group, nodes) for group in self.up], [initial_state(group, 1) for group in self.down]

    def take(self, replica: TrainState, states: Any, batches: Any, scale: Any) -> tuple[TrainState, Any, jax.Array]:
        """Return the next replica, the codecs' states, and a loss. The old replica is used up."""
        up, down = states
        slabs, loss = self._offer(replica.params, batches)
        sent, up = through_all(self.up, slabs, up)
        aggregate, down = through_all(self.down, self._average(sent), down)
        return self._land(replica, aggregate, scale), (up, down), loss

    def _gradients(self, params: Any, batches: Any) -> tuple[list[jax.Array], jax.Array]:
        """Return the gradients of all nodes, as the slabs that go up, and the loss of the last node."""
        losses, gradients = zip(*(jax.value_and_grad(self.local.program.loss)(params, b) for b in batches), strict=True)
        return gather(jnp.stack([ravel_pytree(of_node)[0] for of_node in gradients]), self.up), losses[-1]

    def _mean(self, sent: list[jax.Array]) -> list[jax.Array]:
        """Return the mean of what arrived, as the slabs that go down."""
        return gather(jnp.mean(spread(sent, self.up), axis=0)[None], self.down)

    def _advance(self, replica: TrainState, aggregate: list[jax.Array], scale: Any) -> TrainState:
        _, unravel = ravel_pytree(replica.params)
        step = unravel(spread(aggregate, self.down)[0])
        updates, opt_state = self.local.optimizer.update(step, replica.opt_state, replica.params)
        scaled = jax.tree.map(lambda update: update * scale, updates)
        return TrainState(optax.apply_updates(replica.params, scaled), opt_state)


_compiled = lru_cache(maxsize=64)(_Step)
"""The step of a program with these codecs: compiled once."""
