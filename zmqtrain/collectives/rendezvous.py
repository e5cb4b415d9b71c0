"""Open a port to the other processes of a group, which meet at a broker.

Rule 1: who asks gets a port to all of the group, or an error that says who is missing or what differs.  Rule 2: a
process listens where the others can reach it: at the address by which it reaches the hub itself.  Rule 3: what comes is
put into memory that was used before (`keep_freed_memory`): fresh pages cost as much as all else that is done with it.
"""

from __future__ import annotations

import os
import secrets
import socket

import numpy as np

from zmqtrain.collectives.hub_line import HubLine
from zmqtrain.collectives.mesh import Meeting, MeshPort
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.groups import MAX_PROCESSES
from zmqtrain.protocol.messages import JoinGroup
from zmqtrain.transport.address import is_loopback, local_address, parse_address, public_address
from zmqtrain.transport.admission import Admission
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import CurveKeys, GivenKeys, GivenServerKey, read_credentials

TIMEOUT_SECONDS = 60.0
DIRECT_SECONDS = 3.0
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
    timeout_seconds: float = TIMEOUT_SECONDS,
    direct_seconds: float = DIRECT_SECONDS,
    listen: str = "",
    address: str = "",
) -> MeshPort:
    """Meet `size` processes at the broker at `hub` ("tcp://hub:5555"), and return this one's port to all of them.

    rank: which of them this one wants to be, 0 to size - 1; None: any (by arrival).  group: those who give the same
    name meet.  description: must be the same for all of them.  name: for people; the host's name and the process's
    number if not given.  server_key, keys: as for `zmqtrain.connect`, and none is looked for; then all connections are
    encrypted, and the processes let in nobody but each other, by keys made for this group.
    timeout_seconds: how long to wait for the hub and for the others.  direct_seconds: a process that is not reached
    within this is sent to through the hub.  listen: where this process listens, port 0 chooses a free one ("": at the
    address by which it reaches the hub); address: where the others reach it, if that is somewhere else.

    Raises ConfigError for what cannot be, HubUnreachable if no broker answers, JoinRefused if the others were started
    with other arguments, CollectiveTimeout, which says who is here, if some are missing.
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
    peer = PeerId(f"{name}#{secrets.token_hex(4)}")
    hub_key, pair = read_credentials(server_key, keys)
    own = CurveKeys.generate() if hub_key is not None else None  # for this group alone

    async def meet() -> Meeting:
        bound = listen or _address_towards(hub)
        router = RouterChannel.bind(bound, keys=own, admission=None if own is None else Admission())
        try:
            channel = DealerChannel.connect(hub, peer=peer, keys=pair, server_key=hub_key, beside=router)
        except BaseException:
            await router.close(0.0)
            raise
        line = HubLine(channel, hub, name)
        key, token = own.public.decode() if own is not None else "", secrets.token_hex(16)
        said = address or public_address(bound, router.address, hub)
        asked = JoinGroup(group, size, -1 if rank is None else rank, description, said, key, token)
        try:
            return Meeting(router, line, await line.meet(asked, timeout_seconds), own)
        except BaseException:
            await line.leave()
            await router.close(0.0)
            raise

    keep_freed_memory()
    port = MeshPort(meet, direct_seconds)
    port.open()
    return port


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, up to some 60 MB a thread, for the next time that it is asked for.

    glibc gives large blocks back to the kernel at once, and the next one's pages come by a fault each, which costs more
    than to receive them. It learns what is large from the largest block of at most 32 MB that was freed: this frees one
    that was never touched. Other C libraries do as they do.
    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, the dynamic adjustment.
    """
    np.empty(31 << 20, np.uint8)


def _address_towards(hub: str) -> str:
    """Return the address to listen at: that of the interface by which this machine reaches the hub.

    Raises ConfigError for a hub's address that is none.
    """
    host, port = parse_address(hub)
    if is_loopback(hub):
        return f"tcp://{'[::1]' if ':' in host else '127.0.0.1'}:0"
    here = local_address(host, port)
    if not here:
        raise ConfigError(f"no way leads from here to {host}: check the address of the hub and this machine's network")
    return f"tcp://{f'[{here}]' if ':' in here else here}:0"
