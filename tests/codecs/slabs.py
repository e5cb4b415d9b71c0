"""What the tests of codecs draw their values from, and how they compare buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

__all__ = ["SIZES", "raw", "slabs"]

SIZES = [1, 5, 7, 128, 129, 257, 600]
KINDS = ["normal", "bits", "sparse", "levels", "halves", "denormal", "edges"]
EDGES = np.array([2.0**-100, 2.0**-101, 1.99 * 2.0**-101, 1e-45, -0.0, 2.0**-126], np.float32)


def raw(buffers: Iterable[Any]) -> list[bytes]:
    """The bytes of each buffer, numpy's or jax's."""
    return [np.asarray(buffer).tobytes() for buffer in buffers]


@st.composite
def slabs(draw: Any, sizes: Iterable[int] = SIZES) -> Any:
    """Slabs of every nature: normal values, lone giants, many equals, halves, denormals, signed zeros, anything finite
    in float32."""
    size = draw(st.sampled_from(list(sizes)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(KINDS))
    if kind == "bits":
        x = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
        return np.where(np.isfinite(x), x, np.float32(-0.0))
    if kind == "levels":
        return rng.integers(-3, 4, size).astype(np.float32)
    if kind == "halves":
        return (rng.integers(-15, 16, size) / np.float32(2)).astype(np.float32)
    if kind == "denormal":
        return rng.integers(0, 2**23, size, dtype=np.uint32).view(np.float32) * np.float32(rng.choice([-1, 1]))
    if kind == "edges":
        return rng.choice(EDGES, size)
    x = rng.standard_normal(size).astype(np.float32)
    x[rng.random(size) < 0.5 * (kind == "sparse")] = 0
    x[rng.integers(size)] *= np.float32(2.0 ** draw(st.integers(-20, 20)))
    return x * np.float32(2.0 ** draw(st.integers(-95, 95)))
