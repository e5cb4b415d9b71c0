"""Nodes in lockstep over real sockets: they end with the same bits, the broker with them, whoever is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.integration.lockstep_node import HELD_BEFORE_STEP, train
from tests.integration.runs import BrokerProcess, broker
from tests.train.processes import REGRESSION, SAMPLES, batches_of
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.broker.standby import ShardPlace
from zmqtrain.core.errors import JoinRefused
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect

BATCHES_OF_A_UNIT = 2
SECONDS = 100.0
HERE = Path(__file__)


def run_of(units, nodes, **settings):
    return RunSettings(
        **{"units": units, "start_nodes": nodes, "initial": "founder", "evaluate_seconds": 0.0, "mode": "default"}
        | {"lost_seconds": 10.0}  # whoever stands still for a moment is not lost
        | settings
    )


class Nodes:
    """Nodes of one run, each in a thread."""

    def __init__(self, hub, exchanges, name="pc", **options):
        self.results, self.failures = {}, {}
        self.threads = [
            threading.Thread(target=self._train, args=(hub, f"{name}-{i + 1}", exchange, options), daemon=True)
            for i, exchange in enumerate(exchanges)
        ]
        for thread in self.threads:
            thread.start()

    def _train(self, hub, name, exchange, options):
        try:
            self.results[name] = train(hub, name, exchange, **options)
        except BaseException as failure:
            self.failures[name] = failure

    def finish(self):
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), (self.results, self.failures)
        return [self.results[name] for name in sorted(self.results)]


@contextlib.contextmanager
def shards_of(settings):
    """The brokers of a run, the first first."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(broker(settings))
        places = [
            ShardPlace(shard=shard, shards=settings.shards, first=first.address) for shard in range(1, settings.shards)
        ]
        others = [stack.enter_context(BrokerThread("tcp://127.0.0.1:0", None, place=place)) for place in places]
        yield [first, *others]


def beginning():
    return [np.asarray(leaf) for leaf in jax.tree.leaves(REGRESSION.init(0))]


def parameters(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.params)]


def same_bits(everyone):
    first, *others = everyone
    for other in others:
        for one, leaf in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, leaf)
    return first


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def in_the_broker(running):
    """The parameters that the broker has: those that a newcomer would get."""
    arrays = running.broker.aggregator.arrays()
    return [arrays["published/a/w"], arrays["published/b"]]


@pytest.mark.parametrize(
    "exchange", ["allreduce:ring", "allreduce:tree,check=3", "allreduce:overlap=next", "allreduce:codec=bf16"]
)
def test_all_end_with_the_same_bits_and_the_broker_with_them(exchange):
    with broker(run_of(9, 3)) as running:
        nodes = Nodes(running.address, [exchange] * 3)
        results = nodes.finish()
        assert not nodes.failures
        final = same_bits([parameters(result) for result in results])
        close(final, in_the_broker(running))
        assert running.broker.hub.version >= 1
        assert running.broker.hub.samples == 9 * BATCHES_OF_A_UNIT * SAMPLES
    assert sum(result.samples for result in results) == 9 * BATCHES_OF_A_UNIT * SAMPLES
    assert len({result.statistics.steps for result in results}) == 1
    assert all((one != leaf).any() for one, leaf in zip(final, beginning(), strict=True))


