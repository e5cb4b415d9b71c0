"""The hub's side of the equation: the parameters, and what has been published of them.

    g = 1/N_live * sum D(u);  parameters += outer(g);  U = C_down(parameters - published);  published += D(U)

u is the payload of a node's publish, D decodes it, U is the aggregate that is sent, outer the outer optimizer's step.
Rule 1: pure: no clock, no socket; one thread calls it, and other threads help with a large fragment.  Rule 2: arrays
are kept by fragment, each a flat float32 vector, so no exchange copies leaves together.  Rule 3: a publish is checked
whole before any of it counts.
Rule 4: if nothing of a fragment counts in a round (all is too stale, or the sum overflows), its parameters and the
state of its outer optimizer do not change.
Rule 5: for the plain mean a publish is added when it comes; other rules need the whole round, so its publishes are held
until it closes (`HeldRound`).
Rule 6: publishes that have far fewer bytes than their values stay encoded until their fragment is released, or a few
of them are there (`EncodedRound`): they are then added part by part in a core's cache, by all idle cores. The sum is
the same to the bit, whatever the number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.averaging.coder import (
    DENSE,
    check_snapshot_frames,
    codecs_and_counts,
    cut,
    decode_snapshot,
    encode_snapshot,
    snapshot_frames,
    snapshot_size,
)
from zmqtrain.averaging.gate import DeltaGate
from zmqtrain.averaging.held_rounds import DeltaMeter, EncodedRound, Held, HeldRound, OuterStep
from zmqtrain.averaging.snapshot import check_optimizer_state, check_snapshot_sizes, digest_of, split_snapshot
from zmqtrain.codecs.base import Coding, coding_from_spec
from zmqtrain.codecs.codec import SLAB_VALUES, Codec, State, fill_states, pack_states
from zmqtrain.codecs.fragment import Layout, layout_of
from zmqtrain.codecs.payload import (
    check_payload,
    decode_payload,
    encode_payload,
    initial_states,
    plan_payload,
)
from zmqtrain.core.errors import CheckpointError, CodecError, ConfigError, FramingError, ModelMismatch
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, ModelSpec, PeerId, Version, count_values, leaves_of_parts
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.initialization import sends_optimizer_state
from zmqtrain.protocol.messages import Aggregate, Announcement, Publish, Snapshot, replace_fields
from zmqtrain.protocol.pipelines import Share
from zmqtrain.strategies.measures import are_related, explain_unrelated, relatedness
from zmqtrain.strategies.norms import Judgement, is_suspicious
from zmqtrain.strategies.outer import outer_from_spec

MOST_VALUES = 1 << 33
"""No larger model is planned for: a founder's claim must not cost the hub seconds."""

LARGEST_SUM = 1e30
"""A sum that holds a larger value is left out of the parameters: the outer step of it might be no float32."""
ROUNDING = 1e-6
"""What the shares of the federation that have come, sums of 1/N, may be off by."""

MOMENTS_KEPT = 1024
"""Of so many versions it is known when they were published."""

RECORD_EXCHANGES, RECORD_MODELS, RECORD_BYTES = 32, 3, 16 << 20
"""What a node that is found to diverge has contributed can be taken back for so many versions of each fragment, if what
was published in them takes no more memory than so many models, or bytes if that is more."""

NEAREST = 4
"""A delta is compared with so many of its own version, or of those around it: norms fall as a run converges."""

