"""How long a program waits for a hub that does not answer, and for one that refuses it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.protocol.peer import PeerState
from zmqtrain.session import hub_session
from zmqtrain.session.hub_session import REFUSED_SECONDS, ConnectDeadline, limited


def session(refused: str = "", state: PeerState = PeerState.CONNECTING) -> Any:
    return SimpleNamespace(refused=refused, peer=SimpleNamespace(state=state))


def test_who_is_not_answered_waits_for_all_of_its_time() -> None:
    waiting = ConnectDeadline(session(), 30.0, 100.0)
    assert not waiting.is_over(129.9) and waiting.is_over(130.0)


def test_who_is_refused_tries_a_few_seconds_more_and_no_longer_than_its_time() -> None:
    one = session()
    waiting = ConnectDeadline(one, 30.0, 100.0)
    assert not waiting.is_over(110.0)
    one.refused = "key"
    assert not waiting.is_over(111.0) and waiting.is_over(111.0 + REFUSED_SECONDS)
    assert ConnectDeadline(one, 1.0, 100.0).is_over(101.0)


@pytest.mark.parametrize("refused", ["key", ""])
def test_a_block_ends_soon_after_a_refusal_and_else_at_its_time(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_session, "REFUSED_SECONDS", 0.01)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with limited(session(refused), 600.0 if refused else 0.02):
                await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_a_refusal_after_the_hub_has_answered_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_session, "REFUSED_SECONDS", 0.0)

    async def main() -> None:
        async with limited(session("broken", PeerState.WELCOMED), 600.0):
            here = asyncio.current_task()
            await asyncio.wait([task for task in asyncio.all_tasks() if task is not here])  # the watch has ended

    asyncio.run(main())
