"""Nodes that are killed and started again by the same line go on; a strict run ends with the bits it would have had."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from kept_node import have_saved, train, train_all
from runs import BrokerProcess, batches, broker, parameters, sgd

from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.core.errors import CheckpointError, ConfigError, JoinRefused, ModelMismatch
from zmqtrain.core.settings import RunSettings
from zmqtrain.monitor.ledger import audit, lives_of, releases_of
from zmqtrain.monitor.recorder import BrokerRecorder, NodeRecorder
from zmqtrain.monitor.records import read_records
from zmqtrain.node.connect import connect
from zmqtrain.train.sync import DelayedSync

PROGRAM = Path(__file__).with_name("kept_node.py")
PLAIN = RunSettings(every=4, delay=1, codec="float32", broadcast_codec="float32", outer="sgd:rate=1", lost_seconds=60.0)
"""What is offered lands as it is; and nobody is lost because a thread stands still for a while."""


@contextlib.contextmanager
def killed(address, folder, names, every, at_step):
    """Run nodes in a process of their own up to a step of the first of them; it is killed at the end of the block."""
    facts = json.dumps({"address": address, "folder": str(folder), "names": names, "every": every, "at_step": at_step})
    process = subprocess.Popen([sys.executable, str(PROGRAM), facts], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any(line.split()[:2] == ["step", str(at_step)] for line in process.stdout), "it ended before"
        while not have_saved(folder, names):
            assert process.stdout.readline(), "it ended before it had saved anything"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Course:
    """What a node has said; it stops when its steps, or what is asked of its `sync`, say so."""

    def __init__(self, stop=lambda sync: False, steps=0):
        self.said, self._stop, self._steps = [], stop, steps

    def say(self, *words):
        self.said.append(words)

    def stop(self, sync):
        return bool(self._steps and sync.steps >= self._steps) or self._stop(sync)

    def run(self, address, folder, every="1", **options):
        train(address, folder, "pc-1", every, self.say, self.stop, **options)
        return self.said[0]


def test_a_node_that_is_killed_goes_on_from_its_checkpoint_as_the_node_that_it_was(tmp_path):
    with broker(RunSettings(every=2, delay=1)) as hub:
        with killed(hub.address, tmp_path, ["pc-1"], "0.1s", 60):
            pass
        kept = CheckpointFolder(tmp_path / "pc-1").load()[0]
        before = kept["loop"]["account"]["step"]
        again = Course(steps=before + 40)
        assert again.run(hub.address, tmp_path) == ("began", before, kept["node"]["version"], kept["node"]["peer"])
        assert before > 0 and again.said[-1][0] == "ended"
        statistics = hub.broker.statistics()
        assert statistics.refused == 0, "no number of its former life was used again"


@pytest.mark.parametrize("saved_when", ["it is on its way", "it has landed and is applied"])
def test_what_landed_counts_once_and_what_had_not_is_not_lost(saved_when, tmp_path):
    settings, kept = replace(PLAIN, delay=2, codec="int4"), tmp_path / "kept"
    lives, books = NodeRecorder(tmp_path / "pc-1.jsonl"), BrokerRecorder(tmp_path / "hub.jsonl")
    with books, broker(settings, events=books) as hub:
        with lives, connect(hub.address, "pc-1", checkpoint=kept, checkpoint_every="1000", events=lives) as node:
            params = parameters()
            sync = DelayedSync(node, params)
            for batch in (next(batches(unit)) for unit in range(99)):
                params = sync.step(sgd(params, batch)[0], samples=16)
                applied = sync.statistics().aggregates_applied
                if node.state().in_flight and applied >= 1 and saved_when == "it is on its way":
                    sync.save(params, wait=True)
                    node.wait_update(60, node.state().in_flight[0])  # it has landed, and this life is over
                    break
                if applied >= 2 and not node.state().in_flight and saved_when != "it is on its way":
                    sync.save(params, wait=True)
                    break
                if node.state().in_flight and node.peek() is None:
                    assert node.wait(lambda: node.peek() is not None, 60)
        lives = NodeRecorder(tmp_path / "pc-1.jsonl")
        with lives, connect(hub.address, "pc-1", checkpoint=kept, events=lives) as node:
            version = node.checkpoint.folder.load()[0]["node"]["version"]
            again = DelayedSync(node, parameters())
            assert again.steps == sync.steps
            ended = again.finish(again.start)
        assert hub.broker.hub.samples == 16 * sync.steps, "each sample counts once"
    for name in params:  # of a single node all that it computed lands, and nothing else
        np.testing.assert_allclose(ended[name], params[name], atol=1e-5)
    first, second = lives_of(tmp_path / "pc-1.jsonl")
    assert (first[0]["version"], second[0]["version"]) == (-1, version) and first[0]["peer"] == second[0]["peer"]
    found = audit(releases_of(read_records(tmp_path / "hub.jsonl")), [first, second])
    assert found.faults == () and found.samples == 16 * sync.steps


def test_what_was_pending_at_the_checkpoint_and_offered_after_it_counts_once(tmp_path):
    with broker(PLAIN) as hub:
        with connect(hub.address, "pc-1", checkpoint=tmp_path, checkpoint_every="1000") as node:
            params = parameters()
            sync = DelayedSync(node, params)
            for batch in (next(batches(unit)) for unit in itertools.count()):
                params = sync.step(sgd(params, batch)[0], samples=16)
                if sync.steps == 2:
                    sync.save(params, wait=True)
                if sync.statistics().aggregates_applied:
                    break
                if node.state().in_flight:
                    node.wait(lambda: node.peek() is not None or not node.state().in_flight, 60)
            shared, landed = sync.params, hub.broker.hub.samples
        assert landed > 32
        with connect(hub.address, "pc-1", checkpoint=tmp_path) as node:
            again = DelayedSync(node, parameters())
            ended = again.finish(again.step(again.start, samples=16))
            assert again.steps == 3 and again.take_adoption() is None
        assert hub.broker.hub.samples <= landed + 16, "what was pending at the checkpoint is not offered again"
    for name in ended:
        np.testing.assert_allclose(ended[name], shared[name], atol=1e-6)


def test_what_was_on_its_way_at_the_checkpoint_and_never_came_is_offered_again(tmp_path):
    with broker(replace(PLAIN, every=2)) as hub:
        with connect(hub.address, "pc-1", checkpoint=tmp_path, checkpoint_every="1000") as node:
            node.message_delay = lambda: 3600.0
            params = parameters()
            sync = DelayedSync(node, params)
            for batch in (next(batches(unit)) for unit in itertools.count()):
                params = sync.step(sgd(params, batch)[0], samples=16)
                if node.state().in_flight:
                    break
            sync.save(params, wait=True)
        with connect(hub.address, "pc-1", checkpoint=tmp_path) as node:
            again = DelayedSync(node, parameters())
            again.finish(again.start)
            assert hub.broker.hub.samples == 16 * sync.steps
            shared = again.params
    for name in params:
        np.testing.assert_allclose(shared[name], params[name], atol=1e-5)


def test_a_node_needs_no_hub_to_go_on_and_federates_when_there_is_one(tmp_path, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    settings = RunSettings(every=2, delay=1, heartbeat_seconds=0.1, lost_seconds=0.5)
    with BrokerProcess(settings, tmp_path / "hub", every="1") as hub:
        version = Course(steps=20).run(hub.address, tmp_path)[2]
        hub.kill()
    ended = int(Course(steps=40).run(hub.address, tmp_path, timeout_seconds=0.1)[1])
    assert "nobody answers" in caplog.text and ended == 20
    with BrokerProcess(settings, tmp_path / "hub", hub.port, every="1"):
        began = Course(lambda sync: sync.version > version + 14 and sync.steps > 60).run(hub.address, tmp_path)
        assert began[1] == 40, "what was trained alone is not lost"


def test_a_checkpoint_of_another_run_is_left_only_if_that_is_said(tmp_path):
    with broker(RunSettings(every=2, delay=1)) as hub:
        Course(steps=20).run(hub.address, tmp_path)
    with broker(RunSettings(every=2, delay=1)) as other:
        with pytest.raises(ConfigError, match="is of the node pc-1, not of pc-3: leave the name out"):
            connect(other.address, "pc-3", checkpoint=tmp_path / "pc-1")
        # it has another address, too, at which it looks for its run so long
        with pytest.raises(JoinRefused, match=r"is not of the run at .*say --new-run"):
            connect(other.address, "pc-1", checkpoint=tmp_path / "pc-1", timeout_seconds=3.0)
        assert Course(steps=5).run(other.address, tmp_path, new_run=True, timeout_seconds=3.0)[1:3] == (0, 0)
    assert list((tmp_path / "pc-1").glob("*.former"))


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_the_leaf(tmp_path):
    with broker(RunSettings(every=2, delay=1)) as hub:
        Course(steps=20).run(hub.address, tmp_path)
        other = {"w": jnp.zeros((40, 9)), "b": jnp.zeros(8)}
        same = {"w": jnp.zeros((40, 8)), "b": jnp.zeros(8)}
        for params, state, words in (
            (other, (), r"is of another model: the leaf w is float32\[40,8\] in the checkpoint"),
            (same, (), "loop's state .* are not this program's: .*count"),
        ):
            node = connect(hub.address, "pc-1", checkpoint=tmp_path / "pc-1")
            with node, pytest.raises(ModelMismatch, match=words):
                DelayedSync(node, params, state=state)


def test_a_folder_is_one_nodes_and_lockstep_has_none(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    folder = CheckpointFolder(tmp_path)
    folder.lock()
    with pytest.raises(CheckpointError, match="in use by the process"):
        connect(address, "pc-1", checkpoint=tmp_path)
    folder.save(3, {"run": "run-1"}, {"w": jnp.zeros(3)})
    folder.close()
    with pytest.raises(CheckpointError, match="holds no node's checkpoints"):
        connect(address, "pc-1", checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="where to listen"):  # in the network thread
        connect("tcp://*:5555", "pc-1", checkpoint=tmp_path / "other")
    again = CheckpointFolder(tmp_path / "other")
    again.lock()  # who was refused does not hold it
    again.close()
    with pytest.raises(ConfigError, match="keep no checkpoints"):
        connect(address, "pc-1", checkpoint=tmp_path, exchange="allreduce:ring")


def test_in_strict_mode_a_node_is_told_before_it_joins_how_it_must_save(tmp_path):
    with broker(RunSettings(mode="strict", release="all")) as hub:
        for options, words in (
            ({"checkpoint_every": "60s"}, "in strict mode the broker and all nodes save at the same versions"),
            ({"checkpoint_keep": 1}, "at least 2 in strict mode"),
        ):
            with pytest.raises(ConfigError, match=words):
                connect(hub.address, "pc-1", checkpoint=tmp_path, **options)
        with pytest.raises(ConfigError, match="at least 1, got 0"):
            connect(hub.address, "pc-1", checkpoint=tmp_path, checkpoint_keep=0)
        free = CheckpointFolder(tmp_path)
        free.lock()  # again
        free.close()


STRICT = RunSettings(
    mode="strict",
    release="all",
    every=4,
    delay=6,
    fragments=2,
    start_nodes=2,
    units=36,
    codec="randomk:density=0.5+int8",
    broadcast_codec="lowrank:rank=2",
    outer="nesterov:rate=0.8,momentum=0.5",
    lost_seconds=60.0,
)
"""Codecs that keep a state on both sides, momentum at the hub, AdamW at the nodes; two offers of each are in flight."""


def ends(said):
    return sorted(words for words in said if words[1] == "ended")


def test_a_strict_run_that_is_killed_and_started_again_by_the_same_lines_ends_with_the_same_bits(tmp_path):
    chosen, names = random.Random(5), ["pc-1", "pc-2"]
    with broker(STRICT) as hub:
        quiet = train_all(hub.address, tmp_path / "quiet", names, "3")
    with (
        BrokerProcess(STRICT, tmp_path / "hub", every="3") as hub,
        killed(hub.address, tmp_path, names, "3", chosen.randint(40, 80)),
    ):
        if chosen.random() < 0.5:
            hub.kill()  # it dies first, else last
    with BrokerProcess(STRICT, tmp_path / "hub", hub.port, every="3"):
        again = train_all(hub.address, tmp_path, names, "3")
    assert len(ends(quiet)) == 2 and ends(again) == ends(quiet)
    began = {words[3] for words in again if words[1] == "began"}
    assert len(began) == 1 and began.pop() > 0, "all went back to one version"
