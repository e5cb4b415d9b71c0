"""Be a bad cable of one host of a star: frames are lost, changed, sent twice or overtaken, at random.

    eth0 ═══ n3 ── this process ── c3 ═══ b3 ── bridge            in place of            eth0 ═══ n3 ── bridge

Rule 1: what is disturbed are Ethernet frames, for real: TCP sees what it would see, and must make good.
Rule 2: a changed frame has one bit flipped behind its Ethernet header; checksums are made by the sending side, not left
to a card that is not there, so that the receiver can tell.
Rule 3: the random numbers are the seed's; which frames they hit depends on when these come.
Sources: Linux packet(7), veth(4); SIOCETHTOOL in linux/ethtool.h. In place of tc-netem(8), which not every kernel has.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import time

__all__ = ["Disturber", "checksum_in_software", "main"]

SIOCETHTOOL = 0x8946
ETHTOOL_STXCSUM = 0x17
ETH_P_ALL = 0x0003
MAX_FRAME = 1 << 17
LATE_SECONDS = 0.005
"""How long a frame is held back that others overtake."""
HEADER_BYTES = 14
IDLE_SECONDS = 1.0


def checksum_in_software(device: str) -> None:
    """Have this device's sender make TCP's checksums and cut its segments itself. Raises OSError."""
    value = array.array("B", struct.pack("II", ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP", device.encode(), value.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


class Disturber:
    """Decides, frame by frame, what becomes of it. Shares in 0..1: of the frames that are lost, changed, sent twice, or
    held back until others have overtaken them."""

    def __init__(self, seed: int, lose: float, corrupt: float, duplicate: float, reorder: float) -> None:
        self._random = random.Random(seed)
        self.lose, self.corrupt, self.duplicate, self.reorder = lose, corrupt, duplicate, reorder

    def pass_on(self, frame: bytes) -> list[tuple[float, bytes]]:
        """Return what goes on its way instead: (seconds later, frame) of each."""
        draw = self._random.random
        if draw() < self.lose:
            return []
        if draw() < self.corrupt and len(frame) > HEADER_BYTES:
            changed = bytearray(frame)
            changed[self._random.randrange(HEADER_BYTES, len(frame))] ^= 1 << self._random.randrange(8)
            frame = bytes(changed)
        late = LATE_SECONDS if draw() < self.reorder else 0.0
        return [(late, frame)] * (2 if draw() < self.duplicate else 1)


def forward(left: str, right: str, disturber: Disturber) -> None:
    """Pass frames between two devices, both ways, until this process is ended."""
    sockets = {name: _open(name) for name in (left, right)}
    other = {sockets[left]: sockets[right], sockets[right]: sockets[left]}
    order, waiting = itertools.count(), list[tuple[float, int, socket.socket, bytes]]()
    print("forwards", flush=True)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else IDLE_SECONDS
        for source in select.select(list(other), [], [], pause)[0]:
            frame, (_, _, kind, *_) = source.recvfrom(MAX_FRAME)
            if kind == socket.PACKET_OUTGOING:  # our own
                continue
            for late, one in disturber.pass_on(frame):
                heapq.heappush(waiting, (time.monotonic() + late, next(order), other[source], one))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, sink, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a queue that is full, or a device that is down: lost
                sink.send(frame)


def _open(device: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.bind((device, ETH_P_ALL))
    return opened


def main() -> None:
    """Forward between two devices, or (with --checksum) only prepare one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("devices", nargs="+", help="two devices; with --checksum one or more")
    parser.add_argument("--checksum", action="store_true", help="have them make checksums in software, and end")
    parser.add_argument("--seed", type=int, default=0, help="of what is hit (default %(default)s)")
    for kind in ("lose", "corrupt", "duplicate", "reorder"):
        parser.add_argument(f"--{kind}", type=float, default=0.0, help="the share of frames (default %(default)s)")
    options = parser.parse_args()
    if options.checksum:
        for device in options.devices:
            checksum_in_software(device)
        return
    left, right = options.devices
    shares = (options.lose, options.corrupt, options.duplicate, options.reorder)
    forward(left, right, Disturber(options.seed, *shares))


if __name__ == "__main__":
    main()
