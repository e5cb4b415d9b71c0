"""End a run from outside: `zmqtrain stop HUB`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.cli.display import log_to_stderr
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.fields import File, Hub, require
from zmqtrain.cli.settings import check_host, read_config
from zmqtrain.node.connect import stop
from zmqtrain.node.node import Node
from zmqtrain.transport.address import parse_address

PROGRAM = "zmqtrain stop"


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """End the run at HUB: every node finishes its step, sends what it has computed and ends; the broker saves the run
    and its model, and ends.

    A standby and other masters end too. A node that has no connection at that moment trains on alone: end it with
    Ctrl-C.  (Ctrl-C at the broker ends the broker alone; its nodes train on, and wait for it to be started again.)

    Only an operator is obeyed: with the hub's own keys, or, where the hub has none (--insecure, or on the loopback), on
    the hub's own PC.
    """

    hub: Hub
    """The broker's address, for example tcp://127.0.0.1:5555."""
    keys: File = None
    """The hub's own pair, where the hub has keys: hub.key_secret, from its keys folder; not given: that in
    ~/.config/zmqtrain/keys, if it is there."""
    server_key: str = ""
    """The hub's public key (40 characters), or the file that holds it (NAME.key); empty: as the pair of --keys says."""
    wait_seconds: float = 120.0
    """How long to wait for the end."""

    def __post_init__(self) -> None:
        parse_address(self.hub)
        require("wait_seconds", self.wait_seconds, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """End a run, and say when it has ended; return the exit code."""
    return run_command(PROGRAM, lambda: _run(read_config(StopConfig, PROGRAM, argv)))


def _run(config: StopConfig) -> int:
    log_to_stderr(False)
    check_host(config.hub)

    def say(node: Node) -> None:
        print(
            f"{node.run} is asked to end: every node then finishes its step and sends what it has computed", flush=True
        )

    run, version = stop(config.hub, config.server_key, config.keys, wait_seconds=config.wait_seconds, welcomed=say)
    trained = "; its broker saves it and says where the model is" if version >= 0 else " untrained"
    print(f"{run} has ended{trained}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
