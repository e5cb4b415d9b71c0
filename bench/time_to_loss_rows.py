"""Make one run of bench/time_to_loss.py in this process: one node, all batches at once, DiLoCo, ours in virtual time.

Rule 1: all runs of a seed begin with the same parameters and are scored on the same held-out text. Node n of N takes
the data units n, n + N, ... (of ours: the units in the order in which nodes ask for them).
Rule 2: a curve is a list of (steps, loss) of what takes no network, and of (seconds, loss) of a run of ours. The model
is scored every SCORED_STEPS steps' time; scoring takes none of that time.
Rule 3: nodes that have joined wait until all have, and then begin together: time zero. What it costs to send the
initial parameters is a matter of seconds here, for a port is slow and the run is short; it is not counted.
Rule 4: what is compiled is kept: one program for all seeds and rates of the runs without a network, one for each rate
of ours, and all of it in the cache folder that `keep_compiled` names.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from math import inf, isfinite, lcm, nan
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from zmqtrain import Program, RunSettings, load_program
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import read_steps
from zmqtrain.core.specs import parse_count
from zmqtrain.monitor.records import read_records
from zmqtrain.planning.costs import NODE_LOCKED, exchange_costs, slab_threads
from zmqtrain.planning.rules import canonical
from zmqtrain.programs import parse_arguments
from zmqtrain.sim import Scenario, SimNode, simulate
from zmqtrain.train.sync import DelayedSync, SyncStatistics
from zmqtrain.transport.memory import LinkModel

from federation import ExchangeSettings, Federation, LocalSteps, draw_batches, join_batches

__all__ = [
    "TEXT",
    "TARGETS",
    "Curve",
    "Job",
    "Line",
    "Place",
    "crossing",
    "figures_of",
    "keep_compiled",
    "parse_settings",
    "place_as",
    "read_chosen",
    "ring_link",
    "run_here",
    "run_settings",
    "smoothed",
]

TEXT = "width=104,layers=2,heads=4,context=64,batch=4"
"""The transformer that is trained, of 286,728 values, and what a step of one node is made of."""
TARGETS = (2.10, 2.05, 2.02)
"""Held-out losses, in nats per byte."""
SCORED_STEPS = 10
SMOOTHED_STEPS = 30
"""A crossing is read off the centred mean of a curve over so many steps' time."""
STOPPED_BELOW = (0.02, 0.1, 1e9)
"""A run in virtual time ends when its loss, not smoothed, is so much under the target: then the smoothed one has
crossed; if it has not, the run is made again, to the next of them."""
FAR = 0.3
"""A loss that is so much over the first target is scored more seldom."""
STEP_MILLISECONDS = {"25M": 50.0, "100M": 180.0}
"""Of the larger models that `--as` knows."""
NODE_CORES = 7.0
"""Idle ones of the PCs that this is for: of eight, one feeds the card."""
DILOCO_STEPS = 50
DILOCO = ExchangeSettings(
    codec="float32",
    broadcast_codec="float32",
    every=DILOCO_STEPS,
    delay=0,
    outer="nesterov:rate=0.7,momentum=0.9",
)
"""Of Douillard et al. 2023. What fp16 rounds is left out."""
LATENCY_SECONDS = 0.0005
JOINING_LOOK_SECONDS = 0.001

