"""Hold what an exchange costs processors: the numbers that plans are made from, and their sums (data; pure).

Rule 1: every number is here and nowhere else, with the command that measures it; a user's own numbers take their place.
Rule 2: they are of one core of one machine (AMD EPYC, Zen 4, with numba); what a codec on a card costs is an estimate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from zmqtrain.averaging.slab_threads import MOST_THREADS
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.planning.memory import Place


@dataclass(frozen=True, kw_only=True)
class CodecCosts:
    """CPU time of one thread in ns per parameter of the fragment.

    encode, decode: at a node, of its delta; of the aggregate and its own part in it.  subtract: at a node, of each of
    its deltas that is on its way when the next one is encoded.  accumulate: at the hub, of one contribution when it
    comes.  release: at the hub, of one aggregate.  held: at the hub, of one contribution of a codec that picks values,
    when its round is released; it and the release are shared by the hub's threads then.
    """

    encode_ns: float
    subtract_ns: float
    decode_ns: float
    accumulate_ns: float
    release_ns: float
    held_ns: float = 0.0


COSTS: dict[str, CodecCosts] = {
    "float32": CodecCosts(encode_ns=1.27, subtract_ns=1.81, decode_ns=1.36, accumulate_ns=1.35, release_ns=2.62),
    "bf16": CodecCosts(encode_ns=1.46, subtract_ns=1.13, decode_ns=1.07, accumulate_ns=1.36, release_ns=2.81),
    "int8": CodecCosts(encode_ns=0.49, subtract_ns=0.57, decode_ns=0.82, accumulate_ns=0.61, release_ns=1.93),
    "int4": CodecCosts(encode_ns=0.47, subtract_ns=0.46, decode_ns=0.97, accumulate_ns=0.73, release_ns=2.15),
    "ternary": CodecCosts(encode_ns=0.6, subtract_ns=0.47, decode_ns=0.91, accumulate_ns=0.59, release_ns=2.26),
}
"""By codec, the densest first. `bench/costs.py` measures them and prints these lines."""


@dataclass(frozen=True, kw_only=True)
class SparseCosts:
    """What a codec that picks values costs. base: per parameter of the fragment.  kept: per value that is kept."""

    base: CodecCosts
    kept: CodecCosts

    def at(self, density: float) -> CodecCosts:
        """Return the costs per parameter of the fragment where this share of the values is kept."""
        kinds = (field.name for field in fields(CodecCosts))
        return CodecCosts(**{kind: getattr(self.base, kind) + density * getattr(self.kept, kind) for kind in kinds})


SPARSE_COSTS: dict[str, SparseCosts] = {
    "topk": SparseCosts(
        base=CodecCosts(
            encode_ns=0.45, subtract_ns=0.36, decode_ns=0.63, accumulate_ns=0.11, release_ns=1.16, held_ns=0.11
        ),
        kept=CodecCosts(
            encode_ns=6.75, subtract_ns=4.61, decode_ns=8.67, accumulate_ns=2.66, release_ns=16.31, held_ns=3.79
        ),
    ),
}
"""By the stage that picks. `bench/costs.py` measures them with sign behind it, at densities of .01, .05 and .1, and
prints these lines."""

TRANSPORT_NODE_NS, TRANSPORT_HUB_NS = 0.6, 0.45
"""CPU time per byte sent or received, at a node and at the hub: a hub of one core moves about 1 GB/s each way."""

DISPATCH_SECONDS = 0.005
"""What the training thread is held per exchange, where a card does the rest (`held_ms` of `bench/efficiency.py`)."""

REBASE_NS = 2.0
"""What training loses besides per parameter of the fragment, where a processor subtracts and rebases: CPU time of all
its threads. `bench/costs.py` prints this line, too."""

CARD_NS = 0.3
"""What a codec takes of a card's own time, per parameter: not measured, but counted: some 60 bytes of its memory are
moved, at 200 GB/s."""

CARD_FRAME_NS = 1.0
"""CPU time per byte of a codec on a card: the bytes fetched, cut into frames, and their checksum."""


LOCKED = 0.25
"""That part of a release at the hub holds the interpreter's lock: counted from a profile, an estimate until it is
measured on a machine with idle cores."""


def hub_threads(cores: float) -> float:
    """Return by how much a hub with so many idle cores divides the time of a release. Source: Amdahl's law."""
    threads = min(max(cores, 1.0), MOST_THREADS)
    return 1 / (LOCKED + (1 - LOCKED) / threads)


@dataclass(frozen=True)
class ExchangeCosts:
    """Seconds of one exchange. node, hub: of one core, as in `Load`.  thread: that the training thread is held."""

    node_seconds: float
    hub_seconds: float
    thread_seconds: float


def costs_of(spec: str) -> CodecCosts:
    """Return what the codec of most parameters costs; one that was not measured, as the slowest of those that were.

    "topk:density=0.05+sign" costs by its density; what codes the few values that are kept hardly matters there.
    Raises ConfigError for a spec that cannot be read.
    """
    first, *others = re.split(r"\+(?=[a-z])", coding_from_spec(spec).default.name)
    name, _, arguments = first.partition(":")
    if name in COSTS:
        return COSTS[name]
    if name in SPARSE_COSTS and len(others) == 1:
        return SPARSE_COSTS[name].at(float(arguments.removeprefix("density=")))
    kinds = (field.name for field in fields(CodecCosts))
    return CodecCosts(**{kind: max(getattr(cost, kind) for cost in COSTS.values()) for kind in kinds})


def exchange_costs(
    parameters: float,
    bytes_up: int,
    bytes_down: int,
    codec: str,
    broadcast_codec: str,
    nodes: int,
    masters: int = 1,
    *,
    step_on: Place = "device",
    codec_on: Place = "device",
    on_the_way: int = 0,
    node_ns: float | None = None,
    hub_ns: float | None = None,
    hub_threads: float = 1.0,
    held_seconds: float | None = None,
) -> ExchangeCosts:
    """Return what an exchange of one fragment costs.

    parameters: of the fragment.  step_on, codec_on: the card, or the processor.  on_the_way: deltas of this fragment
    that a node has on their way when it encodes the next.  node_ns, hub_ns: measured ones, all of a node's per
    parameter, and all of the hub's per parameter and contribution, take the place of the sums here; held_seconds the
    same, of the training thread.  hub_threads: by how much the hub's threads divide the time of a release, where
    contributions are sparse; other releases are done by one thread.
    """
    up, down = costs_of(codec), costs_of(broadcast_codec)
    moved = bytes_up + bytes_down
    if node_ns is not None:
        node = 1e-9 * node_ns * parameters
    elif codec_on == "device":
        node = 1e-9 * (CARD_FRAME_NS + TRANSPORT_NODE_NS) * moved
    else:
        of_codec = up.encode_ns + on_the_way * up.subtract_ns + down.decode_ns
        node = 1e-9 * (of_codec * parameters + TRANSPORT_NODE_NS * moved)
    if hub_ns is not None:
        hub = 1e-9 * nodes * hub_ns * parameters / masters
    else:
        threads = hub_threads if up.held_ns else 1.0
        of_codec = nodes * up.accumulate_ns + (nodes * up.held_ns + down.release_ns) / threads
        hub = 1e-9 * (of_codec * parameters + nodes * TRANSPORT_HUB_NS * moved) / masters
    if held_seconds is None:
        per_parameter = REBASE_NS if step_on == "host" else CARD_NS if codec_on == "device" else 0.0
        held_seconds = DISPATCH_SECONDS + 1e-9 * per_parameter * parameters
    return ExchangeCosts(node, hub, held_seconds)
