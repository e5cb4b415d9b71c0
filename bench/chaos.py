"""Break a run on a star, on purpose and at random, and say what it cost: against its bars, and a run in peace.

    run      the same samples trained twice, once in peace and once under a schedule of faults: kills, stops, unplugged
             cables, bad cables, full disks, clocks that jump, and two kills of the broker.  Bars: 0.95 of the samples
             that were computed are in the shared parameters; the final held-out loss is within 2 % of that in peace;
             nobody restarts anything by hand; the ledger finds every acknowledged contribution in the parameters once.
    losses   how soon there are aggregates again after one loss at a time, for each release rule.  Bars: 1 s after a
             killed node, 3 s after an unplugged one, 3 s after the broker is back; survivors pause at most 2 steps.

Rule 1: what is restarted is restarted with its own line, as a service manager would; nothing else is done to the run.
Rule 2: the schedule is the seed's.  Rule 3: what one fault could not do is said, and the rest goes on.
Rule 4: one loss at a time befalls rounds of 0.6 s: with longer ones than a bar, it would be missed in peace as well.

As root; `--minutes 20` takes twice that. A short form: `--minutes 3 --repeats 2`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain.chaos.run import KEEP_ALL, Outcome, hub_folder, record_of
from zmqtrain.chaos.schedule import BROKER, KINDS, Fault, check_kinds, draw_schedule
from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.monitor.ledger import lives_of
from zmqtrain.monitor.records import Record

from chaos_star import StarRun, name_of_node
from report import print_table, write_json
from star import Star

__all__ = ["Case", "play", "read_options", "run_rows", "loss_rows", "main"]

BARS = {"killed": 1.0, "unplugged": 3.0, "broker killed": 3.0}
GOODPUT_BAR, LOSS_BAR, GAP_BAR = 0.95, 0.02, 2.0
BITS_PER_SECOND = 1e9
PRESENT_SHARE = 0.8
"""What of a schedule's time the nodes are expected to train in: so much data the run is given."""
QUIET_SECONDS, BACK_SECONDS, UNPLUGGED_SECONDS = 4.0, 30.0, 6.0
RULES = ("quorum", "all")
LOSS_EVERY, LOSS_DELAY = 4, 2
"""Steps between offers, and until their aggregate is applied, where one loss at a time is measured: see Rule 4."""


@dataclass(frozen=True)
class Case:
    """What is trained. pace_seconds: of every step; program_arguments: of the program "text".

    node_checkpoints: whether nodes that are killed go on from where they were, not from the shared parameters.
    pipeline: of so many PCs each node is one; 0: of one, with the whole model.
    """

    nodes: int = 6
    pace_seconds: float = 0.15
    program_arguments: str = "width=32,layers=2,heads=2,context=32,batch=16,batches_per_unit=16"
    batches_per_unit: int = 16
    every: int = 8
    delay: int = 4
    release: str = "quorum"
    checkpoint_every: str = "20s"
    node_checkpoints: bool = False
    pipeline: int = 0

    def units(self, seconds: float) -> int:
        """Return how many data units all nodes train on in so much time, less what faults take of it."""
        pipelines = self.nodes // (self.pipeline or 1)
        steps = PRESENT_SHARE * seconds * pipelines / self.pace_seconds
        return max(self.nodes, round(steps / self.batches_per_unit))

    def broker_line(self, units: int) -> list[str]:
        """Return what the broker's command line says. units: 0 for a run that ends when it is ended."""
        run = ["--program", "text", "--program-arguments", self.program_arguments, "--units", str(units)]
        run += ["--every", str(self.every), "--delay", str(self.delay), "--release", self.release]
        run += ["--initial", "founder", "--pipeline", str(self.pipeline), "--shards", "1"]
        nodes = self.nodes // (self.pipeline or 1)
        return [*run, "--start-nodes", str(nodes), "--checkpoint-every", self.checkpoint_every, *KEEP_ALL]

    def node_line(self, folder: Path, number: int) -> list[str]:
        """Return what a node's command line says besides address, name and record."""
        line = ["--pace-seconds", str(self.pace_seconds)]
        if self.node_checkpoints:
            line += ["--checkpoint", str(folder / name_of_node(number)), "--checkpoint-every", self.checkpoint_every]
        return line


def play(star: Star, folder: Path, case: Case, units: int, schedule: Sequence[Fault], seconds: float) -> Outcome:
    """Train so many units under a schedule that takes so many seconds; return what came of it.

    Raises RuntimeError if the run does not begin, ZmqTrainError if what it left behind cannot be read.
    """
    line = case.broker_line(units)
    with StarRun(star, folder, line, lambda number: case.node_line(folder, number), out=sys.stderr) as run:
        run.wait_training()
        began = time.monotonic()
        run.player.play(schedule, seconds, lambda: run.services[BROKER].over)
        ended = run.wait_over(max(60.0, seconds))
        took = time.monotonic() - began
        if not ended:
            for name, service in run.services.items():
                _say(f"{name}: {'; '.join(service.last_lines[-2:])}")
    outcome = run.outcome(ended, took)
    return replace(outcome, loss=_loss_of_model(folder, case)) if case.pipeline else outcome


