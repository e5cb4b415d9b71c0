"""Read the addresses that users type, and say what to type instead where one cannot be used.

Rule 1: an address is tcp://HOST:PORT, checked here and not left to libzmq, which takes tcp://*:99999 for another port.
Rule 2: among programs it may carry the public key of the broker there, tcp://HOST:PORT#KEY, where that is not the
hub's: of a shard that a node serves. People see it without.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Sequence

from zmqtrain.core.errors import AddressInUse, ConfigError, NotHereYet

MOST_ADDRESSES = 4
"""So many may be named for one run: its broker's, its standby's, and those to which they may come."""

ROUTED_NOWHERE = ("192.0.2.1", 9)
"""An address that stands for the outside (RFC 5737): asking which way leads there sends nothing."""


def parse_address(address: str, example: str = "tcp://192.168.1.10:5555") -> tuple[str, int]:
    """Split tcp://HOST:PORT into (host without brackets, port); a port `*` is 0.

    Raise ConfigError, with an `example` of what could be typed, if it has another form.
    """
    text = address if isinstance(address, str) else ""
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)", text, re.ASCII)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise ConfigError(f"{address!r} is no address of the form tcp://HOST:PORT, for example {example}")
    return match[1].strip("[]"), 0 if match[2] == "*" else int(match[2])


def with_key(address: str, key: bytes) -> str:
    """Return an address that carries a public key (Z85)."""
    return f"{address}#{key.decode()}"


def split_key(address: str) -> tuple[str, bytes | None]:
    """Return an address as people know it, and the public key that it carries, None for none."""
    plain, _, key = address.partition("#")
    return plain, key.encode() or None


def answers(address: str, seconds: float) -> bool:
    """Return whether something listens at an address; waits so long at most."""
    return not why_unanswered(address, seconds)


def why_unanswered(address: str, seconds: float) -> str:
    """Return why nothing answers at an address, "" if something does; waits so long at most."""
    try:
        socket.create_connection(parse_address(address), seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


class OpenPort:
    """A free port of this machine, `number`, at which it listens for so many seconds: others see whether they reach it.

    like: the address of a port like it: at the same address of this machine, else of all its interfaces. Raises OSError
    where none can be had.
    """

    def __init__(self, like: str, seconds: float) -> None:
        host = parse_address(like)[0]
        try:
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        except ValueError:  # "*", or the name of an interface
            host, family = "", socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        self._socket = socket.create_server((host, 0), family=family, dualstack_ipv6=both)
        self.number: int = self._socket.getsockname()[1]
        self._until = time.monotonic() + seconds
        self._thread = threading.Thread(target=self._listen, name="zmqtrain-port", daemon=True)
        self._thread.start()

    @property
    def seconds_left(self) -> float:
        """For how long it still listens; 0: no more."""
        return max(0.0, self._until - time.monotonic()) if self._thread.is_alive() else 0.0

    def join(self) -> None:
        """Wait until it listens no more."""
        self._thread.join()

    def _listen(self) -> None:
        with self._socket, contextlib.suppress(OSError):  # its time is over, or this process has no more files
            while (left := self._until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                with contextlib.suppress(ConnectionError):
                    self._socket.accept()[0].close()


def check_reachable(address: str) -> None:
    """Raise ConfigError unless `address` is one to connect to; it may carry a key."""
    host, port = parse_address(split_key(address)[0])
    if host == "*" or port == 0:
        raise ConfigError(
            f"{address!r} says where to listen, not where to connect to: name the hub, for example"
            " tcp://192.168.1.10:5555"
        )


def parse_addresses(text: str) -> tuple[str, ...]:
    """Split "tcp://pc1:5555,tcp://pc2:5555", where one run is looked for in turn, into its addresses, each once.

    Raise ConfigError if one of them is none to connect to, or there are more than `MOST_ADDRESSES`.
    """
    addresses = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for address in addresses:
        check_reachable(address)
    if len(addresses) > MOST_ADDRESSES:
        raise ConfigError(f"{len(addresses)} addresses of one run are too many: name {MOST_ADDRESSES} at most")
    return addresses


def say_addresses(addresses: Sequence[str]) -> str:
    """Return the addresses as a sentence names them: "tcp://pc1:5555 or tcp://pc2:5555"."""
    return " or ".join(split_key(address)[0] for address in addresses)


def is_loopback(address: str) -> bool:
    """Tell whether only this machine reaches `address` (tcp://HOST:PORT); raise ConfigError if it is malformed."""
    host, _ = parse_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_address(host: str) -> bool:
    """Tell whether a number (192.168.1.10, fe80::1%eth0) is an address of this machine: only one's own can be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
            return True
    except OSError:
        return False


def local_address(host: str = ROUTED_NOWHERE[0], port: int = ROUTED_NOWHERE[1]) -> str:
    """Return the number of the interface by which this machine reaches a host (the outside); "" if it does not know."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def connectable_host(host: str) -> str:
    """Return the host that this machine's programs connect to where `host` was bound, in brackets if it is IPv6."""
    host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def bind_error(address: str, number: int) -> ConfigError | AddressInUse:
    """Return the error to raise when listening at `address` failed with this errno."""
    host, port = parse_address(address)
    if number == errno.EADDRINUSE:
        return AddressInUse(
            f"somebody already listens at {address}: perhaps another broker (see who: ss -ltnp 'sport = :{port}')."
            f" Stop it, or choose another port: --bind {address.rpartition(':')[0]}:{min(port + 1, 65535)}",
            address,
        )
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"this user may not listen at {address}: choose a port from 1024 on, for example 5555")
    if number in (errno.ENODEV, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return NotHereYet(
            f"{host} is no address of this machine: tcp://*:{port or 5555} listens at all addresses that it has"
        )
    return ConfigError(f"cannot listen at {address} (error {number}: {errno.errorcode.get(number, 'unknown')})")


def unknown_host(addresses: Sequence[str]) -> str:
    """Return the last host that this PC does not know by name; "" if it knows one of them, or its name service does not
    answer. The PC of another may be gone, and its name with it."""
    host = ""
    for host in dict.fromkeys(parse_address(split_key(one)[0])[0] for one in addresses):
        try:
            socket.getaddrinfo(host, None)
            return ""
        except UnicodeError:  # no name at all: two dots in a row, or a part of more than 63 characters
            continue
        except socket.gaierror as error:
            if error.errno != socket.EAI_NONAME:
                return ""
    return host


def say_unknown_host(host: str, address: str) -> str:
    return (
        f"this PC knows no host named {host!r} ({address}): give the hub's address in numbers, as the broker printed "
        "it, for example tcp://192.168.1.10:5555"
    )


def say_unreachable(addresses: Sequence[str], seconds: float, obstacle: str) -> str:
    """Return what to tell who has waited so long for a broker at one of these addresses.

    obstacle: what is known, "" if nothing.
    """
    where = say_addresses(addresses)
    if obstacle:
        return f"cannot come in at {where} (tried for {seconds:.3g} s): {obstacle}"
    port = parse_address(split_key(addresses[0])[0])[1]
    return (
        f"no broker answers at {where} (waited {seconds:g} s). Start one on the hub with `zmqtrain-broker --bind "
        f"tcp://*:{port}`, check the address and the port, and that the hub's firewall lets that one port in"
    )


def public_address(bound: str, own: str, first: str) -> str:
    """Return the address at which nodes, who reach `first`, will reach a broker that is bound to `bound`.

    own: the address that this machine's programs connect to, with the port that was chosen.
    """
    host = parse_address(bound, "tcp://*:5556")[0]
    if host not in ("*", "0.0.0.0", "::"):
        return own
    here = "" if is_loopback(first) else local_address(*parse_address(first))
    if not here or is_loopback(f"tcp://{here}:1"):  # the first is on this very machine: the way out of it
        here = local_address()
    return f"tcp://{here}:{parse_address(own)[1]}" if here else own
