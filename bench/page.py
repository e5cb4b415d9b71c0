"""Measure the page of a run: how soon a browser shows a long one, what its process takes, what it costs a run.

    python bench/page.py scale                # 64 nodes and 10 hours of records, in headless Chromium
    python bench/page.py scale --minutes 30   # and whether its process grows
    python bench/page.py cost                 # as root: the star of 4 nodes, with the page and five tabs, and without

Rule 1: records are made here, in the form of real ones: a step each --step-seconds, a delta each 8 steps, an
evaluation each 30 s, and reports of the broker as often as in a real one. The page is opened twice: as soon as its
process answers, and when it has read all.
Rule 2: `first_paint_ms` is the browser's own first-contentful-paint, `charts_ms` the time from the navigation until
both charts have lines.  Rule 3: a tab of `cost` is a reader of the page's stream: a browser draws on the PC of
its user, and here it would take the cores that stand in for five machines.  Runs with and without are in pairs, in
turn, and the share is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zmqtrain.monitor.recorder import STATUS_SHARE

import efficiency
from report import print_table, write_json
from star import Star

__all__ = ["make_records", "watched", "main"]

EVERY, EVALUATE_SECONDS, BATCH = 8, 30.0, 32
PORT = 5560
START_SECONDS, READ_SECONDS = 60.0, 300.0
COST = efficiency.Case(params=25_000_000, fragments=1, every=8, delay=12, steps=240)


def make_records(folder: Path, nodes: int, hours: float, step_seconds: float) -> int:
    """Write the records of a run as its broker and its nodes would; return their bytes."""
    steps, names = int(hours * 3600 / step_seconds), [f"pc{number + 1}" for number in range(nodes)]
    for number, name in enumerate(names):
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(one) + "\n" for one in _node_records(name, number, steps, step_seconds))
    with (folder / "broker.jsonl").open("w") as file:
        file.writelines(json.dumps(one) + "\n" for one in _broker_records(names, steps, step_seconds))
    return sum(path.stat().st_size for path in folder.iterdir())


def _loss(step: int) -> float:
    return 1.2 + 4.0 / (1 + step / 200) ** 0.5


def _node_records(name: str, number: int, steps: int, step_seconds: float) -> Iterator[dict[str, Any]]:
    first = {"kind": "node", "seconds": 0.0, "node": name, "peer": f"{name}#a", "run": "run-bench", "version": -1}
    yield {**first, "zmqtrain": "0.2.0", "began": 1e9}
    for step in range(1, steps + 1):
        facts = {"seconds": step * step_seconds, "node": name, "step": step, "samples": step * BATCH}
        noise = ((step * 7919 + number * 104729) % 1000) / 4000
        yield {"kind": "step", **facts, "loss": _loss(step) + noise}
        if step % EVERY == 0:
            sequence = step // EVERY - 1
            yield {"kind": "offer", **facts, "sequence": sequence, "fragment": 0, "base_version": sequence}
            yield {"kind": "application", **facts, "version": sequence, "landed": [sequence - 1], "snapshot": False}


def _broker_records(names: list[str], steps: int, step_seconds: float) -> Iterator[dict[str, Any]]:
    settings = {"program": "text", "every": EVERY, "delay": 4, "codec": "ternary", "release": "quorum"}
    yield {"kind": "run", "seconds": 0.0, "run": "run-bench", "version": -1, "began": 1e9, "settings": settings}
    for name in names:
        joined = {"kind": "membership", "seconds": 1.0, "node": name, "what": "joined", "peer": f"{name}#a"}
        yield {**joined, "text": "at version 0"}
    scored, reported, samples = 0.0, 0.0, len(names) * EVERY * BATCH
    for version in range(1, steps // EVERY + 1):
        at = version * EVERY * step_seconds + 0.5
        facts = {"sequence": version - 1, "fragment": 0, "base_version": version - 1, "samples": EVERY * BATCH}
        judged = {"score": 2.0, "staleness": 1, "too_stale": False, "left_out": False}
        deltas = [{"node": name, "peer": f"{name}#a", **facts, **judged} for name in names]
        release = {"kind": "release", "seconds": at, "version": version, "live": len(names), "nodes": len(names)}
        yield {**release, "samples": samples, "fragments": [0], "contributions": deltas}
        if at - reported >= max(1.0, STATUS_SHARE * at):
            reported = at
            yield _status(names, at, version, samples)
        if at - scored >= EVALUATE_SECONDS:
            scored, loss = at, _loss(version * EVERY)
            yield {"kind": "evaluation", "seconds": at, "version": version, "samples": version * samples, "loss": loss}


def _status(names: list[str], at: float, version: int, samples: int) -> dict[str, Any]:
    step = version * EVERY
    figures = {"step": step, "samples": step * BATCH, "contributions": version, "refused": 0, "loss": _loss(step)}
    rates = {"samples_per_second": 16.0, "bytes_sent": 1e5 * version, "bytes_received": 1e5 * version, "age_steps": 4.0}
    members = [{"peer": f"{name}#a", "name": name, "state": "live", **figures, **rates} for name in names]
    hub = {"bytes_in": 6.4e6 * version, "bytes_out": 6.4e6 * version, "cpu_seconds": 0.1 * version, "memory_bytes": 1e9}
    counts = {"samples": version * samples, "contributions": version * len(names), "units_done": 0, "units_total": 0}
    facts = {"version": version, "members": members, "evaluator": "", "scores": {}, "score_version": -1, "hub": hub}
    return {"kind": "status", "seconds": at, "run_seconds": at, **counts, **facts}


@contextlib.contextmanager
def watched(what: str, *prefix: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Give the process of the page of a hub or a folder, and its address; tried again until the hub is there.

    prefix: a command that runs the rest of its line. Raises RuntimeError if it does not start.
    """
    command = [*prefix, sys.executable, "-m", "zmqtrain.cli", "page", what, "--bind", "127.0.0.1:0"]
    until = time.monotonic() + START_SECONDS
    while True:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        if line := process.stdout.readline():
            break
        process.wait()
        if time.monotonic() > until:
            raise RuntimeError(f"the page does not start: {' '.join(command)}")
        time.sleep(0.2)
    try:
        yield process, line.split()[-1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def read_stream(address: str, seconds: float) -> tuple[int, int]:
    """Be a tab: read the page's events; return how many there were and their bytes."""
    host = address.removeprefix("http://").rstrip("/")
    events = size = 0
    with contextlib.closing(http.client.HTTPConnection(host, timeout=30)) as connection:
        connection.request("GET", "/events")
        answer = connection.getresponse()
        until = time.monotonic() + seconds
        while time.monotonic() < until and (line := answer.readline()):
            if line.startswith(b"data: "):
                json.loads(line.removeprefix(b"data: "))
                events, size = events + 1, size + len(line)
    return events, size


def memory_mb(process: int) -> float:
    """Return the resident memory of a process, in 10^6 bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1e3


# ---------------------------------------------------------------------- scale


def _open(driver: Any, address: str) -> dict[str, float]:
    """Open the page; return the times of its first paint and of its charts, in ms since the navigation."""
    driver.get("about:blank")
    driver.get(address)
    drawn = """return ['by-seconds', 'by-samples'].every(
        id => document.querySelectorAll('#' + id + ' .scatterlayer .trace').length) ? performance.now() : 0"""
    until = time.monotonic() + READ_SECONDS
    while not (charts := driver.execute_script(drawn)) and time.monotonic() < until:
        time.sleep(0.01)
    paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
    return {"first_paint_ms": driver.execute_script(paint), "charts_ms": charts}


def measure_scale(nodes: int, hours: float, step_seconds: float, minutes: float) -> dict[str, Any]:
    """Return the row of one run's records."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory(prefix="zmqtrain-page-") as place, contextlib.ExitStack() as stack:
        size = make_records(Path(place), nodes, hours, step_seconds)
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,800"):
            options.add_argument(f"--{argument}")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
        stack.callback(driver.quit)
        began = time.monotonic()
        process, address = stack.enter_context(watched(place))
        row: dict[str, Any] = {
            "nodes": nodes,
            "hours": hours,
            "steps_recorded": int(hours * 3600 / step_seconds) * nodes,
        }
        row |= {"records_mb": size / 1e6, "answers_s": time.monotonic() - began}
        row |= {f"{name}_while_reading": value for name, value in _open(driver, address).items()}
        state, peak, until = (
            "return document.getElementById('state').dataset.state",
            0.0,
            time.monotonic() + READ_SECONDS,
        )
        while driver.execute_script(state) == "reading" and time.monotonic() < until:
            peak = max(peak, memory_mb(process.pid))
            time.sleep(0.1)
        row["all_read_s"] = time.monotonic() - began
        row |= {f"{name}_all_read": value for name, value in _open(driver, address).items()}
        time.sleep(5.0)
        row |= {"rss_mb": memory_mb(process.pid), "rss_peak_mb": max(peak, memory_mb(process.pid))}
        if minutes:
            time.sleep(60 * minutes)
            row["rss_mb_later"] = memory_mb(process.pid)
        return row


# ---------------------------------------------------------------------- cost


@contextlib.contextmanager
def _page_and_tabs(star: Star, tabs: int) -> Iterator[None]:
    """Have the page of the star's hub, and its readers, in the hub's namespace; they begin when the broker is there."""
    over, failed = threading.Event(), list[BaseException]()

    def watch() -> None:
        inside = ("ip", "netns", "exec", star.namespace("hub"))
        try:
            with watched(f"tcp://{star.hub_address}:{efficiency.PORT}", *inside) as (_, address):
                command = [*inside, sys.executable, __file__, "tab", address]
                readers = [subprocess.Popen(command) for _ in range(tabs)]
                over.wait()
                for reader in readers:
                    reader.kill()
                    reader.wait()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise RuntimeError(f"nobody watched: {failed[0]}") from failed[0]


def measure_cost(pairs: int, tabs: int) -> list[dict[str, Any]]:
    """Return a row for each pair of runs, and one of their medians."""
    rows = []
    for number in range(pairs):
        with_page: dict[str, float] = {}
        without: dict[str, float] = {}
        order = ((without, 0), (with_page, tabs))
        for found, count in order if number % 2 == 0 else order[::-1]:
            with Star(COST.nodes, COST.rate) as star, contextlib.ExitStack() as stack:
                if count:
                    stack.enter_context(_page_and_tabs(star, count))
                row = efficiency.measure_on(COST, star)
            found["steps"] = row["efficiency"] / efficiency.STEP_SECONDS
            found["aggregates"] = found["steps"] / row["period_steps"]
            found["busy"] = row["busy"]
        rows.append({
            "pair": str(number + 1),
            "steps_per_s": without["steps"], "with_page": with_page["steps"],
            "share_of_steps": with_page["steps"] / without["steps"],
            "aggregates_per_s": without["aggregates"], "with_page ": with_page["aggregates"],
            "share_of_aggregates": with_page["aggregates"] / without["aggregates"],
            "busy": without["busy"], "busy_with_page": with_page["busy"],
        })  # fmt: skip
        print_table(rows[-1:])
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "pair"}
    return [*rows, {"pair": "median", **middle}]


def main() -> None:
    """Measure what the command line asks for, and print it."""
    if sys.argv[1:2] == ["tab"]:
        read_stream(sys.argv[2], float("inf"))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("scale", "cost"))
    parser.add_argument("--nodes", type=int, default=64, help="scale: (default %(default)s)")
    parser.add_argument("--hours", type=float, default=10.0, help="scale: of records (default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=2.0, help="scale: (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=0.0, help="scale: look at the memory again, so much later")
    parser.add_argument("--pairs", type=int, default=3, help="cost: of runs (default %(default)s)")
    parser.add_argument("--tabs", type=int, default=5, help="cost: (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args()
    try:
        if options.what == "scale":
            rows = [measure_scale(options.nodes, options.hours, options.step_seconds, options.minutes)]
        else:
            rows = measure_cost(options.pairs, options.tabs)
    except RuntimeError as error:
        raise SystemExit(f"page: {error}") from error
    if options.what == "scale":
        print_table([{"": name, "value": value} for name, value in rows[0].items()], "the page of a long run")
    else:
        print_table(rows, f"with the page and {options.tabs} tabs, and without")
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
