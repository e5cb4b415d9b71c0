"""Who gets in at a hub's port, who is shown out, and that floods of strangers keep nobody else out."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from channels import HERE, StrangeSockets, meet, run

from zmqtrain.broker import serve as serving
from zmqtrain.core.errors import PeerLost
from zmqtrain.core.types import Lane, PeerId
from zmqtrain.node.connect import connect
from zmqtrain.transport import admission
from zmqtrain.transport.address import is_own_address, parse_address
from zmqtrain.transport.admission import Admission
from zmqtrain.transport.key_folder import KeyFolder
from zmqtrain.transport.pacing import MAX_WIRE_FRAME_BYTES, ConnectionLimits
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import LEAST_CONNECTIONS, CurveKeys, descriptor_room

A, B = PeerId("pc-1#11"), PeerId("pc-2#22")
HUB, ONE, TWO = (CurveKeys.generate() for _ in range(3))


def names(**keys: CurveKeys) -> dict[str, str]:
    return {pair.public.decode(): name for name, pair in keys.items()}


def guarded(admission: Admission) -> RouterChannel:
    return RouterChannel(HERE, keys=HUB, admission=admission)


def node(hub: RouterChannel, peer: PeerId, keys: CurveKeys) -> DealerChannel:
    return DealerChannel(hub.address, peer=peer, keys=keys, server_key=HUB.public)


async def refuse(hub: RouterChannel, reason: str, count: int) -> None:
    """Have the hub listen, hearing nobody, until it has refused so many for this reason."""
    hearing = asyncio.create_task(hub.receive())
    while hub.refusals[reason] < count:
        await hub.changed()
    assert not hearing.done()
    hearing.cancel()


async def end(*channels: DealerChannel | RouterChannel) -> None:
    for channel in channels:
        await channel.close(linger_seconds=0)


def test_only_who_has_an_authorised_key_is_heard_and_is_known_by_its_name(strangers: StrangeSockets) -> None:
    async def main() -> None:
        hub = guarded(Admission(names(pc1=ONE)))
        known = node(hub, A, ONE)
        wrong_hub = DealerChannel(hub.address, peer=A, keys=ONE, server_key=TWO.public)
        intruders = [node(hub, B, TWO), wrong_hub, DealerChannel(hub.address, peer=B)]
        plain = strangers.open(zmq.DEALER)
        plain.routing_id, plain.plain_username, plain.plain_password = b"C" + A.encode(), b"pc1", b"pc1"
        plain.connect(hub.address)
        with suppress(zmq.Again):  # there is no room where it was turned away already
            plain.send(b"let me in", zmq.NOBLOCK)
        for intruder in intruders:
            intruder.try_send(Lane.CONTROL, [b"let me in"])  # likewise
        await meet(hub, known)
        hub.send(A, Lane.CONTROL, [b"only for you"])
        assert await known.receive() == (Lane.CONTROL, [b"only for you"])
        for intruder in intruders:
            while not intruder.refused:
                await intruder.changed()
        await meet(hub, known)  # fails if it hears anybody else
        assert hub.name_of(A) == "pc1" and hub.name_of(B) == "" and hub.strangers == 0
        assert hub.refusals["key"] >= 1 and hub.refusals["handshake"] >= 2 and not known.refused
        with pytest.raises(PeerLost):
            hub.send(B, Lane.CONTROL, [b"nobody"])
        assert not plain.poll(0)
        await end(known, *intruders, hub)

    run(main)


def test_the_last_words_of_a_connection_that_has_ended_are_no_arrival(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        hub = guarded(Admission(names(pc1=ONE)))
        known = node(hub, A, ONE)
        await meet(hub, known)
        for descriptor in list(hub._speakers):  # that they have ended is heard before what came over them
            hub._gone(descriptor)
        await meet(hub, known)
        await end(known, hub)

    run(main)
    assert [record.getMessage() for record in caplog.records].count(f"{A} comes with the key of pc1") == 1


def test_a_key_that_is_authorised_later_comes_in_without_a_new_start() -> None:
    async def main() -> None:
        hub = guarded(Admission(names(pc1=ONE)))
        late = node(hub, B, TWO)
        while late.refused != "key":
            await late.changed()
        assert hub.admit(names(pc1=ONE, pc2=TWO)) == {}
        while late.refused:
            await late.changed()
        await meet(hub, late)
        await end(late, hub)

    run(main)


def test_who_asks_before_it_is_known_who_comes_in_waits_for_the_answer() -> None:
    async def main() -> None:
        hub = guarded(Admission())
        one, two = node(hub, A, ONE), node(hub, B, TWO)
        for channel in (one, two):
            await channel.send(Lane.CONTROL, [b"hello"])
        while hub.connections < 4:
            await hub.changed()
        assert not one.refused and not two.refused
        hub.admit(names(pc1=ONE))
        assert await hub.receive() == (A, Lane.CONTROL, [b"hello"])
        while not two.refused:
            await two.changed()
        await end(one, two, hub)

    run(main)


def test_a_peer_id_that_one_key_opened_is_not_taken_by_another_and_who_tries_is_told_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        hub = guarded(Admission(names(pc1=ONE, pc2=TWO)))
        owner = node(hub, A, ONE)
        await meet(hub, owner)
        thief, cut = node(hub, A, TWO), asyncio.Event()
        thief.watch(cut.set)
        for lane in Lane:
            await thief.send(lane, [b"I am the owner"])
        await refuse(hub, "name", 2)
        await meet(hub, owner)
        hub.send(A, Lane.BULK, [b"for the owner"])
        assert await owner.receive() == (Lane.BULK, [b"for the owner"])
        listening = [asyncio.create_task(channel.receive()) for channel in (thief, hub)]
        while thief.refused != "name":
            await thief.changed()
        assert f"it knows {A} by another key than this PC's" in thief.obstacle
        await cut.wait()
        while hub.connections < 4:  # it comes again, and says nothing
            await hub.changed()
        assert thief.refused == "name"
        assert hub.admit(names(pc1=ONE)) == {TWO.public.decode(): "pc2"}
        thief.try_send(Lane.CONTROL, [b"I am the owner"])  # where it was let in before that, this ends the connection
        while thief.refused != "key":
            await thief.changed()
        assert not any(task.done() for task in listening)
        for task in listening:
            task.cancel()
        await end(owner, thief, hub)

    run(main)
    said = [record.getMessage() for record in caplog.records]
    assert any(f"came with another key (the last: {A} with the key of pc2)" in line for line in said)


def test_a_revoked_key_is_refused_at_once_told_why_and_cut_while_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    heard = asyncio.Event()

    async def wait_until_heard(farewell_seconds: float) -> None:  # it says something meanwhile
        await heard.wait()

    monkeypatch.setattr(serving, "asyncio", SimpleNamespace(sleep=wait_until_heard, to_thread=asyncio.to_thread))

    async def main() -> None:
        folder = KeyFolder(tmp_path / "keys")
        one, two = (CurveKeys.load(path) for path in folder.new(["pc1", "pc2"]))
        hub = RouterChannel(HERE, keys=folder.hub(), admission=Admission())
        dismissed: asyncio.Queue[tuple[PeerId, str]] = asyncio.Queue()

        def dismiss(peer: PeerId, why: str) -> None:
            dismissed.put_nowait((peer, why))
            hub.send(peer, Lane.CONTROL, [why.encode()])

        keeper = serving.KeyWatcher(hub, folder, SimpleNamespace(dismiss=dismiss, authorised=lambda names: None))
        await keeper.look()
        stays = DealerChannel(hub.address, peer=A, keys=one, server_key=one.server)
        goes = DealerChannel(hub.address, peer=B, keys=two, server_key=two.server)
        for channel in (stays, goes):
            await meet(hub, channel)
        folder.revoke("pc2")
        looking = asyncio.create_task(keeper.look())
        peer, said_why = await dismissed.get()
        assert peer == B and "pc2" in said_why and dismissed.empty()
        lane, (why,) = await goes.receive()
        assert lane is Lane.CONTROL and b"revoked" in bytes(why)
        await goes.send(Lane.CONTROL, [b"once more"])
        await refuse(hub, "revoked", 1)
        heard.set()
        await meet(hub, stays)
        await looking
        while not goes.refused:  # it was cut, and does not come in again
            await goes.changed()
        await meet(hub, stays)
        with pytest.raises(PeerLost):
            hub.send(B, Lane.CONTROL, [b"?"])
        await end(stays, goes, hub)

    run(main)
    said = [record.getMessage() for record in caplog.records]
    assert "the key of pc2 was revoked" in said and f"{A} comes with the key of pc1" in said


def test_a_broken_key_or_folder_is_said_and_changes_nothing_for_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        folder = KeyFolder(tmp_path / "keys")
        (path,) = folder.new(["pc1"])
        keys = CurveKeys.load(path)
        (folder.authorised_folder / "broken.key").write_bytes(b"\xff\xfe no key")
        hub = RouterChannel(HERE, keys=folder.hub(), admission=Admission())
        keeper = serving.KeyWatcher(hub, folder, SimpleNamespace(authorised=lambda names: None))
        await keeper.look()
        folder.authorised_folder.rename(tmp_path / "away")
        for _ in range(3):
            await keeper.look()
        known = DealerChannel(hub.address, peer=A, keys=keys, server_key=keys.server)
        await meet(hub, known)
        await end(known, hub)

    run(main)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([line for line in said if "broken.key" in line]) == 1
    assert len([line for line in said if "folder of keys cannot be read" in line]) == 1


def test_a_process_that_begins_anew_under_its_old_id_takes_the_place_of_its_former_life() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        former = DealerChannel(hub.address, peer=A)
        await meet(hub, former)
        later = DealerChannel(hub.address, peer=A)
        await meet(hub, later)
        hub.send(A, Lane.CONTROL, [b"to the later"])
        assert await later.receive() == (Lane.CONTROL, [b"to the later"])
        await end(former, later, hub)

    run(main)


# ---- floods


def connect_raw(hub: RouterChannel, source: str = "127.0.0.1") -> socket.socket:
    host, port = parse_address(hub.address)
    return socket.create_connection((host, port), source_address=(source, 0))


def null_handshake(routing_id: bytes) -> bytes:
    """Return all that a DEALER without keys says before its first message."""
    properties = b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", routing_id))
    )
    ready = b"\x05READY" + properties
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    return greeting + b"\x04" + bytes([len(ready)]) + ready


def is_shut(connection: socket.socket) -> bool:
    """Wait until the other end sends something or closes; tell which, past the greeting."""
    connection.settimeout(60.0)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_flood_of_half_open_connections_is_cut_and_keeps_no_node_out() -> None:
    async def main() -> None:
        limits = ConnectionLimits(half_open_per_address=8, half_open=12, handshake_seconds=15.0)
        hub = RouterChannel(HERE, keys=HUB, admission=Admission(names(pc1=ONE)), limits=limits)
        raw = []
        for index in range(60):
            raw.append(connect_raw(hub, f"127.0.0.{2 + index % 3}"))
            if index % 2:
                raw[-1].sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03")  # the first bytes of a greeting
            await asyncio.sleep(0)
        while hub.refusals["half-open"] < 60 - 12:
            await hub.changed()
        known = node(hub, A, ONE)
        await meet(hub, known)
        assert hub.connections <= 12 + 2
        assert await asyncio.to_thread(is_shut, raw[0])
        for connection in raw:
            connection.close()
        await end(known, hub)

    run(main)


def test_silent_connections_that_hold_all_places_give_way_to_a_node_that_speaks() -> None:
    async def main() -> None:
        places = LEAST_CONNECTIONS
        hub = RouterChannel(HERE, limits=ConnectionLimits(places, half_open_per_address=places, half_open=places))
        looks = itertools.count(0.0, 100.0)  # every look is long after the one before
        hub._guard.clock = SimpleNamespace(monotonic=looks.__next__)
        raw = [connect_raw(hub, f"127.0.0.{2 + index % 4}") for index in range(places)]
        for index, connection in enumerate(raw):
            connection.sendall(null_handshake(f"Csilent#{index}".encode()))
        while hub.connections < places:
            await hub.changed()
        known = DealerChannel(hub.address, peer=A)
        await meet(hub, known)
        assert hub.connections == places and hub.refusals["half-open"] == 2 and not hub.refusals["full"]
        for connection in raw:
            connection.close()
        await end(known, hub)

    run(main)


def test_connections_are_cut_also_when_the_process_has_no_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        hub = RouterChannel(HERE, limits=ConnectionLimits(half_open_per_address=4))
        monkeypatch.setattr(os, "dup", no_descriptor)
        raw = [connect_raw(hub) for _ in range(8)]
        assert await asyncio.to_thread(is_shut, raw[0])
        while hub.refusals["half-open"] < 4:
            await hub.changed()
        for connection in raw:
            connection.close()
        await end(hub)

    run(main)


def test_a_connection_that_is_gone_before_it_is_looked_at_may_have_left_its_descriptor_to_another_file() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        pair = socket.socketpair()
        with open(os.devnull) as file, pair[0], pair[1]:
            for descriptor in (pair[0].fileno(), file.fileno()):
                hub._guard.take([struct.pack("=HI", int(zmq.EVENT_ACCEPTED), descriptor)])
            assert hub.connections == 0
        known = DealerChannel(hub.address, peer=A)
        await meet(hub, known)
        assert hub.connections == 1
        await end(known, hub)

        assert hub.connections  # and who comes next is counted


BROKER_OF_64_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from zmqtrain.broker.serve import serve
from zmqtrain.core.settings import RunSettings
def ready(broker): print(broker.channel.address, flush=True)
serve("tcp://127.0.0.1:0", RunSettings(), ready=ready, interrupted=lambda count: None)
"""


