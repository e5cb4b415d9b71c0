"""Synchronous training's way to the other nodes: `GradientExchange` by allreduce, or through a parameter server.

By allreduce every process has the same mean and takes the same step. All agreements are sums over all, in one order:
first how many samples each has, then bucket by bucket the gradients. If a process is lost, the others form a group of
their own and say how far each has come; the hub does not reduce for such a group, so it uses another algorithm.

Through a server every leaf's gradient goes to its broker, which steps it. A leaf is a key whose name holds the version
of the run's parameters that it began with, so that no run goes on from the weights of another. A worker without data
leaves, so that nobody waits for its gradients, and comes again with the next batch: no step is made of gradients that
are zero. A worker that ends reads the weights once more: at the end of the data they are the same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.collectives.algorithms import ALLREDUCE
from zmqtrain.collectives.communicator import Communicator
from zmqtrain.collectives.group import Request
from zmqtrain.core.errors import ConfigError, JoinRefused, LocalProtocolError, PeerLost
from zmqtrain.core.interfaces import GradientExchange
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, ModelSpec, Turn, Version
from zmqtrain.node.node import Node
from zmqtrain.node.shards import ShardedNode
from zmqtrain.parameter_server.parameter_client import ParameterClient, ParameterRequest
from zmqtrain.parameter_server.store import consistency_from_spec, optimizer_from_spec
from zmqtrain.train.synchronous import Allreduce, Server, Synchronous, synchronous_from_spec
from zmqtrain.transport.zmq_keys import Credentials

logger = logging.getLogger(__name__)

WAIT_SECONDS = 600.0
"""How long one process may take longer than the others for a step, for its first compilation or an evaluation; and how
long an answer of a server may take, which waits for the other workers with "bsp" and "bounded"."""
PACKED_BYTES = 64 << 20
"""The size of the arrays in which a state travels."""
UNIT_WAIT_SECONDS = 0.05
"""How long a node waits for a data unit before it tells the others that it has none now."""
MEET_SECONDS = 120.0
"""How long nodes that have joined the run wait for each other, to exchange gradients."""


# ---------------------------------------------------------------------- by allreduce


class AllreduceExchange:
    """A `GradientExchange` over a group of processes, which is closed with it.

    algorithm: of the gradients' allreduce ("ring", "tree", "halving", "naive", "hub", or "auto").  codec: a spec of
    codecs; the gradients are then rounded, without feedback of the error.
    timeout_seconds: how long one process may keep the others waiting; then they raise CollectiveTimeout, with its name.
    """

    gives_weights = False

    def __init__(
        self,
        group: Communicator,
        algorithm: str = "auto",
        *,
        codec: str | None = None,
        timeout_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.algorithm, self.codec, self.timeout_seconds = algorithm, codec, timeout_seconds
        self._group = group
        self._pending: list[Request[Array]] = []

    @property
    def names(self) -> tuple[str, ...]:
        return self._group.names

    @property
    def rank(self) -> int:
        return self._group.rank

    def agree(self, samples: int, over: bool) -> Turn:
        """See GradientExchange: the samples of all, and whether all have said that it is over."""
        total, ended = self._sum(np.array([samples, over], np.int64))
        return Turn(int(total), int(ended) == len(self.names))

    def begin(self, leaves: Sequence[int], values: Array) -> None:
        self._pending.append(self._group.iallreduce(values, "sum", algorithm=self.algorithm, codec=self.codec))

    def finish(self) -> list[Array]:
        """See GradientExchange: the sums over all, which are the mean, as each is weighed."""
        pending, self._pending = self._pending, []
        return [request.wait(self.timeout_seconds) for request in pending]

    def align(self, step: int, state: Callable[[], Sequence[Array]]) -> tuple[int, Sequence[Array] | None]:
        """See GradientExchange: the state of the first of those who have made most steps is sent to all."""
        steps = [theirs for (theirs,) in self.gather([step])]
        most = max(steps)
        source = steps.index(most)
        if most >= 0 and min(steps) == most:
            return most, None
        arrays = [np.ascontiguousarray(array) for array in state()]
        came = [self._group.broadcast(piece, source, timeout_seconds=self.timeout_seconds) for piece in _packed(arrays)]
        if source == self.rank or step == most >= 0:
            return most, None
        return most, _unpacked(came, arrays)

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        table = np.zeros((len(self.names), len(numbers)), np.int64)
        table[self.rank] = numbers
        return [tuple(row) for row in self._sum(table.reshape(-1)).reshape(table.shape).tolist()]

    def recover(self, lost: PeerLost) -> None:
        """See GradientExchange: processes lost meanwhile are left out, too."""
        self._pending.clear()
        self._group = self._group.shrink(self.timeout_seconds)
        if self.algorithm == "hub":
            logger.warning("the hub reduces for the whole group only: those who are left reduce without it")
            self.algorithm = "auto"

    def traffic(self) -> tuple[int, int]:
        figures = self._group.statistics()
        return figures.bytes_sent, figures.bytes_received

    def close(self) -> None:
        self._group.close(timeout_seconds=0.0)  # a node that is stopped waits for nobody

    def _sum(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self._group.allreduce(numbers, "sum", timeout_seconds=self.timeout_seconds)
        return total


def _packed(arrays: Sequence[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """Give the bytes of all arrays end to end, in pieces of whole arrays."""
    piece: list[NDArray[np.uint8]] = []
    for array in arrays:
        piece.append(array.reshape(-1).view(np.uint8))
        if sum(one.size for one in piece) >= PACKED_BYTES:
            yield np.concatenate(piece)
            piece = []
    if piece:
        yield np.concatenate(piece)


def _unpacked(pieces: Sequence[NDArray[np.uint8]], like: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the arrays whose bytes those are, in the shapes and dtypes of `like`."""
    coming = iter(pieces)
    arrays, piece = [], np.zeros(0, np.uint8)
    for array in like:
        if not piece.size and array.nbytes:
            piece = next(coming)
        arrays.append(piece[: array.nbytes].view(array.dtype).reshape(array.shape))
        piece = piece[array.nbytes :]
    return arrays


