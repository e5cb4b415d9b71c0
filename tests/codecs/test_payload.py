"""Payloads: frames that hold together, or are refused before anything is written."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.averaging.held_rounds import SlabThreads
from zmqtrain.codecs import fast
from zmqtrain.codecs.base import codec_from_spec, coding_from_spec
from zmqtrain.codecs.payload import (
    check_frame,
    check_payload,
    decode_payload,
    decode_segments,
    encode_payload,
    initial_states,
    payload_size,
    plan_parts,
    plan_payload,
)
from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.core.types import MAX_FRAME_BYTES, LeafSpec

SPECS = ["float32", "bf16", "int8:block=256", "int4s", "int2", "ternary:block=128", "ternary:fragments=4", "sign"]
SPECS += ["topk:density=0.05+int4", "blocktopk+int8", "randomk:density=0.1+int8", "dct+topk:density=0.1+int8"]
SPECS += ["lowrank:rank=2", "topk:density=0.05+sign;1=bf16;[2-9]=int8:block=64"]
"""One of every kind of buffers; the last has overrides, by the paths of leaves that `all_of` gives."""
COUNTS = [1, 200_000, 300, 65_536, 65_537, 130_000]

every_codec = pytest.mark.parametrize("spec", SPECS)


def segments_of(counts, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(count).astype(np.float32) for count in counts]


def all_of(spec, segments):
    """The same codec for every segment; or what a run's spec has for the leaves 0, 1, ... of a model."""
    if ";" not in spec:
        return (codec_from_spec(spec),) * len(segments)
    coding = coding_from_spec(spec)
    return tuple(coding.of(LeafSpec(str(index), (1,), "float32")) for index in range(len(segments)))


def one_by_one(codecs, segments):
    """Every slab alone through its codec: what a payload must decode to."""
    decoded = []
    for codec, segment in zip(codecs, segments, strict=True):
        for start in range(0, segment.size, codec.slab):
            slab = segment[start : start + codec.slab]
            decoded.append(codec.decode(codec.encode(slab, codec.init(slab.size))[0], slab.size))
    return np.concatenate(decoded)


def sealed(codecs, frame):
    """The frame with a checksum that fits it: a liar computes one too."""
    frame = bytearray(frame)
    names = ";".join(codec.name for codec in codecs)
    crc = zlib.crc32(frame[8:], zlib.crc32(frame[:4], zlib.crc32(names.encode())))
    frame[4:8] = struct.pack("<I", crc)
    return bytes(frame)


def assert_refused(codecs, frames, counts, match=None):
    out = np.full(sum(counts), 7, np.float32)
    with pytest.raises(CodecError, match=match):
        decode_payload(codecs, frames, counts, out=out, add=True)
    assert (out == 7).all()


@every_codec
def test_a_payload_decodes_to_its_slabs_decoded_alone(spec):
    codecs, segments = all_of(spec, COUNTS), segments_of(COUNTS)
    frames = encode_payload(codecs, segments)
    check_payload(codecs, frames, COUNTS)
    expected = one_by_one(codecs, segments)
    np.testing.assert_array_equal(decode_payload(codecs, frames, COUNTS), expected)
    out = np.ones(sum(COUNTS), np.float32)
    assert decode_payload(codecs, frames, COUNTS, out=out, add=True) is out
    np.testing.assert_array_equal(out, 1 + expected)
    assert decode_payload(codecs, frames, COUNTS, out=out, checked=True) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(decode_payload(codecs, frames, COUNTS, add=True), expected)


@every_codec
@settings(max_examples=examples(25))
@given(counts=st.lists(st.sampled_from([0, 1, 5, 127, 129, 4096, 65_535, 65_537]), max_size=6))
def test_a_payload_has_just_the_bytes_that_were_planned(spec, counts):
    codecs = all_of(spec, counts)
    frames = encode_payload(codecs, segments_of(counts))
    check_payload(codecs, frames, tuple(counts))
    assert all(len(frame) <= MAX_FRAME_BYTES for frame in frames)
    assert sum(map(len, frames)) == payload_size(codecs, counts)
    assert (len(frames) == 0) == (sum(counts) == 0)


