"""What an exchange costs processors of nodes and hub, and what training costs a node's memory (data; pure: no jax).

Rule 1: every number is here and nowhere else, with the command that measures it; a user's own numbers take their place.
Times are of one core of one machine (AMD EPYC, Zen 4, with numba); what a codec on a card costs is an estimate.
Rule 2: every line of memory is counted from sizes, and is there at the worst moment; what is not known here, what the
program's own activations take, is given or left out, and then stated.
Rule 3: a plan that does not fit is answered with one that would, by the same counting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

from zmqtrain.averaging.held_rounds import MOST_THREADS
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import BLOCK_VALUES, check_model
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec, ModelSpec, count_values
from zmqtrain.planning.schedule import exchange_bytes

Place = Literal["device", "host"]
"""On the card that trains, or in the memory of the PC around it."""

CARD_BYTES_OF_OTHERS = 500_000_000
"""What CUDA's context, XLA's own buffers and a desktop take of a card."""

_FLOAT32_BYTES = 4
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_FRAGMENTS_TRIED = (4, 8, 16, 32)
_PARTS_TRIED = (2, 4, 8, 16)


@dataclass(frozen=True)
class MemoryLine:
    """What one thing takes, in bytes, on the card and on the host."""

    what: str
    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """What the memory of a node holds, of a run with these settings.

    opt_state_bytes: of the optimizer's state (Adam: twice the parameters).  anchor, codec_on: where they are.
    batches: gradients that a step is made of; more than one are summed in float32.  activation_bytes: of one gradient's
    forward and backward pass; 0: not known.  cut: fragments, in place of those of the settings.
    Raises ConfigError for a number that cannot be, ModelMismatch for a leaf that cannot be trained.
    """

    model: ModelSpec
    opt_state_bytes: int
    settings: RunSettings
    anchor: Place = "device"
    batches: int = 1
    codec_on: Place = "device"
    activation_bytes: int = 0
    cut: int = 0

    def __post_init__(self) -> None:
        check_model(self.model)
        if self.batches < 1 or self.opt_state_bytes < 0 or self.activation_bytes < 0:
            raise ConfigError(
                f"a step is made of at least one batch ({self.batches}), and memory is not negative: "
                f"{self.opt_state_bytes} bytes of optimizer state, {self.activation_bytes} of activations"
            )

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        """The memory while an exchange runs beside a step; last, what starting needs more than that."""
        parameters, values, first = self._parameter_bytes, count_values(self.model), self.settings.at_first
        dense = _FLOAT32_BYTES * values
        piece = -(-dense // self._fragments)
        sent = exchange_bytes(self.model, first.codec, first.broadcast_codec, self._fragments)
        summed = dense if self.batches > 1 else 0
        lines = [
            MemoryLine("parameters", parameters),
            MemoryLine("gradients", parameters),
            MemoryLine("sum of gradients (several batches a step)", summed),
            MemoryLine("optimizer", self.opt_state_bytes),
            MemoryLine("activations of one batch", self.activation_bytes),
            MemoryLine("anchor", *((dense, 0) if self.anchor == "device" else (0, dense))),
            *self._exchange_lines(piece, several=first.offers_in_flight > 1),
            MemoryLine("sent, not yet landed", 0, sent.up * first.offers_in_flight),
            MemoryLine("aggregate and snapshot as they come", 0, sent.down + 2 * dense),
        ]
        training = sum(line.device_bytes for line in lines)
        more = max(0, self._starting_bytes - training)
        lines.append(MemoryLine("more, while the exchange is compiled on copies at the start", more))
        return tuple(line for line in lines if line.device_bytes or line.host_bytes)

    @property
    def device_bytes(self) -> int:
        return sum(line.device_bytes for line in self.lines)

    @property
    def host_bytes(self) -> int:
        return sum(line.host_bytes for line in self.lines)

    def fits(self, limit_bytes: int) -> bool:
        return self.device_bytes <= limit_bytes

    def advice(self, limit_bytes: int) -> str:
        """Return, for people, whether it fits a card of which `limit_bytes` can be used, and if not, what would.

        The fewest changes that help are named, each with what the card must hold then.
        """
        needed = _gigabytes(self.device_bytes)
        if self.fits(limit_bytes):
            unknown = "" if self.activation_bytes else ", activations not counted"
            return f"fits: {needed} of {_gigabytes(limit_bytes)} on the card{unknown}"
        begin = f"does not fit: {needed} on the card, of which {_gigabytes(limit_bytes)} can be used"
        choices = list(self._choices())
        for together in range(1, len(choices) + 1):
            found = []
            for chosen in combinations(choices, together):
                for changes in product(*chosen):
                    if (changed := self._changed(changes)).fits(limit_bytes):
                        found.append(f"{_together(changes)} ({_gigabytes(changed.device_bytes)})")
                        break
            if found:
                return f"{begin}. It would with {'; or with '.join(found)}"
        all_of_it = [variants[-1] for variants in choices]
        least = _gigabytes(self._changed(all_of_it).device_bytes)
        even = f" Even with {_together(all_of_it)} it needs {least}." if choices else ""
        return f"{begin}.{even} Take a smaller model, an optimizer with less state, or a larger card"

    # ------------------------------------------------------------------ what there is

    @property
    def _parameter_bytes(self) -> int:
        return sum(_ITEM_BYTES[leaf.dtype] * leaf.values for leaf in self.model)

    @property
    def _starting_bytes(self) -> int:
        """What the card holds while the exchange is compiled on copies, or, with the anchor on the host, without."""
        parameters, dense = self._parameter_bytes, _FLOAT32_BYTES * count_values(self.model)
        anchors = 2 * dense + 3 * -(-dense // self._fragments) if self.anchor == "device" else 0
        return 2 * parameters + self.opt_state_bytes + anchors

    @property
    def _fragments(self) -> int:
        return self.cut or self.settings.fragments_of(self.model)

    def _exchange_lines(self, piece: int, several: bool) -> Iterator[MemoryLine]:
        """One offered fragment, and one arriving fragment.

        piece: its bytes as float32. A coder on the card lays a fragment out once more; with several offers in flight
        it decodes those too, to subtract them.
        """
        again = 1 if several else 0
        if self.anchor == "host":
            two_leaves = 2 * _FLOAT32_BYTES * max(leaf.values for leaf in self.model)
            passing = min(piece, two_leaves)  # leaf by leaf, and one ahead
            yield MemoryLine("offered fragment", passing, (1 + again) * piece)
            yield MemoryLine("landing fragment: the step taken", passing, 2 * piece)
        elif self.codec_on == "host":
            yield MemoryLine("offered fragment", piece, (1 + again) * piece)
            yield MemoryLine("landing fragment: aggregate, own part, their difference", 3 * piece, 2 * piece)
        else:
            yield MemoryLine("offered fragment", (2 + again) * piece)
            yield MemoryLine("landing fragment: aggregate, own part, their difference", 3 * piece)

    # ------------------------------------------------------------------ what would fit

    def _choices(self) -> Iterator[list[_Change]]:
        """What can be changed without another model or another card, the mildest first; each in steps.

        No two of them change the same field.
        """
        if self.anchor == "device":
            yield [_Change("the anchor on the host", {"anchor": "host"})]
        blocks = sum(-(-leaf.values // BLOCK_VALUES) for leaf in self.model)
        if fragments := [n for n in _FRAGMENTS_TRIED if self._fragments < n <= blocks]:
            yield [_Change(f"{n} fragments", {"cut": n}) for n in fragments]
        if activations := self.activation_bytes:
            yield [
                _Change(
                    f"{self.batches * n} batches a step, each 1/{n} as large",
                    {"batches": n * self.batches, "activation_bytes": -(-activations // n)},
                )
                for n in _PARTS_TRIED
            ]
        if any(_ITEM_BYTES[leaf.dtype] > 2 for leaf in self.model):
            model = tuple(LeafSpec(leaf.path, leaf.shape, "bfloat16") for leaf in self.model)
            share = 2 * count_values(model) / self._parameter_bytes  # the optimizer's moments have that dtype, too
            smaller = {"model": model, "opt_state_bytes": round(share * self.opt_state_bytes)}
            yield [_Change("parameters in bfloat16", smaller)]

    def _changed(self, changes: Iterable[_Change]) -> MemoryEstimate:
        return replace(self, **{name: value for change in changes for name, value in change.fields.items()})


class _Change(NamedTuple):
    """Other values of some fields of an estimate, and what to call that."""

    text: str
    fields: dict[str, Any]


def _together(changes: Iterable[_Change]) -> str:
    return " and ".join(change.text for change in changes)


def _gigabytes(count: int) -> str:
    if count < 1e8:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e9:.2f} GB" if count < 99.5e9 else f"{count / 1e9:.0f} GB"


@dataclass(frozen=True, kw_only=True)
class CodecCosts:
    """CPU time of one thread in ns per parameter of the fragment.

    encode, decode: at a node, of its delta; of the aggregate and its own part in it.  subtract: at a node, of each of
    its deltas in flight when the next one is encoded.  accumulate: at the hub, of one contribution when it
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
    )
}
"""By the stage that picks. `bench/costs.py` measures them with sign behind it, at densities of .01, .05 and .1, and
prints these lines."""

