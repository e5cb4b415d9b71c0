"""Turn what operations ran when into a file for a trace viewer (pure: times are arguments).

Rule 1: a trace is JSON in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open as it is.
Rule 2: what ran on a thread stands on that thread's track. An operation whose end was told later (`push_async`) stands
on tracks of its category, as many as ran at once, so that its whole time is seen and nothing overlaps on a track.
Rule 3: an arrow leads from each operation to those that waited for it.
Rule 4: times are of the machine's monotonic clock: traces of several processes of one machine fit together.
Source: Trace Event Format (Google, 2016), sections "Complete Events", "Metadata Events" and "Flow Events".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """When one operation ran, in seconds.

    number: its place in the order of pushing.  track: the thread's name; None if its end was told later.
    after: the numbers of those it waited for.  facts: what else a viewer shows of it.
    """

    number: int
    name: str
    category: str
    track: str | None
    start_seconds: float
    end_seconds: float
    after: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def chrome_trace(spans: Iterable[Span], process_name: str, process: int = 0) -> JsonObject:
    """Return the trace of one process as an object of the Trace Event Format.

    process: tells processes apart in a trace of several; their names and tracks come with it.
    """
    in_order = sorted(spans, key=lambda span: (span.start_seconds, span.number))
    tracks = _tracks(in_order)
    threads = {name: thread for thread, name in enumerate(sorted(set(tracks.values())), start=1)}
    events: list[JsonObject] = [_metadata(process, 0, "process_name", {"name": process_name})]
    for name, thread in threads.items():
        events.append(_metadata(process, thread, "thread_name", {"name": name}))
        events.append(_metadata(process, thread, "thread_sort_index", {"sort_index": thread}))
    ended: dict[int, Span] = {span.number: span for span in in_order}
    for span in in_order:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": process,
                "tid": threads[tracks[span.number]],
                "ts": _microseconds(span.start_seconds),
                "dur": _microseconds(span.end_seconds) - _microseconds(span.start_seconds),
                "args": {"operation": span.number, **span.facts},
            }
        )
        for number in span.after:
            if (earlier := ended.get(number)) is not None:
                events += _arrow(process, earlier, threads[tracks[number]], span, threads[tracks[span.number]])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merge_traces(traces: Sequence[JsonObject]) -> JsonObject:
    """Return one trace of several, of one machine: each becomes a process of its own, in their order."""
    events = [event | {"pid": process} for process, trace in enumerate(traces) for event in trace["traceEvents"]]
    for event in events:
        if "id" in event:
            event["id"] = f"{event['pid']}.{event['id']}"
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, trace: JsonObject) -> None:
    """Write a trace to a file."""
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def _tracks(in_order: Sequence[Span]) -> dict[int, str]:
    """Return the name of each operation's track; those without a thread get the first free one of their category."""
    tracks: dict[int, str] = {}
    free_from: dict[str, list[float]] = {}
    for span in in_order:
        if span.track is not None:
            tracks[span.number] = span.track
            continue
        lanes = free_from.setdefault(span.category, [])
        lane = next((lane for lane, free in enumerate(lanes) if free <= span.start_seconds), len(lanes))
        lanes[lane : lane + 1] = [span.end_seconds]
        tracks[span.number] = f"{span.category} {lane}"
    return tracks


def _arrow(process: int, earlier: Span, from_thread: int, span: Span, to_thread: int) -> list[JsonObject]:
    shared = {"name": "waits for", "cat": "dependency", "id": f"{earlier.number}-{span.number}", "pid": process}
    start, end = _microseconds(earlier.start_seconds), _microseconds(earlier.end_seconds)
    return [  # the arrow begins inside the slice that it comes from: at its very end it would be of the next one
        {"ph": "s", **shared, "tid": from_thread, "ts": max(start, end - 1e-3)},
        {"ph": "f", "bp": "e", **shared, "tid": to_thread, "ts": _microseconds(span.start_seconds)},
    ]


def _metadata(process: int, thread: int, name: str, facts: JsonObject) -> JsonObject:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": facts}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
