"""Measure how soon N nodes reach a loss: ours against one node, an ideal barrier, DDP, PowerSGD and DiLoCo.

    speed-up = seconds of one node to the loss / seconds of the row, of the same seed
    share = seconds of the ideal / seconds of the row, of the same seed

What is learned: the program `text` (286,728 values, 4 x 64 bytes a node and step, AdamW at a constant rate). A step
takes 100 ms and a port carries 6 Mb/s each way, so that a ring's sum of float32 gradients takes 24 steps' time: a star
of 25M to 100M values at 1 Gb/s, scaled down.

Rule 1: the model is scored on held-out text every 10 steps' time (a second). A loss is reached when the curve through
these scores, its centred mean over 30 steps' time taken, first comes down to it; of all rows alike.
Rule 2: all rows of a seed begin with the same parameters, and all nodes at time zero: what it takes to send them to
those that join, once a run, is not counted. Each kind of row has the learning rate of `BEST_RATE`, which `--tune` found
for it in one grid, with a seed of its own.
Rule 3: `one` and `ideal` use no network: their seconds are steps times the step time. `ideal` takes each step with the
batches of all nodes.  DDP and PowerSGD are the ideal's steps, each longer by the time of its exchange (of PowerSGD: of
its bytes; what its low rank costs in learning is left out, in its favour). DiLoCo trains 50 steps apart (AdamW), then
waits for an exchange in fp16; outer Nesterov, rate 0.7, momentum 0.9; its curve is drawn straight from exchange to
exchange, in its favour. An exchange is timed on the star, by gloo where torch is installed, else by this package's
ring (with `--simulated` if `--time-exchanges` is said); where it was not timed, it takes a ring's limit at the port's
rate. The column `exchange` says which.
Rule 4: `auto` is told the program, its rate and data, and addresses: nothing of k, d, codecs or the like.  `slow` is
auto with one of the nodes at half speed; `slow, ideal barrier` is the ideal with steps of twice the time.
Rule 5: ours are real (processes on the star, `time_to_loss_star.py`) or, with `--simulated`, in virtual time
(`zmqtrain.sim`), with codecs that take the time of the planner's table.
Rule 6: `--as 25M` is the same run where all that a network and a codec do takes the time of a model of 25M values at
1 Gb/s and 50 ms a step (100M: 180 ms): slower ports, codec times times the ratio of the models, and the training thread
held for a while by each offer. In virtual time alone.
Rule 7: `--json` keeps one line of JSON for each finished run and skips the runs that it has, so an interrupted bench
can be resumed, and several processes can share it (`--part 0/2`). `--table` only prints.

Columns: seconds, speed-up, share: mean and deviation over the seeds.  steps: of one node at full speed, to the end of
the run.  k: steps between exchanges of the whole model as they came out.  age: steps from an offer to its application,
median.  refused: offers that found too much in flight, of all nodes.  chosen: how nodes exchanged at the end.  up,
down: MB a node.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import ceil, inf, isfinite, isnan
from pathlib import Path
from typing import Any

import jax

from zmqtrain.core.errors import ZmqTrainError

import time_to_loss_star
from report import append_line, format_rate, parse_rate, parse_seeds, print_table, read_lines, write_json
from time_to_loss_rows import (
    DILOCO_STEPS,
    NODE_CORES,
    SMOOTHED_STEPS,
    TARGETS,
    TEXT,
    Curve,
    Job,
    Line,
    Place,
    crossing,
    keep_compiled,
    parse_settings,
    place_as,
    ring_link,
    run_here,
)

__all__ = ["BEST_RATE", "RATES", "Bench", "main", "sweep_rows"]

SHARED_TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare" / "input.txt"
RATES = (1.5e-3, 2e-3, 3e-3, 4e-3, 6e-3)
TUNED_SEED = 100
BEST_RATE: dict[tuple[str, int], float] = {
    ("alone", 1): 1.5e-3,
    ("ideal", 2): 2e-3,
    ("ideal", 4): 1.5e-3,
    ("ideal", 8): 2e-3,
    ("auto", 2): 4e-3,
    ("auto", 4): 4e-3,
    ("auto", 8): 4e-3,
    ("diloco", 2): 2e-3,
    ("diloco", 4): 2e-3,
    ("diloco", 8): 2e-3,
}
"""By kind of row and number of nodes, the rate that reaches the last loss first; hand-set rows and `slow` have auto's.
`bench/time_to_loss.py --tune --nodes 4 --json tune.jsonl` found those of one node, and of the ideal and auto with four;
the others were not tuned: the ideal has the rate that is second there, by 2 %."""
POWER_RANK = 4
SWEEP_CODECS = (*(f"topk:density={density}+sign" for density in (0.01, 0.02, 0.05, 0.1)), "ternary")
SWEEP_SHAPES = ((1, 1, 1), (1, 2, 1), (1, 2, 0), (1, 4, 4), (2, 2, 1), (2, 2, 0), (4, 4, 1))
"""k, d, fragments; 0: each exchange carries the whole model, in pieces."""
SWEEP_STEPS = 800
"""Auto's run in a sweep ends after so many steps, which one node needs for the first loss."""
SWEEP_STEPS_OVER_AUTO = 1.25
"""A hand-set run of a sweep ends after so many times auto's steps: it is not the best one then."""
SWEEP_BAR, SWEEP_LEAST = 1.03, 24
"""Auto's seconds over those of the best of at least so many settings by hand."""
COST = ("exchange", "steps", "k", "age", "refused", "MB up", "MB down", "busy", "chosen")
BARS = {2: 0.92, 4: 0.92, 8: 0.85}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table. job: of a seed, without it; the runs that it is made of.

    step_factor: of the ideal's steps, how much longer they are.  exchange: of an exchange that each step, or each
    DILOCO_STEPS steps, waits for.
    """

    name: str
    job: Job
    step_factor: float = 1.0
    exchange: Job | None = None


# ---------------------------------------------------------------------- which rows there are


def default_rows(
    nodes: int, place: Place, program: str, data: str, mode: str, rates: Mapping[tuple[str, int], float]
) -> list[Row]:
    """Return the rows of N nodes; `one` is there once, whatever N is."""
    common: dict[str, Any] = {"program": program, "data": data}
    alone = Job(kind="alone", rate=rates["alone", 1], **common)
    ideal = Job(kind="ideal", nodes=nodes, rate=_rate_of(rates, "ideal", nodes), **common)
    auto = Job(kind=mode, nodes=nodes, rate=_rate_of(rates, "auto", nodes), place=place, **common)  # type: ignore[arg-type]
    diloco = Job(kind="diloco", nodes=nodes, rate=_rate_of(rates, "diloco", nodes), **common)
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(alone.make().init, 0))]
    values = sum(_product(shape) for shape in shapes)

    def exchange(*values_bytes: int) -> Job:
        return Job(kind="exchange", nodes=nodes, place=_ports(place), values_bytes=values_bytes, program="")

    half = exchange(2 * values)
    return [
        Row(name="one", job=alone),
        Row(name="ideal", job=ideal),
        Row(name="auto", job=auto),
        Row(name="slow", job=replace(auto, slow=1)),
        Row(name="slow, ideal barrier", job=ideal, step_factor=2.0),
        Row(name=f"DiLoCo-{DILOCO_STEPS}, fp16", job=diloco, exchange=half),
        Row(name=f"PowerSGD rank {POWER_RANK}, wire only", job=ideal, exchange=exchange(*power_bytes(shapes))),
        Row(name="DDP fp16", job=ideal, exchange=half),
        Row(name="DDP fp32", job=ideal, exchange=exchange(4 * values)),
    ]


def power_bytes(shapes: Sequence[tuple[int, ...]], rank: int = POWER_RANK) -> tuple[int, int]:
    """Return what PowerSGD sums over all nodes in a step, in bytes: the left factors of all matrices; then the right
    ones, and what is no matrix. A matrix that would be no smaller is sent as it is."""
    left = right = 0
    for shape in shapes:
        rows, columns = (shape[0], _product(shape[1:])) if len(shape) > 1 else (1, _product(shape))
        if len(shape) > 1 and rank * (rows + columns) < rows * columns:
            left, right = left + 4 * rank * rows, right + 4 * rank * columns
        else:
            right += 4 * rows * columns
    return left, right


def sweep_rows(auto: Job, full: bool = False) -> list[Row]:
    """Return the rows of hand-set settings beside auto: every codec with every k, d and fragments of the grid."""
    shapes = list(product((1, 2, 4), (1, 2, 4), (0, 1, 4))) if full else SWEEP_SHAPES
    rows = [Row(name="auto", job=auto)]
    for codec, (every, delay, fragments) in product(SWEEP_CODECS, shapes):
        settings = {"codec": codec, "broadcast_codec": codec, "every": every, "delay": delay, "fragments": fragments}
        pieces = {0: " in pieces", 1: ""}.get(fragments, f" f={fragments}")
        by_hand = json.dumps({**settings, "outer": "sgd:rate=1"})
        rows.append(Row(name=f"{codec} k={every} d={delay}{pieces}", job=replace(auto, settings=by_hand)))
    return rows


def hand_row(text: str, auto: Job) -> Row:
    """Return a row of settings by hand, as `--row` has them."""
    name, rate, settings = parse_settings(text)
    rate = auto.rate if isnan(rate) else rate
    return Row(name=name, job=replace(auto, rate=rate, settings=json.dumps(settings, sort_keys=True)))


def _rate_of(rates: Mapping[tuple[str, int], float], kind: str, nodes: int) -> float:
    """Return the tuned rate; of a number of nodes that was not tuned, that of the nearest that was."""
    tuned = [count for name, count in rates if name == kind]
    return rates[kind, min(tuned, key=lambda count: abs(count - nodes))]


def _ports(place: Place) -> Place:
    """Return a place of which only the ports count."""
    return Place(link=place.link)


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


# ---------------------------------------------------------------------- making runs


class Bench:
    """The runs that are made, and the lines of those that were: in memory, and in files.

    files: the first takes what is made.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self._lines: dict[str, Line] = {}
        for line in read_lines(files):
            self._keep(line)

    def _keep(self, line: Line) -> None:
        known = self._lines.get(line["identity"])
        if known is None or line.get("until", inf) <= known.get("until", inf):
            self._lines[line["identity"]] = line

    def line(self, job: Job) -> Line | None:
        """Return the line of a job, None if its run was not made, or ended too soon."""
        line = self._lines.get(job.identity())
        if line is None or job.kind == "exchange":
            return line
        far_enough = line["until"] <= job.until or (line["ended"] != "target" and line["max_steps"] >= job.max_steps)
        return line if far_enough else None

    def make(self, jobs: Iterable[Job]) -> None:
        """Make the runs that are missing. Raises what a run raises."""
        missing = [job for job in dict.fromkeys(jobs) if self.line(job) is None]
        for number, job in enumerate(missing, start=1):
            made = _make(job)
            line = {"identity": job.identity(), **asdict(job), "ended": "", **made}
            if self.files:
                append_line(self.files[0], line)
            self._keep(line)
            print(f"[{number}/{len(missing)}] {_in_words(job, line)}", file=sys.stderr, flush=True)


