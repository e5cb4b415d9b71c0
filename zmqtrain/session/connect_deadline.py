"""How long a program waits for the first answer of its hub: as configured; a few seconds once it is refused.

A hub that refuses this program's keys does so again unless somebody authorises them meanwhile, so a refused program
tries again for `REFUSED_SECONDS` and then says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from zmqtrain.protocol.peer import PeerState
from zmqtrain.session.environment import clock
from zmqtrain.session.hub_session import HubSession

REFUSED_SECONDS = 3.0
LOOK_SECONDS = 0.05


class ConnectDeadline:
    """When to give up. now: monotonic seconds at the beginning."""

    def __init__(self, session: HubSession, seconds: float, now: float) -> None:
        self.began, self.until = now, now + seconds
        self._session, self._was_refused = session, False

    def is_over(self, now: float) -> bool:
        """Return whether it is time to give up."""
        if not self._was_refused and self._session.refused:
            self._was_refused = True
            self.until = min(self.until, now + REFUSED_SECONDS)
        return now >= self.until


@contextlib.asynccontextmanager
async def limited(session: HubSession, seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError in the block after `seconds`, or soon after the hub has refused a session that no hub has
    welcomed."""
    deadline = ConnectDeadline(session, seconds, clock.monotonic())

    async def watch() -> None:
        while session.peer.state is PeerState.CONNECTING:
            await asyncio.sleep(LOOK_SECONDS)
            if deadline.is_over(clock.monotonic()):
                limit.reschedule(asyncio.get_running_loop().time())
                return

    async with asyncio.timeout(seconds) as limit:
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
