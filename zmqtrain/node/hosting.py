"""The broker of a shard that a node serves from its PC, because the first broker asks it to: a process beside it.

Where the hub has keys that broker comes to the hub with its node's pair, and lets those in that the first broker says.
It reads the pair from its standard input, because others on this PC can read a command line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable

from zmqtrain.protocol.hosting import OPEN_SECONDS, TRY_SECONDS
from zmqtrain.transport.address import OpenPort, connectable_host, parse_address, why_unanswered
from zmqtrain.transport.zmq_keys import CurveKeys

logger = logging.getLogger(__name__)

END_SECONDS = 30.0


def listen_like(first: str) -> str:
    """Return where the broker of a shard listens: at a free port of every interface. first: the first broker's."""
    return f"tcp://{'[::]' if ':' in parse_address(first)[0] else '*'}:0"


def try_port(first: str, port: int, serves: bool, answer: Callable[[str, int], None]) -> None:
    """Find out, in a thread, whether this PC reaches another port of the hub's machine than the broker's.

    first: the first broker's address.  port: to be tried.  serves: a port is opened here, to be tried from there.
    answer: called, in that thread, with why it is not reached ("" if it is), and the port that is open here, 0 for
    none.
    """
    address = f"tcp://{connectable_host(parse_address(first)[0])}:{port}"

    def attempt() -> None:
        why, own = why_unanswered(address, TRY_SECONDS), 0
        if serves and not why:
            with contextlib.suppress(OSError):
                own = OpenPort(listen_like(first), OPEN_SECONDS).number
        answer(f"{address}: {why}" if why else "", own)

    threading.Thread(target=attempt, name="zmqtrain-port", daemon=True).start()


class HostedBroker:
    """A broker of shard `shard` of `shards`, of the run whose first broker is at `first`. It saves nothing, for
    the first's machine follows it, ends with this process, and listens at a free port of every interface of this PC.

    pair: with which it comes to the hub, None: that has no keys.
    Raises OSError where no process can be started.
    """

    def __init__(self, shard: int, shards: int, first: str, pair: CurveKeys | None) -> None:
        self.shard = shard
        command = [
            *(sys.executable, "-m", "zmqtrain.cli.broker", "--shard", f"{shard}/{shards}", "--first", first),
            *("--bind", listen_like(first), "--no-checkpoint", "--follow-stdin"),
            *(("--insecure",) if pair is None else ("--keys", "-")),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        if pair is not None:
            lent = {"public": pair.public, "secret": pair.secret, "server": pair.server}
            line = json.dumps({name: key.decode() for name, key in lent.items()})
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended, which `why_ended` says
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()
        self._last_words = ""
        self._listener = threading.Thread(target=self._listen, name="zmqtrain-hosted", daemon=True)
        self._listener.start()
        logger.info("this PC serves shard %d of %d too, as the first broker has asked", shard, shards)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                if text := line.decode(errors="replace").strip():
                    self._last_words = text

    def why_ended(self) -> str | None:
        """Return its last words if it has ended, None while it lives."""
        if self._process.poll() is None:
            return None
        self._listener.join(END_SECONDS)
        return self._last_words or f"its broker ended with {self._process.returncode}"

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def close(self) -> None:
        """Have it say goodbye and end; its nodes find its standby. Safe to call twice."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the broker of shard %d does not end: it is killed, and its standby serves on", self.shard)
            self._process.kill()
            self._process.wait()
        self._listener.join(END_SECONDS)
