"""A logger for lines that peers cause: so many of one kind in so many seconds, then a count."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from zmqtrain.core.interfaces import Clock
from zmqtrain.session.environment import clock as environment_clock

MOST_LINES, LINE_SECONDS = 20, 10.0
"""So many lines of one kind in so many seconds: a classroom that leaves at once is named whole."""


@dataclass(slots=True)
class _Kind:
    began: float
    logged: int = 0
    unsent: int = 0


class RateLimitedLogger:
    """A logger for events that peers cause, so that they fill no disk. A kind of line is its text before its facts are
    put in, so that peers cannot make new kinds."""

    def __init__(self, logger: logging.Logger, clock: Clock = environment_clock) -> None:
        self._logger, self._clock = logger, clock
        self._kinds: dict[str, _Kind] = {}

    def log(self, level: int, text: str, *facts: Any, trace: bool = False) -> None:
        """Log a line, unless too many of its kind were logged lately. trace: with the exception being handled.

        A line below the logger's level does not count.
        """
        if not self._logger.isEnabledFor(level):
            return
        now = self._clock.monotonic()
        kind = self._kinds.setdefault(text, _Kind(now))
        if now - kind.began >= LINE_SECONDS:
            if kind.unsent:
                text_of_others = "%d more lines were like the next one, in the last %.0f s"
                self._logger.log(level, text_of_others, kind.unsent, now - kind.began)
            kind.began, kind.logged, kind.unsent = now, 0, 0
        if kind.logged >= MOST_LINES:
            kind.unsent += 1
            return
        kind.logged += 1
        self._logger.log(level, text, *facts, exc_info=trace)

    def warning(self, text: str, *facts: Any) -> None:
        self.log(logging.WARNING, text, *facts)

    def info(self, text: str, *facts: Any) -> None:
        self.log(logging.INFO, text, *facts)
