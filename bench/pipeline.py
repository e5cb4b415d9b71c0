"""Measure a pipeline on the star: how much of their time its PCs compute, beside what the simulator says.

    efficiency = M x (forward + backward at all stages) / sum of the PCs' speeds / seconds of a step
                 1 where no PC ever waits

Rule 1: each stage is a process in a namespace of its own, and so is the broker at which they meet. Computing is
emulated by sleeping; the bytes of carries and cotangents, their codecs and all that moves them are real.
Rule 2: the first step is not timed: receives are posted and buffers made in it. Steps are timed at the
first stage, which ends each of them; of 2bw, which has no flush, without the last, in which the pipeline runs empty.
Rule 3: `--memory` trains a model of which no process may hold more than a part: the kernel refuses memory beyond the
limit (RLIMIT_DATA). Its cut is that of `Pipeline.create`, and its optimizer's state lies in a file (`optimizer_on`).
holds: parameters, gradients and state, wherever they lie.  peak: the most that a process had in memory, less what it
had before its parameters were made.
Rule 4: `--faults` trains the text program on four PCs, and kills or unplugs one in the middle of a step. The others
have to train on with the same batches.  next_step: seconds from the fault to the end of the next step on all PCs that
are left; recovering: from the error to the beginning of that step, and compiling: of these, those in which the new
stages were compiled, both of the PC that took longest.
Rule 5: `--learning` trains the text program in one process, with and without a flush, on the same batches.
Rule 6: `--together` trains the text program by two pipelines of two PCs, and by four PCs with the whole model, through
a broker, on as many samples: all PCs are threads of this process, and their numbers are real. A pipeline's batch is two
of a PC's.
Rule 7: `simulated` is what `zmqtrain sim` makes of the same row: the same machine of the schedule in virtual time.

Columns: efficiency, median of the steps; low, high: of the steps.  simulated: see above.  step_s: seconds of a step.
waited: share of its time in which a stage had no task, of the stage that waited most.  sent_mb: 10^6 bytes a step that
the busiest stage sends.  busy: of all cores, which do the work of all PCs: near 1, the machine is what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.core.specs import parse_bytes
from zmqtrain.pipeline.costs import PC, SegmentCost
from zmqtrain.pipeline.partition import PlannedPipeline, partition
from zmqtrain.pipeline.schedule import Schedule
from zmqtrain.sim.pipeline import SimPipeline
from zmqtrain.transport.memory import LinkModel

from children import Child, commands, resident_bytes, say
from report import BusyMeter, format_rate, parse_rate, parse_seeds, print_table, write_json
from star import Star

__all__ = ["Row", "measure", "read_options", "main"]

PORT = 5555
PAYLOAD_SHARE = 0.956
"""Of a port's rate, what is left for payload."""
ROWS, WIDTH = 1024, 2048
"""Tokens of a micro-batch, and values of each: a carry of 4.2 MB in bf16."""
LAYERS = 28
MEET_SECONDS = 120.0
FAULT_STAGES, LOST, FAULT_STEP, FAULT_STEPS, FAULT_EVERY = 4, 2, 14, 24, 4
LEARNING_STAGES, LEARNING_MICRO_BATCHES = 3, 12
LEARNING = {
    "1f1b": Schedule("1f1b"),
    "2bw": Schedule("2bw"),
    "2bw, no prediction": Schedule("2bw", predicts=False),
}
TOGETHER = {"two pipelines of two": (2, 2), "four whole": (1, 1, 1, 1)}
TOGETHER_BATCH = 8
"""Windows of one PC's batch in --together."""
FAULT_SECONDS = 5.0
"""Within so many seconds, and what compiling takes, the step after a lost PC is to be complete."""
MEMORY_STAGES, MEMORY_WIDTH, MEMORY_STEPS = 4, 1024, 3
RUNTIME_BYTES = 700_000_000
"""What a process takes besides its stage: Python, jax, what it has compiled, and stacks, which count whole."""
FREED_IS_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Without it glibc keeps freed blocks of up to 32 MB for itself; jax's allocator of a card does not."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured pipeline. forward_ms, backward_ms: what one micro-batch takes at a stage of equal PCs.  speeds: of
    unequal PCs, of which each computes as many of LAYERS equal layers as the plan gives it."""

    schedule: Any = "1f1b"
    depth: Any = "roomy"
    codec: str = "bf16"
    stages: int = 4
    micro_batches: int = 32
    steps: int = 4
    forward_ms: float = 51.5
    backward_ms: float = 154.5
    tokens: int = ROWS
    width: int = WIDTH
    speeds: Sequence[float] = ()

    @property
    def carry_bytes(self) -> int:
        """Of a carry on the wire, but for scales and heads."""
        return self.tokens * self.width * {"bf16": 2, "int8": 1, "float32": 4}[self.codec]

    @property
    def ideal_seconds(self) -> float:
        """What a step would take if no PC ever waited."""
        whole = self.micro_batches * self.stages * (self.forward_ms + self.backward_ms) / 1e3
        return whole / sum(self.speeds or [1.0] * self.stages)

    @property
    def plan(self) -> PlannedPipeline:
        """What `zt.partition` makes of LAYERS equal layers on PCs of these speeds."""
        share = self.stages / LAYERS / 1e3
        layer = SegmentCost(
            name="layer",
            forward_seconds=share * self.forward_ms,
            backward_seconds=share * self.backward_ms,
            parameter_bytes=0,
            held_bytes=0,
            carry_bytes=self.carry_bytes,
        )
        speeds = self.speeds or [1.0] * self.stages
        pcs = [PC(name=f"pc-{number}", memory_bytes=1 << 40, speed=speed) for number, speed in enumerate(speeds)]
        link = LinkModel(PAYLOAD_SHARE * 1e9)
        planned = partition([layer] * LAYERS, pcs, self.micro_batches, link=link, pcs_per_pipeline=self.stages)
        return planned.pipelines[0]

    @property
    def slowness(self) -> tuple[float, ...]:
        """Of each stage: what a micro-batch takes there, over that of a stage of equal PCs."""
        if not self.speeds:
            return (1.0,) * self.stages
        return tuple(1e3 * stage.seconds / (self.forward_ms + self.backward_ms) for stage in self.plan.stages)

    @property
    def bar(self) -> float | None:
        """The least efficiency; of unequal PCs, nine tenths of what the plan has, which counts the bubble."""
        if self.speeds:
            return 0.9 * self.plan.efficiency
        return BARS.get((self.schedule, self.depth, self.codec))

    def simulated(self, rate: float) -> float:
        """Return the efficiency in virtual time, of ports of this rate in bits per second."""
        run = SimPipeline(
            schedule=self.schedule, depth=self.depth, stages=self.stages, micro_batches=self.micro_batches,
            steps=6 if self.schedule == "2bw" else 1, forward_seconds=self.forward_ms / 1e3,
            backward_seconds=self.backward_ms / 1e3, carry_bytes=self.carry_bytes, slowness=self.slowness,
        )  # fmt: skip
        return run.steps * self.ideal_seconds / run.run(LinkModel(PAYLOAD_SHARE * rate), 0).seconds


ALL = (
    Row(codec="bf16"),
    Row(codec="int8"),
    Row(schedule="2bw", codec="bf16", steps=7),
    Row(depth="eager", codec="bf16"),
    Row(schedule="2bw", depth="eager", codec="bf16", steps=7),
    Row(depth="textbook", codec="bf16"),
    Row(depth="textbook", codec="int8"),
    Row(codec="bf16", speeds=(1.0, 1.0, 1.0, 0.5)),
)
BARS = {("1f1b", "roomy", "bf16"): 0.86, ("1f1b", "roomy", "int8"): 0.87, ("2bw", "roomy", "bf16"): 0.95}
"""Least efficiency at four stages of 206 ms and ports of 1 Gb/s."""


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of each port, each way (default %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", choices=range(len(ALL)), help="which rows (default: all)")
    parser.add_argument("--memory", action="store_true", help="what each PC's process takes, in place of its speed")
    parser.add_argument("--faults", action="store_true", help="what a lost PC costs, in place of the speed")
    parser.add_argument(
        "--limit", type=parse_bytes, default="2GB", help="of a process of --memory (default %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=40, help="of the model of --memory (default %(default)s)")
    parser.add_argument(
        "--optimizer-on", default="file", choices=["file", "device"],
        help="where the optimizer's state of --memory lies (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--learning", action="store_true", help="what 2bw costs learning, in place of the star")
    parser.add_argument("--together", action="store_true", help="pipelines beside whole models, in place of the star")
    parser.add_argument("--steps", type=int, default=600, help="of each run of --learning and --together (%(default)s)")
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2], help="of --learning (default 0,1,2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    return parser.parse_args(arguments)


def measure(row: Row, rate: float) -> dict[str, Any]:
    """Build a star, train on it and return the row's figures. Raises RuntimeError if a process fails or hangs."""
    with Star(row.stages, rate) as star, contextlib.ExitStack() as stack:

        def child(host: Any, *arguments: str) -> Child:
            one = Child(star, host, __file__, *arguments)
            stack.callback(one.close)
            return one

        child("hub", "broker").answer()
        plan = json.dumps({"row": asdict(row), "hub": star.hub_address})
        stages = [child(number, "stage", plan, str(number)) for number in range(row.stages)]
        answers = [one.answer(600.0) for one in stages]
    seconds = answers[0]["seconds"][: -1 if row.schedule == "2bw" else None]
    efficiencies = [row.ideal_seconds / one for one in seconds]
    return {
        "schedule": row.schedule,
        "depth": row.depth,
        "codec": row.codec,
        "speeds": " ".join(f"{speed:g}" for speed in row.speeds),
        "efficiency": statistics.median(efficiencies),
        "low": min(efficiencies),
        "high": max(efficiencies),
        "simulated": row.simulated(rate),
        "bar": row.bar,
        "step_s": statistics.median(seconds),
        "waited": max(answer["waited"] for answer in answers),
        "sent_mb": max(answer["sent"] for answer in answers) / row.steps / 1e6,
        "busy": statistics.median(answer["busy"] for answer in answers),
    }


