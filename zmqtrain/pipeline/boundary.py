"""How values travel between two stages: a codec for floats, and all others as they are (no clock, no socket).

Rule 1: floats that depend on parameters are flattened to float32 and encoded by one of the codecs of deltas, each value
of the carry as a payload of its own. Integers, masks and random keys are sent as they are.
Rule 2: cotangents are rounded at random where the codec has such a form (int8, int4): their error is then zero on
average, and sums over micro-batches lose nothing. Chance follows from the values, so a run repeated has the same bits.
Rule 3: a value that is not finite is an error at its sender, which names the stage; it reaches nobody.
Source: Narayanan et al. 2019, PipeDream (what travels); Gupta et al. 2015 (rounding at random).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from zmqtrain.codecs.base import CODECS, codec_from_spec
from zmqtrain.codecs.codec import Codec
from zmqtrain.codecs.payload import decode_payload, encode_payload, payload_size
from zmqtrain.core.errors import ConfigError, NonFiniteDelta
from zmqtrain.pipeline.stage import CarriedValue

Direction = Literal["forward", "backward"]
Values = tuple[Any, ...]
Wire = list[tuple[Any, ...]]
"""What is sent: for each value the frames of its payload, uint8[n], or the array itself."""

AT_RANDOM = {"int8": "int8s", "int4": "int4s"}
"""Codec of carries: the codec of their cotangents, with the same arguments; every other codec is that of both."""
PLAIN = ("bf16", "float32", "int8", "int8s", "int4", "int4s")
"""The codecs that send every value: what a sparse or ternary code leaves out of an activation comes nowhere else."""


class Boundary:
    """The coding of carries and cotangents.

    codec: as "bf16", "int8:block=128" or "int4:block=64"; "float32" sends values as they are, whatever their dtype.
    Raises ConfigError for a codec that does not send every value.
    """

    def __init__(self, codec: str = "bf16") -> None:
        forward = codec_from_spec(codec)
        family, colon, arguments = forward.name.partition(":")
        if family not in PLAIN:
            kinds = ", ".join(name for name in CODECS if name in PLAIN)
            raise ConfigError(f"activations cannot travel as {codec!r}, which leaves values out: take one of {kinds}")
        self.codec = forward.name
        backward = codec_from_spec(AT_RANDOM.get(family, family) + colon + arguments)
        self._codecs: dict[Direction, Codec] = {"forward": forward, "backward": backward}
        self._exact = family == "float32"

    def pack(self, values: Sequence[Any], forms: Sequence[CarriedValue], direction: Direction, what: str) -> Wire:
        """Return what is sent of these values (arrays; those of jax are waited for).

        forms: of each value.  what: in words, for the error.  Raises NonFiniteDelta for a coded value that is not
        finite.
        """
        sent: Wire = []
        for value, form in zip(values, forms, strict=True):
            array = np.asarray(value)
            if not self._is_coded(form):
                sent.append((array,))
                continue
            flat = np.ascontiguousarray(array, dtype=np.float32).reshape(-1)
            try:
                frames = encode_payload((self._codecs[direction],), (flat,))
            except NonFiniteDelta as error:
                raise NonFiniteDelta(f"{what} is not finite: lower the learning rate, or look at the data") from error
            sent.append(tuple(np.frombuffer(frame, np.uint8) for frame in frames))
        return sent

    def unpack(self, wire: Sequence[Sequence[Any]], forms: Sequence[CarriedValue], direction: Direction) -> Values:
        """Return the values, numpy arrays, as the receiver computes with them. Raises CodecError for frames that no
        `pack` of values of these forms makes."""
        values = []
        for frames, form in zip(wire, forms, strict=True):
            if not self._is_coded(form):
                values.append(np.asarray(frames[0], form.dtype).reshape(form.shape))
                continue
            count = prod(form.shape)
            flat = decode_payload((self._codecs[direction],), [memoryview(frame) for frame in frames], (count,))
            values.append(flat.astype(form.dtype, copy=False).reshape(form.shape))
        return tuple(values)

    def across(self, values: Values, forms: Sequence[CarriedValue], direction: Direction, what: str) -> Values:
        """Return what the next stage gets of these values: itself, where the codec changes nothing."""
        return values if self._exact else self.unpack(self.pack(values, forms, direction, what), forms, direction)

    def wire_bytes(self, forms: Sequence[CarriedValue]) -> int:
        """Return how many bytes values of these forms are on the wire."""
        codec = self._codecs["forward"]
        sizes = [payload_size((codec,), (prod(form.shape),)) if self._is_coded(form) else form.nbytes for form in forms]
        return sum(sizes)

    def _is_coded(self, form: CarriedValue) -> bool:
        return form.has_cotangent and not self._exact and prod(form.shape) > 0

    def nbytes(self, wire: Sequence[Sequence[Any]]) -> int:
        """Return how many bytes are sent."""
        return sum(int(frame.nbytes) for frames in wire for frame in frames)
