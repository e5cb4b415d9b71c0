"""A broker in this thread (`serve`) or in a thread of its own (`BrokerThread`), and the watch over its key folder.

asyncio begins and ends here, so that callers need no event loop.  What keeps a broker from starting (address,
checkpoint, settings) is raised to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from zmqtrain.averaging.aggregator import TakeLeaves
from zmqtrain.broker.broker import Broker, BrokerOptions, BrokerStatistics
from zmqtrain.broker.checkpoint import MODEL_FILE, Keeper, RunFolders, merge_parts, new_run, part_file
from zmqtrain.broker.core import BrokerAccess, ShardsBeside
from zmqtrain.broker.standby import Registration, ShardPlace, Standby, StandbyPlace, TakeoverState
from zmqtrain.checkpoint.folder import every_from_text
from zmqtrain.checkpoint.model_files import Beginning
from zmqtrain.core.errors import CheckpointError, ConfigError, HubUnreachable, JoinRefused
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId
from zmqtrain.monitor.recorder import BrokerRecorder
from zmqtrain.planning.rules import canonical
from zmqtrain.protocol.hosting import ANSWER_SECONDS, OPEN_SECONDS, TRY_SECONDS
from zmqtrain.protocol.messages import Roster
from zmqtrain.session.environment import clock
from zmqtrain.transport.address import (
    OpenPort,
    connectable_host,
    local_address,
    parse_address,
    public_address,
    split_key,
    why_unanswered,
    with_key,
)
from zmqtrain.transport.admission import Admission
from zmqtrain.transport.key_folder import HUB, KeyFolder, LentKeys, Stamp
from zmqtrain.transport.pacing import LinkShare
from zmqtrain.transport.service_manager import ServiceManager
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import CurveKeys

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
FAREWELL_SECONDS = 0.5
"""Between the message to a revoked peer and the end of its connection, so that it can read the message."""
REGISTER_SECONDS = 0.5
"""Between two attempts of a shard that is taken over to register with the first broker."""
AGAIN_SECONDS = 5.0
"""Between the failure of what is begun for a shard, and its next beginning."""
REACH_SECONDS = 10.0
"""Within this time the first broker's machine must reach the broker of a shard that a node serves."""
BESIDE = ("checkpoint_every", "checkpoint_keep", "keys")
"""The options of a first broker that those beside it have too."""
START_SECONDS = 60.0
STOP_SECONDS = 90.0


