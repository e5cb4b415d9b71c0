"""What the demo makes of the rosters of two runs: curves, a table, a plot."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from zmqtrain.cli import demo
from zmqtrain.cli.demo import Curve, Point, Recorder, draw, pace_sentence, summary_table
from zmqtrain.errors import ConfigError, ZmqTrainError
from zmqtrain.protocol.messages import Roster


def roster(seconds: float, steps: list[int], loss: float, score_version: int) -> Roster:
    members = tuple(
        {"peer": f"n{i}", "name": f"n{i}", "state": "live", "step": step, "bytes_sent": 100, "bytes_received": 50}
        for i, step in enumerate(steps)
    )
    scores = {"loss": loss} if score_version >= 0 else {}
    return Roster(9, members, "n0", 10 * sum(steps), 5, 0, 0, seconds, scores, score_version)


def recorded() -> Curve:
    recorder = Recorder("two together", 2)
    recorder(roster(10.0, [0, 0], 9.0, 0))  # both still compile: the time has not begun
    recorder(roster(12.0, [46, 0], 4.0, 1))
    recorder(roster(13.0, [40, 26], 4.0, 1))
    recorder(roster(14.0, [50, 36], 2.0, 2))
    recorder(roster(14.5, [55], 1.0, 3))
    return recorder.curve()


def test_time_begins_when_the_first_node_trains_and_each_score_counts_once() -> None:
    curve = recorded()
    assert curve.points[:2] == (Point(0.0, 460, 4.0), Point(2.0, 860, 2.0))
    assert (curve.seconds, curve.samples, curve.samples_per_second) == (2.0, 860, 430.0)


def test_how_far_the_pace_was_kept_is_counted_over_all_nodes() -> None:
    assert recorded().steps == 86
    assert recorded().kept_pace(0.04) == pytest.approx(86 * 0.04 / 4)


def test_the_bytes_are_those_of_all_nodes_while_all_were_there() -> None:
    assert (recorded().bytes_sent, recorded().bytes_received) == (200, 100)


def test_the_time_to_a_loss_lies_between_two_scores() -> None:
    curve = Curve("a", 1, (Point(0.0, 0, 4.0), Point(2.0, 0, 2.0)), 0, 0, 2.0, 0, 0, 0)
    assert curve.seconds_to(3.0) == 1.0
    assert math.isnan(curve.seconds_to(1.0))


def test_a_run_in_which_nobody_trained_is_an_error() -> None:
    with pytest.raises(ZmqTrainError, match="did not begin"):
        Recorder("nobody", 2).curve()


def test_the_plot_and_the_table_show_both_runs_and_say_what_is_emulated(tmp_path: Path) -> None:
    figures: list[Figure] = []

    def make(**arguments: object) -> Figure:
        figures.append(Figure(**arguments))  # type: ignore[arg-type]
        return figures[-1]

    single = Curve("one alone", 1, (Point(0.0, 10, 4.0), Point(2.0, 90, 3.0)), 90, 9, 2.0, 3, 7, 7)
    draw(make, recorded(), single, 0.06, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    title = figures[0].get_suptitle()
    assert pace_sentence(0.06) in title and "60 ms" in title and "200 B sent" in title
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(recorded(), single))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "two together" in text and "one alone" in text and "3.0000" in text


def test_without_matplotlib_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"zmqtrain\[plot\]"):
        demo._load_matplotlib()
