"""The soak: a moment of it for real, and what it says of figures that grow."""

from __future__ import annotations

import subprocess
import sys

import pytest

from soak import GROWTH_BYTES, Case, Here, judge, measure

FLAT = {"process": "broker", "growth_mb": 0.1, "descriptors": 0, "threads": 0, "noted": []}


def test_a_moment_of_it_ends_with_all_that_was_opened_closed_and_nothing_noted():
    case = Case(minutes=0.03, nodes=1, params=1000, stay_seconds=0.4, sample_seconds=0.1, visits=False)
    broker, node = measure(case)
    assert broker["noted"] == node["noted"] == []
    assert (broker["process"], node["process"]) == ("broker", "node 0")
    assert node["steps"] > 0 and broker["rss_mb"] > 10


def test_every_process_has_one_arena_whatever_else_its_environment_holds(tmp_path):
    program = "import os; print(os.environ['MALLOC_ARENA_MAX'], os.environ['OTHER'])"
    with Here(tmp_path).popen(
        "one", [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={"OTHER": "kept"}
    ) as process:
        assert process.communicate()[0] == "1 kept\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"growth_mb": GROWTH_BYTES / 1e6 + 1}, ["broker grew by 5.19 MB in the second half"]),
        ({"descriptors": 2}, ["broker has 2 descriptors more"]),
        ({"threads": 1}, ["broker has 1 threads more"]),
        ({"noted": ["ResourceWarning: unclosed"]}, ["broker: ResourceWarning: unclosed"]),
    ],
)
def test_what_grows_is_named(change, said):
    assert judge([FLAT, FLAT | change]) == said
