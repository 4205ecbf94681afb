"""A server of S3 on loopback (moto), and a proxy before it that makes faults."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from threading import Lock, Thread
from urllib.error import URLError

import pytest

from tests.system.runs import free_port

BUCKET = "bucket"
URL = f"s3://{BUCKET}/runs/x"
SECRET = "kept-out-of-every-file"
TOKEN = "token-kept-out-of-every-file"
NEEDED = {"obstore": "obstore", "moto": '"moto[server]"'}
ANSWERS = {
    "busy": (503, "SlowDown"),
    "full": (507, "XMinioStorageFull"),
    "expired": (403, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
}


def require_libraries() -> None:
    for package, name in NEEDED.items():
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {name}")


class Proxy:
    """Forwards requests to a server; `fault` names what happens to a request instead."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.fault: Callable[[str, str], str] = lambda _method, _path: ""
        """Names, by method and path: busy, full, expired, denied, cut, slow, dead; "" for
        none.
        """
        self.requests = list[tuple[str, str]]()
        self.lock = Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def first(self, number: int, kind: str, *, method: str = "PUT") -> None:
        """Lets the first requests of a method fail."""
        left = [number]

        def fault(asked: str, _path: str) -> str:
            with self.lock:
                if asked != method or not left[0]:
                    return ""
                left[0] -= 1
                return kind

        self.fault = fault

    def always(self, kind: str, *, method: str = "", part: str = "") -> None:
        """Lets all requests of a method fail whose path has this part."""
        self.fault = lambda asked, path: kind if asked.startswith(method) and part in path else ""

    def heal(self) -> None:
        self.fault = lambda _method, _path: ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        # A client that was killed, or that gave up.
        with suppress(OSError):
            super().handle()

    def _forward(self) -> None:
        with self.proxy.lock:
            self.proxy.requests.append((self.command, self.path))
        fault = self.proxy.fault(self.command, self.path)
        length = int(self.headers.get("Content-Length", 0))
        if fault in ("cut", "dead"):
            self.rfile.read(length // 2 if fault == "cut" else 0)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if fault == "slow":
            time.sleep(1)
        if fault in ANSWERS:
            status, code = ANSWERS[fault]
            text = f"<Error><Code>{code}</Code><Message>a fault</Message></Error>".encode()
            self._answer(status, [("Content-Type", "application/xml")], text)
            return
        link = http.client.HTTPConnection("127.0.0.1", self.proxy.server_port)
        try:
            link.request(self.command, self.path, body, dict(self.headers))
            answer = link.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
        finally:
            link.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        sent = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        if "content-length" not in sent:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815


@contextmanager
def object_server() -> Iterator[Proxy]:
    """A server with an empty bucket, behind a proxy."""
    require_libraries()
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    proxy = Proxy(port)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                make_bucket(port)
                break
            except (URLError, ConnectionError):
                assert server.poll() is None, "the server did not start"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.05)
        yield proxy
    finally:
        proxy.close()
        server.kill()
        server.wait()


def make_bucket(port: int) -> None:
    address = f"http://127.0.0.1:{port}/{BUCKET}"
    urllib.request.urlopen(urllib.request.Request(address, method="PUT")).close()


def empty(proxy: Proxy) -> None:
    """Removes all objects, and faults."""
    proxy.heal()
    proxy.requests.clear()
    address = f"http://127.0.0.1:{proxy.server_port}/moto-api/reset"
    urllib.request.urlopen(urllib.request.Request(address, method="POST")).close()
    make_bucket(proxy.server_port)


def point_environment_at(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the variables from which the library takes endpoint and credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
