"""A second broker takes the place of the first: real processes, real sockets, kill -9."""

from __future__ import annotations

from runs import BrokerProcess, Trainer, batches, loss, parameters

from zmqtrain.runtime.broker.standby import StandbyPlace
from zmqtrain.runtime.node.connect import promote
from zmqtrain.settings import RunSettings

SETTINGS = RunSettings(
    every=2, delay=1, release="immediately", codec="float32", broadcast_codec="float32", outer="sgd:rate=1",
    heartbeat_seconds=0.1, lost_seconds=1.0,
)  # fmt: skip


def in_step(trainer):
    roster = trainer.node.roster if trainer.node is not None else None
    return roster is not None and roster.hub["standby"] != ""


def version(trainer):
    return trainer.sync.statistics().version


def test_nodes_go_on_with_the_standby_when_the_first_is_killed_and_nothing_lands_twice():
    with BrokerProcess(SETTINGS, None) as first:
        place = StandbyPlace(first=first.address, takeover_seconds=0.5)
        with BrokerProcess(None, None, standby=place) as standby:
            trainers = [Trainer(first.address, f"pc-{number}", endless=True) for number in (1, 2)]
            for trainer in trainers:
                trainer.wait_until(lambda trainer=trainer: in_step(trainer) and version(trainer) > 5)
            first.kill()
            seen = max(version(trainer) for trainer in trainers)
            for trainer in trainers:
                trainer.wait_until(lambda trainer=trainer: trainer.node.term == 1 and version(trainer) > seen + 5)
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
            trainer = Trainer(first.address, "pc-1", endless=True)
            trainer.wait_until(lambda: in_step(trainer))
            _, at, term = promote(standby.address)
            assert term == 1
            assert first.process.wait(30) != 0, "it has stepped down"
            trainer.wait_until(lambda: trainer.node.term == 1 and version(trainer) > at)
            trainer.stop.set()
            trainer.join()
