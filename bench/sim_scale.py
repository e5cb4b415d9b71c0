"""Predict runs of 4 to 256 nodes: by the simulator, and by the formula that `zmqtrain plan` uses, side by side.

Rule 1: what is simulated is a run under its own plan, with the same machines, rules and codecs as a real one; a model
of a few fragments' blocks stands for the real one, and rates and codec times are scaled by what it is smaller: every
transfer takes as long as the real one's, but arithmetic is cheap.  Rule 2: nothing is learned: a step takes its
time and moves the parameters a little.  Rule 3: joining is left out: ports are free until all are there.
Rule 4: the simulator knows one hub; with several brokers there is the formula alone.
Rule 5: with --check, the same case is measured on the star, whose hosts share this machine's cores: the formula is told
so, and what an exchange costs them, measured in a run before; the measured figures stand beside the predicted ones.

Columns: hub, Gb/s.  k, d: the plan's.  model: steps in which the whole model is exchanged once.  age: of an aggregate
when it is applied, steps.  port: share of the hub's port that is busy, of what is reserved (the busier way).
sim_...: simulated; the others by the formula.  seconds: that the simulation took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import BLOCK_VALUES, Layout
from zmqtrain.codecs.payload import payload_size
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_FRAGMENTS, RunSettings
from zmqtrain.core.specs import parse_count, parse_rate
from zmqtrain.core.types import LeafSpec
from zmqtrain.planning.plans import RunPlan, Wish, make_plan
from zmqtrain.sim.run import simulate
from zmqtrain.sim.scenario import Scenario, SimNode
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.memory import LinkModel

from report import print_table, write_json
from shared_cores import fit_on, load_on, predict_on, work_of

__all__ = ["Simulated", "simulate_plan", "predict_cases", "check_on_star", "draw", "main"]

NODES = (4, 8, 16, 32, 64, 128, 256)
HUB_RATES = ("1gbit", "2.5gbit", "10gbit")
SHARDS = (1, 2, 4)
LATENCY_SECONDS = 0.0002
WARM_EXCHANGES, WINDOW_EXCHANGES = 2, 10
BLOCKS = 4
"""Of 4,096 values that a fragment of the small model has."""
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "scale.png"
COLOURS = ("#0072b2", "#d55e00", "#009e73")


@dataclass(frozen=True)
class Simulated:
    """What a simulated run did in its window; the names are those of `Prediction`. seconds: of real time."""

    efficiency: float
    period_steps: float
    model_period_steps: float
    age_steps: float
    port: float
    seconds: float


@dataclass
class _Window:
    """What one node saw between two steps: the times of these, and the step and age of each application between."""

    times: list[float] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)

    @property
    def period_steps(self) -> float:
        """The mean number of steps from one application to the next."""
        between = len(self.applied) - 1
        return (self.applied[-1] - self.applied[0]) / between if between > 0 else float("inf")


@dataclass
class _Gate:
    """Whether all nodes are there."""

    wanted: int
    here: int = 0

    @property
    def open(self) -> bool:
        return self.here >= self.wanted


@dataclass(frozen=True)
class _LinkOnceAllAreHere(LinkModel):
    """A link that costs nothing until the gate is open."""

    gate: _Gate = field(default_factory=lambda: _Gate(0))

    def seconds(self, size: int) -> float:
        """See LinkModel."""
        return 8 * size / self.bits_per_second if self.gate.open else 0.0


class _Still:
    """A program that learns nothing: each step moves every value a little."""

    name, sample_word = "still", "samples"
    samples_per_batch, units_per_epoch = 1, None

    def __init__(self, values: int) -> None:
        self.values = values

    def init(self, seed: int) -> Any:
        """See Program."""
        return {"w": jnp.zeros(self.values)}

    def loss(self, params: Any, batch: Any) -> Any:
        """See Program."""
        return jnp.vdot(params["w"], batch)

    def optimizer(self) -> optax.GradientTransformation:
        """See Program."""
        return optax.sgd(0.01)

    def batches(self, unit: int) -> Iterator[Any]:
        """See Program: for ever the same."""
        direction = np.random.default_rng(unit).standard_normal(self.values, np.float32)
        while True:
            yield direction

    def evaluate(self, params: Any) -> dict[str, float]:
        """See Program."""
        return {}


def simulate_plan(plan: RunPlan, seed: int = 0) -> Simulated:
    """Simulate a run of one hub under its plan. Raises ConfigError for a plan with several brokers."""
    wish, load = plan.wish, plan.load
    if wish.shards > 1:
        raise ConfigError("the simulator knows one hub; plans with several brokers are predicted by the formula alone")
    values = BLOCKS * BLOCK_VALUES
    program = _Still(values * load.fragments)
    layout = Layout((LeafSpec("w", (program.values,), "float32"),), load.fragments)
    codecs = coding_from_spec(plan.codec).of_fragment(layout, 0)
    scale = payload_size(codecs, layout.counts(0)) / load.bytes_up
    gate, windows = _Gate(wish.nodes), list[_Window]()
    begin = WARM_EXCHANGES * plan.schedule.every + 2 * plan.schedule.delay
    end = begin + WINDOW_EXCHANGES * plan.schedule.every
    random = np.random.default_rng(seed)

    class Watched(DelayedSync):
        """Holds the training thread at each exchange as long as the plan says, and takes note of the window."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            gate.here += 1
            windows.append(_Window())
            self.window = windows[-1]

        def step(self, *arguments: Any, **named: Any) -> Any:
            tracker, applied = self._tracker, self._tracker.applied
            params = super().step(*arguments, **named)
            self._clock.sleep(load.held_seconds * (tracker.applied - applied))
            if self.steps in (begin, end):
                self.window.times.append(self._clock.monotonic())
            if begin <= self.steps < end and tracker.applied > applied:
                self.window.applied.append(self.steps)
                self.window.ages.append(tracker.ages[-1])
            return params

    settings = RunSettings(
        every=plan.schedule.every,
        delay=plan.schedule.delay,
        codec=plan.codec,
        broadcast_codec=plan.broadcast_codec,
        fragments=AUTO_FRAGMENTS if load.pieces else load.fragments,
        outer=plan.outer,
        start_nodes=wish.nodes,
        initial="founder",
        shards=1,
        evaluate_seconds=0.0,
        heartbeat_seconds=5.0,
        lost_seconds=3600.0,
    )
    scenario = Scenario(
        settings=settings,
        nodes=tuple(
            # nodes offer together, but for the part of a step by which they are apart
            SimNode(step_seconds=wish.step_seconds, pauses=((0.0, wish.step_seconds * random.random()),))
            for _ in range(wish.nodes)
        ),
        link=_LinkOnceAllAreHere(8 * load.node_rate * scale, LATENCY_SECONDS, gate),
        hub_link=_LinkOnceAllAreHere(8 * load.hub_rate * scale, LATENCY_SECONDS, gate),
        node_codec_ns=1e9 * load.node_seconds / (2 * values),
        hub_codec_ns=1e9 * load.hub_seconds / ((2 * wish.nodes + 1) * values),  # checked, added; and one release
        max_seconds=(end + 3) * (wish.step_seconds + load.held_seconds),
    )
    began = time.perf_counter()
    simulate(scenario, program, make_sync=Watched)
    if unfinished := sum(len(window.times) < 2 for window in windows):
        raise ConfigError(f"{unfinished} of {wish.nodes} simulated nodes did not come to the window's end")
    seconds = statistics.fmean(window.times[1] - window.times[0] for window in windows)
    period = statistics.fmean(window.period_steps for window in windows)
    moved = wish.nodes * max(load.bytes_up, load.bytes_down) * (end - begin) / period
    return Simulated(
        efficiency=(end - begin) * wish.step_seconds / seconds,
        period_steps=period,
        model_period_steps=period * load.fragments,
        age_steps=statistics.fmean(statistics.median(window.ages or [0]) for window in windows),
        port=moved / seconds / load.hub_rate,
        seconds=time.perf_counter() - began,
    )


