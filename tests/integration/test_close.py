"""What every public thing leaves behind once it is closed: no thread, no task, no file descriptor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import soak
from meshes import broker
from visits import VISITS
from vitals import count_left


@pytest.fixture(scope="module")
def places():
    """The addresses of a broker here, and of the first of two brokers in a process of their own."""
    argv = [sys.executable, soak.__file__, "shards", "{}"]
    with broker() as address, subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shards:
        yield address, json.loads(shards.stdout.readline())["address"]


@pytest.mark.parametrize("name", list(VISITS))
def test_nothing_is_left_of_what_was_closed(places, name):
    VISITS[name](*places)  # what is made once in a process is made now
    before = count_left()
    VISITS[name](*places)
    assert count_left(before, seconds=60.0).beyond(before) == []
