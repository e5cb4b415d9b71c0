"""Train on this PC as a node of a run: `zmqtrain-node HUB`.

Rule 1: what is trained, and how, the broker says; this PC's own matters are its name, where its data lies, its pace.
Rule 2: training runs in the main thread. The first Ctrl-C ends it after the current step, and what is pending is sent;
before the first step has ended there is nothing to send, and it ends the node at once. So does the second one, always.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, TypeVar

from rich.table import Table

from zmqtrain.cli.display import (
    Display,
    Terminal,
    figures_table,
    format_bytes,
    format_count,
    format_number,
    format_scores,
    format_seconds,
    log_to_stderr,
    say,
)
from zmqtrain.cli.ending import end_signals, leave_at_once, leave_without_teardown, watch_signals
from zmqtrain.cli.settings import (
    CheckpointOptions,
    File,
    FileOptions,
    Folder,
    HubOptions,
    Hubs,
    PortOptions,
    check_host,
    command,
)
from zmqtrain.core.errors import ConfigError, DataError, JoinRefused, ModelMismatch
from zmqtrain.core.installed import command_word
from zmqtrain.core.launcher import service
from zmqtrain.core.settings import RunSettings, require
from zmqtrain.core.specs import parse_bytes
from zmqtrain.monitor.recorder import NodeRecorder, process_facts
from zmqtrain.monitor.tensorboard import ScalarThread, ScalarWriter
from zmqtrain.node.connect import NO_CHECKPOINT_IN_LOCKSTEP, connect
from zmqtrain.node.node import Node
from zmqtrain.node.shards import ShardedNode
from zmqtrain.planning.costs import CARD_BYTES_OF_OTHERS, MemoryEstimate, Place
from zmqtrain.planning.plans import link_share
from zmqtrain.programs import load_program, parse_arguments, program_arguments
from zmqtrain.session.hub_session import Solitude
from zmqtrain.synchronous.exchanges import GradientAccess, check_shards, read_exchange, unit_wait_seconds
from zmqtrain.train.induce import Induced, induced_from_spec
from zmqtrain.train.synchronous import Allreduce, Server, Synchronous
from zmqtrain.transport.address import parse_addresses
from zmqtrain.transport.key_folder import Access, find_access
from zmqtrain.transport.service_manager import ServiceManager


@dataclass(frozen=True, kw_only=True)
class NodeConfig(HubOptions, PortOptions, CheckpointOptions, FileOptions):
    """Train on this PC as a node of the run at HUB (tcp://HOST:PORT, as the broker printed it).

    What is trained, and how, the broker says. Ctrl-C ends this node after the current step: what it has computed is
    sent first; a second Ctrl-C quits at once.
    """

    hub: Hubs
    """The broker's address, for example tcp://192.168.1.10:5555. Several with commas are tried in turn: its own and
    its standby's."""
    name: str = ""
    """What people call this node; empty: this PC's name."""
    data: str = ""
    """Where the program's data lies on this PC; empty: where the broker's program_arguments say."""
    wait_seconds: float = 30.0
    pace_seconds: float = 0.0
    """Every step takes at least so long: to emulate a slower PC, or to leave the machine to others."""
    induce: str = ""
    """For experiments: delays of this node, drawn at random, as "cedar", "niagara,scale=0.1" or
    "mixture=0.1:0.02:0.8/0.3:0.05:0.2,message=0.05": each step begins late by a draw from a mixture of Gaussians
    (mean:deviation:weight, in seconds), each delta is sent late by |N(0, message)|, and overtakes none before it."""
    exchange: str = "hub"
    """hub: publish to the broker every so many steps, and wait for nobody. To train in lockstep with the other nodes,
    which must say the same: "allreduce:ring" (or tree, halving, naive, auto; size=4, overlap=next, bucket=8MB,
    check=100, timeout=600, codec=int8), or "server:bsp" (or async, bounded:s=3; optimizer=adam:rate=0.001)."""
    shards: int = 0
    """With --exchange server: how many brokers the run must have (the broker's --shard); 0: as many as it has."""
    codec_on: Literal["auto", "host", "device"] = "auto"
    """Where deltas are compressed (to the same bytes): auto: on the device that trains, unless that is a processor."""
    devices: Literal["one", "all"] = "one"
    """all: the devices of this PC (its GPUs) share each batch; its first axis is cut in as many equal parts."""
    anchor: Literal["device", "host"] = "device"
    """Where this node keeps the shared parameters: host frees a card of as much memory as they take in float32."""
    optimizer_on: str = "device"
    """In a run with pipelines, where the optimizer's state lies: device: with the parameters; host: in this PC's
    memory, which leaves a card to parameters and gradients; or a folder, in whose file it takes no memory. All PCs say
    the same (each its own folder)."""
    card_memory: str = ""
    """What each device has, as 6GB: a plan that cannot fit is refused before it begins; empty: what the device says
    it has, if it does."""
    checkpoint: Folder = None
    """A folder of this node's own: save here what it can go on from, and go on from that if there is something. It is
    then the node that it was; what it had computed and not sent is not lost. It needs no broker to begin."""
    new_run: bool = False
    """If the broker's run is another than the checkpoint's, set that aside and join the new run."""
    log_file: File = None
    """Write the log to this file as well."""
    record: File = None
    """Write what happens here to this file, an event a line (JSON): `zmqtrain sim --replay` lives it again, and
    `zmqtrain report` draws it."""
    tensorboard: Folder = None
    """Write this node's scalars and the held-out scores to this folder, once a second, for TensorBoard."""
    follow_stdin: bool = False
    """Quit at once when standard input closes: a program that starts nodes as children holds its other end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_addresses(self.hub)
        link_share(self.link, self.share)
        self.check_checkpoints(False)
        require("pace_seconds", self.pace_seconds, 0)
        self._check_exchange()
        if self.new_run and self.checkpoint is None:
            raise ConfigError(
                "new_run is for a node with a --checkpoint folder; without one it joins whatever run there is"
            )
        if self.checkpoint is not None and self.lockstep is not None:
            raise ConfigError(NO_CHECKPOINT_IN_LOCKSTEP)
        if self.card_memory:
            parse_bytes(self.card_memory, "card_memory")
        if self.induce:
            try:
                induced_from_spec(self.induce)
            except ConfigError as error:
                raise ConfigError(f"induce = {error}") from error

    @property
    def not_in_pipelines(self) -> list[str]:
        """The given flags that a PC of a pipeline cannot follow."""
        given = {
            "--exchange": self.exchange != "hub",
            "--checkpoint": self.checkpoint is not None,
            "--devices all": self.devices == "all",
            "--anchor host": self.anchor == "host",
            "--induce": bool(self.induce),
            "--tensorboard": self.tensorboard is not None,
        }
        return [flag for flag, is_given in given.items() if is_given]

    @property
    def lockstep(self) -> Synchronous | None:
        """How this node trains in lockstep with others; None: it publishes to the broker."""
        choice = read_exchange(self.exchange)
        return replace(choice, shards=self.shards) if self.shards and isinstance(choice, Server) else choice

    def _check_exchange(self) -> None:
        choice = read_exchange(self.exchange)
        require("shards", self.shards, 0)
        if self.shards and not isinstance(choice, Server):
            raise ConfigError("shards is given with --exchange server; elsewhere how many there are is the broker's")
        if self.shards and isinstance(choice, Server) and choice.shards not in (0, self.shards):
            raise ConfigError(f"--exchange {self.exchange} and --shards {self.shards} say two numbers of shards")
        if choice is not None and self.record is not None:
            raise ConfigError(
                f"what nodes exchange with --exchange {self.exchange} does not pass the broker, and cannot be recorded "
                "nor lived again: leave --record out"
            )


if TYPE_CHECKING:
    from zmqtrain.train.loop import TrainingResult
    from zmqtrain.train.program import Program

logger = logging.getLogger(__name__)
PROGRAM = "zmqtrain-node"
GOODBYE_SECONDS = 3.0
"""The most time for the goodbyes of a node that has trained nothing."""

Batch = TypeVar("Batch")


def check_card(program: Program, settings: RunSettings, config: NodeConfig) -> None:
    """Raise ConfigError, with settings that would fit, if a node of this run does not fit the device that trains.

    The limit is `card_memory` less the memory of others, or else what the device reports; without either (a processor)
    nothing is measured. A step's memory is measured, an exchange's is counted (`planning.costs`).
    """
    from zmqtrain.train.minibatch import FixedMinibatch, minibatch_from_spec
    from zmqtrain.train.program_wrappers import DataParallel
    from zmqtrain.train.step import card_bytes, measure_footprint, trains_on_processor  # imports jax

    limit = card_bytes()
    if config.card_memory:
        limit = max(0, parse_bytes(config.card_memory, "card_memory") - CARD_BYTES_OF_OTHERS)
    if limit is None:
        return
    minibatch = minibatch_from_spec(settings.minibatch)
    sharding = program.everywhere if isinstance(program, DataParallel) else None
    footprint = measure_footprint(program, minibatch, settings.seed, sharding)
    codec_on: Place = "device" if config.codec_on == "device" else "host"
    if config.codec_on == "auto" and config.anchor == "device" and not trains_on_processor():  # as `Node` decides it
        codec_on = "device"
    in_lockstep = 1 if config.lockstep is None else 2  # gradients in buckets, as large as a sum of them
    plan = MemoryEstimate(
        footprint.model,
        footprint.opt_state_bytes,
        settings,
        config.anchor,
        max(in_lockstep, minibatch.batches if isinstance(minibatch, FixedMinibatch) else minibatch.partitions),
        codec_on=codec_on,
        activation_bytes=footprint.activation_bytes,
    )
    advice = plan.advice(limit)
    if not plan.fits(limit):
        lines = ", ".join(f"{line.what} {line.device_bytes / 1e9:.2f}" for line in plan.lines if line.device_bytes)
        raise ConfigError(
            f"this run {advice}. In GB: {lines}. The anchor is this node's affair (--anchor host); fragments, the "
            "minibatch and the program's arguments are said where the broker is started"
        )
    logger.info("the card: %s", advice)


class NodeDisplay(Display):
    """The display of a node, which may have lost its hub."""

    def __init__(self, node: Node | ShardedNode, title: str) -> None:
        super().__init__(node, title)
        self._node = node

    def note(self) -> str:
        return say_alone(self._node.name, self._node.alone)


def _run(config: NodeConfig) -> int:
    log_to_stderr(config.verbose, config.log_file)
    if config.follow_stdin:
        threading.Thread(target=_end_with_stdin, name="zmqtrain-stdin", daemon=True).start()
    manager = ServiceManager(service())
    interruption = Interruption(manager)
    interruption.install()
    if config.checkpoint is None or not any(config.checkpoint.glob("checkpoint-*")):  # which may know another place
        check_host(config.hub)
    access = find_access(config.hub, config.server_key, config.keys)
    try:
        return _run_node(config, access, interruption, manager)
    except JoinRefused as refused:
        if refused.reason != "pipeline":
            raise
    return _run_in_pipeline(config, access, interruption, manager)


def _run_in_pipeline(config: NodeConfig, access: Access, interruption: Interruption, manager: ServiceManager) -> int:
    """Train as one PC of a pipeline."""
    from zmqtrain.cli.node_pipeline import PipelineOptions, settings_of_run, train_in_pipeline  # imports jax

    if flags := config.not_in_pipelines:
        raise ConfigError(
            f"this run trains with pipelines (--pipeline at its broker), and there a node takes no {', '.join(flags)}"
        )
    if config.record is not None:
        config.record.unlink(missing_ok=True)  # nothing but the beginning of a connection that was refused
    options = PipelineOptions(**{field.name: getattr(config, field.name) for field in fields(PipelineOptions)})
    settings = settings_of_run(options, access)
    program = load_run_program(settings, config.data, config.hub)
    manager.ready(f"a PC of a pipeline at {config.hub}")
    pace = partial(paced, pace_seconds=config.pace_seconds)
    result = train_in_pipeline(options, settings, program, access, interruption, pace)
    rows = {
        "trained for": format_seconds(result.seconds),
        "steps": f"{result.steps:,}",
        program.sample_word: format_count(result.steps * program.samples_per_batch),
        "last loss": format_number(result.loss),
        "lost PCs": f"{result.lost}",
    }
    node = result.node
    Terminal().print(figures_table(rows))
    say(model_line(node.run, node.last_version, node.ended_with_run, config.hub, config.keys))
    return 0


def _run_node(config: NodeConfig, access: Access, interruption: Interruption, manager: ServiceManager) -> int:
    """Train with the whole model. Raises JoinRefused (pipeline) where the run is one of pipelines."""
    recorder = None
    if config.record is not None:
        recorder = NodeRecorder(config.record, {**process_facts(), "data": config.data})
    if recorder is not None:
        interruption.goodbyes.append(recorder.close)
    writer = None if config.tensorboard is None else ScalarWriter(config.tensorboard)
    scalars: ScalarThread | None = None
    try:
        with connect(
            config.hub,
            config.name or None,
            keys=access,
            timeout_seconds=config.wait_seconds,
            codec_on=config.codec_on,
            events=recorder,
            link=config.link,
            share=config.share,
            exchange="" if config.lockstep is None else config.lockstep.name,
            checkpoint=config.checkpoint,
            checkpoint_every=config.checkpoint_every,
            checkpoint_keep=config.checkpoint_keep,
            new_run=config.new_run,
        ) as node:
            interruption.goodbyes.insert(0, node.close)
            if writer is not None:
                writer.node = node.name
                scalars = ScalarThread(writer, node)
                interruption.goodbyes.append(scalars.close)
            manager.ready(f"{node.name}: a node of {node.run} at {node.address}")
            check_shards(config.lockstep, node.settings)  # before it waits for others
            if config.optimizer_on != "device":
                raise ConfigError(
                    "--optimizer-on is for runs with pipelines (--pipeline at the broker): in this run a node has the "
                    "whole model, and its optimizer's state with the parameters. Leave the flag out"
                )
            from zmqtrain.train.leaves import host_leaves  # these import jax: not before the hub has answered
            from zmqtrain.train.program_wrappers import on_all_devices
            from zmqtrain.train.seen import name_device

            everywhere = config.devices == "all"
            program = load_run_program(node.settings, config.data, node.address)
            if everywhere:
                program = on_all_devices(program)
            check_card(program, node.settings, config)
            induced = induced_from_spec(config.induce, node.settings.seed) if config.induce else Induced()
            slowed = f", with induced delays ({config.induce})" if config.induce else ""
            device = name_device(everywhere=everywhere)
            title = f"{node.name}: training {program.name} at {node.address} on {device}{slowed}"
            with NodeDisplay(node, title) as interruption.display:
                result = _train(node, program, interruption, config, induced, access)
            over = node.ended_with_run
            if recorder is not None:
                recorder.ended(result.summary, host_leaves(result.params))
    except BaseException:
        if interruption.leaves:  # another thread ends this process: what fails here fails for that
            threading.Event().wait()
        raise
    finally:
        if scalars is not None:
            scalars.close()
        if recorder is not None:
            recorder.close()
    Terminal().print(result_table(result, program.sample_word, in_lockstep=config.lockstep is not None))
    say(model_line(node.run, result.statistics.version, over, node.address, config.keys))
    return 0


def model_line(run: str, version: int, over: bool, address: str, keys: Path | None) -> str:
    """Return a node's last words about the model: the broker has the file, and this node's parameters may differ.

    over: the run ended, and the node has its last parameters.  keys: as typed.
    """
    if over:
        return f"{run} is over: this node ended with its last parameters, of version {version}; its broker has the file"
    how = f"{command_word('zmqtrain')} export {address}" + (f" --keys {shlex.quote(str(keys))}" if keys else "")
    return (
        f"this node left {run} at version {version}, and the run goes on: the model is the broker's, not what this "
        f"node held. To take it out:\n  {how}"
    )


def _train(
    node: Node | ShardedNode,
    program: Program,
    interruption: Interruption,
    config: NodeConfig,
    induced: Induced,
    access: Access,
) -> TrainingResult:
    from zmqtrain.train.gradients import GradientLoop, GradientOptions
    from zmqtrain.train.loop import TrainingLoop
    from zmqtrain.train.step import LoopHooks

    lockstep, wait_seconds = config.lockstep, unit_wait_seconds(node.settings)
    coming = node.batches(program) if lockstep is None else node.batches_as_they_come(program, wait_seconds)
    batches = paced(interruption.watch(coming), config.pace_seconds)
    slow = induced.compute_delays(node.name)
    node.message_delay = induced.message_delays(node.name) if induced.message_sigma else None
    hooks = LoopHooks(stop=interruption, before_step=lambda: time.sleep(slow()))
    try:
        if lockstep is None:
            return TrainingLoop(program, node, hooks, config.anchor).run(batches)
        options = GradientOptions(lockstep.bucket_bytes)
        if isinstance(lockstep, Allreduce):
            options = GradientOptions(lockstep.bucket_bytes, lockstep.overlap, lockstep.check_steps)
        gradients = GradientAccess(lockstep, node, access.credentials)
        return GradientLoop(program, node, gradients, options, hooks, config.anchor).run(batches)
    except ModelMismatch as error:
        raise ModelMismatch(
            f"{error}. The run's model was made from the program arguments (and the data) that its first node had, or "
            "is that of the file that its broker began with (--from): the same zmqtrain and the same data belong on "
            "every PC, and program arguments that fit that file at the broker",
            error.leaf,
        ) from error


def load_run_program(settings: RunSettings, data: str, hub: str) -> Program:
    """Make the program that the broker names. data: its place on this PC, "" for the broker's arguments.

    The run's seed is the program's unless the arguments name one. Raises ConfigError and DataError, which say on which
    side to change what.
    """
    if not settings.program:
        raise ConfigError(
            f"the run at {hub} has no program: it was started for training loops of one's own (zmqtrain.connect). To "
            "have nodes train one, name it where the broker is started: zmqtrain-broker --program text"
        )
    arguments: dict[str, object] = dict(parse_arguments(settings.program_arguments))
    if data:
        arguments["data"] = data
    try:
        takes = program_arguments(settings.program)
    except ConfigError as error:
        raise ConfigError(
            f"the run at {hub} trains the program {settings.program!r}, and this PC cannot: {str(error).rstrip('.')}. "
            f"Install the package that brings it here, on this PC, for {sys.executable}; the broker needs no change"
        ) from error
    try:
        if "seed" in takes:
            arguments.setdefault("seed", settings.seed)
        return load_program(settings.program, arguments)
    except ConfigError as error:
        own = "--data is this node's; the other arguments are" if data else "The program and its arguments are"
        raise ConfigError(f"{str(error).rstrip('.')}. {own} the broker's: correct them where it is started") from error
    except DataError as error:
        raise DataError(
            f"{str(error).rstrip('.')}. If the data lies elsewhere on this PC, say where: {PROGRAM} {hub} --data PLACE"
        ) from error


def say_alone(name: str, alone: Solitude | None) -> str:
    """Return the note of a node that trains without a hub; "" where it has one."""
    if alone is None:
        return ""
    loss = f", loss {format_number(alone.loss)}" if math.isfinite(alone.loss) else ""
    return (
        f"{name} has had no hub for {format_seconds(alone.seconds)} ({alone.where}: {alone.why}); it tries again, and "
        f"trains on alone: step {alone.step:,}{loss}"
    )


class Interruption:
    """SIGINT, SIGTERM and SIGHUP at a node: the first stops after the current step, the second at once.

    The loop calls it as its `stop`. Before the first step has ended, the first signal ends the process from a thread of
    its own, because the main thread may compile for long. While the main thread waits for data, it ends the waiting.
    goodbyes: called in order before such an end, for GOODBYE_SECONDS at most.  manager: the service manager; the first
    signal is reported to it.
    """

    def __init__(self, manager: ServiceManager | None = None) -> None:
        self._manager = manager or ServiceManager()
        self.asked = self.leaves = False
        self.display: Display | None = None
        self.goodbyes: list[Callable[[], object]] = []
        self._beginning, self._waiting = True, False

    def install(self) -> None:
        """Take the signals over; only in the main thread."""
        watch_signals(self.noticed)
        for number in end_signals():
            signal.signal(number, self.handle)

    def __call__(self) -> bool:
        return self.asked

    def noticed(self, count: int) -> None:
        """Record a signal at once, in the thread that watches for signals."""
        if count > 1:
            leave_at_once()
        self._manager.stopping("ends after its step, once what it has computed is sent")
        if self._beginning:
            self.leaves = True
            threading.Thread(target=self._leave, name="zmqtrain-leaving", daemon=True).start()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the first signal in the main thread. Raises KeyboardInterrupt while it waits for data."""
        if self.asked:  # `noticed` ends the process
            return
        self.asked = True
        if self.display is not None:
            self.display.say("stopping: what is computed is sent first (Ctrl-C again to quit at once)")
        if self._waiting and not self._beginning:
            raise KeyboardInterrupt

    def _leave(self) -> None:
        def say() -> None:
            for goodbye in self.goodbyes:
                goodbye()

        saying = threading.Thread(target=say, name="zmqtrain-goodbye", daemon=True)
        saying.start()
        saying.join(GOODBYE_SECONDS)
        leave_without_teardown()

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches until a signal interrupts the wait for one."""
        following = iter(batches)
        while True:
            try:
                self._waiting = True
                batch = next(following)
                self._waiting = False
            except (StopIteration, KeyboardInterrupt):
                self._waiting = False
                return
            yield batch
            self._beginning = False


def paced(batches: Iterable[Batch], pace_seconds: float) -> Iterator[Batch]:
    """Yield the batches at intervals of at least `pace_seconds`; None passes. Late ones shorten no later interval."""
    due = 0.0
    for batch in batches:
        if batch is None:
            yield batch
            continue
        if pace_seconds and (early := due - time.monotonic()) > 0:
            time.sleep(early)
        due = time.monotonic() + pace_seconds
        yield batch


def result_table(result: TrainingResult, sample_word: str, in_lockstep: bool = False) -> Table:
    """Return the figures of a node that has ended. in_lockstep: each step was an exchange."""
    figures = result.statistics
    exchanges = max(1, figures.aggregates_applied)
    rows = [
        ("trained for", format_seconds(result.seconds)),
        ("steps", f"{figures.steps:,}"),
        (sample_word, format_count(result.samples)),
        ("held-out", format_scores(result.scores)),
        ("offers", f"{figures.offers} sent, {figures.offers_refused} put off"),
        ("aggregates", f"{figures.aggregates_applied} applied, up to version {figures.version}"),
        ("sent, received", f"{format_bytes(figures.bytes_sent)}, {format_bytes(figures.bytes_received)}"),
        ("median age", f"{format_number(figures.age_steps, 0)} steps"),
        ("held", f"{1000 * figures.held_seconds / exchanges:.1f} ms of training per exchange"),
    ]
    left_out = ("offers", "aggregates", "median age") if in_lockstep else ()
    return figures_table({name: value for name, value in rows if name not in left_out})


def _end_with_stdin() -> None:
    """Leave when standard input closes, because the parent is gone then.

    Reads the descriptor, because a thread that holds the lock of `sys.stdin` aborts the interpreter's regular end.
    """
    while os.read(0, 4096):
        pass
    leave_at_once()


main = command(NodeConfig, PROGRAM, _run, service=True)

if __name__ == "__main__":
    sys.exit(main())
