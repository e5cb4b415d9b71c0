"""Opens a process's port to its group, whose processes meet at a broker.

A process listens at the address by which it reaches the hub itself, because the others reach it there.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from zmqtrain.collectives.group_connection import GroupConnection
from zmqtrain.collectives.mesh import Meeting, MeshPort
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.groups import MAX_PROCESSES
from zmqtrain.protocol.messages import JoinGroup
from zmqtrain.transport.address import is_loopback, local_address, parse_address, public_address
from zmqtrain.transport.admission import Admission
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import Credentials, CurveKeys, GivenKeys, GivenServerKey, read_credentials

MEETING_SECONDS, DIRECT_SECONDS = 60.0, 3.0
"""A process that is not reached directly within this is reached through the hub."""


def open_port(
    hub: str,
    size: int,
    rank: int | None = None,
    *,
    group: str = "default",
    description: str = "",
    name: str | None = None,
    server_key: GivenServerKey = None,
    keys: GivenKeys = None,
    timeout_seconds: float = MEETING_SECONDS,
    direct_seconds: float = DIRECT_SECONDS,
    listen: str = "",
    address: str = "",
) -> MeshPort:
    """Meet `size` processes at the broker at `hub` ("tcp://hub:5555"), and return this one's port to all of them.

    rank: the wanted rank, 0 to size - 1; None: by arrival.  group: processes that give the same name meet.
    description: must be the same for all of them.  name: for people; default: the host's name and the process's
    number.  server_key, keys: as for `zmqtrain.connect`, but no key file is searched; with keys all connections are
    encrypted, and the processes let in nobody but each other, by keys made for this group.
    timeout_seconds: how long to wait for the hub and for the others.  direct_seconds: a process that is not reached
    directly within this is reached through the hub.  listen: where this process listens, port 0 chooses a free one
    ("": at the address by which it reaches the hub); address: where the others reach it, if not there.

    Raises ConfigError for invalid arguments, HubUnreachable if no broker answers, JoinRefused if the others were
    started with other arguments, CollectiveTimeout, which names the processes here, if some are missing.
    """
    name = name or f"{socket.gethostname().partition('.')[0] or 'process'}-{os.getpid()}"
    if not name.isprintable() or len(name) > 64 or "#" in name:
        raise ConfigError(f"a process's name is at most 64 printable characters without '#', got {name!r}")
    if not isinstance(size, int) or not 1 <= size <= MAX_PROCESSES:
        raise ConfigError(f"size must be 1 to {MAX_PROCESSES}, got {size!r}")
    if rank is not None and not 0 <= rank < size:
        raise ConfigError(f"rank must be 0 to {size - 1} in a group of {size}, or None for any, got {rank}")
    if timeout_seconds <= 0 or direct_seconds <= 0:
        raise ConfigError(f"a time to wait must be above 0 s, got {min(timeout_seconds, direct_seconds)}")
    hub_key, pair = read_credentials(server_key, keys)
    asked = JoinGroup(group, size, -1 if rank is None else rank, description, address)
    keep_freed_memory()
    port = MeshPort(HubRendezvous(hub, name, asked, timeout_seconds, listen, hub_key, pair), direct_seconds)
    port.open()
    return port


class _Dialer(NamedTuple):
    """Connects to the hub of a group; the channel shares the threads of `beside`."""

    credentials: Credentials
    beside: RouterChannel

    def dial(self, address: str, peer: PeerId) -> Channel:
        """See Dialer."""
        hub_key, pair = self.credentials
        return DealerChannel.connect(address, peer=peer, keys=pair, server_key=hub_key, beside=self.beside)


@dataclass
class HubRendezvous:
    """A group's meeting at the broker at `hub` (a `Rendezvous`). listen: as in `open_port`; the rest as the hub has it.

    If the hub has keys, the processes let in nobody but each other, by keys made for this group alone.
    """

    hub: str
    name: str
    asked: JoinGroup
    timeout_seconds: float
    listen: str
    hub_key: bytes | None
    pair: CurveKeys | None = field(repr=False)

    async def meet(self) -> Meeting:
        """Bind, connect to the hub, and wait for the others. Raises as `open_port`."""
        own = CurveKeys.generate() if self.hub_key is not None else None
        bound = self.listen or _address_towards(self.hub)
        router = RouterChannel.bind(bound, keys=own, admission=None if own is None else Admission())
        connection = GroupConnection(_Dialer((self.hub_key, self.pair), router), self.hub, self.name)
        key, token = own.public.decode() if own is not None else "", secrets.token_hex(16)
        address = self.asked.address or public_address(bound, router.address, self.hub)
        asked = replace(self.asked, address=address, key=key, token=token)
        try:
            return Meeting(router, connection, await connection.meet(asked, self.timeout_seconds), own)
        except BaseException:
            await connection.leave()
            await router.close(0.0)
            raise


def keep_freed_memory() -> None:
    """Make the C library keep freed memory, up to some 60 MB a thread, for reuse.

    glibc returns large blocks to the kernel at once, and each page of the next block costs a fault, more than receiving
    it. Its limit for large is the largest block of at most 32 MB that was freed: this frees one that was never touched.
    Other C libraries are not changed.
    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, the dynamic adjustment.
    """
    np.empty(31 << 20, np.uint8)


def _address_towards(hub: str) -> str:
    """Return the address to listen at: that of the interface by which this machine reaches the hub.

    Raises ConfigError for an invalid address of the hub.
    """
    host, port = parse_address(hub)
    if is_loopback(hub):
        return f"tcp://{'[::1]' if ':' in host else '127.0.0.1'}:0"
    here = local_address(host, port)
    if not here:
        raise ConfigError(f"no way leads from here to {host}: check the address of the hub and this machine's network")
    return f"tcp://{f'[{here}]' if ':' in here else here}:0"