@pytest.mark.parametrize("exchange", ["server:bsp", "server:async", "server:bounded:s=1"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("units", [9, 1])  # of one unit two of the nodes get nothing
def test_through_a_server_all_end_with_its_weights_and_the_run_with_them(exchange, shards, units):
    with shards_of(run_of(units, 3, shards=shards)) as running:
        nodes = Nodes(running[0].address, [f"{exchange},shards={shards},optimizer=adam:rate=0.02"] * 3)
        results = nodes.finish()
        assert not nodes.failures
        final = same_bits([parameters(result) for result in results])
        assert running[0].broker.hub.samples == units * BATCHES_OF_A_UNIT * SAMPLES
        if shards == 1:
            close(final, in_the_broker(running[0]))
    assert sum(result.samples for result in results) == units * BATCHES_OF_A_UNIT * SAMPLES
    assert all((one != leaf).any() for one, leaf in zip(final, beginning(), strict=True))


def test_bulk_synchronous_steps_of_a_server_are_those_of_the_mean_gradient():
    units = 6
    # in strict mode a node waits so long for a data unit
    settings = run_of(units, 2, mode="strict", release="all", heartbeat_seconds=0.1, lost_seconds=2.5)
    with broker(settings) as running:
        results = Nodes(running.address, ["server:bsp,optimizer=sgd:rate=0.1"] * 2).finish()
        final = same_bits([parameters(result) for result in results])
    params = REGRESSION.init(0)
    for first, second in zip(batches_of(range(0, units, 2)), batches_of(range(1, units, 2)), strict=True):
        gradients = [jax.grad(REGRESSION.loss)(params, batch) for batch in (first, second)]
        params = jax.tree.map(lambda p, one, other: p - 0.1 * (one + other) / 2, params, *gradients)
    close(final, [np.asarray(leaf) for leaf in jax.tree.leaves(params)])


def test_a_run_of_another_number_of_shards_is_refused():
    with broker(run_of(2, 1)) as running:
        nodes = Nodes(running.address, ["server:shards=4"])
        nodes.finish()
    assert "--shards 4 was asked for, and this run has 1" in str(nodes.failures["pc-1"])


def test_a_run_of_one_node_that_says_how_many_begin_waits_for_them():
    with broker(run_of(4, 1)) as running:
        results = Nodes(running.address, ["allreduce:size=2"] * 2).finish()
        same_bits([parameters(result) for result in results])
        assert len(results) == 2


def test_the_final_parameters_of_an_allreduce_reach_several_shards_too():
    with shards_of(run_of(6, 2, shards=2)) as running:
        nodes = Nodes(running[0].address, ["allreduce:ring"] * 2)
        results = nodes.finish()
        assert not nodes.failures
        final = same_bits([parameters(result) for result in results])
        assert min(one.broker.hub.version for one in running) >= 1
    assert all((one != leaf).any() for one, leaf in zip(final, beginning(), strict=True))


def test_another_exchange_in_the_same_run_is_refused_with_both_named():
    with broker(run_of(0, 1)) as running, connect(running.address, "pc-1", exchange="allreduce:algorithm=ring"):
        with pytest.raises(JoinRefused, match="pc-2 would train with no --exchange, and pc-1, which is in this run"):
            connect(running.address, "pc-2")
        with pytest.raises(JoinRefused, match="--exchange server:consistency=bsp"):
            connect(running.address, "pc-3", exchange="server:consistency=bsp")


def test_who_comes_later_is_refused_and_the_others_do_not_notice():
    asked, made = threading.Event(), Count()
    options = {"stop": asked.is_set, "watch": watch_steps(made)}
    with broker(run_of(0, 2)) as running:
        nodes = Nodes(running.address, ["allreduce:ring"] * 2, **options)
        made.wait(3)
        late = Nodes(running.address, ["allreduce:ring"], name="late")
        late.finish()
        made.wait(made.count + 3)
        asked.set()
        results = nodes.finish()
        assert not nodes.failures
        close(same_bits([parameters(result) for result in results]), in_the_broker(running))
    assert isinstance(late.failures["late-1"], JoinRefused), late.failures
    assert "keeps the 2 nodes that it began with" in str(late.failures["late-1"])


def test_a_worker_of_an_asynchronous_server_may_come_later():
    exchange, made, joined = "server:async,optimizer=sgd:rate=0.02", Count(), threading.Event()
    with broker(run_of(40, 1)) as running:
        first = Nodes(running.address, [exchange], before_step=made.held(5, joined), watch=watch_steps(made))
        made.wait(5)
        late = Nodes(running.address, [exchange], name="late", before_step=joined.set)
        results = first.finish() + late.finish()
        assert not first.failures and not late.failures
        close(same_bits([parameters(result) for result in results]), in_the_broker(running))
    assert results[1].samples > 0 and sum(result.samples for result in results) == 40 * BATCHES_OF_A_UNIT * SAMPLES


def test_a_broker_that_is_restarted_in_mid_run_is_found_again_and_the_nodes_go_on_meanwhile(tmp_path):
    settings = run_of(40, 2, heartbeat_seconds=0.1)
    made, killed = Count(), threading.Event()
    with BrokerProcess(settings, tmp_path) as hub:
        options = {"before_step": made.held(10, killed), "watch": watch_steps(made)}
        nodes = Nodes(hub.address, ["allreduce:ring"] * 2, **options)
        made.wait(10)
        hub.kill()
        killed.set()
        made.wait(made.count + 20)
        with BrokerProcess(settings, tmp_path, hub.port) as again:
            results = nodes.finish()
            assert not nodes.failures, nodes.failures
            same_bits([parameters(result) for result in results])
            assert again.process.wait(SECONDS) == 0, "the run is over"


class Count:
    """Counts, and waits until it has come so far."""

    def __init__(self):
        self.changed, self.count = threading.Condition(), 0

    def add(self):
        with self.changed:
            self.count += 1
            self.changed.notify_all()

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, SECONDS), self.count

    def held(self, count, event):
        """Return what waits for the event, once it has come so far."""
        return lambda: self.count < count or event.wait(SECONDS)


def watch_steps(count):
    return lambda step, loss: count.add()


def start(hub, name, exchange, folder, *held):
    command = [sys.executable, str(HERE.with_name("lockstep_node.py")), hub, name, exchange, str(folder / name), *held]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=HERE.parents[2], **pipes)


