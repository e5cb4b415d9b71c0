"""Measure every pass that a delta makes over memory, at a node and at the hub, beside the floor of that pass.

    python bench/passes.py [--codec SPEC ...] [--values N] [--leaves N]

Rule 1: a pass is work of `bench/costs.py` (what a run does, without a network), timed alone; what cannot be timed alone
is the difference of two works.  Rule 2: CPU time in ns a parameter, the least of all rounds: of the one thread that
does it; of all threads of the process where XLA does it.
Rule 3: the floor of a pass is the bytes that it moves over the copy rate that this very run has measured, bytes read
and written both counted. The bytes are those of arrays in memory that the pass reads and writes, each once: what stays
in a core's cache is not counted, nor what the processor fetches of memory that is only overwritten.
Rule 4: a pass of more than 1.5 times its floor is marked: there is work left in it, or it computes more than it moves.

The copy rate and the busy share of the machine stand above the tables: on a busy machine both sides are slow, and not
alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.averaging.coder import DeltaCoder, Encoded
from zmqtrain.averaging.held_rounds import SlabThreads
from zmqtrain.codecs.payload import decode_payload, encode_payload
from zmqtrain.core.checksum import crc32
from zmqtrain.core.interfaces import PinnedSegments
from zmqtrain.core.types import Buffer, ModelSpec, Offer, count_values
from zmqtrain.train.anchor import DeviceMoves

from costs import MOST_CONTRIBUTIONS, PEER, Hub, Stopwatch, aggregate_of, in_leaves, settings_of
from report import BusyMeter, print_table, write_json

__all__ = ["Pass", "copy_rate", "main", "measure_passes"]

USUAL = ["ternary", "topk:density=0.05+sign"]
"""The codec of a run with fixed settings, and one that a plan takes."""
FAR = 1.5
"""Over so many times its floor a pass is marked."""
COPIED = 25_000_000
"""Values of the copy that the floor goes by: more than a cache holds."""


class Pass(NamedTuple):
    """One pass. bytes, ns: a parameter, moved and measured.  count: of an exchange; at the hub, of a contribution."""

    where: str
    name: str
    bytes: float
    ns: float
    count: float = 1.0

    def row(self, codec: str, rate: float) -> dict[str, Any]:
        """Return the line of the table. rate: of a copy, in bytes per second."""
        floor = 1e9 * self.bytes / rate
        over = self.ns / floor if floor else float("nan")
        return {
            "codec": codec,
            "at": self.where,
            "pass": self.name,
            "bytes": round(self.bytes, 2),
            "floor_ns": round(floor, 2),
            "ns": round(self.ns, 2),
            "over_floor": round(over, 1),
            "": "*" if over > FAR else "",
        }


def copy_rate(rounds: int, values: int = COPIED) -> float:
    """Return the bytes per CPU second, read and written, at which numpy copies a float32 array in this thread."""
    here, there, watch = np.ones(values, np.float32), np.zeros(values, np.float32), Stopwatch()
    for _ in range(rounds):
        watch.time("copy", lambda: np.copyto(there, here))
    return 8 * values / watch.least["copy"]


class _Node:
    """A node that is given aggregates, and what its passes take."""

    def __init__(self, spec: str, model: ModelSpec) -> None:
        self.spec, self.model = spec, model
        self.watch, self.by_xla = Stopwatch(), Stopwatch(time.process_time)
        self.coder = DeltaCoder(self.model, settings_of(spec), threads=SlabThreads(1))
        self.coder.stays_encoded = True
        self.codecs = self.coder.coding.of_fragment(self.coder.layout, 0)
        self.counts = self.coder.layout.counts(0)
        random = np.random.default_rng(0)
        self.moves = DeviceMoves(self.coder.layout, self.model, donate=True)
        self.params = [jnp.asarray(random.standard_normal(leaf.shape, np.float32)) for leaf in self.model]
        self.anchor = [jnp.zeros(leaf.shape) for leaf in self.model]

    def encode(self, number: int) -> tuple[Buffer, ...]:
        """Encode what is pending with nothing in flight, and with that in flight; return the frames of the first."""
        watch, coder = self.watch, self.coder

        def encode(sequence: int) -> Encoded:
            segments = self.moves.offered(self.params, self.anchor, 0)
            if isinstance(segments, PinnedSegments):
                segments.pin()
            return coder.encode(Offer(sequence, 0, segments, 1, 1))

        alone = self.by_xla.time("encode", lambda: encode(2 * number))
        watch.time("judge", lambda: coder.judge(Offer(2 * number, 0, (), 1, 1), alone))
        self.by_xla.time("encode again", lambda: encode(2 * number + 1))
        coder.withdraw(2 * number + 1)
        watch.time("checksum", lambda: [crc32(memoryview(frame)[8:]) for frame in alone.frames])
        return alone.frames

    def take(self, number: int, frames: Sequence[Buffer]) -> None:
        """Check the aggregate in which that offer has landed, and decode both onto the model."""
        coder = self.coder
        aggregate = aggregate_of(coder, 2 * number, frames)
        update = self.watch.time("check", lambda: coder.decode_aggregate(aggregate, (2 * number,), frames))
        coder.withdraw(2 * number)
        self.params, self.anchor = self.by_xla.time(
            "rebase",
            lambda: jax.block_until_ready(self.moves.apply(self.params, self.anchor, update.aggregate, update.own)),
        )

    def passes(self, size: float) -> list[Pass]:
        """Return what was measured. size: the bytes of a payload, a parameter."""
        ns = {name: 1e9 * took / sum(self.counts) for name, took in (self.watch.least | self.by_xla.least).items()}
        return [
            Pass("node", "params - anchor, encode, frame", 8 + size, max(0.0, ns["encode"] - ns["checksum"])),
            Pass("node", "checksum of what is sent", size, ns["checksum"]),
            Pass("node", "unacknowledged: subtract one", size, max(0.0, ns["encode again"] - ns["encode"])),
            Pass("node", "judge what is sent", 0, ns["judge"]),
            Pass("node", "check an aggregate", size, ns["check"]),
            Pass("node", "decode aggregate and own, rebase params and anchor", 2 * size + 16, ns["rebase"]),
        ]


def _hub_passes(hub: Hub, frames: Sequence[Buffer], node: _Node, size: float, rounds: int) -> list[Pass]:
    """Return the hub's passes: per contribution, and those of a release divided by the contributions of a round."""
    watch, values, most = Stopwatch(), sum(node.counts), MOST_CONTRIBUTIONS
    published, rest = hub.aggregator.published[0].copy(), hub.aggregator.parameters[0].copy()
    segments = np.split(rest, np.cumsum(node.counts)[:-1])
    for _ in range(rounds):
        watch.time("encode", lambda: encode_payload(node.codecs, segments))
        watch.time(
            "publish",
            lambda: decode_payload(node.codecs, frames, node.counts, out=published, add=True, checked=True),
        )
    ns = {name: 1e9 * took / values for name, took in (hub.watch.least | watch.least).items()}
    held = max(0.0, (ns[f"release {most}"] - ns["release 1"]) / (most - 1))
    release = ns["release 1"] - held
    outer = max(0.0, release - ns["encode"] - ns["publish"])
    (publish, payload), *_ = hub.deltas
    hub.aggregator.accumulate(PEER, publish, payload)
    is_held = hub.aggregator.encoded.holds(0)  # then the sum is never in memory
    return [
        Pass("hub", "check", size, ns["check"]),
        Pass("hub", "judge", 0, ns["judge"]),
        Pass("hub", "decode and add", size if is_held else 8 + size, ns["add"] + held),
        Pass("hub", "outer step, 1 of a round", 12 if is_held else 20, outer, 1 / most),
        Pass("hub", "encode, frame, checksum, 1 of a round", 2 * size, ns["encode"], 1 / most),
        Pass("hub", "publish, 1 of a round", 8 + size, ns["publish"], 1 / most),
    ]


