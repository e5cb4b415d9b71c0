"""Be a standby alive: follow the first broker, and give what it held to a `Broker` once this one is the hub.

Rule 1: two lines: one to the first (a `HubLink`), and the port at which nodes will look for this broker; both are there
from the start.  Rule 2: what comes is applied as it comes, so that a takeover takes no longer than the decision.
Rule 3: whoever turns to this port before that is told that it is a standby, and counted as one who misses the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zmqtrain.averaging.aggregator import Aggregator, Released
from zmqtrain.broker.onlooker import Onlooker
from zmqtrain.broker.replicas import OpenLine, unpack_replica
from zmqtrain.core.errors import ChannelClosed, ConfigError, FramingError, HubUnreachable, PeerLost, ZmqTrainError
from zmqtrain.core.interfaces import HubChannel
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.fencing import Stamp, begin_incarnation
from zmqtrain.protocol.framing import decode_head, encode_message
from zmqtrain.protocol.head_sizes import LONG_HEAD_BYTES
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import Aggregate, Hello, Message, Snapshot
from zmqtrain.protocol.peer import PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.standby import TAKES_OVER, Follower, Succession, Tenure
from zmqtrain.protocol.standby_messages import Promote, Replica
from zmqtrain.protocol.words import words
from zmqtrain.session.link import HubLink
from zmqtrain.session.mailbox import Worker
from zmqtrain.session.patience import Patience
from zmqtrain.session.sparing import SparingLogger
from zmqtrain.transport.address import say_unreachable

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
SAY_AGAIN_SECONDS = 60.0
MOST_RELEASES = 4096
NOT_OF_THE_HUB = ("crew", "owners", "in_step", "number", "tenure_number")
"""What books say besides the state of a hub."""
CLOSE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class StandbyPlace:
    """Whom a standby follows. first: the address of the first broker.

    address: at which nodes reach the standby; "": what leads to the first from here.  takeover_seconds: how long the
    first must be gone.  wait_seconds: how long to wait for its first answer.
    """

    first: str
    address: str = ""
    takeover_seconds: float = 3.0
    wait_seconds: float = 30.0


@dataclass(frozen=True)
class Inheritance:
    """What a broker takes over: a hub's state, with its new term, and the arrays that go with it."""

    state: dict[str, Any]
    settings: RunSettings
    aggregator: Aggregator


