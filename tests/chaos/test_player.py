"""The player: each fault at its time to its target, taken back at its end and on every way out."""

from __future__ import annotations

import io

import pytest

from tests.clocks import VirtualClock
from zmqtrain.chaos import run as module
from zmqtrain.chaos.run import Player
from zmqtrain.chaos.schedule import BROKER, Fault


class Target:
    """A service and a wire that write down what is done to them."""

    def __init__(self, done):
        self.done = done

    def look(self):
        pass

    def kill(self):
        self.done.append("kill")
        return 7.0

    def __getattr__(self, name):
        return lambda *arguments: self.done.append(" ".join([name, *map(str, arguments)]))


@pytest.fixture
def time(monkeypatch):
    clock = VirtualClock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def stage(time):
    done, lines = [], io.StringIO()
    service, wire = Target(done), Target(done)
    return Player({"pc-0": service, BROKER: service}, {"pc-0": wire}, lines), done, lines


def test_faults_begin_and_end_in_the_order_of_their_times(stage, time):
    player, done, lines = stage
    schedule = (
        Fault(1.0, "stop", "pc-0", 5.0),
        Fault(2.0, "kill", BROKER),
        Fault(3.0, "unplug", "pc-0", 1.0),
        Fault(7.0, "slow", "pc-0", 1.0, 0.5),
        Fault(9.0, "corrupt", "pc-0", 1.0, 0.1),
        Fault(11.0, "disk", "pc-0", 1.0),
        Fault(13.0, "drop", "pc-0"),
        Fault(14.0, "clock", "pc-0", 0.0, -3.0),
    )
    player.play(schedule, 20.0)
    assert done == [
        "stop", "kill", "unplug", "plug", "go_on", "slow 0.5", "disturb slow 0.5", "go_on", "disturb slow 0.0",
        "disturb corrupt 0.1", "disturb corrupt 0.0", "fill_disk", "free_disk", "drop", "jump_clock -3.0",
    ]  # fmt: skip
    assert time.now == pytest.approx(120.0, abs=0.1)
    assert [event.fault for event in player.events] == list(schedule)
    assert player.events[1].began_at == 7.0  # when it was done, as who did it says
    assert lines.getvalue().splitlines()[0].split() == ["1.0", "s", "stop", "pc-0", "for", "5.0", "s"]


def test_what_cannot_be_done_is_written_down_and_the_rest_is_played(stage):
    player, done, lines = stage
    player.play(
        (Fault(1.0, "unplug", BROKER, 1.0), Fault(2.0, "reorder", BROKER, 1.0, 0.1), Fault(3.0, "kill", "pc-0")), 4
    )
    assert [bool(event.trouble) for event in player.events] == [True, True, False]
    assert done == ["kill"] and "could not be done" in lines.getvalue().splitlines()[0]


def test_what_was_begun_is_ended_when_the_run_is_over_before(stage, time):
    player, done, _ = stage
    player.play((Fault(1.0, "stop", "pc-0", 50.0), Fault(20.0, "kill", "pc-0")), 60.0, lambda: time.now > 110)
    assert done == ["stop", "go_on"]


def test_one_fault_can_be_done_and_undone(stage):
    player, done, _ = stage
    fault = Fault(0.0, "unplug", "pc-0", 3.0)
    assert player.do(fault).trouble == ""
    player.undo(fault)
    assert done == ["unplug", "plug"]
