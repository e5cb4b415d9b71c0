"""Let a broker and nodes run at the full rate for hours, and see whether they hold ever more memory, files, threads.

    python bench/soak.py --minutes 120          python bench/soak.py --minutes 10 (the nightly form)

Rule 1: every process is one of its own, in Python's development mode, with ResourceWarning as an error; what nobody
could catch, there or at its end, is counted, and must be nothing.
Rule 2: nodes come and go: each leaves now and then and joins again, in its process, so that what a node holds after
`close` would add up. A visitor opens and closes one public thing after another (a node, an observer, a node of several
brokers, a communicator, a client of keys, an engine, a training loop, a broker) and counts what is left of each:
threads, asyncio tasks, file descriptors. The brokers that it visits are a process like the others: their line to each
other, which is made anew when it is lost, is none of the visitor's descriptors. They count what is left when all
guests have gone.
Rule 3: what a process holds is read from outside, by the kernel's figures. Growth is the Theil-Sen slope over the
second half of the run times its length; the bar is GROWTH_BYTES, and no file descriptor or thread more than in the
first half: neither at the fewest nor in the median, as what is left behind adds to both, and who comes and goes to one.
Rule 4: a process allocates in one arena. Else glibc spreads the threads of join after join over 8 arenas a core, and
each keeps the most that was ever in use there: 26 MB more at a node after some twenty joins, and then no more, of which
a short run sees only the rise.

Columns: process; aggregates, steps: in all.  rss_mb, rss_end_mb: at the half and at the end.  growth_mb: see Rule 3.
descriptors, threads: how many more in the second half than in the first, see Rule 3.  noted: see Rule 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from children import Child, ask_all, commands, say
from report import print_table, write_json
from vitals import Vitals, count_left, slope, vitals_of, watch_unraisable

__all__ = ["GROWTH_BYTES", "Case", "Here", "measure", "judge", "main"]

GROWTH_BYTES = 4 << 20
"""What a process may grow by in the second half of a run, whatever its length: two hours at 30 aggregates a second are
some 100,000 in that half, so that 42 bytes kept of each would be too many."""
END_SECONDS = 60.0
DEVELOPMENT = ("-X", "dev", "-W", "error::ResourceWarning")
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one run is made of. step_seconds: of an emulated step.  stay_seconds: after which a node leaves and joins
    again.  sample_seconds: between two looks.  visits: whether there is a visitor, and two brokers for it."""

    minutes: float = 120.0
    nodes: int = 3
    params: int = 100_000
    codec: str = "ternary"
    every: int = 2
    delay: int = 2
    step_seconds: float = 0.01
    stay_seconds: float = 30.0
    sample_seconds: float = 2.0
    visits: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as `RunSettings.from_dict` reads them."""
        return {
            "every": self.every,
            "delay": self.delay,
            "codec": self.codec,
            "broadcast_codec": self.codec,
            "evaluate_seconds": 0.0,
        }


class Here:
    """This machine as the host of children, in Python's development mode; what they say on stderr goes to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[Any]] = []

    def popen(self, host: object, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program of ours; `options` are those of subprocess.Popen."""
        options["env"] = {**options.get("env", os.environ), **ONE_ARENA}
        with open(self.stderr(host), "wb") as said:
            process = subprocess.Popen([argv[0], *DEVELOPMENT, *argv[1:]], stderr=said, **options)
        self.processes.append(process)
        return process

    def stderr(self, host: object) -> Path:
        """Where the stderr of the program on `host` goes."""
        return self.folder / f"{host}.stderr"


def measure(case: Case) -> list[dict[str, Any]]:
    """Run the case and return a row for each process. Raises RuntimeError if one fails or hangs."""
    folder = Path(tempfile.mkdtemp(prefix="zmqtrain-soak-"))
    try:
        return _run(case, Here(folder), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say what is wrong in these rows; nothing: all is flat, and all was given back."""
    wrong = []
    for row in rows:
        name = row["process"]
        if row["growth_mb"] * 1e6 > GROWTH_BYTES:
            wrong.append(f"{name} grew by {row['growth_mb']:.2f} MB in the second half")
        wrong += [f"{name} has {row[kind]} {kind} more" for kind in ("descriptors", "threads") if row[kind] > 0]
        wrong += [f"{name}: {text}" for text in row["noted"]]
    return wrong


def main() -> None:
    """Run what the command line asks for, print a row for each process, and fail if anything grows; or be a process."""
    if sys.argv[1:2] and sys.argv[1] in _ROLES:
        _ROLES[sys.argv[1]](Case(**json.loads(sys.argv[2])), *sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Case()
    parser.add_argument("--minutes", type=float, default=default.minutes, help="how long (default %(default)g)")
    parser.add_argument("--nodes", type=int, default=default.nodes, help="how many (default %(default)s)")
    parser.add_argument("--params", type=float, default=default.params, help="of the model (default %(default)g)")
    parser.add_argument("--codec", default=default.codec, help="up and down (default %(default)s)")
    parser.add_argument("--every", type=int, default=default.every, help="steps between offers (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=1e3 * default.step_seconds, help="(default %(default)g)")
    parser.add_argument("--stay-seconds", type=float, default=default.stay_seconds, help="(default %(default)g)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args()
    case = Case(
        minutes=options.minutes,
        nodes=options.nodes,
        params=int(options.params),
        codec=options.codec,
        every=options.every,
        step_seconds=1e-3 * options.step_ms,
        stay_seconds=options.stay_seconds,
        sample_seconds=min(10.0, max(1.0, 60 * options.minutes / 600)),
    )
    try:
        rows = measure(case)
    except RuntimeError as error:
        raise SystemExit(f"soak: {error}") from error
    print_table([row | {"noted": len(row["noted"])} for row in rows], f"{case.minutes:g} minutes, {case.nodes} nodes")
    if options.json:
        write_json(options.json, rows)
    if wrong := judge(rows):
        raise SystemExit("soak: " + "\n      ".join(wrong))


# ---------------------------------------------------------------------- the process that looks


def _run(case: Case, here: Here, folder: Path) -> list[dict[str, Any]]:
    said = json.dumps(asdict(case))
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}

        def start(name: str, role: str, *arguments: str) -> Child:
            children[name] = child = Child(here, name, __file__, role, said, *arguments)  # type: ignore[arg-type]
            stack.callback(child.close)
            return child

        try:
            servers = [start("broker", "broker", str(folder / "checkpoint"))]
            if case.visits:
                servers.append(start("shards", "shards"))
            addresses = [server.answer()["address"] for server in servers]
            guests = [start(f"node {number}", "node", addresses[0], str(number)) for number in range(case.nodes)]
            if case.visits:
                guests.append(start("visitor", "visitor", *addresses))
            for child in guests:
                child.answer()
            processes = dict(zip(children, here.processes, strict=True))
            samples = _sample(case, processes)
            answers = {name: ask_all([child], "end")[0] for name, child in reversed(children.items())}  # servers last
        except RuntimeError as error:
            heard = {name: here.stderr(name).read_text()[-2000:] for name in children}
            words = [f"{name} said: {text}" for name, text in heard.items() if text]
            raise RuntimeError("\n".join([str(error), *words])) from error
        for process in here.processes:
            process.wait(END_SECONDS)
    return [_row(name, samples[name], answers[name], _noted_in(here.stderr(name))) for name in children]


def _sample(case: Case, processes: dict[str, subprocess.Popen[Any]]) -> dict[str, list[Vitals]]:
    samples: dict[str, list[Vitals]] = {name: [] for name in processes}
    end = time.monotonic() + 60 * case.minutes
    while time.monotonic() < end or not all(samples.values()):  # at least once, whoever was held up before
        for name, process in processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"the {name} ended with {process.returncode}")
            samples[name].append(vitals_of(process.pid))
        time.sleep(case.sample_seconds)
    return samples


def _noted_in(stderr: Path) -> list[str]:
    """Return what a process said on stderr that no process should."""
    marks = ("ResourceWarning", "Exception ignored", "Traceback", "was never awaited", "was destroyed but")
    return [line for line in stderr.read_text(errors="replace").splitlines() if any(mark in line for mark in marks)]


def _rise(first: Sequence[int], second: Sequence[int]) -> int:
    """Return by how much both the fewest and the median have grown; the smaller of the two."""
    return min(of(second) - of(first) for of in (min, statistics.median_low))


def _row(name: str, samples: Sequence[Vitals], answer: dict[str, Any], said: list[str]) -> dict[str, Any]:
    half = len(samples) // 2
    first, second = samples[: max(1, half)], samples[half:]
    seconds = second[-1].seconds - second[0].seconds
    return {
        "process": name,
        "steps": answer.get("steps"),
        "aggregates": answer.get("aggregates"),
        "rss_mb": second[0].rss_bytes / 1e6,
        "rss_end_mb": second[-1].rss_bytes / 1e6,
        "growth_mb": slope([(one.seconds, one.rss_bytes) for one in second]) * seconds / 1e6,
        "descriptors": _rise([one.descriptors for one in first], [one.descriptors for one in second]),
        "threads": _rise([one.threads for one in first], [one.threads for one in second]),
        "noted": [*answer["noted"], *said],
    }


# ---------------------------------------------------------------------- the processes that are looked at


def _be_broker(case: Case, checkpoint: str) -> None:
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.core.settings import RunSettings

    noted, told = watch_unraisable(), commands()
    with BrokerThread("tcp://127.0.0.1:0", RunSettings.from_dict(case.settings), checkpoint=Path(checkpoint)) as broker:
        say({"address": broker.address})
        told.get()
        figures = broker.broker.statistics()
    say({"aggregates": figures.version, "noted": noted()})


def _be_node(case: Case, address: str, number: str) -> None:
    import jax
    import numpy as np

    from zmqtrain.node.connect import connect
    from zmqtrain.train.sync import DelayedSync

    noted, told = watch_unraisable(), commands()
    random = np.random.default_rng(int(number))
    params = {"w": jax.numpy.zeros(case.params), "b": jax.numpy.zeros(7)}
    pattern = jax.numpy.asarray(random.standard_normal(case.params, dtype="float32"))
    move = jax.jit(lambda tree, size: {"w": tree["w"] + size * pattern, "b": tree["b"] - size})
    steps = aggregates = 0
    while told.empty():
        with connect(address, f"pc-{number}", timeout_seconds=END_SECONDS) as node:
            sync = DelayedSync(node, params)
            params, leave_at = sync.params, time.monotonic() + case.stay_seconds * (1 + random.random())
            while told.empty() and (not steps or time.monotonic() < leave_at):
                time.sleep(case.step_seconds)
                params = sync.step(move(params, 1e-3 * random.standard_normal()), samples=1)
                steps += 1
                if steps == 1:
                    say({"joined": True})
            aggregates += sync.statistics().aggregates_applied
    say({"steps": steps, "aggregates": aggregates, "noted": noted()})


def _be_shards(case: Case) -> None:
    import visits

    noted, told = watch_unraisable(), commands()
    with visits.Shards() as shards:
        first = count_left()
        visits.VISITS["node of two brokers"]("", shards.first)  # what is made once in a run is made now
        before = count_left(first)
        say({"address": shards.first})
        told.get()
        left = count_left(before).beyond(before)
    say({"noted": [*noted(), *left]})


def _be_visitor(case: Case, address: str, shards: str) -> None:
    import visits

    noted, told = watch_unraisable(), commands()
    visits.visit_all(address, shards)  # what is made once in a process is made now
    say({"visited": True})
    rounds, wrong = 0, []
    while told.empty():
        wrong += [f"in round {rounds}, {what}" for what in visits.visit_all(address, shards)]
        rounds += 1
        time.sleep(0.2)
    say({"steps": rounds, "noted": [*noted(), *wrong]})


_ROLES = {"broker": _be_broker, "node": _be_node, "shards": _be_shards, "visitor": _be_visitor}

if __name__ == "__main__":
    main()
