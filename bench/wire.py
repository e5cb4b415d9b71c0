"""Measure every figure of the wire beside its bar: efficiency.py's and hub.py's cases, and what `plan` said beforehand.

Rule 1: a figure is measured on the star, N = 4, every port 1 Gb/s, a step of 50 ms emulated, unless its line says so.
Rule 2: where it takes the cores of five machines, two must do: the machine's busy share stands beside it, and the same
figure with two nodes.  Rule 3: the period is that of the whole model, all its fragments, not of one.
Rule 4: a figure is met or missed as it was measured now, the median of `--runs`; nothing is taken from another day.

Takes about a quarter of an hour a run, as root; `--only` names the rows to measure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zmqtrain.averaging.aggregator import RECORD_EXCHANGES

import efficiency
import hub
from report import print_table, write_json

__all__ = ["ROWS", "Bar", "main"]

Row = dict[str, Any]

PLAN_POINTS = 3.0
"""What a plan's efficiency may be off."""
AUTO_BELOW, AUTO_REFUSED = 0.01, 0.02
"""How much less efficient than the k and d of the row by hand those may be that the broker chooses, and the share of
the offers that may be put off then."""

SMALL = efficiency.Case(params=25_000_000, fragments=1, every=8, delay=12, steps=240)
LARGE = efficiency.Case(params=100_000_000, fragments=2, every=12, delay=40, steps=240)
MIDDLE = efficiency.Case(params=5_000_000, every=2, delay=3, steps=400)
SOAK = efficiency.Case(params=1_000_000, every=1, delay=2, steps=2200, warm=RECORD_EXCHANGES)
"""Its memory is measured from where the hub has as many releases on record as it keeps."""

ROWS: dict[str, efficiency.Case | hub.Case] = {
    "25M": SMALL,
    "25M, all fragments": replace(SMALL, fragments="auto"),
    "25M, one slow": replace(SMALL, slow=1),
    "25M, N=2": replace(SMALL, nodes=2),
    "100M": LARGE,
    "100M, N=2": replace(LARGE, nodes=2),
    "25M, auto": replace(SMALL, every="auto", delay="auto"),
    "5M": MIDDLE,
    "5M, auto": replace(MIDDLE, every="auto", delay="auto"),
    "1M, 2,000 exchanges": SOAK,
    "dense, one hub": hub.Case(),
    "dense, 4 brokers": hub.Case(shards=4, fragments=8, in_flight=4),
}
"""By name: what is measured. Each is one run of `efficiency.py` or `hub.py` on a star of its own."""


@dataclass(frozen=True)
class Bar:
    """One figure. rows: where it is read, the first is the one that counts; at_least: else it is at most `bar`."""

    figure: str
    rows: tuple[str, ...]
    value: Callable[[Row], float]
    bar: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        """Whether a measured value is as good as the bar."""
        return value >= self.bar if self.at_least else value <= self.bar


def _of(column: str) -> Callable[[Row], float]:
    return lambda row: float(row[column])


def _bars() -> list[Bar]:
    bars = []
    for size, period, figures in (
        ("25M", 8.2, (0.97, 13, 1.2, 1.4, 2.5, 0.8, 20)),
        ("100M", 25, (0.95, 40, 1.3, 1.4, 2.5, 0.8, 80)),
    ):
        rows = (size, f"{size}, N=2", f"{size}, all fragments")
        efficient, age, sent, exchange, node, of_hub, held = figures
        bars += [
            Bar(f"{size}: efficiency", rows, _of("efficiency"), efficient, at_least=True),
            Bar(f"{size}: over whole steps, alone", rows, _of("efficiency_of_steps"), efficient, at_least=True),
            Bar(f"{size}: period, steps", rows, _of("model_period_steps"), period),
            Bar(f"{size}: age of an aggregate, steps", rows, _of("age_steps"), age),
            Bar(f"{size}: MB sent per node and step", rows, _of("mb_per_node_step"), sent),
            Bar(f"{size}: exchange / limit of the hub's port", rows, _of("exchange_over_limit"), exchange),
            Bar(f"{size}: node CPU, ns per parameter", rows, _of("node_cpu_ns_per_param"), node),
            Bar(f"{size}: hub CPU, ns per parameter", rows, _of("hub_cpu_ns_per_param"), of_hub),
            Bar(f"{size}: training thread held, ms", rows, lambda row: row["held_ms"] * row["parts"], held),
            Bar(f"{size}: p99 of a step over its median", rows, _of("p99_over_median"), 1.15),
        ]
    soak = ("1M, 2,000 exchanges",)
    bars += [
        Bar("5M, k = 2: efficiency", ("5M",), _of("efficiency"), 0.95, at_least=True),
        Bar("5M, k = 2: period, steps", ("5M",), _of("model_period_steps"), 2.1),
        Bar("1M, k = 1: efficiency", soak, _of("efficiency"), 0.95, at_least=True),
        Bar("dense, one hub: exchange / limit", ("dense, one hub",), _of("exchange_over_limit"), 1.10),
        Bar("transport CPU, s per GB", ("dense, one hub",), _of("transport_cpu_s_per_gb"), 0.8),
        Bar("heartbeat p99 under bulk, ms", ("dense, one hub",), _of("heartbeat_p99_ms"), 10.0),
        Bar("dense, 4 brokers: exchange / ring's limit", ("dense, 4 brokers",), _of("exchange_over_limit"), 1.2),
        Bar("2,000 exchanges: memory of a node, end / middle", soak, _of("node_rss_late_growth"), 1.01),
        Bar("2,000 exchanges: memory of the hub, end / begin", soak, _of("hub_rss_growth"), 1.02),
    ]
    return bars


