"""A broker's watch over its folder of keys goes on whatever happens to one look."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from zmqtrain.broker import serve as serving
from zmqtrain.broker.serve import KeyWatcher
from zmqtrain.core.types import PeerId


class Door:
    """A channel and a folder of keys, of which one is revoked at the second look."""

    def __init__(self) -> None:
        self.names = {"hub": "hub", "k1": "pc1"}
        self.known: dict[str, str] = {}
        self.cuts: list[str] = []

    def stamp(self) -> tuple[str, ...]:
        return tuple(self.names)

    def authorised(self) -> dict[str, str]:
        return dict(self.names)

    def admit(self, names: dict[str, str]) -> dict[str, str]:
        gone = {key: name for key, name in self.known.items() if key not in names}
        self.known = dict(names)
        return gone

    def peers_with(self, key: str) -> list[PeerId]:
        return [PeerId("pc1#1")]

    def cut(self, key: str) -> None:
        self.cuts.append(key)


def test_a_key_that_is_revoked_is_cut_though_something_that_nobody_thought_of_was_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("LOOK_SECONDS", "FAREWELL_SECONDS"):
        monkeypatch.setattr(serving, name, 0.0)
    door, dismissed = Door(), list[PeerId]()

    def dismiss(peer: PeerId, why: str) -> None:
        dismissed.append(peer)
        if len(dismissed) == 1:
            raise RuntimeError("nobody thought of this")

    host = SimpleNamespace(dismiss=dismiss, authorised=lambda names: None)

    async def main() -> None:
        watch = asyncio.create_task(KeyWatcher(door, door, host).run())  # type: ignore[arg-type]
        while not door.known:
            await asyncio.sleep(0)
        del door.names["k1"]
        async with asyncio.timeout(30):
            while not door.cuts:
                await asyncio.sleep(0)
        assert not watch.done()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    asyncio.run(main())
    assert door.cuts == ["k1"] and len(dismissed) == 2
    assert "could not be looked at" in caplog.text
