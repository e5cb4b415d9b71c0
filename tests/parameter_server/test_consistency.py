"""How far ahead a worker may be, by the name of the consistency."""

from __future__ import annotations

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.parameter_server.store import consistency_from_spec


def test_under_bsp_nobody_is_ahead_and_gradients_are_averaged():
    bsp = consistency_from_spec("bsp")
    assert bsp.averages and bsp.may_proceed(0) and not bsp.may_proceed(1)


def test_asynchronous_workers_never_wait():
    assert not consistency_from_spec("async").averages and consistency_from_spec("async").may_proceed(10**9)


def test_bounded_workers_wait_when_they_are_further_ahead_than_s():
    bounded = consistency_from_spec("bounded:s=2")
    assert bounded.name == "bounded:s=2" and consistency_from_spec("bounded").name == "bounded:s=3"
    assert [bounded.may_proceed(ahead) for ahead in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize("text", ["bounded:s=-1", "ssp", "bsp:s=1", "bounded:s=1.5"])
def test_what_is_no_consistency_is_refused_with_the_choices(text):
    with pytest.raises(ConfigError):
        consistency_from_spec(text)
