"""Start a broker and show its run: `zmqtrain-broker`.

Rule: nothing that is imported here reaches jax; a program's arguments are checked by its source.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zmqtrain.broker.broker import Broker
from zmqtrain.broker.checkpoint import MODEL_FILE, RUNS, RunFolders, part_file
from zmqtrain.broker.serve import serve
from zmqtrain.broker.standby import ShardPlace, Standby, StandbyPlace
from zmqtrain.cli.display import Display, log_to_stderr, plural, say
from zmqtrain.cli.ending import leave_at_once
from zmqtrain.cli.settings import File, Folder, PortOptions, RunOptions, check_host, command
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.core.installed import clone_folder, command_word
from zmqtrain.core.launcher import service
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings, require
from zmqtrain.monitor.recorder import BrokerRecorder, process_facts
from zmqtrain.monitor.tensorboard import ScalarThread, ScalarWriter
from zmqtrain.planning.plans import link_share
from zmqtrain.programs import check_program_arguments, parse_arguments, program_names
from zmqtrain.protocol.messages import Roster
from zmqtrain.transport.address import is_loopback, local_address, parse_address
from zmqtrain.transport.key_folder import EVERY_PC, KeyFolder, LentKeys, default_key_folder
from zmqtrain.transport.pacing import ConnectionLimits
from zmqtrain.transport.service_manager import ServiceManager
from zmqtrain.transport.zmq_keys import CurveKeys, descriptor_room


@dataclass(frozen=True, kw_only=True)
class BrokerConfig(PortOptions, RunOptions):
    """Start the broker of a run: the one program on the hub that the nodes of all PCs connect to.

    All settings of the run are given here and nowhere else; the nodes adopt them when they join. Ctrl-C saves
    the run and ends this broker alone; zmqtrain stop ends the run and its nodes too.

    On the network only PCs with an authorised key come in (zmqtrain keys); the broker says what each of them needs.

    Example: zmqtrain-broker --program text      and then, on each PC:  zmqtrain-node tcp://HUB:5555 --keys FILE
    """

    bind: str = "tcp://*:5555"
    """Where to listen: all addresses of this machine, or one of them; tcp://127.0.0.1:5555 for this machine alone."""
    shard: str = ""
    """For several brokers: which of them this is, as "0/4" for the first, and "1/4" to "3/4" for the others, which need
    --first and no setting of the run."""
    first: str = ""
    """Where the first of several brokers is (tcp://HOST:PORT), if this is another: it has the settings of the run."""
    standby: str = ""
    """Follow the broker at this address (tcp://HOST:PORT), with no setting of the run; take over when it is gone."""
    takeover_seconds: float = 3.0
    """For a standby: how long the broker that it follows must be gone, while at least half of the nodes say so too."""
    address: str = ""
    """For another broker than the first, and for a standby: where nodes reach it (tcp://HOST:PORT); empty: at this
    machine's address on the way to the first, and the port of --bind."""
    wait_seconds: float = 30.0
    """For another broker than the first, and for a standby: how long to wait for the first's answer."""
    follow_stdin: bool = False
    """End when standard input closes: for programs that start a broker."""
    keys: Folder = None
    """The folder of keys, as zmqtrain keys keeps it; on the network ~/.config/zmqtrain/keys if not given, where the
    broker makes what is missing. All brokers of a run have the same; "-" is for one that a node serves."""
    insecure: bool = False
    """Listen on the network without keys: everybody who reaches the port can join, and everybody who sees the traffic
    can read it.    For a network that you trust."""
    record: File = None
    """Write what happens here to this file, an event a line (JSON): `zmqtrain sim --replay` lives it again, and
    `zmqtrain report` draws it."""
    tensorboard: Folder = None
    """Write scalars of the run and of all nodes to this folder, once a second, for TensorBoard."""

    def __post_init__(self) -> None:
        self._read_shard()
        super().__post_init__()
        link_share(self.link, self.share)
        self._check_shard()
        if self.from_file is not None and self.record is not None:
            raise ConfigError("a run that begins with a file cannot be lived again: leave --record or --from out")
        parse_address(self.bind, "tcp://*:5555")
        if self.keys is not None and self.insecure:
            raise ConfigError("--insecure says that there are no keys, and --keys names their folder: leave one out")

    @property
    def key_folder(self) -> Path | None:
        """The folder of the keys with which nodes join; None: every node that reaches the address may."""
        if self.insecure or (self.keys is None and is_loopback(self.bind)):
            return None
        return self.keys or default_key_folder()

    @property
    def shard_index(self) -> int:
        """Which of several brokers this is; 0: the first, or the only one."""
        return int(self.shard.partition("/")[0] or 0)

    def _read_shard(self) -> None:
        """Take the number of brokers from `shard`."""
        if not self.shard:
            return
        form = re.fullmatch(r"(\d{1,4})/(\d{1,4})", self.shard, re.ASCII)
        if form is None:
            raise ConfigError(
                f"shard is which of how many shards this is, as 0/4 for the first of four, got {self.shard!r}"
            )
        index, shards = int(form[1]), int(form[2])
        if not index < shards:
            raise ConfigError(f"shard {self.shard}: of {shards} shards the first is 0 and the last is {shards - 1}")
        if self.shards not in (AUTO_SHARDS, 1, shards):
            raise ConfigError(f"shard {self.shard} says {shards} shards, shards says {self.shards}: leave one out")
        object.__setattr__(self, "shards", shards)

    def _check_shard(self) -> None:
        if self.record is not None and self.shards == AUTO_SHARDS:
            object.__setattr__(self, "shards", 1)
        if self.record is not None and self.shards != 1:
            raise ConfigError("a run of several brokers cannot be recorded, nor lived again: leave --record out")
        if self.standby:
            return self._check_standby()
        if self.shard_index == 0:
            for name in ("first", "address"):
                if getattr(self, name):
                    raise ConfigError(f"{name} is for the other brokers: this is the first (--shard 1/M to M-1/M)")
            return
        if not self.first:
            raise ConfigError(
                f"shard {self.shard} needs the address of the first broker, which has the settings: say --first "
                "tcp://HOST:PORT, as that one printed it"
            )
        parse_address(self.first)
        self._check_follower("the first broker's", "--shard 0 is started")

    def _check_standby(self) -> None:
        if self.shard:
            raise ConfigError("a standby follows a broker that has the whole model: leave --shard or --standby out")
        if self.first:
            raise ConfigError("first is for the other brokers of a run, a standby says --standby alone")
        if self.record is not None:
            raise ConfigError("a standby has not seen how its run began, and cannot record it: leave --record out")
        parse_address(self.standby)
        require("takeover_seconds", self.takeover_seconds, 0.5)
        self._check_follower("those of the broker that a standby follows", "that is started")

    def _check_follower(self, whose: str, where: str) -> None:
        """Check what is given to a broker that takes its settings from another."""
        if self.address:
            parse_address(self.address)
        if self.from_file is not None:
            raise ConfigError(f"with which parameters the run begins (--from) is to be said where {where}")
        require("wait_seconds", self.wait_seconds, 0)
        not_given = RunSettings(shards=self.shards)
        names = [field.name for field in fields(RunSettings) if field.name != "shards"]
        given = [name for name in names if getattr(self, name) != getattr(not_given, name)]
        if given:
            raise ConfigError(
                f"the settings of a run are {whose}: leave {', '.join(given)} out here, or give them where {where}"
            )


