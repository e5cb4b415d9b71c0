"""The exchange through a parameter server that the test is: one that takes away a tenth of each gradient."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from zmqtrain.core.errors import PeerLost
from zmqtrain.core.types import LeafSpec, Turn
from zmqtrain.synchronous.exchanges import ServerExchange

MODEL = (LeafSpec("w", (2, 3), "float32"), LeafSpec("none", (0,), "float32"), LeafSpec("b", (3,), "float32"))


class Server:
    """What all clients of a test share. here: those that are connected, by number; log: who came and left."""

    def __init__(self):
        self.weights, self.here, self.log, self.pushes = {}, {}, [], []

    def open_client(self, reads_only):
        client = Client(self, reads_only, len(self.log))
        self.here[client.number] = client
        self.log.append(("reader" if reads_only else "worker", "comes", len(self.here)))
        return client


class Client:
    name = "pc-1"

    def __init__(self, server, reads_only, number):
        self.server, self.reads_only, self.number = server, reads_only, number

    def init_all(self, tree, *, timeout_seconds=None):
        return {key: self.server.weights.setdefault(key, np.array(value)).copy() for key, value in tree.items()}

    def pull_all(self, tree, *, timeout_seconds=None):
        return {key: self.server.weights[key].copy() for key in tree}

    def ipush_pull(self, key, gradient, *, into=None):
        assert not self.reads_only
        self.server.pushes.append(key)
        self.server.weights[key] -= np.float32(0.1) * gradient

        def wait(timeout_seconds=None):
            if into is not None:
                into[...] = self.server.weights[key]
            return into

        return SimpleNamespace(wait=wait)

    def statistics(self):
        return SimpleNamespace(bytes_sent=10, bytes_received=20)

    def close(self):
        del self.server.here[self.number]
        self.server.log.append(("reader" if self.reads_only else "worker", "leaves", len(self.server.here)))


@pytest.fixture
def server():
    return Server()


def leaves(value):
    return [np.full(leaf.shape, value, np.float32) for leaf in MODEL]


def test_the_first_brings_the_weights_and_all_begin_with_them(server):
    first, second = (ServerExchange(server, MODEL, 3, name) for name in ("pc-1", "pc-2"))
    for value, exchange in ((1.0, first), (2.0, second)):
        step, arrays = exchange.align(-1, lambda value=value: leaves(value))
        assert step == 0
        for array, expected in zip(arrays, leaves(1.0), strict=True):
            np.testing.assert_array_equal(array, expected)
    assert set(server.weights) == {"3", "3/w", "3/b"}  # of version 3: another run's weights are others


def test_a_bucket_goes_leaf_by_leaf_and_comes_back_as_weights(server):
    exchange = ServerExchange(server, MODEL, 0, "pc-1")
    exchange.align(-1, lambda: leaves(1.0))
    assert exchange.agree(16, False) == Turn(16, False)
    exchange.begin((2, 1, 0), np.arange(9, dtype=np.float32))
    (weights,) = exchange.finish()
    np.testing.assert_allclose(weights, 1 - 0.1 * np.arange(9), atol=1e-6)
    assert exchange.finish() == []


def test_who_has_no_data_is_no_worker_until_it_has_some_and_the_server_is_never_without_a_client(server):
    exchange = ServerExchange(server, MODEL, 0, "pc-1")
    exchange.align(-1, lambda: leaves(1.0))
    assert exchange.agree(0, False) == Turn(0, False)
    exchange.agree(16, False)
    assert exchange.agree(0, True) == Turn(0, True)
    exchange.close()
    assert [entry[:2] for entry in server.log] == [
        ("worker", "comes"),
        ("reader", "comes"),
        ("worker", "leaves"),
        ("worker", "comes"),
        ("reader", "leaves"),
        ("reader", "comes"),
        ("worker", "leaves"),
        ("reader", "leaves"),
    ]
    assert all(count > 0 for *_, count in server.log[:-1])
    assert exchange.traffic() == (40, 80)


def test_who_ends_takes_what_the_others_have_made_since(server):
    exchange = ServerExchange(server, MODEL, 0, "pc-1")
    exchange.align(-1, lambda: leaves(1.0))
    server.weights["0/b"] += 5
    step, (w, none, b) = exchange.align(7, lambda: leaves(0.0))
    assert step == 7 and w.max() == 1.0 and none.size == 0 and b.tolist() == [6.0] * 3


@pytest.mark.parametrize("meetings", [0, 2])
def test_workers_meet_before_the_first_step(server, meetings):
    ServerExchange(server, MODEL, 0, "pc-1", meetings=meetings).align(-1, lambda: leaves(1.0))
    assert server.pushes == ["0"] * meetings and server.weights["0"].tolist() == [0.0]


def test_without_a_shard_nobody_goes_on(server):
    with pytest.raises(PeerLost, match=r"broker 1 is lost: silent for 2 s.*start the brokers again"):
        ServerExchange(server, MODEL, 0, "pc-1").recover(PeerLost("broker 1", "silent for 2 s", 1))