def main() -> None:
    """Measure what the command line asks for and print it; or be one of the processes."""
    match sys.argv[1:]:
        case ["broker"]:
            _be_broker()
        case ["holder", plan, number]:
            _be_holder(json.loads(plan), int(number))
        case ["survivor", plan, number]:
            _be_survivor(json.loads(plan), int(number))
        case ["stage", plan, number]:
            _be_stage(json.loads(plan), int(number))
        case arguments:
            options = read_options(arguments)
            if options.learning:
                _learn_all(options)
            elif options.together:
                _together_all(options)
            elif options.memory:
                _measure_memory(options)
            elif options.faults:
                _measure_faults(options)
            else:
                _measure_all(options)


def _learn_all(options: argparse.Namespace) -> None:
    """Print the held-out loss of the text program with a flush and without, by optimizer and seed."""
    rows = []
    for optimizer, rate in (("adamw", 3e-3), ("muon", 6e-3)):
        for seed in options.seeds:
            losses = {name: _learn(one, optimizer, rate, seed, options.steps) for name, one in LEARNING.items()}
            more = {f"{name}: % more": 100 * (losses[name] / losses["1f1b"] - 1) for name in list(LEARNING)[1:]}
            rows.append({"optimizer": optimizer, "rate": rate, "seed": seed, **losses, **more})
            print(f"{optimizer}, seed {seed}: {more}", file=sys.stderr, flush=True)
        own = [row for row in rows if row["optimizer"] == optimizer]
        means = {name: statistics.fmean(row[name] for row in own) for name in more}
        rows.append({"optimizer": optimizer, "rate": rate, "seed": "mean", **means})
    late = Schedule("2bw").late(LEARNING_STAGES, LEARNING_MICRO_BATCHES)
    print_table(
        rows,
        f"held-out loss after {options.steps} steps, {LEARNING_STAGES} stages, {LEARNING_MICRO_BATCHES} micro-batches, "
        f"of which {late} are late in 2bw",
    )
    if options.json:
        write_json(options.json, rows)


