"""Read what a user typed: one frozen dataclass per program, each field one key of a TOML file and one flag.

Rule 1: a flag counts more than the file, the file more than the default; nothing comes from the environment.
Rule 2: a record is checked once, in `__post_init__`; what cannot be used is a ConfigError that says what to type.
Rule 3: what is read here is only what a program needs to start; what a program's arguments mean is the program's.
"""

from __future__ import annotations

import difflib
import re
import socket
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from zmqtrain import __version__
from zmqtrain.errors import ConfigError
from zmqtrain.quantities import parse_bytes
from zmqtrain.runtime.checkpoints.every import every_from_text
from zmqtrain.runtime.lockstep.lockstep import read_exchange
from zmqtrain.runtime.node.connect import NO_CHECKPOINT_IN_LOCKSTEP
from zmqtrain.runtime.planning.auto import link_share
from zmqtrain.runtime.rules import check_rules
from zmqtrain.settings import AUTO_DELAY, AUTO_EVERY, RunSettings, read_steps
from zmqtrain.train.induce import induced_from_spec
from zmqtrain.train.lockstep import Lockstep, Server
from zmqtrain.transport.address import is_loopback, parse_address
from zmqtrain.transport.key_folder import default_key_folder

__all__ = [
    "BrokerConfig",
    "NodeConfig",
    "LocalConfig",
    "StatusConfig",
    "PromoteConfig",
    "MergeConfig",
    "DemoConfig",
    "read_config",
    "check_host",
]

Config = TypeVar("Config")

NOT_IN_A_FILE = ("config",)
Verbose = Annotated[bool, tyro.conf.arg(aliases=["-v"])]
Hub = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HUB")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


def _steps(name: str, least: int, auto: int) -> PrimitiveConstructorSpec[int]:
    """How a number of steps is read from a flag: "auto", or a number."""

    def read(written: list[str]) -> int:
        if written[0] == "auto":
            return auto
        if not written[0].isdecimal() or int(written[0]) < least:
            raise ValueError(f"{name} is auto, or a number of at least {least}")
        return int(written[0])

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{auto,STEPS}",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: ["auto" if value == auto else str(value)],
    )


Every = Annotated[int, _steps("every", 1, AUTO_EVERY)]
Delay = Annotated[int, _steps("delay", 0, AUTO_DELAY)]


def _require(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least:g}, got {value:g}")


def _check_checkpoints(config: BrokerConfig | NodeConfig | LocalConfig, strict: bool) -> None:
    every_from_text(config.checkpoint_every, strict)
    _require("checkpoint_keep", config.checkpoint_keep, 2 if strict else 1)


@dataclass(frozen=True, kw_only=True)
class _RunOptions(RunSettings):
    """The settings of a run as they are typed."""

    every: Every = 8
    """k: a node offers a delta every so many steps; auto: as often as links and machines allow, as measured."""
    delay: Delay = 4
    """d: the aggregate is applied at the first step boundary that is at least so many steps after its offer; auto: when
    it has come, as measured."""


