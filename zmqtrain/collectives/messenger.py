"""Send arrays from rank to rank, and receive them: the half of a communicator that is not collective.

Rule 1: what has a name with an i returns a Request at once; without, it waits for that request.
Rule 2: an array that is sent is left alone until its request is over; what is received is the receiver's own.
Rule 3: any thread may call; ranks that call from several threads agree themselves on an order of collectives.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives.arrays import dtype_code
from zmqtrain.collectives.endpoint import Endpoint
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.requests import Request
from zmqtrain.collectives.transfers import (
    ANY_SOURCE,
    ANY_TAG,
    Envelope,
    Finding,
    Receiving,
    Sending,
    Status,
    status_of,
)
from zmqtrain.collectives.trees import Tree, is_value, take_tree, take_value
from zmqtrain.core.errors import CollectiveTimeout, ConfigError, LocalProtocolError, PeerLost
from zmqtrain.core.interfaces import Port

TIMEOUT_SECONDS = 120.0
"""How long a wait waits where nobody says otherwise: longer than a first step compiles."""

_GRACE_SECONDS = 5.0  # for the port's own thread to answer
_LINGER_SECONDS = 1.0  # for the port to send what it has queued
_HIGHEST_TAG = (1 << 63) - 1

logger = logging.getLogger(__name__)

Self = TypeVar("Self", bound="Messenger")


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a matched probe has found: nobody else receives it. `imrecv` does."""

    status: Status
    envelope: Envelope


@dataclass(frozen=True)
class CommunicatorStatistics:
    """Running figures of a communicator.

    bytes: of messages with their heads; values: bytes of arrays alone.  relayed: ranks that the hub passes messages to.
    """

    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int
    values_sent: int
    values_received: int
    relayed: tuple[int, ...]

    @property
    def messages(self) -> int:
        """Messages both ways."""
        return self.messages_sent + self.messages_received


