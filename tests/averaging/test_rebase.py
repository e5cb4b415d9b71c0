"""An aggregate that is decoded onto the model, piece by piece: the same bits as decoded first and then added by XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixed import fixed_run
from zmqtrain.averaging.coder import DeltaCoder, EncodedSegments
from zmqtrain.codecs import fast
from zmqtrain.core.interfaces import CodedSegments
from zmqtrain.core.types import LeafSpec, Offer
from zmqtrain.protocol.messages import Aggregate
from zmqtrain.train import anchor, in_place
from zmqtrain.train.anchor import DeviceMoves, HostMoves

MODEL = (
    LeafSpec("a/w", (40, 1000), "float32"),
    LeafSpec("a/b", (7,), "float32"),
    LeafSpec("b/w", (150_001,), "float32"),
    LeafSpec("scale", (), "float32"),
)
HALF = (*MODEL[:3], LeafSpec("half", (500,), "bfloat16"))
CODECS = [
    "ternary",
    "ternary:block=100",
    "topk:density=0.05+sign",
    "topk:density=0.002+sign",
    "topk:density=0.1+int8",
    "int8",
    "float32",
    "ternary;*b=bf16",
]


@pytest.fixture(autouse=True)
def machine_code(monkeypatch):
    monkeypatch.setattr(anchor, "LEAST_PINNED", 0)
    fast.use(True)
    yield
    fast.use(None)


class Twin:
    """A coder and its moves, of which one decodes first and one does not."""

    def __init__(self, codec, fragments, stays, donate=True, model=MODEL, down=None):
        settings = fixed_run(codec=codec, broadcast_codec=down or codec, fragments=fragments)
        self.model, self.coder = model, DeltaCoder(model, settings)
        self.coder.stays_encoded = stays
        self.moves = DeviceMoves(self.coder.layout, model, donate=donate)
        random = np.random.default_rng(5)
        leaves = [random.standard_normal(spec.shape).astype(np.float32) for spec in model]
        self.params = [jnp.asarray(leaf, spec.dtype) for leaf, spec in zip(leaves, model, strict=True)]
        self.anchor = self.moves.place([leaf * np.float32(0.5) for leaf in leaves])

    def offer(self, sequence, fragment, seed):
        random = np.random.default_rng(seed)
        counts = self.coder.layout.counts(fragment)
        segments = [random.standard_normal(count).astype(np.float32) for count in counts]
        return self.coder.encode(Offer(sequence, fragment, segments, 1, 1))

    def update(self, landed, fragments=(0,), seeds=(9,)):
        """Return the update of an aggregate in which these offers landed."""
        encoded = [
            DeltaCoder(self.model, fixed_run(codec=self.coder.broadcast_coding.name, fragments=self.fragments)).encode(
                Offer(0, fragment, self.segments(fragment, seed), 1, 1)
            )
            for fragment, seed in zip(fragments, seeds, strict=True)
        ]
        frames = [frame for one in encoded for frame in one.frames]
        sizes, each = tuple(map(len, frames)), tuple(len(one.frames) for one in encoded)
        message = Aggregate(1, 1, self.coder.broadcast_coding.name, fragments, each, sizes, (), 2)
        return self.coder.decode_aggregate(message, landed, frames)

    @property
    def fragments(self):
        return self.coder.layout.fragments

    def segments(self, fragment, seed):
        random = np.random.default_rng(seed)
        return [random.standard_normal(count).astype(np.float32) for count in self.coder.layout.counts(fragment)]

    def apply(self, update):
        self.params, self.anchor = self.moves.apply(self.params, self.anchor, update.aggregate, update.own)

    def bits(self):
        return [np.asarray(leaf).tobytes() for leaf in [*self.params, *self.anchor]]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_the_bits_are_those_of_decoding_first(codec, fragments, own):
    twins = [Twin(codec, fragments, stays) for stays in (True, False)]
    for twin in twins:
        for fragment in range(fragments):
            twin.offer(fragment, fragment, seed=fragment)
            update = twin.update((fragment,) if own else (), (fragment,), (20 + fragment,))
            assert isinstance(update.aggregate[fragment], EncodedSegments) == twin.coder.stays_encoded
            assert bool(update.own) == own
            twin.apply(update)
    assert twins[0].bits() == twins[1].bits()


@pytest.mark.parametrize("donate", [True, False])
def test_the_anchor_is_changed_in_its_place_and_parameters_stay_unless_they_are_donated(donate):
    twin = Twin("ternary", 1, True, donate=donate)
    params, places = twin.params, [leaf.unsafe_buffer_pointer() for leaf in jax.block_until_ready([*twin.anchor])]
    twin.offer(0, 0, seed=1)
    twin.apply(twin.update((0,)))
    assert [leaf.is_deleted() for leaf in params] == [donate] * len(MODEL)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.block_until_ready([*twin.anchor])] == places


def test_fragments_that_come_together_are_decoded_in_one_program(monkeypatch):
    twins, programs = [Twin("ternary", 3, stays) for stays in (True, False)], []
    hand_over = in_place._Jobs.hand_over
    monkeypatch.setattr(in_place._Jobs, "hand_over", lambda *given: programs.append(1) or hand_over(*given))
    for twin in twins:
        for fragment in range(3):
            twin.offer(fragment, fragment, seed=fragment)
        twin.apply(twin.update((0, 2), (0, 1, 2), (20, 21, 22)))
    assert len(programs) == 2  # the anchor is handed over, and then the work on both
    assert twins[0].bits() == twins[1].bits()


def test_nothing_as_large_as_the_model_is_decoded(monkeypatch):
    twin = Twin("ternary", 1, True)
    monkeypatch.setattr(twin.coder, "_decode_here", lambda *_: pytest.fail("it was decoded first"))
    twin.offer(0, 0, seed=1)
    twin.apply(twin.update((0,)))
    jax.block_until_ready(twin.params)


@pytest.mark.parametrize(
    ("why", "landed", "changes"),
    [
        ("two own parts", (0, 1), {}),
        ("other codecs up and down", (0,), {"down": "int8"}),
        ("a leaf of another dtype", (0,), {"model": HALF}),
    ],
)
def test_what_cannot_stay_encoded_is_decoded_first(why, landed, changes):
    twins = [Twin("ternary", 1, stays, **changes) for stays in (True, False)]
    for twin in twins:
        for sequence in range(2):
            twin.offer(sequence, 0, seed=sequence)
        update = twin.update(landed)
        if why != "a leaf of another dtype":  # in the codec's thread, not in training's
            assert not any(isinstance(given[0], CodedSegments) for given in (update.aggregate, update.own))
        twin.apply(update)
    assert twins[0].bits() == twins[1].bits(), why


def test_without_machine_code_or_without_xla_it_is_decoded_first(monkeypatch):
    twins = [Twin("ternary", 1, stays) for stays in (True, False)]
    monkeypatch.setattr(in_place, "is_possible", lambda: False)
    for twin in twins:
        twin.offer(0, 0, seed=0)
        twin.apply(twin.update((0,)))
    assert twins[0].bits() == twins[1].bits()
    fast.use(False)
    assert not isinstance(twins[0].update((0,)).aggregate[0], CodedSegments)


def test_other_moves_take_the_segments_one_by_one():
    twins = [Twin("ternary", 2, stays) for stays in (True, False)]
    for twin in twins:
        twin.moves = HostMoves(twin.coder.layout, MODEL, twin.params, True, 1.0)
        twin.anchor = twin.moves.place(twin.anchor)
        twin.offer(0, 1, seed=0)
        update = twin.update((0,), (1,))
        assert len(update.aggregate[1]) == len(twin.coder.layout.leaves(1))
        twin.apply(update)
    assert twins[0].bits() == twins[1].bits()


@pytest.mark.parametrize("committed", [False, True])
def test_it_is_compiled_before_the_first_update(committed, caplog):
    twin = Twin("ternary", 3, True)
    if committed:
        twin.params = jax.device_put(twin.params, jax.devices()[0])
        twin.anchor = twin.moves.place(twin.params)
    for sequence in range(3):
        twin.offer(sequence, sequence, seed=sequence)
    updates = [twin.update((0,)), twin.update((1, 2), (1, 2), (20, 21))]
    jax.block_until_ready((twin.params, twin.anchor))
    twin.moves.warm_up(twin.params, twin.anchor)
    with jax.log_compiles():
        for update in updates:
            for fragment in range(3):
                offered = twin.moves.offered(twin.params, twin.anchor, fragment)
                offered.pin()
                assert offered.read(lambda *_: True)
            twin.apply(update)
        jax.block_until_ready((twin.params, list(twin.anchor)))
    assert not [record for record in caplog.records if "Finished XLA compilation" in record.getMessage()]
