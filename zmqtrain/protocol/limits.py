"""Limits of each peer at the hub: size of heads, rate of messages, time on the loop, probes, quarantine.

Everything here is pure: `now` is an argument, in seconds. All tables are bounded; the peer heard of longest ago is
forgotten first.

Heads: at most SMALL_HEAD_BYTES, or LONG_HEAD_BYTES where a message holds texts or lists of bounded length. A head that
describes the model or the frames of a transfer may be as large as the run's model requires; before the run has a model,
as large as any head. A kind of message that no hub takes is refused by its name.

Rates (token bucket, Turner 1986): messages are counted on CONTROL only, because BULK has its windows; time is counted
on both lanes. A peer over its limit is disconnected once; after that its messages are dropped unread, so that each
costs no more than counting it. Unknown peers are counted like members. An ordinary message counts no time: the channel
is fair among connections. Counted is the time beyond that, and a fixed time for a message that no sound peer sends.

Probes: all probes of all peers together take at most a few percent of the port; a peer that asks for more is refused.

Quarantine: the deltas of a node that repeatedly sends refused deltas are rejected for a while:

    free         3 of the last 8 deltas refused                              -> quarantined, 10 s
    quarantined  the time is over: the node restarts from the shared model   -> on probation
    probation    one delta refused -> quarantined, twice as long (600 s at most); 8 accepted in a row -> free

Only refusals that no sound node causes count (`OFFENCES`): a late or duplicate delta is no offence. A node keeps its
record across connections; a restarted node process begins free. A hub that restarts or takes over restores quarantines
and probations and forgets the rest. If the norm gate rejects more than half of the voters, the gate itself may be wrong
(`wrongly`), and they are acquitted. All names under one key are one voter; a node that left votes for a while still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from zmqtrain.core.types import ModelSpec, PeerId, Recent, count_values
from zmqtrain.protocol.framing import MAX_HEAD_BYTES
from zmqtrain.protocol.members import ALLOWED
from zmqtrain.protocol.messages import (
    Chunk,
    Credit,
    Declare,
    Enrol,
    Fetch,
    Founded,
    Goodbye,
    GroupLost,
    Hello,
    Initialise,
    JoinGroup,
    Message,
    Probe,
    Publish,
    Pull,
    Push,
    Report,
    Snapshot,
    WorkRequest,
)

PROBE_FRAME_BYTES = 1 << 18
"""Most padding of one message: on a link of 1 Gb/s it delays what follows by 2 ms."""
PROBE_BYTES, PROBE_SECONDS = 32 << 20, 10.0
"""Padding, both ways and of all peers, in so many seconds: under 3 % of 1 Gb/s."""

MESSAGES_PER_SECOND = 20_000.0
"""Of one peer for long: three times those of a node whose steps take 1 ms, each with an exchange."""
MESSAGES_AT_ONCE = 200_000.0
"""At once: the queue of a broker that was stopped for ten seconds, or the requests of a client of many keys."""
LOOP_SECONDS, LOOP_SHARE = 0.5, 0.02
"""Time on the broker's loop beyond ordinary messages: seconds at once, and share for long, of one peer."""
FAULT_SECONDS = 0.02
"""Time charged for a message that no sound peer sends: 25 at once, and one a second for long."""
BACK_AT, MOST_COUNTED = 0.9, 1.3
"""A disconnected peer is heard again at this share of LOOP_SECONDS, and at most this many times LOOP_SECONDS is
charged: so it is heard 10 s later at the latest."""
SPARED_SECONDS, SPARED_SECONDS_PER_BYTE = 5e-4, 1e-7
"""Most time of an ordinary message, by the bytes of its head: an old PC needs a fifth of it."""
PEERS_KEPT = 1024

SMALL_HEAD_BYTES = 4 << 10
LONG_HEAD_BYTES = 16 << 10
KEYS_HEAD_BYTES = 64 << 10
"""Of a description of keys of a parameter server; a client sends it in several messages."""
LEAST_FETCH_BYTES = 64 << 10
"""A Fetch may be this large for any model: a node with another model is told which leaf differs."""
BYTES_OF_A_SIZE, FRAME_VALUES = 10, 8192
"""Bytes of one frame's size in a head; every frame of a transfer but the last holds this many values at least."""
SNAPSHOT_MODELS = 5
"""The frames of a snapshot hold this many models at most: optimizer state may go with it."""
TAKEN_BY_HUBS = frozenset({*ALLOWED, Chunk, Credit})
_LONG = frozenset({Hello, Report, WorkRequest, Goodbye, JoinGroup, GroupLost, Enrol, Initialise, Push, Pull})
_AS_KEYS_ARE = frozenset({Declare, Founded})