# ---------------------------------------------------------------------- through a parameter server


class ServerExchange:
    """A `GradientExchange` over a client of a parameter server. Gradients of all nodes weigh the same, whatever their
    samples.

    version: of the run's parameters that training begins with; the same on all nodes.  name: of this node.
    meetings: how many pushes of a key of its own it takes until a worker has heard of all (of "bounded:s=3" five): they
    come first, so that nobody leaves, for want of data, before all are there.
    timeout_seconds: how long an answer may take; then CollectiveTimeout is raised.
    """

    gives_weights = True

    def __init__(
        self,
        opener: GradientAccess,
        model: ModelSpec,
        version: Version,
        name: str,
        *,
        meetings: int = 0,
        timeout_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._opener, self._model, self._name = opener, model, name
        self._keys = [f"{version}/{leaf.path}" for leaf in model]
        self._meeting, self._meetings = f"{version}", meetings
        self._client: ParameterClient | None = None
        self._reads_only = False
        self._pending: list[tuple[Array, list[ParameterRequest[Any]]]] = []
        self._sent = self._received = 0

    @property
    def names(self) -> tuple[str, ...]:
        """See GradientExchange: nobody else is known here."""
        return (self._name,)

    @property
    def rank(self) -> int:
        return 0

    def agree(self, samples: int, over: bool) -> Turn:
        """See GradientExchange: each goes its own way; the server keeps them together."""
        self._open(reads_only=not samples)
        return Turn(samples, over)

    def begin(self, leaves: Sequence[int], values: Array) -> None:
        """See GradientExchange: each leaf's gradient leaves for its broker, whose weights come back."""
        weights = np.empty_like(values)
        answers, start = list[ParameterRequest[Any]](), 0
        for leaf in leaves:
            spec = self._model[leaf]
            part = slice(start, start + spec.values)
            start = part.stop
            if spec.values:
                into = weights[part].reshape(spec.shape)
                answers.append(self._here.ipush_pull(self._keys[leaf], values[part].reshape(spec.shape), into=into))
        self._pending.append((weights, answers))

    def finish(self) -> list[Array]:
        """See GradientExchange: the new weights."""
        pending, self._pending = self._pending, []
        for _, answers in pending:
            for answer in answers:
                answer.wait(self.timeout_seconds)
        return [weights for weights, _ in pending]

    def align(self, step: int, state: Callable[[], Sequence[Array]]) -> tuple[int, Sequence[Array] | None]:
        """See GradientExchange: the weights that the server has; before the first step, those of the first worker."""
        if self._client is None:
            self._open(reads_only=False)
        own = [np.asarray(leaf, np.float32) for leaf in state()]
        tree = {key: leaf for key, leaf in zip(self._keys, own, strict=True) if leaf.size}
        ask = self._here.init_all if step < 0 else self._here.pull_all
        there = ask(tree, timeout_seconds=self.timeout_seconds)
        if step < 0:
            self._meet()
        return max(step, 0), [there.get(key, leaf) for key, leaf in zip(self._keys, own, strict=True)]

    def _meet(self) -> None:
        nothing = np.zeros(1, np.float32)
        self._here.init_all({self._meeting: nothing}, timeout_seconds=self.timeout_seconds)
        for _ in range(self._meetings):
            self._here.ipush_pull(self._meeting, nothing).wait(self.timeout_seconds)

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(numbers)]

    def recover(self, lost: PeerLost) -> None:
        """See GradientExchange: without a broker its layers are lost, and nobody can go on."""
        raise PeerLost(
            lost.peer,
            f"{lost.why}. The weights of its layers are gone with it: start the brokers again, and then the nodes; "
            "they begin with the run's parameters",
            lost.rank,
        ) from lost

    def traffic(self) -> tuple[int, int]:
        figures = None if self._client is None else self._client.statistics()
        sent, received = (0, 0) if figures is None else (figures.bytes_sent, figures.bytes_received)
        return self._sent + sent, self._received + received

    def close(self) -> None:
        if self._client is not None:
            self._sent, self._received = self.traffic()
            client, self._client = self._client, None
            client.close()

    @property
    def _here(self) -> ParameterClient:
        if self._client is None:
            raise LocalProtocolError(f"{self._name} has left the parameter server")
        return self._client

    def _open(self, *, reads_only: bool) -> None:
        """Become a worker, or only a reader.

        The new one is there before the old one leaves: a server without clients would wait for all workers again.
        """
        if self._client is None or self._reads_only is not reads_only:
            client = self._opener.open_client(reads_only)
            self.close()
            self._client, self._reads_only = client, reads_only


