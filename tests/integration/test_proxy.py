"""The proxy of a chaos run: bytes pass as they are, none while it is unplugged, and of a torn message half."""

from __future__ import annotations

import socket
import threading

import pytest

from zmqtrain.chaos.services import Proxy
from zmqtrain.transport.address import parse_address

BOUND_SECONDS = 60.0


@pytest.fixture
def ends():
    """A proxy, the program's end of a connection through it, and the node's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(BOUND_SECONDS)
        with Proxy(f"tcp://127.0.0.1:{listener.getsockname()[1]}") as proxy:
            node = socket.create_connection(parse_address(proxy.address), BOUND_SECONDS)
            there, _ = listener.accept()
            there.settimeout(BOUND_SECONDS)
            with node, there:
                yield proxy, there, node


def read(end, count):
    data = b""
    while len(data) < count and (more := end.recv(count - len(data))):
        data += more
    return data


def test_bytes_pass_both_ways_as_they_are(ends):
    _, there, node = ends
    data = bytes(range(256)) * 1000
    threading.Thread(target=node.sendall, args=(data,)).start()
    assert read(there, len(data)) == data
    there.sendall(b"answer")
    assert read(node, 6) == b"answer"


def test_nothing_passes_while_it_is_unplugged_and_nothing_is_lost(ends):
    proxy, there, node = ends
    proxy.unplug()
    node.sendall(b"held")
    there.settimeout(0.1)
    with pytest.raises(TimeoutError):
        there.recv(4)
    there.settimeout(BOUND_SECONDS)
    proxy.plug()
    assert read(there, 4) == b"held"


def test_a_torn_connection_ends_in_the_middle_of_a_message_on_both_sides(ends):
    proxy, there, node = ends
    node.sendall(b"one")
    assert read(there, 3) == b"one"
    proxy.drop()
    proxy.plug()  # who comes back from it was after it
    node.sendall(b"12345678")
    got = b""
    with pytest.raises(ConnectionResetError):
        while True:
            assert len(got := got + there.recv(8)) < 8
    with pytest.raises(ConnectionResetError):
        node.recv(1)


def test_a_slowed_wire_passes_everything_and_other_faults_are_refused(ends):
    proxy, there, node = ends
    proxy.disturb("slow", 0.5)
    node.sendall(b"x" * 1000)
    assert read(there, 1000) == b"x" * 1000
    with pytest.raises(RuntimeError, match="played on a star"):
        proxy.disturb("corrupt", 0.1)
