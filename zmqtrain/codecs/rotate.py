"""Send one part of a slab at a time, each in its turn: for loops that send gradients.

Rule 1: part p holds every n-th block of values, from block p on; which part it is travels with it, and no index.
Rule 2: every part of a slab has the same number of values, filled up with zeros: sizes follow from the count alone.
A run's settings cut whole models instead, the same way on all nodes: that is `fragment.Layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.codecs.chain import chain
from zmqtrain.codecs.codec import Codec, Sections, Stage, State, block_count, needs_between, needs_finite, read_buffers
from zmqtrain.core.errors import CodecError
from zmqtrain.core.specs import format_spec
from zmqtrain.core.types import Array, Buffer

MOST_FRAGMENTS = 4096
"""The most parts of a slab; at a slab's usual size each has 16 values then."""

_MAGNITUDE = 0x7FFFFFFF
_LARGEST_CUT = 4096
_LARGEST_SLAB = 1 << 30


def fragment(codec: Codec, fragments: int = 8) -> Codec:
    """Return the codec that sends one of `fragments` parts of a slab, each in its turn, coded by `codec`.

    Its error is all of the other parts and the codec's on this one: it is meant to stand under `error_feedback`.
    Name: the codec's, with one more argument: "ternary:block=128,fragments=8", "bf16:fragments=8".
    State: ((the part to send next: uint32[1]), the codec's own). Bytes: 4 a slab, and the codec's of one part.
    Raises ConfigError unless fragments is in 1..4096.
    """
    joined = chain(fragment_stage(fragments), codec)
    has_arguments = ":" in codec.name.rpartition("+")[2]
    return joined._replace(name=f"{codec.name}{',' if has_arguments else ':'}fragments={fragments}")


def fragment_stage(fragments: int = 8) -> Stage:
    """Return the stage that passes on every `fragments`-th block of a slab, from another block on at every turn.

    A block has the largest power of two up to 4096 values with which there are enough blocks for all parts and the
    parts' padding is at most an eighth of the slab; else one value. A slab of fewer values than `fragments` has as many
    parts as values.
    State: the part to send next, uint32[1], starting from 0; nodes that are to send different parts start from others.
    Own buffer: the part, (uint32, 1). Raises ConfigError unless fragments is in 1..4096.
    """
    name = format_spec("fragment", {"fragments": fragments})
    needs_between(name, "fragments", fragments, 1, MOST_FRAGMENTS)

    def layout(count: int) -> Sections:
        return ((np.uint32, 1),)

    def read(buffers: Sequence[Buffer | Array], count: int) -> Array:
        (part,) = read_buffers(buffers, layout(count), name)
        return part

    def forward(x: Array, state: State) -> tuple[tuple[Array, ...], Array, State]:
        xp = x.__array_namespace__()
        cut = _cut(x.shape[0], fragments)
        part = xp.minimum(state, xp.uint32(cut.parts - 1))  # the state may come from a cut in more parts
        following = xp.where(part == cut.parts - 1, xp.uint32(0), part + xp.uint32(1))
        if isinstance(x, np.ndarray):
            needs_finite(int((x.view(np.int32) & _MAGNITUDE).max()), x.size)
            return (part,), _take_numpy(x, cut, int(part[0])), following
        padded = xp.concatenate([x, xp.zeros(cut.whole - x.shape[0], dtype=xp.float32)])
        return (part,), padded.reshape(cut.rows, cut.parts, cut.block)[:, part[0]].reshape(-1), following

    def backward(buffers: Sequence[Buffer | Array], values: Array, count: int) -> Array:
        part, cut = read(buffers, count), _cut(count, fragments)
        if isinstance(values, np.ndarray):
            out = np.empty(count, np.float32)
            backward_into(buffers, values, out, False)
            return out
        xp = values.__array_namespace__()
        mine = (xp.arange(cut.parts, dtype=xp.uint32) == part)[None, :, None]
        spread = xp.where(mine, values.reshape(cut.rows, 1, cut.block), xp.float32(0))
        return spread.reshape(-1)[:count]

    def backward_into(
        buffers: Sequence[Buffer | Array], values: np.ndarray[Any, Any], out: np.ndarray[Any, Any], add: bool
    ) -> None:
        part, cut = int(read(buffers, out.size)[0]), _cut(out.size, fragments)
        if part >= cut.parts:
            raise CodecError(f"{name}: part {part} of a slab with {cut.parts} parts")
        if not add:
            out.fill(0)
        blocks, rest = _places(out, cut, part)
        head = blocks.size
        for target, source in ((blocks, values[:head].reshape(blocks.shape)), (rest, values[head : head + rest.size])):
            if add:
                np.add(target, source, out=target)
            else:
                np.copyto(target, source)

    def check(buffers: Sequence[Buffer | Array], count: int) -> None:
        part, parts = read(buffers, count), _cut(count, fragments).parts
        if part[0] >= parts:
            raise CodecError(f"{name}: part {part[0]} of a slab with {parts} parts")

    return Stage(
        name=name,
        init=lambda count: np.zeros(1, np.uint32),
        passes=lambda count: _cut(count, fragments).passes,
        layout=layout,
        forward=forward,
        backward=backward,
        check=check,
        backward_into=backward_into,
        slab=_LARGEST_SLAB,
    )


class _Cut(NamedTuple):
    """How a slab is cut: `rows` rows of `parts` blocks of `block` values, the padding counted in."""

    block: int
    parts: int
    rows: int

    @property
    def passes(self) -> int:
        return self.rows * self.block

    @property
    def whole(self) -> int:
        return self.passes * self.parts


@lru_cache(maxsize=256)
def _cut(count: int, fragments: int) -> _Cut:
    """Return the cut with the largest block that pads at most an eighth, and passes on no more than came in."""
    block = _LARGEST_CUT
    while block > 1:
        cut = _Cut(block, fragments, block_count(block_count(count, block), fragments))
        enough, padding = block_count(count, block) >= fragments, cut.whole - count
        if enough and padding <= count // 8 and cut.passes <= count:
            return cut
        block //= 2
    parts = min(fragments, count)
    return _Cut(1, parts, block_count(count, parts))


def _places(x: np.ndarray[Any, Any], cut: _Cut, part: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return views of what belongs to the part: its whole blocks, one a row, and what it has of a shorter last one."""
    whole = x.size // cut.block
    blocks = x[: whole * cut.block].reshape(whole, cut.block)[part :: cut.parts]
    return blocks, x[whole * cut.block :] if whole % cut.parts == part else x[x.size :]


def _take_numpy(x: np.ndarray[Any, Any], cut: _Cut, part: int) -> np.ndarray[Any, Any]:
    blocks, rest = _places(x, cut, part)
    values = np.zeros(cut.passes, np.float32)
    values[: blocks.size].reshape(blocks.shape)[:] = blocks
    values[blocks.size : blocks.size + rest.size] = rest
    return values
