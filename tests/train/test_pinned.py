"""Leaves that are pinned for the thread that encodes an offer: the same bytes, and nobody waits without end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixed import fixed_run
from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.codecs import fast
from zmqtrain.core.errors import NonFiniteDelta
from zmqtrain.core.interfaces import PinnedSegments
from zmqtrain.core.types import LeafSpec, Offer
from zmqtrain.train import anchor, pinned
from zmqtrain.train.anchor import DeviceMoves, HostMoves

MODEL = (LeafSpec("a", (40, 1000), "float32"), LeafSpec("b", (5,), "float32"), LeafSpec("c", (150_001,), "float32"))
CODECS = [
    "ternary",
    "ternary:block=100",
    "topk:density=0.05+sign",
    "int8",
    "float32",
    "lowrank:rank=2",
    "ternary;*b=bf16",
]


@pytest.fixture(autouse=True)
def pins_small_models(monkeypatch):
    monkeypatch.setattr(anchor, "LEAST_PINNED", 0)
    fast.use(True)
    yield
    fast.use(None)


class World:
    """A node's training thread; the coder is asked by a thread of its own."""

    def __init__(self, codec="ternary", fragments=1, seed=0):
        self.coder = DeltaCoder(MODEL, fixed_run(codec=codec, fragments=fragments))
        self.moves = DeviceMoves(self.coder.layout, MODEL, donate=True)
        random = np.random.default_rng(seed)
        leaves = [random.standard_normal(spec.shape).astype(np.float32) for spec in MODEL]
        self.params = [jnp.asarray(leaf) for leaf in leaves]
        self.anchor = self.moves.place([leaf * np.float32(0.5) for leaf in leaves])
        self.codec_thread = ThreadPoolExecutor(1)

    def offer(self, sequence, fragment=0, whole=False):
        segments = self.moves.offered(self.params, self.anchor, fragment, whole=whole)
        return Offer(sequence, fragment, segments, 1, 1)

    def encode(self, offer):
        """Encode as a node does: the offer is given to its thread, and then the leaves are pinned."""
        result = self.codec_thread.submit(self.coder.encode, offer)
        offer.segments.pin()
        return result


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_are_those_of_segments_that_are_computed(codec, fragments):
    pins, computes = World(codec, fragments), World(codec, fragments)
    for sequence in range(2 * fragments):  # the second of a fragment less the first, which is on its way
        fragment = sequence % fragments
        offer = pins.offer(sequence, fragment)
        assert isinstance(offer.segments, PinnedSegments)
        given = pins.encode(offer).result(60)
        segments = computes.moves.pending(computes.params, computes.anchor, fragment)
        assert given.frames == computes.coder.encode(Offer(sequence, fragment, segments, 1, 1)).frames


def test_nothing_is_copied_where_the_reader_is_there_and_training_may_go_on(monkeypatch):
    monkeypatch.setattr(pinned.Pinned, "_copy", lambda *_: pytest.fail("it was copied"))
    monkeypatch.setattr(pinned, "PATIENCE_SECONDS", 60)
    world = World()
    expected = world.moves.pending(world.params, world.anchor, 0)
    want = DeltaCoder(MODEL, world.coder.settings).encode(Offer(0, 0, expected, 1, 1)).frames
    result = world.encode(world.offer(0))
    trained = [jax.jit(lambda leaf: leaf * 0, donate_argnums=0)(leaf) for leaf in world.params]  # writes their memory
    assert result.result(60).frames == want
    assert not any(np.asarray(leaf).any() for leaf in trained)


def test_a_reader_that_is_busy_finds_a_copy_and_training_does_not_wait_for_it(monkeypatch):
    monkeypatch.setattr(pinned, "PATIENCE_SECONDS", 0)
    world, may_go = World(fragments=2), threading.Event()
    expected = world.moves.pending(world.params, world.anchor, 1)
    want = DeltaCoder(MODEL, world.coder.settings).encode(Offer(0, 1, expected, 1, 1)).frames
    world.codec_thread.submit(may_go.wait, 60)
    result = world.encode(world.offer(0, 1))
    trained = [jax.jit(lambda leaf: leaf * 0, donate_argnums=0)(leaf) for leaf in world.params]
    jax.block_until_ready(trained)  # while the reader is busy
    may_go.set()
    assert result.result(60).frames == want


