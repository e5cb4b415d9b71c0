"""How long a program waits for a hub that does not answer, and for one that refuses it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.session import patience
from zmqtrain.session.patience import REFUSED_SECONDS, ConnectDeadline, patient


def test_who_is_not_answered_waits_for_all_of_its_time() -> None:
    waiting = ConnectDeadline(30.0, 100.0, lambda: False)
    assert not waiting.is_over(129.9) and waiting.is_over(130.0)


def test_who_is_refused_tries_a_few_seconds_more_and_no_longer_than_its_time() -> None:
    refused: list[bool] = []
    waiting = ConnectDeadline(30.0, 100.0, lambda: bool(refused))
    assert not waiting.is_over(110.0)
    refused.append(True)
    assert not waiting.is_over(111.0) and waiting.is_over(111.0 + REFUSED_SECONDS)
    assert ConnectDeadline(1.0, 100.0, lambda: True).is_over(101.0)


@pytest.mark.parametrize("refused", ["key", ""])
def test_a_block_ends_soon_after_a_refusal_and_else_at_its_time(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "REFUSED_SECONDS", 0.01)

    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        channel: Any = SimpleNamespace(refused=refused, changed=never)
        until = asyncio.get_running_loop().time() + (600.0 if refused else 0.02)
        with pytest.raises(TimeoutError):
            async with patient(channel, until, lambda: False):
                await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_a_refusal_after_the_hub_has_answered_ends_nothing() -> None:
    async def main() -> None:
        channel: Any = SimpleNamespace(refused="broken", changed=None)
        async with patient(channel, asyncio.get_running_loop().time() + 600.0, lambda: True):
            for _ in range(10):
                await asyncio.sleep(0)

    asyncio.run(main())
