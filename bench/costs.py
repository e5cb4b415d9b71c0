"""Measure what an exchange costs the processors: a node's codec thread and the hub's, in ns per parameter carried.

Rule 1: what is measured is what a run does, without a network: `DeltaCoder` and `Aggregator`, frames, checks and
checksums included.  Rule 2: CPU time of the one thread; the best of all rounds counts.  Rule 3: the last lines printed
are those of the table in `zmqtrain/planning/costs.py`, which plans are made from: measure, and copy them there.

Where a processor trains, it subtracts and rebases too (all threads of XLA's): the line REBASE_NS, and behind it the
same for models in fragments.

encode, decode: at a node, of its delta, and judging it; of the aggregate and of its own part in it.  subtract: what
encoding costs besides for each delta of its own that is on its way.  accumulate: at the hub, of one contribution,
checked, judged and added, or held encoded.  held: what one that is held adds to the release.  release: at the hub,
of one aggregate: outer step, encoding, what was published; rounds have 1 and 4 contributions, by turns, and the hub
begins with as much that is not published as later rounds leave.

`--rounds-of 4` prints what a whole round of so many contributions costs the hub, beside the path of dense sums
(`--outer` is plain averaging there), and how much sooner two and four threads release it: time that has passed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import DeltaCoder, Encoded, Vectors, encode_snapshot
from zmqtrain.averaging.held_rounds import EncodedRound, SlabThreads
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, LeafSpec, ModelSpec, Offer, PeerId, count_values
from zmqtrain.planning.costs import COSTS, CodecCosts, SparseCosts
from zmqtrain.planning.schedule import model_of
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Aggregate, Publish
from zmqtrain.train.anchor import DeviceMoves

from report import print_table, write_json

__all__ = [
    "Hub",
    "Stopwatch",
    "aggregate_of",
    "fit",
    "main",
    "measure",
    "measure_rebase",
    "measure_round",
    "settings_of",
]

Result = TypeVar("Result")
PEER = PeerId("pc-1#0")
MOST_CONTRIBUTIONS = 4
SPARSE = re.compile(r"topk:density=([^+:,]+)\+(\w+)")
DENSITIES = [f"topk:density={density}+sign" for density in (0.01, 0.05, 0.1)]


class Stopwatch:
    """The least CPU time of this thread that each kind of work has taken, in seconds, or the time that has passed."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.least: dict[str, float] = {}
        self._clock = clock

    def time(self, name: str, work: Callable[[], Result]) -> Result:
        began = self._clock()
        result = work()
        self.least[name] = min(self.least.get(name, float("inf")), self._clock() - began)
        return result


def settings_of(spec: str) -> RunSettings:
    return RunSettings(codec=spec, broadcast_codec=spec, outer="sgd:rate=1", fragments=1)