def predict_cases(
    wish: Wish, nodes: Sequence[int], hub_bits: Sequence[float], shards: Sequence[int], simulated: int
) -> Iterator[dict[str, Any]]:
    """Give one row per hub, number of brokers and number of nodes; with one broker, up to `simulated` nodes are."""
    for bits in hub_bits:
        for count in shards:
            for number in nodes:
                plan = make_plan(replace(wish, nodes=number, hub_bits=bits, shards=count))
                predicted = plan.prediction
                row: dict[str, Any] = {
                    "nodes": number,
                    "hub": bits / 1e9,
                    "shards": count,
                    "fragments": plan.fragments,
                    "k": plan.schedule.every,
                    "d": plan.schedule.delay,
                    "efficiency": predicted.efficiency,
                    "model": predicted.model_period_steps,
                    "age": predicted.age_steps,
                    "port": max(predicted.port_up, predicted.port_down),
                }
                if count == 1 and number <= simulated:
                    run = simulate_plan(plan)
                    row |= {
                        "sim_efficiency": run.efficiency,
                        "sim_model": run.model_period_steps,
                        "sim_age": run.age_steps,
                        "sim_port": run.port,
                        "seconds": run.seconds,
                    }
                yield row


# ---------------------------------------------------------------------- on the star


def check_on_star(wish: Wish, cores: int, steps: int) -> Iterator[dict[str, Any]]:
    """Give, for 4 and 8 nodes on the star, what is predicted, and what `efficiency.measure` measures then.

    What an exchange costs these cores is measured first, in a run of its own under a plan by the package's table; k, d
    and all that is predicted follow from that.
    """
    from efficiency import Case, measure, work_alone  # needs root, ip and tc

    for number in (4, 8):
        wish = replace(wish, nodes=number)
        plan = make_plan(replace(wish, step_on="host", codec_on="host", share=1.0, cores=float(cores)))
        codec, fragments = plan.codec, plan.fragments
        by_table = work_of(wish, codec, fragments, plan.schedule.deltas_in_flight(fragments))
        first = fit_on(load_on(wish, codec, fragments, cores, by_table), by_table, cores)
        case = Case(
            nodes=number, params=wish.parameters, codec=codec, fragments=fragments, rate=wish.hub_bits,
            every=first.every, delay=first.delay, steps=4 * (first.every + first.delay),
        )  # fmt: skip
        before = measure(case)
        work = work_alone(before)
        load = load_on(wish, codec, fragments, cores, work)
        schedule = fit_on(load, work, cores)
        expected = predict_on(load, work, schedule, cores, before["step_cpu_ms"] / 1e3)
        long = max(steps, 12 * schedule.every + 2 * schedule.delay)
        row = measure(replace(case, every=schedule.every, delay=schedule.delay, steps=long))
        yield {
            "nodes": number,
            "fragments": fragments,
            "k": schedule.every,
            "d": schedule.delay,
            "efficiency": expected.prediction.efficiency,
            "measured efficiency": row["efficiency"],
            "difference, points": 100 * (row["efficiency"] - expected.prediction.efficiency),
            "model": expected.prediction.model_period_steps,
            "measured model": row["model_period_steps"],
            "age": expected.prediction.age_steps,
            "measured age": row["age_steps"],
            "MB/step": expected.prediction.mb_up,
            "measured MB/step": row["mb_per_node_step"],
            "busy": expected.busy,
            "measured busy": row["busy"],
        }


