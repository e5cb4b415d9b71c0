"""Write one record after the other to a file, each whole or not there.

Rule 1: what was appended survives the death of this process, not a loss of power: to wait for the disk at every record
would cost an aggregate as long as the disk takes. Its name in the folder survives that too.
Rule 2: a record that did not fit is taken back, so that the next try goes on behind the last good one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from zmqtrain.checkpoint.files import sync_folder
from zmqtrain.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")


class Journal:
    """A new journal in place of what may be there. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path, self._good = path, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
            try:
                sync_folder(path.parent)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise CheckpointError(f"cannot write to {path.parent}: {error}") from error

    def append(self, body: bytes) -> None:
        """Write one record. Raises CheckpointError; nothing of it is there then, and it may be tried again."""
        assert self._file is not None, "a journal that is closed takes nothing"
        left = memoryview(_HEAD.pack(len(body), zlib.crc32(body)) + body)
        whole = self._good + len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._good)
            os.lseek(self._file, self._good, os.SEEK_SET)
            raise CheckpointError(f"cannot write the journal {self.path}: {error}") from error
        self._good = whole

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_journal(path: Path) -> Iterator[bytes]:
    """Give the records of a journal in order, up to the first that is torn. Raises OSError."""
    data = memoryview(path.read_bytes())
    while data:
        length, crc = _HEAD.unpack(data[: _HEAD.size]) if len(data) >= _HEAD.size else (0, -1)
        body = data[_HEAD.size : _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != crc:
            logger.warning("the journal %s ends in a torn record; what is before it counts", path)
            return
        yield bytes(body)
        data = data[_HEAD.size + length :]
