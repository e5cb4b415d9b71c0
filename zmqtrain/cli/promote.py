"""Tell a standby to take over its run: `zmqtrain promote HUB`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zmqtrain.cli.display import log_to_stderr
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.settings import PromoteConfig, check_host, read_config
from zmqtrain.runtime.node.connect import promote

__all__ = ["main"]

PROGRAM = "zmqtrain promote"


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
