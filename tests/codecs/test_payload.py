"""Payloads: frames that hold together, or are refused before anything is written."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.payload import (
    SLAB_VALUES,
    check_frame,
    check_payload,
    decode_frame,
    decode_payload,
    encode_payload,
    frames_bound,
    payload_bound,
)
from zmqtrain.errors import CodecError, NonFiniteDelta
from zmqtrain.types import MAX_FRAME_BYTES

SPECS = ["float32", "bf16", "int8:block=256", "ternary:block=128"]
COUNTS = [1, 200_000, 300, 65_536, 65_537, 130_000]

every_codec = pytest.mark.parametrize("spec", SPECS)


def segments_of(counts, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(count).astype(np.float32) for count in counts]


def one_by_one(codec, segments):
    """Every slab alone through the codec: what a payload must decode to."""
    decoded = []
    for segment in segments:
        for start in range(0, segment.size, SLAB_VALUES):
            slab = segment[start : start + SLAB_VALUES]
            decoded.append(codec.decode(codec.encode(slab, ())[0], slab.size))
    return np.concatenate(decoded)


def sealed(codec, frame):
    """The frame with a checksum that fits it: a liar computes one too."""
    frame = bytearray(frame)
    crc = zlib.crc32(frame[8:], zlib.crc32(frame[:4], zlib.crc32(codec.name.encode())))
    frame[4:8] = struct.pack("<I", crc)
    return bytes(frame)


def assert_refused(codec, frames, counts, match=None):
    out = np.full(sum(counts), 7, np.float32)
    with pytest.raises(CodecError, match=match):
        decode_payload(codec, frames, counts, out=out, add=True)
    assert (out == 7).all()


@every_codec
def test_a_payload_decodes_to_its_slabs_decoded_alone(spec):
    codec, segments = codec_from_spec(spec), segments_of(COUNTS)
    frames = encode_payload(codec, segments)
    check_payload(codec, frames, COUNTS)
    expected = one_by_one(codec, segments)
    np.testing.assert_array_equal(decode_payload(codec, frames, COUNTS), expected)
    out = np.ones(sum(COUNTS), np.float32)
    assert decode_payload(codec, frames, COUNTS, out=out, add=True) is out
    np.testing.assert_array_equal(out, 1 + expected)
    assert decode_payload(codec, frames, COUNTS, out=out, checked=True) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(decode_payload(codec, frames, COUNTS, add=True), expected)


@every_codec
@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.sampled_from([0, 1, 5, 127, 129, 4096, 65_535, 65_537]), max_size=6))
def test_frames_stay_within_the_bounds_that_are_declared(spec, counts):
    codec = codec_from_spec(spec)
    frames = encode_payload(codec, segments_of(counts))
    check_payload(codec, frames, tuple(counts))
    assert all(len(frame) <= MAX_FRAME_BYTES for frame in frames)
    assert sum(map(len, frames)) <= payload_bound(codec, counts)
    assert len(frames) <= frames_bound(codec, counts)
    assert (len(frames) == 0) == (sum(counts) == 0)


@every_codec
def test_large_payloads_fill_their_frames(spec):
    codec, counts = codec_from_spec(spec), [3_000_000]
    frames = encode_payload(codec, segments_of(counts))
    assert all(len(frame) > 0.7 * MAX_FRAME_BYTES for frame in frames[:-1])
    assert len(frames) <= frames_bound(codec, counts)
    assert sum(map(len, frames)) <= payload_bound(codec, counts) < 1.03 * sum(map(len, frames)) + 1024


@every_codec
def test_frames_may_come_in_any_order_and_be_decoded_on_arrival(spec):
    codec, segments = codec_from_spec(spec), segments_of([900_000, 40, 1_500_000])
    counts = [segment.size for segment in segments]
    frames = encode_payload(codec, segments)[::-1]
    out, slabs = np.zeros(sum(counts), np.float32), []
    for frame in frames:
        held = check_frame(codec, frame, counts)
        assert decode_frame(codec, frame, out, counts, add=True) == held
        slabs += held
    assert sorted(slabs) == list(range(14 + 1 + 23))
    np.testing.assert_array_equal(out, one_by_one(codec, segments))
    np.testing.assert_array_equal(decode_payload(codec, frames, counts), out)


@every_codec
def test_frames_may_lie_at_any_address(spec):
    codec, segments = codec_from_spec(spec), segments_of([70_001, 9])
    frames = encode_payload(codec, segments)
    moved = []
    for shift, frame in enumerate(frames, start=1):
        moved.append(memoryview(bytes(shift) + bytes(frame))[shift:])
    expected = decode_payload(codec, frames, [70_001, 9])
    np.testing.assert_array_equal(decode_payload(codec, moved, [70_001, 9]), expected)


def test_sections_begin_at_multiples_of_64_bytes():
    codec = codec_from_spec("int8")
    (frame,) = encode_payload(codec, [np.full(100, 127, np.float32)])
    assert len(frame) == 192 + 2
    assert frame[64:164] == bytes([127] * 100)
    assert struct.unpack_from("<II", frame, 16) == (100, 2)


@every_codec
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_refused_and_nothing_is_written(spec, data):
    codec, counts = codec_from_spec(spec), [300, 7]
    (frame,) = encode_payload(codec, segments_of(counts))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    assert_refused(codec, [frame], counts)


@every_codec
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_truncation_and_any_trailing_byte_is_refused(spec, data):
    codec, counts = codec_from_spec(spec), [300, 7]
    (frame,) = encode_payload(codec, segments_of(counts))
    cut = data.draw(st.integers(0, len(frame) - 1))
    for lie in (frame[:cut], frame + bytes(1 + cut % 70)):
        assert_refused(codec, [lie], counts)
        if len(lie) >= 8:
            assert_refused(codec, [sealed(codec, lie)], counts)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 31), value=st.integers(0, 255))
def test_a_liar_who_seals_the_frame_is_refused_or_does_no_harm(position, value):
    codec, counts = codec_from_spec("ternary"), [300, 7]
    (frame,) = encode_payload(codec, segments_of(counts))
    same = frame[position] == value or position in range(4, 8)
    frame[position] = value
    if same:
        check_payload(codec, [sealed(codec, frame)], counts)
    else:
        assert_refused(codec, [sealed(codec, frame)], counts)


@pytest.mark.parametrize(
    ("offset", "layout", "values", "match"),
    [
        (0, "<B", (2,), "version 2"),
        (1, "<B", (0,), "declares"),
        (1, "<B", (5,), "declares"),
        (2, "<H", (1,), "version"),
        (8, "<I", (1,), r"slabs 1\.\.2, the payload has 2"),
        (8, "<I", (0xFFFFFFFF,), "the payload has 2"),
        (12, "<I", (0,), "declares 0 slabs"),
        (12, "<I", (0xFFFFFFFF,), "cannot hold"),
        (16, "<I", (0xFFFFFFFF,), "declares sections up to"),
        (16, "<II", (6, 60), "buffer 0"),
    ],
)
def test_a_structural_lie_is_named(offset, layout, values, match):
    codec, counts = codec_from_spec("ternary"), [300, 7]
    (frame,) = encode_payload(codec, segments_of(counts))
    struct.pack_into(layout, frame, offset, *values)
    assert_refused(codec, [sealed(codec, frame)], counts, match)


def test_a_scale_that_is_not_finite_is_refused_even_when_sealed():
    codec = codec_from_spec("ternary")
    (frame,) = encode_payload(codec, segments_of([100]))
    frame[-2:] = b"\x80\x7f"
    assert_refused(codec, [sealed(codec, frame)], [100], "scale 0")


def test_missing_and_repeated_slabs_are_refused():
    codec, counts = codec_from_spec("float32"), [400_000, 400_000]
    frames = encode_payload(codec, segments_of(counts))
    assert len(frames) > 3
    assert_refused(codec, frames[1:], counts, "slab 0 of 14 is missing")
    assert_refused(codec, frames[:-1], counts, "is missing")
    assert_refused(codec, [*frames[:1], *frames[2:]], counts, "slab 3 of 14 is missing")
    assert_refused(codec, [*frames, frames[2]], counts, "given twice")
    assert_refused(codec, [frames[0]] * 99, counts, "99 frames for a payload of 14 slabs")
    assert_refused(codec, [], counts, "slab 0 of 14 is missing")


def test_frames_of_another_codec_or_other_counts_are_refused():
    counts = [300, 7]
    frames = encode_payload(codec_from_spec("ternary"), segments_of(counts))
    assert_refused(codec_from_spec("ternary:block=64"), frames, counts, "checksum")
    assert_refused(codec_from_spec("int8"), frames, counts)
    assert_refused(codec_from_spec("ternary"), frames, [300], "the payload has 1")
    assert_refused(codec_from_spec("ternary"), frames, [301, 7], "slab 0 of 2")
    assert_refused(codec_from_spec("ternary"), frames, [], "0 slabs")
    assert_refused(codec_from_spec("ternary"), ["text"], counts, "cannot be read")


def test_a_segment_that_is_not_finite_is_named_by_its_index():
    segments = segments_of([10, 100_000, 10])
    segments[1][99_999] = np.nan
    with pytest.raises(NonFiniteDelta, match="segment 1 of 3") as raised:
        encode_payload(codec_from_spec("ternary"), segments)
    assert raised.value.leaf == ""


@pytest.mark.parametrize("wrong", [np.ones(5), np.ones(5, np.int32), np.ones((2, 2), np.float32)])
def test_a_segment_of_another_kind_is_named_by_its_index(wrong):
    with pytest.raises(CodecError, match="segment 1"):
        encode_payload(codec_from_spec("int8"), [np.ones(3, np.float32), wrong])


@pytest.mark.parametrize("out", [np.zeros(4, np.float32), np.zeros(5), np.zeros(10, np.float32)[::2]])
def test_a_target_of_another_kind_is_refused(out):
    codec = codec_from_spec("int8")
    frames = encode_payload(codec, segments_of([5]))
    with pytest.raises(CodecError, match=r"contiguous float32\[5\]"):
        decode_payload(codec, frames, [5], out=out)
