"""The addresses that users type: one, or several with commas."""

from __future__ import annotations

import socket

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.transport.address import OpenPort, answers, parse_addresses, say_unreachable, unknown_host, why_unanswered

FIRST, SECOND = "tcp://pc1:5555", "tcp://pc2:5556"


def test_several_addresses_are_each_one_to_connect_to_and_count_once() -> None:
    assert parse_addresses(FIRST) == (FIRST,)
    assert parse_addresses(f"{FIRST}, {SECOND},{FIRST}") == (FIRST, SECOND)


@pytest.mark.parametrize(
    "text", ["", f"{FIRST},", f"{FIRST},pc2", f"{FIRST},tcp://*:5555", ",".join(f"tcp://pc{n}:1" for n in range(5))]
)
def test_a_list_with_what_is_no_address_to_connect_to_or_with_too_many_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_addresses(text)


def test_who_finds_no_broker_is_told_where_it_was_looked_for() -> None:
    assert f"answers at {FIRST} or {SECOND} (waited 5 s)" in say_unreachable([FIRST, SECOND], 5.0, "")


def test_an_address_answers_where_something_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answers(f"tcp://127.0.0.1:{port}", 5.0)
    assert not answers(f"tcp://127.0.0.1:{port}", 5.0)


def test_an_open_port_answers_until_its_time_is_over():
    with pytest.raises(OSError, match="assign"):
        OpenPort("tcp://203.0.113.1:0", 5.0)
    port = OpenPort("tcp://*:0", 60.0)
    assert why_unanswered(f"tcp://127.0.0.1:{port.number}", 5.0) == ""
    assert why_unanswered(f"tcp://127.0.0.1:{port.number}", 5.0) == "", "others may try it too"
    assert port.seconds_left > 0
    brief = OpenPort("tcp://lo:0", 0.1)
    brief.join()
    assert brief.seconds_left == 0


def test_an_open_port_of_all_interfaces_is_reached_by_both_versions_of_ip_as_a_brokers_is():
    places = {"*": ["127.0.0.1"]} | ({"[::]": ["127.0.0.1", "[::1]"]} if socket.has_dualstack_ipv6() else {})
    for place, hosts in places.items():
        port = OpenPort(f"tcp://{place}:0", 60.0)
        assert [why_unanswered(f"tcp://{host}:{port.number}", 5.0) for host in hosts] == [""] * len(hosts)


def test_why_nothing_answers_is_said():
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        assert why_unanswered(f"tcp://127.0.0.1:{bound.getsockname()[1]}", 5.0) == "Connection refused"


@pytest.mark.parametrize("host", ["hub..lab", f"{'h' * 64}.lab", "nobody.invalid"])
def test_what_can_be_no_name_of_a_host_is_one_that_nobody_knows(host):
    assert unknown_host([f"tcp://{host}:5555"]) == host
    assert not unknown_host([f"tcp://{host}:5555", "tcp://127.0.0.1:5555"])