@dataclass(frozen=True, kw_only=True)
class BrokerConfig(_RunOptions):
    """Start the broker of a run: the one program on the hub that the nodes of all PCs connect to.

    All settings of the run are given here and nowhere else; the nodes adopt them when they join. Ctrl-C ends the run.

    On the network only PCs with an authorised key come in (zmqtrain keys); the broker says what each of them needs.

    Example: zmqtrain-broker --program text      and then, on each PC:  zmqtrain-node tcp://HUB:5555 --keys FILE
    """

    bind: str = "tcp://*:5555"
    """Where to listen: all addresses of this machine, or one of them; tcp://127.0.0.1:5555 for this machine alone."""
    shard: str = ""
    """For several masters: which of them this is, as "0/4" for the first, and "1/4" to "3/4" for the others, which need
    --first and no setting of the run."""
    first: str = ""
    """Where the first of several masters is (tcp://HOST:PORT), if this is another: it has the settings of the run."""
    standby: str = ""
    """Follow the broker at this address (tcp://HOST:PORT), with no setting of the run; take over when it is gone."""
    takeover_seconds: float = 3.0
    """For a standby: how long the broker that it follows must be gone, while at least half of the nodes say so too."""
    address: str = ""
    """For another master than the first, and for a standby: where nodes reach it (tcp://HOST:PORT); empty: at this
    machine's address on the way to the first, and the port of --bind."""
    wait_seconds: float = 30.0
    """For another master than the first, and for a standby: how long to wait for the first's answer."""
    keys: Folder = None
    """The folder of keys, as zmqtrain keys keeps it; on the network ~/.config/zmqtrain/keys if not given, where the
    broker makes what is missing. All masters of a run have the same."""
    insecure: bool = False
    """Listen on the network without keys: whoever reaches the port can join, and whoever sees the traffic can read it.
    For a network that you trust."""
    link: str = ""
    """The rate of this machine's port, as 1gbit, 2.5gbit or 12.5MB/s; empty: as that of a typical node."""
    share: float = 1.0
    """What training may use of this machine's port, each way, the rest being left to others (0.8). With 1 and no link,
    nothing is limited."""
    checkpoint: Folder = None
    """Save the run here, and resume it from here if there is one."""
    checkpoint_every: str = ""
    """How often to save: after a time ("60s", "5min"), or a count of versions ("64"); empty: 60s, in strict mode 64."""
    checkpoint_keep: int = 3
    """How many checkpoints stay."""
    record: File = None
    """Write what happens here to this file, an event a line (JSON): `zmqtrain sim --replay` lives it again."""
    config: File = None
    """A TOML file with any of these settings as keys (checkpoint_keep = 5); flags count more."""
    verbose: Verbose = False
    """Log what is of use only to who looks for an error."""

    def __post_init__(self) -> None:
        index = self._read_shard()
        super().__post_init__()
        check_rules(self)
        link_share(self.link, self.share)
        self._check_shard(index)
        _check_checkpoints(self, self.mode == "strict")
        parse_address(self.bind, "tcp://*:5555")
        if self.keys is not None and self.insecure:
            raise ConfigError("--insecure says that there are no keys, and --keys names their folder: leave one out")

    @property
    def key_folder(self) -> Path | None:
        """Where the keys are by which nodes come in; None: whoever reaches the address does."""
        if self.insecure or (self.keys is None and is_loopback(self.bind)):
            return None
        return self.keys or default_key_folder()

    @property
    def shard_index(self) -> int:
        """Which of several masters this is; 0: the first, or the only one."""
        return int(self.shard.partition("/")[0] or 0)

    def _read_shard(self) -> int:
        """Take the number of masters from `shard`; return which of them this is."""
        if not self.shard:
            return 0
        form = re.fullmatch(r"(\d{1,4})/(\d{1,4})", self.shard, re.ASCII)
        if form is None:
            raise ConfigError(
                f"shard is which of how many masters this is, as 0/4 for the first of four, got {self.shard!r}"
            )
        index, masters = int(form[1]), int(form[2])
        if not index < masters:
            raise ConfigError(f"shard {self.shard}: of {masters} masters the first is 0 and the last is {masters - 1}")
        if self.masters not in (1, masters):
            raise ConfigError(f"shard {self.shard} says {masters} masters, masters says {self.masters}: leave one out")
        object.__setattr__(self, "masters", masters)
        return index

    def _check_shard(self, index: int) -> None:
        if self.record is not None and self.masters > 1:
            raise ConfigError("a run of several masters cannot be recorded, nor lived again: leave --record out")
        if self.standby:
            return self._check_standby()
        if index == 0:
            for name in ("first", "address"):
                if getattr(self, name):
                    raise ConfigError(f"{name} is for the other masters: this is the first (--shard 1/M to M-1/M)")
            return
        if not self.first:
            raise ConfigError(
                f"shard {self.shard} needs the address of the first master, which has the settings: say --first "
                "tcp://HOST:PORT, as that one printed it"
            )
        parse_address(self.first)
        self._check_follower("the first master's", "--shard 0 is started")

    def _check_standby(self) -> None:
        if self.shard:
            raise ConfigError("a standby follows a broker that has the whole model: leave --shard or --standby out")
        if self.first:
            raise ConfigError("first is for the other masters of a run, a standby says --standby alone")
        if self.record is not None:
            raise ConfigError("a standby has not seen how its run began, and cannot record it: leave --record out")
        parse_address(self.standby)
        _require("takeover_seconds", self.takeover_seconds, 0.5)
        self._check_follower("those of the broker that a standby follows", "that is started")

    def _check_follower(self, whose: str, where: str) -> None:
        """Check what is given to a broker that takes its settings from another."""
        if self.address:
            parse_address(self.address)
        _require("wait_seconds", self.wait_seconds, 0)
        given = [f.name for f in fields(RunSettings) if f.name != "masters" and getattr(self, f.name) != f.default]
        if given:
            raise ConfigError(
                f"the settings of a run are {whose}: leave {', '.join(given)} out here, or give them where {where}"
            )


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Make one file of the parts of a model that several masters have written.

    Each wrote its part to its --checkpoint folder when it ended; give all these folders, or the files
    (model-I-of-M.safetensors), in any order.

    Example: zmqtrain merge first/ second/ --out model.safetensors
    """

    parts: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")]
    """The folders, or files."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("model.safetensors")
    """Where to write the model: safetensors, with the leaf paths as names."""
    verbose: Verbose = False
    """Log what is of use only to who looks for an error."""

    def __post_init__(self) -> None:
        if self.out.exists():
            raise ConfigError(f"{self.out} exists: name another file (--out), or remove it first")


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Train on this PC as a node of the run at HUB (tcp://HOST:PORT, as the broker printed it).

    What is trained, and how, the broker says. Ctrl-C ends this node after the current step: what it has computed is
    sent first; a second Ctrl-C quits at once.
    """

    hub: Hub
    """The broker's address, for example tcp://192.168.1.10:5555."""
    name: str = ""
    """What people call this node; empty: this PC's name."""
    data: str = ""
    """Where the program's data lies on this PC; empty: where the broker's program_arguments say."""
    keys: File = None
    """This PC's keys, where the hub wants them: the file that was made for it (NAME.key_secret)."""
    server_key: str = ""
    """The hub's public key (40 characters), or the file that holds it (NAME.key); empty: as the file of --keys says."""
    wait_seconds: float = 30.0
    """How long to wait for the broker's first answer."""
    link: str = ""
    """The rate of this PC's port, as 1gbit, 100mbit or 12.5MB/s; empty: as the broker measures it."""
    share: float = 1.0
    """What training may use of this PC's port, each way, the rest being left to others (0.8). With 1 and no link,
    nothing is limited."""
    pace_seconds: float = 0.0
    """Every step takes at least so long: to emulate a slower PC, or to leave the machine to others."""
    induce: str = ""
    """For experiments: delays of this node, drawn at random, as "cedar", "niagara,scale=0.1" or
    "mixture=0.1:0.02:0.8/0.3:0.05:0.2,message=0.05": each gradient is late by a draw from a mixture of Gaussians
    (mean:deviation:weight, in seconds), each message by |N(0, message)|."""
    exchange: str = "hub"
    """hub: publish to the broker every so many steps, and wait for nobody. To train in lockstep with the other nodes,
    which must say the same: "allreduce:ring" (or tree, halving, naive, auto; size=4, overlap=next, bucket=8MB,
    check=100, timeout=600, codec=int8), or "server:bsp" (or async, bounded:s=3; optimizer=adam:rate=0.001)."""
    masters: int = 0
    """With --exchange server: how many masters the run must have (the broker's --shard); 0: as many as it has."""
    codec_on: Literal["auto", "host", "device"] = "auto"
    """Where deltas are compressed (to the same bytes): auto: on the device that trains, unless that is a processor."""
    devices: Literal["one", "all"] = "one"
    """all: the devices of this PC (its GPUs) share each batch; its first axis is cut in as many equal parts."""
    anchor: Literal["device", "host"] = "device"
    """Where this node keeps the shared parameters: host frees a card of as much memory as they take in float32."""
    card_memory: str = ""
    """What each device has, as 6GB: a plan that cannot fit is refused before it begins; empty: what the device says
    it has, if it does."""
    checkpoint: Folder = None
    """A folder of this node's own: save here what it can go on from, and go on from that if there is something. It is
    then the node that it was; what it had computed and not sent is not lost. It needs no broker to begin."""
    checkpoint_every: str = ""
    """How often to save: after a time ("60s", "5min"), or a count of versions ("64"); empty: 60s, in strict mode 64."""
    checkpoint_keep: int = 3
    """How many checkpoints stay."""
    new_run: bool = False
    """If the broker's run is another than the checkpoint's, set that aside and join the new run."""
    log_file: File = None
    """Write the log to this file as well."""
    record: File = None
    """Write what happens here to this file, an event a line (JSON): `zmqtrain sim --replay` lives it again."""
    config: File = None
    """A TOML file with any of these settings as keys; flags count more."""
    verbose: Verbose = False
    """Log what is of use only to who looks for an error."""
    follow_stdin: bool = False
    """Quit at once when standard input closes: whoever starts nodes as children holds its other end."""

    def __post_init__(self) -> None:
        parse_address(self.hub)
        link_share(self.link, self.share)
        _require("wait_seconds", self.wait_seconds, 0)
        _require("pace_seconds", self.pace_seconds, 0)
        self._check_exchange()
        _check_checkpoints(self, False)
        if self.new_run and self.checkpoint is None:
            raise ConfigError(
                "new_run is for a node with a --checkpoint folder; without one it joins whatever run there is"
            )
        if self.checkpoint is not None and self.lockstep is not None:
            raise ConfigError(NO_CHECKPOINT_IN_LOCKSTEP)
        if self.checkpoint is not None and self.record is not None:
            raise ConfigError(
                "a node that goes on from a checkpoint cannot be lived again from its record: leave --record or "
                "--checkpoint out"
            )
        if self.card_memory:
            parse_bytes(self.card_memory, "card_memory")
        if self.induce:
            try:
                induced_from_spec(self.induce)
            except ConfigError as error:
                raise ConfigError(f"induce = {error}") from error

    @property
    def lockstep(self) -> Lockstep | None:
        """How this node trains in lockstep with others; None: it publishes to the broker."""
        choice = read_exchange(self.exchange)
        return replace(choice, masters=self.masters) if self.masters and isinstance(choice, Server) else choice

    def _check_exchange(self) -> None:
        choice = read_exchange(self.exchange)
        _require("masters", self.masters, 0)
        if self.masters and not isinstance(choice, Server):
            raise ConfigError("masters is said with --exchange server; elsewhere how many there are is the broker's")
        if self.masters and isinstance(choice, Server) and choice.masters not in (0, self.masters):
            raise ConfigError(f"--exchange {self.exchange} and --masters {self.masters} say two numbers of masters")
        if choice is not None and self.record is not None:
            raise ConfigError(
                f"what nodes exchange with --exchange {self.exchange} does not pass the broker, and cannot be recorded "
                "nor lived again: leave --record out"
            )


@dataclass(frozen=True, kw_only=True)
class LocalConfig(_RunOptions):
    """Run a broker and several nodes on this PC alone: to try out, and to see a run at work.

    Example: zmqtrain local --nodes 3 --program text
    """

    program: str = "text"
    """What the nodes train: "text", "image", or an installed one."""
    nodes: int = 3
    """How many nodes, each a process of its own; they share this PC's cores."""
    seconds: float = 0.0
    """End the run after so long; 0: when its units are done, or at Ctrl-C."""
    pace_seconds: float = 0.0
    """Every step of every node takes at least so long: to emulate slower PCs."""
    exchange: str = "hub"
    """To train in lockstep: "allreduce:ring", "server:async" ..., as for zmqtrain-node; the run then begins with all
    nodes."""
    checkpoint: Folder = None
    """Save the run here, and resume it from here if there is one."""
    checkpoint_every: str = ""
    """How often to save: after a time ("60s", "5min"), or a count of versions ("64"); empty: 60s, in strict mode 64."""
    checkpoint_keep: int = 3
    """How many checkpoints stay."""
    config: File = None
    """A TOML file with any of these settings as keys; flags count more."""
    verbose: Verbose = False
    """Log what is of use only to who looks for an error."""

    def __post_init__(self) -> None:
        if read_exchange(self.exchange) is not None and self.start_nodes == 1:
            object.__setattr__(self, "start_nodes", self.nodes)
        super().__post_init__()
        check_rules(self)
        _require("nodes", self.nodes, 1)
        _require("seconds", self.seconds, 0)
        _require("pace_seconds", self.pace_seconds, 0)
        _check_checkpoints(self, self.mode == "strict")
        if not self.program:
            raise ConfigError("zmqtrain local needs a program to train: --program text, or --program image")
        if self.start_nodes > self.nodes:
            raise ConfigError(
                f"start_nodes ({self.start_nodes}) is more than nodes ({self.nodes}): the run would never begin; say "
                f"--nodes {self.start_nodes}"
            )


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Show how the run at HUB stands: who is there, at what step, with what loss. Looks on; changes nothing.

    age: steps from an offer to the aggregate that answers it. stale: how many versions the node's last delta was
    behind. up, down: the bytes it has sent and received. link: the rate of its port, as it said or as the broker saw
    it. k, d: steps between two offers, and until their aggregate is applied. *: the node that scores the shared model
    on held-out data.
    """

    hub: Hub
    """The broker's address, for example tcp://192.168.1.10:5555."""
    watch: bool = False
    """Go on showing it until Ctrl-C."""
    json: bool = False
    """One JSON object (with --watch: one a line for each report of the broker)."""
    keys: File = None
    """This PC's keys, where the hub wants them: the file that was made for it (NAME.key_secret)."""
    server_key: str = ""
    """The hub's public key (40 characters), or the file that holds it (NAME.key); empty: as the file of --keys says."""
    wait_seconds: float = 5.0
    """How long to wait for the broker's answer."""

    def __post_init__(self) -> None:
        parse_address(self.hub)
        _require("wait_seconds", self.wait_seconds, 0)


@dataclass(frozen=True, kw_only=True)
class PromoteConfig:
    """Tell the standby at HUB to take over its run now, whether or not the broker that it follows is there.

    For maintenance, and where too few nodes are left to say that the broker is gone. The broker that was followed steps
    down as soon as it hears of it; what it has accepted and not sent to the standby is offered again by the nodes.
    """

    hub: Hub
    """The standby's address, for example tcp://192.168.1.11:5555."""
    keys: File = None
    """This PC's keys, where the hub wants them: the file that was made for it (NAME.key_secret)."""
    server_key: str = ""
    """The brokers' public key (40 characters), or the file that holds it (NAME.key); empty: they use none."""
    wait_seconds: float = 10.0
    """How long to wait for the takeover."""

    def __post_init__(self) -> None:
        parse_address(self.hub)
        _require("wait_seconds", self.wait_seconds, 0)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a language model on real text with several nodes on this PC, then with one alone, and draw the two curves.

    Every node is paced to a fixed time per step, as if it had a PC of its own: otherwise the processes would only share
    this PC's cores, and several nodes would compute no more than one.
    """

    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path()
    """Where demo.png and demo.json are written."""
    nodes: int = 3
    """How many nodes the federation has."""
    seconds: float = 75.0
    """How long each of the two runs trains."""
    pace_seconds: float = 0.08
    """Every step of every node takes at least so long."""
    data: str = ""
    """A text file to train on; empty: the source of Python's standard library."""
    verbose: Verbose = False
    """Log what is of use only to who looks for an error."""

    def __post_init__(self) -> None:
        _require("nodes", self.nodes, 2)
        _require("seconds", self.seconds, 5)
        _require("pace_seconds", self.pace_seconds, 0)


# ---------------------------------------------------------------------- from argv and a file to a record


def read_config(kind: type[Config], program: str, argv: Sequence[str] | None = None) -> Config:
    """Return the record of one program, from argv (None: of this process) and from the TOML file that --config names.

    Raises ConfigError; SystemExit for --help, --version and flags that do not exist.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        print(f"zmqtrain {__version__}")
        raise SystemExit(0)
    path = _config_path(arguments) if "config" in _kinds(kind) else None
    default = _unchecked(kind, _read_file(kind, path) if path is not None else {})
    return tyro.cli(
        kind,
        prog=program,
        description=textwrap.dedent("    " + (kind.__doc__ or "")).rstrip() + "\n\n--version prints the version.",
        args=arguments,
        default=default,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _config_path(arguments: Sequence[str]) -> Path | None:
    path = None
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            path = Path(arguments[index + 1])
        elif argument.startswith("--config="):
            path = Path(argument.partition("=")[2])
    return path


def _kinds(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _unchecked(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """A record that was not checked: it only carries the defaults to the parser, which makes the one that is."""
    record = object.__new__(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        default = tyro.MISSING if field.default is MISSING else field.default
        object.__setattr__(record, field.name, values.get(field.name, default))
    return record


def _read_file(kind: type[Any], path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the file {path} (--config) cannot be read: {why}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}; a line is, for example: every = 16") from error
    kinds = _kinds(kind)
    known = [field.name for field in fields(kind) if field.name not in NOT_IN_A_FILE]
    values = {}
    for typed, value in table.items():
        key = typed.replace("-", "_")  # as the flag has it, or as the field
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3) or known
            raise ConfigError(f"{path}: there is no setting {typed!r}; did you mean {' or '.join(close[:3])}?")
        if key == "program_arguments" and isinstance(value, dict):
            value = _join_arguments(path, value)
        values[key] = _checked(f"{path}: {key}", read_steps(key, value), kinds[key])
    return values


def _join_arguments(place: Path, table: Mapping[str, Any]) -> str:
    """Write a table as the flag's text: width = 128, data = "x" becomes width=128,data=x."""
    parts = []
    for name, value in table.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if "," in text or isinstance(value, dict | list):
            raise ConfigError(f"{place}: program_arguments.{name} must be a number, a boolean or a text without commas")
        parts.append(f"{name}={text}")
    return ",".join(parts)


def _checked(place: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{place} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
        return value
    wants_path = kind is Path or Path in get_args(kind)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not (str if wants_path else kind):
        word = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")
        raise ConfigError(f"{place} must be {word}, got {value!r}")
    return Path(value) if wants_path else value


def check_host(address: str) -> None:
    """Raise ConfigError if this PC knows no host of the name in `address`; a silent name service is no reason."""
    host, _ = parse_address(address)
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise ConfigError(
                f"this PC knows no host named {host!r} ({address}): give the hub's address in numbers, as the broker "
                "printed it, for example tcp://192.168.1.10:5555"
            ) from error
