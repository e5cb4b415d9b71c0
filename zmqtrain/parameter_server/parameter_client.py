"""A worker's client of a parameter server: pushes to and pulls from keys on one or several brokers.

Rule 1: a thread of the client owns the sockets; requests begin there in the order of the calls.
Rule 2: gradients are not copied: nobody writes into one before its request is done.
Rule 3: every wait ends in time, with an error that names what it waited for; a lost broker ends all waits.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import (
    ChannelClosed,
    CollectiveTimeout,
    ConfigError,
    LocalProtocolError,
)
from zmqtrain.core.types import LeafSpec
from zmqtrain.parameter_server.directory import ITEM_BYTES, check_key, key_name, name_leaves, rebuild
from zmqtrain.parameter_server.server_connections import ServerConnections
from zmqtrain.parameter_server.store import consistency_from_spec, optimizer_from_spec
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey, read_credentials

Key = str | int
"""The name of one array: a text, or the index of an array in a list."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
Vector = NDArray[Any]


OPENING_SECONDS = 5.0
"""Added to the wait for `open`, which has a deadline of its own."""


class ParameterRequest(Generic[T]):
    """A request to the server that runs in the background."""

    def __init__(self, future: Future[T], what: str, client: ParameterClient) -> None:
        self._future, self._what, self._client = future, what, client

    def test(self) -> bool:
        """Return whether it is done (or has failed): `wait` then returns, or raises, at once."""
        return self._future.done()

    def wait(self, timeout_seconds: float | None = None) -> T:
        """Return the result, waiting for it; timeout None: the client's.

        Raises PeerLost (a broker), CollectiveTimeout, ConfigError (refused: an unknown key, a wrong size),
        NonFiniteDelta, ChannelClosed.
        """
        return self._client._wait(self._future, self._what, timeout_seconds)

    def add_done_callback(self, told: Callable[[ParameterRequest[T]], object]) -> None:
        """Call `told` with this request when it is done, in the client's thread, where it must not wait."""
        self._future.add_done_callback(lambda future: told(self))


@dataclass(frozen=True)
class ParameterStatistics:
    """Running figures of a client. bytes: payload and heads, of all brokers."""

    bytes_sent: int
    bytes_received: int
    pushes: int
    pulls: int


