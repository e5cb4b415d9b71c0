"""Move one fragment of a leaf inside a jitted function: block by block on a processor, all at once on an accelerator.

On a processor XLA gathers and scatters row after row, whose length is what divides the leaf (often 64 values), and puts
the sum that it scatters aside first. A loop over the fragment's blocks reads each place once and writes it once, within
a cache, and sets nothing aside. On an accelerator a loop would be a launch for every block: there `Layout` gathers and
scatters.
Rule 1: the values are the same, bit for bit, either way.  Rule 2: which way is decided when a function is lowered, for
the platform that it is lowered for.  Rule 3: a leaf that is donated is written in its own memory: it is never cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zmqtrain.core.interfaces import Layout

LARGEST_LOOPED = 2**31
"""A leaf with more values than an index of 32 bits can count is gathered and scattered everywhere."""

FEWEST_LOOPED = 3
"""So few pieces of equal length are moved one by one, without a loop."""


class _Run(NamedTuple):
    """Pieces of equal length, `apart` values from each other: where the first lies in the leaf, and in the segment."""

    start: int
    at: int
    length: int
    apart: int
    pieces: int


def ahead(layout: Layout, params: jax.Array, anchor: jax.Array, leaf: int, fragment: int) -> jax.Array:
    """Return params - anchor of the fragment's part of one leaf: float32, flat."""

    def at_once(params: jax.Array, anchor: jax.Array) -> jax.Array:
        ours: jax.Array = layout.take(params, leaf, fragment).astype(jnp.float32)
        shared: jax.Array = layout.take(anchor, leaf, fragment)
        return ours - shared

    def by_blocks(params: jax.Array, anchor: jax.Array) -> jax.Array:
        segment = jnp.full(count, leaf, jnp.float32)  # each its own, or XLA makes one of a size, and copies of it
        flat = params.reshape(-1), anchor.reshape(-1)
        for run in runs:

            def move(segment: jax.Array, start: Any, at: Any, length: int = run.length) -> jax.Array:
                ours, shared = (lax.dynamic_slice(values, (start,), (length,)).astype(jnp.float32) for values in flat)
                return lax.dynamic_update_slice(segment, ours - shared, (at,))

            segment = _over(run, segment, move)
        return segment

    if layout.fragments == 1 or params.size >= LARGEST_LOOPED:
        return at_once(params, anchor)
    runs, count = _runs(layout.spans(leaf, fragment))
    result: jax.Array = lax.platform_dependent(params, anchor, cpu=by_blocks, default=at_once)
    return result


def moved(
    layout: Layout,
    params: jax.Array,
    anchor: jax.Array,
    shared: jax.Array,
    own: jax.Array | None,
    leaf: int,
    fragment: int,
) -> tuple[jax.Array, jax.Array]:
    """Return params + (shared - own) and anchor + shared, of one leaf. shared, own: its segments, flat float32.

    own: None is nothing. Sums are made in the wider of the two dtypes and rounded to the leaf's.
    """

    def at_once(
        params: jax.Array, anchor: jax.Array, shared: jax.Array, own: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        step = shared if own is None else shared - own
        return layout.add(params, leaf, fragment, step), layout.add(anchor, leaf, fragment, shared)

    def by_blocks(
        params: jax.Array, anchor: jax.Array, shared: jax.Array, own: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        both = params.reshape(-1), anchor.reshape(-1)
        for run in runs:

            def move(
                both: tuple[jax.Array, jax.Array], start: Any, at: Any, length: int = run.length
            ) -> tuple[jax.Array, jax.Array]:
                of_all = lax.dynamic_slice(shared, (at,), (length,))
                of_others = of_all if own is None else of_all - lax.dynamic_slice(own, (at,), (length,))
                new = []
                for values, step in zip(both, (of_others, of_all), strict=True):
                    old = lax.dynamic_slice(values, (start,), (length,))
                    new.append(lax.dynamic_update_slice(values, (old + step).astype(values.dtype), (start,)))
                return new[0], new[1]

            both = _over(run, both, move)
        return both[0].reshape(params.shape), both[1].reshape(anchor.shape)

    if layout.fragments == 1 or params.size >= LARGEST_LOOPED:
        return at_once(params, anchor, shared, own)
    runs, _ = _runs(layout.spans(leaf, fragment))
    result: tuple[jax.Array, jax.Array] = lax.platform_dependent(
        params, anchor, shared, own, cpu=by_blocks, default=at_once
    )
    return result


def _runs(spans: Any) -> tuple[list[_Run], int]:
    """Return the ranges of a flat leaf, (start, end) each, rising, as runs of equal ones; and all their values.

    The loop before the short piece at the end: the other way round takes XLA twice the time, measured.
    """
    runs: list[_Run] = []
    at = 0
    for start, end in np.asarray(spans).tolist():
        length = end - start
        if runs and runs[-1].length == length:
            last = runs[-1]
            apart = start - last.start if last.pieces == 1 else last.apart
            if start == last.start + last.pieces * apart:
                runs[-1] = last._replace(apart=apart, pieces=last.pieces + 1)
                at += length
                continue
        runs.append(_Run(start, at, length, 0, 1))
        at += length
    return runs, at


def _over(run: _Run, state: Any, move: Any) -> Any:
    """Return the state after move(state, start in the leaf, start in the segment) of every piece of a run."""

    def one(number: Any, state: Any) -> Any:
        return move(state, run.start + number * run.apart, run.at + number * run.length)

    if run.pieces < FEWEST_LOOPED:
        for number in range(run.pieces):
            state = one(number, state)
        return state
    return lax.fori_loop(0, run.pieces, one, state)
