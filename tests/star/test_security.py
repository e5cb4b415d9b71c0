"""What can be seen and done on the wire without a key: every byte of short runs on the star, with keys and without."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import security
from capture import Capture, Flow, find_words, read_flows

from zmqtrain.transport.key_folder import KeyFolder
from zmqtrain.transport.zmq_keys import CurveKeys

from star import Star

PARAMETERS = np.random.default_rng(7).standard_normal(50_000, np.float32).tobytes()
NODE = "captured-node"
WORDS = [b"capture-me", b"attention/kernel", b"float32", b"broadcast_codec", b"\xa5Hello", b"Welcome", NODE.encode()]
WORDS += [PARAMETERS[at : at + 16] for at in range(0, 4096, 512)]
"""What must not be seen: program, leaf paths, settings, the messages' names, a node's name, and parameters.

None is so short that it is found by chance where tens of megabytes look like noise."""

INTRUDERS = """
import asyncio, json, sys, zmq
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Hello
from zmqtrain.transport.zmq_channels import DealerChannel
from zmqtrain.transport.zmq_keys import read_credentials
from zmqtrain.core.types import Lane, PeerId
host, hub_key, other_key, stranger, known = sys.argv[1:]
address = f"tcp://{host}:5555"

async def intrude(server_key, keys):
    hub, pair = read_credentials(server_key, keys)
    channel = DealerChannel(address, peer=PeerId("intruder#1"), keys=pair, server_key=hub)
    await channel.send(Lane.CONTROL, [encode_message(Hello("intruder"))])
    heard, turned_away = asyncio.create_task(channel.receive()), asyncio.create_task(refusal_of(channel))
    await asyncio.wait([heard, turned_away], return_when=asyncio.FIRST_COMPLETED)
    said = "heard" if heard.done() else turned_away.result()
    heard.cancel()
    turned_away.cancel()
    await channel.close(0.0)
    return said

async def refusal_of(channel):
    while not channel.refused:
        await channel.changed()
    return channel.refused

def plain():
    context = zmq.Context()
    one = context.socket(zmq.DEALER)
    one.routing_id, one.linger = b"Ccaptured-node#1", 0
    one.plain_username, one.plain_password = b"captured-node", b"secret"
    monitor = one.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
    one.connect(address)
    one.send(b"let me in")
    said = "refused" if monitor.poll(20_000) and not one.poll(0) else "heard"
    one.disable_monitor()
    context.destroy(linger=0)
    return said

async def listen():  # to all that is said to who begins as ZMTP says, and goes on with nonsense
    reader, writer = await asyncio.open_connection(host, 5555)
    writer.write(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"CURVE".ljust(20, b"\\0") + bytes(32))
    greeting = await reader.readexactly(64)
    writer.write(b"\\x04\\x10\\x05HELLO let me in!")
    rest = await reader.read()
    writer.close()
    return greeting.hex(), rest.hex()

async def main():
    said = await asyncio.gather(
        intrude(hub_key, stranger), intrude(other_key, known), intrude("", ""), asyncio.to_thread(plain), listen()
    )
    print(json.dumps(said), flush=True)
asyncio.run(main())
"""


def test_the_wire_shows_all_without_keys_and_nothing_with_them_and_who_has_none_gets_nothing_in(
    tmp_path: Path,
) -> None:
    keys = KeyFolder(tmp_path / "keys")
    (file,) = keys.new([NODE])
    with Star(nodes=2, bits_per_second=1e9) as star:
        address = f"tcp://{star.hub_address}:5555"

        def federate(capture: Capture, folder: str, node_keys: str) -> list[bytes]:
            """Have a node exchange with a broker while all is recorded; return what of the run could be read."""
            with capture:
                broker, run_id = security.start(star, "hub", security.BROKER, folder)
                node, _ = security.start(star, 0, security.NODE, NODE, address, node_keys)
                assert run_id.startswith("run-")
                if folder:
                    intrude()
                node.terminate()
                broker.terminate()
                for process in (node, broker):
                    process.communicate()
            said = capture.said_to_or_by(star.node_address(0))
            assert len(said) > 2 * len(PARAMETERS)
            return find_words(said, [*WORDS, run_id.encode()])

        def intrude() -> None:
            for name in ("stranger", "other-hub"):
                CurveKeys.generate().save(tmp_path, name)
            files = [keys.path / "hub.key", tmp_path / "other-hub.key", tmp_path / "stranger.key_secret", file]
            argv = [sys.executable, "-c", INTRUDERS, star.hub_address, *map(str, files)]
            output, _ = star.popen(1, argv, stdout=subprocess.PIPE, text=True).communicate()
            *said, (greeting, rest) = json.loads(output)
            assert said in (["key", "broken", which, "refused"] for which in ("handshake", "broken"))
            words = bytes.fromhex(greeting)
            assert words[12:32] == b"CURVE".ljust(20, b"\0") and not any(words[33:]) and rest == ""

        readable = federate(Capture(star, "hub", tmp_path / "open"), "", "")
        assert len(readable) == len(WORDS) + 1, "a capture of a run without keys shows it all"
        secret = Capture(star, "hub", tmp_path / "closed")
        assert federate(secret, str(keys.path), str(file)) == []
        assert find_words(secret.said_to_or_by(star.node_address(1)), WORDS) == []


def test_a_revoked_node_is_out_and_one_that_stays_is_cut_while_another_trains_on(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    keys.hub()
    with Star(nodes=2, bits_per_second=1e9) as star:
        seconds = security.measure_revocation(star, keys)
    print(seconds)
    assert set(seconds) == {"seconds_told", "seconds_cut"}


def frame(source: int, number: int, payload: bytes) -> bytes:
    tcp = struct.pack("!HHIIBBHHH", source, 5555, number, 0, 5 << 4, 0, 0, 0, 0)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 0, 0, 64, 6, 0, bytes((10, 0, 0, 1)), bytes(4))
    packet = bytes(12) + b"\x08\x00" + ip + tcp + payload
    return struct.pack("<I", len(packet)) + packet


@pytest.mark.parametrize("begin", [1000, 0xFFFFFFFE])
def test_what_was_said_is_put_together_in_order_and_once(begin: int) -> None:
    pieces = [(0, b"the "), (4, b"wo"), (10, b"two"), (6, b"rd, "), (4, b"word"), (0, b"the ")]
    record = b"".join(frame(7, (begin + at) % 2**32, text) for at, text in pieces) + frame(8, 5, b"another")
    flows = read_flows(record)
    assert flows == {
        Flow("10.0.0.1", 7, "0.0.0.0", 5555): b"the word, two",
        Flow("10.0.0.1", 8, "0.0.0.0", 5555): b"another",
    }
    assert socket.inet_aton(next(iter(flows)).source) == bytes((10, 0, 0, 1))
