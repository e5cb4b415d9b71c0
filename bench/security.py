"""Measure what keys cost and how soon a revoked one is out: CURVE beside NULL, on the star, in one run.

Rule 1: the two are measured one after the other, in turn, on the same star, as often as `--repeat` says; the best
counts.
Rule 2: a pump is a channel as nodes have it: 1 MiB frames on BULK, from one node to the hub.
Rule 3: a revoked key is out when its node has been told (seconds_told), and when a client that will not go has lost its
connection for good (seconds_cut); both from the moment at which the command has returned.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zmqtrain.transport.key_folder import KeyFolder

from report import parse_rate, print_table, write_json
from star import Host, Star

__all__ = ["main", "measure_pump", "measure_revocation", "start"]

BROKER = """
import sys
from pathlib import Path
from zmqtrain.broker.serve import serve
from zmqtrain.core.settings import RunSettings
from zmqtrain.transport.key_folder import KeyFolder
folder = sys.argv[1]
settings = RunSettings(program="capture-me", codec="float32", broadcast_codec="float32", every=1, delay=2)
ready = lambda broker: print("ready", broker.hub.run, flush=True)
keys = KeyFolder(Path(folder)) if folder else None
serve("tcp://*:5555", settings, keys=keys, ready=ready, interrupted=lambda count: None)
"""

NODE = """
import sys, threading
import numpy as np
from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.node.connect import connect
from zmqtrain.core.types import LeafSpec, Counts
name, address, keys = sys.argv[1:]
leaf = np.random.default_rng(7).standard_normal(50_000, np.float32)
try:
    with connect(address, name=name, keys=keys or None) as node:
        node.join((LeafSpec("attention/kernel", leaf.shape, "float32"),), [leaf])
        applied, pause = 0, threading.Event()
        while True:
            while node.poll() is not None:
                applied += 1
                if applied == 2:
                    print("ready", flush=True)
            if not node.next_fragments() or node.offer(0, [leaf], Counts(1, 1)) is None:
                pause.wait(0.002)
except ZmqTrainError as error:
    print(f"out: {error}", flush=True)
"""

CLINGER = """
import asyncio, sys
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Heartbeat, Hello
from zmqtrain.transport.zmq_channels import DealerChannel
from zmqtrain.transport.zmq_keys import CurveKeys
from zmqtrain.core.types import Lane, PeerId
address, file = sys.argv[1:]
async def beat(channel):
    while True:
        channel.try_send(Lane.CONTROL, [encode_message(Heartbeat())])
        await asyncio.sleep(0.01)

async def main():
    keys = CurveKeys.load(file)
    channel = DealerChannel(address, peer=PeerId("clinger#1"), keys=keys, server_key=keys.server)
    await channel.send(Lane.CONTROL, [encode_message(Hello("clinger"))])
    await channel.receive()
    print("ready", flush=True)
    beating = asyncio.create_task(beat(channel))
    while channel.refused != "key":  # it has been cut, and was not let in again
        await channel.changed()
    print("out", flush=True)
    beating.cancel()
    await channel.close(0.0)
asyncio.run(main())
"""

PUMP_HUB = """
import asyncio, json, sys, time
from pathlib import Path
from zmqtrain.transport.admission import Admission
from zmqtrain.transport.key_folder import KeyFolder
from zmqtrain.transport.zmq_channels import RouterChannel
seconds, folder = float(sys.argv[1]), sys.argv[2]
async def main():
    keys = KeyFolder(Path(folder)) if folder else None
    admission = Admission(keys.authorised()) if keys else None
    hub = RouterChannel("tcp://*:5556", keys=keys.hub() if keys else None, admission=admission)
    print("ready", flush=True)
    await hub.receive()
    began, cpu, total = time.monotonic(), time.process_time(), 0
    while time.monotonic() < began + seconds:
        _, _, frames = await hub.receive()
        total += sum(len(frame) for frame in frames)
    spent = time.monotonic() - began
    print(json.dumps({"bytes": total, "seconds": spent, "cpu": time.process_time() - cpu}), flush=True)
    while True:  # until it is ended: the node may wait for room
        await hub.receive()
asyncio.run(main())
"""

PUMP_NODE = """
import asyncio, json, sys, time
from zmqtrain.transport.zmq_channels import DealerChannel
from zmqtrain.transport.zmq_keys import read_credentials
from zmqtrain.core.types import Lane, PeerId
address, file = sys.argv[1:]
async def main():
    server_key, keys = read_credentials(None, file or None)
    node = DealerChannel(address, peer=PeerId("pump#1"), keys=keys, server_key=server_key)
    frame, began, cpu, sent = bytes(1 << 20), 0.0, 0.0, 0
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.readline)
    while not ended.done():
        await node.send(Lane.BULK, [b"head", frame])
        if not began:
            began, cpu = time.monotonic(), time.process_time()
        sent += len(frame)
    print(json.dumps({"bytes": sent, "cpu": time.process_time() - cpu}), flush=True)
    await node.close(0.0)
