"""A broker in this thread (`serve`) or in a thread of its own (`BrokerThread`), and its key folder."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from zmqtrain.broker.broker import Broker, BrokerStatistics
from zmqtrain.broker.checkpoint import RunFolders, new_run
from zmqtrain.broker.standby import MasterPlace, Registration, Standby, StandbyPlace
from zmqtrain.checkpoint.model_files import Beginning
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId
from zmqtrain.planning.rules import canonical
from zmqtrain.protocol.messages import Roster
from zmqtrain.session.events import BrokerEvents
from zmqtrain.transport.address import public_address
from zmqtrain.transport.admission import Admission
from zmqtrain.transport.key_folder import HUB, KeyFolder, Stamp
from zmqtrain.transport.pacing import LinkShare
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import CurveKeys

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
FAREWELL_SECONDS = 0.5
"""Between what a revoked peer is told and the end of its connection, so that it can read it."""


class KeyWatcher:
    """Looks at a folder of keys for a channel, in its loop.  dismiss: tells a peer, by name and why, to go."""

    def __init__(self, channel: RouterChannel, folder: KeyFolder, dismiss: Callable[[PeerId, str], None]) -> None:
        self._channel, self._folder, self._dismiss = channel, folder, dismiss
        self._stamp: Stamp | None = None
        self._trouble = ""
        self._gone: dict[str, str] = {}  # keys that were revoked and not cut yet, with their names

    async def run(self) -> None:
        """Look for ever, whatever goes wrong: what a look has not done is done by the next."""
        while True:
            try:
                await self.look()
            except Exception as error:
                if repr(error) != self._trouble:
                    self._trouble = repr(error)
                    logger.exception("the keys could not be looked at; it is tried again every %.0f s", LOOK_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Look once, and do what follows from it."""
        try:
            stamp = await asyncio.to_thread(self._folder.stamp)
            if stamp == self._stamp and not self._gone:
                return
            names = await asyncio.to_thread(self._folder.authorised)
        except (OSError, ConfigError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("the folder of keys cannot be read (%s): who was authorised stays so", error)
            return
        first = self._stamp is None
        gone = self._channel.admit(names)
        if not first or gone:
            count = len(names) - 1
            logger.info("%d key%s authorised now", count, " is" if count == 1 else "s are")
        self._gone |= gone
        self._stamp = stamp
        for key, name in self._gone.items():
            text = f"its key, {name}, was revoked"
            for peer in self._channel.peers_with(key):
                self._dismiss(peer, f"{text}; ask who runs the hub for another (zmqtrain keys new)")
            logger.warning("the key of %s was revoked", name)
        if self._gone:
            await asyncio.sleep(FAREWELL_SECONDS)
            for key in list(self._gone):
                self._channel.cut(key)
                del self._gone[key]
        self._trouble = ""


START_SECONDS = 60.0
STOP_SECONDS = 90.0


def serve(
    address: str,
    settings: RunSettings | None,
    *,
    keys: CurveKeys | KeyFolder | None = None,
    checkpoint: Path | RunFolders | None = None,
    checkpoint_every: str = "",
    checkpoint_keep: int = 3,
    run: str = "",
    ready: Callable[[Broker], None] = lambda broker: None,
    watch: Callable[[Roster], None] | None = None,
    interrupted: Callable[[int], None] | None = None,
    events: BrokerEvents | None = None,
    share: LinkShare | None = None,
    place: MasterPlace | None = None,
    standby: StandbyPlace | None = None,
    beginning: Beginning | None = None,
    following: Callable[[Standby], None] = lambda standby: None,
) -> BrokerStatistics:
    """Run a broker in this thread until the run is over or it is told to stop; return its last figures.

    keys: the folder that says who comes in, looked at every second; of a pair alone, whoever knows its public key does;
    None: whoever reaches the address.
    settings: of the run; None with a place.  place: what belongs to this broker if it is not the first of its run's
    masters; it takes the settings from the first.  checkpoint, checkpoint_every, checkpoint_keep: as of a `Broker`; of
    `RunFolders` the run's own.  run: the id of the run, if it is new; "": one is drawn.
    ready: called in the broker's loop once it listens.  watch: with every roster, the last one telling how it ended.
    interrupted: called at each SIGINT or SIGTERM, and at a SIGHUP if it is the first, with how many have come; the
    first stops the broker (in the main thread only; None leaves signals alone, and a SIGHUP that is ignored stays so).
    events: who is told what happens, as a `BrokerRecorder`.
    share: what training may use of this machine's port; None: all there is.
    standby: whom this broker follows until it takes over (settings are then that one's); if it never does,
    the figures have version -1.  following: called in its loop once the first has answered.
    beginning: the parameters that a new run begins with.
    Raises ConfigError, AddressInUse, CheckpointError, HubUnreachable (no first master), and whatever ended the broker.
    """

    folder = keys if isinstance(keys, KeyFolder) else None
    pair = keys.hub(make=place is None and standby is None) if isinstance(keys, KeyFolder) else keys
    living: list[Broker] = []

    def open_line(address: str, peer: PeerId) -> Channel:
        return DealerChannel.connect(address, peer=peer, keys=pair, server_key=None if pair is None else pair.public)

    def dismiss(peer: PeerId, why: str) -> None:
        for broker in living:
            broker.dismiss(peer, why)

    async def begin() -> BrokerStatistics:
        if settings is not None:
            canonical(settings)  # refused before anybody can connect
        channel = RouterChannel.bind(address, keys=pair, admission=None if folder is None else Admission())
        door = None if folder is None else asyncio.create_task(KeyWatcher(channel, folder, dismiss).run())
        try:
            return await live(channel)
        finally:
            if door is not None:
                door.cancel()
                await asyncio.gather(door, return_exceptions=True)

    async def live(channel: RouterChannel) -> BrokerStatistics:
        registration, inheritance = None, None

        def is_operator(peer: PeerId) -> bool:
            """Whether a peer is connected with the hub's own keys, or, where there are none, from this machine."""
            return channel.is_of_this_machine(peer) if folder is None else channel.name_of(peer) == HUB

        try:
            if standby is not None:
                public = standby.address or public_address(address, channel.address, standby.first)
                follower = Standby(channel, standby, public, open_line, is_operator)
                channel.remember(follower.owner_of)
                if interrupted is not None:
                    _stop_at_signals(follower, interrupted)
                if (inheritance := await follower.run(following)) is None:
                    await channel.close()
                    return BrokerStatistics(-1, 0, 0, 0, 0, 0, 0.0, 0, 0)
            if place is not None:
                public = place.address or public_address(address, channel.address, place.first)
                registration = Registration(place, public)
                await registration.welcomed()
            given = settings if inheritance is None else inheritance.settings
            agreed = registration.settings if registration is not None else given
            assert agreed is not None, "a broker has settings, or another that gives them"
            name, term = run or new_run(), 0
            if registration is not None:
                name = registration.run
            elif inheritance is not None:
                name, term = str(inheritance.state["run"]), int(inheritance.state["term"])
            if isinstance(checkpoint, RunFolders):
                shard = 0 if place is None else place.shard
                folder_of_run: Path | None = checkpoint.folder(name, shard, agreed.masters, term)
            else:
                folder_of_run = checkpoint
            broker = Broker(
                channel,
                agreed,
                folder_of_run,
                checkpoint_every,
                checkpoint_keep,
                watch,
                events,
                share,
                registration,
                open_line,
                inheritance,
                lambda peer: folder is None or channel.name_of(peer) == HUB,
                channel.name_of,
                lambda: channel.turned_away,
                name,
                isinstance(checkpoint, RunFolders),
                is_operator,
                beginning,
            )
            channel.remember(broker.hub.records.owner)
        except BaseException:
            if registration is not None:
                registration.close()
            await channel.close(0.0)
            raise
        if interrupted is not None:
            _stop_at_signals(broker, interrupted)
        living.append(broker)
        try:
            ready(broker)
        except BaseException:  # or the port would be open, with nobody behind it
            if registration is not None:
                registration.close()
            await channel.close(0.0)
            raise
        try:
            await broker.run()
        finally:
            if registration is not None:
                await asyncio.to_thread(registration.close)
        if watch is not None:
            watch(broker.describe(broker.hub.roster(time.monotonic())))  # how the run ended
        return broker.statistics()

    return asyncio.run(begin())


def _stop_at_signals(broker: Broker | Standby, interrupted: Callable[[int], None]) -> None:
    loop, count = asyncio.get_running_loop(), 0

    def signalled(number: signal.Signals) -> None:
        nonlocal count
        if number is signal.SIGHUP and count:  # a shell and the system may both send it
            return
        count += 1
        broker.stop()
        interrupted(count)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(number, signalled, number)


class BrokerThread:
    """A broker in a thread of this process: what `zmqtrain local` and the demo start beside their nodes.

    watch: called in the broker's thread with every roster.  The others: as for `serve`.
    Raises what `serve` raises before the broker listens.
    """

    def __init__(
        self,
        address: str,
        settings: RunSettings | None,
        *,
        keys: CurveKeys | KeyFolder | None = None,
        checkpoint: Path | None = None,
        checkpoint_every: str = "",
        checkpoint_keep: int = 3,
        run: str = "",
        watch: Callable[[Roster], None] = lambda roster: None,
        events: BrokerEvents | None = None,
        share: LinkShare | None = None,
        place: MasterPlace | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        self.roster: Roster | None = None
        self.failure: BaseException | None = None
        self._watch = watch
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()

        def live() -> None:
            try:
                serve(
                    address,
                    settings,
                    keys=keys,
                    checkpoint=checkpoint,
                    checkpoint_every=checkpoint_every,
                    checkpoint_keep=checkpoint_keep,
                    run=run,
                    ready=self._ready,
                    watch=self._see,
                    events=events,
                    share=share,
                    place=place,
                    beginning=beginning,
                )
            except BaseException as error:
                self.failure = error
            finally:
                self._started.set()

        self._thread = threading.Thread(target=live, name="zmqtrain-broker", daemon=True)
        self._thread.start()
        self._started.wait(START_SECONDS)
        if self._broker is None and self.failure is not None:
            raise self.failure

    def _ready(self, broker: Broker) -> None:
        self._loop, self._broker = asyncio.get_running_loop(), broker
        self._started.set()

    def _see(self, roster: Roster) -> None:
        self.roster = roster
        self._watch(roster)

    @property
    def broker(self) -> Broker:
        """The broker; only its `statistics`, `settings` and channel's address may be read from another thread."""
        assert self._broker is not None
        return self._broker

    @property
    def address(self) -> str:
        """The address that nodes of this machine connect to."""
        return self.broker.channel.address

    @property
    def running(self) -> bool:
        """False once the run is over, or the broker has failed."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the broker: it says goodbye and saves; raise what ended it if it failed. Safe to call twice."""
        if self._loop is not None and not self._loop.is_closed() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.broker.stop)
        self._thread.join(STOP_SECONDS)
        if self.failure is not None:
            raise self.failure

    def __enter__(self) -> BrokerThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
