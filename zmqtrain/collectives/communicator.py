"""The communicator: messages and collectives among the processes of a group.

1. All ranks make the same collective calls in the same order. Ranks that call from several threads agree on that order
   themselves; any thread may call.
2. Every call also exists with an i before its name: it returns a Request at once, and several may be in flight.
   timeout_seconds of a call: how long a wait for it may take; the communicator's if None.
3. Arrays are numpy or jax, numbers, or trees of them (dict, list, tuple, NamedTuple, None). Results are of the same
   kind, on the same device, and belong to the caller; a root gets back the object that it gave. An array that is sent
   must not change until its request has ended.
4. Calls that differ between ranks raise CollectiveMismatch on all of them; a lost rank raises PeerLost on all. Both end
   the communicator; `shrink` makes one of the survivors. A caller's operation that fails raises OperationError on all,
   and the communicator goes on.
5. A result with values of all ranks is returned only if all made the same call. `broadcast` and `scatter` return the
   root's values once a rank's own call is the same as the root's.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, update_wrapper
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.collectives import algorithms
from zmqtrain.collectives.algorithms import (
    ALIASES,
    ALLGATHER,
    ALLREDUCE,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    Steps,
    check_codec,
    coded_allreduce,
    share_bounds,
)
from zmqtrain.collectives.arrays import (
    HUB_DTYPES,
    Leaf,
    LeafShape,
    Tree,
    as_bytes,
    dtype_code,
    is_value,
    read_tree,
    take,
    take_tree,
)
from zmqtrain.collectives.calls import Phase, Phases, what_calls_share
from zmqtrain.collectives.costs import LARGEST_CHUNK_BYTES, choose_algorithm, choose_chunk_bytes
from zmqtrain.collectives.group import GRACE_SECONDS, Answers, CommunicatorStatistics, Endpoint, Group, Request, Result
from zmqtrain.collectives.matching import (
    ANY_SOURCE,
    ANY_TAG,
    Envelope,
    Finding,
    Receiving,
    Sending,
    Status,
    Transfer,
)
from zmqtrain.collectives.mesh import open_port
from zmqtrain.collectives.reductions import OPERATIONS, Function, Reduction, find_reduction
from zmqtrain.collectives.wire import MAX_TEXT_BYTES
from zmqtrain.core.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, LocalProtocolError, PeerLost
from zmqtrain.core.interfaces import Port
from zmqtrain.core.launcher import ENVIRONMENT, job_step
from zmqtrain.protocol.framing import pack_value, unpack_value
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey

TIMEOUT_SECONDS = 120.0
"""How long a wait waits where nobody says otherwise: longer than a first step compiles."""

DEFAULT_GROUP = "default"

_LINGER_SECONDS = 1.0  # for the port to send what it has queued
_HIGHEST_TAG = (1 << 63) - 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a matched probe has found: nobody else receives it. `imrecv` does."""

    status: Status
    envelope: Envelope


Op = str | Function | Reduction
"""How two arrays become one: "sum", "mean", "max", "min", "prod", of bools and whole numbers "band", "bor", "bxor", in
lower or upper case; or an associative and commutative function. Python's and numpy's own (`sum`, `max`, `math.prod`,
`np.sum`, `np.bitwise_or`) are the named operations."""

_BYTES = np.dtype(np.uint8)
_COUNTS = np.dtype(np.int64)
Each = TypeVar("Each", Tree, "_Rows")
_Part = tuple[int, NDArray[np.uint8]]  # how many items of a rank, and their bytes
_TOLD_BYTES = 512  # of what a root tells about its arrays, in the first message

Arguments = ParamSpec("Arguments")
AnyCommunicator = TypeVar("AnyCommunicator", bound="Communicator")


