"""The bench of the codecs at toy size: every column comes out, the sizes are right, and bars are judged."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from zmqtrain.codecs.base import CODECS, TRANSFORMS, WRAPPERS, codec_from_spec
from zmqtrain.codecs.codec import SLAB_VALUES, Transform, chain
from zmqtrain.codecs.plain import bf16

FILE = Path(__file__).parents[2] / "bench" / "codecs.py"


@pytest.fixture(scope="module")
def bench():
    """The bench, under another name: as `codecs` it would be taken for Python's own module."""
    spec = spec_from_file_location("codecs_bench", FILE)
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_column_of_every_path_comes_out_and_the_sizes_are_right(bench, tmp_path, capsys):
    output = tmp_path / "codecs.json"
    arguments = ["--quick", "--values", "70000", "--path", "numpy", "payload", "jax", "--json", str(output)]
    assert bench.main([*arguments, "--spec", "float32", "int8", "ternary"]) == 0
    document, printed = json.loads(output.read_text()), capsys.readouterr().out
    rows = {(row["codec"], row["path"]): row for row in document["rows"]}
    assert document["machine"]["cores"] >= 1
    assert len(rows) == 9
    for (codec, path), row in rows.items():
        assert row["values"] == (SLAB_VALUES if path == "jax" else 70_000)
        assert row["rounds"] == bench.LEAST_ROUNDS
        assert row["seed"] == 0
        assert all(row[column] > 0 for column in (*bench.SPEED, *bench.MEDIANS, "bytes/value"))
        assert row["add_in_GB/s"] == pytest.approx(row["add_GB/s"] * row["bytes/value"] / 4)
        assert codec.partition(":")[0] in printed
    assert rows["float32", "numpy"]["relative_error"] == 0
    assert rows["float32", "numpy"]["bytes/value"] == 4
    assert rows["int8:block=256", "jax"]["bytes/value"] == pytest.approx(1 + 2 / 256)
    assert 0 < rows["int8:block=256", "numpy"]["relative_error"] < 0.02
    assert 0.4 < rows["ternary:block=128", "payload"]["relative_error"] < 0.5
    assert sum(line.startswith(("met   ", "missed")) for line in printed.splitlines()) == 2
    assert printed.count("not measured") == len(bench.BARS) - 2


def test_tables_for_a_page_have_a_line_for_each_codec_and_a_column_for_each_path(bench, capsys):
    arguments = ["--quick", "--markdown", "--values", "1000", "70000", "--path", "numpy", "jax"]
    assert bench.main([*arguments, "--spec", "int8", "topk:density=0.01+bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("**")] == ["**1,000 values**", "**70,000 values**"]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert table[0][:4] == ["codec", "bytes a value", "relative error", "encode, numpy"]
    assert table[0][4:] == ["encode, jax", "decode + add, numpy", "decode + add, jax"]
    assert [len(cells) for cells in table] == 8 * [7]
    small, large = table[2:4], table[6:8]
    assert [cells[0] for cells in small] == [cells[0] for cells in large] == ["`int8:block=256`", small[1][0]]
    assert small[0][1] == "1.008" and [cells[4] for cells in small] == ["", ""] == [cells[6] for cells in small]
    assert all(re.fullmatch(r"\d+\.\d\d \(\d+\.\d\d\)", large[0][place]) for place in (3, 4, 5, 6))
    assert large[1][4] == ""  # not one whole slab of 262,144
    assert sum(line.startswith(("- met: int8", "- missed: int8")) for line in lines) == 2


def test_an_array_that_is_less_than_a_slab_has_no_row_of_jax(bench, capsys):
    assert bench.main(["--quick", "--values", "1000", "--path", "jax", "numpy", "--spec", "bf16"]) == 0
    assert "left out: bf16, jax: 1,000 values are less than a slab" in capsys.readouterr().out


def test_every_default_is_a_codec_and_every_bar_is_tried_by_default(bench):
    names = [codec_from_spec(spec).name for spec in bench.SPECS]
    assert len(set(names)) == len(names)
    members = {member.partition(":")[0] for name in names for member in name.split("+")}
    assert members == {*CODECS, *TRANSFORMS, *WRAPPERS} and any("fragments=" in name for name in names)
    assert {bar.codec for bar in bench.BARS} <= set(names)
    assert {bar.path for bar in bench.BARS} <= set(bench.PATHS)


def test_an_unknown_codec_is_refused_with_the_choices(bench, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--quick", "--spec", "int9"])
    assert "ternary" in capsys.readouterr().err


def test_a_missed_bar_is_a_failure_only_if_strict(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "BARS", (bench.Bar("numpy", "bf16", "encode/copy", 1e9),))
    arguments = ["--quick", "--values", "1000", "--path", "numpy", "--spec", "bf16"]
    assert bench.main(arguments) == 0
    assert bench.main([*arguments, "--strict"]) == 1
    assert capsys.readouterr().out.count("missed  bf16, numpy: encode/copy >= 1e+09") == 2


def test_a_bar_is_tried_on_the_largest_array(bench):
    bar = bench.Bar("numpy", "bf16", "index_bits", 9.0, most=True)
    rows = [
        {"codec": "bf16", "path": "numpy", "values": values, "index_bits": bits} for values, bits in ((9, 1), (99, 10))
    ]
    assert bar.verdict(rows)[0] is False
    assert bar.verdict(rows[:1]) == (True, "bf16, numpy: index_bits <= 9: 1 at 9 values")
    assert bar.verdict([])[0] is None


def test_bits_of_an_index_are_counted_from_the_layouts(bench):
    """A transform that keeps every eighth value and spends one byte on each."""
    transform = Transform(
        name="eighth",
        init=lambda n: (),
        passes=lambda n: -(-n // 8),
        layout=lambda n: ((np.uint8, -(-n // 8)),),
        forward=lambda x, state: ((), x, state),
        backward=lambda buffers, values, n: values,
        check=lambda buffers, n: None,
        backward_into=lambda buffers, values, out, add: None,
    )
    assert bench.index_bits(chain(transform, bf16())) == 8
    assert bench.index_bits(bf16()) is None
    assert bench.index_bits(codec_from_spec("feedback+int8")) is None


def test_the_values_have_a_scale_for_each_block_and_follow_from_the_seed(bench):
    x = bench.make_values(10_500, 3)
    assert (x.dtype, x.shape) == (np.float32, (10_500,))
    assert (x == bench.make_values(10_500, 3)).all() and (x != bench.make_values(10_500, 4)).any()
    deviations = x[:10_000].reshape(10, 1000).std(axis=1)
    assert deviations.max() > 2 * deviations.min()
