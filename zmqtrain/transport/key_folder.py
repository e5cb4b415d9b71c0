"""A hub's keys in a folder, and how a PC finds its own key file when none is named.

    hub.key  hub.key_secret      the hub's pair: the secret one allows to pass for the hub
    authorised/NAME.key          authorised public keys; a running broker looks here every second
    nodes/NAME.key_secret        pairs that were made here, with the hub's public key: one file is what a PC needs
    revoked/NAME.key             keys that were authorised once

1. The folder is the truth: to authorise is to put a public key there, to revoke is to remove it.
2. Secrets are readable by their owner only (0600, folders 0700).
3. A file that is no key excludes its owner, and nobody else.
4. A key that the user names is used, and none is searched. A hub without keys is reached without the key that was
   found, and a warning says so unless the hub is on this machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zmqtrain.core.errors import ConfigError
from zmqtrain.transport.address import is_loopback, is_own_address, parse_address, split_key
from zmqtrain.transport.zmq_keys import (
    Credentials,
    CurveKeys,
    GivenKeys,
    GivenServerKey,
    fingerprint,
    load_public_key,
    read_credentials,
    write_public_key,
)

logger = logging.getLogger(__name__)

HUB = "hub"
"""The name of the hub's own pair, with which other brokers of its run come in."""

Stamp = tuple[tuple[str, int, int, int], ...]


def default_key_folder() -> Path:
    """Return where keys are kept, if nothing else is said: a folder of this user's own."""
    return Path.home() / ".config" / "zmqtrain" / "keys"


@dataclass(frozen=True)
class KeyEntry:
    """One key. made: seconds since the epoch, of its file."""

    name: str
    fingerprint: str
    made: float
    state: Literal["hub", "authorised", "revoked"]


