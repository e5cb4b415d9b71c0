"""The demo (`bin/demo`): several paced nodes train one language model, then one trains alone.

Rule 1: all runs have the same program, seed, seconds and pace per node; alone means plain local training, with nothing
compressed, delayed or shared. The ideal is one computer with the batch of all nodes and no network, at the same pace.
Rule 2: every figure stands with a note of what is emulated.
Rule 3: every run has its best learning rate of one grid (RATES).
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.box import HEAVY_HEAD
from rich.table import Table

from zmqtrain.cli.display import Display, Terminal, format_bytes, format_count, format_number, log_to_stderr, table_of
from zmqtrain.cli.ending import first_interrupt
from zmqtrain.cli.local import LOOK_SECONDS, Federation
from zmqtrain.cli.page import what_is_missing
from zmqtrain.cli.settings import LogOptions, command, make_folder
from zmqtrain.core.errors import ConfigError, ZmqTrainError
from zmqtrain.core.installed import how_to_install
from zmqtrain.core.settings import RunSettings, require
from zmqtrain.monitor.curves import SMOOTHED, first_at, smooth
from zmqtrain.monitor.records import write_records
from zmqtrain.monitor.run_tables import load_all
from zmqtrain.protocol.messages import Roster
from zmqtrain.report.contents import write_report

PROGRAM = "zmqtrain demo"
START_SECONDS = 90.0
BATCH = 2
"""Windows a node and step: so few that the mean of three nodes' deltas is worth nearly three times one node's."""
RATES = {"together": 0.004, "alone": 0.002, "ideal": 0.002}
"""The best of .001, .002, .004 and .008 for each run (three nodes, in virtual time): a mean of AdamW's deltas takes a
higher rate than one batch as large as those of all nodes."""
SHARED = RunSettings(
    program="text",
    initial="founder",  # as the run of one node begins
)
ALONE = replace(SHARED, every=1, delay=1, fragments=1, codec="float32", broadcast_codec="float32", outer="sgd:rate=1")
"""With these, the run of a single node is the training it would do without a broker, step for step."""
SCORES = 32
"""How often a run is scored, evenly: the node that scores trains meanwhile nothing, a small share of every run."""
NOT_SHARED = "nothing"
KEPT_PACE = 0.8
REPORT = "report.html"
COLOURS = {"federation": "#0b6e99", "alone": "#c2571a", "ideal": "#7a7a7a"}


@dataclass(frozen=True, kw_only=True)
class DemoConfig(LogOptions):
    """Train a language model on real text with several nodes on this PC, then with one alone, and draw their curves.

    Beside them is the ideal: one computer with the batch of all nodes and no network.

    Every node is paced to a fixed time per step, as if it had a PC of its own: otherwise the processes would only share
    this PC's cores, and several nodes would compute no more than one.
    """

    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path()
    """Where demo.png, demo.json and report.html are written."""
    nodes: int = 3
    """How many nodes the federation has."""
    seconds: float = 80.0
    """How long each of the two runs trains."""
    pace_seconds: float = 0.05
    """Every step of every node takes at least so long."""
    data: str = ""
    """A text file to train on; empty: the source of Python's standard library."""
    page: bool = True
    """Show the two runs in a browser, at the address that the first line says; the page ends with the demo."""

    def __post_init__(self) -> None:
        require("nodes", self.nodes, 2)
        require("seconds", self.seconds, 5)
        require("pace_seconds", self.pace_seconds, 0)


@dataclass(frozen=True)
class Point:
    """One held-out score: seconds since training began, samples in the shared model, its loss."""

    seconds: float
    samples: int
    loss: float


@dataclass(frozen=True)
class Curve:
    """The figures of one run. steps, bytes_sent, bytes_received: of all its nodes together."""

    label: str
    nodes: int
    points: tuple[Point, ...]
    samples: int
    steps: int
    seconds: float
    contributions: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def losses(self) -> tuple[float, ...]:
        """The held-out loss at each point, smoothed as in `monitor.curves`."""
        return tuple(smooth([point.seconds for point in self.points], [point.loss for point in self.points]).tolist())

    @property
    def loss(self) -> float:
        """The held-out loss at the last point, smoothed; NaN if there is none."""
        return self.losses[-1] if self.points else math.nan

    def kept_pace(self, pace_seconds: float) -> float:
        """Which part of the steps that the pace allows the nodes have made: far below 1, this PC was too busy."""
        return self.steps * pace_seconds / (self.nodes * self.seconds) if self.seconds else 0.0

    def seconds_to(self, loss: float) -> float:
        """When the smoothed held-out loss first was at or below `loss` (linear between two points), NaN if never."""
        return first_at([point.seconds for point in self.points], self.losses, loss)


