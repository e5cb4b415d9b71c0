"""Settings of the commands: one frozen dataclass per program, each field one key of a TOML file and one flag.

Rule 1: a flag overrides the file, the file overrides the default; nothing comes from the environment.
Rule 2: a record is checked once, in `__post_init__`; a bad value is a ConfigError that says what to type.
Rule 3: options that several programs have stand here; a program's own stand in its module.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import inspect
import io
import itertools
import re
import reprlib
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from zmqtrain.checkpoint.folder import every_from_text
from zmqtrain.checkpoint.model_files import Beginning, read_beginning
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.version import version_line
from zmqtrain.core.errors import ConfigError, NotHereYet
from zmqtrain.core.settings import (
    AUTO_DELAY,
    AUTO_EVERY,
    AUTO_FRAGMENTS,
    AUTO_PIPELINE,
    AUTO_SHARDS,
    RENAMED,
    RunSettings,
    read_steps,
    require,
)
from zmqtrain.planning.rules import check_rules
from zmqtrain.transport.address import parse_addresses, say_unknown_host, unknown_host

Config = TypeVar("Config")

NOT_IN_A_FILE = ("config",)
MOST_COLUMNS, USAGE_COLUMNS = 100, 80
"""The widest paragraph of a description, and the widest usage line."""

# ---------------------------------------------------------------------- kinds of fields

Hub = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HUB")]
Hubs = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HUB[,HUB...]")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
From = Annotated[Path | None, tyro.conf.arg(name="from", metavar="FILE")]
"""`--from FILE`; a field cannot have that name."""


def _number(name: str, least: int, auto: int, what: str) -> PrimitiveConstructorSpec[int]:
    """How a flag that is "auto" or a number is read. what: it counts, for --help."""

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
Shards = Annotated[int, _number("shards", 1, AUTO_SHARDS, "BROKERS")]
PipelinePCs = Annotated[int, _number("pipeline", 0, AUTO_PIPELINE, "PCS")]

# ---------------------------------------------------------------------- options of several programs


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """How much is logged."""

    verbose: Annotated[bool, tyro.conf.arg(aliases=["-v"])] = False
    """Log details for finding an error."""


@dataclass(frozen=True, kw_only=True)
class FileOptions(LogOptions):
    """Where other settings are read."""

    config: File = None
    """A TOML file with any of these settings as keys (checkpoint_keep = 5); flags override it."""


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """How a program of this PC comes into a hub."""

    keys: File = None
    """This PC's keys, where the hub wants them: the file that was made for it (NAME.key_secret); not given: that in
    the working folder, the home folder or ~/.config/zmqtrain/keys."""
    server_key: str = ""
    """The hub's public key (40 characters), or the file that holds it (NAME.key); empty: as the file of --keys says."""
    wait_seconds: float = 5.0
    """How long to wait for the broker's answer."""

    def __post_init__(self) -> None:
        require("wait_seconds", self.wait_seconds, 0)


@dataclass(frozen=True, kw_only=True)
class PortOptions:
    """How much of this PC's port a program may use."""

    link: str = ""
    """The rate of this PC's port, as 1gbit, 2.5gbit or 12.5MB/s; empty: as the broker measures it, or, of its own port,
    as that of a typical node."""
    share: float = 1.0
    """The share of this PC's port that training may use, each way; the rest is left to others (0.8). With 1 and no
    link, nothing is limited."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How checkpoints are kept."""

    checkpoint_every: str = ""
    """How often to save: after a time ("60s", "5min"), or a count of versions ("64"); empty: 60s, in strict mode 64."""
    checkpoint_keep: int = 3
    """How many checkpoints stay."""

    def check_checkpoints(self, strict: bool) -> None:
        """Raise ConfigError for a bad interval or count. strict: of a broker in strict mode."""
        every_from_text(self.checkpoint_every, strict)
        require("checkpoint_keep", self.checkpoint_keep, 2 if strict else 1)


