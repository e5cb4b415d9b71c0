"""The terminal as the commands see it: text is shown as it is written, and what others wrote cannot move the cursor.

Rule 1: rich reads no markup, emoji or highlight in any text: names and brackets stay as they are.
Rule 2: control characters, escape codes among them, are shown as "?"; only a line feed and a tab stay.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import textwrap
from typing import IO, Any

from rich.console import Console
from rich.text import Text

LAYOUT = "\n\t"


def visible(text: str) -> str:
    """Return a text in which each character that cannot be printed is "?"; line feeds and tabs stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in LAYOUT else "?" for one in text)


def say(text: str) -> None:
    """Print a text on standard output: on a terminal each line is filled to its width, so that its edge breaks no word.

    A line that begins with a space is to be typed, or copied, and stays as it is.
    """
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print("\n".join(_filled(line, columns) for line in visible(text).split("\n")), flush=True)


def _filled(line: str, columns: int) -> str:
    if len(line) <= columns or not columns or line.startswith(" "):
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


class Terminal(Console):
    """A rich console on which a text is a text: no markup is read in it, and `visible` is applied to it.

    stream: standard output if not given.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        super().__init__(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich shows it, also in a table's cell."""
        options |= {"markup": False, "emoji": False, "highlight": False}
        return super().render_str(visible(text), **options)


class VisibleFormatter(logging.Formatter):
    """A log line to which `visible` is applied."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one record, and its traceback if it has one."""
        return visible(super().format(record))


class StderrHandler(logging.Handler):
    """Writes to what sys.stderr is now: a live table replaces it, so that a line appears above the table.

    A line that cannot be written (the disk is full, the reader has gone) is dropped.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        line = self.format(record)
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
