"""The synchronous loop: as one process with all the data, and the same bits everywhere, whoever is slow or lost."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.grids import nightly
from tests.train.processes import REGRESSION, SAMPLES, Ended, Process, Regression, Run, batches_of, finish, group_of
from zmqtrain.core.errors import ConfigError, NonFiniteDelta, PeerLost, ReplicasDiffer
from zmqtrain.train.gradients import GradientLoop, GradientOptions, _SynchronousRun
from zmqtrain.train.minibatch import FixedMinibatch
from zmqtrain.train.step import MinibatchStep

UNITS = 6


def alone(*steps):
    """What one process makes of these batches, so many of them in each step."""
    state = MinibatchStep(REGRESSION, FixedMinibatch(1), time).init(0)
    for batches in steps:
        state, _, _ = MinibatchStep(REGRESSION, FixedMinibatch(len(batches)), time).step(state, iter(batches))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]


def turns(units, count):
    """The order in which one process meets the batches that `count` processes share, unit by unit."""
    dealt = [list(batches_of(units[rank::count])) for rank in range(count)]
    return [batch for together in zip(*dealt, strict=True) for batch in together]


def cut(batches, size):
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def train(count, units, *, before=None, failing=(), **options):
    groups = group_of(count, before)
    processes = [
        Process(f"pc-{rank + 1}", group, batches_of(units[rank::count]), **options) for rank, group in enumerate(groups)
    ]
    return finish(processes, failing)


def same_bits(processes):
    first, *others = [process.params() for process in processes]
    for other in others:
        for one, leaf in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, leaf)
    return first


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("count", "bucket_bytes"),
    [(1, 100), (2, 1), (3, 100), (3, 1 << 20), *nightly((1, 1), (1, 1 << 20), (2, 100), (2, 1 << 20), (3, 1))],
)
def test_a_step_is_that_of_one_process_with_all_the_batches(count, bucket_bytes):
    units = list(range(UNITS))
    ours = same_bits(train(count, units, bucket_bytes=bucket_bytes))
    close(ours, alone(*cut(turns(units, count), count)))


@pytest.mark.parametrize("batches", [2, 4])
def test_the_micro_batches_of_all_make_one_step(batches):
    units = list(range(2 * UNITS))
    processes = train(2, units, settings={"minibatch": f"fixed:batches={batches}"})
    together = turns(units, 2)
    close(same_bits(processes), alone(*cut(together, 2 * batches)))
    assert processes[0].result.statistics.steps == len(together) / 2 / batches


def test_uneven_data_weighs_by_its_samples_and_who_has_none_takes_part_with_nothing():
    program = REGRESSION
    few, many = list(program.batches(0)), list(batches_of(range(1, 4)))
    groups = group_of(2)
    processes = finish([Process("pc-1", groups[0], few), Process("pc-2", groups[1], many)])
    ours = same_bits(processes)
    close(ours, alone([few[0], many[0]], [few[1], many[1]], *([one] for one in many[2:])))
    assert [process.result.samples for process in processes] == [2 * SAMPLES, 6 * SAMPLES]
    assert {process.result.statistics.steps for process in processes} == {6}


def test_a_pause_in_the_data_of_one_is_not_its_end():
    program, groups = REGRESSION, group_of(2)
    one, other = list(program.batches(0)), list(program.batches(1))
    batches = [one[0], None, None, one[1]]
    processes = finish([Process("pc-1", groups[0], batches), Process("pc-2", groups[1], other)])
    same_bits(processes)
    assert [process.result.samples for process in processes] == [2 * SAMPLES] * 2
    assert processes[0].result.statistics.steps == 3


def test_without_any_data_all_end_with_the_parameters_of_the_first():
    processes = train(2, [])
    first = [np.asarray(leaf) for leaf in jax.tree.leaves(REGRESSION.init(0))]
    close(same_bits(processes), first)
    assert not processes[0].run_of.offers


def test_all_begin_with_the_state_of_the_first_whatever_their_own_is():
    class Own(Regression):
        def __init__(self, seed):
            self.seed = seed

        def init(self, seed):
            return super().init(self.seed)

    groups = group_of(3)
    processes = [
        Process(f"pc-{rank + 1}", group, batches_of(range(rank, UNITS, 3)), program=Own(rank))
        for rank, group in enumerate(groups)
    ]
    close(same_bits(finish(processes)), alone(*cut(turns(list(range(UNITS)), 3), 3)))


def test_the_run_is_given_what_all_have_moved_in_one_dense_offer():
    processes = train(2, list(range(UNITS)))
    for process in processes:
        ((u, samples, steps, dense),) = process.run_of.offers
        assert (samples, steps, dense) == (UNITS * SAMPLES, UNITS, True)
        start = jax.tree.leaves(REGRESSION.init(0))
        moved = np.concatenate([(p - np.asarray(s)).reshape(-1) for p, s in zip(process.params(), start, strict=True)])
        np.testing.assert_allclose(np.concatenate(u), moved, atol=1e-6)
        assert process.run_of.scores[-1][0] == process.result.scores
        assert len(process.run_of.reports) == UNITS


def test_where_the_run_takes_nothing_of_what_all_have_learnt_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr("zmqtrain.train.gradients.FLUSH_SECONDS", 0.0)
    process = Process("pc-1", group_of(1)[0], batches_of([0, 1]))
    monkeypatch.setattr(process.run_of, "offer", lambda *given, **how: None)
    finish([process])
    assert "pc-1: the run has not taken the parameters of these 4 steps" in caplog.text


# ---------------------------------------------------------------------- overlap


def test_overlap_counts_the_last_micro_batch_in_the_next_step():
    units = list(range(4))
    batches = list(batches_of(units))
    (process,) = train(1, units, overlap="next", settings={"minibatch": "fixed:batches=2"})
    program, optimizer = Regression(), optax.adam(0.02)
    params = program.init(0)
    opt_state, gradient = optimizer.init(params), jax.grad(program.loss)
    late = None
    for early, last in [*zip(batches[::2], batches[1::2], strict=True), (None, None)]:
        parts = [] if late is None else [late]
        parts += [] if early is None else [gradient(params, early)]
        late = None if last is None else gradient(params, last)
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *parts)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
    close(process.params(), [np.asarray(leaf) for leaf in jax.tree.leaves(params)])
    assert process.result.samples == len(batches) * SAMPLES


@pytest.mark.parametrize("batches", [1, 2])
def test_overlapped_steps_are_equal_on_all_and_lose_no_sample(batches):
    settings = {"minibatch": f"fixed:batches={batches}"}
    processes = train(3, list(range(UNITS)), overlap="next", settings=settings)
    same_bits(processes)
    assert sum(process.result.samples for process in processes) == 2 * UNITS * SAMPLES


def test_overlap_needs_to_know_which_micro_batch_is_the_last():
    with pytest.raises(ConfigError, match="overlap=next needs steps of a fixed number"):
        GradientLoop(
            REGRESSION,
            Run("pc-1", minibatch="timed:seconds=1"),
            None,
            GradientOptions(overlap="next"),
        )


def test_nodes_with_parameters_of_their_own_are_not_in_lockstep():
    with pytest.raises(ConfigError, match="have the same parameters"):
        GradientLoop(REGRESSION, Run("pc-1", initial="own"), None)


# ---------------------------------------------------------------------- whoever is lost


def killed_at(call):
    def before(number):
        if number == call:
            raise Ended

    return before


CALLS = range(1, 16)
"""Of a process with two buckets a call of each kind: agreements, first and second buckets, of several steps."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("overlap", ["none", "next"])
def test_whoever_is_killed_the_others_end_with_the_same_bits(call, overlap):
    units = list(range(3 * UNITS))
    options = {"bucket_bytes": 100, "overlap": overlap, "settings": {"minibatch": "fixed:batches=2"}}
    left = train(3, units, before={1: killed_at(call)}, failing=("pc-2",), **options)
    assert [process.name for process in left] == ["pc-1", "pc-3"]
    same_bits(left)
    assert [process.result.samples for process in left] == [2 * UNITS * SAMPLES] * 2
    assert left[0].result.statistics.steps == UNITS + (overlap == "next")


