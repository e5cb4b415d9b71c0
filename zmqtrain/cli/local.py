"""A broker and several nodes on this PC: `zmqtrain local`.

Rule 1: the broker is a thread of this process, each node a process of its own, as it would be on a PC of its own.
Rule 2: no node outlives this process: each reads a pipe of which only this process holds the other end.
Rule 3: the death of a node is reported with its last line of stderr; the others go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Unpack

from zmqtrain.broker.checkpoint import RunFolders, new_run
from zmqtrain.broker.serve import BrokerThread, ServeOptions
from zmqtrain.broker.standby import ShardPlace
from zmqtrain.cli.broker import check_checkpoint, check_program, describe_program, finished, result, saving
from zmqtrain.cli.display import Display, format_scores, log_to_stderr, plural, say
from zmqtrain.cli.ending import first_interrupt
from zmqtrain.cli.settings import Folder, RunOptions, command, make_folder
from zmqtrain.core.errors import ConfigError, ZmqTrainError
from zmqtrain.core.installed import sharing_card
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings, require
from zmqtrain.monitor.recorder import BrokerRecorder, process_facts
from zmqtrain.protocol.messages import Roster, replace_fields
from zmqtrain.synchronous.exchanges import read_exchange

PROGRAM = "zmqtrain local"
HERE = "tcp://127.0.0.1:0"
FLUSH_SECONDS = 45.0
LOOK_SECONDS = 0.1
LAST_WORDS = 2000


@dataclass(frozen=True, kw_only=True)
class LocalConfig(RunOptions):
    """Run a broker and several nodes on this PC alone: to try out, and to see a run at work.

    Example: zmqtrain local --nodes 3 --program text
    """

    program: str = "text"
    """What the nodes train: "text", "image", or an installed one."""
    nodes: int = 3
    """How many nodes, each a process of its own; they share this PC's cores."""
    seconds: float = 0.0
    """End the run after so long; 0: when its units are done, or at Ctrl-C."""
    pace_seconds: float = 0.0
    """Every step of every node takes at least so long: to emulate slower PCs."""
    exchange: str = "hub"
    """To train in lockstep: "allreduce:ring", "server:async" ..., as for zmqtrain-node; the run then begins with all
    nodes."""
    record: Folder = None
    """Write what happens at the broker and at each node to files in this folder; `zmqtrain report` draws them."""

    def __post_init__(self) -> None:
        if read_exchange(self.exchange) is not None and self.start_nodes == 1:
            object.__setattr__(self, "start_nodes", self.nodes)
        super().__post_init__()
        require("nodes", self.nodes, 1)
        require("seconds", self.seconds, 0)
        require("pace_seconds", self.pace_seconds, 0)
        if self.record is not None and (self.shards > 1 or read_exchange(self.exchange) is not None):
            raise ConfigError("a run of several brokers, or in lockstep, cannot be recorded: leave --record out")
        if not self.program:
            raise ConfigError("zmqtrain local needs a program to train: --program text, or --program image")
        if self.start_nodes > self.nodes:
            raise ConfigError(
                f"start_nodes ({self.start_nodes}) is more than nodes ({self.nodes}): the run would never begin; say "
                f"--nodes {self.start_nodes}"
            )


@dataclass(frozen=True)
class Departure:
    """A node process that has ended: its name, exit code and last line of stderr."""

    name: str
    code: int
    words: str

    def __str__(self) -> str:
        how = f"by signal {-self.code}" if self.code < 0 else f"with exit code {self.code}"
        return f"{self.name} ended {how}" + (f": {self.words}" if self.words else "")


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]