class KeyWatcher:
    """Watches the folder of authorised keys of a channel, in the channel's loop.

    Rule 1: from the moment of a look, nothing that a revoked key has signed is received; the peer is told why, then its
    connections are cut.  No other peer is affected.  Rule 2: a folder that cannot be read changes nothing; a warning
    says so.
    """

    def __init__(self, channel: RouterChannel, folder: KeyFolder | LentKeys, host: _Host) -> None:
        self._channel, self._folder, self._host = channel, folder, host
        self._stamp: Stamp | None = None
        self._trouble = ""
        self._gone: dict[str, str] = {}  # keys that were revoked and not cut yet, with their names

    async def run(self) -> None:
        """Look for ever; what one look fails to do is done by the next."""
        while True:
            try:
                await self.look()
            except Exception as error:
                if repr(error) != self._trouble:
                    self._trouble = repr(error)
                    logger.exception("the keys could not be looked at; it is tried again every %.0f s", LOOK_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Look once: admit the keys that are there, and cut those that are not."""
        try:
            stamp = await asyncio.to_thread(self._folder.stamp)
            if stamp is None or (stamp == self._stamp and not self._gone):
                return
            names = await asyncio.to_thread(self._folder.authorised)
        except (OSError, ConfigError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("the folder of keys cannot be read (%s): the authorised keys stay as they are", error)
            return
        first = self._stamp is None
        gone = self._channel.admit(names)
        if not first or gone:
            count = len(names) - 1
            logger.info("%d key%s authorised now", count, " is" if count == 1 else "s are")
        self._gone |= gone
        self._stamp = stamp
        self._host.authorised(names)
        for key, name in self._gone.items():
            text = f"its key, {name}, was revoked"
            for peer in self._channel.peers_with(key):
                self._host.dismiss(peer, f"{text}; ask the operator of the hub for another (zmqtrain keys new)")
            logger.warning("the key of %s was revoked", name)
        if self._gone:
            await asyncio.sleep(FAREWELL_SECONDS)
            for key in list(self._gone):
                self._channel.cut(key)
                del self._gone[key]
        self._trouble = ""


class RouterAccess(BrokerAccess):
    """The rights of peers by the keys with which they came in. folder: of authorised keys; pair: with which this broker
    comes to others."""

    connects = True

    def __init__(self, channel: RouterChannel, folder: KeyFolder | LentKeys | None, pair: CurveKeys | None) -> None:
        self._channel, self._folder, self._pair = channel, folder, pair

    @property
    def turned_away(self) -> int:
        return self._channel.turned_away

    def has_hub_keys(self, peer: PeerId) -> bool:
        return self._folder is None or self._channel.name_of(peer) == HUB

    def key_name(self, peer: PeerId) -> str:
        return self._channel.name_of(peer)

    def host_of(self, peer: PeerId) -> str:
        return self._channel.host_of(peer)

    def is_operator(self, peer: PeerId) -> bool:
        """Return whether a peer has the hub's own keys, or, where there are no keys, is on this machine."""
        return self._channel.is_of_this_machine(peer) if self._folder is None else self.has_hub_keys(peer)

    def dial(self, address: str, peer: PeerId) -> Channel:
        server_key = None if self._pair is None else self._pair.server or self._pair.public
        return DealerChannel(address, peer=peer, keys=self._pair, server_key=server_key)


class ServeOptions(TypedDict, total=False):
    """Options of `serve` and `BrokerThread`.

    keys: the folder of authorised keys, looked at every second, or what a node lends; of a pair alone, every peer that
    knows its public key may come in; None: every peer that reaches the address.
    checkpoint, checkpoint_every, checkpoint_keep, run, watch, events, share, beginning: as in `BrokerOptions`; of
    `RunFolders` the run's own.  watch's last roster says how the run ended.
    place: where this broker belongs if it is not the first of its run's brokers; it takes the settings from the first.
    hosting: as the first of several, have nodes serve the other shards (not where keys are a pair alone); what they
    leave, and what none of them serves, is served here, and the model is whole here when this broker ends.
    """

    keys: CurveKeys | KeyFolder | LentKeys | None
    checkpoint: Path | RunFolders | None
    checkpoint_every: str
    checkpoint_keep: int
    run: str
    watch: Callable[[Roster], None] | None
    events: BrokerRecorder | None
    share: LinkShare | None
    place: ShardPlace | None
    beginning: Beginning | None
    hosting: bool


def serve(
    address: str,
    settings: RunSettings | None,
    *,
    ready: Callable[[Broker], None] = lambda broker: None,
    interrupted: Callable[[int], None] | None = None,
    standby: StandbyPlace | None = None,
    following: Callable[[Standby], None] = lambda standby: None,
    manager: ServiceManager | None = None,
    **options: Unpack[ServeOptions],
) -> BrokerStatistics:
    """Run a broker in this thread until the run is over or it is stopped; return its last figures.

    settings: of the run; None with a place or a standby.  ready: called in the broker's loop once it listens.
    interrupted: called at each SIGINT or SIGTERM, and at a SIGHUP if it is the first signal, with their number; the
    first stops the broker (in the main thread only; None leaves signals alone, and an ignored SIGHUP stays ignored).
    standby: the broker that this one follows until it takes over (settings are then that one's); if it never does, the
    figures have version -1.  following: called in its loop once the first has answered.
    manager: the service manager that hears when the broker serves, that its loop goes on, and when it stops.
    Raises ConfigError, AddressInUse, CheckpointError, HubUnreachable (no first broker), and the error that ended it.
    """
    host = _Host(address, settings, standby, options, ready, following, interrupted, manager or ServiceManager())
    return asyncio.run(host.run())


@dataclass
class _Host:
    """One call of `serve`, whose arguments it has.

    follower: the standby that runs, until it takes over.  broker: the one that runs, if it has begun.  names: the keys
    that come in, None: they are not read yet, or there are none.
    """

    address: str
    settings: RunSettings | None
    standby: StandbyPlace | None
    options: ServeOptions
    ready: Callable[[Broker], None]
    following: Callable[[Standby], None]
    interrupted: Callable[[int], None] | None
    manager: ServiceManager
    registration: Registration | None = None
    follower: Standby | None = None
    broker: Broker | None = None
    beside: _Beside | None = None
    names: Mapping[str, str] | None = None

    async def run(self) -> BrokerStatistics:
        if self.settings is not None:
            canonical(self.settings)  # refused before anybody can connect
        keys, first = self.options.get("keys"), self.options.get("place") is None and self.standby is None
        folder = keys if isinstance(keys, KeyFolder | LentKeys) else None
        pair = keys.hub(make=first) if isinstance(keys, KeyFolder | LentKeys) else keys
        outwards = pair if folder is None else folder.outwards
        channel = RouterChannel(self.address, keys=pair, admission=None if folder is None else Admission())
        beside = [] if folder is None else [asyncio.create_task(KeyWatcher(channel, folder, self).run())]
        if self.manager.listens:
            beside.append(asyncio.create_task(self._report()))
        try:
            return await self._live(channel, RouterAccess(channel, folder, outwards))
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _report(self) -> None:
        """Report to the service manager for ever, in the loop: a loop that hangs does not feed the watchdog."""
        while True:
            self.manager.alive(self._status())
            await asyncio.sleep(self.manager.interval_seconds)

    def _status(self) -> str:
        if self.broker is not None:
            hub = self.broker.hub
            nodes = f"{hub.nodes} node{'' if hub.nodes == 1 else 's'}"
            return f"{hub.run}: {nodes}, {f'version {hub.version}' if hub.version >= 0 else 'nobody has trained yet'}"
        if self.follower is not None:
            return f"{self.follower.follower.run}: the standby of its broker"
        return "starting"

    def dismiss(self, peer: PeerId, why: str) -> None:
        if self.broker is not None:
            self.broker.dismiss(peer, why)

    def authorised(self, names: Mapping[str, str]) -> None:
        self.names = names
        if self.broker is not None:
            self.broker.authorised(names)

    async def _live(self, channel: RouterChannel, access: RouterAccess) -> BrokerStatistics:
        try:
            takeover = None
            if self.standby is not None and (takeover := await self._follow(channel, access, self.standby)) is None:
                return await self._end_as_standby(channel)
            if (broker := await self._make_broker(channel, access, takeover)) is None:
                return await self._end_as_standby(channel)
            self.broker = broker
            self._stop_at_signals(broker)
            self.ready(broker)
            self.manager.ready(self._status())
            await broker.run()
        finally:
            if self.beside is not None:
                await asyncio.to_thread(self.beside.close)
            if self.registration is not None:
                await asyncio.to_thread(self.registration.close)
            await channel.close(0.0)  # or the port would stay open without a broker
        if (watch := self.options.get("watch")) is not None:
            watch(broker.admin.describe(broker.hub.roster(clock.monotonic())))  # how the run ended
        return broker.statistics()

    async def _end_as_standby(self, channel: RouterChannel) -> BrokerStatistics:
        assert self.standby is not None and self.follower is not None
        await asyncio.to_thread(self.follower.keep)
        await channel.close()
        return BrokerStatistics(-1, 0, 0, 0, 0, 0, 0.0, 0, 0)

    async def _follow(self, channel: RouterChannel, access: RouterAccess, place: StandbyPlace) -> TakeoverState | None:
        public = place.address or public_address(self.address, channel.address, place.where)
        folder, keeper = self.options.get("checkpoint"), None
        if place.keeps and isinstance(folder, Path):
            every = every_from_text(self.options.get("checkpoint_every", ""))
            keeper = Keeper(folder, every, self.options.get("checkpoint_keep", 3))
        self.follower = follower = Standby(channel, place, public, access, keeper)
        channel.remember(follower.owner_of)
        self._stop_at_signals(follower)

        def follows(standby: Standby) -> None:
            self.following(standby)
            self.manager.ready(self._status())

        return await follower.run(follows)

    async def _make_broker(
        self, channel: RouterChannel, access: RouterAccess, takeover: TakeoverState | None
    ) -> Broker | None:
        """Return the broker to run; None if this standby is ended before it could serve what it has taken over."""
        settings, place = self.settings if takeover is None else takeover.settings, self.options.get("place")
        name, term, shard = self.options.get("run") or new_run(), 0, 0
        if takeover is not None:
            name, term, shard = str(takeover.state["run"]), int(takeover.state["term"]), int(takeover.state["shard"])
            if shard:
                assert settings is not None and self.follower is not None
                public = self.follower.address
                place = ShardPlace(shard=shard, shards=settings.shards, first=takeover.first, address=public)
                if not await self._register_again(place, access):
                    return None
        elif place is not None:
            public = place.address or public_address(self.address, channel.address, place.first)
            told: Callable[[Mapping[str, str]], None] | None = None
            if isinstance(keys := self.options.get("keys"), LentKeys):  # its port has another pair than the hub's
                public, told = with_key(public, keys.hub().public), keys.change
            self.registration = Registration(place, public, access, told)
            await self.registration.welcomed()
            settings, name, shard = self.registration.settings, self.registration.peer.run, place.shard
        assert settings is not None, "a broker has settings, or another that gives them"
        checkpoint = self.options.get("checkpoint")
        own = ("keys", "place", "hosting")
        options: dict[str, Any] = {key: one for key, one in self.options.items() if key not in own}
        options |= {"run": name, "registration": self.registration, "takeover": takeover}
        keys = self.options.get("keys")
        # of a pair alone nobody knows whose keys may come in where a node serves
        alone = settings.shards == 1 or shard or isinstance(keys, CurveKeys)
        hosting = self.options.get("hosting", False) and not alone
        if isinstance(checkpoint, RunFolders):
            folder = checkpoint.folder(name, shard, 1 if hosting else settings.shards, term)
            options |= {"checkpoint": folder, "own_folder": True}
        beside: _Beside | None = None
        if hosting:
            kept: dict[str, Any] = {}
            kept |= {name: one for name, one in self.options.items() if name in BESIDE}
            beside = options["beside"] = _Beside(self.address, channel, options.get("checkpoint"), kept)
        broker = Broker(channel, settings, BrokerOptions(**options), access)
        if beside is not None:
            beside.of(broker)
            assert broker.hub.hosting is not None
            if keys is not None:
                broker.hub.hosting.keys = self.names
            self.beside = beside  # not before: `_live` closes it, and a broker that cannot be made has begun none
        channel.remember(broker.hub.records.owner)
        return broker

    async def _register_again(self, place: ShardPlace, access: RouterAccess) -> bool:
        """Register the shard of a broker that is taken over: once the first has forgotten that one, or is back. Return
        whether it is registered; not if this standby is ended before."""
        assert self.follower is not None
        while not self.follower.stopped:
            self.registration = Registration(place, place.address, access)
            try:
                await self.registration.welcomed()
                return True
            except (JoinRefused, HubUnreachable) as error:
                if isinstance(error, JoinRefused) and error.reason != "shard":
                    raise
                logger.info("this shard is not registered with the first broker yet, and tries again: %s", error)
            await asyncio.to_thread(self.registration.close)
            await asyncio.sleep(REGISTER_SECONDS)
        return False

    def _stop_at_signals(self, running: Broker | Standby) -> None:
        """Have each signal that ends a broker call `interrupted`, if there is one, and stop what runs."""
        if self.interrupted is None:
            return
        loop, interrupted, count = asyncio.get_running_loop(), self.interrupted, 0

        def signalled(number: signal.Signals) -> None:
            nonlocal count
            if number is signal.SIGHUP and count:  # a shell and the system may both send it
                return
            count += 1
            running.stop()
            self.manager.stopping(self._status())
            interrupted(count)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                loop.add_signal_handler(number, signalled, number)


class BrokerThread:
    """A broker, or a standby, in a thread of this process: what `zmqtrain local` and the demo start beside their nodes.

    address: where it listens; "tcp://127.0.0.1:0" takes a free port, and `address` says which.  settings: of the run.
    keys: the pair of the hub, a `CurveKeys`; without it every peer that reaches the address may come in.
    checkpoint: a folder, where it saves the run, and from which it goes on.
    Used in a `with` block, it is stopped at the end of the block. `roster` is the newest list of who is in the run.
    Its other options and its errors are those of `serve`; `watch` is called in the broker's thread.
    """

    def __init__(
        self,
        address: str,
        settings: RunSettings | None,
        standby: StandbyPlace | None = None,
        **options: Unpack[ServeOptions],
    ) -> None:
        self.roster: Roster | None = None
        self.failure: BaseException | None = None
        self._watch = options.get("watch")
        self._broker: Broker | None = None
        self._running: Broker | Standby | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        options["watch"] = self._see

        def live() -> None:
            try:
                serve(address, settings, ready=self._ready, standby=standby, following=self._follows, **options)
            except BaseException as error:
                self.failure = error
            self._started.set()

        self._thread = threading.Thread(target=live, name="zmqtrain-broker", daemon=True)
        self._thread.start()
        self._started.wait(START_SECONDS)
        if self._running is None and self.failure is not None:
            raise self.failure

    def _ready(self, broker: Broker) -> None:
        self._broker = broker
        self._follows(broker)

    def _follows(self, running: Broker | Standby) -> None:
        self._loop, self._running = asyncio.get_running_loop(), running
        self._started.set()

    def _see(self, roster: Roster) -> None:
        self.roster = roster
        if self._watch is not None:
            self._watch(roster)

    @property
    def broker(self) -> Broker:
        """The broker; only its `statistics`, `settings` and channel's address may be read from another thread."""
        assert self._broker is not None
        return self._broker

    @property
    def address(self) -> str:
        return self.broker.channel.address

    @property
    def running(self) -> bool:
        """False once the run is over, or the broker has failed."""
        return self._thread.is_alive()

    def stop_soon(self) -> None:
        """Have the broker stop; do not wait for it."""
        if self._loop is not None and not self._loop.is_closed() and self._thread.is_alive():
            assert self._running is not None
            self._loop.call_soon_threadsafe(self._running.stop)

    def wait(self) -> None:
        """Wait until the broker has ended."""
        self._thread.join()

    def give_leaves(self, take: TakeLeaves, moment: float) -> None:
        """Call `take` with what was published here at a moment, if that is known: in a thread that is the
        broker's or the standby's, or in this one after their end."""
        if self._running is None or self._loop is None:
            return
        if self.running:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._running.give_leaves, take, moment)
        elif self._running.aggregator is not None:
            self._running.aggregator.give_leaves(take, moment)

    def take_over(self) -> None:
        """Have a standby take over, if it is in step."""
        if isinstance(self._running, Standby) and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._running.take_over)

    def stop(self) -> None:
        """Stop the broker: it says goodbye and saves; raise what ended it if it failed. Safe to call twice."""
        self.stop_soon()
        self._thread.join(STOP_SECONDS)
        if self.failure is not None:
            raise self.failure

    def __enter__(self) -> BrokerThread:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()


