"""The mistakes that people make, each with how it is made, what they see, what it means and what to do.

`docs/mistakes.md` is made of this table: python tests/integration/mistakes.py > docs/mistakes.md
`test_mistakes.py` makes every one of them, and holds the page to the table.
"""

# ruff: noqa: E501
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zmqtrain as zt
from zmqtrain.checkpoint.files import write_arrays
from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.core.settings import RunSettings
from zmqtrain.planning.rules import canonical
from zmqtrain.transport.key_folder import KeyFolder
from zmqtrain.transport.zmq_keys import CurveKeys


@dataclass(frozen=True)
class Place:
    """Where mistakes are made. folder: an empty one, the working folder of the command.  open: the address of a broker
    of custom loops that asks for no keys, whose run has begun; fresh: one whose run has not; text: of one whose program
    nobody has here; real: of one whose program is there; keyed: of one that asks for keys, kept in `keys`; closed: where
    nobody listens; other: where another program does."""

    folder: Path
    open: str
    fresh: str
    text: str
    real: str
    keyed: str
    keys: KeyFolder
    closed: str
    other: str

    def file(self, name: str, content: str = "") -> Path:
        """Make a file; return it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def key(self, name: str) -> Path:
        """Return the file of a key that the keyed hub knows."""
        return self.keys.secret_of(name)

    def strange_key(self) -> Path:
        """Return the file of a key for the keyed hub that it does not know."""
        path = self.folder / "strange.key_secret"
        CurveKeys.generate(self.keys.hub(make=False).public).save_secret(path)
        return path

    def other_hubs_key(self) -> Path:
        """Return the file of a key for another hub."""
        return KeyFolder(self.folder / "other-keys").new(["pc1"])[0]

    def half_a_key(self) -> Path:
        """Return the file of a pair that does not say for which hub it is."""
        path = self.folder / "half.key_secret"
        CurveKeys.generate().save_secret(path)
        return path

    def nodes_checkpoints(self) -> Path:
        """Return a folder with a checkpoint of a node."""
        return self._checkpoint({"format": "zmqtrain node 1", "node": {"peer": "pc1#1"}})

    def brokers_checkpoints(self, **settings: Any) -> Path:
        """Return a folder with a checkpoint of a broker."""
        kept = canonical(RunSettings(**settings)).to_dict()
        return self._checkpoint({"run": "run-1", "version": 3, "settings": kept, "contributions": 3})

    def _checkpoint(self, state: dict[str, Any]) -> Path:
        folder = self.folder / "checkpoints"
        folder.mkdir()
        arrays = {"w": np.zeros(3, np.float32)}
        write_arrays(folder / "checkpoint-000000000003.safetensors", arrays, {"state": json.dumps(state)})
        return folder

    @contextmanager
    def folder_in_use(self) -> Iterator[Path]:
        """Give a folder of checkpoints that another program has."""
        folder = CheckpointFolder(self.folder / "in-use")
        folder.lock()
        try:
            yield folder.folder
        finally:
            folder.close()


Make = Callable[[Place], list[str]]


@dataclass(frozen=True)
class Mistake:
    """One mistake. typed: as a person does it.  words: that are seen.  means: what it means, and what to do.

    command: the arguments of `zmqtrain` that make it; or call: what makes it in Python.  code: the exit code.
    """

    typed: str
    words: tuple[str, ...]
    means: str
    command: Make | None = None
    call: Callable[[Place], object] | None = None
    code: int = 2


def _params(**more: Any) -> dict[str, Any]:
    return {"w": np.zeros((2, 3), np.float32)} | more


def _sync(address: str, params: Any, after: Callable[[Any], object] = lambda sync: None) -> None:
    with zt.connect(address, "pc2") as node:
        after(zt.DelayedSync(node, params))


def _connect(address: Any, **options: Any) -> None:
    zt.connect(address, timeout_seconds=0.2, **options).close()


def relu(x: Any) -> Any:
    """Stand for a function in a model."""
    return x


def _broker(*arguments: str) -> Make:
    return lambda place: ["broker", "--bind", "tcp://127.0.0.1:0", *arguments]


def _typed(*arguments: str) -> Make:
    return lambda place: list(arguments)


def _config(content: str) -> Make:
    return lambda place: [*_broker("--config", str(place.file("run.toml", content)))(place)]


SERVICE = 78
"""A broker or a node whose start would fail in the same way again."""
OTHER_MODEL = {"w": np.zeros((4, 3), np.float32)}

MISTAKES: dict[str, list[Mistake]] = {
    "Typing": [
        Mistake(
            "`zmqtrain statsu`",
            ("there is no command 'statsu'; did you mean status?",),
            "A slip of the keyboard; `zmqtrain` alone lists the commands",
            _typed("statsu"),
        ),
        Mistake(
            "`zmqtrain`",
            ("usage: zmqtrain COMMAND", "doctor"),
            "The list of commands; `zmqtrain COMMAND --help` says more",
            _typed(),
        ),
        Mistake(
            "`zmqtrain keys lst`",
            ("there is no command 'lst'; did you mean list?",),
            "The same, of `zmqtrain keys`",
            _typed("keys", "lst"),
        ),
        Mistake(
            "`zmqtrain-broker --progam text`",
            ("Unrecognized options: --progam", "Perhaps you meant:", "--program"),
            "An option that there is not; the nearest one is shown",
            _typed("broker", "--progam", "text"),
            code=SERVICE,
        ),
        Mistake(
            "`zmqtrain status`",
            ("Missing from zmqtrain status: HUB",),
            "The hub's address is needed, as the broker printed it",
            _typed("status"),
        ),
        Mistake(
            "`zmqtrain page records` where there is no such folder",
            ("there is no folder", "the address of a broker"),
            "Name the folder of the records, or the address of a broker that runs",
            lambda place: ["page", str(place.folder / "records")],
        ),
        Mistake(
            "`zmqtrain page tcp://hub:5555 --bind 5560`",
            ("--bind is HOST:PORT", "not '5560'"),
            "Say where the page is served, as `127.0.0.1:5560`",
            lambda place: ["page", place.open, "--bind", "5560"],
        ),
        Mistake(
            "`zmqtrain-broker --every often`",
            ("Error parsing --every: every is auto, or a number of at least 1",),
            "Say `auto`, or a number of steps",
            _broker("--every", "often"),
            code=SERVICE,
        ),
        Mistake(
            "`zmqtrain local --nodes many`",
            ("Error parsing --nodes: 'many' is no whole number",),
            "Say a number",
            _typed("local", "--nodes", "many"),
        ),
        Mistake(
            "`zmqtrain local --nodes 0`",
            ("nodes must be at least 1, got 0",),
            "Say how many nodes",
            _typed("local", "--nodes", "0"),
        ),
        Mistake(
            "`zmqtrain local --nodes 2 --start-nodes 3`",
            ("start_nodes (3) is more than nodes (2): the run would never begin; say --nodes 3",),
            "The run waits for three nodes, and two are started",
            _typed("local", "--nodes", "2", "--start-nodes", "3"),
        ),
    ],
    "Addresses": [
        Mistake(
            "`zmqtrain-node hub:5555`",
            ("'hub:5555' is no address of the form tcp://HOST:PORT",),
            "`tcp://` is missing",
            _typed("node", "hub:5555"),
            code=SERVICE,
        ),
        Mistake(
            "`zmqtrain-node tcp://hub`",
            ("'tcp://hub' is no address of the form tcp://HOST:PORT",),
            "The port is missing; the broker listens at 5555 unless told otherwise",
            _typed("node", "tcp://hub"),
            code=SERVICE,
        ),
        Mistake(
            "`zmqtrain-node tcp://hub:99999`",
            ("'tcp://hub:99999' is no address of the form tcp://HOST:PORT",),
            "There is no such port",
            _typed("node", "tcp://hub:99999"),
            code=SERVICE,
        ),
        Mistake(
            "`zmqtrain-node tcp://no-such-hub.invalid:5555`",
            ("this PC knows no host named 'no-such-hub.invalid'", "give the hub's address in numbers"),
            "This PC cannot find the name; the numbers always work",
            _typed("node", "tcp://no-such-hub.invalid:5555"),
        ),
        Mistake(
            "`zmqtrain-node 'tcp://*:5555'`",
            ("says where to listen, not where to connect to: name the hub",),
            "`*` is for the broker; a node needs the hub's name or number",
            _typed("node", "tcp://*:5555", "--wait-seconds", "0.2"),
            code=SERVICE,
        ),
        Mistake(
            "A node is started, and no broker runs",
            ("no broker answers at tcp://", "Start one on the hub with `zmqtrain-broker --bind tcp://*:", "firewall"),
            "Start the broker first, or look at address, port and firewall",
            lambda place: ["node", place.closed, "--wait-seconds", "0.2"],
        ),
        Mistake(
            "`zmqtrain status` at a web server's port",
            ("cannot come in at tcp://", "it wants keys", "or it is no zmqtrain-broker"),
            "Another program has that port: correct the port",
            lambda place: ["status", place.other, "--wait-seconds", "20"],
        ),
        Mistake(
            "`zmqtrain page`, and no broker runs",
            ("no broker answers", "tcp://"),
            "Start the broker first; a page that runs finds a broker again by itself",
            lambda place: ["page", place.closed, "--wait-seconds", "0.2"],
        ),
        Mistake(
            "`zmqtrain doctor`, and no broker runs",
            ("is there, but nothing listens on port", "start the broker on it"),
            "The PC is found; the broker is missing",
            lambda place: ["doctor", place.closed],
            code=1,
        ),
        Mistake(
            "`zmqtrain doctor` at a web server's port",
            ("is no broker (it does not speak ZeroMQ)", "see who has it there: ss -ltnp"),
            "Correct the port, or free it",
            lambda place: ["doctor", place.other],
            code=1,
        ),
        Mistake(
            "`zmqtrain-broker --bind hub:5555`",
            ("'hub:5555' is no address of the form tcp://HOST:PORT, for example tcp://*:5555",),
            "`tcp://` is missing",
            _typed("broker", "--bind", "hub:5555"),
            code=SERVICE,
        ),
        Mistake(
            "`zmqtrain-broker --bind tcp://203.0.113.1:5555`",
            ("203.0.113.1 is no address of this machine: tcp://*:5555 listens at all addresses that it has",),
            "A broker listens at its own addresses; `tcp://*:5555` is all of them",
            _typed("broker", "--insecure", "--bind", "tcp://203.0.113.1:5555"),
        ),
        Mistake(
            "A second broker is started at one port",
            ("somebody already listens at tcp://", "Stop it, or choose another port: --bind tcp://"),
            "The first one still runs, or another program has the port",
            lambda place: ["broker", "--bind", place.open],
        ),
    ],
    "Keys": [
        Mistake(
            "`zmqtrain status` without a key, at a hub with keys",
            (
                "wants keys",
                "(--keys FILE",
                "No key file was found here (looked for",
            ),
            "Copy the key file to this PC, into one of the folders that are named, or say `--keys FILE`",
            lambda place: ["status", place.keyed],
        ),
        Mistake(
            "A node with a key that was revoked, or never authorised",
            ("the hub does not authorise this PC's key", "`zmqtrain keys new NAME` makes one"),
            "On the hub: `zmqtrain keys list`, then `zmqtrain keys new`. The node ends after three seconds, with 78",
            lambda place: ["node", place.keyed, "--keys", str(place.strange_key())],
            code=SERVICE,
        ),
        Mistake(
            "A node with the key file of another hub",
            ("ended the connection while keys were exchanged", "is of another hub"),
            "Copy the file that this hub made",
            lambda place: ["node", place.keyed, "--keys", str(place.other_hubs_key())],
        ),
        Mistake(
            "`zmqtrain doctor` without a key",
            ("wants keys", "(--keys FILE"),
            "Name this PC's key file",
            lambda place: ["doctor", place.keyed, "--wait-seconds", "1"],
            code=1,
        ),
        Mistake(
            "A key file at a broker without keys",
            ("or that broker asks for no keys (then leave the file out)",),
            "Leave `--keys` out, or start the broker with keys",
            lambda place: ["status", place.open, "--keys", str(place.other_hubs_key())],
        ),
        Mistake(
            "`--keys lab.key_secret`, and the file is not there",
            (
                "there is no file lab.key_secret: it is made on the hub, whose broker prints the line that copies it (zmqtrain keys new makes another)",
            ),
            "Copy it with `scp`, or name its folder too",
            lambda place: ["node", place.keyed, "--keys", "lab.key_secret"],
            code=SERVICE,
        ),
        Mistake(
            "`--keys lab.key`",
            ("holds a public key only; the file of a pair is named NAME.key_secret",),
            "Name the file that ends in `.key_secret`",
            lambda place: ["node", place.keyed, "--keys", str(place.keys.authorised_folder / "lab.key")],
            code=SERVICE,
        ),
        Mistake(
            "`--keys` names some other file",
            ("there is no key in", "zmqtrain keys new makes on the hub"),
            "That file is no key",
            lambda place: ["node", place.keyed, "--keys", str(place.file("my.key_secret", "abc"))],
            code=SERVICE,
        ),
        Mistake(
            "A key file that was made without its hub",
            ("does not say for which hub it is: give that hub's public key too (--server-key",),
            "Give `--server-key hub.key` as well",
            lambda place: ["node", place.keyed, "--keys", str(place.half_a_key())],
            code=SERVICE,
        ),
        Mistake(
            "`--server-key short`",
            ("server_key is a key of 40 characters", "'short' is neither"),
            "Name the hub's file `hub.key`",
            lambda place: ["node", place.keyed, "--server-key", "short"],
            code=SERVICE,
        ),
        Mistake(
            "`zmqtrain keys new lab`, a second time",
            ("there is a key of the name lab", "revoke it first (zmqtrain keys revoke lab), or choose another name"),
            "A key is never overwritten",
            lambda place: ["keys", "new", "lab", "--folder", str(place.keys.path)],
        ),
        Mistake(
            "`zmqtrain keys new ../lab`",
            ("cannot be the name of a node's key: letters, digits, and . _ -",),
            "A key's name is a PC's name, not a path",
            lambda place: ["keys", "new", "../lab", "--folder", str(place.folder)],
        ),
        Mistake(
            "`zmqtrain keys new`",
            ("needs a name for each PC, as in: zmqtrain keys new pc1 pc2 pc3",),
            "Name the PCs",
            _typed("keys", "new"),
        ),
        Mistake(
            "`zmqtrain keys revoke pc9`",
            ("no key of the name 'pc9' is authorised in", "lab is"),
            "There is no key of that name; those that there are are named",
            lambda place: ["keys", "revoke", "pc9", "--folder", str(place.keys.path)],
        ),
        Mistake(
            "Another broker with keys of its own",
            ("All brokers have a copy of the first one's folder of keys (--keys)",),
            "Copy the first broker's folder of keys to the others",
            lambda place: [
                "broker",
                "--bind",
                "tcp://*:0",
                "--keys",
                str(place.other_hubs_key().parents[1]),
                "--shard",
                "1/2",
                "--first",
                place.keyed,
            ],
        ),
        Mistake(
            "`zt.Communicator.create(hub, 2)` without a key",
            ("cannot come in at tcp://", "wants keys", "(--keys FILE"),
            "Give `keys=`, the file that was made for this PC",
            call=lambda place: zt.Communicator.create(place.keyed, 2),
        ),
        Mistake(
            "`zt.ParameterClient.connect(hub)` without a key",
            ("cannot come in at tcp://", "wants keys", "(--keys FILE"),
            "Give `keys=`, the file that was made for this PC",
            call=lambda place: zt.ParameterClient.connect(place.keyed),
        ),
        Mistake(
            "`zmqtrain-broker --keys FOLDER --insecure`",
            ("--insecure says that there are no keys, and --keys names their folder: leave one out",),
            "Leave `--insecure` out",
            _typed("broker", "--keys", "k", "--insecure"),
            code=SERVICE,
        ),
        Mistake(
            "A standby with keys of its own",
            ("A standby has a copy of its broker's folder of keys (--keys)",),
            "Copy the first broker's folder of keys to the standby",
            lambda place: [
                "broker",
                "--bind",
                "tcp://*:0",
                "--keys",
                str(place.other_hubs_key().parents[1]),
                "--standby",
                place.keyed,
            ],
        ),
    ],
    "The broker's settings": [
        Mistake(
            "`--program txt`",
            ("there is no such program; did you mean 'text'?", "(zmqtrain programs)"),
            "`zmqtrain programs` lists them",
            _broker("--program", "txt"),
            code=SERVICE,
        ),
        Mistake(
            "`--program text --program-arguments widht=8`",
            ("the program 'text' has no such argument (did you mean width?); it takes data=stdlib, width=64",),
            "`zmqtrain programs text` says what there is",
            _broker("--program", "text", "--program-arguments", "widht=8"),
            code=SERVICE,
        ),
        Mistake(
            "`--program text --program-arguments width=wide`",
            ("program_arguments.width must be a whole number, got 'wide'",),
            "Give a number",
            _broker("--program", "text", "--program-arguments", "width=wide"),
            code=SERVICE,
        ),
        Mistake(
            "`--program text --program-arguments width=30`",
            ("program_arguments.width must be a multiple of twice the heads (2 x 4",),
            "Such a model cannot be made: give a width of 32, say",
            _broker("--program", "text", "--program-arguments", "width=30"),
            code=SERVICE,
        ),
        Mistake(
            "`--program text --program-arguments width`",
            ("'width' is no argument; write name=value, as in width=128,layers=2",),
            "The value is missing",
            _broker("--program", "text", "--program-arguments", "width"),
            code=SERVICE,
        ),
        Mistake(
            "`--program-arguments width=8` alone",
            ("program_arguments are given, but no program: say which one, as in --program text",),
            "Without `--program` nodes bring their own loops",
            _broker("--program-arguments", "width=8"),
            code=SERVICE,
        ),
        Mistake(
            "`--codec tenary`",
            ("codec = 'tenary': there is no 'tenary' (did you mean ternary?); a codec is one of float32",),
            "The codecs are listed; [codecs.md](codecs.md) says which to take, `auto` takes one",
            _broker("--codec", "tenary"),
            code=SERVICE,
        ),
        Mistake(
            "`--release quorom:3`",
            ("release = 'quorom:3': there is no 'quorom' (did you mean quorum?); choose one of all, quorum",),
            "The rules are listed, with their arguments",
            _broker("--release", "quorom:3"),
            code=SERVICE,
        ),
        Mistake(
            "`--every 0`",
            ("every is auto, or a number of at least 1",),
            "A node exchanges every so many steps: 1 at least",
            _broker("--every", "0"),
            code=SERVICE,
        ),
        Mistake(
            "`--units -5`",
            ("units must be at least 0, got -5",),
            "0 units: the run has no end of its own",
            _broker("--units", "-5"),
            code=SERVICE,
        ),
        Mistake(
            "`--config run.toml`, and the file is not there",
            ("the file run.toml (--config) cannot be read: No such file or directory",),
            "Name the file with its folder",
            _broker("--config", "run.toml"),
            code=SERVICE,
        ),
        Mistake(
            "`evry = 8` in that file",
            ("there is no setting 'evry'; did you mean every?",),
            "A slip of the keyboard",
            _config("evry = 8"),
            code=SERVICE,
        ),
        Mistake(
            "`every: 8` in that file",
            ("is no TOML", "a line is, for example: every = 16"),
            "TOML writes `every = 8`",
            _config("every: 8"),
            code=SERVICE,
        ),
        Mistake(
            '`units = "8"` in that file',
            ("units must be a whole number, got '8'",),
            "Leave the quotes out",
            _config('units = "8"'),
            code=SERVICE,
        ),
        Mistake(
            "`--checkpoint-every often`",
            ("is written like 60s, 5min or 1h, not 'often'",),
            "A time with its unit, or a count of versions",
            _broker("--checkpoint-every", "often"),
            code=SERVICE,
        ),
        Mistake(
            "`--checkpoint` names a file",
            ("it is a file, not a folder; name another folder",),
            "Name a folder; it is made if need be",
            lambda place: _broker("--checkpoint", str(place.file("run")))(place),
        ),
        Mistake(
            "A node's `--checkpoint` folder is given to the broker",
            ("holds a node's checkpoints: the broker and each node have a --checkpoint folder of their own",),
            "Give the broker another folder",
            lambda place: _broker("--checkpoint", str(place.nodes_checkpoints()))(place),
        ),
        Mistake(
            "Two brokers with one `--checkpoint` folder",
            ("is in use by the process", "End that one, or name another folder"),
            "The first one still runs",
            lambda place: _broker("--checkpoint", str(place.folder / "in-use"))(place),
        ),
        Mistake(
            "`--from model.safetensors`, and the file is not there",
            ("there is no file model.safetensors",),
            "Name the file with its folder",
            _broker("--from", "model.safetensors"),
        ),
        Mistake(
            "`--checkpoint run1 --no-checkpoint`",
            ("--no-checkpoint says that nothing is saved, and --checkpoint where: leave one out",),
            "Leave one of the two out",
            _broker("--checkpoint", "run1", "--no-checkpoint"),
            code=SERVICE,
        ),
        Mistake(
            "A run is resumed with other settings",
            ("was written under other settings: every (4 there, 8 here). Give the same settings to resume that run",),
            "Start it with the line of before, or name another folder for a new run",
            lambda place: _broker("--every", "8", "--checkpoint", str(place.brokers_checkpoints(every=4)))(place),
            code=SERVICE,
        ),
        Mistake(
            "`--shard 4/4`",
            ("of 4 shards the first is 0 and the last is 3",),
            "Shards are counted from 0",
            _broker("--shard", "4/4"),
            code=SERVICE,
        ),
        Mistake(
            "`--shard 1/4` alone",
            ("needs the address of the first broker, which has the settings: say --first tcp://HOST:PORT",),
            "Only the first has the settings; the others are told where it is",
            _broker("--shard", "1/4"),
            code=SERVICE,
        ),
        Mistake(
            "`--shard 1/2 --first HUB`, and the broker there is the only one",
            ("this broker has the whole model; start it with --shard 0/M to divide that among M brokers",),
            "A model is divided from the beginning: start the first broker with `--shard 0/2`",
            lambda place: _broker("--shard", "1/2", "--first", place.open)(place),
        ),
        Mistake(
            "`--standby HUB --program text`",
            ("the settings of a run are those of the broker that a standby follows: leave program out here",),
            "A standby takes its settings from the first broker",
            lambda place: _broker("--standby", place.open, "--program", "text")(place),
            code=SERVICE,
        ),
        Mistake(
            "`--link fast`",
            ("link is written like 1gbit, 100mbit or 12.5MB/s, not 'fast'",),
            "A rate with its unit",
            _broker("--link", "fast"),
            code=SERVICE,
        ),
        Mistake(
            "`--share 80`",
            ("share is what training may take of the link, in 0 < share <= 1, got 80",),
            "80 % is `--share 0.8`",
            _broker("--share", "80"),
            code=SERVICE,
        ),
    ],
    "Nodes": [
        Mistake(
            "`zmqtrain-node` at a run of custom loops",
            (
                "has no program: it was started for training loops of one's own (zmqtrain.connect)",
                "zmqtrain-broker --program text",
            ),
            "Start your own script on this PC; or name a program where the broker is started",
            lambda place: ["node", place.open],
            code=SERVICE,
        ),
        Mistake(
            "A node without the package of the run's program",
            (
                "and this PC cannot: program = 'protein-folding': there is no such program",
                "Install the package that brings it here, on this PC",
            ),
            "Install the package on this PC; the broker needs no change",
            lambda place: ["node", place.text],
            code=SERVICE,
        ),
        Mistake(
            "`--data /no/such/file`",
            ("/no/such/file", "--data PLACE"),
            "Say where the data lies on this PC",
            lambda place: ["node", place.real, "--data", "/no/such/file"],
        ),
        Mistake(
            "`--exchange alreduce`",
            ("exchange = 'alreduce': there is no 'alreduce'; choose one of hub, allreduce:ring",),
            "The ways are listed",
            lambda place: ["node", place.open, "--exchange", "alreduce"],
            code=SERVICE,
        ),
        Mistake(
            "`--new-run` without `--checkpoint`",
            ("new_run is for a node with a --checkpoint folder",),
            "Leave it out: a node without a folder joins any run",
            lambda place: ["node", place.open, "--new-run"],
            code=SERVICE,
        ),
        Mistake(
            "The broker's `--checkpoint` folder is given to a node",
            ("holds a broker's checkpoints: the broker and each node have a --checkpoint folder of their own",),
            "Give the node another folder",
            lambda place: ["node", place.open, "--checkpoint", str(place.brokers_checkpoints())],
        ),
        Mistake(
            "Two nodes with one `--checkpoint` folder",
            ("is in use by the process", "End that one, or name another folder"),
            "Each node has a folder of its own",
            lambda place: ["node", place.open, "--checkpoint", str(place.folder / "in-use")],
        ),
        Mistake(
            "`--card-memory big`",
            ("card_memory is written like 6GB, 512MB or 2e9, not 'big'",),
            "A size with its unit",
            lambda place: ["node", place.open, "--card-memory", "big"],
            code=SERVICE,
        ),
        Mistake(
            "`--log-file /no/such/folder/log`",
            ("cannot write the log file /no/such/folder/log: No such file or directory; name another one",),
            "Make the folder, or name another file",
            lambda place: ["node", place.open, "--log-file", "/no/such/folder/log"],
            code=SERVICE,
        ),
        Mistake(
            "`--pace-seconds -1`",
            ("pace_seconds must be at least 0, got -1",),
            "0: as fast as it can",
            lambda place: ["node", place.open, "--pace-seconds", "-1"],
            code=SERVICE,
        ),
    ],
    "Other commands": [
        Mistake(
            "`zmqtrain stop HUB` with a PC's key",
            ("with its own pair (--keys hub.key_secret, from its keys folder); a node ends itself with Ctrl-C",),
            "Only an operator ends a run: on the hub, or with `hub.key_secret`",
            lambda place: ["stop", place.keyed, "--keys", str(place.key("lab"))],
        ),
        Mistake(
            "`zmqtrain stop`",
            ("Missing from zmqtrain stop: HUB",),
            "The hub's address is needed, as the broker printed it",
            _typed("stop"),
        ),
        Mistake(
            "`zmqtrain promote`, and nothing is there",
            ("no broker answers at tcp://",),
            "Name the standby's own address",
            lambda place: ["promote", place.closed, "--wait-seconds", "0.2"],
        ),
        Mistake(
            "`zmqtrain export run1`, and there is no such folder",
            ("there is no folder run1; a broker's address is written like tcp://192.168.1.10:5555",),
            "Name the broker's `--checkpoint` folder, or its address",
            _typed("export", "run1"),
        ),
        Mistake(
            "`zmqtrain export` of a folder without a run",
            ("there is no run in", "name the --checkpoint folder of a broker, or its address"),
            "The broker said at its start where it saves",
            lambda place: ["export", str(place.keys.path)],
        ),
        Mistake(
            "`zmqtrain merge` in an empty folder",
            ("there is no part of a model in", "start that broker again on the folder, and end it"),
            "Each broker writes its part when it ends",
            lambda place: ["merge", str(place.folder)],
        ),
        Mistake(
            "`zmqtrain plan --params many ...`",
            ("params is written like 100M, 1.3B or 25000000, not 'many'",),
            "A number of parameters",
            _typed("plan", "--params", "many", "--nodes", "4", "--step-ms", "5"),
        ),
        Mistake(
            "`zmqtrain plan --nodes 4`",
            ("Missing from zmqtrain plan:", "--params"),
            "A plan needs the size of the model",
            _typed("plan", "--nodes", "4"),
        ),
        Mistake(
            "`zmqtrain plan --params 1B --nodes 4`",
            ("say how long a step of a node takes (--step-ms 180)", "(--tokens 1024)"),
            "A plan needs the time of a step, or the tokens of a micro-batch for a model that no card holds",
            _typed("plan", "--params", "1B", "--nodes", "4"),
        ),
        Mistake(
            "`zmqtrain plan --params 10B --tokens 1024 ...`",
            ("the model does not fit these 4 PCs", "more PCs like node-0 it fits"),
            "Each parameter needs 16 bytes with Adam: take more PCs, or an optimizer with less state",
            _typed("plan", "--params", "10B", "--nodes", "4", "--memory", "24GB", "--tokens", "1024"),
            code=1,
        ),
        Mistake(
            "`zmqtrain sim run.toml`, and the file is not there",
            ("the scenario run.toml cannot be read: No such file or directory",),
            "Name the file with its folder",
            _typed("sim", "run.toml"),
        ),
        Mistake(
            "`zmqtrain programs txt`",
            ("there is no program 'txt' here; the choices are text, image",),
            "Without a name it lists all",
            _typed("programs", "txt"),
        ),
        Mistake(
            "`zmqtrain status HUB --wait-seconds -1`",
            ("wait_seconds must be at least 0, got -1",),
            "Seconds to wait for the answer",
            lambda place: ["status", place.open, "--wait-seconds", "-1"],
        ),
        Mistake(
            "`zmqtrain doctor HUB --folder /no/such`",
            ("there is no folder /no/such (--folder)",),
            "Name a folder of this PC",
            lambda place: ["doctor", place.open, "--folder", "/no/such"],
        ),
    ],
    "Loops of one's own": [
        Mistake(
            "`zt.connect(5555)`",
            ("connect needs the hub's address, such as tcp://192.168.1.10:5555, not 5555",),
            "Give the address as a text",
            call=lambda place: _connect(5555),
        ),
        Mistake(
            '`zt.connect(hub, name="pc#1")`',
            ("a node's name is at most 64 printable characters without '#', got 'pc#1'",),
            "Choose another name; the PC's own is taken if you leave it out",
            call=lambda place: _connect(place.open, name="pc#1"),
        ),
        Mistake(
            '`zt.connect(hub, codec_on="gpu")`',
            ("codec_on must be one of 'auto', 'host', 'device', got 'gpu'",),
            "`device` is the GPU, where there is one",
            call=lambda place: _connect(place.open, codec_on="gpu"),
        ),
        Mistake(
            "`zt.connect(hub)`, and no broker runs",
            ("no broker answers at tcp://", "Start one on the hub"),
            "Start the broker; `timeout_seconds` says how long to wait for it",
            call=lambda place: _connect(place.closed),
        ),
        Mistake(
            "`zt.connect(hub, observer=True, checkpoint=...)`",
            ("an observer trains nothing, and has nothing to save",),
            "Leave one of the two out",
            call=lambda place: _connect(place.open, observer=True, checkpoint=place.folder),
        ),
        Mistake(
            '`zt.DelayedSync("tcp://hub:5555", params)`',
            ("DelayedSync takes the node that `connect` returns, and then the parameters: got a str first",),
            '`zt.DelayedSync(zt.connect("tcp://hub:5555"), params)`',
            call=lambda place: zt.DelayedSync(place.open, _params()),
        ),
        Mistake(
            "A random key among the parameters",
            ("the leaf key is a random key, and cannot be exchanged", "Keep it out of the tree of parameters"),
            "Keep keys beside the parameters; `state=` puts them in the checkpoints",
            call=lambda place: _sync(place.open, _params(key=jax.random.key(0))),
        ),
        Mistake(
            "A text among the parameters",
            ("the leaf activation is no array, but of type str ('relu')", "keep it out of the tree"),
            "Settings are no parameters",
            call=lambda place: _sync(place.open, _params(activation="relu")),
        ),
        Mistake(
            "A function among the parameters (an equinox model as it is)",
            ("the leaf activation is a function or a module (relu)", "eqx.partition(model, eqx.is_inexact_array)"),
            "Exchange the arrays alone: `eqx.partition` before, `eqx.combine` in the loss",
            call=lambda place: _sync(place.open, _params(activation=relu)),
        ),
        Mistake(
            "A counter among the parameters",
            ("the leaf count int32[] is not a float array and cannot be exchanged",),
            "Counters belong to the node",
            call=lambda place: _sync(place.open, _params(count=np.int32(0))),
        ),
        Mistake(
            "`zt.DelayedSync(node, {})`",
            ("the parameters given to DelayedSync hold no array (they are {})",),
            "The model was not made yet, or another variable is meant",
            call=lambda place: _sync(place.open, {}),
        ),
        Mistake(
            "NaN among the initial parameters",
            ("the leaf w holds NaN or infinity at the beginning: check how parameters are initialised",),
            "Look at the initialisation",
            call=lambda place: _sync(place.fresh, {"w": np.full((2, 3), np.nan, np.float32)}),
        ),
        Mistake(
            "Another model than the run's",
            (
                "the leaf w is float32[2,3] in the run and float32[4,3] on this node",
                "Start this node with the run's model, or another broker for this one",
            ),
            "All nodes train one model: the same code and settings on every PC",
            call=lambda place: _sync(place.open, OTHER_MODEL),
        ),
        Mistake(
            "A second `DelayedSync` on one node",
            ("connect another node, to a broker of its own, for the second model",),
            "One node has one; connect twice for two models, at two brokers",
            call=lambda place: _sync(place.open, _params(), lambda sync: zt.DelayedSync(sync.exchange, _params())),
        ),
        Mistake(
            "`sync.step` with a leaf of another shape",
            ("the leaf w is float32[2,3] in the run and float32[4,3] on this node",),
            "Parameters keep their shapes for the whole run",
            call=lambda place: _sync(place.open, _params(), lambda sync: sync.step(OTHER_MODEL)),
        ),
        Mistake(
            "`sync.step` with another tree",
            ("the run's model has the leaf w float32[2,3]", "the tree with which DelayedSync was made"),
            "Give the parameters, not the optimizer's state or a part of them",
            call=lambda place: _sync(place.open, _params(), lambda sync: sync.step([np.zeros((2, 3), np.float32)])),
        ),
        Mistake(
            "`sync.step(params, score=losses)` with a loss for each example",
            ("score is one number, the mean loss of the step, got an array of shape [8]: give score=losses.mean()",),
            "Give the mean",
            call=lambda place: _sync(place.open, _params(), lambda sync: sync.step(_params(), score=np.ones(8))),
        ),
        Mistake(
            "`sync.step(None)`: the step's result was not returned",
            ("the run's model has the leaf w float32[2,3], this node's has none of that name",),
            "Return the parameters from your step",
            call=lambda place: _sync(place.open, _params(), lambda sync: sync.step(None)),
        ),
        Mistake(
            "`zt.connect(hub, keys=5)`",
            ('keys is written like "lab.key_secret", a file, not 5',),
            "Give the name of the key file",
            call=lambda place: _connect(place.open, keys=5),
        ),
        Mistake(
            "`sync.step` after `sync.finish`",
            ("`step` was called after `finish`", "connect again (zmqtrain.connect) and make another DelayedSync"),
            "The node has ended: connect again to train on",
            call=lambda place: _sync(
                place.open, _params(), lambda sync: (sync.finish(_params()), sync.step(_params()))
            ),
        ),
        Mistake(
            "`zt.load_model(path)`, and the file is not there",
            ("there is no file", "model.safetensors"),
            "A broker writes `model.safetensors` to its folder when it ends",
            call=lambda place: zt.load_model(place.folder / "model.safetensors", like=_params()),
        ),
    ],
}
"""By what they are about."""

HEAD = """# Mistakes, and what is said of them

What people type or do, what they see, and what to do then. A command ends with 2; a broker or a node that would fail in the same way again ends with 78, so that a
service manager does not start it again. Every line of this page is made by a test (`tests/integration/test_mistakes.py`).
"""


def page() -> str:
    """Return docs/mistakes.md."""
    parts = [HEAD]
    for group, mistakes in MISTAKES.items():
        parts += [f"\n## {group}\n\n| you type, or do | you see | it means, and what to do |\n|---|---|---|\n"]
        for one in mistakes:
            seen = " ... ".join(f"`{words}`" if "`" not in words else f"`` {words} ``" for words in one.words)
            parts.append(f"| {one.typed} | {seen} | {one.means} |\n".replace("<", "\\<"))
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
