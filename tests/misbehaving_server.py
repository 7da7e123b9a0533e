"""A server on loopback that does what a page's server should not, one way per path.

It speaks raw bytes over asyncio, because no library can be made to break HTTP on demand, and runs
in the event loop of the test.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import struct
import subprocess
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Answer = Callable[["Server", Writer, str], Awaitable[None]]

SENTENCE = "The lighthouse of Aldermoor was built in 1887 by the engineer Ada Quill."
PAGE = (
    "<html><head><title>Aldermoor</title></head><body><h1>Aldermoor</h1>"
    f"<p>{SENTENCE}</p><p>See <a href='/keeper'>its first keeper</a>.</p></body></html>"
).encode()


class Server:
    """Where it listens, and the request heads that it saw."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[str] = []
        self.at_once = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def answer(self, reader: Reader, writer: Writer) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                first = await reader.readexactly(1)
                if first == b"\x16":  # a greeting in TLS, to a server that does not speak it
                    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return
                head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self.seen.append(head)
                path = head.split(" ", 2)[1]
                name = path.strip("/").partition("/")[0].partition("?")[0]
                await ANSWERS.get(name, missing)(self, writer, path)
                await writer.drain()
        finally:
            self.at_once -= 1
            writer.close()


@asynccontextmanager
async def misbehaving(trust: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0, ssl=trust)
    server.port = listening.sockets[0].getsockname()[1]
    tasks = asyncio.all_tasks()
    try:
        yield server
    finally:
        listening.close()
        # Answers that never end, end with the test.
        for task in asyncio.all_tasks() - tasks - {asyncio.current_task()}:
            task.cancel()


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(the server's context, a client's that trusts it) of a certificate made for one name."""
    key, made = folder / "key.pem", folder / "made.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", str(key)]
    command += ["-addext", f"subjectAltName=DNS:{name}", "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made, key)
    return serving, ssl.create_default_context(cafile=str(made))


# -- the ways ------------------------------------------------------------------------------------


def head(status: str = "200 OK", kind: str = "text/html", **fields: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", *([f"Content-Type: {kind}"] if kind else [])]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode("latin-1")


def sending(content: bytes, **fields: object) -> Answer:
    """A whole answer with these header fields; `kind` and `status` are the two special ones."""

    async def send(server: Server, writer: Writer, path: str) -> None:
        writer.write(head(Content_Length=len(content), **fields) + content)  # type: ignore[arg-type]

    return send


def raw(content: bytes) -> Answer:
    async def send(server: Server, writer: Writer, path: str) -> None:
        writer.write(content)

    return send


def drip(start: bytes, piece: bytes, pause_s: float = 0.02) -> Answer:
    """A start, then a piece again and again, for ever."""

    async def send(server: Server, writer: Writer, path: str) -> None:
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return send


def to(location: str, status: str = "302 Found") -> Answer:
    """A redirect; {port} and {next} are filled in."""

    async def send(server: Server, writer: Writer, path: str) -> None:
        number = int("0" + "".join(c for c in path if c.isdecimal())) + 1
        where = location.format(port=server.port, next=number)
        writer.write(head(status, "", Location=where, Content_Length=0))

    return send


def reset(start: bytes) -> Answer:
    """Some bytes, and then the connection is torn down."""

    async def send(server: Server, writer: Writer, path: str) -> None:
        writer.write(start)
        await writer.drain()
        await asyncio.sleep(0.05)
        found = writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    return send


async def silent(server: Server, writer: Writer, path: str) -> None:
    await asyncio.sleep(3600)


async def missing(server: Server, writer: Writer, path: str) -> None:
    writer.write(head("404 Not Found", Content_Length=0))


def bomb(megabytes: int) -> bytes:
    packing = zlib.compressobj(9, wbits=31)
    zeros = b"<p>" + bytes(1_000_000)
    return b"".join([*(packing.compress(zeros) for _ in range(megabytes)), packing.flush()])


_PACKED = gzip.compress(PAGE * 50, mtime=0)
_RAW_DEFLATE = zlib.compressobj(9, wbits=-15)

ANSWERS: dict[str, Answer] = {
    "good": sending(PAGE, kind="text/html; charset=utf-8"),
    "keeper": sending(b"<title>Keeper</title><p>The first keeper was Tom Reed.</p>"),
    # time
    "silent": silent,
    "slow_head": drip(b"HTTP/1.1 200 OK\r\n", b"X"),
    "slow_drip": drip(head(), b"."),
    "slow_length": drip(head(Content_Length=100_000), b"."),
    "continue_for_ever": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    # size
    "endless_body": drip(head(), b"<p>more</p>" * 6000, 0),
    "endless_chunks": drip(
        head(Transfer_Encoding="chunked"), b"1f40\r\n" + b"<p>more " * 1000 + b"\r\n", 0
    ),
    "claims_a_terabyte": raw(head(Content_Length=10**12) + b"<p>and then"),
    "gzip_bomb": sending(bomb(40), Content_Encoding="gzip"),
    "endless_headers": drip(b"HTTP/1.1 200 OK\r\n", b"X-More: yes\r\n" * 1000, 0),
    "long_header": drip(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x" * 60_000, 0),
    # redirects
    "circle": to("/circle_back"),
    "circle_back": to("/circle"),
    "itself": to("/itself", "301 Moved Permanently"),
    "ever_on": to("/ever_on/{next}", "307 Temporary Redirect"),
    "nowhere": sending(b"", status="302 Found"),
    "to_metadata": to("http://169.254.169.254/latest/meta-data/"),
    "to_other_port": to("http://127.0.0.1:1/"),
    "to_decimal": to("http://2130706433/"),
    "to_ipv6": to("http://[::1]:{port}/good"),
    "to_mapped": to("http://[::ffff:127.0.0.1]/"),
    "to_name": to("http://inside.example/"),
    "to_user": to("http://public.example@127.0.0.1:{port}/good"),
    "to_file": to("file:///etc/passwd"),
    "to_gopher": to("gopher://127.0.0.1:6379/_INFO"),
    "to_garbage": to("http://[:::/"),
    "to_good": to("/good", "308 Permanent Redirect"),
    # encodings
    "gzip": sending(_PACKED, Content_Encoding="gzip"),
    "raw_deflate": sending(
        _RAW_DEFLATE.compress(PAGE) + _RAW_DEFLATE.flush(), Content_Encoding="deflate"
    ),
    "gzip_cut": sending(_PACKED[:-30], Content_Encoding="gzip"),
    "gzip_damaged": sending(b"\x1f\x8b" + bytes(range(200)), Content_Encoding="gzip"),
    "gzip_twice": sending(gzip.compress(_PACKED, mtime=0), Content_Encoding="gzip, gzip"),
    "brotli": sending(b"\x0b\x02\x80hello\x03", Content_Encoding="br"),
    # charsets
    "wrong_charset": sending(PAGE.replace(b"Quill", b"Qu\xefll"), kind="text/html; charset=utf-8"),
    "latin_charset": sending(PAGE.replace(b"Quill", b"Qu\xefll")),
    "utf8_called_latin": sending(
        PAGE.replace(b"Quill", "Qu\u00efll".encode()), kind="text/html; charset=utf-16"
    ),
    "unknown_charset": sending(PAGE, kind="text/html; charset=x-klingon"),
    "dangerous_charset": sending(PAGE, kind="text/html; charset=unicode_escape"),
    "byte_order_mark": sending(PAGE.decode().encode("utf-16"), kind="text/html; charset=utf-8"),
    # content
    "binary": sending(bytes(range(256)) * 200, kind="text/html"),
    "picture": sending(b"\x89PNG\r\n", kind="image/png"),
    "untyped": sending(PAGE, kind=""),
    "untyped_binary": sending(bytes(range(256)) * 20, kind=""),
    "empty": sending(b""),
    "nothing_visible": sending(b"<html><script>var a = 1;</script></html>"),
    "broken_pdf": sending(b"%PDF-1.7 and nothing of the kind", kind="application/pdf"),
    "deep": sending(b"<div>" * 100_000 + b"<p>" + SENTENCE.encode(), kind="text/html"),
    "unclosed": sending((b"<!-- " * 50_000) + b'<a href="' * 50_000, kind="text/html"),
    "json": sending(b'{"built": 1887, "by": "Ada Quill"}', kind="application/json"),
    "plain": sending(SENTENCE.encode(), kind="text/plain"),
    # connection and protocol
    "reset": reset(b""),
    "reset_later": reset(head(Content_Length=1000) + b"<p>and then"),
    "cut": raw(head(Content_Length=1000) + b"<p>and then"),
    "cut_chunks": raw(head(Transfer_Encoding="chunked") + b"ff\r\nand then"),
    "closed": raw(b""),
    "not_http": raw(b"220 mail.example ESMTP ready\r\n\r\n"),
    "broken_chunks": raw(head(Transfer_Encoding="chunked") + b"zz\r\nhello\r\n0\r\n\r\n"),
    "two_lengths": raw(
        head(Content_Length=4).replace(b"Conn", b"Content-Length: 9\r\nConn") + b"x" * 9
    ),
    # statuses
    "forbidden": sending(b"", status="403 Forbidden"),
    "gone": sending(b"", status="410 Gone"),
    "too_many": sending(b"", status="429 Too Many Requests"),
    "down": sending(b"", status="503 Service Unavailable"),
    "odd_status": sending(b"", status="799 Odd"),
    "no_content": raw(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"),
    "cookie": sending(PAGE, Set_Cookie="session=secret"),
    "big": sending(b"<p>word " * 8_000, kind="text/html"),
}
