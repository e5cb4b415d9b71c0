"""An optimizer's state behind a snapshot: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.averaging.snapshot import (
    OPTIMIZER_STATE_MODELS,
    check_optimizer_state,
    check_snapshot_sizes,
    decode_optimizer_state,
    encode_optimizer_state,
    split_snapshot,
)
from zmqtrain.core.errors import CodecError, FramingError, NonFiniteDelta
from zmqtrain.core.types import MAX_FRAME_BYTES
from zmqtrain.protocol.messages import Snapshot


@pytest.mark.parametrize("counts", [(), (1,), (3, 5), (65_536, 1), (262_140,), (300_000, 262_141)])
def test_a_state_comes_out_laid_end_to_end_in_frames_of_the_allowed_size(counts):
    arrays = [np.random.default_rng(count).normal(size=count).astype(np.float32) for count in counts]
    frames = encode_optimizer_state(arrays)
    assert all(len(frame) <= MAX_FRAME_BYTES for frame in frames)
    check_optimizer_state(frames)
    np.testing.assert_array_equal(decode_optimizer_state(frames), np.concatenate([*arrays, np.zeros(0, np.float32)]))


def test_a_state_that_is_not_finite_is_neither_sent_nor_taken():
    with pytest.raises(NonFiniteDelta):
        encode_optimizer_state([np.array([1.0, np.nan], np.float32)])
    (frame,) = encode_optimizer_state([np.ones(4, np.float32)])
    for damaged in (frame[:-1], frame[:-4], frame[:16], b"", bytes(frame[:-1]) + b"\x7f"):
        with pytest.raises(CodecError):
            check_optimizer_state([damaged])


def test_a_snapshot_is_cut_where_its_state_begins():
    frames = [b"p0", b"p1", b"m0"]
    assert split_snapshot(Snapshot(1, 0, (2, 2, 2), (), 1), frames) == ([b"p0", b"p1"], [b"m0"])
    assert split_snapshot(Snapshot(1, 0, (2, 2, 2)), frames) == (frames, [])
    for moments in (-1, 4):
        with pytest.raises(CodecError):
            split_snapshot(Snapshot(1, 0, (2, 2, 2), (), moments), frames)


@pytest.mark.parametrize(
    ("sizes", "moments", "takes"),
    [
        ((100, 50), 1, False),  # no state is expected
        ((100, 50), 2, True),  # no parameters
        ((100, 50), -1, True),
        ((), 0, True),
        ((101,), 0, True),  # more than the model
        ((101, 1), 1, True),
        ((100, OPTIMIZER_STATE_MODELS * 100 + (1 << 16) + 1), 1, True),
    ],
)
def test_what_cannot_be_right_is_refused_before_it_comes(sizes, moments, takes):
    with pytest.raises(FramingError):
        check_snapshot_sizes(Snapshot(1, 0, sizes, (), moments), 100, takes)


def test_a_model_and_a_state_within_their_bounds_may_come():
    check_snapshot_sizes(Snapshot(1, 0, (100,)), 100, False)
    check_snapshot_sizes(Snapshot(1, 0, (100, 400), (), 1), 100, True)
