"""bench/chaos.py on a small star: whatever befalls it, nothing is lost or counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.chaos.schedule import BROKER, Fault

import chaos
from cable import Disturber
from star import Star

SMALL = "width=8,layers=1,heads=1,context=16,batch=4,batches_per_unit=8"


@pytest.mark.timeout(300)
def test_what_was_acknowledged_is_in_the_parameters_once_whatever_befalls_node_wire_and_broker(tmp_path: Path) -> None:
    case = chaos.Case(2, 0.05, SMALL, 8, every=4, delay=2)
    schedule = (
        Fault(0.2, "corrupt", "pc-1", 2.0, 0.05),
        Fault(0.4, "kill", "pc-0"),
        Fault(1.0, "kill", BROKER),
        Fault(2.5, "drop", "pc-1"),
    )
    with Star(2, 1e9) as star:  # so many units that the last fault comes before the end, also on busy cores
        outcome = chaos.play(star, tmp_path, case, units=80, schedule=schedule, seconds=120.0)
    assert outcome.ended and outcome.faults == ()
    assert [event.trouble for event in outcome.events] == [""] * 4
    assert outcome.audit.acknowledged > 8 and outcome.history.first == 0
    assert outcome.history.last == outcome.history.compared[-1] and len(outcome.history.compared) >= 3
    assert outcome.restarts >= 1 and outcome.audit.lives >= 2
    assert 0 < outcome.audit.goodput <= 1 and outcome.loss < 6


def test_a_bad_cable_does_to_frames_what_it_is_told() -> None:
    frame = bytes(range(100))
    assert Disturber(0, 0, 0, 0, 0).pass_on(frame) == [(0.0, frame)]
    assert Disturber(0, 1, 0, 0, 0).pass_on(frame) == []
    ((_, changed),) = Disturber(0, 0, 1, 0, 0).pass_on(frame)
    different = [number for number in range(100) if frame[number] != changed[number]]
    assert len(different) == 1 and different[0] >= 14
    assert Disturber(0, 0, 0, 1, 0).pass_on(frame) == [(0.0, frame)] * 2
    ((late, held),) = Disturber(0, 0, 0, 0, 1).pass_on(frame)
    assert late > 0 and held == frame
    some = Disturber(1, 0.5, 0, 0, 0)
    assert 20 < sum(len(some.pass_on(frame)) for _ in range(100)) < 80


def test_what_cannot_be_played_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--faults", "kil"], ["--nodes", "2"], ["--minutes", "0"]):
        with pytest.raises(SystemExit):
            chaos.read_options(wrong)
    assert "there is no fault 'kil'" in capsys.readouterr().err
