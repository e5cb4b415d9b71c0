"""Decide where a node compresses its deltas: on the device on which it trains, or on the processor.

Rule 1: the bytes are the same; what is decided is who works, and what crosses to the host.  Rule 2: it is decided for
good at the first offer; who has not imported jax is not made to.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, Literal

from zmqtrain.averaging.coder import DeltaCoder, OnDevice
from zmqtrain.core.types import Array

logger = logging.getLogger(__name__)

CodecOn = Literal["auto", "host", "device"]
"""Where deltas are compressed: on the processor, on the device that trains, or there if it is no processor (auto)."""


class CoderPlace:
    """Where one node codes.  name: of the node, for messages."""

    def __init__(self, codec_on: CodecOn, name: str) -> None:
        self._codec_on, self._name = codec_on, name
        self._settled = False

    def coder(self) -> OnDevice | None:
        """Return the coder of jax's device if parameters live there, as far as can be known before the first offer."""
        jax = sys.modules.get("jax")  # who has not imported it has no parameters on a device
        if self._codec_on == "device" or (self._codec_on == "auto" and jax and jax.default_backend() != "cpu"):
            from zmqtrain.codecs.payload_jax import DeviceCoder

            return DeviceCoder()
        return None

    def settle(self, coder: DeltaCoder, segments: Sequence[Array]) -> None:
        """Decide for good where deltas are coded: "auto" goes by where the first offer's segments are."""
        if self._settled:
            return
        self._settled = True
        if self._codec_on == "auto":
            coder.device = (coder.device or self.coder()) if on_accelerator(segments) else None
        elif coder.device is not None and len(_devices_of(segments)) > 1:
            text = "%s cannot compress on its device: its parameters lie on several; it is done on the processor"
            logger.warning(text, self._name)
            coder.device = None


def on_accelerator(segments: Sequence[Array]) -> bool:
    """True if these are jax arrays, all on one device that is not a processor; what is spread goes by the host."""
    devices = _devices_of(segments)
    everything = all(hasattr(segment, "devices") for segment in segments)
    return everything and len(devices) == 1 and devices.pop().platform != "cpu"


def _devices_of(segments: Sequence[Array]) -> set[Any]:
    return {device for segment in segments if hasattr(segment, "devices") for device in segment.devices()}
