"""Measure what a run learns: real nodes and a real broker, against synchronous data parallel and one node alone.

    over_sync_% = 100 x (held-out loss / held-out loss of synchronous data parallel with the same samples - 1)

Rule 1: all methods share the initial parameters, the data units, the program and the held-out set of a seed.
`synchronous` takes one step with the mean gradient over the batches of all nodes, which is what DDP computes;
`one node` takes as many steps, with its own batches alone: a run must lie near the first, far below the second.
Rule 2: every method has a learning rate of its own, the best of `RATES` (`--tune` tries them all again, with seed 0).
Rule 3: every node is a process, and so is the broker, on 127.0.0.1; they run as a user's would, in the default mode, by
what the package offers anybody. A step takes `--step-milliseconds`, of which it computes some and sleeps the rest, as
where a GPU computes: else N nodes on a few cores would measure these cores. Where the cores are busy with other things,
`--mode strict` measures what k, d and the codec cost and no more: k is exact, nothing sleeps, a seed gives its bits.
Rule 4: a score is that of the shared parameters after `finish`; it must be the same on all nodes.

Columns: loss, sd: held-out, in nats, mean and deviation over the seeds.  over_sync_sd: of the seeds' own ratios.
steps: of one node (the mean).  steps_per_offer: k as it came out; more than k where offers were refused.  age_steps: of
an aggregate when it is applied, from its offer (median).  sent_mb, received_mb: 10^6 bytes of one node, with all that a
run costs: joining, heads, heartbeats, and the last exchange, which is dense.  compression: the bytes of synchronous
data parallel in float32 (4 bytes a parameter, each step, each way) over these.  seconds: of one run, joining included.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zmqtrain import Program, RunSettings, TrainingLoop, connect, load_program
from zmqtrain.broker.broker import Broker
from zmqtrain.broker.serve import serve
from zmqtrain.programs import parse_arguments
from zmqtrain.protocol.messages import Roster
from zmqtrain.train.step import LoopHooks, MinibatchStep

import codec_learning
from learning_tasks import BEST_RATE, METHODS, RATES, Method, Mode, Task, default_tasks, quick
from report import print_table, write_json

__all__ = ["SHARED_DATA", "Bench", "Curve", "measure", "main"]

HERE = "tcp://127.0.0.1:0"
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
NODES = 4
ANSWER_SECONDS = 600.0

Scores = dict[str, float]
Curve = list[tuple[float, float]]
"""The samples that had landed in the shared model when it was scored (to a second), and its held-out loss."""


# ---------------------------------------------------------------------- one process: the references


def train_here(task: Task, rate: float, seed: int, nodes: int) -> Scores:
    """Train in this process, each step on the batches of `nodes` nodes at once; return the scores."""
    program = task.make(rate, seed)
    local = MinibatchStep(program)
    state = local.init(seed)
    for batch in islice(_joined_batches(program, nodes), task.steps):
        state, _, _ = local.step(state, iter([batch]))
    return program.evaluate(state.params)


def _joined_batches(program: Program, nodes: int) -> Iterator[Any]:
    first = 0
    while True:
        for batches in zip(*(program.batches(first + node) for node in range(nodes)), strict=True):
            yield jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
        first += nodes


# ---------------------------------------------------------------------- many processes: a run


class Helper:
    """A process of this file that answers lines of JSON with lines of JSON: a node or a broker, run after run."""

    def __init__(self, role: str, cache: str) -> None:
        command = [sys.executable, __file__, "--role", role, "--cache", cache]
        self.role = role
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **job: Any) -> None:
        """Say what to do."""
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        """Return the next answer. Raises RuntimeError if the process has ended, or none came for ten minutes."""
        assert self._process.stdout is not None
        came, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        line = self._process.stdout.readline() if came else ""
        if not line:
            raise RuntimeError(f"the {self.role} of the bench gave no answer; what went wrong stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def train_apart(
    settings: RunSettings, step_seconds: float, broker: Helper, nodes: Sequence[Helper]
) -> tuple[Scores, Curve]:
    """Train in a run of its own, a node in each of the processes; return the scores and figures of one node, and the
    scores of the shared model while it went on, if they were asked for."""
    began = time.perf_counter()
    broker.tell(**settings.to_dict())
    address = broker.hear()["address"]
    for number, node in enumerate(nodes):
        node.tell(address=address, name=f"node-{number}", step_seconds=step_seconds)
    results = [node.hear() for node in nodes]
    hub = broker.hear()
    losses = [result["loss"] for result in results]
    if max(losses) - min(losses) > 1e-3 * max(losses):
        raise RuntimeError(f"the nodes ended with different parameters: their losses are {losses}")
    figures = {key: statistics.fmean(result[key] for result in results) for key in results[0]}
    return {**figures, "aggregates": hub["version"], "seconds": time.perf_counter() - began}, hub["curve"]


def be_node(job: dict[str, Any]) -> None:
    """Train in the run at an address until its data is done; say the scores and the figures."""
    with connect(job["address"], job["name"]) as node:
        settings = node.settings
        program = load_program(settings.program, parse_arguments(settings.program_arguments))
        result = TrainingLoop(program, node, LoopHooks(watch=pace(job["step_seconds"]))).run(node.batches(program))
    figures = result.statistics
    answer(
        {
            **result.scores,
            "steps": figures.steps,
            "steps_per_offer": figures.steps / max(1, figures.offers),
            "age_steps": figures.age_steps,
            "sent_mb": figures.bytes_sent / 1e6,
            "received_mb": figures.bytes_received / 1e6,
        }
    )


def be_broker(job: dict[str, Any]) -> None:
    """Serve a run with these settings until it is over; say the address, and at the end the version and the scores."""

    def say_address(broker: Broker) -> None:
        answer({"address": broker.channel.address})

    scores: dict[int, float] = {}
    samples: dict[int, int] = {0: 0}

    def note(roster: Roster) -> None:
        samples[roster.version] = roster.samples
        if "loss" in roster.scores:
            scores[roster.score_version] = roster.scores["loss"]

    version = serve(HERE, RunSettings.from_dict(job), ready=say_address, watch=note).version
    known = sorted(samples)
    landed = np.interp(sorted(scores), known, [samples[one] for one in known])
    answer(
        {"version": version, "curve": list(zip(landed.tolist(), (scores[one] for one in sorted(scores)), strict=True))}
    )


def pace(step_seconds: float) -> Callable[[int, Any], None]:
    """Return a watcher that lets no step begin sooner than `step_seconds` after the one before."""
    due = time.perf_counter()

    def watch(number: int, loss: Any) -> None:
        nonlocal due
        due = max(due + step_seconds, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))

    return watch


def answer(what: Mapping[str, Any]) -> None:
    """Say one line of JSON to the process that started this one."""
    print(json.dumps(what), flush=True)


# ---------------------------------------------------------------------- the table

LEARNED = ("task", "data", "method", "rate", "seeds", "loss", "sd", "over_sync_%", "over_sync_sd", "accuracy_%")
COST = (
    *("task", "method", "nodes", "mode", "k", "d", "steps", "steps_per_offer", "age_steps"),
    *("sent_mb", "received_mb", "compression", "seconds"),
)
"""The columns of the two tables that are printed; together they are those of the JSON."""


class Bench:
    """The processes of a bench, and what they measure. Use it in a with-block."""

    def __init__(self, nodes: int, mode: Mode) -> None:
        self.nodes, self.mode = nodes, mode
        self.curve: Curve = []
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        self._cache = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._broker = self._start("broker", "broker")
        self._helpers = [self._start("node", f"node-{number}") for number in range(self.nodes)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, role: str, name: str) -> Helper:
        helper = Helper(role, str(Path(self._cache, name)))
        self._stack.callback(helper.close)
        return helper

    def train(self, task: Task, method: Method, rate: float, seed: int, evaluate_seconds: float = 0.0) -> Scores:
        """Train once; return the scores, and of a run the figures of one node (`curve` then holds its scores)."""
        if method.settings is not None:
            settings = task.complete(method.settings, rate, seed, self.nodes, self.mode)
            settings = replace(settings, evaluate_seconds=evaluate_seconds)
            step_seconds = task.step_milliseconds / 1e3 if self.mode == "default" else 0.0
            scores, self.curve = train_apart(settings, step_seconds, self._broker, self._helpers)
            return scores
        began = time.perf_counter()
        scores = train_here(task, rate, seed, self.nodes if method.together else 1)
        return {**scores, "steps": task.steps, "seconds": time.perf_counter() - began}


def measure(bench: Bench, task: Task, methods: Sequence[Method], seeds: int) -> list[dict[str, Any]]:
    """Train `seeds` times with each method, at its own rate; return the rows of the table."""
    synchronous: list[float] = []
    rows = []
    for method in sorted(methods, key=lambda method: not method.together):  # the reference comes first
        rate = BEST_RATE[task.name, method.name]
        runs = []
        for seed in range(seeds):
            runs.append(bench.train(task, method, rate, seed))
            print(f"{task.name}, {method.name}, seed {seed}: {_in_words(runs[-1])}", file=sys.stderr, flush=True)
        losses = [run["loss"] for run in runs]
        synchronous = synchronous or losses
        over = [100 * (loss / reference - 1) for loss, reference in zip(losses, synchronous, strict=True)]
        means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        rows.append(
            {
                "task": task.name,
                "data": task.source,
                "method": method.name,
                "mode": bench.mode if method.settings else None,
                "rate": rate,
                "seeds": seeds,
                "loss": means["loss"],
                "sd": _deviation(losses),
                "over_sync_%": 100 * (means["loss"] / statistics.fmean(synchronous) - 1),
                "over_sync_sd": _deviation(over),
                "accuracy_%": means.get("accuracy"),
                **_describe(task, method, means, bench.nodes),
            }
        )
    order = {method.name: place for place, method in enumerate(methods)}
    return sorted(rows, key=lambda row: order[row["method"]])


def _describe(task: Task, method: Method, means: Scores, nodes: int) -> dict[str, Any]:
    """Return the columns on how a row came about, and what it cost."""
    synchronous_mb = 4e-6 * _parameter_count(task) * task.steps
    traffic = (means["sent_mb"], means["received_mb"]) if method.settings else (synchronous_mb * method.together,) * 2
    return {
        "nodes": nodes if method.settings or method.together else 1,
        "steps": means["steps"],
        "k": method.settings.every if method.settings else None,
        "d": method.settings.delay if method.settings else None,
        "steps_per_offer": means.get("steps_per_offer"),
        "age_steps": means.get("age_steps"),
        "sent_mb": traffic[0],
        "received_mb": traffic[1],
        "compression": 2 * synchronous_mb / sum(traffic) if any(traffic) else None,
        "seconds": means["seconds"],
    }


def _parameter_count(task: Task) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(task.make(1e-3, 0).init, 0)))


def _only(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {column: row[column] for column in columns}


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _in_words(run: Scores) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in run.items())


def tune(bench: Bench, task: Task, methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Train with each rate of each method, with seed 0; return one row for each."""
    rows = []
    for method in methods:
        for rate in RATES[task.name, method.name]:
            run = bench.train(task, method, rate, 0)
            print(f"{task.name}, {method.name}, rate {rate:g}: {_in_words(run)}", file=sys.stderr, flush=True)
            rows.append({"task": task.name, "data": task.source, "method": method.name, "rate": rate, **run})
    return rows


