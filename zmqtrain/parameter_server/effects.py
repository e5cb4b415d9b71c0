"""Name what a key server's machine asks of its living half.

Rule: an effect is a wish, frozen and of plain types; it names a payload by who sent it and in which request.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.core.types import PeerId


@dataclass(frozen=True, slots=True)
class Receive:
    """Let the payload of this request come; then say `received` or `broken`."""

    worker: PeerId
    request: int


@dataclass(frozen=True, slots=True)
class Install:
    """The payload of this request is the first values of a key."""

    worker: PeerId
    request: int
    key: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Make one step of a key by the mean of these payloads, added in this order."""

    key: str
    payloads: tuple[tuple[PeerId, int], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Send a worker the values of a key, as they are after what came before this."""

    worker: PeerId
    request: int
    key: str


@dataclass(frozen=True, slots=True)
class Confirm:
    """Tell a worker that this request is done."""

    worker: PeerId
    request: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell a worker that this request is not done, and why. reason: a short code; text: a sentence for people."""

    worker: PeerId
    request: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Step by this optimizer from now on, with fresh state. anew: and without the keys that were there."""

    optimizer: str
    anew: bool


Effect = Receive | Install | Apply | Answer | Confirm | Refuse | Begin