@dataclass(frozen=True, kw_only=True)
class RunOptions(CheckpointOptions, FileOptions, RunSettings):
    """The settings of a run as they are typed, and where it is saved."""

    every: Every = AUTO_EVERY
    """k: a node offers a delta every so many steps; auto: as often as is best for the loss on these links and machines,
    as measured."""
    delay: Delay = AUTO_DELAY
    """d: the aggregate is applied at the first step boundary that is at least so many steps after its offer; auto: when
    it has come, as measured."""
    fragments: Fragments = AUTO_FRAGMENTS
    """Each exchange carries one of so many parts of the model, in turn; auto: each carries the whole model in a few
    parts, and the aggregate of the first comes down while the others go up."""
    shards: Shards = AUTO_SHARDS
    """The model is divided among so many brokers; auto: one, and one on each node's PC where more than four nodes begin
    together (--start-nodes), all deltas count (aggregate mean, selection all), and the model is large enough: the hub
    decides when they have come. These PCs are trusted as the hub is; 1: the hub alone."""
    pipeline: PipelinePCs = 0
    """Each node is a pipeline of so many PCs, for a model that one cannot hold; auto: of as few as hold it; 0: each PC
    has the whole model."""
    checkpoint: Folder = None
    """Save the run and its model here, and resume it from here if there is one; if not given, in
    zmqtrain-runs/RUN, a new folder for each run."""
    no_checkpoint: bool = False
    """Save nothing: the model is lost when the broker ends."""
    from_file: From = None
    """Begin a new run with the parameters of this model file (model.safetensors of another run, or of
    zmqtrain.save_model); their shapes must be those of the program."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self)
        if self.from_file is not None and self.initial in ("mean", "own"):
            raise ConfigError(
                f"--from says with which parameters the run begins, and initial {self.initial!r} that its nodes give "
                "them: leave one out"
            )
        if self.from_file is not None and self.shards > 1:
            raise ConfigError(
                "--from is for one broker that has the whole model, not for several brokers: begin the run with one "
                "broker"
            )
        if self.checkpoint is not None and self.no_checkpoint:
            raise ConfigError("--no-checkpoint says that nothing is saved, and --checkpoint where: leave one out")
        self.check_checkpoints(self.mode == "strict")

    def read_beginning(self) -> Beginning | None:
        """Return the parameters that a new run begins with, None without --from. Raises ConfigError."""
        if self.from_file is None:
            return None
        return read_beginning(self.from_file, self.program, self.program_arguments)


def check_new_file(path: Path) -> None:
    """Raise ConfigError if a file that is to be written (--out) exists."""
    if path.exists():
        raise ConfigError(f"{path} exists: name another file (--out), or remove it first")


def make_folder(folder: Path, flag: str) -> None:
    """Make the folder that `flag` names. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder} ({flag}): {error.strerror}") from error


# ---------------------------------------------------------------------- reading


def read_config(kind: type[Config], program: str, argv: Sequence[str] | None = None) -> Config:
    """Return the record of one program, from argv (None: of this process) and from the TOML file of --config.

    Raises ConfigError; SystemExit for --help, --version and flags that do not exist.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        print(version_line())
        raise SystemExit(0)
    asks_help = not {"-h", "--help"}.isdisjoint(arguments)
    if asks_help:
        _describe_fields(kind)
    path = _config_path(arguments) if "config" in get_type_hints(kind) else None
    default = _unchecked(kind, _read_file(kind, path) if path is not None else {})
    with _short_usage(program) if asks_help else contextlib.nullcontext():
        return tyro.cli(
            kind,
            prog=program,
            description=_describe(
                f"{inspect.cleandoc(kind.__doc__ or '')}\n\n"
                f"{program} --version prints the version, and that of the protocol."
            ),
            args=arguments,
            default=default,
            config=(tyro.conf.FlagCreatePairsOff,),
            registry=NUMBERS,
        )


@contextlib.contextmanager
def _short_usage(program: str) -> Iterator[None]:
    """Print help with a usage line of at most USAGE_COLUMNS: tyro's names every option until it has 80 of its own."""
    page = io.StringIO()
    page.isatty = sys.stdout.isatty  # type: ignore[method-assign]  # it takes colours where standard output does
    try:
        with contextlib.redirect_stdout(page):
            yield
    finally:
        usage, _, rest = page.getvalue().partition("\n")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", usage)
        if len(plain) > USAGE_COLUMNS:
            positional = re.sub(r" \[[^]]*\]", "", plain.partition(" [-h]")[2])
            usage = f"usage: {program} [-h] [OPTIONS]{positional}"
        print(f"{usage}\n{rest}", end="")