class Messenger:
    """A process's place among the others of its group; see `Communicator`."""

    def __init__(self, port: Port, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        if timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds must be above 0, got {timeout_seconds}")
        self.timeout_seconds = timeout_seconds
        self._endpoint = Endpoint(port)
        self._group: Group = self._endpoint.start()
        self._next: Messenger | None = None  # what has come of it by `shrink`
        self._closed = self._shrunk = False
        self._process, self._closing = os.getpid(), threading.Lock()  # held until a request is noted
        self._requests: WeakSet[Request] = WeakSet()

    # ------------------------------------------------------------------ who and where

    @property
    def rank(self) -> int:
        """Which of the group this process is, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """How many processes the group has."""
        return self._group.size

    @property
    def names(self) -> tuple[str, ...]:
        """What people call the processes, by rank."""
        return self._group.names

    def statistics(self) -> CommunicatorStatistics:
        """Return the running figures."""
        moved, of_port = self._group.traffic, getattr(self._endpoint.port, "statistics", None)
        relayed = tuple(of_port().relayed) if of_port is not None else ()
        return CommunicatorStatistics(
            moved.bytes_sent,
            moved.bytes_received,
            moved.messages_sent,
            moved.messages_received,
            moved.values_sent,
            moved.values_received,
            tuple(self._group.members.index(rank) for rank in relayed if rank in self._group.members),
        )

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received, with heads."""
        return self._group.traffic.bytes_sent, self._group.traffic.bytes_received

    def shrink(self: Self, timeout_seconds: float | None = None) -> Self:
        """Go on after a loss: return the communicator of those who live, once all of them have called this.

        Ranks keep their order and are counted anew. Also after calls differed; then all go on. Raises PeerLost if it is
        this process that was lost, CollectiveTimeout if somebody who lives does not call it, LocalProtocolError if
        nothing is wrong or this was done before.
        """
        self.check_may_wait()
        error = self._group.broken
        if self._closed or error is None or self._next is not None:
            state = "is closed" if self._closed else "has lost nobody" if error is None else "was shrunk before"
            raise LocalProtocolError(f"this communicator {state}: shrink once, after PeerLost or CollectiveMismatch")
        cut_off = PeerLost(self.names[self.rank], "it is cut off from the others, who go on without it", self.rank)
        if isinstance(error, PeerLost) and error.rank == self.rank:  # its port may have ended
            raise cut_off
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        answers = queue.SimpleQueue[Group | CollectiveTimeout | None]()
        done = answers.put
        self._endpoint.port.call(lambda: self._endpoint.shrink(done))
        try:
            answer = answers.get(timeout=seconds)
        except queue.Empty:  # who has agreed just now goes on, as the others do
            self._endpoint.port.call(lambda: self._endpoint.stop_shrinking(done, seconds))
            try:
                answer = answers.get(timeout=_GRACE_SECONDS)
            except queue.Empty:
                answer = CollectiveTimeout(f"shrink has waited {seconds:.3g} s, and the port does not answer")
        if isinstance(answer, CollectiveTimeout):
            raise answer
        if answer is None:
            raise cut_off
        smaller = object.__new__(type(self))
        smaller.__dict__.update(self.__dict__)
        smaller._group, smaller._shrunk, smaller._next = answer, True, None
        self._next = smaller
        return smaller

    def close(self, timeout_seconds: float | None = None) -> None:
        """Wait until what is in flight has ended, as MPI_Finalize does, and leave the group. Twice is once.

        In flight are sends that their receivers do not have yet, collectives, and receives whose message has begun to
        come; a receive without a message is not waited for. Messages that nobody here has asked for are refused, so
        that two ranks that close do not wait for each other.
        timeout_seconds: how long to wait, the communicator's if None; 0: not at all. What has not ended by then is
        named in the log, and raises PeerLost, here and on the ranks that need this one. A with block that an exception
        ends does not wait, and the PeerLost of the others says which exception. What `shrink` has made of this
        communicator is closed with it.
        """
        self._close(timeout_seconds, None)

    def _close(self, timeout_seconds: float | None, cause: BaseException | None) -> None:
        """Close. cause: the exception that ends the work with this communicator, which the others are told."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._next is not None:
            self._next._close(timeout_seconds, cause)
        else:
            self._finish(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
            self._endpoint.port.call(lambda: self._group.leave(cause))
            self._endpoint.port.close(_LINGER_SECONDS)
            self._group.abandon(error := PeerLost(self.names[self.rank], "its communicator is closed", self.rank))
            for request in list(self._requests):
                request.complete(error)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(None if error is None else 0.0, error)

    def _finish(self, seconds: float) -> None:
        """Wait until nothing is in flight, at most so long; say in the log what still is."""
        until, port = time.monotonic() + seconds, self._endpoint.port
        if seconds <= 0 or threading.get_ident() == self._endpoint.thread or os.getpid() != self._process:
            return
        begun = threading.Event()  # all requests are with the port's thread, unless that has ended
        port.call(self._group.stop_receiving)
        port.call(begun.set)
        if not begun.wait(min(seconds, _GRACE_SECONDS)):
            return
        while pending := [request for request in list(self._requests) if _is_in_flight(request)]:
            over = threading.Event()
            pending[0].add_done_callback(lambda _, over=over: over.set())  # type: ignore[misc]
            if not over.wait(max(0.0, until - time.monotonic())):
                if (error := self.explain(pending[0], seconds)) is not None:
                    more = f"; {len(pending) - 1} more in flight" if len(pending) > 1 else ""
                    logger.warning("the communicator is closed all the same: %s%s", error, more)
                return

    # ------------------------------------------------------------------ from rank to rank

    def isend(self, x: Any, dest: int, tag: int = 0) -> Request:
        """Send an array, a tree of arrays or a Python value to a rank; the request is over when x may be written over.

        A Python value is None, a bool, int, float, str or bytes, or a list, tuple or dict of these, without arrays.
        A small message (under 64 KiB) is over at once; of a large one nothing is copied, and it is when `dest` has it.
        """
        self._check_rank("dest", dest)
        _check_tag(tag)
        tree = self._take(x)
        values = tree.join()
        sending = Sending(dest, tag)

        def make() -> None:
            if sending.withdrawn:
                raise LocalProtocolError("this send was cancelled")

        request = self._request(f"send({_short(tree.text)}, dest={dest}, tag={tag})", make)
        return self._post(request, sending, lambda: self._group.matching.send(sending, tree.text, values))

    def send(self, x: Any, dest: int, tag: int = 0, *, timeout_seconds: float | None = None) -> None:
        """Send, and wait until x may be written over; see `isend`."""
        self.isend(x, dest, tag).wait(timeout_seconds)

    def irecv(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, into: NDArray[Any] | None = None) -> Request:
        """Receive the next message of a source (or any) with a tag (or any); the request's result is what was sent.

        Arrays come as numpy arrays, Python values as they were sent (a tuple of a class of its own as a tuple).
        into: a contiguous array of the same dtype and at least as many values: it is filled from the beginning, as
        far as the message goes (`Request.status.count`), and is then the result. One that is too small, or of another
        dtype, is CollectiveMismatch, on this rank and in the send if that is not over.
        """
        return self._receive(*self._checked(source, tag), into, None)

    def recv(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        *,
        into: NDArray[Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Receive, and wait for it; see `irecv`. What has not come when the time is up is not waited for any more."""
        request = self.irecv(source, tag, into=into)
        try:
            return request.wait(timeout_seconds)
        except CollectiveTimeout:
            if request.cancel():
                raise
            return request.wait(timeout_seconds)

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Status | None:
        """Tell which message a receive would get now, without receiving it; None if there is none."""
        envelope = self._find(*self._checked(source, tag), take=False, seconds=None)
        return None if envelope is None else status_of(envelope)

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout_seconds: float | None = None) -> Status:
        """Wait for a message that a receive would get; raise CollectiveTimeout if none comes."""
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        envelope = self._find(*self._checked(source, tag), take=False, seconds=seconds)
        assert envelope is not None
        return status_of(envelope)

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Message | None:
        """Take a message that is there out of the others' reach, for `imrecv`; None if there is none."""
        envelope = self._find(*self._checked(source, tag), take=True, seconds=None)
        return None if envelope is None else Message(status_of(envelope), envelope)

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout_seconds: float | None = None) -> Message:
        """Wait for a message, and take it out of the others' reach; raise CollectiveTimeout if none comes."""
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        envelope = self._find(*self._checked(source, tag), take=True, seconds=seconds)
        assert envelope is not None
        return Message(status_of(envelope), envelope)

    def imrecv(self, message: Message, *, into: NDArray[Any] | None = None) -> Request:
        """Receive the message that a matched probe has found; once. into: as for `irecv`."""
        return self._receive(message.envelope.source, message.envelope.tag, into, message.envelope)

    # ------------------------------------------------------------------ how

    def _request(self, what: str, make: Callable[[], Any], timeout_seconds: float | None = None) -> Request:
        if os.getpid() != self._process:
            raise LocalProtocolError(f"{what}: this communicator is another process's: create one after the fork")
        request = Request(self, what, self.timeout_seconds if timeout_seconds is None else timeout_seconds, make)
        with self._closing:
            if self._closed:
                raise LocalProtocolError(f"{what}: this communicator is closed")
            self._requests.add(request)
        return request

    def _take(self, x: Any) -> Tree:
        """Take apart what a caller gives: arrays, or a Python value."""
        return take_value(self._pack_value(x)) if is_value(x) else take_tree(x)

    def _rebuild(self, tree: Tree, joined: NDArray[np.uint8]) -> Any:
        """Return what the bytes of a tree stand for."""
        made = tree.unpack(tree.split(joined))
        return self._unpack_value(made[0]) if tree.is_value else made

    def _pack_value(self, value: Any) -> bytes:
        """Return a Python value as bytes; what knows how to pack them does it here."""
        raise ConfigError(f"{type(value).__name__} does not travel by this communicator: it carries arrays only")

    def _unpack_value(self, packed: NDArray[np.uint8]) -> Any:
        """Return the Python value that was packed."""
        raise LocalProtocolError("a Python value came to a communicator that carries arrays only")

    def _post(self, request: Request, transfer: Any, post: Callable[[], object]) -> Request:
        group, request.doing = self._group, transfer
        return self._begin(request, lambda: group.post(request, transfer, post))

    def _begin(self, request: Request, begin: Callable[[], object]) -> Request:
        """Have the port's thread begin a request; once all is over, it need not be alive any more."""
        if (error := self._group.broken) is not None:
            request.complete(error)
        else:
            self._endpoint.port.call(begin)
        return request

    def _receive(self, source: int, tag: int, into: NDArray[Any] | None, envelope: Envelope | None) -> Request:
        if into is not None:
            _check_into(into)
        receiving = Receiving(source, tag, into=into)

        def make() -> Any:
            if receiving.cancelled:
                raise LocalProtocolError("this receive was cancelled")
            assert receiving.envelope is not None and receiving.joined is not None
            tree = receiving.envelope.tree
            return into if into is not None else self._rebuild(tree, receiving.joined)

        request = self._request(f"recv(source={_any(source)}, tag={_any(tag)})", make)
        matching = self._group.matching
        if envelope is None:
            return self._post(request, receiving, lambda: matching.receive(receiving))
        return self._post(request, receiving, lambda: matching.receive_found(receiving, envelope))

    def _find(self, source: int, tag: int, *, take: bool, seconds: float | None) -> Envelope | None:
        """Probe. seconds: how long to wait for a message; None: not at all."""
        finding = Finding(source, tag, take=take)
        request = self._request(f"probe(source={_any(source)}, tag={_any(tag)})", lambda: None)
        self._post(request, finding, lambda: self._group.matching.probe(finding, wait=seconds is not None))
        try:
            request.wait(seconds)
        except CollectiveTimeout:
            if self.cancel(request):
                raise
            request.wait(seconds)  # it has ended since, well or not
        return finding.envelope

    def _checked(self, source: int, tag: int) -> tuple[int, int]:
        if source != ANY_SOURCE:
            self._check_rank("source", source)
        if tag != ANY_TAG:
            _check_tag(tag)
        return source, tag

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ConfigError(f"{name} must be 0 to {self.size - 1} in a group of {self.size}, got {rank}")

    # ------------------------------------------------------------------ the host of its requests

    def check_may_wait(self) -> None:
        """Raise LocalProtocolError in the port's own thread: what it waits for could not come about."""
        if threading.get_ident() == self._endpoint.thread:
            raise LocalProtocolError("a callback of a request must not wait: hand the work to another thread")

    def explain(self, request: Request, waited_seconds: float) -> CollectiveTimeout | None:
        """Ask the others, and say in an error why a request is not over; None: it is, by now."""
        answers = queue.SimpleQueue[CollectiveTimeout | None]()
        self._endpoint.port.call(lambda: self._group.explain(request, waited_seconds, answers.put))
        try:
            return answers.get(timeout=_GRACE_SECONDS)
        except queue.Empty:
            return CollectiveTimeout(f"{request.what} has waited {waited_seconds:.3g} s, and the port does not answer")

    def cancel(self, request: Request) -> bool:
        """Take a request back; True if that came in time."""
        self.check_may_wait()
        transfer, settled = request.doing, threading.Event()
        if not isinstance(transfer, Sending | Receiving | Finding) or transfer.ended:
            return False

        def cancel() -> None:
            if isinstance(transfer, Sending):
                transfer.answered = settled.set
            self._group.matching.cancel(transfer)
            self._group.settle()
            if not isinstance(transfer, Sending) or transfer.taken:
                settled.set()

        request.add_done_callback(lambda _: settled.set())
        self._endpoint.port.call(cancel)
        settled.wait(self.timeout_seconds)
        return transfer.withdrawn if isinstance(transfer, Sending) else transfer.cancelled


def _is_in_flight(request: Request) -> bool:
    """Tell whether a request that is not over will be without a further call of this rank."""
    doing = request.doing
    if request.test() or isinstance(doing, Finding):
        return False
    return not isinstance(doing, Receiving) or doing.envelope is not None


def _check_tag(tag: int) -> None:
    if not 0 <= tag <= _HIGHEST_TAG:
        raise ConfigError(f"a tag is a number from 0 to {_HIGHEST_TAG}, got {tag}")


def _check_into(into: NDArray[Any]) -> None:
    """Raise ConfigError unless values can be put there as they come."""
    if not isinstance(into, np.ndarray) or not (into.flags.c_contiguous and into.flags.writeable):
        raise ConfigError("into is a numpy array that is contiguous and may be written")
    dtype_code(into.dtype)


def _any(number: int) -> str:
    return "ANY" if number < 0 else str(number)


def _short(text: str, longest: int = 400) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 4 :]}"
