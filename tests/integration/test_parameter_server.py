"""The parameter server alive on 127.0.0.1: what is asked is done, and what is wrong costs who asked."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from parameter_servers import WAIT, assert_same, brokers, clients, leaves, model, together, wait_until_it_says

import zmqtrain as zt
from zmqtrain.core.errors import ChannelClosed, ConfigError, HubUnreachable, LocalProtocolError, NonFiniteDelta

# ---------------------------------------------------------------------- what is asked is done


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_keys_are_begun_pushed_to_and_pulled(shards):
    with brokers(shards) as addresses, clients(addresses, ["a"], optimizer="sgd:rate=0.5") as (client,):
        first = model()
        assert_same(client.init_all(first), first)
        assert (client.consistency, client.optimizer, client.workers) == ("async", "sgd:rate=0.5", 1)
        client.push_all(first)
        halved = client.pull_all(first)
        np.testing.assert_array_equal(halved["large"], first["large"] - np.float32(0.5) * first["large"])
        assert halved["scale"].dtype == np.float64 and halved["scale"] == 0.5
        client.push("layer/bias", np.ones(10, np.float32))
        into = np.empty(10, np.float32)
        assert client.push_pull("layer/bias", np.ones(10, np.float32), into=into) is into
        assert into.tolist() == [-1.0] * 10 and client.version("layer/bias") == 3
        figures = client.statistics()
        assert figures.pushes == 6 and figures.bytes_sent > 2 * first["large"].nbytes
        assert figures.bytes_received > first["large"].nbytes


def test_an_index_is_the_key_of_an_array_in_a_list():
    with brokers(2) as addresses, clients(addresses, ["a"], optimizer="sgd:rate=1") as (client,):
        weights = [np.full((3, 2), 5.0, np.float32), np.full(2, 7.0, np.float32)]
        client.init_all(weights)
        client.push(0, np.ones((3, 2), np.float32))
        assert client.pull(0).tolist() == [[4.0, 4.0]] * 3 and client.pull("0").tolist() == [[4.0, 4.0]] * 3
        assert client.push_pull(np.int64(1), np.ones(2, np.float32)).tolist() == [6.0, 6.0] and client.version(1) == 1
        client.init(2, np.zeros(3))
        client.ipush(2, np.ones(3)).wait()
        assert client.ipull(2).wait().tolist() == client.pull_all([None, None, np.zeros(3)])[2].tolist() == [-1.0] * 3
        for key in (-1, True, 1.5, None):
            with pytest.raises(ConfigError, match="or an index from 0 on"):
                client.push(key, np.ones(2, np.float32))


def test_the_first_to_begin_a_key_wins_and_all_have_the_same():
    with brokers(2) as addresses, clients(addresses, ["a", "b", "c"]) as workers:
        begun = together([lambda seed=seed, one=one: one.init_all(model(seed)) for seed, one in enumerate(workers)])
        winner = int(begun[0]["scale"]) - 1
        for tree in begun:
            assert_same(tree, model(winner))
        late = zt.ParameterClient.connect(addresses, name="late", reads_only=True)
        with late:  # it has begun nothing, and asks where keys lie
            assert_same(late.pull_all(model()), model(winner))
            with pytest.raises(ConfigError, match="only reads"):
                late.push("scale", np.float64(1))


def test_requests_that_are_not_waited_for_are_done_in_order():
    with brokers(2) as addresses, clients(addresses, ["a"], optimizer="sgd:rate=1") as (client,):
        client.init("w", np.zeros(300_000, np.float32))
        done = threading.Event()
        pushes = [client.ipush("w", np.full(300_000, step, np.float32)) for step in range(5)]
        pull = client.ipull("w")
        pull.add_done_callback(lambda request: done.set())
        assert pull.wait()[0] == -10 and done.wait(WAIT) and pull.test()
        assert all(push.wait() is None and push.test() for push in pushes)  # the word of it may come behind the values


def test_jax_arrays_are_taken_as_they_are():
    import jax

    with brokers(1) as addresses, clients(addresses, ["a"], optimizer="sgd:rate=1") as (client,):
        client.init("w", jax.numpy.ones((3, 4)))
        assert client.push_pull("w", jax.numpy.ones((3, 4))).tolist() == np.zeros((3, 4)).tolist()


# ---------------------------------------------------------------------- consistency


def gradient(worker, step, tree):
    return {
        "large": tree["large"] * np.float32(0.01 * (worker + 1)),
        "layer": {name: one + np.float32(worker + step) for name, one in tree["layer"].items()},
        "scale": np.float64(worker),
    }


@pytest.mark.parametrize(("shards", "workers"), [(1, 1), (1, 3), (2, 2), (4, 3)])
def test_bsp_is_synchronous_sgd_bit_for_bit(shards, workers):
    steps, rate = 4, 0.1
    names = [f"worker-{number}" for number in range(workers)]
    rules = {"consistency": "bsp", "optimizer": f"sgd:rate={rate}", "workers": workers}
    with brokers(shards) as addresses, clients(addresses, names, **rules) as started:

        def train(number, client):
            tree = client.init_all(model())
            for step in range(steps):
                tree = client.push_pull_all(gradient(number, step, tree))
            return tree

        trained = together([lambda n=n, one=one: train(n, one) for n, one in enumerate(started)])
    expected = leaves(model())
    for step in range(steps):
        there = {"large": expected[0], "layer": {"weight": expected[1], "bias": expected[2]}, "scale": expected[3]}
        pushed = [leaves(gradient(number, step, there)) for number in range(workers)]
        for place, value in enumerate(expected):
            total = pushed[0][place].copy()
            for one in pushed[1:]:
                total = total + one[place]
            mean = total / value.dtype.type(workers) if workers > 1 else total
            expected[place] = value + value.dtype.type(-rate) * mean
    for tree in trained:
        for ours, theirs in zip(leaves(tree), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_asynchronous_workers_do_not_wait_for_each_other():
    with brokers(2) as addresses, clients(addresses, ["a", "b"], optimizer="sgd:rate=1") as (a, b):
        a.init("w", np.zeros(10, np.float32))
        for _ in range(20):
            a.push_pull("w", np.ones(10, np.float32))
        assert b.push_pull("w", np.ones(10, np.float32)).tolist() == [-21.0] * 10


def test_a_bounded_worker_waits_for_the_slowest_and_says_for_what():
    rules = {"consistency": "bounded:s=1", "optimizer": "sgd:rate=1", "workers": 2}
    with brokers(1) as addresses, clients(addresses, ["a", "b"], **rules) as (a, b):
        a.init("w", np.zeros(3, np.float32))
        one = np.ones(3, np.float32)
        assert a.push_pull("w", one).tolist() == [-1, -1, -1]
        ahead = a.ipush_pull("w", one)
        wait_until_it_says(ahead, r"a has waited .* s for the push_pull of 'w': broker 0 at .*, which waits for b")
        assert b.push_pull("w", one).tolist() == [-3, -3, -3]
        assert ahead.wait().tolist() == [-3, -3, -3]


# ---------------------------------------------------------------------- what is wrong costs who asked


def test_what_is_wrong_is_refused_in_a_sentence_and_the_client_goes_on():
    with brokers(2) as addresses, clients(addresses, ["a", "b"]) as (a, b):
        a.init("w", np.zeros(3, np.float32))
        with pytest.raises(ConfigError, match=r"w float32\[3\] is on the server; this client's is w float32\[4\]"):
            b.init("w", np.zeros(4, np.float32))
        with pytest.raises(ConfigError, match="no key 'v'"):
            b.pull("v")
        with pytest.raises(ConfigError, match=r"was given a gradient of w float64\[3\]"):
            a.push("w", np.zeros(3))
        with pytest.raises(NonFiniteDelta, match="push of 'w'"):
            a.push("w", np.full(3, np.nan, np.float32))
        with pytest.raises(NonFiniteDelta):
            b.init("bad", np.full(3, np.inf, np.float32))
        with pytest.raises(ConfigError, match="float32 or float64, not int64"):
            a.init("i", np.zeros(3, np.int64))
        with pytest.raises(ConfigError, match="no values"):
            a.init("e", np.zeros(0, np.float32))
        frozen = np.zeros(3, np.float32)
        frozen.flags.writeable = False
        for into in (np.zeros(3), np.zeros(6, np.float32)[::2], np.zeros(3, ">f4"), frozen, [0.0, 0.0, 0.0]):
            with pytest.raises(ConfigError, match="into"):
                a.pull("w", into=into)
        for key in ("", "w" * 401, "\ud800", 5.0):
            with pytest.raises(ConfigError, match="a key is a text of 1 to 400 characters"):
                a.init(key, np.zeros(3, np.float32))
            with pytest.raises(ConfigError, match="a key is a text of 1 to 400 characters"):
                a.pull(key)
        assert a.init("swapped", np.ones(3, ">f4")).dtype == np.float32
        assert b.pull("w").tolist() == a.pull("w").tolist() == [0, 0, 0]


def test_other_rules_and_other_shards_are_refused_naming_both():
    connect = zt.ParameterClient.connect
    with brokers(2) as addresses, clients(addresses, ["a"], consistency="bsp", optimizer="adam"):
        with pytest.raises(ConfigError, match=r"consistency is 'bsp' on the server, as a said first; .* 'async'"):
            connect(addresses, consistency="async")
        with pytest.raises(ConfigError, match=r"optimizer is 'adam:rate=0.001"):
            connect(addresses, optimizer="adam:rate=0.01")
        for wrong in (addresses[::-1], addresses[:1], addresses[1:]):
            with pytest.raises(ConfigError, match="the same brokers in the same order"):
                connect(wrong)
        with pytest.raises(ConfigError, match="there is no 'ssp'"):
            connect(addresses, consistency="ssp")
        with pytest.raises(ConfigError, match="named twice"):
            connect(addresses[:1] * 2)
        with pytest.raises(HubUnreachable, match=r"no broker answers at tcp://127.0.0.1:1 "):
            connect("tcp://127.0.0.1:1", timeout_seconds=0.2)


def test_a_client_that_was_closed_says_so():
    with brokers(1) as addresses, clients(addresses, ["a", "b"], consistency="bsp", workers=2) as (a, _):
        a.init("w", np.zeros(3, np.float32))
        waiting = a.ipush_pull("w", np.zeros(3, np.float32))
        a.close()
        with pytest.raises(ChannelClosed):
            waiting.wait()
        with pytest.raises(ChannelClosed):
            a.pull("w")
        a.close()


def test_a_callback_may_not_wait():
    with brokers(1) as addresses, clients(addresses, ["a", "b"], consistency="bsp", workers=2) as (a, b):
        a.init_all({"v": np.zeros(3, np.float32), "w": np.zeros(3, np.float32)})
        waiting, told, errors = a.ipush_pull("w", np.zeros(3, np.float32)), threading.Event(), []

        def wait_here(request):
            try:
                waiting.wait()
            except LocalProtocolError as error:
                errors.append(error)
            told.set()

        a.ipush_pull("v", np.zeros(3, np.float32)).add_done_callback(wait_here)  # not done before b has pushed
        b.push("v", np.zeros(3, np.float32))
        assert told.wait(WAIT) and "must not wait for the push_pull of 'w'" in str(errors[0])
