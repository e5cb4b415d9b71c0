"""Measure what a run costs its nodes: N of them and their hub on the star, each step 50 ms of an emulated accelerator.

    efficiency = steps in the window x seconds of a step that only sleeps / seconds of the window, mean over the nodes

Rule 1: a step is `time.sleep` on the training thread, which is all that a PC's processor does while its GPU computes,
and a small random move of one matrix in turn, so that no delta is zero. Moving the whole model each step would be the
GPU's work; here it would eat the cores that stand in for N + 1 machines. What moving the one matrix costs is measured
before, by the same loop without an exchange, and is not counted as ours.
Rule 2: the subtraction and the rebase, which a PC's GPU does in a few ms, run on these cores and ARE counted in the
CPU time of a node; as on a GPU they run beside the training thread, which waits, as `TrainingLoop` does, for the step
before the last. With `--serial` it waits for them too, before each step: as if no PC had a GPU.
Rule 3: every node is a process in a namespace of its own, and so is the broker; all measure the same window, after
every function is compiled and aggregates have been applied for a while.
Rule 4: only what the package offers anybody is used.

Columns, besides those that say what was set (per exchange, of one fragment, unless its name says otherwise):
efficiency_of_steps: the same, over the seconds of a whole step without an exchange, its move of a matrix included.
refused: the share of the offers that were put off, because the one before had not landed.
planned: k and d at the end of the window, where the broker plans them.
period_steps: steps between two aggregates applied.  model_period_steps: the same, times the fragments.
p99_over_median: of the seconds of a step in the window.
age_steps: of an aggregate when it is applied, from its offer (median).  mb_per_node_step: sent, 10^6 bytes.
node_cpu_ns_per_param, hub_cpu_ns_per_param: CPU time of a node, and of the broker for one contribution, per parameter
that is carried.  held_ms: of the training thread, in `DelayedSync.step`.  busy: of all cores, in the window.
exchange_ms: per exchange of the whole model, where all nodes offer as soon as they can, as many fragments in flight as
delay / every, and nothing else is done, no step either (median; busy_exchange: of all cores, meanwhile).  limit_ms: how
long the N deltas take through the hub's port at the rate of plain TCP (0.956 of the port's), or the N aggregates,
whichever is longer: up and down are taken to overlap, though no aggregate can leave before the last delta of its
fragment is in.
exchange_over_limit: exchange_ms / limit_ms.
encode_ms, decode_ms, hub_ms: CPU time of a node's codec thread, and of the broker's for one aggregate.
node_..._thread_ms, hub_..._thread_ms: CPU time by thread; main: a node's training thread; sockets: ZeroMQ's; other:
XLA's.
node_rss_mb, hub_rss_mb: memory held at the end of the window; ..._rss_growth: over that at its beginning;
node_rss_late_growth: over that in the middle of it (what the C library keeps for itself has settled by then).
predicted_efficiency, ..._period_steps, ..._busy: what the formula of `zmqtrain plan` says of hosts that share these
cores, told what an exchange costs them where nothing else is done, as for exchange_ms (shared_cores; alone_..._ms: CPU
of a node's codec, of its sockets, where it subtracts and rebases; of the hub's codec, of its sockets; alone_deltas: in
one aggregate), and a step (step_cpu_ms).
With --slow, so many nodes take twice as long for a step: efficiency is that of the others, slow_efficiency theirs.
With --exchange, a column for each way to train in lockstep stands beside (bench/lockstep.py, which says what is in it).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.core.settings import pieces_of
from zmqtrain.planning.plans import Wish
from zmqtrain.planning.schedule import Schedule, payload_rate

import lockstep
from children import Child, ask_all, commands, difference, resident_bytes, say, thread_seconds
from emulated_node import be_node
from report import BusyMeter, format_rate, parse_rate, print_table, write_json
from shared_cores import Shared, Work, load_on, predict_on
from star import Star

__all__ = ["Case", "read_options", "default_cases", "measure", "measure_on", "work_alone", "main"]

STEP_SECONDS = 0.05
LONGEST_PERIOD_STEPS, PERIOD_STEPS = 16, 12
"""Steps between offers, unless --every says otherwise, of a whole model (as rarely as a period of 16 lets it be: two
cores can hardly do the work of five machines at that) and of a fragment."""
SETTLE_SECONDS = 30.0
PORT = 5555


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row measures. rate: of every port, bits per second; steps: of the window, if none is lost.

    fragments: a number, of which an exchange carries one in turn; or "auto", as by default: it carries all.
    every, delay: numbers; or both "auto", as by default: the broker plans them, and the window begins when the nodes
    have trained for `settle_seconds`.  warm: so many aggregates of each fragment are applied before the window begins.
    """

    nodes: int = 4
    params: int = 25_000_000
    codec: str = "ternary"
    fragments: int | str = 1
    every: int | str = LONGEST_PERIOD_STEPS
    delay: int | str = LONGEST_PERIOD_STEPS // 2
    release: str = "quorum"
    rate: float = 1e9
    steps: int = 160
    serial: bool = False
    slow: int = 0
    warm: int = 2

    @property
    def parts(self) -> int:
        """How many fragments the model has."""
        return pieces_of(self.params) if self.fragments == "auto" else int(self.fragments)

    @property
    def settle_seconds(self) -> float:
        """How long a node trains at least before the window begins: until a plan has settled."""
        return SETTLE_SECONDS if self.every == "auto" else 0.0

    def step_seconds(self, node: int) -> float:
        """Return how long a node's emulated step takes: the last ones are at half speed."""
        return STEP_SECONDS * (2 if node >= self.nodes - self.slow else 1)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as `RunSettings.from_dict` reads them."""
        return {
            "every": self.every,
            "delay": self.delay,
            "codec": self.codec,
            "broadcast_codec": self.codec,
            "fragments": self.fragments,
            "release": self.release,
            "start_nodes": self.nodes,
            "evaluate_seconds": 0.0,
            "lost_seconds": 30.0,  # nothing is lost here, but cores may be short
        }


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=4, help="how many nodes (default %(default)s)")
    parser.add_argument("--params", type=float, default=25e6, help="of the model, float32 (default %(default)g)")
    parser.add_argument("--codec", default="ternary", help="up and down (default %(default)s)")
    parser.add_argument(
        "--fragments", type=_number, nargs="+", default=[1, 4, 8], help="a row each, or auto (default 1 4 8)"
    )
    parser.add_argument("--every", type=_number, help="steps between offers, or auto (default 12; 16 for one fragment)")
    parser.add_argument(
        "--delay", type=_number, help="steps from offer to application (default: half of every, or auto with it)"
    )
    parser.add_argument("--release", default="quorum", help="the release rule (default %(default)s)")
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of each port, each way (default %(default)s)")
    parser.add_argument("--steps", type=int, default=160, help="of the window (default %(default)s)")
    parser.add_argument("--slow", type=int, default=0, help="so many of the nodes at half speed (default %(default)s)")
    parser.add_argument("--exchange", nargs="+", default=[], help="rows of nodes in lockstep, as allreduce:ring")
    parser.add_argument("--serial", action="store_true", help="a step begins when its parameters are ready")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(arguments)
    if "auto" in (options.every, options.delay) and not options.every == "auto" == (options.delay or "auto"):
        parser.error("--every auto --delay auto: a plan chooses both, or give a number for each")
    return options


def _number(text: str) -> int | str:
    return text if text == "auto" else int(text)


def default_cases(options: argparse.Namespace) -> list[Case]:
    """Return one case per number of fragments; `every` and `delay`, if not given, follow from it."""
    cases = []
    for fragments in options.fragments:
        every = options.every or (LONGEST_PERIOD_STEPS if fragments == 1 else PERIOD_STEPS)
        cases.append(
            Case(
                nodes=options.nodes,
                params=int(options.params),
                codec=options.codec,
                fragments=fragments,
                every=every,
                delay=_half(every) if options.delay is None else options.delay,
                release=options.release,
                rate=options.rate,
                steps=options.steps,
                serial=options.serial,
                slow=options.slow,
            )
        )
    return cases


def _half(every: int | str) -> int | str:
    return every if isinstance(every, str) else max(1, every // 2)


def _lockstep_cases(options: argparse.Namespace) -> list[lockstep.Case]:
    """Return the synchronous baselines that are asked for."""
    return [
        lockstep.Case(nodes=options.nodes, params=int(options.params), exchange=exchange, rate=options.rate)
        for exchange in options.exchange
    ]


def measure(case: Case) -> dict[str, Any]:
    """Build a star, run the case on it and return its row. Raises RuntimeError if a process fails or hangs."""
    with Star(case.nodes, case.rate) as star:
        return measure_on(case, star) | {"congestion_control": star.congestion_control}


def measure_on(case: Case, star: Star) -> dict[str, Any]:
    """Run the case on a star that is there and return its row. Raises RuntimeError as `measure` does."""
    return _row(case, star, *_run(case, star))


def main() -> None:
    """Measure the cases that the command line asks for and print their rows; or be one of the processes."""
    if sys.argv[1:2] in (["node"], ["broker"]):
        case = Case(**json.loads(sys.argv[2]))
        be_node(case, int(sys.argv[3])) if sys.argv[1] == "node" else _be_broker(case)
        return
    options = read_options(sys.argv[1:])
    try:
        rows = [measure(case) for case in default_cases(options)]
        rows += [lockstep.measure(case) for case in _lockstep_cases(options)]
    except RuntimeError as error:
        raise SystemExit(f"efficiency: {error}") from error
    what = f"{options.nodes} nodes, every port {format_rate(options.rate)}, a step of {1e3 * STEP_SECONDS:.0f} ms"
    names = [
        row.get("exchange") or f"{row['codec']}, {row['fragments']} fragments every {row['every']}" for row in rows
    ]
    print_table(
        [{"": key} | {name: row.get(key) for name, row in zip(names, rows, strict=True)} for key in rows[0]], what
    )
    if options.json:
        write_json(options.json, rows)


# ---------------------------------------------------------------------- the process that measures


def _run(case: Case, star: Star) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, float]]:
    """Return what each node measured, what the broker used in the window, and how busy the machine was."""
    with contextlib.ExitStack() as stack:
        said = json.dumps(asdict(case))
        broker, *nodes = children = [
            Child(star, "hub", __file__, "broker", said),
            *(Child(star, number, __file__, "node", said, str(number)) for number in range(case.nodes)),
        ]
        for child in children:
            stack.callback(child.close)
        for child in children:
            child.answer()
        return _conduct(case, star, broker, nodes)


def _conduct(
    case: Case, star: Star, broker: Child, nodes: list[Child]
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, float]]:
    results = ask_all(nodes, "baseline", time.monotonic() + 0.2)
    ask_all(nodes, "join", f"tcp://{star.hub_address}:{PORT}")
    start = time.monotonic() + 0.5
    for node in nodes:
        node.tell("window", start, start + case.steps * STEP_SECONDS)
    time.sleep(max(0.0, start - time.monotonic()))
    before = ask_all([broker], "figures")[0]
    with BusyMeter() as window:
        time.sleep(max(0.0, start + case.steps * STEP_SECONDS - time.monotonic()))
    measured = [node.answer() for node in nodes]
    after = ask_all([broker], "figures")[0]
    used = difference(before, after) | {"rss_bytes": after["grown_bytes"]}
    with BusyMeter() as alone:
        exchanges = ask_all(nodes, "exchanges", time.monotonic() + 0.2)
    busy = {"busy": window.busy_share, "busy_exchange": alone.busy_share}
    spent = difference(after, ask_all([broker], "figures")[0])
    used["alone"] = {
        key: spent[key] / spent["version"] for key in ("cpu_seconds", "aggregate_seconds", "contributions")
    }
    ask_all(nodes, "end")
    merged = [result | inside | timed for result, inside, timed in zip(results, measured, exchanges, strict=True)]
    return merged, used, busy


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def work_alone(row: Mapping[str, Any]) -> Work:
    """Return what an exchange has cost that was measured in this row, where nothing else was done."""
    seconds = {name: row[f"alone_{name}_ms"] / 1e3 for name in Work._fields if name != "deltas"}
    return Work(**seconds, deltas=row["alone_deltas"])


def _predict(case: Case, schedule: Schedule, params: int, work: Work, step_cpu_seconds: float) -> Shared:
    """Return what is expected of a case on these cores; of one with slow nodes, as if none were."""
    wish = Wish(parameters=params, nodes=case.nodes, step_seconds=STEP_SECONDS, node_bits=case.rate, hub_bits=case.rate)
    load = load_on(wish, case.codec, case.parts, _cores(), work)
    return predict_on(load, work, schedule, _cores(), step_cpu_seconds)


def _row(
    case: Case, star: Star, nodes: list[dict[str, Any]], broker: dict[str, Any], busy: dict[str, float]
) -> dict[str, Any]:
    if not all(node["exchanges"] for node in nodes) or not broker["version"]:
        raise RuntimeError(
            f"a node applied no aggregate in the window of {case.steps} steps, {busy['busy']:.0%} of the cores busy: "
            "give more --steps, or a longer --every"
        )

    slow, nodes = nodes[case.nodes - case.slow :], nodes[: case.nodes - case.slow]

    def mean(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.fmean(value(node) for node in nodes)

    def efficiency(node: dict[str, Any], of: str = "sleep_seconds") -> float:
        return float(node["steps"] * node[of] / node["seconds"])

    carried = nodes[0]["params"] / case.parts
    bytes_per_second = payload_rate(case.rate)
    largest = max(
        mean(lambda n: n["bytes_sent"] / n["exchanges"]), mean(lambda n: n["bytes_received"] / n["exchanges"])
    )
    limit = case.nodes * case.parts * largest / bytes_per_second
    exchange = statistics.median(seconds for node in nodes for seconds in node["exchange_seconds"])
    period = mean(lambda n: n["steps"] / n["exchanges"])
    alone = {name: mean(lambda n, name=name: n["alone"].get(name, 0.0)) for name in nodes[0]["alone"]}
    work = Work(
        codec=alone["codec"],
        sockets=alone["network"] + alone["sockets"],
        rebase=alone["other"],
        hub=broker["alone"]["aggregate_seconds"],
        hub_sockets=broker["alone"]["cpu_seconds"] - broker["alone"]["aggregate_seconds"],
        deltas=broker["alone"]["contributions"],
    )
    step_cpu_seconds = mean(lambda n: n["step_cpu_seconds"])
    schedule = Schedule(nodes[0]["every"], nodes[0]["delay"])
    predicted = _predict(case, schedule, nodes[0]["params"], work, step_cpu_seconds)
    refused = sum(n["offers_refused"] for n in nodes)
    row: dict[str, Any] = {
        "nodes": case.nodes,
        "params": nodes[0]["params"],
        "codec": case.codec,
        "fragments": case.fragments,
        "parts": case.parts,
        "every": case.every,
        "delay": case.delay,
        "planned": f"k = {schedule.every}, d = {schedule.delay}" if case.every == "auto" else None,
        "release": case.release,
        "serial": case.serial,
        "steps": case.steps,
        "slow": case.slow,
        "efficiency": mean(efficiency),
        "refused": refused / (refused + sum(n["offers"] for n in nodes)),
        "efficiency_of_steps": mean(lambda n: efficiency(n, "step_seconds")),
        "predicted_efficiency": predicted.prediction.efficiency,
        "slow_efficiency": statistics.fmean(map(efficiency, slow)) if slow else None,
        "period_steps": period,
        "model_period_steps": period * case.parts,
        "p99_over_median": mean(lambda n: n["p99_over_median"]),
        "age_steps": mean(lambda n: n["age_steps"]),
        "mb_per_node_step": mean(lambda n: n["bytes_sent"] / n["steps"]) / 1e6,
        "node_cpu_ns_per_param": 1e9 * mean(_own_cpu) / carried,
        "hub_cpu_ns_per_param": 1e9 * broker["cpu_seconds"] / broker["contributions"] / carried,
        "held_ms": 1e3 * mean(lambda n: n["held_seconds"] / n["exchanges"]),
        "exchange_ms": 1e3 * exchange,
        "limit_ms": 1e3 * limit,
        "exchange_over_limit": exchange / limit,
        "contributions": broker["contributions"] / broker["version"],
        **busy,
        "predicted_busy": predicted.busy,
        "predicted_period_steps": predicted.prediction.period_steps,
        "step_cpu_ms": 1e3 * step_cpu_seconds,
        **{f"alone_{name}_ms": 1e3 * seconds for name, seconds in work._asdict().items() if name != "deltas"},
        "alone_deltas": work.deltas,
        "encode_ms": 1e3 * mean(lambda n: n["encode_seconds"] / n["exchanges"]),
        "decode_ms": 1e3 * mean(lambda n: n["decode_seconds"] / n["exchanges"]),
        "hub_ms": 1e3 * broker["aggregate_seconds"] / broker["version"],
        "node_rss_mb": mean(lambda n: n["rss_bytes"]) / 1e6,
        "node_rss_growth": mean(lambda n: n["rss_bytes"] / (n["rss_bytes"] - n["grown_bytes"])),
        "node_rss_late_growth": mean(lambda n: n["rss_bytes"] / n["rss_half_bytes"]),
        "hub_rss_mb": broker["rss_bytes"] / 1e6,
        "hub_rss_growth": broker["rss_bytes"] / (broker["rss_bytes"] - broker["grown_bytes"]),
    }
    for thread in nodes[0]["threads"]:
        row[f"node_{thread}_thread_ms"] = 1e3 * mean(
            lambda n, name=thread: n["threads"].get(name, 0.0) / n["exchanges"]
        )
    for thread, seconds in broker["threads"].items():
        row[f"hub_{thread}_thread_ms"] = 1e3 * seconds / broker["version"]
    return row


def _own_cpu(node: dict[str, Any]) -> float:
    """Return a node's CPU seconds per exchange, less what its steps alone would have cost."""
    return float((node["cpu_seconds"] - node["steps"] * node["step_cpu_seconds"]) / node["exchanges"])


# ---------------------------------------------------------------------- the processes that are measured


def _be_broker(case: Case) -> None:
    """Be the broker in its namespace; answer `figures` with its statistics and its CPU seconds, all told."""
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.core.settings import RunSettings

    told = commands()
    with BrokerThread(f"tcp://*:{PORT}", RunSettings.from_dict(case.settings)) as broker:
        say({"listens": broker.address})
        while True:
            told.get()
            figures = asdict(broker.broker.statistics())
            used = {"cpu_seconds": time.process_time(), "threads": thread_seconds(), "grown_bytes": resident_bytes()}
            say(figures | used)


if __name__ == "__main__":
    main()