def _make(job: Job) -> Line:
    match job.kind:
        case "real":
            return time_to_loss_star.run_real(job)
        case "exchange":
            return time_to_loss_star.time_exchange(job)
    made = run_here(job)
    if "ended" not in made:
        made["ended"] = "target" if crossing(made["curve"], job.until, SMOOTHED_STEPS) < inf else "max_steps"
    return made


def _in_words(job: Job, line: Line) -> str:
    what = f"{job.kind} N={job.nodes} rate {job.rate:g} seed {job.seed} {job.settings if job.settings != '{}' else ''}"
    if job.kind == "exchange":
        return f"an exchange of {sum(job.values_bytes):,} bytes, N={job.nodes}: {line['seconds']:.3f} s by {line['by']}"
    seconds = crossing_seconds(line, job.place.step_seconds, job.until)
    reached = f"{job.until} after {seconds:.1f} s" if seconds < inf else f"{job.until} not reached"
    return f"{what}: {reached}; {line['wall_seconds']:.0f} s to make"


# ---------------------------------------------------------------------- the table


def crossing_seconds(
    line: Line, step_seconds: float, target: float, row: Row | None = None, wait: float = 0.0
) -> float:
    """Return when a run reached a loss, in seconds; inf: it did not. wait: for the exchange of each step, or round."""
    curve: Curve = [(x, loss) for x, loss in line["curve"]]
    if line["kind"] in ("alone", "ideal", "diloco"):
        factor = 1.0 if row is None else row.step_factor
        per_step = factor * step_seconds + wait / (DILOCO_STEPS if line["kind"] == "diloco" else 1)
        return per_step * crossing(curve, target, SMOOTHED_STEPS)
    return crossing(curve, target, SMOOTHED_STEPS * step_seconds)


