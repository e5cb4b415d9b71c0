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
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.errors import ChannelClosed, ChannelFull, CodecError
from zmqtrain.protocol import keys
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import decode_message, encode_message, split
from zmqtrain.protocol.group_messages import Fold, GroupLost, JoinGroup, Relay, Relayed
from zmqtrain.protocol.messages import (
    Aggregate,
    Credit,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Probe,
    Publish,
    Report,
    Snapshot,
    WorkRequest,
    model_to_wire,
)
from zmqtrain.runtime.broker import arrivals as arrivals_room
from zmqtrain.runtime.broker import broker as broker_room
from zmqtrain.runtime.broker import intake as intake_room
from zmqtrain.runtime.broker import receiver as receiver_room
from zmqtrain.runtime.broker import telling
from zmqtrain.runtime.broker import traffic as traffic_room
from zmqtrain.runtime.equation.delta import DENSE, encode_snapshot
from zmqtrain.runtime.equation.moments import encode_moments
from zmqtrain.runtime.parameter_server import parameters as parameters_room
from zmqtrain.runtime.rules import canonical
from zmqtrain.settings import RunSettings
from zmqtrain.transport.limits import check_message
from zmqtrain.types import Buffer, Lane, LeafSpec, PeerId

from fuzz_inputs import Record, pack_session, read_session

__all__ = ["PEERS", "SETTINGS", "honest_sessions", "run_broker"]

PEERS = tuple(PeerId(f"pc-{number}#{number:02}") for number in range(8))
DEAF = PEERS[7]
"""Reads no more than so much of what it is sent."""
DEAF_READS = 30
MODEL = (LeafSpec("w", (10,), "float32"), LeafSpec("b", (3,), "float32"))
LEAVES = [np.arange(10, dtype=np.float32), np.ones(3, np.float32)]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"release": "immediately", "units": 40},
    {"release": "quorum", "codec": "int8", "broadcast_codec": "int4", "fragments": 1, "every": 0, "delay": -1},
    {"release": "all", "mode": "strict", "start_nodes": 2, "units": 12, "initial": "founder"},
    {"initial": "own", "start_nodes": 2, "preemption": "score:patience=1,margin=0", "release": "immediately"},
    {"initial": "mean", "start_nodes": 2, "release": "count:contributions=2", "aggregate": "median"},
    {"masters": 2, "initial": "founder", "release": "bounded:staleness=1"},
    {"max_staleness": 1, "stale": "drop", "aggregate": "clipped:factor=2", "staleness": "compensation:strength=0.1"},
    {"codec": "topk:density=0.5+int8", "broadcast_codec": "sign", "selection": "better", "release": "time:seconds=0.1"},
)


class _Clock:
    """What the broker's rooms take for the module `time`."""

    thread_time = staticmethod(time.thread_time)

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """The seconds of this session."""
        return self.now

    time = monotonic


class _Jobs:
    """A codec thread that works when it is told to."""

    failure: BaseException | None = None
    seconds = 0.0

    def __init__(self, name: str, broken: Callable[[], object]) -> None:
        self.waiting: list[tuple[Callable[[], Any], Callable[..., None] | None, tuple[Any, ...]]] = []

    def do(self, work: Callable[[], Any], then: Callable[..., None] | None = None, *facts: Any) -> None:
        """See Jobs."""
        self.waiting.append((work, then, facts))

    def do_once(self, name: str, work: Callable[[], Any]) -> None:
        """See Jobs."""
        self.do(work)

    def fail(self, error: BaseException | None) -> None:
        """See Jobs."""
        raise AssertionError("the broker's own work failed") from error

    def work(self) -> None:
        """Do all that waits here."""
        while self.waiting:
            work, then, facts = self.waiting.pop(0)
            try:
                result = work()
            except CodecError as error:
                result = error
            if then is not None:
                then(result, *facts)


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
        message = decode_message(frames[0])
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
    timed = (broker_room, receiver_room, arrivals_room, intake_room, traffic_room, parameters_room)
    before = [(room, room.time) for room in timed]
    jobs, noted = broker_room.Jobs, _Noted()
    logger = logging.getLogger(telling.__name__)
    propagates, level = logger.propagate, logger.level

    def make_jobs(name: str, broken: Callable[[], object]) -> _Jobs:
        made.append(_Jobs(name, broken))
        return made[-1]

    try:
        for room, _ in before:
            room.time = clock
        broker_room.Jobs = make_jobs
        logger.propagate = False
        logger.setLevel(logging.ERROR)
        logger.addHandler(noted)
        yield noted
    finally:
        for room, own in before:
            room.time = own
        broker_room.Jobs = jobs
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
                broker._look_around(clock.now)
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
            for alarm in (broker.traffic._again, broker.traffic.intake._again):
                alarm.set(inf)
    return count


