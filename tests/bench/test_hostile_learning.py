"""What nodes whose training diverges cost the others, a few rows of it; and what is said of figures."""

from __future__ import annotations

import pytest
from hostile_learning import Case, judge, measure

from tests.grids import nightly

ROW = {"case": "rate 30 from the start", "bad": "1 of 3", "loss": 0.3, "without": 0.29, "ratio": 0.3 / 0.29}


@pytest.mark.parametrize(
    "case",
    [
        Case(scale=2600.0, begins="middle", steps=240, nodes=5, bad=3, key="lab"),
        *nightly(Case(rate=3.0, steps=240), Case(rate=3000.0, begins="middle", steps=240, nodes=5, bad=2)),
    ],
    ids=lambda case: case.name,
)
def test_nodes_that_diverge_cost_the_others_next_to_nothing(case):
    rows = measure([case])
    assert judge(rows) == [] and rows[0]["refused"] > 0


def test_what_is_not_as_it_should_be_is_named():
    assert judge([ROW]) == []
    assert judge([ROW | {"loss": 8.4, "ratio": 28.0}]) == [
        "rate 30 from the start, 1 of 3: a loss of 8.4, 28.00 times 0.29"
    ]
    assert judge([ROW | {"ratio": float("nan")}])
