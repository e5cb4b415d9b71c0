"""Groups of processes at the hub: who is which rank, who is missing, who is lost, what the hub relays (pure).

Rule 1: a refusal says what to do. A process that conflicts with waiting ones may ask again, because those may be dead
and not yet lost; if one of them is heard after that, the group cannot form, and all of them are refused with the same
sentence. A waiting process is told who is here and how many are missing.
Rule 2: the hub alone decides who of a group is lost, and tells all in one order. The first report of a rank counts, and
a lost process is not heard any more.
Rule 3: a complete group takes nobody in. Its name is free once one of its processes is gone, and for its own processes.
Rule 4: everything is bounded: groups, processes, the length of texts, and the messages in flight through the hub.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.effects import Combine, Discard, Forward, HubEffect, SendTo
from zmqtrain.protocol.members import ADDRESS, Member
from zmqtrain.protocol.messages import (
    Forming,
    Group,
    GroupLost,
    JoinGroup,
    Message,
    ReduceChunk,
    Refused,
    Relay,
    Relayed,
    WireProcess,
    printable,
)

MAX_GROUPS, MAX_PROCESSES = 64, 256
"""Groups at one hub, complete or not; processes of one."""
MAX_GROUP_NAME, MAX_DESCRIPTION = 64, 1024
"""Characters."""
MAX_WHY, MAX_ADDRESS, MAX_TOKEN = 300, 200, 64
RELAY_MESSAGES, RELAY_BYTES = 16, 4 << 20
"""Messages and bytes (or one message) of one process in flight through the hub, to all others together."""
SILENCE_SECONDS = 2.4
"""Timeout of a process: longer than 2 s, for which a call that holds the interpreter, or a stop, may halt all threads;
with `failure_detector.VERDICT_SECONDS` and the ticks under 3 s."""
LATE_SECONDS = 0.5
"""An observer that has not looked for longer than this was busy or stopped itself; the rest counts for no timeout."""
FORMING_SECONDS = 0.5  # between two messages to waiting processes about others
SHOWN_NAMES = FORMING_SHOWN = 8


def list_names(names: Iterable[str]) -> str:
    """Return names for a sentence: the first eight, and how many more there are."""
    all_names = list(names)
    more = len(all_names) - SHOWN_NAMES
    return ", ".join(all_names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


class Window:
    """Bound on messages in flight: so many messages, and so many bytes or one message.

    Messages have keys (a receiver, a chunk) and arrive in order for each.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self.messages, self.nbytes = messages, nbytes
        self._sizes: dict[int, deque[int]] = {}
        self._count = self._bytes = 0

    def has_room(self, size: int) -> bool:
        return self._count < self.messages and (not self._count or self._bytes + size <= self.nbytes)

    def add(self, key: int, size: int) -> None:
        self._sizes.setdefault(key, deque()).append(size)
        self._count, self._bytes = self._count + 1, self._bytes + size

    def count(self, key: int | None = None) -> int:
        """Return how many messages of a key are in flight; None: of all."""
        return self._count if key is None else len(self._sizes.get(key, ()))

    def remove(self, key: int, messages: int = 1) -> None:
        """Make room for messages of a key that have arrived, the oldest."""
        sizes = self._sizes.get(key)
        for _ in range(min(messages, self.count(key))):
            assert sizes is not None
            self._count, self._bytes = self._count - 1, self._bytes - sizes.popleft()
        if not sizes:
            self._sizes.pop(key, None)

    def forget(self, key: int) -> None:
        """Make room for all messages of a key."""
        self.remove(key, self.count(key))


@dataclass(eq=False)
class _Forming:
    """A group that is not complete. waiting: in order of arrival.  disputed: when a process first asked for something
    else than those that wait."""

    size: int
    description: str
    waiting: dict[PeerId, tuple[Member, JoinGroup]] = field(default_factory=dict)
    disputed: dict[PeerId, float] = field(default_factory=dict)
    told_at: float = float("-inf")
    news: bool = False


@dataclass(eq=False)
class _Complete:
    """A complete group. here: the ranks that are left.  relayed: by sender the messages in flight, by receiver."""

    group: str
    generation: int
    names: tuple[str, ...]
    here: dict[PeerId, int]
    relayed: dict[int, Window] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return len(self.here) == len(self.names)

    def peer(self, rank: int) -> PeerId | None:
        return next((peer for peer, one in self.here.items() if one == rank), None)


