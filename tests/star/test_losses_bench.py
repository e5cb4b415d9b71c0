"""bench/losses.py on a small star: a loss in the midst of a call is named by all others, who go on."""

from __future__ import annotations

import pytest

from tests.grids import nightly

import losses


@pytest.mark.parametrize(
    ("call", "loss"),
    [
        ("allreduce:tree", "killed"),
        *nightly(("push_pull: a broker", "unplugged"), ("push_pull, bsp: a worker", "killed")),
    ],
)
def test_a_row_has_the_seconds_until_all_others_know(call: str, loss: str) -> None:
    row = losses.measure(call, loss, 3, 0.2)
    assert (row["call"], row["loss"], row["nodes"]) == (call, loss, 3)
    assert 0 < row["seconds"] < losses.WAIT_SECONDS


def test_fewer_than_three_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        losses.read_options(["--nodes", "2"])
    assert "--nodes must be at least 3" in capsys.readouterr().err
