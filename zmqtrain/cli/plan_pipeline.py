"""The plan of a model that is cut over several PCs: the part of `zmqtrain plan` that `--tokens` asks for.

Rule 1: the cut is that of `zmqtrain.pipeline.partition`, from the costs of a transformer of this size; what a schedule
makes of it is simulated (`zmqtrain.sim.pipeline`).
Rule 2: it says when a pipeline is not worth it: the model fits one card, or the wire is slower than the PCs.
Rule 3: the exit code is 1 if the PCs cannot hold the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any, NamedTuple

from rich.table import Table

from zmqtrain.cli.display import NOTHING, Terminal, figures_table, format_bytes, format_count, plural, table_of
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.core.errors import ConfigError, DoesNotFit
from zmqtrain.core.settings import require
from zmqtrain.core.specs import parse_bytes, parse_count
from zmqtrain.core.types import LeafSpec
from zmqtrain.pipeline.costs import PC, ModelCosts, SegmentCost, TiedLeaf
from zmqtrain.pipeline.partition import Partition, PlannedPipeline, partition, predict
from zmqtrain.pipeline.schedule import Depth, Schedule, ScheduleName
from zmqtrain.planning.schedule import exchange_bytes
from zmqtrain.sim.pipeline import StageModel, simulate_pipeline
from zmqtrain.transport.memory import LinkModel

DOES_NOT_FIT = 1
PAYLOAD = 0.936
"""The share of a port's rate that is payload: the rest is Ethernet's, IP's and TCP's."""
CARRY_BYTES = 2
"""Of a value of a carry in memory: bfloat16."""
ACTIVATION_BYTES = 34
"""Of a token and channel of a layer, as its backward pass keeps them, without attention's matrix (Korthikanti et al.
2022, eq. 2)."""
LOGIT_BYTES = 8
"""Of a token and word: logits and their gradient in float32."""
SHAPES = ((125e6, 768), (350e6, 1024), (760e6, 1536), (1.3e9, 2048), (2.7e9, 2560), (6.7e9, 4096), (13e9, 5120))
"""Parameters and widths of GPT-3 (Brown et al. 2020, table 2.1)."""
STEPS_WITHOUT_FLUSH = 6
"""A run of so many steps fills the pipeline once: that is all of the bubble that there is without a flush."""
ROWS: tuple[tuple[ScheduleName, Depth], ...] = (
    ("gpipe", "roomy"), ("1f1b", "textbook"), ("1f1b", "roomy"), ("2bw", "roomy"),
)  # fmt: skip
BOUNDARIES = ("bf16", "int8")
BETTER = 1.001
"""A plan with so many times the tokens is another one."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What describes a model that is cut over several PCs, and how they train it."""

    tokens: int = 0
    """Tokens of a micro-batch: plans for a model that one card may not hold, cut over several nodes (docs/pipeline.md),
    which may use all of their ports (no share); 0: every node holds the whole model."""
    flops: str = "10T"
    """With tokens: what a node computes, in effective FLOP/s; one for all, or one for each: 10T,10T,5T,20T."""
    width: int = 0
    """With tokens: channels between the layers of the model; 0: as of a GPT of this size."""
    layers: int = 0
    """With tokens: layers of the model; 0: as of a GPT of this size and width."""
    vocabulary: int = 0
    """With tokens: words; embedding and head are then parts of their own. 0: layers alone are counted."""
    tied: bool = False
    """With tokens: the head is the embedding, and the nodes that hold them sum its gradient in each step."""
    micro_batches: int = 32
    """With tokens: micro-batches of a step."""
    schedule: ScheduleName = "1f1b"
    """With tokens: when a node goes forward and backward; 2bw does not wait at the end of a step."""
    boundary: str = "bf16"
    """With tokens: how the results of a stage are coded on the wire (docs/codecs.md)."""
    pipeline: int = 0
    """With tokens: nodes of a pipeline; 0: as is best."""
    cards: int = 1
    """With tokens: cards of each node."""

    def check_pipeline(self) -> None:
        """Raise ConfigError for what cannot be."""
        for name in ("tokens", "width", "layers", "vocabulary", "pipeline"):
            require(name, getattr(self, name), 0)
        require("cards", self.cards, 1)
        coding_from_spec(self.boundary)
        for one in self.flops.split(","):
            parse_count(one, "flops")
        if self.tied and not self.vocabulary:
            raise ConfigError("tied is of an embedding and a head: say how many words there are (--vocabulary 32000)")


