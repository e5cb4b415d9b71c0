"""Make and read CURVE keys: a pair of one's own, and the public key of the hub that one talks to.

Rule 1: a secret is in a file that only its owner reads, in the memory of the process that uses it, and nowhere else: it
is never shown (`repr`), logged, or taken from a command line.
Rule 2: what is no key is refused here, with what to do; libzmq would only fall silent.

A file has the form of zmq.auth (ZPL, RFC 4): NAME.key holds a public key, NAME.key_secret a pair, and behind it the
hub's public key (`server-key`) where it is known: then that one file is all that a PC needs.
Source: CurveZMQ (RFC 26), Z85 (RFC 32).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.certs import load_certificate

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import require_kind

logger = logging.getLogger(__name__)

KEY_CHARACTERS = 40
SECRET = "# Secret: whoever has this file can pass for its owner. It belongs on the PC that it was made for.\n"


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
        """Make a new pair, for the hub with this public key."""
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
            if os.name == "posix" and stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                logger.warning("%s is a secret that others on this machine can read: chmod 600 %s", path, path)
        found = re.search(r'^\s*server-key\s*=\s*"([^"\n]*)"', Path(path).read_text("utf-8", "replace"), re.MULTILINE)
        return cls(public, secret, found[1].encode() if found else b"")


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
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}: it is made on the hub (zmqtrain keys new), and copied from there")
    try:
        return load_certificate(path)
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
