"""What is kept of a snapshot that has come in part, and what is not taken."""

from __future__ import annotations

import pytest

from zmqtrain.averaging.digest import digest_of
from zmqtrain.core.errors import FramingError
from zmqtrain.protocol.messages import Chunk, Snapshot
from zmqtrain.session.resuming import Resuming

FRAMES = [b"one", b"two", b"three"]
DIGEST = digest_of(FRAMES)


def snapshot(transfer=1, first=0, digest=DIGEST):
    return Snapshot(transfer, 5, (3, 3, 5), digest=digest, first=first)


def test_it_goes_on_where_it_was_and_is_sound_as_a_whole():
    resuming = Resuming()
    assert resuming.held == ("", 0) and not resuming.begin(snapshot())
    resuming.add(Chunk(1, 0), b"one")
    assert resuming.held == (DIGEST, 1)
    assert resuming.begin(snapshot(2, first=1)) == [b"one"]
    resuming.add(Chunk(2, 1), b"two")
    resuming.add(Chunk(2, 2), b"three")
    assert resuming.is_sound(2) and resuming.held == ("", 0)


def test_another_snapshot_begins_anew():
    resuming = Resuming()
    resuming.begin(snapshot())
    resuming.add(Chunk(1, 0), b"one")
    assert not resuming.begin(snapshot(2))
    for index, frame in enumerate(FRAMES):
        resuming.add(Chunk(2, index), frame)
    assert resuming.is_sound(2)


def test_spoiled_bytes_are_counted_until_sound_ones_come():
    resuming = Resuming()
    for transfer, frames in ((1, [b"one", b"too", b"three"]), (2, FRAMES)):
        resuming.begin(snapshot(transfer))
        for index, frame in enumerate(frames):
            resuming.add(Chunk(transfer, index), frame)
        assert resuming.is_sound(transfer) == (transfer == 2)
        assert resuming.spoiled == (transfer == 1)


@pytest.mark.parametrize(("first", "digest"), [(2, DIGEST), (1, "other")])
def test_a_snapshot_that_begins_where_nothing_is_held_is_none(first, digest):
    resuming = Resuming()
    resuming.begin(snapshot())
    resuming.add(Chunk(1, 0), b"one")
    with pytest.raises(FramingError, match="1 of it are here"):
        resuming.begin(snapshot(2, first, digest))


def test_a_frame_that_comes_behind_one_that_was_lost_is_seen_at_once():
    resuming = Resuming()
    resuming.begin(snapshot())
    with pytest.raises(FramingError, match="frame 1 of a snapshot comes where 0 is due"):
        resuming.add(Chunk(1, 1), b"two")


def test_a_snapshot_without_a_digest_is_not_kept():
    resuming = Resuming()
    resuming.begin(snapshot(digest=""))
    resuming.add(Chunk(1, 0), b"one")
    assert resuming.held == ("", 0) and resuming.is_sound(1)


def test_how_frames_are_divided_is_part_of_the_digest():
    assert digest_of([b"on", b"etwo", b"three"]) != DIGEST
