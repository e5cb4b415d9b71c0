"""Measure allreduces on the star: time over what any of them needs, latency, CPU, and the bytes that each rank sends.

    limit = 2 (N - 1) / N x bytes of the array / (rate of a port / 8): what must pass every port, at its raw rate

Rule 1: every rank is a process in a namespace of its own, and so is the broker at which they meet.
Rule 2: a repetition begins with a barrier; its time is that of the slowest rank. Small arrays are reduced many times in
a row, and the time is that of one. The first call of each case is not timed: its result is checked.
Rule 3: other libraries run the same cases on the same star, if they are installed; those that are not are named.
Rule 4: bytes are counted by the communicator itself, with all that it sends (heads, heartbeats), and stand beside the
formula's.
Rule 5: a rank counts its CPU from its return from the barrier to its return from the last call: neither barriers nor
the first call are in it.
Rule 6: `--table` prints which algorithm is the fastest for each size, as "auto" has it (`collectives/costs`).

Columns: best_ms, median_ms: of the repetitions.  limit_ms, best_over_limit, median_over_limit: as said above.
cpu_s_per_gb: CPU seconds of all ranks' processes, with all their threads, per 10^9 bytes that went from one rank to
another (each byte counted once, by the formula; for rivals a ring's), the mean of the repetitions; in the JSON also
median_cpu_s_per_gb.  busy: of all cores, in all repetitions.
main_s_per_gb, mesh_..., sockets_...: CPU seconds by thread, with those of the barriers (in the JSON).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from zmqtrain.collectives.algorithms import HUB
from zmqtrain.collectives.costs import COSTS, bytes_sent, least_bytes

from children import Child, commands, difference, say, thread_seconds
from report import BusyMeter, format_rate, parse_rate, print_table, write_json
from rivals import LAUNCHED_TOGETHER, Gloo, OpenMPI, exec_mpirun, find_rivals
from star import Star

__all__ = ["Case", "Group", "measure", "read_options", "main"]

PORT = 5555
OWN = "zmqtrain"
LATENCY_BYTES, LATENCY_CALLS = 8, 100
SMALL_BYTES = 64 << 10
"""Up to so many bytes LATENCY_CALLS are made in a row."""
SMALL = "latency of 8 bytes"
BAR_MEGABYTES = 10
"""From so much on a ring is held to its bars."""
PATTERN_VALUES = 1000
TABLE_BYTES = (8, 1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 10_000_000)
CLEARLY = 0.85
"""How much of another's time a faster algorithm takes at most, to be chosen for arrays of a size."""
MEET_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: an allreduce (sum of float32) of so many bytes, so many times. algorithm: "": what a rival chooses."""

    algorithm: str
    values_bytes: int
    repetitions: int = 5

    @property
    def calls(self) -> int:
        """How many calls a repetition makes."""
        return LATENCY_CALLS if self.values_bytes <= SMALL_BYTES else 1


@dataclass(frozen=True, kw_only=True)
class Group:
    """Who runs cases: so many ranks of one library, on a star whose ports have this rate (bits per second)."""

    library: str
    nodes: int
    rate: float = 1e9


class Library(Protocol):
    """One rank of a group."""

    rank: int

    def allreduce(self, values: np.ndarray[Any, Any], algorithm: str) -> None:
        """Add up the arrays of all ranks, in place."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def bytes_sent(self) -> int | None:
        """Return how much this rank has sent, with everything; None where that is not known."""

    def close(self) -> None:
        """Leave the group."""


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4], help="ranks, a group each (default 2 4)")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 10, 100], help="arrays (default 1 10 100)")
    parser.add_argument("--algorithms", nargs="+", choices=list(COSTS), default=list(COSTS), help="(default: all)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each case (default %(default)s)")
    parser.add_argument("--no-rivals", action="store_true", help="leave out the other libraries")
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of each port, each way (default %(default)s)")
    parser.add_argument("--table", action="store_true", help='print which is the fastest by size, for "auto"')
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    return parser.parse_args(arguments)


