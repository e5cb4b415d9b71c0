"""Measure what an exchange costs the processors: a node's codec thread and the hub's, in ns per parameter carried.

Rule 1: what is measured is what a run does, without a network: `DeltaCoder` and `Aggregator`, frames, checks and
checksums included.  Rule 2: CPU time of the one thread; the best of all rounds counts.  Rule 3: the last lines printed
are those of the table in `zmqtrain/runtime/planning/costs.py`, which plans are made from: measure, and copy them there.

Where a processor trains, it subtracts and rebases too (all threads of XLA's): the line REBASE_NS, and behind it the
same for models in fragments.

encode, decode: at a node, of its delta, and judging it; of the aggregate and of its own part in it.  subtract: what
encoding costs besides for each delta of its own that is on its way.  accumulate: at the hub, of one contribution,
checked, judged and added.  release: at the hub, of one aggregate: outer step, encoding, what was published.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.codecs.fragment import Layout
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Aggregate, Publish
from zmqtrain.runtime.equation.aggregator import Aggregator
from zmqtrain.runtime.equation.delta import DeltaCoder, Encoded, encode_snapshot
from zmqtrain.runtime.equation.vectors import Vectors
from zmqtrain.runtime.planning.costs import COSTS, CodecCosts
from zmqtrain.runtime.planning.schedule import model_of
from zmqtrain.settings import RunSettings
from zmqtrain.train.step import Rebase
from zmqtrain.types import Offer, PeerId

from report import print_table, write_json

__all__ = ["measure", "measure_rebase", "main"]

Result = TypeVar("Result")
PEER = PeerId("pc-1#0")


class _Stopwatch:
    """The least CPU time of this thread that each kind of work has taken, in seconds."""

    def __init__(self) -> None:
        self.least: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Result]) -> Result:
        began = time.thread_time()
        result = work()
        self.least[name] = min(self.least.get(name, float("inf")), time.thread_time() - began)
        return result


def measure(spec: str, values: int, rounds: int, seed: int = 0) -> CodecCosts:
    """Return what one codec, up and down, costs for a model of so many values, the least of `rounds` exchanges."""
    settings, model = RunSettings(codec=spec, broadcast_codec=spec), model_of(values)
    coder, aggregator, watch = DeltaCoder(model, settings), Aggregator(settings), _Stopwatch()
    random = np.random.default_rng(seed)
    segments = [random.standard_normal(leaf.values, np.float32) for leaf in model]
    aggregator.plan(model)
    aggregator.found(encode_snapshot(coder.layout, [np.concatenate(segments)]))

    def encode(number: int) -> Encoded:
        offer = Offer(number, 0, segments, 1, 1)
        encoded = coder.encode(offer)
        coder.judge(offer, encoded)
        return encoded

    for number in range(rounds):
        u = watch.time("encode", lambda number=number: encode(number))  # type: ignore[misc]
        watch.time("again", lambda number=number: encode(rounds + number))  # type: ignore[misc]
        coder.withdraw(rounds + number)
        sizes = tuple(len(frame) for frame in u.frames)
        publish = Publish(number, number, number, 0, u.codec, sizes, 1, 1, 0.0)

        def accumulate(publish: Publish = publish, frames: Sequence[bytearray] = u.frames) -> None:  # type: ignore[assignment]
            aggregator.check(publish, frames)
            aggregator.judge(PEER, publish, frames)
            aggregator.accumulate(PEER, publish, frames)

        watch.time("accumulate", accumulate)
        one = Contribution(PEER, number, 0, 1, 0.0, number, 0)
        reduce = Reduce(number + 1, (0,), (one,), 1, False)
        released = watch.time("release", lambda reduce=reduce: aggregator.release(reduce))  # type: ignore[misc]
        (frames,) = released.frames
        aggregate = Aggregate(number, number + 1, released.codec, (0,), (len(frames),), (), ((PEER, number),), 1)
        watch.time(
            "decode",
            lambda a=aggregate, n=number, f=frames: coder.decode_aggregate(a, (n,), f),  # type: ignore[misc]
        )
        coder.withdraw(number)
    least = watch.least
    least["subtract"] = max(0.0, least.pop("again") - least["encode"])
    return CodecCosts(**{f"{name}_ns": round(1e9 * seconds / values, 2) for name, seconds in least.items()})


def measure_rebase(values: int, rounds: int, fragments: int = 1) -> float:
    """Return what subtracting and rebasing one fragment cost per parameter of it, where a processor does it: CPU ns of
    all threads."""
    model = model_of(values)
    layout = Layout(model, fragments)
    rebase = Rebase(layout, donate=True)
    params, anchor = ([jnp.zeros(leaf.shape) for leaf in model] for _ in range(2))
    step = {0: Vectors().take_segments(layout.counts(0))}
    for segment in step[0]:
        segment.fill(1)
    least = float("inf")
    for _ in range(rounds + 1):  # the first compiles
        began = time.process_time()
        jax.block_until_ready(rebase.pending(params, anchor, 0))
        params, anchor = rebase.apply(params, anchor, step, step)
        jax.block_until_ready((params, anchor))
        least = min(least, time.process_time() - began)
    return 1e9 * least / sum(layout.counts(0))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the codecs that the command line names; print their table, and its lines as the package has them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", nargs="+", default=list(COSTS), help="specs (default: those of the table)")
    parser.add_argument("--values", type=float, default=25e6, help="of the model (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=8, help="exchanges, of which the least counts")
    parser.add_argument("--fragments", type=int, nargs="*", default=[2], help="of the lines beside REBASE_NS")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(argv)
    costs = {spec: measure(spec, int(options.values), options.rounds) for spec in options.codec}
    rows = [{"codec": spec, **vars(cost)} for spec, cost in costs.items()]
    print_table(rows, f"CPU ns per parameter, {int(options.values):,} values")
    for spec, cost in costs.items():
        print(f'    "{spec}": {cost!r},')
    print(f"REBASE_NS = {measure_rebase(int(options.values), options.rounds):.2g}")
    for fragments in options.fragments:
        ns = measure_rebase(int(options.values), options.rounds, fragments)
        print(f"of {fragments} fragments, one: {ns:.2g} ns")
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
