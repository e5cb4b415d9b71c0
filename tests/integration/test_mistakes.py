"""The table of mistakes: each is made, and what is seen says who, what, and what to do; none hangs, none is a trace."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mistakes import MISTAKES, Mistake, Place, page

import zmqtrain as zt
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.cli import doctor, main
from zmqtrain.cli.doctor import Machine
from zmqtrain.cli.node import Interruption
from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.core.settings import RunSettings
from zmqtrain.node import node
from zmqtrain.session import hub_session
from zmqtrain.transport.key_folder import KeyFolder

GETADDRINFO = socket.getaddrinfo
HERE = "tcp://127.0.0.1:0"
ALL = [pytest.param(one, id=one.typed) for group in MISTAKES.values() for one in group]
BOUND_SECONDS = 60
BOX = re.compile("[│─╭╮╰╯]")
MACHINE = Machine(
    cores=2, load=0.0, free_memory_bytes=8 << 30, free_disk_bytes=8 << 30, devices=(), devices_error="",
    has_nvidia_driver=False, versions={"numba": "1"},
)  # fmt: skip


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `Place` says of brokers and other programs."""
    keys = KeyFolder(tmp_path_factory.mktemp("hub") / "keys")
    keys.new(["lab"])
    settings = {
        "open": RunSettings(lost_seconds=60.0),
        "fresh": RunSettings(),
        "text": RunSettings(program="protein-folding"),
        "real": RunSettings(program="text"),
    }
    with contextlib.ExitStack() as stack:
        brokers = {name: BrokerThread(HERE, one) for name, one in settings.items()}
        brokers["keyed"] = BrokerThread(HERE, RunSettings(program="text"), keys=keys)
        for broker in brokers.values():
            stack.callback(broker.stop)
        first = stack.enter_context(zt.connect(brokers["open"].address, "pc1"))
        zt.DelayedSync(first, {"w": np.zeros((2, 3), np.float32)})
        web = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=_serve_pages, args=(web,), daemon=True).start()
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        yield {
            **{name: broker.address for name, broker in brokers.items()},
            **{name: f"tcp://127.0.0.1:{one.getsockname()[1]}" for name, one in (("other", web), ("closed", closed))},
            "keys": keys,
        }


def _find_host(host: str, *more: Any, **options: Any) -> Any:
    """Answer as a name service does, also where there is none."""
    if host.endswith(".invalid"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return GETADDRINFO(host, *more, **options)


def _serve_pages(web: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = web.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def place(hubs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Where one mistake is made; whatever hangs there fails."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Interruption, "install", lambda interruption: None)  # signals stay pytest's
    monkeypatch.setattr(doctor, "look_at_machine", lambda folder: MACHINE)
    monkeypatch.setattr(socket, "getaddrinfo", _find_host)
    monkeypatch.setattr(hub_session, "REFUSED_SECONDS", 0.05)
    monkeypatch.setattr(node, "REFUSED_SECONDS", 0.05)

    def hang(number: int, frame: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, BOUND_SECONDS)
    try:
        place = Place(tmp_path, **hubs)
        with place.folder_in_use():
            yield place
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("mistake", ALL)
def test_a_mistake_is_said_in_words_with_what_to_do(
    mistake: Mistake, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    if mistake.command is not None:
        code = main(mistake.command(place))
        heard = capsys.readouterr()
        said = heard.out + heard.err
        assert code == mistake.code, said
    else:
        assert mistake.call is not None
        with pytest.raises(ZmqTrainError) as caught:
            mistake.call(place)
        said = str(caught.value)
    said = " ".join(BOX.sub(" ", said).split())
    for words in mistake.words:
        assert words in said
    assert "Traceback" not in said and "None" not in said
    assert not re.search(r"[a-z]\.\.(?!\.)|[?:;]\.|\?;|\b1 [a-z]+s\b(?<!is)", said), "two stops, or one of several"
    assert "--insecure" not in said or "insecure" in mistake.typed


def test_there_are_at_least_60_mistakes_and_each_has_its_own_words() -> None:
    every = [mistake for group in MISTAKES.values() for mistake in group]
    assert len(every) >= 60 and len({mistake.typed for mistake in every}) == len(every)
    assert all(mistake.words and mistake.means for mistake in every)


def test_the_page_of_mistakes_is_made_of_the_table() -> None:
    written = (Path(__file__).parents[2] / "docs" / "mistakes.md").read_text()
    assert written == page(), "python tests/integration/mistakes.py > docs/mistakes.md"
