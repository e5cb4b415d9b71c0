"""Draw the summaries of `asynchrony_table.py`: one panel for each, all panels of an experiment in one picture.

Rule 1: nothing is computed here but the mean of curves; what a panel shows stands in its summary.
Rule 2: a run that failed is drawn at the edge of its panel, or named in the legend: it is never left out.
Rule 3: a method has one colour in all panels of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asynchrony_figures import Column, Curve, Figure, Summary

__all__ = ["draw_delays", "draw_curves", "draw_counts", "draw_bars"]

HIGHEST_PERCENT = 40.0
"""Where an axis of percents ends: what lies above is drawn at the edge."""
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#b04a8a", "#8a6200", "#3b3b3b", "#56a3d9", "#e0a100", "#7a4fbf", "#8fbf3f",
)  # fmt: skip
"""Of Okabe and Ito, some darkened, and two more."""
PANEL_INCHES = (5.2, 3.9)
CURVE_SECONDS = 200
"""At how many times the mean of curves is taken."""

Colours = Mapping[str, str]
"""The colour of each row by its name."""


def draw_delays(summaries: Sequence[Summary], file: Path) -> None:
    """Draw the percent over the reference against d / k, a line for each row; a short black line is a limit."""

    def draw_panel(axis: Any, summary: Summary, colours: Colours) -> None:
        columns = [column for column in summary.columns if column.place is not None]
        for name, row in summary.rows.items():
            points = _placed(row, columns)
            if all(column.place for column in columns):  # a row over its own beginning, which is the first column
                begin = row.get(summary.columns[0].name, Figure())
                points.insert(0, (0.0, replace(begin, values=(0.0,) * len(begin.values))))
            label = f"k = {name}" if summary.corner == "k" else name
            _draw_line(axis, points, label, colours[name], edge=1.0, highest=HIGHEST_PERCENT)
        for bar in summary.bars:
            if bar.place is not None:
                axis.plot([bar.place - 0.06, bar.place + 0.06], [bar.most] * 2, color="black", linewidth=2, zorder=4)
        _cut_percents(axis.set_ylim, summary, columns)
        axis.axhline(0, color="0.5", linewidth=1)
        axis.set_xlabel("d / k")
        axis.set_ylabel("held-out loss, % over the reference")

    edge = f"triangles: above {HIGHEST_PERCENT:.0f} %; crosses: diverged runs"
    note = "short black lines: the most that any k may be"
    note = f"bars: one standard deviation over seeds; {note}; {edge}"
    _draw_panels(summaries, file, draw_panel, 5, _row_names(summaries), note)


def draw_curves(summaries: Sequence[Summary], file: Path) -> None:
    """Draw the mean over seeds of the smoothed held-out loss against virtual time, with one deviation around it."""

    def draw_panel(axis: Any, summary: Summary, colours: Colours) -> None:
        means = []
        for name, curves in summary.curves.items():
            there = [curve for curve in curves.values() if curve]
            lost = len(curves) - len(there)
            label = f"{name} ({lost} of {len(curves)} without a curve)" if lost else name
            if not there:
                axis.plot([], [], color=colours[name], label=label)
                continue
            seconds, losses = _on_one_clock(there)
            mean, deviation = losses.mean(axis=0), losses.std(axis=0, ddof=min(1, len(there) - 1))
            axis.plot(seconds, mean, color=colours[name], linewidth=1.6, label=label)
            axis.fill_between(seconds, mean - deviation, mean + deviation, color=colours[name], alpha=0.15, linewidth=0)
            means.append(mean)
        if means:
            _make_logarithmic(axis, 0.93 * min(mean.min() for mean in means), 1.07 * max(mean.max() for mean in means))
        axis.set_xlabel("virtual seconds")
        axis.set_ylabel("held-out loss")

    names = [name for summary in summaries for name in summary.curves]
    _draw_panels(summaries, file, draw_panel, 2, names, "bands: one standard deviation over seeds")


def draw_counts(summaries: Sequence[Summary], file: Path) -> None:
    """Draw the figures against the number of nodes, which names the rows; a line for each column."""

    def draw_panel(axis: Any, summary: Summary, colours: Colours) -> None:
        counts = [int(name) for name in summary.rows]
        for column in summary.columns:
            figures = [row.get(column.name, Figure()) for row in summary.rows.values()]
            _draw_line(axis, list(zip(counts, figures, strict=True)), column.name, colours[column.name], edge=0.0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("nodes")

    names = [column.name for summary in summaries for column in summary.columns]
    note = "bars: one standard deviation over seeds; crosses at the bottom: diverged runs"
    _draw_panels(summaries, file, draw_panel, 2, names, note)


def draw_bars(summaries: Sequence[Summary], file: Path) -> None:
    """Draw for each method the percent over its reference as a bar, one panel for each task and condition."""
    split = []
    for summary in summaries:
        for column in (column for column in summary.columns if "%" in column.name):
            rows = {name: row for name, row in summary.rows.items() if row.get(column.name, Figure()).seeds}
            split.append(Summary(f"{summary.title}, {column.name}", summary.corner, (column,), rows))

    def draw_panel(axis: Any, summary: Summary, colours: Colours) -> None:
        (column,) = summary.columns
        places = range(len(summary.rows))
        for place, (name, row) in zip(places, summary.rows.items(), strict=True):
            figure = row[column.name]
            value = min(figure.mean, HIGHEST_PERCENT) if figure.values else 0.0
            axis.barh(place, value, height=0.65, color=colours[name])
            deviation = figure.deviation or 0.0
            if deviation and figure.mean < HIGHEST_PERCENT:
                axis.errorbar(figure.mean, place, xerr=deviation, color="0.2", capsize=2, linewidth=1)
            edge = max(value + deviation, 0.0) if value < HIGHEST_PERCENT else value
            axis.annotate(
                figure.text("+.1f"), (min(edge, HIGHEST_PERCENT), place), (4, 0),
                textcoords="offset points", va="center", fontsize=7, color="0.2",
            )  # fmt: skip
        axis.set_yticks(places, list(summary.rows), fontsize=8)
        axis.invert_yaxis()
        axis.axvline(0, color="0.5", linewidth=1)
        low, high = _cut_percents(axis.set_xlim, summary, [column])
        axis.set_xlim(low, high + 0.45 * (high - low))  # the numbers stand to the right of the bars
        axis.set_xlabel("held-out loss, %")

    across = max(1, len(split) // len(summaries))
    note = f"whiskers: one standard deviation over seeds; bars end at {HIGHEST_PERCENT:.0f} %"
    _draw_panels(split, file, draw_panel, across, _row_names(summaries), note, legend=False)


# ---------------------------------------------------------------------- what all pictures share


def _draw_panels(
    summaries: Sequence[Summary],
    file: Path,
    draw_panel: Callable[[Any, Summary, Colours], None],
    across: int,
    names: Iterable[str],
    note: str,
    legend: bool = True,
) -> None:
    """Draw each summary into an axis of one picture, so many side by side; names: of all that is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}
    across = min(across, len(summaries))
    down = -(-len(summaries) // across)
    size = (PANEL_INCHES[0] * across, PANEL_INCHES[1] * down)
    figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis, summary in zip(axes.flat, summaries, strict=False):
        draw_panel(axis, summary, colours)
        axis.set_title(summary.title.replace(": ", "\n", 1), fontsize=8.5)
        axis.grid(alpha=0.2)
        if legend:
            axis.legend(fontsize=7, framealpha=0.6)
    for axis in list(axes.flat)[len(summaries) :]:
        axis.remove()
    figure.supxlabel(note, fontsize=8, color="0.3")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _row_names(summaries: Iterable[Summary]) -> list[str]:
    return [name for summary in summaries for name in summary.rows]


def _placed(row: Mapping[str, Figure], columns: Iterable[Column]) -> list[tuple[float, Figure]]:
    found = [(column.place, row.get(column.name, Figure())) for column in columns]
    return [(place, figure) for place, figure in found if place is not None and figure.seeds]


def _draw_line(
    axis: Any,
    points: Sequence[tuple[float, Figure]],
    label: str,
    colour: str,
    edge: float,
    highest: float = math.inf,
) -> None:
    """Draw means with their deviations; at the edge a cross for failed runs, a triangle for what is above the highest.

    edge: 0 for the lower end of the axis, 1 for its upper end.
    """
    there = [(place, figure) for place, figure in points if figure.values]
    places, means = [place for place, _ in there], [figure.mean for _, figure in there]
    deviations = [figure.deviation or 0.0 for _, figure in there]
    line = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.4, "capsize": 2}
    axis.errorbar(places, means, yerr=deviations, label=label, **line)
    lost = [place for place, figure in points if figure.failed]
    above = [place for place, mean in zip(places, means, strict=True) if mean > highest]
    for marker, marked in (("x", lost), ("^", above)):
        at_edge = {"transform": axis.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        if marked:  # an empty line that is not clipped has no extent, and no layout fits it
            axis.plot(marked, [edge] * len(marked), marker, color=colour, **at_edge)


def _cut_percents(
    set_limits: Callable[[float, float], Any], summary: Summary, columns: Iterable[Column]
) -> tuple[float, float]:
    """End an axis of percents where its figures end, or at the highest percent if one lies above or failed."""
    figures = [figure for row in summary.rows.values() for column in columns if (figure := row.get(column.name))]
    ends = [end for one in figures if one.values for end in _ends(one) if end < HIGHEST_PERCENT]
    above = any(one.failed or one.mean > HIGHEST_PERCENT for one in figures)
    low, high = min(0.0, *ends, 0.0), max(1.0, *ends, *(bar.most for bar in summary.bars), 1.0)
    margin = 0.06 * (high - low)
    limits = (low - margin, HIGHEST_PERCENT if above else min(high + margin, HIGHEST_PERCENT))
    set_limits(*limits)
    return limits


def _ends(figure: Figure) -> tuple[float, float]:
    deviation = figure.deviation or 0.0
    return figure.mean - deviation, figure.mean + deviation


def _on_one_clock(curves: Sequence[Curve]) -> tuple[Any, Any]:
    """Return (seconds: float[n], losses: float[curves, n]) over the time that all curves cover, interpolated."""
    begin, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    seconds = np.linspace(begin, max(begin, end), CURVE_SECONDS)
    points = [np.array(curve, float).T for curve in curves]
    return seconds, np.array([np.interp(seconds, times, losses) for times, losses in points])


def _make_logarithmic(axis: Any, low: float, high: float) -> None:
    """Draw losses from low to high on a logarithmic scale, written as 0.2 or 1.5 and not as powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.set_ylim(low, high)
    dense = math.log10(high / low) < 1.2
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if dense else (1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