PROGRAM = "zmqtrain-broker"
LENT = Path("-")
"""What --keys says where a node lends them."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _run(config: BrokerConfig) -> int:
    log_to_stderr(config.verbose)
    lent = read_lent_keys() if config.keys == LENT else None
    if config.follow_stdin:
        threading.Thread(target=_end_with_stdin, name="zmqtrain-stdin", daemon=True).start()
    return _BrokerProgram(config, lent).run()


def _end_with_stdin() -> None:
    """End in order when standard input closes."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)


class _BrokerProgram:
    """One broker: what is printed when it starts, takes over, is interrupted and ends."""

    def __init__(self, config: BrokerConfig, lent: LentKeys | None) -> None:
        self._config = config
        self._settings = RunSettings.from_dict(config.to_dict())
        self._unknown = check_program(self._settings)
        own_folder = config.checkpoint is None and not config.no_checkpoint
        check_checkpoint(RUNS if own_folder else config.checkpoint)
        self._beginning = config.read_beginning()
        self._keys, self._lent = None if lent else open_keys(config), lent
        self._place: ShardPlace | None = None
        self._standby: StandbyPlace | None = None
        follows: dict[str, Any] = {"address": config.address, "wait_seconds": config.wait_seconds}
        if config.shard_index:
            check_host(config.first)
            self._place = ShardPlace(shard=config.shard_index, shards=config.shards, first=config.first, **follows)
        elif config.standby:
            check_host(config.standby)
            self._standby = StandbyPlace(first=config.standby, takeover_seconds=config.takeover_seconds, **follows)
        self._is_first = self._place is None and self._standby is None
        self._checkpoint = RunFolders() if own_folder else config.checkpoint
        self._unfinished = RunFolders().cut_short() if own_folder and self._is_first else None
        self.roster: Roster | None = None
        self._folder: Path | None = None
        trained = describe_program(self._settings) if self._place is None else f"shard {config.shard}"
        what = trained if self._standby is None else f"the run of {config.standby}"
        self._display = Display(self, f"broker: {what}")

    def run(self) -> int:
        config, recorder = self._config, None
        if config.record is not None:
            recorder = BrokerRecorder(config.record, process_facts())
        scalars = None if config.tensorboard is None else ScalarThread(ScalarWriter(config.tensorboard), self)
        try:
            statistics = serve(
                config.bind,
                self._settings if self._is_first else None,
                keys=self._lent or self._keys,
                checkpoint=self._checkpoint,
                checkpoint_every=config.checkpoint_every,
                checkpoint_keep=config.checkpoint_keep,
                ready=self._ready,
                watch=self._watch,
                interrupted=self._interrupted,
                events=recorder,
                share=link_share(config.link, config.share),
                place=self._place,
                standby=self._standby,
                beginning=self._beginning,
                following=self._following,
                manager=ServiceManager(service()),
                hosting=not config.shard,
            )
        finally:
            self._display.close()
            if scalars is not None:
                scalars.close()
            if recorder is not None:
                recorder.close()
        if self._standby is not None and statistics.version < 0:
            print("ended as a standby that was not needed")
            return 0
        over = self.roster is not None and 0 < self.roster.units_total <= self.roster.units_done
        say(result(statistics.version, statistics.contributions, self._folder, self._folder, over=over))
        return 0

    def _following(self, standby: Standby) -> None:
        config, address = self._config, standby.address
        say(
            f"{standby.follower.run}: the standby of {config.standby}, which nodes reach at {address} (--address says "
            f"otherwise)\nit takes over {config.takeover_seconds:g} s after that is gone and its nodes say so, or at: "
            f"zmqtrain promote {address}"
        )

    def _ready(self, broker: Broker) -> None:
        config, hub, self._folder = self._config, broker.hub, broker.folder
        if hub.units.ledger.finished:
            return say(finished(hub.run, hub.version, hub.units.ledger.total))
        if self._standby is not None:
            at = f"at version {max(0, hub.version)}, as term {hub.term}"
            say(f"{hub.run}: this broker has taken over, {at}; its nodes come by themselves")
        elif self._place is None:
            resumed = hub.version if self._beginning is None else -1
            say(greeting(config, hub.run, resumed, broker.channel.address, self._keys))
        else:
            say(shard_greeting(config, hub.run, hub.version, broker.public_address))
        if self._beginning is not None:
            say(f"it begins with {self._beginning.path}: {self._beginning.facts.description}")
        say(saving(broker.folder))
        if self._unfinished is not None:
            say(
                "note: the broker of another run did not end in order; to go on with that:\n"
                f"  --checkpoint {self._unfinished}"
            )
        if self._place is None:
            say(f"to end the run and all its nodes:\n  {stop_line(broker.channel.address, self._keys)}")
        if self._unknown:
            print(self._unknown, file=sys.stderr, flush=True)
        self._display.start()

    def _watch(self, roster: Roster) -> None:
        self.roster = roster

    def _interrupted(self, count: int) -> None:
        if count > 1:
            leave_at_once()
        self._display.say(ending(self.roster, self._folder))