Curve = list[tuple[float, float]]
Line = dict[str, Any]
Kind = Literal["alone", "ideal", "diloco", "simulated", "real", "exchange"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machines of a run. link: of every port, bits per second.

    In virtual time besides: scale: codecs take the time of a model of so many times the values; codec_on: of nodes,
    where.  node_cores, hub_cores: idle ones, which share the work of a codec, and of a release at the hub.
    held_milliseconds: of the training thread, by each exchange.
    """

    step_milliseconds: float = 100.0
    link: float = 6e6
    scale: float = 1.0
    codec_on: Literal["host", "device"] = "host"
    node_cores: float = 1.0
    hub_cores: float = 1.0
    held_milliseconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.step_milliseconds / 1e3


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run. kind: how it is made.  program: the text program's arguments, without data, rate and seed.

    settings: as JSON, those of `RunSettings` that are set by hand; none in the row auto.  slow: so many of the nodes,
    the last ones, are at half speed.  place: of a run of ours and of an exchange; else nothing depends on it.
    values_bytes, how: of an exchange, a sum over all nodes: its parts in bytes, one after the other, and by what.
    until: the loss at which the run may end; max_steps: it ends after so many steps of a node at full speed.
    """

    kind: Kind
    nodes: int = 1
    rate: float = 0.0
    seed: int = 0
    program: str = TEXT
    data: str = ""
    settings: str = "{}"
    slow: int = 0
    place: Place = Place()
    values_bytes: tuple[int, ...] = ()
    how: str = ""
    until: float = TARGETS[-1]
    max_steps: int = 2500

    def identity(self) -> str:
        """Return as text what tells this run from others: all but when it may end."""
        facts = asdict(self)
        del facts["until"], facts["max_steps"]
        facts["data"] = Path(self.data).name
        if self.kind in ("alone", "ideal", "diloco"):
            del facts["place"]
        return json.dumps(facts, sort_keys=True)

    def make(self, rate: float | None = None) -> Program:
        """Return the program, at this rate or at another."""
        arguments = {**parse_arguments(self.program), "data": self.data, "seed": self.seed}
        return load_program("text", {**arguments, "rate": self.rate if rate is None else rate})


# ---------------------------------------------------------------------- the curve


def smoothed(curve: Sequence[tuple[float, float]], window: float) -> Curve:
    """Return the centred mean, over `window`, of the curve that goes straight from point to point.

    A point every thirtieth of the window, from half a window after the first score to half a window before the last.
    """
    if not curve:
        return []
    times, losses = np.array(curve, float).T
    grid = np.arange(times[0], times[-1], window / SMOOTHED_STEPS)
    if len(grid) <= SMOOTHED_STEPS:
        return []
    kernel = np.full(SMOOTHED_STEPS + 1, 1 / (SMOOTHED_STEPS + 1))
    means = np.convolve(np.interp(grid, times, losses), kernel, mode="valid")
    return list(zip((grid[: len(means)] + window / 2).tolist(), means.tolist(), strict=True))


def crossing(curve: Sequence[tuple[float, float]], target: float, window: float) -> float:
    """Return when the smoothed curve first comes down to the target, linear between two points; inf: it does not."""
    before: tuple[float, float] | None = None
    for t, loss in smoothed(curve, window):
        if loss <= target:
            if before is None or before[1] <= loss:
                return t
            return before[0] + (t - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (t, loss)
    return inf


# ---------------------------------------------------------------------- without a network


def keep_compiled(folder: Path) -> None:
    """Have this process and those that it starts keep what they compile in a folder, and compute in one thread each.

    Call it before anything is computed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.environ.get("XLA_FLAGS", "")
    if "multi_thread_eigen" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    for name, value in (
        ("jax_compilation_cache_dir", str(folder)),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


class _Seeded:
    """The data of one seed with the step of a shared program, so that all seeds use one compiled step."""

    def __init__(self, base: Program, of_seed: Program) -> None:
        self.name, self.sample_word = base.name, base.sample_word
        self.samples_per_batch, self.units_per_epoch = base.samples_per_batch, base.units_per_epoch
        self.loss, self.optimizer, self.init, self.evaluate = base.loss, base.optimizer, base.init, base.evaluate
        self.batches = of_seed.batches


@lru_cache(maxsize=16)
def _base(program: str, data: str, rate: float) -> Program:
    return Job(kind="alone", program=program, data=data, rate=rate).make()


@lru_cache(maxsize=4)
def _local_steps(program: str, data: str) -> LocalSteps:
    return LocalSteps(_base(program, data, 1.0), on_device=True)


def run_here(job: Job) -> Line:
    """Make a run that needs no network; return what is to be kept of it: its curve, and figures."""
    began = time.perf_counter()
    match job.kind:
        case "alone" | "ideal":
            made = _run_at_once(job)
        case "diloco":
            made = _run_diloco(job)
        case "simulated":
            made = _run_simulated(job)
        case _:
            raise ValueError(f"a run of the kind {job.kind!r} is not made here")
    return {**made, "wall_seconds": round(time.perf_counter() - began, 2)}


class _Scores:
    """The curve of a run without a network, in steps: when to score, and when it is over."""

    def __init__(self, job: Job, evaluate: Any) -> None:
        self.job, self._evaluate = job, evaluate
        self.curve: Curve = []
        self._next = 0

    def over(self, step: int, params: Any) -> bool:
        """Score the model if it is time; return whether the run is over."""
        if step >= self._next or step >= self.job.max_steps:
            loss = float(self._evaluate(params)["loss"])
            self.curve.append((step, loss))
            far = loss > TARGETS[0] + FAR and loss > self.job.until + FAR
            self._next = step + SCORED_STEPS * (4 if far else 1)
            if not isfinite(loss) or crossing(self.curve, self.job.until, SMOOTHED_STEPS) < inf:
                return True
        return step >= self.job.max_steps


class _Batches:
    """The batches of the nodes, piece by piece, all of one shape, so that nothing is compiled twice.

    joined: those of all nodes in one batch of each step.
    """

    def __init__(self, job: Job, local: LocalSteps, joined: bool) -> None:
        self.job, self.local, self.joined = job, local, joined
        self.program = job.make(1.0)
        per_unit = self.program.batches_per_unit  # type: ignore[attr-defined]
        self.piece = lcm(per_unit, DILOCO_STEPS, SCORED_STEPS)
        self._units = self.piece // per_unit * job.nodes
        self._loaded: tuple[int, Any] = (-1, None)

    def at(self, step: int) -> tuple[Any, int]:
        """Return the piece with the batches of this step and of those up to the next multiple of `piece`, and the
        step's place in it."""
        number = step // self.piece
        if self._loaded[0] != number:
            drawn = draw_batches(self.program, self.job.nodes, self.piece, number * self._units)
            loaded = self.local.load(join_batches(drawn)) if self.joined else [self.local.load(one) for one in drawn]
            self._loaded = number, loaded
        return self._loaded[1], step % self.piece


def _run_at_once(job: Job) -> Line:
    """Train in one step on the batches of all nodes: of one, or what synchronous data parallel computes."""
    local = _local_steps(job.program, job.data)
    batches = _Batches(job, local, joined=True)
    scales = np.full(batches.piece, job.rate, np.float32)
    state, step, scores = local.init(batches.program.init(job.seed)), 0, _Scores(job, local.program.evaluate)
    while not scores.over(step, state.params):
        piece, first = batches.at(step)
        state, _ = local.advance(state, piece, scales, first, first + SCORED_STEPS)
        step += SCORED_STEPS
    return {"curve": scores.curve, "steps": step}


def _run_diloco(job: Job) -> Line:
    """Train DILOCO_STEPS steps apart, step the shared model by Nesterov's momentum, score it, and so on."""
    local = _local_steps(job.program, job.data)
    batches = _Batches(job, local, joined=False)
    scales = np.full(batches.piece, job.rate, np.float32)
    federation = Federation(local, DILOCO, batches.program.init(job.seed), job.nodes)
    step, scores = 0, _Scores(job, local.program.evaluate)
    while not scores.over(step, federation.shared):
        piece, first = batches.at(step)
        federation.advance(piece, scales, first, first + DILOCO_STEPS)
        federation.offer()
        federation.land()
        step += DILOCO_STEPS
    return {"curve": scores.curve, "steps": step}


# ---------------------------------------------------------------------- ours


def parse_settings(text: str) -> tuple[str, float, dict[str, Any]]:
    """Read a row such as "name=dense|rate=2e-3|codec=int8|every=4"; return its name, its rate (nan: the tuned one) and
    its settings: any of `RunSettings`.

    Raises ConfigError.
    """
    given: dict[str, str] = {}
    for piece in text.split("|"):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals or key in given:
            raise ConfigError(f"{text!r}: cannot read {piece!r}; a row is key=value|key=value, each key once")
        given[key] = value
    name, rate = given.pop("name", text), float(given.pop("rate", "nan"))
    known = {field.name: type(getattr(RunSettings(), field.name)) for field in fields(RunSettings)}
    if unknown := given.keys() - known.keys():
        raise ConfigError(f"{text!r}: no setting of a run is called {', '.join(sorted(unknown))}")
    settings: dict[str, Any] = {}
    for key, value in given.items():
        read = read_steps(key, value)
        kind = known[key]
        if isinstance(read, str) and kind is not str:
            read = value in ("true", "True") if kind is bool else kind(value)
        settings[key] = read
    if "codec" in settings:
        settings.setdefault("broadcast_codec", settings["codec"].partition(",fragments=")[0])
    canonical(RunSettings(**settings))
    return name, rate, settings


def run_settings(job: Job) -> RunSettings:
    """Return the settings of a run of ours. Beside the job's: what is trained, and that all N nodes begin together with
    the parameters of the first; and no node scores the model while it trains, as the bench does that."""
    arguments = f"{job.program},data={job.data},rate={job.rate:g},seed={job.seed}"
    return RunSettings(
        **{
            "program": "text",
            "program_arguments": arguments,
            "seed": job.seed,
            "start_nodes": job.nodes,
            "initial": "founder",
            "evaluate_seconds": 0.0,
            **json.loads(job.settings),
        }
    )


def place_as(
    model: str,
    values: int,
    hub_cores: float = 1.0,
    node_cores: float = NODE_CORES,
    codec_on: Literal["host", "device"] = "host",
    held_milliseconds: float | None = None,
) -> Place:
    """Return where a model of `values` values takes the time of a larger one ("25M", "100M") at 1 Gb/s.

    Ports are slower by as much as the model is smaller, and codecs take the larger model's seconds.
    held_milliseconds: None: as the planner counts it, where a card trains.
    """
    scale = parse_count(model) / values
    held = exchange_costs(scale * values, 0, 0, "float32", "float32", 1, codec_on=codec_on).thread_seconds
    return Place(
        step_milliseconds=STEP_MILLISECONDS[model],
        link=1e9 / scale,
        scale=scale,
        codec_on=codec_on,
        node_cores=node_cores,
        hub_cores=hub_cores,
        held_milliseconds=1e3 * held if held_milliseconds is None else held_milliseconds,
    )


def ring_link(ratio: float, nodes: int, values: int, step_seconds: float) -> float:
    """Return the rate of a port at which a ring's sum of float32 gradients takes so many steps' time."""
    return 2 * (nodes - 1) / nodes * 32 * values / (ratio * step_seconds)


def _run_simulated(job: Job) -> Line:
    made: Line = {}
    for below in STOPPED_BELOW:
        made = _simulate(job, job.until - below)
        window = SMOOTHED_STEPS * job.place.step_seconds
        if made["ended"] != "target" or crossing(made["curve"], job.until, window) < inf:
            break
    return made


def _simulate(job: Job, target: float) -> Line:
    place, syncs, begun = job.place, list[DelayedSync](), list[float]()
    held = place.held_milliseconds / 1e3

    class Watched(DelayedSync):
        """Begins when all nodes have joined; holds the training thread for a while at each offer, as a card does."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            syncs.append(self)
            while len(syncs) < job.nodes:
                self.exchange.clock.sleep(JOINING_LOOK_SECONDS)
            begun.append(self.exchange.clock.monotonic())

        def step(self, params: Any, **rest: Any) -> Any:
            before = self.statistics().offers if held else 0
            params = super().step(params, **rest)
            if held and self.statistics().offers > before:
                self.exchange.clock.sleep(held)
            return params

    seconds = place.step_seconds
    scenario = Scenario(
        settings=run_settings(job),
        nodes=tuple(
            SimNode(step_seconds=seconds, slowness=2.0 if number >= job.nodes - job.slow else 1.0)
            for number in range(job.nodes)
        ),
        link=LinkModel(place.link, LATENCY_SECONDS),
        evaluate_seconds=SCORED_STEPS * seconds,
        target_loss=target,
        max_seconds=job.max_steps * seconds + _joining_seconds(job),
        codec_scale=place.scale,
        codec_on=place.codec_on,
        node_threads=slab_threads(place.node_cores, NODE_LOCKED),
        hub_threads=slab_threads(place.hub_cores),
    )
    program = _Seeded(_base(job.program, job.data, job.rate), job.make())
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(scenario, program=program, make_sync=Watched, record=Path(folder))
        chosen = read_chosen(Path(folder, "broker.jsonl"), scenario.settings)
    zero = max(begun, default=0.0)
    return {
        "curve": [(round(at - zero, 4), loss) for at, _, loss in result.curve() if at >= zero],
        "ended": "target" if result.target_seconds < inf else "max_steps",
        "chosen": chosen,
        "refused_at_hub": result.refused,
        **figures_of([sync.statistics() for sync in syncs], chosen),
    }


def _joining_seconds(job: Job) -> float:
    """Return how long the port of the hub takes to bring the initial parameters to all nodes, which is not counted."""
    leaves = jax.tree.leaves(jax.eval_shape(job.make().init, 0))
    return job.nodes * 32 * sum(leaf.size for leaf in leaves) / job.place.link


def read_chosen(record: Path, settings: RunSettings) -> dict[str, Any]:
    """Return how nodes exchanged at the end of a run: its settings, what its broker's record says was planned, among
    how many brokers the model was divided, and in how many fragments it went."""
    chosen: dict[str, Any] = {
        name: getattr(settings, name) for name in ("every", "delay", "codec", "broadcast_codec", "outer", "release")
    }
    plans, last, shards = 0, 0, 1
    for one in read_records(record):
        if one["kind"] == "run":
            shards = max(1, one["settings"]["shards"])
        elif one["kind"] == "plan":
            chosen |= {name: value for name, value in one.items() if name in chosen}
            plans += 1
        elif one["kind"] == "release":
            last = max([last, *one["fragments"]])
    return {**chosen, "fragments": shards * (last + 1), "shards": shards, "plans": plans}


def figures_of(nodes: Sequence[SyncStatistics], chosen: Mapping[str, Any]) -> Line:
    """Return the figures of a run's nodes: means, and offers refused of all.

    period_steps: between two exchanges of the whole model, those included that were refused.
    """

    def mean(name: str) -> float:
        return float(np.mean([getattr(node, name) for node in nodes]))

    fragments = chosen["fragments"]
    ages = [node.age_steps for node in nodes if isfinite(node.age_steps)]
    return {
        "steps": mean("steps"),
        "period_steps": mean("steps") * fragments / offers if (offers := mean("offers")) else None,
        "age_steps": float(np.median(ages)) if ages else nan,
        "offers": sum(node.offers for node in nodes),
        "offers_refused": sum(node.offers_refused for node in nodes),
        "mb_up": mean("bytes_sent") / 1e6,
        "mb_down": mean("bytes_received") / 1e6,
    }
