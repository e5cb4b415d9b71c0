"""Say what a round's contributions weigh.

Rule: a contribution is progress that some node made; no rule here shrinks it for coming late (damping by staleness lost
in every experiment).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import LocalProtocolError

__all__ = ["mean_over_live"]

Vector = NDArray[np.float32]


def mean_over_live(total: Vector, live: int, out: Vector | None = None) -> Vector:
    """Return total / live, float32[n]: the sum of a round's deltas over the number of live nodes; in `out` if given.

    Live nodes, not messages in the round: a round that closes with 2 of 4 deltas carries half of the federation's
    progress, and the other half comes in the next. Divided by 2 each, the two rounds would move the parameters twice as
    far as one round of 4: the step would grow with every straggler. Over the live nodes, any grouping of the same
    deltas into rounds moves the parameters by the same sum.  Raises LocalProtocolError if live < 1.
    """
    if live < 1:
        raise LocalProtocolError(f"a mean over {live} live nodes was asked for")
    return np.divide(total, np.float32(live), out=out)
