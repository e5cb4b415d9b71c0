"""Files of records that may be torn, cut short, or still written to: read as far as they go, and on when they grow.

Rule 1: a line that holds no record is counted and left out; the lines behind it are read.  A last line without its end
waits for the rest of it.
Rule 2: a file is known by its inode, because a recorder that is started again gives the older file another name.
Rule 3: only regular files inside the folder are read: no link that leads out of it, no pipe that nobody writes to.
Replays and proofs read with `records.read_records`, which forgives nothing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.records import Record, set_aside

PART_BYTES = 4 << 20
"""A file is read in parts of so many bytes."""
LINE_BYTES = 32 << 20
"""A longer line is no record: it is left out, and takes no memory."""
NAMES = re.compile(r"\.jsonl(\.\d+)?$")
"""What files of records are called: those of earlier lives have a number behind."""

_decoder = msgspec.json.Decoder()


def decode_line(line: bytes) -> Record | None:
    """Return the record that a line holds, None if it holds none; a report of `zmqtrain status --json` is one, too."""
    try:
        one = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(one, dict):
        return None
    if "kind" not in one and "members" in one:
        one["kind"] = "status"
    return one if isinstance(one.get("kind"), str) and isinstance(one.get("seconds"), int | float) else None


class RecordFile:
    """One file, read from where it was left. damaged: lines that hold no record; read_bytes: how far it is read.

    inode: the device and the number of the file, which stay when it gets another name.
    """

    def __init__(self, path: Path, inode: tuple[int, int]) -> None:
        self.path, self.inode = path, inode
        self.damaged = self.read_bytes = 0
        self._rest = bytearray()  # the beginning of an unfinished line
        self._skips = False  # the rest of a line that is too long

    def read(self) -> Iterator[Record]:
        """Give the records that were not read yet, up to the end as it is now.

        A file that was truncated is not read on. A file that was removed ends.
        """
        try:
            file = os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
        except OSError:
            return
        with file:
            facts = os.fstat(file.fileno())
            if (facts.st_dev, facts.st_ino) != self.inode:
                return
            file.seek(self.read_bytes)
            while self.read_bytes < facts.st_size and (part := file.read(PART_BYTES)):
                self.read_bytes += len(part)
                yield from self._lines(part)

    def _lines(self, part: bytes) -> Iterator[Record]:
        *whole, rest = part.split(b"\n")
        for line in whole:
            if self._rest:
                line = bytes(self._rest) + line
                self._rest.clear()
            if self._skips:
                self._skips = False
            elif (one := decode_line(line)) is not None:
                yield one
            elif line.strip():
                self.damaged += 1
        if not self._skips:
            self._rest += rest
        if len(self._rest) > LINE_BYTES:
            self._rest.clear()
            self._skips = True
            self.damaged += 1


class RecordFolder:
    """The files of records in a folder, or those that are named; files that come later are found by `look`.

    places: one folder, or files. The earlier lives of a named file (FILE.1, FILE.2) belong to it.
    Raises ConfigError for a place that is not there.
    """

    def __init__(self, places: Path | Sequence[Path]) -> None:
        self.places = [places] if isinstance(places, Path) else list(places)
        self.files: list[RecordFile] = []
        self._known: dict[tuple[int, int], RecordFile] = {}
        for place in self.places:
            if not place.exists():
                raise ConfigError(f"there is no {place}: name a folder of records, or the files that --record wrote")
        self.look()

    @property
    def damaged(self) -> int:
        """How many lines hold no record, in all files."""
        return sum(file.damaged for file in self.files)

    def look(self) -> None:
        """Look for files: new ones are added, those with another name found again."""
        for place in self.places:
            for path in _record_files(place):
                try:
                    facts = path.stat()
                except OSError:
                    continue
                if not stat.S_ISREG(facts.st_mode):
                    continue
                inode = (facts.st_dev, facts.st_ino)
                if (file := self._known.get(inode)) is None:
                    file = self._known[inode] = RecordFile(path, inode)
                    self.files.append(file)
                file.path = path

    def read(self) -> Iterator[tuple[RecordFile, Record]]:
        """Look for files, and give the records that were not read yet, each with its file."""
        self.look()
        for file in self.files:
            for one in file.read():
                yield file, one


def _record_files(place: Path) -> list[Path]:
    """Return the files of a folder, or a file and its earlier lives, the oldest life first."""
    if place.is_dir():
        folder = place.resolve()
        paths = [path for path in place.iterdir() if NAMES.search(path.name)]
        return sorted((path for path in paths if path.resolve().is_relative_to(folder)), key=_order)
    return [*(earlier for _, earlier in set_aside(place)), place]


def _order(path: Path) -> tuple[str, int]:
    """Sort key: by name, and the lives of one name from the oldest to the newest."""
    name, _, number = path.name.rpartition(".")
    return (name, int(number)) if number.isdecimal() else (path.name, 1 << 62)