TRANSPORT_NODE_NS, TRANSPORT_HUB_NS = 0.6, 0.45
"""CPU time per byte sent or received, at a node and at the hub: a hub of one core moves about 1 GB/s each way."""

DISPATCH_SECONDS = 0.005
"""What the training thread is held per exchange, where a card does the rest (`held_ms` of `bench/efficiency.py`)."""

REBASE_NS = 2.0
"""What training loses besides per parameter of the fragment, where a processor subtracts and rebases: CPU time of all
its threads. `bench/costs.py` prints this line, too: of segments that are computed and decoded first. What is encoded
and decoded in one pass with it (`bench/passes.py`) takes as much or less, with the decoding: there a plan that goes by
the tables alone counts decoding twice."""

CARD_NS = 0.3
"""What a codec takes of a card's own time, per parameter: not measured, but counted: some 60 bytes of its memory are
moved, at 200 GB/s."""

CARD_FRAME_NS = 1.0
"""CPU time per byte of a codec on a card: the bytes fetched, cut into frames, and their checksum."""


LOCKED = 0.25
"""That part of a release at the hub holds the interpreter's lock: counted from a profile, an estimate until it is
measured on a machine with idle cores."""
NODE_LOCKED = 0.4
"""The same of a node's codec: two threads on two idle cores encode 24M values (top-3 % + sign), less what is in flight,
and decode as many, 1.43 times as fast as one (medians of 12 by turns). More than two were not measured."""


