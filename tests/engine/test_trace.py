"""A trace from given times: what a viewer needs to show each operation once, on a track of its own, with its arrows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.engine.graph import Span, chrome_trace, merge_traces, write_trace


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def track_names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    named = [event for event in events(trace, "M") if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


def test_an_operation_is_a_slice_on_its_thread_in_microseconds() -> None:
    trace = chrome_trace([Span(3, "step", "compute", "worker 0", 1.5, 1.75, facts={"read": ["w"]})], "rank 0", 9)
    (slice_,) = events(trace, "X")
    assert (slice_["name"], slice_["cat"], slice_["pid"]) == ("step", "compute", 9)
    assert (slice_["ts"], slice_["dur"]) == (1.5e6, 0.25e6)
    assert slice_["args"] == {"operation": 3, "read": ["w"]}
    assert track_names(trace) == {(9, slice_["tid"]): "worker 0"}
    (process,) = [event for event in events(trace, "M") if event["name"] == "process_name"]
    assert (process["pid"], process["args"]) == (9, {"name": "rank 0"})


def test_arrows_lead_from_what_was_waited_for_inside_its_slice() -> None:
    spans = [Span(0, "a", "compute", "one", 0.0, 1.0), Span(1, "b", "compute", "two", 1.0, 2.0, after=(0, 17))]
    trace = chrome_trace(spans, "engine")
    (start,), (end,) = events(trace, "s"), events(trace, "f")
    assert start["id"] == end["id"] and end["bp"] == "e"
    assert 0 <= start["ts"] < 1e6 == end["ts"]
    assert start["tid"] != end["tid"]


def test_operations_without_a_thread_get_as_many_tracks_as_run_at_once() -> None:
    times = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.75)]
    trace = chrome_trace([Span(number, "send", "network", None, *time) for number, time in enumerate(times)], "engine")
    names = track_names(trace)
    assert [names[event["pid"], event["tid"]] for event in events(trace, "X")] == [
        "network 0", "network 1", "network 0", "network 2",
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.sampled_from(["network", "codec"]))))
def test_nothing_overlaps_on_a_track(drawn: list[tuple[int, int, str]]) -> None:
    spans = [Span(n, "x", category, None, start, start + long) for n, (start, long, category) in enumerate(drawn)]
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events(chrome_trace(spans, "engine"), "X"):
        tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for intervals in tracks.values():
        intervals.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(intervals))


def test_traces_of_several_processes_become_one_and_their_arrows_stay_apart(tmp_path: Path) -> None:
    spans = [Span(0, "a", "compute", "one", 0.0, 1.0), Span(1, "b", "compute", "one", 1.0, 2.0, after=(0,))]
    write_trace(tmp_path / "trace.json", merge_traces([chrome_trace(spans, f"rank {rank}", 77) for rank in range(2)]))
    merged = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 1}
    assert len({event["id"] for event in events(merged, "s")}) == 2
    assert {event["id"] for event in events(merged, "s")} == {event["id"] for event in events(merged, "f")}
