"""Make, list and revoke the keys with which PCs come in: `zmqtrain keys new NAME... | list | revoke NAME`.

Rule 1: a secret goes from this file to a file, never to the terminal.  Rule 2: what is printed is what to type next.
"""

from __future__ import annotations

import difflib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from zmqtrain.cli.display import log_to_stderr
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.fields import Folder
from zmqtrain.cli.settings import read_config
from zmqtrain.cli.terminal import Terminal
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.installed import command_word
from zmqtrain.transport.key_folder import HUB, KeyFolder, default_key_folder

PROGRAM = "zmqtrain keys"
USAGE = """usage: zmqtrain keys COMMAND [OPTIONS]      (zmqtrain keys COMMAND --help says more)

  new NAME...    make a key for each of these PCs, and authorise it
  list           show whose keys are authorised, and whose were revoked
  revoke NAME    shut this key out, of a running broker within seconds too
"""

Names = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")]


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """Make a key for each of these PCs, and authorise it; the hub's own is made with the first. A broker that runs
    lets them in within seconds.

    Each PC needs one file, which holds its pair and the hub's public key. Several PCs may share one: then nothing tells
    them apart, and revoking it shuts all of them out.

    Example: zmqtrain keys new pc1 pc2 pc3
    """

    names: Names
    """What the keys are called: as the PCs, say; "hub" for the hub's own alone."""
    folder: Folder = None
    """The hub's folder of keys; ~/.config/zmqtrain/keys if not given."""


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """Show the keys of this hub: what each is called, digits of its public key to compare, since when it is there."""

    folder: Folder = None
    """The hub's folder of keys; ~/.config/zmqtrain/keys if not given."""


@dataclass(frozen=True, kw_only=True)
class RevokeConfig:
    """Shut a key out. A broker that runs refuses what comes with it from its next look at the folder, within a second,
    tells the node, and ends its connections; nobody else notices.

    Example: zmqtrain keys revoke pc3
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """What the key is called."""
    folder: Folder = None
    """The hub's folder of keys; ~/.config/zmqtrain/keys if not given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do one of the three; return the exit code, 2 if there is no such command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[], None]] = {
        "new": lambda: _new(read_config(NewConfig, f"{PROGRAM} new", arguments[1:])),
        "list": lambda: _list(read_config(ListConfig, f"{PROGRAM} list", arguments[1:])),
        "revoke": lambda: _revoke(read_config(RevokeConfig, f"{PROGRAM} revoke", arguments[1:])),
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if (command := commands.get(arguments[0])) is None:
        close = difflib.get_close_matches(arguments[0], commands, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(commands)}."
        print(f"{PROGRAM}: there is no command {arguments[0]!r}; {hint}", file=sys.stderr)
        return 2
    log_to_stderr(False)

    def run() -> int:
        command()
        return 0

    return run_command(PROGRAM, run)


def _new(config: NewConfig) -> None:
    if not config.names:
        raise ConfigError("keys new needs a name for each PC, as in: zmqtrain keys new pc1 pc2 pc3")
    folder = _folder(config.folder)
    if config.names == (HUB,):
        folder.hub()
        print(f"the hub's keys are in {folder.path}; its broker finds them there")
        return
    files = folder.new(config.names)
    print(f"{', '.join(config.names)} may come in; a broker that runs sees it within seconds.")
    print("Copy its file to each PC, and keep it secret (here it can then be deleted):")
    for name, path in zip(config.names, files, strict=True):
        print(f"    scp {shlex.quote(str(path))} {name}:")
    file = files[0].name if len(files) == 1 else "NAME.key_secret"
    print(f"and type on each:  {command_word('zmqtrain-node')} tcp://HUB:5555 --keys ~/{file}")


def _list(config: ListConfig) -> None:
    folder = _folder(config.folder)
    entries = folder.entries()
    if not entries:
        print(f"there are no keys in {folder.path}; zmqtrain keys new NAME makes one")
        return
    table = Table("name", "public key", "made", "", box=None, pad_edge=False)
    words = {"hub": "the hub's own", "authorised": "authorised", "revoked": "revoked"}
    for entry in entries:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
        table.add_row(entry.name, entry.fingerprint, made, words[entry.state])
    Terminal().print(table)


def _revoke(config: RevokeConfig) -> None:
    kept = _folder(config.folder).revoke(config.name)
    print(f"{config.name} is shut out, of a running broker within seconds; its public key is kept as {kept}")


def _folder(given: Path | None) -> KeyFolder:
    return KeyFolder(given or default_key_folder())


if __name__ == "__main__":
    sys.exit(main())
