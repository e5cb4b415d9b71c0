"""A process's session with the hub of its group: it meets the other processes there and relays messages through it.

Rule 1: while the group meets, a lost hub is looked for again; once it has met, a lost hub is lost for good (another hub
would not know the group), and the group goes on without it.  Rule 2: messages through the hub wait here for room in the
window that the hub allows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zmqtrain.collectives.reducer import REDUCE_BYTES, REDUCE_MESSAGES, window_bytes
from zmqtrain.core.errors import CollectiveTimeout, ConfigError, HubUnreachable, JoinRefused, ZmqTrainError
from zmqtrain.core.interfaces import Channel, Dialer
from zmqtrain.core.types import HUB, Buffer, HubChunk, PeerId
from zmqtrain.protocol.failure_detector import BEAT_SECONDS
from zmqtrain.protocol.groups import RELAY_BYTES, RELAY_MESSAGES, Window, list_names
from zmqtrain.protocol.messages import (
    Forming,
    Group,
    GroupLost,
    JoinGroup,
    Message,
    ReduceChunk,
    ReducedChunk,
    Refused,
    Relay,
    Relayed,
    Welcome,
    replace_fields,
)
from zmqtrain.protocol.peer import PeerState
from zmqtrain.session.hub_session import HubSession, NullListener, ProcessPeer, limited
from zmqtrain.transport.address import is_loopback, local_address, parse_address, public_address, say_unreachable
from zmqtrain.transport.admission import Admission
from zmqtrain.transport.pacing import COPY_BELOW_BYTES, Gate
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import CurveKeys

logger = logging.getLogger(__name__)

LEAVE_LINGER_SECONDS = 0.2
HUB_SILENCE_SECONDS = 5.0
"""After so much silence the hub is lost, and the group goes on without it."""
PATIENCE_SECONDS, SAY_AGAIN_SECONDS = 5.0, 15.0
"""A process that waits for others logs so after the first time, and each time the second has passed."""
OCCUPIED_SECONDS = 3.0
"""A process that holds a place for so long lives: it was not just killed, to be started again."""


class GroupListener(Protocol):
    """Listener of a group's connection, once the group has met."""

    def on_hub_gone(self, why: str) -> None:
        """The hub is lost for good. Called once."""

    def on_sent_away(self, why: str) -> None:
        """The hub has refused this process, for something it sent."""

    def on_group_lost(self, lost: GroupLost) -> None:
        """The hub says that a rank is lost."""

    def on_relayed(self, rank: int, frames: list[Buffer]) -> None:
        """A message of that rank has come through the hub; of rank HUB: a chunk, reduced."""


