"""Decide where the anchor of a model lives, and make the moves of the one equation there.

    DeviceMoves    parameters on one device, and the anchor with them
    SpreadMoves    parameters over several devices, the anchor likewise
    HostMoves      the anchor on the host, parameters anywhere

Rule 1: chosen once, when a node joins. No value differs: the anchor is the same, bit for bit, wherever it lives.
Rule 2: an anchor on the host costs the devices two leaves' parts of a fragment at a time; what is offered is then on
the host too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.interfaces import Layout
from zmqtrain.core.types import Array, ModelSpec
from zmqtrain.train.spread import SpreadLeaves, is_spread
from zmqtrain.train.step import Rebase, rebase_of

AnchorOn = Literal["device", "host"]
"""Where a node keeps the anchor: with its parameters, or in the memory of its processor."""

Leaves = list[jax.Array]
Segments = Mapping[int, Sequence[Array]]
Vector = NDArray[np.float32]


class Moves(Protocol):
    """The moves of the one equation, for the model of one node. An anchor is what `place` gave or a move returned."""

    def place(self, leaves: Sequence[Array]) -> list[Any]:
        """Return an anchor of these values: a float32 copy of every leaf."""

    def parameters(self, anchor: Sequence[Any]) -> Leaves:
        """Return parameters of the anchor's values: in the dtypes, and on the devices, with which the node joined."""

    def settle(self, params: Leaves, anchor: list[Any]) -> list[Any]:
        """Return the anchor where these parameters are, should a step have moved them. Raises ModelMismatch."""

    def warm_up(self, params: Leaves, anchor: list[Any]) -> None:
        """Have all that an exchange needs compiled. Both stay as they are."""

    def pending(self, params: Leaves, anchor: list[Any], fragment: int, *, whole: bool = False) -> list[Array]:
        """Return the elastic share of params - anchor of one fragment, or the `whole` of it: a segment per leaf."""

    def apply(self, params: Leaves, anchor: list[Any], aggregate: Segments, own: Segments) -> tuple[Leaves, list[Any]]:
        """Return params + D(U) - D(u) and anchor + D(U). The anchor is used up."""

    def adopt(self, params: Leaves, anchor: list[Any], new: Sequence[Array], own: Segments) -> tuple[Leaves, list[Any]]:
        """Return new + (params - anchor - D(u)) and the new anchor: what is pending stays pending."""


def moves_of(
    layout: Layout, model: ModelSpec, leaves: Sequence[Any], *, donate: bool, elastic: float, anchor: AnchorOn
) -> Moves:
    """Return the moves for parameters that live where these leaves do.

    donate: the caller's parameters may be used up.  Raises ConfigError for another place than "device" or "host",
    ModelMismatch for a leaf that is spread over several processes.
    """
    if anchor not in get_args(AnchorOn):
        raise ConfigError(f"anchor must be one of {', '.join(map(repr, get_args(AnchorOn)))}, got {anchor!r}")
    if anchor == "host":
        return HostMoves(layout, model, leaves, donate, elastic)
    if is_spread(leaves):
        return SpreadMoves(layout, model, leaves, donate, elastic)
    return DeviceMoves(layout, model, donate, elastic)


class DeviceMoves:
    """The moves where one device holds everything: `Rebase`, which is compiled once for all equal models."""

    def __init__(self, layout: Layout, model: ModelSpec, donate: bool, elastic: float) -> None:
        self._dtypes = [jnp.dtype(spec.dtype) for spec in model]
        rebase: Rebase = rebase_of(layout, donate, elastic)
        self.warm_up, self.pending, self.apply, self.adopt = (
            rebase.warm_up,
            rebase.pending,
            rebase.apply,
            rebase.adopt,
        )

    def place(self, leaves: Sequence[Array]) -> list[Any]:
        """See Moves."""
        return [jnp.array(leaf, jnp.float32) for leaf in leaves]

    def parameters(self, anchor: Sequence[Any]) -> Leaves:
        """See Moves."""
        return [jnp.array(leaf, dtype) for leaf, dtype in zip(anchor, self._dtypes, strict=True)]

    def settle(self, params: Leaves, anchor: list[Any]) -> list[Any]:
        """See Moves."""
        if is_spread(params):
            raise ModelMismatch(
                "the parameters joined the run on one device and now lie on several: spread them (jax.device_put with "
                "a sharding) before they are given to DelayedSync"
            )
        return anchor