def _learn(schedule: Schedule, optimizer: str, rate: float, seed: int, steps: int) -> float:
    import zmqtrain as zt
    from zmqtrain.pipeline.local import LocalPipeline
    from zmqtrain.programs.text import TextProgram

    program = TextProgram(
        inner_optimizer=optimizer, rate=rate, layers=3, clip=0.0, seed=seed, batch=LEARNING_MICRO_BATCHES
    )
    units = itertools.chain.from_iterable(map(program.batches, itertools.count()))
    batches = list(itertools.islice(units, steps))
    params = program.init(seed)
    cuts = LEARNING_STAGES - 1
    stages = zt.split(program.loss, params, batches[0], cuts, micro_batches=LEARNING_MICRO_BATCHES)
    pipeline = LocalPipeline(stages, params, program.optimizer(), schedule, "bf16")
    for _ in pipeline.steps(batches):
        pass
    return program.evaluate(pipeline.params())["loss"]


def _measure_all(options: argparse.Namespace) -> None:
    rows = []
    try:
        for number in options.rows or range(len(ALL)):
            row = ALL[number]
            print(f"measuring {row.schedule}, {row.depth}, {row.codec} ...", file=sys.stderr, flush=True)
            rows.append(measure(row, options.rate))
    except RuntimeError as error:
        raise SystemExit(f"pipeline: {error}") from error
    one = ALL[0]
    what = f"{one.stages} stages, {one.micro_batches} micro-batches of {one.forward_ms + one.backward_ms:g} ms"
    print_table(rows, f"{what}, every port {format_rate(options.rate)}")
    if options.json:
        write_json(options.json, rows)


