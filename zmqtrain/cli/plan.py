"""The best settings of a run before it begins, and their effect: `zmqtrain plan`.

Rule 1: it computes by the same functions as a broker that plans and a node that estimates its memory (`planning`).
Rule 2: the exit code is 1 if the plan does not fit the card.
Rule 3: with `--tokens` the plan is of pipelines (`plan_pipeline`): models that are cut over several nodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from shlex import quote
from typing import Any, Literal

from rich.table import Table

from zmqtrain.cli.display import Terminal, figures_table, format_bytes, format_count, plural, table_of
from zmqtrain.cli.plan_pipeline import PipelineOptions, PipelineQuestion, run_pipeline_plan
from zmqtrain.cli.settings import Shards, command
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_SHARDS, UNDIVIDED_NODES, RunSettings, require
from zmqtrain.core.specs import parse_bytes, parse_count, parse_rate
from zmqtrain.core.types import LeafSpec
from zmqtrain.planning.costs import CARD_BYTES_OF_OTHERS, MemoryEstimate, Place
from zmqtrain.planning.plans import RunPlan, Wish, make_plan, variants
from zmqtrain.planning.schedule import NODE_BATCHES, SPREAD, averaging_gain, model_of
from zmqtrain.protocol.hosting import division

PROGRAM = "zmqtrain plan"
DOES_NOT_FIT = 1
NOT_KNOWN = -1.0

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class PlanConfig(PipelineOptions):
    """Say what a run can be set to (k, d, codec, fragments), and what it then does: its efficiency, the age of its
    aggregates, the load of the hub's port, the memory of a card; and the same with more brokers and faster hubs.

    Example: zmqtrain plan --params 100M --nodes 8 --link 1gbit --step-ms 180 --memory 6GB --activations 2GB

    With --tokens: how a model that no card holds is cut over several nodes, and how busy they then are.
    Example: zmqtrain plan --params 1B --nodes 4 --memory 6GB --tokens 1024
    """

    params: str
    """How many parameters the model has: 100M, 1.3B, 25000000."""
    nodes: int
    """How many nodes train."""
    step_ms: float = NOT_KNOWN
    """How long a step of a node takes alone, in milliseconds; not needed with tokens."""
    link: str = "1gbit"
    """The rate of every node's port."""
    hub_link: str = ""
    """The rate of each broker's port; empty: as link."""
    share: float = 0.8
    """What training may take of every port; the rest is left to ssh, NFS and data."""
    codec: str = ""
    """How deltas are coded (docs/codecs.md); empty: as is best for the time to a loss."""
    broadcast_codec: str = ""
    """How aggregates are coded; empty: as codec."""
    fragments: int = 0
    """One of so many parts of the model in each exchange, in turn; 0: the whole model in each."""
    every: int = 0
    """k, to see what it does; 0: as is best for the time to a loss."""
    delay: int = 0
    """d, to see what it does; 0: when the aggregate is there."""
    critical: float = NODE_BATCHES
    """The critical batch size of your training, in batches of one node: with so many nodes a sample teaches half of
    what it does with one. `zmqtrain status` measures it in a run ("another PC would add ...")."""
    shards: Shards = AUTO_SHARDS
    """How many brokers share the work; auto: as many as a broker's auto, on the hub and on nodes."""
    shards_on_nodes: bool = False
    """The brokers run on the nodes, and share their ports; else each has a port of its own."""
    step_on: Literal["device", "host"] = "device"
    """Where a step is computed: on a card, or on the processor, whose cores it then shares with the codec."""
    codec_on: Literal["auto", "device", "host"] = "auto"
    """Where deltas are compressed; auto: where the step is computed."""
    cores: float = 4.0
    """Cores of a node's processor."""
    hub_cores: float = 4.0
    """Idle cores of the hub's processor: up to four of them share a release of sparse deltas."""
    node_ns: float = NOT_KNOWN
    """CPU time of a node's codec per exchange and parameter, in ns, as you measured it (bench/efficiency.py)."""
    hub_ns: float = NOT_KNOWN
    """CPU time of the hub per contribution and parameter, in ns, as you measured it (bench/efficiency.py)."""
    held_ms: float = NOT_KNOWN
    """How long the training thread is held per exchange, as you measured it."""
    memory: str = ""
    """What the card has, as 6GB: says whether it fits, and if not, what would. With tokens one for all nodes, or one
    for each: 6GB,6GB,12GB."""
    activations: str = ""
    """What the forward and backward pass of one batch takes, as 2GB; empty: not counted."""
    optimizer_slots: int = 2
    """How many values the optimizer keeps per parameter: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    dtype: Dtype = "float32"
    """Of the parameters (and of the optimizer's values)."""
    anchor: Literal["device", "host"] = "device"
    """Where the shared parameters are kept."""
    batches: int = 1
    """How many batches' gradients one step is made of."""
    json: bool = False
    """One JSON object."""

    def __post_init__(self) -> None:
        parse_count(self.params, "params")
        parse_rate(self.link, "link")
        for name in ("hub_link", "memory", "activations"):
            for value in filter(None, getattr(self, name).split("," if self.tokens and name == "memory" else None)):
                (parse_rate if name == "hub_link" else parse_bytes)(value, name)
        require("nodes", self.nodes, 1)
        require("batches", self.batches, 1)
        if not self.critical > 0:
            raise ConfigError(f"critical is a batch size, in batches of one node: more than 0, not {self.critical:g}")
        self.check_pipeline()
        if self.step_ms == NOT_KNOWN and not self.tokens:
            raise ConfigError(
                "say how long a step of a node takes (--step-ms 180); or, for a model that one card does not hold, how "
                "many tokens a micro-batch has (--tokens 1024)"
            )
        if not (self.step_ms > 0 or self.tokens):
            raise ConfigError(f"step_ms must be more than 0, got {self.step_ms:g}")
        require("optimizer_slots", self.optimizer_slots, 0)
        for name in ("node_ns", "hub_ns", "held_ms"):
            if getattr(self, name) < 0 and getattr(self, name) != NOT_KNOWN:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name):g}")
        for spec in (self.codec, self.broadcast_codec):
            if spec:
                coding_from_spec(spec)