class _OverShards:
    """What the moves over shards have in common."""

    def __init__(self, layout: Layout, model: ModelSpec, leaves: Sequence[Any], donate: bool, elastic: float) -> None:
        self.layout, self.donate, self.elastic = layout, donate, elastic
        self._leaves = SpreadLeaves(layout, model)
        self._dtypes = [jnp.dtype(spec.dtype) for spec in model]
        self._homes = self._leaves.homes([jnp.asarray(leaf) for leaf in leaves])

    def parameters(self, anchor: Sequence[Any]) -> Leaves:
        """See Moves."""
        return self._leaves.put([self._on_host(leaf) for leaf in anchor], self._homes, self._dtypes)

    def _on_host(self, leaf: Array) -> Vector:
        """Return a leaf on the host in float32: a copy of a jax array, for a view would defeat its donation."""
        return self._leaves.fetch(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf, np.float32)

    def _add(self, leaves: Leaves, fragment: int, segments: Sequence[Array], donate: bool) -> Leaves:
        step = dict(zip(self.layout.leaves(fragment), segments, strict=True))
        return self._leaves.add(leaves, step, fragment, donate=donate)

    def _adopted(self, params: Leaves, anchor: Sequence[Any], new: Sequence[Array], own: Segments) -> Leaves:
        """Return new + (params - anchor - D(u)): leaf by leaf, and by the host, where `new` is."""
        adopted: Leaves = []
        for i, (leaf, known, fresh) in enumerate(zip(params, anchor, new, strict=True)):
            rest = self._leaves.fetch(jnp.asarray(leaf))
            np.subtract(rest, self._on_host(known), out=rest)
            for fragment, segments in own.items():
                parts = dict(zip(self.layout.leaves(fragment), segments, strict=True))
                if i in parts:
                    self.layout.add(rest, i, fragment, -np.asarray(parts[i]))
            np.add(rest, np.asarray(fresh, np.float32), out=rest)
            if self.donate and isinstance(leaf, jax.Array):
                leaf.delete()
            adopted += self._leaves.put([rest], [self._homes[i]], [self._dtypes[i]])
        return adopted


class SpreadMoves(_OverShards):
    """The moves where parameters lie on several devices, each device with its own part of the anchor."""

    def place(self, leaves: Sequence[Array]) -> list[Any]:
        """See Moves."""
        return self._leaves.put([self._on_host(leaf) for leaf in leaves], self._homes, [jnp.float32] * len(leaves))

    def settle(self, params: Leaves, anchor: list[Any]) -> list[Any]:
        """See Moves."""
        homes = self._leaves.homes(params)
        moved = [i for i, (now, then) in enumerate(zip(homes, self._homes, strict=True)) if now != then]
        self._homes = homes
        for i in moved:
            anchor[i : i + 1] = self._leaves.put([self._leaves.fetch(anchor[i])], [homes[i]], [jnp.float32])
        return anchor

    def warm_up(self, params: Leaves, anchor: list[Any]) -> None:
        """See Moves."""
        for fragment in range(self.layout.fragments):
            touched = self.layout.leaves(fragment)
            for share in {1.0, self.elastic}:
                self._leaves.pending(params, anchor, fragment, share)
            self._leaves.compile_add(anchor, touched, fragment, donate=True)
            self._leaves.compile_add(params, touched, fragment, donate=self.donate)

    def pending(self, params: Leaves, anchor: list[Any], fragment: int, *, whole: bool = False) -> list[Array]:
        """See Moves."""
        return self._leaves.pending(params, anchor, fragment, 1.0 if whole else self.elastic)

    def apply(self, params: Leaves, anchor: list[Any], aggregate: Segments, own: Segments) -> tuple[Leaves, list[Any]]:
        """See Moves."""
        for fragment in sorted({*aggregate, *own}):
            if fragment in aggregate:
                anchor = self._add(anchor, fragment, aggregate[fragment], True)
            params = self._add(params, fragment, _step(aggregate, own, fragment), self.donate)
        return params, anchor

    def adopt(self, params: Leaves, anchor: list[Any], new: Sequence[Array], own: Segments) -> tuple[Leaves, list[Any]]:
        """See Moves."""
        adopted = self._adopted(params, anchor, new, own)
        del anchor[:]
        return adopted, self.place(new)