def test_a_late_node_joins_a_broker_of_64_descriptors_while_120_silent_connections_are_held() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BROKER_OF_64_DESCRIPTORS], stdout=subprocess.PIPE, text=True
    ) as broker:
        assert broker.stdout is not None
        try:
            hub = SimpleNamespace(address=broker.stdout.readline().strip())
            with connect(hub.address, "early", codec_on="host", timeout_seconds=60.0) as early, ExitStack() as held:
                for index in range(120):
                    raw = held.enter_context(connect_raw(hub, f"127.0.0.{2 + index % 4}"))
                    with suppress(ConnectionError):  # cut already
                        raw.sendall(b"" if index % 3 == 0 else null_handshake(f"C{index}".encode()))
                with connect(hub.address, "late", codec_on="host", timeout_seconds=60.0) as late:
                    assert late.run == early.run
        finally:
            broker.kill()


def test_a_peer_that_is_dismissed_reads_why_is_cut_with_all_it_has_queued_and_may_connect_again() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        bad, good = (DealerChannel(hub.address, peer=peer) for peer in (A, B))
        await meet(hub, bad)
        await meet(hub, good)
        before = {number for _, _, number in hub_connections(hub)}
        hub.send(A, Lane.CONTROL, [b"why"])
        hub.dismiss(A)
        for _ in range(50):
            await bad.send(Lane.CONTROL, [b"flood"])
        await good.send(Lane.CONTROL, [b"honest"])
        assert await hub.receive() == (B, Lane.CONTROL, [b"honest"])
        assert await bad.receive() == (Lane.CONTROL, [b"why"])
        heard = b""
        while heard != b"again":  # on a new connection, once the old one has ended
            await bad.send(Lane.CONTROL, [b"again"])
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    peer, _, (heard,) = await hub.receive()
                    assert peer == A
        assert hub.refusals["dismissed"] > 0
        assert len({number for _, _, number in hub_connections(hub)} - before) >= 1
        await end(bad, good, hub)

    run(main)


