"""Fault injection into a run on this PC, and its audit: `zmqtrain chaos`.

Rule 1: broker and nodes are the commands that people type, each a process of its own on 127.0.0.1, restarted with its
own line as a service manager would; between each node and the broker is a proxy.
Rule 2: the seed decides which faults come when; their effect depends on this PC too.
Rule 3: no process and no proxy outlives this one.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from zmqtrain.chaos.run import KEEP_ALL, READY, Outcome, Run, hub_folder, record_of
from zmqtrain.chaos.schedule import BROKER, FaultKind, check_kinds, draw_schedule
from zmqtrain.chaos.services import Proxy, Service
from zmqtrain.cli.display import Terminal, figures_table, format_count, format_number, format_seconds
from zmqtrain.cli.settings import command
from zmqtrain.core.errors import ConfigError, ZmqTrainError
from zmqtrain.core.installed import sharing_card
from zmqtrain.core.settings import require

PROGRAM = "zmqtrain chaos"
HERE_KINDS: tuple[FaultKind, ...] = ("kill", "stop", "unplug", "slow", "drop", "disk", "clock")
"""Faults that one PC can have; the others are faults of a network's frames."""
NODE_CHECKPOINT_EVERY = "5s"
FAULTY = 1
SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Run a broker and several nodes on this PC, and break them on purpose, at random, by a schedule.

    Everybody who is killed is started again with the same line. At the end a ledger compares what the nodes were told
    with what the broker has: every acknowledged contribution must be in the parameters exactly once. The exit code is
    1 if it is not. To break frames too (corrupt, duplicate, reorder), simulate: faults in a scenario of `zmqtrain sim`.

    Example: zmqtrain chaos --nodes 4 --seed 3 --minutes 2 --program text
    """

    program: str = "text"
    """What the nodes train: "text", "image", or an installed one."""
    program_arguments: str = ""
    """Arguments of the program, as "width=128,layers=2"."""
    settings: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A TOML file with other settings of the run, as --config of zmqtrain-broker reads it."""
    nodes: int = 4
    """How many nodes; they share this PC's cores."""
    minutes: float = 2.0
    """How long the faults go on, once all train."""
    seed: int = 0
    """Which faults come when."""
    faults: tuple[str, ...] = HERE_KINDS
    """Faults that are injected into nodes."""
    mean_seconds: float = 10.0
    """Between two faults of nodes, on average."""
    broker_kills: int = 1
    """How often the broker is killed."""
    node_checkpoints: bool = False
    """Nodes that are killed go on from where they were, not from the shared parameters."""
    pace_seconds: float = 0.1
    """Every step of every node takes at least so long, as if each had a PC of its own."""
    folder: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Leave records, logs and checkpoints here; it must be empty. Else they are dropped at the end."""

    def __post_init__(self) -> None:
        if self.nodes < 2 or not self.minutes > 0 or not self.mean_seconds > 0:
            raise ConfigError(
                f"chaos needs at least 2 nodes, some minutes, and seconds between faults; got {self.nodes} nodes, "
                f"{self.minutes:g} minutes, {self.mean_seconds:g} s"
            )
        for name in ("nodes", "minutes", "mean_seconds", "broker_kills", "pace_seconds"):
            require(name, getattr(self, name), 0)
        if elsewhere := [kind for kind in check_kinds(self.faults) if kind not in HERE_KINDS]:
            raise ConfigError(
                f"{elsewhere[0]} is a fault of network frames, not of processes of one PC: simulate it (faults in a "
                f"scenario of zmqtrain sim). Here there are {', '.join(HERE_KINDS)}"
            )
        if self.folder is not None and self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"the folder {self.folder} is not empty: a run's book begins in a folder of its own")


def _run(config: ChaosConfig) -> int:
    console = Terminal()
    names = [f"node-{number + 1}" for number in range(config.nodes)]
    seconds = 60 * config.minutes
    schedule = draw_schedule(
        config.seed,
        seconds,
        names,
        check_kinds(config.faults),
        mean_seconds=config.mean_seconds,
        broker_faults=config.broker_kills,
    )
    with contextlib.ExitStack() as stack:
        folder = config.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zmqtrain-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        run = _make_run(config, folder, names, stack)
        try:
            with run:
                console.print(f"{config.nodes} nodes train {config.program}; {len(schedule)} faults to come")
                run.wait_training()
                began = time.monotonic()
                run.player.play(schedule, seconds)
                console.print("the faults are over: the nodes send what they have")
                ended = run.end()
                took = time.monotonic() - began
        except RuntimeError as error:
            raise ZmqTrainError(str(error)) from error
        outcome = run.outcome(ended, took)
        console.print(outcome_table(outcome))
        for fault in outcome.faults[:SHOWN]:
            console.print(fault, soft_wrap=True)
        return FAULTY if outcome.faults else 0


def _make_run(config: ChaosConfig, folder: Path, names: Sequence[str], stack: contextlib.ExitStack) -> Run:
    """Return the run, with its wires up and nothing started."""
    prefix = sharing_card([])
    with socket.create_server(("127.0.0.1", 0)) as free:  # one port for all lives of the broker
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    line = ["--bind", address, "--program", config.program, "--program-arguments", config.program_arguments]
    line += ["--start-nodes", str(config.nodes), "--checkpoint", str(hub_folder(folder)), *KEEP_ALL]
    line += ["--record", str(record_of(folder, BROKER))]
    if config.settings is not None:
        line += ["--config", str(config.settings)]
    services = {BROKER: Service(folder, BROKER, "zmqtrain.cli.broker", line, prefix=prefix, ready=READY)}
    wires: dict[str, Proxy] = {}
    for name in names:
        wires[name] = stack.enter_context(Proxy(address))
        line = [wires[name].address, "--name", name, "--record", str(record_of(folder, name))]
        line += ["--pace-seconds", str(config.pace_seconds)]
        if config.node_checkpoints:
            line += ["--checkpoint", str(folder / name), "--checkpoint-every", NODE_CHECKPOINT_EVERY]
        services[name] = Service(folder, name, "zmqtrain.cli.node", line, prefix=prefix)
    return Run(folder, services, wires, sys.stdout)


def outcome_table(outcome: Outcome) -> Table:
    judged, not_done = outcome.audit, sum(bool(event.trouble) for event in outcome.events)
    rows = {
        "faults": f"{len(outcome.events) - not_done} done" + (f", {not_done} could not be" if not_done else ""),
        "started again": f"{outcome.restarts} processes, none by hand",
        "took": format_seconds(outcome.seconds) + ("" if outcome.ended else "; not all came to their end in time"),
        "samples": f"{format_count(judged.samples)} in the parameters of {format_count(judged.computed)} computed",
        "goodput": format_number(judged.goodput, 3),
        "held-out loss": format_number(outcome.loss, 4),
        "contributions": f"{judged.contributions:,} landed, {judged.acknowledged:,} acknowledged, {judged.unheard:,} "
        "of nodes that did not live to hear of it",
        "sum": f"of {outcome.history.last:,} aggregates, compared with {len(outcome.history.compared)} checkpoints",
        "ledger": "exactly once" if not outcome.faults else f"{len(outcome.faults)} faults",
    }
    return figures_table(rows)


main = command(ChaosConfig, PROGRAM, _run)
