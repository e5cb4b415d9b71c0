"""Matches messages between ranks with the receives that wait for them (pure: no clock, no sockets, no thread).

1. Messages of one source and one tag match in the order in which they were sent, receives in the order in which they
   were posted. ANY_SOURCE and ANY_TAG match everything.
2. A small message is sent at once (EAGER) while at most EAGER_WINDOW_BYTES of such messages are unreceived at its
   receiver. Of any other message only the envelope is sent (OFFER); its values go straight into the receiver's array
   once the receive is posted. So unexpected messages take bounded memory, and no sender blocks.
3. A send without a copy ends when the receiver has everything; until then nobody may write into the array.
4. Messages to send are appended to `outgoing`, ended transfers to `finished`.

    sender   OFFER ──────> TAKE ──────> PIECE... (at most WINDOW_BYTES ahead of) TAKEN...      EAGER ──────> RETURNED
    receiver       matched      <──────                                 <──────                      matched
Source: the MPI standard 4.0, sec. 3.5 (order and progress), 3.8 (probe, matched probe, cancel).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives.arrays import Tree, read_tree
from zmqtrain.collectives.wire import COPIED_BELOW_BYTES, NOTHING, Head, Kind
from zmqtrain.core.errors import CollectiveMismatch, FramingError, LocalProtocolError, ZmqTrainError

ANY_SOURCE = -1
"""Any sender."""

ANY_TAG = -1
"""Any tag."""

Outgoing = tuple[int, Head, memoryview]
"""To which rank, what, and the values."""


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

    @property
    def status(self) -> Status:
        tree, count = self.tree, sum(shape.size for shape in self.tree.shapes)
        if tree.is_leaf:
            shape, dtype = tree.shapes[0].shape, tree.shapes[0].dtype.name
        else:
            shape, dtype = (), "value" if tree.is_value else "tree"
        return Status(self.source, self.tag, shape, dtype, self.nbytes, count)


@dataclass(slots=True, eq=False)
class Transfer:
    """Something that somebody waits for: one of the three below.

    ended: it is over, well or not.  error: why not well.  cancelled: it was taken back before anybody took part in it.
    owner: set by the caller.
    """

    peer: int
    tag: int
    ended: bool = False
    error: ZmqTrainError | None = None
    cancelled: bool = False
    owner: Any = None

    def matches(self, envelope: Envelope) -> bool:
        """Tell whether a receive or a probe is for this message."""
        return self.peer in (ANY_SOURCE, envelope.source) and self.tag in (ANY_TAG, envelope.tag)

    def result(self) -> Any:
        """Return the result of a transfer that has ended well. Raise LocalProtocolError if it was cancelled."""


@dataclass(slots=True, eq=False)
class Sending(Transfer):
    """A message in flight to rank `peer`.

    taken: somebody there receives it.  answered: called once the other side has said whether its sender can have it
    back.
    """

    number: int = 0
    values: memoryview = NOTHING
    taken: bool = False
    sent: int = 0
    received: int = 0
    answered: Callable[[], object] | None = None

    def result(self) -> None:
        if self.cancelled:
            raise LocalProtocolError("this send was cancelled")


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

    def result(self) -> Any:
        if self.cancelled:
            raise LocalProtocolError("this receive was cancelled")
        assert self.envelope is not None and self.joined is not None
        return self.into if self.into is not None else self.envelope.tree.rebuild(self.joined)


@dataclass(slots=True, eq=False)
class Finding(Transfer):
    """A probe: a wait for a message to be there; take: it is then this probe's (`envelope`), and nobody else's."""

    take: bool = False
    envelope: Envelope | None = None


EAGER_WINDOW_BYTES = 1 << 20
"""How much of small messages may be unreceived at a receiver, from each sender."""

PIECE_BYTES = 1 << 20
WINDOW_BYTES = 4 << 20
"""How a large message is cut, and how much of it is in flight at most."""

CLOSING = 2
"""The flag of a TAKE with which a receiver that closes its communicator refuses a message."""

_ENVELOPE_BYTES = 64  # what an empty message counts for


class Member(Protocol):
    """What the machines of a rank ask its communicator, for messages of errors."""

    def name(self, rank: int) -> str:
        """Return what people call a rank."""

    def doing(self) -> str:
        """Say what this rank did last."""


@dataclass(slots=True)
class _Eager:
    """Bytes of EAGER messages, each with its envelope: sent to a rank, and returned by it; taken of those that it has
    sent, and reported to it."""

    sent: int = 0
    returned: int = 0
    taken: int = 0
    reported: int = 0


class Matching:
    """One rank's side of all messages between ranks."""

    def __init__(self, rank: int, member: Member) -> None:
        self.rank, self._name = rank, member.name
        self.outgoing: list[Outgoing] = []
        self.finished: list[Transfer] = []
        self._number = 0
        self._closing = False
        self._sending: dict[int, Sending] = {}  # offered, by number
        self._posted: list[Receiving] = []
        self._probing: list[Finding] = []
        self._unexpected: list[Envelope] = []
        self._filling: dict[tuple[int, int], Receiving] = {}  # by (source, number)
        self._gone: dict[int, ZmqTrainError] = {}  # why nothing comes from a rank, or from any
        self._eager: defaultdict[int, _Eager] = defaultdict(_Eager)  # by rank

    @property
    def waiting(self) -> list[Transfer]:
        return [*self._sending.values(), *self._posted, *self._probing, *self._filling.values()]

    @property
    def unexpected_bytes(self) -> int:
        """The bytes of values that are here, and that nobody has asked for."""
        return sum(envelope.values.nbytes for envelope in self._unexpected if envelope.values is not None)

    # ------------------------------------------------------------------ what this rank asks for

    def send(self, sending: Sending, text: str, values: memoryview) -> None:
        """Send a message; `sending` ends when its values may be written over."""
        to, nbytes = sending.peer, values.nbytes
        if to in self._gone:
            self._end(sending, self._gone[to])
            return
        self._number += 1
        sending.number, sending.values = self._number, values
        cost, eager = nbytes + _ENVELOPE_BYTES, self._eager[to]
        if nbytes < COPIED_BELOW_BYTES and eager.sent - eager.returned + cost <= EAGER_WINDOW_BYTES:
            eager.sent += cost
            head = Head(Kind.EAGER, number=sending.number, size=nbytes, place=sending.tag, text=text)
            self.outgoing.append((to, head, values))
            self._end(sending)
        else:
            self._sending[sending.number] = sending
            self._say(to, Head(Kind.OFFER, number=sending.number, size=nbytes, place=sending.tag, text=text))

    def receive(self, receiving: Receiving, found: Envelope | None = None) -> None:
        """Receive the first message that matches, now or when it comes; or the one that a probe has taken."""
        if found is not None:
            self._begin(receiving, found)
        elif (envelope := self._first(receiving)) is not None:
            self._unexpected.remove(envelope)
            self._begin(receiving, envelope)
        elif (error := self._hopeless(receiving)) is not None:
            self._end(receiving, error)
        else:
            self._posted.append(receiving)

    def probe(self, finding: Finding, *, wait: bool) -> None:
        """Find the first message that matches; without `wait`, end at once, with no envelope if there is none."""
        if (found := self._first(finding)) is not None:
            self._find(finding, found)
        elif not wait:
            self._end(finding)
        elif (error := self._hopeless(finding)) is not None:
            self._end(finding, error)
        else:
            self._probing.append(finding)

    def cancel(self, transfer: Transfer) -> None:
        """Take back what is not matched yet; a message that was offered ends once the other side has answered."""
        if isinstance(transfer, Sending):
            if not transfer.ended and not transfer.taken:
                self._say(transfer.peer, Head(Kind.WITHDRAW, number=transfer.number))
        elif transfer in self._posted or transfer in self._probing:
            self._forget(transfer)
            transfer.cancelled = True
            self._end(transfer)

    def stop_receiving(self) -> None:
        """Refuse the messages that no receive has matched, those that are here and all later ones: nobody on this rank
        will ask for them any more, and their senders need not wait."""
        self._closing = True
        unexpected, self._unexpected = self._unexpected, []
        for envelope in unexpected:
            self._refuse(envelope)

    def refused(self, source: int, number: int, error: ZmqTrainError) -> None:
        """End a message that its receiver, which closes its communicator, has refused."""
        sending = self._sending.get(number)
        if sending is not None and sending.peer == source:
            del self._sending[number]
            self._end(sending, error)

    def _refuse(self, envelope: Envelope) -> None:
        if envelope.values is None:
            self._say(envelope.source, Head(Kind.TAKE, number=envelope.number, flag=CLOSING))

    def fail(self, error: ZmqTrainError) -> None:
        for transfer in self.waiting:
            self._forget(transfer)
            self._end(transfer, error)
        self._unexpected.clear()

    def lose(self, rank: int, error: ZmqTrainError, alone: bool) -> None:
        """End what waits for this rank; alone: nobody else is left, so what waits for any ends as well."""
        self._gone[rank] = error
        if alone:
            self._gone[ANY_SOURCE] = error
        self._unexpected = [e for e in self._unexpected if e.source != rank or e.values is not None]
        for transfer in self.waiting:
            if self._hopeless(transfer) is not None:
                self._forget(transfer)
                self._end(transfer, error)

    def _hopeless(self, transfer: Transfer) -> ZmqTrainError | None:
        if isinstance(transfer, Receiving) and transfer.envelope is not None:
            return self._gone.get(transfer.envelope.source)
        return self._gone.get(transfer.peer)

    # ------------------------------------------------------------------ received messages

    def hear(self, source: int, head: Head, values: memoryview = NOTHING) -> None:
        """Take a message of another rank in; raise FramingError for what it cannot mean."""
        kind = head.kind
        if kind == Kind.PIECE:
            self._hear_piece(source, head, values)
        elif kind == Kind.EAGER or kind == Kind.OFFER:
            self._hear_envelope(source, head, values)
        elif kind == Kind.TAKE:
            self._hear_take(source, head)
        elif kind == Kind.TAKEN:
            sending = self._of(source, head)
            sending.received = head.size
            self._pump(sending)
        elif kind == Kind.RETURNED:
            self._eager[source].returned = head.size
        elif kind == Kind.WITHDRAW:
            offered = [e for e in self._unexpected if (e.source, e.number, e.values) == (source, head.number, None)]
            for envelope in offered:
                self._unexpected.remove(envelope)
            self._say(source, Head(Kind.WITHDRAWN, number=head.number, flag=len(offered)))
        elif kind == Kind.WITHDRAWN and (withdrawn := self._sending.get(head.number)) is not None:
            if head.flag and withdrawn.peer == source:
                del self._sending[head.number]
                withdrawn.cancelled = True
                self._end(withdrawn)
            elif withdrawn.answered is not None:
                withdrawn.answered()

    def _of(self, source: int, head: Head) -> Sending:
        sending = self._sending.get(head.number)
        if sending is None or sending.peer != source:
            raise FramingError(f"{Kind(head.kind).name} of message {head.number}, which is not in flight there")
        return sending

    def _hear_envelope(self, source: int, head: Head, values: memoryview) -> None:
        tree = read_tree(head.text)
        is_here = head.kind == Kind.EAGER
        if head.size != tree.nbytes or (is_here and values.nbytes != head.size) or head.place < 0:
            raise FramingError(f"a message of {head.size} bytes with tag {head.place} that describes {head.text[:80]}")
        envelope = Envelope(source, head.place, head.number, head.size, tree, values if is_here else None)
        for receiving in self._posted:
            if receiving.matches(envelope):
                self._posted.remove(receiving)
                self._begin(receiving, envelope)
                return
        if self._closing:
            self._refuse(envelope)
            return
        self._unexpected.append(envelope)
        for finding in list(self._probing):
            if finding.matches(envelope):
                self._probing.remove(finding)
                self._find(finding, envelope)
                if finding.take:
                    return

    def _hear_take(self, source: int, head: Head) -> None:
        sending = self._of(source, head)
        if head.flag:
            del self._sending[sending.number]
            self._end(sending, CollectiveMismatch(head.text))
        else:
            sending.taken = True
            self._pump(sending)

    def _hear_piece(self, source: int, head: Head, values: memoryview) -> None:
        receiving = self._filling.get((source, head.number))
        if receiving is None:
            raise FramingError(f"values of message {head.number}, which nobody here has taken")
        assert receiving.joined is not None
        total, start = receiving.joined.nbytes, receiving.received
        if not values.nbytes or head.place != start or start + values.nbytes > total:
            raise FramingError(f"values of message {head.number} from byte {head.place} on, awaited from {start} on")
        receiving.joined[start : start + values.nbytes] = np.frombuffer(values, np.uint8)
        receiving.received += values.nbytes
        if receiving.received == total or receiving.received - receiving.reported >= WINDOW_BYTES // 2:
            receiving.reported = receiving.received
            self._say(source, Head(Kind.TAKEN, number=head.number, size=receiving.received))
        if receiving.received == total:
            del self._filling[source, head.number]
            self._end(receiving)

    # ------------------------------------------------------------------ the moves

    def _begin(self, receiving: Receiving, envelope: Envelope) -> None:
        receiving.envelope, source, number = envelope, envelope.source, envelope.number
        if envelope.values is not None:
            self._return(envelope)
        elif (gone := self._gone.get(source)) is not None:
            self._end(receiving, gone)
            return
        try:
            joined = receiving.joined = self._room(receiving, envelope)
        except CollectiveMismatch as error:
            if envelope.values is None:
                self._say(source, Head(Kind.TAKE, number=number, flag=1, text=str(error)))
            self._end(receiving, error)
            return
        if envelope.values is None:
            self._say(source, Head(Kind.TAKE, number=number))
        elif envelope.nbytes:
            joined[:] = np.frombuffer(envelope.values, np.uint8)
        if envelope.values is None and envelope.nbytes:
            self._filling[source, number] = receiving
        else:
            self._end(receiving)

    def _room(self, receiving: Receiving, envelope: Envelope) -> NDArray[np.uint8]:
        into, tree, source = receiving.into, envelope.tree, envelope.source
        if into is not None:
            if not tree.is_leaf or tree.shapes[0].dtype != into.dtype or tree.shapes[0].size > into.size:
                raise CollectiveMismatch(
                    f"{self._name(source)} sent {tree.text[:200]} (tag {envelope.tag}); {self._name(self.rank)}"
                    f" receives into {into.dtype}{list(into.shape)}: that must be one array of the same dtype, at "
                    "least as large"
                )
            return into.reshape(-1)[: tree.shapes[0].size].view(np.uint8)
        try:
            return np.empty(envelope.nbytes, np.uint8)
        except MemoryError as error:
            raise CollectiveMismatch(
                f"{self._name(source)} sent {tree.text[:200]} (tag {envelope.tag}), for which "
                f"{self._name(self.rank)} has not enough memory"
            ) from error

    def _return(self, envelope: Envelope) -> None:
        eager = self._eager[envelope.source]
        eager.taken += envelope.nbytes + _ENVELOPE_BYTES
        if eager.taken - eager.reported >= EAGER_WINDOW_BYTES // 4:
            eager.reported = eager.taken
            self._say(envelope.source, Head(Kind.RETURNED, size=eager.taken))

    def _pump(self, sending: Sending) -> None:
        """Send as much of a message as its window allows; end it when the other side has all."""
        total = sending.values.nbytes
        while sending.sent < total and sending.sent - sending.received < WINDOW_BYTES:
            piece = sending.values[sending.sent : sending.sent + PIECE_BYTES]
            self.outgoing.append((sending.peer, Head(Kind.PIECE, number=sending.number, place=sending.sent), piece))
            sending.sent += piece.nbytes
        if sending.received >= total:
            del self._sending[sending.number]
            self._end(sending)

    def _find(self, finding: Finding, envelope: Envelope) -> None:
        finding.envelope = envelope
        if finding.take:
            self._unexpected.remove(envelope)
        self._end(finding)

    def _first(self, transfer: Transfer) -> Envelope | None:
        return next((envelope for envelope in self._unexpected if transfer.matches(envelope)), None)

    def _forget(self, transfer: Transfer) -> None:
        if isinstance(transfer, Sending):
            self._sending.pop(transfer.number, None)
        elif isinstance(transfer, Finding):
            self._probing.remove(transfer)
        elif isinstance(transfer, Receiving) and transfer.envelope is None:
            self._posted.remove(transfer)
        elif isinstance(transfer, Receiving) and transfer.envelope is not None:
            del self._filling[transfer.envelope.source, transfer.envelope.number]

    def _say(self, to: int, head: Head) -> None:
        self.outgoing.append((to, head, NOTHING))

    def _end(self, transfer: Transfer, error: ZmqTrainError | None = None) -> None:
        transfer.ended, transfer.error = True, error
        if isinstance(transfer, Sending):
            transfer.values = NOTHING
        self.finished.append(transfer)
