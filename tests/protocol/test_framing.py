"""Every message survives the wire, and nothing else does."""

import contextlib
import sys

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.said import EXAMPLES
from zmqtrain.core.errors import FramingError
from zmqtrain.core.types import MAX_FRAME_BYTES
from zmqtrain.protocol import framing
from zmqtrain.protocol.framing import (
    PROTOCOL_VERSION,
    Assembler,
    ProtocolVersionError,
    decode_message,
    encode_message,
    encode_refusal,
    open_head,
    read_fields,
    split,
)
from zmqtrain.protocol.messages import (
    MESSAGES,
    Chunk,
    Fetch,
    Refused,
    Roster,
    Snapshot,
)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_of_the_wire_as_it_went_in(message):
    assert decode_message(encode_message(message)) == message


def test_there_is_an_example_of_every_message():
    assert {type(message) for message in EXAMPLES} == set(MESSAGES)


@given(st.binary(max_size=300))
def test_random_bytes_are_a_framing_error_and_nothing_worse(data):
    with pytest.raises(FramingError):
        decode_message(data)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_mutated_head_is_a_message_or_a_framing_error(message, data):
    head = bytearray(encode_message(message))
    for _ in range(data.draw(st.integers(1, 4))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FramingError):
        decode_message(head)


def test_a_field_of_another_type_is_refused_and_named():
    head = msgpack.packb([PROTOCOL_VERSION, 0, 0, "Chunk", {"transfer": 1, "index": True}])
    with pytest.raises(FramingError, match=r"Chunk: .*`int`.*`bool`.*index"):
        decode_message(head)


def test_another_protocol_version_is_told_apart_from_garbage():
    head = msgpack.packb([PROTOCOL_VERSION + 1, "Hello", {}])
    with pytest.raises(ProtocolVersionError) as caught:
        decode_message(head)
    assert (caught.value.theirs, caught.value.is_older) == (PROTOCOL_VERSION + 1, False)


@pytest.mark.parametrize("theirs", ["6", True, -1, 1 << 40, None, 5.0, b"\x05"])
def test_a_version_that_is_no_number_of_a_version_is_neither_older_nor_newer(theirs):
    with pytest.raises(ProtocolVersionError) as caught:
        decode_message(msgpack.packb([theirs, 0, 0, "Hello", {}]))
    assert (caught.value.is_number, caught.value.is_older, caught.value.theirs) == (False, False, -1)


@pytest.mark.parametrize(
    ("theirs", "sent"), [(4, PROTOCOL_VERSION), (5, 5), (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1)]
)
def test_a_refusal_has_the_version_of_its_reader_if_that_reads_it(theirs, sent):
    refused = Refused("older", "upgrade")
    version, incarnation, number, name, fields = msgpack.unpackb(encode_refusal(refused, theirs))
    assert (version, incarnation, number, name) == (sent, 0, 0, "Refused")
    assert fields == {"reason": "older", "text": "upgrade", "sequence": -1}, "older versions read these fields"


def test_a_transfer_is_put_together_in_whatever_order_its_chunks_come():
    frames = [b"a" * 10, b"b" * 20, b"c" * 30]
    assembler = Assembler(limit_bytes=100)
    announcement = Snapshot(7, 1, (10, 20, 30))
    assembler.expect(announcement)
    chunks = [(decode_message(head), frame) for head, frame in split(7, frames)]
    assert assembler.add(*chunks[2]) is None
    assert assembler.add(*chunks[0]) is None
    assert assembler.add(*chunks[1]) == (announcement, frames)
    assert assembler.expected_bytes == 0 and 7 not in assembler


def test_a_transfer_that_lies_about_its_size_is_refused_before_anything_is_kept():
    assembler = Assembler(limit_bytes=100)
    for sizes in [(0,), (-1,), (MAX_FRAME_BYTES + 1,), (60, 60)]:
        with pytest.raises(FramingError):
            assembler.expect(Snapshot(1, 1, sizes))
    assert assembler.expected_bytes == 0
    assembler.expect(Snapshot(1, 1, (10, 10)))
    with pytest.raises(FramingError, match="twice"):
        assembler.expect(Snapshot(1, 1, (10,)))
    for chunk, frame in [(Chunk(1, 0), b"too short"), (Chunk(1, 2), b"x" * 10), (Chunk(1, -1), b"x" * 10)]:
        with pytest.raises(FramingError):
            assembler.add(chunk, frame)
    assembler.add(Chunk(1, 0), b"x" * 10)
    with pytest.raises(FramingError, match="repeated"):
        assembler.add(Chunk(1, 0), b"x" * 10)


