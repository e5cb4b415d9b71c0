"""Simulate a run in virtual time: the same hub, nodes, codecs and training code, on modelled computers and wires."""

from zmqtrain.sim.run import SimResult, simulate
from zmqtrain.sim.scenario import Scenario, SimNode

__all__ = ["simulate", "Scenario", "SimNode", "SimResult"]
