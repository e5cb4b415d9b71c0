"""The hub bench on a small star: a tiny model and a short window, for the row alone; needs root, `ip` and `tc`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from hub import Case, main

CPU = ("transport_cpu_s_per_gb", "plain_tcp_cpu_s_per_gb")
FIGURES = {"exchange_ms", "limit_ms", "exchange_over_limit", *CPU, "heartbeat_p99_ms", "busy"}


@pytest.mark.nightly
def test_a_row_has_every_key_and_numbers_that_can_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "rows.json"
    small = ["--nodes", "2", "--params", "4e4", "--fragments", "2", "--in-flight", "1", "--seconds", "4"]
    monkeypatch.setattr(sys, "argv", ["hub.py", *small, "--json", str(written)])
    main()
    printed = capsys.readouterr().out
    (row,) = json.loads(written.read_text())["rows"]
    assert all(key in printed for key in row)
    assert all(math.isfinite(row[key]) and row[key] > 0 for key in FIGURES)
    assert row["heartbeats"] > 0


def test_the_limit_of_as_many_shards_as_nodes_is_that_of_a_ring() -> None:
    case = Case(nodes=4, shards=4, params=1_000_000)
    assert case.bytes_per_port == pytest.approx(2 * 3 / 4 * 4e6)
    assert Case(nodes=4, shards=1, params=1_000_000).bytes_per_port == 16e6
