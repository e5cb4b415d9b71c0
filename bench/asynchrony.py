"""Measure what asynchrony costs and what each rule gains: simulated runs with real gradients, under a virtual clock.

    over_% = 100 x (held-out loss / that of the reference method of the same seed - 1)

Rule 1: a run is `zmqtrain.sim`'s: the Hub, the Peers, the codecs, the rules and the training loop of a real run.
All methods of a comparison share the data units, the schedule, the initial parameters and the held-out set of a seed.
Rule 2: `warm` starts every method at one checkpoint, reached by training on the batches of all nodes at once, with a
fresh optimizer and a third of the rate.
Rule 3: a finished run is a line of JSON in the file of results; a run whose line is there, in any of the files given,
is not made again. So a sweep can be cut and resumed, and one process can run on each core (`--part 0/2 --core 0`).
Rule 4: k is the same on all nodes and the first node founds, unless a case says otherwise.
Rule 5: held-out data only measure; nodes are compared by scores on training data that nobody trains on.

What each experiment holds is said in `asynchrony_cases.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from zmqtrain import Program, RunSettings, load_program
from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.core.settings import FIXED
from zmqtrain.sim import Scenario, SimNode, simulate
from zmqtrain.sim.program import NodeProgram
from zmqtrain.train.loop import own_seed
from zmqtrain.train.step import MinibatchStep
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.memory import LinkModel

from asynchrony_cases import EXPERIMENTS, Case
from asynchrony_table import draw, markdown, show
from perceptron import Perceptron
from report import append_line, parse_seeds, read_lines

__all__ = ["TASKS", "Task", "run_case", "sweep", "main"]

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LINK = LinkModel(1e9, 0.0005)
WARM_RATE = 1 / 3
NODES = 4

Line = dict[str, Any]


# ---------------------------------------------------------------------- the tasks


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned. steps: of each of four nodes (others get the same samples in all).

    rate: of the inner optimizer.  warm_steps: of the checkpoint that warm runs start at, four nodes' batches a step.
    """

    name: str
    steps: int
    rate: float
    warm_steps: int
    batches_per_unit: int = 4

    def make(self, data: str, seed: int, inner: str = "", batch: int = 0) -> Program:
        """Return the program, at rate 1."""
        common: dict[str, Any] = {"data": data, "batches_per_unit": self.batches_per_unit, "rate": 1.0, "seed": seed}
        if self.name == "mnist":
            return Perceptron(**common, inner_optimizer=inner or "adam", batch=batch or 16)
        small = {"layers": 2, "width": 64, "context": 64, "batch": batch or 2, "inner_optimizer": inner or "adamw"}
        return load_program("text", {**small, **common})


TASKS = {
    "shakespeare": Task(name="shakespeare", steps=1024, rate=2e-3, warm_steps=2048),
    "mnist": Task(name="mnist", steps=1024, rate=4e-3, warm_steps=512),
}


class Scheduled:
    """A program at a rate that falls to a tenth by a cosine of its own steps, or stays.

    What is compiled is the base program's, one for all seeds; the data are those of `seed`.
    """

    def __init__(self, base: Program, of_seed: Program, optimizer: Any) -> None:
        self.name, self.sample_word = base.name, base.sample_word
        self.samples_per_batch, self.units_per_epoch = base.samples_per_batch, base.units_per_epoch
        self.loss, self.optimizer, self.init = base.loss, optimizer, base.init
        self.evaluate, self.score = base.evaluate, base.score  # type: ignore[attr-defined]
        self.batches = of_seed.batches


@lru_cache(maxsize=64)
def _base(task: str, data: str, seed: int, inner: str, batch: int) -> Program:
    return TASKS[task].make(data, seed, inner, batch)


@lru_cache(maxsize=256)
def _optimizer(base: Program, rate: float, steps: int) -> Any:
    """Return what makes the optimizer; steps: of the cosine, 0 for a constant rate."""
    scale = optax.cosine_decay_schedule(rate, steps, 0.1) if steps else optax.constant_schedule(rate)
    return lambda: optax.chain(base.optimizer(), optax.scale_by_schedule(scale))


def program_of(case: Case, data: str, seed: int) -> Scheduled:
    """Return the program of a case with the data of a seed."""
    task = TASKS[case.task]
    rate = task.rate * case.rate * (WARM_RATE if case.start == "warm" else 1.0)
    steps = case.own_steps(task.steps) if case.schedule == "cosine" else 0
    base, of_seed = (_base(case.task, data, one, case.inner, case.batch) for one in (0, seed))
    return Scheduled(base, of_seed, _optimizer(base, rate, steps))


