"""Measure what honest nodes lose while others attack their broker: greetings, floods, giants, drips, replays and lies.

    python bench/hostile.py --minutes 60              python bench/hostile.py --minutes 5 (the nightly form)
    python bench/hostile.py --rows --minutes 20       all rows, one after the other, in so many minutes
    python bench/hostile.py --rows --attacks join_and_be_silent fetch_again_and_again --authorised

Rule 1: nodes, broker and attackers are processes in namespaces of their own; the attackers' port has a rate of its own
(--attack-rate), and their process yields to all others: what is measured is the broker, not a share of these cores.
Rule 2: blocks with and without attackers alternate, so that what changes on this machine changes for both. Of a row
the attack begins with its block, and is compared with the mean of the block before it and the one that begins 5 s after
it; that is the block before the next attack, too. A row that misses a bar is measured once more: that counts.
Rule 3: a node's step is `time.sleep`, as its accelerator would take, as in bench/efficiency.py.
Rule 4: the broker must not end, no honest node be sent away, nor lose its broker, and what the broker holds stays
within HELD_BYTES of what it held before; throughput with attackers is at least BAR of that without.
Rule 5: the rows are those of each attack by strangers, where there are no keys; those of ATTACKS_OF_MEMBERS with the
key of a node; and, of nodes whose training diverges, those of bench/hostile_learning.py.

Columns of rows, each before, during and after an attack: steps_s, aggregates_s: as below; landed_s: deltas; cpu: cores
of the broker.  during: its pace, of the mean of before and after; after: its pace, of that before; both of steps or of
aggregates, whichever is less. More aggregates than deltas landed are no gain: a round was cut in two; they count once.
bar: whether both are at least BAR.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from attacks import ATTACKS, ATTACKS_OF_MEMBERS, Place, attack
from children import Child, ask_all, commands, difference, say
from report import format_rate, parse_rate, print_table, write_json
from star import Star
from vitals import vitals_of

__all__ = ["BAR", "HELD_BYTES", "Case", "measure", "judge", "measure_rows", "row_of", "block_seconds_for", "main"]

BAR = 0.95
HELD_BYTES = 256 << 20
"""What strangers may make a broker hold: one frame of each half-open connection of one address."""
LEAST_BLOCK_SECONDS = 4.0
MET, MISSED = "met", "MISSED"
_Figures = dict[str, Any]
AFTER_SECONDS = 5.0
"""The block after an attack begins so long after it: by then honest nodes are back."""
PORT = 5555
HONEST = "honest"
"""How the names of honest nodes begin: attackers take names such as pc-1."""
OPEN_TO_ALL = tuple(name for name in ATTACKS if name != "steal")
"""Without keys anybody may come in, also under another's name: see docs/operations.md."""
RATES = {"fetch_again_and_again": 1e9}
"""Of the attackers' port in a row of its own, where --attack-rate would hide what the broker sends."""
SECONDS = {"confirm_late": 60.0}
"""Length of the blocks of these attacks. The hub bounds what a late standby costs in each minute
(protocol.standby.Patience), so a shorter block would measure more than that."""
LOWEST_PRIORITY = 19
"""As `nice` counts: attackers shall not take the cores of those who are measured."""
STAR_SECONDS, LEARNING_SECONDS = 20.0, 90.0
"""What it takes to build a star and have its nodes train, and all rows of bench/hostile_learning.py."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one run is made of. rate: of a port, attack_rate: of the attackers', bits per second.

    keys: the broker lets in whom it knows by a CURVE key; attackers know its public one, and have keys of their own.
    authorised: those are the key of one node, which the broker lets in.
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
    authorised: bool = False
    seed: int = 0
    lost_seconds: float = 2.5

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as `RunSettings.from_dict` reads them."""
        facts: dict[str, Any] = {"every": self.every, "delay": self.every, "codec": "int8", "broadcast_codec": "int8"}
        facts |= {"evaluate_seconds": 0.0, "lost_seconds": self.lost_seconds}
        return facts | {"start_nodes": self.nodes, "initial": "founder", "shards": 1}


def measure(case: Case) -> dict[str, Any]:
    """Build a star, run the case on it and return its row. Raises RuntimeError if a process fails or hangs."""
    with _alive(case) as (broker, nodes, attackers, _):
        return _conduct(case, broker, nodes, attackers)


def measure_rows(case: Case) -> Iterator[dict[str, Any]]:
    """Do one attack after the other at one broker; give a row for each, and a second one if that misses a bar.

    Raises RuntimeError if a process fails or hangs.
    """
    with _alive(case) as (broker, nodes, attackers, star):
        time.sleep(AFTER_SECONDS)
        before = _block(case.block_seconds, broker, nodes)
        for name in case.attacks:
            for _ in range(2):
                star.set_rate(case.nodes, RATES.get(name, case.attack_rate))
                ask_all([attackers], "attack", name)
                during = _block(SECONDS.get(name, case.block_seconds), broker, nodes)
                ask_all([attackers], "rest")
                time.sleep(AFTER_SECONDS)
                after = _block(case.block_seconds, broker, nodes)
                row = row_of(before, during, after)
                yield {"attack": name, "key": _key_words(case)} | row
                before = after
                if row["bar"] == MET:
                    break