class Standby(Onlooker):
    """A standby on `channel`, which nodes reach at `address`. open_line: how it reaches the first.

    is_operator: whether a peer may tell it to take over.
    """

    def __init__(
        self,
        channel: HubChannel,
        place: StandbyPlace,
        address: str,
        open_line: OpenLine,
        is_operator: Callable[[PeerId], bool],
    ) -> None:
        super().__init__()
        self.place, self.address = place, address
        peer = PeerId(f"standby#{secrets.token_hex(4)}")
        self.follower = Follower(peer, "the standby", address, begin_incarnation(0, time.time_ns()))
        self._succession = Succession(self.follower, place.takeover_seconds)
        self._channel, self._is_operator = channel, is_operator
        self._hub: Hub | None = None
        self._aggregator: Aggregator | None = None
        self._stopped = False
        self._log = SparingLogger(logger)
        self._said, self._said_at = "", 0.0
        self._worker = Worker("zmqtrain-replica", MOST_RELEASES, self._broken)
        self._link = HubLink(
            lambda: open_line(place.first, peer),
            self.follower,
            place.first,
            self,
            meanwhile="It may be taken over from",
        )

    # ------------------------------------------------------------------ living

    async def run(self, ready: Callable[[Standby], None] = lambda standby: None) -> Inheritance | None:
        """Follow until this standby is to be the hub: what it takes over. None: the run is over, or it was stopped.

        ready: called once the first has answered.  Raises HubUnreachable, JoinRefused, and what went wrong here.
        """
        self._link.start()
        receiving = asyncio.create_task(self._receive_forever())
        try:
            await self._wait_for_first()
            if not self._stopped:
                ready(self)
            while not (self._stopped or self.follower.over):
                if self.failure is not None:
                    raise self.failure
                if receiving.done():
                    receiving.result()
                if self._is_due(time.monotonic()):
                    return await self._take_over()
                await asyncio.sleep(LOOK_SECONDS)
            return None
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            await asyncio.to_thread(self._close)

    def owner_of(self, peer: PeerId) -> str:
        """Return the name of the key with which a peer came first to the broker that is followed; "" for none."""
        hub = self._hub
        return self.follower.owners.get(peer, "") or ("" if hub is None else hub.records.owner(peer))

    def stop(self) -> None:
        """End `run` soon; call it in its loop."""
        self._stopped = True

    async def _wait_for_first(self) -> None:
        patience = Patience(self.place.wait_seconds, time.monotonic(), lambda: bool(self._link.refused))
        while self.follower.settings is None and not self._stopped:
            if self.failure is not None:
                raise self.failure
            if patience.is_over(time.monotonic()):
                if self._link.refused:
                    text = say_unreachable([self.place.first], time.monotonic() - patience.began, self._link.obstacle)
                    text += ". A standby has a copy of the first broker's folder of keys (--keys)"
                    raise HubUnreachable(text, self.place.first, self._link.refused)
                raise HubUnreachable(
                    f"no broker answers at {self.place.first} (waited {self.place.wait_seconds:g} s), and a standby "
                    "must have heard it once: start that first, check the address, the port and the firewall; one with "
                    "keys answers only who has its keys folder (--keys)",
                    self.place.first,
                )
            await asyncio.sleep(LOOK_SECONDS)

    def _is_due(self, now: float) -> bool:
        due = self._succession.is_due(now)
        lost_at = self.follower.lost_at
        if not due and lost_at is not None and now - lost_at >= self.place.takeover_seconds:
            why = self._succession.obstacle(now) or "fewer than half of the nodes that it had miss it"
            if why != self._said or now - self._said_at >= SAY_AGAIN_SECONDS:
                self._said, self._said_at = why, now
                text = (
                    "the first broker, at %s, is gone, and this standby does not take over: %s (to have it take over "
                )
                logger.warning(text + "all the same: zmqtrain promote %s)", self.place.first, why, self.address)
        return due

    async def _take_over(self) -> Inheritance:
        follower = self.follower
        if not await asyncio.to_thread(self._close, TAKES_OVER):  # all that has come is applied
            raise ZmqTrainError(
                f"this standby still applies what came from the broker at {self.place.first}, after {CLOSE_SECONDS:g} "
                "s, and cannot take over: start that again, with its checkpoint"
            )
        if self.failure is not None:
            raise self.failure
        if self._hub is None or self._aggregator is None:
            raise ConfigError(
                f"this standby has no copy of the broker at {self.place.first} yet, and cannot take over: start that "
                "again, with its checkpoint"
            )
        self._aggregator.gate.open()  # the first's has seen the run's deltas, this one only what was made of them
        books = {name: part for name, part in follower.books.items() if name not in NOT_OF_THE_HUB}
        for peer, incarnation in follower.crew.items():
            if incarnation > self._hub.records.incarnation(peer):
                self._hub.records.greet(peer, incarnation)
            self._hub.records.own(peer, follower.owners.get(peer, ""))
        state = {**self._hub.state(), **books, "term": follower.term + 1, "tenure": Tenure().state()}
        logger.warning(
            "this standby takes over %s at version %d, as term %d: %s",
            follower.run,
            self._hub.version,
            follower.term + 1,
            "it was told to"
            if self._succession.promoted
            else f"the broker at {self.place.first} is gone, and its nodes say so",
        )
        assert follower.settings is not None
        return Inheritance(state, follower.settings, self._aggregator)

    def _close(self, reason: str = "") -> bool:
        self._link.close(reason)
        return self._worker.close(CLOSE_SECONDS)

    # ------------------------------------------------------------------ the port

    async def _receive_forever(self) -> None:
        while True:
            try:
                peer, _, frames = await self._channel.receive()
            except ChannelClosed:
                return
            if len(frames[0]) > LONG_HEAD_BYTES:  # no Hello, Promote, Heartbeat or Goodbye is so large
                continue
            with contextlib.suppress(FramingError, PeerLost, ZmqTrainError):
                self._take(peer, *decode_head(frames[0]))

    def _take(self, peer: PeerId, stamp: Stamp, message: Message) -> None:
        is_operator = isinstance(message, Hello | Promote) and self._is_operator(peer)
        if isinstance(message, Promote):
            text = "an operator, %s, tells this standby to take over"
            self._log.warning(text if is_operator else "%s tells this standby to take over, and may not", words(peer))
        answer = self._succession.receive(peer, stamp, message, is_operator, time.monotonic())
        if answer is not None:
            self._channel.send(peer, Lane.CONTROL, [encode_message(*answer)])

    # ------------------------------------------------------------------ Listener (network thread)

    def on_changed(self) -> None:
        """See Listener."""
        if self.follower.state is PeerState.WELCOMED and self._link.trouble[0]:
            logger.info("the first broker, at %s, is followed again", self.place.first)
            self._link.trouble = ("", "")

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """See Listener: a copy of the first, or a release."""
        if not self._worker.submit(lambda: self._apply(deliver.announcement, frames)):
            self.on_failed(ZmqTrainError(f"this standby cannot keep up: {MOST_RELEASES} releases wait"))

    # ------------------------------------------------------------------ the thread that applies

    def _broken(self, error: BaseException) -> None:
        if not isinstance(error, ZmqTrainError):
            logger.error("what the first broker sent cannot be applied", exc_info=error)
            error = ZmqTrainError(f"what the first broker sent cannot be applied: {error!r}")
        self.on_failed(error)

    def _apply(self, copy: Replica | Aggregate | Snapshot, frames: list[Buffer]) -> None:
        if isinstance(copy, Replica):
            self._copy(copy, frames)
        elif isinstance(copy, Aggregate):
            self._release(copy, frames)

    def _copy(self, replica: Replica, frames: list[Buffer]) -> None:
        settings = self.follower.settings
        assert settings is not None, "a copy comes after Welcome"
        aggregator = Aggregator(settings)
        hub = Hub(settings, release_rule_from_spec(settings.release), self.follower.run)
        state, arrays = unpack_replica(frames, replica.state)
        hub.restore(state)
        if hub.version >= 0:
            aggregator.plan(hub.model)
            aggregator.restore(hub.version, arrays)
        self._hub, self._aggregator = hub, aggregator
        logger.info("holding %s at version %d, copied from %s", hub.run, hub.version, self.place.first)

    def _release(self, aggregate: Aggregate, frames: list[Buffer]) -> None:
        assert self._hub is not None and self._aggregator is not None, "a release comes after a copy"
        parts, first = [], 0
        for count in aggregate.frames:
            parts.append(tuple(frames[first : first + count]))
            first += count
        self._aggregator.replay(Released(aggregate.version, aggregate.codec, aggregate.fragments, tuple(parts)))
        self._hub.replay(aggregate.version, aggregate.landed, aggregate.samples)