def slab_threads(cores: float, locked: float = LOCKED) -> float:
    """Return by how much a machine with so many idle cores divides the time of a release, or of a node's codec. Source:
    Amdahl's law."""
    threads = min(max(cores, 1.0), MOST_THREADS)
    return 1 / (locked + (1 - locked) / threads)


@dataclass(frozen=True)
class ExchangeCosts:
    """Seconds of one exchange. node, hub: of one core, as in `Load`.  thread: that the training thread is held."""

    node_seconds: float
    hub_seconds: float
    thread_seconds: float


@lru_cache(maxsize=256)
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
    shards: int = 1,
    *,
    step_on: Place = "device",
    codec_on: Place = "device",
    in_flight: int = 0,
    node_ns: float | None = None,
    hub_ns: float | None = None,
    node_threads: float = 1.0,
    hub_threads: float = 1.0,
    held_seconds: float | None = None,
) -> ExchangeCosts:
    """Return what an exchange of one fragment costs.

    parameters: of the fragment.  step_on, codec_on: the card, or the processor.  in_flight: deltas of this fragment
    that a node has in flight when it encodes the next.  node_ns, hub_ns: measured ones, all of a node's per
    parameter, and all of the hub's per parameter and contribution, take the place of the sums here; held_seconds the
    same, of the training thread.  node_threads, hub_threads: by how much a node's threads divide the time of its codec
    on the processor, and the hub's that of a release; both where deltas are sparse, else one thread is counted.
    """
    up, down = costs_of(codec), costs_of(broadcast_codec)
    moved, sparse = bytes_up + bytes_down, up.held_ns > 0
    if node_ns is not None:
        node = 1e-9 * node_ns * parameters
    elif codec_on == "device":
        node = 1e-9 * (CARD_FRAME_NS + TRANSPORT_NODE_NS) * moved
    else:
        of_codec = up.encode_ns + in_flight * up.subtract_ns + down.decode_ns
        node = 1e-9 * (of_codec * parameters / (node_threads if sparse else 1.0) + TRANSPORT_NODE_NS * moved)
    if hub_ns is not None:
        hub = 1e-9 * nodes * hub_ns * parameters / shards
    else:
        of_codec = nodes * up.accumulate_ns + (nodes * up.held_ns + down.release_ns) / (hub_threads if sparse else 1.0)
        hub = 1e-9 * (of_codec * parameters + nodes * TRANSPORT_HUB_NS * moved) / shards
    if held_seconds is None:
        per_parameter = REBASE_NS if step_on == "host" else CARD_NS if codec_on == "device" else 0.0
        held_seconds = DISPATCH_SECONDS + 1e-9 * per_parameter * parameters
    return ExchangeCosts(node, hub, held_seconds)