class PipelineQuestion(NamedTuple):
    """What a plan of pipelines is asked besides its own options. memory: as typed; kept_bytes: of each card, for
    others.  parameter_bytes, held_bytes: of one parameter.  activation_bytes: of the whole model; 0: not known."""

    parameters: int
    nodes: int
    link_bits: float
    memory: str
    kept_bytes: int
    parameter_bytes: int
    held_bytes: int
    activation_bytes: int


def run_pipeline_plan(options: PipelineOptions, question: PipelineQuestion, as_json: bool) -> int:
    """Print the plan; return the exit code."""
    pcs, console = pcs_of(options, question), Terminal()
    link = LinkModel(PAYLOAD * question.link_bits)
    segments = segments_of(options, question)

    def plan_of(size: int) -> Partition:
        return partition(
            segments, pcs, options.micro_batches, schedule=options.schedule, link=link, pcs_per_pipeline=size
        )

    try:
        plan = plan_of(options.pipeline)
        best = plan_of(0) if options.pipeline else plan
    except DoesNotFit as error:
        if as_json:
            facts = {"segment": error.segment, "needed_bytes": error.needed_bytes, "advice": str(error)}
            print(json.dumps({"fits": False} | facts))
        else:
            kept = f"({format_bytes(question.kept_bytes)} of each card are CUDA's and the desktop's)"
            console.print(f"{error} {kept}", soft_wrap=True)
        return DOES_NOT_FIT
    longest = max(plan.pipelines, key=lambda one: len(one.stages))
    row = simulated_row(options, question, pcs, longest, link)
    advice = advice_of(plan, best, options)
    if as_json:
        print(json.dumps(_as_json(options, plan, row, advice)))
        return 0
    console.print(_figures(options, question, plan, longest, link))
    console.print(_stages_table(plan, segments, pcs))
    if len(longest.stages) > 1:
        console.print(_row_table(row))
    console.print(advice, soft_wrap=True)
    return 0


# ---------------------------------------------------------------------- the question in costs


def pcs_of(options: PipelineOptions, question: PipelineQuestion) -> list[PC]:
    """Return the nodes. Raises ConfigError for a list that is neither one for all nor one for each."""
    if not question.memory:
        raise ConfigError("say what a card holds, for a model that is cut over several: --memory 6GB")
    memory = _for_each("memory", question.memory, question.nodes)
    flops = _for_each("flops", options.flops, question.nodes)
    return [
        PC(
            name=f"node-{number}",
            memory_bytes=max(0, parse_bytes(bytes_text, "memory") - question.kept_bytes),
            speed=float(parse_count(flops_text, "flops")),
            cards=options.cards,
        )
        for number, (bytes_text, flops_text) in enumerate(zip(memory, flops, strict=True))
    ]


def _for_each(name: str, text: str, nodes: int) -> list[str]:
    each = text.split(",")
    if len(each) not in (1, nodes):
        raise ConfigError(f"{name} is one for all {nodes} nodes, or one for each, got {len(each)}: {text}")
    return each * nodes if len(each) == 1 else each


def shape_of(options: PipelineOptions, question: PipelineQuestion) -> tuple[int, int, int]:
    """Return (layers, width, parameters of a layer). Raises ConfigError if embedding and head leave none."""
    nearest = min(SHAPES, key=lambda one: abs(log(one[0] / question.parameters)))
    width = options.width or nearest[1]
    tables = options.vocabulary * width * (1 if options.tied else 2)
    rest = question.parameters - tables
    if rest < 1:
        raise ConfigError(
            f"embedding and head of {options.vocabulary:,} words and width {width:,} are {format_count(tables)} "
            f"parameters, and the model has {format_count(question.parameters)}: say another width or vocabulary"
        )
    layers = options.layers or max(1, round(rest / (12 * width**2)))
    return layers, width, rest // layers


def segments_of(options: PipelineOptions, question: PipelineQuestion) -> list[SegmentCost]:
    """Return what the parts of the model cost. Times are of a PC that computes 1 FLOP/s: speed divides them.

    A pass forward takes two operations for a parameter and token, and a pass backward six: it goes forward again.
    """
    layers, width, each = shape_of(options, question)
    tokens, table = options.tokens, options.vocabulary * width
    carry = LeafSpec("carry", (tokens, width), "float32")
    sizes = {
        "carry_bytes": CARRY_BYTES * tokens * width,
        "wire_bytes": exchange_bytes((carry,), options.boundary, options.boundary).up,
    }
    activations = question.activation_bytes // layers or ACTIVATION_BYTES * tokens * width

    def segment(name: str, parameters: int, computed: int, kept: int, tied: tuple[TiedLeaf, ...] = ()) -> SegmentCost:
        return SegmentCost(
            name=name,
            forward_seconds=2.0 * computed * tokens,
            backward_seconds=6.0 * computed * tokens,
            parameter_bytes=question.parameter_bytes * parameters,
            held_bytes=question.held_bytes * parameters,
            activation_bytes=kept,
            tied=tied,
            **sizes,
        )

    middle = [segment(f"layer {number}", each, each, activations) for number in range(layers)]
    if not options.vocabulary:
        return middle
    leaf = TiedLeaf(
        name="embedding", parameter_bytes=question.parameter_bytes * table, held_bytes=question.held_bytes * table
    )
    tied, own = ((leaf,), 0) if options.tied else ((), table)
    logits = LOGIT_BYTES * tokens * options.vocabulary
    return [segment("embedding", own, 0, 0, tied), *middle, segment("head", own, table, logits, tied)]