def keep(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return a message that may wait: its small frames are copied, its large ones nobody may write into."""
    return [
        frame if isinstance(frame, bytes) or memoryview(frame).nbytes >= COPY_BELOW_BYTES else bytes(frame)
        for frame in frames
    ]


class _Stream:
    """Messages through the hub, each sent when the window has room. sent: opened when room is made."""

    def __init__(self, session: HubSession, window: Window) -> None:
        self.session, self.window, self.moved = session, window, Gate()
        self._waiting: deque[tuple[int, int, Message, list[Buffer]]] = deque()  # key, size, message, frames

    def send(self, key: int, size: int, message: Message, frames: Sequence[Buffer]) -> None:
        self._waiting.append((key, size, message, keep(frames)))
        self.pump()

    def pump(self) -> None:
        self.moved.open()
        while self._waiting and self.window.has_room(self._waiting[0][1]):
            key, size, message, frames = self._waiting.popleft()
            self.window.add(key, size)
            self.session.send_bulk(message, frames)

    def arrived(self, key: int, messages: int = 1) -> None:
        self.window.remove(key, messages)
        self.pump()

    def forget(self, key: int) -> None:
        """Drop the messages of a key, waiting and in flight."""
        self._waiting = deque(one for one in self._waiting if one[0] != key)
        self.window.forget(key)
        self.pump()

    def clear(self) -> None:
        self._waiting.clear()
        self.moved.open()

    @property
    def idle(self) -> bool:
        return not (self._waiting or self.window.count())


class GroupConnection(NullListener):
    """The session of one process of a group. dialer: connects to the hub at `address`.

    there: whether the hub is, as far as is known.
    """

    messages = (ReducedChunk, Forming, Group, GroupLost, Refused, Relay, Relayed, Welcome)

    def __init__(self, dialer: Dialer, address: str, name: str) -> None:
        self.address, self.name, self.there = address, name, True
        self._machine = ProcessPeer(PeerId(f"{name}#{secrets.token_hex(4)}"), name, silence=HUB_SILENCE_SECONDS)
        self.session = HubSession(dialer, self._machine, address, self, meanwhile="Its group waits")
        self._relays = _Stream(self.session, Window(RELAY_MESSAGES, RELAY_BYTES))
        self._reductions = _Stream(self.session, Window(REDUCE_MESSAGES, REDUCE_BYTES))
        self._listener: GroupListener | None = None
        self._early: list[Callable[[GroupListener], object]] = []  # calls for the listener to come
        self._met: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        self._welcomed, self._occupied, self._occupied_until = False, "", math.inf
        self._messages_heard = 0

    # ------------------------------------------------------------------ meeting

    async def meet(self, asked: JoinGroup, timeout_seconds: float) -> Group:
        """Ask for a place in the group, and wait until the group is complete.

        Raises HubUnreachable if no hub answers in time, JoinRefused if it refuses, CollectiveTimeout, which says which
        processes are here, if some are missing. A long wait is logged as a warning.
        """
        began, self._asked = time.monotonic(), asked
        self._forming = Forming(asked.group, (self.name,), asked.size - 1)
        self.session.begin()
        logs = asyncio.create_task(self._log_waiting(timeout_seconds))
        try:
            async with limited(self.session, timeout_seconds):
                return await self._met
        except TimeoutError:
            if not self._welcomed:
                waited = min(timeout_seconds, time.monotonic() - began)
                said = say_unreachable([self.address], waited, self.session.obstacle)
                raise HubUnreachable(said, self.address, self.session.refused) from None
            if self._occupied:
                raise self._refusal(self._occupied, "occupied") from None
            raise CollectiveTimeout(
                f"not all came within {timeout_seconds:g} s: {self._say_forming()}. Start those that are missing with "
                "the same hub, group and size, or wait longer (timeout_seconds)"
            ) from None
        finally:
            logs.cancel()

    def _refusal(self, text: str, reason: str) -> JoinRefused:
        return JoinRefused(f"{self.name} cannot join at {self.address}: {text}", reason)

    def _ask(self) -> None:
        if self.session.peer.state is PeerState.WELCOMED and not self._met.done():
            self.session.send(self._asked)

    async def _log_waiting(self, timeout_seconds: float) -> None:
        began, seconds = time.monotonic(), PATIENCE_SECONDS
        while True:
            await asyncio.sleep(seconds)
            waited, seconds = time.monotonic() - began, SAY_AGAIN_SECONDS
            obstacle = f": {self.session.obstacle}" if self.session.obstacle else ""
            what = self._say_forming() if self._welcomed else f"no broker answers at {self.address} yet{obstacle}"
            logger.warning("%s waits (%.0f s of at most %g): %s", self.name, waited, timeout_seconds, what)

    def _say_forming(self) -> str:
        asked, forming = self._asked, self._forming
        here = f"{list_names(forming.here)} {'is' if len(forming.here) == 1 else 'are'} here"
        return f"of the group {asked.group!r} of {asked.size} processes {here}, {forming.missing} missing"

    def _join_refused(self, refused: Refused) -> bool:
        """Take a refusal while the group meets. A place may be held by a process that is dead, and not known to be."""
        now = time.monotonic()
        if refused.reason == "unknown":
            return False
        if refused.reason == "occupied" and now < self._occupied_until:
            self._occupied, self._occupied_until = refused.text, min(self._occupied_until, now + OCCUPIED_SECONDS)
            asyncio.get_running_loop().call_later(BEAT_SECONDS, self._ask)
        elif not self._met.done():
            self._met.set_exception(self._refusal(refused.text, refused.reason))
        return True

    # ------------------------------------------------------------------ the session's listener

    def on_changed(self) -> None:
        """Each new connection asks for the place."""
        self._ask()

    def on_message(self, message: Message, frames: Sequence[Buffer]) -> bool:
        match message:
            case Welcome():
                self._welcomed = True
                return False
            case Forming():
                self._forming, self._occupied, self._occupied_until = message, "", math.inf
            case Group() if not self._met.done():
                self._machine.comes_again = False
                self._met.set_result(message)
            case Refused() if not self._met.done():
                return self._join_refused(message)
            case Refused(reason, text):
                if reason == "unknown":
                    return False
                self._tell(lambda listener: listener.on_sent_away(text))
            case GroupLost():
                self._tell(lambda listener: listener.on_group_lost(message))
            case Relay(rank):
                self._tell(lambda listener: listener.on_relayed(rank, list(frames)))
                self.session.send(Relayed(rank, 1))
            case Relayed(rank, messages):
                self._relays.arrived(rank, messages)
            case ReducedChunk(key) if self._reductions.window.count(key):
                self._tell(lambda listener: listener.on_relayed(HUB, list(frames)))
                self._reductions.arrived(key)
        return True

    def on_ended(self, reason: str, text: str, error: ZmqTrainError) -> None:
        """The hub is lost for good."""
        if not self._met.done():
            self._met.set_exception(self._refusal(text, "protocol" if reason == "garbage" else reason))
        self._hub_gone(text)

    def on_failed(self, error: ZmqTrainError) -> None:
        if not self._met.done():
            self._met.set_exception(error)
        self._hub_gone(str(error))

    def _hub_gone(self, why: str) -> None:
        if self.there:
            self.there = False
            self._relays.clear()
            self._reductions.clear()
            self._tell(lambda listener: listener.on_hub_gone(why))

    def _tell(self, call: Callable[[GroupListener], object]) -> None:
        if self._listener is None:
            self._early.append(call)
        else:
            call(self._listener)

    # ------------------------------------------------------------------ the group that has met

    def listen(self, listener: GroupListener) -> None:
        """Call this listener from now on, first for all that has happened since the group met."""
        self._listener = listener
        for call in self._early:
            call(listener)
        self._early.clear()

    def heard(self) -> bool:
        """Return whether the hub was heard since this was last asked."""
        before, self._messages_heard = self._messages_heard, self.session.messages_received
        return self._messages_heard > before

    def send(self, message: Message) -> None:
        if self.there:
            self.session.send(message)

    async def all_relayed(self) -> None:
        """Wait until all messages through the hub have arrived, or the hub is lost."""
        while self.there and not self._relays.idle:
            await self._relays.moved.wait()

    def relay(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Send a message to a rank through the hub, when the window has room for it."""
        if self.there:
            size = sum(memoryview(frame).nbytes for frame in frames)
            self._relays.send(rank, size, Relay(rank, size), frames)

    def forget(self, rank: int) -> None:
        self._relays.forget(rank)

    def reduce(self, chunk: HubChunk, frames: Sequence[Buffer], size: int) -> None:
        """Have the hub reduce a chunk, when the window has room for it. size: of the group."""
        if self.there:
            self._reductions.window.nbytes = window_bytes(size)
            total = sum(memoryview(frame).nbytes for frame in frames)
            self._reductions.send(chunk.key, total, ReduceChunk(chunk.key, chunk.op, chunk.dtype, total), frames)

    async def leave(self, reason: str = "", linger_seconds: float = LEAVE_LINGER_SECONDS) -> None:
        """Say goodbye, unless the hub is lost, and close the channel."""
        self.session.linger_seconds = linger_seconds
        self.session.leave(reason)
        await self.session.wait_closed()


# ---------------------------------------------------------------------- how the group meets


@dataclass(frozen=True)
class Meeting:
    """A group that has met: the socket to which the others connect, the connection to the hub, and this process's keys
    within the group, if its hub has keys."""

    router: RouterChannel
    hub: GroupConnection
    group: Group
    keys: CurveKeys | None = field(default=None, repr=False)


@dataclass
class Rendezvous:
    """A group's meeting at the broker at `hub`. listen: as in `open_port`; the rest as the hub has it.

    If the hub has keys, the processes let in nobody but each other, by keys made for this group alone.
    """

    hub: str
    name: str
    asked: JoinGroup
    timeout_seconds: float
    listen: str
    hub_key: bytes | None
    pair: CurveKeys | None = field(repr=False)
    _router: RouterChannel = field(init=False, repr=False)

    async def meet(self) -> Meeting:
        """Bind, connect to the hub, and wait for the others. Raises as `open_port`."""
        own = CurveKeys.generate() if self.hub_key is not None else None
        bound = self.listen or _address_towards(self.hub)
        router = self._router = RouterChannel(bound, keys=own, admission=None if own is None else Admission())
        connection = GroupConnection(self, self.hub, self.name)
        key, token = own.public.decode() if own is not None else "", secrets.token_hex(16)
        address = self.asked.address or public_address(bound, router.address, self.hub)
        asked = replace_fields(self.asked, address=address, key=key, token=token)
        try:
            return Meeting(router, connection, await connection.meet(asked, self.timeout_seconds), own)
        except BaseException:
            await connection.leave()
            await router.close(0.0)
            raise

    def dial(self, address: str, peer: PeerId) -> Channel:
        """Connect to the hub of the group (a `Dialer`); the channel shares the threads of the router."""
        return DealerChannel(address, peer=peer, keys=self.pair, server_key=self.hub_key, beside=self._router)


def _address_towards(hub: str) -> str:
    """Return the address to listen at: that of the interface by which this machine reaches the hub.

    Raises ConfigError for an invalid address of the hub.
    """
    host, port = parse_address(hub)
    if is_loopback(hub):
        return f"tcp://{'[::1]' if ':' in host else '127.0.0.1'}:0"
    here = local_address(host, port)
    if not here:
        raise ConfigError(f"no way leads from here to {host}: check the address of the hub and this machine's network")
    return f"tcp://{f'[{here}]' if ':' in here else here}:0"
