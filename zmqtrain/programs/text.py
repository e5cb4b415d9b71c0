"""A byte-level transformer on a text: the language model that a newcomer can run without writing code.

Rule 1: plain jax: the parameters are a nested dict of float32 arrays, and the functions on them are pure.
Rule 2: no schedule knows how long the run is: the rate warms up over the optimizer's own steps, then stays.
Rule 3: the data has no end: unit u draws its windows from a generator seeded by (seed, u), and by nothing else.
Rule 4: the end of the training text is set aside for `score`; no window of any unit reaches into it.
Source: Vaswani et al. 2017 (decoder only); RMSNorm: Zhang and Sennrich 2019; rotary positions: Su et al. 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from zmqtrain.core.errors import ConfigError, DataError
from zmqtrain.programs.arguments import BYTES, check_text
from zmqtrain.programs.datasets import digest, load_text
from zmqtrain.programs.initial import Initial, draw_params

STANDARD_LIBRARY = "stdlib"
"""The value of `data` that stands for the source of this machine's Python standard library."""

EVALUATION_TOKENS = 16_384
EVALUATION_CHUNK_TOKENS = 1_024
SCORE_TOKENS = 4_096
SCORE_FRACTION = 64
SCORE_LEAST_WINDOWS = 4
"""The last byte in so many of the training text is set aside for the score, if that is as long as so many windows."""
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6
MUON_STEPS = ((3.4445, -4.7750, 2.0315),) * 5
"""Optax's own five steps, said one by one: it then loops over them. Of its unrolled loop XLA computes parts again and
again, and a step of training takes 1.4 times as long on a CPU."""
MUON_UPDATE_RMS = 0.2
"""Muon's updates are scaled to the size of AdamW's, so that both take one rate (Liu et al. 2025, sec. 2.2)."""

Params = dict[str, Any]


