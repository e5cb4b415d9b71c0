"""Measure which codecs and exchange settings learn as well as synchronous training, and for how many bytes.

    over_sync_% = 100 x (held-out loss / that of synchronous data parallel with the same samples and seed - 1)
    compression = bytes of synchronous data parallel in float32 (4 a parameter, each step, each way) / bytes of a node

Rule 1: a run is `federation.py`'s: nodes and hub in one process, by the one equation (or `coded_gradients.py`'s, for
comparison).  All methods share the initial parameters, the data units, the schedule and the held-out set of a seed.
The last exchange is dense; its bytes count.
Rule 2: `warm` starts every method at one checkpoint, which the synchronous method reached, with a fresh optimizer, the
data that follows and a third of the rate.
Rule 3: a finished run is a line of JSON in a file of results, which `codec_table.py` reads; a run whose line is there,
in any of the files given, is not made again.  What a run is called makes no difference to that, its settings do.  So a
sweep can be cut and resumed.
Rule 4: one run, one core: pin the process (`--core 0`), start one per core, each with `--part` and results of its own.
Rule 5: what is compared, and how a row is written, is in `codec_methods.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from zmqtrain import Program, load_program

from codec_methods import EXCHANGING, METHODS, TASKS, CodecTask, Method, parse_row
from codec_table import Line, draw, identity, markdown, read_runs, show, summarise
from coded_gradients import CodedGradients
from federation import Federation, LocalSteps, cosine_scales, draw_batches, join_batches
from report import append_line, parse_seeds

__all__ = ["Setup", "run_method", "sweep", "main"]

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PROGRESS_SECONDS = 10.0
REFERENCE_CHUNK = 64
WARM_RATE = 1 / 3

Scores = dict[str, float]


# ---------------------------------------------------------------------- one run


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all methods of a comparison share; `base_rate` of None is the task's own."""

    task: CodecTask
    inner: str = "adamw"
    start: Literal["scratch", "warm"] = "scratch"
    schedule: Literal["cosine", "constant"] = "cosine"
    nodes: int = 4
    base_rate: float | None = None
    text: str = "stdlib"
    images: str = "digits"

    @property
    def rate(self) -> float:
        """The rate that a method's factor multiplies."""
        base = self.task.rates[self.inner] if self.base_rate is None else self.base_rate
        return base * (WARM_RATE if self.start == "warm" else 1.0)

    def program(self, seed: int) -> Program:
        """Return the program at rate 1, with a seed for the order of the data."""
        is_text = self.task.program == "text"
        source = {"data": self.text, "inner_optimizer": self.inner} if is_text else {"data": self.images}
        return load_program(self.task.program, {**source, **self.task.arguments, "rate": 1.0, "seed": seed})

    def describe(self, seed: int) -> Line:
        """Return what a line of results says of the setup."""
        return {
            "task": self.task.name,
            "inner": self.inner,
            "start": self.start,
            "schedule": self.schedule,
            "nodes": self.nodes,
            "steps": self.task.steps,
            "warm_steps": self.task.warm_steps if self.start == "warm" else 0,
            "data": Path(self.text if self.task.program == "text" else self.images).name,
            "arguments": dict(self.task.arguments),
            "seed": seed,
        }


class Watch:
    """Says on standard error how far a run is, every ten seconds."""

    def __init__(self, title: str) -> None:
        self.title, self._said = title, time.perf_counter()

    def __call__(self, step: int, loss: jax.Array) -> None:
        """Take note of a step and its loss."""
        if time.perf_counter() - self._said >= PROGRESS_SECONDS:
            print(f"  {self.title}: step {step}, loss {float(loss):.4f}", file=sys.stderr, flush=True)
            self._said = time.perf_counter()


_steps: dict[str, LocalSteps] = {}


def _compiled(setup: Setup) -> LocalSteps:
    """Return the local step: one for all seeds, rates, starts and lengths, so that it is compiled once."""
    key = json.dumps([setup.task.name, setup.task.arguments, setup.inner, setup.text, setup.images])
    if key not in _steps:
        _steps[key] = LocalSteps(setup.program(0), setup.task.on_device)
    return _steps[key]


