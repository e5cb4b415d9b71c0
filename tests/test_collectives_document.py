"""docs/collectives.md is held to the code: every algorithm with its cost, and the generator on the page runs."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

import pytest

from zmqtrain.collectives.algorithms import ALLGATHER, ALLREDUCE, BROADCAST, REDUCE, REDUCE_SCATTER
from zmqtrain.collectives.communicator import Communicator
from zmqtrain.collectives.costs import COSTS, steps_taken

from orders import evaluated

PAGE = (Path(__file__).parents[1] / "docs" / "collectives.md").read_text()
ENTRIES = {
    title: (algorithms, body)
    for title, algorithms, body in re.findall(r"^\*\*([^*]+)\*\*([^\n]*)\n((?:- .*\n(?:  .*\n)*)+)", PAGE, re.MULTILINE)
}


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_every_allreduce_is_described_with_its_cost(algorithm: str) -> None:
    _, body = ENTRIES[algorithm]
    said = " ".join(body.split())
    if algorithm not in ("halving", "tree"):
        assert f"sends {COSTS[algorithm].each.partition(';')[0]};" in said
    (*_, steps) = re.findall(r"; ([^;]+?) steps?\b", said)
    assert all(evaluated(steps, size) == steps_taken(algorithm, size) for size in (2, 4, 8))


def test_every_call_of_the_table_is_one_with_these_arguments_in_this_order() -> None:
    rows = re.findall(r"^\| (`.*) \|", PAGE[: PAGE.index("## What it costs")], re.MULTILINE)
    calls = [call for row in rows for call in re.findall(r"`(\w+)(?:\(([^`]*)\))?`", row.partition(" | ")[0])]
    assert len(calls) >= 16
    for name, written in calls:
        known = list(signature(getattr(Communicator, name)).parameters)
        given = [argument.partition("=")[0] for argument in written.split(", ") if argument]
        assert [argument for argument in known if argument in given] == given
    blocking = [name for name, _ in calls if not name.startswith("i") and name not in ("probe", "mprobe")]
    assert all(hasattr(Communicator, f"i{name}") for name in blocking)


@pytest.mark.parametrize(
    ("title", "registries"),
    [("reduce_scatter, allgather", (REDUCE_SCATTER, ALLGATHER)), ("broadcast, reduce", (BROADCAST, REDUCE))],
)
def test_the_algorithms_of_the_others_are_named(title: str, registries: tuple[dict[str, object], ...]) -> None:
    algorithms, _ = ENTRIES[title]
    assert all(re.findall(r"`(\w+)`", algorithms) == list(registry) for registry in registries)


def test_the_generator_on_the_page_does_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "run_locally" in text)
    exec(example, {})
    said = re.findall(r"print\(.*\)  # (.*)", example)
    assert capsys.readouterr().out.splitlines() == said