class Groups:
    """All groups at one hub. handlers: the methods that take messages of processes."""

    def __init__(self) -> None:
        self._forming: dict[str, _Forming] = {}
        self._complete: list[_Complete] = []
        self._in: dict[PeerId, _Complete] = {}
        self._generation = 0
        self.handlers: dict[type[Message], Callable[[Member, Any, float], list[HubEffect]]] = {
            JoinGroup: self.join,
            GroupLost: self.accused,
            Relay: self.relay,
            Relayed: self.relayed,
            ReduceChunk: self.reduce,
        }

    # ------------------------------------------------------------------ meeting

    @property
    def forming(self) -> dict[str, int]:
        """How many processes wait in groups that are not complete, for rosters: of the first few, by the group's
        name."""
        first = list(self._forming.items())[:FORMING_SHOWN]
        return {f"group {printable(name)}": len(one.waiting) for name, one in first if one.waiting}

    def join(self, member: Member, asked: JoinGroup, now: float) -> list[HubEffect]:
        """Add a process to its group, which may now be complete; or refuse it.

        Raises RemoteProtocolError if it is in one, or waits for one.
        """
        peer = member.peer
        if peer in self._in or any(peer in forming.waiting for forming in self._forming.values()):
            raise RemoteProtocolError(peer, member.state.value, "a second JoinGroup")
        if why := _unsound(asked):
            return [SendTo(peer, Refused("group", why))]
        if why := self._complete_already(member.name, asked) or self._full(asked):
            return [SendTo(peer, Refused("occupied", why))]
        forming = self._forming.setdefault(asked.group, _Forming(asked.size, asked.description))
        holder, why = _dispute(forming, member.name, asked)
        if holder is not None:
            since = forming.disputed.setdefault(peer, now)
            if holder.last_seen <= since:
                return [SendTo(peer, Refused("occupied", why))]
            del self._forming[asked.group]
            return [SendTo(other, Refused("group", why)) for other in (peer, *forming.waiting)]
        forming.disputed.pop(peer, None)
        forming.waiting[peer] = (member, asked)
        if len(forming.waiting) == forming.size:
            return self._meet(asked.group, self._forming.pop(asked.group))
        forming.news = len(forming.waiting) > 1
        return [SendTo(peer, _describe(asked.group, forming))]

    def _full(self, asked: JoinGroup) -> str:
        if asked.group in self._forming or len(self._forming) + len(self._complete) < MAX_GROUPS:
            return ""
        return f"this broker has {MAX_GROUPS} groups already: end some, or use another broker"

    def _complete_already(self, name: str, asked: JoinGroup) -> str:
        """Return why a process of this name cannot join a complete group, "" if there is none, or one has left it, or
        others of its name may meet."""
        if asked.repeated:
            return ""
        for group in self._complete:
            if group.group == asked.group and group.whole and name not in group.names:
                return (
                    f"the group {asked.group!r} is complete: {list_names(group.names)} are in it. Choose another name "
                    "for the group, or start again when they have gone"
                )
        return ""

    def _meet(self, name: str, forming: _Forming) -> list[HubEffect]:
        """Give each process the rank that it asked for, the others a free one in order of arrival."""
        by_rank = {asked.rank: peer for peer, (_, asked) in forming.waiting.items() if asked.rank >= 0}
        free = iter([rank for rank in range(forming.size) if rank not in by_rank])
        by_rank |= {next(free): peer for peer, (_, asked) in forming.waiting.items() if asked.rank < 0}
        members: list[WireProcess] = []
        for rank in range(forming.size):
            process, asked = forming.waiting[by_rank[rank]]
            members.append((process.name, asked.address, asked.key, asked.token))
        here = {by_rank[rank]: rank for rank in range(forming.size)}
        self._generation += 1
        complete = _Complete(name, self._generation, tuple(member[0] for member in members), here)
        self._complete.append(complete)
        self._in |= dict.fromkeys(here, complete)
        return [SendTo(peer, Group(name, self._generation, rank, tuple(members))) for peer, rank in here.items()]

    def tick(self, now: float) -> list[HubEffect]:
        """Tell waiting processes who has come or gone since the last message."""
        effects: list[HubEffect] = []
        for name, forming in self._forming.items():
            if forming.news and now - forming.told_at >= FORMING_SECONDS:
                forming.news, forming.told_at = False, now
                told = _describe(name, forming)
                effects += [SendTo(peer, told) for peer in forming.waiting]
        return effects

    # ------------------------------------------------------------------ parting

    def gone(self, peer: PeerId, why: str, left: bool = False) -> list[HubEffect]:
        """Remove a process that is gone, and tell its group, and the process itself in case it is alive.

        left: it said goodbye.
        """
        if (group := self._in.get(peer)) is not None:
            return self._lose(group, peer, why, left)
        for name, forming in self._forming.items():
            if peer in forming.waiting:
                del forming.waiting[peer]
                forming.news = True
                if not forming.waiting:
                    del self._forming[name]
                break
            forming.disputed.pop(peer, None)
        return []

    def accused(self, member: Member, lost: GroupLost, now: float) -> list[HubEffect]:
        """A process reports that a rank of its group is gone: tell all, the lost one too.

        A report of a lost rank, or by a lost process, is ignored. Raises RemoteProtocolError for a rank that does not
        exist.
        """
        if (group := self._in.get(member.peer)) is None:
            return []
        if not 0 <= lost.rank < len(group.names):
            raise RemoteProtocolError(member.peer, member.state.value, f"a GroupLost of rank {lost.rank}")
        if (peer := group.peer(lost.rank)) is None:
            return []
        return self._lose(group, peer, f"{printable(lost.why, MAX_WHY)} (noticed by {member.name})", False)

    def _lose(self, group: _Complete, peer: PeerId, why: str, left: bool) -> list[HubEffect]:
        effects: list[HubEffect] = [Discard(group.generation)] if group.whole else []
        del self._in[peer]
        rank = group.here.pop(peer)
        group.relayed.pop(rank, None)
        for window in group.relayed.values():
            window.forget(rank)
        if not group.here:
            self._complete.remove(group)
        told = [*group.here] if left else [*group.here, peer]
        return effects + [SendTo(other, GroupLost(rank, why, left)) for other in told]

    # ------------------------------------------------------------------ through the hub

    def relay(self, member: Member, relay: Relay, now: float) -> list[HubEffect]:
        """Forward a message with the frames behind it; nothing if its receiver, or its sender, is lost.

        Raises RemoteProtocolError beyond the window, and for a rank that cannot be sent to.
        """
        if (group := self._in.get(member.peer)) is None:
            return []
        rank = group.here[member.peer]
        if not 0 <= relay.rank < len(group.names) or relay.rank == rank or relay.size < 0:
            raise RemoteProtocolError(member.peer, member.state.value, f"a Relay of {relay.size} to rank {relay.rank}")
        if (receiver := group.peer(relay.rank)) is None:
            return []
        window = group.relayed.setdefault(rank, Window(RELAY_MESSAGES, RELAY_BYTES))
        if not window.has_room(relay.size):
            raise RemoteProtocolError(member.peer, member.state.value, "a Relay beyond its window")
        window.add(relay.rank, relay.size)
        return [Forward(receiver, Relay(rank, relay.size))]

    def relayed(self, member: Member, relayed: Relayed, now: float) -> list[HubEffect]:
        """Tell a sender that its messages arrived. Raises RemoteProtocolError for messages that were not in flight."""
        if (group := self._in.get(member.peer)) is None:
            return []
        sender, rank = group.peer(relayed.rank), group.here[member.peer]
        if sender is None:
            return []
        window = group.relayed.get(relayed.rank)
        if window is None or not 1 <= relayed.messages <= window.count(rank):
            raise RemoteProtocolError(member.peer, member.state.value, "a Relayed of what was not in flight")
        window.remove(rank, relayed.messages)
        return [SendTo(sender, Relayed(rank, relayed.messages))]

    def reduce(self, member: Member, chunk: ReduceChunk, now: float) -> list[HubEffect]:
        """Have a chunk reduced; nothing if a process of the group is lost."""
        group = self._in.get(member.peer)
        if group is None or not group.whole:
            return []
        return [Combine(group.generation, group.here[member.peer], tuple(group.here), chunk)]


