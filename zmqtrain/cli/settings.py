"""Read what a user typed: one frozen dataclass per program, each field one key of a TOML file and one flag.

Rule 1: a flag counts more than the file, the file more than the default; nothing comes from the environment.
Rule 2: a record is checked once, in `__post_init__`; what cannot be used is a ConfigError that says what to type.
Rule 3: each record stands with its program (of broker and node in a file of its own), what several have in `fields`.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import reprlib
import shutil
import socket
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from zmqtrain import __version__
from zmqtrain.core.errors import ConfigError, NotHereYet
from zmqtrain.core.settings import read_steps
from zmqtrain.transport.address import parse_address, parse_addresses

Config = TypeVar("Config")

NOT_IN_A_FILE = ("config",)
MOST_COLUMNS = 100
"""How wide a paragraph of a command's description is at most."""


def read_config(kind: type[Config], program: str, argv: Sequence[str] | None = None) -> Config:
    """Return the record of one program, from argv (None: of this process) and from the TOML file that --config names.

    Raises ConfigError; SystemExit for --help, --version and flags that do not exist.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        print(f"zmqtrain {__version__}")
        raise SystemExit(0)
    if not {"-h", "--help"}.isdisjoint(arguments):
        _describe_fields(kind)
    path = _config_path(arguments) if "config" in _kinds(kind) else None
    default = _unchecked(kind, _read_file(kind, path) if path is not None else {})
    return tyro.cli(
        kind,
        prog=program,
        description=_describe(f"{inspect.cleandoc(kind.__doc__ or '')}\n\n{program} --version prints the version."),
        args=arguments,
        default=default,
        config=(tyro.conf.FlagCreatePairsOff,),
        registry=NUMBERS,
    )


NUMBERS = ConstructorRegistry()
"""How whole numbers and numbers are read from flags: what is none is refused in words of ours, not of Python's."""


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
    path = None
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            path = Path(arguments[index + 1])
        elif argument.startswith("--config="):
            path = Path(argument.partition("=")[2])
    return path


def _kinds(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _unchecked(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """A record that was not checked: it only carries the defaults to the parser, which makes the one that is."""
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
    kinds = _kinds(kind)
    known = [field.name for field in fields(kind) if field.name not in NOT_IN_A_FILE]
    values = {}
    for typed, value in table.items():
        key = "from_file" if typed == "from" else typed.replace("-", "_")  # as the flag has it, or as the field
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
            raise ConfigError(f"{place} must be one of {', '.join(map(repr, get_args(kind)))}, got {_short(value)}")
        return value
    wants_path = kind is Path or Path in get_args(kind)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not (str if wants_path else kind):
        word = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")
        raise ConfigError(f"{place} must be {word}, got {_short(value)}")
    return Path(value) if wants_path else value


def _short(value: Any) -> str:
    """Return a value as a message says it."""
    return reprlib.repr(value)


def check_host(address: str) -> None:
    """Raise NotHereYet if this PC knows no host of the name in `address`; a silent name service is no reason.

    Of several addresses with commas one must be known: the PC of another may be gone, and its name with it.
    """
    for host in dict.fromkeys(parse_address(one)[0] for one in parse_addresses(address)):
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if error.errno != socket.EAI_NONAME:
                return
            unknown = NotHereYet(
                f"this PC knows no host named {host!r} ({address}): give the hub's address in numbers, as the broker "
                "printed it, for example tcp://192.168.1.10:5555"
            )
            unknown.__cause__ = error
    raise unknown
