"""Read the lines of results that `asynchrony.py` writes: what asynchrony costs, as tables, bars and pictures.

Rule 1: nothing is simulated here, and no file is written but the pictures.
Rule 2: what a number over seeds is, `asynchrony_figures.py` says; what is compared with what, and its limit, is here.
Rule 3: of several runs with one name and seed the last line counts; where their settings differ, that is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from asynchrony_cases import EXPERIMENTS
from asynchrony_figures import (
    Bar,
    Column,
    Curve,
    Figure,
    Line,
    Summary,
    Values,
    curves_of,
    difference,
    first_time,
    group_by,
    numbers,
    pair,
    percent_over,
    plain,
    ratio,
    worst,
)
from asynchrony_plot import draw_bars, draw_counts, draw_curves, draw_delays
from report import print_table

__all__ = ["summarise", "show", "markdown", "draw"]

DELAY_BARS = {"shakespeare": {Fraction(1, 2): 3.0, Fraction(1): 5.0}, "mnist": {Fraction(1, 2): 1.0, Fraction(1): 4.0}}
"""The most that the default may cost, in percent over d = 0, by task and d / k."""
SYNCHRONOUS = "BSP"
BSP_SHARE, BEST_SHARE = 0.6, 1.05
"""The most time that the default may take to the target, of that of BSP and of that of the best method."""
FIXED, TIMED = "Async-FMB", "Async-Timed"
LEVELS = (0.3, 0.6, 0.9)
"""At which shares of the way down, on a logarithmic scale, two curves are compared."""
NODES_POINTS = 1.0
FOUNDER, TOURNAMENT, INITIAL_PERCENT = "founder", "best", 1.0
SELECTION_REFERENCES = {"all healthy": "all", "one corrupted": "the healthy alone"}
ROBUST, SELECTION_PERCENT = "sign majority", {"all healthy": 1.0, "one corrupted": 3.0}

# ---------------------------------------------------------------------- 1: the delay


def _summarise_delay(title: str, lines: Sequence[Line]) -> list[Summary]:
    """Rows: k of the default, and the steps where they are not the task's; then a table of all methods for each k that
    has any other."""
    runs: dict[tuple[str, int, int], dict[Fraction, list[Line]]] = {}
    for line in lines:
        k, d = line["settings"]["every"], line["settings"]["delay"]
        runs.setdefault((line["method"], k, line["steps"]), {}).setdefault(Fraction(d, k), []).append(line)
    cells = {cell: {share: numbers(of_share) for share, of_share in row.items()} for cell, row in runs.items()}
    ks = sorted({(k, steps) for _, k, steps in cells})
    at_once = {(k, steps): cells.get(("default", k, steps), {}).get(Fraction(0), {}) for k, steps in ks}

    def table(title: str, corner: str, chosen: Mapping[str, tuple[str, int, int]], from_zero: bool) -> Summary:
        shares = sorted({share for cell in chosen.values() for share in cells[cell] if share or from_zero})
        columns = {share: Column(_share_name(share), "+.2f", float(share)) for share in shares}
        begin = Column("loss at d = 0", ".4f")
        rows = {
            name: {
                begin.name: plain(cells[cell].get(Fraction(0), {})),
                **{
                    column.name: pair(cells[cell].get(share, {}), at_once[cell[1:]], percent_over)
                    for share, column in columns.items()
                },
            }
            for name, cell in chosen.items()
        }
        return Summary(title, corner, (begin, *columns.values()), rows)

    made = []
    of_default = {
        f"{k}, {steps:,} steps" if steps else str(k): ("default", k, steps)
        for k, steps in ks
        if ("default", k, steps) in cells
    }
    if of_default:
        grid = table(f"{title}: % over d = 0 of the same k", "k", of_default, False)
        made.append(replace(grid, bars=_delay_bars(grid, lines[0]["task"])))
    for k, steps in ks:
        methods = {cell[0]: cell for cell in cells if cell[1:] == (k, steps)}
        if set(methods) - {"default"}:
            made.append(table(f"{title}, k = {k}: % over the default at d = 0", "method", methods, True))
    return made


def _delay_bars(grid: Summary, task: str) -> tuple[Bar, ...]:
    """Judge the k that costs the most; one failed run is enough not to meet it."""
    bars = []
    for share, most in DELAY_BARS.get(task, {}).items():
        costs = [row.get(_share_name(share), Figure()) for row in grid.rows.values()]
        bars.append(Bar(f"cost of d = {_share_text(share)}, the worst k", worst(costs), most, place=float(share)))
    return tuple(bars)


def _share_name(share: Fraction) -> str:
    return f"d = {_share_text(share)}, %"


def _share_text(share: Fraction) -> str:
    above = "" if share.numerator == 1 else str(share.numerator)
    return "0" if share == 0 else f"{above}k" + (f"/{share.denominator}" if share.denominator > 1 else "")


# ---------------------------------------------------------------------- 2: uneven nodes


def _summarise_stragglers(title: str, lines: Sequence[Line]) -> list[Summary]:
    """The target of a seed: the mean of the last points of BSP's curve."""
    methods = {method: runs for (method,), runs in group_by(lines, "method").items()}
    losses, curves = {method: numbers(runs) for method, runs in methods.items()}, curves_of(lines)
    ends = {seed: curve[-1][1] for seed, curve in curves.get(SYNCHRONOUS, {}).items() if curve}
    targets = {seed: end for seed, end in ends.items() if losses[SYNCHRONOUS][seed] is not None}
    times: dict[str, Values] = {
        method: {seed: first_time(curve, targets[seed]) for seed, curve in of_seeds.items() if seed in targets}
        for method, of_seeds in curves.items()
    }
    reached = {method: figure for method in times if (figure := plain(times[method])).values}
    best = min(reached, key=lambda method: (-len(reached[method].values), reached[method].mean), default=None)
    references = (("of BSP's", times.get(SYNCHRONOUS, {})), ("of the best", times[best] if best else {}))
    late = "not reached"
    rows = {
        method: {
            "final loss": plain(losses[method]),
            "seconds to target": plain(times[method], late),
            **{name: pair(times[method], reference, ratio, late) for name, reference in references},
        }
        for method in methods
    }
    columns = (
        Column("final loss", ".4f"),
        Column("seconds to target", ".1f"),
        *(Column(name, ".2f") for name, _ in references),
    )
    default = next((row for method, row in rows.items() if method.startswith("default")), {})
    bars = tuple(
        Bar(f"time of the default to the target, {name}", default.get(name, Figure()).cost, most, ".2f", "")
        for name, most in (("of BSP's", BSP_SHARE), ("of the best", BEST_SHARE))
    )
    target = Figure(tuple(targets.values()), len(losses.get(SYNCHRONOUS, {})) - len(targets)).text(".4f") or "none"
    notes = (f"target: {SYNCHRONOUS}'s loss at its end, {target}; the first to reach it: {best or 'none'}",)
    return [Summary(title, "method", columns, rows, bars, notes, curves)]