def _blocking(
    begin: Callable[Concatenate[AnyCommunicator, Arguments], Request[Result]],
) -> Callable[Concatenate[AnyCommunicator, Arguments], Result]:
    """Return the call without an i before its name: it waits for the request's result."""

    def call(self: AnyCommunicator, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return begin(self, *args, **kwargs).wait()

    update_wrapper(call, begin)
    call.__name__ = begin.__name__.removeprefix("i")
    call.__qualname__ = f"Communicator.{call.__name__}"
    return call


class Communicator:
    """A process's place among the others of its group.

    port: its connections to them; the communicator closes it.  timeout_seconds: the default of each wait.
    A blocking call that runs out of time raises CollectiveTimeout; the call itself goes on, so that the other ranks can
    still end theirs.
    """

    def __init__(self, port: Port, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        if timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds must be above 0, got {timeout_seconds}")
        self.timeout_seconds = timeout_seconds
        self._endpoint = Endpoint(port)
        self._group: Group = self._endpoint.start()
        self._next: Self | None = None  # its successor, made by `shrink`
        self._closed = self._shrunk = False
        self._process, self._closing = os.getpid(), threading.Lock()  # held until a request is noted
        self._requests: WeakSet[Request[Any]] = WeakSet()

    @classmethod
    def create(
        cls,
        hub: str,
        size: int | Literal["environment"],
        rank: int | None = None,
        *,
        group: str = DEFAULT_GROUP,
        name: str | None = None,
        server_key: GivenServerKey = None,
        keys: GivenKeys = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        repeated: bool = False,
    ) -> Self:
        """Meet `size` processes at the broker at `hub` ("tcp://hub:5555"), and return this one's communicator.

        size: or "environment": size and rank are what srun, mpirun or mpiexec says, and the default group is one for
        this job step alone.  rank: the wanted rank, from 0; None: by arrival.
        group: processes that give the same name meet.  name: for people.
        server_key, keys: as for `zmqtrain.connect`, but no key file is searched.
        timeout_seconds: how long to wait for the others, and the default of every wait.
        repeated: `size` processes meet, then the next `size` of the same group; else a complete group takes no more.
        Raises ConfigError, HubUnreachable, JoinRefused (the others ask for something else), CollectiveTimeout (who is
        here, and how many are missing).
        """
        if size == ENVIRONMENT:
            if rank is not None:
                raise ConfigError(f'size="environment" takes the rank from there too: leave rank={rank} out')
            step = job_step()
            size, rank, group = step.size, step.rank, (step.job or group) if group == DEFAULT_GROUP else group
        port = open_port(
            hub,
            size,
            rank,
            group=group,
            name=name,
            server_key=server_key,
            keys=keys,
            timeout_seconds=timeout_seconds,
            repeated=repeated,
        )
        return cls(port, timeout_seconds=timeout_seconds)

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
        of_port = getattr(self._endpoint.port, "statistics", None)
        relayed = tuple(of_port().relayed) if of_port is not None else ()
        ranks = tuple(self._group.members.index(rank) for rank in relayed if rank in self._group.members)
        return replace(self._group.traffic, relayed=ranks)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received, with heads."""
        return self._group.traffic.bytes_sent, self._group.traffic.bytes_received

    def shrink(self, timeout_seconds: float | None = None) -> Self:
        """Go on after a loss: return the communicator of those who live, once all of them have called this.

        Ranks keep their order and are renumbered. Also after calls differed; then all go on. Also when a rank has
        closed this communicator: all calls of the others then end with PeerLost, so that they call this too.
        Raises PeerLost if it is this process that was lost, CollectiveTimeout if somebody who lives does not call it,
        LocalProtocolError if nothing is wrong or this was done before.
        """
        self._endpoint.check_may_wait()
        group = self._group
        if (error := group.broken) is None and (left := group.who_left()) is not None:
            error = left
            self._endpoint.port.call(lambda: group.go_on_without(left))
        if self._closed or error is None or self._next is not None:
            state = "is closed" if self._closed else "has lost nobody" if error is None else "was shrunk before"
            raise LocalProtocolError(f"this communicator {state}: shrink once, after PeerLost or CollectiveMismatch")
        cut_off = self._group.lost(self.rank, "it is cut off from the others, who go on without it")
        if isinstance(error, PeerLost) and error.rank == self.rank:  # its port may have ended
            raise cut_off
        seconds, answers = self._seconds(timeout_seconds), Answers()
        self._endpoint.port.call(lambda: self._endpoint.shrink(answers))
        try:
            answer = answers.get(timeout=seconds)
        except queue.Empty:  # who has agreed just now goes on, as the others do
            self._endpoint.port.call(lambda: self._endpoint.stop_shrinking(answers, seconds))
            try:
                answer = answers.get(timeout=GRACE_SECONDS)
            except queue.Empty:
                answer = CollectiveTimeout(f"shrink has waited {seconds:.3g} s, and the port does not answer")
        if isinstance(answer, CollectiveTimeout):
            raise answer
        if answer is None:
            raise cut_off
        smaller = copy.copy(self)
        smaller._group, smaller._shrunk = answer, True
        self._next = smaller
        return smaller

    def close(self, timeout_seconds: float | None = None) -> None:
        """Wait until what is in flight has ended, as MPI_Finalize does, and leave the group. Twice is once.

        In flight are sends that their receivers do not have yet, collectives, and receives of a message that is
        arriving; a receive without a message is not waited for. Messages that nobody here has asked for are refused, so
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
            self._finish(self._seconds(timeout_seconds))
            self._endpoint.port.call(lambda: self._group.leave(cause))
            self._endpoint.port.close(_LINGER_SECONDS)
            self._group.abandon(error := self._group.lost(self.rank, "its communicator is closed"))
            for request in list(self._requests):
                request.complete(error)

    def __enter__(self) -> Self:
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
        if not begun.wait(min(seconds, GRACE_SECONDS)):
            return
        while pending := [request for request in list(self._requests) if _is_in_flight(request)]:
            over = threading.Event()
            pending[0].add_done_callback(lambda _, over=over: over.set())  # type: ignore[misc]
            if not over.wait(max(0.0, until - time.monotonic())):
                if (error := pending[0].explain(seconds)) is not None:
                    more = f"; {len(pending) - 1} more in flight" if len(pending) > 1 else ""
                    logger.warning("the communicator is closed all the same: %s%s", error, more)
                return

    # ------------------------------------------------------------------ from rank to rank

    def isend(self, x: Any, dest: int, tag: int = 0, *, timeout_seconds: float | None = None) -> Request[None]:
        """Send an array, a tree of arrays or a Python value to a rank; the request is over when x may be written over.

        A Python value is None, a bool, int, float, str or bytes, or a list, tuple or dict of these, without arrays.
        A small message (under 64 KiB) is over at once; of a large one nothing is copied, and it is when `dest` has it.
        """
        self._check_rank("dest", dest)
        _check_tag(tag)
        tree = take(x)
        values, sending = tree.join(), Sending(dest, tag)
        what = f"send({_short(tree.text)}, dest={dest}, tag={tag})"
        return self._post(what, sending, lambda: self._group.matching.send(sending, tree.text, values), timeout_seconds)

    send = _blocking(isend)

    def irecv(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, into: NDArray[Any] | None = None) -> Request[Any]:
        """Receive the next message of a source (or any) with a tag (or any); the request's result is what was sent.

        Arrays come as numpy arrays, Python values as they were sent (a tuple of a class of its own as a tuple).
        into: a contiguous array of the same dtype and at least as many values: it is filled from the beginning, as
        far as the message goes (`Request.status.count`), and is then the result. One that is too small, or of another
        dtype, is CollectiveMismatch, on this rank and in the send if that is not over.
        """
        self._check(source, tag)
        return self._receive(Receiving(source, tag, into=into))

    def recv(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        *,
        into: NDArray[Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Receive, and wait for it; see `irecv`. What has not come when the time is up is not waited for any more."""
        return _wait_or_cancel(self.irecv(source, tag, into=into), timeout_seconds)

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Status | None:
        """Tell which message a receive would get now, without receiving it; None if there is none."""
        found = self._find(source, tag, take=False)
        return None if found is None else found.status

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout_seconds: float | None = None) -> Status:
        """Wait for a message that a receive would get; raise CollectiveTimeout if none comes."""
        found = self._find(source, tag, take=False, seconds=self._seconds(timeout_seconds))
        assert found is not None
        return found.status

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Message | None:
        """Take a message that is there out of the others' reach, for `imrecv`; None if there is none."""
        return self._find(source, tag, take=True)

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout_seconds: float | None = None) -> Message:
        """Wait for a message, and take it out of the others' reach; raise CollectiveTimeout if none comes."""
        found = self._find(source, tag, take=True, seconds=self._seconds(timeout_seconds))
        assert found is not None
        return found

    def imrecv(self, message: Message, *, into: NDArray[Any] | None = None) -> Request[Any]:
        """Receive the message that a matched probe has found; once. into: as for `irecv`."""
        found = message.envelope
        return self._receive(Receiving(found.source, found.tag, into=into), found)

    # ------------------------------------------------------------------ reduce

    def iallreduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        codec: Any = None,
        into: NDArray[Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> Request[Any]:
        """Reduce the arrays of all ranks, and give all of them the result, bit-identical.

        algorithm: "naive", "ring", "tree", "halving" ("recursive_halving"), "parallel", "sequential", "hub" (by the
        broker); "auto" chooses by size. The order in which values are reduced is the algorithm's (its docstring).
        codec: what goes over the network is encoded (float32, "sum" or "mean" only; by the owners of shares, whatever
        the algorithm).  into: where the result of one numpy array is put, x itself for in place: saves a copy of large
        arrays.
        x may be written over at once, `into` not before the call is over.
        Raises ConfigError for what cannot be reduced so, OperationError where a function cannot be or has failed,
        CollectiveMismatch, PeerLost, CollectiveTimeout.
        """
        tree = take_tree(x)
        reductions, operation = _reductions(op, tree)
        if codec is not None:
            codec = check_codec(codec_from_spec(codec) if isinstance(codec, str) else codec, operation, tree)
            text = f"allreduce({tree.text}, op={operation}, codec={codec.name})"
        else:
            if algorithm == "auto":
                algorithm = choose_algorithm(self.size, tree.nbytes)
            algorithm = ALIASES.get(algorithm, algorithm)
            self._check_algorithm(algorithm, operation, tree)
            text = f"allreduce({tree.text}, op={operation}, algorithm={algorithm})"
        flats = tree.pack() if into is None else [_put(tree, into)]

        def phases() -> Phases:
            for flat, reduction in zip(flats, reductions, strict=True):
                if codec is not None:
                    yield coded_allreduce(self.rank, self.size, flat, codec, operation == "mean"), _BYTES
                else:
                    chunk = self._chunk(flat, algorithm)
                    yield ALLREDUCE[algorithm](self.rank, self.size, flat, reduction, chunk), flat.dtype
            yield from self._meet(tree.nbytes == 0)
            return lambda: tree.unpack(flats) if into is None else into

        return self._call(text, phases(), timeout_seconds, operation=operation)

    allreduce = _blocking(iallreduce)

    def ireduce(self, x: Any, op: Op = "sum", root: int = 0, *, timeout_seconds: float | None = None) -> Request[Any]:
        """Reduce the arrays of all ranks; the root gets the result, the others None."""
        is_root = self._is_root(root)
        tree = take_tree(x)
        reductions, operation = _reductions(op, tree)
        flats, algorithm = tree.pack(), self._rooted(tree.nbytes)

        def phases() -> Phases:
            for flat, reduction in zip(flats, reductions, strict=True):
                chunk = self._chunk(flat, algorithm)
                yield REDUCE[algorithm](self.rank, self.size, flat, reduction, root, chunk), flat.dtype
            yield from self._meet(tree.nbytes == 0)
            return lambda: tree.unpack(flats) if is_root else None

        text = f"reduce({tree.text}, op={operation}, root={root})"
        return self._call(text, phases(), timeout_seconds, confirm=True)

    reduce = _blocking(ireduce)

    def ireduce_scatter(self, x: Any, op: Op = "sum", *, timeout_seconds: float | None = None) -> Request[Any]:
        """Reduce the arrays of all ranks, and give each rank its share of the result.

        x: one array. The share of rank r is flat: values n r // size to n (r + 1) // size of the flattened result, n in
        all; in the order of the ring (`algorithms.ring`).
        """
        tree = take_tree(x)
        if not tree.is_leaf:
            raise ConfigError("reduce_scatter takes one array: join the leaves of a tree first, or allreduce it")
        reduction = _reduction(op, tree.shapes[0].dtype)
        (flat,) = tree.pack()
        begin, end = share_bounds(flat.size, self.size)[self.rank : self.rank + 2]
        steps = REDUCE_SCATTER["ring"](self.rank, self.size, flat, reduction, self._chunk(flat, "ring"))
        phases = self._play(
            steps, flat.dtype, flat.size < self.size, lambda: tree.leaves[0].rebuild(flat[begin:end].copy())
        )
        return self._call(f"reduce_scatter({tree.text}, op={reduction.name})", phases, timeout_seconds)

    reduce_scatter = _blocking(ireduce_scatter)

    # ------------------------------------------------------------------ spread and gather

    def iallgather(self, x: Any, *, timeout_seconds: float | None = None) -> Request[list[Any]]:
        """Give all ranks a list of all ranks' arrays, by rank; all are of one shape and dtype."""
        tree = take_tree(x)
        nbytes = tree.nbytes
        joined, parts = self._room_for_all(nbytes)
        parts[self.rank][:] = np.frombuffer(tree.join(), _BYTES)
        algorithm = "parallel" if nbytes <= 64 << 10 else "ring"
        bounds = [nbytes * rank for rank in range(self.size + 1)]
        steps = ALLGATHER[algorithm](self.rank, self.size, joined, self._chunk(joined, algorithm), bounds)
        phases = self._play(steps, _BYTES, nbytes == 0, lambda: [tree.rebuild(part) for part in parts])
        return self._call(f"allgather({tree.text})", phases, timeout_seconds)

    allgather = _blocking(iallgather)

    def ibroadcast(self, x: Any = None, root: int = 0, *, timeout_seconds: float | None = None) -> Request[Any]:
        """Give all ranks the root's array, tree of arrays, or Python value (see `isend`).

        x: elsewhere than on the root None, or an array of the same shape and dtype, whose kind (jax, its device) the
        result then has; with None it is numpy. If the root gives a Python value: None, or any Python value, which is
        not looked at. The root gets x itself, and leaves it alone until the call is over.
        """
        is_root = self._is_root(root)
        own = take(x) if x is not None or is_root else None
        text = f"broadcast(root={root})"

        def phases() -> Phases:
            told = yield from self._tell(own.text if is_root and own else "", root)
            tree = read_tree(told) if own is None or (own.is_value and not is_root) else own
            self._check_told(text, tree if own is None else own, told, root)
            joined = np.frombuffer(tree.join(), _BYTES) if is_root else np.empty(tree.nbytes, _BYTES)
            algorithm = self._rooted(tree.nbytes)
            yield BROADCAST[algorithm](self.rank, self.size, joined, root, self._chunk(joined, algorithm)), _BYTES
            return lambda: x if is_root else tree.rebuild(joined)

        return self._call(text, phases(), timeout_seconds, confirm=True)

    broadcast = _blocking(ibroadcast)

    def iscatter(
        self, xs: Sequence[Any] | None = None, root: int = 0, *, timeout_seconds: float | None = None
    ) -> Request[Any]:
        """Give each rank its own of the root's arrays.

        xs: on the root one for each rank, all of one shape and dtype; not looked at elsewhere. The root gets its own
        itself, and leaves xs alone until the call is over.
        """
        is_root = self._is_root(root)
        trees = self._for_each("scatter", xs, take_tree) if is_root else []

        def phases() -> Phases:
            told = yield from self._tell(trees[0].text if is_root else "", root)
            tree = trees[root] if is_root else read_tree(told)
            parts = [np.frombuffer(each.join(), _BYTES) for each in trees]
            joined = parts[root] if is_root else np.empty(tree.nbytes, _BYTES)
            chunk = choose_chunk_bytes("", self.size, tree.nbytes)
            yield algorithms.scatter(self.rank, self.size, parts, joined, root, chunk), _BYTES
            return lambda: xs[root] if is_root and xs is not None else tree.rebuild(joined)

        return self._call(f"scatter(root={root})", phases(), timeout_seconds, confirm=True)

    scatter = _blocking(iscatter)

    def igather(self, x: Any, root: int = 0, *, timeout_seconds: float | None = None) -> Request[list[Any] | None]:
        """Give the root a list of all ranks' arrays or Python values (see `isend`), by rank, and the others None.

        Arrays are of one shape and dtype on all ranks (`gatherv`: of different lengths). Python values may differ as
        they like; arrays on one rank and a Python value on another are CollectiveMismatch on all.
        x is left alone until the call is over.
        """
        is_root = self._is_root(root)
        if is_value(x):
            packed = np.frombuffer(pack_value(x), _BYTES)
            phases = self._gather_uneven((packed.size, packed), 1, root, lambda part: unpack_value(part[1].data))
            return self._call(f"gather(value, root={root})", phases, timeout_seconds, confirm=True)
        tree = take_tree(x)
        part = np.frombuffer(tree.join(), _BYTES)
        parts = self._room_for_all(tree.nbytes)[1] if is_root else []
        if is_root:
            parts[root][:] = part
        steps = algorithms.gather(self.rank, self.size, part, parts, root, self._chunk(part))
        phases = self._play(
            steps, _BYTES, tree.nbytes == 0, lambda: [tree.rebuild(one) for one in parts] if is_root else None
        )
        return self._call(f"gather({tree.text}, root={root})", phases, timeout_seconds, confirm=True)

    gather = _blocking(igather)

    def igatherv(self, x: Any, root: int = 0, *, timeout_seconds: float | None = None) -> Request[list[Any] | None]:
        """Give the root a list of all ranks' arrays, by rank, and the others None.

        The arrays may differ in length along their first axis; dtype and all other axes are the same on all ranks.
        x is left alone until the call is over.
        """
        self._is_root(root)
        rows = _Rows.take("gatherv", x)
        phases = self._gather_uneven((rows.count, rows.joined), rows.nbytes, root, rows.rebuild)
        return self._call(f"gatherv({rows.text}, root={root})", phases, timeout_seconds, confirm=True)

    gatherv = _blocking(igatherv)

    def iscatterv(
        self, xs: Sequence[Any] | None = None, root: int = 0, *, timeout_seconds: float | None = None
    ) -> Request[Any]:
        """Give each rank its own of the root's arrays, which may differ in length along their first axis.

        xs: on the root one for each rank, of one dtype and equal in all other axes; not looked at elsewhere. The root
        gets its own itself, and leaves xs alone until the call is over; the others get a numpy array.
        """
        is_root = self._is_root(root)
        each = self._for_each("scatterv", xs, partial(_Rows.take, "scatterv")) if is_root else []

        def phases() -> Phases:
            said = " ".join([each[0].text, *(str(one.count) for one in each)]) if is_root else ""
            kind, *counts = (yield from self._tell(said, root)).split(" ")
            if len(counts) != self.size:
                raise CollectiveMismatch(f"{self._group.name(root)} scatters {len(counts)} arrays to {self.size} ranks")
            tree = read_tree(kind.replace("*", counts[self.rank], 1))
            joined = each[root].joined if is_root else np.empty(tree.nbytes, _BYTES)
            parts = [one.joined for one in each]
            yield algorithms.scatter(self.rank, self.size, parts, joined, root, LARGEST_CHUNK_BYTES), _BYTES
            return lambda: xs[root] if is_root and xs is not None else tree.rebuild(joined)

        return self._call(f"scatterv(root={root})", phases(), timeout_seconds, confirm=True)

    scatterv = _blocking(iscatterv)

    def iall_to_all(self, xs: Sequence[Any], *, timeout_seconds: float | None = None) -> Request[list[Any]]:
        """Give each rank r this rank's xs[r]; return what all ranks have given this one, by rank.

        xs: one for each rank, all of one shape and dtype, on all ranks; left alone until the call is over.
        """
        trees = self._for_each("all_to_all", xs, take_tree)
        tree = trees[self.rank]
        joined, parts = self._room_for_all(tree.nbytes)
        given = [np.frombuffer(each.join(), _BYTES) for each in trees]
        parts[self.rank][:] = given[self.rank]
        steps = algorithms.all_to_all(self.rank, self.size, given, parts, self._chunk(joined))
        phases = self._play(steps, _BYTES, tree.nbytes == 0, lambda: [tree.rebuild(part) for part in parts])
        return self._call(f"all_to_all({tree.text})", phases, timeout_seconds)

    all_to_all = _blocking(iall_to_all)

    def iall_to_allv(self, xs: Sequence[Any], *, timeout_seconds: float | None = None) -> Request[list[Any]]:
        """Give each rank r this rank's xs[r]; return what all ranks have given this one, by rank.

        xs: one for each rank; they may differ in length along their first axis. dtype and all other axes are the same
        for all, on all ranks. They are left alone until the call is over.
        """
        each = self._for_each("all_to_allv", xs, partial(_Rows.take, "all_to_allv"))
        own = each[self.rank]

        def phases() -> Phases:
            sent, came = (np.array([[one.count] for one in each], _COUNTS) for _ in range(2))
            yield algorithms.all_to_all(self.rank, self.size, list(sent), list(came), 1), _COUNTS
            parts = [self._room(rank, int(came[rank, 0]), own.nbytes) for rank in range(self.size)]
            into = [joined for _, joined in parts]
            into[self.rank][:] = own.joined
            joined = [one.joined for one in each]
            yield algorithms.all_to_all(self.rank, self.size, joined, into, LARGEST_CHUNK_BYTES), _BYTES
            return lambda: [own.rebuild(part) for part in parts]

        return self._call(f"all_to_allv({own.text})", phases(), timeout_seconds)

    all_to_allv = _blocking(iall_to_allv)

    def ibarrier(self, *, timeout_seconds: float | None = None) -> Request[None]:
        """Be over once all ranks have called this."""
        return self._call("barrier()", self._meet(True), timeout_seconds)

    barrier = _blocking(ibarrier)

    # ------------------------------------------------------------------ how

    def _seconds(self, timeout_seconds: float | None) -> float:
        return self.timeout_seconds if timeout_seconds is None else timeout_seconds

    def _request(self, what: str, timeout_seconds: float | None) -> Request[Any]:
        if os.getpid() != self._process:
            raise LocalProtocolError(f"{what}: this communicator is another process's: create one after the fork")
        request: Request[Any] = Request(self._group, what, self._seconds(timeout_seconds))
        with self._closing:
            if self._closed:
                raise LocalProtocolError(f"{what}: this communicator is closed")
            self._requests.add(request)
        return request

    def _begin(self, request: Request[Any], begin: Callable[[], object]) -> Request[Any]:
        """Have the port's thread begin a request; once all is over, it need not be alive any more."""
        if (error := self._group.broken) is not None:
            request.complete(error)
        else:
            self._endpoint.port.call(begin)
        return request

    def _call(
        self,
        text: str,
        phases: Phases,
        timeout_seconds: float | None,
        *,
        confirm: bool = False,
        operation: str = "",
    ) -> Request[Any]:
        request = self._request(text, timeout_seconds)
        return self._begin(request, lambda: self._group.begin(request, text, phases, confirm, operation))

    def _post(
        self, what: str, transfer: Transfer, post: Callable[[], object], timeout_seconds: float | None = None
    ) -> Request[Any]:
        request = self._request(what, timeout_seconds)
        request.doing = transfer
        return self._begin(request, lambda: self._group.post(request, transfer, post))

    def _receive(self, receiving: Receiving, found: Envelope | None = None) -> Request[Any]:
        if receiving.into is not None:
            _check_into(receiving.into)
        what = f"recv(source={_any(receiving.peer)}, tag={_any(receiving.tag)})"
        return self._post(what, receiving, lambda: self._group.matching.receive(receiving, found))

    def _find(self, source: int, tag: int, *, take: bool, seconds: float | None = None) -> Message | None:
        """Probe. seconds: how long to wait for a message; None: not at all."""
        self._check(source, tag)
        finding, wait = Finding(source, tag, take=take), seconds is not None
        what = f"probe(source={_any(source)}, tag={_any(tag)})"
        _wait_or_cancel(self._post(what, finding, lambda: self._group.matching.probe(finding, wait=wait)), seconds)
        return None if finding.envelope is None else Message(finding.envelope.status, finding.envelope)

    def _check(self, source: int, tag: int) -> None:
        if source != ANY_SOURCE:
            self._check_rank("source", source)
        if tag != ANY_TAG:
            _check_tag(tag)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ConfigError(f"{name} must be 0 to {self.size - 1} in a group of {self.size}, got {rank}")

    def _is_root(self, root: int) -> bool:
        self._check_rank("root", root)
        return self.rank == root

    def _chunk(self, flat: NDArray[Any], algorithm: str = "") -> int:
        return max(1, choose_chunk_bytes(algorithm, self.size, flat.nbytes) // flat.itemsize)

    def _rooted(self, nbytes: int) -> str:
        return "tree" if self.size <= 2 or nbytes <= 256 << 10 else "chain"

    def _play(self, steps: Steps, dtype: np.dtype[Any], is_empty: bool, make: Callable[[], Any]) -> Phases:
        """Play one algorithm. make: makes the call's result."""
        yield steps, dtype
        yield from self._meet(is_empty)
        return make

    def _gather_uneven(self, own: _Part, item_bytes: int, root: int, rebuild: Callable[[_Part], Any]) -> Phases:
        """Bring parts of any numbers of items to the root: first the numbers. rebuild: makes the result of a part."""
        counts, parts = np.full((self.size, 1), own[0], _COUNTS), list[_Part]()
        yield algorithms.gather(self.rank, self.size, counts[self.rank], list(counts), root, 1), _COUNTS
        if self.rank == root:
            parts = [self._room(rank, int(counts[rank, 0]), item_bytes) for rank in range(self.size)]
            parts[root][1][:] = own[1]
        into = [joined for _, joined in parts]
        yield algorithms.gather(self.rank, self.size, own[1], into, root, LARGEST_CHUNK_BYTES), _BYTES
        return lambda: [rebuild(part) for part in parts] if self.rank == root else None

    def _room(self, source: int, count: int, item_bytes: int) -> _Part:
        """Return room for so many items of a rank. Raise CollectiveMismatch for a number that cannot be."""
        try:
            if count >= 0:
                return count, np.empty(count * item_bytes, _BYTES)
        except (MemoryError, ValueError):  # numpy says ValueError beyond the address space
            pass
        raise CollectiveMismatch(
            f"{self._group.name(source)} sends {count} items of {item_bytes} bytes, for which "
            f"{self._group.name(self.rank)} has no memory"
        )

    def _meet(self, needed: bool) -> Generator[Phase, None, None]:
        """A barrier, where needed: a result that holds values of all ranks shows that their calls were the same, and
        one without values needs messages that do."""
        if needed:
            yield algorithms.barrier(self.rank, self.size), _BYTES

    def _check_algorithm(self, algorithm: str, operation: str, tree: Tree) -> None:
        if algorithm not in ALLREDUCE:
            raise ConfigError(f"algorithm={algorithm!r}: choose one of auto, {', '.join([*ALLREDUCE, *ALIASES])}")
        if algorithm != "hub":
            return
        if not hasattr(self._endpoint.port, "reduce") or self._shrunk:
            raise ConfigError(
                'algorithm="hub": no hub reduces for this group (nor for one that shrink gave: it holds parts of calls '
                "that never ended)"
            )
        if operation not in OPERATIONS or any(shape.dtype.name not in HUB_DTYPES for shape in tree.shapes):
            raise ConfigError(
                f"the hub reduces {', '.join(OPERATIONS)}, of arrays of {', '.join(HUB_DTYPES)}, not {operation} of "
                f"{tree.text[:200]}: take another algorithm"
            )

    def _for_each(self, name: str, xs: Sequence[Any] | None, take: Callable[[Any], Each]) -> list[Each]:
        """Take one array for each rank. Raise ConfigError if there are more or fewer, or they differ."""
        if xs is None or len(xs) != self.size:
            count = "none" if xs is None else len(xs)
            raise ConfigError(f"{name} takes one array for each of {self.size} ranks, got {count}")
        each = [take(x) for x in xs]
        for rank, one in enumerate(each):
            if one.text != each[0].text:
                raise ConfigError(
                    f"{name} takes {what_calls_share(name)}: that for rank 0 is {each[0].text[:200]}, that for rank "
                    f"{rank} {one.text[:200]}"
                )
        return each

    def _room_for_all(self, nbytes: int) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
        joined = np.empty(self.size * nbytes, _BYTES)
        return joined, [joined[rank * nbytes : (rank + 1) * nbytes] for rank in range(self.size)]

    def _tell(self, text: str, root: int) -> Generator[Phase, None, str]:
        """Broadcast a text of the root's, and return it."""
        spoken = text.encode()
        first = np.zeros(_TOLD_BYTES, _BYTES)
        if self.rank == root:
            first[:8] = np.frombuffer(len(spoken).to_bytes(8, "little"), _BYTES)
            begin = np.frombuffer(spoken[: _TOLD_BYTES - 8], _BYTES)
            first[8 : 8 + begin.size] = begin
        yield BROADCAST["tree"](self.rank, self.size, first, root, _TOLD_BYTES), _BYTES
        length = int.from_bytes(first[:8].tobytes(), "little")
        if length > MAX_TEXT_BYTES:
            raise CollectiveMismatch(f"{self._group.name(root)} describes its arrays in {length} bytes")
        if length <= _TOLD_BYTES - 8:
            return first[8 : 8 + length].tobytes().decode()
        rest = np.frombuffer(spoken, _BYTES) if self.rank == root else np.empty(length, _BYTES)
        yield BROADCAST["tree"](self.rank, self.size, rest, root, 1 << 20), _BYTES
        return rest.tobytes().decode()

    def _check_told(self, text: str, tree: Tree, told: str, root: int) -> None:
        if tree.text != told and not (tree.is_value and read_tree(told).is_value):
            raise CollectiveMismatch(
                f"{text}: {self._group.name(root)} has {told[:200]}, and {self._group.name(self.rank)} expects "
                f"{tree.text[:200]}"
            )


@dataclass(frozen=True, slots=True)
class _Rows:
    """An array whose first axis may have another length on another rank.

    leaf: the array.  text: what it has in common with the others: float32[*,784].  nbytes: of one row.
    """

    leaf: Leaf
    text: str
    nbytes: int

    @staticmethod
    def take(name: str, x: Any) -> _Rows:
        """Take a caller's array. Raise ConfigError for what has no first axis."""
        tree = take_tree(x)
        if not tree.is_leaf or not tree.shapes[0].shape:
            raise ConfigError(f"{name} takes an array with at least one axis, got {tree.text[:200]}")
        shape = tree.shapes[0]
        row = LeafShape(shape.dtype, shape.shape[1:])
        return _Rows(tree.leaves[0], f"{shape.dtype.name}[{','.join(['*', *map(str, row.shape)])}]", row.nbytes)

    @property
    def count(self) -> int:
        return int(self.leaf.values.shape[0])

    @property
    def joined(self) -> NDArray[np.uint8]:
        return np.frombuffer(as_bytes(self.leaf.values), _BYTES)

    def rebuild(self, part: _Part) -> Any:
        """Return the rows of any rank as an array of the caller's kind."""
        count, joined = part
        return self.leaf.rebuild(joined.view(self.leaf.values.dtype).reshape(count, *self.leaf.values.shape[1:]))


def _reductions(op: Op, tree: Tree) -> tuple[list[Reduction], str]:
    reductions = [_reduction(op, dtype) for dtype in tree.sizes()]
    return reductions, reductions[0].name if reductions else "sum"


def _reduction(op: Op, dtype: np.dtype[Any]) -> Reduction:
    return _reduction_by_name(op, dtype) if isinstance(op, str) else find_reduction(op, dtype)


@lru_cache(maxsize=64)
def _reduction_by_name(op: str, dtype: np.dtype[Any]) -> Reduction:
    return find_reduction(op, dtype)


def _put(tree: Tree, into: NDArray[Any]) -> NDArray[Any]:
    usable = isinstance(into, np.ndarray) and into.flags.c_contiguous and into.flags.writeable
    if not tree.is_leaf or not usable or (into.dtype, into.shape) != (tree.shapes[0].dtype, tree.shapes[0].shape):
        raise ConfigError(f"into is a contiguous numpy array like x, which is {tree.text[:200]}")
    flat = into.reshape(-1)
    values = tree.leaves[0].values.reshape(-1)
    if flat.ctypes.data != values.ctypes.data:
        np.copyto(flat, values)
    return flat


def _wait_or_cancel(request: Request[Any], timeout_seconds: float | None) -> Any:
    """Wait for a request that takes nothing if its time is up, unless it has ended since, well or not."""
    try:
        return request.wait(timeout_seconds)
    except CollectiveTimeout:
        if request.cancel():
            raise
        return request.wait(timeout_seconds)


def _is_in_flight(request: Request[Any]) -> bool:
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
