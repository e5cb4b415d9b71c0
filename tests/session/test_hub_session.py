"""A hub session: the order of its effects, a node without a hub, and what is kept of a snapshot received in part."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from tests.fixed import fixed_run
from zmqtrain.averaging.snapshot import digest_of
from zmqtrain.core.errors import FramingError
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.effects import Send, Withdraw
from zmqtrain.protocol.messages import Chunk, Heartbeat, Message, Snapshot, Welcome
from zmqtrain.protocol.peer import Peer
from zmqtrain.session.hub_session import (
    ABSENCE_SECONDS,
    SHORTEST_TICK_SECONDS,
    HubSession,
    NullListener,
    SnapshotResume,
)

FRAMES = [b"one", b"two", b"three"]
DIGEST = digest_of(FRAMES)


def snapshot(transfer=1, first=0, digest=DIGEST):
    return Snapshot(transfer, 5, (3, 3, 5), digest=digest, first=first)


def test_it_goes_on_where_it_was_and_is_sound_as_a_whole():
    resume = SnapshotResume()
    assert resume.held == ("", 0) and not resume.begin(snapshot())
    resume.add(Chunk(1, 0), b"one")
    assert resume.held == (DIGEST, 1)
    assert resume.begin(snapshot(2, first=1)) == [b"one"]
    resume.add(Chunk(2, 1), b"two")
    resume.add(Chunk(2, 2), b"three")
    assert resume.is_sound(2) and resume.held == ("", 0)


def test_another_snapshot_begins_anew():
    resume = SnapshotResume()
    resume.begin(snapshot())
    resume.add(Chunk(1, 0), b"one")
    assert not resume.begin(snapshot(2))
    for index, frame in enumerate(FRAMES):
        resume.add(Chunk(2, index), frame)
    assert resume.is_sound(2)


def test_spoiled_bytes_are_counted_until_sound_ones_come():
    resume = SnapshotResume()
    for transfer, frames in ((1, [b"one", b"too", b"three"]), (2, FRAMES)):
        resume.begin(snapshot(transfer))
        for index, frame in enumerate(frames):
            resume.add(Chunk(transfer, index), frame)
        assert resume.is_sound(transfer) == (transfer == 2)
        assert resume.spoiled == (transfer == 1)


@pytest.mark.parametrize(("first", "digest"), [(2, DIGEST), (1, "other")])
def test_a_snapshot_that_begins_where_nothing_is_held_is_none(first, digest):
    resume = SnapshotResume()
    resume.begin(snapshot())
    resume.add(Chunk(1, 0), b"one")
    with pytest.raises(FramingError, match="1 of it are here"):
        resume.begin(snapshot(2, first, digest))


def test_a_frame_that_comes_behind_one_that_was_lost_is_seen_at_once():
    resume = SnapshotResume()
    resume.begin(snapshot())
    with pytest.raises(FramingError, match="frame 1 of a snapshot comes where 0 is due"):
        resume.add(Chunk(1, 1), b"two")


def test_a_snapshot_without_a_digest_is_not_kept():
    resume = SnapshotResume()
    resume.begin(snapshot(digest=""))
    resume.add(Chunk(1, 0), b"one")
    assert resume.held == ("", 0) and resume.is_sound(1)


def test_how_frames_are_divided_is_part_of_the_digest():
    assert digest_of([b"on", b"etwo", b"three"]) != DIGEST


class Answering(NullListener):
    """A listener that has something said for each offer that is withdrawn."""

    def __init__(self) -> None:
        super().__init__()
        self.link: HubSession | None = None

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """See NullListener."""
        assert self.link is not None
        self.link.carry_out([Send(Heartbeat(float(10 + sequence)))])


def test_what_an_effect_brings_about_comes_after_all_that_was_wished_before() -> None:
    listener, said = Answering(), list[Message]()
    link = listener.link = HubSession(None, Peer(PeerId("a#1"), "a"), "tcp://hub:1", listener)  # type: ignore[arg-type, return-value]
    link.send = said.append  # type: ignore[method-assign]
    effects: Sequence[Send | Withdraw] = [
        Withdraw(1, "", ""),
        Send(Heartbeat(1.0)),
        Withdraw(2, "", ""),
        Send(Heartbeat(2.0)),
    ]
    link.carry_out(effects)
    assert [one.sent for one in said if isinstance(one, Heartbeat)] == [1.0, 2.0, 11.0, 12.0]


def test_a_node_that_goes_on_from_a_checkpoint_without_a_hub_says_so_once_a_minute_until_one_welcomes_it(caplog):
    peer = Peer(PeerId("a#1"), "a")
    session = HubSession(None, peer, "tcp://hub:1", NullListener())

    def said(*seconds):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for one in seconds:
                session._say_absence(one)
        return [record.args[1] for record in caplog.records]

    assert said(0.0, 2 * ABSENCE_SECONDS) == [], "it is of no run yet"
    peer.resume("run-1", 3, fixed_run(), (), ())
    peer.start(200.0)
    assert said(*(200.0 + seconds for seconds in range(0, 181, 20))) == [60.0, 120.0, 180.0]
    peer.receive(Welcome("run-1", 3, fixed_run().to_dict()), 381.0)
    assert said(382.0, 500.0) == []


@pytest.mark.parametrize(("heartbeat_seconds", "seconds"), [(0.01, 0.05), (0.5, 0.125), (10.0, 0.25)])
def test_a_welcomed_session_wakes_a_few_times_a_heartbeat_and_within_bounds(heartbeat_seconds, seconds):
    session = HubSession(None, Peer(PeerId("a#1"), "a"), "tcp://hub:1", NullListener())
    assert session._tick_seconds == SHORTEST_TICK_SECONDS, "its hub may answer at any time"
    session.peer.settings = fixed_run(heartbeat_seconds=heartbeat_seconds, lost_seconds=60.0)
    assert session._tick_seconds == seconds
