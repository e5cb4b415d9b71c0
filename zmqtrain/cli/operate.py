"""Commands of the run's operator: `zmqtrain status`, `stop`, `promote` and `keys`.

Rule: a secret key goes from a file to a file, never to the terminal.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table

from zmqtrain.cli import no_command
from zmqtrain.cli.display import (
    Display,
    RosterTable,
    Terminal,
    full_disk,
    log_to_stderr,
    roster_headline,
    roster_legend,
)
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.settings import File, Folder, Hub, HubOptions, Hubs, check_host, command, read_config
from zmqtrain.core.errors import ConfigError, HubUnreachable
from zmqtrain.core.installed import command_word
from zmqtrain.node.connect import connect, promote, stop
from zmqtrain.node.node import Node
from zmqtrain.node.shards import ShardedNode
from zmqtrain.protocol.members import name_missing
from zmqtrain.protocol.messages import MAX_SENTENCE, Roster, fields_of, printable
from zmqtrain.transport.address import parse_address, parse_addresses, split_key
from zmqtrain.transport.key_folder import EVERY_PC, HUB, KeyFolder, default_key_folder

LOOK_SECONDS = 0.05
NOT_WELL = 1
"""The exit code of `status --check` where the broker answers and something is wrong."""
KEYS = "zmqtrain keys"
KEYS_USAGE = """usage: zmqtrain keys COMMAND [OPTIONS]
       zmqtrain keys COMMAND --help says more

  new NAME...    make a key for each of these PCs, and authorise it
  list           show the authorised keys, and the revoked ones
  revoke NAME    shut this key out, of a running broker within seconds too"""

# ---------------------------------------------------------------------- status


@dataclass(frozen=True, kw_only=True)
class StatusConfig(HubOptions):
    """Show how the run at HUB stands: its nodes, their steps and losses. Looks on; changes nothing.

    age: steps from an offer to the aggregate that answers it. stale: how many versions the node's last delta was
    behind. up, down: the bytes it has sent and received. link: the rate of its port, as it said or as the broker
    measured it. device: what the node trains on. k, d: steps between two offers, and until their aggregate is applied.
    *: the node that scores the shared model on held-out data.

    With --check the exit code is the answer, and one line says why. 0: all is well. 1: the broker answers, and
    something is wrong (its disk is full, a broker of several is missing, the node of --node is not there), or the run
    ends. 2: no broker answers, or it does not let this PC in.
    """

    hub: Hubs
    """The broker's address, for example tcp://192.168.1.10:5555. Several with commas are tried in turn: its own and
    its standby's."""
    watch: bool = False
    """Go on showing it until Ctrl-C."""
    json: bool = False
    """One JSON object (with --watch: one a line for each report of the broker)."""
    check: bool = False
    """Only say whether all is well, by one line and the exit code: for probes and scripts."""
    node: str = ""
    """With --check: a node of this name must take part in the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_addresses(self.hub)
        if self.check and (self.watch or self.json):
            raise ConfigError("--check says one line and ends: leave --watch and --json out")
        if self.node and not self.check:
            raise ConfigError("--node is for --check: without it the table has all nodes")


def _show_status(config: StatusConfig) -> int:
    log_to_stderr(False)
    check_host(config.hub)
    with connect(
        config.hub, "status", config.server_key, config.keys, observer=True, timeout_seconds=config.wait_seconds
    ) as node:
        roster = _first_roster(node, config.wait_seconds)
        title = f"{node.settings.program or 'custom loops'} at {node.address}"
        if config.check:
            return _check(roster, node.run, config.node)
        if config.watch:
            _watch(node, title, config.json)
        elif config.json:
            print(roster_as_json(roster))
        else:
            _print_roster(roster, title)
    return 0


status_main = command(StatusConfig, "zmqtrain status", _show_status)


def _check(roster: Roster, run: str, name: str) -> int:
    """Print whether all is well with a run; return the exit code of --check."""
    if wrong := faults(roster, name):
        print(f"{run}: {'; '.join(wrong)}")
        return NOT_WELL
    print(f"{run}: ok, {roster_headline(roster).partition(' · ')[2]}")
    return 0


def faults(roster: Roster, name: str = "") -> list[str]:
    """Return what somebody should look at, in words; nothing if all is well.

    name: of a node that must take part, "" for none.
    """
    hub, missing, ends = roster.hub, name_missing(roster.shards), 0 < roster.units_total <= roster.units_done
    found = ["the run is over, or ends"] if ends or hub.get("ending") else []
    if full := full_disk(roster):
        found.append(full)
    if missing:
        found.append(f"without {missing}")
    if name:
        states = [str(member.get("state")) for member in roster.members if member.get("name") == name]
        if not states:
            found.append(f"no node is named {printable(name)}")
        elif "quarantined" in states:
            found.append(f"{printable(name)} is quarantined")
    return found


def _print_roster(roster: Roster, title: str) -> None:
    console, headline = Terminal(), roster_headline(roster, "\n")
    console.print(f"{title}\n{headline}")
    if plan := roster.hub.get("plan"):
        outer = printable(str(roster.hub["outer"]))
        console.print(f"chosen for {printable(str(plan), MAX_SENTENCE)}, outer optimizer {outer}")
    for shard, address in enumerate(roster.shards):
        if shard:
            console.print(f"shard {shard} is at {split_key(address)[0] or 'no address: its broker is not here'}")
    if roster.members:
        console.print(RosterTable(roster))
        console.print(f"\n{roster_legend(roster)}", style="dim")


def _first_roster(node: Node | ShardedNode, wait_seconds: float) -> Roster:
    until = time.monotonic() + wait_seconds
    while (roster := node.roster) is None:
        if time.monotonic() >= until:
            raise HubUnreachable(
                f"the broker at {node.address} answers, but does not say how its run stands (waited {wait_seconds:g} "
                "s); look at its own terminal, and try again with a longer --wait-seconds",
                node.address,
            )
        time.sleep(LOOK_SECONDS)
    return roster


def _watch(node: Node | ShardedNode, title: str, as_json: bool) -> None:
    if not as_json:
        with Display(node, title):
            while True:
                node.peek()  # raises if the broker has sent us away
                time.sleep(1.0)
    shown = None
    while True:
        if (roster := node.roster) is not None and roster is not shown:
            shown = roster
            print(roster_as_json(roster), flush=True)
        time.sleep(LOOK_SECONDS)


def roster_as_json(roster: Roster) -> str:
    """Return a roster as one line of JSON; unknown figures (NaN, infinity) are null."""
    return json.dumps(json.loads(json.dumps(fields_of(roster)), parse_constant=lambda name: None))


# ---------------------------------------------------------------------- stop and promote


@dataclass(frozen=True, kw_only=True)
class OperatorOptions(HubOptions):
    """How an operator shows a broker who asks."""

    hub: Hub
    """The address of the broker (for promote: of the standby), for example tcp://127.0.0.1:5555."""
    keys: File = None
    """The hub's own pair, where the hub has keys: hub.key_secret, from its keys folder; not given: that in
    ~/.config/zmqtrain/keys, if it is there."""
    server_key: str = ""
    """The hub's public key (40 characters), or the file that holds it (NAME.key); empty: as the pair of --keys says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_address(self.hub)


@dataclass(frozen=True, kw_only=True)
class StopConfig(OperatorOptions):
    """End the run at HUB: every node finishes its step, sends what it has computed and ends; the broker saves the run
    and its model, and ends.

    A standby and other brokers end too. A node that has no connection at that moment trains on alone: end it with
    Ctrl-C.  (Ctrl-C at the broker ends the broker alone; its nodes train on, and wait for it to be started again.)

    Only an operator is obeyed: with the hub's own keys, or, where the hub has none (--insecure, or on the loopback), on
    the hub's own PC.
    """

    wait_seconds: float = 120.0
    """How long to wait for the end."""


@dataclass(frozen=True, kw_only=True)
class PromoteConfig(OperatorOptions):
    """Tell the standby at HUB to take over its run now, whether or not the broker that it follows is there.

    For maintenance, and where too few nodes are left to say that the broker is gone. The broker that was followed steps
    down as soon as it hears of it; what it has accepted and not sent to the standby is offered again by the nodes.

    Only an operator is obeyed: with the hub's own keys, or, where the brokers have none (--insecure), on the standby's
    own PC.
    """

    wait_seconds: float = 10.0
    """How long to wait for the takeover."""


def _stop(config: StopConfig) -> int:
    log_to_stderr(False)
    check_host(config.hub)

    def say(node: Node) -> None:
        text = f"asking {node.run} to end: every node then finishes its step and sends what it has computed"
        print(text, flush=True)

    run, version = stop(config.hub, config.server_key, config.keys, wait_seconds=config.wait_seconds, welcomed=say)
    trained = "; its broker saves it and says where the model is" if version >= 0 else " untrained"
    print(f"{run} has ended{trained}")
    return 0


stop_main = command(StopConfig, "zmqtrain stop", _stop)


def _promote(config: PromoteConfig) -> int:
    log_to_stderr(False)
    check_host(config.hub)
    run, version, term = promote(config.hub, config.server_key, config.keys, config.wait_seconds)
    print(f"{config.hub} serves {run} now, from version {max(0, version)} on, as term {term}")
    return 0


promote_main = command(PromoteConfig, "zmqtrain promote", _promote)


# ---------------------------------------------------------------------- keys


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Which folder of keys."""

    folder: Folder = None
    """The hub's folder of keys; ~/.config/zmqtrain/keys if not given."""

    @property
    def key_folder(self) -> KeyFolder:
        return KeyFolder(self.folder or default_key_folder())


