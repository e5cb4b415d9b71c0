"""Measure how soon those who live hear of a loss: in each collective, exchange and push_pull, by kill -9 or unplugged.

Rule 1: every rank is a process in a namespace of its own on the star; so are the broker and the brokers.
Rule 2: a call is made again and again; in the midst of it one process kills itself, or loses its cable. The seconds are
those from that moment until the last of the others has its PeerLost (one machine, one clock).
Rule 3: all must name the one that was lost, and go on: ranks by `shrink`, with a sum that is right. What does not is an
error, and no row.
Rule 4: under bsp a lost worker is no error: its row says for how long the others' longest call took.

Columns: seconds: as said in rule 2.  bar: 3 s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from children import Child, ask_all, commands, say
from report import print_table, write_json
from star import Star

__all__ = ["measure", "read_options", "main"]

PORT, BAR_SECONDS = 5555, 3.0
VALUES = 2_000_000
"""Of each array: 8 MB, so that most of the time something is on its way."""
MIDST_SECONDS = (0.2, 0.5)
WAIT_SECONDS = 60.0
ALGORITHMS = ("ring", "naive", "tree", "halving", "parallel", "hub")
COLLECTIVES = (
    *(f"allreduce:{algorithm}" for algorithm in ALGORITHMS),
    *("reduce_scatter", "allgather", "broadcast", "reduce", "scatter", "gather", "all_to_all", "barrier"),
    *("send and recv", "exchange allreduce:ring"),
)
SERVER = ("push_pull: a broker", "push_pull, bsp: a worker")


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=4, help="ranks, or workers (default %(default)s)")
    parser.add_argument("--calls", nargs="+", choices=COLLECTIVES + SERVER, default=list(COLLECTIVES + SERVER))
    parser.add_argument("--losses", nargs="+", choices=("killed", "unplugged"), default=["killed", "unplugged"])
    parser.add_argument("--seed", type=int, default=0, help="of the moment in which one is lost (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(arguments)
    if options.nodes < 3:
        parser.error(f"--nodes must be at least 3, or nobody is left to go on together: {options.nodes}")
    return options


def measure(call: str, loss: str, nodes: int, midst_seconds: float) -> dict[str, Any]:
    """Build a star, lose one of `nodes` in the midst of a call, and return the row.

    Raises RuntimeError if somebody names another one, does not go on, or hears nothing.
    """
    with Star(nodes, 1e9) as star, contextlib.ExitStack() as stack:

        def child(host: Any, *arguments: str) -> Child:
            one = Child(star, host, __file__, *arguments)
            stack.callback(one.close)
            return one

        hub, last = f"tcp://{star.hub_address}:{PORT}", nodes - 1
        child("hub", "broker").answer()
        if call not in SERVER:
            children = [child(node, "rank", hub, str(nodes), str(node), call) for node in range(nodes)]
            victim = children[last]
        else:
            broker = child(last, "broker")
            broker.answer()
            addresses = [hub, f"tcp://{star.node_address(last)}:{PORT}"]
            children = [child(node, "worker", str(node), str(last), *addresses) for node in range(last)]
            victim = broker if call == SERVER[0] else children[last - 1]
        _ready(children)
        for one in children:
            one.tell("go")
        time.sleep(midst_seconds)
        if loss == "killed":
            victim.tell("die")
            began = float(victim.answer()["died_at"])
        else:
            began = time.monotonic()
            star.set_link(last if victim is not children[-1] or call not in SERVER else last - 1, up=False)
        others = [one for one in children if one is not victim]
        if call == SERVER[1]:
            time.sleep(2 * BAR_SECONDS)
            for one in others:
                one.tell("stop")
        answers = [one.answer(WAIT_SECONDS) for one in others]
        if call == SERVER[0]:  # a server of fewer brokers begins when all have left the old one
            answers = [one | more for one, more in zip(answers, ask_all(others, "again"), strict=True)]
    expected = {SERVER[0]: 1, SERVER[1]: None}.get(call, last)
    for answer in answers:
        if answer["lost"] != expected or not answer["goes_on"]:
            raise RuntimeError(f"{call}, {loss}: {answer}, and not the loss of {expected}")
    seconds = max(answer.get("longest", answer["at"] - began) for answer in answers)
    return {"call": call, "loss": loss, "nodes": nodes, "seconds": seconds, "bar": BAR_SECONDS}


def _ready(children: Sequence[Child]) -> None:
    for one in children:
        one.answer(WAIT_SECONDS)


def main() -> None:
    """Measure what the command line asks for and print it; or be one of the processes."""
    match sys.argv[1:]:
        case ["broker"]:
            _be_broker()
        case ["rank", hub, size, rank, call]:
            _be_rank(hub, int(size), int(rank), call)
        case ["worker", rank, workers, *addresses]:
            _be_worker(rank, int(workers), addresses)
        case arguments:
            _measure_all(read_options(arguments))


def _measure_all(options: argparse.Namespace) -> None:
    random, rows = np.random.default_rng(options.seed), []
    try:
        for loss, call in itertools.product(options.losses, options.calls):
            print(f"{call}, {loss} ...", file=sys.stderr, flush=True)
            rows.append(measure(call, loss, options.nodes, random.uniform(*MIDST_SECONDS)))
    except RuntimeError as error:
        raise SystemExit(f"losses: {error}") from error
    print_table([row | {"": "met" if row["seconds"] <= BAR_SECONDS else "missed"} for row in rows], "until all know")
    if options.json:
        write_json(options.json, rows)


# ---------------------------------------------------------------------- the processes


def _obey(stop: threading.Event) -> None:
    """Wait for "go"; from then on a thread does as it is told: "die", or "stop" and "again", which both set `stop`."""
    told = commands()
    assert told.get() == ["go"]

    def obey() -> None:
        if told.get() != ["die"]:
            stop.set()
            return
        say({"died_at": time.monotonic()})
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=obey, daemon=True).start()


def _be_broker() -> None:
    """Be the broker at which all meet, or one that is a broker of the parameter server."""
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.core.settings import RunSettings

    told = commands()
    with BrokerThread(f"tcp://*:{PORT}", RunSettings()) as broker:
        say({"listens": broker.address})
        if told.get() == ["die"]:
            say({"died_at": time.monotonic()})
            os.kill(os.getpid(), signal.SIGKILL)


def _be_rank(hub: str, size: int, rank: int, call: str) -> None:
    """Make a call again and again, until somebody is lost; then go on with the others."""
    import zmqtrain as zt

    comm = zt.Communicator.create(hub, size, rank, name=f"pc-{rank}", timeout_seconds=WAIT_SECONDS)
    make = _calls(comm, call)
    make()
    comm.barrier()
    say({"ready": rank})
    _obey(threading.Event())
    try:
        while True:
            make()
    except zt.PeerLost as error:
        answer = {"lost": error.rank, "at": time.monotonic()}
    left = comm.shrink()
    say(answer | {"goes_on": left.allreduce(1) == left.size == size - 1})
    left.close()


def _calls(comm: Any, call: str) -> Callable[[], object]:
    x = np.ones(VALUES, np.float32)
    kind, _, algorithm = call.partition(":")
    if kind == "allreduce":
        return lambda: comm.allreduce(x, algorithm=algorithm)
    if kind == "send and recv":

        def round_trip() -> None:
            sent = comm.isend(x, dest=(comm.rank + 1) % comm.size)
            comm.recv(source=(comm.rank - 1) % comm.size)
            sent.wait()

        return round_trip
    if kind.startswith("exchange"):
        from zmqtrain.synchronous.exchanges import AllreduceExchange

        exchange = AllreduceExchange(comm, algorithm)

        def step() -> None:
            exchange.agree(16, False)
            exchange.begin([0], x.copy())
            exchange.finish()

        return step
    if kind in ("scatter", "all_to_all"):
        pieces = np.array_split(x, comm.size)
        return lambda: getattr(comm, kind)(pieces)
    if kind == "barrier":
        return lambda: comm.barrier()
    return lambda: getattr(comm, kind)(x)


def _be_worker(rank: str, workers: int, addresses: list[str]) -> None:
    """Push and pull again and again, until a broker is lost, or this is stopped."""
    import zmqtrain as zt

    rules = {"consistency": "bsp", "optimizer": "sgd:rate=1", "workers": workers}
    client = zt.ParameterClient.connect(addresses, name=f"pc-{rank}", timeout_seconds=WAIT_SECONDS, **rules)
    gradient = {f"w{layer}": np.ones(VALUES // 4, np.float32) for layer in range(4)}
    client.init_all(gradient)
    client.push_pull_all(gradient)
    say({"ready": rank})
    stop, longest, lost, ended = threading.Event(), 0.0, None, 0.0
    _obey(stop)
    try:
        while not stop.is_set():
            began = time.monotonic()
            client.push_pull_all(gradient)
            longest = max(longest, time.monotonic() - began)
    except zt.PeerLost as error:
        lost, ended = error.rank, time.monotonic()
    client.close()
    answer: dict[str, Any] = {"lost": lost, "at": ended}
    if lost is None:
        say(answer | {"goes_on": True, "longest": longest})
        return
    say(answer)
    stop.wait(WAIT_SECONDS)
    with zt.ParameterClient.connect(addresses[:1], name=f"pc-{rank}", timeout_seconds=WAIT_SECONDS) as again:
        again.init("w again", gradient["w0"])
        say({"goes_on": bool(again.pull("w again")[0] == 1)})


if __name__ == "__main__":
    main()