def hub_connections(hub: RouterChannel) -> list[tuple[str, int, int]]:
    """Return the address, port and number of each connection."""
    hub._guard.look()
    return [(one.address, one.port, one.number) for one in hub._guard.connections.of("127.0.0.1")]


def test_who_is_slow_to_say_who_it_is_is_cut_when_a_handshake_may_last_no_longer() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE, keys=HUB, limits=ConnectionLimits(handshake_seconds=0.3))
        with closing(connect_raw(hub)) as loris:
            loris.sendall(b"\xff\x00\x00\x00\x00")
            assert await asyncio.to_thread(is_shut, loris)
        await end(hub)

    run(main)


def test_an_address_has_a_bounded_number_of_connections_and_others_are_let_in() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE, limits=ConnectionLimits(per_address=6))
        nodes = [DealerChannel(hub.address, peer=PeerId(f"pc#{number}")) for number in range(3)]
        for one in nodes:
            await meet(hub, one)
        with closing(connect_raw(hub)) as more:
            assert await asyncio.to_thread(is_shut, more)
        assert hub.refusals["address"] == 1 and hub.connections == 6
        with closing(connect_raw(hub, "127.0.0.9")) as other:
            while hub.connections < 7:
                await hub.changed()
            other.sendall(b"x")
        await end(*nodes, hub)

    run(main)