class ParameterClient:
    """A client of a parameter server; made by `connect`."""

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self.name, self.timeout_seconds = name, timeout_seconds
        self._servers = ServerConnections(name, timeout_seconds)
        self._pushes = set[Future[None]]()  # not done yet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="zmqtrain-parameters", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        name: str | None = None,
        server_key: GivenServerKey = None,
        keys: GivenKeys = None,
        consistency: str | None = None,
        optimizer: str | None = None,
        workers: int | None = None,
        reads_only: bool = False,
        timeout_seconds: float = 60.0,
    ) -> ParameterClient:
        """Connect to the brokers, which are brokers, and return the client.

        addresses: of all brokers, in the same order in all clients; the first is enough where the brokers were started
        with --shard.  name: of this worker, for people and for the order in which gradients are added; default: the
        host's name.  server_key, keys: as for `zmqtrain.connect`, but no key file is searched.
        consistency: "async" (each push is applied at once), "bsp" (the mean of all workers' pushes is applied),
        "bounded:s=3" (applied at once; a worker more than s pushes ahead waits).  optimizer: of the server,
        "sgd:rate=0.01", "momentum:rate=0.01,momentum=0.9,nesterov=0", "adam:rate=0.001,beta1=0.9,beta2=0.999,
        epsilon=1e-08".  workers: with how many the clocks of bsp and bounded begin.  A rule that is not given is the
        server's, or the first choice, with 1 worker; a given rule that differs from the server's is refused.
        reads_only: this client never pushes, and no worker waits for it.
        timeout_seconds: of the connection, and the default of every wait.
        Raises ConfigError, HubUnreachable, PeerLost, JoinRefused.
        """
        given = [addresses] if isinstance(addresses, str) or not isinstance(addresses, Iterable) else list(addresses)
        if not given or not all(isinstance(address, str) and address for address in given):
            raise ConfigError(
                f"connect needs the brokers' addresses, such as ['tcp://10.0.0.1:5555'], not {addresses!r}"
            )
        if len(set(given)) < len(given):
            raise ConfigError(f"a broker is named twice: {', '.join(given)}")
        name = name or f"{socket.gethostname().partition('.')[0] or 'worker'}-{os.getpid()}"
        if not name.isprintable() or len(name) > 64 or "#" in name:
            raise ConfigError(f"a worker's name is at most 64 printable characters without '#', got {name!r}")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        rules = (
            "" if consistency is None else consistency_from_spec(consistency).name,
            "" if optimizer is None else optimizer_from_spec(optimizer).name,
            workers or 0,
        )
        credentials = read_credentials(server_key, keys)
        client = cls(name, timeout_seconds)
        atexit.register(client.close)
        try:
            opening = client._call(client._servers.open(given, credentials, rules, reads_only), "shards' answers")
            opening.wait(timeout_seconds + OPENING_SECONDS)
        except BaseException:
            client.close()
            raise
        return client

    # ------------------------------------------------------------------ one key

    def init(self, key: Key, array: Any, *, timeout_seconds: float | None = None) -> Vector:
        """Create a key with these values, unless it exists; return its values. The first client to create it wins.

        array: numpy or jax, float32 or float64.  Raises ConfigError for another dtype, and for another shape or dtype
        than the key has; PeerLost, CollectiveTimeout (its creator does not send its values), NonFiniteDelta.
        """
        name = key_name(key)
        return self._init({name: array}, timeout_seconds)[name]

    def push(self, key: Key, gradient: Any, *, timeout_seconds: float | None = None) -> None:
        """Send a gradient; return when the server has it. Raises as `ParameterRequest.wait`."""
        self.ipush(key, gradient).wait(timeout_seconds)

    def pull(self, key: Key, *, into: Vector | None = None, timeout_seconds: float | None = None) -> Vector:
        """Return a key's values, with all pushes of this client, and those of others as the consistency says.

        into: the array to fill and return.  Raises as `ParameterRequest.wait`.
        """
        return self.ipull(key, into=into).wait(timeout_seconds)

    def push_pull(
        self, key: Key, gradient: Any, *, into: Vector | None = None, timeout_seconds: float | None = None
    ) -> Vector:
        """Send a gradient, and return the values with it applied. Raises as `ParameterRequest.wait`."""
        return self.ipush_pull(key, gradient, into=into).wait(timeout_seconds)

    def ipush(self, key: Key, gradient: Any) -> ParameterRequest[None]:
        """Begin `push`; never waits. Raises ConfigError for a dtype that no server takes, and for a shape or dtype
        that is not the key's; if this client does not know the key yet, the request raises it."""
        return self._ipush({key_name(key): gradient})

    def ipull(self, key: Key, *, into: Vector | None = None) -> ParameterRequest[Vector]:
        """Begin `pull`; never waits."""
        name = key_name(key)
        return self._ipull([name], itemgetter(name), into)

    def ipush_pull(self, key: Key, gradient: Any, *, into: Vector | None = None) -> ParameterRequest[Vector]:
        """Begin `push_pull`; never waits. Raises as `ipush`."""
        name = key_name(key)
        return self._ipush_pull({name: gradient}, itemgetter(name), into)

    # ------------------------------------------------------------------ trees of keys

    def init_all(self, tree: Any, *, timeout_seconds: float | None = None) -> Any:
        """`init` for each array of a tree (dicts, lists, tuples, NamedTuples); its keys are their paths: "a/0"."""
        return rebuild(tree, self._init(name_leaves(tree), timeout_seconds))

    def push_all(self, tree: Any, *, timeout_seconds: float | None = None) -> None:
        """`push` for each array of a tree, all at once."""
        self.ipush_all(tree).wait(timeout_seconds)

    def pull_all(self, tree: Any, *, timeout_seconds: float | None = None) -> Any:
        """`pull` for each array of a tree, all at once; the values of its arrays are not used."""
        return self.ipull_all(tree).wait(timeout_seconds)

    def push_pull_all(self, tree: Any, *, timeout_seconds: float | None = None) -> Any:
        """`push_pull` for each array of a tree, all at once."""
        return self.ipush_pull_all(tree).wait(timeout_seconds)

    def ipush_all(self, tree: Any) -> ParameterRequest[None]:
        """Begin `push_all`; never waits. Raises as `ipush`."""
        return self._ipush(name_leaves(tree))

    def ipull_all(self, tree: Any) -> ParameterRequest[Any]:
        """Begin `pull_all`; never waits."""
        return self._ipull(list(name_leaves(tree)), partial(rebuild, tree))

    def ipush_pull_all(self, tree: Any) -> ParameterRequest[Any]:
        """Begin `push_pull_all`; never waits. Raises as `ipush`."""
        return self._ipush_pull(name_leaves(tree), partial(rebuild, tree))

    # ------------------------------------------------------------------ the client itself

    @property
    def addresses(self) -> tuple[str, ...]:
        """The brokers' addresses, by number."""
        return self._servers.addresses

    @property
    def consistency(self) -> str:
        """The consistency in force."""
        return self._servers.rules[0]

    @property
    def optimizer(self) -> str:
        """The server's optimizer in force."""
        return self._servers.rules[1]

    @property
    def workers(self) -> int:
        """With how many workers clocks begin."""
        return self._servers.rules[2]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that this client knows."""
        return tuple(self._servers.places)

    def version(self, key: Key) -> int:
        """Return how many steps were in a key's values when last received; of several pieces, the fewest."""
        return self._servers.versions.get(key_name(key), 0)

    def statistics(self) -> ParameterStatistics:
        """Return the running figures."""
        return ParameterStatistics(
            sum(one.session.bytes_sent for one in self._servers.connections),
            sum(one.session.bytes_received for one in self._servers.connections),
            self._servers.pushes,
            self._servers.pulls,
        )

    def close(self, timeout_seconds: float | None = None) -> None:
        """Wait until the brokers have the pushed gradients, say goodbye, and end the thread. Twice is once.

        timeout_seconds: how long to wait, the client's if None; 0: not at all. Pushes that are not done by then are
        lost and logged. Pulls are not waited for: their `wait` raises ChannelClosed. A with block that an exception
        ends does not wait.
        """
        atexit.unregister(self.close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
            if seconds > 0 and (lost := wait(list(self._pushes), seconds).not_done):
                logger.warning(
                    "%s is closed after %g s; %d of its pushes were not done and may be lost: %s",
                    *(self.name, seconds, len(lost), self._servers.say_waiting()),
                )
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._servers.close(), self._loop).result(5.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else 0.0)

    # ------------------------------------------------------------------ the caller's thread

    def _ipush(self, gradients: Mapping[str, Any]) -> ParameterRequest[None]:
        """Begin pushes, which `close` waits for."""
        arrays, servers = self._gradients(gradients), self._servers

        async def push() -> None:
            await servers.in_order([*arrays], lambda: [servers.push(*one) for one in self._checked_all(arrays)])

        request = self._call(push(), _name_all("push", arrays))
        self._pushes.add(request._future)
        request._future.add_done_callback(self._pushes.discard)
        return request

    def _ipull(
        self, keys: Sequence[str], give: Callable[[Mapping[str, Vector]], T], into: Vector | None = None
    ) -> ParameterRequest[T]:
        """Begin pulls. give: makes the result of the values by key.  into: of a single key."""
        servers = self._servers
        for key in keys:
            self._check_target(key, into)

        async def pull() -> T:
            values = await servers.in_order(keys, lambda: [servers.pull(key, self._target(key, into)) for key in keys])
            return give(dict(zip(keys, values, strict=True)))

        return self._call(pull(), _name_all("pull", keys))

    def _ipush_pull(
        self, gradients: Mapping[str, Any], give: Callable[[Mapping[str, Vector]], T], into: Vector | None = None
    ) -> ParameterRequest[T]:
        """Begin pushes, and pulls of the values with them applied; the arguments are those of `_ipush` and `_ipull`."""
        arrays, servers = self._gradients(gradients), self._servers
        for key in arrays:
            self._check_target(key, into)

        def begin() -> list[Coroutine[Any, Any, Vector]]:
            return [servers.push_pull(key, flat, self._target(key, into)) for key, flat in self._checked_all(arrays)]

        async def push_pull() -> T:
            values = await servers.in_order([*arrays], begin)
            return give(dict(zip(arrays, values, strict=True)))

        return self._call(push_pull(), _name_all("push_pull", arrays))

    def _call(self, work: Coroutine[Any, Any, T], what: str) -> ParameterRequest[T]:
        """Begin work in the client's thread."""
        if not self._thread.is_alive() or self._servers.failure is not None:
            work.close()
            failure = self._servers.failure or ChannelClosed("this client was closed")
            raise failure.with_traceback(None)  # raised again and again, it would hold all their frames
        try:
            return ParameterRequest(asyncio.run_coroutine_threadsafe(work, self._loop), what, self)
        except RuntimeError as error:  # the loop is closed
            work.close()
            raise ChannelClosed("this client was closed") from error

    def _wait(self, future: Future[T], what: str, timeout_seconds: float | None) -> T:
        if threading.current_thread() is self._thread and not future.done():
            raise LocalProtocolError(f"a callback must not wait for the {what}: it runs in the thread that does it")
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                raise
            text = f"{self.name} has waited {seconds:g} s for the {what}: {self._servers.say_waiting()}"
            raise CollectiveTimeout(text) from None

    def _init(self, arrays: Mapping[str, Any], timeout_seconds: float | None) -> dict[str, Vector]:
        leaves = {key: _as_array(key, array) for key, array in arrays.items()}
        return self._call(self._servers.initialise(leaves), _name_all("init", leaves)).wait(timeout_seconds)

    def _gradients(self, gradients: Mapping[str, Any]) -> dict[str, Vector]:
        """Return gradients as arrays; those of known keys are checked now, the others once their keys are known."""
        arrays = {key: _as_array(key, gradient) for key, gradient in gradients.items()}
        for key, array in arrays.items():
            if key in self._servers.places:
                self._checked(key, array)
        return arrays

    def _checked(self, key: str, array: Vector) -> Vector:
        """Return a gradient of a known key, flat. Raises ConfigError unless it is like the key."""
        leaf = self._servers.places[key].leaf
        if (array.shape, array.dtype.name) != (leaf.shape, leaf.dtype):
            raise ConfigError(f"the key {leaf} was given a gradient of {LeafSpec(key, array.shape, array.dtype.name)}")
        return array.reshape(-1)

    def _checked_all(self, arrays: Mapping[str, Vector]) -> list[tuple[str, Vector]]:
        return [(key, self._checked(key, array)) for key, array in arrays.items()]

    def _check_target(self, key: str, into: Vector | None) -> None:
        check_key(key)
        if into is not None and key in self._servers.places:
            self._target(key, into)

    def _target(self, key: str, into: Vector | None) -> Vector:
        leaf = self._servers.places[key].leaf
        if into is None:
            return np.empty(leaf.shape, leaf.dtype)
        fits = isinstance(into, np.ndarray) and (into.shape, into.dtype) == (leaf.shape, np.dtype(leaf.dtype))
        if not (fits and into.flags.c_contiguous and into.flags.writeable):
            raise ConfigError(f"`into` must be a contiguous numpy array like the key {leaf}, that may be written to")
        return into

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def _as_array(key: str, array: Any) -> Vector:
    check_key(key)
    values = np.asarray(array, order="C")
    if values.dtype.name not in ITEM_BYTES:
        raise ConfigError(f"the key {key!r}: values are {' or '.join(ITEM_BYTES)}, not {values.dtype.name}; cast them")
    if not values.size:
        raise ConfigError(f"the key {key!r} has no values: leave it out")
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _name_all(verb: str, names: Iterable[str]) -> str:
    named = list(names)
    return f"{verb} of {', '.join(map(repr, named[:3]))}{f' and {len(named) - 3} more' if len(named) > 3 else ''}"
