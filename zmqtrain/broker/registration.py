"""Be the line of another master to the first: register a shard, take the run's name and settings, learn of its end.

Rule 1: settings live in one place: who has a shard takes all of them from the first.  Rule 2: a first that is lost ends
nothing here: the shard is served on, and it is said what is waited for.  Rule 3: the first's word that the run is over,
or its refusal, ends this master.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field

from zmqtrain.broker.onlooker import Onlooker
from zmqtrain.core.errors import ConfigError, HubUnreachable
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.masters import Claim
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.session.link import HubLink
from zmqtrain.session.patience import Patience
from zmqtrain.transport.address import say_unreachable
from zmqtrain.transport.zmq_dealer import DealerChannel
from zmqtrain.transport.zmq_keys import CurveKeys

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.02
REMIND_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class MasterPlace:
    """Where a master other than the first belongs. shard: 1 to masters - 1.  first: the address of the first.

    address: at which nodes reach this one; "": what leads to the first from here.  keys: the pair that all masters
    have.  wait_seconds: how long to wait for the first's answer.
    """

    shard: int
    masters: int
    first: str
    address: str = ""
    keys: CurveKeys | None = field(default=None, repr=False)
    wait_seconds: float = 30.0


class Registration(Onlooker):
    """A master's line to the first, in a thread of its own (a `Listener`).

    address: at which nodes reach this master.
    """

    def __init__(self, place: MasterPlace, address: str) -> None:
        super().__init__()
        self.place, self.address = place, address
        self.name = f"master {place.shard}/{place.masters}"
        peer = PeerId(f"master-{place.shard}#{secrets.token_hex(4)}")
        self.peer = Peer(peer, self.name, claim=Claim(place.shard, address))
        self._link = HubLink(
            lambda: DealerChannel.connect(
                place.first,
                peer=peer,
                keys=place.keys,
                server_key=None if place.keys is None else place.keys.public,
            ),
            self.peer,
            place.first,
            self,
            meanwhile="Its shard is served on",
        )
        self._reminded_at = self._not_over_at = time.monotonic()
        self._link.start()

    async def welcomed(self) -> None:
        """Wait for the first's answer. Raises HubUnreachable, ConfigError, JoinRefused (the shard is taken)."""
        patience = Patience(self.place.wait_seconds, time.monotonic(), lambda: bool(self._link.refused))
        while self.peer.settings is None:
            if self.failure is not None:
                raise self.failure
            if patience.is_over(time.monotonic()):
                if self._link.refused:
                    text = say_unreachable([self.place.first], time.monotonic() - patience.began, self._link.obstacle)
                    text += ". All masters have a copy of the first one's folder of keys (--keys)"
                    raise HubUnreachable(text, self.place.first, self._link.refused)
                raise HubUnreachable(
                    f"the first master does not answer at {self.place.first} (waited {self.place.wait_seconds:g} s). "
                    f"Start it: zmqtrain-broker --shard 0/{self.place.masters} with the settings of the run; check the "
                    "address, the port and the firewall",
                    self.place.first,
                )
            await asyncio.sleep(LOOK_SECONDS)
        if self.settings.masters != self.place.masters:
            raise ConfigError(
                f"the first master, at {self.place.first}, divides the model among {self.settings.masters} masters: "
                f"--shard {self.place.shard}/{self.settings.masters}, not /{self.place.masters}"
            )

    @property
    def settings(self) -> RunSettings:
        """The run's settings, once welcomed."""
        assert self.peer.settings is not None
        return self.peer.settings

    @property
    def run(self) -> str:
        """The run's id, once welcomed."""
        return self.peer.run

    @property
    def founded(self) -> bool:
        """Whether the run has parameters, as the first says: then every master had its shard of them before."""
        return self.peer.founded

    @property
    def over(self) -> bool:
        """Whether the first has said that the run is over."""
        return self.peer.over

    def ends(self, nodes: int) -> bool:
        """Whether this master is to end: the first says that the run is over, and its nodes have left, or had time to.

        nodes: how many are here.  Says now and then what it waits for.  Raises why this master cannot go on.
        """
        if self.failure is not None:
            raise self.failure
        self._remind()
        now = time.monotonic()
        if not self.over:
            self._not_over_at = now
        return self.over and (not nodes or now - self._not_over_at > self.settings.lost_seconds)

    def _remind(self) -> None:
        """Say now and then, while the first is not there, that this master waits for it."""
        now = time.monotonic()
        if self.peer.state is not PeerState.CONNECTING:
            self._reminded_at = now
        elif now - self._reminded_at >= REMIND_SECONDS:
            self._reminded_at = now
            logger.warning(
                "%s waits for the first master at %s: new nodes cannot join, and the run cannot end, without it",
                self.name,
                self.place.first,
            )

    def close(self) -> None:
        """Say goodbye to the first, and end the thread."""
        self._link.close("")

    # ------------------------------------------------------------------ Listener (network thread)

    def on_changed(self) -> None:
        """See Listener."""
        if self.peer.state is PeerState.WELCOMED and self._link.trouble[0]:
            logger.info("%s is registered again with the first master, at %s", self.name, self.place.first)
            self._link.trouble = ("", "")
