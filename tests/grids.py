"""Grids of cases: some in every run, the others, which take the same branches, at night."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """Return the cases as parameters that only --nightly selects; a tuple is the parameters of one case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly) for case in cases]