class Watch:
    """Waits for what a broker's roster says."""

    def __init__(self):
        self.changed, self.roster = threading.Condition(), None

    def __call__(self, roster):
        with self.changed:
            self.roster = roster
            self.changed.notify_all()

    def wait(self, condition):
        with self.changed:
            came = self.changed.wait_for(lambda: self.roster is not None and condition(self.roster), SECONDS)
        assert came, self.roster


def ended(processes, folder):
    words = {name: process.communicate(timeout=SECONDS)[1] for name, process in processes.items()}
    assert all(process.returncode == 0 for process in processes.values()), words
    loaded = [np.load(folder / f"{name}.npz") for name in sorted(processes)]
    return [[one[key] for key in ("arr_0", "arr_1")] for one in loaded], loaded, words


def kill_in_mid_run(exchange, folder):
    """Kill pc-2 of three processes with -9 while the others wait for it in a step.

    Return the broker's parameters and what the others say.
    """
    watch, units, done = Watch(), 90, HELD_BEFORE_STEP - 1
    with broker(run_of(units, 3), watch=watch) as running:
        processes = {name: start(running.address, name, exchange, folder) for name in ("pc-1", "pc-3")}
        processes["pc-2"] = killed = start(running.address, "pc-2", exchange, folder, "held")
        try:
            try:
                watch.wait(lambda roster: any(m["name"] == "pc-2" and m.get("step", 0) >= done for m in roster.members))
            except AssertionError as error:
                for process in processes.values():
                    process.kill()
                words = {name: process.communicate()[1] for name, process in processes.items()}
                raise AssertionError(f"pc-2 does not come to step {done}; they said {words}") from error
            del processes["pc-2"]
            killed.kill()
            killed.communicate()
            params, figures, words = ended(processes, folder)
        finally:
            for process in processes.values():
                process.kill()
        assert running.broker.hub.units.ledger.done_count == units
        return params, in_the_broker(running), figures, words


def test_killed_with_9_in_mid_run_the_others_go_on_to_the_end_with_the_same_bits(tmp_path):
    params, published, figures, words = kill_in_mid_run("allreduce:ring", tmp_path)
    close(same_bits(params), published)
    assert int(figures[0]["steps"]) == int(figures[1]["steps"])
    assert all("pc-2 is lost" in said and "2 are left: " in said for said in words.values()), words


def test_killed_with_9_in_mid_run_the_other_workers_of_a_server_go_on(tmp_path):
    params, published, _, _ = kill_in_mid_run("server:bsp", tmp_path)
    close(same_bits(params), published)
