"""Join communicators to their port: one listener, and who of the group goes on after a loss.

Rule 1: a message says by its context which communicator it is for; what comes for one that this process does not have
yet waits for it, what comes for one that is over is dropped.
Rule 2: survivors agree before they go on: each says whom it knows to be lost, adds what the others know, and has its
new communicator once all who live have said the same. Its context follows from who is in it: none goes on with others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import cast

from zmqtrain.collectives.arrays import dtype_of_code
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.wire import Head, Kind, digest, pack, unpack
from zmqtrain.core.errors import CollectiveTimeout, FramingError
from zmqtrain.core.interfaces import HubPort, Port
from zmqtrain.core.types import HUB, Buffer, HubChunk

logger = logging.getLogger(__name__)

_EARLY_MESSAGES = 65_536
"""How many messages may wait for a communicator that this process does not have yet."""


class Endpoint:
    """The `PortListener` of a port, with its communicators."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.thread: int | None = None
        self._groups: dict[int, Group] = {}
        self._over: set[int] = set()
        self._early: list[tuple[int, Head, memoryview | None]] = []
        self._lost: dict[int, str] = {}
        self._differed: set[int] = set()  # contexts
        self._said: dict[int, str] = {}  # by rank of the port: the survivors' last words
        self._shrinking: list[Callable[[Group | None], object]] = []

    def start(self) -> Group:
        """Start the port; return the communicator of all."""
        group = self._add(tuple(range(len(self.port.names))))
        self.port.call(self._remember_thread)
        self.port.start(self)
        return group

    def _remember_thread(self) -> None:
        self.thread = threading.get_ident()

    def _add(self, members: tuple[int, ...]) -> Group:
        text = f"{members} {sorted(self._differed)}"
        context = digest(text) & 0xFFFFFFFF
        rank, names = members.index(self.port.rank), tuple(self.port.names[member] for member in members)
        group = self._groups[context] = Group(self, context, members, rank, names)
        return group

    # ------------------------------------------------------------------ the port's thread

    def send(self, rank: int, context: int, head: Head, values: memoryview | None) -> int:
        """Send one message to a rank of the port; return its bytes."""
        packed = pack(head, context)
        if values is None:
            self.port.send(rank, [packed])
            return len(packed)
        self.port.send(rank, [packed, values])
        return len(packed) + values.nbytes

    def reduce(self, context: int, head: Head, values: memoryview) -> int:
        """Have the hub reduce a part of a call; return the message's bytes."""
        packed = pack(head, context)
        key = digest(f"{context} {head.number} {head.digest}") >> 1  # calls that differ do not meet
        port = cast(HubPort, self.port)
        port.reduce(HubChunk(key, head.text, dtype_of_code(head.flag).name), [packed, values])
        return len(packed) + values.nbytes

    def on_message(self, rank: int, frames: list[Buffer]) -> None:
        """See PortListener."""
        try:
            head, values = unpack(frames)
        except FramingError as error:
            logger.warning("%s sent what is no message: %s", self._name(rank), error)
            return
        group = self._groups.get(head.context)
        if head.kind == Kind.SURVIVORS:
            self._hear_survivors(rank, head.text)
        elif group is not None and (rank == HUB or rank in group.members):
            group.traffic.count_received(len(frames[0]), 0 if values is None else values.nbytes)
            group.hear(rank if rank == HUB else group.members.index(rank), head, values)
        elif group is None and head.context not in self._over and len(self._early) < _EARLY_MESSAGES:
            self._early.append((rank, head, values))

    def on_lost(self, rank: int, why: str) -> None:
        """See PortListener."""
        if rank == HUB:
            for group in list(self._groups.values()):
                group.on_lost(HUB, why)
        elif rank not in self._lost:
            self._lost[rank] = why
            for group in list(self._groups.values()):
                if rank in group.members:
                    group.on_lost(group.members.index(rank), why)
            self._look_who_survives()

    def on_tick(self, now: float) -> None:
        """See PortListener."""
        for group in list(self._groups.values()):
            group.on_tick(now)

    def _name(self, rank: int) -> str:
        return "the hub" if rank == HUB else self.port.names[rank]

    def note_lost(self, rank: int, why: str) -> None:
        """Count a rank among the lost: another one says so, or it has closed its communicator."""
        if rank != self.port.rank and rank not in self._lost:
            self._lost[rank] = why
            self._look_who_survives()

    def note_difference(self, context: int) -> None:
        """Remember that a communicator ended though all who are in it live, so that the next one is another one."""
        self._differed.add(context)

    def retire(self, group: Group) -> None:
        """Hear nothing more of a communicator."""
        self._groups.pop(group.context, None)
        self._over.add(group.context)

    # ------------------------------------------------------------------ who goes on

    def shrink(self, done: Callable[[Group | None], object]) -> None:
        """Have `done` called with the communicator of those who live, once they agree, or None: this one is cut off."""
        self._shrinking.append(done)
        self._look_who_survives(say=True)

    def stop_shrinking(self, done: Callable[[Group | CollectiveTimeout | None], object], seconds: float) -> None:
        """Wait no more: unless `done` was called, call it with the error of who has waited so long for the others."""
        if done in self._shrinking:
            self._shrinking.remove(done)
            missing = self._unheard()
            whom = ", ".join(f"{self.port.names[rank]} (rank {rank} at first)" for rank in missing)
            done(CollectiveTimeout(f"shrink has waited {seconds:.3g} s for {whom}", missing))

    def _unheard(self) -> tuple[int, ...]:
        """Return the port's ranks that live and have not said the same as this one."""
        own = self._last_words()
        return tuple(r for r in self._living() if r != self.port.rank and self._said.get(r) != own)

    def _living(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(len(self.port.names)) if rank not in self._lost)

    def _last_words(self) -> str:
        return f"{','.join(map(str, sorted(self._lost)))};{','.join(map(str, sorted(self._differed)))}"

    def _hear_survivors(self, rank: int, text: str) -> None:
        try:
            lost, differed = ([int(word) for word in part.split(",") if word] for part in text.split(";"))
        except ValueError:
            logger.warning("%s sent what is no message of a survivor", self.port.names[rank])
            return
        self._said[rank] = text
        self._differed.update(differed)
        for other in lost:
            if other != self.port.rank and 0 <= other < len(self.port.names):
                self.on_lost(other, f"{self.port.names[rank]} has lost it")
        self._look_who_survives()

    def _look_who_survives(self, say: bool = False) -> None:
        """Say who lives, where that is asked for and new; go on if all who live say the same."""
        if not self._shrinking:
            return
        shrinking = list(self._shrinking)
        if self.port.rank in self._lost:
            self._shrinking.clear()
            for done in shrinking:
                done(None)
            return
        words = self._last_words()
        if say or self._said.get(self.port.rank) != words:
            self._said[self.port.rank] = words
            for rank in self._living():
                if rank != self.port.rank:
                    self.send(rank, 0, Head(Kind.SURVIVORS, text=words), None)
        if self._unheard():
            return
        for group in list(self._groups.values()):
            if group.broken is not None:
                self.retire(group)
        group = self._add(self._living())
        self._shrinking.clear()
        for done in shrinking:
            done(group)
        early, self._early = self._early, []
        for rank, head, values in early:
            if head.context == group.context and rank in group.members:
                group.hear(group.members.index(rank), head, values)
            elif head.context not in self._over:
                self._early.append((rank, head, values))
