"""Be a `GradientExchange` by allreduce: every process has the same mean, and takes the same step by itself.

Rule 1: whatever is agreed is a sum over all, in one order that all keep: first how many samples each has, then bucket
by bucket the gradients.
Rule 2: where a process is lost, those who are left make a group of their own, and say how far each of them has come.
The hub does not reduce for such a group: they go on with another algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import PeerLost
from zmqtrain.core.types import Array, Turn

logger = logging.getLogger(__name__)

WAIT_SECONDS = 600.0
"""How long one process may take longer than the others for a step, for its first compilation or an evaluation."""
PACKED_BYTES = 64 << 20
"""A state travels in arrays of about so many bytes."""


class Pending(Protocol):
    """A collective that is under way: a `zmqtrain.Communicator`'s Request."""

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Return its result."""


class Group(Protocol):
    """What is needed of a `zmqtrain.Communicator`."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all processes, by rank."""

    def allreduce(self, x: Any, op: str = "sum", *, timeout_seconds: float | None = None) -> Any:
        """Return the sum of all processes' arrays."""

    def iallreduce(self, x: Any, op: str = "sum", *, algorithm: str = "auto", codec: Any = None) -> Pending:
        """Begin an allreduce; what comes of it is the caller's own."""

    def broadcast(self, x: Any, root: int = 0, *, timeout_seconds: float | None = None) -> Any:
        """Return the array of `root`."""

    def shrink(self, timeout_seconds: float | None = None) -> Group:
        """Return the group of those who live, after a loss."""

    def statistics(self) -> Any:
        """Return its figures: bytes_sent, bytes_received."""

    def close(self, timeout_seconds: float | None = None) -> None:
        """Leave, once what is in flight has ended; wait at most so long for that."""


class AllreduceExchange:
    """A `GradientExchange` over a group of processes, one of which each of them is.

    group: is closed with this exchange.  algorithm: of the gradients' allreduce ("ring", "tree", "halving", "naive",
    "hub", or "auto").  codec: a spec of codecs; the gradients are then rounded, without feedback of what was left out.
    timeout_seconds: how long one process may keep the others waiting; then they raise CollectiveTimeout, which says
    whom they wait for.
    """

    gives_weights = False

    def __init__(
        self,
        group: Group,
        algorithm: str = "auto",
        *,
        codec: str | None = None,
        timeout_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.algorithm, self.codec, self.timeout_seconds = algorithm, codec, timeout_seconds
        self._group = group
        self._pending: list[Pending] = []

    @property
    def names(self) -> tuple[str, ...]:
        """See GradientExchange."""
        return self._group.names

    @property
    def rank(self) -> int:
        """See GradientExchange."""
        return self._group.rank

    def agree(self, samples: int, over: bool) -> Turn:
        """See GradientExchange: the samples of all, and whether all have said that it is over."""
        total, ended = self._sum(np.array([samples, over], np.int64))
        return Turn(int(total), int(ended) == len(self.names))

    def begin(self, leaves: Sequence[int], values: Array) -> None:
        """See GradientExchange."""
        self._pending.append(self._group.iallreduce(values, "sum", algorithm=self.algorithm, codec=self.codec))

    def finish(self) -> list[Array]:
        """See GradientExchange: the sums over all, which are the mean, as each is weighed."""
        pending, self._pending = self._pending, []
        return [request.wait(self.timeout_seconds) for request in pending]

    def align(self, step: int, state: Callable[[], Sequence[Array]]) -> tuple[int, Sequence[Array] | None]:
        """See GradientExchange: the state of the first of those who have made most steps is sent to all."""
        steps = [theirs for (theirs,) in self.gather([step])]
        most = max(steps)
        source = steps.index(most)
        if most >= 0 and min(steps) == most:
            return most, None
        arrays = [np.ascontiguousarray(array) for array in state()]
        came = [self._group.broadcast(piece, source, timeout_seconds=self.timeout_seconds) for piece in _packed(arrays)]
        if source == self.rank or step == most >= 0:
            return most, None
        return most, _unpacked(came, arrays)

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """See GradientExchange."""
        table = np.zeros((len(self.names), len(numbers)), np.int64)
        table[self.rank] = numbers
        return [tuple(row) for row in self._sum(table.reshape(-1)).reshape(table.shape).tolist()]

    def recover(self, lost: PeerLost) -> None:
        """See GradientExchange: whoever is lost meanwhile is left out, too."""
        self._pending.clear()
        self._group = self._group.shrink(self.timeout_seconds)
        if self.algorithm == "hub":
            logger.warning("the hub reduces for the whole group only: those who are left reduce without it")
            self.algorithm = "auto"

    def traffic(self) -> tuple[int, int]:
        """See GradientExchange."""
        figures = self._group.statistics()
        return figures.bytes_sent, figures.bytes_received

    def close(self) -> None:
        """See GradientExchange."""
        self._group.close(timeout_seconds=0.0)  # a node that is stopped waits for nobody

    def _sum(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self._group.allreduce(numbers, "sum", timeout_seconds=self.timeout_seconds)
        return total


def _packed(arrays: Sequence[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """Give the bytes of all arrays end to end, in pieces of whole arrays."""
    piece: list[NDArray[np.uint8]] = []
    for array in arrays:
        piece.append(array.reshape(-1).view(np.uint8))
        if sum(one.size for one in piece) >= PACKED_BYTES:
            yield np.concatenate(piece)
            piece = []
    if piece:
        yield np.concatenate(piece)


def _unpacked(pieces: Sequence[NDArray[np.uint8]], like: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the arrays whose bytes those are, in the shapes and dtypes of `like`."""
    coming = iter(pieces)
    arrays, piece = [], np.zeros(0, np.uint8)
    for array in like:
        if not piece.size and array.nbytes:
            piece = next(coming)
        arrays.append(piece[: array.nbytes].view(array.dtype).reshape(array.shape))
        piece = piece[array.nbytes :]
    return arrays
