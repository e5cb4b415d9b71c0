"""What every public thing leaves behind once it is closed: no thread, no task, no file descriptor."""

from __future__ import annotations

import pytest

from meshes import broker
from visits import VISITS, Masters
from vitals import count_left


@pytest.fixture(scope="module")
def places():
    with broker() as address, Masters() as masters:
        yield address, masters.first


@pytest.mark.parametrize("name", list(VISITS))
def test_nothing_is_left_of_what_was_closed(places, name):
    VISITS[name](*places)  # what is made once in a process is made now
    before = count_left()
    VISITS[name](*places)
    assert count_left(before, seconds=60.0).beyond(before) == []
