"""Decide whose deltas are not taken for a while: those of a node that sends, again and again, what is refused.

    free        3 of the last 8 deltas refused                              -> quarantined, 10 s
    quarantined the time is over: it begins again from what is shared       -> on probation
    probation   one delta refused -> quarantined, twice as long (600 s at most); 8 accepted in a row -> free

Rule 1: only what no sound node sends counts (`OFFENCES`): a delta that came late, or twice, is nobody's fault.
Rule 2: pure: `now` is an argument.  Rule 3: a node keeps its record when its connection is made anew; those heard of
longest ago are forgotten first.  Rule 4: nobody is quarantined for ever: a new life of a node begins free.
Rule 5: a gate that turns away more than half of the voters for their norm may be wrong itself (`wrongly`): these are
acquitted.
The names of one key are one voter; whose delta was accepted of late votes, too, if it has left since.
Rule 6: a hub that is started again, or taken over, has the quarantines and probations that there were; what else nodes
sent before that is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zmqtrain.core.types import PeerId

OFFENCES = frozenset({"non-finite", "norm", "enormous", "corrupt", "size"})
"""The codes with which a delta is refused that no sound node sends."""
OVER = "over"
"""The reason with which a node is preempted whose quarantine has ended: its optimizer goes on as it is."""
MOST_REFUSED, OF_LAST = 3, 8
"""So many refused of so many deltas quarantine a node; and so many accepted in a row end its probation."""
FIRST_SECONDS, LONGEST_SECONDS = 10.0, 600.0
NODES_KEPT = 1024
VOTES_KEPT, VOTE_SECONDS = 64, 300.0
"""Who votes on whether the gate is wrong: the live nodes, and of so many deltas that were accepted last, and not longer
ago, the nodes'."""


@dataclass
class _Record:
    """Of one node: which of its last deltas were refused; until when it is quarantined, and for how long the next time;
    how many were accepted since; and the code for which it was quarantined last."""

    refused: deque[bool] = field(default_factory=lambda: deque(maxlen=OF_LAST))
    until: float = float("-inf")
    seconds: float = FIRST_SECONDS
    on_probation: bool = False
    reason: str = ""

    @property
    def is_out_for_norm(self) -> bool:
        return self.on_probation and self.reason == "norm" and not self.refused


class Quarantines:
    """The records of all nodes."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}
        self._looked_at = 0.0
        self._votes: deque[tuple[str, float]] = deque(maxlen=VOTES_KEPT)

    def refused(self, peer: PeerId, reason: str, now: float) -> float:
        """Take note that a delta was refused; return for how many seconds its node is quarantined now, 0: it is not."""
        if reason not in OFFENCES:
            return 0.0
        self._looked_at = now
        record = self._recent(peer)
        if now < record.until:  # what was on its way when it was told
            return 0.0
        record.refused.append(True)
        if not record.on_probation and sum(record.refused) < MOST_REFUSED:
            return 0.0
        seconds, record.seconds = record.seconds, min(2 * record.seconds, LONGEST_SECONDS)
        record.until, record.on_probation, record.reason = now + seconds, True, reason
        record.refused.clear()
        return seconds

    def accepted(self, peer: PeerId, voter: str = "", now: float = 0.0) -> None:
        """Take note that a delta was accepted. voter: its node's key, "" where there are none."""
        self._votes.append((voter or peer, now))
        record = self._records.get(peer)
        if record is None:
            return
        record.refused.append(False)
        if record.on_probation and len(record.refused) == OF_LAST:
            record.on_probation, record.seconds = False, FIRST_SECONDS

    def rest(self, peer: PeerId, now: float) -> float:
        """Return for how many seconds more a node is quarantined; 0: it is not."""
        self._looked_at = now
        record = self._records.get(peer)
        return max(0.0, record.until - now) if record is not None else 0.0

    def wrongly(self, live: Mapping[PeerId, str], now: float = 0.0) -> tuple[PeerId, ...]:
        """Return who is out for its norm, with nothing accepted since, if these are more than half of the voters.

        live: the nodes that are here, each with the voter that it is.  Of two halves either may be right: as long as
        they differ, the gate stays as it is.
        """
        out = tuple(peer for peer in live if (one := self._records.get(peer)) is not None and one.is_out_for_norm)
        voters = {live[peer] for peer in out}
        everybody = {*live.values(), *(voter for voter, at in self._votes if now - at <= VOTE_SECONDS)}
        return out if 2 * len(voters) > len(everybody) else ()

    def acquit(self, peer: PeerId) -> None:
        """Forget what is held against a node."""
        self._records.pop(peer, None)

    def state(self) -> dict[str, list[Any]]:
        """Return what outlives a hub: by node that is out or on probation, for how long still, when it was last asked,
        for how long the next time, why, and how many were accepted since."""
        return {
            peer: [max(0.0, record.until - self._looked_at), record.seconds, record.reason, len(record.refused)]
            for peer, record in self._records.items()
            if record.on_probation
        }

    def restore(self, state: Mapping[str, Any], now: float) -> None:
        """Take over what `state` returned, besides what is known here. Raises TypeError or ValueError."""
        self._looked_at = max(self._looked_at, now)  # a hub that goes back, with none of these, has looked since
        for peer, (rest, seconds, reason, accepted) in state.items():
            record = self._recent(PeerId(peer))
            record.until = now + min(float(rest), LONGEST_SECONDS)
            record.seconds, record.reason, record.on_probation = float(seconds), str(reason), True
            record.refused = deque([False] * min(int(accepted), OF_LAST), maxlen=OF_LAST)

    def _recent(self, peer: PeerId) -> _Record:
        record = self._records.pop(peer, None) or _Record()
        self._records[peer] = record  # now the most recent
        while len(self._records) > NODES_KEPT:
            del self._records[next(iter(self._records))]
        return record