@dataclass(frozen=True, kw_only=True)
class NewConfig(KeyOptions):
    """Make a key for each of these PCs, and authorise it; the hub's own is made with the first. A broker that runs
    lets them in within seconds.

    Each PC needs one file, which holds its pair and the hub's public key. Several PCs may share one: then nothing tells
    them apart, and revoking it shuts all of them out.

    Example: zmqtrain keys new pc1 pc2 pc3
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")]
    """What the keys are called: as the PCs, say; "hub" for the hub's own alone."""


@dataclass(frozen=True, kw_only=True)
class ListConfig(KeyOptions):
    """Show the keys of this hub: their names, digits of the public keys to compare, and when they were made."""


@dataclass(frozen=True, kw_only=True)
class RevokeConfig(KeyOptions):
    """Shut a key out. Within a second a running broker refuses messages with that key, tells the node, and ends its
    connections; other nodes are not affected.

    Example: zmqtrain keys revoke pc3
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """What the key is called."""


def keys_main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[], int]] = {
        "new": lambda: _new(read_config(NewConfig, f"{KEYS} new", arguments[1:])),
        "list": lambda: _list(read_config(ListConfig, f"{KEYS} list", arguments[1:])),
        "revoke": lambda: _revoke(read_config(RevokeConfig, f"{KEYS} revoke", arguments[1:])),
    }
    if (code := no_command(KEYS, arguments, commands, KEYS_USAGE)) is not None:
        return code
    log_to_stderr(False)
    return run_command(KEYS, commands[arguments[0]])


def _new(config: NewConfig) -> int:
    if not config.names:
        raise ConfigError("keys new needs a name for each PC, as in: zmqtrain keys new pc1 pc2 pc3")
    folder = config.key_folder
    if config.names == (HUB,):
        folder.hub()
        print(f"the hub's keys are in {folder.path}; its broker finds them there")
        return 0
    files = folder.new(config.names)
    print(f"{', '.join(config.names)} may come in; a broker that runs sees it within seconds.")
    print("Copy its file to each PC, and keep it secret (here it can then be deleted):")
    for name, path in zip(config.names, files, strict=True):
        print(f"    scp {shlex.quote(str(path))} {name}:")
    file = files[0].name if len(files) == 1 else "NAME.key_secret"
    print(f"and type on each:  {command_word('zmqtrain-node')} tcp://HUB:5555 --keys ~/{file}")
    return 0


def _list(config: ListConfig) -> int:
    folder = config.key_folder
    entries = folder.entries()
    if not entries:
        print(f"there are no keys in {folder.path}; zmqtrain keys new NAME makes one")
        return 0
    table = Table("name", "public key", "made", "", box=None, pad_edge=False)
    for entry in entries:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
        table.add_row(entry.name, entry.fingerprint, made, "the hub's own" if entry.state == "hub" else entry.state)
    Terminal().print(table)
    return 0


def _revoke(config: RevokeConfig) -> int:
    kept = config.key_folder.revoke(config.name)
    print(f"{config.name} is shut out, of a running broker within seconds; its public key is kept as {kept}")
    if any((entry.name, entry.state) == (EVERY_PC, "authorised") for entry in config.key_folder.entries()):
        print(f"A PC that also has {EVERY_PC}.key_secret still comes in. Once each PC has a key of its own, type:")
        print(f"    {command_word('zmqtrain')} keys revoke {EVERY_PC}")
    return 0
