"""Make batches of the data units that a node is dealt: one unit after the other, and each from where a checkpoint was.

Rule 1: of the training thread, which waits here only as `UnitQueue` makes it wait.  Rule 2: a unit is done when its
last batch was trained on, not when it was given: when the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from zmqtrain.node.units import UnitQueue
from zmqtrain.session.events import NodeEvents

Batch = TypeVar("Batch", covariant=True)


class UnitSource(Protocol[Batch]):
    """Where a numbered data unit becomes batches: the same number gives the same batches on every node."""

    def batches(self, unit: int) -> Iterator[Batch]:
        """Give the batches of one unit."""


class UnitBatches:
    """The batches of one node's units. check: raises when the node has failed.  events: who is told of each unit."""

    def __init__(self, units: UnitQueue, check: Callable[[], None], events: NodeEvents | None) -> None:
        self._units, self._check, self._events = units, check, events

    def each(self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]]) -> Iterator[Batch]:
        """Give the batches of all units, until the run is over.

        source: a program, or any function from a unit's number to its batches.
        """
        while (unit := self._units.take(self._check)) is not None:
            yield from self._of(source, unit)

    def as_they_come(
        self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]], wait_seconds: float
    ) -> Iterator[Batch | None]:
        """Give the batches as `each` does, and None where no unit has come within this time."""
        while (unit := self._units.take_soon(self._check, wait_seconds)) is not None or not self._units.finished:
            if unit is None:
                yield None
            else:
                yield from self._of(source, unit)

    def _of(self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]], unit: int) -> Iterator[Batch]:
        if self._events is not None:
            self._events.began(unit)
        batches_of: Callable[[int], Iterator[Batch]] = source.batches if hasattr(source, "batches") else source
        passed = self._units.begin(unit)
        for number, batch in enumerate(batches_of(unit)):
            if self._units.stopped:  # of a run that was ended: the unit is not done
                return
            if number >= passed:  # those before it were trained on before the checkpoint
                self._units.given()
                yield batch
        self._units.done(unit)
