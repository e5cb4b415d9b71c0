"""Make one file of the parts of a model that several masters have written: `zmqtrain merge FOLDER...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zmqtrain.broker.checkpoint import merge_parts
from zmqtrain.cli.display import log_to_stderr
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.fields import Verbose
from zmqtrain.cli.settings import read_config
from zmqtrain.core.errors import ConfigError

PROGRAM = "zmqtrain merge"


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