# ---------------------------------------------------------------------- 3: Async-Timed against Async-FMB


def _summarise_timed(title: str, lines: Sequence[Line]) -> list[Summary]:
    """Rows: losses that all runs with a curve reach; the times of both, and the factor between them."""
    curves = curves_of(lines)
    columns = (Column(f"{FIXED}, s", ".1f"), Column(f"{TIMED}, s", ".1f"), Column(f"{FIXED} / {TIMED}", ".2f"))
    rows = {}
    for level in _levels([curve for of_seeds in curves.values() for curve in of_seeds.values() if curve]):
        times = {
            method: {seed: first_time(curve, level) for seed, curve in curves.get(method, {}).items()}
            for method in (FIXED, TIMED)
        }
        figures = [plain(times[method], "not reached") for method in (FIXED, TIMED)]
        factor = pair(times[FIXED], times[TIMED], ratio, f"{FIXED} not reached")
        rows[f"{level:g}"] = {column.name: one for column, one in zip(columns, (*figures, factor), strict=True)}
    ends, sizes = [], []
    for (method,), runs in group_by(lines, "method").items():
        ends.append(f"{method} {plain(numbers(runs)).text('.4f')}")
        messages = pair(numbers(runs, "contributions"), numbers(runs, "version"), ratio)
        sizes.append(f"{method} {messages.text('.2f')}")
    notes = (f"loss at the end: {'; '.join(ends)}", f"messages in an update: {'; '.join(sizes)}")
    return [Summary(title, "to the loss", columns, rows, notes=notes, curves=curves)]


def _levels(curves: Sequence[Curve]) -> list[float]:
    """Return the losses at `LEVELS` of the way from where the lowest curve begins to where the worst comes to."""
    high = min((curve[0][1] for curve in curves), default=0.0)
    low = max((min(loss for _, loss in curve) for curve in curves), default=0.0)
    if not 0.0 < low < high:
        return []
    return list(dict.fromkeys(float(f"{high * (low / high) ** share:.3g}") for share in LEVELS))


# ---------------------------------------------------------------------- 4: how many nodes


