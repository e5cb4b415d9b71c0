"""The hub as one that reduces: chunks of all ranks, in the order of the ranks, within a window of each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.collectives.arrays import HUB_DTYPES, dtype_of_name
from zmqtrain.collectives.reducer import (
    GROUP_REDUCE_BYTES,
    MAX_OWN_BYTES,
    REDUCE_BYTES,
    REDUCE_MESSAGES,
    Reducers,
    hub_reduction,
    window_bytes,
)
from zmqtrain.collectives.reductions import OPERATIONS, find_reduction
from zmqtrain.core.errors import ConfigError, FramingError, RemoteProtocolError
from zmqtrain.protocol.effects import Combine
from zmqtrain.protocol.messages import ReduceChunk, ReducedChunk

PEERS = tuple("abcdefgh")


class Hub:
    """Reducers of one group, and what they have sent to whom; `hold` keeps results from going."""

    def __init__(self, size):
        self.peers, self.sent, self.held = PEERS[:size], [], []
        self.reducers = Reducers(self)
        self.hold = False

    def forward(self, peer, answer, frames, sent):
        assert isinstance(answer, ReducedChunk) and answer.size == sum(len(frame) for frame in frames)
        self.sent.append((self.peers.index(peer), answer.key, [bytes(frame) for frame in frames]))
        if self.hold:
            self.held.append(sent)
        else:
            sent()

    def give(self, rank, values, key=1, op="sum", own=(), dtype=None):
        frames = [*own, values.view(np.uint8).data]
        chunk = ReduceChunk(key, op, dtype or values.dtype.name, sum(len(frame) for frame in frames))
        self.reducers.combine(Combine(1, rank, self.peers, chunk), frames)

    def results(self, rank):
        return [frames[-1] for one, _, frames in self.sent if one == rank]


@given(
    st.data(),
    st.integers(1, 5),
    st.sampled_from(list(OPERATIONS)),
    st.sampled_from(["bool", "int32", "float32", "float64", "complex64", "float16", "bfloat16"]),
)
def test_whoever_comes_first_the_ranks_are_combined_in_their_order(data, size, op, dtype):
    try:
        reduction = find_reduction(op, dtype_of_name(dtype))
    except ConfigError:
        with pytest.raises(ConfigError):
            hub_reduction(op, dtype)
        return
    chunks = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    values = [[(10 * rng.standard_normal(7)).astype(dtype_of_name(dtype)) for _ in range(chunks)] for _ in range(size)]
    hub = Hub(size)
    for rank in data.draw(st.permutations([rank for rank in range(size) for _ in range(chunks)])):
        index = sum(1 for one in getattr(hub, "given", []) if one == rank)
        hub.given = [*getattr(hub, "given", []), rank]
        hub.give(rank, values[rank][index], op=op)
    expected = []
    for index in range(chunks):
        total = values[0][index].copy()
        for rank in range(1, size):
            reduction.combine(total, values[rank][index], total)
        reduction.finish(total, size)
        expected.append(total.tobytes())
    for rank in range(size):
        assert hub.results(rank) == expected


def test_several_reductions_at_a_time_do_not_mix_and_each_rank_has_its_own_frames_back():
    hub = Hub(2)
    hub.give(0, np.arange(3.0), key=1, own=[b"a0"])
    hub.give(0, np.ones(2, np.int32), key=2, own=[b"b0", b"more"])
    hub.give(1, np.ones(2, np.int32), key=2, own=[b"b1"])
    hub.give(1, np.arange(3.0), key=1)
    two, six = np.full(2, 2, np.int32).tobytes(), (2 * np.arange(3.0)).tobytes()
    assert hub.sent == [(0, 2, [b"b0", b"more", two]), (1, 2, [b"b1", two]), (0, 1, [b"a0", six]), (1, 1, [six])]


@pytest.mark.parametrize(
    "other", [{"op": "max"}, {"values": np.ones(4, np.float64)}, {"values": np.ones(5, np.float32)}]
)
def test_ranks_that_differ_get_nothing_and_the_hub_names_both(other, caplog):
    hub = Hub(2)
    hub.give(1, np.ones(4, np.float32))
    hub.give(0, **{"values": np.ones(4, np.float32), **other})
    hub.give(0, np.ones(4, np.float32))
    assert hub.sent == [] and "ranks 1 and 0 differ" in caplog.text and "sum of 16 bytes of float32" in caplog.text
    for rank in (0, 1):
        hub.give(rank, np.ones(4, np.float32), key=2)
    assert len(hub.sent) == 2


@pytest.mark.parametrize("full", ["chunks", "bytes"])
def test_what_is_held_of_a_rank_is_bounded_until_its_results_have_gone(full):
    hub = Hub(2)
    hub.hold = True
    if full == "chunks":
        for _ in range(REDUCE_MESSAGES):
            hub.give(0, np.ones(4))
        extra = np.ones(4)
    else:
        extra = np.ones((REDUCE_BYTES // 2) // 8)
        hub.give(0, extra), hub.give(0, extra)
    with pytest.raises(RemoteProtocolError, match="window"):
        hub.give(0, extra)
    hub.give(1, np.ones(4) if full == "chunks" else extra)
    with pytest.raises(RemoteProtocolError, match="window"):
        hub.give(0, extra)
    hub.held.pop(0)()
    hub.give(0, extra)


def test_a_large_group_has_smaller_windows():
    assert window_bytes(2) == REDUCE_BYTES and window_bytes(256) == GROUP_REDUCE_BYTES // 256


def test_a_group_that_is_discarded_begins_with_nothing():
    hub = Hub(2)
    hub.give(0, np.ones(4))
    hub.reducers.discard(1)
    hub.give(1, np.ones(4))
    assert hub.sent == []
    hub.reducers.discard(7)


@pytest.mark.parametrize(
    ("chunk", "frames"),
    [
        (ReduceChunk(1, "sum", "float32", 0), []),
        (ReduceChunk(1, "sum", "float32", 0), [b""]),
        (ReduceChunk(1, "sum", "float32", 6), [b"123456"]),
        (ReduceChunk(1, "and", "float32", 4), [b"1234"]),
        (ReduceChunk(1, "mean", "int32", 4), [b"1234"]),
        (ReduceChunk(1, "sum", "object", 8), [b"12345678"]),
        (ReduceChunk(1, "sum", "S4", 4), [b"1234"]),
        (ReduceChunk(-1, "sum", "float32", 4), [b"1234"]),
        (ReduceChunk(1, "sum", "float32", MAX_OWN_BYTES + 5), [bytes(MAX_OWN_BYTES + 1), b"1234"]),
        (ReduceChunk(1, "sum", "float32", 16), [b"1234"] * 4),
    ],
)
def test_what_cannot_be_reduced_is_a_framing_error(chunk, frames):
    hub = Hub(2)
    with pytest.raises(FramingError):
        hub.reducers.combine(Combine(1, 0, hub.peers, chunk), frames)


def test_every_dtype_that_is_offered_is_one():
    assert "bfloat16" in HUB_DTYPES
    for dtype in HUB_DTYPES:
        assert hub_reduction("max" if "complex" not in dtype else "sum", dtype)[1].name == dtype
    with pytest.raises(ConfigError, match="take another"):
        hub_reduction("sum", "float8_e5m2")
