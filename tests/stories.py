"""A broker that lives while a story happens to it, on a channel that the story holds."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.protocol import hub

WAIT = 90.0
"""How long a story may take, in seconds, where others keep the machine busy."""


def lived_through(make, story):
    """Run the broker that `make()` gives while `story(broker)` happens; return it when it has ended.

    Nobody of whom a story tells need beat meanwhile.  Raises what the broker, or the story, raises.
    """

    async def live():
        broker = make()
        running = asyncio.create_task(broker.run())
        told = asyncio.create_task(story(broker))
        try:
            await asyncio.wait({running, told}, timeout=WAIT, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                assert told.done(), f"the story does not end; the broker said {broker.channel.sent}"
                told.result()
        finally:
            told.cancel()
            broker.stop()
            await running
        return broker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "SILENCE_SECONDS", 10 * WAIT)
        return asyncio.run(live())
