"""Several processes in lockstep, as threads: their group is a table of arrays, their run what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.fixed import fixed_run
from tests.stated import Stated
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import PeerLost
from zmqtrain.core.types import ExchangeStatistics, Update
from zmqtrain.synchronous.exchanges import AllreduceExchange
from zmqtrain.train.gradients import GradientLoop, GradientOptions
from zmqtrain.train.step import LoopHooks

SAMPLES = 16
SECONDS = 60.0


class Regression:
    """A program of two layers whose gradients are all of one size; unit u holds two batches drawn from u."""

    name, sample_word, samples_per_batch, units_per_epoch = "regression", "rows", SAMPLES, None

    def init(self, seed):
        first, second = jax.random.split(jax.random.PRNGKey(seed))
        return {"a": {"w": 0.5 * jax.random.normal(first, (8, 6))}, "b": 0.5 * jax.random.normal(second, (6,))}

    def loss(self, params, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ params["a"]["w"]) @ params["b"] - y) ** 2)

    def optimizer(self):
        return optax.adam(0.02)

    def batches(self, unit):
        random = np.random.default_rng(unit)
        for _ in range(2):
            x = random.normal(size=(SAMPLES, 8)).astype(np.float32)
            yield x, np.sin(x.sum(1)).astype(np.float32)

    def evaluate(self, params):
        return {"loss": float(self.loss(params, next(self.batches(1000))))}


REGRESSION = Regression()
"""One for all processes: it is compiled once."""


class Table:
    """Where the ranks of one group lay their arrays. lose(rank): from now on, for all calls of all ranks."""

    def __init__(self, names):
        self.names, self.changed, self.laid = tuple(names), threading.Condition(), {}
        self.lost = None
        self.after: Table | None = None

    def exchange(self, rank, number, array):
        """Return all ranks' arrays of the call of that number, once they are there."""
        with self.changed:
            self.laid.setdefault(number, {})[rank] = array
            self.changed.notify_all()
            here = self.laid[number]
            came = self.changed.wait_for(lambda: len(here) == len(self.names) or self.lost is not None, SECONDS)
            assert came, f"{self.names[rank]} waits in call {number}: {sorted(here)} are there"
            if len(here) < len(self.names):
                raise PeerLost(self.names[self.lost], "killed", self.lost)
            return [here[one] for one in range(len(self.names))]

    def lose(self, rank):
        with self.changed:
            if self.lost is None:
                self.after = Table([name for one, name in enumerate(self.names) if one != rank])
                self.lost = rank  # the last: who sees it, without waiting, goes on with what is after
                self.changed.notify_all()


class Request:
    def __init__(self, wait):
        self.wait = lambda timeout_seconds=None: wait()


class MemoryGroup:
    """One rank's view of a table. before: called with the number of each call; it may raise."""

    def __init__(self, table, rank, before: Callable[[int], None] = lambda number: None):
        self.table, self.rank, self.before, self.number = table, rank, before, 0
        self.bytes = 0

    @property
    def names(self):
        return self.table.names

    def iallreduce(self, values, op="sum", *, algorithm="auto", codec=None):
        number, self.number = self.number, self.number + 1
        self.bytes += values.nbytes
        self.before(number)
        if self.table.lost is not None:
            raise PeerLost(self.names[self.table.lost], "killed", self.table.lost)
        mine = np.array(values)
        with self.table.changed:
            self.table.laid.setdefault(number, {})[self.rank] = mine
            self.table.changed.notify_all()
        return Request(lambda: sum(self.table.exchange(self.rank, number, mine)))

    def allreduce(self, values, op="sum", *, timeout_seconds=None):
        return self.iallreduce(values, op).wait()

    def broadcast(self, values, root=0, *, timeout_seconds=None):
        number, self.number = self.number, self.number + 1
        self.before(number)
        return self.table.exchange(self.rank, number, np.array(values))[root].copy()

    def shrink(self, timeout_seconds=None):
        table = self.table.after
        return MemoryGroup(table, table.names.index(self.names[self.rank]), self.before)

    def statistics(self):
        return SimpleNamespace(bytes_sent=self.bytes, bytes_received=self.bytes)

    def close(self, timeout_seconds=None):
        self.table.lose(self.rank)


class Run(Stated):
    """One node's side of its run: it founds it, and what it offers at the end lands at once."""

    clock = time

    def __init__(self, name, **settings):
        self.name, self.settings = name, fixed_run(**{"evaluate_seconds": 0.0, "initial": "founder"} | settings)
        self.offers, self.landing, self.reports, self.scores, self.version = [], [], [], [], 0

    def join(self, model, leaves, *, score=0.0, optimizer_state=()):
        self.layout = Layout(model, self.settings.fragments)
        return None

    def next_fragments(self):
        return (0,)

    def offer(self, fragment, segments, counts, *, dense=False):
        u = [np.array(segment) for segment in segments]
        self.offers.append((u, counts.samples, counts.steps, dense))
        self.version += 1
        self.landing.append(Update(self.version, {fragment: u}, {fragment: u}, (len(self.offers) - 1,)))
        return len(self.offers) - 1

    def in_flight(self):
        return ()

    def peek(self):
        return self.landing[0] if self.landing else None

    def poll(self):
        return self.landing.pop(0) if self.landing else None

    def everyone_drained(self, broker):
        return True

    def report(self, **figures):
        self.reports.append(figures)

    def report_scores(self, scores, version):
        self.scores.append((scores, version))

    def statistics(self):
        return ExchangeStatistics(self.version, 1, 0, 0, 0.0, 0.0, len(self.offers), 0, None)


class Ended(Exception):
    """Raised in a process that a test kills."""


class Process(threading.Thread):
    """One process that trains: a loop, its run and its group, in a thread."""

    def __init__(self, name, group, batches, *, program=None, settings=None, algorithm="auto", **options):
        super().__init__(name=name, daemon=True)
        self.run_of, self.group = Run(name, **settings or {}), group
        self.exchange = AllreduceExchange(group, algorithm)
        self.batches = batches
        self.result = self.failure = None
        hooks = LoopHooks(**{name: options.pop(name) for name in ("stop", "watch", "before_step") if name in options})
        options = GradientOptions(**options)
        self.loop = GradientLoop(program or REGRESSION, self.run_of, self, options, hooks)

    def open(self, model, version):
        return self.exchange

    def run(self):
        try:
            self.result = self.loop.run(self.batches)
        except BaseException as failure:
            self.failure = failure

    def params(self):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.result.params)]


def finish(processes, failing=()):
    """Let them train to the end; return those that did, in their order."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        assert not process.is_alive(), f"{process.name} does not end"
        if process.failure is not None and process.name not in failing:
            raise process.failure
    return [process for process in processes if process.failure is None]


def group_of(count, before=None):
    """Return the groups of `count` ranks; before: by rank what is called before each of its collectives."""
    table = Table([f"pc-{rank + 1}" for rank in range(count)])
    return [MemoryGroup(table, rank, (before or {}).get(rank, lambda number: None)) for rank in range(count)]


def batches_of(units, program=None):
    program = program or REGRESSION
    return (batch for unit in units for batch in program.batches(unit))
