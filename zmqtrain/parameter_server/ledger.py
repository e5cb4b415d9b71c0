"""Write down what a key server knows: its keys' pieces, its clients, and their requests that are open.

Rule: nothing is decided here; the machine moves all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from zmqtrain.core.types import PeerId
from zmqtrain.parameter_server.shards import ITEM_BYTES


class Kind(Enum):
    """What a request asks for; the values are for sentences."""

    INITIALISE = "init"
    PUSH = "push"
    PULL = "pull"


@dataclass(slots=True)
class Request:
    """One request that is open. clock: what the worker's and the key's clock must allow; pull: values are wanted.

    turn: in which order requests were opened: of those that wait for the same clock the first goes first.
    """

    worker: PeerId
    number: int
    kind: Kind
    key: str
    pull: bool = False
    clock: int | None = None
    dtype: str = ""
    values: tuple[int, int] = (0, 0)
    turn: int = 0

    def __lt__(self, other: Request) -> bool:
        return (self.clock or 0, self.turn) < (other.clock or 0, other.turn)


@dataclass(slots=True)
class Worker:
    """A client that has enrolled. reads: it never pushes.  counts: for every key, from the beginning.

    open: its requests by number.  pushed: the keys that it has pushed to.
    """

    reads: bool
    counts: bool
    open: dict[int, Request] = field(default_factory=dict)
    pushed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Key:
    """One key's piece.

    clock: what every worker that counts has pushed.  clocks: of the workers, as far as their pushes are whole; asked:
    as they said.  pushed: it has been pushed to.  round: the pushes of the step that is being gathered.
    far: the requests that wait for the key's clock; own: by worker, the pulls that wait for its own pushes; both heaps.
    """

    name: str
    dtype: str
    start: int
    values: int
    clock: int = 0
    pushed: bool = False
    clocks: dict[PeerId, int] = field(default_factory=dict)
    asked: dict[PeerId, int] = field(default_factory=dict)
    round: set[tuple[PeerId, int]] = field(default_factory=set)
    far: list[Request] = field(default_factory=list)
    own: dict[PeerId, list[Request]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of its values."""
        return self.values * ITEM_BYTES[self.dtype]
