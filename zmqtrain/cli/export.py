"""Take the model out of a run: `zmqtrain export SOURCE`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zmqtrain.checkpoint.model_files import read_model, write_model
from zmqtrain.cli.display import log_to_stderr
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.exporting import model_of_folder, model_of_run
from zmqtrain.cli.fields import File, require
from zmqtrain.cli.settings import check_host, read_config
from zmqtrain.core.errors import ConfigError
from zmqtrain.transport.address import parse_addresses

PROGRAM = "zmqtrain export"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Take the model out of a run that runs, by its broker's address, or out of one that has ended, by its folder.

    The run goes on as it was. In Python, zmqtrain.load_model(FILE, like=params) puts the model into a tree.

    Example: zmqtrain export tcp://192.168.1.10:5555 --out model.safetensors
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HUB|FOLDER")]
    """The broker's address (tcp://HOST:PORT), or the folder in which a broker has saved its run."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("model.safetensors")
    """Where to write the model: safetensors, with the leaf paths as names."""
    keys: File = None
    """This PC's keys, where the hub wants them: the file that was made for it (NAME.key_secret)."""
    server_key: str = ""
    """The hub's public key (40 characters), or the file that holds it (NAME.key); empty: as the file of --keys says."""
    wait_seconds: float = 10.0
    """How long to wait for the broker's answer."""

    def __post_init__(self) -> None:
        if self.out.exists():
            raise ConfigError(f"{self.out} exists: name another file (--out), or remove it first")
        require("wait_seconds", self.wait_seconds, 0)
        if self.of_a_hub:
            parse_addresses(self.source)
        elif not Path(self.source).exists():
            raise ConfigError(
                f"there is no folder {self.source}; a broker's address is written like tcp://192.168.1.10:5555"
            )

    @property
    def of_a_hub(self) -> bool:
        """Whether the source is a broker's address."""
        return "://" in self.source


def main(argv: Sequence[str] | None = None) -> int:
    """Write the model, and say what it is; return the exit code."""
    return run_command(PROGRAM, lambda: _run(read_config(ExportConfig, PROGRAM, argv)))


def _run(config: ExportConfig) -> int:
    log_to_stderr(False)
    if config.of_a_hub:
        check_host(config.source)
        arrays, facts = model_of_run(config.source, config.server_key, config.keys, config.wait_seconds)
    else:
        place = Path(config.source)
        arrays, facts = read_model(place) if place.is_file() else model_of_folder(place)
    write_model(config.out, arrays, facts)
    print(f"{config.out}: {facts.description}; {sum(array.size for array in arrays.values()):,} values")
    return 0


if __name__ == "__main__":
    sys.exit(main())
