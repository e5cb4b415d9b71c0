"""A node's side of the one equation: u = C(pending - unacked)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.fixed import fixed_run
from tests.grids import nightly
from zmqtrain.averaging.coder import DeltaCoder, cut, decode_snapshot, encode_snapshot, snapshot_counts
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.payload import decode_payload, encode_payload
from zmqtrain.codecs.payload_jax import DeviceCoder
from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec, Offer
from zmqtrain.node.codec import Inbox
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.messages import Aggregate, Snapshot, replace_fields

MODEL = (LeafSpec("layer/w", (3, 4096), "float32"), LeafSpec("layer/b", (10,), "float32"))
CODECS = ["float32", "bf16", "int8:block=256", "ternary:block=128"]
MIXED = "ternary:block=128;*b=bf16"


def coder_of(codec="ternary:block=128", fragments=2):
    return DeltaCoder(MODEL, fixed_run(codec=codec, fragments=fragments))


def pending_of(coder, fragment, seed=0):
    size = sum(coder.layout.counts(fragment))
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def offer_of(coder, sequence, fragment, pending, applied=(), dense=False):
    segments = cut(pending, coder.layout.counts(fragment))
    return Offer(sequence, fragment, segments, 8, 8, None, applied, dense)


def codecs_of(coder, codec, fragment):
    return coding_from_spec(codec).of_fragment(coder.layout, fragment)


def decoded(coder, encoded):
    codecs = codecs_of(coder, encoded.codec, encoded.fragment)
    return decode_payload(codecs, encoded.frames, coder.layout.counts(encoded.fragment))


def flat(parts):
    return np.concatenate(parts)


def aggregate_of(coder, version, fragments, codec="float32"):
    frames = []
    for f in fragments:
        segments = cut(pending_of(coder, f, 50 + f), coder.layout.counts(f))
        frames.append(encode_payload(codecs_of(coder, codec, f), segments))
    sizes = tuple(len(frame) for one in frames for frame in one)
    message = Aggregate(version, version, codec, fragments, tuple(len(one) for one in frames), sizes, (), 2)
    return message, [frame for one in frames for frame in one]


def snapshot_of(coder, version=3):
    flats = [pending_of(coder, f, 70 + f) for f in range(coder.layout.fragments)]
    frames = encode_snapshot(coder.layout, flats)
    return Snapshot(9, version, tuple(len(frame) for frame in frames)), frames, flats


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_on_its_way_is_not_sent_again(codec):
    coder = coder_of(codec)
    pending, sent = pending_of(coder, 1), np.zeros(sum(coder.layout.counts(1)), np.float32)
    for sequence in range(3):  # several of one fragment in flight
        encoded = coder.encode(offer_of(coder, sequence, 1, pending))
        want = encode_payload(codecs_of(coder, codec, 1), cut(pending - sent, coder.layout.counts(1)))
        assert tuple(map(bytes, encoded.frames)) == tuple(map(bytes, want))
        sent += decoded(coder, encoded)
        pending = pending + np.float32(0.25)
    assert sorted(coder.unacked) == [0, 1, 2]


def test_what_is_on_its_way_of_another_fragment_does_not_matter():
    coder = coder_of("float32")
    coder.encode(offer_of(coder, 0, 0, pending_of(coder, 0)))
    pending = pending_of(coder, 1)
    np.testing.assert_array_equal(decoded(coder, coder.encode(offer_of(coder, 1, 1, pending))), pending)


def test_a_withdrawn_delta_is_offered_again():
    coder, pending = coder_of("float32"), None
    pending = pending_of(coder, 0)
    coder.encode(offer_of(coder, 0, 0, pending))
    assert not decoded(coder, coder.encode(offer_of(coder, 1, 0, pending))).any()
    coder.withdraw(0), coder.withdraw(0), coder.withdraw(77)
    np.testing.assert_array_equal(decoded(coder, coder.encode(offer_of(coder, 2, 0, pending))), pending)


def test_what_was_left_out_by_the_codec_is_in_the_next_delta():
    coder, pending = coder_of("ternary:block=128"), None
    pending = pending_of(coder, 0)
    first = decoded(coder, coder.encode(offer_of(coder, 0, 0, pending)))
    rest = decoded(coder, coder.encode(offer_of(coder, 1, 0, pending - first, applied=(0,), dense=True)))
    np.testing.assert_allclose(first + rest, pending, rtol=0, atol=1e-6)
    assert sorted(coder.unacked) == [1]


def test_a_dense_offer_is_exact():
    coder = coder_of()
    pending = pending_of(coder, 0)
    encoded = coder.encode(offer_of(coder, 0, 0, pending, dense=True))
    assert encoded.codec == "float32"
    np.testing.assert_array_equal(decoded(coder, encoded), pending)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_named_by_its_leaf_and_nothing_is_kept(codec, bad):
    coder = coder_of(codec, 1)
    pending = pending_of(coder, 0)
    pending[-3:-1] = bad
    with pytest.raises(
        NonFiniteDelta, match=r"the delta of layer/b holds 2 values that are not finite \(of 10\)"
    ) as caught:
        coder.encode(offer_of(coder, 0, 0, pending))
    assert caught.value.leaf == "layer/b" and coder.unacked == {}


def test_an_aggregate_comes_with_this_nodes_part_of_it():
    coder = coder_of()
    us = [decoded(coder, coder.encode(offer_of(coder, s, 0, pending_of(coder, 0, s)))) for s in range(2)]
    other = decoded(coder, coder.encode(offer_of(coder, 2, 1, pending_of(coder, 1))))
    message, frames = aggregate_of(coder, 1, (0, 1))
    update = coder.decode_aggregate(message, (0, 1, 2), frames)
    assert (update.version, update.landed, update.anchor, update.reset) == (1, (0, 1, 2), None, False)
    for f in (0, 1):
        np.testing.assert_array_equal(flat(update.aggregate[f]), pending_of(coder, f, 50 + f))
        assert [len(part) for part in update.aggregate[f]] == list(coder.layout.counts(f))
    np.testing.assert_allclose(flat(update.own[0]), us[0] + us[1], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(flat(update.own[1]), other)
    assert sorted(coder.unacked) == [0, 1, 2], "until the training thread has applied it"


def test_an_aggregate_that_cannot_be_read_is_a_codec_error():
    coder = coder_of()
    message, frames = aggregate_of(coder, 1, (0,))
    frames[0][-1] ^= 1
    with pytest.raises(CodecError):
        coder.decode_aggregate(message, (), frames)
    with pytest.raises(CodecError):
        coder.decode_aggregate(message, (), [])


def test_an_aggregate_of_another_codec_or_of_fragments_that_there_are_not_is_refused():
    coder = coder_of()
    message, frames = aggregate_of(coder, 1, (0,))
    for lie in (
        replace_fields(message, codec="int8:block=17"),
        replace_fields(message, fragments=(2,)),
        replace_fields(message, fragments=(-1,)),
        replace_fields(message, fragments=(0, 0), frames=(1, 0)),
    ):
        with pytest.raises(CodecError, match="an aggregate"):
            coder.decode_aggregate(lie, (), frames)


def values_of(update):
    return [part.values for part in update.anchor]


def test_a_snapshot_is_the_whole_anchor():
    coder = coder_of()
    coder.encode(offer_of(coder, 0, 0, pending_of(coder, 0)))
    message, frames, flats = snapshot_of(coder)
    update = coder.decode_snapshot(message, (0,), frames, False)
    assert [(part.leaf, part.start, part.values.shape) for part in update.anchor] == [(0, 0, (3, 4096)), (1, 0, (10,))]
    for got, want in zip(coder.layout.split(values_of(update)), flats, strict=True):
        np.testing.assert_array_equal(got, want)
    assert set(update.own) == {0} and update.landed == (0,) and not update.reset


def test_a_reset_forgets_what_is_on_its_way():
    coder = coder_of()
    coder.encode(offer_of(coder, 0, 0, pending_of(coder, 0)))
    message, frames, _ = snapshot_of(coder)
    update = coder.decode_snapshot(message, (), frames, True)
    assert update.reset and update.own == {} and coder.unacked == {}
    later, frames = aggregate_of(coder, 4, (0,))
    assert coder.decode_aggregate(later, (0,), frames).own == {}


def test_a_snapshot_is_laid_fragment_by_fragment():
    coder = coder_of(fragments=2)
    _, frames, flats = snapshot_of(coder)
    assert snapshot_counts(coder.layout) == [n for f in range(2) for n in coder.layout.counts(f)]
    for got, want in zip(decode_snapshot(coder.layout, frames), flats, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.fixture
def two_decoded(monkeypatch):
    """Two updates wait decoded at most, as of a model that is not small."""
    monkeypatch.setattr("zmqtrain.node.codec.MOST_DECODED", 2)


def test_small_updates_wait_decoded_for_more_than_one_exchange_but_not_for_ever(monkeypatch):
    monkeypatch.setattr("zmqtrain.node.codec.MOST_DECODED", 4)
    coder, inbox = coder_of("float32"), Inbox()
    for version in range(1, 8):
        message, frames = aggregate_of(coder, version, (0,))
        inbox.arrive(coder, Deliver(message, ()), frames)
    assert len(inbox) == 4
    monkeypatch.setattr("zmqtrain.node.codec.DECODED_BYTES", 1)  # what several may hold
    told = []
    while (update := inbox.take()) is not None:
        told.append((update.version, len(inbox)))
        inbox.decode(coder)
    assert told == [(1, 3), (2, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 0)]


def test_what_was_to_be_dropped_with_a_snapshot_is_dropped_with_the_one_that_takes_its_place(two_decoded):
    coder, inbox = coder_of("float32"), Inbox()
    for version in (1, 2):
        message, frames = aggregate_of(coder, version, (0,))
        inbox.arrive(coder, Deliver(message, ()), frames)
    for version, reset in ((3, True), (4, False)):
        message, frames, _ = snapshot_of(coder, version)
        inbox.arrive(coder, Deliver(message, (), reset), frames)
    told = []
    while (update := inbox.take()) is not None:
        told.append((update.version, update.reset))
        inbox.decode(coder)
    assert told == [(1, False), (2, False), (4, True)]


@pytest.mark.parametrize(("largest", "decoded"), [(1 << 26, 2), (100, 1)])
def test_of_large_updates_one_at_a_time_waits_decoded(monkeypatch, two_decoded, largest, decoded):
    monkeypatch.setattr("zmqtrain.node.codec.LARGE_UPDATE_BYTES", largest)
    coder, inbox = coder_of("float32"), Inbox()
    for version in (1, 2, 3):
        message, frames = aggregate_of(coder, version, (0,))
        inbox.arrive(coder, Deliver(message, ()), frames)
    assert len(inbox) == decoded
    told = []
    while (update := inbox.take()) is not None:
        told.append(update.version)
        inbox.decode(coder)
    assert told == [1, 2, 3]


def test_a_snapshot_that_waits_is_as_large_as_its_anchor(monkeypatch):
    monkeypatch.setattr("zmqtrain.node.codec.LARGE_UPDATE_BYTES", 100)
    coder, inbox = coder_of("float32"), Inbox()
    message, frames, _ = snapshot_of(coder, 3)
    inbox.arrive(coder, Deliver(message, ()), frames)
    message, frames = aggregate_of(coder, 4, (0,))
    inbox.arrive(coder, Deliver(message, ()), frames)
    assert len(inbox) == 1


def spoiled(frames):
    """These frames, of which a bit came otherwise than it was sent."""
    last = bytearray(frames[-1])
    last[-1] ^= 1
    return [*frames[:-1], bytes(last)]


def test_an_aggregate_that_came_spoiled_is_dropped_with_those_behind_it_until_a_snapshot_is_here():
    lost = []
    coder, inbox = coder_of("float32"), Inbox()
    for version in (1, 2, 3, 4):
        message, frames = aggregate_of(coder, version, (0,))
        lost.append(inbox.arrive(coder, Deliver(message, (version,)), spoiled(frames) if version == 2 else frames))
    assert [error is None for error in lost] == [True, False, True, True] and "checksum" in str(lost[1])
    message, frames, _ = snapshot_of(coder, 4)
    inbox.arrive(coder, Deliver(message, ()), frames)
    message, frames = aggregate_of(coder, 5, (0,))
    inbox.arrive(coder, Deliver(message, ()), frames)
    told = []
    while (update := inbox.take()) is not None:
        told.append((update.version, update.landed))
        inbox.decode(coder)
    assert told == [(1, (1,)), (4, (2, 3, 4)), (5, ())]


def test_what_is_behind_an_aggregate_that_is_found_spoiled_late_is_dropped_with_it(two_decoded):
    lost = []
    coder, inbox = coder_of("float32"), Inbox()
    for version in range(1, 6):
        message, frames = aggregate_of(coder, version, (0,))
        lost.append(inbox.arrive(coder, Deliver(message, ()), spoiled(frames) if version == 3 else frames))
    lost.append(inbox.restart(coder, 1))
    assert not any(lost)  # there is no room to decode it
    told = []
    while (update := inbox.take()) is not None:
        told.append((update.version, update.reset))
        lost.append(inbox.decode(coder))
    assert told == [(1, False), (2, False), (2, True)] and sum(map(bool, lost)) == 1


def test_of_aggregates_that_all_come_spoiled_the_second_ends_the_node():
    coder, inbox = coder_of("float32"), Inbox()
    for version in (1, 3):
        message, frames = aggregate_of(coder, version, (0,))
        if version == 1:
            inbox.arrive(coder, Deliver(message, ()), spoiled(frames))
            snapshot, parameters, _ = snapshot_of(coder, 2)
            inbox.arrive(coder, Deliver(snapshot, ()), parameters)
    with pytest.raises(CodecError, match="2 aggregates in a row are not what the broker sent"):
        inbox.arrive(coder, Deliver(message, ()), spoiled(frames))


def test_who_is_too_far_behind_takes_one_snapshot_and_what_landed_is_told_with_that():
    coder, inbox = coder_of("float32"), Inbox()
    for sequence in range(2):
        coder.encode(offer_of(coder, sequence, 0, pending_of(coder, 0, sequence)))
    for version in (1, 2, 3, 4):
        message, frames = aggregate_of(coder, version, (0,))
        inbox.arrive(coder, Deliver(message, (0,) if version == 4 else ()), frames)
    dropped, _ = aggregate_of(coder, 5, (0,))
    inbox.skip(Deliver(dropped, (1,)))
    told = []
    for _ in range(3):  # 1 and 2 are decoded, then 3: sequence 1 is not in any of them
        update = inbox.take()
        told.append((update.version, update.landed))
        inbox.decode(coder)
        if update.version == 2:
            message, frames, _ = snapshot_of(coder, 5)
            inbox.arrive(coder, Deliver(message, ()), frames)
    told += [(update.version, update.landed) for update in iter(inbox.take, None)]
    assert told[:3] == [(1, ()), (2, ()), (3, ())]
    assert told[-1][0] == 5 and sorted(s for _, landed in told for s in landed) == [0, 1]


def on_device(parts):
    return all(isinstance(part, jax.Array) for part in parts)


def same(ours, theirs):
    return [np.asarray(part).tobytes() for part in ours] == [np.asarray(part).tobytes() for part in theirs]


@pytest.mark.parametrize("codec", ["int8:block=256", MIXED, *nightly("float32", "bf16", "ternary:block=128")])
def test_a_device_sends_and_reads_the_same_bits_as_the_host(codec):
    here = DeltaCoder(MODEL, fixed_run(codec=codec, broadcast_codec=codec, fragments=2))
    there = DeltaCoder(MODEL, fixed_run(codec=codec, broadcast_codec=codec, fragments=2), DeviceCoder())
    there.warm_up(0)
    for sequence in range(4):  # the third drains, and the fourth is coded less what that has sent
        pending = pending_of(here, 1, sequence)
        ours = here.encode(offer_of(here, sequence, 1, pending, dense=sequence == 2))
        offer = offer_of(there, sequence, 1, pending, dense=sequence == 2)
        segments = [jax.numpy.asarray(segment) for segment in offer.segments]
        theirs = there.encode(Offer(sequence, 1, segments, 8, 8, None, (), offer.dense))
        assert ours.codec == theirs.codec
        assert tuple(map(bytes, ours.frames)) == tuple(map(bytes, theirs.frames))
    for landed in ((0, 1), (2,), (0, 2)):
        message, frames = aggregate_of(here, 1, (0, 1), codec)
        mine, its = (coder.decode_aggregate(message, landed, frames) for coder in (here, there))
        assert all(same(mine.aggregate[f], its.aggregate[f]) for f in (0, 1))
        assert mine.own.keys() == its.own.keys() == {1} and same(mine.own[1], its.own[1])
        assert on_device(its.own[1]) == (2 not in landed and codec != "float32")
        assert on_device(its.aggregate[0]) == (codec != "float32")
    message, frames, _ = snapshot_of(here)
    mine, its = (coder.decode_snapshot(message, (0, 1), frames, False) for coder in (here, there))
    assert same(values_of(mine), values_of(its)) and same(mine.own[1], its.own[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_on_a_device_is_named_by_its_leaf_too(bad):
    coder = DeltaCoder(MODEL, fixed_run(), DeviceCoder())
    pending = pending_of(coder, 0)
    pending[-3:-1] = bad
    with pytest.raises(NonFiniteDelta, match=r"the delta of layer/b holds 2 values that are not finite \(of 10\)"):
        coder.encode(offer_of(coder, 0, 0, pending))
    assert coder.unacked == {}


# ---------------------------------------------------------------------- codecs that are fitted


def test_what_was_sent_by_the_former_codec_is_subtracted_before_the_next_one_codes_and_what_it_left_out_is_coded():
    coder = DeltaCoder(MODEL, RunSettings(fragments=2))
    pending = pending_of(coder, 0)
    first = coder.encode(offer_of(coder, 0, 0, pending))
    coder.adopt("topk:density=0.05+sign:block=512", "int8:block=256")
    second = coder.encode(offer_of(coder, 1, 0, pending))
    coder.adopt("float32", "float32")
    third = coder.encode(offer_of(coder, 2, 0, pending))
    assert [u.codec for u in (first, second, third)] == [
        "ternary:block=128", "topk:density=0.05+sign:block=512", "float32"
    ]  # fmt: skip
    sent = sum(decoded(coder, u).astype(np.float64) for u in (first, second, third))
    np.testing.assert_allclose(sent, pending, atol=1e-5)


def test_a_checkpoint_of_a_node_holds_its_codecs_of_then_and_what_is_in_flight_of_the_former_ones():
    coder = DeltaCoder(MODEL, RunSettings(fragments=2))
    coder.encode(offer_of(coder, 0, 0, pending_of(coder, 0)))
    coder.adopt("int8:block=256", "float32")
    coder.encode(offer_of(coder, 1, 1, pending_of(coder, 1)))
    facts, arrays = coder.kept([0, 1])
    again = DeltaCoder(MODEL, RunSettings(fragments=2))
    again.restore(facts, arrays)
    assert (again.coding.name, again.broadcast_coding.name) == ("int8:block=256", "float32")
    assert {sequence: u.codec for sequence, u in again.unacked.items()} == {0: "ternary:block=128", 1: "int8:block=256"}
    given = DeltaCoder(MODEL, fixed_run(codec="bf16", fragments=2))
    given.restore(facts, arrays)
    assert given.coding.name == "bf16", "what is told stays"
