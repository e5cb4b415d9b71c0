"""Be a node's lines to several masters: open them, found the run over them or join it, and follow who has moved.

Rule 1: the run begins at the first LAST: who is asked to found it founds the others before it answers, and whoever else
joins the others only when it takes part at the first. So where the first has parameters, all have, and of one node.
Rule 2: the first says where the others are; one that is not there, or is another than it says, is said to the user.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zmqtrain.core.errors import HubUnreachable, JoinRefused, ZmqTrainError
from zmqtrain.core.types import ModelSpec, Part, Update
from zmqtrain.node.line import Line
from zmqtrain.protocol.members import name_missing

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.01
"""How often a node looks, while it joins, whether it may go on."""
SAY_AGAIN_SECONDS = 5.0


class Lines:
    """The lines of one node, in the order of the shards. first: welcomed.  open_line, wait_seconds: see `MastersNode`.

    others: all but the first; none until the node joins.
    """

    def __init__(self, first: Line, open_line: Callable[[str], Line], wait_seconds: float) -> None:
        self._first, self._open_line, self._wait_seconds = first, open_line, wait_seconds
        self._count = first.settings.masters
        self.others: list[Line] = []
        first.answers_later = True

    def __iter__(self) -> Iterator[Line]:
        return iter((self._first, *self.others))

    def __getitem__(self, shard: int) -> Line:
        return (self._first, *self.others)[shard]

    @property
    def waiting_for(self) -> str:
        """What the node is waiting for, in a few words; "" for nothing."""
        if not self.others and not self._first.has_joined() and (missing := name_missing(self._first.masters)):
            return missing
        return next((line.waiting_for for line in self if line.waiting_for), "")

    def follow_moved(self) -> None:
        """Have the lines of masters that came back elsewhere look there: the first says where they are."""
        for shard, line in enumerate(self.others, 1):
            if line.unreachable and self._address(shard) not in ("", line.address):
                line.move(self._address(shard))

    def join(self, model: ModelSpec, leaves: Sequence[Any], score: float, moments: Sequence[Any]) -> Update | None:
        """Join at all masters; the arguments, and what is returned and raised, are those of `MastersNode.join`."""
        self._first.begin_join(model, leaves, score=score, moments=moments)
        while True:
            self._until(lambda: self._first.has_joined() or self._first.wanted, lambda: self.waiting_for)
            if self._first.has_joined():
                break
            self._leave_others()
            if self.found_others(model, leaves):
                self._first.lend(leaves, moments)
        update = self._first.end_join()
        if update is None and self.others:
            return None
        self._leave_others()  # whose parameters are not the run's, or no more than the first's were
        return self._join_others(model, update)

    def found_others(self, model: ModelSpec, leaves: Sequence[Any]) -> bool:
        """Give the others their shards of this node's parameters; False if the first does not ask for that any more."""
        number = self._first.founding

        def obsolete() -> bool:
            return not (self._first.wanted and self._first.founding == number)

        try:
            for shard in range(1, self._count):
                if (line := self._open(shard, obsolete)) is None:
                    break
                line.founding = number
                line.begin_join(model, leaves)
            for line in self.others:
                self._until(lambda line=line: line.has_joined() or obsolete(), lambda line=line: line.waiting_for)  # type: ignore[misc]
        except JoinRefused as error:
            # another was asked: its word may be there before the loss of the first is seen here
            self._leave_others()
            if error.reason != "founding" or not self._wait(obsolete, 2 * self._first.settings.lost_seconds):
                raise
            return False
        if obsolete():
            self._leave_others()
            return False
        for line in self.others:
            line.end_join()
            line.founding = 0
        return True

    def _join_others(self, model: ModelSpec, update: Update | None) -> Update:
        anchor: list[Part] = []
        version = -1
        if update is not None:
            anchor, version = [*(update.anchor or ())], update.version
        for shard in range(1, self._count):
            line = self._open(shard, lambda: False)
            assert line is not None
            line.begin_join(model, ())
        for line in self.others:
            self._until(line.has_joined, lambda line=line: line.waiting_for)  # type: ignore[misc]
            theirs = line.end_join()
            if theirs is None or theirs.anchor is None:
                raise ZmqTrainError(
                    f"the master at {line.address} sent no parameters of its shard: start this node again"
                )
            anchor += theirs.anchor
        return Update(version, {}, {}, anchor=anchor)

    def _open(self, shard: int, obsolete: Callable[[], bool]) -> Line | None:
        """Make the line to a master, once the first says where it is; None if that has become obsolete."""
        self._until(lambda: bool(self._address(shard)) or obsolete(), lambda: name_missing(self._first.masters))
        if obsolete():
            return None
        address = self._address(shard)
        line = self._open_line(address)
        self.others.append(line)
        try:
            line.wait_welcome(self._wait_seconds)
        except HubUnreachable:
            if self._address(shard) == address:
                raise HubUnreachable(
                    f"the master of shard {shard} is at {address}, says the first, and does not answer from here "
                    f"(waited {self._wait_seconds:g} s). If other PCs reach it at another address, start it with "
                    "--address tcp://HOST:PORT; and its firewall must let that port in",
                    address,
                ) from None
            self.others.pop().close()  # it has gone meanwhile, or come back elsewhere
            return self._open(shard, obsolete)
        if (line.run, line.shard) != (self._first.run, shard):
            raise JoinRefused(
                f"the first master, at {self._first.address}, says that shard {shard} of {self._first.run} is at "
                f"{line.address}; the broker there has shard {line.shard} of {line.run}. Was another broker started at "
                "that address? Start the master of the shard again",
                "shard",
            )
        return line

    def _address(self, shard: int) -> str:
        masters = self._first.masters
        return masters[shard] if shard < len(masters) else ""

    def _leave_others(self) -> None:
        others, self.others = self.others, []
        for line in others:
            line.close("another node founds the run")

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds, for so long; raise what has failed at a line."""
        until = self._first.clock.monotonic() + seconds
        while not condition():
            for line in self:
                line.peek()
            if self._first.clock.monotonic() >= until:
                return False
            self._first.clock.sleep(LOOK_SECONDS)
        return True

    def _until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        waited = 0.0
        while not self._wait(condition, SAY_AGAIN_SECONDS):
            waited += SAY_AGAIN_SECONDS
            logger.info("%s has waited %.0f s for %s", self._first.name, waited, what() or "the first master")