def _measure_memory(options: argparse.Namespace) -> None:
    """Train a model that no process may hold, and print what each of them took, beside what the plan said."""
    with Star(MEMORY_STAGES, options.rate) as star, contextlib.ExitStack() as stack:

        def child(host: Any, *arguments: str) -> Child:
            one = Child(star, host, __file__, *arguments)
            stack.callback(one.close)
            return one

        child("hub", "broker").answer()
        place = (
            "device"
            if options.optimizer_on == "device"
            else stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
        )
        plan = json.dumps(
            {"limit": options.limit, "layers": options.layers, "hub": star.hub_address, "optimizer_on": place}
        )
        os.environ.update(FREED_IS_GIVEN_BACK)  # of the processes that are started now
        holders = [child(number, "holder", plan, str(number)) for number in range(MEMORY_STAGES)]
        try:
            answers = [one.answer(1800.0) for one in holders]
        except RuntimeError as error:
            raise SystemExit(f"pipeline: {error}") from error
    rows = [
        {
            "PC": number,
            "layers": one["layers"],
            "holds_mb": one["held"] / 1e6,
            "planned_mb": one["planned"] / 1e6,
            "peak_mb": one["peak"] / 1e6,
            "peak / plan": one["peak"] / one["planned"],
            "process_mb": one["process"] / 1e6,
        }
        for number, one in enumerate(answers)
    ]
    whole = sum(one["held"] for one in answers)
    losses = " ".join(f"{loss:.3f}" for loss in answers[0]["losses"])
    print_table(
        rows,
        f"text, {options.layers} layers of {MEMORY_WIDTH}, AdamW: {whole / 1e9:.2f} GB of parameters, gradients and "
        f"optimizer (state on {options.optimizer_on}), {whole / options.limit:.2f} times the limit of "
        f"{options.limit / 1e9:g} GB; losses {losses}",
    )
    if options.json:
        write_json(options.json, rows)


def _together_all(options: argparse.Namespace) -> None:
    """Print the held-out loss that two pipelines of two PCs come to, and four whole PCs, by seed."""
    rows = []
    for seed in options.seeds:
        losses = {name: _train_together(pcs, seed, options.steps) for name, pcs in TOGETHER.items()}
        pipelines, whole = losses.values()
        rows.append({"seed": seed, **losses, "pipelines: % more": 100 * (pipelines / whole - 1)})
        print(f"seed {seed}: {rows[-1]['pipelines: % more']:+.2f} %", file=sys.stderr, flush=True)
    more = [row["pipelines: % more"] for row in rows]
    spread = {name: 100 * statistics.stdev(row[name] for row in rows) / rows[0][name] for name in TOGETHER}
    rows.append({"seed": "mean", "pipelines: % more": statistics.fmean(more)})
    rows.append({"seed": "deviation over seeds, %", **spread, "pipelines: % more": statistics.stdev(more)})
    title = f"held-out loss after {options.steps} steps of {4 * TOGETHER_BATCH} windows, AdamW, k = 4, d = 2, ternary"
    print_table(rows, title)
    if options.json:
        write_json(options.json, rows)


