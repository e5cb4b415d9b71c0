"""Lines between brokers: a standby, its hub's side, and a broker's registration with the first."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from safetensors.numpy import load, save

from zmqtrain.averaging.aggregator import Aggregator, Released, TakeLeaves
from zmqtrain.averaging.compiling import compile_codecs
from zmqtrain.broker.checkpoint import Keeper
from zmqtrain.broker.core import BrokerAccess, BrokerCore, EffectHandlers, MessageHandlers
from zmqtrain.core.errors import (
    ChannelClosed,
    ConfigError,
    FramingError,
    HubUnreachable,
    PeerLost,
    SteppedDown,
    ZmqTrainError,
)
from zmqtrain.core.interfaces import HubChannel
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer, Lane, PeerId, Version
from zmqtrain.protocol.effects import Deliver, Hear, Replicate
from zmqtrain.protocol.fencing import Stamp, begin_incarnation
from zmqtrain.protocol.framing import decode_head, encode_message
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.limits import LONG_HEAD_BYTES
from zmqtrain.protocol.members import Claim
from zmqtrain.protocol.messages import Aggregate, Hello, Host, Message, Promote, Replica, printable
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.standby import TAKES_OVER, Follower, Patience, PrimaryLease, TakeoverPolicy
from zmqtrain.session.environment import Suspension, clock, environment, spawn
from zmqtrain.session.hub_session import ConnectDeadline, HubSession, NullListener
from zmqtrain.session.rate_limited_logger import RateLimitedLogger
from zmqtrain.transport.address import say_unreachable, split_key

logger = logging.getLogger(__name__)

PAUSED_SECONDS = 2.0
"""Nodes that are here let a hub go on without its standby within this time."""
CLOSE_BEHIND = 2
"""The nodes wait for a standby that is at most so many versions behind, until it is in step."""
POLL_SECONDS = 0.05
SAY_AGAIN_SECONDS = REMIND_SECONDS = 60.0
MOST_RELEASES = 4096
CLOSE_SECONDS = 60.0
NOT_OF_THE_HUB = ("crew", "owners", "in_step", "number", "tenure_number")
"""The parts of books that are not in the state of a hub."""


def _cut(data: bytes) -> list[Buffer]:
    view = memoryview(data)
    return [view[start : start + MAX_FRAME_BYTES] for start in range(0, len(view), MAX_FRAME_BYTES)]


def pack_replica(state: dict[str, Any], aggregator: Aggregator) -> tuple[list[Buffer], int]:
    """Return the frames of a copy of a hub, and how many of them are its state. It is all of it in memory once more."""
    head = _cut(json.dumps(state).encode())
    arrays = _cut(save(aggregator.arrays())) if aggregator.version >= 0 else []
    return [*head, *arrays], len(head)


def unpack_replica(frames: Sequence[Buffer], state: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state and the arrays that `pack_replica` packed. Raises ValueError or SafetensorError."""
    arrays = b"".join(frames[state:])
    try:
        plain = json.loads(b"".join(frames[:state]))
    except RecursionError as error:
        raise ValueError("its state is nested too deeply") from error
    return plain, load(arrays) if arrays else {}


class _Waiting(NamedTuple):
    """An announcement that waits for the standby. since: when it was due; size: as in `StandbyService.announce`."""

    version: Version
    since: float
    action: Callable[[], None]
    size: int


