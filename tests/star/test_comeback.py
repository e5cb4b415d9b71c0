"""The bench of a broker that comes back, on a small star, with one kill; needs root, `ip` and `tc`."""

from __future__ import annotations

import random

import pytest

from comeback import measure_restarts, read_options


@pytest.mark.nightly
def test_a_row_has_the_seconds_until_the_first_and_the_last_node_has_a_new_aggregate() -> None:
    (row,) = measure_restarts(2, 1, 0.2, random.Random(0))
    assert row["nodes"] == 2 and 0 < row["first"] <= row["all"]


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(SystemExit):
        read_options(["--nodes", "0"])