OFFENCES = frozenset({"non-finite", "norm", "enormous", "corrupt", "size"})
"""Codes of refusals that no sound node causes."""
OVER = "over"
"""Reason of the Preempt after a node's quarantine: its optimizer continues."""
MOST_REFUSED, OF_LAST = 3, 8
"""This many refused of the last deltas quarantine a node; as many accepted as the latter end its probation."""
QUARANTINE_SECONDS, LONGEST_QUARANTINE_SECONDS = 10.0, 600.0
NODES_KEPT = 1024
GATE_VOTES_KEPT, GATE_VOTE_SECONDS = 64, 300.0
"""Voters on whether the gate is wrong: the live nodes, and the nodes of the last accepted deltas that are not older."""


def is_sound(probe: Probe) -> bool:
    return 0 <= probe.size <= PROBE_FRAME_BYTES and 0 <= probe.answer <= PROBE_FRAME_BYTES


class ProbeBudget:
    """What is left of PROBE_BYTES, until PROBE_SECONDS after the first probe that took of it."""

    def __init__(self) -> None:
        self._began, self._taken = float("-inf"), 0

    def take(self, probe: Probe, now: float) -> bool:
        """Charge a sound probe and its answer; False, and no charge, if too little is left."""
        if now - self._began >= PROBE_SECONDS:
            self._began, self._taken = now, 0
        wanted = self._taken + probe.size + probe.answer
        if wanted > PROBE_BYTES:
            return False
        self._taken = wanted
        return True


class Hearing(Enum):
    """What is done with a message."""

    HEARD = "heard"
    TOO_MANY = "too many"
    NOT_HEARD = "not heard"


class MessageRates:
    """Token buckets of messages by peer. not_heard: messages of all peers that were not read."""

    def __init__(self) -> None:
        self.not_heard = 0
        self._left = Recent[PeerId, tuple[float, float, bool]](PEERS_KEPT)  # tokens, when, whether it is over its limit

    def take(self, peer: PeerId, now: float) -> Hearing:
        """Count a message; TOO_MANY for the first over the limit. The peer is heard again when tokens for a second are
        left."""
        left, at, over = self._left.get(peer, (MESSAGES_AT_ONCE, now, False))
        left = min(MESSAGES_AT_ONCE, left + (now - at) * MESSAGES_PER_SECOND)
        heard = left >= (MESSAGES_PER_SECOND if over else 1)
        self._left[peer] = (left - heard, now, not heard)
        if heard:
            return Hearing.HEARD
        self.not_heard += 1
        return Hearing.NOT_HEARD if over else Hearing.TOO_MANY


def cost_of(seconds: float, head_bytes: int) -> float:
    return max(0.0, seconds - SPARED_SECONDS - SPARED_SECONDS_PER_BYTE * head_bytes)


class LoopBudgets:
    """Recent time of each peer on the loop, beyond ordinary messages."""

    def __init__(self) -> None:
        self._taken = Recent[PeerId, tuple[float, float, bool]](PEERS_KEPT)  # seconds, when, whether it is out

    def take(self, peer: PeerId, seconds: float, now: float) -> bool:
        """Charge so many seconds; return whether the peer is to be disconnected for them, which it is once."""
        if seconds <= 0:
            return False
        taken, out = self._taken_by(peer, now)
        taken = min(MOST_COUNTED * LOOP_SECONDS, taken + seconds)
        over = taken > LOOP_SECONDS
        self._taken[peer] = taken, now, out or over
        return over and not out

    def is_heard(self, peer: PeerId, now: float) -> bool:
        """Return whether messages of this peer are read; those of a disconnected peer are after a while."""
        taken, out = self._taken_by(peer, now)
        if out and taken <= BACK_AT * LOOP_SECONDS:
            out = False
            self._taken[peer] = taken, now, out
        return not out

    def _taken_by(self, peer: PeerId, now: float) -> tuple[float, bool]:
        taken, at, out = self._taken.get(peer, (0.0, now, False))
        return max(0.0, taken - (now - at) * LOOP_SHARE), out


class HeadSizes:
    """Limits of heads at one hub; those that follow from its model are computed once for each model."""

    def __init__(self) -> None:
        self._model: ModelSpec = ()
        self._described = self._frames = 0

    def most_bytes(self, kind: type[Message], model: ModelSpec, founded: bool) -> int:
        """Return the limit for heads of this kind. model: the run's, or that of the node that is asked for its own."""
        if kind in _AS_KEYS_ARE:
            return KEYS_HEAD_BYTES
        if kind is Fetch and not founded:
            return MAX_HEAD_BYTES
        if kind not in (Fetch, Publish, Snapshot):
            return LONG_HEAD_BYTES if kind in _LONG else SMALL_HEAD_BYTES
        if model is not self._model:
            self._model = model
            self._described = sum(4 * len(leaf.path) + 9 * len(leaf.shape) + len(leaf.dtype) + 10 for leaf in model)
            self._frames = count_values(model) // FRAME_VALUES
        if kind is Fetch:
            most = LEAST_FETCH_BYTES + 2 * self._described
        else:
            most = LONG_HEAD_BYTES + (SNAPSHOT_MODELS if kind is Snapshot else 1) * BYTES_OF_A_SIZE * self._frames
        return min(most, MAX_HEAD_BYTES)


