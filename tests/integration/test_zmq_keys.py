"""CURVE at the real channel: who is heard, and how keys are kept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from channels import HERE, A, B, meet, run

from zmqtrain.broker.serve import BrokerThread
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import MAX_FRAME_BYTES, Lane, PeerId
from zmqtrain.node.connect import connect
from zmqtrain.planning.probe import measure_link
from zmqtrain.transport.key_folder import Access, KeyFolder, Places
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import CurveKeys, load_public_key


def test_with_curve_only_who_knows_the_servers_key_is_heard() -> None:
    async def main() -> None:
        keys = CurveKeys.generate()
        hub = RouterChannel(HERE, keys=keys)
        plain = DealerChannel(hub.address, peer=PeerId("plain"))
        wrong = DealerChannel(hub.address, peer=PeerId("wrong"), server_key=CurveKeys.generate().public)
        named = DealerChannel(hub.address, peer=A, keys=CurveKeys.generate(), server_key=keys.public)
        fresh = DealerChannel(hub.address, peer=B, server_key=keys.public)
        for intruder in (plain, wrong):
            intruder.try_send(Lane.CONTROL, [b"let me in"])  # there is no room where it was turned away already
        await meet(hub, named)
        await meet(hub, fresh)
        for peer, node in ((A, named), (B, fresh)):
            for _ in range(20):
                await node.send(Lane.BULK, [b"head", bytes(MAX_FRAME_BYTES)])
                assert (await hub.receive())[:2] == (peer, Lane.BULK)
        assert hub.strangers == 0
        for channel in (plain, wrong, named, fresh, hub):
            await channel.close(linger_seconds=0)

    run(main)


def test_keys_are_saved_and_loaded_and_the_secret_is_private(tmp_path: Path) -> None:
    keys = CurveKeys.generate()
    public, secret = keys.save(tmp_path / "new", "hub")
    assert CurveKeys.load(secret) == keys
    assert load_public_key(public) == load_public_key(secret) == keys.public
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert keys.secret not in public.read_bytes()
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(ConfigError, match="exists"):
        keys.save(tmp_path / "new", "hub")
    with pytest.raises(ConfigError):
        CurveKeys.load(public)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.key").write_text('public-key = "short"\n')
    (tmp_path / "empty.key").write_text("")
    for name in ("broken.key", "empty.key", "absent.key"):
        with pytest.raises(ConfigError):
            load_public_key(tmp_path / name)

    async def main() -> None:
        with pytest.raises(ConfigError):
            DealerChannel("tcp://127.0.0.1:1", peer=A, server_key=b"short")
        with pytest.raises(ConfigError):
            DealerChannel("tcp://127.0.0.1:1", peer=A, keys=CurveKeys.generate())

    run(main)


def test_a_key_that_was_found_is_left_out_at_a_hub_that_uses_none(tmp_path: Path) -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        pair = CurveKeys.generate(CurveKeys.generate().public)
        access = Access((pair.server, pair), tmp_path / "lab.key_secret")
        node = DealerChannel(hub.address, peer=A, access=access)
        await node.send(Lane.CONTROL, [b"said before it is known that the hub uses none"])
        assert await hub.receive() == (A, Lane.CONTROL, [b"said before it is known that the hub uses none"])
        assert access.declined
        assert hub.turned_away == 0, "that is no intruder"
        assert hub.refusals and {*hub.refusals} <= {"with a key", "unfinished"}
        await meet(hub, node)
        given = DealerChannel(hub.address, peer=B, keys=pair, server_key=pair.server)
        while not given.refused:
            await given.changed()
        assert "--keys" in given.obstacle, "one that was given is not"
        for channel in (node, given, hub):
            await channel.close(linger_seconds=0)

    run(main)


def test_where_keys_are_wanted_and_none_is_found_it_is_said_where_was_looked(tmp_path: Path) -> None:
    async def main() -> None:
        hub = RouterChannel(HERE, keys=CurveKeys.generate())
        node = DealerChannel(hub.address, peer=A, access=Access(looked="looked for lab.key_secret in /home/me"))
        pair = CurveKeys.generate(CurveKeys.generate().public)
        other = DealerChannel(hub.address, peer=B, access=Access((pair.server, pair), tmp_path / "lab.key_secret"))
        for channel in (node, other):
            while not channel.refused:
                await channel.changed()
        assert "looked for lab.key_secret in /home/me" in node.obstacle
        assert str(tmp_path / "lab.key_secret") in other.obstacle
        for channel in (node, other, hub):
            await channel.close(linger_seconds=0)

    run(main)


@pytest.mark.parametrize("keyed", [True, False])
def test_who_names_no_key_comes_in_with_the_one_that_is_found_and_at_a_hub_without_keys_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    keys = KeyFolder(tmp_path / "hub")
    (lab,) = keys.new(["lab"])
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / lab.name).write_bytes(lab.read_bytes())
    places = Places(tmp_path, tmp_path / "home", tmp_path / "none", "pc1")
    monkeypatch.setattr(Places, "here", classmethod(lambda cls: places))
    with BrokerThread(HERE, RunSettings(), keys=keys if keyed else None) as broker:
        with connect(broker.address, "pc1", observer=True) as node:
            assert node.run.startswith("run-")
        assert measure_link(broker.address).run == node.run


def test_two_channels_that_share_a_key_that_was_found_both_leave_it_out(tmp_path: Path) -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        pair = CurveKeys.generate(CurveKeys.generate().public)
        access = Access((pair.server, pair), tmp_path / "lab.key_secret")
        nodes = [DealerChannel(hub.address, peer=peer, access=access) for peer in (A, B)]
        for node in nodes:
            await meet(hub, node)
        for channel in (*nodes, hub):
            await channel.close(linger_seconds=0)

    run(main)