def test_who_takes_a_segment_has_it_computed_and_whoever_pins_later_changes_nothing():
    world = World()
    offered = world.moves.offered(world.params, world.anchor, 0)
    want = world.moves.pending(world.params, world.anchor, 0)
    for got, expected in zip(offered, want, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert len(offered) == len(MODEL)
    offered.settle()
    assert offered.read(lambda *_: pytest.fail("nothing is pinned")) is None


def test_another_thread_may_take_segments_of_leaves_that_are_pinned(monkeypatch):
    monkeypatch.setattr(pinned, "PATIENCE_SECONDS", 60)
    world = World(fragments=2)
    offered = world.moves.offered(world.params, world.anchor, 0)
    taken = world.codec_thread.submit(list, offered)
    offered.pin()
    for got, expected in zip(taken.result(60), world.moves.pending(world.params, world.anchor, 0), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_what_is_not_finite_is_named_as_ever():
    world = World()
    world.params[2] = world.params[2].at[7].set(jnp.nan)
    with pytest.raises(NonFiniteDelta, match=r"the delta of c holds 1 values that are not finite \(of 150001\)"):
        world.encode(world.offer(0)).result(60)


def test_leaves_that_were_never_computed_raise_what_their_step_raised(monkeypatch):
    monkeypatch.setattr(pinned, "LOOK_SECONDS", 0.01)

    def fail(_):
        raise ValueError("no room")

    world = World()
    world.params, _ = pinned.in_place.work_on(world.params, [], fail, donate=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        world.encode(world.offer(0)).result(60)


def test_what_was_read_is_not_there_a_second_time(monkeypatch):
    monkeypatch.setattr(pinned, "LOOK_SECONDS", 0.01)
    world = World()
    offer = world.offer(0)
    world.encode(offer).result(60)
    with pytest.raises(RuntimeError, match="read once"):
        world.codec_thread.submit(lambda: offer.segments[0]).result(60)


def test_a_loop_that_encodes_what_it_offers_in_its_own_thread_has_it_computed():
    """As a replay does."""
    world = World()
    expected = world.moves.pending(world.params, world.anchor, 0)
    want = DeltaCoder(MODEL, world.coder.settings).encode(Offer(0, 0, expected, 1, 1)).frames
    assert world.coder.encode(world.offer(0)).frames == want


def test_a_copy_that_fails_is_no_reason_to_read_memory_that_is_xlas_again(monkeypatch):
    monkeypatch.setattr(pinned, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(pinned, "LOOK_SECONDS", 0.01)
    world, may_go = World(), threading.Event()

    def no_room(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(pinned.Pinned, "_copy", no_room)
    world.codec_thread.submit(may_go.wait, 60)
    result = world.encode(world.offer(0))
    trained = [jax.jit(lambda leaf: leaf * 0, donate_argnums=0)(leaf) for leaf in world.params]
    jax.block_until_ready(trained)
    may_go.set()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        result.result(60)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_leaves_that_a_step_has_made_another_dtype_are_not_pinned(dtype):
    with jax.enable_x64(dtype == "float64"):
        world = World()
        world.params[0] = world.params[0].astype(dtype)
        assert not isinstance(world.moves.offered(world.params, world.anchor, 0), PinnedSegments)


@pytest.mark.parametrize(
    ("why", "moves"),
    [
        ("a share of what is pending", DeviceMoves(DeltaCoder(MODEL, fixed_run()).layout, MODEL, True, 0.5)),
        ("the anchor is on the host", None),
    ],
)
def test_other_moves_offer_what_is_pending(why, moves):
    world = World()
    world.moves = moves or HostMoves(world.coder.layout, MODEL, world.params, True, 1.0)
    world.anchor = world.moves.place(world.params)
    assert not isinstance(world.moves.offered(world.params, world.anchor, 0), PinnedSegments), why
