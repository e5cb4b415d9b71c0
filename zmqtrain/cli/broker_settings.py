"""What zmqtrain-broker is told: the settings of the run, and those of its broker.

Rule: what cannot be used is a ConfigError that says what to type; what a run's settings mean is `RunSettings`' affair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from zmqtrain.cli.fields import (
    File,
    Folder,
    From,
    RunOptions,
    Verbose,
    check_beginning,
    check_checkpoints,
    check_no_checkpoint,
    require,
)
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.planning.auto import link_share
from zmqtrain.planning.rules import check_rules
from zmqtrain.transport.address import is_loopback, parse_address
from zmqtrain.transport.key_folder import default_key_folder


@dataclass(frozen=True, kw_only=True)
class BrokerConfig(RunOptions):
    """Start the broker of a run: the one program on the hub that the nodes of all PCs connect to.

    All settings of the run are given here and nowhere else; the nodes adopt them when they join. Ctrl-C saves
    the run and ends this broker alone; zmqtrain stop ends the run and its nodes too.

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
    """Save the run and its model here, and resume it from here if there is one; if not given, in
    zmqtrain-runs/RUN, a new folder for each run."""
    no_checkpoint: bool = False
    """Save nothing: the model is lost when the broker ends."""
    from_file: From = None
    """Begin a new run with the parameters of this model file (model.safetensors of another run, or of
    zmqtrain.save_model); their shapes must be those of the program."""
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
        check_beginning(self.from_file, self)
        if self.from_file is not None and self.record is not None:
            raise ConfigError("a run that begins with a file cannot be lived again: leave --record or --from out")
        check_no_checkpoint(self.checkpoint, self.no_checkpoint)
        check_checkpoints(self, self.mode == "strict")
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
        require("takeover_seconds", self.takeover_seconds, 0.5)
        self._check_follower("those of the broker that a standby follows", "that is started")

    def _check_follower(self, whose: str, where: str) -> None:
        """Check what is given to a broker that takes its settings from another."""
        if self.address:
            parse_address(self.address)
        if self.from_file is not None:
            raise ConfigError(f"with which parameters the run begins (--from) is to be said where {where}")
        require("wait_seconds", self.wait_seconds, 0)
        not_given = RunSettings(masters=self.masters)  # where there are several, nothing is auto
        names = [field.name for field in fields(RunSettings) if field.name != "masters"]
        given = [name for name in names if getattr(self, name) != getattr(not_given, name)]
        if given:
            raise ConfigError(
                f"the settings of a run are {whose}: leave {', '.join(given)} out here, or give them where {where}"
            )
