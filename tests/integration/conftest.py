"""After each test whoever it has left training trains no longer: the next has the cores; strange sockets are closed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from channels import StrangeSockets

from meshes import broker


@pytest.fixture(autouse=True)
def nobody_trains_on():
    yield
    if (runs := sys.modules.get("runs")) is not None:
        for trainer in list(runs.TRAINERS):
            trainer.stop.set()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with broker() as address:
        yield address


@pytest.fixture
def strangers() -> Iterator[StrangeSockets]:
    sockets = StrangeSockets()
    yield sockets
    sockets.close()
