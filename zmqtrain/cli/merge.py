"""Make one file of the parts of a model that several masters have written: `zmqtrain merge FOLDER...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zmqtrain.cli.display import log_to_stderr
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.settings import MergeConfig, read_config
from zmqtrain.runtime.broker.parts import merge_parts

__all__ = ["main"]

PROGRAM = "zmqtrain merge"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the model; return the exit code."""
    return run_command(PROGRAM, lambda: _run(read_config(MergeConfig, PROGRAM, argv)))


def _run(config: MergeConfig) -> int:
    log_to_stderr(config.verbose)
    values = merge_parts(config.parts, config.out)
    print(f"{config.out}: {values:,} values of {len(config.parts)} parts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
