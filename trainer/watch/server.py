"""A server of one page on the loopback interface. Imports no torch."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from threading import Lock
from typing import Any

from trainer.errors import ConfigError

ADDRESS = "127.0.0.1"
OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
"""Names of this host in a request, directly or through a tunnel. A page on the web whose name was
made to lead here sends its own name, and is refused.
"""
MIN_SECONDS = 1.0
"""Age below which a page is sent again instead of rendered again: tabs share the work."""
CLIENT_SECONDS = 10.0
"""Time in which a client must send its request."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "script-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageServer:
    """Answers each request with the page of that moment."""

    def __init__(self, render: Callable[[str], str], port: int) -> None:
        """`render` is given the nonce of the page's script. Raises `ConfigError` if the port is
        taken.
        """
        self._render = render
        self._lock = Lock()
        self._nonce = token_urlsafe(16)
        self._page = b""
        self._rendered_at = -MIN_SECONDS
        try:
            self._server = _Server((ADDRESS, port), partial(_Handler, self))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                [f"--port {port} cannot be used: {reason}; --port 0 takes a free one"]
            ) from None
        self.url = f"http://{ADDRESS}:{self._server.server_port}/"

    def serve(self) -> None:
        """Serves until the process is interrupted."""
        with self._server:
            self._server.serve_forever()

    def stop(self) -> None:
        self._server.shutdown()

    def page(self) -> tuple[bytes, str]:
        """The page and its nonce."""
        # One at a time: what was read of the run's files is shared.
        with self._lock:
            if time.monotonic() - self._rendered_at >= MIN_SECONDS:
                self._page = self._render(self._nonce).encode()
                self._rendered_at = time.monotonic()
            return self._page, self._nonce


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        """A client that goes away, or is slow, is no error of this process."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(*arguments)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the one page. Everything else is refused."""

    server_version = "longhaul"
    sys_version = ""
    timeout = CLIENT_SECONDS

    def __init__(self, pages: PageServer, *arguments: object) -> None:
        self._pages = pages
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not OWN_NAMES.fullmatch(hosts[0]):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this host goes by another name")
            return
        if self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            page, nonce = self._pages.page()
        except OSError as error:
            # Of a disk that is away, or a folder that must not be read: it may come back.
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, error.strerror)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Content-Security-Policy", POLICY.format(nonce=nonce))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """A request every few seconds is no news."""