def _check_bounds(broker: Any) -> None:
    hub = broker.hub
    assert hub.members.keys() <= set(PEERS)
    pending = [peer for peer, _ in hub.rounds.pending]
    for peer, member in hub.members.items():
        most = max(64, hub.timetable.at(hub.version).offers_in_flight)
        assert len(member.open) + pending.count(peer) <= most, "more publishes of a node wait than may"
        assert sum(owner == peer for owner in hub.ledger._dealt.values()) <= 4096, "more units dealt than a node needs"
    assert len(broker._arrivals.whole) <= len(pending) + len(hub.members) + sum(
        len(m.open) for m in hub.members.values()
    )
    assert broker.traffic.intake._credits.in_flight_bytes >= 0
    assert broker.traffic._lines.keys() | broker.traffic.intake._lines.keys() <= set(PEERS)


def _part(broker: Any, clock: _Clock, jobs: Sequence[_Jobs]) -> None:
    """All leave: then nothing is held of them but what has landed, and what will."""
    hub = broker.hub
    for _ in range(3):
        for peer in PEERS:
            broker._carry_out(hub.gone(peer, "the session is over", clock.now))
        _work(jobs)
    assert not hub.members and not (broker.traffic._lines or broker.traffic.intake._lines), (
        "lines of peers that have gone"
    )
    held: dict[str, Any] = {
        "grants": broker.traffic.intake._credits._transfers,
        "bytes in flight": broker.traffic.intake._credits.in_flight_bytes,
        "limits": broker.traffic._limits,
        "relays": broker._relays._waiting,
        "groups": hub.groups._complete or hub.groups._forming or hub.groups._in,
        "reductions": broker._reducers._groups,
        "requests": broker.parameters._announced or broker.parameters._incoming or broker.parameters._outgoing,
        "clients": broker.parameters.machine.clients,
        "units": hub.ledger._dealt,
    }
    assert not any(held.values()), {name: one for name, one in held.items() if one}
    left = {peer for peer, _ in hub.rounds.pending}
    assert {peer for peer, _ in broker._arrivals.whole} <= left, "frames of publishes that do not wait"


# ---------------------------------------------------------------------- honest sessions


class _Says:
    """Write down what honest peers say. incarnation: of their connections; 0: not fenced, so that a session of which
    something is left out still leads somewhere."""

    def __init__(self, seed: int, incarnation: int = 0) -> None:
        self.incarnation, self.said = incarnation, dict.fromkeys(range(len(PEERS)), 0)
        self.seed, self.settings = seed, canonical(RunSettings.from_dict(SETTINGS[seed]))
        self.records: list[Record] = []
        self.layout = Layout(MODEL, self.settings.fragments, (0, self.settings.masters))
        self.transfers = 0

    def say(self, who: int, message: Message, *frames: Buffer) -> None:
        if isinstance(message, Hello):
            message, self.said[who] = replace(message, incarnation=self.incarnation), 0
        if not frames:
            self.said[who] += bool(self.incarnation)
        stamp = Stamp(self.incarnation, 0 if frames else self.said[who])
        self.records.append((who, (encode_message(message, stamp), *map(bytes, frames))))

    def wait(self, how: int = 0) -> None:
        self.records.append((how, ()))

    def transfer(self, who: int, announcement: Any, frames: Sequence[Buffer]) -> None:
        self.say(who, announcement)
        for head, frame in split(announcement.transfer, frames, Stamp(self.incarnation)):
            self.records.append((who, (head, bytes(frame))))

    def number(self) -> int:
        self.transfers += 1
        return self.transfers

    def join(self, *whos: int) -> None:
        for who in whos:
            self.say(who, Hello(f"pc-{who}", link=125e6))
            self.say(who, Fetch(-1, model_to_wire(MODEL), score=float(who)))
        asked = whos if self.settings.initial == "mean" else whos[1:] if self.settings.initial == "own" else whos[:1]
        for who in asked:
            frames = encode_snapshot(self.layout, self.layout.split(LEAVES))
            moments = encode_moments([np.ones(20, np.float32)]) if self.settings.trains_apart else ()
            sizes = tuple(len(frame) for frame in (*frames, *moments))
            self.transfer(who, Snapshot(self.number(), 0, sizes, (), len(moments)), [*frames, *moments])
            self.wait()

    def publish(self, who: int, sequence: int, dense: bool = False) -> None:
        codec = DENSE if dense else self.settings.codec
        segments = [np.full(count, 0.5 + who, np.float32) for count in self.layout.counts(0)]
        frames = encode_payload(coding_from_spec(codec).of_fragment(self.layout, 0), segments)
        sizes = tuple(len(frame) for frame in frames)
        announced = Publish(self.number(), sequence, 0, 0, codec, sizes, 8, 1, nan, dense)
        self.transfer(who, announced, frames)

    @property
    def bytes(self) -> bytes:
        return pack_session(self.seed, self.records)