class StandbyService:
    """Keeps a hub's standby in step: a copy of the hub, then every release before the nodes hear of it.

    Rule 1: what lets nodes hear of a version goes through `announce`, in order, and waits until the standby holds that
    version.  Rule 2: a standby that nodes wait for too long (`protocol.standby.Patience`) is sent away; it comes again,
    is copied again, and stays out of step for a while.  Rule 3: after losing its standby a hub asks at its address
    whether that has taken over, and then steps down; until it knows, nodes hear of nothing new unless more than half of
    the electorate are here (`protocol.standby.PrimaryLease`).
    """

    def __init__(self, core: BrokerCore) -> None:
        self._core, self._hub = core, core.hub
        self.messages: MessageHandlers = {}
        self.effects: EffectHandlers = {
            Hear: lambda effect: self.holds(effect.version, core.now()),
            Replicate: lambda effect: spawn(self._replicate(effect.peer)),
        }
        self._waiting: deque[_Waiting] = deque()
        self._patience, self._flushed_at = Patience(), 0.0
        self._announced: Version = self._hub.version
        self._held: Version = -1
        self._closing_since: float | None = None
        self._in_step_at = 0.0
        self._rival: _Rival | None = None
        self._paused = False

    def announced(self, version: Version, size: int = 0) -> Suspension[None]:
        """Return what waits until nodes may hear of a version, in the order in which it is awaited.

        size: the bytes of it that the standby is sent.
        """
        return Suspension(lambda resume: self.announce(version, lambda: resume(None), self._core.now(), size))

    def announce(self, version: Version, action: Callable[[], None], now: float, size: int = 0) -> None:
        """Call `action` as soon as nodes may hear of a version."""
        self._waiting.append(_Waiting(version, now, action, size))
        self._flush(now)

    def replicate(self) -> None:
        """Send the standby that is here, if any, a copy of the hub as it is once the codec thread has come to it."""
        if (standby := self._hub.standby) is not None:
            spawn(self._replicate(standby.peer))

    async def _replicate(self, standby: PeerId) -> None:
        version = self._hub.version
        frames, state = await self._core.codec(pack_replica, self._hub.state(), self._core.aggregator)
        if standby in self._hub.members:
            self.copied()
            if not self._core.downlink.send_replica(standby, version, frames, state):
                self._core.reconnect(standby)

    def copied(self) -> None:
        """A copy is being sent to the standby, which replaces the versions that it held."""
        self._held = -2

    def go_back(self, version: Version) -> None:
        """The run goes on from this version; later ones that the standby holds are of an abandoned course."""
        self._held, self._announced, self._closing_since = -2, version, None

    def holds(self, version: Version, now: float) -> None:
        self._held = max(self._held, version)
        if (standby := self._hub.standby) is not None:
            self._hub.lease.returned(standby.address)
        may_be = standby is not None and self._patience.may_be_in_step(now)
        if may_be and not self._hub.lease.follows and standby is not None:
            if version >= self._announced:
                if self._closing_since is not None:
                    self._patience.waited(now - self._closing_since, 0, now)
                self._closing_since, self._in_step_at = None, now
                self._patience.in_step(now)
                logger.info("the standby at %s is in step, at version %d", standby.address, version)
                self._core.carry_out(self._hub.in_step(now))
            elif version >= self._announced - CLOSE_BEHIND and self._closing_since is None:
                self._closing_since = now
        self._flush(now)

    def tick(self, now: float) -> None:
        """Announce what may be announced now, give up a standby that is too slow, look for one that has taken over."""
        standby = self._hub.standby
        if standby is None:
            self._closing_since = None
        elif (since := self._waits_since()) is not None and self._patience.is_used_up(
            now - since, self._waiting[0].size if self._waiting else 0, now
        ):
            pause = self._patience.out_of_step(now)
            self._closing_since = None
            text = (
                f"the nodes have waited too long for it, now {now - since:.1f} s for one version: the run goes on "
                f"without it, and it is in step again in {pause:.0f} s at the earliest"
            )
            self._core.reconnect(standby.peer, text)
        elif self._held >= 0 and not self._hub.lease.follows:  # it may be in step by now
            self.holds(self._held, now)
        self._flush(now)
        self._ask_rival()
        paused = self._hub.standby is None and bool(self._waiting) and now - self._waiting[0].since > PAUSED_SECONDS
        if paused and not self._paused:
            logger.warning(
                "the standby at %s is gone and may have taken over: too few of the nodes that it knows are here, or "
                "this broker itself was started again. Nodes hear of nothing new here until it is back. If its PC does "
                "not come back, and nothing is served there, start another: zmqtrain-broker --standby",
                self._hub.lease.standby,
            )
        self._paused = paused

    def close(self) -> None:
        if self._rival is not None:
            self._rival.close()
            self._rival = None

    def _waits_since(self) -> float | None:
        """Return since when nodes wait for the standby that is here; None: they do not."""
        if self._closing_since is not None:
            return self._closing_since
        if not (self._waiting and self._hub.lease.follows):
            return None  # announcements wait for nodes then, not for a standby that is being copied
        return max(self._waiting[0].since, self._in_step_at, self._flushed_at)

    def _may(self, version: Version) -> bool:
        if self._hub.lease.follows:
            return version <= self._held
        return self._closing_since is None and self._hub.lease.holds

    def _flush(self, now: float) -> None:
        while self._waiting and self._may(self._waiting[0].version):
            if self._hub.lease.follows and (since := self._waits_since()) is not None:
                self._patience.waited(now - since, self._waiting[0].size, now)
            one, self._flushed_at = self._waiting.popleft(), now
            self._announced = max(self._announced, one.version)
            one.action()

    def _ask_rival(self) -> None:
        """Raise SteppedDown if a standby that is not here has taken over."""
        lease = self._hub.lease
        if lease.ended:
            raise self._stepped_down(self._hub.term + 1)
        address = "" if self._hub.standby is not None else lease.standby
        if self._rival is not None and self._rival.address != address:
            self.close()
        if self._rival is None and address and self._core.access.connects:
            self._rival = _Rival(self._core.access, address, self._hub.run, self._hub.term)
        if self._rival is not None and (term := self._rival.peer.term) > self._hub.term:
            raise self._stepped_down(term)

    def _stepped_down(self, term: int) -> SteppedDown:
        address = self._hub.lease.standby
        return SteppedDown(
            f"the standby at {address} has taken over {self._hub.run} (term {term}; this broker has term "
            f"{self._hub.term}): it is served there, and no longer here. To have this one as the standby of that: "
            f"start it again with --standby {address}"
        )


