"""Name a snapshot by what is in it: so that a node knows that what it has is what was sent, whoever sent it, and when.

Rule: the same frames in the same order have the same digest, however they were divided on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from zmqtrain.core.types import Buffer

DIGEST_BYTES = 16


class Digest:
    """The digest of frames that come one after another. Cost: about 1 ns a byte, without the interpreter's lock.

    Source: Aumasson et al. 2013, BLAKE2.
    """

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)

    def add(self, frame: Buffer) -> None:
        """Take the next frame."""
        self._hash.update(len(frame).to_bytes(8, "little"))
        self._hash.update(frame)

    @property
    def text(self) -> str:
        """The digest of all so far, 32 hexadecimal digits."""
        return self._hash.hexdigest()


def digest_of(frames: Sequence[Buffer]) -> str:
    """Return the digest of all these frames."""
    digest = Digest()
    for frame in frames:
        digest.add(frame)
    return digest.text