class Table:
    """The rows of one number of nodes: their seconds, beside those of one node and of the ideal with the same seed."""

    def __init__(
        self, bench: Bench, rows: Sequence[Row], seeds: Sequence[int], place: Place, targets: Sequence[float]
    ) -> None:
        self.bench, self.rows, self.seeds, self.place, self.targets = bench, rows, seeds, place, targets
        self.seconds: dict[str, dict[float, dict[int, float]]] = {
            row.name: {target: self._seconds(row, target) for target in targets} for row in rows
        }

    def _wait(self, row: Row) -> tuple[float, str]:
        """Return how long a row's exchange takes, and how that is known."""
        if row.exchange is None:
            return 0.0, ""
        if (line := self.bench.line(row.exchange)) is not None:
            return line["seconds"], f"{line['seconds']:.3g} s, {line['by']}"
        nodes, size = row.exchange.nodes, sum(row.exchange.values_bytes)
        seconds = 2 * (nodes - 1) / nodes * size * 8 / self.place.link
        return seconds, f"{seconds:.3g} s, limit of a ring"

    def _seconds(self, row: Row, target: float) -> dict[int, float]:
        wait, _ = self._wait(row)
        lines = {seed: self.bench.line(replace(row.job, seed=seed)) for seed in self.seeds}
        return {
            seed: crossing_seconds(line, self.place.step_seconds, target, row, wait)
            for seed, line in lines.items()
            if line is not None
        }

    def ratios(self, over: str, name: str, target: float) -> list[float]:
        """Return seconds of the row `over` / seconds of the row `name`, of each seed that has both."""
        above, below = (self.seconds.get(one, {}).get(target, {}) for one in (over, name))
        both = [(above[seed], below[seed]) for seed in sorted(above.keys() & below.keys())]
        return [a / b for a, b in both if isfinite(a) and isfinite(b)]

    def as_rows(self) -> list[dict[str, Any]]:
        """Return the table, in numbers."""
        table = []
        for row in self.rows:
            lines = [line for seed in self.seeds if (line := self.bench.line(replace(row.job, seed=seed)))]
            if not lines:
                continue
            made: dict[str, Any] = {
                "row": row.name,
                "N": row.job.nodes,
                "seeds": len(lines),
                "how": row.job.kind,
                "rate": row.job.rate,
            }
            for target in self.targets:
                seconds = [one for one in self.seconds[row.name][target].values() if isfinite(one)]
                if len(seconds) == len(lines):
                    made |= _spread(f"s to {target:.2f}", seconds)
                made |= _spread(f"speed-up {target:.2f}", self.ratios("one", row.name, target))
                made |= _spread(f"share {target:.2f}", self.ratios("ideal", row.name, target))
            made["exchange"] = self._wait(row)[1]
            ours = [line for line in lines if "chosen" in line]
            made |= {
                "steps": statistics.fmean(line["steps"] for line in lines),
                "k": _mean(line.get("period_steps") for line in ours),
                "age": _mean(line.get("age_steps") for line in ours),
                "refused": _mean(line.get("offers_refused") for line in ours),
                "MB up": _mean(line.get("mb_up") for line in ours),
                "MB down": _mean(line.get("mb_down") for line in ours),
                "busy": _mean(line.get("busy") for line in ours),
                "chosen": describe_chosen(ours[-1]["chosen"]) if ours else "",
            }
            table.append(made)
        return table

    def judge(self) -> list[dict[str, Any]]:
        """Return the bars that these rows can be held to."""
        last, nodes = self.targets[-1], max(row.job.nodes for row in self.rows)
        auto, slow, barrier = "auto", "slow", "slow, ideal barrier"
        figures: list[tuple[str, float, list[float], Callable[[float, float], bool]]] = []
        above, below = (lambda value, bar: value >= bar), (lambda value, bar: value <= bar)
        if nodes == 4 and self.place.scale == 1:
            figures.append((f"auto: speed-up at {last}", 3.2, self.ratios("one", auto, last), above))
        if self.place.scale > 1:
            figures.append((f"auto: speed-up at {last}", 3.0, self.ratios("one", auto, last), above))
        elif nodes in BARS:
            for target in self.targets:
                figures.append((f"auto: share at {target}", BARS[nodes], self.ratios("ideal", auto, target), above))
            for over, bar in ((f"DiLoCo-{DILOCO_STEPS}, fp16", 1.8), ("DDP fp16", 10.0)):
                figures.append((f"auto: times as fast as {over} to {last}", bar, self.ratios(over, auto, last), above))
            figures.append(
                (f"slow: times as fast as a barrier to {last}", 1.5, self.ratios(barrier, slow, last), above)
            )
            figures.append((f"slow: seconds over auto's to {last}", 1.12, self.ratios(slow, auto, last), below))
        by_hand = [row.name for row in self.rows if row.job.kind == "simulated" and row.job.settings != "{}"]
        if len(by_hand) >= SWEEP_LEAST and auto in self.seconds:
            best = max(by_hand, key=lambda name: statistics.fmean(self.ratios(auto, name, last) or [0.0]))
            what = f"auto: seconds over the best of {len(by_hand)} settings by hand ({best}) to {last}"
            figures.append((what, SWEEP_BAR, self.ratios(auto, best, last), below))
        return [
            {
                "N": nodes,
                "figure": what,
                "bar": bar,
                "measured": (mean := statistics.fmean(ratios)),
                "seeds": len(ratios),
            }
            | {"": "met" if is_met(mean, bar) else "missed"}
            for what, bar, ratios, is_met in figures
            if ratios
        ]


