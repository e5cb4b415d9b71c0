"""A node of several brokers: one `Exchange` over a connection to each, every connection an ordinary `Node` of a shard.

The first broker has the settings, the data units, the roster and the run's name; it says where the others are.
Fragment f of shard i is i * fragments + f here, and its offer s is s * brokers + i.
A lost broker costs its shard's exchange until it is back, at whatever address, and nothing else.
A node that begins again from the shared parameters, because its training has diverged or a broker says so, does it in
all shards at once: what one broker has of that waits until the others have theirs, and nothing is offered meanwhile.
The run begins at the first broker last: the node that is asked for the initial parameters gives the others theirs
before it answers, and a node that joins asks the others only when it takes part at the first. So if the first broker
has parameters, all have, and of one node.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zmqtrain.codecs.fragment import WholeLayout
from zmqtrain.core.errors import AggregateTimeout, HubUnreachable, JoinRefused, LocalProtocolError, ZmqTrainError
from zmqtrain.core.interfaces import Dialer, Layout, Population
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import (
    Array,
    Counts,
    ExchangeState,
    ExchangeStatistics,
    ModelSpec,
    Part,
    StepSchedule,
    Update,
)
from zmqtrain.node.node import Node, open_node
from zmqtrain.protocol.members import name_missing
from zmqtrain.protocol.messages import Roster
from zmqtrain.session.hub_session import Solitude
from zmqtrain.transport.address import split_key

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.01
"""How often a node looks, while it joins, whether it may go on."""
SAY_AGAIN_SECONDS = 5.0
ALL = -1
"""In place of a shard: all of them."""
SUMMED = ("bytes_sent", "bytes_received", "encode_seconds", "decode_seconds", "publishes", "publishes_refused")
"""The figures of a node that are sums over its brokers."""


class ShardedNode:
    """One node of a run of several brokers: an `Exchange`, with all that a `Node` has for its user.

    first: the node at the first broker, welcomed.  dialer: reaches the others.  wait_seconds: how long each of these
    may take to answer.
    """

    def __init__(self, first: Node, dialer: Dialer, wait_seconds: float) -> None:
        self._first, self._dialer, self._wait_seconds = first, dialer, wait_seconds
        self._lines = [first]  # by shard; the others once the node joins
        self.clock, self.name, self.peer_id = first.clock, first.name, first.peer_id
        self.population: Population | None = None
        """See Exchange: no population has several brokers."""
        self._fragments = 0
        self._layout: WholeLayout | None = None
        self._next: tuple[int, Update, Update] | None = None  # shard, its line's update, and that as it is here
        self._followers: set[int] = set()  # shards that begin again because another does
        first.answers_later, first.idle = True, self._tell_idle
        # the first broker deals the data units, and hears the reports
        self.batches, self.batches_as_they_come = first.batches, first.batches_as_they_come
        self.describe = first.describe
        self.report, self.report_scores = first.report, first.report_scores

    # ------------------------------------------------------------------ what the first broker knows

    @property
    def settings(self) -> RunSettings:
        """The run's settings; their number of brokers may not be decided before `join`."""
        return self._first.settings

    @property
    def _count(self) -> int:
        return max(1, self.settings.shards)

    @property
    def waiting_for(self) -> str:
        """What this node is waiting for, in a few words; "" for nothing."""
        first = self._first
        if len(self._lines) == 1 and not first.has_joined() and (missing := name_missing(first.shards)):
            return missing
        return next((line.waiting_for for line in self._lines if line.waiting_for), "")

    @property
    def alone(self) -> Solitude | None:
        """How this node trains without the first broker; None: that is there."""
        return self._first.alone

    @property
    def address(self) -> str:
        """Where the first broker is."""
        return self._first.address

    @property
    def run(self) -> str:
        """The id of the run."""
        return self._first.run

    @property
    def roster(self) -> Roster | None:
        """Who is in the run, as the first broker last said."""
        return self._first.roster

    @property
    def ended_with_run(self) -> bool:
        """See `Node.ended_with_run`: as the first broker has said."""
        return self._first.units.end_version >= 0

    @property
    def message_delay(self) -> Callable[[], float] | None:
        """For experiments: draws by how many seconds a delta is sent late."""
        return self._first.message_delay

    @message_delay.setter
    def message_delay(self, delay: Callable[[], float] | None) -> None:
        for line in self._lines:
            line.message_delay = delay

    # ------------------------------------------------------------------ joining

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, optimizer_state: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. Waits for all brokers, and for the nodes that the run starts with.

        Raises ModelMismatch, ConfigError (a model of fewer blocks than fragments of all brokers), JoinRefused,
        HubUnreachable, NonFiniteDelta.
        """
        if self.settings.shards != AUTO_SHARDS:
            self._cut(model)
        first = self._first
        first.begin_join(model, leaves, score=score, optimizer_state=optimizer_state)
        if self.settings.shards == AUTO_SHARDS:
            self._until(
                lambda: self.settings.shards != AUTO_SHARDS or first.has_joined() or first.wanted,
                lambda: self.waiting_for,
            )
            first.get_ready()
            self._cut(model)
        while True:
            self._until(lambda: self._first.has_joined() or self._first.wanted, lambda: self.waiting_for)
            if self._first.has_joined():
                break
            self._leave_others()
            if self.found_others(model, leaves):
                self._first.lend(leaves, optimizer_state)
        update = self._first.end_join()
        if update is None and len(self._lines) == self._count:
            return None
        self._leave_others()  # their parameters are not the run's
        return self._join_others(model, update)

    def _cut(self, model: ModelSpec) -> None:
        self._fragments = self.settings.fragments_of(model)
        self._layout = WholeLayout(model, self._fragments, self._count)

    def found_others(self, model: ModelSpec, leaves: Sequence[Any]) -> bool:
        """Give the others their shards of this node's parameters; False if the first no longer asks for that."""
        number = self._first.peer.founding

        def obsolete() -> bool:
            return not (self._first.wanted and self._first.peer.founding == number)

        try:
            for shard in range(1, self._count):
                if (line := self._open(shard, obsolete)) is None:
                    break
                line.peer.founding = number
                line.begin_join(model, leaves)
            for line in self._lines[1:]:
                self._until(lambda line=line: line.has_joined() or obsolete(), lambda line=line: line.waiting_for)  # type: ignore[misc]
        except JoinRefused as error:
            # another node was asked, and may have answered before the loss of the first is seen here
            self._leave_others()
            if error.reason != "founding" or not self._wait(obsolete, 2 * self._first.settings.lost_seconds):
                raise
            return False
        if obsolete():
            self._leave_others()
            return False
        for line in self._lines[1:]:
            line.end_join()
            line.peer.founding = 0
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
        for line in self._lines[1:]:
            self._until(line.has_joined, lambda line=line: line.waiting_for)  # type: ignore[misc]
            theirs = line.end_join()
            if theirs is None or theirs.anchor is None:
                raise ZmqTrainError(
                    f"the broker at {line.address} sent no parameters of its shard: start this node again"
                )
            anchor += theirs.anchor
        return Update(version, {}, {}, anchor=anchor)

    def _open(self, shard: int, obsolete: Callable[[], bool]) -> Node | None:
        """Connect to a broker, once the first says where it is; None if that has become obsolete."""
        self._until(lambda: bool(self._address(shard)) or obsolete(), lambda: name_missing(self._first.shards))
        if obsolete():
            return None
        address = self._address(shard)
        line = self.open_line(address)
        self._lines.append(line)
        try:
            line.wait_welcome(self._wait_seconds)
        except HubUnreachable:
            self._lines.pop().close()
            self._wait_elsewhere(shard, address)
            return self._open(shard, obsolete)
        if (line.run, line.shard) != (self._first.run, shard):
            raise JoinRefused(
                f"the first broker, at {self._first.address}, says that shard {shard} of {self._first.run} is at "
                f"{line.address}; the broker there has shard {line.shard} of {line.run}. Was another broker started at "
                "that address? Start the broker of the shard again",
                "shard",
            )
        return line

    def _wait_elsewhere(self, shard: int, address: str) -> None:
        """Wait until a broker that is not reached is another's, or elsewhere, or gone. Raises HubUnreachable."""
        if self._address(shard) == address:
            self._first.not_reached(shard, address)
        if self._wait(lambda: self._address(shard) != address, 2 * self._wait_seconds):
            return
        where, _ = split_key(address)
        raise HubUnreachable(
            f"the broker of shard {shard} is at {where}, says the first, and does not answer from here (waited "
            f"{3 * self._wait_seconds:g} s). If other PCs reach it at another address, start it with --address "
            "tcp://HOST:PORT; and its firewall must let that port in",
            where,
        )

    def open_line(self, address: str) -> Node:
        """Return the started node of a shard, at the broker at this address."""
        # a new id: the broker's state of an earlier connection does not apply to this one
        options = replace(self._first.options, addresses=(address,), events=None)
        return open_node(options, self._dialer, first=self._first)

    def _address(self, shard: int) -> str:
        shards = self._first.shards
        return shards[shard] if shard < len(shards) else ""

    def _leave_others(self) -> None:
        others, self._lines[1:] = self._lines[1:], []
        for line in others:
            line.close("another node founds the run")

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds, for so long; raise the failure of a connection."""
        until = self._first.clock.monotonic() + seconds
        while not condition():
            for line in self._lines:
                line.peek()
            if self._first.clock.monotonic() >= until:
                return False
            self._first.clock.sleep(LOOK_SECONDS)
        return True

    def _until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        waited = 0.0
        while not self._wait(condition, SAY_AGAIN_SECONDS):
            waited += SAY_AGAIN_SECONDS
            logger.info("%s has waited %.0f s for %s", self._first.name, waited, what() or "the first broker")

    # ------------------------------------------------------------------ exchange

    @property
    def layout(self) -> Layout:
        """See Exchange: of the whole model. Raises LocalProtocolError before `join`."""
        if self._layout is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self._layout

    def state(self) -> ExchangeState:
        states = [line.state() for line in self._lines]
        in_flight = [number * self._count + shard for shard, one in enumerate(states) for number in one.in_flight]
        unreachable = [shard for shard, one in enumerate(states) if one.unreachable]
        return states[0]._replace(in_flight=tuple(in_flight), unreachable=tuple(unreachable), wanted=False)

    def next_fragments(self) -> tuple[int, ...]:
        if any(front is not None and front.reset for front in self._fronts()):
            return ()
        return tuple(
            shard * self._fragments + fragment
            for shard, line in enumerate(self._lines)
            for fragment in line.next_fragments()
        )

    def schedule(self, paced: bool = False) -> StepSchedule:
        """See Exchange: k and d are those of the first broker, which plans; codecs change at versions of each."""
        for line in self._lines[1:]:
            line.schedule()
        return self._first.schedule(paced)

    def offer(self, fragment: int, segments: Sequence[Array], counts: Counts, *, dense: bool = False) -> int | None:
        """See Exchange. Raises NonFiniteDelta or JoinRefused when the node cannot go on."""
        shard, inside = divmod(fragment, self._fragments)
        line = self._lines[shard]
        sequence = line.offer(inside, segments, counts, dense=dense)
        return None if sequence is None else sequence * self._count + shard

    def peek(self) -> Update | None:
        """See Exchange: of the brokers' next updates one that lands nothing of this node, or what it offered first."""
        for shard, line in enumerate(self._lines[1:], 1):  # a lost broker may be elsewhere by now, as the first says
            if not line.live and self._address(shard) not in ("", line.link.endpoint):
                line.link.move(self._address(shard))
        fronts = self._fronts()
        if begun := [front for front in fronts if front is not None and front.reset]:
            self._all_begin_again()
            if len(begun) == len(self._lines):
                if self._next is None or self._next[0] != ALL:
                    self._next = (ALL, begun[0], self._joined(begun))
                return self._next[2]
        waiting = [
            (max(front.landed, default=-1), shard, front)
            for shard, front in enumerate(fronts)
            if front is not None and not front.reset
        ]
        if not waiting:
            return None
        _, shard, update = min(waiting, key=lambda one: one[:2])
        if self._next is None or self._next[1] is not update:
            self._next = (shard, update, self._here(shard, update))
        return self._next[2]

    def poll(self) -> Update | None:
        if self._next is None and self.peek() is None:
            return None
        assert self._next is not None
        shard, expected, update = self._next
        self._next = None
        if shard == ALL:
            self._followers.clear()
            for line in self._lines:
                line.poll()
            return update
        taken = self._lines[shard].poll()
        assert taken is expected, "only the training thread takes updates"
        return update

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        shard = sequence % self._count
        line = self._lines[shard]
        self._next = None
        line.await_update(timeout_seconds)
        front = line.peek()
        if front is None or not front.reset:
            return self._here(shard, line.wait_update(timeout_seconds, sequence // self._count))
        until = self.clock.monotonic() + timeout_seconds
        while (update := self.poll()) is None:
            if self.clock.monotonic() >= until:
                raise AggregateTimeout(
                    f"{self.name} begins again, and not all of its lines did in {timeout_seconds:g} s"
                )
            self.clock.sleep(LOOK_SECONDS)
        return update

    def _fronts(self) -> list[Update | None]:
        return [line.peek() for line in self._lines]

    def _all_begin_again(self) -> None:
        """Have each line begin again, as some have."""
        resets = [front is not None and front.reset for front in self._fronts()]
        diverged = any(line.restarts.begun for line, reset in zip(self._lines, resets, strict=True) if reset)
        for shard, line in enumerate(self._lines):
            if not resets[shard] and not line.restarts.begun:
                self._followers.add(shard)
                line.begin_again(diverged)

    def _joined(self, fronts: Sequence[Update]) -> Update:
        """Return one update with which this node begins again, of those of all lines."""
        here = [self._here(shard, front) for shard, front in enumerate(fronts)]
        parts = [part for front in here for part in front.anchor or ()]
        return replace(
            here[0],
            landed=tuple(sequence for front in here for sequence in front.landed),
            anchor=parts or None,
            warm=all(front.warm for shard, front in enumerate(here) if shard not in self._followers),
        )

    def _here(self, shard: int, update: Update) -> Update:
        """Return an update of one broker in the numbers of this exchange."""
        first = shard * self._fragments
        return replace(
            update,
            aggregate={first + f: segments for f, segments in update.aggregate.items()},
            own={first + f: segments for f, segments in update.own.items()},
            landed=tuple(sequence * self._count + shard for sequence in update.landed),
        )

    def everyone_drained(self, shard: int) -> bool:
        line = self._lines[shard]
        if self._first.units.finished:
            line.units.finished = True  # other brokers deal no units
        elif shard:
            line.say_idle()  # it leaves early, and waits at others for nodes that may wait for it here
        return line.everyone_drained(0)

    def _tell_idle(self) -> None:
        for line in self._lines[1:]:
            line.peek()  # raises what has failed there
            line.say_idle()

    def statistics(self) -> ExchangeStatistics:
        """See Exchange: the version, the peers and the round trip are those at the first broker."""
        all_of_them = [line.statistics() for line in self._lines]
        sums = {name: sum(getattr(one, name) for one in all_of_them) for name in SUMMED}
        return replace(all_of_them[0], **sums)

    # ------------------------------------------------------------------ the end

    def close(self, reason: str = "") -> None:
        """Say goodbye to all brokers, to the first last, and end the threads; safe to call twice."""
        atexit.unregister(self.close)
        with contextlib.ExitStack() as stack:
            for line in self._lines:
                stack.callback(line.close, reason)

    def __enter__(self) -> ShardedNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