class Recorder:
    """Collects the curve of a run from its rosters.

    Time begins when the first node trains: its steps at this pace before the first roster that shows any. While others
    still compile, the federation's time runs. A score's time and samples are those of its version, linear between two
    rosters.
    """

    def __init__(self, label: str, nodes: int, pace_seconds: float = 0.0) -> None:
        self.label, self.nodes, self.pace_seconds = label, nodes, pace_seconds
        self.began: float | None = None
        self._points: list[Point] = []
        self._score_version = -1
        self._last: Roster | None = None
        self._seen: list[tuple[int, float, int]] = []  # (version, seconds, samples) of each roster

    def __call__(self, roster: Roster) -> None:
        steps = max((int(member.get("step", 0)) for member in roster.members), default=0)
        if self.began is None and steps > 0:
            before = self._seen[-1][1] if self._seen else -math.inf
            self.began = max(before, roster.seconds - steps * self.pace_seconds)
        self._seen.append((roster.version, roster.seconds, roster.samples))
        if self.began is None:
            return
        if len(roster.members) >= self.nodes:
            self._last = roster
        if roster.score_version > self._score_version and "loss" in roster.scores:
            self._score_version = roster.score_version
            versions, seconds, samples = zip(*self._seen, strict=True)
            at = np.interp(roster.score_version, versions, seconds) - self.began
            count = round(float(np.interp(roster.score_version, versions, samples)))
            self._points.append(Point(max(0.0, float(at)), count, roster.scores["loss"]))

    def curve(self) -> Curve:
        last = self._last
        if last is None or self.began is None:
            raise ZmqTrainError(f"the run {self.label!r} did not begin: its nodes trained nothing")
        names = ("step", "bytes_sent", "bytes_received")
        steps, sent, received = (sum(int(member.get(name, 0)) for member in last.members) for name in names)
        return Curve(
            label=self.label,
            nodes=self.nodes,
            points=tuple(self._points),
            samples=last.samples,
            steps=steps,
            seconds=last.seconds - self.began,
            contributions=last.contributions,
            bytes_sent=sent,
            bytes_received=received,
        )


def pace_sentence(pace_seconds: float) -> str:
    return f"each node paced to one step per {1000 * pace_seconds:.0f} ms, as on a PC of its own"


def ideal_sentence(nodes: int) -> str:
    """Say what the ideal is, and what of it is emulated."""
    return (
        f"one computer with the batch of all {nodes} nodes and no network, computed at full speed; "
        "its seconds are steps times the pace"
    )


def _run(config: DemoConfig) -> int:
    figure_type = _load_matplotlib()
    make_folder(config.output, "--output")
    log_to_stderr(config.verbose)
    pause = config.seconds / SCORES
    shared = replace(SHARED, program_arguments=_arguments("together", config), evaluate_seconds=pause)
    shared = replace(shared, start_nodes=config.nodes)
    alone = replace(ALONE, program_arguments=_arguments("alone", config), evaluate_seconds=pause)
    paced, together_label = pace_sentence(config.pace_seconds), f"{config.nodes} nodes together"
    curves = []
    with tempfile.TemporaryDirectory(prefix="zmqtrain-demo-") as place, contextlib.ExitStack() as stack:
        records, ideal_record = Path(place) / "records", Path(place) / "ideal.jsonl"
        records.mkdir()
        if config.page:
            print(stack.enter_context(page_of(records)), flush=True)
        print(f"{together_label}, then one alone, {config.seconds:.0f} s each; {paced}", flush=True)
        for label, settings, nodes in ((together_label, shared, config.nodes), ("one node alone", alone, 1)):
            curve = _train(label, settings, nodes, config, records)
            if curve is None:
                return 0
            curves.append(curve)
        print(f"now the ideal: {ideal_sentence(config.nodes)}")
        curves.append(_compute_ideal(config, ideal_record))
        _write_report(config, [records, ideal_record], [curve.label for curve in curves])
    together, single, ideal = curves
    Terminal().print(summary_table(together, single, ideal))
    print(f"({paced})")
    if (kept := min(curve.kept_pace(config.pace_seconds) for curve in curves)) < KEPT_PACE:
        print(
            f"note: this PC was too busy to keep the pace ({kept:.0%} of the steps were made), so the nodes slowed "
            "each other down, which PCs of their own would not: close other programs, or give more --pace-seconds"
        )
    runs = [asdict(curve) | {"smoothed_losses": curve.losses} for curve in (together, single, ideal)]
    values = {"pace_seconds": config.pace_seconds, "note": paced, "ideal": ideal_sentence(config.nodes), "runs": runs}
    with _written(config.output / "demo.json") as path:
        path.write_text(json.dumps({**values, "settings": shared.to_dict()}, indent=1) + "\n")
    draw(figure_type, together, single, ideal, config.pace_seconds, config.output / "demo.png")
    print(f"wrote {config.output / 'demo.png'}, {config.output / 'demo.json'} and {config.output / REPORT}")
    print(speed_sentence(together, single, ideal))
    return 0