class _Rival:
    """The session of a first broker with its lost standby's address: a standby that has taken over welcomes it with a
    higher term."""

    def __init__(self, access: BrokerAccess, address: str, run: str, term: int) -> None:
        self.address = address
        peer = PeerId(f"first#{secrets.token_hex(4)}")
        self.peer = Peer(peer, "the first broker", role="observer", incarnation=1)
        self.peer.run, self.peer.term = run, term
        self._link = HubSession(access, self.peer, address, NullListener(), meanwhile="The run is served on")
        self._link.start()

    def close(self) -> None:
        self._link.close("")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a broker other than the first belongs. first: the address of the first.

    address: at which nodes reach this one; "": this machine's address on the way to the first.  wait_seconds: how long
    to wait for the first's answer.
    """

    first: str
    address: str = ""
    wait_seconds: float = 30.0

    @property
    def where(self) -> str:
        """Where the first is, for people."""
        return split_key(self.first)[0]


@dataclass(frozen=True, kw_only=True)
class StandbyPlace(Place):
    """The place of a standby, which follows the broker at `first`. takeover_seconds: how long that must be gone.
    keeps: it saves what it follows in its checkpoint folder, as if it served."""

    takeover_seconds: float = 3.0
    keeps: bool = False


@dataclass(frozen=True, kw_only=True)
class ShardPlace(Place):
    """The place of one of several brokers. shard: 1 to shards - 1."""

    shard: int
    shards: int


@dataclass(frozen=True)
class TakeoverState:
    """What a broker takes over: a hub's state, with its new term, and the arrays that go with it. first: where the
    first broker is, "" if that is the one that is taken over."""

    state: dict[str, Any]
    settings: RunSettings
    aggregator: Aggregator
    first: str = ""


class _FirstSession(NullListener):
    """A broker's session with the first broker of its run, or a standby's with the one that it follows, in a thread of
    its own.

    meanwhile: what goes on without the first.
    """

    def __init__(self, peer: Peer, place: Place, access: BrokerAccess, meanwhile: str) -> None:
        self._peer, self._first, self._wait_seconds = peer, place.first, place.wait_seconds
        self.stopped = False
        self._link = HubSession(access, peer, place.first, self, meanwhile=meanwhile)

    async def _answered(self, if_refused: str, unanswered: str) -> None:
        """Wait for the first's Welcome. Raises HubUnreachable, and what has failed."""
        deadline = ConnectDeadline(self._link, self._wait_seconds, clock.monotonic())
        while self._peer.settings is None and not self.stopped:
            if self.failure is not None:
                raise self.failure
            if deadline.is_over(clock.monotonic()):
                if self._link.refused:
                    text = say_unreachable([self._first], clock.monotonic() - deadline.began, self._link.obstacle)
                    raise HubUnreachable(f"{text}. {if_refused}", self._first, self._link.refused)
                raise HubUnreachable(unanswered, self._first)
            await asyncio.sleep(POLL_SECONDS)

    def _log_when_back(self, text: str) -> None:
        if self._peer.state is PeerState.WELCOMED and self._link.trouble[0]:
            logger.info(text, split_key(self._first)[0])
            self._link.trouble = ("", "")