def _summarise_nodes(title: str, lines: Sequence[Line]) -> list[Summary]:
    """Rows: N, columns: methods; the accuracy in percent, then its points over N = 1 of the same method."""
    cells = {key: numbers(runs, "accuracy") for key, runs in group_by(lines, "method", "nodes").items()}
    methods, counts = list(dict.fromkeys(method for method, _ in cells)), sorted({count for _, count in cells})

    def table(title: str, form: str, counts: Iterable[int], figure: Callable[[str, int], Figure]) -> Summary:
        rows = {str(count): {method: figure(method, count) for method in methods} for count in counts}
        return Summary(title, "N", tuple(Column(method, form) for method in methods), rows)

    def points(method: str, count: int) -> Figure:
        return pair(cells.get((method, count), {}), cells.get((method, 1), {}), difference)

    def lost(figure: Figure) -> Figure:
        return replace(figure, values=tuple(-one for one in figure.values))

    accuracy = table(
        f"{title}: accuracy, %", ".2f", counts, lambda method, count: plain(cells.get((method, count), {}))
    )
    gained = table(f"{title}: points over N = 1", "+.2f", (count for count in counts if count != 1), points)
    bars = tuple(
        Bar(
            f"{method}: points lost to N = 1, the worst N",
            worst(lost(row[method]) for row in gained.rows.values()),
            NODES_POINTS,
            unit="",
        )
        for method in methods
        if method.startswith("ours")
    )
    return [accuracy, replace(gained, bars=bars)] if gained.rows else [accuracy]


# ---------------------------------------------------------------------- 5, 6: whose parameters, whose deltas


def _compare_methods(title: str, lines: Sequence[Line], references: Mapping[str, str], usual: str) -> Summary:
    """For each method and group the loss, and the percent over the group's reference, or the usual one."""
    cells = {key: numbers(runs) for key, runs in group_by(lines, "method", "group").items()}
    groups = list(dict.fromkeys(group for _, group in cells))
    columns, rows = [], {method: dict[str, Figure]() for method, _ in cells}
    for group in groups:
        reference = references.get(group, usual)
        loss, over = Column(f"{group}: loss", ".4f"), Column(_over_name(group, reference), "+.2f")
        columns += [loss, over]
        for method, row in rows.items():
            row[loss.name] = plain(cells.get((method, group), {}))
            row[over.name] = pair(cells.get((method, group), {}), cells.get((reference, group), {}), percent_over)
    return Summary(title, "method", tuple(columns), rows)


def _over_name(group: str, reference: str) -> str:
    return f"{group}: % over {reference}"


def _summarise_initial(title: str, lines: Sequence[Line]) -> list[Summary]:
    table = _compare_methods(title, lines, {}, FOUNDER)
    row = table.rows.get(TOURNAMENT, {})
    over = {name: figure for name, figure in row.items() if name.endswith(f"% over {FOUNDER}")}
    bars = [Bar(f"{TOURNAMENT} over {FOUNDER}, the worst group", worst(over.values()), INITIAL_PERCENT)]
    for name, figure in over.items():
        if not name.startswith("equal"):
            bars.append(Bar(f"{TOURNAMENT} over {FOUNDER}, {name.partition(':')[0]}", figure.cost, 0.0))
    return [replace(table, bars=tuple(bars))]


def _summarise_selection(title: str, lines: Sequence[Line]) -> list[Summary]:
    table = _compare_methods(title, lines, SELECTION_REFERENCES, "all")
    limits = {_over_name(group, SELECTION_REFERENCES[group]): most for group, most in SELECTION_PERCENT.items()}
    costs = {method: {name: row.get(name, Figure()).cost for name in limits} for method, row in table.rows.items()}
    robust = costs.get(ROBUST, dict.fromkeys(limits))
    bars = tuple(Bar(f"{ROBUST}, {name}", robust[name], most) for name, most in limits.items())
    within = [
        method
        for method, of_method in costs.items()
        if all((cost := of_method[name]) is not None and cost <= most for name, most in limits.items())
    ]
    notes = (f"within both limits: {', '.join(within) or 'none'}",)
    return [replace(table, bars=bars, notes=notes)]


# ---------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class _Experiment:
    """panel: the keys whose values make a table of their own.  draw: makes the picture of all its tables."""

    panel: tuple[str, ...]
    summarise: Callable[[str, Sequence[Line]], list[Summary]]
    draw: Callable[[Sequence[Summary], Path], None]


