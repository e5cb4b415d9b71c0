"""Pages of the documentation, read as a person follows them: commands, each on its PC, and the programs they show.

In a block `console` a line `pc1$ command` is typed on the PC pc1, `^C` and `^\\` are keys, a line that begins with `> `
continues a command, and every other line is what the program shows: numbers may differ, and "…" is any text.
A block `python` is run on the hub; if its first line is a comment with a file's name alone, it is saved there instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)$")
PROMPT = re.compile(r"^(\w*)\$ (.*)$")
FILE_NAME = re.compile(r"^# ([\w./-]+\.(?:py|toml))$")
CONTINUED = "> "
ALONE = "pc"
"""The PC of a prompt that names none."""
VARYING = re.compile(r"run-[0-9a-f]{8}|tcp://[\w.-]+(?::\d+)?|(?<![A-Za-z])\d+(?:[.,:]\d+)*|…|\s+")


@dataclass(frozen=True)
class Command:
    """A line that is typed.  pc: where.  text: what, with the lines that continue it."""

    pc: str
    text: str


@dataclass(frozen=True)
class Shown:
    """Lines that are shown, in any order, by the command before them, or, at a block's beginning, by any program."""

    lines: tuple[str, ...]
    by_last: bool

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """What the lines look like with other numbers, runs and addresses."""
        return [_pattern(line) for line in self.lines]


@dataclass(frozen=True)
class Source:
    """A block of Python or TOML.  file: where it is saved; empty: it is run."""

    language: str
    text: str
    file: str


Step = Command | Shown | Source


def read_page(path: Path) -> list[Step]:
    """Return what a reader of this page does and sees, in order.  Raises ValueError for a block of another kind."""
    return [step for language, lines in _blocks(path) for step in _read_block(path, language, lines)]


def _blocks(path: Path) -> Iterator[tuple[str, list[str]]]:
    language, lines = "", None
    for line in path.read_text().splitlines():
        fence = FENCE.match(line)
        if lines is None and fence:
            language, lines = fence[1], []
        elif lines is not None and fence:
            yield language, lines
            lines = None
        elif lines is not None:
            lines.append(line)
    if lines is not None:
        raise ValueError(f"{path}: the last block does not end")


def _read_block(path: Path, language: str, lines: list[str]) -> Iterator[Step]:
    if language in ("python", "toml"):
        name = FILE_NAME.match(lines[0])
        yield Source(language, "\n".join(lines) + "\n", name[1] if name else "")
        return
    if language != "console":
        raise ValueError(f"{path}: a block of {language or 'no language'}: nothing runs it")
    steps: list[Command | Shown] = []
    for line in filter(str.strip, lines):
        last = steps[-1] if steps else None
        if prompt := PROMPT.match(line):
            steps.append(Command(prompt[1] or ALONE, prompt[2]))
        elif line.startswith(CONTINUED) and isinstance(last, Command):
            steps[-1] = Command(last.pc, f"{last.text}\n{line.removeprefix(CONTINUED)}")
        elif isinstance(last, Shown):
            steps[-1] = Shown((*last.lines, line.strip()), last.by_last)
        else:
            steps.append(Shown((line.strip(),), last is not None))
    yield from steps


def _pattern(line: str) -> re.Pattern[str]:
    parts, end = [], 0
    for varying in VARYING.finditer(line):
        parts.append(re.escape(line[end : varying.start()]))
        parts.append(_any_of(varying[0]))
        end = varying.end()
    return re.compile("".join(parts) + re.escape(line[end:]))


def _any_of(varying: str) -> str:
    """The pattern of a part that is not always the same."""
    if varying == "…":
        return ".*"
    if varying.isspace():
        return r"\s+"
    if varying.startswith("run-"):
        return "run-[0-9a-f]+"
    if varying.startswith("tcp:"):
        return r"tcp://\S+"
    return r"[\d.,:]+"
