"""Whether this PC can train with a hub, and what to fix: `zmqtrain doctor HUB`.

Rule 1: `find_way`, `look_at_machine` and `planning.probe` measure; `judge_*` judge, and are pure.
Rule 2: a bad finding says what to do.  Rule 3: the exit code is 1 if something is to be fixed, else 0.
Rule 4: an unknown fact is None; only what keeps a hub from being reached is an error.
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
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from zmqtrain.cli.display import Terminal, format_bytes, log_to_stderr, plural
from zmqtrain.cli.settings import Hub, HubOptions, command
from zmqtrain.core.errors import ConfigError, HubUnreachable, JoinRefused
from zmqtrain.core.installed import free_memory, has_nvidia_driver, how_to_install, package_version
from zmqtrain.core.settings import AUTO_DELAY, AUTO_EVERY
from zmqtrain.planning.probe import LinkFigures, RoundTrips, measure_link
from zmqtrain.protocol.framing import PROTOCOL_VERSION
from zmqtrain.session.unequal import NEWER, OLDER, TYPE
from zmqtrain.transport.address import parse_address
from zmqtrain.transport.key_folder import find_access
from zmqtrain.transport.zmq_channels import libzmq_version

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
        connection = socket.create_connection((host, port), wait_seconds)
    except OSError as error:
        match error:
            case socket.gaierror():
                why = (
                    f"this PC knows no host named {host!r} ({error.strerror}): give the hub's address in numbers, as "
                    "the broker printed it"
                )
            case ConnectionRefusedError():
                why = (
                    f"{host} is there, but nothing listens on port {port}: start the broker on it (zmqtrain-broker "
                    f"--bind tcp://*:{port}), or correct the port"
                )
            case TimeoutError():
                why = (
                    f"{host} does not answer on port {port} (waited {wait_seconds:g} s): is it switched on, is the "
                    f"address right, and does its firewall let TCP port {port} in?"
                )
            case _:
                why = f"there is no way to {host} ({error.strerror}): is this PC on the hub's network?"
        raise HubUnreachable(why, address) from error
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
        free_memory_bytes=free_memory(),
        free_disk_bytes=shutil.disk_usage(folder).free,
        devices=devices,
        devices_error=error,
        has_nvidia_driver=has_nvidia_driver(),
        versions={
            "zmqtrain": package_version(),
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


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


PROGRAM = "zmqtrain doctor"
SICK = 1

OK, FIX = "ok", "fix"
FAST_ETHERNET = (60e6, 105e6)
"""Between these rates, in bits per second, a link of 100 Mb/s is at work."""
SLOW_BITS = 500e6
USUAL_MTU, LEAST_MTU = 1500, 1400
SLOW_PING, SLOW_LOADED = 0.005, 0.030
CLOCK_SECONDS = 5.0
"""Clocks that are further apart make logs and records of two PCs hard to read together; nothing else needs them."""
LEAST_MEMORY, LEAST_DISK = 2e9, 2e9


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(HubOptions):
    """Look whether this PC can train with the hub at HUB: reach it, measure the link both ways, look at cards, memory
    and versions, and say what to fix. Looks on; disturbs no run. The exit code is 1 if something is to be fixed.

    Example: zmqtrain doctor tcp://192.168.1.10:5555
    """

    hub: Hub
    """The broker's address, for example tcp://192.168.1.10:5555."""
    folder: Path = Path()
    """On whose disk there should be room."""
    json: bool = False
    """One JSON object: the findings, and the figures behind them."""

    def __post_init__(self) -> None:
        parse_address(self.hub)
        if not self.wait_seconds > 0:
            raise ConfigError(f"wait_seconds must be more than 0, got {self.wait_seconds:g}")
        if not self.folder.is_dir():
            raise ConfigError(f"there is no folder {self.folder} (--folder)")


@dataclass(frozen=True)
class Finding:
    """One line. state: "ok" or "fix".  remedy: what to do; "" where all is well."""

    what: str
    state: str
    text: str
    remedy: str = ""


