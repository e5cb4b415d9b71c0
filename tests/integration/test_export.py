"""The model is taken out of a run that runs, that was killed and that has ended, on 127.0.0.1."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from runs import BrokerProcess, Trainer, broker, parameters

import zmqtrain as zt
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.broker.standby import ShardPlace
from zmqtrain.checkpoint.model_files import read_model
from zmqtrain.cli.export import main, model_of_folder, model_of_run
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.key_folder import KeyFolder

SETTINGS = RunSettings(codec="float32", broadcast_codec="float32", every=4, delay=2, lost_seconds=60.0)


def trained(trainer, steps=16):
    trainer.wait_until(lambda: trainer.steps >= steps)


def test_a_copy_of_a_run_that_runs_is_what_its_nodes_have_and_disturbs_nobody(tmp_path, capsys):
    with broker(SETTINGS, checkpoint=tmp_path / "run") as hub:
        with pytest.raises(ConfigError, match="has no parameters yet: no node has joined it"):
            model_of_run(hub.address)
        trainer = Trainer(hub.address, "pc-1")
        trained(trainer)
        arrays, facts = model_of_run(hub.address)
        assert (
            facts.run == trainer.node.run and facts.version >= 0 and [leaf.path for leaf in facts.leaves] == ["b", "w"]
        )
        assert {name: array.shape for name, array in arrays.items()} == {"b": (8,), "w": (40, 8)}
        assert main([hub.address, "--out", str(tmp_path / "now.safetensors")]) == 0
        assert f"of {facts.run}" in (said := capsys.readouterr().out) and "; 328 values" in said
        assert main([hub.address, "--out", str(tmp_path / "now.safetensors")]) == 2
        assert "exists: name another file" in capsys.readouterr().err
        trained(trainer, trainer.steps + 8)
        trainer.stop.set()
        ended = trainer.join()
        last, _ = model_of_run(hub.address)
        for name, array in last.items():
            np.testing.assert_allclose(array, ended[name], atol=1e-5)
    written, said = read_model(tmp_path / "run" / "model.safetensors")
    exported, facts = model_of_folder(tmp_path / "run")
    assert facts == said and all(np.array_equal(exported[name], written[name]) for name in written)
    loaded = zt.load_model(tmp_path / "now.safetensors", like=parameters())
    assert loaded["w"].shape == (40, 8)


def test_of_a_broker_that_was_killed_the_journal_counts_too(tmp_path):
    with BrokerProcess(SETTINGS, tmp_path, every="1000") as hub:
        trainer = Trainer(hub.address, "pc-1")
        trained(trainer)
        trainer.stop.set()
        trainer.join()
        arrays, facts = model_of_run(hub.address)
        hub.kill()
    of_folder, said = model_of_folder(tmp_path)
    assert (said.run, said.version) == (facts.run, facts.version) and said.version > 0
    assert all(np.array_equal(of_folder[name], arrays[name]) for name in arrays)
    with pytest.raises(CheckpointError, match="there is no run in"):
        model_of_folder(tmp_path / "elsewhere")


def test_a_copy_takes_a_key_where_the_hub_has_keys_and_that_of_a_node_will_do(tmp_path):
    folder = KeyFolder(tmp_path / "keys")
    (lab,) = folder.new(["lab1"])
    with broker(SETTINGS, keys=folder) as hub, pytest.raises(ConfigError, match="has no parameters yet"):
        model_of_run(hub.address, keys=lab)


def test_of_several_shards_each_sends_its_part(tmp_path):
    settings = RunSettings.from_dict(SETTINGS.to_dict() | {"shards": 2})
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(BrokerThread("tcp://127.0.0.1:0", settings, checkpoint=tmp_path / "shard-0"))
        place = ShardPlace(shard=1, shards=2, first=first.address)
        stack.enter_context(BrokerThread("tcp://127.0.0.1:0", None, place=place, checkpoint=tmp_path / "shard-1"))
        begun = {"w": np.arange(20000, dtype=np.float32).reshape(200, 100), "b": np.ones(8, np.float32)}
        with connect(first.address, "pc-1") as node:
            DelayedSync(node, begun)
            arrays, facts = model_of_run(first.address)
            assert facts.run == node.run and facts.version == 0
        assert all(np.array_equal(arrays[name], begun[name]) for name in begun) and arrays.keys() == begun.keys()
    with pytest.raises(CheckpointError, match="`zmqtrain merge` makes one of them"):
        model_of_folder(tmp_path)
