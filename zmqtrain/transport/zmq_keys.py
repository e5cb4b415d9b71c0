"""CURVE keys, their files, and the access control of a ROUTER that uses them.

1. A secret is in a file that only its owner reads and in the memory of the process that uses it. It is never shown
   (`repr`), logged, or taken from a command line.
2. A file that is no key is refused here, with what to do; libzmq would not report it.
3. A peer that is refused gets status 400 and nothing else. libzmq then stops trying; our channels try again
   (`ConnectionWatch`), so that a key that is authorised later comes in.
4. No call waits inside zmq: each socket is read until nothing is left.
5. A descriptor that libzmq names may be closed, and its number reused, while its event is in flight. So it is
   duplicated, inspected, and then shut down. The duplicate's number is reserved from the beginning, so that connections
   can be cut when the process has no descriptors left.

A file has the form of zmq.auth (ZPL, RFC 4): NAME.key holds a public key, NAME.key_secret a pair, and behind it the
hub's public key (`server-key`) where it is known: then that one file is all that a PC needs.
Source: CurveZMQ (RFC 26), Z85 (RFC 32), ZAP (RFC 27), zmq_socket_monitor(3); libzmq has no call to disconnect a peer of
a ROUTER (its issue 2877).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import itertools
import logging
import os
import re
import socket as sockets
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq
import zmq.utils.z85
from zmq.auth.certs import load_certificate

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.interfaces import Clock
from zmqtrain.core.specs import require_kind
from zmqtrain.transport.admission import Admission, Refusals
from zmqtrain.transport.pacing import Connection, ConnectionLimits, Connections, Cut, Gate

logger = logging.getLogger(__name__)

KEY_CHARACTERS = 40
SECRET = "# Secret: anybody who has this file can pass for its owner. It belongs on the PC that it was made for.\n"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair, each 40 characters of Z85.  server: the public key of the hub that it is for, b"" if not known.

    Raises ConfigError for what is no key.
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""

    def __post_init__(self) -> None:
        check_key("public", self.public)
        check_key("secret", self.secret)
        if self.server:
            check_key("server's public", self.server)

    @classmethod
    def generate(cls, server: bytes = b"") -> CurveKeys:
        return cls(*zmq.curve_keypair(), server)

    def save(self, folder: Path | str, name: str) -> tuple[Path, Path]:
        """Write `name`.key (public, for others) and `name`.key_secret (mode 0600); return the paths.

        Raise ConfigError if one exists already, or cannot be written.
        """
        public, secret = Path(folder) / f"{name}.key", Path(folder) / f"{name}.key_secret"
        self.save_secret(secret)
        write_public_key(public, self.public)
        return public, secret

    def save_secret(self, path: Path) -> None:
        """Write the pair (mode 0600), and the hub's public key with it.  Raise ConfigError as `save`."""
        lines = [f'    public-key = "{self.public.decode()}"\n', f'    secret-key = "{self.secret.decode()}"\n']
        if self.server:
            lines.append(f'    server-key = "{self.server.decode()}"\n')
        _write(path, 0o600, SECRET + "curve\n" + "".join(lines))

    @classmethod
    def load(cls, path: Path | str) -> CurveKeys:
        """Read a pair from a `.key_secret` file; warn if others can read it.  Raise ConfigError if there is none."""
        public, secret = _load(path)
        if secret is None:
            raise ConfigError(f"{path} holds a public key only; the file of a pair is named NAME.key_secret")
        with contextlib.suppress(OSError):
            if os.name == "posix" and _is_open(os.stat(path)):
                logger.warning("%s is a secret that others on this machine can read: chmod 600 %s", path, path)
        found = re.search(r'^\s*server-key\s*=\s*"([^"\n]*)"', Path(path).read_text("utf-8", "replace"), re.MULTILINE)
        return cls(public, secret, found[1].encode() if found else b"")


