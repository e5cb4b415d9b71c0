"""Measure what training in lockstep costs on the star: the synchronous baseline of bench/efficiency.py.

    efficiency = steps x seconds of a step that only sleeps / seconds that they took, mean over the nodes

Rule 1: a step is `time.sleep`, as in efficiency.py, and then one exchange of the gradients of the whole model, which
the next step waits for. The gradients lie on the host, in the buckets of `GradientLoop`: what a PC's GPU does (to make
them, and the optimizer's step) would eat the cores that stand in for N machines, and is not counted.
Rule 2: nothing overlaps but what the exchange overlaps itself: so does a loop with overlap=none, and one micro-batch.
Rule 3: only what the package offers anybody is used.

Columns: exchange_ms: median of one step's, from the first agreement to the last bucket.  limit_ms: what each port must
carry at least, at the rate of plain TCP: 2 (N - 1) / N of the gradients for an allreduce; for a server on the hub, all
of each node's both ways.  mb_per_node_step: sent, 10^6 bytes.  node_cpu_ns_per_param: CPU time of a node per parameter
and step.  busy: of all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.planning.schedule import payload_rate

from children import Child, ask_all, commands, median_sleep, say
from report import BusyMeter, format_rate, parse_rate, print_table, write_json
from shapes import model_shapes
from star import Star

__all__ = ["Case", "read_options", "measure", "main"]

STEP_SECONDS = 0.05
WARM_STEPS = 2
PORT = 5555
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row measures. exchange: as for `zmqtrain-node --exchange`.  rate: of every port, bits per second."""

    nodes: int = 4
    params: int = 25_000_000
    exchange: str = "allreduce:ring"
    rate: float = 1e9
    steps: int = 8


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=4, help="how many nodes (default %(default)s)")
    parser.add_argument("--params", type=float, default=25e6, help="of the model, float32 (default %(default)g)")
    parser.add_argument("--exchange", nargs="+", default=["allreduce:ring"], help="a row each (default allreduce:ring)")
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of each port, each way (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of the window (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    return parser.parse_args(arguments)


def measure(case: Case) -> dict[str, Any]:
    """Build a star, run the case on it and return its row. Raises RuntimeError if a process fails or hangs."""
    said = json.dumps(asdict(case))
    with Star(case.nodes, case.rate) as star, contextlib.ExitStack() as stack:
        broker, *nodes = children = [
            Child(star, "hub", __file__, "broker", said),
            *(Child(star, number, __file__, "node", said, str(number)) for number in range(case.nodes)),
        ]
        for child in children:
            stack.callback(child.close)
        for child in children:
            child.answer()
        ask_all(nodes, "join", f"tcp://{star.hub_address}:{PORT}")
        with BusyMeter() as busy:
            measured = ask_all(nodes, "window")
        ask_all(nodes, "end")
        ask_all([broker], "end")
        return _row(case, measured, busy.busy_share) | {"congestion_control": star.congestion_control}


def _row(case: Case, nodes: list[dict[str, Any]], busy: float) -> dict[str, Any]:
    exchange = statistics.median(seconds for node in nodes for seconds in node["exchange_seconds"])
    size, params = FLOAT_BYTES * nodes[0]["params"], nodes[0]["params"]
    at_the_port = case.nodes * size if case.exchange.startswith("server") else 2 * (case.nodes - 1) / case.nodes * size
    limit = at_the_port / payload_rate(case.rate)

    def mean(name: str) -> float:
        return statistics.fmean(node[name] for node in nodes)

    return {
        "nodes": case.nodes,
        "params": params,
        "exchange": case.exchange,
        "steps": case.steps,
        "efficiency": statistics.fmean(case.steps * node["sleep_seconds"] / node["seconds"] for node in nodes),
        "mb_per_node_step": mean("bytes_sent") / case.steps / 1e6,
        "node_cpu_ns_per_param": 1e9 * mean("cpu_seconds") / case.steps / params,
        "exchange_ms": 1e3 * exchange,
        "limit_ms": 1e3 * limit,
        "exchange_over_limit": exchange / limit,
        "busy": busy,
    }


def main() -> None:
    """Measure the cases that the command line asks for and print their rows; or be one of the processes."""
    if sys.argv[1:2] in (["node"], ["broker"]):
        case = Case(**json.loads(sys.argv[2]))
        _be_node(case, int(sys.argv[3])) if sys.argv[1] == "node" else _be_broker(case)
        return
    options = read_options(sys.argv[1:])
    cases = [
        Case(nodes=options.nodes, params=int(options.params), exchange=exchange, rate=options.rate, steps=options.steps)
        for exchange in options.exchange
    ]
    try:
        rows = [measure(case) for case in cases]
    except RuntimeError as error:
        raise SystemExit(f"lockstep: {error}") from error
    what = f"{options.nodes} nodes, every port {format_rate(options.rate)}, a step of {1e3 * STEP_SECONDS:.0f} ms"
    print_table(
        [{"": key} | {str(row["exchange"]): row[key] for row in rows} for key in rows[0] if key != "exchange"], what
    )
    if options.json:
        write_json(options.json, rows)


# ---------------------------------------------------------------------- the processes that are measured


def _be_broker(case: Case) -> None:
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.core.settings import RunSettings

    told = commands()
    with BrokerThread(f"tcp://*:{PORT}", RunSettings(start_nodes=case.nodes, evaluate_seconds=0.0)) as broker:
        say({"listens": broker.address})
        told.get()
        say({"ends": True})


class _Node:
    """A node's training thread: gradients in buckets on the host, and the loop that exchanges them."""

    def __init__(self, case: Case, number: int, address: str) -> None:
        import numpy as np

        from zmqtrain.node.connect import connect
        from zmqtrain.synchronous.exchanges import GradientAccess, read_exchange
        from zmqtrain.train.gradients import Buckets

        choice = read_exchange(case.exchange)
        assert choice is not None, "hub is what efficiency.py measures"
        model = _describe_model(case.params)
        self.buckets = Buckets(model, choice.bucket_bytes)
        random = np.random.default_rng(number)
        self.flats = [1e-3 * random.standard_normal(flat.size, dtype=np.float32) for flat in self.buckets.zeros()]
        self.params = sum(flat.size for flat in self.flats)
        self.node = connect(address, f"pc-{number}", exchange=choice.name)
        self.gradients = GradientAccess(choice, self.node).open(model, 0)
        self.gradients.align(-1, lambda: [np.zeros(leaf.shape, np.float32) for leaf in model])

    def step(self) -> float:
        """Sleep, and exchange; return how long the exchange took."""
        time.sleep(STEP_SECONDS)
        began = time.perf_counter()
        self.gradients.agree(1, False)
        for leaves, flat in zip(self.buckets.leaves, self.flats, strict=True):
            self.gradients.begin(leaves, flat)
        self.gradients.finish()
        return time.perf_counter() - began

    def window(self, steps: int) -> dict[str, Any]:
        """Take so many steps; return what they took."""
        slept = median_sleep(STEP_SECONDS, steps)
        for _ in range(WARM_STEPS):
            self.step()
        (sent, _), used, began = self.gradients.traffic(), time.process_time(), time.perf_counter()
        exchanges = [self.step() for _ in range(steps)]
        return {
            "seconds": time.perf_counter() - began,
            "sleep_seconds": slept,
            "exchange_seconds": exchanges,
            "bytes_sent": self.gradients.traffic()[0] - sent,
            "cpu_seconds": time.process_time() - used,
            "params": self.params,
        }


def _be_node(case: Case, number: int) -> None:
    told = commands()
    say({"started": True})
    node: _Node | None = None
    while True:
        match told.get():
            case ["join", address]:
                node = _Node(case, number, address)
                say({"joined": True})
            case ["window"]:
                assert node is not None
                say(node.window(case.steps))
            case ["end"]:
                assert node is not None
                node.gradients.close()
                node.node.close()
                say({"left": True})
                return


def _describe_model(params: int) -> Any:
    """Return the leaves of a transformer of about so many values."""
    from zmqtrain.core.types import LeafSpec

    return tuple(LeafSpec(name, shape, "float32") for name, shape in model_shapes(params).items())


if __name__ == "__main__":
    main()