# ---------------------------------------------------------------------- opening


def read_exchange(text: str) -> Synchronous | None:
    """Return what `--exchange` names, None for "hub". Raises ConfigError for what there is not, whatever part it is."""
    try:
        choice = synchronous_from_spec(text)
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


def check_shards(choice: Synchronous | None, settings: RunSettings) -> None:
    """Raise ConfigError if the run does not have the brokers that were asked for."""
    shards = max(1, settings.shards)  # 0: not decided, and one then
    if isinstance(choice, Server) and choice.shards not in (0, shards):
        raise ConfigError(
            f"--shards {choice.shards} was asked for, and this run has {shards}: start its brokers with "
            f"--shard 0/{choice.shards} to {choice.shards - 1}/{choice.shards}, or leave --shards out"
        )


def unit_wait_seconds(settings: RunSettings) -> float:
    """Return how long a synchronous node waits for a data unit before it takes part in a step without one.

    In strict mode as long as a broker can be silent: whether a unit came in time must not depend on time.
    """
    return settings.lost_seconds if settings.mode == "strict" else UNIT_WAIT_SECONDS


@dataclass(frozen=True)
class GradientAccess:
    """A node's way to the others of its run, to exchange gradients: a `GradientOpener`.

    credentials: the broker's public key and this node's pair, None where there are none.
    """

    choice: Synchronous
    node: Node | ShardedNode
    credentials: Credentials = (None, None)

    def open(self, model: ModelSpec, version: Version) -> GradientExchange:
        """Return the exchange with the others; waits for them.

        model, version: of the run's parameters.
        Raises ConfigError if the run does not have the brokers that were asked for; what opening a communicator or a
        client of the parameter server raises.
        """
        choice, node = self.choice, self.node
        if isinstance(choice, Allreduce):
            return self._open_allreduce(choice)
        check_shards(choice, node.settings)
        staleness = consistency_from_spec(choice.consistency).staleness
        meetings = 0 if staleness is None else staleness + 2
        return ServerExchange(
            self, model, version, node.name, meetings=meetings, timeout_seconds=choice.timeout_seconds
        )

    def _open_allreduce(self, choice: Allreduce) -> AllreduceExchange:
        node = self.node
        size = choice.size or node.settings.start_nodes
        if size == 1:
            logger.warning(
                "%s trains synchronously with nobody: a synchronous run has the nodes that it begins with. Start the "
                "broker with --start-nodes, or say --exchange allreduce:size=4",
                node.name,
            )
        try:
            group = Communicator.create(
                node.address,
                size,
                group=f"{node.run} gradients",
                name=node.name,
                server_key=self.credentials[0],
                keys=self.credentials[1],
                timeout_seconds=MEET_SECONDS,
            )
        except JoinRefused as refused:
            raise JoinRefused(
                f"{refused}. A synchronous run keeps the {size} nodes that it began with: for more, start a new run, "
                "its broker with --start-nodes",
                refused.reason,
            ) from refused
        logger.info("%s is rank %d of %d: %s", node.name, group.rank, size, ", ".join(group.names))
        return AllreduceExchange(
            group, choice.algorithm, codec=choice.codec or None, timeout_seconds=choice.timeout_seconds
        )

    def open_client(self, reads_only: bool) -> ParameterClient:
        """Return a client of the parameter server; others do not wait for one that only reads."""
        assert isinstance(self.choice, Server)
        return ParameterClient.connect(
            self.node.address,
            name=self.node.name,
            server_key=self.credentials[0],
            keys=self.credentials[1],
            consistency=self.choice.consistency,
            optimizer=self.choice.optimizer,
            workers=self.choice.workers or self.node.settings.start_nodes,
            reads_only=reads_only,
        )