@contextlib.contextmanager
def page_of(records: Path) -> Iterator[str]:
    """Have the page of a folder of records in a process of its own; give the line that says where it is, or why not."""
    if missing := what_is_missing():
        yield f"no page: {missing}"
        return
    command = [sys.executable, "-m", "zmqtrain.cli", "page", str(records), "--follow-stdin"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal is for the demo, which ends the page
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        said = process.stdout.readline().strip()
        try:
            yield f"{said} (it ends with the demo; --no-page: without)" if said else "no page: it did not start"
        finally:
            process.stdin.close()


def _write_report(config: DemoConfig, places: Sequence[Path], labels: Sequence[str]) -> None:
    """Write the report of the runs that these records hold, with these names."""
    notes = (
        f"Pace: {pace_sentence(config.pace_seconds)}.",
        f"The ideal: {ideal_sentence(config.nodes)}.",
        "One node alone, and the ideal, train as they would without a broker: the bytes of their runs go to a broker "
        "on this PC, and need not be sent.",
    )
    runs = load_all(places)
    for run, label in zip(runs, labels, strict=True):
        run.label = label
    write_report(runs, config.output / REPORT, "The demo of zmqtrain", notes)


def _arguments(run: str, config: DemoConfig) -> str:
    batch = BATCH * config.nodes if run == "ideal" else BATCH
    return f"batch={batch},rate={RATES[run]:g}" + (f",data={config.data}" if config.data else "")


def _compute_ideal(config: DemoConfig, record: Path) -> Curve:
    """One computer with the batch of all nodes, computed as fast as this PC can: a step takes the pace in its curve.

    record: the file for its records.
    """
    from zmqtrain.sim.run import simulate  # imports jax: not for --help
    from zmqtrain.sim.scenario import Scenario, SimNode

    settings = replace(ALONE, program_arguments=_arguments("ideal", config))
    node = SimNode(name="ideal", step_seconds=config.pace_seconds)
    scenario = Scenario(
        settings=settings, nodes=(node,), evaluate_seconds=config.seconds / SCORES, max_seconds=config.seconds
    )
    result = simulate(scenario)
    write_records(record, result.records)
    return Curve(
        label="ideal",
        nodes=1,
        points=tuple({point.seconds: point for point in (Point(*one) for one in result.curve())}.values()),
        samples=result.samples,
        steps=result.steps,
        seconds=config.seconds,
    )


def _train(label: str, settings: RunSettings, nodes: int, config: DemoConfig, record: Path) -> Curve | None:
    """One run of `config.seconds`, counted from when the first node trains; None if it was interrupted.

    record: the folder for its records; those of an earlier run in it get other names.
    """
    recorder = Recorder(label, nodes, config.pace_seconds)
    federation = Federation(settings, nodes, pace_seconds=config.pace_seconds, record=record, watch=recorder)
    with federation:
        display = Display(federation, f"{label}: {pace_sentence(config.pace_seconds)}")
        with first_interrupt(lambda: display.say("stopping (Ctrl-C again to quit at once)")) as interrupted, display:
            latest = time.monotonic() + START_SECONDS + config.seconds
            while not interrupted() and not _is_over(recorder, federation.roster, config.seconds):
                if gone := federation.departures():
                    raise ZmqTrainError(f"the demo cannot go on: {gone[0]}")
                if time.monotonic() > latest:
                    raise ZmqTrainError(f"the nodes did not begin to train within {START_SECONDS:.0f} s")
                time.sleep(LOOK_SECONDS)
            federation.broker.stop()  # the curve ends here: what a node would still send is not in it
            federation.kill()
    return None if interrupted() else recorder.curve()


def _is_over(recorder: Recorder, roster: Roster | None, seconds: float) -> bool:
    return roster is not None and recorder.began is not None and roster.seconds - recorder.began >= seconds


def _load_matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "the demo draws with matplotlib, which is not installed (bin/demo installs it by itself). Type:  "
            f"{how_to_install('plot')}"
        ) from error
    return Figure


