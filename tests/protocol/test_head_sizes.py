"""A hub reads no head that no sound peer sends: it looks at the kind and the size first."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import hub_of, in_state, join, live_hub
from tests.protocol.said import EXAMPLES
from zmqtrain.averaging.coder import snapshot_codecs, snapshot_counts
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import plan_payload
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import SendTo
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import MAX_HEAD_BYTES, encode_message
from zmqtrain.protocol.limits import LONG_HEAD_BYTES, SMALL_HEAD_BYTES, TAKEN_BY_HUBS, HeadSizes
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import (
    MESSAGES,
    Chunk,
    Fetch,
    Heartbeat,
    Hello,
    Publish,
    Refused,
    Report,
    Roster,
    Snapshot,
    WorkRequest,
    model_to_wire,
)

STAMP = Stamp(3, 7)
ONLY_HUBS_SAY = [kind for kind in MESSAGES if kind not in TAKEN_BY_HUBS]


@pytest.mark.parametrize("kind", ONLY_HUBS_SAY, ids=lambda kind: kind.__name__)
def test_a_kind_that_no_hub_takes_is_refused_by_its_name_from_whomever(kind):
    for hub, sender in ((live_hub("a"), "stranger"), (live_hub("a"), "a"), (in_state(MemberState.PROCESS), "x")):
        with pytest.raises(RemoteProtocolError, match=f"{kind.__name__}, which no hub takes, from"):
            hub.screen(sender, STAMP, kind, 100)


@pytest.mark.parametrize("kind", sorted(TAKEN_BY_HUBS - {Hello}, key=lambda kind: kind.__name__))
def test_of_an_unknown_peer_nothing_but_a_hello_is_read(kind):
    hub = live_hub("a")
    answer = hub.screen("stranger", STAMP, kind, MAX_HEAD_BYTES)
    assert answer in ([], [SendTo("stranger", answer and answer[0].message, Stamp(3))])
    assert not answer or (isinstance(answer[0].message, Refused) and answer[0].message.reason == "unknown")
    assert hub.screen("stranger", STAMP, Hello, LONG_HEAD_BYTES) is None
    with pytest.raises(RemoteProtocolError, match="Hello of 16385 bytes, of which 16384 are read"):
        hub.screen("stranger", STAMP, Hello, LONG_HEAD_BYTES + 1)


def test_what_sound_peers_say_is_read():
    hub = live_hub("a")
    for message in EXAMPLES:
        if type(message) in TAKEN_BY_HUBS:
            assert hub.screen("a", STAMP, type(message), len(encode_message(message))) is None
    largest = [
        Hello("x" * 64, exchange="x" * 200, in_flight=(1 << 60,) * 64, checkpoints=(1 << 60,) * 1024),
        Report(*[1 << 60] * 2, *[1.0] * 3, *[1 << 60] * 3, "x" * 200, {f"{n:064}": 1.0 for n in range(32)}, 1 << 60),
        WorkRequest((1 << 60,) * 256, 2, True, (1 << 60,) * 256, 1 << 60),
    ]
    for message in largest:
        assert hub.screen("a", STAMP, type(message), len(encode_message(message))) is None
    for kind in (Heartbeat, Chunk):
        with pytest.raises(RemoteProtocolError, match=f"of which {SMALL_HEAD_BYTES} are read"):
            hub.screen("a", STAMP, kind, SMALL_HEAD_BYTES + 1)


def test_a_description_of_the_model_is_as_large_as_any_head_until_the_run_has_one():
    hub = hub_of()
    join(hub, "a")
    assert hub.screen("a", STAMP, Fetch, MAX_HEAD_BYTES) is None
    with pytest.raises(RemoteProtocolError):
        live_hub("a").screen("a", STAMP, Fetch, MAX_HEAD_BYTES)


@pytest.mark.parametrize("leaves", [1, 300, 10_000])
@pytest.mark.parametrize("codec", ["float32", "ternary:block=128"])
def test_what_describes_a_model_or_its_frames_fits_however_large_it_is(leaves, codec):
    model = tuple(LeafSpec(f"layers/{n}/attention/w", (1024, 200_000 // leaves), "float32") for n in range(leaves))
    sizes, layout = HeadSizes(), Layout(model, 1)
    fetch = len(encode_message(Fetch(1, model_to_wire(model))))
    assert fetch <= sizes.most_bytes(Fetch, model, founded=True) <= MAX_HEAD_BYTES
    frames = tuple(4 << 20 for _ in plan_payload(tuple(snapshot_codecs(layout)), tuple(snapshot_counts(layout))).frames)
    publish = len(encode_message(Publish(1, 1, 1, 0, codec, frames, 1, 1, 0.0)))
    assert publish <= sizes.most_bytes(Publish, model, founded=True) < publish + 2 * LONG_HEAD_BYTES + 300_000
    snapshot = len(encode_message(Snapshot(1, 1, 5 * frames, ((1 << 60, 1 << 60),) * 64)))
    assert snapshot <= sizes.most_bytes(Snapshot, model, founded=False)


def test_the_sizes_of_a_model_are_those_of_the_model_of_now():
    sizes = HeadSizes()
    small, large = ((LeafSpec("w", (n,), "float32"),) for n in (10, 1 << 30))
    first = sizes.most_bytes(Publish, small, founded=True)
    assert sizes.most_bytes(Publish, large, founded=True) > first == sizes.most_bytes(Publish, small, founded=True)
    assert sizes.most_bytes(Roster, large, founded=True) == SMALL_HEAD_BYTES
