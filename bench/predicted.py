"""Check the simulator against reality: the same run on real sockets and simulated, rule by rule.

A real run is `learning.py`'s: four node processes and a broker process on 127.0.0.1, a step paced to a fixed time. The
simulated one has the same settings, data units, program and step time (and a millisecond's noise), on wires that cost
next to nothing.

Columns: real, sim: held-out loss at the end, mean and deviation over the seeds.  gap_%: of the means.  z: the gap over
the deviation that the difference of two such means has.  curve_gap_%: the largest gap of a real score
on the way from the simulated one after as many samples, but for the first fifth, where the loss falls too fast.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain import RunSettings
from zmqtrain.core.settings import FIXED
from zmqtrain.sim import Scenario, SimNode, simulate
from zmqtrain.transport.memory import LinkModel

from learning import SHARED_DATA, Bench, Curve
from learning_tasks import BEST_RATE, Method, Task, default_tasks
from report import print_table, write_json

__all__ = ["RULES", "measure", "main"]

NODES = 4
RULES = {"quorum": "quorum", "immediately": "immediately", "timed": "time:seconds=0.2"}
EVALUATE_SECONDS, CURVE_SECONDS = 1.5, 0.3
"""How often a real run is scored, which costs its nodes time, and a simulated one, which costs none."""
LOOPBACK = LinkModel(1e10, 0.0002)
LEFT_OUT = 0.2
NOISE = ((0.0, 0.001, 1.0),)
"""Steps of real PCs are not all of one length. If they were, all nodes would offer every 0.2 s sharp, just when a round
of 0.2 s closes, and many offers would be put off."""


def measure(bench: Bench, task: Task, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Run and simulate once for each seed under one rule; return the row."""
    method = Method(name=name, settings=RunSettings(**FIXED | {"outer": "sgd:rate=1", "release": RULES[name]}))
    rate = BEST_RATE[task.name, "k=8 ternary"]
    real, simulated = [], []
    real_curves, sim_curves = [], []
    for seed in seeds:
        real.append(bench.train(task, method, rate, seed, EVALUATE_SECONDS))
        real_curves.append(bench.curve)
        scores, curve = predict(task, method, rate, seed, real[-1]["steps"] / task.steps)
        simulated.append(scores)
        sim_curves.append(curve)
        print(f"{name}, seed {seed}: real {real[-1]['loss']:.4f}, simulated {simulated[-1]:.4f}", flush=True)
    losses = [run["loss"] for run in real]
    gap = statistics.fmean(losses) - statistics.fmean(simulated)
    deviation = math.hypot(_deviation(losses), _deviation(simulated)) / math.sqrt(len(seeds))
    return {
        "rule": name,
        "seeds": len(seeds),
        "real": statistics.fmean(losses),
        "real_sd": _deviation(losses),
        "sim": statistics.fmean(simulated),
        "sim_sd": _deviation(simulated),
        "gap_%": 100 * gap / statistics.fmean(simulated),
        "z": gap / deviation if deviation else None,
        "curve_gap_%": curve_gap(real_curves, sim_curves),
        "real_aggregates": statistics.fmean(run["aggregates"] for run in real),
    }


def predict(task: Task, method: Method, rate: float, seed: int, share: float) -> tuple[float, Curve]:
    """Simulate a run; return the held-out loss at its end and the curve. share: of the steps of the task."""
    assert method.settings is not None
    settings = task.complete(method.settings, rate, seed, NODES, "default")
    step_seconds = task.step_milliseconds / 1e3
    nodes = tuple(SimNode(name=f"node-{n}", step_seconds=step_seconds, straggler=NOISE) for n in range(NODES))
    scenario = Scenario(settings=settings, nodes=nodes, link=LOOPBACK, evaluate_seconds=CURVE_SECONDS)
    result = simulate(scenario, program=task.make(rate, seed))
    return result.scores["loss"], [(one["samples"], one["loss"]) for one in result.of_kind("evaluation")]


def curve_gap(real: Sequence[Curve], simulated: Sequence[Curve]) -> float | None:
    """Return the largest gap, in percent, of a real score from its seed's simulated curve; None without points.

    Both are read against the share of a run's samples that have landed, not against seconds: those of a busy machine
    are its own.
    """
    gaps = []
    for of_real, of_sim in zip(real, simulated, strict=True):
        samples, losses = np.array(of_sim, dtype=float).T
        total = of_real[-1][0] if of_real else 0.0
        for landed, loss in of_real:
            if total and landed / total >= LEFT_OUT:
                gaps.append(abs(loss / np.interp(landed / total, samples / samples[-1], losses) - 1))
    return float(100 * max(gaps)) if gaps else None


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    """Read the command line, measure, print the table."""
    text = SHARED_DATA / "tinyshakespeare" / "input.txt"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--seeds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=512, help="of one node (default %(default)s)")
    parser.add_argument("--text", default=str(text) if text.is_file() else "stdlib", help="a file, or stdlib")
    parser.add_argument("--json", type=Path, help="write the table here too")
    options = parser.parse_args()
    task = replace(default_tasks(options.text, "digits")[0], steps=options.steps)
    with Bench(NODES, "default") as bench:
        rows = [measure(bench, task, name, range(options.seeds)) for name in options.rules]
    print_table(rows, f"real sockets against the simulator: {task.steps} steps of {NODES} nodes, {task.source}")
    if options.json is not None:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
