"""The page's server and strangers: no token, other hosts, paths that lead out, slow readers, a thousand connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zmqtrain.monitor.metrics import CONTENT_TYPE
from zmqtrain.page.picture import Picture
from zmqtrain.page.server import COOKIE, PIECE_BYTES, PageServer, allow_connections, open_socket
from zmqtrain.protocol.messages import Roster, fields_of

TOKEN = "correct-horse-battery"
WAIT_SECONDS = 10.0


@contextmanager
def served(token: str = "") -> Iterator[tuple[Picture, int]]:
    picture, listening = Picture(), open_socket("127.0.0.1", 0, 1)
    server = PageServer(picture, listening, token)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield picture, listening.getsockname()[1]
    finally:
        server.stop()
        thread.join(WAIT_SECONDS)
        listening.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Picture, int]]:
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def guarded() -> Iterator[int]:
    with served(TOKEN) as (_, port):
        yield port


def get(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


class Stream:
    """A browser's stream of events."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
        self._connection.request("GET", "/events")
        self._answer = self._connection.getresponse()
        assert self._answer.getheader("content-type") == "text/event-stream; charset=utf-8"

    def next(self) -> dict[str, Any]:
        line = self._answer.readline()
        assert line.startswith(b"data: ") and self._answer.readline() == b"\n"
        found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        return found

    def close(self) -> None:
        self._connection.close()


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/icon.svg", "/plotly.js"])
def test_each_file_comes_with_the_headers_that_shut_others_out(here: tuple[Picture, int], path: str) -> None:
    status, headers, content = get(here[1], path)
    assert (status, headers["x-content-type-options"]) == (200, "nosniff")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert content and "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py", "/files/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "/%252e%252e/server.py",
        "//etc/passwd", "/etc/passwd", "/page.js/", "/page.js/../../server.py", "/page.html", "/broker.jsonl",
        "/..\\server.py", "/" + "x" * 9000,
    ],
)  # fmt: skip
def test_no_path_leads_to_a_file(here: tuple[Picture, int], path: str) -> None:
    assert get(here[1], path)[0] in (404, 400)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_takes_nothing(here: tuple[Picture, int], method: str) -> None:
    assert get(here[1], "/", method)[0] == get(here[1], "/events", method)[0] == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:5560", "127.0.0.1.evil.example", "", "192.0.2.7:80"])
def test_a_page_of_this_computer_alone_has_no_other_name(here: tuple[Picture, int], host: str) -> None:
    assert get(here[1], Host=host)[0] == 400
    assert get(here[1], "/events", Host=host)[0] == 400


def test_its_own_names_are_let_in(here: tuple[Picture, int]) -> None:
    assert [get(here[1], Host=name)[0] for name in ("localhost", "localhost:1", "[::1]:5560", "127.0.0.1")] == [200] * 4


@pytest.mark.parametrize("path", ["/", "/page.js", "/plotly.js", "/events", "/nothing"])
def test_a_stranger_without_the_token_gets_401(guarded: int, path: str) -> None:
    assert get(guarded, path)[0] == 401
    assert get(guarded, f"{path}?token=")[0] == get(guarded, f"{path}?token={TOKEN[:-1]}")[0] == 401
    assert get(guarded, path, Authorization="Bearer wrong")[0] == 401
    assert get(guarded, path, Cookie=f"{COOKIE}=wrong")[0] == get(guarded, path, Cookie="\x7f;;=;")[0] == 401
    assert get(guarded, path, Authorization="Bearer \xe9\xe9")[0] == 401


def test_the_token_becomes_a_cookie_that_no_script_reads_and_leaves_the_address(guarded: int) -> None:
    status, headers, _ = get(guarded, f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert get(guarded, Cookie=headers["set-cookie"].partition(";")[0])[0] == 200
    assert get(guarded, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_stream_begins_with_the_whole_and_goes_on_with_changes(here: tuple[Picture, int]) -> None:
    stream = Stream(here[1])
    first, second, third = stream.next(), stream.next(), stream.next()
    stream.close()
    assert first["whole"] and "whole" not in second
    assert third["tick"] == second["tick"] + 1


def test_a_thousand_connections_that_read_nothing_stop_nobody() -> None:
    allow_connections()
    with served() as (picture, port), contextlib.ExitStack() as stack:
        with picture.lock:
            for node in range(64):
                curve = picture.curve("node", str(node), f"pc{node}")
                assert curve is not None
                for second in range(400):
                    curve.line.add(float(second), 1.0 / (second + 1))
        whole = len(picture.whole())
        assert whole > 2 * PIECE_BYTES
        asked = [b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHost", b""]
        for number in range(1000):
            lazy = socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)
            stack.callback(lazy.close)
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.sendall(asked[number % 3])
        stream = Stream(port)
        stack.callback(stream.close)
        assert stream.next()["whole"]
        began = time.monotonic()
        ticks = [stream.next()["tick"] for _ in range(3)]
        assert ticks[2] == ticks[0] + 2
        assert time.monotonic() - began < WAIT_SECONDS
        assert get(port)[0] == 200


def test_a_port_that_is_taken_is_passed_over_only_where_that_is_allowed() -> None:
    with contextlib.closing(open_socket("127.0.0.1", 0, 1)) as taken:
        port = taken.getsockname()[1]
        with contextlib.closing(open_socket("127.0.0.1", port, 50)) as other:
            assert other.getsockname()[1] > port
        with pytest.raises(OSError):
            open_socket("127.0.0.1", port, 1)


def test_the_metrics_of_the_newest_report_are_read_by_the_official_parser(
    here: tuple[Picture, int], guarded: int
) -> None:
    picture, port = here
    members = ({"peer": "pc1#1", "name": "pc1", "state": "live", "step": 40},)
    for report, up in ((fields_of(Roster(7, members, "", 640, 21, 0, 0, 12.5, {}, -1)), 1.0), (None, 0.0)):
        picture.report = report
        status, headers, text = get(port, "/metrics")
        found = {
            one.name: one.value for family in text_string_to_metric_families(text.decode()) for one in family.samples
        }
        assert (status, headers["content-type"]) == (200, CONTENT_TYPE)
        assert found["zmqtrain_hub_up"] == up and found.get("zmqtrain_node_steps_total") == (40 if up else None)
    assert get(guarded, "/metrics")[0] == 401
    assert get(guarded, "/metrics", authorization=f"Bearer {TOKEN}")[0] == 200
