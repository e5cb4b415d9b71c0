"""What the demo makes of the rosters of two runs and of the ideal: curves, a table, a plot, a speed-up."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from zmqtrain.cli import demo
from zmqtrain.cli.demo import Curve, Point, Recorder, draw, pace_sentence, speed_sentence, summary_table
from zmqtrain.core.errors import ConfigError, ZmqTrainError
from zmqtrain.protocol.messages import Roster


def roster(seconds: float, steps: list[int], loss: float, score_version: int, version: int = 0) -> Roster:
    members = tuple(
        {"peer": f"n{i}", "name": f"n{i}", "state": "live", "step": step, "bytes_sent": 100, "bytes_received": 50}
        for i, step in enumerate(steps)
    )
    scores = {"loss": loss} if score_version >= 0 else {}
    return Roster(version, members, "n0", 10 * sum(steps), 5, 0, 0, seconds, scores, score_version)


def recorded(pace_seconds: float = 0.0) -> Curve:
    recorder = Recorder("two together", 2, pace_seconds)
    recorder(roster(10.0, [0, 0], 9.0, -1))  # both still compile: the time has not begun
    recorder(roster(12.0, [46, 0], 4.0, 0))
    recorder(roster(13.0, [40, 26], 4.0, 0, 10))
    recorder(roster(14.0, [50, 36], 2.0, 20, 20))
    recorder(roster(14.5, [55], 1.0, 15, 25))
    return recorder.curve()


def curve_of(loss: Callable[[float], float], label: str, until: float = 75.0) -> Curve:
    """A curve with a score every 2.5 s."""
    points = tuple(Point(t, int(1000 * t), loss(t)) for t in np.arange(2.5, until + 1, 2.5).tolist())
    return Curve(label, 3, points, int(1000 * until), 1500, until, 3, 7, 7)


def test_time_begins_when_the_first_node_trains_and_each_score_counts_once() -> None:
    curve = recorded()
    assert curve.points == (Point(0.0, 460, 4.0), Point(2.0, 860, 2.0))
    assert (curve.seconds, curve.samples, curve.samples_per_second) == (2.0, 860, 430.0)


def test_the_steps_before_the_first_roster_that_shows_any_are_time_of_the_run() -> None:
    assert recorded(0.01).points[-1].seconds == pytest.approx(2.46)
    assert recorded(1.0).points[-1].seconds == pytest.approx(4.0)  # but none before a roster without steps


def test_a_score_belongs_to_the_time_and_the_samples_of_its_version() -> None:
    recorder = Recorder("one", 1)
    recorder(roster(10.0, [1], 0.0, -1, 0))
    recorder(roster(20.0, [101], 0.0, -1, 100))
    recorder(roster(21.0, [111], 3.0, 50, 110))
    assert recorder.curve().points == (Point(5.0, 510, 3.0),)


def test_how_far_the_pace_was_kept_is_counted_over_all_nodes() -> None:
    assert recorded().steps == 86
    assert recorded().kept_pace(0.04) == pytest.approx(86 * 0.04 / 4)


def test_the_bytes_are_those_of_all_nodes_while_all_were_there() -> None:
    assert (recorded().bytes_sent, recorded().bytes_received) == (200, 100)


def test_the_time_to_a_loss_lies_between_two_scores() -> None:
    curve = Curve("a", 1, (Point(0.0, 0, 4.0), Point(2.0, 0, 2.0)), 0, 0, 2.0, 0, 0, 0)
    assert curve.seconds_to(3.0) == 1.0
    assert math.isnan(curve.seconds_to(1.0))


def test_the_time_to_a_loss_is_not_moved_by_the_noise_of_single_scores() -> None:
    random = np.random.default_rng(0)

    def loss(seconds: float, noise: float) -> float:
        return 4.0 - 0.5 * math.log(seconds) + noise * float(random.standard_normal())

    for _ in range(20):
        curve = curve_of(lambda seconds: loss(seconds, 0.02), "noisy")
        assert curve.loss == pytest.approx(loss(75.0, 0.0), abs=0.04)
        assert curve.seconds_to(loss(25.0, 0.0)) == pytest.approx(25.0, rel=0.06)
    assert curve_of(lambda seconds: loss(seconds, 0.0), "smooth").seconds_to(loss(25.0, 0.0)) == pytest.approx(25, 1e-3)


def test_the_steep_beginning_of_a_curve_is_left_as_it_was_scored() -> None:
    curve = curve_of(lambda seconds: 9.0 if seconds < 8 else 4.0 - 0.5 * math.log(seconds), "steep")
    assert curve.losses == pytest.approx([point.loss for point in curve.points])


def test_the_last_lines_say_the_speed_up_and_the_share_of_the_ideal() -> None:
    def learnt(speed: float) -> Callable[[float], float]:
        return lambda seconds: 4.0 - 0.5 * math.log(speed * seconds)

    together, single, ideal = (
        curve_of(learnt(speed), label) for speed, label in ((2.5, "3 nodes together"), (1.0, "one"), (3.0, "ideal"))
    )
    text = speed_sentence(together, single, ideal)
    assert "speed-up over one node: 2.50, 83% of the ideal (3.00: after 25.0 s)" in text
    assert text.startswith("one ends with a loss of 1.841 after 75 s; 3 nodes together reach it after 30.0 s")
    assert speed_sentence(single, together, ideal).endswith("one did not reach it")


def test_a_run_in_which_nobody_trained_is_an_error() -> None:
    with pytest.raises(ZmqTrainError, match="did not begin"):
        Recorder("nobody", 2).curve()


def test_the_plot_and_the_table_show_all_runs_and_say_what_is_emulated(tmp_path: Path) -> None:
    figures: list[Figure] = []

    def make(**arguments: object) -> Figure:
        figures.append(Figure(**arguments))  # type: ignore[arg-type]
        return figures[-1]

    single = Curve("one alone", 1, (Point(0.0, 10, 4.0), Point(2.0, 90, 3.0)), 90, 9, 2.0, 3, 7, 7)
    ideal = Curve("ideal", 1, (Point(0.0, 10, 4.0), Point(2.0, 90, 2.0)), 90, 9, 2.0, 0, 0, 0)
    draw(make, recorded(), single, ideal, 0.06, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    title = figures[0].get_suptitle()
    assert pace_sentence(0.06) in title and "60 ms" in title and "200 B sent" in title
    assert "steps times the pace" in title and "speed-up over one node: 2.00" in title
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(recorded(), single, ideal))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (
        "two together" in text and "one alone" in text and "ideal" in text and "3.0000" in text and "smoothed" in text
    )


@pytest.mark.nightly
def test_the_ideal_has_the_batch_of_all_nodes_and_a_step_of_it_takes_the_pace(tmp_path: Path) -> None:
    config = demo.DemoConfig(nodes=3, seconds=32.0, pace_seconds=3.2)
    curve = demo._compute_ideal(config, tmp_path / "ideal.jsonl")
    batches, rest = divmod(curve.samples, 3 * demo.BATCH * 64)
    assert curve.steps in (9, 10) and curve.steps - 3 <= batches <= curve.steps and rest == 0
    assert len(curve.points) == demo.SCORES and curve.points[-1].seconds == 32.0


def test_without_matplotlib_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[plot\]'"):
        demo._load_matplotlib()


def test_the_first_line_says_where_the_page_is_and_the_page_ends_with_the_demo(tmp_path: Path) -> None:
    with demo.page_of(tmp_path) as said:
        assert said.startswith("the page is at http://127.0.0.1:") and "--no-page" in said
        address = said.split()[4]
        with urlopen(address) as answer:
            assert b"page.js" in answer.read()
    with pytest.raises(URLError):
        urlopen(address)


def test_without_the_packages_of_the_page_the_demo_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "what_is_missing", lambda: "the page needs uvicorn")
    with demo.page_of(tmp_path) as said:
        assert said == "no page: the page needs uvicorn"
