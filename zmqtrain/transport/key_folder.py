"""Keep a hub's keys in a folder: its own pair, who is authorised, and what is to be copied to each PC.

    hub.key  hub.key_secret      the hub's pair: whoever has the second can pass for the hub
    authorised/NAME.key          public keys that come in; a running broker looks here every second
    nodes/NAME.key_secret        pairs that were made here, with the hub's public key: one file is what a PC needs
    revoked/NAME.key             what was authorised once

Rule 1: the folder is the truth: to authorise is to put a public key there, to revoke is to take it away.
Rule 2: secrets are made for their owner only (0600, folders 0700).
Rule 3: a file that is no key costs its owner the way in, and nobody else anything.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zmqtrain.core.errors import ConfigError
from zmqtrain.transport.zmq_keys import CurveKeys, fingerprint, load_public_key, write_public_key

logger = logging.getLogger(__name__)

HUB = "hub"
"""The name of the hub's own pair, with which other masters of its run come in."""

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
                f"there is no {secret}: all masters of a run, and its standby, have the same keys; "
                "copy the folder of the first here"
            )
        self._make_folders()
        pair = CurveKeys.generate()
        pair.save(self.path, HUB)
        logger.info("made the keys of this hub in %s", self.path)
        return pair

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


def _check_name(name: str) -> None:
    """Raise ConfigError unless a key can have this name: it is a file's, and people's."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name) or name == HUB:
        why = "the hub's own" if name == HUB else "letters, digits, and . _ - between them, at most 64"
        raise ConfigError(f"{name!r} cannot be the name of a node's key: {why}")
