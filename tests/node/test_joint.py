"""A node of several processes: all of them have the answers of the first, and end alike whatever happens at it."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clocks import VirtualClock
from tests.fixed import fixed_run
from tests.train.scripted_exchange import ScriptedExchange, add, tree, value
from zmqtrain.core.errors import (
    AggregateTimeout,
    ConfigError,
    DataError,
    HubUnreachable,
    ModelMismatch,
    NonFiniteDelta,
    PeerLost,
    ZmqTrainError,
)
from zmqtrain.core.types import Part, Update
from zmqtrain.node import joint
from zmqtrain.node.joint import JointNode, check_joint, connect_as_one
from zmqtrain.train.processes import windows
from zmqtrain.train.sync import DelayedSync

SECONDS = 20.0


class Table:
    """What processes that are threads tell each other; each call waits for all, as a collective does."""

    def __init__(self, count):
        self.barrier, self.laid, self.told, self.waits = threading.Barrier(count, timeout=SECONDS), [None] * count, 0, 0
        self.waited = threading.Semaphore(0)
        """Released each time that all have heard that the first one waits."""


class ThreadLine:
    """One process's line. As on a real one, messages are JSON and arrays flat and float32."""

    def __init__(self, table, index):
        self.table, self.index, self.count, self.is_first = table, index, len(table.laid), index == 0

    def exchange(self, what):
        self.table.laid[self.index] = what
        self.table.barrier.wait()
        laid = list(self.table.laid)
        self.table.barrier.wait()
        return laid

    def tell(self, message=None, arrays=()):
        if self.is_first:
            self.table.told += 1
            self.table.waits += "waits" in message
            message = json.dumps(message), [np.array(array, np.float32).reshape(-1) for array in arrays]
        text, flat = self.exchange(message)[0]
        heard = json.loads(text)
        if self.is_first and "waits" in heard:
            self.table.waited.release()
        return heard, flat

    def gather(self, numbers):
        return self.exchange(list(numbers))


class Leader(ScriptedExchange):
    """The first process's node: its hub is the test's script. batches: of two units, of two batches each."""

    closed = False

    def __init__(self, anchor=None, **settings):
        super().__init__(anchor, **settings)
        self.between = lambda: None

    @property
    def population(self):
        return None

    def batches_as_they_come(self, source, wait_seconds):
        for unit in (4, 7):
            self.between()
            yield None
            yield from source(unit)

    def describe(self, **facts):
        self.facts = getattr(self, "facts", {}) | {name: fact for name, fact in facts.items() if fact is not None}

    def close(self, reason=""):
        self.closed = True