@dataclass
class _Record:
    """refused: of the last deltas, whether each was.  until: end of the quarantine.  seconds: of the next one.  reason:
    code of the last one."""

    refused: deque[bool] = field(default_factory=lambda: deque(maxlen=OF_LAST))
    until: float = float("-inf")
    seconds: float = QUARANTINE_SECONDS
    on_probation: bool = False
    reason: str = ""


class Quarantines:
    """The quarantine records of all nodes."""

    def __init__(self) -> None:
        self._records = Recent[PeerId, _Record](NODES_KEPT)
        self._looked_at = 0.0
        self._votes: deque[tuple[str, float]] = deque(maxlen=GATE_VOTES_KEPT)

    def refused(self, peer: PeerId, reason: str, now: float) -> float:
        """Record a refused delta; return for how many seconds its node is quarantined from now, 0: it is not."""
        if reason not in OFFENCES:
            return 0.0
        self._looked_at = now
        record = self._recent(peer)
        if now < record.until:  # it was in flight when the quarantine began
            return 0.0
        record.refused.append(True)
        if not record.on_probation and sum(record.refused) < MOST_REFUSED:
            return 0.0
        seconds, record.seconds = record.seconds, min(2 * record.seconds, LONGEST_QUARANTINE_SECONDS)
        record.until, record.on_probation, record.reason = now + seconds, True, reason
        record.refused.clear()
        return seconds

    def accepted(self, peer: PeerId, voter: str = "", now: float = 0.0) -> None:
        """Record an accepted delta. voter: its node's key, "" where there are none."""
        self._votes.append((voter or peer, now))
        record = self._records.get(peer)
        if record is None:
            return
        record.refused.append(False)
        if record.on_probation and len(record.refused) == OF_LAST:
            record.on_probation, record.seconds = False, QUARANTINE_SECONDS

    def rest(self, peer: PeerId, now: float) -> float:
        """Return for how many more seconds a node is quarantined; 0: it is not."""
        self._looked_at = now
        record = self._records.get(peer)
        return max(0.0, record.until - now) if record is not None else 0.0

    def wrongly(self, live: Mapping[PeerId, str], now: float = 0.0) -> tuple[PeerId, ...]:
        """Return the nodes that are out for their norm, with nothing accepted since, if they are more than half of the
        voters. live: the nodes that are here, each with its voter. Of two equal halves either may be right, and the
        gate stays as it is.
        """
        out = tuple(peer for peer in live if self._is_out_for_norm(peer))
        voters = {live[peer] for peer in out}
        everybody = {*live.values(), *(voter for voter, at in self._votes if now - at <= GATE_VOTE_SECONDS)}
        return out if 2 * len(voters) > len(everybody) else ()

    def _is_out_for_norm(self, peer: PeerId) -> bool:
        record = self._records.get(peer)
        return record is not None and record.on_probation and record.reason == "norm" and not record.refused

    def acquit(self, peer: PeerId) -> None:
        self._records.pop(peer, None)

    def state(self) -> dict[str, list[Any]]:
        """Return what outlives a hub: by node on probation, the seconds that were left at the last call, the seconds of
        the next quarantine, the reason, and the number of deltas accepted since."""
        return {
            peer: [max(0.0, record.until - self._looked_at), record.seconds, record.reason, len(record.refused)]
            for peer, record in self._records.items()
            if record.on_probation
        }

    def restore(self, state: Mapping[str, Any], now: float) -> None:
        """Add what `state` returned. Raises TypeError or ValueError."""
        self._looked_at = max(self._looked_at, now)  # a hub that goes back, with none of these, has looked since
        for peer, (rest, seconds, reason, accepted) in state.items():
            record = self._recent(PeerId(peer))
            record.until = now + min(float(rest), LONGEST_QUARANTINE_SECONDS)
            record.seconds, record.reason, record.on_probation = float(seconds), str(reason), True
            record.refused = deque([False] * min(int(accepted), OF_LAST), maxlen=OF_LAST)

    def _recent(self, peer: PeerId) -> _Record:
        record = self._records[peer] = self._records.get(peer) or _Record()  # now the most recent
        return record
