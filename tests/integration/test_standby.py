"""A second broker takes the place of the first: real processes, real sockets, kill -9."""

from __future__ import annotations

import pytest
from runs import BrokerProcess, Trainer, batches, loss, parameters, sgd

from zmqtrain.broker.standby import StandbyPlace
from zmqtrain.core.errors import JoinRefused
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect, promote
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.key_folder import KeyFolder

SETTINGS = RunSettings(
    every=2, delay=1, release="immediately", codec="float32", broadcast_codec="float32", outer="sgd:rate=1",
    heartbeat_seconds=0.1, lost_seconds=10.0,
)  # fmt: skip
WAIT_SECONDS = 60.0


def in_step(trainer):
    roster = trainer.node.roster if trainer.node is not None else None
    return roster is not None and roster.hub["standby"] != ""


def version(trainer):
    return trainer.sync.statistics().version if trainer.sync is not None else -1


def follow(trainer):
    """Wait until the standby knows that it is in step, as what nodes hear from then on shows; and for some training."""
    trainer.wait_until(lambda: in_step(trainer))
    seen = version(trainer)
    trainer.wait_until(lambda: version(trainer) > seen + 5 and trainer.steps > 100)


def test_nodes_go_on_with_the_standby_when_the_first_is_killed_and_nothing_lands_twice():
    with BrokerProcess(SETTINGS, None) as first:
        place = StandbyPlace(first=first.address, takeover_seconds=0.5)
        with BrokerProcess(None, None, standby=place) as standby:
            trainers = [Trainer(first.address, f"pc-{number}") for number in (1, 2)]
            for trainer in trainers:
                follow(trainer)
            first.kill()
            seen = max(version(trainer) for trainer in trainers)
            for trainer in trainers:
                trainer.wait_until(lambda trainer=trainer: trainer.node.peer.term == 1 and version(trainer) > seen + 5)
            assert {trainer.node.address for trainer in trainers} == {standby.address}
            for trainer in trainers:
                trainer.stop.set()
            held_out = next(batches(10**6))
            assert all(loss(trainer.join(), held_out) < loss(parameters(), held_out) / 2 for trainer in trainers)
            assert standby.interrupt() == 0


def test_a_standby_that_is_told_to_takes_over_and_the_first_steps_down_by_itself():
    with BrokerProcess(SETTINGS, None) as first:
        place = StandbyPlace(first=first.address)
        with BrokerProcess(None, None, standby=place) as standby:
            trainer = Trainer(first.address, "pc-1")
            trainer.wait_until(lambda: in_step(trainer))
            _, at, term = promote(standby.address, timeout_seconds=WAIT_SECONDS)
            assert term == 1
            assert first.process.wait(30) != 0, "it has stepped down"
            trainer.wait_until(lambda: trainer.node.peer.term == 1 and version(trainer) > at)
            trainer.stop.set()
            trainer.join()


def test_where_there_are_keys_a_node_cannot_tell_a_standby_to_take_over_and_the_hubs_own_pair_can(tmp_path):
    folder = KeyFolder(tmp_path / "keys")
    (lab,) = folder.new(["lab1"])
    with BrokerProcess(SETTINGS, None, keys=folder.path) as first:
        place = StandbyPlace(first=first.address)
        with BrokerProcess(None, None, standby=place, keys=folder.path) as standby:
            with pytest.raises(JoinRefused, match="only an operator"):
                promote(standby.address, keys=lab, timeout_seconds=WAIT_SECONDS)
            assert first.process.poll() is None
            _, _, term = promote(standby.address, keys=folder.path / "hub.key_secret", timeout_seconds=WAIT_SECONDS)
            assert term == 1 and first.process.wait(30) != 0


def train(address, folder, until):
    """Train as pc-1 until `until(node, sync)`, save, and return the node's id and the version it began with."""
    with connect(address, "pc-1", checkpoint=folder, checkpoint_every="1000") as node:
        sync = DelayedSync(node, parameters())
        params, began = sync.params, sync.version
        for batch in node.batches(batches):
            params, value = sgd(params, batch)
            params = sync.step(params, score=value, samples=16)
            if until(node, sync):
                sync.save(params, (), wait=True)
                return node.peer_id, began


def test_nodes_that_are_started_after_a_takeover_find_the_hub_by_their_checkpoint_or_by_several_addresses(tmp_path):
    with BrokerProcess(SETTINGS, None) as first:
        place = StandbyPlace(first=first.address, takeover_seconds=0.5)
        with BrokerProcess(None, None, standby=place) as standby:

            def stands_by(node, sync):
                return node.roster is not None and node.roster.hub["standby"] != "" and sync.version > 5

            peer, _ = train(first.address, tmp_path, stands_by)
            first.kill()
            promote(standby.address, timeout_seconds=WAIT_SECONDS)
            again, began = train(
                first.address, tmp_path, lambda node, sync: node.peer.term == 1 and sync.statistics().peers
            )
            assert again == peer and began > 5
            with connect(f"{first.address},{standby.address}", "pc-2", timeout_seconds=WAIT_SECONDS) as node:
                assert (node.address, node.peer.term) == (standby.address, 1)