# ---------------------------------------------------------------------- what schedules make of it


def simulated_row(
    options: PipelineOptions, question: PipelineQuestion, pcs: Sequence[PC], pipeline: PlannedPipeline, link: LinkModel
) -> dict[str, dict[str, float | None]]:
    """Return each schedule's efficiency with each codec of the boundary, on the same cut; None: it does not fit."""
    by_name = {pc.name: pc for pc in pcs}
    stages = [(by_name[one.pc], one.begin, one.end) for one in pipeline.stages]
    found: dict[str, dict[str, float | None]] = {}
    for name, depth in ROWS:
        row: dict[str, float | None] = {}
        for boundary in dict.fromkeys((*BOUNDARIES, options.boundary)):
            coded = segments_of(replace(options, boundary=boundary), question)
            schedule = Schedule(name, depth, predicts=False)  # what takes least memory
            planned = predict(ModelCosts(coded, schedule, options.micro_batches, link), stages)
            fits = all(one.memory_bytes <= by_name[one.pc].memory_bytes for one in planned.stages)
            row[boundary] = _simulated(schedule, planned, coded, link) if fits else None
        found[name if name == "gpipe" else f"{name}, {depth}"] = row
    return found


def _simulated(
    schedule: Schedule, pipeline: PlannedPipeline, segments: Sequence[SegmentCost], link: LinkModel
) -> float:
    sizes = [segments[one.end - 1].wire_bytes or 0 for one in pipeline.stages]
    models = [
        StageModel(one.forward_seconds, one.backward_seconds, one.tied_seconds, size, before)
        for one, size, before in zip(pipeline.stages, sizes, [0, *sizes[:-1]], strict=True)
    ]
    steps = 1 if schedule.flushes else STEPS_WITHOUT_FLUSH
    return simulate_pipeline(schedule, models, pipeline.micro_batches, steps=steps, link=link).efficiency


def advice_of(plan: Partition, best: Partition, options: PipelineOptions) -> str:
    """Return whether a pipeline is worth it, and why. best: of any number of nodes a pipeline."""
    tokens, most = (options.tokens * one.micro_batches_per_second for one in (plan, best))
    if most > tokens * BETTER:
        return (
            f"Not worth it: without --pipeline {options.pipeline} these nodes do {format_count(most)} tokens/s, as "
            f"{_counts(best)}, not {format_count(tokens)}."
        )
    several = [one for one in plan.pipelines if len(one.stages) > 1]
    whole = len(plan.pipelines) - len(several)
    if not several:
        seconds = max(one.stages[0].seconds for one in plan.pipelines)
        return (
            "A pipeline is not worth it: the model fits one node, and nodes that hold all of it have no bubble. Plan "
            f"them without --tokens, with --step-ms {1000 * seconds:.3g} for a batch of {options.tokens:,} tokens."
        )
    said = ["Worth it: no other use of these nodes trains more tokens a second."]
    if whole:
        said.append(f"Nodes that hold all of it: {whole}; they train beside the pipelines, without a bubble.")
    for one in several:
        speedup = one.efficiency * len(one.stages)
        if one.wire_bound:
            compute = max(stage.seconds for stage in one.stages)
            said.append(
                f"The wire is slower than the nodes: a micro-batch takes {1000 * compute:.0f} ms of compute and "
                f"{1000 * one.period_seconds:.0f} ms on the wire, so {len(one.stages)} nodes do the work of "
                f"{speedup:.1f}. A boundary in int8, fewer nodes with more layers each, or a faster link help."
            )
            if speedup < 1:
                said[0] = "Not worth it: one node alone, with a model that fits it, computes more."
    return " ".join(said)


# ---------------------------------------------------------------------- what is printed


