"""Train one JAX model on the ordinary PCs of a lab: the public names, and nothing else.

Names that need jax are loaded when they are first used, so that the broker runs without it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zmqtrain.core.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, RunStopped, ZmqTrainError
from zmqtrain.core.installed import package_version
from zmqtrain.core.settings import RunSettings

if sys.platform == "win32":
    raise ImportError(
        "zmqtrain does not run in Windows itself. It runs in WSL2: `wsl --install` in PowerShell, then install "
        "zmqtrain in the Linux that it opens"
    )

if TYPE_CHECKING:
    from zmqtrain import records
    from zmqtrain.broker.broker import Broker
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.collectives.communicator import Communicator, Message
    from zmqtrain.collectives.group import Request, wait_all, wait_any
    from zmqtrain.collectives.matching import ANY_SOURCE, ANY_TAG, Status
    from zmqtrain.engine.executor import Engine
    from zmqtrain.models import load_model, save_model
    from zmqtrain.node.connect import connect
    from zmqtrain.node.joint import JointNode, connect_as_one
    from zmqtrain.node.node import Node
    from zmqtrain.parameter_server.parameter_client import ParameterClient
    from zmqtrain.pipeline.costs import PC, SegmentCost, TiedLeaf
    from zmqtrain.pipeline.elastic import ElasticPipeline
    from zmqtrain.pipeline.marks import stage_end
    from zmqtrain.pipeline.partition import partition
    from zmqtrain.pipeline.pipeline import Pipeline
    from zmqtrain.pipeline.pipeline_node import PipelineNode
    from zmqtrain.pipeline.split import split
    from zmqtrain.programs import load_program
    from zmqtrain.synchronous.tensor import TensorParallel
    from zmqtrain.train.gradients import GradientLoop, GradientOptions
    from zmqtrain.train.loop import TrainingLoop
    from zmqtrain.train.program import Program
    from zmqtrain.train.step import LoopHooks
    from zmqtrain.train.sync import DelayedSync
    from zmqtrain.transport.zmq_keys import CurveKeys

    __version__: str

__all__ = [
    "connect",
    "connect_as_one",
    "Node",
    "JointNode",
    "DelayedSync",
    "TrainingLoop",
    "GradientLoop",
    "GradientOptions",
    "LoopHooks",
    "Program",
    "load_program",
    "load_model",
    "save_model",
    "records",
    "ParameterClient",
    "Broker",
    "BrokerThread",
    "CurveKeys",
    "Communicator",
    "ANY_SOURCE",
    "ANY_TAG",
    "wait_all",
    "wait_any",
    "Request",
    "Message",
    "Status",
    "Engine",
    "TensorParallel",
    "Pipeline",
    "PipelineNode",
    "ElasticPipeline",
    "partition",
    "SegmentCost",
    "TiedLeaf",
    "PC",
    "split",
    "stage_end",
    "RunSettings",
    "ZmqTrainError",
    "PeerLost",
    "RunStopped",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "__version__",
]

_HOMES = {
    "connect": "zmqtrain.node.connect",
    "connect_as_one": "zmqtrain.node.joint",
    "Node": "zmqtrain.node.node",
    "JointNode": "zmqtrain.node.joint",
    "Broker": "zmqtrain.broker.broker",
    "BrokerThread": "zmqtrain.broker.serve",
    "CurveKeys": "zmqtrain.transport.zmq_keys",
    "Communicator": "zmqtrain.collectives.communicator",
    "ANY_SOURCE": "zmqtrain.collectives.matching",
    "ANY_TAG": "zmqtrain.collectives.matching",
    "wait_all": "zmqtrain.collectives.group",
    "wait_any": "zmqtrain.collectives.group",
    "Request": "zmqtrain.collectives.group",
    "Message": "zmqtrain.collectives.communicator",
    "Status": "zmqtrain.collectives.matching",
    "Engine": "zmqtrain.engine.executor",
    "load_model": "zmqtrain.models",
    "save_model": "zmqtrain.models",
    "ParameterClient": "zmqtrain.parameter_server.parameter_client",
    "ElasticPipeline": "zmqtrain.pipeline.elastic",
    "Pipeline": "zmqtrain.pipeline.pipeline",
    "PipelineNode": "zmqtrain.pipeline.pipeline_node",
    "partition": "zmqtrain.pipeline.partition",
    "SegmentCost": "zmqtrain.pipeline.costs",
    "TiedLeaf": "zmqtrain.pipeline.costs",
    "PC": "zmqtrain.pipeline.costs",
    "split": "zmqtrain.pipeline.split",
    "stage_end": "zmqtrain.pipeline.marks",
    "DelayedSync": "zmqtrain.train.sync",
    "TrainingLoop": "zmqtrain.train.loop",
    "GradientLoop": "zmqtrain.train.gradients",
    "GradientOptions": "zmqtrain.train.gradients",
    "LoopHooks": "zmqtrain.train.step",
    "Program": "zmqtrain.train.program",
    "load_program": "zmqtrain.programs",
    "TensorParallel": "zmqtrain.synchronous.tensor",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return package_version()
    if name == "records":
        return import_module("zmqtrain.records")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
