"""A broker that was killed while its nodes handed in the last they had, and is started again."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from tests.broker.wires import lived
from zmqtrain.broker import broker as broker_module
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.messages import Goodbye, Hello, Welcome

A, B = PeerId("pc-1#a"), PeerId("pc-2#b")


@pytest.fixture
def killed(tmp_path):
    """The folder of a run whose two data units are done, and of whose two nodes one has handed in its last delta."""

    async def drain(peers):
        await peers.join(A, B)
        ledger = peers.broker.hub.units.ledger
        ledger.done(A, ledger.deal(A, 2), True)
        assert ledger.finished
        peers.publish(A, 0, 1)
        await peers.until(lambda: peers.broker.aggregator.version == 1)
        shutil.copytree(tmp_path / "lives", tmp_path / "killed")

    lived(drain, tmp_path / "lives", units=2)
    return tmp_path / "killed"


def test_it_waits_for_the_nodes_whose_last_deltas_it_has_not(killed, monkeypatch):
    looked, welcomed = [], []
    is_over = broker_module.Broker._is_over
    monkeypatch.setattr(broker_module.Broker, "_is_over", lambda broker: looked.append(is_over(broker)) or looked[-1])

    async def come_back(peers):
        assert peers.broker.hub.units.ledger.finished and peers.broker.hub.version == 1
        while len(looked) < 3:
            await asyncio.sleep(0)
        peers.wire.say(B, Hello(B))
        await peers.until(lambda: peers.told(B, Welcome))
        welcomed.extend(peers.told(B, Welcome))
        assert not peers.told(B, Goodbye)

    lived(come_back, killed, units=2)
    assert welcomed and not any(looked)


def test_it_ends_when_nobody_comes(killed, monkeypatch):
    monkeypatch.setattr(broker_module, "COMEBACK_SECONDS", 0.0)

    async def nobody(peers):
        await peers.until(lambda: peers.wire.closed)

    assert lived(nobody, killed, units=2).channel.closed
