"""The run, and the two addresses, of all who are tested with a standby."""

from __future__ import annotations

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec

__all__ = ["MODEL", "SETTINGS", "FIRST", "SECOND"]

MODEL = (LeafSpec("w", (8,), "float32"),)
SETTINGS = RunSettings(every=2, delay=1, release="immediately", initial="founder", lost_seconds=1.0, codec="float32")
FIRST, SECOND = "tcp://first:1", "tcp://second:1"
