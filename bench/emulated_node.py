"""Be a node whose accelerator is emulated: a step is a sleep and a small move of one matrix; tell what it used and did.

Rule 1: the training thread is the product's: `DelayedSync` and what `connect` gives; only the step is made up.
Rule 2: what is measured begins once every function is compiled and aggregates have been applied for a while.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any, Protocol

from children import commands, difference, median_sleep, resident_bytes, say, thread_seconds
from shapes import model_shapes

__all__ = ["Measured", "EmulatedNode", "be_node"]

BASELINE_STEPS = 30
EXCHANGES_TIMED = 12
LOOK_SECONDS = 0.05
"""A node that waits to be told of an aggregate looks for itself so often."""


class Measured(Protocol):
    """What a node must know of the case that it is a node of: as in `efficiency.Case`."""

    @property
    def params(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def serial(self) -> bool: ...
    @property
    def settle_seconds(self) -> float: ...
    @property
    def warm(self) -> int: ...
    def step_seconds(self, node: int) -> float: ...


class EmulatedNode:
    """A node's training thread: a model, the emulated step, and the loop around them."""

    def __init__(self, case: Measured, number: int) -> None:
        import jax
        import numpy as np

        self.jax, self.case, self.seconds = jax, case, case.step_seconds(number)
        self.random = np.random.default_rng(number)
        self.params = _make_model(case.params, np.random.default_rng(0))
        self.count = sum(leaf.size for leaf in self.params.values())
        self.params = {name: jax.numpy.array(leaf) for name, leaf in self.params.items()}
        self.matrices = [name for name, leaf in self.params.items() if leaf.ndim == 2 and name != "embedding"]
        shapes = {self.params[name].shape for name in self.matrices}
        self.patterns = {shape: jax.random.normal(jax.random.key(number), shape) for shape in shapes}
        self.move = jax.jit(lambda leaf, pattern, size: (leaf + size * pattern, size), donate_argnums=0)
        self.moved = 0
        self.loss: Any = None
        for _ in self.matrices:
            self.step_alone(0.0)

    def step_alone(self, seconds: float | None = None) -> None:
        """Take the emulated step (of so many seconds, if not its usual), and wait until the step before it is done."""
        previous = self.loss
        time.sleep(self.seconds if seconds is None else seconds)
        name = self.matrices[self.moved % len(self.matrices)]
        self.moved += 1
        leaf = self.params[name]
        self.params[name], self.loss = self.move(leaf, self.patterns[leaf.shape], 1e-3 * self.random.standard_normal())
        if previous is not None:
            previous.block_until_ready()

    def step(self) -> None:
        """Take the emulated step and mark its boundary."""
        if self.case.serial:
            self.jax.block_until_ready(self.params)
        self.step_alone()
        self.params = self.sync.step(self.params, score=self.loss)

    def baseline(self, start: float) -> dict[str, float]:
        """Measure the seconds of a step that only sleeps, and of a whole one without an exchange (medians), and the CPU
        seconds of the latter (mean)."""
        steps = min(BASELINE_STEPS, self.case.steps)
        time.sleep(max(0.0, start - time.monotonic()))
        slept, used = median_sleep(self.seconds, steps), time.process_time()
        marks = [time.perf_counter()]
        for _ in range(steps):
            self.step_alone()
            marks.append(time.perf_counter())
        step_cpu = (time.process_time() - used) / steps
        whole = statistics.median(after - before for before, after in pairwise(marks))
        return {"params": self.count, "sleep_seconds": slept, "step_seconds": whole, "step_cpu_seconds": step_cpu}

    def join(self, address: str, number: int) -> None:
        """Join the run, and train until every function is compiled and the exchange runs as it will; a plan of the
        broker's has settled after `settle_seconds`."""
        from zmqtrain.node.connect import connect
        from zmqtrain.train.sync import DelayedSync

        self.exchange = connect(address, f"pc-{number}")
        self.sync = DelayedSync(self.exchange, self.params, donate=True)
        self.params, settled = self.sync.params, time.monotonic() + self.case.settle_seconds
        while self.applied < self.case.warm * self.case.parts or time.monotonic() < settled:
            self.step()

    def figures(self) -> dict[str, Any]:
        """Return what has been used and done so far."""
        done = self.sync.statistics()
        return {
            "steps": done.steps,
            "seconds": time.monotonic(),
            "exchanges": done.aggregates_applied,
            "offers": done.offers,
            "offers_refused": done.offers_refused,
            "held_seconds": done.held_seconds,
            "bytes_sent": done.bytes_sent,
            "bytes_received": done.bytes_received,
            "encode_seconds": done.encode_seconds,
            "decode_seconds": done.decode_seconds,
            "cpu_seconds": time.process_time(),
            "threads": thread_seconds(),
            "grown_bytes": resident_bytes(),
        }

    def window(self, start: float, end: float) -> dict[str, Any]:
        """Train until `end`, and until an aggregate has come; return what was used and done, from the first step
        boundary after `start` on."""
        while time.monotonic() < start:
            self.step()
        before, ends = self.figures(), [time.perf_counter()]
        while time.monotonic() < (start + end) / 2:
            self.step()
            ends.append(time.perf_counter())
        half = resident_bytes()
        while time.monotonic() < end or self.applied <= before["exchanges"]:
            self.step()
            ends.append(time.perf_counter())
        after, steps = self.figures(), sorted(end - begin for begin, end in pairwise(ends))
        schedule = self.exchange.schedule()
        at_the_end = {
            "every": schedule.every,
            "delay": schedule.delay,
            "age_steps": self.sync.statistics().age_steps,
            "rss_bytes": after["grown_bytes"],
            "rss_half_bytes": half,
            "p99_over_median": steps[int(0.99 * (len(steps) - 1))] / statistics.median(steps),
        }
        return difference(before, after) | at_the_end

    def exchanges(self, start: float) -> dict[str, Any]:
        """Exchange as fast as can be, with nothing else to do; return the seconds that each whole model took, and what
        all of them have cost, by thread."""
        time.sleep(max(0.0, start - time.monotonic()))
        seconds, before, used = [], self.applied, thread_seconds()
        for _ in range(EXCHANGES_TIMED):
            began, applied = time.perf_counter(), self.applied
            while self.applied < applied + self.case.parts:
                if self.exchange.wait(self._has_something, LOOK_SECONDS):
                    self.params = self.sync.step(self.params, score=self.loss)
            self.jax.block_until_ready(self.params)
            seconds.append(time.perf_counter() - began)
        used, alone = difference(used, thread_seconds()), self.applied - before
        return {"exchange_seconds": seconds[2:], "alone": {name: spent / alone for name, spent in used.items()}}

    def _has_something(self) -> bool:
        return bool(self.exchange.next_fragments()) or self.exchange.peek() is not None

    @property
    def applied(self) -> int:
        """How many aggregates were applied so far."""
        return int(self.sync.statistics().aggregates_applied)


def be_node(case: Measured, number: int) -> None:
    """Be a node in its namespace; do what it is told, and answer with what it measured."""
    told, node = commands(), EmulatedNode(case, number)
    say({"built": node.count})
    while True:
        if hasattr(node, "sync") and told.empty():
            node.step()
            continue
        match told.get():
            case ["baseline", start]:
                say(node.baseline(start))
            case ["join", address]:
                node.join(address, number)
                say({"joined": True})
            case ["window", start, end]:
                say(node.window(start, end))
            case ["exchanges", start]:
                say(node.exchanges(start))
            case ["end"]:
                node.exchange.close()
                say({"left": True})
                return


def _make_model(params: int, random: Any) -> dict[str, Any]:
    shapes = model_shapes(params)
    return {name: 0.02 * random.standard_normal(shape, dtype="float32") for name, shape in shapes.items()}