class Standby(_FirstSession):
    """A standby on `channel`, which nodes reach at `address`: it follows a broker, and may take over.

    Rule 1: it has a line to that broker and the port at which nodes will look for it, both from the start.
    Rule 2: it applies what it receives at once, so that a takeover takes no longer than the decision.  Rule 3: until
    then it answers each peer at its port that it is a standby, and counts that peer as one that misses its broker.
    keeper: saves what is followed, as a broker would; None: nothing is saved before a takeover.
    """

    def __init__(
        self,
        channel: HubChannel,
        place: StandbyPlace,
        address: str,
        access: BrokerAccess,
        keeper: Keeper | None = None,
    ) -> None:
        self.place, self.address, self._keeper = place, address, keeper
        self._keeps = False  # whether it has begun to
        peer = PeerId(f"standby#{secrets.token_hex(4)}")
        self.follower = Follower(peer, "the standby", address, begin_incarnation(0, time.time_ns()))
        super().__init__(self.follower, place, access, "It may be taken over from")
        self._policy = TakeoverPolicy(self.follower, place.takeover_seconds)
        self._channel, self._access = channel, access
        self._hub: Hub | None = None
        self._aggregator: Aggregator | None = None
        self._log = RateLimitedLogger(logger)
        self._said, self._said_at = "", 0.0
        self._ordered = False
        self._worker = environment().executor("zmqtrain-replica", MOST_RELEASES, self)

    # ------------------------------------------------------------------ living

    async def run(self, ready: Callable[[Standby], None] = lambda standby: None) -> TakeoverState | None:
        """Follow the first; return its state once this standby must take over, None once the run is over or `stop`ped.

        ready: called once the first has answered.  Raises HubUnreachable, JoinRefused, and errors of this broker.
        """
        self._link.start()
        receiving = asyncio.create_task(self._receive_forever())
        try:
            await self._answered(
                "A standby has a copy of its broker's folder of keys (--keys)",
                f"no broker answers at {self.place.where} (waited {self.place.wait_seconds:g} s), and a standby must "
                "have heard it once: start that first, check the address, the port and the firewall; one with keys "
                "answers only brokers with its keys folder (--keys)",
            )
            if not self.stopped:
                ready(self)
            while not (self.stopped or self.follower.over):
                if self.failure is not None:
                    raise self.failure
                if receiving.done():
                    receiving.result()
                if self._is_due(clock.monotonic()):
                    return await self._take_over()
                await asyncio.sleep(POLL_SECONDS)
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
        self.stopped = True

    def take_over(self) -> None:
        """Take over as soon as this standby is in step; call it in its loop."""
        self._ordered = True

    def keep(self) -> None:
        """Save what this standby holds, and its part of the model, after `run`. Raises CheckpointError."""
        if self._keeper is not None and self._hub is not None and self._keeps:
            self._keeper.close(self._hub.state(), self._aggregator)

    @property
    def aggregator(self) -> Aggregator | None:
        """What has been published, as far as this standby knows; only its thread, or nobody, works with it."""
        return self._aggregator

    def give_leaves(self, take: TakeLeaves, moment: float) -> None:
        """Call `take` with what was published at a moment, if that is known, in the thread that applies it and is not
        far behind; in any thread."""
        self._worker.submit(
            lambda: self._aggregator.give_leaves(take, moment) if self._aggregator is not None else None
        )

    def _is_due(self, now: float) -> bool:
        self._policy.promoted |= self._ordered and self.follower.in_step
        due = self._policy.is_due(now)
        lost_at = self.follower.lost_at
        if not due and lost_at is not None and now - lost_at >= self.place.takeover_seconds:
            why = self._policy.obstacle(now) or "fewer than half of the nodes that it had miss it"
            if why != self._said or now - self._said_at >= SAY_AGAIN_SECONDS:
                self._said, self._said_at = why, now
                text = "the broker at %s is gone, and this standby does not take over: %s (to have it take over "
                logger.warning(text + "all the same: zmqtrain promote %s)", self.place.where, why, self.address)
        return due

    async def _take_over(self) -> TakeoverState:
        follower = self.follower
        if not await asyncio.to_thread(self._close, TAKES_OVER):  # all that has come is applied
            raise ZmqTrainError(
                f"this standby still applies what came from the broker at {self.place.where}, after {CLOSE_SECONDS:g} "
                "s, and cannot take over: start that again, with its checkpoint"
            )
        if self.failure is not None:
            raise self.failure
        if self._hub is None or self._aggregator is None:
            raise ConfigError(
                f"this standby has no copy of the broker at {self.place.where} yet, and cannot take over: start that "
                "again, with its checkpoint"
            )
        self._aggregator.gate.is_open = (
            True  # the first's has seen the run's deltas, this one only what was made of them
        )
        books = {name: part for name, part in follower.books.items() if name not in NOT_OF_THE_HUB}
        for peer, incarnation in follower.electorate.items():
            if incarnation > self._hub.records.incarnation(peer):
                self._hub.records.greet(peer, incarnation)
            self._hub.records.own(peer, follower.owners.get(peer, ""))
        state = {**self._hub.state(), **books, "term": follower.term + 1, "tenure": PrimaryLease().state()}
        logger.warning(
            "this standby takes over %s at version %d, as term %d: %s",
            follower.run,
            self._hub.version,
            follower.term + 1,
            "it was told to" if self._policy.promoted else f"the broker at {self.place.where} is gone, say its nodes",
        )
        first = follower.shards[0] if follower.shard else ""
        if self._keeper is not None:
            self._keeper.release_folder()  # the broker takes it
        return TakeoverState(state, self._hub.settings, self._aggregator, first)

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
        is_operator = isinstance(message, Hello | Promote) and self._access.is_operator(peer)
        if isinstance(message, Promote):
            text = "an operator, %s, tells this standby to take over"
            self._log.warning(text if is_operator else "%s may not tell this standby to take over", printable(peer))
        answer = self._policy.receive(peer, stamp, message, is_operator, clock.monotonic())
        if answer is not None:
            self._channel.send(peer, Lane.CONTROL, [encode_message(*answer)])

    # ------------------------------------------------------------------ Listener (network thread)

    def on_changed(self) -> None:
        self._log_when_back("the broker at %s is followed again")

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """Apply a copy of the first, or a release, in a thread of its own."""
        if isinstance(deliver.announcement, Replica):
            job = partial(self._copy, deliver.announcement, frames)
        elif isinstance(deliver.announcement, Aggregate):
            job = partial(self._release, deliver.announcement, frames)
        else:
            return
        if not self._worker.submit(job):
            self.on_failed(ZmqTrainError(f"this standby cannot keep up: {MOST_RELEASES} releases wait"))

    # ------------------------------------------------------------------ the thread that applies

    def on_job_failed(self, error: BaseException) -> None:
        if not isinstance(error, ZmqTrainError):
            logger.error("what the broker that is followed sent cannot be applied", exc_info=error)
            error = ZmqTrainError(f"what the broker that is followed sent cannot be applied: {error!r}")
        self.on_failed(error)

    def _copy(self, replica: Replica, frames: list[Buffer]) -> None:
        settings = self.follower.settings
        assert settings is not None, "a copy comes after Welcome"
        shard, first = self.follower.shard, next(iter(self.follower.shards), "")
        state, arrays = unpack_replica(frames, replica.state)
        if settings.shards == AUTO_SHARDS:  # the copy says what is decided by now
            settings = replace(settings, shards=int(state["settings"]["shards"]))
        aggregator = Aggregator(settings, shard)
        hub = Hub(settings, release_rule_from_spec(settings.release), self.follower.run, shard=shard, first=first)
        hub.restore(state)
        hub.lease = PrimaryLease()  # the standby of the one that is followed is this one
        if hub.version >= 0:
            aggregator.plan(hub.model)
            aggregator.restore(hub.version, arrays)
            aggregator.came(clock.monotonic())
        self._hub, self._aggregator = hub, aggregator
        if self._keeper is not None and hub.version >= 0:
            if self._keeps:
                self._keeper.save(hub.state(), aggregator)
            else:
                self._keeper.inherit(hub, aggregator)
            self._keeps = True
        if hub.version >= 0:
            compile_codecs(aggregator.layout, settings)  # after it is kept: it may take over by now
        alone = f": of {settings.shards} shards, shard {shard} alone" if settings.shards > 1 else ""
        logger.info("holding %s at version %d, copied from %s%s", hub.run, hub.version, self.place.where, alone)

    def _release(self, aggregate: Aggregate, frames: list[Buffer]) -> None:
        assert self._hub is not None and self._aggregator is not None, "a release comes after a copy"
        parts, first = [], 0
        for count in aggregate.frames:
            parts.append(tuple(frames[first : first + count]))
            first += count
        self._aggregator.replay(Released(aggregate.version, aggregate.codec, aggregate.fragments, tuple(parts)))
        self._aggregator.came(clock.monotonic())
        self._hub.replay(aggregate.version, aggregate.landed, aggregate.samples)
        if self._keeper is not None and self._keeps and self._keeper.is_due(self._hub.version):
            self._keeper.save(self._hub.state(), self._aggregator)


