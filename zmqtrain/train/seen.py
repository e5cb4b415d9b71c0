"""Say what JAX sees to train on: `python -m zmqtrain.train.seen` prints it as one line of JSON.

Rule: a process of its own asks, so that who only looks takes no card's memory from who trains.
"""

from __future__ import annotations

import json
from typing import Any

import jax

__all__ = ["describe_devices", "main"]


def describe_devices() -> list[dict[str, Any]]:
    """Return platform, kind and bytes of memory (None: not said) of every device of JAX's default backend."""
    described = []
    for device in jax.local_devices():
        statistics = device.memory_stats() or {}
        described.append(
            {
                "platform": device.platform,
                "kind": device.device_kind,
                "memory_bytes": statistics.get("bytes_limit"),
            }
        )
    return described


def main() -> None:
    """Print the devices."""
    print(json.dumps(describe_devices()))


if __name__ == "__main__":
    main()
