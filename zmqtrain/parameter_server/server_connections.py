"""The servers of a parameter server, as a client reaches them: one session with each, and requests to all that hold a
piece of a key.

Rule 1: all of it belongs to one asyncio loop; requests are sent before the first wait, in the order of the calls.
Rule 2: the loss of one server ends the client, because a key may lie on every one of them: the loss is the exception of
all requests, open and later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import (
    ChannelClosed,
    CodecError,
    ConfigError,
    HubUnreachable,
    JoinRefused,
    NonFiniteDelta,
    PeerLost,
    ZmqTrainError,
)
from zmqtrain.core.interfaces import Dialer
from zmqtrain.core.types import Buffer, LeafSpec, PeerId
from zmqtrain.parameter_server.directory import ASKS, Piece, Placement
from zmqtrain.parameter_server.store import cut_frames, join_frames
from zmqtrain.protocol.limits import KEYS_HEAD_BYTES
from zmqtrain.protocol.messages import (
    Awaited,
    Declare,
    Done,
    Enrol,
    Enrolled,
    Founded,
    Initialise,
    Message,
    Placed,
    Pull,
    Push,
    Refused,
    Values,
    Welcome,
)
from zmqtrain.session.environment import RealEnvironment
from zmqtrain.session.hub_session import HubSession, NullListener, ProcessPeer, limited
from zmqtrain.transport.address import say_unreachable
from zmqtrain.transport.key_folder import Access
from zmqtrain.transport.zmq_keys import Credentials

logger = logging.getLogger(__name__)

T = TypeVar("T")
Vector = NDArray[Any]
Answer = tuple[int, Sequence[Buffer]]
"""The answer to a request: a version, and the frames of values (none: it is done)."""

MAX_REASON = 200
DECLARED_AT_ONCE = 500
"""Keys in one Declare: its head, and that of the answer, have a bound."""
BYTES_BESIDE_A_KEY, BYTES_OF_A_DIMENSION = 32, 9
"""At most, of a key in a head, beside its name."""


class ServerConnection(NullListener):
    """A client's session with one server of a parameter server: requests, and the futures of their answers.

    shard: the server's number.  awaited: the workers for which requests wait there, as the server last said.
    """

    messages = (Awaited, Done, Enrolled, Placed, Refused, Values, Welcome)

    def __init__(self, owner: ServerConnections, shard: int, address: str, dialer: Dialer) -> None:
        self.owner, self.shard, self.address = owner, shard, address
        loop = asyncio.get_running_loop()
        self.welcome: asyncio.Future[Welcome] = loop.create_future()
        self.enrolled: asyncio.Future[Enrolled] = loop.create_future()
        self.awaited = Awaited((), 0)
        self._open: dict[int, asyncio.Future[Answer]] = {}
        machine = ProcessPeer(PeerId(f"{owner.name}#{secrets.token_hex(4)}"), owner.name, comes_again=False)
        self.session = HubSession(dialer, machine, address, self)
        self.session.begin()

    @property
    def waits(self) -> bool:
        """Whether a request is not answered."""
        return bool(self._open)

    # ------------------------------------------------------------------ out

    def ask(self, make: Callable[[int], Message]) -> asyncio.Future[Answer]:
        """Send a request, made with its number; return its answer to come. It is queued before this returns."""
        number = self.session.next_transfer()
        future = self._begin(number)
        if not future.done():
            self.session.send(make(number))
        return future

    def announce(
        self, make: Callable[[int, tuple[int, ...]], Initialise | Push], frames: Sequence[Buffer]
    ) -> asyncio.Future[Answer]:
        """Announce a payload, by a message made with its number and the sizes of its frames, which go as granted.

        Nobody may write into the frames before the answer.
        """
        number, sizes = self.session.stage(frames)
        future = self._begin(number)
        if future.done():
            self.session.cancel(number)
        else:
            self.session.send(make(number, sizes))
        return future

    def conclude(self, number: int) -> None:
        """End a request that is answered otherwise, or needs no answer any more."""
        self._answered(number, (0, ()))

    def _begin(self, number: int) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            future.set_exception(self.failure)
        else:
            self._open[number] = future
        return future

    async def close(self) -> None:
        """Say goodbye, unless that was said, and end the session."""
        self.fail(ChannelClosed("this client was closed"))
        await self.session.wait_closed()

    def fail(self, error: ZmqTrainError) -> None:
        """End all requests, open and to come, with this error, and leave: other workers must not wait for a client that
        can do nothing more."""
        if self.failure is not None:
            return
        self.failure = error
        waiting, self._open = self._open, {}
        futures: list[asyncio.Future[Any]] = [self.welcome, self.enrolled, *waiting.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody need wait for it
        self.session.leave("" if isinstance(error, ChannelClosed) else str(error)[:MAX_REASON])
        self.owner.on_failed(error)

    # ------------------------------------------------------------------ in: see NullListener

    def on_message(self, message: Message, frames: Sequence[Buffer]) -> bool:
        match message:
            case Values():
                self._answered(message.request, (message.version, frames))
            case Done(request):
                self.conclude(request)
            case Placed():
                self.owner.on_placed(message)
            case Awaited():
                self.awaited = message
            case Refused():
                return self._refused(message)
            case Welcome() if not self.welcome.done():
                self.welcome.set_result(message)
                return False
            case Enrolled() if not self.enrolled.done():
                self.enrolled.set_result(message)
        return True

    def on_ended(self, reason: str, text: str, error: ZmqTrainError) -> None:
        """See NullListener: the server is lost."""
        if reason == "unknown":
            text = "it does not know this client any more: it was restarted, or lost it"
        self.fail(PeerLost(f"broker {self.shard} at {self.address}", text, self.shard))

    def on_failed(self, error: ZmqTrainError) -> None:
        self.fail(error)

    def _answered(self, request: int, answer: Answer) -> None:
        future = self._open.pop(request, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _refused(self, refused: Refused) -> bool:
        text = f"{self.address}: {refused.text}"
        if refused.sequence >= 0:
            self.session.cancel(refused.sequence)
            future = self._open.pop(refused.sequence, None)
            if future is not None and not future.done():
                kinds: dict[str, type[ZmqTrainError]] = {"non-finite": NonFiniteDelta, "corrupt": CodecError}
                future.set_exception(kinds.get(refused.reason, ConfigError)(text))
        elif refused.reason == "unknown":
            return False
        else:
            self.fail(ConfigError(text) if refused.reason == "rules" else JoinRefused(text, refused.reason))
        return True


class ServerConnections:
    """All servers of a parameter server, as a client's thread reaches them (a `ConnectionOwner`).

    name: of the client.  timeout_seconds: how long the servers may take to answer at the beginning.
    places: of the known keys.  versions: of their values, as last received; of several pieces the lowest.
    failure: why nothing can be asked any more.  rules: consistency, optimizer and workers in force.
    """

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self.name, self.timeout_seconds = name, timeout_seconds
        self.addresses: tuple[str, ...] = ()
        self.rules = ("", "", 0)
        self.connections: list[ServerConnection] = []
        self.places: dict[str, Placement] = {}
        self.versions: dict[str, int] = {}
        self.pushes = self.pulls = 0
        self.failure: ZmqTrainError | None = None
        self._until = 0.0
        self._declared: dict[int, asyncio.Queue[Placed | BaseException]] = {}
        self._placing: dict[str, asyncio.Future[None]] = {}  # by key, the newest call that asks where it lies

    async def open(
        self, addresses: Sequence[str], credentials: Credentials, rules: tuple[str, str, int], reads: bool
    ) -> None:
        """Connect to all brokers and enrol with them, in their order.

        rules: as wanted; "" and 0: those in force.  credentials: the brokers' public key, and this client's pair.
        Raises HubUnreachable, ConfigError (other rules are in force, or these are not the brokers), JoinRefused.
        """
        self._until = asyncio.get_running_loop().time() + self.timeout_seconds
        first = self._connect(0, addresses[0], credentials)
        welcome = await self._within(first.welcome, first)
        if len(addresses) == 1 and welcome.shard:
            text = f"the broker at {addresses[0]} is broker {welcome.shard}: name the first, at {welcome.shards[0]}"
            raise ConfigError(f"{text}, alone, or all of them")
        if len(addresses) == 1 and len(welcome.shards) > 1:
            addresses = [addresses[0], *welcome.shards[1:]]
            if not all(addresses):
                missing = ", ".join(str(shard) for shard, one in enumerate(addresses) if not one)
                raise HubUnreachable(f"the first broker, at {addresses[0]}, knows no broker {missing} now: start it")
        self.addresses = tuple(addresses)
        for shard, address in enumerate(addresses[1:], 1):
            self._connect(shard, address, credentials)
        store = ""
        for connection in self.connections:
            await self._within(connection.welcome, connection)
            connection.session.send(Enrol(store, connection.shard, len(self.connections), *rules, reads))
            enrolled = await self._within(connection.enrolled, connection)
            store = enrolled.store
            rules = (enrolled.consistency, enrolled.optimizer, enrolled.workers)
        self.rules = rules

    def _connect(self, shard: int, address: str, credentials: Credentials) -> ServerConnection:
        self.connections.append(ServerConnection(self, shard, address, RealEnvironment(Access(credentials))))
        return self.connections[-1]

    async def _within(self, future: asyncio.Future[T], connection: ServerConnection) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with limited(connection.session, self._until - loop.time()):
                return await asyncio.shield(future)
        except TimeoutError:
            waited = self.timeout_seconds - max(0.0, self._until - loop.time())
            said = say_unreachable([connection.address], waited, connection.session.obstacle)
            raise HubUnreachable(said, connection.address, connection.session.refused) from None

    async def close(self) -> None:
        """Say goodbye to all; open requests end with ChannelClosed."""
        await asyncio.gather(*(connection.close() for connection in self.connections))

    def on_failed(self, error: ZmqTrainError) -> None:
        """End all connections with this error."""
        if self.failure is None and isinstance(error, PeerLost):
            logger.warning("%s: %s", self.name, error)
        self.failure = self.failure or error
        for connection in self.connections:
            connection.fail(self.failure)

    def say_waiting(self) -> str:
        """Return which brokers have open requests, and for which workers they wait; any thread may ask."""
        said = []
        for connection in self.connections:
            if connection.waits:
                names, missing = connection.awaited.workers, connection.awaited.missing
                more = f"{missing} worker{'s' * (missing != 1)} to enrol" if missing else ""
                whom = " and ".join(part for part in (", ".join(names), more) if part)
                said.append(
                    f"broker {connection.shard} at {connection.address}{f', which waits for {whom}' if whom else ''}"
                )
        return "; ".join(said)

    # ------------------------------------------------------------------ where keys lie

    def on_placed(self, placed: Placed) -> None:
        if (queue := self._declared.get(placed.request)) is not None:
            queue.put_nowait(placed)

    async def declare(
        self, leaves: Sequence[LeafSpec], settle: Callable[[Placed], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Ask the first broker where keys lie, and settle each answer, until all keys are settled.

        Values that this client must send are sent while it waits for other clients, which may wait for them.
        """
        for some in _in_heads(leaves):
            await self._declare_some(some, settle)

    async def _declare_some(
        self, leaves: Sequence[LeafSpec], settle: Callable[[Placed], Coroutine[Any, Any, None]] | None
    ) -> None:
        first, queue = self.connections[0], asyncio.Queue[Placed | BaseException]()
        number, left = 0, {leaf.path for leaf in leaves}

        def make(request: int) -> Declare:
            nonlocal number
            number, self._declared[request] = request, queue
            return Declare(request, tuple((leaf.path, leaf.shape, leaf.dtype) for leaf in leaves))

        def failed(done: asyncio.Future[Any]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                queue.put_nowait(error)

        first.ask(make).add_done_callback(failed)
        tasks: list[asyncio.Task[None]] = []
        try:
            while left:
                said = await queue.get()
                if isinstance(said, BaseException):
                    raise said
                for path, shape, dtype, pieces in (*said.found, *said.given):
                    self.places[path] = Placement(LeafSpec(path, shape, dtype), tuple(Piece(*one) for one in pieces))
                    left.discard(path)
                if settle is not None:
                    tasks.append(asyncio.ensure_future(settle(said)))
                    tasks[-1].add_done_callback(failed)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self._declared.pop(number, None)
            first.conclude(number)

    async def in_order(self, keys: Sequence[str], make: Callable[[], Iterable[Coroutine[Any, Any, T]]]) -> list[T]:
        """Run the coroutines of `make`, about these keys, once their places are known; return the results.

        Those of an earlier call about one of the keys begin before.
        """
        if all(key in self.places and key not in self._placing for key in keys):
            return await all_of(make())
        async with self._placed_all(keys):
            tasks = [asyncio.ensure_future(one) for one in make()]
            await asyncio.sleep(0)  # they begin
        return await asyncio.gather(*tasks)

    @contextlib.asynccontextmanager
    async def _placed_all(self, keys: Sequence[str]) -> AsyncIterator[None]:
        """Begin the block once the places of these keys are known; the first broker is asked for unknown ones.

        Blocks about one key begin in the order of the calls.
        """
        before = [self._placing[key] for key in keys if key in self._placing]
        own = asyncio.get_running_loop().create_future()
        self._placing |= dict.fromkeys(keys, own)
        try:
            for other in before:
                await asyncio.shield(other)
            if unknown := [key for key in keys if key not in self.places]:
                await self.declare([LeafSpec(key, (), ASKS) for key in unknown])
            yield
        finally:
            own.set_result(None)
            for key in keys:
                if self._placing.get(key) is own:
                    del self._placing[key]

    # ------------------------------------------------------------------ requests

    async def initialise(self, arrays: dict[str, Vector]) -> dict[str, Vector]:
        """Create keys with these values, unless they exist; return their values, in new arrays."""
        there: dict[str, Vector] = {}

        async def settle(placed: Placed) -> None:
            found = [one[0] for one in placed.found]
            await all_of(self._bring(key, arrays[key].reshape(-1)) for key in found)
            if found:
                self.connections[0].session.send(Founded(tuple(found)))
                there.update((key, arrays[key].copy()) for key in found)
            given = [one[0] for one in placed.given]
            values = await all_of(self.pull(key, np.empty(arrays[key].shape, arrays[key].dtype)) for key in given)
            there.update(zip(given, values, strict=True))

        await self.declare([LeafSpec(key, one.shape, one.dtype.name) for key, one in arrays.items()], settle)
        return {key: there[key] for key in arrays}

    def _announce(
        self, key: str, flat: Vector, make: Callable[[int, str, Piece, tuple[int, ...]], Initialise | Push]
    ) -> list[asyncio.Future[Any]]:
        """Announce values to all brokers that have a piece of the key.

        make(number, the piece's name, the piece, its sizes): the message to a broker.
        """

        def announce(piece: Piece) -> asyncio.Future[Any]:
            name, frames = piece.name(key, flat.size), cut_frames(flat[piece.start : piece.start + piece.values])
            return self.connections[piece.shard].announce(
                lambda number, sizes: make(number, name, piece, sizes), frames
            )

        return [announce(piece) for piece in self.places[key].pieces]

    async def _bring(self, key: str, flat: Vector) -> None:
        def make(number: int, name: str, piece: Piece, sizes: tuple[int, ...]) -> Initialise:
            return Initialise(number, name, flat.dtype.name, piece.start, piece.values, sizes)

        await asyncio.gather(*self._announce(key, flat, make))

    def _push(self, key: str, flat: Vector, pull: bool) -> list[asyncio.Future[Any]]:
        self.pushes += 1
        return self._announce(
            key, flat, lambda number, name, _, sizes: Push(number, name, flat.dtype.name, pull, sizes)
        )

    async def push(self, key: str, flat: Vector) -> None:
        """Send a gradient to all brokers that have a piece of the key; wait until they have it."""
        await asyncio.gather(*self._push(key, flat, False))

    async def push_pull(self, key: str, flat: Vector, into: Vector) -> Vector:
        """Send a gradient, and return the values with it applied, in `into`."""
        return await self._gather(key, self._push(key, flat, True), into)

    async def pull(self, key: str, into: Vector) -> Vector:
        """Return the values of a key, in `into`."""

        def ask(piece: Piece) -> asyncio.Future[Any]:
            name = piece.name(key, into.size)
            return self.connections[piece.shard].ask(lambda number: Pull(number, name))

        return await self._gather(key, [ask(piece) for piece in self.places[key].pieces], into)

    async def _gather(self, key: str, answers: Sequence[asyncio.Future[Any]], into: Vector) -> Vector:
        """Join the pieces of a key's values, each as it arrives."""
        flat = into.reshape(-1)

        async def place(piece: Piece, answer: asyncio.Future[Any]) -> int:
            version, frames = await answer
            join_frames(frames, flat[piece.start : piece.start + piece.values])
            return int(version)

        pieces = self.places[key].pieces
        self.pulls += 1
        self.versions[key] = min(
            await asyncio.gather(*[place(piece, one) for piece, one in zip(pieces, answers, strict=True)])
        )
        return into


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Begin all coroutines, in order; return the results, or raise the first error."""
    return await asyncio.gather(*[asyncio.ensure_future(one) for one in work])


def _in_heads(leaves: Sequence[LeafSpec]) -> Iterator[list[LeafSpec]]:
    """Divide keys among as few messages as a broker accepts."""
    some: list[LeafSpec] = []
    size = 0
    for leaf in leaves:
        more = len(leaf.path.encode()) + BYTES_OF_A_DIMENSION * len(leaf.shape) + len(leaf.dtype) + BYTES_BESIDE_A_KEY
        if some and (len(some) == DECLARED_AT_ONCE or size + more > KEYS_HEAD_BYTES // 2):
            yield some
            some, size = [], 0
        some.append(leaf)
        size += more
    if some:
        yield some