def finished(run: str, version: int, units: int) -> str:
    return (
        f"{run} has come to its end: all its {units:,} data units are done, at version {version}. To train on, raise "
        f"--units (as --units {2 * units}; 0: no end)"
    )


def stop_line(address: str, keys: KeyFolder | None) -> str:
    """Return the command that ends a run from the hub's own PC. address: that its programs connect to."""
    elsewhere = keys is not None and keys.path != default_key_folder()
    pair = f" --keys {_from_home(keys.path / 'hub.key_secret')}" if keys is not None and elsewhere else ""
    return f"{command_word('zmqtrain')} stop {address}{pair}"


def saving(folder: Path | None) -> str:
    if folder is None:
        return "nothing is saved (--no-checkpoint): the model is lost when this broker ends"
    return f"the run and its model are saved in {folder}"


def result(
    version: int,
    contributions: int,
    folder: Path | None,
    again: Path | None,
    program: str = PROGRAM,
    over: bool = False,
) -> str:
    """Return a broker's last words: how far the run came, where the model is, how to go on with the run.

    folder: of checkpoints, None for none.  again: the --checkpoint of `program` to go on.  over: all units are done.
    """
    if version < 0:
        return "ended: no node has begun to train, so there is no model"
    lines = [f"ended at version {version}, {plural(contributions, 'contribution')}"]
    if folder is None:
        return f"{lines[0]}; nothing was saved (--no-checkpoint)"
    if (model := folder / MODEL_FILE).exists():
        lines.append(f"the model: {model}")
    elif parts := sorted(folder.glob(part_file("*", "*"))):
        lines.append(f"this broker's part of the model: {parts[0]} (zmqtrain merge makes the whole of all)")
    options = "the same options, more --units" if over else "the same options"
    command, _, part = program.partition(" ")
    line = f"{command_word(command)} {part}".rstrip()
    lines.append(f"to go on with this run: {line} with {options} and --checkpoint {again}")
    return "\n".join(lines)


