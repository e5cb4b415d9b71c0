"""Record every byte that passes a host's port on the star, and look for words in what was said.

Rule: what is searched is what TCP carried, put together by connection and direction: a word that lies across two
packets is found too, and one that was sent twice is there once.
Source: Linux packet(7), RFC 791, RFC 9293.
"""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from star import Host, Star

__all__ = ["Capture", "Flow", "find_words", "read_flows", "record"]

EVERY_PROTOCOL = 3  # ETH_P_ALL
BUFFER_BYTES, LARGEST_BYTES = 64 << 20, 1 << 18
RECEIVE_BUFFER_FORCED = 33  # SO_RCVBUFFORCE


@dataclass(frozen=True, order=True)
class Flow:
    """One direction of one TCP connection."""

    source: str
    source_port: int
    sink: str
    sink_port: int


class Capture:
    """Records at a host's port from the beginning of a with-block to its end; then `flows` has what was said."""

    def __init__(self, star: Star, host: Host, file: Path) -> None:
        self._star, self._host, self._file = star, host, file
        self.flows: dict[Flow, bytes] = {}

    def __enter__(self) -> Capture:
        self._process = self._star.popen(
            self._host,
            [sys.executable, __file__, str(self._file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RuntimeError("a capture needs root (CAP_NET_RAW) and a kernel with packet sockets")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its standard input: it writes what is left, and ends
        if kind is None:
            if self._process.returncode:
                raise RuntimeError("packets were lost while they were recorded: the machine is too busy")
            self.flows = read_flows(self._file.read_bytes())

    def said_to_or_by(self, address: str) -> bytes:
        """Return all that was said on the connections of an address, one after the other."""
        return b"\0".join(text for flow, text in sorted(self.flows.items()) if address in (flow.source, flow.sink))


def find_words(said: bytes, words: Iterable[bytes]) -> list[bytes]:
    """Return those words that are in it."""
    return [word for word in words if word in said]


def read_flows(record: bytes) -> dict[Flow, bytes]:
    """Return what each direction of each TCP connection has carried, of a record of Ethernet frames."""
    pieces: defaultdict[Flow, dict[int, bytes]] = defaultdict(dict)
    at = 0
    while at < len(record):
        (length,) = struct.unpack_from("<I", record, at)
        frame, at = record[at + 4 : at + 4 + length], at + 4 + length
        if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
            continue
        head = 4 * (frame[14] & 15)
        total = struct.unpack_from("!H", frame, 16)[0] or len(frame) - 14  # 0: a segment that the card would have cut
        begin = 14 + head
        source_port, sink_port, number = struct.unpack_from("!HHI", frame, begin)
        payload = frame[begin + 4 * (frame[begin + 12] >> 4) : 14 + total]
        flow = Flow(socket.inet_ntoa(frame[26:30]), source_port, socket.inet_ntoa(frame[30:34]), sink_port)
        if len(payload) > len(pieces[flow].get(number, b"")):
            pieces[flow][number] = payload
    return {flow: _join(parts) for flow, parts in pieces.items()}


def _join(parts: dict[int, bytes]) -> bytes:
    if not parts:
        return b""
    begin = next(iter(parts))  # the first that was seen: numbers may go round
    said, reached = [], 0
    for offset, payload in sorted(((number - begin) & 0xFFFFFFFF, payload) for number, payload in parts.items()):
        new = payload[max(0, reached - offset) :]
        if new:
            said.append(new)
            reached = offset + len(payload)
    return b"".join(said)


def record(file: Path) -> int:
    """Write every frame that passes eth0 to a file, each after its length, until standard input closes.

    Returns the exit code: 1 if frames were lost.
    """
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)) as port, file.open("wb") as out:
        port.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER_FORCED, BUFFER_BYTES)
        port.bind(("eth0", 0))
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([port, sys.stdin], [], [])
            if port in ready:
                frame = port.recv(LARGEST_BYTES)
                out.write(struct.pack("<I", len(frame)) + frame)
            elif ready:
                break
        _, lost = struct.unpack("II", port.getsockopt(263, 6, 8))  # SOL_PACKET, PACKET_STATISTICS
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(record(Path(sys.argv[1])))
