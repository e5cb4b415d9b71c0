"""Make the runs of bench/time_to_loss.py that are real: a broker and its nodes on a star, and exchanges that are timed.

Rule 1: the broker and every node are processes in a network namespace each, which do what `zmqtrain-broker` and
`zmqtrain-node` do, with `--shards 1`; a step takes the place's step time, of which it computes some and sleeps the
rest.
Rule 2: the run is not asked for its score: the broker saves a checkpoint each second, and what the nodes had of it is
scored by the bench: now and then while the run goes on, by a thread that takes only what nobody else wants of the
cores, and all of it once the run is over. A point's time is that of the release, by the broker's record.
Rule 3: nodes that have joined wait until all have, and then begin together: time zero. What they compute is compiled,
or in the cache folder, before they join.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

from zmqtrain.checkpoint.files import read_arrays
from zmqtrain.monitor.recorder import BrokerRecorder
from zmqtrain.monitor.records import read_records
from zmqtrain.sim.program import SharedModel
from zmqtrain.train.sync import DelayedSync, SyncStatistics

import collectives
import rivals
from children import Child, ask_all, commands, say
from report import BusyMeter
from star import Star
from time_to_loss_rows import (
    FAR,
    SCORED_STEPS,
    SMOOTHED_STEPS,
    TARGETS,
    Curve,
    Job,
    Line,
    Place,
    figures_of,
    read_chosen,
    run_settings,
)

__all__ = ["run_real", "saved_versions", "time_exchange", "main"]

PORT = 5555
KEEP = 1_000_000
LIVE_SCORED = 4
"""While the run goes on, every so many checkpoints one is scored."""
STOPPED_BELOW = 0.01
SAVED_SECONDS = 1.0
BEGIN_SECONDS = 300.0
MEMORY = Path("/dev/shm")
PUBLISHED = "published/"


def run_real(job: Job) -> Line:
    """Make a run of ours on the star; return its curve and figures. Raises RuntimeError if a process fails."""
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        measured = _on_the_star(job, folder)
        chosen = read_chosen(folder / "broker.jsonl", run_settings(job))
        statistics = [SyncStatistics(**one) for one in measured.pop("statistics")]
        return {
            **measured,
            "chosen": chosen,
            **figures_of(statistics, chosen),
            "wall_seconds": round(time.perf_counter() - began, 2),
        }
    finally:
        shutil.rmtree(folder)


def time_exchange(job: Job, repetitions: int = 3) -> Line:
    """Measure a sum over all nodes of arrays of the job's sizes, one after the other: by gloo, where torch is
    installed, else by the ring of this package."""
    rival = rivals.find_rivals()["gloo"]
    group = collectives.Group(library="gloo" if rival else collectives.OWN, nodes=job.nodes, rate=job.place.link)
    cases = [
        collectives.Case(algorithm="" if rival else "ring", values_bytes=size, repetitions=repetitions)
        for size in job.values_bytes
    ]
    rows = collectives.measure(group, cases)
    return {"seconds": sum(row["median_ms"] for row in rows) / 1e3, "by": "gloo" if rival else "the ring of zmqtrain"}


def _on_the_star(job: Job, folder: Path) -> Line:
    said = json.dumps(asdict(job))
    checkpoints = _Checkpoints(job, folder)
    with Star(job.nodes, job.place.link) as star, contextlib.ExitStack() as stack:
        broker = Child(star, "hub", __file__, "broker", said, str(folder))
        stack.callback(broker.close)
        nodes = [Child(star, number, __file__, "node", said, str(number)) for number in range(job.nodes)]
        for node in nodes:
            stack.callback(node.close)
        for child in (broker, *nodes):
            child.answer()
        for node in nodes:
            node.tell("join", f"tcp://{star.hub_address}:{PORT}")
        for node in nodes:
            node.answer(BEGIN_SECONDS)
        ask_all(nodes, "begin", zero := time.monotonic() + 0.1)
        with BusyMeter() as busy, _nice():
            ended = checkpoints.follow(zero + job.max_steps * job.place.step_seconds)
        statistics = ask_all(nodes, "figures")
        broker.tell("figures")
        hub = broker.answer()
    return {
        "curve": checkpoints.curve(zero),
        "ended": ended,
        "statistics": statistics,
        "refused_at_hub": hub["refused"],
        "busy": busy.busy_share,
    }


@contextlib.contextmanager
def _nice() -> Iterator[None]:
    """Let this thread have only the time of the cores that nobody else wants."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, 19)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, thread, before)


def saved_versions(folder: Path) -> list[int]:
    """Return the versions of the run in this folder that its broker has saved, rising."""
    names = (path.name for path in (folder / "checkpoints").glob("checkpoint-*.safetensors"))
    return sorted(int(name.removeprefix("checkpoint-").partition(".")[0]) for name in names)