def ending(roster: Roster | None, folder: Path | None) -> str:
    """Return the message at the first interrupt: what the nodes do now, and how they end.

    roster: the newest, if there is one.  folder: where the run is saved; None: nowhere.
    """
    if address := "" if roster is None else str(roster.hub.get("standby", "")):
        what = f"the standby at {address} takes over, if it is in step; to end the run, end that one too"
    else:
        what = "all accepted deltas are saved" if folder is not None else "nothing is saved (--no-checkpoint)"
    if not address and roster is not None and roster.members:
        what += ". The nodes train on alone until you end them: Ctrl-C at each"
        if folder is not None:
            what += f". They come back if this broker is started again with --checkpoint {folder}"
        what += ". `zmqtrain stop` in place of Ctrl-C would end them too"
    return f"stopping: {what} (Ctrl-C again to quit at once)"


def read_lent_keys() -> LentKeys:
    """Return the keys of a broker of a node, which has written its own pair to standard input."""
    pair = json.loads(sys.stdin.buffer.readline())
    return LentKeys(CurveKeys(pair["public"].encode(), pair["secret"].encode(), pair["server"].encode()))


def open_keys(config: BrokerConfig) -> KeyFolder | None:
    """Return the folder of keys, None for a broker without keys.

    Makes this hub's pair, and one key for the PCs if there is none. Raises ConfigError, which says what to do instead.
    """
    descriptor_room(ConnectionLimits().total, grow=True)
    if config.key_folder is None:
        return None
    folder = KeyFolder(config.key_folder)
    leads = config.shard_index == 0 and not config.standby
    try:
        folder.hub(make=leads)
        if leads and len(folder.entries()) == 1:
            folder.new([EVERY_PC])
    except ConfigError as error:
        port = parse_address(config.bind, "tcp://*:5555")[1]
        raise ConfigError(
            f"{config.bind} can be reached from the network, so who joins must have a key; {error}. Name another "
            f"folder (--keys FOLDER); for this machine alone, say --bind tcp://127.0.0.1:{port or 5555}; on a network "
            "that you trust, --insecure"
        ) from error
    return folder


