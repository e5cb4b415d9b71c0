"""Measure what honest nodes lose while others attack their broker: greetings, floods, giants, drips, replays and lies.

    python bench/hostile.py --minutes 60              python bench/hostile.py --minutes 5 (the nightly form)
    python bench/hostile.py --rows --block-seconds 10 (one attack after the other: before it, during it, 5 s after it)

Rule 1: nodes, broker and attackers are processes in namespaces of their own; the attackers' port has a rate of its own
(--attack-rate), and their process yields to all others: what is measured is the broker, not a share of these cores.
Rule 2: blocks with and without attackers alternate, so that what changes on this machine changes for both.
Rule 3: a node's step is `time.sleep`, as its accelerator would take, as in bench/efficiency.py.
Rule 4: the broker must not end, no honest node be sent away, nor lose its broker, and what the broker holds stays
within HELD_BYTES of what it held before; throughput with attackers is at least BAR of that without.

Columns, quiet and hostile: steps_s, aggregates_s: of all honest nodes, a second.  broker_cpu: cores.
ratio_...: of hostile to quiet.  rss_mb: of the broker before the first attack; rss_most_mb: the most since.
descriptors, descriptors_most: likewise.  strangers: messages that were ignored.
troubles: what honest nodes complained of, or the broker of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from attacks import ATTACKS, Place, attack
from children import Child, ask_all, commands, difference, say
from report import format_rate, parse_rate, print_table, write_json
from star import Star
from vitals import vitals_of

__all__ = ["BAR", "HELD_BYTES", "Case", "measure", "judge", "measure_rows", "judge_rows", "main"]

BAR = 0.95
HELD_BYTES = 256 << 20
"""What strangers may make a broker hold: one frame of each half-open connection of one address."""
AFTER_SECONDS = 5.0
"""Each block of a row of one attack begins so long after what it follows: by then honest nodes are back."""
PACES = ("steps", "aggregates")
PORT = 5555
OPEN_TO_ALL = tuple(name for name in ATTACKS if name != "steal")
"""Without keys anybody may come in, also under another's name: see docs/operations.md."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one run is made of. rate: of a port, attack_rate: of the attackers', bits per second.

    keys: the broker lets in whom it knows by a CURVE key; attackers know its public one, and have keys of their own.
    lost_seconds: as in the settings of a run.
    """

    minutes: float = 60.0
    nodes: int = 3
    params: int = 200_000
    step_seconds: float = 0.05
    every: int = 4
    rate: float = 1e9
    attack_rate: float = 2e7
    block_seconds: float = 30.0
    attacks: tuple[str, ...] = OPEN_TO_ALL
    keys: bool = False
    seed: int = 0
    lost_seconds: float = 2.5

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as `RunSettings.from_dict` reads them."""
        facts: dict[str, Any] = {"every": self.every, "delay": self.every, "codec": "int8", "broadcast_codec": "int8"}
        facts |= {"evaluate_seconds": 0.0, "lost_seconds": self.lost_seconds}
        return facts | {"start_nodes": self.nodes, "initial": "founder"}


def measure(case: Case) -> dict[str, Any]:
    """Build a star, run the case on it and return its row. Raises RuntimeError if a process fails or hangs."""
    with _alive(case) as (broker, nodes, attackers):
        return _conduct(case, broker, nodes, attackers)


def measure_rows(case: Case) -> list[dict[str, Any]]:
    """Do one attack after the other at one broker; return a row for each: before it, during it, and 5 s after it.

    Raises RuntimeError if a process fails or hangs.
    """
    with _alive(case) as (broker, nodes, attackers):
        rows = []
        for name in case.attacks:
            blocks = {}
            for when in ("before", "during", "after"):
                ask_all([attackers], "attack" if when == "during" else "rest", *([name] if when == "during" else []))
                time.sleep(min(AFTER_SECONDS, case.block_seconds))
                started = _figures(broker, nodes)
                time.sleep(case.block_seconds)
                blocks[when] = difference(started, _figures(broker, nodes))
            row: dict[str, Any] = {"attack": name, "keys": case.keys}
            for figure in ("steps", "aggregates", "cpu_seconds"):
                row |= {f"{figure}_s_{when}": block[figure] / block["seconds"] for when, block in blocks.items()}
            for when in ("during", "after"):
                row[f"ratio_{when}"] = min(row[f"{one}_s_{when}"] / row[f"{one}_s_before"] for one in PACES)
            rows.append(row)
        return rows


