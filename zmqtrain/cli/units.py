"""The systemd units of a broker and of nodes: `zmqtrain units`.

Rule 1: a unit holds what concerns the service manager; settings are in a TOML file beside the system's others, which is
its owner's from the moment it is written. Rule 2: no file that somebody has changed is overwritten, unless --force says
so, and then the former is kept. A unit that `zmqtrain units` wrote itself, and nobody has changed, is replaced.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import pwd
import re
import shlex
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zmqtrain.cli.display import say
from zmqtrain.cli.settings import Folder, command
from zmqtrain.core.errors import ConfigError
from zmqtrain.transport.address import parse_addresses
from zmqtrain.transport.key_folder import default_key_folder

BROKER_UNIT, NODE_UNIT = "zmqtrain-broker.service", "zmqtrain-node@.service"
BROKER_SETTINGS, NODE_SETTINGS = "broker.toml", "node.toml"
NODE_KEY = "node.key_secret"
HEAD = "# made by: zmqtrain units; checksum "
ANY_HUB = "tcp://HUB:5555"


@dataclass(frozen=True, kw_only=True)
class UnitsConfig:
    """Print the systemd units that run a broker, and nodes, as services of this PC; --install writes them.

    zmqtrain-broker.service is this PC's broker. zmqtrain-node@0.service is its node on card 0, zmqtrain-node@1.service
    on card 1; a PC without a card has zmqtrain-node@0.service. What they train with is in broker.toml and node.toml,
    which are written too where there are none, and then are yours.

    Example, on each PC: sudo zmqtrain units --install --only node --hub tcp://192.168.1.10:5555
    """

    only: Literal["both", "broker", "node"] = "both"
    """Which units."""
    hub: str = ""
    """For node.toml: the broker's address, tcp://HOST:PORT, or several with commas."""
    insecure: bool = False
    """The hub has no keys: broker and nodes take none."""
    user: bool = False
    """Units of this user's own systemd (systemctl --user), which need no root."""
    run_as: str = ""
    """The user that the services run as; empty: the owner of this installation, or, if that is root, a user that
    systemd makes for each service."""
    install: bool = False
    """Write the files, and say what to type next."""
    force: bool = False
    """With --install: replace units that were changed, too. What was there is kept as NAME.former."""
    root: Folder = None
    """With --install: write below this folder in place of /, as into an image that is not running."""

    def __post_init__(self) -> None:
        if self.hub:
            parse_addresses(self.hub)
        if self.run_as and self.user:
            raise ConfigError("--run-as is for root: units of a user's own (--user) run as that user")
        if self.run_as and not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", self.run_as):
            raise ConfigError(f"run_as is the name of a user, got {self.run_as!r}")
        if (self.force or self.root is not None) and not self.install:
            raise ConfigError("--force and --root are for --install: without it nothing is written")
        if self.install and self.only != "broker" and not self.hub:
            raise ConfigError(
                "a node needs its broker's address: say --hub tcp://HOST:PORT; or --only broker, on the hub"
            )


@dataclass(frozen=True)
class UnitFile:
    """One file. path: where it belongs.  mine: written by `zmqtrain units` alone; else its reader edits it."""

    path: Path
    text: str
    mine: bool

    @property
    def content(self) -> str:
        """What is written: of a unit with the checksum that says whether somebody has changed it."""
        return f"{HEAD}{checksum(self.text)}\n{self.text}" if self.mine else self.text


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_unchanged(content: str) -> bool:
    """Whether a file is as some `zmqtrain units` wrote it."""
    head, _, text = content.partition("\n")
    return head == HEAD + checksum(text)


# ---------------------------------------------------------------------- what the files say


@dataclass(frozen=True)
class Places:
    """Where files belong. units: of systemd.  settings: the TOML files and the node's key.  keys: the broker's."""

    units: Path
    settings: Path
    keys: Path

    @classmethod
    def of(cls, user: bool) -> Places:
        if not user:
            return cls(Path("/etc/systemd/system"), Path("/etc/zmqtrain"), Path("/var/lib/zmqtrain-broker/keys"))
        config = Path.home() / ".config"
        return cls(config / "systemd/user", config / "zmqtrain", default_key_folder())