def check_program(settings: RunSettings) -> str:
    """Check the program's name and arguments without importing it.

    Returns a note if no such program is installed here (the nodes may have it), else "". Raises ConfigError for a name
    that looks mistyped, and for wrong arguments.
    """
    arguments = parse_arguments(settings.program_arguments)
    if not settings.program:
        if arguments:
            raise ConfigError("program_arguments are given, but no program: say which one, as in --program text")
        return ""
    names = program_names()
    if settings.program in names:
        check_program_arguments(settings.program, arguments)
        return ""
    if close := difflib.get_close_matches(settings.program, names, n=1, cutoff=0.5):
        raise ConfigError(
            f"program = {settings.program!r}: there is no such program; did you mean {close[0]!r}? The choices are "
            f"{', '.join(names)} (zmqtrain programs)"
        )
    return (
        f"note: no program {settings.program!r} is installed here ({', '.join(names)} are): every node must have the "
        "package that brings it"
    )


def check_checkpoint(folder: Path | None) -> None:
    """Raise CheckpointError unless the folder can be made and written to: now, not at the first save.

    A full disk is no error where there is a run to resume: it is saved when there is room.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in NO_ROOM and any(folder.glob("checkpoint-*.safetensors")):
            return
        why = "it is a file, not a folder" if folder.is_file() else error.strerror
        raise CheckpointError(
            f"cannot write to {folder}: {why}; name another folder (--checkpoint FOLDER), or save nothing "
            "(--no-checkpoint)"
        ) from error


def describe_program(settings: RunSettings) -> str:
    if not settings.program:
        return "the model of the first node (custom loops)"
    return settings.program + (f" ({settings.program_arguments})" if settings.program_arguments else "")


def node_addresses(bound: str, own: str) -> list[str]:
    """Return the addresses of a broker bound to `bound`: first by number, which every PC can reach, then by name.

    own: the address that this machine's programs connect to, with the port that was chosen.
    """
    port = parse_address(own)[1]
    host = parse_address(bound, "tcp://*:5555")[0]
    if host not in ("*", "0.0.0.0", "::"):
        return [own]
    names = [local_address(), socket.gethostname()]
    return [f"tcp://{name}:{port}" for name in dict.fromkeys(names) if name] or [own]


def greeting(config: BrokerConfig, run: str, version: int, own: str, keys: KeyFolder | None) -> str:
    """Return a broker's first words: its run, and what to type on each PC, or to write in a training loop.

    own: the address that this machine's programs connect to.  version: where the run resumed; -1 if it is new.
    """
    file, here = "", is_loopback(config.bind)
    lines = [f"{run}{f', resumed at version {version}' if version >= 0 else ''}: training "]
    lines[0] += describe_program(config)
    if not config.units:
        lines[0] += "; the run has no end (--units 0)"
    where, node = "on this machine" if here else "on each PC", command_word("zmqtrain-node")
    if config.program and node.startswith("bin/"):
        where += f" in {shlex.quote(str(clone_folder()))}" if here else " in its clone of zmqtrain"
    if keys is not None:
        file, how = way_in(keys, here)
        lines += how

    def way(address: str) -> str:
        if config.program:
            return f"{node} {address}" + (f" --keys {file}" if file else "")
        return f'zmqtrain.connect("{address}"' + (f", keys={json.dumps(shlex.split(file)[0])})" if file else ")")

    ways = [way(address) for address in node_addresses(config.bind, own)]
    what = "type" if config.program else "connect your training loop"
    lines.append(f"{what} {where}{', one of' if len(ways) > 1 else ''}:")
    lines += [f"  {one}" for one in ways]
    if config.shards > 1 and not config.shard:
        others = "the other shard" if config.shards == 2 else f"the other {config.shards - 1} shards"
        lines.append(f"their PCs serve {others} of the model, and this one what none of them can")
    elif config.shards > 1:
        address = node_addresses(config.bind, own)[0]
        trust = "--insecure" if keys is None else "--keys FOLDER"
        others = "1" if config.shards == 2 else f"1 to {config.shards - 1}"
        copied = f", where a copy of {shlex.quote(str(keys.path))} is that FOLDER" if keys is not None else ""
        lines.append(
            f"and the other brokers, I = {others}, where you like{copied}:\n"
            f"  {command_word('zmqtrain-broker')} --shard I/{config.shards} --first {address} {trust}"
        )
    return "\n".join(lines)


def way_in(keys: KeyFolder, here: bool = False) -> tuple[str, list[str]]:
    """Return (the key file that a PC names, quoted; lines that say which keys to copy where).

    here: only this machine's nodes join, and copy nothing."""
    make = f"{command_word('zmqtrain')} keys new NAME"
    names = [entry.name for entry in keys.entries() if entry.state == "authorised"]
    made = [name for name in names if keys.secret_of(name).exists()]
    if names == [EVERY_PC] and made:
        path = keys.secret_of(EVERY_PC)
        if here:
            return shlex.quote(str(path)), []
        more = f"({make}...{_said_folder(keys)} makes one for each PC)"
        return f"~/{path.name}", [
            f"copy its key to each PC, and keep it secret {more}:",
            f"  scp {_from_home(path)} PC:",
        ]
    who = f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}" or "nobody yet"
    folder = shlex.quote(str(keys.path / "nodes"))
    if here and made:
        return f"{folder}/NAME.key_secret", [f"who may come in: {who}"]
    what = f"scp {_from_home(keys.path / 'nodes')}/NAME.key_secret NAME:" if made else f"{make}{_said_folder(keys)}"
    return "~/NAME.key_secret", [f"who may come in: {who}; copy its key to each PC, and keep it secret:", f"  {what}"]


def _from_home(path: Path) -> str:
    """Return a path quoted for the shell, with ~ for the user's home."""
    with contextlib.suppress(ValueError, RuntimeError):
        inside = str(path.relative_to(Path.home()))
        if shlex.quote(inside) == inside:
            return f"~/{inside}"
    return shlex.quote(str(path))


def _said_folder(keys: KeyFolder) -> str:
    return "" if keys.path == default_key_folder() else f" --folder {shlex.quote(str(keys.path))}"


def shard_greeting(config: BrokerConfig, run: str, version: int, address: str) -> str:
    resumed = f", resumed at version {version}" if version >= 0 else ""
    return (
        f"{run}{resumed}: shard {config.shard}, which nodes reach at {address} (--address says otherwise)\n"
        f"nodes join at the first broker:  {config.first}"
    )


main = command(BrokerConfig, PROGRAM, _run, service=True)

if __name__ == "__main__":
    sys.exit(main())
