"""Nodes serve the shards of a run beside the first broker, when that asks them to: real processes and sockets."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from runs import Trainer, batches, broker, loss, parameters, sgd
from safetensors.numpy import load_file

from zmqtrain.core.errors import HubUnreachable, JoinRefused
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect
from zmqtrain.node.shards import ShardedNode
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.address import split_key
from zmqtrain.transport.key_folder import KeyFolder
from zmqtrain.transport.zmq_keys import CurveKeys

SETTINGS = {
    "every": 2, "delay": 1, "heartbeat_seconds": 0.1, "lost_seconds": 10.0, "initial": "founder", "start_nodes": 2,
}  # fmt: skip


def wide():
    """The tiny model, and a leaf of eight blocks beside it."""
    return parameters() | {"wide": jnp.zeros((8, 4096))}


RISES = 0.01 * (1 + np.arange(8, dtype=np.float32)[:, None])
"""By how much each step moves the rows of the wide leaf, of which every shard has other ones."""


def risen(before, after):
    return after | {"wide": before["wide"] + RISES}


def two_trainers(first, move=lambda before, after: after):
    return [Trainer(first.address, name, params=wide(), move=move) for name in ("pc-1", "pc-2")]


def end(trainers):
    for trainer in trainers:
        trainer.stop.set()
    for trainer in trainers:
        trainer.join()


def exchanged(trainer, shards):
    return trainer.sync is not None and all(line.statistics().version > 3 for line in trainer.node._lines[:shards])


def hosts(trainer):
    hosted = trainer.node._first._hosted
    return None if hosted is None else hosted._process


def taken_over(trainer):
    """Wait until a node exchanges with a broker that has taken a shard over; return its line there."""
    trainer.wait_until(lambda: any(line.peer.term == 1 for line in trainer.node._lines))
    return next(line for line in trainer.node._lines if line.peer.term == 1)


def test_shards_are_served_by_nodes_and_what_is_left_by_the_hub_and_the_model_is_whole_there(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "zmqtrain")
    monkeypatch.chdir(tmp_path)  # where the brokers of nodes save
    run = RunSettings(**SETTINGS, shards=4, codec="float32", broadcast_codec="float32")
    with broker(run, checkpoint=tmp_path / "hub", hosting=True) as first:
        trainers = two_trainers(first, risen)
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 4))
        assert all(hosts(trainer) is not None for trainer in trainers), "each node serves a shard"
        assert "no node serves shard 3" in caplog.text
        leaves, stays = trainers
        leaves.stop.set()
        leaves.join()
        moved = taken_over(stays)
        seen = moved.statistics().version
        stays.wait_until(lambda: moved.statistics().version > seen + 5)
        stays.node.report_scores({"loss": 0.5}, stays.sync.version)
        stays.wait_until(lambda: first.broker.keeper._best is not None)
        seen = moved.statistics().version
        stays.wait_until(lambda: moved.statistics().version > seen + 5)
        stays.stop.set()
        params = stays.join()
    held_out = next(batches(10**6))
    assert loss(params, held_out) < loss(parameters(), held_out) / 2
    model = load_file(tmp_path / "hub" / "model.safetensors")
    best = load_file(tmp_path / "hub" / "model-best.safetensors")
    for name in params:
        np.testing.assert_allclose(model[name], params[name], atol=1e-6)
    assert any((best[name] != model[name]).any() for name in params), "some versions before"
    steps, last = best["wide"] / RISES, model["wide"] / RISES  # that each shard's part of both stands for
    assert (steps < last).all() and (steps > 0.3 * last).all(), "each shard's part is of then, not of the beginning"
    assert loss(best, held_out) < loss(parameters(), held_out) / 2


def test_what_a_killed_broker_of_a_node_had_is_served_on_at_the_hub_and_nothing_stalls(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    monkeypatch.chdir(tmp_path)
    with broker(RunSettings(**SETTINGS, shards=3), checkpoint=tmp_path / "hub", hosting=True) as first:
        trainers = two_trainers(first)
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 3))
            trainer.wait_until(
                lambda t=trainer: all(
                    line.roster is not None and line.roster.hub["standby"] for line in t.node._lines[1:]
                )
            )
        os.kill(hosts(trainers[0]).pid, signal.SIGKILL)
        for trainer in trainers:
            line = taken_over(trainer)
            seen = line.statistics().version
            trainer.wait_until(lambda line=line, seen=seen: line.statistics().version > seen + 5)
        trainers[0].wait_until(lambda: hosts(trainers[0]) is None)  # it has told the first
        for trainer in trainers:
            trainer.stop.set()
            params = trainer.join()
    assert "takes over" in caplog.text
    model = load_file(tmp_path / "hub" / "model.safetensors")
    for name in params:
        np.testing.assert_allclose(model[name], params[name], atol=1e-6)
    assert not Path(tmp_path / "hub" / "shard-3").exists()


def test_after_a_power_cut_the_run_goes_on_from_what_the_hub_has_saved_of_all_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("zmqtrain.broker.broker.RETURN_SECONDS", 0.5)  # no broker of a node comes back
    run, folder = RunSettings(**SETTINGS, shards=3), tmp_path / "hub"

    def saved(shard):
        names = (path.stem for path in (folder / f"shard-{shard}").glob("checkpoint-*.safetensors"))
        return max((int(name.partition("-")[2]) for name in names), default=-1)

    with broker(run, checkpoint=folder, hosting=True, checkpoint_every="0.2s", checkpoint_keep=10**6) as first:
        trainers = two_trainers(first)
        for trainer in trainers:
            trainer.wait_until(lambda: saved(1) > 3 and saved(2) > 3)
        half_written = shutil.ignore_patterns("*.part")
        shutil.copytree(folder, tmp_path / "after", ignore=half_written)  # as the disk is at that moment
        end(trainers)
    folder = tmp_path / "after"
    versions = [saved(shard) for shard in (1, 2)]
    with broker(run, checkpoint=folder, hosting=True) as first:
        trainers = two_trainers(first)
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 3))
            for line, version in zip(trainer.node._lines[1:], versions, strict=True):
                assert line.statistics().version >= version > 3
                trainer.wait_until(lambda line=line, version=version: line.statistics().version > version + 3)
            assert hosts(trainer) is None, "the hub serves what only it has"
        end(trainers)


def comes_in(address, keys):
    try:
        connect(address, keys=keys, observer=True, timeout_seconds=1.0).close()
    except (HubUnreachable, JoinRefused):
        return False
    return True


def test_with_keys_the_broker_of_a_node_lets_in_who_comes_in_at_the_hub_and_nobody_else(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    monkeypatch.chdir(tmp_path)
    folder = KeyFolder(tmp_path / "keys")
    pcs = dict(zip(("pc-1", "pc-2", "pc-3"), map(CurveKeys.load, folder.new(["pc-1", "pc-2", "pc-3"])), strict=True))
    with broker(RunSettings(**SETTINGS, shards=3), checkpoint=tmp_path / "hub", hosting=True, keys=folder) as first:
        trainers = [Trainer(first.address, name, params=wide(), keys=pcs[name]) for name in pcs]
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 3))
        serving = [trainer for trainer in trainers if hosts(trainer) is not None]
        assert len(serving) == 2
        address = trainers[0].node._first.shards[1]
        plain, key = split_key(address)
        assert key not in (None, folder.hub().public), "its port has keys of its own"
        of_hub, stranger = (replace(one, server=folder.hub().public) for one in (folder.hub(), CurveKeys.generate()))
        assert comes_in(address, of_hub) and comes_in(address, pcs["pc-3"])
        assert not comes_in(address, stranger) and not comes_in(plain, pcs["pc-3"]) and not comes_in(plain, None)
        gone = next(trainer for trainer in trainers if trainer not in serving)
        folder.revoke(gone.name)
        with pytest.raises(JoinRefused, match="revoked"):
            gone.wait_until(lambda: False)
        serving[0].wait_until(lambda: not comes_in(address, pcs[gone.name]))
        os.kill(hosts(serving[0]).pid, signal.SIGKILL)
        for trainer in serving:
            line = taken_over(trainer)
            seen = line.statistics().version
            trainer.wait_until(lambda line=line, seen=seen: line.statistics().version > seen + 5)
        end(serving)
    assert set(load_file(tmp_path / "hub" / "model.safetensors")) == set(wide())


def test_a_node_whose_port_the_hub_does_not_reach_serves_nothing_and_another_does(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    monkeypatch.chdir(tmp_path)
    for name in ("REACH_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(f"zmqtrain.broker.serve.{name}", 1.0)
    begin = subprocess.Popen
    behind_a_firewall = ["--address", "tcp://127.0.0.1:1"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: begin(command + behind_a_firewall, **options))
    with broker(RunSettings(**SETTINGS, shards=2), checkpoint=tmp_path / "hub", hosting=True) as first:
        trainers = two_trainers(first)
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 2))
            trainer.wait_until(lambda t=trainer: hosts(t) is None)  # it has seen its broker's end, and told the first
        here, steps = trainers[0].node._first.shards, trainers[0].steps
        until = time.monotonic() + 4.0  # what has failed before is not begun again
        trainers[0].wait_until(lambda: time.monotonic() > until and trainers[0].steps > steps)
        assert trainers[0].node._first.shards == here and caplog.text.count("no node serves shard 1") == 1
        end(trainers)
    assert "does not reach it" in caplog.text and "this machine does" in caplog.text
    assert set(load_file(tmp_path / "hub" / "model.safetensors")) == set(wide())


def test_a_shard_whose_broker_two_later_nodes_do_not_reach_is_taken_over_by_the_hub(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    monkeypatch.chdir(tmp_path)
    with broker(RunSettings(**SETTINGS, shards=2), checkpoint=tmp_path / "hub", hosting=True) as first:
        trainers = two_trainers(first)
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 2))
        served_at, open_line = trainers[0].node._first.shards[1], ShardedNode.open_line

        def past_a_firewall(self, address):
            self._wait_seconds = 2.0 if address == served_at else 10.0
            return open_line(self, "tcp://127.0.0.1:1" if address == served_at else address)

        monkeypatch.setattr(ShardedNode, "open_line", past_a_firewall)
        late = [Trainer(first.address, name, params=wide()) for name in ("pc-3", "pc-4")]
        trainers += late
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 2))
            line = taken_over(trainer)
            seen = line.statistics().version
            trainer.wait_until(lambda line=line, seen=seen: line.statistics().version > seen + 5)
        end(trainers)


def test_where_many_nodes_begin_together_the_hub_divides_the_model_among_them_by_itself(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    monkeypatch.chdir(tmp_path)
    run = RunSettings(start_nodes=5, heartbeat_seconds=0.1, lost_seconds=10.0)
    large = parameters() | {"wide": jnp.zeros((24, 4096))}
    with broker(run, checkpoint=tmp_path / "hub", hosting=True) as first:
        trainers = [Trainer(first.address, f"pc-{number}", params=large) for number in range(5)]
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 6))
        assert trainers[0].node.settings.shards == 6 and all(map(hosts, trainers))
        end(trainers)
    assert "the model is divided among 6 brokers" in caplog.text
    assert set(load_file(tmp_path / "hub" / "model.safetensors")) == set(large)


def test_where_a_firewall_closes_the_hubs_other_ports_many_nodes_train_with_one_broker(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("zmqtrain.node.hosting.why_unanswered", lambda address, seconds: "Connection timed out")
    run = RunSettings(start_nodes=5, heartbeat_seconds=0.1, lost_seconds=10.0, initial="founder")
    large = parameters() | {"wide": jnp.zeros((24, 4096))}
    with broker(run, checkpoint=tmp_path / "hub", hosting=True) as first:
        trainers = [Trainer(first.address, f"pc-{number}", params=large) for number in range(5)]
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: exchanged(t, 1))
        assert trainers[0].node.settings.shards == 1 and not any(map(hosts, trainers))
        end(trainers)
    assert "the model is not divided" in caplog.text and "Connection timed out" in caplog.text


def test_where_one_of_many_nodes_needs_the_whole_model_at_one_broker_it_stays_whole(tmp_path):
    run = RunSettings(
        shards="auto", start_nodes=5, heartbeat_seconds=0.1, lost_seconds=10.0, initial="founder", units=5
    )
    with broker(run, checkpoint=tmp_path / "hub", hosting=True) as first:
        kept = connect(first.address, "pc-0", checkpoint=tmp_path / "kept")
        trainers = [Trainer(first.address, f"pc-{number}", params=wide()) for number in range(1, 5)]
        with kept:
            sync = DelayedSync(kept, wide())
            assert sync.settings.shards == 1 and all(hosts(trainer) is None for trainer in trainers)
            params = sync.params
            for batch in kept.batches(batches):
                params, value = sgd(params, batch)
                params = sync.step(params, score=value, samples=16)
            sync.finish(params)
        for trainer in trainers:
            trainer.join()