# ---------------------------------------------------------------------- the picture, and the command


def draw(rows: Sequence[dict[str, Any]], file: Path, title: str) -> None:
    """Draw model period, age and efficiency against the nodes: a line by formula for each hub, points simulated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("model", "steps per turn of the model"),
        ("age", "age of an aggregate, steps"),
        ("efficiency", "efficiency"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(14, 4.2), constrained_layout=True)
    hubs = list(dict.fromkeys(row["hub"] for row in rows))
    styles = dict(zip(dict.fromkeys(row["shards"] for row in rows), ("-", "--", ":", "-."), strict=False))
    for axis, (column, label) in zip(axes, panels, strict=True):
        for hub, colour in zip(hubs, COLOURS, strict=False):
            for shards, style in styles.items():
                line = [row for row in rows if (row["hub"], row["shards"]) == (hub, shards)]
                name = f"hub {hub:g} Gb/s" + (f", {shards} brokers" if shards > 1 else "")
                axis.plot(
                    [row["nodes"] for row in line], [row[column] for row in line], style, color=colour, label=name
                )
                points = [row for row in line if f"sim_{column}" in row]
                axis.plot([row["nodes"] for row in points], [row[f"sim_{column}"] for row in points], "o", color=colour)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("nodes")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if column != "efficiency":
            axis.set_yscale("log")
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{title}; lines: zmqtrain plan, points: the simulator", fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Predict what the command line asks for, print the table, draw the picture; or check it on the star."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--params", default="100M", help="of the model (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=180.0, help="of a node's step (default %(default)g)")
    parser.add_argument("--codec", default="ternary", help="up and down (default %(default)s)")
    parser.add_argument("--fragments", type=int, default=0, help="0: as a plan chooses")
    parser.add_argument("--link", default="1gbit", help="of every node's port (default %(default)s)")
    parser.add_argument("--hub-link", nargs="+", default=list(HUB_RATES), help="of the hub's port, a row each")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="a row each")
    parser.add_argument("--shards", type=int, nargs="+", default=list(SHARDS), help="a row each")
    parser.add_argument("--simulate-up-to", type=int, default=64, metavar="NODES", help="more are predicted only")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help=f"draw here; 'docs' is {FIGURE.name} in docs/figures"
    )
    parser.add_argument("--check", action="store_true", help="measure 4 and 8 nodes on the star (as root), 1 Gb/s")
    parser.add_argument("--steps", type=int, default=160, help="of the star's window, at least (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(argv)
    try:
        rows, title = _rows(options)
    except (ConfigError, RuntimeError) as error:
        raise SystemExit(f"sim_scale: {error}") from error
    print_table(rows, title)
    if options.figure and not options.check:
        draw(rows, FIGURE if options.figure == Path("docs") else options.figure, title)
    if options.json:
        write_json(options.json, rows)


def _rows(options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    wish = Wish(
        parameters=parse_count(options.params, "--params"),
        nodes=4,
        step_seconds=options.step_ms / 1000,
        node_bits=parse_rate(options.link, "--link"),
        codec=options.codec,
        fragments=options.fragments,
    )
    what = f"{options.params} parameters, {options.codec}, a step of {options.step_ms:g} ms, nodes at {options.link}"
    if options.check:
        cores = len(os.sched_getaffinity(0))
        star = replace(wish, step_seconds=0.05)
        return list(
            check_on_star(star, cores, options.steps)
        ), f"{what.replace(f'{options.step_ms:g}', '50')}, on {cores} cores"
    hubs = [parse_rate(rate, "--hub-link") for rate in options.hub_link]
    return list(predict_cases(wish, options.nodes, hubs, options.shards, options.simulate_up_to)), what


if __name__ == "__main__":
    main()
