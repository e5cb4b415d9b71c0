"""A group on the star: who is unplugged is lost to all others, and is told so itself; needs root, `ip` and `tc`."""

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
PROCESS = """
import sys, threading
from zmqtrain.collectives.mesh import open_port
hub, size, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
class Listener:
    def on_message(self, source, frames):
        heard.add(source)
        if len(heard) == size - 1:
            print("heard", *sorted(heard), *port.statistics().relayed, flush=True)
    def on_lost(self, lost, why): print("lost", lost, why, flush=True)
    def on_tick(self, now): pass
heard = set()
port = open_port(hub, size, rank, name=f"pc-{rank}", timeout_seconds=60, direct_seconds=60)
port.start(Listener())
for other in range(size):
    if other != rank:
        port.call(lambda other=other: port.send(other, [bytes(1 << 20)]))
threading.Event().wait()
"""


def start(star: Star, host: Host, program: str, *arguments: str) -> IO[str]:
    """Start a program on a host; return what it says."""
    process = star.popen(host, [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process.stdout


def test_a_process_whose_cable_is_out_is_lost_to_all_others_and_told_that_it_is_cut_off() -> None:
    hosts: list[Host] = [0, 1, 2, "hub"]
    with Star(nodes=3, bits_per_second=1e9) as star, contextlib.ExitStack() as said:
        assert said.enter_context(start(star, "hub", BROKER)).readline() == "ready\n"
        hub = f"tcp://{star.hub_address}:5555"
        processes = [
            said.enter_context(start(star, host, PROCESS, hub, "4", str(rank))) for rank, host in enumerate(hosts)
        ]
        for rank, process in enumerate(processes):
            others = [str(other) for other in range(4) if other != rank]
            assert process.readline().split() == ["heard", *others], "and nobody is reached through the hub"
        star.set_link(1, up=False)
        for process in processes:
            assert process.readline().startswith("lost 1 ")