def _is_open(file: os.stat_result) -> bool:
    """Whether others than its owner can read a secret's file. A group may read a file of root's: systemd and Kubernetes
    give one to a service that way, and only root can have made it so."""
    of_root = file.st_uid == 0 and os.geteuid() != 0
    return bool(stat.S_IMODE(file.st_mode) & (0o037 if of_root else 0o077))


Credentials = tuple[bytes | None, CurveKeys | None]
"""(the hub's public key, this program's pair), as channels take them."""
GivenServerKey = bytes | str | Path | None
"""How a user gives the hub's public key: itself, or the file that holds it; None where the hub has none."""
GivenKeys = CurveKeys | Path | str | None
"""How a user gives this program's pair: itself, or its file."""


def write_public_key(path: Path, key: bytes) -> None:
    """Write a `.key` file.  Raise ConfigError if it exists already, or cannot be written."""
    _write(path, 0o644, f'curve\n    public-key = "{key.decode()}"\n')


def load_public_key(path: Path | str) -> bytes:
    """Read the public key from a `.key` (or `.key_secret`) file; raise ConfigError if there is none in it."""
    public, _ = _load(path)
    check_key("public", public)
    return public


def read_credentials(server_key: GivenServerKey, keys: GivenKeys) -> Credentials:
    """Return (the hub's public key, this program's pair) from what a user gave; None for what is not given.

    server_key: the key itself, or the file that holds it.  keys: the pair, or its file; one that names its hub needs no
    server_key.  Raises ConfigError.
    """
    if keys:
        require_kind("keys", keys, (CurveKeys, str, Path), '"lab.key_secret", a file')
    if server_key:
        require_kind("server_key", server_key, (bytes, str, Path), '"hub.key", a file, or the 40 characters in it')
    pair = keys if isinstance(keys, CurveKeys) else CurveKeys.load(_at_home(keys)) if keys else None
    server = _read_server_key(server_key) if server_key else None
    if server is None and pair is not None:
        if not pair.server:
            raise ConfigError(
                "the file of --keys does not say for which hub it is: give that hub's public key too (--server-key, "
                "the file hub.key in its folder of keys), or a file that zmqtrain keys new made there"
            )
        server = pair.server
    return server, pair


def fingerprint(key: bytes) -> str:
    """Return what people compare of a public key: 16 hexadecimal digits of its SHA-256, in four groups."""
    digits = hashlib.sha256(key).hexdigest()[:16]
    return ":".join(digits[at : at + 4] for at in range(0, 16, 4))


def check_key(name: str, key: bytes) -> None:
    """Raise ConfigError unless `key` has the form of a key; `name` says which."""
    form = rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
    if not isinstance(key, bytes) or not re.fullmatch(form, key):
        raise ConfigError(f"a {name} CURVE key is {KEY_CHARACTERS} characters of Z85; this has {len(key)}, or others")


def _read_server_key(given: bytes | str | Path) -> bytes:
    if isinstance(given, bytes):
        key = given
    elif len(str(given)) == KEY_CHARACTERS and not Path(given).exists():
        key = str(given).encode()
    elif Path(given).exists():
        return load_public_key(given)
    else:
        raise ConfigError(
            f"server_key is a key of {KEY_CHARACTERS} characters, or the file that holds it (hub.key in the hub's "
            f"folder of keys); {str(given)!r} is neither"
        )
    check_key("public", key)
    return key


