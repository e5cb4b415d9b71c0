"""Real brokers and nodes on 127.0.0.1 for the tests beside this file: a broker (thread or process), a tiny model."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.broker.serve import BrokerThread
from zmqtrain.broker.standby import ShardPlace, StandbyPlace
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect
from zmqtrain.node.node import Node
from zmqtrain.train.sync import DelayedSync

TARGET = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
STEPS_PER_UNIT = 8
TRAINERS: WeakSet[Trainer] = WeakSet()
"""All that were begun: see conftest."""


def parameters(seed: int = 0) -> dict[str, jax.Array]:
    key = jax.random.PRNGKey(seed)
    return {"w": jax.random.normal(key, (40, 8)) * 0.1, "b": jnp.zeros(8)}


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - x @ TARGET) ** 2)


@jax.jit
def sgd(params, x):
    value, gradient = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient), value


def batches(unit: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(unit)
    for _ in range(STEPS_PER_UNIT):
        yield random.normal(size=(16, 40)).astype(np.float32)


class Trainer:
    """One node that trains the tiny model in a thread of its own.

    move: what becomes of its parameters in a step, given those before the step and those after it.
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        takes_units: bool = True,
        on_step: Callable[[Trainer], None] = lambda trainer: None,
        params: dict | None = None,
        keys: Path | None = None,
        move: Callable[[dict, dict], dict] = lambda before, after: after,
    ) -> None:
        self.keys, self.move = keys, move
        self.name, self.address, self.on_step = name, address, on_step
        self.takes_units = takes_units
        self.params = parameters() if params is None else params
        self.began_with: dict | None = None
        self.node: Node | None = None
        self.sync: DelayedSync | None = None
        self.steps = 0
        self.losses: list[float] = []
        self.failure: BaseException | None = None
        self.stop = threading.Event()
        self.stepped = threading.Condition()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        TRAINERS.add(self)
        self.thread.start()

    def _run(self) -> None:
        try:
            with connect(self.address, name=self.name, keys=self.keys) as self.node:
                with self.stepped:
                    self.stepped.notify_all()
                self._train(self.node)
        except BaseException as error:
            self.failure = error
        finally:
            with self.stepped:
                self.stepped.notify_all()

    def _train(self, node: Node) -> None:
        self.sync = DelayedSync(node, self.params)
        params = self.began_with = self.sync.params
        own = itertools.chain.from_iterable(map(batches, itertools.count()))
        for batch in node.batches(batches) if self.takes_units else own:
            after, value = sgd(params, batch)
            params = self.move(params, after)
            self.losses.append(float(value))
            params = self.sync.step(params, score=value, samples=16)
            self.steps += 1
            with self.stepped:
                self.stepped.notify_all()
            self.on_step(self)  # it may hold still for what somebody else has waited for this step to do
            if self.stop.is_set():
                break
        self.params = self.sync.finish(params)

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
        with self.stepped:
            came = self.stepped.wait_for(lambda: condition() or self.failure is not None, timeout_seconds)
        if self.failure is not None:
            raise self.failure
        assert came, f"{self.name} did not get there in {timeout_seconds:g} s: {self.statistics()}"

    def join(self, timeout_seconds: float = 60.0) -> dict[str, np.ndarray]:
        self.thread.join(timeout_seconds)
        assert not self.thread.is_alive(), f"{self.name} does not end: {self.statistics()}"
        if self.failure is not None:
            raise self.failure
        return {name: np.asarray(leaf) for name, leaf in self.params.items()}

    def statistics(self) -> object:
        return self.sync.statistics() if self.sync is not None else None


@contextlib.contextmanager
def broker(settings: RunSettings, **options) -> Iterator[BrokerThread]:
    thread = BrokerThread("tcp://127.0.0.1:0", settings, **options)
    with thread:
        yield thread


class BrokerProcess:
    """A broker that can be killed for real; with a place, another than the first of several brokers.

    file_bytes: no file can be longer until `free_disk`, as on a full disk.
    """

    def __init__(
        self,
        settings: RunSettings | None,
        checkpoint: Path | None,
        port: int = 0,
        place: ShardPlace | None = None,
        standby: StandbyPlace | None = None,
        every: str = "0.3s",
        keys: Path | None = None,
        file_bytes: int = resource.RLIM_INFINITY,
    ) -> None:
        program = (
            "import json, sys, logging, resource\n"
            "from pathlib import Path\n"
            "from zmqtrain.broker.standby import ShardPlace\n"
            "from zmqtrain.broker.serve import serve\n"
            "from zmqtrain.broker.standby import StandbyPlace\n"
            "from zmqtrain.core.settings import RunSettings\n"
            "from zmqtrain.transport.key_folder import KeyFolder\n"
            "settings, folder, port, place, standby, every, keys, file_bytes = json.loads(sys.argv[1])\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
            "logging.basicConfig(level=logging.INFO)\n"
            "def ready(broker): print(broker.channel.address, flush=True)\n"
            "def following(standby): print(standby.address, flush=True)\n"
            "serve(f'tcp://127.0.0.1:{port}', RunSettings(**settings) if settings else None, ready=ready,\n"
            "      place=ShardPlace(**place) if place else None, following=following,\n"
            "      standby=StandbyPlace(**standby) if standby else None, interrupted=lambda count: None,\n"
            "      checkpoint=Path(folder) if folder else None, checkpoint_every=every,\n"
            "      keys=KeyFolder(Path(keys)) if keys else None)\n"
        )
        run, where, follows = settings and settings.to_dict(), place and asdict(place), standby and asdict(standby)
        facts = json.dumps([
            run, str(checkpoint) if checkpoint else "", port, where, follows, every, str(keys) if keys else "",
            file_bytes,
        ])  # fmt: skip
        self.process = subprocess.Popen([sys.executable, "-c", program, facts], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the broker did not start"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def free_disk(self) -> None:
        """Let files grow again."""
        hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard, hard))

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def __enter__(self) -> BrokerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