class _Beside(ShardsBeside):
    """Brokers of other shards, and standbys of those that nodes serve, each in a thread.

    bind, channel: of the first broker.  folder: where each saves, in shard-I; None: nothing is saved.  kept: how often,
    and how many checkpoints stay, as in `ServeOptions`.
    """

    def __init__(self, bind: str, channel: RouterChannel, folder: Path | None, kept: Mapping[str, Any]) -> None:
        self._bind, self._channel = f"{bind.rpartition(':')[0]}:0", channel
        self._folder, self._kept, self._closing = folder, dict(kept), False
        self._threads: dict[int, threading.Thread] = {}
        self._running: dict[int, BrokerThread] = {}
        self._numbers: dict[int, int] = {}  # by shard, of the newest that was begun: only that one counts
        self._lock = threading.Lock()
        self._open: OpenPort | None = None

    def of(self, broker: Broker) -> None:
        """Begin for this one, the first; in its loop."""
        self._broker, self._loop = broker, asyncio.get_running_loop()

    @property
    def _shards(self) -> int:
        return self._broker.hub.settings.shards

    def serve(self, shard: int) -> None:
        place = ShardPlace(shard=shard, shards=self._shards, first=self._own_address())
        logger.info("no node serves shard %d: this machine does", shard)
        self._begin(shard, place, None)

    def follow(self, shard: int, address: str) -> None:
        logger.info("shard %d is served at %s, and followed here", shard, split_key(address)[0])
        self._begin(shard, None, StandbyPlace(first=address, keeps=True, wait_seconds=REACH_SECONDS))

    def take(self, shard: int) -> None:
        if (running := self._running.get(shard)) is not None:
            running.take_over()

    def give_leaves(self, take: TakeLeaves, shards: Iterable[int], moment: float) -> None:
        with self._lock:
            here = [self._running[shard] for shard in shards if shard in self._running]
        for running in here:
            running.give_leaves(take, moment)

    def open_port(self) -> int:
        try:
            if self._open is None or self._open.seconds_left < ANSWER_SECONDS:
                self._open = OpenPort(self._bind, OPEN_SECONDS)
            return self._open.number
        except OSError as error:
            logger.warning("this machine opens no port for its nodes to try: %s", error)
            return 0

    def try_port(self, peer: PeerId, port: int) -> None:
        host = self._channel.host_of(peer)

        def attempt() -> None:
            address = f"tcp://{connectable_host(host)}:{port}"
            self._call(self._broker.port_tried, peer, bool(host) and not why_unanswered(address, TRY_SECONDS))

        threading.Thread(target=attempt, name="zmqtrain-port", daemon=True).start()

    def close(self) -> None:
        """End all of them, each of which saves; then join the parts of the model, where all are here: the better of the
        last version and the best."""
        self._closing = True
        for running in list(self._running.values()):
            with contextlib.suppress(Exception):  # it was told in the log
                running.stop()
        for thread in self._threads.values():
            thread.join(STOP_SECONDS)
        first = self._broker.folder
        if self._folder is None or first is None or self._broker.aggregator.version < 0 or self._shards <= 1:
            return
        parts = [first / part_file(0, self._shards), *(self._folder / f"shard-{n}" for n in range(1, self._shards))]
        whole, keeper = True, self._broker.keeper
        try:
            merge_parts(parts, first / MODEL_FILE)
        except CheckpointError as error:
            logger.warning("the last version of the model is not whole here: %s", error)
            whole = False
        keeper.ask_for_parts(self.give_leaves)
        try:
            keeper.choose(first / MODEL_FILE, whole)
        except CheckpointError as error:
            logger.warning("the best version of the model is not saved: %s", error)

    def _begin(self, shard: int, place: ShardPlace | None, standby: StandbyPlace | None) -> None:
        with self._lock:
            number = self._numbers[shard] = self._numbers.get(shard, 0) + 1
            before = self._running.pop(shard, None)
        if before is not None:  # of a broker that was lost before the run began
            before.stop_soon()
        arguments, name = (shard, number, place, standby), f"zmqtrain-shard-{shard}"
        self._threads[shard] = threading.Thread(target=self._live, args=arguments, name=name, daemon=True)
        self._threads[shard].start()

    def _live(self, shard: int, number: int, place: ShardPlace | None, standby: StandbyPlace | None) -> None:
        folder = None if self._folder is None else self._folder / f"shard-{shard}"
        failure: BaseException | None
        try:
            running = BrokerThread(self._bind, None, standby, place=place, checkpoint=folder, **self._kept)
            with self._lock:
                if counts := self._numbers[shard] == number:
                    self._running[shard] = running
            if self._closing or not counts:
                running.stop()
            elif standby is not None:
                self._call(self._broker.shard_reached, shard, standby.first)
            running.wait()
            failure = running.failure
        except Exception as error:
            failure = error
        if failure is None or self._numbers[shard] != number:
            return
        logger.warning("shard %d: %s", shard, failure)
        self._call(self._failed, shard, number, failure, standby)

    def _failed(self, shard: int, number: int, failure: BaseException, standby: StandbyPlace | None) -> None:
        """Begin again soon what has failed, unless its broker is sent away, or another has begun."""
        if self._numbers[shard] != number:
            return
        unreached = "" if standby is None or not isinstance(failure, HubUnreachable) else standby.first
        if not (unreached and self._broker.shard_out_of_reach(shard, unreached)):
            self._loop.call_later(AGAIN_SECONDS, self._again, shard, number)

    def _call(self, what: Callable[..., object], *arguments: object) -> None:
        """Have the first broker's loop call this, unless all ends."""
        if not self._closing:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(what, *arguments)

    def _again(self, shard: int, number: int) -> None:
        if self._broker.hub.hosting is not None and self._numbers[shard] == number:
            self._broker.hub.hosting.ended(shard)

    def _own_address(self) -> str:
        """Return the first broker's address as its nodes reach it."""
        nodes = (peer for peer, member in self._broker.hub.members.items() if member.is_node)
        host = next(filter(None, map(self._channel.host_of, nodes)), "")
        own, port = local_address(host, 1) if host else "", parse_address(self._channel.address)[1]
        return f"tcp://{connectable_host(own)}:{port}" if own else self._channel.address
