"""How long a program waits for the first answer of its hub: as long as it was told; a few seconds if it is refused.

Rule: a hub that refuses this program's keys does so again, unless somebody authorises them meanwhile: it looks each
second who may come in. So a refusal is tried again for `REFUSED_SECONDS`, and then it is said.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from zmqtrain.core.errors import ChannelClosed
from zmqtrain.core.interfaces import Channel

REFUSED_SECONDS = 3.0


class ConnectDeadline:
    """When to give up. now: the time at the beginning.  refused: whether the hub refuses this program now."""

    def __init__(self, seconds: float, now: float, refused: Callable[[], bool]) -> None:
        self.began, self.until = now, now + seconds
        self._refused, self._was_refused = refused, False

    def is_over(self, now: float) -> bool:
        """Return whether it is time to give up."""
        if not self._was_refused and self._refused():
            self._was_refused = True
            self.until = min(self.until, now + REFUSED_SECONDS)
        return now >= self.until


@contextlib.asynccontextmanager
async def patient(channel: Channel, until: float, is_here: Callable[[], bool]) -> AsyncIterator[None]:
    """Raise TimeoutError in the block at `until` (of the running loop), or soon after the hub has refused the channel.

    is_here: whether the hub has answered; from then on a refusal changes nothing.
    """
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        with contextlib.suppress(ChannelClosed):
            while not channel.refused:
                await channel.changed()
            if is_here():
                return
            await asyncio.sleep(min(until - loop.time(), REFUSED_SECONDS))
            if not is_here():
                limit.reschedule(loop.time())

    async with asyncio.timeout_at(until) as limit:
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
