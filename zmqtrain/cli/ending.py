"""Exit codes, signals and output of the commands.

Rule 1: a ZmqTrainError is one paragraph on stderr; any other error is ours, and has a traceback.
Rule 2: Ctrl-C ends a command with 0, a second one at once with 130; an operator's end of the run is 0 too. SIGTERM and
SIGHUP (a closed window) count as Ctrl-C; but a SIGHUP is never the second, because a shell and the system may both send
it, and one that was ignored when the process began (nohup) stays ignored.
Rule 3: a service (node, broker) that a restart would not help ends with 78 (EX_CONFIG of sysexits.h), so that its
service manager does not start it again.
Rule 4: a process that is interrupted while XLA compiles skips the interpreter's regular end, which crashes then.
Rule 5: a service runs on without its output: text that cannot be written (full disk, `| head`) is dropped.
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
FINAL = frozenset({"key", "model", "older", "revoked", "run", "superseded"})
"""Reasons for a refusal that a restart does not change."""
SHOW_CURSOR = b"\x1b[?25h\n"
_watched: list[socket.socket] = []
"""The socket pair that signals are written to; it is never closed."""


def run_command(program: str, command: Callable[[], int], service: bool = False) -> int:
    """Run a command and return its exit code: 2 after a ZmqTrainError, 0 after Ctrl-C.

    service: a service manager may restart it: 78 where that would not help; it runs on without its output.
    """
    with _dispensable_output() if service else contextlib.nullcontext():
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
    """Whether memory ran out: Python's, or the device's according to XLA."""
    of_xla = type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError) or of_xla


def _is_final(error: ZmqTrainError) -> bool:
    """Whether a service that ended by this error would end so again."""
    match error:
        case JoinRefused(reason=reason) | HubUnreachable(reason=reason):
            return reason in FINAL
        case NotHereYet():
            return False
    return isinstance(error, ConfigError | SteppedDown)


def leave_at_once() -> None:
    """End this process without a goodbye, with exit code 130: the second Ctrl-C."""
    _show_cursor()
    os._exit(INTERRUPTED)


def _show_cursor() -> None:
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)


def leave_without_teardown() -> NoReturn:
    """End this process with exit code 0, without the interpreter's regular end.

    An interrupted XLA compilation sometimes crashes there (signal 11). The caller has said goodbye.
    """
    _flush()
    _show_cursor()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command in order; SIGHUP is one unless this process ignores it, as under nohup."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGINT, signal.SIGTERM, *hangup


def watch_signals(noticed: Callable[[int], None]) -> None:
    """Call `noticed(count)` at each signal of `end_signals`, in a thread of its own. A SIGHUP counts only as the first.

    Call it once, in the main thread. Python's own handlers run only there, where XLA may compile for many seconds.
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
    """A descriptor that drops what it cannot write."""

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
    """Let stdout and stderr drop what they cannot write, for the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_dispensable(stream) for stream in before)
    try:
        yield
    finally:
        _flush()
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
    """Yield a function that says whether a signal of `end_signals` has come; the first calls `told`, the second quits.

    Only in the main thread; the former handlers are restored at the end of the block.
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
