"""Tell a node, over the very connection, why the hub does not hear it (pure: frames in, frames out).

Rule 1: a notice is a channel's own message, and is not handed on: an empty frame, then the reason.  No head of a
protocol's message is empty.
Rule 2: only a hub sends one, and only to whom it has let in by its key: a stranger is told nothing (`zmq_access`).
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.core.types import Buffer

NOTICES = frozenset({"name"})
"""The reasons that a node is told, as in `refusals.REASONS`."""


def notice(reason: str) -> list[bytes]:
    """Return the frames of a notice; reason: one of `NOTICES`."""
    return [b"", reason.encode("ascii")]


def reason_of(frames: Sequence[Buffer]) -> str | None:
    """Return the reason if this message is a notice ("" for one that is not known here); None for any other."""
    if len(frames) != 2 or len(frames[0]):
        return None
    reason = bytes(frames[1]).decode("ascii", "replace")
    return reason if reason in NOTICES else ""
