"""Downloads against a real server on loopback that cuts connections and knows ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coa.io.download import TRIES, download

BODY = bytes(range(256)) * 20_000


class Server(ThreadingHTTPServer):
    """Serves BODY; cuts each of the first `cuts` answers after `length` bytes."""

    cuts = 0
    length = 1_000_000
    ranges = True
    seen: list[str]


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.seen.append(wanted)
        start = int(wanted[6:-1]) if wanted and self.server.ranges else 0
        if self.path != "/wheel":
            self.send_error(404)
            return
        if start >= len(BODY):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        end = len(BODY)
        if self.server.cuts > 0:
            self.server.cuts -= 1
            end = start + self.server.length
        self.wfile.write(BODY[start:end])
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Answer)
    made.seen = []
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def address(server: Server, path: str = "/wheel") -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


def test_a_download_that_is_cut_asks_for_the_rest(server: Server, tmp_path: Path) -> None:
    server.cuts, part, lines = 2, tmp_path / "part", list[str]()
    assert download(address(server), part, lines.append)
    assert part.read_bytes() == BODY
    assert server.seen == ["", "bytes=1000000-", "bytes=2000000-"]
    assert lines == ["continuing at 1 MB", "continuing at 2 MB"]


def test_what_a_killed_process_left_is_continued(server: Server, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(BODY[:3_000_000])
    assert download(address(server), part, lambda line: None)
    assert part.read_bytes() == BODY and server.seen == ["bytes=3000000-"]


def test_a_server_without_ranges_sends_everything_again(server: Server, tmp_path: Path) -> None:
    server.ranges, part = False, tmp_path / "part"
    part.write_bytes(b"something else")
    assert download(address(server), part, lambda line: None)
    assert part.read_bytes() == BODY


def test_a_part_longer_than_the_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(BODY + b"more")
    assert download(address(server), part, lambda line: None)
    assert part.read_bytes() == BODY


def test_it_gives_up_after_some_tries_and_keeps_what_it_has(server: Server, tmp_path: Path) -> None:
    server.cuts, server.length, part = 99, 1000, tmp_path / "part"
    assert not download(address(server), part, lambda line: None)
    assert part.read_bytes() == BODY[: 1000 * TRIES]


def test_an_address_that_is_gone_is_left_to_pip(server: Server, tmp_path: Path) -> None:
    assert not download(address(server, "/nothing"), tmp_path / "part", lambda line: None)
    assert len(server.seen) == 1
