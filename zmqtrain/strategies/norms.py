"""Judge by its norm whether a delta is one that training makes: those of its fragment, of all nodes, are the measure.

Rule 1: only what is far too large is refused; what is small harms nobody.  Rule 2: robust: a median and its deviation,
of logarithms, over what was accepted of late; what was refused moves nothing.
Rule 3: an honest delta is not refused: one that stands for many steps may be as many times as large (its node was
away), a node's first of a fragment ten times (its optimizer is fresh), and where the other nodes' are as large, it is
the run that has changed. A gate that has refused everything for long knows the run no more, and begins anew.
Rule 4: pure: numbers in, a sentence out; bounded in nodes and in what is kept of each.
Source: median and median absolute deviation, Leys et al. 2013; norms of updates as a defence, Sun et al. 2019.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import exp, inf, log
from statistics import median, median_low

from zmqtrain.errors import ConfigError
from zmqtrain.types import PeerId

__all__ = ["NormGate", "norm_gate_from_text"]

WINDOW, FEWEST = 64, 8
"""How many accepted deltas of a fragment are looked back on, and how many there must be before one is judged."""
DEVIATIONS = 3 * 1.4826
"""So many median absolute deviations are ordinary (three standard deviations, were the logarithms normal)."""
MOST_GROWTH = 1000.0
"""A delta may be so many times as large for the steps that it stands for, at most."""
FIRST_GROWTH = 10.0
"""And so many times for being the first of its fragment that this node is known to send."""
REST_GROWTH = 10.0
"""And so many times for being all that a node has left, uncompressed: a sparse codec leaves more than it sends."""
LARGEST_NORM = 1e15
"""No training makes a delta of this norm; it is refused whatever came before."""
PATIENCE = 16
"""After so many refusals of a fragment with nothing accepted between, its measure is made anew."""
NODES_KEPT = 1024


def norm_gate_from_text(text: str) -> str | float:
    """Read the setting norm_gate: "auto", "none", or a number above 1. Raises ConfigError."""
    if text in ("auto", "none"):
        return text
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 < factor < inf:
        raise ConfigError(
            f'norm_gate is "auto", "none", or how many times as large as usual a delta may be, as 10; got {text!r}'
        )
    return factor


@dataclass
class _Node:
    """What was accepted of a node: its steps in all, and by fragment how many they were at its last delta."""

    steps: int = 0
    at: dict[int, int] = field(default_factory=dict)


@dataclass
class _Fragment:
    """What is known of a fragment: (log norm, log steps) of what was accepted; by node the log norm of its last delta,
    less its log steps, accepted or not; and how many were refused since one was accepted."""

    accepted: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    latest: dict[PeerId, float] = field(default_factory=dict)
    refused: int = 0


class NormGate:
    """The gate of one run's deltas.

    factor: above 1; how many times as large as usual a delta may be, besides what is ordinary among them.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._nodes: dict[PeerId, _Node] = {}
        self._fragments: dict[int, _Fragment] = {}

    def judge(self, peer: PeerId, fragment: int, norm: float, steps: int, dense: bool = False) -> str:
        """Return "" if a delta may pass, and count it as accepted; else why it may not, in words.

        norm: of the delta, by any measure that grows with it.  steps: since the node's last offer of any fragment.
        dense: sent uncompressed, as the end of a node's share; it is no measure for others.
        """
        if not norm < LARGEST_NORM:
            return f"its norm is {norm:.3g}: no training makes such a delta"
        if norm <= 0:
            return ""
        known = self._fragments.setdefault(fragment, _Fragment())
        node = self._nodes.pop(peer, None) or _Node()
        self._nodes[peer] = node  # now the most recent
        while len(self._nodes) > NODES_KEPT:
            self.forget(next(iter(self._nodes)))
        size, stands_for = log(norm), log(max(1, node.steps + steps - node.at.get(fragment, 0)))
        allowance = (FIRST_GROWTH if fragment not in node.at else 1.0) * (REST_GROWTH if dense else 1.0)
        why = self._judge(known, peer, size, stands_for, log(allowance))
        if not dense:
            known.latest[peer] = size - stands_for
        if why and known.refused < PATIENCE:
            known.refused += 1
            return why
        if why:
            known.accepted.clear()
        if not dense:
            known.refused = 0
            known.accepted.append((size, stands_for))
        node.steps += max(0, steps)
        node.at[fragment] = node.steps
        return ""

    def forget(self, peer: PeerId) -> None:
        """Take a node for a new one: it has left, or has begun again from the shared parameters."""
        self._nodes.pop(peer, None)
        for known in self._fragments.values():
            known.latest.pop(peer, None)

    def _judge(self, known: _Fragment, peer: PeerId, size: float, stands_for: float, allowance: float) -> str:
        if len(known.accepted) < FEWEST:
            return ""
        sizes = [one for one, _ in known.accepted]
        usual = median(sizes)
        ordinary = min(DEVIATIONS * median(abs(one - usual) for one in sizes), log(self.factor))
        steps = median(steps for _, steps in known.accepted)
        stands_for = min(stands_for, steps + log(MOST_GROWTH))
        limit = usual + log(self.factor) + ordinary + max(0.0, stands_for - steps) + allowance
        if size <= limit:
            return ""
        others = [latest for other, latest in known.latest.items() if other != peer]
        if others and size - stands_for <= median_low(others) + log(self.factor):
            return ""
        return (
            f"its norm is {exp(size):.3g}, {exp(size - usual):.3g} times that of what came before it "
            f"({exp(usual):.3g}); at most {exp(limit - usual):.3g} times is let through here (--norm-gate)"
        )