asyncio.run(main())
"""


def start(star: Star, host: Host, program: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start one of the programs above, and wait until it says "ready"; return it and what else it said."""
    argv = [sys.executable, "-c", program, *arguments]
    process = star.popen(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said = _next_line(process)
    if not said.startswith("ready"):
        raise RuntimeError(f"a program of the bench did not begin: {said!r}")
    return process, said.removeprefix("ready").strip()


def _next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def measure_pump(star: Star, seconds: float, keys: KeyFolder | None) -> dict[str, Any]:
    """Return how fast one node sends to the hub, and the processor time of both for a gigabyte."""
    folder = str(keys.path) if keys is not None else ""
    hub, _ = start(star, "hub", PUMP_HUB, str(seconds), folder)
    file = str(keys.secret_of("pc0")) if keys is not None else ""
    argv = [sys.executable, "-c", PUMP_NODE, f"tcp://{star.hub_address}:5556", file]
    node = star.popen(0, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    received = json.loads(_next_line(hub))
    sent = json.loads(node.communicate("\n")[0])
    hub.terminate()
    hub.communicate()
    return {
        "mechanism": "CURVE" if keys is not None else "NULL",
        "mb_per_second": received["bytes"] / received["seconds"] / 1e6,
        "hub_cpu_s_per_gb": received["cpu"] / received["bytes"] * 1e9,
        "node_cpu_s_per_gb": sent["cpu"] / sent["bytes"] * 1e9,
        "hub_cores": received["cpu"] / received["seconds"],
    }


def measure_revocation(star: Star, keys: KeyFolder) -> dict[str, float]:
    """Return after how many seconds a node whose key is revoked has been told, and one that stays has been cut; a node
    with another key trains on all the while."""
    broker, _ = start(star, "hub", BROKER, str(keys.path))
    address = f"tcp://{star.hub_address}:5555"
    files = [str(path) for path in keys.new(["stays", "goes", "clings"])]
    stays, _ = start(star, 0, NODE, "stays", address, files[0])
    goes, _ = start(star, 1, NODE, "goes", address, files[1])
    clings, _ = start(star, 1, CLINGER, address, files[2])
    keys.revoke("goes")
    began = time.monotonic()
    said = _next_line(goes)
    told = time.monotonic() - began
    keys.revoke("clings")
    began = time.monotonic()
    cut = _next_line(clings)
    seconds = time.monotonic() - began
    if "revoked" not in said or cut != "out" or stays.poll() is not None:
        raise RuntimeError(f"a revoked node said {said!r}, one that clings {cut!r}")
    keys.revoke("stays")
    for process in (goes, clings, stays):
        process.communicate()
    broker.terminate()
    broker.communicate()
    return {"seconds_told": told, "seconds_cut": seconds}


def main() -> None:
    """Measure as the command line says, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=parse_rate, nargs="+", default=[1e9, 10e9], help="of each port (1gbit 10gbit)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each mechanism, and revocations")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args()
    rows, revoked = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rate in options.rate:
            with Star(nodes=2, bits_per_second=rate) as star:
                rows += _compare(star, options.seconds, options.repeat, Path(folder) / f"pump-{rate:.0f}")
        with Star(nodes=2, bits_per_second=1e9) as star:
            for number in range(options.repeat):
                keys = KeyFolder(Path(folder) / f"revoked-{number}")
                keys.hub()
                revoked.append({"revocation": number + 1} | measure_revocation(star, keys))
    print_table(rows, "A node to the hub, 1 MiB frames")
    print_table(revoked, "After a key is revoked")
    if options.json:
        write_json(options.json, rows + revoked)


def _compare(star: Star, seconds: float, repeat: int, folder: Path) -> list[dict[str, Any]]:
    keys = KeyFolder(folder)
    keys.new(["pc0"])
    measured = [measure_pump(star, seconds, kind) for _ in range(repeat) for kind in (None, keys)]
    best = [
        max((row for row in measured if row["mechanism"] == kind), key=lambda row: float(row["mb_per_second"]))
        for kind in ("NULL", "CURVE")
    ]
    return [{"port_mbit": star.bits_per_second / 1e6} | row for row in best]


if __name__ == "__main__":
    main()