def _train_together(pcs: Sequence[int], seed: int, steps: int) -> float:
    """Train nodes of so many PCs each; return the loss of the shared parameters at the end."""
    import zmqtrain as zt
    from zmqtrain.programs.text import TextProgram

    settings = zt.RunSettings(
        every=4, delay=2, codec="ternary", broadcast_codec="ternary", initial="founder", start_nodes=len(pcs)
    )
    found: list[Any] = []

    def one(hub: str, number: int, size: int) -> None:
        batch = TOGETHER_BATCH * size
        program = TextProgram(layers=3, width=32, heads=2, context=64, batch=batch, rate=3e-3, clip=0.0, seed=seed)
        units = itertools.chain.from_iterable(program.batches(unit) for unit in itertools.count(1000 * number))
        batches = list(itertools.islice(units, steps))
        if size == 1:
            with zt.connect(hub, f"pc-{number}") as node:
                found.append((program, _train_whole(node, program, batches, seed)))
            return
        with zt.PipelineNode.join(
            hub, size, program.loss, program.init, program.optimizer(), batches[0],
            micro_batches=4, key=seed, group=f"pipeline {number}",
        ) as pipeline:  # fmt: skip
            for batch in batches:
                pipeline.step(batch)
            pipeline.finish()
            if (whole := pipeline.gather()) is not None:
                found.append((program, whole))

    with zt.BrokerThread("tcp://127.0.0.1:0", settings) as broker, ThreadPoolExecutor(sum(pcs)) as pool:
        places = [(number, size) for number, size in enumerate(pcs) for _ in range(size)]
        for done in [pool.submit(one, broker.address, *place) for place in places]:
            done.result()
    program, params = found[-1]  # of who ended last
    return program.evaluate(params)["loss"]