def measure(group: Group, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Build a star, run the cases on it and return a row for each.

    Raises RuntimeError if a process fails or hangs, or a sum is not the sum.
    """
    with Star(group.nodes, group.rate) as star, contextlib.ExitStack() as stack:
        addresses = [star.node_address(node) for node in range(group.nodes)]
        plan = json.dumps({"group": asdict(group), "hub": star.hub_address, "cases": [asdict(case) for case in cases]})

        def child(host: Any, *arguments: str) -> Child:
            one = Child(star, host, __file__, *arguments)
            stack.callback(one.close)
            return one

        if group.library in LAUNCHED_TOGETHER:
            launcher = child("hub", "launcher", star.name, json.dumps(addresses), plan)
            speakers = [launcher] * group.nodes
        else:
            if group.library == OWN:
                child("hub", "broker").answer()
            speakers = [child(node, "rank", plan, str(node)) for node in range(group.nodes)]
        answers: dict[int, list[dict[str, Any]]] = {index: [] for index in range(len(cases))}
        for speaker in speakers * len(cases):
            answer = speaker.answer()
            answers[answer["case"]].append(answer)
        return [
            _row(group, case, sorted(answers[index], key=lambda answer: int(answer["rank"])))
            for index, case in enumerate(cases)
        ]


def main() -> None:
    """Measure what the command line asks for and print it; or be one of the processes."""
    match sys.argv[1:]:
        case ["broker"]:
            _be_broker()
        case ["rank", plan, *rank]:
            _be_rank(json.loads(plan), int(rank[0]) if rank else None)
        case ["launcher", star_name, addresses, plan]:
            library = json.loads(plan)["group"]["library"]
            exec_mpirun(library, star_name, json.loads(addresses), __file__, "rank", plan)
        case arguments:
            _measure_all(read_options(arguments))


def _measure_all(options: argparse.Namespace) -> None:
    sizes = TABLE_BYTES if options.table else (LATENCY_BYTES, *(int(1e6 * size) for size in options.megabytes))
    rivals = {} if options.no_rivals or options.table else find_rivals()
    rows: list[dict[str, Any]] = []
    try:
        for nodes, library in itertools.product(options.nodes, (OWN, *(name for name, here in rivals.items() if here))):
            algorithms = options.algorithms if library == OWN else [""]
            cases = [
                Case(algorithm=algorithm, values_bytes=size, repetitions=options.repetitions)
                for size, algorithm in itertools.product(sizes, algorithms)
            ]
            print(f"measuring {library}, {nodes} ranks ...", file=sys.stderr, flush=True)
            rows += measure(Group(library=library, nodes=nodes, rate=options.rate), cases)
    except RuntimeError as error:
        raise SystemExit(f"collectives: {error}") from error
    for nodes in options.nodes:
        here = [row for row in rows if row["nodes"] == nodes]
        what = f"{nodes} ranks, every port {format_rate(options.rate)}"
        if options.table:
            print_table(fastest := _fastest(here), f"best ms, {what}")
            print(_as_choice(nodes, fastest))
            continue
        small, large = [[row for row in here if _is_small(row) == wanted] for wanted in (True, False)]
        print_table(
            [_only(row, "library", "algorithm", "best_ms", "median_ms", "busy") for row in small], f"{SMALL}, {what}"
        )
        print_table([_only(row, *_TIMED) for row in large], f"allreduce, {what}")
        counted = [_only(row, "algorithm", "megabytes", *_COUNTED) for row in large if row["sent_mb"]]
        print_table(counted, f"10^6 bytes that each of {nodes} ranks has sent, and all together")
    if not options.table:
        print_table(_judge(rows), "the bars")
    for name, present in rivals.items():
        if not present:
            print(f"{name}: not installed")
    if options.json:
        write_json(options.json, rows)


# ---------------------------------------------------------------------- the process that measures

_TIMED = ("library", "algorithm", "megabytes", "best_ms", "median_ms", "limit_ms", "best_over_limit")
_TIMED += ("median_over_limit", "cpu_s_per_gb", "busy")
_COUNTED = ("sent_mb", "formula_mb", "all_sent_mb", "all_formula_mb", "overhead")


def _row(group: Group, case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [max(times) / case.calls for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    best, median, calls = min(seconds), statistics.median(seconds), case.calls * case.repetitions
    limit = least_bytes(group.nodes, case.values_bytes) / (group.rate / 8)
    algorithm = case.algorithm or "ring"
    said = [bytes_sent(algorithm, group.nodes, case.values_bytes, rank, itemsize=4) for rank in range(group.nodes)]
    by_the_hub = bytes_sent("hub", group.nodes, case.values_bytes, HUB, itemsize=4) if algorithm == "hub" else 0
    gigabytes = calls * (sum(said) + by_the_hub) / 1e9
    used = [
        sum(each) * case.repetitions / gigabytes for each in zip(*(rank["cpu_seconds"] for rank in ranks), strict=True)
    ]
    threads = sorted({name for rank in ranks for name in rank["threads"]})
    counted: dict[str, Any] = dict.fromkeys(_COUNTED)
    if None not in (sent := [rank["bytes_sent"] for rank in ranks]):
        each = [count / calls / 1e6 for count in sent]
        counted = {
            "sent_mb": " ".join(f"{count:.3f}" for count in each),
            "formula_mb": " ".join(f"{count / 1e6:.3f}" for count in said),
            "all_sent_mb": sum(each),
            "all_formula_mb": sum(said) / 1e6,
            "overhead": sum(each) * 1e6 / sum(said) - 1,
        }
    return {
        "nodes": group.nodes,
        "library": group.library,
        "algorithm": case.algorithm,
        "megabytes": case.values_bytes / 1e6,
        "best_ms": 1e3 * best,
        "median_ms": 1e3 * median,
        "limit_ms": 1e3 * limit,
        "best_over_limit": best / limit,
        "median_over_limit": median / limit,
        "cpu_s_per_gb": statistics.fmean(used),
        "median_cpu_s_per_gb": statistics.median(used),
        "busy": ranks[0]["busy"],
        **{f"{name}_s_per_gb": sum(rank["threads"].get(name, 0.0) for rank in ranks) / gigabytes for name in threads},
        **counted,
    }


def _judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars, with what this package's rows of 8 bytes and of 10 MB and more have reached."""
    lines = []
    for nodes in dict.fromkeys(row["nodes"] for row in rows):
        own = [row for row in rows if (row["nodes"], row["library"]) == (nodes, OWN)]
        small = min((row for row in own if _is_small(row)), key=lambda row: float(row["best_ms"]))
        figures = [(f"{SMALL}, ms ({small['algorithm']})", 2.0, small["best_ms"], small["median_ms"])]
        for row in own:
            if row["algorithm"] == "ring" and row["megabytes"] >= BAR_MEGABYTES:
                size = f"ring, {row['megabytes']:g} MB"
                figures.append((f"{size}: time / limit", 1.06, row["best_over_limit"], row["median_over_limit"]))
                figures.append((f"{size}: CPU s per GB", 1.0, row["cpu_s_per_gb"], None))
        lines += [
            {"ranks": nodes, "figure": what, "bar": bar, "best": best, "median": median, "": _met(best <= bar)}
            for what, bar, best, median in figures
        ]
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _is_small(row: dict[str, Any]) -> bool:
    return bool(row["megabytes"] * 1e6 <= SMALL_BYTES)


def _fastest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per size which algorithm was the fastest, and the milliseconds of all, at their best."""
    table = []
    for megabytes in dict.fromkeys(row["megabytes"] for row in rows):
        times = {row["algorithm"]: row["best_ms"] for row in rows if row["megabytes"] == megabytes}
        table.append({"bytes": round(1e6 * megabytes), "fastest": min(times, key=times.__getitem__), **times})
    return table


def _as_choice(nodes: int, table: list[dict[str, Any]]) -> str:
    """Return the fastest ones as a line of `choice.TABLE`: between two sizes it changes at their geometric mean.

    From the largest array down, where it begins with the ring, an algorithm stays until another one is clearly faster.
    """
    chosen, best = [], "ring" if "ring" in table[-1] else table[-1]["fastest"]
    for row in reversed(table):
        best = row["fastest"] if row[row["fastest"]] < CLEARLY * row[best] else best
        chosen.insert(0, best)
    parts = [
        f'({round((row["bytes"] * larger["bytes"]) ** 0.5):_}, "{algorithm}")'
        for (row, algorithm), (larger, other) in itertools.pairwise(zip(table, chosen, strict=True))
        if algorithm != other
    ]
    return f"    ({nodes}, ({', '.join([*parts, f'(inf, {chosen[-1]!r})'])},)),".replace("'", '"')


def _only(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: row[key] for key in keys}


# ---------------------------------------------------------------------- the processes that are measured


def _be_broker() -> None:
    """Be the broker at which the ranks meet."""
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.core.settings import RunSettings

    told = commands()
    with BrokerThread(f"tcp://*:{PORT}", RunSettings()) as broker:
        say({"listens": broker.address})
        told.get()


class _Own:
    """One rank of a communicator of this package."""

    def __init__(self, hub: str, size: int, rank: int) -> None:
        import zmqtrain as zt

        self.rank = rank
        self._communicator = zt.Communicator.create(f"tcp://{hub}:{PORT}", size, rank, timeout_seconds=MEET_SECONDS)

    def allreduce(self, values: np.ndarray[Any, Any], algorithm: str) -> None:
        self._communicator.allreduce(values, algorithm=algorithm, into=values)

    def barrier(self) -> None:
        self._communicator.barrier()

    def bytes_sent(self) -> int | None:
        return int(self._communicator.statistics().bytes_sent)

    def close(self) -> None:
        self._communicator.close()


def _be_rank(plan: dict[str, Any], number: int | None) -> None:
    """Run all cases of the plan as one rank, and say what each has taken. number: None where the library knows it."""
    group = Group(**plan["group"])
    library: Library
    if number is None:
        library = OpenMPI()
    elif group.library == OWN:
        library = _Own(plan["hub"], group.nodes, number)
    else:
        library = Gloo("10.99.1.1", group.nodes, number)
    for index, facts in enumerate(plan["cases"]):
        say({"case": index, "rank": library.rank, **_run(library, group, Case(**facts))})
    library.barrier()
    library.close()


def _run(library: Library, group: Group, case: Case) -> dict[str, Any]:
    values = np.empty(case.values_bytes // 4, np.float32)
    pattern = np.arange(PATTERN_VALUES, dtype=np.float32)
    parts = [values[start : start + pattern.size] for start in range(0, values.size, pattern.size)]
    for part in parts:
        np.add(pattern[: part.size], library.rank, out=part)
    library.allreduce(values, case.algorithm)
    wanted = group.nodes * pattern + group.nodes * (group.nodes - 1) / 2
    if not all(np.array_equal(part, wanted[: part.size]) for part in parts):
        raise SystemExit(f"rank {library.rank}: {group.library} {case.algorithm} of {case.values_bytes} bytes is wrong")
    seconds, used = list[float](), list[float]()
    library.barrier()
    sent, threads = library.bytes_sent(), thread_seconds()
    with BusyMeter() as meter:
        for _ in range(case.repetitions):
            library.barrier()
            begun, before = time.perf_counter(), time.process_time()
            for _ in range(case.calls):
                library.allreduce(values, case.algorithm)
            seconds.append(time.perf_counter() - begun)
            used.append(time.process_time() - before)
    now = library.bytes_sent()
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "threads": difference(threads, thread_seconds()),
        "bytes_sent": None if now is None or sent is None else now - sent,
        "busy": meter.busy_share,
    }


if __name__ == "__main__":
    main()
