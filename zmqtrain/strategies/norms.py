"""Norm gate: a delta far larger than those accepted of its fragment, from all nodes, is refused.

Rule 1: only what is far too large is refused; what is small harms nobody.  Rule 2: robust: a median and its deviation,
of logarithms, over what was accepted of late; where few have been seen, the median of the nodes, once those of the
round are here.  `judge` moves nothing: what is judged counts when it is known to (`count`).
Rule 3: an honest delta is not refused: what was usual once in this run is let through for ever, as an optimizer that
begins fresh late, when all others hardly move, makes steps of the size that the run began with (Adam's are about the
rate each, however small gradients are). One that stands for many steps may be as many times as large (its node was
away), but not of a node on probation, or whose own loss is far worse than the others'; and where the other nodes' are
as large, it is the run that has changed, by one factor at a time.
Rule 4: names of one key are one voter: however many, they are not the measure of the others.
Rule 5: pure: numbers in, a judgement out; bounded in nodes and in what is kept of each.
Source: median and median absolute deviation, Leys et al. 2013; norms of updates as a defence, Sun et al. 2019.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite, log, nan
from statistics import median, median_low

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import PeerId, Score

WINDOW, FEWEST = 64, 8
"""How many accepted deltas of a fragment are looked back on, and how many there must be before one is judged alone."""
DEVIATIONS = 3 * 1.4826
"""So many median absolute deviations are ordinary (three standard deviations, were the logarithms normal)."""
MOST_GROWTH = 1000.0
"""A delta may be so many times as large, at most, for the steps that it stands for, and because its node has made more
steps in all than the nodes had whose deltas it is compared with: learning rates rise from nearly nothing at first."""
MOST_WARM_UP = 100.0
"""Of a first delta, which is judged with those of its round, at most so much is explained by more steps in all."""
LAG = 2.0
"""If a node's loss is so many times the median of the others', its steps do not explain a large delta."""
PROBATION = 8
"""So many deltas in a row must be accepted of a node that was quarantined before it is one as any other."""
SUSPICIOUS = 3.0
"""Of a node that is found to diverge, what was so many times the others' median is taken back."""
ENORMOUS = 1000.0
"""So many times over what is let through, it is no optimizer's doing, fresh or not: something is broken there."""
LARGEST_NORM = 1e15
"""No training makes a delta of this norm; it is refused whatever came before."""
PATIENCE = 16
"""After so many refusals of a fragment with nothing accepted between, its measure begins again."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """What is said of one delta. why: it may not pass, in words; "": it may.

    size, stands_for: logarithms of its norm and of the steps that it stands for.  steps: since the node's last offer.
    made: logarithm of all steps of its node until then.
    rest: logarithm of how many times as large it may be for being the end of a node's share.  excess: how many times
    as large it is as the largest that would be let through; of one that passes: the measure begins again with it.
    young: so few had been seen that it is judged once more, with those of its round.
    """

    peer: PeerId
    voter: str
    fragment: int
    size: float = -inf
    stands_for: float = 0.0
    made: float = 0.0
    steps: int = 0
    dense: bool = False
    rest: float = 0.0
    score: Score = nan
    why: str = ""
    excess: float = 0.0
    young: bool = False

    @property
    def level(self) -> float:
        """The logarithm of its norm for each step."""
        return self.size - self.stands_for

    @property
    def is_enormous(self) -> bool:
        """Whether nothing but a fault explains it."""
        return self.excess >= ENORMOUS


@dataclass
class _Node:
    """What was accepted of a node: its steps in all, and by fragment how many they were at its last delta; and how many
    must be accepted until it is no longer on probation."""

    steps: int = 0
    at: dict[int, int] = field(default_factory=dict)
    probation: int = 0


@dataclass
class _Fragment:
    """What is known of a fragment: what was accepted; by node its last delta, accepted or not; and how many were
    refused since one was accepted.

    largest: the largest median there ever was of `accepted`, (log norm, log steps); None: none was judged yet.
    turned_away: by node its last delta that was refused, and not enormous.
    """

    accepted: deque[Judgement] = field(default_factory=lambda: deque(maxlen=WINDOW))
    latest: dict[PeerId, Judgement] = field(default_factory=dict)
    refused: int = 0
    largest: tuple[float, float] | None = None
    turned_away: dict[PeerId, Judgement] = field(default_factory=dict)

    def raise_to(self, size: float, stands_for: float) -> None:
        """Take this for a size that the run has had."""
        self.largest = max(self.largest or (-inf, 0.0), (size, stands_for))

    def usual(self) -> tuple[float, float]:
        """Return the medians of what was accepted: log norm, log steps."""
        return median(one.size for one in self.accepted), median(one.stands_for for one in self.accepted)

    def level_of(self, judgement: Judgement) -> float:
        """Return the level of a delta; one that ends a node's share stands for an exchange's steps at least."""
        steps = median(one.stands_for for one in self.latest.values()) if self.latest and judgement.dense else 0.0
        return judgement.size - max(judgement.stands_for, steps)

    def levels_but(self, peer: PeerId) -> list[float]:
        """Return the levels of the other nodes' last deltas: one for each voter, unless all are one voter's."""
        return self._of_others(peer, lambda one: one.level)

    def sizes_but(self, peer: PeerId, stands_for: float) -> list[float]:
        """Return how large the other nodes' last deltas would be if each stood for at least so many steps.

        stands_for: their logarithm, as are the sizes. For fewer steps a delta is not taken to be smaller: where the
        parameters hardly move any more, one of many steps is as large as one of few.
        """
        return self._of_others(peer, lambda one: one.size + max(0.0, stands_for - one.stands_for))

    def _of_others(self, peer: PeerId, measure: Callable[[Judgement], float]) -> list[float]:
        others = [one for one in self.latest.values() if one.peer != peer]
        voters: dict[str, list[float]] = {}
        for one in others:
            voters.setdefault(one.voter, []).append(measure(one))
        if len({one.voter for one in self.latest.values()}) <= 1:
            return [measure(one) for one in others]
        return [median_low(measured) for measured in voters.values()]


class NormGate:
    """The gate of one run's deltas.

    factor: above 1; how many times as large as usual a delta may be, besides what is ordinary among them.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._nodes: dict[PeerId, _Node] = {}
        self._fragments: dict[int, _Fragment] = {}

    def judge(
        self,
        peer: PeerId,
        fragment: int,
        norm: float,
        steps: int,
        *,
        rest: float = 0.0,
        score: Score = nan,
        voter: str = "",
    ) -> Judgement:
        """Judge whether a delta may pass; this changes nothing.

        norm: of the delta, by any measure that grows with it.  steps: since the node's last offer of any fragment.
        rest: 0, or, of one that is sent uncompressed as the end of a node's share, how many times as large as usual it
        may be for that (at least 1); it is no measure for others.  score: the loss of its node.  voter: its node's key.
        """
        judgement = Judgement(peer, voter or peer, fragment, steps=max(0, steps), dense=rest > 0, score=score)
        judgement = replace(judgement, rest=log(max(1.0, rest)))
        if not norm < LARGEST_NORM:
            return _refuse(judgement, f"its norm is {norm:.3g}: no training makes such a delta", inf)
        if norm <= 0:
            return judgement
        known, node = self._fragments.get(fragment, _Fragment()), self._nodes.get(peer, _Node())
        stands_for = log(max(1, node.steps + judgement.steps - node.at.get(fragment, 0)))
        young = len(known.accepted) < FEWEST
        made = log(max(1, node.steps + judgement.steps))
        judgement = replace(judgement, size=log(norm), stands_for=stands_for, made=made, young=young)
        if young:
            return judgement
        trusted = not node.probation and not self._lags(known, judgement)
        why, excess = self._judge(known, judgement, trusted)
        if why and known.refused >= PATIENCE and self._all_are_as_large(known, judgement):
            return replace(judgement, excess=excess)
        return _refuse(judgement, why, excess) if why else judgement

    def count(self, judgement: Judgement) -> None:
        """Record a delta that was judged, once it is known to count or to be refused."""
        if judgement.size == -inf:
            return
        known, peer = self._fragments.setdefault(judgement.fragment, _Fragment()), judgement.peer
        node = self._nodes.pop(peer, None) or _Node()
        self._nodes[peer] = node  # now the most recent
        while len(self._nodes) > NODES_KEPT:
            self._drop(next(iter(self._nodes)))
        if not judgement.dense:
            known.latest[peer] = judgement
        if judgement.why:
            known.refused += 1
            if not judgement.is_enormous:
                known.turned_away.pop(peer, None)
                known.turned_away[peer] = judgement
                while len(known.turned_away) > NODES_KEPT:
                    del known.turned_away[next(iter(known.turned_away))]
            return
        known.turned_away.pop(peer, None)
        if judgement.excess:
            known.accepted.clear()
        if not judgement.dense:
            known.refused = 0
            known.accepted.append(judgement)
            if len(known.accepted) >= FEWEST:
                known.raise_to(*known.usual())
        node.probation = max(0, node.probation - 1)
        node.steps += judgement.steps
        node.at[judgement.fragment] = node.steps

    def judge_again(self, judgement: Judgement) -> Judgement:
        """Judge once more, with those of its round, a delta that came when few had been seen.

        Of two nodes the larger one is out, unless its own loss is the better.
        """
        known = self._fragments.get(judgement.fragment)
        if known is None or not judgement.young or judgement.size == -inf:
            return judgement
        others = known.sizes_but(judgement.peer, judgement.size - known.level_of(judgement))
        if not others:
            return judgement
        rivals = [one.score for one in known.latest.values() if one.peer != judgement.peer]
        if len(others) == 1 and judgement.score < min(rivals, default=nan):
            return judgement
        rest = [one for one in known.latest.values() if one.peer != judgement.peer]
        warmer = max(0.0, judgement.made - median(one.made for one in rest))  # as in `_judge`
        limit = median_low(others) + log(self.factor) + judgement.rest + min(warmer, log(MOST_WARM_UP))
        if judgement.size <= limit:
            return judgement
        times = exp(min(judgement.size - median_low(others), 500.0))
        why = (
            f"its norm is {exp(judgement.size):.3g}, {times:.3g} times that of the other nodes' in this round; at most "
            f"{self.factor:g} times is let through here (--norm-gate)"
        )
        return _refuse(judgement, why, exp(min(judgement.size - limit, 500.0)))

    def leave_out(self, judgement: Judgement) -> None:
        """Remove a delta from the accepted ones: it is not in the sum after all."""
        known = self._fragments.get(judgement.fragment)
        if known is not None and judgement in known.accepted:
            known.accepted.remove(judgement)

    def forget(self, peer: PeerId, probation: bool = False) -> None:
        """Forget a node: it has left, or begins again from the shared parameters. probation: it is quarantined."""
        left = self._drop(peer)
        if rest := PROBATION if probation else left.probation:
            self._nodes[peer] = _Node(probation=rest)

    def _drop(self, peer: PeerId) -> _Node:
        for known in self._fragments.values():
            known.latest.pop(peer, None)
        return self._nodes.pop(peer, None) or _Node()

    def rebase(self, peers: Iterable[PeerId]) -> None:
        """Take what was refused last of these nodes for a size that the run has, but by one factor at a time: so many
        cannot all be wrong, or so it seems."""
        wanted = set(peers)
        for known in self._fragments.values():
            for peer in wanted & known.turned_away.keys():
                refused = known.turned_away.pop(peer)
                most = max(known.largest or (-inf, 0.0), known.usual() if known.accepted else (-inf, 0.0))
                size = refused.size if most[0] == -inf else min(refused.size, most[0] + log(self.factor))
                known.raise_to(size, refused.stands_for)
            known.refused = 0

    def memory(self) -> dict[int, tuple[float, float]]:
        """Return what is to be known after a restart: by fragment the largest usual (log norm, log steps)."""
        return {number: known.largest for number, known in self._fragments.items() if known.largest is not None}

    def remember(self, memory: dict[int, tuple[float, float]]) -> None:
        """Take over what `memory` returned."""
        for fragment, (size, stands_for) in memory.items():
            self._fragments.setdefault(fragment, _Fragment()).raise_to(size, stands_for)

    def _judge(self, known: _Fragment, judgement: Judgement, trusted: bool) -> tuple[str, float]:
        """Return why a delta may not pass, "" if it may, and by how much it is too large.

        trusted: it may be larger for its steps, and for being the end of a node's share.
        """
        usual, steps = known.usual()
        ordinary = min(DEVIATIONS * median(abs(one.size - usual) for one in known.accepted), log(self.factor))
        most, of_steps = max(known.largest or (-inf, 0.0), (usual, steps))
        size, stands_for = judgement.size, judgement.stands_for if trusted else -inf
        warmer = max(0.0, judgement.made - median(one.made for one in known.accepted)) if trusted else 0.0
        growth = min(max(0.0, stands_for - steps) + warmer, log(MOST_GROWTH))
        growth_since = min(max(0.0, stands_for - of_steps), log(MOST_GROWTH))
        limit = max(usual + ordinary + growth, most + growth_since) + log(self.factor)
        limit += judgement.rest if trusted else 0.0
        if size <= limit:
            return "", 0.0
        level = size - min(judgement.stands_for, steps + log(MOST_GROWTH))
        others = known.levels_but(judgement.peer)
        as_large = bool(others) and level <= median_low(others) + log(self.factor)
        if as_large and size <= limit + log(self.factor):
            return "", 0.0
        why = (
            f"its norm is {exp(size):.3g}, {exp(size - usual):.3g} times that of what came before it "
            f"({exp(usual):.3g}); at most {exp(limit - usual):.3g} times is let through here (--norm-gate)"
        )
        return why, exp(min(size - limit, 500.0))

    def _lags(self, known: _Fragment, judgement: Judgement) -> bool:
        """Return whether a delta's node is far behind the others by its own loss; an unknown one is not."""
        others = [
            one.score for one in known.latest.values() if one.peer != judgement.peer and isfinite(one.score)
        ]  # fmt: skip
        return bool(others) and judgement.score > LAG * median(others)

    def _all_are_as_large(self, known: _Fragment, judgement: Judgement) -> bool:
        """Return whether what has been refused for long is what all voters send."""
        return judgement.level <= median_low([*known.levels_but(judgement.peer), judgement.level]) + log(self.factor)


def is_suspicious(judgement: Judgement, others: Iterable[Judgement]) -> bool:
    """Return whether an accepted delta, of a node that has been found to diverge since, was one of that.

    others: what was accepted of the other nodes at about the same time.
    """
    levels = [one.level for one in others if not one.dense]
    return bool(levels) and judgement.level > median_low(levels) + log(SUSPICIOUS) + judgement.rest


def _refuse(judgement: Judgement, why: str, excess: float) -> Judgement:
    return replace(judgement, why=why, excess=excess)
