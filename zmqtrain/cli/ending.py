"""End a command: with an exit code, and with one paragraph on stderr where something of ours went wrong.

Rule 1: an error of the tree under ZmqTrainError is for the user, without a traceback; any other is our fault, with.
Rule 2: Ctrl-C is a way to end, not an error: 0; a second one quits at once: 130.
Rule 3: a service (node, broker) that would end the same way if it were started again says so by its exit code, 78
(EX_CONFIG of sysexits.h), for the service manager that starts it again after any other.
Rule 4: whoever was interrupted while XLA compiled leaves without the interpreter's regular end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from zmqtrain.cli.terminal import visible
from zmqtrain.errors import ConfigError, HubUnreachable, JoinRefused, NotHereYet, SteppedDown, ZmqTrainError

__all__ = ["run_command", "leave_at_once", "leave_without_teardown", "first_interrupt"]

ERROR, NO_USE, INTERRUPTED = 2, 78, 130
FINAL = frozenset({"key", "model", "revoked", "run", "superseded"})
"""The reasons of a refusal that is the same the next time."""
SHOW_CURSOR = b"\x1b[?25h\n"


def run_command(program: str, command: Callable[[], int], service: bool = False) -> int:
    """Run a command and return its exit code: an error of ours becomes one paragraph on stderr and 2, Ctrl-C 0.

    service: it is one that a service manager starts again: 78 where that would not help.
    """
    try:
        return command()
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
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)
    os._exit(INTERRUPTED)


def leave_without_teardown() -> NoReturn:
    """End this process, which has said goodbye already, with exit code 0 and without the interpreter's regular end.

    An XLA compilation that was interrupted crashes there, now and then: signal 11.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


@contextlib.contextmanager
def first_interrupt(told: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether SIGINT or SIGTERM has come; the first calls `told`, the second quits at once.

    Only in the main thread; the signals' handlers are put back at the end of the block.
    """
    asked = False

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            leave_at_once()
        asked = True
        told()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
