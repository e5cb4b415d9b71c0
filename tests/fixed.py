"""Settings in numbers and specs, for tests that are about something else than what a hub chooses (auto)."""

from __future__ import annotations

from typing import Any

from zmqtrain.core.settings import RunSettings

__all__ = ["FIXED_RUN", "fixed_run"]

FIXED_RUN: dict[str, Any] = {
    "every": 8,
    "delay": 4,
    "codec": "ternary",
    "broadcast_codec": "ternary",
    "fragments": 1,
    "outer": "nesterov:rate=0.8,momentum=0.5",
}


def fixed_run(**settings: Any) -> RunSettings:
    """Return the settings of a run in which nothing is auto: these, and FIXED_RUN for the rest."""
    return RunSettings(**FIXED_RUN | settings)