Vector = NDArray[np.float32]
TakeLeaves = Callable[[int, int, dict[str, Vector]], None]
"""(shard, number of shards, what is published of it by leaf path) -> None."""
Codecs = tuple[Codec, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The step from version - 1 to version, encoded: the frames of each fragment."""

    version: Version
    codec: str
    fragments: tuple[int, ...]
    frames: tuple[tuple[Buffer, ...], ...]
    overflowed: tuple[int, ...] = ()
    """Fragments whose sum was not finite (huge deltas added up): nothing of theirs was used."""
    left_out: tuple[tuple[Contribution, Judgement], ...] = ()
    """What came when few deltas had been seen, and is far larger than the others of its round: none of the sum."""

    def announce(self, transfer: int, reduce: Reduce) -> Aggregate:
        """Return what announces these frames to a peer. reduce: that this is the outcome of."""
        return Aggregate(
            transfer=transfer,
            version=self.version,
            codec=self.codec,
            fragments=self.fragments,
            frames=tuple(len(frames) for frames in self.frames),
            sizes=tuple(len(frame) for frames in self.frames for frame in frames),
            landed=reduce.landed,
            live=reduce.live,
            samples=reduce.samples,
        )


class Aggregator:
    """The arrays of the hub: parameters, published, the running sum and the outer optimizer's state.

    shard: which of several brokers' parts of the model these are.  `version` is -1 until `found` or `restore`.
    """

    def __init__(self, settings: RunSettings, shard: int = 0) -> None:
        self.settings, self.shard = settings, shard
        self.broadcast_coding = coding_from_spec(settings.at_first.broadcast_codec)
        self.outer = outer_from_spec(settings.at_first.outer)
        self.gate, self.meter = DeltaGate(settings), DeltaMeter()
        self.version: Version = -1
        self.parameters: list[Vector] = []
        self.published: list[Vector] = []
        self._sums: list[Vector] = []
        self._states: list[list[State]] = []
        self._outer_state: list[Mapping[str, Vector]] = []
        self._judged: dict[tuple[PeerId, int], Judgement] = {}  # accepted, and in no version yet
        self._waiting: dict[tuple[PeerId, int], Held] = {}  # for the close of their round
        self._record: deque[tuple[Released, list[Judgement]]] = deque()  # the last versions, and who is in them
        self._moments: deque[tuple[Version, float]] = deque(maxlen=MOMENTS_KEPT)
        self._round = HeldRound(settings)
        self._shares: list[float] = []  # per fragment: of the federation, come since the outer optimizer's last turn
        self.encoded = EncodedRound(self.meter)

    def values_of(self, fragments: Sequence[int]) -> int:
        return sum(sum(self.layout.counts(fragment)) for fragment in fragments)

    def plan(self, model: ModelSpec) -> None:
        """Lay out a model, before its parameters are here. Raises ModelMismatch or ConfigError if that cannot be."""
        if count_values(model) > MOST_VALUES:
            raise ModelMismatch(
                f"a model of {count_values(model):,} values; at most {MOST_VALUES:,} can be trained", ""
            )
        self.layout = layout_of(model, self.settings, self.shard)

    def _layout_of(self, share: Share | None) -> Layout:
        """Return the layout of what a PC of a pipeline holds; of the whole model for a node of its own."""
        if share is None:
            return self.layout
        return layout_of(leaves_of_parts(self.layout.spec, share.first, share.end), self.settings)

    def check_sizes(self, announced: Announcement, share: Share | None = None) -> None:
        """Raise FramingError for an upload of more bytes or frames than it can have: before anything is held of it.

        share: of a PC of a pipeline, which sends what it holds.
        """
        if isinstance(announced, Snapshot):
            bound = snapshot_size(self._layout_of(share))
            return check_snapshot_sizes(announced, bound, sends_optimizer_state(self.settings))
        assert isinstance(announced, Publish)
        plan = plan_payload(*codecs_and_counts(self.layout, announced.codec, announced.fragment))
        bound = sum(frame.size for frame in plan.frames)
        if not 0 < sum(announced.sizes) <= bound or len(announced.sizes) > len(plan.frames):
            raise FramingError(
                f"{sum(announced.sizes)} bytes in {len(announced.sizes)} frames are announced where at most {bound} in "
                f"{len(plan.frames)} can be right"
            )

    def check_snapshot(self, snapshot: Snapshot, frames: Sequence[Buffer], share: Share | None = None) -> None:
        """Raise CodecError unless a founder's parameters can be used, and its optimizer's state if that came too."""
        if snapshot.digest and digest_of(frames) != snapshot.digest:
            raise CodecError("a snapshot's bytes are not those that were sent: its digest is another")
        parameters, moments = split_snapshot(snapshot, frames)
        check_snapshot_frames(self._layout_of(share), parameters)
        check_optimizer_state(moments)

    def average(self, snapshots: Mapping[str, Sequence[Buffer]]) -> tuple[tuple[Buffer, ...], str]:
        """Return the mean of checked snapshots as one, and ""; or nothing, and why they cannot be averaged.

        snapshots: the frames of each by its node; the first is what the others must be related to.
        """
        first, *others = (decode_snapshot(self.layout, frames) for frames in snapshots.values())
        leaves = self.layout.join(first)
        cosines = [relatedness(leaves, self.layout.join(flats)) for flats in others]
        apart = {
            name: cosine for name, cosine in zip([*snapshots][1:], cosines, strict=True) if not are_related(cosine)
        }
        if apart:
            return (), explain_unrelated([peer.partition("#")[0] for peer in apart], [*apart.values()])
        share = np.float32(1 / len(snapshots))  # before the sum, which may be no float32
        for mean, *parts in zip(first, *others, strict=True):
            mean *= share
            for part in parts:
                mean += part * share
        return encode_snapshot(self.layout, first), ""

    def found(self, frames: Sequence[Buffer]) -> None:
        self._begin(decode_snapshot(self.layout, frames), 0)

    def _begin(self, flats: Sequence[Vector], version: Version) -> None:
        self.parameters, self._sums, self._outer_state = [], [], []  # their memory is free before there is new one
        self.published = [flat + np.float32(0) for flat in flats]  # no -0.0: sums then never make one, on any machine
        self.parameters = [flat.copy() for flat in self.published]
        self._sums = [np.zeros(flat.size, np.float32) for flat in flats]  # no memory before anything is added
        self.encoded.begin(len(flats))
        self._states = [self._fresh_states(fragment) for fragment in range(len(flats))]
        self._outer_state = [self.outer.init(flat.size) for flat in flats]
        self._shares = [0.0] * len(flats)
        self.version = version
        self._judged.clear()
        self._waiting.clear()
        self._record.clear()
        self._moments.clear()
        self.meter.begin()
        self._round.begin(len(flats))
        self._round.remember(version, self.published, range(len(flats)))

    def _fresh_states(self, fragment: int) -> list[State]:
        return initial_states(*codecs_and_counts(self.layout, self.broadcast_coding.name, fragment))

    def adopt(self, codec: str, outer: str) -> None:
        """Code aggregates by this codec from now on, and step by this outer optimizer; "": by what holds.

        What is not published stays in parameters - published, so nothing is lost; a momentum begins again at 0.
        """
        if codec and codec != self.broadcast_coding.name:
            self.broadcast_coding = coding_from_spec(codec)
            self._states = [self._fresh_states(fragment) for fragment in range(len(self.parameters))]
        if outer and outer != self.outer.name:
            self.outer = outer_from_spec(outer)
            self._outer_state = [self.outer.init(flat.size) for flat in self.parameters]

    def check(self, publish: Publish, frames: Sequence[Buffer]) -> None:
        """Raise CodecError unless the publish can be added."""
        codecs, counts = codecs_and_counts(self.layout, publish.codec, publish.fragment)
        check_payload(codecs, frames, counts)

    def judge(self, peer: PeerId, publish: Publish, frames: Sequence[Buffer], voter: str = "") -> Judgement:
        """Judge whether a checked publish is far larger than those before it; see `DeltaGate`."""
        return self.gate.judge(peer, self.layout, publish, publish.codec, frames, publish.score, voter)

    def count(self, publish: Publish, judgement: Judgement) -> None:
        """Record a judgement, once the publish is known to count or to be refused."""
        self.gate.norms.count(judgement)
        if not (judgement.why or self.gate.is_open):
            self._judged[judgement.peer, publish.sequence] = judgement

    def accumulate(self, peer: PeerId, publish: Publish, frames: Sequence[Buffer]) -> None:
        """Take a checked publish into the round: into its sum, or held until the round closes."""
        key = peer, publish.sequence
        is_judged_again = key in self._judged and self._judged[key].young
        is_behind_one = any(one.fragment == publish.fragment for one, _ in self._waiting.values())  # order counts
        if self._round.needed or is_judged_again or is_behind_one:
            self._waiting[key] = publish, frames
        else:
            self._add(peer, publish, frames)

    def _add(self, peer: PeerId, publish: Publish, frames: Sequence[Buffer]) -> None:
        codecs, counts = codecs_and_counts(self.layout, publish.codec, publish.fragment)
        total = self._sums[publish.fragment]
        if not self.encoded.hold(peer, publish, codecs, frames, counts, total):
            self._decode(peer, publish, frames, out=total)

    def _judge_round(
        self, reduce: Reduce
    ) -> tuple[Reduce, tuple[tuple[Contribution, Judgement], ...], list[Judgement]]:
        """Judge a round, now that all of it is here; return it without those that are out, these, and the others'
        judgements."""
        judged = [(one, self._judged.pop((one.peer, one.sequence), None)) for one in reduce.contributions]
        again = [(one, self.gate.judge_again(judgement)) for one, judgement in judged if judgement is not None]
        left_out = tuple((one, judgement) for one, judgement in again if judgement.why)
        if left_out:
            turns = {(one.node, one.turn) for one, _ in left_out if one.node}  # of a pipeline's delta no part counts
            out = {(one.peer, one.sequence) for one, _ in left_out}
            out |= {(one.peer, one.sequence) for one in reduce.contributions if (one.node, one.turn) in turns}
            for key in out:
                self._waiting.pop(key, None)
            counting = tuple(one for one in reduce.contributions if (one.peer, one.sequence) not in out)
            left = {one.node or one.peer for one in reduce.contributions} - {one.node or one.peer for one in counting}
            reduce = replace_fields(reduce, contributions=counting, live=max(1, reduce.live - len(left)))
        return reduce, left_out, [judgement for _, judgement in again if not judgement.why]

    def _decode(self, peer: PeerId, publish: Publish, frames: Sequence[Buffer], out: Vector | None = None) -> Vector:
        """Return D(u) of a node; added to `out`, if given."""
        fragment = publish.fragment
        codecs, counts = codecs_and_counts(self.layout, publish.codec, fragment)
        before = np.zeros(1, np.float32) if out is None else self.meter.read(fragment, out)
        total = decode_payload(codecs, frames, counts, out=out, add=out is not None, checked=True)
        if not publish.dense:  # what a node ends its share with is not of the usual size
            self.meter.add(peer, fragment, before, self.meter.read(fragment, total), total.size)
        return total

    def release(self, reduce: Reduce) -> Released:
        """Close the round and return what every peer is to be sent."""
        if reduce.back_to >= 0:
            return self._take_back(reduce)
        self.adopt(reduce.codec, reduce.outer)
        coding = coding_from_spec(DENSE) if reduce.dense else self.broadcast_coding
        reduce, left_out, counted_in = self._judge_round(reduce)
        waited = [(one, self._waiting.pop((one.peer, one.sequence), None)) for one in reduce.contributions]
        held = [(one, *publish) for one, publish in waited if publish is not None]
        if self._round.needed:
            self._round.sum_up(held, self._decode, self.published, self._sums)
            for fragment in reduce.fragments:
                self.encoded.lies_in_memory(fragment)
        else:
            for one, publish, payload in held:
                self._add(one.peer, publish, payload)
        overflowed = tuple(fragment for fragment in reduce.fragments if self._overflows(fragment, coding))
        for fragment in overflowed:
            self.encoded.close(fragment, self._sums[fragment])
        counted = {one.fragment for one in reduce.contributions if not one.too_stale}.difference(overflowed)
        frames = tuple(self._release(fragment, reduce, fragment in counted, coding) for fragment in reduce.fragments)
        self.version = reduce.version
        self._round.remember(self.version, self.published, reduce.fragments)
        self.meter.close(reduce.fragments)
        released = Released(self.version, coding.name, reduce.fragments, frames, overflowed, left_out)
        self._keep_record(released, counted_in)
        return released

    def _keep_record(self, released: Released, judged: list[Judgement]) -> None:
        """Record a version and the deltas in it; not in strict mode: nothing is taken back there, and the last version
        is the model."""
        if self.settings.mode != "default":
            return
        self._record.append((released, judged))
        most = max(RECORD_BYTES, RECORD_MODELS * 4 * sum(flat.size for flat in self.published))
        while len(self._record) > RECORD_EXCHANGES * len(self.published) or self._record_bytes() > most:
            self._record.popleft()

    def _record_bytes(self) -> int:
        return sum(len(frame) for released, _ in self._record for frames in released.frames for frame in frames)

    def published_at(self, version: Version) -> list[Vector] | None:
        """Return what was published at a recent version, up to the rounding of the steps since; None if unknown."""
        since = [released for released, _ in self._record if released.version > version]
        if len(since) != self.version - version:
            return None
        flats = [flat.copy() for flat in self.published]
        for fragment, codecs, counts, frames in self._steps(since):
            flats[fragment] -= decode_payload(codecs, frames, counts, checked=True)
        return flats

    def _steps(self, releases: Sequence[Released]) -> Iterator[tuple[int, Codecs, Sequence[int], Sequence[Buffer]]]:
        """Give what was published of each fragment in these releases, with its codecs and counts."""
        for released in releases:
            for fragment, frames in zip(released.fragments, released.frames, strict=True):
                yield fragment, *codecs_and_counts(self.layout, released.codec, fragment), frames

    def version_before(self, peer: PeerId) -> Version:
        """Return the version before the first recorded one that holds a suspicious delta of this node; -1: none."""
        known = [(released.version, one) for released, judged in self._record for one in judged]
        for version, mine in known:
            others = [(at, one) for at, one in known if one.fragment == mine.fragment and one.peer != peer]
            nearest = sorted(others, key=lambda one: abs(one[0] - version))[:NEAREST]
            if mine.peer == peer and is_suspicious(mine, [one for _, one in nearest]):
                return version - 1
        return -1

    def _take_back(self, reduce: Reduce) -> Released:
        """Subtract all that was published after a version, as far as it is recorded, as a further version.

        The outer optimizer and the codec begin with fresh states.
        """
        since = [released for released, _ in self._record if released.version > reduce.back_to]
        frames = []
        for fragment in reduce.fragments:  # all of them
            total = np.zeros_like(self.published[fragment])
            for number, codecs, counts, step in self._steps(since):
                if number == fragment:
                    decode_payload(codecs, step, counts, out=total, add=True, checked=True)
            codecs, counts = codecs_and_counts(self.layout, DENSE, fragment)
            frames.append(encode_payload(codecs, cut(-total, counts)))
            decode_payload(codecs, frames[-1], counts, out=self.published[fragment], add=True, checked=True)
        self._begin(self.published, reduce.version)
        return Released(self.version, DENSE, reduce.fragments, tuple(frames))

    def _takes_turn(self, fragment: int, reduce: Reduce) -> bool:
        """Return whether, with this round, contributions of the whole federation have come since the last turn."""
        come = sum(one.fragment == fragment and not one.too_stale for one in reduce.contributions)
        share = self._shares[fragment] + come / reduce.live
        turns = floor(share + ROUNDING)
        self._shares[fragment] = max(0.0, share - turns)
        return turns > 0

    def _release(self, fragment: int, reduce: Reduce, counted: bool, coding: Coding) -> tuple[Buffer, ...]:
        turn = counted and self._takes_turn(fragment, reduce)
        counts, codecs = self.layout.counts(fragment), coding.of_fragment(self.layout, fragment)
        states = self._states[fragment] if coding is self.broadcast_coding else None
        live = reduce.live if counted else None
        step = OuterStep(live, reduce.plain, self.outer, self._outer_state[fragment], turn)
        arrays = self._sums[fragment], self.parameters[fragment], self.published[fragment]
        return self.encoded.release(fragment, step, codecs, counts, states, arrays)

    def _overflows(self, fragment: int, coding: Coding) -> bool:
        """Return whether the sum of a fragment cannot be stepped by."""
        total = self._sums[fragment]
        codecs = coding.of_fragment(self.layout, fragment)
        return self.encoded.may_overflow(fragment, codecs, LARGEST_SUM, total) and not _can_be_stepped(total)

    def frames_of(self, share: Share) -> slice:
        """Return which frames of a snapshot a PC of a pipeline is sent."""
        return slice(snapshot_frames(self.layout, share.first), snapshot_frames(self.layout, share.end))

    def make_room(self) -> list[Vector]:
        """Return memory for a `copy`, its pages already mapped; any thread may call it."""
        return [np.full(flat.size, 0, np.float32) for flat in self.published]

    def copy(self, room: list[Vector]) -> tuple[Version, Layout, list[Vector]]:
        """Return the version, the layout and a copy of `published`, in `room`: a snapshot to be made elsewhere."""
        if [flat.size for flat in room] != [flat.size for flat in self.published]:
            room = self.make_room()  # the run was founded again
        for flat, published in zip(room, self.published, strict=True):
            np.copyto(flat, published)
        return self.version, self.layout, room

    def replay(self, released: Released) -> None:
        """Take a step that was published before a crash; the outer state stays as it was saved.

        The parameters become what was published: what the saved ones were ahead of it is in the step, at least in part,
        and must not be published twice. What of the step itself was not published yet is lost with the crash.
        """
        if released.version != self.version + 1:
            raise CheckpointError(f"the journal goes from version {self.version} to {released.version}")
        try:
            if not all(0 <= fragment < self.layout.fragments for fragment in released.fragments):
                raise CodecError(f"of {self.layout.fragments} fragments it names {released.fragments}")
            for _, codecs, counts, frames in self._steps([released]):
                check_payload(codecs, frames, counts)
        except (CodecError, ConfigError) as error:
            raise CheckpointError(
                f"the journal's step to version {released.version} cannot be read ({error}): remove the journal to go "
                f"on from the checkpoint, at version {self.version}"
            ) from None
        for fragment, codecs, counts, frames in self._steps([released]):
            self.published[fragment] += decode_payload(codecs, frames, counts, checked=True)
            self.parameters[fragment][:] = self.published[fragment]
            self._states[fragment] = self._fresh_states(fragment)
        self.version = released.version
        self._round.remember(self.version, self.published, released.fragments)
        if self.layout.shard[1] > 1:  # then the hub may ask for what was published before
            self._keep_record(released, [])

    def leaves(self, flats: Sequence[Vector]) -> dict[str, Vector]:
        """Return copies of what a vector per fragment holds of each leaf, by path, in the leaf's shape. Of a leaf of
        which a shard has a part, that part is there, flat; of one that it has nothing of, nothing."""
        leaves = zip(self.layout.spec, self.layout.join(flats), strict=True)
        return {leaf.path: array for leaf, array in leaves if array.size or not leaf.values}

    def came(self, now: float) -> None:
        """Record that this version is published since now, by a clock that all brokers of one machine share."""
        self._moments.append((self.version, now))

    def moment_of(self, version: Version) -> float:
        """Return when a version was published, or the first after it of which that is known; infinity: none is."""
        return next((moment for known, moment in self._moments if known >= version), inf)

    def give_leaves(self, take: TakeLeaves, moment: float) -> None:
        """Call `take` with what was published at a moment, if that is still known."""
        version = next((version for version, at in reversed(self._moments) if at <= moment), -1)
        if version >= 0 and (flats := self.published_at(version)) is not None:
            take(*self.layout.shard, self.leaves(flats))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of all arrays by name, each as `leaves` has it: "parameters/<path>", "published/<path>",
        "<outer state>/<path>". Besides these: "codec/<fragment>/<number>" what the codec keeps, "specs" (the codec's
        and the outer optimizer's, as UTF-8, one a line), "shares" (float64, per fragment), "gate", and what the rules
        of a round keep (`HeldRound.arrays`)."""
        named = {"parameters": self.parameters, "published": self.published}
        for key in self._outer_state[0]:
            named[f"outer.{key}"] = [state[key] for state in self._outer_state]
        arrays: dict[str, NDArray[Any]] = {
            f"{name}/{path}": array for name, flats in named.items() for path, array in self.leaves(flats).items()
        }
        for fragment, states in enumerate(self._states):
            arrays |= {f"codec/{fragment}/{number}": array for number, array in enumerate(pack_states(states))}
        if (memory := self.gate.memory()) is not None:
            arrays["gate"] = memory
        specs = np.frombuffer(f"{self.broadcast_coding.name}\n{self.outer.name}".encode(), np.uint8)
        return arrays | {"shares": np.array(self._shares), "specs": specs} | self._round.arrays()

    def restore(self, version: Version, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Take over what `arrays` returned. Raises CheckpointError."""

        def flats(name: str) -> list[Vector]:
            leaves = []
            for index, leaf in enumerate(self.layout.spec):
                part = self.layout.part(index)
                size = part.stop - part.start
                shape = leaf.shape if size == leaf.values else (size,)
                array = arrays.get(f"{name}/{leaf.path}", np.zeros(0, np.float32))
                if array.shape != shape or array.dtype != np.float32:
                    raise CheckpointError(f"the checkpoint has no {name} of {leaf}")
                if not np.isfinite(array).all():
                    raise CheckpointError(
                        f"the checkpoint's {name} of {leaf} are not finite: no run could go on from it"
                    )
                leaves.append(array)
            return self.layout.split(leaves)

        parameters = flats("parameters")
        self._begin(flats("published"), version)
        self._restore_specs(arrays)
        self.parameters = parameters
        for key in self._outer_state[0]:
            for state, flat in zip(self._outer_state, flats(f"outer.{key}"), strict=True):
                state[key][:] = flat
        self._restore_rest(arrays)

    def _restore_specs(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over the codec and the outer optimizer that held; a checkpoint of version 0.1 has the settings' own."""
        if "specs" not in arrays or not self.settings.is_planned:
            return
        try:
            codec, outer = arrays["specs"].tobytes().decode().split("\n")
            self.adopt(codec, outer)
        except (ValueError, ConfigError) as error:
            raise CheckpointError(f"the checkpoint's codec and outer optimizer cannot be read: {error}") from error

    def _restore_rest(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what is not of the form of the model. Raises CheckpointError."""
        try:
            self._shares = [float(share) for share in arrays["shares"]]
            if "gate" in arrays:
                self.gate.remember(arrays["gate"])
            else:  # the deltas that the run has had are not known
                self.gate.is_open = True
            self._round.restore(arrays)
            for fragment, fresh in enumerate(self._states):
                numbers = range(sum(name.startswith(f"codec/{fragment}/") for name in arrays))
                self._states[fragment] = fill_states(fresh, [arrays[f"codec/{fragment}/{n}"] for n in numbers])
        except (CodecError, LookupError, ArithmeticError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint lacks what the aggregation had in hand: {error}") from None


def _can_be_stepped(flat: Vector) -> bool:
    """Return whether an outer step of this sum stays finite: far from what a float32 holds (NaN is not)."""
    pieces = (flat[start : start + SLAB_VALUES] for start in range(0, flat.size, SLAB_VALUES))
    return all(piece.max() < LARGEST_SUM and piece.min() > -LARGEST_SUM for piece in pieces)