class HostMoves(_OverShards):
    """The moves where the anchor is on the host, in numpy arrays that are written in place."""

    def place(self, leaves: Sequence[Array]) -> list[Any]:
        """See Moves."""
        return [np.array(self._on_host(leaf), np.float32, order="C") for leaf in leaves]

    def settle(self, params: Leaves, anchor: list[Any]) -> list[Any]:
        """See Moves."""
        self._homes = self._leaves.homes([jnp.asarray(leaf) for leaf in params])
        return anchor

    def warm_up(self, params: Leaves, anchor: list[Any]) -> None:
        """See Moves."""
        params = [jnp.asarray(leaf) for leaf in params]
        for fragment in range(self.layout.fragments):
            self.pending(params, anchor, fragment)
            for i in self.layout.leaves(fragment):
                self._leaves.compile_add(params, [i], fragment, donate=self.donate)

    def pending(self, params: Leaves, anchor: list[Any], fragment: int, *, whole: bool = False) -> list[Array]:
        """See Moves. The segments are numpy arrays; waits until they are here."""
        segments: list[Array] = []
        touched = self.layout.leaves(fragment)
        coming = [self._take(params[i], i, fragment) for i in touched[:1]]
        for number, i in enumerate(touched):
            coming += [self._take(params[j], j, fragment) for j in touched[number + 1 : number + 2]]  # one ahead
            segment = np.subtract(np.asarray(coming.pop(0)), self.layout.take(anchor[i], i, fragment))
            segments.append(segment if whole or self.elastic == 1 else np.float32(self.elastic) * segment)
        return segments

    def apply(self, params: Leaves, anchor: list[Any], aggregate: Segments, own: Segments) -> tuple[Leaves, list[Any]]:
        """See Moves."""
        for fragment in sorted({*aggregate, *own}):
            touched = self.layout.leaves(fragment)
            if fragment in aggregate:
                for i, shared in zip(touched, aggregate[fragment], strict=True):
                    self.layout.add(anchor[i], i, fragment, np.asarray(shared))
            params = [jnp.asarray(leaf) for leaf in params]
            for i, segment in zip(touched, _step(aggregate, own, fragment), strict=True):
                params = self._leaves.add(params, {i: segment}, fragment, donate=self.donate)
                params[i].block_until_ready()  # or all that is sent would be on the device at once
        return params, anchor

    def adopt(self, params: Leaves, anchor: list[Any], new: Sequence[Array], own: Segments) -> tuple[Leaves, list[Any]]:
        """See Moves."""
        return self._adopted(params, anchor, new, own), self.place(new)

    def _take(self, leaf: Array, index: int, fragment: int) -> Array:
        leaf = jnp.asarray(leaf)
        if self.layout.fragments == 1:
            return self._leaves.fetch(leaf).reshape(-1)
        return self._leaves.take(leaf, index, fragment)


def _step(aggregate: Segments, own: Segments, fragment: int) -> Sequence[Array]:
    """Return what the parameters move by: D(U) - D(u)."""
    if fragment not in own:
        return aggregate[fragment]
    if fragment not in aggregate:
        return [-segment for segment in own[fragment]]
    return [shared - mine for shared, mine in zip(aggregate[fragment], own[fragment], strict=True)]
