"""The picture of a trace: what ran is read with its track and its time, and drawn."""

from __future__ import annotations

from pathlib import Path

from zmqtrain.engine.graph import Span, chrome_trace, write_trace

from trace_picture import Bar, main, read_bars

TRACE = chrome_trace(
    [
        Span(0, "compute bucket 0", "compute", "worker 0", 5.0, 5.010),
        Span(1, "allreduce bucket 0", "network", None, 5.010, 5.030),
        Span(2, "compute bucket 1", "compute", "worker 0", 5.010, 5.020),
    ],
    "rank 0",
)


def test_bars_have_their_tracks_and_count_from_the_first() -> None:
    bars = [Bar(bar.track, bar.name, bar.category, round(bar.start_ms), round(bar.long_ms)) for bar in read_bars(TRACE)]
    assert bars == [
        Bar("worker 0", "compute bucket 0", "compute", 0, 10),
        Bar("network 0", "allreduce bucket 0", "network", 10, 20),
        Bar("worker 0", "compute bucket 1", "compute", 10, 10),
    ]


def test_a_picture_is_written(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", TRACE)
    main([str(tmp_path / "trace.json"), str(tmp_path / "picture.png"), "--ms", "30"])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