def test_only_who_breaks_several_connections_in_a_row_is_taken_for_no_hub_and_not_one_that_is_just_ending() -> None:
    async def main() -> None:
        broken, loop = 0, asyncio.get_running_loop()

        def hang_up() -> None:
            nonlocal broken
            broken += 1
            no_hub.accept()[0].close()

        with socket.create_server(("127.0.0.1", 0)) as no_hub:
            loop.add_reader(no_hub, hang_up)
            lost = DealerChannel(f"tcp://127.0.0.1:{no_hub.getsockname()[1]}", peer=A)
            while not lost.refused:
                await lost.changed()
            assert lost.refused == "broken" and broken >= 4 and "no zmqtrain-broker" in lost.obstacle
            loop.remove_reader(no_hub)
            await lost.close()

    run(main)


def test_a_frame_larger_than_any_of_ours_ends_the_connection_before_it_is_taken(strangers: StrangeSockets) -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        with closing(connect_raw(hub)) as liar:
            liar.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
            liar.sendall(b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00")
            liar.sendall(b"\x02" + (MAX_WIRE_FRAME_BYTES + 1).to_bytes(8, "big") + b"the first bytes of it")
            assert await asyncio.to_thread(is_shut, liar)
        assert hub.strangers == 0
        await end(hub)

    run(main)


def test_refusals_are_said_at_a_bounded_rate(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SAY_SECONDS", 3600.0)  # they are not over yet, however long four refusals take

    async def main() -> None:
        hub = guarded(Admission(names(pc1=ONE)))
        intruder = node(hub, B, TWO)
        while hub.refusals["key"] < 4:
            await hub.changed()
        assert len([one for one in caplog.records if "not authorised" in one.getMessage()]) == 1
        await end(intruder, hub)

    run(main)
    counted = [one.getMessage() for one in caplog.records if "not authorised" in one.getMessage()]
    assert len(counted) == 2 and "the last: 127.0.0.1" in counted[0]


def test_a_port_takes_no_more_connections_than_the_process_may_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2048))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    assert descriptor_room(4096) == 1024 - 128 and asked == []
    assert descriptor_room(4096, grow=True) == 2048 - 128 and asked == [(2048, 2048)]
    assert descriptor_room(100) == 100


