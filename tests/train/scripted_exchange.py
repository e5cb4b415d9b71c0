"""An exchange that does what the test says, with no network and no clock, and small trees of one value for it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tests.clocks import VirtualClock
from tests.fixed import fixed_run
from tests.stated import Stated
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import AggregateTimeout
from zmqtrain.core.types import ExchangeStatistics, Update

__all__ = ["ScriptedExchange", "tree", "value", "add", "run"]


@dataclass
class Offered:
    fragment: int
    u: np.ndarray
    samples: int
    steps: int
    scores: object
    dense: bool


class ScriptedExchange(Stated):
    """An Exchange whose hub is the test: `land` makes an aggregate of offers, and others' progress."""

    name = "pc-1"

    def __init__(self, anchor=None, **settings):
        settings = {"every": 2, "delay": 1, "lost_seconds": 0.1, "heartbeat_seconds": 0.05} | settings
        self.settings, self.clock = fixed_run(**settings), VirtualClock()
        self.anchor, self.version = anchor, 0
        self.offers, self.landing, self.reports, self.scores = {}, deque(), [], []
        self.on_the_way = set()
        self.refuse = 0
        self.lands_at_once = False
        self.while_waiting = lambda: None
        self.others_drained = lambda: True
        self.layout = self.founding = self.lent = None
        self.founded, self.compared, self.joined = anchor is not None, [], {}

    def join(self, model, leaves, *, score=math.nan, optimizer_state=()):
        self.layout, self.founding = Layout(model, self.settings.fragments), leaves
        self.score, self.optimizer_state, self.founded = score, optimizer_state, self.settings.initial != "own"
        return None if self.anchor is None else Update(self.version, {}, {}, anchor=self.anchor, **self.joined)

    def compare(self, score, *, declined=False):
        self.compared.append((score, declined) if declined else score)

    def lend(self, leaves, optimizer_state=()):
        self.wanted, self.lent = False, (leaves, optimizer_state)

    def next_fragments(self):
        if len(self.on_the_way) >= self.settings.offers_in_flight:
            return ()
        return (len(self.offers) % self.settings.fragments,)

    def offer(self, fragment, segments, counts, *, dense=False):
        if self.refuse:
            self.refuse -= 1
            return None
        sequence = len(self.offers)
        u = np.concatenate([np.array(segment) for segment in segments])
        self.offers[sequence] = Offered(fragment, u, *counts, dense)
        self.on_the_way.add(sequence)
        if self.lands_at_once:
            self.land(sequence)
        return sequence

    def land(self, *sequences, others=0.0, nodes=1):
        """Others' progress is `others` in every value; the mean is over `nodes`."""
        own, aggregate = {}, {}
        for f in sorted({self.offers[s].fragment for s in sequences}) or [0]:
            counts = self.layout.counts(f)
            u = sum((self.offers[s].u for s in sequences if self.offers[s].fragment == f), np.zeros(sum(counts)))
            ends = np.cumsum(counts)[:-1]
            aggregate[f] = np.split(((u + others) / nodes).astype(np.float32), ends)
            if sequences:
                own[f] = np.split(u.astype(np.float32), ends)
        self.version += 1
        self.landing.append(Update(self.version, aggregate, own, sequences))

    def withdraw(self, sequence):
        self.on_the_way.discard(sequence)

    def in_flight(self):
        return tuple(sorted(self.on_the_way))

    def peek(self):
        return self.landing[0] if self.landing else None

    def poll(self):
        if not self.landing:
            return None
        update = self.landing.popleft()
        self.on_the_way.difference_update(update.landed)
        return update

    def wait_update(self, timeout_seconds, sequence):
        self.while_waiting()
        update = self.poll()
        if update is None:
            raise AggregateTimeout("waited for the others")
        return update

    def everyone_drained(self, broker):
        return self.others_drained()

    def report(self, **figures):
        self.reports.append(figures)

    def report_scores(self, scores, version):
        self.scores.append((scores, version))

    def statistics(self):
        return ExchangeStatistics(self.version, 3, 10, 20, 0.5, 0.25, len(self.offers), 0, None)


def tree(value=0.0, dtype=jnp.float32):
    return {"b": jnp.full((2,), value, dtype), "w": jnp.full((2, 3), value, dtype)}


def value(params):
    """The one value that all of the tree has."""
    values = np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(params)])
    assert np.ptp(values) == 0, values
    return float(values[0])


def add(params, amount=1.0):
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(amount, leaf.dtype), params)


def run(sync, params, steps, amount=1.0):
    for _ in range(steps):
        params = sync.step(add(params, amount))
    return params
