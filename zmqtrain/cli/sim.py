"""Simulation of a run on modelled computers and links, and replay of a recorded one: `zmqtrain sim SCENARIO.toml`.

Rule 1: training is real, time is modelled.  Rule 2: a scenario is a file (`zmqtrain.sim.reading`); the command adds the
seed, and where the records go.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.box import HEAVY_HEAD
from rich.table import Table

from zmqtrain.cli.display import (
    Terminal,
    figures_table,
    format_bytes,
    format_count,
    format_number,
    format_scores,
    format_seconds,
    log_to_stderr,
    table_of,
)
from zmqtrain.cli.settings import LogOptions, command, make_folder
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_SHARDS

if TYPE_CHECKING:
    from zmqtrain.pipeline.schedule import Task
    from zmqtrain.sim.pipeline import PipelineRun, PipelineScenario
    from zmqtrain.sim.replay import ReplayResult
    from zmqtrain.sim.run import SimResult


PROGRAM = "zmqtrain sim"
INTERRUPTED = 130
"""The exit code of who was ended by SIGINT, as shells have it: no script takes half a run for a whole one."""


@dataclass(frozen=True, kw_only=True)
class SimConfig(LogOptions):
    """Simulate the run that SCENARIO (a TOML file) describes: real training and codecs, modelled computers and wires.

    The same scenario and seed give the same run, bit for bit. Example: zmqtrain sim bench/scenarios/straggler.toml

    A file of [[pipeline]] tables has models cut over several PCs: their schedules, with modelled times for everything.
    Example: zmqtrain sim bench/scenarios/pipeline.toml

    With --replay, a recorded real run is computed again instead, in the order in which it happened; it ends with the
    same bits (exit code 0) or says where it first differs (1). Example: zmqtrain sim --replay broker.jsonl pc-*.jsonl
    """

    scenario: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="SCENARIO")] = None
    """What is simulated: the run's settings, its nodes with their speeds and faults, and the wires."""
    seed: int = -1
    """Seeds the parameters, the data and all delays; -1: as the scenario says."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write every record of the run to this file, one line of JSON each."""
    record: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Write what a real broker (broker.jsonl) and real nodes (NAME.jsonl) would record into this folder."""
    replay: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="BROKER NODE [NODE ...]")] = ()
    """The files that the broker and all nodes of a run have written (--record), the broker's first: replay that run."""
    quiet: bool = False
    """Print no progress."""

    def __post_init__(self) -> None:
        if self.seed < -1:
            raise ConfigError(f"seed must be at least 0 (or -1: as the scenario says), got {self.seed}")
        if self.scenario is None and not self.replay:
            raise ConfigError("say what to simulate: zmqtrain sim SCENARIO.toml, or --replay with the files of a run")
        if self.scenario is not None and self.replay:
            raise ConfigError("a scenario is simulated, or a recorded run replayed, not both: leave one of them out")
        if len(self.replay) == 1:
            raise ConfigError("--replay takes the broker's file and, behind it, those of all its nodes")


def _run(config: SimConfig) -> int:
    log_to_stderr(config.verbose)
    if not config.verbose:  # the broker and nodes of a simulation log as real ones do, by the wall's clock
        logging.getLogger("zmqtrain").setLevel(logging.WARNING)
    try:
        return _replay(config.replay) if config.scenario is None else _simulate(config, config.scenario)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted: there is no result", file=sys.stderr)
        return INTERRUPTED


def _simulate(config: SimConfig, scenario_file: Path) -> int:
    from zmqtrain.monitor.records import write_records
    from zmqtrain.sim.pipeline import PipelineScenario
    from zmqtrain.sim.reading import read_scenario  # imports jax: not for --help
    from zmqtrain.sim.run import simulate

    scenario = read_scenario(scenario_file, None if config.seed < 0 else config.seed)
    if config.json is not None:
        write_records(config.json, ())  # to know now, not after the run, that it cannot be written
    console = Terminal()
    if isinstance(scenario, PipelineScenario):
        if config.record is not None:
            raise ConfigError("--record is for a broker and its nodes, and a pipeline has no broker: take --json")
        runs = [pipeline.run(scenario.link, scenario.seed) for pipeline in scenario.pipelines]
        console.print(pipelines_table(scenario, runs))
        if config.json is not None:
            write_records(
                config.json, (one for number, run in enumerate(runs) for one in pipeline_records(number, run))
            )
        return 0
    watch = None if config.quiet else partial(_show, console)
    if config.record is not None:
        make_folder(config.record, "--record")
        if scenario.settings.shards == AUTO_SHARDS:  # a run of several brokers cannot be lived again
            scenario = replace(scenario, settings=replace(scenario.settings, shards=1))
    result = simulate(scenario, watch=watch, record=config.record)
    for table in result_tables(result):
        console.print(table)
    if config.json is not None:
        write_records(config.json, result.records)
    return 0


