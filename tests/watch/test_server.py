"""The server of `longhaul watch`: one page, for this host only."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Event, Thread

import pytest

from trainer.errors import ConfigError
from trainer.watch import server
from trainer.watch.server import PageServer


@contextmanager
def serving(pages: PageServer) -> Iterator[int]:
    """The port of a server that runs."""
    thread = Thread(target=pages.serve)
    thread.start()
    try:
        yield int(pages.url.rpartition(":")[2].rstrip("/"))
    finally:
        pages.stop()
        thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(PageServer(lambda nonce: f"a page with {nonce}", 0)) as port:
        yield port


def answer(
    port: int, *, method: str = "GET", path: str = "/", host: str | None = None
) -> tuple[int, dict[str, str], str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, dict(reply.getheaders()), text


def test_the_page_comes_with_a_policy_that_lets_only_its_script_run(port: int) -> None:
    status, headers, text = answer(port)
    assert status == 200
    nonce = text.removeprefix("a page with ")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert f"script-src 'nonce-{nonce}'" in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert not any(name.startswith("Access-Control") for name in headers)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "[::1]:80", "127.0.0.1"])
def test_a_tunnel_may_have_another_port(port: int, host: str) -> None:
    assert answer(port, host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:1", "localhost.evil:80", "127.0.0.1:x", ""]
)
def test_a_name_that_was_made_to_lead_here_is_refused(port: int, host: str) -> None:
    status, _, text = answer(port, host=host)
    assert status == 421
    assert "a page with" not in text


def test_only_the_page_is_served(port: int) -> None:
    for path in ("/x", "/../etc/passwd", "/?<script>"):
        status, _, text = answer(port, path=path)
        assert status == 404
        assert "<script>" not in text
    assert {answer(port, method=method)[0] for method in ("POST", "PUT", "HEAD", "DELETE")} == {
        501
    }


def test_the_server_listens_on_loopback_only() -> None:
    pages = PageServer(lambda _: "", 0)
    with serving(pages) as port:
        assert pages._server.server_address == ("127.0.0.1", port)


def test_many_requests_share_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MIN_SECONDS", 1000.0)
    rendered = list[str]()

    def render(nonce: str) -> str:
        rendered.append(nonce)
        return "page"

    with serving(PageServer(render, 0)) as port:
        assert {answer(port)[2] for _ in range(5)} == {"page"}
    assert len(rendered) == 1


def test_a_client_that_goes_away_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    sent = Event()

    def render(_: str) -> str:
        sent.set()
        return "page" * (1 << 21)

    with serving(PageServer(render, 0)) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            # Closed with a reset instead of an end.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert sent.wait(30)
        assert answer(port)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_disk_that_is_away_is_an_answer_without_a_page(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def render(_: str) -> str:
        raise OSError(5, "Input/output error")

    with serving(PageServer(render, 0)) as port:
        status, _, text = answer(port)
    assert (status, "Input/output error" in text) == (500, True)
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_refused_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port} cannot be used: .*--port 0"):
            PageServer(lambda _: "", port)
    with pytest.raises(ConfigError, match="--port 70000 cannot be used"):
        PageServer(lambda _: "", 70_000)
