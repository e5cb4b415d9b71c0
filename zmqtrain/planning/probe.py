"""Measurement of the link to a hub from outside of its run: round trips, rates both ways, the hub's clock.

Rule 1: an observer says Hello, pings and probes, one at a time; it changes nothing of a run, and the hub bounds the
padding of all probes.  Rule 2: a measurement ends after so many bytes or seconds, whichever comes first.
Rule 3: a figure that cannot be measured is None.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import TypeVar

from zmqtrain.core.errors import HubUnreachable, JoinRefused, ZmqTrainError
from zmqtrain.core.interfaces import Dialer
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.protocol.limits import PROBE_FRAME_BYTES
from zmqtrain.protocol.messages import Heartbeat, Message, Probe, Probed, Refused, Roster, Welcome
from zmqtrain.session.environment import RealEnvironment
from zmqtrain.session.hub_session import HubSession, NullListener, ProcessPeer
from zmqtrain.transport.key_folder import Access, find_access
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey

Answered = TypeVar("Answered", bound=Message)

PINGS = 100
TIMES_ASKED = 8
RATE_BYTES = 8 << 20
RATE_SECONDS = 3.0
IN_FLIGHT = 4
"""Probes in flight at a time: 1 MiB of padding, as much as a hub grants its nodes together."""

ANSWER_SECONDS = 10.0
"""After so long without an answer the measurement ends."""

PADDING = memoryview(bytes(PROBE_FRAME_BYTES))


@dataclass(frozen=True)
class RoundTrips:
    """Seconds from a ping to its answer: the median, and what 99 of 100 stay under."""

    p50: float
    p99: float
    count: int


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """What was measured of a link, and what the hub said of its run.

    idle, loaded: round trips of the heartbeats, alone and beside padding.  up, down: bytes of payload per second toward
    the hub and away from it; None where the hub refuses probes (`refused` says why).
    clock_ahead_seconds: how far the hub's clock is ahead of this one's, give or take `clock_error_seconds`.
    """

    run: str
    version: int
    settings: RunSettings
    nodes: int
    software: str
    idle: RoundTrips | None
    loaded: RoundTrips | None
    up: float | None
    down: float | None
    clock_ahead_seconds: float | None
    clock_error_seconds: float | None
    refused: str = ""


def measure_link(
    address: str, server_key: GivenServerKey = None, keys: GivenKeys | Access = None, wait_seconds: float = 5.0
) -> LinkFigures:
    """Connect to the hub at `address` and measure the link; takes a few seconds at most.

    server_key, keys: as for `zmqtrain.connect`.

    Raises ConfigError for an invalid address, HubUnreachable if no broker answers within `wait_seconds` or it falls
    silent, JoinRefused if it speaks another version of the protocol.
    """
    access = find_access(address, server_key, keys)

    async def measure() -> LinkFigures:
        return await _Probe(RealEnvironment(access), address).measure(wait_seconds)

    return asyncio.run(measure())


class _Refusal(Exception):
    """The hub answers no further probe; the text says why."""


class _Probe(NullListener):
    """An observer's session that pings and probes, one measurement after the other."""

    messages = (Heartbeat, Probed, Refused, Roster, Welcome)

    def __init__(self, dialer: Dialer, address: str) -> None:
        machine = ProcessPeer(
            PeerId(f"doctor#{secrets.token_hex(4)}"), "doctor", "observer", ANSWER_SECONDS, comes_again=False
        )
        self._session = HubSession(dialer, machine, address, self)
        self._session.linger_seconds = 0.1
        self._answers = asyncio.Queue[Message | ZmqTrainError]()
        self._numbers = count(1)
        self._software = ""
        self._round_trips: list[float] = []
        self._ping_sent: float | None = None
        self._clock: tuple[float, float] | None = None
        """(error, how far the hub's clock is ahead), of the quickest answer."""

    def on_message(self, message: Message, frames: Sequence[Buffer]) -> bool:
        if isinstance(message, Heartbeat):
            if message.sent != self._ping_sent:  # the session's own
                return False
            self._round_trips.append(time.monotonic() - message.sent)
            self._ping_sent = None
        self._answers.put_nowait(message)
        return isinstance(message, Probed | Refused)

    def on_ended(self, reason: str, text: str, error: ZmqTrainError) -> None:
        address = self._session.address
        if reason == "garbage":
            self.on_failed(JoinRefused(f"the broker at {address} cannot be understood: {text}", "protocol"))
        else:
            self.on_failed(HubUnreachable(f"{address}: {text}", address))

    def on_failed(self, error: ZmqTrainError) -> None:
        self._answers.put_nowait(error)

    async def measure(self, wait_seconds: float) -> LinkFigures:
        """Measure round trips, clocks and rates, in this order; then leave."""
        self._session.begin()
        try:
            return await self._measure(wait_seconds)
        finally:
            self._session.leave("")
            await self._session.wait_closed()

    async def _measure(self, wait_seconds: float) -> LinkFigures:
        welcome = await self._answer(Welcome, wait_seconds)
        roster = await self._answer(Roster, wait_seconds)
        for _ in range(PINGS):
            self._ping()
            await self._answer(Heartbeat)
        idle, self._round_trips = _round_trips(self._round_trips), []
        refused, up, down = "", None, None
        try:
            for _ in range(TIMES_ASKED):
                await self._ask_the_time()
            up, down = await self._rate(PROBE_FRAME_BYTES, 0), await self._rate(0, PROBE_FRAME_BYTES)
        except _Refusal as refusal:
            refused = str(refusal)
        error, ahead = self._clock or (None, None)
        return LinkFigures(
            run=welcome.run,
            version=welcome.version,
            settings=RunSettings.from_dict(welcome.settings),
            nodes=len(roster.members),
            software=self._software,
            idle=idle,
            loaded=_round_trips(self._round_trips),
            up=up,
            down=down,
            clock_ahead_seconds=ahead,
            clock_error_seconds=error,
            refused=refused,
        )

    async def _ask_the_time(self) -> None:
        began = time.monotonic()
        sent = time.time()  # after `began`, so that a delay between the two is part of the error
        self._probe(0, 0)
        probed = await self._answer(Probed)
        error = (time.monotonic() - began) / 2
        self._software = probed.software[:80]
        if self._clock is None or error < self._clock[0]:
            self._clock = error, probed.seconds - (sent + error)

    async def _rate(self, size: int, answer: int) -> float | None:
        """Return the bytes per second of probes with this padding, the first answer not counted: it fills the pipe."""
        began = time.monotonic()
        most, asked, arrived = RATE_BYTES // (size + answer), 0, list[float]()

        def goes_on() -> bool:
            return asked < most and (not asked or time.monotonic() - began < RATE_SECONDS)

        while len(arrived) < asked or not asked:
            while asked - len(arrived) < IN_FLIGHT and goes_on():
                self._probe(size, answer)
                asked += 1
            if self._ping_sent is None:
                self._ping()
            await self._answer(Probed)
            arrived.append(time.monotonic())
        seconds = arrived[-1] - arrived[0]
        return (size + answer) * (len(arrived) - 1) / seconds if seconds > 0 else None

    def _ping(self) -> None:
        self._ping_sent = time.monotonic()
        self._session.send(Heartbeat(self._ping_sent))

    def _probe(self, size: int, answer: int) -> None:
        probe = Probe(next(self._numbers), size, answer)
        if size:
            self._session.send_bulk(probe, [PADDING[:size]])
        else:
            self._session.send(probe)

    async def _answer(self, kind: type[Answered], wait_seconds: float = ANSWER_SECONDS) -> Answered:
        """Return the next message of a kind. Raises HubUnreachable, JoinRefused."""
        address = self._session.address
        try:
            async with asyncio.timeout(wait_seconds):
                while True:
                    message = await self._answers.get()
                    if isinstance(message, ZmqTrainError):
                        raise message
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Refused):
                        if kind is Probed:
                            raise _Refusal(message.text)
                        raise JoinRefused(f"the broker at {address} refuses: {message.text}", message.reason)
        except TimeoutError:
            obstacle = f": {self._session.obstacle}" if self._session.obstacle else ""
            text = f"the broker at {address} has not answered for {wait_seconds:g} s{obstacle}"
            raise HubUnreachable(text, address) from None


def _round_trips(seconds: Sequence[float]) -> RoundTrips | None:
    if not seconds:
        return None
    ranked = sorted(seconds)
    return RoundTrips(ranked[len(ranked) // 2], ranked[ceil(0.99 * len(ranked)) - 1], len(ranked))
