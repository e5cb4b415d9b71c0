"""Measure how close a hub comes to its port: N nodes exchange uncompressed deltas through it, as fast as it lets them.

    time of an exchange = seconds of the window x fragments / fragments that came back, each of them of all N nodes

Rule 1: no model is trained and no JAX runs: each node hands over the same float32 deltas again and again, as many
fragments in flight as keep the port full both ways, and takes back what comes.
Rule 2: every node is a process in a namespace of its own, and so is the broker; all measure the same window.
Rule 3: the limit is what must pass the busiest port one way, at the rate of plain TCP (0.956 of the port's), up and
down at once: N deltas for one hub; for M brokers on M of the N nodes, who do not send to themselves, what a ring needs
where M = N: 2 (N - 1) / N of a delta.
Rule 4: transport is what the network thread and the sockets use, of nodes and hubs together; codecs are counted apart.
Rule 5: what plain TCP takes for as many bytes is measured in the same star, at once after the window.

Columns: exchange_ms, limit_ms, exchange_over_limit: as said above.  hub_in_mb_s, hub_out_mb_s: 10^6 bytes per second
through the first hub.  transport_cpu_s_per_gb: CPU seconds per 10^9 bytes that went from a node to a hub or back (each
byte counted once).  plain_tcp_cpu_s_per_gb: of processes that do nothing but send and receive, with all nodes at once,
likewise.  codec_cpu_s_per_gb: of the codec threads, likewise.  heartbeat_p50_ms, ..._p99_ms: round trips of
heartbeats, at all nodes, in the window; heartbeats: how many.  busy: of all cores.  node_..., hub_..._s_per_gb: CPU
seconds by thread, of all nodes and of all hubs, over the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.core.types import Counts
from zmqtrain.planning.schedule import payload_rate

from children import Child, ask_all, commands, difference, say, thread_seconds
from report import BusyMeter, format_rate, parse_rate, print_table, write_json
from star import Host, Star, plain_tcp_cpu

__all__ = ["Case", "read_options", "measure", "main"]

PORT = 5555
LEAVES = 16
"""The model has so many leaves, all of the same size."""
HEARTBEAT_SECONDS, LOOK_SECONDS = 0.2, 0.02
POLL_SECONDS = 0.002
WARM_SHARE = 0.25
"""So much of a window passes before it begins, with the same traffic."""
TRANSPORT_THREADS, CODEC_THREADS = ("network", "broker", "sockets"), ("codec", "aggregate")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row measures. rate: of every port, bits per second; seconds: of the window; in_flight: fragments."""

    nodes: int = 4
    shards: int = 1
    params: int = 25_000_000
    codec: str = "float32"
    fragments: int = 8
    in_flight: int = 4
    rate: float = 1e9
    seconds: float = 40.0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as `RunSettings.from_dict` reads them."""
        return {
            "every": 1,
            "delay": self.in_flight,
            "codec": self.codec,
            "broadcast_codec": self.codec,
            "fragments": self.fragments,
            "release": "all",
            "outer": "sgd:rate=1",
            "start_nodes": self.nodes,
            "shards": self.shards,
            "initial": "founder",
            "evaluate_seconds": 0.0,
            "heartbeat_seconds": HEARTBEAT_SECONDS,
        }

    @property
    def bytes_per_port(self) -> float:
        """What must pass the busiest port, one way, in one exchange of uncompressed deltas."""
        delta = 4.0 * self.params
        if self.shards == 1:
            return self.nodes * delta
        share = delta / self.shards  # a node that is a broker sends the others' shares, and its own to the others
        return (delta - share) + (self.nodes - 1) * share


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=4, help="how many nodes (default %(default)s)")
    parser.add_argument("--shards", type=int, nargs="+", default=[1], help="a row each; 1: one hub; more: on the nodes")
    parser.add_argument("--params", type=float, default=25e6, help="of the model, float32 (default %(default)g)")
    parser.add_argument("--fragments", type=int, default=8, help="of each broker (default %(default)s)")
    parser.add_argument(
        "--in-flight", type=int, default=4, help="fragments of a node on their way (default %(default)s)"
    )
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of each port, each way (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the window (default %(default)g)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    return parser.parse_args(arguments)


def measure(case: Case) -> dict[str, Any]:
    """Build a star, run the case on it and return its row. Raises RuntimeError if a process fails or hangs."""
    with Star(case.nodes, case.rate) as star:
        return _row(case, *_run(case, star), plain_tcp_cpu(star)) | {"congestion_control": star.congestion_control}


def main() -> None:
    """Measure the cases that the command line asks for and print their rows; or be one of the processes."""
    if sys.argv[1:2] in (["node"], ["broker"]):
        case = Case(**json.loads(sys.argv[2]))
        _be_node(case, int(sys.argv[3])) if sys.argv[1] == "node" else _be_broker(case, int(sys.argv[3]), sys.argv[4])
        return
    options = read_options(sys.argv[1:])
    cases = [
        Case(
            nodes=options.nodes,
            shards=shards,
            params=int(options.params),
            fragments=max(1, options.fragments // shards),
            in_flight=max(1, options.in_flight // shards),
            rate=options.rate,
            seconds=options.seconds,
        )
        for shards in options.shards
    ]
    try:
        rows = [measure(case) for case in cases]
    except RuntimeError as error:
        raise SystemExit(f"hub: {error}") from error
    what = f"{options.nodes} nodes, every port {format_rate(options.rate)}"
    print_table([{"": key} | {str(row["shards"]): row[key] for row in rows} for key in rows[0]], f"{what}, by brokers")
    if options.json:
        write_json(options.json, rows)


# ---------------------------------------------------------------------- the process that measures


def _run(case: Case, star: Star) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """Return what the nodes and the brokers did and used in the window, and how busy the machine was."""
    with contextlib.ExitStack() as stack:

        def child(host: Host, *arguments: str) -> Child:
            one = Child(star, host, __file__, arguments[0], json.dumps(asdict(case)), *arguments[1:])
            stack.callback(one.close)
            one.answer()
            return one

        hosts: list[Host] = ["hub"] if case.shards == 1 else list(range(case.shards))
        addresses = [star.hub_address if host == "hub" else star.node_address(host) for host in hosts]
        first = f"tcp://{addresses[0]}:{PORT}"
        brokers = [
            child(host, "broker", str(shard), json.dumps([first, f"tcp://{address}:{PORT}"]))
            for shard, (host, address) in enumerate(zip(hosts, addresses, strict=True))
        ]
        nodes = [child(number, "node", str(number)) for number in range(case.nodes)]
        ask_all(nodes, "join", first)
        begin = time.monotonic() + 0.5
        start = begin + WARM_SHARE * case.seconds
        for node in nodes:
            node.tell("stream", begin, start, start + case.seconds)
        time.sleep(max(0.0, start - time.monotonic()))
        before = ask_all(brokers, "figures")
        with BusyMeter() as window:
            time.sleep(max(0.0, start + case.seconds - time.monotonic()))
        after = ask_all(brokers, "figures")
        streamed = [node.answer() for node in nodes]
        ask_all(nodes, "end")
        used = [difference(one, other) for one, other in zip(before, after, strict=True)]
        return streamed, used, window.busy_share


def _row(
    case: Case, nodes: list[dict[str, Any]], brokers: list[dict[str, Any]], busy: float, plain_tcp: float
) -> dict[str, Any]:
    if not all(node["fragments"] for node in nodes):
        raise RuntimeError(f"a node got no aggregate back in {case.seconds:g} s: give more --seconds")
    models = statistics.fmean(node["fragments"] / node["seconds"] for node in nodes) / (case.fragments * case.shards)
    limit = case.bytes_per_port / payload_rate(case.rate)
    moved = sum(node["bytes_sent"] + node["bytes_received"] for node in nodes) / 1e9
    trips = sorted(1e3 * trip for node in nodes for trip in node["round_trips"])

    def cpu(processes: Sequence[dict[str, Any]], *threads: str) -> float:
        return sum(one["threads"].get(name, 0.0) for one in processes for name in threads) / moved

    return {
        "nodes": case.nodes,
        "shards": case.shards,
        "params": case.params,
        "codec": case.codec,
        "fragments": case.fragments,
        "in_flight": case.in_flight,
        "seconds": case.seconds,
        "exchange_ms": 1e3 / models,
        "limit_ms": 1e3 * limit,
        "exchange_over_limit": 1 / models / limit,
        "hub_in_mb_s": brokers[0]["bytes_received"] / case.seconds / 1e6,
        "hub_out_mb_s": brokers[0]["bytes_sent"] / case.seconds / 1e6,
        "transport_cpu_s_per_gb": cpu([*nodes, *brokers], *TRANSPORT_THREADS),
        "plain_tcp_cpu_s_per_gb": plain_tcp,
        "codec_cpu_s_per_gb": cpu([*nodes, *brokers], *CODEC_THREADS),
        "heartbeats": len(trips),
        "heartbeat_p50_ms": trips[len(trips) // 2],
        "heartbeat_p99_ms": trips[min(len(trips) - 1, int(0.99 * len(trips)))],
        "busy": busy,
        **{f"node_{name}_s_per_gb": cpu(nodes, name) for name in nodes[0]["threads"]},
        **{f"hub_{name}_s_per_gb": cpu(brokers, name) for name in brokers[0]["threads"]},
    }


# ---------------------------------------------------------------------- the processes that are measured


def _be_broker(case: Case, shard: int, addresses: str) -> None:
    """Be one broker; answer `figures` with its statistics and its CPU seconds by thread."""
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.broker.standby import ShardPlace
    from zmqtrain.core.settings import RunSettings

    told, (first, own) = commands(), json.loads(addresses)
    place = ShardPlace(shard=shard, shards=case.shards, first=first, address=own) if shard else None
    settings = None if place else RunSettings.from_dict(case.settings)
    with BrokerThread(f"tcp://*:{PORT}", settings, place=place) as broker:
        say({"listens": broker.address})
        while True:
            told.get()
            say(asdict(broker.broker.statistics()) | {"threads": thread_seconds()})


class _Node:
    """A node that hands over the same deltas again and again."""

    def __init__(self, case: Case, number: int) -> None:
        import numpy as np

        from zmqtrain.core.types import LeafSpec

        size = case.params // LEAVES
        self.case, self.number = case, number
        self.model = tuple(LeafSpec(f"leaf{index:02}", (size,), "float32") for index in range(LEAVES))
        self.leaves = [np.full(size, 1e-6 * (number + 1), np.float32) for _ in self.model]
        self.fragments = 0

    def join(self, address: str) -> None:
        """Join the run."""
        from zmqtrain.node.connect import connect

        self.exchange = connect(address, f"pc-{self.number}")
        self.exchange.join(self.model, self.leaves)
        layout = self.exchange.layout
        self.deltas = [
            [layout.take(self.leaves[leaf], leaf, fragment) for leaf in layout.leaves(fragment)]
            for fragment in range(layout.fragments)
        ]

    def turn(self) -> None:
        """Offer and take what can be offered and taken now; wait a moment if there was nothing."""
        done = False
        while fragments := self.exchange.next_fragments():
            for fragment in fragments:
                self.exchange.offer(fragment, self.deltas[fragment], Counts(1, 1))
            done = True
        while (update := self.exchange.poll()) is not None:
            self.fragments += len(update.aggregate)
            done = True
        if not done:
            time.sleep(POLL_SECONDS)

    def figures(self) -> dict[str, Any]:
        """Return what has been done and used so far."""
        done = self.exchange.statistics()
        return {
            "seconds": time.monotonic(),
            "fragments": self.fragments,
            "bytes_sent": done.bytes_sent,
            "bytes_received": done.bytes_received,
            "threads": thread_seconds(),
        }

    def stream(self, begin: float, start: float, end: float) -> dict[str, Any]:
        """Exchange from `begin` on; return what was done and used from `start` to `end`."""
        time.sleep(max(0.0, begin - time.monotonic()))
        while time.monotonic() < start:
            self.turn()
        before, trips, over = self.figures(), [], threading.Event()
        listening = threading.Thread(target=lambda: trips.extend(self._round_trips(over)), daemon=True)
        listening.start()
        while time.monotonic() < end or self.fragments == before["fragments"]:
            self.turn()
        result = difference(before, self.figures())
        over.set()
        listening.join()
        return result | {"round_trips": trips}

    def _round_trips(self, over: threading.Event) -> list[float]:
        trips: list[float] = []
        last = self.exchange.statistics().round_trip_seconds
        while not over.wait(LOOK_SECONDS) or not trips:
            trip = self.exchange.statistics().round_trip_seconds
            if trip is not None and trip != last:
                trips.append(trip)
                last = trip
        return trips


def _be_node(case: Case, number: int) -> None:
    """Be a node in its namespace; do what it is told, and answer with what it measured."""
    told, node = commands(), _Node(case, number)
    say({"built": case.params})
    while True:
        match told.get():
            case ["join", address]:
                node.join(address)
                say({"joined": True})
            case ["stream", begin, start, end]:
                say(node.stream(begin, start, end))
            case ["end"]:
                node.exchange.close()
                say({"left": True})
                return


if __name__ == "__main__":
    main()
