"""The fields that several programs have: how each is typed, shown and checked.

Rule: what only one program has stands with that program.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from zmqtrain.checkpoint.folder import every_from_text
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_DELAY, AUTO_EVERY, AUTO_FRAGMENTS, RunSettings

Verbose = Annotated[bool, tyro.conf.arg(aliases=["-v"])]
Hub = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HUB")]
Hubs = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HUB[,HUB...]")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


def _number(name: str, least: int, auto: int, what: str) -> PrimitiveConstructorSpec[int]:
    """How a setting that may be auto is read from a flag: "auto", or a number. what: it counts, for --help."""

    def read(written: list[str]) -> int:
        if written[0] == "auto":
            return auto
        if not written[0].isdecimal() or int(written[0]) < least:
            raise ValueError(f"{name} is auto, or a number of at least {least}")
        return int(written[0])

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{auto,{what}}}",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: ["auto" if value == auto else str(value)],
    )


Every = Annotated[int, _number("every", 1, AUTO_EVERY, "STEPS")]
Delay = Annotated[int, _number("delay", 0, AUTO_DELAY, "STEPS")]
Fragments = Annotated[int, _number("fragments", 1, AUTO_FRAGMENTS, "FRAGMENTS")]


class KeepsCheckpoints(Protocol):
    """A program's settings that say how its checkpoints are kept."""

    @property
    def checkpoint_every(self) -> str:
        """How often to save, as typed."""

    @property
    def checkpoint_keep(self) -> int:
        """How many stay."""


From = Annotated[Path | None, tyro.conf.arg(name="from", metavar="FILE")]
"""`--from FILE`; a field cannot have that name."""
MOST = 10**9
"""The largest number of seconds, nodes or files that can be typed."""


def require(name: str, value: float, least: float, most: int = MOST) -> None:
    """Raise ConfigError unless a number is at least so much, and at most `most`."""
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least:g}, got {value}")
    if value > most:
        raise ConfigError(f"{name} must be at most {most:,}, got {value}")


def check_checkpoints(config: KeepsCheckpoints, strict: bool) -> None:
    """Raise ConfigError for what nothing can be saved by. strict: for a broker in strict mode."""
    every_from_text(config.checkpoint_every, strict)
    require("checkpoint_keep", config.checkpoint_keep, 2 if strict else 1)


def check_no_checkpoint(folder: Path | None, nothing: bool) -> None:
    """Raise ConfigError if a folder is named, and nothing is to be saved."""
    if folder is not None and nothing:
        raise ConfigError("--no-checkpoint says that nothing is saved, and --checkpoint where: leave one out")


def check_beginning(file: Path | None, settings: RunSettings) -> None:
    """Raise ConfigError where a run cannot begin with the parameters of a file."""
    if file is None:
        return
    if settings.initial in ("mean", "own"):
        raise ConfigError(
            f"--from says with which parameters the run begins, and initial {settings.initial!r} that its nodes give "
            "them: leave one out"
        )
    if settings.masters > 1:
        raise ConfigError(
            "--from is for one broker that has the whole model, not for several masters: begin the run with one broker"
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunSettings):
    """The settings of a run as they are typed."""

    every: Every = AUTO_EVERY
    """k: a node offers a delta every so many steps; auto: as often as is best for the loss on these links and machines,
    as measured."""
    delay: Delay = AUTO_DELAY
    """d: the aggregate is applied at the first step boundary that is at least so many steps after its offer; auto: when
    it has come, as measured."""
    fragments: Fragments = AUTO_FRAGMENTS
    """Each exchange carries one of so many parts of the model, in turn; auto: each carries the whole model in a few
    parts, and the aggregate of the first comes down while the others go up."""
