"""Read the lines of results that `codec_learning.py` writes: one row for each method, as a table and as a picture.

Rule 1: nothing is trained here, and no file is written but the picture.
Rule 2: runs are told apart by their settings, never by their names; a name is for the reader.
Rule 3: a *panel* is one task with one inner optimizer, start, and number of steps and of nodes: what may be compared at
a glance.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zmqtrain.codecs.base import CODECS, TRANSFORMS

from codec_methods import EXCHANGING
from federation import ExchangeSettings
from report import print_table, read_lines

__all__ = ["Line", "identity", "read_runs", "summarise", "short_name", "show", "markdown", "draw"]

Line = dict[str, Any]
"""What is known of one run, as it is written to a file of results, or of one method: a row of the table."""

# ---------------------------------------------------------------------- lines and rows

_DEFAULTS = {one.name: one.default for one in fields(ExchangeSettings)}
_COMPARISON = ("task", "inner", "start", "schedule", "nodes", "steps", "warm_steps", "data", "arguments")
_METHOD = ("kind", "rate", *_DEFAULTS)
"""The keys of a line that tell one run from another, besides its seed: the comparison it belongs to, and the method."""


def identity(line: Line) -> str:
    """Return as text what tells a run from all others."""
    return _values(line, (*_COMPARISON, "seed", *_METHOD))


def _values(line: Line, keys: Sequence[str]) -> str:
    """Return the values of the keys as text; a setting that the line does not have yet takes its default."""
    settings = _DEFAULTS if line["kind"] in EXCHANGING else dict.fromkeys(_DEFAULTS)
    complete = {**settings, **line, "rate": float(f"{line['rate']:.6g}")}
    return json.dumps([complete[key] for key in keys], sort_keys=True)


def read_runs(files: Sequence[Path]) -> list[Line]:
    """Return the lines of all files that exist, each run once: the first counts."""
    lines: dict[str, Line] = {}
    for line in read_lines(files):
        lines.setdefault(identity(line), line)
    return list(lines.values())


def summarise(lines: Sequence[Line]) -> list[Line]:
    """Return one row per comparison and method: means and deviations over the seeds, by falling bytes.

    over_sync_%: paired by seed with the synchronous method at the best of its rates (among those with most seeds).
    """
    comparisons: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        of_method = comparisons.setdefault(_values(line, _COMPARISON), {})
        of_method.setdefault(_values(line, _METHOD), []).append(line)
    rows = []
    for methods in comparisons.values():
        references = [runs for runs in methods.values() if runs[0]["kind"] == "synchronous"]
        references = [runs for runs in references if math.isfinite(_mean(runs, "loss"))]
        best = min(references, key=lambda runs: (-len(runs), _mean(runs, "loss")), default=[])
        synchronous = {line["seed"]: line["loss"] for line in best}
        rows += sorted((_summary(runs, synchronous) for runs in methods.values()), key=_by_bytes)
    return rows


def _summary(runs: Sequence[Line], synchronous: Mapping[int, float]) -> Line:
    first = runs[0]
    over = [100 * (line["loss"] / synchronous[line["seed"]] - 1) for line in runs if line["seed"] in synchronous]
    accuracies = [line["accuracy"] for line in runs if "accuracy" in line]
    return {
        "task": first["task"],
        "inner": first["inner"],
        "start": first["start"],
        "steps": first["steps"],
        "nodes": first["nodes"],
        "method": first["method"],
        "kind": first["kind"],
        "rate": first["rate"],
        "seeds": len(runs),
        "loss": _mean(runs, "loss"),
        "sd": _deviation([line["loss"] for line in runs]),
        "over_sync_%": statistics.fmean(over) if over else None,
        "over_sync_sd": _deviation(over),
        "accuracy_%": statistics.fmean(accuracies) if accuracies else None,
        "up_mb": _mean(runs, "bytes_up") / 1e6,
        "down_mb": _mean(runs, "bytes_down") / 1e6,
        "compression": first["compression"],
        "seconds": _mean(runs, "seconds"),
    }


def _by_bytes(row: Line) -> tuple[float, float]:
    return (row["compression"] or 0.0, row["rate"])


def _mean(lines: Sequence[Line], key: str) -> float:
    return statistics.fmean(line[key] for line in lines)


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def _panels(rows: Iterable[Line]) -> dict[str, list[Line]]:
    """Return the rows by the title of their panel."""
    panels: dict[str, list[Line]] = {}
    for row in rows:
        nodes = f", {row['nodes']} nodes" if row["nodes"] != 4 else ""
        title = f"{row['task']}, {row['inner']}, {row['start']}, {row['steps']} steps{nodes}"
        panels.setdefault(title, []).append(row)
    return panels


# ---------------------------------------------------------------------- names

_TELLING = ("density", "keep", "rank")
_DROPPED = {
    name: [argument for argument in factory().name.partition(":")[2].split(",") if not argument.startswith(_TELLING)]
    for name, factory in (CODECS | TRANSFORMS).items()
}
"""The default arguments of each member that a name leaves out: all but those that say how much is sent."""


def short_name(method: str) -> str:
    """Return a method's name for a reader: without default arguments such as ":block=128" and without its rate.

    A row that was given no name is called by its text: `codec=ternary:block=128|every=4|rate=2` -> `ternary, every=4`.
    """
    pieces = [piece.strip().removeprefix("codec=") for piece in method.split("|")]
    if len(pieces) > 1 or method.startswith("codec="):
        method = ", ".join(piece for piece in pieces if not piece.startswith("rate="))
    return re.sub(r"\b([a-z]+[0-9]*[a-z]*):([a-z]+=[-.0-9e]+(?:,[a-z]+=[-.0-9e]+)*)", _without_defaults, method)


def _without_defaults(member: re.Match[str]) -> str:
    left = [argument for argument in member[2].split(",") if argument not in _DROPPED.get(member[1], ())]
    return f"{member[1]}:{','.join(left)}" if left else member[1]


def _names(rows: Sequence[Line]) -> list[str]:
    """Return the short names of a panel's rows; of those that are called alike, with the rate."""
    short = [short_name(row["method"]) for row in rows]
    count, rates = Counter(short), [f", rate {row['rate']:.2g}" for row in rows]
    return [name + rate if count[name] > 1 else name for name, rate in zip(short, rates, strict=True)]


