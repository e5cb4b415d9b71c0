"""The bench of the device: content where there is none, and at toy size all of it comes out and adds up."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gpu import TOY, Size, _judge, main, measure_codec

from tests.grids import nightly
from zmqtrain.codecs.base import codec_from_spec


def test_without_a_gpu_it_says_so_in_one_line_and_is_content(capsys):
    assert main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "no GPU" in line and "--here" in line


def test_a_codec_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--here", "--spec", "ternory"])
    assert "ternory" in capsys.readouterr().err


@pytest.mark.parametrize(("spec", "count"), [("ternary", 40_000), *nightly(("float32", 70_000), ("lowrank", 40_000))])
def test_a_codecs_row_compares_it_with_a_copy_and_with_numpy(spec, count):
    x = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    row = measure_codec(codec_from_spec(spec), x, TOY)
    assert row["same_bytes"] and row["codec"] == codec_from_spec(spec).name
    assert all(row[f"{name}_GB/s"] > 0 for name in ("copy", "encode", "decode", "frames", "back"))
    assert row["encode/copy"] > 0 and row["decode/copy"] > 0


@pytest.mark.nightly
def test_at_toy_size_a_node_trains_with_exchanges_on_and_off(tmp_path, capsys):
    output = tmp_path / "gpu.json"
    assert main(["--here", "--part", "node", "--json", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["params"] > 100_000 and row["on_device"] and row["exchanges"] > 0
    assert row["step_on_ms"] > 0 and row["step_off_ms"] > 0
    assert 0 < row["fetched_mb"] <= row["published_mb"] * 1.05
    assert row["put_mb"] > 0
    printed = capsys.readouterr().out
    assert "PASS: the node compresses on its device" in printed and "FAIL" not in printed


def test_a_missed_bar_is_a_failure():
    row = {"on_device": True, "fetched_mb": 1.0, "published_mb": 1.0, "ratio": 0.97}
    assert [passed for _, passed in _judge(row, Size())] == [True, True, False]
    assert [passed for _, passed in _judge({**row, "ratio": 0.99, "fetched_mb": 4.0}, Size())] == [True, False, True]
    assert [passed for _, passed in _judge({**row, "on_device": False}, Size())] == [False]