def _at_home(path: Path | str) -> Path:
    """Return a path with ~ as the home folder, which a shell puts in its place and a Python program does not."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # this user has no home
        return Path(path)


def _load(path: Path | str) -> tuple[bytes, bytes | None]:
    try:
        if not Path(path).is_file():
            raise ConfigError(
                f"there is no file {path}: it is made on the hub, whose broker prints the line that copies it "
                "(zmqtrain keys new makes another)"
            )
        return load_certificate(path)
    except PermissionError as error:
        raise ConfigError(f"this user may not read the key {path}: who runs zmqtrain must own that file") from error
    except (OSError, ValueError, IndexError) as error:  # the last: a line that has no "="
        raise ConfigError(
            f"there is no key in {path}: a PC's key is the file NAME.key_secret that zmqtrain keys new makes on the hub"
        ) from error


def _write(path: Path, mode: int, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: a key is not overwritten; remove it first") from error
    except OSError as error:
        raise ConfigError(f"cannot write the key {path}: {error.strerror}") from error


ZAP_ADDRESS, ZAP_DOMAIN = "inproc://zeromq.zap.01", b"zmqtrain"
MAX_WAITING_REQUESTS = 1024
"""Who asks while it is not known who may come in waits; of more than so many the oldest is refused."""
SPARE_DESCRIPTORS, LEAST_CONNECTIONS = 128, 16
"""Open files that are left for all else; and what a hub takes in however few there may be."""

_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_UNFINISHED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_FAILED = _REFUSED | _UNFINISHED | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_ACCEPTED, _DISCONNECTED, _CLOSED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_CLOSED)
_NUMBERS = itertools.count()


class _Taker(Protocol):
    def take(self, frames: list[bytes]) -> None: ...


class Reader:
    """Reads a socket of this process (inproc) in the running loop, for `taker`."""

    def __init__(self, socket: zmq.SyncSocket, taker: _Taker) -> None:
        self._socket, self._taker = socket, taker
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.FD
        self._loop.add_reader(self._descriptor, self.read)
        self._loop.call_soon(self.read)  # what came before the descriptor was watched rings no more

    def read(self) -> None:
        """Take all that is here (its descriptor is edge-triggered)."""
        with contextlib.suppress(zmq.Again):
            while not self._socket.closed:
                self._taker.take(self._socket.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)


class ZapHandler:
    """Tells libzmq which CURVE keys are authorised in a context; counts the others in `refusals`.

    Made before the socket that it guards is bound; there is one in a context.
    """

    def __init__(self, context: zmq.Context[zmq.SyncSocket], admission: Admission, refusals: Refusals) -> None:
        self._admission, self._refusals = admission, refusals
        self._waiting: deque[list[bytes]] = deque()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._reader = Reader(self._socket, self)

    def take(self, frames: list[bytes]) -> None:
        """Answer one request of libzmq, or keep it until the admission is known."""
        # routing id, "", version, request id, domain, address, identity, mechanism, the public key
        if len(frames) != 9 or frames[2] != b"1.0" or frames[7] != b"CURVE":
            return
        if self._admission.known:
            return self._answer(frames)
        self._waiting.append(frames)
        if len(self._waiting) > MAX_WAITING_REQUESTS:
            self._answer(self._waiting.popleft())

    def answer_waiting(self) -> None:
        """Answer who has waited until it was known who may come in."""
        while self._waiting:
            self._answer(self._waiting.popleft())

    def _answer(self, frames: list[bytes]) -> None:
        routing_id, _, version, request, _, address, _, _, public = frames
        key = zmq.utils.z85.encode(public).decode() if len(public) == 32 else ""
        if self._admission.name_of(key) is not None:
            status = [b"200", b"", key.encode(), b""]
        else:
            status = [b"400", b"this key is not authorised", b"", b""]
            self._refusals.count("key", address.decode("ascii", "replace"))
        with contextlib.suppress(zmq.ZMQError):  # the asking connection has ended
            self._socket.send_multipart([routing_id, b"", version, request, *status], zmq.NOBLOCK)

    def close(self) -> None:
        self._reader.close()


def _peer_of(connection: sockets.socket) -> tuple[str, int]:
    """Return the address and the port of the other end. Raises OSError if this is no TCP connection."""
    if connection.family not in (sockets.AF_INET, sockets.AF_INET6):
        raise OSError(errno.ENOTCONN, "the descriptor of a connection that is gone names another file by now")
    address, port = connection.getpeername()[:2]
    return address, port


class _Duplicates:
    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._reserved = os.dup(self._nothing)

    @contextlib.contextmanager
    def of(self, descriptor: int) -> Iterator[sockets.socket]:
        """Lend a duplicate of this connection's descriptor. Raises OSError if there is no such connection."""
        os.dup2(descriptor, self._reserved, inheritable=False)
        try:
            duplicate = sockets.socket(fileno=self._reserved)
            try:
                yield duplicate
            finally:
                duplicate.detach()
        finally:
            os.dup2(self._nothing, self._reserved, inheritable=False)

    def close(self) -> None:
        os.close(self._reserved)
        os.close(self._nothing)