def unit_files(config: UnitsConfig, places: Places, owner: str) -> list[UnitFile]:
    """Return the files of these services. owner: the user that they run as, "" for one that systemd makes."""
    files = []
    if config.only != "node":
        files.append(UnitFile(places.units / BROKER_UNIT, _broker_unit(config, places, owner), True))
        files.append(UnitFile(places.settings / BROKER_SETTINGS, _broker_settings(config, places), False))
    if config.only != "broker":
        files.append(UnitFile(places.units / NODE_UNIT, _node_unit(config, places, owner), True))
        files.append(UnitFile(places.settings / NODE_SETTINGS, _node_settings(config), False))
    return files


def program_line(name: str) -> str:
    """Return how a unit starts zmqtrain-broker or zmqtrain-node of this installation."""
    beside = Path(sys.executable).parent / name
    if beside.is_file():
        return _quoted(str(beside))
    return f"{_quoted(sys.executable)} -m zmqtrain.cli {name.removeprefix('zmqtrain-')}"


def _quoted(word: str) -> str:
    """Quote a word for a unit: % and $ mean something there."""
    word = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$").replace('"', '\\"')
    return f'"{word}"' if re.search(r"[\s'\"\\;]", word) else word


def _plain(path: Path) -> str:
    """Return a path for a setting of a unit that is not a command line."""
    return str(path).replace("%", "%%")


def _sandbox(user: bool, owner: str) -> str:
    """Return what the services may do: write to their own folder, and read. Training needs memory that is written and
    executed, and the devices of cards: these stay."""
    if user:
        return "NoNewPrivileges=yes"
    who = f"User={owner}" if owner else "DynamicUser=yes"
    return (
        f"{who}\nProtectSystem=strict\nProtectHome=read-only\nPrivateTmp=yes\nNoNewPrivileges=yes\n"
        "ProtectKernelModules=yes\nProtectKernelTunables=yes\nProtectControlGroups=yes\nRestrictSUIDSGID=yes\n"
        "LockPersonality=yes\nRestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK"
    )


def _head(description: str, user: bool) -> str:
    network = "" if user else "Wants=network-online.target\nAfter=network-online.target\n"
    return f"[Unit]\nDescription={description}\n{network}StartLimitIntervalSec=0\n"


def _tail(user: bool) -> str:
    return f"[Install]\nWantedBy={'default' if user else 'multi-user'}.target\n"


def _broker_unit(config: UnitsConfig, places: Places, owner: str) -> str:
    settings = places.settings / BROKER_SETTINGS
    return f"""\
# The run's settings: {settings}. To change this unit: {_control(config)} edit zmqtrain-broker
{_head("zmqtrain broker", config.user)}
[Service]
# Started when it listens. Its loop reports every 5 s; one that hangs for 30 s is killed, and started again.
Type=notify
WatchdogSec=30
ExecStart={program_line("zmqtrain-broker")} --config {_quoted(str(settings))}
# Exit code 0: the run is over, or was ended. 78: it would end the same way again. All else is started again.
Restart=on-failure
RestartPreventExitStatus=78
RestartSec=1
# Ctrl-C: it saves the run and ends. Reading a large checkpoint takes a while, and so does saving it.
KillSignal=SIGINT
KillMode=mixed
TimeoutStartSec=10min
TimeoutStopSec=5min
StateDirectory=zmqtrain-broker
StateDirectoryMode=0700
WorkingDirectory=%S/zmqtrain-broker
# A connection is a file; a broker takes 4096.
LimitNOFILE=8192
{_sandbox(config.user, owner)}

{_tail(config.user)}"""


