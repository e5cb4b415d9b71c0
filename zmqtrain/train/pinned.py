"""The leaves of an offer, pinned until its encoder has read them: what is pending is then nowhere written down.

    the training thread     pins the leaves, and goes on; its next step begins when they are free, if it is given their
                            memory (donation): so what reads them must be quick
    a thread of XLA's       has the leaves at hand once they are computed, and waits for a reader: PATIENCE at most
    the encoding thread     reads them, as long as it takes; XLA gives nobody their memory meanwhile

Rule 1: nobody waits for who may wait for them: a thread of XLA waits without end only for a reader that has begun.
Rule 2: where no reader comes in time, XLA's thread makes a copy of `params - anchor`, and the reader has that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.interfaces import PinnedSegments
from zmqtrain.core.types import Array, JoinedSegments, joined_places
from zmqtrain.train import in_place

PATIENCE_SECONDS = 0.05
"""So long the leaves wait for a reader. One that is idle takes a hundredth of it."""
LOOK_SECONDS = 0.1
"""How often a reader looks whether XLA has given up: the step that made the leaves may have failed."""

Made = TypeVar("Made")
Addresses = NDArray[np.int64]


class Pinned(PinnedSegments):
    """See PinnedSegments.

    params: the leaves that the fragment touches, float32, on one processor.  anchor: of the whole model.  touched:
    which of its leaves those are.  places: the table of `CodedSegments`.  counts: values of each segment.  compute:
    gives the segments as XLA computes them.
    """

    def __init__(
        self,
        params: list[Any],
        anchor: in_place.Kept,
        touched: Sequence[int],
        places: NDArray[np.int64],
        counts: Sequence[int],
        compute: Callable[[], Sequence[Array]],
    ) -> None:
        self._params, self._anchor, self._touched = params, anchor, list(touched)
        self._places, self._counts = places, counts
        self._compute: Callable[[], Sequence[Array]] | None = compute
        self._owner = threading.get_ident()
        self._changed = threading.Condition()
        self._at_hand: tuple[Addresses, Addresses] | None = None
        self._has_reader = self._is_declined = False
        self._segments: Sequence[Array] | None = None
        self._done: Any = None

    # ------------------------------------------------------------------ training thread

    def pin(self) -> None:
        params, self._params, self._compute = self._params, [], None
        self._change(done=self._anchor.look_at(params, self._show))

    def settle(self) -> None:
        if self._compute is not None:
            compute, self._params, self._compute = self._compute, [], None
            self._change(segments=compute())

    def _change(self, **changes: Any) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self, f"_{name}", value)
            self._changed.notify_all()

    # ------------------------------------------------------------------ thread of XLA's

    def _show(self, params: Addresses, anchor: Addresses) -> None:
        with self._changed:
            self._at_hand = params, anchor[self._touched]
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._has_reader or self._is_declined, PATIENCE_SECONDS)
                if not self._has_reader:
                    self._copy(*self._at_hand)
            finally:  # also of a thread that is interrupted: once it has returned, XLA writes there
                while self._has_reader and self._at_hand is not None:
                    self._changed.wait()
                self._at_hand = None
                self._changed.notify_all()

    def _copy(self, params: Addresses, anchor: Addresses) -> None:
        copied = JoinedSegments(np.empty(joined_places(self._counts)[1], np.float32), self._counts)
        ends = np.cumsum(self._counts)
        for at, count, leaf, start in self._places.tolist():
            inside = at - (ends[leaf] - self._counts[leaf])
            ours, behind = (in_place.values_at(int(each[leaf]) + 4 * start, count) for each in (params, anchor))
            np.subtract(ours, behind, out=copied[leaf][inside : inside + count])
        self._segments, self._at_hand = copied, None
        self._changed.notify_all()

    # ------------------------------------------------------------------ encoding thread

    def read(self, work: Callable[[Array, Array, Array], Made]) -> Made | None:
        self._settle_own()
        with self._changed:
            self._wait()
            if self._at_hand is None:
                return None
            (params, anchor), self._has_reader = self._at_hand, True
            self._changed.notify_all()
        try:
            return work(self._places, params, anchor)
        except BaseException:
            with self._changed:
                self._copy(params, anchor)  # for the error, which names the leaf
            raise
        finally:
            self._change(at_hand=None)

    def _settle_own(self) -> None:
        """Compute, where the training thread encodes what it offers itself."""
        if threading.get_ident() == self._owner:
            self.settle()

    def _wait(self) -> None:
        """Wait until there is something to read. Raises what the leaves' computation raised, and RuntimeError where
        there is nothing any more."""
        while self._at_hand is None and self._segments is None:
            if self._done is not None and self._done.is_ready() and self._at_hand is None and self._segments is None:
                self._done.block_until_ready()
                raise RuntimeError("the leaves of an offer are read once: what was pending is not kept")
            self._changed.wait(LOOK_SECONDS)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, index: Any) -> Any:
        self._settle_own()
        with self._changed:
            self._is_declined = True
            self._changed.notify_all()
            while self._segments is None:
                self._wait()
                if self._segments is None:
                    self._changed.wait(LOOK_SECONDS)
            return self._segments[index]
