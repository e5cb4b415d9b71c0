"""Who is lost to the ports of a group over real sockets, how soon, and that all are told of the same loss."""

from __future__ import annotations

import os
import signal

import pytest
from runs import BrokerProcess

from zmqtrain.collectives import mesh
from zmqtrain.collectives.mesh import LEFT
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol import failure_detector
from zmqtrain.protocol import hub as hub_machine
from zmqtrain.protocol.messages import GroupLost

from meshes import WAIT_SECONDS, echoing, ports, send


def test_who_leaves_is_lost_to_all_after_all_it_has_sent(hub, monkeypatch):
    monkeypatch.setattr(mesh, "LEAVE_SECONDS", WAIT_SECONDS)  # what has been sent may be slow
    with ports(hub, 3, group="leaver") as (opened, listeners):
        for rank in (1, 2):
            send(opened[0], rank, *([bytes(1 << 20)] for _ in range(8)))
        opened[0].close(WAIT_SECONDS)
        for listener in listeners[1:]:
            listener.wait(lambda one: one.lost)
            assert listener.lost == {0: LEFT} and len(listener.messages) == 8
        send(opened[1], 0, [b"too late"])
        send(opened[1], 2, [b"still here"])
        listeners[2].wait(lambda one: (1, [b"still here"]) in one.messages)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_lost_to_all_soon(hub, number):
    with echoing(hub, 4, range(2, 4)) as processes, ports(hub, 4, here=2) as (opened, listeners):
        for rank in processes:
            send(opened[0], rank, [b"are you there"])
        listeners[0].wait(lambda one: len(one.messages) == 2)
        os.kill(processes[3].pid, number)
        for listener in listeners:
            listener.wait(lambda one: 3 in one.lost)
            assert set(listener.lost) == {3}
        assert processes[2].stdout.readline() == "ready\n"
        assert processes[2].stdout.readline().startswith("lost 3 ")
        if number == signal.SIGSTOP:
            os.kill(processes[3].pid, signal.SIGCONT)
            assert processes[3].stdout.readline() == "ready\n"
            assert processes[3].stdout.readline().startswith("lost 3 "), "it is told that it is the one that is lost"


def test_a_process_that_lets_none_of_its_threads_run_for_two_seconds_is_not_lost(hub, monkeypatch):
    assert failure_detector.SILENCE_SECONDS > 2.0 + failure_detector.BEAT_SECONDS
    for watch in (failure_detector, hub_machine):  # what else stands still on a busy machine is not what is asked here
        monkeypatch.setattr(watch, "SILENCE_SECONDS", 10 * watch.SILENCE_SECONDS)
    with echoing(hub, 3, range(2, 3)) as processes, ports(hub, 3, here=2) as (opened, listeners):
        assert processes[2].stdout.readline() == "ready\n"
        processes[2].stdin.write("hold\n")
        processes[2].stdin.flush()
        assert processes[2].stdout.readline() == "held\n"
        for port, listener in zip(opened, listeners, strict=True):
            send(port, 2, [b"are you there"])
            listener.wait(lambda one: one.messages)
            assert listener.lost == {}


def test_a_group_lives_on_without_its_hub_and_all_are_told_of_the_same_loss():
    with (
        BrokerProcess(RunSettings(), None) as hub,
        echoing(hub.address, 4, range(2, 4)) as processes,
        ports(hub.address, 4, here=2) as (opened, listeners),
    ):
        hub.kill()
        send(opened[0], 2, [b"still there"])
        listeners[0].wait(lambda one: one.messages)
        processes[3].kill()
        for listener in listeners:
            listener.wait(lambda one: 3 in one.lost)
            assert set(listener.lost) == {3}
        assert processes[2].stdout.readline() == "ready\n"
        assert processes[2].stdout.readline().startswith("lost 3 ")


def test_who_hears_nobody_any_more_is_told_that_it_is_cut_off(monkeypatch):
    # they do not all stop at one moment: none is silent for long while another was heard a moment ago
    monkeypatch.setattr(failure_detector, "SILENCE_SECONDS", 2 * failure_detector.SILENCE_SECONDS)
    with (
        BrokerProcess(RunSettings(), None) as hub,
        echoing(hub.address, 3, range(1, 3)) as processes,
        ports(hub.address, 3, here=1) as (opened, (listener,)),
    ):
        for process in (hub.process, *processes.values()):
            os.kill(process.pid, signal.SIGSTOP)
        listener.wait(lambda one: one.lost)
        assert set(listener.lost) == {0} and "hears nobody" in listener.lost[0]
        send(opened[0], 1, [b"nobody is told that this is dropped"])


def test_who_is_sent_away_by_the_hub_is_told_as_the_others_are(hub):
    with ports(hub, 2, group="away") as (opened, listeners):
        opened[0].call(lambda: opened[0]._hub.send(GroupLost(99, "nobody")))
        for listener in listeners:
            listener.wait(lambda one: one.lost)
            assert set(listener.lost) == {0} and "sent" in listener.lost[0]