class Registration(_FirstSession):
    """A broker's session with the first: it registers a shard, and gets the run's name, its settings and its end.

    Rule 1: settings live in one place: the other brokers take all of them from the first.  Rule 2: when the first is
    lost, the shard is still served, and the log says what it waits for.  Rule 3: the first's word that the run is over,
    or its refusal, ends this broker.  address: at which nodes reach this broker.
    authorised: called in the session's thread with the keys that come in at the first, where a node serves this shard.
    """

    messages = (Host,)

    def __init__(
        self,
        place: ShardPlace,
        address: str,
        access: BrokerAccess,
        authorised: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        self._authorised = authorised
        self.place, self.address = place, address
        self.name = f"broker {place.shard}/{place.shards}"
        peer = PeerId(f"broker-{place.shard}#{secrets.token_hex(4)}")
        claim = Claim(place.shard, address)
        self.peer = Peer(peer, self.name, role=claim, incarnation=1, addresses=(place.first,))
        super().__init__(self.peer, place, access, "Its shard is served on")
        self._reminded_at = self._not_over_at = clock.monotonic()
        self._link.start()

    def on_message(self, message: Message, frames: Sequence[Buffer]) -> bool:
        """See NullListener: take the keys that come in."""
        assert isinstance(message, Host)
        if self._authorised is not None:
            self._authorised(message.keys)
        return True

    async def welcomed(self) -> None:
        """Wait for the first's answer. Raises HubUnreachable, ConfigError, JoinRefused (the shard is taken)."""
        first, shards = self.place.first, self.place.shards
        await self._answered(
            "All brokers have a copy of the first one's folder of keys (--keys)",
            f"the first broker does not answer at {first} (waited {self.place.wait_seconds:g} s). Start it: "
            f"zmqtrain-broker --shard 0/{shards} with the settings of the run; check the address, the port and the "
            "firewall",
        )
        if self.settings.shards != shards:
            raise ConfigError(
                f"the first broker, at {first}, divides the model among {self.settings.shards} brokers: --shard "
                f"{self.place.shard}/{self.settings.shards}, not /{shards}"
            )

    @property
    def settings(self) -> RunSettings:
        assert self.peer.settings is not None
        return self.peer.settings

    @property
    def planned(self) -> RunSettings | None:
        """The newest settings of the first, of which nothing is auto; None before it has answered."""
        timetable = self.peer.timetable
        return None if timetable is None else timetable.newest

    def ends(self, nodes: int) -> bool:
        """Return whether this broker must end: the run is over, and its nodes have left, or had time to.

        nodes: how many are here.  Logs now and then what it waits for.  Raises why this broker cannot go on.
        """
        if self.failure is not None:
            raise self.failure
        now = clock.monotonic()
        if not self.peer.over:
            self._not_over_at = now
        if self.peer.state is not PeerState.CONNECTING:
            self._reminded_at = now
        elif now - self._reminded_at >= REMIND_SECONDS:
            self._reminded_at = now
            logger.warning(
                "%s waits for the first broker at %s: new nodes cannot join, and the run cannot end, without it",
                self.name,
                self.place.first,
            )
        return self.peer.over and (not nodes or now - self._not_over_at > self.settings.lost_seconds)

    def close(self) -> None:
        self._link.close("")

    def on_changed(self) -> None:
        self._log_when_back(f"{self.name} is registered again with the first broker, at %s")