def _train_whole(node: Any, program: Any, batches: Sequence[Any], seed: int) -> Any:
    """Train a node with the whole model; return its parameters at the end."""
    import jax
    import optax

    import zmqtrain as zt

    optimizer = program.optimizer()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(program.loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    with zt.DelayedSync(node, program.init(seed)) as sync:
        params = sync.start
        state = optimizer.init(params)
        for batch in batches:
            params, state, loss = step(params, state, batch)
            params = sync.step(params, score=loss, samples=TOGETHER_BATCH)
        return sync.finish(params)


def _measure_faults(options: argparse.Namespace) -> None:
    """Kill and unplug a PC in the middle of a step, and print what that costs the others."""
    undisturbed = _undisturbed_losses()
    rows = []
    for fault in ("kill -9", "unplug"):
        print(f"{fault} ...", file=sys.stderr, flush=True)
        try:
            rows.append(_measure_fault(fault, options.rate, undisturbed))
        except RuntimeError as error:
            raise SystemExit(f"pipeline: {error}") from error
    title = f"a PC of {FAULT_STAGES} lost in the middle of step {FAULT_STEP}, copies every {FAULT_EVERY} steps"
    print_table(rows, title)
    if options.json:
        write_json(options.json, rows)


def _measure_fault(fault: str, rate: float, undisturbed: Sequence[float]) -> dict[str, Any]:
    with Star(FAULT_STAGES, rate) as star, contextlib.ExitStack() as stack:

        def child(host: Any, *arguments: str) -> Child:
            one = Child(star, host, __file__, *arguments)
            stack.callback(one.close)
            return one

        child("hub", "broker").answer()
        plan = json.dumps({"hub": star.hub_address})
        pcs = [child(number, "survivor", plan, str(number)) for number in range(FAULT_STAGES)]
        durations = [pc.answer(600.0)["step_s"] for pc in pcs]  # each says it at the end of the step before
        time.sleep(statistics.median(durations) / 2)
        at = time.monotonic()
        if fault == "unplug":
            star.set_link(LOST, up=False)
        else:
            pcs[LOST].kill()
        answers = [pc.answer(600.0) for number, pc in enumerate(pcs) if number != LOST]
        pcs[LOST].kill()
    ends = [min(end for end in answer["ends"] if end > answer["went_on"]) for answer in answers]
    compiling = max(answer["compiling"] for answer in answers)
    losses = answers[0]["losses"]
    apart = max(abs(loss - other) for loss, other in zip(losses, undisturbed, strict=True))
    return {
        "fault": fault,
        "next_step_s": max(ends) - at,
        "compiling_s": compiling,
        "recovering_s": max(answer["recovering"] for answer in answers),
        "without_compiling": max(ends) - at - compiling,
        "bar": FAULT_SECONDS,
        "step_s": statistics.median(durations),
        "steps_again": max(answer["again"] for answer in answers),
        "loss_before": losses[FAULT_STEP - 1],
        "loss_after": losses[FAULT_STEP + 1],
        "last_loss": losses[-1],
        "undisturbed": undisturbed[-1],
        "most_apart": apart,
    }


def _fault_program() -> tuple[Any, list[Any]]:
    from zmqtrain.programs.text import TextProgram

    program = TextProgram(width=128, layers=8, heads=4, context=64, batch=16, tied=False, clip=0.0, rate=1e-3)
    units = itertools.chain.from_iterable(map(program.batches, itertools.count()))
    return program, list(itertools.islice(units, FAULT_STEPS))


def _undisturbed_losses() -> list[float]:
    import zmqtrain as zt
    from zmqtrain.pipeline.local import LocalPipeline

    program, batches = _fault_program()
    params = program.init(0)
    stages = zt.split(program.loss, params, batches[0], FAULT_STAGES - 1, micro_batches=8)
    return [float(loss) for loss in LocalPipeline(stages, params, program.optimizer(), codec="bf16").steps(batches)]


# ---------------------------------------------------------------------- the processes that are measured


def _be_survivor(plan: dict[str, Any], number: int) -> None:
    """Train on whatever happens, and say when each step ended."""
    import zmqtrain as zt

    program, batches = _fault_program()
    hub = f"tcp://{plan['hub']}:{PORT}"
    with (
        zt.Communicator.create(hub, FAULT_STAGES, number, timeout_seconds=300.0) as comm,
        zt.ElasticPipeline.create(
            comm, program.loss, program.init, program.optimizer(), batches[0],
            micro_batches=8, key=0, copy_every=FAULT_EVERY,
        ) as pipeline,
    ):  # fmt: skip
        losses, ends = list[float](), [time.monotonic()]
        went_on = compiling = recovering = 0.0
        for step, batch in enumerate(batches):
            known = len(pipeline.recoveries)
            losses.append(pipeline.step(batch))
            ends.append(time.monotonic())
            if len(pipeline.recoveries) > known:
                went_on, compiling = ends[-2], pipeline.recoveries[-1].compile_seconds
                recovering = pipeline.recoveries[-1].seconds
            if step == FAULT_STEP - 1:
                say({"step_s": statistics.median(after - before for before, after in itertools.pairwise(ends[2:]))})
        again = sum(one.again for one in pipeline.recoveries)
        say(
            {
                "losses": losses,
                "ends": ends,
                "went_on": went_on,
                "compiling": compiling,
                "again": again,
                "recovering": recovering,
            }
        )
        pipeline.comm.barrier()


def _be_holder(plan: dict[str, Any], number: int) -> None:
    """Train as a stage within a limit of memory, and say how much of it was needed."""
    resource.setrlimit(resource.RLIMIT_DATA, (plan["limit"], plan["limit"]))

    import zmqtrain as zt
    from zmqtrain.pipeline.placement import held_bytes
    from zmqtrain.programs.text import TextProgram

    program = TextProgram(
        width=MEMORY_WIDTH, layers=plan["layers"], heads=8, context=64, batch=4, tied=False, clip=0.0, rate=1e-4
    )
    batches = list(itertools.islice(program.batches(0), MEMORY_STEPS))
    optimizer = program.optimizer()
    hub = f"tcp://{plan['hub']}:{PORT}"
    with zt.Communicator.create(hub, MEMORY_STAGES, number, timeout_seconds=900.0) as comm:
        held_before: list[int] = []

        def init(seed: int) -> Any:
            held_before.append(resident_bytes())  # init is traced for its shapes, and again before its leaves are made
            return program.init(seed)

        usable = plan["limit"] - RUNTIME_BYTES
        with zt.Pipeline.create(
            comm, program.loss, init, optimizer, batches[0], micro_batches=4, key=0, memory_bytes=usable,
            optimizer_on=plan["optimizer_on"],
        ) as pipeline:  # fmt: skip
            losses = list(pipeline.steps(batches))
            assert pipeline.placement is not None
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            say(
                {
                    "layers": sum("attention_in" in leaf.name for leaf in pipeline.stage.held),
                    "held": held_bytes(pipeline.stage, optimizer),
                    "planned": pipeline.placement.memory_bytes(pipeline.stage.number),
                    "peak": peak - held_before[-1],
                    "process": peak,
                    "losses": losses,
                }
            )
            comm.barrier()


def _be_broker() -> None:
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.core.settings import RunSettings

    told = commands()
    with BrokerThread(f"tcp://*:{PORT}", RunSettings()) as broker:
        say({"listens": broker.address})
        told.get()


class Emulated:
    """What a stage computes, emulated: it sleeps, and gives values of the right form."""

    def __init__(self, run: Any, row: Row) -> None:
        import numpy as np

        self._run = run
        self._forward_seconds, self._backward_seconds = (
            row.slowness[run.stage.number] * milliseconds / 1e3 for milliseconds in (row.forward_ms, row.backward_ms)
        )
        self._values = np.random.default_rng(run.stage.number).normal(size=(row.tokens, row.width)).astype(np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def take_batch(self, step: int, parts: Sequence[Any]) -> None:
        """Take nothing: nothing is computed."""

    def forward(self, task: Any, carry: Any) -> tuple[Any, ...]:
        """Sleep, and return a carry."""
        time.sleep(self._forward_seconds)
        return () if self._run.stage.is_last else (self._values,)

    def backward(self, task: Any, cotangents: Any) -> tuple[Any, ...]:
        """Sleep, and return a cotangent."""
        time.sleep(self._backward_seconds)
        return () if self._run.stage.number == 0 else (self._values,)

    def take_gradients(self, step: int) -> Any:
        """Return no gradients."""

    def take_loss(self, step: int) -> float:
        """Return a loss."""
        return 1.0

    def update(self, version: int, gradients: Any) -> None:
        """Update nothing."""

    def drop_versions(self, used: Sequence[int]) -> None:
        """Drop nothing."""


def _be_stage(plan: dict[str, Any], number: int) -> None:
    """Train as one stage, and say what each step has taken."""
    import jax
    import jax.numpy as jnp

    import zmqtrain as zt
    from zmqtrain.pipeline.schedule import Schedule

    row = Row(**plan["row"])

    def loss_fn(params: Any, batch: Any) -> Any:
        h = params["first"] * batch["x"][0]
        for scale in params["scales"]:
            h = h * scale if scale is params["scales"][-1] else zt.stage_end(h * scale)
        return jnp.mean(h)

    shapes = {
        "first": jax.ShapeDtypeStruct((row.tokens, row.width), jnp.float32),
        "scales": [jax.ShapeDtypeStruct((), jnp.float32) for _ in range(row.stages)],
    }
    batch = {"x": jnp.ones(row.micro_batches)}
    stages = zt.split(loss_fn, shapes, batch, micro_batches=row.micro_batches)
    own = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), stages[number].own_shapes)
    hub = f"tcp://{plan['hub']}:{PORT}"
    with zt.Communicator.create(hub, row.stages, number, timeout_seconds=MEET_SECONDS) as comm:
        pipeline = zt.Pipeline(comm, stages, own, schedule=Schedule(row.schedule, row.depth), codec=row.codec)
        pipeline.run = Emulated(pipeline.run, row)  # type: ignore[assignment]
        comm.barrier()
        seconds, meter, waited, begun = list[float](), BusyMeter(), 0.0, 0.0
        for step, _ in enumerate(pipeline.steps([batch] * row.steps)):
            now = time.monotonic()
            if step == 0:
                meter.__enter__()
                waited, start = pipeline.statistics.waited_seconds, now
            else:
                seconds.append(now - begun)
            begun = now
        meter.__exit__(None, None, None)
        pipeline.close()
        waited = (pipeline.statistics.waited_seconds - waited) / (begun - start)
        comm.barrier()
        answer = {"seconds": seconds, "waited": waited, "sent": pipeline.statistics.bytes_sent}
        say(answer | {"busy": meter.busy_share})


if __name__ == "__main__":
    main()