def describe_chosen(chosen: Mapping[str, Any]) -> str:
    """Return in a line how nodes exchanged."""
    codecs = [str(chosen["codec"]), str(chosen["broadcast_codec"])]
    codec = codecs[0] if codecs[0] == codecs[1] else " up, ".join(codecs) + " down"
    return f"k={chosen['every']} d={chosen['delay']} f={chosen['fragments']} {codec} {chosen['outer']}"


def split(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows as two tables: what is learned how soon, and at what cost."""
    learned = [{name: value for name, value in row.items() if name not in COST} for row in rows]
    cost = [{"row": row["row"], "N": row["N"]} | {name: row.get(name) for name in COST} for row in rows]
    return learned, cost


def in_text(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return rows for people: each figure with its deviation behind it, no column that is empty throughout."""
    texts = []
    for row in rows:
        text = {}
        for name, value in row.items():
            if not name.endswith(" sd"):
                deviation = row.get(f"{name} sd")
                text[name] = _text(name, value) + ("" if deviation is None else f" ± {_text(name, deviation)}")
        texts.append(text)
    names = list(dict.fromkeys(name for text in texts for name in text))
    kept = [name for name in names if any(text.get(name) for text in texts)]
    return [{name: text.get(name, "") for name in kept} for text in texts]


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows of text as a table for the documents."""
    names = list(rows[0]) if rows else []
    lines = [
        "| " + " | ".join(names) + " |",
        "|" + "|".join("---" if n in ("row", "chosen") else "--:" for n in names) + "|",
    ]
    lines += ["| " + " | ".join(row[name] for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if name.startswith("share"):
        return f"{100 * value:.0f} %"
    if name == "rate":
        return f"{value:g}"
    return f"{value:.2f}" if name.startswith("speed-up") else f"{value:.3g}"


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {name: None}
    return {name: statistics.fmean(values), f"{name} sd": statistics.stdev(values) if len(values) > 1 else None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return statistics.fmean(known) if known else None


# ---------------------------------------------------------------------- the rates


def tune(bench: Bench, rows: Sequence[Row], targets: Sequence[float]) -> list[dict[str, Any]]:
    """Make a run of each row at each rate, with TUNED_SEED; return one row of a table for each.

    A run that takes a third longer than the best of its row so far is not finished.
    """
    table = []
    for row in rows:
        best = inf
        for rate in RATES:
            job = replace(row.job, rate=rate, seed=TUNED_SEED)
            if best < inf:
                job = replace(job, max_steps=min(job.max_steps, int(4 / 3 * best) + SMOOTHED_STEPS))
            bench.make([job])
            line = bench.line(job)
            assert line is not None
            seconds = [crossing_seconds(line, job.place.step_seconds, target) for target in targets]
            best = min(best, seconds[-1] / job.place.step_seconds)
            table.append(
                {"row": row.name, "N": job.nodes, "rate": rate, "last loss": line["curve"][-1][1]}
                | {f"s to {target:.2f}": one for target, one in zip(targets, seconds, strict=True)}
            )
    return table


def best_rates(table: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> dict[tuple[str, int], float]:
    """Return, by row and number of nodes, the rate that reached the last loss first, or came nearest."""
    by_row: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in table:
        by_row[row["row"], row["N"]].append(row)
    last = f"s to {targets[-1]:.2f}"
    return {key: min(rows, key=lambda row: (row[last], row["last loss"]))["rate"] for key, rows in by_row.items()}


# ---------------------------------------------------------------------- the command line


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = str(SHARED_TEXT) if SHARED_TEXT.is_file() else "stdlib"
    parser.add_argument("--nodes", type=int, nargs="+", default=[4], help="of a run, a table each (default 4)")
    parser.add_argument(
        "--seeds", type=parse_seeds, default="3", help="how many, from 0, or a list as 3,5 or 4, (default %(default)s)"
    )
    parser.add_argument("--simulated", action="store_true", help="our rows in virtual time, not on the star")
    only_help = "make the runs of those rows alone whose names begin so; the table has all that there are"
    parser.add_argument("--only", nargs="+", metavar="ROW", default=[""], help=only_help)
    parser.add_argument("--row", action="append", default=[], help='a row by hand: "name=dense|codec=int8|every=4|..."')
    parser.add_argument("--as", dest="model", choices=("25M", "100M"), help="as a model of so many values at 1 Gb/s")
    parser.add_argument("--hub-cores", type=float, default=1.0, help="of the hub, with --as (default 1)")
    cores_help = f"of a node that are idle, with --as (default {NODE_CORES:g}: of eight, one feeds the card)"
    parser.add_argument("--node-cores", type=float, default=NODE_CORES, help=cores_help)
    codec_help = "where nodes compress, with --as: what it costs on a card is an estimate (default host)"
    parser.add_argument("--codec-on", choices=("host", "device"), default="host", help=codec_help)
    held_help = "of the training thread by an exchange, with --as (default: as the planner counts it)"
    parser.add_argument("--held-milliseconds", type=float, help=held_help)
    parser.add_argument("--step-milliseconds", type=float, default=100.0, help="of a step (default %(default)g)")
    parser.add_argument("--link", type=parse_rate, default=6e6, help="of each port, each way (default 6mbit)")
    parser.add_argument("--targets", type=float, nargs="+", default=list(TARGETS), help="losses, falling")
    parser.add_argument("--max-steps", type=int, default=2500, help="of a node in a run (default %(default)s)")
    parser.add_argument("--rate", type=float, help="of all rows, in place of the tuned ones")
    parser.add_argument("--tune", action="store_true", help="try the rates instead, with a seed of their own")
    parser.add_argument("--sweep", action="store_true", help="a grid of hand-set settings beside auto, in virtual time")
    parser.add_argument("--sweep-full", action="store_true", help="all of k, d and fragments of the grid")
    parser.add_argument("--sweep-target", type=float, default=TARGETS[0], help="a sweep's loss (default %(default)s)")
    parser.add_argument("--ratio", type=float, help="give ports the rate at which a float32 ring takes so many steps")
    times_help = "time the exchanges of DDP and DiLoCo on the star, with --simulated too"
    parser.add_argument("--time-exchanges", action="store_true", help=times_help)
    parser.add_argument("--text", default=text, help="a file, or stdlib")
    parser.add_argument("--program", default=TEXT, help="the text program's arguments (default %(default)s)")
    parser.add_argument("--json", nargs="+", type=Path, default=[], help="files of runs; the first takes what is made")
    parser.add_argument("--rows", type=Path, help="write the table's rows to this file")
    parser.add_argument("--table", action="store_true", help="make no run: print what the files have")
    parser.add_argument("--markdown", action="store_true", help="print the table for the documents")
    parser.add_argument("--part", default="0/1", help="make only these runs: i/n (default all)")
    parser.add_argument("--core", type=int, help="stay on this core")
    cache = Path(tempfile.gettempdir(), "time_to_loss_cache")
    parser.add_argument("--cache", type=Path, default=cache, help="a folder for what is compiled (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.model and not (options.simulated or options.sweep or options.tune):
        parser.error("--as is in virtual time alone: say --simulated too")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, make the runs that are missing, print the tables."""
    options = read_options(arguments)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    keep_compiled(options.cache)
    bench = Bench(options.json)
    try:
        rows = _tune(bench, options) if options.tune else _tables(bench, options)
    except (ZmqTrainError, RuntimeError) as error:
        raise SystemExit(f"time_to_loss: {error}") from error
    if options.rows is not None:
        write_json(options.rows, rows)


def _place(options: argparse.Namespace, nodes: int) -> Place:
    if not (options.model or options.ratio):
        return Place(step_milliseconds=options.step_milliseconds, link=options.link)
    job = Job(kind="alone", program=options.program, data=options.text)
    values = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(job.make().init, 0)))
    if options.model:
        cores = options.hub_cores, options.node_cores
        return place_as(options.model, values, *cores, options.codec_on, options.held_milliseconds)
    link = ring_link(options.ratio, nodes, values, options.step_milliseconds / 1e3)
    return Place(step_milliseconds=options.step_milliseconds, link=link)


