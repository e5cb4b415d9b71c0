"""The bench around the federation: a sweep goes on where it was cut, its rows, its page and its plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain.core.errors import ConfigError

import codec_learning
from codec_learning import Setup, run_method
from codec_methods import METHODS, TASKS, Method, parse_row
from codec_table import draw, markdown, read_runs, short_name, summarise

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batches_per_unit": 4}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests, so that its program is compiled once."""
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text("to be, or not to be, that is the question\n" * 100)
    return str(path)


def bench(text: str, *rest: str) -> None:
    small = ["--argument", *(f"{name}={value}" for name, value in SMALL.items())]
    codec_learning.main(["--task", "lm", "--text", text, "--steps", "16", "--nodes", "2", *small, *rest])


ROWS = ["--method", "synchronous", "--row", "name=half|codec=bf16|every=4"]


@pytest.mark.nightly
def test_a_sweep_goes_on_where_it_was_cut(text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, other = tmp_path / "lines", tmp_path / "others"
    bench(text_file, *ROWS, "--seeds", "1", "--results", str(results))
    whole = results.read_text()
    results.write_text(whole + whole[:40])
    bench(text_file, *ROWS, "--seeds", "2", "--results", str(other), str(results))
    assert [json.loads(line)["seed"] for line in other.read_text().splitlines()] == [1, 1]
    lines = read_runs([results, other])
    assert len(lines) == 4
    rows = {row["method"]: row for row in summarise(lines)}
    assert rows["synchronous"]["over_sync_%"] == 0
    assert rows["synchronous"]["compression"] == pytest.approx(1)
    assert rows["half"]["seeds"] == 2
    assert rows["half"]["compression"] > 1
    capsys.readouterr()
    bench(text_file, "--results", str(other), str(results), "--plot", str(tmp_path / "plot.png"))
    assert "half" in capsys.readouterr().out
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert len(read_runs([results, other])) == 4


def test_an_optimizer_that_a_task_has_no_rate_for_is_refused() -> None:
    with pytest.raises(SystemExit, match="--inner muon: the task mnist has a rate for adamw alone; it is left out"):
        codec_learning.main(["--task", "mnist", "--inner", "muon"])


def test_no_two_methods_are_called_alike_or_are_the_same_run() -> None:
    assert len({method.name for method in METHODS}) == len(METHODS)
    assert len({json.dumps(method.settings) for method in METHODS}) == len(METHODS)


def test_a_warm_start_is_the_synchronous_checkpoint_and_the_data_that_follows(text_file: str, tmp_path: Path) -> None:
    task = TASKS[0]
    task = replace(task, arguments={**task.arguments, **SMALL}, steps=16, warm_steps=16)
    scratch = Setup(task=task, nodes=2, text=text_file)
    warm = Setup(task=task, nodes=2, text=text_file, start="warm")
    synchronous = Method(name="synchronous", kind="synchronous")
    first, second = (run_method(setup, synchronous, 0, tmp_path / "kept") for setup in (scratch, warm))
    assert second["rate"] == pytest.approx(first["rate"] / 3)
    assert second["loss"] < first["loss"]
    (kept,) = (tmp_path / "kept").iterdir()
    with np.load(kept) as leaves:
        assert sum(leaf.size for leaf in leaves.values()) == first["parameters"]


def test_a_short_name_leaves_out_defaults_but_not_how_much_is_sent() -> None:
    assert short_name("dct:block=64+topk:density=0.01+int4:block=128") == "dct+topk:density=0.01+int4"
    assert short_name("int4:block=64;<1024=bf16;*bias=int8:block=256") == "int4:block=64;<1024=bf16;*bias=int8"
    assert short_name("lowrank:rank=4,width=0") == "lowrank:rank=4"
    assert short_name("codec=ternary:block=128|every=4|rate=2") == "ternary, every=4"
    assert short_name("top-1 % sign k=2") == "top-1 % sign k=2"


def lines_of_results() -> list[dict[str, Any]]:
    """Of a synchronous method, one that is as good, one far worse, one that diverged, and a node alone."""
    setup = Setup(task=TASKS[0])
    lines = []
    for row, compression, loss in (
        ("name=synchronous|kind=synchronous", 1.0, 2.0),
        ("name=a*b|codec=sign", 233.0, 2.02),
        ("name=far|codec=int2", 99.0, 3.0),
        ("name=lost|codec=int8", 31.0, float("nan")),
        ("name=one node|kind=one node", None, 2.4),
    ):
        method = parse_row(row)
        of_all = {"method": method.name, **method.settings, "rate": setup.rate, "compression": compression}
        of_all |= {"bytes_up": 0, "bytes_down": 0, "seconds": 1.0}
        lines += [{**setup.describe(seed), **of_all, "loss": loss + 0.02 * seed} for seed in (0, 1)]
    return lines


def test_a_page_shows_a_table_for_each_comparison_by_rising_compression() -> None:
    other = [line | {"inner": "muon"} for line in lines_of_results()]
    first, second = markdown(summarise(lines_of_results() + other))
    assert second.startswith("**lm, muon, scratch, 4096 steps**\n\n| method |")
    assert first.splitlines()[:2] == ["**lm, adamw, scratch, 4096 steps**", ""]
    assert first.splitlines()[4:] == [
        "| synchronous | 1x | 2.0100 ± 0.0141 | +0.00 ± 0.00 % | 2 |",
        "| lost | 31x | diverged | diverged | 2 |",
        "| far | 99x | 3.0100 ± 0.0141 | +49.75 ± 0.35 % | 2 |",
        "| a\\*b | 233x | 2.0300 ± 0.0141 | +1.00 ± 0.01 % | 2 |",
        "| one node | no bytes | 2.4100 ± 0.0141 | +19.90 ± 0.14 % | 2 |",
    ]


def test_a_plot_holds_what_lies_far_above_and_what_diverged(tmp_path: Path) -> None:
    draw(summarise(lines_of_results()), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_row_says_a_method_and_a_mistake_in_it_is_named() -> None:
    row = parse_row(
        "name=592x|every=1@0,16@0.5|delay=4|outer=nesterov:rate=0.8,momentum=0.5|rate=2|codec=int8:block=64"
    )
    assert (row.name, row.rate, row.exchange.every) == ("592x", 2.0, ((0.0, 1), (0.5, 16)))
    assert row.exchange.codec == row.exchange.broadcast_codec == "int8:block=64"
    with pytest.raises(ValueError, match="evry"):
        parse_row("name=x|evry=3")
    with pytest.raises(ValueError, match="stray"):
        parse_row("name=x|stray")
    with pytest.raises(ConfigError, match="nothing"):
        parse_row("codec=nothing")