def command(
    kind: type[Config], program: str, run: Callable[[Config], int], service: bool = False
) -> Callable[..., int]:
    """Return the command that reads its settings from argv (None: of this process) and runs with them.

    service: see `run_command`.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        return run_command(program, lambda: run(read_config(kind, program, argv)), service)

    return main


NUMBERS = ConstructorRegistry()
"""Reads whole numbers and numbers from flags, with errors in our words instead of Python's."""


@NUMBERS.primitive_rule
def _read_number(asked: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kind: Any = asked.type
    if kind not in (int, float):
        return None

    def read(written: list[str]) -> Any:
        try:
            return kind(written[0])
        except ValueError:
            raise ValueError(f"{written[0]!r} is no {'whole ' * (kind is int)}number") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int | float) if kind is float else isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def _describe(docstring: str) -> str:
    """Return the paragraphs of a docstring filled to the terminal's width, so that its edge breaks no word.

    All lines of a paragraph but the first begin with spaces: tyro joins lines that begin with a letter.
    """
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
    filled = functools.partial(
        textwrap.fill,
        width=width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n\n".join(map(filled, inspect.cleandoc(docstring).split("\n\n")))


def _describe_fields(kind: type[Any]) -> None:
    """Give tyro the docstring of each field as one line, which it fills: it keeps the line breaks of the source."""
    described: dict[str, str] = {}
    for part in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                described[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    for field in fields(kind):
        if field.name in described:
            field.metadata = MappingProxyType({**field.metadata, "help": described[field.name]})


def _config_path(arguments: Sequence[str]) -> Path | None:
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--config", type=Path, nargs="?")
    path: Path | None = reader.parse_known_args(arguments)[0].config
    return path


def _unchecked(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """Return an unchecked record: it carries the defaults to the parser, which makes the checked one."""
    record = object.__new__(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        default = tyro.MISSING if field.default is MISSING else field.default
        object.__setattr__(record, field.name, values.get(field.name, default))
    return record


def _read_file(kind: type[Any], path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the file {path} (--config) cannot be read: {why}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply: a setting is a number, a text or a list") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}; a line is, for example: every = 16") from error
    kinds = get_type_hints(kind)
    known = [field.name for field in fields(kind) if field.name not in NOT_IN_A_FILE]
    values = {}
    for typed, value in table.items():
        key = "from_file" if typed == "from" else typed.replace("-", "_")  # as the flag has it, or as the field
        if key in RENAMED and key not in known:
            raise ConfigError(f"{path}: the setting {typed!r} is now {RENAMED[key]!r}: write that")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3) or known
            raise ConfigError(f"{path}: there is no setting {typed!r}; did you mean {' or '.join(close[:3])}?")
        if key == "program_arguments" and isinstance(value, dict):
            value = _join_arguments(path, value)
        values[key] = _checked(f"{path}: {key}", read_steps(key, value), kinds[key])
    return values


def _join_arguments(place: Path, table: Mapping[str, Any]) -> str:
    """Write a table as the flag's text: width = 128, data = "x" becomes width=128,data=x."""
    parts = []
    for name, value in table.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if "," in text or isinstance(value, dict | list):
            raise ConfigError(f"{place}: program_arguments.{name} must be a number, a boolean or a text without commas")
        parts.append(f"{name}={text}")
    return ",".join(parts)


def _checked(place: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(
                f"{place} must be one of {', '.join(map(repr, get_args(kind)))}, got {reprlib.repr(value)}"
            )
        return value
    wants_path = kind is Path or Path in get_args(kind)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not (str if wants_path else kind):
        word = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")
        raise ConfigError(f"{place} must be {word}, got {reprlib.repr(value)}")
    return Path(value) if wants_path else value


def check_host(address: str) -> None:
    """Raise NotHereYet if this PC knows no host of the name in `address`; a name service that times out is no reason.

    Of several addresses with commas one must be known.
    """
    if host := unknown_host(parse_addresses(address)):
        raise NotHereYet(say_unknown_host(host, address))
