"""Keep the hub's side of the one equation: the parameters, and what has been published of them.

    g = 1/N_live * sum D(u);  parameters += outer(g);  U = C_down(parameters - published);  published += D(U)

Rule 1: pure: no clock, no socket, no thread; one thread calls it.  Rule 2: state lies fragment by fragment, each one
flat float32 vector, so that no exchange gathers anything.  Rule 3: a publish is checked whole before any of it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.base import Codec, Coding, coding_from_spec
from zmqtrain.codecs.codec import SLAB_VALUES, State
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import check_payload, decode_payload, encode_payload, initial_states, payload_size
from zmqtrain.errors import CheckpointError, CodecError, ModelMismatch
from zmqtrain.protocol.messages import Publish, Reduce
from zmqtrain.runtime.delta import (
    DENSE,
    cut,
    decode_snapshot,
    encode_snapshot,
    snapshot_codecs,
    snapshot_counts,
)
from zmqtrain.settings import RunSettings
from zmqtrain.strategies.aggregate import mean_over_live
from zmqtrain.strategies.outer import outer_from_spec
from zmqtrain.types import Buffer, ModelSpec, Version, count_values

__all__ = ["Released", "Aggregator"]

MOST_VALUES = 1 << 33
"""No larger model is planned for: a founder's claim must not cost the hub seconds."""

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Released:
    """The step from version - 1 to version, encoded: the frames of each fragment."""

    version: Version
    codec: str
    fragments: tuple[int, ...]
    frames: tuple[tuple[Buffer, ...], ...]
    overflowed: tuple[int, ...] = ()
    """Fragments whose sum was not finite (huge deltas added up): nothing of theirs was used."""


