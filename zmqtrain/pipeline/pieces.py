"""What the PCs of a pipeline exchange with their hub: the parts of a model, and where a stage has them.

Rule 1: the model is exchanged in parts, one for each segment that holds parameters. They do not depend on who computes
what: pipelines with other stages, and a pipeline that has lost a PC, exchange the same parts.
Rule 2: rows of a leaf that several segments hold (tied ones) are in the part of the first of them. A stage that holds
them without that part *borrows* them: it takes their values from the stage that exchanges them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import Array, LeafSpec, ModelSpec, Piece
from zmqtrain.pipeline.local_values import OVERLAP, Rows, free_rows
from zmqtrain.pipeline.stage import HeldLeaf, Stage
from zmqtrain.protocol.pipelines import Share


class Span(NamedTuple):
    """Values of a stage's leaf: its place among the leaves that the stage holds, and from where to where, flat."""

    place: int
    start: int
    end: int


class Borrowed(NamedTuple):
    """Values that one stage takes from another, where both have them."""

    lender: int
    borrower: int
    source: Span
    target: Span


@dataclass(frozen=True)
class Parts:
    """The parts of a model, in the order of the computation. pieces: of each.  segments: whose each is."""

    pieces: tuple[tuple[Piece, ...], ...]
    segments: tuple[int, ...]

    def share(self, pipeline: str, begin: int, end: int) -> Share:
        """Return what the stage of these segments holds, for the hub. Raises ConfigError if it exchanges nothing."""
        inside = [part for part, segment in enumerate(self.segments) if begin <= segment < end]
        if not inside:
            raise ConfigError(
                f"the segments {begin} to {end - 1} hold no parameters of their own: such a stage cannot be one of a "
                "pipeline that trains with a hub. Take fewer PCs, or cut the loss elsewhere (zt.stage_end)"
            )
        return Share(pipeline, inside[0], inside[-1] + 1, len(self.pieces))


def parts_of_segments(segments: Sequence[Stage]) -> Parts:
    """Return the parts of a loss that is cut in segments. Raises ConfigError for a leaf of which segments hold rows in
    a way that leaves none of them in one piece."""
    taken: dict[int, list[Rows]] = {}
    parts: list[tuple[Piece, ...]] = []
    owners: list[int] = []
    for number, segment in enumerate(segments):
        pieces: list[Piece] = []
        for leaf in segment.held:
            rows = _rows(leaf)
            free = free_rows(rows, taken.get(leaf.number, []))
            if len(free) > 1:
                raise ConfigError(OVERLAP.format(leaf.whole.path))
            for start, end in free:
                taken.setdefault(leaf.number, []).append(Rows(start, end))
                whole = not leaf.whole.shape or (start, end) == (0, leaf.whole.shape[0])
                place = None if whole else (start, end)
                pieces.append(Piece(len(parts), leaf.number, leaf.whole.path, place))
        if pieces:
            parts.append(tuple(sorted(pieces, key=lambda one: one.name)))
            owners.append(number)
    return Parts(tuple(parts), tuple(owners))


def _rows(leaf: HeldLeaf) -> Rows:
    """The rows that are held; a scalar has one."""
    return leaf.rows or Rows(0, leaf.whole.shape[0] if leaf.whole.shape else 1)


def span_of(stage: Stage, number: int, rows: tuple[int, int] | None) -> Span | None:
    """Return where a stage has these rows of a leaf, as far as it has them; None if it has none. rows: None: all."""
    for place, leaf in enumerate(stage.held):
        if leaf.number != number:
            continue
        held, values = _rows(leaf), prod(leaf.whole.shape[1:])
        start, end = (held.start, held.stop) if rows is None else rows
        start, end = max(start, held.start), min(end, held.stop)
        return Span(place, (start - held.start) * values, (end - held.start) * values) if start < end else None
    return None


def spec_of(stage: Stage, pieces: Sequence[Piece]) -> ModelSpec:
    """Return the description of pieces that a stage has."""
    leaves = {leaf.number: leaf.whole for leaf in stage.held}
    return tuple(
        LeafSpec(
            piece.name,
            leaves[piece.number].shape
            if piece.rows is None
            else (piece.rows[1] - piece.rows[0], *leaves[piece.number].shape[1:]),
            leaves[piece.number].dtype,
        )
        for piece in pieces
    )


def borrowed(parts: Parts, stages: Sequence[Stage], shares: Sequence[Share]) -> Iterator[Borrowed]:
    """Yield what stages take from each other, in one order everywhere. shares: what each stage exchanges."""
    for borrower, (stage, share) in enumerate(zip(stages, shares, strict=True)):
        for part, pieces in enumerate(parts.pieces):
            if share.first <= part < share.end:
                continue
            lender = next(number for number, one in enumerate(shares) if one.first <= part < one.end)
            for piece in pieces:
                target = span_of(stage, piece.number, piece.rows)
                if target is None:
                    continue
                held = _rows(stage.held[target.place])
                values = prod(stage.held[target.place].whole.shape[1:])
                rows = (held.start + target.start // values, held.start + target.end // values)
                source = span_of(stages[lender], piece.number, rows)
                assert source is not None
                yield Borrowed(lender, borrower, source, target)


@dataclass(frozen=True)
class StageLayout:
    """Where the parts that a stage exchanges lie in its own leaves: a `Layout`. spans: by part, one for each leaf."""

    spans_of: tuple[tuple[Span, ...], ...]

    @property
    def fragments(self) -> int:
        """See Layout: the parts."""
        return len(self.spans_of)

    def leaves(self, fragment: int) -> tuple[int, ...]:
        """See Layout."""
        return tuple(span.place for span in self.spans_of[fragment])

    def counts(self, fragment: int) -> tuple[int, ...]:
        """See Layout."""
        return tuple(span.end - span.start for span in self.spans_of[fragment])

    def spans(self, leaf_index: int, fragment: int) -> NDArray[np.int64]:
        """See Layout."""
        span = self._span(leaf_index, fragment)
        return np.array([[span.start, span.end]], np.int64)

    def take(self, leaf: Array, leaf_index: int, fragment: int) -> Array:
        """See Layout."""
        span = self._span(leaf_index, fragment)
        return leaf.reshape(-1)[span.start : span.end].astype(np.float32)

    def add(self, leaf: Array, leaf_index: int, fragment: int, segment: Array) -> Array:
        """See Layout."""
        span = self._span(leaf_index, fragment)
        flat: Any = leaf.reshape(-1)
        if hasattr(leaf, "at"):
            if span.end - span.start == flat.size:
                return (leaf + segment.reshape(leaf.shape)).astype(leaf.dtype)
            old = flat[span.start : span.end]
            return flat.at[span.start : span.end].set((old + segment).astype(leaf.dtype)).reshape(leaf.shape)
        flat[span.start : span.end] += segment
        return leaf

    def _span(self, leaf: int, fragment: int) -> Span:
        return next(span for span in self.spans_of[fragment] if span.place == leaf)


def layout_of_stage(stage: Stage, pieces: Sequence[Sequence[Piece]]) -> StageLayout:
    """Return where a stage has the pieces of its parts; empty ones are left out, as in every layout."""
    found = [[span_of(stage, piece.number, piece.rows) for piece in part] for part in pieces]
    return StageLayout(tuple(tuple(span for span in part if span and span.start < span.end) for part in found))
