"""Values of keys: what is applied, in which order, and that what was read stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.parameter_server.store import (
    FRAME_BYTES,
    Store,
    cut_frames,
    frame_sizes,
    is_cut,
    join_frames,
    optimizer_from_spec,
)


def store_with(spec="sgd:rate=0.5", **arrays):
    store = Store(optimizer_from_spec(spec))
    for key, array in arrays.items():
        store.install(key, array.dtype.name, cut_frames(array))
    return store


def values_of(store, key):
    version, frames = store.read(key)
    into = np.empty_like(store.entries[key].values)
    join_frames(frames, into)
    return version, into


@settings(max_examples=examples(20))
@given(st.integers(1, 3 * FRAME_BYTES // 4), st.sampled_from(["float32", "float64"]))
def test_frames_are_cut_as_announced_and_joined_again(count, dtype):
    values = np.arange(count, dtype=dtype)
    frames = cut_frames(values)
    sizes = tuple(len(frame) for frame in frames)
    assert sizes == frame_sizes(values.nbytes) and is_cut(values.nbytes, sizes)
    into = np.empty_like(values)
    join_frames(frames, into)
    np.testing.assert_array_equal(into, values)


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        (0, ()),
        (4, ()),
        (4, (2, 2)),
        (4, (5,)),
        (FRAME_BYTES + 4, (4, FRAME_BYTES)),
        (FRAME_BYTES, (FRAME_BYTES, 0)),
        (2 * FRAME_BYTES, (2 * FRAME_BYTES,)),
        (1 << 60, (FRAME_BYTES,)),
        (FRAME_BYTES, (-4, FRAME_BYTES + 4)),
    ],
)
def test_other_frames_are_not_those_of_a_piece(size, sizes):
    assert not is_cut(size, sizes)


def test_what_is_cut_is_not_copied():
    values = np.zeros(4, np.float32)
    (frame,) = cut_frames(values)
    values[0] = 1
    assert np.frombuffer(frame, np.float32)[0] == 1


def test_too_few_bytes_are_not_joined():
    with pytest.raises(CodecError, match="8 bytes came where 16"):
        join_frames([bytes(8)], np.empty(4, np.float32))


@settings(max_examples=examples(20))
@given(st.integers(1, 5), st.integers(1, 2 * FRAME_BYTES // 4), st.integers(0, 9))
def test_a_step_is_by_the_mean_in_the_order_given_bit_for_bit(workers, count, seed):
    random = np.random.default_rng(seed)
    first = random.standard_normal(count).astype(np.float32)
    gradients = random.standard_normal((workers, count)).astype(np.float32)
    store = store_with(w=first)
    store.apply("w", [cut_frames(gradient) for gradient in gradients])
    total = gradients[0].copy()
    for gradient in gradients[1:]:
        total += gradient
    version, values = values_of(store, "w")
    assert version == 1
    np.testing.assert_array_equal(values, first + np.float32(-0.5) * (total / np.float32(workers)))


def test_no_gradient_makes_no_step():
    store = store_with(w=np.ones(3, np.float32))
    store.apply("w", [])
    version, values = values_of(store, "w")
    assert version == 0 and values.tolist() == [1, 1, 1]


def test_what_was_read_does_not_change_and_is_made_once_for_a_version():
    store = store_with(w=np.ones(3, np.float32))
    _, before = store.read("w")
    assert store.read("w")[1] is before
    store.apply("w", [cut_frames(np.ones(3, np.float32))])
    assert np.frombuffer(before[0], np.float32).tolist() == [1, 1, 1]
    assert np.frombuffer(store.read("w")[1][0], np.float32).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e19])
def test_what_is_not_finite_or_too_large_is_refused(wrong):
    values = np.zeros(100_000, np.float32)
    values[77_777] = wrong
    with pytest.raises(NonFiniteDelta):
        store_with().check("float32", cut_frames(values))
    store_with().check("float32", cut_frames(np.full(10, -1e18, np.float32)))


def test_another_optimizer_begins_with_fresh_state_and_another_store_without_keys():
    store = store_with("momentum", w=np.ones(3, np.float32))
    store.apply("w", [cut_frames(np.ones(3, np.float32))])
    store.begin(optimizer_from_spec("adam"), False)
    assert store.entries["w"].version == 0 and set(store.entries["w"].state) == {"mean", "square"}
    store.begin(optimizer_from_spec("adam"), True)
    assert not store.entries


def test_a_restored_store_goes_on_bit_for_bit():
    ours, theirs = store_with("adam", w=np.ones(3, np.float32)), store_with("adam")
    pushed = cut_frames(np.arange(3, dtype=np.float32))
    ours.apply("w", [pushed])
    theirs.restore({"w": 1}, ours.arrays())
    for store in (ours, theirs):
        store.apply("w", [pushed])
    assert values_of(ours, "w")[0] == values_of(theirs, "w")[0] == 2
    np.testing.assert_array_equal(values_of(ours, "w")[1], values_of(theirs, "w")[1])
