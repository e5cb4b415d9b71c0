"""The efficiency bench on a small star: a tiny model and few steps, for the row alone; needs root, `ip` and `tc`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from efficiency import Case, default_cases, main, measure, read_options, work_alone

SETTINGS = {"nodes", "params", "codec", "every"}
FIGURES = {
    "efficiency",
    "efficiency_of_steps",
    "period_steps",
    "age_steps",
    "mb_per_node_step",
    "node_cpu_ns_per_param",
    "hub_cpu_ns_per_param",
    "held_ms",
    "exchange_over_limit",
    "busy",
    "predicted_efficiency",
    *(f"alone_{name}_ms" for name in ("codec", "sockets", "rebase", "hub", "hub_sockets")),
    "step_cpu_ms",
}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_row_has_every_key_and_numbers_that_can_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "rows.json"
    small = ["--nodes", "2", "--params", "2e4", "--fragments", "2", "--every", "2", "--steps", "60"]
    small += ["--release", "all"]  # who is held up for a moment has not all that others exchange meanwhile to apply
    monkeypatch.setattr(sys, "argv", ["efficiency.py", *small, "--json", str(written)])
    main()
    printed = capsys.readouterr().out
    document = json.loads(written.read_text())
    (row,) = document["rows"]
    assert document["machine"]["cores"] >= 1
    assert row.keys() >= SETTINGS | FIGURES
    assert all(key in printed for key in row)
    assert (row["nodes"], row["codec"], row["fragments"], row["every"], row["delay"]) == (2, "ternary", 2, 2, 1)
    assert 0.9 * 2e4 < row["params"] < 1.1 * 2e4
    assert 0 < row["efficiency"] < 1.5 and 0 < row["busy"] <= 1
    assert 0 < row["efficiency_of_steps"] < 2
    # of few steps the period is rough: one aggregate more may fall into them than their offers make
    assert row["period_steps"] > 1.5 and row["model_period_steps"] == pytest.approx(2 * row["period_steps"])
    assert all(math.isfinite(row[key]) for key in FIGURES)
    assert 0 < row["predicted_efficiency"] < 1
    assert all(row[f"alone_{what}_ms"] > 0 for what in ("codec", "sockets", "rebase", "hub", "hub_sockets"))
    work = work_alone(row)
    assert work.deltas > 0 and work.codec == row["alone_codec_ms"] / 1e3


def test_by_default_every_row_offers_at_least_every_16_steps_and_applies_half_of_that_later() -> None:
    cases = default_cases(read_options([]))
    assert [(case.fragments, case.every, case.delay) for case in cases] == [(1, 16, 8), (4, 12, 6), (8, 12, 6)]


def test_a_process_that_cannot_go_on_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="broker on hub ended with 1"):
        measure(Case(nodes=1, params=20_000, codec="no such codec"))
    assert "no such codec" in capfd.readouterr().err