def run_method(setup: Setup, method: Method, seed: int, checkpoints: Path | None = None) -> Line:
    """Train once; return the line of results."""
    began = time.perf_counter()
    program, local = setup.program(seed), _compiled(setup)
    steps, rate = setup.task.steps, setup.rate * method.rate
    params, first_unit = program.init(seed), 0
    if setup.start == "warm":
        params = _checkpoint(setup, seed, checkpoints)
        first_unit = setup.nodes * setup.task.warm_steps // setup.task.arguments["batches_per_unit"]
    batches = draw_batches(program, setup.nodes, steps, first_unit)
    scales = cosine_scales(rate, steps, setup.schedule)
    watch = Watch(f"{setup.task.name} {setup.inner} {setup.start}, {method.name}, seed {seed}")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    trained = time.perf_counter()
    if method.kind in EXCHANGING:
        make = Federation if method.kind == "federation" else CodedGradients
        nodes = make(local, method.exchange, params, setup.nodes)
        params = nodes.run(batches, scales, watch)
        up, down = nodes.bytes_up, nodes.bytes_down
    else:
        together = method.kind == "synchronous"
        params = _train_alone(local, params, join_batches(batches) if together else batches[0], scales, watch)
        up = down = 4 * parameters * steps if together else 0
    scores = program.evaluate(params)
    return {
        **setup.describe(seed),
        "method": method.name,
        **method.settings,
        "rate": rate,
        **scores,
        "parameters": parameters,
        "bytes_up": up,
        "bytes_down": down,
        "compression": 2 * 4 * parameters * steps / (up + down) if up else None,
        "train_seconds": round(time.perf_counter() - trained, 2),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _train_alone(local: LocalSteps, params: Any, batches: Any, scales: Any, watch: Watch) -> Any:
    state, loaded = local.init(params), local.load(batches)
    for first in range(0, len(scales), REFERENCE_CHUNK):
        last = min(first + REFERENCE_CHUNK, len(scales))
        state, loss = local.advance(state, loaded, scales, first, last)
        loss.block_until_ready()
        watch(last, loss)
    return state.params


_checkpoints: dict[str, Any] = {}


def _checkpoint(setup: Setup, seed: int, folder: Path | None) -> Any:
    """Return the parameters that the synchronous method reaches from scratch, from memory, a file, or by training."""
    base = replace(setup, start="scratch", base_rate=None)
    facts = base.describe(seed) | {"steps": setup.task.warm_steps, "rate": base.rate}
    arguments = "-".join(f"{key}{value}" for key, value in facts.pop("arguments").items())
    key = "_".join([*(str(value) for value in facts.values()), arguments])
    if key not in _checkpoints:
        program = setup.program(seed)
        fresh = program.init(seed)
        file = folder / f"{key}.npz" if folder is not None else None
        if file is not None and file.is_file():
            with np.load(file) as arrays:
                leaves = [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
        else:
            steps = setup.task.warm_steps
            batches = join_batches(draw_batches(program, setup.nodes, steps))
            scales = cosine_scales(base.rate, steps, setup.schedule)
            title = f"{setup.task.name} {setup.inner}, checkpoint, seed {seed}"
            params = _train_alone(_compiled(setup), fresh, batches, scales, Watch(title))
            print(f"{title}: {_in_words(program.evaluate(params))}", file=sys.stderr, flush=True)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
            if file is not None:
                _save(file, leaves)
        _checkpoints[key] = jax.tree.unflatten(jax.tree.structure(fresh), leaves)
    return _checkpoints[key]


def _save(file: Path, leaves: Sequence[np.ndarray[Any, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{os.getpid()}-{file.name}")
    with beside.open("wb") as opened:
        np.savez(opened, *leaves)
    beside.replace(file)


def _in_words(scores: Scores) -> str:
    return ", ".join(f"{key} {value:.4f}" for key, value in scores.items())


# ---------------------------------------------------------------------- many runs


def sweep(jobs: Sequence[tuple[Setup, Method, int]], files: Sequence[Path], checkpoints: Path | None) -> Iterator[Line]:
    """Make each run whose line is in none of the files, append its line to the first, and yield it."""
    for number, (setup, method, seed) in enumerate(jobs, start=1):
        done = {identity(line) for line in read_runs(files)}
        if identity({**setup.describe(seed), **method.settings, "rate": setup.rate * method.rate}) in done:
            continue
        line = run_method(setup, method, seed, checkpoints)
        if files:
            append_line(files[0], line)
        spent = f"{line['compression']:.0f}x" if line["compression"] else "no bytes"
        where = f"{setup.task.name} {setup.inner} {setup.start} seed {seed}"
        print(
            f"[{number}/{len(jobs)}] {where}, {method.name}, rate {line['rate']:.3g}: loss {line['loss']:.4f}, "
            f"{spent}, {line['seconds']:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        yield line


# ---------------------------------------------------------------------- the command line


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line; make the runs that are asked for and not made yet, print the table, draw the plot."""
    options = _parser().parse_args(arguments)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})  # before XLA makes its threads: as many as it may use cores
    if options.cache is not None:
        _keep_compiled(options.cache)
    files = [Path(file) for file in options.results]
    only_read = options.table or options.plot or options.markdown
    made = [] if only_read else list(sweep(_jobs(options), files, options.checkpoints))
    rows = summarise(read_runs(files) if files else made)
    rows = [row for row in rows if options.task is None or row["task"] in options.task]
    if options.markdown:
        print("\n\n".join(markdown(rows)))
    else:
        show(rows)
    if options.plot is not None:
        draw(rows, options.plot)


def _jobs(options: argparse.Namespace) -> list[tuple[Setup, Method, int]]:
    methods = [method for method in METHODS if method.name in (options.method or ())]
    methods += [parse_row(row) for row in options.row or ()]
    if not methods:
        methods = list(METHODS)
    if options.tune is not None:
        methods = [replace(method, rate=method.rate * factor) for method in methods for factor in options.tune]
    jobs, left_out = [], []
    for task in TASKS:
        if task.name not in (options.task or ["lm"]):
            continue
        task = replace(
            task,
            steps=options.steps or task.steps,
            warm_steps=options.warm_steps or task.warm_steps,
            arguments={**task.arguments, **dict(options.argument or ())},
        )
        for unknown in [inner for inner in options.inner if inner not in task.rates]:
            text = f"--inner {unknown}: the task {task.name} has a rate for {', '.join(task.rates)} alone"
            left_out.append(f"{text}; it is left out")
        for inner in [inner for inner in options.inner if inner in task.rates]:
            for start in options.start:
                setup = Setup(
                    task=task,
                    inner=inner,
                    start=start,
                    schedule=options.schedule,
                    nodes=options.nodes,
                    base_rate=options.rate,
                    text=options.text,
                    images=options.images,
                )
                jobs += [(setup, method, seed) for seed in parse_seeds(options.seeds) for method in methods]
    if left_out and not jobs:
        raise SystemExit(left_out[0])
    for text in left_out:
        print(text, file=sys.stderr)
    number, parts = (int(part) for part in options.part.split("/"))
    return jobs[number::parts]


def _argument(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, int(value)


def _keep_compiled(folder: Path) -> None:
    keep: Callable[[str, object], None] = jax.config.update
    keep("jax_compilation_cache_dir", str(folder))
    keep("jax_persistent_cache_min_compile_time_secs", 0.2)
    keep("jax_persistent_cache_min_entry_size_bytes", -1)


def _parser() -> argparse.ArgumentParser:
    text, images = SHARED_DATA / "tinyshakespeare" / "input.txt", SHARED_DATA / "mnist"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=[task.name for task in TASKS], help="what to learn (default: lm)")
    parser.add_argument("--inner", nargs="+", choices=("adamw", "muon"), default=["adamw"], help="inner optimizer")
    parser.add_argument("--start", nargs="+", choices=("scratch", "warm"), default=["scratch"], help="of the runs")
    names = ", ".join(method.name for method in METHODS).replace("%", "%%")
    parser.add_argument("--method", nargs="+", choices=[m.name for m in METHODS], metavar="METHOD", help=f"of {names}")
    parser.add_argument("--row", action="append", help="a method of your own, as above; may be given more than once")
    parser.add_argument("--seeds", default="3", help="how many, from 0, or a list as 3,5 or 4, (default %(default)s)")
    parser.add_argument("--rate", type=float, help="base rate instead of the task's")
    parser.add_argument("--tune", nargs="+", type=float, help="try each method with these factors to its rate")
    parser.add_argument("--schedule", choices=("cosine", "constant"), default="cosine", help="(default %(default)s)")
    parser.add_argument("--steps", type=int, help="of one node, instead of the task's")
    parser.add_argument("--warm-steps", type=int, help="of the checkpoint, instead of the task's")
    parser.add_argument(
        "--argument", nargs="+", type=_argument, help="of the program, as batch=4, instead of the task's"
    )
    parser.add_argument("--nodes", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--results", nargs="+", default=[], help="files of lines; all are read, the first is written")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th of the runs, from the i-th on")
    parser.add_argument("--checkpoints", type=Path, help="keep the checkpoints of warm starts in this folder")
    parser.add_argument("--cache", type=Path, help="keep what is compiled in this folder")
    parser.add_argument("--core", type=int, help="pin this process to a core")
    parser.add_argument("--table", action="store_true", help="only print the table of the files")
    parser.add_argument("--markdown", action="store_true", help="only print the files as tables for a page")
    parser.add_argument("--plot", type=Path, help="only print the table and draw the files to this picture")
    parser.add_argument("--text", default=str(text) if text.is_file() else "stdlib", help="a file, or stdlib")
    parser.add_argument("--images", default=str(images) if images.is_dir() else "digits", help="a folder, or digits")
    return parser


if __name__ == "__main__":
    main()