def test_who_has_completed_a_step_gives_it_to_whoever_has_not(monkeypatch):
    """All of the second step has reached pc-1 when pc-2, which lacks its last bucket, hears of the loss of pc-3."""
    last_bucket = 7  # after the alignment (two calls), a step (three), an agreement and a bucket
    groups = group_of(3)
    table = groups[0].table
    exchange = table.exchange

    def torn(rank, number, array):
        came = exchange(rank, number, array)
        if rank == 1 and number == last_bucket:
            table.lose(2)
            raise PeerLost("pc-3", "killed", 2)
        return came

    adopted, adopt = [], _SynchronousRun._adopt
    monkeypatch.setattr(
        _SynchronousRun, "_adopt", lambda self, arrays: (adopted.append(self.loop.exchange.name), adopt(self, arrays))
    )
    table.exchange = torn
    processes = [
        Process(f"pc-{rank + 1}", group, batches_of(range(rank, 9, 3)), bucket_bytes=100)
        for rank, group in enumerate(groups)
    ]
    processes[2].group.before = ends_when_lost(table)
    left = finish(processes, failing=("pc-3",))
    same_bits(left)
    assert sorted(adopted) == ["pc-2", "pc-2", "pc-3"]  # at the beginning, and the step that it lacked
    assert [process.result.samples for process in left] == [6 * SAMPLES] * 2
    assert left[0].result.statistics.steps == 6