@every_codec
def test_large_payloads_fill_their_frames(spec):
    counts = [3_000_000]
    codecs = all_of(spec, counts)
    frames = encode_payload(codecs, segments_of(counts))
    assert all(len(frame) > 0.7 * MAX_FRAME_BYTES for frame in frames[:-1])


@every_codec
def test_frames_may_come_in_any_order_and_be_decoded_on_arrival(spec):
    counts = [900_000, 40, 1_500_000]
    codecs, segments = all_of(spec, counts), segments_of(counts)
    frames = encode_payload(codecs, segments)[::-1]
    out, slabs = np.zeros(sum(counts), np.float32), []
    for frame in frames:
        slabs += check_frame(codecs, frame, counts)
        decode_payload(codecs, [frame], counts, out, add=True, checked=True)
    assert sorted(slabs) == list(range(len(plan_payload(codecs, tuple(counts)).slabs)))
    assert codecs[0].slab != 65_536 or len(slabs) == 14 + 1 + 23
    np.testing.assert_array_equal(out, one_by_one(codecs, segments))
    np.testing.assert_array_equal(decode_payload(codecs, frames, counts), out)


@every_codec
def test_segments_may_each_be_decoded_into_memory_of_their_own(spec):
    codecs, segments = all_of(spec, COUNTS), segments_of(COUNTS)
    frames = encode_payload(codecs, segments)
    whole = decode_payload(codecs, frames, COUNTS)
    apart = [np.full(count, 7, np.float32) for count in COUNTS]
    decode_segments(codecs, frames[::-1], apart)
    assert np.concatenate(apart).tobytes() == whole.tobytes()
    decode_segments(codecs, frames, apart, add=True)
    np.testing.assert_array_equal(np.concatenate(apart), whole + whole)


def test_frames_of_other_segments_are_refused():
    codecs, segments = all_of("int8", COUNTS), segments_of(COUNTS)
    frames = encode_payload(codecs, segments)
    with pytest.raises(CodecError, match="declares"):
        decode_segments(codecs[:1], frames, [np.zeros(9, np.float32)])


@every_codec
def test_frames_may_lie_at_any_address(spec):
    codecs, segments = all_of(spec, "ab"), segments_of([70_001, 9])
    frames = encode_payload(codecs, segments)
    moved = []
    for shift, frame in enumerate(frames, start=1):
        moved.append(memoryview(bytes(shift) + bytes(frame))[shift:])
    expected = decode_payload(codecs, frames, [70_001, 9])
    np.testing.assert_array_equal(decode_payload(codecs, moved, [70_001, 9]), expected)


def test_the_bytes_lie_where_the_plan_says():
    counts = [101, 3]
    codecs = all_of("int8", counts)
    (frame,) = encode_payload(codecs, [np.full(count, 127, np.float32) for count in counts])
    plan = plan_payload(codecs, tuple(counts))
    assert len(frame) == plan.frames[0].size == 16 + 104 + 4 + 4 + 4
    assert [slab.sections[0].start for slab in plan.slabs] == [16, 16 + 104 + 4]
    assert frame[16:117] == bytes([127] * 101)
    assert frame[117:120] == bytes(3)


