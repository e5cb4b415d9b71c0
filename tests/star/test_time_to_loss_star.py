"""The bench of seconds to a loss, on the star: its real runs, and the exchanges that it times."""

from __future__ import annotations

from pathlib import Path

import pytest

import time_to_loss_star
from time_to_loss_rows import Job, Place

PROGRAM = "width=16,layers=1,heads=2,context=16,batch=2"


@pytest.mark.nightly
def test_a_real_run_is_scored_from_what_its_nodes_had(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("to be, or not to be, that is the question\n" * 200)
    place = Place(step_milliseconds=20.0, link=100e6)
    job = Job(
        kind="real",
        nodes=2,
        rate=3e-3,
        program=PROGRAM,
        data=str(text),
        settings='{"every": 2, "delay": 1}',
        place=place,
        until=5.0,
        max_steps=150,
    )
    line = time_to_loss_star.run_real(job)
    losses = [loss for _, loss in line["curve"]]
    assert len(losses) >= 3 and losses[-1] < losses[0]
    assert all(seconds >= 0 for seconds, _ in line["curve"])
    # an exchange every two steps, and one more at the end
    assert line["steps"] > 0 and line["period_steps"] > 1.5 and line["mb_up"] > 0
    assert line["chosen"]["every"] == 2


@pytest.mark.nightly
def test_an_exchange_takes_at_least_what_the_port_needs_for_it() -> None:
    job = Job(kind="exchange", nodes=2, place=Place(link=20e6), values_bytes=(40_000, 20_000))
    line = time_to_loss_star.time_exchange(job, repetitions=2)
    assert line["seconds"] > 60_000 * 8 / 20e6
    assert line["by"] in ("gloo", "the ring of zmqtrain")


@pytest.mark.parametrize("versions", [[], [3], [3, 12]])
def test_versions_are_read_from_the_names_of_checkpoints(tmp_path: Path, versions: list[int]) -> None:
    (tmp_path / "checkpoints").mkdir()
    for version in versions:
        (tmp_path / "checkpoints" / f"checkpoint-{version:012d}.safetensors").touch()
    (tmp_path / "checkpoints" / "checkpoint-000000000009.safetensors.part").touch()
    assert time_to_loss_star.saved_versions(tmp_path) == versions
