"""What follows from what is measured (auto), over real sockets: the same at every node, version by version."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from runs import Trainer, batches, broker, loss, parameters

from zmqtrain.broker.core import LoadMeter
from zmqtrain.codecs import fast
from zmqtrain.core.settings import FIRST as FIRST_SETTINGS
from zmqtrain.core.settings import RunSettings
from zmqtrain.monitor.recorder import BrokerRecorder
from zmqtrain.monitor.records import read_records
from zmqtrain.node.codec import NodeCodec
from zmqtrain.node.connect import connect
from zmqtrain.planning import plans as planning

AUTO = RunSettings(local_updates="fixed", release="all", evaluate_seconds=0.0)
FIRST = (FIRST_SETTINGS["every"], FIRST_SETTINGS["delay"])
SLOW_PORT = planning.link_share("2mbit", 0.8)
"""Of the hub: an exchange of the tiny model takes it several steps of a millisecond."""


class Watched(Trainer):
    """A trainer that keeps which schedules held at which versions."""

    def __init__(self, address: str, name: str) -> None:
        self.held: dict[int, set[tuple[int, int]]] = {}
        super().__init__(address, name, on_step=self.look)

    def look(self, trainer: Trainer) -> None:
        assert trainer.sync is not None
        self.held.setdefault(trainer.sync.version, set()).add(trainer.sync.exchange.schedule()[:2])

    @property
    def schedule(self) -> tuple[int, int]:
        return self.sync.exchange.schedule()[:2] if self.sync is not None else FIRST


def test_k_settles_changes_when_a_node_joins_and_is_the_same_everywhere_at_every_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "zmqtrain")
    monkeypatch.setattr(planning, "_step_seconds", lambda member: 1e-3)  # of slow steps k is 1, for 2 nodes and for 3
    monkeypatch.setattr(NodeCodec, "exchange_seconds", 0.0)  # the port alone decides, not how busy this machine is
    monkeypatch.setattr(LoadMeter, "contribution_seconds", lambda self: 0.0)
    recorder = BrokerRecorder(tmp_path / "broker.jsonl")
    with broker(AUTO, share=SLOW_PORT, events=recorder) as hub:
        trainers = [Watched(hub.address, name) for name in ("pc-1", "pc-2")]
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: t.schedule != FIRST and t.sync.version > 0)
        settled = max(trainer.sync.version for trainer in trainers if trainer.sync is not None)
        trainers.append(Watched(hub.address, "pc-3"))
        said = ": 3 nodes, 2 Mb/s x 0.8, "
        for trainer in trainers:
            trainer.wait_until(lambda: said in caplog.text)
            of_three = caplog.text[: caplog.text.index(said)].rpartition("from version ")[2]
            begins = int(of_three.partition(":")[0])
            trainer.wait_until(lambda t=trainer, v=begins: t.sync is not None and t.sync.version > v)
        trainers[0].wait_until(lambda: hub.roster is not None)  # it is told once a second
        roster = hub.roster
        for trainer in trainers:
            trainer.stop.set()
        params = [trainer.join() for trainer in trainers]
    recorder.close()
    held = [trainer.held for trainer in trainers]
    for version in set().union(*held) - {0}:  # before the first exchange one plan may follow another at once
        everywhere = set().union(*(one.get(version, set()) for one in held))
        assert len(everywhere) == 1, f"at version {version}: {everywhere}"
    plans = [one for one in read_records(tmp_path / "broker.jsonl") if one["kind"] == "plan"]
    assert plans and all(one["text"] and one["every"] >= 1 for one in plans)
    (joined, *_) = [one for one in plans if one["text"].startswith("3 nodes")]
    assert joined["from_version"] > settled
    assert roster is not None and (roster.every, roster.delay) in {(one["every"], one["delay"]) for one in plans} | {
        FIRST
    }
    held_out = next(batches(10**6))
    assert all(loss(one, held_out) < loss(parameters(), held_out) for one in params)


def test_a_node_that_gives_half_its_link_says_so_and_its_rate_is_in_its_figures() -> None:
    with (
        broker(RunSettings(every=2, delay=1, evaluate_seconds=0.0)) as hub,
        connect(hub.address, name="pc-1", link="100mbit", share=0.5) as node,
    ):
        assert node.statistics().link_rate == pytest.approx(0.956 * 1e8 / 8)
        trainer = Trainer(hub.address, "pc-2")
        trainer.wait_until(lambda: hub.roster is not None and len(hub.roster.members) == 2)
        assert hub.roster is not None
        by_name = {member["name"]: member for member in hub.roster.members}
        assert by_name["pc-1"]["share"] == 0.5 and "link_rate" not in by_name["pc-2"]
        trainer.stop.set()
        trainer.join()


def test_a_link_that_was_not_told_is_measured_by_what_crosses_it_and_the_node_learns_it() -> None:
    large = {"w": np.zeros((40, 8), np.float32), "b": np.zeros(8, np.float32), "x": np.zeros(600_000, np.float32)}
    fast.kernels(fast.LARGE_SLAB)  # compiled now, once on a machine, and not while the trainer is waited for
    with broker(RunSettings(every=2, delay=1, evaluate_seconds=0.0, codec="float32")) as hub:
        trainer = Trainer(hub.address, "pc-1", params=large)
        # of a loopback; the fastest that it was ever seen, once nobody has stood in the way
        trainer.wait_until(lambda: trainer.node is not None and trainer.node.statistics().link_rate > 1e6)
        assert trainer.node is not None and trainer.node.statistics().link_rate < 1e11
        trainer.stop.set()
        trainer.join()