def _run(config: PlanConfig) -> int:
    if config.tokens:
        return run_pipeline_plan(config, question_of(config), config.json)
    wish = wish_of(config)
    plan, others = make_plan(wish), list(variants(wish))
    memory = memory_of(config, plan)
    limit = parse_bytes(config.memory, "memory") - CARD_BYTES_OF_OTHERS if config.memory else None
    fits = limit is None or memory.fits(limit)
    if config.json:
        print(json.dumps(_as_json(plan, others, memory, limit)))
    else:
        console = Terminal()
        console.print(_plan_table(config, plan))
        console.print(settings_line(plan), soft_wrap=True)
        console.print(_variants_table(others))
        console.print(_memory_table(memory))
        if limit is not None:
            kept = f"({format_bytes(CARD_BYTES_OF_OTHERS)} of the card are CUDA's and the desktop's)"
            console.print(f"{memory.advice(max(0, limit))} {kept}", soft_wrap=True)
    return 0 if fits else DOES_NOT_FIT


def wish_of(config: PlanConfig) -> Wish:

    def given(value: float) -> float | None:
        return None if value == NOT_KNOWN else value

    held_ms, parameters, shards = given(config.held_ms), parse_count(config.params, "params"), config.shards
    if shards == AUTO_SHARDS:
        shards = division(config.nodes, model_of(parameters), config.fragments) if config.nodes > UNDIVIDED_NODES else 1
    same = {field.name: getattr(config, field.name) for field in fields(Wish) if hasattr(config, field.name)}
    return Wish(
        **same
        | {
            "parameters": parameters,
            "shards": shards,
            "step_seconds": config.step_ms / 1000,
            "node_bits": parse_rate(config.link, "link"),
            "hub_bits": parse_rate(config.hub_link or config.link, "hub_link"),
            "on_nodes": shards > 1 and (config.shards_on_nodes or config.shards == AUTO_SHARDS),
            "node_batches": config.critical,
            "codec_on": _codec_on(config),
            "node_ns": given(config.node_ns),
            "hub_ns": given(config.hub_ns),
            "held_seconds": None if held_ms is None else held_ms / 1000,
        }
    )


def question_of(config: PlanConfig) -> PipelineQuestion:
    """Return what is asked of pipelines. A parameter is held with its gradient and what the optimizer keeps."""
    item_bytes = 4 if config.dtype == "float32" else 2
    return PipelineQuestion(
        parameters=parse_count(config.params, "params"),
        nodes=config.nodes,
        link_bits=parse_rate(config.link, "link"),
        memory=config.memory,
        kept_bytes=CARD_BYTES_OF_OTHERS,
        parameter_bytes=item_bytes,
        held_bytes=item_bytes * (2 + config.optimizer_slots),
        activation_bytes=parse_bytes(config.activations, "activations") if config.activations else 0,
    )


def _codec_on(config: PlanConfig) -> Place:
    return config.step_on if config.codec_on == "auto" else config.codec_on


def memory_of(config: PlanConfig, plan: RunPlan) -> MemoryEstimate:
    model = tuple(LeafSpec(leaf.path, leaf.shape, config.dtype) for leaf in model_of(plan.wish.parameters))
    item_bytes = 4 if config.dtype == "float32" else 2
    return MemoryEstimate(
        model,
        config.optimizer_slots * item_bytes * plan.wish.parameters,
        RunSettings(
            every=plan.schedule.every,
            delay=plan.schedule.delay,
            codec=plan.codec,
            broadcast_codec=plan.broadcast_codec,
            fragments=0 if plan.load.pieces else plan.fragments,
        ),
        config.anchor,
        config.batches,
        codec_on=_codec_on(config),
        activation_bytes=parse_bytes(config.activations, "activations") if config.activations else 0,
    )