def test_a_refused_announcement_takes_nothing_of_the_limit():
    assembler = Assembler(limit_bytes=100)
    for _ in range(10):
        with pytest.raises(FramingError, match="of other sizes"):
            assembler.expect(Snapshot(1, 1, (60,)), held=[b"not of that size"])
    assert assembler.expected_bytes == 0
    assembler.expect(Snapshot(1, 1, (60,)))


def test_the_kind_of_a_head_is_read_before_its_fields_and_whatever_these_are():
    broken = msgpack.packb([PROTOCOL_VERSION, 7, 8, "Roster", {}])[:-1] + b"\xc1"  # a byte that msgpack never uses
    head = open_head(broken)
    assert (head.stamp, head.kind) == ((7, 8), Roster)
    with pytest.raises(FramingError):
        read_fields(head)


def test_a_head_of_many_small_values_is_checked_by_columns_and_not_by_calls():
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    leaves = (("w", (3, 4), "float32"),) * 5000
    head = open_head(encode_message(Fetch(1, leaves)))
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        read = read_fields(head)
    finally:
        sys.setprofile(before)
    assert calls < 100 and read.model == leaves


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("model", [["w", [3, "4"], "float32"]], r"`int`.*`str`.*\[0\]\[1\]\[1\]"),
        ("model", [["w", [3, 4]]], "length 3, got 2"),
        ("model", [["w", [3, 4], "float32"], 7], "`array`.*`int`"),
        ("model", [["w", 3, "float32"]], "`array`.*`int`"),
        ("score", "high", "`float`.*`str`"),
    ],
)
def test_one_wrong_value_among_many_is_found_and_named(field, value, text):
    fields = msgpack.unpackb(encode_message(Fetch(1)))[4] | {field: value}
    with pytest.raises(FramingError, match=rf"Fetch: .*{text}.*{field}|Fetch: .*{text}"):
        decode_message(msgpack.packb([PROTOCOL_VERSION, 0, 0, "Fetch", fields]))


def test_a_map_of_a_roster_holds_texts_and_scalars_and_an_int_is_a_float_where_one_is_due():
    fields = msgpack.unpackb(encode_message(EXAMPLES[[type(one) for one in EXAMPLES].index(Roster)]))[4]
    sent = fields | {"members": [{"name": "a", "step": 1}], "scores": {"loss": 2}, "seconds": 3}
    read = decode_message(msgpack.packb([PROTOCOL_VERSION, 0, 0, "Roster", sent]))
    assert read.members == ({"name": "a", "step": 1},) and type(read.members[0]["step"]) is int
    assert type(read.scores["loss"]) is float and type(read.seconds) is float
    for wrong in ({"members": [{"name": []}]}, {"scores": {"loss": "low"}}, {"members": [[]]}):
        with pytest.raises(FramingError):
            decode_message(msgpack.packb([PROTOCOL_VERSION, 0, 0, "Roster", sent | wrong]))


def test_a_chunk_of_a_transfer_that_was_given_up_is_no_error():
    assembler = Assembler(limit_bytes=100)
    assembler.expect(Snapshot(1, 1, (10,)))
    assembler.forget(1)
    assert assembler.add(Chunk(1, 0), b"x" * 10) is None


HEAD_PARTS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=8)
)


def read_or_refuse(frame):
    """The head that a frame is, as text (NaN is no NaN), or why it is refused."""
    try:
        return repr(framing.decode_head(frame))
    except FramingError as error:
        return type(error), str(error)


@given(
    message=st.sampled_from([message for message in EXAMPLES if len(encode_message(message)) < framing.SHORT_BYTES]),
    place=st.integers(0, 5),
    part=HEAD_PARTS,
    more=st.binary(max_size=3),
    flips=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=3),
)
def test_a_short_head_is_read_and_refused_as_a_long_one_is(message, place, part, more, flips):
    whole = msgpack.unpackb(encode_message(message), strict_map_key=False)
    if place < len(whole):
        whole[place] = part
    frame = bytearray(msgpack.packb(whole) + more)
    for where, what in flips:
        frame[where % len(frame)] = what
    short = read_or_refuse(bytes(frame))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "SHORT_BYTES", -1)
        assert read_or_refuse(bytes(frame)) == short
