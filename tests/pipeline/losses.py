"""Small losses of many kinds, each with parameters and a batch, for tests that cut them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import zmqtrain as zt
from zmqtrain.pipeline.cuts import Positions
from zmqtrain.pipeline.split import positions_of
from zmqtrain.programs.text import TextProgram

WIDTH, LAYERS, ROWS = 4, 3, 4


@dataclass(frozen=True, eq=False)
class Case:
    """A loss, its parameters and a batch."""

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any

    @cached_property
    def expected(self) -> tuple[Any, Any]:
        """What one PC computes: loss and gradients."""
        return jax.jit(jax.value_and_grad(self.loss))(self.params, self.batch)

    @cached_property
    def positions(self) -> Positions:
        return positions_of(self.loss, self.params, self.batch)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0]), jnp.float32)


def inputs() -> dict[str, Any]:
    return {"x": normal(7, ROWS, WIDTH), "y": jnp.arange(ROWS) % 3}


def dense(count: int = LAYERS) -> list[dict[str, Any]]:
    return [{"w": normal(seed, WIDTH, WIDTH), "b": normal(seed + 10, WIDTH)} for seed in range(count)]


def stacked(count: int = LAYERS) -> dict[str, Any]:
    return {"w": normal(1, count, WIDTH, WIDTH), "b": normal(2, count, WIDTH)}


def cross_entropy(logits: Any, labels: Any) -> Any:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def mlp() -> Case:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for layer in params["layers"]:
            h = jax.nn.relu(h @ layer["w"] + layer["b"])
        return cross_entropy(h @ params["head"], batch["y"])

    return Case(loss, {"layers": dense(), "head": normal(3, WIDTH, 3)}, inputs())


def marked() -> Case:
    """The perceptron with a mark after each layer, inside jit and checkpoint."""

    @jax.jit
    def layer(weights: Any, h: Any) -> Any:
        return zt.stage_end(jnp.tanh(h @ weights["w"] + weights["b"]))

    def loss(params: Any, batch: Any) -> Any:
        first, *others = params["layers"]
        h = jax.checkpoint(layer)(first, batch["x"])
        for weights in others:
            h = layer(weights, h)
        return cross_entropy(h @ params["head"], batch["y"])

    return Case(loss, {"layers": dense(), "head": normal(3, WIDTH, 3)}, inputs())


def text() -> Case:
    program = TextProgram(width=8, layers=1, heads=1, context=6, batch=2, batches_per_unit=1)
    return Case(program.loss, program.init(0), jax.tree.map(jnp.asarray, next(program.batches(0))))


def flax_model() -> Case:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = x + nn.Dense(WIDTH)(nn.gelu(nn.LayerNorm()(nn.Dense(WIDTH)(x))))
            return nn.Dense(3)(x)

    model, batch = Model(), inputs()
    params = model.init(jax.random.key(0), batch["x"])
    return Case(lambda p, b: cross_entropy(model.apply(p, b["x"]), b["y"]), params, batch)


def scan() -> Case:
    """Layers in a scan, cast and transposed before it."""

    def loss(params: Any, batch: Any) -> Any:
        def layer(h: Any, weights: Any) -> Any:
            return jnp.tanh(h @ weights["w"] + weights["b"]), jnp.sum(h)

        layers = {"w": (params["layers"]["w"] * 0.9).swapaxes(1, 2), "b": params["layers"]["b"].astype(jnp.float32)}
        h, sums = lax.scan(layer, batch["x"], layers)
        return cross_entropy(h @ params["head"], batch["y"]) + 0.1 * jnp.mean(sums)

    return Case(loss, {"layers": stacked(), "head": normal(3, WIDTH, 3)}, inputs())


def reversed_scan() -> Case:
    """A scan from the last layer to the first, over layers that the loss stacks, and one over activations."""

    def loss(params: Any, batch: Any) -> Any:
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
        h, each = lax.scan(lambda h, w: ((h := jnp.sin(h @ w["w"] + w["b"])), h), batch["x"], layers, reverse=True)
        kept, _ = lax.scan(lambda kept, row: (kept * 0.5 + row @ params["head"], None), jnp.zeros((ROWS, 3)), each)
        return cross_entropy(kept, batch["y"]) + jnp.mean(h**2)

    return Case(loss, {"layers": dense(), "head": normal(3, WIDTH, 3)}, inputs())


def tied() -> Case:
    def loss(params: Any, batch: Any) -> Any:
        h = params["embedding"][batch["y"]]
        for layer in params["layers"]:
            h = h + jnp.tanh(h @ layer["w"])
        return cross_entropy(h @ params["embedding"].T, (batch["y"] + 1) % 3)

    return Case(loss, {"layers": dense(2), "embedding": normal(3, 3, WIDTH)}, {"y": inputs()["y"]})


def dropout() -> Case:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for number, layer in enumerate(params["layers"]):
            key = jax.random.fold_in(batch["key"], number)
            h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), jnp.tanh(h @ layer["w"] + layer["b"]), 0)
        return cross_entropy(h @ params["head"], batch["y"])

    return Case(loss, {"layers": dense(), "head": normal(3, WIDTH, 3)}, {**inputs(), "key": jax.random.key(5)})


def keys_in_scan() -> Case:
    """A scan that carries a random key and a count beside its activations."""

    def loss(params: Any, batch: Any) -> Any:
        def layer(carry: Any, weights: Any) -> Any:
            h, key, count = carry
            key, own = jax.random.split(key)
            return (jnp.tanh(h @ weights["w"]) + 0.1 * jax.random.normal(own, h.shape), key, count + 1), None

        (h, _, count), _ = lax.scan(layer, (batch["x"], batch["key"], 0), params["layers"])
        return cross_entropy(h @ params["head"], batch["y"]) * count

    return Case(loss, {"layers": stacked(), "head": normal(3, WIDTH, 3)}, {**inputs(), "key": jax.random.key(5)})


def masks() -> Case:
    """Attention under a mask of the batch, and a choice of experts, whose numbers are integers that travel."""

    def loss(params: Any, batch: Any) -> Any:
        h, mask = batch["x"], batch["length"][:, None] > jnp.arange(ROWS)
        for layer in params["layers"]:
            scores = jnp.where(mask, (h @ layer["w"]) @ h.T, -1e9)
            h = h + jax.nn.softmax(scores) @ h
            chosen = jnp.argmax(h @ params["router"], axis=1)
            h = h + jnp.einsum("rd,rde->re", h, params["experts"][chosen])
        return cross_entropy(h, batch["y"])

    params = {"layers": dense(2), "router": normal(4, WIDTH, 2), "experts": normal(5, 2, WIDTH, WIDTH)}
    return Case(loss, params, {**inputs(), "length": jnp.array([1, 4, 2, 3])})


def half_precision() -> Case:
    """All parameters are cast at the beginning, as for bf16 on a card."""

    def loss(params: Any, batch: Any) -> Any:
        small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
        h = batch["x"]
        for layer in small["layers"]:
            h = jax.nn.silu(h @ layer["w"] + layer["b"])
        return cross_entropy(h @ small["head"], batch["y"])

    return Case(loss, {"layers": dense(), "head": normal(3, WIDTH, 3)}, inputs())


LOSSES = (
    *(mlp, marked, text, flax_model, scan, reversed_scan, tied, dropout, keys_in_scan, masks),
    half_precision,
)


@cache
def case(name: str) -> Case:
    """Return the loss of this name, the same each time."""
    return next(make for make in LOSSES if make.__name__ == name)()


NAMES = tuple(make.__name__ for make in LOSSES)
