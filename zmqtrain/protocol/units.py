"""Data units: a ledger of numbered units that are dealt to nodes, and the end of the run when all are done.

Rule 1: a unit is a number; its meaning is the program's business. A unit of a lost node is dealt again unless it was
done. Returned units are dealt first (in a run with lanes, within their lane).
Rule 2: a unit is done once, by the node that it was dealt to. A ledger read from a checkpoint also believes nodes about
units that it has not dealt, at most CLAIMED_AHEAD of each lane.
Rule 3: the first master deals; nodes tell other masters only that they wait for data, or have drained.
Rule 4: a round does not wait for a node without data; the units of a lost node go to waiting nodes.
Rule 5: a run ends when all units are done and nothing is pending at any node: then all end with the same parameters.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId, Version
from zmqtrain.protocol.effects import HubEffect, SendTo
from zmqtrain.protocol.members import Member, MemberState, counted, training
from zmqtrain.protocol.messages import Stop, WorkRequest, WorkUnit

MOST_IN_HAND = 256
"""So many units are dealt to one node at most that it has not done: nodes keep two; nobody takes a run's data."""

CLAIMED_AHEAD = 4096
"""After a restart of the hub nodes may claim units so far beyond those that its checkpoint knows of."""


class WorkLedger:
    """Which data units are dealt to whom, which are done, and which are next.

    total: how many units the run has; 0: no end.  lanes: 0 deals in the order of asking; n deals to the node with lane
        i the units i, i + n, i + 2n, ... so that the same nodes get the same data whoever asks first (strict mode).
    """

    def __init__(self, total: int = 0, lanes: int = 0) -> None:
        self.total, self.lanes = total, max(1, lanes)
        self._next = list(range(self.lanes))
        self._believed = list(self._next)  # by lane: nodes are believed about units before this one
        self._unreached: set[int] = set()  # the lanes whose nodes have not said yet where they stand
        self._returned: list[int] = []  # in order
        self._dealt: dict[int, PeerId] = {}
        self._in_hand: Counter[PeerId] = Counter()
        self._unbacked: dict[PeerId, list[int]] = {}  # done by nodes of which nothing has come yet
        self.done_count = 0
        self.stopped = False
        """Whether an operator has ended the run: no unit is dealt any more. A checkpoint does not hold it."""

    def deal(self, peer: PeerId, want: int, lane: int | None = None) -> tuple[int, ...]:
        """Deal up to `want` units to a node; fewer or none when no more are left (in its lane, where one is given), or
        it has as many in hand as it may."""
        numbers: list[int] = []
        want = min(want, MOST_IN_HAND - self._in_hand[peer])
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
            self._dealt[number] = peer
            self._in_hand[peer] += 1
            numbers.append(number)
        return tuple(numbers)

    def claim(self, peer: PeerId, numbers: Iterable[int]) -> tuple[int, ...]:
        """Give a node that comes back what it had in hand; return what of it is its own again.

        What others have by now, or is done, is not; what a restarted hub had not dealt yet, as far as it knows, is.
        """
        own: list[int] = []
        for number in dict.fromkeys(numbers):
            lane = number % self.lanes
            if self._next[lane] <= number < self._believed[lane] and self._left(number):
                self._returned += range(self._next[lane], number + 1, self.lanes)
                self._next[lane] = number + self.lanes
            if self._in_hand[peer] < MOST_IN_HAND and number in self._returned:
                self._returned.remove(number)
                self._dealt[number] = peer
                self._in_hand[peer] += 1
            if self._dealt.get(number) == peer:
                own.append(number)
        return tuple(own)

    def reach(self, lane: int, number: int) -> None:
        """Take the units of a lane before this one as done: its node says so, after all have gone back to one state.

        A lane's node says so once, of units that a restarted hub may not know of.
        """
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
        """Mark units as done by the node that has them; return how many were. Others' and unknown ones are ignored.

        backed: deltas of this node have come; until then (`back`) what it has done may be dealt again (`lost`).
        """
        numbers = self._put_down(peer, numbers)
        self.done_count += len(numbers)
        if backed:
            self.back(peer)
        elif numbers:
            self._unbacked.setdefault(peer, []).extend(numbers)
        return len(numbers)

    def back(self, peer: PeerId) -> None:
        """Record that a delta of this node has come: what it has done until now stays done."""
        self._unbacked.pop(peer, None)

    def give_back(self, peer: PeerId, numbers: Iterable[int]) -> tuple[int, ...]:
        """Deal units again that a node has in hand, as its work on them is not in the run; return which."""
        back = tuple(self._put_down(peer, numbers))
        for number in back:
            insort(self._returned, number)
        return back

    def lost(self, peer: PeerId, unbacked: bool = False) -> tuple[int, ...]:
        """Take back what a lost node had not finished; return the numbers.

        unbacked: also what it had done, as nothing of its work has come.
        """
        back = self.give_back(peer, [number for number, owner in self._dealt.items() if owner == peer])
        del self._in_hand[peer]
        if unbacked and not self.finished:
            again = self._unbacked.pop(peer, [])
            self.done_count -= len(again)
            for number in again:
                insort(self._returned, number)
            back += tuple(again)
        return back

    def _put_down(self, peer: PeerId, numbers: Iterable[int]) -> list[int]:
        """Take those of these units that a node has out of its hand."""
        own = [number for number in dict.fromkeys(numbers) if self._dealt.get(number) == peer]
        for number in own:
            del self._dealt[number]
        self._in_hand[peer] -= len(own)
        return own

    def _left(self, number: int) -> bool:
        return not self.stopped and (self.total == 0 or number < self.total)

    @property
    def finished(self) -> bool:
        """True when every unit of a run with an end is done, and of a run that an operator has ended."""
        return self.stopped or (self.total > 0 and self.done_count >= self.total)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; what is dealt and not done counts as returned."""
        returned = sorted([*self._returned, *self._dealt])
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


MOST_UNITS = 64
"""No more units are dealt at one request."""


class UnitDealer:
    """The data units of one run, and its end. members: the hub's own; shard: which of several masters this is."""

    def __init__(self, settings: RunSettings, members: Mapping[PeerId, Member], shard: int) -> None:
        self._settings, self._members, self._shard = settings, members, shard
        self.ledger = WorkLedger(self._units, settings.start_nodes if settings.mode == "strict" else 0)
        self.nodes_at_the_end = 0
        """How many trained when the data ended: who drains last must not weigh more because the others have left."""

    @property
    def _units(self) -> int:
        """How many data units this hub deals before the run is over; 0: no end."""
        return 0 if self._shard else self._settings.units

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the ledger of a checkpoint. Raises what `WorkLedger.from_state` does."""
        self.ledger = WorkLedger.from_state(state)
        self.ledger.total = self._units

    def asked(self, member: Member, request: WorkRequest, backed: bool = True) -> list[HubEffect]:
        """Take a node's word on what it has done, and deal what it wants, if there is any. backed: as in the ledger."""
        lane = self._lane(member.peer)
        if lane is not None and request.reached >= 0:
            self.ledger.reach(lane, request.reached)
        own = () if self._shard else self.ledger.claim(member.peer, request.held[:MOST_UNITS])
        if member.quarantined:  # nothing of its work is taken
            self.ledger.give_back(member.peer, request.done)
        else:
            member.units += self.ledger.done(member.peer, request.done, backed)
        member.idle = False
        if self._shard:
            self._told(member, request)
        elif self.ledger.finished and request.idle and request.want == 0:
            member.drained = True
        elif self.ledger.finished:
            self._data_ended()
            return [*self._feed_idle(), SendTo(member.peer, WorkUnit((), finished=True))]
        elif (
            numbers := own + self.ledger.deal(member.peer, max(0, min(request.want, MOST_UNITS)), lane)
        ) or request.held:
            return [SendTo(member.peer, WorkUnit(numbers))]
        else:
            # in strict mode the others' rounds still wait for a node at the end of its share: it has as many offers
            member.idle = request.idle and lane is None
        return []

    def _told(self, member: Member, request: WorkRequest) -> None:
        """A node says to another master than the first that it waits for data units, or that all it had has landed."""
        member.drained = request.idle and request.want == 0
        if member.drained:
            self._data_ended()
        member.idle = request.idle and not member.drained and self._lane(member.peer) is None

    def _data_ended(self) -> None:
        self.nodes_at_the_end = max(self.nodes_at_the_end, len(counted(self._members)))

    def stop(self) -> list[HubEffect]:
        """Deal no unit any more, and have every node that trains drain what it has pending and leave."""
        self.ledger.stopped = True
        self._data_ended()
        live = [member for member in self._members.values() if member.state is MemberState.LIVE]
        for member in live:
            member.idle = False
        return [SendTo(member.peer, Stop()) for member in live]

    def lost(self, peer: PeerId, unbacked: bool = False) -> list[HubEffect]:
        """Take back what a peer had in hand: it is gone, or has forgotten it. unbacked: as in the ledger."""
        return self._feed_idle() if self.ledger.lost(peer, unbacked) else []

    def end_when_drained(self, version: Version) -> list[HubEffect]:
        """Let everybody go once nothing is pending anywhere."""
        live = [member for member in self._members.values() if member.state is MemberState.LIVE]
        if not (self.ledger.finished or self._shard) or not all(member.drained for member in live):
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
        """The node's fixed share of the data in strict mode; None when there is none, or somebody is missing."""
        nodes = sorted(training(self._members))
        strict = self._settings.mode == "strict" and len(nodes) == self.ledger.lanes
        return nodes.index(peer) if strict and peer in nodes else None  # one that is quarantined has none
