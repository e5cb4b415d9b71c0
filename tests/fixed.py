"""Settings in numbers and specs, for tests that are about something else than what a hub chooses (auto)."""

from __future__ import annotations

from typing import Any

__all__ = ["FIXED_RUN"]

FIXED_RUN: dict[str, Any] = {
    "every": 8,
    "delay": 4,
    "codec": "ternary",
    "broadcast_codec": "ternary",
    "fragments": 1,
    "outer": "nesterov:rate=0.8,momentum=0.5",
}
