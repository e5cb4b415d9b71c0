"""Who may end a run, and what its nodes do then, on 127.0.0.1."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from runs import BrokerProcess, Trainer, batches, broker

from zmqtrain.broker.standby import ShardPlace, StandbyPlace
from zmqtrain.checkpoint.model_files import read_model
from zmqtrain.core.errors import HubUnreachable, JoinRefused, RunStopped
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect, stop
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.key_folder import KeyFolder

SETTINGS = RunSettings(codec="ternary:block=128", every=4, delay=2, lost_seconds=60.0)


def trains(trainer):
    return trainer.node is not None and trainer.node.peer.run_version >= 0 and trainer.steps > 8


def test_all_nodes_of_a_run_that_is_ended_end_with_the_same_parameters_which_are_the_brokers(tmp_path):
    with BrokerProcess(SETTINGS, tmp_path) as hub:
        trainers = [Trainer(hub.address, f"pc-{number}") for number in range(2)]
        for trainer in trainers:
            trainer.wait_until(lambda trainer=trainer: trains(trainer))
        _, version = stop(hub.address)
        one, other = (trainer.join() for trainer in trainers)
        assert hub.process.wait(60) == 0
    arrays, facts = read_model(tmp_path / "model.safetensors")
    assert facts.newest >= version >= 0
    for name, array in arrays.items():
        assert abs(one[name] - array).max() < 1e-4 and abs(other[name] - array).max() < 1e-4


def test_where_there_are_keys_a_node_cannot_end_the_run_nor_can_a_stranger_and_the_hubs_own_pair_can(tmp_path):
    folder = KeyFolder(tmp_path / "keys")
    (lab,) = folder.new(["lab1"])
    (stranger,) = KeyFolder(tmp_path / "others").new(["stranger"])
    hub_key = folder.path / "hub.key"
    with BrokerProcess(SETTINGS, None, keys=folder.path) as hub:
        with pytest.raises(JoinRefused, match="does not obey: only an operator can end the run"):
            stop(hub.address, keys=lab)
        with pytest.raises(HubUnreachable):
            stop(hub.address, keys=stranger, server_key=hub_key, timeout_seconds=5.0)
        assert hub.process.poll() is None
        run, _ = stop(hub.address, keys=folder.path / "hub.key_secret")
        assert run.startswith("run-") and hub.process.wait(60) == 0


def test_a_loop_over_data_of_its_own_hears_from_its_next_step_that_the_run_is_ended():
    with broker(SETTINGS) as hub:
        trainer = Trainer(hub.address, "pc-1", takes_units=False)
        trainer.wait_until(lambda: trains(trainer))
        stop(hub.address)
        with pytest.raises(RunStopped, match=r"zmqtrain stop"):
            trainer.join()


def test_a_standby_ends_with_the_run():
    with (
        BrokerProcess(SETTINGS, None) as first,
        BrokerProcess(None, None, standby=StandbyPlace(first=first.address)) as standby,
    ):
        trainer = Trainer(first.address, "pc-1")
        trainer.wait_until(lambda: trains(trainer))
        stop(first.address)
        trainer.join()
        assert first.process.wait(60) == 0 and standby.process.wait(60) == 0


def test_all_shards_of_a_run_end_with_it_and_only_the_first_takes_the_order():
    settings = RunSettings.from_dict(SETTINGS.to_dict() | {"shards": 2, "initial": "founder"})
    with BrokerProcess(settings, None) as first:
        place = ShardPlace(shard=1, shards=2, first=first.address)
        with BrokerProcess(None, None, place=place) as second, ThreadPoolExecutor(1) as pool:
            with (
                connect(first.address, "pc-1") as node,
                DelayedSync(node, {"w": np.zeros((200, 100), np.float32)}) as sync,
            ):
                params, asked = sync.params, None
                for steps, _ in enumerate(node.batches(batches), 1):
                    params = sync.step({"w": params["w"] + 1}, samples=16)
                    if steps == 12:
                        with pytest.raises(JoinRefused, match="has shard 1 of the run: say it to the first broker"):
                            stop(second.address)
                        asked = pool.submit(stop, first.address)
                params = sync.finish(params)
            assert asked.result(60)[1] > 0
            assert first.process.wait(60) == 0 and second.process.wait(60) == 0
