"""The pictures of a report: SVG by matplotlib, as text to put into a page.

Rule 1: a picture holds few points: lines are thinned, so that a run of hours takes no more than one of minutes.
Rule 2: a name is text: nothing in it is read as mathematics or markup, and it is cut to LABEL_LENGTH characters.
Rule 3: colours differ in lightness too, and lines have marks, so that a black and white print can be read.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.installed import how_to_install
from zmqtrain.monitor.curves import thin
from zmqtrain.report.summary import Summary

COLOURS = ("#0b6e99", "#c2571a", "#3f7d20", "#7a3b8f", "#946b00", "#b0204a", "#4a5a6a", "#1f9e89")
"""Of one run after another, or one node after another."""
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
LABEL_LENGTH = 24
LINE_POINTS, THIN_POINTS = 400, 120
MOST_LEGEND, MOST_ROWS = 12, 64
EVENT_COLOURS = {"lost": "#b0204a", "killed": "#b0204a", "cut": "#b0204a", "quarantined": "#946b00"}
STYLE = {
    "svg.fonttype": "none",  # text stays text: a reader of the page finds and selects it
    "svg.hashsalt": "zmqtrain",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


_SHORT = re.compile(r"(\d\.\d\d)\d+")  # a hundredth of a point is finer than any screen


def load_matplotlib() -> Any:
    """Return matplotlib. Raises ConfigError, with what to type, where it is not installed."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError(
            f"a report draws with matplotlib, which is not installed. Type:  {how_to_install('plot')}"
        ) from error
    return matplotlib


def label_of(name: str) -> str:
    """Return a name for a picture: printable, short, and shown even if it begins with "_", which matplotlib hides."""
    text = "".join(one if one.isprintable() else "?" for one in name[: LABEL_LENGTH + 1])
    text = text if len(name) <= LABEL_LENGTH else text[: LABEL_LENGTH - 1] + "…"
    return f" {text}" if text.startswith("_") else text


@contextmanager
def _figure(width: float, height: float, columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """Give a figure of inches, and its axes in one row."""
    matplotlib = load_matplotlib()
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)[0]
        yield figure, axes if columns > 1 else axes[0]


def _svg(figure: Any) -> str:
    """Return a figure as an element of HTML, without what two of them would have twice."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    inside = text[text.index(">", text.index("<svg")) + 1 :]
    inside = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", inside, flags=re.DOTALL)
    inside = re.sub(r'<g id="[^"]*">', "<g>", inside)
    inside = re.sub(r">\s+<", "><", inside)
    inside = re.sub(r' (?:d|x|y)="[^"]*"', lambda one: _SHORT.sub(r"\1", one[0]), inside)
    width, height = (72 * inches for inches in figure.get_size_inches())
    return f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true">{inside}'


def _draw_losses(axes: Any, summaries: Sequence[Summary], place: Callable[[Summary], Any], scale: float) -> None:
    for colour, mark, one in zip(cycle(COLOURS), cycle(MARKS), summaries):
        x, losses = np.asarray(place(one), np.float64) / scale, one.evaluations["loss"]
        label = label_of(one.label) if len(summaries) > 1 else "shared parameters, held-out"
        if len(x) == len(one.losses) and np.isfinite(x).any():
            axes.plot(*thin(x, losses, LINE_POINTS), ".", color=colour, alpha=0.35, markersize=4)
            line_x, line_y = thin(x, one.losses, LINE_POINTS)
            every = max(1, len(line_x) // 8)
            axes.plot(
                line_x, line_y, color=colour, linewidth=2.2, marker=mark, markevery=every, markersize=5, label=label
            )


def _loss_axis(axes: Any, summaries: Sequence[Summary]) -> None:
    values = np.concatenate([one.evaluations["loss"] for one in summaries])
    if values.size and values.min() > 0 and values.max() > 3 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}" if values.max() < 20 * values.min() else "")


def _scale(most: float) -> tuple[float, str]:
    for scale, word in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand ")):
        if most >= 3 * scale:
            return scale, word
    return 1.0, ""


def draw_losses(summaries: Sequence[Summary]) -> str:
    """Draw held-out losses against seconds, samples and bytes; of one run with its nodes' training losses, thin."""
    with _figure(11, 3.9, 3) as (figure, (by_seconds, by_samples, by_bytes)):
        if len(summaries) == 1:
            _draw_training_losses(by_seconds, summaries[0])
        _draw_losses(by_seconds, summaries, lambda one: one.eval_seconds, 1.0)
        most = max((float(one.evaluations["samples"].max()) for one in summaries if one.evaluations.rows), default=0.0)
        scale, word = _scale(most)
        _draw_losses(by_samples, summaries, lambda one: one.evaluations["samples"], scale)
        _draw_losses(by_bytes, summaries, lambda one: one.bytes_at(one.eval_seconds), 1e6)
        for axes, text in (
            (by_seconds, "seconds"),
            (by_samples, f"{word}samples in the model"),
            (by_bytes, "MB, both ways"),
        ):
            axes.set_xlabel(text)
            _loss_axis(axes, summaries)
        by_seconds.set_ylabel("loss")
        _legend(by_seconds)
        return _svg(figure)