def _figures(
    options: PipelineOptions, question: PipelineQuestion, plan: Partition, longest: PlannedPipeline, link: LinkModel
) -> Table:
    layers, width, _ = shape_of(options, question)
    (carry,) = {one.wire_bytes for one in segments_of(options, question)}
    tokens = plan.micro_batches_per_second * options.tokens
    rows = {
        "model": f"{plural(layers, 'layer')}, width {width:,}",
        "pipelines": _counts(plan) + (f"; not used: {', '.join(plan.unused)}" if plan.unused else ""),
        "schedule": f"{options.schedule}, {options.micro_batches} micro-batches of {options.tokens:,} tokens",
        "compute": f"{1000 * max(one.seconds for one in longest.stages):.0f} ms a micro-batch at the busiest stage",
        "a hop": f"{format_bytes(carry or 0)} ({options.boundary}), {1000 * link.seconds(carry or 0):.0f} ms",
        "period": f"{1000 * longest.period_seconds:.0f} ms",
        "a step": f"{longest.step_seconds:.2f} s",
        "efficiency": f"{longest.efficiency:.3f}",
        "bubble": f"{longest.bubble:.3f}",
        "port": f"{max(longest.port_use):.0%} each way, the busiest",
        "all nodes": f"{format_count(tokens)} tokens/s",
    }
    if len({len(one.stages) for one in plan.pipelines}) > 1:
        number = 1 + plan.pipelines.index(longest)
        rows["schedule"] += f"; the figures below and the simulation are of pipeline {number}, the longest"
    if longest.tied_seconds:
        rows["tied leaves"] = f"{longest.tied_seconds:.2f} s a step to sum their gradients"
    if len(longest.stages) == 1:
        for name in ("a hop", "period", "port"):
            del rows[name]
    title = f"{format_count(question.parameters)} parameters, {plural(question.nodes, 'node')}"
    return figures_table(rows, title)


def _counts(plan: Partition) -> str:
    """Return how many pipelines there are of how many nodes."""
    lengths = [len(one.stages) for one in plan.pipelines]
    return ", ".join(
        f"{lengths.count(length)} of {plural(length, 'node')}" for length in sorted(set(lengths), reverse=True)
    )


def _stages_table(plan: Partition, segments: Sequence[SegmentCost], pcs: Sequence[PC]) -> Table:
    limits = {pc.name: pc.memory_bytes for pc in pcs}
    several = len(plan.pipelines) > 1
    sharded = any(one.sharding != "none" for pipeline in plan.pipelines for one in pipeline.stages)
    columns = ["pipeline"] * several + ["node", "layers", "in flight", "compute", "card", "of"]
    columns += ["sharded by"] * sharded + ["port"]
    rows = [
        [str(number)] * several
        + [one.pc, _layers(segments[one.begin : one.end]), str(one.most_in_flight), f"{1000 * one.seconds:.0f} ms"]
        + [format_bytes(one.memory_bytes), format_bytes(limits[one.pc])]
        + [one.sharding] * sharded
        + [f"{use:.0%}"]
        for number, pipeline in enumerate(plan.pipelines, start=1)
        for one, use in zip(pipeline.stages, pipeline.port_use, strict=True)
    ]
    return table_of(columns, rows, left="node", title="stages")


def _layers(segments: Sequence[SegmentCost]) -> str:
    """Return which parts a stage has: "embedding, 0-4"."""
    numbers = [one.name.removeprefix("layer ") for one in segments if one.name.startswith("layer ")]
    middle = ["-".join(dict.fromkeys((numbers[0], numbers[-1])))] if numbers else []
    names = {one.name for one in segments}
    return ", ".join(["embedding"] * ("embedding" in names) + middle + ["head"] * ("head" in names))


def _row_table(row: Mapping[str, Mapping[str, float | None]]) -> Table:
    boundaries = list(next(iter(row.values())))
    rows = [
        (name, *(NOTHING if one is None else f"{one:.3f}" for one in efficiencies.values()))
        for name, efficiencies in row.items()
    ]
    return table_of(("schedule", *boundaries), rows, left="schedule", title="efficiency, simulated")


def _as_json(
    options: PipelineOptions, plan: Partition, row: Mapping[str, Mapping[str, float | None]], advice: str
) -> dict[str, Any]:
    derived = ("efficiency", "bubble", "port_use", "wire_bound")
    return {
        "fits": True,
        "pipelines": [
            asdict(pipeline) | {name: getattr(pipeline, name) for name in derived} for pipeline in plan.pipelines
        ],
        "unused": plan.unused,
        "tokens_per_second": plan.micro_batches_per_second * options.tokens,
        "schedules": row,
        "advice": advice,
    }