def _rows(options: argparse.Namespace, nodes: int) -> list[Row]:
    rates = BEST_RATE if options.rate is None else dict.fromkeys(BEST_RATE, options.rate)
    mode = "simulated" if options.simulated or options.sweep or options.tune else "real"
    rows = default_rows(nodes, _place(options, nodes), options.program, options.text, mode, rates)
    until = options.sweep_target if options.sweep else options.targets[-1]
    (auto,) = (row.job for row in rows if row.name == "auto")
    if options.sweep:
        rows = [row for row in rows if row.name in ("one", "ideal")] + sweep_rows(auto, options.sweep_full)
    rows += [hand_row(text, auto) for text in options.row]
    at_most = min(options.max_steps, SWEEP_STEPS) if options.sweep else options.max_steps
    steps = {row: options.max_steps if row.job.kind in ("alone", "ideal") else at_most for row in rows}
    return [replace(row, job=replace(row.job, until=until, max_steps=steps[row])) for row in rows]


def _tune(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    kinds = {"one": "alone", "ideal": "ideal", "auto": "auto", f"DiLoCo-{DILOCO_STEPS}, fp16": "diloco"}
    wanted: dict[Job, Row] = {}
    for nodes in options.nodes:
        for row in _rows(options, nodes):
            if row.name in kinds and row.name.startswith(tuple(options.only)):
                wanted.setdefault(row.job, replace(row, name=kinds[row.name]))
    number, parts = (int(part) for part in options.part.split("/"))
    table = tune(bench, list(wanted.values())[number::parts], options.targets)
    print_table(table, f"seconds by rate, seed {TUNED_SEED}")
    for (kind, nodes), rate in best_rates(table, options.targets).items():
        print(f'    ("{kind}", {nodes}): {rate:g},')
    return table


def _bounded(bench: Bench, rows: Sequence[Row], seeds: Sequence[int], made: bool) -> list[Row]:
    """Return a sweep's rows, those set by hand with at most SWEEP_STEPS_OVER_AUTO times auto's steps.

    made: make auto's runs first, where they are missing.
    """
    jobs = [replace(row.job, seed=seed) for row in rows if row.name == "auto" for seed in seeds]
    if made:
        bench.make(jobs)
    steps = [line["steps"] for job in jobs if (line := bench.line(job)) is not None]
    most = ceil(SWEEP_STEPS_OVER_AUTO * max(steps, default=SWEEP_STEPS))
    by_hand = [row.job.kind == "simulated" and row.job.settings != "{}" for row in rows]
    return [
        replace(row, job=replace(row.job, max_steps=min(row.job.max_steps, most))) if bounded else row
        for row, bounded in zip(rows, by_hand, strict=True)
    ]


def _tables(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    by_nodes = {nodes: _rows(options, nodes) for nodes in options.nodes}
    if options.sweep:
        by_nodes = {nodes: _bounded(bench, rows, options.seeds, not options.table) for nodes, rows in by_nodes.items()}
    if not options.table:
        wanted = [row for rows in by_nodes.values() for row in rows if row.name.startswith(tuple(options.only))]
        jobs = list(dict.fromkeys(replace(row.job, seed=seed) for seed in options.seeds for row in wanted))
        if options.time_exchanges or not options.simulated:
            jobs += dict.fromkeys(row.exchange for row in wanted if row.exchange is not None)
        number, parts = (int(part) for part in options.part.split("/"))
        bench.make(jobs[number::parts])
    targets = [options.sweep_target] if options.sweep else options.targets
    everything: list[dict[str, Any]] = []
    for nodes, rows in by_nodes.items():
        place = _place(options, nodes)
        table = Table(bench, rows, options.seeds, place, targets)
        made = table.as_rows()
        if options.sweep:
            made.sort(key=lambda row: row.get(f"s to {targets[0]:.2f}", inf))
        what = f"{nodes} nodes, every port {format_rate(round(place.link))}, a step of {place.step_milliseconds:g} ms"
        if options.markdown:
            for part in split(made):
                print(markdown(in_text(part)), end="\n\n")
        else:
            learned, cost = split(made)
            print_table(in_text(learned), what)
            print_table(in_text(cost), "at what cost")
            print_table(table.judge(), "the bars")
        everything += made
    return everything


if __name__ == "__main__":
    main()
