"""The parameter server on the star: unplugged, a worker stops nobody, and a broker is lost to all; needs root."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import IO

from star import Host, Star

BROKER = """
from zmqtrain.broker.serve import serve
from zmqtrain.core.settings import RunSettings
serve("tcp://*:5555", RunSettings(), ready=lambda broker: print("ready", flush=True), interrupted=lambda count: None)
"""
WORKER = """
import sys
import numpy as np
import zmqtrain as zt
client = zt.ParameterClient.connect(
    sys.argv[2:], name=sys.argv[1], consistency="bsp", optimizer="sgd:rate=1", workers=3
)
one = np.ones(300_000, np.float32)  # each broker has a part of it
client.init("w", 0 * one)
try:
    while True:
        client.push_pull("w", one)
        print("step", client.version("w"), flush=True)
except zt.ZmqTrainError as error:
    print(type(error).__name__, error, flush=True)
"""


def start(star: Star, host: Host, program: str, *arguments: str) -> IO[str]:
    """Start a program on a host; return what it says."""
    process = star.popen(host, [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process.stdout


def test_who_is_unplugged_is_lost_and_the_workers_that_are_left_go_on_until_a_shard_is() -> None:
    with Star(nodes=4, bits_per_second=1e9) as star, contextlib.ExitStack() as said:
        shards: list[Host] = ["hub", 3]
        for broker in shards:
            assert said.enter_context(start(star, broker, BROKER)).readline() == "ready\n"
        addresses = [f"tcp://{star.hub_address}:5555", f"tcp://{star.node_address(3)}:5555"]
        workers = [said.enter_context(start(star, node, WORKER, f"pc-{node}", *addresses)) for node in range(3)]
        for worker in workers:
            assert worker.readline() == "step 1\n"
        star.set_link(2, up=False)
        left = workers[:2]
        for worker in left:
            for _ in range(100):  # more than were under way: all others are of the two that are left
                assert worker.readline().startswith("step ")
        star.set_link(3, up=False)
        for worker in left:
            words = next(line for line in worker if not line.startswith("step "))
            assert words.startswith("PeerLost broker 1 at " + addresses[1])