class _Checkpoints:
    """The checkpoints of a run's broker, and how its shared model scores in each."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.program = job.make()
        self._model = SharedModel(self.program)
        self._paths = self._leaf_paths()
        self._scores: dict[int, float] = {}

    def _leaf_paths(self) -> list[str]:
        from zmqtrain.train.step import describe_model

        return [PUBLISHED + leaf.path for leaf in describe_model(self.program.init(0))]

    def follow(self, end: float) -> str:
        """Wait until the shared model has come under the target, or for the end (on this machine's monotonic clock);
        return which it was."""
        # the last checkpoint may be of a moment before the smoothed curve has crossed
        more = 2 * SMOOTHED_STEPS * self.job.place.step_seconds
        done_at = inf
        while (now := time.monotonic()) < min(end, done_at):
            waiting = saved_versions(self.folder)[-LIVE_SCORED:]
            if len(waiting) == LIVE_SCORED and not self._scores.keys() & set(waiting):
                score = self._score(waiting[-1])
                if score <= self.job.until - STOPPED_BELOW and done_at == inf:
                    done_at = now + more
            time.sleep(min(SAVED_SECONDS / 2, max(0.0, end - time.monotonic())))
        return "target" if done_at < inf else "max_steps"

    def curve(self, zero: float) -> Curve:
        """Return the curve of the run in seconds since `zero`, from where it comes near the first target."""
        records = read_records(self.folder / "broker.jsonl")
        began = next(one["monotonic"] for one in records if one["kind"] == "run")
        released = {one["version"]: one["seconds"] + began - zero for one in records if one["kind"] == "release"}
        curve: Curve = []
        for version in reversed(saved_versions(self.folder)):
            if released.get(version, -1.0) >= 0:
                curve.append((round(released[version], 4), self._score(version)))
                if curve[-1][1] > max(TARGETS[0], self.job.until) + FAR:
                    break
        return curve[::-1]

    def _score(self, version: int) -> float:
        if version not in self._scores:
            _, arrays = read_arrays(self.folder / "checkpoints" / f"checkpoint-{version:012d}.safetensors")
            self._scores[version] = self._model.scores([arrays[path] for path in self._paths])["loss"]
        return self._scores[version]


# ---------------------------------------------------------------------- the processes


def main() -> None:
    """Be the broker or a node of a run."""
    match sys.argv[1:]:
        case ["broker", said, folder]:
            _be_broker(_read_job(said), Path(folder))
        case ["node", said, number]:
            _be_node(_read_job(said), int(number))


def _read_job(said: str) -> Job:
    facts = json.loads(said)
    return Job(**{**facts, "place": Place(**facts["place"]), "values_bytes": tuple(facts["values_bytes"])})


def _be_broker(job: Job, folder: Path) -> None:
    """Serve the run until the bench ends this process; say the broker's figures when they are asked for."""
    from zmqtrain.broker.broker import Broker
    from zmqtrain.broker.serve import serve

    told, living = commands(), list[Broker]()

    def answer() -> None:
        told.get()
        say(asdict(living[0].statistics()))

    def ready(broker: Broker) -> None:
        living.append(broker)
        threading.Thread(target=answer, daemon=True).start()
        say({"listens": True})

    every = max(0.1, SCORED_STEPS * job.place.step_seconds)
    with BrokerRecorder(folder / "broker.jsonl", {"monotonic": time.monotonic()}) as recorder:
        serve(
            f"tcp://*:{PORT}",
            replace(run_settings(job), shards=1),
            checkpoint=folder / "checkpoints",
            checkpoint_every=f"{every:g}s",
            checkpoint_keep=KEEP,
            ready=ready,
            events=recorder,
        )


def _be_node(job: Job, number: int) -> None:
    """Compile the step, join when told, train at the pace of the place until the bench ends this process."""
    from zmqtrain import TrainingLoop, connect
    from zmqtrain.train.step import LoopHooks, MinibatchStep

    from learning import pace

    told = commands()
    program = job.make()
    local = MinibatchStep(program)
    state = local.init(0)
    for batch in program.batches(0):
        state, loss, _ = local.step(state, iter([batch]))
    loss.block_until_ready()
    say({"compiled": True})
    _, address = told.get()

    slowness = 2 if number >= job.nodes - job.slow else 1
    paces: list[Callable[[int, Any], None]] = []

    class Timed(DelayedSync):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            say({"joined": True})
            _, zero = told.get()
            say({"begins": True})
            threading.Thread(target=answer, args=(self,), daemon=True).start()
            time.sleep(max(0.0, zero - time.monotonic()))
            paces.append(pace(slowness * job.place.step_seconds))

    def answer(sync: DelayedSync) -> None:
        told.get()
        say(asdict(sync.statistics()))

    with connect(address, f"pc-{number}", timeout_seconds=60.0) as node:
        hooks = LoopHooks(watch=lambda step, loss: paces[0](step, loss))
        TrainingLoop(program, node, hooks, sync=Timed).run(node.batches(program))


if __name__ == "__main__":
    main()
