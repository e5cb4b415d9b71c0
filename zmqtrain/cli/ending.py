"""End a command: with an exit code, and with one paragraph on stderr where something of ours went wrong.

Rule 1: an error of the tree under ZmqTrainError is for the user, without a traceback; any other is our fault, with.
Rule 2: Ctrl-C is a way to end, not an error: 0; a second one quits at once: 130. So is the end of the run by an
operator. SIGTERM and SIGHUP (a window that is closed) are as Ctrl-C; but a SIGHUP is never a second one, as a shell and
the system may both send it, and one that was ignored when the process began (nohup) stays ignored.
Rule 3: a service (node, broker) that would end the same way if it were started again says so by its exit code, 78
(EX_CONFIG of sysexits.h), for the service manager that starts it again after any other.
Rule 4: whoever was interrupted while XLA compiled leaves without the interpreter's regular end.
Rule 5: a service goes on without its output: what cannot be written (the disk is full, `| head`) is dropped.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

from zmqtrain.cli.display import visible
from zmqtrain.core.errors import (
    ConfigError,
    HubUnreachable,
    JoinRefused,
    NotHereYet,
    RunStopped,
    SteppedDown,
    ZmqTrainError,
)

ERROR, NO_USE, INTERRUPTED = 2, 78, 130
FINAL = frozenset({"key", "model", "revoked", "run", "superseded"})
"""The reasons of a refusal that is the same the next time."""
SHOW_CURSOR = b"\x1b[?25h\n"
_watched: list[socket.socket] = []
"""The two ends of what the signals are written to: they are open as long as the process lives."""


def run_command(program: str, command: Callable[[], int], service: bool = False) -> int:
    """Run a command and return its exit code: an error of ours becomes one paragraph on stderr and 2, Ctrl-C 0.

    service: it is one that a service manager starts again: 78 where that would not help; it needs no output.
    """
    if not service:
        return _run_command(program, command, service)
    with _dispensable_output():
        return _run_command(program, command, service)


def _run_command(program: str, command: Callable[[], int], service: bool) -> int:
    try:
        return command()
    except RunStopped as end:
        print(visible(f"{program}: {end}"), file=sys.stderr)
        return 0
    except ZmqTrainError as error:
        print(visible(f"{program}: {error}"), file=sys.stderr)
        return NO_USE if service and _is_final(error) else ERROR
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # who read our output has left, as in `| head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else ERROR
        return NO_USE if service and code == ERROR else code  # an option that there is not
    except Exception as error:
        if not _lacks_memory(error):
            raise
        why = str(error).partition("\n")[0][:200] or type(error).__name__
        print(visible(f"{program}: this machine has too little memory for that ({why})"), file=sys.stderr)
        return ERROR


def _lacks_memory(error: Exception) -> bool:
    """Whether there is too little memory: Python's, or the device's as XLA says it."""
    of_xla = type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError) or of_xla


def _is_final(error: ZmqTrainError) -> bool:
    """Whether a service that ended by this would do so again."""
    match error:
        case JoinRefused(reason=reason) | HubUnreachable(reason=reason):
            return reason in FINAL
        case NotHereYet():
            return False
    return isinstance(error, ConfigError | SteppedDown)


def leave_at_once() -> None:
    """End this process without saying goodbye: what a second Ctrl-C asks for. Exit code 130."""
    _show_cursor()
    os._exit(INTERRUPTED)


def _show_cursor() -> None:
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)


def leave_without_teardown() -> NoReturn:
    """End this process, which has said goodbye already, with exit code 0 and without the interpreter's regular end.

    An XLA compilation that was interrupted crashes there, now and then: signal 11.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _show_cursor()
    os._exit(0)


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command in order; SIGHUP is one unless this process ignores it, as under nohup."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGINT, signal.SIGTERM, *hangup


def watch_signals(noticed: Callable[[int], None]) -> None:
    """Have `noticed(count)` called at once at each signal of `end_signals`, in a thread of its own. A SIGHUP counts
    only as the first.

    Call it once, in the main thread. Python's own handlers run in that thread, which may be in a long call of C: XLA
    compiles for many seconds.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    _watched.extend((reader, writer))
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    ends = end_signals()

    def watch() -> None:
        count = 0
        while number := reader.recv(1):
            if number[0] in ends and not (count and number[0] == signal.SIGHUP):
                count += 1
                noticed(count)

    threading.Thread(target=watch, name="zmqtrain-signals", daemon=True).start()


# ---------------------------------------------------------------------- output


class _Dispensable(io.RawIOBase):
    """A descriptor that takes all that is written; what it cannot write is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def _dispensable_output() -> Iterator[None]:
    """Have stdout and stderr take all that is written, for the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_dispensable(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _dispensable(stream: TextIO | None) -> TextIO:
    if stream is None:  # it was closed before this process began
        return open(os.devnull, "w")
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # no file of the system's
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(_Dispensable(descriptor))
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)


@contextlib.contextmanager
def first_interrupt(told: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether one of `end_signals` has come; the first calls `told`, the second quits at
    once.

    Only in the main thread; the signals' handlers are put back at the end of the block.
    """
    asked = False

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked and number == signal.SIGHUP:
            return
        if asked:
            leave_at_once()
        asked = True
        told()

    before = {number: signal.signal(number, handle) for number in end_signals()}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