def _loss_of_model(folder: Path, case: Case) -> float:
    """Return the held-out loss of the model that a run has left: no PC of a pipeline has all of it, to evaluate it."""
    import zmqtrain as zt
    from zmqtrain.programs import load_program, parse_arguments

    program = load_program("text", parse_arguments(case.program_arguments))
    file = hub_folder(folder) / "model.safetensors"
    return program.evaluate(zt.load_model(file, like=program.init(0)))["loss"]


def run_rows(star: Star, folder: Path, case: Case, seconds: float, schedule: Sequence[Fault]) -> list[dict[str, Any]]:
    """Train the same units in peace and under the schedule; return a row of each."""
    units = case.units(seconds)
    rows, quiet = [], float("nan")
    for name, faults in (("in peace", ()), ("under faults", tuple(schedule))):
        _say(f"{name}: {units} units, {len(faults)} faults")
        outcome = play(star, folder / name.replace(" ", "-"), case, units, faults, seconds)
        quiet = quiet if faults else outcome.loss
        change = outcome.loss / quiet - 1
        trouble = sum(bool(event.trouble) for event in outcome.events)
        met = outcome.audit.goodput >= GOODPUT_BAR and abs(change) <= LOSS_BAR and not outcome.faults and outcome.ended
        for fault in outcome.faults[:20]:
            _say(f"ledger: {fault}")
        rows.append({
            "run": name,
            "minutes": outcome.seconds / 60,
            "ended": "by itself" if outcome.ended else "no",
            "faults": len(outcome.events) - trouble,
            "not done": trouble,
            "restarts": outcome.restarts,
            "by hand": 0,
            "computed": outcome.audit.computed,
            "goodput": outcome.audit.goodput,
            "loss": outcome.loss,
            "to peace": change,
            "versions": outcome.history.last,
            "acknowledged": outcome.audit.acknowledged,
            "unheard": outcome.audit.unheard,
            "ledger": "exactly once" if not outcome.faults else f"{len(outcome.faults)} faults",
            "sums": len(outcome.history.compared),
            "": "met" if met else "missed",
        })  # fmt: skip
    return rows


# ---------------------------------------------------------------------- one loss at a time


@dataclass(frozen=True)
class _Loss:
    what: str
    victim: str
    at: float
    """By the wall clock, as the records are."""
    back_at: float
    """When it was there again."""


def loss_rows(star: Star, folder: Path, case: Case, repeats: int) -> list[dict[str, Any]]:
    """Lose nodes and the broker one at a time, and return by kind of loss how soon aggregates come again."""
    losses: list[_Loss] = []
    line = case.broker_line(0)
    with StarRun(star, folder, line, lambda number: case.node_line(folder, number), out=sys.stderr) as run:
        run.wait_training()
        run.player.wait(2 * QUIET_SECONDS)  # the first scores are computed, and what computes them is compiled
        to_wall = time.time() - time.monotonic()
        for repeat in range(repeats):
            victim = name_of_node(repeat % case.nodes)
            losses.append(_Loss("nothing", victim, time.time(), time.time()))
            run.player.wait(2 * QUIET_SECONDS)
            at = run.player.do(Fault(0.0, "kill", victim)).began_at
            run.wait_back(victim, to_wall + at, BACK_SECONDS)
            losses.append(_Loss("killed", victim, to_wall + at, time.time()))
            run.player.wait(QUIET_SECONDS)
            unplugged = Fault(0.0, "unplug", victim, UNPLUGGED_SECONDS)
            at = run.player.do(unplugged).began_at
            run.player.wait(UNPLUGGED_SECONDS)
            run.player.undo(unplugged)
            run.wait_back(victim, time.time(), BACK_SECONDS)
            losses.append(_Loss("unplugged", victim, to_wall + at, time.time()))
            run.player.wait(QUIET_SECONDS)
            lives = len(run.services[BROKER].lives)
            run.player.do(Fault(0.0, "kill", BROKER))
            ready = to_wall + run.wait_restarted(BROKER, lives, BACK_SECONDS)
            losses.append(_Loss("broker killed", BROKER, ready, ready))
            run.player.wait(2 * QUIET_SECONDS)
        hub = [record for life in lives_of(record_of(folder, BROKER)) for record in _timed(life)]
        nodes = {
            name: [record for life in lives_of(record_of(folder, name)) for record in _timed(life)]
            for name in run.nodes
        }
    return [row for what in ("nothing", *BARS) for row in _loss_row(what, case, losses, hub, nodes)]