class Federation:
    """A broker, or several brokers, and its node processes on 127.0.0.1, from `with` to the end of the block.

    pace_seconds, exchange: of every node.  pin: give each node a share of the cores.  record: a folder for the records
    of the broker and of all nodes; None: none are written.  options: of the broker; each broker and node has a folder
    of its own in that of `checkpoint`.
    At the end of the block the nodes send what they have, then the broker saves and ends.
    """

    def __init__(
        self,
        settings: RunSettings,
        nodes: int,
        *,
        pace_seconds: float = 0.0,
        pin: bool = True,
        exchange: str = "hub",
        record: Path | None = None,
        **options: Unpack[ServeOptions],
    ) -> None:
        if settings.shards == AUTO_SHARDS:  # one PC has one port
            settings = replace(settings, shards=1)
        self.settings, self.nodes, self.pace_seconds, self.pin = settings, nodes, pace_seconds, pin
        self.exchange, self._options = exchange, options
        checkpoint = options.get("checkpoint")
        self._folder = checkpoint if isinstance(checkpoint, Path) else None
        self._records, self._recorder = record, None if record is None else make_recorder(record)
        self._brokers: list[BrokerThread] = []
        self._children: list[_Child] = []
        self._members: dict[str, dict[str, int | float | str | bool]] = {}
        self._stopping = False

    def __enter__(self) -> Federation:
        try:
            for shard in range(self.settings.shards):
                self._brokers.append(self._start_broker(shard))
            for index in range(self.nodes):
                self._children.append(self._start_node(index))
        except BaseException:
            self.kill()
            self.stop_brokers()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.stop_nodes()
        finally:
            self.kill()
            self.stop_brokers()

    def _start_broker(self, shard: int) -> BrokerThread:
        shards, options = self.settings.shards, self._options.copy()
        if shard:  # it has its settings and its run from the first
            every, keep = options.get("checkpoint_every", ""), options.get("checkpoint_keep", 3)
            place = ShardPlace(shard=shard, shards=shards, first=self.broker.address)
            options = ServeOptions(checkpoint_every=every, checkpoint_keep=keep, place=place)
        elif self._recorder is not None:
            options["events"] = self._recorder
        if self._folder is not None:
            options["checkpoint"] = self._folder / ("broker" if shards == 1 else f"shard-{shard}")
        return BrokerThread(HERE, None if shard else self.settings, **options)

    def stop_brokers(self) -> None:
        """Have the brokers save and end, the first last; raise what ended one that failed. Safe to call twice."""
        with contextlib.ExitStack() as stack:
            if self._recorder is not None:
                stack.callback(self._recorder.close)
            for broker in self._brokers:  # the first last
                stack.callback(broker.stop)

    @property
    def broker(self) -> BrokerThread:
        """The broker, or the first of several, once the block has begun."""
        return self._brokers[0]

    @property
    def roster(self) -> Roster | None:
        """The broker's newest roster; once the nodes are to end, with the newest row of each."""
        roster = self.broker.roster
        if roster is None:
            return None
        self._members |= {str(member["name"]): member for member in roster.members}
        return replace_fields(roster, members=tuple(self._members.values())) if self._stopping else roster

    @property
    def running(self) -> bool:
        """False once the broker has ended, or no node is left."""
        return self.broker.running and bool(self._children)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The nodes that have not ended, as far as `departures` has looked."""
        return tuple(child.process.pid for child in self._children)

    def departures(self) -> list[Departure]:
        """Return the nodes that have ended since it was last asked."""
        gone = [child for child in self._children if child.process.poll() is not None]
        self._children = [child for child in self._children if child not in gone]
        return [self._bury(child) for child in gone]

    def stop_nodes(self, timeout_seconds: float = FLUSH_SECONDS) -> list[Departure]:
        """Ask every node to send what it has and to end; return those that had ended before, or did not end well."""
        before, self._stopping = self.departures(), True
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGINT)
        until = time.monotonic() + timeout_seconds
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))
        well = (0, -signal.SIGINT)  # by that signal: Python gives it back its own meaning at its very end
        return [*before, *(gone for gone in self.departures() if gone.code not in well)]

    def kill(self) -> None:
        for child in self._children:
            child.process.kill()
            child.process.wait()
            self._bury(child)
        self._children.clear()

    def _start_node(self, index: int) -> _Child:
        name = f"node-{index + 1}"
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "zmqtrain.cli.node", self.broker.address, "--name", name, "--follow-stdin"]
        if self._folder is not None and self.settings.shards == 1 and self.exchange == "hub":
            command += ["--checkpoint", str(self._folder / name), "--new-run"]
            command += ["--checkpoint-every", self._options.get("checkpoint_every", "")]
            command += ["--checkpoint-keep", str(self._options.get("checkpoint_keep", 3))]
        if self._records is not None:
            command += ["--record", str(self._records / f"{name}.jsonl")]
        process = subprocess.Popen(
            sharing_card([*command, "--pace-seconds", str(self.pace_seconds), "--exchange", self.exchange]),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which tells its nodes in order
        )
        if self.pin and (cores := share_of_cores(index, self.nodes)):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, cores)
        return _Child(name, process, errors)

    def _bury(self, child: _Child) -> Departure:
        if child.process.stdin is not None:
            child.process.stdin.close()
        child.errors.seek(0, os.SEEK_END)
        child.errors.seek(max(0, child.errors.tell() - LAST_WORDS))
        lines = [line for line in child.errors.read().decode(errors="replace").splitlines() if line.strip()]
        child.errors.close()
        return Departure(child.name, child.process.returncode, lines[-1].strip() if lines else "")


def make_recorder(folder: Path) -> BrokerRecorder:
    """Return the recorder of a broker that writes in a folder, which is made if it is not there. Raises ConfigError."""
    make_folder(folder, "--record")
    return BrokerRecorder(folder / "broker.jsonl", process_facts())


def share_of_cores(index: int, nodes: int) -> set[int]:
    """Return the cores of node `index` of `nodes`: an equal part of this process's, in turn where there are too few."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    if nodes >= len(cores):
        return {cores[index % len(cores)]}
    each = len(cores) // nodes
    return set(cores[index * each : (index + 1) * each])


