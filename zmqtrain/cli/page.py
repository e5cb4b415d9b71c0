"""`zmqtrain page`: a run in a browser, from a running hub or from records. It looks on and changes nothing."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import secrets
import shlex
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from zmqtrain.cli.display import log_to_stderr, say
from zmqtrain.cli.ending import first_interrupt
from zmqtrain.cli.settings import Folder, HubOptions, LogOptions, check_host, command
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.installed import how_to_install
from zmqtrain.transport.address import local_address, parse_addresses

if TYPE_CHECKING:
    from zmqtrain.page.server import PageServer
    from zmqtrain.page.sources import Source

PROGRAM = "zmqtrain page"
NEEDED = ("starlette", "uvicorn", "plotly")
PORT, TRIES = 5560, 20


@dataclass(frozen=True, kw_only=True)
class PageConfig(HubOptions, LogOptions):
    """Show a run in a browser: losses, nodes, the hub, and what has happened. Looks on; changes nothing.

    RUN is the address of a running broker, or a folder of records (--record), of a run that is finished or goes on.

    Example: zmqtrain page tcp://192.168.1.10:5555
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """tcp://HUB:PORT (several with commas: its own and its standby's), or a folder with records."""
    bind: str = ""
    """HOST:PORT where the page is served; empty: 127.0.0.1:5560, for this PC alone, or the next port that is free. At
    another address the page asks for a token, which is printed once."""
    tensorboard: Folder = None
    """Write scalars of the run and of all nodes for TensorBoard, in a folder of the run's name in this folder."""
    follow_stdin: bool = False
    """End when standard input is closed, as when a program that has started the page ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.place()
        if "://" in self.run:
            parse_addresses(self.run)

    def place(self) -> tuple[str, int]:
        """Return host and port of --bind. Raises ConfigError."""
        if not self.bind:
            return "127.0.0.1", PORT
        host, colon, port = self.bind.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535 or "/" in host:
            raise ConfigError(f"--bind is HOST:PORT, as 127.0.0.1:{PORT} or 0.0.0.0:{PORT}, not {self.bind!r}")
        return host.strip("[]") or "0.0.0.0", int(port)


def _open_source(config: PageConfig) -> Source:
    from zmqtrain.monitor.tensorboard import RunScalars
    from zmqtrain.page.sources import FolderSource, HubSource

    scalars = None if config.tensorboard is None else RunScalars(config.tensorboard)
    if "://" in config.run:
        check_host(config.run)
        return HubSource(config.run, config.server_key, config.keys, config.wait_seconds, scalars)
    if not Path(config.run).exists():
        raise ConfigError(
            f"there is no folder {config.run}: name one with records (--record of the broker and the nodes), or the "
            "address of a broker, as tcp://192.168.1.10:5555"
        )
    return FolderSource(Path(config.run), scalars)


def is_local(host: str) -> bool:
    """Return whether only this computer reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(host: str, port: int, token: str) -> str:
    """Return what to open in a browser."""
    shown = (local_address() or host) if host in ("0.0.0.0", "::") else host
    named = f"[{shown}]" if ":" in shown else shown
    return f"http://{named}:{port}/" + (f"?token={token}" if token else "")


def what_is_missing() -> str:
    """Return which packages the page needs and what to type; "" if all are here."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"the page needs {', '.join(missing)}; to install that: {how_to_install('page')}" if missing else ""


def _end_with_stdin(server: PageServer) -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock would abort the interpreter's end
        pass
    server.stop()


def _run(config: PageConfig) -> int:
    if missing := what_is_missing():
        raise ConfigError(missing)
    from zmqtrain.page.server import PageServer, open_socket

    log_to_stderr(config.verbose)
    if not config.verbose:
        logging.getLogger("zmqtrain").setLevel(logging.ERROR)  # the page itself says what becomes of the broker
    host, port = config.place()
    token = "" if is_local(host) else secrets.token_urlsafe(24)
    try:
        listening = open_socket(host, port, 1 if config.bind else TRIES)
    except OSError as error:
        raise ConfigError(
            f"the page cannot be served at {host}:{port}: {error.strerror or error}; name another place with "
            f"--bind, as --bind {shlex.quote(host)}:0 (any free port)"
        ) from error
    with closing(listening), closing(_open_source(config)) as source:
        server = PageServer(source.picture, listening, token)
        if config.follow_stdin:
            threading.Thread(target=_end_with_stdin, args=(server,), name="zmqtrain-stdin", daemon=True).start()
        with first_interrupt(server.stop):
            source.start()
            address = address_of(host, listening.getsockname()[1], token)
            said = "; the token in it is shown only here" if token else ""
            say(f"the page is at {address}\n(Ctrl-C ends it, and changes nothing of the run{said})")
            server.run()
    return 0


main = command(PageConfig, PROGRAM, _run)
