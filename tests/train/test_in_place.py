"""Work of ours on the memory of JAX's arrays, as XLA runs it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zmqtrain.train import in_place


def add_two(addresses):
    """To all of `made`'s, or to one large leaf's."""
    counts = {4: [4, 0, 6, 1]}.get(len(addresses), [1 << 16] * len(addresses))
    for address, count in zip(addresses.tolist(), counts, strict=True):
        values = in_place.values_at(address, count)
        values += 2


def made():
    return [jnp.arange(6.0).reshape(2, 3), jnp.float32(1.0)], [jnp.ones(4), jnp.zeros((0, 3))]


@pytest.mark.parametrize("donate", [True, False])
def test_it_changes_all_arrays_in_their_shapes(donate):
    assert in_place.is_possible()
    leaves, spent = in_place.work_on(*made(), add_two, donate=donate)
    want = [np.arange(6.0).reshape(2, 3) + 2, np.float32(3.0)], [np.full(4, 3.0), np.zeros((0, 3))]
    for got, expected in zip([*leaves, *spent], [*want[0], *want[1]], strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.shape == np.shape(expected)


def pointer_of(leaf):
    """Return where a leaf is, once it is ready: until then jax keeps the interpreter's lock, which the work needs."""
    return jax.block_until_ready(leaf).unsafe_buffer_pointer()


def test_with_donate_the_memory_is_that_of_the_leaves_and_else_they_stay():
    leaves, spent = made()
    was = [pointer_of(leaf) for leaf in (leaves[0], spent[0])]
    new, newer = in_place.work_on(leaves, spent, add_two, donate=True)
    assert [pointer_of(leaf) for leaf in (new[0], newer[0])] == was
    assert leaves[0].is_deleted()
    same = jnp.ones((2, 3))  # of the leaves' form, which must not have its memory
    pointer = pointer_of(same)
    kept, spent = [jnp.arange(6.0).reshape(2, 3)], [same]
    _, newer = in_place.work_on(kept, spent, lambda addresses: None, donate=False)
    assert pointer_of(newer[0]) == pointer
    np.testing.assert_array_equal(kept[0], np.arange(6.0).reshape(2, 3))
    assert spent[0].is_deleted()


def test_memory_that_is_not_jax_own_is_never_written():
    mine = np.zeros(1 << 16, np.float32)
    view_of = jnp.ones(1 << 16)
    view = np.asarray(view_of)
    result, _ = in_place.work_on([jax.device_put(mine), view_of], [], add_two, donate=True)
    jax.block_until_ready(result)
    assert not mine.any()
    assert (view == 1).all()
    assert float(result[0][0]) == 2


def test_the_caller_goes_on_while_it_is_done():
    may_go, threads = threading.Event(), []

    def wait(addresses):
        threads.append(threading.get_ident())
        assert may_go.wait(60)
        add_two(addresses)

    leaves, _ = in_place.work_on(*made(), wait, donate=True)
    assert not leaves[0].is_ready()
    after = leaves[1] + 1  # what is computed from it waits for it
    may_go.set()
    assert float(after) == 4
    assert threads != [threading.get_ident()]


def test_it_waits_for_those_who_read_the_leaves():
    leaf, may_read, seen = jnp.ones(1 << 16), threading.Event(), []

    def read(addresses):
        assert may_read.wait(60)
        seen.append(float(in_place.values_at(int(addresses[0]), 1)[0]))

    in_place.look_at([leaf], read)
    changed, _ = in_place.work_on([leaf], [], add_two, donate=True)
    assert not changed[0].is_ready()
    may_read.set()
    assert (float(changed[0][0]), seen) == (3, [1])


def add_one_to(address):
    values = in_place.values_at(int(address), 1 << 16)
    values += 1


def test_kept_arrays_stay_where_they_are_and_are_changed_in_the_order_of_the_work():
    kept, seen = in_place.Kept([jnp.ones(1 << 16), jnp.zeros(1 << 16)]), []
    places = [pointer_of(leaf) for leaf in kept]
    leaves = [jnp.zeros(1 << 16)]
    for _ in range(3):
        leaves = kept.work_on(leaves, lambda ours, theirs: (add_one_to(ours[0]), add_one_to(theirs[1])), donate=True)
        seen.append(kept[1] * 1)  # an array like any other, after the work so far and before what comes
    assert [float(one[0]) for one in seen] == [1, 2, 3]
    assert [float(leaf[0]) for leaf in (*leaves, *kept)] == [3, 1, 3]
    assert [pointer_of(leaf) for leaf in kept] == places


def test_nobody_changes_kept_arrays_that_somebody_looks_at():
    kept, may_read, seen = in_place.Kept([jnp.ones(1 << 16)]), threading.Event(), []

    def read(ours, theirs):
        assert may_read.wait(60)
        seen.extend(float(in_place.values_at(int(each[0]), 1)[0]) for each in (ours, theirs))

    kept.look_at([jnp.zeros(1 << 16)], read)
    changed = kept.work_on([jnp.zeros(1 << 16)], lambda _, theirs: add_one_to(theirs[0]), donate=False)
    assert not changed[0].is_ready()
    may_read.set()
    assert (float(kept[0][0]), seen) == (2, [0, 1])


