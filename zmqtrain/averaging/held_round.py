"""Hold the publishes of a round until it closes, and make one sum of them, as rules say that look at all of a round.

With n publishes of a fragment in a round, w_i their weights by selection and samples, and s_i their damping by
staleness,

    sum = n * combine(s_i D(u_i), w_i)        combine: their weighted mean, or a robust one

Rule 1: pure: no clock, no socket, no thread.  Rule 2: what is held is compressed; where the rule is a weighted mean one
publish at a time is decoded.  Rule 3: who is left out by its score is not one of the sum, but is one of n: those who
count stand for it; who is too stale is neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.codec import SLAB_VALUES
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, PeerId, Version
from zmqtrain.protocol.effects import Contribution
from zmqtrain.protocol.messages import Publish
from zmqtrain.strategies.aggregate import aggregation_from_spec
from zmqtrain.strategies.selection import selection_from_spec
from zmqtrain.strategies.staleness import compensate, staleness_from_spec

SCORES_KEPT = 16
"""The shared model's score is the median of so many of its nodes' latest ones."""

Vector = NDArray[np.float32]
Frames = Sequence[Buffer]
Decode = Callable[[PeerId, Publish, Frames], Vector]


class HeldRound:
    """The publishes that wait for the close of their round, and what the run's rules keep from round to round.

    needed: whether these rules look at all of a round; if not, a publish can be added when it comes.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._aggregation = aggregation_from_spec(settings.aggregate)
        self._selection = selection_from_spec(settings.selection)
        self._staleness = staleness_from_spec(settings.staleness)
        self.needed = not (
            self._aggregation.name == "mean"
            and self._selection.name == "all"
            and self._staleness.name == "constant"
            and (settings.max_staleness == 0 or settings.stale == "return")
        )
        self._held: dict[tuple[PeerId, int], tuple[Publish, Frames]] = {}
        self._scores: deque[float] = deque(maxlen=SCORES_KEPT)
        self._history: list[deque[tuple[Version, Vector]]] = []  # per fragment: what was published, for compensation

    def begin(self, fragments: int) -> None:
        """Hold nothing, of a model of so many fragments."""
        self._held.clear()
        kept = self._staleness.versions + 1 if self._staleness.versions else 0
        self._history = [deque(maxlen=kept) for _ in range(fragments)]

    def remember(self, version: Version, published: Sequence[Vector], fragments: Iterable[int]) -> None:
        """Keep what is published now of these fragments, if the staleness rule looks back."""
        if self._staleness.versions:
            for fragment in fragments:
                self._history[fragment].append((version, published[fragment].copy()))

    def hold(self, peer: PeerId, publish: Publish, frames: Frames) -> None:
        """Hold a checked publish until its round closes."""
        self._held[peer, publish.sequence] = (publish, frames)

    def drop(self, publishes: Iterable[tuple[PeerId, int]]) -> None:
        """Hold these no more: the norm gate leaves them out."""
        for key in publishes:
            self._held.pop(key, None)

    # ------------------------------------------------------------------ closing a round

    def sum_up(
        self, contributions: Sequence[Contribution], decode: Decode, published: Sequence[Vector], sums: Sequence[Vector]
    ) -> None:
        """Make the sums of a round, per fragment in `sums` (zeros before): n times what its publishes combine to.

        decode: gives D(u).  published: per fragment, what nodes have now.  Scores are compared within a fragment.
        """
        held = [(one, *self._held.pop((one.peer, one.sequence))) for one in contributions]
        held = [(one, publish, frames) for one, publish, frames in held if not one.too_stale]
        own = self._score
        self._scores.extend(one.score for one, _, _ in held if np.isfinite(one.score))
        for fragment in sorted({one.fragment for one, _, _ in held}):
            of_fragment = [(one, publish, frames) for one, publish, frames in held if one.fragment == fragment]
            by_score = self._selection.weights([one.score for one, _, _ in of_fragment], own)
            by_samples = self._aggregation.weigh([one.samples for one, _, _ in of_fragment])
            decoded = [partial(decode, one.peer, publish, frames) for one, publish, frames in of_fragment]
            counted = [
                (partial(self._damped, one, u, published[fragment]), score * samples)
                for (one, _, _), u, score, samples in zip(of_fragment, decoded, by_score, by_samples, strict=True)
                if score * samples > 0
            ]
            if self._aggregation.streams:
                self._add_up(counted, len(of_fragment), sums[fragment])
            else:
                self._combine(
                    [u() for u, _ in counted], [weight for _, weight in counted], len(of_fragment), sums[fragment]
                )

    @property
    def _score(self) -> float:
        """The shared model's score, NaN while nobody has said one."""
        return median(self._scores) if self._scores else float("nan")

    def _damped(self, one: Contribution, decode: Callable[[], Vector], published: Vector) -> Vector:
        """Return s D(u): damped by its staleness, or corrected for what has been published since its base."""
        u = decode()
        damping = self._staleness.damping(one.staleness)
        if damping != 1.0:
            u *= np.float32(damping)
        if self._staleness.versions and one.staleness > 0:
            history = self._history[one.fragment]
            base = next((array for version, array in reversed(history) if version <= one.base_version), history[0][1])
            u = compensate(u, published - base, self._staleness.strength)
        return u

    def _add_up(self, counted: Sequence[tuple[Callable[[], Vector], float]], count: int, total: Vector) -> None:
        """Make the sum of a rule that is a weighted mean: one contribution is decoded at a time."""
        whole = sum(weight for _, weight in counted)
        for decode, weight in counted:
            u = decode()
            u *= np.float32(weight / whole)
            total += u
        total *= np.float32(count)

    def _combine(self, us: Sequence[Vector], weights: Sequence[float], count: int, total: Vector) -> None:
        scales = self._aggregation.scales([_norm(u) for u in us])
        for u, scale in zip(us, scales, strict=True):
            if scale != 1.0:
                u *= np.float32(scale)
        for start in range(0, total.size, SLAB_VALUES):
            part = slice(start, start + SLAB_VALUES)
            np.multiply(self._aggregation.combine([u[part] for u in us], weights), np.float32(count), out=total[part])

    # ------------------------------------------------------------------ what outlives a restart

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return by name: "history/<fragment>/<version>" what was published then, flat, and "scores" (float64)."""
        history = {
            f"history/{fragment}/{version}": flat.copy()
            for fragment, history in enumerate(self._history)
            for version, flat in history
        }
        return history | {"scores": np.array(self._scores, np.float64)}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `arrays` returned, besides what is remembered since `begin`. Raises KeyError."""
        self._scores = deque((float(score) for score in arrays["scores"]), maxlen=SCORES_KEPT)
        for name in arrays:
            kind, _, place = name.partition("/")
            if kind == "history":
                fragment, version = (int(part) for part in place.split("/"))
                self._history[fragment].append((version, arrays[name].copy()))
        for fragment, history in enumerate(self._history):
            latest = dict(history)  # what has been remembered since is the newest
            self._history[fragment] = deque(sorted(latest.items()), maxlen=history.maxlen)


def _norm(u: Vector) -> float:
    """Return the L2 norm of a finite vector, also where its square is no float32."""
    largest = float(np.abs(u).max(initial=0.0))
    return largest * float(np.linalg.norm(u / np.float32(largest))) if largest > 0 else 0.0
