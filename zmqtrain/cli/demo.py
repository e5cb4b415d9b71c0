"""Show what a federation gains: several paced nodes train one language model, then one trains alone: `bin/demo`.

Rule 1: both runs have the same program, seed, seconds and pace per node; alone means plain local training, with nothing
compressed, delayed or shared.  Rule 2: what is emulated is said wherever a figure is shown.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from zmqtrain.cli.display import Display, format_bytes, format_count, format_number, log_to_stderr
from zmqtrain.cli.ending import first_interrupt, run_command
from zmqtrain.cli.fields import Verbose, require
from zmqtrain.cli.local import LOOK_SECONDS, Federation
from zmqtrain.cli.settings import read_config
from zmqtrain.cli.terminal import Terminal
from zmqtrain.errors import ConfigError, ZmqTrainError
from zmqtrain.protocol.messages import Roster
from zmqtrain.settings import RunSettings

__all__ = ["DemoConfig", "main", "Point", "Curve", "Recorder", "draw", "summary_table", "pace_sentence"]

PROGRAM = "zmqtrain demo"
START_SECONDS = 90.0
FLOAT_BYTES = 4
SHARED = RunSettings(
    program="text",
    program_arguments="rate=0.005",
    every=4,
    delay=2,
    outer="sgd:rate=1",
    initial="founder",  # as the run of one node begins
    evaluate_seconds=2.0,
)
ALONE = replace(SHARED, codec="float32", broadcast_codec="float32")
"""With these, the run of a single node is the training it would do without a broker, step for step."""
NOT_SHARED = "nothing"
KEPT_PACE = 0.8
COLOURS = {"federation": "#0b6e99", "alone": "#c2571a"}


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a language model on real text with several nodes on this PC, then with one alone, and draw the two curves.

    Every node is paced to a fixed time per step, as if it had a PC of its own: otherwise the processes would only share
    this PC's cores, and several nodes would compute no more than one.
    """

    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path()
    """Where demo.png and demo.json are written."""
    nodes: int = 3
    """How many nodes the federation has."""
    seconds: float = 75.0
    """How long each of the two runs trains."""
    pace_seconds: float = 0.08
    """Every step of every node takes at least so long."""
    data: str = ""
    """A text file to train on; empty: the source of Python's standard library."""
    verbose: Verbose = False
    """Log what is of use only to who looks for an error."""

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
    """What one run came to. steps, bytes_sent, bytes_received: of all its nodes together."""

    label: str
    nodes: int
    points: tuple[Point, ...]
    samples: int
    steps: int
    seconds: float
    contributions: int
    bytes_sent: int
    bytes_received: int

    @property
    def samples_per_second(self) -> float:
        """How fast the shared model has seen samples."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def loss(self) -> float:
        """The last held-out loss, NaN if there is none."""
        return self.points[-1].loss if self.points else math.nan

    def kept_pace(self, pace_seconds: float) -> float:
        """Which part of the steps that the pace allows the nodes have made: far below 1, this PC was too busy."""
        return self.steps * pace_seconds / (self.nodes * self.seconds) if self.seconds else 0.0

    def seconds_to(self, loss: float) -> float:
        """When the held-out loss first was at or below `loss` (linear between two scores), NaN if never."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.loss <= loss < before.loss:
                part = (before.loss - loss) / (before.loss - after.loss)
                return before.seconds + part * (after.seconds - before.seconds)
        return math.nan


class Recorder:
    """Collect the curve of a run from its rosters.

    Time begins with the first roster in which a node has trained; that the others still compile, in each other's way,
    is time of the federation's. A score's time and samples are those of the first roster that shows it (one a second).
    """

    def __init__(self, label: str, nodes: int) -> None:
        self.label, self.nodes = label, nodes
        self.began: float | None = None
        self._points: list[Point] = []
        self._score_version = -1
        self._last: Roster | None = None

    def __call__(self, roster: Roster) -> None:
        """Take one roster."""
        if self.began is None and any(int(member.get("step", 0)) > 0 for member in roster.members):
            self.began = roster.seconds
        if self.began is None:
            return
        if len(roster.members) >= self.nodes:
            self._last = roster
        if roster.score_version > self._score_version and "loss" in roster.scores:
            self._score_version = roster.score_version
            self._points.append(Point(roster.seconds - self.began, roster.samples, roster.scores["loss"]))

    def curve(self) -> Curve:
        """Return what was collected."""
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
    """Say what is emulated."""
    return f"each node paced to one step per {1000 * pace_seconds:.0f} ms, as on a PC of its own"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    return run_command(PROGRAM, lambda: _run(read_config(DemoConfig, PROGRAM, argv)))


