"""Every effect of the hub, and every message that is not the hub's alone, has one service of the broker."""

from __future__ import annotations

from typing import get_args

from tests.broker.wires import Wire
from tests.fixed import fixed_run
from zmqtrain.broker.broker import Broker
from zmqtrain.protocol.effects import HubEffect
from zmqtrain.protocol.messages import Chunk, Credit, Hello, Relayed, Report, Stop


def test_each_effect_of_the_hub_is_carried_out_by_one_service() -> None:
    broker = Broker(Wire(), fixed_run())
    services = (
        broker,
        broker.admin,
        broker.receiver,
        broker.uploads,
        broker.releases,
        broker.snapshots,
        broker.standby,
        broker.groups,
    )
    carried_out = [kind for service in services for kind in service.effects]
    assert len(carried_out) == len(set(carried_out))
    assert set(carried_out) == set(get_args(HubEffect))
    handled = [kind for service in services for kind in service.messages]
    assert sorted(kind.__name__ for kind in handled) == sorted(
        kind.__name__ for kind in (Chunk, Credit, Hello, Relayed, Report, Stop)
    )
