"""An engine of two threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zmqtrain as zt


@pytest.fixture
def engine() -> Iterator[zt.Engine]:
    with zt.Engine(2, name="test") as engine:
        yield engine
