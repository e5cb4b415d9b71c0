"""When a checkpoint is due, as people say it."""

from __future__ import annotations

import pytest

from zmqtrain.checkpoint.folder import Every, every_from_text
from zmqtrain.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "every"),
    [("", Every(60.0)), ("60s", Every(60.0)), ("5min", Every(300.0)), ("64", Every(versions=64))],
)
def test_a_time_or_a_count_of_versions_is_read(text, every):
    assert every_from_text(text) == every


def test_in_strict_mode_it_is_a_count():
    assert every_from_text("", strict=True) == Every(versions=64, together=True)
    assert every_from_text("7", strict=True) == Every(versions=7, together=True)
    with pytest.raises(ConfigError, match="save at the same versions"):
        every_from_text("60s", strict=True)


@pytest.mark.parametrize("text", ["0", "often", "0.01s", "-1s", "5 weeks"])
def test_what_cannot_be_read_is_said_with_an_example(text):
    with pytest.raises(ConfigError, match="checkpoint_every"):
        every_from_text(text)


def test_it_is_due_after_that_time_or_that_many_versions():
    assert Every(10.0).is_due(5, 5, 10.0) and not Every(10.0).is_due(99, 0, 9.9)
    assert Every(versions=4).is_due(12, 8, 0.0) and not Every(versions=4).is_due(11, 8, 99.0)
    together = Every(versions=4, together=True)
    assert [v for v in range(13) if together.is_due(v, -1, 99.0)] == [0, 4, 8, 12] and not together.is_due(8, 8, 99.0)