def _judged(what: str, text: str, wrong: bool = False, remedy: str = "") -> Finding:
    """Return a finding. remedy: what to do if it is `wrong`."""
    return Finding(what, FIX, text, remedy) if wrong else Finding(what, OK, text)


def _run(config: DoctorConfig) -> int:
    log_to_stderr(False)
    access = find_access(config.hub, config.server_key, config.keys)
    findings: list[Finding] = []
    console = Terminal()

    def add(more: Iterator[Finding]) -> None:
        for finding in more:
            findings.append(finding)
            if not config.json:
                console.print(_line(finding))
                if command := finding.remedy.partition(TYPE)[2]:
                    print(f"    {command}", flush=True)  # whole, to be copied: a table would break it into lines

    way: WayToHub | None = None
    link: LinkFigures | None = None
    try:
        way = find_way(config.hub, config.wait_seconds)
        add(judge_way(config.hub, way))
        link = measure_link(config.hub, None, access, config.wait_seconds)
        add(judge_link(link))
    except (HubUnreachable, JoinRefused) as error:
        add(iter([_unreached(error, way is not None)]))
    machine = look_at_machine(config.folder)
    add(judge_machine(machine))
    wrong = sum(finding.state == FIX for finding in findings)
    if config.json:
        facts = {
            "findings": [asdict(finding) for finding in findings],
            "way": asdict(way) if way else None,
            "link": asdict(link) if link else None,
            "machine": asdict(machine),
        }
        print(json.dumps(facts, allow_nan=False))
    else:
        console.print("all is well" if not wrong else f"{plural(wrong, 'thing')} to fix")
    return SICK if wrong else 0


def _unreached(error: HubUnreachable | JoinRefused, listens: bool) -> Finding:
    if isinstance(error, JoinRefused) and error.reason in (OLDER, NEWER):
        text, kind, command = str(error).partition(TYPE)
        return Finding("hub", FIX, text.rstrip(), kind + command)
    text, _, remedy = str(error).partition(": ")
    if isinstance(error, HubUnreachable) and listens:
        remedy = remedy or "something listens there: is it a zmqtrain-broker?"
    return Finding("hub", FIX, text, remedy)


def _line(finding: Finding) -> Table:
    line = Table.grid(padding=(0, 2))
    line.add_column(width=9)
    line.add_column(width=3)
    line.add_column(overflow="fold")
    line.add_row(finding.what, finding.state, finding.text)
    if finding.remedy:
        line.add_row("", "", f"-> {''.join(finding.remedy.partition(TYPE)[:2]).rstrip()}")
    return line


# ---------------------------------------------------------------------- what is well


def judge_way(address: str, way: WayToHub) -> Iterator[Finding]:
    by = f" by {way.interface}" if way.interface else ""
    yield _judged("hub", f"{address} is reached from {way.own}{by}")
    if way.path_mtu is not None:
        text = f"{way.path_mtu} bytes to the hub" + ("" if way.mtu is None else f", {way.mtu} of the interface")
        remedy = f"a tunnel or a wrong setting: {USUAL_MTU} is usual (ip link set mtu ...)"
        yield _judged("MTU", text, way.path_mtu < LEAST_MTU, remedy)
    if (bits := way.bits_per_second) is not None:
        remedy = "use a cable of four pairs (Cat 5e) and a switch of 1 Gb/s"
        yield _judged("cable", f"{way.interface} runs at {_bits(bits)}", bits < SLOW_BITS, remedy)


