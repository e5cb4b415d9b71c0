"""The command `zmqtrain doctor`: what is judged to be well, what to be fixed, and how each failed way is named."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace

import pytest

from zmqtrain.cli import doctor, main
from zmqtrain.cli.doctor import Machine, WayToHub, find_way, judge_link, judge_machine, judge_way
from zmqtrain.core.errors import HubUnreachable
from zmqtrain.core.installed import how_to_install
from zmqtrain.core.settings import RunSettings
from zmqtrain.planning.probe import LinkFigures, RoundTrips

WAY = WayToHub(own="10.0.0.2", interface="eth0", path_mtu=1500, mtu=1500, bits_per_second=10**9)
LINK = LinkFigures(
    run="run-1",
    version=7,
    settings=RunSettings(),
    nodes=1,
    software="zmqtrain 0.1.0",
    idle=RoundTrips(0.0004, 0.001, 100),
    loaded=RoundTrips(0.003, 0.008, 30),
    up=119e6,
    down=118e6,
    clock_ahead_seconds=0.002,
    clock_error_seconds=0.0002,
)
MACHINE = Machine(
    cores=8,
    load=0.5,
    free_memory_bytes=16 * 10**9,
    free_disk_bytes=10**11,
    devices=({"platform": "gpu", "kind": "RTX 3060", "memory_bytes": 9 * 10**9},),
    devices_error="",
    has_nvidia_driver=True,
    versions={"zmqtrain": "0.1.0", "numba": None},
)


def wrong(findings):
    return {finding.what: finding.remedy for finding in findings if finding.state == "fix"}


def test_a_healthy_pc_on_a_healthy_link_has_nothing_to_fix():
    findings = [*judge_way("tcp://hub:5555", WAY), *judge_link(LINK), *judge_machine(MACHINE)]
    assert wrong(findings) == {}
    said = " ".join(finding.text for finding in findings)
    for words in ("952 Mb/s toward the hub", "run-1, version 7", "RTX 3060 with 9.0 GB", "1500 bytes", "2.0 ms ahead"):
        assert words in said


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        ({"up": 11.8e6}, "up", "100 Mb/s: use 1 Gb/s"),
        ({"down": 4e6}, "down", "Wi-Fi"),
        ({"idle": RoundTrips(0.02, 0.05, 100)}, "ping", "use a cable"),
        ({"loaded": RoundTrips(0.02, 0.5, 20)}, "loaded", "other traffic"),
        ({"clock_ahead_seconds": -60.0}, "clock", "timedatectl"),
    ],
)
def test_a_link_that_is_slow_or_late_is_found_with_what_to_do(change, what, remedy):
    found = wrong(judge_link(replace(LINK, **change)))
    assert list(found) == [what] and remedy in found[what]


def test_a_link_that_others_train_on_is_not_called_slow_for_that():
    assert wrong(judge_link(replace(LINK, nodes=4, up=30e6))) == {}


def test_what_the_hub_does_not_let_be_measured_is_left_out_and_not_invented():
    link = replace(LINK, up=None, down=None, loaded=None, clock_ahead_seconds=None, refused="too many probes")
    findings = list(judge_link(link))
    assert [finding.what for finding in findings] == ["run", "rate", "ping"]
    assert "too many probes" in findings[1].text


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [({"path_mtu": 1280}, "MTU", "1500 is usual"), ({"bits_per_second": 10**8}, "cable", "Cat 5e")],
)
def test_a_cable_or_an_mtu_that_is_too_small_is_found(change, what, remedy):
    found = wrong(judge_way("tcp://hub:5555", replace(WAY, **change)))
    assert list(found) == [what] and remedy in found[what]


def test_what_is_not_known_of_the_way_is_left_out():
    way = replace(WAY, interface=None, path_mtu=None, mtu=None, bits_per_second=None)
    assert [finding.what for finding in judge_way("tcp://hub:5555", way)] == ["hub"]


CPU = ({"platform": "cpu", "kind": "cpu", "memory_bytes": None},)


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        ({"devices": CPU, "versions": {"numba": "0.61"}}, "cards", "without CUDA"),
        (
            {"devices": None, "devices_error": "jax is not installed", "versions": {"numba": "1"}},
            "cards",
            "not installed",
        ),
        ({"devices": CPU, "has_nvidia_driver": False}, "numba", "pip install -e ."),
        ({"load": 9.0}, "cores", "see them with top"),
        ({"free_memory_bytes": 10**9}, "memory", "close other programs"),
        ({"free_disk_bytes": 10**8}, "disk", "free some"),
    ],
)
def test_a_pc_that_lacks_something_is_told_what(change, what, remedy):
    found = wrong(judge_machine(replace(MACHINE, **change)))
    assert list(found) == [what] and remedy in found[what]


def test_a_pc_without_a_card_is_well_if_it_has_numba():
    machine = replace(MACHINE, devices=CPU, has_nvidia_driver=False, versions={"numba": "0.61"})
    assert wrong(judge_machine(machine)) == {}


# ---------------------------------------------------------------------- ways that fail


@pytest.fixture
def listener():
    """A socket that listens, and accepts nobody unless told to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def closed_port():
    """A port on which nobody listens: it is taken, so that nobody else comes to listen there meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_name_that_nobody_has_is_said_to_be_one():
    with pytest.raises(
        HubUnreachable, match=r"this PC knows no host named 'nobody\.invalid'.*: give the hub's address"
    ):
        find_way("tcp://nobody.invalid:5555", 1.0)


def test_a_closed_port_says_how_to_start_a_broker(closed_port):
    with pytest.raises(HubUnreachable, match=rf"nothing listens on port {closed_port}: start the broker"):
        find_way(f"tcp://127.0.0.1:{closed_port}", 60.0)


def test_another_program_on_the_port_is_told_from_a_broker(listener):
    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(HubUnreachable, match="it does not speak ZeroMQ"):
        find_way(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 60.0)
    thread.join()


def test_who_listens_and_says_nothing_is_no_broker(listener):
    with pytest.raises(HubUnreachable, match="is no broker"):
        find_way(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 1.0)


def test_a_hub_that_is_not_there_is_one_finding_and_the_rest_of_the_pc_is_looked_at(closed_port, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "look_at_machine", lambda folder: MACHINE)
    assert main(["doctor", f"tcp://127.0.0.1:{closed_port}"]) == 1
    out = capsys.readouterr().out
    assert "start the broker" in out and "RTX 3060" in out and "1 thing to fix" in out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["hub:5555"], "no address of the form"),
        (["tcp://hub:5555", "--wait-seconds", "0"], "wait_seconds must be more than 0"),
        (["tcp://hub:5555", "--folder", "/no/such/folder"], "there is no folder"),
        (["tcp://hub:5555", "--server-key", "short"], "is neither"),
    ],
)
def test_a_wrong_question_is_one_sentence_and_the_exit_code_2(wrong, words, capsys):
    assert main(["doctor", *wrong]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err


def test_the_devices_are_asked_for_in_another_process_and_said_in_json():
    from zmqtrain.cli.doctor import look_at_machine

    machine = look_at_machine(doctor.Path())
    assert machine.devices is not None, machine.devices_error
    assert {"platform", "kind", "memory_bytes"} == machine.devices[0].keys()
    assert machine.cores >= 1 and machine.versions["libzmq"]
    json.dumps(machine.versions)


def test_a_remedy_with_brackets_is_shown_whole(monkeypatch, capsys):
    without = replace(MACHINE, devices=(), devices_error="", has_nvidia_driver=True)
    monkeypatch.setattr(doctor, "find_way", lambda *_: WAY)
    monkeypatch.setattr(doctor, "measure_link", lambda *_: LINK)
    monkeypatch.setattr(doctor, "look_at_machine", lambda _: without)
    assert doctor.main(["tcp://10.0.0.1:5555"]) == 1
    said = capsys.readouterr().out
    for extra in ("cuda12", ""):
        assert f"\n    {how_to_install(extra)}\n" in said, "in one line, to be copied"
