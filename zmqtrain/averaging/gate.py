"""The gate that deltas pass before they are added: none may be far larger than those accepted before.

Rule 1: pure: no clock, no socket, no thread.  A delta's norm is read from its codecs' scales, while it is checked: that
takes a twentieth of the time that adding it does.  Rule 2: to judge moves nothing; a delta counts when it is known to.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import payload_norm, payload_size
from zmqtrain.core.errors import CodecError, EnormousDelta, NonFiniteDelta, OutlyingDelta
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, Offer, PeerId, Score
from zmqtrain.protocol.messages import Publish
from zmqtrain.strategies.norms import Judgement, NormGate, norm_gate_from_text

USUAL_FACTOR = 10.0
"""What norm_gate is, in a run that leaves it open."""
MOST_REST = 10.0
"""What a node has left at its end may be so many times as large as usual, at most: a sparse codec leaves more than it
sends."""
FULL_BITS = 2.0
"""A codec of so many bits a value leaves no more than it sends; one of a tenth of that, ten times as much."""


class DeltaGate:
    """The norm gate of a run, of all its nodes at the hub, of itself at a node.

    norms: what is known of the deltas.  is_open: everything is let through.
    """

    def __init__(self, settings: RunSettings) -> None:
        gate = norm_gate_from_text(settings.norm_gate)
        if gate == "auto":
            apart = settings.elastic < 1  # what is pending there may be a whole model
            gate = "none" if apart or settings.mode == "strict" else USUAL_FACTOR
        self.is_open = gate == "none"
        self.norms = NormGate(USUAL_FACTOR if isinstance(gate, str) else gate)
        self._codec = settings.at_first.codec  # of the deltas that come; another one, where it is fitted

    def judge(
        self,
        peer: PeerId,
        layout: Layout,
        delta: Publish | Offer,
        codec: str,
        frames: Sequence[Buffer],
        score: Score = nan,
        voter: str = "",
    ) -> Judgement:
        """Judge a payload that was checked; this changes nothing: call `norms.count` with the result.

        voter: the key of its node, "" for one of its own.
        """
        fragment = delta.fragment
        if self.is_open:
            return Judgement(peer, voter or peer, fragment)
        norm = payload_norm(coding_from_spec(codec).of_fragment(layout, fragment), frames, layout.counts(fragment))
        rest = self._rest(layout, fragment) if delta.dense else 0.0
        self._codec = self._codec if delta.dense else codec
        return self.norms.judge(peer, fragment, norm, delta.steps, rest=rest, score=score, voter=voter)

    def _rest(self, layout: Layout, fragment: int) -> float:
        counts = layout.counts(fragment)
        codecs = coding_from_spec(self._codec).of_fragment(layout, fragment)
        bits = 8 * payload_size(codecs, counts) / max(1, sum(counts))
        return min(max(1.0, FULL_BITS / max(bits, 1e-9)), MOST_REST)

    def judge_again(self, judgement: Judgement) -> Judgement:
        """Judge a delta that came early once more, with its round; if it is out, it no longer counts as accepted."""
        again = self.norms.judge_again(judgement)
        if again.why:
            self.norms.leave_out(judgement)
        return again

    def forget(self, peer: PeerId, probation: bool = False) -> None:
        """Forget a node: it has left, or begins again from the shared parameters. probation: it is quarantined."""
        if not self.is_open:
            self.norms.forget(peer, probation)

    def memory(self) -> NDArray[np.float64] | None:
        """Return what is to be known after a restart: float64[n, 3], (fragment, log norm, log steps) in a row.

        None: this gate lets everything through.
        """
        if self.is_open:
            return None
        known = self.norms.memory()
        return np.array([(fragment, *one) for fragment, one in known.items()], np.float64).reshape(-1, 3)

    def remember(self, memory: NDArray[np.float64]) -> None:
        """Take over what `memory` returned; a row that is not finite is left out."""
        rows = memory[np.isfinite(memory).all(axis=1)]
        self.norms.remember({int(fragment): (float(size), float(steps)) for fragment, size, steps in rows})


def error_of(judgement: Judgement) -> OutlyingDelta | None:
    """Return why a delta is refused, None if it may pass."""
    if not judgement.why:
        return None
    return (EnormousDelta if judgement.is_enormous else OutlyingDelta)(judgement.why)


def reason_of(error: CodecError) -> str:
    """Return the code with which a hub refuses what could not be checked for this reason."""
    if isinstance(error, EnormousDelta):
        return "enormous"
    if isinstance(error, OutlyingDelta):
        return "norm"
    return "non-finite" if isinstance(error, NonFiniteDelta) else "corrupt"
