"""Measure how soon aggregates come again when the broker is killed: started again on its checkpoint, or by its standby.

Rule 1: broker, standby and nodes are processes in namespaces of their own on the star; the broker dies by kill -9.
Rule 2: a node exchanges as it does in training, with the settings of a run's default, and makes steps of a fixed time;
what it would compute is left out.  Rule 3: all times are of one clock, of this machine.

Columns: first, all: seconds until the first, and the last, of the nodes has applied a new aggregate: `restart` from the
moment in which the broker that was started again is about to listen, `standby` from the kill.  resumed: seconds that
it took from there to read its checkpoint and begin.  bar: of a restart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from children import Child, ask_all, commands, say
from report import print_table, write_json
from star import Host, Star

__all__ = ["measure_restarts", "measure_takeover", "read_options", "main"]

PORT, BAR_SECONDS = 5555, 3.0
STEP_SECONDS, VALUES = 0.02, 200_000
BEFORE_SECONDS = (1.5, 2.5)
"""So long all goes well before each kill."""
TAKEOVER_SECONDS = 1.0


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=6, help="(default %(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="of the broker, one after the other (default %(default)s)")
    parser.add_argument(
        "--down", type=float, default=2.0, help="seconds until it is started again (default %(default)s)"
    )
    parser.add_argument("--takeovers", type=int, default=2, help="runs with a standby (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(arguments)
    if options.nodes < 1 or options.kills < 0 or options.takeovers < 0:
        parser.error("there is at least one node, and no number is less than 0")
    return options


def measure_restarts(nodes: int, kills: int, down_seconds: float, chance: random.Random) -> list[dict[str, Any]]:
    """Kill the broker again and again, start it again on its checkpoint each time, and return a row a kill."""
    rows = []
    with Star(nodes, 1e9) as star, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        child = _child_of(star, stack)
        broker = child("hub", "broker", folder)
        broker.answer()
        children = _nodes(child, star, nodes)
        for kill in range(kills):
            time.sleep(chance.uniform(*BEFORE_SECONDS))
            broker.tell("die")
            broker.answer()
            broker.wait()
            time.sleep(down_seconds)
            broker = child("hub", "broker", folder)
            begun = broker.answer()
            row = _row(f"restart {kill + 1}, {down_seconds:g} s down", children, float(begun["at"]), BAR_SECONDS)
            rows.append(row | {"resumed": float(begun["resumed"])})
    return rows


def measure_takeover(nodes: int, chance: random.Random) -> dict[str, Any]:
    """Kill the broker for good while a standby follows it, and return the row."""
    with Star(nodes + 1, 1e9) as star, contextlib.ExitStack() as stack:
        child = _child_of(star, stack)
        broker = child("hub", "broker", "")
        broker.answer()
        child(nodes, "standby", f"tcp://{star.hub_address}:{PORT}").answer()
        children = _nodes(child, star, nodes)
        time.sleep(chance.uniform(*BEFORE_SECONDS))
        broker.tell("die")
        return _row(f"standby, after {TAKEOVER_SECONDS:g} s", children, float(broker.answer()["at"]))


def _child_of(star: Star, stack: contextlib.ExitStack) -> Any:
    def child(host: Host, *arguments: str) -> Child:
        one = Child(star, host, __file__, *arguments)
        stack.callback(one.close)
        return one

    return child


def _nodes(child: Any, star: Star, nodes: int) -> list[Child]:
    children = [child(node, "node", f"tcp://{star.hub_address}:{PORT}", str(node)) for node in range(nodes)]
    for one in children:
        one.answer()
    return children


def _row(what: str, children: Sequence[Child], since: float, bar: float | None = None) -> dict[str, Any]:
    seconds = [float(answer["at"]) - since for answer in ask_all(children, "since", since)]
    return {
        "what": what,
        "nodes": len(children),
        "first": min(seconds),
        "all": max(seconds),
        "resumed": None,
        "bar": bar,
    }


def main() -> None:
    """Measure what the command line asks for and print it; or be one of the processes."""
    match sys.argv[1:]:
        case ["broker", folder]:
            _be_broker(folder, "")
        case ["standby", first]:
            _be_broker("", first)
        case ["node", hub, number]:
            _be_node(hub, int(number))
        case arguments:
            _measure_all(read_options(arguments))


def _measure_all(options: argparse.Namespace) -> None:
    chance = random.Random(options.seed)
    try:
        rows = measure_restarts(options.nodes, options.kills, options.down, chance) if options.kills else []
        rows += [measure_takeover(options.nodes, chance) for _ in range(options.takeovers)]
    except RuntimeError as error:
        raise SystemExit(f"comeback: {error}") from error
    for row in rows:
        row[""] = "" if row["bar"] is None else "met" if row["all"] <= row["bar"] else "missed"
    print_table(rows, "until aggregates come again")
    if options.json:
        write_json(options.json, rows)


# ---------------------------------------------------------------------- the processes


def _be_broker(folder: str, first: str) -> None:
    from zmqtrain.broker.serve import serve
    from zmqtrain.broker.standby import StandbyPlace
    from zmqtrain.core.settings import RunSettings

    told = commands()

    def die() -> None:
        if told.get() == ["die"]:
            say({"at": time.monotonic()})
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    settings = None if first else RunSettings(initial="founder", fragments=1)  # a node here offers a whole leaf
    place = StandbyPlace(first=first, takeover_seconds=TAKEOVER_SECONDS) if first else None
    began = time.monotonic()
    serve(
        f"tcp://*:{PORT}",
        settings,
        checkpoint=Path(folder) if folder else None,
        checkpoint_every="1s",
        ready=lambda broker: None if first else say({"at": began, "resumed": time.monotonic() - began}),
        standby=place,
        following=lambda standby: say({"follows": first}),
    )


def _be_node(hub: str, number: int) -> None:
    from zmqtrain.core.types import Counts, LeafSpec
    from zmqtrain.node.connect import connect

    told = commands()
    chance = np.random.default_rng(number)
    with connect(hub, f"pc-{number}", timeout_seconds=60.0) as node:
        node.join((LeafSpec("w", (VALUES,), "float32"),), [np.zeros(VALUES, np.float32)])
        every, steps, since, heard = node.settings.every, 0, 0.0, False
        while True:
            time.sleep(STEP_SECONDS)
            steps += 1
            if steps >= every and (fragments := node.next_fragments()):
                pending = chance.normal(size=VALUES).astype(np.float32) * np.float32(1e-3)
                if node.offer(fragments[0], [pending], Counts(8 * steps, steps)) is not None:
                    steps = 0
            while (update := node.poll()) is not None:
                if not heard and update.version > 3:
                    heard = True
                    say({"ready": number})
                if since and not update.anchor:
                    say({"at": time.monotonic()})
                    since = 0.0
            if not told.empty():
                since = float(told.get()[1])


if __name__ == "__main__":
    main()
