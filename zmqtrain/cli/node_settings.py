"""What zmqtrain-node is told: how this PC takes part in a run.

Rule: what cannot be used is a ConfigError that says what to type; what is trained, and how, the broker says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zmqtrain.cli.fields import File, Folder, Hubs, Verbose, check_checkpoints, require
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import parse_bytes
from zmqtrain.node.connect import NO_CHECKPOINT_IN_LOCKSTEP
from zmqtrain.planning.auto import link_share
from zmqtrain.synchronous.lockstep import read_exchange
from zmqtrain.train.induce import induced_from_spec
from zmqtrain.train.lockstep import Lockstep, Server
from zmqtrain.transport.address import parse_addresses


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Train on this PC as a node of the run at HUB (tcp://HOST:PORT, as the broker printed it).

    What is trained, and how, the broker says. Ctrl-C ends this node after the current step: what it has computed is
    sent first; a second Ctrl-C quits at once.
    """

    hub: Hubs
    """The broker's address, for example tcp://192.168.1.10:5555. Several with commas are tried in turn: its own and
    its standby's."""
    name: str = ""
    """What people call this node; empty: this PC's name."""
    data: str = ""
    """Where the program's data lies on this PC; empty: where the broker's program_arguments say."""
    keys: File = None
    """This PC's keys, where the hub wants them: the file that was made for it (NAME.key_secret); not given: that in
    the working folder, the home folder or ~/.config/zmqtrain/keys."""
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
    "mixture=0.1:0.02:0.8/0.3:0.05:0.2,message=0.05": each step begins late by a draw from a mixture of Gaussians
    (mean:deviation:weight, in seconds), each delta is sent late by |N(0, message)|, and overtakes none before it."""
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
        parse_addresses(self.hub)
        link_share(self.link, self.share)
        require("wait_seconds", self.wait_seconds, 0)
        require("pace_seconds", self.pace_seconds, 0)
        self._check_exchange()
        check_checkpoints(self, False)
        if self.new_run and self.checkpoint is None:
            raise ConfigError(
                "new_run is for a node with a --checkpoint folder; without one it joins whatever run there is"
            )
        if self.checkpoint is not None and self.lockstep is not None:
            raise ConfigError(NO_CHECKPOINT_IN_LOCKSTEP)
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
        require("masters", self.masters, 0)
        if self.masters and not isinstance(choice, Server):
            raise ConfigError("masters is said with --exchange server; elsewhere how many there are is the broker's")
        if self.masters and isinstance(choice, Server) and choice.masters not in (0, self.masters):
            raise ConfigError(f"--exchange {self.exchange} and --masters {self.masters} say two numbers of masters")
        if choice is not None and self.record is not None:
            raise ConfigError(
                f"what nodes exchange with --exchange {self.exchange} does not pass the broker, and cannot be recorded "
                "nor lived again: leave --record out"
            )
