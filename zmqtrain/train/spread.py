"""Move fragments in and out of leaves that are spread over several devices, each device its own piece.

Rule 1: nothing is gathered: what is compiled here runs on each device's shard alone (`shard_map`, no collective).
Rule 2: any sharding will do, and a mixture.  Rule 3: what comes out has the sharding that went in, with `donate` its
memory too.  (A shard here is jax's: the part of a leaf that one device holds.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from zmqtrain.core.errors import ModelMismatch
from zmqtrain.core.interfaces import Layout
from zmqtrain.core.types import Array, ModelSpec
from zmqtrain.train.cut import Cut, Shard, cut_shards
from zmqtrain.train.stack import (
    ALL_ALIKE,
    EACH_ITS_OWN,
    Group,
    group_of,
    mesh_of,
    pieces_of,
    segment_of,
    shards_of,
    stacked,
    unstacked,
)

Leaves = list[jax.Array]
Segments = Mapping[int, Array]

COMPILED_KEPT = 4096
"""So many jitted functions are kept, of all models of a process: a handful per fragment, or per leaf."""


class Home(NamedTuple):
    """Where a leaf lives. committed: tied to its devices, as jax has it; what is not follows what it meets."""

    sharding: Sharding
    committed: bool


class SpreadLeaves:
    """The leaves of one model on their devices, whose homes may differ from leaf to leaf.

    Raises ModelMismatch, naming the leaf, for one of which another process holds a part.
    """

    def __init__(self, layout: Layout, model: ModelSpec) -> None:
        self.layout, self.model = layout, model
        self._cuts: dict[tuple[int, int, tuple[Shard, ...]], Cut] = {}

    def homes(self, leaves: Leaves) -> list[Home]:
        """Return where each leaf lives."""
        for leaf, spec in zip(leaves, self.model, strict=True):
            if not leaf.is_fully_addressable:
                raise ModelMismatch(
                    f"the leaf {spec} is spread over several processes; a node is one process with all devices of its "
                    "PC, so do not call jax.distributed.initialize",
                    spec.path,
                )
        return [Home(leaf.sharding, leaf.committed) for leaf in leaves]

    def put(self, values: Sequence[Array], homes: Sequence[Home], dtypes: Sequence[Any]) -> Leaves:
        """Return leaves of these values (numpy), of these dtypes, each device with its own part."""
        placed: Leaves = []
        for value, home, dtype in zip(values, homes, dtypes, strict=True):
            own = np.array(value, dtype)  # jax may keep this very memory, so that it is nobody else's
            placed.append(jax.device_put(own, home.sharding) if home.committed else jnp.asarray(own))
        return placed

    def fetch(self, leaf: jax.Array) -> NDArray[np.float32]:
        """Return a whole leaf on the host, in float32, joined there from what each device holds; nobody else's."""
        whole = np.empty(leaf.shape, np.float32)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                whole[shard.index] = np.asarray(shard.data)
        return whole

    def take(self, leaf: jax.Array, index: int, fragment: int) -> Any:
        """Return the float32 segment that one leaf has in a fragment, as it is now."""
        return self._segments(_taken, [leaf], [], [index], fragment)[0]

    def pending(self, params: Leaves, anchor: Leaves, fragment: int, share: float = 1.0) -> list[Any]:
        """Return `share` times params - anchor of one fragment: a float32 segment per leaf that it touches.

        A segment is a jax array where one device holds all of it (that one's own, where leaves are replicated), else a
        `Segment`. The anchor lives where the parameters do.
        """
        touched = self.layout.leaves(fragment)
        others = [stacked(anchor[i], group_of(anchor[i])) for i in touched]
        return self._segments(_Ahead(share), [params[i] for i in touched], [others], touched, fragment)

    def add(self, leaves: Sequence[jax.Array], step: Segments, fragment: int, *, donate: bool) -> Leaves:
        """Return the leaves with segments of one fragment added (numpy or jax): `step`, by the leaf's number.

        The sum is made in the wider of the two dtypes and rounded to the leaf's.  donate: the touched leaves' memory.
        """
        moving, pieces, cuts = self._meet(leaves, step, fragment)
        moved = dict(zip(step, self._run(_added, moving, [pieces], cuts, donate=donate), strict=True))
        return [moved.get(i, leaf) for i, leaf in enumerate(leaves)]

    def compile_add(self, leaves: Sequence[jax.Array], touched: Sequence[int], fragment: int, *, donate: bool) -> None:
        """Have compiled what `add` needs to move these leaves together; nothing is moved."""
        still = {}
        for i in touched:
            spans = self.layout.spans(i, fragment)
            still[i] = np.zeros(int(np.sum(spans[:, 1] - spans[:, 0])), np.float32)
        moving, pieces, cuts = self._meet(leaves, still, fragment)
        for compiled, arguments, _ in self._calls(_added, moving, [pieces], cuts, donate=donate):
            compiled.lower(*arguments).compile()

    # ------------------------------------------------------------------ what each device does

    def _cut(self, leaf: jax.Array, index: int, fragment: int) -> Cut | None:
        """Return where the fragment lies in the shards of a leaf; None where it is the whole leaf."""
        if self.layout.fragments == 1:
            return None
        shards = shards_of(leaf.sharding, leaf.shape)
        if (cut := self._cuts.get((index, fragment, shards))) is None:
            cut = cut_shards(leaf.shape, shards, self.layout.spans(index, fragment))
            self._cuts[index, fragment, shards] = cut
        return cut

    def _segments(
        self,
        kernel: _Kernel,
        leaves: Sequence[jax.Array],
        others: Sequence[Sequence[Array]],
        touched: Sequence[int],
        fragment: int,
    ) -> list[Any]:
        cuts = [self._cut(leaf, i, fragment) for leaf, i in zip(leaves, touched, strict=True)]
        stacks = self._run(kernel, leaves, others, cuts, flat=True)
        return [segment_of(stack, leaf, cut) for stack, leaf, cut in zip(stacks, leaves, cuts, strict=True)]

    def _meet(
        self, leaves: Sequence[jax.Array], step: Segments, fragment: int
    ) -> tuple[Leaves, list[Array], list[Cut | None]]:
        """Return the touched leaves, the stacks of what each device is sent for them, and their cuts."""
        moving, pieces, cuts = [], [], []
        for i, segment in step.items():
            moving.append(leaves[i])
            cuts.append(self._cut(leaves[i], i, fragment))
            pieces.append(group_of(leaves[i]).send(pieces_of(segment, leaves[i], cuts[-1])))
        return moving, pieces, cuts

    def _run(
        self,
        kernel: _Kernel,
        leaves: Sequence[jax.Array],
        others: Sequence[Sequence[Array]],
        cuts: Sequence[Cut | None],
        *,
        flat: bool = False,
        donate: bool = False,
    ) -> list[jax.Array]:
        """Return what the kernel makes of each leaf and, behind it, the stacks of `others`, one of each per leaf.

        flat: that is a stack of flat segments; else a leaf like the one that went in, in its memory with `donate`.
        """
        made: dict[int, jax.Array] = {}
        for compiled, arguments, members in self._calls(kernel, leaves, others, cuts, flat=flat, donate=donate):
            made.update(zip(members, compiled(*arguments), strict=True))
        return [made[i] if flat else unstacked(made[i], leaf) for i, leaf in enumerate(leaves)]

    def _calls(
        self,
        kernel: _Kernel,
        leaves: Sequence[jax.Array],
        others: Sequence[Sequence[Array]],
        cuts: Sequence[Cut | None],
        *,
        flat: bool = False,
        donate: bool = False,
    ) -> Iterator[tuple[Any, tuple[Any, ...], list[int]]]:
        """Give, for the leaves of each group of devices, the jitted function, its arguments, and which they are."""
        groups: dict[Group, list[int]] = {}
        for position, leaf in enumerate(leaves):
            groups.setdefault(group_of(leaf), []).append(position)
        for group, members in groups.items():
            stacks = [stacked(leaves[position], group) for position in members]
            behind = [[other[position] for position in members] for other in others]
            chosen = [cuts[position] for position in members]
            rows = [None if cut is None else group.send(cut.rows) for cut in chosen]
            grains = tuple(None if cut is None else cut.grain for cut in chosen)
            scalars = tuple(tuple(stack.ndim == 0 for stack in operand) for operand in [stacks, *behind])
            jitted = _jitted(kernel, group, grains, scalars, flat, donate)
            yield jitted, (stacks, behind, rows), members


