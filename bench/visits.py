"""Open, use and close each public thing of the package, and say what was left of it.

Rule 1: each visit is a function that gives back all it takes; `visit_all` counts threads, tasks and file descriptors
around it.  Rule 2: what a visit connects to and does not open itself is at the two addresses that it is given: of a
broker, and of the first of the two brokers of a run (`Shards`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zmqtrain as zt
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.broker.standby import ShardPlace
from zmqtrain.core.settings import RunSettings
from zmqtrain.synchronous.exchanges import GradientAccess, read_exchange, unit_wait_seconds

from vitals import count_left

__all__ = ["VISITS", "Shards", "visit_all"]

ANYWHERE = "tcp://127.0.0.1:0"
SETTINGS = {"every": 1, "delay": 1, "evaluate_seconds": 0.0, "initial": "founder"}
WAIT_SECONDS = 30.0


class Shards:
    """The two brokers of a run.  They are connected with each other, anew whenever that line is lost: who counts
    strictly what a visit leaves has them in another process."""

    def __init__(self) -> None:
        first = BrokerThread(ANYWHERE, RunSettings.from_dict(SETTINGS | {"shards": 2}))
        place = ShardPlace(shard=1, shards=2, first=first.address, wait_seconds=WAIT_SECONDS)
        self._brokers = [first, BrokerThread(ANYWHERE, None, place=place)]

    @property
    def first(self) -> str:
        """The address of the first of the brokers."""
        return self._brokers[0].address

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for broker in reversed(self._brokers):
            broker.stop()


class Regression:
    """The least program: a linear regression of 40 values on 8, one batch a unit."""

    name, sample_word, samples_per_batch, units_per_epoch = "regression", "rows", 16, None

    def init(self, seed: int) -> dict[str, jax.Array]:
        """Return the parameters."""
        return {"w": 0.1 * jax.random.normal(jax.random.key(seed), (40, 8)), "b": jnp.zeros(8)}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Return the loss of a batch, float32[16, 40], whose rows' sums are to be learnt."""
        return jnp.mean((batch @ params["w"] + params["b"] - batch.sum(1, keepdims=True)) ** 2)

    def optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer."""
        return optax.sgd(0.01)

    def batches(self, unit: int) -> Iterator[np.ndarray[Any, Any]]:
        """Give the batches of a unit."""
        yield np.random.default_rng(unit).normal(size=(16, 40)).astype(np.float32)

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return the scores on held-out data."""
        return {"loss": float(self.loss(params, next(self.batches(1 << 30))))}


REGRESSION = Regression()


@contextlib.contextmanager
def _broker(**settings: Any) -> Iterator[str]:
    run = RunSettings.from_dict(SETTINGS | settings)
    with tempfile.TemporaryDirectory() as folder, BrokerThread(ANYWHERE, run, checkpoint=Path(folder)) as broker:
        yield broker.address


def _broker_alone(address: str, shards: str) -> None:
    with _broker():
        pass


def _train(address: str) -> None:
    with zt.connect(address, "visitor") as node:
        sync = zt.DelayedSync(node, REGRESSION.init(0))
        params = sync.params
        while sync.statistics().aggregates_applied < 2:
            params = sync.step(jax.tree.map(lambda leaf: leaf + 0.01, params), samples=1)


def _node(address: str, shards: str) -> None:
    with _broker() as own:
        _train(own)


def _shards_node(address: str, shards: str) -> None:
    _train(shards)


def _observer(address: str, shards: str) -> None:
    with zt.connect(address, "visitor", observer=True):
        pass


def _training_loop(address: str, shards: str) -> None:
    with _broker(units=2) as own, zt.connect(own, "visitor") as node:
        zt.TrainingLoop(REGRESSION, node).run(node.batches(REGRESSION))


def _gradient_loop(address: str, shards: str) -> None:
    choice = read_exchange("allreduce:size=1")
    assert choice is not None
    with _broker(units=2) as own, zt.connect(own, "visitor", exchange=choice.name) as node:
        batches = node.batches_as_they_come(REGRESSION, unit_wait_seconds(node.settings))
        zt.GradientLoop(REGRESSION, node, GradientAccess(choice, node)).run(batches)


def _communicator(address: str, shards: str) -> None:
    def take_part(rank: int) -> None:
        with zt.Communicator.create(address, 2, rank, group="visit", name=f"visitor-{rank}") as group:
            group.allreduce(np.full(100_000, rank, np.float32))
            group.barrier()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(take_part, rank) for rank in range(2)]:
            done.result(WAIT_SECONDS)


def _parameter_client(address: str, shards: str) -> None:
    with zt.ParameterClient.connect(address, name="visitor") as client:
        client.init("visited", np.zeros(1000, np.float32))
        client.push("visited", np.ones(1000, np.float32))
        client.pull("visited")


def _engine(address: str, shards: str) -> None:
    with zt.Engine(workers=2) as engine:
        number = engine.variable(1)
        engine.push(lambda: None, read=[number])
        engine.wait_all()


VISITS: dict[str, Callable[[str, str], None]] = {
    "broker": _broker_alone,
    "node": _node,
    "node of two brokers": _shards_node,
    "observer": _observer,
    "training loop": _training_loop,
    "gradient loop": _gradient_loop,
    "communicator": _communicator,
    "parameter client": _parameter_client,
    "engine": _engine,
}


def visit_all(address: str, shards: str) -> list[str]:
    """Make every visit; return what was left after each. address: of a broker.  brokers: of the first of two."""
    wrong = []
    for name, visit in VISITS.items():
        before = count_left()
        visit(address, shards)
        wrong += [f"after a {name}: {what}" for what in count_left(before).beyond(before)]
    return wrong
