"""Say when a node offers next, and how late it applies what comes of that: the run's k and d, or less at a slow node.

Rule: k and d are asked of the exchange, which knows at which version they change; here they are counted in steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmqtrain.core.interfaces import Exchange
from zmqtrain.train.minibatch import dynamic_every


class Rhythm:
    """The k and d of one node. delay: of what is offered now, in steps."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._settings = exchange, exchange.settings
        self._schedule = self._every, self.delay = self._read()
        self._planned_at, self._offer_at = 0, self._every

    def is_due(self, step: int) -> bool:
        """Whether k steps are over."""
        return step >= self._offer_at

    def offered(self, step: int) -> None:
        """Count from this step, at which an offer was due."""
        self._plan(step)

    def follow(self) -> None:
        """Take over another k and d, if others are announced at the version that is applied here."""
        if self._settings.is_planned and self._read() != self._schedule:
            self._plan(self._planned_at)

    def _read(self) -> tuple[int, int]:
        settings = self._settings
        return self._exchange.schedule()[:2] if settings.is_planned else (settings.every, settings.delay)

    def _plan(self, begin: int) -> None:
        self._schedule = self._every, self.delay = every, delay = self._read()
        if self._settings.follows_speed:
            self._every = dynamic_every(every, *self._exchange.schedule(paced=True)[2:])
            self.delay = round(delay * self._every / every)
        self._planned_at, self._offer_at = begin, begin + self._every

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        now = [self._planned_at, self._offer_at, self._every, self.delay]
        return {"plan": now, "schedule": list(self._schedule)}

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Take over what `to_plain` wrote."""
        self._planned_at, self._offer_at, self._every, self.delay = plain["plan"]
        self._schedule = (plain["schedule"][0], plain["schedule"][1])