def together(leader, main, count=3):
    """Run main(node, index) in `count` processes; return the result of each, or the error that it raised."""
    leader.table = table = Table(count)
    results = [None] * count

    def process(index):
        try:
            node = JointNode(leader if index == 0 else None, ThreadLine(table, index))
            results[index] = main(node, index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=process, args=[index], daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return table, results


def walk(node, steps=9, before=lambda step: None):
    """Train for some steps; return parameters, anchor and what the loop knows of the run, in numbers."""
    sync = DelayedSync(node, tree())
    params = sync.start
    for step in range(steps):
        before(step)
        params = sync.step(add(params), score=1.0, samples=4)
    params = sync.finish(params)
    figures = sync.statistics()
    return value(params), value(sync.params), figures.steps, figures.offers, figures.version, sync.run_samples


class Landing(Leader):
    """Each offer lands with others' progress at the step after it, or in the drain."""

    offered_at = 0

    def offer(self, fragment, segments, counts, *, dense=False):
        self.offered_at = -1 if dense else len(self.reports)
        return super().offer(fragment, segments, counts, dense=dense)

    def peek(self):
        if self.on_the_way and not self.landing and len(self.reports) > self.offered_at:
            self.land(*self.on_the_way, others=10.0, nodes=2)
        return super().peek()

    def poll(self):
        self.peek()
        return super().poll()


def test_all_processes_train_as_the_one_node_that_they_are():
    alone = walk(Landing(every=2, delay=1))
    table, (first, *others) = together(Landing(every=2, delay=1), lambda node, index: walk(node))
    assert first == alone and others == [first, first]
    assert alone[0] == alone[1] != 9.0
    assert table.told > 0


def test_what_the_node_trains_on_is_described_once():
    leader = Leader(every=2)
    together(leader, lambda node, index: DelayedSync(node, tree()).step(add(tree())))
    assert leader.facts["device"] == "cpu" and leader.facts["first_step"]


def test_a_step_without_news_costs_one_message():
    told = []

    def main(node, index):
        sync = DelayedSync(node, tree())
        params = sync.start
        for _ in range(5):
            before = node._line.table.told
            params = sync.step(add(params))
            if index == 0:
                told.append(node._line.table.told - before)

    together(Leader(every=100), main)
    assert told == [1] * 5


def test_a_newcomer_begins_in_all_processes_with_the_parameters_of_the_run():
    anchor = [Part(0, 0, np.full((2,), 5.0, np.float32)), Part(1, 0, np.full((2, 3), 5.0, np.float32))]
    _, results = together(Leader(anchor), lambda node, index: value(DelayedSync(node, tree()).start))
    assert results == [5.0] * 3


def test_a_reset_and_an_adopted_optimizer_reach_all_processes():
    leader = Leader(every=2)
    moments = [np.arange(3, dtype=np.float32), np.zeros(0, np.float32)]

    def main(node, index):
        sync = DelayedSync(node, tree())
        params = sync.step(add(sync.start))
        if index == 0:
            parts = [Part(0, 0, np.full(2, -1.0, np.float32)), Part(1, 0, np.full((2, 3), -1.0, np.float32))]
            leader.landing.append(Update(7, {}, {}, anchor=parts, reset=True, optimizer_state=moments))
            leader.version = 7
        params = sync.step(add(params))
        state = sync.take_adoption().optimizer_state
        return value(params), sync.version, [one.tolist() for one in state]

    _, results = together(leader, main)
    assert results == [(-1.0, 7, [[0.0, 1.0, 2.0], []])] * 3


def test_every_bit_of_an_update_reaches_all_processes():
    odd = np.array([-0.0, 1e-42, np.finfo(np.float32).max, -1e-30], np.float32)
    update = Update(3, {0: [odd], 2: [odd[:1], odd[1:]]}, {2: [odd[:1], odd[1:]]}, (5, 6), warm=True)
    facts, arrays = joint._packed(update)
    again = joint._unpacked(json.loads(json.dumps(facts)), [np.array(one) for one in arrays])
    assert (again.version, again.landed, again.reset, again.keep, again.warm) == (3, (5, 6), False, False, True)
    for ours, theirs in ((update.aggregate, again.aggregate), (update.own, again.own)):
        assert ours.keys() == theirs.keys()
        for fragment in ours:
            assert [one.tobytes() for one in ours[fragment]] == [one.tobytes() for one in theirs[fragment]]
    assert joint._unpacked(*joint._packed(None)) is None


# ---------------------------------------------------------------------- what goes wrong goes wrong everywhere


class Diverging(Leader):
    def offer(self, *arguments, **options):
        raise NonFiniteDelta("w is not finite", "w")


def test_what_the_node_raises_is_raised_in_all_processes():
    _, results = together(Diverging(every=2), lambda node, index: walk(node))
    assert [type(one) for one in results] == [NonFiniteDelta] * 3


class Unreadable(Leader):
    def statistics(self):
        if self.reports:
            raise MemoryError("no room")
        return super().statistics()


def test_an_error_after_the_answer_is_raised_in_all_processes():
    _, (first, *others) = together(Unreadable(every=2), lambda node, index: walk(node))
    assert isinstance(first, MemoryError) and [type(one) for one in others] == [ZmqTrainError] * 2


class Stopping(Leader):
    def state(self):
        return super().state()._replace(stopped=len(self.reports) >= 3)


def test_an_operator_ends_the_run_at_the_same_step_of_all_processes():
    leader = Stopping(every=2)
    leader.lands_at_once = True
    _, results = together(leader, lambda node, index: _steps_until_stopped(node))
    assert len(set(results)) == 1 and isinstance(results[0], int) and leader.closed


def _steps_until_stopped(node):
    steps = 0
    with DelayedSync(node, tree()) as sync:
        params = sync.start
        while True:
            params = sync.step(add(params))
            steps += 1
    return steps


class Interrupted(Leader):
    def offer(self, *arguments, **options):
        raise KeyboardInterrupt


def test_the_others_hear_that_the_first_process_has_ended():
    _, (first, *others) = together(Interrupted(every=2), lambda node, index: walk(node))
    assert isinstance(first, KeyboardInterrupt)
    assert [type(one) for one in others] == [ZmqTrainError] * 2 and "KeyboardInterrupt" in str(others[0])


@pytest.mark.parametrize(("kind", "found"), [("HubUnreachable", HubUnreachable), ("PeerLost", ZmqTrainError),
                                             ("ValueError", ZmqTrainError)])  # fmt: skip
def test_an_error_is_of_its_own_class_where_that_is_one_of_ours(kind, found):
    assert type(joint._error(kind, "why")) is found and "why" in str(joint._error(kind, "why"))
    assert issubclass(PeerLost, ZmqTrainError)


def test_parameters_that_differ_are_refused_in_all_processes_by_name():
    def main(node, index):
        params = tree()
        if index == 2:
            params["w"] = params["w"] + 1.0
        DelayedSync(node, params)

    _, results = together(Leader(), main)
    assert [type(one) for one in results] == [ModelMismatch] * 3 and {one.leaf for one in results} == {"w"}


def test_trees_that_differ_are_refused_in_all_processes():
    _, results = together(Leader(), lambda node, index: DelayedSync(node, {"b": tree()["b"]} if index else tree()))
    assert [type(one) for one in results] == [ModelMismatch] * 3 and {one.leaf for one in results} == {""}


# ---------------------------------------------------------------------- waiting


class Waiting(Leader):
    """It is let in once the others have heard twice that it waits."""

    def join(self, *arguments, **options):
        for _ in range(2):
            assert self.table.waited.acquire(timeout=SECONDS)
        return super().join(*arguments, **options)


def test_the_others_hear_that_the_first_process_still_waits(monkeypatch):
    monkeypatch.setattr(joint, "TELL_SECONDS", 0.02)
    table, results = together(Waiting(every=2), lambda node, index: value(DelayedSync(node, tree()).start))
    assert results == [0.0] * 3 and table.waits >= 2


class Late(Leader):
    """In strict mode, where the aggregate comes at the third time that it is waited for."""

    late = 2

    def wait_update(self, timeout_seconds, sequence):
        if self.late:
            self.late -= 1
            raise AggregateTimeout("nothing yet")
        self.land(sequence, others=10.0)
        return super().wait_update(timeout_seconds, sequence)


def test_an_aggregate_that_is_late_is_awaited_by_all_processes():
    _, results = together(Late(every=2, delay=1, mode="strict", release="all"), lambda node, index: _steps(node, 3))
    assert results == [(13.0, 12.0)] * 3


class Withdrawing(Late):
    late = 10**6

    def wait_update(self, timeout_seconds, sequence):
        self.withdraw(sequence)
        return super().wait_update(timeout_seconds, sequence)


def test_an_offer_that_is_withdrawn_meanwhile_is_awaited_by_none():
    settings = {"every": 2, "delay": 1, "mode": "strict", "release": "all"}
    _, results = together(Withdrawing(**settings), lambda node, index: _steps(node, 3))
    assert results == [(3.0, 0.0)] * 3


def _steps(node, count):
    sync = DelayedSync(node, tree())
    params = sync.start
    for _ in range(count):
        params = sync.step(add(params))
    return value(params), value(sync.params)


def test_all_processes_give_up_the_drain_at_the_same_time():
    leader = Leader(every=2, lost_seconds=0.1)  # nothing ever lands

    def main(node, index):
        if index:
            node.clock = VirtualClock(now=1e6 * index)  # other PCs have other clocks
        sync = DelayedSync(node, tree())
        params = sync.start
        for _ in range(3):
            params = sync.step(add(params))
        return value(sync.finish(params, timeout_seconds=0.5))

    _, results = together(leader, main)
    assert results == [3.0] * 3


# ---------------------------------------------------------------------- data


def numbers(unit, count=2):
    return iter(range(10 * unit, 10 * unit + count))


def test_all_processes_get_the_batches_of_the_same_units():
    table, results = together(Leader(), lambda node, index: list(node.batches(numbers)))
    assert results == [[40, 41, 70, 71]] * 3 and table.waits == 2


class Units:
    def batches(self, unit):
        return numbers(unit)


def test_a_program_gives_batches_too():
    _, results = together(Leader(), lambda node, index: list(node.batches(Units())))
    assert results == [[40, 41, 70, 71]] * 3


@pytest.mark.parametrize("count", [1, 3])
def test_a_process_with_other_batches_than_the_first_says_so(count):
    def main(node, index):
        return list(node.batches(lambda unit: numbers(unit, count if index else 2)))

    table = Table(2)
    results = [None, None]

    def process(index):
        try:
            node = JointNode(Leader() if index == 0 else None, ThreadLine(table, index))
            results[index] = main(node, index)
        except BaseException as error:
            results[index] = error
            table.barrier.abort()  # as the others of a process that has ended

    threads = [threading.Thread(target=process, args=[index], daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert isinstance(results[1], DataError) and ("fewer" if count == 1 else "more") in str(results[1])


# ---------------------------------------------------------------------- which runs


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"shards": 2, "initial": "founder"}, "--shards"),
        ({"initial": "mean", "start_nodes": 2}, "--initial mean"),
        ({"initial": "best", "start_nodes": 2}, "--initial best"),
        ({"initial": "own"}, "--initial own"),
    ],
)
def test_a_run_that_such_a_node_cannot_join_is_refused(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        check_joint(fixed_run(**settings))


def test_a_run_that_begins_with_one_node_or_with_the_founder_is_taken():
    check_joint(fixed_run(initial="best", start_nodes=1))
    check_joint(fixed_run(initial="founder", start_nodes=4))


def test_without_a_hub_the_error_is_that_of_connect():
    with pytest.raises(HubUnreachable):
        connect_as_one("tcp://127.0.0.1:9", timeout_seconds=0.1)


# ---------------------------------------------------------------------- pieces


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 25))
def test_the_pieces_are_all_of_the_arrays_in_their_order(sizes, most):
    cut = list(windows(sizes, most))
    lengths = [sum(end - start for _, start, end in window) for window in cut]
    assert all(length == most for length in lengths[:-1]) and all(0 < length <= most for length in lengths[-1:])
    laid = [(i, at) for window in cut for i, start, end in window for at in range(start, end)]
    assert laid == [(i, at) for i, size in enumerate(sizes) for at in range(size)]
