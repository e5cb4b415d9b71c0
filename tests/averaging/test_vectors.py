"""Memory that is lent again, and never while somebody may look at it."""

from __future__ import annotations

import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.averaging.coder import ALIGNMENT_BYTES, IDLE_TAKES, SMALLEST_KEPT_BYTES, Vectors

LARGE = SMALLEST_KEPT_BYTES // 4


def address(vector):
    return vector.ctypes.data


def test_a_vector_has_its_length_and_an_address_that_jax_takes_as_it_is():
    vectors = Vectors()
    for count in (1, 17, LARGE - 1, LARGE, LARGE + 4097):
        vector = vectors.take(count)
        assert vector.dtype == np.float32 and vector.shape == (count,) and vector.flags.writeable
        assert address(vector) % ALIGNMENT_BYTES == 0


def test_memory_is_lent_again_when_the_last_view_of_it_is_gone():
    vectors = Vectors()
    vector = vectors.take(LARGE)
    first, part = address(vector), vector[10:20]
    del vector
    other = vectors.take(LARGE)
    assert address(other) != first
    del part
    assert address(vectors.take(LARGE + 4096)) == first  # another fragment, a block longer


def test_only_the_latest_memory_is_kept_and_what_is_lent_stays_what_it_is():
    vectors = Vectors(most=2)
    lent = [vectors.take(LARGE) for _ in range(5)]
    for number, vector in enumerate(lent):
        vector.fill(number)
    kept = {address(vector) for vector in lent[-2:]}
    for number, vector in enumerate(lent):
        assert (vector == number).all()
    del lent, vector
    assert {address(one) for one in (vectors.take(LARGE), vectors.take(LARGE))} <= kept


def test_memory_of_another_size_is_not_lent():
    vectors = Vectors()
    first = address(vectors.take(2 * LARGE))
    small, large = vectors.take(LARGE), vectors.take(4 * LARGE)
    assert first not in (address(small), address(large))


def test_what_was_lent_last_is_lent_first_and_what_is_not_needed_is_given_back():
    vectors = Vectors()
    lent = [vectors.take(LARGE) for _ in range(3)]  # a burst
    ends = [weakref.ref(vector.base.base.obj) for vector in lent]
    last = address(lent[-1])
    del lent
    for _ in range(IDLE_TAKES):
        assert address(vectors.take(LARGE)) == last
    assert [end() is None for end in ends] == [True, True, False]


def test_jax_takes_each_segment_as_it_lies():
    for segment in Vectors().take_segments((17, LARGE + 3, 792)):
        assert jax.device_put(segment).unsafe_buffer_pointer() == address(segment)


def test_segments_lie_in_one_memory_which_any_of_them_holds():
    vectors = Vectors()
    counts = (1, 17, LARGE + 3, 792, 16)
    segments = vectors.take_segments(counts)
    assert [segment.shape for segment in segments] == [(count,) for count in counts]
    for number, segment in enumerate(segments):
        segment.fill(number)
    for number, segment in enumerate(segments):
        assert (segment == number).all() and address(segment) % ALIGNMENT_BYTES == 0
    first = address(segments[0])
    one = segments[0]
    del segments, segment
    other = vectors.take(sum(counts) + 64)
    assert address(other) != first  # one segment holds all of the memory
    del one
    assert address(vectors.take(sum(counts) + 64)) == first


def test_nothing_is_written_where_a_computation_still_reads():
    """The vector goes to JAX, and out of sight, while what is computed from it has not even begun."""
    vectors = Vectors()
    turn = jax.jit(lambda matrix: jnp.tanh(matrix @ matrix).sum())
    add = jax.jit(lambda total, values, wait: total + values + 0 * wait)
    matrix = jnp.ones((400, 400)) / 400
    total = jnp.zeros(LARGE)
    for number in range(1, 21):
        vector = vectors.take(LARGE)
        vector.fill(number)
        total = add(total, vector, turn(matrix))
        del vector
    np.testing.assert_array_equal(total, np.full(LARGE, 210, np.float32))


def test_memory_in_use_is_not_lent_whatever_reference_counts_say(monkeypatch):
    """They are too low where references are borrowed (Python 3.14) or belong to other threads (free-threaded)."""
    monkeypatch.setattr(sys, "getrefcount", lambda value: 1)
    vectors = Vectors()
    vector = vectors.take(LARGE)
    part, seen = vector[5:], memoryview(vector[7:9])
    held = [address(vector)]
    del vector
    for holder in (part, seen):
        other = vectors.take(LARGE)
        assert address(other) not in held
        held.append(address(other))
        part = None if holder is part else part
    del part, seen, holder, other
    assert address(vectors.take(LARGE)) in held


def test_memory_that_another_thread_lets_go_of_is_lent_again():
    vectors = Vectors()
    lent = [vectors.take(LARGE)]
    first = address(lent[0])
    assert address(vectors.take(LARGE)) != first
    thread = threading.Thread(target=lent.clear)
    thread.start()
    thread.join()
    taken = [vectors.take(LARGE) for _ in range(2)]
    assert first in map(address, taken)