def test_a_peer_is_of_this_machine_if_all_its_connections_come_from_addresses_of_it(monkeypatch):
    async def main() -> None:
        hub = RouterChannel(HERE)
        channel = DealerChannel(hub.address, peer=A)
        await channel.send(Lane.CONTROL, [b"here"])
        assert (await hub.receive())[0] == A
        assert hub.is_of_this_machine(A) and not hub.is_of_this_machine(B)
        monkeypatch.setattr("zmqtrain.transport.zmq_channels.is_own_address", lambda address: address != "127.0.0.1")
        assert not hub.is_of_this_machine(A)
        await end(channel, hub)

    run(main)
    assert is_own_address("127.0.0.1")
    assert not any(is_own_address(host) for host in ("192.0.2.1", "2001:db8::1"))


def test_after_a_restart_an_id_is_its_owners_as_long_as_a_key_of_that_name_comes_in() -> None:
    async def main() -> None:
        hub = guarded(Admission(names(pc1=ONE, pc2=TWO)))
        hub.remember(lambda peer: "pc1" if peer == A else "a name that was revoked")
        intruder, owner = node(hub, A, TWO), node(hub, B, TWO)
        await intruder.send(Lane.CONTROL, [b"first"])
        await refuse(hub, "name", 1)
        await meet(hub, owner)
        honest = node(hub, A, ONE)
        await meet(hub, honest)
        assert hub.name_of(A) == "pc1" and hub.name_of(B) == "pc2"
        await end(intruder, owner, honest, hub)

    run(main)