def main() -> None:
    """Read the command line; measure or tune, print the table, write the JSON."""
    if sys.argv[1:2] == ["--codecs"]:
        return codec_learning.main(sys.argv[2:])
    text, images = SHARED_DATA / "tinyshakespeare" / "input.txt", SHARED_DATA / "mnist"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=str(text) if text.is_file() else "stdlib", help="a file, or stdlib")
    parser.add_argument("--images", default=str(images) if images.is_dir() else "digits", help="a folder, or digits")
    parser.add_argument(
        "--task",
        nargs="+",
        choices=("text", "images"),
        default=("text", "images"),
        help="what to learn (default: both)",
    )
    parser.add_argument(
        "--method",
        nargs="+",
        choices=[method.name for method in METHODS],
        metavar="METHOD",
        help=f"of {', '.join(method.name for method in METHODS)} (default: all)",
    )
    parser.add_argument("--mode", choices=("default", "strict"), default="default", help="of the runs")
    parser.add_argument("--nodes", type=int, default=NODES, help="of a run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 (default %(default)s)")
    parser.add_argument("--steps", type=int, help="of one node, rounded up to whole units (default: 1536 and 560)")
    parser.add_argument("--step-milliseconds", type=float, help="the least time of a step (default: 25)")
    parser.add_argument("--tune", action="store_true", help="try the rates instead, with seed 0")
    codecs_help = "given first: compare codecs in one process; the rest of the command line is codec_learning.py's"
    parser.add_argument("--codecs", action="store_true", help=codecs_help)
    parser.add_argument("--quick", action="store_true", help="toy size: whether it works, not how well")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--role", choices=("node", "broker"), help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        return serve_jobs(options.role, options.cache)

    tasks = [task for task in default_tasks(options.text, options.images) if task.name in options.task]
    if options.quick:
        tasks = [quick(task) for task in tasks]
    if options.steps is not None:
        tasks = [replace(t, steps=-(-options.steps // t.batches_per_unit) * t.batches_per_unit) for t in tasks]
    if options.step_milliseconds is not None:
        tasks = [replace(task, step_milliseconds=options.step_milliseconds) for task in tasks]
    wanted = options.method or [method.name for method in METHODS]
    methods = [method for method in METHODS if method.name in wanted or (method.together and not options.tune)]
    rows = []
    with Bench(options.nodes, options.mode) as bench:
        for task in tasks:
            rows += tune(bench, task, methods) if options.tune else measure(bench, task, methods, options.seeds)
    if options.tune:
        print_table(rows)
    else:
        print_table([_only(row, LEARNED) for row in rows], "what is learned")
        print_table([_only(row, COST) for row in rows], "at what cost")
    if options.json:
        write_json(options.json, rows)


def serve_jobs(role: str, cache: str) -> None:
    """Be one of the bench's processes: do each job that comes in, a line of JSON, until there are no more."""
    keep: Callable[[str, object], None] = jax.config.update
    keep("jax_compilation_cache_dir", cache)  # every run compiles the same functions
    keep("jax_persistent_cache_min_compile_time_secs", 0.0)
    keep("jax_persistent_cache_min_entry_size_bytes", -1)
    for line in sys.stdin:
        (be_node if role == "node" else be_broker)(json.loads(line))


if __name__ == "__main__":
    main()
