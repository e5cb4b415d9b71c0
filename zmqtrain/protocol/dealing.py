"""Deal data units to the members of a hub, and know when the run has come to its end.

Rule 1: the first master deals; another one's nodes only tell it that they wait for data, or have drained.
Rule 2: who waits for data is not awaited in a round; who is gone gives its units to who waits.
Rule 3: a run ends when all units are done and nothing is pending at any node: then all end with the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId, Version
from zmqtrain.protocol.effects import HubEffect, SendTo
from zmqtrain.protocol.members import Member, MemberState, counted, training
from zmqtrain.protocol.messages import Stop, WorkRequest, WorkUnit
from zmqtrain.protocol.work import WorkLedger

MOST_UNITS = 64
"""No more units are dealt at one request."""


class Dealing:
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
