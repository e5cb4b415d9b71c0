"""Every message survives the wire, and nothing else does."""

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import FramingError
from zmqtrain.protocol.framing import (
    PROTOCOL_VERSION,
    Assembler,
    ProtocolVersionError,
    decode_message,
    encode_message,
    split,
)
from zmqtrain.protocol.group_messages import Fold, Folded, Forming, Group, GroupLost, JoinGroup, Leave, Relay, Relayed
from zmqtrain.protocol.keys import (
    Awaited,
    Declare,
    Done,
    Enrol,
    Enrolled,
    Founded,
    Initialise,
    Placed,
    Pull,
    Push,
    Values,
)
from zmqtrain.protocol.messages import (
    MESSAGES,
    Aggregate,
    Chunk,
    Credit,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Preempt,
    Probe,
    Probed,
    Publish,
    Quarantine,
    Refused,
    Report,
    Roster,
    Schedule,
    Snapshot,
    Welcome,
    WorkRequest,
    WorkUnit,
)
from zmqtrain.protocol.standby_messages import Books, Holding, Promote, Replica
from zmqtrain.settings import RunSettings
from zmqtrain.types import MAX_FRAME_BYTES

EXAMPLES = [
    Hello("pc-1"),
    Hello("pc-1", link=1.2e8, share=0.8),
    Welcome("run-1", 3, {}, schedules=((-1, 8, 4), (7, 12, 5))),
    Welcome(
        "run-1", 3, RunSettings().to_dict(), (("w", (2, 3), "float32"), ("scalar", (), "float32")), ((1, 2),), (4,)
    ),
    Refused("model", "no"),
    Heartbeat(1.5),
    Goodbye(),
    Report(1, 2, 3.0, 4.0, 5.0, 6, 7, 8, "nothing", {"loss": 1.0}, 9),
    Report(1, 2, 3.0, float("inf"), 5.0, 6, 7, 8),
    Roster(1, ({"name": "pc-1", "step": 3, "loss": 0.5, "idle": False},), "pc-1#1", 1, 2, 3, 4, 5.0, {}, -1),
    Roster(1, (), "", 1, 2, 3, 4, 5.0, {}, -1, 12, 5, served={"keys": 3}, exchange="allreduce:algorithm=ring"),
    Schedule(12, 5, 40),
    Fetch(3, (("w", (2, 3), "float32"),), 0.5),
    Snapshot(1, 2, (3, 4), ((1, 2),), 1, True),
    Publish(1, 2, 3, 0, "ternary:block=128", (100,), 10, 5, 0.25),
    Aggregate(1, 2, "bf16", (0, 3), (1, 1), (10, 10), (("pc-1#1", 4),), 3),
    Chunk(1, 0),
    Credit(1, 2),
    Preempt("behind"),
    Quarantine("norm", "its norm is 1e6 times that of others", 10.0),
    WorkRequest((1, 2), 2, True),
    WorkUnit((3,), False),
    JoinGroup("default", 4, 2, "a program", "tcp://10.0.0.1:1", "k" * 40, "0a"),
    Forming("default", ("pc-1", "pc-2"), 2),
    Group("default", 3, 1, (("pc-1", "tcp://10.0.0.1:1", "", "0a"), ("pc-2", "tcp://10.0.0.2:1", "", "0b"))),
    GroupLost(1, "silent for 2.1 s", True),
    Leave(12),
    Relay(1, 100),
    Relayed(1, 2),
    Fold(7, "sum", "float32", 100),
    Folded(7, 100),
    Probe(3, 1 << 18, 0),
    Probed(3, 1.7e9, "zmqtrain 0.1.0"),
    Enrol("s-1", 1, 2, "bsp", "sgd:rate=0.1", 4, False),
    Enrolled("s-1", "bsp", "sgd:rate=0.1", 4),
    Declare(1, (("w", (2, 3), "float32"),)),
    Placed(1, (("w", (2, 3), "float32", ((0, 0, 3), (1, 3, 3))),), ()),
    Founded(("w",)),
    Initialise(2, "w", "float32", 3, 3, (12,)),
    Push(3, "w", "float32", True, (12,)),
    Pull(4, "w"),
    Values(1, 4, 7, (12,)),
    Done(2),
    Awaited(("worker-1",), 2),
    Replica(1, 5, (10, 20), 1),
    Books("{}"),
    Holding(5),
    Promote(),
]


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
    with pytest.raises(FramingError, match=r"Chunk\.index: expected int, got bool"):
        decode_message(head)


def test_another_protocol_version_is_told_apart_from_garbage():
    head = msgpack.packb([PROTOCOL_VERSION + 1, "Hello", {}])
    with pytest.raises(ProtocolVersionError, match="install the same zmqtrain"):
        decode_message(head)


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


def test_a_chunk_of_a_transfer_that_was_given_up_is_no_error():
    assembler = Assembler(limit_bytes=100)
    assembler.expect(Snapshot(1, 1, (10,)))
    assembler.forget(1)
    assert assembler.add(Chunk(1, 0), b"x" * 10) is None
