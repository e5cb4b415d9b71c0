"""A client of a parameter server never waits where it is only asked to begin."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import LeafSpec
from zmqtrain.parameter_server.directory import Placement
from zmqtrain.parameter_server.parameter_client import ParameterClient
from zmqtrain.parameter_server.server_connections import ServerConnections


class Shards(ServerConnections):
    """Brokers that say where keys lie once `answer` is set, and what they were asked in which order."""

    def __init__(self):
        super().__init__("worker", 1.0)
        self.asked, self.answer = [], threading.Event()

    async def declare(self, leaves, settle=None):
        self.asked.append(("declare", *(leaf.path for leaf in leaves)))
        while not self.answer.is_set():
            await asyncio.sleep(0)
        for leaf in leaves:
            if leaf.path == "nowhere":
                raise ConfigError("there is no key 'nowhere'")
            self.places[leaf.path] = Placement(LeafSpec(leaf.path, (3,), "float32"), ())

    async def push(self, key, flat):
        self.asked.append(("push", key, flat[0]))

    async def pull(self, key, into):
        self.asked.append(("pull", key))
        return into


@pytest.fixture
def client():
    made = ParameterClient("worker", 60.0)
    made._servers = Shards()
    yield made
    made._servers.answer.set()
    made.close()


def test_a_client_that_closes_waits_for_its_pushes(client):
    ones, shards = np.ones(3, np.float32), client._servers
    push = client.ipush("a", ones)
    closing = threading.Thread(target=client.close)
    closing.start()
    assert not push.test() and closing.is_alive()
    shards.answer.set()
    closing.join(20)
    assert not closing.is_alive() and push.test() and push.wait() is None and ("push", "a", 1.0) in shards.asked


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_does_not_wait_for_its_pushes_for_ever(client, fails, caplog, monkeypatch):
    async def end():  # what is pending ends with its loop
        client._servers.answer.set()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    monkeypatch.setattr(client._servers, "close", end)
    with contextlib.suppress(ValueError), client:
        client.timeout_seconds = 0.05
        client.ipush("a", np.ones(3, np.float32))
        if fails:
            client.timeout_seconds = 60.0
            raise ValueError("a mistake of the caller's")
    assert ("1 of its pushes" in caplog.text) is not fails


def test_what_is_begun_for_a_key_that_is_not_known_does_not_wait_and_keeps_its_order(client):
    ones = np.ones(3, np.float32)
    requests = [
        client.ipush("a", ones),
        client.ipull("a", into=np.zeros(3, np.float32)),
        client.ipush("b", 2 * ones),
        client.ipush_all({"a": 3 * ones, "c": 4 * ones}),
        client.ipull_all({"b": 0, "a": 0}),
        client.ipush("a", 5 * ones),
    ]
    assert not any(request.test() for request in requests)
    client._servers.answer.set()
    for request in requests:
        request.wait()
    of_a = [asked for asked in client._servers.asked if asked[0] != "declare" and asked[1] == "a"]
    assert of_a == [("push", "a", 1), ("pull", "a"), ("push", "a", 3), ("pull", "a"), ("push", "a", 5)]
    assert sorted(key for kind, *keys in client._servers.asked if kind == "declare" for key in keys) == ["a", "b", "c"]


def test_what_cannot_be_pushed_is_said_at_once_if_that_is_known_and_else_by_the_request(client):
    with pytest.raises(ConfigError, match="float32 or float64"):
        client.ipush("a", np.ones(3, np.int32))
    wrong, nowhere = client.ipush("a", np.ones(4, np.float32)), client.ipull("nowhere")
    client._servers.answer.set()
    with pytest.raises(ConfigError, match="was given a gradient"):
        wrong.wait()
    with pytest.raises(ConfigError, match="no key 'nowhere'"):
        nowhere.wait()
    with pytest.raises(ConfigError, match="was given a gradient"):
        client.ipush("a", np.ones(4, np.float32))
    client.push("a", np.ones(3, np.float32))