def _dispute(forming: _Forming, name: str, asked: JoinGroup) -> tuple[Member | None, str]:
    """Return a waiting process that conflicts with this one, and how; (None, "") if there is none."""
    if not forming.waiting:
        return None, ""
    first, _ = next(iter(forming.waiting.values()))
    if asked.size != forming.size:
        return first, (
            f"{first.name} forms the group {asked.group!r} for {forming.size} processes, {name} wants one of "
            f"{asked.size}: start all with the same size, or choose another name for the group"
        )
    if asked.description != forming.description:
        return first, (
            f"in the group {asked.group!r} {first.name} is for {forming.description!r}, {name} for "
            f"{asked.description!r}: start the same program with the same options, or choose another name for the group"
        )
    for holder, other in forming.waiting.values():
        if asked.rank >= 0 and other.rank == asked.rank:
            return holder, (
                f"rank {asked.rank} of the group {asked.group!r} is taken, by {holder.name}: give {name} another one "
                f"of 0 to {asked.size - 1}, or none"
            )
    return None, ""


def _describe(name: str, forming: _Forming) -> Forming:
    here = tuple(process.name for process, _ in forming.waiting.values())
    return Forming(name, here, forming.size - len(here))


def _unsound(asked: JoinGroup) -> str:
    """Return why a request is invalid, "" if it is not."""
    if not (1 <= len(asked.group) <= MAX_GROUP_NAME and asked.group.isprintable()):
        return f"the name of a group has 1 to {MAX_GROUP_NAME} printable characters, not {asked.group[:80]!r}"
    if not 1 <= asked.size <= MAX_PROCESSES:
        return f"a group has 1 to {MAX_PROCESSES} processes, not {asked.size}"
    if not -1 <= asked.rank < asked.size:
        return f"rank {asked.rank} of {asked.size}: ranks are 0 to {asked.size - 1}; give one of these, or none"
    if len(asked.description) > MAX_DESCRIPTION:
        return f"a description of {len(asked.description)} characters: it has at most {MAX_DESCRIPTION}"
    if len(asked.address) > MAX_ADDRESS or not ADDRESS.fullmatch(asked.address):
        return f"{asked.address[:80]!r} is no address at which others reach this process: tcp://HOST:PORT"
    if len(asked.key) not in (0, 40) or not 1 <= len(asked.token) <= MAX_TOKEN or not asked.token.isalnum():
        return "the key has 40 characters or none, the token 1 to 64 letters and digits"
    return ""
