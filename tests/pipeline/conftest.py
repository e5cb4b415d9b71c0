"""Tests of pipelines compile many small functions, which run once: XLA optimizes nothing here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def not_optimized(compile_quickly: None) -> None:
    """All tests of this folder."""
