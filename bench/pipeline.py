"""Measure a pipeline on the star: how much of their time its PCs compute, beside what the simulator says.

    efficiency = M x (forward + backward) / seconds of a step: 1 where no stage ever waits

Rule 1: each stage is a process in a namespace of its own, and so is the broker at which they meet. Computing is
emulated by sleeping; the bytes of carries and cotangents, their codecs and all that moves them are real.
Rule 2: the first step is not timed: receives are posted and buffers made in it. Steps are timed at the
first stage, which ends each of them; of 2bw, which has no flush, without the last, in which the pipeline runs empty.
Rule 3: `--learning` trains the text program in one process, with and without a flush, on the same batches.
Rule 4: `simulated` is what `zmqtrain sim` makes of the same row: the same machine of the schedule in virtual time.

Columns: efficiency, median of the steps; low, high: of the steps.  simulated: see above.  step_s: seconds of a step.
waited: share of its time in which a stage had no task, of the stage that waited most.  sent_mb: 10^6 bytes a step that
the busiest stage sends.  busy: of all cores, which do the work of all PCs: near 1, the machine is what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.sim.pipeline import SimPipeline
from zmqtrain.transport.memory import LinkModel

from children import Child, commands, say
from report import BusyMeter, format_rate, parse_rate, parse_seeds, print_table, write_json
from star import Star

__all__ = ["Row", "measure", "read_options", "main"]

PORT = 5555
PAYLOAD_SHARE = 0.956
"""Of a port's rate, what is left for payload."""
ROWS, WIDTH = 1024, 2048
"""Tokens of a micro-batch, and values of each: a carry of 4.2 MB in bf16."""
MEET_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured pipeline. forward_ms, backward_ms: what one micro-batch takes at a stage."""

    schedule: Any = "1f1b"
    depth: Any = "eager"
    codec: str = "bf16"
    stages: int = 4
    micro_batches: int = 32
    steps: int = 4
    forward_ms: float = 51.5
    backward_ms: float = 154.5
    tokens: int = ROWS
    width: int = WIDTH

    @property
    def carry_bytes(self) -> int:
        """Of a carry on the wire, but for scales and heads."""
        return self.tokens * self.width * {"bf16": 2, "int8": 1, "float32": 4}[self.codec]

    def simulated(self, rate: float) -> float:
        """Return the efficiency in virtual time, of ports of this rate in bits per second."""
        run = SimPipeline(
            schedule=self.schedule, depth=self.depth, stages=self.stages, micro_batches=self.micro_batches,
            steps=6 if self.schedule == "2bw" else 1, forward_seconds=self.forward_ms / 1e3,
            backward_seconds=self.backward_ms / 1e3, carry_bytes=self.carry_bytes,
        )  # fmt: skip
        return run.run(LinkModel(PAYLOAD_SHARE * rate), 0).efficiency


ALL = (
    Row(codec="bf16"),
    Row(codec="int8"),
    Row(schedule="2bw", codec="bf16", steps=7),
    Row(depth="textbook", codec="bf16"),
    Row(depth="textbook", codec="int8"),
)
BARS = {("1f1b", "eager", "bf16"): 0.86, ("1f1b", "eager", "int8"): 0.87, ("2bw", "eager", "bf16"): 0.95}
"""Least efficiency at four stages of 206 ms and ports of 1 Gb/s."""


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line asks for; leave with a message if it cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of each port, each way (default %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", choices=range(len(ALL)), help="which rows (default: all)")
    parser.add_argument("--learning", action="store_true", help="what 2bw costs learning, in place of the star")
    parser.add_argument("--steps", type=int, default=600, help="of each run of --learning (default %(default)s)")
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
    ideal = row.micro_batches * (row.forward_ms + row.backward_ms) / 1e3
    seconds = answers[0]["seconds"][: -1 if row.schedule == "2bw" else None]
    efficiencies = [ideal / one for one in seconds]
    return {
        "schedule": row.schedule,
        "depth": row.depth,
        "codec": row.codec,
        "efficiency": statistics.median(efficiencies),
        "low": min(efficiencies),
        "high": max(efficiencies),
        "simulated": row.simulated(rate),
        "bar": BARS.get((row.schedule, row.depth, row.codec)),
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
        case ["stage", plan, number]:
            _be_stage(json.loads(plan), int(number))
        case arguments:
            options = read_options(arguments)
            (_learn_all if options.learning else _measure_all)(options)


def _learn_all(options: argparse.Namespace) -> None:
    """Print the held-out loss of the text program with a flush and without, by optimizer and seed."""
    rows = []
    for optimizer, rate in (("adamw", 3e-3), ("muon", 6e-3)):
        for seed in options.seeds:
            losses = {name: _learn(name, optimizer, rate, seed, options.steps) for name in ("1f1b", "2bw")}
            more = 100 * (losses["2bw"] / losses["1f1b"] - 1)
            rows.append({"optimizer": optimizer, "rate": rate, "seed": seed, **losses, "2bw: % more": more})
            print(f"{optimizer}, seed {seed}: {more:+.2f} %", file=sys.stderr, flush=True)
        own = [row["2bw: % more"] for row in rows if row["optimizer"] == optimizer]
        rows.append({"optimizer": optimizer, "rate": rate, "seed": "mean", "2bw: % more": statistics.fmean(own)})
    print_table(rows, f"held-out loss after {options.steps} steps, three stages, four micro-batches")
    if options.json:
        write_json(options.json, rows)


def _learn(schedule: Any, optimizer: str, rate: float, seed: int, steps: int) -> float:
    import zmqtrain as zt
    from zmqtrain.pipeline.local import LocalPipeline
    from zmqtrain.pipeline.schedule import Schedule
    from zmqtrain.programs.text import TextProgram

    program = TextProgram(inner_optimizer=optimizer, rate=rate, layers=3, clip=0.0, seed=seed)
    units = itertools.chain.from_iterable(map(program.batches, itertools.count()))
    batches = list(itertools.islice(units, steps))
    params = program.init(seed)
    stages = zt.split(program.loss, params, batches[0], 2, micro_batches=4)
    pipeline = LocalPipeline(stages, params, program.optimizer(), Schedule(schedule), "bf16")
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


# ---------------------------------------------------------------------- the processes that are measured


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

        self._run, self._row = run, row
        self._values = np.random.default_rng(run.stage.number).normal(size=(row.tokens, row.width)).astype(np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def take_batch(self, step: int, parts: Sequence[Any]) -> None:
        """Take nothing: nothing is computed."""

    def forward(self, task: Any, carry: Any) -> tuple[Any, ...]:
        """Sleep, and return a carry."""
        time.sleep(self._row.forward_ms / 1e3)
        return () if self._run.stage.is_last else (self._values,)

    def backward(self, task: Any, cotangents: Any) -> tuple[Any, ...]:
        """Sleep, and return a cotangent."""
        time.sleep(self._row.backward_ms / 1e3)
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
