"""What is refused at a port is counted, said at a bounded rate, and forgotten beside the run after a minute."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.clocks import VirtualClock
from zmqtrain.transport.admission import RECENT_SECONDS, Refusals


def test_one_refusal_is_said_in_the_singular_and_several_in_the_plural(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        refusals = Refusals("the port at tcp://*:5555")
        for _ in range(3):
            refusals.count("key", "10.0.0.7")
        refusals.close()

    asyncio.run(main())
    first, rest = (record.getMessage() for record in caplog.records)
    assert (
        first == "the port at tcp://*:5555 refused 1 connection with a key that is not authorised (the last: 10.0.0.7)"
    )
    assert "refused 2 connections with a key" in rest


def test_what_happens_in_normal_life_is_counted_and_not_said(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        refusals = Refusals("the port")
        refusals.count("life", "pc1#1")
        refusals.count("unfinished")
        assert refusals.counts == {"life": 1, "unfinished": 1} and refusals.recent == 0
        refusals.close()

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_who_was_turned_away_more_than_a_minute_ago_is_no_news() -> None:
    async def main() -> None:
        clock = VirtualClock()
        refusals = Refusals("the port", clock=clock)
        for _ in range(100):
            refusals.count("handshake")
        clock.now += RECENT_SECONDS / 2
        refusals.count("key")
        assert refusals.recent == 101
        clock.now += RECENT_SECONDS / 2 + 1
        assert refusals.recent == 1
        clock.now += RECENT_SECONDS
        assert refusals.recent == 0 and refusals.counts.total() == 101
        refusals.close()

    asyncio.run(main())
