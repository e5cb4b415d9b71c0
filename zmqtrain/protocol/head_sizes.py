"""How large the head of a message to a hub may be, by its kind, so that none is read that no sound peer sends (pure).

Rule 1: a head has SMALL_HEAD_BYTES at most, and LONG_HEAD_BYTES where it holds texts or lists of bounded length.
Rule 2: what describes the model, or the frames of a transfer, may be as large as the run's model makes it; before the
run has a model, as large as any head.  Rule 3: a kind that no hub takes is refused by its name.
"""

from __future__ import annotations

from zmqtrain.core.types import ModelSpec, count_values
from zmqtrain.protocol.framing import MAX_HEAD_BYTES
from zmqtrain.protocol.group_messages import GroupLost, JoinGroup
from zmqtrain.protocol.keys import Declare, Enrol, Founded, Initialise, Pull, Push
from zmqtrain.protocol.members import ALLOWED
from zmqtrain.protocol.messages import (
    Chunk,
    Credit,
    Fetch,
    Goodbye,
    Hello,
    Message,
    Publish,
    Report,
    Snapshot,
    WorkRequest,
)

SMALL_HEAD_BYTES = 4 << 10
LONG_HEAD_BYTES = 16 << 10
KEYS_HEAD_BYTES = 64 << 10
"""What describes keys of a parameter server: a client says them in several messages."""
LEAST_FETCH_BYTES = 64 << 10
"""A Fetch may be so large however small the run's model is: a node with another model is told which leaf differs."""
BYTES_OF_A_SIZE = 10
"""Of one frame of a transfer; a frame but the last holds FRAME_VALUES values at least."""
FRAME_VALUES = 8192
SNAPSHOT_MODELS = 5
"""A snapshot's frames are those of so many models: the state of an optimizer may go with it."""

TAKEN_BY_HUBS = frozenset({*ALLOWED, Chunk, Credit})
_LONG = frozenset({Hello, Report, WorkRequest, Goodbye, JoinGroup, GroupLost, Enrol, Initialise, Push, Pull})
_AS_KEYS_ARE = frozenset({Declare, Founded})


class HeadSizes:
    """The sizes at one hub; what follows from its model is computed once for each."""

    def __init__(self) -> None:
        self._model: ModelSpec = ()
        self._described = self._frames = 0

    def most_bytes(self, kind: type[Message], model: ModelSpec, founded: bool) -> int:
        """Return how large a head of this kind may be. model: the run's, or that of the node that founds it."""
        if kind in _AS_KEYS_ARE:
            return KEYS_HEAD_BYTES
        if kind is Fetch and not founded:
            return MAX_HEAD_BYTES
        if kind not in (Fetch, Publish, Snapshot):
            return LONG_HEAD_BYTES if kind in _LONG else SMALL_HEAD_BYTES
        self._look(model)
        if kind is Fetch:
            most = LEAST_FETCH_BYTES + 2 * self._described
        else:
            most = LONG_HEAD_BYTES + (SNAPSHOT_MODELS if kind is Snapshot else 1) * BYTES_OF_A_SIZE * self._frames
        return min(most, MAX_HEAD_BYTES)

    def _look(self, model: ModelSpec) -> None:
        if model is self._model:
            return
        self._model = model
        self._described = sum(4 * len(leaf.path) + 9 * len(leaf.shape) + len(leaf.dtype) + 10 for leaf in model)
        self._frames = count_values(model) // FRAME_VALUES