class KeyFolder:
    """A hub's keys in the folder at `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned: set[tuple[str, str]] = set()

    @property
    def authorised_folder(self) -> Path:
        """Where the public keys are that come in."""
        return self.path / "authorised"

    def secret_of(self, name: str) -> Path:
        """Return the file that the PC of this name needs, if it was made here."""
        return self.path / "nodes" / f"{name}.key_secret"

    # ------------------------------------------------------------------ the hub's pair

    def hub(self, make: bool = True) -> CurveKeys:
        """Return the hub's pair.  make: make one if there is none.  Raise ConfigError if there is none, or no way to
        make one."""
        secret = self.path / f"{HUB}.key_secret"
        if secret.exists():
            return CurveKeys.load(secret)
        if not make:
            raise ConfigError(
                f"there is no {secret}: all brokers of a run, and its standby, have the same keys; "
                "copy the folder of the first here"
            )
        self._make_folders()
        pair = CurveKeys.generate()
        pair.save(self.path, HUB)
        logger.info("made the keys of this hub in %s", self.path)
        return pair

    @property
    def outwards(self) -> CurveKeys:
        """The pair with which a broker that has this folder comes to other brokers."""
        return self.hub(make=False)

    # ------------------------------------------------------------------ who comes in

    def stamp(self) -> Stamp:
        """Return what changes when somebody is authorised or revoked.  Raise OSError if it cannot be read."""
        found = [(path.name, path.stat()) for path in self.authorised_folder.iterdir()]
        return tuple(sorted((name, one.st_mtime_ns, one.st_size, one.st_ino) for name, one in found))

    def authorised(self) -> dict[str, str]:
        """Return the names by public key of all that come in, the hub's own among them.

        Files that are no keys are named in the log, once.  Raise OSError if the folder cannot be read, ConfigError if
        there is no hub's pair.
        """
        names = {self.hub(make=False).public.decode(): HUB}
        for path in sorted(self.authorised_folder.iterdir()):
            if path.suffix != ".key":
                continue
            try:
                key = load_public_key(path).decode()
            except ConfigError as error:
                self._warn(path.name, f"{error}: who has this key does not come in")
                continue
            if key in names:
                self._warn(path.name, f"{path} holds the key of {names[key]} once more: it counts under that name")
            names.setdefault(key, path.stem)
        return names

    def _warn(self, name: str, text: str) -> None:
        if (name, text) not in self._warned:
            self._warned.add((name, text))
            logger.warning("%s", text)

    # ------------------------------------------------------------------ making and revoking

    def new(self, names: Sequence[str]) -> list[Path]:
        """Make a pair for each name, and authorise it; return the files to copy to them.

        Raise ConfigError, before anything is made, for a name that is taken or cannot be one.
        """
        for name in names:
            _check_name(name)
            for path in (self.authorised_folder / f"{name}.key", self.secret_of(name)):
                if path.exists():
                    raise ConfigError(
                        f"there is a key of the name {name} ({path}): revoke it first (zmqtrain keys revoke {name}), "
                        "or choose another name"
                    )
        server = self.hub().public
        self._make_folders()
        for name in names:
            pair = CurveKeys.generate(server)
            pair.save_secret(self.secret_of(name))
            write_public_key(self.authorised_folder / f"{name}.key", pair.public)
        return [self.secret_of(name) for name in names]

    def revoke(self, name: str) -> Path:
        """Take a name off those that come in; return where its public key lies now.  Raise ConfigError if there is none
        of that name."""
        _check_name(name)
        path, revoked = self.authorised_folder / f"{name}.key", self.path / "revoked"
        if not path.exists():
            known = ", ".join(entry.name for entry in self.entries() if entry.state == "authorised") or "nobody"
            raise ConfigError(f"no key of the name {name!r} is authorised in {self.path}; {known} is")
        try:
            revoked.mkdir(mode=0o700, exist_ok=True)
            taken = [one for one in revoked.iterdir() if re.fullmatch(rf"{re.escape(name)}(\.\d+)?\.key", one.name)]
            kept = revoked / (f"{name}.{len(taken) + 1}.key" if taken else f"{name}.key")
            path.rename(kept)
            with contextlib.suppress(FileNotFoundError):
                self.secret_of(name).unlink()
        except OSError as error:
            raise ConfigError(f"cannot move {path} to {revoked}: {error.strerror}; remove the file by hand") from error
        return kept

    def entries(self) -> list[KeyEntry]:
        """Return all keys: the hub's, then those that are authorised, then those that were.  Raise ConfigError if the
        folder cannot be read."""
        found: list[KeyEntry] = []
        places: list[tuple[Path, Literal["hub", "authorised", "revoked"]]] = [
            (self.path, "hub"),
            (self.authorised_folder, "authorised"),
            (self.path / "revoked", "revoked"),
        ]
        try:
            for folder, state in places:
                for path in sorted(folder.glob("*.key")):
                    try:
                        digits = fingerprint(load_public_key(path))
                    except ConfigError as error:
                        self._warn(path.name, str(error))
                        continue
                    found.append(KeyEntry(path.stem, digits, path.stat().st_mtime, state))
        except OSError as error:
            raise ConfigError(f"cannot read the keys in {self.path}: {error.strerror}") from error
        return found

    def _make_folders(self) -> None:
        try:
            for folder in (self.path, self.authorised_folder, self.path / "nodes"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder of keys {self.path}: {error.strerror}") from error


class LentKeys:
    """What a broker has in place of a `KeyFolder` that a node serves: its port has a pair of its own, and it comes to
    other brokers with its node's.

    outwards: the node's pair, with the hub's public key.  Who comes in is known once the first broker has said it.
    """

    def __init__(self, outwards: CurveKeys) -> None:
        self.outwards, self._authorised, self._changes = outwards, dict[str, str](), 0
        self._port = CurveKeys.generate()

    def hub(self, make: bool = True) -> CurveKeys:
        """Return the pair of the port. make: as in `KeyFolder`."""
        return self._port

    def change(self, authorised: Mapping[str, str]) -> None:
        """Take other public keys, with their names, as those that come in; from any thread."""
        self._authorised = dict(authorised)
        self._changes += 1

    def stamp(self) -> Stamp | None:
        """See KeyFolder. None: it is not known yet."""
        return (("lent", self._changes, 0, 0),) if self._changes else None

    def authorised(self) -> dict[str, str]:
        """See KeyFolder."""
        return self._authorised


def _check_name(name: str) -> None:
    """Raise ConfigError unless a key can have this name: it is a file's, and people's."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name) or name == HUB:
        why = "the hub's own" if name == HUB else "letters, digits, and . _ - between them, at most 64"
        raise ConfigError(f"{name!r} cannot be the name of a node's key: {why}")


EVERY_PC = "lab"
"""The name of the one key for all PCs that a broker makes where nobody is authorised yet."""
SUFFIX = ".key_secret"


