"""How the processes of a group meet over real sockets: who is waited for, who is refused, whose place is free."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from channels import kept_address

from zmqtrain.broker.serve import BrokerThread
from zmqtrain.collectives import group_connection
from zmqtrain.collectives.mesh import LEFT, open_port
from zmqtrain.core.errors import CollectiveTimeout, ConfigError, HubUnreachable, JoinRefused
from zmqtrain.core.settings import RunSettings

from meshes import WAIT_SECONDS, echoing, ports, send


def test_a_group_that_is_not_complete_in_time_says_who_is_here(hub):
    with pytest.raises(CollectiveTimeout, match=r"'few' of 3 processes alone is here, 2 missing"):
        open_port(hub, 3, group="few", name="alone", timeout_seconds=6)


class Said(logging.Handler):
    """Tells when something has been said."""

    def __init__(self, what):
        super().__init__()
        self.what, self.said = what, threading.Event()

    def emit(self, record):
        if self.what in record.getMessage():
            self.said.set()


def test_who_waits_for_others_for_long_says_for_whom(hub, monkeypatch):
    monkeypatch.setattr(group_connection, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(
        group_connection, "SAY_AGAIN_SECONDS", 0.1
    )  # the hub may not have answered when it is said first
    waits = Said(" of at most 20): of the group 'slow' of 2 processes early is here, 1 missing")
    group_connection.logger.addHandler(waits)
    try:
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(open_port, hub, 2, group="slow", name="early", timeout_seconds=20)
            assert waits.said.wait(20)
            opened = [open_port(hub, 2, group="slow", timeout_seconds=20), early.result()]
    finally:
        group_connection.logger.removeHandler(waits)
    for port in opened:
        port.close()


def test_no_broker_is_said_with_what_to_do():
    with pytest.raises(HubUnreachable, match="zmqtrain-broker"):
        open_port("tcp://127.0.0.1:9", 2, timeout_seconds=0.2)


def test_who_comes_to_a_complete_group_is_refused_once_it_is_sure_that_it_lives(hub, monkeypatch):
    monkeypatch.setattr(group_connection, "OCCUPIED_SECONDS", 0.5)
    with ports(hub, 1, group="alone"), pytest.raises(JoinRefused, match="complete: pc-0"):
        open_port(hub, 1, group="alone", name="late", timeout_seconds=20)


def wait_until_it_waits(hub, name, **arguments):
    """Wait until a process of that name waits for a group of three."""
    error = ""
    while f"{name} " not in error.partition("within")[2].replace(",", " "):
        with pytest.raises((CollectiveTimeout, HubUnreachable, JoinRefused)) as raised:  # of a hub that is held up
            open_port(hub, 3, 2, name="looks", timeout_seconds=0.2, **arguments)  # the last: by its own last look
        error = str(raised.value)


@pytest.mark.parametrize(
    ("size", "rank", "words"),
    [
        (3, 0, "rank 0 .* is taken, by first"),
        (2, None, "first forms the group 'few' for 3 processes, other wants one of 2"),
    ],
)
def test_processes_that_ask_for_different_groups_all_hear_so_at_once(hub, monkeypatch, size, rank, words):
    monkeypatch.setattr(group_connection, "OCCUPIED_SECONDS", WAIT_SECONDS)  # who gives up by itself does so much later
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(open_port, hub, 3, 0, group="few", name="first", timeout_seconds=WAIT_SECONDS)
        wait_until_it_waits(hub, "first", group="few")
        with pytest.raises(JoinRefused, match=words):
            open_port(hub, size, rank, group="few", name="other", timeout_seconds=WAIT_SECONDS)
        with pytest.raises(JoinRefused, match=words):
            waiting.result()
        again = [pool.submit(open_port, hub, 3, group="few", timeout_seconds=WAIT_SECONDS) for _ in range(3)]
        for port in again:
            port.result().close()


def test_the_place_of_a_process_that_was_killed_while_it_waited_is_taken_by_who_comes_instead(hub, monkeypatch):
    monkeypatch.setattr(group_connection, "OCCUPIED_SECONDS", WAIT_SECONDS)  # however late the hub notices it
    with echoing(hub, 3, range(1)) as processes:
        wait_until_it_waits(hub, "pc-0")
        processes[0].kill()
        with ports(hub, 2) as (opened, _):  # of another size besides
            assert opened[0].names == ("pc-0", "pc-1")


def test_a_group_whose_processes_were_just_killed_meets_again_at_once(hub, monkeypatch):
    monkeypatch.setattr(group_connection, "OCCUPIED_SECONDS", WAIT_SECONDS)  # however late the hub notices it
    with echoing(hub, 2, range(2)) as processes:
        for process in processes.values():
            assert process.stdout.readline() == "ready\n"
        for process in processes.values():
            process.kill()
        with ports(hub, 2, name="anew") as (opened, _):
            assert opened[0].names == ("anew", "anew")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": 0}, "size must be 1 to 256"),
        ({"size": 2, "rank": 2}, "rank must be 0 to 1"),
        ({"size": 2, "name": "a#b"}, "name"),
        ({"size": 2, "timeout_seconds": 0}, "above 0 s"),
        ({"size": 2, "hub": "hub:5555"}, "tcp://HOST:PORT"),
        ({"size": 2, "listen": "tcp://192.0.2.1:0"}, "no address of this machine"),
    ],
)
def test_wrong_arguments_are_refused_before_anybody_is_asked(arguments, words):
    with pytest.raises(ConfigError, match=words):
        open_port(**{"hub": "tcp://127.0.0.1:9", **arguments})


def test_after_a_loss_the_survivors_meet_again_under_the_same_name(hub):
    with ports(hub, 3, group="again") as (opened, listeners):
        opened[2].close(WAIT_SECONDS)
        for listener in listeners[:2]:
            listener.wait(lambda one: one.lost == {2: LEFT})
        with ports(hub, 2, group="again") as (anew, told):
            send(anew[0], 1, [b"hello"])
            told[1].wait(lambda one: one.messages == [(0, [b"hello"])])


def test_a_group_that_waits_meets_at_the_broker_that_takes_the_place_of_a_lost_one():
    options = {"group": "moved", "timeout_seconds": WAIT_SECONDS}
    with kept_address() as address, ThreadPoolExecutor(3) as pool:
        with BrokerThread(address, RunSettings()):
            opened = [pool.submit(open_port, address, 3, name="first", **options)]
            wait_until_it_waits(address, "first", group="moved")
        with BrokerThread(address, RunSettings()):
            opened += [pool.submit(open_port, address, 3, name=name, **options) for name in ("second", "third")]
            for port in [one.result() for one in opened]:
                assert set(port.names) == {"first", "second", "third"}
                port.close()