@every_codec
def test_every_flipped_bit_is_refused_and_nothing_is_written(spec):
    """By the checksum, but for what the header says of the frame itself."""
    counts = [300, 7]
    codecs = all_of(spec, counts)
    (frame,) = encode_payload(codecs, segments_of(counts))
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        of_the_frame = bit // 8 < 4 or 8 <= bit // 8 < 16
        assert_refused(codecs, [frame], counts, None if of_the_frame else "the checksum of the slabs 0..1 is wrong")
        frame[bit // 8] ^= 1 << bit % 8
    check_payload(codecs, [frame], counts)


@every_codec
def test_every_truncation_and_every_trailing_byte_is_refused(spec):
    counts = [300, 7]
    codecs = all_of(spec, counts)
    (frame,) = encode_payload(codecs, segments_of(counts))
    lies = [frame[:cut] for cut in range(len(frame))] + [frame + bytes(more) for more in range(1, 71)]
    for lie in lies:
        assert_refused(codecs, [lie], counts)
        if len(lie) >= 8:
            assert_refused(codecs, [sealed(codecs, lie)], counts)


@every_codec
def test_every_flipped_bit_that_a_liar_seals_is_refused_or_does_no_harm(spec):
    """Refused, and nothing is written; or let through: then all is finite, and only the segment it lies in differs."""
    counts = [33, 7]
    codecs = all_of(spec, counts)
    (frame,) = encode_payload(codecs, segments_of(counts))
    honest = decode_payload(codecs, [frame], counts)
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        out = np.full(40, 7, np.float32)
        try:
            decode_payload(codecs, [sealed(codecs, frame)], counts, out=out)
        except CodecError:
            assert (out == 7).all()
        else:
            assert 4 <= bit // 8 < 8 or bit // 8 >= 16
            assert np.isfinite(out).all()
            assert (out[:33] == honest[:33]).all() or (out[33:] == honest[33:]).all()
        frame[bit // 8] ^= 1 << bit % 8


@settings(max_examples=examples(200))
@given(position=st.integers(0, 15), value=st.integers(0, 255))
def test_a_liar_who_seals_the_frame_is_refused_or_does_no_harm(position, value):
    counts = [300, 7]
    codecs = all_of("ternary", counts)
    (frame,) = encode_payload(codecs, segments_of(counts))
    same = frame[position] == value or position in range(4, 8)
    frame[position] = value
    if same:
        check_payload(codecs, [sealed(codecs, frame)], counts)
    else:
        assert_refused(codecs, [sealed(codecs, frame)], counts)


@pytest.mark.parametrize(
    ("offset", "layout", "values", "match"),
    [
        (0, "<B", (1,), "version 1"),
        (1, "<B", (1,), "version"),
        (8, "<I", (1,), "2 slabs from 1: the payload of 2 has no such"),
        (8, "<I", (0xFFFFFFFF,), "has no such"),
        (12, "<I", (0,), "0 slabs from 0"),
        (12, "<I", (0xFFFFFFFF,), "has no such"),
    ],
)
def test_a_structural_lie_is_named(offset, layout, values, match):
    counts = [300, 7]
    codecs = all_of("ternary", counts)
    (frame,) = encode_payload(codecs, segments_of(counts))
    struct.pack_into(layout, frame, offset, *values)
    assert_refused(codecs, [sealed(codecs, frame)], counts, match)


def test_a_scale_that_is_not_finite_is_refused_even_when_sealed():
    codecs = all_of("ternary", [100])
    (frame,) = encode_payload(codecs, segments_of([100]))
    frame[-4:-2] = b"\x80\x7f"
    assert_refused(codecs, [sealed(codecs, frame)], [100], "scale 0")


def test_missing_and_repeated_slabs_are_refused():
    counts = [1_600_000, 1_600_000]
    codecs = all_of("float32", counts)
    frames = encode_payload(codecs, segments_of(counts))
    assert len(frames) > 3
    assert_refused(codecs, frames[1:], counts, "slab 0 of 50 is missing")
    assert_refused(codecs, frames[:-1], counts, "is missing")
    assert_refused(codecs, [*frames[:1], *frames[2:]], counts, "slab 15 of 50 is missing")
    assert_refused(codecs, [frames[0], *frames[:2], frames[3]], counts, "given twice")
    assert_refused(codecs, [frames[0]] * 99, counts, "99 frames for a payload of 4")
    assert_refused(codecs, [], counts, "slab 0 of 50 is missing")


def test_frames_of_another_codec_or_other_counts_are_refused():
    counts = [300, 7]
    frames = encode_payload(all_of("ternary", counts), segments_of(counts))
    assert_refused(all_of("int8", counts), frames, counts)
    assert_refused((codec_from_spec("ternary"), codec_from_spec("ternary:block=127")), frames, counts, "checksum")
    assert_refused(all_of("ternary", "a"), frames, [300], "the payload of 1 has no such")
    assert_refused(all_of("ternary", counts), frames, [308, 7], "bytes")
    assert_refused((), frames, [], "1 frames for a payload of 0")
    assert_refused(all_of("ternary", counts), ["text"], counts, "cannot be read")


def test_every_segment_may_have_a_codec_of_its_own():
    specs = ["float32", "ternary", "topk:density=0.01+int4", "int8:block=64", "lowrank:rank=2", "sign"]
    counts = [300, 70_000, 70_000, 5, 100_000, 1]
    codecs, segments = tuple(map(codec_from_spec, specs)), segments_of(counts)
    frames = encode_payload(codecs, segments)
    check_payload(codecs, frames, counts)
    np.testing.assert_array_equal(decode_payload(codecs, frames, counts), one_by_one(codecs, segments))


def test_states_go_on_from_payload_to_payload_and_stay_as_they_were_if_one_fails():
    codecs, counts = all_of("randomk:density=0.1+int8", "ab"), [1000, 70_000]
    states = initial_states(codecs, counts)
    first = encode_payload(codecs, segments_of(counts), states)
    second = encode_payload(codecs, segments_of(counts), states)
    assert first != second
    bad = segments_of(counts)
    bad[1][3] = np.inf
    with pytest.raises(NonFiniteDelta):
        encode_payload(codecs, bad, states)
    third = encode_payload(codecs, segments_of(counts), states)
    afresh = initial_states(codecs, counts)
    assert [encode_payload(codecs, segments_of(counts), afresh) for _ in range(3)] == [first, second, third]


@every_codec
def test_payloads_that_are_on_their_way_are_subtracted_as_if_they_had_been_decoded_whole(spec):
    codecs, segments = all_of(spec, COUNTS), segments_of(COUNTS)
    less = [encode_payload(codecs, segments_of(COUNTS, seed))[::-1] for seed in (1, 2)]
    sent = decode_payload(codecs, less[0], COUNTS)
    for on_the_way in (less[:1], less):
        rest = [ours - known for ours, known in zip(segments, np.split(sent, np.cumsum(COUNTS)[:-1]), strict=True)]
        assert encode_payload(codecs, segments, less=on_the_way) == encode_payload(codecs, rest)
        decode_payload(codecs, less[1], COUNTS, out=sent, add=True)
    with pytest.raises(CodecError, match="segment 1 of 2"):
        odd = [np.ones(5, np.float32), np.ones(5, np.float64)]
        encode_payload(all_of(spec, odd), odd, less=[encode_payload(all_of(spec, odd), segments_of([5, 5]))])


@every_codec
def test_several_threads_make_the_same_frames_keep_the_same_states_and_decode_the_same_values(spec):
    codecs, segments = all_of(spec, COUNTS), segments_of(COUNTS)
    less = [encode_payload(codecs, segments_of(COUNTS, seed)) for seed in (1, 2)]
    made = []
    for threads in (1, 3):
        each, states = SlabThreads(threads, least_values=1).each, initial_states(codecs, COUNTS)
        frames = [encode_payload(codecs, segments, states, less[:count], each) for count in (0, 1, 2)]
        values = [np.ones(count, np.float32) for count in COUNTS]
        for number, payload in enumerate(frames):
            decode_segments(codecs, payload, values, add=number > 0, each=each)
        made.append((frames, np.concatenate(values).tobytes()))
    assert made[0] == made[1]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_earliest_segment_that_is_not_finite_is_named_whatever_the_number_of_threads(threads):
    segments = segments_of(COUNTS)
    segments[3][7] = segments[5][0] = np.inf
    with pytest.raises(NonFiniteDelta, match="segment 3 of 6"):
        encode_payload(all_of("int8", segments), segments, each=SlabThreads(threads, least_values=1).each)


def test_a_segment_that_is_not_finite_is_named_by_its_index():
    segments = segments_of([10, 100_000, 10])
    segments[1][99_999] = np.nan
    with pytest.raises(NonFiniteDelta, match="segment 1 of 3") as raised:
        encode_payload(all_of("ternary", segments), segments)
    assert raised.value.leaf == ""


@pytest.mark.parametrize("wrong", [np.ones(5), np.ones(5, np.int32), np.ones((2, 2), np.float32)])
def test_a_segment_of_another_kind_is_named_by_its_index(wrong):
    with pytest.raises(CodecError, match="segment 1"):
        encode_payload(all_of("int8", "ab"), [np.ones(3, np.float32), wrong])


@pytest.mark.parametrize("out", [np.zeros(4, np.float32), np.zeros(5), np.zeros(10, np.float32)[::2]])
def test_a_target_of_another_kind_is_refused(out):
    codecs = all_of("int8", "a")
    frames = encode_payload(codecs, segments_of([5]))
    with pytest.raises(CodecError, match=r"contiguous float32\[5\]"):
        decode_payload(codecs, frames, [5], out=out)


@settings(max_examples=examples(60))
@given(
    specs=st.lists(st.sampled_from(SPECS), min_size=1, max_size=3),
    counts=st.lists(st.sampled_from([0, 1, 5, 300, 65_537, 300_000]), min_size=1, max_size=6),
    values=st.sampled_from([1, 70_000, 1 << 18]),
)
def test_parts_hold_whole_slabs_of_all_codings_one_after_the_other(specs, counts, values):
    codings = tuple(all_of(spec, counts) for spec in specs)
    parts = plan_parts(codings, tuple(counts), values)
    assert [part.start for part in parts] == [0, *(part.end for part in parts)][:-1] and parts[-1].end == sum(counts)
    for number, codecs in enumerate(codings):
        slabs = plan_payload(codecs, tuple(counts)).slabs
        assert [n for part in parts for n in part.slabs[number]] == [*range(len(slabs))]
        for part in parts:
            held = [slabs[n] for n in part.slabs[number]]
            assert not held or (held[0].start, held[-1].end) == (part.start, part.end)
    for part in parts:  # one that is longer is one slab of some coding, or several that end nowhere together
        assert (
            part.values <= values
            or len(set.intersection(*(set(slab_starts(part, codecs, counts, n)) for n, codecs in enumerate(codings))))
            == 1
        )


def slab_starts(part, codecs, counts, number):
    slabs = plan_payload(codecs, tuple(counts)).slabs
    return [slabs[n].start for n in part.slabs[number]]


@pytest.fixture
def numba_or_not():
    yield [True, False]
    fast.use(None)


RUNS = ["ternary", "ternary:block=7", "ternary:block=4096", "ternary:block=64;1=int8", "topk:density=0.05+sign"]
RUNS += ["topk:density=0.0001+sign:block=64", "topk:density=0.3+sign", "topk:density=1+sign:block=7;2=ternary"]
"""Of each way to write an index, and of neighbours with other codecs."""


@pytest.mark.parametrize("spec", RUNS)
def test_slabs_in_a_row_have_the_bytes_and_the_values_of_slabs_one_by_one(spec, numba_or_not):
    counts = [200_000, 65_536, 300, 131_072, 7, *range(1, 40), 600_000]
    codecs, segments = all_of(spec if ";" in spec else f"{spec};99=int8", counts), segments_of(counts)
    segments[0][:200] = 0
    segments[2][:] = 0
    segments[7][:] = -0.0
    held = []
    for machine_code in numba_or_not:
        fast.use(machine_code)
        made, sent = [], [encode_payload(codecs, segments_of(counts, seed)) for seed in (1, 2, 3)]
        for less in ([], sent[:1], sent):
            frames = encode_payload(codecs, segments, less=less)
            check_payload(codecs, frames, counts)
            onto = np.concatenate(segments)
            decode_payload(codecs, frames, counts, out=onto, add=True)
            own = [np.empty(count, np.float32) for count in counts]
            decode_segments(codecs, frames, own)
            made += [*frames, decode_payload(codecs, frames, counts), onto, np.concatenate(own)]
        alone = one_by_one(codecs, segments)
        assert np.array_equal(made[len(frames)], alone)
        held.append([bytes(one) if isinstance(one, bytearray) else one.tobytes() for one in made])
    assert held[0] == held[1]


@pytest.mark.parametrize("spec", ["ternary:block=32", "topk:density=0.05+sign:block=16", "topk:density=0.4+sign"])
def test_machine_code_refuses_the_slab_that_is_refused_without_it(spec, numba_or_not):
    counts = [70_000, 40, 3, 900]
    codecs, random = all_of(spec, counts), np.random.default_rng(0)
    (frame,) = encode_payload(codecs, segments_of(counts))

    def verdict(frame):
        try:
            check_payload(codecs, [frame], counts)
        except CodecError as error:
            return str(error)
        return ""

    verdicts = []
    for _ in range(300):
        spoiled = bytearray(frame)
        spoiled[random.integers(16, len(frame))] ^= 1 << random.integers(8)
        said = []
        for machine_code in numba_or_not:
            fast.use(machine_code)
            said.append(verdict(sealed(codecs, spoiled)))
        assert said[0] == said[1]
        verdicts.append(said[0])
    assert 0 < sum(map(bool, verdicts)) < 300


@pytest.mark.parametrize("wrapper", ["feedback", "momentum:factor=0.5"])
@pytest.mark.parametrize("spec", ["ternary", "topk:density=0.05+sign"])
def test_a_codec_that_keeps_a_state_has_the_same_bytes_with_machine_code(wrapper, spec, numba_or_not):
    codecs, counts, made = all_of(f"{wrapper}+{spec}", "ab"), [40_000, 70_000], []
    for machine_code in numba_or_not:
        fast.use(machine_code)
        states = initial_states(codecs, counts)
        made.append([encode_payload(codecs, segments_of(counts), states) for _ in range(3)])
    assert made[0] == made[1]
    assert made[0][0] != made[0][1], "the residual is sent too"


@pytest.mark.parametrize("place", ["digit", "scale", "tail"])
def test_of_slabs_in_a_row_the_one_that_is_wrong_is_named(place):
    codecs, counts = all_of("ternary:block=128", [1, 1]), (196_608, 5)
    (frame,) = encode_payload(codecs, segments_of(counts))
    slab = plan_payload(codecs, counts).slabs[1]
    digits, scales = slab.sections
    frame[{"digit": digits.start, "scale": scales.start + 1, "tail": digits.stop - 1}[place]] = 0xFF
    with pytest.raises(CodecError, match="slab 1 of 4"):
        check_payload(codecs, [sealed(codecs, frame)], counts)


def test_a_slab_in_a_row_that_is_not_finite_is_refused_with_its_segment():
    codecs, counts = all_of("ternary:block=128", [1, 1]), (5, 196_608)
    for place in (0, 65_536, 196_607):
        segments = segments_of(counts)
        segments[1][place] = np.nan
        with pytest.raises(NonFiniteDelta, match="segment 1 of 2"):
            encode_payload(codecs, segments)
