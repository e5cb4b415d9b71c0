"""Be a node of several masters: one `Exchange` made of a line to each, every line an ordinary node of one shard.

Rule 1: the first master has the settings, the data units, the roster and the run's name; the others are found through
it (`Lines`).  Rule 2: fragment f of shard i is i * fragments + f here, and its offer s is s * masters + i.
Rule 3: a master that is lost costs its shard's exchange until it is back, at whatever address, and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from zmqtrain.codecs.fragment import WholeLayout
from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.interfaces import Clock, Layout
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, ExchangeStatistics, ModelSpec, PeerId, Tally, Update, Version
from zmqtrain.node.batches import UnitSource
from zmqtrain.node.line import Line
from zmqtrain.node.lines import Lines
from zmqtrain.protocol.messages import Roster
from zmqtrain.session.hub_session import Solitude

Batch = TypeVar("Batch", covariant=True)


class MastersNode:
    """One node of a run of several masters: an `Exchange`, with all that a `Node` has for its user.

    first: the line to the first master, welcomed.  open_line: makes the line to another, given its address.
    wait_seconds: how long one that is said to be there may take to answer.
    """

    def __init__(self, first: Line, open_line: Callable[[str], Line], wait_seconds: float) -> None:
        self._first, self._lines = first, Lines(first, open_line, wait_seconds)
        self._count, self._fragments = first.settings.masters, first.settings.fragments
        self._layout: WholeLayout | None = None
        self._next: tuple[int, Update, Update] | None = None  # shard, its line's update, and that as it is here
        first.units.idle = self._tell_idle

    # ------------------------------------------------------------------ joining

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, moments: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. Waits for all masters, and for the nodes that the run starts with.

        Raises ModelMismatch, ConfigError (a model of fewer blocks than fragments of all masters), JoinRefused,
        HubUnreachable, NonFiniteDelta.
        """
        self._layout = WholeLayout(model, self._fragments, self._count)
        return self._lines.join(model, leaves, score, moments)

    @property
    def waiting_for(self) -> str:
        """What this node is waiting for, in a few words; "" for nothing."""
        return self._lines.waiting_for

    # ------------------------------------------------------------------ what the first master knows

    @property
    def clock(self) -> Clock:
        """See Exchange."""
        return self._first.clock

    @property
    def name(self) -> str:
        """See Exchange."""
        return self._first.name

    @property
    def settings(self) -> RunSettings:
        """The run's settings, as the first master gave them."""
        return self._first.settings

    @property
    def alone(self) -> Solitude | None:
        """How this node trains without the first master; None: that is there."""
        return self._first.alone

    @property
    def address(self) -> str:
        """Where the first master is."""
        return self._first.address

    @property
    def peer_id(self) -> PeerId:
        """How the first master knows this node."""
        return self._first.peer_id

    @property
    def run(self) -> str:
        """The id of the run."""
        return self._first.run

    @property
    def roster(self) -> Roster | None:
        """Who is in the run, as the first master last said."""
        return self._first.roster

    @property
    def is_evaluator(self) -> bool:
        """See Exchange."""
        return self._first.is_evaluator

    @property
    def founded(self) -> bool:
        """See Exchange."""
        return self._first.founded

    @property
    def ended_with_run(self) -> bool:
        """See `PeerExchange.ended_with_run`: as the first master has said."""
        return self._first.units.end_version >= 0

    @property
    def stopped(self) -> bool:
        """See Stops."""
        units = self._first.units
        return units.stopped and not units.used

    @property
    def wanted(self) -> bool:
        """See Exchange: never, for no population has several masters."""
        return False

    def compare(self, score: float, *, declined: bool = False) -> None:
        """See Exchange: nobody compares."""

    def describe_data(self, digests: str) -> None:
        """See Describes."""
        self._first.describe_data(digests)

    def describe_device(self, device: str) -> None:
        """See Describes."""
        self._first.describe_device(device)

    def describe_first_step(self, digest: str) -> None:
        """See Describes."""
        self._first.describe_first_step(digest)

    def vote(self, score: float) -> Update | None:
        """See Exchange: no mean is made of shards."""
        return None

    def lend(self, leaves: Sequence[Any], moments: Sequence[Any] = ()) -> None:
        """See Exchange: nobody borrows."""

    def schedule(self) -> tuple[int, int]:
        """See Exchange."""
        return self._first.schedule()

    def pace(self) -> tuple[float, Sequence[float]]:
        """See Exchange."""
        return self._first.pace()

    def report(
        self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int, held_seconds: float = 0.0
    ) -> None:
        """See Exchange."""
        self._first.report(
            step=step,
            samples=samples,
            loss=loss,
            age_steps=age_steps,
            offers_refused=offers_refused,
            held_seconds=held_seconds,
        )

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """See Exchange."""
        self._first.report_scores(scores, version)

    def batches(self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]]) -> Iterator[Batch]:
        """Give the batches of the data units that the first master deals; see `PeerExchange.batches`."""
        return self._first.batches(source)

    def batches_as_they_come(
        self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]], wait_seconds: float
    ) -> Iterator[Batch | None]:
        """Give the batches, and None where there is none now; see `PeerExchange.batches_as_they_come`."""
        return self._first.batches_as_they_come(source, wait_seconds)

    @property
    def message_delay(self) -> Callable[[], float] | None:
        """For experiments: draws by how many seconds a delta is sent late."""
        return self._first.message_delay

    @message_delay.setter
    def message_delay(self, delay: Callable[[], float] | None) -> None:
        for line in self._lines:
            line.message_delay = delay

    # ------------------------------------------------------------------ exchange

    @property
    def layout(self) -> Layout:
        """See Exchange: of the whole model. Raises LocalProtocolError before `join`."""
        if self._layout is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self._layout

    @property
    def unreachable(self) -> tuple[int, ...]:
        """See Exchange."""
        return tuple(shard for shard, line in enumerate(self._lines) if line.unreachable)

    def next_fragments(self) -> tuple[int, ...]:
        """See Exchange."""
        return tuple(
            shard * self._fragments + fragment
            for shard, line in enumerate(self._lines)
            for fragment in line.next_fragments()
        )

    def offer(self, fragment: int, segments: Sequence[Array], tally: Tally, *, dense: bool = False) -> int | None:
        """See Exchange. Raises NonFiniteDelta or JoinRefused when the node cannot go on."""
        shard, inside = divmod(fragment, self._fragments)
        line = self._lines[shard]
        sequence = line.offer(inside, segments, tally, dense=dense)
        return None if sequence is None else sequence * self._count + shard

    def in_flight(self) -> tuple[int, ...]:
        """See Exchange."""
        return tuple(
            sequence * self._count + shard for shard, line in enumerate(self._lines) for sequence in line.in_flight()
        )

    def peek(self) -> Update | None:
        """See Exchange: of the masters' next updates one that lands nothing of this node, or what it offered first."""
        self._lines.follow_moved()
        waiting = [
            (max(update.landed, default=-1), shard, update)
            for shard, line in enumerate(self._lines)
            if (update := line.peek()) is not None
        ]
        if not waiting:
            return None
        _, shard, update = min(waiting, key=lambda one: one[:2])
        if self._next is None or self._next[1] is not update:
            self._next = (shard, update, self._here(shard, update))
        return self._next[2]

    def poll(self) -> Update | None:
        """See Exchange."""
        if self._next is None and self.peek() is None:
            return None
        assert self._next is not None
        shard, expected, update = self._next
        self._next = None
        taken = self._lines[shard].poll()
        assert taken is expected, "only the training thread takes updates"
        return update

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        """See Exchange."""
        inside, shard = divmod(sequence, self._count)
        self._next = None
        return self._here(shard, self._lines[shard].wait_update(timeout_seconds, inside))

    def _here(self, shard: int, update: Update) -> Update:
        """Return an update of one master in the numbers of this exchange."""
        first = shard * self._fragments
        return replace(
            update,
            aggregate={first + f: segments for f, segments in update.aggregate.items()},
            own={first + f: segments for f, segments in update.own.items()},
            landed=tuple(sequence * self._count + shard for sequence in update.landed),
        )

    def everyone_drained(self, master: int) -> bool:
        """See Exchange."""
        line = self._lines[master]
        if self._first.units.finished:
            line.units.finish()
        elif master:
            line.say_idle()  # it leaves early, and waits at others for nodes that may wait for it here
        return line.everyone_drained(0)

    def _tell_idle(self) -> None:
        for line in self._lines.others:
            line.peek()  # raises what has failed there
            line.say_idle()

    def statistics(self) -> ExchangeStatistics:
        """See Exchange: the version, the peers and the round trip are those at the first master."""
        first, *others = (line.statistics() for line in self._lines)
        total = first
        for one in others:
            total = replace(
                total,
                bytes_sent=total.bytes_sent + one.bytes_sent,
                bytes_received=total.bytes_received + one.bytes_received,
                encode_seconds=total.encode_seconds + one.encode_seconds,
                decode_seconds=total.decode_seconds + one.decode_seconds,
                publishes=total.publishes + one.publishes,
                publishes_refused=total.publishes_refused + one.publishes_refused,
            )
        return total

    # ------------------------------------------------------------------ the end

    def close(self, reason: str = "") -> None:
        """Say goodbye to all masters, to the first last, and end the threads; safe to call twice."""
        atexit.unregister(self.close)
        with contextlib.ExitStack() as stack:
            for line in self._lines:
                stack.callback(line.close, reason)

    def __enter__(self) -> MastersNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