def in_leaves(values: int, leaves: int) -> ModelSpec:
    """Return a model of about so many values: as a plan takes it, or in so many equal leaves."""
    if leaves < 2:
        return model_of(values)
    return tuple(LeafSpec(f"leaf{number:04d}", (values // leaves,), "float32") for number in range(leaves))


class Hub:
    """A hub that is given rounds of deltas which nodes have encoded beforehand, and what its work takes."""

    def __init__(
        self, spec: str, model: ModelSpec, threads: int, *, dense: bool = False, of_process: bool = False
    ) -> None:
        settings, values = settings_of(spec), count_values(model)
        self.watch = Stopwatch(time.perf_counter if of_process else time.thread_time)
        self.aggregator, random = Aggregator(settings), np.random.default_rng(0)
        self.aggregator.encoded = EncodedRound(self.aggregator.meter, SlabThreads(threads), enabled=not dense)
        self.aggregator.plan(model)
        coder = DeltaCoder(model, settings)
        self.deltas: list[tuple[Publish, Sequence[Buffer]]] = []
        for number in range(MOST_CONTRIBUTIONS):
            segments = [random.standard_normal(leaf.values, np.float32) for leaf in model]
            if not number:
                self.aggregator.found(encode_snapshot(coder.layout, [np.concatenate(segments)]))
            u = coder.encode(Offer(number, 0, segments, 1, 1))
            coder.withdraw(number)
            sizes = tuple(len(frame) for frame in u.frames)
            self.deltas.append((Publish(number, number, number, 0, u.codec, sizes, 1, 1, 0.0), u.frames))
        self.aggregator.parameters[0] += np.float32(0.3) * random.standard_normal(values, np.float32)

    def round(self, contributions: int) -> tuple[Buffer, ...]:
        """Do one round and return the frames of its aggregate."""
        aggregator = self.aggregator
        come = []
        for number, (publish, frames) in enumerate(self.deltas[:contributions]):

            def accumulate(publish: Publish = publish, frames: Sequence[Buffer] = frames) -> None:
                self.watch.time("check", lambda: aggregator.check(publish, frames))
                self.watch.time("judge", lambda: aggregator.judge(PEER, publish, frames))
                self.watch.time("add", lambda: aggregator.accumulate(PEER, publish, frames))

            self.watch.time("accumulate", accumulate)
            come.append(Contribution(PEER, number, 0, 1, 0.0, number, 0))
        reduce = Reduce(aggregator.version + 1, (0,), tuple(come), max(contributions, 1), False)
        (frames,) = self.watch.time(f"release {contributions}", lambda: aggregator.release(reduce)).frames
        return frames


def aggregate_of(coder: DeltaCoder, number: int, frames: Sequence[Buffer]) -> Aggregate:
    """Return what announces these frames: the aggregate in which this node's delta of that number has landed."""
    sizes = tuple(len(frame) for frame in frames)
    codec = coder.broadcast_coding.name
    return Aggregate(number, number + 1, codec, (0,), (len(frames),), sizes, ((PEER, number),), 1)


def measure(spec: str, values: int, rounds: int) -> CodecCosts:
    """Return what one codec, up and down, costs for a model of so many values, the least of `rounds` exchanges."""
    settings, model = settings_of(spec), model_of(values)
    coder, watch = DeltaCoder(model, settings, threads=SlabThreads(1)), Stopwatch()
    hub = Hub(spec, model, 1)
    random = np.random.default_rng(0)
    segments = [random.standard_normal(leaf.values, np.float32) for leaf in model]

    def encode(number: int) -> Encoded:
        offer = Offer(number, 0, segments, 1, 1)
        encoded = coder.encode(offer)
        coder.judge(offer, encoded)
        return encoded

    for number in range(rounds):
        watch.time("encode", lambda number=number: encode(number))  # type: ignore[misc]
        watch.time("again", lambda number=number: encode(rounds + number))  # type: ignore[misc]
        coder.withdraw(rounds + number)
        frames = hub.round(MOST_CONTRIBUTIONS if number % 2 else 1)
        aggregate = aggregate_of(coder, number, frames)
        watch.time(
            "decode",
            lambda a=aggregate, n=number, f=frames: coder.decode_aggregate(a, (n,), f),  # type: ignore[misc]
        )
        coder.withdraw(number)
    least = watch.least | hub.watch.least
    one, most = least["release 1"], least[f"release {MOST_CONTRIBUTIONS}"]
    held = max(0.0, (most - one) / (MOST_CONTRIBUTIONS - 1))
    seconds = {
        "encode": least["encode"],
        "subtract": max(0.0, least["again"] - least["encode"]),
        "decode": least["decode"],
        "accumulate": least["accumulate"],
        "release": max(0.0, one - held),
        "held": held,
    }
    return CodecCosts(**{f"{name}_ns": round(1e9 * taken / values, 2) for name, taken in seconds.items()})


def fit(measured: Mapping[float, CodecCosts]) -> SparseCosts:
    """Return a base and a part per kept value of each kind of work, from what codecs of several densities cost."""
    kinds = [field.name for field in fields(CodecCosts)]
    densities = np.array([*measured])
    lines = {}
    for kind in kinds:
        costs = np.array([getattr(cost, kind) for cost in measured.values()])
        slope, base = np.polyfit(densities, costs, 1) if len(costs) > 1 else (0.0, costs[0])
        lines[kind] = (max(0.0, round(float(base), 2)), round(float(slope), 2))
    return SparseCosts(
        base=CodecCosts(**{kind: base for kind, (base, _) in lines.items()}),
        kept=CodecCosts(**{kind: slope for kind, (_, slope) in lines.items()}),
    )


def measure_round(spec: str, values: int, rounds: int, contributions: int) -> dict[str, Any]:
    """Return what a round of so many contributions costs the hub, in ns per parameter: with the sum in memory and
    without, and by how much two and four threads divide the time of the release."""
    row: dict[str, Any] = {"codec": spec}
    seconds: dict[str, float] = {}
    for name, threads, of_process in [
        ("dense", 1, False),
        ("sparse", 1, False),
        ("1 thread", 1, True),
        ("2 threads", 2, True),
        ("4 threads", 4, True),
    ]:
        hub = Hub(spec, model_of(values), threads, dense=name == "dense", of_process=of_process)
        for _ in range(rounds):
            hub.round(contributions)
        least = hub.watch.least
        release = seconds[name] = least[f"release {contributions}"]
        if not of_process:
            row[f"{name}: accumulate"] = round(1e9 * least["accumulate"] / values, 2)
            row[f"{name}: release"] = round(1e9 * release / values, 2)
            row[f"{name}: round"] = round(1e9 * (release + contributions * least["accumulate"]) / values, 2)
        elif name != "1 thread":
            row[name] = round(seconds["1 thread"] / release, 2)
    return row


def measure_rebase(values: int, rounds: int, fragments: int = 1) -> float:
    """Return what subtracting and rebasing one fragment cost per parameter of it, where a processor does it: CPU ns of
    all threads."""
    model = model_of(values)
    layout = Layout(model, fragments)
    moves = DeviceMoves(layout, model, donate=True)
    params, anchor = ([jnp.zeros(leaf.shape) for leaf in model] for _ in range(2))
    step = {0: Vectors().take_segments(layout.counts(0))}
    for segment in step[0]:
        segment.fill(1)
    least = float("inf")
    for _ in range(rounds + 1):  # the first compiles
        began = time.process_time()
        jax.block_until_ready(moves.pending(params, anchor, 0))
        params, anchor = moves.apply(params, anchor, step, step)
        jax.block_until_ready((params, anchor))
        least = min(least, time.process_time() - began)
    return 1e9 * least / sum(layout.counts(0))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the codecs that the command line names; print their table, and its lines as the package has them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", nargs="+", default=[*COSTS, *DENSITIES], help="specs (default: those of the table)")
    parser.add_argument("--values", type=float, default=25e6, help="of the model (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=8, help="exchanges, of which the least counts")
    parser.add_argument("--fragments", type=int, nargs="*", default=[2], help="of the lines beside REBASE_NS")
    parser.add_argument("--rounds-of", type=int, metavar="N", help="what rounds of N contributions cost the hub")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(argv)
    values = int(options.values)
    if options.rounds_of:
        table = [measure_round(spec, values, options.rounds, options.rounds_of) for spec in options.codec]
        print_table(table, f"a round of {options.rounds_of} at the hub: CPU ns per parameter, {values:,} values")
        if options.json:
            write_json(options.json, table)
        return
    costs = {spec: measure(spec, values, options.rounds) for spec in options.codec}
    rows = [{"codec": spec, **vars(cost)} for spec, cost in costs.items()]
    print_table(rows, f"CPU ns per parameter, {values:,} values")
    sparse: dict[str, dict[float, CodecCosts]] = {}
    for spec, cost in costs.items():
        if match := SPARSE.fullmatch(spec):
            sparse.setdefault(match[2], {})[float(match[1])] = cost
        else:
            print(f'    "{spec}": {cost!r},')
    for measured in sparse.values():
        print(f'    "topk": {fit(measured)!r},')
    print(f"REBASE_NS = {measure_rebase(values, options.rounds):.2g}")
    for fragments in options.fragments:
        ns = measure_rebase(values, options.rounds, fragments)
        print(f"of {fragments} fragments, one: {ns:.2g} ns")
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
