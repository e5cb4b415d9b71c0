"""Let sessions of peers loose on a whole broker, but for its socket, its clock and its threads: a target of fuzzing.

Rule 1: the very code that lives behind the socket (`Broker`, and all that it holds) runs here, in one thread, in its
own order; jobs of the codec thread are done between two messages.
Rule 2: whatever peers say, the broker goes on; what it did not think of (`could not be taken`) is a bug, even if it
costs its sender alone; whatever it says can be sent, and read by a peer.
Rule 3: what it holds is bounded, and when all have gone nothing of them is held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from zmqtrain.broker import admin as admin_room
from zmqtrain.broker import broker as broker_room
from zmqtrain.broker import core as core_room
from zmqtrain.broker import deltas as deltas_room
from zmqtrain.core.errors import ChannelClosed, ChannelFull, CodecError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.parameter_server import parameters as parameters_room
from zmqtrain.protocol.framing import ProtocolVersionError, decode_message
from zmqtrain.protocol.messages import (
    Aggregate,
)
from zmqtrain.session import downlink as downlink_room
from zmqtrain.session.environment import CodecExecutor
from zmqtrain.transport.pacing import check_message

from fuzz_inputs import read_session
from fuzz_sessions import PEERS, SETTINGS

__all__ = ["run_broker"]

DEAF = PEERS[7]
"""Reads no more than so much of what it is sent."""
DEAF_READS = 30


class _Clock:
    """What the broker's rooms take for the module `time`."""

    thread_time = staticmethod(time.thread_time)
    process_time = staticmethod(time.process_time)

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """The seconds of this session."""
        return self.now

    time = monotonic

    def time_ns(self) -> int:
        """The same, in ns."""
        return int(1e9 * self.now)


class _Jobs(CodecExecutor):
    """A codec thread that works when it is told to."""

    def __init__(self, name: str, stop: asyncio.Event) -> None:
        self.failure = None
        self.waiting: list[tuple[Callable[[], object], Callable[[Any], None] | None]] = []

    seconds = 0.0

    def submit(self, work: Callable[[], object], resume: Callable[[Any], None] | None, values: int = 0) -> None:
        """See CodecExecutor."""
        self.waiting.append((work, resume))

    def on_job_failed(self, error: BaseException) -> None:
        """See CodecExecutor."""
        raise AssertionError("the broker's own work failed") from error

    def work(self) -> None:
        """Do all that waits here."""
        while self.waiting:
            work, resume = self.waiting.pop(0)
            result: object
            try:
                result = work()
            except CodecError as error:
                result = error
            if resume is not None:
                resume(result)


def _work(made: Sequence[_Jobs]) -> None:
    """Do all that waits in any thread of a broker's, and what comes of it."""
    while any(jobs.waiting for jobs in made):
        for jobs in made:
            jobs.work()


class _Wire:
    """A HubChannel on which a session is said."""

    address = "tcp://127.0.0.1:1"

    def __init__(self, next_message: Callable[[], tuple[PeerId, Lane, list[Buffer]] | None]) -> None:
        self._next = next_message
        self.sent = dict.fromkeys(PEERS, 0)
        self.landed: set[tuple[str, int]] = set()
        self.versions: set[int] = set()

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Buffer]) -> None:
        """See HubChannel."""
        check_message(frames)
        try:
            message = decode_message(frames[0])
        except ProtocolVersionError:
            return  # a refusal in the version of a peer that speaks another
        self.sent[peer] += 1
        if peer == DEAF and self.sent[peer] > DEAF_READS:
            raise ChannelFull("it does not read")
        if isinstance(message, Aggregate) and message.version not in self.versions:
            self.versions.add(message.version)
            twice = self.landed.intersection(message.landed)
            assert not twice and len(set(message.landed)) == len(message.landed), f"{twice} landed twice"
            self.landed.update(message.landed)

    async def receive(self) -> tuple[PeerId, Lane, list[Buffer]]:
        """See HubChannel."""
        if (said := self._next()) is None:
            raise ChannelClosed("the session is over")
        return said


class _Noted(logging.Handler):
    """Keeps what the broker did not think of."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the exception of a record that has one."""
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