def _node_unit(config: UnitsConfig, places: Places, owner: str) -> str:
    settings, key = places.settings / NODE_SETTINGS, places.settings / NODE_KEY
    credential, keys = "", f" --keys {_quoted(str(key))}"
    if not config.user:
        credential = (
            "# The service reads a copy of this PC's key, which only root can read otherwise.\n"
            f"LoadCredential={NODE_KEY}:{_plain(key)}\n"
        )
        keys = f" --keys ${{CREDENTIALS_DIRECTORY}}/{NODE_KEY}"
    if config.insecure:
        credential = keys = ""
    options = f"--config {_quoted(str(settings))} --name %l-%i{keys}"
    return f"""\
# %i is the number of the card. The broker's address: {settings}.
# To change this unit: {_control(config)} edit zmqtrain-node@
{_head("zmqtrain node, card %i", config.user)}
[Service]
# Started when the broker has let it in.
Type=notify
Environment=CUDA_VISIBLE_DEVICES=%i
ExecStart={program_line("zmqtrain-node")} {options}
{credential}# It takes part in this run and in the next ones. 78: it would end the same way again; its log says why.
Restart=always
RestartPreventExitStatus=78
RestartSec=5
# Ctrl-C: it ends after its step, once what it has computed is sent.
KillSignal=SIGINT
KillMode=mixed
TimeoutStartSec=5min
TimeoutStopSec=90
# Who sits at this PC goes first.
Nice=10
OOMScoreAdjust=500
StateDirectory=zmqtrain-node/%i
StateDirectoryMode=0700
WorkingDirectory=%S/zmqtrain-node/%i
{_sandbox(config.user, owner)}

{_tail(config.user)}"""


def _broker_settings(config: UnitsConfig, places: Places) -> str:
    trust = ""  # a user's own broker finds that user's keys
    if config.insecure:
        trust = "insecure = true\n"
    elif not config.user:
        trust = 'keys = "keys"\n'
    return f"""\
# Settings of the broker: each flag of zmqtrain-broker --help is a key here (checkpoint_every = "5min").
# Folders are below the service's own{"" if config.user else f", {places.keys.parent}"}.
# After a change: {_control(config)} restart zmqtrain-broker
program = "text"
{trust}bind = "tcp://*:5555"
# The run is saved here, and goes on from here. To begin a new run, name another folder.
checkpoint = "run1"
"""


def _node_settings(config: UnitsConfig) -> str:
    return f"""\
# Settings of this PC's nodes: each flag of zmqtrain-node --help is a key here (share = 0.8).
# After a change: {_control(config)} restart 'zmqtrain-node@*'
hub = "{config.hub or ANY_HUB}"
# Each node saves here, in the service's own folder, what it goes on from; what is of a former run is set aside.
# Leave both lines out for a run of several brokers (--shard), or in lockstep (--exchange).
checkpoint = "kept"
new_run = true
"""


def _control(config: UnitsConfig) -> str:
    return "systemctl --user" if config.user else "systemctl"


# ---------------------------------------------------------------------- printing and writing


def _run(config: UnitsConfig) -> int:
    places = Places.of(config.user)
    owner = "" if config.user else config.run_as or owner_of(Path(sys.prefix))
    files = unit_files(config, places, owner)
    if not (owner or config.user) and (closed := closed_folder(Path(sys.executable))) is not None:
        print(
            f"zmqtrain units: note: the services run as users of their own, who cannot enter {closed}, on the way to "
            "this Python: install zmqtrain where everybody can run it, as in /opt/zmqtrain, or say --run-as NAME",
            file=sys.stderr,
        )
    if not config.install:
        print("\n".join(f"# {file.path}\n{file.text}" for file in files), end="")
        return 0
    install(files, config.root, config.force)
    say(next_steps(config, places))
    return 0


def owner_of(folder: Path) -> str:
    """Return the name of a folder's owner, as which the services run; "" if that is root."""
    number = folder.stat().st_uid
    try:
        return "" if number == 0 else pwd.getpwuid(number).pw_name
    except KeyError:
        raise ConfigError(
            f"{folder} belongs to user {number}, who has no name on this PC: say which user is to run the services "
            "(--run-as NAME)"
        ) from None


