"""Who is lost at the parameter server alive, in processes of which some are killed: what goes on, and what is said."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from parameter_servers import WAIT, assert_same, brokers, clients, leaves, model, together, wait_until_it_says

import zmqtrain as zt
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.broker.standby import ShardPlace
from zmqtrain.core.errors import CheckpointError, ConfigError, PeerLost
from zmqtrain.core.settings import RunSettings

WORKER = """
import sys
import numpy as np
import zmqtrain as zt

client = zt.ParameterClient.connect(sys.argv[1:], name="victim")
client.init("w", np.zeros(1_000_000, np.float32))
while True:
    client.push_pull("w", np.ones(1_000_000, np.float32))
    print("one more", flush=True)
"""


@contextlib.contextmanager
def process(*argv):
    with subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as one:
        try:
            yield one
        finally:
            one.kill()


def wait_for_line(one, pattern):
    said = ""
    for line in one.stdout:
        said += line
        if found := re.search(pattern, line):
            return found
    raise AssertionError(said)


@pytest.mark.parametrize("consistency", ["async", "bsp"])
def test_a_killed_shard_is_lost_to_all_clients_in_all_calls(consistency):
    with (
        brokers(1) as addresses,
        process("-m", "zmqtrain.cli.broker", "--bind", "tcp://127.0.0.1:0", "--no-checkpoint") as broker,
    ):
        addresses.append(wait_for_line(broker, r"(tcp://127\S+:\d+)")[1])
        with clients(addresses, ["a", "b"], consistency=consistency, workers=2) as workers:
            begun = threading.Barrier(3)

            def train(client):
                client.init("w", np.zeros(1_000_000, np.float32))
                one = np.ones(1_000_000, np.float32)
                client.push_pull("w", one)
                begun.wait(WAIT)
                with pytest.raises(PeerLost) as lost:
                    while True:
                        client.push_pull("w", one)
                with pytest.raises(PeerLost):
                    client.pull("w")
                return lost.value

            with ThreadPoolExecutor(2) as pool:
                ends = [pool.submit(train, client) for client in workers]
                begun.wait(WAIT)
                broker.send_signal(signal.SIGKILL)
                for end in ends:
                    lost = end.result(WAIT)
                    assert lost.rank == 1 and addresses[1] in str(lost)
        with clients(addresses[:1], ["a", "b"]) as (again, _):  # with those that are left
            again.init("w", np.zeros(3, np.float32))
            assert again.pull("w").tolist() == [0, 0, 0]


def test_bsp_begins_with_all_workers_and_says_how_many_are_missing():
    rules = {"consistency": "bsp", "optimizer": "sgd:rate=1", "workers": 3}
    with brokers(1) as addresses, clients(addresses, ["a", "b"], **rules) as (a, b):
        a.init("w", np.zeros(3, np.float32))
        pushed = [client.ipush_pull("w", np.full(3, 3, np.float32)) for client in (a, b)]
        wait_until_it_says(pushed[0], r"which waits for .*1 worker to enrol")
        with clients(addresses, ["c"]) as (c,):
            assert c.push_pull("w", np.zeros(3, np.float32)).tolist() == [-2, -2, -2]
            assert all(request.wait().tolist() == [-2, -2, -2] for request in pushed)


def test_a_killed_worker_stops_nobody_under_bsp():
    rules = {"consistency": "bsp", "optimizer": "sgd:rate=1", "workers": 3}
    with brokers(2) as addresses, clients(addresses, ["a", "b"], **rules) as (a, b):
        one = np.ones(1_000_000, np.float32)
        with process("-c", WORKER, *addresses) as victim:
            together([lambda: a.init("w", 0 * one), lambda: b.init("w", 0 * one)])
            together([lambda: a.push_pull("w", one), lambda: b.push_pull("w", one)])
            wait_for_line(victim, "one more")
            victim.send_signal(signal.SIGKILL)
            for _ in range(5):
                values = together([lambda: a.push_pull("w", one), lambda: b.push_pull("w", one)])
            np.testing.assert_array_equal(values[0], values[1])
            assert a.version("w") == 6


def test_keys_live_on_in_the_checkpoints_of_all_shards(tmp_path):
    def begin(stack):
        folders = [tmp_path / "first", tmp_path / "second"]
        return [
            stack.enter_context(BrokerThread("tcp://127.0.0.1:0", RunSettings(), checkpoint=folder)).address
            for folder in folders
        ]

    first, one = model(), np.ones(10, np.float32)
    with contextlib.ExitStack() as stack:
        (client,) = stack.enter_context(clients(begin(stack), ["a"], optimizer="momentum:rate=1,momentum=0.5"))
        client.init_all(first)
        assert client.push_pull("layer/bias", one).tolist() == [-1.0] * 10
    with contextlib.ExitStack() as stack:
        (client,) = stack.enter_context(clients(begin(stack), ["a"]))
        assert client.optimizer == "momentum:rate=1,momentum=0.5,nesterov=0"
        again = client.init_all(model(1))
        np.testing.assert_array_equal(again["large"], first["large"])
        assert again["layer"]["bias"].tolist() == [-1.0] * 10
        assert client.push_pull("layer/bias", one).tolist() == [-2.5] * 10 and client.version("layer/bias") == 2


def test_keys_that_cannot_be_read_are_not_begun_without(tmp_path):
    (tmp_path / "keys.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="Move that file away"):
        BrokerThread("tcp://127.0.0.1:0", RunSettings(), checkpoint=tmp_path)


def test_the_roster_says_what_is_served():
    told = threading.Event()
    expected = {"keys": 4, "bytes": sum(leaf.nbytes for leaf in leaves(model())), "pushes": 1, "clients": 1}

    def watch(roster):
        if roster.served == expected:
            told.set()

    with (
        BrokerThread("tcp://127.0.0.1:0", RunSettings(), watch=watch) as broker,
        clients(broker.address, ["a"]) as (client,),
    ):
        client.init_all(model())
        client.push("layer/bias", np.ones(10, np.float32))
        assert told.wait(WAIT)


def test_a_broker_that_is_stopped_says_goodbye_to_its_clients():
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(BrokerThread("tcp://127.0.0.1:0", RunSettings()))
        (client,) = stack.enter_context(clients([broker.address], ["a"]))
        client.init("w", np.zeros(3, np.float32))
        broker.stop()
        with pytest.raises(PeerLost, match="said goodbye"):
            while True:
                client.pull("w")


def test_the_first_of_several_shards_tells_where_the_others_are():
    settings = RunSettings(shards=2, initial="founder")
    with BrokerThread("tcp://127.0.0.1:0", settings) as first:
        place = ShardPlace(shard=1, shards=2, first=first.address)
        with BrokerThread("tcp://127.0.0.1:0", None, place=place) as other:
            with clients(first.address, ["a"]) as (client,):
                assert client.addresses == (first.address, other.address)
                client.init_all(model())
                assert_same(client.pull_all(model()), model())
            with pytest.raises(ConfigError, match="name the first"):
                zt.ParameterClient.connect(other.address)
