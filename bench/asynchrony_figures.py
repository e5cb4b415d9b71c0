"""Say what a table of results over seeds is made of: figures, columns, bars, and the curves behind them.

    over = 100 x (value / that of the reference of the same seed - 1)

Rule 1: a figure is a mean and a deviation over seeds; what is relative is paired by seed first, then averaged.
Rule 2: a run that failed is counted in every figure it belongs to, and said there; its bar is not met.
Rule 3: nothing here knows an experiment or a method, and nothing is printed or drawn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

__all__ = [
    "Line", "Curve", "Values", "Figure", "Column", "Bar", "Summary", "percent_over", "ratio", "difference", "plain",
    "pair", "worst", "numbers", "group_by", "smooth", "first_time", "curves_of",
]  # fmt: skip

Line = Mapping[str, Any]
"""What is known of one run, as it is written to a file of results."""
Curve = Sequence[tuple[float, float]]
"""Held-out losses against virtual seconds."""
Values = Mapping[int, float | None]
"""A number by seed; None where the run failed."""
WINDOW = 5
"""Over how many points of a curve the running mean is taken."""

# ---------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """A number over seeds.

    values: of the runs that have it.  failed: how many have none, for this `reason`.  unpaired: of how many the run
    that they are compared with has none.
    """

    values: tuple[float, ...] = ()
    failed: int = 0
    unpaired: int = 0
    reason: str = "diverged"

    @property
    def seeds(self) -> int:
        """How many runs it is about."""
        return len(self.values) + self.failed + self.unpaired

    @property
    def mean(self) -> float:
        """The mean over the seeds that have it; NaN if none has."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds that have it; None if less than two have."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def cost(self) -> float | None:
        """What a bar judges: infinite if a run failed, minus infinite if only what it is compared with did."""
        if self.failed or not self.seeds:
            return math.inf if self.failed else None
        return self.mean if self.values else -math.inf

    def text(self, form: str, seeds: int = 0) -> str:
        """Return it in this form, with its deviation and what failed; seeds: those of others, said if it has fewer."""
        if not self.values:
            return self.reason if self.failed else "reference has none" if self.unpaired else ""
        text = _mean_text(self.mean, self.deviation, form)
        failed = f"{self.failed} of {self.seeds} {self.reason}" if self.failed else ""
        unpaired = f"reference has none in {self.unpaired} of {self.seeds}" if self.unpaired else ""
        count = f"seeds: {self.seeds}" if self.seeds < seeds else ""
        return ", ".join(filter(None, (text, failed, unpaired, count)))


@dataclass(frozen=True)
class Column:
    """A column of figures of one form.  place: where it stands in a picture, if it is drawn along an axis."""

    name: str
    form: str
    place: float | None = None


@dataclass(frozen=True)
class Bar:
    """A sentence that is met where `value` is at most `most`; None: not measured.  place: as that of its column."""

    name: str
    value: float | None
    most: float
    form: str = "+.2f"
    unit: str = " %"
    place: float | None = None

    @property
    def verdict(self) -> str:
        """Say whether it is met."""
        return "not measured" if self.value is None else "met" if self.value <= self.most else "NOT met"

    @property
    def text(self) -> str:
        """The sentence."""
        if self.value is None or not math.isfinite(self.value):
            value = {None: "no run", math.inf: "a run has none", -math.inf: "only the reference has none"}[self.value]
        else:
            value = f"{self.value:{self.form}}{self.unit}"
        return f"{self.name}: {value} (at most {self.most:g}{self.unit}): {self.verdict}"


@dataclass(frozen=True)
class Summary:
    """A table.  rows: figures by the name of the row and of the column.  curves: smoothed, by method and seed."""

    title: str
    corner: str
    columns: tuple[Column, ...]
    rows: Mapping[str, Mapping[str, Figure]]
    bars: tuple[Bar, ...] = ()
    notes: tuple[str, ...] = ()
    curves: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)

    @property
    def seeds(self) -> int:
        """The most seeds that any of its figures has."""
        return max((figure.seeds for row in self.rows.values() for figure in row.values()), default=0)

    @property
    def heading(self) -> str:
        """The title with the number of seeds."""
        return f"{self.title} ({self.seeds} seed{'s' * (self.seeds != 1)})"

    def cells(self) -> list[dict[str, str]]:
        """Return each row as text by column, its name first."""
        return [
            {
                self.corner: name,
                **{one.name: row.get(one.name, Figure()).text(one.form, self.seeds) for one in self.columns},
            }
            for name, row in self.rows.items()
        ]


def percent_over(value: float, reference: float) -> float:
    """Return by how many percent a value lies over its reference."""
    return 100 * (value / reference - 1)


def ratio(value: float, reference: float) -> float:
    """Return a value as a multiple of its reference."""
    return value / reference


def difference(value: float, reference: float) -> float:
    """Return a value less its reference."""
    return value - reference


def plain(values: Values, reason: str = "diverged") -> Figure:
    """Return the figure of values that are compared with nothing; reason: why a run may have none."""
    found = tuple(value for value in values.values() if value is not None)
    return Figure(found, len(values) - len(found), reason=reason)


def pair(
    values: Values, references: Values, relate: Callable[[float, float], float], reason: str = "diverged"
) -> Figure:
    """Relate each value to that of the same seed; a seed that the reference was not run with is left out."""
    both = [(value, references[seed]) for seed, value in values.items() if seed in references]
    related = tuple(relate(one, other) for one, other in both if one is not None and other is not None)
    failed = sum(one is None for one, _ in both)
    return Figure(related, failed, len(both) - failed - len(related), reason)


def numbers(lines: Iterable[Line], key: str = "loss") -> Values:
    """Return a number of each run by its seed; None where the run failed or its loss is not finite."""
    return {line["seed"]: _finite(line.get(key)) if _finite(line["loss"]) is not None else None for line in lines}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def worst(figures: Iterable[Figure]) -> float | None:
    """Return the highest cost of all that were measured; None if none was."""
    return max((figure.cost for figure in figures if figure.cost is not None), default=None)


def group_by(lines: Iterable[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    """Return the lines by the values of these keys, in the order of first appearance."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    return groups


# ---------------------------------------------------------------------- curves


def smooth(curve: Iterable[Sequence[float | None]]) -> Curve:
    """Return the running mean of `WINDOW` points, of the seconds as of the losses, up to the first that is not finite.

    curve: [seconds, loss, ...].  Of n points n - WINDOW + 1 are left; if n is less than the window, none.
    """
    clean = [point[:2] for point in takewhile(lambda point: _finite(point[1]) is not None, curve)]
    windows = [list(zip(*clean[i : i + WINDOW], strict=True)) for i in range(len(clean) - WINDOW + 1)]
    return [(statistics.fmean(seconds), statistics.fmean(losses)) for seconds, losses in windows]


def first_time(curve: Curve, target: float) -> float | None:
    """Return the seconds at which a curve, interpolated, first is at or under the target; None if it never is."""
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (before, above), (after, below) in pairwise(curve):
        if below <= target:
            return before + (after - before) * (above - target) / (above - below)
    return None


def curves_of(lines: Iterable[Line]) -> dict[str, dict[int, Curve]]:
    """Return the smoothed curves by method and seed; that of a run without one is empty."""
    groups = group_by(lines, "method").items()
    return {method: {line["seed"]: smooth(line.get("curve") or ()) for line in runs} for (method,), runs in groups}


def _mean_text(mean: float, deviation: float | None, form: str) -> str:
    return f"{mean:{form}}" + (f" ± {deviation:{form.lstrip('+')}}" if deviation is not None else "")