def is_spread(leaves: Sequence[Any]) -> bool:
    """Return whether these arrays live on more than one device, taken together."""
    return len({device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.sharding.device_set}) > 1


# ---------------------------------------------------------------------- kernels: one shard of one leaf, on its device


_Kernel = Callable[..., Any]
"""(grain, rows or None for all, the shard of the leaf, those of the other operands) -> a shard."""


def _rows_of(shard: jax.Array, grain: int, rows: jax.Array | None) -> jax.Array:
    values = shard.reshape(-1, grain)
    return (
        values
        if rows is None
        else values.at[rows].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)
    )


def _taken(grain: int, rows: jax.Array | None, leaf: jax.Array) -> jax.Array:
    return _rows_of(leaf, grain, rows).astype(jnp.float32).reshape(-1)


@dataclass(frozen=True)
class _Ahead:
    share: float

    def __call__(self, grain: int, rows: jax.Array | None, leaf: jax.Array, anchor: jax.Array) -> jax.Array:
        ahead = _taken(grain, rows, leaf) - _taken(grain, rows, anchor)
        return ahead if self.share == 1 else self.share * ahead


def _added(grain: int, rows: jax.Array | None, leaf: jax.Array, piece: jax.Array) -> jax.Array:
    if rows is None:
        return (leaf + piece.reshape(leaf.shape)).astype(leaf.dtype)
    values, piece = leaf.reshape(-1, grain), piece.reshape(-1, grain)
    if leaf.dtype == piece.dtype:
        return values.at[rows].add(piece, mode="drop", unique_indices=True, indices_are_sorted=True).reshape(leaf.shape)
    wanted = (_rows_of(leaf, grain, rows) + piece).astype(leaf.dtype)
    return values.at[rows].set(wanted, mode="drop", unique_indices=True, indices_are_sorted=True).reshape(leaf.shape)