def test_a_view_of_a_kept_array_keeps_its_values():
    kept = in_place.Kept([jnp.ones(1 << 16)])
    view = np.asarray(kept[0])
    with jax.transfer_guard("disallow"):
        kept.work_on([], lambda _, theirs: add_one_to(theirs[0]), donate=True)
    assert float(kept[0][0]) == 2
    assert (view == 1).all()


def test_kept_arrays_have_the_error_of_work_that_failed():
    kept = in_place.Kept([jnp.ones(1 << 16)])
    kept.work_on([], lambda *_: [][0], donate=True)
    leaves = kept.work_on([jnp.zeros(1)], lambda *_: pytest.fail("it was done"), donate=True)
    for array in (leaves[0], kept[0]):
        with pytest.raises(jax.errors.JaxRuntimeError, match="IndexError"):
            array.block_until_ready()


def test_work_begins_when_the_thread_that_hands_it_over_has_its_arrays(monkeypatch):
    monkeypatch.setattr(in_place, "HANDING_SECONDS", 60)
    jobs, order, waits = in_place._Jobs(), [], threading.Event()

    class Gate:
        """The lock of what is handed over; says that somebody waits for it."""

        def __init__(self, lock):
            self.release = lock.release
            self.acquire = lambda timeout: waits.set() or lock.acquire(timeout=timeout)

    def call(number):
        jobs._handed = Gate(jobs._handed)
        thread = threading.Thread(target=lambda: (jobs.stand_behind(), jobs.run(int(number), ())))
        thread.start()
        assert waits.wait(60), "the work began at once"
        order.append("handed")
        return [thread], None

    [thread] = jobs.hand_over(lambda addresses: order.append("work"), call)
    thread.join(60)
    assert order == ["handed", "work"]


def test_who_runs_the_work_in_his_own_thread_waits_for_nobody_and_stays_as_he_was(monkeypatch):
    monkeypatch.setattr(in_place, "HANDING_SECONDS", 60)
    monkeypatch.setattr(in_place, "follow", lambda: pytest.fail("it stood back"))
    jobs = in_place._Jobs()
    jobs.hand_over(lambda addresses: None, lambda number: (jobs.stand_behind(), jobs.run(int(number), ())))


@pytest.mark.parametrize("apart", [(0, 88, 176), (0, 88, 300)], ids=["side by side", "anywhere"])
def test_the_address_of_every_argument_is_read(apart):
    memory = (ctypes.c_int64 * 64)()
    places = [ctypes.addressof(memory) + place // 8 * 8 for place in apart]
    for number, place in enumerate(places):
        in_place._Buffer.from_address(place).data = 1000 + number
    pointers = (ctypes.c_int64 * 3)(*places)
    arguments = in_place._Arguments(size=3, buffers=ctypes.addressof(pointers))
    assert in_place._addresses_of(arguments).tolist() == [1000, 1001, 1002]


def test_denormals_are_what_they_are_anywhere_else():
    tiny = np.array([1.5e-38, -1.4e-38], np.float32)
    seen = []
    done = in_place.look_at([jnp.zeros(1)], lambda addresses: seen.append(float(tiny.sum())))
    done.block_until_ready()
    assert seen == [float(tiny.sum())] != [0.0]


def test_strict_promotion_wider_numbers_and_a_guard_of_transfers_are_no_obstacle():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        leaves = [jnp.zeros(1 << 16, jnp.float32)]
        with jax.transfer_guard("disallow"):
            leaves, _ = in_place.work_on(leaves, [], add_two, donate=True)
        assert float(leaves[0][0]) == 2


def test_an_error_is_that_of_the_arrays(caplog):
    def fail(_):
        raise ValueError("no room")

    leaves, spent = in_place.work_on(*made(), fail, donate=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no room"):
        jax.block_until_ready(leaves)
    after, _ = in_place.work_on(leaves, spent, add_two, donate=False)  # of what has failed nothing is made
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        jax.block_until_ready(after)
    jax.block_until_ready(in_place.work_on(*made(), add_two, donate=True)[0])
    assert in_place._jobs._waiting == {}  # what XLA never asked for is forgotten too
    assert "no room" in caplog.text


def test_leaves_that_are_used_up_are_refused_at_once_and_leave_nothing_behind():
    leaves, spent = made()
    leaves[0].delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        in_place.work_on(leaves, spent, add_two, donate=False)
    assert in_place._jobs._waiting == {}


def test_a_program_that_ends_waits_for_what_is_under_way():
    program = """
import threading, jax.numpy as jnp
from zmqtrain.train import in_place
assert in_place.is_possible()
begun = threading.Event()
def work(addresses):
    begun.set()
    values = in_place.values_at(int(addresses[0]), 1 << 20)
    for _ in range(200):
        values += 1
    print("done", values[0], flush=True)
in_place.work_on([jnp.zeros(1 << 20)], [], work, donate=True)
begun.wait(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "done 200.0\n"), ended.stderr


def test_where_xla_does_not_take_it_that_is_said_once(monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("unknown API version")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    possible = in_place.is_possible.__wrapped__
    assert not possible()
    assert "unknown API version" in caplog.text