def _replay(files: Sequence[Path]) -> int:
    from zmqtrain.monitor.records import read_records
    from zmqtrain.sim.replay import replay  # imports jax

    broker, *nodes = (read_records(file) for file in files)
    for file, records in zip(files[1:], nodes, strict=True):
        if not records:
            raise ConfigError(f"{file} holds no event: that node never joined the run; leave the file out")
    result = replay(broker, nodes)
    console = Terminal()
    console.print(replay_table(result))
    if result.equal:
        console.print(f"equal: {_crcs(result)}", soft_wrap=True)
        return 0
    console.print(f"different: {result.difference}", soft_wrap=True)
    return 1


def _crcs(result: ReplayResult) -> str:
    ended = sum(node.recorded_crc is not None for node in result.nodes.values())
    nodes = f"the final parameters of {ended} of {len(result.nodes)} nodes"
    if result.recorded_crc is None:
        return f"every aggregate, and {nodes}; the broker's record has no end (the shared model is {result.crc:08x})"
    return f"every aggregate, the shared model ({result.crc:08x}), and {nodes}"


def replay_table(result: ReplayResult) -> Table:
    title = f"replayed: version {result.version}, {result.contributions:,} contributions"
    rows = [
        (name, f"{node.steps:,}", f"{node.offers:,}", f"{node.updates:,}", _crc(node.crc), _crc(node.recorded_crc))
        for name, node in result.nodes.items()
    ]
    return table_of(("node", "steps", "offers", "updates", "crc", "recorded"), rows, left="node", title=title)


def _crc(crc: int | None) -> str:
    return "" if crc is None else f"{crc:08x}"


def _show(console: Terminal, record: dict[str, Any]) -> None:
    """Print what is worth a line while the simulation runs."""
    when = f"{record['seconds']:10.2f} s  "
    if record["kind"] == "evaluation":
        samples = format_count(record["samples"])
        console.print(f"{when}version {record['version']}, {samples} samples: loss {format_number(record['loss'], 4)}")
    elif record["kind"] == "membership":
        console.print(f"{when}{record['node']} {record['what']}")


def pipelines_table(scenario: PipelineScenario, runs: Sequence[PipelineRun]) -> Table:
    """Return what each pipeline did, a row each."""
    figures = ("", "schedule", "S", "M", "steps", "seconds", "efficiency", "port")
    rows = [
        (
            pipeline.name or f"pipeline {number}",
            pipeline.schedule if pipeline.schedule == "gpipe" else f"{pipeline.schedule}, {pipeline.depth}",
            str(pipeline.stages), str(pipeline.micro_batches), str(pipeline.steps), f"{run.seconds:.2f}",
            f"{run.efficiency:.3f}",
            f"{max(max(run.port_use(stage)) for stage in range(pipeline.stages)):.0%}",
        )
        for number, (pipeline, run) in enumerate(zip(scenario.pipelines, runs, strict=True))
    ]  # fmt: skip
    return table_of(figures, rows, left="", title="pipelines of S stages, M micro-batches a step")


def pipeline_records(number: int, run: PipelineRun) -> Iterator[dict[str, Any]]:
    """Give the tasks and messages of one simulated pipeline as records, and its end."""
    from zmqtrain.monitor.records import record

    for task in run.tasks:
        yield record("task", task.begin, pipeline=number, stage=task.stage, end=task.end, **_facts(task.task))
    for message in run.messages:
        places = {"pipeline": number, "sender": message.sender, "receiver": message.receiver}
        yield record("message", message.begin, **places, end=message.end, **_facts(message.task))
    busy = [run.busy(stage) for stage in range(run.stages)]
    yield record("pipeline_end", run.seconds, pipeline=number, efficiency=run.efficiency, busy=busy)


def _facts(task: Task) -> dict[str, Any]:
    return {"what": task.kind, "step": task.step, "micro_batch": task.micro_batch, "version": task.version}


def result_tables(result: SimResult) -> list[Table]:
    rows = {
        "virtual time": f"{format_seconds(result.seconds)}, simulated in {format_seconds(result.wall_seconds)}",
        "held-out": format_scores(result.scores),
        "steps": f"{result.steps:,}",
        "samples in the model": format_count(result.samples),
        "contributions": f"{result.contributions:,} in {max(0, result.version):,} aggregates, {result.refused} refused",
        "sent, received": f"{format_bytes(result.bytes_up)}, {format_bytes(result.bytes_down)}",
    }
    if result.target_seconds < inf:
        rows["target loss after"] = format_seconds(result.target_seconds)
    if not result.nodes:
        return [figures_table(rows)]
    columns = ("node", "steps", "offers", "put off", "aggregates", "median age", "sent", "received")
    ended = [
        (
            name, f"{figures.steps:,}", str(figures.offers), str(figures.offers_refused),
            str(figures.aggregates_applied), format_number(figures.age_steps, 0), format_bytes(figures.bytes_sent),
            format_bytes(figures.bytes_received),
        )
        for name, node in result.nodes.items()
        for figures in [node.statistics]
    ]  # fmt: skip
    title = "nodes that ended by themselves"
    return [figures_table(rows), table_of(columns, ended, left="node", title=title, box=HEAVY_HEAD, pad_edge=True)]


main = command(SimConfig, PROGRAM, _run)
