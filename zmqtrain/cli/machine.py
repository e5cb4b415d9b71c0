"""Look at this PC and its way to a hub: interface, MTU, cards, memory, versions. Nothing here judges.

Rule: what cannot be found out is None; only what keeps a hub from being reached is an error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zmqtrain.core.errors import HubUnreachable
from zmqtrain.core.installed import has_nvidia_driver, how_to_install
from zmqtrain.core.types import VERSION
from zmqtrain.transport.address import parse_address
from zmqtrain.transport.zmq_port import libzmq_version

_IP_MTU = 14
"""Of Linux, ip(7); Python's socket module does not name it."""
_SIOCGIFADDR = 0x8915
_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
"""How a ZMTP 3 connection begins (RFC 23): its first 10 bytes."""
_DEVICES_SECONDS = 120.0
PACKAGES = ("jax", "numpy", "pyzmq", "optax", "numba")


@dataclass(frozen=True, kw_only=True)
class WayToHub:
    """The connection to a hub. own: this PC's address on it.  path_mtu: bytes, None off Linux.

    interface: its name; mtu and bits_per_second: of it, None where it does not say.
    """

    own: str
    interface: str | None
    path_mtu: int | None
    mtu: int | None
    bits_per_second: int | None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This PC. devices: what JAX sees, None if it cannot be asked (`devices_error` says why).

    load: processes that want a core, over the last minute.  versions: by package, None: not installed.
    """

    cores: int
    load: float
    free_memory_bytes: int | None
    free_disk_bytes: int
    devices: tuple[dict[str, Any], ...] | None
    devices_error: str
    has_nvidia_driver: bool
    versions: dict[str, str | None]


def find_way(address: str, wait_seconds: float) -> WayToHub:
    """Connect to the hub's port and look at the connection. Raises HubUnreachable, saying at what it failed and what to
    do; ConfigError for an address that is none."""
    host, port = parse_address(address)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise HubUnreachable(
            f"this PC knows no host named {host!r} ({error.strerror}): give the hub's address in numbers, as the "
            "broker printed it",
            address,
        ) from error
    try:
        connection = socket.create_connection((host, port), wait_seconds)
    except ConnectionRefusedError as error:
        raise HubUnreachable(
            f"{host} is there, but nothing listens on port {port}: start the broker on it (zmqtrain-broker --bind "
            f"tcp://*:{port}), or correct the port",
            address,
        ) from error
    except TimeoutError as error:
        raise HubUnreachable(
            f"{host} does not answer on port {port} (waited {wait_seconds:g} s): is it switched on, is the address "
            f"right, and does its firewall let TCP port {port} in?",
            address,
        ) from error
    except OSError as error:
        raise HubUnreachable(
            f"there is no way to {host} ({error.strerror}): is this PC on the hub's network?", address
        ) from error
    with closing(connection):
        _check_greeting(connection, address, wait_seconds)
        own = str(connection.getsockname()[0])
        name = _interface_of(own)
        return WayToHub(
            own=own,
            interface=name,
            path_mtu=_path_mtu(connection),
            mtu=_number(Path(f"/sys/class/net/{name}/mtu")),
            bits_per_second=_interface_rate(name),
        )


def _check_greeting(connection: socket.socket, address: str, wait_seconds: float) -> None:
    """Raise HubUnreachable unless ZeroMQ is at the other end: it speaks first."""
    connection.settimeout(wait_seconds)
    received = b""
    try:
        while len(received) < len(_GREETING) and (more := connection.recv(len(_GREETING) - len(received))):
            received += more
    except OSError:
        pass
    if len(received) < len(_GREETING) or received[0] != _GREETING[0] or received[-1] != _GREETING[-1]:
        port = parse_address(address)[1]
        raise HubUnreachable(
            f"what listens at {address} is no broker (it does not speak ZeroMQ): correct the port, or see who has it "
            f"there: ss -ltnp 'sport = :{port}'",
            address,
        )


def _path_mtu(connection: socket.socket) -> int | None:
    if sys.platform != "linux" or connection.family != socket.AF_INET:
        return None
    try:
        return connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return None


def _interface_of(own: str) -> str | None:
    """Return the name of the interface that has this IPv4 address; None where that cannot be asked."""
    if sys.platform != "linux":
        return None
    import fcntl

    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None


def _interface_rate(name: str | None) -> int | None:
    megabits = _number(Path(f"/sys/class/net/{name}/speed"))
    return megabits * 10**6 if megabits is not None and megabits > 0 else None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def look_at_machine(folder: Path) -> Machine:
    """Look at this PC; folder: on whose disk a run would write. Takes as long as JAX takes to start."""
    devices, error = _ask_devices()
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0],
        free_memory_bytes=_free_memory(),
        free_disk_bytes=shutil.disk_usage(folder).free,
        devices=devices,
        devices_error=error,
        has_nvidia_driver=has_nvidia_driver(),
        versions={
            "zmqtrain": VERSION,
            "python": platform.python_version(),
            "libzmq": libzmq_version(),
            **{package: _version_of(package) for package in PACKAGES},
        },
    )


def _ask_devices() -> tuple[tuple[dict[str, Any], ...] | None, str]:
    """Ask JAX in a process of its own, that takes no more of a card than it needs; return (devices, why none)."""
    if importlib.util.find_spec("jax") is None:
        return None, f"jax is not installed. Type:  {how_to_install('cuda12' if has_nvidia_driver() else '')}"
    asking = [sys.executable, "-m", "zmqtrain.train.seen"]
    if (env := shutil.which("env")) is not None:  # else three quarters of a card that trains are asked for
        asking = [env, "XLA_PYTHON_CLIENT_PREALLOCATE=false", *asking]
    try:
        said = subprocess.run(asking, capture_output=True, text=True, timeout=_DEVICES_SECONDS, check=True)
        return tuple(json.loads(said.stdout.splitlines()[-1])), ""
    except subprocess.TimeoutExpired:
        return None, f"jax has not said in {_DEVICES_SECONDS:g} s what it can train on: is the card's driver all right?"
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no words"])[-1]
        return None, f"jax does not start: {last[:200]}"
    except (ValueError, IndexError):
        return None, "jax starts, but does not say what it can train on"


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