def judge_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say what is wrong in the rows of single attacks: honest nodes keep BAR of their pace during each and after it."""
    return [
        f"{row['attack']}: {row[f'ratio_{when}']:.3f} of the pace of before {when} it"
        for row in rows
        for when in ("during", "after")
        if not row[f"ratio_{when}"] >= BAR
    ]


@contextlib.contextmanager
def _alive(case: Case) -> Iterator[tuple[Child, list[Child], Child]]:
    """Give a star of a broker, its nodes, which train, and attackers."""
    with Star(case.nodes + 1, case.rate) as star, contextlib.ExitStack() as stack:
        star.set_rate(case.nodes, case.attack_rate)
        said = json.dumps(asdict(case))

        def start(host: Any, *arguments: str) -> Child:
            child = Child(star, host, __file__, arguments[0], said, *arguments[1:])
            stack.callback(child.close)
            return child

        folder = [stack.enter_context(tempfile.TemporaryDirectory())] if case.keys else []
        broker = start("hub", "broker", *folder)
        key = broker.answer()["key"]
        nodes = [start(number, "node", str(number), star.hub_address, *folder) for number in range(case.nodes)]
        for node in nodes:
            node.answer()
        attackers = start(case.nodes, "attackers", star.hub_address, key)
        attackers.answer()
        yield broker, nodes, attackers


def judge(row: dict[str, Any]) -> list[str]:
    """Say what is wrong in a row; nothing: all is as Rule 4 says."""
    wrong = [f"{name} is {row[name]:.3f}" for name in ("ratio_steps", "ratio_aggregates") if row[name] < BAR]
    if (row["rss_most_mb"] - row["rss_mb"]) * 1e6 > HELD_BYTES:
        wrong.append(f"the broker held {row['rss_most_mb']:.0f} MB, and {row['rss_mb']:.0f} before the first attack")
    return wrong + list(row["troubles"])


def main() -> None:
    """Measure what the command line asks for and print it; or be one of the processes."""
    if sys.argv[1:2] and sys.argv[1] in _ROLES:
        facts = json.loads(sys.argv[2])
        _ROLES[sys.argv[1]](Case(**facts | {"attacks": tuple(facts["attacks"])}), *sys.argv[3:])
        return
    default = Case()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=default.minutes, help="how long (default %(default)g)")
    parser.add_argument("--nodes", type=int, default=default.nodes, help="honest ones (default %(default)s)")
    parser.add_argument("--params", type=float, default=default.params, help="of the model (default %(default)g)")
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of a port (default %(default)s)")
    parser.add_argument("--attack-rate", type=parse_rate, default="20mbit", help="of attackers (default %(default)s)")
    parser.add_argument("--block-seconds", type=float, default=default.block_seconds, help="(default %(default)g)")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=[], help="which (default: see below)")
    parser.add_argument("--rows", action="store_true", help="one attack after the other, a row for each")
    parser.add_argument("--keys", action="store_true", help="nodes are known by their CURVE keys, attackers are not")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default %(default)s)")
    parser.add_argument("--learning", action="store_true", help="bench/hostile_learning.py instead: nodes that diverge")
    parser.add_argument("--json", metavar="FILE", help="write the row and the machine's description here")
    options = parser.parse_args()
    if options.learning:
        import hostile_learning

        return hostile_learning.main(["--json", options.json] if options.json else [])
    case = Case(
        minutes=options.minutes,
        nodes=options.nodes,
        params=int(options.params),
        rate=options.rate,
        attack_rate=options.attack_rate,
        block_seconds=min(options.block_seconds, 30 * options.minutes),
        attacks=tuple(options.attacks) or (tuple(ATTACKS) if options.keys else OPEN_TO_ALL),
        keys=options.keys,
        seed=options.seed,
    )
    if options.rows:
        return _print_rows(case, options.json)
    try:
        row = measure(case)
    except RuntimeError as error:
        raise SystemExit(f"hostile: {error}") from error
    attacks = f"{len(case.attacks)} attacks at {format_rate(case.attack_rate)}"
    title = f"{case.nodes} nodes, {attacks}, {case.minutes:g} minutes"
    shown = row | {"troubles": len(row["troubles"])}
    print_table([{"": key, "value": value} for key, value in shown.items()], title)
    if options.json:
        write_json(options.json, [row])
    if wrong := judge(row):
        raise SystemExit("hostile: " + "\n         ".join(wrong))


def _print_rows(case: Case, file: str | None) -> None:
    try:
        rows = measure_rows(case)
    except RuntimeError as error:
        raise SystemExit(f"hostile: {error}") from error
    title = (
        f"{case.nodes} nodes, one attack at a time at {format_rate(case.attack_rate)}, {case.block_seconds:g} s blocks"
    )
    print_table(rows, title)
    if file:
        write_json(file, rows)
    if wrong := judge_rows(rows):
        raise SystemExit("hostile: " + "\n         ".join(wrong))


# ---------------------------------------------------------------------- the process that measures


def _conduct(case: Case, broker: Child, nodes: Sequence[Child], attackers: Child) -> dict[str, Any]:
    pairs = max(1, round(60 * case.minutes / (2 * case.block_seconds)))
    totals: dict[str, dict[str, float]] = {}
    first: dict[str, Any] = {}
    most = {"rss_bytes": 0, "descriptors": 0}
    for number in range(2 * pairs):
        hostile = number % 2 == 1
        ask_all([attackers], "attack" if hostile else "rest")
        time.sleep(min(2.0, case.block_seconds / 4))  # until it is as it will be
        before = _figures(broker, nodes)
        first = first or before
        end = time.monotonic() + case.block_seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            held = ask_all([broker], "figures")[0]
            most = {name: max(value, held[name]) for name, value in most.items()}
        block = difference(before, _figures(broker, nodes))
        total = totals.setdefault("hostile" if hostile else "quiet", dict.fromkeys(block, 0.0))
        for name, value in block.items():
            total[name] += value
    ask_all([attackers], "rest")
    troubles = [f"{name}: {text}" for name, text in _troubles(broker, nodes)]
    row: dict[str, Any] = {"nodes": case.nodes, "params": case.params, "attacks": len(case.attacks), "keys": case.keys}
    for kind, total in totals.items():
        row[f"{kind}_steps_s"] = total["steps"] / total["seconds"]
        row[f"{kind}_aggregates_s"] = total["aggregates"] / total["seconds"]
        row[f"{kind}_broker_cpu"] = total["cpu_seconds"] / total["seconds"]
    for name in ("steps", "aggregates"):
        row[f"ratio_{name}"] = row[f"hostile_{name}_s"] / row[f"quiet_{name}_s"]
    row |= {"rss_mb": first["rss_bytes"] / 1e6, "rss_most_mb": most["rss_bytes"] / 1e6}
    row |= {"descriptors": first["descriptors"], "descriptors_most": most["descriptors"]}
    row["strangers"] = sum(total["strangers"] for total in totals.values())
    return row | {"troubles": troubles}


def _figures(broker: Child, nodes: Sequence[Child]) -> dict[str, Any]:
    of_broker, *of_nodes = ask_all([broker, *nodes], "figures")
    summed = {name: sum(one[name] for one in of_nodes) for name in ("steps", "aggregates")}
    return {**{key: value for key, value in of_broker.items() if key != "troubles"}, **summed}


def _troubles(broker: Child, nodes: Sequence[Child]) -> list[tuple[str, str]]:
    answers = ask_all([broker, *nodes], "figures")
    names = ("broker", *(f"node {number}" for number in range(len(nodes))))
    return [(name, text) for name, answer in zip(names, answers, strict=True) for text in answer["troubles"]]


# ---------------------------------------------------------------------- the processes that are measured


class _Complaints(logging.Handler):
    """Keeps what is logged as a warning or worse about honest nodes; of a node's own, all."""

    def __init__(self, about: str = "") -> None:
        super().__init__(logging.WARNING)
        self.about, self.texts = about, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line with its time of day, the first hundred of them."""
        text = record.getMessage()
        grave = record.levelno >= logging.ERROR
        if (self.about in text or grave) and len(self.texts) < 100:
            self.texts.append(f"{time.strftime('%X', time.localtime(record.created))} {text[:300]}")


def _complaints(about: str = "") -> _Complaints:
    complaints = _Complaints(about)
    logging.getLogger("zmqtrain").addHandler(complaints)
    logging.getLogger("zmqtrain").propagate = False
    return complaints


def _be_broker(case: Case, folder: str = "") -> None:
    from zmqtrain.runtime.broker.serve import BrokerThread
    from zmqtrain.settings import RunSettings
    from zmqtrain.transport.key_folder import KeyFolder

    told, complaints = commands(), _complaints("pc-")
    keys, key = None, ""
    if folder:
        keys = KeyFolder(Path(folder))
        key = keys.hub().public.decode()
        keys.new([f"pc-{number}" for number in range(case.nodes)])
    with BrokerThread(f"tcp://*:{PORT}", RunSettings.from_dict(case.settings), keys=keys) as thread:
        say({"key": key})
        while True:
            told.get()
            held = vitals_of()
            figures = {"seconds": time.monotonic(), "cpu_seconds": time.process_time(), "rss_bytes": held.rss_bytes}
            strangers = getattr(thread.broker.channel, "strangers", 0)
            say(figures | {"descriptors": held.descriptors, "strangers": strangers, "troubles": complaints.texts})


def _be_node(case: Case, number: str, host: str, folder: str = "") -> None:
    import jax
    import numpy as np

    from zmqtrain.runtime.node.connect import connect
    from zmqtrain.train.sync import DelayedSync
    from zmqtrain.transport.key_folder import KeyFolder

    told, complaints = commands(), _complaints()
    random = np.random.default_rng(int(number))
    params: Any = {"w": jax.numpy.zeros(case.params)}
    pattern = jax.numpy.asarray(random.standard_normal(case.params, dtype="float32"))
    move = jax.jit(lambda tree, size: {"w": tree["w"] + size * pattern})
    keys = KeyFolder(Path(folder)).secret_of(f"pc-{number}") if folder else None
    with connect(f"tcp://{host}:{PORT}", f"pc-{number}", keys=keys, timeout_seconds=60.0) as node:
        sync = DelayedSync(node, params)
        params, steps = sync.params, 0
        while sync.statistics().aggregates_applied < 4:
            params = sync.step(move(params, 1e-3), samples=1)
            time.sleep(case.step_seconds)
        say({"joined": True})
        while True:
            time.sleep(case.step_seconds)
            params = sync.step(move(params, 1e-3 * random.standard_normal()), samples=1)
            steps += 1
            if not told.empty():
                told.get()
                applied = sync.statistics().aggregates_applied
                say({"steps": steps, "aggregates": applied, "troubles": complaints.texts})


def _be_attackers(case: Case, host: str, key: str) -> None:
    told = commands()
    os.nice(19)
    place = Place(host, PORT, key.encode() or None)
    say({"ready": True})
    stop, threads, turn = threading.Event(), list[threading.Thread](), 0
    while True:
        what, *names = told.get()
        stop.set()
        for thread in threads:
            thread.join()
        stop, threads, turn = threading.Event(), [], turn + 1
        if what == "attack":
            threads = [
                threading.Thread(target=attack, args=(name, place, stop, Random(f"{case.seed} {name} {turn}")))
                for name in names or case.attacks
            ]
            for thread in threads:
                thread.daemon = True
                thread.start()
        say({"attacks": len(threads)})


_ROLES = {"broker": _be_broker, "node": _be_node, "attackers": _be_attackers}

if __name__ == "__main__":
    main()