# ---------------------------------------------------------------------- what it came to


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Path]:
    try:
        yield path
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another folder with --output") from error


def speed_sentence(together: Curve, single: Curve, ideal: Curve) -> str:
    """Say how many times as fast as one node the nodes reach the loss that one ends with, beside the ideal."""
    if not single.points:
        return "speed-up over one node: not known, as it was never scored: give more --seconds"
    loss, alone = single.loss, single.points[-1].seconds
    ours, best = together.seconds_to(loss), ideal.seconds_to(loss)
    text = f"{single.label} ends with a loss of {format_number(loss, 3)} after {format_number(alone, 0)} s; "
    if not math.isfinite(ours):
        return f"{text}{together.label} did not reach it"
    text += f"{together.label} reach it after {format_number(ours, 1)} s\nspeed-up over one node: {alone / ours:.2f}"
    if math.isfinite(best):
        text += f", {best / ours:.0%} of the ideal ({alone / best:.2f}: after {format_number(best, 1)} s)"
    return text


def summary_table(together: Curve, single: Curve, ideal: Curve) -> Table:
    curves, reached = (together, single, ideal), single.loss
    rows = (
        ("held-out loss at the end", *(format_number(curve.loss, 4) for curve in curves)),
        ("tokens trained on", *(format_count(curve.samples) for curve in curves)),
        ("tokens per second", *(format_count(curve.samples_per_second) for curve in curves)),
        (
            f"seconds to loss {format_number(reached, 3)}",
            format_number(together.seconds_to(reached), 0),
            format_number(single.points[-1].seconds if single.points else math.nan, 0),
            format_number(ideal.seconds_to(reached), 0),
        ),
        ("deltas shared", f"{together.contributions}", NOT_SHARED, NOT_SHARED),
        ("sent by all nodes", format_bytes(together.bytes_sent), NOT_SHARED, NOT_SHARED),
        ("received by all nodes", format_bytes(together.bytes_received), NOT_SHARED, NOT_SHARED),
    )
    title = "held-out loss in nats per byte"
    caption = f"losses are smoothed: each is that of a line through {SMOOTHED} scores over log(seconds)"
    labels = ("", *(curve.label for curve in curves))
    return table_of(labels, rows, left="", title=title, caption=caption, box=HEAVY_HEAD, pad_edge=True)


def draw(figure_type: Any, together: Curve, single: Curve, ideal: Curve, pace_seconds: float, path: Path) -> None:
    """Draw held-out loss against seconds and against tokens, scores as dots and smoothed as lines, to `path`.

    figure_type: matplotlib's Figure. Raises ConfigError if the file cannot be written.
    """
    figure = figure_type(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, word in zip(panels, ("seconds", "samples"), strict=True):
        for colour, curve in zip(COLOURS.values(), (together, single, ideal), strict=True):
            scale = 1 if word == "seconds" else 1e6
            x = [getattr(point, word) / scale for point in curve.points]
            axes.plot(x, [point.loss for point in curve.points], ".", color=colour, alpha=0.35)
            axes.plot(x, curve.losses, "--" if curve is ideal else "-", color=colour, label=curve.label)
        if math.isfinite(single.loss):
            axes.axhline(single.loss, color=COLOURS["alone"], linewidth=0.8, linestyle=":")
        axes.set_xlabel("seconds" if word == "seconds" else "million tokens in the model")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.1f}")
        axes.yaxis.set_minor_formatter("{x:.1f}")
        axes.grid(True, which="both", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out loss (nats per byte)")
    panels[0].legend(frameon=False)
    sent = f"{format_bytes(together.bytes_sent)} sent and {format_bytes(together.bytes_received)} received by all nodes"
    heading = f"{together.label} against {single.label}: {pace_sentence(pace_seconds)}; {sent}"
    figure.suptitle(
        f"{heading}\nideal: {ideal_sentence(together.nodes)}\n{speed_sentence(together, single, ideal)}", fontsize=9
    )
    with _written(path):
        figure.savefig(path, dpi=130)


main = command(DemoConfig, PROGRAM, _run)

if __name__ == "__main__":
    sys.exit(main())