# ---------------------------------------------------------------------- the tables


def show(rows: Sequence[Line]) -> None:
    """Print all that is known of each row as a table."""
    print_table([{key: value for key, value in row.items() if key != "kind"} for row in rows])


def markdown(rows: Sequence[Line]) -> list[str]:
    """Return a table for a page on GitHub of each panel, by rising compression; what sends nothing stands last."""
    return [f"**{title}**\n\n{_markdown_table(panel)}" for title, panel in _panels(rows).items()]


def _markdown_table(rows: Sequence[Line]) -> str:
    rows = sorted(rows, key=lambda row: (row["compression"] or math.inf, row["loss"]))
    lines = ["| method | compression | loss | over synchronous | seeds |", "|---|--:|--:|--:|--:|"]
    for name, row in zip(_names(rows), rows, strict=True):
        cells = (
            re.sub(r"([\\|*_<>`\[\]])", r"\\\1", name),
            _times(row["compression"]) if row["compression"] else "no bytes",
            _with_deviation(row["loss"], row["sd"], ".4f"),
            _with_deviation(row["over_sync_%"], row["over_sync_sd"], "+.2f", " %"),
            str(row["seeds"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_deviation(mean: float | None, deviation: float | None, form: str, unit: str = "") -> str:
    if mean is None or not math.isfinite(mean):
        return "" if mean is None else "diverged"
    return f"{mean:{form}}" + (f" ± {deviation:{form.lstrip('+')}}" if deviation is not None else "") + unit


def _times(compression: float) -> str:
    return f"{compression:,.0f}x" if compression >= 10 else f"{compression:.2g}x"


# ---------------------------------------------------------------------- the plot

CROWDED = 20
"""A panel of more points takes both columns."""
LOWEST_PERCENT, HIGHEST_PERCENT = -12.0, 45.0
"""Where the loss axis ends: what lies above is drawn at the edge; bars are cut."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b04a8a", "#8a6200", "#3b3b3b")
"""Of Okabe and Ito, the light ones darkened, for names are written in them too."""
_RADII = (7, 12, 18, 26, 36, 48, 62, 78, 96, 116, 140, 170)
_ANGLES = tuple(math.radians(degrees) for degrees in (0, 30, -30, 60, -60, 180, 150, -150, 120, -120, 90, -90))
"""Where a name may stand: pixels from its point, and directions, the best first."""

Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""


@dataclass(frozen=True)
class _Point:
    name: str
    compression: float
    percent: float
    deviation: float
    colour: str

    @property
    def above(self) -> bool:
        """Whether it lies above the edge of the plot, or diverged."""
        return not self.percent <= HIGHEST_PERCENT

    @property
    def place(self) -> tuple[float, float]:
        """Where it is drawn."""
        return self.compression, HIGHEST_PERCENT if self.above else self.percent

    @property
    def label(self) -> str:
        if not self.above:
            return self.name
        return f"{self.name} ({self.percent:+.0f} %)" if math.isfinite(self.percent) else f"{self.name} (diverged)"


def draw(rows: Sequence[Line], file: Path) -> None:
    """Draw the loss over synchronous against the compression, a panel for each comparison; the references are left out.

    The grey line joins the methods that no other beats in both.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sent = [row for row in rows if row["kind"] in EXCHANGING and row["over_sync_%"] is not None]
    panels = {title: _points(panel) for title, panel in _panels(sent).items()}
    places = _places(list(panels.values()))
    height = 1 + max((row for row, _ in places), default=0)
    figure = pyplot.figure(figsize=(18, 6.2 * height), dpi=110)
    grid = figure.add_gridspec(height, 2)
    axes = [figure.add_subplot(grid[place]) for place in places]
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        _draw_points(axis, title, points)
    note = "grey line: nothing else has less loss for fewer bytes; dotted: 1 %; bars: one standard deviation over seeds"
    note += f"; arrows: above {HIGHEST_PERCENT:.0f} %"
    figure.supxlabel(note, y=0.1 / figure.get_figheight(), fontsize=8, color="0.3")
    figure.tight_layout()
    figure.canvas.draw()  # now the axes have their last size, and pixels are known
    for axis, points in zip(axes, panels.values(), strict=True):
        _draw_names(axis, points)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _places(panels: Sequence[Sequence[_Point]]) -> list[tuple[int, slice]]:
    """Return the row and the columns of each panel: two beside each other, a crowded or only one alone."""
    places: list[tuple[int, slice]] = []
    row = column = 0
    for points in panels:
        if len(points) > CROWDED or len(panels) == 1:
            place = (row + column, slice(0, 2))
            row, column = row + column + 1, 0
        else:
            place = (row, slice(column, column + 1))
            row, column = row + column, 1 - column
        places.append(place)
    return places


def _points(rows: Sequence[Line]) -> list[_Point]:
    """Return the points from left to right and from below; neighbours differ in colour.

    Their names are without those of the arguments, to be short: `topk:0.05+int4`.
    """
    rows = sorted(rows, key=lambda row: (round(math.log10(row["compression"]), 1), row["over_sync_%"]))
    names = [re.sub(r"(?<=[:,])[a-z]+=", "", name) for name in _names(rows)]
    return [
        _Point(name, row["compression"], row["over_sync_%"], row["over_sync_sd"] or 0.0, _COLOURS[i % len(_COLOURS)])
        for i, (name, row) in enumerate(zip(names, rows, strict=True))
    ]


def _draw_points(axis: Any, title: str, points: Sequence[_Point]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_xscale("log")
    axis.axhline(0, color="0.5", linewidth=1)
    axis.axhline(1, color="0.5", linewidth=1, linestyle=":")
    best = list(_unbeaten(points))
    axis.plot([point.compression for point in best], [point.percent for point in best], color="0.85", linewidth=3)
    for point in points:
        marker, size = ("^", 7) if point.above else ("o", 5)
        axis.plot(*point.place, marker=marker, markersize=size, color=point.colour, zorder=3, clip_on=False)
        if point.deviation and not point.above:
            axis.errorbar(*point.place, yerr=point.deviation, fmt="none", color=point.colour, capsize=2, linewidth=1)
    shown = [edge for p in points if not p.above for edge in (p.percent - p.deviation, p.percent + p.deviation)]
    low, high = max(LOWEST_PERCENT, min(0.0, *shown, 0.0)), max(1.0, *shown, 1.0)
    margin = 0.07 * (high - low)
    high = HIGHEST_PERCENT if any(point.above for point in points) else min(high + margin, HIGHEST_PERCENT)
    axis.set_ylim(low - margin, high)
    left, right = (pick(point.compression for point in points) for pick in (min, max))
    spread = max(3.0, (right / left) ** 0.12)
    axis.set_xlim(left / 1.5, right * spread)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _times(value)))
    axis.set_title(title)
    axis.set_xlabel("compression: bytes of float32 data parallel over bytes sent and received")
    axis.set_ylabel("held-out loss over synchronous, %")
    axis.grid(alpha=0.2)


def _unbeaten(points: Sequence[_Point]) -> Iterator[_Point]:
    """Yield, from the right, the points that lie below all to the right of them."""
    lowest = HIGHEST_PERCENT
    for point in sorted(points, key=lambda point: (-point.compression, point.percent)):
        if point.percent < lowest:
            lowest = point.percent
            yield point


def _draw_names(axis: Any, points: Sequence[_Point]) -> None:
    """Write each name at the nearest place that covers no point, name or line of another, with a line to its point."""
    figure, frame = axis.figure, axis.get_window_extent()
    inside: Box = (frame.x0 + 2, frame.y0 + 2, frame.x1 - 2, frame.y1 - 2)
    pixels = {point: tuple(axis.transData.transform(point.place)) for point in points}
    taken: list[Box] = []
    for point, (x, y) in pixels.items():
        bar = 0.0 if point.above else axis.transData.transform((1, point.percent + point.deviation))[1] - y
        taken += [(x - 4, y - 4, x + 4, y + 4), (x - 1, y - bar, x + 1, y + bar)]
    for point, (x, y) in pixels.items():
        style = {"fontsize": 7.5, "color": point.colour, "va": "center", "zorder": 4}
        measured = axis.text(*point.place, point.label, **style)
        extent = measured.get_window_extent(figure.canvas.get_renderer())
        measured.remove()
        shift, box, line = _free_place((x, y), (extent.width, 0.9 * extent.height), taken, inside)
        taken += [box, *line]
        side = "left" if shift[0] > 1 else "right" if shift[0] < -1 else "center"
        join = {"arrowstyle": "-", "color": point.colour, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2}
        join["relpos"] = ({"left": 0.0, "right": 1.0, "center": 0.5}[side], 0.5)
        offset = tuple(72 / figure.dpi * pixel for pixel in shift)
        arrow = join if line else None
        at = {"xytext": offset, "textcoords": "offset points", "ha": side, "arrowprops": arrow}
        axis.annotate(point.label, point.place, annotation_clip=False, **at, **style)


def _free_place(
    at: tuple[float, float], size: tuple[float, float], taken: Sequence[Box], inside: Box
) -> tuple[tuple[float, float], Box, list[Box]]:
    """Return for a name of this size the shift from its point, its box, and its line as small boxes, in pixels."""
    best: tuple[float, tuple[float, float], Box, list[Box]] | None = None
    for radius in _RADII:
        for angle in _ANGLES:
            x, y = radius * math.cos(angle), radius * math.sin(angle)
            x = 0.0 if abs(x) < 1 else x
            left = at[0] + x - (0.0 if x > 0 else size[0] if x < 0 else size[0] / 2)
            box = (left, at[1] + y - size[1] / 2, left + size[0], at[1] + y + size[1] / 2)
            if box[0] < inside[0] or box[1] < inside[1] or box[2] > inside[2] or box[3] > inside[3]:
                continue
            steps = range(8, radius - 2, 4) if radius > 12 else ()
            line = [(at[0] + x * s / radius, at[1] + y * s / radius) for s in steps]
            dots = [(x - 0.5, y - 0.5, x + 0.5, y + 0.5) for x, y in line]
            cost = sum(_overlap(one, other) for one in (box, *dots) for other in taken)
            if best is None or cost < best[0]:
                best = (cost, (x, y), box, dots)
            if cost == 0:
                return (x, y), box, dots
    if best is None:  # wider than the panel: beside its point, come what may
        return (float(_RADII[0]), 0.0), (*at, at[0] + size[0], at[1] + size[1]), []
    return best[1:]


def _overlap(one: Box, other: Box) -> float:
    width, height = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0
