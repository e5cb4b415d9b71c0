"""Brokers that serve parameters and their clients on 127.0.0.1, and what the tests ask of them."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import zmqtrain as zt
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.core.errors import CollectiveTimeout
from zmqtrain.core.settings import RunSettings

WAIT = 60.0


@contextlib.contextmanager
def brokers(count):
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(BrokerThread("tcp://127.0.0.1:0", RunSettings())) for _ in range(count)]
        yield [broker.address for broker in started]


@contextlib.contextmanager
def clients(addresses, names, **rules):
    with contextlib.ExitStack() as stack:
        connect = zt.ParameterClient.connect
        yield [stack.enter_context(connect(addresses, name=name, timeout_seconds=WAIT, **rules)) for name in names]


def model(seed=0):
    """A key that every broker has a piece of, and small ones."""
    random = np.random.default_rng(seed)
    return {
        "large": random.standard_normal((700, 500)).astype(np.float32),
        "layer": {"weight": random.standard_normal((30, 10)).astype(np.float32), "bias": np.zeros(10, np.float32)},
        "scale": np.float64(seed + 1.0),
    }


def leaves(tree):
    return [tree["large"], tree["layer"]["weight"], tree["layer"]["bias"], tree["scale"]]


def assert_same(ours, theirs):
    for one, other in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


def together(calls):
    """Make calls at once, each in a thread; return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT) for future in [pool.submit(call) for call in calls]]


def wait_until_it_says(request, words):
    """Wait for a request that others hold up, until the error says so."""
    while True:
        with pytest.raises(CollectiveTimeout) as late:
            request.wait(0.05)
        if re.search(words, str(late.value)):
            return
