"""The bench of the passes over memory at toy size: every pass has its bytes, and the sums are those of the passes."""

from __future__ import annotations

import json

import pytest

from passes import Pass, main


def test_a_pass_is_marked_beyond_one_and_a_half_times_its_floor():
    near, far = (Pass("node", "encode", 8, ns).row("ternary", 8e9) for ns in (1.4, 1.6))
    assert (near["floor_ns"], near["over_floor"], near[""]) == (1.0, 1.4, "")
    assert (far["over_floor"], far[""]) == (1.6, "*")


def test_every_pass_is_measured_and_the_sums_are_theirs(tmp_path):
    written = tmp_path / "passes.json"
    main(["--values", "20000", "--rounds", "2", "--codec", "ternary", "topk:density=0.1+sign", "--json", str(written)])
    rows = json.loads(written.read_text())["rows"]
    for codec in ("ternary", "topk:density=0.1+sign"):
        for where, passes in (("node", 6), ("hub", 6)):
            *each, total = (row for row in rows if (row["codec"], row["at"]) == (codec, where))
            assert len(each) == passes and all(row["ns"] >= 0 and row["bytes"] >= 0 for row in each)
            assert 0 < total["bytes"] <= sum(row["bytes"] for row in each) + 0.05
            if where == "node":
                assert total["ns"] == pytest.approx(sum(row["ns"] for row in each), abs=0.05)


def test_a_single_round_is_refused():
    with pytest.raises(SystemExit):
        main(["--rounds", "1"])