def judge_link(link: LinkFigures) -> Iterator[Finding]:
    settings = link.settings
    every = "auto" if settings.every == AUTO_EVERY else settings.every
    delay = "auto" if settings.delay == AUTO_DELAY else settings.delay
    cut = "fragments auto" if settings.carries_all else plural(settings.fragments, "fragment")
    yield _judged(
        "run",
        f"{link.run}, {'not begun' if link.version < 0 else f'version {link.version}'}, {plural(link.nodes, 'node')}: "
        f"{settings.program or 'custom loops'}, every {every}, delay {delay}, {settings.codec} up, "
        f"{settings.broadcast_codec} down, {cut}; protocol "
        f"version {PROTOCOL_VERSION}" + (f", {link.software}" if link.software else ""),
    )
    if link.refused:
        yield _judged("rate", f"not measured: the hub says {link.refused!r}")
    beside = f", beside {link.nodes} nodes that train" if link.nodes > 1 else ""
    for what, whither, rate in (("up", "toward the hub", link.up), ("down", "from the hub", link.down)):
        if rate is not None:
            bits = 8 * rate
            hundred = FAST_ETHERNET[0] <= bits <= FAST_ETHERNET[1]
            remedy = "Wi-Fi, a powerline or other traffic: 1 Gb/s by cable gives about 950 Mb/s"
            if hundred:
                remedy = "a switch, a port or a cable of 100 Mb/s: use 1 Gb/s throughout"
            slow = hundred or (bits < SLOW_BITS and link.nodes <= 1)
            yield _judged(what, f"{_bits(bits)} {whither}{beside}", slow, remedy)
    if link.idle is not None:
        remedy = "Wi-Fi, or a hub that is busy with other work: use a cable, and leave the hub a core"
        yield _judged("ping", _trips(link.idle), link.idle.p50 > SLOW_PING, remedy)
    if link.loaded is not None:
        remedy = "the link is full of other traffic, or the hub has no core to spare"
        text = f"{_trips(link.loaded)} while the link is full"
        yield _judged("loaded", text, link.loaded.p99 > SLOW_LOADED, remedy)
    if (ahead := link.clock_ahead_seconds) is not None and link.clock_error_seconds is not None:
        text = f"the hub's clock is {1e3 * abs(ahead):.1f} ms {'ahead' if ahead >= 0 else 'behind'}"
        text += f" (± {1e3 * link.clock_error_seconds:.1f} ms)"
        remedy = "logs of the two cannot be compared: switch time synchronisation on (timedatectl set-ntp true)"
        yield _judged("clock", text, abs(ahead) > CLOCK_SECONDS, remedy)


def judge_machine(machine: Machine) -> Iterator[Finding]:
    cards = [device for device in machine.devices or () if device["platform"] != "cpu"]
    if machine.devices is None:
        yield Finding("cards", FIX, "none can be used", machine.devices_error)
    elif cards:
        names = (
            card["kind"] + (f" with {format_bytes(card['memory_bytes'])} for JAX" if card["memory_bytes"] else "")
            for card in cards
        )
        yield _judged("cards", ", ".join(names))
    elif machine.has_nvidia_driver:
        remedy = f"JAX is installed without CUDA. {TYPE}{how_to_install('cuda12')}"
        yield Finding("cards", FIX, "an NVIDIA driver is there, but JAX sees no card", remedy)
    else:
        yield _judged("cards", "none: this PC trains on its processor")
    text = f"{plural(machine.cores, 'core')}, {machine.load:.1f} of them wanted by others in the last minute"
    remedy = "other programs slow training down: see them with top"
    yield _judged("cores", text, machine.load > machine.cores, remedy)
    if (memory := machine.free_memory_bytes) is not None:
        remedy = "zmqtrain plan says what a node needs (the column host); close other programs"
        yield _judged("memory", f"{format_bytes(memory)} free", memory < LEAST_MEMORY, remedy)
    disk, remedy = machine.free_disk_bytes, "checkpoints and data need room: free some, or name another --folder"
    yield _judged("disk", f"{format_bytes(disk)} free", disk < LEAST_DISK, remedy)
    yield _judged("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version))
    if machine.versions.get("numba") is None and not cards:
        remedy = "without a card, the codecs cost a fraction of the processor's time with numba. "
        yield Finding("numba", FIX, "not installed", f"{remedy}{TYPE}{how_to_install()}")


def _bits(bits: float) -> str:
    return f"{bits / 1e9:.2f} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mb/s"


def _trips(trips: RoundTrips) -> str:
    return f"{1e3 * trips.p50:.2f} ms, 99 of 100 under {1e3 * trips.p99:.2f} ms"


main = command(DoctorConfig, PROGRAM, _run)