class Aggregator:
    """The arrays of the hub: parameters, published, the running sum and the outer optimizer's state.

    `version` is -1 until `found` or `restore`.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.broadcast_coding = coding_from_spec(settings.broadcast_codec)
        self.outer = outer_from_spec(settings.outer)
        self.version: Version = -1
        self.parameters: list[Vector] = []
        self.published: list[Vector] = []
        self._sums: list[Vector] = []
        self._states: list[list[State]] = []
        self._outer_state: list[Mapping[str, Vector]] = []
        self._snapshot: tuple[Version, tuple[Buffer, ...]] = (-1, ())

    def plan(self, model: ModelSpec) -> None:
        """Lay out a model, before its parameters are here. Raises ModelMismatch or ConfigError if that cannot be."""
        if count_values(model) > MOST_VALUES:
            raise ModelMismatch(
                f"a model of {count_values(model):,} values; at most {MOST_VALUES:,} can be trained", ""
            )
        self.layout = Layout(model, self.settings.fragments)

    def publish_bound(self, publish: Publish) -> int:
        """Return the bytes that a publish must have, and its most."""
        return payload_size(self._codecs(publish), self.layout.counts(publish.fragment))

    def snapshot_bound(self) -> int:
        """Return the bytes that a snapshot must have, and its most."""
        return payload_size(snapshot_codecs(self.layout), snapshot_counts(self.layout))

    def check_snapshot(self, frames: Sequence[Buffer]) -> None:
        """Raise CodecError unless a founder's parameters can be used."""
        check_payload(snapshot_codecs(self.layout), frames, snapshot_counts(self.layout))

    def found(self, frames: Sequence[Buffer]) -> None:
        """Take the founder's parameters as version 0."""
        self._begin(decode_snapshot(self.layout, frames), 0)

    def _begin(self, flats: Sequence[Vector], version: Version) -> None:
        flats = [flat + np.float32(0) for flat in flats]  # no -0.0: sums then never make one, on any machine
        self.parameters = [flat.copy() for flat in flats]
        self.published = [flat.copy() for flat in flats]
        self._sums = [np.zeros_like(flat) for flat in flats]
        self._states = [
            initial_states(self.broadcast_coding.of_fragment(self.layout, f), self.layout.counts(f))
            for f in range(len(flats))
        ]
        self._outer_state = [self.outer.init(flat.size) for flat in flats]
        self.version = version

    def check(self, publish: Publish, frames: Sequence[Buffer]) -> None:
        """Raise CodecError unless the publish can be added."""
        check_payload(self._codecs(publish), frames, self.layout.counts(publish.fragment))

    def accumulate(self, publish: Publish, frames: Sequence[Buffer]) -> None:
        """Add a checked publish to the sum of the round."""
        counts = self.layout.counts(publish.fragment)
        total = self._sums[publish.fragment]
        decode_payload(self._codecs(publish), frames, counts, out=total, add=True, checked=True)

    def _codecs(self, publish: Publish) -> tuple[Codec, ...]:
        return coding_from_spec(publish.codec).of_fragment(self.layout, publish.fragment)

    def release(self, reduce: Reduce) -> Released:
        """Close the round and return what every peer is to be sent."""
        coding = coding_from_spec(DENSE) if reduce.dense else self.broadcast_coding
        overflowed = tuple(fragment for fragment in reduce.fragments if not np.isfinite(self._sums[fragment]).all())
        for fragment in overflowed:
            self._sums[fragment].fill(0)
        frames = tuple(self._release(fragment, reduce.live, coding) for fragment in reduce.fragments)
        self.version = reduce.version
        return Released(self.version, coding.name, reduce.fragments, frames, overflowed)

    def _release(self, fragment: int, live: int, coding: Coding) -> tuple[Buffer, ...]:
        total, parameters, published = self._sums[fragment], self.parameters[fragment], self.published[fragment]
        state, counts = self._outer_state[fragment], self.layout.counts(fragment)
        codecs = coding.of_fragment(self.layout, fragment)
        states = self._states[fragment] if coding is self.broadcast_coding else None
        for start in range(0, total.size, SLAB_VALUES):  # one pass over the memory; the sum becomes what is unpublished
            part = slice(start, start + SLAB_VALUES)
            mean = mean_over_live(total[part], live, out=total[part])
            parameters[part] += self.outer.update(mean, {name: array[part] for name, array in state.items()})
            np.subtract(parameters[part], published[part], out=total[part])
        try:
            frames = encode_payload(codecs, cut(total, counts), states)
        finally:
            total.fill(0)
        decode_payload(codecs, frames, counts, out=published, add=True, checked=True)
        return frames

    def snapshot(self) -> tuple[Version, tuple[Buffer, ...]]:
        """Return the version and the frames of `published`; made once per version, shared by all who ask."""
        if self._snapshot[0] != self.version:
            self._snapshot = (self.version, encode_snapshot(self.layout, self.published))
        return self._snapshot

    def replay(self, released: Released) -> None:
        """Take a step that was published before a crash; the outer state stays as it was saved.

        The parameters become what was published: what the saved ones were ahead of it is in the step, at least in part,
        and must not be published twice. What of the step itself was not published yet is lost with the crash.
        """
        if released.version != self.version + 1:
            raise CheckpointError(f"the journal goes from version {self.version} to {released.version}")
        coding = coding_from_spec(released.codec)
        try:
            for fragment, frames in zip(released.fragments, released.frames, strict=True):
                check_payload(coding.of_fragment(self.layout, fragment), frames, self.layout.counts(fragment))
        except CodecError as error:
            raise CheckpointError(
                f"the journal's step to version {released.version} cannot be read ({error}): remove the journal to go "
                f"on from the checkpoint, at version {self.version}"
            ) from None
        for fragment, frames in zip(released.fragments, released.frames, strict=True):
            counts = self.layout.counts(fragment)
            step = decode_payload(coding.of_fragment(self.layout, fragment), frames, counts, checked=True)
            self.published[fragment] += step
            self.parameters[fragment][:] = self.published[fragment]
        self.version = released.version

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all arrays by name, each in the shape of its leaf: "parameters/<path>", "published/<path>",
        "<outer state>/<path>"."""
        named = {"parameters": self.parameters, "published": self.published}
        for key in self._outer_state[0]:
            named[f"outer.{key}"] = [state[key] for state in self._outer_state]
        return {
            f"{name}/{leaf.path}": array
            for name, flats in named.items()
            for leaf, array in zip(self.layout.spec, self.layout.join(flats), strict=True)
        }

    def restore(self, version: Version, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Take over what `arrays` returned. Raises CheckpointError."""

        def flats(name: str) -> list[Vector]:
            leaves = []
            for leaf in self.layout.spec:
                array = arrays.get(f"{name}/{leaf.path}")
                if array is None or array.shape != leaf.shape or array.dtype != np.float32:
                    raise CheckpointError(f"the checkpoint has no {name} of {leaf}")
                leaves.append(array)
            return self.layout.split(leaves)

        self._begin(flats("parameters"), version)
        self.published = flats("published")
        for key in self._outer_state[0]:
            for state, flat in zip(self._outer_state, flats(f"outer.{key}"), strict=True):
                state[key][:] = flat
