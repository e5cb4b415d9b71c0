"""Tell a standby to take over its run: `zmqtrain promote HUB`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.cli.display import log_to_stderr
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.fields import File, Hub, require
from zmqtrain.cli.settings import check_host, read_config
from zmqtrain.node.connect import promote
from zmqtrain.transport.address import parse_address

PROGRAM = "zmqtrain promote"


@dataclass(frozen=True, kw_only=True)
class PromoteConfig:
    """Tell the standby at HUB to take over its run now, whether or not the broker that it follows is there.

    For maintenance, and where too few nodes are left to say that the broker is gone. The broker that was followed steps
    down as soon as it hears of it; what it has accepted and not sent to the standby is offered again by the nodes.

    Only an operator is obeyed: with the hub's own keys, or, where the brokers have none (--insecure), on the standby's
    own PC.
    """

    hub: Hub
    """The standby's address, for example tcp://192.168.1.11:5555."""
    keys: File = None
    """The hub's own pair, where the brokers have keys: hub.key_secret, from their keys folder; not given: that in
    ~/.config/zmqtrain/keys, if it is there."""
    server_key: str = ""
    """The brokers' public key (40 characters), or the file that holds it (NAME.key); empty: as the pair of --keys
    says."""
    wait_seconds: float = 10.0
    """How long to wait for the takeover."""

    def __post_init__(self) -> None:
        parse_address(self.hub)
        require("wait_seconds", self.wait_seconds, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Have a standby take over, and say what it serves then; return the exit code."""
    return run_command(PROGRAM, lambda: _run(read_config(PromoteConfig, PROGRAM, argv)))


def _run(config: PromoteConfig) -> int:
    log_to_stderr(False)
    check_host(config.hub)
    run, version, term = promote(config.hub, config.server_key, config.keys, config.wait_seconds)
    print(f"{config.hub} serves {run} now, from version {max(0, version)} on, as term {term}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