def settings_line(plan: RunPlan) -> str:
    """Return what to type where the (first) broker is started, besides its program and who may reach it."""
    cut = "" if plan.load.pieces else f" --fragments {plan.fragments}"
    shards, nodes = plan.load.shards, plan.load.nodes
    shard = "" if shards == 1 else f" --shard 0/{shards}"
    if plan.load.on_nodes:
        shard = f" --shards {shards} --start-nodes {nodes}"
    return (
        f"zmqtrain-broker --every {plan.schedule.every} --delay {plan.schedule.delay} --codec {quote(plan.codec)} "
        f"--broadcast-codec {quote(plan.broadcast_codec)} --outer {quote(plan.outer)}{cut}{shard}"
    )


# ---------------------------------------------------------------------- what is printed


def _plan_table(config: PlanConfig, plan: RunPlan) -> Table:
    wish, predicted, load = plan.wish, plan.prediction, plan.load
    count = format_count(wish.parameters)
    where = f"{wish.shards} brokers" if wish.shards > 1 else "one broker"
    both = plan.codec if plan.broadcast_codec == plan.codec else f"{plan.codec} up, {plan.broadcast_codec} down"
    pieces = "all in each exchange" if load.pieces else "one in each exchange"
    share, least, most = plan.speedup / plan.ideal, plan.speedup * (1 - SPREAD), plan.speedup * (1 + SPREAD)
    rows = {
        "to a loss": f"{plan.speedup:.2f} times as fast as one PC ({least:.1f} to {most:.1f}); on a "
        f"free network {plan.ideal:.2f} times",
        "why": f"{share:.0%} of the free network: exchanges leave {predicted.efficiency:.0%} of the steps, and codec, "
        f"k and age ask for {plan.slowdown:.2f} times as many, averaging for "
        f"{1 / averaging_gain(config.nodes):.2f} times",
        "codec": f"{both}, {plan.fragments} fragment{'s' * (plan.fragments > 1)}, {pieces}",
        "outer": plan.outer,
        "k, d": f"{plan.schedule.every}, {plan.schedule.delay} steps",
        "an exchange": f"{format_bytes(load.bytes_up)} up, {format_bytes(load.bytes_down)} down, per node, in "
        f"{predicted.latency_seconds:.2g} s",
        "the whole model": f"every {plural(predicted.model_period_steps, 'step')}",
        "sent": f"{predicted.mb_up:.3g} MB per node and step",
        "hub's port": f"{predicted.port_up:.0%} up, {predicted.port_down:.0%} down, of the {wish.share:.0%} reserved",
        "busiest": predicted.busiest,
        "efficiency": f"{predicted.efficiency:.3f}",
        "age": plural(predicted.age_steps, "step"),
    }
    title = f"{count} parameters, {plural(wish.nodes, 'node')}, {where}, a step of {config.step_ms:g} ms"
    return figures_table(rows, title)


def _variants_table(plans: Sequence[RunPlan]) -> Table:
    figures = ("shards", "hub", "codec", "parts", "k", "d", "age", "MB/step", "port", "efficiency", "speed-up")
    rows = [
        (
            str(plan.wish.shards), f"{plan.wish.hub_bits / 1e9:g}", plan.codec, str(plan.fragments),
            str(plan.schedule.every), str(plan.schedule.delay), f"{predicted.age_steps:.4g}",
            f"{predicted.mb_up:.3g}", f"{max(predicted.port_up, predicted.port_down):.0%}",
            f"{predicted.efficiency:.3f}", f"{plan.speedup:.2f}",
        )
        for plan in plans
        for predicted in [plan.prediction]
    ]  # fmt: skip
    return table_of(figures, rows, left="codec", title="the same with other brokers and hubs (Gb/s)")


def _memory_table(memory: MemoryEstimate) -> Table:
    sizes = [(line.what, line.device_bytes, line.host_bytes) for line in memory.lines]
    rows = [(what, *(format_bytes(size) if size else "" for size in placed)) for what, *placed in sizes]
    rows.append(("in all", format_bytes(memory.device_bytes), format_bytes(memory.host_bytes)))
    return table_of(("", "card", "host"), rows, left="", title="memory of a node")


def _as_json(plan: RunPlan, others: Sequence[RunPlan], memory: MemoryEstimate, limit: int | None) -> dict[str, Any]:
    verdict = {} if limit is None else {"fits": memory.fits(limit), "advice": memory.advice(max(0, limit))}
    return {
        "plan": _plan_as_json(plan) | {"command": settings_line(plan)},
        "variants": [_plan_as_json(other) for other in others],
        "memory": {
            "device_bytes": memory.device_bytes,
            "host_bytes": memory.host_bytes,
            "lines": [asdict(line) for line in memory.lines],
            **verdict,
        },
    }


def _plan_as_json(plan: RunPlan) -> dict[str, Any]:
    names = ("codec", "broadcast_codec", "fragments", "outer", "slowdown", "speedup")
    return {
        "shards": plan.wish.shards,
        "hub_bits_per_second": plan.wish.hub_bits,
        "bytes_up": plan.load.bytes_up,
        "bytes_down": plan.load.bytes_down,
        "ideal_speedup": plan.ideal,
        **{name: getattr(plan, name) for name in names},
        **asdict(plan.schedule),
        **asdict(plan.prediction),
    }


main = command(PlanConfig, PROGRAM, _run)
