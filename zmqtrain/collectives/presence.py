"""Know who of a group is there: notice who is gone, have it judged, and tell the port's listener, once of each.

Rule 1: who is lost is lost for all: `FailureDetector` notices, the hub judges (`Groups`); without a hub a process
tells the others itself.  Rule 2: a rank of which no sign of life comes back in time is sent to through the hub,
from then on, for good.  Rule 3: who leaves is lost when all has come that it has sent.  Rule 4: of the hub's own loss
the listener hears only if it has the hub reduce.  Rule 5: nothing is told once the port is silent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from zmqtrain.collectives.door import Door
from zmqtrain.collectives.hub_line import HubLine
from zmqtrain.collectives.port_thread import PortThread
from zmqtrain.collectives.way import Way, WayState
from zmqtrain.core.types import HUB, Buffer
from zmqtrain.protocol.failure_detector import BEAT_SECONDS, Accuse, CutOff, Declare, FailureDetector
from zmqtrain.protocol.messages import GroupLost

logger = logging.getLogger(__name__)

HUB_SILENCE_SECONDS = 5.0
"""A hub that is silent for so long is gone: the group lives on without it."""
LEAVE_SECONDS = 1.0
"""What somebody who has left has sent comes within this, or not at all."""
LEFT = "it has left the group"
"""Why a rank is lost that has closed its port."""


class Presence:
    """Who of the group is there, as `rank` knows it, in its port's thread (a `HubListener`).

    ways: to the others, by rank, as far as they are made.  direct_seconds: a rank that is not reached within this is
    sent to through the hub.  on_message: takes what comes through the hub of who is there.
    cut_off: whether this process is lost to the others.
    """

    def __init__(
        self,
        rank: int,
        thread: PortThread,
        ways: dict[int, Way],
        door: Door,
        line: HubLine,
        direct_seconds: float,
        on_message: Callable[[int, list[Buffer]], None],
    ) -> None:
        self._rank, self._thread, self._direct_seconds, self._on_message = rank, thread, direct_seconds, on_message
        self._ways, self._door, self._line = ways, door, line
        self._vigil = FailureDetector(time.monotonic())
        self._closings: set[asyncio.Task[None]] = set()
        self.cut_off = self._needs_hub = self._hub_told = False
        self._beat_at = 0.0

    # ------------------------------------------------------------------ what comes of the others

    def heard(self, rank: int) -> None:
        """Take note that something has come of a rank, over its connection."""
        self._vigil.heard(rank)

    def answered(self, rank: int) -> None:
        """Take note that a sign of life came back over the connection to a rank: what is sent there arrives."""
        self._vigil.heard(rank)
        if self._ways[rank].state is WayState.OPENING:
            self._vigil.watch(rank)
            self._ways[rank].go(WayState.DIRECT)

    def received(self, rank: int) -> None:
        """Take note that a message of a rank has come directly, and was handed on."""
        way = self._ways[rank]
        way.received += 1
        if way.left_at is not None:
            way.left_at = self._vigil.attended
        if way.all_came:
            self.lose(rank, LEFT)

    def leaves(self, rank: int, messages: int) -> None:
        """Take note that a rank leaves, which has sent so many messages directly."""
        way = self._ways[rank]
        way.due, way.left_at = messages, self._vigil.attended
        self._vigil.forget(rank)
        if way.all_came:
            self.lose(rank, LEFT)

    def accused(self, lost: GroupLost) -> None:
        """Take note that another process takes a rank for lost."""
        if self._line.there:  # it judges
            self._line.say(lost)
        elif lost.rank == self._rank or lost.rank in self._ways:
            self.lose(lost.rank, lost.why)

    # ------------------------------------------------------------------ what comes of the hub

    def on_relayed(self, rank: int, frames: list[Buffer]) -> None:
        """See HubListener."""
        way = self._ways.get(rank)
        if frames and (rank == HUB or (way is not None and way.state is not WayState.LOST)):
            self._on_message(rank, frames)

    def on_hub_heard(self) -> None:
        """See HubListener."""
        self._vigil.heard_hub()

    def on_hub_gone(self, why: str) -> None:
        """See HubListener."""
        self._vigil.hub = False
        if self._thread.silent:
            return
        logger.warning("%s: the hub is gone (%s); the group goes on without it", self._thread.name, why)
        for rank, way in self._ways.items():
            if way.state is WayState.RELAYED:
                self._declare(rank, f"it was reached through the hub only, which is gone: {why}")
        if self._needs_hub:
            self._lose_hub()

    def on_sent_away(self, why: str) -> None:
        """See HubListener."""
        self.lose(self._rank, f"the hub has sent it away: {why}")

    def on_group_lost(self, lost: GroupLost) -> None:
        """See HubListener."""
        way = self._ways.get(lost.rank)
        if lost.rank == self._rank or (way is not None and not lost.left):
            self.lose(lost.rank, lost.why)
        elif way is not None:  # what it has sent comes before
            self._vigil.forget(lost.rank)
            if way.left_at is None:
                way.left_at = self._vigil.attended

    def need_hub(self) -> bool:
        """Have the listener told when the hub is gone, if it is already, too; return whether it is there."""
        self._needs_hub = True
        if not self._line.there:
            self._lose_hub()
        return self._line.there

    # ------------------------------------------------------------------ as time passes

    def tick(self, now: float) -> None:
        """Look who has been silent for too long, and show that this process lives. now: monotonic seconds."""
        for finding in self._vigil.tick(now):
            match finding:
                case Accuse(rank, why):
                    self._line.say(GroupLost(rank, why))
                case Declare(rank, why):
                    self._declare(rank, why)
                case CutOff(why):
                    self.lose(self._rank, why)
        if self._line.there and self._vigil.hub_silence > HUB_SILENCE_SECONDS:
            self._line.give_up(self, f"silent for {self._vigil.hub_silence:.1f} s")
        self._beat(now)
        for rank, way in self._ways.items():
            if way.state is WayState.OPENING and self._vigil.attended > self._direct_seconds:
                self._go_round(rank, way)
            elif way.left_at is not None and self._vigil.attended - way.left_at > LEAVE_SECONDS:
                self.lose(rank, LEFT)

    def _beat(self, now: float) -> None:
        """Send a sign of life over each connection that others have made to this process; where there is none, as soon
        as there is."""
        due = now >= self._beat_at
        if due:
            self._beat_at = now + BEAT_SECONDS
            self._line.beat()
        for rank, way in self._ways.items():
            if way.state is WayState.LOST or (way.shown and not due):
                continue
            way.shown = self._door.show(rank)
            way.connected |= way.shown
            if way.connected:
                self._vigil.reached(rank, way.shown)

    def _go_round(self, rank: int, way: Way) -> None:
        """Send to a rank through the hub that was not reached in time."""
        if not self._line.there:
            return self._declare(rank, f"it is not reached at {way.address}, and there is no hub")
        logger.warning(
            "%s does not reach %s (rank %d) at %s within %g s: its messages to it go through the hub, which is slower",
            self._thread.name,
            way.name,
            rank,
            way.address,
            self._direct_seconds,
        )
        way.go(WayState.RELAYED)

    # ------------------------------------------------------------------ who is lost

    def _declare(self, rank: int, why: str) -> None:
        for way in self._ways.values():
            way.say(GroupLost(rank, why))
        self.lose(rank, why)

    def lose(self, rank: int, why: str) -> None:
        """Take a rank for lost (the own one: this process is cut off), and tell the listener, once."""
        if self.cut_off or self._thread.silent:
            return
        if rank == self._rank:
            self.cut_off = True
            logger.warning("%s is cut off from its group: %s", self._thread.name, why)
        else:
            way = self._ways[rank]
            if way.state is WayState.LOST:
                return
            self._door.shut_out(rank)
            self._vigil.forget(rank)
            self._line.forget(rank)
            closing = way.lose()
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)
            what = "has left the group" if why == LEFT else f"is lost: {why}"
            logger.info("%s: %s (rank %d) %s", self._thread.name, way.name, rank, what)
        self._thread.tell(lambda listener: listener.on_lost(rank, why))

    def _lose_hub(self) -> None:
        """Say that the hub is gone to who has it reduce, once."""
        if not self._hub_told:
            self._hub_told = True
            self._thread.tell(lambda listener: listener.on_lost(HUB, "the hub is gone"))

    async def close(self) -> None:
        """Wait until the ways to those who are lost are closed."""
        await asyncio.gather(*self._closings, return_exceptions=True)
