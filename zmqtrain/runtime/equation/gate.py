"""Let through what may be added to the parameters: deltas that are no larger than those that came before them.

Rule: pure: no clock, no socket, no thread.  A delta's norm is read from its codecs' scales, while it is checked: that
takes a twentieth of the time that adding it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.codec import Codec
from zmqtrain.codecs.norm import payload_norm
from zmqtrain.errors import CodecError, EnormousDelta, NonFiniteDelta, OutlyingDelta
from zmqtrain.settings import RunSettings
from zmqtrain.strategies.norms import ENORMOUS, NormGate, norm_gate_from_text
from zmqtrain.types import Buffer, PeerId

__all__ = ["USUAL_FACTOR", "DeltaGate", "reason_of"]

USUAL_FACTOR = 10.0
"""What norm_gate is, in a run that leaves it open."""


class DeltaGate:
    """The norm gate of a run, of all its nodes at the hub, of itself at a node; it may let everything through."""

    def __init__(self, settings: RunSettings) -> None:
        gate = norm_gate_from_text(settings.norm_gate)
        if gate == "auto":
            apart = settings.elastic < 1 or settings.initial == "own"  # what is pending there may be a whole model
            gate = "none" if apart or settings.mode == "strict" else USUAL_FACTOR
        self._norms = None if isinstance(gate, str) else NormGate(gate)

    def judge(
        self,
        peer: PeerId,
        fragment: int,
        codecs: Sequence[Codec],
        frames: Sequence[Buffer],
        counts: Sequence[int],
        *,
        steps: int,
        dense: bool,
    ) -> None:
        """Raise OutlyingDelta for a payload, checked before, that is far larger than usual, EnormousDelta for one that
        nothing but a fault can explain; else count it as accepted.

        codecs, counts: of each segment.  steps, dense: as in Publish.
        """
        if self._norms is None:
            return
        norm = payload_norm(codecs, frames, counts)
        if why := self._norms.judge(peer, fragment, norm, steps, dense):
            raise (EnormousDelta if self._norms.excess >= ENORMOUS else OutlyingDelta)(why)

    def forget(self, peer: PeerId) -> None:
        """Take a node for a new one: it has left, or has begun again from the shared parameters."""
        if self._norms is not None:
            self._norms.forget(peer)

    def rebase(self, peers: Iterable[PeerId]) -> None:
        """Take what was refused last of these nodes for the size that the run's deltas have."""
        if self._norms is not None:
            self._norms.rebase(peers)

    def open(self) -> None:
        """Let everything through from now on: who has not seen a run's deltas cannot tell which are too large."""
        self._norms = None

    def memory(self) -> NDArray[np.float64] | None:
        """Return what is to be known after a restart: float64[n, 3], (fragment, log norm, log steps) in a row.

        None: this gate lets everything through.
        """
        if self._norms is None:
            return None
        known = self._norms.memory()
        return np.array([(fragment, *one) for fragment, one in known.items()], np.float64).reshape(-1, 3)

    def remember(self, memory: NDArray[np.float64]) -> None:
        """Take over what `memory` returned; a row that is not finite is left out."""
        if self._norms is not None:
            rows = memory[np.isfinite(memory).all(axis=1)]
            self._norms.remember({int(fragment): (float(size), float(steps)) for fragment, size, steps in rows})


def reason_of(error: CodecError) -> str:
    """Return the code with which a hub refuses what could not be checked for this reason."""
    if isinstance(error, EnormousDelta):
        return "enormous"
    if isinstance(error, OutlyingDelta):
        return "norm"
    return "non-finite" if isinstance(error, NonFiniteDelta) else "corrupt"
