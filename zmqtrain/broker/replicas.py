"""Keep a hub's standby in step: a copy of all there is, then every release before the nodes hear of it.

Rule 1: what lets nodes hear of a version goes through `announce`, in order, and waits until the standby holds it.
Rule 2: a standby that nodes wait for too long (`protocol.standby.Patience`) is sent away; it comes again, is copied
anew, and stays out of step for a while.
Rule 3: a hub whose standby is lost asks at its address whether that has taken over, and then steps down; until it
knows, nodes hear of nothing new unless more than half of its crew are here (`protocol.standby.Tenure`).
Rule 4: all of it in the broker's loop, but for the copy, which its codec thread makes.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from safetensors.numpy import load, save

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.broker.onlooker import Onlooker
from zmqtrain.core.errors import SteppedDown
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer, PeerId, Version
from zmqtrain.protocol.effects import HubEffect
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.peer import Peer
from zmqtrain.protocol.standby import Patience
from zmqtrain.session.link import HubLink

logger = logging.getLogger(__name__)

PAUSED_SECONDS = 2.0
"""The nodes let a hub go on without its standby within this, if they are here."""
CLOSE_BEHIND = 2
"""A standby that is so many versions behind is brought in step: the nodes wait for it from then on."""

OpenLine = Callable[[str, PeerId], Channel]
"""Makes a channel to the broker at an address, under an id; called in the loop of whoever reads it."""


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
    """What lets nodes hear of a version, and waits. since: when it was due; size: as in `Replicas.announce`."""

    version: Version
    since: float
    action: Callable[[], None]
    size: int


class Replicas:
    """The standby of one hub, and what waits for it.

    send_away: tells a standby, with a reason, that it must begin anew.  carry_out: does what the hub wishes.
    open_line: None never asks whether a standby that was lost has taken over.
    """

    def __init__(
        self,
        hub: Hub,
        send_away: Callable[[PeerId, str], None],
        carry_out: Callable[[Sequence[HubEffect]], None],
        open_line: OpenLine | None = None,
    ) -> None:
        self._hub, self.send_away, self._carry_out, self._open_line = hub, send_away, carry_out, open_line
        self._waiting: deque[_Waiting] = deque()
        self._patience, self._flushed_at = Patience(), 0.0
        self._announced: Version = hub.version
        self._held: Version = -1
        self._closing_since: float | None = None
        self._in_step_at = 0.0
        self._rival: _Rival | None = None
        self._paused = False

    def announce(self, version: Version, action: Callable[[], None], now: float, size: int = 0) -> None:
        """Do what lets nodes hear of a version, as soon as they may. size: the bytes that the standby is sent of it."""
        self._waiting.append(_Waiting(version, now, action, size))
        self._flush(now)

    def copied(self) -> None:
        """A copy is on its way to the standby: what it held before counts no more."""
        self._held = -2

    def go_back(self, version: Version) -> None:
        """The run goes on from this version: what the standby held beyond it is another course of it."""
        self._held, self._announced, self._closing_since = -2, version, None

    def holds(self, version: Version, now: float) -> None:
        """The standby holds this version."""
        self._held = max(self._held, version)
        if (standby := self._hub.standby) is not None:
            self._hub.tenure.returned(standby.address)
        may_be = standby is not None and self._patience.may_be_in_step(now)
        if may_be and not self._hub.tenure.follows and standby is not None:
            if version >= self._announced:
                if self._closing_since is not None:
                    self._patience.waited(now - self._closing_since, 0, now)
                self._closing_since, self._in_step_at = None, now
                self._patience.in_step(now)
                logger.info("the standby at %s is in step, at version %d", standby.address, version)
                self._carry_out(self._hub.in_step(now))
            elif version >= self._announced - CLOSE_BEHIND and self._closing_since is None:
                self._closing_since = now
        self._flush(now)

    def tick(self, now: float) -> None:
        """See to what waits, and for whom."""
        standby = self._hub.standby
        if standby is None:
            self._closing_since = None
        elif (since := self._waits_since()) is not None and self._patience.is_used_up(now - since, self._size(), now):
            pause = self._patience.out_of_step(now)
            self._closing_since = None
            text = (
                f"the nodes have waited too long for it, now {now - since:.1f} s for one version: the run goes on "
                f"without it, and it is in step again in {pause:.0f} s at the earliest"
            )
            self.send_away(standby.peer, text)
        elif self._held >= 0 and not self._hub.tenure.follows:  # it may be in step again since it said so
            self.holds(self._held, now)
        self._flush(now)
        self._ask_rival()
        paused = self._hub.standby is None and bool(self._waiting) and now - self._waiting[0].since > PAUSED_SECONDS
        if paused and not self._paused:
            logger.warning(
                "the standby at %s is gone and may have taken over: too few of the nodes that it knows are here, or "
                "this broker itself was started again. Nodes hear of nothing new here until it is back. If its PC does "
                "not come back, and nothing is served there, start another: zmqtrain-broker --standby",
                self._hub.tenure.standby,
            )
        self._paused = paused

    def close(self) -> None:
        """End the line to a standby that was lost."""
        if self._rival is not None:
            self._rival.close()
            self._rival = None

    def _waits_since(self) -> float | None:
        """Return since when nodes wait for the standby that is here; None: they do not."""
        if self._closing_since is not None:
            return self._closing_since
        if not (self._waiting and self._hub.tenure.follows):
            return None  # what waits does so for nodes, not for a standby that is being copied
        return max(self._waiting[0].since, self._in_step_at, self._flushed_at)

    def _size(self) -> int:
        return self._waiting[0].size if self._waiting else 0

    def _may(self, version: Version) -> bool:
        if self._hub.tenure.follows:
            return version <= self._held
        return self._closing_since is None and self._hub.may_announce

    def _flush(self, now: float) -> None:
        while self._waiting and self._may(self._waiting[0].version):
            if self._hub.tenure.follows and (since := self._waits_since()) is not None:
                self._patience.waited(now - since, self._size(), now)
            one, self._flushed_at = self._waiting.popleft(), now
            self._announced = max(self._announced, one.version)
            one.action()

    def _ask_rival(self) -> None:
        """Look whether a standby that is not here has taken over. Raises SteppedDown."""
        tenure = self._hub.tenure
        if tenure.ended:
            raise self._stepped_down(self._hub.term + 1)
        address = "" if self._hub.standby is not None else tenure.standby
        if self._rival is not None and self._rival.address != address:
            self.close()
        if self._rival is None and address and self._open_line is not None:
            self._rival = _Rival(self._open_line, address, self._hub.run, self._hub.term)
        if self._rival is not None and (term := self._rival.peer.term) > self._hub.term:
            raise self._stepped_down(term)

    def _stepped_down(self, term: int) -> SteppedDown:
        address = self._hub.tenure.standby
        return SteppedDown(
            f"the standby at {address} has taken over {self._hub.run} (term {term}; this broker has term "
            f"{self._hub.term}): it is served there, and no longer here. To have this one as the standby of that: "
            f"start it again with --standby {address}"
        )


class _Rival:
    """The line of a first to where its lost standby was: one that has taken over welcomes it with a higher term."""

    def __init__(self, open_line: OpenLine, address: str, run: str, term: int) -> None:
        self.address = address
        peer = PeerId(f"first#{secrets.token_hex(4)}")
        self.peer = Peer(peer, "the first broker", observer=True)
        self.peer.run, self.peer.term = run, term
        self._link = HubLink(
            lambda: open_line(address, peer), self.peer, address, Onlooker(), meanwhile="The run is served on"
        )
        self._link.start()

    def close(self) -> None:
        self._link.close("")
