"""Carry out what a machine wishes in the order in which it wished it.

Rule: carrying out one effect may bring about others: they come after all that was wished before, and nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Effect = TypeVar("Effect")


class EffectQueue(Generic[Effect]):
    """The effects of one living half, of one thread. carry_out_one: does what an effect wishes."""

    def __init__(self, carry_out_one: Callable[[Effect], None]) -> None:
        self._carry_out_one = carry_out_one
        self._effects: deque[Effect] = deque()
        self._carrying_out = False

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out these, and those that they bring about; later, if that is being done already."""
        self._effects.extend(effects)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._effects:
                self._carry_out_one(self._effects.popleft())
        finally:
            self._carrying_out = False
