"""Simulate a run in virtual time: the same hub, nodes, codecs and training code, on modelled computers and wires.

These names need jax, and are loaded when they are first used: `zmqtrain plan` simulates pipelines without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqtrain.sim.run import SimResult, simulate
    from zmqtrain.sim.scenario import Scenario, SimNode

__all__ = ["simulate", "Scenario", "SimNode", "SimResult"]

_PLACES = {"simulate": "run", "SimResult": "run", "Scenario": "scenario", "SimNode": "scenario"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