def main() -> None:
    """Measure the rows that the command line names, print every figure beside its bar, and each row whole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), help="the rows (default: all)")
    parser.add_argument("--runs", type=int, default=1, help="of each row, of which the median counts (default 1)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs: give at least 1")
    measured: dict[str, list[Row]] = {name: [] for name in options.only}
    for run in range(options.runs):
        for name in options.only:
            case = ROWS[name]
            print(f"measuring {name}, run {run + 1} of {options.runs} ...", file=sys.stderr, flush=True)
            try:
                row = efficiency.measure(case) if isinstance(case, efficiency.Case) else hub.measure(case)
            except RuntimeError as error:
                raise SystemExit(f"wire: {name}: {error}") from error
            measured[name].append(row)
            if options.json:  # what has been measured stays, should a later run fail
                write_json(options.json, [{"row": name} | row for name, runs in measured.items() for row in runs])
    rows = {name: _median(runs) for name, runs in measured.items()}
    print_table(
        [_line(bar, rows) for bar in _bars() if bar.rows[0] in rows]
        + _of_plain_tcp(rows)
        + _of_slow(rows)
        + _of_auto(rows)
        + _of_plan(rows),
        "At the speed of the wire",
    )
    for name, row in rows.items():
        print_table([{"": key, name: value} for key, value in row.items()], name)


def _median(runs: Sequence[Row]) -> Row:
    """Return a row of the median of each column that is a number."""
    return {
        key: statistics.median(row[key] for row in runs if key in row) if isinstance(value, float) else value
        for key, value in runs[0].items()
    }


def _line(bar: Bar, rows: dict[str, Row]) -> Row:
    value = bar.value(rows[bar.rows[0]])
    n_two, whole = (
        [bar.value(rows[name]) for name in bar.rows[1:] if name.endswith(end) and name in rows]
        for end in ("N=2", "all fragments")
    )
    return {
        "figure": bar.figure,
        "bar": f"{'>=' if bar.at_least else '<='} {bar.bar:g}",
        "measured": value,
        "": "met" if bar.met(value) else "missed",
        "busy": rows[bar.rows[0]]["busy"],
        "N=2": n_two[0] if n_two else None,
        "all fragments": whole[0] if whole else None,
    }


def _of_plain_tcp(rows: dict[str, Row]) -> list[Row]:
    """Return the least that any transport over TCP takes here: it has no bar."""
    what, row = "plain TCP's CPU, s per GB", rows.get("dense, one hub")
    return [] if row is None else [{"figure": what, "measured": row["plain_tcp_cpu_s_per_gb"], "busy": row["busy"]}]


def _of_slow(rows: dict[str, Row]) -> list[Row]:
    slow, without = rows.get("25M, one slow"), rows.get("25M")
    if slow is None or without is None:
        return []
    ratio = slow["efficiency"] / without["efficiency"]
    met = "met" if ratio >= 0.97 else "missed"
    what = "25M: efficiency of the others, one at half speed / without"
    return [{"figure": what, "bar": ">= 0.97", "measured": ratio, "": met, "busy": slow["busy"], "N=2": None}]


def _of_auto(rows: dict[str, Row]) -> list[Row]:
    """Return how the k and d that the broker chooses do beside those that were found by hand."""
    lines = []
    for size in ("25M", "5M"):
        if (auto := rows.get(f"{size}, auto")) is None:
            continue
        figures = [(f"offers put off, at {auto['planned']}", auto["refused"], AUTO_REFUSED)]
        if (by_hand := rows.get(size)) is not None:
            below = by_hand["efficiency"] - auto["efficiency"]
            figures.append((f"efficiency {auto['efficiency']:.3f}, below that by hand", below, AUTO_BELOW))
        for what, measured, bar in figures:
            line = {"figure": f"{size}, auto: {what}", "bar": f"<= {bar:g}", "measured": measured}
            lines.append(line | {"": "met" if measured <= bar else "missed", "busy": auto["busy"], "N=2": None})
    return lines


def _of_plan(rows: dict[str, Row]) -> list[Row]:
    """Return how far each efficiency is from what the plan's formula had said, in points."""
    lines = []
    for name, row in rows.items():
        if "predicted_efficiency" in row:
            said, measured = row["predicted_efficiency"], row["efficiency"]
            points = 100 * abs(said - measured)
            what = f"{name}: efficiency {measured:.3f}, predicted {said:.3f}: points apart"
            met = "met" if points <= PLAN_POINTS else "missed"
            line = {"figure": what, "bar": f"<= {PLAN_POINTS:g}", "measured": points, "": met, "busy": row["busy"]}
            lines.append(line | {"N=2": None})
    return lines


if __name__ == "__main__":
    main()