def closed_folder(program: Path) -> Path | None:
    """Return the first folder on the way to a program that other users cannot enter; None if there is none."""
    ways = dict.fromkeys([*reversed(program.parents), *reversed(program.resolve().parents)])
    return next((folder for folder in ways if not folder.stat().st_mode & stat.S_IXOTH), None)


def install(files: Sequence[UnitFile], root: Path | None, force: bool) -> None:
    """Write the files, and print what became of each.

    Raises ConfigError, before anything is written, if a unit that somebody has changed would be lost; and where a file
    cannot be written.
    """
    there = {file: (root or Path("/")) / file.path.relative_to("/") for file in files}
    changed = {file: path for file, path in there.items() if file.mine and _is_changed(file, path)}
    if changed and not force:
        for file, path in changed.items():
            print("".join(_difference(path, file)), end="", file=sys.stderr)
        names = " and ".join(map(str, changed.values()))
        raise ConfigError(
            f"{names} {'was' if len(changed) == 1 else 'were'} changed (above: what would become of it), and nothing "
            "is written. Keep changes of your own in a drop-in (systemctl edit), and say --force; each is then "
            "kept as NAME.former"
        )
    for file, path in there.items():
        try:
            print(_write(file, path, file in changed))
        except OSError as error:
            as_root = (
                "; say it with sudo, or --user for units of your own" if isinstance(error, PermissionError) else ""
            )
            raise ConfigError(f"cannot write {path}: {error.strerror}{as_root}") from error


def _is_changed(file: UnitFile, path: Path) -> bool:
    try:
        content = path.read_text("utf-8", "replace")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return content != file.content and not is_unchanged(content)


def _difference(path: Path, file: UnitFile) -> list[str]:
    before = path.read_text("utf-8", "replace").splitlines(keepends=True)
    return list(difflib.unified_diff(before, file.content.splitlines(keepends=True), str(path), "zmqtrain units"))


def _write(file: UnitFile, path: Path, keep: bool) -> str:
    """Write one file; return what was done. keep: the former file is kept as NAME.former."""
    if path.exists():
        if path.read_text("utf-8", "replace") == file.content:
            return f"{path} is as it should be"
        if not file.mine:
            return f"{path} is there, and stays as it is"
        kept = path.with_name(f"{path.name}.former")
        if keep:
            os.replace(path, kept)
        path.write_text(file.content, "utf-8")
        return f"replaced {path}" + (f"; what was there is {kept}" if keep else ", which an earlier zmqtrain wrote")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.content, "utf-8")
    return f"wrote {path}"


def next_steps(config: UnitsConfig, places: Places) -> str:
    """Return what to type after --install."""
    sudo, control = "" if config.user else "sudo ", _control(config)
    lines = ["next, on this PC:", f"  {sudo}{control} daemon-reload"]
    if config.only != "node":
        lines.append(f"  {sudo}{control} enable --now zmqtrain-broker")
        if not config.insecure:
            key = places.keys / "nodes/lab.key_secret"
            lines += ["then copy the key that it made to each PC:", f"  {sudo}scp {shlex.quote(str(key))} PC:"]
    if config.only != "broker":
        if not config.insecure:
            key = places.settings / NODE_KEY
            lines += [
                "with the key of this PC, which the broker made:",
                f"  {sudo}install -m 600 lab.key_secret {shlex.quote(str(key))}",
            ]
        lines.append(f"  {sudo}{control} enable --now zmqtrain-node@0")
    if config.user:
        lines += ["so that they run while you are not logged in:", "  loginctl enable-linger"]
    words = "broker" if config.only == "broker" else "node@0" if config.only == "node" else "*"
    lines.append(f"what they say:\n  journalctl {'--user ' if config.user else ''}-fu 'zmqtrain-{words}'")
    return "\n".join(lines)


main = command(UnitsConfig, "zmqtrain units", _run)

if __name__ == "__main__":
    sys.exit(main())
