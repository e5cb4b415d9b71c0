"""The order in which a node's network thread does what its machine wishes."""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.broker.standby import NullListener
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.effects import Send, Withdraw
from zmqtrain.protocol.messages import Heartbeat, Message
from zmqtrain.protocol.peer import Peer
from zmqtrain.session.link import HubLink


class Answering(NullListener):
    """A listener that has something said for each offer that is withdrawn."""

    def __init__(self) -> None:
        super().__init__()
        self.link: HubLink | None = None

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """See Listener."""
        assert self.link is not None
        self.link.carry_out([Send(Heartbeat(float(10 + sequence)))])


def test_what_an_effect_brings_about_comes_after_all_that_was_wished_before() -> None:
    listener, said = Answering(), list[Message]()
    link = listener.link = HubLink(lambda: None, Peer(PeerId("a#1"), "a"), "tcp://hub:1", listener)  # type: ignore[arg-type, return-value]
    link.send = said.append  # type: ignore[method-assign]
    effects: Sequence[Send | Withdraw] = [
        Withdraw(1, "", ""),
        Send(Heartbeat(1.0)),
        Withdraw(2, "", ""),
        Send(Heartbeat(2.0)),
    ]
    link.carry_out(effects)
    assert [one.sent for one in said if isinstance(one, Heartbeat)] == [1.0, 2.0, 11.0, 12.0]
