"""Keep a broker's door by its folder of keys: look who is authorised, and show out who is not any more.

Rule 1: from the moment of a look, nothing is received that a revoked key has signed for; the peer is told why, then its
connections are cut.  Nobody else notices.
Rule 2: a folder that cannot be read changes nothing, but that it is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import PeerId
from zmqtrain.transport.key_folder import KeyFolder, Stamp
from zmqtrain.transport.zmq_router import RouterChannel

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
FAREWELL_SECONDS = 0.5
"""Between what a revoked peer is told and the end of its connection, so that it can read it."""


class Doorkeeper:
    """Looks at a folder of keys for a channel, in its loop.  dismiss: tells a peer, by name and why, to go."""

    def __init__(self, channel: RouterChannel, folder: KeyFolder, dismiss: Callable[[PeerId, str], None]) -> None:
        self._channel, self._folder, self._dismiss = channel, folder, dismiss
        self._stamp: Stamp | None = None
        self._trouble = ""
        self._gone: dict[str, str] = {}  # keys that were revoked and not cut yet, with their names

    async def run(self) -> None:
        """Look for ever, whatever goes wrong: what a look has not done is done by the next."""
        while True:
            try:
                await self.look()
            except Exception as error:
                if repr(error) != self._trouble:
                    self._trouble = repr(error)
                    logger.exception("the keys could not be looked at; it is tried again every %.0f s", LOOK_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Look once, and do what follows from it."""
        try:
            stamp = await asyncio.to_thread(self._folder.stamp)
            if stamp == self._stamp and not self._gone:
                return
            names = await asyncio.to_thread(self._folder.authorised)
        except (OSError, ConfigError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("the folder of keys cannot be read (%s): who was authorised stays so", error)
            return
        first = self._stamp is None
        gone = self._channel.admit(names)
        if not first or gone:
            count = len(names) - 1
            logger.info("%d key%s authorised now", count, " is" if count == 1 else "s are")
        self._gone |= gone
        self._stamp = stamp
        for key, name in self._gone.items():
            text = f"its key, {name}, was revoked"
            for peer in self._channel.peers_with(key):
                self._dismiss(peer, f"{text}; ask who runs the hub for another (zmqtrain keys new)")
            logger.warning("the key of %s was revoked", name)
        if self._gone:
            await asyncio.sleep(FAREWELL_SECONDS)
            for key in list(self._gone):
                self._channel.cut(key)
                del self._gone[key]
        self._trouble = ""