def _draw_training_losses(axes: Any, one: Summary) -> None:
    table = one.steps if one.steps.rows else one.members
    for number, node in enumerate(one.nodes[:MOST_ROWS]):
        rows = table.of_node(node.name)
        x, y = thin(rows["seconds"] - one.began, rows["loss"], THIN_POINTS)
        label = "each node, training" if number == 0 and x.size else None
        axes.plot(x, y, color="#8a97a3", linewidth=0.6, alpha=0.7, label=label)


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if 0 < len(handles) <= MOST_LEGEND:
        axes.legend(handles, labels, fontsize=8)


def draw_presence(one: Summary) -> str:
    """Draw when each node was here, as bars, and its faults as marks."""
    names = [node.name for node in one.nodes][:MOST_ROWS]
    with _figure(11, 0.9 + 0.24 * max(2, len(names))) as (figure, axes):
        place = {name: number for number, name in enumerate(names)}
        for bar in one.presences:
            if bar.node in place:
                axes.barh(place[bar.node], bar.end - bar.begin, left=bar.begin, height=0.62, color="#9cc3d5")
        for what in sorted({fault.what for fault in one.faults}):
            points = [
                (fault.seconds, place[fault.node]) for fault in one.faults if fault.what == what and fault.node in place
            ]
            if points:
                number = sorted({fault.what for fault in one.faults}).index(what)
                colour = EVENT_COLOURS.get(what, "#4a5a6a")
                axes.plot(
                    *zip(*points, strict=True), MARKS[number % 8], color=colour, markersize=6, label=what, linestyle=""
                )
        axes.set_yticks(range(len(names)), [label_of(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(min(0.0, *(bar.begin for bar in one.presences)) if one.presences else 0.0, max(one.seconds, 1e-9))
        axes.set_xlabel("seconds")
        axes.grid(axis="y", visible=False)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            axes.legend(handles, labels, fontsize=8, ncols=6, loc="lower left", bbox_to_anchor=(0, 1))
        return _svg(figure)


def draw_rates(summaries: Sequence[Summary]) -> str:
    """Draw the samples per second of all nodes, and the bytes of all nodes, against seconds."""
    with _figure(11, 3.0, 2) as (figure, (rates, traffic)):
        for colour, one in zip(cycle(COLOURS), summaries):
            rates.plot(*thin(*one.rates(), LINE_POINTS), color=colour, label=label_of(one.label))
            at, total = one.traffic()
            traffic.plot(*thin(at, total / 1e6, LINE_POINTS), color=colour, label=label_of(one.label))
        for axes, text in ((rates, "samples per second, all nodes"), (traffic, "MB so far, both ways")):
            axes.set_ylabel(text)
            axes.set_xlabel("seconds")
            axes.set_ylim(bottom=0)
            axes.set_xlim(0, max([one.seconds for one in summaries] + [1e-9]))
        if len(summaries) > 1:
            _legend(rates)
        return _svg(figure)


def draw_lateness(summaries: Sequence[Summary]) -> str:
    """Draw how many versions behind the deltas were, and how long after the first of their round they came."""
    with _figure(11, 2.8, 2) as (figure, (stale, late)):
        most = max((int(one.deltas["staleness"].max()) for one in summaries if one.deltas.rows), default=0)
        bins = np.arange(0, min(most, 40) + 2) - 0.5
        width = 0.8 / max(1, len(summaries))
        for number, (colour, one) in enumerate(zip(cycle(COLOURS), summaries)):
            if not one.deltas.rows:
                continue
            counts, _ = np.histogram(np.minimum(one.deltas["staleness"], 40), bins)
            at = np.arange(len(counts)) + (number - (len(summaries) - 1) / 2) * width
            stale.bar(at, 100 * counts / one.deltas.rows, width, color=colour, label=label_of(one.label))
            times = np.sort(one.deltas["late"][np.isfinite(one.deltas["late"])])
            if times.size:
                late.plot(*thin(1000 * times, np.linspace(0, 100, times.size), LINE_POINTS), color=colour)
        stale.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        stale.set_xlabel("versions behind" + (" (40: or more)" if most >= 40 else ""))
        stale.set_ylabel("% of deltas")
        late.set_xlabel("ms after the first delta of the round")
        late.set_ylabel("% of deltas, up to then")
        if len(summaries) > 1:
            _legend(stale)
        return _svg(figure)
