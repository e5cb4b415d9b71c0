"""A node's link over real sockets: what it has met at one address is not forgotten while it looks at another."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from channels import HERE, run

from zmqtrain.broker.broker import Broker
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.session.hub_session import HubSession
from zmqtrain.transport.admission import Admission
from zmqtrain.transport.pacing import Gate
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import CurveKeys

HUB, OWN = CurveKeys.generate(), CurveKeys.generate()


class Listener:
    """Of what a link tells, only that something has changed."""

    messages = ()

    def __init__(self) -> None:
        self.changed = Gate()

    def on_changed(self) -> None:
        self.changed.open()

    def on_failed(self, error: Exception) -> None:
        raise error

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"nothing else is told here: {name}")


def test_a_refusal_is_remembered_while_the_next_address_is_silent_and_until_one_welcomes() -> None:
    async def main() -> None:
        closed = RouterChannel(HERE, keys=HUB, admission=Admission({}))
        silent = RouterChannel(HERE, keys=HUB, admission=Admission({OWN.public.decode(): "pc1"}))
        peer = Peer(PeerId("pc-1#11"), "pc-1", addresses=(closed.address, silent.address))
        channel = DealerChannel(closed.address, peer=peer.peer, keys=OWN, server_key=HUB.public)
        listener = Listener()
        link = HubSession(SimpleNamespace(dial=lambda *_: channel), peer, closed.address, listener)  # type: ignore[arg-type]
        living = asyncio.create_task(link._main())
        while channel.refused != "key":
            await channel.changed()
        while channel.address != silent.address:
            await channel.changed()
        assert channel.refused == "" and link.refused == "key"
        assert "does not authorise this PC's key" in link.obstacle

        broker = Broker(silent, RunSettings())
        serving = asyncio.create_task(broker.run())
        while peer.state is PeerState.CONNECTING:
            await listener.changed.wait()
        assert link.refused == link.obstacle == "" and link.address == silent.address
        link.leave("")
        await living
        broker.stop()
        await serving
        await closed.close()

    run(main)
