"""Find this PC's key file where nobody names one: where `scp` puts it, and where a hub keeps its own.

Rule 1: what a user names is used, and nothing is looked for.  Rule 2: a hub that uses no keys is reached without the
key that was found, and a warning says so unless the hub is on this machine.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zmqtrain.core.errors import ConfigError
from zmqtrain.transport.address import is_loopback, is_own_address, parse_address
from zmqtrain.transport.key_folder import HUB, default_key_folder
from zmqtrain.transport.zmq_keys import Credentials, CurveKeys, GivenKeys, GivenServerKey, read_credentials

logger = logging.getLogger(__name__)

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
        """Return those of this process."""
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

    In each folder lab.key_secret is looked for, then that of this PC's name, then the only one.
    """
    folders = places.in_turn(of_hub)
    for folder in folders:
        for path in _candidates(folder, places.host):
            pair = _load(path)
            if pair is not None and pair.server:
                return Access((pair.server, pair), path)
    if (own := find_hub_pair(places.folder)) is not None:
        return own
    names = f"{EVERY_PC}{SUFFIX}, {places.host}{SUFFIX} or the only NAME{SUFFIX}"
    return Access(looked=f"looked for {names} in {', '.join(map(str, folders))}")


def find_hub_pair(folder: Path) -> Access | None:
    """Return the pair of the hub whose keys are in this folder; None if there is none."""
    own = folder / f"{HUB}{SUFFIX}"
    pair = _load(own) if own.is_file() else None
    return None if pair is None else Access((pair.public, pair), own)


def _candidates(folder: Path, host: str) -> Sequence[Path]:
    try:
        there = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and path.stem != HUB)
    except OSError:
        return ()
    named = [path for name in (EVERY_PC, host) for path in there if path.stem == name]
    return named or (there if len(there) == 1 else ())


def _load(path: Path) -> CurveKeys | None:
    try:
        return CurveKeys.load(path)
    except (ConfigError, OSError) as error:
        logger.warning("the key in %s is not used: %s", path, error)
        return None


def _is_here(address: str, host: str) -> bool:
    """Tell whether the first of these addresses is this machine's."""
    first = address.partition(",")[0].strip()
    there = parse_address(first)[0]
    if is_loopback(first) or there.partition(".")[0] == host:
        return True
    try:
        ipaddress.ip_address(there.partition("%")[0])
    except ValueError:  # a name: it is not looked up for this
        return False
    return is_own_address(there)
