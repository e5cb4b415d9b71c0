"""Join stages and a codec into one codec: pick or turn the values first, then code what is left.

Rule 1: a chain's buffers are those of its stages in order, then those of the codec; every stage sees what the one
before it passed on.  Rule 2: a codec's slab limits what a stage passes on to it, not what the stage takes.
Source of the shape: optax.chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.codecs.codec import Codec, Sections, Stage, State, needs_slab
from zmqtrain.core.types import Array, Buffer

_LONGEST_SLAB = 1 << 18
"""The most values of a chain's slab, unless the codec's own is longer: a megabyte of float32."""

_MOST_BYTES = 900_000
"""The most bytes of an encoded slab: it fits in a frame, with room for the header and the sections' padding."""


def chain(*parts: Stage | Codec) -> Codec:
    """Return the codec that puts a slab through each stage and then through the codec, which stands last.

    Its error is what the stages drop, plus the codec's error on what they pass on. Its slab is the longest stage.slab /
    2^i of which no more is passed on than the codec's slab, that has at most 2^18 values (or as many as the codec's),
    and that is at most 900,000 bytes when encoded. Raises TypeError unless all but the last part are stages, and the
    last is a codec.
    """
    *stages, codec = parts
    if not isinstance(codec, Codec) or not all(isinstance(stage, Stage) for stage in stages):
        raise TypeError("a chain is stages first, and one codec last")
    for stage in reversed(stages):
        assert isinstance(stage, Stage)
        codec = _join(stage, codec)
    return codec


def _join(stage: Stage, codec: Codec) -> Codec:
    name = f"{stage.name}+{codec.name}"

    def init(count: int) -> State:
        return stage.init(count), codec.init(stage.passes(count))

    def layout(count: int) -> Sections:
        return (*stage.layout(count), *codec.layout(stage.passes(count)))

    def cut(buffers: Sequence[Buffer | Array], count: int) -> tuple[Sequence[Buffer | Array], Sequence[Buffer | Array]]:
        own = len(stage.layout(count))
        return buffers[:own], buffers[own:]

    def encode(x: Array, state: State) -> tuple[tuple[Array, ...], State]:
        needs_slab(x, name)
        own, values, stage_state = stage.forward(x, state[0])
        coded, codec_state = codec.encode(values, state[1])
        return (*own, *coded), (stage_state, codec_state)

    def decode(buffers: Sequence[Buffer | Array], count: int) -> Array:
        own, coded = cut(buffers, count)
        return stage.backward(own, codec.decode(coded, stage.passes(count)), count)

    def check(buffers: Sequence[Buffer | Array], count: int) -> None:
        own, coded = cut(buffers, count)
        stage.check(own, count)
        codec.check(coded, stage.passes(count))

    def decode_into(buffers: Sequence[Buffer | Array], out: np.ndarray[Any, Any], add: bool) -> None:
        own, coded = cut(buffers, out.size)
        values = np.empty(stage.passes(out.size), np.float32)
        codec.decode_into(coded, values, False)
        stage.backward_into(own, values, out, add)

    inner = codec.energy

    def energy(buffers: Sequence[Buffer | Array], count: int) -> float:
        assert inner is not None
        return inner(cut(buffers, count)[1], stage.passes(count))

    def sparse(buffers: Sequence[Buffer | Array], count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        assert stage.places is not None
        own, coded = cut(buffers, count)
        values = np.empty(stage.passes(count), np.float32)
        codec.decode_into(coded, values, False)
        return np.asarray(stage.places(own, count)), values

    return Codec(
        *(name, init, layout, encode, decode, check, decode_into, _slab(stage, codec)),
        energy=energy if inner else None,
        sparse=sparse if stage.places else None,
    )


def _slab(stage: Stage, codec: Codec) -> int:
    slab = stage.slab
    while slab > 1 and not _fits(slab, stage, codec):
        slab //= 2
    return slab


def _fits(slab: int, stage: Stage, codec: Codec) -> bool:
    if slab > max(_LONGEST_SLAB, codec.slab) or (passed := stage.passes(slab)) > codec.slab:
        return False
    sections = (*stage.layout(slab), *codec.layout(passed))
    return sum(np.dtype(dtype).itemsize * count for dtype, count in sections) <= _MOST_BYTES
