"""Judge by its norm whether a delta is one that training makes: those of its fragment, of all nodes, are the measure.

Rule 1: only what is far too large is refused; what is small harms nobody.  Rule 2: robust: a median and its deviation,
of logarithms, over what was accepted of late; what was refused moves nothing.
Rule 3: an honest delta is not refused: what was usual once in this run is let through for ever, as an optimizer that
begins fresh late, when all others hardly move, makes steps of the size that the run began with (Adam's are about the
rate each, however small gradients are). One that stands for many steps may be as many times as large (its node was
away), a node's first of a fragment ten times, and where the other nodes' are as large, it is the run that has changed.
A gate that has refused everything for long, or half of the nodes, knows the run no more, and takes their size.
Rule 4: pure: numbers in, a sentence out; bounded in nodes and in what is kept of each.
Source: median and median absolute deviation, Leys et al. 2013; norms of updates as a defence, Sun et al. 2019.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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
ENORMOUS = 1000.0
"""So many times over what is let through, it is no optimizer's doing, fresh or not: something is broken there."""
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
            f'{text!r}: say "auto", "none", or a number over 1: how many times as large as usual a delta may be, as 10'
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
    less its log steps, accepted or not; and how many were refused since one was accepted.

    largest: the largest median there ever was of `accepted`, (log norm, log steps); None: none was judged yet.
    turned_away: by node (log norm, log steps) of its last delta that was refused, and not enormous.
    """

    accepted: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    latest: dict[PeerId, float] = field(default_factory=dict)
    refused: int = 0
    largest: tuple[float, float] | None = None
    turned_away: dict[PeerId, tuple[float, float]] = field(default_factory=dict)

    def raise_to(self, size: float, stands_for: float) -> None:
        """Take this for a size that the run has had."""
        self.largest = max(self.largest or (-inf, 0.0), (size, stands_for))


class NormGate:
    """The gate of one run's deltas.

    factor: above 1; how many times as large as usual a delta may be, besides what is ordinary among them.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.excess = 0.0
        """Of the delta that was judged last: how many times as large as the largest that would be let through."""
        self._nodes: dict[PeerId, _Node] = {}
        self._fragments: dict[int, _Fragment] = {}

    def judge(self, peer: PeerId, fragment: int, norm: float, steps: int, dense: bool = False) -> str:
        """Return "" if a delta may pass, and count it as accepted; else why it may not, in words.

        norm: of the delta, by any measure that grows with it.  steps: since the node's last offer of any fragment.
        dense: sent uncompressed, as the end of a node's share; it is no measure for others.
        """
        self.excess = inf if not norm < LARGEST_NORM else 0.0
        if self.excess:
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
            if self.excess < ENORMOUS:
                known.turned_away.pop(peer, None)
                known.turned_away[peer] = (size, stands_for)
                while len(known.turned_away) > NODES_KEPT:
                    del known.turned_away[next(iter(known.turned_away))]
            return why
        if why:
            known.accepted.clear()
        known.turned_away.pop(peer, None)
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

    def rebase(self, peers: Iterable[PeerId]) -> None:
        """Take what was refused last of these nodes for a size that the run has: so many cannot all be wrong."""
        wanted = set(peers)
        for known in self._fragments.values():
            for peer in wanted & known.turned_away.keys():
                known.raise_to(*known.turned_away.pop(peer))
            known.refused = 0

    def memory(self) -> dict[int, tuple[float, float]]:
        """Return what is to be known after a restart: by fragment the largest usual (log norm, log steps)."""
        return {number: known.largest for number, known in self._fragments.items() if known.largest is not None}

    def remember(self, memory: dict[int, tuple[float, float]]) -> None:
        """Take over what `memory` returned."""
        for fragment, (size, stands_for) in memory.items():
            self._fragments.setdefault(fragment, _Fragment()).raise_to(size, stands_for)

    def _judge(self, known: _Fragment, peer: PeerId, size: float, stands_for: float, allowance: float) -> str:
        if len(known.accepted) < FEWEST:
            return ""
        sizes = [one for one, _ in known.accepted]
        usual = median(sizes)
        ordinary = min(DEVIATIONS * median(abs(one - usual) for one in sizes), log(self.factor))
        steps = median(steps for _, steps in known.accepted)
        known.raise_to(usual, steps)
        assert known.largest is not None
        most, of_steps = known.largest
        growth = min(max(0.0, stands_for - steps), log(MOST_GROWTH))
        growth_since = min(max(0.0, stands_for - of_steps), log(MOST_GROWTH))
        limit = max(usual + ordinary + growth, most + growth_since) + log(self.factor) + allowance
        if size <= limit:
            return ""
        stands_for = min(stands_for, steps + log(MOST_GROWTH))
        others = [latest for other, latest in known.latest.items() if other != peer]
        if others and size - stands_for <= median_low(others) + log(self.factor):
            return ""
        self.excess = exp(min(size - limit, 500.0))
        return (
            f"its norm is {exp(size):.3g}, {exp(size - usual):.3g} times that of what came before it "
            f"({exp(usual):.3g}); at most {exp(limit - usual):.3g} times is let through here (--norm-gate)"
        )
