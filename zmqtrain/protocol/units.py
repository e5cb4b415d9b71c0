"""Data units: a ledger of numbered units that are dealt to nodes, and the end of the run when all are done.

Rule 1: a unit is a number; its meaning is the program's business. A unit of a lost node is dealt again unless it was
done. Returned units are dealt first (in a run with lanes, within their lane).
Rule 2: a unit is done once, by the node that it was dealt to. A ledger read from a checkpoint also believes nodes about
units that it has not dealt, at most CLAIMED_AHEAD of each lane.
Rule 3: the first broker deals; nodes tell other brokers only that they wait for data, or have drained.
Rule 4: a round does not wait for a node without data; the units of a lost node go to waiting nodes.
Rule 5: a run ends when all units are done and nothing is pending at any node: then all end with the same parameters.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId, Version
from zmqtrain.protocol.effects import HubEffect, SendTo
from zmqtrain.protocol.members import Member, Members, MemberState
from zmqtrain.protocol.messages import Stop, WorkRequest, WorkUnit

MOST_IN_HAND = 256
"""Units dealt to one node and not done; nodes keep two, and this bound keeps one from taking all data of a run."""
CLAIMED_AHEAD = 4096
"""After a restart of the hub, nodes may claim units of each lane this far beyond those that its checkpoint knows."""
MOST_UNITS = 64  # dealt at one request


class WorkLedger:
    """Which data units are dealt to which node, which are done, and which are next.

    total: number of units of the run; 0: no end.  lanes: 0 deals in the order of requests; n deals to the node with
    lane i the units i, i + n, i + 2n, ... so that the same nodes get the same data in any order (strict mode).
    stopped: an operator has ended the run, and no unit is dealt any more; not in a checkpoint.
    """

    def __init__(self, total: int = 0, lanes: int = 0) -> None:
        self.total, self.lanes = total, max(1, lanes)
        self._next = list(range(self.lanes))
        self._believed = list(self._next)  # by lane: nodes are believed about units before this one
        self._unreached: set[int] = set()  # lanes whose nodes have not said yet where they stand
        self._returned: list[int] = []  # in order
        self._in_hand: dict[PeerId, list[int]] = defaultdict(list)  # dealt and not done
        self._unbacked: dict[PeerId, list[int]] = {}  # done by nodes that have not contributed yet
        self.done_count = 0
        self.stopped = False

    def deal(self, peer: PeerId, want: int, lane: int | None = None) -> tuple[int, ...]:
        """Deal up to `want` units to a node (of its lane, if one is given); fewer when no more are left, or when it has
        as many in hand as it may."""
        numbers: list[int] = []
        want = min(want, MOST_IN_HAND - len(self._in_hand[peer]))
        while len(numbers) < want:
            back = (at for at, n in enumerate(self._returned) if lane is None or n % self.lanes == lane)
            if (place := next(back, None)) is not None:
                number = self._returned.pop(place)
            else:
                own = lane if lane is not None else self._next.index(min(self._next))
                number = self._next[own]
                if not self._left(number):
                    break
                self._next[own] += self.lanes
            numbers.append(number)
        self._in_hand[peer] += numbers
        return tuple(numbers)

    def claim(self, peer: PeerId, numbers: Iterable[int]) -> tuple[int, ...]:
        """Give a returning node the units that it had in hand; return those that are its own again.

        Units that others have by now, or that are done, are not. Units that a restarted hub does not know of are.
        """
        own: list[int] = []
        in_hand = self._in_hand[peer]
        for number in dict.fromkeys(numbers):
            lane = number % self.lanes
            if self._next[lane] <= number < self._believed[lane] and self._left(number):
                self._returned += range(self._next[lane], number + 1, self.lanes)
                self._next[lane] = number + self.lanes
            if len(in_hand) < MOST_IN_HAND and number in self._returned:
                self._returned.remove(number)
                in_hand.append(number)
            if number in in_hand:
                own.append(number)
        return tuple(own)

    def reach(self, lane: int, number: int) -> None:
        """Count the units of a lane before this one as done; its node says so once, after all have gone back to one
        state, of units that a restarted hub may not know of."""
        if lane not in self._unreached:
            return
        self._unreached.discard(lane)
        number = min(number, self._believed[lane], self.total or number)
        done = [one for one in self._returned if one % self.lanes == lane and one < number]
        self._returned = [one for one in self._returned if one not in done]
        ahead = max(0, -(-(number - self._next[lane]) // self.lanes))
        self._next[lane] += ahead * self.lanes
        self.done_count += len(done) + ahead

    def done(self, peer: PeerId, numbers: Iterable[int], backed: bool = True) -> int:
        """Mark units as done by the node that has them; return how many were. Other units are ignored.

        backed: the node has contributed; until then (`back`) its done units may be dealt again (`lost`).
        """
        numbers = self._put_down(peer, numbers)
        self.done_count += len(numbers)
        if backed:
            self.back(peer)
        elif numbers:
            self._unbacked.setdefault(peer, []).extend(numbers)
        return len(numbers)

    def back(self, peer: PeerId) -> None:
        """Record that a node has contributed: its done units stay done."""
        self._unbacked.pop(peer, None)

    def give_back(self, peer: PeerId, numbers: Iterable[int]) -> tuple[int, ...]:
        """Take units from a node's hand, because its work on them is not in the run; return which."""
        back = tuple(self._put_down(peer, numbers))
        for number in back:
            insort(self._returned, number)
        return back

    def lost(self, peer: PeerId, unbacked: bool = False) -> tuple[int, ...]:
        """Take back the units that a lost node had in hand; return their numbers.

        unbacked: also its done units, if it has not contributed.
        """
        back = self.give_back(peer, self._in_hand[peer])
        del self._in_hand[peer]
        if unbacked and not self.finished:
            again = self._unbacked.pop(peer, [])
            self.done_count -= len(again)
            for number in again:
                insort(self._returned, number)
            back += tuple(again)
        return back

    def _put_down(self, peer: PeerId, numbers: Iterable[int]) -> list[int]:
        in_hand = self._in_hand[peer]
        own = [number for number in dict.fromkeys(numbers) if number in in_hand]
        self._in_hand[peer] = [number for number in in_hand if number not in own]
        return own

    def _left(self, number: int) -> bool:
        return not self.stopped and (self.total == 0 or number < self.total)

    @property
    def finished(self) -> bool:
        """Whether every unit of a run with an end is done, or an operator has ended the run."""
        return self.stopped or (self.total > 0 and self.done_count >= self.total)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; units in hand count as returned."""
        returned = sorted(chain(self._returned, *self._in_hand.values()))
        return {"total": self.total, "next": list(self._next), "returned": returned, "done": self.done_count}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> WorkLedger:
        """Read what `state` wrote. Raises CheckpointError for anything else."""
        try:
            ledger = cls(int(state["total"]), len(state["next"]))
            ledger._next = [int(number) for number in state["next"]]
            ledger._believed = [number + CLAIMED_AHEAD * ledger.lanes for number in ledger._next]
            ledger._unreached = set(range(ledger.lanes))
            ledger._returned = sorted(int(number) for number in state["returned"])
            ledger.done_count = int(state["done"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the ledger of data units cannot be read: {error!r}") from error
        return ledger


class UnitDealer:
    """The data units of one run, and its end. members: shared with the hub; shard: index among several brokers.

    nodes_at_the_end: how many nodes trained when the data ended; the last to drain must not weigh more in a mean
    because the others have left.
    """

    def __init__(self, settings: RunSettings, members: Members, shard: int) -> None:
        self._settings, self._members, self._shard = settings, members, shard
        self._units = 0 if shard else settings.units  # that this hub deals before the run is over; 0: no end
        self.ledger = WorkLedger(self._units, settings.start_nodes if settings.mode == "strict" else 0)
        self.nodes_at_the_end = 0

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the ledger of a checkpoint. Raises what `WorkLedger.from_state` does."""
        self.ledger = WorkLedger.from_state(state)
        self.ledger.total = self._units

    def asked(
        self, member: Member, request: WorkRequest, backed: bool = True, room: int | None = None
    ) -> list[HubEffect]:
        """Record the units that a node has done, and deal those that it wants. backed: as in the ledger.

        room: how many of the done units its deltas can stand for; the others are dealt again. None: all of them.
        """
        lane = self._lane(member.peer)
        if lane is not None and request.reached >= 0:
            self.ledger.reach(lane, request.reached)
        own = () if self._shard else self.ledger.claim(member.peer, request.held[:MOST_UNITS])
        stood_for = 0 if member.quarantined else len(request.done) if room is None else max(0, room)
        member.units += self.ledger.done(member.peer, request.done[:stood_for], backed)
        self.ledger.give_back(member.peer, request.done[stood_for:])
        member.idle = False
        drained = request.idle and request.want == 0
        if self._shard:
            member.drained = drained
            if drained:
                self._data_ended()
            member.idle = request.idle and not drained and lane is None
        elif self.ledger.finished and drained:
            member.drained = True
        elif self.ledger.finished:
            self._data_ended()
            return [*self._feed_idle(), SendTo(member.peer, WorkUnit((), finished=True))]
        else:
            numbers = own + self.ledger.deal(member.peer, max(0, min(request.want, MOST_UNITS)), lane)
            if numbers or request.held:
                return [SendTo(member.peer, WorkUnit(numbers))]
            # in strict mode the others' rounds still wait for a node at the end of its lane: it makes as many offers
            member.idle = request.idle and lane is None
        return []

    def _data_ended(self) -> None:
        self.nodes_at_the_end = max(self.nodes_at_the_end, len(self._members.counted))

    def stop(self) -> list[HubEffect]:
        """Deal no more units, and have every training node drain what it has pending and leave."""
        self.ledger.stopped = True
        self._data_ended()
        live = self._members.in_state(MemberState.LIVE)
        for member in live:
            member.idle = False
        return [SendTo(member.peer, Stop()) for member in live]

    def lost(self, peer: PeerId, unbacked: bool = False) -> list[HubEffect]:
        """Take back the units of a peer that is gone, or has forgotten them. unbacked: as in the ledger."""
        return self._feed_idle() if self.ledger.lost(peer, unbacked) else []

    def end_when_drained(self, version: Version) -> list[HubEffect]:
        """Let all nodes go once nothing is pending anywhere."""
        live = self._members.in_state(MemberState.LIVE)
        if not (self.ledger.finished or self._shard) or not all(
            member.drained for member in live if not member.follows
        ):
            return []
        return [SendTo(member.peer, WorkUnit((), finished=True, end_version=version)) for member in live]

    def _feed_idle(self) -> list[HubEffect]:
        effects: list[HubEffect] = []
        for member in self._members.values():
            if not member.idle:
                continue
            numbers = self.ledger.deal(member.peer, 1)
            if numbers or self.ledger.finished:
                member.idle = False
                effects.append(SendTo(member.peer, WorkUnit(numbers, finished=self.ledger.finished)))
        return effects

    def _lane(self, peer: PeerId) -> int | None:
        """The lane of a node in strict mode; None otherwise, and while a node is missing or quarantined."""
        nodes = sorted(self._members.training)
        strict = self._settings.mode == "strict" and len(nodes) == self.ledger.lanes
        return nodes.index(peer) if strict and peer in nodes else None
