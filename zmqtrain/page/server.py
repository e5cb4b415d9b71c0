"""The server of the page: four files, and a stream of events a second. It takes nothing from a browser but its token.

Rule 1: no address of the server names a file: each is in a table, so none leads out of a folder.
Rule 2: on this computer alone a request must name it (localhost, 127.0.0.1), so that no other site's page can read the
run through a name of its own; from elsewhere a request must have the token, compared in constant time.
Rule 3: a browser is sent a tick when it has read the last one; one that is slow misses ticks and gets the whole again,
in pieces, so that it delays nobody.  One that reads nothing for STUCK_SECONDS is let go, with what was kept for it.
Sources: HTML Standard, server-sent events; W3C Content Security Policy Level 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hmac
import re
import resource
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cache
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.metrics import CONTENT_TYPE, RunMetrics
from zmqtrain.page.picture import Picture

TICK_SECONDS, STUCK_SECONDS = 1.0, 30.0
PIECE_BYTES = 32 << 10
LOOK_SECONDS = 0.1
CONNECTIONS = 4096
COOKIE = "zmqtrain-page"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
HEADERS = {
    # plotly puts style elements and attributes into the page; scripts come from here alone
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
NO_TOKEN = "401: this page wants the token that `zmqtrain page` printed when it was started; open the address with it\n"
OTHER_HOST = "400: this page is for this computer alone: open it as http://127.0.0.1\n"


class Ticker:
    """Makes a tick of the picture each second, and has its bytes for every browser."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._changed = asyncio.Event()
        self._change = b""
        self._whole: tuple[int, bytes] = (-1, b"")
        self._writing: dict[asyncio.Task[Any], float] = {}  # streams that wait for their readers, since when
        self.number, self.over = 0, False

    async def run(self) -> None:
        """Tick until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._change = await asyncio.to_thread(self._picture.take_change)
            self.number += 1
            self._wake()
            for task, since in list(self._writing.items()):
                if loop.time() - since > STUCK_SECONDS:
                    task.cancel()
            due = max(due + TICK_SECONDS, loop.time())
            await asyncio.sleep(due - loop.time())

    @property
    def report(self) -> Mapping[str, Any] | None:
        """The newest report of the broker; None while it is not heard."""
        return self._picture.report

    def end(self) -> None:
        """End all streams."""
        self.over = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def stream(self) -> AsyncIterator[bytes]:
        """Give server-sent events: the whole, then a change each tick; the whole again after a tick was missed."""
        last, task, loop = -1, asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        try:
            while not self.over:
                changed, number = self._changed, self.number
                if number == last + 1 and last >= 0:
                    data = self._change
                elif number != last:
                    data = await self._all(number)
                else:
                    await changed.wait()
                    continue
                last = number
                for piece in _pieces(data):
                    self._writing[task] = loop.time()
                    yield piece
                del self._writing[task]
        finally:
            self._writing.pop(task, None)

    async def _all(self, number: int) -> bytes:
        if self._whole[0] != number:
            self._whole = number, await asyncio.to_thread(self._picture.whole)
        return self._whole[1]


def _pieces(data: bytes) -> Iterator[bytes]:
    """Return one server-sent event in pieces."""
    yield b"data: "
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
    yield b"\n\n"


class Guard:
    """Lets a request in that names this computer, or has the token; puts the safety headers on every answer.

    token: "" for a server that only this computer can reach.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        answer = self._answer(Request(scope))
        await (self._app if answer is None else answer)(scope, receive, send_safely)

    def _answer(self, request: Request) -> Response | None:
        """Return what a request is answered with instead of what it asks for; None if it is let in."""
        if not self._token:
            host = re.sub(r":\d+$", "", request.headers.get("host", ""))
            return None if host in LOCAL_NAMES else PlainTextResponse(OTHER_HOST, 400)
        given = parse_qs(request.url.query).get("token", [""])[0]
        if given and self._is_token(given):  # from now on as a cookie: an address is copied, shown and logged
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", path="/")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(_cookie(request)) or self._is_token(bearer):
            return None
        return PlainTextResponse(NO_TOKEN, 401, {"www-authenticate": "Bearer"})

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _cookie(request: Request) -> str:
    try:
        morsel = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


@cache
def plotly_bundle() -> bytes:
    """Return plotly's script as its Python package ships it, compressed."""
    return gzip.compress((files("plotly") / "package_data" / "plotly.min.js").read_bytes(), 5)


def make_app(ticker: Ticker, token: str) -> ASGIApp:
    """Return the application. token: "" for none; see `Guard`."""

    def fixed(path: str) -> Route:
        name, kind = FILES[path]
        content = (files("zmqtrain.page") / "files" / name).read_bytes()

        async def answer(request: Request) -> Response:
            return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

        return Route(path, answer)

    async def plotly(request: Request) -> Response:
        headers = {"content-encoding": "gzip", "cache-control": "private, max-age=86400"}
        return Response(await asyncio.to_thread(plotly_bundle), media_type="text/javascript", headers=headers)

    async def events(request: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=headers)
        return StreamingResponse(ticker.stream(), media_type="text/event-stream", headers=headers)

    async def metrics(request: Request) -> Response:
        try:
            text = RunMetrics().text_of(ticker.report)
        except ConfigError as error:
            return PlainTextResponse(f"501: {error}\n", 501)
        return Response(text, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})

    routes = [*map(fixed, FILES), Route("/plotly.js", plotly), Route("/events", events), Route("/metrics", metrics)]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return Guard(app, token)


class Server(uvicorn.Server):
    """Uvicorn without handlers of signals, which the command has: set `should_exit` to end it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def open_socket(host: str, port: int, tries: int) -> socket.socket:
    """Return a socket that listens; if the port is taken, at one of the next `tries` - 1.

    Raises OSError, of the first port, if none is free or the address is not this computer's.
    """
    first: OSError | None = None
    for number in range(port, min(port + max(1, tries), 65536)):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, kind)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(address)
                listening.listen(1024)
            except OSError:
                listening.close()
                raise
            return listening
        except OSError as error:
            first = first or error
    assert first is not None
    raise first


def allow_connections() -> None:
    """Raise the limit of open files of this process to what the system allows: each browser has one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS if most == resource.RLIM_INFINITY else min(most, 2 * CONNECTIONS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class PageServer:
    """The page of a picture at a listening socket. token: "" where only this computer reaches it."""

    def __init__(self, picture: Picture, listening: socket.socket, token: str) -> None:
        self._picture, self._listening, self._token = picture, listening, token
        self._server: Server | None = None
        self._stopped = False

    def stop(self) -> None:
        """End `run` soon; from any thread, or a signal's handler."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    def run(self) -> None:
        """Serve until `stop`."""
        allow_connections()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        ticker = Ticker(self._picture)
        config = uvicorn.Config(
            make_app(ticker, self._token),
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            lifespan="off",
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=2,
        )
        self._server = server = Server(config)
        server.should_exit = self._stopped
        ticking = asyncio.create_task(ticker.run())
        serving = asyncio.create_task(server.serve(sockets=[self._listening]))
        try:
            while not (server.should_exit or serving.done() or ticking.done()):
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            ticker.end()
            server.should_exit = True
            await serving
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