def _training(seed: int, incarnation: int = 0) -> bytes:
    says = _Says(seed, incarnation)
    says.join(0, 1)
    for sequence in range(3):
        for who in (0, 1):
            says.publish(who, sequence)
            says.say(who, Credit(sequence + 1, 1))
            says.say(who, Heartbeat(1.0))
        says.wait(1)
    says.say(0, Report(8, 64, 10.0, 0.5, 3.0, 0, 1, 1, "", {"loss": 0.5}, 1, 0.01))
    says.say(0, WorkRequest((), 2, False))
    says.say(1, WorkRequest((0, 1), 2, True))
    says.publish(1, 3, dense=True)
    says.say(1, Fetch(0))
    says.say(0, Probe(1, 3, 100), b"abc")
    says.say(2, Hello("watch", "observer"))
    says.say(7, Hello("deaf"))
    says.wait(2)
    says.say(0, WorkRequest((0, 1), 0, True))
    says.say(1, Goodbye("done"))
    says.wait(3)
    return says.bytes


def _groups(seed: int) -> bytes:
    says = _Says(seed)
    values = np.arange(4, dtype=np.float32).tobytes()
    for who in (0, 1, 2):
        says.say(who, Hello(f"pc-{who}", "process"))
        says.say(who, JoinGroup("g", 3, -1, "", f"tcp://127.0.0.1:{6000 + who}", "", "token"))
    for who in (0, 1, 2):
        says.say(who, Fold(1, "sum", "float32", 16 + 3), b"own", values)
        says.say(who, Relay((who + 1) % 3, 5), b"hello")
    for who in (0, 1, 2):
        says.say(who, Relayed((who - 1) % 3, 1))
        says.say(who, Fold(1, "mean", "float32", 16), values)
    says.wait(1)
    says.say(0, GroupLost(1, "silent"))
    says.say(2, Goodbye())
    says.wait(2)
    return says.bytes


def _keys(seed: int) -> bytes:
    says = _Says(seed)
    values = np.arange(10, dtype=np.float32).tobytes()
    for who in (0, 1):
        says.say(who, Hello(f"pc-{who}", "process"))
        says.say(who, keys.Enrol("", 0, 1, "bsp", "adam:rate=0.1", 2, False))
        says.say(who, keys.Declare(1, (("w", (2, 5), "float32"), ("b", (), "float64"))))
    says.transfer(0, keys.Initialise(2, "w", "float32", 0, 10, (40,)), [values])
    says.transfer(0, keys.Initialise(3, "b", "float64", 0, 1, (8,)), [b"\0" * 8])
    says.say(0, keys.Founded(("w", "b")))
    for request in (4, 5):
        for who in (0, 1):
            says.transfer(who, keys.Push(request, "w", "float32", True, (40,)), [values])
            says.say(who, Credit(request, 1))
    says.say(1, keys.Pull(9, "b"))
    says.wait(1)
    says.say(2, Hello("reader", "process"))
    says.say(2, keys.Enrol("", 0, 1, "", "", 0, True))
    says.say(2, keys.Declare(1, (("w", (), ""),)))
    says.say(2, keys.Pull(2, "w"))
    says.say(1, Goodbye())
    says.wait(2)
    return says.bytes


def _masters(seed: int) -> bytes:
    says = _Says(seed)
    says.say(3, Hello("master", "master", shard=1, address="tcp://127.0.0.1:5556"))
    says.join(0)
    says.say(3, Heartbeat(2.0))
    says.say(4, Hello("master", "master", shard=1, address="tcp://127.0.0.1:5556"))
    says.publish(0, 0)
    says.wait(1)
    return says.bytes


def _lockstep(seed: int) -> bytes:
    says = _Says(seed)
    for who in (0, 1):
        says.say(who, Hello(f"pc-{who}", exchange="allreduce:ring"))
        says.say(who, Fetch(-1, model_to_wire(MODEL)))
    says.join(0)
    says.publish(0, 0, dense=True)
    says.publish(1, 0, dense=True)
    says.say(0, Goodbye())
    says.wait(2)
    return says.bytes


def honest_sessions() -> list[bytes]:
    """Return a session for each of the settings, and of every kind of peer."""
    sessions = [_training(seed) for seed in range(len(SETTINGS))]
    return [
        *sessions,
        _training(0, 7),
        _training(1, 1 << 40),
        _groups(0),
        _keys(0),
        _keys(1),
        _masters(5),
        _lockstep(0),
    ]
