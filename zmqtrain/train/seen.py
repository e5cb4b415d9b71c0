"""The devices that JAX sees, and those a node trains on: `python -m zmqtrain.train.seen` prints the first as JSON.

Rule: a process of its own asks, so that looking takes no card's memory from training.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import jax

from zmqtrain.core.installed import has_nvidia_driver, how_to_install

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 64
UNUSED_CARD = "cpu, not its NVIDIA card"
_said: set[str] = set()
"""What was said in this process already."""


def describe_devices() -> list[dict[str, Any]]:
    """Return platform, kind and bytes of memory (None: not said) of every device of JAX's default backend."""
    described = []
    for device in jax.local_devices():
        statistics = device.memory_stats() or {}
        described.append(
            {"platform": device.platform, "kind": device.device_kind, "memory_bytes": statistics.get("bytes_limit")}
        )
    return described


def name_device(leaves: Sequence[Any] = (), everywhere: bool = False) -> str:
    """Return on what parameters lie, for people: "NVIDIA GeForce RTX 3060", "4 x NVIDIA H100", "cpu".

    leaves: jax's arrays; without any, and of other arrays: what jax computes on unless it is told otherwise.
    everywhere: on all devices of this PC.
    """
    devices = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
    kinds = sorted(device.device_kind for device in devices or jax.local_devices()[: None if everywhere else 1])
    if set(kinds) == {"cpu"} and jax.default_backend() == "cpu" and has_nvidia_driver():
        return UNUSED_CARD
    names = [kind if kinds.count(kind) == 1 else f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    return "".join(one if one.isprintable() else "?" for one in " and ".join(names))[:MOST_CHARACTERS]


def say_device(name: str, leaves: Sequence[Any]) -> str:
    """Return `name_device`, and log it: with a warning where a card is not used, and once in a process what JAX takes
    of a card's memory. name: the node's."""
    device = name_device(leaves)
    if device == UNUSED_CARD:
        text = "%s trains on the processor, and this PC has an NVIDIA driver: JAX is installed without CUDA. Type:  %s"
        logger.warning(text, name, how_to_install("cuda12"))
        return device
    logger.info("%s trains on %s; JAX compiles its first step", name, device)
    if jax.default_backend() == "gpu" and "memory" not in _said:
        _said.add("memory")
        logger.info(
            "JAX takes three quarters of the card's memory at its start. Where the card also drives a screen or serves "
            "others, begin the command with XLA_PYTHON_CLIENT_PREALLOCATE=false: JAX then takes what it needs"
        )
    return device


def main() -> None:
    print(json.dumps(describe_devices()))


if __name__ == "__main__":
    main()