def row_of(before: _Figures, during: _Figures, after: _Figures) -> dict[str, Any]:
    """Return what a row says of these blocks: figures a second, their ratios, and whether honest nodes keep BAR."""
    blocks = [before, during, after]
    row: dict[str, Any] = {}
    for figure, shown in (("steps", "steps_s"), ("aggregates", "aggregates_s"), ("landed", "landed_s")):
        row[shown] = " ".join(f"{block[figure] / block['seconds']:.1f}" for block in blocks)
    row["cpu"] = " ".join(f"{block['cpu_seconds'] / block['seconds']:.3f}" for block in blocks)
    paces = [
        [pace(block) / block["seconds"] for block in blocks]
        for pace in (lambda block: block["steps"], lambda block: min(block["aggregates"], block["landed"]))
    ]
    row["during"] = min(2 * at / (first + last) if first + last else 0.0 for first, at, last in paces)
    row["after"] = min(last / first if first else 0.0 for first, _, last in paces)
    return row | {"bar": MET if row["during"] >= BAR and row["after"] >= BAR else MISSED}


def block_seconds_for(minutes: float, attacks: Sequence[Sequence[str]], learning: bool) -> float:
    """Return how long a block may be so that the rows of these stars take so many minutes.

    Raises ValueError if that is less than LEAST_BLOCK_SECONDS.
    """
    rows = [name for names in attacks for name in names]
    left = 60 * minutes - LEARNING_SECONDS * learning - AFTER_SECONDS * len(rows)
    left -= (STAR_SECONDS + AFTER_SECONDS) * len(attacks) + sum(SECONDS.get(name, 0.0) for name in rows)
    blocks = len(attacks) + sum(1 if name in SECONDS else 2 for name in rows)
    if left < LEAST_BLOCK_SECONDS * blocks:
        least = minutes + (LEAST_BLOCK_SECONDS * blocks - left) / 60
        raise ValueError(f"these {len(rows)} rows take {least:.0f} minutes at least: --minutes {least:.0f}")
    return left / blocks


def _key_words(case: Case) -> str:
    return "a node's" if case.authorised else "an unknown one" if case.keys else "none"


@contextlib.contextmanager
def _alive(case: Case) -> Iterator[tuple[Child, list[Child], Child, Star]]:
    """Give a broker, its nodes, which train, attackers, and the star on which they are."""
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
        attackers = start(case.nodes, "attackers", star.hub_address, key, *folder)
        attackers.answer()
        yield broker, nodes, attackers, star


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
    parser.add_argument("--minutes", type=float, help=f"how long (default {default.minutes:g}; of rows: as they take)")
    parser.add_argument("--nodes", type=int, default=default.nodes, help="honest ones (default %(default)s)")
    parser.add_argument("--params", type=float, default=default.params, help="of the model (default %(default)g)")
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of a port (default %(default)s)")
    parser.add_argument("--attack-rate", type=parse_rate, default="20mbit", help="of attackers (default %(default)s)")
    parser.add_argument("--block-seconds", type=float, help=f"(default {default.block_seconds:g}, of rows 10)")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=[], help="which (default: see Rule 5)")
    parser.add_argument("--rows", action="store_true", help="one attack after the other, a row for each")
    parser.add_argument("--keys", action="store_true", help="nodes are known by their CURVE keys, attackers are not")
    parser.add_argument("--authorised", action="store_true", help="nodes have keys, and attackers that of one of them")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default %(default)s)")
    parser.add_argument("--learning", action="store_true", help="the rows of bench/hostile_learning.py alone")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args()
    if options.learning:
        import hostile_learning

        return hostile_learning.main(["--json", options.json] if options.json else [])
    minutes = options.minutes or default.minutes
    keys = options.keys or options.authorised
    case = Case(
        minutes=minutes,
        nodes=options.nodes,
        params=int(options.params),
        rate=options.rate,
        attack_rate=options.attack_rate,
        block_seconds=min(options.block_seconds or default.block_seconds, 30 * minutes),
        attacks=tuple(options.attacks) or (tuple(ATTACKS) if keys else OPEN_TO_ALL),
        keys=keys,
        authorised=options.authorised,
        seed=options.seed,
    )
    if options.rows:
        everything = not (options.attacks or keys)
        cases = [case]
        if everything:
            cases.append(replace(case, keys=True, authorised=True, attacks=ATTACKS_OF_MEMBERS))
        seconds = options.block_seconds or 10.0
        if options.minutes:
            try:
                seconds = block_seconds_for(options.minutes, [one.attacks for one in cases], everything)
            except ValueError as error:
                parser.error(str(error))
        return _do_rows([replace(one, block_seconds=seconds) for one in cases], everything, options.json)
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