@dataclass
class Access:
    """The keys with which a program comes to a hub; all its channels to that hub share one.

    given: (the hub's public key, this program's pair).  found: the file, if nobody named one; None: named, or none.
    looked: where none was found, in words.  declined: the hub uses no keys, and the one that was found is not used.
    """

    given: Credentials = (None, None)
    found: Path | None = None
    looked: str = ""
    declined: bool = field(default=False, init=False)

    @property
    def credentials(self) -> Credentials:
        """What channels take now."""
        return (None, None) if self.declined else self.given

    def decline(self, address: str) -> bool:
        """Do without the key that was found, as the hub at `address` uses none; False if it was named or is not used
        already."""
        if self.found is None or self.declined:
            return False
        self.declined = True
        if not is_loopback(address):
            text = (
                "the broker at %s uses no keys (--insecure): what is sent is not encrypted, and anybody on the network "
                "can pass for it. The key in %s is not used"
            )
            logger.warning(text, address, self.found)
        return True


@dataclass(frozen=True)
class Places:
    """Where keys are looked for. folder: where a hub keeps its own.  host: the name of this PC."""

    working: Path
    home: Path
    folder: Path
    host: str

    @classmethod
    def here(cls) -> Places:
        return cls(Path.cwd(), Path.home(), default_key_folder(), socket.gethostname().partition(".")[0])

    def in_turn(self, of_hub: bool) -> list[Path]:
        """Return the folders, the first choice first. of_hub: the hub is this machine."""
        own, of_user = [self.folder / "nodes", self.folder], [self.working, self.home]
        return list(dict.fromkeys([*own, *of_user] if of_hub else [*of_user, self.folder, self.folder / "nodes"]))


def find_access(address: str, server_key: GivenServerKey = None, keys: GivenKeys | Access = None) -> Access:
    """Return the keys with which this process comes to the hub at `address`: those that are given, or one that is
    found.

    server_key, keys: as for `read_credentials`; an Access is returned as it is.  Raises ConfigError.
    """
    if isinstance(keys, Access):
        return keys
    if server_key or keys:
        return Access(read_credentials(server_key, keys))
    try:
        places = Places.here()
    except (OSError, RuntimeError):  # the working folder was removed, or this user has no home
        return Access()
    return find_key(places, _is_here(address, places.host))


def find_key(places: Places, of_hub: bool) -> Access:
    """Return the first pair that says for which hub it is; the hub's own pair where there is no other.

    In each folder that of this PC's name is looked for, then lab.key_secret, then the only one.
    """
    folders = places.in_turn(of_hub)
    for folder in folders:
        for path in _candidates(folder, places.host):
            pair = _load(path)
            if pair is not None and pair.server:
                return Access((pair.server, pair), path)
    if (own := find_hub_pair(places.folder)) is not None:
        return own
    names = f"{places.host}{SUFFIX}, {EVERY_PC}{SUFFIX} or the only NAME{SUFFIX}"
    return Access(looked=f"looked for {names} in {', '.join(map(str, folders))}")


def find_hub_pair(folder: Path) -> Access | None:
    """Return the pair of the hub that keeps its keys in this folder; None if there is none."""
    own = folder / f"{HUB}{SUFFIX}"
    pair = _load(own) if own.is_file() else None
    return None if pair is None else Access((pair.public, pair), own)


def _candidates(folder: Path, host: str) -> Sequence[Path]:
    try:
        there = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and path.stem != HUB)
    except OSError:
        return ()
    named = [path for name in (host, EVERY_PC) for path in there if path.stem == name]
    return named or (there if len(there) == 1 else ())


def _load(path: Path) -> CurveKeys | None:
    try:
        return CurveKeys.load(path)
    except (ConfigError, OSError) as error:
        logger.warning("the key in %s is not used: %s", path, error)
        return None


def _is_here(address: str, host: str) -> bool:
    """Tell whether the first of these addresses is this machine's."""
    first, _ = split_key(address.partition(",")[0].strip())
    there = parse_address(first)[0]
    if is_loopback(first) or there.partition(".")[0] == host:
        return True
    try:
        ipaddress.ip_address(there.partition("%")[0])
    except ValueError:  # a name: it is not looked up for this
        return False
    return is_own_address(there)