@contextmanager
def _rooms(clock: _Clock, made: list[_Jobs]) -> Iterator[_Noted]:
    """Give the broker's rooms this clock and jobs without a thread (which `made` then holds), and note what it logs as
    an exception."""
    rooms = (broker_room, core_room, deltas_room, admin_room, downlink_room, parameters_room)
    before = [(room, name, getattr(room, name)) for room in rooms for name in ("time", "clock") if hasattr(room, name)]
    jobs, noted = CodecExecutor, _Noted()
    logger = logging.getLogger(core_room.__name__)
    propagates, level = logger.propagate, logger.level

    def make_jobs(name: str, stop: asyncio.Event) -> _Jobs:
        made.append(_Jobs(name, stop))
        return made[-1]

    try:
        for room, name, _ in before:
            setattr(room, name, clock)
        broker_room.CodecExecutor = core_room.CodecExecutor = make_jobs  # type: ignore[misc, assignment]
        logger.propagate = False
        logger.setLevel(logging.ERROR)
        logger.addHandler(noted)
        yield noted
    finally:
        for room, name, own in before:
            setattr(room, name, own)
        broker_room.CodecExecutor = core_room.CodecExecutor = jobs  # type: ignore[misc]
        logger.removeHandler(noted)
        logger.propagate = propagates
        logger.setLevel(level)


_loop: asyncio.AbstractEventLoop | None = None


def run_broker(data: bytes) -> int:
    """Let one session loose on a fresh broker; return how many frames it had. Raises whatever is a bug."""
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    return _loop.run_until_complete(_session(data))


async def _session(data: bytes) -> int:
    seed, records = read_session(data)
    clock, count, jobs = _Clock(), 0, list[_Jobs]()
    with _rooms(clock, jobs) as noted:
        told = iter(records)

        def next_message() -> tuple[PeerId, Lane, list[Buffer]] | None:
            nonlocal count
            _work(jobs)
            for who, frames in told:
                clock.now += 0.01
                if frames:
                    count += len(frames)
                    lane = Lane.BULK if len(frames) > 1 else Lane.CONTROL
                    return PEERS[who % len(PEERS)], lane, list(frames)
                clock.now += (0.04, 0.6, 2.1, 4.0)[who % 4]
                broker.tick(clock.now)
                _work(jobs)
            return None

        wire = _Wire(next_message)
        broker = broker_room.Broker(wire, RunSettings.from_dict(SETTINGS[seed % len(SETTINGS)]))
        try:
            await broker.receiver.receive_forever()
            if noted.errors:
                raise noted.errors[0]
            _check_bounds(broker)
            _part(broker, clock, jobs)
            if noted.errors:
                raise noted.errors[0]
        finally:
            for alarm in (broker.downlink._again, broker.downlink.uploads._again):
                alarm.set(inf, lambda: None)
    return count


def _check_bounds(broker: Any) -> None:
    hub = broker.hub
    assert hub.members.keys() <= set(PEERS)
    pending = [peer for peer, _ in hub.rounds.pending]
    for peer, member in hub.members.items():
        most = max(64, hub.timetable.at(hub.version).offers_in_flight)
        assert len(member.open) + pending.count(peer) <= most, "more publishes of a node wait than may"
        assert len(hub.units.ledger._in_hand.get(peer, ())) <= 4096, "more units dealt than a node needs"
    assert len(broker.uploads.whole) <= len(pending) + len(hub.members) + sum(len(m.open) for m in hub.members.values())
    assert broker.downlink.uploads._credits.in_flight_bytes >= 0
    assert broker.downlink._lines.keys() | broker.downlink.uploads._lines.keys() <= set(PEERS)


def _part(broker: Any, clock: _Clock, jobs: Sequence[_Jobs]) -> None:
    """All leave: then nothing is held of them but what has landed, and what will."""
    hub = broker.hub
    for _ in range(3):
        for peer in PEERS:
            broker.core.carry_out(hub.gone(peer, "the session is over", clock.now))
        _work(jobs)
    assert not hub.members and not (broker.downlink._lines or broker.downlink.uploads._lines), (
        "lines of peers that have gone"
    )
    held: dict[str, Any] = {
        "grants": broker.downlink.uploads._credits._transfers,
        "bytes in flight": broker.downlink.uploads._credits.in_flight_bytes,
        "limits": broker.downlink._limits,
        "relays": broker.groups.relays._waiting,
        "groups": hub.groups._complete or hub.groups._forming or hub.groups._in,
        "reductions": broker.groups.reducers._groups,
        "requests": broker.parameters._announced or broker.parameters._incoming or broker.parameters._outgoing,
        "clients": broker.parameters.machine.clients,
        "units": hub.units.ledger._in_hand,
    }
    assert not any(held.values()), {name: one for name, one in held.items() if one}
    left = {peer for peer, _ in hub.rounds.pending}
    assert {peer for peer, _ in broker.uploads.whole} <= left, "frames of publishes that do not wait"
