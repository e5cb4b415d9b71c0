"""Draw a part of an engine's trace as a picture: a row for each track, a bar for each operation that ran.

    python bench/trace_picture.py overlap-0.json overlap.png --from-ms 100 --ms 60

A viewer (ui.perfetto.dev) shows more; a picture can stand in a document.
Rule: bars have the colour of their category, and their name where there is room for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bar", "read_bars", "draw_bars", "main"]

COLOURS = {"compute": "#56a3d9", "network": "#e0a100", "codec": "#8fbf3f"}
OTHER_COLOUR = "#b0b0b0"
INCHES_WIDE, INCHES_PER_ROW = 11.0, 0.55
LETTER_INCHES = 0.065


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation: its track, name and category, and when it began and how long it took, in ms of the trace."""

    track: str
    name: str
    category: str
    start_ms: float
    long_ms: float


def read_bars(trace: dict[str, Any]) -> list[Bar]:
    """Return the operations of a trace, in the order of their beginning, which is counted from the first one's."""
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    ran = sorted((event for event in trace["traceEvents"] if event["ph"] == "X"), key=lambda event: event["ts"])
    return [
        Bar(
            named[event["pid"], event["tid"]],
            event["name"],
            event["cat"],
            (event["ts"] - ran[0]["ts"]) / 1e3,
            event["dur"] / 1e3,
        )
        for event in ran
    ]


def draw_bars(bars: Sequence[Bar], from_ms: float, ms: float, picture: Path) -> None:
    """Draw what ran from `from_ms` on for `ms`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen = [bar for bar in bars if bar.start_ms < from_ms + ms and bar.start_ms + bar.long_ms > from_ms]
    tracks = sorted({bar.track for bar in seen}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(INCHES_WIDE, INCHES_PER_ROW * (len(tracks) + 1.5)), layout="constrained")
    for bar in seen:
        row = tracks.index(bar.track)
        colour = COLOURS.get(bar.category, OTHER_COLOUR)
        axes.barh(row, bar.long_ms, left=bar.start_ms, height=0.8, color=colour, edgecolor="white", linewidth=0.5)
        start, end = max(bar.start_ms, from_ms), min(bar.start_ms + bar.long_ms, from_ms + ms)
        letters = int((end - start) / ms * INCHES_WIDE * 0.85 / LETTER_INCHES)
        axes.text((start + end) / 2, row, _fit(bar.name, letters), ha="center", va="center", fontsize=7)
    axes.set(yticks=range(len(tracks)), yticklabels=tracks, xlim=(from_ms, from_ms + ms), xlabel="ms")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _fit(name: str, letters: int) -> str:
    """Return as many of the name's last words as have room: they tell operations of one kind apart."""
    words = name.split()
    while words and len(" ".join(words)) > letters:
        words = words[1:]
    return " ".join(words)


def main(argv: Sequence[str] | None = None) -> None:
    """Read a trace, draw it."""
    parser = argparse.ArgumentParser(description="Draw a part of an engine's trace as a picture.")
    parser.add_argument("trace", type=Path, help="what Engine.write_trace wrote")
    parser.add_argument("picture", type=Path, help="the file to write, .png or .svg")
    parser.add_argument("--from-ms", type=float, default=0.0, help="where the picture begins")
    parser.add_argument("--ms", type=float, default=100.0, help="how much of the trace it shows")
    options = parser.parse_args(argv)
    draw_bars(read_bars(json.loads(options.trace.read_text())), options.from_ms, options.ms, options.picture)


if __name__ == "__main__":
    main()