def _timed(life: Sequence[Record]) -> list[Record]:
    """Return the records of a life with the time of the wall clock in place of their own."""
    began = next(record["began"] for record in life if "began" in record)
    return [{**record, "seconds": began + record["seconds"]} for record in life]


def _loss_row(
    what: str, case: Case, losses: Sequence[_Loss], hub: Sequence[Record], nodes: dict[str, list[Record]]
) -> list[dict[str, Any]]:
    releases = [record["seconds"] for record in hub if record["kind"] == "release"]
    befell = [loss for loss in losses if loss.what == what]
    until = [next((at for at in releases if at >= loss.at), np.inf) - loss.at for loss in befell]
    noticed = [
        next((r["seconds"] for r in hub if r["kind"] == "membership" and r["node"] == loss.victim
              and r["what"] == "lost" and r["seconds"] >= loss.at), np.inf) - loss.at
        for loss in befell
    ]  # fmt: skip
    gaps = [_gap(records, loss, case) for loss in befell for name, records in nodes.items() if name != loss.victim]
    if not befell:
        return []
    bar = BARS.get(what)
    met = bar is None or (max(until) <= bar and max(gaps) <= GAP_BAR)
    return [{
        "release": case.release,
        "lost": what,
        "times": len(befell),
        "aggregate after s": min(until),
        "median": statistics.median(until),
        "max": max(until),
        "bar": bar,
        "noticed after s": statistics.median(noticed) if what in ("killed", "unplugged") else None,
        "survivors' gap, steps": max(gaps),
        "its bar": GAP_BAR,
        "": "met" if met else "missed",
    }]  # fmt: skip


def _gap(records: Sequence[Record], loss: _Loss, case: Case) -> float:
    """Return by how many steps a survivor's longest pause around a loss is longer than its usual one."""
    steps = [record["seconds"] for record in records if record["kind"] == "step"]
    pauses = [(after - before, after) for before, after in pairwise(steps)]
    usual = statistics.median(pause for pause, _ in pauses)
    around = [pause for pause, after in pauses if loss.at <= after <= loss.at + 2 * QUIET_SECONDS]
    return max(0.0, max(around, default=np.inf) - usual) / usual


# ---------------------------------------------------------------------- the command


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--what", nargs="+", choices=("run", "losses"), default=["run", "losses"])
    parser.add_argument("--minutes", type=float, default=20.0, help="of the run under faults (default %(default)s)")
    parser.add_argument("--nodes", type=int, default=6, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default %(default)s)")
    parser.add_argument("--faults", nargs="+", default=list(KINDS), help="kinds of faults of nodes (default: all)")
    parser.add_argument("--mean-seconds", type=float, default=12.0, help="between two of them (default %(default)s)")
    parser.add_argument("--broker-kills", type=int, default=2, help="how many (default %(default)s)")
    parser.add_argument("--pipeline", type=int, default=0, help="PCs of one pipeline; 0: whole models (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each loss (default %(default)s)")
    parser.add_argument("--node-checkpoints", action="store_true", help="nodes keep checkpoints, and go on from them")
    parser.add_argument("--folder", help="where to leave records, logs and checkpoints (default: nowhere)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(arguments)
    try:
        options.faults = check_kinds(options.faults)
    except ZmqTrainError as error:
        parser.error(str(error))
    if options.nodes < 3 or not options.minutes > 0 or options.repeats < 1:
        parser.error("there are at least 3 nodes, some minutes, and 1 repeat")
    return options


def main() -> None:
    """Do what the command line asks for, and print it."""
    options = read_options(sys.argv[1:])
    case = Case(options.nodes, node_checkpoints=options.node_checkpoints, pipeline=options.pipeline)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        try:
            with Star(options.nodes, BITS_PER_SECOND) as star:
                if "run" in options.what:
                    names = [name_of_node(number) for number in range(options.nodes)]
                    seconds = 60 * options.minutes
                    schedule = draw_schedule(
                        options.seed, seconds, names, options.faults,
                        mean_seconds=options.mean_seconds, broker_faults=options.broker_kills,
                    )  # fmt: skip
                    of_run = run_rows(star, folder, case, seconds, schedule)
                    print_table(of_run, f"{options.nodes} nodes, {options.minutes:g} minutes, seed {options.seed}")
                    rows += of_run
                if "losses" in options.what:
                    of_losses = []
                    for rule in RULES:
                        of_rule = replace(case, release=rule, every=LOSS_EVERY, delay=LOSS_DELAY)
                        of_losses += loss_rows(star, folder / f"losses-{rule}", of_rule, options.repeats)
                    print_table(of_losses, "one loss at a time")
                    rows += of_losses
        except (RuntimeError, ZmqTrainError) as error:
            raise SystemExit(f"chaos: {error}") from error
    if options.json:
        write_json(options.json, rows)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
