"""Make the way to the others for a node that trains in lockstep, as its `--exchange` says.

Rule 1: the run comes first: its broker says where the masters are, how many nodes begin, and what it is called.
Rule 2: what cannot be is said before anything is opened.
"""

from __future__ import annotations

import logging

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.collectives.algorithms import ALLREDUCE
from zmqtrain.collectives.connect import Communicator
from zmqtrain.core.errors import ConfigError, JoinRefused
from zmqtrain.core.interfaces import GradientExchange
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, Version
from zmqtrain.node.node import Node
from zmqtrain.node.shards import ShardedNode
from zmqtrain.parameter_server.parameter_client import ParameterClient
from zmqtrain.parameter_server.store import consistency_from_spec, optimizer_from_spec
from zmqtrain.synchronous.allreduce import AllreduceExchange
from zmqtrain.synchronous.server_exchange import ServerExchange
from zmqtrain.train.lockstep import Allreduce, Lockstep, Server, lockstep_from_spec
from zmqtrain.transport.zmq_keys import Credentials

logger = logging.getLogger(__name__)

UNIT_WAIT_SECONDS = 0.05
"""So long a node waits for a data unit before it tells the others that it has none now."""
MEET_SECONDS = 120.0
"""So long nodes that have joined the run wait for each other, to exchange gradients."""


def read_exchange(text: str) -> Lockstep | None:
    """Return what `--exchange` names, None for "hub". Raises ConfigError for what there is not, whatever part it is."""
    try:
        choice = lockstep_from_spec(text)
        match choice:
            case Allreduce(algorithm, codec=codec):
                if algorithm not in ("auto", *ALLREDUCE):
                    raise ConfigError(
                        f"there is no algorithm {algorithm!r}; choose one of auto, {', '.join(ALLREDUCE)}"
                    )
                if codec:
                    codec_from_spec(codec)
            case Server(consistency, optimizer=optimizer):
                consistency_from_spec(consistency)
                optimizer_from_spec(optimizer)
    except ConfigError as error:
        raise ConfigError(f"exchange = {text!r}: {error}") from error
    return choice


def check_masters(choice: Lockstep | None, settings: RunSettings) -> None:
    """Raise ConfigError if the run does not have the masters that were asked for."""
    if isinstance(choice, Server) and choice.masters not in (0, settings.masters):
        raise ConfigError(
            f"--masters {choice.masters} was asked for, and this run has {settings.masters}: start its brokers with "
            f"--shard 0/{choice.masters} to {choice.masters - 1}/{choice.masters}, or leave --masters out"
        )


def unit_wait_seconds(settings: RunSettings) -> float:
    """Return how long a node in lockstep waits for a data unit before it takes part in a step without one.

    In strict mode as long as a broker can be silent: whether a unit came in time must not depend on time.
    """
    return settings.lost_seconds if settings.mode == "strict" else UNIT_WAIT_SECONDS


def open_gradients(
    choice: Lockstep, node: Node | ShardedNode, credentials: Credentials | None, model: ModelSpec, version: Version
) -> GradientExchange:
    """Return the way to the others of the node's run; waits for them.

    model, version: of the run's parameters.  credentials: the broker's public key and this node's pair, None where
    there are none.
    Raises ConfigError if the run does not have the masters that were asked for; what opening a communicator or a
    client of the parameter server raises.
    """
    credentials = credentials or (None, None)
    if isinstance(choice, Allreduce):
        return _open_allreduce(choice, node, credentials)
    return _open_server(choice, node, credentials, model, version)


def _open_allreduce(choice: Allreduce, node: Node | ShardedNode, credentials: Credentials) -> AllreduceExchange:
    size = choice.size or node.settings.start_nodes
    if size == 1:
        logger.warning(
            "%s trains in lockstep with nobody: a synchronous run has the nodes that it begins with. Start the broker "
            "with --start-nodes, or say --exchange allreduce:size=4",
            node.name,
        )
    try:
        group = Communicator.create(
            node.address,
            size,
            group=f"{node.run} gradients",
            name=node.name,
            server_key=credentials[0],
            keys=credentials[1],
            timeout_seconds=MEET_SECONDS,
        )
    except JoinRefused as refused:
        raise JoinRefused(
            f"{refused}. A run in lockstep keeps the {size} nodes that it began with: for more, start a run anew, its "
            "broker with --start-nodes",
            refused.reason,
        ) from refused
    logger.info("%s is rank %d of %d: %s", node.name, group.rank, size, ", ".join(group.names))
    return AllreduceExchange(
        group, choice.algorithm, codec=choice.codec or None, timeout_seconds=choice.timeout_seconds
    )


def _open_server(
    choice: Server, node: Node | ShardedNode, credentials: Credentials, model: ModelSpec, version: Version
) -> ServerExchange:
    check_masters(choice, node.settings)

    def connect(reads_only: bool) -> ParameterClient:
        return ParameterClient.connect(
            node.address,
            name=node.name,
            server_key=credentials[0],
            keys=credentials[1],
            consistency=choice.consistency,
            optimizer=choice.optimizer,
            workers=choice.workers or node.settings.start_nodes,
            reads_only=reads_only,
        )

    staleness = consistency_from_spec(choice.consistency).staleness
    meetings = 0 if staleness is None else staleness + 2
    return ServerExchange(connect, model, version, node.name, meetings=meetings, timeout_seconds=choice.timeout_seconds)
