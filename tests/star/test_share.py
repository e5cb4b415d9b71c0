"""A share of a port leaves the rest of it to others: counted at the port, on the star; needs root, `ip` and `tc`."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.grids import nightly

from star import Host, Star

BITS = 1e9
COUNTED_BYTES = 120_000_000
"""So many that it changes little if 13 MB of them pass at once: what was held up as the counting began (a window of 4
MiB to each node, or of 6 MiB from all of them), and a burst."""
BROKER = """
import sys
from zmqtrain.planning.plans import link_share
from zmqtrain.broker.serve import serve
from zmqtrain.core.settings import RunSettings
settings = RunSettings(codec="float32", broadcast_codec="float32", every=1, delay=2, release="immediately")
share = link_share("1gbit", float(sys.argv[1]))
ready = lambda broker: print("ready", flush=True)
serve("tcp://*:5555", settings, share=share, ready=ready, interrupted=lambda count: None)
"""
NODE = """
import sys, threading
import numpy as np
from zmqtrain.node.connect import connect
from zmqtrain.core.types import LeafSpec, Counts
name, address, share = sys.argv[1:]
link = "" if share == "1" else "1gbit"
leaf = np.zeros(2_000_000, np.float32)
with connect(address, name=name, link=link, share=float(share)) as node:
    node.join((LeafSpec("w", leaf.shape, "float32"),), [leaf])
    print("ready", flush=True)
    pause = threading.Event()
    while True:
        while node.poll() is not None:
            pass
        if not node.next_fragments() or node.offer(0, [leaf], Counts(1, 1)) is None:
            pause.wait(0.002)
"""


def start(star: Star, host: Host, program: str, *arguments: str) -> None:
    process = star.popen(host, [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline().strip() == "ready"


def used(star: Star, host: Host) -> tuple[float, float]:
    """Return the shares of a host's port that are used at least, out and in, while COUNTED_BYTES pass one way."""
    began, before = time.monotonic(), star.counters(host)
    while True:
        after, now = star.counters(host), time.monotonic()  # what is counted has passed between the two times
        sent, received = after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes
        if max(sent, received) >= COUNTED_BYTES:
            return 8 * sent / BITS / (now - began), 8 * received / BITS / (now - began)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("hub_share", "node_share", "narrow"), [("0.5", "1", "hub"), *nightly(("1", "0.5", 0))])
def test_no_more_than_the_share_of_a_port_is_used_while_all_that_can_be_is_exchanged(
    hub_share: str, node_share: str, narrow: Host
) -> None:
    with Star(nodes=2, bits_per_second=BITS) as star:
        start(star, "hub", BROKER, hub_share)
        for node in range(2):
            start(star, node, NODE, f"pc-{node}", f"tcp://{star.hub_address}:5555", node_share if node == 0 else "1")
        most = 0.0
        while most <= 0.2:  # so much of it is used at times, however busy the cores are
            most = max(used(star, narrow))
            assert most <= 0.55