_EXPERIMENTS = {
    "delay": _Experiment(("task", "start", "nodes"), _summarise_delay, draw_delays),
    "stragglers": _Experiment(("task", "start", "nodes", "max_seconds"), _summarise_stragglers, draw_curves),
    "timed": _Experiment(("task", "group", "max_seconds"), _summarise_timed, draw_curves),
    "nodes": _Experiment(("task",), _summarise_nodes, draw_counts),
    "initial": _Experiment(("task", "steps"), _summarise_initial, draw_bars),
    "selection": _Experiment(("task",), _summarise_selection, draw_bars),
}
_TITLES: dict[str, Callable[[Any], str]] = {
    "start": lambda start: "from scratch" if start == "scratch" else str(start),
    "nodes": lambda nodes: f"N = {nodes}",
    "steps": lambda steps: f"{steps} steps" if steps else "",
    "max_seconds": lambda seconds: f"{seconds:g} s",
}
_MEASURED = ("loss", "accuracy", "virtual_seconds", "version", "contributions", "samples", "curve", "seconds", "failed")


def summarise(experiment: str, lines: Sequence[Line]) -> list[Summary]:
    """Return the tables of one experiment, methods and conditions in the order of its cases."""
    known = _EXPERIMENTS[experiment]
    made = []
    for panel in group_by(_in_order(experiment, lines), *known.panel).values():
        parts = [_TITLES.get(key, str)(panel[0][key]) for key in known.panel]
        made += known.summarise(", ".join(filter(None, parts)), list(_last(known.panel, panel).values()))
    return made


def _in_order(experiment: str, lines: Sequence[Line]) -> list[Line]:
    keys, cases = ("task", "start", "nodes", "group", "method"), EXPERIMENTS[experiment]()
    orders = {key: list(dict.fromkeys(getattr(case, key) for case in cases)) for key in keys}

    def place(line: Line) -> list[int]:
        return [order.index(line[key]) if line[key] in order else len(order) for key, order in orders.items()]

    return sorted((line for line in lines if line["experiment"] == experiment), key=place)


def _name(panel: Sequence[str], line: Line) -> Hashable:
    """Return what tells the cells of a table apart, with the seed."""
    settings = line["settings"] if line["experiment"] == "delay" else {}
    cell = (settings.get("every"), settings.get("delay"), line["steps"])
    return *(line[key] for key in panel), *cell, *(line[key] for key in ("nodes", "group", "method", "seed"))


def _last(panel: Sequence[str], lines: Iterable[Line]) -> dict[Hashable, Line]:
    return {_name(panel, line): line for line in lines}


def _doubts(lines: Sequence[Line]) -> list[str]:
    """Say of which experiments an earlier line was passed over whose settings differ from those of the one shown."""
    doubts = []
    for experiment, known in _EXPERIMENTS.items():
        chosen = [line for line in lines if line["experiment"] == experiment]
        last = _last(known.panel, chosen)
        others = sum(_case(last[_name(known.panel, line)]) != _case(line) for line in chosen)
        if others:
            doubts.append(f"{experiment}: {others} runs are passed over for later ones of their name, settings differ")
    return doubts


def _case(line: Line) -> str:
    return json.dumps({key: value for key, value in line.items() if key not in _MEASURED}, sort_keys=True)


# ---------------------------------------------------------------------- tables and pictures


def show(lines: Sequence[Line]) -> None:
    """Print the tables of all experiments that the lines belong to, with their bars."""
    for summary in _all(lines):
        print(summary.heading)  # not as the table's title: that is broken at the width of the table
        print_table(summary.cells())
        print("\n".join([*summary.notes, *(bar.text for bar in summary.bars)]), end="\n\n")
    for doubt in _doubts(lines):
        print(doubt)


def markdown(lines: Sequence[Line]) -> str:
    """Return the same tables and bars for a page on GitHub."""
    return "\n\n".join(_markdown_table(summary) for summary in _all(lines))


def draw(lines: Sequence[Line], folder: str | Path) -> None:
    """Draw one picture for each experiment that the lines belong to: `delay.png`, `stragglers.png` and so on.

    The folder is made if there is none.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, known in _EXPERIMENTS.items():
        if summaries := summarise(name, lines):
            known.draw(summaries, Path(folder) / f"{name}.png")


def _all(lines: Sequence[Line]) -> list[Summary]:
    return [summary for name in _EXPERIMENTS for summary in summarise(name, lines)]


def _markdown_table(summary: Summary) -> str:
    heads = [summary.corner, *(column.name for column in summary.columns)]
    lines = [_markdown_row(heads), "|---" + "|--:" * len(summary.columns) + "|"]
    lines += [_markdown_row(list(row.values())) for row in summary.cells()]
    below = [_escaped(text) for text in (*summary.notes, *(bar.text for bar in summary.bars))]
    parts = [f"**{_escaped(summary.heading)}**", "\n".join(lines), "\n".join(f"- {text}" for text in below)]
    return "\n\n".join(filter(None, parts))


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", text)
