"""Grids of cases, and examples that hypothesis draws: some in every run, the others, which are alike, at night."""

from __future__ import annotations

import os
from typing import Any

import pytest

AT_NIGHT = "ZMQTRAIN_TESTS_AT_NIGHT"
"""Is set where --nightly is, for the workers of a run and the programs that tests start."""
SHARE = 3


def nightly(*cases: Any) -> list[Any]:
    """Return the cases as parameters that only --nightly selects; a tuple is the parameters of one case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly) for case in cases]


def examples(count: int) -> int:
    """Return how many examples a property is tried on: so many at night, a third of them in every run."""
    return count if AT_NIGHT in os.environ else max(4, count // SHARE)