@lru_cache(maxsize=COMPILED_KEPT)
def _jitted(
    kernel: _Kernel,
    group: Group,
    grains: tuple[int | None, ...],
    scalars: tuple[tuple[bool, ...], ...],
    flat: bool,
    donate: bool,
) -> Any:
    """Return the kernel of several leaves, jitted for one group of devices; whoever asks, it is compiled once.

    grains: per leaf, None where all of it is meant.  scalars: per operand and leaf, whether it is a single value.
    """

    def on_device(leaves: Leaves, others: list[Leaves], rows: list[jax.Array | None]) -> list[jax.Array]:
        each = zip(grains, rows, leaves, *others, strict=True)
        return [kernel(grain or 1, chosen, *shards) for grain, chosen, *shards in each]

    function: Callable[..., Any] = on_device
    if len(group.devices) > 1:
        first, *others = [[ALL_ALIKE if scalar else EACH_ITS_OWN for scalar in operand] for operand in scalars]
        rows = [None if grain is None else EACH_ITS_OWN for grain in grains]
        made = [EACH_ITS_OWN] * len(first) if flat else first
        function = jax.shard_map(
            on_device, mesh=mesh_of(group.devices), in_specs=(first, others, rows), out_specs=made, check_vma=False
        )
    return jax.jit(function, donate_argnums=0 if donate else ())