def _run(config: LocalConfig) -> int:
    log_to_stderr(config.verbose)
    settings = RunSettings.from_dict(config.to_dict())
    check_program(settings)
    run, folder = new_run(), config.checkpoint
    if folder is None and not config.no_checkpoint:
        folder = RunFolders().folder(run)
    check_checkpoint(folder)
    federation = Federation(
        settings,
        config.nodes,
        pace_seconds=config.pace_seconds,
        checkpoint=folder,
        run=run,
        checkpoint_every=config.checkpoint_every,
        checkpoint_keep=config.checkpoint_keep,
        exchange=config.exchange,
        record=config.record,
        beginning=config.read_beginning(),
    )
    lost: list[Departure] = []
    with federation:
        hub = federation.broker.broker.hub
        if hub.units.ledger.finished:
            raise ConfigError(finished(hub.run, hub.version, hub.units.ledger.total))
        say(saving(folder))
        say(f"its broker is at {federation.broker.address}")
        nodes, where = plural(config.nodes, "node"), federation.broker.address
        title = f"local: {nodes} to train {describe_program(settings)} at {where}"
        display = Display(federation, title)
        stopping = "stopping: the nodes send what they have computed (Ctrl-C again to quit at once)"
        with first_interrupt(lambda: display.say(stopping)) as interrupted, display:
            until = time.monotonic() + config.seconds if config.seconds else float("inf")
            while federation.running and not interrupted() and time.monotonic() < until:
                for gone in federation.departures():
                    if gone.code != 0:
                        lost.append(gone)
                        display.say(str(gone))
                time.sleep(LOOK_SECONDS)
            lost += [gone for gone in federation.stop_nodes() if gone.code != 0]
            federation.stop_brokers()  # the display ends with what is true then
    if len(lost) == config.nodes and not interrupted():
        raise ZmqTrainError(f"no node could train; {lost[0]}")
    roster = federation.roster
    if roster is not None and roster.scores:
        print(f"held-out {format_scores(roster.scores)} at version {roster.score_version}")
    broker = federation.broker.broker
    statistics = broker.statistics()
    over = broker.hub.units.ledger.finished
    say(result(statistics.version, statistics.contributions, broker.folder, folder, PROGRAM, over))
    return 0


main = command(LocalConfig, PROGRAM, _run)
