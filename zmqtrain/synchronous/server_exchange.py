"""Be a `GradientExchange` through a parameter server: every leaf's gradient goes to its master, which steps it.

Rule 1: a leaf is a key; what it is called says which version of the run's parameters it began with, so that no run goes
on from the weights of another.
Rule 2: a worker without data is no worker: it leaves, so that nobody waits for its gradients, and comes again with the
next batch. So no step is ever made of gradients that are zero.
Rule 3: who ends takes the weights once more: when the run has no more data, all that was pushed is in them, and they
are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from zmqtrain.core.errors import LocalProtocolError, PeerLost
from zmqtrain.core.types import Array, ModelSpec, Turn, Version

WAIT_SECONDS = 600.0
"""How long an answer may take: with "bsp" and "bounded" it waits for the other workers."""


class Answer(Protocol):
    """What was asked of the server, and is not waited for yet: a `ParameterRequest`."""

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Return the values."""


class Client(Protocol):
    """What is needed of a `zmqtrain.ParameterClient`."""

    name: str

    def init_all(self, tree: Any, *, timeout_seconds: float | None = None) -> Any:
        """Begin keys with these values, unless they are there; return what is there now."""

    def pull_all(self, tree: Any, *, timeout_seconds: float | None = None) -> Any:
        """Return the keys' values."""

    def ipush_pull(self, key: str, gradient: Any, *, into: Any = None) -> Answer:
        """Give the server a gradient; what is waited for are the values that hold it."""

    def statistics(self) -> Any:
        """Return its figures: bytes_sent, bytes_received."""

    def close(self) -> None:
        """Leave the server."""


class ServerExchange:
    """A `GradientExchange` over a client of a parameter server.

    connect(reads_only): makes a client; one that only reads is nobody whom others wait for.  model: the parameters.
    version: of the run's parameters that training begins with; the same on all nodes.  name: of this node.
    meetings: how many pushes of a key of its own it takes until a worker has heard of all (of "bounded:s=3" five): they
    come first, so that nobody leaves, for want of data, before all are there.
    timeout_seconds: how long an answer may take; then CollectiveTimeout is raised.

    Samples do not weigh here: a master knows gradients, and each node's counts alike.
    """

    gives_weights = True

    def __init__(
        self,
        connect: Callable[[bool], Client],
        model: ModelSpec,
        version: Version,
        name: str,
        *,
        meetings: int = 0,
        timeout_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._connect, self._model, self._name = connect, model, name
        self._keys = [f"{version}/{leaf.path}" for leaf in model]
        self._meeting, self._meetings = f"{version}", meetings
        self._client: Client | None = None
        self._reads_only = False
        self._pending: list[tuple[Array, list[Answer]]] = []
        self._sent = self._received = 0

    @property
    def names(self) -> tuple[str, ...]:
        """See GradientExchange: nobody else is known here."""
        return (self._name,)

    @property
    def rank(self) -> int:
        """See GradientExchange."""
        return 0

    def agree(self, samples: int, over: bool) -> Turn:
        """See GradientExchange: each goes its own way; the server keeps them together."""
        self._open(reads_only=not samples)
        return Turn(samples, over)

    def begin(self, leaves: Sequence[int], values: Array) -> None:
        """See GradientExchange: each leaf's gradient leaves for its master, whose weights come back."""
        weights = np.empty_like(values)
        answers, start = list[Answer](), 0
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
        """See GradientExchange: the weights that the server has; before the first step, those of whoever came first."""
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
        """See GradientExchange."""
        return [tuple(numbers)]

    def recover(self, lost: PeerLost) -> None:
        """See GradientExchange: without a master its layers are lost, and nobody can go on."""
        raise PeerLost(
            lost.peer,
            f"{lost.why}. The weights of its layers are gone with it: start the brokers again, and then the nodes; "
            "they begin with the run's parameters",
            lost.rank,
        ) from lost

    def traffic(self) -> tuple[int, int]:
        """See GradientExchange."""
        figures = None if self._client is None else self._client.statistics()
        sent, received = (0, 0) if figures is None else (figures.bytes_sent, figures.bytes_received)
        return self._sent + sent, self._received + received

    def close(self) -> None:
        """See GradientExchange."""
        if self._client is not None:
            self._sent, self._received = self.traffic()
            client, self._client = self._client, None
            client.close()

    @property
    def _here(self) -> Client:
        if self._client is None:
            raise LocalProtocolError(f"{self._name} has left the parameter server")
        return self._client

    def _open(self, *, reads_only: bool) -> None:
        """Be a worker, or only a reader, from now on.

        The new one is there before the old one leaves: a server without clients would wait for all workers again.
        """
        if self._client is None or self._reads_only is not reads_only:
            client = self._connect(reads_only)
            self.close()
            self._client, self._reads_only = client, reads_only
