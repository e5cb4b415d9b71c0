"""Payloads coded on a device: the frames and the values are those of the host, and only compressed bytes cross."""

from __future__ import annotations

import contextlib
import logging
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.grids import examples, nightly
from zmqtrain.codecs.base import CODECS, TRANSFORMS, codec_from_spec
from zmqtrain.codecs.codec import Codec
from zmqtrain.codecs.payload import decode_payload, encode_payload, initial_states, payload_size
from zmqtrain.codecs.payload_jax import DeviceCoder
from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.core.types import MAX_FRAME_BYTES

SPECS = [*CODECS, *(f"{transform}+int8" for transform in TRANSFORMS)]
"""Every member of the family, by its defaults."""
SLAB_VALUES = 2048
"""Small slabs, so that there are many in little."""
COUNTS = (4 * SLAB_VALUES + 7, SLAB_VALUES, 7, 3 * SLAB_VALUES + 7)
"""Whole slabs in a row, and tails like a segment that is shorter than any block."""

KEEPS = [spec for spec in SPECS if jax.tree.leaves(codec_from_spec(spec).init(100))]
"""Those that keep something from one encode to the next."""

FRAMED = ["float32", "bf16", "int4", "ternary", "lowrank", "topk+int8", "dct+int8"]
"""One of each form of frames; the others are nightly. test_codec_laws.py compares every codec, slab by slab."""
EVERY_FRAME = [*FRAMED, *(pytest.param(spec, marks=pytest.mark.nightly) for spec in SPECS if spec not in FRAMED)]


@cache
def small(spec):
    """The codec of a spec, with small slabs."""
    return codec_from_spec(spec)._replace(slab=SLAB_VALUES)


def all_of(spec, counts=COUNTS):
    return (small(spec),) * len(counts)


def segments_of(counts=COUNTS, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(count).astype(np.float32) * np.float32(scale) for count in counts]


def put(segments):
    return [jnp.array(segment) for segment in segments]


def raw(frames):
    return tuple(map(bytes, frames))


@contextlib.contextmanager
def compiled():
    """Yield a list that grows by a line for each function that jax compiles meanwhile."""
    names = []
    handler = logging.Handler()
    handler.emit = lambda record: names.append(record.getMessage()) if "Compiling" in record.getMessage() else None
    logger = logging.getLogger("jax")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def counting():
    """A codec with a state: int8 values that each encode of a slab has turned around, or not."""
    inner = codec_from_spec("int8")

    def encode(x, state):
        turns = state["turns"]
        buffers, _ = inner.encode(x * (1 - 2 * (turns % 2)).astype(np.float32), ())
        return buffers, {"turns": turns + 1}

    def init(count):
        return {"turns": np.int32(count % 2)}

    return Codec("counting", init, inner.layout, encode, inner.decode, inner.check, inner.decode_into, SLAB_VALUES)


@pytest.mark.parametrize("spec", EVERY_FRAME)
def test_a_device_makes_the_frames_of_the_host_and_decodes_to_its_bits(spec):
    codecs, coder = all_of(spec), DeviceCoder()
    for seed, scale in ((0, 1.0), (1, 2.0**-90), (2, 2.0**100)):
        segments = segments_of(seed=seed, scale=scale)
        frames = encode_payload(codecs, segments)
        assert raw(coder.encode(codecs, put(segments))) == raw(frames)
        decoded = coder.decode(codecs, frames, COUNTS)
        assert [part.shape for part in decoded] == [(count,) for count in COUNTS]
        assert np.concatenate(decoded).tobytes() == decode_payload(codecs, frames, COUNTS).tobytes()


MIXES = st.lists(
    st.tuples(st.sampled_from([0, 5, 2049]), st.sampled_from(["float32", "bf16", "int8", "ternary"])),
    max_size=5,
)


@settings(max_examples=examples(6))
@given(mix=MIXES, zeros=st.booleans())
@example(mix=[], zeros=False)
@example(mix=[(0, "int8")], zeros=False)
@example(mix=[(5, "ternary"), (0, "int8"), (5, "bf16"), (2048, "float32"), (5, "ternary")], zeros=True)
def test_every_segment_has_its_own_codec_and_may_be_empty(mix, zeros):
    counts = tuple(count for count, _ in mix)
    codecs = tuple(small(spec) for _, spec in mix)
    segments = segments_of(counts, scale=0.0 if zeros else 1.0)
    coder = DeviceCoder()
    frames = encode_payload(codecs, segments)
    assert raw(coder.encode(codecs, put(segments))) == raw(frames)
    for ours, theirs in zip(
        coder.decode(codecs, frames[::-1], counts),
        np.split(decode_payload(codecs, frames, counts), np.cumsum(counts)[:-1]) if counts else [],
        strict=True,
    ):
        assert np.asarray(ours).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("spec", ["int8", "ternary", *nightly("float32", "bf16", "blocktopk+int8")])