def test_who_is_cut_off_from_the_others_ends_with_an_error_that_says_so():
    def before(number):
        if number == 6:
            table.lose(1)
            raise PeerLost("pc-2", "silent for 2.5 s", 1)

    groups = group_of(3, {1: before})
    table = groups[0].table
    processes = [Process(f"pc-{rank + 1}", group, batches_of(range(rank, 9, 3))) for rank, group in enumerate(groups)]
    finish(processes, failing=("pc-2",))
    assert "pc-2 is lost: silent for 2.5 s; the others go on without it" in str(processes[1].failure)
    same_bits([processes[0], processes[2]])


def ends_when_lost(table):
    def before(number):
        if table.lost is not None:
            raise Ended

    return before


def test_a_process_that_is_asked_to_stop_leaves_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr("zmqtrain.train.gradients.STOP_SECONDS", 0.0)
    asked = [False]
    groups = group_of(2)
    leaver = Process(
        "pc-1", groups[0], batches_of(range(100)), stop=lambda: asked[0], watch=lambda n, _: asked.__setitem__(0, n > 3)
    )
    stayer = Process("pc-2", groups[1], batches_of(range(100, 104)))
    finish([leaver, stayer])
    assert leaver.result.statistics.steps == 4 and not leaver.run_of.offers
    assert stayer.result.statistics.steps == 8 and len(stayer.run_of.offers) == 1


def test_where_all_are_asked_to_stop_the_run_ends_in_order(monkeypatch):
    monkeypatch.setattr("zmqtrain.train.gradients.STOP_SECONDS", 60.0)
    groups = group_of(2)
    seen = []
    processes = [
        Process(
            f"pc-{rank + 1}",
            group,
            batches_of(range(rank, 1000, 2)),
            watch=lambda n, _: seen.append(n),
            stop=lambda: len(seen) > 10,
        )
        for rank, group in enumerate(groups)
    ]
    finish(processes)
    same_bits(processes)
    assert all(process.run_of.offers for process in processes)


# ---------------------------------------------------------------------- what is wrong


def test_a_gradient_that_is_not_finite_ends_that_process_alone():
    program = REGRESSION
    good, bad = list(batches_of(range(4))), list(program.batches(9))
    bad[1] = (np.full_like(bad[1][0], np.nan), bad[1][1])
    groups = group_of(2)
    healthy, sick = Process("pc-1", groups[0], good), Process("pc-2", groups[1], bad)
    finish([healthy, sick], failing=("pc-2",))
    assert isinstance(sick.failure, NonFiniteDelta) and sick.failure.leaf in ("a/w", "b")
    assert np.isfinite(np.concatenate([leaf.reshape(-1) for leaf in healthy.params()])).all()
    assert healthy.result.statistics.steps == 8


@pytest.mark.parametrize("check_steps", [0, 2])
def test_parameters_that_differ_are_named_with_their_leaf_and_ranks(check_steps):
    class Drifting(Regression):
        def optimizer(self):
            inner = optax.adam(0.02)

            def update(gradient, state, params=None):
                updates, state = inner.update(gradient, state, params)
                return updates | {"b": updates["b"] * jnp.float32(1 + 1e-6)}, state

            return optax.GradientTransformation(inner.init, update)

    groups = group_of(3)
    processes = [
        Process(
            f"pc-{rank + 1}",
            group,
            batches_of(range(rank, UNITS, 3)),
            program=Drifting() if rank == 1 else REGRESSION,
            check_steps=check_steps,
        )
        for rank, group in enumerate(groups)
    ]
    finish(processes, failing=("pc-1", "pc-2", "pc-3"))
    for process in processes:
        assert isinstance(process.failure, ReplicasDiffer)
        assert (process.failure.leaf, process.failure.ranks) == ("b", (1,))
        assert "leaf b of pc-2 (rank 1)" in str(process.failure)
        assert len(process.run_of.reports) == (check_steps or 4) and len(process.run_of.offers) == 1