def _do_rows(cases: Sequence[Case], learning: bool, file: str | None) -> None:
    """Measure and print the rows of these cases, and what nodes learn; end with the number of bars that are missed."""
    began, rows = time.monotonic(), list[dict[str, Any]]()
    for case in cases:
        try:
            for row in measure_rows(case):
                print(
                    " ".join(str(one if not isinstance(one, float) else f"{one:.3f}") for one in row.values()),
                    flush=True,
                )
                rows.append(row)
        except RuntimeError as error:
            raise SystemExit(f"hostile: {error}") from error
    seconds = f"{cases[0].block_seconds:.3g} s blocks; {(time.monotonic() - began) / 60:.1f} minutes"
    title = f"{cases[0].nodes} nodes, one attack at a time; before, during and after it, {seconds}"
    print_table(rows, title)
    learned: list[dict[str, Any]] = []
    if learning:
        import hostile_learning

        logging.getLogger("zmqtrain").setLevel(logging.CRITICAL)  # of what it refuses
        learned = hostile_learning.measure(hostile_learning.CASES)
        print_table(learned, hostile_learning.TITLE)
    if file:
        write_json(file, [*rows, *learned])
    last = {(row["attack"], row["key"]): row for row in rows}
    missed = [f"{attack} ({key} key)" for (attack, key), row in last.items() if row["bar"] != MET]
    missed += [f"{row['case']}, {row['bad']}" for row in learned if row["bar"] != MET]
    print(f"{len(last) + len(learned) - len(missed)} of {len(last) + len(learned)} bars met")
    if missed:
        raise SystemExit("hostile: missed: " + "\n                 ".join(missed))


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


def _block(seconds: float, broker: Child, nodes: Sequence[Child]) -> _Figures:
    """Return what is done within so many seconds."""
    started = _figures(broker, nodes)
    time.sleep(seconds)
    return difference(started, _figures(broker, nodes))


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
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.core.settings import RunSettings
    from zmqtrain.transport.key_folder import KeyFolder

    told, complaints = commands(), _complaints(f"{HONEST}-")
    keys, key = None, ""
    if folder:
        keys = KeyFolder(Path(folder))
        key = keys.hub().public.decode()
        keys.new([f"{HONEST}-{number}" for number in range(case.nodes + case.authorised)])
    with BrokerThread(f"tcp://*:{PORT}", RunSettings.from_dict(case.settings), keys=keys) as thread:
        say({"key": key})
        while True:
            told.get()
            held = vitals_of()
            figures = {"seconds": time.monotonic(), "cpu_seconds": time.process_time(), "rss_bytes": held.rss_bytes}
            figures["landed"] = thread.broker.hub.contributions
            strangers = getattr(thread.broker.channel, "strangers", 0)
            say(figures | {"descriptors": held.descriptors, "strangers": strangers, "troubles": complaints.texts})


def _be_node(case: Case, number: str, host: str, folder: str = "") -> None:
    import jax
    import numpy as np

    from zmqtrain.node.connect import connect
    from zmqtrain.train.sync import DelayedSync
    from zmqtrain.transport.key_folder import KeyFolder

    told, complaints = commands(), _complaints()
    random = np.random.default_rng(int(number))
    params: Any = {"w": jax.numpy.zeros(case.params)}
    pattern = jax.numpy.asarray(random.standard_normal(case.params, dtype="float32"))
    move = jax.jit(lambda tree, size: {"w": tree["w"] + size * pattern})
    keys = KeyFolder(Path(folder)).secret_of(f"{HONEST}-{number}") if folder else None
    with connect(f"tcp://{host}:{PORT}", f"{HONEST}-{number}", keys=keys, timeout_seconds=60.0) as node:
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


def _be_attackers(case: Case, host: str, key: str, folder: str = "") -> None:
    from zmqtrain.transport.key_folder import KeyFolder
    from zmqtrain.transport.zmq_keys import CurveKeys

    told = commands()
    pair = CurveKeys.load(KeyFolder(Path(folder)).secret_of(f"{HONEST}-{case.nodes}")) if case.authorised else None
    place = Place(host, PORT, key.encode() or None, None if pair is None else (pair.public, pair.secret))
    say({"ready": True})
    stop, threads, turn = threading.Event(), list[threading.Thread](), 0
    while True:
        what, *names = told.get()
        stop.set()
        for task in Path("/proc/self/task").iterdir():  # at the lowest priority a busy machine keeps them for minutes
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), 0)
        for thread in threads:
            thread.join()
        stop, threads, turn = threading.Event(), [], turn + 1
        if what == "attack":
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)  # threads and their sockets inherit it
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