@dataclass(kw_only=True, eq=False)
class TextProgram:
    """A decoder-only transformer over bytes; each field is one argument. Raises ConfigError and DataError when made.

    data: "stdlib" or the path of a file.  batch: windows per local step, of `context` bytes each.  rate: reached after
    `warmup` steps.  clip: largest norm of a gradient; 0: none is clipped.
    inner_optimizer: "adamw", or "muon" for the matrices.
    seed: of the data's order (that of the parameters is given to `init`).
    """

    data: str = STANDARD_LIBRARY
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 16
    batches_per_unit: int = 16
    inner_optimizer: str = "adamw"
    rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    tied: bool = True
    seed: int = 0

    name: str = field(default="text", init=False)
    sample_word: str = field(default="tokens", init=False)
    units_per_epoch: int | None = field(default=None, init=False)
    samples_per_batch: int = field(init=False)

    def __post_init__(self) -> None:
        check_text(vars(self))
        self.samples_per_batch = self.batch * self.context
        self._text = load_text(None if self.data == STANDARD_LIBRARY else self.data)
        shortest = min(len(self._text.training), len(self._text.held_out))
        if shortest <= self.context:
            raise DataError(
                f"{self._text.source} has {len(self._text.training):,} bytes to train on and "
                f"{len(self._text.held_out):,} held out: context={self.context} needs more than {self.context} of "
                f"each; name a longer text, or give a shorter context"
            )
        spared = len(self._text.training) // SCORE_FRACTION
        spared = spared if spared > SCORE_LEAST_WINDOWS * self.context else 0
        self._dealt = self._text.training[: len(self._text.training) - spared]
        self._held_out_windows = _spread_windows(self._text.held_out, self.context, EVALUATION_TOKENS)
        self._spared_windows = (
            _spread_windows(self._text.training[-spared:], self.context, SCORE_TOKENS) if spared else None
        )

    @property
    def data_digests(self) -> str:
        """Digests of the text that is trained on, "/", of that held out."""
        return f"{digest(self._text.training)}/{digest(self._text.held_out)}"

    def init(self, seed: int) -> Params:
        """Return parameters: matrices normal with deviation 1/sqrt(fan in), those that end a branch by 1/sqrt(2 layers)
        smaller; the embedding with 1/sqrt(width), for it is the output matrix too.
        """
        params: Params = _fresh_params(jax.random.key(seed), self.width, self.layers, self.tied)
        return params

    def loss(self, params: Params, batch: Any) -> jax.Array:
        """Return the mean cross-entropy of the next byte, in nats.  batch["text"]: uint8[batch, context + 1]."""
        return _window_loss(params, batch["text"], self.heads)

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW, or Muon on the matrices inside the layers and AdamW on the rest; gradients clipped by norm.

        Source: Muon: Jordan et al. 2024; degrades least with the number of local steps between exchanges.
        """
        inner, _ = self.stage_optimizer()
        return optax.chain(optax.clip_by_global_norm(self.clip), inner) if self.clip else inner

    def stage_optimizer(self) -> tuple[optax.GradientTransformation, float]:
        """See Program."""
        rate = partial(_warmed_up_rate, rate=self.rate, warmup=self.warmup)
        if self.inner_optimizer == "muon":
            inner = optax.contrib.muon(
                rate,
                ns_coeffs=MUON_STEPS,
                weight_decay=self.weight_decay,
                muon_weight_dimension_numbers=_muon_leaves,
                consistent_rms=MUON_UPDATE_RMS,
            )
        else:
            inner = optax.adamw(rate, b2=0.99, weight_decay=self.weight_decay, mask=_is_matrix)
        return inner, self.clip

    def batches(self, unit: int) -> Iterator[dict[str, npt.NDArray[np.uint8]]]:
        """Return `batches_per_unit` batches {"text": uint8[batch, context + 1]} of windows drawn at random."""
        if unit < 0:
            raise ConfigError(f"a data unit is numbered from 0, got {unit}")
        generator = np.random.default_rng((self.seed, unit))
        text, last_start = self._dealt, len(self._dealt) - self.context - 1
        offsets = np.arange(self.context + 1)
        starts = generator.integers(0, last_start, size=(self.batches_per_unit, self.batch, 1), endpoint=True)
        return ({"text": text[of_batch + offsets]} for of_batch in starts)

    def evaluate(self, params: Params) -> dict[str, float]:
        """Return "loss" in nats per byte and "bits_per_byte" over one fixed set of about 16,000 held-out bytes."""
        loss = float(_mean_loss(params, self._held_out_windows, self.heads))
        return {"loss": loss, "bits_per_byte": loss / log(2)}

    def score(self, params: Params) -> jax.Array | None:
        """Return the mean loss in nats per byte over about 4,000 bytes of the last 1/64 of the training text.

        None if that is too short for a few windows. Nodes are compared by it (see `Program`).
        """
        return None if self._spared_windows is None else _mean_loss(params, self._spared_windows, self.heads)


def next_byte_logits(params: Params, text: jax.Array, heads: int) -> jax.Array:
    """Return float32[batch, context, 256]: the logits of the byte after each byte of `text`, uint8[batch, context]."""
    cosines, sines = _rotary_tables(text.shape[1], params["embedding"].shape[1] // heads)
    # a matrix, float32[batch * context, width]: XLA multiplies it faster than an array of three dimensions
    x = params["embedding"][text.reshape(-1).astype(jnp.int32)]
    for name in sorted(name for name in params if name.startswith("layer")):
        layer = params[name]
        x = x + _attention(layer, _rms_norm(x, layer["attention_norm"]), heads, cosines, sines)
        inner = jax.nn.gelu(_rms_norm(x, layer["dense_norm"]) @ layer["dense_in"])
        x = x + inner @ layer["dense_out"]
    output = params["output"] if "output" in params else params["embedding"].T
    logits: jax.Array = _rms_norm(x, params["norm"]) @ output
    return logits.reshape(*text.shape, BYTES)


def _fresh_params(key: jax.Array, width: int, layers: int, tied: bool) -> Any:
    hidden, branch_end = 4 * width, 1 / sqrt(2 * layers)
    layout: Params = {"embedding": Initial((BYTES, width), 1 / sqrt(width)), "norm": Initial((width,), value=1)}
    for index in range(layers):
        layout[f"layer{index:02d}"] = {
            "attention_norm": Initial((width,), value=1),
            "attention_in": Initial((width, 3 * width), 1 / sqrt(width)),
            "attention_out": Initial((width, width), branch_end / sqrt(width)),
            "dense_norm": Initial((width,), value=1),
            "dense_in": Initial((width, hidden), 1 / sqrt(width)),
            "dense_out": Initial((hidden, width), branch_end / sqrt(hidden)),
        }
    if not tied:
        layout["output"] = Initial((width, BYTES), 1 / sqrt(width))
    return draw_params(key, layout)


def _attention(layer: Params, x: jax.Array, heads: int, cosines: Any, sines: Any) -> jax.Array:
    context, head_width = len(cosines), x.shape[1] // heads
    mixed = (x @ layer["attention_in"]).reshape(-1, context, 3, heads, head_width)
    query, key = (_rotate(mixed[:, :, index], cosines, sines) for index in (0, 1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / sqrt(head_width)
    visible = np.tril(np.ones((context, context), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights, mixed[:, :, 2])
    merged: jax.Array = attended.reshape(x.shape) @ layer["attention_out"]
    return merged


def _rotary_tables(context: int, head_width: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines, float32[context, 1, head_width / 2]: position times one frequency per pair of values."""
    frequencies = ROTARY_BASE ** (-np.arange(0, head_width, 2) / head_width)
    angles = np.arange(context)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: jax.Array, cosines: Any, sines: Any) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosines - second * sines, first * sines + second * cosines], axis=-1)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + NORM_EPSILON)


def _window_loss(params: Params, windows: jax.Array, heads: int) -> jax.Array:
    logits = next_byte_logits(params, windows[:, :-1], heads)
    targets = windows[:, 1:].astype(jnp.int32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


@partial(jax.jit, static_argnames="heads")
def _mean_loss(params: Params, chunks: jax.Array, heads: int) -> jax.Array:
    """One chunk after the other, so that the memory needed is that of a chunk."""
    return jnp.mean(jax.lax.map(lambda windows: _window_loss(params, windows, heads), chunks))


def _spread_windows(text: npt.NDArray[np.uint8], context: int, tokens: int) -> npt.NDArray[np.uint8]:
    """Windows of so many tokens in all, spread evenly over a text, uint8[chunks, windows, context + 1]."""
    chunk = max(1, EVALUATION_CHUNK_TOKENS // context)
    chunks = max(1, tokens // (chunk * context))
    starts = np.linspace(0, len(text) - context - 1, chunk * chunks).astype(np.int64)
    windows: npt.NDArray[np.uint8] = text[starts.reshape(chunks, chunk, 1) + np.arange(context + 1)]
    return windows


def _warmed_up_rate(count: Any, rate: float, warmup: int) -> jax.Array:
    return rate * jnp.minimum(1.0, (count + 1) / max(1, warmup))


def _is_matrix(params: Params) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


def _muon_leaves(params: Params) -> Any:
    """Muon takes the matrices inside the layers; the embedding, the output and the norms' scales are AdamW's.

    By name, not by shape: optax asks again with trees whose leaves it has masked.
    """
    orthogonalised = optax.contrib.MuonDimensionNumbers()
    return {
        name: {inner: None if inner.endswith("norm") else orthogonalised for inner in value}
        if isinstance(value, dict)
        else None
        for name, value in params.items()
    }