_checkpoints: dict[tuple[str, int], Any] = {}


def checkpoint(task: Task, data: str, seed: int) -> Any:
    """Return the parameters that training on the batches of four nodes at once reaches from scratch."""
    key = (task.name, seed)
    if key not in _checkpoints:
        case = Case(experiment="", task=task.name, method="", steps=task.warm_steps)
        program = program_of(case, data, seed)
        local = MinibatchStep(program)
        state = local.init(seed)
        units = iter(range(NODES * task.warm_steps))
        for _ in range(task.warm_steps // task.batches_per_unit):
            of_nodes = [list(program.batches(next(units))) for _ in range(NODES)]
            for batches in zip(*of_nodes, strict=True):
                joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
                state, _, _ = local.step(state, iter([joined]))
        _checkpoints[key] = jax.tree.map(np.asarray, state.params)
    return _checkpoints[key]


def mean_of_own(program: Any, scenario: Scenario) -> Any:
    """Return the mean of the parameters that the nodes would begin with, each from a seed of its own."""
    settings = replace(scenario.settings, initial="best")
    own = [NodeProgram(program, node).init(own_seed(settings, node.name)) for node in scenario.nodes]
    return jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)) / len(leaves), *own)


# ---------------------------------------------------------------------- what some compare with


class Overwriting(DelayedSync):
    """What many asynchronous servers do: who gets the shared parameters drops what it has computed meanwhile."""

    def _apply(self, leaves: list[Any], update: Any) -> list[Any]:
        super()._apply(leaves, update)
        return self._moves.parameters(self._anchor)


class Mixing(DelayedSync):
    """Half of its own parameters, half of the shared ones, whenever these come."""

    def _apply(self, leaves: list[Any], update: Any) -> list[Any]:
        leaves = super()._apply(leaves, update)
        return [(leaf + anchor) / 2 for leaf, anchor in zip(leaves, self._anchor, strict=True)]


SYNCS = {"": DelayedSync, "overwrite": Overwriting, "mix": Mixing}


# ---------------------------------------------------------------------- one run


def run_case(case: Case, seed: int, data: Mapping[str, str]) -> Line:
    """Simulate once; return the line of results."""
    began = time.perf_counter()
    task = TASKS[case.task]
    source = data[case.task]
    program = program_of(case, source, seed)
    steps = case.own_steps(task.steps)
    settings = RunSettings(
        **FIXED
        | {
            "program": task.name,
            "seed": seed,
            "units": 0 if case.max_seconds else case.nodes * steps // task.batches_per_unit,
            "start_nodes": case.nodes,
            "evaluate_seconds": 0.0,
            "local_updates": "fixed",
            "initial": "founder",
            "shards": 1,
            **case.settings,
        }
    )
    scenario = Scenario(
        settings=settings,
        nodes=tuple(SimNode(name=f"node-{number}", **case.node(number)) for number in range(case.nodes)),
        link=LINK,
        evaluate_seconds=case.evaluate_seconds,
        **({"max_seconds": case.max_seconds} if case.max_seconds else {}),
    )
    if case.start == "warm":
        # the data that follows what the checkpoint was trained on
        first, of_seed = NODES * task.warm_steps // task.batches_per_unit, program.batches
        program.batches = lambda unit: of_seed(unit + first)
    params = checkpoint(task, source, seed) if case.start == "warm" else None
    if case.initial == "mean":
        params = mean_of_own(program, scenario)
        scenario = replace(scenario, nodes=tuple(SimNode(name=node.name) for node in scenario.nodes))
    line: Line = {**asdict(case), "seed": seed}
    try:
        result = simulate(scenario, program=program, initial_params=params, make_sync=SYNCS[case.sync])
    except ZmqTrainError as error:
        return {**line, "loss": None, "failed": f"{type(error).__name__}: {error}", "seconds": _since(began)}
    return {
        **line,
        **{name: result.scores.get(name) for name in ("loss", "accuracy")},
        "virtual_seconds": result.seconds,
        "version": result.version,
        "contributions": result.contributions,
        "samples": result.samples,
        "curve": [(seconds, loss) for seconds, _, loss in result.curve()],
        "seconds": _since(began),
    }


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 2)


def identity(line: Line) -> str:
    """Return as text what tells a run from all others: its case and its seed."""
    return json.dumps([line.get(one.name) for one in fields(Case)] + [line["seed"]], sort_keys=True)


