"""The machine code of a run's codecs, made before the run begins: on a new PC that takes some ten seconds.

Rule 1: of the programs of one PC, one compiles at a time. The others then find the code on the disk, and none does the
same work again: where there is no folder to keep it in, they compile one after the other for nothing.  Rule 2: nobody
waits without end for a program that stands still. Rule 3: where a file cannot be locked (NFS), all compile at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO

from zmqtrain.averaging.coder import codecs_and_counts
from zmqtrain.codecs import fast
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import compile_loops
from zmqtrain.core.settings import AUTO, RunSettings

logger = logging.getLogger(__name__)

WAIT_SECONDS, LOOK_SECONDS, LONG_SECONDS = 60.0, 0.05, 4.0
PLANNED = ("ternary", "topk:density=0.05+sign")
"""What a plan may change to that has machine code of its own: that of one density serves all."""

_compiled: set[str] = set()
"""The codecs of which this process has all code."""


def compile_codecs(layout: Layout, settings: RunSettings) -> None:
    """Have the code made for the deltas and the aggregates of a run, if its model is large enough."""
    wanted = {settings.at_first.codec, settings.at_first.broadcast_codec}
    if AUTO in (settings.codec, settings.broadcast_codec):
        wanted.update(PLANNED)
    new = sorted(wanted - _compiled)
    payloads = [codecs_and_counts(layout, codec, fragment) for codec in new for fragment in range(layout.fragments)]
    if max((sum(counts) for _, counts in payloads), default=0) < fast.LARGE_SLAB:
        return
    text = "the codecs' machine code is being made: once on this PC, it takes some fifteen seconds"
    telling = threading.Timer(LONG_SECONDS, logger.info, [text])
    telling.daemon = True
    telling.start()
    try:
        with _alone():
            for codecs, counts in payloads:
                compile_loops(codecs, counts)
    finally:
        telling.cancel()
    _compiled.update(new)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """While this lasts, no other program of this PC compiles; one that has waited too long does."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the file cannot be read, or its file system has no locks
            source = stack.enter_context(open(fast.__file__, "rb"))
            until = time.monotonic() + WAIT_SECONDS
            while not _lock(source) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
        yield


def _lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed; False if another program has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