def _run(config: DemoConfig) -> int:
    figure_type = _load_matplotlib()
    _check_folder(config.output)
    log_to_stderr(config.verbose)
    arguments = SHARED.program_arguments + (f",data={config.data}" if config.data else "")
    shared = replace(SHARED, program_arguments=arguments, start_nodes=config.nodes)
    alone = replace(ALONE, program_arguments=arguments)
    paced, together_label = pace_sentence(config.pace_seconds), f"{config.nodes} nodes together"
    print(f"{together_label}, then one alone, {config.seconds:.0f} s each; {paced}")
    curves = []
    for label, settings, nodes in ((together_label, shared, config.nodes), ("one node alone", alone, 1)):
        curve = _train(label, settings, nodes, config)
        if curve is None:
            return 0
        curves.append(curve)
    together, single = curves
    Terminal().print(summary_table(together, single))
    print(f"({paced})")
    if (kept := min(curve.kept_pace(config.pace_seconds) for curve in curves)) < KEPT_PACE:
        print(
            f"note: this PC was too busy to keep the pace ({kept:.0%} of the steps were made), so the nodes slowed "
            "each other down, which PCs of their own would not: close other programs, or give more --pace-seconds"
        )
    values = {"pace_seconds": config.pace_seconds, "note": paced, "runs": [asdict(curve) for curve in curves]}
    _write_json(config.output / "demo.json", {**values, "settings": shared.to_dict()})
    draw(figure_type, together, single, config.pace_seconds, config.output / "demo.png")
    print(f"wrote {config.output / 'demo.png'} and {config.output / 'demo.json'}")
    return 0


def _train(label: str, settings: RunSettings, nodes: int, config: DemoConfig) -> Curve | None:
    """One run of `config.seconds`, counted from when the first node trains; None if it was interrupted."""
    recorder = Recorder(label, nodes)
    federation = Federation(settings, nodes, pace_seconds=config.pace_seconds, watch=recorder)
    with federation:
        display = Display(lambda: federation.roster, f"{label}: {pace_sentence(config.pace_seconds)}")
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
            "the demo draws with matplotlib, which is not installed: pip install 'zmqtrain[plot]' (bin/demo does it by "
            "itself)"
        ) from error
    return Figure


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to the folder {folder} (--output): {error.strerror}") from error


# ---------------------------------------------------------------------- what it came to


def _write_json(path: Path, values: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another folder with --output") from error


def summary_table(together: Curve, single: Curve) -> Table:
    """Return the two runs side by side."""
    table = Table(title="held-out loss in nats per byte", title_justify="left")
    table.add_column("")
    table.add_column(together.label, justify="right")
    table.add_column(single.label, justify="right")
    for name, first, second in (
        ("held-out loss at the end", format_number(together.loss, 4), format_number(single.loss, 4)),
        ("tokens trained on", format_count(together.samples), format_count(single.samples)),
        ("tokens per second", format_count(together.samples_per_second), format_count(single.samples_per_second)),
        (
            f"seconds to loss {format_number(single.loss, 3)}",
            format_number(together.seconds_to(single.loss), 0),
            format_number(single.seconds, 0),
        ),
        ("deltas shared", f"{together.contributions}", NOT_SHARED),
        ("sent by all nodes", format_bytes(together.bytes_sent), NOT_SHARED),
        ("received by all nodes", format_bytes(together.bytes_received), NOT_SHARED),
    ):
        table.add_row(name, first, second)
    return table


def draw(figure_type: Any, together: Curve, single: Curve, pace_seconds: float, path: Path) -> None:
    """Draw held-out loss against seconds and against tokens, and write it to `path`.

    figure_type: matplotlib's Figure. Raises ConfigError if the file cannot be written.
    """
    figure = figure_type(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, word in zip(panels, ("seconds", "samples"), strict=True):
        for colour, curve in zip(COLOURS.values(), (together, single), strict=True):
            scale = 1 if word == "seconds" else 1e6
            x = [getattr(point, word) / scale for point in curve.points]
            axes.plot(x, [point.loss for point in curve.points], ".-", color=colour, label=curve.label)
        axes.set_xlabel("seconds" if word == "seconds" else "million tokens in the model")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.1f}")
        axes.yaxis.set_minor_formatter("{x:.1f}")
        axes.grid(True, which="both", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out loss (nats per byte)")
    panels[0].legend(frameon=False)
    sent = f"{format_bytes(together.bytes_sent)} sent and {format_bytes(together.bytes_received)} received by all nodes"
    figure.suptitle(f"{together.label} against {single.label}: {pace_sentence(pace_seconds)}\n{sent}", fontsize=11)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another folder with --output") from error


if __name__ == "__main__":
    sys.exit(main())
