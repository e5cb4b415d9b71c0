"""What a snapshot carries: the digest it is checked by, and an optimizer's state behind its parameters.

Rule 1: the same frames in the same order have the same digest, however they were divided on the wire.
Rule 2: an optimizer's state is float32 values, opaque to all but the two nodes. Each of its frames is a payload of its
own (codec float32, one segment), so that its size alone says how many values are in it, and it can be checked without
knowing what they mean; it is bounded by the size of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.payload import check_payload, decode_payload, encode_payload
from zmqtrain.core.errors import CodecError, FramingError
from zmqtrain.core.types import MAX_FRAME_BYTES, Array, Buffer
from zmqtrain.protocol.messages import Snapshot

DIGEST_BYTES = 16


class Digest:
    """The digest of frames that come one after another. Cost: about 1 ns a byte, without the interpreter's lock.

    Source: Aumasson et al. 2013, BLAKE2.
    """

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)

    def add(self, frame: Buffer) -> None:
        self._hash.update(len(frame).to_bytes(8, "little"))
        self._hash.update(frame)

    @property
    def text(self) -> str:
        """The digest of all so far, 32 hexadecimal digits."""
        return self._hash.hexdigest()


def digest_of(frames: Sequence[Buffer]) -> str:
    digest = Digest()
    for frame in frames:
        digest.add(frame)
    return digest.text


OPTIMIZER_STATE_MODELS = 4
"""An optimizer's state may have so many times the model's bytes; Adam's has twice."""
FEW_FRAMES, LEAST_FRAME_BYTES = 4096, 1 << 20
"""A snapshot has at most so many frames, and one more for each so many bytes."""
SLACK_BYTES = 1 << 16
"""And this many bytes more, for counters and small models."""
_HEADER_BYTES = 16
_FRAME_VALUES = (MAX_FRAME_BYTES - _HEADER_BYTES) // 4

_FLOAT32 = (codec_from_spec("float32"),)

Vector = NDArray[np.float32]


def encode_optimizer_state(arrays: Sequence[Array]) -> tuple[Buffer, ...]:
    """Encode float32 arrays, laid end to end. Raises NonFiniteDelta."""
    flat = np.concatenate([np.asarray(array, np.float32).reshape(-1) for array in arrays] or [np.zeros(0, np.float32)])
    frames: list[Buffer] = []
    for start in range(0, flat.size, _FRAME_VALUES):
        frames += encode_payload(_FLOAT32, [flat[start : start + _FRAME_VALUES]])
    return tuple(frames)


def _count(frame: Buffer) -> list[int]:
    values, rest = divmod(len(frame) - _HEADER_BYTES, 4)
    if rest or values < 1:
        raise CodecError(f"an optimizer's state in a frame of {len(frame)} bytes: it holds whole float32 values")
    return [values]


def check_optimizer_state(frames: Sequence[Buffer]) -> None:
    """Raise CodecError unless these are what `encode_optimizer_state` writes: sound, and all finite."""
    for frame in frames:
        check_payload(_FLOAT32, [frame], _count(frame))


def decode_optimizer_state(frames: Sequence[Buffer]) -> Vector:
    """Return the values, laid end to end. Raises CodecError."""
    parts = [decode_payload(_FLOAT32, [frame], _count(frame)) for frame in frames]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def split_snapshot(snapshot: Snapshot, frames: Sequence[Buffer]) -> tuple[Sequence[Buffer], Sequence[Buffer]]:
    """Return the frames of the parameters and those of the optimizer's state. Raises CodecError."""
    if not 0 <= snapshot.moments <= len(frames):
        raise CodecError(f"a snapshot of {len(frames)} frames, {snapshot.moments} of them of an optimizer's state")
    parameters = len(frames) - snapshot.moments
    return frames[:parameters], frames[parameters:]


def check_snapshot_sizes(snapshot: Snapshot, model_bytes: int, sends_optimizer_state: bool) -> None:
    """Raise FramingError unless a snapshot announces a model of just that size, and a state within its bounds."""
    most_frames = FEW_FRAMES + (1 + OPTIMIZER_STATE_MODELS) * model_bytes // LEAST_FRAME_BYTES
    if len(snapshot.sizes) > most_frames:
        raise FramingError(f"{len(snapshot.sizes)} frames are announced; at most {most_frames} can be right")
    if snapshot.first:
        raise FramingError(f"a snapshot from its frame {snapshot.first} on; nobody here holds those before")
    if not 0 <= snapshot.moments < max(1, len(snapshot.sizes)) or (snapshot.moments and not sends_optimizer_state):
        raise FramingError(
            f"{snapshot.moments} of {len(snapshot.sizes)} frames are announced as an optimizer's state; this run takes "
            + ("fewer than there are" if sends_optimizer_state else "none")
        )
    parameters = sum(snapshot.sizes[: len(snapshot.sizes) - snapshot.moments])
    if not 0 < parameters <= model_bytes:
        raise FramingError(f"{parameters} bytes are announced where at most {model_bytes} can be right")
    moments, bound = sum(snapshot.sizes) - parameters, OPTIMIZER_STATE_MODELS * model_bytes + SLACK_BYTES
    if moments > bound:
        raise FramingError(f"{moments} bytes of an optimizer's state are announced; at most {bound} are taken")
