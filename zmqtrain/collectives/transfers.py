"""Hold what is on its way between ranks, on either side: a message that is here, one that is sent, one awaited.

Rule: nothing here does anything; `matching` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives.trees import Tree
from zmqtrain.collectives.wire import Head
from zmqtrain.core.errors import ZmqTrainError

ANY_SOURCE = -1
"""Whoever sent it."""

ANY_TAG = -1
"""Whatever its tag is."""

NOTHING = memoryview(b"")

Outgoing = tuple[int, Head, Any]
"""To which rank, what, and the values: anything with a buffer, or None."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a message is, or was.

    shape, dtype: of the array; of a tree of arrays () and "tree", of a Python value () and "value".  nbytes: of its
    values.  count: how many values it has, all arrays of a tree together; of a Python value its bytes.
    """

    source: int
    tag: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    count: int


@dataclass(slots=True, eq=False)
class Envelope:
    """A message that has come, or been announced, and is not received yet."""

    source: int
    tag: int
    number: int
    nbytes: int
    tree: Tree
    values: memoryview | None  # None: they wait at the sender


@dataclass(slots=True, eq=False)
class Transfer:
    """Something that somebody waits for: one of the three below.

    ended: it is over, well or not.  error: why not well.  owner: whoever asked for it may note itself here.
    """

    peer: int
    tag: int
    ended: bool = False
    error: ZmqTrainError | None = None
    owner: Any = None


@dataclass(slots=True, eq=False)
class Sending(Transfer):
    """A message on its way to rank `peer`.

    taken: somebody there receives it.  withdrawn: it never got there, its sender has it back.
    answered: called once the other side has said whether its sender can have it back.
    """

    number: int = 0
    values: memoryview = NOTHING
    taken: bool = False
    sent: int = 0
    received: int = 0
    withdrawn: bool = False
    answered: Callable[[], object] | None = None


@dataclass(slots=True, eq=False)
class Receiving(Transfer):
    """A wait for a message of rank `peer`, or of any.

    into: the array that it goes into, contiguous.  envelope: of what is matched.  joined: its values as bytes.
    """

    into: NDArray[Any] | None = None
    envelope: Envelope | None = None
    joined: NDArray[np.uint8] | None = None
    received: int = 0
    reported: int = 0
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Finding(Transfer):
    """A probe: a wait for a message to be there; take: it is then this probe's (`envelope`), and nobody else's."""

    take: bool = False
    envelope: Envelope | None = None
    cancelled: bool = False


def status_of(envelope: Envelope) -> Status:
    """Return the status of a message."""
    tree, count = envelope.tree, sum(shape.size for shape in envelope.tree.shapes)
    if tree.is_leaf:
        shape, dtype = tree.shapes[0].shape, tree.shapes[0].dtype.name
    else:
        shape, dtype = (), "value" if tree.is_value else "tree"
    return Status(envelope.source, envelope.tag, shape, dtype, envelope.nbytes, count)


def matches(transfer: Transfer, envelope: Envelope) -> bool:
    """Tell whether a receive or a probe is for this message."""
    return transfer.peer in (ANY_SOURCE, envelope.source) and transfer.tag in (ANY_TAG, envelope.tag)
