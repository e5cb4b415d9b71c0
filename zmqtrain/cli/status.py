"""Show how a run stands, from outside: `zmqtrain status HUB`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.cli.display import Display, log_to_stderr, roster_headline, roster_legend, roster_table
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.fields import File, Hubs, require
from zmqtrain.cli.settings import check_host, read_config
from zmqtrain.cli.terminal import Terminal
from zmqtrain.core.errors import HubUnreachable
from zmqtrain.node.connect import connect
from zmqtrain.node.masters import MastersNode
from zmqtrain.node.node import Node
from zmqtrain.protocol.messages import MAX_SENTENCE, Roster, printable
from zmqtrain.transport.address import parse_addresses

PROGRAM = "zmqtrain status"
LOOK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Show how the run at HUB stands: who is there, at what step, with what loss. Looks on; changes nothing.

    age: steps from an offer to the aggregate that answers it. stale: how many versions the node's last delta was
    behind. up, down: the bytes it has sent and received. link: the rate of its port, as it said or as the broker saw
    it. device: what the node trains on. k, d: steps between two offers, and until their aggregate is applied. *: the
    node that scores the shared model on held-out data.
    """

    hub: Hubs
    """The broker's address, for example tcp://192.168.1.10:5555. Several with commas are tried in turn: its own and
    its standby's."""
    watch: bool = False
    """Go on showing it until Ctrl-C."""
    json: bool = False
    """One JSON object (with --watch: one a line for each report of the broker)."""
    keys: File = None
    """This PC's keys, where the hub wants them: the file that was made for it (NAME.key_secret); not given: that in
    the working folder, the home folder or ~/.config/zmqtrain/keys."""
    server_key: str = ""
    """The hub's public key (40 characters), or the file that holds it (NAME.key); empty: as the file of --keys says."""
    wait_seconds: float = 5.0
    """How long to wait for the broker's answer."""

    def __post_init__(self) -> None:
        parse_addresses(self.hub)
        require("wait_seconds", self.wait_seconds, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the roster of a run (or go on showing it); return the exit code."""
    return run_command(PROGRAM, lambda: _run(read_config(StatusConfig, PROGRAM, argv)))


def _run(config: StatusConfig) -> int:
    log_to_stderr(False)
    check_host(config.hub)
    with connect(
        config.hub,
        "status",
        config.server_key,
        config.keys,
        observer=True,
        timeout_seconds=config.wait_seconds,
    ) as node:
        roster = _first_roster(node, config.wait_seconds)
        title = f"{node.settings.program or 'custom loops'} at {node.address}"
        if config.watch:
            _watch(node, title, config.json)
        elif config.json:
            print(roster_as_json(roster))
        else:
            console, headline = Terminal(), roster_headline(roster, "\n")
            console.print(f"{title}\n{headline}")
            if plan := roster.hub.get("plan"):
                outer = printable(str(roster.hub["outer"]))
                console.print(f"chosen for {printable(str(plan), MAX_SENTENCE)}, outer optimizer {outer}")
            for shard, address in enumerate(roster.masters):
                if shard:
                    where = address or "no address: its master is not here"
                    console.print(f"shard {shard} is at {where}")
            if roster.members:
                console.print(roster_table(roster))
                console.print(f"\n{roster_legend(roster)}", style="dim")
    return 0


def _first_roster(node: Node | MastersNode, wait_seconds: float) -> Roster:
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


def _watch(node: Node | MastersNode, title: str, as_json: bool) -> None:
    if not as_json:
        with Display(lambda: node.roster, title):
            _wait_for_ever(node)
    shown = None
    while True:
        if (roster := node.roster) is not None and roster is not shown:
            shown = roster
            print(roster_as_json(roster), flush=True)
        time.sleep(LOOK_SECONDS)


def _wait_for_ever(node: Node | MastersNode) -> None:
    while True:
        node.peek()  # raises if the broker has sent us away
        time.sleep(1.0)


def roster_as_json(roster: Roster) -> str:
    """Return a roster as one line of JSON; what is not known (NaN) is null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {key: clean(entry) for key, entry in value.items()}
        return [clean(entry) for entry in value] if isinstance(value, list | tuple) else value

    return json.dumps(clean(asdict(roster)), allow_nan=False)


if __name__ == "__main__":
    sys.exit(main())