def test_what_is_on_its_way_is_taken_off_as_the_host_would(spec):
    coder, codecs, dense = DeviceCoder(), all_of(spec), all_of("float32")
    segments = segments_of()
    sent = [
        (codecs, encode_payload(codecs, segments_of(seed=1))),
        (dense, encode_payload(dense, segments_of(seed=2))),
        (codecs, encode_payload(codecs, segments_of(seed=3))),
    ]
    total = decode_payload(*sent[0], COUNTS)
    for of, frames in sent[1:]:
        total = decode_payload(of, frames, COUNTS, out=total, add=True)
    pieces = np.split(total, np.cumsum(COUNTS)[:-1])
    want = encode_payload(codecs, [ours - known for ours, known in zip(segments, pieces, strict=True)])
    assert raw(coder.encode(codecs, put(segments), sent)) == raw(want)
    assert np.concatenate(coder.decode_sum(sent, COUNTS)).tobytes() == total.tobytes()


@pytest.mark.parametrize("codec", [counting(), *map(small, KEEPS)], ids=lambda codec: codec.name)
def test_states_stay_on_the_device_and_move_as_they_do_on_the_host(codec):
    codecs, coder = (codec, small("int8"), codec), DeviceCoder()
    counts = (2 * SLAB_VALUES + 7, 9, 7)
    here, there = initial_states(codecs, counts), coder.initial_states(codecs, counts)
    for seed in range(3):
        segments = segments_of(counts, seed)
        want = encode_payload(codecs, segments, here)
        assert raw(coder.encode(codecs, put(segments), states=there)) == raw(want)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(there))
    before = jax.tree.map(np.asarray, there)
    segments[0][SLAB_VALUES] = np.nan
    with pytest.raises(NonFiniteDelta):
        coder.encode(codecs, put(segments), states=there)
    assert jax.tree.map(np.ndarray.tolist, before) == jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), there)
    assert raw(coder.encode(codecs, put(segments_of(counts)))) == raw(encode_payload(codecs, segments_of(counts)))


@pytest.mark.parametrize("spec", EVERY_FRAME)
def test_nan_and_infinity_are_refused_with_the_segment_as_on_the_host(spec):
    codecs, segments = all_of(spec), segments_of()
    for bad in (np.nan, np.inf, -np.inf):
        segments[2][-1] = bad
        for encode in (encode_payload, DeviceCoder().encode):
            with pytest.raises(NonFiniteDelta, match=f"segment 2 of {len(COUNTS)}"):
                encode(codecs, segments)


def test_a_segment_that_is_not_flat_float32_is_refused():
    codecs = all_of("int8", "ab")
    for wrong in (np.ones((2, 2), np.float32), np.ones(3, np.int32)):
        with pytest.raises(CodecError, match="segment 1 is"):
            DeviceCoder().encode(codecs, [jnp.ones(3), wrong])


def test_a_payload_that_cannot_be_read_is_refused_before_anything_is_put():
    codecs, coder = all_of("ternary"), DeviceCoder()
    frames = encode_payload(codecs, segments_of())
    with pytest.raises(CodecError, match="missing"):
        coder.decode(codecs, frames[1:], COUNTS)
    frames[0][-1] ^= 1
    with pytest.raises(CodecError, match="checksum"):
        coder.decode(codecs, frames, COUNTS)
    assert coder.bytes_put == 0


@pytest.mark.parametrize("spec", ["int8", "ternary"])
def test_only_compressed_bytes_cross(spec):
    codecs, coder = all_of(spec), DeviceCoder()
    frames = coder.encode(codecs, put(segments_of()))
    assert payload_size(codecs, COUNTS) == sum(map(len, frames))
    assert coder.bytes_put == 0
    slabs = 11
    assert abs(coder.bytes_fetched - payload_size(codecs, COUNTS)) <= 16 * slabs  # padding and magnitudes, headers
    coder.decode(codecs, frames, COUNTS)
    assert 0 < coder.bytes_put < payload_size(codecs, COUNTS)


def test_warming_up_fetches_nothing_and_leaves_nothing_to_compile():
    codecs, coder, counts = all_of("ternary", "abc"), DeviceCoder(), (SLAB_VALUES + 2, SLAB_VALUES + 2, 3)
    with compiled() as names:
        coder.warm_up(codecs, counts)
    assert names and coder.bytes_fetched == 0
    segments = put(segments_of(counts))
    with compiled() as names:
        sent = (codecs, coder.encode(codecs, segments))
        coder.encode(codecs, segments, [sent])
        coder.decode(*sent, counts)
    assert names == []


def test_frames_are_no_larger_than_a_frame_may_be():
    codecs, counts = all_of("float32", "a"), (1_200_000,)
    frames = DeviceCoder().encode(codecs, put(segments_of(counts)))
    assert len(frames) > 1 and max(map(len, frames)) <= MAX_FRAME_BYTES
    assert all(isinstance(frame, bytearray) for frame in frames)