class ConnectionGuard:
    """The connections of a bound socket, as its monitor reports them; cuts those that are too many.

    gone: called with the descriptor of a connection that has ended.  news: opened when one has begun or ended.
    """

    def __init__(
        self,
        socket: zmq.SyncSocket,
        limits: ConnectionLimits,
        refusals: Refusals,
        news: Gate,
        clock: Clock = time,
    ) -> None:
        self.connections = Connections(limits)
        self.gone: Callable[[int], None] = lambda descriptor: None
        self._socket, self._refusals, self._news, self.clock = socket, refusals, news, clock
        address = f"inproc://zmqtrain-monitor-{next(_NUMBERS)}"
        socket.monitor(address, _ACCEPTED | _DISCONNECTED | _CLOSED | _FAILED)
        monitor = socket.context.socket(zmq.PAIR)
        monitor.rcvhwm = 0  # no bound: libzmq's own thread would wait for us
        monitor.connect(address)
        self._duplicates = _Duplicates()
        self._reader = Reader(monitor, self)

    def look(self) -> None:
        self._reader.read()

    def take(self, frames: list[bytes]) -> None:
        event, value = struct.unpack("=HI", frames[0])
        if event == _ACCEPTED:
            self._accepted(value)
        elif event in (_DISCONNECTED, _CLOSED):
            self.connections.closed(value)
            self.gone(value)
            self._news.open()
        elif event & _FAILED and event != _REFUSED:  # that was counted by who refused it
            keyless = value == _OTHER_MECHANISM and self._socket.mechanism == zmq.NULL
            self._refusals.count("unfinished" if event == _UNFINISHED else "with a key" if keyless else "handshake")

    def _accepted(self, descriptor: int) -> None:
        try:
            with self._duplicates.of(descriptor) as connection:
                address, port = _peer_of(connection)
        except OSError:  # it is gone already
            return
        for cut in self.connections.accepted(descriptor, address.removeprefix("::ffff:"), port, self.clock.monotonic()):
            self._shut(cut)
        self._news.open()

    def _shut(self, cut: Cut) -> None:
        self._refusals.count(cut.reason, cut.connection.address)
        self._shut_down(cut.connection)

    def cut(self, descriptor: int) -> None:
        """Shut the connection with this descriptor, if it is still there; libzmq then closes it."""
        self.look()
        if (connection := self.connections.get(descriptor)) is not None:
            self.connections.closed(descriptor)
            self._shut_down(connection)

    def _shut_down(self, connection: Connection) -> None:
        """End a TCP connection both ways, if its descriptor still is this connection's."""
        with contextlib.suppress(OSError), self._duplicates.of(connection.descriptor) as duplicate:
            address, port = _peer_of(duplicate)
            if (address.removeprefix("::ffff:"), port) == (connection.address, connection.port):
                duplicate.shutdown(sockets.SHUT_RDWR)

    def close(self) -> None:
        """Watch no more; before the socket is closed."""
        self._socket.disable_monitor()
        self._reader.close()
        self._duplicates.close()


def descriptor_room(wanted: int, grow: bool = False) -> int:
    """Return how many connections fit beside all else in this process's limit of open files, at most `wanted`.

    grow: raise the soft limit for them first, as far as it may be raised.
    """
    try:
        import resource
    except ImportError:  # not on this system, which has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if grow and soft < wanted + SPARE_DESCRIPTORS:
        raised = wanted + SPARE_DESCRIPTORS
        if hard != resource.RLIM_INFINITY:
            raised = min(raised, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return max(LEAST_CONNECTIONS, min(wanted, soft - SPARE_DESCRIPTORS))
