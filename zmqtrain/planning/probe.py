"""Measure the link to a hub from outside of its run: round trips, rates both ways, the hub's clock.

Rule 1: an observer that says Hello, pings and probes, one at a time; nothing of a run is touched, and the hub bounds
what all who probe may take.  Rule 2: a measurement ends after so many bytes or seconds, whichever comes first.
Rule 3: what cannot be measured is None, never invented.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from zmqtrain.core.errors import FramingError, HubUnreachable, JoinRefused
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.protocol.framing import decode_message, encode_message
from zmqtrain.protocol.limits import PROBE_FRAME_BYTES
from zmqtrain.protocol.messages import Goodbye, Heartbeat, Hello, Message, Probe, Probed, Refused, Roster, Welcome
from zmqtrain.transport.found_keys import Access, find_access
from zmqtrain.transport.zmq_dealer import DealerChannel
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey

Answered = TypeVar("Answered", bound=Message)

PINGS = 100
TIMES_ASKED = 8
RATE_BYTES = 8 << 20
RATE_SECONDS = 3.0
IN_FLIGHT = 4
"""So many probes are on their way at a time: 1 MiB, as much as a hub grants its nodes together."""

ANSWER_SECONDS = 10.0
"""A hub that answers nothing for so long is given up."""

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

    Raises ConfigError for an address that is none, HubUnreachable if no broker answers within `wait_seconds` or it
    falls silent, JoinRefused if it speaks another version of the protocol.
    """
    peer = PeerId(f"doctor#{secrets.token_hex(4)}")
    access = find_access(address, server_key, keys)

    async def measure() -> LinkFigures:
        channel = DealerChannel.connect(address, peer=peer, access=access)
        return await probe_link(channel, address, wait_seconds)

    return asyncio.run(measure())


async def probe_link(channel: Channel, address: str, wait_seconds: float) -> LinkFigures:
    """Measure the link that a fresh channel is to the hub at `address`, and close it. Raises as `measure_link`."""
    talk = _Talk(channel, address)
    try:
        return await talk.measure(wait_seconds)
    finally:
        await channel.close(0.1)


class _Refusal(Exception):
    """The hub gives no (more) padding: the text says why."""


class _Talk:
    """One conversation with a hub, as an observer."""

    def __init__(self, channel: Channel, address: str) -> None:
        self._channel, self._address = channel, address
        self._number = 0
        self._software = ""
        self._round_trips: list[float] = []
        self._pinging = False
        self._clock: tuple[float, float] | None = None
        """(give or take, how far the hub's is ahead), of the quickest answer."""

    async def measure(self, wait_seconds: float) -> LinkFigures:
        """Say Hello, then measure one thing after the other."""
        await self._say(Hello("doctor", "observer"), wait_seconds)
        welcome = await self._answer(Welcome, wait_seconds)
        roster = await self._answer(Roster, wait_seconds)
        for _ in range(PINGS):
            await self._ping()
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
        await self._say(Goodbye())
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
        sent = time.time()  # after it, so that what comes between the two is in the error
        await self._probe(0, 0)
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
                await self._probe(size, answer)
                asked += 1
            if not self._pinging:
                await self._ping()
            await self._answer(Probed)
            arrived.append(time.monotonic())
        seconds = arrived[-1] - arrived[0]
        return (size + answer) * (len(arrived) - 1) / seconds if seconds > 0 else None

    async def _ping(self) -> None:
        self._pinging = True
        await self._say(Heartbeat(time.monotonic()))

    async def _probe(self, size: int, answer: int) -> None:
        self._number += 1
        probe = encode_message(Probe(self._number, size, answer))
        if size:
            await self._send(Lane.BULK, [probe, PADDING[:size]])
        else:
            await self._send(Lane.CONTROL, [probe])

    async def _say(self, message: Message, wait_seconds: float = ANSWER_SECONDS) -> None:
        await self._send(Lane.CONTROL, [encode_message(message)], wait_seconds)

    async def _send(self, lane: Lane, frames: Sequence[Buffer], wait_seconds: float = ANSWER_SECONDS) -> None:
        """Send as soon as there is room; to a hub with which no handshake succeeds there never is any."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._channel.send(lane, frames)
        except TimeoutError:
            raise self._silent(wait_seconds) from None

    def _silent(self, wait_seconds: float) -> HubUnreachable:
        obstacle = f": {self._channel.obstacle}" if self._channel.obstacle else ""
        text = f"the broker at {self._address} has not answered for {wait_seconds:g} s{obstacle}"
        return HubUnreachable(text, self._address)

    async def _answer(self, kind: type[Answered], wait_seconds: float = ANSWER_SECONDS) -> Answered:
        """Return the next message of a kind; those of others are taken note of on the way."""
        try:
            async with asyncio.timeout(wait_seconds):
                while True:
                    message = self._read((await self._channel.receive())[1])
                    if isinstance(message, Heartbeat):
                        self._pinging = False
                        self._round_trips.append(time.monotonic() - message.sent)
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Refused):
                        if kind is Probed:
                            raise _Refusal(message.text)
                        raise JoinRefused(f"the broker at {self._address} refuses: {message.text}", message.reason)
        except TimeoutError:
            raise self._silent(wait_seconds) from None

    def _read(self, frames: Sequence[Buffer]) -> Message:
        try:
            return decode_message(frames[0])
        except FramingError as error:
            raise JoinRefused(f"the broker at {self._address} cannot be understood: {error}", "protocol") from error


def _round_trips(seconds: Sequence[float]) -> RoundTrips | None:
    if not seconds:
        return None
    ranked = sorted(seconds)
    return RoundTrips(ranked[len(ranked) // 2], ranked[ceil(0.99 * len(ranked)) - 1], len(ranked))
