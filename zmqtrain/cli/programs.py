"""The programs that nodes can train, and their arguments: `zmqtrain programs`."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Annotated

import tyro

from zmqtrain.cli.display import visible
from zmqtrain.cli.settings import command
from zmqtrain.core.errors import ConfigError
from zmqtrain.programs import ENTRY_POINT_GROUP, program_names, program_source

PROGRAM = "zmqtrain programs"
WIDTH = 79


@dataclass(frozen=True, kw_only=True)
class ProgramsConfig:
    """List the programs that are installed here, with the arguments of each and their defaults; or say all of one.

    Arguments are given to the broker: zmqtrain-broker --program text --program-arguments width=128,layers=4

    Example: zmqtrain programs text
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ""
    """One of them, to read what its arguments mean; empty: all."""


def _run(config: ProgramsConfig) -> int:
    names = program_names()
    if config.name and config.name not in names:
        raise ConfigError(
            f"there is no program {config.name!r} here; the choices are {', '.join(names)}. An installed package adds "
            f"its own by an entry point in the group {ENTRY_POINT_GROUP}"
        )
    shown = [config.name] if config.name else names
    print(visible("\n\n".join(describe_one(name, bool(config.name)) for name in shown)))
    return 0


def describe_one(name: str, whole: bool) -> str:
    """Return what a program is and which arguments it takes. whole: with all that its source says of them."""
    if (source := program_source(name)) is None:
        return f"{name}: its arguments are not known before it is imported; see the package that brings it"
    said = inspect.cleandoc(source.documentation)
    summary = said.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].partition(";")[0].rstrip(".")
    arguments = [
        one.name if one.default is one.empty else f"{one.name}={one.default}"
        for one in source.signature.parameters.values()
        if one.kind is not one.VAR_KEYWORD
    ]
    listed = textwrap.fill(
        ", ".join(arguments) or "no arguments",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    text = textwrap.fill(f"{name}: {summary}", WIDTH, subsequent_indent="  ") if summary else f"{name}:"
    rest = said.partition("\n\n")[2].replace("\n", " ")
    more = [textwrap.fill(rest, WIDTH, initial_indent="  ", subsequent_indent="  ")] if whole and rest else []
    return "\n".join([text, listed, *more])


main = command(ProgramsConfig, PROGRAM, _run)
