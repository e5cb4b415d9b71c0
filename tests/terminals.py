"""A pseudo-terminal for tests: what a program shows to a person."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import threading
from collections.abc import Callable, Iterator

BOUND_SECONDS = 60.0


class PseudoTerminal:
    """A terminal of so many columns and 40 lines.  child: the descriptor that a program writes to."""

    def __init__(self, columns: int = 100) -> None:
        self._shard, self.child = os.openpty()
        fcntl.ioctl(self.child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._shown = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self._shard, 65536)
            except OSError:  # nobody holds the other end any more
                some = b""
            with self._changed:
                self._shown += some.decode(errors="replace")
                self._changed.notify_all()
            if not some:
                return

    def wait_until(self, shown: Callable[[str], bool]) -> str:
        """Return all that was shown once `shown` says so of it."""
        with self._changed:
            assert self._changed.wait_for(lambda: shown(self._shown), BOUND_SECONDS), self._shown
            return self._shown

    def end(self) -> str:
        """Close the program's end and return all that was shown."""
        with contextlib.suppress(OSError):
            os.close(self.child)
        self._reader.join(BOUND_SECONDS)
        return self._shown

    def close(self) -> None:
        """Close both ends."""
        self.end()
        os.close(self._shard)


@contextlib.contextmanager
def pseudo_terminal(columns: int = 100) -> Iterator[PseudoTerminal]:
    """Give a pseudo-terminal of so many columns, closed at the end of the block."""
    terminal = PseudoTerminal(columns)
    try:
        yield terminal
    finally:
        terminal.close()