def measure_passes(spec: str, model: ModelSpec, rounds: int) -> list[Pass]:
    """Return the passes of one codec, up and down."""
    node, hub, values = _Node(spec, model), Hub(spec, model, 1), count_values(model)
    frames: Sequence[Buffer] = ()
    for number in range(rounds):
        node.encode(number)
        frames = hub.round(MOST_CONTRIBUTIONS if number % 2 else 1)
        node.take(number, frames)
    size = sum(len(memoryview(frame)) for frame in frames) / values
    return [*node.passes(size), *_hub_passes(hub, frames, node, size, rounds)]


def _sums(codec: str, passes: Sequence[Pass], rate: float) -> list[dict[str, Any]]:
    """Return a line for the node, an exchange, and one for the hub, a contribution."""
    names = {"node": "all of an exchange, one in flight", "hub": f"all of a contribution, {MOST_CONTRIBUTIONS} a round"}
    return [
        Pass(
            where,
            name,
            sum(one.count * one.bytes for one in passes if one.where == where),
            sum(one.count * one.ns for one in passes if one.where == where),
        ).row(codec, rate)
        for where, name in names.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the codecs that the command line names, and print the table of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", nargs="+", default=USUAL, help="specs, each up and down (default: %(default)s)")
    parser.add_argument("--values", type=float, default=25e6, help="of the model (default %(default)g)")
    parser.add_argument("--leaves", type=int, default=1, help="equal ones, of the model (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="exchanges, of which the least counts; 2 at least")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(argv)
    if options.rounds < 2:
        parser.error("--rounds: a round of one contribution and one of several are compared: give at least 2")
    rate, rows, model = copy_rate(options.rounds), [], in_leaves(int(options.values), options.leaves)
    for spec in options.codec:
        with BusyMeter() as busy:
            passes = measure_passes(spec, model, options.rounds)
        table = [one.row(spec, rate) for one in passes] + _sums(spec, passes, rate)
        size = f"{count_values(model):,} values in {len(model)} leaves"
        title = f"{spec}: {size}; a copy moves {rate / 1e9:.1f} GB/s; busy {busy.busy_share:.2f}"
        print_table([{name: value for name, value in row.items() if name != "codec"} for row in table], title)
        rows += [row | {"copy_gb_per_s": round(rate / 1e9, 1), "busy": round(busy.busy_share, 2)} for row in table]
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