def sweep(jobs: Sequence[tuple[Case, int]], files: Sequence[Path], data: Mapping[str, str]) -> Iterator[Line]:
    """Make the runs whose lines are in none of the files, write each to the first of them, and give it."""
    done = {identity(line) for line in read_lines(files)}
    missing = [(case, seed) for case, seed in jobs if identity({**asdict(case), "seed": seed}) not in done]
    for number, (case, seed) in enumerate(missing, start=1):
        line = run_case(case, seed, data)
        if files:
            append_line(files[0], line)
        what = f"loss {line['loss']:.4f}" if line["loss"] is not None else line.get("failed", "no shared model")
        title = f"{case.experiment} {case.task} {case.start} N={case.nodes} {case.method} seed {seed}"
        print(f"[{number}/{len(missing)}] {title}: {what}, {line['seconds']:.1f} s", file=sys.stderr, flush=True)
        yield line


# ---------------------------------------------------------------------- the command line


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line; make the runs that are asked for and not made yet, print the tables, draw the plots."""
    options = _parser().parse_args(arguments)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})  # before XLA makes its threads: as many as it may use cores
    if options.cache is not None:
        keep: Any = jax.config.update
        keep("jax_compilation_cache_dir", str(options.cache))
        keep("jax_persistent_cache_min_compile_time_secs", 0.2)
    files = [Path(file) for file in options.results]
    if options.table or options.markdown or options.plot:
        lines = read_lines(files)
    else:
        made = list(sweep(_jobs(options), files, {"mnist": options.images, "shakespeare": options.text}))
        lines = read_lines(files) if files else made
    lines = [line for line in lines if _is_chosen(line, options)]
    if options.markdown:
        print(markdown(lines))
    else:
        show(lines)
    if options.plot is not None:
        draw(lines, options.plot)


def _jobs(options: argparse.Namespace) -> list[tuple[Case, int]]:
    cases = [case for name in options.experiment for case in EXPERIMENTS[name]()]
    chosen = [_of_steps(case, options.steps) for case in cases if _is_chosen(asdict(case), options)]
    jobs = [(case, seed) for seed in parse_seeds(options.seeds) for case in chosen]
    number, parts = (int(part) for part in options.part.split("/"))
    return jobs[number::parts]


def _of_steps(case: Case, steps: int) -> Case:
    """Return a case of so many steps; the time of one that ends by time grows with them."""
    if not steps:
        return case
    longer = steps / case.steps if case.steps else 1.0
    return replace(case, steps=steps, max_seconds=case.max_seconds * longer)


def _is_chosen(line: Line, options: argparse.Namespace) -> bool:
    """Return whether a run is one of those that the command line names."""
    named = ("experiment", "task", "start", "nodes", "method", "group")
    return all(not getattr(options, key) or line[key] in getattr(options, key) for key in named)


def _parser() -> argparse.ArgumentParser:
    text, images = SHARED_DATA / "tinyshakespeare" / "input.txt", SHARED_DATA / "mnist"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(EXPERIMENTS)
    parser.add_argument("--experiment", nargs="+", choices=names, default=names, help="which (default: all)")
    parser.add_argument("--task", nargs="+", choices=list(TASKS), help="only these")
    parser.add_argument("--start", nargs="+", choices=("scratch", "warm"), help="only these")
    parser.add_argument("--nodes", nargs="+", type=int, help="only these numbers of nodes")
    parser.add_argument("--method", nargs="+", help="only these methods")
    parser.add_argument("--group", nargs="+", help="only these conditions")
    parser.add_argument("--seeds", default="3", help="how many, from 0, or a list as 3,5 or 4, (default %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="of one node, instead of the case's; the time grows too")
    parser.add_argument("--results", nargs="+", default=[], help="files of lines; all are read, the first is written")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th of the runs, from the i-th on")
    parser.add_argument("--core", type=int, help="pin this process to a core")
    parser.add_argument("--cache", type=Path, help="keep what is compiled in this folder")
    parser.add_argument("--table", action="store_true", help="only print the tables of the files")
    parser.add_argument("--markdown", action="store_true", help="only print the files as tables for a page")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="only print the tables, and draw into this folder")
    parser.add_argument("--text", default=str(text) if text.is_file() else "stdlib", help="a file, or stdlib")
    parser.add_argument("--images", default=str(images) if images.is_dir() else "digits", help="a folder, or digits")
    return parser


if __name__ == "__main__":
    main()
