"""Say what an algorithm of a collective is: a generator of sends and receives, which anybody can play.

Rule 1: an algorithm knows its rank, the group's size and its own arrays, and no socket, clock or thread. Who plays it
carries out what it yields, in order: a communicator over sockets, or `run_locally`, all ranks in one thread.
Rule 2: a Send never waits, a Receive does; the messages from one rank to another stay in order, and a Receive takes the
next one of its source. So an algorithm that ends with queues of any length ends with bounded ones too: who waits for
a source has taken all that came from it before.
Rule 3: nothing is copied. What a Send names must stay as it is until the receiver has it: an algorithm writes there
only after a message that could not have come without it (each says which). When it ends, its last sends may still be on
their way: who plays it leaves its arrays alone until they are gone.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import CollectiveMismatch, LocalProtocolError

HUB = -1
"""Where a rank is wanted: the broker, as one that reduces."""

Values = NDArray[Any]
"""Flat and contiguous, of any dtype."""

_POISON = 0xA5  # what a rank was lent is filled with this byte at its next yield


class Send(NamedTuple):
    """Send these values (flat, contiguous) to a rank, or to HUB. It does not wait; nobody writes there before the
    receiver has them."""

    to: int
    values: Values


class Receive(NamedTuple):
    """Wait for the next message of `source` (a rank, or HUB), which is so many values.

    into: flat, contiguous, `values` long: they are put there, and the generator is sent None.  None: the generator is
    sent a read-only flat array, good until its next yield.
    """

    source: int
    values: int
    into: Values | None = None


Steps = Generator[Send | Receive, Values | None, None]
"""What an algorithm is: it yields its sends and receives in order, and has its result in its arrays when it ends."""


@dataclass(slots=True)
class Traffic:
    """What one rank has moved: bytes of values (no heads), and messages."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0


@dataclass(frozen=True, slots=True)
class _Message:
    values: Values  # the sender's own memory, as on a wire that copies nothing
    checksum: int  # of its bytes when it was sent


_Queues = dict[tuple[int, int], deque[_Message]]  # by (source, receiver)


def run_locally(algorithms: Sequence[Steps], *, hub: Steps | None = None, seed: int | None = None) -> list[Traffic]:
    """Play all ranks of one collective in this thread: `algorithms[rank]`, and the broker's part where there is one.

    seed: None plays each rank as far as it goes; a number plays single steps in an order drawn from it, so that other
    interleavings are seen. A message is read from the sender's memory as late as can be, when it is received.
    Returns what each rank moved; with a hub, its traffic stands last: `traffic[HUB]`.
    Raises CollectiveMismatch: all wait (it says who for whom), a message has another length or dtype than its Receive,
    or is never received. Raises LocalProtocolError: an algorithm breaks the rules of `Send` and `Receive`.
    """
    players = {rank: _Player(rank, steps) for rank, steps in enumerate(algorithms)}
    if hub is not None:
        players[HUB] = _Player(HUB, hub)
    queues: _Queues = {(source, to): deque() for source in players for to in players if source != to}
    draw = None if seed is None else random.Random(seed)
    while ready := [player for player in players.values() if player.can_go_on(queues)]:
        if draw is not None:
            draw.choice(ready).go_on(queues)
            continue
        while ready[0].can_go_on(queues):
            ready[0].go_on(queues)
    if waiting := [player for player in players.values() if not player.ended]:
        lines = "; ".join(player.describe(players) for player in waiting)
        raise CollectiveMismatch(f"every rank that has not ended waits for another: {lines}")
    for (source, to), queue in queues.items():
        if queue:
            raise CollectiveMismatch(
                f"{_name(to)} ended without {len(queue)} messages of {_name(source)}, the first of them "
                f"{queue[0].values.size} values long"
            )
    return [player.traffic for player in players.values()]


class _Player:
    """One rank: its generator, and the message that it waits for."""

    def __init__(self, rank: int, steps: Steps) -> None:
        self.rank, self.traffic, self.ended = rank, Traffic(), False
        self._steps = steps
        self._wanted: Receive | None = None

    def can_go_on(self, queues: _Queues) -> bool:
        return not self.ended and (self._wanted is None or bool(queues[self._wanted.source, self.rank]))

    def go_on(self, queues: _Queues) -> None:
        """Play one step; what the generator was lent for it is spoilt afterwards, in case it still looks there."""
        lent = None
        if self._wanted is not None:
            lent = self._take(self._wanted, queues[self._wanted.source, self.rank].popleft())
        try:
            step = self._steps.send(lent)
        except StopIteration:
            self.ended, self._wanted = True, None
            return
        if lent is not None:
            lent.flags.writeable = True
            lent.view(np.uint8)[:] = _POISON
        self._check(step, queues)
        self._wanted = step if isinstance(step, Receive) else None
        if isinstance(step, Send):
            queues[self.rank, step.to].append(_Message(step.values, _checksum(step.values)))
            self.traffic.messages_sent += 1
            self.traffic.bytes_sent += step.values.nbytes

    def describe(self, players: dict[int, _Player]) -> str:
        """Say whom this rank waits for."""
        assert self._wanted is not None
        source = self._wanted.source
        state = ", which has ended" if players[source].ended else ""
        return f"{_name(self.rank)} waits for {self._wanted.values} values of {_name(source)}{state}"

    def _take(self, wanted: Receive, message: _Message) -> Values | None:
        values = message.values
        where = f"what {_name(wanted.source)} sent to {_name(self.rank)}"
        if values.size != wanted.values:
            raise CollectiveMismatch(f"{where} is {values.size} values long, and not {wanted.values} as awaited")
        if wanted.into is not None and wanted.into.dtype != values.dtype:
            raise CollectiveMismatch(f"{where} is {values.dtype}, and not {wanted.into.dtype} as awaited")
        if _checksum(values) != message.checksum:
            raise LocalProtocolError(f"{where} was written over before it was received")
        self.traffic.messages_received += 1
        self.traffic.bytes_received += values.nbytes
        if wanted.into is not None:
            wanted.into[:] = values
            return None
        lent = values.copy()
        lent.flags.writeable = False
        return lent

    def _check(self, step: Send | Receive, queues: _Queues) -> None:
        other, values = (step.to, step.values) if isinstance(step, Send) else (step.source, step.into)
        if (other, self.rank) not in queues:
            raise LocalProtocolError(f"{_name(self.rank)} names {_name(other)}, which is no other one of this group")
        if values is not None and not (values.ndim == 1 and values.flags.c_contiguous):
            raise LocalProtocolError(f"{_name(self.rank)} names an array that is not flat and contiguous")
        if isinstance(step, Receive) and values is not None and values.size != step.values:
            raise LocalProtocolError(f"{_name(self.rank)} receives {step.values} values into {values.size}")


def _checksum(values: Values) -> int:
    return zlib.crc32(values.view(np.uint8).data)


def _name(rank: int) -> str:
    return "the hub" if rank == HUB else f"rank {rank}"
